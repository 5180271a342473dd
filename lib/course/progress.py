"""The reader's own files (.reader/, ignored by git): predictions and progress.

Set FUSED_KERNELS_READER to store them elsewhere. Where the folder cannot be written, they are kept in memory
until the process ends.
"""

import os
from pathlib import Path

_in_memory: dict[str, list[str]] = {}


def folder():
    """The folder of the reader's files."""
    default = Path(__file__).resolve().parents[2] / ".reader"
    return Path(os.environ.get("FUSED_KERNELS_READER", default))


def append(name, line):
    """Add one line to the file `name`."""
    try:
        folder().mkdir(parents=True, exist_ok=True)
        with open(folder() / name, "a") as file:
            file.write(line + "\n")
    except OSError:
        _in_memory.setdefault(name, []).append(line)


def read_lines(name):
    """The lines of the file `name`, oldest first; none when there is no such file."""
    try:
        lines = (folder() / name).read_text().splitlines()
    except OSError:
        lines = []
    return lines + _in_memory.get(name, [])
