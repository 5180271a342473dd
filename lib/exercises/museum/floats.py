"""Room 1: right on paper, wrong in floating point."""

import functools

from lib.exercises.museum.exhibit import (
    Exhibit,
    compared,
    limited,
    magnitude,
    numbers,
    on_elements,
    position,
)

import torch
import triton
import triton.language as tl

INF = float("inf")


# --- 1 -------------------------------------------------------------------------------------------------------


@triton.jit
def gelu_kernel(x_ptr, y_ptr, n_elements, BLOCK_SIZE: tl.constexpr):
    # y = x/2 (1 + tanh u), u = sqrt(2/pi) (x + 0.044715 x³)
    offsets = tl.arange(0, BLOCK_SIZE)
    mask = offsets < n_elements
    x = tl.load(x_ptr + offsets, mask=mask)
    u = 0.7978845608 * (x + 0.044715 * x * x * x)
    e = tl.exp(2 * u)
    tanh = (e - 1) / (e + 1)
    tl.store(y_ptr + offsets, 0.5 * x * (1 + tanh), mask=mask)


@triton.jit
def gelu_kernel_fixed(x_ptr, y_ptr, n_elements, BLOCK_SIZE: tl.constexpr):
    # y = x/2 (1 + tanh u), u = sqrt(2/pi) (x + 0.044715 x³)
    offsets = tl.arange(0, BLOCK_SIZE)
    mask = offsets < n_elements
    x = tl.load(x_ptr + offsets, mask=mask)
    u = 0.7978845608 * (x + 0.044715 * x * x * x)
    e = tl.exp(-2 * tl.abs(u))  # never above 1
    tanh = (1 - e) / (1 + e) * tl.where(u < 0, -1.0, 1.0)
    tl.store(y_ptr + offsets, 0.5 * x * (1 + tanh), mask=mask)


# --- 2 -------------------------------------------------------------------------------------------------------


@triton.jit
def relu_kernel(x_ptr, y_ptr, n_elements, BLOCK_SIZE: tl.constexpr):
    offsets = tl.arange(0, BLOCK_SIZE)
    mask = offsets < n_elements
    x = tl.load(x_ptr + offsets, mask=mask)
    tl.store(y_ptr + offsets, tl.maximum(x, 0.0), mask=mask)


@triton.jit
def relu_kernel_fixed(x_ptr, y_ptr, n_elements, BLOCK_SIZE: tl.constexpr):
    offsets = tl.arange(0, BLOCK_SIZE)
    mask = offsets < n_elements
    x = tl.load(x_ptr + offsets, mask=mask)
    tl.store(y_ptr + offsets, tl.where(x < 0, 0.0, x), mask=mask)


# --- 3 -------------------------------------------------------------------------------------------------------


@triton.jit
def rms_norm_kernel(x_ptr, y_ptr, n_cols, BLOCK_SIZE: tl.constexpr):
    # y = x / sqrt(mean(x²) + 1e-6); x and y are float16, the sum is float32
    cols = tl.arange(0, BLOCK_SIZE)
    mask = cols < n_cols
    x = tl.load(x_ptr + cols, mask=mask, other=0.0)
    squares = x * x
    mean = tl.sum(squares.to(tl.float32), axis=0) / n_cols
    tl.store(y_ptr + cols, x / tl.sqrt(mean + 1e-6), mask=mask)


@triton.jit
def rms_norm_kernel_fixed(x_ptr, y_ptr, n_cols, BLOCK_SIZE: tl.constexpr):
    # y = x / sqrt(mean(x²) + 1e-6); x and y are float16, the sum is float32
    cols = tl.arange(0, BLOCK_SIZE)
    mask = cols < n_cols
    x = tl.load(x_ptr + cols, mask=mask, other=0.0).to(tl.float32)
    squares = x * x
    mean = tl.sum(squares, axis=0) / n_cols
    tl.store(y_ptr + cols, x / tl.sqrt(mean + 1e-6), mask=mask)


def _row_of_eight(kernel, x):
    return on_elements(kernel, torch.full((8,), float(x), dtype=torch.float16))


# --- 4 -------------------------------------------------------------------------------------------------------


@triton.jit
def variance_kernel(x_ptr, variance_ptr, n_cols, BLOCK_SIZE: tl.constexpr):
    cols = tl.arange(0, BLOCK_SIZE)
    mask = cols < n_cols
    x = tl.load(x_ptr + cols, mask=mask, other=0.0)
    mean = tl.sum(x, axis=0) / n_cols
    variance = tl.sum(x * x, axis=0) / n_cols - mean * mean
    tl.store(variance_ptr, variance)


@triton.jit
def variance_kernel_fixed(x_ptr, variance_ptr, n_cols, BLOCK_SIZE: tl.constexpr):
    cols = tl.arange(0, BLOCK_SIZE)
    mask = cols < n_cols
    x = tl.load(x_ptr + cols, mask=mask, other=0.0)
    mean = tl.sum(x, axis=0) / n_cols
    distance = tl.where(mask, x - mean, 0.0)
    variance = tl.sum(distance * distance, axis=0) / n_cols
    tl.store(variance_ptr, variance)


# --- 5 -------------------------------------------------------------------------------------------------------


