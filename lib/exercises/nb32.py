"""Exercises of notebook 32, softmax."""

import contextlib
import re
from unittest import mock

from lib import machine
from lib.exercises import SHAPES, Wrong, exercise, expect, expect_launches, expect_op
from lib.nogpu.memory import count_traffic

import torch
from triton.runtime import interpreter as upstream

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


@exercise("32.2", "log_softmax of long rows", minutes=15, level=2)
def check_log_softmax_long(answer):
    def masked(shape, dtype):
        (x,) = _rows(shape, dtype)
        x[0, : 9 * shape[1] // 10] = -INF
        x[1, -1] = NAN
        x[2] = -INF
        return (x,)

    def eager(x):
        return torch.log_softmax(x, dim=-1)

    expect_op(answer, eager, _rows, shapes=(*SHAPES, (3, 20000)))
    expect_op(answer, eager, masked, shapes=((3, 5), (3, 20000)))
    (x,) = _rows((2, 20000), torch.float32)
    expect_launches(lambda: answer(x), exactly=1)
    with _counted_reductions() as reductions:
        traffic = count_traffic(lambda: answer(x))
    loaded = sum(a.loaded for a in traffic.by_argument.values()) / x.nbytes
    expect(
        loaded == 2, f"at shape (2, 20000) it loads x {loaded:.1f} times; two walks load it twice"
    )
    each = len(reductions) / traffic.programs
    expect(
        each <= 4,
        f"at 20000 columns a program reduces {each:.0f} times; keep a maximum and a sum for each column of "
        "the tile, and reduce behind the loop",
    )


@contextlib.contextmanager
def _counted_reductions():
    """A list with an entry for each tl.max and tl.sum that the interpreter runs meanwhile."""
    apply, seen = upstream.ReduceOps.apply_impl, []

    def counted(self, *args):
        seen.append(self)
        return apply(self, *args)

    with mock.patch.object(upstream.ReduceOps, "apply_impl", counted):
        yield seen


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
