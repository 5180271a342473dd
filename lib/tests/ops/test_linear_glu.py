"""What is particular to linear_glu: both kernels, rounding, traffic, what is saved, machine code."""

import functools
import itertools
import math
import re
import sys
import tempfile
from pathlib import Path
from unittest import mock

from lib import machine
from lib.measure import launch_diff, registry
from lib.measure.check import check_against_float64
from lib.nogpu import gluon
from lib.nogpu.compile_only import compile_for, instruction_mix
from lib.nogpu.fake_gpu import fake_gpu
from lib.nogpu.memory import count_traffic
from lib.ops import linear_glu
from lib.ops.linear_glu import Plan, Tile, linear_glu_eager
from lib.standalone import standalone
from lib.tests.ops import battery, cases

import pytest
import torch
import torch.nn.functional as F
import triton
from triton.errors import TritonError

OP = registry.find("linear_glu")
PLANS = {label: plan for label, (plan, _) in OP.plans.items()}
POINTERS, SHORT, LONG = PLANS.values()
both_kernels = pytest.mark.parametrize("plan", [POINTERS, SHORT, LONG])


def tensors(shape=(17, 24, 40), dtype=torch.float32):
    """x, weight, bias for M, K, H: leaves that require grad."""
    return OP.inputs(shape, dtype, machine.device())


def detached(*args):
    return [t.detach() for t in tensors(*args)]


def of_each_kind(module):
    """The op with h saved and computed again, as functions and as the compiler's node."""

    def saving(x, weight, bias):
        return module.linear_glu_op(x, weight, bias, save_h=True)[0]

    def not_saving(x, weight, bias):
        return module.linear_glu_op(x, weight, bias)[0]

    def recomputing(x, weight, bias):
        return module.linear_glu_triton(x, weight, bias, recompute=True)

    return {
        "saved": module.linear_glu_triton,
        "recomputed": recomputing,
        "op, saved": saving,
        "op, recomputed": not_saving,
    }


GEGLU = ("gelu_tanh", "second")
GATINGS = list(itertools.product(linear_glu._ACTIVATIONS, ("second", "first")))
gatings = pytest.mark.parametrize(("activation", "gate"), GATINGS)


def for_a_gpu(module):
    """The op file, or a mutant of it, as a GPU gets it, in a process that otherwise interprets kernels."""
    path = Path(module.__file__)
    text = standalone("linear_glu") if module is linear_glu else path.read_text()
    with tempfile.TemporaryDirectory() as folder:
        return launch_diff._load(text, Path(folder, f"{path.stem}_for_a_gpu.py"))


@pytest.fixture(scope="module")
def h200():
    return for_a_gpu(linear_glu)


def by_argument(traffic):
    return {name.rpartition(".")[2]: a for name, a in traffic.by_argument.items()}


# --- values --------------------------------------------------------------------------------------------------


def test_the_definition_is_a_layer_whose_second_half_is_the_gate(module):
    x, weight, bias = (t.double() for t in detached())
    value, gate = (F.linear(x, w, b) for w, b in zip(weight.split(40), bias.split(40)))
    u = math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)
    want = value * 0.5 * gate * (1 + torch.tanh(u))
    torch.testing.assert_close(module.linear_glu_eager(x, weight, bias), want)
    torch.testing.assert_close(module.linear_glu_triton(x, weight, bias), want)


@gatings
def test_the_definition_of_every_gate(module, activation, gate):
    """GEGLU, SwiGLU, ReGLU and GLU, written out; the old name is the op with gelu_tanh of the second half."""
    x, weight, bias = (t.double() for t in detached())
    first, second = (F.linear(x, w, b) for w, b in zip(weight.split(40), bias.split(40)))
    value, z = (second, first) if gate == "first" else (first, second)
    act = {
        "gelu": 0.5 * z * (1 + torch.erf(z / 2**0.5)),
        "gelu_tanh": 0.5 * z * (1 + torch.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3))),
        "silu": z / (1 + torch.exp(-z)),
        "relu": z.clamp(min=0),
        "sigmoid": 1 / (1 + torch.exp(-z)),
    }
    for f in (module.linear_glu_eager, module.linear_glu_triton):
        torch.testing.assert_close(f(x, weight, bias, activation, gate), value * act[activation])
    old = module.linear_geglu_eager(x, weight, bias), module.linear_geglu_triton(x, weight, bias)
    for y in old:
        torch.testing.assert_close(y, linear_glu_eager(x, weight, bias))


@gatings
@pytest.mark.parametrize("label", [None, *OP.plans])
def test_every_gate_of_every_way(module, activation, gate, label):
    """Forward and backward, h saved or made again; and what a gate of another kind would not show: tails."""
    plan, shapes = OP.plans[label] if label else (None, [(33, 40, 21)])
    how = {"activation": activation, "gate": gate}
    eager = functools.partial(linear_glu_eager, **how)
    for recompute in (False, True):
        version = functools.partial(module.linear_glu_triton, recompute=recompute, plan=plan, **how)
        inputs = OP.checked_inputs(shapes[0], torch.bfloat16, machine.device())
        check_against_float64(version, eager, *inputs, name=f"{how}, {label}")
    z = torch.linspace(-60, 60, 241, device=machine.device())[:, None]
    x = torch.cat([z, torch.ones_like(z)], dim=1).requires_grad_()
    swap = torch.eye(2, device=x.device)[[1, 0] if gate == "second" else [0, 1]]
    check_against_float64(functools.partial(version, plan=None), eager, x, swap, name="tails")


