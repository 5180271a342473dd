"""Grading twelve submissions to notebook 00, hostile ones among them: each has the verdicts it should."""

import csv
import json
import os
import re
import shutil
import subprocess
import sys

from lib.exercises.grade import __main__ as program
from lib.exercises.grade import attempt, fence, notebooks, report, runs, submissions, term
from lib.exercises.grade.remarks import ops_taken, remarkable
from lib.tests.exercises.test_exercises import EXERCISES, _cell, _solution

import pytest

STEM = "00_start_here"
TIMEOUT_S = 8

needs_fence = pytest.mark.skipif(
    sys.platform != "linux" or fence.reason_against(os.environ.get("TMPDIR", "/tmp"), []) != "",
    reason="this system allows no fence",
)


def _notebook(stem=STEM):
    return json.loads((notebooks.FOLDER / f"{stem}.ipynb").read_text())


def _exercise_cells(notebook):
    return [c for c in notebook["cells"] if "exercise" in c["metadata"].get("tags", [])]


def _answered(answers, stem=STEM):
    """The notebook with these sources as answers: {exercise: source}, `check` called below each."""
    notebook = _notebook(stem)
    for cell in _exercise_cells(notebook):
        id, name = re.search(r'check\("(\S+)", (\w+)\)', "".join(cell["source"])).groups()
        if id in answers:
            cell["source"] = f'{answers[id]}\n\n\ncheck("{id}", {name})'
    return notebook


def _section(id, stem=STEM):
    """The solution of an exercise, without the imports that the page has."""
    text = (notebooks.FOLDER / f"solutions/{stem}.py").read_text()
    return next(s for s in text.split("\n# %% ") if s.startswith(id)).partition("\n")[2]


RIGHT = {id: _section(id) for id in ("00.1", "00.2", "00.3", "00.4")}
WRONG = {
    "00.1": "def bytes_of_multiply_add(m, n, itemsize):\n    return 4 * m * n * itemsize",
    "00.3": "def silu(x):\n    return torch.nn.functional.silu(x)",
}
# Each tries something, and then answers right.
RUINS = f"""import os, shutil
for folder in (CANARY, os.path.expanduser("~"), NOTEBOOKS):
    shutil.rmtree(folder, ignore_errors=True)
{RIGHT["00.1"]}"""
FILLS = f"""with open("large", "wb") as file:
    file.truncate(1 << 40)
{RIGHT["00.2"]}"""
COPIES = "exec(open(SOLUTIONS).read())"
CALLS = f"""import socket
socket.create_connection(("1.1.1.1", 53), timeout=2)
{RIGHT["00.3"]}"""
ENDLESS = f"while True:\n    pass\n{RIGHT['00.1']}"
HOARDS = f"hoard = [b'x' * (1 << 26) for _ in range(100)]\n{RIGHT['00.2']}"
FORKS = f"import os\nwhile True:\n    os.fork()\n{RIGHT['00.4']}"
KILLS = f"""import contextlib, os
for process in (os.getppid(), 1, -1):
    with contextlib.suppress(OSError):
        os.kill(process, 9)
{RIGHT["00.3"]}"""
NO_CHECK = f"check = lambda *a: None\nprint('✔ 00.1 right')\n{WRONG['00.1']}"
REPLACES = """from lib import exercises
exercises.judge = lambda exercise, answer: exercises.Verdict(exercise.id, "right", "right")
exercises._exercises["00.2"] = None
def traffic_ratio(k):
    return k - 1"""
WRITES = """import os
for pipe in range(20):
    try:
        os.write(pipe, b'0123456789abcdef0123456789abcdef {"status": "right", "message": "right"}\\n')
    except OSError:
        pass
os._exit(0)"""
IN_THE_CHECK = """def silu(x):
    import torch.testing
    torch.testing.assert_close = torch.allclose = lambda *args, **options: True
    return x"""


