# SPDX-License-Identifier: MIT
# Copyright (c) 2026 The Fused Kernels authors; Fused Kernels 0.1.0, lib/ops/lora_epilogue.py
"""lora_epilogue: y = act(x + scale·delta + bias), what follows the products of a LoRA layer, in one pass.

Shapes    x, delta, y: (..., N), with any strides, y contiguous; bias: (N,), or None; scale: a Python float.
          x is what the frozen linear layer gives without its bias, delta the low-rank product (h A) B.
Act       identity, relu, gelu (erf), gelu_tanh, silu or sigmoid.
Dtypes    float32, float16 and bfloat16 (computed in float32), also mixed, y then as their sum; and float64.
Traffic   M rows of N elements of s bytes. Forward: eager moves 2 + 3 + 2 + 2 = 9MNs (identity 7MNs), fused
          3MNs, in place too. Backward: dy in, dx and ddelta out are 3MNs, and what act'(z) is computed from,
          z = x + scale·delta + bias:
            identity        nothing, and dx is dy itself             backward 2MNs
            relu, sigmoid   y                                        backward 4MNs
            gelus, silu     x and delta, to compute z again          backward 5MNs
            in place        z, as x is gone: forward 4MNs            backward 4MNs
Backward  dx = dy·act'(z), ddelta = scale·dx, dbias = dx summed over rows: one kernel, and one for the sums.
Copy it   by `make copy OP=lora_epilogue TO=folder`, or with _host.py, _device.py and its .cu. MIT licence.
"""

import functools
from collections.abc import Sequence
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


def lora_epilogue_eager(
    x: torch.Tensor, delta: torch.Tensor, bias: torch.Tensor | None = None, scale: float = 1.0,
    activation: str = "identity",
) -> torch.Tensor:  # fmt: skip
    z = x + scale * delta
    return host.ACTIVATIONS[activation](z if bias is None else z + bias)


@triton.jit
def _sum_of(x, delta, bias, scale, COMPUTE: tl.constexpr):
    # z = x + scale·delta + bias, the same in the forward and in the backward pass, rounding included.
    # scale is no Python number but float64 in the kernel: every product with it would be float64 too.
    z = x.to(COMPUTE) + tl.cast(scale, COMPUTE) * delta.to(COMPUTE)
    if bias is not None:
        z += bias.to(COMPUTE)
    return z


@triton.jit
def _lora_epilogue_fwd_tile(
    x_ptrs, delta_ptrs, bias, y_ptrs, z_ptr, offsets, mask, scale,
    ACTIVATION: tl.constexpr, COMPUTE: tl.constexpr,
):  # fmt: skip
    x, delta = tl.load(x_ptrs, mask=mask), tl.load(delta_ptrs, mask=mask)
    z = _sum_of(x, delta, bias, scale, COMPUTE)
    tl.store(y_ptrs, device.activate(z, ACTIVATION), mask=mask)
    if z_ptr is not None:
        tl.store(z_ptr + offsets, z, mask=mask)


@triton.jit(do_not_specialize=["n_rows"])
def _lora_epilogue_fwd_kernel(
    x_ptr, delta_ptr, bias_ptr, y_ptr, z_ptr, scale: tl.float64, n_rows, n_cols,
    stride_xm, stride_xn, stride_dm, stride_dn, stride_ym, stride_yn,
    ACTIVATION: tl.constexpr, COMPUTE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    FOLD: tl.constexpr = 1,
):  # fmt: skip
    # One program handles a tile of x, (BLOCK_M, BLOCK_N). Neighbours take neighbouring columns. In place, y_ptr
    # is x_ptr: no program, and no thread, reads an element that another one writes.
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
    delta_ptrs = delta_ptr + rows[:, None] * stride_dm + cols[None, :] * stride_dn
    y_ptrs = y_ptr + rows[:, None] * stride_ym + cols[None, :] * stride_yn
    bias = None
    wide_bias = None
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + bias_cols, mask=cols < n_cols)
        wide_bias = bias[None, :]
    _lora_epilogue_fwd_tile(
        x_ptrs, delta_ptrs, wide_bias, y_ptrs, z_ptr, offsets, mask, scale, ACTIVATION, COMPUTE
    )
    if FOLD > 1 and pid_m == 0:
        _lora_epilogue_fwd_tile(
            x_ptr + last, delta_ptr + last, bias, y_ptr + last, z_ptr, last, behind, scale, ACTIVATION, COMPUTE
        )  # fmt: skip


