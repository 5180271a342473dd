"""The plain events: their form, and what is asked of them, on lists written by hand."""

from lib.profiling import events as ev
from lib.tests.profiling.profiles import event, gpu_step, step

import pytest
from hypothesis import given
from hypothesis import strategies as st


@pytest.mark.parametrize(
    ("bad", "error", "told"),
    [
        (None, TypeError, "list of dictionaries, got NoneType; call events_of"),
        ([1], TypeError, "list of dictionaries"),
        ([], ValueError, "one event of kind 'step', got 0"),
        ([step(), step()], ValueError, "got 2"),
        ([step(), {"kind": "nap"}], ValueError, "'nap' of an event is none of step, region"),
        ([step(), {}], ValueError, "None of an event is none of"),
        ([step(), event("kernel", 5, 4)], ValueError, "ends before it starts"),
        ([step(), event("kernel", float("nan"), 4)], ValueError, "ends before it starts"),
        ([step(), event("kernel", "0", 4)], TypeError, "numbers, in µs"),
        ([step(), {"kind": "copy", "name": "c", "start_us": 0, "end_us": 1}], ValueError, "stream"),
    ],
)
def test_a_list_that_is_none_is_refused(bad, error, told):
    with pytest.raises(error, match=told):
        ev.checked(bad)


def test_a_good_list_is_given_back():
    events = gpu_step()
    assert ev.checked(events, whole=True) is events


@pytest.mark.parametrize(
    ("intervals", "joined"),
    [
        ([], []),
        ([(0, 3), (2, 5)], [(0, 5)]),
        ([(0, 3), (3, 5)], [(0, 5)]),
        ([(4, 5), (0, 3)], [(0, 3), (4, 5)]),
        ([(0, 9), (1, 2), (3, 4)], [(0, 9)]),
        ([(1, 1)], [(1, 1)]),
    ],
)
def test_merged(intervals, joined):
    assert ev.merged(intervals) == joined


def test_merged_refuses_an_interval_backwards():
    with pytest.raises(ValueError, match="ends before it starts"):
        ev.merged([(2, 1)])


intervals = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 9)), max_size=12)


@given(intervals)
def test_merged_covers_the_same_points(starts_and_lengths):
    given_ = [(start, start + length) for start, length in starts_and_lengths]
    joined = ev.merged(given_)
    covered = {k for start, end in given_ for k in range(start, end)}
    assert {k for start, end in joined for k in range(start, end)} == covered
    assert all(a[1] < b[0] for a, b in zip(joined, joined[1:]))


@given(intervals)
def test_busy_and_gaps_make_up_the_wall_time(starts_and_lengths):
    kernels = [event("kernel", s, s + n, stream=s % 2) for s, n in starts_and_lengths]
    events = [step(30), *kernels]
    idle = sum(end - start for start, end in ev.gaps(events))
    assert ev.busy_us(events) + idle == pytest.approx(ev.wall_us(events))


def test_a_step_lasts_until_host_and_device_are_done():
    events = gpu_step()
    assert ev.wall_us(events) == 110
    assert ev.busy_us(events) == 10 + 1 + 50
    assert ev.gaps(events) == [(0, 8), (18, 21), (22, 60)]


def test_two_kernels_at_once_count_once():
    events = [step(), event("kernel", 0, 60, stream=7), event("kernel", 40, 80, stream=8)]
    assert ev.busy_us(events) == 80
    assert ev.gaps(events) == [(80, 100)]


def test_no_device():
    events = [step(), event("op", 0, 5, "aten::mul")]
    assert not ev.has_device(events)
    assert ev.busy_us(events) == 0
    assert ev.wall_us(events) == 100


def test_a_gpu_that_had_nothing_to_do_is_a_device():
    events = [step(), event("runtime", 101, 102, "cudaDeviceSynchronize")]
    assert ev.has_device(events)
    assert ev.gaps(events) == [(0, 100)]


def test_the_wait_of_the_profiler_is_none_of_the_step():
    assert [e["name"] for e in ev.waits(gpu_step())] == ["cudaStreamSynchronize"]


@pytest.mark.parametrize(
    ("name", "waits"),
    [
        ("cudaStreamSynchronize", True),
        ("cudaDeviceSynchronize", True),
        ("cudaEventSynchronize", True),
        ("cuStreamSynchronize", True),
        ("cudaStreamWaitEvent", False),  # the stream waits, not the host
        ("cudaLaunchKernel", False),
    ],
)
def test_what_waits(name, waits):
    assert bool(ev.waits([step(), event("runtime", 1, 2, name)])) == waits


def region(start, end, name, depth=0, thread=0):
    return event("region", start, end, name, depth=depth, thread=thread)


@pytest.mark.parametrize(
    ("regions", "names"),
    [
        ([], []),
        ([region(0, 4, "a"), region(4, 9, "b"), region(5, 6, "inside", 1)], ["a", "b"]),
        ([region(0, 9, "a step"), region(1, 4, "a", 1), region(4, 8, "b", 1)], ["a", "b"]),
        ([region(0, 9, "optimizer"), region(1, 4, "Optimizer.step#SGD.step", 1)], ["optimizer"]),
        ([region(1, 4, "Optimizer.step#SGD.step")], ["optimizer"]),
        ([region(1, 4, "Optimizer.zero_grad#SGD.zero_grad")], []),
        ([region(0, 4, "a"), region(5, 6, "in a node", thread=1)], ["a"]),
    ],
)
def test_phases_are_the_outermost_regions(regions, names):
    assert [name for name, *_ in ev.phases([step(), *regions])] == names


def test_phases_without_regions_come_from_the_backward_pass():
    nodes = [event("engine", 40, 50, "A", thread=1), event("engine", 50, 80, "B", thread=1)]
    optimizer = region(85, 95, "Optimizer.step#Adam.step")
    before = region(5, 9, "Optimizer.zero_grad#Adam.zero_grad")
    expected = [("forward", 0, 40), ("backward", 40, 80), ("optimizer", 85, 95)]
    assert ev.phases([step(), *nodes, optimizer, before]) == expected
