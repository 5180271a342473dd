"""Plausible wrong answers to the exercises of notebook 07, named <answer>__<why>: each must be rejected."""

from lib.tests.exercises.wrong_answers import solution, without_other

import torch
import triton
import triton.language as tl

_right = solution("07_softmax")
INF = float("inf")


def log_softmax__log_of_softmax(x):
    return torch.softmax(x, dim=-1).log()


def log_softmax__eager(x):
    return torch.log_softmax(x, dim=-1)


def log_softmax__maximum_by_torch(x):
    return _right.log_softmax(x - x.amax(-1, keepdim=True))


def log_softmax__maximum_forgotten(x):
    return x - x.exp().sum(-1, keepdim=True).log()


@triton.jit
def _log_softmax_kernel(x_ptr, y_ptr, n_cols, PADDING: tl.constexpr, BLOCK_N: tl.constexpr):
    cols = tl.arange(0, BLOCK_N)
    offsets = tl.program_id(0) * n_cols + cols
    x = tl.load(x_ptr + offsets, mask=cols < n_cols, other=PADDING).to(tl.float32)
    top = tl.max(x, axis=0)
    y = x - top - tl.log2(tl.sum(tl.exp(x - top), axis=0))
    if PADDING == 0.0:  # with the right logarithm, and the wrong padding
        y = x - top - tl.log(tl.sum(tl.exp(x - top), axis=0))
    tl.store(y_ptr + offsets, y, mask=cols < n_cols)


def _log_softmax(x, padding):
    y = torch.empty_like(x)
    block_n = triton.next_power_of_2(x.shape[1])
    _log_softmax_kernel[(x.shape[0],)](x, y, x.shape[1], PADDING=padding, BLOCK_N=block_n)
    return y


def log_softmax__padding_counts(x):
    return _log_softmax(x, 0.0)


def log_softmax__log2(x):
    return _log_softmax(x, -INF)


def log_softmax__rows_of_inf_alone_stay(x):
    return torch.where((x == -INF).all(-1, keepdim=True), x, _right.log_softmax(x))


log_softmax__maximum_and_logarithm_added_first = solution(
    "07_softmax",
    "    y = shifted - tl.log(tl.sum(tl.exp(shifted), axis=0))\n",
    "    y = x - (tl.max(x, axis=0) + tl.log(tl.sum(tl.exp(shifted), axis=0)))\n",
).log_softmax


log_softmax__zero_joins_the_maximum = solution(
    "07_softmax",
    "shifted = x - tl.max(x, axis=0)",
    "shifted = x - tl.max(tl.where(mask, x, 0.0), axis=0)",
).log_softmax


def _log_softmax_long(old, new):
    return solution("07_softmax", old, new).log_softmax_long


log_softmax_long__without_guard = _log_softmax_long(
    'zeros = tl.where(new_tops == -float("inf"), 0.0, new_tops)', "zeros = new_tops"
)
log_softmax_long__not_rescaled = _log_softmax_long(
    "sums = sums * tl.exp(tops - zeros) + tl.exp", "sums = sums + tl.exp"
)
log_softmax_long__merged_without_maxima = _log_softmax_long(
    "tl.sum(sums * tl.exp(tops - zero), axis=0)", "tl.sum(sums, axis=0)"
)
log_softmax_long__an_empty_column_has_zero_times_inf = _log_softmax_long(
    "tl.sum(sums * tl.exp(tops - zero), axis=0)",
    'tl.sum(sums * tl.exp(tl.where(tops == -float("inf"), 0.0, tops) - zero), axis=0)',
)
log_softmax_long__maximum_and_logarithm_added_first = _log_softmax_long(
    "x - zero - log_total", "x - (zero + log_total)"
)
log_softmax_long__maxima_start_at_0 = _log_softmax_long(
    'tops = tl.full((BLOCK_N,), -float("inf"), tl.float32)\n    sums',
    "tops = tl.full((BLOCK_N,), 0.0, tl.float32)\n    sums",
)
log_softmax_long__zero_joins_the_maxima = _log_softmax_long(
    "tl.maximum(tops, x)\n        zeros",
    "tl.maximum(tops, tl.where(cols < n_cols, x, 0.0))\n        zeros",
)
log_softmax_long__tiles_of_16384_columns = _log_softmax_long("min(4096,", "min(16384,")
log_softmax_long__one_tile_walked_twice = _log_softmax_long("min(4096,", "min(65536,")


def log_softmax_long__maximum_by_torch(x):
    return _right.log_softmax_long(x - x.amax(-1, keepdim=True))