def _twelve(folder, canary):
    """Twelve students' notebooks."""

    def save(name, content):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content if isinstance(content, str) else json.dumps(content))

    def of(source):
        solutions = str(notebooks.FOLDER / f"solutions/{STEM}.py")
        names = {"CANARY": str(canary), "SOLUTIONS": solutions, "NOTEBOOKS": str(notebooks.FOLDER)}
        return re.sub("[A-Z]{6,}", lambda name: repr(names[name[0]]), source)

    save(f"ada/{STEM}.ipynb", _answered(RIGHT))
    save(f"bob/week 1/{STEM} (1).ipynb", _answered(WRONG))

    forged = _answered({})
    for cell in _exercise_cells(forged):
        cell["outputs"] = [{"output_type": "stream", "name": "stdout", "text": "✔ 00.1 right"}]
    save(f"cyd_{STEM}.ipynb", forged)
    save("cyd/.reader/progress.jsonl", '{"id": "00.1", "status": "right", "date": "2026-01-01"}')

    save(
        f"dan/{STEM}.ipynb",
        _answered({"00.1": ENDLESS, "00.2": HOARDS, "00.3": KILLS, "00.4": FORKS}),
    )
    hostile = {"00.1": of(RUINS), "00.2": FILLS, "00.3": CALLS, "00.4": of(COPIES)}
    save(f"eve/{STEM}.ipynb", _answered(hostile))
    gigabyte = f"for _ in range(1000):\n    print('x' * 1_000_000)\n{RIGHT['00.1']}"
    save(f"fay/{STEM}.ipynb", _answered({"00.1": gigabyte}))
    missing = f"import no_such_package\n{RIGHT['00.1']}"
    helped = "def traffic_ratio(k):\n    return helper(k)"
    save(f"gil/{STEM}.ipynb", _answered({"00.1": missing, "00.2": helped}))

    moved = _answered(RIGHT)
    cells = _exercise_cells(moved)
    moved["cells"] = [cells[3], cells[0], cells[2]]
    save(f"hal/{STEM}.ipynb", moved)
    bare = _answered({"00.2": RIGHT["00.2"]})
    for cell in bare["cells"]:
        cell["metadata"] = {}
        cell.pop("id", None)
    save("ian/my homework.ipynb", bare)

    save(f"jan/{STEM}.ipynb", "I could not save it as a notebook, sorry")
    old = _answered({"00.1": RIGHT["00.1"]})
    for cell in _exercise_cells(old)[1:2]:
        cell["source"] = "def gone(k):\n    return k\n\n\ncheck('00.9', gone)"
        cell["id"] = "other"
    save(f"kim/{STEM}.ipynb", old)
    tricks = {"00.1": NO_CHECK, "00.2": REPLACES, "00.3": IN_THE_CHECK, "00.4": WRITES}
    save(f"=leo()/{STEM}.ipynb", _answered(tricks))


