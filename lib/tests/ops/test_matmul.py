"""matmul: every rung's values and gradients, layouts, the choice of tiles, traffic, machine code, CUDA code."""

import functools
import itertools
import re

from lib import machine
from lib.measure.check import check_against_float64
from lib.nogpu import cuda
from lib.nogpu.compile_only import compile_for, instruction_mix, signature_of
from lib.nogpu.memory import count_traffic
from lib.ops import matmul as op_file
from lib.ops.matmul import (
    matmul_cuda,
    matmul_eager,
    matmul_grouped,
    matmul_naive,
    matmul_op,
    matmul_persistent,
    matmul_pipelined,
    matmul_tiled,
    matmul_triton,
)
from lib.recorded.results import ROOT
from lib.tests.ops import cases
from lib.tests.ops.test_ops import DTYPES, _count_compilations, assert_close

import pytest
import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st
from triton.tools.tensor_descriptor import TensorDescriptor

ACTIVATIONS = ["identity", "relu", "gelu", "silu", "sigmoid"]
NAN, INF = float("nan"), float("inf")

# (M, N, K): one number, no power of two, one row, one column, whole tiles, a long K, nothing to add up, empty
CASES = [
    (1, 1, 1),
    (129, 77, 33),
    (1, 40, 70),
    (40, 1, 24),
    (64, 32, 64),
    (17, 20, 300),
    (17, 33, 0),
    (0, 5, 3),
    (5, 0, 3),
]
BIG = [(1823, 781, 333), (1024, 2048, 512), (8, 4096, 4096), (333, 64, 16384)]


def registered(a, b, bias=None, activation="identity", allow_tf32=False):
    return matmul_op(a, b, bias, activation, allow_tf32)[0]


def split(a, b, bias=None, activation="identity", allow_tf32=False):
    """Split-K in three parts, whatever the shape: what matmul_triton does with few tiles and a long K."""
    launch = functools.partial(_launch_in_parts, n_parts=3)
    return op_file._call("matmul_split", launch, a, b, bias, activation, allow_tf32)


def _launch_in_parts(y, *args, n_parts):
    if args[1].shape[1] == 0:  # K = 0 is never cut
        return op_file._launch_pipelined(y, *args)
    tile = op_file._tiles(args[-1], y.device)[-1]
    return op_file._launch_split(y, *args, tile, n_parts)


LADDER = [
    matmul_naive,
    matmul_tiled,
    matmul_grouped,
    matmul_pipelined,
    matmul_persistent,
    matmul_triton,
]
VERSIONS = [*LADDER, split, registered]
versions = pytest.mark.parametrize("version", VERSIONS, ids=lambda v: v.__name__)
ladder = pytest.mark.parametrize("version", LADDER, ids=lambda v: v.__name__)
# The gradients of all rungs come from one function
with_own_gradients = pytest.mark.parametrize(
    "version", [matmul_triton, split, registered], ids=lambda v: v.__name__
)
# One through pointers, one through TMA, one in parts
kinds_of_kernels = pytest.mark.parametrize(
    "version", [matmul_triton, matmul_persistent, split], ids=lambda v: v.__name__
)
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)
activations = pytest.mark.parametrize("activation", ACTIVATIONS)
needs_cuda = pytest.mark.skipif(bool(cuda.why_no_cuda()), reason=str(cuda.why_no_cuda()))


def tensors(case=(17, 33, 40), dtype=torch.float32, device=None):
    """a, b and bias, leaves that require grad; a and b of a size that lets sums be near 1."""
    m, n, k = case
    scale = max(1, k) ** -0.25
    shapes = (((m, k), scale), ((k, n), scale), ((n,), 1.0))
    device = device or machine.device()
    made = [(torch.randn(shape, device=device) * s).to(dtype) for shape, s in shapes]
    return [t.requires_grad_() for t in made]


def detached(*args, **kwargs):
    return [t.detach() for t in tensors(*args, **kwargs)]


def bound(version, activation="identity"):
    """`version` with an activation, and its name kept for messages."""
    return functools.wraps(version)(functools.partial(version, activation=activation))


def check(version, inputs, activation="identity", name=None):
    return check_against_float64(
        bound(version, activation), bound(matmul_eager, activation), *inputs, name=name
    )


# --- values and gradients ------------------------------------------------------------------------------------


@versions
@dtypes
def test_equals_float64(version, dtype):
    for case, activation in zip(CASES, itertools.cycle(ACTIVATIONS)):
        check(version, tensors(case, dtype), activation, f"{version.__name__} {case} {activation}")


@pytest.mark.parametrize("transposed", list(itertools.product((False, True), repeat=2)), ids=str)
def test_several_tiles_of_every_rung(transposed):
    """Two or three in each direction, several steps of each, more tiles than multiprocessors; with z."""
    for version, case in [
        (matmul_naive, (40, 50, 20)),
        (matmul_tiled, (300, 150, 70)),
        (matmul_grouped, (300, 150, 70)),
        (matmul_pipelined, (150, 530, 130)),
        (matmul_persistent, (304, 536, 136)),  # as TMA reads and writes it
        (matmul_persistent, (300, 530, 130)),  # not so
    ]:
        if version is not matmul_persistent and transposed in ((True, False), (False, True)):
            continue  # the others read through strides, whatever they are
        a, b, bias = detached(case, torch.bfloat16)
        a, b = (t.t().contiguous().t() if turn else t for t, turn in zip((a, b), transposed))
        check(version, [a, b, bias], "silu", f"{version.__name__} {case}")
        launch = getattr(op_file, version.__name__.replace("matmul", "_launch"))
        _, z = op_file._forward(a, b, bias, "silu", False, True, launch)
        assert_close(z, matmul_eager(a, b, bias), torch.bfloat16)


@kinds_of_kernels
@activations
@pytest.mark.parametrize("with_bias", [True, False], ids=["bias", "no bias"])
def test_every_epilogue(version, activation, with_bias):
    for dtype in (torch.float32, torch.bfloat16):
        check(version, tensors((34, 40, 48), dtype)[: 3 if with_bias else 2], activation)


@pytest.mark.gpu
@versions
@dtypes
def test_equals_float64_at_real_sizes(version, dtype):
    for case, activation in itertools.product(BIG, ("identity", "gelu")):
        check(version, tensors(case, dtype), activation, f"{version.__name__} {case} {activation}")


def test_the_choice_takes_tma_for_a_large_product(monkeypatch):
    a, b, bias = tensors((512, 512, 512), torch.bfloat16)
    for large in (False, True):
        monkeypatch.setattr(op_file, "_LARGE", 2**27 if large else 2**28)
        traffic = count_traffic(lambda: matmul_triton(a.detach(), b.detach(), bias.detach()))
        assert large == any("persistent" in name for name in traffic.by_argument)
        check(matmul_triton, [a, b, bias], "silu")


@dtypes
@pytest.mark.parametrize("transposed", list(itertools.product((False, True), repeat=2)), ids=str)
def test_rows_that_begin_anywhere(monkeypatch, dtype, transposed):
    """A small product is made from single elements, a large one from copies with aligned rows."""
    a, b, bias = tensors((131, 70, 149), dtype)
    a, b = (
        t.detach().t().contiguous().t() if turn else t.detach()
        for t, turn in zip((a, b), transposed)
    )
    launched = []
    launch_tiles = op_file._launch_tiles

    def noted(y, z, a, b, *rest):
        launched.append((op_file._is_aligned(a) and op_file._is_aligned(b), rest[3].num_stages))
        launch_tiles(y, z, a, b, *rest)

    monkeypatch.setattr(op_file, "_launch_tiles", noted)
    inputs = [t.requires_grad_() for t in (a, b)] + [bias]
    if dtype != torch.float64 and op_file._generation(machine.device()) != "turing":
        check(matmul_triton, inputs, "silu")
        assert launched and set(launched) == {(False, 1)}
    monkeypatch.setattr(op_file, "_LARGE", 2**20)
    launched.clear()
    check(matmul_triton, inputs, "silu")
    assert all(aligned for aligned, _ in launched)


