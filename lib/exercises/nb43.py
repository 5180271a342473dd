"""Exercises of notebook 43, the whole MLP."""

from lib import machine
from lib.exercises import (
    attempted,
    case,
    exercise,
    expect,
    expect_launches,
    expect_number,
    expect_op,
)
from lib.exercises.undefined import compare
from lib.exercises.watch import (
    expect_float32_products,
    expect_kernels_alone_calculate,
    expect_no_race,
)
from lib.measure import registry
from lib.nogpu.memory import count_traffic

import torch
import torch.nn.functional as F

_TILE = 16  # hidden units of a program in 43.1, rows of one in 43.3
_MOST_NUMBERS = 60


def _first_tile_only(x, w1, b1, w2, b2):
    return torch.sigmoid(
        F.linear(torch.relu(F.linear(x, w1[:_TILE], b1[:_TILE])), w2[:, :_TILE], b2)
    )


def _bias_by_row(x, w1, b1, w2, b2):
    by_row = F.pad(b1, (0, x.shape[0]))[: x.shape[0], None]  # 0 where there is none, as from a mask
    return torch.sigmoid(F.linear(torch.relu(F.linear(x, w1) + by_row), w2, b2))


def _bias_in_every_tile(x, w1, b1, w2, b2):
    n_tiles = -(-w1.shape[0] // _TILE)
    return torch.sigmoid(F.linear(torch.relu(F.linear(x, w1, b1)), w2, n_tiles * b2))


def _no_relu(x, w1, b1, w2, b2):
    return torch.sigmoid(F.linear(F.linear(x, w1, b1), w2, b2))


_FAULTS = {
    "the kernel that uses the first 16 hidden units only": _first_tile_only,
    "the kernel that takes b1 by row": _bias_by_row,
    "the kernel that adds b2 once for each tile": _bias_in_every_tile,
    "the kernel without relu": _no_relu,
}


@exercise("43.1", "One test for four faults", minutes=12, level=2)
def check_inputs_that_show_it(answer):
    inputs = attempted(answer())
    expect(
        isinstance(inputs, (tuple, list))
        and len(inputs) == 5
        and all(isinstance(t, torch.Tensor) and t.dtype == torch.float32 for t in inputs),
        "should return five float32 tensors: x, w1, b1, w2, b2",
    )
    shapes = [tuple(t.shape) for t in inputs]
    fits = [len(s) for s in shapes] == [2, 2, 1, 2, 1]
    if fits:
        (_, k), (h, inner), (h1,), (n, hidden), (n2,) = shapes
        fits = k == inner and h == h1 == hidden and n == n2
    expect(fits, f"shapes should be (M, K), (H, K), (H,), (N, H), (N,); got {shapes}")
    expect(all(bool(t.isfinite().all()) for t in inputs), "all numbers should be finite")
    count = sum(t.numel() for t in inputs)
    expect(count <= _MOST_NUMBERS, f"at most {_MOST_NUMBERS} numbers together, these are {count}")
    inputs = [t.detach().cpu().double() for t in inputs]
    x, w1, b1, w2, b2 = inputs
    want = torch.sigmoid(F.linear(torch.relu(F.linear(x, w1, b1)), w2, b2))
    for what, fault in _FAULTS.items():
        off = (fault(*inputs) - want).abs().max().item() if want.numel() else 0.0
        expect(off > 0.01, f"{what} is off by {off:.1e} at most: your test lets it pass")


# (m, k, h, itemsize, tflops, gbps, launch_us), the simplest first
_LOSING_CASES = [
    (1000, 500, 1, 2, 1.0, 1.0, 5.5),  # 1 µs for each extra tile; 5.5 + 4 µs for the second kernel
    # 4 extra tiles take just as long, and no longer: a quotient that is 4 in floats, too, in s, ms and µs
    (1000, 500, 250, 2, 1.0, 1.0, 0.0),
    (8192, 1024, 1024, 2, 600.0, 4000.0, 5.0),
    (128, 512, 256, 2, 600.0, 4000.0, 5.0),
    (65536, 64, 64, 4, 50.0, 4000.0, 0.0),
    (65536, 16384, 512, 2, 600.0, 4000.0, 5.0),
]


@exercise("43.2", "Where recomputing stops paying", minutes=8, level=1)
def check_tiles_that_lose(answer):
    for numbers in _LOSING_CASES:
        m, k, h, itemsize, tflops, gbps, launch_us = numbers
        again_us = 2 * m * k * h / tflops / 1e6
        kernel_us = launch_us + 2 * m * h * itemsize / gbps / 1e3
        want = 2 + int(kernel_us / again_us)
        what = "m, k, h, itemsize, tflops, gbps, launch_us = " + ", ".join(
            f"{v:g}" for v in numbers
        )
        what += f", where an extra product takes {again_us:.3g} µs"
        with case(what):
            expect_number(answer(*numbers), want, what, rel=1e-12)


def _two_layers(shape, dtype):
    """x, w1, b1, w2, b2 for (M, K, H, N), with no gradients."""
    tensors = registry.find("fused_mlp").inputs(shape, dtype, machine.device())
    return tuple(t.detach() for t in tensors)


def _with_nan(inputs):
    """Those inputs, with a NaN in x: relu keeps it."""

    def changed(shape, dtype):
        x, *rest = inputs(shape, dtype)
        x[0, 0] = float("nan")
        return x, *rest

    return changed


def _dw2_parts(dz2, x, w1, b1):
    hidden = torch.relu(F.linear(x, w1, b1))
    return torch.stack([a.t() @ b for a, b in zip(dz2.split(_TILE), hidden.split(_TILE))])


@exercise("43.3", "dW2 without the hidden layer", minutes=20, level=2)
def check_dw2_parts(answer):
    def inputs(shape, dtype):
        x, w1, b1, *_ = _two_layers(shape, dtype)
        generator = torch.Generator().manual_seed(0)
        dz2 = torch.randn(shape[0], shape[3], generator=generator)
        return dz2.to(x.device, dtype), x, w1, b1

    def with_nan(shape, dtype):
        dz2, x, w1, b1 = inputs(shape, dtype)
        x[0, 0] = float("nan")
        return dz2, x, w1, b1

    shapes = (
        (1, 1, 1, 1),
        (2, 3, 16, 1),
        (17, 8, 1, 2),
        (40, 33, 17, 3),
        (33, 20, 40, 64),
        (70, 100, 130, 33),
    )
    expect_op(answer, _dw2_parts, inputs, shapes=shapes, dtypes=(torch.float32,))
    expect_op(answer, _dw2_parts, with_nan, shapes=shapes[1:2], dtypes=(torch.float32,))
    # 1 row of 16 is there: the others' 0 · inf is NaN
    dz2, x, w1, b1 = inputs((1, 1, 1, 16), torch.float32)
    infinity, pads = float("inf"), "hidden in the 15 rows that pad the tile is"
    for what, weights in (
        (f"b1 = inf, {pads} relu(b1)", (w1, b1 + infinity)),
        (f"w1 = inf, {pads} NaN, of 0 · inf", (w1 + infinity, b1)),
    ):
        name = f"at (M, K, H, N) = (1, 1, 1, 16), {what}"
        with case(name):
            compare(answer, _dw2_parts, dz2, x, *weights, name=name)
    small = inputs((100, 7, 150, 3), torch.float32)
    expect_launches(lambda: answer(*small), exactly=1)
    expect_kernels_alone_calculate(lambda: answer(*small))
    expect_float32_products(lambda: answer(*small))
    traffic = count_traffic(lambda: answer(*small))
    stored, parts = sum(a.stored for a in traffic.by_argument.values()), 7 * 3 * 150 * 4
    expect(
        stored == parts,
        f"at (M, K, H, N) = (100, 7, 150, 3) the parts have {parts} bytes, and {stored} are stored",
    )


def _residual(x, w1, b1, w2, b2):
    return x + F.linear(torch.relu(F.linear(x, w1, b1)), w2, b2)


@exercise("43.4", "A residual block", minutes=25, level=3)
def check_residual_mlp(answer):
    def inputs(shape, dtype):
        return _two_layers((*shape, shape[1]), dtype)  # y is as wide as x

    shapes = ((1, 1, 1), (2, 3, 16), (1, 8, 33), (17, 33, 70), (40, 64, 129), (130, 20, 300))
    expect_op(answer, _residual, inputs, shapes=shapes, dtypes=(torch.float32,))
    expect_op(answer, _residual, _with_nan(inputs), shapes=shapes[1:2], dtypes=(torch.float32,))
    # hidden units that are not there: inf times the 0 of a mask is NaN
    name = "at (M, K, H) = (1, 1, 1), x = inf: NaN in hidden units that pad the tile"
    ones = [torch.ones_like(t) for t in inputs((1, 1, 1), torch.float32)]
    with case(name):
        compare(answer, _residual, ones[0] * float("inf"), *ones[1:], name=name)
    # more hidden units than Triton takes in one tile with 64 columns; small whole numbers, whose sums are exact
    long = [t.sign() for t in inputs((1, 64, 16_400), torch.float32)]
    with case("at (M, K, H) = (1, 64, 16400)"):
        compare(answer, _residual, *long, name="at (M, K, H) = (1, 64, 16400)")
    small = inputs((37, 24, 50), torch.float32)
    expect_launches(lambda: answer(*small), exactly=1)
    many = inputs((37, 24, 300), torch.float32)
    expect_no_race(lambda: answer(*many), "at (M, K, H) = (37, 24, 300)")
    expect_kernels_alone_calculate(lambda: answer(*small))
    expect_float32_products(lambda: answer(*small))
    traffic, x_bytes = count_traffic(lambda: answer(*small)), small[0].nbytes
    of_x = [a.loaded for a in traffic.by_argument.values() if a.loaded_distinct == x_bytes]
    expect(
        bool(of_x) and min(of_x) == x_bytes,
        f"at (37, 24, 50) x has {x_bytes} bytes and {sum(of_x)} are loaded: load a program's rows once",
    )
