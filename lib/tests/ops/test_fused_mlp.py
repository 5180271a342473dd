"""What is particular to fused_mlp: its three ways, traffic and launches, hidden units, machine code."""

import functools
from unittest import mock

from lib import machine
from lib.measure.check import CheckError, check_against_float64
from lib.nogpu.compile_only import compile_for, instruction_mix, signature_of
from lib.nogpu.memory import count_traffic
from lib.ops.fused_mlp import fused_mlp_eager
from lib.tests.ops import battery, cases
from lib.tests.ops.battery import assert_close, count_compilations

import pytest
import torch
import torch.nn.functional as F

SMALL = (17, 33, 70, 9)  # M, K, H, N
FINALS = ("sigmoid", "relu", "identity")
NAMES = ("x", "weight1", "bias1", "weight2", "bias2")
WAYS = ("one kernel", "split", "cublas")
ways = pytest.mark.parametrize("way", WAYS)
finals = pytest.mark.parametrize("final", FINALS)


def tensors(case=SMALL, dtype=torch.float32, apart=1e-4):
    """x, weights and biases: leaves that require grad.

    No hidden unit is within `apart` of zero: there another order of the same sum may turn its gradient off.
    """
    m, k, h, n = case
    shapes = [(m, k), (h, k), (h,), (n, h), (n,)]
    scales = [1, max(1, k) ** -0.5, 1, max(1, h) ** -0.5, 1]
    made = [torch.randn(shape, device=machine.device()) for shape in shapes]
    x, w1, b1, *rest = [(t * scale).to(dtype) for t, scale in zip(made, scales)]
    b1[b1.abs() < 2 * apart] = 1.0
    if x.numel() and h:
        x[(F.linear(x.double(), w1.double(), b1.double()).abs() < apart).any(-1)] = 0.0
    return [t.requires_grad_() for t in (x, w1, b1, *rest)]


def detached(*args, **kwargs):
    return [t.detach() for t in tensors(*args, **kwargs)]


def going(module, way, **how):
    """fused_mlp_triton bound to this way, split into up to three parts."""
    plan = module.Plan(way, n_splits=3 if way == "split" else None)
    return functools.partial(module.fused_mlp_triton, plan=plan, **how)


def check(version, inputs, final="sigmoid", name=None, eager=fused_mlp_eager):
    """check_against_float64, with one unit in the last place more for 16 bits.

    Of few numbers eager's own largest error is small by luck. What it is on average, and so for many, is
    compared in test_errors_are_on_average_those_of_eager.
    """
    x = inputs[0]
    slack = torch.finfo(x.dtype).eps if x.itemsize == 2 else 1e-6
    version, eager = (functools.partial(f, final=final) for f in (version, eager))
    return check_against_float64(version, eager, *inputs, slack=slack, name=name or final)


# --- the whole MLP in one kernel -----------------------------------------------------------------------------


def test_all_hidden_units_of_a_row_count(module):
    """Whole numbers: each unit that is missing or counted twice shows. y is 1 + 2 + … + H everywhere."""
    for way in WAYS:
        for n_hidden, n in ((1, 1), (33, 1), (33, 5), (300, 5), (300, 1)):
            x = torch.zeros(40, 7, device=machine.device())
            numbers = torch.arange(1.0, n_hidden + 1, device=x.device)
            ones = torch.ones(n, n_hidden, device=x.device)
            weights = (ones[:1].T.expand(-1, 7), numbers, ones, 0 * ones[:, 0])
            y = going(module, way)(x, *weights, final="identity")
            assert (y == n_hidden * (n_hidden + 1) / 2).all(), (way, n_hidden, n)


def test_a_tile_taken_for_the_row_is_not_right():
    """The mistake that a whole MLP in one kernel invites: 32 units made, 32 used, the others forgotten."""

    def wrong(x, w1, b1, w2, b2, final):
        return fused_mlp_eager(x, w1[:32], b1[:32], w2[:, :32], b2, final)

    check(wrong, tensors((8, 16, 32, 8)), name="as long as all fit into the tile")
    with pytest.raises(CheckError, match="differ"):
        check(wrong, tensors((8, 16, 33, 8)))


