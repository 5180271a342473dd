"""What every op has to get right: functions (op, version) that raise, for any op of the registry.

`op` has a configuration bound, and `version` is one of its versions, in-place ones working on a copy.
test_battery.py runs them on every op, and `mutants` on every wrong one.
"""

import contextlib
import functools
import itertools
import re
from types import SimpleNamespace
from unittest import mock

from lib import machine
from lib.measure.bench import detached, leaves, outputs
from lib.measure.check import check_against_float64
from lib.nogpu.memory import count_traffic
from lib.tests.ops import cases

import pytest
import torch
from torch.autograd import forward_ad

# What takes the interpreter less than a second or so.
FEW_FLOPS, FEW_BYTES = 4_000_000, 300_000


def small_shapes(op):
    """The odd shapes that the interpreter can do; all of them on a GPU."""
    few = [s for s in op.odd_shapes if machine.HAS_GPU or is_small(op, s)]
    return few or op.odd_shapes[:1]


def is_small(op, shape):
    return op.flops(shape, False) <= FEW_FLOPS and op.bytes_moved(shape, 4, False) <= FEW_BYTES


def inputs_of(op, shape=None, dtype=torch.float32):
    return list(op.checked_inputs(shape or odd(op), dtype, machine.device()))


def host_of(module):
    """What holds the shared functions that an op calls: lib.ops._host, or the op itself where it is a copy."""
    return getattr(module, "host", module)


def cuda_calls(module, forward):
    """Inside, `forward` stands for that of the module's .cu."""
    built = SimpleNamespace(forward=forward)
    return mock.patch.object(host_of(module), "load_cuda", return_value=built)


def looking_inside(module):
    """Inside, a mode sees what an op does, and not the op."""
    return mock.patch.object(host_of(module), "modes", int)


def check_strips(module, call, several):
    """`call`, in bfloat16, sums rows in several strips or in one: kept in float32, or the gradient itself."""
    host = host_of(module)
    with mock.patch.object(host, "sum_rows", wraps=host.sum_rows) as summed:
        call()
    partial = summed.call_args.args[0]
    dtype = torch.float32 if several else torch.bfloat16
    assert (len(partial) > 1, partial.dtype) == (several, dtype)


def writes_in_place(op, version):
    """Whether it is an in-place version, which `version` calls with a copy."""
    return version not in op.versions.values()


def floats(function, inputs):
    """The inputs with `function` of each floating-point tensor; integers and what is no tensor stay."""
    return [
        function(t) if isinstance(t, torch.Tensor) and t.is_floating_point() else t for t in inputs
    ]


def first_floats(inputs):
    """The place of the first floating-point tensor among the inputs."""
    return next(k for k, t in enumerate(inputs) if t.is_floating_point())


def trained_as(inputs, like):
    """Leaves of these values, trained where those of `like` are."""
    return [
        t.detach().requires_grad_(old.requires_grad) if isinstance(t, torch.Tensor) else t
        for t, old in zip(inputs, like, strict=True)
    ]


def odd(op):
    """One small shape that fills no tile."""
    return op.odd_shapes[min(2, len(op.odd_shapes) - 1)]


def takes_any_leading(op):
    """Whether it adds up tensors element by element, those of any leading sizes and those of a row."""
    return op.letters == "... N" and len(op.tensors) > 1


def check(op, version, inputs, name, eager=None):
    check_against_float64(version, eager or op.eager, *inputs, slack=slack(op, inputs), name=name)


def slack(op, inputs):
    """check_against_float64's: one rounding, where eager's largest error is a matter of luck or terms cancel.

    The first is so of a product of few numbers.
    """
    # and a mean weighed by classes is one of few rows
    few = op.has_products and (inputs[0].numel() <= 4096 or "class_weight" in op.tensors)
    granted = torch.finfo(inputs[0].dtype).eps if few or op.cancelling else 0.0
    return max(op.slack, granted)


def gradients(version, inputs, dys=None, **how):
    """The gradients of all leaves, in order."""
    ys = outputs(version(*inputs))
    dys = [torch.ones_like(y) for y in ys] if dys is None else dys
    return torch.autograd.grad(ys, leaves(inputs), dys, **how)


