"""Which ops of lib/ops fit a module of yours, and what torch.compile leaves unfused in it.

    ops_that_fit(module, *inputs)            # rows of {"op", "you have", "times", "first in"}
    left_by_the_compiler(module, *inputs)    # rows of {"library call", "through memory to", "times"}

The first runs the module once on the device "meta", where nothing is computed, and follows each tensor from the
function that made it to the one that takes it. It knows the patterns of PATTERNS, written as people write them,
and no others: a row says where to look, and a missing row proves nothing. The second reads Inductor's output
code, and needs no GPU either.
"""

import collections
import contextlib
import copy
import dataclasses
import re

from lib.nogpu import inductor
from lib.nogpu.one_call import as_on_gpu

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

# they change no number, or only its type
_VIEWS = set(
    "view reshape transpose permute t T mT H flatten unflatten unsqueeze squeeze expand expand_as contiguous "
    "repeat_interleave to type type_as float half bfloat16 double chunk split tensor_split getitem narrow "
    "select unbind clone detach get movedim swapaxes".split()
)
_RENAMED = {
    "radd": "add",
    "iadd": "add",
    "rmul": "mul",
    "imul": "mul",
    "truediv": "div",
    "mm": "matmul",
    "addmm": "linear",
    "bmm": "matmul",
    "conv1d": "linear",
    "multiply": "mul",
    "square": "pow",
}
_ACTIVATIONS = "gelu", "relu", "silu", "sigmoid"
_PRODUCTS = "linear", "matmul"


@dataclasses.dataclass(eq=False)
class Call:
    """A function of PyTorch at work: its name, the calls that made its tensors, the module it is in."""

    name: str
    inputs: list
    where: str


