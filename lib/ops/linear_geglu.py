"""linear_geglu: y = x1 · gelu(x2), [x1, x2] = x Wᵀ + b: a linear layer, its bias and its gate in one kernel.

Shapes    x: (..., K), W: (2H, K), any strides; b: (2H,) or None; y: (..., H), contiguous. x1 is the first half
          of the columns of h = x Wᵀ + b and x2 the second: the gate is the second half. gelu in its tanh form.
Dtypes    float16, bfloat16 (summed in float32), float32, float64. Tensor cores read 10 bits of a float32's
          mantissa, tf32. So float32 is taken as a sum of two tf32 and multiplied in three products, which is as
          accurate as units for float32 are, and faster; allow_tf32=True leaves it at one product. What is
          within 1/4096 of the largest float32 becomes infinite.
Work      4MHK FLOPs forward for M rows, twice as many backward.
Traffic   Beyond what the product reads, for elements of s bytes: forward y alone, MHs, where eager writes h,
          reads x2, writes gelu(x2), reads it and x1 and writes y, 7MHs. Backward, beyond its two products:
          dy and h in, dh out, 5MHs.
Design    One program makes a tile of x1 and the tile of x2 of the same columns, so that they meet in registers:
          of W it takes 2 x BLOCK_N rows, n and n + H, for sums twice as wide, which it splits at the end. On
          Hopper one program a multiprocessor goes from tile to tile, and TMA fetches both pieces of W as one.
Backward  needs h. Saved (the default) it costs 2MHs bytes, written in the forward pass and kept until the
          backward pass. recompute=True keeps x, W and b alone, and for one more product, 4MHK FLOPs, a third of
          forward and backward together, has h again when it is needed.
          dh = [dy·gelu(x2), dy·x1·gelu'(x2)] is one kernel, which also sums its columns for db, and a short one
          adds up those sums. dW = dhᵀ x, both halves at once, and dx = dh W are left to cuBLAS: bare products,
          before and behind which nothing is left to fuse.
Rounding  y comes from h as summed; gradients from h rounded to the dtype of x, as eager's do.
Copy it   this file. MIT licence.
"""

import functools
import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from triton.language.extra import libdevice
from triton.tools.tensor_descriptor import TensorDescriptor

# With TRITON_INTERPRET=1 kernels run on CPU tensors; otherwise they need a GPU.
_ON_CPU = triton.knobs.runtime.interpret
_INTERPRETED = tl.constexpr(_ON_CPU)
_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


class _Tile(NamedTuple):
    """A piece of y, m x n, made of pieces of x, m x k, and of W, twice n x k; and who works on it."""

    m: int
    n: int
    k: int
    num_warps: int
    num_stages: int


# Everything there is to tune is here. Tiles by what multiplies ("half": 16-bit tensor cores, "tf32", once or
# three times, "double") and generation of the GPU; `_tile_for` takes the first that suits.
_TILES = {
    ("half", "hopper"): (
        _Tile(128, 128, 64, 8, 3),
        _Tile(64, 64, 64, 4, 4),
        _Tile(16, 32, 128, 4, 4),
    ),
    ("half", "ampere"): (
        _Tile(128, 64, 32, 4, 4),
        _Tile(64, 64, 32, 4, 4),
        _Tile(16, 32, 64, 4, 4),
    ),
    ("tf32", "ampere"): (
        _Tile(128, 64, 32, 8, 3),
        _Tile(64, 32, 32, 4, 3),
        _Tile(16, 16, 64, 4, 3),
    ),
    ("tf32x3", "hopper"): (
        _Tile(128, 32, 32, 4, 3),
        _Tile(64, 32, 32, 4, 3),
        _Tile(16, 16, 64, 4, 3),
    ),
    ("tf32x3", "ampere"): (
        _Tile(128, 32, 32, 8, 3),
        _Tile(64, 32, 32, 4, 3),
        _Tile(16, 16, 64, 4, 3),
    ),
    ("double", "ampere"): (_Tile(64, 32, 16, 4, 3), _Tile(16, 16, 16, 4, 3)),
    # No tensor cores: Triton has none for Turing (sm_75), and its registers are few
    ("half", "turing"): (_Tile(64, 32, 16, 4, 1), _Tile(16, 16, 32, 4, 1)),
}
# By TMA. A short K leaves little time between epilogues: then two programs share a multiprocessor, and while
# one has its epilogue the other one multiplies. Else one, with a tile twice as wide: it reads less of x.
_TMA_TILES = {"short": _Tile(128, 64, 64, 4, 3), "long": _Tile(128, 128, 64, 8, 3)}
_SHORT = 2048
_GROUP = 16  # rows of tiles that programs walk through together


