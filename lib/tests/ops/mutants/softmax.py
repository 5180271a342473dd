"""Mutants of lib/ops/softmax.py."""

from lib.measure.mutants import mutants_in

MUTANTS = mutants_in("""
# the padding counted in the sum
- x = tl.load(x_ptr + x_offsets, mask=mask, other=-float("inf")).to(COMPUTE)
+ x = tl.load(x_ptr + x_offsets, mask=mask, other=0.0).to(COMPUTE)
# computed in bfloat16
- x = tl.load(x_ptr + x_offsets, mask=mask, other=-float("inf")).to(COMPUTE)
+ x = tl.load(x_ptr + x_offsets, mask=mask, other=-float("inf")).to(tl.bfloat16)
# the maximum not taken off
- numerator = device.fast_exp(x - top)
+ numerator = device.fast_exp(x)
# not divided by the sum
- tl.store(y_ptr + y_offsets, numerator * (1.0 / total), mask=mask)
+ tl.store(y_ptr + y_offsets, numerator, mask=mask)
# zeros for a row of -inf
- tl.store(y_ptr + y_offsets, numerator * (1.0 / total), mask=mask)
+ tl.store(y_ptr + y_offsets, tl.where(total != total, 0.0, numerator / total), mask=mask)
# the row stride of x forgotten
- x_offsets, y_offsets = rows * stride_xm + cols, rows * n_cols + cols
+ x_offsets, y_offsets = rows * n_cols + cols, rows * n_cols + cols
# int32 rows
- x_offsets, y_offsets = rows * stride_xm + cols, rows * n_cols + cols
+ x_offsets, y_offsets = rows.to(tl.int32) * stride_xm + cols, rows * n_cols + cols
# the mask of the columns dropped from the store
- tl.store(y_ptr + y_offsets, numerator * (1.0 / total), mask=mask)
+ tl.store(y_ptr + y_offsets, numerator * (1.0 / total), mask=inside)
# the maximum without the ends
- top = tl.maximum(top, _row_max(ends))
+ top = top
# the sum without the ends
- total += _row_sum(end_numerator)
+ total = total
# the ends not divided by the sum
- tl.store(y_ptr + base + end_cols, end_numerator * (1.0 / total)
+ tl.store(y_ptr + base + end_cols, end_numerator
# in parts: the ends not divided by the sum
- tl.store(y_row + end_cols, end_numerator * (1.0 / total)
+ tl.store(y_row + end_cols, end_numerator
# rows behind the last one read and written
- end = tl.where(inside, shift + n_cols, 0)
+ end = shift + n_cols
# the ends counted twice
- at_start = (lane >= shift) & (lane < tl.minimum(first * V, end))
+ at_start = (lane >= shift) & (lane < end)
# the first elements of the next row counted in
- first, behind = (shift + V - 1) // V, end // V
+ first, behind = (shift + V - 1) // V, (end + V - 1) // V
# sliced rows read as if contiguous
- WHOLE_PIECES=plan.whole_pieces and x.is_contiguous()
+ WHOLE_PIECES=plan.whole_pieces
# dy summed without y
- total = _row_sum(y * dy)
+ total = _row_sum(dy)
# the gradient's sum without the ends
- total += _row_sum(end_y * end_dy)
+ total = total
# a wrong sign in the gradient
- dx = _scored_grad(y * (dy - total)
+ dx = _scored_grad(y * (dy + total)
# the sum not multiplied by y
- dx = _scored_grad(y * (dy - total)
+ dx = _scored_grad((y * dy - total)
# the gradient of the ends without the sum
- end_y * (end_dy - total), rows
+ end_y * end_dy, rows
# in parts: the gradient of the ends without the sum
- end_y * (end_dy - total), row,
+ end_y * end_dy, row,
# the row stride of dy forgotten
- dy_offsets, y_offsets = rows * stride_dym + cols, rows * n_cols + cols
+ dy_offsets, y_offsets = rows * n_cols + cols, rows * n_cols + cols
# int32 rows of dy
- dy_offsets, y_offsets = rows * stride_dym + cols, rows * n_cols + cols
+ dy_offsets, y_offsets = rows.to(tl.int32) * stride_dym + cols, rows * n_cols + cols
# a sliced dy read as if contiguous
- WHOLE_PIECES=plan.whole_pieces and dy.is_contiguous()
+ WHOLE_PIECES=plan.whole_pieces
# a gradient of strides 0
- dy = _rows_side_by_side(host.rows_of(dy))
+ dy = host.rows_of(dy)
# a second derivative that is wrong in silence
-     @host.once
+     @staticmethod
# compiled: x saved where y is needed
- inputs, output: _save(ctx, output, *inputs[1:])
+ inputs, output: _save(ctx, *inputs)
# a row inside one piece counted twice
- (end_cols < end) & (behind >= first)
+ (end_cols < end)
# in parts: the padding counted
- EMPTY=_MINUS_INF.get(x.dtype, -math.inf)
+ EMPTY=0
# in parts: half of the padding
- torch.bfloat16: -0x007F0080
+ torch.bfloat16: -0x007F0000
# in parts: a part of -inf alone makes the row NaN
- base = tl.where(top == -float("inf"), 0.0, top)
-     for t
+ base = top
+     for t
# alone: tiles of -inf make the row NaN
- base = tl.where(top == -float("inf"), 0.0, top)
-         total
+ base = top
+         total
# alone: sums with each its own maximum
- total * device.fast_exp(before - base)
+ total
# alone: without the last tile
- x_row, n_parts * TILES, row
+ x_row, n_parts * TILES - 1, row
# alone: only as much as one part, backward
- for tile in range(n_parts * TILES)
+ for tile in range(TILES)
# waiting in vain
- if not all_arrived:
-         top, total
+ if False:
+         top, total
# waiting in vain, backward
- if not all_arrived:
-         total
+ if False:
+         total
# in parts: sums added with each its own maximum
- totals * tl.exp(tops - top)
+ totals
# in parts: 0 as the maximum of parts that do not exist
- tops = tl.where(ids < n_parts, tops, -float("inf"))
+ pass
# in parts: words of other rows
- words_ptr += 2 * row * n_parts
+ words_ptr += 2 * row
# in parts: words of the first row, backward
- words_ptr += row * n_parts
+ pass
# in parts: the largest sum of a lane told
- _tell(words_ptr + 2 * part + 1, tl.sum(sums))
+ _tell(words_ptr + 2 * part + 1, tl.max(sums))
# 0.0 told is not heard
- ~number.to(BITS, bitcast=True)
+ number.to(BITS, bitcast=True)
# in parts: int32 rows
- row, part = (tl.program_id(0) // n_parts).to(tl.int64), tl.program_id(0) % n_parts
-     DTYPE: tl.constexpr = x_ptr
+ row, part = tl.program_id(0) // n_parts, tl.program_id(0) % n_parts
+     DTYPE: tl.constexpr = x_ptr
# in parts: int32 rows, backward
- row, part = (tl.program_id(0) // n_parts).to(tl.int64), tl.program_id(0) % n_parts
-     DTYPE: tl.constexpr = y_ptr
+ row, part = tl.program_id(0) // n_parts, tl.program_id(0) % n_parts
+     DTYPE: tl.constexpr = y_ptr
# in parts: the maximum without the ends
-         top = tl.maximum(top, tl.max(ends))
+         top = top
# in parts: the sum without the ends
- total += tl.sum(end_numerator)
+ pass
# in parts: the gradient's sum without the ends
- total += tl.sum(end_y * end_dy)
+ pass
# in parts: the last tile read beyond the row
- if t == 0 or t == TILES - 1:  # no other
+ if t == 0:  # no other
# in parts: the last tile written beyond the row
-         if t == 0 or t == TILES - 1:
-             tl.store(y_row
+         if t == 0:
+             tl.store(y_row
# in parts: the last columns forgotten
- n_tiles = host.cdiv(n_cols, plan.block_n)
+ n_tiles = max(1, n_cols // plan.block_n)
# in parts: floor where ceil was meant
- "TILES": host.cdiv(n_tiles, n_parts)
+ "TILES": n_tiles // n_parts
# more parts than may run at once
- "parts" if n_cols <= most else "eager"
+ "parts"
# in parts: rows of an unaligned x read from the boundary before
- x if alike and x.data_ptr() % 16 == 0 else x.clone
+ x if alike else x.clone
# in parts: rows apart read as if contiguous
- alike = x.is_contiguous() or x.stride(0) % v == x.shape[1] % v == 0
+ alike = True
# eager: not causal
- y.copy_(softmax_eager(matrices, -1, scale, n_seq is not None)
+ y.copy_(softmax_eager(matrices, -1, scale)
# eager: scale forward only
- _softmax_backward_data(dy, y, -1, y.dtype) * scale
+ _softmax_backward_data(dy, y, -1, y.dtype)
# eager: NaN in the gradient of what is left out
- grad.view(-1, n_seq, n_cols).tril()
+ grad.view(-1, n_seq, n_cols)
# float64 computed in float32
- return tl.float64 if dtype == torch.float64 else tl.float32
+ return tl.float32
# columns with gaps read side by side
- return x if x.stride(1) == 1 or x.shape[1] == 1 else x.contiguous()
+ return x
# -inf times a negative scale
- x = tl.where(mask, x * SCALE, -float("inf"))
+ x = x * SCALE
# causal: a row does not see itself
-     x = tl.where(col <= row
+     x = tl.where(col < row
# causal: rows of the next matrix see more
-     x = tl.where(col <= row % n_seq
+     x = tl.where(col <= row
# causal: from the boundary on
-         first_col = pieces[2]
-         ends
+         first_col = 0
+         ends
# causal: ends from the boundary on
- end_cols - first_col, at_ends
+ end_cols, at_ends
# scale: forward only
- dx = dx * SCALE
+ pass
# causal: NaN in the gradient of what is left out
- dx = tl.where(col <= row % n_seq, dx, 0.0)
+ pass
# parts: scale and causal forward only
- dx = _scored_grad(dx, row, cols - pieces[2], n_seq, SCALE)
+ pass
# parts: deaf to scale and causal
- x = _scored(x, row, cols - pieces[2], whole, n_seq, SCALE)
-         y
+ y
# alone: deaf to scale and causal
-         x = _scored(x, row, cols - pieces[2], whole, n_seq, SCALE)
-         before
+         before
# parts: ends deaf to scale and causal
- ends = _scored(ends, row, end_cols - pieces[2], at_ends, n_seq, SCALE)
+ pass
""")
