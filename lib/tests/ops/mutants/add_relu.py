"""Mutants of lib/ops/add_relu.py."""

from lib import machine
from lib.tests.ops.mutants import Mutant

import torch
import triton.language as tl


def check_one_program_of_several_tiles(op, module):
    """Its loop over rows: with 8192 programs it takes a second tile only from 16 million elements on."""
    dy, y = torch.randn(40, 8, device=machine.device()), torch.randn(40, 8, device=machine.device())
    dx, partial = torch.empty_like(y), torch.empty(2, 8, device=machine.device())
    module._add_relu_bwd_kernel[(2,)](
        dy, y, dx, partial, 40, 8, 8, 1, 32, HAS_DX=True, HAS_DBIAS=True, NUM_STAGES=1,
        COMPUTE=tl.float32, BLOCK_M=16, BLOCK_N=8,
    )  # fmt: skip
    want = torch.where(y > 0, dy, 0.0)
    torch.testing.assert_close(dx, want)
    torch.testing.assert_close(partial, torch.stack([want[:32].sum(0), want[32:].sum(0)]))


CHECKS = [check_one_program_of_several_tiles]

MUTANTS = [
    Mutant(
        "    tl.store(y_ptr + rows[:, None] * n_cols + cols[None, :], y, mask=mask)\n",
        "    tl.store(y_ptr + rows[:, None] * n_cols + cols[None, :], y, mask=(rows < n_rows)[:, None])\n",
        "the mask of the columns dropped from the store",
    ),
    Mutant("rows = pid_m.to(tl.int64) * BLOCK_M +", "rows = pid_m * BLOCK_M +", "int32 rows of x"),
    Mutant(
        "rows = pid_m.to(tl.int64) * rows_per_program +",
        "rows = pid_m * rows_per_program +",
        "int32 rows of dy",
    ),
    Mutant(
        "x_ptr + rows[:, None] * stride_xm + cols[None, :] * stride_xn",
        "x_ptr + rows[:, None] * stride_xm + cols[None, :]",
        "the column stride of x forgotten",
    ),
    Mutant(
        "dy_offsets = rows[:, None] * stride_dym + cols[None, :] * stride_dyn",
        "dy_offsets = offsets",
        "dy read as if contiguous: a gradient of strides 0",
    ),
    Mutant("y = tl.where(z < 0, 0.0, z)", "y = tl.maximum(z, 0.0)", "a relu that drops NaN"),
    Mutant("dx = tl.where(y <= 0, 0.0, dy)", "dx = tl.where(y < 0, 0.0, dy)", "gradient 1 at zero"),
    Mutant(
        "z = x.to(COMPUTE) + bias.to(COMPUTE)[None, :]",
        "z = x.to(tl.float16).to(COMPUTE) + bias.to(COMPUTE)[None, :]",
        "x rounded to float16 on the way",
    ),
    Mutant("z = x.to(COMPUTE) + bias", "z = x.to(COMPUTE) - bias", "the sign of the bias"),
    Mutant(
        "n_cols, bias = x.shape[-1], bias.contiguous()",
        "n_cols = x.shape[-1]",
        "a strided bias read as if contiguous",
    ),
    Mutant(
        "bias if fold == 1 else bias.repeat(fold)",
        "bias if fold == 1 else bias.repeat_interleave(fold)",
        "folded rows with the bias in the wrong order",
    ),
    Mutant(
        "    return folded + rest\n",
        "    return folded\n",
        "the rows left over by folding forgotten",
    ),
    Mutant(
        "        total += dx.to(COMPUTE)",
        "        total = dx.to(COMPUTE)",
        "only the last rows summed",
    ),
    Mutant(
        "@torch.autograd.function.once_differentiable",
        "@staticmethod",
        "a second derivative that is wrong in silence",
    ),
    Mutant(
        "strips = _cdiv(n_rows, rows_per_program)",
        "strips = max(1, n_rows // rows_per_program)",
        "floor where ceil was meant: the last strip of rows forgotten",
    ),
    Mutant(
        "y.new_zeros(n_cols) if has_dbias else None\n",
        "None\n",
        "no gradient of the bias where x is empty",
    ),
]
