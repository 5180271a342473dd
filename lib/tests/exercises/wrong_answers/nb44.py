"""Plausible wrong answers to the exercises of notebook 44, named <answer>__<why>: each must be rejected."""

from lib.course.mbarriers import arrive, finish, multiply, wait
from lib.tests.exercises.wrong_answers import solution

_NAME = "44_hopper"


def place__both_wait_for_the_same_phase(step, n_slots):
    number = 2 * step + 1
    return number % n_slots, number // n_slots % 2, number // n_slots % 2


def place__its_own_steps_alone(step, n_slots):
    return step % n_slots, step // n_slots % 2, 1 - step // n_slots % 2


def place__of_the_first_consumer(step, n_slots):
    return 2 * step % n_slots, 2 * step // n_slots % 2, 1 - 2 * step // n_slots % 2


def place__phase_never_wraps(step, n_slots):
    number = 2 * step + 1
    return number % n_slots, number // n_slots, number // n_slots - 1


_FREED = "            yield arrive(empty[(count - late) % len(full)])\n"
_TAIL = f"        for late in range(min(2, n_steps), 0, -1):\n{_FREED}"
consumer__as_given = solution(_NAME, f"        yield finish(0)\n{_TAIL}", "").consumer
consumer__frees_one_at_the_end = solution(_NAME, "range(min(2, n_steps), 0, -1)", "(1,)").consumer
consumer__frees_two_of_a_single_step = solution(_NAME, "min(2, n_steps)", "2").consumer
consumer__frees_at_the_end_without_a_wait = solution(
    _NAME, "        yield finish(0)\n", ""
).consumer
consumer__frees_before_the_product_is_over = solution(_NAME, "finish(2)", "finish(3)").consumer


def consumer__waits_for_a_tile_in_the_next(n_tiles, n_steps, full, empty):
    count = 0
    for _ in range(n_tiles * n_steps):
        slot = count % len(full)
        yield wait(full[slot], count // len(full) % 2)
        yield multiply(slot, count)
        yield finish(2)
        if count > 1:
            yield arrive(empty[(count - 2) % len(full)])
        count += 1
    yield finish(0)
    for late in range(min(2, count), 0, -1):
        yield arrive(empty[(count - late) % len(full)])


consumer__frees_a_slot_too_early = solution(
    _NAME, "if step > 1:\n                yield arrive(empty[(count - 2)",
    "if step > 0:\n                yield arrive(empty[(count - 1)",
).consumer  # fmt: skip
consumer__one_in_flight = solution(
    _NAME,
    f"finish(2)\n            if step > 1:\n                yield arrive(empty[(count - 2) % len(full)])\n"
    f"            count += 1\n        yield finish(0)\n{_TAIL}",
    "finish(1)\n            if step > 0:\n                yield arrive(empty[(count - 1) % len(full)])\n"
    "            count += 1\n        yield finish(0)\n        yield arrive(empty[(count - 1) % len(full)])\n",
).consumer
consumer__phase_of_the_step_in_the_tile = solution(
    _NAME, "count // len(full) % 2", "step // len(full) % 2"
).consumer
consumer__nothing_in_flight = solution(_NAME, "finish(2)", "finish(0)").consumer
stages__no_output_tile = solution(_NAME, "(227 * 1024 - out)", "(227 * 1024)").stages
stages__no_barriers = solution(_NAME, " + 2 * 8)", ")").stages
stages__one_barrier = solution(_NAME, " + 2 * 8)", " + 8)").stages
stages__gate_as_wide = solution(_NAME, "(block_n // 2 if gate else block_n)", "block_n").stages
stages__all_228_kb = solution(_NAME, "227", "228").stages
