"""What PyTorch does around a call: views without numbers of their own, modes that watch, sizes by symbols.

Functions (op, version) that raise, as those of battery.py; test_watched.py runs them on every op.
"""

import functools
import itertools

from lib.measure.bench import detached, leaves, outputs
from lib.tests.ops import battery

import pytest
import torch
from torch.distributed._functional_collectives import all_gather_tensor
from torch.distributed.tensor import DeviceMesh, DTensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import checkpoint
from torch.utils.checkpoint import CheckpointPolicy
from torch.utils.flop_counter import FlopCounterMode


def negative(t):
    """t's numbers, as a view with the negative bit of memory that holds -t, in t's memory format."""
    view = torch._neg_view(-t.detach())
    assert view.is_neg()
    return view.requires_grad_(t.requires_grad)


def imaginary(t):
    """The same as users come by it: the imaginary part of a conjugate, two elements apart in memory."""
    if t.dtype not in (torch.float32, torch.float64):
        return negative(t)
    view = torch.complex(torch.zeros_like(t), -t.detach()).conj().imag
    assert view.is_neg()
    return view.requires_grad_(t.requires_grad)


def bits(op, version):
    """Each tensor, all of them, and the incoming gradient with the negative bit; and a gradient of zeros."""
    inputs = battery.inputs_of(op)
    for function in (negative, imaginary):
        for k, (label, t) in enumerate(zip(op.tensors, inputs)):
            if t.is_floating_point():
                given = [*inputs[:k], function(t), *inputs[k + 1 :]]
                battery.check(op, version, given, f"{label} {function.__name__}")
        battery.check(op, version, battery.floats(function, inputs), f"all {function.__name__}")
    again = battery.inputs_of(op)
    random = [torch.randn_like(y) for y in outputs(op.eager(*again))]
    for function in (negative, imaginary, torch._efficientzerotensor):
        is_zero = function is torch._efficientzerotensor
        dys = [
            function(y.shape, dtype=y.dtype, device=y.device) if is_zero else function(y)
            for y in random
        ]
        plain = [torch.zeros_like(y) if is_zero else y for y in random]
        got, want = (
            battery.gradients(version, inputs, dys),
            battery.gradients(version, inputs, plain),
        )
        assert all(map(torch.equal, got, want)), f"dy {function.__name__}"


def written_bits(op, version):
    """Written in place, a view with the negative bit has the result's numbers."""
    x, *rest = detached(battery.inputs_of(op))
    want = outputs(op.eager(x, *rest))[0]
    written = negative(x)
    with torch.no_grad():
        version(written, *rest)
    battery.assert_close(written.resolve_neg(), want, what="written in place")


# --- modes ---------------------------------------------------------------------------------------------------


def policy(op, version):
    """Selective checkpointing sees the op: what it is to save is not computed again."""
    seen = []

    def save_ours(context, function, *args, **kwargs):
        ours = function.namespace.startswith("fused_kernels")  # a mutant has one of its own
        if ours:
            seen.append((context.is_recompute, function))
        return CheckpointPolicy.MUST_SAVE if ours else CheckpointPolicy.PREFER_RECOMPUTE

    def call(*inputs):
        how = functools.partial(checkpoint.create_selective_checkpoint_contexts, save_ours)
        return checkpoint.checkpoint(version, *inputs, use_reentrant=False, context_fn=how)

    inputs = battery.inputs_of(op)
    got, want = battery.gradients(call, inputs), battery.gradients(version, inputs)
    battery.assert_close(got, want, what="selective checkpointing")
    assert any(not again for again, _ in seen), "the policy saw no op"


def flops(op, version):
    """As many as of eager, for all gradients and for each alone; attention's as torch counts its own."""
    shape = max(op.odd_shapes[:4], key=lambda s: op.flops(s, False))
    inputs = battery.inputs_of(op, shape)
    is_attention = op.name == "attention"
    for chosen in [leaves(inputs), *([t] for t in leaves(inputs) if not is_attention)]:
        given = [t.detach() if isinstance(t, torch.Tensor) else t for t in inputs]
        trained = [g.requires_grad_() for g, t in zip(given, inputs) if any(t is c for c in chosen)]
        forward, backward = _count_flops(op.eager, given, trained)
        if is_attention:
            backward = forward * 5 // 2
        counted = _count_flops(version, given, trained)
        # linear_cross_entropy computes gradients in its forward pass
        assert sum(counted) == forward + backward, len(chosen)
        assert counted[0] == forward or op.name == "linear_cross_entropy"


