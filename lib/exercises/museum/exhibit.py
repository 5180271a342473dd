"""What an exhibit of the bug museum is, and how a visitor's input is judged.

Exhibits run in the interpreter even with a GPU, because their kernels may write anywhere.
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

MOST_ELEMENTS = 1 << 16  # the interpreter takes a second for that many


# --- what a visitor hands in ---------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Kind:
    """A kind of input: `description` in words, read(raw) -> the value to run on, size(raw) in `unit`."""

    description: str
    unit: str
    read: Callable
    size: Callable


def _is_number(value):
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return isinstance(value, float) or abs(value) < 2**127  # beyond it there is no such float32


def _read_numbers(raw):
    if not isinstance(raw, (list, tuple)) or not raw or not all(map(_is_number, raw)):
        raise ValueError(f"hand in a list of numbers, such as [1, 2.5]; got {raw!r}")
    if len(raw) > MOST_ELEMENTS:
        raise ValueError(f"hand in {MOST_ELEMENTS} numbers at most; got {len(raw)}")
    return torch.tensor(raw, dtype=torch.float32)


def _read_magnitude(raw):
    if not _is_number(raw):
        raise ValueError(f"hand in one number, such as 2.5; got {raw!r}")
    return torch.tensor([raw], dtype=torch.float32)


def limited(kind, description, holds):
    """`kind`, limited to inputs for which holds(value) is true."""

    def read(raw):
        value = kind.read(raw)
        if not holds(value):
            raise ValueError(f"hand in {description}; got {raw!r}")
        return value

    return dataclasses.replace(kind, description=description, read=read)


def whole_numbers(least, most, description="a whole number", unit="its size"):
    """The Kind of whole numbers from `least` to `most`."""

    def read(raw):
        whole = isinstance(raw, int) and not isinstance(raw, bool)
        if not whole or not least <= raw <= most:
            raise ValueError(f"hand in {description} from {least} to {most}; got {raw!r}")
        return raw

    return Kind(description, unit, read, int)


def _read_shape(raw, most=MOST_ELEMENTS):
    whole = isinstance(raw, (list, tuple)) and [isinstance(n, int) and n > 0 for n in raw]
    if whole != [True, True]:
        raise ValueError(f"hand in (rows, columns), such as (2, 3); got {raw!r}")
    if math.prod(raw) > most:
        raise ValueError(f"hand in {most} elements at most; got {math.prod(raw)}")
    return tuple(raw)


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
    """y = kernel(x) by one program. y starts as NaN, so that elements never written show."""
    y = torch.full_like(x, torch.nan)
    kernel[(1,)](x, y, x.numel(), BLOCK_SIZE=triton.next_power_of_2(x.numel()))
    return y


def compared(run, broken, fixed, value, atol=0.0):
    """How `broken` differs from `fixed`, in words; None when they agree to a part in a thousand."""
    right = run(fixed, value)
    try:
        got = run(broken, value)
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
    """One mistake, as code that runs.

    broken, fixed: a kernel or a function, or a tuple of several to show, of which the last is run
    kind: what a visitor hands in; passes: an input on which the mistake does not show, as tests often use;
    smallest: the smallest known input on which it shows
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

    def evidence(self, raw):
        """What shows the mistake on this input, in words, or None. ValueError: not such an input."""
        value = self.kind.read(raw)
        with interpreted_launches(), np.errstate(all="ignore"):
            return self.find(self.run, _last(self.broken), _last(self.fixed), value)

    def size(self, raw):
        """The size of an input, in the exhibit's unit."""
        return self.kind.size(raw)

    def is_smallest(self, raw):
        """Whether the input is as small as the smallest one known; a real number may exceed it by 0.1 %."""
        slack = 1.001 if isinstance(self.smallest, float) else 1
        return self.size(raw) <= slack * self.size(self.smallest)

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
