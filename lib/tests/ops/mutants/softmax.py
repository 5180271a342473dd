"""Mutants of lib/ops/softmax.py."""

from lib.measure.mutants import mutants_in

MUTANTS = mutants_in("""
# the padding counted in the sum
- held = held + (device.own(x, -float("inf"), t, cols, place, UNIT, V, FULL),)
+ held = held + (device.own(x, 0.0, t, cols, place, UNIT, V, FULL),)
# computed in bfloat16
- _scored(xs[t].to(COMPUTE)
+ _scored(xs[t].to(tl.bfloat16)
# the maximum not taken off
- numerator = device.fast_exp(held[t] - top)
+ numerator = device.fast_exp(held[t])
# not divided by the sum
- numerators[t] * (1.0 / total)
+ numerators[t]
# zeros for a row of -inf
- numerators[t] * (1.0 / total)
+ tl.where(total != total, 0.0, numerators[t] / total)
# the row stride of x forgotten
- x_rows = x_ptr + device.begin(rows, stride_xm, shift, V)
+ x_rows = x_ptr + device.begin(rows, n_cols, shift, V)
# int32 rows
- return group.to(tl.int64) * (APART * rows_per_program) + lane, shift
+ return group * (APART * rows_per_program) + lane, shift
# rows side by side begin at different places of a piece
- rows = (first + APART * tl.arange(0, BLOCK_M))[:, None]
+ rows = (first + tl.arange(0, BLOCK_M))[:, None]
# the place in a piece where a row begins forgotten
- shift = (lane * n_cols) % V if V > UNIT else 0
+ shift = 0
# the last piece of the matrix read beyond its end
- there = tl.minimum(end + V - 1, (n_rows - rows) * n_cols + shift) // V
+ there = (end + V - 1) // V + 0 * rows
# nothing of the last piece of the matrix
- first + APART * BLOCK_M >= n_rows
+ first < 0
# rows behind the last one read and written
- (rows < n_rows, shift, end
+ (rows < n_rows + 1, shift, end
# what the row before has in a shared piece counted in
- if (V > UNIT and t == 0) or t >= FULL:
+ if t >= FULL:
# what the next row has in a shared piece counted in
-         mask = mask & (cols < place[2])
+         mask = mask & (cols // V <= place[2] // V)
# a shared piece written whole
- whole = (cols // V >= (shift + V - 1) // V) & (cols // V < end // V)
+ whole = (cols // V >= shift // V) & (cols // V < end // V)
# the next row written to
- mask=inside & (cols >= shift) & (cols < end) & ~whole
+ mask=inside & (cols >= shift) & ~whole
# the row before written to
- mask=inside & (cols >= shift) & (cols < end) & ~whole
+ mask=inside & (cols < end) & ~whole
# shared pieces not written
- mask=inside & (cols >= shift) & (cols < end) & ~whole
+ mask=inside & (cols >= shift) & (cols < end) & whole
# the mask of the columns dropped from the store
- mask=inside & (cols < end) if t >= FULL else inside
+ mask=inside
# fewer programs than there are groups of rows
- cdiv(matrices[0].shape[0], tiles.block_m * apart) * apart
+ cdiv(matrices[0].shape[0], tiles.block_m * apart)
# the last tile forgotten
- "TILES": cdiv(n_cols + v - unit, block_n)
+ "TILES": max(1, n_cols // block_n)
# the tile forgotten that a row needs because it begins within a piece
- "TILES": cdiv(n_cols + v - unit, block_n)
+ "TILES": cdiv(n_cols, block_n)
# the last tile taken for one without an end
- "FULL": n_cols // block_n
+ "FULL": cdiv(n_cols, block_n)
# sliced rows read as if contiguous
- if not all([m.is_contiguous() for m in matrices]):
+ if False:
# dy summed without y
- product = ys[t].to(COMPUTE) * dys[t].to(COMPUTE)
+ product = dys[t].to(COMPUTE)
# the gradient's sum with what the neighbours have
- sums += device.own(product, 0.0, t, device.tile_cols(t, BLOCK_N), place, UNIT, V, FULL)
+ sums += product
# a wrong sign in the gradient
- ys[t].to(COMPUTE) * (dys[t].to(COMPUTE) - total)
+ ys[t].to(COMPUTE) * (dys[t].to(COMPUTE) + total)
# the sum not multiplied by y
- ys[t].to(COMPUTE) * (dys[t].to(COMPUTE) - total)
+ ys[t].to(COMPUTE) * dys[t].to(COMPUTE) - total
# in parts: the ends not divided by the sum
- tl.store(y_row + end_cols, end_numerator * (1.0 / total)
+ tl.store(y_row + end_cols, end_numerator
# in parts: the ends counted twice
- at_start = (lane >= shift) & (lane < tl.minimum(first * V, end))
+ at_start = (lane >= shift) & (lane < end)
# in parts: the gradient of the ends without the sum
- end_y * (end_dy - total), row,
+ end_y * end_dy, row,
# the row stride of dy forgotten
- dy_rows = dy_ptr + device.begin(rows, stride_dym, shift, V)
+ dy_rows = dy_ptr + device.begin(rows, n_cols, shift, V)
# a sliced dy read as if contiguous
- grid, constants = host.grid_of_rows(plan, dy)
+ grid, constants = host.grid_of_rows(plan, y)
# a gradient of strides 0
- dy = _rows_side_by_side(host.rows_of(dy))
+ dy = host.rows_of(dy)
# a second derivative that is wrong in silence
-     @host.once
+     @staticmethod
# compiled: x saved where y is needed
- inputs, output: _save(ctx, output, *inputs[1:])
+ inputs, output: _save(ctx, *inputs)
# in parts: a row inside one piece counted twice
- (cols < end) & (behind >= first)
+ (cols < end)
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
- x = x * SCALE if mask is None else tl.where(mask, x * SCALE, -float("inf"))
+ x = x * SCALE
# causal: a row does not see itself
-     x = tl.where(col <= row
+     x = tl.where(col < row
# causal: rows of the next matrix see more
-     x = tl.where(col <= row % n_seq
+     x = tl.where(col <= row
# causal: from the boundary on
- _scored(xs[t].to(COMPUTE), rows, cols - shift
+ _scored(xs[t].to(COMPUTE), rows, cols
# causal: the gradient from the boundary on
- dx = _scored_grad(dx, rows, cols - shift
+ dx = _scored_grad(dx, rows, cols
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
