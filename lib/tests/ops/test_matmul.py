"""What is particular to matmul: epilogues of every plan, what is saved, the choice of tiles, machine code."""

import dataclasses
import functools
import itertools
import re
import sys
from unittest import mock

from lib import machine
from lib.measure import registry
from lib.measure.check import check_against_float64
from lib.nogpu import cuda
from lib.nogpu.compile_only import compile_for, instruction_mix, signature_of
from lib.nogpu.memory import count_traffic
from lib.ops import _device
from lib.ops import _host as host
from lib.ops import matmul as op_file
from lib.ops._device import place_of
from lib.ops.matmul import Plan, matmul_cuda, matmul_eager
from lib.tests.ops import battery, cases

import pytest
import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from triton.runtime.interpreter import GridExecutor
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

OP = registry.find("matmul")
PLANS = {None: None} | {label: plan for label, (plan, _) in OP.plans.items()}
ACTIVATIONS = ["identity", "relu", "gelu", "gelu_tanh", "silu", "sigmoid"]
HALF, FLOAT = torch.bfloat16, torch.float32

activations = pytest.mark.parametrize("activation", ACTIVATIONS)
plans = pytest.mark.parametrize("plan", list(OP.plans))
# one launch for each way to multiply: the one chosen, through TMA, in parts
kinds_of_kernels = pytest.mark.parametrize("plan", [None, "tma", "split-K in 3 parts"])
ORIENTATIONS = list(itertools.product((False, True), repeat=2))
needs_cuda = pytest.mark.skipif(bool(cuda.why_no_cuda()), reason=str(cuda.why_no_cuda()))


def tensors(shape=(17, 40, 33), dtype=FLOAT):
    """a, b and bias for M, K, N: leaves that require grad; sums are near 1."""
    a, b, bias = OP.all_configured()["bias, relu"].inputs(shape, dtype, machine.device())
    scale = max(1, shape[1]) ** -0.25
    return [t.detach().requires_grad_() for t in (a * scale, b * scale, bias)]


def detached(*args):
    return [t.detach() for t in tensors(*args)]


def bound(module, activation="identity", plan=None):
    """matmul_triton with an activation and a plan of the registry."""
    return registry.bind(module.matmul_triton, {"activation": activation, "plan": PLANS[plan]})


def check(module, inputs, activation="identity", plan=None, eager=matmul_eager):
    eager = functools.partial(eager, activation=activation)
    name = f"{plan}, {activation}, {[tuple(t.shape) for t in inputs]}"
    check_against_float64(bound(module, activation, plan), eager, *inputs, name=name)


# --- values and gradients ------------------------------------------------------------------------------------


def test_the_definition(module):
    a, b, bias = detached((5, 7, 6), torch.float64)
    z = (a[:, :, None] * b).sum(1) + bias
    want = {
        "identity": z,
        "relu": z.clamp(min=0),
        "silu": z * z.sigmoid(),
        "sigmoid": z.sigmoid(),
        "gelu": 0.5 * z * (1 + torch.erf(z / 2**0.5)),
        "gelu_tanh": 0.5 * z * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (z + 0.044715 * z**3))),
    }
    for activation, expected in want.items():
        torch.testing.assert_close(module.matmul_eager(a, b, bias, activation), expected)
    torch.testing.assert_close(module.matmul_eager(a, b), z - bias)


@plans
@activations
def test_every_epilogue(module, plan, activation):
    """Bias, activation and z of each way to launch; without a bias too."""
    for shape in OP.plans[plan][1]:
        check(module, tensors(shape, HALF), activation, plan)
    check(module, tensors((20, 30, 7), FLOAT)[:2], activation, plan)
    check(module, tensors((20, 30, 7), FLOAT), activation, plan)


@pytest.mark.parametrize("transposed", ORIENTATIONS, ids=str)
@pytest.mark.parametrize("plan", ["tma", "tma, stored in halves"])
def test_tma_of_every_orientation(module, plan, transposed):
    for shape in OP.plans[plan][1]:
        a, b, bias = detached(shape, HALF)
        a, b = (t.t().contiguous().t() if turn else t for t, turn in zip((a, b), transposed))
        check(module, [t.requires_grad_() for t in (a, b, bias)], "silu", plan)
    wide = detached((70, 16, 72), HALF)[0]
    b = b.detach()[:8]
    check(module, [wide[:, 1:9], b], plan=plan)  # rows without gaps, from an odd address on
    check(module, [wide[::2, ::2], b], plan=plan)


@pytest.mark.parametrize("activation", ["relu", "gelu"])
@pytest.mark.parametrize(
    "part", [battery.layouts, battery.far_apart, battery.far_out], ids=lambda f: f.__name__
)
def test_battery_with_a_bias(module, part, activation):
    op = dataclasses.replace(
        OP,
        tensors={"a": "M K", "b": "K N", "bias": "N"},
        configurations={activation: {"activation": activation}},
    ).configured()
    part(op, registry.bind(module.matmul_triton, op.arguments))


@activations
def test_gradients_are_those_of_differences(module, activation):
    inputs = tensors((3, 5, 4), torch.float64)
    assert torch.autograd.gradcheck(bound(module, activation), inputs, fast_mode=True)


@kinds_of_kernels
def test_offsets_past_two_to_the_31(module, plan):
    """Rows of a, columns of a, rows of b, columns of b; 2**30 elements apart."""
    far = cases.spaced(torch.randn(3, 16, device=machine.device()).half())
    near = {n: torch.randn(16, n, device=far.device).half() for n in (3, 8)}
    for a, b in [
        (far, near[8]),
        (far.t(), near[3].t().contiguous()),
        (near[3], far),
        (near[8].t(), far.t()),
    ]:
        inputs = [t.detach().requires_grad_() for t in (a, b)]
        check(module, inputs, "silu", plan, cases.near(matmul_eager))


