"""linear_geglu: what test_ops asks of other ops, for x, W and b; both kernels; what is kept; traffic."""

import copy
import inspect
import itertools
import math

from lib import machine
from lib.measure.check import check_against_float64
from lib.nogpu.compile_only import compile_for, instruction_mix, signature_of
from lib.nogpu.memory import count_traffic
from lib.ops import linear_geglu as op_file
from lib.ops.linear_geglu import (
    LinearGEGLU,
    linear_geglu_eager,
    linear_geglu_op,
    linear_geglu_triton,
)
from lib.tests.ops import cases
from lib.tests.ops.test_ops import DTYPES, _count_compilations, assert_close

import pytest
import torch
import torch.nn.functional as F
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st

# (shape of x, H)
CASES = [
    ((1, 1), 1),
    ((8,), 3),
    ((2, 3, 8), 16),
    ((17, 33), 5),
    ((129, 77), 33),
    ((1, 300), 70),
    ((2, 1, 3, 24), 40),
    ((5, 0), 7),
    ((0, 5), 7),
    ((3, 0, 8), 4),
    ((5, 5), 0),
    ((0, 0), 0),
]
SMALL = ((17, 24), 40)
BIG = [((1823, 781), 333), ((4096, 1024), 4096), ((3, 1000, 520), 1000), ((1, 4096), 11008)]
BIG += [((257, 4096), 128), ((100_003, 64), 40)]


def recomputing(x, weight, bias=None):
    return linear_geglu_triton(x, weight, bias, recompute=True)


def registered(x, weight, bias=None):
    return linear_geglu_op(x, weight, bias, True)[0]


def registered_recomputing(x, weight, bias=None):
    return linear_geglu_op(x, weight, bias)[0]


VERSIONS = [linear_geglu_triton, recomputing, registered, registered_recomputing]
versions = pytest.mark.parametrize("version", VERSIONS, ids=lambda v: v.__name__)
wrappers = pytest.mark.parametrize("version", VERSIONS[:2], ids=lambda v: v.__name__)
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)
both_halves = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)


def tensors(case=SMALL, dtype=torch.float32, bias=True, device=None):
    """x, weight and, if asked for, bias: leaves that require grad; h has about the size of x."""
    shape, n_hidden = case
    device = device or machine.device()
    x = torch.randn(shape, device=device)
    weight = torch.randn(2 * n_hidden, shape[-1], device=device) / math.sqrt(max(1, shape[-1]))
    found = [x, weight] + [torch.randn(2 * n_hidden, device=device)] * bias
    return [t.to(dtype).requires_grad_() for t in found]


def detached(*args, **kwargs):
    return [t.detach() for t in tensors(*args, **kwargs)]


@pytest.fixture
def with_tma(monkeypatch):
    """Whatever machine this is: the op takes the TMA kernel where it would on a Hopper GPU."""
    if machine.HAS_GPU and not op_file._has_tma(machine.device()):
        pytest.skip("this GPU has no TMA, and runs kernels itself")
    launches, launch = [], op_file._launch_tma
    monkeypatch.setattr(op_file, "_has_tma", lambda device: True)
    monkeypatch.setattr(op_file, "_n_multiprocessors", lambda device: 2)  # few programs, many tiles
    monkeypatch.setattr(
        op_file, "_launch_tma", lambda *args: launches.append(args) or launch(*args)
    )
    op_file._tiles_for.cache_clear()
    yield launches
    op_file._tiles_for.cache_clear()


# --- values and gradients ------------------------------------------------------------------------------------


@versions
@dtypes
def test_equals_float64(version, dtype):
    for case, bias in itertools.product(CASES, (True, False)):
        inputs = tensors(case, dtype, bias)
        # of few numbers eager's largest error is a matter of luck: one rounding is granted
        slack = 1e-6 if inputs[0].numel() > 4096 else max(1e-6, torch.finfo(dtype).eps)
        check_against_float64(
            version, linear_geglu_eager, *inputs, slack=slack, name=f"{case}, {bias}"
        )


@both_halves
@pytest.mark.parametrize("kernel", ["pointers", "tma"])
def test_y_rounds_once(request, kernel, dtype):
    """Stricter than twice eager's error: eager rounds h and gelu(x2) on the way."""
    launches = request.getfixturevalue("with_tma") if kernel == "tma" else []
    inputs = detached(((130, 24), 40 if kernel == "pointers" else 264), dtype)
    want = linear_geglu_eager(*(t.double() for t in inputs))
    error = (linear_geglu_triton(*inputs).double() - want).abs()
    assert (error <= 0.51 * torch.finfo(dtype).eps * want.abs() + 1e-5).all()
    assert len(launches) == (kernel == "tma")


@pytest.mark.gpu
@versions
@dtypes
@pytest.mark.parametrize("case", BIG, ids=str)
def test_equals_float64_at_real_sizes(version, dtype, case):
    for bias in (True, False):
        check_against_float64(version, linear_geglu_eager, *tensors(case, dtype, bias))


