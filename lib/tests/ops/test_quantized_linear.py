"""quantized_linear: packing, scales and zero points, parts of K, machine code; QuantizedLinear, and QLoRA."""

import copy
import functools
import math
from unittest import mock

from lib import machine
from lib.measure.check import check_against_float64
from lib.nogpu.compile_only import compile_for, instruction_mix, loop_mix, signature_of
from lib.nogpu.memory import count_traffic
from lib.ops import quantized_linear as op_file
from lib.ops.quantized_linear import Plan, Tile
from lib.tests.ops import cases
from lib.tests.ops.battery import assert_close

import pytest
import torch
import torch.nn.functional as F
import triton

KINDS = {
    "int8": {"kind": "int8"},
    "fp8": {"kind": "fp8"},
    "int4": {},
    "int4 by 64": {"group": 64},
    "int4 by 64, zero points": {"group": 64, "zero_points": True},
    "int4, zero points": {"zero_points": True},
}
kinds = pytest.mark.parametrize("kind", KINDS)
dtypes = pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64]
)
FEW = Plan(Tile(16, 32, 4, 2), 3, True)  # as for decoding: K in parts, scaled sums
MANY = Plan(Tile(64, 64, 4, 2))  # as for some more rows: scaled numbers
WHOLE = Plan(None)  # as for prefill


def normal(*shape, dtype=torch.float32, seed=0):
    generator = torch.Generator(machine.device()).manual_seed(seed)
    return torch.randn(*shape, generator=generator, device=machine.device()).to(dtype)


def layer(module, n_in=256, n_out=24, dtype=torch.float32, bias=True, **how):
    """(a torch.nn.Linear, the same quantized)."""
    torch.manual_seed(0)
    linear = torch.nn.Linear(n_in, n_out, bias, machine.device(), dtype)
    return linear, module.QuantizedLinear.from_linear(linear, **how)


