"""What checkers watch while an answer runs: arithmetic in PyTorch, precision, passes over memory, races."""

import contextlib
import re
from typing import NamedTuple
from unittest import mock

from lib import profiling
from lib.exercises import Wrong, expect
from lib.nogpu.compile_only import compile_for, signature_of
from lib.nogpu.interpreter import interpreted_launches
from lib.nogpu.races import in_order, races

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton.runtime import interpreter as upstream

_ARITHMETIC = ("norm", "mul", "div", "mm", "sum", "pow", "sqrt", "square", "add", "sub")
_INTEGERS = {torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64}


class _NoArithmetic(TorchDispatchMode):
    """Inside, PyTorch may allocate, view and copy tensors, but not calculate."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        if any(word in name for word in _ARITHMETIC):
            raise Wrong(f"PyTorch runs {name}: calculate inside the launch")
        return function(*args, **(kwargs or {}))


class Result(NamedTuple):
    """A tensor that an op of PyTorch returned.

    is_view: its memory is that of one which the op was given.
    of_integers: it has floats, and the op read integers to make them.
    """

    op: str
    shape: torch.Size
    is_float: bool
    is_view: bool
    of_integers: bool


class Results(TorchDispatchMode):
    """Inside, `seen` receives a Result for each tensor that an op returns."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        name, inputs = function.overloadpacket.__name__, _tensors((args, kwargs))
        given = {t.untyped_storage().data_ptr() for t in inputs}
        reads_integers = any(t.dtype in _INTEGERS for t in inputs)
        reads_integers = reads_integers and name not in {*_MOVES_NOTHING, *FILLS}
        for t in _tensors(out):
            is_float, is_view = t.is_floating_point(), t.untyped_storage().data_ptr() in given
            self.seen.append(Result(name, t.shape, is_float, is_view, is_float and reads_integers))
        return out


def _tensors(tree):
    return [t for t in tree_leaves(tree) if isinstance(t, torch.Tensor)]


def expect_kernels_alone_calculate(launch):
    """Wrong if PyTorch multiplies, adds or sums while `launch()` runs."""
    with _NoArithmetic():
        launch()


@contextlib.contextmanager
def _record_precisions():
    """A list that receives the input precision of each float32 tl.dot of kernels run inside."""
    precisions, create_dot = [], upstream.InterpreterBuilder.create_dot

    def dot(self, a, b, accumulator, precision, *rest):
        if a.data.dtype == "float32":
            precisions.append(str(precision).rpartition(".")[2])
        return create_dot(self, a, b, accumulator, precision, *rest)

    with mock.patch.object(upstream.InterpreterBuilder, "create_dot", dot), interpreted_launches():
        yield precisions


def expect_float32_products(launch):
    """Wrong unless `launch()`, of float32 tensors, multiplies by tl.dot and never in TF32."""
    with _record_precisions() as precisions:
        launch()
    expect(
        "TF32" not in precisions,
        "tl.dot is asked for TF32, its default: on a GPU float32 would lose 13 of 23 bits; "
        "pass input_precision='ieee' or 'tf32x3'",
    )
    expect(
        precisions,
        "no product by tl.dot: a sum of products becomes TF32 on a GPU, and tensor cores need tl.dot",
    )


@contextlib.contextmanager
def _recorded_launches():
    """A list that receives (kernel, arguments, options) of each launch inside."""
    seen, run = [], upstream.InterpretedFunction.run

    def recorded(self, *args, grid, warmup, **options):
        seen.append((self, args, options))
        return run(self, *args, grid=grid, warmup=warmup, **options)

    patch = mock.patch.object(upstream.InterpretedFunction, "run", recorded)
    with patch, interpreted_launches():
        yield seen


def expect_no_float64_tiles(launch, at):
    """Wrong if a kernel of `launch()` computes tiles in float64 where a Python float comes as one.

    That is how compiled code passes it. The interpreter takes it for float32, so the kernels are compiled.
    """
    with _recorded_launches() as launches:
        launch()
    for kernel, args, options in launches:
        signature = signature_of(kernel, *args, **options)
        floats = [name for name, kind in signature.types.items() if kind == "fp32"]
        types = signature.types | dict.fromkeys(floats, "fp64")
        compiled = compile_for(kernel, signature._replace(types=types))
        expect(
            not re.search(r"tensor<[^>]*f64", compiled.ttir),
            f"{at}: where {' or '.join(floats)} comes as float64, as in compiled code, "
            f"{kernel.__name__} computes tiles in float64; cast it with tl.cast(…, tl.float32)",
        )


# Ops that make tensors and move nothing, the interpreter's own among them.
_MOVES_NOTHING = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "set_"}

FILLS = ("zeros", "zeros_like", "zero_", "full", "full_like", "fill_", "new_zeros")


def expect_no_pass(launch, n_bytes, at, but=()):
    """Wrong if an op of PyTorch reads or writes `n_bytes` or more, the size of a tensor, in `launch()`.

    but: names of ops that may.
    """
    ops = profiling.traffic_table(launch)
    for op in ops[~ops.op.isin({*_MOVES_NOTHING, *but})].itertuples():
        expect(
            max(op.bytes_read, op.bytes_written) < n_bytes,
            f"{at}: torch's {op.op} passes over a whole tensor; let the kernel do it",
        )


def expect_no_race(launch, at):
    """Wrong if programs of `launch()` touch one element, one of them writing, and not all atomically.

    Take inputs of several programs in each direction in which one may cut the work.
    """
    conflicts = races(launch)
    expect(not conflicts, f"{at} programs race ({(conflicts or [''])[0]})")


def expect_fixed_order(answer, inputs, at):
    """Wrong if programs of `answer(*inputs)` race, or if the bits depend on the order in which they run."""
    expect_no_race(lambda: answer(*inputs), at)
    with interpreted_launches():
        forward = answer(*inputs)
        for order in ("reverse", 1, 2):
            with in_order(order):
                differ = int((answer(*inputs) != forward).sum())
            expect(
                differ == 0,
                f"{at} {differ} of {forward.numel()} sums have other bits when the programs run in another"
                f" order ({order}); float additions must come in a fixed order",
            )
