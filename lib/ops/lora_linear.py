# SPDX-License-Identifier: MIT
# Copyright (c) 2026 The Fused Kernels authors; Fused Kernels 0.1.0, lib/ops/lora_linear.py
"""lora_linear: y = act(x Wᵀ + b + s (x Aᵀ) Bᵀ), a frozen linear layer and its low-rank update, in two kernels.

Shapes    x: (..., K); W: (N, K), frozen; A: (R, K); B: (N, R), rank R up to 256; b: (N,) or None; any strides.
          s: a Python float, alpha / R. y: (..., N), contiguous.
Act       identity, relu, gelu (erf), gelu_tanh, silu or sigmoid.
Dtypes    float16, bfloat16 (summed in float32), float32, float64. Tensor cores read 10 bits of a float32's
          mantissa (tf32). So each float32 is split into two tf32 and multiplied in three products (3xTF32), as
          accurate as float32 units and faster; allow_tf32=True uses one product. Numbers within 1/4096 of the
          largest float32 become infinite. cuBLAS's products, here u and those of the backward pass, follow
          torch.backends.cuda.matmul.allow_tf32.
Work      2M(NK + KR + RN) FLOPs forward, for M rows; backward as many, and 2M(KR + RN) more: there is no dW.
Traffic   Beyond what the products read, for elements of s bytes: MNs, y alone. Eager writes two products,
          scales one, adds them and activates, 1 + 1 + 2 + 3 + 2 = 9MNs; cuBLAS adding in place, 5MNs.
Design    cuBLAS computes u = x Aᵀ. With so few columns it is a pass over x, as memory-bound as a copy, and
          cuBLAS has kernels that split K where M is small. Inside the other kernel, each of the N / BLOCK_N
          programs of a row of tiles would compute u again, on tensor cores that may take as long for 16 columns
          as for 64. Then one kernel sums x Wᵀ over K, adds one short product, (s u) Bᵀ, to the same sums, and
          applies bias, activation and the only rounding in registers. On Hopper one program per SM goes from
          tile to tile (a persistent kernel), and TMA moves x, W and y.
Backward  One kernel computes dz = dy·act'(z) and sums it over rows to db; a second adds up the partial sums.
          cuBLAS does the rest: dB = s dzᵀ u, du = s dz B, dA = duᵀ x, dx = dz W + du A. Saves x, u, and y (for
          relu and sigmoid) or z (others), each only if a requested gradient needs it.
Rounding  u is rounded to x's dtype, as eager rounds x Aᵀ, and so is s u. In float16 s u has to be in range; no
          digit is lost if s is a power of 2. The sum of both products is rounded once; eager rounds five times.
Copy it   by `make copy OP=lora_linear TO=folder`, or take _host.py and _device.py along. MIT licence.
"""

import functools
import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

if __package__:  # shared by the ops: `device` in kernels, `host` around them
    from . import _device as device
    from . import _host as host
else:  # the same, in a plain folder
    import _device as device
    import _host as host


class Tile(NamedTuple):
    """A piece of y, m x n, made of pieces of x, m x k, and of W, n x k; its warps and stages."""

    m: int
    n: int
    k: int
    num_warps: int
    num_stages: int


class Plan(NamedTuple):
    """How one call is launched. backward: (BLOCK_M, BLOCK_N, strips) of dz, or None to have it chosen."""

    tile: Tile | None = None
    way: str = "pointers"  # or "tma", which is that where it cannot be, or "cublas", without a tile
    backward: tuple[int, int, int] | None = None


def lora_linear_eager(
    x: torch.Tensor, weight: torch.Tensor, lora_a: torch.Tensor, lora_b: torch.Tensor,
    bias: torch.Tensor | None = None, scale: float = 1.0, activation: str = "identity",
) -> torch.Tensor:  # fmt: skip
    delta = (x @ lora_a.T) @ lora_b.T
    return host.ACTIVATIONS[activation](F.linear(x, weight, bias) + scale * delta)


@triton.jit
def _times_sigmoid(z, v):
    # z / (1 + exp(-v))
    return device.fast_divide(z, 1.0 + device.fast_exp(-v))


@triton.jit
def _act(z, ACTIVATION: tl.constexpr):
    if ACTIVATION == "relu":
        z = tl.where(z < 0, 0.0, z)  # tl.maximum(z, 0) would turn NaN into 0
    elif ACTIVATION == "gelu":
        z = device.gelu(z)
    elif ACTIVATION == "gelu_tanh":
        # z·sigmoid(2u), 2u = 2√(2/π)·(z + 0.044715 z³): no overflow, where tanh as (e²ᵘ-1)/(e²ᵘ+1) has one
        z = _times_sigmoid(z, z * (1.5957691216057308 + 0.07135481627260025 * z * z))
    elif ACTIVATION == "silu":
        z = _times_sigmoid(z, z)
    elif ACTIVATION == "sigmoid":
        z = _times_sigmoid(tl.full(z.shape, 1.0, z.dtype), z)
    return z


