"""Exercises of notebook 07, softmax; what it shares with those of 32, which is on rows of any width."""

import contextlib
import re
from unittest import mock

from lib import machine
from lib.exercises import (
    SHAPES,
    NotAttempted,
    Wrong,
    case,
    exercise,
    expect,
    expect_launches,
    expect_op,
    hinting,
)
from lib.exercises.watch import expect_no_pass
from lib.nogpu.memory import count_traffic
from lib.ops import softmax

import torch
import torch.nn.functional as F
import triton
from triton.runtime import interpreter as upstream

INF, NAN = float("inf"), float("nan")


def scaled_rows(shape, dtype, scale=40.0):
    generator = torch.Generator().manual_seed(0)
    x = scale * torch.randn(shape, generator=generator)
    return (x.to(machine.device(), dtype),)


def masked_rows(shape, dtype):
    """Three rows: nine tenths of -inf, then numbers; a NaN at the end; nothing but -inf."""
    (x,) = scaled_rows(shape, dtype)
    x[0, : 9 * shape[1] // 10] = -INF
    x[1, -1] = NAN
    x[2] = -INF
    return (x,)


def rows_far_below_zero(shape, dtype):
    """Rows in which any 0 that joins the maximum makes all exponentials 0."""
    (x,) = scaled_rows(shape, dtype)
    return (x - 200,)


def _expect_no_zero_joins(answer, eager, make, shape):
    with hinting("; all scores are far below 0: what else joins the maximum?"):
        expect_op(answer, eager, make, shapes=(shape,), dtypes=(torch.float32,))


def _expect_maximum_first(answer, eager, shape):
    """Near 10⁴ max + log Σ has lost the digits of log Σ, which max subtracted first leaves alone."""

    def far_above_zero(shape, dtype):
        (x,) = scaled_rows(shape, dtype, scale=1.0)
        return (x + 1e4,)

    with hinting("; all scores are near 10000: subtract the maximum first, then log Σ"):
        expect_op(answer, eager, far_above_zero, shapes=(shape,), dtypes=(torch.float32,))


# --- 07.1 ----------------------------------------------------------------------------------------------


@exercise("07.1", "A sibling: log_softmax", minutes=8, level=1)
def check_log_softmax(answer):
    def masked(shape, dtype):
        (x,) = scaled_rows(shape, dtype)
        x[0, 0] = -INF
        x[-1, :] = -INF
        return (x,)

    def eager(x):
        return torch.log_softmax(x, dim=-1)

    expect_op(answer, eager, scaled_rows)
    expect_op(answer, eager, masked, shapes=((3, 5),))
    _expect_no_zero_joins(answer, eager, rows_far_below_zero, (5, 7))
    _expect_maximum_first(answer, eager, (5, 7))
    (x,) = scaled_rows((5, 7), torch.float32)
    expect_launches(lambda: answer(x), exactly=1)
    expect_no_pass(lambda: answer(x), x.nbytes, "at shape (5, 7)")


# --- 07.2 ----------------------------------------------------------------------------------------------

# Six softmaxes as one meets them, each with one mistake; x: (M, N). In the kernels they stand for, the rows
# of a matrix share a program, and columns come in tiles.


def unshifted(x):
    numerator = x.exp()
    return numerator / numerator.sum(-1, keepdim=True)


def padded_with_zeros(x):
    """A tile is a power of two wide; 0 stands where there is no column."""
    n_cols = x.shape[1]
    tile = F.pad(x, (0, triton.next_power_of_2(n_cols) - n_cols))
    return softmax.softmax_eager(tile)[:, :n_cols]


def one_maximum(x):
    """The largest number of the whole tile, which has several rows."""
    numerator = (x - x.max()).exp()
    return numerator / numerator.sum(-1, keepdim=True)


def not_rescaled(x):
    """Column by column, with the maximum so far."""
    top, total = torch.full_like(x[:, 0], -INF), torch.zeros_like(x[:, 0])
    for column in x.unbind(1):
        top = torch.maximum(top, column)
        total = total + (column - top).exp()
    return (x - top[:, None]).exp() / total[:, None]


def own_maxima(x):
    """Tiles of two columns, each relative to its own maximum."""
    tiles = [(t - t.amax(-1, keepdim=True)).exp() for t in x.split(2, dim=1)]
    numerator = torch.cat(tiles, dim=1)
    return numerator / numerator.sum(-1, keepdim=True)


def without_guard(x):
    """Column by column, and rescaled."""
    top, total = torch.full_like(x[:, 0], -INF), torch.zeros_like(x[:, 0])
    for column in x.unbind(1):
        new_top = torch.maximum(top, column)
        total = total * (top - new_top).exp() + (column - new_top).exp()
        top = new_top
    return (x - top[:, None]).exp() / total[:, None]


# How many numbers a matrix has to have to show it.
_NUMBERS = {
    unshifted: 1, padded_with_zeros: 3, one_maximum: 2, not_rescaled: 2, own_maxima: 3, without_guard: 2
}  # fmt: skip
WRONG_SOFTMAXES = tuple(_NUMBERS)


def _shows(function, x):
    """Whether float32 numbers tell it from softmax; a NaN where softmax has one tells nothing."""
    right, got = torch.softmax(x.double(), dim=-1), function(x).double()
    return not torch.allclose(got, right, rtol=0, atol=1e-3, equal_nan=True)


@exercise("07.2", "Six softmaxes that are wrong", minutes=15, level=2)
def check_matrices_that_show_it(answer):
    names = [f.__name__ for f in WRONG_SOFTMAXES]
    expect(
        isinstance(answer, dict) and set(answer) == set(names),
        f"give a dictionary with the names {', '.join(names)}",
    )
    if all(value is None for value in answer.values()):
        raise NotAttempted
    for function, least in _NUMBERS.items():
        name, rows = function.__name__, answer[function.__name__]
        with case(f"{name}: give a list of rows of equal length, as [[1.0, 2.0], [3.0, 4.0]]"):
            x = torch.as_tensor(rows, dtype=torch.float32).cpu()
        expect(
            x.dim() == 2 and x.numel() > 0,
            f"{name}: give a list of rows, as [[1.0, 2.0]] for one row, got {rows}",
        )
        expect(_shows(function, x), f"{name}: it is right for {rows}")
        expect(
            x.numel() <= least,
            f"{name}: {rows} shows it, and so does a matrix of fewer numbers",
        )


# --- 07.3 ----------------------------------------------------------------------------------------------


@exercise("07.3", "Softmax of the beginning of a row", minutes=12, level=2)
def check_prefix_softmax(answer):
    def inputs(shape, dtype):
        (x,) = scaled_rows(shape, dtype, scale=3.0)
        m, n = shape
        lengths = torch.arange(m, device=x.device) * 7 % (n + 1)
        lengths[-1] = 0
        lengths[0] = (n + 1) // 2
        x[_behind(x, lengths)] = NAN  # shows in the result if it is used
        return x, lengths

    def special(shape, dtype):
        """Four rows: half is used, with a NaN, with +inf, of -inf alone; nothing is used."""
        (x,) = scaled_rows(shape, dtype, scale=3.0)
        lengths = torch.tensor([(shape[1] + 1) // 2] * 3 + [0], device=x.device)
        x[0, 0], x[1, 0], x[2] = NAN, INF, -INF
        x[_behind(x, lengths)] = NAN
        return x, lengths

    def far_below_zero(shape, dtype):
        (x,) = rows_far_below_zero(shape, dtype)
        return x, torch.arange(1, shape[0] + 1, device=x.device)

    def eager(x, lengths):
        y = torch.softmax(x.masked_fill(_behind(x, lengths), -INF), dim=-1)
        return y.masked_fill(_behind(x, lengths), 0.0)

    cases = [(shape, inputs) for shape in (*SHAPES, (3, 5000))]
    for shape, make in (*cases, ((4, 4), special), ((4, 33), special)):
        try:
            expect_op(answer, eager, make, shapes=(shape,))
        except Wrong as difference:
            at = re.search(r"at \((\d+), \d+\)", str(difference))
            x, lengths = make(shape, torch.float32)
            row = int(at[1]) if at else len(x)
            hint = f"; lengths[{row}] is {lengths[row]}" if row < len(x) else ""
            if hint and make is special:
                hint += f", and the row begins with {x[row, 0]:g}"
            raise Wrong(f"{difference}{hint}") from None
    _expect_no_zero_joins(answer, eager, far_below_zero, (5, 7))
    expect_launches(lambda: answer(*inputs((5, 7), torch.float32)), exactly=1)
    x, lengths = inputs((9, 200), torch.float32)
    expect_no_pass(lambda: answer(x, lengths), x.nbytes, "at shape (9, 200)")
    traffic = count_traffic(lambda: answer(x, lengths))
    loaded = sum(a.loaded_distinct for a in traffic.by_argument.values())
    least = int(lengths.sum()) * x.element_size() + lengths.nbytes
    expect(
        loaded <= least,
        f"at shape (9, 200) it loads {loaded} bytes; up to the lengths there are {least}, lengths included",
    )


def _behind(x, lengths):
    return torch.arange(x.shape[1], device=x.device) >= lengths[:, None]


# --- 07.4 ----------------------------------------------------------------------------------------------


@exercise("07.4", "The way back from log_softmax", minutes=10, level=2)
def check_log_softmax_backward(answer):
    def inputs(shape, dtype):
        (x,) = scaled_rows(shape, dtype, scale=3.0)
        generator = torch.Generator().manual_seed(1)
        dy = 1 + torch.randn(shape, generator=generator)
        return dy.to(machine.device(), dtype), torch.log_softmax(x, dim=-1)

    def eager(dy, y):
        return dy - y.exp() * dy.sum(-1, keepdim=True)

    expect_op(answer, eager, inputs)
    dy, y = inputs((5, 7), torch.float32)
    expect_launches(lambda: answer(dy, y), exactly=1)
    dy, y = inputs((9, 200), torch.float32)
    expect_no_pass(lambda: answer(dy, y), y.nbytes, "at shape (9, 200)")
    passes = count_traffic(lambda: answer(dy, y)).bytes_moved / y.nbytes
    expect(passes <= 3, f"it moves {passes:.1f} passes over MN; three are enough")


# --- 07.5 ----------------------------------------------------------------------------------------------


@exercise("07.5", "log_softmax of long rows", minutes=25, level=3)
def check_log_softmax_long(answer):
    def eager(x):
        return torch.log_softmax(x, dim=-1)

    expect_op(answer, eager, scaled_rows, shapes=(*SHAPES, (3, 20000)))
    expect_op(answer, eager, masked_rows, shapes=((3, 5), (3, 20000)))
    try:
        _expect_no_zero_joins(answer, eager, rows_far_below_zero, (3, 50))
    except Wrong as difference:
        if "NaN in the wrong place" not in str(difference):
            raise
        raise Wrong(
            str(difference).partition("; all scores")[0]
            + "; all scores are far below 0, and an empty column has the sum 0: mind 0 · inf"
        ) from None
    _expect_maximum_first(answer, eager, (3, 5000))
    (x,) = scaled_rows((2, 20000), torch.float32)
    expect_launches(lambda: answer(x), exactly=1)
    expect_no_pass(lambda: answer(x), x.nbytes, "at shape (2, 20000)")
    with counted_reductions() as reductions, _loaded_tiles() as tiles:
        traffic = count_traffic(lambda: answer(x))
    widest = max(tiles, default=0)
    expect(widest <= 4096, f"at 20000 columns its tiles have {widest}; 4096 are the most")
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
def counted_reductions():
    """A list with an entry for each tl.max and tl.sum that the interpreter runs meanwhile."""
    apply, seen = upstream.ReduceOps.apply_impl, []

    def counted(self, *args):
        seen.append(self)
        return apply(self, *args)

    with mock.patch.object(upstream.ReduceOps, "apply_impl", counted):
        yield seen


@contextlib.contextmanager
def _loaded_tiles():
    """A list of the longest side of each tile that the interpreter loads meanwhile."""
    load, seen = upstream.InterpreterBuilder.create_masked_load, []

    def counted(self, pointers, *args, **options):
        seen.append(max(pointers.data.shape, default=1))
        return load(self, pointers, *args, **options)

    with mock.patch.object(upstream.InterpreterBuilder, "create_masked_load", counted):
        yield seen
