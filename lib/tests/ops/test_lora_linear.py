"""lora_linear: rounding, what is saved, multiplied and launched, TMA, tiles, machine code; LoRALinear, and the
mistakes that such modules are known for."""

import copy
import functools
import itertools
import re
import tempfile
from pathlib import Path
from types import SimpleNamespace

from lib import machine
from lib.measure import launch_diff, registry
from lib.measure.check import check_against_float64
from lib.nogpu.compile_only import compile_for, instruction_mix
from lib.nogpu.fake_gpu import H200, fake_gpu
from lib.nogpu.memory import count_traffic
from lib.ops import lora_linear
from lib.ops.lora_linear import Plan, Tile, lora_linear_eager, lora_linear_triton
from lib.standalone import standalone
from lib.tests.ops import battery, cases
from lib.tests.ops.battery import assert_close

import pytest
import torch
import triton
from torch.utils._python_dispatch import TorchDispatchMode

OP = registry.find("lora_linear")
ACTIVATIONS = list(OP.configurations)
SMALL = (9, 40, 24, 6)  # M, K, N, rank
TILES = lora_linear._TILES
TMA = Plan(Tile(64, 64, 64, 4, 4), "tma")
activations = pytest.mark.parametrize("activation", ACTIVATIONS)
wrappers = pytest.mark.parametrize("name", ["lora_linear_triton", "lora_linear_cublas"])
HAS_TMA = not machine.HAS_GPU or 9 <= torch.cuda.get_device_capability()[0] < 12
needs_tma = pytest.mark.skipif(not HAS_TMA, reason="needs a GPU that has TMA")


def inputs(shape=SMALL, dtype=torch.float32, coarse=False, seed=0):
    """x, weight, lora_a, lora_b, bias: all but weight are leaves that require grad."""
    tensors = OP.inputs(shape, dtype, machine.device(), seed)
    return [registry.coarse(t) if coarse else t for t in tensors]


def detached(*args, **how):
    return [t.detach() for t in inputs(*args, **how)]


def leaves_of(tensors):
    return [t for t in tensors if t.requires_grad]


def with_only(tensors, asked):
    """The same with a gradient asked for of these numbers alone."""
    return [t.detach().requires_grad_(k in asked) for k, t in enumerate(tensors)]


def check(
    version, tensors, eager=lora_linear_eager, scale=0.75, activation="identity", name="", **how
):
    ours = functools.partial(version, scale=scale, activation=activation, **how)
    want = functools.partial(eager, scale=scale, activation=activation)
    slack = 4 * torch.finfo(tensors[0].dtype).eps  # small shapes: eager's largest error may be luck
    check_against_float64(
        ours, want, *tensors, slack=slack, name=f"{name} {scale} {activation} {how}"
    )


# --- rounding and special values -----------------------------------------------------------------------------


@pytest.mark.parametrize("activation", ["identity", "gelu", "gelu_tanh", "silu"])
def test_errors_are_no_larger_than_eagers(module, activation):
    """Of y and each gradient, in the mean of their squares: s within u's rounding costs nothing."""
    squares = []
    for seed in range(8):
        tensors = inputs((12, 24, 16, 4), torch.bfloat16, seed=seed)
        exact = [t.detach().double().requires_grad_(t.requires_grad) for t in tensors]
        dy = torch.randn(12, 16, device=machine.device()).bfloat16()
        want, ours, eagers = (
            _with_gradients(version, given, dy, activation)
            for version, given in (
                (lora_linear_eager, exact), (module.lora_linear_triton, tensors), (lora_linear_eager, tensors)
            )
        )  # fmt: skip
        errors = [
            [(a.double() - b).square().mean() for a, b in zip(g, want)] for g in (ours, eagers)
        ]
        squares.append(errors)
    ours, eagers = torch.tensor(squares).mean(0)
    assert (ours <= 1.05 * eagers).all(), (ours / eagers).sqrt()


def _with_gradients(version, tensors, dy, activation):
    y = version(*tensors, 0.75, activation)
    return [y, *torch.autograd.grad(y, leaves_of(tensors), dy.to(y.dtype))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_sum_is_rounded_once(module, dtype):
    """Stricter than twice eager's error: with exact products, half of the last place is all that is lost."""
    tensors = detached((40, 64, 24, 8), dtype, coarse=True)
    tensors[4] += 2.0**-9
    exact = [t.double() for t in tensors]
    for activation, plan in itertools.product(("identity", "relu"), (None, TMA)):
        if plan and not HAS_TMA:
            continue
        want = lora_linear_eager(*exact, 0.5, activation)
        got = module.lora_linear_triton(*tensors, 0.5, activation, plan=plan).double()
        assert ((got - want).abs() <= 0.51 * torch.finfo(dtype).eps * want.abs()).all(), plan


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_u_is_rounded_once_and_not_scaled(module, dtype):
    tensors = detached((40, 16, 8, 8), dtype)
    _, u, _ = module.lora_linear_op(*tensors, 0.7)
    want = tensors[0].double() @ tensors[2].double().T
    error = (u.double() - want).abs() - 0.51 * torch.finfo(dtype).eps * want.abs()
    assert (error <= 1e-5).all()


@wrappers
@pytest.mark.parametrize("scale", [2, 0.3, 0, 0.0, 1e-3])
def test_scales(module, name, scale):
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        check(getattr(module, name), inputs(dtype=dtype), scale=scale, activation="gelu")


@pytest.mark.parametrize(
    ("n_rows", "several"), [(17, False), (100, True)], ids=["one strip", "strips"]
)
def test_sums_over_rows_are_rounded_once(module, n_rows, several):
    given = inputs((n_rows, 24, 64, 6), torch.bfloat16)
    call = functools.partial(module.lora_linear_triton, activation="silu")
    battery.check_strips(module, lambda: call(*given).sum().backward(), several)


def test_nothing_of_memory_just_allocated_is_read():
    """beta=0 means: NaN in the memory of a result does not come through, with a scale of 0 neither."""
    a, b = torch.randn(5, 7, device=machine.device()), torch.randn(7, 3, device=machine.device())
    for scale in (0.0, 0.5):
        stale = torch.full((5, 3), float("nan"), device=a.device)
        assert_close(stale.addmm_(a, b, beta=0, alpha=scale), scale * (a @ b))


@pytest.mark.parametrize("plan", [None, pytest.param(TMA, marks=needs_tma)], ids=["chosen", "tma"])
@activations
def test_nan_and_infinities_of_the_weights_stay_in_their_columns(module, plan, activation):
    dtype = torch.bfloat16 if plan and not cases.products_leak() else torch.float32
    tensors = inputs((6, 16, 24, 3), dtype)
    with torch.no_grad():
        tensors[0][1, 2] = tensors[1][3, 4] = tensors[3][7, 1] = tensors[4][9] = float("nan")
        if activation != "gelu":  # F.gelu(inf) is NaN on a CPU, as one of seven elements or more
            tensors[0][3, 5], tensors[1][11, 2] = float("inf"), -float("inf")
            tensors[4][13] = -float("inf")
    check(module.lora_linear_triton, tensors, activation=activation, plan=plan)
    y = module.lora_linear_triton(*tensors, 0.75, activation, plan=plan).detach()
    untouched = [n for n in range(24) if n not in (3, 7, 9, 11, 13)]
    assert torch.isfinite(y[[0, 2, 4, 5]][:, untouched]).all(), "it spreads"


@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "silu", "sigmoid"])
def test_large_sums_do_not_overflow_on_the_way(module, activation):
    tensors = inputs((6, 16, 24, 3))
    with torch.no_grad():
        tensors[4][:] = torch.linspace(-1e4, 1e4, 24)
    check(module.lora_linear_triton, tensors, activation=activation)


