# SPDX-License-Identifier: MIT
# Copyright (c) 2026 The Fused Kernels authors; Fused Kernels 0.1.0, lib/ops/lora_epilogue.py
"""lora_epilogue: y = act(x + scale·delta + bias), what follows the products of a LoRA layer, in one pass.

Shapes    x, delta, y: (..., N), with any strides, y contiguous; bias: (N,); scale: a Python float.
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
Copy it   this file for Triton; lora_epilogue.cu beside it for CUDA. MIT licence.
"""

import contextlib
import fcntl
import functools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch._functorch.pyfunctorch import retrieve_all_functorch_interpreters
from torch.autograd import forward_ad

# With TRITON_INTERPRET=1 kernels run on CPU tensors; otherwise they need a GPU.
_ON_CPU = triton.knobs.runtime.interpret
_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)

# The eager activations, in the order of the numbers that lora_epilogue.cu knows them by.
_ACTIVATIONS = {
    "identity": lambda z: z,
    "relu": torch.relu,
    "gelu": F.gelu,
    "gelu_tanh": functools.partial(F.gelu, approximate="tanh"),
    "silu": F.silu,
    "sigmoid": torch.sigmoid,
}
_OF_Z = ("gelu", "gelu_tanh", "silu")  # their slope is taken from z; relu's and sigmoid's from y


class Plan(NamedTuple):
    """How one call is launched. backward: (BLOCK_M, BLOCK_N, strips), or None to have it chosen."""

    block_m: int
    block_n: int
    backward: tuple[int, int, int] | None = None


def lora_epilogue_eager(
    x: torch.Tensor, delta: torch.Tensor, bias: torch.Tensor, scale: float = 1.0,
    activation: str = "identity",
) -> torch.Tensor:  # fmt: skip
    return _ACTIVATIONS[activation](x + scale * delta + bias)


@triton.jit
def _gelu_tanh(z):
    # gelu(z) = z·sigmoid(2u), u = √(2/π)·(z + 0.044715 z³): no overflow, where tanh as (e²ᵘ-1)/(e²ᵘ+1) has one
    return z / (1.0 + tl.exp(-1.5957691216057308 * z * (1.0 + 0.044715 * z * z)))


@triton.jit
def _gelu_tanh_grad(z):
    # s = sigmoid(2u); gelu'(z) = s + z·s·(1 - s)·2u'. By e = exp(-|2u|), which cannot overflow, and with
    # s·(1 - s) = e/(1 + e)²: where s is nearly 1, 1 - s has lost its digits, and z·2u' multiplies what is left.
    # Far out e is 0, and 2u' must not be infinite: 0·inf is NaN.
    a = tl.minimum(tl.abs(z), 1e3)
    e = tl.exp2(a * (-2.302208198144325 - 0.1029432395800235 * a * a))  # log₂ e is in the constants
    t = 1.0 / (1.0 + e)
    s = tl.where(z < 0, e * t, t)
    return s + z * (e * t * t) * (1.5957691216057308 + 0.2140644488178008 * a * a)


@triton.jit
def _normal(z):
    # Φ(z) and exp(-z²/2). (1 + erf(z/√2))/2 has lost its digits where Φ is near 0: in float32 it is a twentieth
    # off at z = -5. Φ(-|z|) = exp(-z²/2)·p(t), t = 1/(1 + 0.3|z|), keeps them. p, of degree 8, fits by least
    # squares with weights that even out the error, to 1.5e-7 of Φ for |z| up to 14; further out Φ is 0.
    e = tl.exp2(-0.7213475204444817 * z * z)
    if z.dtype == tl.float64:
        cdf = 0.5 * (1.0 + tl.erf(0.7071067811865476 * z))  # float64 has digits to lose
    else:
        t = 1.0 / (1.0 + 0.3 * tl.abs(z))
        p = 0.2063466079825968 + t * (-0.1571989730676126 + t * 0.035673758297739465)
        p = 0.09991445642353258 + t * (0.1285584005903845 + t * (-0.053677435119704076 + t * p))
        tail = e * (t * (0.11962930875828147 + t * (0.12075380295863522 + t * p)))
        cdf = tl.where(z < 0, tail, 1.0 - tail)
    return cdf, e


@triton.jit
def _gelu(z):
    # gelu(z) = z·Φ(z)
    cdf, _ = _normal(z)
    return z * cdf


