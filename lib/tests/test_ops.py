"""What every op of lib.suite has to get right, from one table: values, gradients, strides, big offsets, bad
inputs, and its behaviour under autograd, torch.compile, checkpointing, autocast and CUDA graphs."""

import itertools

from lib import machine, suite
from lib.check import check_against_float64

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

OPS = list(suite.OPS.values())
SHAPES = [(1,), (1, 1), (0, 5), (5, 0), (2, 3, 8), (17, 33), (64, 128), (123, 781)]
BIG_SHAPES = [(1823, 781), (4096, 4096), (3, 100_003)]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
CUDA_MISSING = machine.why_no_cuda()

VERSIONS = [
    pytest.param(
        op,
        version,
        id=f"{op.name}-{name}",
        marks=pytest.mark.skipif(name == "cuda" and bool(CUDA_MISSING), reason=str(CUDA_MISSING)),
    )
    for op in OPS
    for name, version in op.versions.items()
]
versions = pytest.mark.parametrize(("op", "version"), VERSIONS)
ops = pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)


def inputs_of(op, shape, dtype=torch.float32):
    return op.inputs(shape, dtype, machine.device())


@versions
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_equals_float64(op, version, shape, dtype):
    check_against_float64(version, op.eager, *inputs_of(op, shape, dtype))


@pytest.mark.gpu
@versions
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", BIG_SHAPES, ids=str)
def test_equals_float64_at_real_sizes(op, version, shape, dtype):
    check_against_float64(version, op.eager, *inputs_of(op, shape, dtype))


def _layouts(x):
    """The same numbers as x, (M, N), in layouts that users really pass."""
    m, n = x.shape
    wide = torch.randn(m, 2 * n + 3, dtype=x.dtype, device=x.device)
    wide[:, 3 : n + 3] = x
    gaps = torch.randn(2 * m, n, dtype=x.dtype, device=x.device)
    gaps[::2] = x
    columns = torch.randn(m, 2 * n, dtype=x.dtype, device=x.device)
    columns[:, ::2] = x
    return {
        "transposed": x.t().contiguous().t(),
        "every second row": gaps[::2],
        "every second column": columns[:, ::2],
        "chunk of a wider tensor, unaligned": wide[:, 3 : n + 3],
        "four dimensions, permuted": x.view(1, m, 1, n).permute(0, 2, 1, 3),
        "expanded row": x[:1].expand(m, n),
    }


@versions
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_strides(op, version, dtype):
    x, *rest = (t.detach() for t in inputs_of(op, (34, 40), dtype))
    for layout, strided in _layouts(x).items():
        inputs = [strided.detach().requires_grad_(), *(r.requires_grad_() for r in rest)]
        check_against_float64(version, op.eager, *inputs, name=layout)


@versions
@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    shape=st.tuples(st.integers(0, 40), st.integers(1, 60)),
    steps=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    start=st.integers(0, 5),
    transposed=st.booleans(),
)
def test_any_view(op, version, shape, steps, start, transposed):
    """Any sliced or transposed view gives the values of its contiguous copy."""
    (m, n), (row_step, col_step) = shape, steps
    x, *rest = (t.detach() for t in inputs_of(op, (m, n)))
    big = (
        (n * col_step, start + m * row_step) if transposed else (start + m * row_step, n * col_step)
    )
    base = torch.full(big, float("nan"), device=x.device)
    view = (base.t() if transposed else base)[start::row_step, ::col_step]
    view.copy_(x)
    assert torch.equal(version(view, *rest), version(x.contiguous(), *rest))


@versions
def test_strided_parameters(op, version):
    x, *rest = (t.detach() for t in inputs_of(op, (9, 40)))
    spread = [torch.stack([r, r], dim=-1)[..., 0].requires_grad_() for r in rest]
    check_against_float64(version, op.eager, x.requires_grad_(), *spread)


@versions
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nan_and_infinities(op, version, dtype):
    x, *rest = inputs_of(op, (6, 24), dtype)
    special = torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0, -0.0])
    with torch.no_grad():
        x[1, :5] = special.to(x)
        x[3] = float("nan")
        x[4] = -float("inf")
        x[5] = torch.finfo(dtype).max
    check_against_float64(version, op.eager, x, *rest)


@versions
def test_gradient_of_a_sum_has_stride_zero(op, version):
    inputs, again = inputs_of(op, (17, 33)), inputs_of(op, (17, 33))
    version(*inputs).sum().backward()
    op.eager(*again).sum().backward()
    for got, want in zip(inputs, again):
        torch.testing.assert_close(got.grad, want.grad, rtol=1e-5, atol=1e-5)