@wrappers
def test_float16_overflows_where_eager_does(module, name):
    x, weight, lora_a, lora_b, bias = inputs((6, 16, 24, 3), torch.float16)
    with torch.no_grad():
        x[2], weight[5], weight[6] = 60000.0, 1.0, -1.0
    tensors = [x, weight, (lora_a * 0).detach().requires_grad_(), lora_b, bias]
    check(getattr(module, name), tensors, activation="relu")


# --- layouts and sizes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["x", "weight", "lora_b"])
def test_columns_past_two_to_the_31(module, what):
    """Offsets of 2**30 elements from one step over K, or over the rank, to the next."""
    k = list(OP.tensors).index(what)
    tensors = detached((16, 16, 16, 3) if what == "lora_b" else (16, 3, 16, 4), torch.float16)
    tensors[k] = cases.spaced(tensors[k].t().contiguous()).t()
    tensors = with_only(tensors, (0, 2, 3, 4))
    plan = Plan(Tile(16, 16, 16, 2, 1))
    check(module.lora_linear_triton, tensors, cases.near(lora_linear_eager), plan=plan)


@pytest.mark.parametrize("label", OP.plans)
def test_every_way_saves_z(module, label):
    """gelu and silu have their slope from z, which each way stores beside y."""
    plan, (shape, *_) = OP.plans[label]
    if machine.HAS_GPU and plan.way == "tma" and not HAS_TMA:
        pytest.skip("needs a GPU that has TMA")
    *tensors, bias = inputs(shape, torch.bfloat16)
    for given in ([*tensors, bias], tensors):
        check(module.lora_linear_triton, given, activation="silu", plan=plan)


@pytest.mark.parametrize("what", ["x", "weight", "lora_a", "lora_b"])
def test_layouts_over_several_steps(module, what):
    """Over K and over the rank, by tiles that are smaller than they are."""
    tensors, k = inputs((34, 40, 24, 20)), list(OP.tensors).index(what)
    for layout, strided in cases.layouts(tensors[k].detach()).items():
        given = [*tensors[:k], strided.requires_grad_(what != "weight"), *tensors[k + 1 :]]
        plan = Plan(Tile(16, 16, 16, 4, 1))
        check(module.lora_linear_triton, given, name=layout, activation="silu", plan=plan)


ALL_TILES = [
    (kind, way, tile)
    for kind in TILES
    for tile in TILES[kind]
    for way in ("pointers", "tma")
    if way == "pointers" or kind == "half" and tile.m >= 64 <= tile.n
]


@pytest.mark.parametrize(("kind", "way", "tile"), ALL_TILES, ids=str)
def test_every_tile_of_the_table(kind, way, tile):
    """More than one tile each way, and steps over K and rank, the last of each cut."""
    if machine.HAS_GPU and not (HAS_TMA and kind == "half"):
        pytest.skip("not of this GPU, or of this dtype")
    cut = 8 if way == "tma" else 7
    shape = (tile.m + 5, tile.k + cut, tile.n + cut + way.count("p"), min(tile.k, 64) + 3)
    tensors = inputs(shape, torch.float16)
    check(lora_linear_triton, tensors, activation="silu", plan=Plan(tile, way))


# --- which kernel, and what it is given ----------------------------------------------------------------------


def kernels_of(call):
    """The names of the kernels that a call launches."""
    return {argument.partition(".")[0] for argument in count_traffic(call).by_argument}


@needs_tma
def test_tma_only_where_it_reads(module):
    """Rows without gaps that begin on 16-byte boundaries, slices of wider matrices among them; 16 bits."""
    x, weight, lora_a, lora_b, bias = detached((70, 40, 72, 8), torch.bfloat16)
    wide = torch.full((72, 56), float("nan"), dtype=x.dtype, device=x.device)

    def taken(x, weight, lora_a=lora_a, lora_b=lora_b, bias=bias):
        tensors = with_only([x, weight, lora_a, lora_b, bias], (0, 2))
        check(module.lora_linear_triton, tensors, activation="gelu", plan=TMA)
        call = functools.partial(module.lora_linear_triton, *tensors, plan=TMA)
        (kernel,) = kernels_of(call)
        return kernel.removeprefix("_lora_linear_")

    assert taken(x, weight) == "tma_kernel"
    for k, t in enumerate((x, weight)):
        part = wide[: t.shape[0], 8:48].copy_(t)
        assert (
            taken(*[part if j == k else other for j, other in enumerate((x, weight))])
            == "tma_kernel"
        )
    shifted = torch.zeros(weight.numel() + 1, dtype=x.dtype, device=x.device)[1:].view(72, 40)
    for what, tensors in {
        "columns": (x.t().contiguous().t(), weight),
        "every second column": (torch.stack([x, x], -1)[..., 0], weight),
        "one row": (x, weight[:1].expand(72, 40)),
        "off a boundary": (x, shifted.copy_(weight)),
        "rows of 82 bytes": detached((70, 41, 72, 8), torch.bfloat16),
        "y of 146 bytes a row": detached((70, 40, 73, 8), torch.bfloat16),
        "float32": detached((70, 40, 72, 8)),
    }.items():
        assert taken(*tensors) == "kernel", what


