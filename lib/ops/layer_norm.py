# SPDX-License-Identifier: MIT
# Copyright (c) 2026 The Fused Kernels authors; Fused Kernels 0.1.0, lib/ops/layer_norm.py
"""layer_norm: h = x + residual and y = layer_norm(h) · weight + bias, one pass over memory instead of two.

Shapes    x, residual, h, y: (..., N), N up to 32,768, x and residual with any strides, h and y contiguous;
          weight, bias: (N,). residual, weight and bias may each be None; without residual h is x, which is not
          written again, and y alone is returned.
Dtypes    float32, float16 and bfloat16 (computed in float32), also mixed, h and y then as x + residual is;
          and float64. As in PyTorch, h is rounded to its dtype before its norm is taken.
Traffic   M rows of N elements of s bytes. Forward 4MNs (x, residual, h, y), in PyTorch 5MNs; backward 4MNs
          (dy, dh, h, dx), in PyTorch 8MNs; of more than 12,288 columns fused 5MNs, of more than 16,384, or
          8,185 that begin off 16 bytes, 6MNs.
Norm      y = n · weight + bias, n = (h - mean)·r, r = 1 / √(mean((h - mean)²) + eps) (Ba, Kiros and Hinton,
          Layer Normalization, 2016), in two steps: the row stays in registers between its mean and the squares.
Backward  With g = weight·dy: dx = dh + r·(g - mean(g) - n·mean(g·n)), for x and residual alike; dweight = dy·n
          and dbias = dy, summed over rows. Saves h, and mean and r of each row, 8 bytes beside its Ns.
Copy it   by `make copy OP=layer_norm TO=folder`, or take _host.py and _device.py along. MIT licence.
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
    """How backward is launched: as add_rms_norm's, in tiles and strips of rows, one a program.

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