def assert_close(got, want, dtype=torch.float32, what="", roundings=64):
    """Equal up to the rounding of sums of some hundred numbers of this dtype."""
    tolerance = roundings * torch.finfo(dtype).eps
    for a, b in zip(outputs(got), outputs(want), strict=True):
        torch.testing.assert_close(
            a, b, rtol=tolerance, atol=tolerance, equal_nan=True, msg=lambda m: f"{what}: {m}"
        )


# --- values and gradients ------------------------------------------------------------------------------------


def values(op, version, dtypes=(torch.float32, torch.bfloat16, torch.float16)):
    for shape in small_shapes(op):
        for dtype in dtypes:
            torch.manual_seed(0)  # the incoming gradient, whatever was checked before
            check(op, version, inputs_of(op, shape, dtype), f"{shape}, {dtype}")


def empty(op, version):
    for shape in op.empty_shapes:
        check(op, version, inputs_of(op, shape), str(shape))


def specials(op, version):
    """NaN, infinities and large numbers stand in the result where eager has them."""
    leaky = op.has_products and cases.products_leak()
    for dtype in (torch.float32,) if leaky else (torch.float32, torch.bfloat16):
        elementwise = op.letters.startswith("...")
        inputs = inputs_of(op, dtype=dtype)
        cases.with_specials(inputs, op.eager, elementwise, first_floats(inputs))
        if op.without_zeros:
            between(op, version, inputs)
        else:
            check(op, version, inputs, f"NaN and infinities, {dtype}")


def between(op, version, inputs):
    """NaN and infinities stand at least where the mathematics has them, and at most where eager has them."""
    dys = [torch.randn_like(y) for y in outputs(op.eager(*inputs))]
    runs = (version, op.eager, op.without_zeros)
    results = [[*outputs(run(*inputs)), *gradients(run, inputs, dys)] for run in runs]
    for ours, eager, least in zip(*results):
        assert (least.isfinite() | ~ours.isfinite()).all(), "a NaN or an infinity is lost"
        assert (~eager.isfinite() | ours.isfinite()).all(), (
            "a NaN or an infinity that eager has not"
        )
        both = ours.isfinite() & least.isfinite()
        assert_close(ours[both], least[both], ours.dtype, "beside NaN", op.roundings)


def layouts(op, version):
    """Each tensor, one after the other, in the layouts that users really pass."""
    inputs = inputs_of(op)
    for k, (label, t) in enumerate(zip(op.tensors, inputs)):
        for layout, strided in cases.layouts(t.detach()).items():
            given = [*inputs[:k], strided.requires_grad_(t.requires_grad), *inputs[k + 1 :]]
            check(op, version, given, f"{label} {layout}")


def leading_sizes(op, version):
    """x of one dimension and of four, permuted, where the op takes any leading sizes."""
    if not next(iter(op.tensors.values())).startswith("..."):
        return
    shape = op.sizes(odd(op))
    n_rows = shape["..."][0]
    for sizes, order in (((), ()), ((1, n_rows, 1), (0, 1, 2)), ((n_rows, 2, 1), (1, 0, 2))):
        inputs = []
        for spec, t in zip(op.tensors.values(), inputs_of(op)):
            x = t.detach()
            if spec.startswith("..."):
                x = x[0] if not sizes else x[:, None, None].expand(n_rows, *sizes[1:], *x.shape[1:])
                x = x.clone().permute(*order, *range(len(order), x.dim())) if sizes else x
            inputs.append(x.detach().requires_grad_(t.requires_grad))
        check(op, version, inputs, f"leading sizes {tuple(inputs[0].shape[:-1])}")


def gradient_layouts(op, version):
    """Incoming gradients of strides 0, as sum() sends them, and of other strides; dy stays as it was."""
    inputs, again = inputs_of(op), inputs_of(op)
    ys = [y.detach() for y in outputs(op.eager(*inputs))]
    random = [torch.randn_like(y, memory_format=torch.contiguous_format) for y in ys]
    expanded = [torch.ones((), dtype=y.dtype, device=y.device).expand_as(y) for y in ys]
    turned = [dy.transpose(-1, 0).contiguous().transpose(-1, 0) for dy in random]
    apart = [torch.stack([dy, dy], -1)[..., 0] for dy in random]
    for what, dys in {"expanded": expanded, "transposed": turned, "apart": apart}.items():
        before = [dy.clone() for dy in dys]
        got, want = gradients(version, inputs, dys), gradients(op.eager, again, dys)
        for a, b in zip(got, want, strict=True):
            assert_close(a, b, what=f"{what} dy", roundings=1024 if op.has_products else 64)
        assert all(map(torch.equal, before, dys)), f"{what} dy was changed"