@pytest.mark.parametrize("backend", ["aot_eager"])
def test_compiled_with_a_gate(module, backend):
    torch.compiler.reset()
    sys.modules.setdefault(module.__name__, module)  # where the compiler looks for it
    how = {"activation": "silu", "gate": "first"}
    call = functools.partial(module.linear_glu_triton, **how)
    compiled = torch.compile(call, fullgraph=True, backend=backend)
    eager = functools.partial(linear_glu_eager, **how)
    check_against_float64(compiled, eager, *tensors(), name="compiled")


@both_kernels
def test_y_rounds_once(module, plan):
    """Stricter than twice eager's error: eager rounds h and gelu(x2) on the way."""
    for dtype in (torch.bfloat16, torch.float16):
        inputs = detached((130, 24, 72), dtype)
        want = linear_glu_eager(*(t.double() for t in inputs))
        error = (module.linear_glu_triton(*inputs, plan=plan).double() - want).abs()
        assert (error <= 0.51 * torch.finfo(dtype).eps * want.abs() + 1e-5).all()


def test_gelu_and_its_gradient_in_the_tails(module):
    """Where gelu' is nearly 1 or nearly 0: two products of one number each, so that no sum hides an error."""
    gate = torch.linspace(-12, 12, 961, device=machine.device())[:, None]
    results = []
    for run, dtype in (
        (module.linear_glu_triton, torch.float32),
        (linear_glu_eager, torch.float64),
    ):
        x = torch.cat([torch.ones_like(gate), gate], dim=1).to(dtype).requires_grad_()
        y = run(x, torch.eye(2, dtype=dtype, device=x.device))  # x1 = 1, x2 = gate
        results.append((y.detach(), *torch.autograd.grad(y.sum(), x)))
    for got, want in zip(*results):
        assert ((got - want).abs() <= 8e-7 * want.abs().clamp(min=1)).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_numbers_too_large_and_none_at_all(module, dtype):
    """One row each; K = 1, as an infinity among other products is a NaN in any sum. And a NaN in W."""
    inf = float("inf")
    x = torch.tensor([0.0, 1e4, -1e4, inf, -inf, float("nan"), 90.0, -90.0, -0.0])
    x = x[:, None].to(machine.device(), dtype).requires_grad_()
    for gate in (1.0, -1.0, float("nan")):
        weight = torch.tensor([[0.5], [gate]], dtype=dtype, device=x.device).requires_grad_()
        for recompute in (False, True):
            check_against_float64(
                lambda x, w, r=recompute: module.linear_glu_triton(x, w, recompute=r),
                linear_glu_eager, x, weight, name=f"gate {gate}",
            )  # fmt: skip


def test_many_rows_are_summed_by_many_programs(module):
    """So many that each takes many tiles; x1 = 1 and x2 = 8: all of dh is known, and its sums are exact."""
    n_rows = 2**10 + 5
    dy = torch.ones(n_rows, 1, device=machine.device())
    h = torch.tensor([[1.0, 8.0]], device=dy.device).repeat(n_rows, 1)
    dh, db = module._dh_of(dy, h, *GEGLU, True, POINTERS)
    assert (dh == torch.tensor([8.0, 1.0], device=dy.device)).all()
    assert db.tolist() == [8 * n_rows, n_rows]


# --- the kernel for Hopper -----------------------------------------------------------------------------------


@both_kernels
def test_the_halves_do_not_run_into_each_other(module, plan):
    """H = 136 is no multiple of a tile: behind row 135 of W, in one piece with it, come rows of the gate."""
    for bad in (0, 1):
        x, weight, bias = detached((140, 64, 136), torch.float16)
        weight.view(2, 136, 64)[bad] = bias.view(2, 136)[bad] = float("nan")
        _, h = module._forward(x, weight, bias, GEGLU, False, save_h=True, plan=plan)
        nan = h.view(140, 2, 136).isnan()
        assert nan[:, bad].all() and not nan[:, 1 - bad].any()
        h = h.view(140, 2, 136)[:, 1 - bad]
        want = F.linear(x, weight.view(2, 136, 64)[1 - bad], bias.view(2, 136)[1 - bad])
        battery.assert_close(h, want, torch.float16)


def test_tma_takes_what_it_can_read(module):
    """Slices whose rows begin on 16-byte boundaries; nothing else, no float32, and no K = 0."""
    x, weight, bias = detached((150, 64, 72), torch.bfloat16)
    wide_x, wide_w = torch.cat([x, x], dim=1), torch.cat([weight, weight], dim=1)
    ys = []

    def taken(*inputs):
        traffic = count_traffic(lambda: ys.append(module.linear_glu_triton(*inputs, plan=SHORT)))
        battery.assert_close(ys[-1], linear_glu_eager(*inputs), inputs[0].dtype)
        return "x_desc" in by_argument(traffic)

    assert taken(x, weight, bias)
    assert taken(x, weight)
    assert taken(wide_x[:, :64], wide_w[:, 8:72], bias)
    assert taken(wide_x[:, :33], wide_w[:, :33], bias)
    assert not taken(wide_x[:, 1:65], weight, bias), "from the middle of 16 bytes"
    assert not taken(x[:, :33].contiguous(), wide_w[:, :33], bias), "rows of 66 bytes"
    assert not taken(x, weight.t().contiguous().t(), bias), "columns side by side"
    assert not taken(x[:1].expand(150, 64), weight, bias), "rows that are one in memory"
    assert not taken(x, weight[:1].expand(144, 64), bias)
    assert not taken(x[:, ::2], weight[:, :32], bias)
    assert not taken(x[:, :0], weight[:, :0], bias), "K = 0"
    assert not taken(x.float(), weight.float(), bias.float())


