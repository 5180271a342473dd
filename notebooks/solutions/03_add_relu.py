"""Solutions to the exercises of notebook 03."""

# %%
import lib  # noqa: F401  before triton: with no GPU it switches the interpreter on

import torch
import triton
import triton.language as tl


# %% 03.1 two `where`s, so that NaN, for which every comparison is false, passes both
@triton.jit
def add_relu6_kernel(x_ptr, bias_ptr, y_ptr, n_elements, n_cols, BLOCK_SIZE: tl.constexpr):
    offsets = tl.program_id(0).to(tl.int64) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    mask = offsets < n_elements
    x = tl.load(x_ptr + offsets, mask=mask).to(tl.float32)
    z = x + tl.load(bias_ptr + offsets % n_cols, mask=mask).to(tl.float32)
    z = tl.where(z < 0, 0.0, z)
    tl.store(y_ptr + offsets, tl.where(z > 6, 6.0, z), mask=mask)


def add_relu6(x, bias):
    y = torch.empty_like(x)
    grid = (triton.cdiv(x.numel(), 1024),)
    add_relu6_kernel[grid](x, bias, y, x.numel(), x.shape[1], BLOCK_SIZE=1024)
    return y


# %% 03.2 one row is right up to 8 columns; a second row of one column already reads bias[1], which is not there
smallest_wrong_shape = (2, 1)


# %% 03.3 one program per strip of columns, walking down the rows: it adds in a fixed order, from top to bottom
@triton.jit
def bias_gradient_kernel(
    dy_ptr, y_ptr, dbias_ptr, n_rows, n_cols, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    cols = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for start in range(0, n_rows, BLOCK_M):
        rows = start + tl.arange(0, BLOCK_M).to(tl.int64)
        mask = (rows < n_rows)[:, None] & (cols < n_cols)[None, :]
        offsets = rows[:, None] * n_cols + cols[None, :]
        dy = tl.load(dy_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        y = tl.load(y_ptr + offsets, mask=mask, other=0.0)
        total += tl.where(y > 0, dy, 0.0)
    tl.store(dbias_ptr + cols, tl.sum(total, axis=0), mask=cols < n_cols)


def bias_gradient(dy, y):
    n_rows, n_cols = y.shape
    dbias = torch.empty(n_cols, dtype=y.dtype, device=y.device)
    grid = (triton.cdiv(n_cols, 64),)
    bias_gradient_kernel[grid](dy, y, dbias, n_rows, n_cols, BLOCK_M=64, BLOCK_N=64)
    return dbias


# %% 03.4 a program takes 64 rows of 64 columns; partial is float32, and places that are not there load 0 for dy
@triton.jit
def leaky_kernel(
    dy_ptr, y_ptr, dx_ptr, partial_ptr, n_rows, n_cols, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = (rows < n_rows)[:, None] & (cols < n_cols)[None, :]
    offsets = rows[:, None] * n_cols + cols[None, :]
    dy = tl.load(dy_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    y = tl.load(y_ptr + offsets, mask=mask, other=0.0)
    dx = tl.where(y > 0, dy, 0.1 * dy)
    tl.store(dx_ptr + offsets, dx, mask=mask)
    share = tl.sum(dx, axis=0)
    tl.store(partial_ptr + tl.program_id(0) * n_cols + cols, share, mask=cols < n_cols)


@triton.jit
def add_shares_kernel(
    partial_ptr, dbias_ptr, n_strips, n_cols, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    cols = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, n_strips, BLOCK_M):
        strips = start + tl.arange(0, BLOCK_M)
        mask = (strips < n_strips)[:, None] & (cols < n_cols)[None, :]
        ptrs = partial_ptr + strips[:, None] * n_cols + cols[None, :]
        total += tl.load(ptrs, mask=mask, other=0.0)
    tl.store(dbias_ptr + cols, tl.sum(total, axis=0), mask=cols < n_cols)


def leaky_gradients(dy, y):
    (n_rows, n_cols), dx = y.shape, torch.empty_like(y)
    dbias = torch.empty(n_cols, dtype=y.dtype, device=y.device)
    n_strips, across = triton.cdiv(n_rows, 64), triton.cdiv(n_cols, 64)
    partial = torch.empty(n_strips, n_cols, dtype=torch.float32, device=y.device)
    leaky_kernel[(n_strips, across)](dy, y, dx, partial, n_rows, n_cols, BLOCK_M=64, BLOCK_N=64)
    add_shares_kernel[(across,)](partial, dbias, n_strips, n_cols, BLOCK_M=16, BLOCK_N=64)
    return dx, dbias
