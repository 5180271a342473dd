"""The repository around the code: versions pinned in one place, complete help, no paths of one machine."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

from lib import machine, nogpu
from lib.exercises import all_exercises
from lib.exercises.grade.runs import COMPILED
from lib.measure.mutants import load
from lib.recorded import results
from lib.recorded.results import ROOT
from lib.standalone import standalone
from lib.tests.ops.test_copyable import interpreter_loops

import nbformat
import pytest
import torch
import yaml

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
MAKEFILE = (ROOT / "Makefile").read_text()
TEACHING = (ROOT / "notebooks/teaching.md").read_text()
PLANS, WEEKS = re.split(r"(?m)^## ", TEACHING)[1:3]
README = (ROOT / "README.md").read_text()


def tracked():
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    return [ROOT / name for name in listed.stdout.splitlines() if (ROOT / name).exists()]


def test_every_package_of_the_course_is_pinned():
    pins = PROJECT["project"]["optional-dependencies"]["course"]
    assert all(re.fullmatch(r"[\w-]+==[\d.]+", pin) for pin in pins)
    assert {"torch==2.15.0", "triton==3.9.0"} <= set(pins)


def test_versions_are_written_in_one_place():
    environment = (ROOT / "environment.yml").read_text()
    assert "-e .[course]" in environment
    assert not re.search(r"(torch|triton|jupyterlab)\s*[=<>]=", environment + MAKEFILE)


def test_declared_ranges_are_those_the_stand_ins_support():
    from lib.nogpu.inductor import SUPPORTED

    declared = {d for d in PROJECT["project"]["dependencies"] if d.startswith(("torch", "triton"))}
    for name, ((a, b), (c, d)) in SUPPORTED.items():
        assert f"{name}>={a}.{b},<{c}.{d + 1}" in declared
    assert nogpu.__doc__


def test_make_help_lists_every_target():
    targets = set(re.search(r"^\.PHONY: (.*)", MAKEFILE, re.M)[1].split())
    documented = set(re.findall(r"^([a-z-]+):.*## ", MAKEFILE, re.M))
    assert documented == targets


def test_make_clean_leaves_the_readers_folders(tmp_path):
    mine = tmp_path / "Untitled Folder/mine.ipynb"
    for path in (mine, mine.parent / "__pycache__/x.pyc", mine.parent / ".ipynb_checkpoints/x"):
        path.parent.mkdir(exist_ok=True, parents=True)
        path.touch()
    (tmp_path / "Untitled").mkdir()
    subprocess.run(["make", "-f", ROOT / "Makefile", "clean"], cwd=tmp_path, check=True)
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["Untitled", "Untitled Folder", mine.name]


def test_nothing_tracked_names_a_folder_of_one_machine():
    pattern = re.compile(r"(?<![\w.…/~])/(home|root|mnt|work|farm)/\w+")
    for path in tracked():
        if path.suffix in {".py", ".md", ".yml", ".toml", ".cu", ".h", ".json", ".ipynb"}:
            if path.name == "test_repository.py":
                continue
            match = pattern.search(path.read_text())
            assert not match, f"{path.relative_to(ROOT)}: {match[0]}"


def test_the_hours_of_the_readme_are_the_sum_of_its_minutes():
    notebooks = _minutes().values()
    minutes = [exercise.minutes for exercise in all_exercises().values()]
    hours = f"{round(sum(notebooks) / 60)} hours of reading and running"
    more = f"{len(minutes)} exercises for {round(sum(minutes) / 60)} more"
    words = f"In all there are {len(notebooks)} notebooks: {hours}, and {more}."
    assert words in " ".join(README.split())


def test_the_minutes_of_a_notebook_are_those_of_the_readme_and_of_its_exercises():
    for path in (ROOT / "notebooks").glob("*.ipynb"):
        first = nbformat.read(path, as_version=4).cells[0].source
        ((minutes, more),) = re.findall(r"\| Time \| (\d+) minutes, and (\d+) for the", first)
        number = path.name[:2]
        assert _minutes()[number] == int(minutes), path.name
        mine = [e.minutes for id, e in all_exercises().items() if id.startswith(f"{number}.")]
        assert sum(mine) == int(more), path.name


def _minutes():
    """{notebook: minutes of its row in the README}, the course's first and then the tracks'."""
    rows = re.findall(r"(?m)^\| \[(\d\d)\].*\| (\d+) \| \d+ \+ \d+ \| \[", README)
    return {number: int(minutes) for number, minutes in rows}


def _exercise_minutes(numbers):
    """Minutes of these notebooks' exercises: (of one and two dots, of three dots)."""
    mine = [e for id, e in all_exercises().items() if id[:2] in numbers]
    hard = sum(e.minutes for e in mine if e.level == 3)
    return sum(e.minutes for e in mine) - hard, hard


