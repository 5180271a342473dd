"""Solutions to the exercises of notebook 44."""

from lib.course.mbarriers import arrive, finish, multiply, wait


# %% 44.1 the producer is one phase ahead, because an unused barrier counts as past phase 1
def place(step, n_slots):
    turn = step // n_slots
    return step % n_slots, turn % 2, 1 - turn % 2


# %% 44.2 a tile's last slot is freed after the tile's last product
def consumer(n_tiles, n_steps, full, empty):
    count = 0
    for _ in range(n_tiles):
        for step in range(n_steps):
            slot = count % len(full)
            yield wait(full[slot], count // len(full) % 2)
            yield multiply(slot, count)
            yield finish(1)
            if step > 0:
                yield arrive(empty[(count - 1) % len(full)])
            count += 1
        yield finish(0)
        yield arrive(empty[(count - 1) % len(full)])


# %% 44.3 the output tile once, the rest divided among stages
def stages(block_m, block_n, block_k, gate):
    out = block_m * (block_n // 2 if gate else block_n) * 2
    return (227 * 1024 - out) // ((block_m + block_n) * block_k * 2 + 2 * 8)
