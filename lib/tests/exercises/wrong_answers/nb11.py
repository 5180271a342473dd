"""Plausible wrong answers to the exercises of notebook 11, named <answer>__<why>: each must be rejected."""

from lib.exercises.nb11 import Standardize, step_and_wait
from lib.tests.exercises.wrong_answers import solution

import torch
from torch import nn

_right = solution("11_dlrm_paper_cuts")

waiting_lines__only_the_if = (6,)
waiting_lines__the_comparison_in_where = (3, 4, 6)
waiting_lines__shape_too = (1, 3, 6)
waiting_lines__none = ()
waiting_lines__every_line = tuple(range(1, 9))
waiting_lines__not_numbers = ("y.max()",)
waiting_lines__no_such_line = (3, 6, 9)


sgd_step__as_it_was = step_and_wait


def _all_finite(gradients):
    return torch.stack([g.isfinite().all() for g in gradients]).all()


def sgd_step__a_factor_of_zero(parameters, gradients, lr):
    factor = lr * _all_finite(gradients)
    return [p - factor * g for p, g in zip(parameters, gradients)]


def sgd_step__each_parameter_by_itself(parameters, gradients, lr):
    return [torch.where(g.isfinite().all(), p - lr * g, p) for p, g in zip(parameters, gradients)]


def sgd_step__each_element_by_itself(parameters, gradients, lr):
    return [torch.where(g.isfinite(), p - lr * g, p) for p, g in zip(parameters, gradients)]


def sgd_step__nan_alone(parameters, gradients, lr):
    good = ~torch.stack([g.isnan().any() for g in gradients]).any()
    return [torch.where(good, p - lr * g, p) for p, g in zip(parameters, gradients)]


def sgd_step__by_a_norm_that_overflows(parameters, gradients, lr):
    finite = torch.stack([g.square().sum() for g in gradients]).sum().isfinite()
    return [torch.where(finite, p - lr * g, p) for p, g in zip(parameters, gradients)]


def sgd_step__by_a_sum_of_maxima_that_overflows(parameters, gradients, lr):
    finite = sum(g.abs().max() for g in gradients).isfinite()
    return [torch.where(finite, p - lr * g, p) for p, g in zip(parameters, gradients)]


def sgd_step__first_gradient_alone(parameters, gradients, lr):
    finite = gradients[0].isfinite().all()
    return [torch.where(finite, p - lr * g, p) for p, g in zip(parameters, gradients)]


def sgd_step__bool_of_a_tensor(parameters, gradients, lr):
    finite = bool(_all_finite(gradients))
    return [p - lr * g if finite else p for p, g in zip(parameters, gradients)]


def sgd_step__never_skipped(parameters, gradients, lr):
    return [p - lr * g for p, g in zip(parameters, gradients)]


def sgd_step__one_tensor(parameters, gradients, lr):
    return torch.cat([p.flatten() for p in step_and_wait(parameters, gradients, lr)])


class OneSearch__between_2_to_the_32(_right.OneSearch):
    def __init__(self, vocabularies):
        super().__init__(vocabularies)
        self.shift //= 2
        self.keys = torch.cat([v + s for v, s in zip(vocabularies, self.shift)])


class OneSearch__one_vocabulary_for_all(_right.OneSearch):
    def __init__(self, vocabularies):
        super().__init__(vocabularies)
        self.shift *= 0
        self.keys = torch.cat(vocabularies).sort().values


class OneSearch__places_among_all(_right.OneSearch):
    def forward(self, ids):
        rows = super().forward(ids)
        return torch.where(rows > 0, rows + self.first, 0)


class OneSearch__no_clamp(_right.OneSearch):
    def forward(self, ids):
        key = ids + self.shift
        place = torch.searchsorted(self.keys, key)
        return torch.where(self.keys[place] == key, place - self.first + 1, 0)


class OneSearch__unseen_to_a_neighbour(_right.OneSearch):
    def forward(self, ids):
        return torch.searchsorted(self.keys, ids + self.shift) - self.first + 1


class OneSearch__row_0_for_a_real_token(_right.OneSearch):
    def forward(self, ids):
        return (super().forward(ids) - 1).clamp(min=0)


class OneSearch__a_search_for_each(_right.OneSearch):
    def forward(self, ids):
        columns = [super(type(self), self).forward(ids)[:, k] for k in range(ids.shape[1])]
        return torch.stack(columns, dim=1)


