"""Solutions to the exercises of notebook 01. Six kernels in the same three bands: locate, compute, store."""

# %%
import lib  # noqa: F401  before triton: with no GPU it switches the interpreter on

import torch
import triton
import triton.language as tl


# %% 01.1 a tile needs the biases of its own columns, once: (1, BLOCK_N) is repeated for each row
@triton.jit
def bias_by_column_kernel(
    x_ptr, b_ptr, y_ptr, n_rows, n_cols, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    rows = (tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M))[:, None]
    cols = (tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N))[None, :]
    offsets, mask = rows * n_cols + cols, (rows < n_rows) & (cols < n_cols)

    x = tl.load(x_ptr + offsets, mask=mask).to(tl.float32)
    b = tl.load(b_ptr + cols, mask=cols < n_cols).to(tl.float32)

    tl.store(y_ptr + offsets, x + b, mask=mask)


def bias_by_column(x, b):
    y, (n_rows, n_cols) = torch.empty_like(x), x.shape
    grid = (triton.cdiv(n_rows, 16), triton.cdiv(n_cols, 64))
    bias_by_column_kernel[grid](x, b, y, n_rows, n_cols, BLOCK_M=16, BLOCK_N=64)
    return y


# %% 01.2 the same, and the biases of its own rows: (BLOCK_M, 1)
@triton.jit
def bias_by_row_kernel(
    x_ptr, b_ptr, y_ptr, n_rows, n_cols, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    rows = (tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M))[:, None]
    cols = (tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N))[None, :]
    offsets, mask = rows * n_cols + cols, (rows < n_rows) & (cols < n_cols)

    x = tl.load(x_ptr + offsets, mask=mask).to(tl.float32)
    b = tl.load(b_ptr + rows, mask=rows < n_rows).to(tl.float32)

    tl.store(y_ptr + offsets, x + b, mask=mask)


def bias_by_row(x, b):
    y, (n_rows, n_cols) = torch.empty_like(x), x.shape
    grid = (triton.cdiv(n_rows, 16), triton.cdiv(n_cols, 64))
    bias_by_row_kernel[grid](x, b, y, n_rows, n_cols, BLOCK_M=16, BLOCK_N=64)
    return y


# %% 01.3 a tile of sums stays in registers while the columns go by; places that are not there add 0
@triton.jit
def row_sum_kernel(x_ptr, y_ptr, n_rows, n_cols, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, n_cols, BLOCK_N):
        cols = start + tl.arange(0, BLOCK_N)
        mask = (rows < n_rows)[:, None] & (cols < n_cols)[None, :]
        total += tl.load(x_ptr + rows[:, None] * n_cols + cols[None, :], mask=mask, other=0.0)

    tl.store(y_ptr + rows, tl.sum(total, axis=1), mask=rows < n_rows)


def row_sum(x):
    y = x.new_empty(len(x))
    row_sum_kernel[(triton.cdiv(len(x), 16),)](x, y, *x.shape, BLOCK_M=16, BLOCK_N=128)
    return y


# %% 01.4 what changes no maximum is -inf; 0 would be the largest of a row of negative numbers
@triton.jit
def row_max_kernel(x_ptr, y_ptr, n_rows, n_cols, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    top = tl.full((BLOCK_M, BLOCK_N), -float("inf"), tl.float32)
    for start in range(0, n_cols, BLOCK_N):
        cols = start + tl.arange(0, BLOCK_N)
        mask = (rows < n_rows)[:, None] & (cols < n_cols)[None, :]
        x_ptrs = x_ptr + rows[:, None] * n_cols + cols[None, :]
        top = tl.maximum(top, tl.load(x_ptrs, mask=mask, other=-float("inf")))

    tl.store(y_ptr + rows, tl.max(top, axis=1), mask=rows < n_rows)


def row_max(x):
    y = x.new_empty(len(x))
    row_max_kernel[(triton.cdiv(len(x), 16),)](x, y, *x.shape, BLOCK_M=16, BLOCK_N=128)
    return y


# %% 01.5 y has n_rows columns: element (row, column) of x is element (column, row) of y
@triton.jit
def transpose_kernel(x_ptr, y_ptr, n_rows, n_cols, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    rows = (tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M))[:, None]
    cols = (tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N))[None, :]
    mask = (rows < n_rows) & (cols < n_cols)

    x = tl.load(x_ptr + rows * n_cols + cols, mask=mask)

    tl.store(y_ptr + cols * n_rows + rows, x, mask=mask)


def transpose(x):
    n_rows, n_cols = x.shape
    y = x.new_empty(n_cols, n_rows)
    grid = (triton.cdiv(n_rows, 32), triton.cdiv(n_cols, 32))
    transpose_kernel[grid](x, y, n_rows, n_cols, BLOCK_M=32, BLOCK_N=32)
    return y


# %% 01.6 a whole row in one tile; exp(-inf) is 0, so what is not there adds nothing
@triton.jit
def softmax_rows_kernel(x_ptr, y_ptr, n_cols, BLOCK_N: tl.constexpr):
    row, cols = tl.program_id(0), tl.arange(0, BLOCK_N)
    x = tl.load(x_ptr + row * n_cols + cols, mask=cols < n_cols, other=-float("inf"))

    e = tl.exp(x.to(tl.float32) - tl.max(x, axis=0))
    y = e / tl.sum(e, axis=0)

    tl.store(y_ptr + row * n_cols + cols, y, mask=cols < n_cols)


def softmax_rows(x):
    y, (n_rows, n_cols) = torch.empty_like(x), x.shape
    softmax_rows_kernel[(n_rows,)](x, y, n_cols, BLOCK_N=triton.next_power_of_2(n_cols))
    return y