def test_the_definition_is_a_layer_whose_second_half_is_the_gate():
    x, weight, bias = (t.double() for t in detached())
    value, gate = (
        F.linear(x, w, b) for w, b in zip(weight.split(weight.shape[0] // 2), bias.chunk(2))
    )
    u = math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)
    want = value * 0.5 * gate * (1 + torch.tanh(u))
    torch.testing.assert_close(linear_geglu_eager(x, weight, bias), want)
    torch.testing.assert_close(linear_geglu_triton(x, weight, bias), want)


@wrappers
def test_gradients_in_the_tails(version):
    """Where gelu' is nearly 1 or nearly 0: two products of one number each, so that no sum hides an error."""
    gate = torch.linspace(-12, 12, 961, device=machine.device())[:, None]
    weight = torch.ones(2, 2, device=machine.device())
    weight[0, 1] = weight[1, 0] = 0  # x1 = 1, x2 = gate
    found = []
    for run, dtype in ((version, torch.float32), (linear_geglu_eager, torch.float64)):
        x = torch.cat([torch.ones_like(gate), gate], dim=1).to(dtype).requires_grad_()
        found += torch.autograd.grad(run(x, weight.to(dtype)).sum(), x)
    error = (found[0] - found[1]).abs()
    assert error[:, 1].max() < 8e-7, "gelu'"
    assert (error[:, 0] <= 1e-6 * found[1][:, 0].abs().clamp(min=1)).all(), "gelu"


@wrappers
@dtypes
def test_nan_and_infinities(version, dtype):
    """One row each; K = 1, as an infinity among other products is a NaN in any sum. And a NaN in W."""
    inf = float("inf")
    x = torch.tensor([0.0, 1e4, -1e4, inf, -inf, float("nan"), 90.0, -90.0, -0.0])
    x = x[:, None].to(machine.device(), dtype).requires_grad_()
    for gate in (1.0, -1.0, float("nan")):
        weight = torch.tensor([[0.5], [gate]], dtype=dtype, device=x.device).requires_grad_()
        check_against_float64(version, linear_geglu_eager, x, weight, name=f"gate {gate}")


def test_what_lies_past_k_adds_nothing():
    """x is a slice: behind its last column are NaN, and behind W's too."""
    x, weight = (
        torch.full((n, 64), float("nan"), device=machine.device())[:, :40] for n in (9, 32)
    )
    x.normal_(), weight.normal_()
    assert_close(linear_geglu_triton(x, weight), linear_geglu_eager(x, weight))


@wrappers
def test_recomputed_or_saved_the_same(version):
    inputs = tensors()
    ys = [run(*inputs) for run in (version, registered_recomputing)]
    assert torch.equal(*ys)
    for a, b in zip(*(torch.autograd.grad(y.square().sum(), inputs) for y in ys)):
        assert_close(a, b)


def test_many_rows_are_summed_by_many_programs():
    """So many that each takes several tiles; x1 = 1 and x2 = 8: all of dh is known, and its sums are exact."""
    n_rows = 2**21 + 5
    dy = torch.ones(n_rows, 1, device=machine.device())
    h = torch.tensor([[1.0, 8.0]], device=dy.device).repeat(n_rows, 1)
    dh, db = op_file._backward(dy, h, True)
    assert (dh == torch.tensor([8.0, 1.0], device=dy.device)).all()
    assert db.tolist() == [8 * n_rows, n_rows]


# --- the kernel for Hopper -----------------------------------------------------------------------------------

# M, K, H that fill tiles of 128 x 64 and 128, that do not, and one tile in each direction only
TMA_CASES = [((256, 128), 256), ((300, 136), 264), ((129, 40), 33), ((1000, 8), 1)]


@both_halves
@pytest.mark.parametrize("case", TMA_CASES, ids=str)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
def test_tma_equals_float64(with_tma, case, dtype, bias):
    inputs = tensors(case, dtype, bias)
    check_against_float64(linear_geglu_triton, linear_geglu_eager, *inputs)
    assert len(with_tma) == 1


@both_halves
def test_tma_saves_h(with_tma, dtype):
    x, weight, bias = detached(((130, 72), 136), dtype)
    y, h = op_file._forward(x, weight, bias, False, save_h=True)
    assert len(with_tma) == 1
    assert_close(h, F.linear(x, weight, bias), dtype)
    assert torch.equal(y, op_file._forward(x, weight, bias, False)[0])


@pytest.mark.parametrize("kernel", ["pointers", "tma"])
def test_the_halves_do_not_run_into_each_other(request, kernel):
    """H = 136 is no multiple of a tile: behind row 135 of W, in one piece with it, come rows of the gate."""
    launches = request.getfixturevalue("with_tma") if kernel == "tma" else []
    for bad in (0, 1):
        x, weight, bias = detached(((200, 64), 136), torch.float16)
        weight.view(2, 136, 64)[bad] = bias.view(2, 136)[bad] = float("nan")
        _, h = op_file._forward(x, weight, bias, False, save_h=True)
        nan = h.view(200, 2, 136).isnan()
        assert nan[:, bad].all() and not nan[:, 1 - bad].any()
    assert len(launches) == (2 if kernel == "tma" else 0)


def test_tma_takes_what_it_can_read(with_tma):
    """Slices whose rows begin on 16-byte boundaries; not others, and no float32, no K = 0, no few rows."""
    x, weight, bias = detached(((256, 64), 256), torch.bfloat16)
    wide_x, wide_w = torch.cat([x, x], dim=1), torch.cat([weight, weight], dim=1)

    def taken(*inputs):
        before = len(with_tma)
        assert_close(linear_geglu_triton(*inputs), linear_geglu_eager(*inputs), torch.bfloat16)
        return len(with_tma) > before

    assert taken(x, weight, bias)
    assert taken(x, weight)
    assert taken(wide_x[:, :64], wide_w[:, 8:72], bias)
    assert taken(wide_x[:, :33], wide_w[:, :33], bias)
    assert not taken(wide_x[:, 1:65], weight, bias), "from the middle of 16 bytes"
    assert not taken(x[:, :33].contiguous(), wide_w[:, :33], bias), "rows of 66 bytes"
    assert not taken(x, weight.t().contiguous().t(), bias), "columns side by side"
    assert not taken(x[:1].expand(256, 64), weight, bias), "rows that are one in memory"
    assert not taken(x, weight[:1].expand(512, 64), bias)
    assert not taken(x[:, ::2], weight[:, :32], bias)
    assert not taken(x[:, :0], weight[:, :0], bias), "K = 0"
    assert not taken(x.float(), weight.float(), bias.float())
    assert not taken(x[:16], weight, bias), "few rows"


def test_every_tile_of_the_persistent_kernel_is_done_once(with_tma):
    """Groups of rows of tiles, the last of them lower; more tiles than programs, and no multiple of them."""
    x, weight = torch.ones(128 * 9 + 1, 8), torch.ones(2 * 128 * 3, 8)
    x, weight = (t.to(machine.device(), torch.float16) / 4 for t in (x, weight))
    want = linear_geglu_eager(x[:1], weight[[0, 384]])
    assert (linear_geglu_triton(x, weight) == want).all()
    assert len(with_tma) == 1


# --- layouts in memory ---------------------------------------------------------------------------------------


@wrappers
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_strides(version, dtype):
    x, weight, bias = detached(((34, 40), 40), dtype)
    for layout, strided in cases.layouts(x).items():
        inputs = [t.detach().requires_grad_() for t in (strided, weight, bias)]
        check_against_float64(version, linear_geglu_eager, *inputs, name=f"x {layout}")
    for layout, strided in cases.layouts(weight).items():
        if strided.dim() == 2:
            inputs = [t.detach().requires_grad_() for t in (x, strided, bias)]
            check_against_float64(version, linear_geglu_eager, *inputs, name=f"W {layout}")
    check_against_float64(version, linear_geglu_eager, x, weight, cases.spread(bias))


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    sizes=st.tuples(st.integers(0, 40), st.integers(0, 40), st.integers(0, 20)),
    steps=st.tuples(*[st.integers(1, 3)] * 4),
    transposed=st.tuples(st.booleans(), st.booleans()),
    start=st.integers(0, 5),
)
def test_any_view(sizes, steps, transposed, start):
    """Any sliced or transposed view gives the values of its contiguous copy; between its numbers are NaN."""
    m, k, n_hidden = sizes
    x, weight, bias = detached(((m, k), n_hidden))
    views = [
        _view_of(t, pair, flip, start)
        for t, pair, flip in zip((x, weight), (steps[:2], steps[2:]), transposed)
    ]
    assert_close(linear_geglu_triton(*views, bias), linear_geglu_triton(x, weight, bias))


