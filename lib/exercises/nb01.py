"""Exercises of notebook 01, Write six small kernels."""

import contextlib

from lib import machine
from lib.exercises import (
    Wrong,
    case,
    exercise,
    expect,
    expect_launches,
    expect_op,
    expect_rounded_once,
)
from lib.exercises.watch import FILLS, expect_no_pass, expect_no_race
from lib.nogpu.memory import count_traffic

import torch

# From small to large, so that the first failure is the smallest one; the last has longer rows than most tiles.
SHAPES = ((1, 1), (2, 3), (3, 2), (5, 7), (16, 16), (17, 33), (64, 128), (129, 781), (3, 5000))


def _matrix(shape, dtype, shift=0.0):
    return 2 * torch.randn(shape, device=machine.device(), dtype=dtype) + shift


def _expect(answer, eager, inputs, hint="", shapes=SHAPES):
    """The float64 rule, one launch, no other pass over the result, and no two programs at one element."""
    with _hinting(hint):
        expect_op(answer, eager, inputs, shapes=shapes)
    given, wide = (inputs(shape, torch.float32) for shape in ((17, 33), (5, 781)))
    most = eager(*given).nbytes
    expect_launches(lambda: answer(*given), exactly=1)
    expect_no_pass(lambda: answer(*given), most, "at shape (17, 33)", but=FILLS)
    expect_no_race(lambda: answer(*wide), "at shape (5, 781)")


@contextlib.contextmanager
def _hinting(hint):
    """Wrong says more where numbers are wrong, and where shapes do not fit; else it says enough."""
    try:
        yield
    except Wrong as difference:
        text = str(difference)
        more = f"; {hint}" if hint and "differ by more" in text else ""
        if "to have shape" in text or "broadcast" in text:
            more = "; addresses, numbers and mask of a tl.store have one shape, such as (BLOCK_M,)"
        raise Wrong(text + more) from None


def _expect_read_once(answer, *given):
    """Wrong where programs ask for more than the matrix."""
    with case("at shape (17, 33)"):
        loaded = count_traffic(lambda: answer(*given)).table()["loaded"].drop("total").max()
    most = given[0].nbytes
    expect(
        loaded <= most,
        f"at shape (17, 33): the kernel loads {loaded:,} bytes of a matrix of {most:,}; read each number once",
    )


@exercise("01.1", "A bias for each column", minutes=10, level=1)
def check_bias_by_column(answer):
    def inputs(shape, dtype):
        return _matrix(shape, dtype), _matrix(shape[1:], dtype)

    _expect(answer, lambda x, b: x + b, inputs, "which numbers of b does a tile need?")


@exercise("01.2", "A bias for each row", minutes=8, level=1)
def check_bias_by_row(answer):
    def inputs(shape, dtype):
        return _matrix(shape, dtype), _matrix(shape[:1], dtype)

    hint = "b has a number for each row: which axis does it get?"
    _expect(answer, lambda x, b: x + b[:, None], inputs, hint)


@exercise("01.3", "The sum of each row", minutes=15, level=2)
def check_row_sum(answer):
    def inputs(shape, dtype):
        return (_matrix(shape, dtype, shift=1.0),)

    _expect(answer, lambda x: x.sum(1), inputs, "rows may be longer than a tile")
    ones = torch.ones(2, 80_000, device=machine.device(), dtype=torch.bfloat16)
    expect_rounded_once(answer(ones), ones.double().sum(1), "at shape (2, 80000), ones in bfloat16")
    _expect_read_once(answer, *inputs((17, 33), torch.float32))


@exercise("01.4", "The largest of each row", minutes=10, level=2)
def check_row_max(answer):
    def inputs(shape, dtype):
        return (_matrix(shape, dtype, shift=-20.0),)

    def minus_infinity(shape, dtype):
        (x,) = inputs(shape, dtype)
        return (x.index_fill(0, torch.tensor([0], device=x.device), -torch.inf),)

    hint = "all numbers here are negative: what do the places get that are not there?"
    _expect(answer, lambda x: x.amax(1), inputs, hint)
    expect_op(answer, lambda x: x.amax(1), minus_infinity, ((2, 3),), what=", a row of -inf alone")
    _expect_read_once(answer, *inputs((17, 33), torch.float32))


@exercise("01.5", "Rows become columns", minutes=12, level=2)
def check_transpose(answer):
    def inputs(shape, dtype):
        return (_matrix(shape, dtype),)

    with case("at shape (2, 3)"):
        y = answer(*inputs((2, 3), torch.float32))
    if isinstance(y, torch.Tensor) and y.shape == (3, 2):
        expect(
            y.is_contiguous(),
            "the result is a view with other strides: write its rows, which are x's columns",
        )
    hint = "x is read at row·n_cols + column: where is that number written?"
    _expect(answer, lambda x: x.t(), inputs, hint)


@exercise("01.6", "One softmax for each row", minutes=20, level=3)
def check_softmax_rows(answer):
    def inputs(shape, dtype):
        return (_matrix(shape, dtype),)

    def far_from_0(shift):
        return lambda shape, dtype: (_matrix(shape, dtype, shift),)

    def eager(x):
        return x.softmax(1)

    _expect(answer, eager, inputs, "what do the places add that are not there?")
    for shift in (200.0, -200.0, -30_000.0):
        with _hinting("exp(200) overflows, exp(-200) is 0: subtract the row's largest first"):
            what = f", numbers near {shift:g}"
            expect_op(answer, eager, far_from_0(shift), ((2, 3), (5, 7)), what=what)
    _expect_read_once(answer, *inputs((17, 33), torch.float32))
