"""Solutions to the exercises of notebook 35."""

# %%
import lib  # noqa: F401  before triton: with no GPU it switches the interpreter on
from lib.ops.rope import rope_tables

import torch
import triton
import triton.language as tl


# %% 35.1 the last pair has the exponent -(R - 2) / R: new_base^((R - 2) / R) = stretch · base^((R - 2) / R)
def stretched_tables(n_positions, rotary_dim, stretch, base=10000.0):
    new_base = base * stretch ** (rotary_dim / (rotary_dim - 2))
    return rope_tables(n_positions, rotary_dim, new_base)


# %% 35.2 at position 0 nothing turns, so two tokens are needed; a head of one pair is paired in one way only
smallest_shapes = ((1, 2, 1, 2), (1, 2, 1, 4))


# %% 35.3 a tile of (2, D/4): its first row turns by the image's row, its second by its column; BACK turns back
@triton.jit
def rope_2d_kernel(
    x_ptr, y_ptr, cos_ptr, sin_ptr, n_rows, n_columns, n_heads,
    BACK: tl.constexpr, QUARTER: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # One program rotates one head of one patch.
    patch, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    part = tl.arange(0, 2)[:, None]  # 0: by row, 1: by column
    cols = tl.arange(0, BLOCK)[None, :]
    mask = (part < 2) & (cols < QUARTER)
    position = tl.where(part == 0, patch // n_columns % n_rows, patch % n_columns)

    c = tl.load(cos_ptr + position * QUARTER + cols, mask=mask)
    s = tl.load(sin_ptr + position * QUARTER + cols, mask=mask)
    if BACK:
        s = -s  # in registers; outside it would be a launch more
    first = (patch * n_heads + head) * 4 * QUARTER + part * 2 * QUARTER + cols
    x1 = tl.load(x_ptr + first, mask=mask).to(tl.float32)
    x2 = tl.load(x_ptr + first + QUARTER, mask=mask).to(tl.float32)

    tl.store(y_ptr + first, x1 * c - x2 * s, mask=mask)
    tl.store(y_ptr + first + QUARTER, x2 * c + x1 * s, mask=mask)


def launch_rope_2d(x, cos, sin, back=False):
    y, (b, n_rows, n_columns, h, d) = torch.empty_like(x), x.shape
    rope_2d_kernel[(b * n_rows * n_columns, h)](
        x, y, cos, sin, n_rows, n_columns, h,
        BACK=back, QUARTER=d // 4, BLOCK=triton.next_power_of_2(d // 4),
    )  # fmt: skip
    return y


class Rotate2D(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, cos, sin):
        ctx.save_for_backward(cos, sin)
        return launch_rope_2d(x, cos, sin)

    @staticmethod
    def backward(ctx, dy):
        cos, sin = ctx.saved_tensors
        return launch_rope_2d(dy.contiguous(), cos, sin, back=True), None, None


rope_2d = Rotate2D.apply
