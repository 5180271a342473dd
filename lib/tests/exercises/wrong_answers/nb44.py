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


def _stays(*changes):
    return solution(_NAME, *changes).stays_kernel


_BEFORE_STORE = "        tma.store_wait(0)  # of the tile before: y_buf is free\n"
_ZEROS = "        acc = gl.zeros((BLOCK_M, BLOCK_N), gl.float32, SUMS)\n"
_TILES = "    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):\n"
_ASK = "w_desc, x_bufs, w_bufs, full, STAGES)\n"
_FILL = f"    for turn in gl.static_range(STAGES):\n        ask(turn, total, steps, tiles_n, x_desc, {_ASK}"
_AHEAD = (
    "            if count > 0:  # the product before is over, perhaps the last of the tile before\n"
    "                ahead = count - 1 + STAGES\n"
    f"                ask(ahead, total, steps, tiles_n, x_desc, {_ASK}"
)
stays_kernel__the_phase_begins_anew = _stays(
    "(count // STAGES) & 1", "(count % steps // STAGES) & 1"
)
stays_kernel__the_phase_never_wraps = _stays("(count // STAGES) & 1", "count // STAGES")
stays_kernel__frees_the_slot_in_flight = _stays(
    "if count > 0:", "if count >= 0:", "ahead = count - 1 + STAGES", "ahead = count + STAGES"
)
stays_kernel__the_buffer_is_written_too_early = _stays(_BEFORE_STORE, "")
stays_kernel__ends_while_it_stores = _stays("    tma.store_wait(0)\n", "")
stays_kernel__no_fence = _stays("        fence_async_shared()\n", "")
stays_kernel__loads_beyond_its_last_step = _stays("turn < total", "turn >= 0")
stays_kernel__one_tile = _stays(
    _TILES, "    for tile in range(gl.program_id(0), gl.program_id(0) + 1):\n"
)
stays_kernel__a_tiles_first_step_asks_for_nothing = _stays("if count > 0:", "if count % steps > 0:")
stays_kernel__adds_to_the_tile_before = _stays(_TILES + _ZEROS, _ZEROS[4:] + _TILES)
stays_kernel__nothing_in_flight = _stays("warpgroup_mma_wait(1,", "warpgroup_mma_wait(0,")
stays_kernel__sums_of_half_the_warps = _stays("[8, 1], [16", "[4, 1], [16")
stays_kernel__fills_the_ring_anew = _stays(
    _FILL, "", _AHEAD, _AHEAD.replace("count > 0", "count % steps > 0").replace("(ahead, total", "(ahead, end"),
    _TILES, f"{_TILES}        end = count + steps\n        for i in gl.static_range(STAGES):\n"
    f"            ask(count + i, end, steps, tiles_n, x_desc, {_ASK}",
)  # fmt: skip