class OneSearch__compares_with_all(_right.OneSearch):
    def forward(self, ids):
        matches = (ids + self.shift)[..., None] == self.keys
        place = matches.long().argmax(-1)
        return torch.where(matches.any(-1), place - self.first + 1, 0)


class OneSearch__dictionaries(nn.Module):
    def __init__(self, vocabularies):
        super().__init__()
        self.tables = [{t: k + 1 for k, t in enumerate(v.tolist())} for v in vocabularies]

    def forward(self, ids):
        rows = [[t.get(i, 0) for t, i in zip(self.tables, row)] for row in ids.tolist()]
        return torch.tensor(rows, dtype=torch.int64, device=ids.device).view(ids.shape)


class OneSearch__mask_as_an_index(_right.OneSearch):
    def forward(self, ids):
        key = ids + self.shift
        place = torch.searchsorted(self.keys, key).clamp(max=len(self.keys) - 1)
        rows = place - self.first + 1
        rows[(self.keys[place] != key).nonzero(as_tuple=True)] = 0
        return rows


class OneSearch__int32(_right.OneSearch):
    def forward(self, ids):
        return super().forward(ids).int()


OnDevice__as_it_was = Standardize


class OnDevice__list_still_copied(nn.Module):
    def __init__(self, mean, deviation):
        super().__init__()
        self.mean = mean
        self.register_buffer("deviation", torch.tensor(deviation))

    def forward(self, dense):
        return ((dense - dense.new_tensor(self.mean)) / self.deviation).clamp(-5.0, 5.0)


class OnDevice__attribute_still_copied(nn.Module):
    def __init__(self, mean, deviation):
        super().__init__()
        self.register_buffer("mean", torch.tensor(mean))
        self.deviation = torch.tensor(deviation)

    def forward(self, dense):
        return ((dense - self.mean) / self.deviation.to(dense)).clamp(-5.0, 5.0)


class OnDevice__kept_by_the_first_call(nn.Module):
    def __init__(self, mean, deviation):
        super().__init__()
        self.numbers, self.cache = (mean, deviation), {}

    def forward(self, dense):
        if dense.device not in self.cache:
            self.cache[dense.device] = [torch.tensor(n, device=dense.device) for n in self.numbers]
        mean, deviation = self.cache[dense.device]
        return ((dense - mean) / deviation).clamp(-5.0, 5.0)


class OnDevice__parameters(nn.Module):
    def __init__(self, mean, deviation):
        super().__init__()
        self.mean = nn.Parameter(torch.tensor(mean))
        self.deviation = nn.Parameter(torch.tensor(deviation))

    def forward(self, dense):
        return ((dense - self.mean) / self.deviation).clamp(-5.0, 5.0)


class OnDevice__not_saved(nn.Module):
    def __init__(self, mean, deviation):
        super().__init__()
        self.register_buffer("mean", torch.tensor(mean), persistent=False)
        self.register_buffer("deviation", torch.tensor(deviation), persistent=False)

    def forward(self, dense):
        return ((dense - self.mean) / self.deviation).clamp(-5.0, 5.0)


class OnDevice__no_clamp(nn.Module):
    def __init__(self, mean, deviation):
        super().__init__()
        self.register_buffer("mean", torch.tensor(mean))
        self.register_buffer("deviation", torch.tensor(deviation))

    def forward(self, dense):
        return (dense - self.mean) / self.deviation


def sgd_step__in_place(parameters, gradients, lr):
    for p, new in zip(parameters, _right.sgd_step(parameters, gradients, lr)):
        p.copy_(new)
    return list(parameters)


def sgd_step__overwrites_gradients(parameters, gradients, lr):
    ok = torch.stack([g.isfinite().all() for g in gradients]).all()
    return [torch.where(ok, p - g.mul_(lr), p) for p, g in zip(parameters, gradients)]


def sgd_step__asks_the_sum(parameters, gradients, lr):
    ok = sum(g.sum() for g in gradients).isfinite()
    return [torch.where(ok, p - lr * g, p) for p, g in zip(parameters, gradients)]


class OnDevice__drops_nan(_right.OnDevice):
    def forward(self, dense):
        return super().forward(dense.nan_to_num(nan=0.0))