def log_softmax_long__whole_rows(x):
    return _right.log_softmax(x)


@triton.jit
def _by_tile_kernel(x_ptr, y_ptr, n_cols, WALKS: tl.constexpr, BLOCK_N: tl.constexpr):
    x_ptr, y_ptr = x_ptr + tl.program_id(0) * n_cols, y_ptr + tl.program_id(0) * n_cols
    top, total = tl.full((), -float("inf"), tl.float32), tl.full((), 0.0, tl.float32)
    for _ in tl.static_range(WALKS - 1):  # with three, the first finds the maximum
        total = total * 0.0
        for start in range(0, n_cols, BLOCK_N):
            cols = start + tl.arange(0, BLOCK_N)
            x = tl.load(x_ptr + cols, mask=cols < n_cols, other=-float("inf")).to(tl.float32)
            before, top = top, tl.maximum(top, tl.max(x))
            zero = tl.where(top == -float("inf"), 0.0, top)
            total = total * tl.exp(before - zero) + tl.sum(tl.exp(x - zero))
    zero = tl.where(top == -float("inf"), 0.0, top)
    for start in range(0, n_cols, BLOCK_N):
        cols = start + tl.arange(0, BLOCK_N)
        x = tl.load(x_ptr + cols, mask=cols < n_cols, other=0.0).to(tl.float32)
        tl.store(y_ptr + cols, x - zero - tl.log(total), mask=cols < n_cols)


def _by_tile(x, walks):
    y = torch.empty_like(x)
    block_n = min(4096, triton.next_power_of_2(x.shape[1]))
    _by_tile_kernel[(x.shape[0],)](x, y, x.shape[1], WALKS=walks, BLOCK_N=block_n)
    return y


def log_softmax_long__three_walks(x):
    return _by_tile(x, 3)


def log_softmax_long__reduces_every_tile(x):
    return _by_tile(x, 2)


