# SPDX-License-Identifier: MIT
# Copyright (c) 2026 The Fused Kernels authors; Fused Kernels 0.1.0, lib/ops/add_relu.py
"""add_relu: y = relu(x + bias), one pass over memory instead of two.

Shapes    x, y: (..., N), x with any strides, y contiguous; bias: (N,).
Dtypes    float32, float16 and bfloat16 (computed in float32), also mixed, y then as x + bias; and float64.
Traffic   M rows of N elements of s bytes. Forward: eager moves 4MNs, fused 2MNs.
          Forward and backward: eager 4MNs + 4MNs, fused 2MNs + 3MNs.
Backward  dx = dy where y > 0 or y is NaN, else 0; dbias = dx summed over rows. Saves y only.
Copy it   by `make copy OP=add_relu TO=folder`, or with _host.py, _device.py and its .cu beside it. MIT licence.
"""

import functools
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
    """How one call is launched. backward: (BLOCK_M, BLOCK_N, strips), or None to have it chosen."""

    block_m: int
    block_n: int
    backward: tuple[int, int, int] | None = None


def add_relu_eager(x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return torch.relu(x + bias)


@triton.jit
def _add_relu_tile(x_ptrs, bias, y_ptrs, mask, COMPUTE: tl.constexpr):
    z = tl.load(x_ptrs, mask=mask).to(COMPUTE) + bias.to(COMPUTE)
    y = tl.where(z < 0, 0.0, z)  # tl.maximum(z, 0) would turn NaN into 0
    tl.store(y_ptrs, y, mask=mask)


@triton.jit(do_not_specialize=["n_rows"])
def _add_relu_fwd_kernel(
    x_ptr, bias_ptr, y_ptr, n_rows, n_cols, stride_xm, stride_xn,
    COMPUTE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, FOLD: tl.constexpr = 1,
):  # fmt: skip
    # One program handles a tile of x, (BLOCK_M, BLOCK_N). Neighbours take neighbouring columns, so that
    # together they read whole rows in order: the other way round costs 5 % on an H200.
    n_tiles = tl.cdiv(n_cols, BLOCK_N)
    pid_m, pid_n = tl.program_id(0) // n_tiles, tl.program_id(0) % n_tiles
    # int64: row * stride passes 2**31 from 8 GiB of float32 on
    rows = pid_m.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = pid_n.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    offsets = rows[:, None] * n_cols + cols[None, :]
    mask, bias_cols = (rows < n_rows)[:, None] & (cols < n_cols)[None, :], cols
    if FOLD > 1:
        whole, last, behind = device.fold_ends(n_rows, n_cols, cols, FOLD)
        mask = (offsets < whole) & (cols < n_cols)[None, :]
        bias_cols = cols.to(tl.int32) % (n_cols // FOLD)

    x_ptrs = x_ptr + rows[:, None] * stride_xm + cols[None, :] * stride_xn
    bias = tl.load(bias_ptr + bias_cols, mask=cols < n_cols)
    _add_relu_tile(x_ptrs, bias[None, :], y_ptr + offsets, mask, COMPUTE)
    if FOLD > 1 and pid_m == 0:
        _add_relu_tile(x_ptr + last, bias, y_ptr + last, behind, COMPUTE)


@triton.jit(do_not_specialize=["n_rows", "rows_per_program"])
def _add_relu_bwd_kernel(
    dy_ptr, y_ptr, dx_ptr, partial_ptr, n_rows, n_cols, stride_dym, stride_dyn, rows_per_program,
    HAS_DX: tl.constexpr, HAS_DBIAS: tl.constexpr, NUM_STAGES: tl.constexpr,
    COMPUTE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, FOLD: tl.constexpr = 1,
):  # fmt: skip
    # One program handles rows_per_program rows of BLOCK_N columns, BLOCK_M rows at a time, and adds
    # them up on the way: its row of partial, (programs down, n_cols), is its share of dbias.
    n_tiles = tl.cdiv(n_cols, BLOCK_N)
    pid_m, pid_n = tl.program_id(0) // n_tiles, tl.program_id(0) % n_tiles
    cols = pid_n.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=COMPUTE)
    if FOLD > 1:
        whole, last, behind = device.fold_ends(n_rows, n_cols, cols, FOLD)

    for start in tl.range(0, rows_per_program, BLOCK_M, num_stages=NUM_STAGES):
        rows = pid_m.to(tl.int64) * rows_per_program + start + tl.arange(0, BLOCK_M)
        offsets = rows[:, None] * n_cols + cols[None, :]
        in_rows = offsets < whole if FOLD > 1 else (rows < n_rows)[:, None]
        mask = in_rows & (cols < n_cols)[None, :]
        dy_offsets = rows[:, None] * stride_dym + cols[None, :] * stride_dyn
        dy = tl.load(dy_ptr + dy_offsets, mask=mask, other=0.0)
        y = tl.load(y_ptr + offsets, mask=mask, other=0.0)
        # dx = dy where y > 0; a NaN in y lets dy through, as in torch.relu
        dx = tl.where(y <= 0, 0.0, dy)
        if HAS_DX:
            tl.store(dx_ptr + offsets, dx, mask=mask)
        total += dx.to(COMPUTE)

    sums = tl.sum(total, axis=0)
    if FOLD > 1 and pid_m == 0:
        last_dy = tl.load(dy_ptr + last, mask=behind, other=0.0)
        last_dx = tl.where(tl.load(y_ptr + last, mask=behind, other=0.0) <= 0, 0.0, last_dy)
        if HAS_DX:
            tl.store(dx_ptr + last, last_dx, mask=behind)
        sums += last_dx.to(COMPUTE)
    if HAS_DBIAS:
        tl.store(partial_ptr + pid_m.to(tl.int64) * n_cols + cols, sums, mask=cols < n_cols)


# --- plan (the dispatch heuristic) and launch ----------------------------------------------------------------


@functools.cache
def _plan(n_cols, dtype, fold=1):
    return Plan(*host.folded_tile(n_cols, dtype, fold))


@functools.cache
def _plan_backward(n_cols, dtype, aligned, fold=1):
    """(BLOCK_M, BLOCK_N, strips).

    aligned: eight 16-byte loads of dy and of y in flight in each of 128 threads; else smaller tiles: unaligned
    rows load one element per instruction, and cp.async cannot pipeline that.
    """
    block_n, strips = host.summed_tile(n_cols, fold)
    block_m = (16384 if aligned else 8192) // dtype.itemsize // block_n
    return block_m, block_n, strips


def _launch(plan, fold, bias, x, y):
    n_rows, n_cols = host.cdiv(x.shape[0], fold), x.shape[1] * fold
    host.run(
        _add_relu_fwd_kernel, (host.cdiv(n_rows, plan.block_m) * host.cdiv(n_cols, plan.block_n),),
        (x, bias, y), x.shape[0], n_cols, *(x.stride() if fold == 1 else (n_cols, 1)),
        COMPUTE=host.compute_dtype(x.dtype), BLOCK_M=plan.block_m, BLOCK_N=plan.block_n, FOLD=fold, num_warps=4,
    )  # fmt: skip


def _launch_cuda(plan, fold, bias, x, y):
    x = x if x.stride(1) == 1 else x.contiguous()  # the kernel reads 16 adjacent bytes at a time
    x, bias = x.to(y.dtype), bias.to(y.dtype)  # which differ under autocast
    for b, (x_rows, y_rows) in host.folded_and_rest(fold, bias, x, y):
        host.load_cuda(__file__).forward(x_rows, b, y_rows)


def _launch_backward(plan, dy, y, dx, dtype):
    """Write dx unless it is None. Returns what each strip of rows adds to dbias, (strips, N), or None.

    dtype: that of dbias, None where it is not needed. Of one strip that is dbias itself, in this dtype.
    """
    fold = host.fold_of(y, dy, dx)
    n_cols = y.shape[1] * fold
    stride_dym, stride_dyn = dy.stride() if fold == 1 else (n_cols, 1)
    aligned = n_cols % 16 == 0 and stride_dyn == 1
    block_m, block_n, strips = plan or _plan_backward(n_cols, y.dtype, aligned, fold)
    rows_per_program, strips, partial = host.strips_of(y, fold, block_m, strips, dtype)
    host.run(
        _add_relu_bwd_kernel, (strips * host.cdiv(n_cols, block_n),), (dy, y, dx, partial),
        y.shape[0], n_cols, stride_dym, stride_dyn, rows_per_program,
        HAS_DX=dx is not None, HAS_DBIAS=partial is not None, NUM_STAGES=3 if aligned else 1,
        COMPUTE=host.compute_dtype(y.dtype), BLOCK_M=block_m, BLOCK_N=block_n, FOLD=fold, num_warps=4,
    )  # fmt: skip
    return partial


# --- forward and backward ------------------------------------------------------------------------------------


def _empty(x, bias):
    """y, before it is written."""
    dtype = host.dtype_of_sum(x.dtype, bias.dtype)
    return torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)


