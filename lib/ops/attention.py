# SPDX-License-Identifier: MIT
# Copyright (c) 2026 The Fused Kernels authors; Fused Kernels 0.1.0, lib/ops/attention.py
"""attention: o = softmax(scale·q kᵀ + mask) v, without the matrix of Sq x Sk scores in memory.

Shapes    q, o: (B, H, Sq, D); k, v: (B, G, Sk, D), H a multiple of G: H/G heads of q share one of k and v,
          which is not repeated in memory. D from 1 to 256. Any strides: (B, S, H, D) goes in by .transpose(1,
          2), and o has q's memory layout. A tensor whose last dimension has gaps is copied.
Mask      Query i sees key j where all of these hold. Both count from 0, also where Sq and Sk differ (top left):
          is_causal              j <= i, as in PyTorch's scaled_dot_product_attention
          window (left, right)   i - left <= j <= i + right; -1 is no limit on that side
          align="bottom_right"   in both lines i + Sk - Sq for i, as in flash-attention: the last query sees the
                                 last key of a cache; with lengths, the last one that is no padding
          lengths (B,)           j < lengths[b]; the keys after these are padding and are never read.
                                 Clamped to 0 … Sk: refusing others would make the host wait.
          lengths (B, 2)         lengths[b, 0] <= j < lengths[b, 1]: padding on the left, too
          A query that sees no key has o = 0, and gradients of 0.
Packed    attention_varlen_triton: sequences of any lengths on end, (T, H, D), in one launch. Programs find
          their sequence by bisection of cu_seqlens; at most one a sequence and head is without work.
Dtypes    float16, bfloat16 (scores, softmax and sums in float32; weights rounded to 16 bits for the product
          with v), float32 (products by 3xTF32, 21 bits of each factor; never TF32) and float64.
Work      4·B·H·Sq·Sk·D FLOPs forward, 10 backward; about half when causal, as tiles that nothing sees are
          skipped. Traffic: q, k, v and o once each while k and v of a head stay in the L2 cache.
Method    Dao, FlashAttention-2, 2023: a tile of q goes along the keys with the largest score so far and the sum
          of exponentials. Few queries (decoding): the keys are cut in parts, and a second kernel adds the
          parts up; the queries of all heads that share k and v lie in one tile, so that each is read once.
          In 16 bits on Hopper: FlashAttention-3's roles, in Gluon (_attention_gluon.py), where they pay.
Backward  delta = rowsum(do·o), ds = p(do vᵀ - delta), dq = scale·ds k, dk = scale·dsᵀ q, dv = pᵀ do. In 16 bits
          o is rounded: where terms cancel, that stays. Saves q, k, v, o, a number a row. Kernels for delta, dq,
          and dk with dv (Hopper, 16 bits: _attention_bwd_gluon.py does all); the same bits, or atomics.
Copy it   by `make copy OP=attention TO=folder`, or with its imports, which stand beside it. MIT licence.
"""

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

if __package__:  # shared by the ops: `device` in kernels, `host` around them
    from . import _attention_bwd_gluon as gluon_backward
    from . import _attention_gluon as gluon_kernels
    from . import _device as device
    from . import _gluon as shared
    from . import _host as host
else:  # the same, in a plain folder
    import _attention_bwd_gluon as gluon_backward
    import _attention_gluon as gluon_kernels
    import _device as device
    import _gluon as shared
    import _host as host


class Tile(NamedTuple):
    """m queries and n keys: a piece of the scores; its warps and stages."""

    m: int
    n: int
    num_warps: int
    num_stages: int


class Plan(NamedTuple):
    """How one call is launched: the tile of each kernel, and which kernel runs.

    n_parts: of the keys, from 2 on with a second kernel that adds the parts up. Whether packed: queries of all
    heads that share k and v lie in one tile; roles: forward may go in roles; tma: TMA fetches tiles of dk, dv.
    """

    forward: Tile
    dq: Tile
    dkdv: Tile
    n_parts: int = 1
    packed: bool = False
    roles: bool = False
    tma: bool = False


def attention_eager(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: torch.Tensor | None = None, *,
    is_causal: bool = False, window: Sequence[int] | None = None, scale: float | None = None,
    align: str = "top_left",
) -> torch.Tensor:  # fmt: skip
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], dim=1) for t in (k, v))
    scores = q @ k.mT * scale  # (B, H, Sq, Sk)
    i = torch.arange(q.shape[2], device=q.device)[:, None]
    j = torch.arange(k.shape[2], device=q.device)
    starts, ends = 0, k.shape[2]
    if lengths is not None:
        lengths = lengths[..., None, None, None]
        starts, ends = lengths.unbind(1) if lengths.dim() == 5 else (0, lengths)
    if align == "bottom_right":
        i = i + (ends if lengths is None else ends.clamp(0, k.shape[2])) - q.shape[2]
    left, right = window or (-1, -1)
    hidden = j > i if is_causal else torch.zeros_like(j > i)
    if left >= 0:
        hidden = hidden | (j < i - left)
    if right >= 0:
        hidden = hidden | (j > i + right)
    if lengths is not None:
        hidden = hidden | (j < starts) | (j >= ends)
    weights = torch.softmax(scores.masked_fill(hidden, -float("inf")), dim=-1)
    return weights.masked_fill(hidden, 0.0) @ v  # of a query that sees no key they were NaN


@triton.jit
def _clamped(ptr, most):
    return tl.minimum(tl.maximum(tl.load(ptr), 0), most).to(tl.int32)


@triton.jit
def _sample(
    lengths_ptr, batch, n_keys, left, right,
    ALIGNED: tl.constexpr, STARTS: tl.constexpr, CU: tl.constexpr,
):  # fmt: skip
    # Of a sample: how many keys are no padding, how far a query sees them, and, with STARTS, the first of them,
    # from which the others count. ALIGNED: the last one with the last query; left, right are those of n_keys.
    length, first_key = n_keys, 0
    if STARTS:
        first_key = _clamped(lengths_ptr + 2 * batch, n_keys)
        length = tl.maximum(_clamped(lengths_ptr + 2 * batch + 1, n_keys) - first_key, 0)
    elif lengths_ptr is not None and not CU:
        length = _clamped(lengths_ptr + batch, n_keys)
    if ALIGNED and not CU:
        left, right = left + (n_keys - length), right - (n_keys - length)
    elif STARTS:
        left, right = left + first_key, right - first_key
    return length, left, right, tl.cast(first_key, tl.int64)


@triton.jit
def _rows_of(cu_ptr, sequence, n_sequences, n_rows):
    # The first row of a packed sequence and their number; behind the last, number n_sequences, all the rest.
    # Clamped, for a wrong cu must not lead out of memory.
    first, end = _clamped(cu_ptr + sequence, n_rows), n_rows
    if sequence < n_sequences:
        end = _clamped(cu_ptr + sequence + 1, n_rows)
    return first, tl.maximum(end - first, 0)