def _table(heading):
    """The numbers of the notebooks in a section of the README, and its text."""
    text = README.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    return re.findall(r"(?m)^\| \[(\d\d)\]", text), text


def _route():
    """All notebooks in the order in which their last links lead from 00 on."""
    route = ["00"]
    while leads_to := re.findall(r"(?m)^Next: \[(\d\d)", _prose(route[-1])):
        assert len(leads_to) == 1 and leads_to[0] not in route, f"the 'Next:' of {route[-1]}"
        route += leads_to
    return route


def test_the_readme_says_how_long_exercises_take():
    rows = re.findall(r"(?m)^\| \[(\d\d)\].*\| (\d+) \+ (\d+) \| \[", README)
    assert {n: (int(a), int(b)) for n, a, b in rows} == {
        n: _exercise_minutes([n]) for n, *_ in rows
    }


def test_the_course_is_short_enough():
    course, text = _table("The course")
    reading = sum(_minutes()[number] for number in course)
    most, hard = _exercise_minutes(course)
    short, long = (round(minutes / 60) for minutes in (reading + most, reading + most + hard))
    assert short <= 14 and long <= 20
    words = f"It takes {short} hours with the exercises of one and two dots, and {long} with all."
    assert words in text


def test_an_evening_is_ninety_minutes():
    (evening,) = re.findall(r"(?s)\*\*An evening, 90 minutes\.\*\*.*?\n\n", README)
    numbers, ids = re.findall(r"\[(\d\d)\]", evening), re.findall(r"\d\d\.\d", evening)
    assert (numbers, ids) == (["00", "01"], ["00.3", "01.1", "01.3"])  # from 01.1 to 02.3
    exercises = (all_exercises()[id].minutes for id in ("00.3", "01.1", "01.2", "01.3"))
    assert sum(_minutes()[n] for n in numbers) + sum(exercises) <= 90


def test_the_hours_of_a_track_are_the_sum_of_its_minutes():
    _, text = _table("Tracks")
    rows = re.split(
        r"(?m)^\| \| \*\*[\w ]+\*\* \| .* needs .* \| \*\*(\d+) h\*\* \| \*\*(\d+) h\*\* \| \|$",
        text,
    )
    assert len(rows[1::3]) == 7
    for reading, exercises, table in zip(rows[1::3], rows[2::3], rows[3::3]):
        numbers = re.findall(r"(?m)^\| \[(\d\d)\]", table)
        assert round(sum(_minutes()[number] for number in numbers) / 60) == int(reading), numbers
        assert round(sum(_exercise_minutes(numbers)) / 60) == int(exercises), numbers


def test_each_notebook_leads_to_the_next_of_the_route_and_needs_only_earlier_ones():
    route = _route()
    assert sorted(route) == sorted(_minutes()) and len(route) == len(set(route))
    for k, number in enumerate(route):
        prose = _prose(number)
        assert _needs(prose) <= set(route[:k]), f"{number} needs {_needs(prose)}"


