# SPDX-License-Identifier: MIT
# Copyright (c) 2026 The Fused Kernels authors; Fused Kernels 0.1.0, lib/ops/softmax.py
"""softmax: y = exp(x - max) / sum over one dimension, one pass over memory instead of five.

Shapes    x, y: (..., N) of any rank, any strides; y contiguous. Another dimension than the last is copied to be
          the last, and y is a view of that.
Dtypes    float32, float16, bfloat16 (computed in float32) and float64.
Traffic   M rows of N elements of s bytes. Forward 2MNs, written by hand in PyTorch 8MNs; backward 3MNs.
Options   scale: of scale·x. causal: without the columns j > i of x[..., i, j], as attention leaves them out.
          Both in the same pass; in PyTorch each is one or two more.
Design    A row that fits into a program stays in registers between its sum and its quotients: it is read once.
          Longer rows are cut into parts, each held by a program of its own; the parts of a row exchange maximum
          and sum through memory and wait for each other (a grid barrier), so they too are read once. A program
          that waits in vain reads its whole row itself: no order in which programs start can make a call hang.
          Rows of any length are held in 5 to 9 tiles. Where they do not begin on a 16-byte boundary they are
          read in whole 16-byte pieces all the same: the first and last of a row are its neighbours' too.
Backward  dx = scale · y · (dy - sum(y · dy)). Saves y only.
Copy it   by `make copy OP=softmax TO=folder`, or with _host.py, _device.py and its .cu beside it. MIT licence.
"""

import functools
import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl

if __package__:  # shared by the ops: `device` in kernels, `host` around them
    from . import _device as device
    from . import _host as host
else:  # the same, in a plain folder
    import _device as device
    import _host as host


class Plan(NamedTuple):
    """How one call is launched.

    way: "rows", block_m whole rows a program; "parts", a part of one; both in `tiles` tiles of block_n
    columns. "eager", for rows that no GPU could hold.
    v: how many elements a load of whole rows takes; those of parts take 16 bytes.
    patience: how often a program looks for the other parts of its row before it reads them itself.
    backward: the Plan of the backward pass, or None to have it chosen.
    """

    way: str
    block_m: int
    block_n: int
    tiles: int
    num_warps: int
    v: int = 1
    patience: int = 4096
    backward: "Plan | None" = None


def softmax_eager(
    x: torch.Tensor, dim: int = -1, scale: float = 1.0, causal: bool = False
) -> torch.Tensor:
    if scale != 1.0:
        x = x * scale
    if causal:
        i, j = (torch.arange(n, device=x.device) for n in (_n_seq(x), x.shape[-1]))
        x = x.masked_fill((j > i[:, None]).view(x.shape[-2:]), -float("inf"))
    return torch.softmax(x, dim=dim)


def _n_seq(x):
    """How many rows follow each other before the first column counts again: S of x (..., S, N)."""
    return x.shape[-2] if x.dim() > 1 else 1


@triton.jit
def _scored_grad(dx, row, col, n_seq, SCALE: tl.constexpr):
    # 0 where a column was left out, in a row of NaN too
    if SCALE is not None:
        dx = dx * SCALE
    if n_seq is not None:
        dx = tl.where(col <= row % n_seq, dx, 0.0)
    return dx


@triton.jit
def _scored(x, row, col, mask, n_seq, SCALE: tl.constexpr):
    # scale·x, -inf where the mask leaves a column out; with an n_seq, as long as a matrix is high, causal too.
    # -inf comes after the product: scale may be negative.
    if SCALE is not None:
        x = x * SCALE if mask is None else tl.where(mask, x * SCALE, -float("inf"))
    if n_seq is not None:
        x = tl.where(col <= row % n_seq, x, -float("inf"))
    return x


