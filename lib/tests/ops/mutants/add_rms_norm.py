"""Mutants of lib/ops/add_rms_norm.py."""

from lib.measure.mutants import Mutant

MUTANTS = [
    Mutant(
        "[:, None] / n_cols + eps)", "[:, None] / h.shape[1] + eps)", "the mean of a padded row"
    ),
    Mutant("[:, None] / n_cols + eps)", "[:, None] / n_cols)", "eps forgotten"),
    Mutant("squares / n_cols + eps)[", "squares / n_cols + eps * eps)[", "eps squared backward"),
    Mutant("return a + c, b + d", "return a + c, b + c", "squares added to the other sum"),
    Mutant(
        "compiler\n            dy = tl.load(dy_ptrs",
        "compiler\n            dy = tl.load(h_ptrs",
        "another row read again",
    ),
    Mutant(
        "h = rounded.to(COMPUTE)\n",
        "h = x.to(COMPUTE) + residual.to(COMPUTE)\n",
        "the norm of h before it is rounded",
    ),
    Mutant("y = h * root * weight", "y = h * root", "the weight forgotten"),
    Mutant(
        "rows = (tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M))[:, None]",
        "rows = (tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M))[:, None]",
        "int32 rows of x",
    ),
    Mutant(
        "first_row = tl.program_id(0).to(tl.int64) * rows_per_program + start",
        "first_row = tl.program_id(0) * rows_per_program + start",
        "int32 rows of dy",
    ),
    Mutant("        if row < n_rows:", "        if row <= n_rows:", "a wide row after the last"),
    Mutant("cross / n_cols))", "cross / BLOCK_N))", "the mean of a padded wide row"),
    Mutant(
        "residual_ptr + rows * stride_rm + cols * stride_rn",
        "residual_ptr + rows * stride_xm + cols * stride_xn",
        "residual read by the strides of x",
    ),
    Mutant(
        "dy_ptr + rows * stride_dym + cols * stride_dyn",
        "dy_ptr + rows * n_cols + cols",
        "dy read as if contiguous: a gradient of strides 0",
    ),
    Mutant(
        "dh_ptr + rows * stride_dhm + cols * stride_dhn",
        "dh_ptr + rows * n_cols + cols",
        "dh read as if contiguous",
    ),
    Mutant(
        "\n            dx += tl.load(dh_ptrs",
        "\n            dx = tl.load(dh_ptrs",
        "the gradient of h in place of the sum",
    ),
    Mutant("(h * h, dy * weight * h), 1", "(h * h, dy * h), 1", "the mean without the weight"),
    Mutant(
        "dx = root * (dy * weight - normal * (root * cross[:",
        "dx = root * (dy * weight + normal * (root * cross[:",
        "the sign of what the norm takes away",
    ),
    Mutant("\n        normal = h * root\n", "\n        normal = h\n", "h in place of its norm"),
    Mutant(
        "\n        total += dy * normal",
        "\n        total = dy * normal",
        "only the last rows summed",
    ),
    Mutant(
        "\n        total += dy * normal",
        "\n        total += dy * weight * normal",
        "dweight times the weight",
    ),
    Mutant(
        "_launch(plan, host.rows_of(x), host.rows_of(residual), weight.contiguous(), *out, eps)",
        "_launch(plan, host.rows_of(x), host.rows_of(residual), weight, *out, eps)",
        "a strided weight read as if contiguous",
    ),
    Mutant(
        "    dtype = host.dtype_of_sum(x.dtype, residual.dtype)\n",
        "    dtype = x.dtype\n",
        "mixed dtypes: h in that of x",
    ),
    Mutant(
        "ctx.set_materialize_grads(False)", "ctx.mark_non_differentiable(h)", "h without a gradient"
    ),
    Mutant("    @host.once\n", "", "a second derivative that is wrong in silence"),
    Mutant(
        "return dx, torch.zeros_like(weight) if has_dweight else None",
        "return dx, None",
        "no gradient of the weight from no rows",
    ),
    Mutant(
        "wide = dtype if strips * fold == 1 else sum_dtype(matrix.dtype)",
        "wide = sum_dtype(matrix.dtype)",
        "one strip's sums in float32",
    ),
    Mutant(
        "wide = dtype if strips * fold == 1 else sum_dtype(matrix.dtype)",
        "wide = dtype",
        "partial sums rounded to 16 bits",
    ),
]