def _count_flops(function, inputs, trained):
    with FlopCounterMode(display=False) as forward:
        ys = outputs(function(*inputs))
    with FlopCounterMode(display=False) as backward:
        torch.autograd.grad(ys, trained, [torch.ones_like(y) for y in ys])
    return forward.get_total_flops(), backward.get_total_flops()


def traced(op, version):
    """torch.jit.trace and make_fx: a graph that is right for other numbers; fake tensors: the right shapes."""
    inputs, others = (detached(battery.inputs_of(op)) for _ in range(2))
    tensors = inputs[: len(op.tensors)]
    for t in others[: len(tensors)]:
        t.copy_(t.flip(0))
    others = [t for t in others[: len(tensors)]]

    def call(*given):
        return outputs(version(*given, *inputs[len(tensors) :]))

    want = call(*others)
    for mode in ("real", "fake", "symbolic"):
        graph = make_fx(call, tracing_mode=mode)(*tensors)
        battery.assert_close(graph(*others), want, what=f"make_fx, {mode}")
    graph = torch.jit.trace(lambda *given: tuple(call(*given)), tuple(tensors), check_trace=False)
    battery.assert_close(graph(*others), want, what="torch.jit.trace")
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=False) as mode:
        fakes = call(*(mode.from_tensor(t) for t in tensors))
    shapes = [[(y.shape, y.dtype) for y in ys] for ys in (fakes, want)]
    assert shapes[0] == shapes[1]


class Marked(torch.Tensor):
    """A subclass that keeps its numbers elsewhere, as those of distributed training do."""

    @staticmethod
    def __new__(cls, t):
        return torch.Tensor._make_wrapper_subclass(
            cls, t.shape, strides=t.stride(), dtype=t.dtype, device=t.device
        )

    def __init__(self, t):
        self.inner = t

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        def opened(t):
            return t.inner if isinstance(t, cls) else t

        args, kwargs = torch.utils._pytree.tree_map(opened, (args, kwargs or {}))
        return function(*args, **kwargs)


def subclasses(op, version):
    """A tensor that is a stand-in for another, as input or as gradient, is taken for that one."""
    inputs = detached(battery.inputs_of(op))
    n = len(op.tensors)
    want = outputs(version(*inputs))
    got = version(*[Marked(t) for t in inputs[:n]], *inputs[n:])
    battery.assert_close(got, want, what="subclass")
    inputs = battery.inputs_of(op)
    dys = [torch.randn_like(y) for y in want]
    got = battery.gradients(version, inputs, [Marked(dy) for dy in dys])
    battery.assert_close(got, battery.gradients(version, inputs, dys), what="a subclass as dy")


def refused(op, version):
    """Sparse and nested tensors, also after a plain one of the same sizes: in a sentence with what to pass."""
    inputs = detached(battery.inputs_of(op))
    n = len(op.tensors)
    version(*inputs)
    rows = [torch.zeros(2, 3), torch.zeros(4, 3)]
    for k, t in enumerate(inputs[:n]):
        others = {"to_dense": t.to_sparse()} if t.dim() else {}
        if t.is_floating_point() and t.dim() > 1:
            others["to_padded_tensor"] = torch.nested.nested_tensor(rows, layout=torch.jagged)
        for use, other in others.items():
            with pytest.raises((TypeError, ValueError), match=rf"{version.__name__}: .*{use}|must"):
                version(*inputs[:k], other, *inputs[k + 1 :])


def distributed(op, version, group):
    """What a collective returns is waited for; a DTensor is refused in a sentence with what to pass."""
    inputs = detached(battery.inputs_of(op))
    want, n = outputs(version(*inputs)), len(op.tensors)
    gathered = [all_gather_tensor(t.contiguous(), 0, group) for t in inputs[:n]]
    assert type(gathered[0]) is not torch.Tensor
    battery.assert_close(version(*gathered, *inputs[n:]), want, what="a collective's")
    mesh = DeviceMesh.from_group(group, inputs[0].device.type)
    for k, t in enumerate(inputs[:n]):
        with pytest.raises(TypeError, match=f"{version.__name__}: .*DTensor.*to_local"):
            version(*inputs[:k], DTensor.from_local(t, mesh), *inputs[k + 1 :])


