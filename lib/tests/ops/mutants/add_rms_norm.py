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
-
-         root = tl.rsqrt(row_squares / n_cols + eps)[
+
+         root = tl.rsqrt(row_squares / n_cols + eps * eps)[
# squares added to the other sum
- return a + c, b + d
+ return a + c, b + c
# what the neighbours have counted in
- h = device.own(h.to(COMPUTE), 0.0, t, cols, place, UNIT, V, FULL)
+ h = h.to(COMPUTE)
# what the neighbours have counted in, backward
- h = device.own(hs[t].to(COMPUTE), 0.0, t, cols, place, UNIT, V, FULL)
+ h = hs[t].to(COMPUTE)
# dy is read where h is
- dys = device.load_tiles(dy_rows, stride_dyn
+ dys = device.load_tiles(h_rows, stride_dyn
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
- dh_rows = dh_ptr + device.begin(rows, stride_dhm, shift, V)
+ dh_rows = dh_ptr + device.begin(rows, n_cols, shift, V)
# the gradient of h in place of the sum
- dx += dh.to(COMPUTE)
+ dx = dh.to(COMPUTE)
# the mean without the weight
-
-             cross += dy * _factor(weight, PLUS_ONE, COMPUTE) * h
+
+             cross += dy * h
# the sign of what the norm takes away
- dx = root * (dy * factor - normal * mean)
+ dx = root * (dy * factor + normal * mean)
# h in place of its norm
- dy, normal = dy.to(COMPUTE), h.to(COMPUTE) * root
+ dy, normal = dy.to(COMPUTE), h.to(COMPUTE)
# only the last rows summed
- totals[t] + share if
+ share if
# dweight times the weight
- return dx, dy * normal
+ return dx, dy * factor * normal
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
# long rows: eps squared
-
-     root = tl.rsqrt(row_squares / n_cols + eps)[
+
+     root = tl.rsqrt(row_squares / n_cols + eps * eps)[
# long rows: the mean without the weight
-
-         cross += dy * _factor(weight, PLUS_ONE, COMPUTE) * h
+
+         cross += dy * h
# long rows: what the neighbours have counted in
- h = device.own(h.to(COMPUTE), 0.0, 0, cols, place, UNIT, V, 0)
+ h = h.to(COMPUTE)
# long rows: the last tile left out of their sums
- tl.range(0, shift + n_cols, BLOCK_N, num_stages=1)
+ tl.range(0, n_cols // BLOCK_N * BLOCK_N, BLOCK_N, num_stages=1)
# long rows: root in place of the mean
- mean, dh = tl.load(means_ptr
+ mean, dh = tl.load(roots_ptr
# long rows: dh read as if contiguous
- dh_ptrs = dh_ptr + device.begin(rows, stride_dhm, shift, V)
+ dh_ptrs = dh_ptr + device.begin(rows, n_cols, shift, V)
# long rows: only the last rows
- total += share
+ total = share
# long rows: without where rows begin
- tl.store(partial_ptr + (cols - shift), tl.sum
+ tl.store(partial_ptr + cols, tl.sum
# long rows: the last columns forgotten
- (strips, host.cdiv(n_cols + apart - 1, block_n))
+ (strips, max(1, n_cols // block_n))
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
- how = {"PLUS_ONE": plus_one
+ how = {"PLUS_ONE": False
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
