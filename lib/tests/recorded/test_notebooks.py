"""The committed notebooks: recorded, current, small, free of this machine; and the tools that make them so."""

import ast
import collections
import inspect
import json
import os
import re
import subprocess
import sys

from lib.recorded import notebooks, results, shown
from lib.recorded.results import ROOT

import nbformat
import pytest

NOTEBOOKS = notebooks.notebooks()
each = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
# Notebooks that are written and not yet recorded on a GPU; only for that time.
NOT_RECORDED_YET = set()


def read(path):
    return nbformat.read(path, as_version=4)


def prose_of(path):
    return "\n".join(c.source for c in read(path).cells if c.cell_type == "markdown")


@each
def test_outputs_belong_to_this_code(path):
    status = notebooks.status(path)
    if path.stem in NOT_RECORDED_YET:
        assert status == results.NOT_RECORDED, f"{path.stem} is recorded: take it off the list"
        return
    number = path.name.split("_")[0]
    assert status != "stale", f"code cells changed since the recording: make record NB={number}"
    assert status.startswith("recorded on NVIDIA"), f"{status}: make record NB={number}"


@each
def test_size(path):
    assert path.stat().st_size <= notebooks.MAX_BYTES


@each
def test_outputs_hold_nothing_of_one_machine(path):
    for cell in read(path).cells:
        for output in cell.get("outputs", []):
            assert output.get("name") != "stderr", cell.source
            assert output.output_type != "error", cell.source
            data = {k: v for k, v in output.get("data", {}).items() if not k.startswith("image/")}
            text = json.dumps([output.get("text", ""), data])
            match = re.search(r"(?<![\w.…/])/(tmp|root|home|opt|usr|work|mnt)/\w+", text)
            assert not match, f"{match[0]} in the output of: {cell.source}"


@each
def test_sources_shown_are_those_of_lib(path):
    old = [text.strip().splitlines()[0] for _, text, _ in shown.outdated(read(path))]
    assert not old, f"python -m lib.recorded.shown --write: {old}"


def test_an_outdated_source_is_found_and_replaced(tmp_path, monkeypatch):
    source = inspect.getsource(notebooks.status)
    cell = nbformat.v4.new_code_cell("show_source(notebooks.status)")
    for text in (source.replace("path", "road", 1), source, "def status(other):\n    return 3"):
        data = {"text/markdown": f"```python\n{text.strip()}\n```"}
        cell.outputs.append(nbformat.v4.new_output("display_data", data))
    notebook = nbformat.v4.new_notebook(cells=[cell])
    ((output, old, now),) = shown.outdated(notebook)
    assert output is cell.outputs[0] and "road" in old and now == source.strip()
    nbformat.write(notebook, tmp_path / "99_test.ipynb")
    monkeypatch.setattr(notebooks, "notebooks", lambda: [tmp_path / "99_test.ipynb"])
    assert shown.main([]) == 1
    assert shown.main(["--write"]) == 0 and shown.main([]) == 0


@each
def test_headings(path):
    text = prose_of(path)
    headings = re.findall(r"(?m)^## (.*)", text)
    assert re.match(rf"# {path.name[:2]} · \w+", text)
    assert headings[:2] == ["You will be able to", "Set up"]
    assert headings[-2:] == ["Recap", "Further reading"]


