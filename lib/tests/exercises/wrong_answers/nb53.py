"""Plausible wrong answers to the exercises of notebook 53, named <answer>__<why>: each must be rejected."""

from lib.tests.exercises.wrong_answers import solution

import torch


def owner__blocks_by_ceil(row, n_rows, world_size):
    block = -(-n_rows // world_size)
    return row // block, row % block


def owner__the_row_as_it_was(row, n_rows, world_size):
    return row % world_size, row


def owner__dealt_like_cards(row, n_rows, world_size):
    return row % world_size, row // world_size


def owner__all_on_one(row, n_rows, world_size):
    return 0, row


def factors__ones(sizes):
    return [1.0] * len(sizes)


def factors__shares(sizes):
    return [b / sum(sizes) for b in sizes]


def factors__the_other_way(sizes):
    return [sum(sizes) / b / len(sizes) for b in sizes]


def _lookup(*changes):
    return solution("53_scale_out", *changes).lookup


lookup__in_the_order_of_arrival = _lookup(
    "y[owner.argsort(stable=True)] = arrived", "y[:] = arrived"
)
lookup__the_order_itself = _lookup(
    "y = torch.empty_like(arrived)\n    y[owner.argsort(stable=True)] = arrived",
    "y = arrived[owner.argsort(stable=True)]",
)
lookup__an_order_that_is_not_stable = _lookup(
    "argsort(stable=True)", "argsort(stable=True).flip(0)"
)
lookup__the_number_in_the_table = _lookup(" // world_size for rank", " for rank")
lookup__in_blocks = _lookup("owner = asked % world_size", "owner = asked // world_size")


def lookup__gathers_the_table(shard, asked, world_size, exchange):
    parts = exchange([shard] * world_size)
    exchange([shard[:0]] * world_size)
    return torch.stack([parts[row % world_size][row // world_size] for row in asked.tolist()])


def lookup__sends_everything_to_everybody(shard, asked, world_size, exchange):
    wanted = exchange([asked] * world_size)
    ranks = [(rows // world_size).clamp(max=len(shard) - 1) for rows in wanted]
    answers = exchange([shard[rows] for rows in ranks])
    return torch.stack([answers[row % world_size][i] for i, row in enumerate(asked.tolist())])


def lookup__waits_for_nobody(shard, asked, world_size, exchange):
    if len(asked) == 0:
        return shard[:0]
    return solution("53_scale_out").lookup(shard, asked, world_size, exchange)


def owner__floats(row, n_rows, world_size):
    return tuple(map(float, solution("53_scale_out").owner(row, n_rows, world_size)))


def lookup__in_complex_numbers(shard, asked, world_size, exchange):
    return solution("53_scale_out").lookup(shard, asked, world_size, exchange).to(torch.complex64)
