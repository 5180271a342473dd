"""Solutions to the exercises of notebook 48."""

# %%
import lib  # noqa: F401  before triton: with no GPU it switches the interpreter on

import torch
import triton
import triton.language as tl


# %% 48.1 one factor more, the slope of the cap: d(cap·tanh(s/cap))/ds = 1 - tanh²(s/cap)
def capped_dq(q, k, v, o, lse, do, cap):
    scale, delta = q.shape[-1] ** -0.5, (do * o).sum(1, keepdim=True)
    t = torch.tanh(scale * q @ k.T / cap)
    p = torch.exp(cap * t - lse)
    ds = p * (do @ v.T - delta) * (1 - t * t)
    return scale * ds @ k


# %% 48.2 exp(lse) is the sum l·eᵐ: it weighs the results, and is shifted by the larger one of the two
def join(o_a, lse_a, o_b, lse_b):
    top = torch.maximum(lse_a, lse_b)
    zero = torch.where(top == -float("inf"), 0.0, top)
    a, b = torch.exp(lse_a - zero), torch.exp(lse_b - zero)
    total = torch.where(a + b == 0, 1.0, a + b)
    o = (a[..., None] * o_a + b[..., None] * o_b) / total[..., None]
    return o, torch.where(top == -float("inf"), top, zero + torch.log(total))


# %% 48.3 one more load, the page's number, and both tensors masked: 0 times NaN is NaN
@triton.jit
def pages_kernel(
    q_ptr, k_ptr, v_ptr, table_ptr, lengths_ptr, o_ptr, n_heads, n_slots, factor,
    D: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    # One program handles one text, for all heads, which share its keys.
    text, rows, d = tl.program_id(0).to(tl.int64), tl.arange(0, 16), tl.arange(0, D)
    offsets = (text * n_heads + rows)[:, None] * D + d[None, :]
    q = tl.load(q_ptr + offsets, mask=(rows < n_heads)[:, None], other=0.0)
    length = tl.load(lengths_ptr + text)
    top = tl.full((16,), -float("inf"), tl.float32)
    total, o = tl.zeros((16,), tl.float32), tl.zeros((16, D), tl.float32)
    for slot in range(0, tl.cdiv(length, PAGE)):
        page = tl.load(table_ptr + text * n_slots + slot).to(tl.int64)
        in_page = tl.arange(0, PAGE)
        seen = slot * PAGE + in_page < length
        kv_offsets = (page * PAGE + in_page)[:, None] * D + d[None, :]
        k = tl.load(k_ptr + kv_offsets, mask=seen[:, None], other=0.0)
        v = tl.load(v_ptr + kv_offsets, mask=seen[:, None], other=0.0)
        s = factor * tl.dot(q, k.T, input_precision="ieee")
        s = tl.where(seen[None, :], s, -float("inf"))
        new_top = tl.maximum(top, tl.max(s, axis=1))
        p = tl.exp2(s - new_top[:, None])
        shrink = tl.exp2(top - new_top)
        total = total * shrink + tl.sum(p, axis=1)
        o = tl.dot(p.to(v.dtype), v, o * shrink[:, None], input_precision="ieee")
        top = new_top
    tl.store(o_ptr + offsets, o / total[:, None], mask=(rows < n_heads)[:, None])


def attend_pages(q, k_pages, v_pages, table, lengths):
    (n_texts, n_heads, d), o = q.shape, torch.empty_like(q)
    factor = d**-0.5 * 1.4426950408889634
    pages_kernel[(n_texts,)](
        q, k_pages, v_pages, table, lengths, o, n_heads, table.shape[1], factor, D=d, PAGE=16
    )
    return o