@each
def test_pace(path):
    lengths = sorted(len(c.source.splitlines()) for c in read(path).cells if c.cell_type == "code")
    assert lengths[len(lengths) // 2] <= 8, "the median code cell"
    assert lengths[int(0.9 * len(lengths))] <= 24, "nine code cells in ten"


@each
def test_length(path):
    """Where a page has become two. Its subject decides its length; these are no targets."""
    cells = read(path).cells
    code = "\n".join(c.source for c in cells if c.cell_type == "code")
    prose = re.sub(r"\]\([^)]*\)", "]", prose_of(path))  # without where links lead
    assert len(cells) <= 120
    assert sum(bool(re.search(r"\w", word)) for word in prose.split()) <= 3500
    assert sum(bool(line.strip()) for line in code.splitlines()) <= 600


@each
def test_code_cells_are_numbered_as_a_run_numbers_them(path):
    cells = [c for c in read(path).cells if c.cell_type == "code"]
    assert [c.execution_count for c in cells] == list(range(1, len(cells) + 1))


def names_of_lib(source):
    """What a cell takes from lib: a module counts as one name, `from lib.x import a, b` as two."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] == "lib")
        elif isinstance(node, ast.ImportFrom) and node.module.split(".")[0] == "lib":
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@each
def test_the_set_up_takes_at_most_six_names_of_lib(path):
    set_up = [c.source for c in read(path).cells if "setup" in c.metadata.get("tags", [])]
    assert len(set_up) == 1
    names = list(names_of_lib(set_up[0]))
    assert len(names) <= 6, names


def test_names_of_lib_are_counted():
    source = "import torch, lib.cache\nfrom lib import machine\nfrom lib.a import b, c as d\nfrom x import y"
    assert list(names_of_lib(source)) == ["lib.cache", "lib.machine", "lib.a.b", "lib.a.c"]


# Names from here make tables, plots, predictions and look-ups. `show_source` shows a function under study.
HARNESS = ("lib.course", "lib.pages", "lib.recorded", "pandas", "matplotlib")


def lines_of_code(notebook):
    """(harness, all) lines of the code cells that a reader sees, without imports.

    Harness is a visible cell tagged so, and elsewhere a statement that names something of HARNESS, or something
    that such a statement or a folded cell defines. An exercise's cell is under study.
    """
    harness, cells = set(), []
    for cell in (c for c in notebook.cells if c.cell_type == "code"):
        lines = [line for line in cell.source.splitlines() if not line.startswith(("%", "!"))]
        tree = ast.parse("\n".join(lines))
        cells.append((cell, tree))
        for node in ast.walk(tree):
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                prefix = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
                names = {
                    a.asname or a.name
                    for a in node.names
                    if f"{prefix}{a.name}".startswith(HARNESS)
                }
                harness |= names - {"show_source"}
    count = collections.Counter()
    for cell, tree in cells:
        is_folded = cell.metadata.get("jupyter", {}).get("source_hidden", False)
        tags = cell.metadata.get("tags", [])
        for node in tree.body:
            names = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
            is_harness = is_folded or "harness" in tags or bool(names & harness)
            is_function = isinstance(node, (ast.FunctionDef, ast.ClassDef))
            if is_function and is_harness and "exercise" not in tags:
                harness.add(node.name)
            if not is_folded and not isinstance(node, (ast.Import, ast.ImportFrom)):
                first = min(n.lineno for n in [node, *getattr(node, "decorator_list", [])])
                count["all"] += node.end_lineno - first + 1
                if is_harness and "exercise" not in tags:
                    count["harness"] += node.end_lineno - first + 1
    return count["harness"], count["all"]


@each
def test_three_quarters_of_what_is_visible_is_under_study(path):
    harness, lines = lines_of_code(read(path))
    assert harness <= lines / 4, f"{harness} of {lines} lines make tables, plots and predictions"


def test_visible_harness_is_counted():
    def lines(*cells):
        notebook = nbformat.v4.new_notebook()
        for source, metadata in cells:
            notebook.cells.append(nbformat.v4.new_code_cell(source, metadata=metadata))
        return lines_of_code(notebook)

    kernel = "@triton.jit\ndef kernel(x_ptr):\n    pass"
    plot = "import matplotlib.pyplot as plt\ndef draw(x):\n    plt.plot(x)"
    assert lines((kernel, {})) == (0, 3)
    assert lines((kernel, {}), (plot, {}), ("draw(3)", {})) == (3, 6)
    folded = {"jupyter": {"source_hidden": True}}
    assert lines((kernel, {}), (plot, folded), ("draw(3)", {})) == (1, 4)
    assert lines((kernel, {"tags": ["harness"]})) == (3, 3)
    assert lines(
        ("from lib.course.show import show_source as s, table_of\ns(1)\ntable_of(2)", {})
    ) == (2, 2)
    assert lines(("from lib.course.show import show_source\nshow_source(1)", {})) == (0, 1)
    stub = "from lib.recorded import results\nresults.load(1)"
    assert lines((stub, {"tags": ["exercise"]})) == (0, 1)


MAKES_A_TABLE = re.compile(
    r"(\w+\.)?(style_table|table_of|explain|beside|describe)\(|.*\.(set_caption|table|round)\("
)


def lost_tables(source):
    """Tables that a cell makes and nobody sees: calls that are statements, and not the cell's last."""
    *before, last = ast.parse(source).body or [None]
    for node in before:
        call = node.value if isinstance(node, ast.Expr) else None
        text = ast.unparse(call) if isinstance(call, ast.Call) else ""
        if MAKES_A_TABLE.match(text) and not text.startswith(("display(", "print(")):
            yield text


@each
def test_every_table_is_seen(path):
    for cell in (c for c in read(path).cells if c.cell_type == "code"):
        source = re.sub(r"(?m)^[%!].*", "", cell.source)
        assert list(lost_tables(source)) == [], "end the cell with it, or display(...) it"


def test_lost_tables_are_found():
    for table in (
        "style_table(x).set_caption('c')",
        "show.table_of(x)",
        "costs.round(1)",
        "seen.table()",
    ):
        assert len(list(lost_tables(f"{table}\ny = 1"))) == 1
        assert not list(lost_tables(f"y = 1\n{table}"))
        assert not list(lost_tables(f"display({table})\nshown = {table}\ny = 1"))


@each
def test_figures_have_alt_text(path):
    for cell in read(path).cells:
        for output in cell.get("outputs", []):
            if "image/png" in output.get("data", {}):
                assert len(output.metadata.get("image/png", {}).get("alt", "")) > 20, cell.source


@each
def test_the_readme_lists_it(path):
    assert f"notebooks/{path.name}" in (ROOT / "README.md").read_text()


def glossary():
    """(term, the notebook that explains it) of every entry."""
    text = (ROOT / "notebooks/glossary.md").read_text()
    entries = re.findall(r"(?m)^### (.+)\n\n.+ \[\d\d\]\((\w+\.ipynb)\)$", text)
    assert len(entries) == text.count("### ")
    return entries


def anchor(term):
    return f"(glossary.md#{term.lower().replace(' ', '-')})"


def test_glossary_and_notebooks_link_each_other():
    terms = [term for term, _ in glossary()]
    assert terms == sorted(terms, key=str.lower)
    prose = {path.name: prose_of(path) for path in NOTEBOOKS}
    for term, home in glossary():
        assert anchor(term) in prose[home], f"{home} explains {term}: link it once"
    linked = {a for text in prose.values() for a in re.findall(r"\(glossary\.md#[^)]*\)", text)}
    assert linked == {anchor(term) for term in terms}


# Everything but prose: code, links, formulas, headings, the rows of the first table, the link to the next.
NO_PROSE = re.compile(
    r"```.*?```|`[^`]*`|\[[^\]]*\]\([^)]*\)|\$[^$\n]*\$"
    r"|(?m:^(#|Next: |\| (Before this|Library|Needs|Time) )[^\n]*$)",
    re.DOTALL,
)


def first_use(term, prose):
    """(is it a link to the glossary?, the words around it) of a term's first use in a page's prose; or None."""
    linked = re.sub(rf"\[[^\]]*\]{re.escape(anchor(term))}", "\0", prose)
    # letters of an acronym have to be capitals
    case = 0 if re.search("[A-Z]{2}", term) else re.IGNORECASE
    words = NO_PROSE.sub(" ", linked)
    use = re.search(rf"\0|(?<![\w-]){re.escape(term)}s?(?![\w-])", words, case)
    return use and (use[0] == "\0", words[max(0, use.start() - 50) : use.end() + 20])


def test_a_term_is_linked_where_the_route_first_uses_it():
    prose, name = {}, NOTEBOOKS[0].name
    while name:  # from 00 on to where each page's last link leads
        prose[name] = prose_of(ROOT / "notebooks" / name)
        (name, *_) = re.findall(r"(?m)^Next: \[.*?\]\((\w+\.ipynb)\)", prose[name]) or [None]
    assert len(prose) == len(NOTEBOOKS)
    for term, _ in glossary():
        uses = ((name, use) for name in prose if (use := first_use(term, prose[name])))
        name, (is_linked, around) = next(uses)
        assert is_linked, f"{name} says {term} for the first time, link it there: {around!r}"


# Marked in several notebooks and no terms.
ORDINARY = {"cuda", "measured here"} | set(
    "all and catch choose column count decide derive find first is last naive name one ops predict read "
    "recorded say sum tell two write your".split()
)


def test_what_several_notebooks_mark_is_in_the_glossary():
    """An emphasized word, or two, is a term or an ordinary word."""
    terms = {term.lower() for term, _ in glossary()}
    marks = collections.defaultdict(set)
    for path in NOTEBOOKS:
        prose = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", prose_of(path))
        for mark in re.findall(r"(?<![*\w])\*{1,2}([A-Za-z][\w -]{1,30}?)\*{1,2}(?![*\w])", prose):
            marks[mark.lower().removeprefix("the ")].add(path.name)
    several = {mark for mark, pages in marks.items() if len(pages) > 1}
    assert {m for m in several - ORDINARY if not {m, m.removesuffix("s")} & terms} == set()


def test_the_first_use_of_a_term_is_found():
    link = "[Spills](glossary.md#spill)"
    assert first_use("spill", f"# Spill\n\n`spill` [a spill](x.md) spilled $spill$ {link} spill")[0]
    assert first_use("spill", f"Two spills. {link}") == (False, "Two spills. \0")
    assert first_use("SM", "an sm") is None


def test_the_first_win_says_in_a_sentence_that_a_compiler_is_missing():
    cells = [c.source for c in read(NOTEBOOKS[0]).cells if c.cell_type == "code"]
    (k,) = (k for k, source in enumerate(cells) if "except InductorError" in source)
    assert "1 << 25" in cells[k - 1] and "def brighten_eager" in cells[k - 2]
    smaller = cells[k - 1].replace("1 << 25", "1 << 10")
    code = f"from lib import machine\nimport torch\n\n{cells[k - 2]}\n\n{smaller}\n\n{cells[k]}"
    env = os.environ | {"CXX": "no-such-compiler", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.startswith("torch.compile needs a C++ compiler for this;")
    assert "InvalidCxxCompiler" in done.stdout and len(done.stdout.splitlines()) == 2


# --- the tools -----------------------------------------------------------------------------------------------


def tiny(*sources):
    return nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(s) for s in sources])


