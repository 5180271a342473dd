"""Mutants of lib/ops/lora_epilogue.py."""

from lib.measure.mutants import mutants_in

MUTANTS = mutants_in("""
# x scaled too
- z = x.to(COMPUTE) + tl.cast(scale, COMPUTE) * delta.to(COMPUTE)
+ z = tl.cast(scale, COMPUTE) * (x.to(COMPUTE) + delta.to(COMPUTE))
# rounded to the dtype in between
-         z += bias.to(COMPUTE)
+         z = z.to(x.dtype).to(COMPUTE) + bias.to(COMPUTE)
# scale rounded to bfloat16
- tl.cast(scale, COMPUTE) * delta.to(COMPUTE)
+ tl.cast(scale, tl.bfloat16).to(COMPUTE) * delta.to(COMPUTE)
# a gradient that drops NaN
- dy = tl.where(saved <= 0, 0.0, dy)
+ dy = tl.where(saved > 0, dy, 0.0)
# silu: the wrong sign
- z = z / (1.0 + tl.exp(-z))
+ z = z / (1.0 + tl.exp(z))
# sigmoid: a wrong sign in the gradient
- dy = dy * (saved * (1.0 - saved))
+ dy = dy * (saved * (1.0 + saved))
# gelu: a constant cut off
- 0.2140644488178008
+ 0.2074
# ddelta without the scale
- tl.store(ddelta_ptr + offsets, tl.cast(scale, COMPUTE) * dx, mask=mask)
+ tl.store(ddelta_ptr + offsets, dx, mask=mask)
# int32 rows of x and delta
- rows = pid_m.to(tl.int64) * BLOCK_M +
+ rows = pid_m * BLOCK_M +
# int32 rows of dy
- rows = pid_m.to(tl.int64) * rows_per_program +
+ rows = pid_m * rows_per_program +
# delta read by the strides of x
- delta_ptrs = delta_ptr + rows[:, None] * stride_dm + cols[None, :] * stride_dn
+ delta_ptrs = delta_ptr + rows[:, None] * stride_xm + cols[None, :] * stride_xn
# the column stride of delta forgotten in the backward pass
- delta_offsets = rows[:, None] * stride_dm + cols[None, :] * stride_dn
+ delta_offsets = rows[:, None] * stride_dm + cols[None, :]
# dy read as if contiguous: a gradient of strides 0
- dy_ptrs = dy_ptr + rows[:, None] * stride_dym + cols[None, :] * stride_dyn
+ dy_ptrs = dy_ptr + offsets
# in place: written as if x were contiguous
- y_ptrs = y_ptr + rows[:, None] * stride_ym + cols[None, :] * stride_yn
+ y_ptrs = y_ptr + offsets
# in place: a copy written, x left as it was
-         x.copy_(rows.view_as(x))
+         pass
# in place: autograd not told
- ctx.mark_dirty(x)
+ pass
# in place: silu without its z
- needs_grad and activation in host.OF_Z
+ needs_grad and activation == "silu"
# in place: an expanded x written
-         if step <= reach:
+         if step < reach:
# in place: a leaf that requires grad written
-     if base.is_leaf and base.requires_grad and torch.is_grad_enabled():
+     if False:
# in place: delta overlaps x
-     return end_a > gap or overlaps_itself([(1, gap + end_b), *rows])
+     return gap == 0
# in place: delta reaches into the next row of x
-     return end_a > gap or overlaps_itself([(1, gap + end_b), *rows])
+     return end_a > gap
# in place: the halves of one tensor refused
- if t is not None and t.untyped_storage().data_ptr() == storage and host.shares_memory(x, t):
+ if t.untyped_storage().data_ptr() == storage:
# a strided bias read as if contiguous
- bias = bias if bias is None else bias.contiguous()
+ bias = bias
# a strided bias read as if contiguous in the backward pass
- bias = None if bias is None else bias.contiguous()
+ pass
# silu: y saved where z is needed
- if activation in ("relu", "sigmoid"):
+ if activation in ("relu", "sigmoid", "silu"):
# only the last rows of a program summed
- total += _lora_epilogue_bwd_tile(
+ total = _lora_epilogue_bwd_tile(
# folded rows: a bias of the first row alone in the backward pass
- bias_cols = cols.to(tl.int32) % (n_cols // FOLD)
-     if
+ bias_cols = cols.to(tl.int32) % n_cols
+     if
# folded rows: dbias without the last elements
- sums += tl.sum(last_dx, axis=0)
+ sums = sums
# CUDA: columns with gaps
- (m if m.stride(1) == 1 else m.contiguous() for m in (x, delta))
+ x, delta
# CUDA: mixed dtypes as they are
-     x, delta, bias = (t.to(y.dtype) for t in (x, delta, bias))
+     pass
# folded rows: a bias of the first row alone
- bias_cols = cols.to(tl.int32) % (n_cols // FOLD)
-
-     x_ptrs
+ bias_cols = cols.to(tl.int32) % n_cols
+
+     x_ptrs
""")