def linear_geglu_eager(x, weight, bias=None):
    x1, x2 = F.linear(x, weight, bias).chunk(2, dim=-1)
    return x1 * F.gelu(x2, approximate="tanh")


@triton.jit
def _exp(x):
    # One approximate instruction, which makes 0 of results below 1e-38: tl.exp keeps those, at the price of
    # three instructions an element more. Triton's interpreter has no libdevice.
    return tl.exp(x) if x.dtype == tl.float64 or _INTERPRETED else libdevice.fast_expf(x)


@triton.jit
def _exp2(x):
    # The same, two to the power of x: the factor log2(e) can go into the constants of x.
    return tl.exp2(x) if x.dtype == tl.float64 or _INTERPRETED else libdevice.exp2(x)


@triton.jit
def _divide(a, b):
    # a times an approximate reciprocal, 2 instructions where a / b takes 7 to scale b that are very large, or
    # very small. Here b is at least 1; for b past 2**126 the quotient is 0.
    return a / b if a.dtype == tl.float64 or _INTERPRETED else libdevice.fast_dividef(a, b)


@triton.jit
def _geglu(x1, x2):
    # gelu(z) = z·sigmoid(2u), u = √(2/π)·(z + 0.044715 z³): no overflow, where tanh as (e²ᵘ-1)/(e²ᵘ+1) has one
    e = _exp2(x2 * (-2.302208198144325 - 0.1029432395800235 * x2 * x2))  # exp(-2u)
    return x1 * _divide(x2, 1.0 + e)


@triton.jit
def _geglu_grad(dy, x1, x2):
    # s = sigmoid(2u); gelu'(z) = s + z·s·(1 - s)·2u'. By e = exp(-|2u|), which cannot overflow, and with
    # s·(1 - s) = e/(1 + e)²: where s is nearly 1, 1 - s has lost its digits, and z·2u' multiplies what is left.
    e = _exp(tl.abs(x2) * (-1.5957691216057308 - 0.07135481627260025 * x2 * x2))
    t = _divide(tl.full(x2.shape, 1.0, x2.dtype), 1.0 + e)
    s = tl.where(x2 < 0, e * t, t)
    slope = s + x2 * (e * t * t) * (1.5957691216057308 + 0.2140644488178008 * x2 * x2)
    return dy * (x2 * s), dy * x1 * slope