@versions
def test_second_backward_gives_the_same(op, version):
    inputs = inputs_of(op, (17, 33))
    y = version(*inputs)
    dy = torch.randn_like(y)
    before = dy.clone()
    first = torch.autograd.grad(y, inputs, dy, retain_graph=True)
    second = torch.autograd.grad(y, inputs, dy)
    assert all(torch.equal(a, b) for a, b in zip(first, second))
    assert torch.equal(dy, before)


@versions
def test_only_the_gradients_asked_for(op, version):
    inputs = inputs_of(op, (17, 33))
    wanted = torch.autograd.grad(op.eager(*inputs).square().sum(), inputs)
    for k, leaf in enumerate(inputs):
        others = [i if i is leaf else i.detach() for i in inputs]
        (got,) = torch.autograd.grad(version(*others).square().sum(), [leaf])
        torch.testing.assert_close(got, wanted[k], rtol=1e-5, atol=1e-5)


@versions
def test_second_derivative_raises(op, version):
    inputs = inputs_of(op, (5, 7))
    dy = torch.randn(5, 7, device=machine.device(), requires_grad=True)
    (dx,) = torch.autograd.grad(version(*inputs), inputs[:1], dy, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dx.sum().backward()


@versions
def test_vmap_raises(op, version):
    x, *rest = (t.detach() for t in inputs_of(op, (5, 7)))
    with pytest.raises(RuntimeError, match="functorch|vmap"):
        torch.vmap(version, in_dims=(0, *[None] * len(rest)))(x, *rest)


@versions
def test_checkpoint(op, version):
    from torch.utils.checkpoint import checkpoint

    inputs, again = inputs_of(op, (17, 33)), inputs_of(op, (17, 33))
    checkpoint(version, *inputs, use_reentrant=False).square().sum().backward()
    version(*again).square().sum().backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(inputs, again))


@versions
def test_autocast(op, version):
    inputs = inputs_of(op, (17, 33))
    with torch.autocast(machine.device().type, dtype=torch.bfloat16):
        assert version(*inputs).dtype == op.eager(*inputs).dtype


@versions
def test_same_bits_every_time(op, version):
    inputs = inputs_of(op, (123, 781))
    dy = torch.randn(123, 781, device=machine.device())
    runs = [torch.autograd.grad(version(*inputs), inputs, dy) for _ in range(3)]
    assert all(torch.equal(a, b) for run in runs[1:] for a, b in zip(runs[0], run))


# --- torch.library -----------------------------------------------------------------------------------------

REGISTERED = [pytest.param(op, r, id=op.name) for op in OPS for r in op.registered]


@pytest.mark.parametrize(("op", "registered"), REGISTERED)
@pytest.mark.parametrize("shape", [(3, 5), (2, 3, 4), (0, 4)], ids=str)
def test_opcheck(op, registered, shape):
    torch.library.opcheck(registered, inputs_of(op, shape))


@pytest.mark.parametrize(("op", "registered"), REGISTERED)
def test_gradcheck_of_the_registered_op(op, registered):
    assert torch.autograd.gradcheck(registered, inputs_of(op, (5, 7), torch.float64))


@ops
def test_gradcheck(op):
    for name, version in op.versions.items():
        if name == "cuda" and CUDA_MISSING:
            continue
        assert torch.autograd.gradcheck(version, inputs_of(op, (5, 7), torch.float64))


@ops
def test_compile_fullgraph(op):
    def block(x, *rest):
        return op.versions["triton"](x * 2, *rest).square()

    def definition(x, *rest):
        return op.eager(x * 2, *rest).square()

    compiled = torch.compile(block, fullgraph=True)
    for shape in [(17, 33), (5, 8)]:
        check_against_float64(compiled, definition, *inputs_of(op, shape))


# --- more than 2**31 elements ------------------------------------------------------------------------------


@versions
def test_offsets_past_two_to_the_31(op, version):
    """Three rows 2**30 elements apart: 4 GiB of address space, of which three pages are touched."""
    storage = torch.empty(2**31 + 64, dtype=torch.float16, device=machine.device())
    x = storage.as_strided((3, 16), (2**30, 1))
    x.copy_(torch.arange(-24, 24).view(3, 16))
    _, *rest = (t.detach() for t in inputs_of(op, (3, 16), torch.float16))
    assert torch.equal(version(x, *rest), op.eager(x, *rest))


@versions
def test_gradient_offsets_past_two_to_the_31(op, version):
    storage = torch.empty(2**31 + 64, dtype=torch.float16, device=machine.device())
    dy = storage.as_strided((3, 16), (2**30, 1))
    dy.copy_(torch.arange(-24, 24).view(3, 16))
    inputs, again = inputs_of(op, (3, 16), torch.float16), inputs_of(op, (3, 16), torch.float16)
    version(*inputs).backward(dy)
    op.eager(*again).backward(dy)
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(inputs, again))


