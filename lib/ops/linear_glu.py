# SPDX-License-Identifier: MIT
# Copyright (c) 2026 The Fused Kernels authors; Fused Kernels 0.1.0, lib/ops/linear_glu.py
"""linear_glu: y = x1 · act(x2), [x1, x2] = x Wᵀ + b: a linear layer, its bias and its gate in one kernel.

Shapes    x: (..., K), W: (2H, K), any strides; b: (2H,) or None; y: (..., H), contiguous. x1 is the first half
          of the columns of h = x Wᵀ + b, and x2, the gate, the second; with gate="first" the other way round.
Act       gelu (erf), gelu_tanh, silu (SwiGLU), relu or sigmoid. linear_geglu is the op with gelu_tanh.
Dtypes    float16, bfloat16 (summed in float32), float32, float64. Tensor cores keep 10 bits of a float32's
          mantissa (tf32). So a float32 is split into two tf32 and multiplied in three products (3xTF32): as
          accurate as float32 units, and faster; allow_tf32=True makes it one product. Numbers within 1/4096 of
          the largest float32 become infinite.
Work      4MHK FLOPs forward for M rows, twice as many backward.
Traffic   Beyond what the products read and write, for elements of s bytes. Forward: y alone, MHs, where eager
          writes h, reads x2, writes act(x2), reads it and x1 and writes y, 7MHs. Backward: dy and h in, dh
          out, 5MHs.
Design    One program makes a tile of x1 and the tile of x2 of the same columns, so that they meet in registers:
          it multiplies with rows n and n + H of W together, 2 x BLOCK_N of them, and splits the sums at the
          end. On Hopper the programs are persistent, and TMA fetches both pieces of W in one request. Where h
          is not saved, a kernel in Gluon gives loading and multiplying to warps of their own.
Backward  needs h. The forward pass saves it, 2MHs bytes; with recompute=True it does not, and the backward pass
          makes it again: one more product, a third of forward and backward together.
          dh = [dy·act(x2), dy·x1·act'(x2)] is one kernel, which also sums its columns for db. dW = dhᵀ x,
          both halves at once, and dx = dh W are cuBLAS's: bare products, with nothing left to fuse.
Rounding  y comes from h as summed. Gradients come from h rounded to the dtype of x, as in eager.
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
from triton.language.extra import libdevice
from triton.tools.tensor_descriptor import TensorDescriptor

try:  # the level below Triton: a kernel says itself which warps load and which multiply
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia import hopper
    from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonDescriptor
except ImportError:
    gluon = None

# With TRITON_INTERPRET=1 kernels run on CPU tensors; otherwise they need a GPU.
_ON_CPU = triton.knobs.runtime.interpret
_INTERPRETED = tl.constexpr(_ON_CPU)
_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
_ACTIVATIONS = {
    "gelu": F.gelu,
    "gelu_tanh": functools.partial(F.gelu, approximate="tanh"),
    "silu": F.silu,
    "relu": torch.relu,
    "sigmoid": torch.sigmoid,
}
_GATES = ("first", "second")


class Tile(NamedTuple):
    """A piece of y, m x n, made of pieces of x, m x k, and of W, twice n x k; its warps and stages."""

    m: int
    n: int
    k: int
    num_warps: int
    num_stages: int


class Plan(NamedTuple):
    """How one call is launched. backward: (BLOCK_M, BLOCK_N, strips), or None to have it chosen."""

    way: str  # "pointers"; or "tma" or "gluon", which only count where they can be
    tile: Tile
    group: int  # rows of tiles that programs go down together
    n_programs: int = 0  # for tma
    tma_store: bool = False  # whether TMA writes y too, if its rows begin on 16-byte boundaries
    backward: tuple[int, int, int] | None = None


def linear_glu_eager(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None,
    activation: str = "gelu_tanh", gate: str = "second",
) -> torch.Tensor:  # fmt: skip
    x1, x2 = F.linear(x, weight, bias).chunk(2, dim=-1)
    if gate == "first":
        x1, x2 = x2, x1
    return x1 * _ACTIVATIONS[activation](x2)


def linear_geglu_eager(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    x1, x2 = F.linear(x, weight, bias).chunk(2, dim=-1)
    return x1 * F.gelu(x2, approximate="tanh")


@triton.jit
def _dot(a, b, total, PRECISION: tl.constexpr = None, COMPUTE: tl.constexpr = tl.float32):
    # total + a b. Triton's interpreter multiplies bfloat16 as the integers that hold its bits: there wider.
    if _INTERPRETED:
        a, b = a.to(COMPUTE), b.to(COMPUTE)
    return tl.dot(a, b, total, input_precision=PRECISION, out_dtype=COMPUTE)


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
def _gelu_tanh_slope(z):
    # sigmoid(2u) and gelu'(z) = s + z·s·(1 - s)·2u', s = sigmoid(2u). By e = exp(-|2u|), which cannot overflow,
    # and with s·(1 - s) = e/(1 + e)²: where s is nearly 1, 1 - s has lost its digits, and z·2u' multiplies what
    # is left. Far out e is 0, and 2u' must not be infinite: 0·inf is NaN.
    a = tl.minimum(tl.abs(z), 1e3)
    e = _exp(a * (-1.5957691216057308 - 0.07135481627260025 * a * a))
    t = _divide(tl.full(z.shape, 1.0, z.dtype), 1.0 + e)
    s = tl.where(z < 0, e * t, t)
    return s, s + z * (e * t * t) * (1.5957691216057308 + 0.2140644488178008 * a * a)


@triton.jit
def _gated(x1, x2, ACTIVATION: tl.constexpr):
    # x1·act(x2)
    if ACTIVATION == "gelu":
        y = x1 * _gelu(x2)
    elif ACTIVATION == "gelu_tanh":
        # z·sigmoid(2u), u = √(2/π)·(z + 0.044715 z³): no overflow, where tanh as (e²ᵘ-1)/(e²ᵘ+1) has one
        e = _exp2(x2 * (-2.302208198144325 - 0.1029432395800235 * x2 * x2))  # exp(-2u)
        y = x1 * _divide(x2, 1.0 + e)
    elif ACTIVATION == "silu":
        y = x1 * _divide(x2, 1.0 + _exp(-x2))
    elif ACTIVATION == "relu":
        y = x1 * tl.where(x2 < 0, 0.0, x2)  # tl.maximum(z, 0) would turn NaN into 0
    else:  # sigmoid
        y = _divide(x1, 1.0 + _exp(-x2))
    return y


@triton.jit
def _gated_grad(dy, x1, x2, ACTIVATION: tl.constexpr):
    # dy·act(x2) and dy·x1·act'(x2)
    if ACTIVATION == "gelu":
        y, slope = _gelu(x2), _gelu_grad(x2)
    elif ACTIVATION == "gelu_tanh":
        s, slope = _gelu_tanh_slope(x2)
        y = x2 * s
    elif ACTIVATION == "relu":
        y, slope = tl.where(x2 < 0, 0.0, x2), tl.where(x2 <= 0, 0.0, 1.0)
    else:
        e = _exp(-tl.abs(x2))  # as in _gelu_tanh_slope: s·(1 - s) = e/(1 + e)²
        t = _divide(tl.full(x2.shape, 1.0, x2.dtype), 1.0 + e)
        y, slope = tl.where(x2 < 0, e * t, t), e * t * t
        if ACTIVATION == "silu":
            slope = y + x2 * slope
            y = x2 * y
    return dy * y, dy * x1 * slope


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
def _load_bias(bias_ptr, col, n_hidden, BLOCK_N: tl.constexpr):
    cols = col + tl.arange(0, BLOCK_N)
    bias1 = tl.load(bias_ptr + cols, mask=cols < n_hidden, other=0.0)
    return bias1, tl.load(bias_ptr + n_hidden + cols, mask=cols < n_hidden, other=0.0)


@triton.jit
def _store_gated(
    total, bias1, bias2, y_out, h_ptr, row, col, n_rows, n_hidden,
    ACTIVATION: tl.constexpr, GATE_FIRST: tl.constexpr, HAS_BIAS: tl.constexpr, BY_TMA: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    # The epilogue; y_out is a descriptor or a pointer. Each thread holds the same columns of both halves of
    # `total`, (BLOCK_M, 2·BLOCK_N), so splitting them moves no data. Offsets within a tile are int32, which
    # saves registers; the offset of the tile is int64.
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
    if GATE_FIRST:
        x1, x2 = x2, x1
    y = _gated(x1, x2, ACTIVATION)
    if BY_TMA:
        y_out.store([row, col], y.to(y_out.dtype))  # TMA masks off what lies outside
    else:
        y_ptrs = y_out + (first_row * n_hidden + col) + (rows * n_hidden + cols)
        tl.store(y_ptrs, y, mask=mask)


@triton.jit(do_not_specialize=["n_rows"])
def _linear_glu_fwd_kernel(
    x_ptr, w_ptr, bias_ptr, y_ptr, h_ptr, n_rows, n_hidden, n_in,
    stride_xm, stride_xk, stride_wn, stride_wk, PRECISION: tl.constexpr, COMPUTE: tl.constexpr,
    ACTIVATION: tl.constexpr, GATE_FIRST: tl.constexpr,
    GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    # One program handles one tile of y, (BLOCK_M, BLOCK_N), in steps of BLOCK_K.
    pid_m, pid_n = _place_of(tl.program_id(0), n_rows, n_hidden, GROUP, BLOCK_M, BLOCK_N)
    row, col = pid_m * BLOCK_M, pid_n * BLOCK_N
    rows = row + tl.arange(0, BLOCK_M)
    # int64: row * stride passes 2**31 from 4 GiB of bfloat16 on. Rows past the end read row 0 instead.
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
        total = _dot(x, w, total, PRECISION, COMPUTE)
        x_ptrs += tl.cast(stride_xk, tl.int64) * BLOCK_K
        w_ptrs += tl.cast(stride_wk, tl.int64) * BLOCK_K
    bias1, bias2 = 0.0, 0.0
    if bias_ptr is not None:
        bias1, bias2 = _load_bias(bias_ptr, col, n_hidden, BLOCK_N)
    _store_gated(
        total, bias1, bias2, y_ptr, h_ptr, row, col, n_rows, n_hidden,
        ACTIVATION, GATE_FIRST, bias_ptr is not None, False, BLOCK_M, BLOCK_N,
    )  # fmt: skip


@triton.jit(do_not_specialize=["n_rows"])
def _linear_glu_tma_kernel(
    x_desc, w_desc, bias_ptr, y_out, h_ptr, n_rows, n_hidden, n_in, GROUP: tl.constexpr,
    ACTIVATION: tl.constexpr, GATE_FIRST: tl.constexpr,
    BY_TMA: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    # Persistent: n programs, as many as the GPU holds at once, each handle every n-th tile, (BLOCK_M, BLOCK_N).
    # A descriptor holds address, sizes and strides: one thread asks for a whole piece, with zeros outside. To
    # it W is (2, H, K), and a piece is the same rows of both halves: the first cannot run into the second.
    n_tiles = tl.cdiv(n_rows, BLOCK_M) * tl.cdiv(n_hidden, BLOCK_N)
    for tile in tl.range(tl.program_id(0), n_tiles, tl.num_programs(0)):
        pid_m, pid_n = _place_of(tile, n_rows, n_hidden, GROUP, BLOCK_M, BLOCK_N)
        row, col = pid_m * BLOCK_M, pid_n * BLOCK_N
        bias1, bias2 = 0.0, 0.0
        if bias_ptr is not None:
            bias1, bias2 = _load_bias(
                bias_ptr, col, n_hidden, BLOCK_N
            )  # arrives during the products
        total = tl.zeros((BLOCK_M, 2 * BLOCK_N), dtype=tl.float32)
        for k in range(0, n_in, BLOCK_K):
            x = x_desc.load([row, k])
            w = tl.reshape(w_desc.load([0, col, k]), (2 * BLOCK_N, BLOCK_K))
            total = _dot(x, tl.trans(w), total)
        _store_gated(
            total, bias1, bias2, y_out, h_ptr, row, col, n_rows, n_hidden,
            ACTIVATION, GATE_FIRST, bias_ptr is not None, BY_TMA, BLOCK_M, BLOCK_N,
        )  # fmt: skip


@triton.jit(do_not_specialize=["n_rows", "rows_per_program"])
def _linear_glu_bwd_kernel(
    dy_ptr, h_ptr, dh_ptr, partial_ptr, n_rows, n_hidden, stride_dym, stride_dyn, rows_per_program,
    ACTIVATION: tl.constexpr, GATE_FIRST: tl.constexpr,
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
        # masked-off elements are 0, and add 0 to db
        dy = tl.load(dy_ptrs, mask=mask, other=0.0).to(COMPUTE)
        x1 = tl.load(h_ptr + offsets, mask=mask, other=0.0).to(COMPUTE)
        x2 = tl.load(h_ptr + n_hidden + offsets, mask=mask, other=0.0).to(COMPUTE)
        if GATE_FIRST:
            dx2, dx1 = _gated_grad(dy, x2, x1, ACTIVATION)
        else:
            dx1, dx2 = _gated_grad(dy, x1, x2, ACTIVATION)
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


# --- in Gluon, for Hopper ------------------------------------------------------------------------------------

# The TMA kernel again, by roles. One warp, the producer, only asks for pieces of x and W, into a ring of STAGES
# slots. Two warp groups, the consumers, multiply the same piece of W by 64 rows of x each. The second starts
# LAG steps after the first, so that one has its epilogue while the other keeps the tensor cores busy.
if gluon is not None:

    @gluon.constexpr_function
    def _sums_layout(n):
        return gl.NVMMADistributedLayout([3, 0], warps_per_cta=[4, 1], instr_shape=[16, n, 16])

    @gluon.jit
    def _place_of_part(
        part, first, sizes, GROUP: gl.constexpr, PARTS: gl.constexpr, BLOCK_M, BLOCK_N
    ):
        # Row and column of one of the PARTS of a tile, each BLOCK_N wide; the tiles from number `first` on
        n_rows, n_hidden, _ = sizes
        tile = first + part // PARTS
        pid_m, pid_n = _place_of(tile, n_rows, n_hidden, GROUP, BLOCK_M, PARTS * BLOCK_N)
        return pid_m * BLOCK_M, (pid_n * PARTS + part % PARTS) * BLOCK_N

    @gluon.jit
    def _produce(
        x_desc, w_desc, x_bufs, w_bufs, full, empty, count, first, n_parts, sizes,
        GROUP: gl.constexpr, STAGES: gl.constexpr, PARTS: gl.constexpr,
    ):  # fmt: skip
        BLOCK_M: gl.constexpr = x_desc.block_type.shape[0]
        BLOCK_K: gl.constexpr = x_desc.block_type.shape[1]
        BLOCK_N: gl.constexpr = w_desc.block_type.shape[1]
        _, _, steps = sizes
        for part in range(gl.program_id(0), n_parts, gl.num_programs(0)):
            row, col = _place_of_part(part, first, sizes, GROUP, PARTS, 2 * BLOCK_M, BLOCK_N)
            for step in range(steps):
                slot = count % STAGES
                # a barrier that nobody has used counts as past phase 1: the first round does not wait
                mbarrier.wait(empty.index(slot), ((count // STAGES) & 1) ^ 1)
                bar = full.index(slot)
                mbarrier.expect(bar, 2 * x_desc.block_type.nbytes + w_desc.block_type.nbytes)
                w = w_bufs.index(slot)
                w = w._reinterpret(w_bufs.dtype, w_desc.block_type.shape, w_desc.layout)
                tma.async_copy_global_to_shared(w_desc, [0, col, step * BLOCK_K], bar, w)
                for who in gl.static_range(2):
                    at, x = [row + who * BLOCK_M, step * BLOCK_K], x_bufs.index(2 * slot + who)
                    tma.async_copy_global_to_shared(x_desc, at, bar, x)
                count += 1
        return count

    @gluon.jit
    def _producer(
        x_desc, w_whole, w_narrow, ring, sizes, n_whole, n_narrow,
        GROUP: gl.constexpr, STAGES: gl.constexpr, PARTS: gl.constexpr,
    ):  # fmt: skip
        count = 0  # steps, over all tiles: the ring does not begin anew
        count = _produce(x_desc, w_whole, *ring, count, 0, n_whole, sizes, GROUP, STAGES, 1)
        _produce(x_desc, w_narrow, *ring, count, n_whole, n_narrow, sizes, GROUP, STAGES, PARTS)

    @gluon.jit
    def _consume(
        w_desc, y_desc, bias_ptr, x_bufs, w_bufs, full, empty, y_buf, go, count, first, n_parts, sizes,
        WHO: gl.constexpr, GROUP: gl.constexpr, STAGES: gl.constexpr, LAG: gl.constexpr,
        ACTIVATION: gl.constexpr, GATE_FIRST: gl.constexpr, PARTS: gl.constexpr,
    ):  # fmt: skip
        BLOCK_M: gl.constexpr = y_desc.block_type.shape[0]
        BLOCK_N: gl.constexpr = y_desc.block_type.shape[1]
        BLOCK_K: gl.constexpr = w_desc.block_type.shape[2]
        layout: gl.constexpr = _sums_layout(BLOCK_N)
        y_buf = y_buf._reinterpret(y_desc.dtype, [BLOCK_M, BLOCK_N], y_desc.layout)
        _, n_hidden, steps = sizes
        for part in range(gl.program_id(0), n_parts, gl.num_programs(0)):
            row, col = _place_of_part(part, first, sizes, GROUP, PARTS, 2 * BLOCK_M, BLOCK_N)
            total = gl.zeros((BLOCK_M, 2 * BLOCK_N), gl.float32, _sums_layout(2 * BLOCK_N))
            for step in range(steps):
                slot = count % STAGES
                mbarrier.wait(full.index(slot), (count // STAGES) & 1)
                w = w_bufs.index(slot)
                w = w._reinterpret(w_bufs.dtype, w_desc.block_type.shape, w_desc.layout)
                w = w.reshape([2 * BLOCK_N, BLOCK_K]).permute((1, 0))
                x = x_bufs.index(2 * slot + WHO)
                total = hopper.warpgroup_mma(x, w, total, use_acc=step > 0, is_async=True)
                total = hopper.warpgroup_mma_wait(1, deps=(total,))
                if step > 0:  # the product before this one is over: its slot is free
                    mbarrier.arrive(empty.index((count - 1) % STAGES), count=1)
                count += 1
                if WHO == 0 and count == LAG:
                    mbarrier.arrive(go, count=1)
            total = hopper.warpgroup_mma_wait(0, deps=(total,))
            mbarrier.arrive(empty.index((count - 1) % STAGES), count=1)

            # Each thread holds the same columns of both halves, so splitting moves no data.
            x1, x2 = total.reshape((BLOCK_M, 2, BLOCK_N)).permute((0, 2, 1)).split()
            x1 = gl.convert_layout(x1, layout, assert_trivial=True)
            x2 = gl.convert_layout(x2, layout, assert_trivial=True)
            if bias_ptr is not None:
                cols = col + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, layout))
                bias1 = gl.load(bias_ptr + cols, mask=cols < n_hidden, other=0.0)
                bias2 = gl.load(bias_ptr + n_hidden + cols, mask=cols < n_hidden, other=0.0)
                x1 = x1 + bias1.to(gl.float32)[None, :]
                x2 = x2 + bias2.to(gl.float32)[None, :]
            if GATE_FIRST:
                x1, x2 = x2, x1
            y = _gated(x1, x2, ACTIVATION).to(y_desc.dtype)
            tma.store_wait(0)  # of the tile before: y_buf is free
            y_buf.store(y)
            hopper.fence_async_shared()
            tma.async_copy_shared_to_global(y_desc, [row + WHO * BLOCK_M, col], y_buf)
        return count

    @gluon.jit
    def _consumer(
        whole, narrow, bias_ptr, ring, y_buf, go, sizes, n_whole, n_narrow,
        WHO: gl.constexpr, GROUP: gl.constexpr, STAGES: gl.constexpr, LAG: gl.constexpr,
        PARTS: gl.constexpr, ACTIVATION: gl.constexpr, GATE_FIRST: gl.constexpr,
    ):  # fmt: skip
        if WHO == 1:
            mbarrier.wait(go, 0)
        count = 0
        count = _consume(
            *whole, bias_ptr, *ring, y_buf, go, count, 0, n_whole, sizes,
            WHO, GROUP, STAGES, LAG, ACTIVATION, GATE_FIRST, 1,
        )  # fmt: skip
        _consume(
            *narrow, bias_ptr, *ring, y_buf, go, count, n_whole, n_narrow, sizes,
            WHO, GROUP, STAGES, LAG, ACTIVATION, GATE_FIRST, PARTS,
        )  # fmt: skip
        tma.store_wait(0)

    @gluon.jit(do_not_specialize=["n_rows", "n_whole"])
    def _linear_glu_gluon_kernel(
        x_desc, w_whole, y_whole, w_narrow, y_narrow, bias_ptr, n_rows, n_hidden, n_in, n_whole,
        GROUP: gl.constexpr, STAGES: gl.constexpr, LAG: gl.constexpr, PARTS: gl.constexpr,
        ACTIVATION: gl.constexpr, GATE_FIRST: gl.constexpr,
    ):  # fmt: skip
        # Persistent: n programs each handle every n-th of the first n_whole tiles. What is left over would keep
        # few of them busy for as long: so each of those tiles is cut into PARTS narrow ones.
        dtype: gl.constexpr = x_desc.dtype
        BLOCK_M: gl.constexpr = x_desc.block_type.shape[0]
        BLOCK_K: gl.constexpr = x_desc.block_type.shape[1]
        BLOCK_N: gl.constexpr = y_whole.block_type.shape[1]
        layout: gl.constexpr = mbarrier.MBarrierLayout()
        x_bufs = gl.allocate_shared_memory(dtype, [2 * STAGES, BLOCK_M, BLOCK_K], x_desc.layout)
        w_bufs = gl.allocate_shared_memory(dtype, [STAGES, 2, BLOCK_N, BLOCK_K], w_whole.layout)
        y_bufs = gl.allocate_shared_memory(dtype, [2, BLOCK_M, BLOCK_N], y_whole.layout)
        full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], layout)
        empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], layout)
        go = gl.allocate_shared_memory(gl.int64, [1], layout)
        for i in gl.static_range(STAGES):
            mbarrier.init(full.index(i), count=1)
            mbarrier.init(empty.index(i), count=2)
        mbarrier.init(go, count=1)
        n_tiles = gl.cdiv(n_rows, 2 * BLOCK_M) * gl.cdiv(n_hidden, BLOCK_N)
        n_narrow = (n_tiles - n_whole) * PARTS
        sizes, ring = (n_rows, n_hidden, gl.cdiv(n_in, BLOCK_K)), (x_bufs, w_bufs, full, empty)
        whole, narrow = (w_whole, y_whole), (w_narrow, y_narrow)
        # Constants stand in the calls themselves: in a tuple with a name they would become values.
        gl.warp_specialize(
            [
                (_consumer, (
                    whole, narrow, bias_ptr, ring, y_bufs.index(0), go, sizes, n_whole, n_narrow,
                    0, GROUP, STAGES, LAG, PARTS, ACTIVATION, GATE_FIRST,
                )),
                (_consumer, (
                    whole, narrow, bias_ptr, ring, y_bufs.index(1), go, sizes, n_whole, n_narrow,
                    1, GROUP, STAGES, LAG, PARTS, ACTIVATION, GATE_FIRST,
                )),
                (_producer, (
                    x_desc, w_whole, w_narrow, ring, sizes, n_whole, n_narrow, GROUP, STAGES, PARTS,
                )),
            ],
            [4, 1],
            [240, 24],
        )  # fmt: skip


# --- plan (the dispatch heuristic) and launch ----------------------------------------------------------------

# Everything tuned for the forward pass. Tiles from large to small, by what multiplies: tensor cores on 16 bits
# ("half"), on tf32 once or three times, or on float64 ("double").
_TILES = {
    "half": (Tile(128, 128, 64, 8, 3), Tile(64, 64, 64, 4, 4), Tile(16, 32, 128, 4, 4)),
    "tf32": (Tile(128, 64, 32, 8, 3), Tile(64, 32, 32, 4, 3), Tile(16, 16, 64, 4, 3)),
    "tf32x3": (Tile(128, 32, 32, 4, 3), Tile(64, 32, 32, 4, 3), Tile(16, 16, 64, 4, 3)),
    "double": (Tile(64, 32, 16, 4, 3), Tile(16, 16, 16, 4, 3)),
    # Correct, not tuned: GPUs with less shared memory than Hopper's, and Turing's, whose tensor cores Triton
    # does not use
    "elsewhere": (Tile(64, 32, 32, 4, 3), Tile(16, 16, 64, 4, 3)),
    "turing": (Tile(64, 32, 16, 4, 1), Tile(16, 16, 32, 4, 1)),
}
# By TMA. With a short K epilogues are frequent: two programs share an SM, and one multiplies during the other's
# epilogue. With a long K one program has a tile twice as wide, which reads less of x. In Gluon it has both, and
# takes 1 % less time than these where K is 4096, 5 to 8 % where it is 768 to 2048.
_TMA_TILES = {"short": Tile(128, 64, 64, 4, 3), "long": Tile(128, 128, 64, 8, 3)}
_SHORT = 2048
_GLUON_TILE = Tile(128, 128, 64, 4, 4)  # of two consumers, 64 rows each
_FEWEST_STEPS = 4  # along K, more than the second consumer starts behind the first
_PARTS = 4  # of each tile of a last wave, if there is a program for each part
_GROUP = 16  # rows of tiles


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


def _has_tma(device):
    return 9 <= _generation(device) < 12  # 12, desktops' Blackwell, has less shared memory


def _tma_reads(t):
    """Whether TMA can read this matrix: rows without gaps in them, which begin on 16-byte boundaries."""
    pitch, step = t.stride()
    return step == 1 and pitch >= t.shape[1] and pitch * t.itemsize % 16 == t.data_ptr() % 16 == 0


def _tile_for(n_rows, n_hidden, dtype, allow_tf32, device):
    """The first tile that is not much taller than x and gives most SMs work; else the last."""
    kind = _kind(dtype, allow_tf32)
    if kind != "double" and not _has_tma(device):
        kind = "turing" if _generation(device) < 8 else "elsewhere"
    for tile in _TILES[kind]:
        n_tiles = _cdiv(n_rows, tile.m) * _cdiv(n_hidden, tile.n)
        if tile.m < 2 * n_rows and 2 * n_tiles > _n_multiprocessors(device):
            break
    return tile


@functools.lru_cache(4096)
def _plan(n_rows, n_hidden, n_in, dtype, allow_tf32, device, can_tma, can_gluon=False):
    """can_tma, can_gluon: whether TMA can read x and weight; whether the kernel in Gluon can write y."""
    tile = _tile_for(n_rows, n_hidden, dtype, allow_tf32, device)
    if not can_tma or tile.m < _TMA_TILES["long"].m:
        return Plan("pointers", tile, _GROUP)
    if can_gluon:
        group = 2 * _GROUP if n_in <= _SHORT else _GROUP
        return Plan("gluon", _GLUON_TILE, group, _n_multiprocessors(device))
    return _plan_tma(n_in, device)


def _plan_tma(n_in, device):
    length, per_multiprocessor = ("short", 2) if n_in <= _SHORT else ("long", 1)
    n_programs = per_multiprocessor * _n_multiprocessors(device)
    return Plan("tma", _TMA_TILES[length], _GROUP, n_programs, tma_store=length == "long")


@functools.cache
def _plan_backward(n_hidden):
    """(BLOCK_M, BLOCK_N, strips): 16 elements for each of 128 threads; two sums of 32 fill the registers."""
    block_n = min(128, triton.next_power_of_2(n_hidden))
    # About 4096 programs fill any GPU, and at most 1024 strips of rows keep the second sum short
    return 2048 // block_n, block_n, max(1, min(_cdiv(4096, _cdiv(n_hidden, block_n)), 1024))


def _constexprs(activation, gate):
    return {"ACTIVATION": activation, "GATE_FIRST": gate == "first"}


def _launch(plan, x, weight, bias, y, h, gating, allow_tf32):
    """Write y, and h unless it is None. plan: None to have it chosen."""
    (n_rows, n_in), n_hidden = x.shape, weight.shape[0] // 2
    can_tma = x.itemsize == 2 and n_in > 0 and _has_tma(x.device) and _tma_reads(x)
    can_tma = can_tma and _tma_reads(weight)
    can_gluon = can_tma and h is None and _can_gluon(n_hidden, n_in, x.device)
    if plan is None or not {"tma": can_tma, "gluon": can_gluon}.get(plan.way, True):
        plan = _plan(n_rows, n_hidden, n_in, x.dtype, allow_tf32, x.device, can_tma, can_gluon)
    if plan.way == "gluon":
        _launch_gluon(plan, x, weight, bias, y, gating)
        return
    if plan.way == "tma":
        _launch_tma(plan, x, weight, bias, y, h, gating)
        return
    tile = plan.tile
    _run(
        _linear_glu_fwd_kernel, (_cdiv(n_rows, tile.m) * _cdiv(n_hidden, tile.n),),
        (x, weight, bias, y, h), n_rows, n_hidden, n_in, *x.stride(), *weight.stride(),
        PRECISION="ieee" if _generation(x.device) < 8 else "tf32" if allow_tf32 else "tf32x3",
        COMPUTE=_compute_dtype(x.dtype), **_constexprs(*gating), GROUP=plan.group,
        BLOCK_M=tile.m, BLOCK_N=tile.n, BLOCK_K=tile.k,
        num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip


def _as_halves(weight):
    """What a descriptor of W begins with: to it W is (2, H, K)."""
    (n_rows, n_in), pitch = weight.shape, weight.stride(0)
    return weight, [2, n_rows // 2, n_in], [n_rows // 2 * pitch, pitch, 1]


def _launch_tma(plan, x, weight, bias, y, h, gating, allow_tf32=False):
    """For 16-bit x and weight that TMA can read, and K > 0; on a GPU that has it, or in the interpreter."""
    (n_rows, n_in), n_hidden = x.shape, weight.shape[0] // 2
    plan = plan or _plan_tma(n_in, x.device)
    tile, tma_store = plan.tile, plan.tma_store and n_hidden % 8 == 0
    rows = y.view(n_rows, n_hidden)
    n_tiles = _cdiv(n_rows, tile.m) * _cdiv(n_hidden, tile.n)
    y_out = TensorDescriptor(rows, rows.shape, rows.stride(), [tile.m, tile.n]) if tma_store else y
    _run(
        _linear_glu_tma_kernel, (min(n_tiles, plan.n_programs),),
        (
            TensorDescriptor(x, [n_rows, n_in], [x.stride(0), 1], [tile.m, tile.k]),
            TensorDescriptor(*_as_halves(weight), [2, tile.n, tile.k]), bias, y_out, h,
        ),
        n_rows, n_hidden, n_in, **_constexprs(*gating), GROUP=plan.group, BY_TMA=tma_store,
        BLOCK_M=tile.m, BLOCK_N=tile.n, BLOCK_K=tile.k,
        num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip


def _can_gluon(n_hidden, n_in, device):
    """Hopper's own instructions; rows of y on 16-byte boundaries; and a K with a lag in it."""
    hopper = gluon is not None and not _ON_CPU and _generation(device) == 9
    return hopper and n_hidden % 8 == 0 and n_in > (_FEWEST_STEPS - 1) * _GLUON_TILE.k


