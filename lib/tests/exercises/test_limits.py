"""Answers that no checker expects: they end in a verdict, too."""

import contextlib
import sys
import threading
import time

from lib import exercises
from lib.exercises import Exercise, check, expect_op, limits
from lib.tests.exercises.test_exercises import EXERCISES, _solution

import pytest
import torch


@pytest.fixture
def judged(monkeypatch):
    """judged(checker) is a check of an exercise with that checker."""

    def judge(checker, answer=1):
        monkeypatch.setitem(exercises._exercises, "99.1", Exercise("99.1", "t", 1, 1, checker))
        return check("99.1", answer)

    return judge


def _for_ever(*_):
    while True:
        pass


def _in_spite_of_exceptions(*_):
    while True:
        with contextlib.suppress(Exception):
            _for_ever()


def _sleeps(*_):
    time.sleep(60)


def _waits(*_):
    threading.Event().wait(60)


@pytest.mark.parametrize("answer", [_for_ever, _in_spite_of_exceptions, _sleeps, _waits])
def test_an_answer_that_does_not_end_is_stopped(answer, judged, monkeypatch):
    monkeypatch.setattr(limits, "BUSY_S", 0.1)
    monkeypatch.setattr(limits, "WAITING_S", 0.2)
    monkeypatch.setattr(limits, "LOOK_S", 0.05)

    def checker(answer):
        with exercises.case("n = 3"):
            answer()

    verdict = judged(checker, answer)
    assert verdict.status == "wrong"
    assert verdict.message.startswith("n = 3: still running after")
    assert judged(answer, 1).message.startswith("still running after")
    time.sleep(0.1)  # no alarm comes later


def test_ranks_that_do_not_end_are_stopped(monkeypatch):
    monkeypatch.setattr(limits, "BUSY_S", 0.2)
    monkeypatch.setattr(limits, "WAITING_S", 0.2)
    monkeypatch.setattr(limits, "LOOK_S", 0.05)
    before = len(sys._current_frames())
    assert "still running after" in check("53.3", _for_ever).message
    time.sleep(0.2)
    assert len(sys._current_frames()) == before
    message = check("53.3", lambda *_: exit()).message
    assert message.endswith("asked for [[2, 0]]: raised SystemExit: None")


def test_an_answer_that_leaves_python_is_wrong(judged):
    def checker(answer):
        with exercises.case("n = 3"):
            raise SystemExit(2)

    assert repr(judged(checker)) == "✘ 99.1 n = 3: raised SystemExit: 2"
    assert repr(judged(lambda _: exit())) == "✘ 99.1 raised SystemExit: None"


def test_a_reader_may_interrupt(judged):
    def checker(answer):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        judged(checker)


def test_what_an_answer_prints_is_shown_up_to_a_length(judged, capsys):
    def checker(answer):
        print("hello")
        for _ in range(100):
            print("x" * 100_000)

    assert judged(checker).status == "right"
    shown = capsys.readouterr().out
    assert shown.startswith("hello\nxxx") and len(shown) < 1.1 * limits.MOST_PRINTED
    assert shown.count("prints more than is shown") == 1


def test_a_verdict_is_one_line_of_bounded_length(judged):
    def checker(answer):
        raise exercises.Wrong("a\n  b " + "c" * 10**6)

    verdict = judged(checker)
    assert verdict.message.startswith("a b ccc") and len(verdict.message) < 2000


def test_an_error_without_a_text_has_a_verdict_too(judged):
    class Mute(Exception):
        def __str__(self):
            raise RuntimeError

    def checker(answer):
        raise Mute

    assert repr(judged(checker)) == "✘ 99.1 raised Mute: (it has no text)"


def test_after_an_illegal_access_the_kernel_has_to_restart(judged):
    def checker(answer):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    assert "memory that is not its own; restart the kernel" in judged(checker).message


# --- results of another kind ---------------------------------------------------------------------------


def _each(change, result):
    """`change` of each tensor and number of a result."""
    if isinstance(result, (tuple, list)):
        return type(result)(_each(change, part) for part in result)
    if isinstance(result, (int, float)) and not isinstance(result, bool):
        result = torch.tensor(result, dtype=torch.float64)
    return change(result) if isinstance(result, torch.Tensor) else result


_KINDS = {
    "numpy": lambda t: t.detach().float().cpu().numpy(),
    "a list": torch.Tensor.tolist,
    "meta": lambda t: t.to("meta"),
    "sparse": torch.Tensor.to_sparse,
    "complex": lambda t: t.to(torch.complex64),
}


def _returns_tensors(id):
    return id in ("00.3", "10.4", "11.2", "31.3", "34.2", "35.1", "41.4", "43.1", "48.2", "53.3")


@pytest.mark.parametrize("id", filter(_returns_tensors, EXERCISES))
def test_a_result_of_another_kind_is_named(id):
    solution = _solution(id)
    for kind, change in _KINDS.items():
        verdict = check(id, lambda *args, f=change: _each(f, solution(*args)))
        assert verdict.status == "wrong", (kind, verdict)
        assert "raised" not in verdict.message, (kind, verdict)


@pytest.mark.parametrize("id", ["00.1", "00.2", "02.3", "10.1", "10.3", "40.1", "41.1", "43.2"])
def test_numbers_may_be_numpys_or_torchs(id):
    solution = _solution(id)
    for change in (lambda t: t, lambda t: t.numpy()[()]):
        verdict = check(id, lambda *args, f=change: _each_number(f, solution(*args)))
        assert verdict.status == "right", verdict


def _each_number(change, result):
    if isinstance(result, (tuple, list)):
        return type(result)(_each_number(change, part) for part in result)
    if isinstance(result, int):
        return change(torch.tensor(int(result)))
    return change(torch.tensor(result, dtype=torch.float64))


def test_nan_is_no_number():
    verdict = check("00.1", lambda *_: float("nan"))
    assert verdict.message.endswith("is NaN, should be a number")


def test_a_tuple_of_one_tensor_is_no_tensor():
    with pytest.raises(exercises.Wrong, match="should return a tensor, returns a tuple"):
        expect_op(lambda x: (x + 1,), lambda x: x + 1, lambda s, d: (torch.randn(s, dtype=d),))


@pytest.mark.parametrize("id", ["11.3", "11.4", "12.4", "05.4", "51.4"])
def test_a_module_in_place_of_its_class_is_named(id):
    assert check(id, torch.nn.Linear(1, 1)).message.startswith("give the class")


@pytest.mark.parametrize("id", ["22.3", "22.2", "32.2", "32.3"])
def test_a_function_in_place_of_a_kernel_is_named(id):
    assert check(id, lambda *_: None).message == (
        "give a kernel, a function under @triton.jit, got function"
    )
