"""fused_mlp: what test_ops asks of other ops, for x, two weights and two biases, in each of its three ways."""

import functools
import math

from lib import machine
from lib.measure.check import CheckError, check_against_float64
from lib.nogpu.compile_only import compile_for, instruction_mix, signature_of
from lib.nogpu.memory import count_traffic
from lib.ops import fused_mlp as op_file
from lib.ops.fused_mlp import fused_mlp_eager, fused_mlp_op, fused_mlp_triton
from lib.tests.ops import cases
from lib.tests.ops.test_ops import DTYPES, _count_compilations, assert_close

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

# (M, K, H, N)
SMALL = (17, 33, 70, 9)
CASES = [
    (1, 1, 1, 1),
    SMALL,
    (129, 77, 33, 1),
    (5, 13, 130, 3),
    (18, 16, 40, 100),
    (0, 5, 7, 3),
    (5, 0, 7, 3),
    (3, 5, 0, 4),
    (4, 5, 6, 0),
]
BIG = [(1823, 781, 333, 201), (128, 512, 256, 1), (2048, 13, 512, 256), (20_001, 256, 64, 16)]
FINALS = ("sigmoid", "relu", "identity")
NAMES = ("x", "weight1", "bias1", "weight2", "bias2")


def tensors(case=SMALL, dtype=torch.float32, lead=None, device=None, apart=1e-4):
    """x, (M, K) or (*lead, K), weights and biases: leaves that require grad.

    No hidden unit is within `apart` of zero: there another order of the same sum may turn its gradient off.
    """
    m, k, h, n = case
    shapes = [(*(lead or (m,)), k), (h, k), (h,), (n, h), (n,)]
    scales = [1, max(1, k) ** -0.5, 1, max(1, h) ** -0.5, 1]
    made = [torch.randn(shape, device=device or machine.device()) for shape in shapes]
    x, w1, b1, *rest = [(t * scale).to(dtype) for t, scale in zip(made, scales)]
    b1[b1.abs() < 2 * apart] = 1.0
    if x.numel() and h:
        x[(F.linear(x.double(), w1.double(), b1.double()).abs() < apart).any(-1)] = 0.0
    return [t.requires_grad_() for t in (x, w1, b1, *rest)]


def detached(*args, **kwargs):
    return [t.detach() for t in tensors(*args, **kwargs)]


def registered(*inputs, final="sigmoid"):
    return fused_mlp_op(*inputs, final)


def bound(version, **kwargs):
    """`version` with keyword arguments, and its name kept for messages."""
    return functools.wraps(version)(functools.partial(version, **kwargs))


def check(version, inputs, final="sigmoid", name=None, eager=fused_mlp_eager):
    """check_against_float64, with one unit in the last place more for 16 bits.

    Of few numbers eager's own largest error is small by luck. What it is on average, and so for many, is
    compared in test_errors_are_on_average_those_of_eager.
    """
    x = inputs[0]
    slack = torch.finfo(x.dtype).eps if x.itemsize == 2 else 1e-6
    version, eager = (f if final == "sigmoid" else bound(f, final=final) for f in (version, eager))
    return check_against_float64(version, eager, *inputs, slack=slack, name=name)


versions = pytest.mark.parametrize(
    "version", [fused_mlp_triton, registered], ids=lambda v: v.__name__
)
finals = pytest.mark.parametrize("final", FINALS)
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def _go(monkeypatch, way):
    """Let every call go this way, whatever the tables say."""
    op_file._plan.cache_clear()
    for name, value in cases.way_of_fused_mlp(op_file, way).items():
        monkeypatch.setattr(op_file, name, value)


@pytest.fixture(params=["one kernel", "split", "cublas"])
def way(request, monkeypatch):
    _go(monkeypatch, request.param)
    yield request.param
    op_file._plan.cache_clear()


# --- values and gradients ------------------------------------------------------------------------------------


@versions
@dtypes
def test_equals_float64(version, dtype, way):
    for case in CASES:
        check(version, tensors(case, dtype), name=str(case))


@dtypes
@finals
def test_every_final(dtype, final, way):
    for case in [SMALL, (5, 0, 7, 3), (20, 16, 40, 1)]:
        check(fused_mlp_triton, tensors(case, dtype), final, name=str(case))
    check(registered, tensors(dtype=dtype), final)


@dtypes
@finals
def test_errors_are_on_average_those_of_eager(dtype, final):
    """Of y and of each gradient, against float64: the root of the mean square."""
    inputs = tensors((120, 70, 90, 20), dtype)
    exact = [t.detach().double().requires_grad_() for t in inputs]
    dy = torch.randn(120, 20, device=machine.device()).to(dtype)

    def run(version, leaves, dy):
        y = version(*leaves, final)
        return [y.detach(), *torch.autograd.grad(y, leaves, dy)]

    found = (
        run(fused_mlp_triton, inputs, dy),
        run(fused_mlp_eager, inputs, dy),
        run(fused_mlp_eager, exact, dy.double()),
    )
    for name, got, own, want in zip(("y", *NAMES), *found):
        ours, eagers = ((t.double() - want).square().mean().sqrt() for t in (got, own))
        allowed = 1.25 * eagers + 1e-6 * want.abs().max()
        assert ours <= allowed, f"{name}: {ours:.1e}, eager's {eagers:.1e}"


