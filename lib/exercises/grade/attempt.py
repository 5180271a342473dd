"""Inside the fence: run the cells that an answer needs, check the answer, report the verdict under a key."""

import ast
import contextlib
import functools
import json
import os
import re
import secrets
import sys
import tempfile
import types

from lib.exercises import Verdict, judge, plain
from lib.exercises.grade import notebooks

import torch
from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config

# Exercises whose answer is assigned and has no text that Python reads back: functions, kernels, dtypes, inf.
OBJECTS = {"06.1", "22.5", "25.3", "07.2", "32.2", "32.3", "41.2", "08.2", "08.3", "90.1"}
_MODULES = (
    "builtins", "json", "os", "torch", "torch.testing", "torch.autograd", "numpy", "numpy.testing",
    "triton.runtime.interpreter", "triton.runtime.jit", "unittest.mock", "contextlib",
)  # fmt: skip


def settle(scratch):
    """Files go to scratch, and of the grader's environment little but the path stays."""
    for name in set(os.environ) - {"PATH", "LANG", "LC_ALL"}:
        del os.environ[name]
    folders = (
        "HOME",
        "TMPDIR",
        "FUSED_KERNELS_CACHE",
        "TRITON_CACHE_DIR",
        "TORCHINDUCTOR_CACHE_DIR",
    )
    os.environ.update(dict.fromkeys((*folders, "IPYTHONDIR", "MPLCONFIGDIR"), str(scratch)))
    os.environ.update(FUSED_KERNELS_READER="/dev/null/reader", CUDA_ON_CPU_CHECKED="1")
    os.environ.update(TRITON_INTERPRET="1", OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="")
    tempfile.tempdir = None


@functools.cache
def values():
    """The exercises whose answer is a value, such as a number, a text or a tuple, and no function or class."""
    given = {id: page for page in notebooks.pages().values() for id in page.exercises}
    assigned = (
        id for id, page in given.items() if _is_assigned(page.source_of(id), page.answer_of(id))
    )
    return frozenset(assigned) - OBJECTS


def _is_assigned(source, name):
    return re.search(rf"(?m)^{name} = ", source)


def reporter(pipe):
    """report(**what) writes a line under a key, which was told before any code of a student ran."""
    write, key = os.write, secrets.token_hex(16)
    write(pipe, f"{key}\n".encode())

    def report(**what):
        write(pipe, f"{key} {json.dumps(what)}\n".encode())

    return report


def attempt(exercise, sources, name, report):
    """Run `sources`, the last of which is the answer's cell, and report the verdict, or the answer's value.

    name: of the answer, for a cell that does not give it to `check`.
    """
    before, run = sealed(exercise), _shell(notebooks.base(exercise.id), name)
    for source in sources[:-1]:
        run(source)
    error, answer = run(sources[-1])
    if error is not None:
        return report(status="wrong", message=_failed(error))
    if exercise.id in values():
        return report(value=repr(_plain(answer)))
    return _judge(exercise, answer, before, report)


def attempt_value(exercise, text, report):
    """Check an answer that came as the text of a value."""
    try:
        answer = ast.literal_eval(text)
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        message = (
            "should be a plain value: numbers and texts, in tuples, lists, dictionaries or sets"
        )
        return report(status="wrong", message=message)
    return _judge(exercise, answer, sealed(exercise), report)


def _judge(exercise, answer, before, report):
    torch.manual_seed(0)
    verdict = judge(exercise, answer)
    now = sealed(exercise)
    changed = sorted(name for name, seal in before.items() if now.get(name) != seal)
    if changed:
        message = f"not graded: the answer replaces {', '.join(changed[:3])}"
        verdict = Verdict(exercise.id, "wrong", message)
    return report(status=verdict.status, message=_with_hint(verdict.message))


def _plain(answer):
    """An answer without types of NumPy and torch."""
    if isinstance(answer, dict):
        return {key: plain(value) for key, value in answer.items()}
    if isinstance(answer, (set, frozenset)):
        return set(map(plain, answer))
    return plain(answer)


def sealed(exercise):
    """{name: which object} of what the check is made of: another object is a check that was replaced."""
    owners = {m: sys.modules[m] for m in list(sys.modules) if m.startswith("lib.") or m in _MODULES}
    classes = (
        v for m, owner in owners.items() if m.startswith("lib.") for v in vars(owner).values()
    )
    owners |= {f"{c.__module__}.{c.__qualname__}": c for c in classes if isinstance(c, type)}
    owners["torch.Tensor"] = torch.Tensor
    seals = {"the check": (id(exercise.checker), id(exercise.checker.__code__))}
    for owner, module in owners.items():
        for name, value in list(vars(module).items()):
            if callable(value):
                code = value.__code__ if isinstance(value, types.FunctionType) else None
                seals[f"{owner}.{name}"] = (id(value), id(code))
    return seals


# --- running cells ------------------------------------------------------------------------------------


class _Answer(ast.NodeTransformer):
    """Instead of calling `check("03.2", answer)` at the top of a cell, keep what the answer is."""

    def __init__(self, id, name):
        self.id, self.name = id, name

    def visit_Module(self, module):
        module.body = [self._without_check(statement) for statement in module.body]
        return ast.fix_missing_locations(module)

    def _without_check(self, statement):
        match statement:
            case ast.Expr(ast.Call(ast.Name("check"), [ast.Constant(id), answer])):
                targets = [ast.Name(self.name if id == self.id else "_", ast.Store())]
                return ast.copy_location(ast.Assign(targets, answer), statement)
        return statement


def _shell(id, name):
    """run(source) runs a cell as a notebook does; (the error before an answer, or None; the answer)."""
    namespace, given = {"check": lambda *_: None}, "_the_answer"
    config = Config({"HistoryManager": {"enabled": False}})
    shell = InteractiveShell(user_ns=namespace, config=config)
    shell.ast_transformers.append(_Answer(id, given))

    def run(source):
        namespace.pop(given, None)
        result = shell.run_cell(source)
        if given in namespace:  # what comes below `check` is of no concern
            return None, namespace[given]
        return result.error_before_exec or result.error_in_exec, namespace.get(name)

    return run


def _failed(error):
    text = "(it has no text)"
    with contextlib.suppress(Exception):
        text = " ".join(str(error).split())[:400]
    return _with_hint(f"the cell raises {type(error).__name__}: {text}")


def _with_hint(message):
    if "NameError: " not in message:
        return message
    return (
        f"{message}; of a submission only the cells of answers run, so a helper has to stand in one"
    )
