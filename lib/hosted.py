"""Set the course up in a notebook that a hosted service runs: its packages, and where to find `lib`.

The cell in README fetches the course and runs this file. It imports nothing of `lib`, because importing `lib`
imports torch. A package that is there already is kept if pyproject.toml allows it.
"""

import ast
import importlib
import importlib.metadata
import os
import re
import shutil
import site
import subprocess
import sys
import sysconfig
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CPU_BUILDS = "https://download.pytorch.org/whl/cpu"
FIRST = "notebooks/00_start_here.ipynb"


def in_range(version, range_):
    """Whether a version such as 2.12.0+cu126 is in a range such as >=2.11,<2.16; all are in an empty one."""
    least, less = re.search(r">=([\d.]+)", range_), re.search(r"<([\d.]+)", range_)
    v = _numbers(version)
    return (not least or v >= _numbers(least[1])) and (not less or v < _numbers(less[1]))


def _numbers(version):
    return tuple(int(n) for n in version.split("+")[0].split(".")[:2])


def to_install(project, installed, partners):
    """What pip has to install: the pins of what is missing or out of range.

    project: the table [project] of pyproject.toml. installed: {package: version}. partners: the triton that
    each torch is released with. A torch that is kept keeps its triton, or gets the one of its release.
    """
    ranges = {re.match(r"[\w-]+", d)[0]: d for d in project["dependencies"]}
    pins = {p.split("==")[0]: p for p in project["optional-dependencies"]["course"]}
    needed = [*ranges, "numpy", "pyarrow"]
    right = {n for n in needed if n in installed and in_range(installed[n], ranges.get(n, ""))}
    wrong = [n for n in needed if n not in right]
    if "torch" in wrong:  # the two go together
        return [pins[n] for n in needed if n in {*wrong, "triton"}]
    partner = partners["{}.{}".format(*_numbers(installed["torch"]))]
    return [f"triton=={partner}.*" if n == "triton" else pins[n] for n in wrong]


def set_up():
    """Install what is missing, change into the folder of the notebooks, and say what to open."""
    text = (ROOT / "pyproject.toml").read_text()
    here = "{}.{}".format(*sys.version_info)
    if not in_range(here, re.search(r'requires-python = "(.*)"', text)[1]):
        raise SystemExit(
            f"This notebook runs Python {here}, and the course needs 3.11 to 3.14: choose another kernel."
        )
    import tomllib  # Python 3.10 has none

    partners = re.search(r"(?m)^PARTNERS = (.*)$", (ROOT / "lib/machine.py").read_text())[1]
    before = _installed()
    missing = to_install(tomllib.loads(text)["project"], before, ast.literal_eval(partners))
    if missing:
        _install(missing)
    _let_python_find_lib()
    os.chdir(ROOT / "notebooks")
    versions = _installed()
    changed = {"lib"} if missing else set()  # without torch `lib` repairs nothing
    changed |= {name for name, version in before.items() if versions.get(name) != version}
    if changed & set(sys.modules):
        raise SystemExit(
            "Packages in use were replaced: restart the kernel, then run this cell again."
        )
    print(
        f"Ready in {ROOT}, with torch {versions['torch']} and triton {versions['triton']}. "
        f"In a notebook of the course go on with the cells below; else open {FIRST}"
    )


def _installed():
    importlib.invalidate_caches()
    packages = [(d.metadata["Name"], d.version) for d in importlib.metadata.distributions()]
    # the first on the path is the one that is imported; what has no name was half removed
    return {name.lower(): version for name, version in reversed(packages) if name}


def _install(pins):
    python = [sys.executable, "-m", "pip"]
    if subprocess.run([*python, "--version"], capture_output=True).returncode:
        raise SystemExit(
            f"{sys.executable} has no pip: choose another kernel, or run it with -m ensurepip."
        )
    print(f"Installing {', '.join(pins)}: some minutes, where torch is one of them", flush=True)
    # A Jupyter kernel asks programs for colours, and a coloured error is not found below.
    command = [*python, "install", "--quiet", "--no-color", *pins]
    if any(p.startswith("torch==") for p in pins) and not shutil.which("nvidia-smi"):
        command += cpu_builds(python)
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        errors = re.findall(r"(?m)^ERROR: (.*)", done.stderr) or [done.stderr.strip()]
        raise SystemExit(
            f"pip could not install {' '.join(pins)}: {errors[0]}\n"
            "Is the network on (in Kaggle: Settings, Internet), is there disk for 6 GB, "
            f"and may you write to {sysconfig.get_path('purelib')}?"
        )
    if site.ENABLE_USER_SITE:
        # pip's choice where it may not write beside Python
        site.addsitedir(site.getusersitepackages())


def cpu_builds(pip):
    """pip's options for a torch without CUDA, 2 GB instead of 6; none where pip is told of an index.

    None as well where that torch cannot be had: then pip takes the other one. pip: the command, as a list.
    """
    settings = subprocess.run([*pip, "config", "list"], capture_output=True, text=True).stdout
    if "index" in settings or not _answers(CPU_BUILDS):
        return []
    return ["--extra-index-url", CPU_BUILDS]


def _answers(url):
    """Whether a page can be fetched; pip would try for minutes, and say nothing."""
    try:
        with urllib.request.urlopen(f"{url}/torch/", timeout=10):
            return True
    except OSError:
        return False


def _let_python_find_lib():
    """In this kernel, and in those of notebooks that are opened later."""
    if str(ROOT) not in sys.path:
        sys.path.insert(0, str(ROOT))
    for folder in (sysconfig.get_path("purelib"), site.getusersitepackages()):
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
            Path(folder, "fused-kernels.pth").write_text(f"{ROOT}\n")
            return
        except OSError:
            continue
    print("Nothing may be written beside Python: run this cell in each notebook, above all others.")