@pytest.mark.skipif(machine.HAS_GPU, reason="sizes for the interpreter's four SMs")
def test_the_plan_takes_tma_where_it_pays(module):
    def way(m, n, k, dtype=torch.bfloat16):
        return module._plan(m, n, k, dtype, False, machine.device()).way

    assert (
        way(512, 512, 512)
        == way(511, 513, 600, torch.float16)
        == ("tma" if HAS_TMA else "pointers")
    )
    assert way(256, 256, 256) == "pointers", "descriptors cost more than the product"
    assert way(512, 512, 512, torch.float32) == "pointers"
    assert way(8, 8192, 2048) == "pointers", "tiles of 16 rows"


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [("half", torch.bfloat16), ("tf32", torch.float32), ("tf32x3", torch.float32), ("double", torch.float64)],
)  # fmt: skip
def test_tiles_fill_an_h200(kind, dtype):
    with a_gpu():
        pick = functools.partial(
            on_a_gpu(lora_linear)._pick_tile,
            dtype=dtype,
            allow_tf32=kind == "tf32",
            gpu=torch.device("cuda"),
        )
        assert pick(16384, 4096) == TILES[kind][0]
        assert pick(1, 1) == TILES[kind][-1]
        assert pick(1, 100_000).m <= 16
        for m, n in [(1, 4096), (64, 64), (300, 700), (5000, 3)]:
            tile = pick(m, n)
            assert tile.m < 2 * max(16, m)
            assert tile.n < 2 * max(16, n)
            if tile != TILES[kind][-1]:
                assert -(-m // tile.m) * -(-n // tile.n) >= 99, "idle SMs"


@pytest.mark.parametrize(("major", "kind"), [(7, "turing"), (8, "elsewhere"), (12, "elsewhere")])
def test_other_gpus_have_two_tiles(major, kind):
    with a_gpu(major):
        plan = on_a_gpu(lora_linear, major)._plan
        device = torch.device("cuda")
        for dtype in (torch.bfloat16, torch.float32):
            assert plan(4096, 4096, 4096, dtype, False, device) == Plan(TILES[kind][0])
            assert plan(1, 1, 1, dtype, False, device).tile == TILES[kind][1]
        assert plan(1, 1, 1, torch.float64, False, device).tile == TILES["double"][1]


def test_forward_moves_each_tensor_once_and_z_only_for_a_gradient(module):
    x, weight, lora_a, lora_b, bias = detached((128, 64, 256, 16), torch.bfloat16)
    y_bytes, u_bytes = 128 * 256 * 2, 128 * 16 * 2
    read = x.nbytes + weight.nbytes + u_bytes + lora_b.nbytes + bias.nbytes
    for activation, gradient in itertools.product(ACTIVATIONS, (False, True)):
        leaf = x.detach().requires_grad_(gradient)
        tensors = leaf, weight, lora_a, lora_b, bias, 1.0, activation
        traffic = count_traffic(functools.partial(module.lora_linear_triton, *tensors))
        keeps_z = gradient and activation in ("gelu", "gelu_tanh", "silu")
        assert traffic.launches == 1
        assert traffic.bytes_moved == read + y_bytes * (2 if keeps_z else 1), activation


@activations
def test_backward_of_the_activation_is_one_pass(activation):
    tensors = inputs((128, 64, 256, 16), torch.bfloat16)
    y = lora_linear_triton(*tensors, 0.5, activation)
    dy = torch.randn_like(y)
    traffic = count_traffic(lambda: torch.autograd.grad(y, leaves_of(tensors), dy))
    by = {name.rpartition(".")[2]: a for name, a in traffic.by_argument.items()}
    elementwise = activation != "identity"
    assert traffic.launches == 2, "dz with sums, and their sum"
    assert by["dy_ptr"].loaded == y.nbytes
    assert ("saved_ptr" in by) == ("dz_ptr" in by) == elementwise
    if elementwise:
        assert by["saved_ptr"].loaded == by["dz_ptr"].stored == y.nbytes
    # without db and an activation, nothing is left for a kernel to do
    for t in leaves_of(tensors)[:3]:
        y = lora_linear_triton(*tensors[:4], None, 0.5, activation)
        traffic = count_traffic(lambda t=t, y=y: torch.autograd.grad(y, t, dy))
        assert traffic.launches == elementwise


GRADIENTS = [c for n in (1, 2, 3, 4) for c in itertools.combinations((0, 2, 3, 4), n)]


@wrappers
@pytest.mark.parametrize("activation", ["identity", "relu", "gelu", "gelu_tanh"])
def test_saves_only_what_the_gradients_need(module, name, activation):
    """x for A; W, A, B for x; u for B; nothing for the bias; beside them y or z, and for identity nothing."""
    m, _, n, r = SMALL
    x, weight, lora_a, lora_b, bias = tensors = detached()
    needs = {0: {weight, lora_a, lora_b}, 2: {x, lora_b}, 3: set(), 4: set()}
    for asked in GRADIENTS:
        for k, t in enumerate(tensors):
            t.requires_grad_(k in asked)
        saved = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):  # noqa: B023
            getattr(module, name)(*tensors, 0.5, activation)
        known = {t.data_ptr() for t in set().union(*(needs[i] for i in asked))}
        assert {t.data_ptr() for t in saved} >= known
        made = [tuple(t.shape) for t in saved if t.data_ptr() not in known]
        u = [(m, r)] if 3 in asked else []
        assert sorted(made) == sorted(u + ([] if activation == "identity" else [(m, n)])), asked


