"""Mutants of lib/ops/add_relu.py, and of what ops share and this one uses: launches and folded rows."""

from lib.measure.mutants import Mutant

MUTANTS = [
    Mutant(
        "    dtype = host.dtype_of_sum(x.dtype, bias.dtype)\n    return torch",
        "    dtype = x.dtype\n    return torch",
        "mixed dtypes: y in that of x",
    ),
    Mutant(
        "    _add_relu_tile(x_ptrs, bias[None, :], y_ptr + offsets, mask, COMPUTE)\n",
        "    _add_relu_tile(x_ptrs, bias[None, :], y_ptr + offsets, (rows < n_rows)[:, None], COMPUTE)\n",
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
        "z = tl.load(x_ptrs, mask=mask).to(COMPUTE) +",
        "z = tl.load(x_ptrs, mask=mask).to(tl.float16).to(COMPUTE) +",
        "x rounded to float16 on the way",
    ),
    Mutant(".to(COMPUTE) + bias.to(", ".to(COMPUTE) - bias.to(", "the sign of the bias"),
    Mutant(
        "fold, bias.contiguous(), *matrices",
        "fold, bias, *matrices",
        "a strided bias read as if contiguous",
    ),
    Mutant(
        "        total += dx.to(COMPUTE)",
        "        total = dx.to(COMPUTE)",
        "only the last rows summed",
    ),
    Mutant(
        "    @host.once\n", "    @staticmethod\n", "a second derivative that is wrong in silence"
    ),
    Mutant(
        "    strips = cdiv(n_rows, rows_per_program)\n    wide",
        "    strips = max(1, n_rows // rows_per_program)\n    wide",
        "floor where ceil was meant: the last strip of rows forgotten",
    ),
    Mutant(
        "y.new_zeros(y.shape[-1], dtype=dtypes[1]) if has_dbias else None",
        "None",
        "no gradient of the bias where x is empty",
    ),
    Mutant(
        "dtype if strips * fold == 1 else",
        "dtype if strips == 1 else",
        "partial sums of folded rows in the dtype of dbias",
    ),
    Mutant(
        "        sums += last_dx.to(COMPUTE)\n",
        "        sums = last_dx.to(COMPUTE)\n",
        "folded rows: dbias of the last elements alone",
    ),
    Mutant(
        "    x = x if x.stride(1) == 1 else x.contiguous()  # the",
        "    # the",
        "CUDA: columns with gaps",
    ),
    Mutant(
        "    x, bias = x.to(y.dtype), bias.to(y.dtype)",
        "    pass",
        "CUDA: mixed dtypes as they are",
    ),
    # what is shared: run
    Mutant(
        "hooked or addresses % 16 else",
        "hooked else",
        "a kernel for aligned pointers launched on others",
    ),
    Mutant("*options.items(), *kinds)", "*options.items())", "a kernel for other dtypes launched"),
    Mutant(
        "*options.items(), *kinds)", "*options, *kinds)", "a kernel for other constants launched"
    ),
    Mutant(
        "    if launch and torch.cuda.current_device() == gpu:\n",
        "    if launch:\n",
        "a launch on the current GPU, which is not the tensors'",
    ),
    Mutant("        given.apply_defaults()\n", "", "a launch without the kernel's defaults"),
    Mutant(
        'if compiled and triton.__version__[:3] in ("3.6", "3.7") and',
        "if compiled and",
        "the launcher of any version of Triton",
    ),
    Mutant("launch = None if hooked or", "launch = None if", "launches that hooks do not hear of"),
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
    # run, of TMA's descriptors
    Mutant(
        "t and (t.base.dtype, *t.block_shape))",
        "t and t.base.dtype)",
        "a kernel for other blocks launched",
    ),
    Mutant(
        "t and (t.base.dtype, *t.block_shape))",
        "t and (*t.block_shape,))",
        "a kernel for descriptors of another dtype launched",
    ),
    Mutant(
        "kinds.append(t.dtype if is_tensor else",
        "kinds.append(None if is_tensor else",
        "a kernel for a bias of another dtype launched",
    ),
    Mutant(
        "gpu, grid, sizes, *options", "gpu, grid, *options", "a launch with the sizes of another"
    ),
    Mutant(
        "*handles, *tensors, *given)",
        "*handles, *tensors, *given[::-1])",
        "what follows the tensors in another order",
    ),
    Mutant(
        'getattr(tensors[0], "base", tensors[0])',
        "tensors[-1]",
        "the GPU of the last argument, which may be None",
    ),
    # folded rows
    Mutant(
        "bias_cols = cols.to(tl.int32) % (n_cols // FOLD)\n\n    x_ptrs",
        "bias_cols = cols.to(tl.int32) % n_cols\n\n    x_ptrs",
        "folded rows: a bias of the first row alone",
    ),
    Mutant(
        "    return whole, last, (last >= whole) & (last < end) & (cols < n_cols)\n",
        "    return whole, last, (last > whole) & (last < end) & (cols < n_cols)\n",
        "folded rows: the first element behind the last whole 16 forgotten",
    ),
    Mutant(
        "(last >= whole) & (last < end) & (cols < n_cols)\n",
        "(last >= whole) & (cols < n_cols)\n",
        "folded rows: written beyond the end",
    ),
    # folded_and_rest
    Mutant(
        "bias.repeat(fold)",
        "bias.repeat_interleave(fold)",
        "CUDA: folded rows with the bias in the wrong order",
    ),
    Mutant(
        "    return folded + rest\n",
        "    return folded\n",
        "CUDA: the rows left over by folding forgotten",
    ),
    Mutant(
        "m[:top].view(wide) for", "m[n_rows - top :].view(wide) for", "CUDA: the last rows folded"
    ),
    Mutant(
        "else m[top:] for m in",
        "else m[: n_rows - top] for m in",
        "CUDA: the first rows again for those left over",
    ),
]