def test_the_route_is_the_order_of_the_readme():
    course, tracks = (_table(heading)[0] for heading in ("The course", "Tracks"))
    assert _route() == course + tracks
    assert course == [f"{k:02}" for k in range(len(course))]
    for number in course:
        assert _needs(_prose(number)) <= set(course), number


def _prose(number):
    (path,) = (ROOT / "notebooks").glob(f"{number}_*.ipynb")
    cells = nbformat.read(path, as_version=4).cells
    return "\n".join(c.source for c in cells if c.cell_type == "markdown")


def _needs(prose):
    """The notebooks that a notebook's first table names as needed before it."""
    return set(re.findall(r"\[(\d\d)", re.findall(r"\| Before this \|(.*)\|", prose)[0]))


def test_the_kernel_of_the_readme_runs_and_its_times_are_the_recorded_ones():
    (text,) = re.findall(r"(?s)```python\n(def bias_gelu_dropout_add.*?)```", README)
    imports = "import torch.nn.functional as F\nimport triton\nimport triton.language as tl\n\n\n"
    definitions, launch = text.rsplit("\n\n\n", 1)
    module = load("from_the_readme", f"{imports}{definitions}\n")
    device, p = machine.device(), 0.1
    for dtype, rtol in ((torch.float32, 1e-5), (torch.bfloat16, 2**-7)):
        x, bias, residual = (
            torch.randn(size, device=device, dtype=dtype) for size in ((17, 781), (781,), (17, 781))
        )
        x[3, 5] = float("nan")
        y = torch.empty_like(x)
        names = {"x": x, "bias": bias, "residual": residual, "y": y, "seed": 7}
        exec(launch, vars(module) | names)
        kept = module.bias_gelu_dropout_add(*(t.float() for t in (x, bias, residual)), 0.0)
        kept = (kept - residual.float()) / (1 - p) + residual.float()
        options = {"equal_nan": True, "rtol": rtol, "atol": rtol}
        is_dropped = ~torch.isclose(y.float(), kept, **options)
        assert 0.07 < is_dropped.float().mean() < 0.13
        torch.testing.assert_close(y[is_dropped], residual[is_dropped])
    us = {
        row["version"]: f"{row['time_us']:,.0f} µs"
        for row in results.load("bias_gelu_dropout_add")["rows"]
        if (row["shape"], row["dtype"]) == ([16384, 4096], "bfloat16") and row["gradients"]
    }
    times = re.findall(r"[\d,]+ µs", README)
    assert times == [us["eager"], us["compiled"], us["triton"]]


def test_the_readme_names_the_versions_of_its_records():
    records = (json.loads(path.read_text()) for path in results.FOLDER.glob("h200/*.json"))
    versions = {(r["stamp"]["torch"], r["stamp"]["triton"]) for r in records if "stamp" in r}
    ((pytorch, triton),) = versions
    words = "recorded with torch {}.{} and triton {}.{}.".format(
        *pytorch.split(".")[:2], *triton.split(".")[:2]
    )
    assert words in " ".join(README.split())


@interpreter_loops
def test_the_example_of_the_readme_runs_beside_a_copied_file(tmp_path):
    ((before, after),) = re.findall(r'(?s)```python\n(import torch.*?)"cuda"(.*?)```', README)
    (tmp_path / "add_relu.py").write_text(standalone("add_relu"))
    if not machine.HAS_GPU:  # the interpreter takes a quarter of a minute for so many rows
        after = after.replace("randn(1024, 4096,", "randn(16, 4096,")
    (tmp_path / "example.py").write_text(f'{before}"{machine.device()}"{after}')
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    env |= {} if machine.HAS_GPU else {"TRITON_INTERPRET": "1"}
    command = [sys.executable, "example.py"]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


