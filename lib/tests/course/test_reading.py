"""Texts beside their meaning, and what a shell prints."""

from lib.course import compiler_drawn, reading

import pytest

KERNEL = "def kernel(x_ptr):\n    x = load(x_ptr)\n    store(x)\n"


def test_a_part_is_cut_at_both_ends_and_on_the_right():
    text = "a\nb begins\n" + 100 * "c" + "\nd ends\ne"
    assert reading.part(text, "begins", "ends").splitlines() == [
        "b begins",
        95 * "c" + "…",
        "d ends",
    ]


def test_lines_stand_beside_their_meaning():
    table = reading.explain(KERNEL, {r"x = .*": "in", r"^ +store.*": "out"}).data
    assert table.to_dict("list") == {
        "line": ["x = load(x_ptr)", "store(x)"],
        "what it says": ["in", "out"],
    }
    rows = [(r"x = .*", r"y = .*", "a name"), (None, r"store.*", "theirs alone")]
    table = reading.beside(KERNEL, KERNEL.replace("x = ", "y = "), rows).data
    assert table.iloc[0].to_list() == ["x = load(x_ptr)", "y = load(x_ptr)", "a name"]
    assert table.iloc[1].to_list() == ["–", "store(x)", "theirs alone"]


def test_a_shell_runs_a_script_with_lib_and_this_python():
    script = "import os, sys, lib\nprint(os.environ['WORD'], sys.version_info[:2])"
    printed = reading.shell("WORD=hello python script.py", script=script)
    assert printed.startswith("hello (3, ")
    with pytest.raises(RuntimeError, match="(?s)`python script.py` failed.*ZeroDivisionError"):
        reading.shell("python script.py", script="1 / 0")


def test_drawings_have_alt_text(monkeypatch):
    texts = []
    monkeypatch.setattr(compiler_drawn, "show_figure", lambda figure, alt: texts.append(alt))
    compiler_drawn.show_flat()
    compiler_drawn.show_reductions()
    compiler_drawn.show_loop_nests()
    assert len(texts) == 3 and all(len(text) > 100 for text in texts)