@pytest.mark.parametrize(
    ("plan", "gap", "n_near"), [("naive", 2**27, 5), (None, 2**24, 16), (None, 2**25, 5)]
)
def test_steps_past_two_to_the_31(module, plan, gap, n_near):
    """From one piece of a and b to the next: 16, 128 or (not aligned) 64 columns, each `gap` elements long."""
    n_inner = 2**31 // gap + 4
    storage = torch.empty(n_inner * gap, dtype=torch.float16, device=machine.device())
    far = storage.as_strided((n_inner, 5), (gap, 1))
    far.copy_(torch.randn(n_inner, 5))
    near = torch.randn(n_inner, n_near, device=far.device).half()
    check(module, [far.t(), near], plan=plan, eager=cases.near(matmul_eager))
    check(module, [near.t(), far], plan=plan, eager=cases.near(matmul_eager))


@pytest.mark.gpu
@kinds_of_kernels
def test_more_than_two_to_the_31_results(module, plan):
    if torch.cuda.mem_get_info()[0] < 40e9:
        pytest.skip("needs 40 GB of GPU memory")
    a, b, bias = detached((2**16 + 5, 16, 2**15 + 8), HALF)
    y = bound(module, "gelu", plan)(a, b, bias)
    want = matmul_eager(a[-3:], b, bias, "gelu"), matmul_eager(a, b[:, -3:], bias[-3:], "gelu")
    battery.assert_close([y[-3:], y[:, -3:]], list(want), HALF)


@kinds_of_kernels
def test_no_inner_dimension_gives_the_bias(module, plan):
    """K = 0: no product to add up, and nothing that may be read."""
    for dtype in (FLOAT, HALF):
        inputs = tensors((5, 0, 6), dtype)
        y = bound(module, "gelu", plan)(*inputs)
        battery.assert_close(y, F.gelu(inputs[2]).expand(5, 6), dtype)
        da, db, dbias = torch.autograd.grad(bound(module, plan=plan)(*inputs).sum(), inputs)
        assert da.shape == (5, 0) and db.shape == (0, 6)
        assert torch.equal(dbias, torch.full_like(dbias, 5))
    assert not bound(module, plan=plan)(*inputs[:2]).any()


@pytest.mark.parametrize("lead", [(2, 3), (1, 1, 4), (2, 0), (0, 3)], ids=str)
def test_a_batch_of_rows(module, lead):
    """As torch.nn.Linear takes them: (..., M, K), with a weight (N, K), steps of any kind, and empty."""
    for k, activation in ((6, "gelu"), (0, "identity")):
        shapes = (*lead, k), (5, k), (5,)
        a, weight, bias = (torch.randn(s, device=machine.device()).requires_grad_() for s in shapes)
        for inputs in ((a, weight.t(), bias), (a.transpose(0, 1), weight.t(), bias)):
            y, want = module.matmul_triton(*inputs, activation), matmul_eager(*inputs, activation)
            assert y.shape == want.shape
            battery.assert_close(y, want)
            dy = torch.randn_like(want)
            leaves = (a, weight, bias)
            got = torch.autograd.grad(y, leaves, dy)
            battery.assert_close(got, torch.autograd.grad(want, leaves, dy))
    with torch.autocast(machine.device().type, dtype=HALF):
        assert module.matmul_triton(a, weight.t(), bias).dtype == HALF


def test_empty_results_have_gradients_of_zero(module):
    a, b, bias = tensors((0, 4, 6))
    y = module.matmul_triton(a, b, bias, "silu")
    da, db, dbias = torch.autograd.grad(y.sum(), (a, b, bias))
    assert da.shape == (0, 4)
    assert not db.any() and not dbias.any()


@pytest.mark.parametrize("plan", [None, "naive", "tma", "split-K in 3 parts"])
@pytest.mark.parametrize("dtype", [FLOAT, HALF], ids=str)
def test_nan_and_infinities(module, plan, dtype):
    """They spread over their row or column, as in torch, and no further: what fills up tiles adds nothing."""
    if dtype == HALF and cases.products_leak():
        pytest.skip("this CPU's own bfloat16 products let NaN into other rows")
    nan, inf = float("nan"), float("inf")
    a, b, bias = tensors((20, 33, 24), dtype)
    with torch.no_grad():
        a[1, 2], a[3, 32], b[32, 5], b[0, 23], bias[7], a[19, 0] = nan, inf, -inf, nan, inf, inf
    for activation in ("identity", "relu", "sigmoid"):
        check(module, [a, b, bias], activation, plan)


@pytest.mark.parametrize(
    ("n_rows", "several"), [(17, False), (100, True)], ids=["one strip", "strips"]
)
def test_sums_over_rows_are_rounded_once(module, n_rows, several):
    given = tensors((n_rows, 24, 64), HALF)
    call = bound(module, "silu")
    battery.check_strips(module, lambda: call(*given).sum().backward(), several)


@kinds_of_kernels
def test_sums_are_float32_and_rounded_once(module, plan):
    """4096 products of 0.25 would stop growing in float16; bias and activation come before the rounding."""
    a = torch.full((16, 4096), 0.5, dtype=torch.float16, device=machine.device())
    assert torch.equal(bound(module, plan=plan)(a, a.t()), torch.full_like(a[:, :16], 1024))
    a, b, bias = detached((40, 640, 48), HALF)
    want = matmul_eager(a.double(), b.double(), bias.double(), "gelu")
    got = bound(module, "gelu", plan)(a, b, bias).double()
    assert ((got - want).abs() <= 0.51 * 2**-7 * want.abs() + 1e-5).all()