def test_the_times_of_the_page_on_ops_are_the_recorded_ones():
    page = " ".join((ROOT / "lib/ops/README.md").read_text().split())

    def us(op, *shape):
        return {
            row["version"]: f"{row['time_us']:,.0f}"
            for row in results.load(op)["rows"]
            if (row["shape"], row["dtype"]) == ([*shape], "float32") and row["gradients"]
        }

    mlp = us("fused_mlp", 65536, 512, 256, 1)
    mlp_line = (
        f"65,536 rows of 512-256-1 take {mlp['triton']} µs against {mlp['eager']}, and against"
    )
    assert f"{mlp_line} {mlp['compiled']} of torch.compile," in page
    tables = us("embedding_hash", 65536, 26, 2600000, 128)
    words = f"D = 128 take {tables['triton']} µs against {tables['compiled']} of torch.compile."
    assert f"65,536 × 26 lookups with {words}" in page


def test_the_dev_container_is_set_up_by_make():
    container = json.loads((ROOT / ".devcontainer/devcontainer.json").read_text())
    program, target = container["postCreateCommand"].split()
    assert program == "make"
    # without the variables of a `make` that runs these tests
    env = {k: v for k, v in os.environ.items() if not k.startswith("MAKE") and k != "VERSIONS"}
    command = ["make", "--dry-run", target]
    dry = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert dry.returncode == 0, dry.stderr
    python = container["customizations"]["vscode"]["settings"]["python.defaultInterpreterPath"]
    assert python.removeprefix("${containerWorkspaceFolder}/") == ".venv/bin/python"
    assert container["image"].endswith("python:3.12")
    (platform,) = container["runArgs"]  # the one that is supported, also on a Mac
    assert platform.replace("=", " ") in README


def test_the_plans_for_teachers_add_up():
    row = r"(?m)^\| (\w.*?) \| (\[\d\d\].*?) \| (\d+) \| (.*?) \| (\d+) \|$"
    plans = re.findall(row, PLANS)
    assert len(plans) == 7
    for plan, notebooks, minutes, exercises, more in plans:
        numbers = re.findall(r"\[(\d\d)\]", notebooks)
        assert sum(_minutes()[number] for number in numbers) == int(minutes), plan
        ids = exercises.split(", ")
        for id in ids:
            assert id in all_exercises() and id[:2] in numbers, f"{plan}: {id}"
        assert sum(all_exercises()[id].minutes for id in ids) == int(more), plan


def test_a_plan_holds_what_its_notebooks_need_or_says_what_to_skip():
    days = re.findall(r"(?m)^\| (\w.*?) \| (\[\d\d\].*?) \| \d+ \|", PLANS)
    plans = {}
    for day, notebooks in days:
        numbers = set(re.findall(r"\[(\d\d)\]", notebooks))
        needs = numbers.union(*[_needs(_prose(number)) for number in numbers])
        while (more := needs.union(*[_needs(_prose(n)) for n in needs])) != needs:
            needs = more
        plan = day.split(",")[0]
        plans[plan] = numbers | plans.get(plan, set())  # a day of the week builds on those before
        skips = re.search(rf"(?m)^- {plan}, without (.*): in (\d\d) skip (.*)\.$", TEACHING)
        assert needs - plans[plan] == set(re.findall(r"\d\d", skips[1] if skips else "")), day
        if skips:
            assert skips[2] in numbers
            headings = re.findall(r"(?m)^#+ (.*)$", _prose(skips[2]))
            assert set(re.findall(r"\*(.+?)\*", skips[3])) <= set(headings), day
    assert len(plans) == 3


def _terms():
    """The rows of the tables of six and of twelve weeks."""
    tables = re.split(r"(?m)^\| Week .*\n.*\n", WEEKS)[1:]
    rows = [[r.strip("| ").split(" | ") for r in t.splitlines() if r[:1] == "|"] for t in tables]
    assert [len(term) for term in rows] == [6, 12]
    return rows


