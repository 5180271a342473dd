"""Exercises of notebook 35, rope."""

import itertools

from lib import machine
from lib.exercises import (
    Wrong,
    attempted,
    case,
    exercise,
    expect,
    expect_any_dy,
    expect_launches,
    expect_op,
)
from lib.exercises.watch import expect_no_pass
from lib.ops.rope import rope_eager, rope_tables

import torch

_TOLERANCE = 1e-4
_TABLE_TOLERANCE = 1e-5  # a float32 angle of 16383 radians is off by up to 5e-4


@exercise("35.1", "Stretch the positions", minutes=8, level=1)
def check_stretched_tables(answer):
    for rotary_dim, stretch, base in ((4, 2, 10000.0), (64, 4, 10000.0), (128, 8.0, 500000.0)):
        new_base = base * stretch ** (rotary_dim / (rotary_dim - 2))
        want = rope_tables(16384, rotary_dim, new_base)
        at = f"rotary_dim = {rotary_dim}, stretch = {stretch}, base = {base:g}"
        with case(at):
            got = attempted(answer(16384, rotary_dim, stretch, base))
        expect(
            isinstance(got, (tuple, list))
            and len(got) == 2
            and all(isinstance(t, torch.Tensor) for t in got),
            f"{at}: should return two tensors, cos and sin",
        )
        got = [table.cpu() for table in got]
        for name, table, right in zip(("cos", "sin"), got, want):
            _expect_kind(f"{at}: {name}", table, right)
            _expect_table(f"{at}: {name}", table[:1], right[:1])
        _expect_speeds(at, got, want)
        for name, table, right in zip(("cos", "sin"), got, want):
            _expect_table(f"{at}: {name}", table, right)


def _expect_kind(what, got, want):
    expect(got.shape == want.shape, f"{what} is {tuple(got.shape)}, should be {tuple(want.shape)}")
    expect(got.dtype == want.dtype, f"{what} is {got.dtype}, should be {want.dtype}")


def _expect_speeds(at, got, want):
    """The first pair whose angle from one position to the next is wrong says more than its cos."""
    mine, right = (torch.atan2(sin[1], cos[1]) for cos, sin in (got, want))
    wrong = ~((mine - right).abs() <= 1e-3 * right)
    if wrong.any():
        pair = int(wrong.int().argmax())
        raise Wrong(
            f"{at}: from one position to the next pair {pair} turns by {mine[pair]:.3g} radians, "
            f"should be {right[pair]:.3g}"
        )


def _expect_table(what, got, want):
    wrong = ~((got - want).abs() <= _TABLE_TOLERANCE)
    if wrong.any():
        position, pair = divmod(int(wrong.flatten().int().argmax()), want.shape[1])
        late = "; early ones are right: is something float32 on the way?" if position > 50 else ""
        raise Wrong(
            f"{what} of pair {pair} at position {position} is {got[position, pair]:.6f}, "
            f"should be {want[position, pair]:.6f}{late}"
        )


# --- 35.2 ----------------------------------------------------------------------------------------------------


def _turned(shape, sin_sign=1, interleaved=False):
    """Random numbers of `shape` in float64, rotated; the same numbers for every sign and pairing."""
    x = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    cos, sin = rope_tables(shape[1], shape[3], dtype=torch.float64)
    return rope_eager(x, x, cos, sin_sign * sin, interleaved=interleaved)[0]


_BUGS = {
    # the gradient of random numbers, with the sign of forward and with the right one
    "the sign of the backward pass": lambda shape: (_turned(shape), _turned(shape, sin_sign=-1)),
    "the pairing": lambda shape: (_turned(shape), _turned(shape, interleaved=True)),
}


def _shows(bug, shape):
    return not torch.allclose(*_BUGS[bug](shape))


def _smaller(n_elements):
    """All shapes with fewer elements; D is even, for a head is made of pairs."""
    sizes = range(1, n_elements)
    return (
        (b, s, h, d)
        for b, s, h, d in itertools.product(sizes, sizes, sizes, sizes)
        if d % 2 == 0 and b * s * h * d < n_elements
    )


