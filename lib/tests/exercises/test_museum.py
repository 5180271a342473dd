"""The bug museum: each exhibit goes wrong on its smallest input, on no smaller one, and its fix is right."""

import itertools

from lib.exercises import museum, nb60
from lib.exercises.museum import EXHIBITS, row_softmax
from lib.exercises.museum.exhibit import numbers, shape
from lib.nogpu.interpreter import interpreted_launches

import pytest
import torch
import torch.nn.functional as F

INF, NAN = float("inf"), float("nan")
each = pytest.mark.parametrize("number", EXHIBITS)


@pytest.fixture
def exhibit(number):
    if missing := EXHIBITS[number].missing():
        pytest.skip(missing)
    return EXHIBITS[number]


@each
def test_it_goes_wrong_on_the_smallest_input_and_passes_on_the_other(exhibit):
    assert exhibit.evidence(exhibit.passes) is None
    assert exhibit.evidence(exhibit.smallest)


def smaller_than(exhibit):
    """Inputs smaller than the smallest known: all of them where they are few, else samples."""
    size = exhibit.size(exhibit.smallest)
    if exhibit.kind.size is abs:
        return [size * f for f in (0.998, 0.9, 0.5, 0.1, 1e-3, 0)]
    if exhibit.kind.size is numbers.size:
        of = [0.0, -INF, 4096.0, 0.7]
        of += [NAN, INF, 1.0, -1.0, 256.0, 1e30] if size <= 3 else []
        return [list(row) for n in range(1, size) for row in itertools.product(of, repeat=n)]
    if exhibit.kind is shape:
        shapes = itertools.product(range(1, 33), range(1, 33))
        return [s for s in shapes if s[0] * s[1] < size]
    if isinstance(exhibit.smallest, int):
        return range(min(1, size - 1), size)
    return [(1, 2**31), (2, 2**30), (2**15, 2**16), (46340, 46340)]


@each
def test_nothing_smaller_shows_it(number, exhibit):
    inputs = list(smaller_than(exhibit))
    if number == 10:  # ten of them: each runs all of its threads
        inputs = [(1, 1024), (2, 512), (32, 32), (1, 1)]
    inputs = [raw for raw in inputs if is_taken(exhibit, raw)]
    shown = [raw for raw in inputs[:1500] if exhibit.evidence(raw)]
    assert not shown, f"{shown[:3]} are smaller than {exhibit.smallest}"


def is_taken(exhibit, raw):
    try:
        exhibit.kind.read(raw)
    except ValueError:
        return False
    return True


def _variance(x):
    return x.double().var(correction=0)


def _slope(x):
    # PyTorch's own is NaN far out, where it is 1
    x = x.double().requires_grad_()
    return torch.autograd.grad(F.gelu(x, approximate="tanh").sum(), x)[0]


def _penalty(x):
    x = x.double().requires_grad_()
    (slope,) = torch.autograd.grad((x**4).sum(), x, create_graph=True)
    return torch.autograd.grad((slope**2).sum(), x)[0]


def _rotation(position):
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    c, s = torch.tensor(float(position)).cos(), torch.tensor(float(position)).sin()
    y = torch.stack([x[0] * c - x[1] * s, x[1] * c + x[0] * s])
    return torch.autograd.grad(y, x, torch.tensor([1.0, 0.5]))[0]


# exhibit -> what its result should be, by PyTorch in float64 or by hand
TRUTH = {
    1: lambda x: F.gelu(x.double(), approximate="tanh"),
    2: torch.relu,
    3: lambda x: x.double().sign().expand(8),
    4: _variance,
    5: _slope,
    6: lambda x: torch.softmax(x.double(), 0),
    7: float,
    8: lambda size: size[0] * size[1] - 1,
    9: lambda size: torch.arange(1.0, size[0] * size[1] + 1).view(size),
    10: lambda size: 2 * torch.arange(1.0, size[0] * size[1] + 1).view(size),
    11: lambda size: 2 * torch.arange(1.0, size[0] * size[1] + 1).view(size).t(),
    12: torch.ones,
    13: lambda size: (
        torch.arange(1.0, size[0] * size[1] + 1).view(size) + torch.arange(float(size[1]))
    ),
    14: lambda x: torch.softmax(x.double(), 0),
    15: lambda ids: (ids + 1) % 10,
    16: lambda n: -torch.ones(n),
    17: lambda size: torch.full(size[1:], float(size[0])),
    18: None,  # random
    19: lambda x: _softmax_slope(x),
    20: lambda w: 2 * torch.exp(w.double()),
    21: lambda n: torch.ones(4),
    22: _rotation,
    23: _penalty,
    24: lambda x: False,
    25: lambda host_us: host_us < 25,
}


def _softmax_slope(x):
    x = x.double().requires_grad_()
    return torch.autograd.grad(torch.softmax(x, 0), x, torch.arange(1.0, x.numel() + 1).double())[0]


