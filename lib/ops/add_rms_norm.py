# SPDX-License-Identifier: MIT
# Copyright (c) 2026 The Fused Kernels authors; Fused Kernels 0.1.0, lib/ops/add_rms_norm.py
"""add_rms_norm: h = x + residual and y = rms_norm(h) · weight, one pass over memory instead of two.

Shapes    x, residual, h, y: (..., N), N up to 32,768, x and residual with any strides, h and y contiguous;
          weight: (N,). Without residual h is x, which is not written again, and y alone is returned.
Dtypes    float32, float16 and bfloat16 (computed in float32), also mixed, h and y then as x + residual is;
          and float64. As in PyTorch, h is rounded to its dtype before its norm is taken.
Traffic   M rows of N elements of s bytes. Forward 4MNs (x, residual, h, y), in PyTorch 5MNs; backward 4MNs
          (dy, dh, h, dx), in PyTorch 6MNs; of more than 16,384 columns, or 12,288 that begin off 16 bytes,
          fused 6MNs too.
Norm      y = h · r · weight, r = 1 / √(mean(h²) + eps) (Zhang and Sennrich, Root Mean Square Layer
          Normalization, 2019). plus_one: by 1 + weight, added in float32: in bfloat16 it would be rounded.
Backward  With n = h·r and g = weight·dy: dx = dh + r·(g - n · mean(g·n)), for x and residual alike;
          dweight = dy·n summed over rows. Saves h and weight only: r is computed again from its row.
Copy it   by `make copy OP=add_rms_norm TO=folder`, or take _host.py and _device.py along. MIT licence.
"""

import functools
from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

if __package__:  # shared by the ops: `device` in kernels, `host` around them
    from . import _device as device
    from . import _host as host
else:  # the same, in a plain folder
    import _device as device
    import _host as host


class Backward(NamedTuple):
    """How backward is launched: its tiles, and in how many strips of rows, one a program.

    held: whole rows lie in the registers of a program; else they are read twice, a tile at a time.
    """

    rows: host.RowTiles
    strips: int
    num_stages: int = 1
    held: bool = True


class Plan(NamedTuple):
    """How one call is launched: how forward holds rows. backward: None to have it chosen."""

    rows: host.RowTiles
    backward: Backward | None = None