@pytest.mark.gpu
@versions
@pytest.mark.parametrize("shape", [(2**19 + 1, 4096), (2**27 + 3, 17)], ids=str)
def test_more_than_two_to_the_31_elements(op, version, shape):
    free, _ = torch.cuda.mem_get_info()
    if free < 40e9:
        pytest.skip("needs 40 GB of GPU memory")
    inputs = inputs_of(op, shape, torch.bfloat16)
    got = version(*inputs)
    got.backward(got.detach())
    for rows in (slice(0, 2), slice(-2, None)):
        part = [inputs[0].detach()[rows].requires_grad_(), *(i.detach() for i in inputs[1:])]
        want = op.eager(*part)
        assert torch.equal(got[rows], want)
        want.backward(want.detach())
        assert torch.equal(inputs[0].grad[rows], part[0].grad)


# --- on a GPU ----------------------------------------------------------------------------------------------


@pytest.mark.gpu
@versions
def test_cuda_graph(op, version):
    inputs = [i.detach() for i in inputs_of(op, (257, 512))]
    version(*inputs)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = version(*inputs)
    for i in inputs:
        i.normal_()
    graph.replay()
    assert torch.equal(y, version(*inputs))


@pytest.mark.gpu
@versions
def test_current_stream(op, version):
    """A launch on the default stream would read x before the long kernels of this stream have written it."""
    inputs = [i.detach() for i in inputs_of(op, (4096, 4096))]
    version(*inputs)
    want = op.eager(inputs[0] + 64, *inputs[1:])
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        x = inputs[0]
        for _ in range(64):
            x = x + 1
        got = version(x, *inputs[1:])
    torch.cuda.synchronize()
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
@versions
def test_second_gpu(op, version):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    inputs = op.inputs((17, 33), torch.float32, torch.device("cuda:1"))
    check_against_float64(version, op.eager, *inputs)


@pytest.mark.gpu
@versions
def test_no_host_sync(op, version):
    inputs = [i.detach() for i in inputs_of(op, (64, 64))]
    version(*inputs)
    torch.cuda.set_sync_debug_mode("error")
    try:
        version(*inputs)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@ops
def test_a_second_shape_does_not_compile_again(op):
    version = op.versions["triton"]
    with _count_compilations() as compiled:
        for rows in (1000, 1001, 3000, 17):
            inputs = inputs_of(op, (rows, 1024))
            version(*inputs).sum().backward()
            if rows == 1000:
                compiled.clear()
    assert not compiled, compiled


class _count_compilations:
    """The names of Triton kernels compiled inside."""

    def __enter__(self):
        import triton

        self.knobs, self.names = triton.knobs.runtime, []
        self.before = self.knobs.jit_post_compile_hook
        self.knobs.jit_post_compile_hook = lambda **kw: self.names.append(kw.get("repr"))
        return self.names

    def __exit__(self, *_):
        self.knobs.jit_post_compile_hook = self.before


# --- bad input ---------------------------------------------------------------------------------------------


@versions
def test_bad_input_is_refused_in_a_sentence(op, version):
    x, *rest = (t.detach() for t in inputs_of(op, (4, 6)))
    wrong = {
        "a list": ([x.tolist(), *rest], TypeError),
        "integers": ([x.int(), *rest], TypeError),
        "complex": ([x.to(torch.complex64), *rest], TypeError),
        "mixed dtypes": ([x.half(), *rest], TypeError),
        "a scalar": ([x[0, 0], *rest], ValueError),
        "the wrong width": ([x[:, :5], *rest], ValueError),
        "mixed devices": ([x.to("meta"), *rest], ValueError),
        "a device with no kernels": ([x.to("meta"), *(r.to("meta") for r in rest)], ValueError),
    }
    for what, (inputs, kind) in wrong.items():
        with pytest.raises(kind) as caught:
            version(*inputs)
        assert version.__name__ in str(caught.value), what
        assert len(str(caught.value)) > 40, what


@pytest.mark.gpu
@versions
def test_cpu_input_on_a_gpu_machine(op, version):
    inputs = op.inputs((4, 6), torch.float32, torch.device("cpu"))
    with pytest.raises(ValueError, match="eager"):
        version(*inputs)


def test_the_table_names_every_file():
    """An op file without an entry in the suite would escape every test above."""
    from lib.results import ROOT

    files = {p.stem for p in (ROOT / "lib" / "ops").glob("*.py")} - {"__init__"}
    assert files == set(suite.OPS)
    for op, source in itertools.chain.from_iterable([(o, s) for s in o.sources] for o in OPS):
        assert (ROOT / source).exists(), (op.name, source)