@triton.jit(do_not_specialize=["n_rows", "n_seq"])
def _softmax_fwd_kernel(
    x_ptr, y_ptr, n_rows, n_cols, stride_xm, UNIT: tl.constexpr, V: tl.constexpr, COMPUTE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TILES: tl.constexpr, FULL: tl.constexpr,
    n_seq=None, SCALE: tl.constexpr = None,
):  # fmt: skip
    # One program holds BLOCK_M whole rows, in TILES tiles of BLOCK_N columns.
    n_cols, stride_xm = n_cols // UNIT * UNIT, stride_xm // UNIT * UNIT
    first, shift = device.first_row(BLOCK_M, n_cols, UNIT, V)
    rows, place = device.held_rows(first, shift, n_rows, n_cols, UNIT, V, BLOCK_M)
    x_rows = x_ptr + device.begin(rows, stride_xm, shift, V)
    y_rows = y_ptr + device.begin(rows, n_cols, shift, V)
    xs = device.load_tiles(x_rows, 1, place, UNIT, V, BLOCK_N, TILES, FULL)
    held = ()
    for t in tl.static_range(TILES):
        cols = device.tile_cols(t, BLOCK_N)
        x = _scored(xs[t].to(COMPUTE), rows, cols - shift, None, n_seq, SCALE)
        held = held + (device.own(x, -float("inf"), t, cols, place, UNIT, V, FULL),)
    tops = held[0]
    for t in tl.static_range(1, TILES):
        tops = tl.maximum(tops, held[t])
    top = tl.max(tops, axis=1)[:, None]
    # NaN, +inf, a row of -inf: x - top is NaN somewhere, so the sum is, so the whole row is, as in torch
    numerators, sums = (), tl.zeros((BLOCK_M, BLOCK_N), COMPUTE)
    for t in tl.static_range(TILES):
        numerator = device.fast_exp(held[t] - top)
        sums += numerator
        numerators = numerators + (numerator,)
    total = tl.sum(sums, axis=1)[:, None]
    for t in tl.static_range(TILES):
        cols, y = device.tile_cols(t, BLOCK_N), numerators[t] * (1.0 / total)
        device.store_tile(y_rows + cols, y, t, cols, place, UNIT, V, FULL)


@triton.jit(do_not_specialize=["n_rows", "n_seq"])
def _softmax_bwd_kernel(
    dy_ptr, y_ptr, dx_ptr, n_rows, n_cols, stride_dym, UNIT: tl.constexpr, V: tl.constexpr,
    COMPUTE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TILES: tl.constexpr,
    FULL: tl.constexpr, n_seq=None, SCALE: tl.constexpr = None,
):  # fmt: skip
    # One program holds BLOCK_M whole rows, as forward.
    n_cols, stride_dym = n_cols // UNIT * UNIT, stride_dym // UNIT * UNIT
    first, shift = device.first_row(BLOCK_M, n_cols, UNIT, V)
    rows, place = device.held_rows(first, shift, n_rows, n_cols, UNIT, V, BLOCK_M)
    dy_rows = dy_ptr + device.begin(rows, stride_dym, shift, V)
    start = device.begin(rows, n_cols, shift, V)
    dys = device.load_tiles(dy_rows, 1, place, UNIT, V, BLOCK_N, TILES, FULL)
    ys = device.load_tiles(y_ptr + start, 1, place, UNIT, V, BLOCK_N, TILES, FULL)
    sums = tl.zeros((BLOCK_M, BLOCK_N), COMPUTE)
    for t in tl.static_range(TILES):
        product = ys[t].to(COMPUTE) * dys[t].to(COMPUTE)
        sums += device.own(product, 0.0, t, device.tile_cols(t, BLOCK_N), place, UNIT, V, FULL)
    total = tl.sum(sums, axis=1)[:, None]
    for t in tl.static_range(TILES):
        cols, dx = device.tile_cols(t, BLOCK_N), ys[t].to(COMPUTE) * (dys[t].to(COMPUTE) - total)
        dx = _scored_grad(dx, rows, cols - shift, n_seq, SCALE)
        device.store_tile(dx_ptr + start + cols, dx, t, cols, place, UNIT, V, FULL)


# --- rows too long for one program: a grid barrier -----------------------------------------------------------

# A program holds one part of a row, and can write none of it before it knows the maximum and the sum of the
# whole row. So it tells the others those of its part, in words of memory that are 0 before, and waits until all
# have done so. Such a grid barrier hangs where a program waits for one that cannot start, and a GPU promises no
# order of start. So none waits for ever: out of patience, after some milliseconds, it reads the whole row
# itself and goes on. That ends in any order, however few programs run at once: in the interpreter, one.


