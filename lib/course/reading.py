"""Read a text beside what its lines mean: output code, and what a shell command prints.

part(text, start, end)            # the lines from one pattern to another
explain(text, {pattern: meaning}) # a table of the lines that patterns find
beside(left, right, rows)         # two kernels, line by line, with a remark on each pair
shell(command, **scripts)         # what a command prints, in a folder that holds these scripts
"""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from lib.course.show import style_table

import pandas as pd

_TEXT = {"font-family": "monospace", "text-align": "left"}


def part(text, start, end):
    """From the first line that `start` matches to the next that `end` matches, cut at 96 characters."""
    lines = text.splitlines()
    first = next(i for i, line in enumerate(lines) if re.search(start, line))
    last = next(i for i in range(first, len(lines)) if re.search(end, lines[i]))
    return "\n".join(
        line if len(line) <= 96 else line[:95] + "…" for line in lines[first : last + 1]
    )


def _line(text, pattern):
    """What a pattern finds in a text, – for no pattern."""
    return re.search(pattern, text, re.M)[0].strip() if pattern else "–"


def explain(text, meanings):
    """A table of what each pattern finds in the text, and what that means."""
    entries = [_line(text, pattern) for pattern in meanings]
    table = style_table(pd.DataFrame({"line": entries, "what it says": meanings.values()}))
    return table.set_properties(subset=["line"], width="45%", **_TEXT)


def beside(left, right, rows, names=("yours", "the compiler's")):
    """A table of rows (pattern in left, pattern in right, remark); a pattern may be None."""
    entries = [(_line(left, a), _line(right, b), remark) for a, b, remark in rows]
    table = style_table(pd.DataFrame(entries, columns=[*names, "the difference"]))
    table = table.set_properties(subset=[*names], width="34%", **_TEXT)
    return table.set_properties(subset=["the difference"], width="32%")


def shell(command, **scripts):
    """What a shell prints for `command`, both streams; scripts: name=text, a Python file name.py each."""
    root = str(Path(__file__).parents[2])
    caches_off = {"TORCHINDUCTOR_FX_GRAPH_CACHE": "0", "TORCHINDUCTOR_AUTOGRAD_CACHE": "0"}
    paths = {
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]),
        "PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")]),
    }
    with tempfile.TemporaryDirectory() as folder:
        for name, text in scripts.items():
            Path(folder, f"{name}.py").write_text(text)
        done = subprocess.run(
            command, shell=True, cwd=folder, env={**os.environ, **paths, **caches_off},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"`{command}` failed:\n{done.stdout[-2000:]}")
    return done.stdout
