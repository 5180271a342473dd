"""Would the tests notice? Ops with one mistake written into them, each of which the checks have to find.

    python -m lib.tests.ops.mutants [op]      says of each mutant what killed it, or that it is alive

A mutant is a piece of an op file and what to put in its place. The file is copied with the mistake, loaded
under another name, and its Triton versions go through CHECKS: few of the cases of test_ops, small and nasty.
To add mutants: a file here, named as the op, with a list MUTANTS. It may have a list CHECKS too, of functions
(op, module) that raise: what only this op has to get right; an op that is not generic has these alone. Runs in
the interpreter; on a GPU a mutant might write anywhere.
"""

import dataclasses
import functools
import importlib
import importlib.util
import sys
import tempfile
import warnings
from pathlib import Path

from lib import machine
from lib.measure import registry
from lib.measure.check import check_against_float64
from lib.recorded.results import ROOT
from lib.tests.ops import cases

import torch

FOLDER = Path(__file__).parent
NAMES = sorted(path.stem for path in FOLDER.glob("[a-z]*.py"))


@dataclasses.dataclass(frozen=True)
class Mutant:
    """One mistake: `old`, which the op file has exactly once, becomes `new`; `why` names the mistake."""

    old: str
    new: str
    why: str


def mutants_of(name):
    """(the mutants, the extra checks) of the op `name`; ValueError if there are none."""
    if name not in NAMES:
        raise ValueError(f"there are no mutants of {name!r}; there are of: {', '.join(NAMES)}")
    module = importlib.import_module(f"{__name__}.{name}")
    return module.MUTANTS, getattr(module, "CHECKS", [])


# --- loading -----------------------------------------------------------------------------------------------


def source_of(name, mutant=None):
    """The text of an op file with the mistake in it, and with a torch.library namespace of its own."""
    text = (ROOT / "lib" / "ops" / f"{name}.py").read_text()
    if mutant is not None:
        if text.count(mutant.old) != 1:
            found = text.count(mutant.old)
            raise ValueError(f"{name}, {mutant.why}: {mutant.old!r} occurs {found} times, not once")
        text = text.replace(mutant.old, mutant.new)
    return text.replace('"fused_kernels::', '"fused_kernels_mutants::')


_loaded = []  # a number for each, as Triton finds a kernel's source by its file


def load(name, mutant=None):
    """The module of an op file with the mistake in it; the file itself is gone when the process ends."""
    _loaded.append(name)
    path = _folder() / f"{name}_mutant_{len(_loaded)}.py"
    path.write_text(source_of(name, mutant))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    try:
        spec.loader.exec_module(module)
    finally:
        del sys.modules[path.stem]
    return module


@functools.cache
def _temporary_folder():
    return tempfile.TemporaryDirectory()


def _folder():
    return Path(_temporary_folder().name)


def with_module(op, module):
    """The Op of the suite with its Triton versions taken from `module`; eager stays the definition."""

    def taken(versions):
        return {n: getattr(module, v.__name__) for n, v in versions.items() if "triton" in n}

    return dataclasses.replace(op, versions=taken(op.versions), in_place=taken(op.in_place))


# --- checks ------------------------------------------------------------------------------------------------


def _check(op, inputs, name):
    for version in op.all_versions().values():
        check_against_float64(version, op.eager, *inputs, name=f"{version.__name__}, {name}")


def check_values(op):
    """Shapes that fill no tile."""
    for shape, dtype in [((17, 33), torch.float32), ((2, 3, 40), torch.bfloat16)]:
        _check(op, op.inputs(shape, dtype, machine.device()), f"{shape}, {dtype}")


def check_tiles(op):
    """Several tiles side by side, and several strips of rows, the last of each cut."""
    for shape, dtype in [((2, 1100), torch.float16), ((40, 128), torch.float32)]:
        _check(op, op.inputs(shape, dtype, machine.device()), f"{shape}, {dtype}")


def check_specials(op):
    for dtype in (torch.float32, torch.bfloat16):
        inputs = op.inputs((6, 24), dtype, machine.device())
        _check(op, cases.with_specials(inputs, op.eager), f"NaN and infinities, {dtype}")


def check_strides(op):
    inputs = op.inputs((9, 40), torch.float32, machine.device())
    for layout, strided in cases.laid_out(inputs).items():
        if layout.endswith(("transposed", "every second column", "expanded row")):
            _check(op, strided, layout)
    _check(op, [inputs[0], *map(cases.spread, inputs[1:])], "spread parameters")