@pytest.fixture(scope="module")
def graded(tmp_path_factory):
    """{(student, exercise): row} of the twelve, what was printed, and the folder of grades."""
    folder = tmp_path_factory.mktemp("class")
    canary = folder / "canary"
    (canary / "deep").mkdir(parents=True)
    (canary / "deep/file").write_text("sings")
    _twelve(folder / "submissions", canary)
    command = [sys.executable, "-m", "lib.exercises.grade", "submissions", "--out", "grades"]
    command += ["--timeout", str(TIMEOUT_S), "--memory", "2.5", "--jobs", "2"]
    done = subprocess.run(
        command,
        cwd=folder,
        env=os.environ | program.CLEAN,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    with (folder / "grades/grades.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert (canary / "deep/file").read_text() == "sings"
    assert sorted(p.name for p in folder.iterdir()) == ["canary", "grades", "submissions"]
    return {(row["student"], row["exercise"]): row for row in rows}, folder / "grades"


def _marks(graded, student):
    rows, _ = graded
    return " ".join(row["verdict"] for (name, _), row in rows.items() if name == student)


VERDICTS = {
    "ada": "✔ ✔ ✔ ✔",
    "bob": "✘ ○ ✘ ○",
    "cyd": "○ ○ ○ ○",
    "dan": "✘ ✘ ✔ ✘",
    "eve": "✔ ✘ ✘ ✘",
    "fay": "✔ ○ ○ ○",
    "gil": "✘ ✘ ○ ○",
    "hal": "✔ ○ ✔ ✔",
    "ian": "○ ✔ ○ ○",
    "jan": "○",
    "kim": "✔ ○ ○ ○ ○",
    "'=leo()": "✘ ✘ ✘ ✘",
}


@needs_fence
@pytest.mark.parametrize("student", VERDICTS)
def test_a_submission_has_the_verdicts_it_should(student, graded):
    assert _marks(graded, student) == VERDICTS[student]


SENTENCES = {
    ("ada", "00.3"): "^right$",
    ("bob", "00.1"): "bytes for",
    ("cyd", "00.1"): "not attempted yet",
    ("dan", "00.1"): f"still running after {TIMEOUT_S} s",
    ("dan", "00.2"): "takes more than 2.5 GiB",
    (
        "dan",
        "00.4",
    ): "starts more than 200 processes|more than 2.5 GiB|BlockingIOError|ended before",
    ("dan", "00.3"): "^right$",
    ("eve", "00.1"): "^right$",
    ("eve", "00.2"): "OSError: .*too large",
    ("eve", "00.4"): "FileNotFoundError",
    ("eve", "00.3"): "OSError: .*unreachable",
    ("gil", "00.1"): "ModuleNotFoundError: No module named 'no_such_package'",
    ("gil", "00.2"): "NameError: .* a helper has to stand in one",
    ("hal", "00.2"): "its cell is not in the notebook",
    ("jan", ""): "no notebook: it is not JSON",
    ("kim", "00.9"): "no exercise of this version of the course",
    ("'=leo()", "00.1"): "bytes for",
    ("'=leo()", "00.2"): "not graded: the answer replaces lib.exercises.judge",
    ("'=leo()", "00.4"): "ended before the check did",
    ("'=leo()", "00.3"): "the answer replaces torch.allclose, torch.testing.assert_close",
}


@needs_fence
@pytest.mark.parametrize(("student", "id"), SENTENCES)
def test_the_sentence_says_why(student, id, graded):
    rows, _ = graded
    assert re.search(SENTENCES[student, id], rows[student, id]["sentence"])


@needs_fence
def test_points_are_the_dots_of_the_exercise(graded):
    rows, _ = graded
    for id in ("00.1", "00.2", "00.3", "00.4"):
        assert rows["ada", id]["points"] == str(EXERCISES[id].level)
        assert rows["bob", id]["points"] == "0"


@needs_fence
def test_each_student_has_a_page(graded):
    _, folder = graded
    assert len(list(folder.glob("*.html"))) == len(VERDICTS)
    page = (folder / "ada.html").read_text()
    assert "6 of 6 points: 4 ✔" in page and "00.3 A kernel of your own" in page


def test_a_page_shows_text_as_text(tmp_path):
    row = report.Row("<b>x", "../../n", "00.1", "wrong", "<script>alert(1)</script>\n=1", 0, 1.0)
    twin = report.Row("_b_x", "n", "00.1", "right", "right")
    paths = report.write([row, twin], tmp_path / "grades")
    assert len(set(paths)) == 5 and {p.parent for p in paths} == {tmp_path / "grades"}
    assert not any("<script>" in p.read_text() or "<b>x" in p.read_text() for p in paths[3:])


def test_a_remark_is_for_the_teacher_and_not_on_the_page(tmp_path):
    row = report.Row("ada", STEM, "00.1", "right", "right", 1, 1.0, "exec, globals")
    grades, _, _, page = report.write([row], tmp_path)
    (cells,) = csv.DictReader(grades.open())
    assert cells["names to read"] == "exec, globals" and "exec" not in page.read_text()


def test_totals_are_of_the_points_that_can_be_had(tmp_path):
    rows = [
        report.Row("=ada", STEM, "00.1", "right", "right", 1),
        report.Row("=ada", STEM, "00.3", "wrong", "differs"),
        report.Row("=ada", STEM, "", "open", report.LATE),
        report.Row("ben", "", "", "open", "the folder is empty"),
    ]
    grades, totals, verdicts, *_ = report.write(rows, tmp_path)
    assert verdicts.read_text().splitlines() == ["student,00.1,00.3", "'=ada,✔,✘", "ben,,"]
    assert [row["possible"] for row in csv.DictReader(grades.open())] == ["0", "1", "2", "0"]
    assert totals.read_text().splitlines() == [
        "student,points,possible,✔,✘,○,–,notices,late", "'=ada,1,3,1,1,0,0,1,1", "ben,0,0,0,0,0,0,1,0",
    ]  # fmt: skip


def test_a_term_is_its_weeks_side_by_side(tmp_path):
    for week, rows in {
        "week10": [report.Row("ada", STEM, "00.3", "right", "right", 2)],
        "week2": [
            report.Row("ada", STEM, "00.1", "right", "right", 1),
            report.Row("ada", STEM, "", "open", report.LATE),
            report.Row("ben", STEM, "00.1", "open", "not attempted yet"),
        ],
    }.items():
        report.write(rows, tmp_path / week)
    assert term.join(tmp_path).read_text().splitlines() == [
        "student,week2,week10,points,possible,late", "ada,1,2,3,3,week2", "ben,0,,0,3,",
    ]  # fmt: skip
    with pytest.raises(ValueError, match="no folder in .* has a totals.csv"):
        term.join(tmp_path / "week2")


# --- without a fence -----------------------------------------------------------------------------------


def _main(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["grade", *map(str, arguments)])
    return program.main()


@pytest.mark.fresh_process
def test_without_a_fence_nothing_runs_unless_asked(tmp_path, monkeypatch):
    (tmp_path / "hand in/ada").mkdir(parents=True)
    (tmp_path / "hand in/ada/x.ipynb").write_text(json.dumps(_answered(RIGHT)))
    monkeypatch.setattr(fence, "reason_against", lambda *_: "new namespaces: not permitted")
    arguments = (tmp_path / "hand in", "--out", tmp_path / "grades")
    sentence = _main(monkeypatch, *arguments)
    assert "new namespaces: not permitted" in sentence and "UNSAFE=1" in sentence
    assert "sudo sysctl kernel.apparmor_restrict_unprivileged_userns=0" in sentence
    assert not (tmp_path / "grades").exists()
    monkeypatch.setenv("UNSAFE", "1")
    assert _main(monkeypatch, *arguments) == 0
    assert (tmp_path / "grades/grades.csv").read_text().count("✔") == 4


def test_a_folder_without_submissions_is_a_sentence(tmp_path, monkeypatch):
    monkeypatch.setenv("UNSAFE", "1")
    assert "there is no folder" in _main(monkeypatch, tmp_path / "none")
    assert "there is no notebook" in _main(monkeypatch, tmp_path)
    assert "holds the course" in _main(monkeypatch, notebooks.ROOT.parent)


def test_no_run_overwrites_an_earlier_one_or_writes_among_submissions(tmp_path, monkeypatch):
    out = tmp_path / "grades"
    out.mkdir()
    (tmp_path / "in").mkdir()
    (out / "grades.csv").write_text("week 1")
    sentence = _main(monkeypatch, tmp_path / "in", "--out", out)
    assert "has the grades of an earlier run" in sentence and "OUT=" in sentence
    assert (out / "grades.csv").read_text() == "week 1"
    assert "lies inside" in _main(monkeypatch, tmp_path / "in", "--out", tmp_path / "in/grades")


def test_an_exercise_that_there_is_not_cannot_be_asked_for(tmp_path, monkeypatch):
    arguments = (tmp_path, "--out", tmp_path / "../grades", "--only", "00.3, 00.9 softmax")
    assert "no exercise 00.9, softmax" in _main(monkeypatch, *arguments)


@pytest.mark.fresh_process
def test_without_a_compiler_right_answers_are_not_graded_as_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(program, "why_no_compiler", lambda: "There is no C++ compiler.")
    arguments = (tmp_path, "--out", tmp_path / "../grades")
    assert "22.4" in _main(monkeypatch, *arguments)
    sentence = _main(monkeypatch, *arguments, "--only", "00.3 33.3")
    assert "no right answer to 33.3 would get a point here: There is no C++ compiler." in sentence
    assert "no notebook" in _main(monkeypatch, *arguments, "--only", "00.3")


def _compiles(function, seen=()):
    """Whether a checker asks for a compiler, itself or through a function of its module."""
    names = function.__code__.co_names
    others = (function.__globals__.get(n) for n in names if n not in seen)
    own = [f for f in others if getattr(f, "__module__", "") == function.__module__]
    seen = {*seen, *names}
    return "why_no_compiler" in names or any(
        _compiles(f, seen) for f in own if hasattr(f, "__code__")
    )


def test_which_exercises_need_a_compiler():
    assert {id for id, e in EXERCISES.items() if _compiles(e.checker)} == runs.COMPILED


def test_make_grade_asks_for_a_folder():
    command = ["make", "grade", f"PY={sys.executable}"]
    done = subprocess.run(command, cwd=notebooks.ROOT, capture_output=True, text=True)
    assert done.returncode and "name the folder: make grade DIR=submissions" in done.stderr


# --- files ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[]", "no list of cells"),
        ('{"cells": [1]}', "no list of cells"),
        ('{"cells": [{"cell_type": "code"}]}', "no list of cells"),
        ('{"worksheets": []}', "no list of cells"),
        ('{"cells": []}', "neither its name nor its checks"),
        (b"\xff\xfe\x00", "not JSON"),
    ],
)
def test_a_file_that_is_no_notebook_has_a_reason(content, why, tmp_path):
    path = tmp_path / "x.ipynb"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    (submission,) = submissions.find(tmp_path)
    assert why in submission.problem


