"""Mutants of lib/ops/softmax.py."""

from lib.measure.mutants import Mutant

_LOAD_X = 'x = tl.load(x_ptr + x_offsets, mask=mask, other=-float("inf")).to(COMPUTE)'
_LOAD_PART = (
    'x = tl.load(x_ptr + row * stride_xm + cols, mask=mask, other=-float("inf")).to(COMPUTE)'
)

_WAIT = (
    "_wait_for_all(counters_ptr + 1 + row, n_parts)\n"
    "    if PHASE != 1:\n        ids = tl.arange(0, PARTS)\n        "
)
_WAIT_ELSEWHERE = _WAIT.replace("1 + row", "1 - row")

MUTANTS = [
    # --- rows in one tile
    Mutant(_LOAD_X, _LOAD_X.replace('-float("inf")', "0.0"), "the padding counted in the sum"),
    Mutant(_LOAD_X, _LOAD_X.replace("COMPUTE", "tl.bfloat16"), "computed in bfloat16"),
    Mutant("numerator = _exp(x - top)\n", "numerator = _exp(x)\n", "the maximum not taken off"),
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
    Mutant("n_rows, n_programs, num_stages", "n_rows, n_programs + 1, num_stages", "rows left out"),
    Mutant(
        "tl.store(y_ptr + y_offsets, numerator * (1.0 / total), mask=mask)",
        "tl.store(y_ptr + y_offsets, numerator * (1.0 / total), mask=inside)",
        "the mask of the columns dropped from the store",
    ),
    # --- rows that begin on no 16-byte boundary
    Mutant("top = tl.maximum(top, _row_max(ends))", "top = top", "the maximum without the ends"),
    Mutant("total += _row_sum(end_numerator)", "total = total", "the sum without the ends"),
    Mutant("end_numerator * (1.0 / total)", "end_numerator", "the ends not divided by the sum"),
    Mutant(
        "end = tl.where(inside, shift + n_cols, 0)",
        "end = shift + n_cols",
        "rows behind the last one read and written",
    ),
    Mutant(
        "whole = (piece >= shift) & (piece + V <= end)",
        "whole = (cols >= shift) & (cols < end)",
        "the ends counted twice",
    ),
    Mutant(
        "whole = (piece >= shift) & (piece + V <= end)",
        "whole = (piece >= shift) & (piece < end)",
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
        "end_y * (end_dy - total)", "end_y * end_dy", "the gradient of the ends without the sum"
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
        "dy = _rows_side_by_side(dy.reshape(-1, n_cols))",
        "dy = dy.reshape(-1, n_cols)",
        "a gradient of strides 0",
    ),
    Mutant(
        "    @_once\n",
        "    @staticmethod\n",
        "a second derivative that is wrong in silence",
    ),
    Mutant(
        "inputs, output: _save(ctx, output, *inputs[1:])",
        "inputs, output: _save(ctx, *inputs)",
        "compiled: x saved where y is needed",
    ),
    # --- rows in parts
    Mutant(_LOAD_PART, _LOAD_PART.replace('-float("inf")', "0.0"), "in parts: the padding counted"),
    Mutant(
        'numerator = _exp(x - tl.where(top == -float("inf"), 0.0, top))',
        "numerator = _exp(x - top)",
        "in parts: a part of -inf alone makes the row NaN",
    ),
    Mutant(
        "sums * tl.exp(tops - row_top)", "sums", "in parts: sums added with each its own maximum"
    ),
    Mutant(
        "1.0, tl.exp(top - row_top)) / total",
        "1.0, 1.0) / total",
        "in parts: its own quotients not rescaled",
    ),
    Mutant(
        "total = tl.sum(tl.where(sums == 0.0",
        "total = tl.max(tl.where(sums == 0.0",
        "in parts: only the largest sum",
    ),
    Mutant(
        "row_top = tl.max(tops, axis=0)",
        "row_top = tl.sum(tl.where(ids == 0, tops, 0.0), axis=0)",
        "in parts: the maximum of the first",
    ),
    Mutant(
        'return tl.where(mask, top, -float("inf")), total',
        "return top, total",
        "in parts: 0 as the maximum of parts that do not exist",
    ),
    Mutant(
        "stats = stats_ptr + 2 * row * n_parts",
        "stats = stats_ptr + 2 * row",
        "in parts: rows that write over each other's sums",
    ),
    Mutant(
        "stats = stats_ptr + row * n_parts",
        "stats = stats_ptr",
        "in parts: all rows with the sum of the last, backward",
    ),
    Mutant(
        "dx = y * (dy - tl.sum(sums, axis=0))",
        "dx = y * (dy - tl.sum(y * dy, axis=0))",
        "in parts: only its own sum, backward",
    ),
    Mutant(
        "return (ticket // n_parts).to(tl.int64), ticket % n_parts",
        "return ticket // n_parts, ticket % n_parts",
        "in parts: int32 rows",
    ),
    Mutant(
        "return (ticket // n_parts).to(tl.int64), ticket % n_parts",
        "return (ticket % n_parts).to(tl.int64), ticket // n_parts",
        "in parts: row and part mixed up",
    ),
    Mutant(
        "word = tl.load(stats + 2 * parts + 1,",
        "word = tl.load(stats + 2 * parts,",
        "in parts, float64: the maximum taken for the sum",
    ),
    Mutant(
        "n_parts = _cdiv(n_cols, block_n)",
        "n_parts = n_cols // block_n",
        "in parts: floor where ceil was meant",
    ),
    Mutant(
        "max(_PART, _power_of_2(_cdiv(n_cols, _MOST_PARTS)))",
        "_PART",
        "more parts than may run at once",
    ),
    Mutant(_WAIT + "tops", _WAIT_ELSEWHERE + "tops", "in parts: waiting at another row's counter"),
    Mutant(_WAIT + "sums", _WAIT_ELSEWHERE + "sums", "in parts: the same, backward"),
    Mutant(
        'ticket = tl.atomic_add(counters_ptr, 1, sem="relaxed")',
        'ticket = tl.atomic_add(counters_ptr + 1, 1, sem="relaxed")',
        "in parts: tickets from the counter of a row",
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
        "        first_col = rows * n_cols - base\n        ends",
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
        "dx = _scored_grad(dx, row, cols, n_seq, SCALE)",
        "pass",
        "parts: scale and causal forward only",
    ),
    Mutant(
        "x = _scored(x, row, cols, mask, n_seq, SCALE)", "pass", "parts: deaf to scale and causal"
    ),
]
