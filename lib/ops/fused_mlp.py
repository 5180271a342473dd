# SPDX-License-Identifier: MIT
# Copyright (c) 2026 The Fused Kernels authors; Fused Kernels 0.1.0, lib/ops/fused_mlp.py
"""fused_mlp: y = sigmoid(relu(x W1ᵀ + b1) W2ᵀ + b2) in one kernel, for inference; hidden units stay on chip.

Shapes    x: (..., K); W1: (H, K); b1: (H,); W2: (N, H); b2: (N,), any strides; y: (..., N), contiguous.
Final     sigmoid, relu or identity: what comes last. A longer chain is several calls: layers 13-512-256-64-16
          with a relu after each are two with final="relu"; 512-256-1 with final="identity" gives logits.
Dtypes    float16, bfloat16 (summed in float32), float32, float64. Tensor cores read 10 bits of a float32's
          mantissa, tf32. So float32 is split into two tf32 and multiplied in three products (3xTF32), which is
          as accurate as units for float32 are, and faster; allow_tf32=True leaves it at one product. What is
          within 1/4096 of the largest float32 becomes infinite. cuBLAS is as torch.backends.cuda.matmul says.
Ways      y needs *all* hidden units of its row: a tile of them is the row only where no layer is wider.
            one kernel   A program owns rows. It walks through the hidden layer, tile after tile, and multiplies
                         each at once by its columns of W2, into sums for all of y's columns. For small weights.
            split        A program owns rows and a part of the hidden layer, and writes its part of the sums, in
                         float32; a second kernel adds the parts in a fixed order. For few rows, larger weights.
            cublas       H or K > 2048, large weights or a wide y: products by cuBLAS, a pass for each function.
Traffic   M rows, elements of s bytes. Fused: x, weights, y once, (MK + HK + H + NH + N + MN)s; each program
          reads all weights, from L2. A split adds 8MN for each part. Eager adds 4MHs, the hidden layer written,
          read and written by relu, and read, and 2MNs.
Backward  dz2 = dy·y·(1 - y); dz1 = dz2 W2 where hidden > 0; dx = dz1 W1; dW1 = dz1ᵀ x; dW2 = dz2ᵀ hidden.
          No steady H200 row of both passes, fused, is ahead of eager. Saves x, weights and y, not the hidden
          layer: MHs bytes less, for 2MKH FLOPs to make it again. 5 launches: hidden, dz1, dz2 and sums over a
          tile's rows; db1 and db2; three products by cuBLAS. Way "cublas": hidden is saved, as eager does.
Tuned     on an H200. On other GPUs the tiles are correct, not tuned.
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

# With TRITON_INTERPRET=1 kernels run on CPU tensors; otherwise they need a GPU.
_ON_CPU = triton.knobs.runtime.interpret
_INTERPRETED = tl.constexpr(_ON_CPU)
_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
_FINALS = {"sigmoid": torch.sigmoid, "relu": torch.relu, "identity": lambda z: z}


class Tile(NamedTuple):
    """A piece of the hidden layer, m rows x h units, made in steps of k; its warps and stages."""

    m: int
    h: int
    k: int
    num_warps: int
    num_stages: int


class Plan(NamedTuple):
    """How one call is launched: by "one kernel", "split" or "cublas", with this tile, in so many parts.

    Plan("split", n_splits=3) will do for tuning: what is None is chosen, and the rest follows.
    """

    way: str
    tile: Tile | None = None
    n_splits: int | None = None  # programs for the same rows
    n_tiles: int = 0  # of rows
    units: int = 0  # hidden ones of a program
    blocks: dict | None = None  # constexprs
    warps: dict | None = None  # and stages
    precision: str = "ieee"  # of tl.dot, which matters for float32 alone


def fused_mlp_eager(
    x: torch.Tensor, weight1: torch.Tensor, bias1: torch.Tensor, weight2: torch.Tensor,
    bias2: torch.Tensor, final: str = "sigmoid",
) -> torch.Tensor:  # fmt: skip
    hidden = torch.relu(F.linear(x, weight1, bias1))
    return _FINALS[final](F.linear(hidden, weight2, bias2))


@triton.jit
def _dot(a, b, total, PRECISION: tl.constexpr = None, COMPUTE: tl.constexpr = tl.float32):
    # total + a b. Triton's interpreter multiplies bfloat16 as the integers that hold its bits: there wider.
    if _INTERPRETED:
        a, b = a.to(COMPUTE), b.to(COMPUTE)
    return tl.dot(a, b, total, input_precision=PRECISION, out_dtype=COMPUTE)


@triton.jit
def _final(z, FINAL: tl.constexpr):
    if FINAL == "relu":
        z = tl.where(z < 0, 0.0, z)
    elif FINAL == "sigmoid":
        z = 1.0 / (1.0 + tl.exp(-z))
    return z


@triton.jit
def _final_grad(dy, y, FINAL: tl.constexpr):
    if FINAL == "relu":
        dy = tl.where(y <= 0, 0.0, dy)  # a NaN in y lets dy through, as in torch.relu
    elif FINAL == "sigmoid":
        dy = dy * (y * (1.0 - y))
    return dy


@triton.jit
def _hidden_tile(
    x_ptr, w1_ptr, b1_ptr, rows, units, n_rows, n_inner, n_hidden,
    stride_xm, stride_xk, stride_1h, stride_1k,
    PRECISION: tl.constexpr, COMPUTE: tl.constexpr, ONE_STEP: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    # relu(x W1ᵀ + b1) of these rows and units, all of K; rounded to x's dtype, as in the definition.
    row_mask, unit_mask = (rows < n_rows)[:, None], (units < n_hidden)[None, :]
    inner = tl.arange(0, BLOCK_K)
    x_ptrs = x_ptr + rows[:, None] * stride_xm + inner.to(tl.int64)[None, :] * stride_xk
    w1_ptrs = w1_ptr + inner.to(tl.int64)[:, None] * stride_1k + units[None, :] * stride_1h
    z = tl.zeros((rows.shape[0], units.shape[0]), dtype=COMPUTE)
    if ONE_STEP:  # no loop here: the caller's is then the innermost, the one that Triton pipelines
        x = tl.load(x_ptrs, mask=row_mask & (inner < n_inner)[None, :], other=0.0)
        w1 = tl.load(w1_ptrs, mask=(inner < n_inner)[:, None] & unit_mask, other=0.0)
        z = _dot(x, w1, z, PRECISION, COMPUTE)
    else:
        for k in range(0, n_inner, BLOCK_K):
            inside = inner < n_inner - k  # masked-off columns must contribute 0
            x = tl.load(x_ptrs, mask=row_mask & inside[None, :], other=0.0)
            w1 = tl.load(w1_ptrs, mask=inside[:, None] & unit_mask, other=0.0)
            z = _dot(x, w1, z, PRECISION, COMPUTE)
            x_ptrs += tl.cast(stride_xk, tl.int64) * BLOCK_K
            w1_ptrs += tl.cast(stride_1k, tl.int64) * BLOCK_K
    z += tl.load(b1_ptr + units, mask=units < n_hidden, other=0.0).to(COMPUTE)[None, :]
    # relu; tl.maximum(z, 0) would turn NaN into 0. Masked-off units are 0, not the NaN of an inf in x times 0
    return tl.where((z < 0) | (units >= n_hidden)[None, :], 0.0, z).to(x_ptr.dtype.element_ty)


@triton.jit(do_not_specialize=["n_rows"])
def _fused_mlp_fwd_kernel(
    x_ptr, w1_ptr, b1_ptr, w2_ptr, b2_ptr, y_ptr, n_rows, n_inner, n_hidden, n_cols,
    stride_xm, stride_xk, stride_1h, stride_1k, stride_2n, stride_2h, units_per_program,
    FINAL: tl.constexpr, PRECISION: tl.constexpr, COMPUTE: tl.constexpr, ONE_STEP: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    # One program handles BLOCK_M rows, all columns of y, and units_per_program hidden units, BLOCK_H at a time.
    # With all units in one program that is y. Split, it is a part of the sum: y is (splits, n_rows, n_cols),
    # b2_ptr None and FINAL identity.
    # int64: row * stride passes 2**31 from 8 GiB of float32 on
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tl.arange(0, BLOCK_N).to(tl.int64)
    first = tl.program_id(1) * units_per_program

    z = tl.zeros((BLOCK_M, BLOCK_N), dtype=COMPUTE)
    for start in range(first, tl.minimum(first + units_per_program, n_hidden), BLOCK_H):
        units = (start + tl.arange(0, BLOCK_H)).to(tl.int64)
        hidden = _hidden_tile(
            x_ptr, w1_ptr, b1_ptr, rows, units, n_rows, n_inner, n_hidden,
            stride_xm, stride_xk, stride_1h, stride_1k, PRECISION, COMPUTE, ONE_STEP, BLOCK_K,
        )  # fmt: skip
        if BLOCK_N == 1:  # no product for tensor cores: a row sum
            w2 = tl.load(w2_ptr + units * stride_2h, mask=units < n_hidden, other=0.0)
            z += tl.sum(hidden.to(COMPUTE) * w2.to(COMPUTE)[None, :], axis=1)[:, None]
        else:
            w2_ptrs = w2_ptr + units[:, None] * stride_2h + cols[None, :] * stride_2n
            mask = (units < n_hidden)[:, None] & (cols < n_cols)[None, :]
            w2 = tl.load(w2_ptrs, mask=mask, other=0.0)
            z = _dot(hidden, w2, z, PRECISION, COMPUTE)

    if b2_ptr is not None:
        z += tl.load(b2_ptr + cols, mask=cols < n_cols, other=0.0).to(COMPUTE)[None, :]
    y_ptrs = y_ptr + tl.program_id(1).to(tl.int64) * n_rows * n_cols
    y_ptrs += rows[:, None] * n_cols + cols[None, :]
    tl.store(y_ptrs, _final(z, FINAL), mask=(rows < n_rows)[:, None] & (cols < n_cols)[None, :])


@triton.jit(do_not_specialize=["n_elements", "n_splits"])
def _fused_mlp_sum_kernel(
    parts_ptr, b2_ptr, y_ptr, n_elements, n_cols, n_splits,
    FINAL: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    # One program handles BLOCK_SIZE elements of y, in the order of memory, of all parts (n_splits, n_elements).
    offsets = tl.program_id(0).to(tl.int64) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    mask = offsets < n_elements
    z = tl.zeros((BLOCK_SIZE,), dtype=parts_ptr.dtype.element_ty)
    # in one order, whichever part was ready first: the same bits every time
    for _ in range(n_splits):
        z += tl.load(parts_ptr + offsets, mask=mask, other=0.0)
        parts_ptr += n_elements
    z += tl.load(b2_ptr + offsets % n_cols, mask=mask, other=0.0).to(z.dtype)
    tl.store(y_ptr + offsets, _final(z, FINAL), mask=mask)


@triton.jit(do_not_specialize=["n_rows"])
def _fused_mlp_bwd_kernel(
    dy_ptr, y_ptr, x_ptr, w1_ptr, b1_ptr, w2_ptr, hidden_ptr, dz1_ptr, dz2_ptr, partial_ptr,
    n_rows, n_inner, n_hidden, n_cols, stride_dym, stride_dyn,
    stride_xm, stride_xk, stride_1h, stride_1k, stride_2n, stride_2h,
    FINAL: tl.constexpr, PRECISION: tl.constexpr, COMPUTE: tl.constexpr, ONE_STEP: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    # One program handles a tile of the hidden layer, (BLOCK_M, BLOCK_H), which it makes once more, and of dz1;
    # the first of those for the same rows writes dz2 too. Sums over rows, for db1 and db2, go into a row of
    # partial, (tiles down, n_hidden + n_cols). Pointers to what nobody wants are None.
    n_tiles = tl.maximum(tl.cdiv(n_hidden, BLOCK_H), 1)
    pid_m, pid_h = tl.program_id(0) // n_tiles, tl.program_id(0) % n_tiles
    rows = pid_m.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    units = pid_h.to(tl.int64) * BLOCK_H + tl.arange(0, BLOCK_H)
    hidden = _hidden_tile(
        x_ptr, w1_ptr, b1_ptr, rows, units, n_rows, n_inner, n_hidden,
        stride_xm, stride_xk, stride_1h, stride_1k, PRECISION, COMPUTE, ONE_STEP, BLOCK_K,
    )  # fmt: skip
    partial = partial_ptr
    if partial_ptr is not None:
        partial += pid_m.to(tl.int64) * (n_hidden + n_cols)

    dh = tl.zeros((BLOCK_M, BLOCK_H), dtype=COMPUTE)
    for start in range(0, n_cols, BLOCK_N):
        cols = (start + tl.arange(0, BLOCK_N)).to(tl.int64)
        mask = (rows < n_rows)[:, None] & (cols < n_cols)[None, :]
        dy_ptrs = dy_ptr + rows[:, None] * stride_dym + cols[None, :] * stride_dyn
        offsets = rows[:, None] * n_cols + cols[None, :]
        dz2 = tl.load(dy_ptrs, mask=mask, other=0.0).to(COMPUTE)
        if y_ptr is not None:
            y = tl.load(y_ptr + offsets, mask=mask, other=0.0).to(COMPUTE)
            dz2 = _final_grad(dz2, y, FINAL)
        if pid_h == 0:
            if dz2_ptr is not None:
                tl.store(dz2_ptr + offsets, dz2, mask=mask)
            if partial_ptr is not None:
                tl.store(partial + n_hidden + cols, tl.sum(dz2, axis=0), mask=cols < n_cols)
        w2_ptrs = w2_ptr + cols[:, None] * stride_2n + units[None, :] * stride_2h
        w2_mask = (cols < n_cols)[:, None] & (units < n_hidden)[None, :]
        w2 = tl.load(w2_ptrs, mask=w2_mask, other=0.0)
        if BLOCK_N == 1:
            dh += dz2 * w2.to(COMPUTE)
        else:
            dz2 = dz2.to(w2.dtype)
            dh = _dot(dz2, w2, dh, PRECISION, COMPUTE)

    # A NaN in hidden lets dh through, as in torch.relu. Masked-off rows are 0, not 0·inf where W2 has an inf
    dz1 = tl.where((hidden <= 0) | (rows >= n_rows)[:, None], 0.0, dh)
    offsets = rows[:, None] * n_hidden + units[None, :]
    mask = (rows < n_rows)[:, None] & (units < n_hidden)[None, :]
    if hidden_ptr is not None:
        tl.store(hidden_ptr + offsets, hidden, mask=mask)
    if dz1_ptr is not None:
        tl.store(dz1_ptr + offsets, dz1, mask=mask)
    if partial_ptr is not None:
        tl.store(partial + units, tl.sum(dz1, axis=0), mask=units < n_hidden)


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

# Everything there is to tune is here. By what multiplies: "half", 16-bit tensor cores; "tf32", once or three
# times; "ieee", units for float32, where Triton has no tensor cores; "double". The forward pass takes the first
# tile that gives most SMs a program, counting the parts of a split hidden layer.
_TILES = {
    "half": (Tile(64, 64, 64, 4, 3), Tile(32, 64, 64, 4, 3), Tile(16, 64, 64, 4, 4)),
    "tf32": (Tile(64, 64, 32, 4, 2), Tile(32, 32, 32, 4, 3), Tile(16, 32, 32, 4, 4)),
    "tf32x3": (Tile(64, 64, 32, 4, 2), Tile(32, 64, 32, 4, 3), Tile(16, 64, 32, 4, 3)),
    "ieee": (Tile(32, 32, 32, 8, 3), Tile(16, 32, 32, 4, 3)),
    "double": (Tile(16, 16, 16, 4, 2),),
}
_BACKWARD_TILES = {
    "half": (Tile(64, 64, 64, 4, 3), Tile(32, 64, 64, 4, 3)),
    "tf32": (Tile(64, 64, 32, 4, 3), Tile(32, 32, 32, 4, 3)),
    "tf32x3": (Tile(64, 64, 32, 4, 2), Tile(32, 64, 32, 4, 3)),
    "ieee": (Tile(64, 64, 16, 8, 3), Tile(32, 32, 16, 4, 3)),
    "double": (Tile(16, 16, 16, 4, 2),),
}
_MOST_INNER, _MOST_HIDDEN = 2048, 2048  # beyond this: cuBLAS
_MOST_COLS = {"half": 256, "tf32": 256, "tf32x3": 64, "double": 256}  # beyond this: cuBLAS
# (K + N)H, multiply-adds for a row. Beyond this: cuBLAS, as a program would walk through the weights for long.
_MOST_OF_A_ROW = {"half": 3 * 2**16, "tf32": 3 * 2**15, "tf32x3": 3 * 2**16, "double": 3 * 2**12}
# M(K + N)H with more than 64 columns. Beyond this: cuBLAS, as their sums take all registers
_MOST_OF_WIDE = 2**32
_FEW_ROWS = 2048  # up to here a long walk is split instead, up to so many multiply-adds, M(K + N)H:
_MOST_OF_FEW_ROWS = {"half": 3 * 2**29, "tf32": 3 * 2**28, "tf32x3": 2**31, "double": 0}
# (K + N)H up to which it is not split: a second launch costs the host more than the walk costs a GPU
_ALONE = {"half": 3 * 2**16, "tf32": 3 * 2**15, "tf32x3": 2**16, "double": 3 * 2**12}
_LEAST_OF_A_PART, _MOST_SPLITS = 2**14, 32


def _cdiv(a, b):
    return -(-a // b)  # triton.cdiv is the same, and costs 2 µs a call on the host


def _power_of_2(n):
    return 1 << max(0, n - 1).bit_length()  # so is triton.next_power_of_2


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


def _by_cublas(m, k, h, n, kind):
    """Whether the products are left to cuBLAS. Plain arithmetic: torch.compile looks into it."""
    of_a_row = (k + n) * h
    is_split = m <= _FEW_ROWS and m * of_a_row <= _MOST_OF_FEW_ROWS[kind]
    long_walk = of_a_row > _MOST_OF_A_ROW[kind] and not is_split
    wide = n > _MOST_COLS[kind] or n > 64 and m * of_a_row > _MOST_OF_WIDE
    return k > _MOST_INNER or h > _MOST_HIDDEN or wide or long_walk


@functools.lru_cache(4096)
def _plan(m, k, h, n, kind, device, backward=False, way=None, tile=None, n_splits=None):
    """The Plan of a call. Backward, a program has one tile of units, and takes columns in steps, as K."""
    if way == "cublas" or way is None and _by_cublas(m, k, h, n, kind):
        return Plan("cublas")
    # Triton uses no tensor cores of Turing
    has_units = kind == "double" or _generation(device) >= 8
    tiles = (_BACKWARD_TILES if backward else _TILES)[kind if has_units else "ieee"]
    precision = kind if has_units and "tf32" in kind else "ieee"
    n_sms, of_a_row = _n_multiprocessors(device), (k + n) * h
    alone = way == "one kernel" or way is None and of_a_row <= _ALONE[kind]

    def laid_out(tile):  # the programs that it gives work, and its Plan
        n_tiles, block_h = _cdiv(m, tile.m), min(tile.h, max(16, _power_of_2(h)))
        n_chunks = max(1, _cdiv(h, block_h))
        most = n_splits or min(_MOST_SPLITS, n_sms // n_tiles, of_a_row // _LEAST_OF_A_PART)
        parts = n_chunks if backward else 1 if alone else max(1, min(n_chunks, most))
        block_k = min(tile.k, max(16, _power_of_2(k)))
        block_n = 1 if n == 1 else max(16, _power_of_2(n))
        block_n = min(tile.k, block_n) if backward else block_n
        blocks = {
            "ONE_STEP": k <= block_k and not backward,
            "BLOCK_M": tile.m, "BLOCK_H": block_h, "BLOCK_K": block_k, "BLOCK_N": block_n,
        }  # fmt: skip
        # a wide y has sums that the registers of 4 warps do not hold
        num_warps = 8 if tile.m >= 64 and block_n > 64 else tile.num_warps
        warps = {"num_warps": num_warps, "num_stages": tile.num_stages}
        units = block_h * _cdiv(n_chunks, parts)
        n_programs = max(1, _cdiv(h, units))
        way = "one kernel" if n_programs == 1 else "split"
        how = (n_programs, n_tiles, units, blocks, warps, precision)
        return n_tiles * parts, Plan(way, tile, *how)

    layouts = [laid_out(t) for t in ([tile] if tile else tiles)]
    return next((plan for busy, plan in layouts if busy >= 0.75 * n_sms), layouts[-1][1])


def _launch(plan, y, x, w1, b1, w2, b2, final, kind):
    (n_rows, n_inner), (n_cols, n_hidden), compute = x.shape, w2.shape, _compute_dtype(x.dtype)
    split = plan.n_splits > 1
    wide = torch.float64 if kind == "double" else torch.float32
    out = x.new_empty((plan.n_splits, *y.shape), dtype=wide) if split else y
    _run(
        _fused_mlp_fwd_kernel, (plan.n_tiles, plan.n_splits), (x, w1, b1, w2, None if split else b2, out),
        n_rows, n_inner, n_hidden, n_cols, *x.stride(), *w1.stride(), *w2.stride(), plan.units,
        FINAL="identity" if split else final, PRECISION=plan.precision,
        COMPUTE=compute, **plan.blocks, **plan.warps,
    )  # fmt: skip
    if split:
        _run(
            _fused_mlp_sum_kernel, (_cdiv(y.numel(), 512),), (out, b2, y),
            y.numel(), n_cols, plan.n_splits, FINAL=final, BLOCK_SIZE=512, num_warps=4,
        )  # fmt: skip


def _launch_backward(plan, dy, x, w1, b1, w2, y, final, kind, needs_grad):
    """dz1, dz2, hidden, db1, db2, each None unless it, or a product with it, is needed."""
    (n_rows, n_inner), (n_cols, n_hidden), compute = x.shape, w2.shape, _compute_dtype(x.dtype)
    has_dx, has_dw1, has_db1, has_dw2, has_db2 = needs_grad
    hidden = x.new_empty(n_rows, n_hidden) if has_dw2 else None
    dz1 = x.new_empty(n_rows, n_hidden) if has_dx or has_dw1 else None
    dz2 = x.new_empty(n_rows, n_cols) if has_dw2 else None
    partial, wide = None, torch.float64 if kind == "double" else torch.float32
    if has_db1 or has_db2:
        wide = x.dtype if plan.n_tiles == 1 else wide
        partial = x.new_empty((plan.n_tiles, n_hidden + n_cols), dtype=wide)
    _run(
        _fused_mlp_bwd_kernel, (plan.n_tiles * plan.n_splits,),
        # y.sum().backward() sends a dy of strides 0, which is read as it is
        (dy, y, x, w1, b1.contiguous(), w2, hidden, dz1, dz2, partial),
        n_rows, n_inner, n_hidden, n_cols, *dy.stride(), *x.stride(), *w1.stride(), *w2.stride(),
        FINAL=final, PRECISION=plan.precision, COMPUTE=compute, **plan.blocks, **plan.warps,
    )  # fmt: skip
    if partial is None:
        return dz1, dz2, hidden, None, None
    db1, db2 = _sum_rows(partial, x.dtype).split((n_hidden, n_cols))
    db2 = db2.clone()  # with memory of its own: the one may outlive the other
    return dz1, dz2, hidden, db1, db2


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


def _for_cublas(t):
    """t; a copy where rows or columns begin 2 GiB apart, at which cuBLAS reads memory that is not t's."""
    return t.contiguous() if any(s * t.itemsize >= 2**31 for s in t.stride()) else t