# --- sizes and numbers by symbols ----------------------------------------------------------------------------


class _Module(torch.nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *inputs):
        return self.function(*inputs)


def free_letters(op):
    """Sizes that may be any number in one graph: of rows, or of what is no weight's; not heads, nor tables."""
    letters = next(iter(op.tensors.values())).split()
    by_row = op.letters.startswith("...")
    return [letter for letter in letters if by_row or letter not in ("T", "Hq", "H", letters[-1])]


def exported(op, version):
    """torch.export with sizes of 1 to 4096: right for one, a few and many."""
    inputs, free = detached(battery.inputs_of(op)), free_letters(op)
    names = {letter: letter.replace("...", "rows") for letter in free}
    dims = {letter: torch.export.Dim(name, min=1, max=4096) for letter, name in names.items()}
    shapes = tuple(
        {place: dims[letter] for place, letter in _letters(spec) if letter in free}
        for spec in op.tensors.values()
    )
    n = len(op.tensors)

    def of_tensors(*tensors):
        return version(*tensors, *inputs[n:])

    module, given = _Module(of_tensors), tuple(inputs[:n])
    program = torch.export.export(module, given, dynamic_shapes=(shapes,)).module()
    for size in (1, 3, 40, 3000):
        if size ** len(free) <= 4096:
            given = resized(op, dict.fromkeys(free, size))
            got = program(*given[:n])
            battery.assert_close(got, op.eager(*given), what=f"exported, {size}", roundings=4096)


def _letters(spec):
    """(place, letter) of a spec's sizes; words after them say what kind of tensor it is."""
    words = [w for w in spec.split() if w == "..." or w[0].isupper()]
    return list(enumerate(words))


def resized(op, sizes):
    """Inputs with other sizes for some letters."""
    if op.letters == "...":
        return detached(battery.inputs_of(op, (sizes["..."], *battery.odd(op)[1:])))
    old = dict(zip(op.letters.split(), battery.odd(op)))
    new = {**old, **sizes}
    return detached(battery.inputs_of(op, tuple(new[letter] for letter in op.letters.split())))


def marked_dynamic(op, version):
    """mark_dynamic: one graph for any size, also where it equals another size of the call."""
    for letter in free_letters(op):
        torch.compiler.reset()
        graph = torch.compile(version, fullgraph=True, backend="eager")
        for size in sorted({2, 3, 7, *battery.odd(op)} - {1}):
            given = resized(op, {letter: size})
            for spec, t in zip(op.tensors.values(), given):
                for place, its in _letters(spec):
                    if its == letter:
                        torch._dynamo.mark_dynamic(t, place)
            want = op.eager(*given)
            battery.assert_close(graph(*given), want, what=f"{letter} = {size}", roundings=4096)


NUMBERS = {
    "add_rms_norm": ("eps",), "attention": ("scale",), "bias_gelu_dropout_add": ("p",), "layer_norm": ("eps",),
    "linear_cross_entropy": ("label_smoothing", "z_loss", "softcap"), "lora_epilogue": ("scale",),
    "lora_linear": ("scale",), "softmax": ("scale",),
}  # fmt: skip


def numbers(op, version):
    """Three values of each number: torch.compile knows it by a symbol from the second on."""
    inputs = detached(battery.inputs_of(op))
    for label, dynamic in itertools.product(NUMBERS.get(op.name, ()), (None, True)):
        torch.compiler.reset()

        def call(number, *given, label=label):
            return version(*given, **{label: number})

        graph = torch.compile(call, fullgraph=True, backend="aot_eager", dynamic=dynamic)
        for number in (0.5, 0.25, 0.125):
            want = op.eager(*inputs, **{label: number})
            what = f"{label} = {number}, dynamic={dynamic}"
            battery.assert_close(graph(number, *inputs), want, what=what, roundings=4096)
    torch.compiler.reset()
    graph = torch.compile(version, fullgraph=True, backend="aot_eager", dynamic=True)
    battery.assert_close(graph(*inputs), op.eager(*inputs), what="dynamic=True", roundings=4096)


MODES = [policy, flops, traced, subclasses, refused]
SYMBOLS = [exported, marked_dynamic, numbers]
