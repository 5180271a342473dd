"""matmul: y = act(a b + bias), from one product at a time up to tensor cores, pipelines and TMA.

Shapes    a: (M, K), b: (K, N), any strides; bias: (N,) or None; y: (M, N), contiguous.
Act       identity, relu, gelu (tanh form), silu or sigmoid, of the sum before it is rounded: an epilogue.
Dtypes    float16, bfloat16 (summed in float32), float32 and float64. Tensor cores read 10 bits of a float32's
          mantissa, tf32. So float32 is taken as a sum of two tf32 and multiplied in three products, which is as
          accurate as units for float32 are, and faster; allow_tf32=True leaves it at one product. What is
          within 1/4096 of the largest float32 becomes infinite.
Work      2MNK FLOPs forward, 4MNK backward. Traffic: at least (MK + KN + MN)s bytes for elements of s bytes;
          with tiles of BM x BN the multiprocessors ask L2 for MNK(1/BM + 1/BN) elements of a and b.
Ladder    naive       tiles of 16 x 16, products and sums one by one
          tiled       tiles of 128 x 128 by tensor cores; programs take them along the rows
          grouped     the same down groups of rows: programs that run together share more of a and b in L2
          pipelined   the next pieces of a and b are on their way during the products; wider tiles
          persistent  one program for each multiprocessor goes from tile to tile, and TMA brings the pieces
          triton      chooses by shape; for few tiles and a long K split-K, its sums in a fixed order
Backward  dz = dy·act'(z), z = a b + bias, in one kernel that sums dbias too; da = dz bᵀ and db = aᵀ dz by the
          kernels above, which read through strides. Saves a, b, and y (relu, sigmoid) or z (gelu, silu).
Copy it   this file for Triton; matmul.cu beside it for CUDA. MIT licence.
"""

import functools
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

# With TRITON_INTERPRET=1 kernels run on CPU tensors; otherwise they need a GPU.
_ON_CPU = triton.knobs.runtime.interpret
_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
_ACTIVATIONS = {
    "identity": lambda z: z,
    "relu": torch.relu,
    "gelu": functools.partial(F.gelu, approximate="tanh"),
    "silu": F.silu,
    "sigmoid": torch.sigmoid,
}


class _Tile(NamedTuple):
    """A piece of y, m x n, made of pieces of a, m x k, and of b, k x n; and who works on it."""

    m: int
    n: int
    k: int
    num_warps: int
    num_stages: int


