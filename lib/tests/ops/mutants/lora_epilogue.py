"""Mutants of lib/ops/lora_epilogue.py."""

from lib.ops.lora_epilogue import lora_epilogue_eager
from lib.tests.ops import cases
from lib.tests.ops.mutants import Mutant

import torch
import triton.language as tl


def _inputs(op, shape=(6, 8)):
    return op.inputs(shape, torch.float32, "cpu")


def check_in_place_writes_into_x(op, module):
    version = op.in_place["triton_"]
    for layout, tensors in cases.laid_out(_inputs(op, (9, 40))).items():
        if layout == "input 0 expanded row":
            continue
        x, delta, bias = (t.detach() for t in tensors)
        want, before = op.eager(x, delta, bias), x._version
        y = version(x, delta, bias)
        assert y.data_ptr() == x.data_ptr(), layout
        assert x._version > before, "autograd was not told that x has changed"
        torch.testing.assert_close(x, want, rtol=1e-5, atol=1e-5, msg=layout)
    base = torch.randn(8, 4, 3, 2)
    x, delta, bias = base.permute(3, 1, 2, 0), torch.randn(2, 4, 3, 8), torch.randn(8)
    want = op.eager(x, delta, bias)
    version(x, delta, bias)
    torch.testing.assert_close(x, want, rtol=1e-5, atol=1e-5, msg="(B, S, H, D) permuted")


def check_in_place_refuses(op, module):
    x, delta, bias = (t.detach() for t in _inputs(op))
    wide = torch.randn(6, 11)
    for bad in [
        (x[:1].expand(6, 8), delta, bias),
        (x.clone().requires_grad_(), delta, bias),
        (x, x, bias),
        (wide[:, :8], wide[:, 3:], bias),
    ]:
        try:
            op.in_place["triton_"](*bad)
        except ValueError:
            continue
        raise AssertionError("written where it must not be")


def check_large_bias_in_a_cut_tile(op, module):
    x, delta, bias = (t.detach() for t in _inputs(op, (3, 40)))
    bias[3], x[:, 3] = 3e38, -3e38
    inputs = [t.requires_grad_() for t in (x, delta, bias)]
    want = torch.autograd.grad(op.eager(*inputs).sum(), inputs)
    got = torch.autograd.grad(op.versions["triton"](*inputs).sum(), inputs)
    for a, b in zip(got, want):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4, equal_nan=True)


def check_scale(op, module):
    """A scale that float32 does not have: rounded once, not to bfloat16."""
    x, delta, bias = (t.detach() for t in _inputs(op))
    activation = op.arguments["activation"]
    want = lora_epilogue_eager(x, 1000 * delta, bias, 0.1001, activation)
    version = op.versions["triton"].func
    got = version(x, 1000 * delta, bias, scale=0.1001, activation=activation)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def check_rounded_once(op, module):
    """From bfloat16 to bfloat16 by way of float32 all along: not where eager rounds twice more."""
    if op.arguments["activation"] != "identity":
        return
    x, delta, bias = (t.detach() for t in op.inputs((9, 40), torch.bfloat16, "cpu"))
    want = op.eager(x.float(), delta.float(), bias.float()).bfloat16()
    assert torch.equal(op.versions["triton"](x, delta, bias), want), "rounded on the way"


def check_one_program_of_several_tiles(op, module):
    """Its loop over rows: with 8192 programs it takes a second tile only from 16 million elements on."""
    if op.arguments["activation"] != "relu":
        return
    dy, y, dx, ddelta = torch.randn(4, 40, 8)
    partial = torch.empty(2, 8)
    module._lora_epilogue_bwd_kernel[(2,)](
        dy, y, None, None, dx, ddelta, partial, 0.5, 40, 8, 8, 1, 8, 1, 0, 0, 32,
        ACTIVATION="relu", NUM_STAGES=1, COMPUTE=tl.float32, BLOCK_M=16, BLOCK_N=8,
    )  # fmt: skip
    want = torch.where(y > 0, dy, 0.0)
    torch.testing.assert_close(dx, want)
    torch.testing.assert_close(ddelta, 0.5 * want)
    torch.testing.assert_close(partial, torch.stack([want[:32].sum(0), want[32:].sum(0)]))


CHECKS = [
    check_rounded_once,
    check_one_program_of_several_tiles,
    check_in_place_writes_into_x,
    check_in_place_refuses,
    check_large_bias_in_a_cut_tile,
    check_scale,
]

