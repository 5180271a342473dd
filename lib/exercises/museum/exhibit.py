"""What an exhibit of the bug museum is, and how a visitor's input is judged.

With a GPU too it is the interpreter that runs exhibits: their kernels may write anywhere.
"""

import dataclasses
import difflib
import inspect
import math
from collections.abc import Callable

from lib.nogpu.interpreter import interpreted_launches

import numpy as np
import torch
import triton

MOST_ELEMENTS = 1 << 16  # the interpreter needs a second for as many


# --- what a visitor hands in ---------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Kind:
    """A kind of input: `ask` in words, read(given) -> what the exhibit runs on, size(given) in `unit`."""

    ask: str
    unit: str
    read: Callable
    size: Callable


def _is_number(value):
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return isinstance(value, float) or abs(value) < 2**127  # beyond it there is no such float32


def _read_numbers(given):
    if not isinstance(given, (list, tuple)) or not given or not all(map(_is_number, given)):
        raise ValueError(f"hand in a list of numbers, such as [1, 2.5]; got {given!r}")
    if len(given) > MOST_ELEMENTS:
        raise ValueError(f"hand in {MOST_ELEMENTS} numbers at most; got {len(given)}")
    return torch.tensor(given, dtype=torch.float32)


def _read_magnitude(given):
    if not _is_number(given):
        raise ValueError(f"hand in one number, such as 2.5; got {given!r}")
    return torch.tensor([given], dtype=torch.float32)


def limited(kind, ask, holds):
    """The Kind of those inputs of `kind` for which holds(what is read) is true."""

    def read(given):
        value = kind.read(given)
        if not holds(value):
            raise ValueError(f"hand in {ask}; got {given!r}")
        return value

    return dataclasses.replace(kind, ask=ask, read=read)


def whole_numbers(least, most, ask="a whole number", unit="its size"):
    """The Kind of whole numbers from `least` to `most`."""

    def read(given):
        whole = isinstance(given, int) and not isinstance(given, bool)
        if not whole or not least <= given <= most:
            raise ValueError(f"hand in {ask} from {least} to {most}; got {given!r}")
        return given

    return Kind(ask, unit, read, int)


def _read_shape(given, most=MOST_ELEMENTS):
    whole = isinstance(given, (list, tuple)) and [isinstance(n, int) and n > 0 for n in given]
    if whole != [True, True]:
        raise ValueError(f"hand in (rows, columns), such as (2, 3); got {given!r}")
    if math.prod(given) > most:
        raise ValueError(f"hand in {most} elements at most; got {math.prod(given)}")
    return tuple(given)


numbers = Kind("a list of numbers", "elements", _read_numbers, len)
magnitude = Kind("one number", "its size", _read_magnitude, abs)
length = whole_numbers(1, MOST_ELEMENTS, unit="elements")
position = whole_numbers(0, MOST_ELEMENTS)
shape = Kind("(rows, columns)", "elements", _read_shape, math.prod)
virtual_shape = Kind(
    "(rows, columns), as large as you like", "elements", lambda s: _read_shape(s, 2**60), math.prod
)


# --- the exhibit ---------------------------------------------------------------------------------------------


def on_elements(kernel, x):
    """y = kernel(x) by one program. y starts as NaN, so that what nobody writes is seen."""
    y = torch.full_like(x, torch.nan)
    kernel[(1,)](x, y, x.numel(), BLOCK_SIZE=triton.next_power_of_2(x.numel()))
    return y


def compared(run, broken, fixed, given, atol=0.0):
    """What `broken` gives that `fixed` does not, in words; None when they agree to a part in a thousand."""
    right = run(fixed, given)
    try:
        got = run(broken, given)
    except IndexError as error:  # OutOfBounds: on a GPU it would read whatever is there
        return str(error).partition("\n")[0].rstrip(".")
    got, right = torch.as_tensor(got), torch.as_tensor(right)
    same = torch.isclose(got.double(), right.double(), rtol=1e-3, atol=atol, equal_nan=True)
    if same.all():
        return None
    at = int((~same.flatten()).nonzero()[0])
    where = f"element {at} is " if got.numel() > 1 else ""
    return f"{where}{_text(got.flatten()[at])} instead of {_text(right.flatten()[at])}"


def _text(element):
    whole = element.dtype in (torch.bool, torch.int64)
    return str(element.item()) if whole else f"{element.item():.6g}"


@dataclasses.dataclass(frozen=True)
class Exhibit:
    """One mistake, kept running.

    broken, fixed: a kernel or a function, or a tuple of what is to be shown, of which the last one is run
    kind: what a visitor hands in; passes: such an input on which nothing is seen, as tests like to take them;
    smallest: one on which it is seen, none smaller being known
    run(broken or fixed, input) -> the result; find(run, broken, fixed, input) -> the evidence or None
    """

    title: str
    broken: object
    fixed: object
    kind: Kind
    passes: object
    smallest: object
    run: Callable = on_elements
    find: Callable = compared
    language: str = "python"
    missing: Callable = lambda: None  # what this machine lacks to run it

    def evidence(self, given):
        """What shows the mistake on this input, in words, or None. ValueError: not such an input."""
        read = self.kind.read(given)
        with interpreted_launches(), np.errstate(all="ignore"):
            return self.find(self.run, _last(self.broken), _last(self.fixed), read)

    def size(self, given):
        """The size of an input, in the exhibit's unit."""
        return self.kind.size(given)

    def is_smallest(self, given):
        """Is the input as small as the smallest one known, a real number but for a thousandth?"""
        slack = 1.001 if isinstance(self.smallest, float) else 1
        return self.size(given) <= slack * self.size(self.smallest)

    def code(self):
        """The source of what is broken."""
        return _source(self.broken)

    def fix(self):
        """The lines that the fix takes out and puts in, as a diff."""
        before = self.code().splitlines()
        after = _source(self.fixed).replace("_fixed", "").replace("Fixed", "").splitlines()
        lines = list(difflib.unified_diff(before, after, lineterm="", n=1))[3:]
        return "\n".join("..." if line.startswith("@@") else line for line in lines)


def _last(things):
    return things[-1] if isinstance(things, tuple) else things


def _source(things):
    things = things if isinstance(things, tuple) else (things,)
    texts = [t if isinstance(t, str) else inspect.getsource(getattr(t, "fn", t)) for t in things]
    return "\n\n".join(text.strip("\n") for text in texts)
