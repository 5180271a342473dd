"""Exercises of notebook 45, attention."""

import itertools
import math

from lib import machine
from lib.exercises import (
    attempted,
    case,
    exercise,
    expect,
    expect_launches,
    expect_op,
    left_alone,
    plain,
    too_many_or_few,
)
from lib.exercises.watch import expect_float32_products, expect_no_pass
from lib.nogpu.memory import count_traffic

import torch

INF = float("inf")


def _tiles(n, block_m, block_n):
    """(tiles without a mask, tiles with one), tile by tile from what each query sees."""
    whole = masked = 0
    for i, j in itertools.product(range(0, n, block_m), range(0, n, block_n)):
        queries, keys = range(i, min(i + block_m, n)), range(j, j + block_n)
        sees = [key < n and key <= query for query in queries for key in keys]
        whole += all(sees)
        masked += any(sees) and not all(sees)
    return whole, masked


@exercise("45.1", "Count the tiles", minutes=10, level=1)
def check_count_tiles(answer):
    sizes = [(1, 1, 1), (2, 1, 1), (64, 16, 16), (64, 32, 16), (64, 16, 32)]
    sizes += [(65, 16, 16), (100, 32, 16), (65, 64, 64), (97, 16, 48)]
    for n, block_m, block_n in sizes:
        at = f"n = {n}, tiles of {block_m} × {block_n}"
        with case(at):
            got = plain(attempted(answer(n, block_m, block_n)))
        expect(
            isinstance(got, (tuple, list)) and len(got) == 2,
            f"{at}: should be two numbers, got {got!r}",
        )
        for what, g, want in zip(("without", "with"), got, _tiles(n, block_m, block_n)):
            number = isinstance(g, (int, float)) and not isinstance(g, bool)
            expect(number, f"{at}: should be two numbers, got {g!r} tiles {what} a mask")
            off = too_many_or_few(g, want)
            expect(
                g == want,
                f"{at}: {g} tiles {what} a mask are {off}; query i sees keys 0 to i, the last is {n - 1}",
            )


def _finished(scores, v):
    """(o, lse) of some keys, float64; without any keys zeros and -inf."""
    if scores.shape[-1] == 0:
        shape = scores.shape[:-1]
        return v.new_zeros(*shape, v.shape[-1]), v.new_full(shape, -INF)
    return scores.softmax(-1) @ v, scores.logsumexp(-1)


@exercise("45.2", "Join two results", minutes=10, level=2)
def check_join(answer):
    generator = torch.Generator().manual_seed(0)
    cases = [
        ("one key each", 1, 1, 1.0, 0.0),
        ("three keys and one", 3, 1, 1.0, 0.0),
        ("a with the larger scores", 3, 4, 1.0, -30.0),
        ("b with the larger scores", 3, 4, 1.0, 30.0),
        ("scores whose exponential overflows", 3, 4, 2000.0, 0.0),
        ("no key in a", 0, 3, 1.0, 0.0),
        ("no key in b", 3, 0, 1.0, 0.0),
        ("no key in either", 0, 0, 1.0, 0.0),
    ]
    for what, n_a, n_b, size, ahead in cases:
        scores = size * torch.randn(2, 5, n_a + n_b, generator=generator, dtype=torch.float64)
        scores[..., n_a:] += ahead
        v = torch.randn(2, n_a + n_b, 4, generator=generator, dtype=torch.float64)
        scores, v = scores.to(machine.device()), v.to(machine.device())
        parts = [_finished(scores[..., :n_a], v[:, :n_a]), _finished(scores[..., n_a:], v[:, n_a:])]
        names = dict(zip(("o_a", "lse_a", "o_b", "lse_b"), (*parts[0], *parts[1])))
        with case(what), left_alone(what, **names):
            got = attempted(answer(*names.values()))
        expect(
            isinstance(got, (tuple, list)) and len(got) == 2, "should return two tensors, o and lse"
        )
        for name, g, want in zip(("o", "lse"), got, _finished(scores, v)):
            expect(isinstance(g, torch.Tensor), f"{what}: {name} is no tensor")
            expect(g.dtype == want.dtype, f"{what}: {name} is {g.dtype}, should be {want.dtype}")
            same = g.shape == want.shape and torch.allclose(g, want, rtol=1e-9, atol=1e-12)
            off = None
            if g.shape == want.shape:
                off = (~torch.isclose(g, want, 1e-9, 1e-12)).flatten().int().argmax()
            expect(
                same,
                f"{what}: {name} of both parts together is "
                + (
                    f"{want.flatten()[off]:.4g} in its first wrong place, not {g.flatten()[off]:.4g}"
                    if off is not None
                    else f"of shape {tuple(want.shape)}, not {tuple(g.shape)}"
                ),
            )


