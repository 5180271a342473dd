"""Solutions to the exercises of notebook 44."""

import lib  # noqa: F401  before triton: with no GPU it switches the interpreter on
from lib.course.mbarriers import arrive, finish, multiply, wait

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)


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


# %% 44.3 steps are counted over all tiles: loads of the next tile are asked for before this one is stored
@gluon.jit
def ask(turn, total, steps, tiles_n, x_desc, w_desc, x_bufs, w_bufs, full, STAGES: gl.constexpr):
    tile = gl.program_id(0) + turn // steps * gl.num_programs(0)
    row = tile // tiles_n * x_desc.block_type.shape[0]
    col = tile % tiles_n * w_desc.block_type.shape[0]
    k = turn % steps * x_desc.block_type.shape[1]
    slot, pred = turn % STAGES, turn < total
    bar = full.index(slot)
    mbarrier.expect(bar, x_desc.block_type.nbytes + w_desc.block_type.nbytes, pred=pred)
    tma.async_load(x_desc, [row, k], bar, x_bufs.index(slot), pred)
    tma.async_load(w_desc, [col, k], bar, w_bufs.index(slot), pred)


@gluon.jit
def stays_kernel(x_desc, w_desc, y_desc, n_rows, n_cols, n_in, STAGES: gl.constexpr):
    BLOCK_M: gl.constexpr = x_desc.block_type.shape[0]
    BLOCK_K: gl.constexpr = x_desc.block_type.shape[1]
    BLOCK_N: gl.constexpr = w_desc.block_type.shape[0]
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, BLOCK_N, 16])
    x_bufs = gl.allocate_shared_memory(x_desc.dtype, [STAGES, BLOCK_M, BLOCK_K], x_desc.layout)
    w_bufs = gl.allocate_shared_memory(w_desc.dtype, [STAGES, BLOCK_N, BLOCK_K], w_desc.layout)
    y_buf = gl.allocate_shared_memory(y_desc.dtype, [BLOCK_M, BLOCK_N], y_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
    tiles_n, steps = gl.cdiv(n_cols, BLOCK_N), gl.cdiv(n_in, BLOCK_K)
    tiles = gl.cdiv(n_rows, BLOCK_M) * tiles_n
    total = gl.cdiv(tiles - gl.program_id(0), gl.num_programs(0)) * steps  # of this program
    for turn in gl.static_range(STAGES):
        ask(turn, total, steps, tiles_n, x_desc, w_desc, x_bufs, w_bufs, full, STAGES)
    count = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        acc = gl.zeros((BLOCK_M, BLOCK_N), gl.float32, SUMS)
        for _ in range(steps):
            slot = count % STAGES
            mbarrier.wait(full.index(slot), (count // STAGES) & 1)
            w = w_bufs.index(slot).permute((1, 0))
            acc = warpgroup_mma(x_bufs.index(slot), w, acc, is_async=True)
            acc = warpgroup_mma_wait(1, deps=(acc,))
            if count > 0:  # the product before is over, perhaps the last of the tile before
                ahead = count - 1 + STAGES
                ask(ahead, total, steps, tiles_n, x_desc, w_desc, x_bufs, w_bufs, full, STAGES)
            count += 1
        acc = warpgroup_mma_wait(0, deps=(acc,))
        tma.store_wait(0)  # of the tile before: y_buf is free
        y_buf.store(acc.to(y_desc.dtype))
        fence_async_shared()
        row, col = tile // tiles_n * BLOCK_M, tile % tiles_n * BLOCK_N
        tma.async_store(y_desc, [row, col], y_buf)
    tma.store_wait(0)
