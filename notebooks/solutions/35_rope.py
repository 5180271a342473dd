"""Solutions to the exercises of notebook 35."""

# %%
import lib  # noqa: F401  before triton: with no GPU it switches the interpreter on

import torch
import triton
import triton.language as tl


# %% 35.1 read once, written once; in place the columns from r on can stay as they are
def rope_bytes(b, s, hq, hk, d, r, itemsize, in_place):
    columns = r if in_place else d
    return 2 * b * s * (hq + hk) * columns * itemsize


# %% 35.2 the second sequence's first token is turned as if it stood at position 1; one pair is enough to see it
smallest_wrong_shape = (2, 1, 1, 2)


# %% 35.3 one more load: the row of the tables is no longer a matter of arithmetic
@triton.jit
def positions_kernel(
    x_ptr, y_ptr, cos_ptr, sin_ptr, positions_ptr, n_heads, HALF: tl.constexpr, BLOCK: tl.constexpr
):
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    cols = tl.arange(0, BLOCK)
    mask = cols < HALF
    table = tl.load(positions_ptr + token) * HALF + cols
    row = (token * n_heads + head) * 2 * HALF + cols

    c = tl.load(cos_ptr + table, mask=mask)
    s = tl.load(sin_ptr + table, mask=mask)
    x1 = tl.load(x_ptr + row, mask=mask).to(tl.float32)
    x2 = tl.load(x_ptr + row + HALF, mask=mask).to(tl.float32)

    tl.store(y_ptr + row, x1 * c - x2 * s, mask=mask)
    tl.store(y_ptr + row + HALF, x2 * c + x1 * s, mask=mask)


def rope_positions(q, k, cos, sin, positions):
    outputs = torch.empty_like(q), torch.empty_like(k)
    half = cos.shape[1]
    for x, y in zip((q, k), outputs):
        grid = (x.shape[0] * x.shape[1], x.shape[2])
        block = triton.next_power_of_2(half)
        positions_kernel[grid](x, y, cos, sin, positions, x.shape[2], HALF=half, BLOCK=block)
    return outputs


# %% 35.4 the program holds the whole head, so the mean costs no traffic; masked columns have to be zero in it
@triton.jit
def rms_rope_kernel(
    x_ptr, y_ptr, weight_ptr, cos_ptr, sin_ptr, n_seq, n_heads, eps,
    HALF: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    cols = tl.arange(0, BLOCK)
    mask = cols < HALF
    table = token % n_seq * HALF + cols
    row = (token * n_heads + head) * 2 * HALF + cols

    c = tl.load(cos_ptr + table, mask=mask)
    s = tl.load(sin_ptr + table, mask=mask)
    x1 = tl.load(x_ptr + row, mask=mask, other=0.0).to(tl.float32)
    x2 = tl.load(x_ptr + row + HALF, mask=mask, other=0.0).to(tl.float32)
    mean = tl.sum(x1 * x1 + x2 * x2, axis=0) / (2 * HALF)
    scale = 1.0 / tl.sqrt(mean + eps.to(tl.float32))
    n1 = x1 * scale * tl.load(weight_ptr + cols, mask=mask).to(tl.float32)
    n2 = x2 * scale * tl.load(weight_ptr + HALF + cols, mask=mask).to(tl.float32)

    tl.store(y_ptr + row, n1 * c - n2 * s, mask=mask)
    tl.store(y_ptr + row + HALF, n2 * c + n1 * s, mask=mask)


def rms_rope(x, weight, cos, sin, eps=1e-6):
    y, (b, s, h, d) = torch.empty_like(x), x.shape
    block = triton.next_power_of_2(d // 2)
    rms_rope_kernel[(b * s, h)](x, y, weight, cos, sin, s, h, eps, HALF=d // 2, BLOCK=block)
    return y
