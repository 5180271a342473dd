"""Notebook 90: what its checks catch, and what its ladder shows for a missing or wrong version."""

from lib import machine
from lib.exercises import nb90
from lib.measure import registry

import pytest
import torch

COURSE = registry.find("add_rms_norm").versions["triton"]


def test_the_cases_of_the_checks_catch_every_mistake():
    missed = [mistake for mistake, caught in nb90.caught_by(nb90.CASES).items() if not caught]
    assert not missed


def test_no_case_alone_catches_what_the_bar_asks_for():
    for case in nb90.CASES:
        assert sum(nb90.caught_by([case]).values()) <= 12, case


@pytest.mark.parametrize("special", nb90.SPECIALS, ids=str)
@pytest.mark.parametrize("dtype", nb90.DTYPES, ids=str)
def test_a_right_version_passes_any_case(special, dtype):
    shapes = ((1,), (5, 7), (2, 3, 40), (70, 300))
    shapes += () if special in ("zeros", "nan", "inf") else ((0, 5), (5, 0))
    for shape in shapes:
        case = (shape, dtype, special)
        nb90._expect_case(case)
        nb90.check_case(nb90.version_with(), case, device="cpu")


@pytest.mark.parametrize("case", nb90.CASES, ids=nb90._at)
def test_the_courses_own_version_passes_the_cases(case):
    nb90.check_case(COURSE, case)


def test_a_case_shows_the_same_each_time():
    case = ((600, 9), torch.bfloat16, "y only")
    version, state = nb90.version_with("narrow dweight"), torch.random.get_rng_state()
    texts = set()
    for _ in range(3):
        with pytest.raises(AssertionError) as raised:
            nb90.check_case(version, case, device="cpu")
        texts.add(str(raised.value))
    assert len(texts) == 1
    assert torch.equal(
        torch.random.get_rng_state(), state
    )  # the reader's random numbers are not affected


@pytest.mark.skipif(machine.HAS_GPU, reason="without a GPU the ladder is checked and not timed")
def test_a_rung_without_a_right_version_has_no_time_and_says_why():
    def stub(x, residual, weight, eps=1e-6):
        raise NotImplementedError

    def broken(x, residual, weight, eps=1e-6):
        return x.no_such_thing

    rungs = {"stub": stub, "none": None, "broken": broken, "your_own": COURSE}
    table = nb90.ladder(gradients=True, wrong=nb90.version_with("no dh"), **rungs)
    notes = dict(zip(table.version, table.note))
    assert notes["stub"] == notes["none"] == "○ not attempted yet"
    assert "AttributeError" in notes["broken"] and "differ by more" in notes["wrong"]
    assert "checked here" in notes["your own"] and "the course's" in notes
