# SPDX-License-Identifier: MIT
# Copyright (c) 2026 The Fused Kernels authors; Fused Kernels 0.1.0, lib/ops/matmul.py
"""matmul: y = act(a b + bias), one product by tensor cores whose result is finished before it is stored.

Shapes    a: (..., M, K), b: (K, N), any strides; bias: (N,) or None; y: (..., M, N), contiguous.
Act       identity, relu, gelu (erf), gelu_tanh, silu or sigmoid, of the sum before it is rounded: an epilogue.
Dtypes    float16, bfloat16 (summed in float32), float32 and float64. Tensor cores read 10 bits of a float32's
          mantissa, TF32. So float32 goes by 3xTF32: each number is a sum of two TF32, multiplied in three
          products. That is as accurate as float32 units and faster; allow_tf32=True takes one product.
          3xTF32 makes infinite what is within 1/4096 of the largest float32.
Work      2MNK FLOPs forward, 4MNK backward. Traffic: at least (MK + KN + MN)s bytes for elements of s bytes;
          with tiles of BM x BN the SMs ask L2 for MNK(1/BM + 1/BN) elements of a and b.
Ways      tiles: one program for each tile of y; cp.async brings the next pieces of a and b meanwhile.
          split-K: few tiles and a long K, which programs share; a second kernel sums their parts in order.
          cublas: a product of 16 bits that is neither large nor followed by an activation: nothing to fuse.
          tma: a large product of 16 bits on Hopper; one program for each SM goes from tile to tile.
Backward  dz = dy·act'(z), z = a b + bias, in one kernel that sums dbias by strips; da = dz bᵀ, db = aᵀ dz by
          the kernels above, which read through strides. Saves a, b, and y (relu, sigmoid) or z (others).
Tuned     on an H200. Other GPUs get two tiles that are correct, and not tuned.
Copy it   this file for Triton; matmul.cu beside it for CUDA. MIT licence.
"""

import contextlib
import fcntl
import functools
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch._functorch.pyfunctorch import retrieve_all_functorch_interpreters
from torch.autograd import forward_ad
from triton.tools.tensor_descriptor import TensorDescriptor

# With TRITON_INTERPRET=1 kernels run on CPU tensors; otherwise they need a GPU.
_ON_CPU = triton.knobs.runtime.interpret
_INTERPRETED = tl.constexpr(_ON_CPU)
_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
_ACTIVATIONS = {
    "identity": lambda z: z,
    "relu": torch.relu,
    "gelu": F.gelu,
    "gelu_tanh": functools.partial(F.gelu, approximate="tanh"),
    "silu": F.silu,
    "sigmoid": torch.sigmoid,
}
_OF_Z = ("gelu", "gelu_tanh", "silu")  # their slope is taken from z; relu's and sigmoid's from y


class Tile(NamedTuple):
    """A piece of y, m x n, made of pieces of a, m x k, and of b, k x n; its warps and stages."""

    m: int
    n: int
    k: int
    num_warps: int
    num_stages: int


class Plan(NamedTuple):
    """How one call is launched. backward: (BLOCK_M, BLOCK_N, strips) of dz, or None to have it chosen."""

    tile: Tile
    way: str = (
        "tiles"  # or "tma", which is "tiles" where it cannot be; "cublas"; "naive": no tensor cores
    )
    n_parts: int = 1  # split-K from 2 on
    group: int = 8  # rows of tiles that programs go down together
    copies: bool = False  # whether a and b are copied if their rows are not aligned
    backward: tuple[int, int, int] | None = None


def matmul_eager(
    a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None = None, activation: str = "identity"
) -> torch.Tensor:
    z = a @ b
    return _ACTIVATIONS[activation](z if bias is None else z + bias)


