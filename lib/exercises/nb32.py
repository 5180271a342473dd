"""Exercises of notebook 32, softmax."""

import math
import re

from lib import machine
from lib.exercises import SHAPES, Wrong, exercise, expect, expect_launches, expect_op, plural
from lib.nogpu.memory import count_traffic

import torch

INF, NAN = float("inf"), float("nan")


def _rows(shape, dtype, scale=40.0):
    generator = torch.Generator().manual_seed(0)
    x = scale * torch.randn(shape, generator=generator)
    return (x.to(machine.device(), dtype),)


@exercise("32.1", "A sibling: log_softmax", minutes=8, level=1)
def check_log_softmax(answer):
    def masked(shape, dtype):
        (x,) = _rows(shape, dtype)
        x[0, 0] = -INF
        x[-1, :] = -INF
        return (x,)

    def eager(x):
        return torch.log_softmax(x, dim=-1)

    expect_op(answer, eager, _rows)
    expect_op(answer, eager, masked, shapes=((3, 5),))
    expect_launches(lambda: answer(*_rows((5, 7), torch.float32)), exactly=1)


def _padded_with_zeros(row):
    """What a row kernel with other=0.0 makes of a row."""
    padded = row + [0.0] * ((1 << (len(row) - 1).bit_length()) - len(row))
    return [share for share, _ in zip(_softmax(padded), row)]


def _softmax(row):
    numerators = [math.exp(x - max(row)) for x in row]
    return [n / sum(numerators) for n in numerators]


@exercise("32.2", "The row that gives it away", minutes=10, level=2)
def check_row(row):
    expect(
        isinstance(row, (list, tuple))
        and len(row) > 0
        and all(isinstance(x, (int, float)) and math.isfinite(x) for x in row),
        "give a list of one or more finite numbers",
    )
    row = [float(x) for x in row]
    got, want = _padded_with_zeros(row), _softmax(row)
    worst = max(range(len(row)), key=lambda i: abs(got[i] - want[i]))
    expect(len(row) & (len(row) - 1), f"a row of {plural(len(row), 'number')} needs no padding")
    expect(
        abs(got[worst] - want[worst]) > 0.01,
        f"for {row} the kernel gives {got[worst]:.6f} in column {worst}, and right is {want[worst]:.6f}: "
        "not more than 0.01 apart",
    )
    expect(len(row) <= 3, f"this row shows it, but so does a row of fewer than {len(row)} numbers")


@exercise("32.3", "The way back from log_softmax", minutes=10, level=2)
def check_log_softmax_backward(answer):
    def inputs(shape, dtype):
        (x,) = _rows(shape, dtype, scale=3.0)
        generator = torch.Generator().manual_seed(1)
        dy = 1 + torch.randn(shape, generator=generator)
        return dy.to(machine.device(), dtype), torch.log_softmax(x, dim=-1)

    def eager(dy, y):
        return dy - y.exp() * dy.sum(-1, keepdim=True)

    expect_op(answer, eager, inputs)
    dy, y = inputs((5, 7), torch.float32)
    expect_launches(lambda: answer(dy, y), exactly=1)
    dy, y = inputs((9, 200), torch.float32)
    passes = count_traffic(lambda: answer(dy, y)).bytes_moved / y.nbytes
    expect(passes <= 3, f"it moves {passes:.1f} passes over MN; three are enough")


@exercise("32.4", "Softmax of the beginning of a row", minutes=12, level=2)
def check_prefix_softmax(answer):
    def inputs(shape, dtype):
        (x,) = _rows(shape, dtype, scale=3.0)
        m, n = shape
        lengths = torch.arange(m, device=x.device) * 7 % (n + 1)
        lengths[-1] = 0
        lengths[0] = (n + 1) // 2
        x[_behind(x, lengths)] = NAN  # shows in the result if it is used
        return x, lengths

    def eager(x, lengths):
        y = torch.softmax(x.masked_fill(_behind(x, lengths), -INF), dim=-1)
        return y.masked_fill(_behind(x, lengths), 0.0)

    for shape in (*SHAPES, (3, 5000)):
        try:
            expect_op(answer, eager, inputs, shapes=(shape,))
        except Wrong as difference:
            at = re.search(r"at \((\d+), \d+\)", str(difference))
            rows = dict(enumerate(inputs(shape, torch.float32)[1].tolist()))
            row = int(at[1]) if at else None
            hint = f"; lengths[{row}] is {rows[row]}" if row in rows else ""
            raise Wrong(f"{difference}{hint}") from None
    expect_launches(lambda: answer(*inputs((5, 7), torch.float32)), exactly=1)
    x, lengths = inputs((9, 200), torch.float32)
    traffic = count_traffic(lambda: answer(x, lengths))
    loaded = sum(a.loaded_distinct for a in traffic.by_argument.values())
    least = int(lengths.sum()) * x.element_size() + lengths.nbytes
    expect(
        loaded <= least,
        f"at shape (9, 200) it loads {loaded} bytes; up to the lengths there are {least}, lengths included",
    )


def _behind(x, lengths):
    return torch.arange(x.shape[1], device=x.device) >= lengths[:, None]