def test_few_rows_get_low_tiles_and_many_get_wide_ones(h200):
    with fake_gpu():
        device = torch.device("cuda", 0)
        for dtype, kind in ((torch.bfloat16, "half"), (torch.float32, "tf32x3")):
            for n_rows, n_hidden, which in [
                (16384, 4096, 0),
                (256, 2048 if kind == "half" else 1024, 1),
                (33, 11008, 1),
                (1, 11008, 2),
                (128, 64, 2),
            ]:
                shape = (n_rows, n_hidden, 1024, dtype, False, device)
                tile = h200._TILES[kind][which]
                assert h200._plan(*shape, False).tile == tile, (kind, n_rows, n_hidden)
                way = "tma" if which == 0 and kind == "half" else "pointers"
                assert h200._plan(*shape, kind == "half").way == way
        tf32 = h200._plan(16384, 4096, 1024, torch.float32, True, device, False)
        assert tf32.tile == h200._TILES["tf32"][0]


# --- gradients -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize(("n_rows", "of_sums"), [(100, 1), (17, 0)], ids=["strips", "one strip"])
def test_a_gradient_that_nobody_needs_costs_no_launch(recompute, n_rows, of_sums):
    """Sums over strips for db alone, where there are several; products where their results are needed."""
    for needs in [(1, 1, 1), (1, 1, 0), (0, 1, 0), (0, 0, 1)]:
        launches, inputs = 1 + of_sums * needs[2], tensors((n_rows, 24, 40))
        some = [t.detach().requires_grad_(bool(need)) for t, need in zip(inputs, needs)]
        y = linear_glu.linear_glu_triton(*some, recompute=recompute)
        assert count_traffic(lambda y=y: y.sum().backward()).launches == launches, needs
        assert [t.grad is not None for t in some] == [bool(need) for need in needs]


@pytest.mark.parametrize(
    ("n_rows", "several"), [(17, False), (100, True)], ids=["one strip", "strips"]
)
def test_sums_over_rows_are_rounded_once(module, n_rows, several):
    given = tensors((n_rows, 24, 40), torch.bfloat16)
    call = module.linear_glu_triton
    battery.check_strips(module, lambda: call(*given).sum().backward(), several)


def test_no_gradient_for_y():
    """Something behind y may say that there is none."""

    class Nothing(torch.autograd.Function):
        @staticmethod
        def forward(ctx, y):
            return y.clone()

        @staticmethod
        def backward(ctx, dy):
            return None

    for version in of_each_kind(linear_glu).values():
        inputs = tensors()
        Nothing.apply(version(*inputs)).sum().backward()
        assert all(t.grad is None or not t.grad.any() for t in inputs)


@pytest.mark.parametrize("kind", ["saved", "recomputed", "op, saved", "op, recomputed"])
def test_a_second_derivative_raises_of_each_kind(module, kind):
    inputs = tensors()
    y = of_each_kind(module)[kind](*inputs)
    dy = torch.randn_like(y).requires_grad_()
    (dx,) = torch.autograd.grad(y, inputs[:1], dy, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        (dx * inputs[0]).sum().backward()  # without the error: the part that goes through x


@pytest.mark.parametrize("kind", ["saved", "recomputed", "op, saved", "op, recomputed"])
def test_a_backward_pass_under_autocast_keeps_the_dtype(module, kind):
    inputs = tensors()
    want = torch.autograd.grad(linear_glu_eager(*inputs).sum(), inputs)
    y = of_each_kind(module)[kind](*inputs)
    with torch.autocast(machine.device().type, dtype=torch.bfloat16):
        got = torch.autograd.grad(y.sum(), inputs)
    battery.assert_close(got, want)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_autocast_takes_what_a_linear_layer_takes(module, dtype):
    """One dtype from any mix of three, and float64 as it is."""
    x, weight, bias = tensors()
    with torch.autocast(machine.device().type, dtype=dtype):
        y = module.linear_glu_triton(x.to(dtype), weight, bias)
        assert y.dtype == dtype == linear_glu_eager(x.to(dtype), weight, bias).dtype
        wide = module.linear_glu_triton(*(t.double() for t in (x, weight, bias)))
        assert wide.dtype == torch.float64
    gradients = torch.autograd.grad(y.float().square().sum(), (x, weight, bias))
    want = linear_glu_eager(x, weight, bias)
    torch.testing.assert_close(y.float(), want, rtol=0.05, atol=0.05)
    for a, b in zip(gradients, torch.autograd.grad(want.square().sum(), (x, weight, bias))):
        assert a.dtype == torch.float32
        torch.testing.assert_close(a, b, rtol=0.05, atol=0.05 * float(b.abs().max()))


def test_compiled_under_autocast_and_without_a_gradient():
    torch.compiler.reset()
    compiled = torch.compile(linear_glu.linear_glu_triton, fullgraph=True, backend="aot_eager")
    inputs = tensors()
    with torch.autocast(machine.device().type, dtype=torch.bfloat16):
        assert compiled(*inputs).dtype == torch.bfloat16
    with torch.no_grad():
        traffic = count_traffic(lambda: compiled(*inputs))
    assert "h_ptr" not in by_argument(traffic), "h is written though nothing needs it"


# --- traffic, and what is saved ------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("no_grad", [False, True])
def test_h_reaches_memory_only_where_it_is_saved(module, dtype, recompute, no_grad):
    inputs = tensors((64, 32, 64), dtype)
    y_bytes = 64 * 64 * dtype.itemsize
    with torch.set_grad_enabled(not no_grad):
        traffic = count_traffic(lambda: module.linear_glu_triton(*inputs, recompute=recompute))
    h_bytes = 0 if recompute or no_grad else 2 * y_bytes
    assert traffic.launches == 1
    assert traffic.bytes_moved == sum(t.nbytes for t in inputs) + y_bytes + h_bytes
    assert by_argument(traffic)["y_ptr"].stored == y_bytes


def test_the_backward_pass_reads_dy_and_h_once_and_writes_dh_once(module):
    inputs = tensors((256, 64, 128))
    y = module.linear_glu_triton(*inputs)
    traffic = count_traffic(lambda: torch.autograd.grad(y, inputs, torch.ones_like(y)))
    by = by_argument(traffic)
    assert traffic.launches == 2
    assert by["dy_ptr"].loaded == y.nbytes
    assert by["h_ptr"].loaded == by["dh_ptr"].stored == 2 * y.nbytes
    assert by["partial_ptr"].stored <= y.nbytes / 4


def test_tma_moves_the_same_bytes():
    inputs = detached((256, 64, 264), torch.bfloat16)
    traffic = count_traffic(lambda: linear_glu.linear_glu_triton(*inputs, plan=SHORT))
    assert traffic.launches == 1
    assert traffic.bytes_moved == sum(t.nbytes for t in inputs) + 256 * 264 * 2
    w_desc = by_argument(traffic)["w_desc"]
    assert w_desc.loaded == 2 * inputs[1].nbytes, "once for each row of tiles"


def saved(version, *inputs):
    """The tensors that autograd keeps."""
    tensors = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: tensors.append(t) or t, lambda t: t):
        version(*inputs)
    return tensors