def test_what_is_left_to_cublas():
    """Shapes at each limit, and just past it."""
    stays = [(1, 2048, 16, 16), (65536, 767, 256, 1), (2048, 768, 256, 1), (1024, 1535, 1024, 1)]
    goes = [(1, 2049, 16, 16), (65536, 768, 256, 1), (2049, 768, 256, 1), (1024, 1536, 1024, 1)]
    goes += [(1, 16, 2049, 16), (1, 16, 16, 257), (2**15 + 1, 256, 256, 256)]
    stays += [(2**15, 256, 256, 256), (65536, 448, 256, 64)]
    stays += [(128, 512, 256, 1), (65536, 512, 256, 1), (128, 1008, 1024, 16)]
    assert not any(op_file._by_cublas(*shape, "half") for shape in stays)
    assert all(op_file._by_cublas(*shape, "half") for shape in goes)
    # in float32 three products for one bring cuBLAS's nearer; float64 is never split
    assert op_file._by_cublas(1, 16, 16, 65, "tf32x3")
    assert not op_file._by_cublas(128, 1009, 1024, 16, "tf32x3")
    assert op_file._by_cublas(1, 768, 16, 1, "double")
    assert not op_file._by_cublas(1, 767, 16, 1, "double")


def test_a_long_walk_is_split(monkeypatch):
    monkeypatch.setattr(op_file, "_n_multiprocessors", lambda device: 132)
    plan = op_file._plan.__wrapped__

    def n_splits(*shape, kind="half"):
        return plan(*shape, kind, machine.device()).n_splits

    assert n_splits(128, 767, 256, 1) == 1 < n_splits(128, 768, 256, 1)
    assert (
        n_splits(128, 255, 256, 1, kind="tf32x3") == 1 < n_splits(128, 256, 256, 1, kind="tf32x3")
    )
    # a part for each 64 units, or for each multiprocessor that 16 tiles of 64 rows leave
    assert (n_splits(16, 512, 512, 1), n_splits(1024, 512, 1024, 1)) == (8, 8)
    # whoever takes the way of many rows is not split
    assert n_splits(65536, 512, 256, 1) == n_splits(65536, 767, 256, 1) == 1


def test_the_ways_are_what_they_are_called(monkeypatch):
    inputs = detached((20, 16, 200, 9))
    for way, launches in (("one kernel", 1), ("split", 2), ("cublas", 0)):
        with monkeypatch.context() as patch:
            _go(patch, way)
            assert count_traffic(lambda: fused_mlp_triton(*inputs)).launches == launches, way
    op_file._plan.cache_clear()


@versions
@pytest.mark.parametrize("lead", [(2, 3), (), (1, 0, 4), (2, 1, 5)], ids=str)
def test_leading_dimensions(version, lead):
    inputs = tensors()
    x = inputs[0].detach()[: max(1, math.prod(lead))].clone()
    inputs[0] = x.view(lead + (33,)) if math.prod(lead) else x.new_empty(*lead, 33)
    inputs[0].requires_grad_()
    check(version, inputs)


def test_all_hidden_units_of_a_row_count(way):
    """Whole numbers: each unit that is missing or counted twice shows. y is 1 + 2 + … + H everywhere."""
    for n_hidden in (1, 33, 300):
        for n in (1, 5):
            x = torch.zeros(40, 7, device=machine.device())
            numbers = torch.arange(1.0, n_hidden + 1, device=x.device)
            ones = torch.ones(n, n_hidden, device=x.device)
            weights = (ones[:1].T.expand(-1, 7), numbers, ones, 0 * ones[:, 0])
            y = fused_mlp_triton(x, *weights, final="identity")
            assert (y == n_hidden * (n_hidden + 1) / 2).all(), (n_hidden, n)


def test_a_tile_taken_for_the_row_is_not_right():
    """The mistake that a whole MLP in one kernel invites: 32 units made, 32 used, the others forgotten."""

    def wrong(x, w1, b1, w2, b2):
        hidden = torch.relu(F.linear(x, w1[:32], b1[:32]))
        return torch.sigmoid(F.linear(hidden, w2[:, :32], b2))

    check(wrong, tensors((8, 16, 32, 8)), name="as long as all fit into the tile")
    with pytest.raises(CheckError, match="differ"):
        check(wrong, tensors((8, 16, 33, 8)))


@pytest.mark.gpu
@versions
@dtypes
@finals
def test_equals_float64_at_real_sizes(version, dtype, final):
    for case in BIG:
        check(version, tensors(case, dtype), final, name=str(case))