# All there is to tune is here. The tiles, from large to small, by what multiplies: tensor cores on 16 bits
# ("half"), on tf32 or on three times tf32, or on float64 ("double"); _choose says which one is taken.
_TILES = {
    "half, hopper": (
        _Tile(128, 256, 64, 8, 3), _Tile(128, 128, 64, 8, 4), _Tile(64, 64, 64, 4, 4),
        _Tile(64, 16, 128, 4, 4), _Tile(16, 64, 128, 4, 4), _Tile(16, 16, 128, 2, 4),
    ),
    "half": (
        _Tile(128, 128, 32, 8, 3), _Tile(64, 128, 32, 4, 3), _Tile(64, 64, 32, 4, 4),
        _Tile(64, 16, 64, 4, 4), _Tile(16, 64, 64, 4, 4), _Tile(16, 16, 64, 2, 4),
    ),
    "tf32": (
        _Tile(128, 128, 32, 8, 3), _Tile(64, 64, 32, 4, 3),
        _Tile(64, 16, 64, 4, 3), _Tile(16, 64, 64, 4, 3), _Tile(16, 16, 64, 2, 3),
    ),
    "tf32x3, hopper": (
        _Tile(128, 64, 32, 4, 3), _Tile(64, 64, 32, 4, 3),
        _Tile(64, 16, 32, 4, 3), _Tile(16, 32, 64, 4, 3), _Tile(16, 16, 64, 4, 3),
    ),
    "tf32x3": (
        _Tile(128, 64, 32, 8, 3), _Tile(64, 64, 32, 4, 3),
        _Tile(64, 16, 32, 4, 3), _Tile(16, 32, 64, 4, 3), _Tile(16, 16, 64, 4, 3),
    ),
    "double": (_Tile(64, 64, 16, 4, 3), _Tile(16, 16, 16, 2, 3)),
    # Rows that begin anywhere: loads of single elements go through registers, and stages only wait for them.
    "half, unaligned": (
        _Tile(128, 128, 64, 8, 1), _Tile(128, 64, 64, 8, 1), _Tile(64, 64, 64, 4, 1),
        _Tile(64, 16, 64, 4, 1), _Tile(16, 64, 64, 4, 1), _Tile(16, 16, 64, 2, 1),
    ),
    "tf32, unaligned": (
        _Tile(128, 64, 32, 8, 1), _Tile(64, 64, 32, 4, 1),
        _Tile(64, 16, 32, 4, 1), _Tile(16, 32, 64, 4, 1), _Tile(16, 16, 64, 4, 1),
    ),
    "turing": (_Tile(64, 64, 16, 4, 1), _Tile(16, 16, 32, 4, 1)),  # where Triton has no tensor cores
}  # fmt: skip
_NAIVE = _Tile(16, 16, 16, 4, 1)
_GROUP = 8  # rows of tiles that programs go down together
_HALVES_FROM = 256  # tiles this wide are stored in halves: fewer registers, less shared memory
_FLATTEN = False  # the persistent kernel's two loops as one: a tile's loads start before the last one's end
# M·N·K from which descriptors, and copies with aligned rows, cost less than they save
_LARGE = 2**32
_ENOUGH = 0.75  # of the multiprocessors have a tile: no smaller one is tried
_MOST_PARTS, _LEAST_STEPS = 32, 8  # split-K: parts at most, and steps in each at least
_RESIDENT = {"tf32x3": 2}  # programs that a multiprocessor needs, where it is not one, to be busy
_PROGRAMS, _MOST_STRIPS = 8192, 1024  # for dz: enough for any GPU; partial sums of dbias


def matmul_eager(a, b, bias=None, activation="identity"):
    z = a @ b
    return _ACTIVATIONS[activation](z if bias is None else z + bias)


@triton.jit
def _gelu(z):
    # gelu(z) = z·sigmoid(2u), u = √(2/π)·(z + 0.044715 z³): no overflow, where tanh as (e²ᵘ-1)/(e²ᵘ+1) has one
    return z / (1.0 + tl.exp(-1.5957691216057308 * z * (1.0 + 0.044715 * z * z)))


@triton.jit
def _gelu_grad(z):
    # s = sigmoid(2u); gelu'(z) = s + z·s·(1 - s)·2u'. By e = exp(-|2u|), which cannot overflow, and with
    # s·(1 - s) = e/(1 + e)²: where s is nearly 1, 1 - s has lost its digits, and z·2u' multiplies what is left.
    e = tl.exp(-1.5957691216057308 * tl.abs(z) * (1.0 + 0.044715 * z * z))
    t = 1.0 / (1.0 + e)
    s = tl.where(z < 0, e * t, t)
    return s + z * (e * t * t) * (1.5957691216057308 * (1.0 + 0.134145 * z * z))


@triton.jit
def _activate(z, ACTIVATION: tl.constexpr):
    if ACTIVATION == "relu":
        z = tl.where(z < 0, 0.0, z)  # tl.maximum(z, 0) would turn NaN into 0
    elif ACTIVATION == "gelu":
        z = _gelu(z)
    elif ACTIVATION == "silu":
        z = z / (1.0 + tl.exp(-z))
    elif ACTIVATION == "sigmoid":
        z = 1.0 / (1.0 + tl.exp(-z))
    return z


