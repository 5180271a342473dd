"""Exercises of notebook 60: tests that find mistakes, a mistake that tests do not find, and a shrinker."""

import inspect

from lib.exercises import (
    Wrong,
    attempted,
    case,
    exercise,
    expect,
    expect_second_derivative,
    far_apart,
)
from lib.exercises.museum import EXHIBITS, row_softmax
from lib.measure.check import check_against_float64
from lib.measure.mutants import Mutant, load, mutated
from lib.nogpu.interpreter import interpreted_launches

import torch

_TEXT = inspect.getsource(row_softmax)

# One mistake of each class of the museum; the hint says where to look, not what is wrong.
MUTANTS = {
    "what padding holds": Mutant(
        '-float("inf"))\n    e =', "0.0)\n    e =", "padding counted in the sum"
    ),
    "large numbers": Mutant(
        "tl.exp(z - tl.max(z, axis=0))", "tl.exp(z)", "exp without the maximum"
    ),
    "the layout of x": Mutant(
        "x_ptr + row * stride_m + cols * stride_n", "x_ptr + row * n_cols + cols", "strides of x"
    ),
    "the layout of dy": Mutant(
        "dy_ptr + row * stride_m + cols * stride_n", "dy_ptr + row * n_cols + cols", "strides of dy"
    ),
    "16 bits, large numbers, and a scale that rounds in 16 bits": Mutant(
        "scale * x.to(tl.float32)", "scale * x", "scaled in the dtype of x"
    ),
    "the backward pass": Mutant("dx = scale * y * (", "dx = y * (", "scale forgotten in dx"),
    "a term of the gradient": Mutant(
        "(dy - tl.sum(y * dy, axis=0))", "(dy - tl.sum(dy, axis=0) / n_cols)", "another sum in dx"
    ),
    "what a call leaves behind": Mutant(
        "(n_rows, n_cols), dx = y.shape, torch.empty_like(y)",
        "(n_rows, n_cols), dx = y.shape, dy",
        "dx written over dy",
    ),
    "many rows": Mutant(
        "padded to BLOCK_SIZE.\n    row, cols = tl.program_id(0).to(tl.int64),",
        "padded to BLOCK_SIZE.\n    row, cols = tl.program_id(0).to(tl.int64) % 64,",
        "rows from 64 on written over the first",
    ),
    "long rows": Mutant(
        "size = triton.next_power_of_2(n_cols)\n        if y.numel() > 0:\n            _forward",
        "size = min(1024, triton.next_power_of_2(n_cols))\n        if y.numel() > 0:\n            _forward",
        "rows cut off at 1024",
    ),
    "NaN": Mutant("z = tl.where(mask,", "z = tl.where(mask & (x == x),", "NaN taken for padding"),
    "the value of scale": Mutant("ctx.scale = scale", "ctx.scale = abs(scale)", "its sign lost"),
}


def _op(mutant):
    return load("row_softmax", mutated(_TEXT, mutant)).row_softmax


def _refuses(tests, op):
    """What `tests(op)` raises, in words, or None when it passes."""
    try:
        with interpreted_launches():
            tests(op)
    except NotImplementedError:
        raise
    except Exception as error:
        return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    return None


# --- 60.1 ------------------------------------------------------------------------------------------------


def ordinary_tests(op):
    """The tests that one writes first."""
    torch.manual_seed(0)
    for shape in ((64, 64), (32, 128), (17, 100)):
        x = torch.randn(shape, requires_grad=True)
        y, right = op(x, 0.5), row_softmax.row_softmax_eager(x, 0.5)
        torch.testing.assert_close(y, right)
        dy = torch.randn(shape)
        (dx,), (dx_right,) = (torch.autograd.grad(out, x, dy) for out in (y, right))
        torch.testing.assert_close(dx, dx_right)


_HARD_INPUTS = (
    (lambda: torch.randn(5, 7), 0.5),
    (lambda: torch.randn(7, 5).t(), -2.0),
    (lambda: torch.randn(130, 3)[::2], 0.5),
    (lambda: 200 * torch.randn(9, 33), 1.0),
    (lambda: torch.randn(3, 2100), 0.5),
    (lambda: torch.randn(2, 5000), 0.5),
    (lambda: torch.randn(5, 3) - 200, 1.0),
    (lambda: torch.randn(0, 5), 1.0),
    (lambda: torch.randn(17, 33).bfloat16(), 1 / 3),
    (lambda: 1000 * torch.randn(4, 9).half(), 100.0),
    (lambda: torch.randn(300, 3), 0.5),
    (lambda: torch.randn(2, 10_000), 0.5),
    (lambda: torch.tensor([[1.0, torch.nan, 2.0], [-torch.inf, 0.0, 1.0]]), 0.5),
    (lambda: torch.full((2, 3), -torch.inf), 0.5),
    (lambda: torch.randn(5, 3) - 1e30, 1.0),
    (lambda: torch.randn(1, 37), 0.5),
    (lambda: torch.randn(37, 1), 0.5),
    (lambda: torch.randn(5, 7), 0.0),
)