@finals
def test_every_way_and_final(module, final):
    """Sizes that fill no tile, one column and more than a tile of them, many units, none, and no K."""
    for way in WAYS:
        version = going(module, way)
        for case in (SMALL, (20, 16, 200, 1), (5, 0, 7, 3), (18, 16, 40, 40), (3, 5, 0, 4)):
            check(version, tensors(case), final, name=f"{way}, {case}")
        check(
            version, tensors((17, 33, 70, 100), torch.bfloat16), final, name=f"{way}, 100 columns"
        )
        assert torch.autograd.gradcheck(
            functools.partial(version, final=final),
            tensors((3, 4, 18, 2), torch.float64),
            fast_mode=True,
        )


def test_eager_is_two_layers(module):
    x, w1, b1, w2, b2 = tensors()
    hidden = (x @ w1.T + b1).clamp(min=0)
    want = 1 / (1 + torch.exp(-(hidden @ w2.T + b2)))
    torch.testing.assert_close(module.fused_mlp_eager(x, w1, b1, w2, b2), want)


@finals
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_errors_are_on_average_those_of_eager(module, dtype, final):
    """Of y and of each gradient, against float64: the root of the mean square."""
    inputs = tensors((120, 70, 90, 20), dtype)
    exact = [t.detach().double().requires_grad_() for t in inputs]
    dy = torch.randn(120, 20, device=machine.device()).to(dtype)

    def run(version, leaves, dy):
        y = version(*leaves, final)
        return [y.detach(), *torch.autograd.grad(y, leaves, dy)]

    runs = (
        run(module.fused_mlp_triton, inputs, dy),
        run(fused_mlp_eager, inputs, dy),
        run(fused_mlp_eager, exact, dy.double()),
    )
    for name, got, own, want in zip(("y", *NAMES), *runs):
        ours, eagers = ((t.double() - want).square().mean().sqrt() for t in (got, own))
        allowed = 1.25 * eagers + 1e-6 * want.abs().max()
        assert ours <= allowed, f"{name}: {ours:.1e}, eager's {eagers:.1e}"


def test_a_chain_of_layers(module):
    """DLRM's bottom and top MLP: each two layers are one call."""
    widths = (13, 64, 32, 16, 8)
    x, *_ = detached((37, 13, 1, 1))
    layers = [torch.nn.Linear(a, b, device=x.device) for a, b in zip(widths, widths[1:])]
    want = got = x
    for layer in layers:
        want = torch.relu(layer(want))
    for first, second in zip(layers[::2], layers[1::2]):
        weights = first.weight, first.bias, second.weight, second.bias
        got = module.fused_mlp_triton(got, *weights, final="relu")
    assert_close(got, want)
    parameters, dy = [p for layer in layers for p in layer.parameters()], torch.randn_like(want)
    assert_close(*[torch.autograd.grad(y, parameters, dy) for y in (got, want)])


# --- the choice of a way -------------------------------------------------------------------------------------


def test_what_is_left_to_cublas(module):
    """Shapes at each limit, and just past it."""

    def by_cublas(*shape, kind="half"):
        return module._plan(*shape, kind, machine.device()).way == "cublas"

    stays = [(1, 2048, 16, 16), (65536, 767, 256, 1), (2048, 768, 256, 1), (1024, 1535, 1024, 1)]
    goes = [(1, 2049, 16, 16), (65536, 768, 256, 1), (2049, 768, 256, 1), (1024, 1536, 1024, 1)]
    goes += [(1, 16, 2049, 16), (1, 16, 16, 257), (2**15 + 1, 256, 256, 256)]
    stays += [(2**15, 256, 256, 256), (65536, 448, 256, 64)]
    stays += [(128, 512, 256, 1), (65536, 512, 256, 1), (128, 1008, 1024, 16)]
    assert not any(by_cublas(*shape) for shape in stays)
    assert all(by_cublas(*shape) for shape in goes)
    # in float32 three products for one bring cuBLAS's nearer; float64 is never split
    assert by_cublas(1, 16, 16, 65, kind="tf32x3")
    assert not by_cublas(128, 1009, 1024, 16, kind="tf32x3")
    assert by_cublas(1, 768, 16, 1, kind="double")
    assert not by_cublas(1, 767, 16, 1, kind="double")