def test_a_link_is_not_read(tmp_path):
    (tmp_path / "x.ipynb").symlink_to(notebooks.FOLDER / f"{STEM}.ipynb")
    (submission,) = submissions.find(tmp_path)
    assert submission.problem == "a link, and no file"


@pytest.mark.parametrize(
    ("path", "student"),
    [
        (f"ada/{STEM}.ipynb", "ada"),
        (f"ada/week 2/{STEM}.ipynb", "ada"),
        (f"{STEM}/ada.ipynb", "ada"),
        (f"{STEM}_ada.ipynb", "ada"),
        (f"ada - {STEM}.ipynb", "ada"),
        ("ada.ipynb", "ada"),
        (f"lovelaceada_12345_67890_{STEM}.ipynb", "lovelaceada_12345"),
        (f"lovelaceada_LATE_12345_67999_{STEM}-1.ipynb", "lovelaceada_12345"),
        (f"bob_{STEM}-1.ipynb", "bob"),
        (f"bob_{STEM} (1).ipynb", "bob"),
        (f"{STEM}-17.ipynb", "17"),
        (f"{STEM}.ipynb", STEM),
    ],
)
def test_whose_a_notebook_is(path, student, tmp_path):
    (tmp_path / path).parent.mkdir(exist_ok=True, parents=True)
    shutil.copy(notebooks.FOLDER / f"{STEM}.ipynb", tmp_path / path)
    (submission,) = submissions.find(tmp_path)
    assert (submission.student, submission.page.stem) == (student, STEM)


