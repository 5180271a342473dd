# SPDX-License-Identifier: MIT
# Copyright (c) 2026 The Fused Kernels authors; Fused Kernels 0.1.0, lib/ops/embedding_hash.py
"""embedding_hash: tokens hashed to rows, and the rows of all embedding tables gathered, in one launch.

Shapes    ids: (B, T), any integers, |id| < 2**62; weight: (R, D), the T tables one below the other, R the sum
          of num_rows, T ints; both with any strides. y: (B, T, D), contiguous, as interaction reads it.
          y[b, t] = weight[start_t + (ids[b, t] + 1) mod num_rows[t]]; mod is never negative, as Python's.
Dtypes    ids: int64 and int32; weight: float32, float16, bfloat16 and float64.
Traffic   Forward BT ids of 8 bytes and 2BTD elements, rows read and y. PyTorch also writes and reads the rows'
          numbers, three times, and with a table of its own for each column launches one gather for each.
Method    The hashing trick (Weinberger et al., Feature Hashing for Large Scale Multitask Learning, 2009).
Backward  Of weight alone: dweight[r] is the sum of dy over the lookups of row r. Saves ids: the rows' numbers
          are two operations, and as long as ids are. dweight in one of three ways:
          deterministic=True   PyTorch's embedding_backward: lookups sorted by row, those of a row in
                               ascending order, added up some at a time, on a GPU in float32 for 16 bits. The
                               same bits in every run.
          deterministic=False  one launch of atomic additions to zeros, in float32 for 16 bits: no sort, but
                               the order, and with it the last bits, differs from run to run.
          sparse=True          no sum: a COO tensor of dy, an entry for each lookup, as nn.Embedding's.
Update    With update= the backward pass takes the optimizer's step itself, of SGD or of row-wise Adagrad
          (Mudigere et al., arXiv:2104.05158), and makes no gradient of weight. Lookups are sorted by row; each
          row's gradient is added up in a fixed order, in float32 for 16 bits, and each row that was looked up
          is read and written once. The same bits in every run. A gradient that is not there cannot be clipped,
          scaled, or added up over batches or GPUs.
Copy it   by `make copy OP=embedding_hash TO=folder`, or take _host.py and _device.py along. MIT licence.
"""

import functools
import itertools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

if __package__:  # shared by the ops: `device` in kernels, `host` around them
    from . import _host as host
else:  # the same, in a plain folder
    import _host as host


class Plan(NamedTuple):
    """How one call is launched, both passes: lookups and columns of a program, and its warps."""

    block_l: int
    block_d: int
    num_warps: int


class Update(NamedTuple):
    """The step that the backward pass takes with the rows that were looked up, in place of a gradient.

    Without state SGD: row -= lr·g, where g is the sum of dy over the lookups of the row. With state, (R,),
    float32, zeros at first, row-wise Adagrad: state += mean(g²), then row -= lr·g / (√state + eps).
    """

    lr: float
    state: torch.Tensor | None = None
    eps: float = 1e-8


class WalkPlan(NamedTuple):
    """How an update is launched: the lookups on end that one walk adds up, walks of a program, its warps."""

    length: int
    walks: int
    num_warps: int


def _tables(num_rows, device):
    """(2, T) on the device, the same tensor in every call: each table's rows, and where it starts in weight.

    Making it copies to the GPU: the host waits for that, and a CUDA graph cannot capture it.
    """
    if host.is_compiling() or host.active_transforms():
        return _tables_anew(num_rows, device)  # theirs, not for a call after them
    return _tables_once(num_rows, device)


def _tables_anew(num_rows, device):
    starts = itertools.accumulate(num_rows[:-1], initial=0)
    return torch.tensor([num_rows, [*starts]], device=device)


_tables_once = functools.cache(_tables_anew)


def _rows(ids, num_rows):
    """The row in weight of each lookup, (B, T)."""
    n_rows, starts = _tables(tuple(num_rows), ids.device)
    return starts + (ids.long() + 1) % n_rows  # torch's % floors


def embedding_hash_eager(
    ids: torch.Tensor, weight: torch.Tensor, num_rows: Sequence[int]
) -> torch.Tensor:
    return F.embedding(_rows(ids, num_rows), weight)


