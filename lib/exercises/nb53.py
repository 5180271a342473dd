"""Exercises of notebook 53: tables spread by rows, gradients of uneven batches, a lookup by all-to-alls."""

import threading

from lib.dlrm import sharded
from lib.exercises import Wrong, attempted, case, exercise, expect, plain, plural
from lib.exercises.limits import stopped

import torch

# --- 53.1 ------------------------------------------------------------------------------------------------


@exercise("53.1", "A table on many ranks", minutes=15, level=2)
def check_owner(answer):
    for n_rows, world in ((8, 2), (7, 2), (10, 4), (3, 5), (1, 1), (1000, 7)):
        at = f"{n_rows} rows on {world} ranks"
        with case(at):
            places = [plain(attempted(answer(row, n_rows, world))) for row in range(n_rows)]
        pairs = all(isinstance(p, (tuple, list)) and len(p) == 2 for p in places)
        expect(pairs, f"{at}: give (rank, row on that rank), got {places[0]!r}")
        whole = all(type(n) is int for place in places for n in place)
        expect(whole, f"{at}: give two whole numbers, got {places[0]!r}")
        expect(len(set(map(tuple, places))) == n_rows, f"{at}: two rows have one place")
        held = [sorted(row for rank, row in places if rank == r) for r in range(world)]
        out = [rank for rank, _ in places if not 0 <= rank < world]
        expect(not out, f"{at}: there is no rank {out[:1]}")
        for rank, rows in enumerate(held):
            dense = rows == list(range(len(rows)))
            has = f"{at}: rank {rank} has the rows {rows[:5]}"
            expect(dense, f"{has}; they have to begin at 0 and leave no gap")
        in_order = sorted(map(tuple, places)) == list(map(tuple, places))
        expect(in_order, f"{at}: earlier ranks hold earlier rows, but the places are {places[:5]}")
        sizes = [len(rows) for rows in held]
        expect(
            max(sizes) - min(sizes) <= 1,
            f"{at}: ranks have {sizes} rows, which differ by more than 1",
        )


# --- 53.2 ------------------------------------------------------------------------------------------------


def _gradient(x, y, w):
    w = w.clone().requires_grad_()
    loss = ((x @ w - y) ** 2).mean()
    return torch.autograd.grad(loss, w)[0]


@exercise("53.2", "The last batch is not full", minutes=15, level=2)
def check_factors(answer):
    torch.manual_seed(0)
    x, y, w = torch.randn(60, 3).double(), torch.randn(60).double(), torch.randn(3).double()
    for sizes in ([30, 30], [50, 10], [20, 39, 1], [60]):
        with case(f"sizes {sizes}"):
            factors = attempted(answer(list(sizes)))
        factors = factors.tolist() if hasattr(factors, "tolist") else factors  # torch's, NumPy's
        right_length = isinstance(factors, (list, tuple)) and len(factors) == len(sizes)
        expect(right_length, f"sizes {sizes}: give a list, a factor for each rank, got {factors!r}")
        parts = zip(x.split(sizes), y.split(sizes), factors)
        together = sum(f * _gradient(a, b, w) for a, b, f in parts) / len(sizes)  # as DDP does
        off = ((together - _gradient(x, y, w)).norm() / _gradient(x, y, w).norm()).item()
        expect(
            off < 1e-6, f"sizes {sizes}: the averaged gradient is {off:.1%} off that of all rows"
        )


# --- 53.3 ------------------------------------------------------------------------------------------------