@pytest.mark.parametrize("term", _terms(), ids=len)
def test_the_weeks_of_a_term_add_up_and_build_on_earlier_ones(term):
    before, all_ids = set(), []
    for k, row in enumerate(term, 1):
        week, notebooks, minutes, builds_on, homework, more, points, _ = row
        numbers, ids = re.findall(r"\[(\d\d)\]", notebooks), homework.split(", ")
        assert int(week) == k and len(numbers) == len(notebooks.split(", "))
        assert sum(_minutes()[n] for n in numbers) == int(minutes), week
        exercises = [all_exercises()[id] for id in ids]
        assert {id[:2] for id in ids} <= set(numbers), week
        assert sum(e.minutes for e in exercises) == int(more), week
        assert sum(e.level for e in exercises) == int(points), week
        needs = set().union(*(_needs(_prose(n)) for n in numbers)) - set(numbers)
        if "90" in numbers:  # it asks for two of 30 to 43
            needs -= {"43"}
            assert len([n for n in before if "30" <= n <= "43"]) >= 2
        assert needs <= before and needs | {"43"} >= set(re.findall(r"\d\d", builds_on)) >= needs
        before |= set(numbers)
        all_ids += ids
    assert len(set(all_ids)) == len(all_ids)


def test_the_page_says_how_long_the_terms_are():
    hours = [[(int(row[2]) + int(row[5])) / 60 for row in term] for term in _terms()]
    words = " ".join(WEEKS.split())
    for term in hours:
        each = f"{min(term):.1f} to {max(term):.1f} hours a week and {sum(term):.0f} hours in all"
        assert each in words


def test_homework_in_cuda_is_named_and_the_six_weeks_have_none():
    six, twelve = ({id for row in term for id in row[4].split(", ")} for term in _terms())
    (named,) = re.findall(r"of the twelve weeks are written in CUDA C\+\+: (.*?)\. Let", WEEKS)
    assert not six & COMPILED and set(re.findall(r"\d\d\.\d", named)) == twelve & COMPILED


@pytest.mark.parametrize("term", _terms(), ids=len)
def test_a_week_says_whether_it_needs_a_compiler(term):
    for _, notebooks, *_, machine_needs in term:
        paths = re.findall(r"\((\w+\.ipynb)\)", notebooks)
        notebooks = (nbformat.read(ROOT / "notebooks" / path, as_version=4) for path in paths)
        cells = (c.source for n in notebooks for c in n.cells if c.cell_type == "code")
        # a cell that catches InductorError says in a sentence what a compiler would have shown
        text = "\n".join(cell for cell in cells if "except InductorError" not in cell)
        compiles = re.search(r"torch\.compile\(|__global__|_cuda\b|load_inline", text)
        assert machine_needs == ("a C++ compiler" if compiles else "nothing more"), paths


def test_projects_can_begin_when_the_page_says():
    (early, late) = map(
        int, re.findall(r"week\s+(\d+)", WEEKS[WEEKS.index("are for projects") :])[:2]
    )
    twelve = [set(re.findall(r"\[(\d\d)\]", row[1])) for row in _terms()[1]]
    for numbers, week in ((("44", "45", "46", "47", "53"), early), (("51",), late)):
        there = set().union(*twelve[:week])
        assert all(_needs(_prose(n)) <= there for n in numbers), numbers


def test_the_six_weeks_differ_from_the_course_as_the_page_says():
    rows, course = _terms()[0], set(_table("The course")[0])
    weeks = {n for row in rows for n in re.findall(r"\[(\d\d)\]", row[1])}
    (why,) = re.findall(r"(?s)\nThe six weeks are not the course of the README.*?\n\n", WEEKS)
    (left_out,) = re.findall(r"To make room, (.*?) are left out", why)
    assert set(re.findall(r"\d\d", left_out)) == course - weeks
    assert set(re.findall(r"\d\d", why)) == course ^ weeks
    assert max(rows, key=lambda row: int(row[5]))[0] == "6"