@triton.jit
def _lookups(
    ids_ptr, tables_ptr, n_lookups, stride_ib, stride_it,
    TABLES: tl.constexpr, BLOCK_L: tl.constexpr,
):  # fmt: skip
    # The program's lookups, numbered sample by sample: number, sample, table, row, and whether there is one.
    # int64: lookup * dim passes 2**31 from 8 GiB of float32 on
    first = tl.program_id(0).to(tl.int64) * BLOCK_L
    lookup = first + tl.arange(0, BLOCK_L)
    # 64-bit division is slow: one for the program's first lookup, and 32 bits from there
    place = (first % TABLES).to(tl.int32) + tl.arange(0, BLOCK_L)
    sample, table = first // TABLES + place // TABLES, (place % TABLES).to(tl.int64)
    is_there = lookup < n_lookups
    ids_ptrs = ids_ptr + sample * stride_ib + table * stride_it
    ids = tl.load(ids_ptrs, mask=is_there, other=0).to(tl.int64)
    n_rows, start = tl.load(tables_ptr + table), tl.load(tables_ptr + TABLES + table)
    row = (ids + 1) % n_rows  # Triton's % is C's: the sign is that of ids + 1
    row += tl.where(row < 0, n_rows, 0)
    return lookup, sample, table, start + row, is_there


