"""The bug museum of notebook 60: mistakes of real libraries, as code that runs.

museum.look(14)                 the broken code
museum.visit(14, [1, 2, 3])     does it go wrong on this input, and is there a smaller one?
museum.verdict(14)              an input that shows nothing, the smallest one that does, and the fix
museum.tour()                   all of them in one figure
"""

from lib.course.show import show_source
from lib.exercises.museum import addresses, floats, gradients, order

import matplotlib.pyplot as plt

ROOMS = {
    "Numbers": floats.EXHIBITS,
    "Addresses": addresses.EXHIBITS,
    "Order": order.EXHIBITS,
    "Gradients and tests": gradients.EXHIBITS,
}
EXHIBITS = dict(enumerate((e for room in ROOMS.values() for e in room), start=1))


def _exhibit(number):
    if number not in EXHIBITS:
        raise ValueError(f"there is no exhibit {number!r}; they go from 1 to {len(EXHIBITS)}")
    return EXHIBITS[number]


def look(number):
    """Show the broken code of an exhibit."""
    exhibit = _exhibit(number)
    show_source(exhibit.code(), exhibit.language)


def visit(number, answer):
    """A line that says whether an exhibit goes wrong on this input; for None, what to give."""
    exhibit = _exhibit(number)
    if answer is None:
        return Line(f"○ Put {exhibit.kind.description} in place of None.")
    if missing := exhibit.missing():
        return Line(f"– skipped: {missing}")
    try:
        evidence = exhibit.evidence(answer)
    except ValueError as why:
        return Line(f"✘ {why}")
    if evidence is None:
        return Line(f"✘ {_short(answer)}: broken and mended give the same.")
    if exhibit.is_smallest(answer):
        return Line(f"✔ {evidence}. {_is_smallest(exhibit, answer)}")
    return Line(f"● {evidence}. A smaller input shows it too.")


def _is_smallest(exhibit, answer):
    """How an input compares with the smallest known: a list by its length, a real number within 0.1 %."""
    if isinstance(exhibit.smallest, list):
        return "We know of no shorter list."
    if exhibit.size(answer) > exhibit.size(exhibit.smallest):
        return "The smallest that we know is within 0.1 % of it."
    return "We know of nothing smaller."


def _short(answer):
    text = str(answer)
    return text if len(text) <= 60 else f"{text[:57]}..."


class Line(str):
    """Text that a cell shows as it is, without quotes."""

    __repr__ = str.__str__


def verdict(number):
    """Show what an exhibit does on two inputs, and the lines that fix it."""
    exhibit = _exhibit(number)
    if missing := exhibit.missing():
        print(f"– skipped: {missing}")
    else:
        print(f"{exhibit.passes}: {exhibit.evidence(exhibit.passes) or 'broken and mended agree'}")
        print(f"{exhibit.smallest}: {exhibit.evidence(exhibit.smallest)}")
    show_source(exhibit.fix(), "diff")


def tour():
    """A figure: inputs that pass beside the smallest that fail, where size is counted in elements."""
    counted = {n: e for n, e in EXHIBITS.items() if e.kind.unit == "elements"}
    rows = list(counted)[::-1]
    figure, ax = plt.subplots(figsize=(7.5, 0.9 + 0.3 * len(rows)), layout="constrained")
    passes = [counted[n].size(counted[n].passes) for n in rows]
    fails = [counted[n].size(counted[n].smallest) for n in rows]
    ax.hlines(range(len(rows)), fails, passes, color="#b9c9dd", linewidth=2, zorder=0)
    passing = {"marker": "o", "facecolors": "white", "edgecolors": "black"}
    ax.scatter(passes, range(len(rows)), s=55, label="a test that passes", **passing)
    ax.scatter(
        fails, range(len(rows)), s=55, label="the smallest that fails", marker="X", c="#1f4e79"
    )
    ax.set_yticks(range(len(rows)), [f"{n} · {counted[n].title}" for n in rows])
    ax.set(xscale="log", xlabel="elements")
    ax.legend(loc="lower right")
    return figure