@each
def test_the_fix_is_right(number, exhibit):
    if TRUTH[number] is None:
        return
    for raw in (exhibit.passes, exhibit.smallest):
        read = exhibit.kind.read(raw)
        with interpreted_launches():
            fixed = exhibit.fixed[-1] if isinstance(exhibit.fixed, tuple) else exhibit.fixed
            got = torch.as_tensor(exhibit.run(fixed, read)).double()
        want = torch.as_tensor(TRUTH[number](read)).double()
        if number == 5:
            want = want.nan_to_num(1.0)
        torch.testing.assert_close(
            got, want.reshape(got.shape), rtol=1e-4, atol=1e-5, equal_nan=True
        )


def test_the_fixed_dropout_draws_other_numbers_in_each_tile():
    (fixed,) = (e for e in EXHIBITS.values() if e.title == "One mask for every tile")
    with interpreted_launches():
        y = fixed.run(fixed.fixed[-1], 64).view(4, 16)
    assert len({tuple(row.tolist()) for row in y}) == 4 and set(y.unique().tolist()) == {0.0, 2.0}


@each
def test_the_fix_is_shown_and_the_code_does_not_name_it(number):
    exhibit = EXHIBITS[number]
    lines = exhibit.fix().splitlines()
    assert any(line.startswith("+") for line in lines) and len(lines) <= 20
    assert "fixed" not in exhibit.code().lower() and "fixed" not in exhibit.fix().lower()


@pytest.mark.parametrize(
    ("number", "raw", "message"),
    [
        (1, [1], "one number"),
        (1, True, "one number"),
        (2, 3, "a list of numbers"),
        (2, [], "a list of numbers"),
        (2, ["a"], "a list of numbers"),
        (4, [1e5, 1], "10,000"),
        (9, 17, "rows, columns"),
        (9, (0, 3), "rows, columns"),
        (1, 10**400, "one number"),
        (3, 70000, "from 1 to 65504"),
        (9, (1000, 1000), "65536 elements at most"),
        (12, 0, "a whole number from 1"),
        (15, [1.5], "whole numbers"),
        (21, 11, "from 1 to 10"),
        (12, 2.0, "a whole number"),
    ],
)
def test_an_input_that_is_none_gets_a_sentence(number, raw, message):
    assert message in museum.visit(number, raw) and museum.visit(number, raw)[0] == "✘"


def test_a_failed_launch_is_not_laid_at_the_next_visitor_s_door():
    if museum.visit(10, (1, 1025))[0] != "–":
        assert museum.visit(10, (1, 1025)).startswith("✔")


def test_a_visit_says_whether_it_can_be_smaller():
    assert museum.visit(9, None).startswith("○")
    assert museum.visit(9, (16, 16)).startswith("✘")
    assert museum.visit(9, (40, 50)).startswith("●")
    assert museum.visit(9, (17, 1)).endswith("We know of nothing smaller.")
    assert museum.visit(1, museum.EXHIBITS[1].smallest).endswith("We know of nothing smaller.")
    assert museum.visit(1, 10.07).endswith("The smallest that we know is within 0.1 % of it.")
    assert museum.visit(4, [4096, 4097]).endswith("We know of no shorter list.")
    assert repr(museum.visit(9, None)) == str(museum.visit(9, None))


def test_the_op_of_the_exercises_passes_all_tests_that_it_is_put_to():
    op = row_softmax.row_softmax
    assert nb60._refuses(nb60.ordinary_tests, op) is None
    assert nb60._refuses(nb60._strict_tests, op) is None
    assert all(nb60.killed_by(nb60._strict_tests).values())


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("*dy.stride()", "dy.stride(0), 1"),
        ('-float("inf"))\n    e =', "-1e4)\n    e ="),
        ('-float("inf"))\n    e =', "-1e30)\n    e ="),
        ("tl.max(z, axis=0)", "tl.maximum(tl.max(z, axis=0), -1e6)"),
        (
            "row of dy.\n    row, cols = tl.program_id(0).to(tl.int64),",
            "row of dy.\n    row, cols = tl.program_id(0),",
        ),
        ("ctx.scale = scale", "ctx.scale = scale or 1"),
        ("_RowSoftmax.apply(x, scale)", "_RowSoftmax.apply(x, scale) if len(x) != 1 else x"),
        (
            "_RowSoftmax.apply(x, scale)",
            "_RowSoftmax.apply(x, scale) if x.shape[1] != 1 else 0 * x",
        ),
    ],
)
def test_a_mistake_that_only_the_strict_tests_find_may_be_planted(old, new):
    nb60.check_planted((old, new))


def test_an_unknown_exhibit_says_which_there_are():
    with pytest.raises(ValueError, match="from 1 to 25"):
        museum.look(26)