def test_tails(module):
    """Far out, where 1 - sigmoid has lost its digits, and where exp overflows if it is taken the wrong way."""
    z = torch.linspace(-100, 100, 401, device=machine.device())
    a, b = torch.zeros(1, 1, device=z.device), torch.zeros(1, 401, device=z.device)
    for activation in ("gelu", "gelu_tanh", "silu", "sigmoid"):
        bias, exact = z.clone().requires_grad_(), z.double().requires_grad_()
        y = module.matmul_triton(a, b, bias, activation)
        want = matmul_eager(a.double(), b.double(), exact, activation)
        (got,), (dwant,) = (torch.autograd.grad(t.sum(), x) for t, x in ((y, bias), (want, exact)))
        assert (y.double() - want).abs().max() < 1e-5, activation
        assert (got - dwant).abs().max() < 1e-6, activation


def test_autocast_is_that_of_a_linear_layer(module):
    """Of float32 and bfloat16 tensors alike, in any mixture; float64 stays as it is."""
    a, b, bias = tensors()
    with torch.autocast(machine.device().type, dtype=HALF):
        for given_a in (a, a.bfloat16()):
            y = module.matmul_triton(given_a, b, bias, "relu")
            want = F.linear(given_a, b.t(), bias).relu()
            assert y.dtype == want.dtype == HALF
            battery.assert_close(y, want, HALF)
        assert module.matmul_triton(a.double(), b.double()).dtype == torch.float64


# --- what is saved and launched ------------------------------------------------------------------------------


def launches(call):
    return count_traffic(call).launches


@pytest.mark.parametrize("registered", [False, True], ids=["", "registered"])
def test_a_gradient_nobody_wants_costs_no_product(module, registered):
    a, b, bias = tensors((16, 40, 24))
    for needed, products in [((1, 0, 0), 1), ((0, 1, 0), 1), ((1, 1, 1), 2), ((0, 0, 1), 0)]:
        inputs = [t if n else t.detach() for t, n in zip((a, b, bias), needed)]
        version = module.matmul_op if registered else module.matmul_triton
        y = battery.outputs(version(*inputs, "relu"))[0]
        # dz with dbias, of so few rows in one go; da and db
        assert launches(lambda y=y: y.sum().backward()) == 1 + products, needed


def saved_by(module, *args):
    """(y, the addresses of what autograd keeps for it)."""
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        y = module.matmul_triton(*args)
    return y, [t.data_ptr() for t in saved]


def test_what_autograd_saves(module):
    a, b, bias = tensors((16, 40, 24), HALF)
    for activation in ACTIVATIONS:
        y, saved = saved_by(module, a, b, bias, activation)
        assert len(saved) == (2 if activation == "identity" else 3), activation
        assert {a.data_ptr(), b.data_ptr()} <= set(saved)
        assert (y.data_ptr() in saved) == (activation in ("relu", "sigmoid"))
    _, saved = saved_by(module, a, b.detach())
    assert saved == [b.data_ptr()], "a is kept for a gradient nobody wants"


@kinds_of_kernels
def test_z_is_stored_for_a_gradient_alone(module, plan):
    """gelu's slope needs a b + bias: a second store, which inference does not pay for."""
    inputs = tensors((16, 40, 24), HALF)
    n_bytes = 16 * 24 * 2

    def stored(*inputs):
        traffic = count_traffic(lambda: bound(module, "gelu", plan)(*inputs)).by_argument
        parts = "_matmul_kernel.y_ptr" if plan and "split" in plan else None
        return sum(t.stored for name, t in traffic.items() if name != parts)

    assert stored(*(t.detach() for t in inputs)) == n_bytes
    assert stored(*inputs) == 2 * n_bytes


def test_the_registered_op_saves_z_if_asked(module):
    y, z = module.matmul_op(*tensors(), "gelu", False, True)
    assert y.requires_grad and not z.requires_grad
    battery.assert_close(z, matmul_eager(*detached()))
    y, z = module.matmul_op(*tensors(), "gelu")
    assert z.numel() == 0
    # then the backward pass multiplies once more: dz with dbias, da and db, z
    assert launches(lambda: y.sum().backward()) == 4
    for activation in ACTIVATIONS:
        version = functools.partial(module.matmul_op, activation=activation)
        eager = functools.partial(matmul_eager, activation=activation)
        check_against_float64(lambda *t, f=version: f(*t)[0], eager, *tensors((9, 11, 10)))


@pytest.mark.parametrize("frozen", [None, 0, 1, 2])
@pytest.mark.parametrize("kind", ["triton", "op, saved", "op, recomputed"])
def test_a_second_derivative_through_z_raises(module, kind, frozen):
    """Where dy is a number, gradients depend on the inputs through z alone."""
    inputs = tensors((5, 6, 7))
    inputs = [t.detach().requires_grad_(k != frozen) for k, t in enumerate(inputs)]
    leaves = [t for t in inputs if t.requires_grad]
    for first, leaf in itertools.product(leaves, leaves):
        if kind == "triton":
            y = module.matmul_triton(*inputs, "silu")
        else:
            y, _ = module.matmul_op(*inputs, "silu", False, kind == "op, saved")
        (gradient,) = torch.autograd.grad(y.sum(), [first], create_graph=True)
        with pytest.raises(RuntimeError, match="no second derivative"):
            torch.autograd.grad((gradient**2).sum() + (leaf**2).sum(), [leaf])


