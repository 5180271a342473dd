"""The one description of each op: tests, mutants, benchmarks, ladders and the README's picture follow from it.

One entry per file of lib/ops, under the file's name. An op with keyword arguments has configurations:
`find("gelu").configured("erf")` is the op with the arguments of that label bound to everything it calls.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable

from lib.measure.matmul_ladder import RUNGS
from lib.ops import (
    add_relu,
    add_rms_norm,
    attention,
    bias_gelu_dropout_add,
    embedding_hash,
    fused_mlp,
    gelu,
    interaction,
    layer_norm,
    linear_cross_entropy,
    linear_glu,
    lora_epilogue,
    lora_linear,
    matmul,
    quantized_linear,
    rope,
    softmax,
)
from lib.ops._host import RowTiles

import torch


@dataclasses.dataclass(frozen=True)
class Op:
    """One op: its definition, its versions, what it takes, and the numbers that timing needs.

    tensors: {"x": "... N", "bias": "N"}, sizes by letters; `...` are any leading sizes. Words may follow:
    frozen (no gradient), weight (divided by the root of its last size, so that products with it stay near 1),
    int64 or int32 (integers of either sign, and no gradient).
    letters: the sizes that make a shape of this op, in order, as "M K N"; `...` is then (M,). "..." alone: any.
    make: inputs(op, shape, dtype, device, draw), where tensors are no random numbers or share memory; arguments
    that depend on the shape and are no tensors follow them.
    bytes_moved(shape, itemsize, gradients) -> the fewest bytes any version must read and write.
    flops(shape, gradients) -> floating-point operations.
    configurations: label -> keyword arguments of eager, of every version and of the registered ops; the first
    is what benchmarks and ladders mean by the op's name. bytes_moved and flops get them too.
    arguments: those of the configuration that is bound; registered ops are not, and get them in a call.
    op_arguments: (arguments, device) -> those of the registered ops, where they differ: a seed in a tensor.
    variants: label -> (tensors, arguments) of other ways to call it, which tests alone use.
    version_arguments: those that versions alone take, not eager and the registered ops: how, not what.
    plans: label -> (a plan that the triton version takes as plan=, shapes at which it works): the ways to
    launch the op that small shapes do not choose by themselves.
    in_place: versions that write their results into their first n_written arguments; whole_rows: which they
    take only with the last dimension side by side.
    mutating: registered ops that do so and have no gradient.
    random: arguments that fix what is random, for checks; benchmarks leave them out.
    without_zeros: the definition where the eager one multiplies what is not asked for by 0, as 0·inf is NaN, or
    where its own sums overflow.
    not_compiled: functions of the definition that checks keep out of torch.compile, as it would take a minute.
    checked_elements: benchmarks check shapes larger than this with fewer rows; None: whole.
    slack: check_against_float64's, where the method itself loses digits that eager has.
    cancelling: tensors whose rows, if all are equal, make terms of a gradient cancel. In 16 bits what rounding
    leaves of them is no error of the op, so tests draw no such rows.
    checked: shape -> the one that benchmarks check in its place, where fewer rows are not enough.
    odd_shapes: small ones that hurt; empty_shapes: of no elements, or of sums over none.
    host_shape: so small that a call costs what the host does.
    traffic_shape: at which each large tensor is read or written once, of ops that do so; else None.
    looked_up: the share of that traffic that may be asked for twice, as elements that are looked up alone.
    roundings: by so many of them results may differ from those of without_zeros.
    """

    name: str
    title: str
    eager: Callable
    versions: dict
    registered: tuple
    tensors: dict
    bytes_moved: Callable
    flops: Callable
    bench_shapes: tuple
    small_shape: tuple
    sources: tuple
    letters: str = "... N"
    make: Callable | None = None
    dtypes: tuple = (torch.float32, torch.bfloat16, torch.float16)
    configurations: dict = dataclasses.field(default_factory=lambda: {"": {}})
    variants: dict = dataclasses.field(default_factory=dict)
    version_arguments: tuple = ()
    plans: dict = dataclasses.field(default_factory=dict)
    in_place: dict = dataclasses.field(default_factory=dict)
    n_written: int = 1
    whole_rows: bool = False
    mutating: tuple = ()
    arguments: dict = dataclasses.field(default_factory=dict)
    op_arguments: Callable = lambda arguments, device: arguments
    random: tuple = ()
    without_zeros: Callable | None = None
    not_compiled: tuple = ()
    checked_elements: int | None = None
    slack: float = 1e-6
    cancelling: tuple = ()
    checked: Callable | None = None
    odd_shapes: tuple = (
        (1, 1), (5, 7), (17, 33), (1027, 3), (64, 128), (123, 781), (257, 4096)
    )  # fmt: skip
    empty_shapes: tuple = ((0, 5), (5, 0))
    host_shape: tuple = (64, 64)
    traffic_shape: tuple | None = None
    looked_up: float = 0.0
    roundings: int = 64

    def inputs(self, shape, dtype, device, seed=0, draw=None):
        """The op's tensors for one shape, leaves that require grad unless frozen or integers.

        draw(size) -> a tensor of that size; default: normal numbers from a generator seeded with `seed`.
        """
        if draw is None:
            generator = torch.Generator(device=device).manual_seed(seed)
            draw = functools.partial(torch.randn, dtype=dtype, device=device, generator=generator)
        if self.make is not None:
            return self.make(self, shape, dtype, device, draw)
        sizes = self.sizes(shape)
        return tuple(_tensor(spec, sizes, device, draw) for spec in self.tensors.values())

    def checked_inputs(self, shape, dtype, device):
        """The tensors to check a version on, of few digits where a relu would make a lottery of it.

        In 16 bits, and among millions of sums, rounding decides which sums near 0 are positive; a sign that
        flips is an error of a whole gradient, and each version has its own.
        """
        inputs = self.inputs(shape, dtype, device)
        relu = self.arguments.get("activation") == "relu" or "relu" in self.title
        lottery = dtype.itemsize == 2 or self.flops(shape, False) > 1e9
        return tuple(map(coarse, inputs)) if relu and self.has_products and lottery else inputs

    def checked_shape(self, shape):
        """The shape to check on before `shape` is timed."""
        if self.checked:
            return self.checked(tuple(shape))
        return fewer_rows(shape, self.checked_elements)

    @property
    def has_products(self):
        """Whether it adds up products over K."""
        return "K" in self.letters.split()

    def sizes(self, shape):
        """{letter: size} of a shape; '...' is a tuple."""
        letters = self.letters.split()
        if letters[0] == "...":
            letters, n_leading = letters[1:], len(shape) - len(letters) + 1
            return {"...": tuple(shape[:n_leading]), **dict(zip(letters, shape[n_leading:]))}
        return {"...": tuple(shape[:1]), **dict(zip(letters, shape))}

    def unfixed(self):
        """The op with all configurations but for the arguments that fix what is random: the one to time."""
        labels = self.configurations.items()
        configurations = {
            label: {k: v for k, v in arguments.items() if k not in self.random}
            for label, arguments in labels
        }
        return dataclasses.replace(self, configurations=configurations)

    def configured(self, label=None):
        """The op with one configuration bound, the first unless `label` names another; ValueError lists them.

        Idempotent.
        """
        label = next(iter(self.configurations)) if label is None else label
        if label not in self.configurations:
            labels = ", ".join(map(repr, self.configurations))
            raise ValueError(f"{self.name} has no configuration {label!r}; there are: {labels}")
        arguments = self.configurations[label]
        if not arguments:
            return self
        shared = {k: v for k, v in arguments.items() if k not in self.version_arguments}
        return dataclasses.replace(
            self,
            title=f"{self.title}, {label}" if label else self.title,
            eager=bind(self.eager, shared),
            versions={name: bind(version, arguments) for name, version in self.versions.items()},
            in_place={name: bind(version, arguments) for name, version in self.in_place.items()},
            bytes_moved=bind(self.bytes_moved, shared),
            flops=bind(self.flops, shared),
            without_zeros=self.without_zeros and bind(self.without_zeros, shared),
            configurations={label: {}},
            arguments=shared,
        )

    def all_configured(self):
        """{label: the op with that configuration, or that variant, bound}."""
        ops = {label: self.configured(label) for label in self.configurations}
        for label, (tensors, arguments) in self.variants.items():
            # a CUDA kernel does what its op does first of all, and no more
            versions = {n: v for n, v in self.versions.items() if n != "cuda"}
            variant = dataclasses.replace(
                self, tensors=tensors, versions=versions, configurations={label: arguments}
            ).configured()
            if [*tensors][: len(self.tensors)] != [*self.tensors][: len(tensors)]:
                # one that is left out stands before others
                named = functools.partial(by_name, names=(*tensors,))
                variant = dataclasses.replace(
                    variant,
                    eager=named(variant.eager),
                    versions={n: named(v) for n, v in variant.versions.items()},
                    in_place={n: named(v) for n, v in variant.in_place.items()},
                    without_zeros=variant.without_zeros and named(variant.without_zeros),
                )
            ops[label] = variant
        return ops

    def planned(self, label):
        """The op with its triton version bound to one of its plans, at the shapes of that plan."""
        plan, shapes = self.plans[label]
        bound = bind(self.versions["triton"], {"plan": plan})
        return dataclasses.replace(
            self, versions={"triton": bound}, in_place={}, odd_shapes=tuple(shapes), plans={}
        )

    def all_versions(self):
        """{name: version} with the in-place ones among them, each working on copies of what it writes."""
        how = (self.n_written, self.whole_rows)
        copying = {name: on_a_copy(version, *how) for name, version in self.in_place.items()}
        return self.versions | copying


def fewer_rows(shape, most_elements):
    """`shape` with its first size cut until it has at most so many elements; None: as it is."""
    shape = tuple(shape)
    if most_elements is None or _numel(shape) <= most_elements:
        return shape
    return (max(1, most_elements // _numel(shape[1:])), *shape[1:])


def coarse(t):
    """t in three numbers, 0 and a power of 2 of either sign: 16 bits hold most sums of products of them."""
    if not t.is_floating_point():
        return t
    size = t.detach().float().square().mean().sqrt().item() if t.numel() else 1.0
    step = 2.0 ** round(math.log2(max(size, 1e-6)))
    return ((t.detach() / step).round().clamp(-1, 1) * step).requires_grad_(t.requires_grad)


def bind(function, arguments):
    """`function` with keyword arguments bound and its name kept: the same object for the same arguments."""
    return _bound(function, tuple(arguments.items()))


@functools.cache
def _bound(function, arguments):
    bound = functools.partial(function, **dict(arguments))
    bound.__name__ = getattr(function, "__name__", "function")
    return bound


@functools.cache
def by_name(function, names):
    """`function` of tensors in this order, whatever stands between them among its parameters."""

    def version(*inputs, **arguments):
        return function(**dict(zip(names, inputs, strict=True)), **arguments)

    version.__name__ = function.__name__
    return version


@functools.cache
def on_a_copy(in_place, n_written=1, whole_rows=False):
    """An in-place version as one that leaves its inputs alone: it writes into copies with their layout."""

    def version(*inputs, **arguments):
        copies = [
            _copy_of(t, whole_rows) if isinstance(t, torch.Tensor) else t
            for t in inputs[:n_written]
        ]
        return in_place(*copies, *inputs[n_written:], **arguments)

    version.__name__ = in_place.__name__
    return version


def _copy_of(x, whole_rows):
    if whole_rows and x.dim() and x.stride(-1) != 1:
        return x.clone(memory_format=torch.contiguous_format)
    if any(step == 0 and size > 1 for step, size in zip(x.stride(), x.shape)):
        return x.clone()  # expanded: written once for each of its elements, it would be wrong
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device).copy_(x)


_INTEGERS = {"int64": torch.int64, "int32": torch.int32}


def _tensor(spec, sizes, device, draw):
    """One tensor of an op, by its spec: '2H K weight'."""
    words, shape = spec.split(), []
    for word in words:
        if word == "...":
            shape += sizes["..."]
        elif word not in ("frozen", "weight", *_INTEGERS):
            letter = word.lstrip("0123456789")
            shape.append(int(word.removesuffix(letter) or 1) * sizes[letter])
    if words[-1] in _INTEGERS:
        return _integers(shape, _INTEGERS[words[-1]], device)
    t = draw(tuple(shape))
    if "weight" in words:
        t = t / max(1, shape[-1]) ** 0.5
    return t.detach().requires_grad_("frozen" not in words)


def _integers(shape, dtype, device):
    """Multiples of 2**64 / golden ratio, wrapped, and cut to a quarter of the dtype's range.

    No generator is asked, which a fake GPU lacks; remainders of them are as good as random.
    """
    wrapped = torch.arange(_numel(shape), device=device) * (0x9E3779B97F4A7C15 - 2**64)
    return (wrapped >> (66 - 8 * dtype.itemsize)).to(dtype).view(shape)


def _numel(shape):
    return torch.Size(shape).numel()


ADD_RELU = Op(
    name="add_relu",
    title="relu(x + bias)",
    eager=add_relu.add_relu_eager,
    versions={"triton": add_relu.add_relu_triton, "cuda": add_relu.add_relu_cuda},
    registered=(add_relu.add_relu_op,),
    tensors={"x": "... N", "bias": "N"},
    # forward: read x, write y; backward: read dy and y, write dx
    bytes_moved=lambda shape, itemsize, gradients: (
        (5 if gradients else 2) * _numel(shape) * itemsize
    ),
    flops=lambda shape, gradients: (4 if gradients else 2) * _numel(shape),
    bench_shapes=((65536, 4096), (8192, 32768), (1048576, 64), (524288, 781)),
    traffic_shape=(96, 640),
    small_shape=(65, 781),
    plans={
        "two strips of several tiles": (
            add_relu.Plan(16, 8, (16, 8, 2)),
            [(70, 11), (64, 16), (1030, 11)],
        )
    },
    sources=("lib/ops/add_relu.py", "lib/ops/add_relu.cu"),
)

GELU = Op(
    name="gelu",
    title="gelu(x)",
    eager=gelu.gelu_eager,
    versions={"triton": gelu.gelu_triton, "cuda": gelu.gelu_cuda},
    registered=(gelu.gelu_op,),
    tensors={"x": "..."},
    letters="...",
    configurations={"tanh": {"approximate": "tanh"}, "erf": {"approximate": "none"}},
    # forward: read x, write y; backward: read dy and x, write dx
    bytes_moved=lambda shape, itemsize, gradients, approximate: (
        (5 if gradients else 2) * _numel(shape) * itemsize
    ),
    # an exponential, an erf and a quotient count as one each; the backward pass comes to twice as many
    flops=lambda shape, gradients, approximate: (24 if gradients else 8) * _numel(shape),
    bench_shapes=((65536, 4096), (8192, 32768), (524288, 781)),
    traffic_shape=(99, 641),
    small_shape=(65, 781),
    plans={"many tiles": (gelu.Plan(4, 8), [(1, 7), (5, 9), (8, 24), (21, 35)])},
    sources=("lib/ops/gelu.py", "lib/ops/gelu.cu"),
)

# For each activation: tensors of x's size that the backward pass has to read or write. dy in, dx and ddelta
# out, and y (relu, sigmoid) or x and delta again (others; in place z, twice). For identity dx is dy.
_LORA_BACKWARD = {"identity": 2, "relu": 4, "sigmoid": 4, "gelu": 5, "gelu_tanh": 5, "silu": 5}
_LORA_SCALE = 0.5
_LORA_SUM = {"x": "... N", "delta": "... N", "bias": "N"}

LORA_EPILOGUE = Op(
    name="lora_epilogue",
    title="act(x + scale·delta + bias)",
    eager=lora_epilogue.lora_epilogue_eager,
    versions={
        "triton": lora_epilogue.lora_epilogue_triton,
        "cuda": lora_epilogue.lora_epilogue_cuda,
    },
    in_place={"triton_": lora_epilogue.lora_epilogue_triton_},
    registered=(lora_epilogue.lora_epilogue_op,),
    mutating=(lora_epilogue.lora_epilogue_op_,),
    tensors=_LORA_SUM,
    configurations={
        activation: {"scale": _LORA_SCALE, "activation": activation}
        for activation in ("relu", "gelu_tanh", "silu", "sigmoid", "identity")
    },
    # forward: read x and delta, write y
    bytes_moved=lambda shape, itemsize, gradients, scale, activation: (
        (3 + (_LORA_BACKWARD[activation] if gradients else 0)) * _numel(shape) * itemsize
    ),
    flops=lambda shape, gradients, scale, activation: (7 if gradients else 4) * _numel(shape),
    bench_shapes=((65536, 4096), (8192, 32768), (524288, 781)),
    traffic_shape=(96, 640),
    small_shape=(65, 781),
    variants={
        "scale 1/3": (_LORA_SUM, {"scale": 1 / 3, "activation": "silu"}),
        "gelu": (_LORA_SUM, {"scale": _LORA_SCALE, "activation": "gelu"}),
        "no bias": ({"x": "... N", "delta": "... N"}, {"scale": 0.3, "activation": "silu"}),
    },
    plans={
        "two strips of several tiles": (
            lora_epilogue.Plan(16, 8, (16, 8, 2)),
            [(70, 11), (64, 16), (1030, 11)],
        )
    },  # fmt: skip
    sources=("lib/ops/lora_epilogue.py", "lib/ops/lora_epilogue.cu"),
)

# reads its whole row if another part is not there at the first look
_IMPATIENT = softmax.Plan("parts", 1, 16, 3, 4, patience=0)
SOFTMAX = Op(
    name="softmax",
    title="softmax(x)",
    eager=softmax.softmax_eager,
    versions={"triton": softmax.softmax_triton, "cuda": softmax.softmax_cuda},
    registered=(softmax.softmax_op,),
    tensors={"x": "... N"},
    variants={
        "causal, scale 0.3": ({"x": "... N"}, {"scale": 0.3, "causal": True}),
        "scale -2": ({"x": "... N"}, {"scale": -2.0}),
    },
    # forward: read x, write y; backward: read dy and y, write dx
    bytes_moved=lambda shape, itemsize, gradients, **_: (
        (5 if gradients else 2) * _numel(shape) * itemsize
    ),
    # an exponential and a quotient count as one each
    flops=lambda shape, gradients, **_: (9 if gradients else 5) * _numel(shape),
    bench_shapes=((131072, 1024), (16384, 8192), (4096, 32768), (1024, 131072), (65536, 781)),
    traffic_shape=(24, 784),  # of rows that begin anywhere, pieces at the ends are read twice
    small_shape=(65, 781),
    odd_shapes=(
        (1, 1),
        (5, 7),
        (17, 33),
        (1027, 3),
        (64, 128),
        (123, 781),
        (35, 187),
        (67, 4099),
        (9, 32761),
        (5, 70001),
    ),
    # longer rows are launched in these ways, with larger tiles; these are for rows of up to 113
    plans={
        "several rows": (
            softmax.Plan("rows", 4, 32, 4, 4, 8, backward=softmax.Plan("rows", 2, 16, 8, 4, 4)),
            [(1, 1), (7, 40), (8, 97), (9, 100)],
        ),
        "parts": (
            softmax.Plan("parts", 1, 16, 2, 4, backward=softmax.Plan("parts", 1, 32, 1, 4)),
            [(1, 1), (3, 32), (9, 75), (2, 112)],
        ),
        "parts without patience": (
            softmax.Plan("parts", 1, 32, 1, 4, patience=0, backward=_IMPATIENT),
            [(3, 32), (9, 75)],
        ),
        "eager": (
            softmax.Plan("eager", 1, 1, 1, 4, backward=softmax.Plan("eager", 1, 1, 1, 4)),
            [(9, 75)],
        ),
    },
    sources=("lib/ops/softmax.py", "lib/ops/softmax.cu"),
)

BIAS_GELU_DROPOUT_ADD = Op(
    name="bias_gelu_dropout_add",
    title="dropout(gelu(x + bias)) + residual",
    eager=bias_gelu_dropout_add.bias_gelu_dropout_add_eager,
    versions={"triton": bias_gelu_dropout_add.bias_gelu_dropout_add_triton},
    registered=(bias_gelu_dropout_add.bias_gelu_dropout_add_op,),
    op_arguments=lambda arguments, device: (
        arguments | {"seed": torch.tensor([arguments["seed"]], device=device)}
    ),
    tensors={"x": "... N", "bias": "N", "residual": "... N"},
    configurations={"p = 0.1": {"p": 0.1, "seed": 2**40 + 5}},
    variants={
        f"p = {p}": ({"x": "... N", "bias": "N", "residual": "... N"}, {"p": p, "seed": 2**62 + 5})
        for p in (0.0, 0.999, 1.0)
    }
    | {
        "no bias": (
            {"x": "... N", "residual": "... N"},
            {"bias": None, "p": 0.1, "seed": 2**62 + 5},
        )
    },
    plans={
        "two strips of several tiles": (
            bias_gelu_dropout_add.Plan(16, 8, (16, 8, 2)),
            [(70, 11), (64, 16), (1030, 11)],
        )
    },
    random=("seed",),
    not_compiled=(bias_gelu_dropout_add.keep_mask,),
    checked_elements=2
    ** 24,  # the definition draws its mask in int64, a minute for the largest shape
    # forward: read x and residual, write y; backward: read dy and x, write dx
    bytes_moved=lambda shape, itemsize, gradients, **_: (
        (6 if gradients else 3) * _numel(shape) * itemsize
    ),
    flops=lambda shape, gradients, **_: (30 if gradients else 12) * _numel(shape),
    bench_shapes=((16384, 4096), (32768, 8192), (262144, 781)),
    traffic_shape=(97, 643),
    small_shape=(65, 781),
    sources=("lib/ops/bias_gelu_dropout_add.py",),
)

_NORMED = {"x": "... N", "residual": "... N", "weight": "N"}
_NORMED_ALONE = {"x": "... N", "weight": "N"}

ADD_RMS_NORM = Op(
    name="add_rms_norm",
    title="rms_norm(x + residual) · weight, and the sum",
    eager=add_rms_norm.add_rms_norm_eager,
    versions={"triton": add_rms_norm.add_rms_norm_triton},
    registered=(add_rms_norm.add_rms_norm_op,),
    tensors=_NORMED,
    # forward: read x and residual, write h and y; backward: read dy, dh and h, write dx; without residual and h
    bytes_moved=lambda shape, itemsize, gradients, **how: (
        ((5, 2) if "residual" in how else (8, 4))[not gradients] * _numel(shape) * itemsize
    ),
    flops=lambda shape, gradients, **_: (18 if gradients else 6) * _numel(shape),
    variants={
        "eps 0.5": (_NORMED, {"eps": 0.5}),
        "eps 0": (_NORMED, {"eps": 0.0}),
        "1 + weight": (_NORMED, {"plus_one": True}),
        "alone": (_NORMED_ALONE, {"residual": None}),
    },
    bench_shapes=((16384, 4096), (65536, 1024), (8192, 8192), (4096, 16384), (131072, 781)),
    traffic_shape=(24, 640),
    looked_up=0.01,  # the first number of each row
    roundings=1024,  # in a row of equal numbers their rounding is all that the norm has
    small_shape=(65, 781),
    # backward eight warps hold a row from 5,121 columns on, and rows are read twice from 16,385 on
    odd_shapes=(
        (1, 1),
        (5, 7),
        (17, 33),
        (1027, 3),
        (64, 128),
        (35, 187),
        (123, 781),
        (257, 4096),
        (2, 8193),
        (3, 16385),
    ),  # fmt: skip
    plans={
        "two strips of several rows": (
            add_rms_norm.Plan(
                RowTiles(2, 16, 3, 1, 4), add_rms_norm.Backward(RowTiles(4, 16, 3, 1, 4), 2)
            ),
            [(1, 1), (9, 11), (64, 16), (33, 40)],
        ),
        "rows read twice": (
            add_rms_norm.Plan(
                RowTiles(1, 128, 1, 1, 8),
                add_rms_norm.Backward(RowTiles(4, 64, 1, 1, 8), 2, held=False),
            ),
            [(1, 1), (9, 119), (64, 256), (33, 181)],
        ),
    },
    sources=("lib/ops/add_rms_norm.py",),
)


_LAYER_NORMED = _NORMED | {"bias": "N"}


def _layer_norm_from_the_first(x, residual=None, weight=None, bias=None, eps=1e-5):
    """The definition of distances from a row's first number: in a row of the largest float, eager overflows."""
    h = x if residual is None else x + residual
    y = layer_norm.layer_norm_eager(h - h[..., :1], None, weight, bias, eps)
    return y if residual is None else (y, h)