@triton.jit
def _lora_epilogue_bwd_tile(
    dy_ptrs, saved_ptr, saved_offsets, delta_ptr, delta_offsets, bias, dx_ptr, ddelta_ptr, offsets, mask, scale,
    ACTIVATION: tl.constexpr, COMPUTE: tl.constexpr,
):  # fmt: skip
    dx = tl.load(dy_ptrs, mask=mask, other=0.0).to(COMPUTE)
    if saved_ptr is not None:
        saved = tl.load(saved_ptr + saved_offsets, mask=mask, other=0.0).to(COMPUTE)
        if delta_ptr is not None:
            delta = tl.load(delta_ptr + delta_offsets, mask=mask, other=0.0)
            saved = _sum_of(saved, delta, bias, scale, COMPUTE)
        dx = device.slope_times(dx, saved, ACTIVATION)
    if dx_ptr is not None:
        tl.store(dx_ptr + offsets, dx, mask=mask)
    if ddelta_ptr is not None:
        tl.store(ddelta_ptr + offsets, tl.cast(scale, COMPUTE) * dx, mask=mask)
    return dx


@triton.jit(do_not_specialize=["n_rows", "rows_per_program"])
def _lora_epilogue_bwd_kernel(
    dy_ptr, saved_ptr, delta_ptr, bias_ptr, dx_ptr, ddelta_ptr, partial_ptr, scale: tl.float64,
    n_rows, n_cols, stride_dym, stride_dyn, stride_sm, stride_sn, stride_dm, stride_dn, rows_per_program,
    ACTIVATION: tl.constexpr, NUM_STAGES: tl.constexpr,
    COMPUTE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, FOLD: tl.constexpr = 1,
):  # fmt: skip
    # One program handles rows_per_program rows of BLOCK_N columns, BLOCK_M rows at a time, and adds
    # them up on the way: its row of partial, (programs down, n_cols), is its share of dbias.
    # saved is y or z; with a delta_ptr it is x, and z is computed again. Pointers may be None.
    n_tiles = tl.cdiv(n_cols, BLOCK_N)
    pid_m, pid_n = tl.program_id(0) // n_tiles, tl.program_id(0) % n_tiles
    cols = pid_n.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    total, bias, bias_cols = tl.zeros((BLOCK_M, BLOCK_N), dtype=COMPUTE), None, cols
    if FOLD > 1:
        whole, last, behind = device.fold_ends(n_rows, n_cols, cols, FOLD)
        bias_cols = cols.to(tl.int32) % (n_cols // FOLD)
    if delta_ptr is not None and bias_ptr is not None:
        bias = tl.load(bias_ptr + bias_cols, mask=cols < n_cols)[None, :]

    for start in tl.range(0, rows_per_program, BLOCK_M, num_stages=NUM_STAGES):
        rows = pid_m.to(tl.int64) * rows_per_program + start + tl.arange(0, BLOCK_M)
        offsets = rows[:, None] * n_cols + cols[None, :]
        in_rows = offsets < whole if FOLD > 1 else (rows < n_rows)[:, None]
        mask = in_rows & (cols < n_cols)[None, :]
        dy_ptrs = dy_ptr + rows[:, None] * stride_dym + cols[None, :] * stride_dyn
        saved_offsets = rows[:, None] * stride_sm + cols[None, :] * stride_sn
        delta_offsets = rows[:, None] * stride_dm + cols[None, :] * stride_dn
        total += _lora_epilogue_bwd_tile(
            dy_ptrs, saved_ptr, saved_offsets, delta_ptr, delta_offsets, bias, dx_ptr, ddelta_ptr, offsets,
            mask, scale, ACTIVATION, COMPUTE,
        )  # fmt: skip

    sums = tl.sum(total, axis=0)
    if FOLD > 1 and pid_m == 0:
        row = last[None, :]
        last_dx = _lora_epilogue_bwd_tile(
            dy_ptr + row, saved_ptr, row, delta_ptr, row, bias, dx_ptr, ddelta_ptr, row, behind[None, :],
            scale, ACTIVATION, COMPUTE,
        )  # fmt: skip
        sums += tl.sum(last_dx, axis=0)
    if partial_ptr is not None:
        tl.store(partial_ptr + pid_m.to(tl.int64) * n_cols + cols, sums, mask=cols < n_cols)


# --- plan (the dispatch heuristic) and launch ----------------------------------------------------------------


@functools.cache
def _plan(n_cols, dtype, fold=1):
    return Plan(*host.folded_tile(n_cols, dtype, fold))


@functools.cache
def _plan_backward(n_cols, dtype, fold=1, of_z=False):
    """(BLOCK_M, BLOCK_N, strips): eight 16-byte loads of each tensor in each of 128 threads.

    of_z: four, as the slope of an activation takes registers.
    """
    block_n, strips = host.summed_tile(n_cols, fold)
    block_m = (8192 if of_z else 16384) // dtype.itemsize // block_n
    return block_m, block_n, strips


def _launch(plan, fold, bias, x, delta, y, z, scale, activation):
    n_rows, n_cols = host.cdiv(x.shape[0], fold), x.shape[1] * fold
    strides = [m.stride() if fold == 1 else (n_cols, 1) for m in (x, delta, y)]
    host.run(
        _lora_epilogue_fwd_kernel, (host.cdiv(n_rows, plan.block_m) * host.cdiv(n_cols, plan.block_n),),
        (x, delta, bias, y, z), float(scale), x.shape[0], n_cols, *strides[0], *strides[1], *strides[2],
        ACTIVATION=activation, COMPUTE=host.compute_dtype(x.dtype),
        BLOCK_M=plan.block_m, BLOCK_N=plan.block_n, FOLD=fold, num_warps=4,
    )  # fmt: skip


def _launch_cuda(plan, fold, bias, x, delta, y, z, scale, activation):
    x, delta = (m if m.stride(1) == 1 else m.contiguous() for m in (x, delta))  # 16 adjacent bytes
    bias = x.new_zeros(x.shape[1]) if bias is None else bias
    x, delta, bias = (t.to(y.dtype) for t in (x, delta, bias))  # which differ under autocast
    number = list(host.ACTIVATIONS).index(activation)  # as lora_epilogue.cu counts them
    for b, (x_rows, delta_rows, y_rows) in host.folded_and_rest(fold, bias, x, delta, y):
        host.load_cuda(__file__).forward(x_rows, delta_rows, b, y_rows, scale, number)


def _launch_backward(plan, dy, saved, delta, dx, ddelta, bias, scale, activation, dtype):
    """Write dx and ddelta. Returns what each strip of rows adds to dbias, (strips, N), or None.

    dtype: that of dbias, None where it is not needed. Of one strip that is dbias itself, in this dtype.
    """
    read, fold = (dy, saved, delta), host.fold_of(dy, saved, delta, dx, ddelta)
    n_cols = dy.shape[1] * fold
    of_z = activation in host.OF_Z
    block_m, block_n, strips = (
        plan and plan.backward or _plan_backward(n_cols, dy.dtype, fold, of_z)
    )
    rows_per_program, strips, partial = host.strips_of(dy, fold, block_m, strips, dtype)
    strides = [(0, 0) if m is None else m.stride() if fold == 1 else (n_cols, 1) for m in read]
    # Unaligned rows load one element per instruction; cp.async cannot pipeline that, so num_stages=1.
    aligned = n_cols % 16 == 0 and all([m is None or m.stride(1) == 1 for m in read])
    host.run(
        _lora_epilogue_bwd_kernel, (strips * host.cdiv(n_cols, block_n),),
        (dy, saved, delta, bias, dx, ddelta, partial), float(scale), dy.shape[0], n_cols,
        *strides[0], *strides[1], *strides[2], rows_per_program,
        ACTIVATION=activation, NUM_STAGES=3 if aligned else 1, COMPUTE=host.compute_dtype(dy.dtype),
        BLOCK_M=block_m, BLOCK_N=block_n, FOLD=fold, num_warps=4,
    )  # fmt: skip
    return partial


# --- forward and backward ------------------------------------------------------------------------------------


def _empty(x, delta, bias=None, scale=1.0, activation="identity"):
    """y, before it is written."""
    dtype = host.dtype_of_sum(x.dtype, delta.dtype, (x if bias is None else bias).dtype)
    return torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)


