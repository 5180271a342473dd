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
Copy it   by `make copy OP=linear_glu TO=folder`, or with its imports, which stand beside it. MIT licence.
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
    from . import _gluon as shared
    from . import _host as host
    from . import _linear_glu_gluon as gluon_kernel
else:  # the same, in a plain folder
    import _device as device
    import _gluon as shared
    import _host as host
    import _linear_glu_gluon as gluon_kernel

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
def _gelu_tanh_slope(z):
    # sigmoid(2u) and gelu'(z) = s + z·s·(1 - s)·2u', s = sigmoid(2u). By e = exp(-|2u|), which cannot overflow,
    # and with s·(1 - s) = e/(1 + e)²: where s is nearly 1, 1 - s has lost its digits, and z·2u' multiplies what
    # is left. Far out e is 0, and 2u' must not be infinite: 0·inf is NaN.
    a = tl.minimum(tl.abs(z), 1e3)
    e = device.fast_exp(a * (-1.5957691216057308 - 0.07135481627260025 * a * a))
    t = device.fast_divide(tl.full(z.shape, 1.0, z.dtype), 1.0 + e)
    s = tl.where(z < 0, e * t, t)
    return s, s + z * (e * t * t) * (1.5957691216057308 + 0.2140644488178008 * a * a)


@triton.jit
def _gated_grad(dy, x1, x2, ACTIVATION: tl.constexpr):
    # dy·act(x2) and dy·x1·act'(x2)
    if ACTIVATION == "gelu":
        y, slope = device.gelu(x2), device.gelu_grad(x2)
    elif ACTIVATION == "gelu_tanh":
        s, slope = _gelu_tanh_slope(x2)
        y = x2 * s
    elif ACTIVATION == "relu":
        y, slope = tl.where(x2 < 0, 0.0, x2), tl.where(x2 <= 0, 0.0, 1.0)
    else:
        e = device.fast_exp(-tl.abs(x2))  # as in _gelu_tanh_slope: s·(1 - s) = e/(1 + e)²
        t = device.fast_divide(tl.full(x2.shape, 1.0, x2.dtype), 1.0 + e)
        y, slope = tl.where(x2 < 0, e * t, t), e * t * t
        if ACTIVATION == "silu":
            slope = y + x2 * slope
            y = x2 * y
    return dy * y, dy * x1 * slope


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
    y = device.gated(x1, x2, ACTIVATION)
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
    pid_m, pid_n = device.place_of(tl.program_id(0), n_rows, n_hidden, GROUP, BLOCK_M, BLOCK_N)
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
        total = device.dot(x, w, total, PRECISION, COMPUTE)
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
        pid_m, pid_n = device.place_of(tile, n_rows, n_hidden, GROUP, BLOCK_M, BLOCK_N)
        row, col = pid_m * BLOCK_M, pid_n * BLOCK_N
        bias1, bias2 = 0.0, 0.0
        if bias_ptr is not None:
            # arrives during the products
            bias1, bias2 = _load_bias(bias_ptr, col, n_hidden, BLOCK_N)
        total = tl.zeros((BLOCK_M, 2 * BLOCK_N), dtype=tl.float32)
        for k in range(0, n_in, BLOCK_K):
            x = x_desc.load([row, k])
            w = tl.reshape(w_desc.load([0, col, k]), (2 * BLOCK_N, BLOCK_K))
            total = device.dot(x, tl.trans(w), total)
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
_GROUP = 16  # rows of tiles


def _has_tma(gpu):
    return 9 <= host.generation(gpu) < 12  # 12, desktops' Blackwell, has less shared memory


def _tile_for(n_rows, n_hidden, dtype, allow_tf32, gpu):
    """The first tile that is not much taller than x and gives most SMs work; else the last."""
    kind = host.kind_of(dtype, allow_tf32)
    if kind != "double" and not _has_tma(gpu):
        kind = "turing" if host.generation(gpu) < 8 else "elsewhere"
    for tile in _TILES[kind]:
        n_tiles = host.cdiv(n_rows, tile.m) * host.cdiv(n_hidden, tile.n)
        if tile.m < 2 * n_rows and 2 * n_tiles > host.n_multiprocessors(gpu):
            break
    return tile


@functools.lru_cache(4096)
def _plan(n_rows, n_hidden, n_in, dtype, allow_tf32, gpu, can_tma, can_gluon=False):
    """can_tma, can_gluon: whether TMA can read x and weight; whether the kernel in Gluon can write y."""
    tile = _tile_for(n_rows, n_hidden, dtype, allow_tf32, gpu)
    if not can_tma or tile.m < _TMA_TILES["long"].m:
        return Plan("pointers", tile, _GROUP)
    if can_gluon:
        group = 2 * _GROUP if n_in <= _SHORT else _GROUP
        return Plan("gluon", _GLUON_TILE, group, host.n_multiprocessors(gpu))
    return _plan_tma(n_in, gpu)