LAYER_NORM = Op(
    name="layer_norm",
    title="layer_norm(x + residual) · weight + bias, and the sum",
    eager=layer_norm.layer_norm_eager,
    versions={"triton": layer_norm.layer_norm_triton},
    registered=(layer_norm.layer_norm_op,),
    tensors=_LAYER_NORMED,
    without_zeros=_layer_norm_from_the_first,
    # as add_rms_norm: what is kept of each row, mean and root, is 8 bytes
    bytes_moved=ADD_RMS_NORM.bytes_moved,
    flops=lambda shape, gradients, **_: (26 if gradients else 9) * _numel(shape),
    variants={
        "eps 0.5": (_LAYER_NORMED, {"eps": 0.5}),
        "eps 0": (_LAYER_NORMED, {"eps": 0.0}),
        "no bias": (_NORMED, {}),
        "no weight": ({"x": "... N", "residual": "... N", "bias": "N"}, {"weight": None}),
        "alone": ({"x": "... N", "weight": "N", "bias": "N"}, {"residual": None}),
        "plain": ({"x": "... N"}, {"residual": None}),
    },
    bench_shapes=ADD_RMS_NORM.bench_shapes,
    traffic_shape=(24, 640),
    looked_up=0.01,  # the first number of each row
    roundings=1024,  # in a row of equal numbers their rounding is all that the norm has
    small_shape=(65, 781),
    # backward rows are read twice from 8,185 columns on that begin off 16 bytes, else from 16,385 on
    odd_shapes=ADD_RMS_NORM.odd_shapes,
    plans={
        "two strips of several rows": (
            layer_norm.Plan(
                RowTiles(2, 16, 3, 1, 4), layer_norm.Backward(RowTiles(4, 16, 3, 1, 4), 2)
            ),
            [(1, 1), (9, 11), (64, 16), (33, 40)],
        ),
        "rows read twice": (
            layer_norm.Plan(
                RowTiles(1, 128, 1, 1, 8),
                layer_norm.Backward(RowTiles(4, 64, 1, 1, 8), 2, held=False),
            ),
            [(1, 1), (9, 119), (64, 256), (33, 181)],
        ),
    },
    sources=("lib/ops/layer_norm.py",),
)


