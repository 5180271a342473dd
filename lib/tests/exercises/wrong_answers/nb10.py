"""Plausible wrong answers to the exercises of notebook 10, named <answer>__<why>: each must be rejected."""

import torch

# --- 10.1 row_of


def row_of__as_in_python(token, cardinality):
    return (token + 1) % cardinality


def row_of__absolute_value(token, cardinality):
    return abs((token + 1) % cardinality)


def row_of__adds_once_before(token, cardinality):
    return (token + 1 + cardinality) % cardinality


def row_of__adds_always(token, cardinality):
    return (token + 1) % cardinality + cardinality


def row_of__looks_at_the_token(token, cardinality):
    row = (token + 1) % cardinality
    return row + cardinality if token < 0 else row


def row_of__negative_to_row_0(token, cardinality):
    row = (token + 1) % cardinality
    return 0 if row < 0 else row


def row_of__forgets_the_missing_token(token, cardinality):
    row = token % cardinality
    return row + cardinality if row < 0 else row


# --- 10.2 index_rows


def index_rows__naive(ids, vocabulary):
    return (ids[:, None] == vocabulary[None]).long().argmax(1)


def index_rows__naive_plus_one(ids, vocabulary):
    return (ids[:, None] == vocabulary[None]).long().argmax(1) + 1


def index_rows__compares_with_all(ids, vocabulary):
    if len(vocabulary) == 0:
        return torch.zeros_like(ids)
    matches = ids[:, None] == vocabulary[None]
    return torch.where(matches.any(1), matches.long().argmax(1) + 1, 0)


def index_rows__not_compared(ids, vocabulary):
    return torch.searchsorted(vocabulary, ids) + 1


def index_rows__behind_the_end(ids, vocabulary):
    place = torch.searchsorted(vocabulary, ids)
    return torch.where(vocabulary[place] == ids, place + 1, 0)


def index_rows__empty_vocabulary_forgotten(ids, vocabulary):
    place = torch.searchsorted(vocabulary, ids).clamp(max=len(vocabulary) - 1)
    return torch.where(vocabulary[place] == ids, place + 1, 0)


def index_rows__last_token_lost(ids, vocabulary):
    if len(vocabulary) == 0:
        return torch.zeros_like(ids)
    place = torch.searchsorted(vocabulary, ids)
    place = torch.where(place >= len(vocabulary) - 1, 0, place)
    return torch.where(vocabulary[place] == ids, place + 1, 0)


# --- 10.3 lookup_bytes


def lookup_bytes__duplicates_counted(rows, dim):
    return rows.numel() * dim * 4


def lookup_bytes__tables_not_told_apart(rows, dim):
    return len(rows.unique()) * dim * 4


def lookup_bytes__elements_for_bytes(rows, dim):
    return sum(len(column.unique()) for column in rows.unbind(1)) * dim


def lookup_bytes__rows_of_the_batch(rows, dim):
    return len(rows.unique(dim=0)) * rows.shape[1] * dim * 4


def lookup_bytes__consecutive_only(rows, dim):
    return sum(len(column.unique_consecutive()) for column in rows.unbind(1)) * dim * 4


def lookup_bytes__tables_told_apart_up_to_100003_rows(rows, dim):
    return len((rows + 100_003 * torch.arange(rows.shape[1])).unique()) * dim * 4


def lookup_bytes__tables_told_apart_by_the_largest_row(rows, dim):
    return len((rows + rows.max() * torch.arange(rows.shape[1])).unique()) * dim * 4


# --- 10.4 interaction_backward


def _backward(dpairs, vectors, combine, offset=1, triangle=torch.triu_indices):
    n = vectors.shape[1]
    first, second = triangle(n, n, offset=offset, device=vectors.device)
    gradient = vectors.new_zeros(len(vectors), n, n)
    gradient[:, first, second] = dpairs
    return combine(gradient) @ vectors


def interaction_backward__only_the_first_of_a_pair(dpairs, vectors):
    return _backward(dpairs, vectors, lambda g: g)


def interaction_backward__only_the_second_of_a_pair(dpairs, vectors):
    return _backward(dpairs, vectors, lambda g: g.mT)


def interaction_backward__halved(dpairs, vectors):
    return _backward(dpairs, vectors, lambda g: (g + g.mT) / 2)


def interaction_backward__pairs_below_the_diagonal(dpairs, vectors):
    return _backward(dpairs, vectors, lambda g: g + g.mT, offset=-1, triangle=torch.tril_indices)


def interaction_backward__overwrites_the_vectors(dpairs, vectors):
    return vectors.copy_(_backward(dpairs, vectors, lambda g: g + g.mT))


def interaction_backward__first_row_only(dpairs, vectors):
    return _backward(dpairs[:1].expand_as(dpairs), vectors, lambda g: g + g.mT)


def _pairs(vectors):
    n = vectors.shape[1]
    return (vectors @ vectors.mT).flatten(1)[:, torch.ones(n, n).triu(1).flatten() > 0]


def interaction_backward__by_autograd(dpairs, vectors):
    leaf = vectors.requires_grad_()
    return torch.autograd.grad(_pairs(leaf), leaf, dpairs)[0]


def interaction_backward__by_vjp(dpairs, vectors):
    return torch.func.vjp(_pairs, vectors)[1](dpairs)[0]