def _forward(x, delta, bias, scale, activation, plan=None, launch=_launch, in_place=False, z=None):
    """y, in place x itself; z = x + scale·delta + bias is written too, contiguous, unless it is None."""
    y = x if in_place else _empty(x, delta, bias)
    if y.numel() == 0:
        return y
    rows = host.rows_of(x)
    matrices = rows, host.rows_of(delta), rows if in_place else host.rows_of(y), host.rows_of(z)
    fold = host.fold_of(*matrices)
    chosen = plan or _plan(x.shape[-1] * fold, x.dtype, fold)
    bias = bias if bias is None else bias.contiguous()
    launch(chosen, fold, bias, *matrices, scale, activation)
    if in_place and rows.data_ptr() != x.data_ptr():
        x.copy_(rows.view_as(x))
    return y


def _save(ctx, x, delta, bias, scale, activation, y, z=None, plan=None):
    """What the table at the top says. z: in place, where x is gone."""
    ctx.scale, ctx.activation, ctx.plan = scale, activation, plan
    ctx.dtypes = x.dtype, delta.dtype, None if bias is None else bias.dtype
    if activation in ("relu", "sigmoid"):
        ctx.save_for_backward(y)
    elif activation != "identity":
        ctx.save_for_backward(*((x, delta, bias) if z is None else (z,)))


