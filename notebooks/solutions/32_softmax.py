"""Solutions to the exercises of notebook 32."""

# %%
import lib  # noqa: F401  before triton: with no GPU it switches the interpreter on

import torch
import triton
import triton.language as tl


# %% 32.1 the logarithm of the quotient is a difference, so no share is ever computed, and none can become 0
@triton.jit
def log_softmax_kernel(x_ptr, y_ptr, n_cols, BLOCK_N: tl.constexpr):
    # One program handles one row of x, (n_cols,), padded to BLOCK_N.
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK_N)
    mask = cols < n_cols
    x = tl.load(x_ptr + row * n_cols + cols, mask=mask, other=-float("inf")).to(tl.float32)
    shifted = x - tl.max(x, axis=0)
    y = shifted - tl.log(tl.sum(tl.exp(shifted), axis=0))
    tl.store(y_ptr + row * n_cols + cols, y, mask=mask)


def log_softmax(x):
    y = torch.empty_like(x)
    block_n = triton.next_power_of_2(x.shape[1])
    log_softmax_kernel[(x.shape[0],)](x, y, x.shape[1], BLOCK_N=block_n)
    return y


# %% 32.2 one and two columns need no padding; of four, the padding counts as much as the numbers if these are 0
row_that_shows_it = [0.0, 0.0, 0.0]


# %% 32.3 ∂y_i/∂x_j is 1 for i = j, minus the share e^y_j: dx_j = dy_j - e^y_j · sum of dy
@triton.jit
def log_softmax_backward_kernel(dy_ptr, y_ptr, dx_ptr, n_cols, BLOCK_N: tl.constexpr):
    # One program handles one row, padded to BLOCK_N.
    cols = tl.arange(0, BLOCK_N)
    offsets = tl.program_id(0).to(tl.int64) * n_cols + cols
    mask = cols < n_cols
    dy = tl.load(dy_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    y = tl.load(y_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    tl.store(dx_ptr + offsets, dy - tl.exp(y) * tl.sum(dy, axis=0), mask=mask)


def log_softmax_backward(dy, y):
    dx = torch.empty_like(y)
    block_n = triton.next_power_of_2(y.shape[1])
    log_softmax_backward_kernel[(y.shape[0],)](dy, y, dx, y.shape[1], BLOCK_N=block_n)
    return dx


# %% 32.4 the length takes the place of n_cols in the mask of the load, and the store writes the whole row
@triton.jit
def prefix_softmax_kernel(x_ptr, lengths_ptr, y_ptr, n_cols, BLOCK_N: tl.constexpr):
    # One program handles one row of x, (n_cols,), padded to BLOCK_N.
    row = tl.program_id(0).to(tl.int64)
    length = tl.load(lengths_ptr + row)
    cols = tl.arange(0, BLOCK_N)
    used = cols < length
    x = tl.load(x_ptr + row * n_cols + cols, mask=used, other=-float("inf")).to(tl.float32)
    numerator = tl.exp(x - tl.max(x, axis=0))
    y = tl.where(used, numerator / tl.sum(numerator, axis=0), 0.0)
    tl.store(y_ptr + row * n_cols + cols, y, mask=cols < n_cols)


def prefix_softmax(x, lengths):
    y = torch.empty_like(x)
    block_n = triton.next_power_of_2(x.shape[1])
    prefix_softmax_kernel[(x.shape[0],)](x, lengths, y, x.shape[1], BLOCK_N=block_n)
    return y
