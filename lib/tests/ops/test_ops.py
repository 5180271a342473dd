"""What every op of the registry has to get right, from one table: values, gradients, strides, big offsets, bad
inputs, and its behaviour under autograd, torch.compile, checkpointing, autocast and CUDA graphs."""

import itertools

from lib import machine
from lib.measure import registry
from lib.measure.check import check_against_float64
from lib.nogpu import cuda
from lib.tests.ops import cases

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

OPS = [op for op in registry.OPS.values() if op.generic]  # test_rope.py asks the same of rope
SHAPES = [(1,), (1, 1), (0, 5), (5, 0), (2, 3, 8), (17, 33), (64, 128), (123, 781)]
BIG_SHAPES = [(1823, 781), (4096, 4096), (3, 100_003)]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
CUDA_MISSING = cuda.why_no_cuda()


def _versions(first_only):
    """(op with a configuration bound, version) of all versions of all ops, in-place ones on a copy of x."""
    return [
        pytest.param(
            op.configured(label),
            version,
            id="-".join(filter(None, (op.name, label, name))),
            marks=pytest.mark.skipif(
                name == "cuda" and bool(CUDA_MISSING), reason=str(CUDA_MISSING)
            ),
        )
        for op in OPS
        for label in list(op.configurations)[: 1 if first_only else None]
        for name, version in op.configured(label).all_versions().items()
    ]


# Every configuration where it takes other code; the first alone where the wrapper is what is tested.
versions = pytest.mark.parametrize(("op", "version"), _versions(first_only=False))
first_configuration = pytest.mark.parametrize(("op", "version"), _versions(first_only=True))
ops = pytest.mark.parametrize("op", [op.configured() for op in OPS], ids=lambda op: op.name)
configured_ops = pytest.mark.parametrize(
    "op",
    [
        pytest.param(op.configured(label), id="-".join(filter(None, (op.name, label))))
        for op in OPS
        for label in op.configurations
    ],
)


def inputs_of(op, shape, dtype=torch.float32):
    return op.inputs(shape, dtype, machine.device())


def assert_close(got, want, dtype=torch.float32):
    """Equal up to the rounding of results of about 30 in this dtype."""
    tolerance = 32 * torch.finfo(dtype).eps
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance, equal_nan=True)


@first_configuration
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_equals_float64(op, version, shape, dtype):
    check_against_float64(version, op.eager, *inputs_of(op, shape, dtype))


@versions
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_configuration_equals_float64(op, version, dtype):
    for shape in [(2, 3, 8), (17, 33)]:
        check_against_float64(version, op.eager, *inputs_of(op, shape, dtype), name=str(shape))


@pytest.mark.gpu
@versions
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", BIG_SHAPES, ids=str)
def test_equals_float64_at_real_sizes(op, version, shape, dtype):
    check_against_float64(version, op.eager, *inputs_of(op, shape, dtype))


@versions
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_strides(op, version, dtype):
    for layout, inputs in cases.laid_out(inputs_of(op, (34, 40), dtype)).items():
        check_against_float64(version, op.eager, *inputs, name=layout)


@first_configuration
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
    assert_close(version(view, *rest), version(x.contiguous(), *rest))


@versions
def test_strided_parameters(op, version):
    x, *rest = inputs_of(op, (9, 40))
    check_against_float64(version, op.eager, x, *map(cases.spread, rest))


@versions
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nan_and_infinities(op, version, dtype):
    inputs = cases.with_specials(inputs_of(op, (6, 24), dtype), op.eager)
    check_against_float64(version, op.eager, *inputs)


@versions
def test_gradient_of_a_sum_has_stride_zero(op, version):
    inputs, again = inputs_of(op, (17, 33)), inputs_of(op, (17, 33))
    version(*inputs).sum().backward()
    op.eager(*again).sum().backward()
    for got, want in zip(inputs, again):
        assert_close(got.grad, want.grad)


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
        assert_close(got, wanted[k])


@first_configuration
def test_second_derivative_raises(op, version):
    inputs = inputs_of(op, (5, 7))
    dy = torch.randn(5, 7, device=machine.device(), requires_grad=True)
    (dx,) = torch.autograd.grad(version(*inputs), inputs[:1], dy, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dx.sum().backward()


@ops
def test_vmap_raises(op):
    inputs = [t.detach() for t in inputs_of(op, (5, 7))]
    in_dims = tuple(0 if like_x else None for like_x in cases.matrix_like(inputs))
    for version in (op.versions | op.in_place).values():
        with pytest.raises(RuntimeError, match="functorch|vmap|BatchedTensor"):
            torch.vmap(version, in_dims=in_dims)(*inputs)


@first_configuration
def test_checkpoint(op, version):
    from torch.utils.checkpoint import checkpoint

    inputs, again = inputs_of(op, (17, 33)), inputs_of(op, (17, 33))
    checkpoint(version, *inputs, use_reentrant=False).square().sum().backward()
    version(*again).square().sum().backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(inputs, again))