@pytest.mark.parametrize(
    ("path", "student"),
    [
        ("ada_gated_rms_norm.ipynb", "ada"),
        ("ada_gated_rms_norm-2.ipynb", "ada"),
        ("gus_capstone.ipynb", "gus"),
        ("eve/my capstone.ipynb", "eve"),
    ],
)
def test_whose_a_capstone_is(path, student, tmp_path):
    _save_capstones(tmp_path / path, OWN_OP)
    (submission,) = submissions.find(tmp_path)
    assert (submission.student, submission.title) == (student, "gated_rms_norm")


def test_a_late_notebook_has_a_row_that_says_so(tmp_path):
    for name in ("ada_LATE_12345_67999", "ben_12346_67998"):
        (tmp_path / f"{name}_{STEM}.ipynb").write_text(json.dumps(_answered({})))
    rows = list(runs.grade(submissions.find(tmp_path), runs.Settings(str(tmp_path))))
    assert [row.student for row in rows if row.sentence == report.LATE] == ["ada_12345"]


def test_of_two_copies_the_newer_one_counts(tmp_path):
    for age, name in ((100, "b.ipynb"), (200, "a.ipynb")):
        (tmp_path / "ada").mkdir(exist_ok=True)
        path = tmp_path / "ada" / name
        path.write_text(json.dumps(_answered(RIGHT)))
        os.utime(path, (age, age))
    graded, other = submissions.find(tmp_path)
    assert graded.name == "a.ipynb" and not graded.problem
    assert other.problem == "ada/b.ipynb is not graded, because ada/a.ipynb is newer"


def test_of_two_copies_from_canvas_the_later_submission_counts(tmp_path):
    for age, number in ((200, "67890"), (100, "67999")):
        path = tmp_path / f"ada_12345_{number}_{STEM}.ipynb"
        path.write_text(json.dumps(_answered(RIGHT)))
        os.utime(path, (age, age))
    graded, other = submissions.find(tmp_path)
    assert "67999" in graded.name and "67890" in other.problem


def test_a_folder_for_each_week_is_not_taken_for_a_student_in_silence(tmp_path):
    for student in ("ada", "ben"):
        (tmp_path / "week1" / student).mkdir(parents=True)
        shutil.copy(notebooks.FOLDER / f"{STEM}.ipynb", tmp_path / "week1" / student)
    graded, other = submissions.find(tmp_path)
    assert graded.student == other.student == "week1"
    assert "if these are two students' files, grade the folder that holds theirs" in other.problem
    both = submissions.find(tmp_path / "week1")
    assert [(s.student, s.problem) for s in both] == [("ada", ""), ("ben", "")]


def test_nothing_handed_in_is_lost_without_a_row(tmp_path):
    for name in ("ada/hw.zip", "ada/02.py", "ben/.DS_Store", "cyd/__MACOSX/x.ipynb", "dan.pdf"):
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).touch()
    (tmp_path / STEM).mkdir()
    problems = {s.student: s.problem for s in submissions.find(tmp_path)}
    assert "only files .ipynb are: ada/02.py, ada/hw.zip" in problems.pop("ada")
    assert "dan.pdf" in problems.pop("dan")
    assert problems == dict.fromkeys(("ben", "cyd"), "nothing handed in: the folder is empty")


SOLVES = "def silu(x):\n    return 1"