@triton.jit
def _slope_times(dy, saved, ACTIVATION: tl.constexpr):
    # dy·act'(z); saved is y for relu and sigmoid, z for gelu and silu
    if ACTIVATION == "relu":
        dy = tl.where(saved <= 0, 0.0, dy)  # a NaN in y lets dy through, as in torch.relu
    elif ACTIVATION == "gelu":
        dy = dy * _gelu_grad(saved)
    elif ACTIVATION == "silu":
        s = 1.0 / (1.0 + tl.exp(-saved))
        dy = dy * (s * (1.0 + saved * (1.0 - s)))
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
        inside = tl.arange(0, BLOCK_K) < n_inner - k  # columns that are not there must add 0
        a = tl.load(a_ptrs, mask=row_mask & inside[None, :], other=0.0)
        b = tl.load(b_ptrs, mask=inside[:, None] & col_mask, other=0.0)
        if DOT:
            total = tl.dot(a, b, total, input_precision=PRECISION, out_dtype=COMPUTE)
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
    GROUP: tl.constexpr, HALVES: tl.constexpr, FLATTEN: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    # One program handles every n-th tile of y, (BLOCK_M, BLOCK_N), where n programs run: one a multiprocessor.
    # A descriptor holds address, sizes and strides: one thread asks for a whole piece, with zeros outside.
    n_tiles = tl.cdiv(n_rows, BLOCK_M) * tl.cdiv(n_cols, BLOCK_N)
    for tile in tl.range(tl.program_id(0), n_tiles, tl.num_programs(0), flatten=FLATTEN):
        pid_m, pid_n = _place_of(tile, n_rows, n_cols, GROUP, BLOCK_M, BLOCK_N)
        row, col = pid_m * BLOCK_M, pid_n * BLOCK_N
        total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for k in range(0, n_inner, BLOCK_K):
            a = a_desc.load([k, row]).T if A_TRANSPOSED else a_desc.load([row, k])
            b = b_desc.load([col, k]).T if B_TRANSPOSED else b_desc.load([k, col])
            total = tl.dot(a, b, total)
        if HALVES:
            left, right = _halves(total)
            _store_by_tma(left, bias_ptr, y_desc, z_desc, row, col, n_cols, ACTIVATION)
            col += BLOCK_N // 2
            _store_by_tma(right, bias_ptr, y_desc, z_desc, row, col, n_cols, ACTIVATION)
        else:
            _store_by_tma(total, bias_ptr, y_desc, z_desc, row, col, n_cols, ACTIVATION)


