"""Exercises of notebook 53: bytes of a step, tables spread by rows, and gradients of uneven batches."""

from lib.dlrm import sharded
from lib.exercises import attempted, case, exercise, expect, expect_number

import torch

# --- 53.1 ------------------------------------------------------------------------------------------------


@exercise("53.1", "The bytes of a step", minutes=10, level=1)
def check_sent(answer):
    for n_tables, mine, b, dim, world in (
        (26, 13, 256, 16, 2),
        (26, 5, 64, 16, 4),
        (8, 0, 10, 4, 3),
        (3, 3, 7, 128, 1),
    ):
        at = f"{n_tables} tables, {mine} of them mine, {b} rows, D = {dim}, {world} ranks"
        with case(at):
            got = attempted(answer(n_tables, mine, b, dim, world))
        triple = isinstance(got, (tuple, list)) and len(got) == 3
        expect(triple, f"{at}: give (ids, embeddings, gradients), got {got!r}")
        other = n_tables - mine
        want = (b * other * 8, (world - 1) * b * mine * dim * 4, b * other * dim * 4)
        for what, mine_of, right in zip(("ids", "embeddings", "gradients"), got, want):
            expect_number(mine_of, right, f"{at}: bytes of {what} (what stays here is not sent)")


# --- 53.2 ------------------------------------------------------------------------------------------------


@exercise("53.2", "A table on many ranks", minutes=15, level=2)
def check_owner(answer):
    for n_rows, world in ((8, 2), (7, 2), (10, 4), (3, 5), (1, 1), (1000, 7)):
        at = f"{n_rows} rows on {world} ranks"
        with case(at):
            places = [attempted(answer(row, n_rows, world)) for row in range(n_rows)]
        pairs = all(isinstance(p, (tuple, list)) and len(p) == 2 for p in places)
        expect(pairs, f"{at}: give (rank, row on that rank), got {places[0]!r}")
        expect(len(set(map(tuple, places))) == n_rows, f"{at}: two rows have one place")
        held = [sorted(row for rank, row in places if rank == r) for r in range(world)]
        out = [rank for rank, _ in places if not 0 <= rank < world]
        expect(not out, f"{at}: there is no rank {out[:1]}")
        for rank, rows in enumerate(held):
            dense = rows == list(range(len(rows)))
            has = f"{at}: rank {rank} has the rows {rows[:5]}"
            expect(dense, f"{has}; they have to begin at 0 and leave no gap")
        sizes = [len(rows) for rows in held]
        expect(
            max(sizes) - min(sizes) <= 1,
            f"{at}: ranks have {sizes} rows, which differ by more than 1",
        )


# --- 53.3 ------------------------------------------------------------------------------------------------


def _gradient(x, y, w):
    w = w.clone().requires_grad_()
    loss = ((x @ w - y) ** 2).mean()
    return torch.autograd.grad(loss, w)[0]


@exercise("53.3", "The last batch is not full", minutes=15, level=2)
def check_factors(answer):
    torch.manual_seed(0)
    x, y, w = torch.randn(60, 3).double(), torch.randn(60).double(), torch.randn(3).double()
    for sizes in ([30, 30], [50, 10], [20, 39, 1], [60]):
        with case(f"sizes {sizes}"):
            factors = attempted(answer(list(sizes)))
        factors = factors.tolist() if isinstance(factors, torch.Tensor) else factors
        right_length = isinstance(factors, (list, tuple)) and len(factors) == len(sizes)
        expect(right_length, f"sizes {sizes}: give a list, a factor for each rank, got {factors!r}")
        parts = zip(x.split(sizes), y.split(sizes), factors)
        together = sum(f * _gradient(a, b, w) for a, b, f in parts) / len(sizes)  # as DDP does
        off = ((together - _gradient(x, y, w)).norm() / _gradient(x, y, w).norm()).item()
        expect(
            off < 1e-6, f"sizes {sizes}: the averaged gradient is {off:.1%} off that of all rows"
        )


# --- for the notebook ------------------------------------------------------------------------------------


def shares(num_rows, world_size, most=None):
    """Rows on each rank when whole tables are placed by sharded.place."""
    owners = sharded.place(num_rows, world_size, most)
    return [sum(n for n, r in zip(num_rows, owners) if r == rank) for rank in range(world_size)]
