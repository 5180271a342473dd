"""Exercises of notebook 45, attention forward."""

import itertools

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
from torch.utils._python_dispatch import TorchDispatchMode

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


class _Order(TorchDispatchMode):
    """Writes down in order: q and p, products with keys and with values; e, the exponentials of a tile."""

    def __init__(self, dim):
        super().__init__()
        self.dim, self.seen = dim, ""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result, name = function(*args, **(kwargs or {})), function.overloadpacket.__name__
        if name in ("mm", "addmm", "addmm_", "bmm", "baddbmm", "matmul"):
            self.seen += "p" if result.shape[-1] == self.dim else "q"
        elif (
            name.rstrip("_") in ("exp", "exp2", "_softmax")
            and result.dim() > 1
            and result.shape[-1] > 1
        ):
            self.seen += "e"
        return result


@exercise("45.2", "One tile behind", minutes=25, level=2)
def check_attend_one_behind(answer):
    generator = torch.Generator().manual_seed(0)
    cases = [(1, 1, 4, 1, 1), (1, 2, 4, 1, 1), (2, 4, 3, 2, 1), (5, 8, 7, 3, 1), (5, 8, 7, 3, 300)]
    cases += [(5, 8, 7, 8, 1), (5, 8, 7, 20, 1)]
    for n_queries, n_keys, dim, n, size in cases:
        at = f"{n_queries} queries, {n_keys} keys, {n} at a time"
        at += ", scores of hundreds" if size > 1 else ""
        options = {"generator": generator, "dtype": torch.float64}
        q, k, v = (
            torch.randn(m, dim, **options).to(machine.device()) for m in (n_queries, n_keys, n_keys)
        )
        q = size * q
        scores = q @ k.T * dim**-0.5
        with case(at), left_alone(at, q=q, k=k, v=v):
            got = attempted(answer(q, k, v, n))
        pair = isinstance(got, (tuple, list)) and len(got) == 2
        expect(pair, f"{at}: should return two tensors, o and lse")
        wants = {"o": scores.softmax(1) @ v, "lse": scores.logsumexp(1, keepdim=True)}
        for g, (name, want) in zip(got, wants.items()):
            right = isinstance(g, torch.Tensor) and g.shape == want.shape
            expect(right, f"{at}: {name} should be a tensor of shape {tuple(want.shape)}")
            off = (g - want).abs().max().item()
            hint = "; p of a tile belongs to the maximum of that tile" if n_keys > n else ""
            small = off <= 1e-9 * max(1.0, want.abs().max().item())
            expect(small, f"{at}: {name} is off by {off:.2g}{hint}")
    q, k, v = (torch.randn(m, 7, dtype=torch.float64) for m in (5, 8, 8))
    for n in (8, 4, 3):
        with _Order(7) as order:
            answer(q.to(machine.device()), k.to(machine.device()), v.to(machine.device()), n)
        want = "qe" + "qpe" * (-(-8 // n) - 1) + "p"
        expect(
            order.seen == want,
            f"8 keys, {n} at a time: the numbers are right, and the order is {order.seen}, where {want} is "
            "asked for; q is a product q kᵀ, e the exponentials of a tile, p a product p v",
        )


def _window(q, k, v, left):
    """The definition, with all S × S scores."""
    i = torch.arange(q.shape[1], device=q.device)
    visible = (i[None, :] <= i[:, None]) & (i[None, :] >= i[:, None] - left)
    scores = q @ k.mT * q.shape[-1] ** -0.5
    return torch.softmax(scores.masked_fill(~visible, -INF), -1) @ v


@exercise("45.3", "A sliding window", minutes=25, level=3)
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
