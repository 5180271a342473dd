"""Room 3: right alone, right once, right the first time."""

import time

from lib.exercises.museum.exhibit import Exhibit, length, numbers, shape, whole_numbers
from lib.nogpu.races import races

import torch
import triton
import triton.language as tl

# --- 17 ------------------------------------------------------------------------------------------------------


@triton.jit
def column_sum_kernel(x_ptr, total_ptr, n_rows, n_cols, BLOCK_N: tl.constexpr):
    # One program adds two rows of x to the totals.
    rows = tl.program_id(0) * 2 + tl.arange(0, 2)[:, None]
    cols = tl.arange(0, BLOCK_N)
    x = tl.load(x_ptr + rows * n_cols + cols, mask=(rows < n_rows) & (cols < n_cols), other=0.0)
    total = tl.load(total_ptr + cols, mask=cols < n_cols) + tl.sum(x, axis=0)
    tl.store(total_ptr + cols, total, mask=cols < n_cols)


@triton.jit
def column_sum_kernel_fixed(x_ptr, total_ptr, n_rows, n_cols, BLOCK_N: tl.constexpr):
    # One program adds two rows of x to the totals.
    rows = tl.program_id(0) * 2 + tl.arange(0, 2)[:, None]
    cols = tl.arange(0, BLOCK_N)
    x = tl.load(x_ptr + rows * n_cols + cols, mask=(rows < n_rows) & (cols < n_cols), other=0.0)
    tl.atomic_add(total_ptr + cols, tl.sum(x, axis=0), mask=cols < n_cols)


def _column_sum(kernel, size):
    x, total = torch.ones(size), torch.zeros(size[1])
    kernel[(triton.cdiv(size[0], 2),)](x, total, *size, BLOCK_N=triton.next_power_of_2(size[1]))
    return total


def _first_race(run, broken, fixed, size):
    conflicts = races(lambda: run(broken, size))
    return conflicts[0] if conflicts else None


# --- 18 ------------------------------------------------------------------------------------------------------


@triton.jit
def dropout_kernel(x_ptr, y_ptr, n_elements, seed, BLOCK_SIZE: tl.constexpr):
    # y = 2x or 0, half of each
    lanes = tl.arange(0, BLOCK_SIZE)
    offsets = tl.program_id(0) * BLOCK_SIZE + lanes
    mask = offsets < n_elements
    keep = tl.rand(seed, lanes) >= 0.5
    x = tl.load(x_ptr + offsets, mask=mask)
    tl.store(y_ptr + offsets, tl.where(keep, 2 * x, 0.0), mask=mask)


@triton.jit
def dropout_kernel_fixed(x_ptr, y_ptr, n_elements, seed, BLOCK_SIZE: tl.constexpr):
    # y = 2x or 0, half of each
    lanes = tl.arange(0, BLOCK_SIZE)
    offsets = tl.program_id(0) * BLOCK_SIZE + lanes
    mask = offsets < n_elements
    keep = tl.rand(seed, offsets) >= 0.5
    x = tl.load(x_ptr + offsets, mask=mask)
    tl.store(y_ptr + offsets, tl.where(keep, 2 * x, 0.0), mask=mask)


def dropout(x, seed=1):
    y, n = torch.empty_like(x), x.numel()
    dropout_kernel[(triton.cdiv(n, 16),)](x, y, n, seed, BLOCK_SIZE=16)
    return y


def dropout_fixed(x, seed=1):
    y, n = torch.empty_like(x), x.numel()
    dropout_kernel_fixed[(triton.cdiv(n, 16),)](x, y, n, seed, BLOCK_SIZE=16)
    return y


# --- 19 ------------------------------------------------------------------------------------------------------


@triton.jit
def softmax_backward_kernel(dy_ptr, y_ptr, dx_ptr, n_cols, BLOCK_SIZE: tl.constexpr):
    # dx = y (dy - sum(y dy)) of one row
    cols = tl.arange(0, BLOCK_SIZE)
    mask = cols < n_cols
    dy = tl.load(dy_ptr + cols, mask=mask, other=0.0)
    y = tl.load(y_ptr + cols, mask=mask, other=0.0)
    tl.store(dx_ptr + cols, y * (dy - tl.sum(y * dy, axis=0)), mask=mask)


def softmax_backward(dy, y):
    size = triton.next_power_of_2(y.numel())
    softmax_backward_kernel[(1,)](dy, y, dy, y.numel(), BLOCK_SIZE=size)
    return dy  # no memory allocated