@pytest.mark.parametrize("kind", ["saved", "recomputed", "op, saved", "op, recomputed"])
def test_what_is_saved_for_the_backward_pass(module, kind):
    """x for dW, W for dx, and h; or x, W and b alone. The op: all of them, as ways to a second derivative."""
    version = of_each_kind(module)[kind]
    for needs in ((1, 1, 1), (1, 0, 0), (0, 1, 0), (0, 0, 1)):
        some = [t.detach().requires_grad_(bool(need)) for t, need in zip(tensors(), needs)]
        got = saved(version, *some)
        if "recomputed" in kind:
            assert {t.data_ptr() for t in got} == {t.data_ptr() for t in some}, needs
        else:
            want = [(17, 24)] * needs[1] + [(80, 24)] * needs[0]
            want = [t.shape for t in some] if kind == "op, saved" else want
            want = [*want, (17, 80)]
            assert sorted(tuple(t.shape) for t in got) == sorted(want), needs


@pytest.mark.parametrize("save_h", [False, True])
def test_the_registered_op_gives_h_without_a_gradient(module, save_h):
    x, weight, bias = inputs = tensors()
    torch.library.opcheck(module.linear_glu_op, (*inputs, "silu", "first", save_h, False))
    y, h = module.linear_glu_op(*inputs, save_h=save_h)
    assert y.requires_grad and not h.requires_grad
    want = F.linear(x, weight, bias).detach() if save_h else h.new_empty(0)
    battery.assert_close(h, want)


@pytest.mark.parametrize("arguments", [{}, {"save_h": True}], ids=str)
def test_the_registered_op_without_a_bias(module, arguments):
    """torch leaves out of its context the arguments at their defaults."""
    x, weight, _ = tensors()
    y = module.linear_glu_op(x, weight, **arguments)[0]
    want = linear_glu_eager(x, weight)
    dy = torch.randn_like(want)
    grads = (torch.autograd.grad(out, (x, weight), dy) for out in (y, want))
    battery.assert_close(*grads)
    battery.assert_close(y.detach(), want.detach())


@pytest.mark.parametrize("has_db", [False, True])
def test_the_registered_backward_op(has_db):
    dy, h = (torch.randn(2, 3, n, device=machine.device()) for n in (6, 12))
    torch.library.opcheck(linear_glu._linear_glu_backward_op, (dy, h, *GEGLU, has_db))


def test_tensors_changed_before_the_backward_pass_are_noticed():
    for recompute, k in itertools.product((False, True), (0, 1)):
        inputs = [t * 1 for t in tensors()]
        y = linear_glu.linear_glu_triton(*inputs, recompute=recompute)
        inputs[k].mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


# --- sizes past what 32 bits hold -----------------------------------------------------------------------------


@pytest.mark.parametrize(("which", "dim"), [(0, 0), (0, 1), (1, 0), (1, 1)])
@pytest.mark.parametrize("n_in", [16, 66], ids=["one step", "two steps"])
def test_offsets_past_two_to_the_31(module, which, dim, n_in):
    """x and W by rows and by columns; K = 66 is two steps of 64 or more, from one to the other past 2**31."""
    inputs = detached((3, n_in, 2), torch.float16)
    want = linear_glu_eager(*inputs)
    t = inputs[which]
    step = max(-(-(2**31) // (t.shape[dim] - 1)), 2**25 + 1)
    far = torch.empty(t.shape[dim] * step, dtype=t.dtype, device=t.device)
    inputs[which] = far.as_strided(t.shape, [step, 1] if dim == 0 else [1, step]).copy_(t)
    plan = Plan("pointers", Tile(16, 16, 64, 4, 3), 2)
    battery.assert_close(module.linear_glu_triton(*inputs, plan=plan), want, torch.float16)


def test_columns_of_the_gradient_past_two_to_the_31(module):
    inputs = tensors((16, 8, 3), torch.float16)
    dy = torch.randn(16, 3, device=machine.device()).half()
    want = torch.autograd.grad(linear_glu_eager(*inputs), inputs, dy)
    far = cases.spaced(dy.t()).t()
    assert far.stride(1) == 2**30
    got = torch.autograd.grad(module.linear_glu_triton(*inputs), inputs, far)
    battery.assert_close(got, want, torch.float16)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(2**17 + 1, 64, 2**14), (2**29 + 3, 1, 4)], ids=str)
