# SPDX-License-Identifier: MIT
# Copyright (c) 2026 The Fused Kernels authors; Fused Kernels 0.1.0, lib/ops/softmax.py
"""softmax: y = exp(x - max) / sum over one dimension, one pass over memory instead of five.

Shapes    x, y: (..., N) of any rank, any strides; y contiguous. Another dimension than the last is copied to be
          the last, and y is a view of that.
Dtypes    float32, float16, bfloat16 (computed in float32) and float64.
Traffic   M rows of N elements of s bytes. Forward 2MNs, written by hand in PyTorch 8MNs; backward 3MNs.
Options   scale: of scale·x. causal: without the columns j > i of x[..., i, j], as attention leaves them out.
          Both in the same pass; in PyTorch each is one or two more.
Design    A row that fits on the chip stays in registers between its sum and its quotients: it is read once.
          Longer rows are cut into parts, each held by a program of its own; the parts of a row exchange maximum
          and sum through memory and wait for each other (a grid barrier), so they too are read once.
          Rows that do not begin on a 16-byte boundary are read in whole 16-byte pieces, and at their two ends
          element by element.
Backward  dx = scale · y · (dy - sum(y · dy)). Saves y only.
Copy it   this file for Triton; softmax.cu beside it for CUDA. MIT licence.
"""

import contextlib
import fcntl
import functools
import math
from pathlib import Path
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch._functorch.pyfunctorch import retrieve_all_functorch_interpreters
from torch.autograd import forward_ad
from triton.language.extra import libdevice

# With TRITON_INTERPRET=1 kernels run on CPU tensors; otherwise they need a GPU.
_ON_CPU = triton.knobs.runtime.interpret
_INTERPRETED = tl.constexpr(_ON_CPU)
_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


class Plan(NamedTuple):
    """How one call is launched. All ways but "parts" need block_n columns for a row and 15 more.

    way: "tile", block_m whole rows a program; "pipeline", forward only: so many programs, each of which loads
    the next rows while it computes one; "parts": block_n columns of a row a program, at most 64 programs a row.
    whole_pieces: rows of a contiguous x move in 16-byte pieces even where they begin off a 16-byte boundary.
    backward: the Plan of the backward pass, or None to have it chosen.
    """

    way: str
    block_m: int
    block_n: int
    num_warps: int
    whole_pieces: bool = False
    programs: int = 0
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
def _exp(x):
    # One approximate instruction, which makes 0 of results below 1e-38: tl.exp keeps those, at the price of
    # three instructions an element more. Triton's interpreter has no libdevice.
    return tl.exp(x) if x.dtype == tl.float64 or _INTERPRETED else libdevice.fast_expf(x)


@triton.jit
def _row_max(x):
    # Of one row a scalar: so its ends need not be laid out as its middle is, where 8 threads would hold each.
    return tl.max(x) if x.shape[0] == 1 else tl.max(x, axis=1)[:, None]


@triton.jit
def _row_sum(x):
    return tl.sum(x) if x.shape[0] == 1 else tl.sum(x, axis=1)[:, None]


@triton.jit
def _pieces(starts, cols, inside, n_cols, V: tl.constexpr):
    # For rows that begin anywhere: which of `cols`, counted from the last 16-byte boundary before a row, lie
    # in 16-byte pieces of V elements that are the row's own, so that their mask is the same for all V and
    # one load takes them; and which columns are left at the row's two ends, (BLOCK_M, 32), to be loaded alone.
    shift = (starts % V).to(tl.int32)
    end = tl.where(inside, shift + n_cols, 0)
    piece = cols // V * V
    whole = (piece >= shift) & (piece + V <= end)
    lane, last = tl.arange(0, 32)[None, :], end // V * V
    end_cols = tl.where(lane < V, lane, last + lane - V)
    end_piece = end_cols // V * V
    at_ends = (lane < tl.where(last != 0, 2 * V, V)) & (end_cols >= shift) & (end_cols < end)
    return whole, at_ends & ((end_piece < shift) | (end_piece + V > end)), end_cols


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
        x = tl.where(mask, x * SCALE, -float("inf"))
    if n_seq is not None:
        x = tl.where(col <= row % n_seq, x, -float("inf"))
    return x