def test_a_long_walk_is_split(module):
    def plan(*shape, kind="half"):
        return module._plan(*shape, kind, machine.device())

    assert plan(16, 767, 256, 1).way == "one kernel"
    assert plan(16, 768, 256, 1).way == "split"
    assert plan(16, 255, 256, 1, kind="tf32x3").way == "one kernel"
    assert plan(16, 256, 256, 1, kind="tf32x3").way == "split"
    # a part for each multiprocessor that the tiles of rows leave, or for each 64 units
    n_sms = battery.host_of(module).n_multiprocessors(machine.device())
    assert plan(16, 512, 512, 1).n_splits == min(8, n_sms)
    assert plan(1024, 512, 1024, 1).n_splits == max(1, n_sms // 16)
    # whoever takes the way of many rows is not split
    assert plan(65536, 512, 256, 1).n_splits == plan(65536, 767, 256, 1).n_splits == 1


def test_the_ways_are_what_they_are_called(module):
    inputs = detached((20, 16, 200, 9))
    for way, launches in (("one kernel", 1), ("split", 2), ("cublas", 0)):
        assert count_traffic(lambda way=way: going(module, way)(*inputs)).launches == launches, way


def test_a_plan_may_be_one_that_was_chosen(module):
    inputs = detached((20, 16, 200, 9))
    chosen = module._plan(20, 16, 200, 9, "tf32x3", machine.device(), False, "split", None, 2)
    assert (chosen.way, chosen.n_splits) == ("split", 2)
    traffic = count_traffic(lambda: module.fused_mlp_triton(*inputs, plan=chosen))
    assert traffic.by_argument["_fused_mlp_fwd_kernel.y_ptr"].stored == 2 * 20 * 9 * 4


# --- NaN and infinities --------------------------------------------------------------------------------------


@ways
def test_nan_and_infinities(module, way):
    version, dtypes = going(module, way), (torch.float32, torch.bfloat16)
    for n, dtype in ((5, dtypes[0]), (1, dtypes[0]), (5, dtypes[1])):
        for k, place in ((0, (1, 3)), (1, (7, 3)), (2, (9,)), (3, (0, 11)), (4, (0,))):
            for special in (float("nan"), float("inf"), -float("inf")):
                inputs = tensors((12, 20, 40, n), dtype)
                with torch.no_grad():
                    inputs[k][place] = special
                check(version, inputs, "relu" if k % 2 else "sigmoid", f"{NAMES[k]} with {special}")


@finals
def test_nan_passes_both_relus(module, final):
    inputs = detached()
    inputs[0][3, 4] = float("nan")
    for way in WAYS:
        y = going(module, way)(*inputs, final=final)
        assert y[3].isnan().all()
        assert not y[:3].isnan().any()
        assert not y[4:].isnan().any()


@ways
def test_infinity_does_not_meet_what_is_not_there(module, way):
    """x of infinity and H = 33, W2 of infinity and four rows: in tiles of more, 0·inf would be NaN."""
    x, w1, b1, w2, b2 = (t.abs() for t in detached((4, 5, 33, 1)))
    x[2] = float("inf")
    y = going(module, way)(x, w1, b1, w2, b2, final="identity")
    assert torch.isposinf(y[2]).all()
    assert torch.isfinite(y[[0, 1, 3]]).all()
    x, w1, b1, w2, b2 = (t.abs() for t in detached((4, 5, 33, 3)))
    w2[:, 11] = float("inf")
    b1.requires_grad_()
    going(module, way)(x, w1, b1, w2, b2, final="identity").sum().backward()
    assert torch.isposinf(b1.grad[11])
    assert torch.isfinite(b1.grad[:11]).all()


@ways
def test_large_sums_saturate(module, way):
    inputs = detached((6, 8, 20, 3))
    inputs[4][:] = torch.tensor([1e4, -1e4, 0.0])
    y = going(module, way)(*inputs)
    assert (y[:, 0] == 1).all()
    assert (y[:, 1] == 0).all()


# --- gradients -----------------------------------------------------------------------------------------------


@ways
def test_gradients_together(module, way):
    """Those of one at a time are in the battery; here some that are made together."""
    version, inputs = going(module, way), tensors()
    for some in ([0, 4], [1, 2], [3, 4], [2, 4], [0, 1, 3], [0], [1], [2], [3], [4]):
        leaves = [t if k in some else t.detach() for k, t in enumerate(inputs)]
        check(version, leaves, name=f"gradients of {some}")


@ways
def test_what_every_way_has_to_do(module, way):
    """The same bits, twice the same gradients from a dy of any strides, which stays; biases with gaps."""
    x, w1, b1, w2, b2 = inputs = tensors()
    version = going(module, way)
    dys = (torch.randn(9, 17).T, torch.randn(17, 20)[:, 1:19:2], torch.ones(()).expand(17, 9))
    for dy in (t.to(x.device) for t in dys):
        y, before = version(*inputs), dy.clone()
        first = torch.autograd.grad(y, inputs, dy, retain_graph=True)
        first = [t.clone() for t in first]
        second = torch.autograd.grad(y, inputs, dy)
        again = torch.autograd.grad(version(*inputs), inputs, dy)
        assert all(map(torch.equal, first, second)), "a second backward differs"
        assert all(map(torch.equal, first, again)), "two runs differ"
        assert torch.equal(dy, before), "dy was changed"
        assert_close(first, torch.autograd.grad(fused_mlp_eager(*inputs), inputs, dy))
    check(version, (x, w1, cases.spread(b1), w2, cases.spread(b2)), name="biases with gaps")
    expanded = [t[:1].detach().expand(t.shape).requires_grad_() for t in (b1, b2)]
    check(version, (x, w1, expanded[0], w2, expanded[1]), name="expanded biases")
    with pytest.raises(RuntimeError, match="functorch|vmap|Batch|data pointer"):
        torch.vmap(version, in_dims=(0, *[None] * 4))(x.detach()[None], *detached()[1:])


@pytest.mark.parametrize("k", [0, 1, 2, 3, 5])
def test_what_is_saved_and_then_changed_is_noticed(module, k):
    values = [t * 1 for t in tensors()]
    y = module.fused_mlp_triton(*values)
    [*values, y][k].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("inside", [False, True])
def test_autocast_of_the_backward_pass(module, inside):
    for way in WAYS:
        inputs = tensors()
        again = [t.detach().requires_grad_() for t in inputs]
        for version, leaves in ((going(module, way), inputs), (fused_mlp_eager, again)):
            with torch.autocast(machine.device().type, dtype=torch.bfloat16):
                y = version(*leaves)
                loss = (y.float() ** 2).sum()
                assert y.dtype == torch.bfloat16
                if inside:
                    loss.backward()
            if not inside:
                loss.backward()
        for a, b in zip(inputs, again):
            assert a.grad.dtype == b.grad.dtype
            assert_close(a.grad, b.grad, torch.bfloat16)


def test_backward_inside_autocast_stays_float32(module):
    """The products of a float32 backward pass must not be rounded by an autocast that is on by then."""
    for way in WAYS:
        inputs = tensors()
        y, dy = going(module, way)(*inputs), torch.randn(17, 9, device=machine.device())
        want = torch.autograd.grad(y, inputs, dy, retain_graph=True)
        with torch.autocast(machine.device().type, dtype=torch.bfloat16):
            got = torch.autograd.grad(y, inputs, dy)
        assert all(map(torch.equal, got, want)), way


def test_inputs_and_gradients_share_no_memory(module):
    inputs = tensors()
    dy = torch.randn(17, 9, device=machine.device())
    gradients = torch.autograd.grad(module.fused_mlp_triton(*inputs, final="identity"), inputs, dy)
    storages = {t.untyped_storage().data_ptr() for t in (*inputs, dy)}
    assert not storages & {t.untyped_storage().data_ptr() for t in gradients}


# --- torch.library and torch.compile -------------------------------------------------------------------------


def test_opcheck_of_the_backward_op(module):
    """With strided tensors, and with some gradients alone; the op itself is in the battery."""
    x, w1, b1, w2, b2 = detached((6, 5, 7, 4))
    inputs = (x.view(2, 3, 5).transpose(0, 1), w1.T.contiguous().T, b1, w2.T.contiguous().T, b2)
    for final, needs_grad in (
        ("sigmoid", [True] * 5),
        ("identity", [True, False, True, False, False]),
    ):
        y = fused_mlp_eager(*inputs, final)
        saved = None if final == "identity" else y
        arguments = (torch.randn_like(y), *inputs[:4], saved, final, False, needs_grad)
        torch.library.opcheck(module._fused_mlp_backward_op, arguments)


@finals
def test_the_op_whatever_is_frozen(module, final):
    for frozen in ((), (1, 2), (0, 3)):
        inputs = [t.detach() if k in frozen else t for k, t in enumerate(tensors())]
        check(module.fused_mlp_op, inputs, final, name=f"{frozen} frozen")
    wide = (3, 5, 20, 300)  # cuBLAS's
    check(module.fused_mlp_op, tensors(wide), final)


def test_compiled_whatever_the_way(module):
    torch.compiler.reset()
    compiled = torch.compile(module.fused_mlp_triton, fullgraph=True, backend="aot_eager")
    frozen = [t.detach() if k in (1, 2) else t for k, t in enumerate(tensors())]
    check(compiled, frozen, name="a frozen layer")
    check(compiled, tensors((3, 5, 20, 300)), name="cuBLAS's")
    with torch.autocast(machine.device().type, dtype=torch.bfloat16):
        y = compiled(*frozen)
    assert y.dtype == torch.bfloat16
    assert_close(y.float(), fused_mlp_eager(*frozen), torch.bfloat16)


# --- traffic and launches ------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 24])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_traffic_of_one_kernel(module, dtype, n):
    """x, weights and y, once each: the hidden layer is in none of it."""
    inputs = detached((100, 40, 200, n), dtype)
    traffic = count_traffic(functools.partial(going(module, "one kernel"), *inputs))
    y_bytes = 100 * n * dtype.itemsize
    assert traffic.launches == 1
    assert traffic.bytes_moved == sum(t.nbytes for t in inputs) + y_bytes
    by = {name.rpartition(".")[2]: a for name, a in traffic.by_argument.items()}
    assert by["y_ptr"].stored == y_bytes, "y is written more than once"


def test_traffic_of_a_split(module):
    """The parts of the sum, float32, come on top: written, and read again."""
    for dtype in (torch.float32, torch.bfloat16):
        inputs = detached((40, 32, 200, 24), dtype)
        traffic = count_traffic(functools.partial(going(module, "split"), *inputs))
        assert traffic.launches == 2
        parts = 2 * 40 * 24 * 4  # of two tiles of 64 units each
        y_bytes = 40 * 24 * dtype.itemsize
        assert traffic.bytes_moved == sum(t.nbytes for t in inputs) + y_bytes + 2 * parts


@pytest.mark.parametrize(
    ("n_rows", "several"), [(9, False), (300, True)], ids=["one strip", "strips"]
)
def test_sums_over_rows_are_rounded_once(module, n_rows, several):
    given = tensors((n_rows, 33, 70, 9), torch.bfloat16)
    call = going(module, "one kernel")
    battery.check_strips(module, lambda: call(*given).sum().backward(), several)


def test_launches_of_the_backward_pass(module):
    """All gradients: two kernels and three products. What nobody wants is not computed."""
    for some, launches, n_products in [
        ([0, 1, 2, 3, 4], 2, 3),
        ([0], 1, 1),
        ([1, 2], 2, 1),
        ([3, 4], 2, 1),
        ([1, 3], 1, 2),
    ]:
        inputs = [t if k in some else t.detach() for k, t in enumerate(tensors((300, 33, 70, 9)))]
        y = module.fused_mlp_triton(*inputs)
        leaves, dy = [inputs[k] for k in some], torch.randn_like(y)
        with mock.patch.object(torch, "mm", wraps=torch.mm) as multiply:
            traffic = count_traffic(functools.partial(torch.autograd.grad, y, leaves, dy))
        assert (traffic.launches, multiply.call_count) == (launches, n_products), some


@ways
def test_the_hidden_layer_is_saved_only_where_cublas_made_it(module, way):
    inputs, saved = tensors(), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        y = going(module, way)(*inputs)
    expected = {t.data_ptr() for t in (*inputs[:4], y)}
    more = [t.shape for t in saved if t.data_ptr() not in expected]
    assert more == ([(17, 70)] if way == "cublas" else [])


# --- sizes past what 32 bits hold -----------------------------------------------------------------------------


def far_apart(t, by_columns):
    """The numbers of t, (3, N) or by columns (N, 3), 2**30 elements between rows or columns."""
    return cases.spaced(t.T).T if by_columns else cases.spaced(t)


@pytest.mark.parametrize("by_columns", [False, True])
def test_offsets_past_two_to_the_31(module, by_columns):
    """Of x and of both weights, row by row and column by column."""
    version = going(module, "one kernel")
    for k, n in ((0, 1), (1, 1), (3, 1), (0, 3), (1, 3), (3, 3)):
        if by_columns:
            case = (5, 16, 3, n) if k == 3 else (5, 3, 16, n)
        else:
            case = {0: (3, 16, 8, n), 1: (5, 16, 3, n), 3: (5, 6, 16, 3)}[k]
        values = detached(case, torch.float16)
        values[k] = far_apart(values[k], by_columns)
        leaves = [t.detach().requires_grad_() for t in values]
        check(version, leaves, eager=cases.near(fused_mlp_eager), name=f"{NAMES[k]}, {n} columns")


@pytest.mark.parametrize("by_columns", [False, True])
def test_gradient_offsets_past_two_to_the_31(module, by_columns):
    case = (5, 4, 8, 3) if by_columns else (3, 4, 8, 16)
    inputs = tensors(case, torch.float16)
    dy = torch.randn(5, 3) if by_columns else torch.randn(3, 16)
    dy = far_apart(dy.to(inputs[0].detach()), by_columns)
    got = torch.autograd.grad(module.fused_mlp_triton(*inputs), inputs, dy)
    want = torch.autograd.grad(fused_mlp_eager(*inputs), inputs, dy.contiguous())
    assert_close(got, want, torch.float16)


@pytest.mark.gpu
def test_more_than_two_to_the_31_elements(module):
    if torch.cuda.mem_get_info()[0] < 60e9:
        pytest.skip("needs 60 GB of GPU memory")
    m, k = 2**25 + 3, 80  # x: 2.7e9 elements; y as many
    x, w1, b1, w2, b2 = detached((1, k, 32, 80), torch.bfloat16)
    x = torch.randn(m, k, dtype=torch.bfloat16, device=w1.device)
    x.requires_grad_()
    y = going(module, "one kernel")(x, w1, b1, w2, b2)
    (dx,) = torch.autograd.grad(y, [x], y.detach())
    for rows in (slice(0, 3), slice(-3, None)):
        part = x.detach()[rows].requires_grad_()
        want = fused_mlp_eager(part, w1, b1, w2, b2)
        assert_close(y.detach()[rows], want.detach(), torch.bfloat16)
        want.backward(y.detach()[rows])
        assert_close(dx[rows], part.grad, torch.bfloat16)


def test_many_rows(module):
    """More than 65535 tiles of them would not start as the second dimension of a grid."""
    if machine.HAS_GPU:
        check(module.fused_mlp_triton, tensors((16 * 70_000, 3, 4, 2)))
    check(module.fused_mlp_triton, tensors((5000, 3, 4, 2)))


# --- on a GPU ------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@finals
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_real_sizes(module, dtype, final):
    for case in [
        (1823, 781, 333, 201),
        (128, 512, 256, 1),
        (2048, 13, 512, 256),
        (20_001, 256, 64, 16),
    ]:
        for version in (module.fused_mlp_triton, module.fused_mlp_op):
            check(version, tensors(case, dtype), final, name=str(case))


@pytest.mark.gpu
@ways
def test_tf32_only_where_asked_for(module, way):
    """Ten bits of mantissa where allowed; without, the error of float32."""
    inputs = tensors((300, 512, 256, 64))
    want = fused_mlp_eager(*(t.double() for t in inputs), final="identity")
    errors = [
        float((going(module, way)(*inputs, "identity", allow).double() - want).abs().max())
        for allow in (False, True)
    ]
    assert errors[0] < 5e-6
    assert errors[1] < 2e-2
    if way != "cublas" and torch.cuda.get_device_capability()[0] >= 8:
        assert errors[1] > 2e-5, "no tensor cores used"


@ways
def test_tf32_runs_everywhere(module, way):
    """In the interpreter it is float32 (the table of its tiles is used all the same)."""
    version = going(module, way, allow_tf32=True)
    if not machine.HAS_GPU:
        check(version, tensors())
        return
    inputs = tensors(apart=1e-2)
    dy = torch.randn(17, 9, device=machine.device())
    grads = [torch.autograd.grad(v(*inputs), inputs, dy) for v in (version, fused_mlp_eager)]
    for got, want in zip(*grads):
        assert (got - want).norm() < 1e-2 * want.norm()


@pytest.mark.gpu
@ways
def test_cuda_graph_of_a_training_step(module, way):
    inputs = tensors((257, 128, 200, 24))
    dy = torch.randn(257, 24, device=machine.device())

    def step():
        return torch.autograd.grad(going(module, way)(*inputs), inputs, dy)

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
    assert_close(gradients, step())


@pytest.mark.gpu
@ways
def test_every_way_stays_on_the_gpu(module, way):
    """No wait of the host, and whichever GPU is current."""
    inputs = tensors()
    going(module, way)(*inputs).sum().backward()
    torch.cuda.set_sync_debug_mode("error")
    try:
        going(module, way)(*inputs).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    if torch.cuda.device_count() > 1:
        second = [t.detach().to("cuda:1").requires_grad_() for t in inputs]
        check(going(module, way), second)


@pytest.mark.gpu
@pytest.mark.parametrize("way", ["one kernel", "split"])
def test_another_number_of_rows_does_not_compile_again(module, way):
    def call(rows):
        going(module, way)(*tensors((rows, 512, 256, 16))).sum().backward()

    call(1000)
    with count_compilations() as names:
        for rows in (1001, 992, 17, 1):
            call(rows)
    assert not names, names


# --- machine code --------------------------------------------------------------------------------------------


def machine_code(module, case, dtype, allow_tf32, back, arch=90):
    """The kernel that a GPU of `arch` gets for this case: of few rows the smallest tile, else the largest."""
    (m, k, h, n), kind = case, battery.host_of(module).kind_of(dtype, allow_tf32)
    no_units = arch < 80 and dtype != torch.float64
    tiles = (module._BACKWARD_TILES if back else module._TILES)["ieee" if no_units else kind]
    tile = tiles[0 if m > 10_000 else -1]
    plan = module._plan.__wrapped__(*case, kind, machine.device(), back, "one kernel", tile)
    shapes = ((m, k), (h, k), (h,), (n, h), (n,), (m, n))
    x, w1, b1, w2, b2, y = (torch.empty(shape, dtype=dtype) for shape in shapes)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    sizes, strides = (m, k, h, n), (*x.stride(), *w1.stride(), *w2.stride())
    if back:
        hidden, kernel = torch.empty(m, h, dtype=dtype), module._fused_mlp_bwd_kernel
        partial = torch.empty(plan.n_tiles, h + n, dtype=wide)
        args = (y, y, x, w1, b1, w2, hidden, hidden, y, partial, *sizes, *y.stride(), *strides)
    else:
        kernel = module._fused_mlp_fwd_kernel
        args = (x, w1, b1, w2, b2, y, *sizes, *strides, plan.units)
    constants = {"FINAL": "sigmoid", "PRECISION": "ieee" if no_units else plan.precision}
    constants["COMPUTE"] = battery.host_of(module).compute_dtype(dtype)
    signature = signature_of(kernel, *args, **constants, **plan.blocks)
    return compile_for(kernel, signature, arch=arch, **plan.warps)


# DLRM's layers: a small batch, a large one, and one that fills the GPU
DLRM = [(128, 512, 256, 1), (2048, 256, 64, 16), (20_000, 512, 256, 256)]
PRODUCTS = {
    "half": ("HMMA.16816", "HGMMA.64"),
    "tf32": ("HMMA.1688", "HGMMA.64"),
    "tf32x3": ("HMMA.1688", "HGMMA.64"),
}


@pytest.mark.parametrize("back", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("kind", PRODUCTS)
def test_tensor_cores_wide_loads_and_no_spills(kind, back):
    from lib.ops import fused_mlp as module

    dtype = torch.bfloat16 if kind == "half" else torch.float32
    wide = DLRM[2] if kind != "tf32x3" else (20_000, 512, 256, 64)
    for case in [*DLRM[: 2 if kind == "half" else 1], wide]:
        compiled = machine_code(module, case, dtype, kind == "tf32", back)
        mix = instruction_mix(compiled)
        assert compiled.spills == 0, (case, compiled)
        assert compiled.shared_bytes <= 99 * 1024, "more than a program may have on most GPUs"
        few, many = PRODUCTS[kind]
        expected = many if case is wide else (few, many)
        assert any(op.startswith(expected) for op in mix), (case, mix)
        assert "LDGSTS.E.BYPASS.128" in mix, (case, mix)  # 16 bytes from global to shared memory
        assert "LDGSTS.E" not in mix or kind == "tf32", (case, mix)


def test_the_sum_of_parts_compiles():
    from lib.ops.fused_mlp import _fused_mlp_sum_kernel as kernel

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
def test_fits_on_turing(dtype, back):
    """64 KB of shared memory, and no tensor cores that Triton knows."""
    from lib.ops import fused_mlp as module

    for case in [(128, 13, 512, 256), (64, 512, 256, 1)]:
        compiled = machine_code(module, case, dtype, False, back, arch=75)
        assert compiled.shared_bytes <= 64 * 1024, case


# --- bad input -----------------------------------------------------------------------------------------------


def test_weights_and_biases_are_refused_in_a_sentence(module):
    inputs = x, w1, b1, w2, b2 = detached()
    wrong = {
        "no bias": ((x, w1, None, w2, b2), TypeError, "bias1 must be a torch.Tensor"),
        "a scalar": ((x[0, 0], w1, b1, w2, b2), ValueError, r"x must be \(\.\.\., K\)"),
        "a weight transposed": ((x, w1.T, b1, w2, b2), ValueError, r"weight1 must be \(H, K\)"),
        "another transposed": ((x, w1, b1, w2.T, b2), ValueError, r"weight2 must be \(N, H\)"),
        "weights with a batch": ((x, w1[None], b1, w2, b2), ValueError, "weight1 must be"),
        "biases exchanged": ((x, w1, b2, w2, b1), ValueError, r"bias1 must be \(H\)"),
        "a bias of one row": ((x, w1, b1[None], w2, b2), ValueError, "bias1 must be"),
        "a narrow bias": ((x, w1, b1, w2, b2[:-1]), ValueError, "bias2 must be"),
        "a short bias": ((x, w1, b1[:-1], w2, b2), ValueError, "bias1 must be"),
        "a narrow weight": ((x, w1[:, :-1], b1, w2, b2), ValueError, "weight1 must be"),
        "another narrow weight": ((x, w1, b1, w2[:, :-1], b2), ValueError, "weight2 must be"),
        "an unknown final": ((*inputs, "tanh"), ValueError, "sigmoid, relu, identity"),
    }
    for version in (module.fused_mlp_triton, module.fused_mlp_op):
        name = version.__name__ if version is module.fused_mlp_triton else "fused_mlp_op"
        for what, (bad, kind, message) in wrong.items():
            if version is not module.fused_mlp_triton and "no bias" in what:
                continue  # the dispatcher refuses it
            with pytest.raises(kind, match=f"{name}: .*{message}") as caught:
                version(*bad)
            assert len(str(caught.value)) - len(name) > 25, what