@functools.cache
def _swizzled(width, rank):
    return gl.NVMMASharedLayout(min(128, 2 * width), element_bitwidth=16, rank=rank)


def _launch_gluon(plan, x, weight, bias, y, gating):
    """Where _can_gluon and TMA can read x and weight."""
    (n_rows, n_in), n_hidden = x.shape, weight.shape[0] // 2
    tile, n_programs, rows = plan.tile, plan.n_programs, y.view(n_rows, n_hidden)
    n_tiles = _cdiv(n_rows, tile.m) * _cdiv(n_hidden, tile.n)
    left_over = n_tiles % n_programs if n_tiles > n_programs else 0
    if left_over * _PARTS > n_programs:
        left_over = 0  # cut up, they would take several waves
    halves, half, narrow = _as_halves(weight), tile.m // 2, tile.n // _PARTS

    def described(tensor, shape, strides, *block):
        layout = _swizzled(block[-1], len(block))
        return GluonDescriptor(tensor, shape, strides, [*block], layout)

    _run(
        _linear_glu_gluon_kernel, (min(n_tiles, n_programs),),
        (
            described(x, x.shape, x.stride(), half, tile.k), described(*halves, 2, tile.n, tile.k),
            described(rows, rows.shape, rows.stride(), half, tile.n),
            described(*halves, 2, narrow, tile.k),
            described(rows, rows.shape, rows.stride(), half, narrow), bias,
        ),
        n_rows, n_hidden, n_in, n_tiles - left_over, GROUP=plan.group, STAGES=tile.num_stages,
        LAG=tile.num_stages - 1, PARTS=_PARTS, **_constexprs(*gating), num_warps=tile.num_warps,
    )  # fmt: skip