def test_copies_with_aligned_rows_are_made_only_where_rows_are_not():
    a = torch.randn(40, 64, device=machine.device())
    for t in (a, a.t(), a[:, 8:], a[:, :63], a[:7].t(), a[:1, :5], a[:0]):
        assert op_file._to_aligned(t) is t
    for t in (a[:, :63].contiguous(), a[:, :63].contiguous().t(), a[:, 1:], a[1:, 2:].t()):
        copy = op_file._to_aligned(t)
        assert torch.equal(copy, t) and op_file._is_aligned(copy)
        assert copy.untyped_storage().data_ptr() != t.untyped_storage().data_ptr()
        # neighbours stay neighbours
        assert copy.stride().index(1) == t.stride().index(1)


@versions
def test_no_inner_dimension_gives_the_bias(version):
    """K = 0: no product to add up, and nothing that may be read."""
    a, b, bias = detached((5, 6, 0))
    assert_close(version(a, b, bias, "gelu"), F.gelu(bias, approximate="tanh").expand(5, 6))
    assert torch.equal(version(a, b), torch.zeros_like(bias).expand(5, 6))
    inputs = tensors((5, 6, 0))
    da, db, dbias = torch.autograd.grad(version(*inputs).sum(), inputs)
    assert da.shape == (5, 0) and db.shape == (0, 6)
    assert_close(dbias, torch.full_like(dbias, 5))


@versions
def test_empty_results_have_gradients_of_zero(version):
    a, b, bias = tensors((0, 6, 4))
    da, db, dbias = torch.autograd.grad(version(a, b, bias, "silu").sum(), (a, b, bias))
    assert da.shape == (0, 4)
    assert not db.any() and not dbias.any()


@versions
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_nan_and_infinities(version, dtype):
    """They spread over their row or column, as in torch, and no further: what fills up tiles adds nothing."""
    a, b, bias = tensors((20, 24, 33), dtype)
    with torch.no_grad():
        a[1, 2], a[3, 32], b[32, 5], b[0, 23], bias[7] = NAN, INF, -INF, NAN, INF
        a[19, 0] = INF
    for activation in ("identity", "relu", "sigmoid"):
        eager = bound(cases.in_float32(matmul_eager), activation)
        name = f"{version.__name__} {activation}"
        check_against_float64(bound(version, activation), eager, a, b, bias, name=name)


@kinds_of_kernels
def test_float16_sums_in_float32(version):
    """4096 products of 0.25: in float16 the sum would stop growing."""
    a = torch.full((16, 4096), 0.5, dtype=torch.float16, device=machine.device())
    assert torch.equal(version(a, a.t()), torch.full_like(a[:, :16], 1024))


@kinds_of_kernels
def test_the_epilogue_rounds_once(version):
    """Bias and activation before the rounding: nearer to float64 than products rounded to bfloat16 first."""
    a, b, bias = detached((40, 48, 64), torch.bfloat16)
    want = matmul_eager(a.double(), b.double(), bias.double(), "gelu")
    got = version(a, b, bias, "gelu").double()
    assert ((got - want).abs() <= 0.51 * 2**-7 * want.abs() + 1e-5).all()


# --- layouts in memory ---------------------------------------------------------------------------------------


def layouts(t):
    """{name: the numbers of t, or some of them, in a layout that users really pass}."""
    m, n = t.shape
    wide = torch.randn(m + 3, 2 * n + 3, device=t.device).to(t.dtype)
    wide[1 : m + 1, 3 : n + 3] = t
    gaps = torch.full((2 * m, 2 * n), NAN, dtype=t.dtype, device=t.device)
    gaps[::2, ::2] = t
    return {
        "transposed": t.t().contiguous().t(),
        "a piece of a wider matrix, unaligned": wide[1 : m + 1, 3 : n + 3],
        "the same, transposed": wide.t().contiguous()[3 : n + 3, 1 : m + 1].t(),
        "every second row and column": gaps[::2, ::2],
        "one row for all": t[:1].expand(m, n),
        "one column for all": t[:, :1].expand(m, n),
        "one number for all": t[:1, :1].expand(m, n),
    }


@kinds_of_kernels
def test_strides(version):
    dtype = torch.bfloat16 if version is matmul_persistent else torch.float32
    inputs = detached((40, 48, 24), dtype)
    for k in (0, 1):
        for layout, strided in layouts(inputs[k]).items():
            values = [strided if i == k else t for i, t in enumerate(inputs)]
            values = [v.detach().requires_grad_() for v in values]
            check(version, values, "relu", f"{version.__name__}, {'ab'[k]}: {layout}")
    both = [layouts(t)["transposed"].requires_grad_() for t in inputs[:2]]
    check(version, both, name="both transposed")


@kinds_of_kernels
def test_a_matrix_times_its_transpose(version):
    a, *_ = tensors((40, 8, 24))
    check_against_float64(lambda a: version(a, a.t()), lambda a: a @ a.t(), a)


@kinds_of_kernels
def test_strided_bias(version):
    a, b, bias = detached()
    spread = torch.stack([bias, torch.full_like(bias, NAN)], dim=1)[:, 0]
    check(version, [t.requires_grad_() for t in (a, b, spread)])
    shared = bias[:1].expand(33).detach().requires_grad_()
    check(version, [a, b, shared])


