# SPDX-License-Identifier: MIT
# Copyright (c) 2026 The Fused Kernels authors; Fused Kernels 0.1.0, lib/ops/bias_gelu_dropout_add.py
"""bias_gelu_dropout_add: y = dropout(gelu_tanh(x + bias), p) + residual, one pass over memory, not four.

Shapes    x, residual, y: (..., N), x and residual with any strides, y contiguous; bias: (N,).
Dtypes    float32, float16 and bfloat16 (computed in float32), also mixed, y then as their sum; and float64.
Traffic   M rows of N elements of s bytes. Forward: fused 3MNs; eager 9MNs and a mask.
          Backward: fused 3MNs (dy, x, dx); the gradient of residual is dy itself, nothing is moved for it.
Dropout   Element i, counted row by row, has 16 random bits: lane i % 8 of Philox4x32-7 (Salmon et al.,
          Parallel Random Numbers: As Easy as 1, 2, 3, 2011) with the seed as key and i // 8 as counter. It is
          dropped where they are below round(65536 p): all bits of a Philox call are used, and p counts in
          1/65536. The mask is a function of seed and i alone: the same for every tile, stride, dtype and GPU.
Backward  dx = dy · keep / (1 - p) · gelu'(x + bias); dbias = dx summed over rows. The mask is drawn again
          from the seed: x, bias and the seed are saved, no mask.
Copy it   this file. MIT licence.
"""

import functools
import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch._functorch.pyfunctorch import retrieve_all_functorch_interpreters
from torch.autograd import forward_ad
from triton.language.extra import libdevice

# With TRITON_INTERPRET=1 kernels run on CPU tensors; otherwise they need a GPU.
_ON_CPU = triton.knobs.runtime.interpret
_INTERPRETED = tl.constexpr(_ON_CPU)
_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


class Plan(NamedTuple):
    """How one call is launched. backward: (BLOCK_M, BLOCK_N, strips), or None to have it chosen."""

    block_m: int
    block_n: int
    backward: tuple[int, int, int] | None = None


