"""Exercises of notebook 10: build DLRM from scratch."""

import random

from lib import machine
from lib.exercises import a_number, attempted, case, exercise, expect, plain, too_many_or_few
from lib.exercises.watch import Results
from lib.measure.check import check_against_float64

import torch
from torch.utils._python_dispatch import TorchDispatchMode

# --- 10.1 ----------------------------------------------------------------------------------------------


class CInt(int):
    """An integer whose /, // and % truncate, as in C, CUDA and Triton. +, - and * return a CInt again."""

    def __add__(self, other):
        return CInt(int(self) + int(other))

    def __sub__(self, other):
        return CInt(int(self) - int(other))

    def __rsub__(self, other):
        return CInt(int(other) - int(self))

    def __mul__(self, other):
        return CInt(int(self) * int(other))

    def __neg__(self):
        return CInt(-int(self))

    def __pos__(self):
        return self

    def __abs__(self):
        return CInt(abs(int(self)))

    def __floordiv__(self, other):
        return _quotient(self, other)

    def __rfloordiv__(self, other):
        return _quotient(other, self)

    def __mod__(self, other):
        return CInt(int(self) - int(_quotient(self, other)) * int(other))

    def __rmod__(self, other):
        return CInt(other) % self

    __radd__, __rmul__, __truediv__, __rtruediv__ = __add__, __mul__, __floordiv__, __rfloordiv__


def _quotient(a, b):
    a, b = int(a), int(b)
    size = abs(a) // abs(b)
    return CInt(size if (a < 0) == (b < 0) else -size)


# -11 is -10 after the + 1, a multiple of 10: where one addition too many shows
_TOKENS = (0, 8, 9, 2**32 - 1, -1, -2, -11, -12, -(2**31), -(2**40))


@exercise("10.1", "A modulus hash for C", minutes=8, level=1)
def _(row_of):
    for cardinality in (10, 1, 3, 10131227):
        for token in _TOKENS:
            what = f"token {token}, cardinality {cardinality}"
            with case(what):
                got = plain(attempted(row_of(CInt(token), CInt(cardinality))))
            expect(isinstance(got, int), f"{what}: should be an integer, got {type(got).__name__}")
            want = (token + 1) % cardinality
            expect(got == want, f"{what}: should be row {want}, got {int(got)}")


# --- 10.2 ----------------------------------------------------------------------------------------------

_VOCABULARIES = (
    ("vocabulary [7]", [7], [7]),
    ("vocabulary [7]", [7], [3, 8]),
    ("vocabulary [2, 5, 9]", [2, 5, 9], [2, 5, 9]),
    ("vocabulary [2, 5, 9]", [2, 5, 9], [-1, 3, 10, 2**32 - 1]),
    ("vocabulary [-1, 4], missing token known", [-1, 4], [-1, 4, 0]),
    ("an empty vocabulary", [], [0, 1]),
    ("an empty batch", [2, 5], []),
)


@exercise("10.2", "Strangers to the OOV row", minutes=12, level=2)
def _(index_rows):
    for what, vocabulary, ids in _VOCABULARIES:
        _expect_rows(index_rows, vocabulary, ids, what)
    rng = random.Random(0)
    vocabulary = sorted(rng.sample(range(2**32), 3000))
    ids = [rng.choice(vocabulary) + rng.choice((0, 0, 1)) for _ in range(200)]
    largest = _expect_rows(index_rows, vocabulary, ids, "3000 tokens, 200 ids")
    expect(
        largest < 200 * 3000,
        f"200 ids and 3000 tokens made a tensor of {largest:,} elements, that is B·V; compare less",
    )


def _expect_rows(index_rows, vocabulary, ids, what):
    """Wrong unless the rows are those of a dictionary. Returns the elements of the largest tensor made.

    Runs on the CPU, where a row out of range is an IndexError; on a GPU it would break the process.
    """
    tensors = [torch.tensor(x, dtype=torch.int64) for x in (ids, vocabulary)]
    with case(what), Results() as results:
        got = attempted(index_rows(*tensors))
    expect(isinstance(got, torch.Tensor), f"should be a tensor, got {type(got).__name__}")
    expect(got.dtype == torch.int64, f"{what}: should be int64, got {got.dtype}")
    row_of = {token: row for row, token in enumerate(vocabulary, start=1)}
    want = [row_of.get(token, 0) for token in ids]
    expect(got.shape == (len(ids),), f"{what}: should be {(len(ids),)}, got {tuple(got.shape)}")
    for token, row, right in zip(ids, got.tolist(), want):
        expect(row == right, f"{what}, id {token}: should be row {right}, got {row}")
    return max((result.shape.numel() for result in results.seen), default=0)