def second_backward(op, version):
    """Twice the same gradients: what was saved is as it was."""
    inputs = inputs_of(op)
    ys = outputs(version(*inputs))
    dys = [torch.randn_like(y) for y in ys]
    first = torch.autograd.grad(ys, leaves(inputs), dys, retain_graph=True)
    first = [t.clone() for t in first]
    second = torch.autograd.grad(ys, leaves(inputs), dys)
    assert all(map(torch.equal, first, second)), "a second backward differs"


def own_memory(op, version):
    """No two gradients lie in one storage: it would live, and be saved, with either of them. One may be two."""
    distinct = {(g.data_ptr(), *g.shape): g for g in gradients(version, inputs_of(op))}
    storages = [g.untyped_storage().data_ptr() for g in distinct.values()]
    assert len({*storages}) == len(storages)


def gradients_one_by_one(op, version):
    """Only the gradient of one tensor asked for, and of all but one."""
    inputs = inputs_of(op)
    trained = [k for k, _ in enumerate(inputs) if leaves(inputs[k : k + 1])]
    for chosen in [[k] for k in trained] + [[j for j in trained if j != k] for k in trained]:
        if chosen:
            some = detached(inputs)
            for k in chosen:
                some[k].requires_grad_()
            check(op, version, some, f"gradients of {chosen}")


def same_bits(op, version):
    inputs = inputs_of(op)
    dys = [torch.randn_like(y) for y in outputs(version(*inputs))]
    runs = [gradients(version, inputs, dys) for _ in range(2)]
    assert all(map(torch.equal, *runs)), "two runs differ"


def exact(op, version):
    """float64 is computed in float64, and its gradients are those of differences."""
    shape = min(op.odd_shapes, key=lambda s: (min(s) < 2, op.flops(s, True)))
    inputs = inputs_of(op, shape, torch.float64)
    # nondet_tol: whether bits are the same, same_bits sees; atomic additions have no order
    assert torch.autograd.gradcheck(version, inputs, fast_mode=True, nondet_tol=1e-12)


# --- autograd, torch.func, autocast --------------------------------------------------------------------------


def second_derivative(op, version):
    """It raises or is right: of each gradient by each input, all trained or all but one, dy a number or of y.

    Each input has a second way into what is differentiated: a missing part would be a wrong number.
    """
    shape = min((s for s in op.odd_shapes if min(s) > 1), key=lambda s: op.flops(s, True))
    n_trained = len(leaves(inputs_of(op, shape)))
    for frozen, power in itertools.product([None, *range(n_trained)], [1, 2]):
        inputs = inputs_of(op, shape)
        trained = leaves(inputs)
        if frozen is not None:
            trained.pop(frozen).requires_grad_(False)
        for k in range(len(trained)):
            twice = [
                _twice(function, inputs, trained, k, power) for function in (version, op.eager)
            ]
            for j, (got, want) in enumerate(zip(*twice)):
                if got is not None:
                    assert_close(got, want, what=f"second derivative, {k} by {j}", roundings=4096)


def _twice(function, inputs, trained, k, power):
    """By each leaf, the derivative of the squares of all leaves and of k's gradient; None where it raises."""
    loss = sum((y**power).sum() for y in outputs(function(*inputs)))
    gradient = _or_none(loss, trained[k], create_graph=True)
    if gradient is None:
        return [None] * len(trained)
    total = (gradient**2).sum() + sum((t**2).sum() for t in trained)
    return [_or_none(total, leaf, retain_graph=True) for leaf in trained]


def _or_none(y, leaf, **how):
    """dy / dleaf; None where the op says that it has no second derivative."""
    try:
        return torch.autograd.grad(y, leaf, **how)[0]
    except RuntimeError as error:
        if not re.search("no second derivative|no autograd formula", str(error)):
            raise
        return None