def test_the_command_of_the_page_grades_the_homework_of_the_first_week():
    (options,) = re.findall(r"(?m)^make grade (.*ONLY.*)$", TEACHING)
    command = ["make", "--dry-run", "grade", f"PY={sys.executable}", *shlex.split(options)]
    printed = subprocess.check_output(command, cwd=ROOT, text=True).splitlines()
    (told,) = (shlex.split(line) for line in printed if "--only" in line)
    assert told[told.index("--only") + 1].split() == _terms()[0][0][4].split(", ")
    assert told[told.index("--out") + 1] == "grades/week1"


def test_make_grade_hands_its_limits_on():
    command = ["make", "--dry-run", "grade", f"PY={sys.executable}", "DIR=in"]
    for given, options in (["TIMEOUT=1", "MEMORY=2"], "--timeout 1 --memory 2"), ([], ""):
        told = subprocess.check_output([*command, *given], cwd=ROOT, text=True)
        assert " ".join(re.findall(r"--(?:timeout|memory) \d+", told)) == options


def test_the_outline_of_a_class_is_ninety_minutes():
    (outline,) = re.findall(r"(?s)\nA class of 90 minutes.*?\n\nThroughout", TEACHING)
    assert sum(map(int, re.findall(r"(?m)^- (\d+) minutes: ", outline))) == 90


def test_a_handout_has_no_solutions_no_tests_and_no_history(tmp_path):
    assert tracked()
    command = ["make", "handout", f"OUT={tmp_path / 'handout.zip'}"]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    shutil.unpack_archive(tmp_path / "handout.zip", tmp_path)
    course = tmp_path / "fused-kernels"
    assert not any((course / name).exists() for name in ("lib/tests", ".git"))
    (note,) = (course / "notebooks/solutions").iterdir()  # pages link there
    assert note.name == "README.md" and "Your teacher has them" in note.read_text()
    program = "from lib.exercises import check; print(check('00.2', lambda k: k))"
    env = os.environ | {"PYTHONPATH": str(course), "FUSED_KERNELS_READER": str(tmp_path)}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=course, env=env, capture_output=True, text=True)
    assert "✔ 00.2 right" in done.stdout, done.stderr


