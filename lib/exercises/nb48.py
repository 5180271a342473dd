"""Exercises of notebook 48, attention backward and decoding."""

import math

from lib import machine
from lib.exercises import (
    Wrong,
    attempted,
    case,
    exercise,
    expect,
    expect_launches,
    expect_op,
    left_alone,
)
from lib.exercises.watch import expect_float32_products, expect_no_pass
from lib.nogpu.memory import OutOfBounds, count_traffic

import torch
from triton.runtime.errors import InterpreterError

INF = float("inf")


def _capped(q, k, v, cap):
    scores = q @ k.T / math.sqrt(q.shape[1])
    capped = cap * torch.tanh(scores / cap)
    return torch.softmax(capped, 1) @ v, capped.logsumexp(1, keepdim=True)


def _share_of_dq(leaf, k, v, o, lse, do, cap):
    """What these keys add to dq, by autograd: the other weights are constants."""
    capped = cap * torch.tanh(leaf @ k.T / math.sqrt(leaf.shape[1]) / cap)
    p = torch.exp(capped - lse)
    change = p - p.detach()
    result = (o + change @ v) / (1 + change.sum(1, keepdim=True))
    return torch.autograd.grad(result, leaf, do)[0]


@exercise("48.1", "dq of a capped score", minutes=20, level=2)
def check_capped_dq(answer):
    generator = torch.Generator().manual_seed(0)
    # One key: its weight is 1 whatever the score is, so dq is 0. A cap of 1e6 is none.
    sizes = [(1, 1, 1e6), (2, 1, 1e6), (2, 4, 1e6), (2, 4, 1.0), (9, 16, 2.0)]
    for n, s, d, cap in [*((s, s, d, cap) for s, d, cap in sizes), (1, 2, 4, 1e6), (4, 9, 16, 2.0)]:
        options = {"generator": generator, "dtype": torch.float64}
        tensors = [torch.randn(s, d, **options).to(machine.device()) for _ in range(4)]
        q, k, v, do = (3 * tensors[0], *tensors[1:])
        leaf = q.clone().requires_grad_()
        at = f"S = {s}, D = {d}, cap = {cap:g}"
        o, lse = _capped(q, k, v, cap)
        if n < s:
            at += f", the first {n} of {s} keys"
            k, v = k[:n], v[:n]
        want = _share_of_dq(leaf, k, v, o, lse, do, cap)
        given = left_alone(at, q=q, k=k, v=v, o=o, lse=lse, do=do)
        with case(at), given, torch.inference_mode():
            got = attempted(answer(q, k, v, o, lse, do, cap))
        expect(
            isinstance(got, torch.Tensor) and got.shape == want.shape,
            f"{at}: should be a tensor of shape {tuple(want.shape)}",
        )
        worst = (got - want).abs().max().item()
        hint = "; without a cap it is right" if cap < 1e6 else ""
        hint = "; with all keys it is right" if n < s else hint
        expect(
            worst <= 1e-9 * max(1.0, want.abs().max().item()),
            f"{at}: dq is off by {worst:.2g}, where its largest is {want.abs().max():.2g}{hint}",
        )


def _finished(scores, v):
    """(o, lse) of some keys, float64; without any keys zeros and -inf."""
    if scores.shape[-1] == 0:
        shape = scores.shape[:-1]
        return v.new_zeros(*shape, v.shape[-1]), v.new_full(shape, -INF)
    return scores.softmax(-1) @ v, scores.logsumexp(-1)


@exercise("48.2", "Join two results", minutes=10, level=2)
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
        ("NaN in v, keys in both", 2, 3, 1.0, 0.0),
    ]
    for what, n_a, n_b, size, ahead in cases:
        scores = size * torch.randn(2, 5, n_a + n_b, generator=generator, dtype=torch.float64)
        scores[..., n_a:] += ahead
        v = torch.randn(2, n_a + n_b, 4, generator=generator, dtype=torch.float64)
        if what.startswith("NaN"):
            v[0, 0, 0] = math.nan
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
            same = g.shape == want.shape and torch.allclose(g, want, 1e-9, 1e-12, equal_nan=True)
            off = None
            if g.shape == want.shape:
                off = (~torch.isclose(g, want, 1e-9, 1e-12, True)).flatten().int().argmax()
            expect(
                same,
                f"{what}: {name} of both parts together is "
                + (
                    f"{want.flatten()[off]:.4g} in its first wrong place, not {g.flatten()[off]:.4g}"
                    if off is not None
                    else f"of shape {tuple(want.shape)}, not {tuple(g.shape)}"
                ),
            )