def _launch_backward(plan, dy, h, dh, gating, has_db):
    """Write dh. Returns what each strip of rows adds to db, (strips, 2H), or None."""
    n_rows, n_hidden = dy.shape
    block_m, block_n, strips = plan or _plan_backward(n_hidden)
    rows_per_program = _cdiv(_cdiv(n_rows, strips), block_m) * block_m
    strips, n_tiles = _cdiv(n_rows, rows_per_program), _cdiv(n_hidden, block_n)
    # Unaligned rows load one element per instruction; cp.async cannot pipeline that, so num_stages=1.
    aligned = n_hidden % 16 == 0 and dy.stride(1) == 1
    wide = h.dtype if strips == 1 or h.dtype == torch.float64 else torch.float32
    partial = h.new_empty((strips, 2 * n_hidden), dtype=wide) if has_db else None
    _run(
        _linear_glu_bwd_kernel, (strips * n_tiles,), (dy, h, dh, partial),
        n_rows, n_hidden, *dy.stride(), rows_per_program,
        **_constexprs(*gating), NUM_STAGES=3 if aligned else 1, COMPUTE=_compute_dtype(h.dtype),
        BLOCK_M=block_m, BLOCK_N=block_n, num_warps=4,
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


def _forward(
    x, weight, bias, gating=("gelu_tanh", "second"), allow_tf32=False, save_h=False, plan=None,
    launch=_launch,
):  # fmt: skip
    """y, and h = x Wᵀ + b if save_h, else None. gating: activation and gate."""
    n_hidden, n_in = weight.shape[0] // 2, weight.shape[1]
    y = torch.empty((*x.shape[:-1], n_hidden), dtype=x.dtype, device=x.device)
    h = y.new_empty((*x.shape[:-1], 2 * n_hidden)) if save_h else None
    if y.numel() > 0:
        # (M, K): a copy where strides allow no view
        rows = x.reshape(math.prod(x.shape[:-1]), n_in)
        bias = None if bias is None else bias.contiguous()
        launch(plan, rows, weight, bias, y, h, gating, allow_tf32)
    return y, h


def _save(ctx, x, weight, bias, h):
    """x for dW, W for dx, and h; where h is None, all that it takes to compute it again."""
    if h is not None:
        has_dx, has_dw = ctx.needs_input_grad[:2]
        x, weight, bias = x if has_dw else None, weight if has_dx else None, None
    ctx.save_for_backward(x, weight, bias, h)


def _for_cublas(t):
    """t; a copy where rows or columns begin 2 GiB apart, at which cuBLAS reads memory that is not t's."""
    return t.contiguous() if any(s * t.itemsize >= 2**31 for s in t.stride()) else t


def _dz(dy, h, gating, has_db, plan=None, over_h=False):
    """dh, the gradient of h, in new memory or over h itself, and db if has_db, else None."""
    n_hidden, dh = dy.shape[-1], h if over_h else torch.empty_like(h)
    if dh.numel() == 0:
        return dh, dh.new_zeros(2 * n_hidden) if has_db else None
    # y.sum().backward() sends a dy of strides 0, which is read as it is
    partial = _launch_backward(
        plan and plan.backward, dy.reshape(-1, n_hidden), h, dh, gating, has_db
    )
    return dh, _sum_rows(partial, h.dtype) if has_db else None


def _backward(dy, x, weight, bias, h, gating, needs_grad, dz=_dz):
    """dx, dweight, db, each None unless needed. Where h is None it is computed again."""
    has_dx, has_dw, has_db = needs_grad
    # autocast, where it is on, would give these products another dtype than those of the forward pass
    with torch.autocast(dy.device.type, enabled=False):
        if h is None:
            h = F.linear(_for_cublas(x), _for_cublas(weight), bias)
        dh, db = dz(dy, h, gating, has_db)
        rows = dh.view(math.prod(dh.shape[:-1]), dh.shape[-1])  # (M, 2H)
        dx = (rows @ _for_cublas(weight)).view(*dy.shape[:-1], weight.shape[1]) if has_dx else None
        dw = rows.t() @ _for_cublas(x.reshape(rows.shape[0], x.shape[-1])) if has_dw else None
    return dx, dw, db if has_db else None


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


class _LinearGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, gating, recompute, allow_tf32, plan):
        y, h = _forward(x, weight, bias, gating, allow_tf32, not recompute, plan)
        _save(ctx, x, weight, bias, h)
        ctx.gating, ctx.plan = gating, plan
        ctx.set_materialize_grads(False)  # no zeros for h's gradient, 2MHs bytes
        return y, h  # h too: by it a second derivative finds its way to the inputs

    @staticmethod
    @_once
    def backward(ctx, dy, _):
        if dy is None:  # y is used, and has no gradient all the same
            return (None,) * 7
        saved, needs_grad = ctx.saved_tensors, ctx.needs_input_grad[:3]
        # over an h computed again only: one that was saved may be asked for a second time
        dz = functools.partial(_dz, plan=ctx.plan, over_h=saved[-1] is None)
        return *_backward(dy, *saved, ctx.gating, needs_grad, dz), *[None] * 4


