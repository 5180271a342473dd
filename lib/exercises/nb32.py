"""Exercises of notebook 32, softmax."""

import math

from lib import machine
from lib.exercises import SHAPES, attempted, exercise, expect, expect_launches, expect_op
from lib.nogpu.memory import count_traffic

import torch

INF, NAN = float("inf"), float("nan")


def _rows(shape, dtype, scale=40.0):
    generator = torch.Generator().manual_seed(0)
    x = scale * torch.randn(shape, generator=generator)
    return (x.to(machine.device(), dtype),)


@exercise("32.1", "A sibling: log_softmax", minutes=8, level=1)
def check_log_softmax(answer):
    def masked(shape, dtype):
        (x,) = _rows(shape, dtype)
        x[0, 0] = -INF
        x[-1, :] = -INF
        return (x,)

    def eager(x):
        return torch.log_softmax(x, dim=-1)

    expect_op(answer, eager, _rows)
    expect_op(answer, eager, masked, shapes=((3, 5),))
    expect_launches(lambda: answer(*_rows((5, 7), torch.float32)), exactly=1)


def _padded_with_zeros(row):
    """What a row kernel with other=0.0 makes of a row."""
    padded = row + [0.0] * ((1 << (len(row) - 1).bit_length()) - len(row))
    return [share for share, _ in zip(_softmax(padded), row)]


def _softmax(row):
    numerators = [math.exp(x - max(row)) for x in row]
    return [n / sum(numerators) for n in numerators]


@exercise("32.2", "The row that gives it away", minutes=10, level=2)
def check_row(row):
    expect(
        isinstance(row, (list, tuple))
        and len(row) > 0
        and all(isinstance(x, (int, float)) and math.isfinite(x) for x in row),
        "give a list of one or more finite numbers",
    )
    row = [float(x) for x in row]
    got, want = _padded_with_zeros(row), _softmax(row)
    worst = max(range(len(row)), key=lambda i: abs(got[i] - want[i]))
    expect(
        abs(got[worst] - want[worst]) > 0.01,
        f"for {row} the kernel gives {got[worst]:.6f} in column {worst}, and right is {want[worst]:.6f}",
    )
    expect(len(row) <= 3, f"this row shows it, but so does a row of fewer than {len(row)} numbers")


def _merge_cases():
    """(what, numbers of part a, numbers of part b), the simplest first."""
    return [
        ("two equal parts", [1.0, 2.0], [1.0, 2.0]),
        ("the larger maximum in b", [1.0, 2.0], [3.0]),
        ("the larger maximum in a", [5.0, 5.0], [3.0, 1.0]),
        ("numbers whose exponential overflows", [1000.0, 999.0], [1001.0]),
        ("a of -inf alone", [-INF, -INF], [3.0, 1.0]),
        ("b of -inf alone", [3.0, 1.0], [-INF]),
        ("both of -inf alone", [-INF, -INF], [-INF]),
    ]


def _part(numbers):
    top = max(numbers)
    return top, 0.0 if top == -INF else math.fsum(math.exp(x - top) for x in numbers)


@exercise("32.3", "Put two parts together", minutes=10, level=2)
def check_merge(answer):
    for what, a, b in _merge_cases():
        _expect_merged(answer, what, _part(a), _part(b), _part(a + b))
    _expect_merged(answer, "a NaN in the sum of a", (2.0, NAN), (3.0, 1.5), (3.0, NAN))
    _expect_merged(answer, "b of -inf and NaN", (3.0, 1.5), (-INF, NAN), (3.0, NAN))


def _expect_merged(answer, what, a, b, want):
    parts = [torch.tensor([v], dtype=torch.float64, device=machine.device()) for v in (*a, *b)]
    got = attempted(answer(*parts))
    expect(
        isinstance(got, (tuple, list)) and len(got) == 2,
        "should return two tensors, the maximum and the sum",
    )
    top, total = (float(torch.as_tensor(v).reshape(-1)[0]) for v in got)
    same = top == want[0] and (
        math.isclose(total, want[1], rel_tol=1e-9, abs_tol=1e-12)
        or (math.isnan(total) and math.isnan(want[1]))
    )
    expect(
        same,
        f"{what}: {a} and {b} are together {want} (maximum, sum), got ({top:g}, {total:g})",
    )


@exercise("32.4", "Softmax of the beginning of a row", minutes=20, level=3)
def check_prefix_softmax(answer):
    def inputs(shape, dtype):
        (x,) = _rows(shape, dtype, scale=3.0)
        m, n = shape
        lengths = torch.arange(m, device=x.device) * 7 % (n + 1)
        lengths[-1] = 0
        lengths[0] = (n + 1) // 2
        x[_behind(x, lengths)] = NAN  # shows in the result if it is used
        return x, lengths

    def eager(x, lengths):
        y = torch.softmax(x.masked_fill(_behind(x, lengths), -INF), dim=-1)
        return y.masked_fill(_behind(x, lengths), 0.0)

    expect_op(answer, eager, inputs, shapes=(*SHAPES, (3, 5000)))
    expect_launches(lambda: answer(*inputs((5, 7), torch.float32)), exactly=1)
    x, lengths = inputs((9, 200), torch.float32)
    traffic = count_traffic(lambda: answer(x, lengths))
    loaded = sum(a.loaded_distinct for a in traffic.by_argument.values())
    least = int(lengths.sum()) * x.element_size() + lengths.nbytes
    expect(
        loaded <= least,
        f"at shape (9, 200) it loads {loaded} bytes; up to the lengths there are {least}, lengths included",
    )


def _behind(x, lengths):
    return torch.arange(x.shape[1], device=x.device) >= lengths[:, None]
