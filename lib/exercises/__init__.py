"""Exercises: `check("03.2", my_answer)` shows a verdict and saves the reader's progress.

    ✔  right
    ✘  wrong: what differs, at the smallest shape that shows it
    ○  not attempted yet (the stub is still there)
    –  skipped: this machine lacks something, which is named

A verdict never raises, so an open exercise does not stop Run All; an answer that does not end is stopped.
With FUSED_KERNELS_STRICT=1 a wrong or open answer raises NotSolved: for CI, where a notebook should then fail.
One module per notebook holds its exercises (lib/exercises/nb03.py for notebook 03); solutions are in
notebooks/solutions.
"""

import contextlib
import dataclasses
import datetime
import importlib
import json
import os
import pkgutil
from collections.abc import Callable

from lib.course import progress as reader_progress
from lib.exercises.limits import TimeUp, short_print, time_limit
from lib.exercises.undefined import compare
from lib.measure.check import CheckError
from lib.nogpu.memory import count_traffic

import torch
from triton.runtime import JITFunction
from triton.runtime.interpreter import InterpretedFunction

PROGRESS = "progress.jsonl"
# Exercises of version 0.1 that have another number now; None for one that is gone.
_MOVED = """
00.3>00.4 00.4>00.3 01.1>02.1 01.2>02.2 01.3>02.3 01.4>02.4 10.1>10.3 10.2>10.1 10.3>10.2
12.1>12.3 12.3>12.4 20.1>05.2 20.2>05.1 20.3>05.3 20.4>05.4 21.1>06.3 21.2>06.4 21.3>06.2
21.5>06.5 22.2>22.3 22.3>22.2 23.1>23.2 23.2>23.1 30.1>03.1 30.2>03.2 30.3>03.3 30.4>04.2
30.5>04.4 31.4>31.5 32.1>07.1 32.2>07.5 32.3>07.4 32.4>07.3 32.5>32.3 40.3>40.4 40.4>40.5
40.5>40.3 43.1>43.2 43.2>43.1 45.2>48.2 45.3>48.1 45.4>45.3 50.1>08.1 50.2>08.2 50.3>08.3
51.1>51.2 51.2>51.1 51.3>51.4 52.1>09.1 52.2>09.2 52.3>09.3 60.1>60.2 60.2>60.1
"""
FORMER = {"21.4": None} | dict(pair.split(">") for pair in _MOVED.split())
_LONGEST = 1500  # characters of a verdict: some name the whole answer, which may be long
MARKS = {"right": "✔", "wrong": "✘", "open": "○", "skipped": "–"}


class Wrong(Exception):
    """Raised by a checker: the answer is wrong, and the message says where."""


class Skip(Exception):
    """Raised by a checker: this machine lacks something; the message says what."""


class NotAttempted(Exception):
    """Raised when the answer is still the stub: it returned None or `...`."""


class NotSolved(AssertionError):
    """Raised by `check` under FUSED_KERNELS_STRICT=1 for a wrong or open answer: its verdict."""