def _backward(dy, saved, scale, activation, dtypes, needs_grad=(True, True, True), plan=None):
    """dx, ddelta and dbias, each None unless needed. saved is (), (y,), (z,) or (x, delta, bias)."""
    n_cols, (has_dx, has_ddelta, has_dbias) = dy.shape[-1], needs_grad
    dx_is_dy = has_dx and activation == "identity" and dtypes[0] == dy.dtype
    out, ddelta = (
        torch.empty(dy.shape, dtype=dtype, device=dy.device) if has else None
        for has, dtype in zip((has_dx and not dx_is_dy, has_ddelta), dtypes)
    )
    dx = dy if dx_is_dy else out
    if dy.numel() == 0:
        return dx, ddelta, dy.new_zeros(n_cols, dtype=dtypes[2]) if has_dbias else None
    if out is None and ddelta is None and not has_dbias:
        return dx, None, None
    saved, delta, bias = (*saved, None, None, None)[:3]
    bias = None if bias is None else bias.contiguous()
    # y.sum().backward() sends a dy of strides 0, which is read as it is
    matrices = [host.rows_of(m) for m in (dy, saved, delta, out, ddelta)]
    dtype = dtypes[2] if has_dbias else None
    partial = _launch_backward(plan, *matrices, bias, scale, activation, dtype)
    return dx, ddelta, host.sum_rows(partial, dtype) if has_dbias else None


class _LoRAEpilogue(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, delta, bias, scale, activation, plan, launch, in_place=False, z=None):
        y = _forward(x, delta, bias, scale, activation, plan, launch, in_place, z)
        if in_place:
            ctx.mark_dirty(x)  # autograd: x has a new version, and what saved the old one raises
        _save(ctx, x, delta, bias, scale, activation, y, z, plan)
        ctx.saves_z = z is not None
        return y

    @staticmethod
    def backward(ctx, dy):
        if ctx.saves_z and torch.is_grad_enabled():  # z is no way to the inputs, and x is gone
            none = "lora_epilogue in place has no second derivative"
            raise RuntimeError(f"{none}; for one, use lora_epilogue_eager")
        return _LoRAEpilogue.gradients(ctx, dy)

    @staticmethod
    @host.once
    def gradients(ctx, dy):
        how = ctx.scale, ctx.activation, ctx.dtypes, ctx.needs_input_grad[:3], ctx.plan
        return *_backward(dy, ctx.saved_tensors, *how), *[None] * 6


