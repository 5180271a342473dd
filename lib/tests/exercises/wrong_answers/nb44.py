"""Plausible wrong answers to the exercises of notebook 44, named <answer>__<why>: each must be rejected."""

from lib.tests.exercises.wrong_answers import solution

_NAME = "44_hopper"


def place__both_wait_for_the_same_phase(step, n_slots):
    return step % n_slots, step // n_slots % 2, step // n_slots % 2


def place__phase_of_the_step(step, n_slots):
    return step % n_slots, step % 2, 1 - step % 2


def place__phase_never_wraps(step, n_slots):
    return step % n_slots, step // n_slots, step // n_slots - 1


consumer__as_given = solution(
    _NAME, "        yield finish(0)\n        yield arrive(empty[(count - 1) % len(full)])\n", ""
).consumer
consumer__frees_before_the_product_is_over = solution(
    _NAME, "yield finish(1)\n            if step > 0", "yield finish(2)\n            if step > 0"
).consumer
consumer__frees_the_slot_in_use = solution(
    _NAME,
    "            if step > 0:\n                yield arrive(empty[(count - 1)",
    "            if step > 0:\n                yield arrive(empty[count",
).consumer
consumer__phase_of_the_step_in_the_tile = solution(
    _NAME, "count // len(full) % 2", "step // len(full) % 2"
).consumer
consumer__nothing_in_flight = solution(_NAME, "finish(1)", "finish(0)").consumer
stages__no_output_tile = solution(_NAME, "(227 * 1024 - out)", "(227 * 1024)").stages
stages__no_barriers = solution(_NAME, " + 2 * 8)", ")").stages
stages__gate_as_wide = solution(_NAME, "(block_n // 2 if gate else block_n)", "block_n").stages
stages__all_228_kb = solution(_NAME, "227", "228").stages