@triton.jit
def _gelu_grad(z):
    # gelu'(z) = Φ(z) + z·Φ'(z), Φ'(z) = exp(-z²/2)/√(2π)
    cdf, e = _normal(z)
    return cdf + z * (0.3989422804014327 * e)


@triton.jit
def _activate(z, ACTIVATION: tl.constexpr):
    if ACTIVATION == "relu":
        z = tl.where(z < 0, 0.0, z)  # tl.maximum(z, 0) would turn NaN into 0
    elif ACTIVATION == "gelu":
        z = _gelu(z)
    elif ACTIVATION == "gelu_tanh":
        z = _gelu_tanh(z)
    elif ACTIVATION == "silu":
        z = z / (1.0 + tl.exp(-z))
    elif ACTIVATION == "sigmoid":
        z = 1.0 / (1.0 + tl.exp(-z))
    return z


@triton.jit
def _slope_times(dy, saved, ACTIVATION: tl.constexpr):
    # dy·act'(z); saved is y for relu and sigmoid, z for the others
    if ACTIVATION == "relu":
        dy = tl.where(saved <= 0, 0.0, dy)  # a NaN in y lets dy through, as in torch.relu
    elif ACTIVATION == "gelu":
        dy = dy * _gelu_grad(saved)
    elif ACTIVATION == "gelu_tanh":
        dy = dy * _gelu_tanh_grad(saved)
    elif ACTIVATION == "silu":
        e = tl.exp(-tl.abs(saved))  # as in _gelu_tanh_grad: s·(1 - s) = e/(1 + e)²
        t = 1.0 / (1.0 + e)
        dy = dy * (tl.where(saved < 0, e * t, t) + saved * (e * t * t))
    elif ACTIVATION == "sigmoid":
        dy = dy * (saved * (1.0 - saved))
    return dy


@triton.jit
def _sum_of(x, delta, bias, scale, COMPUTE: tl.constexpr):
    # z = x + scale·delta + bias, the same in the forward and in the backward pass, rounding included.
    # scale is no Python number but float64 in the kernel: every product with it would be float64 too.
    z = x.to(COMPUTE) + tl.cast(scale, COMPUTE) * delta.to(COMPUTE)
    return z + bias.to(COMPUTE)