def _plan_tma(n_in, gpu):
    length, per_multiprocessor = ("short", 2) if n_in <= _SHORT else ("long", 1)
    n_programs = per_multiprocessor * host.n_multiprocessors(gpu)
    return Plan("tma", _TMA_TILES[length], _GROUP, n_programs, tma_store=length == "long")


@functools.cache
def _plan_backward(n_hidden):
    """(BLOCK_M, BLOCK_N, strips): 16 elements for each of 128 threads; two sums of 32 fill the registers."""
    block_n = min(128, host.power_of_2(n_hidden))
    # About 4096 programs fill any GPU, and at most 1024 strips of rows keep the second sum short
    strips = max(1, min(host.cdiv(4096, host.cdiv(n_hidden, block_n)), 1024))
    return 2048 // block_n, block_n, strips


def _constexprs(activation, gate):
    return {"ACTIVATION": activation, "GATE_FIRST": gate == "first"}


def _launch(plan, x, weight, bias, y, h, gating, allow_tf32):
    """Write y, and h unless it is None. plan: None to have it chosen."""
    (n_rows, n_in), n_hidden = x.shape, weight.shape[0] // 2
    can_tma = x.itemsize == 2 and n_in > 0 and _has_tma(x.device) and host.tma_reads(x)
    can_tma = can_tma and host.tma_reads(weight)
    can_gluon = can_tma and h is None and _can_gluon(n_hidden, n_in, x.device)
    if plan is None or not {"tma": can_tma, "gluon": can_gluon}.get(plan.way, True):
        plan = _plan(n_rows, n_hidden, n_in, x.dtype, allow_tf32, x.device, can_tma, can_gluon)
    if plan.way == "gluon":
        inputs = x, _as_halves(weight), bias
        if shared.ran(gluon_kernel.launch_gluon, plan, *inputs, y, **_constexprs(*gating)):
            return
        plan = _plan(n_rows, n_hidden, n_in, x.dtype, allow_tf32, x.device, can_tma)
    if plan.way == "tma":
        _launch_tma(plan, x, weight, bias, y, h, gating)
        return
    tile = plan.tile
    host.run(
        _linear_glu_fwd_kernel, (host.cdiv(n_rows, tile.m) * host.cdiv(n_hidden, tile.n),),
        (x, weight, bias, y, h), n_rows, n_hidden, n_in, *x.stride(), *weight.stride(),
        PRECISION="ieee" if host.generation(x.device) < 8 else "tf32" if allow_tf32 else "tf32x3",
        COMPUTE=host.compute_dtype(x.dtype), **_constexprs(*gating), GROUP=plan.group,
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
    n_tiles = host.cdiv(n_rows, tile.m) * host.cdiv(n_hidden, tile.n)
    y_out = TensorDescriptor(rows, rows.shape, rows.stride(), [tile.m, tile.n]) if tma_store else y
    host.run(
        _linear_glu_tma_kernel, (min(n_tiles, plan.n_programs),),
        (
            TensorDescriptor(x, [n_rows, n_in], [x.stride(0), 1], [tile.m, tile.k]),
            TensorDescriptor(*_as_halves(weight), [2, tile.n, tile.k]), bias, y_out, h,
        ),
        n_rows, n_hidden, n_in, **_constexprs(*gating), GROUP=plan.group, BY_TMA=tma_store,
        BLOCK_M=tile.m, BLOCK_N=tile.n, BLOCK_K=tile.k,
        num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip


def _can_gluon(n_hidden, n_in, gpu):
    """Hopper's own instructions; rows of y on 16-byte boundaries; and a K with a lag in it."""
    hopper = not host.ON_CPU and host.generation(gpu) == 9
    return hopper and n_hidden % 8 == 0 and n_in > (_FEWEST_STEPS - 1) * _GLUON_TILE.k


def _launch_backward(plan, dy, h, dh, gating, has_db):
    """Write dh. Returns what each strip of rows adds to db, (strips, 2H), or None."""
    n_rows, n_hidden = dy.shape
    block_m, block_n, strips = plan or _plan_backward(n_hidden)
    dtype, n_tiles = h.dtype if has_db else None, host.cdiv(n_hidden, block_n)
    rows_per_program, strips, partial = host.strips_of(host.rows_of(h), 1, block_m, strips, dtype)
    # Unaligned rows load one element per instruction; cp.async cannot pipeline that, so num_stages=1.
    aligned = n_hidden % 16 == 0 and dy.stride(1) == 1
    host.run(
        _linear_glu_bwd_kernel, (strips * n_tiles,), (dy, h, dh, partial),
        n_rows, n_hidden, *dy.stride(), rows_per_program,
        **_constexprs(*gating), NUM_STAGES=3 if aligned else 1, COMPUTE=host.compute_dtype(h.dtype),
        BLOCK_M=block_m, BLOCK_N=block_n, num_warps=4,
    )  # fmt: skip
    return partial


# --- forward and backward ------------------------------------------------------------------------------------


def _empty(x, weight, save_h):
    """y, and h if save_h, before they are written."""
    y = x.new_empty((*x.shape[:-1], weight.shape[0] // 2))
    return y, x.new_empty((*x.shape[:-1], weight.shape[0])) if save_h else None


def _forward(
    x, weight, bias, gating=("gelu_tanh", "second"), allow_tf32=False, save_h=False, plan=None,
    launch=_launch,
):  # fmt: skip
    """y, and h = x Wᵀ + b if save_h, else None. gating: activation and gate."""
    y, h = _empty(x, weight, save_h)
    if y.numel() > 0:
        # (M, K): a copy where strides allow no view
        rows = x.reshape(math.prod(x.shape[:-1]), weight.shape[1])
        bias = None if bias is None else bias.contiguous()
        launch(plan, rows, weight, bias, y, h, gating, allow_tf32)
    return y, h


def _save(ctx, x, weight, bias, h, gating, dh_of):
    ctx.save_for_backward(x, weight, bias, h)
    ctx.gating, ctx.dh_of = gating, dh_of
    ctx.set_materialize_grads(False)  # no zeros for h's gradient, 2MHs bytes


def _dh_of(dy, h, activation, gate, has_db, plan=None, over_h=False):
    """dh, the gradient of h, in new memory or over h itself, and db if has_db, else None."""
    n_hidden, dh = dy.shape[-1], h if over_h else torch.empty_like(h)
    if dh.numel() == 0:
        return dh, dh.new_zeros(2 * n_hidden) if has_db else None
    # y.sum().backward() sends a dy of strides 0, which is read as it is
    rows, blocks = dy.reshape(-1, n_hidden), plan and plan.backward
    partial = _launch_backward(blocks, rows, h, dh, (activation, gate), has_db)
    return dh, host.sum_rows(partial, h.dtype) if has_db else None


@host.once
def _backward(ctx, dy, _):
    """dx, dweight, db, each None unless needed, and None for the rest. Where h is None it is computed again."""
    if dy is None:  # y is used, and has no gradient all the same
        return (None,) * 7
    x, weight, bias, h = ctx.saved_tensors
    has_dx, has_dw, has_db = (*ctx.needs_input_grad, False)[:3]  # the op's ends before a bias None
    # autocast, where it is on, would give these products another dtype than those of the forward pass
    with torch.autocast(dy.device.type, enabled=False):
        if h is None:
            h = F.linear(host.for_cublas(x), host.for_cublas(weight), bias)
        dh, db = ctx.dh_of(dy, h, *ctx.gating, has_db)
        rows = dh.view(math.prod(dh.shape[:-1]), dh.shape[-1])  # (M, 2H)
        dx, dw = None, None
        if has_dx:
            dx = (rows @ host.for_cublas(weight)).view(*dy.shape[:-1], weight.shape[1])
        if has_dw:
            dw = rows.t() @ host.for_cublas(x.reshape(rows.shape[0], x.shape[-1]))
    return dx, dw, db if has_db else None, None, None, None, None


class _LinearGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, gating, allow_tf32, save_h, plan):
        y, h = _forward(x, weight, bias, gating, allow_tf32, save_h, plan)
        if save_h:  # x for dW, W for dx; without h all three, to compute it again
            has_dx, has_dw = ctx.needs_input_grad[:2]
            x, weight, bias = x if has_dw else None, weight if has_dx else None, None
        # over an h computed again only: one that was saved may be asked for a second time
        dh_of = functools.partial(_dh_of, plan=plan, over_h=not save_h)
        _save(ctx, x, weight, bias, h, gating, dh_of)
        return y, h  # h too: by it a second derivative finds its way to the inputs

    backward = staticmethod(_backward)


# --- the calls -----------------------------------------------------------------------------------------------


def _check_gating(name, activation, gate):
    if activation not in _ACTIVATIONS:
        known = ", ".join(_ACTIVATIONS)
        raise ValueError(f"{name}: activation must be one of {known}; got {activation!r}")
    if gate not in _GATES:
        halves = "'first' or 'second', the half of the columns that goes through the activation"
        raise ValueError(f"{name}: gate must be {halves}; got {gate!r}")


@host.remembered
def _check(name, x, weight, bias, activation, gate):
    _check_gating(name, activation, gate)
    if isinstance(x, torch.Tensor) and isinstance(weight, torch.Tensor) and weight.dim() == 2:
        sizes = f"x {tuple(x.shape)} and weight {tuple(weight.shape)}"
        if x.shape[-1:] != weight.shape[1:]:
            want = "x must be (..., K) and weight (2H, K), as in torch.nn.Linear"
            hint = "a weight (K, 2H) is passed as weight.t()"
            raise ValueError(f"{name}: {want}, got {sizes}; {hint}")
        if weight.shape[0] % 2 or weight.shape[0] > 2**24:  # offsets within a tile are int32
            want = "an even number of rows, at most 2**24: those of x1, then as many of the gate x2"
            raise ValueError(f"{name}: weight must have {want}, got {sizes}")
    last = {} if bias is None else {"bias": (bias, "2H")}
    host.check_tensors(name, "linear_glu_eager", x=(x, "... K"), weight=(weight, "2H K"), **last)


def _call(name, x, weight, bias, gating, recompute, allow_tf32, plan):
    tensors = host.autocast(x, weight, bias)
    goes_by_op = _check(name, *tensors, *gating)
    save_h = not recompute and host.needs_autograd(*tensors)
    if goes_by_op:
        return linear_glu_op(*tensors, *gating, save_h, allow_tf32)[0]
    how = gating, allow_tf32, save_h, plan
    return host.call(name, "linear_glu_eager", _LinearGLU, _forward, tensors, *how)[0]


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


@host.custom_op(
    "fused_kernels::linear_glu", flops=lambda x, weight, *_: 2 * math.prod(x) * weight[0]
)
def linear_glu_op(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None,
    activation: str = "gelu_tanh", gate: str = "second", save_h: bool = False, allow_tf32: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """y, and h, which is empty without save_h: one node of a graph of torch.compile or torch.export."""
    gating = activation, gate
    _check("linear_glu_op", x, weight, bias, *gating)
    y, h = _forward(x, weight, bias, gating, allow_tf32, save_h)
    return y, y.new_empty(0) if h is None else h


@host.custom_op("fused_kernels::linear_glu_backward")
def _linear_glu_backward_op(
    dy: torch.Tensor, h: torch.Tensor, activation: str, gate: str, has_db: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    dh, db = _dh_of(dy, h, activation, gate, has_db)
    return dh, dh.new_empty(0) if db is None else db


@linear_glu_op.register_fake
def _(x, weight, bias=None, activation="gelu_tanh", gate="second", save_h=False, allow_tf32=False):
    y, h = _empty(x, weight, save_h)
    return y, y.new_empty(0) if h is None else h


@_linear_glu_backward_op.register_fake
def _(dy, h, activation, gate, has_db):
    return torch.empty_like(h), h.new_empty(h.shape[-1] if has_db else 0)


def _setup_context(ctx, inputs, output):
    (*tensors, activation, gate, save_h, _), (_, h) = inputs, output
    ctx.mark_non_differentiable(h)
    # all inputs: h is no way to them for a second derivative
    _save(ctx, *tensors, h if save_h else None, (activation, gate), _linear_glu_backward_op)


linear_glu_op.register_autograd(_backward, setup_context=_setup_context)


def join_projections(
    module: torch.nn.Module,
    first: str = "gate_proj",
    second: str = "up_proj",
    into: str = "gate_up",
) -> None:
    """Let `module`, with a FusedGLU as child `into`, load state_dicts of two layers in its place, as Llama's.

    The default names go with gate="first". A state_dict of this module has one layer all the same.
    """

    def join(module, state_dict, prefix, *_):
        for name in ("weight", "bias"):
            keys = [f"{prefix}{layer}.{name}" for layer in (first, second)]
            if all(key in state_dict for key in keys):
                state_dict[f"{prefix}{into}.{name}"] = torch.cat([state_dict.pop(k) for k in keys])

    glu = getattr(module, into, None)
    if not isinstance(glu, FusedGLU):
        raise TypeError(f"join_projections: module.{into} must be a FusedGLU; name it by into=")
    gates = [which for which, layer in (("first", first), ("second", second)) if "gate" in layer]
    if len(gates) == 1 and glu.gate != gates[0]:
        wrong = f'{first} comes first, and module.{into} has gate="{glu.gate}"'
        raise ValueError(f'join_projections: {wrong}; make it with gate="{gates[0]}"')
    module.register_load_state_dict_pre_hook(join)


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
        _check_gating("FusedGLU", activation, gate)
        self.activation, self.gate, self.recompute = activation, gate, recompute

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        how = self.activation, self.gate, self.recompute
        return linear_glu_triton(x, self.weight, self.bias, *how)

    def extra_repr(self):
        return f"{super().extra_repr()}, activation={self.activation!r}, gate={self.gate!r}"
