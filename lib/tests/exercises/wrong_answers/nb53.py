"""Plausible wrong answers to the exercises of notebook 53, named <answer>__<why>: each must be rejected."""


def sent__to_myself_as_well(n_tables, n_mine, b, dim, world_size):
    return b * n_tables * 8, world_size * b * n_mine * dim * 4, b * n_tables * dim * 4


def sent__int32_ids(n_tables, n_mine, b, dim, world_size):
    others = n_tables - n_mine
    return b * others * 4, (world_size - 1) * b * n_mine * dim * 4, b * others * dim * 4


def sent__one_number(n_tables, n_mine, b, dim, world_size):
    return b * (n_tables - n_mine) * 8


def owner__blocks_by_ceil(row, n_rows, world_size):
    block = -(-n_rows // world_size)
    return row // block, row % block


def owner__the_row_as_it_was(row, n_rows, world_size):
    return row % world_size, row


def owner__all_on_one(row, n_rows, world_size):
    return 0, row


def factors__ones(sizes):
    return [1.0] * len(sizes)


def factors__shares(sizes):
    return [b / sum(sizes) for b in sizes]


def factors__the_other_way(sizes):
    return [sum(sizes) / b / len(sizes) for b in sizes]
