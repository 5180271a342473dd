"""Plausible wrong answers to the exercises of notebook 03, named <answer>__<why>: each must be rejected."""

from lib.tests.exercises.wrong_answers import solution, without_other

import torch
import triton
import triton.language as tl

_right = solution("03_add_relu")


def add_relu6__without_the_cap(x, bias):
    return torch.relu(x + bias)


@triton.jit
def _minmax_kernel(
    x_ptr, bias_ptr, y_ptr, n_elements, n_cols, CLAMP: tl.constexpr, BLOCK_SIZE: tl.constexpr
):
    offsets = tl.program_id(0) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    mask = offsets < n_elements
    z = tl.load(x_ptr + offsets, mask=mask).to(tl.float32)
    z += tl.load(bias_ptr + offsets % n_cols, mask=mask).to(tl.float32)
    y = tl.clamp(z, 0.0, 6.0) if CLAMP else tl.minimum(tl.maximum(z, 0.0), 6.0)
    tl.store(y_ptr + offsets, y, mask=mask)


def _minmax(x, bias, clamp):
    y = torch.empty_like(x)
    grid = (triton.cdiv(x.numel(), 256),)
    _minmax_kernel[grid](x, bias, y, x.numel(), x.shape[1], CLAMP=clamp, BLOCK_SIZE=256)
    return y


def add_relu6__maximum_drops_nan(x, bias):
    return _minmax(x, bias, False)


def add_relu6__clamp_drops_nan(x, bias):
    return _minmax(x, bias, True)


def add_relu6__eager(x, bias):
    return torch.clamp(x + bias, 0, 6)


def add_relu6__cap_in_a_second_kernel(x, bias):
    return _right.add_relu6(x, bias).clamp_max(6)


def add_relu6__cap_before_bias(x, bias):
    return torch.relu(x.clamp_max(6) + bias)


def add_relu6__bias_by_row(x, bias):
    rows = torch.arange(x.numel(), device=x.device).view_as(x) // max(1, x.shape[0])
    return torch.clamp(x + bias[rows % bias.numel()], 0, 6)


smallest_wrong_shape__the_author_tested_it = (8, 8)
smallest_wrong_shape__nine_columns = (1, 9)
smallest_wrong_shape__not_the_smallest = (2, 2)
smallest_wrong_shape__not_a_shape = 3


def bias_gradient__counts_zeros(dy, y):
    return torch.where(y >= 0, dy, 0).sum(0)


def bias_gradient__eager(dy, y):
    return torch.where(y > 0, dy, 0).sum(0)


def bias_gradient__writes_dx(dy, y):
    return _right.bias_gradient(torch.where(y > 0, dy, 0), y)


def bias_gradient__sums_columns(dy, y):
    return torch.where(y > 0, dy, 0).sum(1)


def bias_gradient__first_tile_only(dy, y):
    return _right.bias_gradient(dy[:64].contiguous(), y[:64].contiguous())


def bias_gradient__first_1024_rows(dy, y):
    return _right.bias_gradient(dy[:1024], y[:1024])


