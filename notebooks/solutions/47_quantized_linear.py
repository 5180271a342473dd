"""Solutions to the exercises of notebook 47."""

# %%
import lib  # noqa: F401  before triton: with no GPU it switches the interpreter on

import torch
import triton
import triton.language as tl


# %% 47.1 half a byte a number, and for each group two bytes or three
def weight_bytes(n_out, n_in, group, zero_points):
    n_groups = n_out * n_in // group
    return n_out * n_in // 2 + n_groups * (3 if zero_points else 2)


# %% 47.2 number k is in group k // G: a tile of scales, as large as that of numbers; behind K there is neither
@triton.jit
def any_group_kernel(
    x_ptr, numbers_ptr, scales_ptr, y_ptr, n_rows, n_cols, n_inner, GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    n_tiles = tl.cdiv(n_cols, BLOCK_N)
    rows = (tl.program_id(0) // n_tiles).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    cols = (tl.program_id(0) % n_tiles).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)[:, None]
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k in range(0, n_inner, BLOCK_K):
        inner = k + tl.arange(0, BLOCK_K)[None, :]
        mask = (cols < n_cols) & (inner < n_inner)
        x_mask = (rows < n_rows) & (inner < n_inner)
        x = tl.load(x_ptr + rows * n_inner + inner, mask=x_mask, other=0.0)
        q = tl.load(numbers_ptr + cols * n_inner + inner, mask=mask, other=0).to(tl.float32)
        scale = tl.load(scales_ptr + inner // GROUP * n_cols + cols, mask=mask, other=0.0)
        w = ((q - 8) * scale.to(tl.float32)).to(x.dtype)
        total = tl.dot(x, w.T, total, input_precision="ieee")
    cols = tl.trans(cols)
    tl.store(y_ptr + rows * n_cols + cols, total, mask=(rows < n_rows) & (cols < n_cols))


def any_group(x, numbers, scales, group):
    y = x.new_empty(x.shape[0], numbers.shape[0])
    grid = (triton.cdiv(y.shape[0], 16) * triton.cdiv(y.shape[1], 32),)
    sizes = {"GROUP": group, "BLOCK_M": 16, "BLOCK_N": 32, "BLOCK_K": 64}
    any_group_kernel[grid](x, numbers, scales, y, *y.shape, x.shape[1], **sizes)
    return y


# %% 47.3 the range reaches to 0, so that z lies between 0 and 15; a largest number may round to 16, and is cut
def to_int4_with_zeros(weight, group):
    grouped = weight.unflatten(1, (-1, group))
    low, high = grouped.amin(2).clamp(max=0), grouped.amax(2).clamp(min=0)
    scales = (high - low) / 15
    steps = torch.where(scales == 0, 1, scales)
    zeros = torch.round(-low / steps)
    numbers = torch.round(grouped / steps[..., None]) + zeros[..., None]
    numbers = numbers.clamp(0, 15).flatten(1).to(torch.int8)
    return numbers, scales.t().contiguous(), zeros.t().to(torch.int8).contiguous()


# %% 47.4 forward the scale of a row of W is that of a column of y, and leaves the loop. Backward it belongs to
# the dimension that is summed, so it multiplies the numbers on the way in
@triton.jit
def forward_kernel(
    x_ptr, numbers_ptr, scales_ptr, y_ptr, n_rows, n_cols, n_inner,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    n_tiles = tl.cdiv(n_cols, BLOCK_N)
    rows = (tl.program_id(0) // n_tiles).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    cols = (tl.program_id(0) % n_tiles).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k in range(0, n_inner, BLOCK_K):
        inner = k + tl.arange(0, BLOCK_K)[None, :]
        x_mask = (rows < n_rows) & (inner < n_inner)
        q_mask = (cols < n_cols)[:, None] & (inner < n_inner)
        x = tl.load(x_ptr + rows * n_inner + inner, mask=x_mask, other=0.0)
        q = tl.load(numbers_ptr + cols[:, None] * n_inner + inner, mask=q_mask, other=0)
        total = tl.dot(x, q.to(tl.float32).to(x.dtype).T, total, input_precision="ieee")
    total *= tl.load(scales_ptr + cols, mask=cols < n_cols, other=0.0).to(tl.float32)[None, :]
    y_ptrs = y_ptr + rows * n_cols + cols[None, :]
    tl.store(y_ptrs, total, mask=(rows < n_rows) & (cols < n_cols)[None, :])


@triton.jit
def dx_kernel(
    dy_ptr, numbers_ptr, scales_ptr, dx_ptr, n_rows, n_cols, n_inner, stride_dym, stride_dyn,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    # One program handles one tile of dx, (BLOCK_M, BLOCK_K), and walks down W by BLOCK_N.
    n_tiles = tl.cdiv(n_inner, BLOCK_K)
    rows = (tl.program_id(0) // n_tiles).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    inner = (tl.program_id(0) % n_tiles).to(tl.int64) * BLOCK_K + tl.arange(0, BLOCK_K)[None, :]
    total = tl.zeros((BLOCK_M, BLOCK_K), dtype=tl.float32)
    for start in range(0, n_cols, BLOCK_N):
        cols = start + tl.arange(0, BLOCK_N).to(tl.int64)
        dy_mask = (rows < n_rows) & (cols < n_cols)[None, :]
        dy_ptrs = dy_ptr + rows * stride_dym + cols[None, :] * stride_dyn
        dy = tl.load(dy_ptrs, mask=dy_mask, other=0.0)
        q_mask = (cols < n_cols)[:, None] & (inner < n_inner)
        q = tl.load(numbers_ptr + cols[:, None] * n_inner + inner, mask=q_mask, other=0)
        scale = tl.load(scales_ptr + cols, mask=cols < n_cols, other=0.0)
        w = (q.to(tl.float32) * scale.to(tl.float32)[:, None]).to(dy.dtype)
        total = tl.dot(dy, w, total, input_precision="ieee")
    tl.store(dx_ptr + rows * n_inner + inner, total, mask=(rows < n_rows) & (inner < n_inner))


TILE = {"BLOCK_M": 16, "BLOCK_N": 32, "BLOCK_K": 32}


class QLoRA(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, numbers, scales, lora_a, lora_b, alpha):
        y = x.new_empty(x.shape[0], numbers.shape[0])
        grid = (triton.cdiv(y.shape[0], 16) * triton.cdiv(y.shape[1], 32),)
        forward_kernel[grid](x, numbers, scales, y, *y.shape, x.shape[1], **TILE)
        ctx.save_for_backward(x, numbers, scales, lora_a, lora_b)
        ctx.alpha = alpha
        return y + alpha * (x @ lora_a.t()) @ lora_b.t()

    @staticmethod
    def backward(ctx, dy):
        x, numbers, scales, lora_a, lora_b = ctx.saved_tensors
        dx, (n_cols, n_inner) = torch.empty_like(x), numbers.shape
        grid = (triton.cdiv(x.shape[0], 16) * triton.cdiv(n_inner, 32),)
        sizes = len(x), n_cols, n_inner, *dy.stride()
        dx_kernel[grid](dy, numbers, scales, dx, *sizes, **TILE)
        du = ctx.alpha * (dy @ lora_b)
        dlora_b = ctx.alpha * (dy.t() @ (x @ lora_a.t()))
        return dx + du @ lora_a, None, None, du.t() @ x, dlora_b, None


def qlora(x, numbers, scales, lora_a, lora_b, alpha):
    return QLoRA.apply(x, numbers, scales, lora_a, lora_b, alpha)