@triton.jit
def _packed_sample(
    cu_ptr, tile, n_tiles, n_queries, n_keys, left, right,
    CU: tl.constexpr, ALIGNED: tl.constexpr, OF_KEYS: tl.constexpr, BLOCK: tl.constexpr,
    PACKED: tl.constexpr = 1,
):  # fmt: skip
    # Of packed sequences: which tile of its sequence a tile is, the sequence's first query, their number, its
    # first key, their number, and how far a query sees. CU: rows of cu, 1 or, with one for keys, 2.
    # Tiles of sequence s count from cu[s]·PACKED // BLOCK + s on: room for all, and at most one each is empty.
    n_rows = n_keys if OF_KEYS else n_queries
    n_sequences = n_tiles - n_rows * PACKED // BLOCK - 1
    keys_ptr = cu_ptr + (CU - 1) * (n_sequences + 1)
    of_tile_ptr = keys_ptr if OF_KEYS else cu_ptr
    low, high, before = 0, n_sequences, 0
    while low < high:  # the last sequence whose tiles begin here or before
        middle = (low + high + 1) // 2
        begin = _clamped(of_tile_ptr + middle, n_rows) * PACKED // BLOCK + middle
        low, high = tl.where(begin <= tile, middle, low), tl.where(begin <= tile, high, middle - 1)
        before = tl.where(begin <= tile, begin, before)
    first_query, n_i = _rows_of(cu_ptr, low, n_sequences, n_queries)
    first_key, n_j = _rows_of(keys_ptr, low, n_sequences, n_keys)
    if ALIGNED:
        shift = (n_j - n_keys) - (n_i - n_queries)
        left, right = left - shift, right + shift
    # what lies behind the last sequence sees nothing, and nothing sees it
    if OF_KEYS:
        n_i = tl.where(low < n_sequences, n_i, 0)
    else:
        n_j = tl.where(low < n_sequences, n_j, 0)
    return tile - before, first_query.to(tl.int64), n_i, first_key.to(tl.int64), n_j, left, right


@triton.jit
def _met_tiles(first, last, before, after, begin, end, BLOCK: tl.constexpr):
    # x meets y where y - before <= x <= y + after. Of begin..end (not with it) the x that meet some y of
    # first..last: where their n tiles start, and the tiles a..b of them in which all x meet all y.
    start = tl.maximum(begin, first - before) // BLOCK * BLOCK
    n = tl.cdiv(tl.maximum(tl.minimum(end, last + after + 1) - start, 0), BLOCK)
    a = tl.minimum(tl.cdiv(tl.maximum(begin, last - before) - start, BLOCK), n)
    b = tl.maximum(tl.minimum(end, first + after + 1) - start, 0) // BLOCK
    return start, a, tl.maximum(a, b), n


@triton.jit
def _load_rows(
    matrix_ptr, first, n_rows, stride, CUT: tl.constexpr,
    DIM: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr, desc=None, sample=0, head=0, row=0,
):  # fmt: skip
    # BLOCK rows of a matrix from `first` on; zeros where there are none. CUT: whether that may be. A descriptor
    # holds address, sizes and strides of all heads: with one, a single thread asks TMA for the tile at `row`.
    rows, d = tl.arange(0, BLOCK)[:, None], tl.arange(0, BLOCK_D)[None, :]
    ptrs = matrix_ptr + first.to(tl.int64) * stride + (rows.to(tl.int64) * stride + d)
    if desc is not None:
        tile = desc.load([sample, head, row, 0]).reshape(BLOCK, BLOCK_D)
    elif CUT:
        tile = tl.load(ptrs, mask=(first + rows < n_rows) & (d < DIM), other=0.0)
    elif DIM < BLOCK_D:
        tile = tl.load(ptrs, mask=d < DIM, other=0.0)
    else:
        tile = tl.load(ptrs)
    return tile


@triton.jit
def _load_sums(ptr, desc, sample, head, n_heads, first, n_rows, n_all, row, BLOCK: tl.constexpr):
    # One for each row of one head. By pointers each thread copies all that its scores need, one by one.
    if desc is None:
        rows, start = first + tl.arange(0, BLOCK), (sample.to(tl.int64) * n_heads + head) * n_all
        numbers = tl.load(ptr + start + rows, mask=rows < n_rows, other=0.0)
    else:
        numbers = desc.load([sample, head, row]).reshape(BLOCK)
    return numbers


