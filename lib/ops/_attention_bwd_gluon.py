# SPDX-License-Identifier: MIT
# Copyright (c) 2026 The Fused Kernels authors; Fused Kernels 0.1.0, lib/ops/_attention_bwd_gluon.py
"""The backward pass of attention on Hopper with five products, in roles: two groups multiply, one warp fetches.

For D = 64 and 128 in 16 bits, causal or without a mask. A program owns 128 keys of one head of k and v, 64 for
each group, and goes along the queries of all heads that share them, M at a time. Scores are kept transposed,
(64, M), so that pᵀ and dsᵀ go from a group's registers into dv += pᵀ do and dk += dsᵀ q. dq = ds k needs the
keys of both groups: they swap dsᵀ through shared memory, and each computes half of a tile of dq.

dq is added up in float32 by atomics, in a buffer where the numbers of a thread lie together; a last kernel
scales and rounds it. deterministic: programs add to a tile of queries in the order of their keys, and two more
warps wait for a tile's turn and pass it on, so that no product does. A program takes its number when it
starts, so those it waits for have started before it: nothing can wait for ever. All go from the last queries
to the first, so one that has waited once stays just behind the one before it.
"""

import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

if __package__:  # shared by the ops
    from . import _attention_gluon as gluon_kernels
    from . import _gluon as shared
    from . import _host as host
else:  # the same, in a plain folder
    import _attention_gluon as gluon_kernels
    import _gluon as shared
    import _host as host

_KEYS = gl.constexpr(128)  # of a program


