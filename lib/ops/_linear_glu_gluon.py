# SPDX-License-Identifier: MIT
# Copyright (c) 2026 The Fused Kernels authors; Fused Kernels 0.1.0, lib/ops/_linear_glu_gluon.py
"""linear_glu's kernel for Hopper, in Gluon, the level below Triton, and its launch."""

import functools

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonDescriptor

if __package__:  # shared by the ops: `device` in kernels, `host` around them
    from . import _device as device
    from . import _gluon as shared
    from . import _host as host
else:  # the same, in a plain folder
    import _device as device
    import _gluon as shared
    import _host as host


# The TMA kernel again, by roles. One warp, the producer, only asks for pieces of x and W, into a ring of STAGES
# slots. Two warp groups, the consumers, multiply the same piece of W by 64 rows of x each. The second starts
# LAG steps after the first, so that one has its epilogue while the other keeps the tensor cores busy.
@gluon.jit
def _place_of_part(part, first, sizes, GROUP: gl.constexpr, PARTS: gl.constexpr, BLOCK_M, BLOCK_N):
    # Row and column of one of the PARTS of a tile, each BLOCK_N wide; the tiles from number `first` on
    n_rows, n_hidden, _ = sizes
    tile = first + part // PARTS
    pid_m, pid_n = device.place_of(tile, n_rows, n_hidden, GROUP, BLOCK_M, PARTS * BLOCK_N)
    return pid_m * BLOCK_M, (pid_n * PARTS + part % PARTS) * BLOCK_N