@kinds_of_kernels
@settings(max_examples=20, deadline=None, derandomize=True)
@given(
    case=st.tuples(*[st.integers(0, 40)] * 3),
    transposed=st.tuples(st.booleans(), st.booleans()),
    steps=st.tuples(*[st.integers(1, 2)] * 4),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_any_view(version, case, transposed, steps, dtype):
    """Any sliced or transposed view gives the bits of its contiguous copy."""
    a, b, bias = detached(case, dtype)
    spread = [
        _spread(t, turn, step) for t, turn, step in zip((a, b), transposed, (steps[:2], steps[2:]))
    ]
    assert torch.equal(version(*spread, bias), version(a, b, bias))


def _spread(t, transposed, steps):
    """The numbers of t in memory of another order, with NaN between them."""
    source, steps = (t.t(), steps[::-1]) if transposed else (t, steps)
    shape = [n * step for n, step in zip(source.shape, steps)]
    wide = torch.full(shape, NAN, dtype=t.dtype, device=t.device)
    view = wide[:: steps[0], :: steps[1]].copy_(source)
    return view.t() if transposed else view


# --- gradients -----------------------------------------------------------------------------------------------


@with_own_gradients
@activations
def test_gradients_of_any_layout(version, activation):
    """dy of strides 0, as .sum() sends it; transposed; every second column."""
    dy = torch.randn(33, 17, device=machine.device()).t()
    gaps = torch.randn(17, 66, device=machine.device())[:, ::2]
    ones = torch.ones((), device=machine.device())
    for given_dy in (dy, gaps, ones.expand(17, 33), dy[:, :1].expand(17, 33)):
        inputs, again = tensors(), tensors()
        with torch.no_grad():
            for t, other in zip(again, inputs):
                t.copy_(other)
        got = torch.autograd.grad(version(*inputs, activation), inputs, given_dy)
        near_dy = given_dy.contiguous()
        want = torch.autograd.grad(matmul_eager(*again, activation), again, near_dy)
        for a, b in zip(got, want):
            assert_close(a, b)


@with_own_gradients
@pytest.mark.parametrize("activation", ["identity", "relu", "gelu"])
def test_second_backward_gives_the_same(version, activation):
    inputs = tensors()
    y = version(*inputs, activation)
    dy = torch.randn_like(y)
    before = dy.clone()
    first = torch.autograd.grad(y, inputs, dy, retain_graph=True)
    kept = [t.clone() for t in first]
    second = torch.autograd.grad(y, inputs, dy)
    assert all(torch.equal(a, b) for a, b in zip(kept, second))
    assert torch.equal(dy, before), "dy was changed"


@pytest.mark.parametrize("activation", ["identity", "relu", "gelu"])
def test_strips_of_several_steps(monkeypatch, activation):
    """dbias of more rows than a program takes at a time: real sizes only come to that on a GPU."""
    monkeypatch.setattr(op_file, "_MOST_STRIPS", 2)
    for case in [(150, 130, 8), (4100, 3, 8)]:
        check(matmul_triton, tensors(case), activation, str(case))


@pytest.mark.parametrize("version", [matmul_triton, registered], ids=lambda v: v.__name__)
@activations
def test_only_the_gradients_asked_for(version, activation):
    inputs = tensors()
    wanted = torch.autograd.grad(matmul_eager(*inputs, activation).square().sum(), inputs)
    for needed in itertools.product((False, True), repeat=3):
        if any(needed):
            given_inputs = [t if n else t.detach() for t, n in zip(inputs, needed)]
            leaves = [t for t, n in zip(inputs, needed) if n]
            got = torch.autograd.grad(version(*given_inputs, activation).square().sum(), leaves)
            for a, b in zip(got, [w for w, n in zip(wanted, needed) if n]):
                assert_close(a, b)


@pytest.mark.parametrize("version", [matmul_triton, registered], ids=lambda v: v.__name__)
def test_a_gradient_nobody_wants_costs_no_product(version):
    a, b, bias = tensors((16, 24, 40))
    for needed, products in [((1, 0, 0), 1), ((0, 1, 0), 1), ((1, 1, 1), 2), ((0, 0, 1), 0)]:
        inputs = [t if n else t.detach() for t, n in zip((a, b, bias), needed)]
        y = version(*inputs, "relu")
        traffic = count_traffic(lambda y=y: y.sum().backward())
        kernels = {name.split(".")[0] for name in traffic.by_argument}
        launches = 1 + products + needed[2]  # dz, da and db, the sum of dbias' parts
        assert traffic.launches == launches, (needed, kernels)


def saved_by(*args):
    """(y, the addresses of what autograd keeps for it)."""
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        y = matmul_triton(*args)
    return y, [t.data_ptr() for t in saved]


def test_what_autograd_saves():
    a, b, bias = tensors((16, 24, 40), torch.bfloat16)
    for activation in ACTIVATIONS:
        y, saved = saved_by(a, b, bias, activation)
        assert len(saved) == (2 if activation == "identity" else 3), activation
        assert {a.data_ptr(), b.data_ptr()} <= set(saved)
        assert (y.data_ptr() in saved) == (activation in ("relu", "sigmoid"))
    _, saved = saved_by(a, b.detach())
    assert saved == [b.data_ptr()], "a is kept for a gradient nobody wants"


@versions
def test_z_is_stored_for_a_gradient_alone(version):
    """gelu's slope needs a b + bias: a second store, which inference does not pay for."""
    inputs = tensors((16, 24, 40), torch.bfloat16)
    y_bytes = 16 * 24 * 2

    def stored(*inputs):
        traffic = count_traffic(lambda: version(*inputs, "gelu"))
        arguments = traffic.by_argument.items()
        return sum(
            t.stored for name, t in arguments if name.split(".")[1].startswith(("y_d", "z_"))
            or name.endswith("y_ptr") and t.stored == y_bytes
        )  # fmt: skip

    assert stored(*(t.detach() for t in inputs)) == y_bytes
    twice = version is not registered  # the op asks the caller whether to save z
    assert stored(*inputs) == (2 if twice else 1) * y_bytes


@ladder
def test_second_derivative_raises(version):
    inputs = tensors((5, 7, 6))
    dy = torch.randn(5, 7, device=machine.device(), requires_grad=True)
    (da,) = torch.autograd.grad(version(*inputs, "gelu"), inputs[:1], dy, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        da.sum().backward()


@ladder
def test_vmap_raises(version):
    a, b, bias = detached((5, 7, 6))
    with pytest.raises(RuntimeError, match="functorch|vmap|BatchedTensor"):
        torch.vmap(version, in_dims=(0, None, None))(a[None], b, bias)


@kinds_of_kernels
def test_checkpoint(version):
    from torch.utils.checkpoint import checkpoint

    inputs = tensors()
    again = [t.detach().requires_grad_() for t in inputs]
    call = bound(version, "gelu")
    checkpoint(call, *inputs, use_reentrant=False).square().sum().backward()
    call(*again).square().sum().backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(inputs, again))


@ladder
def test_autocast_is_that_of_a_linear_layer(version):
    """Of float32 and bfloat16 tensors alike, in any mixture; float64 stays as it is."""
    a, b, bias = tensors()
    with torch.autocast(machine.device().type, dtype=torch.bfloat16):
        for given_a in (a, a.bfloat16()):
            y = version(given_a, b, bias, "relu")
            want = F.linear(given_a, b.t(), bias).relu()
            assert y.dtype == want.dtype == torch.bfloat16
            assert_close(y, want, torch.bfloat16)
        assert version(a.double(), b.double()).dtype == torch.float64
    y.float().square().sum().backward()
    assert [t.grad.dtype for t in (a, b, bias)] == [torch.float32] * 3


@kinds_of_kernels
def test_same_bits_every_time(version):
    inputs = tensors((33, 40, 300))
    dy = torch.randn(33, 40, device=machine.device())
    runs = [torch.autograd.grad(version(*inputs, "gelu"), inputs, dy) for _ in range(3)]
    assert all(torch.equal(a, b) for run in runs[1:] for a, b in zip(runs[0], run))


# --- torch.library and torch.compile --------------------------------------------------------------------------


@activations
@pytest.mark.parametrize("save_z", [False, True], ids=["", "save_z"])
def test_opcheck(activation, save_z):
    torch.library.opcheck(matmul_op, (*tensors((5, 7, 6)), activation, False, save_z))


def test_opcheck_of_other_inputs():
    a, b, bias = tensors((5, 7, 6))
    torch.library.opcheck(matmul_op, (a, b, None, "relu"))
    torch.library.opcheck(matmul_op, (a, b.detach(), None, "gelu", True, True))
    torch.library.opcheck(matmul_op, (*tensors((0, 7, 6)), "gelu", False, True))
    torch.library.opcheck(matmul_op, (*tensors((5, 7, 0)), "silu"))
    turned = [t.detach().t().contiguous().t().requires_grad_() for t in (a, b)]
    torch.library.opcheck(matmul_op, (*turned, bias))
    dy = torch.randn(5, 7, device=machine.device())
    saved = [t.detach() for t in (dy, a, b, dy)]
    torch.library.opcheck(op_file._matmul_backward_op, (*saved, "gelu", False, [True] * 3))
    partly = (dy, None, b.detach(), None, "identity", False, [True, False, False])
    torch.library.opcheck(op_file._matmul_backward_op, partly)


def test_z_has_no_gradient_of_its_own():
    y, z = matmul_op(*tensors(), "gelu", False, True)
    assert y.requires_grad and not z.requires_grad
    assert_close(z, matmul_eager(*[t.detach() for t in tensors()]) * 0 + z)
    y, z = matmul_op(*tensors(), "gelu")
    assert z.numel() == 0


@versions
@activations
def test_gradcheck(version, activation):
    if version in LADDER[1:5] and activation != "gelu":
        return  # in float64 these are one kernel in other sizes
    inputs = tensors((3, 4, 5), torch.float64)
    assert torch.autograd.gradcheck(bound(version, activation), inputs, fast_mode=True)


def test_float64_is_exact():
    for version in VERSIONS:
        inputs = tensors((17, 33, 40), torch.float64)
        y, want = version(*inputs, "silu"), matmul_eager(*inputs, "silu")
        assert (y - want).abs().max() < 1e-13, version.__name__


def test_compile_fullgraph():
    def definition(a, b, bias):
        return matmul_eager(a * 2, b.t(), bias, "gelu").square()

    def model(a, b, bias):
        return matmul_triton(a * 2, b.t(), bias, "gelu").square()

    compiled = torch.compile(model, fullgraph=True)
    for m, n, k in [(17, 33, 40), (5, 8, 9)]:
        a, b, bias = tensors((m, n, k))
        inputs = [a, b.detach().t().contiguous().requires_grad_(), bias]
        check_against_float64(compiled, definition, *inputs)
        with torch.no_grad():
            assert_close(compiled(*inputs), definition(*inputs))


@activations
def test_compile_every_activation(activation):
    """With and without a bias, with all or some gradients, and without any; under autocast too."""
    torch._dynamo.reset()
    compiled = torch.compile(bound(matmul_triton, activation), fullgraph=True, backend="aot_eager")
    a, b, bias = tensors()
    for inputs in [
        (a, b, bias),
        (a, b),
        (a.detach(), b),
        (a, b.detach(), bias),
        (a.detach(), b.detach()),
    ]:
        check_against_float64(compiled, bound(matmul_eager, activation), *inputs)
    with torch.autocast(machine.device().type, dtype=torch.bfloat16):
        assert compiled(a, b, bias).dtype == torch.bfloat16


def test_compiled_forward_saves_z_instead_of_multiplying_again():
    torch._dynamo.reset()
    compiled = torch.compile(bound(matmul_triton, "gelu"), fullgraph=True, backend="aot_eager")
    inputs = tensors()
    forward = count_traffic(lambda: compiled(*inputs))
    y = compiled(*inputs)
    backward = count_traffic(lambda: y.sum().backward())
    assert (forward.launches, backward.launches) == (1, 4), "dz, da, db, dbias"


# --- the choice of a tile ------------------------------------------------------------------------------------

SIZES = [1, 7, 16, 17, 32, 33, 64, 100, 512, 781, 1823, 4096, 16384, 131072]
GENERATIONS = {"turing": 40, "ampere": 108, "hopper": 132}


@pytest.fixture(params=GENERATIONS)
def gpu(request, monkeypatch):
    """The choice for GPUs of several generations."""
    multiprocessors = GENERATIONS[request.param]
    monkeypatch.setattr(op_file, "_generation", lambda device: request.param)
    monkeypatch.setattr(op_file, "_n_multiprocessors", lambda device: multiprocessors)
    monkeypatch.setattr(op_file, "_tiles", op_file._tiles.__wrapped__)
    return request.param, multiprocessors


@pytest.mark.parametrize("kind", ["half", "tf32", "tf32x3", "double"])
@pytest.mark.parametrize("aligned", [True, False], ids=["aligned", "unaligned"])
def test_choice(gpu, kind, aligned):
    generation, multiprocessors = gpu
    tiles = op_file._tiles(kind, None, aligned)
    assert tiles is op_file._TILES[
        "turing" if generation == "turing" and kind != "double"
        else f"{kind.removesuffix('x3')}, unaligned" if not aligned and kind != "double"
        else f"{kind}, hopper" if generation == "hopper" and kind in ("half", "tf32x3") else kind
    ]  # fmt: skip
    programs = multiprocessors * (2 if kind == "tf32x3" else 1)
    for m, n, k in itertools.product(SIZES, SIZES, [0, *SIZES]):
        tile, parts = op_file._choose.__wrapped__(m, n, k, kind, None, aligned)
        n_tiles = -(-m // tile.m) * -(-n // tile.n)
        assert tile in tiles
        assert 1 <= parts <= op_file._MOST_PARTS
        if parts > 1:
            assert n_tiles * parts <= programs, "more parts than can run at once"
            assert k // parts >= op_file._LEAST_STEPS * tile.k, "parts too short"
        if tile is not tiles[-1]:
            assert tile.m < 2 * max(m, 9) and tile.n < 2 * max(n, 9), "a tile half empty"
        if min(m, n) >= 1024 and m * n >= 4096 * 4096:
            assert tile is tiles[0] and parts == 1


def test_choice_for_hopper_half(monkeypatch):
    monkeypatch.setattr(op_file, "_n_multiprocessors", lambda device: 132)
    choose = functools.partial(op_file._choose.__wrapped__, kind="half", device=machine.device())
    if machine.HAS_GPU and op_file._generation(machine.device()) != "hopper":
        pytest.skip("the tiles of Hopper")
    assert choose(16384, 8192, 1024)[0][:2] == (128, 256)
    tile, parts = choose(512, 512, 65536)
    assert tile[:2] == (128, 256) and parts > 8, "a weight's gradient: large tiles, K in parts"
    assert choose(1, 4096, 4096)[0].m == 16, "one row: as little padding as tl.dot allows"
    assert choose(16384, 16, 4096)[0].n == 16


def test_few_tiles_and_a_long_k_are_split():
    """On whatever machine this is; and the sum of the parts is right with everything on top."""
    inputs = tensors((16, 24, 2100), torch.bfloat16)
    traffic = count_traffic(lambda: matmul_triton(*(t.detach() for t in inputs)))
    assert {name.split(".")[0] for name in traffic.by_argument} == {
        "_matmul_kernel",
        "_sum_parts_kernel",
    }
    check(matmul_triton, inputs, "silu")


@pytest.mark.parametrize("parts", [2, 5, 7, 31])
def test_any_number_of_parts(parts):
    """Also more than there are steps, and a last one that is shorter."""
    launch = functools.partial(_launch_in_parts, n_parts=parts)
    for k in (1, 130, 1000):
        a, b, bias = detached((20, 24, k))
        y = op_file._forward(a, b, bias, "relu", False, launch=launch)[0]
        torch.testing.assert_close(y, matmul_eager(a, b, bias, "relu"), rtol=1e-4, atol=1e-4)


def test_parts_that_have_nothing_to_do_are_not_made():
    a, b, _ = detached((16, 16, 4 * 64 + 1))
    traffic = count_traffic(lambda: split(a, b))
    assert traffic.by_argument["_sum_parts_kernel.parts_ptr"].loaded == 3 * 16 * 16 * 4
    launch = functools.partial(_launch_in_parts, n_parts=30)
    traffic = count_traffic(lambda: op_file._forward(a, b, None, "identity", False, launch=launch))
    assert traffic.by_argument["_sum_parts_kernel.parts_ptr"].loaded == 5 * 16 * 16 * 4


# --- traffic and the order of programs ------------------------------------------------------------------------


def traffic_of(version, case, dtype=torch.bfloat16):
    inputs = detached(case, dtype)
    traffic = count_traffic(lambda: version(*inputs[:2]))
    by = {name.split(".")[1][0]: t for name, t in traffic.by_argument.items() if "bias" not in name}
    return traffic, by, [t.nbytes for t in inputs[:2]]


@ladder
def test_traffic(version):
    """Each piece of a is asked for once in each column of tiles, of b once in each row; y is written once."""
    m, n, k = (256, 512, 128) if version is not matmul_naive else (64, 48, 32)
    traffic, by, (a_bytes, b_bytes) = traffic_of(version, (m, n, k))
    tile = {
        matmul_naive: (16, 16),
        matmul_tiled: (128, 128),
        matmul_grouped: (128, 128),
        matmul_triton: None,
    }.get(version, (128, 256))
    if tile is None:
        tile = op_file._choose(m, n, k, "half", machine.device())[0]
    elif machine.HAS_GPU and op_file._generation(machine.device()) != "hopper":
        pytest.skip("the tiles of Hopper")
    assert traffic.launches == 1
    assert traffic.bytes_moved == a_bytes + b_bytes + m * n * 2
    assert by["a"].loaded == a_bytes * n // tile[1]
    assert by["b"].loaded == b_bytes * m // tile[0]
    assert by["y"].stored == by["y"].stored_distinct == m * n * 2


def test_a_persistent_kernel_has_one_program_for_each_multiprocessor():
    if op_file._generation(machine.device()) != "hopper":
        pytest.skip("TMA is Hopper's")
    multiprocessors = op_file._n_multiprocessors(machine.device())
    for case in [(512, 768, 64), (128, 256, 64)]:
        traffic, *_ = traffic_of(matmul_persistent, case)
        n_tiles = case[0] // 128 * case[1] // 256
        assert traffic.programs == min(multiprocessors, n_tiles)


def test_copies_for_tma_are_made_only_where_it_cannot_read():
    if op_file._generation(machine.device()) != "hopper":
        pytest.skip("TMA is Hopper's")
    a = torch.randn(40, 64, device=machine.device()).bfloat16()
    for t in (a, a.t(), a[:, 8:48], a[:7].t()):
        view, transposed = op_file._for_tma(t)
        assert view.untyped_storage().data_ptr() == a.untyped_storage().data_ptr()
        assert torch.equal(view.t() if transposed else view, t)
    for t in (a[:, 1:], a[:, :63].contiguous(), a[:1].expand(40, 64), a[::2, ::2]):
        view, transposed = op_file._for_tma(t)
        assert view.untyped_storage().data_ptr() != t.untyped_storage().data_ptr()
        assert torch.equal(view.t() if transposed else view, t)
        assert view.stride(0) % 8 == view.data_ptr() % 16 == 0


@triton.jit
def _places_kernel(
    out_ptr, n_rows, n_cols, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    tile = tl.program_id(0)
    row, col = op_file._place_of(tile, n_rows, n_cols, GROUP, BLOCK_M, BLOCK_N)
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
        found = places(tiles_m, tiles_n, group)
        assert sorted(found) == list(itertools.product(range(tiles_m), range(tiles_n)))
    assert places(3, 4, 1)[:5] == [(0, 0), (0, 1), (0, 2), (0, 3), (1, 0)]


def test_groups_need_fewer_rows_and_columns_at_a_time():
    """8 programs that run together: how many pieces of a and of b they read between them."""

    def most_read(group):
        order = places(8, 8, group)
        together = [order[i : i + 8] for i in range(0, 64, 8)]
        return max(len({r for r, _ in t}) + len({c for _, c in t}) for t in together)

    assert [most_read(group) for group in (1, 2, 4, 8)] == [1 + 8, 2 + 4, 4 + 2, 8 + 1]


# --- sizes past what 32 bits hold -----------------------------------------------------------------------------


def far_apart(shape):
    """A matrix with its rows 2**30 elements apart: 4 GiB of addresses, of which three pages are touched."""
    storage = torch.empty(2**31 + 64, dtype=torch.float16, device=machine.device())
    t = storage.as_strided(shape, (2**30, 1))
    return t.copy_(torch.arange(shape[0] * shape[1]).view(shape) / 32 - 0.5)


@kinds_of_kernels
def test_offsets_past_two_to_the_31(version):
    """Rows of a, columns of a, rows of b, columns of b."""
    far = far_apart((3, 16))
    near = {n: torch.randn(16, n, device=far.device).half() for n in (3, 8)}
    for a, b in [
        (far, near[8]),
        (far.t(), far.flip(0).contiguous()),
        (near[3], far),
        (near[8].t(), far.t()),
    ]:
        inputs = [t.detach().requires_grad_() for t in (a, b)]
        eager = bound(cases.near(matmul_eager), "silu")
        name = f"a {a.stride()}, b {b.stride()}"
        check_against_float64(bound(version, "silu"), eager, *inputs, name=name)


@pytest.mark.parametrize(
    ("version", "gap", "n_near"),
    [(matmul_naive, 2**27, 5), (matmul_triton, 2**24, 16), (matmul_triton, 2**25, 5)],
)
def test_steps_past_two_to_the_31(version, gap, n_near):
    """From one piece of a and b to the next: 16, 128 or (not aligned) 64 columns, each `gap` elements long."""
    n_inner = 2**31 // gap + 4
    storage = torch.empty(n_inner * gap, dtype=torch.float16, device=machine.device())
    far = storage.as_strided((n_inner, 5), (gap, 1))
    far.copy_(torch.randn(n_inner, 5))
    near = torch.randn(n_inner, n_near, device=far.device).half()
    check_against_float64(version, cases.near(matmul_eager), far.t(), near)
    check_against_float64(version, cases.near(matmul_eager), near.t(), far)


@kinds_of_kernels
@pytest.mark.parametrize("activation", ["identity", "gelu"])
def test_gradient_offsets_past_two_to_the_31(version, activation):
    dy = far_apart((3, 16))
    for turned in (False, True):
        inputs = tensors((16, 3, 5) if turned else (3, 16, 5), torch.float16)
        again = [t.detach().requires_grad_() for t in inputs]
        given_dy = dy.t() if turned else dy
        got = torch.autograd.grad(version(*inputs, activation), inputs, given_dy)
        near_dy = given_dy.contiguous()
        want = torch.autograd.grad(matmul_eager(*again, activation), again, near_dy)
        for a, b in zip(got, want):
            assert_close(a, b, torch.float16)


@pytest.mark.gpu
@ladder
def test_more_than_two_to_the_31_results(version):
    if torch.cuda.mem_get_info()[0] < 40e9:
        pytest.skip("needs 40 GB of GPU memory")
    m, n = 2**16 + 5, 2**15 + 8
    a, b, bias = detached((m, n, 16), torch.bfloat16)
    y = version(a, b, bias, "gelu")
    assert_close(y[-3:], matmul_eager(a[-3:], b, bias, "gelu"), torch.bfloat16)
    assert_close(y[:, -3:], matmul_eager(a, b[:, -3:], bias[-3:], "gelu"), torch.bfloat16)


# --- on a GPU ------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@versions
def test_cuda_graph(version):
    inputs = detached((257, 512, 4096), torch.bfloat16)
    version(*inputs, "gelu")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = version(*inputs, "gelu")
    for t in inputs:
        t.normal_()
    graph.replay()
    assert torch.equal(y, version(*inputs, "gelu"))


@pytest.mark.gpu
@versions
def test_current_stream(version):
    """A launch on the default stream would read a before the long kernels of this stream have written it."""
    a, b, _ = detached((4096, 4096, 64))
    version(a, b)
    want = matmul_eager(a + 64, b)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        x = a.repeat(1, 64)
        for _ in range(64):
            x = x + 1
        got = version(x[:, :64], b)
    torch.cuda.synchronize()
    torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-2)


@pytest.mark.gpu
@versions
def test_second_gpu(version):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    for dtype in DTYPES:
        check(version, tensors((300, 264, 520), dtype, torch.device("cuda:1")), "gelu")


@pytest.mark.gpu
@versions
def test_no_host_sync(version):
    inputs = tensors((300, 264, 2000), torch.bfloat16)
    version(*inputs, "gelu").sum().backward()
    torch.cuda.set_sync_debug_mode("error")
    try:
        version(*inputs, "gelu").sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.parametrize("version", [*LADDER, registered], ids=lambda v: v.__name__)
def test_another_size_does_not_compile_again(version):
    """Sizes of one kind: multiples of 16 that take the same tile, gradients too."""
    with _count_compilations() as compiled:
        for n, (rows, cols, inner) in enumerate([(4096, 4096, 2048), (4112, 8192, 2064)]):
            inputs = tensors((rows, cols, inner), torch.bfloat16)
            version(*inputs, "relu").sum().backward()
            if n == 0:
                compiled.clear()
    assert not compiled, compiled


@pytest.mark.gpu
def test_float32_is_multiplied_exactly_unless_allowed():
    inputs = detached((512, 512, 512))
    want = matmul_eager(*(t.double() for t in inputs))
    exact, rounded = (
        (matmul_triton(*inputs, allow_tf32=allow) - want).abs().max() for allow in (False, True)
    )
    assert exact < 2e-5
    assert exact < rounded / 10
    assert rounded < 0.05
    leaves = [t.requires_grad_() for t in inputs[:2]]
    for allow, least, most in [(False, 0, 1e-4), (True, 1e-4, 1)]:
        (da,) = torch.autograd.grad(
            matmul_triton(*leaves, allow_tf32=allow).square().sum(), leaves[:1]
        )
        y = leaves[0].double() @ leaves[1].double()
        error = (da - 2 * y @ leaves[1].double().t()).abs().max() / da.abs().max()
        assert least <= error <= most


# --- machine code --------------------------------------------------------------------------------------------

TYPE_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16"}


class _Recorder:
    """Stands in for a kernel: takes note of the arguments of its launches, and launches nothing."""

    def __init__(self, kernel, launches):
        self.kernel, self.launches = kernel, launches

    def __getitem__(self, grid):
        return lambda *args, **options: self.launches.append((self.kernel, args, options))


def launches_of(monkeypatch, call):
    """(kernel, arguments, options) of the launches that `call()` would make."""
    launches = []
    with monkeypatch.context() as patched:
        for name in [name for name in vars(op_file) if name.endswith("_kernel")]:
            patched.setattr(op_file, name, _Recorder(getattr(op_file, name), launches))
        call()
    return launches


def compiled(launch, arch=90):
    """A recorded launch compiled for a GPU. A descriptor's type is its element type and its block."""
    kernel, args, options = launch
    options = dict(options)
    settings = {n: options.pop(n) for n in ("num_warps", "num_stages") if n in options}
    plain = [0 if isinstance(a, TensorDescriptor) else a for a in args]
    signature = signature_of(kernel, *plain, **options)
    for name, value in zip(signature_of_names(kernel), args):
        if isinstance(value, TensorDescriptor):
            block = ", ".join(map(str, value.block_shape))
            signature.types[name] = f"tensordesc<{TYPE_NAMES[value.base.dtype]}[{block}]>"
    return compile_for(kernel, signature, arch=arch, **settings)


def signature_of_names(kernel):
    return [p.name for p in kernel.params] if hasattr(kernel, "params") else kernel.arg_names


def operands(dtype, transposed=(False, False), case=(1024, 2048, 512)):
    m, n, k = case
    shapes = [(k, m) if transposed[0] else (m, k), (n, k) if transposed[1] else (k, n)]
    a, b = (torch.empty(s, dtype=dtype, device=machine.device()) for s in shapes)
    y, z = (torch.empty(m, n, dtype=dtype, device=machine.device()) for _ in range(2))
    bias = torch.empty(n, dtype=dtype, device=machine.device())
    return y, z, a.t() if transposed[0] else a, b.t() if transposed[1] else b, bias


def mix_of(kernel):
    """{the first two words of an instruction: how many of it}."""
    return {op: n for op, n in instruction_mix(kernel).items()}


def narrow_accesses(mix):
    """Loads and stores of less than 16 bytes, those of the bias apart (which are few and in L1)."""
    stores = [op for op in mix if op.startswith("STG") and "128" not in op]
    copies = [op for op in mix if op.startswith("LDGSTS") and "128" not in op]
    return stores + copies


ORIENTATIONS = [(False, False), (True, False), (False, True), (True, True)]


@pytest.mark.parametrize("transposed", ORIENTATIONS, ids=["a b", "aᵀ b", "a bᵀ", "aᵀ bᵀ"])
def test_persistent_kernel_is_wgmma_and_tma(monkeypatch, transposed):
    """Forward is a b, da is dz bᵀ, db is aᵀ dz: tensor cores read all of them from shared memory."""
    monkeypatch.setattr(op_file, "_generation", lambda device: "hopper")
    y, z, a, b, bias = operands(torch.bfloat16, transposed)
    call = functools.partial(
        op_file._launch_persistent,
        y,
        z,
        a,
        b,
        bias,
        "gelu",
        "half",
        op_file._TILES["half, hopper"][0],
    )
    (launch,) = launches_of(monkeypatch, call)
    kernel = compiled(launch)
    mix = mix_of(kernel)
    assert mix.get("HGMMA.64x256x16.F32.BF16") == 4, mix
    assert mix["UTMALDG.2D"] and mix["UTMASTG.2D"]
    assert not [op for op in mix if op.startswith(("HMMA", "STG", "LDGSTS"))], "not by TMA"
    assert kernel.spills == 0
    assert kernel.shared_bytes <= 227 * 1024


@pytest.mark.parametrize("transposed", ORIENTATIONS[::3], ids=["a b", "aᵀ bᵀ"])
def test_pipelined_kernel_is_wgmma_and_wide_asynchronous_copies(monkeypatch, transposed):
    monkeypatch.setattr(op_file, "_generation", lambda device: "hopper")
    monkeypatch.setattr(op_file, "_tiles", op_file._tiles.__wrapped__)
    y, z, a, b, bias = operands(torch.bfloat16, transposed)
    call = functools.partial(op_file._launch_pipelined, y, z, a, b, bias, "silu", "half")
    (launch,) = launches_of(monkeypatch, call)
    kernel = compiled(launch)
    mix = mix_of(kernel)
    assert mix.get("HGMMA.64x256x16.F32.BF16") == 4, mix
    assert mix["LDGSTS.E.BYPASS.128"] and not narrow_accesses(mix)
    assert kernel.spills == 0


@pytest.mark.parametrize("rung", ["tiled", "grouped"])
def test_tiled_kernels_have_nothing_in_flight(monkeypatch, rung):
    monkeypatch.setattr(op_file, "_generation", lambda device: "hopper")
    monkeypatch.setattr(op_file, "_tiles", op_file._tiles.__wrapped__)
    y, z, a, b, bias = operands(torch.bfloat16)
    launch_rung = getattr(op_file, f"_launch_{rung}")
    (launch,) = launches_of(monkeypatch, lambda: launch_rung(y, z, a, b, bias, "relu", "half"))
    kernel = compiled(launch)
    mix = mix_of(kernel)
    assert [op for op in mix if op.startswith("HGMMA")]
    assert mix["LDG.E.128"] and not [op for op in mix if op.startswith("LDGSTS")]
    assert kernel.spills == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_naive_kernel_has_no_tensor_cores(monkeypatch, dtype):
    """Triton takes one way to write a sum of products for tl.dot, and then float32 is rounded to tf32."""
    args = (*operands(dtype), "relu", op_file._kind(dtype, False))
    (launch,) = launches_of(monkeypatch, lambda: op_file._launch_naive(*args))
    mix = mix_of(compiled(launch))
    assert not [op for op in mix if op.startswith(("HGMMA", "HMMA"))]
    assert mix["FFMA"] and not mix.get("SHFL.BFLY"), "a sum over threads instead of in each"


def test_float32_is_rounded_to_tf32_only_if_allowed(monkeypatch):
    """Nowhere in silence: forward and both products of the backward pass."""
    inputs = [t.requires_grad_() for t in operands(torch.float32, case=(64, 64, 64))[2:4]]
    dy = torch.empty(64, 64, device=machine.device())
    for allow in (False, True):
        launches = launches_of(
            monkeypatch,
            lambda allow=allow: matmul_triton(*inputs, allow_tf32=allow).backward(dy),
        )
        assert len(launches) == 3
        for launch in launches:
            assert launch[2]["PRECISION"] == ("tf32" if allow else "tf32x3")
            mix = mix_of(compiled(launch, arch=80))
            assert any(op.startswith("HMMA") and "TF32" in op for op in mix), mix


# Shared memory of one program, at most: of GPUs of that generation the one with the least
SHARED = {75: 64 * 1024, 80: 99 * 1024, 90: 227 * 1024}
SWEEP = [
    pytest.param(name, tile, dtype, arch, id=f"{name}-{tile.m}x{tile.n}x{tile.k}-{dtype}-sm_{arch}")
    for name, tiles in op_file._TILES.items()
    if "unaligned" not in name
    for n, tile in enumerate(tiles)
    for dtype, arch in {
        "half, hopper": [(torch.bfloat16, 90)],
        "half": [(torch.float16, 80)],
        "tf32": [(torch.float32, 80), (torch.float32, 90)],
        "tf32x3, hopper": [(torch.float32, 90)],
        "tf32x3": [(torch.float32, 80)],
        "double": [(torch.float64, 80), (torch.float64, 90)],
        "turing": [(torch.float32, 75), (torch.bfloat16, 75)],
    }[name]
]


@pytest.mark.parametrize(("name", "tile", "dtype", "arch"), SWEEP)
@pytest.mark.parametrize("transposed", ORIENTATIONS[::3], ids=["a b", "aᵀ bᵀ"])
def test_every_tile_of_the_table(monkeypatch, name, tile, dtype, arch, transposed):
    """No spills with the largest epilogue, room in shared memory, the units that its name promises."""
    kind = "ieee" if name == "turing" else name.removesuffix(", hopper")
    y, z, a, b, bias = operands(dtype, transposed)
    args = (y, z, a, b, bias, "gelu", kind, tile)
    launches = launches_of(monkeypatch, lambda: op_file._launch_tiles(*args))
    if name == "half, hopper":
        monkeypatch.setattr(op_file, "_generation", lambda device: "hopper")
        launches += launches_of(monkeypatch, lambda: op_file._launch_persistent(*args))
    for launch in launches:
        kernel = compiled(launch, arch)
        mix = mix_of(kernel)
        # gelu, z and three products: a word or two of an epilogue may lie in local memory, Triton 3.6: four
        most = 16 if cases.release(triton) < (3, 7) else 8
        assert kernel.spills <= (most if name == "tf32x3, hopper" else 0)
        assert kernel.shared_bytes <= SHARED[arch]
        units = {"double": ("DMMA",), "ieee": ("FFMA",)}.get(kind, ("HGMMA", "HMMA"))
        assert [op for op in mix if op.startswith(units)]
        assert arch == 75 or mix.get("LDGSTS.E.BYPASS.128") or mix.get("UTMALDG.2D")
        if dtype != torch.float64:
            assert not [op for op in mix if re.match(r"D(ADD|MUL|FMA|SETP)|F2F.*F64", op)]


@pytest.mark.parametrize("arch", [80, 90])
@pytest.mark.parametrize("name", ["half, unaligned", "tf32, unaligned"])
def test_tiles_for_rows_that_begin_anywhere(monkeypatch, name, arch):
    dtype, kind = (torch.bfloat16, "half") if name[:4] == "half" else (torch.float32, "tf32x3")
    monkeypatch.setattr(op_file, "_generation", lambda device: "hopper" if arch == 90 else "ampere")
    for tile in op_file._TILES[name]:
        args = (*operands(dtype, case=(1023, 2047, 511)), "gelu", kind, tile)
        (launch,) = launches_of(monkeypatch, lambda args=args: op_file._launch_tiles(*args))
        kernel = compiled(launch, arch)
        mix = mix_of(kernel)
        # addresses of single elements, each its own: of the widest tile a few lie in local memory
        assert kernel.spills <= (48 if tile.m == tile.n == 128 else 4)
        assert kernel.shared_bytes <= SHARED[arch]
        assert [op for op in mix if op.startswith(("HGMMA", "HMMA"))]
        assert not [op for op in mix if op.startswith("LDGSTS")], "of single elements, or of bytes"


@pytest.mark.parametrize("activation", ["identity", "relu", "gelu"])
def test_dz_kernel_moves_sixteen_bytes_at_a_time(monkeypatch, activation):
    dy, saved = (
        torch.empty(4096, 2048, dtype=torch.bfloat16, device=machine.device()) for _ in "ab"
    )
    saved = None if activation == "identity" else saved
    call = functools.partial(op_file._dz, dy, saved, activation, True, True)
    kernel = compiled(launches_of(monkeypatch, call)[0])
    mix = mix_of(kernel)
    assert mix["LDGSTS.E.BYPASS.128"]
    assert ("STG.E.128" in mix) == (activation != "identity"), "identity writes no dz: it is dy"
    assert kernel.spills == 0


# --- bad input -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", [*LADDER, registered], ids=lambda v: v.__name__)
def test_bad_input_is_refused_in_a_sentence(version):
    a, b, bias = detached((4, 6, 5))
    wrong = {
        "a list": ((a.tolist(), b, bias), TypeError, "a must be a torch.Tensor"),
        "a number for a bias": ((a, b, 1.0), TypeError, "bias must be a torch.Tensor"),
        "integers": ((a.int(), b.int(), bias), TypeError, "floating-point"),
        "complex": ((a.to(torch.complex64), b, bias), TypeError, "floating-point"),
        "two dtypes": ((a, b.half(), bias), TypeError, "cast one"),
        "a bias of another dtype": ((a, b, bias.double()), TypeError, "cast one"),
        "a batch": ((a[None], b, bias), ValueError, r"a\.flatten"),
        "a vector": ((a, b[:, 0], bias), ValueError, "must be matrices"),
        "another K": ((a, b[:3], bias), ValueError, "as many columns as b has rows"),
        "a weight as a layer has it": ((a, b.t(), bias), ValueError, r"weight\.t\(\)"),
        "a short bias": ((a, b, bias[:5]), ValueError, r"\(6,\), got \(5,\)"),
        "a bias in a row": ((a, b, bias[None]), ValueError, "one element for each column"),
        "an activation": ((a, b, bias, "tanh"), ValueError, "identity, relu, gelu, silu, sigmoid"),
        "another device": ((a, b.to("meta"), bias), ValueError, "one device"),
        "a bias elsewhere": ((a, b, bias.to("meta")), ValueError, "one device"),
        "no device": ([t.to("meta") for t in (a, b, bias)], ValueError, "matmul_eager"),
    }
    name = "matmul_op" if version is registered else version.__name__
    for what, (bad, kind, message) in wrong.items():
        of_torch = "Tensor" in message or any(t.is_meta for t in bad[1:3] if torch.is_tensor(t))
        if version is registered and of_torch:
            continue  # torch.library itself refuses these, and has an answer for meta tensors
        with pytest.raises(kind, match=f"{name}: .*{message}") as caught:
            version(*bad)
        assert len(str(caught.value)) > 40, what


@pytest.mark.gpu
@ladder
def test_cpu_input_on_a_gpu_machine(version):
    with pytest.raises(ValueError, match="matmul_eager"):
        version(*tensors(device=torch.device("cpu")))


# --- CUDA ----------------------------------------------------------------------------------------------------


def source():
    return (ROOT / "lib/ops/matmul.cu").read_text()


# (M, N, K): 16-byte rows and others, the last tile cut on each side, several steps, several tiles
CUDA_CASES = [
    (1, 1, 1),
    (5, 7, 3),
    (16, 24, 40),
    (130, 16, 9),
    (9, 136, 24),
    (3, 130, 33),
    (4, 8, 0),
    (0, 3, 4),
]


@needs_cuda
def test_cuda_equals_float64():
    """With no GPU under the checker: no access out of bounds, no race, nothing read before it is written."""
    for case, dtype in itertools.product(CUDA_CASES, [*DTYPES, torch.float64]):
        inputs = detached(case, dtype)[:2]
        check_against_float64(matmul_cuda, matmul_eager, *inputs, name=f"{case} {dtype}")
    check_against_float64(matmul_cuda, matmul_eager, *tensors((5, 7, 9))[:2])  # with gradients


@needs_cuda
def test_cuda_sums_a_long_row_in_parts():
    """A running sum's error grows with its length: parts of 1024 are to lose less than one sum does."""
    a, b, _ = detached((3, 5, 1033))  # rows that begin anywhere
    torch.testing.assert_close(
        matmul_cuda(a, b).double(), a.double() @ b.double(), rtol=1e-3, atol=1e-3
    )
    n_inner = 3080
    a, b, _ = detached((16, 16, n_inner))
    exact, running = a.double() @ b.double(), torch.zeros(16, 16, device=a.device)
    for k in range(n_inner):
        running += a[:, k, None] * b[k]
    error = {
        name: (y - exact).square().mean().sqrt().item()
        for name, y in (("parts", matmul_cuda(a, b)), ("one sum", running))
    }
    assert error["parts"] < 0.75 * error["one sum"], error


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
def test_cuda_equals_float64_at_real_sizes(dtype):
    for case in BIG:
        check_against_float64(matmul_cuda, matmul_eager, *tensors(case, dtype)[:2], name=str(case))


@needs_cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_cuda_strides(dtype):
    inputs = detached((20, 24, 16), dtype)[:2]
    for k, layout in itertools.product((0, 1), layouts(inputs[0])):
        values = [layouts(t)[layout] if i == k else t for i, t in enumerate(inputs)]
        check_against_float64(matmul_cuda, matmul_eager, *values, name=f"{'ab'[k]}: {layout}")


@needs_cuda
def test_cuda_nan_and_infinities():
    a, b, _ = tensors((20, 24, 33))
    with torch.no_grad():
        a[1, 2], a[3, 32], b[32, 5], b[0, 23], a[19, 0] = NAN, INF, -INF, NAN, INF
    check_against_float64(matmul_cuda, matmul_eager, a, b)


@needs_cuda
def test_cuda_traffic():
    """a once for each column of tiles, b once for each row of them: 128 x 128."""
    if machine.HAS_GPU:
        pytest.skip("the CPU build counts")
    namespace = op_file._cuda()
    for m, n, k in [(130, 16, 9), (16, 136, 24), (129, 129, 5)]:
        a, b, _ = detached((m, n, k))
        cuda.memory_traffic(namespace)
        y = matmul_cuda(a, b)
        traffic = cuda.memory_traffic(namespace)
        across, down = -(-n // 128), -(-m // 128)
        assert traffic.thread_blocks == across * down
        assert traffic.bytes_read == a.nbytes * across + b.nbytes * down
        assert traffic.bytes_written == y.nbytes


def test_the_cuda_source_uses_no_double_by_accident():
    code = re.sub(r"//[^\n]*", "", source())
    kernels = code[: code.index("void launch")]
    assert not re.search(r"\d\.\d*(?!\d*f)", kernels), "a literal without f is a double"
    assert "cudaDeviceSynchronize" not in code
    assert "getCurrentCUDAStream" in code
    assert "CUDAGuard" in code


def test_nvcc_compiles_it_without_spills():
    if not cuda.find_nvcc() or cuda.why_no_cuda():
        pytest.skip("there is no nvcc")
    kernels = cuda.nvcc_check(source())
    assert len(kernels) == 8  # four dtypes, wide and single loads
    assert not [k.kernel for k in kernels if k.spill_store_bytes]
    two_at_a_time = [k for k in kernels if re.search(r"(Half|BFloat16), 8|float, 4", k.kernel)]
    assert len(two_at_a_time) == 3
    assert all(k.registers <= 128 for k in two_at_a_time), "one thread block to a multiprocessor"


@needs_cuda
def test_the_cuda_code_says_what_is_wrong():
    forward = op_file._cuda().forward
    a, b, _ = detached((4, 6, 8))
    y = torch.empty(4, 6, device=a.device)
    for bad, message in [
        ((a, b, y[:3]), r"\(M, K\)"),
        ((a, b[:7], y), r"\(K, N\)"),
        ((a[0], b, y), r"\(M, K\)"),
        ((a, b.t().contiguous().t(), y), "contiguous"),
        ((a, b, torch.empty(6, 4, device=a.device).t()), "contiguous"),
        ((a, b, y.half()), "one dtype"),
    ]:
        with pytest.raises(ValueError, match=message):
            forward(*bad)


@needs_cuda
def test_matmul_cuda_refuses_bad_input_too():
    a, b, _ = detached((4, 6, 8))
    with pytest.raises(ValueError, match=r"matmul_cuda: .*as many columns"):
        matmul_cuda(a, b[:3])
    with pytest.raises(TypeError, match="matmul_cuda: .*cast one"):
        matmul_cuda(a, b.half())