def _forward(x, bias, plan=None, launch=_launch):
    y = _empty(x, bias)
    if y.numel() == 0:
        return y
    matrices = host.rows_of(x), host.rows_of(y)
    fold = host.fold_of(*matrices)
    chosen = plan or _plan(x.shape[-1] * fold, x.dtype, fold)
    launch(chosen, fold, bias.contiguous(), *matrices)
    return y


def _save(ctx, x, bias, y):
    ctx.save_for_backward(y)
    ctx.dtypes = x.dtype, bias.dtype


def _backward(dy, y, dtypes, needs_grad=(True, True), plan=None):
    """dx and dbias, in these dtypes, each None unless needed."""
    has_dx, has_dbias = needs_grad
    dx = torch.empty_like(y, dtype=dtypes[0]) if has_dx else None
    if y.numel() == 0:
        return dx, y.new_zeros(y.shape[-1], dtype=dtypes[1]) if has_dbias else None
    dtype = dtypes[1] if has_dbias else None
    # y.sum().backward() sends a dy of strides 0, which is read as it is
    matrices = host.rows_of(dy), host.rows_of(y), host.rows_of(dx)
    partial = _launch_backward(plan and plan.backward, *matrices, dtype)
    return dx, host.sum_rows(partial, dtype) if has_dbias else None