@triton.jit
def _forward_rows(
    x_ptr, y_ptr, first_row, n_rows, n_cols, stride_xm, n_seq, SCALE: tl.constexpr,
    WHOLE_PIECES: tl.constexpr, COMPUTE: tl.constexpr, V: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    # BLOCK_M whole rows, padded to BLOCK_N.
    rows = (first_row + tl.arange(0, BLOCK_M).to(tl.int64))[:, None]
    inside = rows < n_rows
    cols = tl.arange(0, BLOCK_N)[None, :]
    if WHOLE_PIECES:
        base = rows * n_cols // V * V
        mask, at_ends, end_cols = _pieces(rows * n_cols, cols, inside, n_cols, V)
        x_offsets, y_offsets = base + cols, base + cols
        ends = tl.load(x_ptr + base + end_cols, mask=at_ends, other=-float("inf")).to(COMPUTE)
        first_col = rows * n_cols - base
        ends = _scored(ends, rows, end_cols - first_col, at_ends, n_seq, SCALE)
    else:
        mask = inside & (cols < n_cols)
        x_offsets, y_offsets = rows * stride_xm + cols, rows * n_cols + cols
        first_col = 0
    x = tl.load(x_ptr + x_offsets, mask=mask, other=-float("inf")).to(COMPUTE)
    x = _scored(x, rows, cols - first_col, mask, n_seq, SCALE)
    top = _row_max(x)
    if WHOLE_PIECES:
        top = tl.maximum(top, _row_max(ends))
    # NaN, +inf, a row of -inf: x - top is NaN somewhere, so the sum is, so the whole row is, as in torch
    numerator = _exp(x - top)
    total = _row_sum(numerator)
    if WHOLE_PIECES:
        end_numerator = _exp(ends - top)
        total += _row_sum(end_numerator)
        tl.store(y_ptr + base + end_cols, end_numerator * (1.0 / total), mask=at_ends)
    tl.store(y_ptr + y_offsets, numerator * (1.0 / total), mask=mask)


@triton.jit(do_not_specialize=["n_rows", "n_programs", "n_seq"])
def _softmax_fwd_kernel(
    x_ptr, y_ptr, n_rows, n_cols, stride_xm, n_programs, NUM_STAGES: tl.constexpr,
    WHOLE_PIECES: tl.constexpr, COMPUTE: tl.constexpr, V: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, n_seq=None, SCALE: tl.constexpr = None,
):  # fmt: skip
    # One program handles BLOCK_M rows; with stages it takes rows n_programs apart, the next ones under way.
    if NUM_STAGES == 0:
        first_row = tl.program_id(0).to(tl.int64) * BLOCK_M
        _forward_rows(x_ptr, y_ptr, first_row, n_rows, n_cols, stride_xm, n_seq, SCALE,
                      WHOLE_PIECES, COMPUTE, V, BLOCK_M, BLOCK_N)  # fmt: skip
    else:
        for row in tl.range(tl.program_id(0), n_rows, n_programs, num_stages=NUM_STAGES):
            _forward_rows(x_ptr, y_ptr, tl.cast(row, tl.int64), n_rows, n_cols, stride_xm, n_seq,
                          SCALE, WHOLE_PIECES, COMPUTE, V, BLOCK_M, BLOCK_N)  # fmt: skip


@triton.jit(do_not_specialize=["n_rows", "n_seq"])
def _softmax_bwd_kernel(
    dy_ptr, y_ptr, dx_ptr, n_rows, n_cols, stride_dym, WHOLE_PIECES: tl.constexpr,
    COMPUTE: tl.constexpr, V: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    n_seq=None, SCALE: tl.constexpr = None,
):  # fmt: skip
    # One program handles BLOCK_M whole rows, padded to BLOCK_N.
    first_row = tl.program_id(0).to(tl.int64) * BLOCK_M
    rows = (first_row + tl.arange(0, BLOCK_M).to(tl.int64))[:, None]
    inside = rows < n_rows
    cols = tl.arange(0, BLOCK_N)[None, :]
    if WHOLE_PIECES:
        base = rows * n_cols // V * V
        mask, at_ends, end_cols = _pieces(rows * n_cols, cols, inside, n_cols, V)
        dy_offsets, y_offsets = base + cols, base + cols
        first_col = rows * n_cols - base
        end_dy = tl.load(dy_ptr + base + end_cols, mask=at_ends, other=0.0).to(COMPUTE)
        end_y = tl.load(y_ptr + base + end_cols, mask=at_ends, other=0.0).to(COMPUTE)
    else:
        mask = inside & (cols < n_cols)
        dy_offsets, y_offsets = rows * stride_dym + cols, rows * n_cols + cols
        first_col = 0
    dy = tl.load(dy_ptr + dy_offsets, mask=mask, other=0.0).to(COMPUTE)
    y = tl.load(y_ptr + y_offsets, mask=mask, other=0.0).to(COMPUTE)
    total = _row_sum(y * dy)
    if WHOLE_PIECES:
        total += _row_sum(end_y * end_dy)
        end_dx_ptrs, cols_of_row = dx_ptr + base + end_cols, end_cols - first_col
        end_dx = _scored_grad(end_y * (end_dy - total), rows, cols_of_row, n_seq, SCALE)
        tl.store(end_dx_ptrs, end_dx, mask=at_ends)
    dx_ptrs = dx_ptr + y_offsets
    dx = _scored_grad(y * (dy - total), rows, cols - first_col, n_seq, SCALE)
    tl.store(dx_ptrs, dx, mask=mask)


# --- rows too long for one program: a grid barrier -----------------------------------------------------------

# A row of more than 32,768 elements does not fit into the registers of one program, so several programs hold a
# part of it each. None can write its part before it knows the maximum and the sum of the whole row. So each
# stores those of its part, waits until all programs of the row have done so, and then reads them all. Such a
# grid barrier hangs if a program waits for one that cannot start. Two things prevent that: a program takes its
# part by a ticket, in the order in which programs start; and a row has at most 64 parts, of 256 threads each,
# which any GPU can hold at once.


@triton.jit
def _ticket(counters_ptr, n_parts, PHASE: tl.constexpr):
    # Row and part of this program. Not by program_id: tickets go out in the order in which programs start, so
    # those that a program waits for have started too, or will once the programs before them have ended.
    ticket = tl.program_id(0)
    if PHASE == 0:
        ticket = tl.atomic_add(counters_ptr, 1, sem="relaxed")
    return (ticket // n_parts).to(tl.int64), ticket % n_parts


@triton.jit
def _wait_for_all(counter_ptr, n_parts):
    # acq_rel: what the others have stored before they arrived is seen after
    arrived = tl.atomic_add(counter_ptr, 1, sem="acq_rel") + 1
    while arrived < n_parts:
        arrived = tl.atomic_add(counter_ptr, 0, sem="acquire")


@triton.jit
def _put(stats, part, top, total, COMPUTE: tl.constexpr):
    # Maximum and sum of a part: two float32 in one word of 64 bits, two float64 in two.
    if COMPUTE == tl.float32:  # noqa: SIM300
        high = top.to(tl.int32, bitcast=True).to(tl.int64) << 32
        tl.store(stats + 2 * part, high | total.to(tl.uint32, bitcast=True).to(tl.int64))
    else:
        tl.store(stats + 2 * part, top.to(tl.int64, bitcast=True))
        tl.store(stats + 2 * part + 1, total.to(tl.int64, bitcast=True))


@triton.jit
def _get(stats, parts, mask, COMPUTE: tl.constexpr):
    # .cg: from L2, where the other programs have put them
    word = tl.load(stats + 2 * parts, mask=mask, other=0, cache_modifier=".cg")
    if COMPUTE == tl.float32:  # noqa: SIM300
        top = (word >> 32).to(tl.int32).to(tl.float32, bitcast=True)
        total = (word & 0xFFFFFFFF).to(tl.uint32).to(tl.float32, bitcast=True)
    else:
        top = word.to(tl.float64, bitcast=True)
        word = tl.load(stats + 2 * parts + 1, mask=mask, other=0, cache_modifier=".cg")
        total = word.to(tl.float64, bitcast=True)
    return tl.where(mask, top, -float("inf")), total


@triton.jit(do_not_specialize=["n_parts", "n_seq"])
def _softmax_parts_fwd_kernel(
    x_ptr, y_ptr, counters_ptr, stats_ptr, n_cols, stride_xm, n_parts, PHASE: tl.constexpr,
    COMPUTE: tl.constexpr, PARTS: tl.constexpr, BLOCK_N: tl.constexpr,
    n_seq=None, SCALE: tl.constexpr = None,
):  # fmt: skip
    # One program handles one part of a row, (1, BLOCK_N). Phase 0 is all of it; the interpreter, where programs
    # run in turn and cannot wait for each other, runs phase 1 up to the waiting and then phase 2.
    row, part = _ticket(counters_ptr, n_parts, PHASE)
    cols = part * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = cols < n_cols
    x = tl.load(x_ptr + row * stride_xm + cols, mask=mask, other=-float("inf")).to(COMPUTE)
    x = _scored(x, row, cols, mask, n_seq, SCALE)
    top = tl.max(x, axis=0)
    # a part of -inf alone adds nothing, and exp(-inf - -inf) would be NaN
    numerator = _exp(x - tl.where(top == -float("inf"), 0.0, top))
    stats = stats_ptr + 2 * row * n_parts
    if PHASE != 2:
        _put(stats, part, top, tl.sum(numerator, axis=0), COMPUTE)
    if PHASE == 0:
        _wait_for_all(counters_ptr + 1 + row, n_parts)
    if PHASE != 1:
        ids = tl.arange(0, PARTS)
        tops, sums = _get(stats, ids, ids < n_parts, COMPUTE)
        row_top = tl.max(tops, axis=0)
        total = tl.sum(tl.where(sums == 0.0, 0.0, sums * tl.exp(tops - row_top)), axis=0)
        # 0 / 0 for a row of -inf: NaN, as in torch. A part of -inf in another row has zeros, not 0 · NaN
        scale = tl.where(top == -float("inf"), 1.0, tl.exp(top - row_top)) / total
        tl.store(y_ptr + row * n_cols + cols, numerator * scale, mask=mask)


@triton.jit(do_not_specialize=["n_parts", "n_seq"])
def _softmax_parts_bwd_kernel(
    dy_ptr, y_ptr, dx_ptr, counters_ptr, stats_ptr, n_cols, stride_dym, n_parts,
    PHASE: tl.constexpr, COMPUTE: tl.constexpr, PARTS: tl.constexpr, BLOCK_N: tl.constexpr,
    n_seq=None, SCALE: tl.constexpr = None,
):  # fmt: skip
    # One program handles one part of a row, (1, BLOCK_N), in phases as forward.
    row, part = _ticket(counters_ptr, n_parts, PHASE)
    cols = part * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = cols < n_cols
    dy = tl.load(dy_ptr + row * stride_dym + cols, mask=mask, other=0.0).to(COMPUTE)
    y = tl.load(y_ptr + row * n_cols + cols, mask=mask, other=0.0).to(COMPUTE)
    stats = stats_ptr + row * n_parts
    if PHASE != 2:
        tl.store(stats + part, tl.sum(y * dy, axis=0))
    if PHASE == 0:
        _wait_for_all(counters_ptr + 1 + row, n_parts)
    if PHASE != 1:
        ids = tl.arange(0, PARTS)
        sums = tl.load(stats + ids, mask=ids < n_parts, other=0.0, cache_modifier=".cg")
        dx = y * (dy - tl.sum(sums, axis=0))
        dx = _scored_grad(dx, row, cols, n_seq, SCALE)
        tl.store(dx_ptr + row * n_cols + cols, dx, mask=mask)


def _launch_parts(plan, x, y, options):
    grid, memory, sizes = _parts(x, plan.block_n, 2, torch.int64)
    for phase in _phases():
        _softmax_parts_fwd_kernel[grid](
            x, y, *memory, x.shape[1], x.stride(0), PHASE=phase, COMPUTE=_compute_dtype(x.dtype),
            **sizes, **options, num_warps=plan.num_warps,
        )  # fmt: skip


def _launch_parts_backward(plan, dy, y, dx, options):
    wide = torch.float64 if y.dtype == torch.float64 else torch.float32
    grid, memory, sizes = _parts(y, plan.block_n, 1, wide)
    for phase in _phases():
        _softmax_parts_bwd_kernel[grid](
            dy, y, dx, *memory, y.shape[1], dy.stride(0), PHASE=phase,
            COMPUTE=_compute_dtype(y.dtype), **sizes, **options, num_warps=plan.num_warps,
        )  # fmt: skip


def _phases():
    return (1, 2) if triton.knobs.runtime.interpret else (0,)


def _parts(x, block_n, n_stats, stats_dtype):
    """Grid, scratch memory (n_stats words for each part) and sizes for rows of x cut into parts of block_n."""
    n_rows, n_cols = x.shape
    n_parts = _cdiv(n_cols, block_n)
    counters = torch.zeros(n_rows + 1, dtype=torch.int32, device=x.device)
    memory = counters, torch.empty(n_rows * n_parts * n_stats, dtype=stats_dtype, device=x.device)
    sizes = {"n_parts": n_parts, "PARTS": _power_of_2(n_parts), "BLOCK_N": block_n}
    return (n_rows * n_parts,), memory, sizes


# --- plan and launch -----------------------------------------------------------------------------------------


def _cdiv(a, b):
    return -(-a // b)  # triton.cdiv is the same, and costs 2 µs a call on the host


def _power_of_2(n):
    return 1 << max(0, n - 1).bit_length()  # so is triton.next_power_of_2


def _compute_dtype(dtype):
    return tl.float64 if dtype == torch.float64 else tl.float32


@functools.cache
def _n_multiprocessors(device):
    return 4 if _ON_CPU else torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def _shared_bytes(device):
    """How much shared memory one program can have."""
    if _ON_CPU:
        return 2**18
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin


# What is tuned, on an H200; on other GPUs it is correct, not tuned.
_SHORT, _SHARED = 512, 1024  # rows as short as that share a program, so many elements together
_MIDDLE = 2048  # up to here few warps: then a row's sum needs no shared memory, or little
_WARP_BYTES = 1024  # of a longer row: two loads a thread
_PIPELINED = 16384  # elements; of 2-byte rows longer than that one program fills an SM
_LONGEST = 32768  # elements of a row in one program
_LONGEST_BACKWARD = 65536  # bytes: there are two tensors to hold, not one
_PART, _MOST_PARTS = 8192, 64  # a part's least elements; all parts of a row have to run at once


def _plan_tile(n_cols, itemsize, contiguous):
    """The Plan of whole rows, be they as long as they may."""
    v = 16 // itemsize
    # 16 elements rather than 16 bytes: only of multiples of 16 does Triton know that masks leave loads whole
    whole_pieces = n_cols % 16 != 0 and contiguous and n_cols > 2 * v
    width = _power_of_2(n_cols + (v - 1 if whole_pieces else 0))
    block_m = max(1, _SHARED // width) if width <= _SHORT else 1
    if width <= _SHORT:
        num_warps = 4
    elif width <= _MIDDLE:
        num_warps = 4 if itemsize >= 4 else 1 if whole_pieces else 2
    else:
        num_warps = min(32, max(4, width * itemsize // _WARP_BYTES))
    return Plan("tile", block_m, width, num_warps, whole_pieces)


def _plan_parts(n_cols):
    return Plan("parts", 1, max(_PART, _power_of_2(_cdiv(n_cols, _MOST_PARTS))), 8)


@functools.cache
def _plan(n_cols, itemsize, contiguous, device):
    plan = _plan_tile(n_cols, itemsize, contiguous)
    if plan.block_n > _LONGEST:
        return _plan_parts(n_cols)
    if n_cols > _PIPELINED and itemsize == 2 and _shared_bytes(device) >= 2 * 65536 + 1024:
        # One program fills an SM: two more rows, which it waits for, have to be on their way.
        return plan._replace(way="pipeline", num_warps=16, programs=_n_multiprocessors(device))
    return plan


@functools.cache
def _plan_backward(n_cols, itemsize, contiguous):
    plan = _plan_tile(n_cols, itemsize, contiguous)
    return _plan_parts(n_cols) if plan.block_n * itemsize > _LONGEST_BACKWARD else plan


def _options(scale, n_seq):
    """What kernels get besides, where it is not as by default; so a plain call costs the host no more."""
    options = {} if scale == 1.0 else {"SCALE": float(scale)}
    return options if n_seq is None else options | {"n_seq": n_seq}


def _launch(plan, x, y, scale=1.0, n_seq=None):
    options = _options(scale, n_seq)
    n_rows, n_cols = x.shape
    with torch.cuda.device_of(x):  # else the launch goes to the current GPU, not to x's
        if plan.way == "parts":
            _launch_parts(plan, x, y, options)
            return
        pipelined = plan.way == "pipeline"
        programs = min(n_rows, plan.programs) if pipelined else _cdiv(n_rows, plan.block_m)
        _softmax_fwd_kernel[(programs,)](
            x, y, n_rows, n_cols, x.stride(0), programs, NUM_STAGES=3 if pipelined else 0,
            WHOLE_PIECES=plan.whole_pieces and x.is_contiguous(), COMPUTE=_compute_dtype(x.dtype),
            V=16 // x.itemsize, BLOCK_M=plan.block_m, BLOCK_N=plan.block_n, **options,
            num_warps=plan.num_warps,
        )  # fmt: skip


def _launch_backward(plan, dy, y, dx, scale, n_seq):
    options = _options(scale, n_seq)
    n_rows, n_cols = y.shape
    with torch.cuda.device_of(y):
        if plan.way == "parts":
            _launch_parts_backward(plan, dy, y, dx, options)
            return
        _softmax_bwd_kernel[(_cdiv(n_rows, plan.block_m),)](
            dy, y, dx, n_rows, n_cols, dy.stride(0),
            WHOLE_PIECES=plan.whole_pieces and dy.is_contiguous(), COMPUTE=_compute_dtype(y.dtype),
            V=16 // y.itemsize, BLOCK_M=plan.block_m, BLOCK_N=plan.block_n, **options,
            num_warps=plan.num_warps,
        )  # fmt: skip


# --- forward and backward ------------------------------------------------------------------------------------


def _rows_side_by_side(x):
    """x, (M, N), itself where the elements of a row follow each other; else a copy."""
    return x if x.stride(1) == 1 or x.shape[1] == 1 else x.contiguous()


def _forward(x, scale=1.0, causal=False, plan=None, launch=_launch):
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    if y.numel() > 0:
        n_cols, n_seq = x.shape[-1], _n_seq(x) if causal else None
        x, out = _rows_side_by_side(x.reshape(-1, n_cols)), y.view(-1, n_cols)
        chosen = plan or _plan(n_cols, x.itemsize, x.is_contiguous(), x.device)
        launch(chosen, x, out, scale, n_seq)
    return y


def _save(ctx, y, scale, causal):
    ctx.save_for_backward(y)
    ctx.how = scale, causal


def _backward(dy, y, scale, causal, plan=None):
    dx = torch.empty_like(y)
    if y.numel() > 0:
        n_cols = y.shape[-1]
        # y.sum().backward() sends a dy of strides 0: copied, as rows are read side by side
        dy = _rows_side_by_side(dy.reshape(-1, n_cols))
        plan = plan and plan.backward or _plan_backward(n_cols, y.itemsize, dy.is_contiguous())
        n_seq = _n_seq(y) if causal else None
        _launch_backward(plan, dy, y.view(-1, n_cols), dx.view(-1, n_cols), scale, n_seq)
    return dx


class _Undifferentiable(torch.autograd.Function):
    """Gradients as they are, and an error for whoever differentiates them."""

    @staticmethod
    def forward(ctx, backward, grads, *sources):
        ctx.op = backward.__module__.rpartition(".")[2]
        return grads

    @staticmethod
    def backward(ctx, *_):
        raise RuntimeError(f"{ctx.op} has no second derivative; for one, use {ctx.op}_eager")


def _once(backward):
    """A Function's backward that runs once: differentiating what it returns raises instead of being wrong.

    The error stands between the gradients and all that they depend on. That of PyTorch's once_differentiable
    stands beside: autograd.grad(..., inputs) never comes by it.
    """

    def guarded(ctx, *dys):
        if not torch.is_grad_enabled():  # the usual case: without create_graph=True
            return backward(ctx, *dys)
        with torch.no_grad():
            grads = backward(ctx, *dys)
        return _Undifferentiable.apply(backward, grads, *dys, *ctx.saved_tensors)

    return guarded


class _Softmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, scale, causal, forward, plan):
        y = forward(x, scale, causal, plan)
        _save(ctx, y, scale, causal)
        ctx.plan = plan
        return y

    @staticmethod
    @_once
    def backward(ctx, dy):
        return _backward(dy, *ctx.saved_tensors, *ctx.how, ctx.plan), *[None] * 4


# --- the calls -----------------------------------------------------------------------------------------------


def _fits(x, scale, causal):
    """Whether the kernels take these arguments; if not, _refuse_arguments says why."""
    return (
        isinstance(x, torch.Tensor)
        and x.dtype in _DTYPES
        and x.device.type == ("cpu" if _ON_CPU else "cuda")
        and x.dim() > 0
        and isinstance(scale, (int, float))
        and math.isfinite(scale)
        and isinstance(causal, bool)
    )


def _refuse(name, eager, mixed=(), **wanted):
    """Raise the error that says what is wrong with a call of `name`, and what to do.

    wanted: label=(tensor, its sizes in letters), as x=(x, "... N"); the first one sets device and
    dtype, but for dtypes that may be mixed.
    """
    (first, (x, _)), sizes = next(iter(wanted.items())), {}
    for label, (t, letters) in wanted.items():
        if not isinstance(t, torch.Tensor):
            raise TypeError(f"{name}: {label} must be a torch.Tensor, got {type(t).__name__}")
        if t.dtype not in _DTYPES:
            wrong = f"{label} must be a floating-point tensor, got {t.dtype}"
            raise TypeError(f"{name}: {wrong}; use .float()")
        if t.dtype != x.dtype and not {t.dtype, x.dtype} <= {*mixed}:
            cast = f"cast one of them, as {label}.to({first}.dtype)"
            raise TypeError(f"{name}: {first} is {x.dtype} and {label} {t.dtype}; {cast}")
        if t.device != x.device:
            where = f"{first} is on {x.device} and {label} on {t.device}"
            raise ValueError(f"{name}: {where}; move both to one device")
        names = letters.removeprefix("... ").split()
        shape = t.shape[max(0, t.dim() - len(names)) :] if letters[0] == "." else t.shape
        known = " and ".join(f"{n} = {sizes[n]}" for n in names if n in sizes)
        same = [sizes.setdefault(n, size) == size for n, size in zip(names, shape)]
        if len(shape) != len(names) or not all(same):
            want = f"{label} must be ({letters.replace(' ', ', ')}){known and ' with ' + known}"
            beside = f" beside {first} {tuple(x.shape)}" if t is not x else ""
            scalar = letters[0] == "." and t.dim() == 0
            got = f"a scalar; use {label}.view(1)" if scalar else f"shape {tuple(t.shape)}{beside}"
            raise ValueError(f"{name}: {want}, got {got}")
    on = "the CPU: TRITON_INTERPRET=1 is set" if _ON_CPU else "a GPU, or TRITON_INTERPRET=1 set"
    raise ValueError(f"{name}: {first} must be on {on}, got {x.device}; use {eager} there")


def _refuse_arguments(name, x, scale, causal):
    if not isinstance(scale, (int, float)) or not math.isfinite(scale):
        raise ValueError(f"{name}: scale must be a finite Python number, got {scale!r}")
    if not isinstance(causal, bool):
        raise TypeError(f"{name}: causal must be True or False, got {causal!r}")
    _refuse(name, "softmax_eager", x=(x, "... N"))


def _needs_grad(*tensors):
    """Whether autograd has to know; of forward-mode AD, too, whose tangents would be lost without a word."""
    backward = torch.is_grad_enabled() and any([t.requires_grad for t in tensors])
    return backward or forward_ad._current_level >= 0


def _explain(error, name, eager):
    """In place of an error that comes of torch.func or of forward-mode AD, one that says so and what to do."""
    if forward_ad._current_level >= 0 or retrieve_all_functorch_interpreters():
        reach = "torch.func (grad, jvp, vmap) and forward-mode AD do not reach into a kernel"
        raise RuntimeError(f"{name}: {reach}; under them use {eager}") from error


def _call(name, forward, x, dim, scale, causal, plan):
    if not _fits(x, scale, causal):
        _refuse_arguments(name, x, scale, causal)
    if dim != -1:
        if isinstance(dim, bool) or not isinstance(dim, int):
            raise TypeError(f"{name}: dim must be an int, got {dim!r}")
        if not -x.dim() <= dim < x.dim():
            want = f"from {-x.dim()} to {x.dim() - 1} for x {tuple(x.shape)}"
            raise ValueError(f"{name}: dim must be {want}, got {dim}")
        if dim != x.dim() - 1:
            if causal:
                raise ValueError(f"{name}: causal is for the last dimension, got dim {dim}")
            turned = x.transpose(dim, -1)
            return _call(name, forward, turned, -1, scale, causal, plan).transpose(dim, -1)
    if torch.compiler.is_compiling():
        return softmax_op(x, float(scale), causal)
    try:
        if _needs_grad(x):
            return _Softmax.apply(x, scale, causal, forward, plan)
        return forward(x, scale, causal, plan)  # past autograd: a third of the host's time less
    except RuntimeError as error:
        _explain(error, name, "softmax_eager")
        raise


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
    return _call("softmax_triton", _forward, x, dim, scale, causal, plan)


@torch.library.custom_op("fused_kernels::softmax", mutates_args=())
def softmax_op(x: torch.Tensor, scale: float = 1.0, causal: bool = False) -> torch.Tensor:
    """softmax for torch.compile and torch.export: one node of the graph, which nothing looks into."""
    if not _fits(x, scale, causal):
        _refuse_arguments("softmax_op", x, scale, causal)
    return _forward(x, scale, causal)


@torch.library.custom_op("fused_kernels::softmax_backward", mutates_args=())
def _softmax_backward_op(
    dy: torch.Tensor, y: torch.Tensor, scale: float, causal: bool
) -> torch.Tensor:
    return _backward(dy, y, scale, causal)


@softmax_op.register_fake
def _(x, scale=1.0, causal=False):
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


@_softmax_backward_op.register_fake
def _(dy, y, scale, causal):
    return torch.empty_like(y)


softmax_op.register_autograd(
    lambda ctx, dy: (_softmax_backward_op(dy, *ctx.saved_tensors, *ctx.how), None, None),
    setup_context=lambda ctx, inputs, output: _save(ctx, output, *inputs[1:]),
)


@contextlib.contextmanager
def _one_build(name, load_inline):
    """Around load_inline: one process at a time, and none waits for a build that was killed."""
    if hasattr(load_inline, "builds_for_the_cpu"):  # replaced by what sees to that itself
        yield
        return
    if _ON_CPU:
        why = "TRITON_INTERPRET=1 runs Triton's kernels on the CPU, and no others"
        raise ValueError(f"{name}: tensors must be on a GPU; {why}")
    from torch.utils.cpp_extension import _get_build_directory

    folder = Path(_get_build_directory(name, verbose=False))
    with open(folder / "one_at_a_time", "w") as file:
        # ends with its process; PyTorch's own, the file named lock, does not
        fcntl.flock(file, fcntl.LOCK_EX)
        (folder / "lock").unlink(missing_ok=True)
        yield


@functools.cache
def _cuda():
    """The functions of softmax.cu, compiled at the first call (half a minute, then cached on disk)."""
    from torch.utils.cpp_extension import load_inline

    binding = 'TORCH_LIBRARY(softmax_cuda, m) { m.def("forward", &softmax_forward); }'
    source = Path(__file__).with_suffix(".cu").read_text() + binding
    with _one_build("softmax_cuda", load_inline):
        load_inline(
            "softmax_cuda", cpp_sources="", cuda_sources=source, is_python_module=False,
            extra_cuda_cflags=["-O3", "-ftz=true"],  # results below 1e-38 are 0, and exp is one instruction
            no_implicit_headers=True,
        )  # fmt: skip
    return torch.ops.softmax_cuda


def _launch_cuda(plan, x, y, scale, n_seq):
    _cuda().forward(x, y)


def _forward_cuda(x, scale=1.0, causal=False, plan=None):
    return _forward(x, scale, causal, plan, _launch_cuda)


def softmax_cuda(x: torch.Tensor, dim: int = -1) -> torch.Tensor:
    """softmax over dimension `dim` in one CUDA kernel; the gradient comes from the Triton kernel.

    Shapes, dtypes and errors as for softmax_triton. Needs nvcc and a C++ compiler at the first call.
    """
    return _call("softmax_cuda", _forward_cuda, x, dim, 1.0, False, None)
