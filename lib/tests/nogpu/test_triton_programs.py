"""Triton programs as others write them: each planted mistake is found, most in their line; right ones pass."""

import inspect
import linecache

from lib import machine
from lib.nogpu.memory import OutOfBounds
from lib.nogpu.races import races
from lib.nogpu.turns import WaitsForever
from lib.tests.nogpu import triton_programs
from lib.tests.nogpu.triton_programs import PLANTED, RIGHT

import pytest
import torch

pytestmark = pytest.mark.skipif(machine.HAS_GPU, reason="about the interpreter: make test runs it")

# What the interpreter raises: the error, and words of its message.
RAISED = {
    "wrong_row_length_of_a_matrix_in_a_table": (
        OutOfBounds,
        r"a tensor of shape \(33, 17\) at element",
    ),
    "table_of_temporaries": (OutOfBounds, "no living tensor is"),
    "lock_released_on_one_path": (WaitsForever, "element 0 of lock_ptr, which is 1, again"),
    "wrong_lock_released": (WaitsForever, "element 0 of lock_ptr, which is 1, again"),
    "stream_k_flag_that_nobody_sets": (WaitsForever, "element 1 of flag_ptr, which is 0, again"),
    "block_pointer_without_boundary_check": (OutOfBounds, "load from b_ptr at element 1200"),
    "descriptor_of_too_many_rows": (OutOfBounds, "load from b_ptr at element 768"),
    "no_mask_at_the_end": (OutOfBounds, "load from x_ptr at element 100"),
    "bias_that_is_none": (TypeError, "bias_ptr is None, and the kernel computes with it in .*HERE"),
    "row_times_stride_wraps": (
        OutOfBounds,
        r"x_ptr at element -2147483648, .* HERE.*passed 2\*\*31",
    ),
    "scale_of_the_next_group": (OutOfBounds, "load from scale_ptr at element 18"),
}
# What races() says.
RACES = {
    "count_read_before_the_lock": "updates atomically element 2 of lock_ptr, program 2 loads it",
    "persistent_programs_share_tiles": "stores element 768 of c_ptr, program 3 stores it",
    "split_k_without_atomics": "element 0 of c_ptr",
    "sum_without_atomics": "element 0 of y_ptr",
    "last_program_by_a_relaxed_counter": "stores element 0 of part_ptr, program 6 loads it",
    "scan_without_flags": "stores element 15 of y_ptr, program 1 loads it",
    "histogram_without_atomics": "element 0 of y_ptr",
    "shift_in_place": "loads element 16 of x_ptr, program 1 stores it",
}
SILENT = {"dropout_the_same_in_every_program"}  # no rule is broken, but the answer is wrong


def test_every_planted_mistake_is_listed():
    assert set(PLANTED) <= {*RAISED, *RACES, *SILENT}
    assert (len({*RAISED, *RACES, *SILENT}), len(RIGHT) >= 14) == (20, True)


@pytest.mark.parametrize("name", [name for name in RAISED if name in PLANTED])
def test_a_planted_mistake_is_an_error_in_its_line(name):
    kind, words = RAISED[name]
    with pytest.raises(kind, match=words) as caught:
        PLANTED[name]()
    if kind is not TypeError:  # which names the line itself
        path = inspect.getfile(triton_programs)
        (*_, last) = [entry.lineno + 1 for entry in caught.traceback if str(entry.path) == path]
        assert "# HERE" in linecache.getline(path, last)


@pytest.mark.parametrize("name", RACES)
def test_a_planted_race_is_a_sentence(name):
    sentences = races(PLANTED[name])
    assert any(RACES[name] in sentence for sentence in sentences), sentences


@pytest.mark.parametrize("name", SILENT)
def test_a_mistake_that_no_rule_forbids_shows_in_the_answer(name):
    result, truth = PLANTED[name]()
    assert not torch.equal(result, truth)
    assert races(PLANTED[name]) == []


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_program_runs_right_and_is_let_alone(name):
    results = []
    assert races(lambda: results.append(RIGHT[name]())) == []
    (result, truth), *_ = results
    torch.testing.assert_close(result, truth, rtol=1e-4, atol=1e-4)
