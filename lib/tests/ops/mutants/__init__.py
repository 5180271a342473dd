"""Would the tests notice? Ops with one mistake written into them, each of which the tests have to find.

    python -m lib.tests.ops.mutants [op] [--jobs 2] [--write]

says of each mutant what killed it, or that it is alive; --write keeps that in killers.json, and next time this
check comes first: a mutant costs seconds then instead of minutes.

A mutant is a piece of an op's file, or of one that it shares, and what to put in its place. What `make copy`
writes of the op is loaded with the mistake, under another name. It goes through the battery, and through the
tests of lib/tests/ops/test_<op>.py that ask for the fixture `module`: what only this op has to get right. To
add mutants: a file here, named as the op, with MUTANTS like a diff. Runs in the interpreter; on a GPU a mutant
might write anywhere.
"""

import dataclasses
import functools
import importlib
import inspect
import itertools
import json
import re
import warnings
from pathlib import Path

from lib.measure import registry
from lib.measure.mutants import load as load_text
from lib.measure.mutants import mutated
from lib.standalone import read, standalone
from lib.tests.ops import battery, watched
from lib.tests.ops.property import any_call

import pytest
import torch

FOLDER = Path(__file__).parent
NAMES = sorted(path.stem for path in FOLDER.glob("[a-z]*.py"))
KILLERS = FOLDER / "killers.json"  # {op: {why: the check that killed it}}


def mutants_of(name):
    """The mutants of the op `name`; ValueError if there are none."""
    if name not in NAMES:
        raise ValueError(f"there are no mutants of {name!r}; there are of: {', '.join(NAMES)}")
    return importlib.import_module(f"{__name__}.{name}").MUTANTS


# --- loading -----------------------------------------------------------------------------------------------


def source_of(name, mutant=None):
    """What `make copy` writes of an op with the mistake in it."""
    stem = name if mutant is None or mutant.old in read(name) else shared_file(mutant)

    def mutated_file(file):
        return mutated(read(file), mutant) if mutant and file == stem else read(file)

    return standalone(name, mutated_file)


def shared_file(mutant):
    """The stem of the shared file that has what the mutant changes."""
    stems = "_device", "_gluon", "_linear_glu_gluon", "_attention_gluon", "_attention_bwd_gluon"
    return next((stem for stem in stems if mutant.old in read(stem)), "_host")


_numbers = itertools.count()


def load(name, mutant=None):
    """The module of an op with the mistake in it, and with a torch.library namespace of its own."""
    namespace = f'"fused_kernels_mutant_{next(_numbers)}::'
    return load_text(name, source_of(name, mutant).replace('"fused_kernels::', namespace))


def with_module(op, module):
    """The Op of the registry with all but the definition taken from `module`: versions and registered ops."""

    def taken(versions):
        return {n: getattr(module, v.__name__) for n, v in versions.items() if "triton" in n}

    by_name = {getattr(value, "_name", None): value for value in vars(module).values()}

    def taken_ops(registered):
        return tuple(by_name[function._name] for function in registered)

    return dataclasses.replace(
        op,
        versions=taken(op.versions),
        in_place=taken(op.in_place),
        registered=taken_ops(op.registered),
        mutating=taken_ops(op.mutating),
    )


# --- what a mutant goes through ------------------------------------------------------------------------------


def checks_of(name, module):
    """(label, function without arguments) of every check, the cheap ones first: most mutants die at once."""
    op = with_module(registry.find(name), module)
    configured = op.all_configured()
    first = next(iter(configured.values()))
    planned = {f"plan {label}": first.planned(label) for label in first.plans}
    yield from _battery([battery.values, battery.specials], configured | planned)
    yield from _special(name, module)
    elsewhere = battery.values, battery.specials, battery.second_derivative
    others = [c for c in battery.VALUES + battery.AUTOGRAD if c not in elsewhere]
    yield from _battery(
        [*others, battery.far_apart, battery.bad_input, battery.registered], {"": first}
    )
    yield from _battery(
        [battery.far_out, battery.gradients_one_by_one, battery.gradient_layouts],
        configured | planned,
    )
    yield from _battery([battery.exact, battery.second_derivative], configured)
    yield from _battery([any_call], {"": first} | planned)
    for check in (watched.bits, watched.policy, watched.refused):
        yield check.__name__, functools.partial(check, first, first.versions["triton"])


def _battery(checks, ops):
    for check, (label, op) in itertools.product(checks, ops.items()):
        for version_name, version in op.all_versions().items():
            where = " ".join(filter(None, (check.__name__, label, version_name)))
            yield where, functools.partial(check, op, version)


def _special(name, module):
    """The op's own tests that take a module, with all their parameters."""
    others = {"add_relu": ["test_host"], "attention": ["test_attention_bwd_gluon"]}
    stems = f"test_{name}", *others.get(name, [])
    modules = [importlib.import_module(f"lib.tests.ops.{stem}") for stem in stems]
    for test_name, test in [pair for tests in modules for pair in vars(tests).items()]:
        if not test_name.startswith("test_") or "module" not in inspect.signature(test).parameters:
            continue
        marks = getattr(test, "pytestmark", [])
        if any(mark.name == "gpu" for mark in marks):
            continue
        sets = [_arguments(mark) for mark in marks if mark.name == "parametrize"]
        for chosen in itertools.product(*sets):
            arguments = {key: value for part in chosen for key, value in part.items()}
            if missing := inspect.signature(test).parameters.keys() - arguments - {"module"}:
                raise TypeError(
                    f"{test_name} asks for {missing}; mutants know no fixture but `module`"
                )
            # without addresses: the same label in each process
            where = re.sub(r" at 0x\w+", "", f"{test_name} {arguments or ''}".strip())
            yield where, functools.partial(test, module=module, **arguments)


def _arguments(mark):
    """[{name: value}] of one parametrize mark."""
    names, values, *_ = mark.args
    names = [n.strip() for n in names.split(",")] if isinstance(names, str) else list(names)
    values = [getattr(v, "values", v) if not isinstance(v, dict) else v for v in values]
    return [dict(zip(names, v if len(names) > 1 or _is_set(v, names) else [v])) for v in values]


def _is_set(value, names):
    """Whether pytest.param(...) wrapped a single value."""
    return len(names) == 1 and isinstance(value, tuple) and type(value) is tuple and len(value) == 1


def what_kills(name, mutant=None, only=None):
    """The first check that fails and its message, "check | message"; None: alive. Without a mutant, the op.

    only: labels of the checks to run, in place of all.
    """
    source_of(name, mutant)  # raises where the mutant no longer fits the file
    try:
        module = load(name, mutant)
    except Exception as error:
        return f"loading | {type(error).__name__}: {error}"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        known = killers().get(name, {}).get(getattr(mutant, "why", None))
        for where, check in sorted(checks_of(name, module), key=lambda pair: pair[0] != known):
            if only is not None and where not in only:
                continue
            torch.manual_seed(0)
            try:
                check()
            except pytest.skip.Exception:
                continue
            except (Exception, pytest.fail.Exception) as error:
                message = (str(error).strip().splitlines() or [""])[0]
                return f"{where} | {type(error).__name__}: {message}"
    return None


@functools.cache
def killers():
    """What KILLERS holds."""
    return json.loads(KILLERS.read_text()) if KILLERS.exists() else {}