class _Ranks:
    """Ranks as threads; `exchange` is an all-to-all that waits for all of them."""

    def __init__(self, world_size, at):
        self.world_size, self.at = world_size, at
        self.barrier = threading.Barrier(world_size, timeout=3)
        self.outboxes, self.sent, self.errors = [None] * world_size, [], []

    def exchange(self, rank):
        def call(outbox):
            right = isinstance(outbox, (list, tuple)) and len(outbox) == self.world_size
            right = right and all(isinstance(t, torch.Tensor) for t in outbox)
            expect(right, f"{self.at}: exchange takes a list of tensors, one for each rank")
            self.outboxes[rank] = list(outbox)
            self.barrier.wait()
            inbox = [self.outboxes[sender][rank].clone() for sender in range(self.world_size)]
            if self.barrier.wait() == 0:
                self.sent.append([[t.shape[:1].numel() for t in box] for box in self.outboxes])
            self.barrier.wait()
            return inbox

        return call

    def run(self, function):
        """[function(rank, exchange)] of all ranks; raises what went wrong first."""
        results = [None] * self.world_size

        def body(rank):
            try:
                results[rank] = function(rank, self.exchange(rank))
            except threading.BrokenBarrierError:
                self.errors.append(
                    Wrong(f"{self.at}: rank {rank} waits in exchange for one that does not call")
                )
            except BaseException as error:  # SystemExit, too, which would end the thread in silence
                self.errors.insert(0, error)
                self.barrier.abort()

        threads = [threading.Thread(target=body, args=(r,)) for r in range(self.world_size)]
        for thread in threads:
            thread.daemon = True  # one that never ends must not keep Python from ending
            thread.start()
        with stopped(threads):
            for thread in threads:
                thread.join()
        if self.errors:
            raise self.errors[0]
        return results


@exercise("53.3", "Look up a table on many ranks", minutes=20, level=3)
def check_lookup(answer):
    for world_size, n_rows, asked in (
        (1, 3, [[2, 0]]),
        (2, 4, [[0, 1], [2, 3]]),
        (2, 5, [[3, 0, 4, 1], [1, 1]]),
        (2, 5, [[2], []]),
        (3, 10, [[9, 1, 5, 5, 0], [4], [7, 2, 8]]),
    ):
        at = f"{plural(n_rows, 'row')} on {plural(world_size, 'rank')}, asked for {asked}"
        with case(at):
            _expect_lookup(answer, world_size, n_rows, asked, at)


def _expect_lookup(answer, world_size, n_rows, asked, at):
    table = torch.arange(1.0, n_rows + 1)[:, None] * torch.tensor([1.0, 10.0, 100.0])
    asked = [torch.tensor(rows, dtype=torch.int64) for rows in asked]
    ranks = _Ranks(world_size, at)
    got = ranks.run(lambda r, call: answer(table[r::world_size], asked[r], world_size, call))
    for rank, (rows, y) in enumerate(zip(asked, got)):
        attempted(y)
        shape = tuple(y.shape) if isinstance(y, torch.Tensor) else type(y).__name__
        right = shape == (len(rows), 3)
        expect(right, f"{at}: rank {rank} should return {(len(rows), 3)}, got {shape}")
        expect(y.dtype == table.dtype, f"{at}: rank {rank} returns {y.dtype}, not {table.dtype}")
        right = torch.equal(y, table[rows])
        expect(right, f"{at}: rank {rank} got other rows, or in another order")
    calls = len(ranks.sent)
    if world_size == 1 and calls == 0:
        return  # one rank has nobody to ask
    expect(calls == 2, f"{at}: exchange is called {plural(calls, 'time')}, not twice")
    numbers, answers = ranks.sent
    for asker in range(world_size):
        for owner in range(world_size):
            needed = int((asked[asker] % world_size == owner).sum())
            for n, sent in (
                (numbers[asker][owner], f"{asker} sends rank {owner} {{}} numbers"),
                (answers[owner][asker], f"{owner} sends rank {asker} {{}} rows"),
            ):
                expect(n <= needed, f"{at}: rank {sent.format(n)}, where {needed} would do")


# --- for the notebook ------------------------------------------------------------------------------------


def shares(num_rows, world_size, most=None):
    """Rows on each rank when whole tables are placed by sharded.place."""
    owners = sharded.place(num_rows, world_size, most)
    return [sum(n for n, r in zip(num_rows, owners) if r == rank) for rank in range(world_size)]