def test_opcheck_of_other_inputs(module):
    a, b, bias = tensors((5, 6, 7))
    torch.library.opcheck(module.matmul_op, (a, b, None, "relu"))
    torch.library.opcheck(module.matmul_op, (a, b, bias, "silu", False, True))
    torch.library.opcheck(module.matmul_op, (a, b.detach(), None, "gelu", True, True))
    torch.library.opcheck(module.matmul_op, (*tensors((0, 6, 7)), "gelu", False, True))
    torch.library.opcheck(module.matmul_op, (*tensors((5, 0, 7)), "silu"))
    dy = torch.randn(5, 7, device=a.device)
    saved = [t.detach() for t in (dy, a, b, dy)]
    torch.library.opcheck(module._matmul_backward_op, (*saved, "gelu", False, [True] * 3))
    partly = (dy, None, b.detach(), None, "identity", False, [True, False, False])
    torch.library.opcheck(module._matmul_backward_op, partly)


@pytest.mark.parametrize("activation", ["identity", "relu", "gelu", "gelu_tanh"])
def test_compiled(module, activation):
    """With and without a bias, all or some gradients, none; z saved, not computed again; under autocast."""
    torch.compiler.reset()
    eager = functools.partial(matmul_eager, activation=activation)
    sys.modules.setdefault(module.__name__, module)  # where the compiler looks for it
    version = functools.partial(module.matmul_triton, activation=activation)
    compiled = torch.compile(version, fullgraph=True, backend="aot_eager")
    a, b, bias = tensors((9, 11, 10))
    for inputs in [(a, b, bias), (a, b), (a.detach(), b), (a, b.detach(), bias)]:
        check_against_float64(compiled, eager, *inputs, name="compiled")
    y = compiled(a.detach(), b.detach(), bias.detach())
    battery.assert_close(y, eager(a, b, bias))
    forward = launches(lambda: compiled(a, b, bias))
    y = compiled(a, b, bias)
    backward = launches(lambda: y.sum().backward())
    assert (forward, backward) == (1, 3), "dz with dbias, da, db"
    y = compiled(a, b.detach(), bias)
    assert launches(lambda: y.sum().backward()) == 2
    with torch.autocast(machine.device().type, dtype=HALF):
        assert compiled(a, b, bias).dtype == HALF


# --- the choice of a tile ------------------------------------------------------------------------------------

AN_H200 = {"generation": lambda _: 9, "n_multiprocessors": lambda _: 132}
SIZES = [1, 7, 16, 17, 33, 64, 100, 512, 781, 4096, 65536]