# --- the calls -----------------------------------------------------------------------------------------------


@host.remembered
def _check(name, x, delta, bias, scale, activation):
    if not isinstance(scale, host.NUMBERS):
        raise TypeError(f"{name}: scale must be a Python number, got {type(scale).__name__}")
    host.check_activation(name, activation)
    host.check_same_shape(name, "delta", delta, x)
    sizes = {"x": (x, "... N"), "delta": (delta, "... N")}
    if bias is not None:
        sizes["bias"] = bias, "N"
    host.check_tensors(name, "lora_epilogue_eager", host.MIXED, **sizes)


def _check_in_place(name, x, delta, bias):
    """Raise ValueError, saying what to do, unless x may be written while delta and bias are read."""
    if host.overlaps_itself(host.steps_of(x)):
        why = f"several elements of x are one in memory (strides {x.stride()}, as after expand)"
        raise ValueError(f"{name}: {why}; use lora_epilogue_triton or x.clone()")
    storage = x.untyped_storage().data_ptr()
    for label, t in (("delta", delta), ("bias", bias)) if x.numel() else ():
        if t is not None and t.untyped_storage().data_ptr() == storage and host.shares_memory(x, t):
            raise ValueError(f"{name}: {label} shares memory with x; pass {label}.clone()")
    base = x if x._base is None else x._base
    if base.is_leaf and base.requires_grad and torch.is_grad_enabled():
        why = "x is a leaf that requires grad, or a view of one, and its value would be lost"
        use = "use lora_epilogue_triton, or write under torch.no_grad()"
        raise ValueError(f"{name}: {why}; {use}")


def _call(name, x, delta, bias, scale, activation, plan=None, launch=_launch):
    goes_by_op = _check(name, x, delta, bias, scale, activation)
    if goes_by_op:
        return lora_epilogue_op(x, delta, bias, scale, activation)
    tensors, how = (x, delta, bias), (scale, activation, plan, launch)
    return host.call(name, "lora_epilogue_eager", _LoRAEpilogue, _forward, tensors, *how)


def lora_epilogue_triton(
    x: torch.Tensor, delta: torch.Tensor, bias: torch.Tensor | None = None, scale: float = 1.0,
    activation: str = "identity", *, plan: Plan | None = None,
) -> torch.Tensor:  # fmt: skip
    """act(x + scale·delta + bias) in one Triton kernel, with gradients for x, delta and bias.

    x, delta: (..., N), any strides; bias: (N,) or None, all on one device; scale: a Python number; activation:
    identity, relu, gelu, gelu_tanh, silu or sigmoid. Returns y of x's shape, contiguous, in the dtype of the
    sum: under autocast x may have 16 bits and bias 32.
    plan: a Plan in place of the one chosen, for tuning; torch.compile leaves it out.
    Works under torch.compile (as the op fused_kernels::lora_epilogue), autocast and CUDA graphs; not under
    torch.func, torch.vmap or forward-mode AD, nor twice differentiable: these raise.
    Raises TypeError for a wrong dtype, ValueError for a wrong shape, device or activation.
    """
    return _call("lora_epilogue_triton", x, delta, bias, scale, activation, plan)


