"""lora_linear: values and gradients of both kernels and of cuBLAS; layouts; what is saved and launched; machine
code; LoRALinear, and the mistakes that such modules are known for."""

import copy
import functools
import itertools
import re

from lib import machine
from lib.measure.check import check_against_float64
from lib.nogpu.compile_only import Signature, compile_for, instruction_mix, signature_of
from lib.nogpu.memory import count_traffic
from lib.ops import lora_linear as op_file
from lib.ops.lora_linear import (
    LoRALinear,
    lora_linear_cublas,
    lora_linear_eager,
    lora_linear_op,
    lora_linear_triton,
)
from lib.tests.ops import cases
from lib.tests.ops.test_ops import DTYPES, _count_compilations, assert_close

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from triton.tools.tensor_descriptor import TensorDescriptor

# (shape of x but for K, N, K, rank)
CASES = [
    ((129,), 77, 33, 5),
    ((17,), 264, 136, 64),
    ((2, 3), 8, 16, 4),
    ((7,), 20, 24, 100),
    ((1,), 40, 48, 16),
    ((1,), 1, 1, 1),
    ((), 6, 10, 3),
    ((0,), 5, 7, 2),
    ((5,), 0, 7, 2),
    ((3,), 5, 0, 2),
    ((2, 0, 3), 4, 8, 2),
]
SMALL = ((9,), 24, 40, 6)
BIG = [((1823,), 781, 333, 16), ((3, 1000), 1024, 4096, 16), ((4096,), 4096, 4096, 64)]
ACTIVATIONS = list(op_file._ACTIVATIONS)
HOPPER = op_file._TILES["half", "hopper"]
ALL_TILES = sorted({tile for tiles in op_file._TILES.values() for tile in tiles})
LARGE_TMA_TILES = [tile for tile in HOPPER if tile.m >= 64 <= tile.n]


def registered(
    x, weight, lora_a, lora_b, bias=None, scale=1.0, activation="identity", allow_tf32=False
):
    """y of the registered op, called as torch.compile calls it."""
    save_z = activation in ("gelu", "silu")
    return lora_linear_op(x, weight, lora_a, lora_b, bias, scale, activation, allow_tf32, save_z)[0]


def by(launch, tile):
    """A version that goes through one of the two kernels with one tile, whatever the sizes."""

    def version(x, weight, lora_a, lora_b, bias=None, scale=1.0, activation="identity"):
        def launch_it(*args):
            launch(*args, tile)

        arguments = (x, weight, lora_a, lora_b, bias, scale, activation, False, launch_it)
        return op_file._LoRALinear.apply(*arguments)

    return version


tma = by(op_file._launch_tma_kernel, HOPPER[3])
tma.__name__ = "tma"
VERSIONS = [lora_linear_triton, lora_linear_cublas, registered]
versions = pytest.mark.parametrize("version", VERSIONS, ids=lambda v: v.__name__)
wrappers = pytest.mark.parametrize("version", VERSIONS[:2], ids=lambda v: v.__name__)
activations = pytest.mark.parametrize("activation", ACTIVATIONS)
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)
needs_tma = pytest.mark.skipif(
    machine.HAS_GPU and op_file._gpu_family(machine.device()) != "hopper",
    reason="needs a GPU that has TMA",
)