def add_rms_norm_eager(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float = 1e-6,
    plus_one: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    h = x if residual is None else x + residual
    factor = 1 + weight.to(host.sum_dtype(weight.dtype)) if plus_one else weight
    y = F.rms_norm(h, weight.shape, factor, eps)
    return y if residual is None else (y, h)


@triton.jit
def _weight(
    weight_ptr, t: tl.constexpr, cols, place, UNIT: tl.constexpr, V: tl.constexpr, FULL: tl.constexpr
):  # fmt: skip
    mask = device.in_row(t, cols, place, UNIT, V, FULL)
    return tl.load(weight_ptr + (cols - place[1]), mask=mask, other=0.0)


@triton.jit
def _factor(weight, PLUS_ONE: tl.constexpr, COMPUTE: tl.constexpr):
    return weight.to(COMPUTE) + 1.0 if PLUS_ONE else weight.to(COMPUTE)


@triton.jit(do_not_specialize=["n_rows", "eps"])
def _add_rms_norm_fwd_kernel(
    x_ptr, residual_ptr, weight_ptr, h_ptr, y_ptr, n_rows, n_cols, eps,
    stride_xm, stride_xn, stride_rm, stride_rn, PLUS_ONE: tl.constexpr, LATE: tl.constexpr,
    COMPUTE: tl.constexpr, UNIT: tl.constexpr, V: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TILES: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    # One program holds BLOCK_M whole rows, in TILES tiles of BLOCK_N columns. LATE: weight is read when it is
    # needed, as there are no registers for it.
    n_cols, stride_xm = n_cols // UNIT * UNIT, stride_xm // UNIT * UNIT
    stride_rm = stride_rm // UNIT * UNIT
    first, shift = device.first_row(BLOCK_M, n_cols, UNIT, V)
    rows, place = device.held_rows(first, shift, n_rows, n_cols, UNIT, V, BLOCK_M)
    x_rows = x_ptr + device.begin(rows, stride_xm, shift, V)
    start = device.begin(rows, n_cols, shift, V)
    xs = device.load_tiles(x_rows, stride_xn, place, UNIT, V, BLOCK_N, TILES, FULL)
    if residual_ptr is not None:
        r_rows = residual_ptr + device.begin(rows, stride_rm, shift, V)
        residuals = device.load_tiles(r_rows, stride_rn, place, UNIT, V, BLOCK_N, TILES, FULL)
    weights, hs = (), ()
    if not LATE:
        for t in tl.static_range(TILES):
            cols = device.tile_cols(t, BLOCK_N)
            weights = weights + (_weight(weight_ptr, t, cols, place, UNIT, V, FULL),)

    squares = tl.zeros((BLOCK_M, BLOCK_N), COMPUTE)
    for t in tl.static_range(TILES):
        cols, h = device.tile_cols(t, BLOCK_N), xs[t]
        if residual_ptr is not None:
            # rounded as it is stored: the norm is that of the h which everybody else sees
            h = (h.to(COMPUTE) + residuals[t].to(COMPUTE)).to(h_ptr.dtype.element_ty)
            device.store_tile(h_ptr + start + cols, h, t, cols, place, UNIT, V, FULL)
        hs = hs + (h,)
        h = device.own(h.to(COMPUTE), 0.0, t, cols, place, UNIT, V, FULL)
        squares += h * h
    root = tl.rsqrt(tl.sum(squares, axis=1)[:, None] / n_cols + eps)
    for t in tl.static_range(TILES):
        cols = device.tile_cols(t, BLOCK_N)
        weight = _weight(weight_ptr, t, cols, place, UNIT, V, FULL) if LATE else weights[t]
        y = hs[t].to(COMPUTE) * root * _factor(weight, PLUS_ONE, COMPUTE)
        device.store_tile(y_ptr + start + cols, y, t, cols, place, UNIT, V, FULL)


@triton.jit
def _dx(dy, dh, h, factor, root, mean, place, NO_EPS: tl.constexpr, COMPUTE: tl.constexpr):
    # What h's tile has to do with y: its gradient, and normal·dy, a row of which is added to dweight
    dy, normal = dy.to(COMPUTE), h.to(COMPUTE) * root
    if NO_EPS:
        normal = tl.where(place[0], normal, 0.0)  # of a row that is not there 0·inf
    dx = root * (dy * factor - normal * mean)
    if dh is not None:
        dx += dh.to(COMPUTE)
    return dx, dy * normal


@triton.jit(do_not_specialize=["n_rows", "eps", "rows_per_program"])
def _add_rms_norm_bwd_kernel(
    dy_ptr, dh_ptr, h_ptr, weight_ptr, dx_ptr, partial_ptr, n_rows, n_cols, eps,
    stride_dym, stride_dyn, stride_dhm, stride_dhn, stride_hm, stride_hn, rows_per_program,
    PLUS_ONE: tl.constexpr, NO_EPS: tl.constexpr, LATE: tl.constexpr, NUM_STAGES: tl.constexpr,
    COMPUTE: tl.constexpr, UNIT: tl.constexpr, V: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TILES: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    # One program handles rows_per_program whole rows, BLOCK_M at a time, held as forward, and adds up on the
    # way: its row of partial, (programs, n_cols), is its share of dweight. dh is read when it is needed, and so
    # is weight if LATE: the next rows of all three are copied to shared memory meanwhile.
    APART: tl.constexpr = V if V > UNIT else 1
    n_cols, stride_dym = n_cols // UNIT * UNIT, stride_dym // UNIT * UNIT
    stride_dhm, stride_hm = stride_dhm // UNIT * UNIT, stride_hm // UNIT * UNIT
    first, shift = device.first_row(rows_per_program, n_cols, UNIT, V)
    _, columns = device.held_rows(first, shift, n_rows, n_cols, UNIT, V, BLOCK_M)
    totals, weights = (), ()
    for t in tl.static_range(TILES):
        totals = totals + (tl.zeros((BLOCK_M, BLOCK_N), COMPUTE),)
        if not LATE:
            cols = device.tile_cols(t, BLOCK_N)
            weights = weights + (_weight(weight_ptr, t, cols, columns, UNIT, V, FULL),)
    for step in tl.range(0, rows_per_program, BLOCK_M, num_stages=NUM_STAGES):
        row = first + APART * step
        rows, place = device.held_rows(row, shift, n_rows, n_cols, UNIT, V, BLOCK_M)
        h_rows = h_ptr + device.begin(rows, stride_hm, shift, V)
        dy_rows = dy_ptr + device.begin(rows, stride_dym, shift, V)
        hs = device.load_tiles(h_rows, stride_hn, place, UNIT, V, BLOCK_N, TILES, FULL)
        dys = device.load_tiles(dy_rows, stride_dyn, place, UNIT, V, BLOCK_N, TILES, FULL)
        squares = tl.zeros((BLOCK_M, BLOCK_N), COMPUTE)
        cross = squares
        for t in tl.static_range(TILES):
            cols = device.tile_cols(t, BLOCK_N)
            weight = _weight(weight_ptr, t, cols, columns, UNIT, V, FULL) if LATE else weights[t]
            h = device.own(hs[t].to(COMPUTE), 0.0, t, cols, place, UNIT, V, FULL)
            dy = device.own(dys[t].to(COMPUTE), 0.0, t, cols, place, UNIT, V, FULL)
            squares += h * h
            cross += dy * _factor(weight, PLUS_ONE, COMPUTE) * h
        # both sums of a row in one go, h² and g·h; mean(g·n) is root·mean(g·h)
        row_squares, row_cross = tl.reduce((squares, cross), 1, device.add_both)
        root = tl.rsqrt(row_squares / n_cols + eps)[:, None]
        mean = root * row_cross[:, None] / n_cols
        start, sums = device.begin(rows, n_cols, shift, V), ()
        for t in tl.static_range(TILES):
            cols, dh = device.tile_cols(t, BLOCK_N), None
            if dh_ptr is not None:
                dh_rows = dh_ptr + device.begin(rows, stride_dhm, shift, V)
                dh = device.tile_at(dh_rows, stride_dhn, t, place, UNIT, V, BLOCK_N, FULL)
            weight = _weight(weight_ptr, t, cols, columns, UNIT, V, FULL) if LATE else weights[t]
            factor = _factor(weight, PLUS_ONE, COMPUTE)
            dx, share = _dx(dys[t], dh, hs[t], factor, root, mean, place, NO_EPS, COMPUTE)
            if dx_ptr is not None:
                device.store_tile(dx_ptr + start + cols, dx, t, cols, place, UNIT, V, FULL)
            sums = sums + (totals[t] + share if partial_ptr is not None else totals[t],)
        totals = sums
    if partial_ptr is not None:
        partial_ptr += tl.program_id(0).to(tl.int64) * n_cols
        for t in tl.static_range(TILES):
            cols, total = device.tile_cols(t, BLOCK_N), tl.sum(totals[t], axis=0)[None, :]
            mask = device.in_row(t, cols, columns, UNIT, V, FULL)
            tl.store(partial_ptr + (cols - shift), total, mask=mask)


# Rows too long to be held: one kernel for what dx needs of its whole row, one for columns. Copied ahead, as
# above, tiles come more slowly here.


@triton.jit(do_not_specialize=["n_rows", "eps"])
def _add_rms_norm_rows_kernel(
    dy_ptr, h_ptr, weight_ptr, roots_ptr, means_ptr, n_rows, n_cols, eps,
    stride_dym, stride_dyn, stride_hm, stride_hn, PLUS_ONE: tl.constexpr, COMPUTE: tl.constexpr,
    UNIT: tl.constexpr, V: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    # One program handles a row, BLOCK_N columns at a time: 1/√(mean(h²) + eps) and mean(g·n)
    n_cols, stride_dym = n_cols // UNIT * UNIT, stride_dym // UNIT * UNIT
    stride_hm = stride_hm // UNIT * UNIT
    first, shift = device.first_row(1, n_cols, UNIT, V)
    row, place = device.held_rows(first, shift, n_rows, n_cols, UNIT, V, 1)
    h_row = h_ptr + device.begin(row, stride_hm, shift, V)
    dy_row = dy_ptr + device.begin(row, stride_dym, shift, V)
    squares = tl.zeros((1, BLOCK_N), COMPUTE)
    cross = squares
    for start in tl.range(0, shift + n_cols, BLOCK_N, num_stages=1):
        cols = start + tl.arange(0, BLOCK_N)[None, :]
        h = device.load_tile(h_row + cols * stride_hn, 0, cols, place, UNIT, V, 0)
        dy = device.load_tile(dy_row + cols * stride_dyn, 0, cols, place, UNIT, V, 0)
        h = device.own(h.to(COMPUTE), 0.0, 0, cols, place, UNIT, V, 0)
        dy = device.own(dy.to(COMPUTE), 0.0, 0, cols, place, UNIT, V, 0)
        weight = _weight(weight_ptr, 0, cols, place, UNIT, V, 0)
        squares += h * h
        cross += dy * _factor(weight, PLUS_ONE, COMPUTE) * h
    row_squares, row_cross = tl.reduce((squares, cross), 1, device.add_both)
    root = tl.rsqrt(row_squares / n_cols + eps)[:, None]
    tl.store(roots_ptr + row, root, mask=place[0])
    tl.store(means_ptr + row, root * row_cross[:, None] / n_cols, mask=place[0])


@triton.jit(do_not_specialize=["n_rows", "rows_per_program"])
def _add_rms_norm_columns_kernel(
    dy_ptr, dh_ptr, h_ptr, weight_ptr, roots_ptr, means_ptr, dx_ptr, partial_ptr, n_rows, n_cols,
    stride_dym, stride_dyn, stride_dhm, stride_dhn, stride_hm, stride_hn, rows_per_program,
    PLUS_ONE: tl.constexpr, NO_EPS: tl.constexpr,
    COMPUTE: tl.constexpr, UNIT: tl.constexpr, V: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    # One program handles BLOCK_N columns of rows_per_program rows, BLOCK_M at a time, and adds up on the way
    APART: tl.constexpr = V if V > UNIT else 1
    n_cols, stride_dym = n_cols // UNIT * UNIT, stride_dym // UNIT * UNIT
    stride_dhm, stride_hm = stride_dhm // UNIT * UNIT, stride_hm // UNIT * UNIT
    first, shift = device.first_row(rows_per_program, n_cols, UNIT, V)
    _, columns = device.held_rows(first, shift, n_rows, n_cols, UNIT, V, BLOCK_M)
    cols = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    factor = _factor(_weight(weight_ptr, 0, cols, columns, UNIT, V, 0), PLUS_ONE, COMPUTE)
    total = tl.zeros((BLOCK_M, BLOCK_N), COMPUTE)
    for step in tl.range(0, rows_per_program, BLOCK_M, num_stages=1):
        row = first + APART * step
        rows, place = device.held_rows(row, shift, n_rows, n_cols, UNIT, V, BLOCK_M)
        root = tl.load(roots_ptr + rows, mask=place[0], other=0.0)
        mean, dh = tl.load(means_ptr + rows, mask=place[0], other=0.0), None
        h_ptrs = h_ptr + device.begin(rows, stride_hm, shift, V) + cols * stride_hn
        dy_ptrs = dy_ptr + device.begin(rows, stride_dym, shift, V) + cols * stride_dyn
        h = device.load_tile(h_ptrs, 0, cols, place, UNIT, V, 0)
        dy = device.load_tile(dy_ptrs, 0, cols, place, UNIT, V, 0)
        if dh_ptr is not None:
            dh_ptrs = dh_ptr + device.begin(rows, stride_dhm, shift, V) + cols * stride_dhn
            dh = device.load_tile(dh_ptrs, 0, cols, place, UNIT, V, 0)
        dx, share = _dx(dy, dh, h, factor, root, mean, place, NO_EPS, COMPUTE)
        if dx_ptr is not None:
            dx_ptrs = dx_ptr + device.begin(rows, n_cols, shift, V) + cols
            device.store_tile(dx_ptrs, dx, 0, cols, place, UNIT, V, 0)
        total += share
    if partial_ptr is not None:
        partial_ptr += tl.program_id(0).to(tl.int64) * n_cols
        mask = device.in_row(0, cols, columns, UNIT, V, 0)
        tl.store(partial_ptr + (cols - shift), tl.sum(total, axis=0)[None, :], mask=mask)


# --- plan (the dispatch heuristic) and launch ----------------------------------------------------------------

_WIDEST = 32768  # forward, a row lies in the registers of one program
_LEAST_EPS = 2.0**-126  # below it eps is 0 in the kernel, or may be taken for it
_LATE_ABOVE = 24  # elements of a row in a thread: with more, no registers are left for the weight
_LATE_BACKWARD = 48  # the same backward, where warps are fewer
_LONGEST = 16384  # backward there are three rows and a sum to hold
_LONGEST_SHARED = 12288  # and where pieces are shared, masks


@functools.cache
def _plan(n_cols, itemsize):
    return Plan(host.row_tiles(n_cols, itemsize))


@functools.cache
def _plan_backward(n_cols, itemsize, gpu):
    """Eight warps an SM, which find up to 255 registers a thread: for 40 elements of three rows and of a sum.

    Copied ahead are the next two rows, or the next, if there is shared memory for them. The shortest rows are
    held by as many programs as an SM takes.
    """
    rows, n_sms = host.row_tiles(n_cols, itemsize), host.n_multiprocessors(gpu)
    if n_cols > (_LONGEST if n_cols % rows.v == 0 else _LONGEST_SHARED):
        strips = max(1, 4096 * n_sms // n_cols)
        return Backward(host.RowTiles(4, 512, 1, 4, rows.v), strips, held=False)
    if rows.block_n < 32:
        return Backward(rows._replace(block_m=64 // rows.block_n, num_warps=1), 32 * n_sms)
    if rows.block_n < 128:
        few = rows._replace(block_m=256 // rows.block_n, num_warps=2)
        return Backward(few, 4 * n_sms, 3)
    num_warps = min(8, host.power_of_2(host.cdiv(n_cols, 1280)))
    block_n = 4096 if n_cols > 10240 else num_warps * (128 if num_warps <= 2 else 256)
    tiles, n_programs = host.cdiv(n_cols, block_n), 8 // num_warps
    held = host.RowTiles(1, block_n, tiles, num_warps, rows.v)
    n_tiles = tiles if n_cols % rows.v == 0 else host.cdiv(n_cols + rows.v - 1, block_n)
    n_tensors = 4 if held.per_thread > _LATE_BACKWARD else 3
    copied = n_programs * n_tensors * n_tiles * block_n * itemsize
    num_stages = min(3, 1 + (host.shared_memory(gpu) - 4096) // copied)
    return Backward(held, n_programs * n_sms, num_stages)


def _launch(plan, x, residual, weight, h, y, eps, plus_one):
    n_rows, n_cols = x.shape
    residual_strides = (0, 0) if residual is None else residual.stride()
    grid, constants = host.grid_of_rows(plan.rows, x, residual)
    host.run(
        _add_rms_norm_fwd_kernel, grid, (x, residual, weight, h, y), n_rows, n_cols, eps,
        *x.stride(), *residual_strides, PLUS_ONE=plus_one, LATE=plan.rows.per_thread > _LATE_ABOVE,
        COMPUTE=host.compute_dtype(x.dtype), num_warps=plan.rows.num_warps, **constants,
    )  # fmt: skip


def _launch_backward(plan, dy, dh, h, weight, dx, eps, plus_one, dtype):
    """Write dx unless it is None. Returns what each strip of rows adds to dweight, (strips, N), or None.

    dtype: that of dweight, None where it is not needed. Of one strip that is dweight itself, in this dtype.
    """
    n_rows, n_cols = h.shape
    plan = plan and plan.backward or _plan_backward(n_cols, h.itemsize, h.device)
    constants, apart = host.constants_of_rows(plan.rows, dy, dh, h)
    rows_per_program, strips, partial = host.strips_of(
        h, 1, plan.rows.block_m, plan.strips, dtype, apart
    )
    strides = *dy.stride(), *((0, 0) if dh is None else dh.stride()), *h.stride()
    how = {"PLUS_ONE": plus_one, "COMPUTE": host.compute_dtype(h.dtype)}
    no_eps, num_warps = eps < _LEAST_EPS, plan.rows.num_warps
    if plan.held:
        host.run(
            _add_rms_norm_bwd_kernel, (strips,), (dy, dh, h, weight, dx, partial), n_rows, n_cols, eps,
            *strides, rows_per_program, NO_EPS=no_eps, LATE=plan.rows.per_thread > _LATE_BACKWARD,
            NUM_STAGES=plan.num_stages, num_warps=num_warps, **how, **constants,
        )  # fmt: skip
        return partial
    how |= {name: constants[name] for name in ("UNIT", "V")}
    roots = h.new_empty(n_rows, dtype=host.sum_dtype(h.dtype))
    means = torch.empty_like(roots)
    host.run(
        _add_rms_norm_rows_kernel, (host.cdiv(n_rows, apart) * apart,), (dy, h, weight, roots, means),
        n_rows, n_cols, eps, *dy.stride(), *h.stride(), BLOCK_N=2048, num_warps=4, **how,
    )  # fmt: skip
    block_m, block_n = plan.rows.block_m, plan.rows.block_n
    host.run(
        _add_rms_norm_columns_kernel, (strips, host.cdiv(n_cols + apart - 1, block_n)),
        (dy, dh, h, weight, roots, means, dx, partial), n_rows, n_cols, *strides, rows_per_program,
        NO_EPS=no_eps, BLOCK_M=block_m, BLOCK_N=block_n, num_warps=num_warps, **how,
    )  # fmt: skip
    return partial


# --- forward and backward ------------------------------------------------------------------------------------


def _empty(x, residual, weight, eps=1e-6, plus_one=False):
    """y and h, before they are written; without residual h is x, and of no elements here."""
    dtype = x.dtype if residual is None else host.dtype_of_sum(x.dtype, residual.dtype)
    y = torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)
    return y, x.new_empty(0) if residual is None else torch.empty_like(y)


def _forward(x, residual, weight, eps, plus_one=False, plan=None):
    y, h = _empty(x, residual, weight, eps)
    if y.numel() > 0:
        plan = plan or _plan(x.shape[-1], y.itemsize)
        rows = host.rows_of(x), host.rows_of(residual)
        out = None if residual is None else host.rows_of(h), host.rows_of(y)
        _launch(plan, *rows, weight.contiguous(), *out, eps, plus_one)
    return y, h


def _save(ctx, x, residual, weight, eps, plus_one, h, plan=None):
    ctx.eps, ctx.plus_one, ctx.plan = eps, plus_one, plan
    ctx.save_for_backward(x if residual is None else h, weight)


def _backward(dy, dh, h, weight, eps, plus_one=False, needs_grad=(True, True), plan=None):
    """The gradient of h, which is that of x and of residual, and dweight; each None unless needed."""
    has_dx, has_dweight = needs_grad
    dy = torch.zeros_like(h) if dy is None else dy  # of y, or of h, nobody may have asked
    dx = torch.empty_like(h, memory_format=torch.contiguous_format) if has_dx else None
    if h.numel() == 0:
        return dx, torch.zeros_like(weight) if has_dweight else None
    # y.sum().backward() sends a dy of strides 0, which is read as it is
    dy, dh, h, out = host.rows_of(dy), host.rows_of(dh), host.rows_of(h), host.rows_of(dx)
    dtype = weight.dtype if has_dweight else None
    partial = _launch_backward(plan, dy, dh, h, weight.contiguous(), out, eps, plus_one, dtype)
    return dx, host.sum_rows(partial, dtype) if has_dweight else None


class _AddRMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, residual, weight, eps, plus_one, plan):
        y, h = _forward(x, residual, weight, eps, plus_one, plan)
        _save(ctx, x, residual, weight, eps, plus_one, h, plan)
        ctx.set_materialize_grads(False)  # after the last norm of a model nobody asks for h
        return y, h

    @staticmethod
    @host.once
    def backward(ctx, dy, dh):
        h, weight = ctx.saved_tensors
        needs_dx, needs_dresidual, needs_dweight = ctx.needs_input_grad[:3]
        needs = (needs_dx or needs_dresidual, needs_dweight)
        dx, dweight = _backward(dy, dh, h, weight, ctx.eps, ctx.plus_one, needs, ctx.plan)
        return dx if needs_dx else None, dx if needs_dresidual else None, dweight, None, None, None


# --- the calls -----------------------------------------------------------------------------------------------


@host.remembered
def _check(name, x, residual, weight, eps, plus_one):
    if isinstance(eps, bool) or not isinstance(eps, host.NUMBERS) or not eps >= 0:
        raise ValueError(f"{name}: eps must be a number, 0 or more, got {eps!r}")
    if not isinstance(plus_one, bool):
        raise TypeError(f"{name}: plus_one must be True or False, got {plus_one!r}")
    if (shape := tuple(getattr(x, "shape", ()))) and shape[-1] > _WIDEST:
        at_most = f"rows of at most {_WIDEST} elements fit into registers"
        raise ValueError(f"{name}: {at_most}, got {shape[-1]}; use add_rms_norm_eager")
    sizes = {"x": (x, "... N"), "weight": (weight, "N")}
    if residual is not None:
        host.check_same_shape(name, "residual", residual, x)
        sizes = {"x": sizes["x"], "residual": (residual, "... N"), "weight": sizes["weight"]}
    host.check_tensors(name, "add_rms_norm_eager", host.MIXED, **sizes)


def add_rms_norm_triton(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float = 1e-6,
    plus_one: bool = False, *, plan: Plan | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """(rms_norm(h) · weight, h) with h = x + residual in one Triton kernel, with gradients for all three.

    x, residual: (..., N), any strides, N up to 32,768; weight: (N,), all on one device. eps: added to the mean
    of h². plus_one: 1 + weight in place of weight, as Gemma has it. Returns y and h of x's shape, contiguous,
    in the dtype of x + residual (weight may have another); with residual=None, where h is x, y alone, as
    F.rms_norm.
    plan: a Plan in place of the one chosen, for tuning; torch.compile leaves it out.
    Works under torch.compile (as the op fused_kernels::add_rms_norm), autocast, checkpointing and CUDA graphs;
    not under torch.func, torch.vmap or forward-mode AD, nor twice differentiable: these raise.
    Raises TypeError for a wrong dtype, ValueError for a wrong shape, device or eps.
    """
    tensors, name = (x, residual, weight), "add_rms_norm_triton"
    goes_by_op = _check(name, *tensors, eps, plus_one)
    if goes_by_op:
        y, h = add_rms_norm_op(*tensors, eps, plus_one)
    else:
        how = eps, plus_one, plan
        y, h = host.call(name, "add_rms_norm_eager", _AddRMSNorm, _forward, tensors, *how)
    return y if residual is None else (y, h)


@host.custom_op("fused_kernels::add_rms_norm")
def add_rms_norm_op(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float = 1e-6,
    plus_one: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """For torch.compile and torch.export: one node of the graph, which nothing looks into.

    Without residual the second result is empty.
    """
    _check("add_rms_norm_op", x, residual, weight, eps, plus_one)
    return _forward(x, residual, weight, eps, plus_one)


@host.custom_op("fused_kernels::add_rms_norm_backward")
def _add_rms_norm_backward_op(
    dy: torch.Tensor | None, dh: torch.Tensor | None, h: torch.Tensor, weight: torch.Tensor, eps: float,
    plus_one: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    return _backward(dy, dh, h, weight, eps, plus_one)


def _op_backward(ctx, dy, dh):
    h, weight = ctx.saved_tensors
    dh = dh if ctx.has_h else None
    dx, dweight = _add_rms_norm_backward_op(dy, dh, h, weight, ctx.eps, ctx.plus_one)
    return dx, dx if ctx.has_h else None, dweight, None, None


def _setup_context(ctx, inputs, output):
    ctx.has_h = inputs[1] is not None
    _save(ctx, *inputs, output[1])


add_rms_norm_op.register_fake(_empty)
_add_rms_norm_backward_op.register_fake(
    lambda dy, dh, h, weight, eps, plus_one=False: (h.new_empty(h.shape), torch.empty_like(weight))
)
add_rms_norm_op.register_autograd(_op_backward, setup_context=_setup_context)


class AddRMSNorm(torch.nn.RMSNorm):
    """torch.nn.RMSNorm over one dimension, of x + residual: forward(x, residual) gives y and the sum h.

    forward(x) gives y alone, as torch.nn.RMSNorm does. plus_one: by 1 + weight, which begins as 0.
    """

    plus_one = False

    def __init__(
        self, features: int, eps: float = 1e-6,
        device: torch.device | str | None = None, dtype: torch.dtype | None = None, plus_one: bool = False,
    ):  # fmt: skip
        super().__init__(features, eps=eps, device=device, dtype=dtype)
        self.plus_one = plus_one
        self.reset_parameters()

    def reset_parameters(self) -> None:
        torch.nn.init.constant_(self.weight, 0.0 if self.plus_one else 1.0)

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        return add_rms_norm_triton(x, residual, self.weight, self.eps, self.plus_one)

    def extra_repr(self):
        return super().extra_repr() + (", plus_one=True" if self.plus_one else "")