def _capped(q, k, v, cap):
    scores = q @ k.T / math.sqrt(q.shape[1])
    capped = cap * torch.tanh(scores / cap)
    return torch.softmax(capped, 1) @ v, capped.logsumexp(1, keepdim=True)


@exercise("45.3", "dq of a capped score", minutes=15, level=2)
def check_capped_dq(answer):
    generator = torch.Generator().manual_seed(0)
    # One key: its weight is 1 whatever the score is, so dq is 0. A cap of 1e6 is none.
    for s, d, cap in [(1, 1, 1e6), (2, 1, 1e6), (2, 4, 1e6), (2, 4, 1.0), (9, 16, 2.0)]:
        options = {"generator": generator, "dtype": torch.float64}
        tensors = [torch.randn(s, d, **options).to(machine.device()) for _ in range(4)]
        q, k, v, do = (3 * tensors[0], *tensors[1:])
        leaf = q.clone().requires_grad_()
        (want,) = torch.autograd.grad(_capped(leaf, k, v, cap)[0], leaf, do)
        at = f"S = {s}, D = {d}, cap = {cap:g}"
        o, lse = _capped(q, k, v, cap)
        given = left_alone(at, q=q, k=k, v=v, o=o, lse=lse, do=do)
        with case(at), given, torch.inference_mode():
            got = attempted(answer(q, k, v, o, lse, do, cap))
        expect(
            isinstance(got, torch.Tensor) and got.shape == want.shape,
            f"{at}: should be a tensor of shape {tuple(want.shape)}",
        )
        worst = (got - want).abs().max().item()
        hint = "; without a cap it is right" if cap < 1e6 else ""
        expect(
            worst <= 1e-9 * max(1.0, want.abs().max().item()),
            f"{at}: dq is off by {worst:.2g}, where its largest is {want.abs().max():.2g}{hint}",
        )


def _window(q, k, v, left):
    """The definition, with all S × S scores."""
    i = torch.arange(q.shape[1], device=q.device)
    visible = (i[None, :] <= i[:, None]) & (i[None, :] >= i[:, None] - left)
    scores = q @ k.mT * q.shape[-1] ** -0.5
    return torch.softmax(scores.masked_fill(~visible, -INF), -1) @ v


@exercise("45.4", "A sliding window", minutes=25, level=3)
def check_window_attention(answer):
    def inputs(shape, dtype):
        generator = torch.Generator().manual_seed(0)
        tensors = (torch.randn(shape, generator=generator) for _ in range(3))
        return tuple(t.to(machine.device(), dtype) for t in tensors)

    for left in (0, 5, 32, 40, 1000):
        shapes = ((1, 1, 16), (1, 8, 16), (2, 33, 16), (1, 64, 16), (2, 100, 32))
        expect_op(
            lambda *t, left=left: answer(*t, left),
            lambda *t, left=left: _window(*t, left),
            inputs,
            shapes=[(h, s, d) for h, s, d in shapes],
            dtypes=(torch.float32, torch.bfloat16),
        )

    def large(shape, dtype):
        q, k, v = inputs(shape, dtype)
        return 100 * q, k, v

    expect_op(
        lambda *t: answer(*t, 5),
        lambda *t: _window(*t, 5),
        large,
        shapes=((2, 33, 16),),
        dtypes=(torch.float32,),
        what=", scores of hundreds, whose exponentials overflow",
    )
    q, k, v = inputs((1, 256, 16), torch.float32)
    expect_launches(lambda: answer(q, k, v, 40), exactly=1)
    expect_float32_products(lambda: answer(q, k, v, 40))
    scores = 256 * 256 * q.itemsize
    expect_no_pass(lambda: answer(q, k, v, 40), scores, "at (H, S, D) = (1, 256, 16)")
    for left in (0, 31, 32, 40, 64, 95):
        _expect_visible_tiles(answer, q, k, v, left)


def _expect_visible_tiles(answer, q, k, v, left):
    """Wrong unless each 32 queries load the tiles from the first one's first key to the last one's last."""
    traffic = count_traffic(lambda: answer(q, k, v, left))
    n_rows = q.shape[1]
    tiles = sum(i // 32 - max(0, i - left) // 32 + 1 for i in range(0, n_rows, 32))
    loaded = sum(a.loaded for a in traffic.by_argument.values())
    least = q.nbytes + 2 * tiles * 32 * q.shape[2] * q.itemsize
    expect(
        loaded <= least,
        f"H = 1, S = {n_rows}, D = {q.shape[2]}, left = {left}: it loads {loaded} bytes; q and the {tiles} "
        f"tiles of k and of v with a visible key are {least}",
    )