@exercise("35.2", "The smallest shapes that show it", minutes=10, level=2)
def check_smallest_shapes(shapes):
    expect(
        isinstance(shapes, (tuple, list)) and len(shapes) == 2,
        "give two shapes: one for the sign, one for the pairing",
    )
    for bug, shape in zip(_BUGS, shapes):
        attempted(shape)
        expect(
            isinstance(shape, (tuple, list))
            and len(shape) == 4
            and all(isinstance(n, int) and not isinstance(n, bool) and n > 0 for n in shape),
            f"{bug}: give four positive whole numbers, (B, S, H, D)",
        )
        shape = tuple(shape)
        expect(shape[3] % 2 == 0, f"{bug}: D is {shape[3]}; a head is made of pairs: D is even")
        n_elements = torch.Size(shape).numel()
        expect(n_elements <= 10**6, f"{bug}: {shape} has {n_elements} elements; try far fewer")
        expect(_shows(bug, shape), f"{bug}: at {shape} right and wrong give the same numbers")
        # trying the shapes of fewer than 10 elements is enough, and they are few
        expect(
            not any(_shows(bug, other) for other in _smaller(min(n_elements, 10))),
            f"{bug}: {shape} shows it, but so does a shape with fewer elements",
        )


# --- 35.3 ----------------------------------------------------------------------------------------------------

_IMAGES = (
    (1, 1, 1, 1, 4),
    (1, 1, 2, 1, 4),
    (1, 3, 1, 1, 4),
    (1, 2, 3, 1, 8),
    (2, 3, 5, 2, 24),
    (2, 7, 4, 3, 64),
)


def _image(shape, dtype):
    x = torch.randn(shape, device=machine.device()).to(dtype).requires_grad_()
    return x, *rope_tables(max(shape[1:3]) + 1, shape[4] // 2, device=machine.device())


def _eager_2d(x, cos, sin):
    by_row, by_column = x.chunk(2, dim=-1)
    n_rows, n_columns = x.shape[1:3]
    at_row = (t[:n_rows, None, None].to(x.dtype) for t in (cos, sin))  # (rows, 1, 1, D / 4)
    at_column = (t[:n_columns, None].to(x.dtype) for t in (cos, sin))  # (columns, 1, D / 4)
    return torch.cat([_turn(by_row, *at_row), _turn(by_column, *at_column)], dim=-1)


def _turn(x, c, s):
    x1, x2 = x.chunk(2, dim=-1)
    return torch.cat([x1 * c - x2 * s, x2 * c + x1 * s], dim=-1)


@exercise("35.3", "Two directions, and back", minutes=20, level=2)
def check_rope_2d(answer):
    expect_op(answer, _eager_2d, _image, shapes=_IMAGES)
    x, cos, sin = _image(_IMAGES[3], torch.float32)
    expect_launches(lambda: answer(x.detach(), cos, sin), exactly=1, what="the forward pass ")
    y = answer(x, cos, sin)
    expect_launches(
        lambda: torch.autograd.grad(y, x, torch.randn_like(y)), exactly=1, what="the backward pass "
    )
    _expect_one_pass(answer)
    _expect_gradient_of_sum(answer, x, cos, sin)
    expect_any_dy(answer, _image(_IMAGES[4], torch.float32), f"at shape {_IMAGES[4]}")


def _expect_one_pass(answer):
    x, cos, sin = _image(_IMAGES[-1], torch.float32)
    ys, dy = [], torch.randn_like(x)
    expect_no_pass(lambda: ys.append(answer(x, cos, sin)), x.nbytes, "the forward pass")
    expect_no_pass(lambda: torch.autograd.grad(ys, x, dy), x.nbytes, "the backward pass")


def _expect_gradient_of_sum(answer, x, cos, sin):
    what = f"at shape {tuple(x.shape)}: the gradient of y.sum()"
    (want,) = torch.autograd.grad(_eager_2d(x, cos, sin).sum(), x)
    with case(f"{what}, whose incoming gradient has strides of 0"):
        (dx,) = torch.autograd.grad(answer(x, cos, sin).sum(), x)
    right = torch.allclose(dx, want, atol=_TOLERANCE)
    expect(right, f"{what} is wrong; the incoming one has strides of 0")