# --- 10.3 ----------------------------------------------------------------------------------------------

_BATCHES = (
    ("one row, one table", [[3]], 16),
    ("the same row twice", [[3], [3]], 16),
    ("row 3 of two tables", [[3, 3]], 16),
    ("three rows, two tables, dim 8", [[0, 7], [0, 7], [5, 7]], 8),
)


@exercise("10.3", "Bytes of the lookups", minutes=8, level=1)
def _(lookup_bytes):
    for what, rows, dim in _BATCHES:
        _expect_bytes(lookup_bytes, torch.tensor(rows), dim, what)
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(40, (64, 26), generator=generator)
    _expect_bytes(lookup_bytes, rows, 16, "64 rows, 26 tables")
    # Rows of the longest table, 10,131,227: whatever number an answer adds to the rows of a table to tell them
    # from those of its neighbour, below that length, is a difference of a number in `far` and one in `near`.
    near = torch.arange(3183)
    far = 3183 * near
    _expect_bytes(lookup_bytes, torch.stack([far, near, far], 1), 16, "3,183 rows, 3 long tables")


def _expect_bytes(lookup_bytes, rows, dim, what):
    """The right answer from sets of (table, row), one by one."""
    distinct = {(table, row) for ids in rows.tolist() for table, row in enumerate(ids)}
    want = 4 * dim * len(distinct)
    with case(what):
        got = a_number(lookup_bytes(rows, dim), what)
    expect(
        got == want,
        f"{what}: {got:,} bytes are {too_many_or_few(got, want)}; each row of each table counts once, in bytes",
    )


# --- 10.4 ----------------------------------------------------------------------------------------------


def _pairs(vectors):
    """(B, F, D) → (B, F(F - 1)/2), one product at a time: slow, and plain."""
    n = vectors.shape[1]
    products = [(vectors[:, a] * vectors[:, b]).sum(1) for a in range(n) for b in range(a + 1, n)]
    return torch.stack(products, dim=1) if products else vectors.new_zeros(len(vectors), 0)


def _backward_by_autograd(dpairs, vectors):
    with torch.enable_grad():
        leaf = vectors.detach().requires_grad_()
        (gradient,) = torch.autograd.grad((_pairs(leaf) * dpairs).sum(), leaf)
    return gradient


class _Backward(TorchDispatchMode):
    """Records whether an op ran in a backward pass of autograd, whose engine torch.func uses too."""

    ran = False

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        self.ran |= torch._C._current_graph_task_id() != -1
        return op(*args, **(kwargs or {}))


@exercise("10.4", "The interaction, backward", minutes=15, level=3)
def _(interaction_backward):
    generator = torch.Generator().manual_seed(0)
    for shape in ((1, 2, 1), (1, 3, 2), (2, 4, 3), (3, 27, 16)):
        n_rows, n_vectors, _ = shape
        n_pairs = n_vectors * (n_vectors - 1) // 2
        sizes = ((n_rows, n_pairs), shape)
        inputs = [torch.randn(s, generator=generator).to(machine.device()) for s in sizes]
        at = f"at B, F, D = {shape}"
        # On one thread: there the mode sees the ops of a backward pass, also of a GPU's.
        with case(at), torch.autograd.set_multithreading_enabled(False):
            with _Backward() as mode:
                got = attempted(interaction_backward(*(x.clone() for x in inputs)))
            expect(not mode.ran, f"{at}: autograd made this gradient; write it yourself")
            kind = type(got).__name__
            expect(isinstance(got, torch.Tensor), f"{at}: should be a tensor, got {kind}")
            expect(got.shape == shape, f"{at}: should have shape {shape}, got {tuple(got.shape)}")
            check_against_float64(
                interaction_backward, _backward_by_autograd, *inputs, gradients=False, name=at
            )