@first_configuration
def test_autocast(op, version):
    inputs = inputs_of(op, (17, 33))
    with torch.autocast(machine.device().type, dtype=torch.bfloat16):
        assert version(*inputs).dtype == op.eager(*inputs).dtype


@first_configuration
def test_same_bits_every_time(op, version):
    inputs = inputs_of(op, (123, 781))
    dy = torch.randn(123, 781, device=machine.device())
    runs = [torch.autograd.grad(version(*inputs), inputs, dy) for _ in range(3)]
    assert all(torch.equal(a, b) for run in runs[1:] for a, b in zip(runs[0], run))


# --- torch.library -----------------------------------------------------------------------------------------

REGISTERED = [
    pytest.param(op.configured(label), r, id="-".join(filter(None, (op.name, label))))
    for op in OPS
    for label in op.configurations
    for r in op.registered
]
MUTATING = [pytest.param(op.configured(), r, id=op.name) for op in OPS for r in op.mutating]


@pytest.mark.parametrize(("op", "registered"), REGISTERED)
@pytest.mark.parametrize("shape", [(3, 5), (2, 3, 4), (0, 4)], ids=str)
def test_opcheck(op, registered, shape):
    torch.library.opcheck(registered, inputs_of(op, shape), op.arguments)


@pytest.mark.parametrize(("op", "registered"), MUTATING)
@pytest.mark.parametrize("shape", [(3, 5), (2, 3, 4), (0, 4)], ids=str)
def test_opcheck_in_place(op, registered, shape):
    """That it changes its first argument is declared; gradients are those of the op out of place."""
    inputs = [t.detach() for t in inputs_of(op, shape)]
    torch.library.opcheck(registered, inputs, op.arguments)
    want = op.eager(*inputs)
    assert registered(*inputs, **op.arguments) is None
    assert_close(inputs[0], want)


@pytest.mark.parametrize(("op", "registered"), REGISTERED)
def test_gradcheck_of_the_registered_op(op, registered):
    inputs = inputs_of(op, (3, 5), torch.float64)
    assert torch.autograd.gradcheck(registry.bind(registered, op.arguments), inputs)


@versions
def test_gradcheck(op, version):
    assert torch.autograd.gradcheck(version, inputs_of(op, (3, 5), torch.float64))


def _compilable(op):
    """{name: version} of those that torch.compile takes: in place, on a tensor that it may change."""
    return {"triton": op.versions["triton"]} | op.in_place


@ops
def test_compile_fullgraph(op):
    def definition(x, *rest):
        return op.eager(x * 2, *rest).square()

    for name, version in _compilable(op).items():
        compiled = torch.compile(
            lambda x, *rest, version=version: version(x * 2, *rest).square(), fullgraph=True
        )
        for shape in [(17, 33), (5, 8)]:
            check_against_float64(compiled, definition, *inputs_of(op, shape), name=name)


@configured_ops
def test_compile_every_configuration(op):
    """Through the same graphs, without the time that generating code takes."""
    torch._dynamo.reset()  # the code below is one function to it, with all ops as its versions
    for name, version in _compilable(op).items():
        compiled = torch.compile(
            lambda x, *rest, version=version: version(x * 2, *rest),
            fullgraph=True,
            backend="aot_eager",
        )
        inputs = inputs_of(op, (5, 8))
        check_against_float64(compiled, lambda x, *rest: op.eager(x * 2, *rest), *inputs, name=name)
        with torch.no_grad():
            assert_close(compiled(*inputs), op.eager(inputs[0] * 2, *inputs[1:]))


@ops
def test_compiled_in_place_writes_into_its_argument(op):
    for version in op.in_place.values():
        inputs = [t.detach() for t in inputs_of(op, (5, 8))]
        want = op.eager(*inputs)
        y = torch.compile(version, fullgraph=True, backend="aot_eager")(*inputs)
        assert y.data_ptr() == inputs[0].data_ptr()
        assert_close(inputs[0], want)