class _Log(TorchDispatchMode):
    """(name, shape of the result) of every operation inside."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.entries.append((func.__name__.split(".")[0], tuple(result.shape)))
        return result

    def __enter__(self):
        self.entries = []
        return super().__enter__()

    def products(self):
        return [shape for name, shape in self.entries if name in ("mm", "addmm", "addmm_")]


def test_products_that_are_left_to_cublas():
    """Forward u alone; backward du, dA, dx in two, dB; and no product of the shape of W, as it is frozen."""
    m, k, n, r = SMALL
    tensors = inputs()
    with battery.looking_inside(lora_linear), _Log() as log:
        lora_linear_triton(*tensors, 0.5, "relu")
    assert log.products() == [(m, r)]
    for asked, want in [
        ((0, 2, 3, 4), [(m, k), (m, k), (m, r), (n, r), (r, k)]),
        ((2, 3), [(m, r), (n, r), (r, k)]),
        ((0,), [(m, k), (m, k), (m, r)]),
        ((3,), [(n, r)]),
        ((4,), []),
    ]:
        some = with_only(tensors, asked)
        y = lora_linear_triton(*some, 0.5, "relu")
        with _Log() as log:
            torch.autograd.grad(y, leaves_of(some), torch.randn_like(y))
        assert sorted(log.products()) == sorted(want), asked
        assert (n, k) not in log.products()


@activations
def test_cublas_adds_and_activates_in_place(activation):
    """Two products into y and an activation within it: no addition, no product with s, no second tensor of y's
    size unless the backward pass needs z."""
    m, _, n, r = SMALL
    for bias, saves in itertools.product((True, False), (True, False)):
        *tensors, last = inputs() if saves else detached()
        with battery.looking_inside(lora_linear), _Log() as log:
            lora_linear.lora_linear_cublas(*tensors, last if bias else None, 0.5, activation)
        names = [name for name, _ in log.entries]
        assert log.products() == [(m, r), (m, n), (m, n)]
        assert not {"add", "add_", "mul", "mul_"} & set(names)
        made = [shape for name, shape in log.entries if name.startswith(("empty", "new_empty"))]
        assert made.count((m, n)) == 1 + (saves and activation in ("gelu", "gelu_tanh", "silu"))
        # not aten.relu.out, which goes by way of a second tensor
        name = {"relu": "clamp_min", "gelu_tanh": "gelu"}.get(activation, activation)
        assert (name in names) == (activation != "identity")


# --- autocast, torch.library and torch.compile ---------------------------------------------------------------


@wrappers
def test_autocast_is_a_call_in_its_dtype(module, name):
    version, tensors = getattr(module, name), inputs(coarse=True)
    half, double = ([t.detach().to(d) for t in tensors] for d in (torch.bfloat16, torch.float64))
    with torch.autocast(machine.device().type, dtype=torch.bfloat16):
        got = version(*tensors, 0.5, "gelu")
        assert version(*double, 0.5, "gelu").dtype == torch.float64
    assert torch.equal(got, version(*half, 0.5, "gelu"))


@activations
def test_the_registered_op_has_the_same_gradients(module, activation):
    """With z saved, and without, where gelu and silu compute it again; of all inputs and of each alone."""
    tensors = inputs()
    for asked, save_z in itertools.product([(0, 2, 3, 4), (0,), (2,), (3,), (4,)], (True, False)):
        some = with_only(tensors, asked)
        y = module.lora_linear_op(*some, 0.75, activation, False, save_z)[0]
        again = lora_linear_eager(*some, 0.75, activation)
        assert_close(y, again)
        dy = torch.randn_like(y)
        got, want = (torch.autograd.grad(z, leaves_of(some), dy) for z in (y, again))
        for a, b in zip(got, want, strict=True):
            assert_close(a, b, what=f"{asked}, save_z={save_z}")


def test_the_registered_op_with_its_required_arguments_only(module):
    """torch leaves trailing arguments at their defaults out of what it says of gradients."""
    *tensors, _ = inputs()
    got = torch.autograd.grad(module.lora_linear_op(*tensors)[0].sum(), leaves_of(tensors))
    want = torch.autograd.grad(lora_linear_eager(*tensors).sum(), leaves_of(tensors))
    for a, b in zip(got, want, strict=True):
        assert_close(a, b)


def test_compiled_training_without_bias_and_scale():
    torch.compiler.reset()
    *tensors, _ = inputs()
    compiled = torch.compile(lora_linear_triton, fullgraph=True, backend="aot_eager")
    got = torch.autograd.grad(compiled(*tensors).sum(), leaves_of(tensors))
    want = torch.autograd.grad(lora_linear_eager(*tensors).sum(), leaves_of(tensors))
    for a, b in zip(got, want, strict=True):
        assert_close(a, b)


def test_cublas_compiled_is_the_op():
    torch.compiler.reset()
    graphs = []

    def backend(graph, _):
        graphs.append(graph.code)
        return graph.forward

    call = functools.partial(lora_linear.lora_linear_cublas, scale=0.5, activation="silu")
    compiled = torch.compile(call, backend=backend, fullgraph=True)
    tensors = detached()
    assert_close(compiled(*tensors), lora_linear_eager(*tensors, 0.5, "silu"))
    assert "fused_kernels.lora_linear" in graphs[0]


def test_the_registered_op_refuses_a_weight_that_is_trained(module):
    x, weight, *rest = inputs()
    with pytest.raises(ValueError, match="weight.requires_grad_"):
        module.lora_linear_op(x, weight.clone().requires_grad_(), *rest)


def test_the_registered_op_has_no_second_derivative():
    tensors = inputs()
    y = lora_linear.lora_linear_op(*tensors, 0.5, "silu", False, True)[0]
    dy = torch.ones_like(y, requires_grad=True)
    (dx,) = torch.autograd.grad(y, tensors[:1], dy, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        (dx * tensors[0]).sum().backward()


def test_opcheck_backward():
    x, weight, lora_a, lora_b, _ = detached((6, 8, 4, 3))
    u, y, dy = (torch.randn(s, device=x.device) for s in ((6, 3), (2, 3, 4), (2, 3, 4)))
    for needs_grad in [(1, 1, 1, 1), (0, 0, 0, 0), (1, 0, 0, 1), (0, 1, 1, 0)]:
        tensors = dy, x.view(2, 3, 8), weight, lora_a, lora_b, u, y
        arguments = (*tensors, 0.5, "sigmoid", [bool(w) for w in needs_grad])
        torch.library.opcheck(torch.ops.fused_kernels.lora_linear_backward, arguments)


# --- on a GPU ------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(2**19 + 1, 64, 4096, 16), (2**20 + 3, 64, 2056, 3)], ids=str)
def test_more_than_two_to_the_31_elements(shape):
    if torch.cuda.mem_get_info()[0] < 60e9:
        pytest.skip("needs 60 GB of GPU memory")
    x, weight, lora_a, lora_b, bias = inputs(shape, torch.bfloat16)
    got = lora_linear_triton(x, weight, lora_a, lora_b, bias, 0.5, "gelu")
    got.backward(got.detach())
    for rows in (slice(0, 2), slice(-2, None)):
        part = x.detach()[rows].requires_grad_()
        want = lora_linear_eager(part, weight, lora_a, lora_b, bias, 0.5, "gelu")
        assert_close(got[rows], want, torch.bfloat16)
        want.backward(got.detach()[rows])
        assert_close(x.grad[rows], part.grad, torch.bfloat16)


@pytest.mark.gpu
def test_cuda_graph_with_descriptors():
    """Descriptors are made on the host: a replay reads new numbers from the old addresses."""
    tensors = detached((2048, 2048, 2048, 16), torch.bfloat16)
    lora_linear_triton(*tensors, 0.5, "relu")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = lora_linear_triton(*tensors, 0.5, "relu")
    for t in tensors:
        t.normal_()
    graph.replay()
    assert torch.equal(y, lora_linear_triton(*tensors, 0.5, "relu"))


@pytest.mark.gpu
def test_tma_on_the_second_gpu():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    tensors = OP.inputs((1024, 1024, 1024, 16), torch.bfloat16, torch.device("cuda:1"))
    check(lora_linear_triton, tensors, activation="gelu")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_another_number_of_rows_does_not_compile_large_tiles_again(dtype):
    with battery.count_compilations() as compiled:
        for n, rows in enumerate((4000, 4001, 3999, 4096, 3333)):
            tensors = inputs((rows, 1024, 1024, 16), dtype)
            lora_linear_triton(*tensors, 0.5, "gelu").sum().backward()
            if n == 0:
                compiled.clear()
    assert not compiled, compiled


@pytest.mark.gpu
def test_tf32_is_asked_for():
    """float32 is exact unless allow_tf32: then it is off by more, but by no more than tf32's 10 bits."""
    tensors = detached((512, 2048, 512, 16))
    want = lora_linear_eager(*(t.double() for t in tensors))
    exact, rough = (
        (lora_linear_triton(*tensors, allow_tf32=allow).double() - want).abs().max()
        for allow in (False, True)
    )
    assert exact < 1e-4 < rough < 0.05