def second_derivative_raises(op, version):
    """Where gradients depend on the inputs: also by backward()."""
    inputs = inputs_of(op)
    ys = outputs(version(*inputs))
    dys = [torch.ones_like(y, requires_grad=True) for y in ys]
    trained = leaves(inputs)

    def twice():
        grads = torch.autograd.grad(ys, trained, dys, create_graph=True)
        # without the error: the part of it that goes through the inputs
        sum((g * t).sum() for g, t in zip(grads, trained)).backward()

    with pytest.raises(RuntimeError, match="no second derivative; for one, use"):
        twice()


def transforms_raise(op, version):
    """torch.func, vmap and forward-mode AD, by each tensor: refused by name, with what to use instead."""
    inputs = detached(inputs_of(op))
    for k, t in enumerate(inputs[: len(op.tensors)]):

        def of_one(value, k=k):
            return sum(y.sum() for y in outputs(version(*inputs[:k], value, *inputs[k + 1 :])))

        def forward_mode(t=t, of_one=of_one):
            with forward_ad.dual_level(), torch.no_grad():
                of_one(forward_ad.make_dual(t, torch.ones_like(t)))

        calls = {
            "grad": functools.partial(torch.func.grad(of_one), t),
            "jvp": functools.partial(torch.func.jvp, of_one, (t,), (t,)),
            "vmap": functools.partial(torch.vmap(of_one), torch.stack([t, t])),
            # its tensors have no memory, and give 0 as their address
            "functionalize": functools.partial(torch.func.functionalize(of_one), t),
            "forward mode": forward_mode,
        }
        if writes_in_place(op, version):
            del calls["vmap"]  # on_a_copy's own copy would fail
        if not t.is_floating_point():
            calls = {what: calls[what] for what in ("vmap", "functionalize")}  # no derivative
        for what, call in calls.items():
            with pytest.raises((RuntimeError, ValueError), match=f"{op.name}.*: ") as caught:
                call()
            remedy = "do not reach into a kernel; under them use|no gradient for|require"
            assert re.search(remedy, str(caught.value)), f"{what} by input {k}: {caught.value}"
    with forward_ad.dual_level():  # open, and nobody takes part
        assert_close(version(*inputs), op.eager(*inputs), what="beside a dual level")


def checkpoint(op, version):
    from torch.utils.checkpoint import checkpoint

    inputs, again = inputs_of(op), inputs_of(op)

    def recomputed(*tensors):
        return checkpoint(version, *tensors, use_reentrant=False)

    assert all(map(torch.equal, gradients(recomputed, inputs), gradients(version, again)))


def autocast(op, version):
    """Results have the dtypes that eager's have, and gradients those of the inputs.

    The first tensors are float32, or 16 bits as the layer before made them; parameters are float32 always.
    """
    made = inputs_of(op, dtype=torch.bfloat16)
    for n_narrow in range(len(op.tensors) if takes_any_leading(op) else 1):
        inputs = trained_as(made[:n_narrow] + floats(torch.Tensor.float, made[n_narrow:]), made)
        with torch.autocast(machine.device().type, dtype=torch.bfloat16):
            got, want = outputs(version(*inputs)), outputs(op.eager(*inputs))
        assert writes_in_place(op, version) or [y.dtype for y in got] == [y.dtype for y in want]
        grads, want_grads = (
            torch.autograd.grad([y.float().sum() for y in ys], leaves(inputs)) for ys in (got, want)
        )
        assert [g.dtype for g in grads] == [t.dtype for t in leaves(inputs)]
        assert_close([g.float() for g in grads], [g.float() for g in want_grads], torch.bfloat16)


def mixed_dtypes(op, version):
    """16 bits beside float32, as autocast leaves them: what eager's sum is."""
    if not takes_any_leading(op):
        return

    def into_x(x, *rest):
        return op.eager(x, *rest).to(x.dtype)

    eager = into_x if writes_in_place(op, version) else op.eager
    made = inputs_of(op)
    for narrow in (torch.bfloat16, torch.float16):
        for n_narrow in range(1, len(made)):
            inputs = trained_as([t.to(narrow) for t in made[:n_narrow]] + made[n_narrow:], made)
            check(op, version, inputs, f"{n_narrow} in {narrow}", eager)


SMALL = re.compile(r"\.(bias|weight|seed|cos|sin|partial|stats)|sum_rows")


