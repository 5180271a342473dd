"""DLRM on several processes: the losses of one, the bytes that were predicted, no hang when one dies."""

import itertools
import random
import time

from lib.dlrm import criteo, sharded
from lib.dlrm.train import batch_of, train_step

import pytest
import torch

STEPS, ROWS = 5, 96


def losses_of_one_process(n_tables):
    model = sharded.small_model(n_tables)
    optimizer = torch.optim.SGD(model.parameters(), lr=sharded.LEARNING_RATE)
    batch = batch_of(ROWS, "cpu")
    batch = batch._replace(sparse=batch.sparse[:, :n_tables])
    return [train_step(model, optimizer, batch).item() for _ in range(STEPS)]


@pytest.mark.parametrize(("world_size", "n_tables"), [(1, 26), (2, 25), (3, 26), (3, 2)])
def test_ranks_together_learn_as_one_process_does(world_size, n_tables):
    """Also where one rank has a table more than another, and where one has none."""
    result = sharded.launch(world_size, STEPS, ROWS, "--tables", n_tables)
    assert result["world_size"] == world_size
    assert result["losses"] == pytest.approx(losses_of_one_process(n_tables), rel=1e-5)
    rows = criteo.capped(limit=10_000)[:n_tables]
    owners = sharded.place(rows, world_size)
    b, mine, dim = ROWS // world_size, owners.count(0), 16
    others = world_size - 1
    assert result["sent_bytes"] == {
        "ids": b * (n_tables - mine) * 8,
        "embeddings": others * b * mine * dim * 4,
        "gradients": b * (n_tables - mine) * dim * 4,
    }
    assert result["table_bytes"] == sum(n for n, r in zip(rows, owners) if r == 0) * dim * 4


@pytest.mark.parametrize(("world_size", "n_tables"), [(1, 5), (2, 5), (3, 2)])
def test_fused_ranks_learn_as_one_process_does(world_size, n_tables, monkeypatch):
    if torch.cuda.device_count() < world_size:
        monkeypatch.setenv("TRITON_INTERPRET", "1")
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # ranks see no GPU, or lib prepares for one
    result = sharded.launch(world_size, STEPS, ROWS, "--tables", n_tables, "--fused")
    assert result["losses"] == pytest.approx(losses_of_one_process(n_tables), rel=1e-5)


two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


@two_gpus
def test_ranks_meet_on_gpus():
    assert sharded.launch(2, STEPS, ROWS)["device"] == "cuda"


@two_gpus
def test_all_to_alls_and_steps_are_timed():
    result = sharded.measure(2, 256)
    assert [row["MB sent"] for row in result["exchange"][:2]] == [0.524288, 4.194304]
    steps = {(row["GPUs"], row["parts"]): row["MB sent"] for row in result["steps"]}
    assert steps.keys() == {(n, parts) for n in (1, 2) for parts in ("eager", "fused")}
    assert steps[1, "fused"] == 0 < steps[2, "fused"]
    rows = [*result["exchange"], *result["steps"]]
    assert all(0 < row["p20"] <= row["µs"] <= row["p80"] for row in rows)


def test_a_time_without_gpus_is_refused():
    n_gpus = torch.cuda.device_count()
    with pytest.raises(
        RuntimeError, match=f"a GPU for each of {n_gpus + 1} ranks; there are {n_gpus} GPUs"
    ):
        sharded.measure(n_gpus + 1, 256)


def test_a_job_that_takes_too_long_is_ended():
    with pytest.raises(RuntimeError, match="2 ranks took longer than 2 s"):
        sharded.launch(2, STEPS, ROWS, timeout_s=2)


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


def test_no_rank_has_more_tables_than_it_may():
    assert sharded.place([9, 1, 1, 1], 2) == [0, 1, 1, 1]
    assert sharded.place([9, 1, 1, 1], 2, most=2) == [0, 1, 1, 0]
    with pytest.raises(ValueError, match="5 tables on 2 ranks: most must be larger, got 2"):
        sharded.place([1] * 5, 2, most=2)