def inputs(case=SMALL, dtype=torch.float32, bias=True, coarse=False, device=None):
    """x, weight, lora_a, lora_b, bias: all but weight are leaves that require grad.

    coarse: numbers with few digits, whose products 16 bits hold. relu needs them: where z is near 0, rounding
    decides whether a gradient is 0, and one that decides otherwise than float64 is off by all of it.
    """
    lead, n, k, r = case
    device = device or machine.device()

    def draw(*shape, like=1):
        t = torch.randint(-1, 2, shape).float() if coarse else torch.randn(shape)
        return (t * 2.0 ** -(like.bit_length() // 2)).to(device, dtype)

    tensors = [draw(*lead, k), draw(n, k, like=k), draw(r, k, like=k), draw(n, r), draw(n)]
    tensors = tensors if bias else [*tensors[:4], None]
    return [t if t is None or i == 1 else t.requires_grad_() for i, t in enumerate(tensors)]


def detached(*args, **kwargs):
    return [t if t is None else t.detach() for t in inputs(*args, **kwargs)]


def bound(version, **kwargs):
    """`version` with keyword arguments, and its name kept for messages."""
    return functools.wraps(version)(functools.partial(version, **kwargs))


def check(
    version, tensors, scale=0.75, activation="identity", name=None, slack=1e-6, eager=lora_linear_eager
):  # fmt: skip
    how = {"scale": scale, "activation": activation}
    ours, eager = bound(version, **how), bound(eager, **how)
    check_against_float64(ours, eager, *tensors, name=name or activation, slack=slack)


def leaves_of(tensors):
    return [t for t in tensors if t is not None and t.requires_grad]


# --- values and gradients ------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", [*VERSIONS, tma], ids=lambda v: v.__name__)
@dtypes
@activations
def test_equals_float64(version, dtype, activation):
    if version is tma and (dtype == torch.float32 or needs_tma.args[0]):
        pytest.skip("TMA is for 16 bits here, and for GPUs that have it")
    for case in [((33,), 72, 40, 6), ((7, 9), 24, 80, 16)]:
        check(
            version, inputs(case, dtype, coarse=activation == "relu"), 0.75, activation, str(case)
        )


@versions
@dtypes
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
def test_every_shape_equals_float64(version, dtype, bias):
    for k, case in enumerate(CASES):
        activation = ACTIVATIONS[k % 5]
        tensors = inputs(case, dtype, bias, coarse=activation == "relu")
        # of a handful of elements eager's largest error is now and then a small one
        slack = 1e-6 if case[0] in ((129,), (17,)) else 4 * torch.finfo(dtype).eps
        check(version, tensors, 0.75, activation, str(case), slack)


@wrappers
@activations
def test_errors_are_smaller_than_eagers(version, activation):
    """Of y and each gradient, in the mean of their squares: s within u's rounding costs nothing."""
    ratios = []
    for _ in range(8):
        tensors = inputs(((12,), 16, 24, 4), torch.bfloat16, coarse=activation == "relu")
        exact = [t.detach().double().requires_grad_(t.requires_grad) for t in tensors]
        dy = torch.randn(12, 16, device=machine.device()).bfloat16()
        errors = []
        want = _with_gradients(lora_linear_eager, exact, dy, activation)
        for each in (version, lora_linear_eager):
            got = _with_gradients(each, tensors, dy, activation)
            squares = [(a.double() - b).square().mean() for a, b in zip(got, want)]
            errors.append(torch.stack(squares))
        ratios.append(torch.stack(errors))
    ours, eagers = torch.stack(ratios).mean(0)
    assert (ours <= 1.05 * eagers).all(), (ours / eagers).sqrt()


def _with_gradients(version, tensors, dy, activation):
    y = version(*tensors, 0.75, activation)
    return [y, *torch.autograd.grad(y, leaves_of(tensors), dy.to(y.dtype))]


@pytest.mark.gpu
@wrappers
@dtypes
@activations
def test_equals_float64_at_real_sizes(version, dtype, activation):
    for case in BIG:
        tensors = inputs(case, dtype, coarse=activation == "relu")
        check(version, tensors, 0.75, activation, str(case))


@pytest.mark.parametrize("tile", ALL_TILES, ids=lambda t: "x".join(map(str, t[:3])))
def test_every_tile_of_the_pointer_kernel(tile):
    """More than one tile each way, and steps over K and rank, the last of each cut."""
    if (
        machine.HAS_GPU
        and tile not in op_file._TILES["half", op_file._gpu_family(machine.device())]
    ):
        pytest.skip("not of this GPU")
    version = by(op_file._launch_pointer_kernel, tile)
    case = ((tile.m + 5,), tile.n + 9, tile.k + 7, min(tile.k, 64) + 3)
    check(version, inputs(case, torch.float16), 0.75, "silu")
    if not machine.HAS_GPU:
        case = ((2 * tile.m,), tile.n, 2 * tile.k, 4)
        check(version, inputs(case, torch.float32, bias=False), 0.75, "identity")


@needs_tma
@pytest.mark.parametrize("tile", LARGE_TMA_TILES, ids=lambda t: "x".join(map(str, t[:3])))
def test_every_tile_of_the_tma_kernel(tile):
    """More tiles than programs, cut on every side; ranks of less than 16, of one piece and of two."""
    version = by(op_file._launch_tma_kernel, tile)
    cases = [(4 * tile.m + 9, 2 * tile.n + 8, 72, 3), (5, 8, 2 * tile.k, 16), (tile.m, 24, 8, 100)]
    for (m, n, k, r), activation in zip(cases, ("silu", "relu", "identity")):
        tensors = inputs(((m,), n, k, r), torch.bfloat16, coarse=activation == "relu")
        check(version, tensors, 0.75, activation, str((m, n, k, r)))


@needs_tma
def test_both_kernels_add_the_low_rank_product_of_their_own_tile():
    """With x = 0 nothing else is left to see."""
    x, weight, lora_a, lora_b, bias = detached(((330,), 200, 64, 16), torch.bfloat16)
    u = torch.randint(-3, 4, (330, 16), device=x.device).to(x.dtype)
    want = u.double() @ lora_b.double().T + bias.double()
    for launch in (op_file._launch_pointer_kernel, op_file._launch_tma_kernel):
        y = x.new_empty(330, 200)
        zeros = torch.zeros_like(x)
        launch(y, None, zeros, weight, u, lora_b, bias, 1.0, "identity", False, HOPPER[3])
        error = (y.double() - want).abs()
        assert (error <= 2**-8 * want.abs() + 1e-6).all(), launch.__name__


@wrappers
@pytest.mark.parametrize("scale", [2, 0.3, -1.5, 0, 0.0, 1e-3])
def test_scales(version, scale):
    for dtype in (torch.float32, torch.bfloat16):
        check(version, inputs(dtype=dtype), scale, "gelu", f"scale {scale}, {dtype}")


def test_nothing_of_memory_just_allocated_is_read():
    """beta=0 means: NaN in the memory of a result does not come through, with a scale of 0 neither."""
    a, b = torch.randn(5, 7, device=machine.device()), torch.randn(7, 3, device=machine.device())
    for scale in (0.0, 0.5):
        stale = torch.full((5, 3), float("nan"), device=a.device)
        assert_close(stale.addmm_(a, b, beta=0, alpha=scale), scale * (a @ b))


@dtypes
def test_the_sum_is_rounded_once(dtype):
    """Stricter than twice eager's error: with exact products, half of the last place is all that is lost."""
    x, weight, lora_a, lora_b, bias = detached(((40,), 24, 64, 8), dtype, coarse=True)
    bias += 2.0**-9
    exact = [t.double() for t in (x, weight, lora_a, lora_b, bias)]
    for activation in ("identity", "relu"):
        want = lora_linear_eager(*exact, 0.5, activation)
        got = lora_linear_triton(x, weight, lora_a, lora_b, bias, 0.5, activation).double()
        assert ((got - want).abs() <= 0.51 * torch.finfo(dtype).eps * want.abs()).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_u_is_rounded_once_and_not_scaled(dtype):
    tensors = detached(((40,), 8, 16, 8), dtype)
    _, u, _ = lora_linear_op(*tensors, 0.7)
    want = tensors[0].double() @ tensors[2].double().T
    error = (u.double() - want).abs() - 0.51 * torch.finfo(dtype).eps * want.abs()
    assert (error <= 1e-5).all()


# --- layouts in memory ---------------------------------------------------------------------------------------


@wrappers
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_strides_of_x(version, dtype):
    x, *rest = inputs(((34,), 24, 40, 6), dtype)
    for layout, strided in cases.layouts(x.detach()).items():
        tensors = [strided.detach().requires_grad_(), *rest]
        check(version, tensors, 0.75, "sigmoid", layout)


@wrappers
def test_strides_of_everything_else(version):
    tensors = inputs(((9,), 24, 40, 6))
    for k, label in ((1, "weight"), (2, "lora_a"), (3, "lora_b")):
        for layout, strided in cases.layouts(tensors[k].detach()).items():
            if layout != "four dimensions, permuted":
                strided = strided.detach().requires_grad_(k != 1)
                changed = [strided if i == k else t for i, t in enumerate(tensors)]
                check(version, changed, 0.75, "silu", f"{label} {layout}")
    check(version, [*tensors[:4], cases.spread(tensors[4])], 0.75, "silu", "spread bias")


def test_strides_over_several_steps_and_tiles():
    """Of x and weight, by tiles that are smaller than they are."""
    version = by(op_file._launch_pointer_kernel, op_file._Tile(16, 16, 16, 4, 1))
    tensors = inputs(((34,), 24, 40, 20))
    for k in range(4):
        for layout, strided in cases.layouts(tensors[k].detach()).items():
            if layout != "four dimensions, permuted":
                strided = strided.detach().requires_grad_(k != 1)
                changed = [strided if i == k else t for i, t in enumerate(tensors)]
                check(version, changed, 0.75, "silu", f"input {k} {layout}")


@needs_tma
def test_tma_reads_slices_of_wider_matrices():
    """Rows with gaps that still begin on 16-byte boundaries."""
    tensors = inputs(((70,), 72, 40, 8), torch.bfloat16)
    for k in (0, 1):
        wide = torch.full((72, 56), float("nan"), dtype=torch.bfloat16, device=machine.device())
        strided = wide[: tensors[k].shape[0], 8:48]
        strided.copy_(tensors[k].detach())
        assert op_file._tma_takes(strided)
        strided = strided.detach().requires_grad_(k == 0)
        changed = [strided if i == k else t for i, t in enumerate(tensors)]
        check(tma, changed, 0.75, "gelu", f"input {k}")


@settings(max_examples=20, deadline=None, derandomize=True)
@given(
    sizes=st.tuples(*[st.integers(1, 40)] * 3, st.integers(1, 20)),
    steps=st.tuples(*[st.integers(1, 3)] * 2),
    which=st.integers(0, 3),
    transposed=st.booleans(),
)
def test_any_view(sizes, steps, which, transposed):
    """Any sliced or transposed view gives the values of its contiguous copy."""
    m, n, k, r = sizes
    tensors = detached(((m,), n, k, r))
    t = tensors[which]
    shape = [size * step + 3 for size, step in zip(t.shape, steps)]
    base = torch.full(shape[::-1] if transposed else shape, float("nan"), device=t.device)
    view = (base.t() if transposed else base)[3 :: steps[0], 3 :: steps[1]]
    tensors[which] = view.copy_(t)
    want = detached_result(*tensors[:which], t, *tensors[which + 1 :])
    assert_close(detached_result(*tensors), want)


def detached_result(*tensors):
    return lora_linear_triton(*tensors, 0.5, "relu")


# --- gradients -----------------------------------------------------------------------------------------------


@versions
@activations
def test_incoming_gradients_of_any_strides(version, activation):
    """The stride-0 one of .sum().backward() among them, and one left as it was; twice gives the same bits."""
    for layout in ("expanded", "transposed"):
        tensors, again = (inputs(coarse=True) for _ in range(2))
        for t, other in zip(tensors, again):
            other.data.copy_(t.data)
        dy = torch.randn(24, 9, device=machine.device()).t()
        dy = dy[:1, :1].expand(9, 24) if layout == "expanded" else dy
        before, ours, theirs = dy.clone(), leaves_of(tensors), leaves_of(again)
        y = version(*tensors, 0.5, activation)
        first = torch.autograd.grad(y, ours, dy, retain_graph=True)
        second = torch.autograd.grad(y, ours, dy)
        want = torch.autograd.grad(lora_linear_eager(*again, 0.5, activation), theirs, dy)
        for a, b, c in zip(first, second, want):
            assert torch.equal(a, b)
            torch.testing.assert_close(a, c, rtol=1e-4, atol=1e-5, msg=layout)
        assert torch.equal(dy, before)


GRADIENTS = [c for n in (1, 2, 3, 4) for c in itertools.combinations((0, 2, 3, 4), n)]


@versions
@pytest.mark.parametrize("activation", ["identity", "relu", "gelu"])
def test_only_the_gradients_asked_for(version, activation):
    tensors = inputs(coarse=True)
    loss = lora_linear_eager(*tensors, 0.5, activation).square().sum()
    wanted = dict(zip((0, 2, 3, 4), torch.autograd.grad(loss, leaves_of(tensors))))
    for asked in GRADIENTS:
        some = [t.detach().requires_grad_(k in asked) for k, t in enumerate(tensors)]
        got = torch.autograd.grad(version(*some, 0.5, activation).square().sum(), leaves_of(some))
        for k, gradient in zip(asked, got):
            torch.testing.assert_close(
                gradient, wanted[k], rtol=1e-4, atol=1e-4, msg=f"input {k} of {asked}"
            )


@pytest.mark.parametrize("version", VERSIONS[:2], ids=lambda v: v.__name__)
@pytest.mark.parametrize("activation", ["identity", "relu", "gelu"])
def test_saves_only_what_the_gradients_need(version, activation):
    """x for A; W, A, B for x; u for B; nothing for the bias; beside them y or z, and for identity nothing."""
    (m,), n, _, r = SMALL
    x, weight, lora_a, lora_b, bias = detached()
    needs = {0: {weight, lora_a, lora_b}, 2: {x, lora_b}, 3: set(), 4: set()}
    for asked in GRADIENTS:
        tensors = [
            t.requires_grad_(i in asked) for i, t in enumerate((x, weight, lora_a, lora_b, bias))
        ]
        saved = _saved_by(functools.partial(version, *tensors, 0.5, activation))
        known = {t.data_ptr() for t in set().union(*(needs[i] for i in asked))}
        assert {t.data_ptr() for t in saved} >= known
        made = [tuple(t.shape) for t in saved if t.data_ptr() not in known]
        u = [(m, r)] if 3 in asked else []
        assert sorted(made) == sorted(u + ([] if activation == "identity" else [(m, n)])), asked


def _saved_by(call):
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        call()
    return saved


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
    (m,), n, k, r = SMALL
    tensors = inputs()
    with _Log() as log:
        y = lora_linear_triton(*tensors, 0.5, "relu")
    assert log.products() == [(m, r)]
    for asked, want in [
        ((0, 2, 3, 4), [(m, k), (m, k), (m, r), (n, r), (r, k)]),
        ((2, 3), [(m, r), (n, r), (r, k)]),
        ((0,), [(m, k), (m, k), (m, r)]),
        ((3,), [(n, r)]),
        ((4,), []),
    ]:
        some = [t.detach().requires_grad_(i in asked) for i, t in enumerate(tensors)]
        y = lora_linear_triton(*some, 0.5, "relu")
        with _Log() as log:
            torch.autograd.grad(y, leaves_of(some), torch.randn_like(y))
        assert sorted(log.products()) == sorted(want), asked
        assert (n, k) not in log.products()


@activations
def test_cublas_adds_and_activates_in_place(activation):
    """Two products into y and an activation within it: no addition, no product with s, no second tensor of y's
    size unless the backward pass needs z."""
    (m,), n, _, r = SMALL
    for bias, saves in itertools.product((True, False), (True, False)):
        tensors = inputs(bias=bias) if saves else detached(bias=bias)
        with _Log() as log:
            lora_linear_cublas(*tensors, 0.5, activation)
        names = [name for name, _ in log.entries]
        assert log.products() == [(m, r), (m, n), (m, n)]
        assert not {"add", "add_", "mul", "mul_"} & set(names)
        allocated = [
            shape for name, shape in log.entries if name.startswith(("empty", "new_empty"))
        ]
        keeps_z = saves and activation in ("gelu", "silu")
        assert allocated.count((m, n)) == 1 + keeps_z
        # not aten.relu.out, which goes by way of a second tensor
        name = {"relu": "clamp_min"}.get(activation, activation)
        assert (name in names) == (activation != "identity")


@versions
def test_second_derivative_raises(version):
    tensors = inputs()
    dy = torch.randn(9, 24, device=machine.device(), requires_grad=True)
    (dx,) = torch.autograd.grad(version(*tensors), tensors[:1], dy, create_graph=True)
    with pytest.raises(
        RuntimeError, match="once_differentiable|Trying to backward through fused_kernels"
    ):
        dx.sum().backward()


@wrappers
def test_vmap_raises(version):
    tensors = detached()
    with pytest.raises(RuntimeError, match="functorch|vmap|BatchedTensor"):
        torch.vmap(version, in_dims=(0, None, None, None, None))(tensors[0][None], *tensors[1:])


@wrappers
def test_checkpoint(version):
    from torch.utils.checkpoint import checkpoint

    tensors = inputs()
    again = [t.detach().requires_grad_(t.requires_grad) for t in tensors]
    y = checkpoint(version, *tensors, 0.5, "gelu", use_reentrant=False)
    y.square().sum().backward()
    version(*again, 0.5, "gelu").square().sum().backward()
    for a, b in zip(leaves_of(tensors), leaves_of(again)):
        assert torch.equal(a.grad, b.grad)


@wrappers
@activations
def test_autocast(version, activation):
    """In its dtype, as torch's products; gradients in the dtype of what they belong to."""
    tensors = inputs(coarse=True)
    half = [t.detach().to(torch.bfloat16) for t in tensors]
    with torch.autocast(machine.device().type, dtype=torch.bfloat16):
        got = version(*tensors, 0.5, activation)
        assert got.dtype == lora_linear_eager(*tensors, 0.5, activation).dtype == torch.bfloat16
        double = [t.detach().double() for t in tensors]
        assert version(*double, 0.5, activation).dtype == torch.float64
    assert torch.equal(got, version(*half, 0.5, activation))
    gradients = torch.autograd.grad(got.sum(), leaves_of(tensors))
    assert {g.dtype for g in gradients} == {torch.float32}
    assert all(torch.isfinite(g).all() for g in gradients)


@versions
def test_same_bits_every_time(version):
    tensors = inputs(((123,), 78, 45, 16))
    dy = torch.randn(123, 78, device=machine.device())
    runs = [
        torch.autograd.grad(version(*tensors, 0.5, "gelu"), leaves_of(tensors), dy)
        for _ in range(3)
    ]
    assert all(torch.equal(a, b) for run in runs[1:] for a, b in zip(runs[0], run))


@pytest.mark.parametrize("version", [*VERSIONS, tma], ids=lambda v: v.__name__)
@activations
def test_nan_and_infinities(version, activation):
    if version is tma and needs_tma.args[0]:
        pytest.skip("needs a GPU that has TMA")
    for dtype in (torch.float32, torch.bfloat16) if version is not tma else (torch.bfloat16,):
        tensors = inputs(((6,), 24, 16, 3), dtype)
        with torch.no_grad():
            tensors[0][1, 2], tensors[1][3, 4] = float("nan"), float("nan")
            tensors[3][7, 1], tensors[4][9] = float("nan"), float("nan")
            if (
                activation != "gelu"
            ):  # F.gelu(inf) is NaN on a CPU, as one of seven elements or more
                tensors[0][3, 5], tensors[1][11, 2] = float("inf"), -float("inf")
                tensors[4][13] = -float("inf")
        check(version, tensors, 0.75, activation, f"{activation}, {dtype}")
        y = version(*tensors, 0.75, activation).detach()
        untouched = [n for n in range(24) if n not in (3, 7, 9, 11, 13)]
        assert torch.isfinite(y[[0, 2, 4, 5]][:, untouched]).all(), "it spreads"


@wrappers
def test_float16_overflows_where_eager_does(version):
    x, weight, lora_a, lora_b, bias = inputs(((6,), 24, 16, 3), torch.float16)
    with torch.no_grad():
        x[2] = 60000.0
        weight[5] = 1.0
        weight[6] = -1.0
    check(version, [x, weight, lora_a * 0, lora_b, bias], 0.75, "relu")


# --- which kernel, and what it is given ----------------------------------------------------------------------


def _routed(monkeypatch, case, dtype=torch.bfloat16, change=lambda *tensors: tensors):
    """'tma' or 'pointer': the kernel that lora_linear_triton takes for tensors that are never read."""
    taken = []
    for name in ("tma", "pointer"):
        monkeypatch.setattr(
            op_file, f"_launch_{name}_kernel", lambda *_, name=name: taken.append(name)
        )
    monkeypatch.setattr(op_file, "_n_multiprocessors", lambda _: 4)
    monkeypatch.setattr(op_file, "_gpu_family", lambda _: "hopper")
    op_file._pick_tile.cache_clear()
    (m,), n, k, r = case
    x, weight, u, lora_b = (torch.zeros(s, dtype=dtype) for s in ((m, k), (n, k), (m, r), (n, r)))
    y = torch.empty(m, n, dtype=dtype)
    x, weight, y = change(x, weight, y)
    op_file._launch_fused(y, None, x, weight, u, lora_b, None, 1.0, "relu", False)
    op_file._pick_tile.cache_clear()
    return taken


def test_tma_where_it_can_and_pays(monkeypatch):
    big = ((512,), 512, 512, 16)

    def shifted(x, weight, y):
        return x, torch.zeros(512 * 512 + 1, dtype=weight.dtype)[1:].view(512, 512), y

    assert _routed(monkeypatch, big) == ["tma"]
    assert _routed(monkeypatch, big, torch.float16) == ["tma"]
    assert _routed(monkeypatch, ((511,), 512, 520, 3)) == ["tma"], (
        "odd rows and ranks are no obstacle"
    )
    for case, dtype, change in [
        (
            ((64,), 64, 64, 16),
            torch.bfloat16,
            lambda *t: t,
        ),  # descriptors cost more than the product
        (big, torch.float32, lambda *t: t),
        (((512,), 512, 513, 16), torch.bfloat16, lambda *t: t),  # rows off 16-byte boundaries
        (((512,), 513, 512, 16), torch.bfloat16, lambda *t: t),
        (((8,), 8192, 2048, 16), torch.bfloat16, lambda *t: t),  # tiles of 16 rows
        (big, torch.bfloat16, lambda x, w, y: (x.t(), w, y)),
        (big, torch.bfloat16, lambda x, w, y: (torch.cat([x, x], 1)[:, ::2], w, y)),
        (big, torch.bfloat16, lambda x, w, y: (x, w[:1].expand(512, 512), y)),
        (big, torch.bfloat16, shifted),
    ]:
        assert _routed(monkeypatch, case, dtype, change) == ["pointer"], (case, dtype)


def test_tiles_fill_the_gpu(monkeypatch):
    monkeypatch.setattr(op_file, "_n_multiprocessors", lambda _: 132)
    families = {}
    monkeypatch.setattr(op_file, "_gpu_family", lambda device: families["now"])
    try:
        for (kind, family), tiles in op_file._TILES.items():
            families["now"] = family
            dtype = {"half": torch.bfloat16, "double": torch.float64}.get(kind, torch.float32)
            op_file._pick_tile.cache_clear()
            pick = functools.partial(
                op_file._pick_tile, dtype=dtype, allow_tf32=kind == "tf32", device="a GPU"
            )
            assert pick(16384, 4096) == tiles[0]
            assert pick(1, 1) == tiles[-1]
            assert pick(1, 100_000).m <= 16
            for m, n in [(1, 4096), (64, 64), (300, 700), (5000, 3)]:
                tile = pick(m, n)
                assert tile.m < 2 * max(16, m)
                assert tile.n < 2 * max(16, n)
                if tile != tiles[-1]:
                    assert -(-m // tile.m) * -(-n // tile.n) >= 99, "idle multiprocessors"
    finally:
        op_file._pick_tile.cache_clear()


def test_forward_moves_each_tensor_once_and_z_only_for_a_gradient():
    case = ((128,), 256, 64, 16)
    x, weight, lora_a, lora_b, bias = detached(case, torch.bfloat16)
    y_bytes, u_bytes = 128 * 256 * 2, 128 * 16 * 2
    read = x.nbytes + weight.nbytes + u_bytes + lora_b.nbytes + bias.nbytes
    for activation, gradient in itertools.product(ACTIVATIONS, (False, True)):
        leaf = x.detach().requires_grad_(gradient)
        traffic = count_traffic(
            lambda leaf=leaf, a=activation: lora_linear_triton(
                leaf, weight, lora_a, lora_b, bias, 1.0, a
            )
        )
        keeps_z = gradient and activation in ("gelu", "silu")
        assert traffic.launches == 1
        assert traffic.bytes_moved == read + y_bytes * (2 if keeps_z else 1), activation


@activations
def test_backward_of_the_activation_is_one_pass(activation):
    tensors = inputs(((128,), 256, 64, 16), torch.bfloat16)
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
    for t in leaves_of(tensors)[
        :3
    ]:  # without db and an activation, nothing is left for a kernel to do
        y = lora_linear_triton(*tensors[:4], None, 0.5, activation)
        traffic = count_traffic(lambda t=t, y=y: torch.autograd.grad(y, t, dy))
        assert traffic.launches == elementwise


# --- torch.library and torch.compile --------------------------------------------------------------------------


@activations
def test_opcheck(activation):
    save_z = activation in ("gelu", "silu")
    for case, bias in [(((2, 3), 4, 8, 3), True), (((3,), 5, 7, 2), False)]:
        if activation in ("relu", "gelu") or bias:
            args = (*inputs(case, bias=bias), 0.5, activation, False, save_z)
            torch.library.opcheck(lora_linear_op, args)
    args = (*detached(((0,), 4, 8, 2)), 0.5, activation)
    torch.library.opcheck(lora_linear_op, args)


def test_opcheck_backward():
    x, weight, lora_a, lora_b, _ = detached(((2, 3), 4, 8, 3))
    u, y, dy = torch.randn(6, 3), torch.randn(2, 3, 4), torch.randn(2, 3, 4)
    for wanted in [(1, 1, 1, 1), (0, 0, 0, 0), (1, 0, 0, 1), (0, 1, 1, 0)]:
        args = (dy, x, weight, lora_a, lora_b, u, y, 0.5, "sigmoid", [bool(w) for w in wanted])
        args = [t.to(machine.device()) if isinstance(t, torch.Tensor) else t for t in args]
        torch.library.opcheck(op_file._lora_linear_backward_op, args)


@versions
@activations
def test_gradcheck(version, activation):
    bias = version is not lora_linear_cublas
    tensors = inputs(((2,), 3, 4, 2), torch.float64, bias)

    def y(x, lora_a, lora_b, *bias):
        return version(x, tensors[1], lora_a, lora_b, *(bias or [None]), 0.5, activation)

    assert torch.autograd.gradcheck(y, leaves_of(tensors))


def test_the_registered_op_refuses_what_it_has_no_gradient_for():
    tensors = inputs()
    with pytest.raises(ValueError, match="save_z=True"):
        lora_linear_op(*tensors, 0.5, "gelu")
    with pytest.raises(ValueError, match="weight.requires_grad_"):
        lora_linear_op(tensors[0], tensors[1].clone().requires_grad_(), *tensors[2:])
    with torch.no_grad():
        y, u, z = lora_linear_op(*tensors, 0.5, "gelu")
    assert_close(u, (tensors[0] @ tensors[2].T).detach())
    assert z.numel() == 0
    assert_close(y, lora_linear_eager(*tensors, 0.5, "gelu").detach())


def test_compile_fullgraph():
    def definition(x, *rest):
        return lora_linear_eager(x * 2, *rest, 0.5, "gelu").square()

    def model(x, *rest):
        return lora_linear_triton(x * 2, *rest, 0.5, "gelu").square()

    compiled = torch.compile(model, fullgraph=True)
    for case in [((17,), 24, 40, 6), ((5,), 8, 16, 4)]:
        tensors = inputs(case)
        check_against_float64(compiled, definition, *tensors)
        with torch.no_grad():
            assert_close(compiled(*tensors), definition(*tensors))


@pytest.mark.parametrize(
    ("version", "activation"),
    [*((lora_linear_triton, a) for a in ACTIVATIONS), (lora_linear_cublas, "silu")],
)
def test_compile_every_activation(version, activation):
    """Through the same graphs, without the time that generating code takes; with and without a bias."""
    torch._dynamo.reset()
    how = {"scale": 0.5, "activation": activation}
    compiled = torch.compile(bound(version, **how), fullgraph=True, backend="aot_eager")
    for bias, asked in [(True, (0, 2, 3, 4)), (False, (2, 3))]:
        tensors = [
            t if t is None else t.detach().requires_grad_(i in asked)
            for i, t in enumerate(inputs(bias=bias, coarse=True))
        ]
        check_against_float64(compiled, bound(lora_linear_eager, **how), *tensors)
        with torch.no_grad():
            assert_close(compiled(*tensors), lora_linear_eager(*tensors, **how))


# --- sizes past what 32 bits hold -----------------------------------------------------------------------------


def _far_rows(t):
    """t, (rows, 16), with rows 2**30 elements apart."""
    far = cases.far_apart(torch.float16, machine.device())
    return far[: t.shape[0]].copy_(t)


def _far_columns(t):
    """t, (16, columns), with columns 2**30 elements apart."""
    return _far_rows(t.t().contiguous()).t()


FAR = {
    "rows of x": (((3,), 16, 16, 4), 0, _far_rows),
    "columns of x": (((16,), 16, 3, 4), 0, _far_columns),
    "rows of weight": (((16,), 3, 16, 4), 1, _far_rows),
    "columns of weight": (((16,), 16, 3, 4), 1, _far_columns),
    "rows of lora_b": (((16,), 3, 16, 16), 3, _far_rows),
    "columns of lora_b": (((16,), 16, 16, 3), 3, _far_columns),
}


@pytest.mark.parametrize("what", FAR)
def test_offsets_past_two_to_the_31(what):
    case, k, spread = FAR[what]
    tensors = inputs(case, torch.float16)
    tensors[k] = spread(tensors[k].detach()).requires_grad_(k != 1)
    near = cases.near(lora_linear_eager)
    pointers = by(op_file._launch_pointer_kernel, HOPPER[-1])
    check(pointers, tensors, 0.75, "identity", what, eager=near)
    if what.startswith("rows") and k < 2 and not needs_tma.args[0]:
        tensors[k] = tensors[k].detach().requires_grad_(k != 1)
        if op_file._tma_takes(tensors[k].new_empty(8, case[1])):
            check(tma, tensors, 0.75, "identity", what, eager=near)


def test_gradient_offsets_past_two_to_the_31():
    far = cases.far_apart(torch.float16, machine.device())
    found = []
    for version in (lora_linear_triton, lora_linear_eager):
        torch.manual_seed(0)
        tensors = inputs(((3,), 16, 8, 4), torch.float16)
        found.append(
            torch.autograd.grad(
                version(*tensors, 0.5, "sigmoid"),
                leaves_of(tensors),
                far.contiguous() if version is lora_linear_eager else far,
            )
        )
    for got, want in zip(*found):
        assert_close(got, want, torch.float16)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "case", [((2**19 + 1,), 4096, 64, 16), ((2**20 + 3,), 2056, 64, 3)], ids=str
)
def test_more_than_two_to_the_31_elements(case):
    if torch.cuda.mem_get_info()[0] < 60e9:
        pytest.skip("needs 60 GB of GPU memory")
    x, weight, lora_a, lora_b, bias = inputs(case, torch.bfloat16)
    got = lora_linear_triton(x, weight, lora_a, lora_b, bias, 0.5, "gelu")
    got.backward(got.detach())
    for rows in (slice(0, 2), slice(-2, None)):
        part = x.detach()[rows].requires_grad_()
        want = lora_linear_eager(part, weight, lora_a, lora_b, bias, 0.5, "gelu")
        assert_close(got[rows], want, torch.bfloat16)
        want.backward(got.detach()[rows])
        assert_close(x.grad[rows], part.grad, torch.bfloat16)


# --- on a GPU ------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@wrappers
@pytest.mark.parametrize("case", [((257,), 128, 512, 16), ((2048,), 2048, 2048, 16)], ids=str)
def test_cuda_graph(version, case):
    """Descriptors are made on the host: a replay reads new numbers from the old addresses."""
    tensors = detached(case, torch.bfloat16)
    version(*tensors, 0.5, "relu")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = version(*tensors, 0.5, "relu")
    for t in tensors:
        t.normal_()
    graph.replay()
    assert torch.equal(y, version(*tensors, 0.5, "relu"))


@pytest.mark.gpu
@wrappers
def test_current_stream(version):
    """A launch on the default stream would read x before the long kernels of this stream have written it."""
    tensors = detached(((4096,), 512, 4096, 16))
    version(*tensors)
    want = lora_linear_eager(tensors[0] + 64, *tensors[1:])
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        x = tensors[0]
        for _ in range(64):
            x = x + 1
        got = version(x, *tensors[1:])
    torch.cuda.synchronize()
    torch.testing.assert_close(got, want, rtol=1e-3, atol=0.1)


@pytest.mark.gpu
@wrappers
def test_second_gpu(version):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    for case in (SMALL, ((1024,), 1024, 1024, 16)):
        check(version, inputs(case, torch.bfloat16, device=torch.device("cuda:1")), 0.75, "gelu")


@pytest.mark.gpu
@wrappers
def test_no_host_sync(version):
    for case in (SMALL, ((1024,), 1024, 1024, 16)):
        tensors = detached(case, torch.bfloat16)
        version(*tensors)
        torch.cuda.set_sync_debug_mode("error")
        try:
            version(*tensors)
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_another_number_of_rows_does_not_compile_again(dtype):
    with _count_compilations() as compiled:
        for n, rows in enumerate((4000, 4001, 3999, 4096, 3333)):
            tensors = inputs(((rows,), 1024, 1024, 16), dtype)
            lora_linear_triton(*tensors, 0.5, "gelu").sum().backward()
            if n == 0:
                compiled.clear()
    assert not compiled, compiled


@pytest.mark.gpu
def test_tf32_is_asked_for():
    """float32 is exact unless allow_tf32: then it is off by more, but by no more than tf32's 10 bits."""
    tensors = detached(((512,), 512, 2048, 16))
    want = lora_linear_eager(*(t.double() for t in tensors))
    exact, rough = (
        (lora_linear_triton(*tensors, allow_tf32=allow).double() - want).abs().max()
        for allow in (False, True)
    )
    assert exact < 1e-4 < rough < 0.05


@pytest.mark.gpu
@wrappers
def test_cpu_input_on_a_gpu_machine(version):
    with pytest.raises(ValueError, match="lora_linear_eager"):
        version(*inputs(device=torch.device("cpu")))


# --- machine code --------------------------------------------------------------------------------------------


class _Noted:
    """Stands in for a kernel: notes what it is launched with."""

    def __getitem__(self, grid):
        return self

    def __call__(self, *args, **kwargs):
        self.args, self.kwargs = args, kwargs


def _signature(kernel, args, constexprs):
    """As signature_of, with tensor descriptors, of which Triton reads the dtype and the shape of a piece."""
    plain = [None if isinstance(a, TensorDescriptor) else a for a in args]
    types, fixed, divisible = signature_of(kernel, *plain, **constexprs)
    names = [name for name in fixed | types if name not in constexprs]
    names = [p.name for p in op_file.triton.JITFunction(kernel.fn).params if p.name in names]
    for name, a in zip(names, args):
        if isinstance(a, TensorDescriptor):
            kind = {torch.bfloat16: "bf16", torch.float16: "fp16"}[a.base.dtype]
            types[name] = f"tensordesc<{kind}{list(a.block_shape)}>"
            del fixed[name]
    return Signature(types, fixed, divisible)


def _compiled(monkeypatch, kernel_name, launch, arch=90):
    kernel, note = getattr(op_file, kernel_name), _Noted()
    with monkeypatch.context() as patched:
        patched.setattr(op_file, kernel_name, note)
        launch()
    options = {n: note.kwargs.pop(n) for n in ("num_warps", "num_stages") if n in note.kwargs}
    with monkeypatch.context() as patched:  # the code of a GPU, not of the interpreter
        patched.setattr(op_file, "_INTERPRETED", tl.constexpr(False))
        return compile_for(kernel, _signature(kernel, note.args, note.kwargs), arch=arch, **options)


def _compiled_forward(
    monkeypatch, launch, tile, dtype=torch.bfloat16, rank=16, activation="relu", keeps_z=False, arch=90,
    allow_tf32=False,
):  # fmt: skip
    shapes = (512, 512), (512, 512), (512, 512), (512, rank), (512, rank), (512,)
    y, x, weight, u, lora_b, bias = (
        torch.empty(s, dtype=dtype, device=machine.device()) for s in shapes
    )
    arguments = (
        y,
        y.clone() if keeps_z else None,
        x,
        weight,
        u,
        lora_b,
        bias,
        0.5,
        activation,
        allow_tf32,
    )
    tma = launch is op_file._launch_tma_kernel
    name = "_lora_linear_tma_kernel" if tma else "_lora_linear_kernel"
    return _compiled(monkeypatch, name, lambda: launch(*arguments, tile), arch)


def _count(compiled, pattern):
    return sum(n for op, n in instruction_mix(compiled).items() if re.match(pattern, op))


@pytest.mark.parametrize(("rank", "activation"), [(16, "relu"), (64, "gelu"), (5, "silu")])
def test_hopper_multiplies_by_wgmma_and_moves_by_tma(monkeypatch, rank, activation):
    keeps_z = activation in ("gelu", "silu")
    compiled = _compiled_forward(
        monkeypatch,
        op_file._launch_tma_kernel,
        HOPPER[0],
        torch.bfloat16,
        rank,
        activation,
        keeps_z,
    )
    assert _count(compiled, "HGMMA.64x256x16.F32.BF16") >= HOPPER[0].k // 16 + 1
    assert _count(compiled, "HMMA") == 0
    # the loop loads one piece of x and one of W a step; what else there is fills the pipeline before it
    assert _count(compiled, "UTMALDG.2D") == 2 * HOPPER[0].num_stages, "loads are not pipelined"
    assert _count(compiled, "UTMASTG.2D") == (4 if keeps_z else 2)
    assert _count(compiled, "STG") == 0
    if rank % 16 == 0:
        assert _count(compiled, "LDG.E.U16") == 0, "u and B, 16 bytes at a time"
    assert compiled.spills == 0
    assert compiled.shared_bytes <= 232_448, "more than a program can have"
    # one exponential and one reciprocal an element; two more divide tile numbers, at three places
    elements = HOPPER[0].m * HOPPER[0].n // (32 * HOPPER[0].num_warps)
    assert _count(compiled, "MUFU.EX2") == (elements if keeps_z else 0)
    assert _count(compiled, "MUFU.RCP") <= (elements if keeps_z else 0) + 6


@pytest.mark.parametrize(
    ("kind", "family", "products"),
    [
        ("half", "hopper", "HGMMA.*BF16"),
        ("half", "ampere", "HMMA.*BF16"),
        ("tf32", "ampere", "HMMA.*TF32"),
        ("tf32x3", "ampere", "HMMA.*TF32"),
        ("double", "ampere", "DMMA"),
        ("half", "turing", "FFMA"),
    ],
)
def test_the_pointer_kernel_multiplies_by_the_best_there_is(monkeypatch, kind, family, products):
    dtype = {"half": torch.bfloat16, "double": torch.float64}.get(kind, torch.float32)
    dtype = torch.float16 if family == "turing" else dtype
    arch, shared = {"hopper": (90, 232_448), "ampere": (80, 101_376), "turing": (75, 65_536)}[
        family
    ]
    tile = op_file._TILES[kind, family][0]
    compiled = _compiled_forward(
        monkeypatch,
        op_file._launch_pointer_kernel,
        tile,
        dtype,
        64,
        "gelu",
        True,
        arch,
        kind == "tf32",
    )
    assert _count(compiled, products) >= 4
    if "MMA" not in products:
        assert _count(compiled, "H(G)?MMA|DMMA") == 0, "tensor cores round float32"
    if family != "turing":
        assert _count(compiled, r"LDGSTS\.E\.BYPASS\.128") >= 2 * tile.num_stages
    assert _count(compiled, r"LDGSTS(?!.*128)") == 0
    assert _count(compiled, r"STG\.E(?!\.128)") == 0
    # gelu, and z kept: with Triton 3.6 a word of Hopper's epilogue lies in local memory
    one_word = (kind, family) == ("half", "hopper") and cases.release(triton) < (3, 7)
    assert compiled.spills <= (4 if one_word else 0)
    assert compiled.shared_bytes <= shared


@pytest.mark.parametrize("activation", ["identity", "relu", "gelu"])
def test_backward_kernel_has_sixteen_byte_accesses_and_no_spills(monkeypatch, activation):
    dy = torch.empty(4096, 4096, dtype=torch.bfloat16, device=machine.device())
    saved = None if activation == "identity" else dy.clone()
    monkeypatch.setattr(op_file, "_sum_rows", lambda *_: None)
    compiled = _compiled(
        monkeypatch, "_lora_linear_dz_kernel",
        lambda: op_file._dz_and_dbias(dy, saved, activation, True, True),
    )  # fmt: skip
    assert _count(compiled, r"(LDG|LDGSTS)\.E(?!.*128)") == 0
    assert _count(compiled, r"(LDG|LDGSTS)\.E.*128") >= (1 if saved is None else 2)
    assert compiled.spills == 0


def test_tf32_only_where_it_is_asked_for(monkeypatch):
    seen = []
    kernel, note = op_file._lora_linear_kernel, _Noted()
    monkeypatch.setattr(op_file, "_lora_linear_kernel", note)
    for dtype, allow in itertools.product(
        (torch.float32, torch.bfloat16, torch.float64), (False, True)
    ):
        lora_linear_triton(*detached(dtype=dtype), allow_tf32=allow)
        seen.append(note.kwargs["PRECISION"])
    assert kernel is not note
    # of 16 bits and of float64 neither makes anything else
    assert seen == ["tf32x3", "tf32"] * 3


# --- bad input -----------------------------------------------------------------------------------------------


@wrappers
def test_bad_input_is_refused_in_a_sentence(version):
    x, weight, lora_a, lora_b, bias = good = detached()
    name = version.__name__

    def but(**changes):
        names = ("x", "weight", "lora_a", "lora_b", "bias")
        return tuple(changes.get(n, t) for n, t in zip(names, good))

    wrong = {
        "a list": (but(x=x.tolist()), TypeError, "x must be a torch.Tensor"),
        "integers": (but(x=x.int()), TypeError, "floating-point"),
        "complex": (but(weight=weight.to(torch.complex64)), TypeError, "floating-point"),
        "another dtype of weight": (but(weight=weight.half()), TypeError, "cast one of them"),
        "another dtype of lora_a": (but(lora_a=lora_a.half()), TypeError, "cast one of them"),
        "another dtype of lora_b": (but(lora_b=lora_b.half()), TypeError, "cast one of them"),
        "another dtype of bias": (but(bias=bias.half()), TypeError, "cast one of them"),
        "another device": (but(lora_b=lora_b.to("meta")), ValueError, "one device"),
        "no device": (tuple(t.to("meta") for t in good), ValueError, "lora_linear_eager"),
        "a scalar": (but(x=x[0, 0]), ValueError, "x must be"),
        "another width of x": (but(x=x[:, :5]), ValueError, "x must be"),
        "a weight of one dimension": (but(weight=weight[0]), ValueError, "weight"),
        "another width of lora_a": (but(lora_a=lora_a[:, :5]), ValueError, "lora_a must be"),
        "lora_a transposed": (but(lora_a=lora_a.t()), ValueError, "lora_a must be"),
        "lora_a of one dimension": (but(lora_a=lora_a[0]), ValueError, "lora_a must be"),
        "another height of lora_b": (but(lora_b=lora_b[:5]), ValueError, "lora_b must be"),
        "lora_b transposed": (but(lora_b=lora_b.t()), ValueError, "lora_b must be"),
        "two ranks": (but(lora_b=lora_b[:, :5]), ValueError, "rank 6 .* rank 5"),
        "rank 0": (but(lora_a=lora_a[:0], lora_b=lora_b[:, :0]), ValueError, "rank must be 1 to 256"),
        "a high rank": (
            but(lora_a=x.new_zeros(257, 40), lora_b=x.new_zeros(24, 257)), ValueError, "functional.linear"
        ),
        "another length of bias": (but(bias=bias[:5]), ValueError, "bias must have one element"),
        "a bias of two dimensions": (but(bias=bias[None]), ValueError, "bias must have one element"),
        "a scale in a tensor": ((*good, torch.tensor(1.0)), TypeError, "Python number"),
        "an activation": ((*good, 1.0, "tanh"), ValueError, "identity, relu, gelu, silu, sigmoid"),
    }  # fmt: skip
    for what, (bad, kind, message) in wrong.items():
        with pytest.raises(kind, match=f"{name}: .*{message}") as caught:
            version(*bad)
        assert len(str(caught.value)) > 40, what


@wrappers
def test_a_weight_that_requires_grad_is_refused_while_gradients_are_recorded(version):
    x, weight, *rest = detached()
    weight.requires_grad_()
    for bad in (weight, weight * 1):
        with pytest.raises(
            ValueError, match=r"requires_grad_\(False\).*torch.nn.functional.linear"
        ):
            version(x, bad, *rest)
    with torch.no_grad():
        assert_close(version(x, weight, *rest), lora_linear_eager(x, weight, *rest))
    with torch.inference_mode():
        version(x, weight, *rest)


# --- LoRALinear ----------------------------------------------------------------------------------------------


def layer(dtype=torch.float32, rank=4, alpha=8, trained=True, **kwargs):
    """A LoRALinear, with a lora_b as training leaves it."""
    made = LoRALinear.from_features(
        40, 24, rank, alpha, device=machine.device(), dtype=dtype, **kwargs
    )
    if trained:
        torch.nn.init.normal_(made.lora_b, std=0.3)
    return made


def rows(dtype=torch.float32):
    return torch.randn(9, 40, dtype=dtype, device=machine.device())


def test_module_is_the_op_with_alpha_over_rank():
    x = rows()
    for rank, alpha, activation, bias in [(4, 8, "gelu", True), (3, 1.5, "relu", False)]:
        m = layer(rank=rank, alpha=alpha, activation=activation, bias=bias)
        base = m.base
        want = lora_linear_eager(
            x, base.weight, m.lora_a, m.lora_b, base.bias, alpha / rank, activation
        )
        assert_close(m(x), want)
        assert m.scale == alpha / rank


def test_alpha_is_divided_by_the_rank():
    """The fault: y = base(x) + alpha·B A x. Then doubling the rank doubles the update, and the learning rate
    that suited is twice too high; divided, two halves of rank r are one of rank 2r."""
    x, half = rows(), layer(rank=4, alpha=8)
    whole = LoRALinear(half.base, 8, 8)
    with torch.no_grad():
        whole.lora_a.copy_(half.lora_a.repeat(2, 1))
        whole.lora_b.copy_(half.lora_b.repeat(1, 2))
    assert_close(whole(x), half(x))
    faulty = half.base(x) + half.alpha * (x @ half.lora_a.T) @ half.lora_b.T
    assert not torch.allclose(half(x), faulty, atol=1e-2)


def test_parameters_are_registered_on_any_device():
    """The fault: nn.Parameter(...).to(device) is a plain tensor, unless it was on that device before."""
    faulty = torch.nn.Module()
    faulty.lora_a = torch.nn.Parameter(torch.empty(4, 40)).to("meta")
    assert not list(faulty.parameters()), "the fault is gone from torch?"
    for device in ("meta", machine.device()):
        m = LoRALinear(torch.nn.Linear(40, 24, device=device, dtype=torch.bfloat16), 4, 8)
        named = dict(m.named_parameters())
        assert set(named) == {"base.weight", "base.bias", "lora_a", "lora_b"}
        assert {n for n, p in named.items() if p.requires_grad} == {"lora_a", "lora_b"}
        for p in (m.lora_a, m.lora_b):
            assert isinstance(p, torch.nn.Parameter)
            assert (p.device.type, p.dtype) == (torch.device(device).type, torch.bfloat16)
        assert all(p.dtype == torch.float64 for p in m.double().parameters())


def test_the_base_is_frozen():
    """The fault: linear.requires_grad = False sets an attribute of the module, and freezes nothing."""
    faulty = torch.nn.Linear(40, 24)
    faulty.requires_grad = False
    assert faulty.weight.requires_grad, "the fault is gone from torch?"
    m = layer()
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


def test_training_begins_at_the_base_and_moves_away():
    x, m = rows(), layer(trained=False, activation="sigmoid")
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
def test_merge_and_unmerge(dtype):
    m, x, eps = layer(dtype, activation="gelu").eval(), rows(dtype), torch.finfo(dtype).eps
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


def test_merging_a_small_update_into_bfloat16_loses_it():
    """What the docstring says of rounding: the update is there before, and gone after."""
    m = layer(torch.bfloat16, trained=False)
    with torch.no_grad():
        m.base.weight.fill_(1.0)
        m.lora_a.fill_(2.0**-6)
        m.lora_b.fill_(2.0**-6)
    before = m.base.weight.clone()
    m.merge()  # adds 2 · 4 · 2**-12 = 2**-9, half the last place of 1.0: to even, that is to 1.0
    assert torch.equal(m.base.weight, before)


def test_unmerge_takes_out_what_merge_put_in_whatever_happened_since():
    m = layer()
    weight = m.base.weight.detach().clone()
    m.merge()
    with torch.no_grad():
        m.lora_a.zero_()
        m.lora_b.normal_()
    clone = copy.deepcopy(m)
    for each in (m, clone):
        each.unmerge()
        assert_close(each.base.weight.detach(), weight)


def test_merged_weights_move_with_the_module():
    m = layer()
    weight = m.base.weight.detach().clone()
    m.merge()
    m.double().unmerge()
    torch.testing.assert_close(m.base.weight.detach(), weight.double(), rtol=1e-5, atol=1e-6)
    assert m(rows(torch.float64)).dtype == torch.float64


def test_merged_training_is_refused():
    m, x = layer(), rows()
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


def test_a_weight_merged_between_forward_and_backward_is_noticed():
    m, x = layer(), rows().requires_grad_()
    y = m(x)
    m.merge()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e30])
