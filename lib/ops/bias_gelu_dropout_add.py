# SPDX-License-Identifier: MIT
# Copyright (c) 2026 The Fused Kernels authors; Fused Kernels 0.1.0, lib/ops/bias_gelu_dropout_add.py
"""bias_gelu_dropout_add: y = dropout(gelu_tanh(x + bias), p) + residual, one pass over memory, not four.

Shapes    x, residual, y: (..., N), x and residual with any strides, y contiguous; bias: (N,), or None.
Dtypes    float32, float16 and bfloat16 (computed in float32), also mixed, y then as their sum; and float64.
Traffic   M rows of N elements of s bytes. Forward: fused 3MNs; eager 9MNs and a mask.
          Backward: fused 3MNs (dy, x, dx); the gradient of residual is dy itself, nothing is moved for it.
Dropout   Element i, counted row by row, has 16 random bits: lane i % 8 of Philox4x32-7 (Salmon et al.,
          Parallel Random Numbers: As Easy as 1, 2, 3, 2011) with the seed as key and i // 8 as counter. It is
          dropped where they are below round(65536 p): all bits of a Philox call are used, and p counts in
          1/65536. The mask is a function of seed and i alone: the same for every tile, stride, dtype and GPU.
Backward  dx = dy · keep / (1 - p) · gelu'(x + bias); dbias = dx summed over rows. The mask is drawn again
          from the seed: x, bias and the seed are saved, no mask.
Copy it   by `make copy OP=bias_gelu_dropout_add TO=folder`, or take _host.py and _device.py along. MIT licence.
"""

import functools
import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from triton.language.extra import libdevice

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


def bias_gelu_dropout_add_eager(
    x: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor, p: float = 0.1,
    seed: int | torch.Tensor | None = None, training: bool = True,
) -> torch.Tensor:  # fmt: skip
    z = F.gelu(x if bias is None else x + bias, approximate="tanh")
    if seed is None or not training:
        return F.dropout(z, p, training) + residual
    keep = keep_mask(z.shape, p, seed, z.device)
    keep_share = max(1 - _threshold(p) / 65536, 1 / 65536)  # all dropped: any number but 0 does
    return z * keep / keep_share + residual


