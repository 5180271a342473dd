"""The plain events: queries, and trimmed lists that draw the same timeline; on lists written by hand."""

import json

from lib.profiling import cost as bill
from lib.profiling import events as ev
from lib.tests.profiling.profiles import event, gpu_step, item, step

import pytest
from hypothesis import given
from hypothesis import strategies as st


@pytest.mark.parametrize(
    ("bad", "error", "message"),
    [
        (None, TypeError, "list of dictionaries, got NoneType; call events_of"),
        ([1], TypeError, "list of dictionaries"),
        ([{"name": "no kind"}], TypeError, "list of dictionaries"),
        ([], ValueError, "one event of kind 'step', got 0"),
        ([step(), step()], ValueError, "got 2"),
    ],
)
def test_what_is_no_list_of_events_is_refused(bad, error, message):
    with pytest.raises(error, match=message):
        ev.checked(bad)


def test_a_good_list_is_returned():
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


intervals = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 9)), max_size=12)


@given(intervals)
def test_merged_covers_the_same_points(starts_and_lengths):
    spans = [(start, start + length) for start, length in starts_and_lengths]
    joined = ev.merged(spans)
    covered = {k for start, end in spans for k in range(start, end)}
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


# --- fewer events, the same timeline ------------------------------------------------------------------------


def busy_step(n=2000, gap=2.0):
    """n kernels of 3 µs with gaps between them, each launched by an op of its own."""
    apart = 3 + gap
    events = [step(n * apart), event("region", 0, n * apart, "forward")]
    for k in range(n):
        start = k * apart
        events.append(event("op", start, start + 2, "aten::relu"))
        events.append(event("op", start, start + 1, "aten::clamp", outer="aten::relu"))
        events.append(event("runtime", start, start + 1, "cudaLaunchKernel"))
        events.append(event("kernel", start + 1, start + 4, "relu"))
        events.append(event("memory", start, start, bytes=1, total_bytes=k))
    return events


def count(events, kind):
    return sum(e.get("n", 1) for e in events if e["kind"] == kind)


@pytest.mark.parametrize("most", [300, 20])
def test_few_are_left_and_all_are_counted(most):
    events = busy_step()
    few = ev.trimmed(events, most)
    assert len(few) <= most
    assert json.loads(json.dumps(few)) == few
    assert ev.checked(few) is few
    assert (count(few, "op"), count(few, "kernel")) == (2000, 2000)
    assert ev.wall_us(few) == ev.wall_us(events)
    assert bill.utilisation(few) == bill.utilisation(events) == 60


def test_a_block_knows_how_long_it_was_busy_and_what_it_is_made_of():
    blocks = [e for e in ev.trimmed(busy_step(), 20) if e["kind"] == "kernel"]
    assert sum(e["busy_us"] for e in blocks) == pytest.approx(6000)
    assert sum(e["n"] for e in blocks) == 2000
    assert {e["name"] for e in blocks} == {f"relu ×{e['n']}" for e in blocks}


def test_what_is_wide_enough_to_be_seen_stays_as_it_is():
    few = ev.trimmed(gpu_step())
    kernels = [e for e in gpu_step() if e["kind"] == "kernel"]
    assert [e for e in few if e["kind"] == "kernel"] == kernels
    assert [e["name"] for e in few if e["kind"] == "region"] == ["forward", "backward"]
    assert len(ev.waits(few)) == 1


def test_a_wide_gap_is_kept():
    tiny = [event("kernel", k, k + 0.5, "k") for k in (*range(10), *range(1000, 1010))]
    few = [e for e in ev.trimmed([step(2000), *tiny]) if e["kind"] == "kernel"]
    assert [(e["start_us"], e["end_us"], e["n"]) for e in few] == [(0, 9.5, 10), (1000, 1009.5, 10)]


def test_different_neighbours_are_counted_by_kind():
    def named(*kinds_and_names):
        work = [event(kind, k, k + 0.5, name) for k, (kind, name) in enumerate(kinds_and_names)]
        return [e["name"] for e in ev.trimmed([step(3000), *work]) if e["kind"] != "step"]

    assert named(("kernel", "a"), ("kernel", "b"), ("kernel", "b")) == ["3 kernels"]
    assert named(("kernel", "a"), ("copy", "b"), ("kernel", "a")) == ["3 kernels, copies"]
    assert named(("copy", "a"), ("copy", "a")) == ["a ×2"]
    assert named(("op", "a"), ("op", "b")) == ["2 ops"]


def test_joined_waits_are_waits():
    items = [e for k in range(9) for e in item(5 * k, 5 * k + 4)]
    few = ev.trimmed([step(20_000), *items])
    assert (len(ev.waits(few)), count(few, "runtime")) == (1, 9)


def test_trimming_twice_is_trimming_once():
    few = ev.trimmed(busy_step(), 40)
    assert ev.trimmed(few, 40) == few


def test_a_step_with_no_device_stays_one():
    few = ev.trimmed([step(), event("op", 0, 5, "aten::mul")])
    assert not ev.has_device(few)
    assert bill.utilisation(few) is None


def test_regions_found_from_the_backward_pass_are_kept():
    nodes = [event("engine", 40, 90, "MmBackward0")]
    few = ev.trimmed([step(), *nodes])
    assert (
        ev.phases(few) == ev.phases([step(), *nodes]) == [("forward", 0, 40), ("backward", 40, 90)]
    )


def test_fewer_than_lanes_is_impossible():
    with pytest.raises(ValueError, match="most=3 is too few: lanes and regions alone are 7"):
        ev.trimmed(gpu_step(), 3)
