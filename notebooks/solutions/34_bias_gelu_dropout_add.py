"""Solutions to the exercises of notebook 34."""

# %%
import lib  # noqa: F401  before triton: with no GPU it switches the interpreter on

import torch
import triton
import triton.language as tl

# %% 34.1 2**31 = 524288 · 4096, so the last index of 524288 rows is 2**31 - 1, the largest int32: one row more
rows_that_overflow = 524289


# %% 34.2 a Philox call makes a byte; its counter is the call's number in the whole tensor, not in the tile
@triton.jit
def keep_bits_kernel(seed_ptr, out_ptr, n_elements, threshold, BLOCK_SIZE: tl.constexpr):
    first = tl.program_id(0).to(tl.int64) * (BLOCK_SIZE // 8)
    calls, lanes = first + tl.arange(0, BLOCK_SIZE // 8), tl.arange(0, 8)
    a, b, c, d = tl.randint4x(tl.load(seed_ptr), calls, 7)
    words = tl.join(tl.join(a, c), tl.join(b, d))
    bits = tl.reshape(tl.join(words & 0xFFFF, words >> 16), (BLOCK_SIZE // 8, 8))
    keep = (bits >= threshold) & (8 * calls[:, None] + lanes[None, :] < n_elements)
    packed = tl.sum(keep.to(tl.int32) << lanes[None, :], axis=1)
    tl.store(out_ptr + calls, packed.to(tl.uint8), mask=8 * calls < n_elements)


def keep_bits(n_elements, p, seed, block_size):
    out = torch.empty(triton.cdiv(n_elements, 8), dtype=torch.uint8, device=seed.device)
    grid = (triton.cdiv(n_elements, block_size),)
    keep_bits_kernel[grid](seed, out, n_elements, round(65536 * p), BLOCK_SIZE=block_size)
    return out


# %% 34.3 both gradients hold keep · dy / (1 - p): drawn once; the counter is the logical index, as in 34.2
@triton.jit
def dropped_gate_backward_kernel(
    dy_ptr, x_ptr, gate_ptr, dx_ptr, dgate_ptr, seed_ptr, n_elements, threshold, scale,
    BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0).to(tl.int64) * BLOCK_SIZE
    offsets = first + tl.arange(0, BLOCK_SIZE)
    mask = offsets < n_elements
    a, b, c, d = tl.randint4x(tl.load(seed_ptr), first // 8 + tl.arange(0, BLOCK_SIZE // 8), 7)
    words = tl.join(tl.join(a, c), tl.join(b, d))
    bits = tl.reshape(tl.join(words & 0xFFFF, words >> 16), (BLOCK_SIZE,))
    dy = tl.load(dy_ptr + offsets, mask=mask).to(tl.float32)
    dz = dy * tl.where(bits >= threshold, scale, 0.0)  # a product: the NaN of a dropped dy stays
    x = tl.load(x_ptr + offsets, mask=mask).to(tl.float32)
    gate = tl.load(gate_ptr + offsets, mask=mask).to(tl.float32)
    tl.store(dx_ptr + offsets, dz * gate, mask=mask)
    tl.store(dgate_ptr + offsets, dz * x, mask=mask)


def dropped_gate_backward(dy, x, gate, p, seed):
    dx, dgate, n = torch.empty_like(x), torch.empty_like(gate), x.numel()
    arguments = (dy.contiguous(), x, gate, dx, dgate, seed, n, round(65536 * p), 1 / (1 - p))
    dropped_gate_backward_kernel[(triton.cdiv(n, 1024),)](*arguments, BLOCK_SIZE=1024)
    return dx, dgate


# %% 34.4 one program per row: its call is row // 8, its lane row % 8, a half of word lane // 2
@triton.jit
def drop_path_kernel(
    x_ptr, branch_ptr, y_ptr, seed_ptr, n_cols, threshold, scale, BLOCK_SIZE: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    lane = row % 8
    a, b, c, d = tl.randint4x(tl.load(seed_ptr), row // 8, 7)
    word = tl.where(lane < 4, tl.where(lane < 2, a, b), tl.where(lane < 6, c, d))
    keep = tl.where(lane % 2 == 0, word & 0xFFFF, word >> 16) >= threshold
    for start in range(0, n_cols, BLOCK_SIZE):
        cols = start + tl.arange(0, BLOCK_SIZE)
        mask = cols < n_cols
        y = tl.load(x_ptr + row * n_cols + cols, mask=mask).to(tl.float32)
        branch = tl.load(branch_ptr + row * n_cols + cols, mask=mask).to(tl.float32)
        y += tl.where(keep, branch * scale, 0.0)
        tl.store(y_ptr + row * n_cols + cols, y, mask=mask)


def drop_path(x, branch, p, seed):
    y, (n_rows, n_cols) = torch.empty_like(x), x.shape
    threshold, scale = round(65536 * p), 1 / (1 - p)
    drop_path_kernel[(n_rows,)](x, branch, y, seed, n_cols, threshold, scale, BLOCK_SIZE=1024)
    return y
