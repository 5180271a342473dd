"""Solutions to the exercises of notebook 41."""

# %%
import lib  # noqa: F401  before triton: with no GPU it switches the interpreter on

import torch
import triton
import triton.language as tl


# %% 41.1 the mask asks for the column: a row of W at or past H is there, but it is the gate's
def rows_of_w(tile, block_n, n_hidden):
    cols = [c for c in range(tile * block_n, (tile + 1) * block_n) if c < n_hidden]
    return cols + [c + n_hidden for c in cols]


# %% 41.2 one column: row 0 of x reads on into row 1, and 0 · NaN is NaN, whatever the mask of W puts there
# (inf does it too)
x_that_shows_it = [[1.0], [float("nan")]]


# %% 41.3 two sums in one program, and the sigmoid is x1's; "ieee", or float32 loses 13 bits on a GPU
@triton.jit
def linear_swiglu_kernel(
    x_ptr, w_ptr, bias_ptr, y_ptr, n_rows, n_hidden, n_in,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tl.program_id(1).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    in_rows, in_cols = (rows < n_rows)[:, None], (cols < n_hidden)[None, :]
    total1 = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    total2 = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for start in range(0, n_in, BLOCK_K):
        inner = start + tl.arange(0, BLOCK_K)
        inside = inner < n_in
        x_ptrs = x_ptr + rows[:, None] * n_in + inner[None, :]
        w_ptrs = w_ptr + inner[:, None] + cols[None, :] * n_in
        x = tl.load(x_ptrs, mask=in_rows & inside[None, :], other=0.0)
        w1 = tl.load(w_ptrs, mask=in_cols & inside[:, None], other=0.0)
        w2 = tl.load(w_ptrs + n_hidden * n_in, mask=in_cols & inside[:, None], other=0.0)
        total1 = tl.dot(x, w1, total1, input_precision="ieee")
        total2 = tl.dot(x, w2, total2, input_precision="ieee")
    bias1 = tl.load(bias_ptr + cols, mask=cols < n_hidden, other=0.0).to(tl.float32)
    bias2 = tl.load(bias_ptr + n_hidden + cols, mask=cols < n_hidden, other=0.0).to(tl.float32)
    x1, x2 = total1 + bias1[None, :], total2 + bias2[None, :]
    y_ptrs = y_ptr + rows[:, None] * n_hidden + cols[None, :]
    tl.store(y_ptrs, x1 * tl.sigmoid(x1) * x2, mask=in_rows & in_cols)


def linear_swiglu(x, weight, bias):
    (n_rows, n_in), n_hidden = x.shape, weight.shape[0] // 2
    y = x.new_empty(n_rows, n_hidden)
    grid = (triton.cdiv(n_rows, 64), triton.cdiv(n_hidden, 64))
    linear_swiglu_kernel[grid](
        x, weight, bias, y, n_rows, n_hidden, n_in, BLOCK_M=64, BLOCK_N=64, BLOCK_K=32
    )
    return y


# %% 41.4 a program adds up its own columns of dh while they are in registers; what is left to add up is small
@triton.jit
def reglu_backward_kernel(
    dy_ptr, h_ptr, dh_ptr, partial_ptr, n_rows, n_hidden, stride_dym, stride_dyn,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    cols = tl.program_id(1).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    mask = (rows < n_rows) & (cols < n_hidden)
    offsets = rows * 2 * n_hidden + cols
    dy = tl.load(dy_ptr + rows * stride_dym + cols * stride_dyn, mask=mask, other=0.0)
    dy = dy.to(tl.float32)
    x1 = tl.load(h_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    x2 = tl.load(h_ptr + n_hidden + offsets, mask=mask, other=0.0).to(tl.float32)
    # x2 <= 0, which a NaN is not: it stays, as in PyTorch
    dx1, dx2 = dy * tl.where(x2 <= 0, 0.0, x2), tl.where(x2 <= 0, 0.0, dy * x1)
    tl.store(dh_ptr + offsets, dx1, mask=mask)
    tl.store(dh_ptr + n_hidden + offsets, dx2, mask=mask)
    sums = partial_ptr + tl.program_id(0) * 2 * n_hidden + cols
    tl.store(sums, tl.sum(dx1, axis=0)[None, :], mask=cols < n_hidden)
    tl.store(sums + n_hidden, tl.sum(dx2, axis=0)[None, :], mask=cols < n_hidden)


def reglu_backward(dy, h):
    (n_rows, n_hidden), dh = dy.shape, torch.empty_like(h)
    grid = (triton.cdiv(n_rows, 64), triton.cdiv(n_hidden, 64))
    partial = torch.empty(grid[0], 2 * n_hidden, device=h.device)
    reglu_backward_kernel[grid](
        dy, h, dh, partial, n_rows, n_hidden, *dy.stride(), BLOCK_M=64, BLOCK_N=64
    )
    return dh, partial.sum(0)