@triton.jit
def gelu_slope_kernel(x_ptr, slope_ptr, n_elements, BLOCK_SIZE: tl.constexpr):
    # the derivative of x/2 (1 + tanh u) is (1 + t)/2 + x/2 (1 - t²) du/dx, with t = tanh u
    offsets = tl.arange(0, BLOCK_SIZE)
    mask = offsets < n_elements
    x = tl.load(x_ptr + offsets, mask=mask)
    u = 0.7978845608 * (x + 0.044715 * x * x * x)
    t = 2 * tl.sigmoid(2 * u) - 1
    du = 0.7978845608 * (1 + 3 * 0.044715 * x * x)
    bend = 0.5 * x * (1 - t * t) * du
    tl.store(slope_ptr + offsets, 0.5 * (1 + t) + bend, mask=mask)


@triton.jit
def gelu_slope_kernel_fixed(x_ptr, slope_ptr, n_elements, BLOCK_SIZE: tl.constexpr):
    # the derivative of x/2 (1 + tanh u) is (1 + t)/2 + x/2 (1 - t²) du/dx, with t = tanh u
    offsets = tl.arange(0, BLOCK_SIZE)
    mask = offsets < n_elements
    x = tl.load(x_ptr + offsets, mask=mask)
    u = 0.7978845608 * (x + 0.044715 * x * x * x)
    t = 2 * tl.sigmoid(2 * u) - 1
    du = 0.7978845608 * (1 + 3 * 0.044715 * x * x)
    bend = tl.where(tl.abs(x) < 10, 0.5 * x * (1 - t * t) * du, 0.0)  # 0 * inf is NaN
    tl.store(slope_ptr + offsets, 0.5 * (1 + t) + bend, mask=mask)


# --- 6 -------------------------------------------------------------------------------------------------------


@triton.jit
def online_softmax_kernel(x_ptr, y_ptr, n_cols, BLOCK_SIZE: tl.constexpr):
    # One row in tiles of 4: `top` is the largest element so far, `total` the sum of exp(x - top).
    top, total = -float("inf"), 0.0
    for start in range(0, n_cols, 4):
        cols = start + tl.arange(0, 4)
        x = tl.load(x_ptr + cols, mask=cols < n_cols, other=-float("inf"))
        new_top = tl.maximum(top, tl.max(x, axis=0))
        total = total * tl.exp(top - new_top) + tl.sum(tl.exp(x - new_top), axis=0)
        top = new_top
    cols = tl.arange(0, BLOCK_SIZE)
    x = tl.load(x_ptr + cols, mask=cols < n_cols)
    tl.store(y_ptr + cols, tl.exp(x - top) / total, mask=cols < n_cols)


@triton.jit
def online_softmax_kernel_fixed(x_ptr, y_ptr, n_cols, BLOCK_SIZE: tl.constexpr):
    # One row in tiles of 4: `top` is the largest element so far, `total` the sum of exp(x - top).
    top, total = -float("inf"), 0.0
    for start in range(0, n_cols, 4):
        cols = start + tl.arange(0, 4)
        x = tl.load(x_ptr + cols, mask=cols < n_cols, other=-float("inf"))
        new_top = tl.maximum(top, tl.max(x, axis=0))
        safe = tl.where(new_top == -float("inf"), 0.0, new_top)  # -inf - -inf is NaN
        total = total * tl.exp(top - safe) + tl.sum(tl.exp(x - safe), axis=0)
        top = new_top
    cols = tl.arange(0, BLOCK_SIZE)
    x = tl.load(x_ptr + cols, mask=cols < n_cols)
    tl.store(y_ptr + cols, tl.exp(x - top) / total, mask=cols < n_cols)


# --- 7 -------------------------------------------------------------------------------------------------------


def rope_angle(position):
    # the angle of the fastest pair is the position itself; model.bfloat16() has cast the table of positions
    return torch.tensor(position).bfloat16().float()


def rope_angle_fixed(position):
    # the angle of the fastest pair is the position itself; cast cos and sin, not what they are computed from
    return torch.tensor(position).float()


_half = limited(
    magnitude, "a number from 1 to 65504", lambda x: bool(((x >= 1) & (x <= 65504)).all())
)
_small_numbers = limited(
    numbers, "a list of numbers up to 10,000 in size", lambda x: bool((x.abs() <= 1e4).all())
)

EXHIBITS = (
    Exhibit(
        "The tanh that gives up", gelu_kernel, gelu_kernel_fixed, magnitude, 3.0, 10.061,
        find=functools.partial(compared, atol=1e-6),  # below -4 both lose the digits of 1 + tanh
    ),
    Exhibit("A ReLU without NaN", relu_kernel, relu_kernel_fixed, numbers, [-2, -0.5, 0, 3], [torch.nan]),
    Exhibit(
        "Squares in 16 bits", rms_norm_kernel, rms_norm_kernel_fixed, _half, 3.0, 256.0,
        run=_row_of_eight,
    ),
    Exhibit(
        "A variance as a difference", variance_kernel, variance_kernel_fixed, _small_numbers,
        [0.3, -1.2, 0.8, 0.1], [4096, 4097],
        run=lambda kernel, x: on_elements(kernel, x)[0],
    ),
    Exhibit(
        "Nothing times infinity", gelu_slope_kernel, gelu_slope_kernel_fixed, magnitude, 3.0, 5.037e19
    ),
    Exhibit(
        "The tile that is all masked", online_softmax_kernel, online_softmax_kernel_fixed, numbers,
        [0.1, 2.0, -INF, 0.5, 1.0, -3.0], [-INF, -INF, -INF, -INF, 0.0],
    ),
    Exhibit(
        "Positions in bfloat16", rope_angle, rope_angle_fixed, position, 128, 257,
        run=lambda function, position: function(position),
    ),
)  # fmt: skip
