"""Every exercise: the stub does not pass, the solution does, plausible wrong answers are rejected."""

import ast
import collections
import functools
import importlib
import importlib.util
import json
import re
from contextlib import nullcontext
from pathlib import Path

from lib import exercises, machine
from lib.course import progress as reader_progress
from lib.exercises import Skip, Wrong, __main__, all_exercises, answers, check
from lib.recorded import notebooks
from lib.recorded.results import ROOT
from lib.tests.exercises import wrong_answers

import nbformat
import numpy as np
import pytest
import torch

EXERCISES = all_exercises()


@functools.cache
def _notebook(number):
    (path,) = notebooks.notebooks(number)
    return path, nbformat.read(path, as_version=4)


def _cell(id):
    """The source of the exercise's cell, and the name of the answer in its `check(...)` call."""
    _, notebook = _notebook(id.split(".")[0])
    call = re.compile(rf'check\("{re.escape(id)}", (\w+)\)')
    cells = [c for c in notebook.cells if "exercise" in c.metadata.get("tags", [])]
    matches = [c for c in cells if call.search(c.source)]
    assert len(matches) == 1, (
        f"{id}: one cell tagged 'exercise' has to call check, {len(matches)} do"
    )
    return matches[0].source, call.search(matches[0].source)[1]


def _solution(id):
    path, _ = _notebook(id.split(".")[0])
    file = ROOT / "notebooks/solutions" / f"{path.stem}.py"
    spec = importlib.util.spec_from_file_location(f"solutions_{path.stem}", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, _cell(id)[1])


def _wrong_answers():
    """One parameter set per wrong answer: exercise, name, and its number in its file. Nothing is imported."""
    for id in EXERCISES:
        file = Path(wrong_answers.__path__[0], f"nb{id.split('.')[0]}.py")
        prefix = _cell(id)[1] + "__"
        for number, name in enumerate(n for n in _names(file) if n.startswith(prefix)):
            yield pytest.param(id, name, number, id=f"{id}-{name}")


@functools.cache
def _names(file):
    """What a module defines at its top, in order."""
    names = []
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.append(node.name)
        elif isinstance(node, ast.Assign):
            names += [target.id for target in node.targets if isinstance(target, ast.Name)]
    return names


def _stub(id, tmp_path):
    """The answer after running the notebook's cell, in the namespace of the notebook's set-up cell."""
    _, notebook = _notebook(id.split(".")[0])
    setup = next(c.source for c in notebook.cells if "setup" in c.metadata.get("tags", []))
    source, name = _cell(id)
    file = tmp_path / "stub.py"  # triton reads the source of a kernel from its file
    imports = [n for n in ast.parse(setup).body if isinstance(n, (ast.Import, ast.ImportFrom))]
    header = "\n".join(ast.unparse(n) for n in imports)
    without_call = re.sub(r"(?m)^check\(.*\)$", "", source)
    file.write_text(f"{header}\n{without_call}")
    spec = importlib.util.spec_from_file_location(f"stub_{name}", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, name)


each = pytest.mark.parametrize("id", EXERCISES)


@each
def test_the_stub_is_open(id, tmp_path):
    assert check(id, _stub(id, tmp_path)).status == "open"


@each
def test_the_solution_is_right(id):
    verdict = check(id, _solution(id))
    if verdict.status == "skipped":
        pytest.skip(verdict.message)
    assert verdict.status == "right", verdict


# there the first that reads what is not its own ends the process, and lanes that nobody defined are 0
@pytest.mark.skipif(machine.HAS_GPU, reason="found by the checkers of a CPU: make test-all runs it")
@pytest.mark.parametrize(("id", "name", "number"), _wrong_answers())
def test_a_wrong_answer_is_rejected(id, name, number):
    module = importlib.import_module(f"{wrong_answers.__name__}.nb{id.split('.')[0]}")
    verdict = check(id, getattr(module, name))
    if verdict.status == "skipped":
        pytest.skip(verdict.message)
    assert verdict.status == "wrong", f"{name} passed: {verdict}"
    assert len(verdict.message) > 15, f"{name}: {verdict} does not say what differs"


@pytest.mark.parametrize("number", [256, np.float16(256), torch.tensor(256.0)], ids=str)
def test_a_number_may_be_a_scalar_of_numpy_or_torch(number):
    assert check("31.2", number).status == "right"


def test_every_exercise_has_two_wrong_answers_or_more():
    count = collections.Counter(parameters.values[0] for parameters in _wrong_answers())
    assert {id: count[id] for id in EXERCISES if count[id] < 2} == {}


@each
def test_the_notebook_gives_title_level_and_minutes(id):
    _, notebook = _notebook(id.split(".")[0])
    exercise = EXERCISES[id]
    heading = f"### {exercise.heading}"
    assert any(heading in c.source for c in notebook.cells), heading


