"""README's cell for hosted notebooks, on an empty Python: python -m lib.tests.hosted ADDRESS FOLDER

It makes an environment with a Jupyter kernel and nothing else, runs the evening's notebooks in it with the cell
on top, the second one offline, and raises where a cell fails. This program needs the standard library alone.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
EVENING = ("00_start_here", "01_six_small_kernels")
OFFLINE = {
    "PIP_NO_INDEX": "1",
    "PIP_FIND_LINKS": "",
    "GIT_ALLOW_PROTOCOL": "none",
    **dict.fromkeys(("http_proxy", "https_proxy"), "http://127.0.0.1:9"),
}
EXECUTE = """
import sys, nbclient, nbformat
notebook = nbformat.read(sys.argv[1], as_version=4)
nbclient.NotebookClient(notebook, timeout=1800, kernel_name="python3").execute()
print(*(output.text for output in notebook.cells[0].outputs), sep="", end="")  # text, and nothing else
"""


def cell(address=""):
    """The cell that README gives, with the address of a repository in its first line."""
    text = (ROOT / "README.md").read_text()
    (code,) = re.findall(r'(?s)```python\n(REPOSITORY = ".*?)```', text)
    return re.sub('".*?"', lambda _: repr(address), code, count=1)


def make_environment(folder):
    """A Python with a Jupyter kernel and nothing else, and the variables to run it with."""
    subprocess.run([sys.executable, "-m", "venv", folder / "venv"], check=True)
    python = folder / "venv/bin/python"
    packages = ["ipykernel", "nbclient"]
    subprocess.run([python, "-m", "pip", "install", "--quiet", *packages], check=True)
    for name in ("home", "work"):
        (folder / name).mkdir()
    left_out = re.compile(r"PYTHONPATH|TRITON_|FUSED_KERNELS_|PYTEST_|CUDA_ON_CPU|MAKE")
    env = {k: v for k, v in os.environ.items() if not left_out.match(k)}
    return python, env | {"HOME": str(folder / "home")}


def run_evening(address, folder):
    """Run 00, and then 01 offline and with the cell twice. The last lines that the cell printed."""
    python, env = make_environment(folder)
    last_lines = []
    for k, stem in enumerate(EVENING):
        notebook = json.loads((ROOT / f"notebooks/{stem}.ipynb").read_text())
        code = {
            "cell_type": "code",
            "id": "hosted",
            "metadata": {},
            "outputs": [],
            "execution_count": None,
        }
        code["source"] = cell(address)
        notebook["cells"][:0] = [code, {**code, "id": "again"}][: k + 1]
        path = folder / f"{stem}.ipynb"
        path.write_text(json.dumps(notebook))
        done = subprocess.run(
            [python, "-c", EXECUTE, path], cwd=folder / "work", env=env | (OFFLINE if k else {}),
            text=True, capture_output=True,
        )  # fmt: skip
        if done.returncode:
            raise RuntimeError(f"{stem} failed:\n{done.stderr[-4000:]}")
        last_lines.append(done.stdout.splitlines()[-1])
    # as in a notebook that is opened from the clone, without the cell
    subprocess.run([python, "-c", "import lib.machine"], cwd=folder, env=env, check=True)
    return last_lines


def publish(folder):
    """The address of a repository that holds these files, committed or not."""
    leave = shutil.ignore_patterns(".git", ".venv*", ".reader", ".*cache", "__pycache__")
    shutil.copytree(ROOT, folder, ignore=leave)
    git = ["git", "-c", "user.name=A", "-c", "user.email=a@example.org"]
    for command in (
        ["init", "--quiet"],
        ["add", "--all"],
        ["commit", "--quiet", "--message", "All"],
    ):
        subprocess.run([*git, *command], cwd=folder, check=True)
    return folder.as_uri()


if __name__ == "__main__":
    where = Path(sys.argv[2]).absolute()
    where.mkdir(parents=True)
    print(*run_evening(sys.argv[1], where), sep="\n")