@pytest.mark.skipif(machine.HAS_GPU, reason="sizes for the interpreter's four SMs")
@pytest.mark.parametrize("kind", ["half", "tf32", "tf32x3", "double"])
@pytest.mark.parametrize("aligned", [True, False], ids=["aligned", "unaligned"])
def test_choice(module, kind, aligned):
    device = machine.device()
    tiles = module._tiles(kind, device, aligned)
    programs = host.n_multiprocessors(device) * (2 if kind == "tf32x3" else 1)
    for m, n, k in itertools.product(SIZES, SIZES, [0, *SIZES]):
        tile, parts = module._choose.__wrapped__(m, n, k, kind, device, aligned)
        n_tiles = -(-m // tile.m) * -(-n // tile.n)
        assert tile in tiles
        assert 1 <= parts <= 32
        if parts > 1:
            assert n_tiles * parts <= programs, "more parts than can run at once"
            assert k // parts >= 8 * tile.k, "parts too short"
        if tile is not tiles[-1]:
            assert tile.m < 2 * max(m, 9) and tile.n < 2 * max(n, 9), "a tile half empty"
        if min(m, n) >= 4096:
            assert tile is tiles[0] and parts == 1
    tile, parts = module._choose.__wrapped__(*tiles[0][:2], 65536, kind, device, aligned)
    smaller = kind == "half" and aligned  # four tiles for four SMs, rather than parts
    assert (tile is tiles[0] and parts > 1) != smaller, "a long K not split"
    assert module._choose.__wrapped__(1, 4096, 4096, kind, device, aligned)[0].m == 16
    assert module._choose.__wrapped__(4096, 16, 4096, kind, device, aligned)[0].n == 16


def tiles_on(generation, kind, aligned):
    with mock.patch.object(host, "generation", return_value=generation):
        return op_file._tiles(kind, "a GPU", aligned)


def test_tiles_of_every_generation():
    """Others than the H200's are two, of one stage where rows are unaligned or cp.async is not there."""
    for kind, generation, aligned in itertools.product(
        ("half", "tf32", "tf32x3", "double"), (7, 8, 9, 10, 12), (True, False)
    ):
        tiles = tiles_on(generation, kind, aligned)
        if kind == "double" or generation not in (9, 10):
            assert len(tiles) == 2
        if kind != "double":
            assert all((t.num_stages > 1) == (aligned and generation > 7) for t in tiles)


def test_few_tiles_and_a_long_k_are_split(module):
    """On whatever machine this is; and the sum of the parts is right with everything on top."""
    inputs = tensors((16, 2112, 24), HALF)
    plan = module._plan(*(t.detach() for t in inputs[:2]), "half", "silu")
    assert plan.way == "tiles" and plan.n_parts > 1
    check(module, inputs, "silu")


@pytest.mark.parametrize("bias", [True, False])
def test_a_bare_product_that_is_not_large_is_cublas_s(module, bias):
    """Of 16 bits, rows aligned, on a GPU; what the plan says works with whatever is on top, too."""

    def way(m=1024, k=1024, n=1024, dtype=HALF, activation="identity", on_cpu=False):
        a, b = torch.empty(m, k, dtype=dtype), torch.empty(k, n, dtype=dtype)
        kind = host.kind_of(dtype, False)
        with mock.patch.multiple(battery.host_of(module), ON_CPU=on_cpu, **AN_H200):
            return module._plan(a, b, kind, activation).way

    assert way() == way(64, 4096, 14336) == way(2048, 2048, 2048) == "cublas"
    assert way(4096, 2048, 4096) == "tma" and way(activation="relu") == "tiles"
    assert way(dtype=torch.float32) == way(k=1023) == way(n=1023) == way(on_cpu=True) == "tiles"
    inputs = tensors((17, 33, 21), HALF)[: 2 + bias]
    for activation in ACTIVATIONS:
        check(module, inputs, activation, "cublas")


def test_sixteen_bits_get_a_smaller_tile_rather_than_parts(module):
    """A tile for three quarters of 132 SMs, where one is small enough; else K is cut."""
    with mock.patch.multiple(battery.host_of(module), **AN_H200):
        for (m, k, n), tile in [
            ((1024, 1024, 1024), (64, 128)), ((512, 4096, 4096), (128, 128)),
            ((128, 4096, 4096), (64, 64)), ((64, 4096, 14336), (64, 128)),
        ]:  # fmt: skip
            chosen, parts = module._choose.__wrapped__(m, n, k, "half", "any")
            assert (chosen[:2], parts) == (tile, 1)
        assert module._choose.__wrapped__(16, 4096, 4096, "half", "any")[1] > 1
        assert module._choose.__wrapped__(1024, 1024, 1024, "tf32", "any")[1] > 1


def test_a_large_product_goes_by_tma_from_aligned_copies(module):
    for (m, k, n), way in [
        ((2048, 1025, 2048), "tma"),
        ((2048, 1023, 2048), "tiles"),
        ((16, 16391, 16384), "tiles"),
    ]:
        a, b = (torch.empty(s, dtype=HALF, device=machine.device()) for s in ((m, k), (k, n)))
        plan = module._plan(a, b, "half")
        assert plan.way == way
        assert plan.copies == (m * k * n >= 2**32)
        assert (plan.tile.num_stages > 1) == plan.copies, "stages that only wait"
        assert plan.tile in module._tiles("half", a.device, plan.copies)


def test_rows_that_begin_anywhere_are_loaded_in_one_stage(module):
    """In either matrix: by the pitch, or by the address."""
    x = torch.empty(64, 64, device=machine.device())
    for a, b, aligned in [
        (x, x, True),
        (x.t(), x[:, 16:], True),
        (x[:, :63].contiguous().t(), x[:63], False),
        (x[:63], x[:, :63].contiguous(), False),
        (x[:, 1:33], x[:32], False),
        (x[:32], x[:, 2:34], False),
        (x[:1, 4:9], x[:5], True),  # one row: no pitch
    ]:
        plan = module._plan(a, b[: a.shape[1]], "tf32x3")
        assert (plan.tile.num_stages > 1) == aligned
        assert not plan.copies


def test_copies_with_aligned_rows_are_made_only_where_rows_are_not(module):
    a = torch.randn(40, 64, device=machine.device())
    for t in (a, a.t(), a[:, 8:], a[:, :63], a[:7].t(), a[:1, :5], a[:0]):
        assert module._to_aligned(t) is t
    for t in (a[:, :63].contiguous(), a[:, :63].contiguous().t(), a[:, 1:], a[1:, 2:].t()):
        copy = module._to_aligned(t)
        assert torch.equal(copy, t) and module._is_aligned(copy)
        assert copy.untyped_storage().data_ptr() != t.untyped_storage().data_ptr()
        # neighbours stay neighbours
        assert copy.stride().index(1) == t.stride().index(1)


def test_a_plan_with_copies_launches_on_aligned_rows(module):
    a, b, bias = detached((20, 37, 33))
    plan = module.Plan(module.Tile(16, 16, 16, 4, 3), copies=True)
    for way in ("tiles", "tma"):  # float32, so no TMA
        call = functools.partial(module.matmul_triton, a, b, bias, plan=plan._replace(way=way))
        ((_, args, _),) = launches_of(call)
        assert all(module._is_aligned(t) for t in args[:2])
        assert args[8] % 16 == args[10] % 16 == 0, "strides of rows"


def test_copies_for_tma_are_made_only_where_it_cannot_read(module):
    a = torch.randn(40, 64, device=machine.device()).bfloat16()
    for t in (a, a.t(), a[:, 8:48], a[:7].t()):
        view, transposed = module._for_tma(t)
        assert view.untyped_storage().data_ptr() == a.untyped_storage().data_ptr()
        assert torch.equal(view.t() if transposed else view, t)
    for t in (a[:, 1:], a[:, :63].contiguous(), a[:1].expand(40, 64), a[::2, ::2]):
        view, transposed = module._for_tma(t)
        assert view.untyped_storage().data_ptr() != t.untyped_storage().data_ptr()
        assert torch.equal(view.t() if transposed else view, t)
        assert view.stride(0) % 8 == view.data_ptr() % 16 == 0


@pytest.mark.parametrize("parts", [2, 5, 7, 31])
def test_any_number_of_parts(module, parts):
    """Also more than there are steps, and a last one that is shorter."""
    plan = module.Plan(module.Tile(16, 16, 128, 2, 4), n_parts=parts)
    for k in (1, 130, 1000):
        a, b, bias = detached((20, k, 24), torch.float64)
        y = module.matmul_triton(a, b, bias, "relu", plan=plan)
        torch.testing.assert_close(y, matmul_eager(a, b, bias, "relu"))


def test_parts_that_have_nothing_to_do_are_not_made(module):
    a, b, _ = detached((16, 4 * 64 + 1, 16))
    for n_parts, made in [(3, 3), (30, 5)]:
        plan = module.Plan(module.Tile(16, 16, 64, 4, 3), n_parts=n_parts)
        traffic = count_traffic(lambda plan=plan: module.matmul_triton(a, b, plan=plan))
        assert traffic.by_argument["_sum_parts_kernel.parts_ptr"].loaded == made * 16 * 16 * 4


# --- traffic and the order of programs -----------------------------------------------------------------------


def test_traffic(module):
    """Each piece of a is asked for once in each column of tiles, of b once in each row; y is written once."""
    a, b, _ = detached((256, 128, 512), HALF)
    # on a GPU the bare product is cuBLAS's, which is not counted
    traffic = count_traffic(lambda: module.matmul_triton(a, b, activation="relu"))
    tile = module._plan(a, b, "half", "relu").tile
    by = {name.split(".")[1][0]: t for name, t in traffic.by_argument.items()}
    y_bytes = 256 * 512 * 2
    assert traffic.launches == 1
    assert traffic.bytes_moved == a.nbytes + b.nbytes + y_bytes
    assert by["a"].loaded == a.nbytes * 512 // tile.n
    assert by["b"].loaded == b.nbytes * 256 // tile.m
    assert by["y"].stored == by["y"].stored_distinct == y_bytes


def test_by_tma_there_is_one_program_for_each_multiprocessor(module):
    if host.generation(machine.device()) not in (9, 10):
        pytest.skip("TMA is Hopper's")
    for shape, n_tiles in [((128, 32, 300), 10), ((64, 32, 64), 1)]:
        a, b, _ = detached(shape, HALF)
        traffic = count_traffic(lambda a=a, b=b: bound(module, plan="tma")(a, b))
        assert traffic.programs == min(host.n_multiprocessors(a.device), n_tiles)


@triton.jit
def _places_kernel(
    out_ptr, n_rows, n_cols, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    tile = tl.program_id(0)
    row, col = place_of(tile, n_rows, n_cols, GROUP, BLOCK_M, BLOCK_N)
    tl.store(out_ptr + 2 * tile, row)
    tl.store(out_ptr + 2 * tile + 1, col)


def places(tiles_m, tiles_n, group):
    """Row and column of each program's tile, in the order of programs."""
    out = torch.full((tiles_m * tiles_n, 2), -1, dtype=torch.int32, device=machine.device())
    args = (out, tiles_m * 16 - 3, tiles_n * 32 - 1)
    _places_kernel[(tiles_m * tiles_n,)](*args, GROUP=group, BLOCK_M=16, BLOCK_N=32)
    return [tuple(place) for place in out.tolist()]


@pytest.mark.parametrize("group", [1, 4, 8])
def test_every_tile_has_one_program(group):
    for tiles_m, tiles_n in [(1, 1), (3, 5), (8, 2), (9, 4), (17, 3)]:
        got = places(tiles_m, tiles_n, group)
        assert sorted(got) == list(itertools.product(range(tiles_m), range(tiles_n)))
    assert places(3, 4, 1)[:5] == [(0, 0), (0, 1), (0, 2), (0, 3), (1, 0)]


def test_groups_need_fewer_rows_and_columns_at_a_time():
    """8 programs that run together: how many pieces of a and of b they read between them."""

    def most_read(group):
        order = places(8, 8, group)
        together = [order[i : i + 8] for i in range(0, 64, 8)]
        return max(len({r for r, _ in t}) + len({c for _, c in t}) for t in together)

    assert [most_read(group) for group in (1, 2, 4, 8)] == [1 + 8, 2 + 4, 4 + 2, 8 + 1]


@pytest.mark.gpu
def test_float32_is_multiplied_exactly_unless_allowed():
    inputs = detached((512, 512, 512))[:2]
    want = matmul_eager(*(t.double() for t in inputs))
    exact, rounded = (
        (op_file.matmul_triton(*inputs, allow_tf32=allow) - want).abs().max()
        for allow in (False, True)
    )
    assert exact < 2e-5
    assert exact < rounded / 10
    assert rounded < 0.05
    leaves = [t.requires_grad_() for t in inputs]
    for allow, least, most in [(False, 0, 1e-4), (True, 1e-4, 1)]:
        y = op_file.matmul_triton(*leaves, allow_tf32=allow)
        (da,) = torch.autograd.grad(y.square().sum(), leaves[:1])
        y = leaves[0].double() @ leaves[1].double()
        error = (da - 2 * y @ leaves[1].double().t()).abs().max() / da.abs().max()
        assert least <= error <= most


# --- machine code --------------------------------------------------------------------------------------------

TYPE_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16"}


def launches_of(call):
    """(name of the kernel, arguments, options) of the launches that `call()` would make; nothing runs."""
    launches = []

    def record(self, *args, grid=None, warmup=None, **options):
        launches.append((self.fn.__name__, args, options))

    place = (JITFunction, "run") if machine.HAS_GPU else (GridExecutor, "__call__")
    with mock.patch.object(*place, record):
        call()
    return launches


def compiled(launch, arch=90):
    """A recorded launch compiled for a GPU. A descriptor's type is its element type and its block."""
    name, args, options = launch
    kernel, options = getattr(op_file, name, None) or getattr(_device, name), dict(options)
    settings = {n: options.pop(n) for n in ("num_warps", "num_stages") if n in options}
    plain = [0 if isinstance(a, TensorDescriptor) else a for a in args]
    signature = signature_of(kernel, *plain, **options)
    names = [p.name for p in kernel.params] if hasattr(kernel, "params") else kernel.arg_names
    for argument, value in zip(names, args):
        if isinstance(value, TensorDescriptor):
            block = ", ".join(map(str, value.block_shape))
            signature.types[argument] = f"tensordesc<{TYPE_NAMES[value.base.dtype]}[{block}]>"
    return compile_for(kernel, signature, arch=arch, **settings)


def operands(dtype, transposed=(False, False), shape=(1024, 512, 2048)):
    """y, z, a, b and bias."""
    m, k, n = shape
    shapes = [(k, m) if transposed[0] else (m, k), (n, k) if transposed[1] else (k, n)]
    a, b = (torch.empty(s, dtype=dtype, device=machine.device()) for s in shapes)
    y, z = (torch.empty(m, n, dtype=dtype, device=machine.device()) for _ in range(2))
    bias = torch.empty(n, dtype=dtype, device=machine.device())
    return y, z, a.t() if transposed[0] else a, b.t() if transposed[1] else b, bias


def code_of(
    plan, dtype, kind, transposed=(False, False), shape=(1024, 512, 2048), arch=90, activation="gelu_tanh"
):  # fmt: skip
    """What the one launch of a plan compiles to, with an activation and z."""
    args = (*operands(dtype, transposed, shape), activation, kind)
    (launch,) = launches_of(lambda: op_file._launch(plan, *args))
    return compiled(launch, arch)


two_orientations = pytest.mark.parametrize("transposed", ORIENTATIONS[::3], ids=["a b", "aᵀ bᵀ"])
largest = op_file._TILES["half"][0]


@pytest.mark.parametrize("transposed", ORIENTATIONS, ids=["a b", "a bᵀ", "aᵀ b", "aᵀ bᵀ"])
def test_tma_kernel_is_wgmma_and_tma(transposed):
    """Forward is a b, da is dz bᵀ, db is aᵀ dz: tensor cores read all of them from shared memory."""
    kernel = code_of(Plan(largest, "tma"), HALF, "half", transposed)
    mix = instruction_mix(kernel)
    assert mix.get("HGMMA.64x256x16.F32.BF16") == 4, mix
    assert mix["UTMALDG.2D"] and mix["UTMASTG.2D"]
    assert not [op for op in mix if op.startswith(("HMMA", "STG", "LDGSTS"))], "not by TMA"
    assert kernel.spills == 0
    assert kernel.shared_bytes <= 227 * 1024


def test_float32_is_rounded_to_tf32_only_if_allowed(module):
    """Nowhere in silence: forward and both products of the backward pass."""
    inputs = [t.requires_grad_() for t in operands(FLOAT, shape=(64, 64, 64))[2:4]]
    dy = torch.empty(64, 64, device=machine.device())
    for allow in (False, True):
        call = functools.partial(module.matmul_triton, *inputs, allow_tf32=allow)
        launches = launches_of(lambda call=call: call().backward(dy))
        assert [how["PRECISION"] for *_, how in launches] == ["tf32" if allow else "tf32x3"] * 3


# Shared memory of one program, at most: of GPUs of that generation the one with the least
SHARED = {75: 64 * 1024, 80: 99 * 1024, 90: 227 * 1024}
UNITS = {"double": ("DMMA",), "ieee": ("FFMA",)}
SWEEP = [
    pytest.param(tile, kind, dtype, arch, id=f"{name}-{tile.m}x{tile.n}x{tile.k}-{kind}-sm_{arch}")
    for name, kind, dtype, arch in [
        ("half", "half", torch.bfloat16, 90),
        ("tf32", "tf32", torch.float32, 90),
        ("tf32x3", "tf32x3", torch.float32, 90),
        ("double", "double", torch.float64, 80),
        ("double", "double", torch.float64, 90),
        ("elsewhere", "half", torch.float16, 80),
        ("elsewhere", "tf32", torch.float32, 80),
        ("elsewhere", "tf32x3", torch.float32, 80),
        ("elsewhere, one stage", "ieee", torch.float32, 75),
        ("elsewhere, one stage", "ieee", torch.bfloat16, 75),
    ]
    for tile in op_file._TILES[name]
]


@pytest.mark.parametrize(("tile", "kind", "dtype", "arch"), SWEEP)
@two_orientations
def test_every_tile_of_the_table(tile, kind, dtype, arch, transposed):
    """No spills with the largest epilogue, room in shared memory, the units that its name promises."""
    ways = ["tiles", "tma"] if (kind, arch) == ("half", 90) else ["tiles"]
    for way in ways:
        kernel = code_of(Plan(tile, way), dtype, kind, transposed, arch=arch)
        mix = instruction_mix(kernel)
        # gelu, z and three products: a word or two of an epilogue may lie in local memory, Triton 3.6: four;
        # of the widest tile two by Triton 3.9
        most = 16 if cases.release(triton) < (3, 7) else 8
        one_product = 2 if cases.release(triton) >= (3, 9) and tile.n == 256 else 0
        assert kernel.spills <= (most if (kind, arch) == ("tf32x3", 90) else one_product)
        assert kernel.shared_bytes <= SHARED[arch]
        assert [op for op in mix if op.startswith(UNITS.get(kind, ("HGMMA", "HMMA")))]
        assert arch == 75 or cases.copies_of_16_bytes(mix) or mix["UTMALDG.2D"]
        if "tf32" in kind:
            assert [op for op in mix if op.startswith(("HGMMA", "HMMA")) and "TF32" in op]
        if dtype != torch.float64:
            assert not [op for op in mix if re.match(r"D(ADD|MUL|FMA|SETP)|F2F.*F64", op)]


@pytest.mark.parametrize("way", ["tiles", "tma"])
def test_the_longest_epilogue_on_the_largest_tile(way):
    """gelu by erf, a polynomial of degree 8: by TMA in registers, else a word or two in local memory."""
    kernel = code_of(Plan(largest, way), HALF, "half", activation="gelu")
    most = 16 if cases.release(triton) < (3, 7) else 8
    assert kernel.spills <= (0 if way == "tma" else most)


@pytest.mark.parametrize("arch", [80, 90])
@pytest.mark.parametrize("kind", ["half", "tf32x3"])
def test_tiles_for_rows_that_begin_anywhere(kind, arch):
    dtype = HALF if kind == "half" else FLOAT
    for tile in tiles_on(arch // 10, kind, False):
        kernel = code_of(Plan(tile), dtype, kind, shape=(1023, 511, 2047), arch=arch)
        mix = instruction_mix(kernel)
        # addresses of single elements, each its own: of the widest tile a few lie in local memory
        most = 64 if cases.release(triton) >= (3, 9) else 48
        assert kernel.spills <= (most if tile.m == tile.n == 128 else 4)
        assert kernel.shared_bytes <= SHARED[arch]
        assert [op for op in mix if op.startswith(("HGMMA", "HMMA"))]
        assert not [op for op in mix if op.startswith("LDGSTS")], "of single elements, or of bytes"


@pytest.mark.parametrize("activation", ["identity", "relu", "gelu", "gelu_tanh"])
def test_dz_kernel_moves_sixteen_bytes_at_a_time(activation):
    dy, saved = (torch.empty(4096, 2048, dtype=HALF, device=machine.device()) for _ in "ab")
    saved = None if activation == "identity" else saved
    call = functools.partial(host.dz_of, dy, saved, activation, True, True)
    kernel = compiled(launches_of(call)[0])
    mix = instruction_mix(kernel)
    assert mix["LDGSTS.E.BYPASS.128"]
    assert ("STG.E.128" in mix) == (activation != "identity"), "identity writes no dz: it is dy"
    assert kernel.spills == 0


# --- bad input -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("registered", [False, True], ids=["", "registered"])
def test_a_refusal_says_what_to_do(module, registered):
    a, b, bias = detached((4, 5, 6))
    wrong = {
        "integers": ((a.int(), b.int(), bias), TypeError, "floating-point"),
        "two dtypes": ((a, b.half(), bias), TypeError, "cast one"),
        "a bias of another dtype": ((a, b, bias.double()), TypeError, "cast one"),
        "one row": ((a[0], b, bias), ValueError, r"a\[None\]"),
        "a batch of b": ((a, b[None], bias), ValueError, r"b must be \(K, N\) with"),
        "a vector": ((a, b[:, 0], bias), ValueError, r"b must be \(K, N\) with"),
        "another K": ((a, b[:3], bias), ValueError, "b must be .* with K = 5, got"),
        "more K": ((a, b.repeat(2, 1), bias), ValueError, "b must be .* with K = 5, got"),
        "a weight as a layer has it": ((a, b.t(), bias), ValueError, r"weight\.t\(\)"),
        "a short bias": ((a, b, bias[:1]), ValueError, r"N = 6, got shape \(1,\)"),
        "a bias in a row": ((a, b, bias[None]), ValueError, r"bias must be \(N\)"),
        "an activation": (
            (a, b, bias, "tanh"),
            ValueError,
            "identity, relu, gelu, gelu_tanh, silu, sigmoid",
        ),
        "a number for a bias": ((a, b, 1.0), TypeError, "bias must be a torch.Tensor"),
        "another device": ((a, b.to("meta"), bias), ValueError, "one device"),
        "a bias elsewhere": ((a, b, bias.to("meta")), ValueError, "one device"),
        "no device": ([t.to("meta") for t in (a, b, bias)], ValueError, "matmul_eager"),
    }
    version = module.matmul_op if registered else module.matmul_triton
    name = "matmul_op" if registered else "matmul_triton"
    for what, (bad, kind, message) in wrong.items():
        of_torch = "Tensor" in message or any(t.is_meta for t in bad[1:3] if torch.is_tensor(t))
        if registered and of_torch:
            continue  # torch.library itself refuses these, and has an answer for meta tensors
        with pytest.raises(kind, match=f"{name}: .*{message}") as caught:
            version(*bad)
        assert len(str(caught.value)) > 40, what


# --- CUDA ----------------------------------------------------------------------------------------------------


@needs_cuda
def test_cuda_sums_a_long_row_in_parts():
    """A running sum's error grows with its length: parts of 1024 are to lose less than one sum does."""
    a, b, _ = detached((3, 1033, 5))  # rows that begin anywhere
    torch.testing.assert_close(
        matmul_cuda(a, b).double(), a.double() @ b.double(), rtol=1e-3, atol=1e-3
    )
    n_inner = 3080
    a, b, _ = detached((16, n_inner, 16))
    exact, running = a.double() @ b.double(), torch.zeros(16, 16, device=a.device)
    for k in range(n_inner):
        running += a[:, k, None] * b[k]
    error = {
        name: (y - exact).square().mean().sqrt().item()
        for name, y in (("parts", matmul_cuda(a, b)), ("one sum", running))
    }
    assert error["parts"] < 0.75 * error["one sum"], error


@needs_cuda
def test_cuda_traffic():
    """a once for each column of tiles, b once for each row of them: 128 x 128."""
    if machine.HAS_GPU:
        pytest.skip("the CPU build counts")
    namespace = host.load_cuda(op_file.__file__)
    for m, k, n in [(130, 9, 16), (16, 24, 136), (129, 5, 129)]:
        a, b, _ = detached((m, k, n))
        cuda.memory_traffic(namespace)
        y = matmul_cuda(a, b)
        traffic = cuda.memory_traffic(namespace)
        across, down = -(-n // 128), -(-m // 128)
        assert traffic.thread_blocks == across * down
        assert traffic.bytes_read == a.nbytes * across + b.nbytes * down
        assert traffic.bytes_written == y.nbytes