@triton.jit
def _dot(a, b, total, PRECISION: tl.constexpr = None, COMPUTE: tl.constexpr = tl.float32):
    # total + a b. Triton's interpreter multiplies bfloat16 as the integers that hold its bits: there wider.
    if _INTERPRETED:
        a, b = a.to(COMPUTE), b.to(COMPUTE)
    return tl.dot(a, b, total, input_precision=PRECISION, out_dtype=COMPUTE)


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
def _place_of(
    tile, n_rows, n_cols, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    # Row and column, in tiles, of number `tile`: down GROUP rows, then a column on. So the tiles at work at one
    # time are nearly a square of y, which needs the fewest rows of a and columns of b. GROUP 1: along the rows.
    tiles_m, tiles_n = tl.cdiv(n_rows, BLOCK_M), tl.cdiv(n_cols, BLOCK_N)
    first = tile // (GROUP * tiles_n) * GROUP
    height = tl.minimum(tiles_m - first, GROUP)
    tile = tile % (GROUP * tiles_n)
    return first + tile % height, tile // height


@triton.jit
def _halves(x):
    # Left and right half of the columns, each with all the threads at work.
    return tl.split(tl.permute(tl.reshape(x, (x.shape[0], 2, x.shape[1] // 2)), (0, 2, 1)))


@triton.jit
def _store_tile(z, bias_ptr, y_ptr, z_ptr, rows, cols, n_rows, n_cols, ACTIVATION: tl.constexpr):
    # The epilogue: bias, activation and rounding while the sums are in registers.
    if bias_ptr is not None:
        z += tl.load(bias_ptr + cols, mask=cols < n_cols, other=0.0).to(z.dtype)[None, :]
    offsets = rows[:, None] * n_cols + cols[None, :]
    mask = (rows < n_rows)[:, None] & (cols < n_cols)[None, :]
    y = _activate(z, ACTIVATION).to(y_ptr.dtype.element_ty)
    tl.store(y_ptr + offsets, y, mask=mask)
    if z_ptr is not None:
        tl.store(z_ptr + offsets, z.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _matmul_kernel(
    a_ptr, b_ptr, bias_ptr, y_ptr, z_ptr, n_rows, n_cols, n_inner,
    stride_am, stride_ak, stride_bk, stride_bn, inner_per_part,
    ACTIVATION: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr, COMPUTE: tl.constexpr,
    GROUP: tl.constexpr, HALVES: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    # One program handles one tile of y, (BLOCK_M, BLOCK_N), in steps of BLOCK_K. With split-K it adds up only
    # inner_per_part of the products, and y is (parts, n_rows, n_cols).
    pid_m, pid_n = _place_of(tl.program_id(0), n_rows, n_cols, GROUP, BLOCK_M, BLOCK_N)
    start = tl.program_id(1) * inner_per_part
    # int64: row * stride passes 2**31 from 4 GiB of bfloat16 on
    rows = pid_m.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = pid_n.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    inner = (start + tl.arange(0, BLOCK_K)).to(tl.int64)
    a_ptrs = a_ptr + rows[:, None] * stride_am + inner[None, :] * stride_ak
    b_ptrs = b_ptr + inner[:, None] * stride_bk + cols[None, :] * stride_bn
    row_mask, col_mask = (rows < n_rows)[:, None], (cols < n_cols)[None, :]

    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=COMPUTE)
    for k in range(start, start + tl.minimum(inner_per_part, n_inner - start), BLOCK_K):
        inside = tl.arange(0, BLOCK_K) < n_inner - k  # masked-off columns must contribute 0
        a = tl.load(a_ptrs, mask=row_mask & inside[None, :], other=0.0)
        b = tl.load(b_ptrs, mask=inside[:, None] & col_mask, other=0.0)
        if DOT:
            total = _dot(a, b, total, PRECISION, COMPUTE)
        else:
            # Not a[:, :, None] * b[None, :, :] summed over axis 1: Triton makes a dot of that, float32 in tf32
            total += tl.sum(a.to(COMPUTE).T[:, :, None] * b.to(COMPUTE)[:, None, :], axis=0)
        a_ptrs += tl.cast(stride_ak, tl.int64) * BLOCK_K
        b_ptrs += tl.cast(stride_bk, tl.int64) * BLOCK_K
    y_ptr += tl.program_id(1).to(tl.int64) * n_rows * n_cols
    if HALVES:
        left, right = _halves(total)
        cols = pid_n.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N // 2)
        _store_tile(left, bias_ptr, y_ptr, z_ptr, rows, cols, n_rows, n_cols, ACTIVATION)
        cols += BLOCK_N // 2
        _store_tile(right, bias_ptr, y_ptr, z_ptr, rows, cols, n_rows, n_cols, ACTIVATION)
    else:
        _store_tile(total, bias_ptr, y_ptr, z_ptr, rows, cols, n_rows, n_cols, ACTIVATION)


@triton.jit(do_not_specialize=["n_parts"])
def _sum_parts_kernel(
    parts_ptr, bias_ptr, y_ptr, z_ptr, n_rows, n_cols, n_parts,
    ACTIVATION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    # One program handles one tile of y, (BLOCK_M, BLOCK_N), of all parts: split-K's second half.
    n_tiles = tl.cdiv(n_cols, BLOCK_N)
    pid_m, pid_n = tl.program_id(0) // n_tiles, tl.program_id(0) % n_tiles
    rows = pid_m.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = pid_n.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = (rows < n_rows)[:, None] & (cols < n_cols)[None, :]
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=parts_ptr.dtype.element_ty)
    # in one order, whichever part was ready first: the same bits in every run
    for _ in range(n_parts):
        total += tl.load(parts_ptr + rows[:, None] * n_cols + cols[None, :], mask=mask, other=0.0)
        rows += n_rows
    rows -= n_parts * n_rows
    _store_tile(total, bias_ptr, y_ptr, z_ptr, rows, cols, n_rows, n_cols, ACTIVATION)


@triton.jit
def _store_by_tma(z, bias_ptr, y_desc, z_desc, row, col, n_cols, ACTIVATION: tl.constexpr):
    # As _store_tile; TMA leaves out by itself what lies outside.
    if bias_ptr is not None:
        cols = col + tl.arange(0, z.shape[1])
        z += tl.load(bias_ptr + cols, mask=cols < n_cols, other=0.0).to(tl.float32)[None, :]
    if z_desc is not None:
        z_desc.store([row, col], z.to(z_desc.dtype))
    y_desc.store([row, col], _activate(z, ACTIVATION).to(y_desc.dtype))


@triton.jit
def _matmul_persistent_kernel(
    a_desc, b_desc, bias_ptr, y_desc, z_desc, n_rows, n_cols, n_inner,
    A_TRANSPOSED: tl.constexpr, B_TRANSPOSED: tl.constexpr, ACTIVATION: tl.constexpr,
    GROUP: tl.constexpr, HALVES: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    # One program handles every n-th tile of y, (BLOCK_M, BLOCK_N), where n programs run: one for each SM.
    # A descriptor holds address, sizes and strides: one thread asks for a whole piece, with zeros outside.
    n_tiles = tl.cdiv(n_rows, BLOCK_M) * tl.cdiv(n_cols, BLOCK_N)
    for tile in tl.range(tl.program_id(0), n_tiles, tl.num_programs(0)):
        pid_m, pid_n = _place_of(tile, n_rows, n_cols, GROUP, BLOCK_M, BLOCK_N)
        row, col = pid_m * BLOCK_M, pid_n * BLOCK_N
        total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for k in range(0, n_inner, BLOCK_K):
            a = a_desc.load([k, row]).T if A_TRANSPOSED else a_desc.load([row, k])
            b = b_desc.load([col, k]).T if B_TRANSPOSED else b_desc.load([k, col])
            total = _dot(a, b, total)
        if HALVES:
            left, right = _halves(total)
            _store_by_tma(left, bias_ptr, y_desc, z_desc, row, col, n_cols, ACTIVATION)
            col += BLOCK_N // 2
            _store_by_tma(right, bias_ptr, y_desc, z_desc, row, col, n_cols, ACTIVATION)
        else:
            _store_by_tma(total, bias_ptr, y_desc, z_desc, row, col, n_cols, ACTIVATION)


@triton.jit(do_not_specialize=["n_rows", "rows_per_program"])
def _dz_kernel(
    dy_ptr, saved_ptr, dz_ptr, partial_ptr, n_rows, n_cols, stride_dym, stride_dyn, rows_per_program,
    ACTIVATION: tl.constexpr, NUM_STAGES: tl.constexpr,
    COMPUTE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    # One program handles rows_per_program rows of BLOCK_N columns, BLOCK_M rows at a time, and adds
    # them up on the way: its row of partial, (programs down, n_cols), is its share of dbias.
    n_tiles = tl.cdiv(n_cols, BLOCK_N)
    pid_m, pid_n = tl.program_id(0) // n_tiles, tl.program_id(0) % n_tiles
    cols = pid_n.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=COMPUTE)
    for start in tl.range(0, rows_per_program, BLOCK_M, num_stages=NUM_STAGES):
        rows = pid_m.to(tl.int64) * rows_per_program + start + tl.arange(0, BLOCK_M)
        mask = (rows < n_rows)[:, None] & (cols < n_cols)[None, :]
        dy_offsets = rows[:, None] * stride_dym + cols[None, :] * stride_dyn
        dz = tl.load(dy_ptr + dy_offsets, mask=mask, other=0.0).to(COMPUTE)
        offsets = rows[:, None] * n_cols + cols[None, :]
        if saved_ptr is not None:
            saved = tl.load(saved_ptr + offsets, mask=mask, other=0.0).to(COMPUTE)
            dz = _slope_times(dz, saved, ACTIVATION)  # 0·act'(0) is 0 in a row that is not there
        if dz_ptr is not None:
            tl.store(dz_ptr + offsets, dz, mask=mask)
        total += dz
    if partial_ptr is not None:
        sums = tl.sum(total, axis=0)
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

# What was tuned, on an H200. The tiles, from large to small, by what multiplies: tensor cores on 16 bits
# ("half"), on TF32 or on three times TF32, or on float64 ("double"). _choose says which one is taken.
_TILES = {
    "half": (Tile(128, 256, 64, 8, 3), Tile(128, 128, 64, 8, 4), Tile(64, 128, 128, 4, 3),
             Tile(64, 64, 128, 4, 3), Tile(64, 16, 128, 4, 4), Tile(16, 64, 128, 4, 4),
             Tile(16, 16, 128, 2, 4)),
    "tf32": (Tile(128, 128, 32, 8, 3), Tile(64, 64, 32, 4, 3),
             Tile(64, 16, 64, 4, 3), Tile(16, 64, 64, 4, 3), Tile(16, 16, 64, 2, 3)),
    "tf32x3": (Tile(128, 64, 32, 4, 3), Tile(64, 64, 32, 4, 3),
               Tile(64, 16, 32, 4, 3), Tile(16, 32, 64, 4, 3), Tile(16, 16, 64, 4, 3)),
    "double": (Tile(64, 64, 16, 4, 3), Tile(16, 16, 16, 2, 3)),
    # Unaligned rows load one element per instruction. cp.async cannot pipeline that in 16 bits: num_stages=1.
    "half, unaligned": (Tile(128, 128, 64, 8, 1), Tile(128, 64, 64, 8, 1), Tile(64, 64, 64, 4, 1),
                        Tile(64, 16, 64, 4, 1), Tile(16, 64, 64, 4, 1), Tile(16, 16, 64, 2, 1)),
    "tf32, unaligned": (Tile(128, 64, 32, 8, 1), Tile(64, 64, 32, 4, 1),
                        Tile(64, 16, 32, 4, 1), Tile(16, 32, 64, 4, 1), Tile(16, 16, 64, 4, 1)),
    # On other GPUs these two are correct, and not tuned; one stage for unaligned rows, and without cp.async.
    "elsewhere": (Tile(64, 64, 32, 4, 3), Tile(16, 16, 64, 4, 3)),
    "elsewhere, one stage": (Tile(64, 64, 16, 4, 1), Tile(16, 16, 32, 4, 1)),
}  # fmt: skip
_HALVES_FROM = 256  # tiles this wide are stored in halves: fewer registers, less shared memory
# M·N·K from which descriptors, and copies with aligned rows, cost less than they save
_LARGE = 2**32
_CUBLAS_UP_TO = 2**35  # M·N·K below which cuBLAS is called; above it may still be faster
_ENOUGH = 0.75  # of the SMs have a tile: no smaller one is tried
_MOST_PARTS, _LEAST_STEPS = 32, 8  # split-K: parts at most, and steps in each at least
_RESIDENT = {"tf32x3": 2}  # programs that an SM needs, where it is not one, to be busy
_PROGRAMS, _MOST_STRIPS = 8192, 1024  # for dz: enough for any GPU; partial sums of dbias


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


def _power_of_2(n):
    return 1 << max(0, n - 1).bit_length()  # so is triton.next_power_of_2


def _compute_dtype(dtype):
    return tl.float64 if dtype == torch.float64 else tl.float32


def _kind(dtype, allow_tf32):
    if dtype == torch.float32:
        return "tf32" if allow_tf32 else "tf32x3"
    return "double" if dtype == torch.float64 else "half"


@functools.cache
def _n_multiprocessors(device):
    return 4 if _ON_CPU else torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def _generation(device):
    """The major number of the compute capability: 7 is Turing, 8 Ampere and Ada, 9 Hopper, 10 Blackwell."""
    return 9 if _ON_CPU else torch.cuda.get_device_capability(device)[0]


def _tiles(kind, generation, aligned=True):
    if kind == "double":
        return _TILES["double"]
    if not 9 <= generation < 12:  # desktops' Blackwell, 12, has no more shared memory than Ampere
        return _TILES["elsewhere" if aligned and generation >= 8 else "elsewhere, one stage"]
    return _TILES[kind if aligned else "half, unaligned" if kind == "half" else "tf32, unaligned"]


@functools.lru_cache(4096)
def _choose(m, n, k, kind, device, aligned=True):
    """(tile, parts of K): the largest tile that gives most SMs work, a long K cut in parts."""
    n_multiprocessors = _n_multiprocessors(device)
    tiles = _tiles(kind, _generation(device), aligned)
    n_programs = n_multiprocessors * _RESIDENT.get(kind, 1)
    chosen, sizes = (tiles[-1], 1), (_power_of_2(m), _power_of_2(n))
    # in m and n neither mostly empty nor needlessly many
    fit = [
        tile
        for tile in tiles
        if all(min(64, size) // 2 <= t <= max(16, size) for t, size in zip(tile[:2], sizes))
    ]
    for tile in fit if tiles is _TILES["half"] else []:
        # a smaller tile rather than parts of K, which are written and read again
        if _cdiv(m, tile.m) * _cdiv(n, tile.n) >= _ENOUGH * n_multiprocessors:
            return tile, 1
    for tile in fit:
        n_tiles = _cdiv(m, tile.m) * _cdiv(n, tile.n)
        parts = min(_MOST_PARTS, k // (_LEAST_STEPS * tile.k), n_programs // n_tiles)
        chosen = tile, max(1, parts)
        if n_tiles * max(1, parts) >= _ENOUGH * n_multiprocessors:
            break
    return chosen


def _is_aligned(t):
    """Whether the kernel can load 16 bytes at a time: Triton asks for a pitch that is a multiple of 16."""
    pitch = max(t.stride()) if min(t.shape) > 1 else 0
    return pitch % 16 == t.data_ptr() % 16 == 0


def _plan(a, b, kind, activation="identity"):
    (m, k), n = a.shape, b.shape[1]
    large = m * n * k >= _LARGE
    aligned = _is_aligned(a) and _is_aligned(b)
    bare = kind == "half" and activation == "identity" and not _ON_CPU
    if bare and aligned and m * n * k < _CUBLAS_UP_TO:  # it is slow at odd rows
        return Plan(_TILES["half"][0], "cublas")
    aligned = large or aligned
    tile, n_parts = _choose(m, n, k, kind, a.device, aligned)
    by_tma = large and n_parts == 1 and tile.m >= 64 and tile.n >= 64
    return Plan(tile, "tma" if by_tma else "tiles", n_parts, copies=large)


@functools.cache
def _plan_backward(n_cols, dtype):
    """(BLOCK_M, BLOCK_N, strips): tiles of 8 KB, and as many strips as fill any GPU."""
    block_n = min(128, _power_of_2(n_cols))
    strips = max(1, min(_cdiv(_PROGRAMS, _cdiv(n_cols, block_n)), _MOST_STRIPS))
    return 8192 // dtype.itemsize // block_n, block_n, strips


def _with_pitch(t):
    """Memory for the numbers of t whose rows begin on 16-byte boundaries, a multiple of 16 elements apart."""
    return t.new_empty(t.shape[0], _cdiv(t.shape[1], 16) * 16)[:, : t.shape[1]]


def _to_aligned(t):
    """t, or a copy in the same order whose rows, or columns, can be loaded 16 bytes at a time."""
    if _is_aligned(t):
        return t
    return _with_pitch(t).copy_(t) if t.stride(1) == 1 else _to_aligned(t.t()).t()


def _tma_reads(t):
    """Whether TMA can read this matrix: rows without gaps in them, which begin on 16-byte boundaries."""
    pitch, step = t.stride()
    return step == 1 and pitch >= t.shape[1] and pitch * t.itemsize % 16 == t.data_ptr() % 16 == 0


def _for_tma(t):
    """(a matrix that TMA reads, whether it is t's transpose): t itself, a view, or a copy."""
    if _tma_reads(t):
        return t, False
    return (t.t(), True) if _tma_reads(t.t()) else (_with_pitch(t).copy_(t), False)


def _launch(plan, y, z, a, b, bias, activation, kind):
    """Write y, and z = a b + bias unless it is None."""
    if plan.way == "cublas":
        _launch_bare(a, b, bias, y, z, activation)
        return
    tile, n_inner = plan.tile, a.shape[1]
    if plan.way == "tma" and kind == "half" and n_inner > 0 and 9 <= _generation(a.device) < 12:
        _launch_persistent(plan, y, z, a, b, bias, activation)
        return
    if plan.copies:
        a, b = _to_aligned(a), _to_aligned(b)
    # split-K: whole steps are longer, and parts may be fewer
    inner_per_part = _cdiv(_cdiv(n_inner, plan.n_parts), tile.k) * tile.k
    n_parts = _cdiv(n_inner, inner_per_part or 1)
    if n_parts <= 1:
        _launch_tiles(plan, inner_per_part, y, z, a, b, bias, activation, kind)
        return
    wide = torch.float64 if y.dtype == torch.float64 else torch.float32
    parts = torch.empty((n_parts, *y.shape), dtype=wide, device=y.device)
    _launch_tiles(plan, inner_per_part, parts, None, a, b, None, "identity", kind)
    (n_rows, n_cols), block_m, block_n = y.shape, 8, min(128, _power_of_2(y.shape[1]))
    _run(
        _sum_parts_kernel, (_cdiv(n_rows, block_m) * _cdiv(n_cols, block_n),), (parts, bias, y, z),
        n_rows, n_cols, n_parts, ACTIVATION=activation, BLOCK_M=block_m, BLOCK_N=block_n, num_warps=4,
    )  # fmt: skip


def _for_cublas(t):
    """t; a copy where rows or columns begin 2 GiB apart, at which cuBLAS reads memory that is not t's."""
    return t.contiguous() if any(s * t.itemsize >= 2**31 for s in t.stride()) else t


def _launch_bare(a, b, bias, y, z, activation):
    """The product by cuBLAS, then the activation of what it has rounded."""
    total = y if z is None else z
    a, b = _for_cublas(a), _for_cublas(b)
    if bias is None:
        torch.mm(a, b, out=total)
    else:
        torch.addmm(bias, a, b, out=total)
    if activation != "identity":
        y.copy_(_ACTIVATIONS[activation](total))


def _launch_tiles(plan, inner_per_part, y, z, a, b, bias, activation, kind):
    """One program for each tile of y; y may be (parts, M, N)."""
    tile, (*parts, n_rows, n_cols), n_inner = plan.tile, y.shape, a.shape[1]
    tensor_cores = "tf32" in kind and _generation(a.device) >= 8  # as to float32
    _run(
        _matmul_kernel, (_cdiv(n_rows, tile.m) * _cdiv(n_cols, tile.n), *(parts or (1,))),
        (a, b, bias, y, z), n_rows, n_cols, n_inner, *a.stride(), *b.stride(), inner_per_part,
        ACTIVATION=activation, DOT=plan.way != "naive", PRECISION=kind if tensor_cores else "ieee",
        COMPUTE=_compute_dtype(a.dtype), GROUP=plan.group, HALVES=tile.n >= _HALVES_FROM,
        BLOCK_M=tile.m, BLOCK_N=tile.n, BLOCK_K=tile.k,
        num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip


def _launch_persistent(plan, y, z, a, b, bias, activation):
    tile, (n_rows, n_cols), n_inner = plan.tile, y.shape, a.shape[1]
    (a, a_transposed), (b, b_transposed) = _for_tma(a), _for_tma(b)
    outs = [t if t is None or n_cols % 8 == 0 else _with_pitch(t) for t in (y, z)]
    halves = tile.n >= _HALVES_FROM
    out_block = [tile.m, tile.n // 2 if halves else tile.n]
    n_tiles = _cdiv(n_rows, tile.m) * _cdiv(n_cols, tile.n)
    _run(
        _matmul_persistent_kernel, (min(n_tiles, _n_multiprocessors(y.device)),),
        (
            TensorDescriptor.from_tensor(a, [tile.k, tile.m] if a_transposed else [tile.m, tile.k]),
            TensorDescriptor.from_tensor(b, [tile.n, tile.k] if b_transposed else [tile.k, tile.n]), bias,
            *(None if t is None else TensorDescriptor.from_tensor(t, out_block) for t in outs),
        ),
        n_rows, n_cols, n_inner, A_TRANSPOSED=a_transposed, B_TRANSPOSED=b_transposed,
        ACTIVATION=activation, GROUP=plan.group, HALVES=halves,
        BLOCK_M=tile.m, BLOCK_N=tile.n, BLOCK_K=tile.k,
        num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
    for t, out in zip((y, z), outs):
        if out is not t:
            t.copy_(out)


def _launch_backward(plan, dy, saved, dz, has_dbias, activation):
    """Write dz unless it is None. Returns what each strip of rows adds to dbias, (strips, N), or None."""
    n_rows, n_cols = dy.shape
    block_m, block_n, strips = plan or _plan_backward(n_cols, dy.dtype)
    rows_per_program = _cdiv(_cdiv(n_rows, strips), block_m) * block_m
    strips, n_tiles = _cdiv(n_rows, rows_per_program), _cdiv(n_cols, block_n)
    wide = dy.dtype if strips == 1 or dy.dtype == torch.float64 else torch.float32
    partial = dy.new_empty((strips, n_cols), dtype=wide) if has_dbias else None
    aligned = n_cols % 16 == 0 and dy.stride(1) == 1
    _run(
        _dz_kernel, (strips * n_tiles,), (dy, saved, dz, partial),
        n_rows, n_cols, *dy.stride(), rows_per_program,
        ACTIVATION=activation, NUM_STAGES=3 if aligned else 1, COMPUTE=_compute_dtype(dy.dtype),
        BLOCK_M=block_m, BLOCK_N=block_n, num_warps=8,
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


def _forward(a, b, bias, activation, allow_tf32, save_z=False, plan=None, launch=_launch):
    """y, and z = a b + bias if it is to be saved, else None."""
    y = a.new_empty(a.shape[0], b.shape[1])
    z = torch.empty_like(y) if save_z else None
    if y.numel() > 0:
        bias, kind = None if bias is None else bias.contiguous(), _kind(a.dtype, allow_tf32)
        # every element is read many times: with gaps along rows and along columns, better from a copy
        a, b = a if 1 in a.stride() else a.contiguous(), b if 1 in b.stride() else b.contiguous()
        launch(plan or _plan(a, b, kind, activation), y, z, a, b, bias, activation, kind)
    return y, z


def _save(ctx, a, b, bias, y, z, activation, allow_tf32, all_inputs=False):
    """a for db, b for da, and y or z for dz.

    all_inputs: save all, to compute z again, and so that a second derivative reaches them and is refused.
    """
    ctx.how = activation, allow_tf32
    # compiled, arguments left at their defaults are not counted in needs_input_grad
    ctx.needs_grad = [*ctx.needs_input_grad[:2], bias is not None and ctx.needs_input_grad[2]]
    has_da, has_db, _ = ctx.needs_grad
    saved = None if activation == "identity" else z if activation in _OF_Z else y
    if not all_inputs:
        a, b, bias = a if has_db else None, b if has_da else None, None
    ctx.save_for_backward(a, b, bias, saved)


def _backward(dy, a, b, saved, activation, allow_tf32, needs_grad, plan=None):
    """da, db, dbias, each None unless needed; saved is y or z, None for identity; a, b None if not needed."""
    has_da, has_db, has_dbias = needs_grad
    dz, dbias = _dz(dy, saved, activation, has_da or has_db, has_dbias, plan and plan.backward)
    da = _forward(dz, b.t(), None, "identity", allow_tf32)[0] if has_da else None
    db = _forward(a.t(), dz, None, "identity", allow_tf32)[0] if has_db else None
    return da, db, dbias


def _dz(dy, saved, activation, has_dz, has_dbias, plan=None):
    """dz = dy·act'(z), dy itself for identity, and its sum over rows; each None unless asked for."""
    dz = torch.empty_like(saved) if has_dz and saved is not None else None
    result = dy if has_dz and saved is None else dz
    if dy.numel() == 0 or not (has_dbias or dz is not None):
        return result, dy.new_zeros(dy.shape[1]) if has_dbias else None
    partial = _launch_backward(plan, dy, saved, dz, has_dbias, activation)
    return result, _sum_rows(partial, dy.dtype) if has_dbias else None


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


class _Matmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, b, bias, activation, allow_tf32, forward, plan):
        y, z = forward(a, b, bias, activation, allow_tf32, activation in _OF_Z, plan)
        _save(ctx, a, b, bias, y, z, activation, allow_tf32)
        ctx.plan = plan
        ctx.set_materialize_grads(False)  # no zeros for z's gradient
        return y, z  # z too: by it a second derivative finds its way to the inputs

    @staticmethod
    @_once
    def backward(ctx, dy, _):
        if dy is None:  # y is used, and has no gradient all the same
            return (None,) * 7
        a, b, _, saved = ctx.saved_tensors
        grads = _backward(dy, a, b, saved, *ctx.how, ctx.needs_grad, ctx.plan)
        return *grads, None, None, None, None


# --- the calls -----------------------------------------------------------------------------------------------


def _autocast(*tensors):
    """Under autocast the tensors in its dtype, as torch's own products take them."""
    device = "cpu" if _ON_CPU else "cuda"
    if not torch.is_autocast_enabled(device):
        return tensors
    dtype, casts = torch.get_autocast_dtype(device), _DTYPES[:3]
    return [t.to(dtype) if getattr(t, "dtype", None) in casts else t for t in tensors]


def _fits(a, b, bias, activation):
    """Whether the kernels take these arguments; if not, _refuse says why."""
    return (
        isinstance(a, torch.Tensor)
        and isinstance(b, torch.Tensor)
        and a.dtype == b.dtype in _DTYPES
        and a.device == b.device
        and a.device.type == ("cpu" if _ON_CPU else "cuda")
        and a.dim() == b.dim() == 2
        and a.shape[1] == b.shape[0]
        and activation in _ACTIVATIONS
        and (
            bias is None
            or isinstance(bias, torch.Tensor)
            and bias.dtype == a.dtype
            and bias.device == a.device
            and bias.shape == b.shape[1:]
        )
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


def _refuse_arguments(name, a, b, bias, activation):
    """What matmul alone has to say; the rest is _refuse's."""
    of_a, of_b = (tuple(t.shape) if isinstance(t, torch.Tensor) else None for t in (a, b))
    if of_a is not None and len(of_a) != 2:
        hint = "one row is passed as a[None]" if len(of_a) == 1 else "use a.flatten(0, -2)"
        raise ValueError(f"{name}: a must be (..., M, K), got {of_a}; {hint}")
    if of_a and of_b and len(of_b) == 2 and of_a[1] != of_b[0]:
        weight = "a weight of a linear layer, (N, K), is passed as weight.t()"
        raise ValueError(f"{name}: b must be (K, N) with K = {of_a[1]}, got {of_b}; {weight}")
    if activation not in _ACTIVATIONS:
        known = ", ".join(_ACTIVATIONS)
        raise ValueError(f"{name}: activation must be one of {known}; got {activation!r}")
    tensors = {"a": (a, "M K"), "b": (b, "K N")} | ({} if bias is None else {"bias": (bias, "N")})
    _refuse(name, "matmul_eager", **tensors)


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


def _call(name, forward, a, b, bias, activation, allow_tf32, plan):
    if isinstance(a, torch.Tensor) and a.dim() > 2:
        y = _call(name, forward, a.flatten(0, -2), b, bias, activation, allow_tf32, plan)
        return y.unflatten(0, a.shape[:-1])
    a, b, bias = _autocast(a, b, bias)
    if not _fits(a, b, bias, activation):
        _refuse_arguments(name, a, b, bias, activation)
    needs_grad = _needs_grad(a, b) if bias is None else _needs_grad(a, b, bias)
    if torch.compiler.is_compiling():
        save_z = needs_grad and activation in _OF_Z
        return matmul_op(a, b, bias, activation, allow_tf32, save_z)[0]
    try:
        if needs_grad:
            return _Matmul.apply(a, b, bias, activation, allow_tf32, forward, plan)[0]
        return forward(a, b, bias, activation, allow_tf32, False, plan)[0]
    except RuntimeError as error:
        _explain(error, name, "matmul_eager")
        raise


def matmul_triton(
    a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None = None, activation: str = "identity",
    allow_tf32: bool = False, *, plan: Plan | None = None,
) -> torch.Tensor:  # fmt: skip
    """act(a b + bias) by Triton kernels chosen for these shapes, with gradients for a, b and bias.

    a: (..., M, K), b: (K, N), any strides, so that a layer's weight (N, K) is passed as weight.t(); bias: (N,)
    or None, all of one dtype and device; activation: identity, relu, gelu, gelu_tanh, silu or sigmoid;
    allow_tf32: whether tensor cores may round float32 to TF32.
    Returns y, (..., M, N), contiguous. K = 0 gives act(bias). The same bits in every run.
    plan: a Plan in place of the one chosen, for tuning; torch.compile leaves it out.
    Works under torch.compile (as the op fused_kernels::matmul), autocast (in its dtype, as torch's
    products) and CUDA graphs; not under torch.func, torch.vmap or forward-mode AD, nor twice
    differentiable: these raise.
    Raises TypeError for a wrong dtype, ValueError for a wrong shape, device or activation.
    """
    return _call("matmul_triton", _forward, a, b, bias, activation, allow_tf32, plan)


@torch.library.custom_op("fused_kernels::matmul", mutates_args=())
def matmul_op(
    a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None = None, activation: str = "identity",
    allow_tf32: bool = False, save_z: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """matmul for torch.compile and torch.export: one node of the graph, which nothing looks into.

    Returns y, and z = a b + bias for the backward pass of gelu, gelu_tanh and silu. Without save_z
    that is empty, and the backward pass multiplies once more.
    """
    if not _fits(a, b, bias, activation):
        _refuse_arguments("matmul_op", a, b, bias, activation)
    y, z = _forward(a, b, bias, activation, allow_tf32, save_z)
    return y, y.new_empty(0) if z is None else z


@torch.library.custom_op("fused_kernels::matmul_backward", mutates_args=())
def _matmul_backward_op(
    dy: torch.Tensor, a: torch.Tensor | None, b: torch.Tensor | None, saved: torch.Tensor | None,
    activation: str, allow_tf32: bool, needs_grad: list[bool],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    da, db, dbias = _backward(dy, a, b, saved, activation, allow_tf32, needs_grad)
    return tuple(dy.new_empty(0) if g is None else g for g in (da, db, dbias))


@matmul_op.register_fake
def _(a, b, bias=None, activation="identity", allow_tf32=False, save_z=False):
    y = a.new_empty(a.shape[0], b.shape[1])
    return y, torch.empty_like(y) if save_z else y.new_empty(0)


@_matmul_backward_op.register_fake
def _(dy, a, b, saved, activation, allow_tf32, needs_grad):
    shapes = (
        (dy.shape[0], b.shape[0]) if needs_grad[0] else (0,),
        (a.shape[1], dy.shape[1]) if needs_grad[1] else (0,),
        (dy.shape[1],) if needs_grad[2] else (0,),
    )
    return tuple(dy.new_empty(shape) for shape in shapes)


def _setup_context(ctx, inputs, output):
    a, b, bias, activation, allow_tf32, save_z = inputs
    y, z = output
    ctx.mark_non_differentiable(z)
    _save(ctx, a, b, bias, y, z if save_z else None, activation, allow_tf32, all_inputs=True)


@_once
def _op_backward(ctx, dy, _):
    a, b, bias, saved = ctx.saved_tensors
    activation, allow_tf32 = ctx.how
    if saved is None and activation != "identity":
        saved, _ = matmul_op(a, b, bias, "identity", allow_tf32)
    grads = _matmul_backward_op(dy, a, b, saved, activation, allow_tf32, ctx.needs_grad)
    return *(g if needed else None for g, needed in zip(grads, ctx.needs_grad)), None, None, None


matmul_op.register_autograd(_op_backward, setup_context=_setup_context)


class FusedLinear(torch.nn.Linear):
    """A torch.nn.Linear and the activation after it in one kernel; its state_dict is that of the Linear."""

    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, activation: str = "identity",
        device: torch.device | str | None = None, dtype: torch.dtype | None = None,
    ):  # fmt: skip
        super().__init__(in_features, out_features, bias, device, dtype)
        if activation not in _ACTIVATIONS:
            _refuse_arguments("FusedLinear", None, None, None, activation)
        self.activation = activation

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return matmul_triton(x, self.weight.t(), self.bias, self.activation)

    def extra_repr(self):
        return f"{super().extra_repr()}, activation={self.activation!r}"


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
    """The functions of matmul.cu, compiled at the first call (half a minute, then cached on disk)."""
    from torch.utils.cpp_extension import load_inline

    binding = 'TORCH_LIBRARY(matmul_cuda, m) { m.def("forward", &matmul_forward); }'
    source = Path(__file__).with_suffix(".cu").read_text() + binding
    with _one_build("matmul_cuda", load_inline):
        load_inline(
            "matmul_cuda", cpp_sources="", cuda_sources=source, extra_cuda_cflags=["-O3"],
            is_python_module=False, no_implicit_headers=True,
        )  # fmt: skip
    return torch.ops.matmul_cuda


def _launch_cuda(plan, y, z, a, b, bias, activation, kind):
    _cuda().forward(a.contiguous(), b.contiguous(), y)  # row after row, as the kernel reads them


def _forward_cuda(a, b, bias, activation, allow_tf32, save_z=False, plan=None):
    return _forward(a, b, bias, activation, allow_tf32, save_z, plan, _launch_cuda)


def matmul_cuda(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a b by one CUDA kernel without tensor cores; the gradients come from the Triton kernels.

    Shapes, dtypes and errors as for matmul_triton. Needs nvcc and a C++ compiler at the first call.
    """
    return _call("matmul_cuda", _forward_cuda, a, b, None, "identity", False, None)
