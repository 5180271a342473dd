"""Exercises of notebook 47, quantized_linear."""

from lib import machine
from lib.exercises import (
    Wrong,
    attempted,
    case,
    exercise,
    expect,
    expect_any_dy,
    expect_launches,
    expect_number,
    expect_op,
    left_alone,
)
from lib.exercises.watch import (
    Results,
    expect_float32_products,
    expect_kernels_alone_calculate,
    expect_no_race,
)
from lib.nogpu.memory import count_traffic

import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode


@exercise("47.1", "The bytes of a weight", minutes=6, level=1)
def check_weight_bytes(answer):
    for n_out, n_in, group in ((1, 64, 64), (3, 256, 64), (48, 1024, 128), (14336, 4096, 128)):
        for zero_points in (False, True):
            what = f"n_out = {n_out}, n_in = {n_in}, group = {group}, zero_points = {zero_points}"
            with case(what):
                got = answer(n_out, n_in, group, zero_points)
            n_groups = n_out * n_in // group
            expect_number(got, n_out * n_in / 2 + n_groups * (3 if zero_points else 2), what, 1e-12)


def _normal(shape, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(machine.device(), dtype)


# --- 47.2 ----------------------------------------------------------------------------------------------------

# M, N, K and the group: from small to large, so that the first failure is the smallest one
_GROUPED = (
    (1, 1, 64, 64),
    (2, 3, 128, 128),
    (1, 2, 128, 64),
    (3, 5, 64, 16),
    (17, 33, 160, 32),
    (33, 65, 512, 256),
    (20, 40, 48, 16),
    (5, 7, 384, 128),
)


def _grouped_inputs(sizes, dtype):
    m, n, k, group = sizes
    generator = torch.Generator().manual_seed(1)
    numbers = torch.randint(0, 16, (n, k), generator=generator).to(machine.device(), torch.int8)
    # scales of neighbours differ much, so that a wrong one shows
    scales = _normal((k // group, n), seed=2).abs().add(0.1) / k**0.5
    scales *= torch.where(torch.arange(k // group) % 2 == 0, 1, 5).to(scales)[:, None]
    return _normal((m, k), dtype), numbers, scales.to(dtype), group


def _grouped_eager(x, numbers, scales, group):
    steps = scales.to(x.dtype).t().repeat_interleave(group, 1)
    return F.linear(x, (numbers.to(x.dtype) - 8) * steps)


@exercise("47.2", "Groups that are no steps", minutes=20, level=2)
def check_any_group(answer):
    expect_op(answer, _grouped_eager, _grouped_inputs, shapes=_GROUPED)
    long = {"shapes": ((2, 64, 8192, 128),), "dtypes": (torch.bfloat16,)}
    expect_op(answer, _grouped_eager, _grouped_inputs, **long)
    inputs = _grouped_inputs((17, 33, 160, 32), torch.float32)
    with left_alone("at (M, N, K) = (17, 33, 160)", numbers=inputs[1], scales=inputs[2]):
        y = answer(*inputs)
    expect(y.dtype == torch.float32, f"y should have x's dtype, float32, and has {y.dtype}")
    expect_launches(lambda: answer(*inputs), exactly=1)
    expect_kernels_alone_calculate(lambda: answer(*inputs))
    expect_float32_products(lambda: answer(*inputs))
    expect_no_race(lambda: answer(*inputs), "at (M, N, K) = (17, 33, 160)")
    with case("at (M, N, K) = (17, 33, 160), loads and stores checked"):
        count_traffic(lambda: answer(*inputs))


# --- 47.3 ----------------------------------------------------------------------------------------------------


def _weights(group):
    """What a group may look like: {name: weight of one group}."""
    near = _normal(group)
    return {
        "normal numbers": near,
        "numbers of 0.5 and more alone": near.abs() + 0.5,
        "numbers of -0.5 and less alone": -near.abs() - 0.5,
        "small numbers": near * 1e-3,
        "tiny numbers": near * 1e-5,
        "numbers from -0.1 to 0.9": torch.linspace(-0.1, 0.9, group, device=near.device),
        "a group of zeros": torch.zeros_like(near),
        "every second number 0": near * (torch.arange(group, device=near.device) % 2),
        "one number many times": torch.full_like(near, 0.3),
    }


class _NoNaN(TorchDispatchMode):
    """Wrong where an op inside gives a NaN: as an integer it may be any."""

    def __init__(self, what):
        super().__init__()
        self.what = what

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.is_floating_point() and out.isnan().any():
            name = function.overloadpacket.__name__
            raise Wrong(
                f"{self.what}: {name} gives NaN, and which integer a NaN becomes is not defined"
            )
        return out


@exercise("47.3", "A zero point", minutes=15, level=2)
def check_zero_points(answer):
    for what, weight in _weights(64).items():
        with case(what), _NoNaN(what):
            stored = attempted(answer(weight[None].clone(), 64))
        _expect_stored(stored, weight[None], 64, what)
    of_all = torch.stack([w for w in _weights(128).values()])
    weight = torch.cat([of_all, of_all.flip(0) * 3, of_all.roll(1, 0)], 1)
    what = f"a weight of {len(weight)} rows, 384 columns, groups of 128"
    with case(what), left_alone(what, weight=weight):
        stored = attempted(answer(weight, 128))
    _expect_stored(stored, weight, 128, what)


def _expect_stored(stored, weight, group, what):
    expect(
        isinstance(stored, (tuple, list)) and len(stored) == 3,
        "give a tuple (numbers, scales, zeros)",
    )
    n, k = weight.shape
    numbers, scales, zeros = stored
    shapes = {"numbers": (n, k), "scales": (k // group, n), "zeros": (k // group, n)}
    dtypes = {"numbers": torch.int8, "scales": torch.float32, "zeros": torch.int8}
    for (name, shape), t in zip(shapes.items(), stored):
        expect(isinstance(t, torch.Tensor), f"{name} should be a tensor")
        expect(tuple(t.shape) == shape, f"{what}: {name} should be {shape}, is {tuple(t.shape)}")
        expect(t.dtype == dtypes[name], f"{what}: {name} should be {dtypes[name]}, is {t.dtype}")
    for name, t in (("numbers", numbers), ("zeros", zeros)):
        least, most = int(t.min()), int(t.max())
        expect(least >= 0 and most <= 15, f"{what}: {name} go from {least} to {most}, not 0 to 15")
    expect(scales.isfinite().all(), f"{what}: a scale is NaN or infinite")
    steps, at_zero = (t.t().repeat_interleave(group, 1) for t in (scales, zeros))
    back = (numbers.float() - at_zero) * steps
    where = weight == 0
    expect((back[where] == 0).all(), f"{what}: a weight of 0 comes back as another number")
    grouped = weight.unflatten(1, (-1, group))
    low, high = grouped.amin(2).clamp(max=0), grouped.amax(2).clamp(min=0)
    exact = ((high - low) / 15).t()
    if not torch.allclose(scales[exact > 0], exact[exact > 0], rtol=1e-5):
        size = "large" if (scales - exact).sum() > 0 else "small"
        raise Wrong(f"{what}: scales are too {size}; 16 integers have 15 steps between them")
    if not (all_right := (zeros - (-low.t() / exact.clamp(min=1e-30))).abs() <= 0.501)[
        exact > 0
    ].all():
        n_wrong = int((~all_right)[exact > 0].sum())
        raise Wrong(
            f"{what}: {n_wrong} zero points are not the integer that is nearest to 0's place"
        )
    # the ends are cut by what z was rounded by, half a step, and rounded by half a step themselves
    inside = (back - weight).abs() <= 0.5001 * steps + 1e-7
    ends = (numbers == 0) | (numbers == 15)
    right = inside | (ends & ((back - weight).abs() <= 1.0001 * steps + 1e-7))
    n_wrong = int((~right).sum())
    expect(
        n_wrong == 0,
        f"{what}: {n_wrong} of {right.numel()} numbers come back off by more than half a step",
    )


# --- 47.4 ----------------------------------------------------------------------------------------------------

_ALPHA = 2.0


def _qlora_inputs(sizes, dtype):
    m, n, k, rank = sizes
    generator = torch.Generator().manual_seed(3)
    numbers = torch.randint(-127, 128, (n, k), generator=generator).to(machine.device(), torch.int8)
    scales = (_normal(n, seed=4).abs() + 0.2) / (64 * k**0.5)
    trained = (
        _normal((m, k), dtype),
        _normal((rank, k), dtype, 5) / k**0.5,
        _normal((n, rank), dtype, 6),
    )
    x, lora_a, lora_b = (t.to(dtype).requires_grad_() for t in trained)
    return x, numbers, scales.to(dtype), lora_a, lora_b, _ALPHA


def _qlora_long_inputs(sizes, dtype):
    """With a small B, so that the sums over W are most of y and of dx, and their rounding shows."""
    *others, lora_b, alpha = _qlora_inputs(sizes, dtype)
    return *others, (lora_b.detach() / 64).requires_grad_(), alpha


def _qlora_eager(x, numbers, scales, lora_a, lora_b, alpha):
    weight = numbers.to(x.dtype) * scales.to(x.dtype)[:, None]
    return F.linear(x, weight) + alpha * (x @ lora_a.t()) @ lora_b.t()


@exercise("47.4", "QLoRA's gradient", minutes=25, level=3)
def check_qlora(answer):
    # M, N, K, r
    shapes = ((1, 1, 1, 1), (2, 3, 5, 2), (5, 7, 3, 4), (17, 33, 40, 5), (33, 70, 65, 8))
    expect_op(answer, _qlora_eager, _qlora_inputs, shapes=shapes)
    long = {"shapes": ((4, 8192, 64, 2), (4, 64, 8192, 2)), "dtypes": (torch.bfloat16,)}
    expect_op(answer, _qlora_eager, _qlora_long_inputs, **long, what=", a long sum")
    inputs = _qlora_inputs((17, 33, 40, 5), torch.float32)
    leaves = [inputs[i] for i in (0, 3, 4)]
    expect_any_dy(answer, inputs, "at (M, N, K) = (17, 33, 40)")
    y = answer(*inputs)
    one = y.new_ones(()).expand(y.shape)  # as y.sum().backward() sends it
    got = torch.autograd.grad(answer(*inputs), leaves, one)
    want = torch.autograd.grad(_qlora_eager(*inputs), leaves, one)
    for name, a, b in zip(("x", "lora_a", "lora_b"), got, want):
        alike = torch.allclose(a, b, rtol=1e-4, atol=1e-4)
        expect(alike, f"the gradient of {name} is wrong for a dy of strides 0")
    _expect_no_floats_of_w(answer)
    n_launches = count_traffic(lambda: answer(*inputs)).launches
    expect(n_launches >= 1, "y should be one Triton kernel's, and no kernel is launched")
    launches = count_traffic(lambda: torch.autograd.grad(answer(*inputs), leaves, one)).launches
    expect(launches > n_launches, "the backward pass should launch a Triton kernel, for dx")
    expect_float32_products(lambda: torch.autograd.grad(answer(*inputs), leaves, one))


def _expect_no_floats_of_w(answer):
    """Wrong where PyTorch makes floats of integers, or where a tensor of floats is larger than 1/16 of W.

    With one row of x no other tensor needs to be: 16 partial sums of y have half as many numbers.
    """
    m, n, k, rank = sizes = 1, 512, 512, 2
    inputs = _qlora_inputs(sizes, torch.float32)
    leaves = [inputs[i] for i in (0, 3, 4)]
    with Results() as results:
        y = answer(*inputs)
        torch.autograd.grad(y, leaves, torch.ones_like(y))
    instead = "no part of W may be floats outside the kernels, which make them of the integers"
    for r in results.seen:
        what = (
            f"with M = {m}, N = {n} and K = {k}, {r.op} makes {'×'.join(map(str, r.shape))} floats"
        )
        expect(not r.of_integers, f"{what} of integers; {instead}")
        too_large = r.is_float and r.shape.numel() > n * k // 16
        expect(not too_large, f"{what}, where W has {n}×{k}; {instead}")
