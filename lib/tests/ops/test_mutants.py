"""Every mutant of every op is killed, and the op itself is not."""

from lib import machine
from lib.measure import registry
from lib.measure.mutants import Mutant
from lib.tests.ops.mutants import (
    NAMES,
    checks_of,
    killers,
    load,
    mutants_of,
    source_of,
    what_kills,
)

import pytest

needs_the_interpreter = pytest.mark.skipif(machine.HAS_GPU, reason="a mutant may write anywhere")
MUTANTS = [
    pytest.param(name, mutant, id=f"{name}, {mutant.why}")
    for name in NAMES
    for mutant in mutants_of(name)
]


def test_every_op_has_mutants():
    assert set(NAMES) == set(registry.OPS)


@pytest.mark.parametrize("name", NAMES)
def test_at_least_eight_that_differ(name):
    sources = {source_of(name, mutant) for mutant in mutants_of(name)} | {source_of(name)}
    assert len(sources) == len(mutants_of(name)) + 1 >= 9


@needs_the_interpreter
@pytest.mark.parametrize("name", NAMES)
def test_the_op_itself_passes(name):
    """What killed mutants spares the op, loaded as they are: it is their mistakes that were found."""
    checks = set(killers()[name].values()) - {"loading"}
    known = {where for where, _ in checks_of(name, load(name))}
    assert checks <= known, f"gone, or renamed: {checks - known}; run mutants with --write"
    assert what_kills(name, only=checks) is None


@needs_the_interpreter
@pytest.mark.parametrize(("name", "mutant"), MUTANTS)
def test_killed(name, mutant):
    assert what_kills(name, mutant), f"alive: {mutant.why}"


def test_a_mutant_that_no_longer_fits_says_so():
    with pytest.raises(ValueError, match="occurs 0 times"):
        source_of("add_relu", Mutant("no such line", "", "nothing"))


@needs_the_interpreter
def test_a_harmless_change_is_alive():
    old, new = "# One 16-byte load in each of 128 threads;", "# another comment;"
    assert what_kills("add_relu", Mutant(old, new, "no mistake")) is None