# --- machine code --------------------------------------------------------------------------------------------


@functools.cache
def on_a_gpu(module, major=9):
    """The module with kernels to compile; one for each GPU, as a module keeps what it has asked it."""
    file = Path(module.__file__)
    text = standalone("lora_linear") if module is lora_linear else file.read_text()
    return launch_diff._load(text, Path(_folder().name, f"{file.stem}_on_{major}.py"))


@functools.cache
def _folder():
    return tempfile.TemporaryDirectory()


def a_gpu(major=9):
    return fake_gpu(SimpleNamespace(**vars(H200) | {"major": major}))


def launches(module, dtype, rank=16, activation="relu", trained=False, major=9, **how):
    """What lora_linear_triton launches for (512, 512) matrices, forward and backward; nothing runs."""
    with a_gpu(major), launch_diff._addresses():
        empty = functools.partial(torch.empty, dtype=dtype, device="cuda")
        tensors = OP.inputs((512, 512, 512, rank), dtype, torch.device("cuda"), draw=empty)
        tensors = with_only(tensors, (0, 2, 3, 4) if trained else ())

        def call():
            y = on_a_gpu(module, major).lora_linear_triton(*tensors, 0.5, activation, **how)
            if trained:
                torch.autograd.grad([y], leaves_of(tensors), [torch.empty_like(y)])

        return launch_diff.launches_of(call)


def code_of(launch, arch=90):
    how = {"num_warps": launch.num_warps, "num_stages": launch.num_stages}
    return compile_for(launch.kernel, launch.made_of, arch=arch, **how)


def count(compiled, pattern):
    return sum(n for op, n in instruction_mix(compiled).items() if re.match(pattern, op))


@pytest.mark.parametrize(("rank", "activation"), [(16, "relu"), (64, "gelu"), (5, "silu")])
def test_hopper_multiplies_by_wgmma_and_moves_by_tma(rank, activation):
    keeps_z, tile = activation in ("gelu", "gelu_tanh", "silu"), TILES["half"][0]
    plan = Plan(tile, "tma")
    launch, *_ = launches(lora_linear, torch.bfloat16, rank, activation, trained=keeps_z, plan=plan)
    assert launch.kernel.__name__ == "_lora_linear_tma_kernel"
    compiled = code_of(launch)
    assert count(compiled, "HGMMA.64x256x16.F32.BF16") >= tile.k // 16 + 1
    assert count(compiled, "HMMA") == 0
    # the loop loads one piece of x and one of W a step; what else there is fills the pipeline before it
    assert count(compiled, "UTMALDG.2D") == 2 * tile.num_stages, "loads are not pipelined"
    assert count(compiled, "UTMASTG.2D") == (4 if keeps_z else 2)
    assert count(compiled, "STG") == 0
    if rank % 16 == 0:
        assert count(compiled, "LDG.E.U16") == 0, "u and B, 16 bytes at a time"
    assert compiled.spills == 0
    assert compiled.shared_bytes <= 232_448, "more than a program can have"
    # one exponential and one reciprocal an element; two more divide tile numbers, at three places
    elements = tile.m * tile.n // (32 * tile.num_warps)
    assert count(compiled, "MUFU.EX2") == (elements if keeps_z else 0)
    assert count(compiled, "MUFU.RCP") <= (elements if keeps_z else 0) + 6