def _view_of(t, steps, transposed, start):
    big = [n * step + start for n, step in zip(t.shape, steps)]
    base = torch.full(big[::-1] if transposed else big, float("nan"), device=t.device)
    view = (base.t() if transposed else base)[start :: steps[0], start :: steps[1]]
    return view.copy_(t)


# --- gradients -----------------------------------------------------------------------------------------------


@versions
def test_gradient_of_a_sum_has_stride_zero(version):
    inputs, again = tensors(), tensors()
    again = [t.detach().clone().requires_grad_() for t in inputs]
    version(*inputs).sum().backward()
    linear_geglu_eager(*again).sum().backward()
    for got, want in zip(inputs, again):
        assert_close(got.grad, want.grad)


@versions
def test_gradients_of_any_strides(version):
    inputs = tensors(((2, 9, 24), 40))
    wide = torch.randn(2, 9, 80, device=machine.device())
    for dy in (
        torch.randn(2, 40, 9, device=machine.device()).transpose(1, 2),
        torch.randn(9, 2, 40, device=machine.device()).transpose(0, 1),
        wide[..., ::2],
        wide[..., 3:43],
        wide[:, :1, :40].expand(2, 9, 40),
    ):
        got = torch.autograd.grad(version(*inputs), inputs, dy)
        want = torch.autograd.grad(linear_geglu_eager(*inputs), inputs, dy)
        for a, b in zip(got, want):
            assert_close(a, b)


@versions
def test_second_backward_gives_the_same(version):
    inputs = tensors()
    y = version(*inputs)
    dy = torch.randn_like(y)
    before = [t.detach().clone() for t in (dy, *inputs)]
    first = torch.autograd.grad(y, inputs, dy, retain_graph=True)
    first = [t.clone() for t in first]
    second = torch.autograd.grad(y, inputs, dy)
    assert all(torch.equal(a, b) for a, b in zip(first, second))
    assert all(torch.equal(a, b) for a, b in zip(before, (dy, *inputs))), "something was changed"


@versions
def test_only_the_gradients_asked_for(version):
    inputs = tensors()
    y = linear_geglu_eager(*inputs)
    dy = torch.randn_like(y)
    wanted = torch.autograd.grad(y, inputs, dy)
    for needs in itertools.product((False, True), repeat=3):
        some = [t.detach().requires_grad_(need) for t, need in zip(inputs, needs)]
        y = version(*some)
        assert y.requires_grad == any(needs)
        if y.requires_grad:
            leaves = [t for t in some if t.requires_grad]
            got = torch.autograd.grad(y, leaves, dy)
            for a, b in zip(got, itertools.compress(wanted, needs)):
                assert_close(a, b)


@wrappers
def test_a_gradient_that_nobody_needs_costs_no_launch(version):
    """Without db no sums over rows; the two products are left out where their results are."""
    for needs, launches in [((1, 1, 1), 2), ((1, 1, 0), 1), ((0, 1, 0), 1), ((0, 0, 1), 2)]:
        some = [t.detach().requires_grad_(bool(need)) for t, need in zip(tensors(), needs)]
        y = version(*some)
        assert count_traffic(lambda y=y: y.sum().backward()).launches == launches, needs
        assert [t.grad is not None for t in some] == [bool(need) for need in needs]


@versions
def test_no_gradient_for_y(version):
    """Something behind y may say that there is none."""

    class Nothing(torch.autograd.Function):
        @staticmethod
        def forward(ctx, y):
            return y.clone()

        @staticmethod
        def backward(ctx, dy):
            return None

    inputs = tensors()
    Nothing.apply(version(*inputs)).sum().backward()
    assert all(t.grad is None or not t.grad.any() for t in inputs)