def softmax_backward_fixed(dy, y):
    size = triton.next_power_of_2(y.numel())
    dx = torch.empty_like(dy)
    softmax_backward_kernel[(1,)](dy, y, dx, y.numel(), BLOCK_SIZE=size)
    return dx


def _second_call(function, x):
    y, dy = torch.softmax(x, 0), torch.arange(1.0, x.numel() + 1)
    function(dy, y)
    return function(dy, y)


# --- 20 ------------------------------------------------------------------------------------------------------


@triton.jit
def double_kernel(x_ptr, y_ptr, n_elements, BLOCK_SIZE: tl.constexpr):
    offsets = tl.arange(0, BLOCK_SIZE)
    mask = offsets < n_elements
    tl.store(y_ptr + offsets, 2 * tl.load(x_ptr + offsets, mask=mask), mask=mask)


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        y = x
        double_kernel[(1,)](x, y, x.numel(), BLOCK_SIZE=triton.next_power_of_2(x.numel()))
        return y

    @staticmethod
    def backward(ctx, dy):
        return 2 * dy


class DoubleFixed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        y = torch.empty_like(x)
        double_kernel[(1,)](x, y, x.numel(), BLOCK_SIZE=triton.next_power_of_2(x.numel()))
        return y

    @staticmethod
    def backward(ctx, dy):
        return 2 * dy


def _slope_behind_exp(function, w):
    # exp saves its result for its own backward pass
    w = w.clone().requires_grad_()
    return torch.autograd.grad(function.apply(torch.exp(w)).sum(), w)[0]


# --- 21 ------------------------------------------------------------------------------------------------------


@triton.jit
def add_kernel(x_ptr, total_ptr, n_elements, BLOCK_SIZE: tl.constexpr):
    # total += x
    offsets = tl.program_id(0) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    mask = offsets < n_elements
    total = tl.load(total_ptr + offsets, mask=mask) + tl.load(x_ptr + offsets, mask=mask)
    tl.store(total_ptr + offsets, total, mask=mask)


def fastest(launch, block_sizes):
    """The block size of the shortest launch, as an autotuner finds it."""
    times = {}
    for size in block_sizes:
        start = time.perf_counter()
        launch(size)
        times[size] = time.perf_counter() - start
    return min(times, key=times.get)


def accumulate(total, x, block_sizes):
    def launch(size):
        add_kernel[(triton.cdiv(x.numel(), size),)](x, total, x.numel(), BLOCK_SIZE=size)

    best = fastest(launch, block_sizes) if len(block_sizes) > 1 else block_sizes[0]
    launch(best)
    return total


def accumulate_fixed(total, x, block_sizes):
    def launch(size):
        add_kernel[(triton.cdiv(x.numel(), size),)](x, total, x.numel(), BLOCK_SIZE=size)

    before = total.clone()  # triton.autotune: restore_value=["total_ptr"]
    best = fastest(launch, block_sizes) if len(block_sizes) > 1 else block_sizes[0]
    total.copy_(before)
    launch(best)
    return total


_sizes = whole_numbers(1, 10, description="a number of block sizes")


def _accumulated(function, n_sizes):
    sizes = [4 << k for k in range(n_sizes)]
    return function(torch.zeros(4), torch.ones(4), sizes)


EXHIBITS = (
    Exhibit(
        "The sum that loses", column_sum_kernel, column_sum_kernel_fixed, shape, (2, 4096), (3, 1),
        run=_column_sum, find=_first_race,
    ),
    Exhibit(
        "One mask for every tile", (dropout_kernel, dropout), (dropout_kernel_fixed, dropout_fixed),
        length, 16, 17, run=lambda function, n: function(torch.ones(n)),
    ),
    Exhibit(
        "Backward, twice", (softmax_backward_kernel, softmax_backward),
        (softmax_backward_kernel, softmax_backward_fixed), numbers, [0.5], [0, 0],
        run=_second_call,
    ),
    Exhibit(
        "In place, and nobody told", (double_kernel, Double), (double_kernel, DoubleFixed), numbers,
        [-200.0], [0],
        run=_slope_behind_exp,
    ),
    Exhibit(
        "Tuned into the result", (add_kernel, fastest, accumulate),
        (add_kernel, fastest, accumulate_fixed), _sizes, 1, 2,
        run=_accumulated,
    ),
)  # fmt: skip