@pytest.mark.parametrize(
    ("kind", "dtype", "arch", "products"),
    [
        ("half", torch.bfloat16, 90, "HGMMA.*BF16"),
        ("tf32", torch.float32, 90, "HGMMA.*TF32"),
        ("tf32x3", torch.float32, 90, "HGMMA.*TF32"),
        ("double", torch.float64, 90, "DMMA"),
        ("elsewhere", torch.bfloat16, 80, "HMMA.*BF16"),
        ("elsewhere", torch.float32, 80, "HMMA.*TF32"),
        ("double", torch.float64, 80, "DMMA"),
        ("turing", torch.float16, 75, "FFMA"),
        ("turing", torch.float32, 75, "FFMA"),
    ],
)
def test_the_pointer_kernel_multiplies_by_the_best_there_is(kind, dtype, arch, products):
    tile = TILES[kind][0]
    launch, *_ = launches(
        lora_linear,
        dtype,
        64,
        "gelu_tanh",
        True,
        arch // 10,
        plan=Plan(tile),
        allow_tf32=kind == "tf32",
    )
    compiled = code_of(launch, arch)
    assert count(compiled, products) >= 4
    if "MMA" not in products:
        assert count(compiled, "H(G)?MMA|DMMA") == 0, "tensor cores round float32"
    if kind != "turing":
        assert count(compiled, r"LDGSTS\.E\.BYPASS.*\.128") >= 2 * tile.num_stages
    assert count(compiled, r"LDGSTS(?!.*128)") == 0
    assert count(compiled, r"STG\.E(?!\.128)") == 0
    # with z kept: by Triton 3.6 and 3.9 some words of Hopper's epilogue lie in local memory
    hopper = kind in ("half", "tf32x3") and arch == 90
    assert compiled.spills <= (words_of_z(4, 6) if hopper else 0)
    assert compiled.shared_bytes <= {90: 232_448, 80: 101_376, 75: 65_536}[arch]


def words_of_z(before, after):
    """In local memory where z is kept: before Triton 3.7, none, and from 3.9 on."""
    release = cases.release(triton)
    return before if release < (3, 7) else after if release >= (3, 9) else 0


def test_the_longest_epilogue_on_the_largest_tile():
    """gelu by erf, and z kept: Triton 3.6 keeps eight words of a thread in local memory, 3.7 none, 3.9 four."""
    tile = TILES["half"][0]
    launch, *_ = launches(lora_linear, torch.bfloat16, 64, "gelu", True, 9, plan=Plan(tile))
    assert code_of(launch, 90).spills <= words_of_z(8, 4)


@pytest.mark.parametrize("activation", ["identity", "relu", "gelu", "gelu_tanh"])
def test_backward_kernel_has_sixteen_byte_accesses_and_no_spills(activation):
    _, launch, _ = launches(lora_linear, torch.bfloat16, activation=activation, trained=True)
    assert launch.kernel.__name__ == "dz_kernel"
    compiled = code_of(launch)
    assert count(compiled, r"(LDG|LDGSTS)\.E(?!.*128)") == 0
    assert count(compiled, r"(LDG|LDGSTS)\.E.*128") >= (1 if activation == "identity" else 2)
    assert compiled.spills == 0


def test_tf32_only_where_it_is_asked_for(module):
    seen = []
    for dtype, allow in itertools.product((torch.float32, torch.float64), (False, True)):
        (launch,) = launches(module, dtype, allow_tf32=allow)
        seen.append(launch.made_of.constexprs["PRECISION"])
    assert seen == ["tf32x3", "tf32"] * 2  # of float64 tl.dot makes nothing else


# --- bad input -----------------------------------------------------------------------------------------------


@wrappers
def test_what_only_this_op_refuses(module, name):
    x, weight, lora_a, lora_b, bias = good = detached()
    version = getattr(module, name)

    def but(**changes):
        return tuple(changes.get(label, t) for label, t in zip(OP.tensors, good))

    wrong = {
        "lora_a transposed": (but(lora_a=lora_a.t()), ValueError, "lora_a must be"),
        "lora_b transposed": (but(lora_b=lora_b.t()), ValueError, "lora_b must be"),
        "two ranks": (but(lora_b=lora_b[:, :5]), ValueError, r"lora_b must be .*R = 6, got shape \(24, 5\)"),
        "rank 0": (but(lora_a=lora_a[:0], lora_b=lora_b[:, :0]), ValueError, "rank must be 1 to 256"),
        "a high rank": (
            but(lora_a=x.new_zeros(257, 40), lora_b=x.new_zeros(24, 257)), ValueError, "functional.linear"
        ),
        "a weight of one dimension": (but(weight=weight[0]), ValueError, "weight must be"),
        "a bias of two dimensions": (but(bias=bias[None]), ValueError, "bias must be"),
        "another dtype of bias": (but(bias=bias.half()), TypeError, "cast one of them"),
        "a scale in a tensor": ((*good, torch.tensor(1.0)), TypeError, "Python number"),
        "an activation": ((*good, 1.0, "tanh"), ValueError, "identity, relu, gelu, gelu_tanh, silu, sigmoid"),
    }  # fmt: skip
    for what, (bad, kind, message) in wrong.items():
        with pytest.raises(kind, match=f"{name}: .*{message}") as caught:
            version(*bad)
        assert len(str(caught.value)) > 40, what


@wrappers
def test_a_weight_that_requires_grad_is_refused_while_gradients_are_recorded(module, name):
    x, weight, *rest = detached()
    version, trained = getattr(module, name), weight.clone().requires_grad_()
    for bad in (trained, trained * 1):
        with pytest.raises(
            ValueError, match=r"requires_grad_\(False\).*torch.nn.functional.linear"
        ):
            version(x, bad, *rest)
    with torch.no_grad():
        assert_close(version(x, trained, *rest), lora_linear_eager(x, weight, *rest))
    with torch.inference_mode():
        version(x, trained, *rest)


# --- LoRALinear ----------------------------------------------------------------------------------------------


def layer(module, dtype=torch.float32, rank=4, alpha=8, trained=True, **kwargs):
    """A LoRALinear, with a lora_b as training leaves it."""
    made = module.LoRALinear.from_features(
        40, 24, rank, alpha, device=machine.device(), dtype=dtype, **kwargs
    )
    if trained:
        torch.nn.init.normal_(made.lora_b, std=0.3)
    return made


def rows(dtype=torch.float32):
    return torch.randn(9, 40, dtype=dtype, device=machine.device())


def test_module_is_the_op_with_alpha_over_rank(module):
    x = rows()
    for rank, alpha, activation, bias in [(4, 8, "gelu", True), (3, 1.5, "relu", False)]:
        m = layer(module, rank=rank, alpha=alpha, activation=activation, bias=bias)
        base = m.base
        want = lora_linear_eager(
            x, base.weight, m.lora_a, m.lora_b, base.bias, alpha / rank, activation
        )
        assert_close(m(x), want)
        assert m.scale == alpha / rank