def traffic(op, version):
    """Large tensors are read and written once, as the registry counts, in a launch; backward in two at most."""
    for dtype in (torch.float32, torch.bfloat16):
        inputs = inputs_of(op, op.traffic_shape, dtype)
        forward = count_traffic(lambda inputs=inputs: version(*detached(inputs)))
        ys = outputs(version(*inputs))
        dys = [torch.randn_like(y) for y in ys]
        call = functools.partial(torch.autograd.grad, ys, leaves(inputs), dys)
        backward = count_traffic(call)
        assert forward.launches == 1 and backward.launches <= 2
        least = op.bytes_moved(op.traffic_shape, dtype.itemsize, gradients=False)
        both = op.bytes_moved(op.traffic_shape, dtype.itemsize, gradients=True)
        for seen, n_bytes in ((forward, least), (backward, both - least)):
            large = [a for name, a in seen.by_argument.items() if not SMALL.search(name)]
            assert sum(a.loaded_distinct + a.stored_distinct for a in large) == n_bytes
            asked_for = sum(a.loaded + a.stored for a in large)
            assert n_bytes <= asked_for <= (1 + op.looked_up) * n_bytes


def far_out(op, version):
    """Numbers far out have finite gradients, where float64 has such: no 0·inf on the way."""
    for dtype in (torch.float32, torch.bfloat16):
        inputs = inputs_of(op, dtype=dtype)
        x = inputs[first_floats(inputs)].detach()
        row = x[(0,) * (x.dim() - 1)][:4]
        row.copy_(torch.tensor([4e19, -4e19, 1e30, -1e30])[: len(row)])
        exact = trained_as(floats(torch.Tensor.double, inputs), inputs)
        for k, (g, want) in enumerate(zip(gradients(version, inputs), gradients(op.eager, exact))):
            lost = ~torch.isfinite(g) & (want.abs() < torch.finfo(dtype).max)
            assert not lost.any(), f"gradient {k}, {dtype}: {g[lost][0]}, should be {want[lost][0]}"


# --- torch.compile -------------------------------------------------------------------------------------------


def compiled(op, version, backend="aot_eager"):
    """One graph, forward and backward, at two sizes; in place, on a tensor that it may change."""
    torch.compiler.reset()  # the function below is one to it, with all versions of all ops
    n_written = op.n_written if writes_in_place(op, version) else 1
    original = {v.__name__: v for v in op.in_place.values()}.get(version.__name__, version)

    def doubled(function):
        def calls(*tensors):
            written = [t * 2 for t in tensors[:n_written]]
            return [y * 3 for y in outputs(function(*written, *tensors[n_written:]))]

        return calls

    graph = torch.compile(doubled(original), fullgraph=True, backend=backend)
    for shape in op.odd_shapes[1:3]:
        check(op, graph, inputs_of(op, shape), f"compiled, {shape}", doubled(op.eager))
    inputs = detached(inputs_of(op))
    with torch.no_grad():
        assert_close(graph(*inputs), doubled(op.eager)(*inputs), what="compiled, no gradient")


def registered(op, version):
    """Values and gradients of the registered ops, and torch.library.opcheck of them."""
    arguments = op.op_arguments(op.arguments, machine.device())
    for shape in (odd(op), op.empty_shapes[0]):
        for function in op.registered:
            bound = _as_eager(op, _by_schema(op, function, arguments))
            check(op, bound, inputs_of(op, shape), f"{function._name}, {shape}")
            for inputs in (inputs_of(op, shape), detached(inputs_of(op, shape))):
                given, named = _placed(op, function, _owners(inputs))
                torch.library.opcheck(function, given, named | arguments)
            required = _required(op, function, inputs_of(op, shape), arguments)
            torch.library.opcheck(function, _owners(required))
        for function in op.mutating:
            inputs = _owners(detached(inputs_of(op, shape)))
            torch.library.opcheck(function, inputs, arguments)
            want = op.eager(*inputs)
            assert function(*inputs, **arguments) is None
            assert_close(inputs[: op.n_written], want, what=function._name)
    for function in op.registered:
        second_derivative(op, _as_eager(op, _by_schema(op, function, arguments)))


def _placed(op, function, inputs):
    """(inputs, {name: input}): by name, those that stand behind other arguments in the op's schema."""
    places = [a.name for a in function._opoverload._schema.arguments]
    late = [k for k, name in enumerate(op.tensors) if places[k] != name and name in places]
    first = min(late, default=len(inputs))
    return inputs[:first], dict(zip([*op.tensors][first:], inputs[first:]))


