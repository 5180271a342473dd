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


def join__mean(o_a, lse_a, o_b, lse_b):
    return (o_a + o_b) / 2, torch.logaddexp(lse_a, lse_b)


def join__not_shifted(o_a, lse_a, o_b, lse_b):
    a, b = lse_a.exp(), lse_b.exp()
    o = (a[..., None] * o_a + b[..., None] * o_b) / (a + b)[..., None]
    return o, (a + b).log()


def join__nan_without_keys(o_a, lse_a, o_b, lse_b):
    top = torch.maximum(lse_a, lse_b)
    a, b = torch.exp(lse_a - top), torch.exp(lse_b - top)
    o = (a[..., None] * o_a + b[..., None] * o_b) / (a + b)[..., None]
    return o, top + torch.log(a + b)


def join__sum_not_divided(o_a, lse_a, o_b, lse_b):
    o, lse = _right.join(o_a, lse_a, o_b, lse_b)
    a, b = torch.exp(lse_a - lse), torch.exp(lse_b - lse)
    return o * (a + b + 1)[..., None].nan_to_num(1.0), lse


def join__parts_swapped(o_a, lse_a, o_b, lse_b):
    return _right.join(o_b, lse_a, o_a, lse_b)


def join__lse_is_the_larger(o_a, lse_a, o_b, lse_b):
    return _right.join(o_a, lse_a, o_b, lse_b)[0], torch.maximum(lse_a, lse_b)


def join__base_two(o_a, lse_a, o_b, lse_b):
    lse = torch.maximum(lse_a, lse_b).nan_to_num(neginf=0.0)
    a, b = torch.exp2(lse_a - lse), torch.exp2(lse_b - lse)
    total = torch.where(a + b == 0, 1.0, a + b)
    o = (a[..., None] * o_a + b[..., None] * o_b) / total[..., None]
    return o, _right.join(o_a, lse_a, o_b, lse_b)[1]


_changed = {
    "no_slope": (" * (1 - t * t)", ""),
    "slope_of_the_capped": ("(1 - t * t)", "(1 - (cap * t) ** 2)"),
    "slope_times_cap": ("(1 - t * t)", "(1 - t * t) * cap"),
    "no_scale": ("return scale * ds @ k", "return ds @ k"),
    "no_delta": ("(do @ v.T - delta)", "(do @ v.T)"),
    "weights_not_capped": ("torch.exp(cap * t - lse)", "torch.exp(scale * q @ k.T - lse)"),
}


def capped_dq__no_slope(*tensors):
    return solution("45_attention", *_changed["no_slope"]).capped_dq(*tensors)


def capped_dq__slope_of_the_capped(*tensors):
    return solution("45_attention", *_changed["slope_of_the_capped"]).capped_dq(*tensors)


def capped_dq__slope_times_cap(*tensors):
    return solution("45_attention", *_changed["slope_times_cap"]).capped_dq(*tensors)


def capped_dq__no_scale(*tensors):
    return solution("45_attention", *_changed["no_scale"]).capped_dq(*tensors)


def capped_dq__no_delta(*tensors):
    return solution("45_attention", *_changed["no_delta"]).capped_dq(*tensors)


def capped_dq__weights_not_capped(*tensors):
    return solution("45_attention", *_changed["weights_not_capped"]).capped_dq(*tensors)


def capped_dq__by_autograd(q, k, v, o, lse, do, cap):
    q = q.clone().requires_grad_()
    scores = cap * torch.tanh(q @ k.T * q.shape[-1] ** -0.5 / cap)
    return torch.autograd.grad(torch.softmax(scores, 1) @ v, q, do)[0]


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


def join__overwrites_o(o_a, lse_a, o_b, lse_b):
    o, lse = _right.join(o_a, lse_a, o_b, lse_b)
    return o_a.copy_(o), lse


def join__in_float32(o_a, lse_a, o_b, lse_b):
    return tuple(t.float() for t in _right.join(o_a, lse_a, o_b, lse_b))


def capped_dq__overwrites_do(q, k, v, o, lse, do, cap):
    dq = _right.capped_dq(q, k, v, o, lse, do, cap)
    do.zero_()
    return dq


window_attention__no_maximum = solution(
    "45_attention", "tl.maximum(top, tl.max(s, axis=1))", "tl.maximum(top, 0.0)"
).window_attention