def test_alpha_is_divided_by_the_rank(module):
    """The fault: y = base(x) + alpha·B A x. Then doubling the rank doubles the update, and the learning rate
    that suited is twice too high; divided, two halves of rank r are one of rank 2r."""
    x, half = rows(), layer(module, rank=4, alpha=8)
    whole = module.LoRALinear(half.base, 8, 8)
    with torch.no_grad():
        whole.lora_a.copy_(half.lora_a.repeat(2, 1))
        whole.lora_b.copy_(half.lora_b.repeat(1, 2))
    assert_close(whole(x), half(x))
    faulty = half.base(x) + half.alpha * (x @ half.lora_a.T) @ half.lora_b.T
    assert not torch.allclose(half(x), faulty, atol=1e-2)


def test_parameters_are_registered_on_any_device(module):
    """The fault: nn.Parameter(...).to(device) is a plain tensor, unless it was on that device before."""
    faulty = torch.nn.Module()
    faulty.lora_a = torch.nn.Parameter(torch.empty(4, 40)).to("meta")
    assert not list(faulty.parameters()), "the fault is gone from torch?"
    for device in ("meta", machine.device()):
        m = module.LoRALinear(torch.nn.Linear(40, 24, device=device, dtype=torch.bfloat16), 4, 8)
        named = dict(m.named_parameters())
        assert set(named) == {"base.weight", "base.bias", "lora_a", "lora_b"}
        assert {n for n, p in named.items() if p.requires_grad} == {"lora_a", "lora_b"}
        for p in (m.lora_a, m.lora_b):
            assert isinstance(p, torch.nn.Parameter)
            assert (p.device.type, p.dtype) == (torch.device(device).type, torch.bfloat16)
        assert all(p.dtype == torch.float64 for p in m.double().parameters())


def test_the_base_is_frozen(module):
    """The fault: linear.requires_grad = False sets an attribute of the module, and freezes nothing."""
    faulty = torch.nn.Linear(40, 24)
    faulty.requires_grad = False
    assert faulty.weight.requires_grad, "the fault is gone from torch?"
    m = layer(module)
    assert not m.base.weight.requires_grad
    assert not m.base.bias.requires_grad
    before = copy.deepcopy(m.base.state_dict())
    optimizer = torch.optim.AdamW(m.parameters(), lr=0.1, weight_decay=0.1)
    m(rows()).square().sum().backward()
    optimizer.step()
    assert all(torch.equal(a, before[n]) for n, a in m.base.state_dict().items())
    m.base.requires_grad_(True)
    with pytest.raises(ValueError, match=r"requires_grad_\(False\)"):
        m(rows())


def test_training_begins_at_the_base_and_moves_away(module):
    x, m = rows(), layer(module, trained=False, activation="sigmoid")
    bound = 40**-0.5
    assert m.lora_a.abs().max() <= bound
    assert m.lora_a.std() > 0.3 * bound
    assert not m.lora_b.any()
    assert_close(m(x), torch.sigmoid(m.base(x)))
    target = torch.rand(9, 24, device=x.device)
    optimizer, losses = torch.optim.SGD(m.parameters(), lr=1.0), []
    for step in range(30):
        optimizer.zero_grad()
        loss = (m(x) - target).square().mean()
        loss.backward()
        losses.append(float(loss))
        if step == 0:
            assert not m.lora_a.grad.any(), "B is 0: A has no gradient yet"
            assert m.lora_b.grad.any()
        optimizer.step()
    assert losses[-1] < 0.9 * losses[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_merge_and_unmerge(module, dtype):
    m, x, eps = layer(module, dtype, activation="gelu").eval(), rows(dtype), torch.finfo(dtype).eps
    weight, pointer = m.base.weight.detach().clone(), m.base.weight.data_ptr()
    wide = torch.promote_types(dtype, torch.float32)
    want = (weight.double() + m.scale * m.lora_b.double() @ m.lora_a.double()).detach()
    before = m(x).detach()
    m.merge()
    assert m.merged
    assert m.base.weight.data_ptr() == pointer, "in place"
    merged = m.base.weight.detach().clone()
    assert (
        (merged.double() - want).abs() <= 0.51 * eps * want.abs() + 10 * torch.finfo(wide).eps
    ).all()
    m.merge()
    assert torch.equal(m.base.weight, merged), "merged twice"
    torch.testing.assert_close(m(x), before, rtol=64 * eps, atol=64 * eps)
    m.unmerge()
    assert not m.merged
    back = m.base.weight.detach().clone()
    bound = eps * (merged.abs() + weight.abs()).double() + 10 * torch.finfo(wide).eps
    assert ((back.double() - weight.double()).abs() <= bound).all()
    m.unmerge()
    assert torch.equal(m.base.weight, back), "unmerged twice"
    torch.testing.assert_close(m(x), before, rtol=64 * eps, atol=64 * eps)


def test_merging_a_small_update_into_bfloat16_loses_it(module):
    """What the docstring says of rounding: the update is there before, and gone after."""
    m = layer(module, torch.bfloat16, trained=False)
    with torch.no_grad():
        m.base.weight.fill_(1.0)
        m.lora_a.fill_(2.0**-6)
        m.lora_b.fill_(2.0**-6)
    before = m.base.weight.clone()
    m.merge()  # adds 2 · 4 · 2**-12 = 2**-9, half the last place of 1.0: to even, that is to 1.0
    assert torch.equal(m.base.weight, before)


def test_unmerge_takes_out_what_merge_put_in_whatever_happened_since(module):
    m = layer(module)
    weight = m.base.weight.detach().clone()
    m.merge()
    with torch.no_grad():
        m.lora_a.zero_()
        m.lora_b.normal_()
    clone = copy.deepcopy(m)
    for each in (m, clone):
        each.unmerge()
        assert_close(each.base.weight.detach(), weight)


def test_merged_weights_move_with_the_module(module):
    m = layer(module)
    weight = m.base.weight.detach().clone()
    m.merge()
    m.double().unmerge()
    torch.testing.assert_close(m.base.weight.detach(), weight.double(), rtol=1e-5, atol=1e-6)
    assert m(rows(torch.float64)).dtype == torch.float64


def test_merged_training_is_refused(module):
    m, x = layer(module), rows()
    want = m(x).detach()
    m.merge()
    with pytest.raises(RuntimeError, match=r"call unmerge\(\) to train, or eval\(\)"):
        m(x)
    with torch.no_grad():
        torch.testing.assert_close(m(x), want, rtol=1e-4, atol=1e-5)
    x.requires_grad_()
    m.eval()(x).sum().backward()
    assert x.grad is not None
    assert m.lora_a.grad is None
    m.unmerge()
    m.train()(x).sum().backward()
    assert m.lora_a.grad is not None


def test_a_weight_merged_between_forward_and_backward_is_noticed(module):
    m, x = layer(module), rows().requires_grad_()
    y = m(x)
    m.merge()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e30])
