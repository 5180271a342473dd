"""Solutions to the exercises of notebook 53."""

import torch


# %% 53.1 like cards that are dealt
def owner(row, n_rows, world_size):
    return row % world_size, row // world_size


# %% 53.2 a mean over b rows weighs as much as its rows; DDP divides by the number of ranks
def factors(sizes):
    return [len(sizes) * b / sum(sizes) for b in sizes]


# %% 53.3 what arrives is ordered by owner, so the answers are put back to where they were asked for
def lookup(shard, asked, world_size, exchange):
    owner = asked % world_size
    wanted = exchange([asked[owner == rank] // world_size for rank in range(world_size)])
    arrived = torch.cat(exchange([shard[rows] for rows in wanted]))
    y = torch.empty_like(arrived)
    y[owner.argsort(stable=True)] = arrived
    return y
