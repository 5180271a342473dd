"""Mutants of lib/ops/add_rms_norm.py."""

from lib.measure.mutants import mutants_in

MUTANTS = mutants_in("""
# the mean of a padded row
- tl.sum(squares, axis=1)[:, None] / n_cols + eps
+ tl.sum(squares, axis=1)[:, None] / (TILES * BLOCK_N) + eps
# eps forgotten
- tl.sum(squares, axis=1)[:, None] / n_cols + eps
+ tl.sum(squares, axis=1)[:, None] / n_cols
# eps squared backward
- row_squares / n_cols + eps)[
+ row_squares / n_cols + eps * eps)[
# squares added to the other sum
- return a + c, b + d
+ return a + c, b + c
# what the neighbours have counted in
- h = device.own(h.to(COMPUTE), 0.0, t, cols, place, UNIT, V, FULL)
+ h = h.to(COMPUTE)
# what the neighbours have counted in, backward
- h = device.own(hs[t].to(COMPUTE), 0.0, t, cols, place, UNIT, V, FULL)
+ h = hs[t].to(COMPUTE)
# another row read again
-
-             dys = device.load_tiles(dy_rows, stride_dyn
+
+             dys = device.load_tiles(h_rows, stride_dyn
# the norm of h before it is rounded
- device.store_tile(h_ptr + start + cols, h, t, cols, place, UNIT, V, FULL)
+ device.store_tile(h_ptr + start + cols, h, t, cols, place, UNIT, V, FULL)
+             h = xs[t].to(COMPUTE) + residuals[t].to(COMPUTE)
# the weight forgotten
- y = hs[t].to(COMPUTE) * root * _factor(weight, PLUS_ONE, COMPUTE)
+ y = hs[t].to(COMPUTE) * root
# int32 rows
- return group.to(tl.int64) * (APART * rows_per_program) + lane, shift
+ return group * (APART * rows_per_program) + lane, shift
# residual read by the strides of x
- r_rows = residual_ptr + device.begin(rows, stride_rm, shift, V)
+ r_rows = residual_ptr + device.begin(rows, stride_xm, shift, V)
# columns of residual taken side by side
- load_tiles(r_rows, stride_rn
+ load_tiles(r_rows, 1
# the weight counted from the boundary on
- tl.load(weight_ptr + (cols - place[1])
+ tl.load(weight_ptr + cols
# rows of another length read as if contiguous
- if not all([m.is_contiguous() for m in matrices]):
+ if not matrices[0].is_contiguous():
# dy read as if contiguous: a gradient of strides 0
-
-         dy_rows = dy_ptr + device.begin(rows, stride_dym, shift, V)
+
+         dy_rows = dy_ptr + device.begin(rows, n_cols, shift, V)
# dh read as if contiguous
- dh_ptr + device.begin(rows, stride_dhm, shift, V)
+ dh_ptr + device.begin(rows, n_cols, shift, V)
# the gradient of h in place of the sum
- dx += dhs[t].to(COMPUTE)
+ dx = dhs[t].to(COMPUTE)
# the mean without the weight
- cross += dy * _factor(weight, PLUS_ONE, COMPUTE) * h
+ cross += dy * h
# the sign of what the norm takes away
- dx = root * (dy * _factor(weight, PLUS_ONE, COMPUTE) - normal * mean)
+ dx = root * (dy * _factor(weight, PLUS_ONE, COMPUTE) + normal * mean)
# h in place of its norm
- normal = hs[t].to(COMPUTE) * root
+ normal = hs[t].to(COMPUTE)
# only the last rows summed
- totals[t] + dy * normal if
+ dy * normal if
# dweight times the weight
- totals[t] + dy * normal if
+ totals[t] + dy * weight * normal if
# the sum of a strip without where its rows begin
- tl.store(partial_ptr + (cols - shift), total, mask=mask)
+ tl.store(partial_ptr + cols, total, mask=mask)
# rows of a strip side by side
- row = first + APART * step
-         rows, place = device.held_rows(row, shift, n_rows, n_cols, UNIT, V, BLOCK_M)
-         h_rows
+ row = first + step
+         rows, place = device.held_rows(row, shift, n_rows, n_cols, UNIT, V, BLOCK_M)
+         h_rows
# strips counted as if rows lay side by side
- strips = cdiv(n_rows, rows_per_program) * apart
+ strips = cdiv(n_rows, rows_per_program)
# by itself: dweight of h in place of its norm
- (h * root)
+ h
# by itself: only the last rows
- total += device.load_tile(dy_ptrs
+ total = device.load_tile(dy_ptrs
# by itself: without where rows begin
- tl.store(partial_ptr + (cols - shift), tl.sum
+ tl.store(partial_ptr + cols, tl.sum
# by itself: the last columns forgotten
- (strips, host.cdiv(n_cols + apart, 512))
+ (strips, max(1, n_cols // 512))
# a strided weight read as if contiguous
- _launch(plan, *rows, weight.contiguous(), *out, eps, plus_one)
+ _launch(plan, *rows, weight, *out, eps, plus_one)
# mixed dtypes: h in that of x
- dtype = x.dtype if residual is None else host.dtype_of_sum(x.dtype, residual.dtype)
+ dtype = x.dtype
# the 1 forgotten
- return weight.to(COMPUTE) + 1.0 if PLUS_ONE else weight.to(COMPUTE)
+ return weight.to(COMPUTE)
# the 1 added in the dtype of the weight
- return weight.to(COMPUTE) + 1.0 if PLUS_ONE else weight.to(COMPUTE)
+ return (weight + 1.0).to(weight.dtype).to(COMPUTE) if PLUS_ONE else weight.to(COMPUTE)
# without the 1 backward
- rows_per_program, PLUS_ONE=plus_one
+ rows_per_program, PLUS_ONE=False
# with eps = 0 a row that is not there makes dweight NaN
- normal = tl.where(place[0], normal, 0.0)
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
