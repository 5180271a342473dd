"""Fewer events, the same picture: counts, totals and bounds that have to stay."""

import json

from lib.profiling import cost as bill
from lib.profiling import events as ev
from lib.profiling import trimming
from lib.tests.profiling.profiles import event, gpu_step, item, step

import pytest


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
    few = trimming.trimmed(events, most)
    assert len(few) <= most
    assert json.loads(json.dumps(few)) == few
    assert ev.checked(few) is few
    assert (count(few, "op"), count(few, "kernel")) == (2000, 2000)
    assert ev.wall_us(few) == ev.wall_us(events)
    assert bill.utilisation(few) == bill.utilisation(events) == 60


def test_a_block_knows_how_long_it_was_busy_and_what_it_is_made_of():
    blocks = [e for e in trimming.trimmed(busy_step(), 20) if e["kind"] == "kernel"]
    assert sum(e["busy_us"] for e in blocks) == pytest.approx(6000)
    assert sum(e["n"] for e in blocks) == 2000
    assert {e["name"] for e in blocks} == {f"relu ×{e['n']}" for e in blocks}


def test_what_is_wide_enough_to_be_seen_stays_as_it_is():
    few = trimming.trimmed(gpu_step())
    kernels = [e for e in gpu_step() if e["kind"] == "kernel"]
    assert [e for e in few if e["kind"] == "kernel"] == kernels
    assert [e["name"] for e in few if e["kind"] == "region"] == ["forward", "backward"]
    assert len(ev.waits(few)) == 1


def test_a_wide_gap_is_kept():
    tiny = [event("kernel", k, k + 0.5, "k") for k in (*range(10), *range(1000, 1010))]
    few = [e for e in trimming.trimmed([step(2000), *tiny]) if e["kind"] == "kernel"]
    assert [(e["start_us"], e["end_us"], e["n"]) for e in few] == [(0, 9.5, 10), (1000, 1009.5, 10)]


def test_different_neighbours_are_counted_by_kind():
    def named(*kinds_and_names):
        work = [event(kind, k, k + 0.5, name) for k, (kind, name) in enumerate(kinds_and_names)]
        return [e["name"] for e in trimming.trimmed([step(3000), *work]) if e["kind"] != "step"]

    assert named(("kernel", "a"), ("kernel", "b"), ("kernel", "b")) == ["3 kernels"]
    assert named(("kernel", "a"), ("copy", "b"), ("kernel", "a")) == ["3 kernels, copies"]
    assert named(("copy", "a"), ("copy", "a")) == ["a ×2"]
    assert named(("op", "a"), ("op", "b")) == ["2 ops"]


def test_joined_waits_are_waits():
    items = [e for k in range(9) for e in item(5 * k, 5 * k + 4)]
    few = trimming.trimmed([step(20_000), *items])
    assert (len(ev.waits(few)), count(few, "runtime")) == (1, 9)


def test_trimming_twice_is_trimming_once():
    few = trimming.trimmed(busy_step(), 40)
    assert trimming.trimmed(few, 40) == few


def test_a_step_with_no_device_stays_one():
    few = trimming.trimmed([step(), event("op", 0, 5, "aten::mul")])
    assert not ev.has_device(few)
    assert bill.utilisation(few) is None


def test_regions_found_from_the_backward_pass_are_kept():
    nodes = [event("engine", 40, 90, "MmBackward0")]
    few = trimming.trimmed([step(), *nodes])
    assert (
        ev.phases(few) == ev.phases([step(), *nodes]) == [("forward", 0, 40), ("backward", 40, 90)]
    )


@pytest.mark.parametrize("most", [0, 2.5, "all", True])
def test_most_is_a_number_of_events(most):
    with pytest.raises(ValueError, match="how many events to keep"):
        trimming.trimmed(gpu_step(), most)


def test_fewer_than_lanes_is_impossible():
    with pytest.raises(ValueError, match="most=3 is too few: lanes and regions alone are 7"):
        trimming.trimmed(gpu_step(), 3)


def test_only_events_are_taken():
    with pytest.raises(TypeError, match="list of dictionaries"):
        trimming.trimmed("events")
