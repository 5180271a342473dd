"""Exercises of notebook 35, rope."""

from lib import machine
from lib.exercises import exercise, expect, expect_launches, expect_number, expect_op
from lib.ops.rope import rope_eager, rope_tables

import torch


@exercise("35.1", "The fewest bytes", minutes=6, level=1)
def check_bytes(answer):
    cases = [(1, 1, 1, 1, 2, 2, 4), (2, 3, 4, 2, 8, 8, 2), (2, 3, 4, 2, 8, 6, 2)]
    for b, s, hq, hk, d, r, itemsize in cases:
        for in_place in (False, True):
            columns = r if in_place else d
            want = 2 * b * s * (hq + hk) * columns * itemsize
            where = "in place" if in_place else "out of place"
            what = f"B={b}, S={s}, {hq} and {hk} heads, D={d}, R={r}, {itemsize} bytes, {where}"
            expect_number(answer(b, s, hq, hk, d, r, itemsize, in_place), want, what)


@exercise("35.2", "The smallest shape that shows it", minutes=8, level=2)
def check_smallest_shape(shape):
    expect(
        isinstance(shape, (tuple, list))
        and len(shape) == 4
        and all(isinstance(n, int) and n > 0 for n in shape),
        "give a tuple of four positive whole numbers, (B, S, H, D)",
    )
    b, s, h, d = shape
    expect(d % 2 == 0, f"D is {d}: a head is made of pairs, so D has to be even")
    tokens = torch.arange(b * s)
    expect(
        not torch.equal(tokens, tokens % s),
        f"at {tuple(shape)} the kernel is right: all {b * s} tokens have the position that it takes",
    )
    expect(b * s * h * d <= 4, f"{tuple(shape)} shows it, but so does a shape with fewer elements")


def _randn(shape, dtype):
    return torch.randn(shape, device=machine.device()).to(dtype)


_SHAPES = ((1, 1, 1, 1, 2), (1, 3, 1, 1, 4), (2, 3, 2, 1, 8), (2, 5, 3, 3, 80), (3, 17, 4, 2, 64))


def _with_positions(shape, dtype):
    b, s, hq, hk, d = shape
    start = torch.tensor([0, 7, 30])[:b, None]
    positions = (torch.arange(s) - start).clamp_min(0) + 2  # padded in front
    cos, sin = rope_tables(s + 2, d, device=machine.device())
    q, k = (_randn((b, s, h, d), dtype) for h in (hq, hk))
    return q, k, cos, sin, positions.to(machine.device())


def _eager_at(q, k, cos, sin, positions):
    rows = [
        rope_eager(q[i : i + 1], k[i : i + 1], cos[at], sin[at]) for i, at in enumerate(positions)
    ]
    return tuple(torch.cat(parts) for parts in zip(*rows))


@exercise("35.3", "A position for each token", minutes=15, level=2)
def check_positions(answer):
    expect_op(answer, _eager_at, _with_positions, shapes=_SHAPES)
    expect_launches(lambda: answer(*_with_positions(_SHAPES[2], torch.float32)))


def _with_weight(shape, dtype):
    b, s, h, _, d = shape
    cos, sin = rope_tables(s, d, device=machine.device())
    return 3 * _randn((b, s, h, d), dtype), 1 + _randn((d,), dtype), cos, sin


def _small_numbers(shape, dtype):
    """So small that eps counts."""
    x, *rest = _with_weight(shape, dtype)
    return 1e-3 * x, *rest


def _eager_rms_rope(x, weight, cos, sin):
    n = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * weight
    return rope_eager(n, n, cos, sin)[0]


@exercise("35.4", "Normalise, then rotate", minutes=20, level=3)
def check_rms_rope(answer):
    expect_op(answer, _eager_rms_rope, _with_weight, shapes=_SHAPES)
    expect_op(answer, _eager_rms_rope, _small_numbers, shapes=_SHAPES[2:3])
    expect_launches(lambda: answer(*_with_weight(_SHAPES[2], torch.float32)), exactly=1)