@dataclasses.dataclass(frozen=True)
class Exercise:
    """id: '03.2'; level 1 to 3; checker(answer) returns when right, raises Wrong, Skip or NotAttempted."""

    id: str
    title: str
    minutes: int
    level: int
    checker: Callable

    @property
    def heading(self):
        return f"{self.id} {self.title} ({'●' * self.level}{'○' * (3 - self.level)}, {self.minutes} min)"


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The result of `check`; its repr is one line."""

    id: str
    status: str
    message: str

    def __repr__(self):
        return f"{MARKS[self.status]} {self.id} {self.message}"


_exercises: dict[str, Exercise] = {}


def exercise(id, title, minutes, level):
    """Decorator: make a checker function into an Exercise."""

    def register(checker):
        _exercises[id] = Exercise(id, title, minutes, level, checker)
        return checker

    return register


def all_exercises():
    """{id: Exercise} of every notebook: each module nbNN.py of this folder."""
    for module in pkgutil.iter_modules(__path__):
        if module.name.startswith("nb"):
            importlib.import_module(f"{__name__}.{module.name}")
    return dict(sorted(_exercises.items()))


def check(id, answer):
    """The Verdict on `answer` to exercise `id`, saved in the reader's progress.

    ValueError: unknown id. NotSolved: see FUSED_KERNELS_STRICT.
    """
    if id not in all_exercises():
        raise ValueError(f"there is no exercise {id!r}; there are: {', '.join(_exercises)}")
    verdict = judge(_exercises[id], answer)
    if verdict.status in ("right", "wrong"):
        today = datetime.date.today().isoformat()
        entry = {"id": id, "status": verdict.status, "date": today, "version": "0.2"}
        reader_progress.append(PROGRESS, json.dumps(entry))
    return shown(verdict)


def shown(verdict):
    """The verdict. NotSolved: see FUSED_KERNELS_STRICT."""
    is_strict = os.environ.get("FUSED_KERNELS_STRICT", "") not in ("", "0")
    if verdict.status in ("wrong", "open") and is_strict:
        raise NotSolved(repr(verdict))
    return verdict


def judge(exercise, answer):
    """The Verdict on `answer`, which is saved nowhere."""
    try:
        if answer is None or answer is ...:
            raise NotAttempted
        with time_limit(), short_print():
            exercise.checker(answer)
    except NotAttempted as why:
        return Verdict(exercise.id, "open", f"not attempted yet{why}")
    except Skip as reason:
        return Verdict(exercise.id, "skipped", f"skipped: {reason}")
    except (Wrong, CheckError, TimeUp) as difference:
        return Verdict(exercise.id, "wrong", _one_line(str(difference)))
    # the reader's code may raise anything; the verdict shows it
    except (Exception, SystemExit) as error:
        if is_stub(error):
            return Verdict(exercise.id, "open", "not attempted yet")
        return Verdict(exercise.id, "wrong", _one_line(_raised(error)))
    return Verdict(exercise.id, "right", "right")


def _one_line(text):
    text = " ".join(text.split()) if "\n" in text else text
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]} …"


def is_stub(error):
    """Whether a stub raised this, without a word. torch raises NotImplementedError too, and says why."""
    return isinstance(error, NotImplementedError) and not str(error)


def _raised(error):
    try:
        says = str(error).partition("\n\nfrom user code")[0][:400]  # Dynamo adds a page on itself
    except Exception:  # an error of the reader's own, whose text cannot be had
        says = "(it has no text)"
    if "an illegal memory access was encountered" in says:  # of a GPU
        says = "it read or wrote memory that is not its own; restart the kernel before you run it again"
    return f"raised {type(error).__name__}: {says}"


# --- helpers for checkers ------------------------------------------------------------------------------


def attempted(value):
    """`value`, or NotAttempted when it is what a stub returns: None or `...`; Wrong if it holds no numbers."""
    if value is None:
        raise NotAttempted(", or its `return` is missing: it returns None")
    if value is ...:
        raise NotAttempted
    for t in value if isinstance(value, (tuple, list)) else (value,):
        if isinstance(t, torch.Tensor) and t.is_meta:
            raise Wrong("gives a tensor on the device meta, which has a shape and no numbers")
        if isinstance(t, torch.Tensor) and t.layout != torch.strided:
            raise Wrong(f"gives a tensor of the layout {t.layout}; give an ordinary, dense one")
    return value


def plain(value):
    """A scalar of NumPy or torch as the Python number that it is, in tuples and lists, too; else `value`."""
    if isinstance(value, (tuple, list)):
        return (tuple if isinstance(value, tuple) else list)(map(plain, value))
    scalar = getattr(value, "ndim", None) == 0 and not getattr(value, "is_meta", False)
    return value.item() if scalar else value


@contextlib.contextmanager
def case(what):
    """Whatever the answer raises inside is Wrong, and the message names the case: `what`."""
    try:
        yield
    except (Wrong, Skip, NotAttempted):
        raise
    except CheckError as difference:
        raise Wrong(str(difference)) from None
    except TimeUp as late:
        raise Wrong(f"{what}: {late}") from None
    except (Exception, SystemExit) as error:
        if is_stub(error):
            raise
        raise Wrong(f"{what}: {_raised(error)}") from None


@contextlib.contextmanager
def left_alone(at, **tensors):
    """Wrong, with its name, if a tensor, or one of a list, has other numbers afterwards."""
    lists = {n: t if isinstance(t, (list, tuple)) else [t] for n, t in tensors.items()}
    before = {name: [t.clone() for t in several] for name, several in lists.items()}
    yield
    for name, several in lists.items():
        same = all(t.allclose(b, 0, 0, equal_nan=True) for t, b in zip(several, before[name]))
        expect(same, f"{at}: {name} overwritten; leave what you are given as it is")


@contextlib.contextmanager
def hinting(after="", before=""):
    """Wrong raised inside has these words around its message."""
    try:
        yield
    except Wrong as difference:
        raise Wrong(f"{before}{difference}{after}") from None


def expect(condition, message):
    """Raise Wrong(message) unless `condition` holds."""
    if not condition:
        raise Wrong(message)


def expect_module_class(answer):
    """Wrong unless the answer is a class of modules."""
    expect(
        isinstance(answer, type) and issubclass(answer, torch.nn.Module),
        "give the class, a torch.nn.Module; the checker makes modules of it",
    )


def expect_kernel(answer):
    """Wrong unless the answer is a Triton kernel."""
    kinds = (JITFunction, InterpretedFunction)
    got = type(answer).__name__
    expect(isinstance(answer, kinds), f"give a kernel, a function under @triton.jit, got {got}")


def first_numbers(t, digits=3):
    """The first four numbers of a tensor as text, for a message."""
    numbers = ", ".join(f"{v:.{digits}g}" for v in t.flatten()[:4].tolist())
    return f"[{numbers}{', …' if t.numel() > 4 else ''}]"


def plural(n, noun):
    """n slots, or 1 slot, for a message."""
    return f"{n} {noun}{'s' * (n != 1)}"


def too_many_or_few(got, want):
    """How the count `got` is wrong, for a message that does not tell `want`."""
    if got != got:
        return "no number"
    return "too many" if got > want else "too few"


def expect_number(got, want, what, rel=1e-6):
    """Wrong unless the number `got` is `want`, within `rel`. The message does not tell `want`."""
    got = a_number(got, what)
    size = "large" if got > want else "small"
    expect(abs(got - want) <= rel * abs(want), f"{what}: {got:g} is too {size}")


def a_number(got, what):
    """`got` as a Python number, from NumPy or torch too; Wrong if it is none, or NaN."""
    got = plain(attempted(got))
    if isinstance(got, bool) or not isinstance(got, (int, float)):
        raise Wrong(f"{what}: should be a number, got {type(got).__name__}")
    expect(got == got, f"{what}: is NaN, should be a number")
    return got


def expect_second_derivative(function, eager, x):
    """Wrong unless a second derivative of function(x) equals eager's or raises a RuntimeError.

    x: a leaf with the shape of the results. Multiplying by it keeps a graph where `function` has none.
    """

    def second(version):
        (first,) = torch.autograd.grad((version(x) * x).sum(), x, create_graph=True)
        return torch.autograd.grad(first.square().sum(), x)[0]

    try:
        got = second(function)
    except RuntimeError:
        return
    try:
        torch.testing.assert_close(got, second(eager))
    except AssertionError as difference:
        message = " ".join(str(difference).split())
        why = (
            "a second derivative is wrong, and no error says so (that of PyTorch's once_differentiable lies in"
            " a node that autograd.grad(…, x) does not pass: see 23 · The second derivative in notebook 60)"
        )
        raise Wrong(f"{why}: {message}") from None


def expect_any_dy(answer, inputs, at):
    """Wrong unless the gradients are the same bits whatever layout the incoming one has in memory.

    answer(*inputs) is one tensor of two dimensions or more, whose gradient must come in a fixed order.
    """
    leaves = [t for t in inputs if isinstance(t, torch.Tensor) and t.requires_grad]
    with case(at):
        y = answer(*inputs)
        dy = torch.randn_like(y, memory_format=torch.contiguous_format)
        want = torch.autograd.grad(y, leaves, dy, retain_graph=True)
    for what, other in (
        ("transposed in memory", dy.mT.contiguous().mT),
        ("every other element of another tensor", torch.stack([dy, 7 * dy], -1)[..., 0]),
        ("the first columns of a wider tensor", torch.cat([dy, 7 * dy], -1)[..., : dy.shape[-1]]),
    ):
        with case(f"{at}, dy {what}"):
            got = torch.autograd.grad(y, leaves, other, retain_graph=True)
        same = all(torch.equal(a, b) for a, b in zip(got, want))
        expect(same, f"{at}: gradients differ where dy is {what}; mind its strides")


# From small to large, so that the first failure is the smallest one.
SHAPES = ((1, 1), (2, 3), (1, 8), (5, 7), (8, 8), (17, 33), (64, 128), (129, 781))


def expect_op(
    answer, eager, make_inputs, shapes=SHAPES, dtypes=(torch.float32, torch.bfloat16), what=""
):
    """Wrong, with the smallest failing shape, unless `answer` equals `eager` by the float64 rule.

    make_inputs(shape, dtype) -> the inputs; those with requires_grad have their gradients compared.
    what: what is special about them, ", dy transposed"; it ends the name of the case.
    """
    for shape in shapes:
        for dtype in dtypes:
            inputs = make_inputs(shape, dtype)
            at = f"at shape {tuple(shape)}, {str(dtype).removeprefix('torch.')}{what}"
            with case(at):
                if shape == shapes[0]:
                    attempted(answer(*make_inputs(shape, dtype)))
                compare(answer, eager, *inputs, name=at)


def not_rounded_once(got, exact, terms=0.0):
    """Which numbers of 16 bits are not those of `exact`, float64, rounded once.

    terms: the size of what was added up, of which float32 may lose some 2e-6.
    The float64 rule allows what eager loses, which rounds after each op. It judges NaN and infinities.
    """
    info, exact = torch.finfo(got.dtype), exact.detach().double()
    unit = info.eps * 2.0 ** exact.abs().clamp_min(info.smallest_normal).log2().floor()
    # beyond half a unit by more than float32 arithmetic explains
    off = (got.detach().double() - exact).abs() - 2e-6 * terms > 0.52 * unit
    return off & exact.isfinite() & got.isfinite()


def expect_rounded_once(got, exact, at, what="y", terms=0.0):
    """Wrong unless numbers of 16 bits are those of `exact`, float64, rounded once. terms: not_rounded_once."""
    off = not_rounded_once(got, exact, terms)
    expect(
        not off.any(),
        f"{at}: {int(off.sum())} of {off.numel()} elements of {what} were rounded more than once; compute in"
        " float32, and round at the end",
    )


def expect_launches(launch, exactly=None, at_least=1, what=""):
    """Wrong unless `launch()` launches that many Triton kernels, counted in the interpreter: small inputs.

    what: what launches them, "the backward pass "; the message begins with it.
    """
    count = count_traffic(launch).launches
    if exactly is not None:
        expect(count == exactly, f"{what}should launch {exactly} Triton kernel, launched {count}")
    few = f"{what}should launch {at_least} Triton kernel or more, launched {count}"
    expect(count >= at_least, few)


def far_apart(t):
    """The numbers of t, on the CPU, with 2**30 elements between those of its first dimension.

    Of the address space in between a few pages are touched. Raises MemoryError where a system counts them all.
    """
    try:
        storage = torch.empty((len(t) - 1) * 2**30 + t[0].numel(), dtype=t.dtype)
    except RuntimeError as error:
        raise MemoryError(str(error)) from error
    return storage.as_strided(t.shape, (2**30, *t[0].stride())).copy_(t)


# --- progress ------------------------------------------------------------------------------------------


def progress():
    """{id: 'right' or 'wrong'} from the reader's progress; once right stays right."""
    statuses = {}
    for line in reader_progress.read_lines(PROGRESS):
        entry = json.loads(line)
        id = entry["id"] if "version" in entry else FORMER.get(entry["id"], entry["id"])
        if statuses.get(id) != "right":
            statuses[id] = entry["status"]
    statuses.pop(None, None)
    return statuses