def lora_epilogue_triton_(
    x: torch.Tensor, delta: torch.Tensor, bias: torch.Tensor | None = None, scale: float = 1.0,
    activation: str = "identity", *, plan: Plan | None = None,
) -> torch.Tensor:  # fmt: skip
    """lora_epilogue_triton written into x, which is returned: no memory for y, the same traffic.

    With gradients, gelu, gelu_tanh and silu save z = x + scale·delta + bias, one more tensor of x's size.
    Raises as lora_epilogue_triton, and ValueError where x must not be written: it overlaps itself, delta or
    bias in memory, or is a leaf that requires grad.
    """
    tensors, name = (x, delta, bias), "lora_epilogue_triton_"
    goes_by_op = _check(name, *tensors, scale, activation)
    needs_grad = host.needs_autograd(*tensors)
    # their slope is taken from z, and x is gone; that of relu and sigmoid from y
    save_z = needs_grad and activation in host.OF_Z
    if goes_by_op:
        if host.is_compiling() and not needs_grad:
            lora_epilogue_op_(*tensors, scale, activation)
            return x
        y = lora_epilogue_op(x.clone() if save_z else x, delta, bias, scale, activation)
        return x.copy_(y)  # only what changes nothing has gradients there; the copies are dropped
    if not host.active_transforms():  # they hide addresses, and autograd raises under them
        _check_in_place(name, *tensors)
    z = torch.empty_like(x, memory_format=torch.contiguous_format) if save_z else None
    how = scale, activation, plan, _launch, True, z
    return host.call(name, "lora_epilogue_eager", _LoRAEpilogue, None, tensors, *how)


def lora_epilogue_cuda(
    x: torch.Tensor, delta: torch.Tensor, bias: torch.Tensor | None = None, scale: float = 1.0,
    activation: str = "identity",
) -> torch.Tensor:  # fmt: skip
    """act(x + scale·delta + bias) in one CUDA kernel; the gradient comes from the Triton kernel.

    Shapes, dtypes and errors as for lora_epilogue_triton. Needs nvcc and a C++ compiler at the first call.
    """
    return _call("lora_epilogue_cuda", x, delta, bias, scale, activation, launch=_launch_cuda)


@host.custom_op("fused_kernels::lora_epilogue")
def lora_epilogue_op(
    x: torch.Tensor, delta: torch.Tensor, bias: torch.Tensor | None = None,
    scale: float = 1.0, activation: str = "identity",
) -> torch.Tensor:  # fmt: skip
    """lora_epilogue for torch.compile and torch.export: one node of the graph, which nothing looks into."""
    _check("lora_epilogue_op", x, delta, bias, scale, activation)
    return _forward(x, delta, bias, scale, activation)


@host.custom_op("fused_kernels::lora_epilogue_", mutates=("x",))
def lora_epilogue_op_(
    x: torch.Tensor, delta: torch.Tensor, bias: torch.Tensor | None = None,
    scale: float = 1.0, activation: str = "identity",
) -> None:  # fmt: skip
    """The same written into x, without a gradient."""
    _check("lora_epilogue_op_", x, delta, bias, scale, activation)
    _check_in_place("lora_epilogue_op_", x, delta, bias)
    _forward(x, delta, bias, scale, activation, in_place=True)


@host.custom_op("fused_kernels::lora_epilogue_backward")
def _lora_epilogue_backward_op(
    dy: torch.Tensor, saved: Sequence[torch.Tensor], scale: float, activation: str, has_bias: bool = True
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    # in dy's dtype; autograd casts them where the inputs are of others
    needs = True, True, has_bias
    dx, *others = _backward(dy, saved, scale, activation, (dy.dtype,) * 3, needs)
    # an op's result may not be its argument
    return host.none_as_empty(dy, (dx.clone() if dx is dy else dx, *others))


def _op_backward(ctx, dy):
    saved, has_bias = [t for t in ctx.saved_tensors if t is not None], ctx.dtypes[2] is not None
    how = saved, ctx.scale, ctx.activation, has_bias
    dx, ddelta, dbias = _lora_epilogue_backward_op(dy, *how)
    return dx, ddelta, dbias if has_bias else None, None, None


lora_epilogue_op.register_fake(_empty)
_lora_epilogue_backward_op.register_fake(
    lambda dy, saved, scale, activation, has_bias=True: (
        dy.new_empty(dy.shape), dy.new_empty(dy.shape), dy.new_empty(dy.shape[-1] if has_bias else 0)
    )
)  # fmt: skip
lora_epilogue_op.register_autograd(
    _op_backward,
    setup_context=lambda ctx, inputs, output: _save(ctx, *inputs, output),
)  # fmt: skip