def test_the_hash_is_of_code_cells_alone():
    notebook = tiny("x = 1", "x + 1")
    before = notebooks.code_hash(notebook)
    notebook.cells.insert(0, nbformat.v4.new_markdown_cell("prose"))
    assert notebooks.code_hash(notebook) == before
    notebook.cells[1].source = "import y\nx = 1"
    assert notebooks.code_hash(notebook) == before
    notebook.cells[1].source = "x = 2"
    assert notebooks.code_hash(notebook) != before


def test_status_distinguishes_stale_from_recorded(tmp_path):
    notebook, path = tiny("1 + 1"), tmp_path / "nb.ipynb"
    stamp = {"gpu": "NVIDIA H200", "torch": "2.11.0", "triton": "3.6.0", "date": "2026-11-21"}
    notebook.metadata[notebooks.KEY] = {**stamp, "code_hash": notebooks.code_hash(notebook)}
    nbformat.write(notebook, path)
    assert notebooks.status(path).startswith("recorded on NVIDIA H200")
    notebook.cells[0].source = "1 + 2"
    nbformat.write(notebook, path)
    assert notebooks.status(path) == "stale"


def test_cleaning_drops_stderr_and_paths():
    notebook = tiny("1")
    streams = [("stderr", "a warning"), ("stdout", f"wrote {ROOT}/data/results/h200/x.json")]
    notebook.cells[0].outputs = [
        nbformat.v4.new_output("stream", name=n, text=t) for n, t in streams
    ]
    notebooks.clean(notebook)
    assert [o.text for o in notebook.cells[0].outputs] == ["wrote …/x.json"]


def test_an_unknown_notebook_lists_those_there_are():
    with pytest.raises(ValueError, match="00, .*31"):
        notebooks.notebooks("77")


def test_execute_runs_cells_and_raises_where_one_fails(tmp_path):
    from nbclient.exceptions import CellExecutionError

    notebook = tiny("6 * 7")
    notebooks.execute(notebook, tmp_path)
    assert notebook.cells[0].outputs[0].data["text/plain"] == "42"
    with pytest.raises(CellExecutionError, match="ZeroDivisionError"):
        notebooks.execute(tiny("1 / 0"), tmp_path)