@pytest.mark.gpu
def test_tf32_only_where_asked_for(way):
    """Ten bits of mantissa where allowed; without, the error of float32."""
    inputs = tensors((300, 512, 256, 64))
    want = fused_mlp_eager(*(t.double() for t in inputs), final="identity")
    errors = [
        float((fused_mlp_triton(*inputs, "identity", allow).double() - want).abs().max())
        for allow in (False, True)
    ]
    assert errors[0] < 5e-6
    assert errors[1] < 2e-2
    if way != "cublas" and torch.cuda.get_device_capability()[0] >= 8:
        assert errors[1] > 2e-5, "no tensor cores used"


def test_tf32_runs_everywhere(way):
    """In the interpreter it is float32 (the table of its tiles is used all the same)."""
    version = bound(fused_mlp_triton, allow_tf32=True)
    if not machine.HAS_GPU:
        return check(version, tensors())
    inputs = tensors(apart=1e-2)
    dy = torch.randn(17, 9, device=machine.device())
    found = [torch.autograd.grad(v(*inputs), inputs, dy) for v in (version, fused_mlp_eager)]
    for got, want in zip(*found):
        assert (got - want).norm() < 1e-2 * want.norm()
    return None


def test_a_chain_of_layers():
    """DLRM's bottom and top MLP: each two layers are one call."""
    widths = (13, 64, 32, 16, 8)
    x, *_ = detached((37, 13, 1, 1))
    layers = [torch.nn.Linear(a, b, device=x.device) for a, b in zip(widths, widths[1:])]
    want = x
    for layer in layers:
        want = torch.relu(layer(want))
    got = x
    for first, second in zip(layers[::2], layers[1::2]):
        got = fused_mlp_triton(got, first.weight, first.bias, second.weight, second.bias, "relu")
    assert_close(got, want)
    parameters = [p for layer in layers for p in layer.parameters()]
    dy = torch.randn_like(want)
    found = [torch.autograd.grad(y, parameters, dy) for y in (got, want)]
    for a, b in zip(*found):
        assert_close(a, b)


# --- layouts in memory ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_strides(dtype):
    """Each matrix in each layout; x in four dimensions too."""
    inputs = detached((9, 20, 34, 6), dtype)
    for k in (0, 1, 3):
        for layout, strided in cases.layouts(inputs[k]).items():
            if k and strided.dim() != 2:
                continue
            values = [*inputs]
            values[k] = strided
            leaves = [t.detach().requires_grad_() for t in values]
            check(fused_mlp_triton, leaves, name=f"{NAMES[k]} {layout}")


def test_strided_biases(way):
    x, w1, b1, w2, b2 = tensors()
    check(fused_mlp_triton, (x, w1, cases.spread(b1), w2, b2), name="bias1")
    check(fused_mlp_triton, (x, w1, b1, w2, cases.spread(b2)), name="bias2")
    b1, b2 = (t[:1].detach().expand(t.shape).requires_grad_() for t in (b1, b2))
    check(fused_mlp_triton, (x, w1, b1, w2, b2), name="expanded")


@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    case=st.tuples(st.integers(0, 40), st.integers(0, 40), st.integers(0, 70), st.integers(0, 20)),
    steps=st.tuples(*[st.integers(1, 3)] * 6),
    transposed=st.tuples(*[st.booleans()] * 3),
)
def test_any_strides(case, steps, transposed):
    """Any sliced or transposed view gives the values of its contiguous copy; what is between is not read."""
    x, w1, b1, w2, b2 = detached(case)
    views = [_spread(t, steps[2 * k : 2 * k + 2], transposed[k]) for k, t in enumerate((x, w1, w2))]
    got = fused_mlp_triton(views[0], views[1], b1, views[2], b2)
    assert_close(got, fused_mlp_triton(x, w1, b1, w2, b2))


def _spread(t, steps, transposed):
    m, n = t.shape
    big = (n * steps[1], m * steps[0]) if transposed else (m * steps[0], n * steps[1])
    base = torch.full(big, float("nan"), device=t.device)
    view = (base.T if transposed else base)[:: steps[0], :: steps[1]]
    return view.copy_(t)


# --- NaN and infinities --------------------------------------------------------------------------------------


@dtypes
def test_nan_and_infinities(dtype, way):
    for n in (5, 1):
        inputs = tensors((12, 20, 40, n), dtype)
        with torch.no_grad():
            inputs[0][1, 3], inputs[0][2, 5] = float("nan"), float("inf")
            inputs[0][3, 19], inputs[0][4], inputs[0][5] = -float("inf"), float("nan"), 1e4
        check(fused_mlp_triton, inputs, name=f"x, N = {n}")
        for k, place in ((1, (7, 3)), (2, (9,)), (3, (0, 11)), (4, (0,))):
            for special in (float("nan"), float("inf"), -float("inf")):
                inputs = tensors((12, 20, 40, n), dtype)
                with torch.no_grad():
                    inputs[k][place] = special
                check(fused_mlp_triton, inputs, name=f"{NAMES[k]} with {special}, N = {n}")


@finals
def test_nan_passes_both_relus(final, way):
    inputs = detached()
    inputs[0][3, 4] = float("nan")
    y = fused_mlp_triton(*inputs, final=final)
    assert y[3].isnan().all()
    assert not y[:3].isnan().any()
    assert not y[4:].isnan().any()


