"""Exercises: `check("30.2", my_answer)` shows a verdict and saves the reader's progress.

    ✔  right
    ✘  wrong: what differs, at the smallest shape that shows it
    ○  not attempted yet (the stub is still there)
    –  skipped: this machine lacks something, which is named

A verdict never raises, so an open exercise does not stop Run All. One module per notebook holds its exercises
(lib/exercises/nb30.py for notebook 30); solutions are in notebooks/solutions.
"""

import contextlib
import dataclasses
import datetime
import importlib
import json
import pkgutil
from collections.abc import Callable

from lib.course import progress as reader_progress
from lib.measure.check import CheckError, check_against_float64
from lib.nogpu.memory import count_traffic

import torch

PROGRESS = "progress.jsonl"
MARKS = {"right": "✔", "wrong": "✘", "open": "○", "skipped": "–"}


class Wrong(Exception):
    """Raised by a checker: the answer is wrong, and the message says where."""


class Skip(Exception):
    """Raised by a checker: this machine lacks something; the message says what."""


class NotAttempted(Exception):
    """Raised when the answer is still the stub: it returned None or `...`."""


@dataclasses.dataclass(frozen=True)
class Exercise:
    """id: '30.2'; level 1 to 3; checker(answer) returns when right, raises Wrong, Skip or NotAttempted."""

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
    """The Verdict on `answer` to exercise `id`, saved in the reader's progress. ValueError: unknown id."""
    if id not in all_exercises():
        raise ValueError(f"there is no exercise {id!r}; there are: {', '.join(_exercises)}")
    verdict = _judge(_exercises[id], answer)
    if verdict.status in ("right", "wrong"):
        today = datetime.date.today().isoformat()
        reader_progress.append(
            PROGRESS, json.dumps({"id": id, "status": verdict.status, "date": today})
        )
    return verdict


def _judge(exercise, answer):
    try:
        if answer is None or answer is ...:
            raise NotAttempted
        exercise.checker(answer)
    except NotAttempted as why:
        return Verdict(exercise.id, "open", f"not attempted yet{why}")
    except Skip as reason:
        return Verdict(exercise.id, "skipped", f"skipped: {reason}")
    except (Wrong, CheckError) as difference:
        return Verdict(exercise.id, "wrong", str(difference))
    except Exception as error:  # the reader's code may raise anything; the verdict shows it
        if is_stub(error):
            return Verdict(exercise.id, "open", "not attempted yet")
        return Verdict(exercise.id, "wrong", _raised(error))
    return Verdict(exercise.id, "right", "right")


def is_stub(error):
    """Whether a stub raised this, without a word. torch raises NotImplementedError too, and says why."""
    return isinstance(error, NotImplementedError) and not str(error)


def _raised(error):
    says = str(error).partition("\n\nfrom user code")[0][:400]  # Dynamo adds a page on itself
    return f"raised {type(error).__name__}: {says}"


# --- helpers for checkers ------------------------------------------------------------------------------


def attempted(value):
    """`value`, or NotAttempted when it is what a stub returns: None or `...`."""
    if value is None:
        raise NotAttempted(", or its `return` is missing: it returns None")
    if value is ...:
        raise NotAttempted
    return value


@contextlib.contextmanager
def case(what):
    """Whatever the answer raises inside is Wrong, and the message names the case: `what`."""
    try:
        yield
    except (Wrong, Skip, NotAttempted):
        raise
    except CheckError as difference:
        raise Wrong(str(difference)) from None
    except Exception as error:
        if is_stub(error):
            raise
        raise Wrong(f"{what}: {_raised(error)}") from None


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


def first_numbers(t, digits=3):
    """The first four numbers of a tensor as text, for a message."""
    numbers = ", ".join(f"{v:.{digits}g}" for v in t.flatten()[:4].tolist())
    return f"[{numbers}{', …' if t.numel() > 4 else ''}]"


def plural(n, noun):
    """n slots, or 1 slot, for a message."""
    return f"{n} {noun}{'s' * (n != 1)}"


def too_many_or_few(got, want):
    """How the count `got` is wrong, for a message that does not tell `want`."""
    return "too many" if got > want else "too few"


def expect_number(got, want, what, rel=1e-6):
    """Wrong unless the number `got` is `want`, within `rel`. The message does not tell `want`."""
    attempted(got)
    if isinstance(got, bool) or not isinstance(got, (int, float)):
        raise Wrong(f"{what}: should be a number, got {type(got).__name__}")
    size = "large" if got > want else "small"
    expect(abs(got - want) <= rel * abs(want), f"{what}: {got:g} is too {size}")


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
        raise Wrong(f"a second derivative is wrong, and no error says so: {message}") from None


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
                check_against_float64(answer, eager, *inputs, name=at)


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
        if statuses.get(entry["id"]) != "right":
            statuses[entry["id"]] = entry["status"]
    return statuses