def _by_schema(op, function, arguments):
    def call(*inputs):
        given, named = _placed(op, function, inputs)
        return function(*given, **named, **arguments)

    return call


def _required(op, function, inputs, arguments):
    """Only the arguments that have no default: torch leaves those out of needs_input_grad, and of a graph."""
    declared = function._opoverload._schema.arguments
    given, named = _placed(op, function, inputs)
    arguments = dict(zip([a.name for a in declared], given)) | named | arguments
    return [arguments[a.name] for a in declared if not a.has_default_value()]


def _owners(inputs):
    """Empty views as tensors of their own: torch's opcheck cannot copy one."""

    def owner(t):
        if not isinstance(t, torch.Tensor) or t.numel():
            return t
        return torch.empty(t.shape, dtype=t.dtype, device=t.device).requires_grad_(t.requires_grad)

    return [owner(t) for t in inputs]


def _as_eager(op, function):
    """A registered op with the results of eager alone: some return what the backward pass needs, too."""

    def results(*inputs):
        n_results = len(outputs(op.eager(*detached(inputs))))
        ys = outputs(function(*inputs))[:n_results]
        return ys[0] if n_results == 1 else tuple(ys)

    return results


# --- more than 2**31 elements --------------------------------------------------------------------------------


def far_apart(op, version):
    """Offsets past 2**31: of each tensor, and of the incoming gradient."""
    shape = (3, 16) if op.letters.startswith("...") else far_shape(op)
    inputs = inputs_of(op, shape, torch.float16)
    for k, (label, t) in enumerate(zip(op.tensors, inputs)):
        if (far := cases.spaced(t.detach())) is not None:
            given = [*inputs[:k], far.requires_grad_(t.requires_grad), *inputs[k + 1 :]]
            check(op, version, given, f"{label} far apart", cases.near(op.eager))
    again = inputs_of(op, shape, torch.float16)
    ys = outputs(op.eager(*again))
    dys = [cases.spaced(torch.randn_like(y)) for y in ys]
    if any(dy is None for dy in dys):
        return
    near = [dy.contiguous() for dy in dys]
    for a, b in zip(gradients(version, inputs, dys), gradients(op.eager, again, near), strict=True):
        assert_close(a, b, torch.float16, "dy far apart")


def far_shape(op):
    """Three of everything, but for a K or D of 16: each tensor has a dimension that can be far apart."""
    sizes = {"K": 16, "D": 16}
    return tuple(sizes.get(letter, 3) for letter in op.letters.split())


# --- bad input -----------------------------------------------------------------------------------------------


def wrong_calls(op):
    """(what is wrong, inputs, the error it raises)."""
    inputs = detached(inputs_of(op))
    x, *rest = inputs
    yield "a list", [x.tolist(), *rest], TypeError
    if x.is_floating_point():
        yield "integers", [x.int(), *rest], TypeError
    else:
        yield "numbers that are no integers", [x.float(), *rest], TypeError
    yield "complex", [x.to(torch.complex64), *rest], TypeError
    n_tensors = len(op.tensors)
    there = [t.to("meta") for t in inputs[:n_tensors]]
    yield "a device with no kernels", [*there, *inputs[n_tensors:]], ValueError
    if op.letters != "...":
        yield "a scalar", [x.flatten()[0], *rest], ValueError
    n_floats = sum(t.is_floating_point() for t in inputs[:n_tensors])
    for k, (label, t) in enumerate(zip(op.tensors, inputs)):
        if len(inputs) == 1 or op.tensors[label].endswith("R frozen"):
            continue  # rope's tables have a dtype of their own
        for what, other, kind in (
            ("dtype", t.double(), TypeError),
            ("size", t.repeat([2] * t.dim()), ValueError),
            ("device", t.to("meta"), ValueError),
        ):
            if what == "dtype" and t.is_floating_point() and n_floats == 1:
                continue  # of the others none has to be like it
            yield f"another {what} of {label}", [*inputs[:k], other, *inputs[k + 1 :]], kind


def sentences(op, version):
    """{what is wrong: the sentence that says so}."""
    texts = {}
    for what, inputs, kind in wrong_calls(op):
        with pytest.raises(kind) as caught:
            version(*inputs)
        texts[what] = str(caught.value)
    return texts