def test_infinite_units_do_not_meet_those_that_are_not_there(way):
    """x of infinity and H = 33: in a tile of 64, 0·inf would be NaN."""
    x, w1, b1, w2, b2 = detached((4, 5, 33, 1))
    w1, w2, x[2] = w1.abs(), w2.abs(), float("inf")
    y = fused_mlp_triton(x, w1, b1, w2, b2, final="identity")
    assert torch.isposinf(y[2]).all()
    assert torch.isfinite(y[[0, 1, 3]]).all()


def test_rows_that_are_not_there_meet_no_infinity(way):
    """W2 with infinity, four rows in a tile of 16 or more: 0·inf would be NaN, in the sum that db1 is."""
    x, w1, b1, w2, b2 = (t.abs() for t in detached((4, 5, 33, 3)))
    w2[:, 11] = float("inf")
    b1.requires_grad_()
    fused_mlp_triton(x, w1, b1, w2, b2, final="identity").sum().backward()
    assert torch.isposinf(b1.grad[11])
    assert torch.isfinite(b1.grad[:11]).all()


def test_large_sums_saturate(way):
    inputs = detached((6, 8, 20, 3))
    inputs[4][:] = torch.tensor([1e4, -1e4, 0.0])
    y = fused_mlp_triton(*inputs)
    assert (y[:, 0] == 1).all()
    assert (y[:, 1] == 0).all()


# --- gradients -----------------------------------------------------------------------------------------------


@versions
def test_gradient_of_a_sum_has_stride_zero(version, way):
    inputs, again = tensors(), tensors()
    for a, b in zip(inputs, again):
        b.data.copy_(a.data)
    version(*inputs).sum().backward()
    fused_mlp_eager(*again).sum().backward()
    for got, want in zip(inputs, again):
        assert_close(got.grad, want.grad)


def test_gradients_of_any_strides(way):
    inputs = tensors()
    transposed = torch.randn(9, 17, device=machine.device()).T
    gaps = torch.randn(17, 20, device=machine.device())[:, 1:19:2]
    for dy in (transposed, gaps, transposed[:1].expand(17, 9)):
        got = torch.autograd.grad(fused_mlp_triton(*inputs), inputs, dy)
        want = torch.autograd.grad(fused_mlp_eager(*inputs), inputs, dy)
        for a, b in zip(got, want):
            assert_close(a, b)


@versions
def test_second_backward_gives_the_same(version, way):
    inputs = tensors()
    y = version(*inputs)
    dy = torch.randn_like(y)
    before = dy.clone()
    first = torch.autograd.grad(y, inputs, dy, retain_graph=True)
    first = [t.clone() for t in first]
    second = torch.autograd.grad(y, inputs, dy)
    assert all(torch.equal(a, b) for a, b in zip(first, second))
    assert torch.equal(dy, before)


@versions
@finals
def test_only_the_gradients_asked_for(version, final, way):
    inputs = tensors()
    version, eager = (functools.partial(f, final=final) for f in (version, fused_mlp_eager))
    for some in [*([k] for k in range(5)), [0, 4], [1, 2], [3, 4], [2, 4], [0, 1, 3]]:
        leaves = [t if k in some else t.detach() for k, t in enumerate(inputs)]
        check_against_float64(version, eager, *leaves, name=f"gradients of {some}")


@versions
def test_second_derivative_raises(version, way):
    inputs = tensors()
    dy = torch.randn(17, 9, device=machine.device(), requires_grad=True)
    (dx,) = torch.autograd.grad(version(*inputs), inputs[:1], dy, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable|no autograd formula"):
        dx.sum().backward()


@pytest.mark.parametrize("k", [0, 1, 2, 3, 5], ids=["x", "weight1", "bias1", "weight2", "y"])
def test_what_is_saved_and_then_changed_is_noticed(k):
    values = [t * 1 for t in tensors()]
    y = fused_mlp_triton(*values)
    [*values, y][k].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_checkpoint(way):
    from torch.utils.checkpoint import checkpoint

    inputs = tensors()
    again = [t.detach().requires_grad_() for t in inputs]
    checkpoint(fused_mlp_triton, *inputs, use_reentrant=False).square().sum().backward()
    fused_mlp_triton(*again).square().sum().backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(inputs, again))


@pytest.mark.parametrize("inside", [False, True], ids=["backward outside", "backward inside"])
def test_autocast(way, inside):
    inputs = tensors()
    again = [t.detach().requires_grad_() for t in inputs]
    losses = []
    for version, leaves in ((fused_mlp_triton, inputs), (fused_mlp_eager, again)):
        with torch.autocast(machine.device().type, dtype=torch.bfloat16):
            y = version(*leaves)
            losses.append((y.float() ** 2).sum())
            assert y.dtype == torch.bfloat16
            if inside:
                losses[-1].backward()
        if not inside:
            losses[-1].backward()
    for a, b in zip(inputs, again):
        assert a.grad.dtype == b.grad.dtype
        assert_close(a.grad, b.grad, torch.bfloat16)