@triton.jit(do_not_specialize=["n_rows", "rows_per_program"])
def _matmul_dz_kernel(
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


def _cdiv(a, b):
    return -(-a // b)  # triton.cdiv is the same, and costs 2 µs a call on the host


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
    major = 9 if _ON_CPU else torch.cuda.get_device_capability(device)[0]
    # hopper: TMA, and 227 KB of shared memory for one program; so in data centres' Blackwell, not in desktops'
    return "turing" if major < 8 else "hopper" if 9 <= major < 12 else "ampere"


def _precision(kind, device):
    """How tl.dot is to multiply; it matters for float32 alone."""
    return kind if "tf32" in kind and _generation(device) != "turing" else "ieee"


@functools.cache
def _tiles(kind, device, aligned=True):
    generation = _generation(device)
    if generation == "turing" and kind != "double":
        return _TILES["turing"]
    if not aligned and kind != "double":
        return _TILES["half, unaligned" if kind == "half" else "tf32, unaligned"]
    return _TILES.get(f"{kind}, {generation}", _TILES[kind])


def _fits(size, length):
    """Whether pieces of this size cut a length into pieces that are mostly full, and not needlessly many."""
    return min(64, _power_of_2(length)) // 2 <= size <= max(16, _power_of_2(length))


@functools.lru_cache(4096)
def _choose(m, n, k, kind, device, aligned=True):
    """(tile, parts of K): the largest tile that gives most multiprocessors work, a long K cut in parts."""
    n_multiprocessors, tiles = _n_multiprocessors(device), _tiles(kind, device, aligned)
    n_programs = n_multiprocessors * _RESIDENT.get(kind, 1)
    chosen = tiles[-1], 1
    for tile in tiles:
        if _fits(tile.m, m) and _fits(tile.n, n):
            n_tiles = _cdiv(m, tile.m) * _cdiv(n, tile.n)
            parts = min(_MOST_PARTS, k // (_LEAST_STEPS * tile.k), n_programs // n_tiles)
            chosen = tile, max(1, parts)
            if n_tiles * max(1, parts) >= _ENOUGH * n_multiprocessors:
                break
    return chosen


def _launch_tiles(y, z, a, b, bias, activation, kind, tile, group=_GROUP, dot=True):
    (*parts, n_rows, n_cols), n_inner = y.shape, a.shape[1]
    n_parts = parts[0] if parts else 1
    grid = (_cdiv(n_rows, tile.m) * _cdiv(n_cols, tile.n), n_parts)
    _matmul_kernel[grid](
        a, b, bias, y, z, n_rows, n_cols, n_inner, *a.stride(), *b.stride(),
        _cdiv(_cdiv(n_inner, n_parts), tile.k) * tile.k,
        ACTIVATION=activation, DOT=dot, PRECISION=_precision(kind, a.device),
        COMPUTE=_compute_dtype(a.dtype), GROUP=group, HALVES=tile.n >= _HALVES_FROM,
        BLOCK_M=tile.m, BLOCK_N=tile.n, BLOCK_K=tile.k,
        num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip


def _launch_naive(*args):
    _launch_tiles(*args, _NAIVE, group=1, dot=False)


def _tile_without_stages(kind, device):
    tile = _tiles(kind, device)[0]
    return tile._replace(n=min(tile.n, 128), k=min(tile.k, 32), num_stages=1)


def _launch_tiled(y, *args):
    _launch_tiles(y, *args, _tile_without_stages(args[-1], y.device), group=1)


def _launch_grouped(y, *args):
    _launch_tiles(y, *args, _tile_without_stages(args[-1], y.device))


def _launch_pipelined(y, *args):
    _launch_tiles(y, *args, _tiles(args[-1], y.device)[0])


def _launch_split(y, z, a, b, bias, activation, kind, tile, n_parts):
    wide = torch.float64 if y.dtype == torch.float64 else torch.float32
    inner_per_part = _cdiv(_cdiv(a.shape[1], n_parts), tile.k) * tile.k
    n_parts = _cdiv(a.shape[1], inner_per_part)  # whole steps are longer, and may be fewer
    parts = torch.empty((n_parts, *y.shape), dtype=wide, device=y.device)
    _launch_tiles(parts, None, a, b, None, "identity", kind, tile)
    (n_rows, n_cols), block_m, block_n = y.shape, 8, min(128, _power_of_2(y.shape[1]))
    _sum_parts_kernel[(_cdiv(n_rows, block_m) * _cdiv(n_cols, block_n),)](
        parts, bias, y, z, n_rows, n_cols, n_parts,
        ACTIVATION=activation, BLOCK_M=block_m, BLOCK_N=block_n, num_warps=4,
    )  # fmt: skip


def _with_pitch(t):
    """Memory for the numbers of t whose rows begin on 16-byte boundaries, a multiple of 16 elements apart."""
    return t.new_empty(t.shape[0], _cdiv(t.shape[1], 16) * 16)[:, : t.shape[1]]


def _is_aligned(t):
    """Whether the kernel can load 16 bytes at a time: Triton asks for a pitch that is a multiple of 16."""
    pitch = max(t.stride()) if min(t.shape) > 1 else 0
    return pitch % 16 == t.data_ptr() % 16 == 0


def _to_aligned(t):
    """t, or a copy in the same order whose rows, or columns, can be loaded 16 bytes at a time."""
    if _is_aligned(t):
        return t
    return _with_pitch(t).copy_(t) if t.stride(1) == 1 else _to_aligned(t.t()).t()


def _for_tma(t):
    """(view, whether it is t's transpose) with rows as TMA reads them: no gaps, from 16-byte boundaries on."""
    for view, transposed in ((t, False), (t.t(), True)):
        pitch, step = view.stride()
        if step == 1 and pitch >= view.shape[1] and pitch % 8 == t.data_ptr() % 16 == 0:
            return view, transposed
    return _with_pitch(t).copy_(t), False


def _launch_persistent(y, z, a, b, bias, activation, kind, tile=None):
    tile, n_inner = tile or _tiles(kind, y.device)[0], a.shape[1]
    if kind != "half" or _generation(y.device) != "hopper" or n_inner == 0:
        _launch_tiles(y, z, _to_aligned(a), _to_aligned(b), bias, activation, kind, tile)
        return
    (a, a_transposed), (b, b_transposed) = _for_tma(a), _for_tma(b)
    outs = [t if t is None or t.shape[1] % 8 == 0 else _with_pitch(t) for t in (y, z)]
    halves = tile.n >= _HALVES_FROM
    out_block = [tile.m, tile.n // 2 if halves else tile.n]
    n_tiles = _cdiv(y.shape[0], tile.m) * _cdiv(y.shape[1], tile.n)
    _matmul_persistent_kernel[(min(n_tiles, _n_multiprocessors(y.device)),)](
        TensorDescriptor.from_tensor(a, [tile.k, tile.m] if a_transposed else [tile.m, tile.k]),
        TensorDescriptor.from_tensor(b, [tile.n, tile.k] if b_transposed else [tile.k, tile.n]), bias,
        *(None if t is None else TensorDescriptor.from_tensor(t, out_block) for t in outs),
        *y.shape, n_inner, A_TRANSPOSED=a_transposed, B_TRANSPOSED=b_transposed, ACTIVATION=activation,
        GROUP=_GROUP, HALVES=halves, FLATTEN=_FLATTEN, BLOCK_M=tile.m, BLOCK_N=tile.n, BLOCK_K=tile.k,
        num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
    for t, out in zip((y, z), outs):
        if out is not t:
            t.copy_(out)


def _launch_best(y, z, a, b, bias, activation, kind):
    (m, n), k = y.shape, a.shape[1]
    large = m * n * k >= _LARGE
    aligned = large or _is_aligned(a) and _is_aligned(b)
    tile, n_parts = _choose(m, n, k, kind, y.device, aligned)
    if large and n_parts == 1 and tile.m >= 64 and tile.n >= 64:
        _launch_persistent(y, z, a, b, bias, activation, kind, tile)
        return
    if large:
        a, b = _to_aligned(a), _to_aligned(b)
    if n_parts > 1:
        _launch_split(y, z, a, b, bias, activation, kind, tile, n_parts)
    else:
        _launch_tiles(y, z, a, b, bias, activation, kind, tile)


def _side_by_side(t):
    """t where its rows or its columns are without gaps; else a copy, as every element is read many times."""
    return t if 1 in t.stride() else t.contiguous()


def _forward(a, b, bias, activation, allow_tf32, save_z=False, launch=_launch_best):
    """y, and z = a b + bias if it is to be saved, else None."""
    y = a.new_empty(a.shape[0], b.shape[1])
    z = torch.empty_like(y) if save_z else None
    if y.numel() > 0:
        bias = None if bias is None else bias.contiguous()
        a, b, kind = _side_by_side(a), _side_by_side(b), _kind(a.dtype, allow_tf32)
        with torch.cuda.device_of(a):  # else the launch goes to the current GPU, not to a's
            launch(y, z, a, b, bias, activation, kind)
    return y, z


def _saves_z(activation):
    return activation in ("gelu", "silu")  # relu and sigmoid have their slope from y


def _backward(dy, a, b, saved, activation, allow_tf32, wanted):
    """da, db, dbias, each None unless wanted; saved is y or z, None for identity; a, b None if not needed."""
    has_da, has_db, has_dbias = wanted
    dz, dbias = _dz(dy, saved, activation, has_da or has_db, has_dbias)
    da = _forward(dz, b.t(), None, "identity", allow_tf32)[0] if has_da else None
    db = _forward(a.t(), dz, None, "identity", allow_tf32)[0] if has_db else None
    return da, db, dbias


def _dz(dy, saved, activation, has_dz, has_dbias):
    """dz = dy·act'(z), dy itself for identity, and its sum over rows; each None unless asked for."""
    dz = torch.empty_like(saved) if has_dz and saved is not None else None
    result = dy if has_dz and saved is None else dz
    (n_rows, n_cols), wide = dy.shape, torch.float64 if dy.dtype == torch.float64 else torch.float32
    if dy.numel() == 0 or not (has_dbias or dz is not None):
        return result, dy.new_zeros(n_cols) if has_dbias else None
    block_n = min(128, _power_of_2(n_cols))
    block_m = 8192 // dy.itemsize // block_n
    n_tiles = _cdiv(n_cols, block_n)
    # loads of one element are too many to keep in flight
    aligned = n_cols % 16 == 0 and dy.stride(1) == 1
    strips = max(1, min(_cdiv(_PROGRAMS, n_tiles), _MOST_STRIPS))
    rows_per_program = _cdiv(_cdiv(n_rows, strips), block_m) * block_m
    strips = _cdiv(n_rows, rows_per_program)
    partial = torch.empty((strips, n_cols), dtype=wide, device=dy.device) if has_dbias else None
    with torch.cuda.device_of(dy):
        _matmul_dz_kernel[(strips * n_tiles,)](
            dy, saved, dz, partial, n_rows, n_cols, *dy.stride(), rows_per_program,
            ACTIVATION=activation, NUM_STAGES=3 if aligned else 1, COMPUTE=_compute_dtype(dy.dtype),
            BLOCK_M=block_m, BLOCK_N=block_n, num_warps=8,
        )  # fmt: skip
    return result, _sum_rows(partial, dy.dtype) if has_dbias else None


def _sum_rows(partial, dtype):
    """partial summed over its rows, in one launch and in a fixed order: the same bits in every run."""
    out = torch.empty(partial.shape[1], dtype=dtype, device=partial.device)
    with torch.cuda.device_of(partial):
        _sum_rows_kernel[(_cdiv(partial.shape[1], 32),)](
            partial, out, *partial.shape, BLOCK_M=64, BLOCK_N=32, num_warps=8
        )
    return out


def _check(name, a, b, bias, activation):
    """Raise TypeError or ValueError, saying what to do, unless a is (M, K), b (K, N) and bias (N,) on a GPU."""
    for label, t in (("a", a), ("b", b)) if bias is None else (("a", a), ("b", b), ("bias", bias)):
        if not isinstance(t, torch.Tensor):
            raise TypeError(f"{name}: {label} must be a torch.Tensor, got {type(t).__name__}")
        if t.dtype not in _DTYPES:
            raise TypeError(
                f"{name}: {label} must be a floating-point tensor, got {t.dtype}; use .float()"
            )
        if t.dtype != a.dtype:
            raise TypeError(
                f"{name}: a is {a.dtype} and {label} {t.dtype}; cast one of them, as {label}.to(a.dtype)"
            )
        if t.device != a.device:
            raise ValueError(
                f"{name}: a is on {a.device} and {label} on {t.device}; move both to one device"
            )
    if a.dim() != 2 or b.dim() != 2:
        raise ValueError(
            f"{name}: a and b must be matrices, (M, K) and (K, N), got a {tuple(a.shape)} and "
            f"b {tuple(b.shape)}; a batch of rows (..., K) can be passed as a.flatten(0, -2)"
        )
    if a.shape[1] != b.shape[0]:
        raise ValueError(
            f"{name}: a must have as many columns as b has rows, got a {tuple(a.shape)} and "
            f"b {tuple(b.shape)}; a weight of a linear layer, (N, K), is passed as weight.t()"
        )
    if bias is not None and bias.shape != b.shape[1:]:
        raise ValueError(
            f"{name}: bias must have one element for each column of b, ({b.shape[1]},), "
            f"got {tuple(bias.shape)}"
        )
    if activation not in _ACTIVATIONS:
        raise ValueError(
            f"{name}: activation must be one of {', '.join(_ACTIVATIONS)}; got {activation!r}"
        )
    if a.device.type != ("cpu" if _ON_CPU else "cuda"):
        where = "the CPU (TRITON_INTERPRET=1 is set)" if _ON_CPU else "a GPU"
        raise ValueError(f"{name}: a must be on {where}, got {a.device}; use matmul_eager there")


def _autocast(*tensors):
    """Under autocast the tensors in its dtype, as torch's own products take them."""
    device = "cpu" if _ON_CPU else "cuda"
    if not torch.is_autocast_enabled(device):
        return tensors
    dtype, casts = torch.get_autocast_dtype(device), _DTYPES[:3]
    return [t.to(dtype) if getattr(t, "dtype", None) in casts else t for t in tensors]


def _needs_gradient(*tensors):
    """Whether autograd has to hear of this call; where not, leaving it out saves a third of the host's time."""
    # torch.func, vmap among it: autograd.Function says what of it does not work
    transformed = torch._C._functorch.peek_interpreter_stack() is not None
    return transformed or torch.is_grad_enabled() and any(t.requires_grad for t in tensors)


class _Matmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, b, bias, activation, allow_tf32, launch):
        y, z = _forward(a, b, bias, activation, allow_tf32, _saves_z(activation), launch)
        has_da, has_db, _ = ctx.needs_input_grad[:3]
        saved = None if activation == "identity" else y if z is None else z
        ctx.save_for_backward(a if has_db else None, b if has_da else None, saved)
        ctx.how = activation, allow_tf32
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable  # a second derivative raises instead of being wrong
    def backward(ctx, dy):
        wanted = ctx.needs_input_grad[:3]
        return *_backward(dy, *ctx.saved_tensors, *ctx.how, wanted), None, None, None


def _call(name, launch, a, b, bias, activation, allow_tf32):
    a, b, bias = _autocast(a, b, bias)
    _check(name, a, b, bias, activation)
    tensors = (a, b) if bias is None else (a, b, bias)
    if torch.compiler.is_compiling():
        needed = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
        save_z = needed and _saves_z(activation)
        return matmul_op(a, b, bias, activation, allow_tf32, save_z)[0]
    if not _needs_gradient(*tensors):
        return _forward(a, b, bias, activation, allow_tf32, launch=launch)[0]
    return _Matmul.apply(a, b, bias, activation, allow_tf32, launch)


def matmul_naive(a, b, bias=None, activation="identity", allow_tf32=False):
    """Each program makes 16 x 16 sums, product by product, and shares what it reads with nobody."""
    return _call("matmul_naive", _launch_naive, a, b, bias, activation, allow_tf32)


def matmul_tiled(a, b, bias=None, activation="identity", allow_tf32=False):
    """Large tiles, multiplied by tensor cores; loads, then products, then the next loads."""
    return _call("matmul_tiled", _launch_tiled, a, b, bias, activation, allow_tf32)


def matmul_grouped(a, b, bias=None, activation="identity", allow_tf32=False):
    """matmul_tiled with its programs in another order: in groups of rows, which share a and b in L2."""
    return _call("matmul_grouped", _launch_grouped, a, b, bias, activation, allow_tf32)


def matmul_pipelined(a, b, bias=None, activation="identity", allow_tf32=False):
    """matmul_grouped with wider tiles and the next loads under way during the products."""
    return _call("matmul_pipelined", _launch_pipelined, a, b, bias, activation, allow_tf32)


def matmul_persistent(a, b, bias=None, activation="identity", allow_tf32=False):
    """One program for each multiprocessor, and loads by TMA: 16 bits, on Hopper. Else it is matmul_pipelined.

    Matrices of which neither rows nor columns begin on 16-byte boundaries are copied into some that do.
    """
    return _call("matmul_persistent", _launch_persistent, a, b, bias, activation, allow_tf32)


def matmul_triton(a, b, bias=None, activation="identity", allow_tf32=False):
    """act(a b + bias) by Triton kernels chosen for these shapes, with gradients for a, b and bias.

    a: (M, K), b: (K, N), any strides; bias: (N,) or None, all of one dtype and device; activation: identity,
    relu, gelu (tanh form), silu or sigmoid; allow_tf32: whether tensor cores may round float32 to tf32.
    Returns y, (M, N), contiguous. K = 0 gives act(bias). The same bits in every run.
    Works under torch.compile (as the op fused_kernels::matmul), autocast (in its dtype, as torch's products)
    and CUDA graphs; not under torch.vmap, and not twice differentiable: both raise.
    Raises TypeError for a wrong dtype, ValueError for a wrong shape, device or activation.
    """
    return _call("matmul_triton", _launch_best, a, b, bias, activation, allow_tf32)


@torch.library.custom_op("fused_kernels::matmul", mutates_args=())
def matmul_op(
    a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None = None, activation: str = "identity",
    allow_tf32: bool = False, save_z: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """matmul for torch.compile and torch.export: one node of the graph, which nothing looks into.

    Returns y, and z = a b + bias for the backward pass of gelu and silu. Without save_z that is empty, and the
    backward pass multiplies once more.
    """
    _check("matmul_op", a, b, bias, activation)
    y, z = _forward(a, b, bias, activation, allow_tf32, save_z)
    return y, y.new_empty(0) if z is None else z


@torch.library.custom_op("fused_kernels::matmul_backward", mutates_args=())
def _matmul_backward_op(
    dy: torch.Tensor, a: torch.Tensor | None, b: torch.Tensor | None, saved: torch.Tensor | None,
    activation: str, allow_tf32: bool, wanted: list[bool],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    da, db, dbias = _backward(dy, a, b, saved, activation, allow_tf32, wanted)
    return tuple(dy.new_empty(0) if g is None else g for g in (da, db, dbias))


@matmul_op.register_fake
def _(a, b, bias=None, activation="identity", allow_tf32=False, save_z=False):
    y = a.new_empty(a.shape[0], b.shape[1])
    return y, torch.empty_like(y) if save_z else y.new_empty(0)


@_matmul_backward_op.register_fake
def _(dy, a, b, saved, activation, allow_tf32, wanted):
    shapes = (
        (dy.shape[0], b.shape[0]) if wanted[0] else (0,),
        (a.shape[1], dy.shape[1]) if wanted[1] else (0,),
        (dy.shape[1],) if wanted[2] else (0,),
    )
    return tuple(dy.new_empty(shape) for shape in shapes)


def _setup_context(ctx, inputs, output):
    a, b, bias, activation, allow_tf32, save_z = inputs
    y, z = output
    ctx.mark_non_differentiable(z)
    ctx.how = activation, allow_tf32
    saved = None
    if activation != "identity":
        saved = (z if save_z else None) if _saves_z(activation) else y
    ctx.save_for_backward(a, b, bias, saved)


def _op_backward(ctx, dy, _):
    a, b, bias, saved = ctx.saved_tensors
    activation, allow_tf32 = ctx.how
    if saved is None and activation != "identity":
        saved, _ = matmul_op(a, b, bias, "identity", allow_tf32)
    # compiled, arguments left at their defaults are not counted there
    wanted = [*ctx.needs_input_grad[:2], bias is not None and ctx.needs_input_grad[2]]
    grads = _matmul_backward_op(dy, a, b, saved, activation, allow_tf32, wanted)
    return *(g if needed else None for g, needed in zip(grads, wanted)), None, None, None


matmul_op.register_autograd(_op_backward, setup_context=_setup_context)


@functools.cache
def _cuda():
    """The functions of matmul.cu, compiled at the first call (half a minute, then cached on disk)."""
    from torch.utils.cpp_extension import load_inline

    binding = 'TORCH_LIBRARY(matmul_cuda, m) { m.def("forward", &matmul_forward); }'
    source = Path(__file__).with_suffix(".cu").read_text() + binding
    load_inline(
        "matmul_cuda", cpp_sources="", cuda_sources=source, extra_cuda_cflags=["-O3"],
        is_python_module=False, no_implicit_headers=True,
    )  # fmt: skip
    return torch.ops.matmul_cuda


def _launch_cuda(y, z, a, b, bias, activation, kind):
    _cuda().forward(a.contiguous(), b.contiguous(), y)  # row after row, as the kernel reads them


def matmul_cuda(a, b):
    """a b by one CUDA kernel without tensor cores; the gradients come from the Triton kernels.

    Shapes, dtypes and errors as for matmul_triton. Needs nvcc and a C++ compiler at the first call.
    """
    a, b = _autocast(a, b)
    _check("matmul_cuda", a, b, None, "identity")
    return _Matmul.apply(a, b, None, "identity", False, _launch_cuda)