@triton.jit
def _racing_kernel(
    dy_ptr, y_ptr, dbias_ptr, n_rows, n_cols, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tl.arange(0, BLOCK_N)
    mask = (rows < n_rows)[:, None] & (cols < n_cols)[None, :]
    offsets = rows[:, None] * n_cols + cols[None, :]
    dy = tl.load(dy_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    y = tl.load(y_ptr + offsets, mask=mask, other=0.0)
    total = tl.sum(tl.where(y > 0, dy, 0.0), axis=0)
    so_far = tl.load(dbias_ptr + cols, mask=cols < n_cols)
    tl.store(dbias_ptr + cols, so_far + total, mask=cols < n_cols)


def bias_gradient__tiles_race(dy, y):
    n_rows, n_cols = y.shape
    dbias = torch.zeros(n_cols, dtype=torch.float32, device=y.device)
    block_n = triton.next_power_of_2(n_cols)
    grid = (triton.cdiv(n_rows, 16),)
    _racing_kernel[grid](dy, y, dbias, n_rows, n_cols, BLOCK_M=16, BLOCK_N=block_n)
    return dbias.to(y.dtype)


@triton.jit
def _atomic_kernel(dy_ptr, y_ptr, dbias_ptr, n_elements, n_cols, BLOCK_SIZE: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    mask = offsets < n_elements
    dy = tl.load(dy_ptr + offsets, mask=mask).to(tl.float32)
    y = tl.load(y_ptr + offsets, mask=mask)
    tl.atomic_add(dbias_ptr + offsets % n_cols, tl.where(y > 0, dy, 0.0), mask=mask)


def bias_gradient__atomics_in_any_order(dy, y):
    dbias = torch.zeros(y.shape[1], dtype=torch.float32, device=y.device)
    grid = (triton.cdiv(y.numel(), 256),)
    _atomic_kernel[grid](dy, y, dbias, y.numel(), y.shape[1], BLOCK_SIZE=256)
    return dbias.to(y.dtype)


bias_gradient__inf_times_zero = solution(
    "03_add_relu", "tl.where(y > 0, dy, 0.0)", "dy * (y > 0).to(tl.float32)"
).bias_gradient


def bias_gradient__low_precision_sum(dy, y):
    total = torch.zeros_like(dy[0])
    for row in torch.where(y > 0, dy, 0):
        total = total + row
    return total


bias_gradient__total_in_16_bits = solution(
    "03_add_relu",
    "dtype=tl.float32)\n    for start", "dtype=dy_ptr.dtype.element_ty)\n    for start",
    ".to(tl.float32)\n        y = tl.load", "\n        y = tl.load",
    "BLOCK_M=64, BLOCK_N=64)\n    return dbias", "BLOCK_M=16, BLOCK_N=64)\n    return dbias",
).bias_gradient  # fmt: skip
bias_gradient__loop_of_1104_rows = solution(
    "03_add_relu", "range(0, n_rows, BLOCK_M)", "range(0, 1104, BLOCK_M)"
).bias_gradient
bias_gradient__undefined_lanes = without_other("03_add_relu").bias_gradient


def bias_gradient__overwrites_dy(dy, y):
    dbias = _right.bias_gradient(dy, y)
    dy.zero_()
    return dbias


def leaky_gradients__eager(dy, y):
    dx = torch.where(y > 0, dy, 0.1 * dy)
    return dx, dx.sum(0)


def leaky_gradients__sums_dx_again(dy, y):
    dx, _ = _right.leaky_gradients(dy, y)
    return dx, _right.bias_gradient(dx, torch.ones_like(y))


def leaky_gradients__sum_by_torch(dy, y):
    dx, _ = _right.leaky_gradients(dy, y)
    return dx, dx.sum(0)


leaky_gradients__strips_added_by_torch = solution(
    "03_add_relu",
    "    add_shares_kernel[(across,)](partial, dbias, n_strips, n_cols, BLOCK_M=16, BLOCK_N=64)\n",
    "    dbias = partial.sum(0).to(y.dtype)\n",
).leaky_gradients


def leaky_gradients__first_strip_only(dy, y):
    dx, _ = _right.leaky_gradients(dy, y)
    return dx, _right.leaky_gradients(dy[:64], y[:64])[1]


def leaky_gradients__atomics_in_any_order(dy, y):
    dx, _ = _right.leaky_gradients(dy, y)
    dbias = torch.zeros(y.shape[1], dtype=torch.float32, device=y.device)
    grid = (triton.cdiv(y.numel(), 256),)
    _atomic_kernel[grid](dx, torch.ones_like(y), dbias, y.numel(), y.shape[1], BLOCK_SIZE=256)
    return dx, dbias.to(y.dtype)


def _leaky(*changes):
    return solution("03_add_relu", *changes).leaky_gradients


leaky_gradients__zero_below = _leaky("tl.where(y > 0, dy, 0.1 * dy)", "tl.where(y > 0, dy, 0.0)")
leaky_gradients__zero_passes = _leaky("tl.where(y > 0, dy, 0.1", "tl.where(y >= 0, dy, 0.1")
leaky_gradients__slope_from_dy = _leaky("tl.where(y > 0, dy, 0.1", "tl.where(dy > 0, dy, 0.1")
leaky_gradients__partial_in_16_bits = _leaky(
    "n_strips, n_cols, dtype=torch.float32", "n_strips, n_cols, dtype=y.dtype"
)
leaky_gradients__strips_rounded_down = _leaky(
    "n_strips, across = triton.cdiv(n_rows, 64)", "n_strips, across = max(1, n_rows // 64)"
)
leaky_gradients__one_program_a_tile_of_columns = _leaky(
    "BLOCK_M=64, BLOCK_N=64)\n    add_shares", "BLOCK_M=4096, BLOCK_N=64)\n    add_shares",
    "triton.cdiv(n_rows, 64), triton", "triton.cdiv(n_rows, 4096), triton",
)  # fmt: skip


@triton.jit
def _tall_kernel(
    dy_ptr, y_ptr, dx_ptr, dbias_ptr, n_rows, n_cols, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    cols = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for start in range(0, n_rows, BLOCK_M):
        rows = start + tl.arange(0, BLOCK_M).to(tl.int64)
        mask = (rows < n_rows)[:, None] & (cols < n_cols)[None, :]
        offsets = rows[:, None] * n_cols + cols[None, :]
        dy = tl.load(dy_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        y = tl.load(y_ptr + offsets, mask=mask, other=0.0)
        dx = tl.where(y > 0, dy, 0.1 * dy)
        tl.store(dx_ptr + offsets, dx, mask=mask)
        total += dx
    tl.store(dbias_ptr + cols, tl.sum(total, axis=0), mask=cols < n_cols)


def leaky_gradients__four_columns_a_program(dy, y):
    n_rows, n_cols = y.shape
    dx, dbias = torch.empty_like(y), torch.empty(n_cols, dtype=y.dtype, device=y.device)
    grid = (triton.cdiv(n_cols, 4),)
    _tall_kernel[grid](dy, y, dx, dbias, n_rows, n_cols, BLOCK_M=512, BLOCK_N=4)
    return dx, dbias


leaky_gradients__undefined_lanes = without_other("03_add_relu").leaky_gradients


def leaky_gradients__overwrites_dy(dy, y):
    dx, dbias = _right.leaky_gradients(dy, y)
    return dy.copy_(dx), dbias
