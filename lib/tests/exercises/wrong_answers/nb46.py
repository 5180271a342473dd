"""Plausible wrong answers to the exercises of notebook 46, named <answer>__<why>: each must be rejected."""

from lib.tests.exercises.wrong_answers import beside_an_empty_kernel, solution

import torch
import torch.nn.functional as F

_NAME = "46_linear_cross_entropy"


def _rows(n_cols, itemsize):
    return -(-n_cols * itemsize // 16) * 16


def rows_of_chunk__no_padding(budget, n_rows, n_cols, itemsize):
    return min(n_rows, max(128, budget // (n_cols * itemsize) // 128 * 128))


def rows_of_chunk__no_least(budget, n_rows, n_cols, itemsize):
    return min(n_rows, budget // _rows(n_cols, itemsize) // 128 * 128)


def rows_of_chunk__more_than_there_are(budget, n_rows, n_cols, itemsize):
    return max(128, budget // _rows(n_cols, itemsize) // 128 * 128)


def rows_of_chunk__no_steps(budget, n_rows, n_cols, itemsize):
    return min(n_rows, max(128, budget // _rows(n_cols, itemsize)))


def rows_of_chunk__rounded_up(budget, n_rows, n_cols, itemsize):
    return min(n_rows, -(-budget // _rows(n_cols, itemsize) // 128) * 128)


def rows_of_chunk__all_rows_cut_to_steps(budget, n_rows, n_cols, itemsize):
    return max(128, min(n_rows, budget // _rows(n_cols, itemsize)) // 128 * 128)


def rows_of_chunk__padded_to_16_elements(budget, n_rows, n_cols, itemsize):
    stride = -(-n_cols // 16) * 16 * itemsize
    return min(n_rows, max(128, budget // stride // 128 * 128))


def rows_of_chunk__all_rows_where_they_fit(budget, n_rows, n_cols, itemsize):
    fit = budget // _rows(n_cols, itemsize)
    return n_rows if fit >= n_rows else min(n_rows, max(128, fit // 128 * 128))


def rows_of_chunk__bits(budget, n_rows, n_cols, itemsize):
    return min(n_rows, max(128, budget // (8 * _rows(n_cols, itemsize)) // 128 * 128))


def rows_of_chunk__one_step_always(budget, n_rows, n_cols, itemsize):
    return min(n_rows, 128)


def rows_of_chunk__a_float(budget, n_rows, n_cols, itemsize):
    return min(n_rows, max(128, budget / _rows(n_cols, itemsize) // 128 * 128)) * 1.0


def rows_of_chunk__nothing_behind_the_last_row(budget, n_rows, n_cols, itemsize):
    unused = _rows(n_cols, itemsize) - n_cols * itemsize
    return min(n_rows, max(128, (budget + unused) // _rows(n_cols, itemsize) // 128 * 128))


_SLOPE = "(1 - tanh * tanh)"
capped_loss__no_slope = solution(_NAME, _SLOPE, "1").capped_loss
capped_loss__slope_not_squared = solution(_NAME, _SLOPE, "(1 - tanh)").capped_loss
capped_loss__slope_times_cap = solution(_NAME, _SLOPE, "cap * (1 - tanh * tanh)").capped_loss
capped_loss__slope_over_cap = solution(_NAME, _SLOPE, "(1 - tanh * tanh) / cap").capped_loss
capped_loss__slope_of_the_capped = solution(
    _NAME, _SLOPE, "(1 - torch.tanh(tanh) ** 2)"
).capped_loss
capped_loss__no_label = solution(
    _NAME, "    return loss", "    d = torch.softmax(cap * tanh, -1)\n    return loss"
).capped_loss
capped_loss__not_the_mean = solution(_NAME, "d / len(d) * ", "d * ").capped_loss
capped_loss__softmax_without_cap = solution(
    _NAME, "d = torch.softmax(cap * tanh, -1)", "d = torch.softmax(wide, -1)"
).capped_loss
capped_loss__loss_without_cap = solution(
    _NAME, "loss = F.cross_entropy(cap * tanh, labels)", "loss = F.cross_entropy(wide, labels)"
).capped_loss


def capped_loss__clamped(logits, labels, cap):
    """A cap that is not soft."""
    leaf = logits.float().clamp(-cap, cap)
    d = torch.softmax(leaf, -1)
    d[torch.arange(len(d), device=d.device), labels] -= 1
    inside = logits.float().abs() < cap
    return F.cross_entropy(leaf, labels), (d / len(d) * inside).to(logits.dtype)


def capped_loss__by_autograd(logits, labels, cap):
    leaf = logits.detach().requires_grad_()
    loss = F.cross_entropy(cap * torch.tanh(leaf.float() / cap), labels)
    return loss.detach(), torch.autograd.grad(loss, leaf)[0]


def capped_loss__the_loss_alone(logits, labels, cap):
    return F.cross_entropy(cap * torch.tanh(logits.float() / cap), labels)


def _dw(instead):
    """The solution with another product."""
    return solution(_NAME, "(d.half().t() @ x).float() / len(x)", instead).dw_in_float16


dw_in_float16__divided_before = _dw("((d / len(x)).half().t() @ x).float()")
dw_in_float16__divided_in_float16 = _dw("((d.half().t() @ x) / len(x)).float()")
dw_in_float16__x_divided = _dw("(d.half().t() @ (x / len(x))).float()")
dw_in_float16__not_divided = _dw("(d.half().t() @ x).float()")
dw_in_float16__in_float32 = _dw("(d.t() @ x.float()) / len(x)")
dw_in_float16__returns_float16 = _dw("(d.half().t() @ x) / len(x)")
dw_in_float16__no_label = _dw("(torch.softmax(logits, -1).t() @ x).float() / len(x)")
dw_in_float16__transposed = _dw("(x.t() @ d.half()).float() / len(x)")
dw_in_float16__divided_by_the_vocabulary = _dw("(d.half().t() @ x).float() / d.shape[1]")


smoothed_loss__padding_of_minus_infinity = solution(
    _NAME, "tl.where(cols < n_cols, z, 0.0)", "z"
).smoothed_loss
smoothed_loss__mean_over_the_padded_row = solution(
    _NAME, "s * plain / n_cols", "s * plain / (tl.cdiv(n_cols, BLOCK_SIZE) * BLOCK_SIZE)"
).smoothed_loss
smoothed_loss__sum_and_not_mean = solution(_NAME, "s * plain / n_cols", "s * plain").smoothed_loss
smoothed_loss__whole_label = solution(_NAME, "(1 - s) * at_label", "at_label").smoothed_loss
smoothed_loss__no_smoothing = solution(
    _NAME, "(1 - s) * at_label - s * plain / n_cols", "at_label"
).smoothed_loss
smoothed_loss__sum_rescaled = solution(
    _NAME, "plain += ", "plain = plain * tl.exp(top - new_top) + "
).smoothed_loss
smoothed_loss__total_not_rescaled = solution(
    _NAME, "total * tl.exp(top - new_top)", "total"
).smoothed_loss
smoothed_loss__no_maximum = solution(
    _NAME, "new_top = tl.maximum(top, tl.max(z, axis=0))", "new_top = tl.full((), 0.0, tl.float32)"
).smoothed_loss
smoothed_loss__first_tile_alone = solution(
    _NAME, "for start in range(0, n_cols, BLOCK_SIZE):", "for start in range(0, 1):"
).smoothed_loss
_SECOND_WALK = """    for start in range(0, n_cols, BLOCK_SIZE):
        cols = start + tl.arange(0, BLOCK_SIZE)
        plain += 0 * tl.sum(tl.load(logits_ptr + cols, mask=cols < n_cols, other=0.0), axis=0)
    s = tl.cast("""
smoothed_loss__two_walks = solution(_NAME, "    s = tl.cast(", _SECOND_WALK).smoothed_loss


def smoothed_loss__by_pytorch(logits, labels, smoothing):
    return F.cross_entropy(logits.float(), labels, reduction="none", label_smoothing=smoothing)


@beside_an_empty_kernel
def smoothed_loss__eager_beside_an_empty_kernel(logits, labels, smoothing):
    return F.cross_entropy(
        logits.float(), labels, reduction="none", label_smoothing=float(smoothing)
    )


def dw_in_float16__overwrites_x(x, logits, labels):
    dw = solution(_NAME).dw_in_float16(x, logits, labels)
    x.zero_()
    return dw
