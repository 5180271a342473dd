"""Plausible wrong answers to the exercises of notebook 45, named <answer>__<why>: each must be rejected."""

from lib.tests.exercises.wrong_answers import beside_an_empty_kernel, solution, without_other

import torch

_right = solution("45_attention")
INF = float("inf")


def count_tiles__all_visited(n, block_m, block_n):
    whole, masked = _right.count_tiles(n, block_m, block_n)
    return whole, -(-n // block_m) * -(-n // block_n) - whole


def count_tiles__tiles_on_the_diagonal_have_one_index(n, block_m, block_n):
    rows = -(-n // block_m)
    return rows * (rows - 1) // 2, rows


def count_tiles__last_query_sees_one_key_less(n, block_m, block_n):
    whole, _ = _right.count_tiles(n, block_m, block_n)
    visited = sum(-(-(min(i + block_m, n) - 1) // block_n) for i in range(0, n, block_m))
    return whole, visited - whole


def count_tiles__whole_by_the_last_query(n, block_m, block_n):
    whole = sum(min(i + block_m, n) // block_n for i in range(0, n, block_m))
    return whole, sum(_right.count_tiles(n, block_m, block_n)) - whole


def count_tiles__first_query_sees_no_key(n, block_m, block_n):
    whole = sum(i // block_n for i in range(0, n, block_m))
    return whole, sum(_right.count_tiles(n, block_m, block_n)) - whole


def count_tiles__beyond_the_last_key_without_a_mask(n, block_m, block_n):
    whole, masked = _right.count_tiles(n, block_m, block_n)
    alone = n % block_m == 1 and n % block_n == 1
    return (whole + 1, masked - 1) if alone else (whole, masked)


def window_attention__eager(q, k, v, left):
    i = torch.arange(q.shape[1], device=q.device)
    visible = (i[None, :] <= i[:, None]) & (i[None, :] >= i[:, None] - left)
    scores = q @ k.mT * q.shape[-1] ** -0.5
    return torch.softmax(scores.masked_fill(~visible, -INF), -1) @ v


def window_attention__no_window(q, k, v, left):
    return _right.window_attention(q, k, v, q.shape[1])


window_attention__one_key_too_few = solution(
    "45_attention", ">= rows[:, None] - left)", "> rows[:, None] - left)"
).window_attention
window_attention__looks_ahead = solution(
    "45_attention", "(cols[None, :] <= rows[:, None]) & (cols", "(cols[None, :] < n_rows) & (cols"
).window_attention
window_attention__nan_in_the_first_tile = solution(
    "45_attention", 'tl.where(new_top == -float("inf"), 0.0, new_top)', "new_top"
).window_attention
window_attention__all_tiles_from_the_first = solution(
    "45_attention", "tl.maximum(tl.program_id(0) * BLOCK_M - left, 0) // BLOCK_N * BLOCK_N", "0"
).window_attention
window_attention__all_tiles_to_the_last = solution(
    "45_attention", "tl.minimum(n_rows, (tl.program_id(0) + 1) * BLOCK_M)", "n_rows"
).window_attention
window_attention__begins_within_a_tile = solution(
    "45_attention",
    "BLOCK_M - left, 0) // BLOCK_N * BLOCK_N",
    "BLOCK_M - left, 0) // BLOCK_N * BLOCK_N + 1",
).window_attention
window_attention__natural_exponent = solution(
    "45_attention", "d**-0.5 * 1.4426950408889634", "d**-0.5"
).window_attention
window_attention__o_not_rescaled = solution(
    "45_attention", "o * shrink[:, None], input", "o, input"
).window_attention
window_attention__tf32 = solution(
    "45_attention", 'input_precision="ieee"', 'input_precision="tf32"'
).window_attention
window_attention__a_hidden_tile_where_left_is_a_multiple_of_32 = solution(
    "45_attention",
    "tl.maximum(tl.program_id(0) * BLOCK_M - left, 0) // BLOCK_N * BLOCK_N",
    "tl.maximum(tl.program_id(0) * BLOCK_M - left - 1, 0) // BLOCK_N * BLOCK_N",
).window_attention
window_attention__undefined_lanes = without_other("45_attention").window_attention


@beside_an_empty_kernel
def window_attention__eager_beside_an_empty_kernel(q, k, v, left):
    rows = torch.arange(q.shape[1], device=q.device)[:, None]
    seen = (rows >= rows.T) & (rows - left <= rows.T)
    scores = q @ k.mT * q.shape[-1] ** -0.5
    return torch.softmax(scores.masked_fill(~seen, -INF), -1) @ v


window_attention__no_maximum = solution(
    "45_attention", "tl.maximum(top, tl.max(s, axis=1))", "tl.maximum(top, 0.0)"
).window_attention


def attend_one_behind__in_turns(q, k, v, n):
    top, total, o = q.new_full((len(q), 1), -INF), q.new_zeros(len(q), 1), torch.zeros_like(q)
    for first in range(0, len(k), n):
        s = q @ k[first : first + n].T * q.shape[-1] ** -0.5
        new_top = torch.maximum(top, s.amax(1, keepdim=True))
        p, shrink = torch.exp(s - new_top), torch.exp(top - new_top)
        total = total * shrink + p.sum(1, keepdim=True)
        o = o * shrink + p @ v[first : first + n]
        top = new_top
    return o / total, top + total.log()


def attend_one_behind__all_scores_first(q, k, v, n):
    pieces = [q @ some.T * q.shape[-1] ** -0.5 for some in k.split(n)]
    top = torch.cat(pieces, 1).amax(1, keepdim=True)
    ps = [torch.exp(s - top) for s in pieces]
    total = sum(p.sum(1, keepdim=True) for p in ps)
    return sum(p @ some for p, some in zip(ps, v.split(n))) / total, top + total.log()


def attend_one_behind__whole(q, k, v, n):
    scores = q @ k.T * q.shape[-1] ** -0.5
    return scores.softmax(1) @ v, scores.logsumexp(1, keepdim=True)


def _one_behind(*changes):
    return solution("45_attention", *changes).attend_one_behind


attend_one_behind__not_shrunk = _one_behind("        o = o * shrink\n", "")
attend_one_behind__shrunk_before = _one_behind(
    "            o = o + p @ v[first - n : first]\n", "            behind = p @ v[first - n : first]\n",
    "        o = o * shrink\n", "        o = o * shrink + (behind if first else 0)\n",
)  # fmt: skip
attend_one_behind__last_forgotten = _one_behind("    o = o + p @ v[first:]\n", "")
attend_one_behind__product_behind_the_softmax = _one_behind(
    "        if p is not None:\n            o = o + p @ v[first - n : first]\n", "        old = p\n",
    "        o = o * shrink\n",
    "        o = (o if old is None else o + old @ v[first - n : first]) * shrink\n",
)  # fmt: skip
attend_one_behind__values_of_this_tile = _one_behind("v[first - n : first]", "v[first : first + n]")
