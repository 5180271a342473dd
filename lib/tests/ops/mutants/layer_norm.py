"""Mutants of lib/ops/layer_norm.py."""

from lib.measure.mutants import mutants_in

MUTANTS = mutants_in("""
# the mean of a padded row
- mean = origin + tl.sum(sums, axis=1)[:, None] / n_cols
+ mean = origin + tl.sum(sums, axis=1)[:, None] / (TILES * BLOCK_N)
# the mean of what the neighbours have, too
- sums += device.own(h.to(COMPUTE) - origin, 0.0, t, cols, place, UNIT, V, FULL)
+ sums += h.to(COMPUTE) - origin
# the mean of sums of the numbers themselves: rows of one number have a variance
- hs, sums, origin = (), tl.zeros((BLOCK_M, BLOCK_N), COMPUTE), origin.to(COMPUTE)
+ hs, sums, origin = (), tl.zeros((BLOCK_M, BLOCK_N), COMPUTE), 0.0 * origin.to(COMPUTE)
# distances from a number of the row before
- origin = tl.load(x_rows + shift, mask=place[0], other=0.0)
+ origin = tl.load(x_rows, mask=place[0], other=0.0)
# distances from the first number of x, before residual is added
- origin = origin.to(COMPUTE) + tl.load(r_rows + shift, mask=place[0], other=0.0).to(COMPUTE)
+ origin = origin.to(COMPUTE)
# what pads a row counted as (0 - mean)²
- d = device.own(hs[t].to(COMPUTE) - mean, 0.0, t, cols, place, UNIT, V, FULL)
-         squares
+ d = hs[t].to(COMPUTE) - mean
+         squares
# mean(h²) - mean², which cancels
- squares += d * d
-     root = tl.rsqrt(tl.sum(squares, axis=1)[:, None] / n_cols + eps)
+ squares += device.own(hs[t].to(COMPUTE) * hs[t].to(COMPUTE), 0.0, t, cols, place, UNIT, V, FULL)
+     root = tl.rsqrt(tl.sum(squares, axis=1)[:, None] / n_cols - mean * mean + eps)
# the variance of a sample, by N - 1
- tl.sum(squares, axis=1)[:, None] / n_cols + eps
+ tl.sum(squares, axis=1)[:, None] / tl.maximum(n_cols - 1, 1) + eps
# eps forgotten
- tl.sum(squares, axis=1)[:, None] / n_cols + eps
+ tl.sum(squares, axis=1)[:, None] / n_cols
# eps added to the deviation
- tl.rsqrt(tl.sum(squares, axis=1)[:, None] / n_cols + eps)
+ (1.0 / (tl.sqrt(tl.sum(squares, axis=1)[:, None] / n_cols) + eps))
# the norm of h before it is rounded
- device.store_tile(h_ptr + start + cols, h, t, cols, place, UNIT, V, FULL)
+ device.store_tile(h_ptr + start + cols, h, t, cols, place, UNIT, V, FULL)
+             h = xs[t].to(COMPUTE) + residuals[t].to(COMPUTE)
# mean forgotten
- cols, y = device.tile_cols(t, BLOCK_N), (hs[t].to(COMPUTE) - mean) * root
+ cols, y = device.tile_cols(t, BLOCK_N), hs[t].to(COMPUTE) * root
# mean and root saved one row off
- tl.store(stats_ptr + n_rows + rows, root, mask=place[0])
+ tl.store(stats_ptr + n_rows - 1 + rows, root, mask=place[0])
# weight counted from the boundary on
- tl.load(weight_ptr + (cols - place[1])
+ tl.load(weight_ptr + cols
# bias counted from the boundary on
- tl.load(bias_ptr + (cols - place[1])
+ tl.load(bias_ptr + cols
# a held weight counted from the boundary on
- tl.load(weight_ptr + (cols - left)
+ tl.load(weight_ptr + cols
# bias added before the product with weight
- y = _affine(y, weight_ptr, (), bias_ptr, t, cols, place, UNIT, V, FULL)
+ y = _affine(y, None, (), bias_ptr, t, cols, place, UNIT, V, FULL)
+         y = _affine(y, weight_ptr, (), None, t, cols, place, UNIT, V, FULL)
# int32 rows
- return group.to(tl.int64) * (APART * rows_per_program) + lane, shift
+ return group * (APART * rows_per_program) + lane, shift
# residual read by the strides of x
- r_rows = residual_ptr + device.begin(rows, stride_rm, shift, V)
+ r_rows = residual_ptr + device.begin(rows, stride_xm, shift, V)
# columns of residual taken side by side
- load_tiles(r_rows, stride_rn
+ load_tiles(r_rows, 1
# rows of another length read as if contiguous
- if not all([m.is_contiguous() for m in matrices]):
+ if not matrices[0].is_contiguous():
# dy read as if contiguous: a gradient of strides 0
- dy_rows = dy_ptr + device.begin(rows, stride_dym, shift, V)
+ dy_rows = dy_ptr + device.begin(rows, n_cols, shift, V)
# dh read as if contiguous
- dh_ptr + device.begin(rows, stride_dhm, shift, V)
+ dh_ptr + device.begin(rows, n_cols, shift, V)
# the gradient of h in place of the sum
- dx += dh.to(COMPUTE)
+ dx = dh.to(COMPUTE)
# dy is read where h is
- dys = device.load_tiles(dy_rows, stride_dyn
+ dys = device.load_tiles(h_rows, stride_dyn
# sums of a row with what the neighbours have in it
- g = device.own(g, 0.0, t, cols, place, UNIT, V, FULL)
+ g = g * 1.0
# long rows: what the neighbours have counted in
- g = device.own(g, 0.0, 0, cols, place, UNIT, V, 0)
+ g = g * 1.0
# long rows: the last tile left out of their sums
- tl.range(0, shift + n_cols, BLOCK_N, num_stages=1)
+ tl.range(0, n_cols // BLOCK_N * BLOCK_N, BLOCK_N, num_stages=1)
# long rows: the mean without the weight
- g = _affine(g, weight_ptr, (), None, 0, cols, place, UNIT, V, 0)
+ g = g * 1.0
# long rows: h in place of its distance from the mean
- cross += g * device.own(h.to(COMPUTE) - mean, 0.0, 0,
+ cross += g * device.own(h.to(COMPUTE), 0.0, 0,
# long rows: their sums by h's strides
- dy_row = dy_ptr + device.begin(row, stride_dym, shift, V)
+ dy_row = dy_ptr + device.begin(row, stride_hm, shift, V)
# long rows: root forgotten
- tl.store(means_ptr + n_rows + row, root * row_cross
+ tl.store(means_ptr + n_rows + row, row_cross
# long rows: one mean in place of the other
- mean_gn = tl.load(means_ptr + n_rows + rows
+ mean_gn = tl.load(means_ptr + rows
# long rows: all programs take the first columns
- skipped = 0 if means_ptr is None else tl.program_id(1) * BLOCK_N
+ skipped = 0
# long rows: columns of dh taken side by side
- stride_dhm, shift, V) + skipped * stride_dhn
+ stride_dhm, shift, V) + skipped
# long rows: dx written to the first columns
- device.begin(rows, n_cols, shift, V) + skipped, (), ()
+ device.begin(rows, n_cols, shift, V), (), ()
# long rows: the last columns forgotten
- grid += [host.cdiv(n_cols + apart - 1, plan.rows.block_n)]
+ grid += [max(1, n_cols // plan.rows.block_n)]
# dbias by itself is that of dweight
- of_bias = dy, None, h, stats, None, None, (None, summed[1])
+ of_bias = dy, None, h, stats, None, None, (summed[1], None)
# both sums one
- return a + c, b + d
+ return a + c, b + c
# the mean of g forgotten
- dx = root * (g - mean_g - normal * mean_gn)
+ dx = root * (g - normal * mean_gn)
# the share of n forgotten
- dx = root * (g - mean_g - normal * mean_gn)
+ dx = root * (g - mean_g)
# the mean without the weight
- g = _affine(g, weight_ptr, weights, None, t, cols, columns, UNIT, V, FULL)
+ g = g * 1.0
# h in place of its norm
- normal = (hs[t].to(COMPUTE) - mean) * root
+ normal = hs[t].to(COMPUTE) * root
# only the last rows summed, dweight
- (dweights[t] + dy * normal if
+ (dy * normal if
# only the last rows summed, dbias
- (dbiases[t] + dy if
+ (dy if
# dbias times the weight
- (dbiases[t] + dy if
+ (dbiases[t] + dx / root if
# dweight and dbias in one place
- tl.store(ptrs + DWEIGHT * n_cols
+ tl.store(ptrs
# sums of a strip without where its rows begin
- ptrs = partial_ptr + (cols - left)
+ ptrs = partial_ptr + cols
# programs that write over each other's sums
- ((DWEIGHT + DBIAS) * n_cols)
+ n_cols
# rows of a strip side by side
- row = first + APART * step
+ row = first + step
# strips counted as if rows lay side by side
- strips = cdiv(n_rows, rows_per_program) * apart
+ strips = cdiv(n_rows, rows_per_program)
# partial sums rounded to 16 bits
- wide = dtype if grid == [1] else host.sum_dtype(h.dtype)
+ wide = dtype
# one strip's sums in float32
- wide = dtype if grid == [1] else host.sum_dtype(h.dtype)
+ wide = host.sum_dtype(h.dtype)
# gradients that share memory
- copy=bool(sums)
+ copy=False
# a strided weight read as if contiguous
- columns = [t if t is None else t.contiguous() for t in (weight, bias)]
+ columns = [weight, bias]
# a strided weight read as if contiguous, backward
- weight = weight if weight is None else weight.contiguous()
+ weight = weight if weight is None else weight[...]
# mixed dtypes: h in that of x
- dtype = x.dtype if residual is None else host.dtype_of_sum(x.dtype, residual.dtype)
+ dtype = x.dtype
# without residual, h is one that nobody has written
- ctx.save_for_backward(x if residual is None else h, stats, weight, bias)
+ ctx.save_for_backward(torch.zeros_like(x) if residual is None else h, stats, weight, bias)
# a second derivative that is wrong in silence
-     @host.once
-
+
# no gradient of weight and bias from no rows
- return dx, *[t if t is None else torch.zeros_like(t) for t in summed]
+ return dx, None, None
# an eps below 0
- not eps >= 0
+ eps != eps
# several dimensions, of which the last alone is normed
- if len(self.normalized_shape) != 1:
+ if len(self.normalized_shape) == 0:
""")