def check_gradient_layouts(op):
    """A dy of strides 0, a transposed one, and one of NaN at the end of a tile."""
    for version in op.all_versions().values():
        for layout in ("expanded", "transposed"):
            inputs, again = (op.inputs((9, 40), torch.float32, machine.device()) for _ in range(2))
            dy = torch.randn(40, 9, device=machine.device()).t()
            dy = dy[:1, :1].expand(9, 40) if layout == "expanded" else dy
            got = torch.autograd.grad(version(*inputs), inputs, dy)
            want = torch.autograd.grad(op.eager(*again), again, dy)
            for a, b in zip(got, want):
                torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5, msg=f"{layout} dy")


def check_gradients_one_by_one(op):
    for version in op.all_versions().values():
        inputs = op.inputs((9, 40), torch.float32, machine.device())
        wanted = torch.autograd.grad(op.eager(*inputs).square().sum(), inputs)
        for k, leaf in enumerate(inputs):
            others = [i if i is leaf else i.detach() for i in inputs]
            (got,) = torch.autograd.grad(version(*others).square().sum(), [leaf])
            torch.testing.assert_close(got, wanted[k], rtol=1e-5, atol=1e-5)


def check_empty(op):
    for shape in [(0, 5), (5, 0)]:
        _check(op, op.inputs(shape, torch.float32, machine.device()), str(shape))


def check_far_apart(op):
    """Offsets past 2**31, of each matrix and of the incoming gradient."""
    shape, dtype = (3, 16), torch.float16
    far = cases.far_apart(dtype, machine.device())
    inputs = op.inputs(shape, dtype, machine.device())
    for k, like_x in enumerate(cases.matrix_like(inputs)):
        if like_x:
            spaced = [far if i == k else t for i, t in enumerate(inputs)]
            spaced = [t.detach().requires_grad_() for t in spaced]
            _check(op, spaced, f"input {k} far apart")
    again = op.inputs(shape, dtype, machine.device())
    op.eager(*again).backward(far)
    for version in op.versions.values():
        inputs = op.inputs(shape, dtype, machine.device())
        version(*inputs).backward(far)
        for got, want in zip(inputs, again):
            torch.testing.assert_close(got.grad, want.grad, rtol=0.03, atol=0.03)


def check_second_backward(op):
    """Twice the same gradients, and both dy and what was saved as they were."""
    for version in op.all_versions().values():
        inputs = op.inputs((9, 40), torch.float32, machine.device())
        y = version(*inputs)
        dy = torch.randn_like(y)
        before = dy.clone()
        first = torch.autograd.grad(y, inputs, dy, retain_graph=True)
        first = [t.clone() for t in first]
        second = torch.autograd.grad(y, inputs, dy)
        assert all(torch.equal(a, b) for a, b in zip(first, second)), "a second backward differs"
        assert torch.equal(dy, before), "dy was changed"


def check_many_rows(op):
    """Many rows of an odd width: groups of them folded into one, and what is left of them."""
    _check(op, op.inputs((1027, 3), torch.float32, machine.device()), "(1027, 3)")


def check_second_derivative(op):
    for version in op.versions.values():
        inputs = op.inputs((5, 7), torch.float32, machine.device())
        dy = torch.ones(5, 7, device=machine.device(), requires_grad=True)
        (dx,) = torch.autograd.grad(version(*inputs), inputs[:1], dy, create_graph=True)
        try:
            (
                dx * inputs[0]
            ).sum().backward()  # without the error: the part of it that goes through inputs[0]
        except RuntimeError:
            continue
        raise AssertionError("a second derivative does not raise")


# The cheap ones first: most mutants die at once.
CHECKS = [
    check_values,
    check_specials,
    check_far_apart,
    check_empty,
    check_second_derivative,
    check_gradient_layouts,
    check_gradients_one_by_one,
    check_second_backward,
    check_many_rows,
    check_tiles,
    check_strides,
]


def what_kills(name, mutant=None):
    """The first check that fails, with its message, or None: it is alive. Without a mutant, the op's."""
    module, extra = load(name, mutant), mutants_of(name)[1]
    mutated = with_module(registry.find(name), module)
    special = [functools.partial(check, module=module) for check in extra]
    # the checks of an op that is not generic go through its configurations themselves
    labels = list(mutated.configurations)[: None if mutated.generic else 1]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for check in [*special, *(CHECKS if mutated.generic else [])]:
            for label in labels:
                torch.manual_seed(0)
                try:
                    check(mutated.configured(label))
                except Exception as error:
                    check_name = getattr(check, "func", check).__name__
                    message = (str(error).strip().splitlines() or [""])[0]
                    where = " ".join(filter(None, (check_name, label)))
                    return f"{where}: {type(error).__name__}: {message}"
    return None