@triton.jit
def _place(tile, n_rows, n_cols, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    # First row and column of tile number `tile`, and all of them.
    pid_m, pid_n = device.place_of(tile, n_rows, n_cols, GROUP, BLOCK_M, BLOCK_N)
    row, col = pid_m * BLOCK_M, pid_n * BLOCK_N
    # int64: row * stride passes 2**31 from 4 GiB of bfloat16 on
    rows, cols = row.to(tl.int64) + tl.arange(0, BLOCK_M), col.to(tl.int64) + tl.arange(0, BLOCK_N)
    return row, col, rows, cols


@triton.jit
def _low_rank(
    u_ptr, lora_b_ptr, rows, cols, n_rows, n_cols, rank, scale, stride_bn, stride_br, piece,
    BLOCK_R: tl.constexpr,
):  # fmt: skip
    # Piece number `piece` of s u, (BLOCK_M, BLOCK_R), and of Bᵀ, (BLOCK_R, BLOCK_N).
    ranks = piece * BLOCK_R + tl.arange(0, BLOCK_R)
    u_mask = (rows < n_rows)[:, None] & (ranks < rank)[None, :]
    u = tl.load(u_ptr + rows[:, None] * rank + ranks[None, :], mask=u_mask, other=0.0)
    if u.dtype != tl.float64:  # to which a float of Python's does not come whole: scaled before
        u = (u.to(tl.float32) * scale).to(u.dtype)
    b_offsets = ranks.to(tl.int64)[:, None] * stride_br + cols[None, :] * stride_bn
    b_mask = (ranks < rank)[:, None] & (cols < n_cols)[None, :]
    return u, tl.load(lora_b_ptr + b_offsets, mask=b_mask, other=0.0)


@triton.jit
def _finish_part(
    z, bias_ptr, y_out, z_out, row, col, n_rows, n_cols, ACTIVATION: tl.constexpr, TMA: tl.constexpr
):
    # The epilogue: bias, activation and rounding while the sums are in registers. y_out and z_out, or None, are
    # descriptors (TMA leaves out by itself what lies outside) or pointers.
    cols = col + tl.arange(0, z.shape[1])
    if bias_ptr is not None:
        z += tl.load(bias_ptr + cols, mask=cols < n_cols, other=0.0).to(z.dtype)[None, :]
    y = _act(z, ACTIVATION)
    if TMA:
        y_out.store([row, col], y.to(y_out.dtype))
        if z_out is not None:
            z_out.store([row, col], z.to(z_out.dtype))
    else:
        rows = row + tl.arange(0, z.shape[0]).to(tl.int64)
        offsets = rows[:, None] * n_cols + cols[None, :]
        mask = (rows < n_rows)[:, None] & (cols < n_cols)[None, :]
        tl.store(y_out + offsets, y, mask=mask)
        if z_out is not None:
            tl.store(z_out + offsets, z, mask=mask)


@triton.jit
def _finish(
    z, bias_ptr, y_out, z_out, row, col, n_rows, n_cols,
    ACTIVATION: tl.constexpr, HALVES: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    if HALVES:
        left, right = device.left_and_right(z)
        _finish_part(left, bias_ptr, y_out, z_out, row, col, n_rows, n_cols, ACTIVATION, TMA)
        col += z.shape[1] // 2
        _finish_part(right, bias_ptr, y_out, z_out, row, col, n_rows, n_cols, ACTIVATION, TMA)
    else:
        _finish_part(z, bias_ptr, y_out, z_out, row, col, n_rows, n_cols, ACTIVATION, TMA)


@triton.jit(do_not_specialize=["n_rows"])
def _lora_linear_kernel(
    x_ptr, w_ptr, u_ptr, lora_b_ptr, bias_ptr, y_ptr, z_ptr, n_rows, n_cols, n_inner, rank, scale,
    stride_xm, stride_xk, stride_wn, stride_wk, stride_bn, stride_br,
    ACTIVATION: tl.constexpr, PRECISION: tl.constexpr, COMPUTE: tl.constexpr, GROUP: tl.constexpr,
    HALVES: tl.constexpr, PIECES: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    # One program handles one tile of y, (BLOCK_M, BLOCK_N), in steps of BLOCK_K. z_ptr, bias_ptr may be None.
    row, col, rows, cols = _place(tl.program_id(0), n_rows, n_cols, GROUP, BLOCK_M, BLOCK_N)
    inner = tl.arange(0, BLOCK_K).to(tl.int64)
    x_ptrs = x_ptr + rows[:, None] * stride_xm + inner[None, :] * stride_xk
    w_ptrs = w_ptr + inner[:, None] * stride_wk + cols[None, :] * stride_wn
    row_mask, col_mask = (rows < n_rows)[:, None], (cols < n_cols)[None, :]

    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=COMPUTE)
    for k in range(0, n_inner, BLOCK_K):
        inside = tl.arange(0, BLOCK_K) < n_inner - k  # masked-off columns must contribute 0
        x = tl.load(x_ptrs, mask=row_mask & inside[None, :], other=0.0)
        w = tl.load(w_ptrs, mask=inside[:, None] & col_mask, other=0.0)
        total = device.dot(x, w, total, PRECISION, COMPUTE)
        x_ptrs += tl.cast(stride_xk, tl.int64) * BLOCK_K
        w_ptrs += tl.cast(stride_wk, tl.int64) * BLOCK_K
    for piece in tl.range(0, PIECES, num_stages=1):
        u, b = _low_rank(
            u_ptr, lora_b_ptr, rows, cols, n_rows, n_cols, rank, scale, stride_bn, stride_br, piece, BLOCK_R
        )  # fmt: skip
        total = device.dot(u, b, total, PRECISION, COMPUTE)
    _finish(total, bias_ptr, y_ptr, z_ptr, row, col, n_rows, n_cols, ACTIVATION, HALVES, False)


@triton.jit(do_not_specialize=["n_rows"])
def _lora_linear_tma_kernel(
    x_desc, w_desc, u_ptr, lora_b_ptr, bias_ptr, y_desc, z_desc, n_rows, n_cols, n_inner, rank, scale,
    stride_bn, stride_br, ACTIVATION: tl.constexpr, GROUP: tl.constexpr,
    HALVES: tl.constexpr, PIECES: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    # One program handles every n-th tile of y, (BLOCK_M, BLOCK_N), where n programs run: one for each SM.
    # A descriptor holds address, sizes and strides: one thread asks for a whole piece, with zeros outside.
    n_tiles = tl.cdiv(n_rows, BLOCK_M) * tl.cdiv(n_cols, BLOCK_N)
    for tile in tl.range(tl.program_id(0), n_tiles, tl.num_programs(0)):
        row, col, rows, cols = _place(tile, n_rows, n_cols, GROUP, BLOCK_M, BLOCK_N)
        total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for k in range(0, n_inner, BLOCK_K):
            total = device.dot(x_desc.load([row, k]), w_desc.load([col, k]).T, total)
        # Not before the products, where the sums leave no registers to hold u and B.
        for piece in tl.range(0, PIECES, num_stages=1):
            u, b = _low_rank(
                u_ptr, lora_b_ptr, rows, cols, n_rows, n_cols, rank, scale, stride_bn, stride_br, piece, BLOCK_R
            )  # fmt: skip
            total = device.dot(u, b, total)
        _finish(total, bias_ptr, y_desc, z_desc, row, col, n_rows, n_cols, ACTIVATION, HALVES, True)


# --- plan (the dispatch heuristic) and launch ----------------------------------------------------------------

# Tiles from large to small, by what multiplies: tensor cores on 16 bits ("half"), on tf32 or three times tf32,
# or on float64 ("double"). They are tuned on an H200. The two of other GPUs are correct, not tuned.
_TILES = {
    "half": (
        Tile(128, 256, 64, 8, 3), Tile(128, 128, 64, 8, 4), Tile(64, 128, 64, 4, 4),
        Tile(64, 64, 64, 4, 4), Tile(16, 64, 128, 4, 4), Tile(16, 16, 128, 2, 4),
    ),
    "tf32": (Tile(128, 128, 32, 8, 3), Tile(64, 64, 32, 4, 3), Tile(16, 16, 64, 2, 3)),
    "tf32x3": (
        Tile(128, 64, 32, 4, 3), Tile(64, 64, 32, 4, 3), Tile(16, 32, 64, 4, 3), Tile(16, 16, 64, 4, 3),
    ),
    "double": (Tile(64, 64, 16, 8, 3), Tile(16, 16, 16, 2, 3)),
    "elsewhere": (Tile(64, 64, 32, 4, 3), Tile(16, 16, 64, 4, 3)),
    "turing": (Tile(64, 64, 16, 4, 1), Tile(16, 16, 32, 4, 1)),  # Triton has no tensor cores there
}  # fmt: skip
_GROUP = 8  # rows of tiles that programs walk through together
_HALVES_FROM = 256  # a tile this wide is stored in halves, which leaves shared memory for x and W
_TMA_FROM = 2**27  # M·N·K; below it descriptors cost the host more than they save
_MAX_RANK = 256
_MOST_RANKS = 64  # columns of u and B that are multiplied at once: all of a small rank
# Activations of cuBLAS's way, written into a tensor, which may be z itself
_ACTIVATIONS_INTO = {
    # aten.relu.out allocates a tensor; clamp_min does not, and leaves NaN as it is
    "relu": functools.partial(torch.clamp_min, min=0),
    "gelu": torch.ops.aten.gelu.out,
    "gelu_tanh": functools.partial(torch.ops.aten.gelu.out, approximate="tanh"),
    "silu": torch.ops.aten.silu.out,
    "sigmoid": torch.ops.aten.sigmoid.out,
}


def _pick_tile(n_rows, n_cols, dtype, allow_tf32, gpu):
    """The first tile that is not wider than y and gives work to most SMs; else the last."""
    kind, major = host.kind_of(dtype, allow_tf32), host.generation(gpu)
    # desktops' Blackwell, 12, has no more shared memory than Ampere
    if kind != "double" and not 9 <= major < 12:
        kind = "turing" if major < 8 else "elsewhere"
    for tile in _TILES[kind]:
        sizes = (tile.m, n_rows), (tile.n, n_cols)
        if any(block >= 2 * max(16, host.power_of_2(size)) for block, size in sizes):
            continue
        n_tiles = host.cdiv(n_rows, tile.m) * host.cdiv(n_cols, tile.n)
        if n_tiles >= 0.75 * host.n_multiprocessors(gpu):
            break
    return tile


@functools.lru_cache(4096)
def _plan(n_rows, n_cols, n_inner, dtype, allow_tf32, gpu):
    tile = _pick_tile(n_rows, n_cols, dtype, allow_tf32, gpu)
    large = n_rows * n_cols * n_inner >= _TMA_FROM and tile.m >= 64 <= tile.n
    has_tma = 9 <= host.generation(gpu) < 12
    return Plan(tile, "tma" if large and has_tma and dtype.itemsize == 2 else "pointers")


def _launch(plan, x, weight, u, lora_b, bias, y, z, scale, activation, allow_tf32):
    """Write y, and z unless it is None."""
    if plan.way == "cublas":
        _launch_cublas(x, weight, u, lora_b, bias, y, z, scale, activation)
        return
    tile, (n_rows, n_cols), n_inner, rank = plan.tile, y.shape, x.shape[1], u.shape[1]
    n_tiles = host.cdiv(n_rows, tile.m) * host.cdiv(n_cols, tile.n)
    halves = tile.n >= _HALVES_FROM
    # tl.dot takes no less than 16
    block_r = min(tile.k, _MOST_RANKS, max(16, host.power_of_2(rank)))
    how = {
        "ACTIVATION": activation, "GROUP": _GROUP, "HALVES": halves, "PIECES": host.cdiv(rank, block_r),
        "BLOCK_R": block_r, "BLOCK_M": tile.m, "BLOCK_N": tile.n, "BLOCK_K": tile.k,
        "num_warps": tile.num_warps, "num_stages": tile.num_stages,
    }  # fmt: skip
    by_tma = plan.way == "tma" and x.itemsize == 2 and n_inner > 0
    by_tma = by_tma and host.tma_reads(x) and host.tma_reads(weight) and host.tma_reads(y)
    if not by_tma:
        u = u * scale if u.dtype == torch.float64 else u
        precision = "ieee" if host.generation(x.device) < 8 else "tf32" if allow_tf32 else "tf32x3"
        host.run(
            _lora_linear_kernel, (n_tiles,), (x, weight, u, lora_b, bias, y, z),
            n_rows, n_cols, n_inner, rank, float(scale),
            *x.stride(), *weight.stride(), *lora_b.stride(),
            PRECISION=precision, COMPUTE=host.compute_dtype(x.dtype), **how,
        )  # fmt: skip
        return
    out = [tile.m, tile.n // 2 if halves else tile.n]
    host.run(
        _lora_linear_tma_kernel, (min(n_tiles, host.n_multiprocessors(x.device)),),
        (
            TensorDescriptor(x, x.shape, x.stride(), [tile.m, tile.k]),
            TensorDescriptor(weight, weight.shape, weight.stride(), [tile.n, tile.k]), u, lora_b, bias,
            TensorDescriptor(y, y.shape, y.stride(), out),
            None if z is None else TensorDescriptor(z, z.shape, z.stride(), out),
        ),
        n_rows, n_cols, n_inner, rank, float(scale), *lora_b.stride(), **how,
    )  # fmt: skip


def _launch_cublas(x, weight, u, lora_b, bias, y, z, scale, activation):
    """Both products by cuBLAS, the second added in place, and the activation in place."""
    total = y if z is None else z
    x, weight = host.for_cublas(x), host.for_cublas(weight)
    if bias is None:
        torch.mm(x, weight.t(), out=total)
    else:
        torch.addmm(bias, x, weight.t(), out=total)
    total.addmm_(u, host.for_cublas(lora_b).t(), alpha=scale)
    if activation != "identity":
        _ACTIVATIONS_INTO[activation](total, out=y)


def _product(a, b, scale=1.0, out=None):
    """scale (a b), scaled before it is rounded, in one launch; beta=0: what memory held is not read.

    Into given memory, which autocast leaves in its dtype.
    """
    a, b = host.for_cublas(a), host.for_cublas(b)
    out = a.new_empty(a.shape[0], b.shape[1]) if out is None else out
    # without a scale by mm: PyTorch then calls cuBLAS in another way, with faster kernels for a narrow b
    return torch.mm(a, b, out=out) if scale == 1 else out.addmm_(a, b, beta=0, alpha=scale)


# --- forward and backward ------------------------------------------------------------------------------------


def _empty(x, weight, lora_a, save_z):
    """y; u = x Aᵀ, (M, R); and z, (M, N), if it is to be saved, else None; before they are written."""
    n_rows, n_cols = math.prod(x.shape[:-1]), weight.shape[0]
    y, u = x.new_empty(*x.shape[:-1], n_cols), x.new_empty(n_rows, lora_a.shape[0])
    return y, u, x.new_empty(n_rows, n_cols) if save_z else None


def _forward(
    x, weight, lora_a, lora_b, bias, scale, activation, allow_tf32, plan=None, save_z=False
):
    y, u, z = _empty(x, weight, lora_a, save_z)
    n_rows, (n_cols, n_inner) = u.shape[0], weight.shape
    rows = x.reshape(n_rows, n_inner)  # a view if x's strides allow
    _product(rows, lora_a.t(), out=u)
    if y.numel() > 0:
        bias, out = None if bias is None else bias.contiguous(), y.view(n_rows, n_cols)
        plan = plan or _plan(n_rows, n_cols, n_inner, x.dtype, allow_tf32, x.device)
        _launch(plan, rows, weight, u, lora_b, bias, out, z, scale, activation, allow_tf32)
    return y, u, z


def _save(ctx, tensors, u, y, z, how, all_inputs=False):
    """x for dA; W and A for dx; B for both; u for dB; y or z for dz.

    all_inputs: save all, to compute z again, and so that a second derivative reaches them and is refused.
    """
    x, weight, lora_a, lora_b, bias = tensors
    ctx.how = _, activation, _ = how
    # of the registered op, torch leaves out a bias that is None, the default
    has_dx, _, has_da, has_db, has_dbias = (*ctx.needs_input_grad, False)[:5]
    ctx.needs_grad = [has_dx, has_da, has_db, has_dbias]
    ctx.save_for_backward(
        x if has_da or all_inputs else None, weight if has_dx or all_inputs else None,
        lora_a if has_dx or all_inputs else None, lora_b if has_dx or has_da or all_inputs else None,
        u if has_db else None, host.saved_of(activation, y, z), bias if all_inputs else None,
    )  # fmt: skip


def _backward(dy, x, weight, lora_a, lora_b, u, saved, scale, activation, needs_grad, plan=None):
    """dx, dlora_a, dlora_b, dbias, each None unless needed; what none of them takes is None."""
    has_dx, has_da, has_db, has_dbias = needs_grad
    dy_rows = dy.reshape(math.prod(dy.shape[:-1]), dy.shape[-1])
    saved = None if saved is None else saved.reshape(dy_rows.shape)
    has_dz = has_dx or has_da or has_db
    dz, dbias = host.dz_of(dy_rows, saved, activation, has_dz, has_dbias, plan and plan.backward)
    dx = da = db = None
    if has_db:
        db = _product(dz.t(), u, scale)
    if has_dx or has_da:
        du = _product(dz, lora_b, scale)
    if has_da:
        da = _product(du.t(), x.reshape(du.shape[0], x.shape[-1]))
    if has_dx:
        # the small summand is rounded first, and added in float32 to the sums of the large one
        dx = _product(du, lora_a).addmm_(host.for_cublas(dz), host.for_cublas(weight))
        dx = dx.view(*dy.shape[:-1], weight.shape[1])
    return dx, da, db, dbias


class _LoRALinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, lora_a, lora_b, bias, scale, activation, allow_tf32, plan):
        tensors, how = (x, weight, lora_a, lora_b, bias), (scale, activation, allow_tf32)
        y, u, z = _forward(*tensors, *how, plan, activation in host.OF_Z)
        _save(ctx, tensors, u, y, z, how)
        ctx.plan = plan
        ctx.set_materialize_grads(False)  # no zeros for the gradients of u and z
        return y, u, z  # u and z too: by them a second derivative finds its way to the inputs

    @staticmethod
    @host.once
    def backward(ctx, dy, *_):
        if dy is None:  # y is used, and has no gradient all the same
            return (None,) * 9
        how = *ctx.how[:2], ctx.needs_grad, ctx.plan
        dx, da, db, dbias = _backward(dy, *ctx.saved_tensors[:6], *how)
        return dx, None, da, db, dbias, *[None] * 4


# --- the calls -----------------------------------------------------------------------------------------------


@host.remembered
def _check(name, x, weight, lora_a, lora_b, bias, scale, activation, trains_weight):
    host.check_activation(name, activation)
    if not isinstance(scale, host.NUMBERS):
        got = type(scale).__name__
        raise TypeError(f"{name}: scale must be a Python number, alpha / rank, got {got}")
    if trains_weight:
        _refuse_to_train_weight(name)
    if getattr(lora_a, "shape", (0, 0))[1:] == getattr(x, "shape", (0,))[-1:]:
        _check_rank(name, lora_a.shape[0])
    tensors = {
        "x": (x, "... K"), "weight": (weight, "N K"), "lora_a": (lora_a, "R K"), "lora_b": (lora_b, "N R"),
    } | ({} if bias is None else {"bias": (bias, "N")})  # fmt: skip
    host.check_tensors(name, "lora_linear_eager", **tensors)


def _check_rank(name, rank):
    if not 1 <= rank <= _MAX_RANK:
        better = "is better trained as a weight of its own, by torch.nn.functional.linear"
        raise ValueError(
            f"{name}: rank must be 1 to {_MAX_RANK}, got {rank}; a wider update {better}"
        )


def _refuse_to_train_weight(name):
    raise ValueError(
        f"{name}: weight requires grad, and this op has no gradient for it; freeze it with "
        "weight.requires_grad_(False), or train it with torch.nn.functional.linear"
    )


def _trains(weight):
    return getattr(weight, "requires_grad", False) and torch.is_grad_enabled()


def _call(name, tensors, scale, activation, allow_tf32, plan):
    tensors = host.autocast(*tensors)
    goes_by_op = _check(name, *tensors, scale, activation, _trains(tensors[1]))
    if goes_by_op:
        save_z = activation in host.OF_Z and host.needs_autograd(*tensors)
        return lora_linear_op(*tensors, scale, activation, allow_tf32, save_z)[0]
    how = scale, activation, allow_tf32, plan
    return host.call(name, "lora_linear_eager", _LoRALinear, _forward, tensors, *how)[0]


def lora_linear_triton(
    x: torch.Tensor, weight: torch.Tensor, lora_a: torch.Tensor, lora_b: torch.Tensor,
    bias: torch.Tensor | None = None, scale: float = 1.0, activation: str = "identity",
    allow_tf32: bool = False, *, plan: Plan | None = None,
) -> torch.Tensor:  # fmt: skip
    """act(x Wᵀ + b + s (x Aᵀ) Bᵀ), with gradients for x, lora_a, lora_b and bias; weight is frozen.

    x: (..., K), weight: (N, K), lora_a: (R, K), lora_b: (N, R), bias: (N,) or None, any strides, all of one
    dtype and device; scale: a Python number, alpha / R; activation: identity, relu, gelu, gelu_tanh, silu or
    sigmoid; allow_tf32: whether float32 may be rounded to tf32. Returns y, (..., N), contiguous.
    plan: a Plan in place of the one chosen, for tuning; torch.compile leaves it out.
    Works under torch.compile (as the op fused_kernels::lora_linear), autocast (in its dtype, as torch's
    products) and CUDA graphs; not under torch.func, torch.vmap or forward-mode AD, nor twice
    differentiable: these raise.
    Raises TypeError for a wrong dtype; ValueError for a wrong shape, rank, device or activation, and for a
    weight that requires grad while gradients are recorded.
    """
    tensors = x, weight, lora_a, lora_b, bias
    return _call("lora_linear_triton", tensors, scale, activation, allow_tf32, plan)


def lora_linear_cublas(
    x: torch.Tensor, weight: torch.Tensor, lora_a: torch.Tensor, lora_b: torch.Tensor,
    bias: torch.Tensor | None = None, scale: float = 1.0, activation: str = "identity",
) -> torch.Tensor:  # fmt: skip
    """The same without a fused kernel: cuBLAS, cuBLAS adding in place, and an activation in place.

    What lora_linear_triton has to beat. Shapes, errors and gradients are its; float32 is multiplied as
    torch.backends.cuda.matmul.allow_tf32 says. Not for torch.compile, which gets lora_linear_triton's op.
    """
    tensors, plan = (x, weight, lora_a, lora_b, bias), Plan(way="cublas")
    return _call("lora_linear_cublas", tensors, scale, activation, False, plan)


def _flops(x, weight, lora_a, lora_b, *_):
    return 2 * math.prod(x[:-1]) * (math.prod(weight) + math.prod(lora_a) + math.prod(lora_b))


def _flops_backward(dy, x, weight, lora_a, lora_b, u, saved, scale, activation, needs_grad):
    has_dx, has_da, has_db, _ = needs_grad
    of_b = (has_dx or has_da) and math.prod(lora_b)  # for the gradient of x Aᵀ
    of_b += has_db and dy[-1] * u[-1]
    of_a = has_dx and math.prod(weight) + math.prod(lora_a)
    of_a += has_da and lora_b[1] * x[-1]
    return 2 * math.prod(dy[:-1]) * (of_a + of_b)


@host.custom_op("fused_kernels::lora_linear", flops=_flops)
def lora_linear_op(
    x: torch.Tensor, weight: torch.Tensor, lora_a: torch.Tensor, lora_b: torch.Tensor,
    bias: torch.Tensor | None = None, scale: float = 1.0, activation: str = "identity",
    allow_tf32: bool = False, save_z: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """lora_linear for torch.compile and torch.export: one node of the graph, which nothing looks into.

    Returns y, and u = x Aᵀ and z = x Wᵀ + b + s u Bᵀ for the backward pass. Without save_z z is empty, and the
    backward pass of gelu, gelu_tanh and silu computes it again.
    """
    tensors, how = (x, weight, lora_a, lora_b, bias), (scale, activation)
    _check("lora_linear_op", *tensors, *how, _trains(weight))
    return host.none_as_empty(x, _forward(*tensors, *how, allow_tf32, save_z=save_z))


@host.custom_op("fused_kernels::lora_linear_backward", flops=_flops_backward)
def _lora_linear_backward_op(
    dy: torch.Tensor, x: torch.Tensor | None, weight: torch.Tensor | None, lora_a: torch.Tensor | None,
    lora_b: torch.Tensor | None, u: torch.Tensor | None, saved: torch.Tensor | None,
    scale: float, activation: str, needs_grad: list[bool],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    grads = _backward(dy, x, weight, lora_a, lora_b, u, saved, scale, activation, needs_grad)
    return host.none_as_empty(dy, grads)


@lora_linear_op.register_fake
def _(
    x, weight, lora_a, lora_b, bias=None, scale=1.0, activation="identity", allow_tf32=False, save_z=False
):  # fmt: skip
    return host.none_as_empty(x, _empty(x, weight, lora_a, save_z))


@_lora_linear_backward_op.register_fake
def _(dy, x, weight, lora_a, lora_b, u, saved, scale, activation, needs_grad):
    has_dx, has_da, has_db, has_dbias = needs_grad
    n_cols = dy.shape[-1]
    return (
        dy.new_empty((*dy.shape[:-1], weight.shape[1]) if has_dx else 0),
        dy.new_empty((lora_b.shape[1], x.shape[-1]) if has_da else 0),
        dy.new_empty((n_cols, u.shape[1]) if has_db else 0),
        dy.new_empty(n_cols if has_dbias else 0),
    )


def _setup_context(ctx, inputs, output):
    (*tensors, scale, activation, allow_tf32, save_z), (y, u, z) = inputs, output
    ctx.mark_non_differentiable(u, z)
    if ctx.needs_input_grad[1]:
        _refuse_to_train_weight("lora_linear_op")
    how = scale, activation, allow_tf32
    _save(ctx, tensors, u, y, z if save_z else None, how, all_inputs=True)


@host.once
def _op_backward(ctx, dy, *_):
    *tensors, u, saved, bias = ctx.saved_tensors
    scale, activation, allow_tf32 = ctx.how
    if saved is None and activation != "identity":
        saved = lora_linear_op(*tensors, bias, scale, "identity", allow_tf32)[0]
    grads = _lora_linear_backward_op(dy, *tensors, u, saved, scale, activation, ctx.needs_grad)
    dx, da, db, dbias = (g if needed else None for g, needed in zip(grads, ctx.needs_grad))
    return dx, None, da, db, dbias, *[None] * 4


lora_linear_op.register_autograd(_op_backward, setup_context=_setup_context)


class LoRALinear(torch.nn.Module):
    """A linear layer, frozen, and beside it s B A, trained: act(x Wᵀ + b + s (x Aᵀ) Bᵀ), s = alpha / rank.

    base: a torch.nn.Linear; it becomes part of this module, and its weight and bias are frozen. lora_a,
    (rank, K), begins as a Linear's weight does, lora_b, (N, rank), as zeros: so y begins as act(base(x)).
    lora_dtype: theirs, where it is not that of the base: float32 beside a base of 16 bits keeps what small
    steps add; the product is computed in the base's, and their gradients come in their own.
    """

    def __init__(self, base, rank, alpha, activation="identity", lora_dtype=None):
        super().__init__()
        if not isinstance(base, torch.nn.Linear) or base.weight.dtype not in host.DTYPES:
            got = base if isinstance(base, torch.nn.Module) else type(base).__name__
            raise TypeError(
                f"LoRALinear: base must be a torch.nn.Linear of a floating-point dtype, got {got}; "
                "LoRALinear.from_features makes one"
            )
        if type(rank) is not int:  # True is an int, too
            raise TypeError(f"LoRALinear: rank must be an int from 1 to {_MAX_RANK}, got {rank!r}")
        _check_rank("LoRALinear", rank)
        if isinstance(alpha, bool) or not isinstance(alpha, (int, float)):
            wrong = f"alpha must be a Python number, as 2 * rank, got {alpha!r}"
            raise TypeError(f"LoRALinear: {wrong}")
        host.check_activation("LoRALinear", activation)
        # not base.requires_grad = False, which sets an attribute of the module that nothing reads
        self.base = base.requires_grad_(False)
        like_weight = {"device": base.weight.device, "dtype": lora_dtype or base.weight.dtype}
        # made in their place: Parameter(...).to(device) is no Parameter, and would not be registered
        self.lora_a = torch.nn.Parameter(torch.empty(rank, base.in_features, **like_weight))
        self.lora_b = torch.nn.Parameter(torch.zeros(base.out_features, rank, **like_weight))
        self.rank, self.alpha, self.scale, self.activation = rank, alpha, alpha / rank, activation
        # what has been added to the weight, to be taken out again whatever lora_a and lora_b are by then
        self.register_buffer("_merged_a", None, persistent=False)
        self.register_buffer("_merged_b", None, persistent=False)
        self.reset_parameters()

    @classmethod
    def from_features(
        cls, in_features, out_features, rank, alpha, activation="identity", bias=True, device=None, dtype=None
    ):  # fmt: skip
        """The module around a new torch.nn.Linear(in_features, out_features, bias)."""
        base = torch.nn.Linear(in_features, out_features, bias, device=device, dtype=dtype)
        return cls(base, rank, alpha, activation)

    def reset_parameters(self):
        torch.nn.init.kaiming_uniform_(self.lora_a, a=math.sqrt(5))
        torch.nn.init.zeros_(self.lora_b)

    @property
    def merged(self):
        return self._merged_a is not None

    # What code that expects a torch.nn.Linear reads: of the layer inside
    weight = property(lambda self: self.base.weight)
    bias = property(lambda self: self.base.bias)
    in_features = property(lambda self: self.base.in_features)
    out_features = property(lambda self: self.base.out_features)

    def forward(self, x):
        weight, bias = self.base.weight, self.base.bias
        if not self.merged:
            a, b = self.lora_a, self.lora_b
            if a.dtype != weight.dtype:
                a, b = a.to(weight.dtype), b.to(weight.dtype)
            return lora_linear_triton(x, weight, a, b, bias, self.scale, self.activation)
        if self.training and torch.is_grad_enabled():
            raise RuntimeError(
                "LoRALinear: merged, lora_a and lora_b take no part in the product and get no gradient; call "
                "unmerge() to train, or eval()"
            )
        return host.ACTIVATIONS[self.activation](F.linear(x, weight, bias))

    def merge(self):
        """Add s B A to the base weight, in place: inference then costs one product. Twice is once.

        Added in float32 (float64 in float64), then rounded to the weight's dtype: in bfloat16 what is less than
        1/512 of a weight is lost, or comes out up to twice as large. unmerge() rounds once more.
        Raises ValueError, and leaves the weight as it was, if the sum is not finite: it could not be undone.
        """
        if not self.merged:
            a, b = (t.detach().clone() for t in (self.lora_a, self.lora_b))
            self._add_to_weight(a, b, self.scale)
            self._merged_a, self._merged_b = a, b

    def unmerge(self):
        """Take out of the base weight what merge() has added, up to its rounding; twice is once.

        Keep a copy of the weight beforehand where its bits matter.
        """
        if self.merged:
            self._add_to_weight(self._merged_a, self._merged_b, -self.scale)
            self._merged_a = self._merged_b = None

    @torch.no_grad()
    def _add_to_weight(self, a, b, scale):
        weight = self.base.weight
        wide = torch.promote_types(weight.dtype, torch.float32)
        total = torch.addmm(weight.to(wide), b.to(wide), a.to(wide), alpha=scale).to(weight.dtype)
        if not torch.isfinite(total).all():
            raise ValueError(
                f"LoRALinear: weight + s B A has elements that are not finite in {weight.dtype}, and adding it "
                "could not be undone; look for NaN and infinities in weight, lora_a and lora_b"
            )
        weight.copy_(total)

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        if self.merged:
            raise RuntimeError(
                "LoRALinear: this state_dict would hold s B A twice, in base.weight and as lora_a and lora_b; "
                "call unmerge() first, or save base.state_dict() for inference"
            )
        super()._save_to_state_dict(destination, prefix, keep_vars)

    def _load_from_state_dict(self, *args, **kwargs):
        if self.merged:
            raise RuntimeError(
                "LoRALinear: a state_dict brings a weight without s B A, and unmerge() would take it out "
                "all the same; call unmerge() before loading"
            )
        super()._load_from_state_dict(*args, **kwargs)

    def extra_repr(self):
        return f"rank={self.rank}, alpha={self.alpha}, activation={self.activation!r}, merged={self.merged}"
