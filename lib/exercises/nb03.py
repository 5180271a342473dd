"""Exercises of notebook 03, add_relu."""

from lib import machine
from lib.exercises import (
    SHAPES,
    attempted,
    case,
    exercise,
    expect,
    expect_launches,
    expect_op,
    expect_rounded_once,
    hinting,
)
from lib.exercises.watch import (
    FILLS,
    expect_fixed_order,
    expect_kernels_alone_calculate,
    expect_no_pass,
)
from lib.measure import registry
from lib.nogpu.memory import count_traffic

import torch

NAN = float("nan")


def _inputs(shape, dtype, low=-8.0):
    x, bias = registry.find("add_relu").inputs(shape, dtype, machine.device())
    return (4 * x).detach(), bias.detach()


def _with_nan(shape, dtype):
    x, bias = _inputs(shape, dtype)
    x[-1, -1] = NAN
    return x, bias


@exercise("03.1", "A sibling with a cap", minutes=8, level=1)
def check_add_relu6(answer):
    def eager(x, bias):
        return torch.clamp(x + bias, 0, 6)

    expect_op(answer, eager, _inputs)
    expect_op(answer, eager, _with_nan, shapes=((2, 3),))
    x, bias = _inputs((5, 7), torch.float32)
    expect_launches(lambda: answer(x, bias), exactly=1)
    expect_no_pass(lambda: answer(x, bias), x.nbytes, "at shape (5, 7)")


@exercise("03.2", "The smallest shape that shows it", minutes=10, level=2)
def check_smallest_shape(shape):
    expect(
        isinstance(shape, (tuple, list))
        and len(shape) == 2
        and all(isinstance(n, int) and n > 0 for n in shape),
        "give a tuple of two positive whole numbers, (rows, columns)",
    )
    rows, cols = shape

    def wrong(rows, cols):
        return any(i % 8 != i % cols for i in range(rows * cols))

    expect(
        wrong(rows, cols),
        f"at {rows}×{cols} the kernel is right: i % 8 is i % {cols} for every element",
    )
    smaller = [(r, n // r) for n in range(1, rows * cols) for r in range(1, n + 1) if n % r == 0]
    expect(
        not any(wrong(*s) for s in smaller),
        f"{rows}×{cols} shows it, but so does a shape with fewer elements",
    )


def _that_cancel(n_rows, n_cols):
    """dy in bfloat16 whose columns sum to 0.25, and y of ones. What 16 bits lose on the way is more than that.

    In float32 the sums are exact in any order, as all numbers are multiples of 1/64.
    """
    half = (64 * torch.randn(n_rows // 2, n_cols, device=machine.device())).round() / 64
    turned = -half[torch.randperm(len(half), device=half.device)]
    dy = torch.cat([half, turned, torch.full_like(half[:1], 0.25)]).clamp(-4, 4)
    return dy.to(torch.bfloat16), torch.ones_like(dy, dtype=torch.bfloat16)


@exercise("03.3", "The gradient of the bias alone", minutes=15, level=2)
def check_bias_gradient(answer):
    def inputs(shape, dtype):
        x, _ = _inputs(shape, dtype)
        y = torch.relu(x)
        y[0, 0] = 0.0
        return torch.ones_like(x) + x.abs().round(), y

    def with_inf(shape, dtype):
        dy, y = inputs(shape, dtype)
        dy[0, 0] = torch.inf  # inf * 0 is NaN
        return dy, y

    def eager(dy, y):
        return torch.where(y > 0, dy, 0).sum(0)

    # more rows than a block of 1,024, which an answer may take to be all
    expect_op(answer, eager, inputs, shapes=(*SHAPES, (1100, 3)))
    expect_op(answer, eager, with_inf, shapes=((2, 3),), what=", an inf in dy where y is 0")
    with hinting("; does the loop run to n_rows?"):
        expect_op(answer, eager, inputs, shapes=((5001, 3),), dtypes=(torch.float32,))
    dy, y = _that_cancel(5001, 3)
    at = "at shape (5001, 3), bfloat16, where sums cancel"
    with case(at):
        expect_rounded_once(answer(dy, y), dy.double().sum(0), at, "dbias")
    expect_launches(lambda: answer(*inputs((5, 7), torch.float32)))
    dy, y = inputs((129, 70), torch.float32)
    expect_no_pass(lambda: answer(dy, y), dy.nbytes, "at shape (129, 70)")
    for shape in ((5, 7), (129, 70), (1100, 3)):
        dy, y = inputs(shape, torch.float32)
        dy += y / 3  # sums of whole numbers are the same in any order
        expect_fixed_order(answer, (dy, y), f"at {shape[0]}×{shape[1]}")


@exercise("03.4", "Both gradients of a leaky ReLU", minutes=25, level=3)
def check_leaky_gradients(answer):
    def inputs(shape, dtype):
        dy, y = (_inputs(shape, dtype)[0] for _ in range(2))
        y[0, 0] = 0.0
        return dy + 1, y

    def eager(dy, y):
        dx = torch.where(y > 0, dy, 0.1 * dy)
        return dx, dx.sum(0)

    dy, y = inputs((5, 7), torch.float32)
    with case("at shape (5, 7)"):
        attempted(answer(dy, y))
    _expect_launches_up_to(2, lambda: answer(dy, y))
    with case("at shape (5, 7)"):
        expect_kernels_alone_calculate(lambda: answer(dy, y))
    # first, because few programs with long loops take minutes for all that follows; 4 columns, because
    # programs with some columns each, from top to bottom, do not share the rows
    for shape in ((4096, 4), (4096, 64)):
        large = inputs(shape, torch.float32)
        with case(f"at shape {shape}"):
            traffic = count_traffic(lambda large=large: answer(*large))
        expect(
            traffic.programs >= 16,
            f"at shape {shape}: {traffic.programs} programs in all; let more of them share the rows",
        )
    expect_op(answer, eager, inputs, shapes=(*SHAPES, (1100, 3)))
    dy, y = inputs((129, 70), torch.float32)
    expect_no_pass(lambda: answer(dy, y), dy.nbytes, "at shape (129, 70)", but=FILLS)
    expect_fixed_order(lambda *given: answer(*given)[1], (dy, y), "at 129×70")
    expect_fixed_order(lambda *given: answer(*given)[0], (dy, y), "at 129×70")
    passes = traffic.bytes_requested / large[0].nbytes
    expect(
        passes <= 3.5,
        f"at shape (4096, 64): programs load and store {passes:.1f} times as many bytes as dy has; three "
        "passes are enough, and sums of few strips",
    )
    dy, y = _that_cancel(4097, 3)
    at = "at shape (4097, 3), bfloat16, where sums of strips cancel"
    with case(at):
        expect_rounded_once(answer(dy, y)[1], dy.double().sum(0), at, "dbias")


def _expect_launches_up_to(most, launch):
    launches = count_traffic(launch).launches
    expect(launches >= 1, "should launch a Triton kernel or more, launched none")
    expect(launches <= most, f"should launch {most} Triton kernels at most, launched {launches}")