class _Calls(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.calls, self.stack = [], []
        self._made, self._alive = {}, []  # an id belongs to a tensor only while the tensor lives

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        made = [t for t in tree_leaves(result) if isinstance(t, torch.Tensor)]
        name = getattr(func, "__name__", str(func)).strip("_")
        name = _RENAMED.get(name.removesuffix("_"), name.removesuffix("_"))
        taken = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        inputs = [self._made.get(id(t)) for t in taken]
        if name in _VIEWS:
            call = inputs[0] if inputs else None
        else:
            call = Call(name, inputs, self.stack[-1] if self.stack else "")
            if made:
                self.calls.append(call)
        self._alive += made
        self._made |= {id(t): call for t in made}
        return result


@contextlib.contextmanager
def _named(module, calls):
    """Inside, each call knows the name of the module that it is in."""
    hooks = []
    for name, part in module.named_modules():
        hooks.append(part.register_forward_pre_hook(lambda *_, n=name: calls.stack.append(n)))
        hooks.append(part.register_forward_hook(lambda *_: calls.stack.pop() and None))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def calls_of(module, *inputs):
    """Every function of PyTorch that a forward pass calls, in order; computed is nothing."""
    module = copy.deepcopy(module).to("meta")
    inputs = torch.utils._pytree.tree_map_only(
        torch.Tensor, lambda t: t.detach().to("meta"), inputs
    )
    calls = _Calls()
    with _named(module, calls), torch.no_grad(), torch.device("meta"), calls:
        module(*inputs)
    return calls.calls


def _from(call, *names):
    """The first of a call's inputs that one of these functions made, or None."""
    return next((c for c in call.inputs if c is not None and c.name in names), None)


def _behind(call, names, by_way_of=("mul", "div", "add", "masked_fill", "where", "tril")):
    """The call of one of `names` that leads to this one, by way of such functions alone."""
    for before in filter(None, call.inputs):
        if before.name in names:
            return before
        if before.name in by_way_of and (further := _behind(before, names, by_way_of)):
            return further
    return None


def _loss(call):
    return call.name == "cross_entropy" and [call, _from(call, *_PRODUCTS)]


def _attention(call):
    if call.name in ("scaled_dot_product_attention", "multi_head_attention_forward"):
        return [call]
    softmax = call.name == "matmul" and _behind(call, ("softmax",), ("dropout",))
    return softmax and [call, softmax, _behind(softmax, _PRODUCTS)]


def _gated(call):
    act = call.name == "mul" and _from(call, *_ACTIVATIONS)
    return act and [call, act, _from(act, *_PRODUCTS), _from(call, *_PRODUCTS)]


def _adapter(call):
    if call.name != "add" or not (wide := _from(call, *_PRODUCTS)):
        return None
    others = [c for c in call.inputs if c is not None and c is not wide]
    up = next((c for c in others if c.name in _PRODUCTS), None)
    up = up or next((_from(c, *_PRODUCTS) for c in others if c.name == "mul"), None)
    return [call, wide, up, up and _behind(up, _PRODUCTS, ("dropout",))]


def _dropped(call):
    drop = call.name == "add" and _from(call, "dropout")
    return drop and [call, drop, _from(drop, "gelu")]


def _rms_norm(call):
    if call.name == "rms_norm":
        return [call]
    mean = call.name == "rsqrt" and _behind(call, ("mean",), ("add",))
    return mean and [call, mean, _from(mean, "pow", "mul")]


def _rotated(call):
    """cat(-x2, x1), or cat(x1 cos - x2 sin, ...)."""
    turned = call.name == "cat" and _from(call, "neg", "sub")
    return turned and [call, turned, turned if turned.name == "neg" else _from(turned, "mul")]


def _one(*names):
    return lambda call: call.name in names and [call]


def _after(names, before):
    return lambda call: call.name in names and [call, _from(call, *before)]


# (the op, what it takes the place of, a function: the calls of a match, with None or False where there is none)
PATTERNS = (
    ("linear_cross_entropy", "cross_entropy of a linear layer", _loss),
    ("attention", "attention", _attention),
    ("lora_linear", "a linear layer and two narrow products beside it", _adapter),
    ("linear_glu", "an activation times a half, both of linear layers", _gated),
    ("bias_gelu_dropout_add", "GELU, dropout and an addition", _dropped),
    ("matmul", "a linear layer and an activation", _after(_ACTIVATIONS, _PRODUCTS)),
    ("add_relu", "an addition and a ReLU", _after(("relu",), ("add",))),
    ("add_rms_norm", "an RMSNorm, with the addition before it", _rms_norm),
    ("layer_norm", "a LayerNorm, with the addition before it", _one("layer_norm")),
    ("rope", "halves turned into each other, as by rotate_half", _rotated),
    ("softmax", "a softmax", _one("softmax")),
    ("gelu", "a GELU", _one("gelu")),
)


def ops_that_fit(module, *inputs):
    """Rows of the ops whose pattern a forward pass of the module contains, the first pattern first."""
    calls, taken, rows = calls_of(module, *inputs), set(), []
    for op, pattern, match in PATTERNS:
        places = []
        for call in calls:
            matched = match(call)
            if matched and all(matched) and not taken & {id(c) for c in matched}:
                taken |= {id(c) for c in matched}
                places.append(call.where)
        if places:
            rows.append(
                {
                    "op": op,
                    "you have": pattern,
                    "times": len(places),
                    "first in": places[0] or "the module",
                }
            )
    return rows


_DULL = set(
    "_unsafe_view view transpose _to_copy t clone permute expand unsqueeze mm addmm bmm slice unbind "
    "split_with_sizes native_layer_norm_backward".split()
)
_BUFFER = r"\b(?:buf|arg|primals_|tangents_)\d+(?:_\d+)?\b"


def left_by_the_compiler(module, *inputs):
    """Rows of the library calls whose result a kernel of Inductor's then reads from memory."""
    with as_on_gpu("scaled_dot_product_attention"):
        code = inductor.output_code(module, *inputs)
    lines, made, pairs = iter(code.splitlines()), {}, collections.Counter()
    for info in inductor.kernels(code):
        if info.graph == "backward":
            break
        launch = f"{info.name}(" if info.kind == "extern" else f"{info.name}.run("
        for line in lines:
            if launch in line:
                break
            # what stands between launches: other names for a result
            if other := re.match(rf"\s*({_BUFFER}) = (?:reinterpret_tensor\()?({_BUFFER})", line):
                made[other[1]] = made.get(other[2])
        if info.kind == "extern":
            if out := re.search(rf"out=({_BUFFER})|^\s*({_BUFFER}) =", line):
                made[out[1] or out[2]] = info.name.removesuffix(".default").split(".")[-1]
            continue
        names = re.findall(_BUFFER, line)
        ops = [n for op in info.fused_ops if (n := op.split(".")[-1]) not in _DULL]
        for library in {made[n] for n in names if made.get(n)}:
            pairs[library, ", ".join(ops) or "a copy"] += 1
        made |= dict.fromkeys(names)  # read already, or written by this kernel
    return [
        {"library call": library, "through memory to": ops, "times": times}
        for (library, ops), times in pairs.items()
    ]