@gluon.jit
def _keys_of(job, sizes, IS_CAUSAL: gl.constexpr, M: gl.constexpr):
    # Of one number: the place (a head of k and v), the block of keys, the tiles of queries that see it, and how
    # many of them, from the last on, see it whole. Down n_wide places, then a block on: causal, those with most
    # queries come first, and every block comes after those before it, for which it may have to wait.
    _, _, n_queries, n_keys, n_places, n_wide = sizes
    n_blocks = gl.cdiv(n_keys, _KEYS)
    first_place = job // (n_wide * n_blocks) * n_wide
    height = gl.minimum(n_places - first_place, n_wide)
    job = job % (n_wide * n_blocks)
    block = job // height
    n_tiles, seen_in_part = gl.cdiv(n_queries, M), 0
    if IS_CAUSAL:
        n_tiles = gl.maximum(n_tiles - block * (_KEYS // M), 0)
        seen_in_part = _KEYS // M
    n_whole = gl.maximum(n_tiles - seen_in_part, 0)
    n_whole = gl.where((block + 1) * _KEYS > n_keys, 0, n_whole)
    return first_place + job % height, block, n_tiles, n_whole


@gluon.jit
def _fetch_queries(descs, bufs, bars, job, sizes, IS_CAUSAL: gl.constexpr):
    # The role of one warp: asks TMA for tiles, as soon as both groups have done with what lies in their place.
    q_desc, k_desc, v_desc, do_desc, lse_desc, delta_desc = descs
    q_bufs, k_bufs, v_bufs, do_bufs, lse_bufs, delta_bufs, _ = bufs
    kv_full, q_full, do_full, empty, _, _, _, _ = bars
    M: gl.constexpr = q_bufs.shape[3]
    STAGES: gl.constexpr = q_bufs.shape[0]
    n_kv_heads, n_repeats, n_queries, _, _, _ = sizes
    place, block, n_tiles, _ = _keys_of(job, sizes, IS_CAUSAL, M)
    batch, kv_head = place // n_kv_heads, place % n_kv_heads
    mbarrier.expect(kv_full.index(0), 4 * k_desc.block_type.nbytes)
    for who in gl.static_range(2):
        at = [batch, kv_head, block * _KEYS + who * 64, 0]
        shared.async_load(k_desc, at, kv_full.index(0), k_bufs.index(who))
        shared.async_load(v_desc, at, kv_full.index(0), v_bufs.index(who))
    of_q: gl.constexpr = q_desc.block_type.nbytes + lse_desc.block_type.nbytes
    n_rows = gl.cdiv(n_queries, M) * M
    count = 0
    for head in range(kv_head * n_repeats, (kv_head + 1) * n_repeats):
        for t in range(n_tiles):
            slot = count % STAGES
            row = n_rows - (t + 1) * M
            mbarrier.wait(empty.index(slot), ((count // STAGES) & 1) ^ 1)
            mbarrier.expect(q_full.index(slot), of_q)
            shared.async_load(q_desc, [batch, head, row, 0], q_full.index(slot), q_bufs.index(slot))
            shared.async_load(
                lse_desc, [batch, head, row], q_full.index(slot), lse_bufs.index(slot)
            )
            mbarrier.expect(do_full.index(slot), of_q)
            shared.async_load(
                do_desc, [batch, head, row, 0], do_full.index(slot), do_bufs.index(slot)
            )
            shared.async_load(
                delta_desc, [batch, head, row], do_full.index(slot), delta_bufs.index(slot)
            )
            count += 1


@gluon.jit
def _sums_of(buf, LAYOUT: gl.constexpr):
    # one number for each query of a tile
    M: gl.constexpr = buf.shape[2]
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    return shared.reinterpret(buf, gl.float32, [M], flat).load(gl.SliceLayout(0, LAYOUT))


@gluon.jit
def _wait_for_turns(
    bars, turns_ptr, job, sizes, IS_CAUSAL: gl.constexpr, M: gl.constexpr, STAGES: gl.constexpr
):
    # The role of one more warp: says of each tile of queries when the programs before have added to its dq.
    _, _, _, empty, _, _, turn, _ = bars
    _, n_repeats, n_queries, _, _, _ = sizes
    place, block, n_tiles, _ = _keys_of(job, sizes, IS_CAUSAL, M)
    # of the first head's last tile
    turns_ptr += (place * n_repeats + 1) * gl.cdiv(n_queries, M) - 1
    count = 0
    for _ in range(n_repeats):
        for t in range(n_tiles):
            slot = count % STAGES
            mbarrier.wait(empty.index(slot), ((count // STAGES) & 1) ^ 1)
            n_added = gl.atomic_add(turns_ptr - t, 0, sem="acquire")
            while n_added < block:
                n_added = gl.atomic_add(turns_ptr - t, 0, sem="acquire")
            mbarrier.arrive(turn.index(slot), count=1)
            count += 1
        turns_ptr += gl.cdiv(n_queries, M)


@gluon.jit
def _pass_turns_on(
    bars, turns_ptr, job, sizes, IS_CAUSAL: gl.constexpr, M: gl.constexpr, STAGES: gl.constexpr
):
    # The role of the last: counts what both groups have added. Its release waits for their sums to arrive,
    # which takes as long as half a tile's products.
    _, _, _, empty, _, _, _, added = bars
    _, n_repeats, n_queries, _, _, _ = sizes
    place, _, n_tiles, _ = _keys_of(job, sizes, IS_CAUSAL, M)
    turns_ptr += (place * n_repeats + 1) * gl.cdiv(n_queries, M) - 1
    count = 0
    for _ in range(n_repeats):
        for t in range(n_tiles):
            slot = count % STAGES
            mbarrier.wait(added.index(slot), (count // STAGES) & 1)
            mbarrier.arrive(empty.index(slot), count=1)
            gl.atomic_add(turns_ptr - t, 1, sem="release")
            count += 1
        turns_ptr += gl.cdiv(n_queries, M)


@gluon.jit
def _idle(
    bars, turns_ptr, job, sizes, IS_CAUSAL: gl.constexpr, M: gl.constexpr, STAGES: gl.constexpr
):
    pass


@gluon.jit
def _add(dq_ptr, dq):
    # Half of a tile of dq, (64, C), to its sum. In the buffer the four numbers that a thread holds of 2 rows by
    # 2 columns lie together, behind them the next thread's: 16 bytes a thread, 512 of a warp in one piece.
    C: gl.constexpr = dq.shape[1]
    dq = dq.reshape([4, 2, 8, C // 8, 4, 2]).permute((3, 0, 2, 4, 1, 5)).reshape([64 * C])
    ptrs = dq_ptr + gl.arange(0, 64 * C, layout=dq.type.layout)
    gl.atomic_add(ptrs, dq, sem="relaxed")


@gluon.jit
def _half_of_dq(ds_bufs, first, k_bufs, WHO: gl.constexpr):
    # ds k, summed over the keys of both groups: of 64 queries the first or the second half of the columns, of
    # 128 queries the first or the second 64 rows.
    M: gl.constexpr = ds_bufs.shape[2]
    D: gl.constexpr = k_bufs.shape[4]
    COLUMNS: gl.constexpr = D // 2 if M == 64 else D
    dq = gl.zeros((64, COLUMNS), gl.float32, shared.sums_layout(COLUMNS))
    for who in gl.static_range(2):
        ds, k = ds_bufs.index(first + who), k_bufs.index(who).reshape([64, D])
        if M == 64:
            k = k.slice(WHO * COLUMNS, COLUMNS, dim=1)
        else:
            ds = ds.slice(WHO * 64, 64, dim=1)
        dq = hopper.warpgroup_mma(ds.permute((1, 0)), k, dq, use_acc=who > 0, is_async=True)
    return dq


@gluon.jit
def _multiply(
    dk_desc, dv_desc, bufs, bars, dq_ptr, job, factor, scale, sizes,
    WHO: gl.constexpr, IS_CAUSAL: gl.constexpr, CUT: gl.constexpr, DETERMINISTIC: gl.constexpr,
):  # fmt: skip
    # The role of a warp group: 64 keys.
    q_bufs, k_bufs, v_bufs, do_bufs, lse_bufs, delta_bufs, ds_bufs = bufs
    kv_full, q_full, do_full, empty, ds_full, dq_over, turn, added = bars
    M: gl.constexpr = q_bufs.shape[3]
    D: gl.constexpr = q_bufs.shape[4]
    STAGES: gl.constexpr = q_bufs.shape[0]
    DTYPE: gl.constexpr = q_bufs.dtype
    S: gl.constexpr = shared.sums_layout(M)
    ACC: gl.constexpr = shared.sums_layout(D)
    LEFT: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=ACC, k_width=2)
    n_kv_heads, n_repeats, n_queries, n_keys, _, _ = sizes
    place, block, n_tiles, n_whole = _keys_of(job, sizes, IS_CAUSAL, M)
    first_key = block * _KEYS + WHO * 64
    j = first_key + gl.arange(0, 64, layout=gl.SliceLayout(1, S))
    k, v = k_bufs.index(WHO).reshape([64, D]), v_bufs.index(WHO).reshape([64, D])
    none = gl.zeros((64, M), gl.float32, S)
    dk = gl.zeros((64, D), gl.float32, ACC)
    dv = gl.zeros((64, D), gl.float32, ACC)
    mbarrier.wait(kv_full.index(0), 0)
    count = 0
    n_halves = gl.cdiv(n_queries, M) * 2
    dq_ptr += (place * n_repeats * n_halves + WHO).to(gl.int64) * (M * D // 2)
    for _ in range(n_repeats):
        # the tiles that see all keys, then the others
        for MASKED in gl.static_range(2 if IS_CAUSAL or CUT else 1):
            for t in range(n_whole if MASKED else 0, n_tiles if MASKED else n_whole):
                slot, phase = count % STAGES, (count // STAGES) & 1
                q, do = q_bufs.index(slot).reshape([M, D]), do_bufs.index(slot).reshape([M, D])
                mbarrier.wait(q_full.index(slot), phase)
                s = hopper.warpgroup_mma(k, q.permute((1, 0)), none, use_acc=False, is_async=True)
                mbarrier.wait(do_full.index(slot), phase)
                dp = hopper.warpgroup_mma(v, do.permute((1, 0)), none, use_acc=False, is_async=True)
                s = hopper.warpgroup_mma_wait(1, deps=(s,))
                lse = _sums_of(lse_bufs.index(slot), S)
                # at most 1, as in _weights of attention.py
                shift = s * factor - lse[None, :]
                half = n_halves - 2 * (t + 1)
                if MASKED:
                    # key j is seen from query j on, or from 0 on, or from none
                    first = j - half * (M // 2) if IS_CAUSAL else j * 0
                    first = gl.where(j < n_keys, first, M)
                    i = gl.arange(0, M, layout=gl.SliceLayout(0, S))
                    shift = gl.where(i[None, :] >= first[:, None], shift, -float("inf"))
                p = gl.exp2(gl.minimum(shift, 0.0, propagate_nan=tl.PropagateNan.ALL))
                weights = gl.convert_layout(p.to(DTYPE), LEFT)
                # long over, but it ends a basic block: else ptxas moves the wait for dp before the exponentials
                mbarrier.wait(do_full.index(slot), phase)
                dp, weights = hopper.warpgroup_mma_wait(0, deps=(dp, weights))
                dv = hopper.warpgroup_mma(weights, do, dv, is_async=True)
                # read here, not sooner: no register holds it beside all others
                ds = p * (dp - _sums_of(delta_bufs.index(slot), S)[None, :])
                if MASKED:
                    ds = gl.where(p == 0.0, 0.0, ds)  # 0 times NaN is NaN
                ds = ds.to(DTYPE)
                # Two places in turn: who writes here has had the other's dsᵀ of the tile before, and that came
                # after the other's product of what lies here.
                swap = count % 2
                ds_bufs.index(2 * swap + WHO).store(ds)
                hopper.fence_async_shared()
                mbarrier.arrive(ds_full.index(swap), count=1)
                mbarrier.wait(ds_full.index(swap), (count // 2) & 1)
                dq = _half_of_dq(ds_bufs, 2 * swap, k_bufs, WHO)
                ds = gl.convert_layout(ds, LEFT)
                dk = hopper.warpgroup_mma(ds, q, dk, is_async=True)
                if DETERMINISTIC:
                    mbarrier.wait(turn.index(slot), phase)
                dq, dv, weights = hopper.warpgroup_mma_wait(1, deps=(dq, dv, weights))
                _add(dq_ptr + half * (M * D // 2), dq)
                if DETERMINISTIC:
                    shared.barrier()  # all threads of the group have added
                    mbarrier.arrive(added.index(slot), count=1)
                dk, ds = hopper.warpgroup_mma_wait(0, deps=(dk, ds))
                mbarrier.arrive(empty.index(slot), count=1)
                count += 1
        dq_ptr += n_halves * (M * D // 2)
    at = [place // n_kv_heads, place % n_kv_heads, first_key, 0]
    v_bufs.index(WHO).reshape([64, D]).store(dv.to(DTYPE))
    hopper.fence_async_shared()
    shared.async_store(dv_desc, at, v_bufs.index(WHO))
    mbarrier.arrive(dq_over.index(0), count=1)
    mbarrier.wait(dq_over.index(0), 0)  # the other group reads no k any more
    k_bufs.index(WHO).reshape([64, D]).store((dk * scale).to(DTYPE))
    hopper.fence_async_shared()
    shared.async_store(dk_desc, at, k_bufs.index(WHO))
    tma.store_wait(0)


@gluon.jit(
    do_not_specialize=["n_kv_heads", "n_repeats", "n_queries", "n_keys", "n_places", "n_wide"]
)
def _attention_bwd_gluon_kernel(
    dq_ptr, turns_ptr, do_desc, q_desc, k_desc, v_desc, lse_desc, delta_desc, dk_desc, dv_desc, factor, scale,
    n_kv_heads, n_repeats, n_queries, n_keys, n_places, n_wide,
    IS_CAUSAL: gl.constexpr, CUT: gl.constexpr, DETERMINISTIC: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    # One program handles 128 keys of one head of k and v. turns: how many programs took a number, then how many
    # have added to each tile of dq.
    M: gl.constexpr = q_desc.block_type.shape[2]
    D: gl.constexpr = q_desc.block_type.shape[3]
    dtype: gl.constexpr = q_desc.dtype
    bars = (
        gluon_kernels._barriers(1, 1),  # k and v are there
        gluon_kernels._barriers(STAGES, 1),  # q and lse
        gluon_kernels._barriers(STAGES, 1),  # do and delta
        # both groups have done with these, and who passes a turn on has seen it
        gluon_kernels._barriers(STAGES, 3 if DETERMINISTIC else 2),
        gluon_kernels._barriers(2, 2),  # both halves of dsᵀ are there
        gluon_kernels._barriers(1, 2),  # both groups have done with k
        gluon_kernels._barriers(STAGES, 1),  # it is this program's turn to add
        gluon_kernels._barriers(STAGES, 2),  # both groups have added
    )
    ds_layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    bufs = (
        gl.allocate_shared_memory(dtype, [STAGES, 1, 1, M, D], q_desc.layout),
        gl.allocate_shared_memory(dtype, [2, 1, 1, 64, D], k_desc.layout),
        gl.allocate_shared_memory(dtype, [2, 1, 1, 64, D], v_desc.layout),
        gl.allocate_shared_memory(dtype, [STAGES, 1, 1, M, D], do_desc.layout),
        gl.allocate_shared_memory(gl.float32, [STAGES, 1, 1, M], lse_desc.layout),
        gl.allocate_shared_memory(gl.float32, [STAGES, 1, 1, M], delta_desc.layout),
        gl.allocate_shared_memory(dtype, [4, 64, M], ds_layout),
    )
    descs = q_desc, k_desc, v_desc, do_desc, lse_desc, delta_desc
    job = gl.program_id(0)
    if DETERMINISTIC:
        job = gl.atomic_add(turns_ptr, 1)
        turns_ptr += 1
    sizes = n_kv_heads, n_repeats, n_queries, n_keys, n_places, n_wide
    gl.warp_specialize(
        [
            (_multiply, (dk_desc, dv_desc, bufs, bars, dq_ptr, job, factor, scale, sizes,
                         0, IS_CAUSAL, CUT, DETERMINISTIC)),
            (_multiply, (dk_desc, dv_desc, bufs, bars, dq_ptr, job, factor, scale, sizes,
                         1, IS_CAUSAL, CUT, DETERMINISTIC)),
            (_fetch_queries, (descs, bufs, bars, job, sizes, IS_CAUSAL)),
            (_wait_for_turns if DETERMINISTIC else _idle, (bars, turns_ptr, job, sizes, IS_CAUSAL, M, STAGES)),
            (_pass_turns_on if DETERMINISTIC else _idle, (bars, turns_ptr, job, sizes, IS_CAUSAL, M, STAGES)),
        ],
        [4, 1, 1, 1],
        [240, 24, 24, 24],
    )  # fmt: skip


@triton.jit(do_not_specialize=["n_queries", "n_tiles"])
def _attention_round_dq_kernel(
    sums_ptr, dq_ptr, scale, n_heads, n_queries, n_tiles, stride_b, stride_h, stride_s,
    M: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    # One program handles a tile of M queries of one head: scales and rounds dq, from where _add has left it.
    place, tile = tl.program_id(0) // n_tiles, tl.program_id(0) % n_tiles
    batch, head = (place // n_heads).to(tl.int64), (place % n_heads).to(tl.int64)
    sums = tl.load(sums_ptr + tl.program_id(0).to(tl.int64) * (M * D) + tl.arange(0, M * D))
    C: tl.constexpr = D // 2 if M == 64 else D
    # half, column // 8, row // 16, row % 8, column // 2 % 4, row // 8 % 2, column % 2
    sums = sums.reshape(2, C // 8, 4, 8, 4, 2, 2)
    sums = sums.permute(2, 5, 3, 0, 1, 4, 6) if M == 64 else sums.permute(0, 2, 5, 3, 1, 4, 6)
    i, d = tile * M + tl.arange(0, M), tl.arange(0, D)
    dq_ptrs = dq_ptr + batch * stride_b + head * stride_h + (i.to(tl.int64) * stride_s)[:, None]
    dq = (sums.reshape(M, D) * scale).to(dq_ptr.dtype.element_ty)
    tl.store(dq_ptrs + d[None, :], dq, mask=(i < n_queries)[:, None])


def _padded(t):
    """One number a query, with rows on 16-byte boundaries, as TMA wants them; what it adds is 0."""
    n = -t.shape[-1] % 4
    return torch.nn.functional.pad(t, (0, n)) if n else t


def launch_backward(
    do, q, k, v, lse, delta, dq, dk, dv, is_causal, scale, deterministic=False,
    m=None, stages=2, n_wide=None,
):  # fmt: skip
    """Write dq, dk and dv, as _launch_backward of attention.py does; all 16 bits, D 64 or 128.

    deterministic: the same bits in every run. For tuning: m, queries in a tile (64, or 128 where D is 64);
    stages, tiles of them on their way (2 or more); n_wide, the heads of k and v whose keys take turns.
    """
    (batch, n_heads, n_queries, dim), (_, n_kv_heads, n_keys, _) = q.shape, k.shape
    m = m or (128 if dim == 64 and n_queries > 1024 else 64)
    n_wide = n_wide or (32 if deterministic and is_causal else 8)
    n_places, n_tiles = batch * n_kv_heads, batch * n_heads * host.cdiv(n_queries, m)
    n_sums, turns = n_tiles * m * dim, None
    sums = lse.new_zeros(n_sums + (1 + n_tiles if deterministic else 0))
    if deterministic:
        turns = sums[n_sums:].view(torch.int32)
    tiles = ((do, m, dim), (q, m, dim), (k, 64, dim), (v, 64, dim), (_padded(lse), m), (_padded(delta), m),
             (dk, 64, dim), (dv, 64, dim))  # fmt: skip
    host.run(
        _attention_bwd_gluon_kernel, (n_places * host.cdiv(n_keys, _KEYS.value),),
        (sums, turns, *[shared.descriptor_of(*tile) for tile in tiles]), scale * 1.4426950408889634, scale,
        n_kv_heads, n_heads // n_kv_heads, n_queries, n_keys, n_places, n_wide,
        IS_CAUSAL=is_causal, CUT=n_keys % _KEYS.value != 0, DETERMINISTIC=deterministic, STAGES=stages,
        num_warps=4,
    )  # fmt: skip
    host.run(
        _attention_round_dq_kernel, (n_tiles,), (sums, dq), scale, n_heads, n_queries,
        host.cdiv(n_queries, m), *dq.stride()[:3], M=m, D=dim, num_warps=4,
    )  # fmt: skip
