"""Plausible wrong answers to the exercises of notebook 32, named <answer>__<why>: each must be rejected."""

from lib.tests.exercises.wrong_answers import solution

import triton
import triton.language as tl

_right = solution("32_softmax_any_width")


def _loads_first(old, new):
    return solution("32_softmax_any_width", old, new).loads_first_kernel


loads_first_kernel__reduces_every_tile = _loads_first(
    "tl.maximum(tops, x)\n    top,", "tl.maximum(tops, tl.max(x))\n    top,"
)
loads_first_kernel__loads_twice = _loads_first(
    "        sums += tl.exp(held[t] - zero)",
    "        cols = (t * n_parts + part) * BLOCK_N + tl.arange(0, BLOCK_N)\n"
    "        x = tl.load(x_row + cols, mask=cols < n_cols, other=-float('inf')).to(tl.float32)\n"
    "        sums += tl.exp(x - zero)",
)
loads_first_kernel__reduces_every_tile_behind_its_loads = _loads_first(
    "        held, tops = held + (x,), tl.maximum(tops, x)\n",
    "        held = held + (x,)\n    for t in tl.static_range(TILES):\n"
    "        tops = tl.maximum(tops, tl.max(held[t]))\n",
)
loads_first_kernel__without_guard = _loads_first(
    'zero = tl.where(top == -float("inf"), 0.0, top)\n    for t', "zero = top\n    for t"
)
loads_first_kernel__words_of_no_part_join_the_maximum = _loads_first(
    'tops = tl.where(tl.arange(0, PARTS) < n_parts, tops, -float("inf"))', "tops = tops"
)
loads_first_kernel__reads_no_row_alone = _loads_first("if not all_arrived:", "if False:")
loads_first_kernel__one_part_only = _loads_first("(t * n_parts + part)", "(t * n_parts)")


def _negate(old, new):
    return solution("32_softmax_any_width", old, new).negate_kernel


negate_kernel__masks_of_single_columns = _negate(
    "whole = (cols // V >= (shift + V - 1) // V) & (cols // V < (shift + n_cols) // V)",
    "whole = (cols >= (shift + V - 1) // V * V) & (cols < shift + n_cols - (shift + n_cols) % V)",
)
negate_kernel__columns_from_the_row_on = _negate(
    "shift, first = begin % V, begin // V * V", "shift, first = begin * 0, begin"
)
negate_kernel__shared_pieces_stored_whole = _negate(
    "(cols // V >= (shift + V - 1) // V) & (cols // V < (shift + n_cols) // V)",
    "(cols // V >= shift // V) & (cols // V < (shift + n_cols + V - 1) // V)",
)
_ONE_PIECE = "whole = (cols // V == (shift + V - 1) // V) & (cols // V < (shift + n_cols) // V)"
negate_kernel__one_whole_piece_a_row = _negate(
    "whole = (cols // V >= (shift + V - 1) // V) & (cols // V < (shift + n_cols) // V)", _ONE_PIECE
)
negate_kernel__one_whole_piece_loaded = _negate(
    "x = tl.load(x_ptr + first + cols, mask=whole)\n",
    "piece = cols // V == (shift + V - 1) // V\n"
    "    x = tl.load(x_ptr + first + cols, mask=whole & piece)\n"
    "    own = (cols >= shift) & (cols < shift + n_cols)\n"
    "    x = tl.load(x_ptr + first + cols, mask=own & ~(whole & piece), other=x)\n",
)
negate_kernel__ends_forgotten = _negate("& ~whole", "& ~whole & (cols < 0)")
negate_kernel__stored_twice = _negate("& ~whole", "")
negate_kernel__first_row_alone = _negate("begin % V, begin", "begin * 0, begin")


@triton.jit
def negate_kernel__one_by_one(x_ptr, y_ptr, n_cols, V: tl.constexpr, BLOCK_N: tl.constexpr):
    cols = tl.arange(0, BLOCK_N)
    offsets = tl.program_id(0).to(tl.int64) * n_cols + cols
    tl.store(y_ptr + offsets, -tl.load(x_ptr + offsets, mask=cols < n_cols), mask=cols < n_cols)


negate_kernel__wide_stores_alone = _negate(
    "x = tl.load(x_ptr + first + cols, mask=whole)\n",
    "x = tl.load(x_ptr + first + cols, mask=(cols >= shift) & (cols < shift + n_cols))\n",
)


def elements_stored_one_by_one__what_the_neighbour_has(row, n_cols, v):
    return row * n_cols % v + (row + 1) * n_cols % v


def elements_stored_one_by_one__both_ends_always(row, n_cols, v):
    return n_cols - max(0, n_cols // v - 1) * v


def elements_stored_one_by_one__short_rows_forgotten(row, n_cols, v):
    start, end = row * n_cols, (row + 1) * n_cols
    return n_cols - (end // v - -(-start // v)) * v


def elements_stored_one_by_one__begins_are_forgotten(row, n_cols, v):
    return n_cols % v


def elements_stored_one_by_one__of_the_first_row(row, n_cols, v):
    return _right.elements_stored_one_by_one(0, n_cols, v)