def _hidden_by_cublas(x, w1, b1):
    # out=: not cast by an autocast that may be on while this runs
    out = x.new_empty(x.shape[0], w1.shape[0])
    return torch.addmm(b1, _for_cublas(x), _for_cublas(w1).t(), out=out).relu_()


def _forward_by_cublas(y, x, w1, b1, w2, b2, final, save_hidden):
    hidden = _hidden_by_cublas(x, w1, b1)
    torch.addmm(b2, hidden, _for_cublas(w2).t(), out=y)
    if final != "identity":
        y.sigmoid_() if final == "sigmoid" else y.relu_()
    return hidden if save_hidden else None


def _slopes_by_cublas(dy, x, w1, b1, w2, y, hidden, final, needs_grad):
    """dz1, dz2, hidden, db1, db2: as eager has them, from the functions that eager's autograd calls."""
    hidden = _hidden_by_cublas(x, w1, b1) if hidden is None else hidden
    dz1, dz2, aten = None, dy, torch.ops.aten
    if final == "sigmoid":
        dz2 = aten.sigmoid_backward(dy, y)
    elif final == "relu":
        dz2 = aten.threshold_backward(dy, y, 0)
    if any(needs_grad[:3]):
        dh = torch.mm(_for_cublas(dz2), _for_cublas(w2), out=torch.empty_like(hidden))
        dz1 = aten.threshold_backward(dh, hidden, 0)
    db1 = dz1.sum(0, dtype=x.dtype) if needs_grad[2] else None
    return dz1, dz2, hidden, db1, dz2.sum(0, dtype=x.dtype) if needs_grad[4] else None