@triton.jit
def _store_rows(
    matrix_ptr, values, first, n_rows, stride,
    DIM: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    rows, d = tl.arange(0, BLOCK)[:, None], tl.arange(0, BLOCK_D)[None, :]
    ptrs = matrix_ptr + first.to(tl.int64) * stride + (rows.to(tl.int64) * stride + d)
    tl.store(ptrs, values, mask=(first + rows < n_rows) & (d < DIM))


@triton.jit
def _shift_of(top, factor):
    # top·factor, and the factor of all scores. x·factor - top·factor is one multiply-add, rounded once. It
    # can exceed 0 by the rounding error of top·factor. Where that error is large, no factor gives lower scores
    # any weight: there it becomes a power of 2, which rounds nothing.
    LIMIT: tl.constexpr = 2.0**56 if top.dtype == tl.float64 else 2.0**27
    factor = tl.where(tl.abs(top * factor) < LIMIT, factor, tl.exp2(tl.ceil(tl.log2(factor))))
    return top * factor, factor


@triton.jit
def _divide_by_sum(o, total, top, i, length, left, right):
    # o and lse, log2 of the sum of exponentials, of queries i. lse is inf for one that sees no key, so that in
    # the backward pass exp2(s - lse) is 0.
    sees = tl.maximum(i - left, 0) < tl.minimum(length, i + right + 1)
    total = tl.where(sees, total, 1.0)
    o = tl.where(sees[:, None], o * (1.0 / total)[:, None], 0.0)
    return o, tl.where(sees, top + tl.log2(total), float("inf"))


@triton.jit(do_not_specialize=["n_queries", "n_keys", "left", "right", "keys_per_part"])
def _attention_fwd_kernel(
    q_ptr, k_ptr, v_ptr, lengths_ptr, o_ptr, lse_ptr, total_ptr, scale: tl.float64,
    n_heads, n_repeats, n_queries, n_keys, left, right, keys_per_part,
    stride_qb, stride_qh, stride_qs, stride_kb, stride_kh, stride_ks,
    stride_vb, stride_vh, stride_vs, stride_ob, stride_oh, stride_os, stride_op,
    PACKED: tl.constexpr, NEGATIVE: tl.constexpr, PRECISION: tl.constexpr, COMPUTE: tl.constexpr,
    DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    ALIGNED: tl.constexpr = False, STARTS: tl.constexpr = False, CU: tl.constexpr = 0,
):  # fmt: skip
    # One program handles BLOCK_M queries of PACKED heads and a part of the keys, BLOCK_N at a time. With a
    # total_ptr it leaves o undivided, for _combine_kernel, and the largest score in place of lse.
    n_blocks = (
        tl.num_programs(0) * PACKED // n_heads if CU else tl.cdiv(n_queries * PACKED, BLOCK_M)
    )
    n_packs, n_i, n_j = n_heads // PACKED, n_queries, n_keys
    n_places = tl.num_programs(0) // n_blocks
    place = tl.program_id(0) // n_blocks
    # causal, the last queries have most to do: they begin
    block = n_blocks - 1 - tl.program_id(0) % n_blocks
    # int64: sample * stride, head * stride and row * stride pass 2**31 from 4 GiB of bfloat16 on
    batch, first_head = (place // n_packs).to(tl.int64), place % n_packs * PACKED
    kv_head = (first_head // n_repeats).to(tl.int64)
    if CU:
        block, first_query, n_i, begin, n_j, left, right = _packed_sample(
            lengths_ptr, block, n_blocks, n_queries, n_keys, left, right, CU, ALIGNED, False, BLOCK_M, PACKED
        )  # fmt: skip
        if block * BLOCK_M >= n_i * PACKED:
            return
        q_ptr, o_ptr = q_ptr + first_query * stride_qs, o_ptr + first_query * stride_os
        lse_ptr += first_query
        k_ptr, v_ptr = k_ptr + begin * stride_ks, v_ptr + begin * stride_vs
    row = block * BLOCK_M + tl.arange(0, BLOCK_M)
    i, head, d = row // PACKED, (first_head + row % PACKED).to(tl.int64), tl.arange(0, BLOCK_D)
    is_row = i < n_i
    q_ptrs = q_ptr + batch * stride_qb + (head * stride_qh + i.to(tl.int64) * stride_qs)[:, None]
    q = tl.load(q_ptrs + d[None, :], mask=is_row[:, None] & (d < DIM)[None, :], other=0.0)
    k_ptr += batch * stride_kb + kv_head * stride_kh
    v_ptr += batch * stride_vb + kv_head * stride_vh

    part = tl.program_id(1)
    length, left, right, skip = _sample(lengths_ptr, batch, n_j, left, right, ALIGNED, STARTS, CU)
    k_ptr, v_ptr = k_ptr + skip * stride_ks, v_ptr + skip * stride_vs
    end = tl.minimum(length, (part + 1) * keys_per_part)
    last = tl.minimum((block * BLOCK_M + BLOCK_M - 1) // PACKED, n_i - 1)
    start, a, b, n = _met_tiles(
        block * BLOCK_M // PACKED, last, left, right, part * keys_per_part, end, BLOCK_N
    )
    lowest, highest = (i - left)[:, None], tl.minimum(i + right, end - 1)[:, None]
    # exp(x) = exp2(x·log₂ e). Of a scale of 0 it is not quite 0, as hidden scores, -inf, stay what they are.
    log2_scale = tl.cast(tl.maximum(tl.abs(scale), 1e-30) * 1.4426950408889634, COMPUTE)
    # not -inf: where nothing is seen yet, -inf - -inf is NaN
    top = tl.full((BLOCK_M,), -(2.0**125), COMPUTE)
    shift, _ = _shift_of(top, log2_scale)
    total = tl.zeros((BLOCK_M,), COMPUTE)
    o = tl.zeros((BLOCK_M, BLOCK_D), COMPUTE)
    # first the tiles that all queries see whole, then the others
    for MASKED in tl.static_range(2):
        for t in range(n - (b - a) if MASKED else b - a):
            tile = tl.where(t < a, t, t + b - a) if MASKED else t + a
            j = start + tile * BLOCK_N
            k = _load_rows(k_ptr, j, end, stride_ks, MASKED, DIM, BLOCK_N, BLOCK_D)
            s = device.dot(q, k.T, None, PRECISION, COMPUTE)
            if NEGATIVE:
                s = -s
            if MASKED:
                js = j + tl.arange(0, BLOCK_N)[None, :]
                s = tl.where((js >= lowest) & (js <= highest), s, -float("inf"))
            top = tl.maximum(top, tl.max(s, axis=1))
            new_shift, factor = _shift_of(top, log2_scale)
            p = tl.exp2(s * factor[:, None] - new_shift[:, None])
            old = tl.exp2(shift - new_shift)
            total = total * old + tl.sum(p, axis=1)
            shift = new_shift
            v = _load_rows(v_ptr, j, end, stride_vs, MASKED, DIM, BLOCK_N, BLOCK_D)
            o = device.dot(p.to(v.dtype), v, o * old[:, None], PRECISION, COMPUTE)

    top *= log2_scale
    rows = (batch * n_heads + head) * n_queries + i
    o_ptrs = o_ptr + batch * stride_ob + (head * stride_oh + i.to(tl.int64) * stride_os)[:, None]
    if total_ptr is None:
        o, top = _divide_by_sum(o, total, top, i, length, left, right)
    else:
        o_ptrs += part.to(tl.int64) * stride_op
        rows += part.to(tl.int64) * n_places * PACKED * n_queries
        tl.store(total_ptr + rows, total, mask=is_row)
    tl.store(lse_ptr + rows, top, mask=is_row)
    tl.store(o_ptrs + d[None, :], o, mask=is_row[:, None] & (d < DIM)[None, :])


@triton.jit(do_not_specialize=["n_rows", "n_queries", "n_keys", "left", "right", "n_parts"])
def _combine_kernel(
    parts_ptr, tops_ptr, totals_ptr, lengths_ptr, o_ptr, lse_ptr,
    n_rows, n_heads, n_queries, n_keys, left, right, n_parts, stride_ob, stride_oh, stride_os,
    DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
    ALIGNED: tl.constexpr = False, STARTS: tl.constexpr = False,
):  # fmt: skip
    # One program handles BLOCK_M rows of o, (B·H·Sq, D), of all parts of the keys, (parts, B·H·Sq, D).
    COMPUTE: tl.constexpr = parts_ptr.dtype.element_ty
    row, d = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    is_row, row = row < n_rows, tl.minimum(row, n_rows - 1)
    mask = is_row[:, None] & (d < DIM)[None, :]
    top = tl.full((BLOCK_M,), -float("inf"), COMPUTE)
    total = tl.zeros((BLOCK_M,), COMPUTE)
    o = tl.zeros((BLOCK_M, BLOCK_D), COMPUTE)
    rows = row
    # in one order, whichever part was ready first: the same bits in every run
    for _ in range(n_parts):
        part_top, part_total = tl.load(tops_ptr + rows), tl.load(totals_ptr + rows)
        new_top = tl.maximum(top, part_top)
        old, new = tl.exp2(top - new_top), tl.exp2(part_top - new_top)
        part_o = tl.load(parts_ptr + rows[:, None] * DIM + d[None, :], mask=mask, other=0.0)
        o = o * old[:, None] + part_o * new[:, None]
        total = total * old + part_total * new
        top = new_top
        rows += n_rows
    place, i = row // n_queries, row % n_queries
    batch, head = place // n_heads, place % n_heads
    length, left, right, _ = _sample(lengths_ptr, batch, n_keys, left, right, ALIGNED, STARTS, 0)
    o, lse = _divide_by_sum(o, total, top, i, length, left, right)
    tl.store(lse_ptr + row, lse, mask=is_row)
    o_rows = o_ptr + batch * stride_ob + head * stride_oh + i * stride_os
    tl.store(o_rows[:, None] + d[None, :], o, mask=mask)


@triton.jit(do_not_specialize=["n_queries"])
def _delta_kernel(
    do_ptr, o_ptr, delta_ptr, n_heads, n_queries,
    stride_gb, stride_gh, stride_gs, stride_ob, stride_oh, stride_os,
    DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    # One program handles BLOCK_M rows of one head: delta = rowsum(do·o).
    COMPUTE: tl.constexpr = delta_ptr.dtype.element_ty
    n_blocks = tl.cdiv(n_queries, BLOCK_M)
    place, first = tl.program_id(0) // n_blocks, tl.program_id(0) % n_blocks * BLOCK_M
    batch, head = (place // n_heads).to(tl.int64), (place % n_heads).to(tl.int64)
    do_ptr += batch * stride_gb + head * stride_gh
    o_ptr += batch * stride_ob + head * stride_oh
    do = _load_rows(do_ptr, first, n_queries, stride_gs, True, DIM, BLOCK_M, BLOCK_D)
    o = _load_rows(o_ptr, first, n_queries, stride_os, True, DIM, BLOCK_M, BLOCK_D)
    delta = tl.sum(do.to(COMPUTE) * o.to(COMPUTE), axis=1)
    i = first + tl.arange(0, BLOCK_M)
    tl.store(delta_ptr + place.to(tl.int64) * n_queries + i, delta, mask=i < n_queries)


@triton.jit
def _weights(s, lse):
    # p = exp2(s - lse), at most 1: of large numbers s is rounded otherwise than it was in the forward pass, and
    # exp2 of the difference could be infinite. A NaN has to stay.
    return tl.exp2(tl.minimum(s - lse, 0.0, propagate_nan=tl.PropagateNan.ALL))


@triton.jit(do_not_specialize=["n_queries", "n_keys", "left", "right"])
def _attention_dq_kernel(
    do_ptr, q_ptr, k_ptr, v_ptr, lengths_ptr, lse_ptr, delta_ptr, dq_ptr, scale: tl.float64,
    n_heads, n_repeats, n_queries, n_keys, left, right,
    stride_gb, stride_gh, stride_gs, stride_qb, stride_qh, stride_qs, stride_kb, stride_kh, stride_ks,
    stride_vb, stride_vh, stride_vs, stride_db, stride_dh, stride_ds,
    PRECISION: tl.constexpr, COMPUTE: tl.constexpr,
    DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    ALIGNED: tl.constexpr = False, STARTS: tl.constexpr = False, CU: tl.constexpr = 0,
):  # fmt: skip
    # One program handles BLOCK_M queries of one head, and goes along the keys as in the forward pass.
    n_blocks = tl.num_programs(0) // n_heads if CU else tl.cdiv(n_queries, BLOCK_M)
    place, n_i, n_j = tl.program_id(0) // n_blocks, n_queries, n_keys
    first = (n_blocks - 1 - tl.program_id(0) % n_blocks) * BLOCK_M
    batch, head = (place // n_heads).to(tl.int64), (place % n_heads).to(tl.int64)
    if CU:
        block, first_query, n_i, begin, n_j, left, right = _packed_sample(
            lengths_ptr, first // BLOCK_M, n_blocks, n_queries, n_keys, left, right, CU, ALIGNED, False, BLOCK_M
        )  # fmt: skip
        first = block * BLOCK_M
        if first >= n_i:
            return
        q_ptr, do_ptr = q_ptr + first_query * stride_qs, do_ptr + first_query * stride_gs
        dq_ptr += first_query * stride_ds
        lse_ptr, delta_ptr = lse_ptr + first_query, delta_ptr + first_query
        k_ptr, v_ptr = k_ptr + begin * stride_ks, v_ptr + begin * stride_vs
    do_ptr += batch * stride_gb + head * stride_gh
    q_ptr += batch * stride_qb + head * stride_qh
    k_ptr += batch * stride_kb + head // n_repeats * stride_kh
    v_ptr += batch * stride_vb + head // n_repeats * stride_vh
    dq_ptr += batch * stride_db + head * stride_dh
    i = first + tl.arange(0, BLOCK_M)
    rows = place.to(tl.int64) * n_queries + i
    q = _load_rows(q_ptr, first, n_i, stride_qs, True, DIM, BLOCK_M, BLOCK_D)
    do = _load_rows(do_ptr, first, n_i, stride_gs, True, DIM, BLOCK_M, BLOCK_D)
    lse = tl.load(lse_ptr + rows, mask=i < n_i, other=0.0)
    delta = tl.load(delta_ptr + rows, mask=i < n_i, other=0.0)

    length, left, right, skip = _sample(lengths_ptr, batch, n_j, left, right, ALIGNED, STARTS, CU)
    k_ptr, v_ptr = k_ptr + skip * stride_ks, v_ptr + skip * stride_vs
    last = tl.minimum(first + BLOCK_M, n_i) - 1
    start, a, b, n = _met_tiles(first, last, left, right, 0, length, BLOCK_N)
    lowest, highest = (i - left)[:, None], tl.minimum(i + right, length - 1)[:, None]
    log2_scale = tl.cast(scale * 1.4426950408889634, COMPUTE)
    dq = tl.zeros((BLOCK_M, BLOCK_D), COMPUTE)
    for MASKED in tl.static_range(2):
        for t in range(n - (b - a) if MASKED else b - a):
            tile = tl.where(t < a, t, t + b - a) if MASKED else t + a
            j = start + tile * BLOCK_N
            k = _load_rows(k_ptr, j, length, stride_ks, MASKED, DIM, BLOCK_N, BLOCK_D)
            v = _load_rows(v_ptr, j, length, stride_vs, MASKED, DIM, BLOCK_N, BLOCK_D)
            p = _weights(device.dot(q, k.T, None, PRECISION, COMPUTE) * log2_scale, lse[:, None])
            ds = p * (device.dot(do, v.T, None, PRECISION, COMPUTE) - delta[:, None])
            if MASKED:
                js = j + tl.arange(0, BLOCK_N)[None, :]
                ds = tl.where((js >= lowest) & (js <= highest), ds, 0.0)
            dq = device.dot(ds.to(k.dtype), k, dq, PRECISION, COMPUTE)
    dq *= tl.cast(scale, COMPUTE)
    _store_rows(dq_ptr, dq, first, n_i, stride_ds, DIM, BLOCK_M, BLOCK_D)


@triton.jit(do_not_specialize=["n_queries", "n_keys", "left", "right"])
def _attention_dkdv_kernel(
    do_ptr, q_ptr, k_ptr, v_ptr, do_desc, q_desc, lse_desc, delta_desc, lengths_ptr, lse_ptr, delta_ptr,
    dk_ptr, dv_ptr, scale: tl.float64,
    n_heads, n_repeats, n_queries, n_keys, left, right,
    stride_gb, stride_gh, stride_gs, stride_qb, stride_qh, stride_qs, stride_kb, stride_kh, stride_ks,
    stride_vb, stride_vh, stride_vs, stride_db, stride_dh, stride_ds, stride_eb, stride_eh, stride_es,
    PRECISION: tl.constexpr, COMPUTE: tl.constexpr,
    DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    ALIGNED: tl.constexpr = False, STARTS: tl.constexpr = False, CU: tl.constexpr = 0,
):  # fmt: skip
    # One program handles BLOCK_N keys of one head of k and v. It goes along the queries of all heads that share
    # it, BLOCK_M at a time. Scores and their gradients are kept transposed, (BLOCK_N, BLOCK_M).
    n_kv_heads, n_i, n_j = n_heads // n_repeats, n_queries, n_keys
    n_blocks = tl.num_programs(0) // n_kv_heads if CU else tl.cdiv(n_keys, BLOCK_N)
    place, first = tl.program_id(0) // n_blocks, tl.program_id(0) % n_blocks * BLOCK_N
    batch, kv_head = (place // n_kv_heads).to(tl.int64), (place % n_kv_heads).to(tl.int64)
    if CU:
        block, first_query, n_i, begin, n_j, left, right = _packed_sample(
            lengths_ptr, first // BLOCK_N, n_blocks, n_queries, n_keys, left, right, CU, ALIGNED, True, BLOCK_N
        )  # fmt: skip
        first = block * BLOCK_N
        if first >= n_j:
            return
        q_ptr, do_ptr = q_ptr + first_query * stride_qs, do_ptr + first_query * stride_gs
        lse_ptr, delta_ptr = lse_ptr + first_query, delta_ptr + first_query
        k_ptr, v_ptr = k_ptr + begin * stride_ks, v_ptr + begin * stride_vs
    do_ptr += batch * stride_gb + kv_head * n_repeats * stride_gh
    q_ptr += batch * stride_qb + kv_head * n_repeats * stride_qh
    k_ptr += batch * stride_kb + kv_head * stride_kh
    v_ptr += batch * stride_vb + kv_head * stride_vh
    sample, first_head = place // n_kv_heads, place % n_kv_heads * n_repeats
    length, left, right, skip = _sample(lengths_ptr, batch, n_j, left, right, ALIGNED, STARTS, CU)
    k_ptr, v_ptr = k_ptr + skip * stride_ks, v_ptr + skip * stride_vs
    k = _load_rows(k_ptr, first, length, stride_ks, True, DIM, BLOCK_N, BLOCK_D)
    v = _load_rows(v_ptr, first, length, stride_vs, True, DIM, BLOCK_N, BLOCK_D)
    j = first + tl.arange(0, BLOCK_N)

    # query i sees key j where j - right <= i <= j + left
    last = tl.minimum(first + BLOCK_N, length) - 1
    start, a, b, n = _met_tiles(first, last, right, left, 0, n_i, BLOCK_M)
    if first >= length:
        a, b, n = 0, 0, 0
    lowest, highest = (j - right)[:, None], tl.minimum(j + left, n_i - 1)[:, None]
    log2_scale = tl.cast(scale * 1.4426950408889634, COMPUTE)
    dk = tl.zeros((BLOCK_N, BLOCK_D), COMPUTE)
    dv = tl.zeros((BLOCK_N, BLOCK_D), COMPUTE)
    for MASKED in tl.static_range(2):
        n_tiles = n - (b - a) if MASKED else b - a
        for t in range(n_tiles * n_repeats):
            head, tile = t // n_tiles, t % n_tiles
            tile = tl.where(tile < a, tile, tile + b - a) if MASKED else tile + a
            i = start + tile * BLOCK_M
            # TMA cannot cut a tile where a packed sequence ends
            row = i + first_query.to(tl.int32) if CU else i
            q_head, do_head = head.to(tl.int64) * stride_qh, head.to(tl.int64) * stride_gh
            of_q = first_head + head
            q = _load_rows(
                q_ptr + q_head, i, n_i, stride_qs, MASKED, DIM, BLOCK_M, BLOCK_D,
                None if CU and MASKED else q_desc, sample, of_q, row,
            )  # fmt: skip
            do = _load_rows(
                do_ptr + do_head, i, n_i, stride_gs, MASKED, DIM, BLOCK_M, BLOCK_D,
                None if CU and MASKED else do_desc, sample, of_q, row,
            )  # fmt: skip
            lse = _load_sums(
                lse_ptr, None if CU and MASKED else lse_desc,
                sample, of_q, n_heads, i, n_i, n_queries, row, BLOCK_M,
            )  # fmt: skip
            p = _weights(device.dot(k, q.T, None, PRECISION, COMPUTE) * log2_scale, lse[None, :])
            if MASKED:
                # keys behind `length` have rows of their own in dk and dv, which are not stored
                rows = i + tl.arange(0, BLOCK_M)[None, :]
                seen = (rows >= lowest) & (rows <= highest)
                p = tl.where(seen, p, 0.0)
            if dv_ptr is not None:
                dv = device.dot(p.to(do.dtype), do, dv, PRECISION, COMPUTE)
            if dk_ptr is not None:
                delta = _load_sums(
                    delta_ptr, None if CU and MASKED else delta_desc,
                    sample, of_q, n_heads, i, n_i, n_queries, row, BLOCK_M,
                )  # fmt: skip
                ds = p * (device.dot(v, do.T, None, PRECISION, COMPUTE) - delta[None, :])
                if MASKED:
                    ds = tl.where(seen, ds, 0.0)  # 0 times NaN is NaN
                dk = device.dot(ds.to(q.dtype), q, dk, PRECISION, COMPUTE)
    is_key, n_j = (j < length)[:, None], length if STARTS else n_j
    if dk_ptr is not None:
        dk_ptr += batch * stride_db + kv_head * stride_dh + (begin if CU else skip) * stride_ds
        dk = tl.where(is_key, dk * tl.cast(scale, COMPUTE), 0.0)
        _store_rows(dk_ptr, dk, first, n_j, stride_ds, DIM, BLOCK_N, BLOCK_D)
    if dv_ptr is not None:
        dv_ptr += batch * stride_eb + kv_head * stride_eh + (begin if CU else skip) * stride_es
        dv = tl.where(is_key, dv, 0.0)
        _store_rows(dv_ptr, dv, first, n_j, stride_es, DIM, BLOCK_N, BLOCK_D)


# --- plan (the dispatch heuristic) and launch ----------------------------------------------------------------

# For Hopper: the tiles of the forward pass, of dq, and of dk and dv, by what multiplies and by D at most.
# "half": 16 bits; "float": 3xTF32; "double": float64. On other GPUs "elsewhere": correct, and not tuned.
_TILES = {
    ("half", 64): (Tile(64, 64, 4, 3), Tile(64, 64, 4, 3), Tile(64, 64, 4, 3)),
    ("half", 128): (Tile(64, 64, 4, 3), Tile(64, 64, 4, 2), Tile(64, 128, 8, 3)),
    ("half", 256): (Tile(128, 64, 8, 2), Tile(64, 32, 4, 2), Tile(32, 32, 4, 1)),
    ("float", 64): (Tile(64, 32, 4, 2), Tile(64, 32, 4, 2), Tile(32, 64, 4, 2)),
    ("float", 128): (Tile(64, 32, 4, 2), Tile(32, 32, 4, 2), Tile(32, 32, 8, 1)),
    ("float", 256): (Tile(16, 16, 4, 1), Tile(16, 16, 4, 1), Tile(16, 16, 4, 1)),
    ("double", 64): (Tile(32, 32, 4, 1), Tile(32, 32, 4, 1), Tile(32, 32, 4, 1)),
    ("double", 256): (Tile(16, 16, 4, 1), Tile(16, 16, 4, 1), Tile(16, 16, 4, 1)),
    ("elsewhere", 128): (Tile(32, 32, 4, 2), Tile(32, 32, 4, 1), Tile(32, 32, 4, 1)),
    ("elsewhere", 256): (Tile(16, 16, 4, 1), Tile(16, 16, 4, 1), Tile(16, 16, 4, 1)),
}
# dk and dv with D = 128, by TMA: two programs on an SM, one multiplies beside the other
_BY_TMA = Tile(64, 64, 4, 2)
_FEW = 64  # queries in all heads of a group: as many lie in one tile, and the keys are cut in parts
_DECODING = Tile(16, 64, 2, 2)  # n, warps and stages then; of wide rows or elements n is less
_RESIDENT = 4  # such programs fit into one SM
_MOST_PARTS, _LEAST_TILES = 64, 4  # of the keys, and in each
_LONGEST = 256  # D: rows of q, k, v and o lie in the registers and the shared memory of one program


def _tiles_for(dtype, dim, major):
    kind = {torch.float32: "float", torch.float64: "double"}.get(dtype, "half")
    if kind != "double" and not 9 <= major < 12:
        kind = "elsewhere"  # desktops' Blackwell, 12, has no more shared memory than Ampere
    return next(tiles for (k, most), tiles in _TILES.items() if k == kind and dim <= most)


@functools.lru_cache(4096)
def _plan(dtype, batch, n_heads, n_kv_heads, n_queries, n_keys, dim, gpu, is_varlen=False):
    forward, dq, dkdv = _tiles_for(dtype, dim, host.generation(gpu))
    n_repeats = n_heads // n_kv_heads
    packed = n_repeats > 1 and n_queries * n_repeats <= _FEW
    rows, n_resident = n_queries * (n_repeats if packed else 1), host.n_multiprocessors(gpu)
    if rows <= _FEW // 2:
        n_resident *= _RESIDENT
        _, n, num_warps, num_stages = _DECODING
        n = max(16, min(n, 16384 // (host.power_of_2(dim) * dtype.itemsize)))
        forward = Tile(max(16, host.power_of_2(rows)), n, num_warps, num_stages)
    n_programs = max(1, batch * n_heads * n_queries // max(1, rows) * host.cdiv(rows, forward.m))
    most = 1 if is_varlen else min(_MOST_PARTS, n_keys // (_LEAST_TILES * forward.n))
    n_parts = max(1, min(n_resident // n_programs, most))
    in_roles = n_parts == 1 and rows > _FEW and dim <= 128 and dtype.itemsize == 2
    # descriptors cost the host up to 100 µs a call
    long = in_roles and batch * n_heads * n_queries * n_keys * dim >= 2**36
    tma = long and 9 <= host.generation(gpu) < 12
    return Plan(forward, dq, _BY_TMA if tma and dim > 64 else dkdv, n_parts, packed, in_roles, tma)


def _limits(q, k, is_causal, window, align):
    """How far before and behind itself a query sees keys; no limit is as far as there are any."""
    left, right = window or (-1, -1)
    right = 0 if is_causal else right
    shift = k.shape[2] - q.shape[2] if align == "bottom_right" else 0
    left = q.shape[2] if left < 0 else min(left - shift, q.shape[2])
    right = k.shape[2] if right < 0 else min(right + shift, k.shape[2])
    return left, right


def _options_of(q, tile):
    """What all kernels with products take: sizes of tiles, the units for float32, warps and stages."""
    tensor_cores = q.dtype == torch.float32 and host.generation(q.device) >= 8
    return {
        "PRECISION": "tf32x3" if tensor_cores else "ieee", "COMPUTE": host.compute_dtype(q.dtype),
        "DIM": q.shape[3], "BLOCK_M": tile.m, "BLOCK_N": tile.n,
        "BLOCK_D": max(16, host.power_of_2(q.shape[3])),  # tensor cores take 16 at least
        "num_warps": tile.num_warps, "num_stages": tile.num_stages,
    }  # fmt: skip


def _tma_fits(*tensors):
    """Whether TMA can read them: 16 bits, or one float32 a row; rows that lie apart, on 16-byte boundaries."""
    for t in tensors:
        pitches = [stride * t.itemsize for stride in t.stride()[:-1]]
        aligned = t.data_ptr() % 16 == 0 and all([p > 0 and p % 16 == 0 for p in pitches])
        if not (aligned and t.numel() > 0 and (t.itemsize == 2 or t.dim() == 3)):
            return False
    return 9 <= host.generation(tensors[0].device) < 12


def _n_tiles(n_rows, block, lengths, of_sample):
    """Of a head; where sequences are packed one more for each, and for what may lie behind the last."""
    return n_rows // block + lengths.shape[-1] if "CU" in of_sample else host.cdiv(n_rows, block)


def _row_strides(*tensors):
    return [stride for t in tensors for stride in t.stride()[:3]]


def _roles_fit(q, k, v, other, lengths, limits, scale):
    """Whether kernels in Gluon take these: causal or no mask, 16 bits, D at most 128. other: o or do."""
    plain = lengths is None and limits[0] == q.shape[2] and limits[1] in (0, k.shape[2])
    on_hopper = q.shape[3] <= 128 and gluon_kernels.run_on(q.device)
    return plain and scale > 0 and on_hopper and _tma_fits(q, k, v, other)


def _launch(q, k, v, o, lse, plan, lengths, limits, scale, of_sample):
    (batch, n_heads, n_queries, dim), n_keys = q.shape, k.shape[2]
    n_repeats, tile, is_causal = n_heads // k.shape[1], plan.forward, limits[1] == 0
    # so many keys make up for tiles of twice as many queries
    pays = plan.roles and n_keys >= (128 if dim > 64 else 768)
    has_roles = pays and _roles_fit(q, k, v, o, lengths, limits, scale)
    if has_roles and shared.ran(gluon_kernels.launch_roles, q, k, v, o, lse, is_causal, scale):
        return
    packed = n_repeats if plan.packed else 1
    keys_per_part = host.cdiv(host.cdiv(n_keys, plan.n_parts), tile.n) * tile.n
    n_parts = host.cdiv(n_keys, keys_per_part or 1)
    n_tiles = _n_tiles(n_queries * packed, tile.m, lengths, of_sample)
    sizes, out, tops, totals, stride = (n_heads, n_queries, n_keys, *limits), o, lse, None, 0
    if n_parts > 1:
        out = o.new_empty((n_parts, *q.shape), dtype=lse.dtype)
        tops, totals = lse.new_empty(2, n_parts, *lse.shape)
        stride = out.stride(0)
    host.run(
        _attention_fwd_kernel, (batch * n_heads // packed * n_tiles, max(1, n_parts)),
        (q, k, v, lengths, out, tops, totals), scale,
        n_heads, n_repeats, *sizes[1:], keys_per_part,
        *_row_strides(q, k, v), *out.stride()[-4:-1], stride,
        PACKED=packed, NEGATIVE=scale < 0, **_options_of(q, tile), **of_sample,
    )  # fmt: skip
    if n_parts > 1:
        n_rows, block_d = lse.numel(), host.power_of_2(dim)
        block_m = max(1, 1024 // block_d)
        host.run(
            _combine_kernel, (host.cdiv(n_rows, block_m),), (out, tops, totals, lengths, o, lse),
            n_rows, *sizes, n_parts, *_row_strides(o),
            DIM=dim, BLOCK_M=block_m, BLOCK_D=block_d, num_warps=4, **of_sample,
        )  # fmt: skip


def _launch_backward(do, q, k, v, o, lse, grads, in_order, plan, lengths, limits, scale, of_sample):
    """Write grads, those of q, k and v, each unless it is None. in_order: not by atomics."""
    (batch, n_heads, n_queries, dim), (_, n_kv_heads, n_keys, _) = q.shape, k.shape
    dq, dk, dv = grads
    sizes = n_heads, n_heads // n_kv_heads, n_queries, n_keys, *limits
    delta, block_m = torch.empty_like(lse), max(16, 8192 // host.power_of_2(dim))
    if dq is not None or dk is not None:
        host.run(
            _delta_kernel, (batch * n_heads * host.cdiv(n_queries, block_m),), (do, o, delta),
            n_heads, n_queries, *_row_strides(do, o),
            DIM=dim, BLOCK_M=block_m, BLOCK_D=host.power_of_2(dim), num_warps=4,
        )  # fmt: skip
    if dim in (64, 128) and all([g is not None for g in grads]):
        how = do, q, k, v, lse, delta, *grads, limits[1] == 0, scale, in_order
        fits = _roles_fit(q, k, v, do, lengths, limits, scale)
        if fits and shared.ran(gluon_backward.launch_backward, *how):
            return
    if dq is not None:
        host.run(
            _attention_dq_kernel, (batch * n_heads * _n_tiles(n_queries, plan.dq.m, lengths, of_sample),),
            (do, q, k, v, lengths, lse, delta, dq),
            scale, *sizes, *_row_strides(do, q, k, v, dq), **_options_of(q, plan.dq), **of_sample,
        )  # fmt: skip
    if (dk is not None or dv is not None) and n_keys > 0:
        strides = _row_strides(do, q, k, v, k if dk is None else dk, k if dv is None else dv)
        described, tiles = [None] * 4, (do, q, lse, delta)
        if plan.tma and _tma_fits(*tiles):
            block = [1, 1, plan.dkdv.m, max(16, host.power_of_2(dim))]
            described = [TensorDescriptor.from_tensor(t, block[: t.dim()]) for t in tiles]
        host.run(
            _attention_dkdv_kernel, (batch * n_kv_heads * _n_tiles(n_keys, plan.dkdv.n, lengths, of_sample),),
            (do, q, k, v, *described, lengths, lse, delta, dk, dv), scale, *sizes, *strides,
            **_options_of(q, plan.dkdv), **of_sample,
        )  # fmt: skip


# --- forward and backward ------------------------------------------------------------------------------------


def _dense(t):
    """t, or a copy of it, whose last dimension has no gaps."""
    return t if t.stride(-1) == 1 else t.contiguous()


def _arguments(q, k, lengths, how, plan):
    """What launches take of a call: plan, lengths, limits, scale, and constexprs for what samples differ in."""
    is_causal, window, scale, align, longest, _ = how
    n_queries, n_keys = longest or (q.shape[2], k.shape[2])
    sizes = *q.shape[:2], k.shape[1], n_queries, n_keys, q.shape[3]
    plan = plan or _plan(q.dtype, *sizes, q.device, longest is not None)
    scale, of_sample = q.shape[3] ** -0.5 if scale is None else float(scale), {}
    if lengths is not None:
        lengths, n_dims = lengths.contiguous(), lengths.dim()
        of_sample = {"ALIGNED": True} if align == "bottom_right" else {}
        of_sample |= {"CU": n_dims} if longest else {"STARTS": True} if n_dims == 2 else {}
    return plan, lengths, _limits(q, k, is_causal, window, align), scale, of_sample


def _empty(q, *_):
    """o in the memory layout of q, and a number for each query, before they are written."""
    return torch.empty_like(_dense(q)), q.new_empty(q.shape[:3], dtype=host.sum_dtype(q.dtype))


def _forward(q, k, v, lengths, how, plan=None):
    """o in the memory layout of q, and of each query log2 of the sum of exp2(score·log2 e)."""
    q, k, v = _dense(q), _dense(k), _dense(v)
    o, lse = _empty(q)
    if o.numel() > 0:
        _launch(q, k, v, o, lse, *_arguments(q, k, lengths, how, plan))
    return o, lse


def _save(ctx, q, k, v, lengths, how, o, lse, plan=None):
    ctx.how, ctx.plan = how, plan
    ctx.save_for_backward(q, k, v, lengths, o, lse)


def _backward(do, q, k, v, lengths, o, lse, how, needs_grad, plan=None):
    """dq, dk, dv, each None unless needed."""
    do, q, k, v = _dense(do), _dense(q), _dense(k), _dense(v)
    grads = [torch.empty_like(t) if needed else None for t, needed in zip((q, k, v), needs_grad)]
    if o.numel() > 0:
        arguments = _arguments(q, k, lengths, how, plan)
        if "STARTS" in arguments[-1]:  # the kernel writes no padding
            grads[1:] = [None if g is None else g.zero_() for g in grads[1:]]
        in_order = how[-1] or torch.are_deterministic_algorithms_enabled()
        _launch_backward(do, q, k, v, o, lse, grads, in_order, *arguments)
    elif k.numel() > 0:
        grads = [None if g is None else g.zero_() for g in grads]  # no query: nothing is added up
    return tuple(grads)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, lengths, how, plan):
        o, lse = _forward(q, k, v, lengths, how, plan)
        _save(ctx, q, k, v, lengths, how, o, lse, plan)
        return o

    @staticmethod
    @host.once
    def backward(ctx, do):
        grads = _backward(do, *ctx.saved_tensors, ctx.how, ctx.needs_input_grad[:3], ctx.plan)
        return *grads, None, None, None


# --- the calls -----------------------------------------------------------------------------------------------


def _check(name, window, align, deterministic=True):
    # not to be remembered: (1.0, 2), which is refused, equals (1, 2)
    two = isinstance(window, (tuple, list)) and len(window) == 2
    if not (window is None or two and all([isinstance(n, host.INTS) and n >= -1 for n in window])):
        want = "window must be None or two ints (left, right), each 0 or more, or -1 for no limit"
        raise ValueError(f"{name}: {want}; got {window!r}")
    if align not in ("top_left", "bottom_right"):
        raise ValueError(f"{name}: align must be 'top_left' or 'bottom_right', got {align!r}")
    if not isinstance(deterministic, bool):
        raise TypeError(f"{name}: deterministic must be True or False, got {deterministic!r}")


@host.remembered
def _check_padded(name, q, k, v, lengths, scale):
    _check_sizes(name, q, k, scale, 4)
    if lengths is not None:
        n = tuple(getattr(q, "shape", ()))[:1]
        want = "(B,), how many keys each sample has, or (B, 2), its first and the end"
        _check_integers(name, q, "lengths", lengths, [n, (*n, 2)], want)
    tensors = {"q": (q, "B H Sq D"), "k": (k, "B G Sk D"), "v": (v, "B G Sk D")}
    host.check_tensors(name, "attention_eager", **tensors)


@host.remembered
def _check_packed(name, q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, scale):
    letters = ("B H T D", "B G Tk D") if getattr(q, "ndim", 3) == 4 else ("T H D", "Tk G D")
    _check_sizes(name, q, k, scale, len(letters[0].split()))
    tensors = {"q": (q, letters[0]), "k": (k, letters[1]), "v": (v, letters[1])}
    host.check_tensors(name, "attention_varlen_eager", **tensors)
    if q.dim() == 4 and q.shape[0] != 1:
        packed = "q must be (T, H, D) or (1, H, T, D); for (B, H, S, D) use attention_triton"
        raise ValueError(f"{name}: {packed}; got {tuple(q.shape)}")
    n = tuple(getattr(cu_seqlens_q, "shape", ()))[-1:]
    shapes = [n, (2, *n)][: 1 if cu_seqlens_k is not None else 2] if n and n[0] > 0 else [(1,)]
    want = "(n + 1,), 0 and where each of n sequences ends, or (2, n + 1) with those of keys"
    keys = cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k
    for label, t in {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": keys}.items():
        _check_integers(name, q, label, t, shapes, want)
    for label, n in {"max_seqlen_q": max_seqlen_q, "max_seqlen_k": max_seqlen_k}.items():
        if n is not None and not (isinstance(n, host.INTS) and n >= 0):
            want = f"{label} must be None or an int, 0 or more (.item() makes the host wait)"
            raise ValueError(f"{name}: {want}; got {n!r}")


def _check_sizes(name, q, k, scale, n_dims):
    # isfinite would take one value alone under torch.compile
    is_number = isinstance(scale, host.NUMBERS)
    if scale is not None and not (is_number and -math.inf < scale < math.inf):
        raise ValueError(f"{name}: scale must be None or a finite Python number, got {scale!r}")
    of_q, of_k = (tuple(t.shape) if isinstance(t, torch.Tensor) else () for t in (q, k))
    if len(of_q) == len(of_k) == n_dims and not (of_k[1] > 0 and of_q[1] % of_k[1] == 0):
        heads = f"got {of_q[1]} heads of q beside {of_k[1]}"
        raise ValueError(f"{name}: H must be a multiple of G, the heads of k and v; {heads}")
    if len(of_q) == n_dims and not 0 < of_q[-1] <= _LONGEST:
        most = f"D must be from 1 to {_LONGEST}"
        raise ValueError(f"{name}: {most}, got q of shape {of_q}; use attention_eager")


def _check_integers(name, q, label, t, shapes, want):
    if not isinstance(t, torch.Tensor):
        raise TypeError(f"{name}: {label} must be a torch.Tensor, got {type(t).__name__}")
    if t.dtype not in (torch.int64, torch.int32):
        wrong = f"{label} must be an int64 or an int32 tensor, got {t.dtype}"
        raise TypeError(f"{name}: {wrong}; use .long()")
    if tuple(t.shape) not in shapes:
        beside = f"beside q {tuple(getattr(q, 'shape', ()))}, got shape {tuple(t.shape)}"
        raise ValueError(f"{name}: {label} must be {want}, {beside}")
    if t.device != q.device:
        where = f"q is on {q.device} and {label} on {t.device}"
        raise ValueError(f"{name}: {where}; move both to one device")


def _call(name, goes_by_op, q, k, v, lengths, how, plan):
    if goes_by_op:
        return attention_op(q, k, v, lengths, *how)[0]
    return host.call(
        name, name.replace("triton", "eager"), _Attention, lambda *how: _forward(*how)[0],
        (q, k, v), lengths, how, plan,
    )  # fmt: skip


def attention_triton(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: torch.Tensor | None = None, *,
    is_causal: bool = False, window: Sequence[int] | None = None, scale: float | None = None,
    align: str = "top_left", deterministic: bool = True, plan: Plan | None = None,
) -> torch.Tensor:  # fmt: skip
    """softmax(scale·q kᵀ + mask) v by Triton kernels, with gradients for q, k and v.

    q: (B, H, Sq, D); k and v: (B, G, Sk, D), H a multiple of G, D up to 256, any strides, of one dtype and
    device. is_causal: query i sees the keys j <= i, counted from 0 on both sides also where Sq and Sk differ.
    window: (left, right), query i sees i - left <= j <= i + right, -1 for no limit on that side.
    align="bottom_right" moves both by Sk - Sq, with lengths by lengths[b] - Sq, as flash-attention does: the
    last query sees the last key of a cache. lengths: (B,) int32 or int64, the keys of each sample; those after
    are padding and are not read. (B, 2): the first one and the end, for padding on the left. A query that sees
    no key has o = 0 and no part in any gradient. scale: a finite Python number; None is 1/√D.
    Returns o, (B, H, Sq, D), in the memory layout of q. The same bits in every run.
    deterministic: gradients of the same bits in every run. False: on Hopper, in 16 bits, D 64 or 128, is_causal
    or no mask, and gradients for all three, dq is added up by atomics, and its last bits differ; elsewhere, and
    under torch.use_deterministic_algorithms(True), as True.
    plan: a Plan in place of the one chosen, for tuning; torch.compile leaves it out.
    Works under torch.compile (as the op fused_kernels::attention), autocast (in its dtype, as torch's
    products), checkpointing and CUDA graphs; not under torch.func, torch.vmap or forward-mode AD, nor twice
    differentiable: these raise.
    Raises TypeError for a wrong dtype or deterministic, ValueError for a wrong shape, device, window or scale.
    """
    name, how = "attention_triton", (is_causal, window, scale, align, None, deterministic)
    q, k, v = host.autocast(q, k, v)
    _check(name, window, align, deterministic)
    goes_by_op = _check_padded(name, q, k, v, lengths, scale)
    return _call(name, goes_by_op, q, k, v, lengths, how, plan)


def attention_varlen_eager(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
    cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor | None = None,
    max_seqlen_q: int | None = None, max_seqlen_k: int | None = None, **mask,
) -> torch.Tensor:  # fmt: skip
    if is_flat := q.dim() == 3:
        q, k, v = (t.transpose(0, 1)[None] for t in (q, k, v))
    of_q, mask = cu_seqlens_q.tolist(), {"align": "bottom_right"} | mask
    of_k = of_q if cu_seqlens_k is None else cu_seqlens_k.tolist()
    each = zip(of_q, of_q[1:], of_k, of_k[1:])
    os = [attention_eager(q[:, :, a:b], k[:, :, c:d], v[:, :, c:d], **mask) for a, b, c, d in each]
    o = torch.cat([*os, torch.zeros_like(q[:, :, of_q[-1] :])], dim=2)
    return o[0].transpose(0, 1) if is_flat else o


def attention_varlen_triton(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
    cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor | None = None,
    max_seqlen_q: int | None = None, max_seqlen_k: int | None = None, *,
    is_causal: bool = False, window: Sequence[int] | None = None, scale: float | None = None,
    align: str = "bottom_right", plan: Plan | None = None,
) -> torch.Tensor:  # fmt: skip
    """attention_triton of n sequences packed on end, as flash_attn_varlen_func: one launch for all.

    q: (T, H, D), k and v: (Tk, G, D), or (1, H, T, D) and (1, G, Tk, D); any strides. cu_seqlens_q: (n + 1,),
    int32 or int64, 0 and where each sequence ends; cu_seqlens_k: the same of k and v, None if they are equal,
    or if cu_seqlens_q is (2, n + 1) with both, which saves a torch.stack. The host does not read them:
    sequences may be empty, and what lies behind the last has o = 0 and gradients of 0. max_seqlen_q and
    max_seqlen_k, the longest, ints, choose tiles; results do not depend on them. is_causal, window: within each
    sequence, whose last query sees its last key, as in flash-attention, unless align="top_left". The rest as
    attention_triton, whose op this is too; but keys are not cut in parts for few queries, and no gradient is
    made by atomics. To torch's FLOP counter, which knows no lengths, each query sees max_seqlen_k keys.
    """
    name, cu = "attention_varlen_triton", (cu_seqlens_q, cu_seqlens_k)
    q, k, v = host.autocast(q, k, v)
    _check(name, window, align)
    goes_by_op = _check_packed(name, q, k, v, *cu, max_seqlen_q, max_seqlen_k, scale)
    if is_flat := q.dim() == 3:
        q, k, v = (t.transpose(0, 1)[None] for t in (q, k, v))
    longest = max_seqlen_q or q.shape[2], max_seqlen_k or k.shape[2]
    cu = cu_seqlens_q if cu[1] is None or cu[1] is cu[0] else torch.stack(cu)
    plan = plan and plan._replace(n_parts=1)
    how = is_causal, window, scale, align, longest, True
    o = _call(name, goes_by_op, q, k, v, cu, how, plan)
    return o[0].transpose(0, 1) if is_flat else o


@host.custom_op(
    "fused_kernels::attention",  # of packed sequences, longest[1] keys
    flops=lambda q, k, *how: 4 * math.prod(q) * ((how[6:] or [None])[0] or k[1:3])[1],
)
def attention_op(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: torch.Tensor | None = None,
    is_causal: bool = False, window: Sequence[int] | None = None, scale: float | None = None,
    align: str = "top_left", longest: Sequence[int] | None = None, deterministic: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """attention for torch.compile and torch.export: one node of the graph, which nothing looks into.

    longest: (max_seqlen_q, max_seqlen_k) of packed sequences, q (1, H, T, D); lengths is then their cu_seqlens,
    (n + 1,) or (2, n + 1). Returns o, and one number for each query for the backward pass, (B, H, Sq).
    """
    _check("attention_op", window, align, deterministic)
    if longest:
        _check_packed("attention_op", q, k, v, lengths, None, *longest, scale)
    else:
        _check_padded("attention_op", q, k, v, lengths, scale)
    return _forward(q, k, v, lengths, (is_causal, window, scale, align, longest, deterministic))


# five products, as torch counts for its own attention: the scores are computed again
@host.custom_op(
    "fused_kernels::attention_backward",
    flops=lambda do, q, k, *how: 10 * math.prod(q) * (how[-3] or k[1:3])[1],
)
def _attention_backward_op(
    do: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: torch.Tensor | None,
    o: torch.Tensor, lse: torch.Tensor, is_causal: bool, window: Sequence[int] | None, scale: float | None,
    align: str, longest: Sequence[int] | None, deterministic: bool, needs_grad: list[bool],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    how = is_causal, window, scale, align, longest, deterministic
    return host.none_as_empty(do, _backward(do, q, k, v, lengths, o, lse, how, needs_grad))


attention_op.register_fake(_empty)


@_attention_backward_op.register_fake
def _(do, q, k, v, *how):
    tensors = zip((q, k, v), how[-1])
    return tuple(torch.empty_like(_dense(t)) if w else t.new_empty(0) for t, w in tensors)


def _setup_context(ctx, inputs, output):
    ctx.mark_non_differentiable(output[1])
    _save(ctx, *inputs[:4], inputs[4:], *output)


def _op_backward(ctx, do, _):
    needs_grad = ctx.needs_input_grad[:3]
    grads = _attention_backward_op(do, *ctx.saved_tensors, *ctx.how, [*needs_grad])
    return *(g if needed else None for g, needed in zip(grads, needs_grad)), *[None] * 7


attention_op.register_autograd(_op_backward, setup_context=_setup_context)
