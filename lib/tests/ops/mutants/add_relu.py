"""Mutants of lib/ops/add_relu.py, and of what ops share and this one uses: launches and folded rows."""

from lib.measure.mutants import mutants_in

MUTANTS = mutants_in("""
# mixed dtypes: y in that of x
-     dtype = host.dtype_of_sum(x.dtype, bias.dtype)
-     return torch
+     dtype = x.dtype
+     return torch
# the mask of the columns dropped from the store
-     _add_relu_tile(x_ptrs, bias[None, :], y_ptr + offsets, mask, COMPUTE)
+     _add_relu_tile(x_ptrs, bias[None, :], y_ptr + offsets, (rows < n_rows)[:, None], COMPUTE)
# int32 rows of x
- rows = pid_m.to(tl.int64) * BLOCK_M +
+ rows = pid_m * BLOCK_M +
# int32 rows of dy
- rows = pid_m.to(tl.int64) * rows_per_program +
+ rows = pid_m * rows_per_program +
# the column stride of x forgotten
- x_ptr + rows[:, None] * stride_xm + cols[None, :] * stride_xn
+ x_ptr + rows[:, None] * stride_xm + cols[None, :]
# dy read as if contiguous: a gradient of strides 0
- dy_offsets = rows[:, None] * stride_dym + cols[None, :] * stride_dyn
+ dy_offsets = offsets
# a relu that drops NaN
- y = tl.where(z < 0, 0.0, z)
+ y = tl.maximum(z, 0.0)
# gradient 1 at zero
- dx = tl.where(y <= 0, 0.0, dy)
+ dx = tl.where(y < 0, 0.0, dy)
# x rounded to float16 on the way
- z = tl.load(x_ptrs, mask=mask).to(COMPUTE) +
+ z = tl.load(x_ptrs, mask=mask).to(tl.float16).to(COMPUTE) +
# the sign of the bias
- .to(COMPUTE) + bias.to(
+ .to(COMPUTE) - bias.to(
# a strided bias read as if contiguous
- fold, bias.contiguous(), *matrices
+ fold, bias, *matrices
# only the last rows summed
-         total += dx.to(COMPUTE)
+         total = dx.to(COMPUTE)
# a second derivative that is wrong in silence
-     @host.once
+     @staticmethod
# floor where ceil was meant: the last strip of rows forgotten
-     strips = cdiv(n_rows, rows_per_program) * apart
+     strips = max(1, n_rows // rows_per_program) * apart
# no gradient of the bias where x is empty
- y.new_zeros(y.shape[-1], dtype=dtypes[1]) if has_dbias else None
+ None
# partial sums of folded rows in the dtype of dbias
- dtype if strips * fold == 1 else
+ dtype if strips == 1 else
# folded rows: dbias of the last elements alone
-         sums += last_dx.to(COMPUTE)
+         sums = last_dx.to(COMPUTE)
# CUDA: columns with gaps
-     x = x if x.stride(1) == 1 else x.contiguous()  # the
+     # the
# CUDA: mixed dtypes as they are
-     x, bias = x.to(y.dtype), bias.to(y.dtype)
+     pass
# a kernel for aligned pointers launched on others
- hooked or addresses % 16 else
+ hooked else
# a kernel for other dtypes launched
- *options.items(), *kinds)
+ *options.items())
# a kernel for other constants launched
- *options.items(), *kinds)
+ *options, *kinds)
# a launch on the current GPU, which is not the tensors'
-     if launch and torch.cuda.current_device() == gpu:
+     if launch:
# a launch without the kernel's defaults
-         given.apply_defaults()
-
+
# any launcher
-         and takes(compiled.run) in (LAUNCHER, LAUNCHER[:5] + ["args"])
+
# launches that hooks do not hear of
- launch = None if hooked or
+ launch = None if
# launches whose end no hook hears of
- launch_enter_hook.calls or hooks.launch_exit_hook.calls
+ launch_enter_hook.calls
# launches that what watches them does not see
-     how = kernel.fn, type(kernel).run
+     how = (kernel.fn,)
# a kernel for other blocks launched
- t and (t.base.dtype, *t.block_shape))
+ t and t.base.dtype)
# a kernel for descriptors of another dtype launched
- t and (t.base.dtype, *t.block_shape))
+ t and (*t.block_shape,))
# a kernel for a bias of another dtype launched
- kinds.append(t.dtype if is_tensor else
+ kinds.append(None if is_tensor else
# a launch with the sizes of another
- gpu, grid, sizes, *options
+ gpu, grid, *options
# what follows the tensors in another order
- *handles, *tensors, *given)
+ *handles, *tensors, *given[::-1])
# the GPU of the last argument, which may be None
- getattr(tensors[0], "base", tensors[0])
+ tensors[-1]
# folded rows: a bias of the first row alone
- bias_cols = cols.to(tl.int32) % (n_cols // FOLD)
-
-     x_ptrs
+ bias_cols = cols.to(tl.int32) % n_cols
+
+     x_ptrs
# folded rows: the first element behind the last whole 16 forgotten
-     return whole, last, (last >= whole) & (last < end) & (cols < n_cols)
+     return whole, last, (last > whole) & (last < end) & (cols < n_cols)
# folded rows: written beyond the end
- (last >= whole) & (last < end) & (cols < n_cols)
+ (last >= whole) & (cols < n_cols)
# CUDA: folded rows with the bias in the wrong order
- bias.repeat(fold)
+ bias.repeat_interleave(fold)
# CUDA: the rows left over by folding forgotten
-     return folded + rest
+     return folded
# CUDA: the last rows folded
- m[:top].view(wide) for
+ m[n_rows - top :].view(wide) for
# CUDA: the first rows again for those left over
- else m[top:] for m in
+ else m[: n_rows - top] for m in
# a view with the negative bit: its memory read as it lies there
- is_watched = is_watched or a.is_neg()
+ pass
# an incoming gradient with the negative bit, or of zeros without memory
-         dys = [in_memory(dy) for dy in dys]
+
# selective checkpointing does not see the call
- (), modes() or traced()
+ (), traced()
# a sparse tensor taken for a dense one of the same sizes
- (a.dtype, a.device, a.layout, a.shape)
+ (a.dtype, a.device, a.shape)
""")
