"""README's cell for hosted notebooks: what it fetches and installs, and what it says where it cannot."""

import ast
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path

from lib import hosted, machine
from lib.tests.hosted import EVENING, ROOT, cell, publish, run_evening

import pytest
import yaml

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PINS = {p.split("==")[0]: p for p in PROJECT["optional-dependencies"]["course"]}
ALL = {name: pin.split("==")[1] for name, pin in PINS.items()}
SERVICES = re.compile(r"https://(?:colab\.|www\.kaggle\.com/kernels|mybinder\.org)[^\s)\"]*")


# ---- Which packages --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "pins"),
    [
        ({}, []),
        ({"pandas": None, "tqdm": None}, [PINS["pandas"], PINS["tqdm"]]),
        ({"matplotlib": "3.7.1", "numpy": "2.0.2", "jupyterlab": None}, []),
        ({"torch": "2.12.1+cu126", "triton": "3.7.0"}, []),
        ({"torch": "2.12.1+cpu", "triton": None}, ["triton==3.7.*"]),
        ({"torch": "2.15.0", "triton": "3.5.1"}, ["triton==3.9.*"]),
        ({"torch": "2.10.0", "triton": "3.5.1"}, [PINS["torch"], PINS["triton"]]),
        ({"torch": "2.16.0", "triton": "3.9.0"}, [PINS["torch"], PINS["triton"]]),
        ({"torch": None}, [PINS["torch"], PINS["triton"]]),
    ],
)
def test_what_is_there_and_in_range_is_kept(changes, pins):
    installed = {name: version for name, version in (ALL | changes).items() if version}
    assert hosted.to_install(PROJECT, installed, machine.PARTNERS) == pins


def test_everything_is_pinned_on_an_empty_python():
    pins = hosted.to_install(PROJECT, {}, machine.PARTNERS)
    assert {"torch", "triton", "numpy", "pandas", "matplotlib"} <= {p.split("==")[0] for p in pins}
    assert set(pins) <= set(PINS.values())


def test_each_torch_in_range_has_a_partner():
    text = re.search(r"(?m)^PARTNERS = (.*)$", (ROOT / "lib/machine.py").read_text())[1]
    assert ast.literal_eval(text) == machine.PARTNERS
    (torch_range,) = (d for d in PROJECT["dependencies"] if d.startswith("torch"))
    versions = [f"2.{k}" for k in range(30) if hosted.in_range(f"2.{k}.0", torch_range)]
    assert versions == list(machine.PARTNERS)