@pytest.mark.parametrize("ref", ["HEAD", "no-such-commit"])
def test_a_handout_that_cannot_be_made_is_a_sentence_and_no_file(ref, tmp_path):
    folder = ROOT if ref != "HEAD" else tmp_path
    command = ["make", "-f", ROOT / "Makefile", "handout", f"REF={ref}", f"OUT={tmp_path / 'h'}"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode and "fatal" not in done.stderr
    assert f"run it in a clone, in which REF={ref} is a commit" in done.stdout
    assert not any(tmp_path.iterdir())


def test_an_update_keeps_the_answers(tmp_path):
    """The commands of the page, in a clone that has answers, between two tags of another."""
    (commands,) = re.findall(r"(?s)```sh\n(git remote add.*?)```", TEACHING)
    course, fork = tmp_path / "course", tmp_path / "fork"
    name = "01_six_small_kernels"

    def git(folder, *arguments):
        who = ["-c", "user.name=A", "-c", "user.email=a@example.org"]
        subprocess.run(["git", *who, *arguments], cwd=folder, check=True, capture_output=True)

    def edit(folder, notebook, change):
        path = folder / f"notebooks/{notebook}.ipynb"
        content = nbformat.read(path, as_version=4)
        change({re.findall(r'check\("([\d.]+)"', c.source)[0]: c for c in content.cells
                if "exercise" in c.metadata.get("tags", [])}, content)  # fmt: skip
        nbformat.write(content, path)

    unwanted = shutil.ignore_patterns(".git", ".venv*", ".reader", "__pycache__", ".*cache")
    shutil.copytree(ROOT, course, ignore=unwanted)
    git(course, "init", "--quiet")
    git(course, "add", "--all")
    git(course, "commit", "--quiet", "--message", "First")
    git(course, "tag", "v0.2.0")
    git(tmp_path, "clone", "--quiet", str(course), str(fork))

    def answer(exercises, notebook):
        exercises["01.1"].source = "# mine\n" + exercises["01.1"].source
        exercises["01.2"].source = "# mine, too\n" + exercises["01.2"].source
        for k, cell in enumerate(c for c in notebook.cells if c.cell_type == "code"):
            cell.execution_count, cell.outputs = 100 + k, []

    edit(fork, name, answer)

    def renew(exercises, notebook):
        exercises["01.2"].source += "\n# a new remark"
        exercises["01.3"].source += "\n# a new stub"
        notebook.cells.insert(3, nbformat.v4.new_markdown_cell("A new cell."))
        for k, cell in enumerate(c for c in notebook.cells if c.cell_type == "code"):
            cell.execution_count = 50 + k

    edit(course, name, renew)
    git(course, "commit", "--quiet", "--all", "--message", "Second")
    git(course, "tag", "v0.3.0")
    told = commands.replace("https://github.com/OWNER/fused-kernels", str(course))
    told = told.replace(".venv/bin/python", sys.executable)
    people = [f"GIT_{who}_{what}" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")]
    env = os.environ | dict.fromkeys(people, "a@example.org")
    env = {k: v for k, v in env.items() if k != "PYTHONPATH"}
    command = ["bash", "-e", "-c", told]
    done = subprocess.run(command, cwd=fork, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "01.1 written\n01.2 written; the cell was changed" in done.stdout, done.stdout
    after = nbformat.read(fork / f"notebooks/{name}.ipynb", as_version=4)
    new = nbformat.read(course / f"notebooks/{name}.ipynb", as_version=4)
    changed = {
        b.source.partition("\n")[0]: a.source for a, b in zip(new.cells, after.cells) if a != b
    }
    assert len(after.cells) == len(new.cells) and set(changed) == {"# mine", "# mine, too"}
    for told, want in (
        ("status --porcelain", ""),
        ("diff --name-only v0.3.0", f"notebooks/{name}.ipynb"),
    ):
        command = ["git", *told.split()]
        assert subprocess.check_output(command, cwd=fork, text=True).strip() == want


def _workflow():
    """The environment and the steps of the workflow to copy."""
    (text,) = re.findall(r"(?s)```yaml\n(.*?)```", TEACHING)
    (job,) = yaml.safe_load(text)["jobs"].values()
    return job["env"], job["steps"]


def test_the_workflow_to_copy_installs_the_course():
    env, steps = _workflow()
    (course,) = (s["with"]["path"] for s in steps if "repository" in s.get("with", {}))
    pip, install, option, what, *_ = shlex.split(steps[-2]["run"])
    assert (pip, install, option) == ("pip", "install", "-e")
    path, extra = re.fullmatch(r"\./(\w+)\[(\w+)\]", what).groups()
    assert path == course
    pins = PROJECT["project"]["optional-dependencies"][extra]
    assert {"nbmake", "pytest", "torch", "triton"} <= {pin.split("==")[0] for pin in pins}


_KERNEL = """
import torch, triton, triton.language as tl

@triton.jit
def double_kernel(x_ptr, y_ptr, n, BLOCK_SIZE: tl.constexpr):
    offsets = tl.arange(0, BLOCK_SIZE)
    x = tl.load(x_ptr + offsets, mask=offsets < n)
    tl.store(y_ptr + offsets, x * 2, mask=offsets < n)

x = torch.ones(5, dtype=torch.bfloat16)
y = torch.empty_like(x)
double_kernel[(1,)](x, y, 5, BLOCK_SIZE=8)
assert (y == 2).all()
"""
_CHECK = "from lib.exercises import check\ncheck('00.2', lambda k: {})"
_NOTEBOOKS = {
    "right": (_KERNEL, _CHECK.format("k")),
    "wrong": (_KERNEL, _CHECK.format("k + 1")),
    "open": (_KERNEL, _CHECK.format("None")),
    "outside": (_KERNEL.replace("y, 5,", "y, 6,"),),
}


def _run_workflow(folder, *names, change=("", "")):
    """Status and output of the workflow's last step for these notebooks, and the page's own test."""
    (folder / "notebooks").mkdir(parents=True)
    (folder / "tests").mkdir()
    (test,) = re.findall(r"(?s)```python\n(import lib .*?)```", TEACHING)
    assert change[0] in test
    (folder / "tests/test_square.py").write_text(test.replace(*change))
    metadata = {"kernelspec": {"name": "python3", "display_name": "Python 3"}}
    for name in names:
        cells = [nbformat.v4.new_code_cell(c) for c in ("import lib", *_NOTEBOOKS[name])]
        notebook = nbformat.v4.new_notebook(cells=cells, metadata=metadata)
        nbformat.write(notebook, folder / f"notebooks/{name}.ipynb")
    env, steps = _workflow()
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    env |= {"PATH": path, "PYTHONPATH": str(ROOT)}  # PYTHONPATH for `pip install -e`
    command = ["bash", "-e", "-c", steps[-1]["run"]]
    done = subprocess.run(command, cwd=folder, env=os.environ | env, capture_output=True, text=True)
    return done.returncode, done.stdout


def test_the_workflow_to_copy_runs_a_notebook(tmp_path):
    status, text = _run_workflow(tmp_path / "a", "right")
    assert status == 0, text
    status, text = _run_workflow(tmp_path / "b", *_NOTEBOOKS)
    assert status == 1 and "3 failed, 2 passed" in text
    assert "✘ 00.2 for a chain" in text and "○ 00.2 not attempted yet" in text
    assert "outside" in text
    status, text = _run_workflow(tmp_path / "c", "right", change=("2 * x * dy", "x * dy"))
    assert status == 1 and "1 failed, 1 passed" in text and "CheckError" in text


@pytest.mark.parametrize(
    "page",
    [
        "README.md",
        "CONTRIBUTING.md",
        "lib/ops/README.md",
        "data/README.md",
        "notebooks/anatomy.md",
        "notebooks/capstones.md",
        "notebooks/glossary.md",
        "notebooks/teaching.md",
        "notebooks/where_next.md",
    ],
)
def test_links_of_a_page_lead_somewhere(page):
    text = re.sub(r"(?s)```.*?```", "", (ROOT / page).read_text())  # `kernel[grid](x)` is no link
    links = re.findall(r"\]\((?!https?:)([^)#]+)", text)
    missing = [link for link in links if not ((ROOT / page).parent / link).exists()]
    assert links or page.startswith("data")
    assert not missing


def test_the_readme_leads_to_every_page():
    pages = [path.relative_to(ROOT).as_posix() for path in (ROOT / "notebooks").glob("*.md")]
    assert len(pages) >= 5 and all(f"]({page})" in README for page in pages)


def test_the_page_on_data_names_what_is_there():
    page = (ROOT / "data/README.md").read_text()
    folders = {path.name for path in (ROOT / "data").iterdir() if path.is_dir()}
    assert set(re.findall(r"(?m)^## (\w+)$", page)) == folders
    named = re.findall(r"`([\w<>….-]+\.(?:json|png|csv|txt|parquet))`", page)
    patterns = [re.sub(r"<\w+>|…", "*", name) for name in named]
    ops = {f"{path.stem}.json" for path in (ROOT / "lib/ops").glob("[a-z]*.py")}
    for path in (ROOT / "data").rglob("*.*"):
        fits = any(path.match(p) for p in patterns if p != "*.json") or path.name in ops
        assert fits or path.name == "README.md" or "output_code" in path.parts, path
