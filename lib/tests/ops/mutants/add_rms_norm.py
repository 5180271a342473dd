"""Mutants of lib/ops/add_rms_norm.py."""

from lib.measure.mutants import mutants_in

MUTANTS = mutants_in("""
# the mean of a padded row
- root = tl.rsqrt(total / n_cols + eps)
+ root = tl.rsqrt(total / (TILES * BLOCK_N) + eps)
# eps forgotten
- root = tl.rsqrt(total / n_cols + eps)
+ root = tl.rsqrt(total / n_cols)
# eps squared backward
- squares / n_cols + eps)[
+ squares / n_cols + eps * eps)[
# squares added to the other sum
- return a + c, b + d
+ return a + c, b + c
# another row read again
- compiler
-             dy = tl.load(dy_ptrs
+ compiler
+             dy = tl.load(h_ptrs
# the norm of h before it is rounded
- tl.store(h_ptrs, h, mask=mask)
+ tl.store(h_ptrs, h, mask=mask)
+         h = x.to(COMPUTE) + residual.to(COMPUTE)
# the weight forgotten
- return h.to(COMPUTE) * root * factor
+ return h.to(COMPUTE) * root
# int32 rows of x
- rows = group.to(tl.int64) * (APART * BLOCK_M)
+ rows = group * (APART * BLOCK_M)
# int32 rows of dy
- first_row = tl.program_id(0).to(tl.int64) * rows_per_program + start
+ first_row = tl.program_id(0) * rows_per_program + start
# a wide row after the last
-         if row < n_rows:
+         if row <= n_rows:
# the mean of a padded wide row
- cross / n_cols))
+ cross / BLOCK_N))
# residual read by the strides of x
- residual_at = device.begin(rows, stride_rm, shift, V)
+ residual_at = device.begin(rows, stride_xm, shift, V)
# columns of residual taken side by side
- residual_at + cols * stride_rn
+ residual_at + cols
# the mean without the ends
- total += tl.sum(end_h.to(COMPUTE) * end_h.to(COMPUTE), axis=1)[:, None]
+ pass
# the weight counted from the boundary on
- _factor(weight_ptr, cols - shift, n_cols) if LATE else factors[t]
+ _factor(weight_ptr, cols, n_cols)
# the weight of the ends counted from the boundary on
- end_factor = _factor(weight_ptr, end_cols - shift, n_cols)
+ end_factor = _factor(weight_ptr, end_cols, n_cols)
# the ends of h not written
- end_h = _h(end_x, end_residual, h_rows + end_cols, at_ends, COMPUTE)
+ end_h = _h(end_x, end_residual, h_rows + end_cols, at_ends & (shift < 0), COMPUTE)
# the ends without residual
- end_residual = tl.load(residual_ptr + residual_at + end_cols, mask=at_ends, other=0.0)
+ end_residual = tl.load(residual_ptr + residual_at + end_cols, mask=at_ends & (shift < 0), other=0.0)
# rows of another length read as if contiguous
- if not all([m.is_contiguous() for m in matrices]):
+ if not matrices[0].is_contiguous():
# dy read as if contiguous: a gradient of strides 0
- dy_ptr + rows * stride_dym + cols * stride_dyn
+ dy_ptr + rows * n_cols + cols
# dh read as if contiguous
- dh_ptr + rows * stride_dhm + cols * stride_dhn
+ dh_ptr + rows * n_cols + cols
# the gradient of h in place of the sum
-
-             dx += tl.load(dh_ptrs
+
+             dx = tl.load(dh_ptrs
# the mean without the weight
- (h * h, dy * weight * h), 1
+ (h * h, dy * h), 1
# the sign of what the norm takes away
- dx = root * (dy * weight - normal * (root * cross[:
+ dx = root * (dy * weight + normal * (root * cross[:
# h in place of its norm
-
-         normal = h * root
+
+         normal = h
# only the last rows summed
-
-         total += dy * normal
+
+         total = dy * normal
# dweight times the weight
-
-         total += dy * normal
+
+         total += dy * weight * normal
# a strided weight read as if contiguous
- _launch(plan, *rows, weight.contiguous(), *out, eps, plus_one)
+ _launch(plan, *rows, weight, *out, eps, plus_one)
# mixed dtypes: h in that of x
- dtype = x.dtype if residual is None else host.dtype_of_sum(x.dtype, residual.dtype)
+ dtype = x.dtype
# the 1 forgotten
- weight += 1.0
+ weight += 0.0
# the 1 forgotten forward
- factor += 1.0
+ factor += 0.0
# without the 1 backward
- kernel, how = _add_rms_norm_bwd_wide_kernel, {"PLUS_ONE": plus_one}
+ kernel, how = _add_rms_norm_bwd_wide_kernel, {"PLUS_ONE": False}
# with eps = 0 a row that is not there makes dweight NaN
- normal = tl.where(rows < n_rows, normal, 0.0)
+ normal = normal * 1.0
# without residual, h is one that nobody has written
- ctx.save_for_backward(x if residual is None else h, weight)
+ ctx.save_for_backward(torch.zeros_like(x) if residual is None else h, weight)
# h without a gradient
- ctx.set_materialize_grads(False)
+ ctx.mark_non_differentiable(h)
# a second derivative that is wrong in silence
-     @host.once
-
+
# no gradient of the weight from no rows
- return dx, torch.zeros_like(weight) if has_dweight else None
+ return dx, None
# one strip's sums in float32
- wide = dtype if strips * fold == 1 else sum_dtype(matrix.dtype)
+ wide = sum_dtype(matrix.dtype)
# partial sums rounded to 16 bits
- wide = dtype if strips * fold == 1 else sum_dtype(matrix.dtype)
+ wide = dtype
""")