@gluon.jit
def _produce(
    x_desc, w_desc, x_bufs, w_bufs, full, empty, count, first, n_parts, sizes,
    GROUP: gl.constexpr, STAGES: gl.constexpr, PARTS: gl.constexpr,
):  # fmt: skip
    BLOCK_M: gl.constexpr = x_desc.block_type.shape[0]
    BLOCK_K: gl.constexpr = x_desc.block_type.shape[1]
    BLOCK_N: gl.constexpr = w_desc.block_type.shape[1]
    # narrow tiles of W lie in the first of so many pieces of a slot
    PIECES: gl.constexpr = w_bufs.shape[2] // BLOCK_N
    _, _, steps = sizes
    for part in range(gl.program_id(0), n_parts, gl.num_programs(0)):
        row, col = _place_of_part(part, first, sizes, GROUP, PARTS, 2 * BLOCK_M, BLOCK_N)
        for step in range(steps):
            slot = count % STAGES
            # a barrier that nobody has used counts as past phase 1: the first round does not wait
            mbarrier.wait(empty.index(slot), ((count // STAGES) & 1) ^ 1)
            bar = full.index(slot)
            mbarrier.expect(bar, 2 * x_desc.block_type.nbytes + w_desc.block_type.nbytes)
            w = w_bufs.index(slot)
            w = shared.reinterpret(
                w, w_bufs.dtype, [PIECES, 2, BLOCK_N, BLOCK_K], w_desc.layout
            ).index(0)
            shared.async_load(w_desc, [0, col, step * BLOCK_K], bar, w)
            for who in gl.static_range(2):
                at, x = [row + who * BLOCK_M, step * BLOCK_K], x_bufs.index(2 * slot + who)
                shared.async_load(x_desc, at, bar, x)
            count += 1
    return count


@gluon.jit
def _producer(
    x_desc, w_whole, w_narrow, ring, sizes, n_whole, n_narrow,
    GROUP: gl.constexpr, STAGES: gl.constexpr, PARTS: gl.constexpr,
):  # fmt: skip
    count = 0  # steps, over all tiles: the ring does not begin anew
    count = _produce(x_desc, w_whole, *ring, count, 0, n_whole, sizes, GROUP, STAGES, 1)
    _produce(x_desc, w_narrow, *ring, count, n_whole, n_narrow, sizes, GROUP, STAGES, PARTS)


@gluon.jit
def _consume(
    w_desc, y_desc, bias_ptr, x_bufs, w_bufs, full, empty, y_buf, go, count, first, n_parts, sizes,
    WHO: gl.constexpr, GROUP: gl.constexpr, STAGES: gl.constexpr, LAG: gl.constexpr,
    ACTIVATION: gl.constexpr, GATE_FIRST: gl.constexpr, PARTS: gl.constexpr,
):  # fmt: skip
    BLOCK_M: gl.constexpr = y_desc.block_type.shape[0]
    BLOCK_N: gl.constexpr = y_desc.block_type.shape[1]
    BLOCK_K: gl.constexpr = w_desc.block_type.shape[2]
    layout: gl.constexpr = shared.sums_layout(BLOCK_N)
    PIECES: gl.constexpr = w_bufs.shape[2] // BLOCK_N
    y_buf = shared.reinterpret(
        y_buf, y_desc.dtype, [PIECES, BLOCK_M, BLOCK_N], y_desc.layout
    ).index(0)
    _, n_hidden, steps = sizes
    for part in range(gl.program_id(0), n_parts, gl.num_programs(0)):
        row, col = _place_of_part(part, first, sizes, GROUP, PARTS, 2 * BLOCK_M, BLOCK_N)
        total = gl.zeros((BLOCK_M, 2 * BLOCK_N), gl.float32, shared.sums_layout(2 * BLOCK_N))
        for step in range(steps):
            slot = count % STAGES
            mbarrier.wait(full.index(slot), (count // STAGES) & 1)
            w = w_bufs.index(slot)
            w = shared.reinterpret(
                w, w_bufs.dtype, [PIECES, 2, BLOCK_N, BLOCK_K], w_desc.layout
            ).index(0)
            w = w.reshape([2 * BLOCK_N, BLOCK_K]).permute((1, 0))
            x = x_bufs.index(2 * slot + WHO)
            total = hopper.warpgroup_mma(x, w, total, use_acc=step > 0, is_async=True)
            total = hopper.warpgroup_mma_wait(1, deps=(total,))
            if step > 0:  # the product before this one is over: its slot is free
                mbarrier.arrive(empty.index((count - 1) % STAGES), count=1)
            count += 1
            if WHO == 0 and count == LAG:
                mbarrier.arrive(go, count=1)
        total = hopper.warpgroup_mma_wait(0, deps=(total,))
        mbarrier.arrive(empty.index((count - 1) % STAGES), count=1)

        # Each thread holds the same columns of both halves, so splitting moves no data.
        x1, x2 = total.reshape((BLOCK_M, 2, BLOCK_N)).permute((0, 2, 1)).split()
        x1 = gl.convert_layout(x1, layout, assert_trivial=True)
        x2 = gl.convert_layout(x2, layout, assert_trivial=True)
        if bias_ptr is not None:
            cols = col + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, layout))
            bias1 = gl.load(bias_ptr + cols, mask=cols < n_hidden, other=0.0)
            bias2 = gl.load(bias_ptr + n_hidden + cols, mask=cols < n_hidden, other=0.0)
            x1 = x1 + bias1.to(gl.float32)[None, :]
            x2 = x2 + bias2.to(gl.float32)[None, :]
        if GATE_FIRST:
            x1, x2 = x2, x1
        y = device.gated(x1, x2, ACTIVATION).to(y_desc.dtype)
        tma.store_wait(0)  # of the tile before: y_buf is free
        y_buf.store(y)
        hopper.fence_async_shared()
        shared.async_store(y_desc, [row + WHO * BLOCK_M, col], y_buf)
    return count


@gluon.jit
def _consumer(
    whole, narrow, bias_ptr, ring, y_buf, go, sizes, n_whole, n_narrow,
    WHO: gl.constexpr, GROUP: gl.constexpr, STAGES: gl.constexpr, LAG: gl.constexpr,
    PARTS: gl.constexpr, ACTIVATION: gl.constexpr, GATE_FIRST: gl.constexpr,
):  # fmt: skip
    if WHO == 1:
        mbarrier.wait(go, 0)
    count = 0
    count = _consume(
        *whole, bias_ptr, *ring, y_buf, go, count, 0, n_whole, sizes,
        WHO, GROUP, STAGES, LAG, ACTIVATION, GATE_FIRST, 1,
    )  # fmt: skip
    _consume(
        *narrow, bias_ptr, *ring, y_buf, go, count, n_whole, n_narrow, sizes,
        WHO, GROUP, STAGES, LAG, ACTIVATION, GATE_FIRST, PARTS,
    )  # fmt: skip
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["n_rows", "n_whole"])
def _linear_glu_gluon_kernel(
    x_desc, w_whole, y_whole, w_narrow, y_narrow, bias_ptr, n_rows, n_hidden, n_in, n_whole,
    GROUP: gl.constexpr, STAGES: gl.constexpr, LAG: gl.constexpr, PARTS: gl.constexpr,
    ACTIVATION: gl.constexpr, GATE_FIRST: gl.constexpr,
):  # fmt: skip
    # Persistent: n programs each handle every n-th of the first n_whole tiles. What is left over would keep
    # few of them busy for as long: so each of those tiles is cut into PARTS narrow ones.
    dtype: gl.constexpr = x_desc.dtype
    BLOCK_M: gl.constexpr = x_desc.block_type.shape[0]
    BLOCK_K: gl.constexpr = x_desc.block_type.shape[1]
    BLOCK_N: gl.constexpr = y_whole.block_type.shape[1]
    layout: gl.constexpr = mbarrier.MBarrierLayout()
    x_bufs = gl.allocate_shared_memory(dtype, [2 * STAGES, BLOCK_M, BLOCK_K], x_desc.layout)
    w_bufs = gl.allocate_shared_memory(dtype, [STAGES, 2, BLOCK_N, BLOCK_K], w_whole.layout)
    y_bufs = gl.allocate_shared_memory(dtype, [2, BLOCK_M, BLOCK_N], y_whole.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], layout)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], layout)
    go = gl.allocate_shared_memory(gl.int64, [1], layout)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    mbarrier.init(go, count=1)
    n_tiles = gl.cdiv(n_rows, 2 * BLOCK_M) * gl.cdiv(n_hidden, BLOCK_N)
    n_narrow = (n_tiles - n_whole) * PARTS
    sizes, ring = (n_rows, n_hidden, gl.cdiv(n_in, BLOCK_K)), (x_bufs, w_bufs, full, empty)
    whole, narrow = (w_whole, y_whole), (w_narrow, y_narrow)
    # Constants stand in the calls themselves: in a tuple with a name they would become values.
    gl.warp_specialize(
        [
            (_consumer, (
                whole, narrow, bias_ptr, ring, y_bufs.index(0), go, sizes, n_whole, n_narrow,
                0, GROUP, STAGES, LAG, PARTS, ACTIVATION, GATE_FIRST,
            )),
            (_consumer, (
                whole, narrow, bias_ptr, ring, y_bufs.index(1), go, sizes, n_whole, n_narrow,
                1, GROUP, STAGES, LAG, PARTS, ACTIVATION, GATE_FIRST,
            )),
            (_producer, (
                x_desc, w_whole, w_narrow, ring, sizes, n_whole, n_narrow, GROUP, STAGES, PARTS,
            )),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


_PARTS = 4  # of each tile of a last wave, if there is a program for each part


@functools.cache
def _swizzled(width, rank):
    return gl.NVMMASharedLayout(min(128, 2 * width), element_bitwidth=16, rank=rank)


def launch_gluon(plan, x, halves, bias, y, **gating):
    """Write y. halves: W as (2, H, K), what its descriptor begins with. gating: the kernel's last constants."""
    (n_rows, n_in), (_, (_, n_hidden, _), _) = x.shape, halves
    tile, n_programs, rows = plan.tile, plan.n_programs, y.view(n_rows, n_hidden)
    n_tiles = host.cdiv(n_rows, tile.m) * host.cdiv(n_hidden, tile.n)
    left_over = n_tiles % n_programs if n_tiles > n_programs else 0
    if left_over * _PARTS > n_programs:
        left_over = 0  # cut up, they would take several waves
    half, narrow = tile.m // 2, tile.n // _PARTS

    def described(tensor, shape, strides, *block):
        layout = _swizzled(block[-1], len(block))
        return GluonDescriptor(tensor, shape, strides, [*block], layout)

    host.run(
        _linear_glu_gluon_kernel, (min(n_tiles, n_programs),),
        (
            described(x, x.shape, x.stride(), half, tile.k), described(*halves, 2, tile.n, tile.k),
            described(rows, rows.shape, rows.stride(), half, tile.n),
            described(*halves, 2, narrow, tile.k),
            described(rows, rows.shape, rows.stride(), half, narrow), bias,
        ),
        n_rows, n_hidden, n_in, n_tiles - left_over, GROUP=plan.group, STAGES=tile.num_stages,
        LAG=tile.num_stages - 1, PARTS=_PARTS, **gating, num_warps=tile.num_warps,
    )  # fmt: skip