@triton.jit
def _fold_ends(n_rows, n_cols, cols, FOLD: tl.constexpr):
    # FOLD consecutive rows count as one of n_cols. A mask that ends at a multiple of 16 leaves 16-byte loads
    # whole. Returns where it ends, and offsets and mask of the fewer than 16 elements after it.
    end = n_rows.to(tl.int64) * (n_cols // FOLD)
    whole = end // 16 * 16
    last = (n_rows // FOLD).to(tl.int64) * n_cols + cols
    return whole, last, (last >= whole) & (last < end) & (cols < n_cols)


@triton.jit
def _lora_epilogue_fwd_tile(
    x_ptrs, delta_ptrs, bias, y_ptrs, z_ptr, offsets, mask, scale,
    ACTIVATION: tl.constexpr, COMPUTE: tl.constexpr,
):  # fmt: skip
    x, delta = tl.load(x_ptrs, mask=mask), tl.load(delta_ptrs, mask=mask)
    z = _sum_of(x, delta, bias, scale, COMPUTE)
    tl.store(y_ptrs, _activate(z, ACTIVATION), mask=mask)
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
        whole, last, behind = _fold_ends(n_rows, n_cols, cols, FOLD)
        mask = (offsets < whole) & (cols < n_cols)[None, :]
        bias_cols = cols.to(tl.int32) % (n_cols // FOLD)

    x_ptrs = x_ptr + rows[:, None] * stride_xm + cols[None, :] * stride_xn
    delta_ptrs = delta_ptr + rows[:, None] * stride_dm + cols[None, :] * stride_dn
    y_ptrs = y_ptr + rows[:, None] * stride_ym + cols[None, :] * stride_yn
    bias = tl.load(bias_ptr + bias_cols, mask=cols < n_cols)
    _lora_epilogue_fwd_tile(
        x_ptrs, delta_ptrs, bias[None, :], y_ptrs, z_ptr, offsets, mask, scale, ACTIVATION, COMPUTE
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
        dx = _slope_times(dx, saved, ACTIVATION)
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
    total, bias, bias_cols = tl.zeros((BLOCK_M, BLOCK_N), dtype=COMPUTE), 0.0, cols
    if FOLD > 1:
        whole, last, behind = _fold_ends(n_rows, n_cols, cols, FOLD)
        bias_cols = cols.to(tl.int32) % (n_cols // FOLD)
    if delta_ptr is not None:
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


@triton.jit(do_not_specialize=["n_rows"])
def _sum_rows_kernel(
    partial_ptr, out_ptr, n_rows, n_cols, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    # One program handles BLOCK_N columns of partial, (n_rows, n_cols), from top to bottom.
    cols = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=partial_ptr.dtype.element_ty)
    for start in range(0, n_rows, BLOCK_M):
        rows = start + tl.arange(0, BLOCK_M).to(tl.int64)
        mask = (rows < n_rows)[:, None] & (cols < n_cols)[None, :]
        total += tl.load(partial_ptr + rows[:, None] * n_cols + cols[None, :], mask=mask, other=0.0)
    tl.store(out_ptr + cols, tl.sum(total, axis=0), mask=cols < n_cols)


# --- plan (the dispatch heuristic) and launch ----------------------------------------------------------------


def _cdiv(a, b):
    return -(-a // b)  # triton.cdiv is the same, and costs 2 µs a call on the host


_launched = {}  # of each kind of launch, what runs its compiled kernel, and the arguments around the tensors


def _run(kernel, grid, tensors, *sizes, **options):
    """kernel[grid](*tensors, *sizes, **options) on the tensors' GPU; the second time, without Triton's look-up.

    Triton looks at every argument of every launch to find the kernel compiled for its like. A launch that
    differs from an earlier one in nothing but memory finds it here, if pointers are aligned to 16 bytes.
    """
    first, hooks = getattr(tensors[0], "base", tensors[0]), triton.knobs.runtime
    device, addresses, kinds = first.get_device(), 0, []
    for t in tensors:
        is_tensor = isinstance(t, torch.Tensor)  # else None or a TMA descriptor, which is aligned
        addresses |= t.data_ptr() if is_tensor else 0
        kinds.append(t.dtype if is_tensor else t and (t.base.dtype, *t.block_shape))
    how = kernel.fn, type(kernel).run  # tools that watch launches put another `run` in its place
    key = (*how, device, grid, sizes, *options.items(), *kinds)
    hooked = hooks.launch_enter_hook.calls or hooks.launch_exit_hook.calls  # as profilers do
    launch = None if hooked or addresses % 16 else _launched.get(key)
    if launch and torch.cuda.current_device() == device:
        run, blocks, stream_of, handles, given = launch
        run(*blocks, stream_of(device), *handles, *tensors, *given)
        return
    with torch.cuda.device_of(first):  # else the launch goes to the current GPU, not to theirs
        compiled = kernel[grid](*tensors, *sizes, **options)
    # Other versions go the ordinary way each time, and so does the interpreter, which compiles nothing.
    if compiled and triton.__version__[:3] in ("3.6", "3.7") and addresses % 16 == 0:
        named = {name: value for name, value in options.items() if name in kernel.arg_names}
        given = kernel.signature.bind(*tensors, *sizes, **named)
        given.apply_defaults()
        if len(_launched) >= 4096:
            _launched.clear()  # sizes that never come again
        handles = compiled.function, compiled.packed_metadata, None, None, None  # no hooks
        around = (*grid, 1, 1)[:3], triton.runtime.driver.active.get_current_stream, handles
        _launched[key] = compiled.run, *around, given.args[len(tensors) :]


def _compute_dtype(dtype):
    return tl.float64 if dtype == torch.float64 else tl.float32


@functools.cache
def _tile(n_cols, tile_bytes, row_bytes, dtype):
    """BLOCK_M, BLOCK_N: a tile of tile_bytes, its rows row_bytes long unless x has fewer columns."""
    block_n = min(triton.next_power_of_2(n_cols), row_bytes // dtype.itemsize)
    return tile_bytes // dtype.itemsize // block_n, block_n


@functools.cache
def _rows_to_fold(n_cols):
    """How many rows of n_cols elements, taken together, are a multiple of 16 elements long.

    16 elements rather than 16 bytes: only of multiples of 16 does Triton know, for any size given at run time,
    that masks and offsets leave 16-byte loads whole.
    """
    return 16 // math.gcd(n_cols, 16)


def _fold(*matrices):
    """How many rows of these (M, N) matrices are taken as one; None among them is left out.

    A width of 781, say, lets rows begin off any 16-byte boundary, and loads shrink to one element; 16 such rows
    on end are 12496 elements, a good width. So contiguous rows are folded, and the last wide row may be a part;
    unless they are few: of 32 rows as they are one program sums dbias.
    """
    n_rows, n_cols = matrices[0].shape
    fold = _rows_to_fold(n_cols)
    folds = fold > 1 and n_rows >= 64 and all([m is None or m.is_contiguous() for m in matrices])
    return fold if folds else 1


@functools.cache
def _plan(n_cols, dtype, fold=1):
    """n_cols: of fold rows, taken as one."""
    # One 16-byte load in each of 128 threads; folded, four: a bias is looked up alone, and four rows share it
    return Plan(*_tile(n_cols, 2048 if fold == 1 else 8192, 2048, dtype))


@functools.cache
def _plan_backward(n_cols, dtype):
    """(BLOCK_M, BLOCK_N, strips): two 16-byte loads of each tensor in each of 256 threads; four do not fit."""
    block_m, block_n = _tile(n_cols, 8192, 128 * dtype.itemsize, dtype)
    # About 8192 programs fill any GPU; each sums as many rows as that leaves it, and at most 1024 strips
    # keep the second sum short.
    return block_m, block_n, max(1, min(_cdiv(8192, _cdiv(n_cols, block_n)), 1024))


def _launch(plan, fold, bias, x, delta, y, z, scale, activation):
    n_rows, n_cols = _cdiv(x.shape[0], fold), x.shape[1] * fold
    strides = [m.stride() if fold == 1 else (n_cols, 1) for m in (x, delta, y)]
    _run(
        _lora_epilogue_fwd_kernel, (_cdiv(n_rows, plan.block_m) * _cdiv(n_cols, plan.block_n),),
        (x, delta, bias, y, z), float(scale), x.shape[0], n_cols, *strides[0], *strides[1], *strides[2],
        ACTIVATION=activation, COMPUTE=_compute_dtype(x.dtype),
        BLOCK_M=plan.block_m, BLOCK_N=plan.block_n, FOLD=fold, num_warps=4,
    )  # fmt: skip


def _launch_backward(plan, dy, saved, delta, dx, ddelta, bias, scale, activation, dtype):
    """Write dx and ddelta. Returns what each strip of rows adds to dbias, (strips, N), or None.

    dtype: that of dbias, None where it is not needed. Of one strip that is dbias itself, in this dtype.
    """
    read, fold = (dy, saved, delta), _fold(dy, saved, delta, dx, ddelta)
    n_rows, n_cols = _cdiv(dy.shape[0], fold), dy.shape[1] * fold
    block_m, block_n, strips = plan and plan.backward or _plan_backward(n_cols, dy.dtype)
    rows_per_program = _cdiv(_cdiv(n_rows, strips), block_m) * block_m
    strips, n_tiles = _cdiv(n_rows, rows_per_program), _cdiv(n_cols, block_n)
    wide = torch.float64 if dy.dtype == torch.float64 else torch.float32
    shape, alone = (strips * fold, dy.shape[1]), strips * fold == 1
    partial = dy.new_empty(shape, dtype=dtype if alone else wide) if dtype else None
    strides = [(0, 0) if m is None else m.stride() if fold == 1 else (n_cols, 1) for m in read]
    # Unaligned rows load one element per instruction; cp.async cannot pipeline that, so num_stages=1.
    aligned = n_cols % 16 == 0 and all([m is None or m.stride(1) == 1 for m in read])
    _run(
        _lora_epilogue_bwd_kernel, (strips * n_tiles,), (dy, saved, delta, bias, dx, ddelta, partial),
        float(scale), dy.shape[0], n_cols, *strides[0], *strides[1], *strides[2], rows_per_program,
        ACTIVATION=activation, NUM_STAGES=3 if aligned else 1,
        COMPUTE=_compute_dtype(dy.dtype), BLOCK_M=block_m, BLOCK_N=block_n, FOLD=fold, num_warps=8,
    )  # fmt: skip
    return partial


def _sum_rows(partial, dtype):
    """The sum over strips (row chunks), in one launch and in a fixed order: the same bits in every run."""
    n_strips, n_cols = partial.shape
    if n_strips == 1:
        return partial.view(n_cols)  # in this dtype already
    out = partial.new_empty(n_cols, dtype=dtype)
    _run(
        _sum_rows_kernel, (_cdiv(n_cols, 32),), (partial, out), n_strips, n_cols,
        BLOCK_M=64, BLOCK_N=32, num_warps=8,
    )  # fmt: skip
    return out


# --- forward and backward ------------------------------------------------------------------------------------


@functools.cache
def _dtype_of_sum(*dtypes):
    return functools.reduce(torch.promote_types, dtypes)


def _rows_of(t):
    """t as (M, N): itself, a view, or a copy where strides allow none. None stays None."""
    return t if t is None or t.dim() == 2 else t.reshape(-1, t.shape[-1])


def _forward(x, delta, bias, scale, activation, plan=None, in_place=False, z=None, launch=_launch):
    """y, in place x itself; z = x + scale·delta + bias is written too, contiguous, unless it is None."""
    y = x
    if not in_place:
        dtype = _dtype_of_sum(x.dtype, delta.dtype, bias.dtype)
        y = torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)
    if y.numel() == 0:
        return y
    rows = _rows_of(x)
    matrices = rows, _rows_of(delta), rows if in_place else _rows_of(y), _rows_of(z)
    fold = _fold(*matrices)
    chosen = plan or _plan(x.shape[-1] * fold, x.dtype, fold)
    launch(chosen, fold, bias.contiguous(), *matrices, scale, activation)
    if in_place and rows.data_ptr() != x.data_ptr():
        x.copy_(rows.view_as(x))
    return y


def _save(ctx, x, delta, bias, scale, activation, y, z=None, plan=None):
    """What the table at the top says. z: in place, where x is gone."""
    ctx.scale, ctx.activation, ctx.plan = scale, activation, plan
    ctx.dtypes = x.dtype, delta.dtype, bias.dtype
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
    matrices = [_rows_of(m) for m in (dy, saved, delta, out, ddelta)]
    dtype = dtypes[2] if has_dbias else None
    partial = _launch_backward(plan, *matrices, bias, scale, activation, dtype)
    return dx, ddelta, _sum_rows(partial, dtype) if has_dbias else None


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
    """A Function's backward that runs once: differentiating what it returns raises instead of being wrong."""
    # The error lies on every path from the gradients to what they depend on. That of PyTorch's
    # once_differentiable lies beside, where autograd.grad(..., inputs) does not pass.

    def guarded(ctx, *dys):
        if not torch.is_grad_enabled():  # the usual case: without create_graph=True
            return backward(ctx, *dys)
        with torch.no_grad():
            grads = backward(ctx, *dys)
        return _Undifferentiable.apply(backward, grads, *dys, *ctx.saved_tensors)

    return guarded


class _LoRAEpilogue(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, delta, bias, scale, activation, forward, plan, in_place, save_z):
        z = torch.empty_like(x, memory_format=torch.contiguous_format) if save_z else None
        y = forward(x, delta, bias, scale, activation, plan, in_place, z)
        if in_place:
            ctx.mark_dirty(x)  # autograd: x has a new version, and what saved the old one raises
        _save(ctx, x, delta, bias, scale, activation, y, z, plan)
        ctx.saves_z = save_z
        return y

    @staticmethod
    def backward(ctx, dy):
        if ctx.saves_z and torch.is_grad_enabled():  # z is no way to the inputs, and x is gone
            raise RuntimeError(
                "lora_epilogue in place has no second derivative; for one, use lora_epilogue_eager"
            )
        return _LoRAEpilogue.gradients(ctx, dy)

    @staticmethod
    @_once
    def gradients(ctx, dy):
        how = ctx.scale, ctx.activation, ctx.dtypes, ctx.needs_input_grad[:3], ctx.plan
        return *_backward(dy, ctx.saved_tensors, *how), *[None] * 6


# --- the calls -----------------------------------------------------------------------------------------------


def _mix(*tensors):
    """Whether their dtypes may differ: under autocast x has 16 bits, and a bias that is a parameter 32."""
    return all([t.dtype in _DTYPES[:3] for t in tensors])


def _fits(x, delta, bias, scale, activation):
    """Whether the kernels take these arguments; if not, _refuse_arguments says why."""
    return (
        isinstance(x, torch.Tensor)
        and isinstance(delta, torch.Tensor)
        and isinstance(bias, torch.Tensor)
        and (x.dtype == delta.dtype == bias.dtype in _DTYPES or _mix(x, delta, bias))
        and x.device == delta.device == bias.device
        and x.device.type == ("cpu" if _ON_CPU else "cuda")
        and delta.shape == x.shape != ()
        and bias.shape == x.shape[-1:]
        and isinstance(scale, (int, float))
        and activation in _ACTIVATIONS
    )


def _refuse(name, eager, mixed=(), **expected):
    """Raise the error that says what is wrong with a call of `name`, and what to do.

    expected: label=(tensor, its sizes in letters), as x=(x, "... N"); the first one sets device and
    dtype, but for dtypes that may be mixed.
    """
    (first, (x, _)), sizes = next(iter(expected.items())), {}
    for label, (t, letters) in expected.items():
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


def _needs_grad(*tensors):
    """Whether to go through autograd: also under forward-mode AD and torch.func, so that it raises an error."""
    # The private import is for functionalize: its tensors have no memory, and a kernel would read address 0.
    backward = torch.is_grad_enabled() and any([t.requires_grad for t in tensors])
    transforms = not torch.compiler.is_compiling() and retrieve_all_functorch_interpreters()
    return backward or forward_ad._current_level >= 0 or transforms


def _explain(error, name, eager):
    """Under torch.func or forward-mode AD, raise an error that names them and the remedy."""
    if forward_ad._current_level >= 0 or retrieve_all_functorch_interpreters():
        reach = "torch.func (grad, jvp, vmap) and forward-mode AD do not reach into a kernel"
        raise RuntimeError(f"{name}: {reach}; under them use {eager}") from error


def _refuse_arguments(name, x, delta, bias, scale, activation):
    """What only this op can say, else what _refuse does."""
    if not isinstance(scale, (int, float)):
        raise TypeError(f"{name}: scale must be a Python number, got {type(scale).__name__}")
    if activation not in _ACTIVATIONS:
        names = ", ".join(_ACTIVATIONS)
        raise ValueError(f"{name}: activation must be one of {names}; got {activation!r}")
    a, b = (tuple(getattr(t, "shape", ())) for t in (x, delta))
    if a != b and () not in (a, b):  # lists and numbers are for _refuse
        raise ValueError(f"{name}: delta must have the shape of x, got x {a} and delta {b}")
    sizes = {"x": (x, "... N"), "delta": (delta, "... N"), "bias": (bias, "N")}
    _refuse(name, "lora_epilogue_eager", _DTYPES[:3], **sizes)


def _check_in_place(name, x, delta, bias):
    """Raise ValueError, saying what to do, unless x may be written while delta and bias are read."""
    if _overlaps_itself(_steps(x)):
        why = f"several elements of x are one in memory (strides {x.stride()}, as after expand)"
        raise ValueError(f"{name}: {why}; use lora_epilogue_triton or x.clone()")
    storage = x.untyped_storage().data_ptr()
    for label, t in (("delta", delta), ("bias", bias)) if x.numel() else ():
        if t.untyped_storage().data_ptr() == storage and _shares_memory(x, t):
            raise ValueError(f"{name}: {label} shares memory with x; pass {label}.clone()")
    base = x if x._base is None else x._base
    if base.is_leaf and base.requires_grad and torch.is_grad_enabled():
        why = "x is a leaf that requires grad, or a view of one, and its value would be lost"
        use = "use lora_epilogue_triton, or write under torch.no_grad()"
        raise ValueError(f"{name}: {why}; {use}")


def _steps(t):
    """(step in bytes, size) of each dimension of several elements, the shortest step first."""
    return sorted((step * t.itemsize, size) for step, size in zip(t.stride(), t.shape) if size > 1)


def _overlaps_itself(steps):
    """Whether elements of these _steps may be one: where a step is no longer than all shorter ones together."""
    reach = 0
    for step, size in steps:
        if step <= reach:
            return True
        reach += step * (size - 1)
    return False


def _shares_memory(a, b):
    """Whether an element of a may be one of b; where that cannot be seen, the answer is yes.

    Parts of one packed tensor are apart: in each of its rows the one ends before the other begins, and the
    steps from row to row, which both have alike, are longer than both parts together.
    """
    a, b = sorted((a, b), key=lambda t: t.data_ptr())
    gap, steps_a, steps_b, rows = b.data_ptr() - a.data_ptr(), _steps(a), _steps(b), []
    while steps_a and steps_a[-1][0] > gap and steps_a[-1:] == steps_b[-1:]:
        rows.insert(0, steps_a.pop())
        steps_b.pop()
    end_a, end_b = (
        t.itemsize + sum(step * (size - 1) for step, size in steps)
        for t, steps in ((a, steps_a), (b, steps_b))
    )
    return end_a > gap or _overlaps_itself([(1, gap + end_b), *rows])


def _call(name, forward, x, delta, bias, scale, activation, plan, in_place=False):
    if not _fits(x, delta, bias, scale, activation):
        _refuse_arguments(name, x, delta, bias, scale, activation)
    needs_grad = _needs_grad(x, delta, bias)
    save_z = in_place and needs_grad and activation in _OF_Z
    if torch.compiler.is_compiling():
        if in_place and not needs_grad:
            lora_epilogue_op_(x, delta, bias, scale, activation)
            return x
        y = lora_epilogue_op(x.clone() if save_z else x, delta, bias, scale, activation)
        # only ops that change nothing have gradients there; the compiler drops the copies
        return x.copy_(y) if in_place else y
    try:
        if in_place:
            _check_in_place(name, x, delta, bias)
        if in_place or needs_grad:
            how = scale, activation, forward, plan, in_place, save_z
            return _LoRAEpilogue.apply(x, delta, bias, *how)
        # past autograd: less time on the host
        return forward(x, delta, bias, scale, activation, plan)
    except RuntimeError as error:
        _explain(error, name, "lora_epilogue_eager")
        raise


def lora_epilogue_triton(
    x: torch.Tensor, delta: torch.Tensor, bias: torch.Tensor, scale: float = 1.0,
    activation: str = "identity", *, plan: Plan | None = None,
) -> torch.Tensor:  # fmt: skip
    """act(x + scale·delta + bias) in one Triton kernel, with gradients for x, delta and bias.

    x, delta: (..., N), any strides; bias: (N,), all on one device; scale: a Python number; activation:
    identity, relu, gelu, gelu_tanh, silu or sigmoid. Returns y of x's shape, contiguous, in the dtype of the
    sum: under autocast x may have 16 bits and bias 32.
    plan: a Plan in place of the one chosen, for tuning; torch.compile leaves it out.
    Works under torch.compile (as the op fused_kernels::lora_epilogue), autocast and CUDA graphs; not under
    torch.func, torch.vmap or forward-mode AD, nor twice differentiable: these raise.
    Raises TypeError for a wrong dtype, ValueError for a wrong shape, device or activation.
    """
    return _call("lora_epilogue_triton", _forward, x, delta, bias, scale, activation, plan)


def lora_epilogue_triton_(
    x: torch.Tensor, delta: torch.Tensor, bias: torch.Tensor, scale: float = 1.0,
    activation: str = "identity", *, plan: Plan | None = None,
) -> torch.Tensor:  # fmt: skip
    """lora_epilogue_triton written into x, which is returned: no memory for y, the same traffic.

    With gradients, gelu, gelu_tanh and silu save z = x + scale·delta + bias, one more tensor of x's size.
    Raises as lora_epilogue_triton, and ValueError where x must not be written: it overlaps itself, delta or
    bias in memory, or is a leaf that requires grad.
    """
    return _call("lora_epilogue_triton_", _forward, x, delta, bias, scale, activation, plan, True)


@torch.library.custom_op("fused_kernels::lora_epilogue", mutates_args=())
def lora_epilogue_op(
    x: torch.Tensor, delta: torch.Tensor, bias: torch.Tensor,
    scale: float = 1.0, activation: str = "identity",
) -> torch.Tensor:  # fmt: skip
    """lora_epilogue for torch.compile and torch.export: one node of the graph, which nothing looks into."""
    if not _fits(x, delta, bias, scale, activation):
        _refuse_arguments("lora_epilogue_op", x, delta, bias, scale, activation)
    return _forward(x, delta, bias, scale, activation)


@torch.library.custom_op("fused_kernels::lora_epilogue_", mutates_args=("x",))
def lora_epilogue_op_(
    x: torch.Tensor, delta: torch.Tensor, bias: torch.Tensor,
    scale: float = 1.0, activation: str = "identity",
) -> None:  # fmt: skip
    """The same written into x, without a gradient."""
    if not _fits(x, delta, bias, scale, activation):
        _refuse_arguments("lora_epilogue_op_", x, delta, bias, scale, activation)
    _check_in_place("lora_epilogue_op_", x, delta, bias)
    _forward(x, delta, bias, scale, activation, in_place=True)


@torch.library.custom_op("fused_kernels::lora_epilogue_backward", mutates_args=())
def _lora_epilogue_backward_op(
    dy: torch.Tensor, saved: Sequence[torch.Tensor], scale: float, activation: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    # in dy's dtype; autograd casts them where the inputs are of others
    dx, ddelta, dbias = _backward(dy, saved, scale, activation, (dy.dtype,) * 3)
    return (dx.clone() if dx is dy else dx), ddelta, dbias  # an op's result may not be its argument


@lora_epilogue_op.register_fake
def _(x, delta, bias, scale=1.0, activation="identity"):
    return x.new_empty(x.shape, dtype=_dtype_of_sum(x.dtype, delta.dtype, bias.dtype))


@_lora_epilogue_backward_op.register_fake
def _(dy, saved, scale, activation):
    return dy.new_empty(dy.shape), dy.new_empty(dy.shape), dy.new_empty(dy.shape[-1])


lora_epilogue_op.register_autograd(
    lambda ctx, dy: (
        *_lora_epilogue_backward_op(dy, list(ctx.saved_tensors), ctx.scale, ctx.activation), None, None
    ),
    setup_context=lambda ctx, inputs, output: _save(ctx, *inputs, output),
)  # fmt: skip


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
    """The functions of lora_epilogue.cu, compiled at the first call (half a minute, then cached on disk)."""
    from torch.utils.cpp_extension import load_inline

    binding = 'TORCH_LIBRARY(lora_epilogue_cuda, m) { m.def("forward", &lora_epilogue_forward); }'
    source = Path(__file__).with_suffix(".cu").read_text() + binding
    with _one_build("lora_epilogue_cuda", load_inline):
        load_inline(
            "lora_epilogue_cuda", cpp_sources="", cuda_sources=source, extra_cuda_cflags=["-O3"],
            is_python_module=False, no_implicit_headers=True,
        )  # fmt: skip
    return torch.ops.lora_epilogue_cuda


def _folded_and_rest(fold, bias, *matrices):
    """(bias, matrices) of each launch: of folded rows, with the bias repeated, and of rows left over."""
    n_rows, n_cols = matrices[0].shape
    if fold == 1:
        return [(bias, matrices)]
    top, wide = n_rows // fold * fold, (n_rows // fold, n_cols * fold)
    folded = [(bias.repeat(fold), [m if m is None else m[:top].view(wide) for m in matrices])]
    rest = [(bias, [m if m is None else m[top:] for m in matrices])] if top < n_rows else []
    return folded + rest


def _launch_cuda(plan, fold, bias, x, delta, y, z, scale, activation):
    x, delta = (m if m.stride(1) == 1 else m.contiguous() for m in (x, delta))  # 16 adjacent bytes
    x, delta, bias = (t.to(y.dtype) for t in (x, delta, bias))  # which differ under autocast
    for b, (x_rows, delta_rows, y_rows) in _folded_and_rest(fold, bias, x, delta, y):
        _cuda().forward(x_rows, delta_rows, b, y_rows, scale, list(_ACTIVATIONS).index(activation))


def _forward_cuda(x, delta, bias, scale, activation, plan=None, in_place=False, z=None):
    return _forward(x, delta, bias, scale, activation, plan, in_place, z, _launch_cuda)


def lora_epilogue_cuda(
    x: torch.Tensor, delta: torch.Tensor, bias: torch.Tensor, scale: float = 1.0,
    activation: str = "identity",
) -> torch.Tensor:  # fmt: skip
    """act(x + scale·delta + bias) in one CUDA kernel; the gradient comes from the Triton kernel.

    Shapes, dtypes and errors as for lora_epilogue_triton. Needs nvcc and a C++ compiler at the first call.
    """
    return _call("lora_epilogue_cuda", _forward_cuda, x, delta, bias, scale, activation, None)