def test_backward_inside_autocast_stays_float32(way):
    """The products of a float32 backward pass must not be rounded by an autocast that is on by then."""
    inputs = tensors()
    y, dy = fused_mlp_triton(*inputs), torch.randn(17, 9, device=machine.device())
    want = torch.autograd.grad(y, inputs, dy, retain_graph=True)
    with torch.autocast(machine.device().type, dtype=torch.bfloat16):
        got = torch.autograd.grad(y, inputs, dy)
    assert all(torch.equal(a, b) for a, b in zip(got, want))


def test_vmap_raises(way):
    inputs = detached()
    with pytest.raises(RuntimeError, match="functorch|vmap|BatchedTensor"):
        torch.vmap(fused_mlp_triton, in_dims=(0, *[None] * 4))(inputs[0][None], *inputs[1:])


def test_same_bits_every_time(way):
    inputs = tensors((65, 65, 200, 17))
    dy = torch.randn(65, 17, device=machine.device())
    runs = [torch.autograd.grad(fused_mlp_triton(*inputs), inputs, dy) for _ in range(3)]
    assert all(torch.equal(a, b) for run in runs[1:] for a, b in zip(runs[0], run))


def test_inputs_and_gradients_share_no_memory():
    inputs = tensors()
    dy = torch.randn(17, 9, device=machine.device())
    gradients = torch.autograd.grad(fused_mlp_triton(*inputs, final="identity"), inputs, dy)
    storages = {t.untyped_storage().data_ptr() for t in (*inputs, dy)}
    assert not storages & {t.untyped_storage().data_ptr() for t in gradients}


# --- torch.library and torch.compile --------------------------------------------------------------------------


def op_cases():
    x, w1, b1, w2, b2 = detached((6, 5, 7, 4))
    strided = (x.view(2, 3, 5).transpose(0, 1), w1.T.contiguous().T, b1, w2.T.contiguous().T, b2)
    return [
        tensors((5, 3, 7, 4)),
        tensors((4, 20, 9, 1)),
        tensors((0, 4, 3, 2)),
        tensors((3, 0, 5, 2)),
        [t.detach().requires_grad_() for t in strided],
    ]


def _opcheck(inputs, final):
    torch.library.opcheck(fused_mlp_op, (*inputs, final))
    inputs = [t.detach() for t in inputs]
    y = fused_mlp_eager(*inputs, final)
    saved = None if final == "identity" else y
    for wanted in ([True] * 5, [True, False, True, False, False]):
        args = (torch.randn_like(y), *inputs[:4], saved, final, False, wanted)
        torch.library.opcheck(op_file._fused_mlp_backward_op, args)


@pytest.mark.parametrize("n", range(5))
def test_opcheck(n):
    _opcheck(op_cases()[n], "sigmoid")


def test_opcheck_of_every_way(way):
    _opcheck(op_cases()[4], "identity")


@versions
def test_gradcheck(version):
    for n in (2, 1):
        assert torch.autograd.gradcheck(version, tensors((2, 3, 4, n), torch.float64))


@finals
def test_gradcheck_of_every_way(final, way):
    inputs = tensors((3, 4, 18, 2), torch.float64)
    assert torch.autograd.gradcheck(bound(fused_mlp_triton, final=final), inputs, fast_mode=True)


def test_compile_fullgraph():
    def definition(x, *rest):
        return fused_mlp_eager(x * 2, *rest).square()

    compiled = torch.compile(
        lambda x, *rest: fused_mlp_triton(x * 2, *rest).square(), fullgraph=True
    )
    for case in [SMALL, (5, 33, 70, 9), (6, 8, 4, 1)]:
        check(compiled, tensors(case), eager=definition)
        with torch.no_grad():
            inputs = tensors(case)
            assert_close(compiled(*inputs), definition(*inputs))


@finals
def test_compile_every_way_and_final(final, way):
    torch._dynamo.reset()
    compiled = torch.compile(fused_mlp_triton, fullgraph=True, backend="aot_eager")
    for case in [SMALL, (6, 8, 40, 1)]:
        check(compiled, tensors(case), final, name=str(case))
    frozen = tensors()
    frozen[1:3] = [t.detach() for t in frozen[1:3]]
    check(compiled, frozen, final, name="a frozen layer")


def test_compile_under_autocast():
    torch._dynamo.reset()
    compiled = torch.compile(fused_mlp_triton, fullgraph=True, backend="aot_eager")
    inputs = tensors()
    with torch.autocast(machine.device().type, dtype=torch.bfloat16):
        y = compiled(*inputs)
    assert y.dtype == torch.bfloat16
    assert_close(y.float(), fused_mlp_eager(*inputs), torch.bfloat16)


