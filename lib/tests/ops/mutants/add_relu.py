"""Mutants of lib/ops/add_relu.py."""

from lib.measure.mutants import Mutant

MUTANTS = [
    Mutant(
        "    dtype = _dtype_of_sum(x.dtype, bias.dtype)\n    y = ",
        "    dtype = x.dtype\n    y = ",
        "mixed dtypes: y in that of x",
    ),
    Mutant(
        "    tl.store(y_ptr + rows[:, None] * n_cols + cols[None, :], y, mask=mask)\n",
        "    tl.store(y_ptr + rows[:, None] * n_cols + cols[None, :], y, mask=(rows < end_row)[:, None])\n",
        "the mask of the columns dropped from the store",
    ),
    Mutant("row = pid_m.to(tl.int64) * BLOCK_M\n", "row = pid_m * BLOCK_M\n", "int32 rows of x"),
    Mutant(
        "rows = steps.to(tl.int64) * rows_per_program +",
        "rows = steps * rows_per_program +",
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
        "launch(plan, _rows_of(x), bias.contiguous(), _rows_of(y))",
        "launch(plan, _rows_of(x), bias, _rows_of(y))",
        "a strided bias read as if contiguous",
    ),
    Mutant(
        "else tl.where(cols < n_bias, cols, cols - n_bias)",
        "else tl.minimum(cols, n_bias - 1)",
        "folded rows: the end of the bias instead of its beginning",
    ),
    Mutant(
        "return cols % n_bias if NARROW",
        "return cols % (n_bias // 2 + 1) if NARROW",
        "folded rows narrower than a tile: half of the bias",
    ),
    Mutant(
        "cols = pid_n * BLOCK_N % n_bias +",
        "cols = pid_n * BLOCK_N % BLOCK_N +",
        "folded rows: the bias from the start in each tile",
    ),
    Mutant(
        "* _cdiv(wide_cols, block_n) + _cdiv(left, block_n)\n",
        "* _cdiv(wide_cols, block_n)\n",
        "the rows left over by folding forgotten",
    ),
    Mutant(
        "* _cdiv(wide_cols, block_n) + _cdiv(left, block_n),)",
        "* _cdiv(wide_cols, block_n),)",
        "the rows left over by folding forgotten in the backward pass",
    ),
    Mutant(
        "        total += dx.to(COMPUTE)",
        "        total = dx.to(COMPUTE)",
        "only the last rows summed",
    ),
    Mutant(
        "    @_once\n",
        "    @staticmethod\n",
        "a second derivative that is wrong in silence",
    ),
    Mutant(
        "strips = _cdiv(wide_rows, rows_per_program)\n",
        "strips = max(1, wide_rows // rows_per_program)\n",
        "floor where ceil was meant: the last strip of rows forgotten",
    ),
    Mutant(
        "y.new_zeros(y.shape[-1], dtype=dtypes[1]) if has_dbias else None",
        "None",
        "no gradient of the bias where x is empty",
    ),
    Mutant(
        "hooked or addresses % 16 else",
        "hooked else",
        "a kernel for aligned pointers launched on others",
    ),
    Mutant(
        "*options.items(), *kinds)",
        "*options.items())",
        "a kernel for other dtypes launched",
    ),
    Mutant(
        "*options.items(), *kinds)",
        "*options, *kinds)",
        "a kernel for other constants launched",
    ),
    Mutant(
        "    if launch and torch.cuda.current_device() == device:\n",
        "    if launch:\n",
        "a launch on the current GPU, which is not the tensors'",
    ),
    Mutant(
        "        given.apply_defaults()\n",
        "",
        "a launch without the kernel's defaults",
    ),
    Mutant(
        "launch = None if hooked or",
        "launch = None if",
        "launches that hooks do not hear of",
    ),
    Mutant(
        "launch_enter_hook.calls or hooks.launch_exit_hook.calls",
        "launch_enter_hook.calls",
        "launches whose end no hook hears of",
    ),
    Mutant(
        "    how = kernel.fn, type(kernel).run",
        "    how = (kernel.fn,)",
        "launches that what watches them does not see",
    ),
]