# What stays the same in a model is a constexpr: Triton then knows how many elements side by side begin at a
# multiple of 16 bytes, and loads and stores them at once.
@triton.jit(do_not_specialize=["n_lookups"])
def _embedding_hash_fwd_kernel(
    ids_ptr, weight_ptr, tables_ptr, y_ptr, n_lookups, stride_ib, stride_it,
    STRIDE_WR: tl.constexpr, STRIDE_WD: tl.constexpr, TABLES: tl.constexpr, DIM: tl.constexpr,
    BLOCK_L: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    # One program copies BLOCK_D columns of BLOCK_L lookups.
    lookup, _, _, row, is_there = _lookups(
        ids_ptr, tables_ptr, n_lookups, stride_ib, stride_it, TABLES, BLOCK_L
    )
    cols = tl.program_id(1).to(tl.int64) * BLOCK_D + tl.arange(0, BLOCK_D)[None, :]
    mask = is_there[:, None] & (cols < DIM)
    weight = tl.load(weight_ptr + row[:, None] * STRIDE_WR + cols * STRIDE_WD, mask=mask)
    tl.store(y_ptr + lookup[:, None] * DIM + cols, weight, mask=mask)


@triton.jit(do_not_specialize=["n_lookups"])
def _embedding_hash_bwd_kernel(
    dy_ptr, ids_ptr, tables_ptr, dweight_ptr, n_lookups, stride_ib, stride_it,
    STRIDE_YB: tl.constexpr, STRIDE_YT: tl.constexpr, STRIDE_YD: tl.constexpr,
    TABLES: tl.constexpr, DIM: tl.constexpr,
    BLOCK_L: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    # One program adds BLOCK_D columns of BLOCK_L lookups to dweight, which begins as zeros.
    _, sample, table, row, is_there = _lookups(
        ids_ptr, tables_ptr, n_lookups, stride_ib, stride_it, TABLES, BLOCK_L
    )
    cols = tl.program_id(1).to(tl.int64) * BLOCK_D + tl.arange(0, BLOCK_D)[None, :]
    mask = is_there[:, None] & (cols < DIM)
    dy_ptrs = dy_ptr + (sample * STRIDE_YB + table * STRIDE_YT)[:, None] + cols * STRIDE_YD
    dy = tl.load(dy_ptrs, mask=mask, other=0.0).to(dweight_ptr.dtype.element_ty)
    tl.atomic_add(dweight_ptr + row[:, None] * DIM + cols, dy, mask=mask, sem="relaxed")


@triton.jit(do_not_specialize=["n_lookups"])
def _embedding_hash_rows_kernel(
    ids_ptr, tables_ptr, rows_ptr, n_lookups, stride_ib, stride_it,
    TABLES: tl.constexpr, BLOCK_L: tl.constexpr,
):  # fmt: skip
    # One program writes the rows' numbers of BLOCK_L lookups, which are sorted next.
    lookup, _, _, row, is_there = _lookups(
        ids_ptr, tables_ptr, n_lookups, stride_ib, stride_it, TABLES, BLOCK_L
    )
    tl.store(rows_ptr + lookup, row, mask=is_there)


@triton.jit
def _take_step(
    weight_ptr, state_ptr, row, grad, lr, eps, cols, is_mine, STRIDE_WR: tl.constexpr,
    STRIDE_WD: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    # The optimizer's step of rows (M, 1) where is_mine: there grad, (M, BLOCK_D), is their whole gradient.
    row = row.to(tl.int64)  # int64: row * stride passes 2**31 from 8 GiB of float32 on
    mask = is_mine & (cols < DIM)
    ptrs = weight_ptr + row * STRIDE_WR + cols * STRIDE_WD
    weight = tl.load(ptrs, mask=mask, other=0.0).to(grad.dtype)
    rate = tl.cast(lr, grad.dtype)
    if state_ptr is not None:
        # state += mean(g²); columns past DIM hold zeros
        state = tl.load(state_ptr + row, mask=is_mine, other=1.0)  # else 0/0 where nothing is
        state += tl.sum(grad * grad, axis=1, keep_dims=True) / DIM
        tl.debug_barrier()  # else a thread with a copy of this row may read what is stored here
        tl.store(state_ptr + row, state, mask=is_mine)
        rate = rate / (tl.sqrt(state) + tl.cast(eps, grad.dtype))
    tl.store(ptrs, weight - rate * grad, mask=mask)


# Sorted by row, the lookups of a row lie on end. A walk adds up LENGTH of them, and takes the step of each row
# whose lookups all lie in it. What it has of a row that began before it, or that goes on after it, is a part:
# of each kind there is one at most. The next kernel adds those up, in the walk where their row begins.
@triton.jit(do_not_specialize=["n_lookups"])
def _embedding_hash_walk_kernel(
    dy_ptr, rows_ptr, order_ptr, parts_ptr, weight_ptr, state_ptr, n_lookups, lr: tl.float64, eps: tl.float64,
    STRIDE_YB: tl.constexpr, STRIDE_YT: tl.constexpr, STRIDE_YD: tl.constexpr, STRIDE_WR: tl.constexpr,
    STRIDE_WD: tl.constexpr, TABLES: tl.constexpr, DIM: tl.constexpr, COMPUTE: tl.constexpr,
    LENGTH: tl.constexpr, WALKS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    # One program goes WALKS walks side by side, a lookup of each at a time.
    walk = (tl.program_id(0).to(tl.int64) * WALKS + tl.arange(0, WALKS))[:, None]
    cols = tl.arange(0, BLOCK_D).to(tl.int64)[None, :]
    place, n_walks = walk * LENGTH, tl.cdiv(n_lookups, LENGTH)
    first_row = tl.load(rows_ptr + place, mask=place < n_lookups, other=-1)
    before = tl.load(rows_ptr + place - 1, mask=(place > 0) & (place <= n_lookups), other=-1)
    row, grad = first_row, tl.zeros((WALKS, BLOCK_D), COMPUTE)
    for step in range(0, LENGTH):
        is_there, is_last = place < n_lookups, step == LENGTH - 1
        lookup = tl.load(order_ptr + place, mask=is_there, other=0)
        next_row = tl.load(rows_ptr + place + 1, mask=place + 1 < n_lookups, other=-1)
        offsets = lookup // TABLES * STRIDE_YB + lookup % TABLES * STRIDE_YT
        dy_ptrs = dy_ptr + offsets + cols * STRIDE_YD
        grad += tl.load(dy_ptrs, mask=is_there & (cols < DIM), other=0.0).to(COMPUTE)
        began_here = (row != first_row) | (before != first_row)
        ends = next_row != row
        _take_step(
            weight_ptr, state_ptr, row, grad, lr, eps, cols, is_there & ends & began_here,
            STRIDE_WR, STRIDE_WD, DIM,
        )  # fmt: skip
        is_part = is_there & ((ends & ~began_here) | (~ends & is_last))
        part = tl.where(began_here, walk + n_walks, walk)
        tl.store(parts_ptr + part * DIM + cols, grad, mask=is_part & (cols < DIM))
        grad = tl.where(ends, 0.0, grad)
        place, row = place + 1, next_row


@triton.jit(do_not_specialize=["n_lookups"])
def _embedding_hash_parts_kernel(
    rows_ptr, parts_ptr, weight_ptr, state_ptr, n_lookups, lr: tl.float64, eps: tl.float64,
    STRIDE_WR: tl.constexpr, STRIDE_WD: tl.constexpr, DIM: tl.constexpr, COMPUTE: tl.constexpr,
    LENGTH: tl.constexpr, WALKS: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    # One program looks at the ends of WALKS walks, one by one: of a row that goes on there, and began in that
    # walk, it adds up the parts, BLOCK_P at a time, and takes the step.
    cols = tl.arange(0, BLOCK_D).to(tl.int64)[None, :]
    n_walks = tl.cdiv(n_lookups, LENGTH)
    for k in range(0, WALKS):
        walk = tl.program_id(0).to(tl.int64) * WALKS + k
        first, end = walk * LENGTH, (walk + 1) * LENGTH
        goes_on = end < n_lookups
        row = tl.load(rows_ptr + end, mask=goes_on, other=-1)
        goes_on = goes_on & (tl.load(rows_ptr + end - 1, mask=goes_on, other=-2) == row)
        before = tl.load(rows_ptr + first - 1, mask=goes_on & (first > 0), other=-1)
        if goes_on & ((tl.load(rows_ptr + first, mask=goes_on, other=-1) != row) | (before != row)):
            part = walk + 1 + tl.arange(0, BLOCK_P).to(tl.int64)[:, None]
            total = tl.zeros((BLOCK_P, BLOCK_D), COMPUTE)
            more = 1
            while more > 0:
                place = part * LENGTH
                there = tl.load(rows_ptr + place, mask=place < n_lookups, other=-1) == row
                mask = there & (cols < DIM)
                total += tl.load(parts_ptr + part * DIM + cols, mask=mask, other=0.0)
                more = tl.min(there.to(tl.int32))  # else the row ended in between
                part += BLOCK_P
            own_ptrs = parts_ptr + (n_walks + walk) * DIM + cols
            grad = tl.load(own_ptrs, mask=cols < DIM, other=0.0)
            grad += tl.sum(total, axis=0, keep_dims=True)
            _take_step(
                weight_ptr, state_ptr, tl.full((1, 1), 0, tl.int64) + row, grad, lr, eps, cols,
                tl.full((1, 1), True, tl.int1), STRIDE_WR, STRIDE_WD, DIM,
            )  # fmt: skip


# --- plan (the dispatch heuristic) and launch ----------------------------------------------------------------


@functools.cache
def _plan(dim, itemsize):
    """Whole rows of up to 1024 elements; a thread has four loads under way, of 16 bytes if rows are such."""
    block_d = min(host.power_of_2(dim), 1024)
    elements = 8192 // itemsize if dim * itemsize % 16 == 0 else 512
    return Plan(max(1, elements // block_d), block_d, 4)


def _grid_and_sizes(plan, ids, num_rows, dim):
    """The grid and the arguments that both kernels take alike."""
    n_lookups = ids.numel()
    options = {
        "TABLES": len(num_rows), "DIM": dim, "BLOCK_L": plan.block_l, "BLOCK_D": plan.block_d,
        "num_warps": plan.num_warps,
    }  # fmt: skip
    grid = host.cdiv(n_lookups, plan.block_l), host.cdiv(dim, plan.block_d)
    return grid, (n_lookups, *ids.stride()), options


def _launch(plan, ids, weight, num_rows, y):
    dim, (stride_wr, stride_wd) = y.shape[2], weight.stride()
    plan = plan or _plan(dim, y.itemsize)
    grid, sizes, options = _grid_and_sizes(plan, ids, num_rows, dim)
    host.run(
        _embedding_hash_fwd_kernel, grid, (ids, weight, _tables(num_rows, ids.device), y), *sizes,
        STRIDE_WR=stride_wr, STRIDE_WD=stride_wd, **options,
    )  # fmt: skip


def _launch_backward(plan, dy, ids, num_rows, dweight):
    dim, strides = dy.shape[2], dict(zip(("STRIDE_YB", "STRIDE_YT", "STRIDE_YD"), dy.stride()))
    plan = plan or _plan(dim, dy.itemsize)
    grid, sizes, options = _grid_and_sizes(plan, ids, num_rows, dim)
    host.run(
        _embedding_hash_bwd_kernel, grid, (dy, ids, _tables(num_rows, ids.device), dweight), *sizes,
        **strides, **options,
    )  # fmt: skip


@functools.cache
def _plan_update(n_lookups, dim, itemsize):
    """A thread holds 16 bytes of dy, of long rows more; few lookups take short walks, which end sooner."""
    per_thread = max(1, 16 // itemsize) if dim * itemsize % 16 == 0 else 1
    block_d = host.power_of_2(dim)
    num_warps = 4 if block_d <= 2048 else 16
    length = 32 if n_lookups >= 2**19 else 8
    return WalkPlan(length, max(1, 32 * num_warps * per_thread // block_d), num_warps)


def _launch_update(plan, dy, ids, num_rows, weight, update):
    """The rows' numbers, their sort, and the two kernels that add up and take the step."""
    n_lookups, dim = ids.numel(), dy.shape[2]
    plan = plan or _plan_update(n_lookups, dim, dy.itemsize)
    rows = ids.new_empty(n_lookups, dtype=torch.int32 if len(weight) < 2**31 else torch.int64)
    tables = _tables(num_rows, ids.device)
    host.run(
        _embedding_hash_rows_kernel, (host.cdiv(n_lookups, 1024),), (ids, tables, rows),
        n_lookups, *ids.stride(), TABLES=len(num_rows), BLOCK_L=1024, num_warps=4,
    )  # fmt: skip
    # stable: else the lookups of a row might be added up in another order in each run
    rows, order = rows.sort(stable=True)
    n_walks = host.cdiv(n_lookups, plan.length)
    parts = dy.new_empty((2, n_walks, dim), dtype=host.sum_dtype(dy.dtype))
    sizes = n_lookups, float(update.lr), float(update.eps)
    options = dict(zip(("STRIDE_WR", "STRIDE_WD"), weight.stride())) | {
        "DIM": dim, "COMPUTE": host.compute_dtype(dy.dtype), "LENGTH": plan.length,
        "BLOCK_D": host.power_of_2(dim), "num_warps": plan.num_warps,
    }  # fmt: skip
    host.run(
        _embedding_hash_walk_kernel, (host.cdiv(n_walks, plan.walks),),
        (dy, rows, order, parts, weight, update.state), *sizes,
        **dict(zip(("STRIDE_YB", "STRIDE_YT", "STRIDE_YD"), dy.stride())), TABLES=len(num_rows),
        WALKS=plan.walks, **options,
    )  # fmt: skip
    # 8 walks a program: most have nothing to add up, and a GPU starts so many programs a second and no more
    host.run(
        _embedding_hash_parts_kernel, (host.cdiv(n_walks, 8),),
        (rows, parts, weight, update.state), *sizes, WALKS=8, BLOCK_P=plan.walks, **options,
    )  # fmt: skip


# --- forward and backward ------------------------------------------------------------------------------------


def _empty(ids, weight, *_):
    """y, before it is written."""
    return weight.new_empty((*ids.shape, weight.shape[1]))


def _forward(ids, weight, num_rows, sparse=False, deterministic=True, plan=None, update=None):
    """sparse, deterministic, update: for the backward pass."""
    y = _empty(ids, weight)
    if y.numel() > 0:
        _launch(plan, ids, weight, tuple(num_rows), y)
    return y


def _save(ctx, ids, num_rows, sparse=False, deterministic=True, plan=None):
    ctx.how = num_rows, sparse, deterministic, plan
    ctx.save_for_backward(ids)


def _backward(dy, ids, num_rows, sparse=False, deterministic=True, plan=None):
    """dweight, (R, D): it depends on which rows were read, and not on what they hold."""
    size = sum(num_rows), dy.shape[2]
    if dy.numel() == 0 and not sparse:
        return dy.new_zeros(size)
    if sparse or deterministic:  # as for one table, without padding or weights by frequency
        rows = _rows(ids, num_rows)
        return torch.ops.aten.embedding_backward(dy, rows, size[0], -1, False, sparse)
    dweight = dy.new_zeros(size, dtype=host.sum_dtype(dy.dtype))
    # y.sum().backward() sends a dy of strides 0, which is read as it is
    _launch_backward(plan, dy, ids, tuple(num_rows), dweight)
    return dweight.to(dy.dtype)


def _update(dy, ids, num_rows, weight, update, plan=None):
    """weight, and update.state, after the step; autograd is told that weight has changed."""
    if dy.numel() > 0:
        _launch_update(plan, dy, ids, tuple(num_rows), weight.detach(), update)
        torch.autograd.graph.increment_version(weight)


class _EmbeddingHash(torch.autograd.Function):
    @staticmethod
    def forward(ctx, ids, weight, num_rows, sparse, deterministic, plan, update):
        _save(ctx, ids, num_rows, sparse, deterministic, plan)
        # not saved for the backward pass, which may change weight while another lookup of it waits for its own
        ctx.update = None if update is None else (weight, update)
        return _forward(ids, weight, num_rows, plan=plan)

    @staticmethod
    @host.once
    def backward(ctx, dy):
        if ctx.update is None:
            return None, _backward(dy, *ctx.saved_tensors, *ctx.how), *[None] * 5
        _update(dy, *ctx.saved_tensors, ctx.how[0], *ctx.update)
        return (None,) * 7


# --- the calls -----------------------------------------------------------------------------------------------


def _are_sizes(num_rows):
    """Whether it is a tuple or a list of a table's rows each, one or more."""
    is_sequence = isinstance(num_rows, (tuple, list)) and len(num_rows) > 0
    return is_sequence and all([isinstance(n, int) and n >= 1 for n in num_rows])


def _refuse_sizes(name, num_rows):
    want = "num_rows must be a tuple of ints, the rows of each table, 1 or more"
    raise ValueError(f"{name}: {want}, got {num_rows!r}")


@host.remembered
def _check(name, ids, weight, num_rows):
    if not isinstance(ids, torch.Tensor):
        raise TypeError(f"{name}: ids must be a torch.Tensor, got {type(ids).__name__}")
    if ids.dtype not in (torch.int64, torch.int32):
        wrong = f"ids must be an int64 or an int32 tensor, got {ids.dtype}"
        raise TypeError(f"{name}: {wrong}; use .long()")
    if not _are_sizes(num_rows):
        _refuse_sizes(name, num_rows)
    if ids.dim() != 2 or ids.shape[1] != len(num_rows):
        want = f"ids must be (B, T) with the T = {len(num_rows)} tables of num_rows"
        raise ValueError(f"{name}: {want}, got shape {tuple(ids.shape)}")
    if isinstance(weight, torch.Tensor) and ids.device != weight.device:
        where = f"ids is on {ids.device} and weight on {weight.device}"
        raise ValueError(f"{name}: {where}; move both to one device")
    n_rows, shape = sum(num_rows), tuple(getattr(weight, "shape", ()))
    if len(shape) == 2 and shape[0] != n_rows:
        want = f"weight must be (R, D) with R = {n_rows}, the sum of num_rows"
        raise ValueError(f"{name}: {want}, got shape {shape}")
    host.check_tensors(name, "embedding_hash_eager", weight=(weight, "R D"))


def _check_update(name, weight, update, sparse):
    """Raise an error unless the backward pass can take this step."""
    if not isinstance(update, Update):
        wrong = f"update must be an Update, got {type(update).__name__}"
        raise TypeError(f"{name}: {wrong}; use Update(lr=0.01)")
    for label in ("lr", "eps"):
        if not isinstance(number := getattr(update, label), (int, float)):
            raise TypeError(f"{name}: update.{label} must be a Python number, got {number!r}")
    if sparse:
        raise ValueError(f"{name}: with update there is no gradient; use sparse=False")
    if not weight.is_leaf or type(weight) not in host.PLAIN or weight.is_neg():
        use = "pass the parameter itself, or leave out update"
        raise ValueError(f"{name}: update writes into weight, which is computed from others; {use}")
    if host.overlaps_itself(host.steps_of(weight)):
        got = (
            f"weight has strides {weight.stride()}, and update needs memory of its own for each row"
        )
        raise ValueError(f"{name}: {got}; pass a contiguous copy")
    if (state := update.state) is None:
        return
    want = weight.shape[:1], host.sum_dtype(weight.dtype), weight.device, True
    is_tensor = isinstance(state, torch.Tensor)
    if not is_tensor or (state.shape, state.dtype, state.device, state.is_contiguous()) != want:
        make = f"torch.zeros({len(weight)}, dtype={want[1]}, device={str(weight.device)!r})"
        raise ValueError(f"{name}: update.state must be a number for each row; use {make}")


@torch.compiler.disable(
    reason="torch.compile knows no backward pass that changes weight; leave out update"
)
def _with_update(ids, weight, num_rows, sparse, deterministic, plan, update):
    _check_update("embedding_hash_triton", weight, update, sparse)
    how = num_rows, sparse, deterministic, plan, update
    return _EmbeddingHash.apply(host.in_memory(ids), weight, *how)


@torch.compiler.disable(reason="torch.compile has no sparse gradients; use sparse=False")
def _between_graphs(ids, weight, *how):
    return _EmbeddingHash.apply(host.in_memory(ids), host.in_memory(weight), *how)


def embedding_hash_triton(
    ids: torch.Tensor, weight: torch.Tensor, num_rows: Sequence[int], *, sparse: bool = False,
    deterministic: bool = True, plan: Plan | None = None, update: Update | None = None,
) -> torch.Tensor:  # fmt: skip
    """The rows of all tables for the tokens of a batch in one Triton kernel, with a gradient for weight.

    ids: (B, T) int64 or int32; weight: (R, D), the tables one below the other, both with any strides, on one
    device; num_rows: a tuple of T ints, R their sum. Returns (B, T, D), contiguous, in the dtype of weight.
    sparse: a sparse gradient, for optimizers that take one (SGD, Adagrad, SparseAdam); with one, torch.compile
    breaks the graph here.
    deterministic: a dense gradient of the same bits in every run; False: by atomic additions.
    plan: a Plan in place of the one chosen, for tuning; torch.compile leaves it out.
    update: an Update, the step that each backward pass takes with weight, a leaf, which then gets no gradient.
    Two lookups of one weight take two steps. torch.compile breaks the graph here; a CUDA graph keeps its lr.
    Works under torch.compile (as the op fused_kernels::embedding_hash), autocast, checkpointing and CUDA graphs
    (a call before the capture has to have had the same num_rows); not under torch.func, torch.vmap or
    forward-mode AD, nor twice differentiable: these raise.
    Raises TypeError for a wrong dtype, ValueError for a wrong shape, device or num_rows.
    """
    name = "embedding_hash_triton"
    if isinstance(num_rows, list) and _are_sizes(num_rows):
        num_rows = tuple(num_rows)  # a list is not remembered
    goes_by_op = _check(name, ids, weight, num_rows)
    how = num_rows, sparse, deterministic, plan, update
    if update is not None and not host.is_compiling():
        _check_update(name, weight, update, sparse)
    if goes_by_op:
        if torch.is_grad_enabled() and weight.requires_grad and (sparse or update is not None):
            return (_between_graphs if update is None else _with_update)(ids, weight, *how)
        return embedding_hash_op(ids, weight, num_rows, deterministic)
    return host.call(name, "embedding_hash_eager", _EmbeddingHash, _forward, (ids, weight), *how)


@host.custom_op("fused_kernels::embedding_hash")
def embedding_hash_op(
    ids: torch.Tensor, weight: torch.Tensor, num_rows: Sequence[int], deterministic: bool = True
) -> torch.Tensor:
    """For torch.compile and torch.export: one node of the graph, which nothing looks into."""
    _check("embedding_hash_op", ids, weight, tuple(num_rows))
    return _forward(ids, weight, num_rows)


@host.custom_op("fused_kernels::embedding_hash_backward")
def _embedding_hash_backward_op(
    dy: torch.Tensor, ids: torch.Tensor, num_rows: Sequence[int], deterministic: bool
) -> torch.Tensor:
    return _backward(dy, ids, num_rows, deterministic=deterministic)


def _op_backward(ctx, dy):
    num_rows, _, deterministic, _ = ctx.how
    dweight = _embedding_hash_backward_op(dy, *ctx.saved_tensors, num_rows, deterministic)
    return None, dweight, None, None


embedding_hash_op.register_fake(_empty)
_embedding_hash_backward_op.register_fake(
    lambda dy, ids, num_rows, deterministic: dy.new_empty((sum(num_rows), dy.shape[2]))
)
embedding_hash_op.register_autograd(
    _op_backward,
    setup_context=lambda ctx, inputs, output: _save(ctx, inputs[0], inputs[2], False, inputs[3]),
)


class EmbeddingHash(torch.nn.Module):
    """Tokens (B, T) to embeddings (B, T, D): a table for each column, all of them in one parameter.

    num_rows: the rows of each table. A token is hashed to the row (id + 1) mod the rows of its table.
    """

    def __init__(
        self, num_rows: Sequence[int], embedding_dim: int, sparse: bool = False, deterministic: bool = True,
        device: torch.device | str | None = None, dtype: torch.dtype | None = None,
    ):  # fmt: skip
        super().__init__()
        if not _are_sizes(num_rows):
            _refuse_sizes("EmbeddingHash", num_rows)
        self.num_rows, self.sparse, self.deterministic = tuple(num_rows), sparse, deterministic
        weight = torch.empty(sum(num_rows), embedding_dim, device=device, dtype=dtype)
        self.weight, self.lr, self.eps = torch.nn.Parameter(weight), None, None
        self.register_buffer("state", None)
        self.reset_parameters()

    def step_in_backward(
        self, lr: float, rowwise_adagrad: bool = False, eps: float = 1e-8
    ) -> "EmbeddingHash":
        """From now on each backward pass takes a step of SGD or row-wise Adagrad: no optimizer is needed.

        Call it again for another lr. Adagrad's state, zeros at first, is a buffer, saved with the weight.
        """
        self.lr, self.eps = lr, eps
        if not rowwise_adagrad:
            self.state = None
        elif self.state is None:
            dtype = host.sum_dtype(self.weight.dtype)
            self.state = self.weight.new_zeros(len(self.weight), dtype=dtype)
        return self

    def reset_parameters(self) -> None:
        for table in self.weight.detach().split(self.num_rows):
            torch.nn.init.uniform_(table, -(len(table) ** -0.5), len(table) ** -0.5)
        if self.state is not None:
            self.state.zero_()

    @classmethod
    def from_tables(
        cls, tables: Iterable[torch.nn.Embedding], sparse: bool = False, deterministic: bool = True
    ) -> "EmbeddingHash":
        """With copies of the weights of these tables, frozen if they are."""
        tables = [*tables]
        if any(t.padding_idx is not None or t.max_norm or t.scale_grad_by_freq for t in tables):
            rules = "padding_idx, max_norm and scale_grad_by_freq"
            raise ValueError(f"EmbeddingHash: it knows no {rules}; use such tables as they are")
        if len({table.embedding_dim for table in tables}) != 1:
            dims = [table.embedding_dim for table in tables]
            raise ValueError(f"EmbeddingHash: all tables must have one embedding_dim, got {dims}")
        trained = {table.weight.requires_grad for table in tables}
        if len(trained) == 2:
            use = "freeze all of them or none, or make an EmbeddingHash of each kind"
            raise ValueError(f"EmbeddingHash: some tables are frozen and others trained; {use}")
        weight = torch.cat([table.weight.detach() for table in tables])
        num_rows = [len(table.weight) for table in tables]
        module = cls(num_rows, weight.shape[1], sparse, deterministic, device="meta")
        module.weight = torch.nn.Parameter(weight, requires_grad=trained.pop())
        return module

    def extra_repr(self) -> str:
        n_rows, dim = self.weight.shape
        return f"{len(self.num_rows)} tables, {n_rows} rows, embedding_dim={dim}"

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        update = None if self.lr is None else Update(self.lr, self.state, self.eps)
        how = {"sparse": self.sparse, "deterministic": self.deterministic, "update": update}
        return embedding_hash_triton(ids, self.weight, self.num_rows, **how)
