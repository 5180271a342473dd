"""Plausible wrong answers to the exercises of each notebook: each must be rejected."""

import importlib.util
import itertools
import tempfile
from pathlib import Path

from lib.recorded.results import ROOT

_folder, _numbers = tempfile.TemporaryDirectory(), itertools.count()


def solution(notebook, *changes):
    """The module of a notebook's solutions, right unless changed: old, new, old, new, …"""
    text = (ROOT / f"notebooks/solutions/{notebook}.py").read_text()
    for old, new in zip(changes[::2], changes[1::2], strict=True):
        assert old in text, old
        text = text.replace(old, new)
    # a file, as Triton reads a kernel's source there
    path = Path(_folder.name) / f"solution_{next(_numbers)}_{notebook}.py"
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
