"""Run notebooks and save their outputs: `make run`, `make record`, and the test that outputs are current.

The metadata of a recorded notebook says where its outputs come from (GPU, driver, torch, triton, date) and
holds the hash of its code cells. When the code changes, the outputs are stale and a test says which command
to run.

    python -m lib.recorded.notebooks run 03        execute a scratch copy here, save nothing
    python -m lib.recorded.notebooks record [03]   execute on this GPU, save outputs and results
    python -m lib.recorded.notebooks status        which notebooks are recorded, stale, or not recorded yet
"""

import argparse
import dataclasses
import os
import re
import sys
import tempfile
from pathlib import Path

from lib import machine
from lib.nogpu import recorded_code
from lib.recorded import results

import nbformat

FOLDER = results.ROOT / "notebooks"
KEY = "fused_kernels"
MAX_BYTES = 400_000
TIMEOUT_S = 300


def notebooks(number=None):
    """Paths of all notebooks, or of the one numbered `number`; ValueError when there is none."""
    paths = sorted(FOLDER.glob("[0-9][0-9]_*.ipynb"))
    if number is None:
        return paths
    chosen = [p for p in paths if p.name.split("_")[0] == str(number).zfill(2)]
    if not chosen:
        there = ", ".join(p.name.split("_")[0] for p in paths)
        raise ValueError(f"there is no notebook {number}; there are: {there}")
    return chosen


def code_hash(notebook):
    """Twelve hex digits of the code cells of a notebook, in order; imports and comments do not count."""
    return results.code_hash(cell.source for cell in notebook.cells if cell.cell_type == "code")


def status(path):
    """'not recorded yet', 'stale' (the code cells changed since), or 'recorded on NVIDIA H200 · …'."""
    notebook = nbformat.read(path, as_version=4)
    stamp = notebook.metadata.get(KEY)
    if stamp is None:
        return results.NOT_RECORDED
    if stamp["code_hash"] != code_hash(notebook):
        return "stale"
    return f"recorded on {stamp['gpu']} · torch {stamp['torch']} · triton {stamp['triton']} · {stamp['date']}"


def execute(notebook, folder):
    """Run all cells of `notebook` in place, as Restart & Run All does; raises where a cell fails."""
    from nbclient import NotebookClient
    from tqdm import tqdm

    total = sum(cell.cell_type == "code" for cell in notebook.cells)
    with tqdm(total=total, unit="cell") as progress:
        client = NotebookClient(
            notebook,
            timeout=TIMEOUT_S,
            kernel_name="python3",
            resources={"metadata": {"path": str(folder)}},
            on_cell_executed=lambda **_: progress.update(),
        )
        client.execute()


def run(path):
    """Execute a copy of the notebook in a scratch folder."""
    with tempfile.TemporaryDirectory() as folder:
        execute(nbformat.read(path, as_version=4), folder)


def record(path):
    """Execute the notebook on this GPU and save its outputs, cleaned and stamped."""
    if not machine.HAS_GPU:
        raise SystemExit("record needs a GPU; `make run` executes a notebook and saves nothing")
    os.environ["FUSED_KERNELS_RECORD"] = path.stem
    recorded_code.forget(path.stem)
    notebook = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory() as reader:
        os.environ["FUSED_KERNELS_READER"] = reader  # hides the own guesses and progress
        execute(notebook, FOLDER)
    clean(notebook)
    stamp = dataclasses.asdict(machine.stamp())
    notebook.metadata[KEY] = {**stamp, "code_hash": code_hash(notebook)}
    text = nbformat.writes(notebook)
    if len(text.encode()) > MAX_BYTES:
        raise SystemExit(
            f"{path.name}: {len(text.encode()):,} bytes with outputs; keep it below {MAX_BYTES:,}"
        )
    path.write_text(text + "\n")


def clean(notebook):
    """Drop what belongs to one run or one machine: timings of cells, progress bars on stderr, paths."""
    for cell in notebook.cells:
        if cell.cell_type != "code":
            continue
        cell.metadata.pop("execution", None)
        cell.outputs = [scrub(output) for output in cell.outputs if output.get("name") != "stderr"]


def scrub(output):
    """One output with folders of this machine replaced by '…'."""
    folders = {
        str(results.ROOT),
        str(Path.home()),
        tempfile.gettempdir(),
        sys.prefix,
        sys.base_prefix,
    }
    pattern = "|".join(
        re.escape(f) + r"[\w./+-]*/" for f in sorted(folders, key=len, reverse=True) if len(f) > 1
    )

    def text_of(value):
        if isinstance(value, list):
            return [text_of(v) for v in value]
        return re.sub(pattern, "…/", value) if isinstance(value, str) else value

    if "text" in output:
        output["text"] = text_of(output["text"])
    for kind, value in output.get("data", {}).items():
        if kind.startswith("text/"):
            output["data"][kind] = text_of(value)
    return output


def main(argv=None):
    """Command line; see the module's docstring."""
    parser = argparse.ArgumentParser(prog="python -m lib.recorded.notebooks")
    parser.add_argument("action", choices=["run", "record", "status"])
    parser.add_argument("number", nargs="?", help="a notebook's number; default: all")
    options = parser.parse_args(argv)
    try:
        paths = notebooks(options.number or None)
    except ValueError as error:
        raise SystemExit(str(error)) from None
    for path in paths:
        if options.action == "status":
            print(f"{path.name:30} {status(path)}")
        else:
            print(path.name, flush=True)
            {"run": run, "record": record}[options.action](path)


if __name__ == "__main__":
    main()
