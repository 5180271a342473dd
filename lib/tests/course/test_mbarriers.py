"""The model of mbarriers: what passes, what hangs and what is overwritten."""

from lib.course.mbarriers import (
    Barrier,
    Deadlock,
    Overwritten,
    arrive,
    finish,
    load,
    multiply,
    run,
    wait,
)

import pytest

STEPS, SLOTS, SEEDS = 9, 3, range(30)


def barriers(readers=1):
    full = [Barrier(f"full[{i}]") for i in range(SLOTS)]
    return full, [Barrier(f"empty[{i}]", readers) for i in range(SLOTS)]


def producer(full, empty, first_phase=1):
    for step in range(STEPS):
        slot = step % SLOTS
        yield wait(empty[slot], (step // SLOTS + first_phase) % 2)
        yield load(slot, step, full[slot])


def consumer(full, empty, in_flight=1, free_too_early=False):
    for step in range(STEPS):
        slot = step % SLOTS
        yield wait(full[slot], step // SLOTS % 2)
        yield multiply(slot, step)
        if free_too_early:
            yield arrive(empty[slot])
            continue
        yield finish(in_flight)
        if step >= in_flight:
            yield arrive(empty[(step - in_flight) % SLOTS])


def test_a_barrier_that_nobody_used_counts_as_past_phase_1():
    barrier = Barrier("b", count=2)
    assert barrier.passed(1) and not barrier.passed(0)
    barrier.arrive()
    assert not barrier.passed(0)
    barrier.arrive()
    assert barrier.passed(0) and not barrier.passed(1)


@pytest.mark.parametrize("in_flight", [0, 1, 2])
@pytest.mark.parametrize("readers", [1, 2])
def test_a_ring_that_is_right_runs_in_any_order(in_flight, readers):
    for seed in SEEDS:
        full, empty = barriers(readers)
        roles = {f"consumer {i}": consumer(full, empty, in_flight) for i in range(readers)}
        steps = run({"producer": producer(full, empty)} | roles, seed)
        assert all(steps[name] == list(range(STEPS)) for name in roles)


def test_a_producer_that_waits_for_phase_0_first_hangs():
    full, empty = barriers()
    with pytest.raises(Deadlock, match=r"producer waits for empty\[0\], phase 0; consumer"):
        run({"producer": producer(full, empty, 0), "consumer": consumer(full, empty)})


def test_all_slots_in_flight_hang():
    full, empty = barriers()
    with pytest.raises(Deadlock):
        run({"producer": producer(full, empty), "consumer": consumer(full, empty, SLOTS)})


def test_a_slot_freed_before_its_product_is_over_is_overwritten():
    full, empty = barriers()
    roles = {"producer": producer(full, empty)}
    roles["consumer"] = consumer(full, empty, free_too_early=True)
    with pytest.raises(Overwritten, match="is loaded while consumer still reads"):
        run(roles, seed=0)


def test_a_slot_that_is_not_loaded_cannot_be_read():
    with pytest.raises(Overwritten, match="nothing yet"):
        run({"consumer": iter([multiply(0, 0)])})
