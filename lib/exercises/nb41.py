"""Exercises of notebook 41, linear_glu."""

import itertools
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
    plain,
)
from lib.exercises.undefined import compare
from lib.exercises.watch import (
    expect_float32_products,
    expect_kernels_alone_calculate,
    expect_no_pass,
    expect_no_race,
)
from lib.measure import registry
from lib.nogpu.memory import count_traffic

import torch
import torch.nn.functional as F


@exercise("41.1", "Which rows of W", minutes=8, level=1)
def check_rows_of_w(answer):
    for n_hidden, block_n in itertools.product((1, 2, 6, 16), (2, 4, 16)):
        for tile in range(-(-n_hidden // block_n)):
            cols = range(tile * block_n, min((tile + 1) * block_n, n_hidden))
            want = [*cols, *(n_hidden + col for col in cols)]
            at = f"tile {tile}, block_n = {block_n}, n_hidden = {n_hidden}"
            with case(at):
                got = plain(attempted(answer(tile, block_n, n_hidden)))
            expect(isinstance(got, list), f"{at}: should be a list, got {type(got).__name__}")
            hint = (
                f"the tile has columns {cols.start} to {cols.stop - 1} of y, and each has a row in both halves "
                "of W; the first half's come first"
            )
            expect(got == want, f"{at}: {got} is not right; {hint}")


@exercise("41.2", "Half a mask", minutes=10, level=2)
def check_x_that_shows_it(rows):
    ordinary = isinstance(rows, list) and rows and all(isinstance(row, list) for row in rows)
    expect(ordinary, "give a list of rows, each of them a list of numbers")
    expect(
        len({len(row) for row in rows}) == 1 and rows[0],
        "all rows have to be of one length, 1 or more",
    )
    numbers = [number for row in rows for number in row]
    expect(
        all(isinstance(n, (int, float)) and not isinstance(n, bool) for n in numbers),
        "give numbers; float('nan') and float('inf') are numbers, too",
    )
    expect(
        any(_reads_what_is_not_finite(rows, i) for i in range(len(rows))),
        "with this x no row of finite numbers gets NaN: what follows each in memory is finite, or masked",
    )
    expect(len(numbers) <= 2, f"x shows the fault with {len(numbers)} numbers, but fewer do it")


def _reads_what_is_not_finite(rows, i, block_k=16):
    """Whether row i is finite and a step of its product reads a number past its end that is not."""
    n_in, numbers = len(rows[0]), [number for row in rows for number in row]
    padded = -(-n_in // block_k) * block_k
    behind = numbers[(i + 1) * n_in : i * n_in + padded]
    return all(map(math.isfinite, rows[i])) and not all(map(math.isfinite, behind))


@exercise("41.3", "A sibling: SwiGLU", minutes=15, level=2)
def check_linear_swiglu(answer):
    def eager(x, weight, bias):
        x1, x2 = F.linear(x, weight, bias).chunk(2, dim=-1)
        return F.silu(x1) * x2

    shapes = (
        (1, 1, 1),
        (1, 1, 2),
        (2, 3, 1),
        (3, 17, 5),
        (17, 33, 21),
        (64, 64, 128),
        (70, 40, 96),
    )
    expect_op(answer, eager, _layer, shapes=shapes)
    expect_op(answer, eager, _large_layer, shapes=((17, 33, 21),))
    _expect_bias_before_rounding(answer)
    small = _layer((33, 24, 40), torch.float32)
    expect_launches(lambda: answer(*small), exactly=1)
    expect_kernels_alone_calculate(lambda: answer(*small))
    expect_float32_products(lambda: answer(*small))
    stored = count_traffic(lambda: answer(*small))
    written = sum(a.stored for a in stored.by_argument.values())
    expect(
        written <= 33 * 40 * 4,
        f"at (33, 24, 40): y has {33 * 40 * 4} bytes, and the kernel stores {written}",
    )


def _large_layer(shape, dtype):
    """silu of hundreds: exp of that is infinite."""
    x, weight, bias = _layer(shape, dtype)
    return 300 * x, weight, bias


def _expect_bias_before_rounding(answer):
    """Sums of 257, of 9 bits, and a bias of -256 that leaves the last of them; 257 in bfloat16 is 256."""
    numbers = {"dtype": torch.bfloat16, "device": machine.device()}
    x, weight = torch.ones(5, 3, **numbers), torch.tensor([[128, 128, 1]] * 14, **numbers)
    at = "at (M, K, H) = (5, 3, 7), bfloat16, sums of 257 and a bias of -256"
    with case(at):
        y = attempted(answer(x, weight, torch.full((14,), -256, **numbers)))
    off = (y.float() - 1 / (1 + math.exp(-1))).abs().max().item()  # silu(1) · 1
    expect(
        off < 0.01,
        f"{at}: y is off by {off:.2g}; add the bias in float32, before anything is rounded",
    )


def _layer(shape, dtype):
    """x (M, K), weight (2H, K), bias (2H,), with no gradients."""
    tensors = registry.find("linear_glu").inputs(shape, dtype, machine.device())
    return tuple(t.detach() for t in tensors)


@exercise("41.4", "Backward in one pass", minutes=20, level=3)
def check_reglu_backward(answer):
    for shape, dtype in itertools.product(
        ((1, 1), (2, 1), (1, 3), (5, 7), (17, 33), (130, 65), (300, 129)),
        (torch.float32, torch.bfloat16),
    ):
        for layout in ("contiguous", "all strides zero", "transposed"):
            at = f"at (M, H) = {shape}, {str(dtype).removeprefix('torch.')}, dy {layout}"
            with case(at):
                _compare_reglu(answer, at, *_dy_and_h(shape, dtype, layout))
    for dtype, (what, make) in itertools.product(
        (torch.float32, torch.bfloat16),
        (("inf in dy where x2 ≤ 0", _with_inf), ("NaN in x2", _with_nan)),
    ):
        at = f"at (M, H) = (5, 7), {str(dtype).removeprefix('torch.')}, {what}"
        with case(at):
            _compare_reglu(answer, at, *make(*_dy_and_h((5, 7), dtype)))
    _expect_float32_sums(answer)
    _expect_one_pass(answer)
    dy, h = _dy_and_h((300, 40), torch.float32)
    expect_no_race(lambda: answer(dy, h), "at (M, H) = (300, 40)")


def _with_inf(dy, h):
    h[0, 7], h[1, 8], dy[0, 0], dy[1, 1] = -1, 0, torch.inf, -torch.inf
    return dy, h


def _with_nan(dy, h):
    h[2, 7 + 3] = torch.nan
    return dy, h


def _compare_reglu(answer, at, dy, h):
    dtype = h.dtype
    dh, db = _two_tensors(answer(dy, h), at)
    expect(dh.shape == h.shape and dh.dtype == dtype, f"{at}: dh should be like h, got {_look(dh)}")
    expect(dh.is_contiguous(), f"{at}: dh should be contiguous")
    expect(db.shape == h.shape[1:], f"{at}: db should be ({h.shape[1]},), got {tuple(db.shape)}")
    # each of the two by the rule for outputs; sums of a rounded dh are eager's
    compare(lambda *t: answer(*t)[0], lambda *t: _reglu(*t)[0], dy, h, name=f"{at}, dh")
    compare(lambda *t: answer(*t)[1].to(dtype), lambda *t: _reglu(*t)[1], dy, h, name=f"{at}, db")


def _expect_float32_sums(answer):
    """db of whole numbers that cancel: exact in float32, and not from parts that were rounded to 8 bits."""
    generator = torch.Generator().manual_seed(0)
    half = torch.randint(128, 256, (600, 6), generator=generator).to(torch.bfloat16)
    # the second half takes away what the first adds, 5 rows on, so that no part of it rounds as one before
    h = torch.cat([half, half.roll(5, 0)]).to(machine.device())
    dy = torch.ones(1200, 3, dtype=h.dtype, device=h.device)
    dy[600:] = -1
    at = "at (M, H) = (1200, 3), bfloat16, whole numbers whose sums are 0"
    with case(at):
        _, db = _two_tensors(answer(dy, h), at)
    off = db.float().abs().max().item()
    expect(off == 0, f"{at}: db is off by {off:g}; keep sums in float32 until the last is done")


def _reglu(dy, h):
    x1, x2 = h.chunk(2, dim=-1)
    dh = torch.cat([dy * torch.relu(x2), torch.where(x2 <= 0, 0, dy * x1)], dim=-1)
    return dh, dh.sum(0)


def _dy_and_h(shape, dtype, layout="contiguous"):
    n_rows, n_hidden = shape
    generator = torch.Generator(device=machine.device()).manual_seed(0)
    dy, h = (
        torch.randn(size, device=machine.device(), generator=generator).to(dtype)
        for size in ((n_rows, n_hidden), (n_rows, 2 * n_hidden))
    )
    h[1::3, n_hidden + 1 :: 2] = 0  # the kink of relu, where its slope counts as 0
    if layout == "all strides zero":
        dy = dy[:1, :1].expand(shape)
    if layout == "transposed":
        dy = dy.t().contiguous().t()
    return dy, h


def _two_tensors(result, at):
    attempted(result)
    pair = isinstance(result, (tuple, list)) and len(result) == 2
    if not pair or not all(isinstance(t, torch.Tensor) for t in result):
        raise Wrong(f"{at}: should return two tensors, dh and db")
    return result


def _look(t):
    return f"{tuple(t.shape)}, {t.dtype}"


def _expect_one_pass(answer):
    """dy and h loaded once, dh stored once and not read again, neither by a kernel nor by an op of torch."""
    for layout in ("contiguous", "transposed"):
        dy, h = _dy_and_h((512, 64), torch.float32, layout)
        at = f"at (512, 64), dy {layout}"
        traffic = count_traffic(lambda dy=dy, h=h: answer(dy, h))
        expect(traffic.launches > 0, "should launch a Triton kernel, launched none")
        loaded = sum(a.loaded for a in traffic.by_argument.values())
        expect(
            loaded < 3.9 * dy.nbytes,
            f"{at}: dy and h have {dy.nbytes + h.nbytes} bytes, and kernels load {loaded}",
        )
        expect_no_pass(lambda dy=dy, h=h: answer(dy, h), dy.nbytes, at)