def keep_mask(shape: tuple, p: float, seed: int, device="cpu", first: int = 0) -> torch.Tensor:
    """The mask that the kernels draw for `seed`, in plain PyTorch: True where an element is kept.

    first: for a part of a larger tensor, how many elements come before it.
    """
    n, key = math.prod(shape), int(seed)
    group = torch.arange(first // 8, -(-(first + n) // 8), device=device)
    c = [group & 0xFFFFFFFF, group >> 32, torch.zeros_like(group), torch.zeros_like(group)]
    k0, k1 = key & 0xFFFFFFFF, (key >> 32) & 0xFFFFFFFF
    for _ in range(7):
        (h0, l0), (h1, l1) = _mul_32(c[0], 0xD2511F53), _mul_32(c[2], 0xCD9E8D57)
        c = [h1 ^ c[1] ^ k0, l1, h0 ^ c[3] ^ k1, l0]
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    words = torch.stack(c, dim=-1)  # (n / 8, 4)
    lanes = torch.stack([words & 0xFFFF, words >> 16], dim=-1).flatten()[first % 8 :][:n]
    return (lanes >= _threshold(p)).view(shape)


def _mul_32(a, b):
    """High and low 32 bits of a · b; in two steps, as int64 has no room for 64 unsigned bits."""
    low, high = a * (b & 0xFFFF), a * (b >> 16)
    low, carry = low + ((high & 0xFFFF) << 16), high >> 16
    return carry + (low >> 32), low & 0xFFFFFFFF


def _threshold(p):
    """Random bits below it, of 65536 values, drop their element."""
    return round(65536 * p)


@triton.jit
def _exponent(z):
    # -2u·log₂e = -z·(2.302… + 0.102… z²), where u = √(2/π)·(z + 0.044715 z³)
    return z * (-2.302208198144325 - 0.10294323957952347 * (z * z))


@triton.jit
def _reciprocal(x):
    # One approximate instruction: plain division takes care of denormals, seven instructions an element more.
    # Triton's interpreter has no libdevice.
    if x.dtype == tl.float64 or device.INTERPRETED:
        y = 1.0 / x
    else:
        y = libdevice.fast_dividef(tl.full((1, 1), 1.0, tl.float32), x)
    return y


@triton.jit
def _gelu_fast(z):
    # gelu(z) = z·sigmoid(2u), which does not overflow as tanh(u) by (e²ᵘ-1)/(e²ᵘ+1) does
    return z * _reciprocal(1.0 + tl.exp2(_exponent(z)))


@triton.jit
def _gelu_slope(z):
    # s = sigmoid(2u) = 1 / (1 + e⁻²ᵘ); gelu'(z) = s + z·s·(1 - s)·2u'. 1 - s is s·e⁻²ᵘ, as the difference would
    # lose its digits where s is near 1; the minima keep s·s·e⁻²ᵘ and e⁻²ᵘ·z² from being
    # 0·inf, and z = -inf stays NaN.
    e = tl.exp2(tl.minimum(_exponent(z), 100.0))
    s = _reciprocal(1.0 + e)
    squared = tl.minimum(z * z, 1e6)
    return s + z * (s * s) * e * (1.5957691216057308 + 0.21406444881780076 * squared)


@triton.jit
def _keep_tile(seed, threshold, rows, first_col, n_cols, first, EIGHTS: tl.constexpr,
               BLOCK_N: tl.constexpr):  # fmt: skip
    # (BLOCK_M, BLOCK_N): which elements stay, from 16 random bits for each place in the whole tensor.
    # Bits and threshold are compared 16 places higher up, where what is below them cannot change the answer:
    # the upper half of a word is compared as it is.
    least = threshold.to(tl.uint32) << 16
    if EIGHTS:  # n_cols is a multiple of 8: one Philox call for eight neighbours
        columns = (first + first_col) // 8 + tl.arange(0, BLOCK_N // 8)
        group = (rows * (n_cols // 8))[:, None] + columns[None, :]  # int64: counts past 2**31
        a, b, c, d = _philox(seed, group)
        words = tl.join(tl.join(a, c), tl.join(b, d))  # (..., 2, 2): a, b, c, d in order
        bits = tl.join(words << 16, words)
        return tl.reshape(bits, (rows.shape[0], BLOCK_N)) >= least
    index = (first + rows * n_cols)[:, None] + (first_col + tl.arange(0, BLOCK_N))[None, :]
    group, lane = index // 8, index % 8
    a, b, c, d = _philox(seed, group)
    word = tl.where(lane < 4, tl.where(lane < 2, a, b), tl.where(lane < 6, c, d))
    return tl.where(lane % 2 == 0, word << 16, word) >= least


@triton.jit
def _philox(seed, counter):
    # Seven rounds: the fewest that pass every test of the paper, where ten are its margin of safety
    return tl.philox(seed, counter.to(tl.uint32), (counter >> 32).to(tl.uint32), 0, 0, n_rounds=7)


@triton.jit
def _bias_gelu_dropout_add_fwd_tile(
    x_ptrs, bias, residual_ptrs, y_ptrs, mask, seed, rows, first_col, n_cols, first, threshold,
    SOME_DROPPED: tl.constexpr, ALL_DROPPED: tl.constexpr, EIGHTS: tl.constexpr, COMPUTE: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    x, residual = tl.load(x_ptrs, mask=mask), tl.load(residual_ptrs, mask=mask)
    z = x.to(COMPUTE)
    if bias is not None:
        z += bias.to(COMPUTE)[None, :]
    y = _gelu_fast(z)
    # y * 0 and not 0, as in torch: NaN stays NaN, dropped or not; so in the backward pass
    if ALL_DROPPED:
        y *= 0.0
    elif SOME_DROPPED:
        scale = 65536.0 / (65536 - threshold).to(COMPUTE)
        keep = _keep_tile(seed, threshold, rows, first_col, n_cols, first, EIGHTS, BLOCK_N)
        y = tl.where(keep, y, y * 0.0) * scale
    y += residual.to(COMPUTE)
    tl.store(y_ptrs, y, mask=mask)


@triton.jit(do_not_specialize=["n_rows", "first", "threshold"])
def _bias_gelu_dropout_add_fwd_kernel(
    x_ptr, bias_ptr, residual_ptr, y_ptr, seed_ptr, n_rows, n_cols, first, threshold,
    stride_xm, stride_xn, stride_rm, stride_rn,
    SOME_DROPPED: tl.constexpr, ALL_DROPPED: tl.constexpr, EIGHTS: tl.constexpr, COMPUTE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, FOLD: tl.constexpr = 1,
):  # fmt: skip
    # One program handles a tile of x, (BLOCK_M, BLOCK_N). Neighbours take neighbouring columns.
    n_tiles = tl.cdiv(n_cols, BLOCK_N)
    pid_m, pid_n = tl.program_id(0) // n_tiles, tl.program_id(0) % n_tiles
    # int64: row * stride passes 2**31 from 8 GiB of float32 on
    rows = pid_m.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    first_col = pid_n.to(tl.int64) * BLOCK_N
    cols = first_col + tl.arange(0, BLOCK_N)
    offsets = rows[:, None] * n_cols + cols[None, :]
    mask, bias_cols = (rows < n_rows)[:, None] & (cols < n_cols)[None, :], cols
    if FOLD > 1:
        whole, last, behind = device.fold_ends(n_rows, n_cols, cols, FOLD)
        mask = (offsets < whole) & (cols < n_cols)[None, :]
        bias_cols = cols.to(tl.int32) % (n_cols // FOLD)

    x_ptrs = x_ptr + rows[:, None] * stride_xm + cols[None, :] * stride_xn
    residual_ptrs = residual_ptr + rows[:, None] * stride_rm + cols[None, :] * stride_rn
    bias = None
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + bias_cols, mask=cols < n_cols)
    seed = tl.load(seed_ptr) if SOME_DROPPED else None
    _bias_gelu_dropout_add_fwd_tile(
        x_ptrs, bias, residual_ptrs, y_ptr + offsets, mask, seed, rows, first_col, n_cols, first, threshold,
        SOME_DROPPED, ALL_DROPPED, EIGHTS, COMPUTE, BLOCK_N,
    )  # fmt: skip
    if FOLD > 1 and pid_m == 0:
        row, left = last[None, :], n_rows // FOLD + tl.arange(0, 1).to(tl.int64)
        _bias_gelu_dropout_add_fwd_tile(
            x_ptr + row, bias, residual_ptr + row, y_ptr + row, behind[None, :], seed, left, first_col,
            n_cols, first, threshold, SOME_DROPPED, ALL_DROPPED, EIGHTS, COMPUTE, BLOCK_N,
        )  # fmt: skip


@triton.jit
def _bias_gelu_dropout_add_bwd_tile(
    dy_ptrs, x_ptrs, bias, dx_ptr, offsets, mask, seed, rows, first_col, n_cols, first, threshold,
    SOME_DROPPED: tl.constexpr, ALL_DROPPED: tl.constexpr, EIGHTS: tl.constexpr, COMPUTE: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    dy = tl.load(dy_ptrs, mask=mask, other=0.0).to(COMPUTE)
    x = tl.load(x_ptrs, mask=mask, other=0.0).to(COMPUTE)
    if ALL_DROPPED:
        dy *= 0.0
    elif SOME_DROPPED:
        scale = 65536.0 / (65536 - threshold).to(COMPUTE)
        keep = _keep_tile(seed, threshold, rows, first_col, n_cols, first, EIGHTS, BLOCK_N)
        dy *= tl.where(keep, scale, 0.0)
    if bias is not None:
        x += bias[None, :]
    dx = dy * _gelu_slope(x)
    if dx_ptr is not None:
        tl.store(dx_ptr + offsets, dx, mask=mask)
    return dx  # 0 outside: dy is


@triton.jit(do_not_specialize=["n_rows", "first", "threshold", "rows_per_program"])
def _bias_gelu_dropout_add_bwd_kernel(
    dy_ptr, x_ptr, bias_ptr, dx_ptr, partial_ptr, seed_ptr, n_rows, n_cols, first, threshold,
    stride_dym, stride_dyn, stride_xm, stride_xn, rows_per_program,
    SOME_DROPPED: tl.constexpr, ALL_DROPPED: tl.constexpr, EIGHTS: tl.constexpr,
    NUM_STAGES: tl.constexpr, COMPUTE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    FOLD: tl.constexpr = 1,
):  # fmt: skip
    # One program handles rows_per_program rows of BLOCK_N columns, BLOCK_M rows at a time, and adds
    # them up on the way: its row of partial, (programs down, n_cols), is its share of dbias.
    n_tiles = tl.cdiv(n_cols, BLOCK_N)
    pid_m, pid_n = tl.program_id(0) // n_tiles, tl.program_id(0) % n_tiles
    first_col = pid_n.to(tl.int64) * BLOCK_N
    cols = first_col + tl.arange(0, BLOCK_N)
    bias_cols, total = cols, tl.zeros((BLOCK_M, BLOCK_N), dtype=COMPUTE)
    if FOLD > 1:
        whole, last, behind = device.fold_ends(n_rows, n_cols, cols, FOLD)
        bias_cols = cols.to(tl.int32) % (n_cols // FOLD)
    bias = None
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + bias_cols, mask=cols < n_cols).to(COMPUTE)

    seed = tl.load(seed_ptr) if SOME_DROPPED else None
    for start in tl.range(0, rows_per_program, BLOCK_M, num_stages=NUM_STAGES):
        rows = pid_m.to(tl.int64) * rows_per_program + start + tl.arange(0, BLOCK_M)
        offsets = rows[:, None] * n_cols + cols[None, :]
        in_rows = offsets < whole if FOLD > 1 else (rows < n_rows)[:, None]
        mask = in_rows & (cols < n_cols)[None, :]
        dy_ptrs = dy_ptr + rows[:, None] * stride_dym + cols[None, :] * stride_dyn
        x_ptrs = x_ptr + rows[:, None] * stride_xm + cols[None, :] * stride_xn
        total += _bias_gelu_dropout_add_bwd_tile(
            dy_ptrs, x_ptrs, bias, dx_ptr, offsets, mask, seed, rows, first_col, n_cols, first, threshold,
            SOME_DROPPED, ALL_DROPPED, EIGHTS, COMPUTE, BLOCK_N,
        )  # fmt: skip

    sums = tl.sum(total, axis=0)
    if FOLD > 1 and pid_m == 0:
        row, left = last[None, :], n_rows // FOLD + tl.arange(0, 1).to(tl.int64)
        last_dx = _bias_gelu_dropout_add_bwd_tile(
            dy_ptr + row, x_ptr + row, bias, dx_ptr, row, behind[None, :], seed, left, first_col,
            n_cols, first, threshold, SOME_DROPPED, ALL_DROPPED, EIGHTS, COMPUTE, BLOCK_N,
        )  # fmt: skip
        sums += tl.sum(last_dx, axis=0)
    if partial_ptr is not None:
        tl.store(partial_ptr + pid_m.to(tl.int64) * n_cols + cols, sums, mask=cols < n_cols)


# --- plan (the dispatch heuristic) and launch ----------------------------------------------------------------


@functools.cache
def _plan(n_cols, fold=1):
    # Folded, a bias is looked up element by element: a thread has it for eight rows
    block_n = max(8, min(host.power_of_2(n_cols), 1024 if fold == 1 else 128))
    return Plan(2048 // block_n, block_n)


@functools.cache
def _plan_backward(n_cols, fold=1):
    """(BLOCK_M, BLOCK_N, strips)"""
    block_n, strips = host.summed_tile(n_cols, fold, narrow=64)
    block_n = max(8, block_n)
    return 2048 // block_n, block_n, strips


def _launch(plan, fold, bias, x, residual, y, p, seed, first=0):
    """first: how many elements of the whole tensor come before these rows."""
    n_rows, n_cols, threshold = host.cdiv(x.shape[0], fold), x.shape[1] * fold, _threshold(p)
    strides = (*x.stride(), *residual.stride()) if fold == 1 else (n_cols, 1) * 2
    host.run(
        _bias_gelu_dropout_add_fwd_kernel, (host.cdiv(n_rows, plan.block_m) * host.cdiv(n_cols, plan.block_n),),
        (x, bias, residual, y, seed), x.shape[0], n_cols, first, threshold, *strides,
        SOME_DROPPED=threshold > 0, ALL_DROPPED=threshold == 65536, EIGHTS=n_cols % 8 == 0,
        COMPUTE=host.compute_dtype(x.dtype), BLOCK_M=plan.block_m, BLOCK_N=plan.block_n, FOLD=fold, num_warps=2,
    )  # fmt: skip


def _launch_backward(plan, dy, x, dx, bias, p, seed, dtype, first=0):
    """Write dx unless it is None. Returns what each strip of rows adds to dbias, (strips, N), or None.

    dtype: that of dbias, None where it is not needed. Of one strip that is dbias itself, in this dtype.
    """
    threshold, fold = _threshold(p), host.fold_of(x, dy, dx)
    n_cols = x.shape[1] * fold
    strides = (*dy.stride(), *x.stride()) if fold == 1 else (n_cols, 1) * 2
    block_m, block_n, strips = plan and plan.backward or _plan_backward(n_cols, fold)
    rows_per_program, strips, partial = host.strips_of(x, fold, block_m, strips, dtype)
    host.run(
        _bias_gelu_dropout_add_bwd_kernel, (strips * host.cdiv(n_cols, block_n),),
        (dy, x, bias, dx, partial, seed), x.shape[0], n_cols, first, threshold, *strides, rows_per_program,
        SOME_DROPPED=threshold > 0, ALL_DROPPED=threshold == 65536, EIGHTS=n_cols % 8 == 0, NUM_STAGES=3,
        COMPUTE=host.compute_dtype(x.dtype), BLOCK_M=block_m, BLOCK_N=block_n, FOLD=fold, num_warps=4,
    )  # fmt: skip
    return partial


# --- forward and backward ------------------------------------------------------------------------------------


def _empty(x, bias, residual, p, seed):
    """y, before it is written."""
    dtype = host.dtype_of_sum(x.dtype, (x if bias is None else bias).dtype, residual.dtype)
    return torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)


def _forward(x, bias, residual, p, seed, plan=None):
    y = _empty(x, bias, residual, p, seed)
    if y.numel() == 0:
        return y
    matrices = host.rows_of(x), host.rows_of(residual), host.rows_of(y)
    fold = host.fold_of(*matrices)
    bias = bias if bias is None else bias.contiguous()
    _launch(plan or _plan(x.shape[-1] * fold, fold), fold, bias, *matrices, p, seed)
    return y


def _save(ctx, x, bias, residual, p, seed, plan=None):
    ctx.p, ctx.plan, ctx.residual_dtype = p, plan, residual.dtype
    ctx.save_for_backward(x, bias, seed)


def _backward(dy, x, bias, p, seed, needs_grad=(True, True), plan=None):
    """dx and dbias, each None unless needed."""
    has_dx, has_dbias = needs_grad
    dx = torch.empty_like(x, memory_format=torch.contiguous_format) if has_dx else None
    if x.numel() == 0:
        return dx, torch.zeros_like(bias) if has_dbias else None
    dtype = bias.dtype if has_dbias else None
    # y.sum().backward() sends a dy of strides 0, which is read as it is
    matrices = host.rows_of(dy), host.rows_of(x), host.rows_of(dx)
    bias = None if bias is None else bias.contiguous()
    partial = _launch_backward(plan, *matrices, bias, p, seed, dtype)
    return dx, host.sum_rows(partial, dtype) if has_dbias else None


class _BiasGeluDropoutAdd(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, bias, residual, p, seed, plan):
        _save(ctx, x, bias, residual, p, seed, plan)
        return _forward(x, bias, residual, p, seed, plan)

    @staticmethod
    @host.once
    def backward(ctx, dy):
        dx, dbias, (x, bias, seed) = None, None, ctx.saved_tensors
        *needs_grad, needs_dresidual = ctx.needs_input_grad[:3]
        if any(needs_grad):
            dx, dbias = _backward(dy, x, bias, ctx.p, seed, needs_grad, ctx.plan)
        dresidual = dy.to(ctx.residual_dtype) if needs_dresidual else None
        return dx, dbias, dresidual, None, None, None


# --- the calls -----------------------------------------------------------------------------------------------


def _check_p(name, p):
    if isinstance(p, bool) or not isinstance(p, host.NUMBERS) or not 0 <= p <= 1:
        raise ValueError(f"{name}: p must be a number from 0 to 1, the share to drop, got {p!r}")


@host.remembered
def _check(name, x, bias, residual, p):
    _check_p(name, p)
    host.check_same_shape(name, "residual", residual, x)
    columns = {} if bias is None else {"bias": (bias, "N")}
    sizes = {"x": (x, "... N"), **columns, "residual": (residual, "... N")}
    host.check_tensors(name, "bias_gelu_dropout_add_eager", host.MIXED, **sizes)


def _seed_tensor(name, seed, device):
    """The seed as an int64 tensor of one element on `device`: fresh when None, and never copied to the host."""
    if seed is None:
        # From torch's generator of this device: torch.manual_seed, checkpointing and CUDA graphs all work.
        return torch.randint(2**63 - 1, (1,), dtype=torch.int64, device=device)
    if isinstance(seed, host.INTS) and not isinstance(seed, bool):
        return torch.full((1,), seed, dtype=torch.int64, device=device)
    is_one = isinstance(seed, torch.Tensor) and seed.dtype == torch.int64 and seed.numel() == 1
    if is_one and seed.device == device:
        return seed
    what = f"None, an int, or an int64 tensor of one element on {device}"
    raise ValueError(f"{name}: seed must be {what}, got {seed!r}")


def bias_gelu_dropout_add_triton(
    x: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor, p: float = 0.1,
    seed: int | torch.Tensor | None = None, training: bool = True, *, plan: Plan | None = None,
) -> torch.Tensor:  # fmt: skip
    """dropout(gelu_tanh(x + bias), p) + residual in one Triton kernel, with gradients for all three tensors.

    x, residual: (..., N), any strides; bias: (N,) or None, all on one device. p: share of elements dropped,
    0 to 1, rounded to 1/65536, or none unless training; what is kept is divided by the share kept. seed: None
    draws one from torch's generator there, without waiting for the GPU; an int or an int64 tensor of one
    element fixes the mask. Returns y of x's shape, contiguous, in the dtype of the sum (x may have 16 bits
    and bias 32).
    plan: a Plan in place of the one chosen, for tuning; torch.compile leaves it out.
    Works under torch.compile (as the op fused_kernels::bias_gelu_dropout_add), autocast, checkpointing and
    CUDA graphs (each replay drops other elements); not under torch.func, torch.vmap or forward-mode AD, nor
    twice differentiable: these raise.
    Raises TypeError for a wrong dtype, ValueError for a wrong shape, device, p or seed.
    """
    tensors, name = (x, bias, residual), "bias_gelu_dropout_add_triton"
    goes_by_op = _check(name, *tensors, p)
    if not isinstance(training, bool):
        raise TypeError(f"{name}: training must be True or False, got {training!r}")
    p = p if training else 0.0
    seed = _seed_tensor(name, seed, x.device)
    if goes_by_op:
        return bias_gelu_dropout_add_op(*tensors, p, seed)
    eager, how = "bias_gelu_dropout_add_eager", (p, seed, plan)
    return host.call(name, eager, _BiasGeluDropoutAdd, _forward, tensors, *how)


@host.custom_op("fused_kernels::bias_gelu_dropout_add")
def bias_gelu_dropout_add_op(
    x: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor, p: float, seed: torch.Tensor
) -> torch.Tensor:
    """For torch.compile and torch.export: one node of the graph, which nothing looks into."""
    _check("bias_gelu_dropout_add_op", x, bias, residual, p)
    return _forward(x, bias, residual, p, seed)


@host.custom_op("fused_kernels::bias_gelu_dropout_add_backward")
def _bias_gelu_dropout_add_backward_op(
    dy: torch.Tensor, x: torch.Tensor, bias: torch.Tensor | None, p: float, seed: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return host.none_as_empty(x, _backward(dy, x, bias, p, seed, (True, bias is not None)))


def _op_backward(ctx, dy):
    x, bias, seed = ctx.saved_tensors
    dx, dbias = _bias_gelu_dropout_add_backward_op(dy, x, bias, ctx.p, seed)
    return dx, None if bias is None else dbias, dy, None, None


bias_gelu_dropout_add_op.register_fake(_empty)
_bias_gelu_dropout_add_backward_op.register_fake(
    lambda dy, x, bias, p, seed: (
        x.new_empty(x.shape),
        x.new_empty(0) if bias is None else torch.empty_like(bias),
    )
)
bias_gelu_dropout_add_op.register_autograd(
    _op_backward, setup_context=lambda ctx, inputs, output: _save(ctx, *inputs)
)


class BiasGELUDropoutAdd(torch.nn.Module):
    """dropout(gelu_tanh(x + bias), p) + residual, the bias being a parameter; nothing is dropped in eval().

    bias=False: without one.
    """

    def __init__(
        self, features: int, p: float = 0.1,
        device: torch.device | str | None = None, dtype: torch.dtype | None = None, bias: bool = True,
    ):  # fmt: skip
        super().__init__()
        _check_p("BiasGELUDropoutAdd", p)
        self.features, self.p = features, p
        made = (
            torch.nn.Parameter(torch.empty(features, device=device, dtype=dtype)) if bias else None
        )
        self.register_parameter("bias", made)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if self.bias is not None:
            torch.nn.init.zeros_(self.bias)

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return bias_gelu_dropout_add_triton(x, self.bias, residual, self.p, training=self.training)

    def extra_repr(self):
        return f"{self.features}, p={self.p}" + (", bias=False" if self.bias is None else "")