def _pairs_one_by_one(dense, embeddings):
    vectors = torch.cat([dense[:, None], embeddings], dim=1)
    first, second = torch.triu_indices(vectors.shape[1], vectors.shape[1], 1, device=dense.device)
    return torch.cat([dense, (vectors[:, first] * vectors[:, second]).sum(2)], dim=1)


INTERACTION = Op(
    name="interaction",
    title="dot products of all pairs of vectors",
    eager=interaction.interaction_eager,
    versions={"triton": interaction.interaction_triton},
    registered=(interaction.interaction_op,),
    tensors={"dense": "B D", "embeddings": "B T D"},
    letters="B T D",
    # forward: read both inputs, write y; backward: read dy and both, write both gradients
    bytes_moved=lambda shape, itemsize, gradients: (
        _interaction_elements(shape, 3 if gradients else 1, 2 if gradients else 1) * itemsize
    ),
    flops=lambda shape, gradients: (
        (3 if gradients else 1) * shape[0] * shape[1] * (shape[1] + 1) * shape[2]
    ),
    bench_shapes=((65536, 26, 16), (2048, 26, 16), (16384, 26, 128), (16384, 7, 64)),
    small_shape=(65, 26, 16),
    odd_shapes=(
        (1, 1, 1), (5, 2, 3), (33, 26, 16), (17, 7, 33), (9, 63, 5), (130, 3, 128), (64, 15, 64)
    ),
    empty_shapes=((0, 3, 4),),
    host_shape=(8, 4, 4),
    plans={
        "two samples at a time": (
            interaction.Plan(1, 2, 2), [(1, 1, 1), (7, 3, 5), (11, 26, 16), (9, 3, 40)]
        ),
        "eight, and none read ahead": (
            interaction.Plan(1, 8, 8, False), [(1, 1, 1), (7, 3, 5), (35, 26, 16), (16, 3, 40)]
        ),
    },
    without_zeros=_pairs_one_by_one,
    sources=("lib/ops/interaction.py",),
)  # fmt: skip


