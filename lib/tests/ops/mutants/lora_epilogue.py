"""Mutants of lib/ops/lora_epilogue.py."""

from lib.measure.mutants import Mutant

MUTANTS = [
    Mutant(
        "a = tl.minimum(tl.abs(z), 1e3)", "a = tl.abs(z)", "gelu: 0·inf in the gradient, far out"
    ),
    Mutant(
        "z = x.to(COMPUTE) + tl.cast(scale, COMPUTE) * delta.to(COMPUTE)",
        "z = tl.cast(scale, COMPUTE) * (x.to(COMPUTE) + delta.to(COMPUTE))",
        "x scaled too",
    ),
    Mutant(
        "    return z + bias.to(COMPUTE)",
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
    Mutant("+ saved * (e * t * t))", "+ saved * (t * t))", "silu: a wrong gradient"),
    Mutant(
        "dy = dy * (saved * (1.0 - saved))",
        "dy = dy * (saved * (1.0 + saved))",
        "sigmoid: a wrong sign in the gradient",
    ),
    Mutant("0.2140644488178008", "0.2074", "gelu: a constant cut off"),
    Mutant(
        "tl.store(ddelta_ptr + offsets, tl.cast(scale, COMPUTE) * dx, mask=mask)",
        "tl.store(ddelta_ptr + offsets, dx, mask=mask)",
        "ddelta without the scale",
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
        "delta_ptrs = delta_ptr + rows[:, None] * stride_dm + cols[None, :] * stride_dn",
        "delta_ptrs = delta_ptr + rows[:, None] * stride_xm + cols[None, :] * stride_xn",
        "delta read by the strides of x",
    ),
    Mutant(
        "delta_offsets = rows[:, None] * stride_dm + cols[None, :] * stride_dn",
        "delta_offsets = rows[:, None] * stride_dm + cols[None, :]",
        "the column stride of delta forgotten in the backward pass",
    ),
    Mutant(
        "dy_ptrs = dy_ptr + rows[:, None] * stride_dym + cols[None, :] * stride_dyn",
        "dy_ptrs = dy_ptr + offsets",
        "dy read as if contiguous: a gradient of strides 0",
    ),
    Mutant(
        "y_ptrs = y_ptr + rows[:, None] * stride_ym + cols[None, :] * stride_yn",
        "y_ptrs = y_ptr + offsets",
        "in place: written as if x were contiguous",
    ),
    Mutant(
        "        x.copy_(rows.view_as(x))\n",
        "        pass\n",
        "in place: a copy written, x left as it was",
    ),
    Mutant("ctx.mark_dirty(x)", "pass", "in place: autograd not told"),
    Mutant(
        "needs_grad and activation in host.OF_Z",
        'needs_grad and activation == "silu"',
        "in place: silu without its z",
    ),
    Mutant(
        "        if step <= reach:\n",
        "        if step < reach:\n",
        "in place: an expanded x written",
    ),
    Mutant(
        "    if base.is_leaf and base.requires_grad and torch.is_grad_enabled():\n",
        "    if False:\n",
        "in place: a leaf that requires grad written",
    ),
    Mutant(
        "    return end_a > gap or overlaps_itself([(1, gap + end_b), *rows])\n",
        "    return gap == 0\n",
        "in place: delta overlaps x",
    ),
    Mutant(
        "    return end_a > gap or overlaps_itself([(1, gap + end_b), *rows])\n",
        "    return end_a > gap\n",
        "in place: delta reaches into the next row of x",
    ),
    Mutant(
        "if t.untyped_storage().data_ptr() == storage and host.shares_memory(x, t):",
        "if t.untyped_storage().data_ptr() == storage:",
        "in place: the halves of one tensor refused",
    ),
    Mutant(
        "launch(chosen, fold, bias.contiguous(),",
        "launch(chosen, fold, bias,",
        "a strided bias read as if contiguous",
    ),
    Mutant(
        "bias = None if bias is None else bias.contiguous()\n",
        "pass\n",
        "a strided bias read as if contiguous in the backward pass",
    ),
    Mutant(
        'if activation in ("relu", "sigmoid"):',
        'if activation in ("relu", "sigmoid", "silu"):',
        "silu: y saved where z is needed",
    ),
    Mutant(
        "total += _lora_epilogue_bwd_tile(",
        "total = _lora_epilogue_bwd_tile(",
        "only the last rows of a program summed",
    ),
    Mutant(
        "bias_cols = cols.to(tl.int32) % (n_cols // FOLD)\n    if",
        "bias_cols = cols.to(tl.int32) % n_cols\n    if",
        "folded rows: a bias of the first row alone in the backward pass",
    ),
    Mutant("z = gelu(z)", "z = gelu_tanh(z)", "gelu: another form"),
    Mutant("dy * gelu_grad(saved)", "dy * gelu_tanh_grad(saved)", "gelu: the other form's slope"),
    Mutant(
        "sums += tl.sum(last_dx, axis=0)",
        "sums = sums",
        "folded rows: dbias without the last elements",
    ),
    Mutant(
        "(m if m.stride(1) == 1 else m.contiguous() for m in (x, delta))",
        "x, delta",
        "CUDA: columns with gaps",
    ),
    Mutant(
        "    x, delta, bias = (t.to(y.dtype) for t in (x, delta, bias))",
        "    pass",
        "CUDA: mixed dtypes as they are",
    ),
    Mutant(
        "bias_cols = cols.to(tl.int32) % (n_cols // FOLD)\n\n    x_ptrs",
        "bias_cols = cols.to(tl.int32) % n_cols\n\n    x_ptrs",
        "folded rows: a bias of the first row alone",
    ),
]