def bias_gelu_dropout_add_eager(
    x: torch.Tensor, bias: torch.Tensor, residual: torch.Tensor, p: float = 0.1,
    seed: int | torch.Tensor | None = None, training: bool = True,
) -> torch.Tensor:  # fmt: skip
    z = F.gelu(x + bias, approximate="tanh")
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
    if x.dtype == tl.float64 or _INTERPRETED:
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
def _keep_tile(seed_ptr, threshold, rows, first_col, n_cols, first, EIGHTS: tl.constexpr,
               BLOCK_N: tl.constexpr):  # fmt: skip
    # (BLOCK_M, BLOCK_N): which elements stay, from 16 random bits for each place in the whole tensor.
    # Bits and threshold are compared 16 places higher up, where what is below them cannot change the answer:
    # the upper half of a word is compared as it is.
    seed, least = tl.load(seed_ptr), threshold.to(tl.uint32) << 16
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
def _fold_ends(n_rows, n_cols, cols, FOLD: tl.constexpr):
    # FOLD consecutive rows count as one of n_cols. A mask that ends at a multiple of 16 leaves 16-byte loads
    # whole. Returns where it ends, and offsets and mask of the fewer than 16 elements after it.
    end = n_rows.to(tl.int64) * (n_cols // FOLD)
    whole = end // 16 * 16
    last = (n_rows // FOLD).to(tl.int64) * n_cols + cols
    return whole, last, (last >= whole) & (last < end) & (cols < n_cols)


@triton.jit
def _bias_gelu_dropout_add_fwd_tile(
    x_ptrs, bias, residual_ptrs, y_ptrs, mask, seed_ptr, rows, first_col, n_cols, first, threshold,
    SOME_DROPPED: tl.constexpr, ALL_DROPPED: tl.constexpr, EIGHTS: tl.constexpr, COMPUTE: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    x, residual = tl.load(x_ptrs, mask=mask), tl.load(residual_ptrs, mask=mask)
    z = x.to(COMPUTE) + bias.to(COMPUTE)[None, :]
    y = _gelu_fast(z)
    # y * 0 and not 0, as in torch: NaN stays NaN, dropped or not; so in the backward pass
    if ALL_DROPPED:
        y *= 0.0
    elif SOME_DROPPED:
        scale = 65536.0 / (65536 - threshold).to(COMPUTE)
        keep = _keep_tile(seed_ptr, threshold, rows, first_col, n_cols, first, EIGHTS, BLOCK_N)
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
        whole, last, behind = _fold_ends(n_rows, n_cols, cols, FOLD)
        mask = (offsets < whole) & (cols < n_cols)[None, :]
        bias_cols = cols.to(tl.int32) % (n_cols // FOLD)

    x_ptrs = x_ptr + rows[:, None] * stride_xm + cols[None, :] * stride_xn
    residual_ptrs = residual_ptr + rows[:, None] * stride_rm + cols[None, :] * stride_rn
    bias = tl.load(bias_ptr + bias_cols, mask=cols < n_cols)
    _bias_gelu_dropout_add_fwd_tile(
        x_ptrs, bias, residual_ptrs, y_ptr + offsets, mask, seed_ptr, rows, first_col, n_cols, first, threshold,
        SOME_DROPPED, ALL_DROPPED, EIGHTS, COMPUTE, BLOCK_N,
    )  # fmt: skip
    if FOLD > 1 and pid_m == 0:
        row, left = last[None, :], n_rows // FOLD + tl.arange(0, 1).to(tl.int64)
        _bias_gelu_dropout_add_fwd_tile(
            x_ptr + row, bias, residual_ptr + row, y_ptr + row, behind[None, :], seed_ptr, left, first_col,
            n_cols, first, threshold, SOME_DROPPED, ALL_DROPPED, EIGHTS, COMPUTE, BLOCK_N,
        )  # fmt: skip


@triton.jit
def _bias_gelu_dropout_add_bwd_tile(
    dy_ptrs, x_ptrs, bias, dx_ptr, offsets, mask, seed_ptr, rows, first_col, n_cols, first, threshold,
    SOME_DROPPED: tl.constexpr, ALL_DROPPED: tl.constexpr, EIGHTS: tl.constexpr, COMPUTE: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    dy = tl.load(dy_ptrs, mask=mask, other=0.0).to(COMPUTE)
    x = tl.load(x_ptrs, mask=mask, other=0.0).to(COMPUTE)
    if ALL_DROPPED:
        dy *= 0.0
    elif SOME_DROPPED:
        scale = 65536.0 / (65536 - threshold).to(COMPUTE)
        keep = _keep_tile(seed_ptr, threshold, rows, first_col, n_cols, first, EIGHTS, BLOCK_N)
        dy *= tl.where(keep, scale, 0.0)
    dx = dy * _gelu_slope(x + bias[None, :])
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
        whole, last, behind = _fold_ends(n_rows, n_cols, cols, FOLD)
        bias_cols = cols.to(tl.int32) % (n_cols // FOLD)
    bias = tl.load(bias_ptr + bias_cols, mask=cols < n_cols).to(COMPUTE)

    for start in tl.range(0, rows_per_program, BLOCK_M, num_stages=NUM_STAGES):
        rows = pid_m.to(tl.int64) * rows_per_program + start + tl.arange(0, BLOCK_M)
        offsets = rows[:, None] * n_cols + cols[None, :]
        in_rows = offsets < whole if FOLD > 1 else (rows < n_rows)[:, None]
        mask = in_rows & (cols < n_cols)[None, :]
        dy_ptrs = dy_ptr + rows[:, None] * stride_dym + cols[None, :] * stride_dyn
        x_ptrs = x_ptr + rows[:, None] * stride_xm + cols[None, :] * stride_xn
        total += _bias_gelu_dropout_add_bwd_tile(
            dy_ptrs, x_ptrs, bias, dx_ptr, offsets, mask, seed_ptr, rows, first_col, n_cols, first, threshold,
            SOME_DROPPED, ALL_DROPPED, EIGHTS, COMPUTE, BLOCK_N,
        )  # fmt: skip

    sums = tl.sum(total, axis=0)
    if FOLD > 1 and pid_m == 0:
        row, left = last[None, :], n_rows // FOLD + tl.arange(0, 1).to(tl.int64)
        last_dx = _bias_gelu_dropout_add_bwd_tile(
            dy_ptr + row, x_ptr + row, bias, dx_ptr, row, behind[None, :], seed_ptr, left, first_col,
            n_cols, first, threshold, SOME_DROPPED, ALL_DROPPED, EIGHTS, COMPUTE, BLOCK_N,
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
def _flat_tile(n_cols, elements, widest):
    """BLOCK_M, BLOCK_N: a tile of so many elements, its rows at most `widest` long and at least 8."""
    block_n = max(8, min(triton.next_power_of_2(n_cols), widest))
    return max(1, elements // block_n), block_n


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
def _plan(n_cols):
    return Plan(*_flat_tile(n_cols, 2048, 1024))


@functools.cache
def _plan_backward(n_cols):
    """(BLOCK_M, BLOCK_N, strips)"""
    block_m, block_n = _flat_tile(n_cols, 2048, 64)
    # About 4096 programs fill any GPU; each sums as many rows as that leaves it, and at most 1024 strips
    # keep the second sum short.
    return block_m, block_n, max(1, min(_cdiv(4096, _cdiv(n_cols, block_n)), 1024))


def _launch(plan, fold, bias, x, residual, y, p, seed, first=0):
    """first: how many elements of the whole tensor come before these rows."""
    n_rows, n_cols, threshold = _cdiv(x.shape[0], fold), x.shape[1] * fold, _threshold(p)
    strides = (*x.stride(), *residual.stride()) if fold == 1 else (n_cols, 1) * 2
    _run(
        _bias_gelu_dropout_add_fwd_kernel, (_cdiv(n_rows, plan.block_m) * _cdiv(n_cols, plan.block_n),),
        (x, bias, residual, y, seed), x.shape[0], n_cols, first, threshold, *strides,
        SOME_DROPPED=threshold > 0, ALL_DROPPED=threshold == 65536, EIGHTS=n_cols % 8 == 0,
        COMPUTE=_compute_dtype(x.dtype), BLOCK_M=plan.block_m, BLOCK_N=plan.block_n, FOLD=fold, num_warps=2,
    )  # fmt: skip


def _launch_backward(plan, dy, x, dx, bias, p, seed, dtype, first=0):
    """Write dx unless it is None. Returns what each strip of rows adds to dbias, (strips, N), or None.

    dtype: that of dbias, None where it is not needed. Of one strip that is dbias itself, in this dtype.
    """
    threshold, fold = _threshold(p), _fold(x, dy, dx)
    n_rows, n_cols = _cdiv(x.shape[0], fold), x.shape[1] * fold
    strides = (*dy.stride(), *x.stride()) if fold == 1 else (n_cols, 1) * 2
    block_m, block_n, strips = plan and plan.backward or _plan_backward(n_cols)
    rows_per_program = _cdiv(_cdiv(n_rows, strips), block_m) * block_m
    strips, n_tiles = _cdiv(n_rows, rows_per_program), _cdiv(n_cols, block_n)
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    shape, alone = (strips * fold, x.shape[1]), strips * fold == 1
    partial = x.new_empty(shape, dtype=dtype if alone else wide) if dtype else None
    _run(
        _bias_gelu_dropout_add_bwd_kernel, (strips * n_tiles,), (dy, x, bias, dx, partial, seed),
        x.shape[0], n_cols, first, threshold, *strides, rows_per_program,
        SOME_DROPPED=threshold > 0, ALL_DROPPED=threshold == 65536, EIGHTS=n_cols % 8 == 0, NUM_STAGES=3,
        COMPUTE=_compute_dtype(x.dtype), BLOCK_M=block_m, BLOCK_N=block_n, FOLD=fold, num_warps=4,
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


def _rows_of(t):
    """t as (M, N): itself, a view, or a copy where strides allow none. None stays None."""
    return t if t is None or t.dim() == 2 else t.reshape(-1, t.shape[-1])


@functools.cache
def _dtype_of_sum(*dtypes):
    return functools.reduce(torch.promote_types, dtypes)


def _forward(x, bias, residual, p, seed, plan=None):
    dtype = _dtype_of_sum(x.dtype, bias.dtype, residual.dtype)
    y = torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)
    if y.numel() == 0:
        return y
    matrices = _rows_of(x), _rows_of(residual), _rows_of(y)
    fold = _fold(*matrices)
    _launch(plan or _plan(x.shape[-1] * fold), fold, bias.contiguous(), *matrices, p, seed)
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
    matrices = _rows_of(dy), _rows_of(x), _rows_of(dx)
    partial = _launch_backward(plan, *matrices, bias.contiguous(), p, seed, dtype)
    return dx, _sum_rows(partial, dtype) if has_dbias else None


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


class _BiasGeluDropoutAdd(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, bias, residual, p, seed, plan):
        _save(ctx, x, bias, residual, p, seed, plan)
        return _forward(x, bias, residual, p, seed, plan)

    @staticmethod
    @_once
    def backward(ctx, dy):
        dx, dbias, (x, bias, seed) = None, None, ctx.saved_tensors
        *needs_grad, needs_dresidual = ctx.needs_input_grad[:3]
        if any(needs_grad):
            dx, dbias = _backward(dy, x, bias, ctx.p, seed, needs_grad, ctx.plan)
        dresidual = dy.to(ctx.residual_dtype) if needs_dresidual else None
        return dx, dbias, dresidual, None, None, None


# --- the calls -----------------------------------------------------------------------------------------------


def _mix(*tensors):
    """Whether their dtypes may differ: under autocast x has 16 bits, and a bias that is a parameter 32."""
    return all([t.dtype in _DTYPES[:3] for t in tensors])


def _fits(x, bias, residual, p):
    """Whether the kernels take these arguments; if not, _refuse_arguments says why."""
    return (
        isinstance(x, torch.Tensor)
        and isinstance(bias, torch.Tensor)
        and isinstance(residual, torch.Tensor)
        and (x.dtype == bias.dtype == residual.dtype in _DTYPES or _mix(x, bias, residual))
        and x.device == bias.device == residual.device
        and x.device.type == ("cpu" if _ON_CPU else "cuda")
        and residual.shape == x.shape != ()
        and bias.shape == x.shape[-1:]
        and isinstance(p, (int, float))
        and not isinstance(p, bool)
        and 0 <= p <= 1
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


def _refuse_arguments(name, x, bias, residual, p):
    """What only this op can say, else what _refuse does."""
    if isinstance(p, bool) or not isinstance(p, (int, float)) or not 0 <= p <= 1:
        raise ValueError(f"{name}: p must be a number from 0 to 1, the share to drop, got {p!r}")
    a, b = (tuple(getattr(t, "shape", ())) for t in (x, residual))
    if a != b and () not in (a, b):  # lists and numbers are for _refuse
        raise ValueError(f"{name}: residual must have the shape of x, got x {a} and residual {b}")
    sizes = {"x": (x, "... N"), "bias": (bias, "N"), "residual": (residual, "... N")}
    _refuse(name, "bias_gelu_dropout_add_eager", _DTYPES[:3], **sizes)


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


def _seed_tensor(name, seed, device):
    """The seed as an int64 tensor of one element on `device`: fresh when None, and never copied to the host."""
    if seed is None:
        # From torch's generator of this device: torch.manual_seed, checkpointing and CUDA graphs all work.
        return torch.randint(2**63 - 1, (1,), dtype=torch.int64, device=device)
    if isinstance(seed, int) and not isinstance(seed, bool):
        return torch.full((1,), seed, dtype=torch.int64, device=device)
    is_one = isinstance(seed, torch.Tensor) and seed.dtype == torch.int64 and seed.numel() == 1
    if is_one and seed.device == device:
        return seed
    raise ValueError(
        f"{name}: seed must be None, an int, or an int64 tensor of one element on {device}, got {seed!r}"
    )


def _call(name, x, bias, residual, p, seed, training, plan):
    if not _fits(x, bias, residual, p):
        _refuse_arguments(name, x, bias, residual, p)
    if not isinstance(training, bool):
        raise TypeError(f"{name}: training must be True or False, got {training!r}")
    p = p if training else 0.0
    seed = _seed_tensor(name, seed, x.device)
    if torch.compiler.is_compiling():
        return bias_gelu_dropout_add_op(x, bias, residual, p, seed)
    try:
        if _needs_grad(x, bias, residual):
            return _BiasGeluDropoutAdd.apply(x, bias, residual, p, seed, plan)
        return _forward(x, bias, residual, p, seed, plan)  # past autograd: less time on the host
    except RuntimeError as error:
        _explain(error, name, "bias_gelu_dropout_add_eager")
        raise


def bias_gelu_dropout_add_triton(
    x: torch.Tensor, bias: torch.Tensor, residual: torch.Tensor, p: float = 0.1,
    seed: int | torch.Tensor | None = None, training: bool = True, *, plan: Plan | None = None,
) -> torch.Tensor:  # fmt: skip
    """dropout(gelu_tanh(x + bias), p) + residual in one Triton kernel, with gradients for all three tensors.

    x, residual: (..., N), any strides; bias: (N,), all on one device. p: share of elements dropped, 0 to 1,
    rounded to 1/65536, or none unless training; what is kept is divided by the share kept. seed: None draws one
    from torch's generator there, without waiting for the GPU; an int or an int64 tensor of one element fixes
    the mask. Returns y of x's shape, contiguous, in the dtype of the sum (x may have 16 bits and bias 32).
    plan: a Plan in place of the one chosen, for tuning; torch.compile leaves it out.
    Works under torch.compile (as the op fused_kernels::bias_gelu_dropout_add), autocast, checkpointing and
    CUDA graphs (each replay drops other elements); not under torch.func, torch.vmap or forward-mode AD, nor
    twice differentiable: these raise.
    Raises TypeError for a wrong dtype, ValueError for a wrong shape, device, p or seed.
    """
    return _call("bias_gelu_dropout_add_triton", x, bias, residual, p, seed, training, plan)


@torch.library.custom_op("fused_kernels::bias_gelu_dropout_add", mutates_args=())
def bias_gelu_dropout_add_op(
    x: torch.Tensor, bias: torch.Tensor, residual: torch.Tensor, p: float, seed: torch.Tensor
) -> torch.Tensor:
    """For torch.compile and torch.export: one node of the graph, which nothing looks into."""
    if not _fits(x, bias, residual, p):
        _refuse_arguments("bias_gelu_dropout_add_op", x, bias, residual, p)
    return _forward(x, bias, residual, p, seed)


@torch.library.custom_op("fused_kernels::bias_gelu_dropout_add_backward", mutates_args=())
def _bias_gelu_dropout_add_backward_op(
    dy: torch.Tensor, x: torch.Tensor, bias: torch.Tensor, p: float, seed: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return _backward(dy, x, bias, p, seed)


@bias_gelu_dropout_add_op.register_fake
def _(x, bias, residual, p, seed):
    return x.new_empty(x.shape, dtype=_dtype_of_sum(x.dtype, bias.dtype, residual.dtype))


@_bias_gelu_dropout_add_backward_op.register_fake
def _(dy, x, bias, p, seed):
    return torch.empty(x.shape, dtype=x.dtype, device=x.device), torch.empty_like(bias)


def _op_backward(ctx, dy):
    x, bias, seed = ctx.saved_tensors
    return *_bias_gelu_dropout_add_backward_op(dy, x, bias, ctx.p, seed), dy, None, None


bias_gelu_dropout_add_op.register_autograd(
    _op_backward, setup_context=lambda ctx, inputs, output: _save(ctx, *inputs)
)


class BiasGELUDropoutAdd(torch.nn.Module):
    """dropout(gelu_tanh(x + bias), p) + residual, the bias being a parameter; nothing is dropped in eval()."""

    def __init__(
        self, features: int, p: float = 0.1,
        device: torch.device | str | None = None, dtype: torch.dtype | None = None,
    ):  # fmt: skip
        super().__init__()
        self.p, self.bias = p, torch.nn.Parameter(torch.zeros(features, device=device, dtype=dtype))

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return bias_gelu_dropout_add_triton(x, self.bias, residual, self.p, training=self.training)

    def extra_repr(self):
        return f"{len(self.bias)}, p={self.p}"