@versions
def test_second_derivative_raises(version):
    inputs = tensors()
    y = version(*inputs)
    dy = torch.randn_like(y).requires_grad_()
    (dx,) = torch.autograd.grad(y, inputs[:1], dy, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dx.sum().backward()


@wrappers
@pytest.mark.parametrize("needs_gradient", [False, True])
def test_vmap_raises(version, needs_gradient):
    x, weight, bias = (t.detach().requires_grad_(needs_gradient) for t in tensors())
    with pytest.raises(RuntimeError, match="functorch|vmap|BatchedTensor"):
        torch.vmap(version, in_dims=(0, None, None))(x[None], weight, bias)


@wrappers
def test_checkpoint(version):
    from torch.utils.checkpoint import checkpoint

    inputs = tensors()
    again = [t.detach().clone().requires_grad_() for t in inputs]
    checkpoint(version, *inputs, use_reentrant=False).square().sum().backward()
    version(*again).square().sum().backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(inputs, again))


@wrappers
def test_same_bits_every_time(version):
    inputs = tensors(((123, 77), 81))
    dy = torch.randn(123, 81, device=machine.device())
    runs = [torch.autograd.grad(version(*inputs), inputs, dy) for _ in range(3)]
    assert all(torch.equal(a, b) for run in runs[1:] for a, b in zip(runs[0], run))


# --- autocast ------------------------------------------------------------------------------------------------


@wrappers
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_autocast(version, dtype):
    """The dtypes of F.linear: one dtype from any mix of three, and float64 as it is."""
    x, weight, bias = tensors()
    with torch.autocast(machine.device().type, dtype=dtype):
        y = version(x.to(dtype), weight, bias)
        assert y.dtype == dtype == linear_geglu_eager(x.to(dtype), weight, bias).dtype
        assert version(*(t.double() for t in (x, weight, bias))).dtype == torch.float64
    gradients = torch.autograd.grad(y.float().square().sum(), (x, weight, bias))
    want = linear_geglu_eager(x, weight, bias)
    torch.testing.assert_close(y.float(), want, rtol=0.05, atol=0.05)
    for a, b in zip(gradients, torch.autograd.grad(want.square().sum(), (x, weight, bias))):
        assert a.dtype == torch.float32
        torch.testing.assert_close(a, b, rtol=0.05, atol=0.05 * float(b.abs().max()))


@versions
def test_a_backward_pass_under_autocast_keeps_the_dtype(version):
    inputs = tensors()
    want = torch.autograd.grad(linear_geglu_eager(*inputs).sum(), inputs)
    y = version(*inputs)
    with torch.autocast(machine.device().type, dtype=torch.bfloat16):
        got = torch.autograd.grad(y.sum(), inputs)
    for a, b in zip(got, want):
        assert_close(a, b)


# --- torch.library and torch.compile --------------------------------------------------------------------------


@pytest.mark.parametrize("case", [((2, 3, 4), 6), ((0, 4), 3)], ids=str)
@pytest.mark.parametrize("save_h", [False, True])
def test_opcheck(case, save_h):
    for bias in (True, False):
        inputs = tensors(case, bias=bias)
        args = (*inputs, *[None] * (3 - len(inputs)), save_h, False)
        torch.library.opcheck(linear_geglu_op, args)
        torch.library.opcheck(
            linear_geglu_op, [a.detach() if isinstance(a, torch.Tensor) else a for a in args]
        )
        lead = case[0][:-1]
        dy, h = (torch.randn(*lead, n, device=machine.device()) for n in (case[1], 2 * case[1]))
        torch.library.opcheck(op_file._linear_geglu_backward_op, (dy, h, bias))


@versions
def test_gradcheck(version):
    for bias in (True, False):
        inputs = tensors(((2, 1, 3), 2), torch.float64, bias)
        assert torch.autograd.gradcheck(version, inputs)


def doubled(version):
    def twice(x, weight, bias=None):
        y = version(x * 2, weight, bias)
        return y * y  # autocast makes float32 of a power on a GPU

    return twice


def test_compile_fullgraph():
    compiled = torch.compile(doubled(linear_geglu_triton), fullgraph=True)
    for case in [SMALL, ((9, 24), 40)]:
        check_against_float64(compiled, doubled(linear_geglu_eager), *tensors(case))


def compiled_quickly(version):
    """Through the same graphs, without the time that generating code takes."""
    torch._dynamo.reset()
    return torch.compile(doubled(version), fullgraph=True, backend="aot_eager")


@wrappers
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
def test_compile_other_sizes(version, bias):
    compiled = compiled_quickly(version)
    for case in [SMALL, ((9, 24), 40), ((2, 9, 24), 40), ((0, 24), 40)]:
        inputs = tensors(case, bias=bias)
        check_against_float64(compiled, doubled(linear_geglu_eager), *inputs)


@wrappers
def test_compile_under_autocast_and_with_frozen_tensors(version):
    compiled, inputs = compiled_quickly(version), tensors()
    with torch.no_grad():
        assert_close(compiled(*inputs), doubled(linear_geglu_eager)(*inputs))
    with torch.autocast(machine.device().type, dtype=torch.bfloat16):
        assert compiled(*inputs).dtype == torch.bfloat16
    for needs in [(1, 0, 0), (0, 1, 0), (0, 0, 1)]:
        some = [t.detach().requires_grad_(bool(n)) for t, n in zip(inputs, needs)]
        check_against_float64(compiled, doubled(linear_geglu_eager), *some)


def test_compiled_without_a_gradient_nothing_is_saved():
    torch._dynamo.reset()
    compiled = torch.compile(linear_geglu_triton, fullgraph=True, backend="aot_eager")
    inputs = tensors()
    with torch.no_grad():
        traffic = count_traffic(lambda: compiled(*inputs))
    assert not any(name.endswith("h_ptr") for name in traffic.by_argument)