@triton.jit
def _row_ends(inside, shift, n_cols, V: tl.constexpr):
    # The columns that are left at the two ends of a row, (1, 2V), and their mask
    lane, end = tl.arange(0, 2 * V)[None, :], shift + n_cols
    first, behind = (shift + V - 1) // V, end // V
    cols = tl.where(lane < V, lane, behind * V + lane - V)
    at_start = (lane >= shift) & (lane < tl.minimum(first * V, end))
    at_end = (cols < end) & (behind >= first)
    return cols, tl.where(lane < V, at_start, at_end) & inside


@triton.jit
def _pieces(row, n_cols, V: tl.constexpr):
    # Where the whole pieces of a row begin and end, and where in its first one the row does; and its ends
    shift = (row * n_cols % V).to(tl.int32)
    pieces = (shift + V - 1) // V, (shift + n_cols) // V, shift
    end_cols, at_ends = _row_ends(n_cols > 0, shift, n_cols, V)
    return pieces, end_cols, at_ends


@triton.jit
def _whole(cols, pieces, V: tl.constexpr):
    return (cols // V >= pieces[0]) & (cols // V < pieces[1])


@triton.jit
def _tell(word_ptr, number):
    # All bits turned: 0.0 is not 0. A word is seen whole or not at all, so nothing else has to be ordered.
    BITS: tl.constexpr = tl.int64 if number.dtype == tl.float64 else tl.int32
    tl.atomic_xchg(word_ptr, ~number.to(BITS, bitcast=True), sem="relaxed")


@triton.jit
def _hear(
    words_ptr, n_parts, patience, N: tl.constexpr, PARTS: tl.constexpr, COMPUTE: tl.constexpr
):
    # The N numbers of each part, (PARTS, N), and whether all are there. PARTS are no fewer than the program has
    # threads: each looks at words of its own, so all threads decide together.
    parts = tl.arange(0, PARTS)[:, None]
    ptrs = words_ptr + parts * N + tl.arange(0, N)[None, :]
    words = tl.load(ptrs, mask=parts < n_parts, other=-1, volatile=True)
    while (tl.max((words == 0).to(tl.int32)) == 1) & (patience > 0):
        words = tl.load(ptrs, mask=parts < n_parts, other=-1, volatile=True)
        patience -= 1
    return (~words).to(COMPUTE, bitcast=True), tl.max((words == 0).to(tl.int32)) == 0


@triton.jit
def _tile_cols(t, part, n_parts, LENGTH: tl.constexpr):
    return (t * n_parts + part) * LENGTH + tl.arange(0, LENGTH)


@triton.jit
def _hold(
    row_ptr, part, n_parts, pieces, EMPTY: tl.constexpr, TILES: tl.constexpr, BLOCK_N: tl.constexpr
):
    # A part as it lies in memory: a word is one number, or two of 16 bits, which take half the registers so.
    V: tl.constexpr = 128 // row_ptr.dtype.element_ty.primitive_bitwidth
    PAIR: tl.constexpr = 2 if V == 8 else 1
    if PAIR == 2:
        row_ptr = row_ptr.to(tl.pointer_type(tl.int32))
    held = ()
    for t in tl.static_range(TILES):
        words = _tile_cols(t, part, n_parts, BLOCK_N // PAIR)
        if t == 0 or t == TILES - 1:  # no other tile can reach beyond the row
            whole = _whole(words, pieces, V // PAIR)
            held = held + (tl.load(row_ptr + words, mask=whole, other=EMPTY),)
        else:
            held = held + (tl.load(row_ptr + words),)
    return held


@triton.jit
def _numbers(words, zero, DTYPE: tl.constexpr, COMPUTE: tl.constexpr):
    # zero is 0, which the compiler does not know. So it unpacks these words again, and does not keep the
    # numbers that it unpacked before: there are no registers for them.
    if DTYPE.primitive_bitwidth == 16:
        words += zero
        low = words.to(tl.int16).to(DTYPE, bitcast=True)
        words = tl.interleave(low, (words >> 16).to(tl.int16).to(DTYPE, bitcast=True))
    return words.to(COMPUTE)


@triton.jit
def _row_alone(
    x_row, n_tiles, row, pieces, n_seq, SCALE: tl.constexpr, COMPUTE: tl.constexpr,
    V: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    # Maximum and sum of a whole row but for its ends, tile by tile (online softmax).
    top, total = tl.full((), -float("inf"), COMPUTE), tl.full((), 0.0, COMPUTE)
    for tile in range(n_tiles):
        cols = _tile_cols(tile, 0, 1, BLOCK_N)
        whole = _whole(cols, pieces, V)
        x = tl.load(x_row + cols, mask=whole, other=-float("inf")).to(COMPUTE)
        x = _scored(x, row, cols - pieces[2], whole, n_seq, SCALE)
        before, top = top, tl.maximum(top, tl.max(x))
        base = tl.where(top == -float("inf"), 0.0, top)
        total = total * device.fast_exp(before - base) + tl.sum(device.fast_exp(x - base))
    return top, total


@triton.jit(do_not_specialize=["n_parts", "patience", "zero", "n_seq"])
def _softmax_parts_fwd_kernel(
    x_ptr, y_ptr, words_ptr, n_cols, stride_xm, n_parts, patience, zero,
    EMPTY: tl.constexpr, MAX_OF_PAIRS: tl.constexpr, WHOLE_PIECES: tl.constexpr,
    COMPUTE: tl.constexpr, V: tl.constexpr, TILES: tl.constexpr, BLOCK_N: tl.constexpr,
    PARTS: tl.constexpr, n_seq=None, SCALE: tl.constexpr = None,
):  # fmt: skip
    # One program handles one part of a row: TILES tiles of BLOCK_N columns, n_parts apart.
    row, part = (tl.program_id(0) // n_parts).to(tl.int64), tl.program_id(0) % n_parts
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    x_row, y_row = x_ptr + row * stride_xm // V * V, y_ptr + row * n_cols // V * V
    pieces, end_cols, at_ends = _pieces(row, n_cols, V)
    if WHOLE_PIECES:  # all programs of a row see its ends, and the first stores them
        ends = tl.load(x_row + end_cols, mask=at_ends, other=-float("inf")).to(COMPUTE)
        ends = _scored(ends, row, end_cols - pieces[2], at_ends, n_seq, SCALE)
    held = _hold(x_row, part, n_parts, pieces, EMPTY, TILES, BLOCK_N)

    if MAX_OF_PAIRS is not None:  # of two words in one instruction, for which Triton has no name
        words = held[0]
        for t in tl.static_range(1, TILES):
            words = tl.inline_asm_elementwise(
                MAX_OF_PAIRS, "=r,r,r", [words, held[t]], dtype=tl.int32, is_pure=True, pack=1
            )
        tops = _numbers(words, 0, DTYPE, COMPUTE)
    else:
        tops = tl.full((BLOCK_N,), -float("inf"), COMPUTE)
        for t in tl.static_range(TILES):
            cols, x = _tile_cols(t, part, n_parts, BLOCK_N), _numbers(held[t], 0, DTYPE, COMPUTE)
            x = _scored(x, row, cols - pieces[2], _whole(cols, pieces, V), n_seq, SCALE)
            tops = tl.maximum(tops, x)
    top, sums = tl.max(tops), tl.zeros((BLOCK_N,), COMPUTE)
    # a part of -inf alone adds nothing, and exp(-inf - -inf) would be NaN
    base = tl.where(top == -float("inf"), 0.0, top)
    for t in tl.static_range(TILES):
        cols, x = _tile_cols(t, part, n_parts, BLOCK_N), _numbers(held[t], zero, DTYPE, COMPUTE)
        x = _scored(x, row, cols - pieces[2], _whole(cols, pieces, V), n_seq, SCALE)
        sums += device.fast_exp(x - base)

    words_ptr += 2 * row * n_parts
    _tell(words_ptr + 2 * part, top)
    _tell(words_ptr + 2 * part + 1, tl.sum(sums))
    pairs, all_arrived = _hear(words_ptr, n_parts, patience, 2, PARTS, COMPUTE)
    tops, totals = tl.split(pairs)
    ids = tl.arange(0, PARTS)
    tops = tl.where(ids < n_parts, tops, -float("inf"))
    if not all_arrived:
        top, total = _row_alone(
            x_row, n_parts * TILES, row, pieces, n_seq, SCALE, COMPUTE, V, BLOCK_N
        )
        tops, totals = tl.where(ids == 0, top, -float("inf")), tl.where(ids == 0, total, 0.0)
    top = tl.max(tops)
    if WHOLE_PIECES:
        top = tl.maximum(top, tl.max(ends))
    total = tl.sum(totals * tl.exp(tops - top))  # NaN for a row of -inf, as in torch
    if WHOLE_PIECES:
        end_numerator = device.fast_exp(ends - top)
        total += tl.sum(end_numerator)
        tl.store(y_row + end_cols, end_numerator * (1.0 / total), mask=at_ends & (part == 0))
    for t in tl.static_range(TILES):
        cols, x = _tile_cols(t, part, n_parts, BLOCK_N), _numbers(held[t], 2 * zero, DTYPE, COMPUTE)
        whole = _whole(cols, pieces, V)
        x = _scored(x, row, cols - pieces[2], whole, n_seq, SCALE)
        y = device.fast_exp(x - top) * (1.0 / total)
        if t == 0 or t == TILES - 1:
            tl.store(y_row + cols, y, mask=whole)
        else:
            tl.store(y_row + cols, y)


@triton.jit(do_not_specialize=["n_parts", "patience", "zero", "n_seq"])
def _softmax_parts_bwd_kernel(
    dy_ptr, y_ptr, dx_ptr, words_ptr, n_cols, stride_dym, n_parts, patience, zero,
    WHOLE_PIECES: tl.constexpr, COMPUTE: tl.constexpr, V: tl.constexpr, TILES: tl.constexpr,
    BLOCK_N: tl.constexpr, PARTS: tl.constexpr, n_seq=None, SCALE: tl.constexpr = None,
):  # fmt: skip
    # One program handles one part of a row, as forward.
    row, part = (tl.program_id(0) // n_parts).to(tl.int64), tl.program_id(0) % n_parts
    DTYPE: tl.constexpr = y_ptr.dtype.element_ty
    start = row * n_cols // V * V
    dy_row, y_row, dx_row = dy_ptr + row * stride_dym // V * V, y_ptr + start, dx_ptr + start
    pieces, end_cols, at_ends = _pieces(row, n_cols, V)
    if WHOLE_PIECES:
        end_dy = tl.load(dy_row + end_cols, mask=at_ends, other=0.0).to(COMPUTE)
        end_y = tl.load(y_row + end_cols, mask=at_ends, other=0.0).to(COMPUTE)
    dys = _hold(dy_row, part, n_parts, pieces, 0, TILES, BLOCK_N)
    ys = _hold(y_row, part, n_parts, pieces, 0, TILES, BLOCK_N)
    sums = tl.zeros((BLOCK_N,), COMPUTE)
    for t in tl.static_range(TILES):
        sums += _numbers(dys[t], 0, DTYPE, COMPUTE) * _numbers(ys[t], 0, DTYPE, COMPUTE)

    words_ptr += row * n_parts
    _tell(words_ptr + part, tl.sum(sums))
    totals, all_arrived = _hear(words_ptr, n_parts, patience, 1, PARTS, COMPUTE)
    total = tl.sum(totals)
    if not all_arrived:
        total = tl.full((), 0.0, COMPUTE)
        for tile in range(n_parts * TILES):
            cols = _tile_cols(tile, 0, 1, BLOCK_N)
            whole = _whole(cols, pieces, V)
            dy = tl.load(dy_row + cols, mask=whole, other=0.0).to(COMPUTE)
            total += tl.sum(dy * tl.load(y_row + cols, mask=whole, other=0.0).to(COMPUTE))
    if WHOLE_PIECES:
        total += tl.sum(end_y * end_dy)
        end_dx = _scored_grad(end_y * (end_dy - total), row, end_cols - pieces[2], n_seq, SCALE)
        tl.store(dx_row + end_cols, end_dx, mask=at_ends & (part == 0))
    for t in tl.static_range(TILES):
        cols, dy = _tile_cols(t, part, n_parts, BLOCK_N), _numbers(dys[t], zero, DTYPE, COMPUTE)
        dx = _numbers(ys[t], zero, DTYPE, COMPUTE) * (dy - total)
        dx = _scored_grad(dx, row, cols - pieces[2], n_seq, SCALE)
        if t == 0 or t == TILES - 1:
            tl.store(dx_row + cols, dx, mask=_whole(cols, pieces, V))
        else:
            tl.store(dx_row + cols, dx)


# --- plan (the dispatch heuristic) and launch ----------------------------------------------------------------


# Of two numbers of 16 bits in 32: -inf, and PTX for the larger ones of two such pairs.
_MINUS_INF = {torch.bfloat16: -0x007F0080, torch.float16: -0x03FF0400}
_MAX = {torch.bfloat16: "max.bf16x2 $0, $1, $2;", torch.float16: "max.f16x2 $0, $1, $2;"}

# What is tuned, on an H200; on other GPUs it is correct, not tuned.
# Elements of a row in one program, by their bytes; backward there are two tensors to hold.
_LONGEST, _LONGEST_BACKWARD = {2: 16384, 4: 32768, 8: 32768}, {2: 16384, 4: 16384, 8: 8192}
# How many tiles, of 16 bytes a thread, a program of a longer row holds; backward so many of each tensor.
_TILES, _TILES_BACKWARD = {2: 16, 4: 16, 8: 8}, {2: 5, 4: 8, 8: 4}
_MOST_PARTS = 3  # of a row, on each SM: all have to run at once, or they wait in vain


def _plan_parts(n_cols, itemsize, gpu, tiles):
    block_n = 4 * 32 * 16 // itemsize  # 16 bytes a thread
    most = max(64, _MOST_PARTS * host.n_multiprocessors(gpu)) * tiles * block_n
    return Plan("parts" if n_cols <= most else "eager", 1, block_n, tiles, 4)


@functools.cache
def _plan(n_cols, itemsize, gpu):
    tiles = host.row_tiles(n_cols, itemsize, 64 // itemsize)
    if tiles.tiles * tiles.block_n > _LONGEST[itemsize]:
        return _plan_parts(n_cols, itemsize, gpu, _TILES[itemsize])
    return Plan("rows", *tiles)


@functools.cache
def _plan_backward(n_cols, itemsize, gpu):
    tiles = host.row_tiles(n_cols, itemsize)
    if tiles.tiles * tiles.block_n > _LONGEST_BACKWARD[itemsize]:
        return _plan_parts(n_cols, itemsize, gpu, _TILES_BACKWARD[itemsize])
    return Plan("rows", *tiles)


def _has_pairs(gpu):
    """Whether the GPU has the instructions of _MAX."""
    return not (host.ON_CPU or torch.version.hip) and host.generation(gpu) >= 8


def _options(scale, n_seq):
    """What kernels get besides, where it is not as by default; so a plain call costs the host no more."""
    options = {} if scale == 1.0 else {"SCALE": float(scale)}
    return options if n_seq is None else options | {"n_seq": n_seq}


def _in_pieces(x):
    """x, (M, N), or a copy: its rows then stand on 16-byte boundaries as those of y do."""
    v = 16 // x.itemsize
    alike = x.is_contiguous() or x.stride(0) % v == x.shape[1] % v == 0
    return x if alike and x.data_ptr() % 16 == 0 else x.clone(memory_format=torch.contiguous_format)


def _parts(plan, x, n_words):
    """Grid, memory of n_words for each part, sizes and constants of a launch for rows of x in parts."""
    n_rows, n_cols = x.shape
    n_tiles = host.cdiv(n_cols, plan.block_n)  # in pieces none needs more: what is beyond is an end
    n_parts = host.cdiv(n_tiles, plan.tiles)
    bits = torch.int64 if x.dtype == torch.float64 else torch.int32
    words = torch.zeros(n_rows * n_parts * n_words, dtype=bits, device=x.device)
    constants = {
        "WHOLE_PIECES": n_cols % 16 != 0, "COMPUTE": host.compute_dtype(x.dtype), "V": 16 // x.itemsize,
        "TILES": host.cdiv(n_tiles, n_parts), "BLOCK_N": plan.block_n,
        "PARTS": max(host.power_of_2(n_parts), 32 * plan.num_warps), "num_warps": plan.num_warps,
    }  # fmt: skip
    return (n_rows * n_parts,), words, (n_parts, 0 if host.ON_CPU else plan.patience, 0), constants


def _launch(plan, x, y, scale=1.0, n_seq=None):
    """x: (M, N); y: contiguous, of any shape."""
    options = _options(scale, n_seq)
    n_rows, n_cols = x.shape
    if plan.way == "eager":
        matrices = x.reshape(-1, n_seq or 1, n_cols)
        y.copy_(softmax_eager(matrices, -1, scale, n_seq is not None).view_as(y))
        return
    if plan.way == "parts":
        x = _in_pieces(x)
        grid, words, sizes, constants = _parts(plan, x, 2)
        pairs = not options and _has_pairs(x.device)
        host.run(
            _softmax_parts_fwd_kernel, grid, (x, y, words), n_cols, x.stride(0), *sizes,
            EMPTY=_MINUS_INF.get(x.dtype, -math.inf), MAX_OF_PAIRS=_MAX.get(x.dtype) if pairs else None,
            **constants, **options,
        )  # fmt: skip
        return
    grid, constants = host.grid_of_rows(plan, x)
    host.run(
        _softmax_fwd_kernel, grid, (x, y), n_rows, n_cols, x.stride(0),
        COMPUTE=host.compute_dtype(x.dtype), num_warps=plan.num_warps, **constants, **options,
    )  # fmt: skip


def _launch_cuda(plan, x, y, scale, n_seq):
    # -ftz=true: results below 1e-38 are 0, and exp is one instruction
    host.load_cuda(__file__, "-ftz=true").forward(x, host.rows_of(y))


def _launch_backward(plan, dy, y, dx, scale, n_seq):
    options = _options(scale, n_seq)
    n_rows, n_cols = y.shape
    if plan.way == "eager":
        grad = torch.ops.aten._softmax_backward_data(dy, y, -1, y.dtype) * scale
        dx.copy_(grad if n_seq is None else grad.view(-1, n_seq, n_cols).tril().view_as(dx))
        return
    if plan.way == "parts":
        dy = _in_pieces(dy)
        grid, words, sizes, constants = _parts(plan, y, 1)
        host.run(
            _softmax_parts_bwd_kernel, grid, (dy, y, dx, words), n_cols, dy.stride(0), *sizes,
            **constants, **options,
        )  # fmt: skip
        return
    grid, constants = host.grid_of_rows(plan, dy)
    host.run(
        _softmax_bwd_kernel, grid, (dy, y, dx), n_rows, n_cols, dy.stride(0),
        COMPUTE=host.compute_dtype(y.dtype), num_warps=plan.num_warps, **constants, **options,
    )  # fmt: skip


# --- forward and backward ------------------------------------------------------------------------------------


def _rows_side_by_side(x):
    """x, (M, N), itself where the elements of a row follow each other; else a copy."""
    return x if x.stride(1) == 1 or x.shape[1] == 1 else x.contiguous()


def _empty(x, scale=1.0, causal=False):
    """y, before it is written."""
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _forward(x, scale=1.0, causal=False, plan=None, launch=_launch):
    y = _empty(x)
    if y.numel() > 0:
        n_cols, n_seq = x.shape[-1], _n_seq(x) if causal else None
        x = _rows_side_by_side(host.rows_of(x))
        chosen = plan or _plan(n_cols, x.itemsize, x.device)
        launch(chosen, x, y, scale, n_seq)
    return y


def _save(ctx, y, scale, causal):
    ctx.save_for_backward(y)
    ctx.how = scale, causal


def _backward(dy, y, scale, causal, plan=None):
    dx = torch.empty_like(y)
    if y.numel() > 0:
        n_cols = y.shape[-1]
        # y.sum().backward() sends a dy of strides 0: copied, as rows are read side by side
        dy = _rows_side_by_side(host.rows_of(dy))
        chosen = _plan_backward(n_cols, y.itemsize, y.device)
        plan, n_seq = plan and plan.backward or chosen, _n_seq(y) if causal else None
        _launch_backward(plan, dy, host.rows_of(y), host.rows_of(dx), scale, n_seq)
    return dx


class _Softmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, scale, causal, plan, launch):
        y = _forward(x, scale, causal, plan, launch)
        _save(ctx, y, scale, causal)
        ctx.plan = plan
        return y

    @staticmethod
    @host.once
    def backward(ctx, dy):
        return _backward(dy, *ctx.saved_tensors, *ctx.how, ctx.plan), *[None] * 4


# --- the calls -----------------------------------------------------------------------------------------------


@host.remembered
def _check(name, x, dim, scale, causal):
    if not isinstance(scale, host.NUMBERS) or not -math.inf < scale < math.inf:
        raise ValueError(f"{name}: scale must be a finite Python number, got {scale!r}")
    if not isinstance(causal, bool):
        raise TypeError(f"{name}: causal must be True or False, got {causal!r}")
    host.check_tensors(name, "softmax_eager", x=(x, "... N"))
    if dim == -1:
        return
    if isinstance(dim, bool) or not isinstance(dim, host.INTS):
        raise TypeError(f"{name}: dim must be an int, got {dim!r}")
    if not -x.dim() <= dim < x.dim():
        want = f"from {-x.dim()} to {x.dim() - 1} for x {tuple(x.shape)}"
        raise ValueError(f"{name}: dim must be {want}, got {dim}")
    if causal and dim != x.dim() - 1:
        raise ValueError(f"{name}: causal is for the last dimension, got dim {dim}")


def _call(name, x, dim, scale=1.0, causal=False, plan=None, launch=_launch):
    goes_by_op = _check(name, x, dim, scale, causal)
    if dim != -1 and dim != x.dim() - 1:
        turned = x.transpose(dim, -1)
        return _call(name, turned, -1, scale, causal, plan, launch).transpose(dim, -1)
    if goes_by_op:
        return softmax_op(x, float(scale), causal)
    return host.call(name, "softmax_eager", _Softmax, _forward, (x,), scale, causal, plan, launch)


def softmax_triton(
    x: torch.Tensor, dim: int = -1, scale: float = 1.0, causal: bool = False, *, plan: Plan | None = None
) -> torch.Tensor:  # fmt: skip
    """softmax of scale·x over dimension `dim` in one Triton kernel, with its gradient.

    x: (..., N), any strides. scale: a finite Python number, compiled into the kernel. causal: x is (..., S, N),
    and element [..., i, j] with j > i is left out, its y 0, as is_causal of F.scaled_dot_product_attention
    leaves it out; dim is the last then. Returns y of x's shape, contiguous if dim is the last. Rows with NaN or
    +inf, and rows of -inf alone, are NaN, as in torch.
    plan: a Plan in place of the one chosen, for tuning; torch.compile leaves it out.
    Works under torch.compile (as the op fused_kernels::softmax), autocast (in x's dtype) and CUDA graphs;
    not under torch.func, torch.vmap or forward-mode AD, nor twice differentiable: these raise.
    Raises TypeError for a wrong dtype, ValueError for a scalar, a wrong device, a dim that x has not or a scale
    that is not finite.
    """
    return _call("softmax_triton", x, dim, scale, causal, plan)


def softmax_cuda(x: torch.Tensor, dim: int = -1) -> torch.Tensor:
    """softmax over dimension `dim` in one CUDA kernel; the gradient comes from the Triton kernel.

    Shapes, dtypes and errors as for softmax_triton. Needs nvcc and a C++ compiler at the first call.
    """
    return _call("softmax_cuda", x, dim, launch=_launch_cuda)


@host.custom_op("fused_kernels::softmax")
def softmax_op(x: torch.Tensor, scale: float = 1.0, causal: bool = False) -> torch.Tensor:
    """softmax for torch.compile and torch.export: one node of the graph, which nothing looks into."""
    _check("softmax_op", x, -1, scale, causal)
    return _forward(x, scale, causal)


@host.custom_op("fused_kernels::softmax_backward")
def _softmax_backward_op(
    dy: torch.Tensor, y: torch.Tensor, scale: float, causal: bool
) -> torch.Tensor:
    return _backward(dy, y, scale, causal)


softmax_op.register_fake(_empty)
_softmax_backward_op.register_fake(lambda dy, y, scale, causal: torch.empty_like(y))
softmax_op.register_autograd(
    lambda ctx, dy: (_softmax_backward_op(dy, *ctx.saved_tensors, *ctx.how), None, None),
    setup_context=lambda ctx, inputs, output: _save(ctx, output, *inputs[1:]),
)
