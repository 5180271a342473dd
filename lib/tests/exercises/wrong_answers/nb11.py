"""Plausible wrong answers to the exercises of notebook 11, named <answer>__<why>: each must be rejected."""

from lib.exercises.nb11 import Standardize, clip_and_wait

import torch
from torch import nn

waiting_lines__only_the_if = (6,)
waiting_lines__the_comparison_in_where = (3, 4, 6)
waiting_lines__shape_too = (1, 3, 6)
waiting_lines__none = ()
waiting_lines__every_line = tuple(range(1, 9))
waiting_lines__not_numbers = ("y.max()",)
waiting_lines__no_such_line = (3, 6, 9)


clip__as_it_was = clip_and_wait


def _norm(gradients):
    return torch.stack([g.norm() for g in gradients]).norm()


def clip__scales_up_too(gradients, max_norm):
    norm = _norm(gradients)
    return [g * (max_norm / norm) for g in gradients]


def clip__each_by_itself(gradients, max_norm):
    return [g * (max_norm / g.norm()).clamp(max=1.0) for g in gradients]


def clip__float_instead_of_item(gradients, max_norm):
    factor = min(1.0, max_norm / max(float(_norm(gradients)), 1e-12))
    return [g * factor for g in gradients]


def clip__if_on_a_tensor(gradients, max_norm):
    norm = _norm(gradients)
    return [g * (max_norm / norm) for g in gradients] if norm > max_norm else gradients


def clip__torch_min_of_elements(gradients, max_norm):
    return [g.clamp(-max_norm, max_norm) for g in gradients]


def clip__nan_at_zero(gradients, max_norm):
    norm = _norm(gradients)
    return [g / norm * norm.clamp(max=max_norm) for g in gradients]


def clip__one_tensor(gradients, max_norm):
    return torch.cat([g.flatten() for g in clip_and_wait(gradients, max_norm)])


def rows_of__no_clamp(vocabulary, ids):
    place = torch.searchsorted(vocabulary, ids)
    return torch.where(vocabulary[place] == ids, place + 1, 0)


def rows_of__unseen_to_a_neighbour(vocabulary, ids):
    return torch.searchsorted(vocabulary, ids).clamp(max=len(vocabulary) - 1) + 1


def rows_of__row_0_for_a_real_token(vocabulary, ids):
    place = torch.searchsorted(vocabulary, ids).clamp(max=len(vocabulary) - 1)
    return torch.where(vocabulary[place] == ids, place, 0)


def rows_of__right_side(vocabulary, ids):
    place = torch.searchsorted(vocabulary, ids, right=True).clamp(max=len(vocabulary) - 1)
    return torch.where(vocabulary[place] == ids, place + 1, 0)


def rows_of__compares_with_all(vocabulary, ids):
    matches = ids[:, None] == vocabulary[None]
    return torch.where(matches.any(1), matches.long().argmax(1) + 1, 0)


def rows_of__dictionary(vocabulary, ids):
    places = {token: k + 1 for k, token in enumerate(vocabulary.tolist())}
    return torch.tensor([places.get(token, 0) for token in ids.tolist()], device=ids.device)


def rows_of__mask_as_an_index(vocabulary, ids):
    place = torch.searchsorted(vocabulary, ids).clamp(max=len(vocabulary) - 1)
    rows = place + 1
    rows[(vocabulary[place] != ids).nonzero()] = 0
    return rows


def rows_of__int32(vocabulary, ids):
    vocabulary, ids = vocabulary.int().sort().values, ids.int()
    place = torch.searchsorted(vocabulary, ids).clamp(max=len(vocabulary) - 1)
    return torch.where(vocabulary[place] == ids, place + 1, 0)


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
        self.numbers, self.kept = (mean, deviation), {}

    def forward(self, dense):
        if dense.device not in self.kept:
            self.kept[dense.device] = [torch.tensor(n, device=dense.device) for n in self.numbers]
        mean, deviation = self.kept[dense.device]
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