# --- traffic, and what is kept -------------------------------------------------------------------------------


def by_argument(traffic):
    return {name.rpartition(".")[2]: a for name, a in traffic.by_argument.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_without_a_gradient_h_never_reaches_memory(dtype):
    x, weight, bias = detached(((256, 64), 128), dtype)
    traffic = count_traffic(lambda: linear_geglu_triton(x, weight, bias))
    assert traffic.launches == 1
    y_bytes = 256 * 128 * dtype.itemsize
    assert traffic.bytes_moved == x.nbytes + weight.nbytes + bias.nbytes + y_bytes
    assert by_argument(traffic)["y_ptr"].stored == y_bytes


def test_tma_moves_the_same_bytes(with_tma):
    x, weight, bias = detached(((256, 64), 264), torch.bfloat16)
    traffic = count_traffic(lambda: linear_geglu_triton(x, weight, bias))
    assert traffic.launches == len(with_tma) == 1
    y_bytes = 256 * 264 * 2
    assert traffic.bytes_moved == x.nbytes + weight.nbytes + bias.nbytes + y_bytes
    assert by_argument(traffic)["w_desc"].loaded == 2 * weight.nbytes, "once for each row of tiles"


def test_with_a_gradient_h_is_written_once_and_read_once():
    x, weight, bias = tensors(((256, 64), 128))
    traffic = count_traffic(lambda: linear_geglu_triton(x, weight, bias))
    h_bytes = 2 * 256 * 128 * 4
    assert by_argument(traffic)["h_ptr"].stored == h_bytes
    y = linear_geglu_triton(x, weight, bias)
    dy = torch.randn_like(y)
    traffic = count_traffic(lambda: torch.autograd.grad(y, (x, weight, bias), dy))
    assert traffic.launches == 2
    by = by_argument(traffic)
    assert by["dy_ptr"].loaded == dy.nbytes
    assert by["h_ptr"].loaded == by["dh_ptr"].stored == h_bytes
    assert by["partial_ptr"].stored <= h_bytes / 8


def test_recompute_writes_no_h():
    inputs = tensors(((256, 64), 128))
    forward = count_traffic(lambda: recomputing(*inputs))
    assert "h_ptr" not in by_argument(forward)


def kept(version, inputs):
    """The tensors that autograd keeps."""
    found = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: found.append(t) or t, lambda t: t):
        version(*inputs)
    return found


def test_what_is_kept_for_the_backward_pass():
    x, weight, bias = inputs = tensors(((2, 9, 24), 40))
    frozen = [t.detach() for t in inputs]
    h = (2, 9, 80)

    def shapes(version, x, weight, bias):
        return sorted(tuple(t.shape) for t in kept(version, (x, weight, bias)))

    for version in (linear_geglu_triton, registered):
        assert shapes(version, *inputs) == sorted([x.shape, weight.shape, h])
        assert shapes(version, x, *frozen[1:]) == sorted([weight.shape, h])
        assert shapes(version, frozen[0], weight, frozen[2]) == sorted([x.shape, h])
        assert shapes(version, *frozen[:2], bias) == [h]
    for version in (recomputing, registered_recomputing):
        addresses = {t.data_ptr() for t in kept(version, inputs)}
        assert addresses == {t.data_ptr() for t in inputs}, "nothing but what there was"


@pytest.mark.parametrize("save_h", [False, True])
def test_the_registered_op_gives_h_without_a_gradient(save_h):
    x, weight, bias = tensors()
    y, h = linear_geglu_op(x, weight, bias, save_h)
    assert y.requires_grad and not h.requires_grad
    if save_h:
        assert_close(h, F.linear(x, weight, bias).detach())
    else:
        assert h.numel() == 0


def test_tensors_changed_before_the_backward_pass_are_noticed():
    for version, k in itertools.product((linear_geglu_triton, recomputing), (0, 1)):
        inputs = [t * 1 for t in tensors()]
        y = version(*inputs)
        inputs[k].mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


# --- sizes past what 32 bits hold -----------------------------------------------------------------------------