class _AddReLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, bias, plan, launch):
        y = _forward(x, bias, plan, launch)
        _save(ctx, x, bias, y)
        ctx.plan = plan
        return y

    @staticmethod
    @host.once
    def backward(ctx, dy):
        needs_grad = ctx.needs_input_grad[:2]
        return *_backward(dy, *ctx.saved_tensors, ctx.dtypes, needs_grad, ctx.plan), None, None


# --- the calls -----------------------------------------------------------------------------------------------


@host.remembered
def _check(name, x, bias):
    host.check_tensors(name, "add_relu_eager", host.MIXED, x=(x, "... N"), bias=(bias, "N"))


def _call(name, x, bias, plan=None, launch=_launch):
    goes_by_op = _check(name, x, bias)
    if goes_by_op:
        return add_relu_op(x, bias)
    return host.call(name, "add_relu_eager", _AddReLU, _forward, (x, bias), plan, launch)


def add_relu_triton(
    x: torch.Tensor, bias: torch.Tensor, *, plan: Plan | None = None
) -> torch.Tensor:
    """relu(x + bias) in one Triton kernel, with gradients for both.

    x: (..., N), any strides; bias: (N,), on x's device. Returns y of x's shape, contiguous, in the dtype of
    x + bias: under autocast x may have 16 bits and bias 32.
    plan: a Plan in place of the one chosen, for tuning; torch.compile leaves it out.
    Works under torch.compile (as the op fused_kernels::add_relu), autocast and CUDA graphs; not under
    torch.func, torch.vmap or forward-mode AD, nor twice differentiable: these raise.
    Raises TypeError for a wrong dtype, ValueError for a wrong shape or device.
    """
    return _call("add_relu_triton", x, bias, plan)


def add_relu_cuda(x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """relu(x + bias) in one CUDA kernel; the gradient comes from the Triton kernel.

    Shapes, dtypes and errors as for add_relu_triton. Needs nvcc and a C++ compiler at the first call.
    """
    return _call("add_relu_cuda", x, bias, launch=_launch_cuda)


@host.custom_op("fused_kernels::add_relu")
def add_relu_op(x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """add_relu for torch.compile and torch.export: one node of the graph, which nothing looks into."""
    _check("add_relu_op", x, bias)
    return _forward(x, bias)


@host.custom_op("fused_kernels::add_relu_backward")
def _add_relu_backward_op(dy: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return _backward(dy, y, (y.dtype, y.dtype))  # autograd casts them for an x or a bias of others


add_relu_op.register_fake(_empty)
_add_relu_backward_op.register_fake(lambda dy, y: (torch.empty_like(y), y.new_empty(y.shape[-1])))
add_relu_op.register_autograd(
    lambda ctx, dy: _add_relu_backward_op(dy, *ctx.saved_tensors),
    setup_context=lambda ctx, inputs, output: _save(ctx, *inputs, output),
)
