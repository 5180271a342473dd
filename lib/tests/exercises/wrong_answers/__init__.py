"""Plausible wrong answers to the exercises of each notebook: each must be rejected."""

from lib.measure.mutants import load
from lib.recorded.results import ROOT


def solution(notebook, *changes):
    """The module of a notebook's solutions, right unless changed: old, new, old, new, …"""
    text = (ROOT / f"notebooks/solutions/{notebook}.py").read_text()
    for old, new in zip(changes[::2], changes[1::2], strict=True):
        assert old in text, old
        text = text.replace(old, new)
    return load(f"solution_{notebook}", text)