# ---- The cell, in a Python of its own --------------------------------------------------------


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    """A repository with the few files that the cell needs."""
    folder = tmp_path_factory.mktemp("published") / "course"
    for name in ("lib/hosted.py", "lib/machine.py", "pyproject.toml", "notebooks/teaching.md"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    git = ["git", "-c", "user.name=A", "-c", "user.email=a@example.org"]
    for command in (
        ["init", "--quiet"],
        ["add", "--all"],
        ["commit", "--quiet", "--message", "All"],
    ):
        subprocess.run([*git, *command], cwd=folder, check=True)
    return folder.as_uri()


@pytest.fixture(scope="module")
def archive(address):
    """The same as a .zip with a folder in it, as GitHub gives it."""
    folder = Path(address.removeprefix("file://"))
    return Path(shutil.make_archive(folder.parent / "main", "zip", folder.parent, folder.name))


@pytest.fixture
def run(tmp_path):
    """Runs the cell in an empty folder: (exit status, what it prints, what it says in the end)."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
    python = tmp_path / "venv/bin/python"
    (packages,) = (tmp_path / "venv/lib").glob("python*/site-packages")
    (tmp_path / "work").mkdir()
    (tmp_path / "bin").mkdir()

    def run(address, *, there=True, cwd=tmp_path / "work", git=True, times=1):
        path = sysconfig.get_path("purelib") if there is True else there
        (packages / "there.pth").write_text(f"{path or ''}\n")
        env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
        env |= {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": ""}
        env |= {} if git else {"PATH": str(tmp_path / "bin")}
        code = "\n".join([cell(address)] * times)
        done = subprocess.run(
            [python, "-c", code], cwd=cwd, env=env, capture_output=True, text=True
        )
        return done.returncode, done.stdout, done.stderr.strip()

    run.packages = packages
    run.course = tmp_path / "work/fused-kernels"
    return run


def assert_ready(run, result):
    assert result[::2] == (0, ""), result
    assert result[1].endswith("open notebooks/00_start_here.ipynb\n")
    assert (run.packages / "fused-kernels.pth").read_text() == f"{run.course}\n"


def test_a_clone_is_made_once(run, address):
    assert_ready(run, run(address, times=2))
    assert (run.course / ".git").exists()
    assert_ready(run, run("http://127.0.0.1:9/nothing"))  # a new kernel, with no network
    assert_ready(run, run("", cwd=run.course / "notebooks"))


@pytest.mark.parametrize("how", ["an address", "a path"])
def test_without_git_an_archive_does(run, archive, how):
    assert_ready(run, run(archive.as_uri() if how == "an address" else str(archive), git=False))
    assert [p.name for p in run.course.parent.iterdir()] == ["fused-kernels"]


def test_without_git_the_archive_of_a_repository_is_taken(run, archive, tmp_path):
    (tmp_path / "course/archive").mkdir(parents=True)
    shutil.copy(archive, tmp_path / "course/archive/HEAD.zip")
    assert_ready(run, run((tmp_path / "course.git").as_uri(), git=False))


def test_a_folder_of_the_course_is_taken(run, archive, tmp_path):
    shutil.unpack_archive(archive, tmp_path / "unpacked")
    (folder,) = (tmp_path / "unpacked").iterdir()
    shutil.rmtree(folder / ".git", ignore_errors=True)
    assert_ready(run, run(f" {folder} "))


def test_a_folder_one_level_up_is_searched(run, archive, tmp_path):
    shutil.unpack_archive(archive, tmp_path / "outer")
    (folder,) = (tmp_path / "outer").iterdir()
    shutil.rmtree(folder / ".git", ignore_errors=True)
    assert_ready(run, run(str(tmp_path / "outer")))


def test_a_repository_without_the_course_leaves_nothing(run, tmp_path):
    subprocess.run(["git", "init", "--quiet", tmp_path / "empty"], check=True)
    status, _, error = run(str(tmp_path / "empty"))
    assert status == 1 and "it holds no course" in error
    assert not list(run.course.parent.iterdir())


def test_a_folder_of_that_name_with_something_else_is_named(run, address):
    run.course.mkdir()
    status, _, error = run(address)
    assert status == 1 and "holds no course: delete or rename it" in error
    assert str(run.course) in error


def test_an_address_without_a_scheme_is_one_of_the_web(run):
    status, _, error = run("127.0.0.1:9/nothing")
    assert status == 1 and "https://127.0.0.1:9/nothing could not be fetched" in error


@pytest.mark.parametrize("address", ["", "  "])
def test_with_no_address_it_says_what_to_set(run, address):
    status, _, error = run(address)
    assert status == 1
    assert error == "Set REPOSITORY, in this cell's first line, to the address of the course."


@pytest.mark.parametrize("git", [True, False])
def test_with_no_network_it_says_so(run, git):
    status, _, error = run("http://127.0.0.1:9/nothing", git=git)
    assert status == 1 and "Traceback" not in error
    assert "http://127.0.0.1:9/nothing" in error and "is the network on" in error


def test_a_folder_that_cannot_be_written_is_named(run, address):
    status, _, error = run(address, cwd="/proc")  # root may write anywhere else
    assert status == 1 and "Traceback" not in error
    assert "may you write to /proc?" in error


def test_an_archive_of_something_else_is_refused(run, tmp_path):
    (tmp_path / "other").mkdir()
    (tmp_path / "other/file").touch()
    other = shutil.make_archive(tmp_path / "other", "zip", tmp_path / "other")
    for path in (other, sys.executable):
        link = tmp_path / "x.zip"
        link.unlink(missing_ok=True)
        link.symlink_to(path)
        status, _, error = run(str(link))
        assert status == 1 and "Traceback" not in error and "could not be fetched" in error
        assert not list(run.course.parent.iterdir())


def test_a_python_without_pip_gets_a_sentence(run, address):
    status, _, error = run(address, there=None)
    assert status == 1 and error.endswith("choose another kernel, or run it with -m ensurepip.")


def test_what_pip_cannot_install_is_named(run, address, tmp_path, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")  # as a Jupyter kernel does
    (tmp_path / "pip").mkdir()
    for path in Path(sysconfig.get_path("purelib")).glob("pip*"):
        (tmp_path / "pip" / path.name).symlink_to(path)
    status, printed, error = run(address, there=tmp_path / "pip")
    assert status == 1 and "Traceback" not in error
    assert f"Installing {PINS['torch']}" in printed
    assert "pip could not install" in error and "Is the network on" in error
    assert len(error.splitlines()) == 2 and "ERROR" not in error, error


@pytest.mark.parametrize("version", [(3, 10), (3, 15)])
def test_another_python_gets_a_sentence(monkeypatch, version):
    monkeypatch.setattr(sys, "version_info", (*version, 0))
    with pytest.raises(
        SystemExit, match=r"runs Python 3\.1[05], and the course needs 3\.11 to 3\.14"
    ):
        hosted.set_up()


def test_packages_in_use_ask_for_a_new_kernel(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    versions, pins = iter((ALL | {"torch": "2.5.0"}, ALL)), []
    monkeypatch.setattr(hosted, "_installed", lambda: next(versions))
    monkeypatch.setattr(hosted, "_install", pins.extend)
    monkeypatch.setattr(hosted, "_let_python_find_lib", lambda: None)
    with pytest.raises(SystemExit, match="restart the kernel, then run this cell again"):
        hosted.set_up()
    assert pins == [PINS["torch"], PINS["triton"]]


@pytest.mark.parametrize(
    ("settings", "answers", "options"),
    [
        ("global.cert='/a.crt'", True, ["--extra-index-url", hosted.CPU_BUILDS]),
        ("global.cert='/a.crt'", False, []),
        (":env:.index-url='https://pypi.org/simple'", True, []),
        ("global.extra-index-url='file:///packages'", True, []),
    ],
)
def test_builds_without_cuda_where_pip_knows_no_index(monkeypatch, settings, answers, options):
    done = subprocess.CompletedProcess((), 0, stdout=settings)
    monkeypatch.setattr(hosted.subprocess, "run", lambda *_, **__: done)
    monkeypatch.setattr(hosted, "_answers", lambda _: answers)
    assert hosted.cpu_builds(["pip"]) == options


def test_make_asks_for_them_and_takes_no_answer_for_none():
    (line,) = re.findall(r"(?m)^CPU_BUILDS = (.*)$", (ROOT / "Makefile").read_text())
    env = os.environ | {"PIP_INDEX_URL": "https://pypi.org/simple"}
    command = [sys.executable, "-c", line]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "\n", "")


# ---- Around it -------------------------------------------------------------------------------


def badges(repository, pages):
    """The links to services in these pages that do not fit the address of the repository."""
    owner = re.fullmatch(r"https://github\.com/([\w.-]+/[\w.-]+?)(?:\.git)?", repository)
    link = re.compile(rf".*/{re.escape(owner[1])}/.*?(notebooks/\w+\.ipynb)" if owner else "(?!)")
    links = [url for page in pages for url in SERVICES.findall(page)]
    return [u for u in links if not (m := link.fullmatch(u)) or not (ROOT / m[1]).exists()]


def test_no_badge_without_an_address():
    (repository,) = re.findall(r'(?m)^REPOSITORY = "(.*)"', (ROOT / "README.md").read_text())
    pages = [
        ROOT / "README.md",
        *(ROOT / "notebooks").glob("*.md"),
        *(ROOT / "notebooks").glob("*.ipynb"),
    ]
    assert not badges(repository, [page.read_text() for page in pages])


def test_a_badge_leads_to_a_notebook_of_the_address():
    colab = "https://colab.research.google.com/github/{}/blob/main/notebooks/{}.ipynb"
    here, there = colab.format("ada/course", EVENING[0]), colab.format("bob/course", EVENING[0])
    gone = colab.format("ada/course", "00_gone")
    assert badges("", [f"[![Open]({here})]"]) == [here]
    assert badges("https://github.com/ada/course", [here, there, gone]) == [there, gone]


def test_ci_runs_the_cell():
    jobs = yaml.safe_load((ROOT / ".github/workflows/test.yml").read_text())["jobs"]
    commands = [step.get("run", "") for step in jobs["hosted"]["steps"]]
    assert any("-m lib.tests.hosted" in command for command in commands)
    assert "schedule" in jobs["hosted"]["if"]


def test_an_empty_python_runs_the_evening(tmp_path):
    try:
        last_lines = run_evening(publish(tmp_path / "published"), tmp_path)
    except subprocess.CalledProcessError as error:
        if "pip" in map(str, error.cmd):
            pytest.skip("pip reaches no index")
        raise
    assert len(last_lines) == 2
    assert all(line.endswith("open notebooks/00_start_here.ipynb") for line in last_lines)
