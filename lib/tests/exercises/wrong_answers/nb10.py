"""Plausible wrong answers to the exercises of notebook 10, named <answer>__<why>: each must be rejected."""

import torch

# --- 10.1 interact


def _interact(dense, embeddings, triangle=torch.triu_indices, offset=1):
    vectors = torch.cat([dense[:, None], embeddings], dim=1)
    n = vectors.shape[1]
    first, second = triangle(n, n, offset=offset, device=dense.device)
    return (vectors @ vectors.mT)[:, first, second]


def interact__without_the_dense_vector(dense, embeddings):
    return _interact(dense, embeddings)


def interact__with_the_diagonal(dense, embeddings):
    return torch.cat([dense, _interact(dense, embeddings, offset=0)], dim=1)


def interact__all_products(dense, embeddings):
    vectors = torch.cat([dense[:, None], embeddings], dim=1)
    return torch.cat([dense, (vectors @ vectors.mT).flatten(1)], dim=1)


def interact__pairs_below_the_diagonal(dense, embeddings):
    pairs = _interact(dense, embeddings, torch.tril_indices, offset=-1)
    return torch.cat([dense, pairs], dim=1)


def interact__mask_over_the_batch(dense, embeddings):
    vectors = torch.cat([dense[:, None], embeddings], dim=1)
    products = vectors @ vectors.mT
    return torch.cat([dense, products[torch.ones_like(products[0]).triu(1).bool()]], dim=1)


def interact__dense_vector_behind(dense, embeddings):
    return torch.cat([_interact(dense, embeddings), dense], dim=1)


def interact__dense_vector_last_among_the_vectors(dense, embeddings):
    pairs = _interact(embeddings[:, 0], torch.cat([embeddings[:, 1:], dense[:, None]], dim=1))
    return torch.cat([dense, pairs], dim=1)


def interact__elements_for_vectors(dense, embeddings):
    flat = torch.cat([dense, embeddings.flatten(1)], dim=1)
    return (flat[:, :, None] * flat[:, None, :]).flatten(1)


# --- 10.2 lookup_bytes


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


# --- 10.3 index_rows


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