# --- packing -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("group", [64, 128])
def test_every_number_comes_back_from_every_place(module, group):
    """-8 to 7, in each of the eight places of a word: of the definition, and of the kernel."""
    device = machine.device()
    for shift in range(16):
        numbers = (torch.arange(2 * group, device=device) + shift).remainder(16)
        numbers = (numbers + torch.arange(3, device=device)[:, None] * 5).remainder(16)
        packed = module._pack(numbers.view(3, 2, group))
        assert (packed.dtype, tuple(packed.shape)) == (torch.int32, (3, group // 4))
        weight = module.QuantizedWeight(packed, torch.ones(2, 3, device=device))
        assert torch.equal(module.dequantize(weight), numbers - 8.0)
        eye = torch.eye(2 * group, device=device)
        assert torch.equal(module.quantized_linear_triton(eye, *weight).T, numbers - 8.0)


@pytest.mark.parametrize("group", [64, 128])
def test_the_order_in_a_word_is_the_drawn_one(module, group):
    """Word j has 2j and 2j + 1 of each quarter: here numbers that tell quarter and place in it."""
    k = torch.arange(group, device=machine.device())
    words = module._pack((4 * (k // (group // 4)) + k % 4)[None, None])
    assert words.tolist() == [[0xD951C840 - 2**32, 0xFB73EA62 - 2**32] * (group // 16)]


@dtypes
def test_numbers_are_exact_with_every_zero_point(module, dtype):
    """By bits, not by conversion, in 16 bits: n - zero for n and zero of 0 to 15, both ways and for dx."""
    device = machine.device()
    numbers = torch.arange(16, device=device).repeat_interleave(8).expand(16, 128)
    zeros = torch.arange(16, dtype=torch.int8, device=device)[None]
    scales = torch.ones(1, 16, dtype=dtype, device=device)
    weight = module._pack(numbers[:, None]), scales, zeros
    want = (numbers - zeros.T).to(dtype)
    for plan in (FEW, MANY, WHOLE):
        eye = torch.eye(128, dtype=dtype, device=device)
        assert torch.equal(module.quantized_linear_triton(eye, *weight, plan=plan).T, want)
        x = torch.zeros(16, 128, dtype=dtype, device=device, requires_grad=True)
        y = module.quantized_linear_triton(x, *weight, plan=plan)
        (dx,) = torch.autograd.grad(y, x, torch.eye(16, dtype=dtype, device=device))
        assert torch.equal(dx, want)


@dtypes
def test_every_int8_is_exact(module, dtype):
    device = machine.device()
    packed = torch.arange(-128, 128, device=device).to(torch.int8)[None]
    eye = torch.eye(256, dtype=dtype, device=device)
    scales = torch.ones(1, 1, dtype=dtype, device=device)
    y = module.quantized_linear_triton(eye, packed, scales)
    assert torch.equal(y[:, 0], packed[0].to(dtype))


@dtypes
@pytest.mark.parametrize(
    "has_fp8", [True, False], ids=["converted in the kernel", "converted before"]
)
def test_every_fp8_is_exact(module, dtype, has_fp8):
    """All 254 numbers, subnormal ones and both zeros too, in either product, and as on GPUs before Ada."""
    bits = torch.arange(256, device=machine.device()).to(torch.uint8)
    packed = bits[bits % 128 < 127].repeat(17, 1)
    want = packed[0].view(torch.float8_e4m3fn).to(dtype)
    scales = torch.ones(1, 17, dtype=dtype, device=packed.device)
    eye = torch.eye(254, dtype=dtype, device=packed.device, requires_grad=True)
    with mock.patch.object(module, "_has_fp8", return_value=has_fp8):
        for plan in (None, FEW._replace(scales_sums=False), MANY, WHOLE):
            y = module.quantized_linear_triton(eye, packed, scales, plan=plan)
            assert torch.equal(y, want[:, None].expand(254, 17))
            (dx,) = torch.autograd.grad(y, eye, torch.eye(254, 17, dtype=dtype, device=y.device))
            assert torch.equal(dx[:17], want.expand(17, 254))
    assert (want[:127].diff() > 0).all(), "which float8_e4m3fn orders by its bits"


def test_fp8_that_is_nan_stays_nan(module):
    """`quantize` makes none; a weight from elsewhere shows it, in its row of W alone."""
    packed = torch.zeros(5, 40, dtype=torch.uint8, device=machine.device())
    packed[1, 3], packed[4, 39] = 0x7F, 0xFF
    scales = torch.ones(1, 5, device=packed.device)
    x = torch.ones(3, 40, device=packed.device)
    want = op_file.quantized_linear_eager(x, packed, scales)
    assert want[0].isnan().tolist() == [False, True, False, False, True]
    for plan in (None, FEW._replace(scales_sums=False), MANY, WHOLE):
        y = module.quantized_linear_triton(x, packed, scales, plan=plan)
        assert torch.equal(y.isnan(), want.isnan())


# --- quantizing ----------------------------------------------------------------------------------------------


@kinds
@dtypes
def test_each_weight_is_half_a_step_off_at_most(module, kind, dtype):
    weight = normal(24, 256, dtype=dtype)
    q = module.quantize(weight, **KINDS[kind])
    assert q.scales.dtype == dtype
    assert tuple(q.shape) == (24, 256)
    scales = q.scales.double().T.repeat_interleave(q.group, 1)
    error = (module.dequantize(q).double() - weight.double()).abs()
    # and where a scale of few digits is rounded down, the largest number is cut by so much
    slack = 128 * torch.finfo(dtype).eps if "int8" in kind else 16 * torch.finfo(dtype).eps
    if kind == "fp8":  # of each number's own step: 3 bits after the point, and 2**-9 for the least
        slack = 448 * torch.finfo(dtype).eps
        scales = torch.maximum(weight.double().abs() / 8, scales / 512)
    assert (error <= (0.5 + slack) * scales).all()


@kinds
def test_numbers_are_the_nearest_of_the_scales_that_are_stored(module, kind):
    """In bfloat16, whose rounding moves a scale by up to 1/256: integers of the scale before would differ."""
    weight = normal(24, 256, dtype=torch.bfloat16)
    q = module.quantize(weight, **KINDS[kind])
    ones = q._replace(scales=torch.ones_like(q.scales, dtype=torch.float32))
    scales = q.scales.float().T.repeat_interleave(q.group, 1)
    most = {"int8": 127, "fp8": 448}.get(kind, 7)
    want = weight.float() / scales
    want = want if "zero" in kind else want.clamp(-most, most)
    want = want.to(torch.float8_e4m3fn).float() if kind == "fp8" else torch.round(want)
    differ = module.dequantize(ones) != want
    # with zero points the ends are cut, to which a group's largest and smallest number go
    assert differ.sum() <= (2 * q.scales.numel() if "zero" in kind else 0)
    if "zero" not in kind:
        assert want.abs().max() == most, "and the largest number has the largest size"


@kinds
def test_a_group_has_a_scale_of_its_own(module, kind):
    """A large number makes its own group coarse, from its first column to its last, and no other."""
    weight = normal(3, 256)
    before = module.dequantize(module.quantize(weight, **KINDS[kind]))
    group = module.quantize(weight, **KINDS[kind]).group
    for column in (0, group - 1, group, 255):
        if column >= 256:
            continue
        other = weight.clone()
        other[1, column] = 1e3
        changed = module.dequantize(module.quantize(other, **KINDS[kind])) != before
        first = column // group * group
        assert changed[1, first : first + group].any()
        changed[1, first : first + group] = False
        assert not changed.any()


def test_zero_points_use_all_integers_and_keep_zero(module):
    weight = normal(5, 128).abs() + 1
    weight[:, 7] = 0.0
    weight[2] *= -1
    with_zeros, without = module.quantize(weight, zero_points=True), module.quantize(weight)
    assert with_zeros.zeros.tolist() == [[0, 0, 15, 0, 0]]
    assert (module.dequantize(with_zeros)[:, 7] == 0).all()
    far = module.quantize(weight[:, 8:72].abs() + 100, group=64, zero_points=True)
    assert far.zeros.tolist() == [[0] * 5], (
        "0 is one of 16 integers also where all numbers are larger"
    )
    errors = [(module.dequantize(q) - weight).square().mean() for q in (with_zeros, without)]
    assert errors[0] < 0.4 * errors[1]


def test_integers_times_a_step_come_back_whole(module):
    for most, how in ((7, {}), (7, {"group": 64}), (127, {"kind": "int8"})):
        numbers = torch.arange(256, device=machine.device()).remainder(2 * most + 1) - most
        weight = numbers.repeat(4, 1) * 0.25
        assert_close(module.dequantize(module.quantize(weight, **how)), weight, roundings=4)
    zero = torch.zeros(4, 128, device=machine.device())
    for how in KINDS.values():
        q = module.quantize(zero, **how)
        assert (module.dequantize(q) == 0).all()
        ones = q._replace(scales=torch.ones_like(q.scales))
        assert (module.dequantize(ones) == 0).all(), (
            "its integers are 0, and not what is left of a NaN"
        )


@kinds
def test_numbers_past_the_largest_are_cut(module, kind):
    """In float16 a scale below 6e-5 has few digits: of one rounded down by a third the largest would be 671."""
    most, device = {"int8": 127, "fp8": 448}.get(kind, 7), machine.device()
    weight = torch.full((2, 256), 1.45 * most * 2**-24, dtype=torch.float16, device=device)
    weight[1] *= -1
    q = module.quantize(weight, **KINDS[kind])
    if "zero" not in kind:
        assert (q.scales == 2**-24).all()
        assert torch.equal(module.dequantize(q) * 2.0**24, weight.sign() * most)
    assert torch.equal(module.dequantize(q).sign(), weight.sign())


def test_a_weight_of_no_rows(module):
    for how in KINDS.values():
        assert tuple(module.dequantize(module.quantize(normal(0, 256), **how)).shape) == (0, 256)


def test_a_weight_of_any_strides(module):
    weight = normal(256, 24)
    got, want = module.quantize(weight.T), module.quantize(weight.T.contiguous())
    assert torch.equal(got.packed, want.packed)
    assert torch.equal(got.scales, want.scales)


@kinds
def test_error_against_the_full_weight(module, kind):
    """That of rounding to a step: the root of the mean square of a step / √12 for each of K numbers.

    In fp8 a number from 1 to 2 has a step of 1/8; as often of any size, its square is 1.5 / log(2) on average.
    """
    x, weight = normal(64, 256, seed=1), normal(48, 256) / 16
    q = module.quantize(weight, **KINDS[kind])
    error = (module.quantized_linear_triton(x, *q) - x @ weight.T).square().mean().sqrt()
    steps = q.scales.square().mean()
    if kind == "fp8":
        steps = weight.square().mean() / 64 / (1.5 / math.log(2))
    expected = (256 * steps / 12).sqrt()
    assert 0.7 * expected < error < 1.2 * expected


# --- the product ---------------------------------------------------------------------------------------------


@kinds
@pytest.mark.parametrize("n_rows", [1, 16, 17, 64, 65])
def test_rows_of_decoding_and_prefill(module, kind, n_rows):
    """As chosen, an odd N, and scales of another dtype: the float64 rule, and both ways are alike."""
    q = module.quantize(normal(33, 256) / 16, **KINDS[kind])
    x = normal(n_rows, 256, dtype=torch.bfloat16, seed=1).requires_grad_()
    bias = normal(33, dtype=torch.bfloat16, seed=2).requires_grad_()
    tensors = x, *q, bias
    for plan in (None, FEW, MANY, WHOLE):
        call = functools.partial(module.quantized_linear_triton, activation="silu", plan=plan)
        eager = functools.partial(op_file.quantized_linear_eager, activation="silu")
        check_against_float64(call, eager, *tensors, slack=2e-2)
    exact = [t if t is None or not t.is_floating_point() else t.detach().float() for t in tensors]
    few, many = (module.quantized_linear_triton(*exact, plan=plan) for plan in (FEW, MANY))
    assert_close(few, many, roundings=16)


@kinds
def test_parts_of_k_are_added_in_one_order(module, kind):
    """The same bits for any run, and for a row whatever stands beside it."""
    q, x = module.quantize(normal(40, 640), **KINDS[kind]), normal(16, 640, seed=1)
    for n_parts in (1, 2, 3, 4, 5, 99):
        plan = FEW._replace(n_parts=n_parts)
        y = module.quantized_linear_triton(x, *q, plan=plan)
        assert torch.equal(y, module.quantized_linear_triton(x, *q, plan=plan))
        assert torch.equal(y[3:4], module.quantized_linear_triton(x[3:4], *q, plan=plan))
        assert_close(y, op_file.quantized_linear_eager(x, *q), roundings=512)


@pytest.mark.parametrize("activation", ["relu", "gelu", "sigmoid"])
def test_parts_of_k_are_finished_once(module, activation):
    """Bias and activation after the sum of all parts, z beside y, in float16 that a part would overflow."""
    q = module.quantize(normal(24, 384), group=64)
    x = normal(5, 384, seed=1).requires_grad_()
    bias = normal(24, seed=2).requires_grad_()
    call = functools.partial(module.quantized_linear_triton, activation=activation, plan=FEW)
    eager = functools.partial(op_file.quantized_linear_eager, activation=activation)
    check_against_float64(call, eager, x, *q, bias, slack=1e-5)


def test_parts_may_be_larger_than_float16_holds(module):
    q, plan = module.quantize(normal(8, 256).half().fill_(1)), FEW._replace(n_parts=2)
    x = torch.full((3, 256), 1000.0, dtype=torch.float16, device=q.packed.device)
    x[:, 128:] *= -1
    assert not module.quantized_linear_triton(x, *q, plan=plan).any()


def test_where_cublas_takes_over(module):
    """In 16 bits from 129 rows on, for 8 bits from 257; in float32 never."""

    def makes_w(n_rows, kind, dtype):
        q, x = module.quantize(normal(8, 128, dtype=dtype), kind), normal(n_rows, 128, dtype=dtype)
        seen = count_traffic(lambda: module.quantized_linear_triton(x, *q))
        return any(name.startswith("_weight_kernel") for name in seen.by_argument)

    for kind, most in (("int4", 128), ("int8", 256), ("fp8", 256)):
        for dtype in (torch.bfloat16, torch.float16):
            assert [makes_w(n, kind, dtype) for n in (most, most + 1)] == [False, True]
        assert not makes_w(most + 1, kind, torch.float32)


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_eight_bits_of_any_k(module, kind):
    for n_inner in (1, 33, 64, 65, 200):
        q = module.quantize(normal(9, n_inner), kind)
        x = normal(7, n_inner, seed=1).requires_grad_()
        eager = op_file.quantized_linear_eager
        check_against_float64(module.quantized_linear_triton, eager, x, *q, slack=1e-5)


def test_the_plan_and_z_of_a_call(module):
    """A launch more with parts of K; z written for gelu's slope, and not for relu's, which is taken from y."""
    q, x = module.quantize(normal(24, 384)), normal(5, 384, seed=1).requires_grad_()

    def traffic(activation, plan):
        return count_traffic(
            lambda: module.quantized_linear_triton(x, *q, activation=activation, plan=plan)
        )

    for plan, launches in ((MANY, 1), (FEW, 2), (FEW._replace(n_parts=1), 1)):
        for activation in ("identity", "relu", "gelu"):
            seen = traffic(activation, plan)
            assert seen.launches == launches
            writes_z = any(name.endswith(".z_ptr") for name in seen.by_argument)
            assert writes_z == (activation == "gelu")


@pytest.mark.parametrize("activation", ["identity", "relu", "gelu", "silu"])
def test_the_registered_op_with_what_is_needed_alone(module, activation):
    """No zeros, no bias, no z: the gradient is the same, and z is computed once more where a slope takes it."""
    q, x = module.quantize(normal(24, 256)), normal(5, 256, seed=1).requires_grad_()
    want = torch.autograd.grad(
        op_file.quantized_linear_eager(x, *q, activation=activation).square().sum(), x
    )
    for save_z in (False, True):
        y, _ = module.quantized_linear_op(x, *q[:2], activation=activation, save_z=save_z)
        assert_close(torch.autograd.grad(y.square().sum(), x), want, roundings=4096)


def test_what_nobody_asks_for_is_not_saved(module):
    """W for dx alone, z for an activation alone, x never."""
    q, bias = module.quantize(normal(24, 128)), normal(24).requires_grad_()

    def saved_by(x, activation):
        saved = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
            module.quantized_linear_triton(x, *q, bias, activation)
        return saved

    x = normal(5, 128)
    assert saved_by(x, "identity") == []
    assert [tuple(t.shape) for t in saved_by(x, "gelu")] == [(5, 24)]
    x.requires_grad_()
    of_weight = [tuple(t.shape) for t in q if t is not None]
    assert [tuple(t.shape) for t in saved_by(x, "identity")] == of_weight
    assert [tuple(t.shape) for t in saved_by(x, "relu")] == [*of_weight, (5, 24)]


# --- QuantizedLinear, QLoRA ----------------------------------------------------------------------------------


@kinds
def test_qlora_trains_as_with_the_dequantized_weight(module, kind):
    """y = x Wᵀ + b + s (x Aᵀ) Bᵀ below another layer: the same gradients of A, B and x, and the same steps."""
    _, frozen = layer(module, **KINDS[kind])
    weight = module.dequantize(frozen.weight)
    labels, x = normal(40, 24, seed=3), normal(40, 256, seed=4)
    losses = []
    for product in (frozen, lambda h: F.linear(h, weight, frozen.bias)):
        below = (normal(256, 256, seed=5) / 16).requires_grad_()
        lora_a = (normal(4, 256, seed=6) / 16).requires_grad_()
        lora_b = torch.zeros(24, 4, device=x.device, requires_grad=True)
        trained = [below, lora_a, lora_b]
        optimizer = torch.optim.SGD(trained, lr=0.5)
        steps = []
        for _ in range(4):
            h = x @ below.T
            loss = (product(h) + 2.0 * (h @ lora_a.T) @ lora_b.T - labels).square().mean()
            optimizer.zero_grad()
            loss.backward()
            steps.append([loss.detach(), *(t.grad.clone() for t in trained)])
            optimizer.step()
        losses.append(steps)
    for got, want in zip(*losses):
        assert_close(got, want, roundings=1024)
    assert losses[0][-1][0] < losses[0][0][0]


@kinds
def test_state_dict_comes_back(module, kind):
    _, m = layer(module, **KINDS[kind])
    torch.manual_seed(1)
    other = module.QuantizedLinear.from_linear(
        torch.nn.Linear(256, 24, device=machine.device()), **KINDS[kind]
    )
    x = normal(3, 256)
    state = copy.deepcopy(m.state_dict())
    assert {*state} == {"packed", "scales", "bias"} | ({"zeros"} if "zero" in kind else set())
    assert not torch.allclose(other(x), m(x))
    other.load_state_dict(state)
    assert torch.equal(other(x), m(x))
    assert [*m.parameters()] == []
    assert {*layer(module, bias=False)[1].state_dict()} == {"packed", "scales"}


def test_the_module_is_near_the_layer_and_says_what_it_is(module):
    linear, m = layer(module, activation="relu", kind="int8")
    x = normal(3, 256)
    assert_close(m(x), torch.relu(linear(x)), torch.bfloat16, roundings=4)
    assert (m.in_features, m.out_features) == (256, 24)
    assert m.bias.data_ptr() != linear.bias.data_ptr(), "the layer's own bias"
    assert not m.bias.requires_grad
    assert linear.weight.requires_grad
    assert "kind='int8', group=256, zero_points=False, bias=True, activation='relu'" in repr(m)
    text = repr(layer(module, zero_points=True, group=64, bias=False)[1])
    assert "in_features=256, out_features=24, kind='int4', group=64, zero_points=True" in text


@pytest.mark.parametrize("kind", ["int4, zero points", "fp8"])
def test_the_module_changes_dtype_and_not_its_integers(module, kind):
    _, m = layer(module, **KINDS[kind])
    x, before = normal(3, 256), [m.packed.clone(), m.zeros]
    want = m(x)
    m.bfloat16()
    assert m.scales.dtype == m.bias.dtype == torch.bfloat16
    assert torch.equal(m.packed, before[0])
    assert before[1] is None or torch.equal(m.zeros, before[1])
    assert_close(m(x.bfloat16()).float(), want, torch.bfloat16)


def test_the_module_under_autocast_and_compiled(module):
    _, m = layer(module, activation="gelu")
    x = normal(3, 256).requires_grad_()
    with torch.autocast(machine.device().type, dtype=torch.bfloat16):
        y = m(x)
    assert y.dtype == torch.bfloat16
    narrow = x.detach().bfloat16(), *m.weight, m.bias.bfloat16(), "gelu"
    assert torch.equal(y, module.quantized_linear_triton(*narrow)), "scales stay in 32 bits"
    (dx,) = torch.autograd.grad(y.float().sum(), x)
    assert dx.dtype == torch.float32
    torch.compiler.reset()
    graph = torch.compile(m, fullgraph=True, backend="aot_eager")
    assert_close(graph(x), m(x))
    (got,), (want,) = (torch.autograd.grad(f(x).square().sum(), x) for f in (graph, m))
    assert_close(got, want)


# --- bad input -----------------------------------------------------------------------------------------------


def test_a_wrong_weight_is_refused_in_a_sentence(module):
    x, by_128 = normal(3, 256), module.quantize(normal(5, 256), zero_points=True)
    by_row = module.quantize(normal(5, 256), "int8")
    packed, scales, zeros = by_128
    call = module.quantized_linear_triton
    wrong = {
        "another K": ((normal(3, 384), *by_128), ValueError, "no weight for x"),
        "no multiple of 8": ((normal(3, 250), *by_128), ValueError, "no weight for x"),
        "int4 with scales of int8": ((x, packed, by_row.scales), ValueError, "K/128"),
        "int8 with scales of int4": ((x, by_row.packed, scales), ValueError, r"scales \(1, N\)"),
        "groups of 32": ((x, packed, scales.repeat(4, 1)), ValueError, "K/64"),
        "fp8 with scales of int4": (
            (x, by_row.packed.view(torch.uint8), scales), ValueError, r"fp8 is \(N, K\)",
        ),
        "float8 as such": (
            (x, by_row.packed.view(torch.float8_e4m3fn), by_row.scales), TypeError, "uint8 of fp8",
        ),
        "int8 with zero points": (
            (x, *by_row[:2], by_row.scales.to(torch.int8)), ValueError, "zeros None",
        ),
        "zeros of other groups": ((x, packed, scales, zeros.repeat(2, 1)), ValueError, "like scales"),
        "zeros alone": ((x, packed, None, zeros), TypeError, "zeros without scales"),
        "zeros in float": ((x, packed, scales, zeros.float()), TypeError, "zeros must be"),
        "words of 64 bits": ((x, packed.long(), scales), TypeError, "packed must be"),
        "a weight": ((x, normal(5, 256), scales), TypeError, "packed must be"),
        "no tensor": ((x, None, scales), TypeError, "packed must be"),
        "K of 0": (
            (x[:, :0], packed[:, :0], scales[:0], zeros[:0]), ValueError, "no weight for x",
        ),
        "a bias of another dtype": (
            (x, *by_128, normal(5, dtype=torch.float16)), TypeError, r"bias.to\(x.dtype\)",
        ),
    }  # fmt: skip
    for what, (arguments, kind, message) in wrong.items():
        with pytest.raises(kind, match=f"quantized_linear_triton: .*{message}") as caught:
            call(*arguments)
        assert len(str(caught.value)) > 40, what
    trained = scales.clone().requires_grad_()
    with torch.no_grad():  # nobody asks for a gradient
        call(x, packed, trained, zeros)
    for function in (call, module.quantized_linear_op):
        with pytest.raises(ValueError, match=r"scales require grad.*requires_grad_\(False\)"):
            function(x, packed, trained, zeros)


def test_what_cannot_be_quantized_is_refused_in_a_sentence(module):
    weight = normal(5, 256)
    wrong = {
        "another kind": ((weight, "int3"), ValueError, "int4, int8 or fp8"),
        "integers": ((weight.int(),), TypeError, "floating-point"),
        "a layer": ((torch.nn.Linear(4, 4),), TypeError, "floating-point tensor, got Linear"),
        "a vector": ((weight[0],), ValueError, "flatten"),
        "groups of 32": ((weight, "int4", 32), ValueError, "64 or 128"),
        "K = 192 by 128": ((weight[:, :192],), ValueError, "group of 64"),
        "no K": ((weight[:, :0], "int8"), ValueError, "any K but 0"),
        "zero points of int8": ((weight, "int8", 128, True), ValueError, "int8 has no zero points"),
        "zero points of fp8": ((weight, "fp8", 128, True), ValueError, "fp8 has no zero points"),
    }
    for what, (arguments, kind, message) in wrong.items():
        with pytest.raises(kind, match=f"quantize: .*{message}"):
            module.quantize(*arguments)
        assert what
    for value in (float("nan"), float("inf"), -float("inf")):
        other = weight.clone()
        other[3, 200] = value
        for how in KINDS.values():
            with pytest.raises(ValueError, match="NaN or infinities"):
                module.quantize(other, **how)
    with pytest.raises(TypeError, match="must be a torch.nn.Linear"):
        module.QuantizedLinear.from_linear(weight)
    with pytest.raises(TypeError, match=r"got int; use QuantizedLinear.from_linear\(linear\)"):
        module.QuantizedLinear(128, 96)
    with pytest.raises(
        ValueError, match="K = 100 is no multiple of the group, 64; take int8 or fp8"
    ):
        module.quantize(torch.randn(4, 100), group=64)
    with pytest.raises(ValueError, match="activation must be one of"):
        module.QuantizedLinear.from_linear(torch.nn.Linear(128, 4), activation="tanh")
    module.quantize(weight[:, :192], group=64)
    module.quantize(weight[:, :33], "int8")


# --- plans and machine code ----------------------------------------------------------------------------------


def plan_on_an_h200(n_rows, n_cols=14336, n_inner=4096, dtype=torch.bfloat16, kind="int4"):
    op_file._plan.cache_clear()
    with (
        mock.patch.object(op_file.host, "n_multiprocessors", return_value=132),
        mock.patch.object(op_file.host, "generation", return_value=9),
    ):
        plan = op_file._plan(n_rows, n_cols, n_inner // 128, dtype, None, kind)
    op_file._plan.cache_clear()
    return plan


def test_plans_of_an_h200():
    for n_rows in (1, 16):
        assert plan_on_an_h200(n_rows) == Plan(Tile(16, 128, 4, 4), 4, True)
    assert [plan_on_an_h200(n).tile.m for n in (17, 64, 65, 128)] == [64, 64, 128, 128]
    assert plan_on_an_h200(64).n_parts == 4
    assert plan_on_an_h200(65).n_parts == 1
    assert plan_on_an_h200(129) == plan_on_an_h200(4096) == WHOLE
    for kind in ("int8", "fp8"):
        assert plan_on_an_h200(256, kind=kind) == Plan(Tile(128, 128, 8, 3))
        assert plan_on_an_h200(257, kind=kind) == WHOLE
    in_float32 = plan_on_an_h200(4096, dtype=torch.float32)
    assert in_float32 == Plan(Tile(64, 64, 4, 2)), "cuBLAS's float32 units are slower than 3xTF32"
    assert plan_on_an_h200(1, n_cols=128).n_parts == 8, "at least four steps in each"
    assert plan_on_an_h200(1, n_inner=128).n_parts == 1


def code_of(n_rows, kind, dtype=torch.bfloat16, shape=(4096, 14336), activation="gelu"):
    """(n_rows, 4096) by (14336, 4096): what the launches of forward and of W compile to, and their plan."""
    n_in, n_out = shape
    how, device = KINDS[kind], machine.device()
    group = how.get("group", 128) if "int4" in kind else n_in
    of_scales = (n_in // group, n_out)
    packed = (n_out, n_in // 8) if "int4" in kind else (n_out, n_in)
    integers = {"int8": torch.int8, "fp8": torch.uint8}.get(kind, torch.int32)
    weight = op_file._stored(
        torch.empty(packed, dtype=integers, device=device),
        torch.empty(of_scales, dtype=dtype, device=device),
        torch.empty(of_scales, dtype=torch.int8, device=device) if "zero" in kind else None,
        dtype,
    )
    x, bias = torch.empty(n_rows, n_in, dtype=dtype, device=device), weight.scales[0]
    y, launches = torch.empty(n_rows, n_out, dtype=dtype, device=device), []
    plan = plan_on_an_h200(n_rows, dtype=dtype, kind=weight.kind)

    def record(kernel, grid, tensors, *sizes, **options):
        launches.append((kernel, (*tensors, *sizes), options))

    with mock.patch.object(op_file.host, "run", record):
        op_file._launch(plan, y, y, x, weight, bias, activation)
        op_file._whole(*weight, dtype)
    codes = []
    for kernel, arguments, options in launches:
        settings = {n: options.pop(n) for n in ("num_warps", "num_stages") if n in options}
        codes.append(compile_for(kernel, signature_of(kernel, *arguments, **options), **settings))
    return codes, plan


@kinds
@pytest.mark.parametrize("n_rows", [16, 64, 256])
def test_sixteen_bytes_at_a_time_and_no_spills(kind, n_rows):
    n_rows = min(n_rows, op_file._MOST_ROWS["int4" if "int4" in kind else kind])
    (forward, *_, whole), plan = code_of(n_rows, kind)
    for kernel in (forward, whole):
        assert kernel.spills == 0
        assert kernel.shared_bytes <= 227 * 1024
    mix = instruction_mix(forward)
    step = 128 if kind.startswith("int4") and "64" not in kind else 64
    n_bytes = 2 * plan.tile.m * step + plan.tile.n * step // (2 if "int4" in kind else 1)
    copies = n_bytes // (16 * 32 * forward.num_warps)
    assert mix["LDGSTS.E.BYPASS.128"] >= copies, "x and W; scales may come in smaller pieces"
    assert [op for op in mix if op.startswith(("HGMMA", "HMMA"))]
    slow = "I2F.BF16", "I2F.F16", "F2F."
    assert not [op for op in mix if op.startswith(slow)], "slow conversions"
    assert plan.tile.m == min(n_rows, 128)
    written = instruction_mix(whole)
    assert not [op for op in written if op.startswith("STG") and not op.endswith("128")]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_two_numbers_take_a_shift_an_and_and_a_subtraction(dtype):
    """Of int4 in the loop of decoding, 128 x 128 numbers in 128 threads; in all 3 to 4 instructions each."""
    (forward, *_), plan = code_of(16, "int4", dtype)
    mix = loop_mix(forward)
    # Triton 3.6's compiler takes two instructions for the AND and the OR
    merged, pairs = cases.release(triton) >= (3, 9), plan.tile.n // 2
    assert mix.total() <= (3.2 if merged else 4.1) * plan.tile.n
    subtractions = sum(n for op, n in mix.items() if op.startswith("HADD2"))
    assert pairs <= mix["LOP3.LUT"] <= pairs * (1 if merged else 2) + 4
    assert pairs <= subtractions <= pairs + 8
    assert mix["SHF.R.U32.HI"] == pairs * 3 // 4, "the first of four quarters needs no shift"


@pytest.mark.parametrize("n_rows", [16, 64])
def test_fp8_takes_no_more_instructions_than_int8(n_rows):
    """Two numbers become float16 in one, and three more make bfloat16 of them."""
    for dtype, share in ((torch.float16, 0.6), (torch.bfloat16, 1.15)):
        fp8, int8 = (code_of(n_rows, kind, dtype)[0][0] for kind in ("fp8", "int8"))
        assert any(op.startswith("F2FP.F16.E4M3") for op in loop_mix(fp8))
        assert loop_mix(fp8).total() <= share * loop_mix(int8).total()


@kinds
@pytest.mark.parametrize("n_rows", [16, 17])
def test_float64_compiles(kind, n_rows):
    """For Triton 3.6 of a float64 that is made before."""
    for kernel in code_of(n_rows, kind, torch.float64, (256, 40))[0]:
        assert kernel.shared_bytes <= 227 * 1024


@kinds
def test_float64_made_before_is_the_same(module, kind):
    q = module.quantize(normal(24, 256, dtype=torch.float64), **KINDS[kind])
    x = normal(5, 256, dtype=torch.float64, seed=1).requires_grad_()
    # a Triton that cannot compile them for a GPU has only one way there
    for makes in {module._MAKES_DOUBLES or not machine.HAS_GPU, False}:
        with mock.patch.object(module, "_MAKES_DOUBLES", makes):
            check_against_float64(
                module.quantized_linear_triton, op_file.quantized_linear_eager, x, *q
            )
    assert {t.dtype for t in module._stored(*q, torch.float32) if t is not None} == {
        t.dtype for t in q if t is not None
    }


def test_float32_is_three_products():
    (forward, *_), _ = code_of(16, "int4", torch.float32)
    assert [op for op in instruction_mix(forward) if "TF32" in op]
