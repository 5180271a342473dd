"""Solutions to the exercises of notebook 07."""

# %%
import lib  # noqa: F401  before triton: with no GPU it switches the interpreter on

import torch
import triton
import triton.language as tl


# %% 07.1 the logarithm of the quotient is a difference, so no share is ever computed, and none can become 0
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


# %% 07.2 each needs what its mistake is about: a number whose exponential overflows; a width that is no power
# of two; two rows; a later number that is larger; a second tile; a first number of -inf
matrices_that_show_it = {
    "unshifted": [[89.0]],
    "padded_with_zeros": [[1.0, 1.0, 1.0]],
    "one_maximum": [[0.0], [200.0]],
    "not_rescaled": [[0.0, 1.0]],
    "own_maxima": [[0.0, 0.0, 1.0]],
    "without_guard": [[-float("inf"), 0.0]],
}


# %% 07.3 the length takes the place of n_cols in the mask of the load, and the store writes the whole row
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


# %% 07.4 ∂y_i/∂x_j is 1 for i = j, minus the share e^y_j: dx_j = dy_j - e^y_j · sum of dy
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


# %% 07.5 online softmax in each column of the tile, then its rule once more to merge the columns. A column may
# see nothing but -inf, be it padding, so each has its guard.
@triton.jit
def log_softmax_long_kernel(x_ptr, y_ptr, n_cols, BLOCK_N: tl.constexpr):
    # One program handles one row of x, (n_cols,), BLOCK_N columns at a time, and walks it twice.
    start_of_row = tl.program_id(0).to(tl.int64) * n_cols
    x_ptr, y_ptr = x_ptr + start_of_row, y_ptr + start_of_row
    tops = tl.full((BLOCK_N,), -float("inf"), tl.float32)
    sums = tl.zeros((BLOCK_N,), tl.float32)
    for start in range(0, n_cols, BLOCK_N):
        cols = start + tl.arange(0, BLOCK_N)
        x = tl.load(x_ptr + cols, mask=cols < n_cols, other=-float("inf")).to(tl.float32)
        new_tops = tl.maximum(tops, x)
        zeros = tl.where(new_tops == -float("inf"), 0.0, new_tops)
        sums = sums * tl.exp(tops - zeros) + tl.exp(x - zeros)
        tops = new_tops
    top = tl.max(tops, axis=0)
    zero = tl.where(top == -float("inf"), 0.0, top)
    log_total = tl.log(tl.sum(sums * tl.exp(tops - zero), axis=0))
    for start in range(0, n_cols, BLOCK_N):
        cols = start + tl.arange(0, BLOCK_N)
        x = tl.load(x_ptr + cols, mask=cols < n_cols, other=0.0).to(tl.float32)
        tl.store(y_ptr + cols, x - zero - log_total, mask=cols < n_cols)


def log_softmax_long(x):
    y = torch.empty_like(x)
    block_n = min(4096, triton.next_power_of_2(x.shape[1]))
    log_softmax_long_kernel[(x.shape[0],)](x, y, x.shape[1], BLOCK_N=block_n, num_warps=8)
    return y