@triton.jit
def _tile_at(
    tile, n_rows, n_hidden, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    # First row and column of tile number `tile`: down GROUP rows of tiles, then one column on. So programs that
    # run at the same time need about as many rows of x as of W, the fewest together, and find them in L2.
    tiles_m, tiles_n = tl.cdiv(n_rows, BLOCK_M), tl.cdiv(n_hidden, BLOCK_N)
    first = tile // (GROUP * tiles_n) * GROUP
    height = tl.minimum(tiles_m - first, GROUP)
    tile = tile % (GROUP * tiles_n)
    return (first + tile % height) * BLOCK_M, tile // height * BLOCK_N


@triton.jit
def _load_bias(bias_ptr, col, n_hidden, BLOCK_N: tl.constexpr):
    cols = col + tl.arange(0, BLOCK_N)
    bias1 = tl.load(bias_ptr + cols, mask=cols < n_hidden, other=0.0)
    return bias1, tl.load(bias_ptr + n_hidden + cols, mask=cols < n_hidden, other=0.0)


@triton.jit
def _store_gated(
    total, bias1, bias2, y_out, h_ptr, row, col, n_rows, n_hidden,
    HAS_BIAS: tl.constexpr, BY_TMA: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    # The epilogue; y_out is a descriptor or a pointer. Each thread holds the same columns of both halves of
    # `total`, (BLOCK_M, 2·BLOCK_N): to split them moves nothing. Offsets within a tile are int32, which saves
    # registers; where it begins is an int64.
    x1, x2 = tl.split(tl.permute(tl.reshape(total, (BLOCK_M, 2, BLOCK_N)), (0, 2, 1)))
    if HAS_BIAS:
        x1 += bias1.to(total.dtype)[None, :]
        x2 += bias2.to(total.dtype)[None, :]
    rows, cols = tl.arange(0, BLOCK_M)[:, None], tl.arange(0, BLOCK_N)[None, :]
    mask = (rows < n_rows - row) & (cols < n_hidden - col)
    first_row = tl.cast(row, tl.int64)
    if h_ptr is not None:
        h_ptrs = h_ptr + (first_row * (2 * n_hidden) + col) + (rows * (2 * n_hidden) + cols)
        tl.store(h_ptrs, x1, mask=mask)
        tl.store(h_ptrs + n_hidden, x2, mask=mask)
    y = _geglu(x1, x2)
    if BY_TMA:
        y_out.store([row, col], y.to(y_out.dtype))  # leaves out by itself what lies outside
    else:
        y_ptrs = y_out + (first_row * n_hidden + col) + (rows * n_hidden + cols)
        tl.store(y_ptrs, y, mask=mask)


@triton.jit(do_not_specialize=["n_rows"])
def _linear_geglu_fwd_kernel(
    x_ptr, w_ptr, bias_ptr, y_ptr, h_ptr, n_rows, n_hidden, n_in,
    stride_xm, stride_xk, stride_wn, stride_wk, PRECISION: tl.constexpr, COMPUTE: tl.constexpr,
    GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    # One program handles one tile of y, (BLOCK_M, BLOCK_N), in steps of BLOCK_K.
    row, col = _tile_at(tl.program_id(0), n_rows, n_hidden, GROUP, BLOCK_M, BLOCK_N)
    rows = row + tl.arange(0, BLOCK_M)
    # int64: row * stride passes 2**31 from 4 GiB of bfloat16 on. For a row that is not there the first is read.
    rows = tl.where(rows < n_rows, rows, 0).to(tl.int64)
    pair = tl.arange(0, 2 * BLOCK_N)
    cols = col + pair % BLOCK_N
    w_rows = (cols + pair // BLOCK_N * n_hidden).to(tl.int64)  # n, then n + H
    inner = tl.arange(0, BLOCK_K).to(tl.int64)
    x_ptrs = x_ptr + rows[:, None] * stride_xm + inner[None, :] * stride_xk
    w_ptrs = w_ptr + inner[:, None] * stride_wk + w_rows[None, :] * stride_wn

    total = tl.zeros((BLOCK_M, 2 * BLOCK_N), dtype=COMPUTE)
    for k in range(0, n_in, BLOCK_K):
        inside = tl.arange(0, BLOCK_K) < n_in - k  # what lies past K must add 0
        x = tl.load(x_ptrs, mask=inside[None, :], other=0.0)
        w = tl.load(w_ptrs, mask=inside[:, None] & (cols < n_hidden)[None, :], other=0.0)
        total = tl.dot(x, w, total, input_precision=PRECISION, out_dtype=COMPUTE)
        x_ptrs += tl.cast(stride_xk, tl.int64) * BLOCK_K
        w_ptrs += tl.cast(stride_wk, tl.int64) * BLOCK_K
    bias1, bias2 = 0.0, 0.0
    if bias_ptr is not None:
        bias1, bias2 = _load_bias(bias_ptr, col, n_hidden, BLOCK_N)
    _store_gated(
        total, bias1, bias2, y_ptr, h_ptr, row, col, n_rows, n_hidden,
        bias_ptr is not None, False, BLOCK_M, BLOCK_N,
    )  # fmt: skip


@triton.jit(do_not_specialize=["n_rows"])
def _linear_geglu_tma_kernel(
    x_desc, w_desc, bias_ptr, y_out, h_ptr, n_rows, n_hidden, n_in, GROUP: tl.constexpr,
    BY_TMA: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    # One program handles every n-th tile of y, (BLOCK_M, BLOCK_N), where n programs run: as many as find room.
    # A descriptor holds address, sizes and strides: one thread asks for a whole piece, with zeros outside. W is
    # (2, H, K) to it, and a piece the same rows of both halves: none of a first half runs into the second.
    n_tiles = tl.cdiv(n_rows, BLOCK_M) * tl.cdiv(n_hidden, BLOCK_N)
    for tile in tl.range(tl.program_id(0), n_tiles, tl.num_programs(0)):
        row, col = _tile_at(tile, n_rows, n_hidden, GROUP, BLOCK_M, BLOCK_N)
        bias1, bias2 = 0.0, 0.0
        if bias_ptr is not None:
            bias1, bias2 = _load_bias(bias_ptr, col, n_hidden, BLOCK_N)  # on its way meanwhile
        total = tl.zeros((BLOCK_M, 2 * BLOCK_N), dtype=tl.float32)
        for k in range(0, n_in, BLOCK_K):
            x = x_desc.load([row, k])
            w = tl.reshape(w_desc.load([0, col, k]), (2 * BLOCK_N, BLOCK_K))
            total = tl.dot(x, tl.trans(w), total)
        _store_gated(
            total, bias1, bias2, y_out, h_ptr, row, col, n_rows, n_hidden,
            bias_ptr is not None, BY_TMA, BLOCK_M, BLOCK_N,
        )  # fmt: skip


@triton.jit(do_not_specialize=["n_rows", "rows_per_program"])
def _linear_geglu_bwd_kernel(
    dy_ptr, h_ptr, dh_ptr, partial_ptr, n_rows, n_hidden, stride_dym, stride_dyn, rows_per_program,
    NUM_STAGES: tl.constexpr, COMPUTE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    # One program handles rows_per_program rows of the same BLOCK_N columns of both halves, BLOCK_M rows at a
    # time, and adds them up on the way: its row of partial, (programs down, 2H), is its share of db.
    n_tiles = tl.cdiv(n_hidden, BLOCK_N)
    pid_m, pid_n = tl.program_id(0) // n_tiles, tl.program_id(0) % n_tiles
    cols = pid_n.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    total1 = tl.zeros((BLOCK_M, BLOCK_N), dtype=COMPUTE)
    total2 = tl.zeros((BLOCK_M, BLOCK_N), dtype=COMPUTE)
    for start in tl.range(0, rows_per_program, BLOCK_M, num_stages=NUM_STAGES):
        rows = pid_m.to(tl.int64) * rows_per_program + start + tl.arange(0, BLOCK_M)
        mask = (rows < n_rows)[:, None] & (cols < n_hidden)[None, :]
        dy_ptrs = dy_ptr + rows[:, None] * stride_dym + cols[None, :] * stride_dyn
        offsets = rows[:, None] * (2 * n_hidden) + cols[None, :]
        # 0 where there is nothing: it adds 0 to db
        dy = tl.load(dy_ptrs, mask=mask, other=0.0).to(COMPUTE)
        x1 = tl.load(h_ptr + offsets, mask=mask, other=0.0).to(COMPUTE)
        x2 = tl.load(h_ptr + n_hidden + offsets, mask=mask, other=0.0).to(COMPUTE)
        dx1, dx2 = _geglu_grad(dy, x1, x2)
        tl.store(dh_ptr + offsets, dx1, mask=mask)
        tl.store(dh_ptr + n_hidden + offsets, dx2, mask=mask)
        total1 += dx1
        total2 += dx2
    if partial_ptr is not None:
        partial_ptrs = partial_ptr + pid_m.to(tl.int64) * (2 * n_hidden) + cols
        tl.store(partial_ptrs, tl.sum(total1, axis=0), mask=cols < n_hidden)
        tl.store(partial_ptrs + n_hidden, tl.sum(total2, axis=0), mask=cols < n_hidden)


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


@functools.cache
def _n_multiprocessors(device):
    return 4 if _ON_CPU else torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def _has_tma(device):
    """Hopper, and Blackwell of data centres: TMA, and 227 KB of shared memory for one program."""
    return not _ON_CPU and 9 <= torch.cuda.get_device_capability(device)[0] < 12


@functools.cache
def _has_tensor_cores(device):
    """Whether Triton uses them: not those of Turing (sm_75)."""
    return _ON_CPU or torch.cuda.get_device_capability(device)[0] >= 8


def _precision(allow_tf32, device):
    """How tl.dot is to multiply float32; of the other dtypes it makes nothing else."""
    if not _has_tensor_cores(device):
        return "ieee"
    return "tf32" if allow_tf32 else "tf32x3"


@functools.cache
def _tiles_for(dtype, allow_tf32, device):
    """The row of _TILES for this dtype on this GPU."""
    if dtype == torch.float64:
        return _TILES["double", "ampere"]
    if not _has_tensor_cores(device):
        return _TILES["half", "turing"]
    generation = "hopper" if _has_tma(device) else "ampere"
    if dtype == torch.float32:
        kind = "tf32" if allow_tf32 else "tf32x3"
        return _TILES.get((kind, generation)) or _TILES[kind, "ampere"]
    return _TILES["half", generation]


def _tile_for(n_rows, n_hidden, dtype, allow_tf32, device):
    """The first tile not much taller than x that gives most multiprocessors work; else the last."""
    for tile in _tiles_for(dtype, allow_tf32, device):
        n_tiles = _cdiv(n_rows, tile.m) * _cdiv(n_hidden, tile.n)
        if tile.m < 2 * n_rows and 2 * n_tiles > _n_multiprocessors(device):
            break
    return tile


def _tma_reads(t):
    """Whether TMA can read this matrix: rows without gaps in them, which begin on 16-byte boundaries."""
    pitch, step = t.stride()
    return step == 1 and pitch >= t.shape[1] and pitch * t.itemsize % 16 == t.data_ptr() % 16 == 0


def _forward(x, weight, bias, allow_tf32, save_h=False, launch=None):
    """y, and h = x Wᵀ + b if it is to be saved, else None."""
    n_hidden, n_in = weight.shape[0] // 2, weight.shape[1]
    y = torch.empty((*x.shape[:-1], n_hidden), dtype=x.dtype, device=x.device)
    h = y.new_empty((*x.shape[:-1], 2 * n_hidden)) if save_h else None
    if y.numel() > 0:
        # (M, K): a copy where strides allow no view
        rows = x.reshape(math.prod(x.shape[:-1]), n_in)
        bias = None if bias is None else bias.contiguous()
        with torch.cuda.device_of(x):  # else the launch goes to the current GPU, not to x's
            (launch or _launch_forward)(rows, weight, bias, y, h, allow_tf32)
    return y, h


def _launch_forward(x, weight, bias, y, h, allow_tf32):
    (n_rows, n_in), n_hidden = x.shape, weight.shape[0] // 2
    tile = _tile_for(n_rows, n_hidden, x.dtype, allow_tf32, x.device)
    if (
        tile.m == _TMA_TILES["long"].m and x.itemsize == 2 and n_in > 0 and _has_tma(x.device)
        and _tma_reads(x) and _tma_reads(weight)
    ):  # fmt: skip
        return _launch_tma(x, weight, bias, y, h)
    _linear_geglu_fwd_kernel[(_cdiv(n_rows, tile.m) * _cdiv(n_hidden, tile.n),)](
        x, weight, bias, y, h, n_rows, n_hidden, n_in, *x.stride(), *weight.stride(),
        PRECISION=_precision(allow_tf32, x.device), COMPUTE=_compute_dtype(x.dtype),
        GROUP=_GROUP, BLOCK_M=tile.m, BLOCK_N=tile.n, BLOCK_K=tile.k,
        num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
    return None


def _launch_tma(x, weight, bias, y, h, allow_tf32=False):
    """For 16-bit x and weight that TMA can read, and K > 0; on a GPU that has it, or in the interpreter."""
    (n_rows, n_in), n_hidden, length = x.shape, weight.shape[0] // 2, "short"
    if n_in > _SHORT:
        length = "long"
    tile, by_tma = _TMA_TILES[length], length == "long" and n_hidden % 8 == 0
    rows = y.view(n_rows, n_hidden)
    n_tiles = _cdiv(n_rows, tile.m) * _cdiv(n_hidden, tile.n)
    n_programs = _n_multiprocessors(x.device) * (2 if length == "short" else 1)
    pitch = weight.stride(0)
    halves = TensorDescriptor(
        weight, [2, n_hidden, n_in], [n_hidden * pitch, pitch, 1], [2, tile.n, tile.k]
    )
    _linear_geglu_tma_kernel[(min(n_tiles, n_programs),)](
        TensorDescriptor(x, [n_rows, n_in], [x.stride(0), 1], [tile.m, tile.k]), halves,
        bias, TensorDescriptor(rows, rows.shape, rows.stride(), [tile.m, tile.n]) if by_tma else y,
        h, n_rows, n_hidden, n_in, GROUP=_GROUP, BY_TMA=by_tma,
        BLOCK_M=tile.m, BLOCK_N=tile.n, BLOCK_K=tile.k,
        num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip


def _backward(dy, h, has_db):
    """dh, of h's shape, and db unless has_db is False: then None."""
    n_hidden, dh = dy.shape[-1], torch.empty_like(h)
    if dh.numel() == 0:
        return dh, dh.new_zeros(2 * n_hidden) if has_db else None
    # y.sum().backward() sends a dy of strides 0, which is read as it is
    dy = dy.reshape(-1, n_hidden)
    n_rows = dy.shape[0]
    # 16 elements of each tensor for each of 128 threads: with twice as many, two sums do not fit in registers.
    # Loads of one element are too many to keep in flight through shared memory: no pipeline for them.
    block_n = min(128, _power_of_2(n_hidden))
    block_m = 2048 // block_n
    aligned = n_hidden % 16 == 0 and dy.stride(1) == 1
    n_tiles = _cdiv(n_hidden, block_n)
    # About 4096 programs fill any GPU, and at most 1024 strips of rows keep the second sum short
    strips = max(1, min(_cdiv(4096, n_tiles), 1024))
    rows_per_program = _cdiv(_cdiv(n_rows, strips), block_m) * block_m
    strips = _cdiv(n_rows, rows_per_program)
    wide = torch.float64 if h.dtype == torch.float64 else torch.float32
    partial = torch.empty((strips, 2 * n_hidden), dtype=wide, device=h.device) if has_db else None
    with torch.cuda.device_of(h):
        _linear_geglu_bwd_kernel[(strips * n_tiles,)](
            dy, h, dh, partial, n_rows, n_hidden, *dy.stride(), rows_per_program,
            NUM_STAGES=3 if aligned else 1, COMPUTE=_compute_dtype(h.dtype),
            BLOCK_M=block_m, BLOCK_N=block_n, num_warps=4,
        )  # fmt: skip
    return dh, _sum_rows(partial, h.dtype) if has_db else None


def _sum_rows(partial, dtype):
    """partial summed over its rows, in one launch and in a fixed order: the same bits in every run."""
    out = torch.empty(partial.shape[1], dtype=dtype, device=partial.device)
    with torch.cuda.device_of(partial):
        _sum_rows_kernel[(_cdiv(partial.shape[1], 32),)](
            partial, out, *partial.shape, BLOCK_M=64, BLOCK_N=32, num_warps=8
        )
    return out


def _for_cublas(t):
    """t; a copy where rows or columns begin 2 GiB apart, at which cuBLAS reads memory that is not t's."""
    return t.contiguous() if any(s * t.itemsize >= 2**31 for s in t.stride()) else t


def _gradients(dy, x, weight, bias, h, wanted, elementwise):
    """dx, dweight, db, each None unless wanted. Where h is None it is computed again."""
    has_dx, has_dw, has_db = wanted
    # A backward pass under autocast would have its products in another dtype than the forward pass had
    with torch.autocast(dy.device.type, enabled=False):
        if h is None:
            h = F.linear(_for_cublas(x), _for_cublas(weight), bias)
        dh, db = elementwise(dy, h, has_db)
        h = None  # computed again, its memory is free for the gradients
        rows = dh.view(math.prod(dh.shape[:-1]), dh.shape[-1])  # (M, 2H)
        dx = (rows @ _for_cublas(weight)).view(*dy.shape[:-1], weight.shape[1]) if has_dx else None
        dw = rows.t() @ _for_cublas(x.reshape(rows.shape[0], x.shape[-1])) if has_dw else None
    return dx, dw, db if has_db else None


def _for_backward(x, weight, bias, h, recompute, wanted):
    """x for dW, W for dx, and h; or all that it takes to compute h again."""
    if recompute:
        return x, weight, bias, None
    return x if wanted[1] else None, weight if wanted[0] else None, None, h


def _check(name, x, weight, bias):
    """Raise TypeError or ValueError, saying what to do, unless the tensors fit together and are on a GPU."""
    named = (("x", x), ("weight", weight), ("bias", bias))
    for label, t in named[:2] if bias is None else named:
        if not isinstance(t, torch.Tensor):
            raise TypeError(f"{name}: {label} must be a torch.Tensor, got {type(t).__name__}")
        if t.dtype not in _DTYPES:
            raise TypeError(
                f"{name}: {label} must be a floating-point tensor, got {t.dtype}; use .float()"
            )
        if t.dtype != x.dtype:
            raise TypeError(
                f"{name}: x is {x.dtype} and {label} {t.dtype}; cast one of them, as {label}.to(x.dtype)"
            )
        if t.device != x.device:
            raise ValueError(
                f"{name}: x is on {x.device} and {label} on {t.device}; move both to one device"
            )
    if x.dim() == 0 or weight.dim() != 2 or x.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"{name}: x must be (..., K) and weight (2H, K), as in torch.nn.Linear, got x {tuple(x.shape)} "
            f"and weight {tuple(weight.shape)}; a weight (K, 2H) is passed as weight.t()"
        )
    if weight.shape[0] % 2 or weight.shape[0] > 2**24:  # the kernels' int32 offsets within a tile
        raise ValueError(
            f"{name}: weight has {weight.shape[0]} rows; it needs an even number of them, at most 2**24: those "
            "of x1, then as many of the gate x2"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(
            f"{name}: bias must have one element for each row of weight, ({weight.shape[0]},), "
            f"got {tuple(bias.shape)}"
        )
    if x.device.type != ("cpu" if _ON_CPU else "cuda"):
        where = "the CPU (TRITON_INTERPRET=1 is set)" if _ON_CPU else "a GPU"
        raise ValueError(
            f"{name}: x must be on {where}, got {x.device}; use linear_geglu_eager there"
        )


def _as_autocast(*tensors):
    """Under autocast the tensors in its dtype, as F.linear takes them."""
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


class _LinearGEGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, recompute, allow_tf32):
        y, h = _forward(x, weight, bias, allow_tf32, save_h=not recompute)
        ctx.save_for_backward(*_for_backward(x, weight, bias, h, recompute, ctx.needs_input_grad))
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable  # a second derivative raises instead of being wrong
    def backward(ctx, dy):
        wanted = ctx.needs_input_grad[:3]
        return *_gradients(dy, *ctx.saved_tensors, wanted, _backward), None, None


def linear_geglu_triton(x, weight, bias=None, recompute=False, allow_tf32=False):
    """x1 · gelu(x2), [x1, x2] = x Wᵀ + b, in one Triton kernel, with gradients for x, weight and bias.

    x: (..., K), weight: (2H, K), any strides; bias: (2H,) or None; all of one dtype and device. recompute: keep
    no h for the backward pass, but compute it again there. allow_tf32: whether this kernel may round float32 to
    tf32 for tensor cores; products of the backward pass go by torch.backends.cuda.matmul.
    Returns y, (..., H), contiguous.
    Works under torch.compile (as the op fused_kernels::linear_geglu), autocast (in its dtype, as F.linear) and
    CUDA graphs; not under torch.vmap, and not twice differentiable: both raise.
    Raises TypeError for a wrong dtype, ValueError for a wrong shape or device, and where 2H would be odd.
    """
    x, weight, bias = _as_autocast(x, weight, bias)
    _check("linear_geglu_triton", x, weight, bias)
    tensors = (x, weight) if bias is None else (x, weight, bias)
    if torch.compiler.is_compiling():  # which knows nothing of functorch, whom _needs_gradient asks
        has_gradient = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
        return linear_geglu_op(x, weight, bias, has_gradient and not recompute, allow_tf32)[0]
    if not _needs_gradient(*tensors):
        return _forward(x, weight, bias, allow_tf32)[0]
    return _LinearGEGLU.apply(x, weight, bias, recompute, allow_tf32)


@torch.library.custom_op("fused_kernels::linear_geglu", mutates_args=())
def linear_geglu_op(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    save_h: bool = False,
    allow_tf32: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """linear_geglu for torch.compile and torch.export: one node of the graph, which nothing looks into.

    Returns y, and h for the backward pass: without save_h empty, and the backward pass computes it again.
    """
    _check("linear_geglu_op", x, weight, bias)
    y, h = _forward(x, weight, bias, allow_tf32, save_h)
    return y, y.new_empty(0) if h is None else h


@torch.library.custom_op("fused_kernels::linear_geglu_backward", mutates_args=())
def _linear_geglu_backward_op(
    dy: torch.Tensor, h: torch.Tensor, has_db: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    dh, db = _backward(dy, h, has_db)
    return dh, dh.new_empty(0) if db is None else db


@linear_geglu_op.register_fake
def _(x, weight, bias=None, save_h=False, allow_tf32=False):
    n_hidden, lead = weight.shape[0] // 2, x.shape[:-1]
    return x.new_empty((*lead, n_hidden)), x.new_empty((*lead, 2 * n_hidden) if save_h else (0,))


@_linear_geglu_backward_op.register_fake
def _(dy, h, has_db):
    return torch.empty_like(h), h.new_empty(h.shape[-1] if has_db else 0)


def _setup_context(ctx, inputs, output):
    (x, weight, bias, save_h, _), (_, h) = inputs, output
    ctx.mark_non_differentiable(h)
    ctx.set_materialize_grads(False)  # no zeros for h's gradient, 2MHs bytes
    ctx.save_for_backward(*_for_backward(x, weight, bias, h, not save_h, _wanted(ctx)))


def _wanted(ctx):
    """Which of x, weight and bias need a gradient; torch leaves out a bias that is None, the default."""
    return (*ctx.needs_input_grad, False)[:3]


@torch.autograd.function.once_differentiable
def _op_backward(ctx, dy, _):
    if dy is None:  # y is used, and has no gradient all the same
        return (None,) * 5
    grads = _gradients(dy, *ctx.saved_tensors, _wanted(ctx), _linear_geglu_backward_op)
    return *grads, None, None


linear_geglu_op.register_autograd(_op_backward, setup_context=_setup_context)


class LinearGEGLU(torch.nn.Module):
    """x1 · gelu(x2), [x1, x2] = x Wᵀ + b: what a transformer's MLP does before its last linear layer.

    Parameters, their initial values and state_dict as of torch.nn.Linear(in_features, 2 * hidden_features).
    """

    def __init__(
        self, in_features, hidden_features, bias=True, device=None, dtype=None, recompute=False
    ):
        super().__init__()
        self.in_features, self.hidden_features = in_features, hidden_features
        self.recompute = recompute
        linear = torch.nn.Linear(in_features, 2 * hidden_features, bias, device, dtype)
        self.weight = linear.weight  # (2H, K): rows of x1, then rows of the gate
        self.register_parameter("bias", linear.bias)

    def forward(self, x):
        return linear_geglu_triton(x, self.weight, self.bias, self.recompute)

    def extra_repr(self):
        return (
            f"in_features={self.in_features}, hidden_features={self.hidden_features}, "
            f"bias={self.bias is not None}"
        )
