# SPDX-License-Identifier: MIT
# Copyright (c) 2026 The Fused Kernels authors; Fused Kernels 0.1.0, lib/ops/_attention_gluon.py
"""The forward pass of attention on Hopper, in roles: two groups that multiply, one warp that fetches by TMA.

For 16 bits, causal or without a mask. Programs stay, and go from job to job, 128 queries of a head each. Where
jobs are of different lengths, as in causal attention, who is done takes the next number from a counter.
"""

import math

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

if __package__:  # shared by the ops
    from . import _gluon as shared
    from . import _host as host
else:  # the same, in a plain folder
    import _gluon as shared
    import _host as host


_IN_L2 = 24 * 2**20  # bytes of k and v that are read again: half of an H200's L2 cache


@gluon.jit
def _barriers(N: gl.constexpr, COUNT: gl.constexpr):
    bars = gl.allocate_shared_memory(gl.int64, [N, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(N):
        mbarrier.init(bars.index(i), count=COUNT)
    return bars


@gluon.jit
def _say(buf, number):
    # One number in shared memory, from the role that fetches to both others
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    buf.store(gl.full((1,), number, gl.int32, layout))


@gluon.jit
def _said(buf):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    return gl.max(buf.load(layout), axis=0)


@gluon.jit
def _job_of(
    job, n_places, n_blocks, n_wide, n_keys,
    IS_CAUSAL: gl.constexpr, ROWS: gl.constexpr, BLOCK_N: gl.constexpr,
):  # fmt: skip
    # The place, first query and tiles of keys of one number: down n_wide places, whose k and v stay in the L2
    # cache, then a block on. The blocks with most keys come first.
    first = job // (n_wide * n_blocks) * n_wide
    height = gl.minimum(n_places - first, n_wide)
    job = job % (n_wide * n_blocks)
    row = (n_blocks - 1 - job // height) * ROWS
    end = gl.minimum(n_keys, row + ROWS) if IS_CAUSAL else n_keys
    return first + job % height, row, gl.cdiv(end, BLOCK_N)


@gluon.jit
def _fetch(
    taken_ptr, q_desc, k_desc, v_desc, q_bufs, k_bufs, v_bufs, job_buf, bars, n_heads, n_repeats, n_keys,
    n_places, n_blocks, n_wide, IS_CAUSAL: gl.constexpr,
):  # fmt: skip
    # The role of one warp: takes a job, and asks TMA for tiles, as soon as both others have done with what lies
    # in their place. It asks for the next job first: the answer is there when it is needed.
    q_full, q_empty, k_full, k_empty, v_full, v_empty = bars
    M: gl.constexpr = q_bufs.shape[3]
    N: gl.constexpr = k_bufs.shape[3]
    STAGES: gl.constexpr = k_bufs.shape[0]
    count = 0
    turn = 0
    job = gl.program_id(0)
    while job < n_places * n_blocks:
        following = job + gl.num_programs(0)
        if taken_ptr is not None:
            following = gl.num_programs(0) + gl.atomic_add(taken_ptr, 1, sem="relaxed")
        place, row, n_tiles = _job_of(job, n_places, n_blocks, n_wide, n_keys, IS_CAUSAL, 2 * M, N)
        batch, head = place // n_heads, place % n_heads
        mbarrier.wait(q_empty.index(0), (turn & 1) ^ 1)
        _say(job_buf, job)
        mbarrier.expect(q_full.index(0), 2 * q_desc.block_type.nbytes)
        for who in gl.static_range(2):
            at = [batch, head, row + who * M, 0]
            shared.async_load(q_desc, at, q_full.index(0), q_bufs.index(who))
        for t in range(n_tiles):
            slot = count % STAGES
            phase = ((count // STAGES) & 1) ^ 1
            at = [batch, head // n_repeats, (n_tiles - 1 - t) * N, 0]
            mbarrier.wait(k_empty.index(slot), phase)
            mbarrier.expect(k_full.index(slot), k_desc.block_type.nbytes)
            shared.async_load(k_desc, at, k_full.index(slot), k_bufs.index(slot))
            mbarrier.wait(v_empty.index(slot), phase)
            mbarrier.expect(v_full.index(slot), v_desc.block_type.nbytes)
            shared.async_load(v_desc, at, v_full.index(slot), v_bufs.index(slot))
            count += 1
        turn += 1
        job = following
    mbarrier.wait(q_empty.index(0), (turn & 1) ^ 1)
    _say(job_buf, n_places * n_blocks)
    mbarrier.arrive(q_full.index(0), count=1)


@gluon.jit
def _soften(s, top, total, shift, factor, power):
    # As in _attention_fwd_kernel; also what o so far is multiplied by.
    top = gl.maximum(top, gl.max(s, axis=1))
    factor = gl.where(gl.abs(top * factor) < 2.0**27, factor, power)
    p = gl.exp2(s * factor[:, None] - (top * factor)[:, None])
    old = gl.exp2(shift - top * factor)
    return p, top, total * old + gl.sum(p, axis=1), top * factor, old


@gluon.jit
def _attend(
    q_bufs, k_bufs, v_bufs, o_bufs, job_buf, bars, o_desc, lse_ptr, factor, power, n_heads, n_queries, n_keys,
    n_places, n_blocks, n_wide, WHO: gl.constexpr, IS_CAUSAL: gl.constexpr,
):  # fmt: skip
    # The role of a warp group: 64 queries. q kᵀ of a tile and p v of the one before are on their way together,
    # and the softmax of the former goes beside the latter, and beside the products of the other group.
    q_full, q_empty, k_full, k_empty, v_full, v_empty = bars
    M: gl.constexpr = q_bufs.shape[3]
    D: gl.constexpr = q_bufs.shape[4]
    N: gl.constexpr = k_bufs.shape[3]
    STAGES: gl.constexpr = k_bufs.shape[0]
    DTYPE: gl.constexpr = q_bufs.dtype
    S: gl.constexpr = shared.sums_layout(N)
    ACC: gl.constexpr = shared.sums_layout(D)
    P: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=ACC, k_width=2)
    q = q_bufs.index(WHO).reshape([M, D])
    count = 0
    turn = 0
    mbarrier.wait(q_full.index(0), 0)
    job = _said(job_buf)
    while job < n_places * n_blocks:
        place, row, n_tiles = _job_of(job, n_places, n_blocks, n_wide, n_keys, IS_CAUSAL, 2 * M, N)
        row += WHO * M
        i = row + gl.arange(0, M, layout=gl.SliceLayout(1, S))
        top = gl.full((M,), -(2.0**125), gl.float32, gl.SliceLayout(1, S))
        total = gl.zeros((M,), gl.float32, gl.SliceLayout(1, S))
        # the last keys first: theirs is the only tile that some query sees in part
        mbarrier.wait(k_full.index(count % STAGES), (count // STAGES) & 1)
        k = k_bufs.index(count % STAGES).reshape([N, D]).permute((1, 0))
        none = gl.zeros((M, N), gl.float32, S)
        s = hopper.warpgroup_mma(q, k, none, use_acc=False, is_async=True)
        s = hopper.warpgroup_mma_wait(0, deps=(s,))
        mbarrier.arrive(k_empty.index(count % STAGES), count=1)
        j = (n_tiles - 1) * N + gl.arange(0, N, layout=gl.SliceLayout(0, S))
        end = gl.minimum(i + 1, n_keys) if IS_CAUSAL else i * 0 + n_keys
        s = gl.where(j[None, :] < end[:, None], s, -float("inf"))
        p, top, total, shift, _ = _soften(s, top, total, top * factor, factor, power)
        p = gl.convert_layout(p.to(DTYPE), P)
        o = gl.zeros((M, D), gl.float32, ACC)
        for _ in range(1, n_tiles):
            last = count % STAGES
            last_phase = (count // STAGES) & 1
            count += 1
            mbarrier.wait(k_full.index(count % STAGES), (count // STAGES) & 1)
            k = k_bufs.index(count % STAGES).reshape([N, D]).permute((1, 0))
            s = hopper.warpgroup_mma(q, k, none, use_acc=False, is_async=True)
            mbarrier.wait(v_full.index(last), last_phase)
            o = hopper.warpgroup_mma(p, v_bufs.index(last).reshape([N, D]), o, is_async=True)
            s = hopper.warpgroup_mma_wait(1, deps=(s,))
            mbarrier.arrive(k_empty.index(count % STAGES), count=1)
            new, top, total, shift, old = _soften(s, top, total, shift, factor, power)
            new = gl.convert_layout(new.to(DTYPE), P)
            # long over, but it ends a basic block: else ptxas moves the wait for o before the softmax
            mbarrier.wait(v_full.index(last), last_phase)
            o, p = hopper.warpgroup_mma_wait(0, deps=(o, new))
            mbarrier.arrive(v_empty.index(last), count=1)
            o *= gl.convert_layout(old, gl.SliceLayout(1, ACC))[:, None]
        mbarrier.arrive(q_empty.index(0), count=1)
        mbarrier.wait(v_full.index(count % STAGES), (count // STAGES) & 1)
        v = v_bufs.index(count % STAGES).reshape([N, D])
        o = hopper.warpgroup_mma(p, v, o, is_async=True)
        o = hopper.warpgroup_mma_wait(0, deps=(o,))
        mbarrier.arrive(v_empty.index(count % STAGES), count=1)
        count += 1
        lse = top * factor + gl.log2(total)
        gl.store(lse_ptr + place.to(gl.int64) * n_queries + i, lse, mask=i < n_queries)
        o *= gl.convert_layout(1.0 / total, gl.SliceLayout(1, ACC))[:, None]
        tma.store_wait(0)  # of the job before
        o_bufs.index(WHO).reshape([M, D]).store(o.to(DTYPE))
        hopper.fence_async_shared()
        at = [place // n_heads, place % n_heads, row, 0]
        shared.async_store(o_desc, at, o_bufs.index(WHO))
        turn += 1
        mbarrier.wait(q_full.index(0), turn & 1)
        job = _said(job_buf)
    tma.store_wait(0)


@gluon.jit(
    do_not_specialize=[
        "n_heads",
        "n_repeats",
        "n_queries",
        "n_keys",
        "n_places",
        "n_blocks",
        "n_wide",
    ]
)
def _attention_gluon_kernel(
    lse_ptr, taken_ptr, q_desc, k_desc, v_desc, o_desc, factor, power, n_heads, n_repeats, n_queries, n_keys,
    n_places, n_blocks, n_wide, IS_CAUSAL: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    # One program on each SM takes 128 queries of one head after another: two groups multiply, a warp fetches.
    # taken: how many jobs were taken after the first of each program; None where every n-th job is a program's.
    bars = (_barriers(1, 1), _barriers(1, 2), _barriers(STAGES, 1), _barriers(STAGES, 2),
            _barriers(STAGES, 1), _barriers(STAGES, 2))  # fmt: skip
    dtype: gl.constexpr = q_desc.dtype
    M: gl.constexpr = q_desc.block_type.shape[2]
    N: gl.constexpr = k_desc.block_type.shape[2]
    D: gl.constexpr = q_desc.block_type.shape[3]
    q_bufs = gl.allocate_shared_memory(dtype, [2, 1, 1, M, D], q_desc.layout)
    k_bufs = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, N, D], k_desc.layout)
    v_bufs = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, N, D], v_desc.layout)
    o_bufs = gl.allocate_shared_memory(dtype, [2, 1, 1, M, D], o_desc.layout)
    job_buf = gl.allocate_shared_memory(gl.int32, [1], gl.SwizzledSharedLayout(1, 1, 1, order=[0]))
    # constants stand in the calls themselves: in a tuple with a name they would become values
    gl.warp_specialize(
        [
            (_attend, (q_bufs, k_bufs, v_bufs, o_bufs, job_buf, bars, o_desc, lse_ptr, factor, power,
                       n_heads, n_queries, n_keys, n_places, n_blocks, n_wide, 0, IS_CAUSAL)),
            (_attend, (q_bufs, k_bufs, v_bufs, o_bufs, job_buf, bars, o_desc, lse_ptr, factor, power,
                       n_heads, n_queries, n_keys, n_places, n_blocks, n_wide, 1, IS_CAUSAL)),
            (_fetch, (taken_ptr, q_desc, k_desc, v_desc, q_bufs, k_bufs, v_bufs, job_buf, bars, n_heads,
                      n_repeats, n_keys, n_places, n_blocks, n_wide, IS_CAUSAL)),
        ],
        [4, 1],
        [232, 24],
    )  # fmt: skip


def run_on(gpu):
    """Whether _attention_gluon_kernel runs there: wgmma is Hopper's, and Triton's interpreter has no Gluon."""
    return host.generation(gpu) == 9 and not host.ON_CPU


def _n_wide(n_places, n_bytes):
    """Of how many heads the longest blocks come first: of all, if their k and v, n_bytes each, stay in L2."""
    n_groups = min(host.cdiv(n_places * n_bytes, _IN_L2), host.cdiv(n_places, 8))
    return host.cdiv(n_places, max(1, n_groups))


def launch_roles(q, k, v, o, lse, is_causal, scale, by_counter=True, n_wide=None):
    """Write o and lse, as _launch of attention.py does; all 16 bits, and D at most 128.

    To compare: by_counter=False makes every n-th job a program's, however long it is; n_wide, as _n_wide's.
    """
    (batch, n_heads, n_queries, dim), (_, n_kv_heads, n_keys, _) = q.shape, k.shape
    width = 64 if dim <= 64 else 128
    tiles = ((q, 64), (k, 128), (v, 128), (o, 64))
    described = [shared.descriptor_of(t, n, width) for t, n in tiles]
    n_places, n_blocks = batch * n_heads, host.cdiv(n_queries, 128)
    factor, n_sms = scale * 1.4426950408889634, host.n_multiprocessors(q.device)
    if n_wide is None:
        n_wide = _n_wide(n_places, 4 * n_keys * width * n_kv_heads // n_heads) if is_causal else 8
    # without a mask all jobs are alike, and no counter has to be zeroed first
    by_counter = by_counter and is_causal and n_blocks > 1 and n_places * n_blocks > n_sms
    taken = torch.zeros(1, dtype=torch.int32, device=q.device) if by_counter else None
    host.run(
        _attention_gluon_kernel, (min(n_places * n_blocks, n_sms),),
        (lse, taken, *described), factor, 2.0 ** math.ceil(math.log2(factor)), n_heads, n_heads // n_kv_heads,
        n_queries, n_keys, n_places, n_blocks, n_wide, IS_CAUSAL=is_causal, STAGES=2, num_warps=4,
    )  # fmt: skip