def test_more_than_two_to_the_31_elements(shape):
    if torch.cuda.mem_get_info()[0] < 60e9:
        pytest.skip("needs 60 GB of GPU memory")
    x, weight, bias = tensors(shape, torch.bfloat16)
    y = linear_glu.linear_glu_triton(x, weight, bias)
    (dx,) = torch.autograd.grad(y, [x], y.detach())
    for rows in (slice(0, 2), slice(-2, None)):
        part = x.detach()[rows].requires_grad_()
        want = linear_glu_eager(part, weight.detach(), bias.detach())
        gradient = torch.autograd.grad(want, part, y.detach()[rows])[0]
        battery.assert_close([y[rows], dx[rows]], [want, gradient], torch.bfloat16)


# --- bad input -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["linear_glu_triton", "linear_glu_op"])
def test_a_weight_that_is_none_is_refused_in_a_sentence(module, name):
    x, weight, bias = detached()
    for bad, message in [
        ((x[:, :5], weight, bias), r"weight\.t\(\)"),
        ((x, weight.t(), bias), r"weight\.t\(\)"),
        ((x[0, 0], weight, bias), r"\(\.\.\., K\)"),
        ((x, weight[0], bias), r"weight must be \(2H, K\)"),
        ((x, weight[None], bias), r"weight must be \(2H, K\)"),
        ((x, weight[1:], bias[1:]), r"an even number of rows.*\(79, 24\)"),
        ((x[:0], weight[:1].expand(2**24 + 2, 24), None), r"at most 2\*\*24"),
        ((x, weight, bias[:40]), r"bias must be \(2H\) with .*2H = 80, got shape \(40,\)"),
        ((x, weight, bias[None]), r"bias must be \(2H\)"),
        ((x, weight, bias, "tanh"), "activation must be one of gelu, gelu_tanh, silu, relu, sig"),
        ((x, weight, bias, ""), "activation must be one of"),
        ((x, weight, bias, "silu", ""), "gate must be 'first' or 'second'"),
    ]:
        with pytest.raises(ValueError, match=f"{name}: .*{message}"):
            getattr(module, name)(*bad)


# --- in Gluon ------------------------------------------------------------------------------------------------

LITTLE = Plan("gluon", Tile(16, 64, 16, 4, 4), 2, n_programs=10)


def gluon_of(module):
    """What holds the kernel in Gluon: a file beside the op's, or the op itself where it is a copy."""
    return getattr(module, "gluon_kernel", module)


def by_gluon(module, m, k, h, bias=True, dtype=torch.bfloat16, gating=GEGLU, plan=LITTLE, seed=0):
    """y by the kernel in Gluon, its roles as threads; the same by eager in float64; and the launches."""
    torch.manual_seed(seed)
    x, weight = torch.randn(m, k).to(dtype), (torch.randn(2 * h, k) / k**0.5).to(dtype)
    bias = torch.randn(2 * h).to(dtype) if bias else None
    y, launches = torch.full((m, h), float("nan"), dtype=dtype), []

    def run(kernel, grid, tensors, *sizes, num_warps, **constants):
        launches.append((grid, sizes, constants))
        gluon.run(kernel, grid, *tensors, *sizes, seed=seed, **constants)

    how = module._constexprs(*gating)
    with mock.patch.object(battery.host_of(module), "run", run):
        halves = module._as_halves(weight)
        gluon_of(module).launch_gluon(plan, x, halves, bias, y, **how)
    wide = [None if t is None else t.double() for t in (x, weight, bias)]
    return y, linear_glu_eager(*wide, *gating), launches


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("m", "k", "h"), [(16, 64, 64), (36, 136, 200), (100, 72, 104), (16, 80, 640)], ids=str
)
def test_roles_hand_over_what_they_have(module, m, k, h, seed):
    """One tile; a last wave cut up, with rows and columns that are not there; two waves; one without a rest."""
    y, want, _ = by_gluon(module, m, k, h, seed=seed)
    error = (y.double() - want).abs()
    assert (error <= 0.01 * want.abs() + 1e-4).all()


