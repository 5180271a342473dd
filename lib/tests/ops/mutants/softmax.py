"""Mutants of lib/ops/softmax.py."""

from lib.measure.mutants import Mutant

_LOAD_X = 'x = tl.load(x_ptr + x_offsets, mask=mask, other=-float("inf")).to(COMPUTE)'
MUTANTS = [
    # --- rows in one tile
    Mutant(_LOAD_X, _LOAD_X.replace('-float("inf")', "0.0"), "the padding counted in the sum"),
    Mutant(_LOAD_X, _LOAD_X.replace("COMPUTE", "tl.bfloat16"), "computed in bfloat16"),
    Mutant(
        "numerator = device.fast_exp(x - top)\n",
        "numerator = device.fast_exp(x)\n",
        "the maximum not taken off",
    ),
    Mutant(
        "tl.store(y_ptr + y_offsets, numerator * (1.0 / total), mask=mask)",
        "tl.store(y_ptr + y_offsets, numerator, mask=mask)",
        "not divided by the sum",
    ),
    Mutant(
        "tl.store(y_ptr + y_offsets, numerator * (1.0 / total), mask=mask)",
        "tl.store(y_ptr + y_offsets, tl.where(total != total, 0.0, numerator / total), mask=mask)",
        "zeros for a row of -inf",
    ),
    Mutant(
        "x_offsets, y_offsets = rows * stride_xm + cols, rows * n_cols + cols",
        "x_offsets, y_offsets = rows * n_cols + cols, rows * n_cols + cols",
        "the row stride of x forgotten",
    ),
    Mutant(
        "x_offsets, y_offsets = rows * stride_xm + cols, rows * n_cols + cols",
        "x_offsets, y_offsets = rows.to(tl.int32) * stride_xm + cols, rows * n_cols + cols",
        "int32 rows",
    ),
    Mutant(
        "tl.store(y_ptr + y_offsets, numerator * (1.0 / total), mask=mask)",
        "tl.store(y_ptr + y_offsets, numerator * (1.0 / total), mask=inside)",
        "the mask of the columns dropped from the store",
    ),
    # --- rows that begin on no 16-byte boundary
    Mutant("top = tl.maximum(top, _row_max(ends))", "top = top", "the maximum without the ends"),
    Mutant("total += _row_sum(end_numerator)", "total = total", "the sum without the ends"),
    Mutant(
        "tl.store(y_ptr + base + end_cols, end_numerator * (1.0 / total)",
        "tl.store(y_ptr + base + end_cols, end_numerator",
        "the ends not divided by the sum",
    ),
    Mutant(
        "tl.store(y_row + end_cols, end_numerator * (1.0 / total)",
        "tl.store(y_row + end_cols, end_numerator",
        "in parts: the ends not divided by the sum",
    ),
    Mutant(
        "end = tl.where(inside, shift + n_cols, 0)",
        "end = shift + n_cols",
        "rows behind the last one read and written",
    ),
    Mutant(
        "at_start = (lane >= shift) & (lane < tl.minimum(first * V, end))",
        "at_start = (lane >= shift) & (lane < end)",
        "the ends counted twice",
    ),
    Mutant(
        "first, behind = (shift + V - 1) // V, end // V",
        "first, behind = (shift + V - 1) // V, (end + V - 1) // V",
        "the first elements of the next row counted in",
    ),
    Mutant(
        "WHOLE_PIECES=plan.whole_pieces and x.is_contiguous()",
        "WHOLE_PIECES=plan.whole_pieces",
        "sliced rows read as if contiguous",
    ),
    # --- the gradient
    Mutant("total = _row_sum(y * dy)", "total = _row_sum(dy)", "dy summed without y"),
    Mutant(
        "total += _row_sum(end_y * end_dy)", "total = total", "the gradient's sum without the ends"
    ),
    Mutant(
        "dx = _scored_grad(y * (dy - total)",
        "dx = _scored_grad(y * (dy + total)",
        "a wrong sign in the gradient",
    ),
    Mutant(
        "dx = _scored_grad(y * (dy - total)",
        "dx = _scored_grad((y * dy - total)",
        "the sum not multiplied by y",
    ),
    Mutant(
        "end_y * (end_dy - total), rows",
        "end_y * end_dy, rows",
        "the gradient of the ends without the sum",
    ),
    Mutant(
        "end_y * (end_dy - total), row,",
        "end_y * end_dy, row,",
        "in parts: the gradient of the ends without the sum",
    ),
    Mutant(
        "dy_offsets, y_offsets = rows * stride_dym + cols, rows * n_cols + cols",
        "dy_offsets, y_offsets = rows * n_cols + cols, rows * n_cols + cols",
        "the row stride of dy forgotten",
    ),
    Mutant(
        "dy_offsets, y_offsets = rows * stride_dym + cols, rows * n_cols + cols",
        "dy_offsets, y_offsets = rows.to(tl.int32) * stride_dym + cols, rows * n_cols + cols",
        "int32 rows of dy",
    ),
    Mutant(
        "WHOLE_PIECES=plan.whole_pieces and dy.is_contiguous()",
        "WHOLE_PIECES=plan.whole_pieces",
        "a sliced dy read as if contiguous",
    ),
    Mutant(
        "dy = _rows_side_by_side(host.rows_of(dy))",
        "dy = host.rows_of(dy)",
        "a gradient of strides 0",
    ),
    Mutant(
        "    @host.once\n", "    @staticmethod\n", "a second derivative that is wrong in silence"
    ),
    Mutant(
        "inputs, output: _save(ctx, output, *inputs[1:])",
        "inputs, output: _save(ctx, *inputs)",
        "compiled: x saved where y is needed",
    ),
    Mutant(
        "(end_cols < end) & (behind >= first)",
        "(end_cols < end)",
        "a row inside one piece counted twice",
    ),
    # --- rows in parts
    Mutant("EMPTY=_MINUS_INF.get(x.dtype, -math.inf)", "EMPTY=0", "in parts: the padding counted"),
    Mutant(
        "torch.bfloat16: -0x007F0080",
        "torch.bfloat16: -0x007F0000",
        "in parts: half of the padding",
    ),
    Mutant(
        'base = tl.where(top == -float("inf"), 0.0, top)\n    for t',
        "base = top\n    for t",
        "in parts: a part of -inf alone makes the row NaN",
    ),
    Mutant(
        'base = tl.where(top == -float("inf"), 0.0, top)\n        total',
        "base = top\n        total",
        "alone: tiles of -inf make the row NaN",
    ),
    Mutant(
        "total * device.fast_exp(before - base)", "total", "alone: sums with each its own maximum"
    ),
    Mutant(
        "x_row, n_parts * TILES, row",
        "x_row, n_parts * TILES - 1, row",
        "alone: without the last tile",
    ),
    Mutant(
        "for tile in range(n_parts * TILES)",
        "for tile in range(TILES)",
        "alone: only as much as one part, backward",
    ),
    Mutant(
        "if not all_arrived:\n        top, total",
        "if False:\n        top, total",
        "waiting in vain",
    ),
    Mutant(
        "if not all_arrived:\n        total",
        "if False:\n        total",
        "waiting in vain, backward",
    ),
    Mutant(
        "totals * tl.exp(tops - top)", "totals", "in parts: sums added with each its own maximum"
    ),
    Mutant(
        'tops = tl.where(ids < n_parts, tops, -float("inf"))',
        "pass",
        "in parts: 0 as the maximum of parts that do not exist",
    ),
    Mutant(
        "words_ptr += 2 * row * n_parts", "words_ptr += 2 * row", "in parts: words of other rows"
    ),
    Mutant("words_ptr += row * n_parts", "pass", "in parts: words of the first row, backward"),
    Mutant(
        "_tell(words_ptr + 2 * part + 1, tl.sum(sums))",
        "_tell(words_ptr + 2 * part + 1, tl.max(sums))",
        "in parts: the largest sum of a lane told",
    ),
    Mutant(
        "~number.to(BITS, bitcast=True)", "number.to(BITS, bitcast=True)", "0.0 told is not heard"
    ),
    Mutant(
        "row, part = (tl.program_id(0) // n_parts).to(tl.int64), tl.program_id(0) % n_parts\n"
        "    DTYPE: tl.constexpr = x_ptr",
        "row, part = tl.program_id(0) // n_parts, tl.program_id(0) % n_parts\n"
        "    DTYPE: tl.constexpr = x_ptr",
        "in parts: int32 rows",
    ),
    Mutant(
        "row, part = (tl.program_id(0) // n_parts).to(tl.int64), tl.program_id(0) % n_parts\n"
        "    DTYPE: tl.constexpr = y_ptr",
        "row, part = tl.program_id(0) // n_parts, tl.program_id(0) % n_parts\n"
        "    DTYPE: tl.constexpr = y_ptr",
        "in parts: int32 rows, backward",
    ),
    Mutant(
        "        top = tl.maximum(top, tl.max(ends))\n",
        "        top = top\n",
        "in parts: the maximum without the ends",
    ),
    Mutant("total += tl.sum(end_numerator)", "pass", "in parts: the sum without the ends"),
    Mutant(
        "total += tl.sum(end_y * end_dy)", "pass", "in parts: the gradient's sum without the ends"
    ),
    Mutant(
        "if t == 0 or t == TILES - 1:  # no other",
        "if t == 0:  # no other",
        "in parts: the last tile read beyond the row",
    ),
    Mutant(
        "        if t == 0 or t == TILES - 1:\n            tl.store(y_row",
        "        if t == 0:\n            tl.store(y_row",
        "in parts: the last tile written beyond the row",
    ),
    Mutant(
        "n_tiles = host.cdiv(n_cols, plan.block_n)",
        "n_tiles = max(1, n_cols // plan.block_n)",
        "in parts: the last columns forgotten",
    ),
    Mutant(
        '"TILES": host.cdiv(n_tiles, n_parts)',
        '"TILES": n_tiles // n_parts',
        "in parts: floor where ceil was meant",
    ),
    Mutant('"parts" if n_cols <= most else "eager"', '"parts"', "more parts than may run at once"),
    Mutant(
        "x if alike and x.data_ptr() % 16 == 0 else x.clone",
        "x if alike else x.clone",
        "in parts: rows of an unaligned x read from the boundary before",
    ),
    Mutant(
        "alike = x.is_contiguous() or x.stride(0) % v == x.shape[1] % v == 0",
        "alike = True",
        "in parts: rows apart read as if contiguous",
    ),
    Mutant(
        "y.copy_(softmax_eager(matrices, -1, scale, n_seq is not None)",
        "y.copy_(softmax_eager(matrices, -1, scale)",
        "eager: not causal",
    ),
    Mutant(
        "_softmax_backward_data(dy, y, -1, y.dtype) * scale",
        "_softmax_backward_data(dy, y, -1, y.dtype)",
        "eager: scale forward only",
    ),
    Mutant(
        "grad.view(-1, n_seq, n_cols).tril()",
        "grad.view(-1, n_seq, n_cols)",
        "eager: NaN in the gradient of what is left out",
    ),
    # --- the host
    Mutant(
        "return tl.float64 if dtype == torch.float64 else tl.float32",
        "return tl.float32",
        "float64 computed in float32",
    ),
    Mutant(
        "return x if x.stride(1) == 1 or x.shape[1] == 1 else x.contiguous()",
        "return x",
        "columns with gaps read side by side",
    ),
    # --- scale and causal
    Mutant(
        'x = tl.where(mask, x * SCALE, -float("inf"))',
        "x = x * SCALE",
        "-inf times a negative scale",
    ),
    Mutant(
        "    x = tl.where(col <= row",
        "    x = tl.where(col < row",
        "causal: a row does not see itself",
    ),
    Mutant(
        "    x = tl.where(col <= row % n_seq",
        "    x = tl.where(col <= row",
        "causal: rows of the next matrix see more",
    ),
    Mutant(
        "        first_col = pieces[2]\n        ends",
        "        first_col = 0\n        ends",
        "causal: from the boundary on",
    ),
    Mutant(
        "end_cols - first_col, at_ends", "end_cols, at_ends", "causal: ends from the boundary on"
    ),
    Mutant("dx = dx * SCALE", "pass", "scale: forward only"),
    Mutant(
        "dx = tl.where(col <= row % n_seq, dx, 0.0)",
        "pass",
        "causal: NaN in the gradient of what is left out",
    ),
    Mutant(
        "dx = _scored_grad(dx, row, cols - pieces[2], n_seq, SCALE)",
        "pass",
        "parts: scale and causal forward only",
    ),
    Mutant(
        "x = _scored(x, row, cols - pieces[2], whole, n_seq, SCALE)\n        y",
        "y",
        "parts: deaf to scale and causal",
    ),
    Mutant(
        "        x = _scored(x, row, cols - pieces[2], whole, n_seq, SCALE)\n        before",
        "        before",
        "alone: deaf to scale and causal",
    ),
    Mutant(
        "ends = _scored(ends, row, end_cols - pieces[2], at_ends, n_seq, SCALE)",
        "pass",
        "parts: ends deaf to scale and causal",
    ),
]
