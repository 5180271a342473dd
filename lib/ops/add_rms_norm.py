# SPDX-License-Identifier: MIT
# Copyright (c) 2026 The Fused Kernels authors; Fused Kernels 0.1.0, lib/ops/add_rms_norm.py
"""add_rms_norm: h = x + residual and y = rms_norm(h) · weight, one pass over memory instead of two.

Shapes    x, residual, h, y: (..., N), N up to 32,768, x and residual with any strides, h and y contiguous;
          weight: (N,). Without residual h is x, which is not written again, and y alone is returned.
Dtypes    float32, float16 and bfloat16 (computed in float32), also mixed, h and y then as x + residual is;
          and float64. As in PyTorch, h is rounded to its dtype before its norm is taken.
Traffic   M rows of N elements of s bytes. Forward 4MNs (x, residual, h, y), in PyTorch 5MNs; backward 4MNs
          (dy, dh, h, dx), in PyTorch 6MNs; rows of more than 8,192 are read again, from a cache.
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


class Plan(NamedTuple):
    """How one call is launched: how forward holds rows.

    backward: (block_m, num_warps, strips), strips of rows, one a program; or None to have it chosen.
    """

    rows: host.RowTiles
    backward: tuple[int, int, int] | None = None


def add_rms_norm_eager(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float = 1e-6,
    plus_one: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    h = x if residual is None else x + residual
    factor = 1 + weight.to(host.sum_dtype(weight.dtype)) if plus_one else weight
    y = F.rms_norm(h, weight.shape, factor, eps)
    return y if residual is None else (y, h)


@triton.jit
def _add_both(a, b, c, d):
    return a + c, b + d


@triton.jit
def _weight(weight_ptr, cols, n_cols, PLUS_ONE: tl.constexpr, COMPUTE: tl.constexpr):
    weight = tl.load(weight_ptr + cols, mask=cols < n_cols, other=0.0).to(COMPUTE)
    if PLUS_ONE:
        weight += 1.0
    return weight


@triton.jit
def _factor(weight_ptr, cols, n_cols):
    # Of columns that may begin before the row
    return tl.load(weight_ptr + cols, mask=(cols >= 0) & (cols < n_cols), other=0.0)


@triton.jit
def _h(x, residual, h_ptrs, mask, COMPUTE: tl.constexpr):
    # Rounded as it is stored: the norm is that of the h which everybody else sees
    if residual is not None:
        h = (x.to(COMPUTE) + residual.to(COMPUTE)).to(h_ptrs.dtype.element_ty)
        tl.store(h_ptrs, h, mask=mask)
    else:
        h = x
    return h


@triton.jit
def _normed(h, root, factor, PLUS_ONE: tl.constexpr, COMPUTE: tl.constexpr):
    factor = factor.to(COMPUTE)
    if PLUS_ONE:
        factor += 1.0
    return h.to(COMPUTE) * root * factor


@triton.jit(do_not_specialize=["n_rows", "eps"])
def _add_rms_norm_fwd_kernel(
    x_ptr, residual_ptr, weight_ptr, h_ptr, y_ptr, n_rows, n_cols, eps,
    stride_xm, stride_xn, stride_rm, stride_rn, PLUS_ONE: tl.constexpr, LATE: tl.constexpr,
    COMPUTE: tl.constexpr, UNIT: tl.constexpr, V: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    # One program holds BLOCK_M whole rows, in TILES tiles of BLOCK_N columns. LATE: weight is read when it is
    # needed, as there are no registers for it.
    n_cols, stride_xm = n_cols // UNIT * UNIT, stride_xm // UNIT * UNIT
    stride_rm = stride_rm // UNIT * UNIT
    rows, shift = device.held_rows(n_cols, UNIT, V, BLOCK_M)
    inside = rows < n_rows
    x_rows = x_ptr + device.begin(rows, stride_xm, shift, V)
    residual_at = device.begin(rows, stride_rm, shift, V)
    start = device.begin(rows, n_cols, shift, V)
    h_rows, y_rows = (y_ptr if residual_ptr is None else h_ptr) + start, y_ptr + start
    end_residual, residual = None, None
    if V > UNIT:
        end_cols, at_ends = device.row_ends(inside, shift, n_cols, V)
        end_x = tl.load(x_rows + end_cols, mask=at_ends, other=0.0)
        if residual_ptr is not None:
            end_residual = tl.load(residual_ptr + residual_at + end_cols, mask=at_ends, other=0.0)
        end_factor = _factor(weight_ptr, end_cols - shift, n_cols)
    xs, residuals, factors, hs = (), (), (), ()
    for t in tl.static_range(TILES):
        cols = device.tile_cols(t, BLOCK_N)
        mask = device.in_tile(t, cols, inside, shift, n_cols, UNIT, V, TILES)
        xs = xs + (tl.load(x_rows + cols * stride_xn, mask=mask, other=0.0),)
        if residual_ptr is not None:
            residual_ptrs = residual_ptr + residual_at + cols * stride_rn
            residuals = residuals + (tl.load(residual_ptrs, mask=mask, other=0.0),)
        if not LATE:
            factors = factors + (_factor(weight_ptr, cols - shift, n_cols),)

    squares = tl.zeros((BLOCK_M, BLOCK_N), COMPUTE)
    for t in tl.static_range(TILES):
        cols = device.tile_cols(t, BLOCK_N)
        mask = device.in_tile(t, cols, inside, shift, n_cols, UNIT, V, TILES)
        if residual_ptr is not None:
            residual = residuals[t]
        h = _h(xs[t], residual, h_rows + cols, mask, COMPUTE)
        hs = hs + (h,)
        squares += h.to(COMPUTE) * h.to(COMPUTE)
    total = tl.sum(squares, axis=1)[:, None]  # masked-off columns contribute 0
    if V > UNIT:
        end_h = _h(end_x, end_residual, h_rows + end_cols, at_ends, COMPUTE)
        total += tl.sum(end_h.to(COMPUTE) * end_h.to(COMPUTE), axis=1)[:, None]
    root = tl.rsqrt(total / n_cols + eps)
    if V > UNIT:
        end_y = _normed(end_h, root, end_factor, PLUS_ONE, COMPUTE)
        tl.store(y_rows + end_cols, end_y, mask=at_ends)
    for t in tl.static_range(TILES):
        cols = device.tile_cols(t, BLOCK_N)
        mask = device.in_tile(t, cols, inside, shift, n_cols, UNIT, V, TILES)
        factor = _factor(weight_ptr, cols - shift, n_cols) if LATE else factors[t]
        tl.store(y_rows + cols, _normed(hs[t], root, factor, PLUS_ONE, COMPUTE), mask=mask)


@triton.jit(do_not_specialize=["n_rows", "eps", "rows_per_program"])
def _add_rms_norm_bwd_kernel(
    dy_ptr, dh_ptr, h_ptr, weight_ptr, dx_ptr, partial_ptr, n_rows, n_cols, eps,
    stride_dym, stride_dyn, stride_dhm, stride_dhn, stride_hm, stride_hn, rows_per_program,
    PLUS_ONE: tl.constexpr, NO_EPS: tl.constexpr,
    NUM_STAGES: tl.constexpr, COMPUTE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    # One program handles rows_per_program whole rows, BLOCK_M at a time, and adds up on the way: its row of
    # partial, (programs, n_cols), is its share of dweight.
    cols = tl.arange(0, BLOCK_N)[None, :]
    weight = _weight(weight_ptr, cols, n_cols, PLUS_ONE, COMPUTE)
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=COMPUTE)
    for start in tl.range(0, rows_per_program, BLOCK_M, num_stages=NUM_STAGES):
        first_row = tl.program_id(0).to(tl.int64) * rows_per_program + start
        rows = (first_row + tl.arange(0, BLOCK_M))[:, None]
        mask = (rows < n_rows) & (cols < n_cols)
        dy_ptrs = dy_ptr + rows * stride_dym + cols * stride_dyn
        dy = tl.load(dy_ptrs, mask=mask, other=0.0).to(COMPUTE)
        h = tl.load(h_ptr + rows * stride_hm + cols * stride_hn, mask=mask, other=0.0).to(COMPUTE)
        # both sums of a row in one go, h² and g·h; mean(g·n) is r·mean(g·h)
        squares, cross = tl.reduce((h * h, dy * weight * h), 1, _add_both)
        root = tl.rsqrt(squares / n_cols + eps)[:, None]
        normal = h * root
        if NO_EPS:
            normal = tl.where(rows < n_rows, normal, 0.0)  # of a row that is not there 0·inf
        dx = root * (dy * weight - normal * (root * cross[:, None] / n_cols))
        if dh_ptr is not None:
            dh_ptrs = dh_ptr + rows * stride_dhm + cols * stride_dhn
            dx += tl.load(dh_ptrs, mask=mask, other=0.0).to(COMPUTE)
        if dx_ptr is not None:
            tl.store(dx_ptr + rows * n_cols + cols, dx, mask=mask)
        total += dy * normal  # 0 outside: dy is
    if partial_ptr is not None:
        sums = tl.sum(total, axis=0)[None, :]
        partial_ptrs = partial_ptr + tl.program_id(0).to(tl.int64) * n_cols + cols
        tl.store(partial_ptrs, sums, mask=cols < n_cols)


@triton.jit(do_not_specialize=["n_rows", "eps", "rows_per_program"])
def _add_rms_norm_bwd_wide_kernel(
    dy_ptr, dh_ptr, h_ptr, weight_ptr, dx_ptr, partial_ptr, n_rows, n_cols, eps,
    stride_dym, stride_dyn, stride_dhm, stride_dhn, stride_hm, stride_hn, rows_per_program,
    PLUS_ONE: tl.constexpr, COMPUTE: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    # The same for a row too wide to stay in registers until its sums are there: it is read again, from a cache.
    cols = tl.arange(0, BLOCK_N)
    mask = cols < n_cols
    total = tl.zeros((BLOCK_N,), dtype=COMPUTE)
    for k in range(0, rows_per_program):
        row = tl.program_id(0).to(tl.int64) * rows_per_program + k
        if row < n_rows:
            dy_ptrs = dy_ptr + row * stride_dym + cols * stride_dyn
            h_ptrs = h_ptr + row * stride_hm + cols * stride_hn
            dy = tl.load(dy_ptrs, mask=mask, other=0.0).to(COMPUTE)
            h = tl.load(h_ptrs, mask=mask, other=0.0).to(COMPUTE)
            weight = _weight(weight_ptr, cols, n_cols, PLUS_ONE, COMPUTE)
            squares, cross = tl.reduce((h * h, dy * weight * h), 0, _add_both)
            root = tl.rsqrt(squares / n_cols + eps)
            tl.debug_barrier()  # else these loads are the ones above, for the compiler
            dy = tl.load(dy_ptrs, mask=mask, other=0.0).to(COMPUTE)
            h = tl.load(h_ptrs, mask=mask, other=0.0).to(COMPUTE)
            weight = _weight(weight_ptr, cols, n_cols, PLUS_ONE, COMPUTE)
            normal = h * root
            total += dy * normal
            dx = root * (dy * weight - normal * (root * cross / n_cols))
            if dh_ptr is not None:
                dh_ptrs = dh_ptr + row * stride_dhm + cols * stride_dhn
                dx += tl.load(dh_ptrs, mask=mask, other=0.0).to(COMPUTE)
            if dx_ptr is not None:
                tl.store(dx_ptr + row * n_cols + cols, dx, mask=mask)
    if partial_ptr is not None:
        partial_ptrs = partial_ptr + tl.program_id(0).to(tl.int64) * n_cols + cols
        tl.store(partial_ptrs, total, mask=mask)


# --- plan (the dispatch heuristic) and launch ----------------------------------------------------------------

_WIDEST = 32768  # a row lies in the registers of one program
_LEAST_EPS = 2.0**-126  # below it eps is 0 in the kernel, or may be taken for it
_LATE_ABOVE = (
    48  # of a thread that holds more elements of a row no registers are left for the weight
)
_READ_AGAIN_ABOVE = 8192  # backward there are three rows and a sum to hold


@functools.cache
def _plan(n_cols, itemsize):
    """Of short rows, for which there is little to compute, fewer tiles and fewer rows a program."""
    return Plan(host.row_tiles(n_cols, itemsize, 4 if n_cols < 2048 else 8))


@functools.cache
def _plan_backward(n_cols):
    """(block_m, num_warps, strips): sixteen warps for each of an H200's 132 SMs, or one program."""
    block_n = host.power_of_2(n_cols)
    num_warps = max(1, block_n // 1024) if block_n <= _READ_AGAIN_ABOVE else 32
    # each further program adds a row to the last sum
    return max(1, 1024 // block_n), num_warps, 132 * max(1, 16 // num_warps)


@functools.cache
def _num_stages(n_cols, itemsize, block_m):
    """1 + the steps whose rows are under way while these are computed, where any GPU has memory for them."""
    if n_cols * itemsize % 16:
        return 1  # rows that begin anywhere are not copied ahead
    return min(3, 1 + 32768 // (block_m * n_cols * itemsize))


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
    block_m, num_warps, strips = plan and plan.backward or _plan_backward(n_cols)
    rows_per_program, strips, partial = host.strips_of(h, 1, block_m, strips, dtype)
    kernel, how = _add_rms_norm_bwd_wide_kernel, {"PLUS_ONE": plus_one}
    if n_cols <= _READ_AGAIN_ABOVE:
        stages = _num_stages(n_cols, h.element_size(), block_m)
        how |= {"NO_EPS": eps < _LEAST_EPS, "NUM_STAGES": stages, "BLOCK_M": block_m}
        kernel = _add_rms_norm_bwd_kernel
    host.run(
        kernel, (strips,), (dy, dh, h, weight, dx, partial), n_rows, n_cols, eps,
        *dy.stride(), *((0, 0) if dh is None else dh.stride()), *h.stride(), rows_per_program,
        COMPUTE=host.compute_dtype(h.dtype), BLOCK_N=host.power_of_2(n_cols), num_warps=num_warps, **how,
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
