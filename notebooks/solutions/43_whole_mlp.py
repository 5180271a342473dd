"""Solutions to the exercises of notebook 43."""

# %%
import lib  # noqa: F401  before triton: with no GPU it switches the interpreter on

import torch
import triton
import triton.language as tl


# %% 43.1 one row and one column are enough: 17 units of different signs, biases that differ, and a small sum
def inputs_that_show_it():
    x = torch.ones(1, 1)
    w1 = torch.tensor([[-1.0], [1.0]]).repeat(9, 1)[:17]
    b1 = torch.linspace(-0.5, 0.5, 17)
    b1[16] = 2.0  # unit 16 is on, and the first of the second tile
    w2 = torch.full((1, 17), 0.2)
    return x, w1, b1, w2, torch.tensor([0.3])


# %% 43.2 c - 1 extra products against a launch and two passes; longer, not as long: one more than the quotient
def tiles_that_lose(m, k, h, itemsize, tflops, gbps, launch_us):
    again_us = 2 * m * k * h / tflops / 1e6
    kernel_us = launch_us + 2 * m * h * itemsize / gbps / 1e3
    return 1 + int(kernel_us / again_us) + 1


# %% 43.3 rows that are not there have a hidden layer, of the bias: 0 · ∞ is NaN, so dz2 = 0 is too little
@triton.jit
def dw2_kernel(
    dz2_ptr, x_ptr, w1_ptr, b1_ptr, parts_ptr, n_rows, n_inner, n_hidden, n_cols,
    BLOCK_M: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    # One program handles BLOCK_M rows, BLOCK_H hidden units, and their part of dW2, (BLOCK_N, BLOCK_H).
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    units = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    cols = tl.arange(0, BLOCK_N)
    hidden = tl.zeros((BLOCK_M, BLOCK_H), dtype=tl.float32)
    for start in range(0, n_inner, BLOCK_K):
        inner = start + tl.arange(0, BLOCK_K)
        x_mask = (rows < n_rows)[:, None] & (inner < n_inner)[None, :]
        x = tl.load(x_ptr + rows[:, None] * n_inner + inner[None, :], mask=x_mask, other=0.0)
        w1_mask = (inner < n_inner)[:, None] & (units < n_hidden)[None, :]
        w1 = tl.load(w1_ptr + units[None, :] * n_inner + inner[:, None], mask=w1_mask, other=0.0)
        hidden = tl.dot(x, w1, hidden, input_precision="ieee")
    hidden += tl.load(b1_ptr + units, mask=units < n_hidden, other=0.0)[None, :]
    hidden = tl.where(hidden < 0, 0.0, hidden)
    hidden = tl.where((rows < n_rows)[:, None], hidden, 0.0)
    dz2_mask = (cols < n_cols)[:, None] & (rows < n_rows)[None, :]
    dz2_t = tl.load(dz2_ptr + rows[None, :] * n_cols + cols[:, None], mask=dz2_mask, other=0.0)
    part = tl.dot(dz2_t, hidden, input_precision="ieee")
    part_ptr = parts_ptr + tl.program_id(0).to(tl.int64) * n_cols * n_hidden
    mask = (cols < n_cols)[:, None] & (units < n_hidden)[None, :]
    tl.store(part_ptr + cols[:, None] * n_hidden + units[None, :], part, mask=mask)


def dw2_parts(dz2, x, w1, b1):
    (m, k), h, n = x.shape, w1.shape[0], dz2.shape[1]
    tiles, block_n = triton.cdiv(m, 16), max(16, triton.next_power_of_2(n))
    parts = x.new_empty(tiles, n, h)
    dw2_kernel[(tiles, triton.cdiv(h, 64))](
        dz2, x, w1, b1, parts, m, k, h, n, BLOCK_M=16, BLOCK_H=64, BLOCK_K=32, BLOCK_N=block_n
    )
    return parts


# %% 43.4 all of K is one tile, so x is loaded once: it feeds every product, and is what the sums begin with
@triton.jit
def residual_kernel(
    x_ptr, w1_ptr, b1_ptr, w2_ptr, b2_ptr, y_ptr, n_rows, n_inner, n_hidden,
    BLOCK_M: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    # One program handles BLOCK_M rows of x and y, (BLOCK_M, BLOCK_K), and walks through the hidden layer.
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    inner = tl.arange(0, BLOCK_K)
    mask = (rows < n_rows)[:, None] & (inner < n_inner)[None, :]
    offsets = rows[:, None] * n_inner + inner[None, :]
    x = tl.load(x_ptr + offsets, mask=mask, other=0.0)
    y = x + tl.load(b2_ptr + inner, mask=inner < n_inner, other=0.0)[None, :]
    for start in range(0, n_hidden, BLOCK_H):
        units = start + tl.arange(0, BLOCK_H)
        w1_mask = (inner < n_inner)[:, None] & (units < n_hidden)[None, :]
        w1 = tl.load(w1_ptr + units[None, :] * n_inner + inner[:, None], mask=w1_mask, other=0.0)
        hidden = tl.dot(x, w1, input_precision="ieee")
        hidden += tl.load(b1_ptr + units, mask=units < n_hidden, other=0.0)[None, :]
        hidden = tl.where(hidden < 0, 0.0, hidden)
        # of units that are not there: else the NaN of an inf in x times the 0 of a mask
        hidden = tl.where((units < n_hidden)[None, :], hidden, 0.0)
        w2_mask = (units < n_hidden)[:, None] & (inner < n_inner)[None, :]
        w2 = tl.load(w2_ptr + inner[None, :] * n_hidden + units[:, None], mask=w2_mask, other=0.0)
        y = tl.dot(hidden, w2, y, input_precision="ieee")
    tl.store(y_ptr + offsets, y, mask=mask)


def residual_mlp(x, w1, b1, w2, b2):
    (m, k), h = x.shape, w1.shape[0]
    y = torch.empty_like(x)
    block_k = max(16, triton.next_power_of_2(k))
    residual_kernel[(triton.cdiv(m, 16),)](
        x, w1, b1, w2, b2, y, m, k, h, BLOCK_M=16, BLOCK_H=32, BLOCK_K=block_k
    )
    return y
