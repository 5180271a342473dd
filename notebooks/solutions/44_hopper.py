"""Solutions to the exercises of notebook 44."""

from lib.course.mbarriers import arrive, finish, multiply, wait


# %% 44.1 the ring counts both consumers' steps; the producer is one ahead, as a fresh barrier is past phase 1
def place(step, n_slots):
    number = 2 * step + 1
    turn = number // n_slots
    return number % n_slots, turn % 2, 1 - turn % 2


# %% 44.2 a slot is free two steps later, and a tile's last two after its last product, if it has two
def consumer(n_tiles, n_steps, full, empty):
    count = 0
    for _ in range(n_tiles):
        for step in range(n_steps):
            slot = count % len(full)
            yield wait(full[slot], count // len(full) % 2)
            yield multiply(slot, count)
            yield finish(2)
            if step > 1:
                yield arrive(empty[(count - 2) % len(full)])
            count += 1
        yield finish(0)
        for late in range(min(2, n_steps), 0, -1):
            yield arrive(empty[(count - late) % len(full)])


# %% 44.3 the output tile once, the rest divided among stages
def stages(block_m, block_n, block_k, gate):
    out = block_m * (block_n // 2 if gate else block_n) * 2
    return (227 * 1024 - out) // ((block_m + block_n) * block_k * 2 + 2 * 8)