# --- the calls -----------------------------------------------------------------------------------------------


def _fits(x, weight, bias, activation, gate):
    """Whether the kernels take these arguments; if not, _refuse says why."""
    return (
        isinstance(x, torch.Tensor)
        and isinstance(weight, torch.Tensor)
        and x.dtype == weight.dtype in _DTYPES
        and x.device == weight.device
        and x.device.type == ("cpu" if _ON_CPU else "cuda")
        and weight.dim() == 2
        and x.shape[-1:] == weight.shape[1:]
        and weight.shape[0] % 2 == 0
        and weight.shape[0] <= 2**24  # offsets within a tile are int32
        and activation in _ACTIVATIONS
        and gate in _GATES
        and (
            bias is None
            or isinstance(bias, torch.Tensor)
            and (bias.dtype, bias.device) == (x.dtype, x.device)
            and bias.shape == weight.shape[:1]
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


def _refuse_arguments(name, x, weight, bias, activation, gate):
    if activation not in _ACTIVATIONS:
        known = ", ".join(_ACTIVATIONS)
        raise ValueError(f"{name}: activation must be one of {known}; got {activation!r}")
    if gate not in _GATES:
        halves = "'first' or 'second', the half of the columns that goes through the activation"
        raise ValueError(f"{name}: gate must be {halves}; got {gate!r}")
    if isinstance(x, torch.Tensor) and isinstance(weight, torch.Tensor) and weight.dim() == 2:
        sizes = f"x {tuple(x.shape)} and weight {tuple(weight.shape)}"
        if x.shape[-1:] != weight.shape[1:]:
            want = "x must be (..., K) and weight (2H, K), as in torch.nn.Linear"
            hint = "a weight (K, 2H) is passed as weight.t()"
            raise ValueError(f"{name}: {want}, got {sizes}; {hint}")
        if weight.shape[0] % 2 or weight.shape[0] > 2**24:
            want = "an even number of rows, at most 2**24: those of x1, then as many of the gate x2"
            raise ValueError(f"{name}: weight must have {want}, got {sizes}")
    last = {} if bias is None else {"bias": (bias, "2H")}
    _refuse(name, "linear_glu_eager", x=(x, "... K"), weight=(weight, "2H K"), **last)


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


def _autocast(*tensors):
    """Under autocast the tensors in its dtype, as torch's own products take them."""
    device = "cpu" if _ON_CPU else "cuda"
    if not torch.is_autocast_enabled(device):
        return tensors
    dtype, casts = torch.get_autocast_dtype(device), _DTYPES[:3]
    return [t.to(dtype) if getattr(t, "dtype", None) in casts else t for t in tensors]


def _call(name, x, weight, bias, gating, recompute, allow_tf32, plan):
    x, weight, bias = _autocast(x, weight, bias)
    if not _fits(x, weight, bias, *gating):
        _refuse_arguments(name, x, weight, bias, *gating)
    needs_grad = _needs_grad(x, weight) if bias is None else _needs_grad(x, weight, bias)
    if torch.compiler.is_compiling():
        save_h = needs_grad and not recompute
        return linear_glu_op(x, weight, bias, *gating, save_h, allow_tf32)[0]
    try:
        if needs_grad:
            return _LinearGLU.apply(x, weight, bias, gating, recompute, allow_tf32, plan)[0]
        # past autograd: less host time
        return _forward(x, weight, bias, gating, allow_tf32, plan=plan)[0]
    except RuntimeError as error:
        _explain(error, name, "linear_glu_eager")
        raise


def linear_glu_triton(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None,
    activation: str = "gelu_tanh", gate: str = "second", recompute: bool = False,
    allow_tf32: bool = False, *, plan: Plan | None = None,
) -> torch.Tensor:  # fmt: skip
    """x1 · act(x2), [x1, x2] = x Wᵀ + b, in one Triton kernel, with gradients for x, weight and bias.

    x: (..., K), weight: (2H, K), any strides; bias: (2H,) or None; all of one dtype and device. activation: of
    the gate, gelu (GEGLU), gelu_tanh, silu (SwiGLU), relu (ReGLU) or sigmoid (GLU; all after Shazeer, GLU
    Variants Improve Transformer, 2020). gate: which half of h's columns it is, "second" or "first"; the weights
    of Llama's gate_proj and up_proj are torch.cat([gate_proj.weight, up_proj.weight]) and gate="first".
    Returns y, (..., H), contiguous. recompute: the backward pass computes h again, and nothing keeps it.
    allow_tf32: this kernel may round float32 to tf32; the products of the backward pass go by
    torch.backends.cuda.matmul.
    plan: a Plan in place of the one chosen, for tuning; torch.compile leaves it out.
    Works under torch.compile (as the op fused_kernels::linear_glu), autocast (in its dtype, as F.linear)
    and CUDA graphs; not under torch.func, torch.vmap or forward-mode AD, nor twice differentiable: these
    raise.
    Raises TypeError for a wrong dtype, ValueError for a wrong shape, device, activation or gate, and where 2H
    would be odd.
    """
    gating = activation, gate
    return _call("linear_glu_triton", x, weight, bias, gating, recompute, allow_tf32, plan)


def linear_geglu_triton(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, recompute: bool = False,
    allow_tf32: bool = False, *, plan: Plan | None = None,
) -> torch.Tensor:  # fmt: skip
    """linear_glu_triton with gelu_tanh of the second half: x1 · gelu(x2)."""
    gating = "gelu_tanh", "second"
    return _call("linear_geglu_triton", x, weight, bias, gating, recompute, allow_tf32, plan)


@torch.library.custom_op("fused_kernels::linear_glu", mutates_args=())
def linear_glu_op(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None,
    activation: str = "gelu_tanh", gate: str = "second", save_h: bool = False, allow_tf32: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """y, and h, which is empty without save_h: one node of a graph of torch.compile or torch.export."""
    gating = activation, gate
    if not _fits(x, weight, bias, *gating):
        _refuse_arguments("linear_glu_op", x, weight, bias, *gating)
    y, h = _forward(x, weight, bias, gating, allow_tf32, save_h)
    return y, y.new_empty(0) if h is None else h


@torch.library.custom_op("fused_kernels::linear_glu_backward", mutates_args=())
def _linear_glu_backward_op(
    dy: torch.Tensor, h: torch.Tensor, activation: str, gate: str, has_db: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    dh, db = _dz(dy, h, (activation, gate), has_db)
    return dh, dh.new_empty(0) if db is None else db


@linear_glu_op.register_fake
def _(x, weight, bias=None, activation="gelu_tanh", gate="second", save_h=False, allow_tf32=False):
    n_hidden, lead = weight.shape[0] // 2, x.shape[:-1]
    return x.new_empty((*lead, n_hidden)), x.new_empty((*lead, 2 * n_hidden) if save_h else (0,))


@_linear_glu_backward_op.register_fake
def _(dy, h, activation, gate, has_db):
    return torch.empty_like(h), h.new_empty(h.shape[-1] if has_db else 0)


def _setup_context(ctx, inputs, output):
    (x, weight, bias, activation, gate, save_h, _), (_, h) = inputs, output
    ctx.gating = activation, gate
    ctx.mark_non_differentiable(h)
    ctx.set_materialize_grads(False)  # no zeros for h's gradient, 2MHs bytes
    # all inputs: h is no way to them for a second derivative
    ctx.save_for_backward(x, weight, bias, h if save_h else None)


def _dz_op(dy, h, gating, has_db):
    return _linear_glu_backward_op(dy, h, *gating, has_db)


@_once
def _op_backward(ctx, dy, _):
    if dy is None:  # y is used, and has no gradient all the same
        return (None,) * 7
    needs_grad = (*ctx.needs_input_grad, False)[:3]  # torch leaves out a bias that is None
    grads = _backward(dy, *ctx.saved_tensors, ctx.gating, needs_grad, _dz_op)
    return *grads, *[None] * 4


linear_glu_op.register_autograd(_op_backward, setup_context=_setup_context)


class FusedGLU(torch.nn.Linear):
    """torch.nn.Linear(in_features, 2 * hidden_features) and its gate in one kernel; the same state_dict.

    activation, gate, recompute: as for linear_glu_triton.
    """

    def __init__(
        self, in_features: int, hidden_features: int, bias: bool = True, activation: str = "gelu_tanh",
        gate: str = "second", recompute: bool = False,
        device: torch.device | str | None = None, dtype: torch.dtype | None = None,
    ):  # fmt: skip
        super().__init__(in_features, 2 * hidden_features, bias, device, dtype)
        if activation not in _ACTIVATIONS or gate not in _GATES:
            _refuse_arguments("FusedGLU", None, None, None, activation, gate)
        self.activation, self.gate, self.recompute = activation, gate, recompute

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return linear_glu_triton(
            x, self.weight, self.bias, self.activation, self.gate, self.recompute
        )

    def extra_repr(self):
        return f"{super().extra_repr()}, activation={self.activation!r}, gate={self.gate!r}"
