"""DLRM on several processes: the losses of one, the bytes that were predicted, no hang when one dies."""

import itertools
import random
import time

from lib.dlrm import criteo, sharded
from lib.dlrm import model as dlrm
from lib.dlrm.bench import batch_of
from lib.dlrm.train import train_step

import pytest
import torch

STEPS, ROWS = 5, 96


def losses_of_one_process():
    torch.manual_seed(0)
    model = dlrm.DLRM(dlrm.ModulusHash(criteo.capped(limit=10_000)), dlrm.SMALL)
    optimizer = torch.optim.SGD(model.parameters(), lr=sharded.LEARNING_RATE)
    batch = batch_of(ROWS, "cpu")
    return [train_step(model, optimizer, batch).item() for _ in range(STEPS)]


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_ranks_together_learn_as_one_process_does(world_size):
    result = sharded.launch(world_size, STEPS, ROWS)
    assert result["world_size"] == world_size
    assert result["losses"] == pytest.approx(losses_of_one_process(), rel=1e-5)
    owners = sharded.place(criteo.capped(limit=10_000), world_size)
    b, mine, dim = ROWS // world_size, owners.count(0), 16
    others = world_size - 1
    assert result["sent_bytes"] == {
        "ids": b * (len(owners) - mine) * 8,
        "embeddings": others * b * mine * dim * 4,
        "gradients": b * (len(owners) - mine) * dim * 4,
    }


def test_a_rank_that_dies_ends_all_with_a_sentence():
    started = time.monotonic()
    with pytest.raises(RuntimeError, match="rank 1 was asked to die at step 2"):
        sharded.launch(2, STEPS, ROWS, "--die-at", 2)
    assert time.monotonic() - started < sharded.TIMEOUT_S


def test_rows_that_cannot_be_divided_are_refused():
    with pytest.raises(RuntimeError, match="97 rows cannot be divided by 2 ranks"):
        sharded.launch(2, STEPS, 97)


def largest(rows, owners, world_size):
    return max(sum(n for n, r in zip(rows, owners) if r == rank) for rank in range(world_size))


def test_tables_are_spread_evenly():
    assert sharded.place([5, 1, 1, 1, 1, 1], 2) == [0, 1, 1, 1, 1, 1]
    assert sharded.place([3, 3, 2], 1) == [0, 0, 0]
    assert sorted(sharded.place([4, 4, 4], 5)) == [0, 1, 2]  # two ranks have none
    draw = random.Random(0)
    for _ in range(50):
        rows, world_size = [draw.randint(1, 99) for _ in range(7)], draw.randint(2, 3)
        every = itertools.product(range(world_size), repeat=len(rows))
        best = min(largest(rows, owners, world_size) for owners in every)
        assert largest(rows, sharded.place(rows, world_size), world_size) <= 4 / 3 * best
    with pytest.raises(ValueError, match="at least 1"):
        sharded.place([1], 0)