# --- forward and backward ------------------------------------------------------------------------------------


def _matrix(t, width):
    """t, (..., width), as a matrix; a copy where strides allow no view."""
    return t if t.dim() == 2 else t.reshape(math.prod(t.shape[:-1]), width)


def _forward(x, w1, b1, w2, b2, final, allow_tf32, save_hidden=False, plan=None):
    """y, and the hidden layer if cuBLAS made it and it is to be saved, else None."""
    (n_hidden, n_inner), n_cols = w1.shape, w2.shape[0]
    y = x.new_empty((*x.shape[:-1], n_cols))
    if y.numel() == 0:
        return y, None
    x, out, kind = _matrix(x, n_inner), _matrix(y, n_cols), _kind(x.dtype, allow_tf32)
    asked = plan[:3] if plan else ()
    chosen = _plan(*x.shape, n_hidden, n_cols, kind, x.device, False, *asked)
    if chosen.way == "cublas":
        return y, _forward_by_cublas(out, x, w1, b1, w2, b2, final, save_hidden)
    _launch(chosen, out, x, w1, b1.contiguous(), w2, b2.contiguous(), final, kind)
    return y, None


def _save(ctx, x, w1, b1, w2, y, hidden, final, allow_tf32):
    ctx.save_for_backward(x, w1, b1, w2, None if final == "identity" else y, hidden)
    ctx.how = final, allow_tf32