@pytest.mark.parametrize("path", notebooks.notebooks(), ids=lambda p: p.stem)
def test_every_notebook_has_three_exercises_or_more(path):
    number = path.name.split("_")[0]
    assert sum(id.startswith(f"{number}.") for id in EXERCISES) >= 3


def test_a_verdict_never_raises(monkeypatch):
    answers = {"raises": ZeroDivisionError("x"), "is wrong": Wrong("y"), "lacks": Skip("z")}
    statuses = {}
    for name, error in answers.items():

        def checker(answer, error=error):
            raise error

        monkeypatch.setitem(
            exercises._exercises, "99.1", exercises.Exercise("99.1", "t", 1, 1, checker)
        )
        statuses[name] = check("99.1", 1).status
    assert statuses == {"raises": "wrong", "is wrong": "wrong", "lacks": "skipped"}


@pytest.mark.parametrize(
    ("strict", "answer", "raises"),
    [
        ("1", lambda k: k, None),
        ("1", lambda k: k + 1, "✘ 00.2 for a chain"),
        ("1", lambda k: ..., "○ 00.2 not attempted"),
        ("0", lambda k: k + 1, None),
        ("", lambda k: k + 1, None),
    ],
)
def test_a_strict_check_raises_its_verdict(strict, answer, raises, monkeypatch, reader_folder):
    monkeypatch.setenv("FUSED_KERNELS_STRICT", strict)
    wanting = pytest.raises(exercises.NotSolved, match=raises) if raises else nullcontext()
    with wanting:
        check("00.2", answer)
    assert bool(exercises.progress()) == (not raises or "✘" in raises)


def test_a_strict_check_lets_a_skip_pass(monkeypatch):
    def checker(answer):
        raise Skip("no GPU")

    monkeypatch.setenv("FUSED_KERNELS_STRICT", "1")
    monkeypatch.setitem(
        exercises._exercises, "99.1", exercises.Exercise("99.1", "t", 1, 1, checker)
    )
    assert check("99.1", 1).status == "skipped"


def test_an_error_in_an_answer_names_its_case():
    with pytest.raises(Wrong, match="^n = 3: raised IndexError: x$"), exercises.case("n = 3"):
        raise IndexError("x")
    for verdict in (Wrong("y"), Skip("z"), exercises.NotAttempted(), NotImplementedError()):
        with pytest.raises(type(verdict)) as raised, exercises.case("n = 3"):
            raise verdict
        assert raised.value is verdict


def test_what_torch_has_not_implemented_is_no_stub(monkeypatch):
    def checker(answer):
        with exercises.case("n = 3"):
            answer()

    exercise = exercises.Exercise("99.1", "t", 1, 1, checker)
    monkeypatch.setitem(exercises._exercises, "99.1", exercise)
    for error, status in ((NotImplementedError(), "open"), (NotImplementedError("x"), "wrong")):

        def answer(error=error):
            raise error

        assert check("99.1", answer).status == status


def test_an_unknown_exercise_lists_those_there_are():
    with pytest.raises(ValueError, match=r"00\.1"):
        check("77.7", None)


def test_expect_op_names_the_smallest_failing_shape():
    def add_one_below_eight_columns(x):
        return torch.where(torch.arange(x.shape[-1]) < 8, x + 1, x)

    with pytest.raises(Wrong, match=r"at shape \(17, 33\), float32"):
        exercises.expect_op(
            add_one_below_eight_columns, lambda x: x + 1, lambda s, d: (torch.randn(s, dtype=d),)
        )


def test_progress_of_older_versions_is_read(reader_folder):
    old = {"30.2": "right", "01.1": "wrong", "21.4": "right", "40.1": "right"}
    for id, status in old.items():
        reader_progress.append("progress.jsonl", json.dumps({"id": id, "status": status}))
    assert exercises.progress() == {"03.2": "right", "02.1": "wrong", "40.1": "right"}
    check("01.1", lambda x, b: 0)
    assert exercises.progress()["01.1"] == "wrong"
    now = {id for id in exercises.FORMER.values() if id}
    assert len(now) == len([id for id in exercises.FORMER.values() if id])
    assert now <= EXERCISES.keys()


def test_answers_of_older_versions_get_todays_numbers():
    old = {"30.2": 'a = 1\ncheck("30.2", a)', "21.4": 'check("21.4", ...)', "40.1": "b"}
    assert answers.renumbered(old) == {"03.2": 'a = 1\ncheck("03.2", a)', "40.1": "b"}


def test_progress_is_kept_and_reported(reader_folder):
    check("00.2", lambda k: 2 * k)
    check("00.2", lambda k: k)
    check("00.2", lambda k: k + 1)
    check("00.1", lambda m, n, s: 0)
    assert exercises.progress() == {"00.2": "right", "00.1": "wrong"}
    report = __main__.report()
    assert report.startswith(f"1 of {len(EXERCISES)} exercises solved")
    assert "✔ 00.2" in report and "✘ 00.1" in report and "○ 00.3" in report