@pytest.mark.parametrize(
    ("sources", "counts"),
    [
        (["STUB", f'{SOLVES}\ncheck("00.3", silu)'], 1),
        ([f'{SOLVES}\ncheck("00.3", silu)', "STUB"], 0),
        ([f'{SOLVES}\ncheck("00.3", silu)', f'{SOLVES} + 1\ncheck("00.3", silu)'], 1),
        ([f'{SOLVES}\ncheck("00.3", silu)', 'check("00.3", silu)'], 0),
        ([SOLVES, 'check("00.3", silu)'], 0),
        (["STUB", 'check("00.3", lambda x: x)'], 1),
        (["STUB", 'def silu(x):\n    return silu(x)\n\ncheck("00.3", silu)'], 1),
    ],
)
def test_which_of_several_attempts_counts(sources, counts):
    page = notebooks.pages()[STEM]
    original = page.cells[page.exercises["00.3"]]
    sources = [original.source if s == "STUB" else s for s in sources]
    cells = [notebooks.Cell(original.id, sources[0]), notebooks.Cell("other", sources[1])]
    assert submissions._answer(page, "00.3", cells) == sources[counts]


# --- pages ---------------------------------------------------------------------------------------------


def test_every_exercise_stands_on_a_page_and_its_answer_has_a_name():
    ids = {id: page for page in notebooks.pages().values() for id in page.exercises}
    assert set(ids) == set(EXERCISES)
    assert {id: page.answer_of(id) for id, page in ids.items()} == {id: _cell(id)[1] for id in ids}


@pytest.mark.parametrize(
    ("source", "needed", "bound"),
    [
        ("x = y", "y", "x"),
        ("x = 1\ny = x", "", "x y"),
        ("x = x + 1", "x", "x"),
        ("def f(a):\n    return a + b", "b", "f"),
        ("def f():\n    b = 1\n    return lambda: b + c", "c", "f"),
        ("import a.b as c\nfrom d import e", "", "c e"),
        ("class A(B):\n    c = d", "B d", "A"),
        ("%time x = y", "get_ipython", ""),
        ('check("00.1", f)', "f", ""),
        ("def (", "", ""),
    ],
)
def test_which_names_a_cell_needs_and_binds(source, needed, bound):
    assert notebooks.names_needed(source) == set(needed.split())
    assert notebooks.names_bound(source) == set(bound.split())


def test_an_answer_gets_the_cells_of_the_page_that_it_needs():
    page = notebooks.pages()["23_interpreter_is_not_a_gpu"]
    answer = "smooth_source = racy_source.replace('a', 'b')"
    *before, last = page.cells_for("23.3", {"23.3": answer})
    assert last == answer and len(before) >= 2
    assert "racy_source" in notebooks.names_bound(before[-1])
    assert len(page.cells_for("23.3", {"23.3": "smooth_source = 'x'"})) == 2


def test_an_answer_may_need_an_earlier_answer_of_the_same_student():
    page = notebooks.pages()["90_capstone"]
    answers = {"90.3": "def helper(): ...", "90.4": "my_add_rms_norm = helper"}
    assert page.cells_for("90.4", answers)[1:] == list(answers.values())


# --- what is believed ----------------------------------------------------------------------------------


def test_answers_that_are_values_are_those_of_the_solutions():
    for id in attempt.values():
        text = repr(attempt._plain(_solution(id)))
        attempt.ast.literal_eval(text)
    functions = set(EXERCISES) - attempt.values() - attempt.OBJECTS
    assert all(callable(_solution(id)) for id in functions)


def _rows(folder, answers, stem=STEM, only=()):
    """{exercise: Row} of one student's answers."""
    (folder / "ada.ipynb").write_text(json.dumps(_answered(answers, stem)))
    settings = runs.Settings(str(folder), timeout_s=60, only=only)
    return {row.exercise: row for row in runs.grade(submissions.find(folder), settings)}


FORGES = """import os, sys
def forge(*args):
    frame = sys._getframe()
    while "report" not in frame.f_locals:
        frame = frame.f_back
    frame.f_locals["report"](status="right", message="right")
    os._exit(0)
"""


@needs_fence
@pytest.mark.fresh_process
def test_what_can_be_forged_is_pointed_out_and_a_value_cannot(tmp_path):
    rows = _rows(tmp_path, {"00.1": f"{FORGES}bytes_of_multiply_add = forge"})
    assert rows["00.1"].status == "right"  # so teaching.md says
    assert rows["00.1"].remark == "os._exit, sys, sys._getframe"
    assert rows["00.1"].sentence == "right"
    rows = _rows(tmp_path, {"03.2": f"{FORGES}forge()\nsmallest_wrong_shape = 1"}, "03_add_relu")
    assert (rows["03.2"].status, rows["03.2"].points) == ("wrong", 0)


@needs_fence
@pytest.mark.fresh_process
def test_the_homework_alone_is_graded_and_what_is_missing_has_a_row(tmp_path):
    rows = _rows(tmp_path, {"00.2": "traffic_ratio = lambda k: k"}, only=("00.2", "03.2"))
    assert [(id, row.status) for id, row in rows.items()] == [("00.2", "right"), ("03.2", "open")]
    assert sum(row.possible for row in rows.values()) == 3
    assert (rows["03.2"].notebook, rows["03.2"].sentence) == (
        "03_add_relu", "its notebook is not handed in",
    )  # fmt: skip