def _backward(dy, x, w1, b1, w2, y, hidden, final, allow_tf32, needs_grad=(True,) * 5, plan=None):
    """dx, dW1, db1, dW2, db2, each None unless needed. y is None for identity, hidden if it was not saved."""
    x_shape, (n_cols, n_hidden), kind = x.shape, w2.shape, _kind(x.dtype, allow_tf32)
    if dy.numel() == 0:
        shapes = x.shape, w1.shape, b1.shape, w2.shape, (n_cols,)
        return [x.new_zeros(shape) if has else None for shape, has in zip(shapes, needs_grad)]
    dy, x = _matrix(dy, n_cols), _matrix(x, w1.shape[1])
    y = None if y is None else _matrix(y, n_cols)
    chosen = _plan(*x.shape, n_hidden, n_cols, kind, x.device, True, plan and plan.way)
    if chosen.way == "cublas":
        slopes = _slopes_by_cublas(dy, x, w1, b1, w2, y, hidden, final, needs_grad)
    else:
        slopes = _launch_backward(chosen, dy, x, w1, b1, w2, y, final, kind, needs_grad)
    (dz1, dz2, hidden, db1, db2), (has_dx, has_dw1, has_db1, has_dw2, has_db2) = slopes, needs_grad
    # out= as above, and so in the dtype of what is multiplied
    dx = torch.mm(dz1, _for_cublas(w1), out=x.new_empty(x.shape)).view(x_shape) if has_dx else None
    dw1 = torch.mm(dz1.t(), _for_cublas(x), out=w1.new_empty(w1.shape)) if has_dw1 else None
    dw2 = torch.mm(_for_cublas(dz2).t(), hidden, out=w2.new_empty(w2.shape)) if has_dw2 else None
    return dx, dw1, db1 if has_db1 else None, dw2, db2 if has_db2 else None


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