# --- more than 2**31 elements ------------------------------------------------------------------------------


@versions
def test_offsets_past_two_to_the_31(op, version):
    inputs = [t.detach() for t in inputs_of(op, (3, 16), torch.float16)]
    for k, like_x in enumerate(cases.matrix_like(inputs)):
        if like_x:
            far = [*inputs[:k], cases.far_apart(torch.float16, machine.device()), *inputs[k + 1 :]]
            far = [t.detach().requires_grad_() for t in far]
            check_against_float64(version, op.eager, *far, name=f"input {k} far apart")


@versions
def test_gradient_offsets_past_two_to_the_31(op, version):
    dy = cases.far_apart(torch.float16, machine.device())
    inputs, again = inputs_of(op, (3, 16), torch.float16), inputs_of(op, (3, 16), torch.float16)
    version(*inputs).backward(dy)
    op.eager(*again).backward(dy)
    for got, want in zip(inputs, again):
        assert_close(got.grad, want.grad, torch.float16)


@pytest.mark.gpu
@first_configuration
@pytest.mark.parametrize("shape", [(2**19 + 1, 4096), (2**27 + 3, 17)], ids=str)
def test_more_than_two_to_the_31_elements(op, version, shape):
    free, _ = torch.cuda.mem_get_info()
    if free < 40e9:
        pytest.skip("needs 40 GB of GPU memory")
    if op.random:
        pytest.skip("a part of x draws other numbers than all of it: tested in the op's own file")
    inputs = inputs_of(op, shape, torch.bfloat16)
    got = version(*inputs)
    got.backward(got.detach())
    for rows in (slice(0, 2), slice(-2, None)):
        part = [i.detach()[rows] if i.shape == inputs[0].shape else i.detach() for i in inputs]
        part[0].requires_grad_()
        want = op.eager(*part)
        assert_close(got[rows], want, torch.bfloat16)
        want.backward(got.detach()[rows])
        assert_close(inputs[0].grad[rows], part[0].grad, torch.bfloat16)


# --- on a GPU ----------------------------------------------------------------------------------------------


@pytest.mark.gpu
@first_configuration
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
@first_configuration
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
@first_configuration
def test_second_gpu(op, version):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    inputs = op.inputs((17, 33), torch.float32, torch.device("cuda:1"))
    check_against_float64(version, op.eager, *inputs)


@pytest.mark.gpu
@first_configuration
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


@first_configuration
def test_bad_input_is_refused_in_a_sentence(op, version):
    inputs = [t.detach() for t in inputs_of(op, (4, 6))]
    x, *rest = inputs
    wrong = {
        "a list": ([x.tolist(), *rest], TypeError),
        "integers": ([x.int(), *rest], TypeError),
        "complex": ([x.to(torch.complex64), *rest], TypeError),
        "a device with no kernels": ([t.to("meta") for t in inputs], ValueError),
    }
    if rest:
        wrong["a scalar"] = ([x[0, 0], *rest], ValueError)
    for k, t in enumerate(inputs if rest else []):
        others = (inputs[:k], inputs[k + 1 :])
        wrong |= {
            f"another dtype of input {k}": ([*others[0], t.half(), *others[1]], TypeError),
            f"another width of input {k}": ([*others[0], t[..., :5], *others[1]], ValueError),
            f"another device of input {k}": ([*others[0], t.to("meta"), *others[1]], ValueError),
        }
    for what, (bad, kind) in wrong.items():
        with pytest.raises(kind) as caught:
            version(*bad)
        assert version.__name__ in str(caught.value), what
        assert len(str(caught.value)) > 40, what


def test_an_unknown_configuration_is_refused():
    with pytest.raises(ValueError, match="there are: 'tanh', 'erf'"):
        registry.find("gelu").configured("sigmoid")


@pytest.mark.gpu
@first_configuration
def test_cpu_input_on_a_gpu_machine(op, version):
    inputs = op.inputs((4, 6), torch.float32, torch.device("cpu"))
    with pytest.raises(ValueError, match="eager"):
        version(*inputs)


def test_the_table_names_every_file():
    """An op file without an entry in the suite would escape every test above."""
    from lib.recorded.results import ROOT

    files = {p.stem for p in (ROOT / "lib" / "ops").glob("*.py")} - {"__init__"}
    assert files == set(registry.OPS)
    for op, source in itertools.chain.from_iterable([(o, s) for s in o.sources] for o in OPS):
        assert (ROOT / source).exists(), (op.name, source)
