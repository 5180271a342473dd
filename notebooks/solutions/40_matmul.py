"""Solutions to the exercises of notebook 40."""

# %%
import lib  # noqa: F401  before triton: with no GPU it switches the interpreter on

import torch
import triton
import triton.language as tl


# %% 40.1 each column of tiles asks for all of a, each row of tiles for all of b; every result is stored once
def bytes_requested(M, N, K, BLOCK_M, BLOCK_N, s):
    return (M * K * -(-N // BLOCK_N) + K * N * -(-M // BLOCK_M) + M * N) * s


# %% 40.2 one row of tiles: number 1 goes down to a second row, which does not exist, instead of a column on
smallest_grid = (1, 2)


# %% 40.3 three stages of 64×128 take 3 · (64 + 128) · 64 · 2 bytes, 72 KB; with 1 KB each, 228 KB hold three.
# 64 sums a thread leave room in the 168 registers that three programs of 128 threads allow. 128×128 and 64×256
# have 128 sums a thread, and with addresses more than 168 registers, however many stages
residents = (64, 128, 3, 3)


# %% 40.4 programs go through the tiles of one product, then the next: a second direction of the grid would take
# 65,535 products only. The product's number moves the three pointers. Backward is the same kernel: a transpose
# swaps two strides
@triton.jit
def batched_kernel(
    a_ptr, b_ptr, y_ptr, n_rows, n_cols, n_inner,
    stride_ai, stride_am, stride_ak, stride_bi, stride_bk, stride_bn,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    # One program handles one tile, (BLOCK_M, BLOCK_N), of one of the products.
    tiles_m, tiles_n = tl.cdiv(n_rows, BLOCK_M), tl.cdiv(n_cols, BLOCK_N)
    i = (tl.program_id(0) // (tiles_m * tiles_n)).to(tl.int64)
    tile = tl.program_id(0) % (tiles_m * tiles_n)
    pid_m, pid_n = tile // tiles_n, tile % tiles_n
    rows = (pid_m.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M))[:, None]
    cols = (pid_n.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N))[None, :]
    a_ptr += i * stride_ai
    b_ptr += i * stride_bi
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k in range(0, n_inner, BLOCK_K):
        inner = k + tl.arange(0, BLOCK_K).to(tl.int64)
        across, down = inner[None, :], inner[:, None]
        a_mask, b_mask = (rows < n_rows) & (across < n_inner), (down < n_inner) & (cols < n_cols)
        a = tl.load(a_ptr + rows * stride_am + across * stride_ak, mask=a_mask, other=0.0)
        b = tl.load(b_ptr + down * stride_bk + cols * stride_bn, mask=b_mask, other=0.0)
        total = tl.dot(a, b, total, input_precision="ieee")
    y_ptr += i * n_rows * n_cols
    tl.store(y_ptr + rows * n_cols + cols, total, mask=(rows < n_rows) & (cols < n_cols))


def product_of_each(a, b):
    (n_batches, m, k), n = a.shape, b.shape[2]
    y = a.new_empty(n_batches, m, n)
    grid = (n_batches * triton.cdiv(m, 64) * triton.cdiv(n, 64),)
    batched_kernel[grid](
        a, b, y, m, n, k, *a.stride(), *b.stride(), BLOCK_M=64, BLOCK_N=64, BLOCK_K=32
    )
    return y


class Batched(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, b):
        ctx.save_for_backward(a, b)
        return product_of_each(a, b)

    @staticmethod
    def backward(ctx, dy):
        a, b = ctx.saved_tensors
        return product_of_each(dy, b.mT), product_of_each(a.mT, dy)


def batched(a, b):
    return Batched.apply(a, b)


# %% 40.5 squares of the pieces, summed along K; 0 behind the masks, and the 0/0 of rows not there is not stored
@triton.jit
def cosine_kernel(
    x_ptr, c_ptr, y_ptr, n_rows, n_cols, n_inner,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    # One program handles one tile of y, (BLOCK_M, BLOCK_N).
    tiles_n = tl.cdiv(n_cols, BLOCK_N)
    pid_m, pid_n = tl.program_id(0) // tiles_n, tl.program_id(0) % tiles_n
    rows = pid_m.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = pid_n.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    x_squares, c_squares = tl.zeros((BLOCK_M,), tl.float32), tl.zeros((BLOCK_N,), tl.float32)
    for k in range(0, n_inner, BLOCK_K):
        inner = k + tl.arange(0, BLOCK_K)
        x_mask = (rows < n_rows)[:, None] & (inner < n_inner)[None, :]
        c_mask = (cols < n_cols)[:, None] & (inner < n_inner)[None, :]
        x = tl.load(x_ptr + rows[:, None] * n_inner + inner[None, :], mask=x_mask, other=0.0)
        c = tl.load(c_ptr + cols[:, None] * n_inner + inner[None, :], mask=c_mask, other=0.0)
        total = tl.dot(x, tl.trans(c), total, input_precision="ieee")
        x_wide, c_wide = x.to(tl.float32), c.to(tl.float32)
        x_squares += tl.sum(x_wide * x_wide, axis=1)
        c_squares += tl.sum(c_wide * c_wide, axis=1)
    y = total / (tl.sqrt(x_squares)[:, None] * tl.sqrt(c_squares)[None, :])
    mask = (rows < n_rows)[:, None] & (cols < n_cols)[None, :]
    tl.store(y_ptr + rows[:, None] * n_cols + cols[None, :], y, mask=mask)


def cosine_similarity(x, c):
    (m, k), n = x.shape, c.shape[0]
    y = x.new_empty(m, n)
    grid = (triton.cdiv(m, 64) * triton.cdiv(n, 64),)
    cosine_kernel[grid](x, c, y, m, n, k, BLOCK_M=64, BLOCK_N=64, BLOCK_K=32)
    return y