def test_a_merge_that_could_not_be_undone_is_refused(value):
    m = layer(torch.float16 if value == 1e30 else torch.float32)
    with torch.no_grad():
        m.lora_b[3, 1] = value
    before = m.base.weight.detach().clone()
    with pytest.raises(ValueError, match="could not be undone"):
        m.merge()
    assert not m.merged
    assert torch.equal(m.base.weight, before)


def test_state_dict_comes_back():
    m, other, x = layer(alpha=2, activation="silu"), layer(alpha=2, activation="silu"), rows()
    state = copy.deepcopy(m.state_dict())
    assert set(state) == {"base.weight", "base.bias", "lora_a", "lora_b"}
    assert not torch.allclose(other(x), m(x))
    other.load_state_dict(state)
    assert torch.equal(other(x), m(x))
    assert not other.base.weight.requires_grad
    assert set(layer(bias=False).state_dict()) == {"base.weight", "lora_a", "lora_b"}


def test_state_dict_of_a_merged_module_is_refused():
    """Saved so, W + s B A would meet A and B again after loading, and the update count twice."""
    m, model = layer(), torch.nn.Sequential(torch.nn.Identity())
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


def test_module_says_what_it_is():
    text = repr(LoRALinear(torch.nn.Linear(40, 24), 4, 8, "gelu"))
    assert "rank=4, alpha=8, activation='gelu', merged=False" in text
    assert "in_features=40, out_features=24" in text


def test_module_compiles():
    torch._dynamo.reset()
    m, x = layer(activation="gelu"), rows()
    compiled = torch.compile(m, fullgraph=True, backend="aot_eager")
    loss = compiled(x).square().sum()
    got = torch.autograd.grad(loss, (m.lora_a, m.lora_b))
    want = torch.autograd.grad(m(x).square().sum(), (m.lora_a, m.lora_b))
    for a, b in zip(got, want):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_module_under_autocast():
    m, x = layer(activation="gelu"), rows()
    with torch.autocast(machine.device().type, dtype=torch.bfloat16):
        y = m(x)
        assert y.dtype == torch.bfloat16
        y.float().square().sum().backward()
    assert m.lora_a.grad.dtype == m.lora_b.grad.dtype == torch.float32


def test_bad_arguments_of_the_module_are_refused_in_a_sentence():
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
            LoRALinear(*bad)
        assert len(str(caught.value)) > 40, what
    assert linear.weight.requires_grad, "refused, and frozen all the same"
