# SPDX-License-Identifier: MIT
# Copyright (c) 2026 The Fused Kernels authors; Fused Kernels 0.1.0, lib/ops/gelu.py
"""gelu: y = x · Φ(x), one pass over memory, with the normal distribution's Φ exact (erf) or by tanh.

Shapes    x, y: any shape; x with any strides, y contiguous.
Dtypes    float32, float16, bfloat16 (computed in float32) and float64.
Traffic   N elements of s bytes. Forward 2Ns, and backward 3Ns: F.gelu moves the same. Written by hand
          in eager operations, the tanh form takes a pass for each of them.
Backward  dx = dy · (Φ(x) + x · Φ'(x)). Saves x only.
Copy it   by `make copy OP=gelu TO=folder`, or with _host.py, _device.py and its .cu beside it. MIT licence.
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
    """How one call is launched: the tile of x, forward, and of x and dy, backward."""

    block_m: int
    block_n: int


def gelu_eager(x: torch.Tensor, approximate: str = "none") -> torch.Tensor:
    return F.gelu(x, approximate=approximate)


@triton.jit
def _locate(n_rows, n_cols, ONE_ROW: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    # Rows and columns of this program's tile, and whether all of them exist.
    pid, n_tiles = tl.program_id(0), tl.cdiv(n_cols, BLOCK_N)
    pid_m, pid_n = pid // n_tiles, pid % n_tiles
    if ONE_ROW:
        pid_m, pid_n = pid * 0, pid
    # int64: row * stride passes 2**31 from 8 GiB of float32 on
    row, col = pid_m.to(tl.int64) * BLOCK_M, pid_n.to(tl.int64) * BLOCK_N
    full = (row + BLOCK_M <= n_rows) & (col + BLOCK_N <= n_cols)
    return (row + tl.arange(0, BLOCK_M))[:, None], (col + tl.arange(0, BLOCK_N))[None, :], full


@triton.jit
def _fwd_tile(x_ptrs, y_ptrs, mask, TANH: tl.constexpr, COMPUTE: tl.constexpr):
    NARROW: tl.constexpr = y_ptrs.dtype.element_ty.primitive_bitwidth == 16
    x = tl.load(x_ptrs, mask=mask).to(COMPUTE)
    y = device.gelu_tanh(x) if TANH else device.gelu(x, NARROW)
    tl.store(y_ptrs, y, mask=mask)


@triton.jit(do_not_specialize=["n_rows", "n_cols"])
def _gelu_fwd_kernel(
    x_ptr, y_ptr, n_rows, n_cols, stride_xm, stride_xn, stride_ym,
    ONE_ROW: tl.constexpr, TANH: tl.constexpr, COMPUTE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    # One program handles a tile of x, (BLOCK_M, BLOCK_N).
    rows, cols, full = _locate(n_rows, n_cols, ONE_ROW, BLOCK_M, BLOCK_N)
    x_ptrs = x_ptr + rows * stride_xm + cols * stride_xn
    y_ptrs = y_ptr + rows * stride_ym + cols
    # A mask splits 16-byte loads into single elements, unless the compiler can prove that it never cuts one
    # in two. All tiles but the last are full, and need none: so an odd size costs nothing.
    if full:
        _fwd_tile(x_ptrs, y_ptrs, None, TANH, COMPUTE)
    else:
        _fwd_tile(x_ptrs, y_ptrs, (rows < n_rows) & (cols < n_cols), TANH, COMPUTE)


@triton.jit
def _bwd_tile(dy_ptrs, x_ptrs, dx_ptrs, mask, TANH: tl.constexpr, COMPUTE: tl.constexpr):
    NARROW: tl.constexpr = dx_ptrs.dtype.element_ty.primitive_bitwidth == 16
    dy = tl.load(dy_ptrs, mask=mask).to(COMPUTE)
    x = tl.load(x_ptrs, mask=mask).to(COMPUTE)
    dx = dy * (device.gelu_tanh_grad(x) if TANH else device.gelu_grad(x, NARROW))
    tl.store(dx_ptrs, dx, mask=mask)


@triton.jit(do_not_specialize=["n_rows", "n_cols"])
def _gelu_bwd_kernel(
    dy_ptr, x_ptr, dx_ptr, n_rows, n_cols, stride_dym, stride_dyn, stride_xm, stride_xn, stride_dxm,
    ONE_ROW: tl.constexpr, TANH: tl.constexpr, COMPUTE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    # One program handles a tile of x, (BLOCK_M, BLOCK_N).
    rows, cols, full = _locate(n_rows, n_cols, ONE_ROW, BLOCK_M, BLOCK_N)
    dy_ptrs = dy_ptr + rows * stride_dym + cols * stride_dyn
    x_ptrs = x_ptr + rows * stride_xm + cols * stride_xn
    dx_ptrs = dx_ptr + rows * stride_dxm + cols
    if full:
        _bwd_tile(dy_ptrs, x_ptrs, dx_ptrs, None, TANH, COMPUTE)
    else:
        mask = (rows < n_rows) & (cols < n_cols)
        _bwd_tile(dy_ptrs, x_ptrs, dx_ptrs, mask, TANH, COMPUTE)


# --- plan (the dispatch heuristic) and launch ----------------------------------------------------------------


@functools.cache
def _plan(n_rows, n_cols, dtype):
    """2048 bytes, 128 threads of one 16-byte load each, the tile as wide as x allows; for both passes."""
    block = 2048 // dtype.itemsize
    block_n = block if n_rows == 1 else min(host.power_of_2(n_cols), block)
    return Plan(block // block_n, block_n)


def _launch(plan, tanh, *tensors, kernel=_gelu_fwd_kernel):
    """tensors: of one shape, those that the kernel reads, and the contiguous one that it writes."""
    if all([t.is_contiguous() for t in tensors]):  # one row, in the order of memory
        n_rows, n_cols, strides = 1, tensors[0].numel(), (0, 1) * len(tensors)
    else:
        # a copy where strides allow no view
        tensors = [t.reshape(-1, t.shape[-1]) for t in tensors]
        n_rows, n_cols = tensors[0].shape
        strides = [s for t in tensors for s in (t.stride(0) if n_rows > 1 else 0, t.stride(1))]
    block_m, block_n = plan or _plan(n_rows, n_cols, tensors[0].dtype)
    host.run(
        kernel, (host.cdiv(n_rows, block_m) * host.cdiv(n_cols, block_n),), tensors,
        n_rows, n_cols, *strides[:-1],
        ONE_ROW=n_rows == 1, TANH=tanh, COMPUTE=host.compute_dtype(tensors[0].dtype),
        BLOCK_M=block_m, BLOCK_N=block_n, num_warps=4,
    )  # fmt: skip


def _launch_cuda(plan, tanh, x, y):
    # the kernels count elements in memory's order
    host.load_cuda(__file__).forward(x.contiguous(), y, tanh, True)


# --- forward and backward ------------------------------------------------------------------------------------


def _empty(x, approximate="none"):
    """y or dx, before it is written."""
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _forward(x, approximate, plan=None, launch=_launch):
    y = _empty(x)
    if y.numel() > 0:
        launch(plan, approximate == "tanh", x, y)
    return y


def _save(ctx, x, approximate):
    ctx.save_for_backward(x)
    ctx.approximate = approximate


def _backward(dy, x, approximate, plan=None):
    dx = _empty(x)
    if dx.numel() > 0:
        # y.sum().backward() sends a dy of strides 0, which is read as it is
        _launch(plan, approximate == "tanh", dy, x, dx, kernel=_gelu_bwd_kernel)
    return dx


class _GELU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, approximate, plan, launch):
        _save(ctx, x, approximate)
        ctx.plan = plan
        return _forward(x, approximate, plan, launch)

    @staticmethod
    @host.once
    def backward(ctx, dy):
        return _backward(dy, *ctx.saved_tensors, ctx.approximate, ctx.plan), None, None, None


# --- the calls -----------------------------------------------------------------------------------------------


@host.remembered
def _check(name, x, approximate):
    if approximate not in ("none", "tanh"):
        raise ValueError(f"{name}: approximate must be 'none' (erf) or 'tanh', got {approximate!r}")
    host.check_tensors(name, "gelu_eager", x=(x, "... "))  # of any shape


def _call(name, x, approximate, plan=None, launch=_launch):
    goes_by_op = _check(name, x, approximate)
    if goes_by_op:
        return gelu_op(x, approximate)
    return host.call(name, "gelu_eager", _GELU, _forward, (x,), approximate, plan, launch)


def gelu_triton(
    x: torch.Tensor, approximate: str = "none", *, plan: Plan | None = None
) -> torch.Tensor:
    """gelu(x) in one Triton kernel, with its gradient; `approximate` as in torch: "none" (erf) or "tanh".

    x: any shape and strides. Returns y of x's shape, contiguous.
    plan: a Plan in place of the one chosen, for tuning; torch.compile leaves it out.
    Works under torch.compile (as the op fused_kernels::gelu), autocast and CUDA graphs; not under
    torch.func, torch.vmap or forward-mode AD, nor twice differentiable: these raise.
    Raises TypeError for a wrong dtype, ValueError for a wrong device or an unknown `approximate`.
    """
    return _call("gelu_triton", x, approximate, plan)


def gelu_cuda(x: torch.Tensor, approximate: str = "none") -> torch.Tensor:
    """gelu(x) in one CUDA kernel; the gradient comes from the Triton kernel.

    Shapes, dtypes and errors as for gelu_triton. Needs nvcc and a C++ compiler at the first call.
    """
    return _call("gelu_cuda", x, approximate, launch=_launch_cuda)


@host.custom_op("fused_kernels::gelu")
def gelu_op(x: torch.Tensor, approximate: str = "none") -> torch.Tensor:
    """gelu for torch.compile and torch.export: one node of the graph, which nothing looks into."""
    _check("gelu_op", x, approximate)
    return _forward(x, approximate)


@host.custom_op("fused_kernels::gelu_backward")
def _gelu_backward_op(dy: torch.Tensor, x: torch.Tensor, approximate: str) -> torch.Tensor:
    return _backward(dy, x, approximate)


gelu_op.register_fake(_empty)
_gelu_backward_op.register_fake(lambda dy, x, approximate: _empty(x))
gelu_op.register_autograd(
    lambda ctx, dy: (_gelu_backward_op(dy, *ctx.saved_tensors, ctx.approximate), None),
    setup_context=lambda ctx, inputs, output: _save(ctx, *inputs),
)