class _FusedMLP(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w1, b1, w2, b2, final, allow_tf32, plan):
        y, hidden = _forward(x, w1, b1, w2, b2, final, allow_tf32, True, plan)
        _save(ctx, x, w1, b1, w2, y, hidden, final, allow_tf32)
        ctx.plan = plan
        return y

    @staticmethod
    @_once
    def backward(ctx, dy):
        needs_grad = ctx.needs_input_grad[:5]
        grads = _backward(dy, *ctx.saved_tensors, *ctx.how, needs_grad, ctx.plan)
        return *grads, None, None, None


# --- the calls -----------------------------------------------------------------------------------------------


def _fits(x, w1, b1, w2, b2, final):
    """Whether the kernels take these arguments; if not, _refuse_arguments says why."""
    return (
        all(isinstance(t, torch.Tensor) for t in (x, w1, b1, w2, b2))
        and x.dtype == w1.dtype == b1.dtype == w2.dtype == b2.dtype in _DTYPES
        and x.device == w1.device == b1.device == w2.device == b2.device
        and x.device.type == ("cpu" if _ON_CPU else "cuda")
        and x.dim() > 0
        and w1.dim() == w2.dim() == 2
        and w1.shape[1:] == x.shape[-1:]
        and b1.shape == w1.shape[:1] == w2.shape[1:]
        and b2.shape == w2.shape[:1]
        and final in _FINALS
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


def _refuse_arguments(name, x, weight1, bias1, weight2, bias2, final):
    """Raise the error that says what is wrong with these arguments of `name`, and what to do."""
    if final not in _FINALS:
        raise ValueError(f"{name}: final must be one of {', '.join(_FINALS)}; got {final!r}")
    _refuse(
        name, "fused_mlp_eager", x=(x, "... K"), weight1=(weight1, "H K"), bias1=(bias1, "H"),
        weight2=(weight2, "N H"), bias2=(bias2, "N"),
    )  # fmt: skip


def _autocast(*tensors):
    """Under autocast the tensors in its dtype, as torch's own products take them."""
    device = "cpu" if _ON_CPU else "cuda"
    if not torch.is_autocast_enabled(device):
        return tensors
    dtype, casts = torch.get_autocast_dtype(device), _DTYPES[:3]
    return [t.to(dtype) if getattr(t, "dtype", None) in casts else t for t in tensors]


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


def _call(name, x, weight1, bias1, weight2, bias2, final, allow_tf32, plan):
    tensors = _autocast(x, weight1, bias1, weight2, bias2)
    if not _fits(*tensors, final):
        _refuse_arguments(name, *tensors, final)
    if torch.compiler.is_compiling():
        x, (n_hidden, n_inner) = tensors[0], weight1.shape
        n_rows, kind = x.numel() // max(1, n_inner), _kind(x.dtype, allow_tf32)
        if _by_cublas(n_rows, n_inner, n_hidden, weight2.shape[0], kind):
            # products by cuBLAS: what is between them is the compiler's
            return fused_mlp_eager(*tensors, final)
        return fused_mlp_op(*tensors, final, allow_tf32)
    try:
        if _needs_grad(*tensors):
            return _FusedMLP.apply(*tensors, final, allow_tf32, plan)
        # past autograd: a third of the host's time less
        return _forward(*tensors, final, allow_tf32, plan=plan)[0]
    except RuntimeError as error:
        _explain(error, name, "fused_mlp_eager")
        raise


def fused_mlp_triton(
    x: torch.Tensor, weight1: torch.Tensor, bias1: torch.Tensor, weight2: torch.Tensor,
    bias2: torch.Tensor, final: str = "sigmoid", allow_tf32: bool = False, *, plan: Plan | None = None,
) -> torch.Tensor:  # fmt: skip
    """final(relu(x weight1ᵀ + bias1) weight2ᵀ + bias2) in one Triton kernel or two, with all five gradients.

    x: (..., K), weight1: (H, K), bias1: (H,), weight2: (N, H), bias2: (N,), any strides, all of one dtype and
    device, as of two nn.Linear; final: sigmoid, relu or identity; allow_tf32: whether float32 may be rounded to
    tf32 for tensor cores. Returns y, (..., N), contiguous; the same bits in every run.
    plan: a Plan in place of the one chosen, for tuning; torch.compile leaves it out.
    Works under torch.compile (as the op fused_kernels::fused_mlp), autocast (in its dtype, as torch's
    products) and CUDA graphs; not under torch.func, torch.vmap or forward-mode AD, nor twice
    differentiable: these raise.
    Raises TypeError for a wrong dtype, ValueError for a wrong shape, device or final.
    """
    return _call("fused_mlp_triton", x, weight1, bias1, weight2, bias2, final, allow_tf32, plan)


@torch.library.custom_op("fused_kernels::fused_mlp", mutates_args=())
def fused_mlp_op(
    x: torch.Tensor, weight1: torch.Tensor, bias1: torch.Tensor, weight2: torch.Tensor,
    bias2: torch.Tensor, final: str = "sigmoid", allow_tf32: bool = False,
) -> torch.Tensor:  # fmt: skip
    """fused_mlp for torch.compile and torch.export: one node of the graph, which nothing looks into."""
    tensors = (x, weight1, bias1, weight2, bias2)
    if not _fits(*tensors, final):
        _refuse_arguments("fused_mlp_op", *tensors, final)
    return _forward(*tensors, final, allow_tf32)[0]


@torch.library.custom_op("fused_kernels::fused_mlp_backward", mutates_args=())
def _fused_mlp_backward_op(
    dy: torch.Tensor, x: torch.Tensor, weight1: torch.Tensor, bias1: torch.Tensor,
    weight2: torch.Tensor, y: torch.Tensor | None, final: str, allow_tf32: bool, needs_grad: list[bool],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    grads = _backward(dy, x, weight1, bias1, weight2, y, None, final, allow_tf32, needs_grad)
    dx, dw1, db1, dw2, db2 = (dy.new_empty(0) if g is None else g for g in grads)
    return dx, dw1, db1, dw2, db2


@fused_mlp_op.register_fake
def _(x, weight1, bias1, weight2, bias2, final="sigmoid", allow_tf32=False):
    return x.new_empty((*x.shape[:-1], weight2.shape[0]))


@_fused_mlp_backward_op.register_fake
def _(dy, x, weight1, bias1, weight2, y, final, allow_tf32, needs_grad):
    shapes = x.shape, weight1.shape, bias1.shape, weight2.shape, weight2.shape[:1]
    return tuple(dy.new_empty(shape if has else (0,)) for shape, has in zip(shapes, needs_grad))


def _setup_context(ctx, inputs, output):
    *tensors, _, final, allow_tf32 = inputs
    _save(ctx, *tensors, output, None, final, allow_tf32)


def _op_backward(ctx, dy):
    (*saved, _), needs_grad = ctx.saved_tensors, list(ctx.needs_input_grad[:5])
    grads = _fused_mlp_backward_op(dy, *saved, *ctx.how, needs_grad)
    return *(g if has else None for g, has in zip(grads, needs_grad)), None, None


fused_mlp_op.register_autograd(_op_backward, setup_context=_setup_context)


class FusedMLP(torch.nn.Sequential):
    """torch.nn.Sequential(Linear, ReLU, Linear, final) in one kernel or two; with its state_dict.

    final: sigmoid, relu or identity.
    """

    def __init__(
        self, in_features: int, hidden_features: int, out_features: int, final: str = "sigmoid",
        device: torch.device | str | None = None, dtype: torch.dtype | None = None,
    ):  # fmt: skip
        ends = {"sigmoid": torch.nn.Sigmoid, "relu": torch.nn.ReLU, "identity": torch.nn.Identity}
        if final not in ends:
            raise ValueError(f"FusedMLP: final must be one of {', '.join(ends)}; got {final!r}")
        first = torch.nn.Linear(in_features, hidden_features, device=device, dtype=dtype)
        second = torch.nn.Linear(hidden_features, out_features, device=device, dtype=dtype)
        super().__init__(first, torch.nn.ReLU(), second, ends[final]())
        self.final = final

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second = self[0], self[2]
        return fused_mlp_triton(x, first.weight, first.bias, second.weight, second.bias, self.final)