def test_a_merge_that_could_not_be_undone_is_refused(module, value):
    m = layer(module, torch.float16 if value == 1e30 else torch.float32)
    with torch.no_grad():
        m.lora_b[3, 1] = value
    before = m.base.weight.detach().clone()
    with pytest.raises(ValueError, match="could not be undone"):
        m.merge()
    assert not m.merged
    assert torch.equal(m.base.weight, before)


def test_state_dict_comes_back(module):
    m, other, x = (
        layer(module, alpha=2, activation="silu"),
        layer(module, alpha=2, activation="silu"),
        rows(),
    )
    state = copy.deepcopy(m.state_dict())
    assert set(state) == {"base.weight", "base.bias", "lora_a", "lora_b"}
    assert not torch.allclose(other(x), m(x))
    other.load_state_dict(state)
    assert torch.equal(other(x), m(x))
    assert not other.base.weight.requires_grad
    assert set(layer(module, bias=False).state_dict()) == {"base.weight", "lora_a", "lora_b"}


def test_state_dict_of_a_merged_module_is_refused(module):
    """Saved so, W + s B A would meet A and B again after loading, and the update count twice."""
    m, model = layer(module), torch.nn.Sequential(torch.nn.Identity())
    model.append(m)
    state = copy.deepcopy(model.state_dict())
    m.merge()
    with pytest.raises(RuntimeError, match=r"twice.*unmerge\(\) first"):
        model.state_dict()
    with pytest.raises(RuntimeError, match=r"unmerge\(\) before loading"):
        model.load_state_dict(state)
    assert set(m.base.state_dict()) == {"weight", "bias"}
    m.unmerge()
    model.load_state_dict(state)
    assert all(torch.equal(t, state[n]) for n, t in model.state_dict().items())


def test_module_says_what_it_is(module):
    text = repr(module.LoRALinear(torch.nn.Linear(40, 24), 4, 8, "gelu"))
    assert "rank=4, alpha=8, activation='gelu', merged=False" in text
    assert "in_features=40, out_features=24" in text


def test_module_compiles():
    torch.compiler.reset()
    m, x = layer(lora_linear, activation="gelu"), rows()
    compiled = torch.compile(m, fullgraph=True, backend="aot_eager")
    loss = compiled(x).square().sum()
    got = torch.autograd.grad(loss, (m.lora_a, m.lora_b))
    want = torch.autograd.grad(m(x).square().sum(), (m.lora_a, m.lora_b))
    for a, b in zip(got, want):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_module_under_autocast(module):
    m, x = layer(module, activation="gelu"), rows()
    with torch.autocast(machine.device().type, dtype=torch.bfloat16):
        y = m(x)
        assert y.dtype == torch.bfloat16
        y.float().square().sum().backward()
    assert m.lora_a.grad.dtype == m.lora_b.grad.dtype == torch.float32


def test_bad_arguments_of_the_module_are_refused_in_a_sentence(module):
    linear = torch.nn.Linear(40, 24)
    wrong = {
        "no linear": ((torch.nn.ReLU(), 4, 8), TypeError, "from_features"),
        "a weight": ((linear.weight, 4, 8), TypeError, "from_features"),
        "rank 0": ((linear, 0, 8), ValueError, "rank must be 1 to 256"),
        "a high rank": ((linear, 257, 8), ValueError, "rank must be 1 to 256"),
        "a fraction of a rank": ((linear, 4.0, 8), TypeError, "rank must be an int"),
        "True": ((linear, True, 8), TypeError, "rank must be an int"),
        "alpha in a tensor": ((linear, 4, torch.tensor(8.0)), TypeError, "alpha must be"),
        "an activation": ((linear, 4, 8, "tanh"), ValueError, "activation must be one of"),
    }
    for what, (bad, kind, message) in wrong.items():
        with pytest.raises(kind, match=f"LoRALinear: .*{message}") as caught:
            module.LoRALinear(*bad)
        assert len(str(caught.value)) > 40, what
    assert linear.weight.requires_grad, "refused, and frozen all the same"


# --- what others read of it ----------------------------------------------------------------------------------


def test_it_has_what_is_read_of_a_linear_layer():
    base = torch.nn.Linear(8, 6)
    layer = lora_linear.LoRALinear(base, 2, 4)
    assert (layer.in_features, layer.out_features) == (8, 6)
    assert layer.weight is base.weight
    assert layer.bias is base.bias
    assert set(layer.state_dict()) == {"base.weight", "base.bias", "lora_a", "lora_b"}


def test_lora_in_32_bits_beside_a_base_of_16():
    """A step too small for bfloat16 stays, and gradients come in float32; values are those of 16 bits."""
    device = machine.device()
    base = torch.nn.Linear(32, 16, device=device, dtype=torch.bfloat16)
    wide = lora_linear.LoRALinear(base, 4, 8, lora_dtype=torch.float32)
    narrow = lora_linear.LoRALinear(base, 4, 8)
    torch.nn.init.normal_(wide.lora_b)
    narrow.load_state_dict(wide.state_dict())
    x = torch.randn(5, 32, device=device, dtype=torch.bfloat16)
    assert torch.equal(wide(x), narrow(x))
    wide(x).sum().backward()
    narrow(x).sum().backward()
    for got, want in ((wide.lora_a, narrow.lora_a), (wide.lora_b, narrow.lora_b)):
        assert (got.dtype, got.grad.dtype) == (torch.float32, torch.float32)
        assert torch.equal(got.grad, want.grad.float())
    before = wide.lora_a.detach().clone()
    torch.optim.SGD([wide.lora_a], lr=1e-6).step()
    assert not torch.equal(wide.lora_a, before)
    assert torch.equal(narrow.lora_a.detach(), before.bfloat16())