def _strict_tests(op):
    def sums(version):  # their gradient has stride 0
        return lambda x, scale: version(x, scale).sum(0)

    eager = row_softmax.row_softmax_eager
    leaf = torch.randn(3, 5, requires_grad=True)
    expect_second_derivative(lambda x: op(x, 0.5), lambda x: eager(x, 0.5), leaf)
    far = (lambda: far_apart(torch.randn(3, 5).half()), 0.5)
    for make, scale in (*_HARD_INPUTS, far):
        torch.manual_seed(0)
        x = make().detach().requires_grad_()
        check_against_float64(op, eager, x, scale)
        check_against_float64(sums(op), sums(eager), x, scale)
        y = op(x, scale)
        dy = torch.randn(y.shape).to(y.dtype)
        again = [dy, dy.t().contiguous().t(), *([far_apart(dy)] if make is far[0] else [])]
        first, *others = (
            torch.autograd.grad(y, x, grad, retain_graph=True)[0] for grad in [dy, *again]
        )
        for other in others:  # the same numbers in any layout give the same
            torch.testing.assert_close(first, other, rtol=0, atol=0, equal_nan=True)


@exercise("60.1", "A mistake that they do not find", minutes=15, level=2)
def check_planted(edit):
    pair = (
        isinstance(edit, (tuple, list)) and len(edit) == 2 and all(isinstance(t, str) for t in edit)
    )
    expect(pair, "give two strings: a piece of row_softmax.py and what to put in its place")
    try:
        op = _op(Mutant(*edit, "your mistake"))
    except (ValueError, SyntaxError) as error:
        raise Wrong(str(error)) from None
    why = _refuses(ordinary_tests, op)
    expect(why is None, f"the tests find it: {why}")
    expect(
        _refuses(_strict_tests, op),
        "our stricter tests do not find it either, with odd shapes of up to 300 rows and 10,000 columns, views"
        " of x and dy, 16 bits, large numbers, NaN, rows of -inf, scales of 0 and below, rows far apart, and"
        " two kinds of second backward pass: plant one that shows there",
    )


# --- 60.2 ------------------------------------------------------------------------------------------------


def killed_by(tests):
    """{hint: does `tests` find this mistake?} for each of the mistakes."""
    return {hint: _refuses(tests, _op(mutant)) is not None for hint, mutant in MUTANTS.items()}


@exercise("60.2", "Tests that find them", minutes=20, level=2)
def check_tests(tests):
    for op in (row_softmax.row_softmax, row_softmax.row_softmax_eager):
        why = _refuses(tests, op)
        expect(why is None, f"your tests refuse {op.__name__}, which is right: {why}")
    killed = killed_by(tests)
    alive = [hint for hint, dead in killed.items() if not dead]
    rate = f"{len(killed) - len(alive)} of {len(killed)} mistakes found"
    expect(not alive, f"{rate}; one that got away has to do with {(alive or [''])[0]}")


# --- 60.3 ------------------------------------------------------------------------------------------------

_MOST_CALLS = 200
_FAILURES = (
    ("columns above 1024", lambda m, n: n > 1024, (4096, 5000)),
    ("three elements or more", lambda m, n: m * n >= 3, (700, 900)),
    (
        "17 rows or more and an odd number of columns",
        lambda m, n: m >= 17 and n % 2 == 1,
        (64, 333),
    ),
    ("at most 10 from square", lambda m, n: abs(m - n) <= 10, (50, 55)),
    ("every shape", lambda m, n: True, (1000, 1000)),
    ("this shape alone", lambda m, n: (m, n) == (48, 96), (48, 96)),
)


@exercise("60.3", "Let the machine find the smallest", minutes=20, level=3)
def check_shrink(shrink):
    for what, fails, shape in _FAILURES:
        calls = []

        def counted(candidate, fails=fails, calls=calls, at=f"{what}, from {shape}"):
            calls.append(candidate)
            expect(len(calls) <= _MOST_CALLS, f"{at}: takes more than {_MOST_CALLS} calls")
            expect(min(candidate) >= 1, f"{at}: asks about {candidate}; sizes begin at 1")
            return fails(*candidate)

        at = f"{what}, from {shape}"
        with case(at):
            result = attempted(shrink(counted, shape))
        is_shape = isinstance(result, tuple) and len(result) == 2 and all(n >= 1 for n in result)
        expect(is_shape, f"{at}: should give a shape (rows, columns), got {result!r}")
        expect(fails(*result), f"{at}: gives {result}, which does not fail")
        for less in ((result[0] - 1, result[1]), (result[0], result[1] - 1)):
            small = min(less) >= 1 and fails(*less)
            expect(not small, f"{at}: gives {result}, and {less} fails too")
    exhibit = EXHIBITS[9]
    with interpreted_launches():
        result = shrink(lambda size: exhibit.evidence(size) is not None, (40, 50))
    expect(
        exhibit.is_smallest(result),
        f"exhibit 9, from (40, 50): gives {result}; {exhibit.smallest} fails",
    )