def _interaction_elements(shape, times_in, times_out):
    """Elements of both inputs and of y, each as often as it is read or written."""
    n_samples, n_tables, dim = shape
    n_in, n_out = (n_tables + 1) * dim, dim + n_tables * (n_tables + 1) // 2
    return n_samples * (times_in * n_in + times_out * n_out)


_LOOKUPS = {"ids": "B T int64", "weight": "R D"}


def _ids_and_tables(op, shape, dtype, device, draw):
    """ids, the tables' weight, and how many rows each has: R in all, the last one with what is left over."""
    n_batch, n_tables, n_rows, dim = shape
    n_rows = max(n_rows, n_tables)  # one each at least
    sizes = op.sizes((n_batch, n_tables, n_rows, dim))
    tensors = [_tensor(spec, sizes, device, draw) for spec in op.tensors.values()]
    num_rows = [n_rows // n_tables] * n_tables
    num_rows[-1] += n_rows % n_tables
    return *tensors, tuple(num_rows)


def _lookup_bytes(shape, itemsize, gradients, **_):
    """Forward: read ids and each row that is asked for, write y. Backward: read ids and dy, write dweight.

    A row that is asked for again may come from the L2 cache: as if each came from memory once.
    """
    n_batch, n_tables, n_rows, dim = shape
    n_lookups = n_batch * n_tables
    n_bytes = 8 * n_lookups + (min(n_lookups, n_rows) + n_lookups) * dim * itemsize
    return n_bytes + gradients * (8 * n_lookups + (n_lookups + n_rows) * dim * itemsize)


EMBEDDING_HASH = Op(
    name="embedding_hash",
    title="rows of all tables for hashed tokens",
    eager=embedding_hash.embedding_hash_eager,
    versions={"triton": embedding_hash.embedding_hash_triton},
    registered=(embedding_hash.embedding_hash_op,),
    tensors=_LOOKUPS,
    letters="B T R D",
    make=_ids_and_tables,
    configurations={"": {}, "atomics": {"deterministic": False}},
    variants={"int32": ({"ids": "B T int32", "weight": "R D"}, {})},
    version_arguments=("deterministic",),
    bytes_moved=_lookup_bytes,
    # the sums of dweight; a copy has none
    flops=lambda shape, gradients, **_: gradients * shape[0] * shape[1] * shape[3],
    bench_shapes=((65536, 26, 2_600_000, 16), (2048, 26, 2_600_000, 16), (65536, 26, 2_600_000, 128)),
    small_shape=(65, 26, 333, 16),
    odd_shapes=(
        (1, 1, 1, 1), (5, 2, 9, 3), (33, 26, 77, 16), (17, 7, 13, 33), (130, 3, 100, 128), (9, 63, 500, 5),
        (6, 2, 7, 1030),
    ),
    # not of no columns: on a GPU PyTorch's own backward reads where nothing is
    empty_shapes=((0, 3, 7, 4),),
    host_shape=(8, 4, 16, 4),
    plans={
        "several programs, columns in parts": (
            embedding_hash.Plan(4, 8, 1), [(1, 1, 1, 1), (7, 3, 20, 5), (11, 26, 60, 16), (5, 2, 9, 20)]
        )
    },
    sources=("lib/ops/embedding_hash.py",),
)  # fmt: skip


def _packed_qkv(op, shape, dtype, device, draw):
    """q, k as views of one packed tensor, as a model has them, and cos, sin; with R/2, half of D is rotated."""
    n_batch, n_seq, n_q_heads, n_k_heads, head_dim = shape
    bshd = op.tensors["q"] == "B S Hq D"
    n_heads = n_q_heads + 2 * n_k_heads
    sizes = (n_batch, n_seq, n_heads) if bshd else (n_batch, n_heads, n_seq)
    heads = [n_q_heads, n_k_heads, n_k_heads]
    q, k, _ = draw((*sizes, head_dim)).split(heads, dim=2 if bshd else 1)
    rotary_dim = head_dim // 2 * 2 if "R/2" not in op.tensors["cos"] else max(2, head_dim // 4 * 2)
    n_positions = n_seq + op.arguments.get("position_offset", 0)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    tables = rope.rope_tables(n_positions, rotary_dim, device=device, dtype=wide)
    return q.requires_grad_(), k.requires_grad_(), *tables


def _rotated_elements(shape):
    n_batch, n_seq, n_q_heads, n_k_heads, head_dim = shape
    return n_batch * n_seq * (n_q_heads + n_k_heads) * head_dim


_ROPE_TABLES = {"cos": "S R frozen", "sin": "S R frozen"}

ROPE = Op(
    name="rope",
    title="rotary embedding of q and k",
    eager=rope.rope_eager,
    versions={"triton": rope.rope_triton},
    registered=(rope.rope_op,),
    tensors={"q": "B S Hq D", "k": "B S Hk D", **_ROPE_TABLES},
    letters="B S Hq Hk D",
    make=_packed_qkv,
    # spelled out, as the registered ops have no defaults
    configurations={"": {"position_offset": 0, "interleaved": False, "layout": "bshd"}},
    variants={
        "interleaved, from position 3": (
            {"q": "B S Hq D", "k": "B S Hk D", **_ROPE_TABLES},
            {"position_offset": 3, "interleaved": True, "layout": "bshd"},
        ),
        "bhsd, a part rotated": (
            {"q": "B Hq S D", "k": "B Hk S D", "cos": "S R/2 frozen", "sin": "S R/2 frozen"},
            {"position_offset": 0, "interleaved": False, "layout": "bhsd"},
        ),
    },
    plans={
        "one head of one token": (rope.Plan(1, 1), [(1, 3, 2, 1, 6)]),
        "more heads than there are": (rope.Plan(2, 8), [(2, 5, 3, 9, 10)]),
    },
    in_place={"triton_": rope.rope_triton_},
    n_written=2,
    whole_rows=True,
    mutating=(rope.rope_op_,),
    empty_shapes=((0, 5, 2, 1, 6), (2, 0, 2, 1, 6), (2, 5, 2, 0, 6), (2, 5, 0, 2, 6)),
    host_shape=(1, 16, 4, 2, 64),
    odd_shapes=(
        (1, 1, 1, 1, 2),
        (2, 3, 3, 2, 6),
        (2, 9, 3, 2, 10),
        (3, 43, 2, 1, 8),
        (2, 17, 4, 2, 64),
        (3, 123, 5, 5, 80),
    ),
    # each way: read q and k, write both
    bytes_moved=lambda shape, itemsize, gradients, **_: (
        (4 if gradients else 2) * _rotated_elements(shape) * itemsize
    ),
    flops=lambda shape, gradients, **_: (6 if gradients else 3) * _rotated_elements(shape),
    bench_shapes=((4, 4096, 32, 8, 128), (1, 16384, 64, 8, 128)),  # B, S, Hq, Hk, D
    traffic_shape=(2, 16, 8, 2, 64),
    small_shape=(2, 17, 4, 2, 64),
    sources=("lib/ops/rope.py",),
)


_ODD_PRODUCTS = ((1, 1, 1), (5, 7, 3), (17, 33, 21), (130, 72, 96), (257, 333, 781))

_MATMUL_PLANS = {
    # two groups of rows of tiles, the second one of a single row
    "tiles": (matmul.Plan(matmul.Tile(16, 16, 16, 2, 3)), [(141, 16, 20)]),
    "naive": (
        matmul.Plan(matmul.Tile(16, 16, 16, 4, 1), "naive", group=1),
        [(17, 33, 21), (34, 20, 40)],
    ),
    "tiles stored in halves": (
        matmul.Plan(matmul.Tile(16, 256, 32, 8, 2)),
        [(17, 8, 150)],
    ),
    "split-K in 3 parts": (
        matmul.Plan(matmul.Tile(16, 16, 16, 2, 3), n_parts=3),
        [(17, 33, 21), (20, 150, 24)],
    ),
    "cublas": (matmul.Plan(matmul.Tile(16, 16, 16, 2, 3), "cublas"), [(17, 33, 21)]),
    "aligned copies": (
        matmul.Plan(matmul.Tile(32, 32, 32, 4, 3), copies=True),
        [(35, 38, 37)],
    ),
    # more tiles than programs of the interpreter; a, b and y as TMA takes them, and not so
    "tma": (
        matmul.Plan(matmul.Tile(64, 64, 32, 4, 3), "tma", copies=True),
        [(144, 72, 200), (130, 70, 150)],
    ),
    "tma, stored in halves": (
        matmul.Plan(matmul.Tile(64, 256, 32, 8, 3), "tma", copies=True),
        [(72, 72, 152), (70, 40, 150)],
    ),
    "two strips of several tiles of dz": (
        matmul.Plan(matmul.Tile(32, 32, 32, 4, 3), backward=(8, 32, 2)),
        [(70, 24, 40)],
    ),
}

MATMUL = Op(
    name="matmul",
    title="a b",
    eager=matmul.matmul_eager,
    versions={
        **RUNGS,
        "triton": matmul.matmul_triton,
        "cuda": matmul.matmul_cuda,
    },
    registered=(matmul.matmul_op,),
    tensors={"a": "M K", "b": "K N"},
    letters="M K N",
    empty_shapes=((0, 3, 5), (5, 3, 0), (17, 0, 33)),
    host_shape=(64, 64, 64),
    odd_shapes=(*_ODD_PRODUCTS, (1030, 264, 520)),  # M, K, N; the last one as TMA reads it
    # forward: read a and b, write y; backward: read them and dy, write da and db
    bytes_moved=lambda shape, itemsize, gradients, **_: (
        (2 if gradients else 1) * shape[0] * shape[2] * itemsize
        + (3 if gradients else 1) * (shape[0] + shape[2]) * shape[1] * itemsize
    ),
    flops=lambda shape, gradients, **_: (6 if gradients else 2) * torch.Size(shape).numel(),
    bench_shapes=((8192, 8192, 8192), (16384, 1024, 8192), (512, 16384, 512), (1823, 333, 781)),
    small_shape=(33, 40, 21),
    variants={
        f"bias, {activation}": (
            {"a": "M K", "b": "K N", "bias": "N"},
            {"activation": activation},
        )
        for activation in ("relu", "gelu", "gelu_tanh")
    },
    plans=_MATMUL_PLANS,
    sources=("lib/ops/matmul.py", "lib/measure/matmul_ladder.py", "lib/ops/matmul.cu"),
)


_GATED_LAYER = {"x": "... K", "weight": "2H K weight", "bias": "2H"}
_GATED_WITHOUT_BIAS = {k: spec for k, spec in _GATED_LAYER.items() if k != "bias"}
# Three rows of tiles, in groups of two, for two programs; then K in two steps. No size fills its tiles.
_GATED_SHAPES = [(260, 24, 132), (130, 72, 33)]

LINEAR_GLU = Op(
    name="linear_glu",
    title="x1 · gelu(x2), [x1, x2] = x Wᵀ + b",
    eager=linear_glu.linear_glu_eager,
    versions={"triton": linear_glu.linear_glu_triton},
    registered=(linear_glu.linear_glu_op,),
    tensors=_GATED_LAYER,
    letters="M K H",
    variants={
        "no bias": (_GATED_WITHOUT_BIAS, {}),
        "recompute": (_GATED_LAYER, {"recompute": True}),
        "gelu": (_GATED_LAYER, {"activation": "gelu"}),
        "silu, gate first": (_GATED_LAYER, {"activation": "silu", "gate": "first"}),
        "relu": (_GATED_LAYER, {"activation": "relu"}),
        "sigmoid, no bias": (_GATED_WITHOUT_BIAS, {"activation": "sigmoid"}),
    },
    version_arguments=("recompute",),
    plans={
        "wide tiles, two strips of several tiles": (
            linear_glu.Plan(
                "pointers", linear_glu.Tile(128, 128, 64, 8, 2), 2, backward=(16, 32, 2)
            ),
            _GATED_SHAPES,
        ),
        "TMA, short K": (
            linear_glu.Plan("tma", linear_glu.Tile(128, 64, 64, 4, 3), 2, n_programs=2),
            _GATED_SHAPES,
        ),
        "TMA, long K": (
            linear_glu.Plan("tma", linear_glu.Tile(128, 128, 64, 8, 3), 2, 2, tma_store=True),
            [(260, 24, 136), (130, 72, 33)],  # TMA stores y of the first
        ),
    },
    empty_shapes=((0, 3, 5), (5, 3, 0), (17, 0, 33)),
    host_shape=(16, 64, 64),
    odd_shapes=(*_ODD_PRODUCTS, (1030, 264, 2056)),  # M, K, H; the last one by TMA
    # forward: read x, W and b, write y; backward: read x, W and dy, write dx and dW
    bytes_moved=lambda shape, itemsize, gradients, **_: (
        (2 if gradients else 1) * (shape[0] * shape[2]) * itemsize
        + (3 if gradients else 1) * (shape[0] * shape[1] + 2 * shape[1] * shape[2]) * itemsize
    ),
    flops=lambda shape, gradients, **_: (12 if gradients else 4) * torch.Size(shape).numel(),
    bench_shapes=((16384, 1024, 4096), (16384, 4096, 16384)),
    small_shape=(33, 40, 21),
    sources=("lib/ops/linear_glu.py",),
)


def _low_rank_bytes(shape, itemsize, gradients, **_):
    """Forward: read x and the weights, write y. Backward: read them, dy and y, write all gradients but W's."""
    n_rows, n_in, n_out, rank = shape
    trained = n_rows * n_in + rank * (n_in + n_out)
    frozen, out = n_in * n_out, n_rows * n_out
    if gradients:
        return (3 * trained + 2 * frozen + 3 * out) * itemsize
    return (trained + frozen + out) * itemsize


def _low_rank_flops(shape, gradients, **_):
    n_rows, n_in, n_out, rank = shape
    wide, narrow = 2 * n_rows * n_in * n_out, 2 * n_rows * rank * (n_in + n_out)
    return 2 * wide + 3 * narrow if gradients else wide + narrow


_LORA_TENSORS = {
    "x": "... K", "weight": "N K weight frozen", "lora_a": "R K weight", "lora_b": "N R weight", "bias": "N"
}  # fmt: skip
_LORA_WITHOUT_BIAS = {k: spec for k, spec in _LORA_TENSORS.items() if k != "bias"}
# Each cuts tiles and takes several steps over K; "pointers" and "tma" several pieces of the rank, too.
_LORA_PLANS = {
    # two groups of rows of tiles
    "pointers": (lora_linear.Plan(lora_linear.Tile(16, 16, 16, 4, 1)), [(150, 39, 41, 37)]),
    "pointers, stored in halves": (
        lora_linear.Plan(lora_linear.Tile(16, 256, 32, 4, 1)),
        [(21, 40, 300, 3)],
    ),
    # more tiles than programs of the interpreter
    "tma": (
        lora_linear.Plan(lora_linear.Tile(64, 64, 64, 4, 4), "tma"),
        [(130, 72, 136, 5), (70, 80, 72, 100)],
    ),
    "tma, stored in halves": (
        lora_linear.Plan(lora_linear.Tile(64, 256, 32, 8, 3), "tma"),
        [(66, 72, 264, 20)],
    ),
    "cublas": (lora_linear.Plan(way="cublas"), [(17, 33, 21, 5)]),
    "two strips of several tiles of dz": (
        lora_linear.Plan(lora_linear.Tile(32, 32, 32, 4, 3), backward=(8, 32, 2)),
        [(70, 24, 40, 4)],
    ),
}

LORA_LINEAR = Op(
    name="lora_linear",
    title="act(x Wᵀ + b + s (x Aᵀ) Bᵀ)",
    eager=lora_linear.lora_linear_eager,
    versions={
        "cublas": lora_linear.lora_linear_cublas,
        "triton": lora_linear.lora_linear_triton,
    },
    registered=(lora_linear.lora_linear_op,),
    tensors=_LORA_TENSORS,
    letters="M K N R",
    empty_shapes=((0, 3, 5, 2), (5, 3, 0, 2), (17, 0, 33, 2)),
    configurations={
        activation: {"scale": _LORA_SCALE, "activation": activation}
        for activation in ("relu", "identity", "gelu_tanh", "silu", "sigmoid")
    },
    variants={
        "only what it needs": (_LORA_WITHOUT_BIAS, {}),
        "no bias": (_LORA_WITHOUT_BIAS, {"scale": -1.5, "activation": "gelu"}),
    },
    plans=_LORA_PLANS,
    host_shape=(16, 64, 64, 8),
    odd_shapes=(
        (1, 1, 1, 1),
        (5, 7, 3, 4),
        (17, 33, 21, 5),
        (130, 72, 96, 16),
        (257, 333, 781, 64),
        (1030, 264, 520, 16),  # by TMA
    ),
    bytes_moved=_low_rank_bytes,
    flops=_low_rank_flops,
    bench_shapes=(
        (16384, 4096, 4096, 16),
        (2048, 4096, 4096, 64),
        (4096, 4096, 11008, 8),
    ),  # M, K, N, r
    small_shape=(33, 40, 21, 4),
    sources=("lib/ops/lora_linear.py",),
)


_INT4 = {
    "x": "... K", "packed": "N K int4", "scales": "K/128 N frozen", "zeros": "K/128 N int8", "bias": "N"
}  # fmt: skip
_INT4_BY_64 = _INT4 | {"scales": "K/64 N frozen", "zeros": "K/64 N int8"}
_SYMMETRIC = {k: spec for k, spec in _INT4.items() if k != "zeros"}
_INT8 = _SYMMETRIC | {"packed": "N K int8", "scales": "1 N frozen"}
_FP8 = _INT8 | {"packed": "N K fp8"}


def _quantized(op, shape, dtype, device, draw):
    """x, W as any integers, its scales and zero points, and bias. Of int4 K is the next multiple of a group."""
    group = int(op.tensors["scales"].split()[0].removeprefix("K/"))
    n_rows, n_inner, n_out = shape
    n_inner = n_inner if group == 1 else max(1, -(-n_inner // group)) * group
    n_groups = 1 if group == 1 else n_inner // group
    of_scales = n_groups, n_out
    if group == 1:
        packed = _integers((n_out, n_inner), torch.int64, device).to(torch.int8)
        if op.tensors["packed"].endswith("fp8"):  # any but NaN, which quantize makes of nothing
            packed = packed.view(torch.uint8)
            packed = torch.where(packed % 128 == 127, 0, packed)
    else:
        packed = _integers((n_out, n_inner // 8), torch.int64, device).to(torch.int32)
    # W's numbers are near 1 / √K, as a layer's
    scales = draw(of_scales).detach() / ((64 if group == 1 else 4) * max(1, n_inner) ** 0.5)
    tensors = {
        "x": draw((n_rows, n_inner)).requires_grad_(), "packed": packed, "scales": scales,
        "zeros": _integers(of_scales, torch.int64, device).remainder(16).to(torch.int8),
        "bias": draw((n_out,)).requires_grad_(),
    }  # fmt: skip
    return tuple(tensors[name] for name in op.tensors)


def _quantized_bytes(shape, itemsize, gradients, **_):
    """Forward: read x and W in 4 bits with its scales, write y. Backward: read W and dy, write dx."""
    n_rows, n_in, n_out = shape
    weight = n_in * n_out // 2 + -(-n_in // 128) * n_out * (itemsize + 1)
    return (2 if gradients else 1) * (weight + n_rows * (n_in + n_out) * itemsize)


_QUANTIZED_PLANS = {
    "two groups of rows of tiles, scaled numbers": (
        quantized_linear.Plan(quantized_linear.Tile(16, 16, 4, 1)),
        [(141, 256, 20)],
    ),
    "split-K in 3 parts, scaled sums": (
        quantized_linear.Plan(quantized_linear.Tile(16, 32, 4, 2), 3, True),
        [(17, 640, 21), (7, 384, 40)],
    ),
    "W made whole": (quantized_linear.Plan(None), [(17, 128, 37), (7, 384, 70)]),
}

QUANTIZED_LINEAR = Op(
    name="quantized_linear",
    title="act(x Wᵀ + b), W in 4 or 8 bits",
    eager=quantized_linear.quantized_linear_eager,
    versions={"triton": quantized_linear.quantized_linear_triton},
    registered=(quantized_linear.quantized_linear_op,),
    tensors=_INT4,
    letters="M K N",
    make=_quantized,
    variants={
        "int8": (_INT8, {}),
        "int8, relu": (_INT8, {"activation": "relu"}),
        "fp8, silu": (_FP8, {"activation": "silu"}),
        "groups of 64, silu": (_INT4_BY_64, {"activation": "silu"}),
        "symmetric, gelu": (_SYMMETRIC, {"activation": "gelu"}),
        "symmetric, no bias": ({k: _SYMMETRIC[k] for k in ("x", "packed", "scales")}, {}),
    },
    # 3xTF32 takes 21 bits of x, and eager 24: where the terms of a sum cancel, that is seen.
    slack=2e-6,
    plans=_QUANTIZED_PLANS,
    empty_shapes=((0, 128, 5), (5, 128, 0)),
    host_shape=(16, 128, 64),
    odd_shapes=((1, 1, 1), (5, 200, 3), (17, 128, 21), (65, 72, 96), (257, 700, 333)),
    bytes_moved=_quantized_bytes,
    flops=lambda shape, gradients, **_: (4 if gradients else 2) * math.prod(shape),
    bench_shapes=((1, 4096, 14336), (16, 4096, 14336), (4096, 4096, 14336)),  # M, K, N
    small_shape=(33, 128, 21),
    sources=("lib/ops/quantized_linear.py",),
)


_CLASSIFIED = {"x": "... K", "weight": "V K weight", "labels": "... int64"}
_WEIGHTED = _CLASSIFIED | {"bias": "V", "class_weight": "V frozen"}


def _labels_in_range(op, shape, dtype, device, draw):
    """x, weight, and a label for each row, one in seven of them ignored."""
    sizes = op.sizes(shape)
    x, weight, labels, *columns = (
        _tensor(spec, sizes, device, draw) for spec in op.tensors.values()
    )
    labels = labels.remainder(sizes["V"])
    ignored = torch.arange(len(labels), device=device) % 7 == 5
    labels = labels.masked_fill(ignored, op.arguments.get("ignore_index", -100))
    # weights of classes are positive, or their sum, which "mean" divides by, may be nearly 0
    return x, weight, labels, *columns[:1], *(t.abs() + 0.1 for t in columns[1:])


def _classified_bytes(shape, itemsize, gradients, **_):
    """Forward: read x, weight and labels. Backward: read x and weight again, write their gradients."""
    n_rows, n_in, n_classes = shape
    return 8 * n_rows + (3 if gradients else 1) * (n_rows + n_classes) * n_in * itemsize


LINEAR_CROSS_ENTROPY = Op(
    name="linear_cross_entropy",
    title="cross_entropy(x Wᵀ, labels)",
    eager=linear_cross_entropy.linear_cross_entropy_eager,
    versions={"triton": linear_cross_entropy.linear_cross_entropy_triton},
    registered=(linear_cross_entropy.linear_cross_entropy_op,),
    tensors=_CLASSIFIED,
    letters="M K V",
    make=_labels_in_range,
    variants={
        "sum": (_CLASSIFIED, {"reduction": "sum"}),
        "none": (_CLASSIFIED, {"reduction": "none"}),
        "smoothed": (_CLASSIFIED, {"label_smoothing": 0.1}),
        "soft cap": (_CLASSIFIED, {"softcap": 2.0}),
        "z-loss": (_CLASSIFIED, {"z_loss": 0.01, "ignore_index": 1}),
        "all of them": (
            _CLASSIFIED,
            {"label_smoothing": 0.3, "softcap": 3.0, "z_loss": 0.1, "reduction": "none"},
        ),
        "bias": (_CLASSIFIED | {"bias": "V"}, {"label_smoothing": 0.2, "softcap": 3.0}),
        "bias, weights of classes": (_WEIGHTED, {"z_loss": 0.1, "ignore_index": 1}),
        "bias, weights of classes, none": (_WEIGHTED, {"reduction": "none"}),
    },
    bytes_moved=_classified_bytes,
    flops=lambda shape, gradients, **_: (6 if gradients else 2) * math.prod(shape),
    bench_shapes=((8192, 4096, 128256), (8192, 4096, 50257), (2048, 1024, 50257)),  # M, K, V
    small_shape=(33, 40, 21),
    odd_shapes=(
        (1, 1, 1), (5, 7, 3), (17, 33, 21), (70, 72, 97), (40, 16, 1000), (131, 24, 50)
    ),
    empty_shapes=((5, 0, 3), (0, 3, 4)),  # the mean of no rows is NaN, which opcheck takes for another NaN
    host_shape=(16, 64, 64),
    plans={
        "three chunks, rounded one by one": (
            linear_cross_entropy.Plan(7, False, 16, 4), [(17, 33, 21), (20, 40, 5), (16, 9, 33)]
        ),
        "three chunks, in float32": (
            linear_cross_entropy.Plan(7, True, 32, 4, 2, False), [(17, 33, 21), (20, 40, 70)]
        ),
    },
    sources=("lib/ops/linear_cross_entropy.py",),
)  # fmt: skip


def _two_layers_bytes(shape, itemsize, gradients, **_):
    """Forward: read x and both weights, write y. Backward: read them and dy, write their gradients."""
    n_rows, n_in, n_hidden, n_out = shape
    once = n_rows * n_in + n_hidden * (n_in + n_out)
    return ((3 if gradients else 1) * once + (2 if gradients else 1) * n_rows * n_out) * itemsize


_TWO_LAYERS = {
    "x": "... K",
    "weight1": "H K weight",
    "bias1": "H",
    "weight2": "N H weight",
    "bias2": "N",
}

FUSED_MLP = Op(
    name="fused_mlp",
    title="sigmoid(relu(x W1ᵀ + b1) W2ᵀ + b2)",
    eager=fused_mlp.fused_mlp_eager,
    versions={"triton": fused_mlp.fused_mlp_triton},
    registered=(fused_mlp.fused_mlp_op,),
    tensors=_TWO_LAYERS,
    letters="M K H N",
    variants={final: (_TWO_LAYERS, {"final": final}) for final in ("relu", "identity")},
    plans={
        "split, parts of several tiles": (
            fused_mlp.Plan("split", n_splits=3),
            [(17, 33, 300, 9), (20, 16, 280, 1)],
        ),
        "small tiles": (
            fused_mlp.Plan("one kernel", fused_mlp.Tile(16, 16, 16, 4, 2)),
            [(17, 33, 70, 9), (20, 40, 40, 40)],
        ),
        "cublas": (fused_mlp.Plan("cublas"), [(17, 33, 70, 9), (5, 7, 3, 1)]),
    },
    empty_shapes=((0, 3, 5, 2), (5, 3, 4, 0), (5, 0, 4, 2), (5, 3, 0, 2)),
    host_shape=(16, 64, 64, 1),
    odd_shapes=(
        (1, 1, 1, 1),
        (5, 7, 3, 2),
        (17, 33, 70, 9),
        (20, 16, 40, 1),
        (130, 72, 96, 16),
        (257, 333, 700, 5),
    ),
    bytes_moved=_two_layers_bytes,
    flops=lambda shape, gradients, **_: (
        (6 if gradients else 2) * shape[0] * shape[2] * (shape[1] + shape[3])
    ),
    bench_shapes=(
        (2048, 512, 256, 1),
        (128, 512, 256, 1),
        (65536, 512, 256, 1),
        (2048, 13, 512, 256),
        (16384, 1024, 4096, 1024),
    ),  # fmt: skip
    small_shape=(33, 40, 21, 3),
    sources=("lib/ops/fused_mlp.py",),
)


def _heads(op, shape, dtype, device, draw):
    """q, k, v, and lengths if the op takes them; of H heads as many as are a multiple of G."""
    n_batch, n_heads, n_kv_heads, n_queries, n_keys, dim = shape
    n_heads = max(1, n_heads // max(1, n_kv_heads)) * n_kv_heads
    sizes = (n_heads, n_queries), (n_kv_heads, n_keys), (n_kv_heads, n_keys)
    q, k, v = (draw((n_batch, h, s, dim)).requires_grad_() for h, s in sizes)
    if "lengths" not in op.tensors:
        return q, k, v
    dtype = _INTEGERS[op.tensors["lengths"].split()[-1]]
    # all keys, a part of them, none, fewer than none, more than there are
    lengths = [n_keys, n_keys - n_keys // 3, 0, -3, n_keys + 5]
    order = [lengths[(3 * b + 1) % 5] for b in range(n_batch)]
    return q, k, v, torch.tensor(order, dtype=dtype, device=device)


def _attention_query_by_query(
    q, k, v, lengths=None, *, is_causal=False, window=None, scale=None, align="top_left"
):
    """The definition without a product of 0: each query and the keys that it sees."""
    left, right = window or (-1, -1)
    o = torch.zeros_like(q) + 0 * q.flatten()[:0].sum()
    rows = []
    for b, h, i in itertools.product(*map(range, q.shape[:3])):
        g, n_keys = h * k.shape[1] // q.shape[1], k.shape[2]
        end = n_keys if lengths is None else min(n_keys, max(0, int(lengths[b])))
        at = i + end - q.shape[2] if align == "bottom_right" else i
        first = max(0, at - left) if left >= 0 else 0
        end = min(end, at + 1) if is_causal else end
        end = min(end, at + right + 1) if right >= 0 else end
        if end <= first:
            rows.append(o[b, h, i])
            continue
        some = q[b, h, i : i + 1], k[b, g, first:end], v[b, g, first:end]
        rows.append(
            attention.attention_eager(*(t[None, None] for t in some), scale=scale).flatten()
        )
    return torch.stack(rows).view(q.shape)


def _attention_bytes(shape, itemsize, gradients, **_):
    """Forward: read q, k and v, write o. Backward: read them and do, write their gradients."""
    n_batch, n_heads, n_kv_heads, n_queries, n_keys, dim = shape
    of_q, of_k = n_batch * n_heads * n_queries * dim, n_batch * n_kv_heads * n_keys * dim
    return ((5 if gradients else 2) * of_q + (6 if gradients else 2) * of_k) * itemsize


def _attention_flops(shape, gradients, is_causal=False, **_):
    """Two products forward and five backward; half of them where the scores above the diagonal are left out."""
    n_batch, n_heads, _, n_queries, n_keys, dim = shape
    products = (7 if gradients else 2) * n_batch * n_heads * n_queries * n_keys * 2 * dim
    return products // 2 if is_causal else products


# Tiles so small that a few queries and keys are several: wholly seen, seen in part, and skipped.
_SMALL = attention.Plan(*[attention.Tile(16, 16, 4, 1)] * 3)
_QKV = {"q": "B H Q D", "k": "B G K D", "v": "B G K D"}

ATTENTION = Op(
    name="attention",
    title="softmax(q kᵀ/√D) v",
    eager=attention.attention_eager,
    versions={"triton": attention.attention_triton},
    registered=(attention.attention_op,),
    tensors=_QKV,
    letters="B H G Q K D",
    make=_heads,
    configurations={
        "": {},
        "causal": {"is_causal": True},
        "causal, atomics": {"is_causal": True, "deterministic": False},
    },
    variants={
        "causal, small tiles": (
            _QKV, {"is_causal": True, "deterministic": False, "plan": _SMALL}
        ),
        "window, heads in one tile": (
            _QKV, {"window": (9, 5), "scale": -0.3, "plan": _SMALL._replace(packed=True)}
        ),
        "lengths, keys in parts": (
            _QKV | {"lengths": "B int32"}, {"plan": _SMALL._replace(n_parts=2)}
        ),
        "lengths, causal, one side of a window": (
            _QKV | {"lengths": "B int64"}, {"is_causal": True, "window": (7, -1), "plan": _SMALL}
        ),
        "causal from the bottom right, keys in parts": (
            _QKV,
            {
                "is_causal": True, "align": "bottom_right",
                "plan": _SMALL._replace(n_parts=2, packed=True),
            },
        ),
        "lengths, a window from the bottom right": (
            _QKV | {"lengths": "B int32"},
            {"window": (7, 2), "align": "bottom_right", "plan": _SMALL._replace(n_parts=2)},
        ),
    },
    version_arguments=("plan", "deterministic"),
    without_zeros=_attention_query_by_query,
    # The gradient of a score is p·(do·v - do·o). Of a query that sees few keys the two sums are nearly equal:
    # eager subtracts the sums themselves, and has no error there; each of ours is rounded on its own.
    slack=3e-6,
    # do·o is of the o that was rounded for the caller, as FlashAttention's is: with equal keys dq is 0, and of
    # this one a rounding times a key remains.
    cancelling=("k",),
    bytes_moved=_attention_bytes,
    flops=_attention_flops,
    # B, H, G, queries, keys, D; the last one is decoding
    bench_shapes=(
        (4, 32, 8, 4096, 4096, 128), (1, 32, 8, 8192, 8192, 128), (16, 16, 16, 1024, 1024, 64),
        (64, 32, 8, 1, 8192, 128),
    ),
    # of long sequences the float64 scores do not fit into memory
    checked=lambda shape: (1, *shape[1:3], *(min(s, 2048) for s in shape[3:5]), shape[5]),
    small_shape=(2, 4, 2, 19, 40, 16),
    odd_shapes=(
        (1, 1, 1, 1, 1, 1), (2, 4, 2, 5, 7, 3), (3, 4, 2, 19, 21, 16), (2, 2, 2, 40, 17, 40),
        (2, 8, 2, 1, 40, 16), (1, 2, 1, 37, 40, 64), (5, 1, 1, 3, 5, 130),
    ),
    empty_shapes=((0, 4, 2, 3, 5, 4), (2, 4, 2, 0, 5, 4), (2, 4, 2, 3, 0, 4)),
    host_shape=(1, 4, 2, 16, 16, 64),
    plans={
        "small tiles": (_SMALL, [(2, 4, 2, 37, 40, 16), (1, 3, 1, 17, 50, 5)]),
        "keys in parts": (
            _SMALL._replace(n_parts=3), [(2, 2, 1, 5, 70, 16), (1, 1, 1, 20, 17, 33)]
        ),
        "heads in one tile, keys in parts": (
            _SMALL._replace(n_parts=2, packed=True), [(2, 6, 2, 9, 40, 16), (2, 4, 1, 1, 70, 20)]
        ),
        "TMA": (_SMALL._replace(tma=True), [(2, 4, 2, 37, 40, 16), (1, 2, 2, 20, 33, 24)]),
    },
    sources=("lib/ops/attention.py",),
)  # fmt: skip

_ALL = (
    ADD_RELU,
    GELU,
    SOFTMAX,
    LORA_EPILOGUE,
    BIAS_GELU_DROPOUT_ADD,
    ADD_RMS_NORM,
    LAYER_NORM,
    INTERACTION,
    EMBEDDING_HASH,
    ROPE,
    MATMUL,
    LINEAR_CROSS_ENTROPY,
    LINEAR_GLU,
    LORA_LINEAR,
    QUANTIZED_LINEAR,
    FUSED_MLP,
    ATTENTION,
)
OPS = {op.name: op for op in _ALL}


def find(name):
    """The Op called `name`; ValueError lists the names there are."""
    if name not in OPS:
        raise ValueError(f"no op is called {name!r}; there are: {', '.join(OPS)}")
    return OPS[name]
