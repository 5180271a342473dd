"""Solutions to the exercises of notebook 45."""

# %%
import lib  # noqa: F401  before triton: with no GPU it switches the interpreter on

import torch
import triton
import triton.language as tl


# %% 45.1 the first query of a tile decides what all see, the last one what any sees
def count_tiles(n, block_m, block_n):
    whole = masked = 0
    for first in range(0, n, block_m):
        seen_by_all, seen_by_any = first + 1, min(first + block_m, n)
        whole += seen_by_all // block_n
        masked += -(-seen_by_any // block_n) - seen_by_all // block_n
    return whole, masked


# %% 45.2 p of the tile before has the old maximum, as o has: add them, then shrink both
def attend_one_behind(q, k, v, n):
    top = q.new_full((len(q), 1), -float("inf"))
    total, o, p = q.new_zeros(len(q), 1), torch.zeros_like(q), None
    for first in range(0, len(k), n):
        s = q @ k[first : first + n].T * q.shape[-1] ** -0.5
        if p is not None:
            o = o + p @ v[first - n : first]
        new_top = torch.maximum(top, s.amax(1, keepdim=True))
        p, shrink = torch.exp(s - new_top), torch.exp(top - new_top)
        total = total * shrink + p.sum(1, keepdim=True)
        o = o * shrink
        top = new_top
    o = o + p @ v[first:]
    return o / total, top + total.log()


# %% 45.3 start at the tile of the first query's first key, and shift by 0 as long as a row has seen nothing
@triton.jit
def window_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, n_rows, left, factor,
    D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    # One program handles BLOCK_M queries of one head.
    start, d = tl.program_id(1).to(tl.int64) * n_rows * D, tl.arange(0, D)
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    offsets = start + rows[:, None] * D + d[None, :]
    q = tl.load(q_ptr + offsets, mask=(rows < n_rows)[:, None], other=0.0)
    top = tl.full((BLOCK_M,), -float("inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    o = tl.zeros((BLOCK_M, D), tl.float32)
    begin = tl.maximum(tl.program_id(0) * BLOCK_M - left, 0) // BLOCK_N * BLOCK_N
    end = tl.minimum(n_rows, (tl.program_id(0) + 1) * BLOCK_M)
    for first in range(begin, end, BLOCK_N):
        cols = first + tl.arange(0, BLOCK_N)
        kv_offsets = start + cols[:, None] * D + d[None, :]
        k = tl.load(k_ptr + kv_offsets, mask=(cols < n_rows)[:, None], other=0.0)
        v = tl.load(v_ptr + kv_offsets, mask=(cols < n_rows)[:, None], other=0.0)
        s = factor * tl.dot(q, k.T, input_precision="ieee")
        seen = (cols[None, :] <= rows[:, None]) & (cols[None, :] >= rows[:, None] - left)
        s = tl.where(seen, s, -float("inf"))
        new_top = tl.maximum(top, tl.max(s, axis=1))
        shift = tl.where(new_top == -float("inf"), 0.0, new_top)
        p = tl.exp2(s - shift[:, None])
        shrink = tl.exp2(top - shift)
        total = total * shrink + tl.sum(p, axis=1)
        o = tl.dot(p.to(v.dtype), v, o * shrink[:, None], input_precision="ieee")
        top = new_top
    total = tl.where(total == 0.0, 1.0, total)  # of rows that do not exist
    tl.store(o_ptr + offsets, o / total[:, None], mask=(rows < n_rows)[:, None])


def window_attention(q, k, v, left):
    (h, s, d), o = q.shape, torch.empty_like(q)
    factor = d**-0.5 * 1.4426950408889634
    window_kernel[(triton.cdiv(s, 32), h)](q, k, v, o, s, left, factor, D=d, BLOCK_M=32, BLOCK_N=32)
    return o