# --- traffic and launches ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("n", [1, 24])
def test_traffic_of_one_kernel(dtype, n, monkeypatch):
    """x, weights and y, once each: the hidden layer is in none of it."""
    _go(monkeypatch, "one kernel")
    inputs = detached((100, 40, 200, n), dtype)
    traffic = count_traffic(lambda: fused_mlp_triton(*inputs))
    y_bytes = 100 * n * dtype.itemsize
    assert traffic.launches == 1
    assert traffic.bytes_moved == sum(t.nbytes for t in inputs) + y_bytes
    by = {name.rpartition(".")[2]: a for name, a in traffic.by_argument.items()}
    assert by["y_ptr"].stored == y_bytes, "y is written more than once"
    op_file._plan.cache_clear()


def test_traffic_of_a_split(monkeypatch):
    """The parts of the sum, float32, come on top: written, and read again."""
    _go(monkeypatch, "split")
    inputs = detached((40, 32, 200, 24))
    plan = op_file._plan(40, 32, 200, 24, "tf32x3", inputs[0].device)
    assert plan.n_splits > 1
    traffic = count_traffic(lambda: fused_mlp_triton(*inputs))
    assert traffic.launches == 2
    parts = plan.n_splits * 40 * 24 * 4
    assert traffic.bytes_moved == sum(t.nbytes for t in inputs) + 40 * 24 * 4 + 2 * parts
    op_file._plan.cache_clear()


def test_launches_of_the_backward_pass(monkeypatch):
    """All gradients: two kernels and three products. What nobody wants is not computed."""
    _go(monkeypatch, "one kernel")
    products = []
    multiply = torch.mm
    monkeypatch.setattr(torch, "mm", lambda *a, **kw: products.append(1) or multiply(*a, **kw))
    for some, launches, n_products in [
        ([0, 1, 2, 3, 4], 2, 3),
        ([0], 1, 1),
        ([1, 2], 2, 1),
        ([3, 4], 2, 1),
        ([1, 3], 1, 2),
    ]:
        inputs = [t if k in some else t.detach() for k, t in enumerate(tensors())]
        y = fused_mlp_triton(*inputs)
        dy = torch.randn_like(y)
        products.clear()
        leaves = [inputs[k] for k in some]
        traffic = count_traffic(
            lambda y=y, leaves=leaves, dy=dy: torch.autograd.grad(y, leaves, dy)
        )
        assert (traffic.launches, len(products)) == (launches, n_products), some
    op_file._plan.cache_clear()


def test_the_hidden_layer_is_saved_only_where_cublas_made_it(way):
    inputs = tensors()
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        y = fused_mlp_triton(*inputs)
    expected = {t.data_ptr() for t in (*inputs[:4], y)}
    more = [t.shape for t in saved if t.data_ptr() not in expected]
    assert more == ([(17, 70)] if way == "cublas" else [])


# --- sizes past what 32 bits hold -----------------------------------------------------------------------------


def far_in_columns(t):
    """The numbers of t, (M, 3), columns 2**30 apart."""
    far = cases.far_apart(t.dtype, t.device)[:, : t.shape[0]].T
    return far.copy_(t)


@pytest.mark.parametrize("k", [0, 1, 3], ids=["x", "weight1", "weight2"])
@pytest.mark.parametrize("by_columns", [False, True], ids=["rows", "columns"])
@pytest.mark.parametrize("n", [1, 3])
def test_offsets_past_two_to_the_31(k, by_columns, n, monkeypatch):
    _go(monkeypatch, "one kernel")
    if by_columns:
        case = (5, 16, 3, n) if k == 3 else (5, 3, 16, n)
        far = far_in_columns(detached(case, torch.float16)[k])
    else:
        far = cases.far_apart(torch.float16, machine.device())
        case = {0: (3, 16, 8, n), 1: (5, 16, 3, n), 3: (5, 6, 16, 3)}[k]
    values = detached(case, torch.float16)
    assert values[k].shape == far.shape
    values[k] = far
    leaves = [t.detach().requires_grad_() for t in values]
    check(fused_mlp_triton, leaves, eager=cases.near(fused_mlp_eager))
    op_file._plan.cache_clear()


@pytest.mark.parametrize("by_columns", [False, True], ids=["rows", "columns"])
def test_gradient_offsets_past_two_to_the_31(by_columns):
    case = (5, 4, 8, 3) if by_columns else (3, 4, 8, 16)
    inputs = tensors(case, torch.float16)
    dy = cases.far_apart(torch.float16, machine.device())
    dy = far_in_columns(torch.randn(5, 3).to(dy)) if by_columns else dy
    got = torch.autograd.grad(fused_mlp_triton(*inputs), inputs, dy)
    want = torch.autograd.grad(fused_mlp_eager(*inputs), inputs, dy.contiguous())
    for a, b in zip(got, want):
        assert_close(a, b, torch.float16)


