"""Exercises of notebook 02, Write six small kernels."""

from lib import machine
from lib.exercises import (
    case,
    exercise,
    expect,
    expect_launches,
    expect_op,
    expect_rounded_once,
    hinting,
)
from lib.exercises.watch import expect_no_pass
from lib.nogpu.memory import count_traffic

import torch

# From small to large, so that the first failure is the smallest one; the last has longer rows than most tiles.
SHAPES = ((1, 1), (2, 3), (3, 2), (5, 7), (16, 16), (17, 33), (64, 128), (129, 781), (3, 5000))


def _matrix(shape, dtype, shift=0.0):
    return 2 * torch.randn(shape, device=machine.device(), dtype=dtype) + shift


def _expect(answer, eager, inputs, shapes=SHAPES):
    """The float64 rule, one launch, and no arithmetic of PyTorch's on the matrix."""
    expect_op(answer, eager, inputs, shapes=shapes)
    given = inputs((17, 33), torch.float32)
    at = "at shape (17, 33)"
    expect_launches(lambda: answer(*given), exactly=1)
    expect_no_pass(lambda: answer(*given), given[0].nbytes, at)


def _expect_read_once(answer, *given):
    """Wrong where programs ask for more than the matrix."""
    with case("at shape (17, 33)"):
        loaded = count_traffic(lambda: answer(*given)).table()["loaded"].drop("total").max()
    most = given[0].nbytes
    expect(
        loaded <= most,
        f"at shape (17, 33): the kernel loads {loaded:,} bytes of a matrix of {most:,}; read each number once",
    )


@exercise("02.1", "A bias for each column", minutes=10, level=1)
def check_bias_by_column(answer):
    def inputs(shape, dtype):
        return _matrix(shape, dtype), _matrix(shape[1:], dtype)

    with hinting("; which numbers of b does a tile need?"):
        _expect(answer, lambda x, b: x + b, inputs)


@exercise("02.2", "A bias for each row", minutes=8, level=1)
def check_bias_by_row(answer):
    def inputs(shape, dtype):
        return _matrix(shape, dtype), _matrix(shape[:1], dtype)

    with hinting("; b has a number for each row: which axis does it get?"):
        _expect(answer, lambda x, b: x + b[:, None], inputs)


@exercise("02.3", "The sum of each row", minutes=15, level=2)
def check_row_sum(answer):
    def inputs(shape, dtype):
        return (_matrix(shape, dtype, shift=1.0),)

    with hinting("; rows may be longer than a tile, and 16 bits are too few to add up in"):
        _expect(answer, lambda x: x.sum(1), inputs)
        ones = torch.ones(2, 80_000, device=machine.device(), dtype=torch.bfloat16)
        what = "at shape (2, 80000), ones in bfloat16"
        expect_rounded_once(answer(ones), ones.double().sum(1), what)
    _expect_read_once(answer, *inputs((17, 33), torch.float32))


@exercise("02.4", "The largest of each row", minutes=10, level=2)
def check_row_max(answer):
    def inputs(shape, dtype):
        return (_matrix(shape, dtype, shift=-20.0),)

    with hinting("; all numbers here are negative: what do the places get that are not there?"):
        _expect(answer, lambda x: x.amax(1), inputs)
    _expect_read_once(answer, *inputs((17, 33), torch.float32))


@exercise("02.5", "Rows become columns", minutes=12, level=2)
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
    with hinting("; x is read at row·n_cols + column: where is that number written?"):
        _expect(answer, lambda x: x.t(), inputs)


@exercise("02.6", "One softmax for each row", minutes=20, level=3)
def check_softmax_rows(answer):
    def inputs(shape, dtype):
        return (_matrix(shape, dtype),)

    def far_up(shape, dtype):
        return (_matrix(shape, dtype, shift=200.0),)

    def eager(x):
        return x.softmax(1)

    _expect(answer, eager, inputs)
    with hinting("; exp(200) overflows: subtract the row's largest first"):
        expect_op(answer, eager, far_up, shapes=((2, 3), (5, 7)), what=", numbers near 200")
    _expect_read_once(answer, *inputs((17, 33), torch.float32))