@triton.jit
def _backward_kernel(dy_ptr, y_ptr, dx_ptr, n_cols, HOW: tl.constexpr, BLOCK_N: tl.constexpr):
    cols = tl.arange(0, BLOCK_N)
    offsets, mask = tl.program_id(0) * n_cols + cols, cols < n_cols
    other = 1.0 if HOW == "padding" else 0.0
    dy = tl.load(dy_ptr + offsets, mask=mask, other=other).to(tl.float32)
    y = tl.load(y_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    if HOW == "softmax":
        dx = y * (dy - tl.sum(y * dy, axis=0))
    elif HOW == "logarithm":
        dx = dy - y * tl.sum(dy, axis=0)
    else:
        dx = dy - tl.exp(y) * tl.sum(dy, axis=0)
    tl.store(dx_ptr + offsets, dx, mask=mask)


def _log_softmax_backward(dy, y, how):
    dx, block_n = torch.empty_like(y), triton.next_power_of_2(y.shape[1])
    _backward_kernel[(y.shape[0],)](dy, y, dx, y.shape[1], HOW=how, BLOCK_N=block_n)
    return dx


def log_softmax_backward__that_of_softmax(dy, y):
    return _log_softmax_backward(dy, y, "softmax")


def log_softmax_backward__y_is_no_share(dy, y):
    return _log_softmax_backward(dy, y, "logarithm")


def log_softmax_backward__padding_counts(dy, y):
    return _log_softmax_backward(dy, y, "padding")


log_softmax_backward__sum_by_torch = solution(
    "07_softmax",
    "tl.sum(dy, axis=0)",
    "tl.load(sum_ptr + tl.program_id(0))",
    "(dy_ptr, y_ptr, dx_ptr,",
    "(dy_ptr, y_ptr, dx_ptr, sum_ptr,",
    "(dy, y, dx,",
    "(dy, y, dx, dy.float().sum(-1),",
).log_softmax_backward


def log_softmax_backward__eager(dy, y):
    return dy - y.exp() * dy.sum(-1, keepdim=True)


@triton.jit
def _prefix_kernel(
    x_ptr, lengths_ptr, y_ptr, n_cols, WHOLE: tl.constexpr, ZEROS: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    cols = tl.arange(0, BLOCK_N)
    offsets = tl.program_id(0) * n_cols + cols
    length, mask = tl.load(lengths_ptr + tl.program_id(0)), cols < n_cols
    if WHOLE:
        x = tl.load(x_ptr + offsets, mask=mask, other=-float("inf")).to(tl.float32)
        x = tl.where(cols < length, x, -float("inf"))
    else:
        x = tl.load(x_ptr + offsets, mask=cols < length, other=-float("inf")).to(tl.float32)
    numerator = tl.exp(x - tl.max(x, axis=0))
    y = numerator / tl.sum(numerator, axis=0)
    if ZEROS:
        y = tl.where(cols < length, y, 0.0)
    tl.store(y_ptr + offsets, y, mask=mask)


def _prefix(x, lengths, whole, zeros):
    y = torch.empty_like(x)
    block_n = triton.next_power_of_2(x.shape[1])
    _prefix_kernel[(x.shape[0],)](
        x, lengths, y, x.shape[1], WHOLE=whole, ZEROS=zeros, BLOCK_N=block_n
    )
    return y


def prefix_softmax__reads_whole_rows(x, lengths):
    return _prefix(x, lengths, True, True)


def prefix_softmax__nan_for_empty_rows(x, lengths):
    return _prefix(x, lengths, False, False)


def prefix_softmax__nan_behind_too(x, lengths):
    return _prefix(x, lengths, False, False).masked_fill((lengths == 0)[:, None], 0.0)


prefix_softmax__zeros_for_inf_alone = solution(
    "07_softmax",
    "    numerator = tl.exp(x - tl.max(x, axis=0))\n    y = tl.where(used,",
    "    top = tl.max(x, axis=0)\n"
    "    numerator = tl.exp(x - tl.where(top == -float('inf'), 0.0, top))\n"
    "    numerator = tl.where(top == -float('inf'), 0.0, numerator)\n"
    "    used = tl.where(top == -float('inf'), False, used)\n"
    "    y = tl.where(used,",
).prefix_softmax


prefix_softmax__zero_joins_the_maximum = solution(
    "07_softmax",
    "    numerator = tl.exp(x - tl.max(x, axis=0))\n    y = tl.where(used,",
    "    numerator = tl.exp(x - tl.max(tl.where(used, x, 0.0), axis=0))\n    y = tl.where(used,",
).prefix_softmax


def prefix_softmax__masked_after_softmax(x, lengths):
    behind = torch.arange(x.shape[1], device=x.device) >= lengths[:, None]
    return torch.softmax(x.nan_to_num(0.0), dim=-1).masked_fill(behind, 0.0)


def prefix_softmax__eager(x, lengths):
    behind = torch.arange(x.shape[1], device=x.device) >= lengths[:, None]
    return torch.softmax(x.masked_fill(behind, -INF), dim=-1).masked_fill(behind, 0.0)


def prefix_softmax__zeros_of_torch(x, lengths):
    return _right.prefix_softmax(x, lengths).add_(torch.zeros_like(x))


def prefix_softmax__one_column_too_many(x, lengths):
    return _right.prefix_softmax(x, (lengths + 1).clamp_max(x.shape[1]))


def _loads_first(old, new):
    return solution("07_softmax", old, new).loads_first_kernel


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
log_softmax_backward__undefined_lanes = without_other("07_softmax").log_softmax_backward


def _matrices(**other):
    return _right.matrices_that_show_it | other


matrices_that_show_it__too_small_to_overflow = _matrices(unshifted=[[88.0]])
matrices_that_show_it__more_numbers_than_needed = _matrices(unshifted=[[1.0, 89.0]])
matrices_that_show_it__a_power_of_two = _matrices(padded_with_zeros=[[1.0, 1.0]])
matrices_that_show_it__padding_far_below = _matrices(padded_with_zeros=[[50.0, 50.0, 50.0]])
matrices_that_show_it__one_row = _matrices(one_maximum=[[0.0, 200.0]])
matrices_that_show_it__rows_near_each_other = _matrices(one_maximum=[[0.0], [20.0]])
matrices_that_show_it__largest_first = _matrices(not_rescaled=[[1.0, 0.0]])
matrices_that_show_it__one_tile = _matrices(own_maxima=[[0.0, 1.0]])
matrices_that_show_it__equal_maxima = _matrices(own_maxima=[[1.0, 0.0, 1.0]])
matrices_that_show_it__nan_in_both = _matrices(without_guard=[[-INF, -INF]])
matrices_that_show_it__infinity_last = _matrices(without_guard=[[0.0, -INF]])
matrices_that_show_it__ragged = _matrices(one_maximum=[[0.0], [200.0, 1.0]])
matrices_that_show_it__a_row_alone = _matrices(unshifted=[89.0])
matrices_that_show_it__one_left_open = _matrices(own_maxima=None)
matrices_that_show_it__a_list = list(_right.matrices_that_show_it.values())


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