@pytest.mark.gpu
def test_more_than_two_to_the_31_elements(monkeypatch):
    if torch.cuda.mem_get_info()[0] < 60e9:
        pytest.skip("needs 60 GB of GPU memory")
    _go(monkeypatch, "one kernel")
    m, k = 2**25 + 3, 80  # x: 2.7e9 elements; y as many
    x, w1, b1, w2, b2 = detached((1, k, 32, 80), torch.bfloat16)
    x = torch.randn(m, k, dtype=torch.bfloat16, device=w1.device)
    x.requires_grad_()
    y = fused_mlp_triton(x, w1, b1, w2, b2)
    (dx,) = torch.autograd.grad(y, [x], y.detach())
    for rows in (slice(0, 3), slice(-3, None)):
        part = x.detach()[rows].requires_grad_()
        want = fused_mlp_eager(part, w1, b1, w2, b2)
        assert_close(y.detach()[rows], want.detach(), torch.bfloat16)
        want.backward(y.detach()[rows])
        assert_close(dx[rows], part.grad, torch.bfloat16)
    op_file._plan.cache_clear()


def test_many_rows():
    """More than 65535 tiles of them would not start as the second dimension of a grid."""
    if machine.HAS_GPU:
        check(fused_mlp_triton, tensors((16 * 70_000, 3, 4, 2)))
    check(fused_mlp_triton, tensors((5000, 3, 4, 2)))


# --- on a GPU ------------------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_cuda_graph(way):
    inputs = detached((257, 128, 200, 24))
    fused_mlp_triton(*inputs)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = fused_mlp_triton(*inputs)
    for t in inputs:
        t.normal_()
    graph.replay()
    assert torch.equal(y, fused_mlp_triton(*inputs))


@pytest.mark.gpu
def test_cuda_graph_of_a_training_step(way):
    inputs = tensors((257, 128, 200, 24))
    dy = torch.randn(257, 24, device=machine.device())

    def step():
        return torch.autograd.grad(fused_mlp_triton(*inputs), inputs, dy)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        gradients = step()
    with torch.no_grad():
        for t in inputs:
            t.normal_()
    graph.replay()
    for a, b in zip(gradients, step()):
        assert_close(a, b)


@pytest.mark.gpu
def test_current_stream():
    """A launch on the default stream would read x before the long kernels of this stream have written it."""
    inputs = detached((65536, 512, 64, 16), torch.bfloat16)
    fused_mlp_triton(*inputs)
    want = fused_mlp_eager(inputs[0] + 64, *inputs[1:])
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        x = inputs[0]
        for _ in range(64):
            x = x + 1
        got = fused_mlp_triton(x, *inputs[1:])
    torch.cuda.synchronize()
    torch.testing.assert_close(got, want, rtol=0.3, atol=0.3)


@pytest.mark.gpu
def test_second_gpu(way):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    check(fused_mlp_triton, tensors(device=torch.device("cuda:1")))


@pytest.mark.gpu
def test_no_host_sync(way):
    inputs = tensors()
    fused_mlp_triton(*inputs).sum().backward()
    torch.cuda.set_sync_debug_mode("error")
    try:
        fused_mlp_triton(*inputs).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.parametrize("way", ["one kernel", "split"])
def test_another_number_of_rows_does_not_compile_again(way, monkeypatch):
    _go(monkeypatch, way)
    with _count_compilations() as compiled:
        for rows in (1000, 1001, 992, 17, 1):
            fused_mlp_triton(*tensors((rows, 512, 256, 16))).sum().backward()
            if rows == 1000:
                compiled.clear()
    op_file._plan.cache_clear()
    assert not compiled, compiled


# --- machine code --------------------------------------------------------------------------------------------


class _Noted:
    """Stands in for the kernel: notes what it is launched with."""

    def __getitem__(self, grid):
        return self

    def __call__(self, *args, **kwargs):
        self.args, self.kwargs = args, kwargs


def _machine_code(case, dtype, allow_tf32, back, monkeypatch, arch=90):
    """The kernel that a GPU of `arch` would get for this case, compiled."""
    name, noted = "_fused_mlp_bwd_kernel" if back else "_fused_mlp_fwd_kernel", _Noted()
    kernel, kind = getattr(op_file, name), op_file._kind(dtype, allow_tf32)
    _go(monkeypatch, "one kernel")
    monkeypatch.setattr(op_file, name, noted)
    monkeypatch.setattr(op_file, "_sum_rows", lambda partial, _: partial[0])
    monkeypatch.setattr(op_file, "_has_tensor_cores", lambda device: arch >= 80)
    m, k, h, n = case
    shapes = ((m, k), (h, k), (h,), (n, h), (n,), (m, n))
    x, w1, b1, w2, b2, y = (
        torch.empty(shape, dtype=dtype, device=machine.device()) for shape in shapes
    )
    if back:
        args = (y.clone(), x, w1, b1, w2, y, None, "sigmoid", kind, [True] * 5)
        op_file._launch_backward(*args)
    else:
        op_file._launch_forward(y, x, w1, b1, w2, b2, "sigmoid", kind)
    monkeypatch.setattr(op_file, name, kernel)
    options = {n: noted.kwargs.pop(n) for n in ("num_warps", "num_stages")}
    compiled = compile_for(
        kernel, signature_of(kernel, *noted.args, **noted.kwargs), arch=arch, **options
    )
    op_file._plan.cache_clear()
    return compiled