def layer_norm_eager(
    x: torch.Tensor, residual: torch.Tensor | None = None, weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None, eps: float = 1e-5,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    h = x if residual is None else x + residual
    dtype = host.dtype_of_sum(*[t.dtype for t in (h, weight, bias) if t is not None])
    weight, bias = (t if t is None else t.to(dtype) for t in (weight, bias))  # PyTorch takes one
    y = F.layer_norm(h.to(dtype), h.shape[-1:], weight, bias, eps).to(h.dtype)
    return y if residual is None else (y, h)


@triton.jit
def _affine(
    x, weight_ptr, held, bias_ptr, t: tl.constexpr, cols, place, UNIT: tl.constexpr, V: tl.constexpr,
    FULL: tl.constexpr,
):  # fmt: skip
    # x·weight + bias, which are read when they are needed, from a cache, unless tiles of the weight are held
    mask = device.in_row(t, cols, place, UNIT, V, FULL)
    if t < len(held):
        x *= held[t].to(x.dtype)
    elif weight_ptr is not None:
        x *= tl.load(weight_ptr + (cols - place[1]), mask=mask, other=0.0).to(x.dtype)
    if bias_ptr is not None:
        x += tl.load(bias_ptr + (cols - place[1]), mask=mask, other=0.0).to(x.dtype)
    return x


@triton.jit(do_not_specialize=["n_rows", "eps"])
def _layer_norm_fwd_kernel(
    x_ptr, residual_ptr, weight_ptr, bias_ptr, h_ptr, y_ptr, stats_ptr, n_rows, n_cols, eps,
    stride_xm, stride_xn, stride_rm, stride_rn, COMPUTE: tl.constexpr, UNIT: tl.constexpr, V: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TILES: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    # One program holds BLOCK_M whole rows, in TILES tiles of BLOCK_N columns.
    n_cols, stride_xm = n_cols // UNIT * UNIT, stride_xm // UNIT * UNIT
    stride_rm = stride_rm // UNIT * UNIT
    first, shift = device.first_row(BLOCK_M, n_cols, UNIT, V)
    rows, place = device.held_rows(first, shift, n_rows, n_cols, UNIT, V, BLOCK_M)
    x_rows = x_ptr + device.begin(rows, stride_xm, shift, V)
    start = device.begin(rows, n_cols, shift, V)
    xs = device.load_tiles(x_rows, stride_xn, place, UNIT, V, BLOCK_N, TILES, FULL)
    origin = tl.load(x_rows + shift, mask=place[0], other=0.0)
    if residual_ptr is not None:
        r_rows = residual_ptr + device.begin(rows, stride_rm, shift, V)
        residuals = device.load_tiles(r_rows, stride_rn, place, UNIT, V, BLOCK_N, TILES, FULL)
        origin = origin.to(COMPUTE) + tl.load(r_rows + shift, mask=place[0], other=0.0).to(COMPUTE)
        origin = origin.to(h_ptr.dtype.element_ty)
    # The mean is that of distances from the row's first number. So it is as good as float32 holds it, however
    # far from 0 the row lies, and in a row of equal numbers, be they the largest, it is exactly their value.
    hs, sums, origin = (), tl.zeros((BLOCK_M, BLOCK_N), COMPUTE), origin.to(COMPUTE)
    for t in tl.static_range(TILES):
        cols, h = device.tile_cols(t, BLOCK_N), xs[t]
        if residual_ptr is not None:
            # rounded as it is stored: the norm is that of the h which everybody else sees
            h = (h.to(COMPUTE) + residuals[t].to(COMPUTE)).to(h_ptr.dtype.element_ty)
            device.store_tile(h_ptr + start + cols, h, t, cols, place, UNIT, V, FULL)
        hs = hs + (h,)
        sums += device.own(h.to(COMPUTE) - origin, 0.0, t, cols, place, UNIT, V, FULL)
    mean = origin + tl.sum(sums, axis=1)[:, None] / n_cols
    # Of the row's own columns: what pads it would count as (0 - mean)². And mean(h²) - mean² would cancel.
    squares = tl.zeros((BLOCK_M, BLOCK_N), COMPUTE)
    for t in tl.static_range(TILES):
        cols = device.tile_cols(t, BLOCK_N)
        d = device.own(hs[t].to(COMPUTE) - mean, 0.0, t, cols, place, UNIT, V, FULL)
        squares += d * d
    root = tl.rsqrt(tl.sum(squares, axis=1)[:, None] / n_cols + eps)
    if stats_ptr is not None:
        tl.store(stats_ptr + rows, mean, mask=place[0])
        tl.store(stats_ptr + n_rows + rows, root, mask=place[0])
    for t in tl.static_range(TILES):
        cols, y = device.tile_cols(t, BLOCK_N), (hs[t].to(COMPUTE) - mean) * root
        y = _affine(y, weight_ptr, (), bias_ptr, t, cols, place, UNIT, V, FULL)
        device.store_tile(y_ptr + start + cols, y, t, cols, place, UNIT, V, FULL)


@triton.jit(do_not_specialize=["n_rows"])
def _layer_norm_rows_kernel(
    dy_ptr, h_ptr, stats_ptr, weight_ptr, means_ptr, n_rows, n_cols,
    stride_dym, stride_dyn, stride_hm, stride_hn,
    COMPUTE: tl.constexpr, UNIT: tl.constexpr, V: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    # One program handles a row too long to be held, BLOCK_N columns at a time: mean(g) and mean(g·n)
    n_cols, stride_dym = n_cols // UNIT * UNIT, stride_dym // UNIT * UNIT
    stride_hm = stride_hm // UNIT * UNIT
    first, shift = device.first_row(1, n_cols, UNIT, V)
    row, place = device.held_rows(first, shift, n_rows, n_cols, UNIT, V, 1)
    mean = tl.load(stats_ptr + row, mask=place[0], other=0.0)
    h_row = h_ptr + device.begin(row, stride_hm, shift, V)
    dy_row = dy_ptr + device.begin(row, stride_dym, shift, V)
    plain = tl.zeros((1, BLOCK_N), COMPUTE)
    cross = plain
    for start in tl.range(0, shift + n_cols, BLOCK_N, num_stages=1):
        cols = start + tl.arange(0, BLOCK_N)[None, :]
        h = device.load_tile(h_row + cols * stride_hn, 0, cols, place, UNIT, V, 0)
        g = device.load_tile(dy_row + cols * stride_dyn, 0, cols, place, UNIT, V, 0).to(COMPUTE)
        g = _affine(g, weight_ptr, (), None, 0, cols, place, UNIT, V, 0)
        g = device.own(g, 0.0, 0, cols, place, UNIT, V, 0)
        plain += g
        cross += g * device.own(h.to(COMPUTE) - mean, 0.0, 0, cols, place, UNIT, V, 0)
    row_plain, row_cross = tl.reduce((plain, cross), 1, device.add_both)
    root = tl.load(stats_ptr + n_rows + row, mask=place[0], other=0.0)
    tl.store(means_ptr + row, row_plain[:, None] / n_cols, mask=place[0])
    tl.store(means_ptr + n_rows + row, root * row_cross[:, None] / n_cols, mask=place[0])


@triton.jit(do_not_specialize=["n_rows", "rows_per_program"])
def _layer_norm_bwd_kernel(
    dy_ptr, dh_ptr, h_ptr, stats_ptr, means_ptr, weight_ptr, dx_ptr, partial_ptr, n_rows, n_cols,
    stride_dym, stride_dyn, stride_dhm, stride_dhn, stride_hm, stride_hn, rows_per_program,
    DWEIGHT: tl.constexpr, DBIAS: tl.constexpr, LATE: tl.constexpr, NUM_STAGES: tl.constexpr,
    COMPUTE: tl.constexpr, UNIT: tl.constexpr, V: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TILES: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    # One program handles rows_per_program whole rows, BLOCK_M at a time, held as forward, and adds up on the
    # way: its row of partial, (programs, sums, n_cols), is its share of dweight and of dbias. dh is read when
    # it is needed, and so is weight if LATE: the next rows of all are copied to shared memory meanwhile.
    # Of rows too long to be held, whose means are there, it handles BLOCK_N columns.
    APART: tl.constexpr = V if V > UNIT else 1
    n_cols, stride_dym = n_cols // UNIT * UNIT, stride_dym // UNIT * UNIT
    stride_dhm, stride_hm = stride_dhm // UNIT * UNIT, stride_hm // UNIT * UNIT
    first, shift = device.first_row(rows_per_program, n_cols, UNIT, V)
    # Columns count from the program's first, before which `skipped` lie; its rows begin at column `left`
    skipped = 0 if means_ptr is None else tl.program_id(1) * BLOCK_N
    left = shift - skipped
    _, columns = device.held_rows(first, left, n_rows, n_cols, UNIT, V, BLOCK_M)
    dweights, weights = (), ()
    for t in tl.static_range(TILES):
        dweights = dweights + (tl.zeros((BLOCK_M, BLOCK_N), COMPUTE),)
        if weight_ptr is not None and not LATE:
            cols = device.tile_cols(t, BLOCK_N)
            mask = device.in_row(t, cols, columns, UNIT, V, FULL)
            weights = weights + (tl.load(weight_ptr + (cols - left), mask=mask, other=0.0),)
    dbiases = dweights
    for step in tl.range(0, rows_per_program, BLOCK_M, num_stages=NUM_STAGES):
        row = first + APART * step
        rows, place = device.held_rows(row, left, n_rows, n_cols, UNIT, V, BLOCK_M)
        mean = tl.load(stats_ptr + rows, mask=place[0], other=0.0)
        root = tl.load(stats_ptr + n_rows + rows, mask=place[0], other=0.0)
        h_rows = h_ptr + device.begin(rows, stride_hm, shift, V) + skipped * stride_hn
        dy_rows = dy_ptr + device.begin(rows, stride_dym, shift, V) + skipped * stride_dyn
        hs = device.load_tiles(h_rows, stride_hn, place, UNIT, V, BLOCK_N, TILES, FULL)
        dys = device.load_tiles(dy_rows, stride_dyn, place, UNIT, V, BLOCK_N, TILES, FULL)
        if means_ptr is None:
            plain = tl.zeros((BLOCK_M, BLOCK_N), COMPUTE)
            cross = plain
            for t in tl.static_range(TILES):
                cols, h, g = device.tile_cols(t, BLOCK_N), hs[t], dys[t].to(COMPUTE)
                g = _affine(g, weight_ptr, weights, None, t, cols, columns, UNIT, V, FULL)
                g = device.own(g, 0.0, t, cols, place, UNIT, V, FULL)
                plain += g
                cross += g * device.own(h.to(COMPUTE) - mean, 0.0, t, cols, place, UNIT, V, FULL)
            # both sums of a row in one go, g and g·(h - mean)
            row_plain, row_cross = tl.reduce((plain, cross), 1, device.add_both)
            mean_g, mean_gn = row_plain[:, None] / n_cols, root * row_cross[:, None] / n_cols
        else:
            mean_g = tl.load(means_ptr + rows, mask=place[0], other=0.0)
            mean_gn = tl.load(means_ptr + n_rows + rows, mask=place[0], other=0.0)
        start, dweight_sums, dbias_sums = device.begin(rows, n_cols, shift, V) + skipped, (), ()
        for t in tl.static_range(TILES):
            cols, dy = device.tile_cols(t, BLOCK_N), dys[t].to(COMPUTE)
            normal = (hs[t].to(COMPUTE) - mean) * root
            if dx_ptr is not None:
                g = _affine(dy, weight_ptr, weights, None, t, cols, columns, UNIT, V, FULL)
                dx = root * (g - mean_g - normal * mean_gn)
                if dh_ptr is not None:
                    dh_rows = (
                        dh_ptr + device.begin(rows, stride_dhm, shift, V) + skipped * stride_dhn
                    )
                    dh = device.tile_at(dh_rows, stride_dhn, t, place, UNIT, V, BLOCK_N, FULL)
                    dx += dh.to(COMPUTE)
                device.store_tile(dx_ptr + start + cols, dx, t, cols, place, UNIT, V, FULL)
            dweight_sums = dweight_sums + (dweights[t] + dy * normal if DWEIGHT else dweights[t],)
            dbias_sums = dbias_sums + (dbiases[t] + dy if DBIAS else dbiases[t],)
        dweights, dbiases = dweight_sums, dbias_sums
    if partial_ptr is not None:
        partial_ptr += tl.program_id(0).to(tl.int64) * ((DWEIGHT + DBIAS) * n_cols)
        for t in tl.static_range(TILES):
            cols = device.tile_cols(t, BLOCK_N)
            mask = device.in_row(t, cols, columns, UNIT, V, FULL)
            ptrs = partial_ptr + (cols - left)
            if DWEIGHT:
                tl.store(ptrs, tl.sum(dweights[t], axis=0)[None, :], mask=mask)
            if DBIAS:
                tl.store(ptrs + DWEIGHT * n_cols, tl.sum(dbiases[t], axis=0)[None, :], mask=mask)


# --- plan (the dispatch heuristic) and launch ----------------------------------------------------------------

_WIDEST = 32768  # forward, a row lies in the registers of one program
_LATE_BACKWARD = (
    40  # elements of a row in a thread: with more, no registers are left for the weight
)
_BOTH_SUMS = 48  # and none for a second sum
_LONGEST = 16384  # backward there are three rows and a sum to hold
_LONGEST_SHARED = 8192  # and where pieces are shared, masks


@functools.cache
def _plan(n_cols, itemsize):
    return Plan(host.row_tiles(n_cols, itemsize))


@functools.cache
def _plan_backward(n_cols, itemsize, gpu, held=True):
    """By add_rms_norm's rule, which was measured: eight warps an SM, and the next rows copied ahead."""
    rows, n_sms = host.row_tiles(n_cols, itemsize), host.n_multiprocessors(gpu)
    shares = n_cols % rows.v > 0
    n_held = n_cols + rows.v - 1 if shares else n_cols
    if not held or n_held > (_LONGEST_SHARED if shares else _LONGEST):
        strips = max(1, 4096 * n_sms // n_cols)
        return Backward(host.RowTiles(4, 512, 1, 4, rows.v), strips, held=False)
    if rows.block_n < 32:
        return Backward(rows._replace(block_m=64 // rows.block_n, num_warps=1), 32 * n_sms)
    if rows.block_n < 128:
        few = rows._replace(block_m=256 // rows.block_n, num_warps=2)
        return Backward(few, 4 * n_sms, 3)
    num_warps = min(8, host.power_of_2(host.cdiv(n_held, 1024 if shares else 1280)))
    block_n = 4096 if n_held > 10240 else num_warps * (128 if num_warps <= 2 else 256)
    tiles = host.RowTiles(1, block_n, host.cdiv(n_held, block_n), num_warps, rows.v)
    n_programs, n_tensors = 8 // num_warps, 4 if tiles.per_thread > _LATE_BACKWARD else 3
    copied = n_programs * n_tensors * tiles.tiles * block_n * itemsize
    num_stages = min(3, 1 + (host.shared_memory(gpu) - 4096) // copied)
    return Backward(tiles, n_programs * n_sms, num_stages)


def _launch(plan, x, residual, weight, bias, h, y, stats, eps):
    grid, constants = host.grid_of_rows(plan.rows, x, residual)
    host.run(
        _layer_norm_fwd_kernel, grid, (x, residual, weight, bias, h, y, stats), *x.shape, eps,
        *x.stride(), *((0, 0) if residual is None else residual.stride()),
        COMPUTE=host.compute_dtype(x.dtype), num_warps=plan.rows.num_warps, **constants,
    )  # fmt: skip


def _launch_backward(plan, dy, dh, h, stats, weight, dx, summed):
    """Write dx unless it is None. Returns the gradients of those of weight and bias that are in `summed`."""
    (n_rows, n_cols), dtypes = h.shape, [t.dtype for t in summed if t is not None]
    plan = plan and plan.backward or _plan_backward(n_cols, h.itemsize, h.device)
    if plan.held and len(dtypes) == 2 and plan.rows.per_thread > _BOTH_SUMS:
        alone = _plan_backward(n_cols, h.itemsize, h.device, False)._replace(num_stages=3)
        of_weight = dy, dh, h, stats, weight, dx, (summed[0], None)
        of_bias = dy, None, h, stats, None, None, (None, summed[1])
        given = (plan, of_weight), (alone, of_bias)
        return [row for how, rest in given for row in _launch_backward(Plan(None, how), *rest)]
    constants, apart = host.constants_of_rows(plan.rows, dy, dh, h)
    rows_per_program, *grid, _ = host.strips_of(h, 1, plan.rows.block_m, plan.strips, None, apart)
    partial, means, compute = None, None, host.compute_dtype(h.dtype)
    if dtypes:  # those of dweight and dbias side by side, for one launch that adds up both
        dtype = host.dtype_of_sum(*dtypes)
        wide = dtype if grid == [1] else host.sum_dtype(h.dtype)
        partial = h.new_empty((*grid, len(dtypes) * n_cols), dtype=wide)
    if not plan.held:
        means = torch.empty_like(stats)
        if dx is not None:
            host.run(
                _layer_norm_rows_kernel, (host.cdiv(n_rows, apart) * apart,),
                (dy, h, stats, weight, means), n_rows, n_cols, *dy.stride(), *h.stride(),
                COMPUTE=compute, UNIT=constants["UNIT"], V=constants["V"], BLOCK_N=2048, num_warps=4,
            )  # fmt: skip
        grid += [host.cdiv(n_cols + apart - 1, plan.rows.block_n)]
        constants = constants | {"TILES": 1, "FULL": 0}
    host.run(
        _layer_norm_bwd_kernel, tuple(grid), (dy, dh, h, stats, means, weight, dx, partial),
        n_rows, n_cols, *dy.stride(), *((0, 0) if dh is None else dh.stride()), *h.stride(),
        rows_per_program, DWEIGHT=summed[0] is not None, DBIAS=summed[1] is not None,
        LATE=plan.rows.per_thread > _LATE_BACKWARD, NUM_STAGES=plan.num_stages, COMPUTE=compute,
        num_warps=plan.rows.num_warps, **constants,
    )  # fmt: skip
    return host.sum_rows(partial, dtype).view(-1, n_cols) if dtypes else ()


# --- forward and backward ------------------------------------------------------------------------------------


def _empty(x, residual=None, weight=None, bias=None, eps=1e-5, has_stats=True):
    """y, h, of no elements where it is x, and stats, mean and root of each row, before they are written."""
    dtype = x.dtype if residual is None else host.dtype_of_sum(x.dtype, residual.dtype)
    y = torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)
    h = x.new_empty(0) if residual is None else torch.empty_like(y)
    stats = (2, *x.shape[:-1]) if has_stats else None
    return y, h, stats and x.new_empty(stats, dtype=host.sum_dtype(dtype))


def _forward(x, residual, weight, bias, eps, plan=None, has_stats=False):
    y, h, stats = _empty(x, residual, has_stats=has_stats)
    if y.numel() > 0:
        plan = plan or _plan(x.shape[-1], y.itemsize)
        columns = [t if t is None else t.contiguous() for t in (weight, bias)]
        out = None if residual is None else host.rows_of(h), host.rows_of(y), stats
        _launch(plan, host.rows_of(x), host.rows_of(residual), *columns, *out, eps)
    return y, h, stats


def _save(ctx, x, residual, weight, bias, eps, h, stats, plan=None):
    ctx.plan = plan
    ctx.save_for_backward(x if residual is None else h, stats, weight, bias)


def _backward(dy, dh, h, stats, weight, bias, needs_grad=(True, True, True), plan=None):
    """The gradient of h, which is that of x and of residual, dweight and dbias; each None unless needed."""
    has_dx, *needs_sums = needs_grad
    dy = torch.zeros_like(h) if dy is None else dy  # of y, or of h, nobody may have asked
    dx = torch.empty_like(h, memory_format=torch.contiguous_format) if has_dx else None
    summed = [t if needed else None for t, needed in zip((weight, bias), needs_sums)]
    if h.numel() == 0:
        return dx, *[t if t is None else torch.zeros_like(t) for t in summed]
    weight = weight if weight is None else weight.contiguous()
    # y.sum().backward() sends a dy of strides 0, which is read as it is
    dy, dh, h, out = host.rows_of(dy), host.rows_of(dh), host.rows_of(h), host.rows_of(dx)
    sums = list(_launch_backward(plan, dy, dh, h, stats, weight, out, summed))
    # copied, but for one: no two gradients share memory
    return dx, *[t if t is None else sums.pop(0).to(t.dtype, copy=bool(sums)) for t in summed]


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, residual, weight, bias, eps, plan):
        y, h, stats = _forward(x, residual, weight, bias, eps, plan, True)
        _save(ctx, x, residual, weight, bias, eps, h, stats, plan)
        ctx.set_materialize_grads(False)  # after the last norm of a model nobody asks for h
        return y, h, None

    @staticmethod
    @host.once
    def backward(ctx, dy, dh, _):
        of_x, of_r, *of_sums = ctx.needs_input_grad[:4]
        dx, *sums = _backward(dy, dh, *ctx.saved_tensors, (of_x or of_r, *of_sums), ctx.plan)
        return dx if of_x else None, dx if of_r else None, *sums, None, None


# --- the calls -----------------------------------------------------------------------------------------------


@host.remembered
def _check(name, x, residual, weight, bias, eps):
    if isinstance(eps, bool) or not isinstance(eps, host.NUMBERS) or not eps >= 0:
        raise ValueError(f"{name}: eps must be a number, 0 or more, got {eps!r}")
    if (shape := tuple(getattr(x, "shape", ()))) and shape[-1] > _WIDEST:
        at_most = f"rows of at most {_WIDEST} elements fit into registers"
        raise ValueError(f"{name}: {at_most}, got {shape[-1]}; use layer_norm_eager")
    if residual is not None:
        host.check_same_shape(name, "residual", residual, x)
    sizes = {"residual": (residual, "... N"), "weight": (weight, "N"), "bias": (bias, "N")}
    given = {label: (t, letters) for label, (t, letters) in sizes.items() if t is not None}
    host.check_tensors(name, "layer_norm_eager", host.MIXED, x=(x, "... N"), **given)


def layer_norm_triton(
    x: torch.Tensor, residual: torch.Tensor | None = None, weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None, eps: float = 1e-5, *, plan: Plan | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """(layer_norm(h) · weight + bias, h) with h = x + residual in one Triton kernel, with all gradients.

    x, residual: (..., N), any strides, N up to 32,768; weight, bias: (N,) or None, all on one device. eps:
    added to the variance. The order is that of F.layer_norm(x, shape, weight, bias, eps), with residual in the
    place of the shape. Returns y and h of x's shape, contiguous, in the dtype of x + residual (weight and bias
    may have others); with residual=None, where h is x, y alone, as F.layer_norm.
    plan: a Plan in place of the one chosen, for tuning; torch.compile leaves it out.
    Works under torch.compile (as the op fused_kernels::layer_norm), autocast, checkpointing and CUDA graphs;
    not under torch.func, torch.vmap or forward-mode AD, nor twice differentiable: these raise.
    Raises TypeError for a wrong dtype, ValueError for a wrong shape, device or eps.
    """
    tensors, name = (x, residual, weight, bias), "layer_norm_triton"
    if _check(name, *tensors, eps):  # it goes by the op
        y, h, _ = layer_norm_op(*tensors, eps)
    else:
        y, h, _ = host.call(name, "layer_norm_eager", _LayerNorm, _forward, tensors, eps, plan)
    return y if residual is None else (y, h)


@host.custom_op("fused_kernels::layer_norm")
def layer_norm_op(
    x: torch.Tensor, residual: torch.Tensor | None = None, weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None, eps: float = 1e-5,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """For torch.compile and torch.export: one node of the graph, which nothing looks into.

    Without residual the second result is empty; the third, mean and root of each row, is for backward alone.
    """
    _check("layer_norm_op", x, residual, weight, bias, eps)
    return _forward(x, residual, weight, bias, eps, has_stats=True)


@host.custom_op("fused_kernels::layer_norm_backward")
def _layer_norm_backward_op(
    dy: torch.Tensor | None, dh: torch.Tensor | None, h: torch.Tensor, stats: torch.Tensor,
    weight: torch.Tensor | None, bias: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    return host.none_as_empty(h, _backward(dy, dh, h, stats, weight, bias))


def _op_backward(ctx, dy, dh, _):
    dx, *sums = _layer_norm_backward_op(dy, dh if ctx.has[0] else None, *ctx.saved_tensors)
    return dx, *[t if has else None for t, has in zip((dx, *sums), ctx.has)], None


def _setup_context(ctx, inputs, output):
    ctx.has = [t is not None for t in inputs[1:4]]
    _save(ctx, *inputs, *output[1:])


def _empty_grads(dy, dh, h, stats, weight, bias):
    sums = [t if t is None else torch.empty_like(t) for t in (weight, bias)]
    return host.none_as_empty(h, (h.new_empty(h.shape), *sums))


layer_norm_op.register_fake(_empty)
_layer_norm_backward_op.register_fake(_empty_grads)
layer_norm_op.register_autograd(_op_backward, setup_context=_setup_context)


class AddLayerNorm(torch.nn.LayerNorm):
    """torch.nn.LayerNorm over one dimension, of x + residual: forward(x, residual) gives y and the sum h.

    forward(x) gives y alone, as torch.nn.LayerNorm does, whose arguments and parameters it has.
    """

    def __init__(
        self, features: int, eps: float = 1e-5, elementwise_affine: bool = True, bias: bool = True,
        device: torch.device | str | None = None, dtype: torch.dtype | None = None,
    ):  # fmt: skip
        super().__init__(features, eps, elementwise_affine, bias, device, dtype)
        if len(self.normalized_shape) != 1:
            several = f"the norm is over the last dimension, got {self.normalized_shape}"
            raise ValueError(f"AddLayerNorm: {several}; flatten these, or use torch.nn.LayerNorm")

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        if tuple(x.shape[-1:]) != self.normalized_shape:
            want, got = self.normalized_shape[0], tuple(x.shape)
            raise ValueError(f"AddLayerNorm: x must be (..., {want}), got shape {got}")
        return layer_norm_triton(x, residual, self.weight, self.bias, self.eps)