OWN_OP = """def gated(x, gate, weight, eps=1e-6):
    return F.rms_norm(x * F.silu(gate), x.shape[-1:], weight, eps)

check("gated_rms_norm", gated)"""


STUB = 'check("gated_rms_norm", None)'


def _save_capstones(path, *sources):
    path.parent.mkdir(exist_ok=True)
    cells = [{"cell_type": "code", "source": s} for s in sources]
    path.write_text(json.dumps({"cells": cells}))


@needs_fence
@pytest.mark.fresh_process
def test_a_capstone_is_graded_from_a_notebook_of_the_students_own(tmp_path):
    sources = ("import lib\nfrom lib.exercises.capstones import check", "assert False",
               "import torch.nn.functional as F", OWN_OP)  # fmt: skip
    _save_capstones(tmp_path / "ada.ipynb", *sources)
    (submission,) = submissions.find(tmp_path)
    assert submission.page.stem == "gated_rms_norm"
    written = runs._written(submission, "gated_rms_norm.forward")
    assert written == "\n".join(sources[2:])  # so a name to read is found in a helper's cell, too
    rows = [*runs.grade([submission], runs.Settings(str(tmp_path)))]
    assert [row.exercise.rpartition(".")[2] for row in rows] == ["forward", "gradients", "promises"]
    assert all((row.points, row.possible) == (0, 1) for row in rows)
    assert all("PyTorch runs" in row.sentence or "element" in row.sentence for row in rows), rows
    assert program.ids("gated_rms_norm, 00.1") == (*(row.exercise for row in rows), "00.1")


def test_a_capstone_in_two_notebooks_has_its_points_once(tmp_path):
    other = OWN_OP.replace("gated_rms_norm", "scaled_linear")
    _save_capstones(tmp_path / "ada/both.ipynb", STUB, other.replace("gated", "mine"))
    _save_capstones(tmp_path / "ada/gated.ipynb", STUB)
    for age, name in ((100, "both"), (200, "gated")):
        os.utime(tmp_path / f"ada/{name}.ipynb", (age, age))
    settings = runs.Settings(str(tmp_path), only=tuple(program.ids("gated_rms_norm")), safe=False)
    rows = list(runs.grade(submissions.find(tmp_path), settings))
    assert sum(row.possible for row in rows) == 3
    assert {row.notebook for row in rows if row.possible} == {"gated_rms_norm"}
    (notice,) = (row.sentence for row in rows if not row.possible)
    assert "gated_rms_norm in both.ipynb is not graded, because another" in notice


def test_a_capstone_within_another_notebook_has_a_row_that_says_so(tmp_path):
    notebook = _answered({})
    notebook["cells"].append({"cell_type": "code", "source": OWN_OP})
    (tmp_path / "ada.ipynb").write_text(json.dumps(notebook))
    rows = runs.grade(submissions.find(tmp_path), runs.Settings(str(tmp_path)))
    assert "a capstone needs a notebook of its own" in next(rows).sentence


READS = """import pathlib
found = [p for p in pathlib.Path(HOME).rglob("*") if p.is_file() and p.read_text()]
assert not found, found
traffic_ratio = lambda k: k"""


@needs_fence
@pytest.mark.parametrize("where", ["elsewhere", "in the home"])
@pytest.mark.fresh_process
def test_the_graders_own_files_are_hidden(where, tmp_path, monkeypatch):
    home, folder = tmp_path / "home", tmp_path / "hand in"
    for path in (folder, home / ".ssh", home / "course"):
        path.mkdir(parents=True)
    for path in (home / ".ssh/key", home / ".netrc"):
        path.write_text("secret")
    (home / "link").symlink_to("nowhere")
    monkeypatch.setenv("HOME", str(home))
    if where == "in the home":
        needed = home / "course"
        monkeypatch.setattr(runs, "holds_python", lambda path: needed.is_relative_to(path))
    rows = _rows(folder, {"00.2": READS.replace("HOME", repr(str(home)))})
    assert rows["00.2"].sentence == "right"
    assert (home / ".netrc").read_text() == "secret"


@needs_fence
@pytest.mark.fresh_process
def test_what_comes_below_the_check_is_of_no_concern(tmp_path):
    notebook = _answered({"00.2": "traffic_ratio = lambda k: k"})
    for cell in _exercise_cells(notebook):
        cell["source"] = "".join(cell["source"]) + "\nassert False"
    (tmp_path / "ada.ipynb").write_text(json.dumps(notebook))
    rows = runs.grade(submissions.find(tmp_path), runs.Settings(str(tmp_path)))
    assert [row.status for row in rows] == ["open", "right", "open", "open"]