def far_apart(shape, dim):
    """Numbers so far apart along `dim` that the last begin past 2**31: few pages of 4 GiB are touched."""
    step = -(-(2**31) // (shape[dim] - 1))
    storage = torch.empty(2**31 + 64, dtype=torch.float16, device=machine.device())
    return storage.as_strided(shape, [step, 1] if dim == 0 else [1, step]).normal_()


@pytest.mark.parametrize(
    ("which", "shape", "dim"),
    [(0, (3, 16), 0), (0, (16, 3), 1), (1, (4, 16), 0), (1, (16, 3), 1)],
    ids=["rows of x", "columns of x", "rows of W", "columns of W"],
)
def test_offsets_past_two_to_the_31(which, shape, dim):
    inputs = detached(((3, shape[1]), shape[0] // 2 if which else 8), torch.float16)
    inputs[which] = far_apart(shape, dim)
    inputs = [t.detach().requires_grad_() for t in inputs]
    check_against_float64(linear_geglu_triton, cases.near(linear_geglu_eager), *inputs)


def test_offsets_past_two_to_the_31_from_step_to_step_of_k():
    """K = 66 is two steps of 64: from one to the other 2**31 elements and more."""
    x, weight, bias = detached(((3, 66), 4), torch.float16)
    step = 2**25 + 1
    storage = torch.empty(66 * step, dtype=torch.float16, device=machine.device())
    for which in (0, 1):
        inputs = [x, weight, bias]
        inputs[which] = storage.as_strided(inputs[which].shape, (1, step)).copy_(inputs[which])
        assert_close(linear_geglu_triton(*inputs), linear_geglu_eager(x, weight, bias), x.dtype)


def test_gradient_offsets_past_two_to_the_31():
    for dim, shape in enumerate([(3, 16), (16, 3)]):
        dy = far_apart(shape, dim)
        inputs = tensors(((shape[0], 8), shape[1]), torch.float16)
        got = torch.autograd.grad(linear_geglu_triton(*inputs), inputs, dy)
        want = torch.autograd.grad(linear_geglu_eager(*inputs), inputs, dy.contiguous())
        for a, b in zip(got, want):
            assert_close(a, b, torch.float16)


@pytest.mark.gpu
@pytest.mark.parametrize("case", [((2**17 + 1, 64), 2**14), ((2**29 + 3, 1), 4)], ids=str)
def test_more_than_two_to_the_31_elements(case):
    if torch.cuda.mem_get_info()[0] < 60e9:
        pytest.skip("needs 60 GB of GPU memory")
    x, weight, bias = tensors(case, torch.bfloat16)
    y = linear_geglu_triton(x, weight, bias)
    (dx,) = torch.autograd.grad(y, [x], y.detach())
    for rows in (slice(0, 2), slice(-2, None)):
        part = x.detach()[rows].requires_grad_()
        want = linear_geglu_eager(part, weight.detach(), bias.detach())
        assert_close(y[rows], want, torch.bfloat16)
        assert_close(dx[rows], torch.autograd.grad(want, part, y.detach()[rows])[0], torch.bfloat16)


# --- on a GPU ------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@wrappers
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_cuda_graph(version, dtype):
    inputs = detached(((1024, 512), 1024), dtype)
    version(*inputs)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = version(*inputs)
    inputs[0].normal_()
    graph.replay()
    assert torch.equal(y, version(*inputs))


@pytest.mark.gpu
def test_current_stream():
    """A launch on the default stream would read x before the long kernels of this stream have written it."""
    x, weight, bias = detached(((4096, 1024), 1024))
    linear_geglu_triton(x, weight, bias)
    want = linear_geglu_eager(x + 64, weight, bias)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        for _ in range(64):
            x = x + 1
        got = linear_geglu_triton(x, weight, bias)
    torch.cuda.synchronize()
    torch.testing.assert_close(got, want, rtol=1e-2, atol=1e-1)


@pytest.mark.gpu
@wrappers
def test_second_gpu(version):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    for dtype in (torch.float32, torch.bfloat16):
        inputs = tensors(((1024, 256), 1024), dtype, device=torch.device("cuda:1"))
        check_against_float64(version, linear_geglu_eager, *inputs)


@pytest.mark.gpu
@wrappers
def test_no_host_sync(version):
    inputs = tensors()
    version(*inputs).sum().backward()
    torch.cuda.set_sync_debug_mode("error")
    try:
        version(*inputs).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_another_size_does_not_compile_again(dtype):
    with _count_compilations() as compiled:
        for n, (rows, k, n_hidden) in enumerate(
            [(8000, 1024, 2048), (8001, 512, 4096), (9999, 2048, 1024), (7777, 1040, 2064)]
        ):
            inputs = tensors(((rows, k), n_hidden), dtype)
            linear_geglu_triton(*inputs).sum().backward()
            if n == 0:
                compiled.clear()
    assert not compiled, compiled


@pytest.mark.gpu
def test_tf32_is_for_who_asks_for_it():
    if torch.cuda.get_device_capability()[0] < 8:
        pytest.skip("this GPU has no tf32")
    x, weight = detached(((256, 1024), 256), bias=False)
    want = linear_geglu_eager(x.double(), weight.double())
    error, rough = (
        (linear_geglu_triton(x, weight, allow_tf32=tf32) - want).abs().max()
        for tf32 in (False, True)
    )
    assert error < 1e-4 < rough < 1e-1


# --- machine code --------------------------------------------------------------------------------------------


class _Recorder:
    """Stands in for a kernel: takes note of the arguments of its launches, and launches nothing."""

    def __init__(self):
        self.launches = []

    def __getitem__(self, grid):
        return lambda *args, **options: self.launches.append((args, options))


def zeros(dtype, *shapes):
    return [torch.zeros(shape, dtype=dtype, device=machine.device()) for shape in shapes]


def _compiled(monkeypatch, kernel_name, launch, arch=90):
    """The kernel as `launch` launches it, compiled for a GPU: not as the interpreter gets it."""
    monkeypatch.setattr(op_file, "_INTERPRETED", tl.constexpr(False))
    kernel, recorder = getattr(op_file, kernel_name), _Recorder()
    with monkeypatch.context() as patch:
        patch.setattr(op_file, kernel_name, recorder)
        launch()
    ((args, options),) = recorder.launches
    settings_ = {k: options.pop(k) for k in ("num_warps", "num_stages") if k in options}
    described = {n: a for n, a in enumerate(args) if isinstance(a, op_file.TensorDescriptor)}
    plain = [3 if n in described else a for n, a in enumerate(args)]
    signature = signature_of(kernel, *plain, **options)
    names = list(inspect.signature(kernel.fn).parameters)
    for n, a in described.items():
        dtype = {torch.float16: "fp16", torch.bfloat16: "bf16"}[a.base.dtype]
        signature.types[names[n]] = f"tensordesc<{dtype}{list(a.block_shape)}>"
    return compile_for(kernel, signature, arch=arch, **settings_)


def _forward_compiled(monkeypatch, tile, dtype, arch, save_h=True, tf32=False):
    x, weight, bias = zeros(dtype, (512, 1024), (8192, 1024), (8192,))
    monkeypatch.setattr(op_file, "_tile_for", lambda *_: tile)
    monkeypatch.setattr(op_file, "_has_tma", lambda device: False)
    return _compiled(
        monkeypatch,
        "_linear_geglu_fwd_kernel",
        lambda: op_file._forward(x, weight, bias, tf32, save_h),
        arch,
    )


def _moves(mix):
    return {op: n for op, n in mix.items() if op.startswith(("LDG.", "STG.", "LDGSTS", "UTMA"))}


@pytest.mark.parametrize(
    ("save_h", "bias"), [(False, True), (True, True), (False, False)], ids=["y", "h", "no bias"]
)
@pytest.mark.parametrize(("length", "n_in"), [("short", 1024), ("long", 4096)])
def test_hopper_gets_tensor_cores_and_tma_without_spills(monkeypatch, save_h, bias, length, n_in):
    x, weight, b = zeros(torch.bfloat16, (512, n_in), (8192, n_in), (8192,))
    compiled = _compiled(
        monkeypatch,
        "_linear_geglu_tma_kernel",
        lambda: op_file._forward(
            x, weight, b if bias else None, False, save_h, op_file._launch_tma
        ),
    )
    mix, tile = instruction_mix(compiled), op_file._TMA_TILES[length]
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
    assert compiled.spills == 0
    # two programs of a short K share a multiprocessor
    assert compiled.shared_bytes <= (227 if by_tma else 113) * 1024
    assert by_tma or compiled.registers * 32 * tile.num_warps <= 2**15
    # one exponential and one reciprocal for each element of y, and two more for whole numbers
    per_thread = tile.m * tile.n // (32 * tile.num_warps)
    assert mix["MUFU.EX2"] == per_thread
    assert per_thread <= mix["MUFU.RCP"] <= per_thread + 4


@pytest.mark.parametrize(("kind", "arch", "n"), [
    ("hopper", 90, 0), ("hopper", 90, 1), ("hopper", 90, 2),
    ("ampere", 80, 0), ("ampere", 80, 2), ("ampere", 120, 0),
])  # fmt: skip
def test_tiles_of_16_bits(monkeypatch, kind, arch, n):
    tile = op_file._TILES["half", kind][n]
    compiled = _forward_compiled(monkeypatch, tile, torch.bfloat16, arch)
    mix = instruction_mix(compiled)
    wide = arch == 90 and tile.m >= 64
    assert any(op.startswith("HGMMA" if wide else "HMMA") for op in mix), mix
    reads = {op for op in mix if op.startswith("LDGSTS")}
    assert reads and all(op.endswith(".128") for op in reads), reads
    assert {op for op in mix if op.startswith("STG")} <= {"STG.E.128", "STG.E.64"}
    assert compiled.spills == 0
    assert compiled.shared_bytes <= (227 if kind == "hopper" else 99) * 1024


@pytest.mark.parametrize(
    ("kind", "arch"), [("tf32x3", 90), ("tf32x3", 80), ("tf32", 80), ("double", 90)]
)
def test_tiles_of_full_precision(monkeypatch, kind, arch):
    dtype = torch.float64 if kind == "double" else torch.float32
    tile = op_file._TILES[kind, "hopper" if arch == 90 and kind == "tf32x3" else "ampere"][0]
    compiled = _forward_compiled(monkeypatch, tile, dtype, arch, tf32=kind == "tf32")
    mix = instruction_mix(compiled)
    rounded = [op for op in mix if "TF32" in op or "BF16" in op]
    assert bool(rounded) == (kind != "double"), rounded
    assert any(op.startswith("DMMA" if kind == "double" else ("HMMA", "HGMMA")) for op in mix)
    assert {op for op in mix if op.startswith("LDGSTS")} == {"LDGSTS.E.BYPASS.128"}
    assert compiled.spills == 0
    assert compiled.shared_bytes <= 99 * 1024


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_turing_runs_it_too(monkeypatch, dtype):
    compiled = _forward_compiled(monkeypatch, op_file._TILES["half", "turing"][0], dtype, 75)
    assert compiled.spills == 0
    assert compiled.shared_bytes <= 64 * 1024


@pytest.mark.parametrize(
    ("dtype", "has_db"),
    [(torch.float32, True), (torch.bfloat16, True), (torch.bfloat16, False)],
    ids=str,
)
def test_backward_moves_sixteen_bytes_at_once(monkeypatch, dtype, has_db):
    dy, h = zeros(dtype, (512, 4096), (512, 8192))
    monkeypatch.setattr(op_file, "_sum_rows", lambda partial, dtype: partial)
    compiled = _compiled(
        monkeypatch, "_linear_geglu_bwd_kernel", lambda: op_file._backward(dy, h, has_db)
    )
    mix = instruction_mix(compiled)
    assert mix["STG.E.128"] == 2 * dtype.itemsize, "two halves, 16 elements a thread"
    assert not [op for op in mix if op.startswith("LDG.")], "all loads go ahead, to shared memory"
    assert {op for op in mix if op.startswith("LDGSTS")} == {"LDGSTS.E.BYPASS.128"}
    assert (mix["STG.E"] > 0) == has_db
    assert compiled.spills == 0
    # one of each for an element, which both halves share, and a reciprocal more for a quotient of whole numbers
    assert mix["MUFU.EX2"] == 16
    assert 16 <= mix["MUFU.RCP"] <= 18


def test_few_rows_get_low_tiles_and_many_get_wide_ones(monkeypatch):
    if machine.HAS_GPU and torch.cuda.get_device_capability()[0] < 8:
        pytest.skip("this GPU has two tiles")
    monkeypatch.setattr(op_file, "_n_multiprocessors", lambda device: 132)
    device = machine.device()
    for dtype in (torch.bfloat16, torch.float32):
        tiles = op_file._tiles_for(dtype, False, device)
        for n_rows, n_hidden, which in [
            (16384, 4096, 0),
            (256, 2048 if dtype == torch.bfloat16 else 1024, 1),
            (33, 11008, 1),
            (1, 11008, 2),
            (128, 64, 2),
        ]:
            chosen = op_file._tile_for(n_rows, n_hidden, dtype, False, device)
            assert chosen is tiles[which], (dtype, n_rows, n_hidden)
    assert op_file._tiles_for(torch.float32, True, device) is op_file._TILES["tf32", "ampere"]


# --- the module ----------------------------------------------------------------------------------------------


def module(*args, **kwargs):
    torch.manual_seed(3)
    return LinearGEGLU(*args, device=machine.device(), **kwargs)


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
def test_the_module_is_a_linear_layer_and_a_gate(bias):
    torch.manual_seed(3)
    linear = torch.nn.Linear(24, 80, bias, device=machine.device())
    layer = module(24, 40, bias)
    x = torch.randn(2, 9, 24, device=machine.device())
    assert [n for n, _ in layer.named_parameters()] == [n for n, _ in linear.named_parameters()]
    for name, value in linear.state_dict().items():
        assert torch.equal(layer.state_dict()[name], value), "it begins as torch.nn.Linear does"
    value, gate = linear(x).chunk(2, dim=-1)
    assert_close(layer(x), value * F.gelu(gate, approximate="tanh"))


def test_states_go_from_a_linear_layer_and_back():
    linear, layer = torch.nn.Linear(24, 80), LinearGEGLU(24, 40)
    layer.load_state_dict(linear.state_dict())
    assert torch.equal(layer.weight, linear.weight)
    other = torch.nn.Linear(24, 80)
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other.bias, linear.bias)
    with pytest.raises(RuntimeError, match="size mismatch"):
        LinearGEGLU(24, 80).load_state_dict(linear.state_dict())


@pytest.mark.parametrize("recompute", [False, True])
def test_the_module_trains(recompute):
    layer = module(24, 40, recompute=recompute)
    again = copy.deepcopy(layer)
    x = torch.randn(17, 24, device=machine.device())
    layer(x).square().sum().backward()
    linear_geglu_eager(x, again.weight, again.bias).square().sum().backward()
    for a, b in zip(layer.parameters(), again.parameters()):
        assert_close(a.grad, b.grad)
    h = (17, 80)
    shapes = {tuple(t.shape) for t in kept(lambda x: layer(x), [x])}
    assert (h in shapes) != recompute


def test_the_module_says_what_it_is_and_takes_a_dtype():
    layer = module(24, 40, bias=False, dtype=torch.bfloat16)
    assert repr(layer) == "LinearGEGLU(in_features=24, hidden_features=40, bias=False)"
    x = torch.randn(5, 24, device=machine.device())
    assert layer(x.bfloat16()).dtype == torch.bfloat16
    assert layer.float()(x).dtype == torch.float32
    assert not isinstance(layer, torch.nn.Linear), (
        "tools that look for linear layers would lose the gate"
    )


# --- bad input -----------------------------------------------------------------------------------------------


@versions
def test_bad_input_is_refused_in_a_sentence(version):
    x, weight, bias = detached()
    name = "linear_geglu_op" if "registered" in version.__name__ else "linear_geglu_triton"
    meta = [t.to("meta") for t in (x, weight, bias)]
    wrong = {
        "integers": ((x.int(), weight, bias), TypeError, "floating-point"),
        "complex": ((x.to(torch.complex64), weight, bias), TypeError, "floating-point"),
        "W in another dtype": ((x, weight.half(), bias), TypeError, "cast one"),
        "b in another dtype": ((x, weight, bias.double()), TypeError, "cast one"),
        "a scalar": ((x[0, 0], weight, bias), ValueError, r"\(\.\.\., K\)"),
        "another width": ((x[:, :5], weight, bias), ValueError, r"weight\.t\(\)"),
        "W the other way": ((x, weight.t(), bias), ValueError, r"weight\.t\(\)"),
        "W with one dimension": ((x, weight[0], bias), ValueError, r"weight \(2H, K\)"),
        "W with three": ((x, weight[None], bias), ValueError, r"weight \(2H, K\)"),
        "odd rows of W": ((x, weight[1:], bias[1:]), ValueError, "79 rows; it needs an even number"),
        "too many rows": ((x, weight[:1].expand(2**24 + 2, 24), None), ValueError, r"at most 2\*\*24"),
        "a short bias": ((x, weight, bias[1:]), ValueError, r"bias must .*\(80,\)"),
        "half a bias": ((x, weight, bias[:40]), ValueError, r"bias must .*\(80,\)"),
        "a bias for each row": ((x, weight, bias[None]), ValueError, r"bias must .*\(80,\)"),
        "no device": (meta, ValueError, "linear_geglu_eager"),
    }  # fmt: skip
    if name == "linear_geglu_triton":  # the registered op's own schema refuses these
        wrong["a list"] = ((x.tolist(), weight, bias), TypeError, "must be a torch.Tensor")
        wrong["a list for W"] = ((x, weight.tolist(), bias), TypeError, "must be a torch.Tensor")
        wrong["a number for b"] = ((x, weight, 0.5), TypeError, "must be a torch.Tensor")
        wrong["another device"] = ((x, meta[1], bias), ValueError, "one device")
        wrong["b on another"] = ((x, weight, meta[2]), ValueError, "one device")
    if name == "linear_geglu_op":
        del wrong["no device"]  # shapes alone: what torch.compile asks it for
    for what, (bad, kind, message) in wrong.items():
        with pytest.raises(kind, match=f"{name}: .*{message}") as caught:
            version(*bad)
        assert len(str(caught.value)) > 40, what


@pytest.mark.gpu
@wrappers
def test_cpu_input_on_a_gpu_machine(version):
    with pytest.raises(ValueError, match="linear_geglu_eager"):
        version(*tensors(device=torch.device("cpu")))
