"""Recorded measurements: data/results/<gpu>/<name>.json, each with the machine and the code it came from.

A recorded number is always shown with its GPU and date. Where nothing was recorded yet, a table says so.
A notebook's record has the hash of the notebook's code alone: that of an op which it calls does not count.
"""

import ast
import dataclasses
import hashlib
import json
import os
import re
import subprocess
from pathlib import Path

from lib import machine
from lib.standalone import standalone

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "data" / "results"
REFERENCE_GPU = "h200"
NOT_RECORDED = "not recorded yet"
STEADY = 1.1  # p80 over p20 of a row: what passes it is measured again, and then marked


def gpu_slug(name=None):
    """'NVIDIA H200' -> 'h200': the folder of a GPU's results."""
    words = (name or machine.gpu_name()).lower().replace("nvidia", "").replace("geforce", "")
    return re.sub(r"[^a-z0-9]+", "_", words).strip("_")


def text_at(ref, path):
    """The text of a file of the project at a commit."""
    show = ["git", "show", f"{ref}:{path}"]
    return subprocess.run(show, cwd=ROOT, capture_output=True, text=True, check=True).stdout


def source_hash(paths):
    """Twelve hex digits of the code in `paths` (relative to the project), whatever those paths are called.

    Of an op this is what `make copy` writes: what it uses of the shared files counts, and nothing else of them.
    """
    return code_hash(text for path in paths for text in code_in(path, _whole(Path(path))))


def _whole(path):
    is_op = path.parent == Path("lib/ops") and path.suffix == ".py"
    return standalone(path.stem) if is_op else (ROOT / path).read_text()


def code_in(path, text):
    """The pieces of code in the text of a file: the code cells of a notebook, else all of it."""
    if not str(path).endswith(".ipynb"):
        return [text]
    cells = json.loads(text)["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]


def code_hash(texts):
    """Twelve hex digits of the code in `texts`, Python or CUDA C++.

    Comments, docstrings, imports, indentation and blank lines do not count: prose may be edited and a file may
    move without making a recording stale.
    """
    code = [line for text in texts for line in _code_of(text)]
    return hashlib.sha256("\n".join(code).encode()).hexdigest()[:12]


def _code_of(text):
    lines = text.splitlines()
    try:
        tree = ast.parse(text)
    except SyntaxError:  # CUDA C++
        comment = "//"
    else:
        comment = "#"
        for node in ast.walk(tree):
            if isinstance(node, (ast.Import, ast.ImportFrom)) or is_docstring(node):
                first, last = node.lineno - 1, node.end_lineno
                lines[first:last] = [""] * (last - first)
    lines = [line.strip() for line in lines]
    return [line for line in lines if line and not line.startswith(comment)]


def is_docstring(node):
    """Whether the statement is only a string."""
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def save(name, rows, sources, folder=None):
    """Write `rows` (a list of dictionaries) with this machine's stamp and the hash of `sources`."""
    record = {
        "name": name,
        "stamp": dataclasses.asdict(machine.stamp()),
        "source_hash": source_hash(sources),
        "sources": list(sources),
        "rows": rows,
    }
    path = (folder or FOLDER) / gpu_slug() / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n")
    return path


def load(name, gpu=REFERENCE_GPU):
    """The record that `save` wrote, or None when nothing was recorded yet."""
    path = FOLDER / gpu / f"{name}.json"
    if not path.exists():
        return None
    return json.loads(path.read_text())


def launches_are_the_same(name):
    """Write the hash of the code as it is now into the records of an op that lib.measure.launch_diff compared.

    The hash of the code that was measured stays beside it, as `measured_source_hash`.
    """
    for path in FOLDER.glob("*/*.json"):
        record = json.loads(path.read_text())
        if f"lib/ops/{name}.py" in record["sources"] and is_stale(record):
            record.setdefault("measured_source_hash", record["source_hash"])
            record["source_hash"] = source_hash(record["sources"])
            path.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n")


def is_stale(record):
    """True when the code has changed since the record was made."""
    return record["source_hash"] != source_hash(record["sources"])


def where(record):
    """'recorded on NVIDIA H200, 2026-11-21'."""
    return f"recorded on {record['stamp']['gpu']}, {record['stamp']['date']}"


def spread_of(row):
    """p80 over p20 of a measured or recorded row; 1 where it has no times."""
    return row["p80_us"] / row["p20_us"] if "p20_us" in row else 1


@dataclasses.dataclass(frozen=True)
class Measurement:
    """A value and where it comes from: 'measured here', 'recorded on …' or 'not recorded yet'."""

    value: object
    where: str

    def __repr__(self):
        return f"{self.value} ({self.where})"


def measured_or_recorded(key, measure, n_gpus=1):
    """`measure()` on a machine with a GPU; elsewhere the value recorded under `key` by `make record`.

    key: '<notebook>.<what>', as '02_measure_time.no_sync'; the value must survive JSON.
    n_gpus: how many GPUs `measure` needs.
    """
    notebook, what = key.split(".", 1)
    name = f"notebook_{notebook}"
    if not machine.has_gpus(n_gpus):
        record = load(name)
        rows = {row["key"]: row["value"] for row in record["rows"]} if record else {}
        return Measurement(rows.get(what), where(record) if what in rows else NOT_RECORDED)
    value = measure()
    if os.environ.get("FUSED_KERNELS_RECORD"):
        _record_value(name, notebook, what, value)
    return Measurement(value, "measured here")


def recording_the_reference():
    """Whether `make record` is running a notebook on the GPU whose results are shown to all readers."""
    return bool(os.environ.get("FUSED_KERNELS_RECORD")) and gpu_slug() == REFERENCE_GPU


def _record_value(name, notebook, what, value):
    old = load(name, gpu_slug())
    others = [row for row in (old["rows"] if old else []) if row["key"] != what]
    rows = sorted([*others, {"key": what, "value": value}], key=lambda row: row["key"])
    save(name, rows, sources=[f"notebooks/{notebook}.ipynb"])