# DLRM's layers: a small batch, a large one, and one that fills the GPU
DLRM = [(128, 512, 256, 1), (2048, 256, 64, 16), (20_000, 512, 256, 256)]
PRODUCTS = {
    "half": ("HMMA.16816", "HGMMA.64"),
    "tf32": ("HMMA.1688", "HGMMA.64"),
    "tf32x3": ("HMMA.1688", "HGMMA.64"),
}


@pytest.mark.parametrize("back", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("kind", PRODUCTS)
def test_tensor_cores_wide_loads_and_no_spills(kind, back, monkeypatch):
    dtype = torch.bfloat16 if kind == "half" else torch.float32
    wide = DLRM[2] if kind != "tf32x3" else (20_000, 512, 256, 64)
    for case in [*DLRM[: 2 if kind == "half" else 1], wide]:
        compiled = _machine_code(case, dtype, kind == "tf32", back, monkeypatch)
        mix = instruction_mix(compiled)
        assert compiled.spills == 0, (case, compiled)
        assert compiled.shared_bytes <= 99 * 1024, "more than a program may have on most GPUs"
        few, many = PRODUCTS[kind]
        wanted = many if case is wide else (few, many)
        assert any(op.startswith(wanted) for op in mix), (case, mix)
        assert "LDGSTS.E.BYPASS.128" in mix, (case, mix)  # 16 bytes from global to shared memory
        assert "LDGSTS.E" not in mix or kind == "tf32", (case, mix)


def test_the_sum_of_parts_compiles():
    kernel = op_file._fused_mlp_sum_kernel
    for dtype, wide in ((torch.bfloat16, torch.float32), (torch.float64, torch.float64)):
        parts, b2, y = (
            torch.empty(4, 100, 24, dtype=wide),
            torch.empty(24).to(dtype),
            torch.empty(100, 24).to(dtype),
        )
        args = (parts, b2, y, 2400, 24, 4)
        signature = signature_of(kernel, *args, FINAL="sigmoid", BLOCK_SIZE=512)
        assert compile_for(kernel, signature, arch=90).spills == 0


@pytest.mark.parametrize("back", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64], ids=str)
def test_fits_on_turing(dtype, back, monkeypatch):
    """64 KB of shared memory, and no tensor cores that Triton knows."""
    for case in [(128, 13, 512, 256), (64, 512, 256, 1)]:
        compiled = _machine_code(case, dtype, False, back, monkeypatch, arch=75)
        assert compiled.shared_bytes <= 64 * 1024, case


# --- bad input -----------------------------------------------------------------------------------------------


def test_bad_input_is_refused_in_a_sentence():
    inputs = x, w1, b1, w2, b2 = detached()
    wrong = {
        "a list": ((x.tolist(), w1, b1, w2, b2), TypeError, "must be a torch.Tensor"),
        "no bias": ((x, w1, None, w2, b2), TypeError, "bias1 must be a torch.Tensor"),
        "integers": ([t.int() for t in inputs], TypeError, "floating-point"),
        "complex": ([t.to(torch.complex64) for t in inputs], TypeError, "floating-point"),
        "a scalar": ((x[0, 0], w1, b1, w2, b2), ValueError, "shapes must be"),
        "a weight transposed": ((x, w1.T, b1, w2, b2), ValueError, "shapes must be"),
        "the second weight transposed": ((x, w1, b1, w2.T, b2), ValueError, "shapes must be"),
        "weights with a batch": ((x, w1[None], b1, w2, b2), ValueError, "shapes must be"),
        "biases exchanged": ((x, w1, b2, w2, b1), ValueError, "shapes must be"),
        "a bias of one row": ((x, w1, b1[None], w2, b2), ValueError, "shapes must be"),
        "an unknown final": ((*inputs, "tanh"), ValueError, "sigmoid, relu, identity"),
        "no device": ([t.to("meta") for t in inputs], ValueError, "fused_mlp_eager"),
    }
    for k, name in enumerate(NAMES):
        others = (inputs[:k], inputs[k + 1 :])
        changed = {
            "dtype": (inputs[k].half(), TypeError, "cast one" if k else "weight1"),
            "width": (inputs[k][..., :-1], ValueError, "shapes must be"),
            "device": (inputs[k].to("meta"), ValueError, "one device"),
        }
        for what, (t, kind, message) in changed.items():
            wrong[f"another {what} of {name}"] = ((*others[0], t, *others[1]), kind, message)
    for what, (bad, kind, message) in wrong.items():
        with pytest.raises(kind, match=f"fused_mlp_triton: .*{message}") as caught:
            fused_mlp_triton(*bad)
        assert len(str(caught.value)) > 40, what


def test_the_registered_op_checks_too():
    x, w1, b1, w2, b2 = detached()
    with pytest.raises(ValueError, match="fused_mlp_op: shapes must be"):
        fused_mlp_op(x, w1.T, b1, w2, b2)


@pytest.mark.gpu
def test_cpu_input_on_a_gpu_machine():
    with pytest.raises(ValueError, match="fused_mlp_eager"):
        fused_mlp_triton(*tensors(device=torch.device("cpu")))