MUTANTS = [
    Mutant(
        "z = x.to(COMPUTE) + tl.cast(scale, COMPUTE) * delta.to(COMPUTE)",
        "z = tl.cast(scale, COMPUTE) * (x.to(COMPUTE) + delta.to(COMPUTE))",
        "x scaled too",
    ),
    Mutant(
        "    return z + bias.to(COMPUTE)[None, :]",
        "    return z.to(x.dtype).to(COMPUTE) + bias.to(COMPUTE)[None, :]",
        "rounded to the dtype in between",
    ),
    Mutant(
        "tl.cast(scale, COMPUTE) * delta.to(COMPUTE)",
        "tl.cast(scale, tl.bfloat16).to(COMPUTE) * delta.to(COMPUTE)",
        "scale rounded to bfloat16",
    ),
    Mutant("z = tl.where(z < 0, 0.0, z)", "z = tl.maximum(z, 0.0)", "a relu that drops NaN"),
    Mutant(
        "dy = tl.where(saved <= 0, 0.0, dy)",
        "dy = tl.where(saved > 0, dy, 0.0)",
        "a gradient that drops NaN",
    ),
    Mutant("z = z / (1.0 + tl.exp(-z))", "z = z / (1.0 + tl.exp(z))", "silu: the wrong sign"),
    Mutant(
        "dy = dy * (s * (1.0 + saved * (1.0 - s)))",
        "dy = dy * (s * (1.0 + saved * s))",
        "silu: a wrong gradient",
    ),
    Mutant(
        "dy = dy * (saved * (1.0 - saved))",
        "dy = dy * (saved * (1.0 + saved))",
        "sigmoid: a wrong sign in the gradient",
    ),
    Mutant("0.134145", "0.13", "gelu: a constant cut off"),
    Mutant(
        "tl.store(ddelta_ptr + offsets, tl.cast(scale, COMPUTE) * dx, mask=mask)",
        "tl.store(ddelta_ptr + offsets, dx, mask=mask)",
        "ddelta without the scale",
    ),
    Mutant(
        "            dx = tl.where(mask, _slope_times(dx, saved, ACTIVATION), 0.0)",
        "            dx = _slope_times(dx, saved, ACTIVATION)",
        "rows that are not there counted in dbias",
    ),
    Mutant(
        "rows = pid_m.to(tl.int64) * BLOCK_M +",
        "rows = pid_m * BLOCK_M +",
        "int32 rows of x and delta",
    ),
    Mutant(
        "rows = pid_m.to(tl.int64) * rows_per_program +",
        "rows = pid_m * rows_per_program +",
        "int32 rows of dy",
    ),
    Mutant(
        "delta_ptr + rows[:, None] * stride_dm + cols[None, :] * stride_dn, mask",
        "delta_ptr + rows[:, None] * stride_xm + cols[None, :] * stride_xn, mask",
        "delta read by the strides of x",
    ),
    Mutant(
        "delta_offsets = rows[:, None] * stride_dm + cols[None, :] * stride_dn",
        "delta_offsets = rows[:, None] * stride_dm + cols[None, :]",
        "the column stride of delta forgotten in the backward pass",
    ),
    Mutant(
        "dy_offsets = rows[:, None] * stride_dym + cols[None, :] * stride_dyn",
        "dy_offsets = rows[:, None] * n_cols + cols[None, :]",
        "dy read as if contiguous: a gradient of strides 0",
    ),
    Mutant(
        "y_ptr + rows[:, None] * stride_ym + cols[None, :] * stride_yn, y",
        "y_ptr + rows[:, None] * n_cols + cols[None, :], y",
        "in place: written as if x were contiguous",
    ),
    Mutant(
        "        x.copy_(rows.view_as(x))\n",
        "        pass\n",
        "in place: a copy written, x left as it was",
    ),
    Mutant("        ctx.mark_dirty(x)", "        pass", "in place: autograd not told"),
    Mutant(
        'save_z = has_gradient and activation in ("gelu", "silu")',
        'save_z = has_gradient and activation == "gelu"',
        "in place: silu without its z",
    ),
    Mutant(
        "        if step <= reach:\n",
        "        if step < reach:\n",
        "in place: an expanded x written",
    ),
    Mutant(
        "    if torch.is_grad_enabled() and base.requires_grad and base.is_leaf:\n",
        "    if False:\n",
        "in place: a leaf that requires grad written",
    ),
    Mutant(
        "    return min(gap, pitch - gap) <= length\n",
        "    return gap == 0\n",
        "in place: delta overlaps x",
    ),
    Mutant(
        "    bias = bias.contiguous()\n    for", "    for", "a strided bias read as if contiguous"
    ),
    Mutant(
        'return (y,) if activation in ("relu", "sigmoid") else (x, delta, bias)',
        'return (y,) if activation in ("relu", "sigmoid", "silu") else (x, delta, bias)',
        "silu: y saved where z is needed",
    ),
    Mutant(
        "        total += dx\n", "        total = dx\n", "only the last rows of a program summed"
    ),
    Mutant(
        "wide = bias if fold == 1 or bias is None else bias.repeat(fold)",
        "wide = bias",
        "folded rows with the bias of one row in the backward pass",
    ),
]
