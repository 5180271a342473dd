"""Plausible wrong answers to the exercises of notebook 48, named <answer>__<why>: each must be rejected."""

from lib.tests.exercises.wrong_answers import beside_an_empty_kernel, solution, without_other

import torch

_right = solution("48_attention_backward")


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


def join__nan_hidden(o_a, lse_a, o_b, lse_b):
    lse = torch.logaddexp(lse_a, lse_b)
    a, b = torch.exp(lse_a - lse), torch.exp(lse_b - lse)
    return (a[..., None] * o_a + b[..., None] * o_b).nan_to_num(0), lse


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
    return solution("48_attention_backward", *_changed["no_slope"]).capped_dq(*tensors)


def capped_dq__slope_of_the_capped(*tensors):
    return solution("48_attention_backward", *_changed["slope_of_the_capped"]).capped_dq(*tensors)


def capped_dq__slope_times_cap(*tensors):
    return solution("48_attention_backward", *_changed["slope_times_cap"]).capped_dq(*tensors)


def capped_dq__no_scale(*tensors):
    return solution("48_attention_backward", *_changed["no_scale"]).capped_dq(*tensors)


def capped_dq__no_delta(*tensors):
    return solution("48_attention_backward", *_changed["no_delta"]).capped_dq(*tensors)


def capped_dq__weights_not_capped(*tensors):
    return solution("48_attention_backward", *_changed["weights_not_capped"]).capped_dq(*tensors)


def capped_dq__by_autograd(q, k, v, o, lse, do, cap):
    q = q.clone().requires_grad_()
    scores = cap * torch.tanh(q @ k.T * q.shape[-1] ** -0.5 / cap)
    return torch.autograd.grad(torch.softmax(scores, 1) @ v, q, do)[0]


def capped_dq__softmax_of_the_tile(q, k, v, o, lse, do, cap):
    c = cap * torch.tanh(q @ k.T * q.shape[-1] ** -0.5 / cap)
    return _right.capped_dq(q, k, v, torch.softmax(c, 1) @ v, c.logsumexp(1, keepdim=True), do, cap)


def capped_dq__delta_of_the_tile(q, k, v, o, lse, do, cap):
    p = torch.exp(cap * torch.tanh(q @ k.T * q.shape[-1] ** -0.5 / cap) - lse)
    return _right.capped_dq(q, k, v, p @ v, lse, do, cap)


def capped_dq__lse_of_the_tile(q, k, v, o, lse, do, cap):
    c = cap * torch.tanh(q @ k.T * q.shape[-1] ** -0.5 / cap)
    return _right.capped_dq(q, k, v, o, c.logsumexp(1, keepdim=True), do, cap)


def join__overwrites_o(o_a, lse_a, o_b, lse_b):
    o, lse = _right.join(o_a, lse_a, o_b, lse_b)
    return o_a.copy_(o), lse


def join__in_float32(o_a, lse_a, o_b, lse_b):
    return tuple(t.float() for t in _right.join(o_a, lse_a, o_b, lse_b))


def capped_dq__overwrites_do(q, k, v, o, lse, do, cap):
    dq = _right.capped_dq(q, k, v, o, lse, do, cap)
    do.zero_()
    return dq


def _pages(*changes):
    return solution("48_attention_backward", *changes).attend_pages


attend_pages__slots_for_pages = _pages("kv_offsets = (page *", "kv_offsets = (slot *")
attend_pages__last_page_whole = _pages(
    "slot * PAGE + in_page < length", "slot * PAGE + in_page >= 0"
)
attend_pages__values_not_masked = _pages(
    "v = tl.load(v_ptr + kv_offsets, mask=seen[:, None], other=0.0)",
    "v = tl.load(v_ptr + kv_offsets)",
)
attend_pages__table_of_the_first_text = _pages(
    "table_ptr + text * n_slots + slot", "table_ptr + slot"
)
attend_pages__scores_not_masked = _pages('tl.where(seen[None, :], s, -float("inf"))', "s")
attend_pages__one_entry_too_many = _pages("tl.cdiv(length, PAGE)", "length // PAGE + 1")
attend_pages__natural_exponent = _pages("d**-0.5 * 1.4426950408889634", "d**-0.5")
attend_pages__offsets_of_32_bits = _pages("+ slot).to(tl.int64)", "+ slot)")
attend_pages__tf32 = _pages('input_precision="ieee"', 'input_precision="tf32"')
attend_pages__no_maximum = _pages("tl.maximum(top, tl.max(s, axis=1))", "tl.maximum(top, 0.0)")
attend_pages__undefined_lanes = without_other("48_attention_backward").attend_pages


def attend_pages__eager(q, k_pages, v_pages, table, lengths):
    rows = []
    for text, length in enumerate(lengths.tolist()):
        at = table[text, : -(-length // 16)].long()
        k, v = (pages[at].flatten(0, 1)[:length] for pages in (k_pages, v_pages))
        rows.append(torch.softmax(q[text] @ k.T * q.shape[2] ** -0.5, -1) @ v)
    return torch.stack(rows)


attend_pages__eager_beside_an_empty_kernel = beside_an_empty_kernel(attend_pages__eager)