def bad_input(op, version):
    """Each is refused in a sentence that names the call, and says what is wrong."""
    for what, sentence in sentences(op, version).items():
        assert version.__name__ in sentence, (what, sentence)
        assert len(sentence) > 40, (what, sentence)


# --- on a GPU ------------------------------------------------------------------------------------------------


def cuda_graph(op, version):
    inputs = detached(inputs_of(op, op.small_shape))
    version(*inputs)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ys = outputs(version(*inputs))
    for t in inputs[: len(op.tensors)]:
        t.normal_() if t.is_floating_point() else t.copy_(t.flip(0))
    graph.replay()
    assert all(map(torch.equal, ys, outputs(version(*inputs))))


def made_before(op, version):
    """A launch that was made before, on other memory; the last time it begins off the 16 bytes of before."""
    for offset in (0, 0, 1):
        inputs = inputs_of(op, op.small_shape)
        moved = [_from_offset(t, offset) if isinstance(t, torch.Tensor) else t for t in inputs]
        check(op, version, moved, f"from element {offset} on")


def _from_offset(t, offset):
    memory = torch.empty(t.numel() + offset, dtype=t.dtype, device=t.device)
    return memory[offset:].view(t.shape).copy_(t.detach()).requires_grad_(t.requires_grad)


def current_stream(op, version):
    """A launch on the default stream would read x before the long kernels of this stream have written it."""
    inputs = detached(inputs_of(op, op.small_shape))
    long = torch.zeros(2**28, device=inputs[0].device)
    late = floats(lambda t: t + 1, inputs)
    want = outputs(version(*late))
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        for _ in range(16):
            long += 1
        got = outputs(version(*floats(lambda t: t + 1 + long[0] * 0, inputs)))
    torch.cuda.synchronize()
    assert all(map(torch.equal, got, want))


def no_host_sync(op, version):
    inputs = inputs_of(op, op.small_shape)
    gradients(version, inputs)
    torch.cuda.set_sync_debug_mode("error")
    try:
        gradients(version, inputs)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def second_gpu(op, version):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    inputs = op.inputs(odd(op), torch.float32, torch.device("cuda:1"))
    check(op, version, inputs, "on the second GPU")


def cpu_input(op, version):
    inputs = op.inputs(odd(op), torch.float32, torch.device("cpu"))
    with pytest.raises(ValueError, match="eager"):
        version(*inputs)


def real_sizes(op, version):
    """The benchmarks' smallest shape, with a row more, so that no tile fits."""
    shape = min(op.bench_shapes, key=lambda s: op.bytes_moved(s, 4, True))
    shape = (shape[0] + 1, *shape[1:])
    shape = op.checked_shape(shape)
    for dtype in op.dtypes:
        check(op, version, inputs_of(op, shape, dtype), f"{shape}, {dtype}")


def more_rows_compile_nothing(op, version):
    """Another number of rows takes the kernels that are there."""
    first, *rest = [(rows, *[32] * (len(op.small_shape) - 1)) for rows in (1000, 1001, 1003)]
    gradients(version, inputs_of(op, first))
    with count_compilations() as names:
        for shape in rest:
            gradients(version, inputs_of(op, shape))
    assert not names, names


@contextlib.contextmanager
def count_compilations():
    """The names of the Triton kernels compiled inside."""
    import triton

    knobs, names = triton.knobs.runtime, []
    before = knobs.jit_post_compile_hook
    knobs.jit_post_compile_hook = lambda **how: names.append(how.get("repr"))
    try:
        yield names
    finally:
        knobs.jit_post_compile_hook = before


# The cheap ones first: most mutants die at once.
VALUES = [
    values, specials, far_out, empty, layouts, leading_sizes, gradient_layouts, gradients_one_by_one,
    mixed_dtypes,
]  # fmt: skip
AUTOGRAD = [
    own_memory, second_backward, second_derivative_raises, second_derivative, same_bits, checkpoint, autocast,
    transforms_raise,
]  # fmt: skip
ON_A_GPU = [
    cuda_graph, made_before, current_stream, no_host_sync, second_gpu, cpu_input, real_sizes,
    more_rows_compile_nothing,
]  # fmt: skip