def _from_pages(q, k_pages, v_pages, table, lengths):
    """The definition, text after text."""
    rows = []
    for text, length in enumerate(lengths.tolist()):
        at = table[text, : -(-length // 16)].long()
        k, v = (pages[at].flatten(0, 1)[:length] for pages in (k_pages, v_pages))
        rows.append(torch.softmax(q[text] @ k.T * q.shape[2] ** -0.5, -1) @ v)
    return torch.stack(rows)


def _in_pages(n_heads, dim, lengths, dtype):
    """q, pages in any order, NaN where no text has a key, and a table with no page behind a text's last."""
    generator = torch.Generator().manual_seed(0)
    each = [-(-length // 16) for length in lengths]
    slots = max(each) + (len(lengths) > 1)  # a table of one text ends with its last page
    table = torch.full((len(lengths), slots), 2**20, dtype=torch.int32)
    places = (torch.randperm(sum(each) + 2, generator=generator)[: sum(each)]).split(each)
    k, v = (torch.full((sum(each) + 2, 16, dim), float("nan")) for _ in range(2))
    for text, (length, mine) in enumerate(zip(lengths, places)):
        table[text, : len(mine)] = mine
        for pages in (k, v):
            rows = torch.full((len(mine) * 16, dim), float("nan"))
            rows[:length] = torch.randn(length, dim, generator=generator)
            pages[mine] = rows.unflatten(0, (-1, 16))
    q = torch.randn(len(lengths), n_heads, dim, generator=generator)
    floats = [t.to(machine.device(), dtype) for t in (q, k, v)]
    return (
        *floats,
        table.to(machine.device()),
        torch.tensor(lengths, dtype=torch.int32).to(machine.device()),
    )


def _expect_far_pages(answer):
    """Wrong if offsets overflow for a page past 2**31 elements. Of the memory before it nothing is touched."""
    dim, number = 16, 2**31 // (16 * 16)
    q, page, _, table, lengths = (t.cpu() for t in _in_pages(2, dim, [16], torch.bfloat16))
    page = page[table[0, :1].long()]
    try:
        pages = torch.empty(number + 1, 16, dim, dtype=torch.bfloat16)
    except RuntimeError:  # a system that counts memory which nobody touches
        return
    pages[number] = page[0]
    got, at = [], f"with 16 keys on page {number:,}, D = 16, bfloat16,"
    try:
        count_traffic(
            lambda: got.append(answer(q, pages, pages, table.new_full((1, 1), number), lengths))
        )
    except (OutOfBounds, InterpreterError) as error:
        says = str(error.__cause__ or error).partition(";")[0]
        raise Wrong(f"{at} {says}; cast offsets to tl.int64") from None
    want = _from_pages(q, page, page, torch.zeros_like(table), lengths)
    expect(torch.allclose(got[0], want, 0.02, 0.02), f"{at} o is wrong; cast offsets to tl.int64")


@exercise("48.3", "Keys in pages", minutes=25, level=3)
def check_attend_pages(answer):
    kinds = {
        (1, 1, 16): [16],
        (1, 2, 16): [5],
        (1, 4, 32): [40],
        (3, 4, 16): [1, 33, 16],
        (2, 16, 64): [70, 100],
    }
    expect_op(
        answer,
        _from_pages,
        lambda shape, dtype: _in_pages(*shape[1:], kinds[shape], dtype),
        shapes=tuple(kinds),
        what=" (texts, heads, D)",
    )

    def large(shape, dtype):
        q, *others = _in_pages(*shape[1:], kinds[shape], dtype)
        return 100 * q, *others

    what = ", scores of hundreds, whose exponentials overflow"
    expect_op(answer, _from_pages, large, shapes=((3, 4, 16),), dtypes=(torch.float32,), what=what)
    _expect_far_pages(answer)
    inputs = _in_pages(4, 32, [40, 100], torch.float32)
    expect_launches(lambda: answer(*inputs), exactly=1)
    expect_float32_products(lambda: answer(*inputs))
    page = 16 * 32 * 4
    expect_no_pass(lambda: answer(*inputs), 3 * page, "at lengths 40 and 100")
    traffic = count_traffic(lambda: answer(*inputs)).by_argument.values()
    loaded, least = sum(a.loaded for a in traffic), inputs[0].nbytes + 2 * (3 + 7) * page
    expect(
        loaded <= least + 1024,  # and table and lengths
        f"2 texts of 40 and 100 keys, 4 heads, D = 32: it loads {loaded} bytes; q and the 3 and 7 pages of k "
        f"and of v are {least}",
    )