@pytest.mark.parametrize("gating", [GEGLU, ("silu", "first")], ids=str)
@pytest.mark.parametrize("bias", [True, False])
def test_gluon_takes_every_gate(module, gating, bias):
    y, want, _ = by_gluon(module, 36, 136, 200, bias, torch.float16, gating)
    torch.testing.assert_close(y.double(), want, rtol=2e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("rows", "programs", "whole", "cut"),
    [(16 * 10, 10, 40, 0), (16 * 3, 10, 10, 2), (16 * 3, 9, 12, 0), (16, 10, 4, 0)],
    ids=["no rest", "a rest that fits", "a rest too large", "one wave"],
)
def test_the_last_wave_is_cut_up_where_all_of_it_fits(module, rows, programs, whole, cut):
    plan = LITTLE._replace(n_programs=programs)
    y, want, [(grid, sizes, constants)] = by_gluon(module, rows, 64, 256, plan=plan)
    assert sizes[3] == whole and rows // 16 * 4 - whole == cut
    assert grid == (min(programs, rows // 16 * 4),) and constants["LAG"] < constants["STAGES"]
    torch.testing.assert_close(y.double(), want, rtol=0.01, atol=1e-4)


@pytest.mark.parametrize(
    ("shape", "how", "way"),
    [
        ((16384, 1024, 4096), {}, "gluon"), ((16384, 2048, 4096), {}, "gluon"),
        ((16384, 4096, 4096), {}, "gluon"), ((16384, 1024, 4097), {}, "tma"),
        ((16384, 192, 4096), {}, "tma"), ((16384, 200, 4096), {}, "gluon"),
        ((16384, 1020, 4096), {}, "pointers"), ((64, 1024, 4096), {}, "pointers"),
        ((16384, 1024, 4096), {"dtype": torch.float32}, "pointers"),
        ((16384, 1024, 4096), {"needs_grad": True}, "tma"),
        ((16384, 1024, 4096), {"needs_grad": True, "recompute": True}, "gluon"),
    ],
    ids=str,
)  # fmt: skip
def test_gluon_where_it_can_and_gains(h200, shape, how, way):
    kernel = {"pointers": "fwd", "tma": "tma", "gluon": "gluon"}[way]
    how = {"dtype": torch.bfloat16, "needs_grad": False} | how
    launched(h200, f"_linear_glu_{kernel}_kernel", shape, **how)


@pytest.mark.parametrize("asked", [None, LITTLE], ids=["chosen", "asked for"])
def test_gluon_writes_only_what_it_can(module, asked):
    """Not h; nor rows of y off 16-byte boundaries; not with a K shorter than the lag; and only on Hopper."""

    def way(h=False, n_hidden=4096, n_in=1024, generation=9, error=None):
        x, weight, y, h = (
            torch.empty(size, dtype=torch.bfloat16) if size else None
            for size in ((2048, n_in), (2 * n_hidden, n_in), (2048, n_hidden), h and (2048, 2 * n_hidden))
        )  # fmt: skip
        with (
            mock.patch.multiple(
                battery.host_of(module), ON_CPU=False, generation=lambda _: generation,
                n_multiprocessors=lambda _: 132, run=mock.DEFAULT,
            ) as shared,
            mock.patch.multiple(gluon_of(module), launch_gluon=mock.DEFAULT) as in_gluon,
            mock.patch.multiple(module, _launch_tma=mock.DEFAULT) as by_tma,
        ):  # fmt: skip
            module._plan.cache_clear()
            in_gluon["launch_gluon"].configure_mock(side_effect=error, __name__="launch_gluon")
            module._launch(asked, x, weight, None, y, h, GEGLU, False)
            module._plan.cache_clear()
        called = shared | in_gluon | by_tma
        return "".join(name for name, f in called.items() if f.called)

    assert way() == "launch_gluon"
    assert way(h=True) == way(n_hidden=4100) == way(n_in=192) == "_launch_tma"
    assert way(generation=10) == "_launch_tma" and way(generation=8) == "run"
    assert way(n_in=4096) == "launch_gluon"
    with pytest.warns(
        UserWarning, match="does not compile .*launch_gluon; a slower kernel in Triton"
    ):
        assert way(error=TritonError("no such word")) == "launch_gluon_launch_tma"


GLUON = Plan("gluon", linear_glu._GLUON_TILE, 16, n_programs=132)


def hopper_only():
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("wgmma is Hopper's")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("gating", [GEGLU, ("gelu", "first"), ("silu", "first")], ids=str)
@pytest.mark.parametrize("bias", [True, False])
def test_gluon_on_a_gpu(dtype, gating, bias):
    """A tile, most of which is not there; several waves, the last one cut up or not; and as chosen."""
    hopper_only()
    how = {"activation": gating[0], "gate": gating[1]}
    eager = functools.partial(linear_glu_eager, **how)
    for shape, n_programs in (
        ((33, 200, 72), 132), ((1000, 520, 1016), 20), ((1000, 520, 1016), 5), ((2049, 776, 3080), None)
    ):  # fmt: skip
        plan = n_programs and GLUON._replace(n_programs=n_programs)
        version = functools.partial(linear_glu.linear_glu_triton, recompute=True, plan=plan, **how)
        inputs = tensors(shape, dtype)[: 2 + bias]
        check_against_float64(version, eager, *inputs, name=f"{how} {shape}")


@pytest.mark.gpu
def test_gluon_keeps_nan_and_infinity_where_they_are():
    hopper_only()
    x, weight, bias = detached((1000, 520, 1016), torch.bfloat16)
    for bad in (float("nan"), float("inf"), -float("inf")):
        x[777, 519], x[3, 0] = bad, bad
        want = linear_glu_eager(x, weight, bias)
        y = linear_glu.linear_glu_triton(x, weight, bias, plan=GLUON._replace(n_programs=20))
        assert (y.isnan() == want.isnan()).all() and (y.isinf() == want.isinf()).all()


@pytest.mark.gpu
def test_gluon_gives_the_same_bits_in_every_run():
    """A race between the roles would show as a difference, in one run of many."""
    hopper_only()
    for shape in ((8192, 768, 3072), (16384, 1024, 4096), (1000, 520, 1016)):
        inputs = detached(shape, torch.bfloat16)
        first = linear_glu.linear_glu_triton(*inputs, plan=GLUON)
        for _ in range(100):
            assert torch.equal(linear_glu.linear_glu_triton(*inputs, plan=GLUON), first)


@pytest.mark.parametrize(
    ("activation", "bias"), [("gelu_tanh", True), ("gelu_tanh", False), ("gelu", True)]
)
def test_gluon_multiplies_without_waiting_and_without_spills(h200, activation, bias):
    how = {"bias": bias, "needs_grad": False, "activation": activation}
    launch = launched(h200, "_linear_glu_gluon_kernel", (16384, 1024, 4096), torch.bfloat16, **how)
    code = compiled(launch)
    assert code.spills == 0 and code.registers <= 168 and code.shared_bytes <= 227 * 1024
    mix = instruction_mix(code)
    # two consumers, four instructions a step, for whole tiles and for parts of them
    assert mix["HGMMA.64x256x16.F32.BF16"] == mix["HGMMA.64x64x16.F32.BF16"] == 8
    # where ptxas cannot keep two steps in flight, it waits for each
    assert code.sass.count("WARPGROUP.DEPBAR.LE gsb0, 0x1") == 4
    assert {"240", "24"} <= set(re.findall(r"setmaxnreg\S+\s+(\d+)", code.ptx))


# --- machine code --------------------------------------------------------------------------------------------


def launched(h200, kernel, shape, dtype, bias=True, needs_grad=True, **how):
    """The launch of a kernel in a call and its backward pass, as an H200 would be given it."""

    def call():
        empty = {"dtype": dtype, "device": "cuda"}
        sizes = [(shape[0], shape[1]), (2 * shape[2], shape[1])] + [(2 * shape[2],)] * bias
        inputs = [torch.empty(size, **empty, requires_grad=needs_grad) for size in sizes]
        y = h200.linear_glu_triton(*inputs, **how)
        if needs_grad:
            torch.autograd.grad([y], inputs, [torch.empty_like(y)])

    with fake_gpu(), launch_diff._addresses():
        launches = [n for n in launch_diff.launches_of(call) if n.kernel.__name__ == kernel]
    (launch,) = launches
    return launch


def compiled(launch, arch=90, **constexprs):
    how = {"num_warps": launch.num_warps, "num_stages": launch.num_stages}
    return compile_for(launch.kernel, launch.made_of, constexprs, arch=arch, **how)


def _moves(mix):
    return {op: n for op, n in mix.items() if op.startswith(("LDG.", "STG.", "LDGSTS", "UTMA"))}


@pytest.mark.parametrize(
    ("save_h", "bias"), [(False, True), (True, True), (False, False)], ids=["y", "h", "no bias"]
)
@pytest.mark.parametrize(("length", "n_in"), [("short", 1024), ("long", 4096)])
def test_hopper_gets_tensor_cores_and_tma_without_spills(h200, save_h, bias, length, n_in):
    shape = (16384, n_in, 4096)
    kernel = "_linear_glu_tma_kernel"
    tile = linear_glu._TMA_TILES[length]
    plan = Plan("tma", tile, 16, 264, tma_store=length == "long")  # past the one in Gluon
    launch = launched(h200, kernel, shape, torch.bfloat16, bias, needs_grad=save_h, plan=plan)
    code = compiled(launch)
    mix = instruction_mix(code)
    # one product for both halves, twice as wide: half as many reads of x as two would need
    each = tile.m // 64 // (tile.num_warps // 4)
    assert mix[f"HGMMA.64x{2 * tile.n}x16.F32.BF16"] == tile.k // 16 * each
    assert not [op for op in mix if op.startswith(("HMMA", "LDGSTS"))]
    assert {"UTMALDG.2D", "UTMALDG.3D"} <= set(_moves(mix))
    stores = {op for op in _moves(mix) if op.startswith("STG")}
    by_tma = length == "long"
    assert stores == ({"STG.E.128"} if save_h or not by_tma else set())
    assert ("UTMASTG.2D" in mix) == by_tma
    assert any(op.startswith("LDG") for op in mix) == bias
    # with h kept, half of an SM's registers are too few for Triton 3.9
    assert code.spills <= (10 if save_h and not by_tma and cases.release(triton) >= (3, 9) else 0)
    # two programs of a short K share an SM
    assert code.shared_bytes <= (227 if by_tma else 113) * 1024
    assert by_tma or code.registers * 32 * tile.num_warps <= 2**15
    # one exponential and one reciprocal for each element of y, and two more for whole numbers
    per_thread = tile.m * tile.n // (32 * tile.num_warps)
    assert mix["MUFU.EX2"] == per_thread
    assert per_thread <= mix["MUFU.RCP"] <= per_thread + 4


def forward_compiled(h200, kind, which, dtype, arch, **constexprs):
    plan = h200.Plan("pointers", h200._TILES[kind][which], 16)
    how = {"plan": plan, "allow_tf32": kind == "tf32"}
    launch = launched(h200, "_linear_glu_fwd_kernel", (512, 1024, 4096), dtype, **how)
    return compiled(launch, arch, **constexprs)


@pytest.mark.parametrize(
    ("kind", "which", "arch"),
    [("half", 0, 90), ("half", 1, 90), ("half", 2, 90)]
    + [("elsewhere", which, arch) for which in (0, 1) for arch in (80, 120)],
)
def test_tiles_of_16_bits(h200, kind, which, arch):
    code = forward_compiled(h200, kind, which, torch.bfloat16, arch)
    mix = instruction_mix(code)
    wide = arch == 90 and h200._TILES[kind][which].m >= 64
    assert any(op.startswith("HGMMA" if wide else "HMMA") for op in mix), mix
    reads = {op for op in mix if op.startswith("LDGSTS")}
    assert reads and all(op.endswith(".128") for op in reads), reads
    assert kind != "half" or {op for op in mix if op.startswith("STG")} <= {"STG.E.128", "STG.E.64"}
    assert code.spills == 0
    assert code.shared_bytes <= (227 if kind == "half" else 99) * 1024


@pytest.mark.parametrize(
    ("kind", "arch"), [("tf32x3", 90), ("tf32", 90), ("double", 90), ("elsewhere", 80)]
)
def test_tiles_of_full_precision(h200, kind, arch):
    dtype = torch.float64 if kind == "double" else torch.float32
    code = forward_compiled(h200, kind, 0, dtype, arch)
    mix = instruction_mix(code)
    rounded = [op for op in mix if "TF32" in op or "BF16" in op]
    assert bool(rounded) == (kind != "double"), rounded
    assert any(op.startswith("DMMA" if kind == "double" else ("HMMA", "HGMMA")) for op in mix)
    assert {op for op in mix if op.startswith("LDGSTS")} == {"LDGSTS.E.BYPASS.128"}
    assert code.spills == 0
    assert code.shared_bytes <= 99 * 1024


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_turing_runs_it_too(h200, dtype):
    code = forward_compiled(h200, "turing", 0, dtype, 75, PRECISION="ieee")
    assert code.spills == 0
    assert code.shared_bytes <= 64 * 1024


def test_tf32_is_for_who_asks_for_it(module):
    """What tensor cores may round: the interpreter rounds nothing, so it is read off the launch."""
    kernel, shape = "_linear_glu_fwd_kernel", (512, 1024, 4096)
    for how, want in (({}, "tf32x3"), ({"allow_tf32": True}, "tf32")):
        how["needs_grad"] = False
        launch = launched(for_a_gpu(module), kernel, shape, torch.float32, **how)
        assert launch.made_of.constexprs["PRECISION"] == want


@pytest.mark.gpu
def test_tf32_is_as_rough_as_it_says():
    if torch.cuda.get_device_capability()[0] < 8:
        pytest.skip("this GPU has no tf32")
    x, weight, _ = detached((256, 1024, 256))
    want = linear_glu_eager(x.double(), weight.double())
    error, rough = (
        (linear_glu.linear_glu_triton(x, weight, allow_tf32=tf32) - want).abs().max()
        for tf32 in (False, True)
    )
    assert error < 1e-4 < rough < 1e-1


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_other_sizes_compile_nothing(dtype):
    first, *rest = (
        (8000, 1024, 2048), (8001, 512, 4096), (9999, 2048, 1024), (7777, 1040, 2064)
    )  # fmt: skip
    battery.gradients(linear_glu.linear_glu_triton, tensors(first, dtype))
    with battery.count_compilations() as names:
        for shape in rest:
            battery.gradients(linear_glu.linear_glu_triton, tensors(shape, dtype))
    assert not names, names


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("bias", [True, False])
def test_backward_moves_sixteen_bytes_at_once(h200, dtype, bias):
    shape = (512, 1024, 4096)
    code = compiled(launched(h200, "_linear_glu_bwd_kernel", shape, dtype, bias))
    mix = instruction_mix(code)
    assert mix["STG.E.128"] == 2 * dtype.itemsize, "two halves, 16 elements a thread"
    assert not [op for op in mix if op.startswith("LDG.")], "all loads go ahead, to shared memory"
    assert {op for op in mix if op.startswith("LDGSTS")} == {"LDGSTS.E.BYPASS.128"}
    assert (mix["STG.E"] > 0) == bias
    wide = bias and dtype == torch.float32  # the newest Triton's code spills two registers of it
    assert code.spills <= (2 if wide and cases.release(triton) >= (3, 9) else 0)
    # one of each for an element, which both halves share, and a reciprocal more for a quotient of whole numbers
    assert mix["MUFU.EX2"] == 16
    assert 16 <= mix["MUFU.RCP"] <= 18


# --- two layers of a checkpoint ------------------------------------------------------------------------------


class _Gated(torch.nn.Module):
    def __init__(self, bias):
        super().__init__()
        self.gate_up = linear_glu.FusedGLU(8, 6, bias, activation="silu", gate="first")
        self.down_proj = torch.nn.Linear(6, 8)


@pytest.mark.parametrize("bias", [False, True])
def test_a_checkpoint_of_two_projections_is_loaded_as_one(bias):
    old = torch.nn.ModuleDict(
        {name: torch.nn.Linear(8, 6, bias) for name in ("gate_proj", "up_proj")}
        | {"down_proj": torch.nn.Linear(6, 8)}
    )
    layer = _Gated(bias)
    linear_glu.join_projections(layer)
    model, state = torch.nn.Sequential(layer), torch.nn.Sequential(old).state_dict()
    n_keys = len(state)
    model.load_state_dict(state)
    assert len(state) == n_keys, "the caller's state_dict was changed"
    x = torch.randn(3, 8)
    want = torch.nn.functional.silu(old["gate_proj"](x)) * old["up_proj"](x)
    torch.testing.assert_close(
        layer.gate_up.to(machine.device())(x.to(machine.device())).cpu(), want
    )
    model.load_state_dict(model.state_dict())  # its own is one, too
    del state["0.up_proj.weight"]
    with pytest.raises(RuntimeError, match="Missing key.*gate_up.weight"):
        model.load_state_dict(state)


def test_projections_are_joined_into_a_gated_layer_alone():
    layer = torch.nn.Module()
    layer.gate_up = linear_glu.FusedGLU(4, 6)
    with pytest.raises(ValueError, match='gate_proj comes first, and .* make it with gate="first"'):
        linear_glu.join_projections(layer)
    linear_glu.join_projections(layer, "up_proj", "gate_proj")
    with pytest.raises(TypeError, match="module.gate_up must be a FusedGLU; name it by into="):
        linear_glu.join_projections(torch.nn.Linear(2, 2))