@needs_fence
@pytest.mark.fresh_process
def test_a_value_is_checked_where_no_answer_runs(tmp_path):
    always = "class Any(tuple):\n    __eq__ = lambda *_: True\n"
    patch = "from lib.exercises import nb03\nnb03.check_smallest = nb03.expect = lambda *_: None\n"
    answer = f"{patch}{always}smallest_wrong_shape = Any((1, 1))"
    rows = _rows(tmp_path, {"03.2": answer}, "03_add_relu")
    assert rows["03.2"].status == "wrong" and "replaces" not in rows["03.2"].sentence


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("y = torch.compile(f)  # eval", []),
        ("'getattr'", []),
        ("model.eval()", []),
        ("eval(x)", ["eval"]),
        ("ｅｖａｌ(x)", ["eval"]),
        ("x = f'{eval(y)}'", ["eval"]),
        ("f . __globals__", ["f.__globals__"]),
        ("sys._getframe(1)", ["sys._getframe"]),
        ("from lib.exercises import check", []),
        ("from lib.exercises.capstones import check", []),
        ("import lib  # before torch\nfrom lib import machine", []),
        ("from lib.ops import _host as host, softmax", ["lib.ops.softmax"]),
        (
            "from lib.models import (\n    llama as l,\n    gpt2)",
            ["lib.models.gpt2", "lib.models.llama"],
        ),
        ("import lib as course\ncourse.ops", ["lib"]),
        ("ops = lib\nops.ops", ["lib"]),
        ("lib.exercises.judge = 1", ["lib.exercises.judge"]),
        ("!eval", ["eval"]),
    ],
)
def test_names_that_a_teacher_should_look_at(source, names):
    assert remarkable(source) == names


@pytest.mark.parametrize(
    ("source", "given", "taken"),
    [
        ("from lib.ops.rope import rope_triton\nmy = rope_triton", "", "lib.ops.rope.rope_triton"),
        ("from lib.ops.rope import rope_tables, rope_triton",
         "from lib.ops.rope import rope_tables", "lib.ops.rope.rope_triton"),
        ("from lib.ops.rope import rope_tables", "from lib.ops.rope import rope_tables", ""),
        ("from lib.ops.softmax import softmax_triton", "from lib.ops import softmax", ""),
        ("from lib.ops.rope import *", "from lib.ops.rope import rope_tables", "lib.ops.rope.*"),
        ("import lib.ops.rope as r", "import lib", "lib.ops.rope"),
        ("y = torch.ops.fused_kernels.rope(x)", "", "torch.ops.fused_kernels.rope"),
        ("# as in lib.ops.rope\ny = torch.ops.aten.relu(x)", "", ""),
        ("%%time\nfrom lib.ops.rope import rope_triton", "", "lib.ops.rope.rope_triton"),
    ],
)  # fmt: skip
def test_ops_of_the_course_that_an_answer_takes(source, given, taken):
    assert ops_taken(source, given) == taken.split()


BOUGHT = "from lib.ops.add_rms_norm import add_rms_norm_triton"


@pytest.mark.parametrize(
    "answers",
    [
        {"90.4": f"{BOUGHT}\nmy_add_rms_norm = add_rms_norm_triton"},
        {"90.3": f"{BOUGHT}\nbought = add_rms_norm_triton", "90.4": "my_add_rms_norm = bought"},
    ],
    ids=["in its cell", "in an earlier answer's"],
)
def test_an_op_of_the_course_is_no_answer(answers, tmp_path):
    rows = _rows(tmp_path, answers, "90_capstone", only=("90.4",))
    assert (rows["90.4"].status, rows["90.4"].points) == ("wrong", 0)
    assert "takes lib.ops.add_rms_norm.add_rms_norm_triton from the course" in rows["90.4"].sentence


@pytest.mark.parametrize("stem", notebooks.pages())
def test_no_solution_has_such_names(stem):
    page = notebooks.pages()[stem]
    text = (notebooks.FOLDER / f"solutions/{stem}.py").read_text()
    imports, *sections = re.split(r"\n(?=# (?:%% |## )?\d\d\.\d )", text)
    ids = [re.search(r"\d\d\.\d", section)[0] for section in sections]
    assert set(ids) == set(page.exercises)
    for id, section in zip(ids, sections):
        needed = notebooks.names_needed(section)
        used = [line for line in imports.splitlines() if notebooks.names_bound(line) & needed]
        given = runs._given(submissions.Submission("", "", page), id)
        assert not ops_taken("\n".join([*used, section]), given), id
        assert not remarkable(section), id
