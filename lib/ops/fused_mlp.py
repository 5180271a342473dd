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
Copy it   by `make copy OP=fused_mlp TO=folder`, or take _host.py and _device.py along. MIT licence.
"""

import functools
import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

if __package__:  # shared by the ops: `device` in kernels, `host` around them
    from . import _device as device
    from . import _host as host
else:  # the same, in a plain folder
    import _device as device
    import _host as host

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
        z = device.dot(x, w1, z, PRECISION, COMPUTE)
    else:
        for k in range(0, n_inner, BLOCK_K):
            inside = inner < n_inner - k  # masked-off columns must contribute 0
            x = tl.load(x_ptrs, mask=row_mask & inside[None, :], other=0.0)
            w1 = tl.load(w1_ptrs, mask=inside[:, None] & unit_mask, other=0.0)
            z = device.dot(x, w1, z, PRECISION, COMPUTE)
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
            z = device.dot(hidden, w2, z, PRECISION, COMPUTE)

    if b2_ptr is not None:
        z += tl.load(b2_ptr + cols, mask=cols < n_cols, other=0.0).to(COMPUTE)[None, :]
    y_ptrs = y_ptr + tl.program_id(1).to(tl.int64) * n_rows * n_cols
    y_ptrs += rows[:, None] * n_cols + cols[None, :]
    mask = (rows < n_rows)[:, None] & (cols < n_cols)[None, :]
    tl.store(y_ptrs, device.activate(z, FINAL), mask=mask)


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
    tl.store(y_ptr + offsets, device.activate(z, FINAL), mask=mask)


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
            dz2 = device.slope_times(dz2, y, FINAL)
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
            dh = device.dot(dz2, w2, dh, PRECISION, COMPUTE)

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


def _is_wide(k, h, n, kind):
    """Whether the products are left to cuBLAS, be there ever so few rows."""
    return k > _MOST_INNER or h > _MOST_HIDDEN or n > _MOST_COLS[kind]


def _by_cublas(m, k, h, n, kind):
    """Whether the products are left to cuBLAS."""
    of_a_row = (k + n) * h
    is_split = m <= _FEW_ROWS and m * of_a_row <= _MOST_OF_FEW_ROWS[kind]
    long_walk = of_a_row > _MOST_OF_A_ROW[kind] and not is_split
    return _is_wide(k, h, n, kind) or long_walk or n > 64 and m * of_a_row > _MOST_OF_WIDE


@functools.lru_cache(4096)
def _plan(m, k, h, n, kind, gpu, backward=False, way=None, tile=None, n_splits=None):
    """The Plan of a call. Backward, a program has one tile of units, and takes columns in steps, as K."""
    if way == "cublas" or way is None and _by_cublas(m, k, h, n, kind):
        return Plan("cublas")
    # Triton uses no tensor cores of Turing
    has_units = kind == "double" or host.generation(gpu) >= 8
    tiles = (_BACKWARD_TILES if backward else _TILES)[kind if has_units else "ieee"]
    precision = kind if has_units and "tf32" in kind else "ieee"
    n_sms, of_a_row = host.n_multiprocessors(gpu), (k + n) * h
    alone = way == "one kernel" or way is None and of_a_row <= _ALONE[kind]

    def laid_out(tile):  # the programs that it gives work, and its Plan
        n_tiles, block_h = host.cdiv(m, tile.m), min(tile.h, max(16, host.power_of_2(h)))
        n_chunks = max(1, host.cdiv(h, block_h))
        most = n_splits or min(_MOST_SPLITS, n_sms // n_tiles, of_a_row // _LEAST_OF_A_PART)
        parts = n_chunks if backward else 1 if alone else max(1, min(n_chunks, most))
        block_k = min(tile.k, max(16, host.power_of_2(k)))
        block_n = 1 if n == 1 else max(16, host.power_of_2(n))
        block_n = min(tile.k, block_n) if backward else block_n
        blocks = {
            "ONE_STEP": k <= block_k and not backward,
            "BLOCK_M": tile.m, "BLOCK_H": block_h, "BLOCK_K": block_k, "BLOCK_N": block_n,
        }  # fmt: skip
        # a wide y has sums that the registers of 4 warps do not hold
        num_warps = 8 if tile.m >= 64 and block_n > 64 else tile.num_warps
        warps = {"num_warps": num_warps, "num_stages": tile.num_stages}
        units = block_h * host.cdiv(n_chunks, parts)
        n_programs = max(1, host.cdiv(h, units))
        way = "one kernel" if n_programs == 1 else "split"
        how = (n_programs, n_tiles, units, blocks, warps, precision)
        return n_tiles * parts, Plan(way, tile, *how)

    layouts = [laid_out(t) for t in ([tile] if tile else tiles)]
    return next((plan for busy, plan in layouts if busy >= 0.75 * n_sms), layouts[-1][1])


def _launch(plan, y, x, w1, b1, w2, b2, final):
    (n_rows, n_inner), (n_cols, n_hidden) = x.shape, w2.shape
    split, wide = plan.n_splits > 1, host.sum_dtype(x.dtype)
    out = x.new_empty((plan.n_splits, *y.shape), dtype=wide) if split else y
    host.run(
        _fused_mlp_fwd_kernel, (plan.n_tiles, plan.n_splits), (x, w1, b1, w2, None if split else b2, out),
        n_rows, n_inner, n_hidden, n_cols, *x.stride(), *w1.stride(), *w2.stride(), plan.units,
        FINAL="identity" if split else final, PRECISION=plan.precision,
        COMPUTE=host.compute_dtype(x.dtype), **plan.blocks, **plan.warps,
    )  # fmt: skip
    if split:
        host.run(
            _fused_mlp_sum_kernel, (host.cdiv(y.numel(), 512),), (out, b2, y),
            y.numel(), n_cols, plan.n_splits, FINAL=final, BLOCK_SIZE=512, num_warps=4,
        )  # fmt: skip


def _launch_backward(plan, dy, x, w1, b1, w2, y, final, needs_grad):
    """dz1, dz2, hidden, db1, db2, each None unless it, or a product with it, is needed."""
    (n_rows, n_inner), (n_cols, n_hidden) = x.shape, w2.shape
    has_dx, has_dw1, has_db1, has_dw2, has_db2 = needs_grad
    hidden = x.new_empty(n_rows, n_hidden) if has_dw2 else None
    dz1 = x.new_empty(n_rows, n_hidden) if has_dx or has_dw1 else None
    dz2 = x.new_empty(n_rows, n_cols) if has_dw2 else None
    partial = None
    if has_db1 or has_db2:
        wide = x.dtype if plan.n_tiles == 1 else host.sum_dtype(x.dtype)
        partial = x.new_empty((plan.n_tiles, n_hidden + n_cols), dtype=wide)
    host.run(
        _fused_mlp_bwd_kernel, (plan.n_tiles * plan.n_splits,),
        # y.sum().backward() sends a dy of strides 0, which is read as it is
        (dy, y, x, w1, b1.contiguous(), w2, hidden, dz1, dz2, partial),
        n_rows, n_inner, n_hidden, n_cols, *dy.stride(), *x.stride(), *w1.stride(), *w2.stride(),
        FINAL=final, PRECISION=plan.precision, COMPUTE=host.compute_dtype(x.dtype), **plan.blocks, **plan.warps,
    )  # fmt: skip
    if partial is None:
        return dz1, dz2, hidden, None, None
    db1, db2 = host.sum_rows(partial, x.dtype).split((n_hidden, n_cols))
    db2 = db2.clone()  # with memory of its own: the one may outlive the other
    return dz1, dz2, hidden, db1, db2


def _hidden_by_cublas(x, w1, b1):
    # out=: not cast by an autocast that may be on while this runs
    out = x.new_empty(x.shape[0], w1.shape[0])
    return torch.addmm(b1, host.for_cublas(x), host.for_cublas(w1).t(), out=out).relu_()


def _forward_by_cublas(y, x, w1, b1, w2, b2, final):
    hidden = _hidden_by_cublas(x, w1, b1)
    torch.addmm(b2, hidden, host.for_cublas(w2).t(), out=y)
    if final != "identity":
        y.sigmoid_() if final == "sigmoid" else y.relu_()
    return hidden


def _slopes_by_cublas(dy, x, w1, b1, w2, y, hidden, final, needs_grad):
    """dz1, dz2, hidden, db1, db2: as eager has them, from the functions that eager's autograd calls."""
    hidden = _hidden_by_cublas(x, w1, b1) if hidden is None else hidden
    dz1, dz2, aten = None, dy, torch.ops.aten
    if final == "sigmoid":
        dz2 = aten.sigmoid_backward(dy, y)
    elif final == "relu":
        dz2 = aten.threshold_backward(dy, y, 0)
    if any(needs_grad[:3]):
        dh = torch.mm(host.for_cublas(dz2), host.for_cublas(w2), out=torch.empty_like(hidden))
        dz1 = aten.threshold_backward(dh, hidden, 0)
    db1 = dz1.sum(0, dtype=x.dtype) if needs_grad[2] else None
    return dz1, dz2, hidden, db1, dz2.sum(0, dtype=x.dtype) if needs_grad[4] else None


# --- forward and backward ------------------------------------------------------------------------------------


def _matrix(t, width):
    """t, (..., width), as a matrix; a copy where strides allow no view."""
    return t if t.dim() == 2 else t.reshape(math.prod(t.shape[:-1]), width)


def _empty(x, weight1, bias1, weight2, bias2, final="sigmoid", allow_tf32=False):
    """y, before it is written."""
    return x.new_empty((*x.shape[:-1], weight2.shape[0]))


def _forward(x, w1, b1, w2, b2, final, allow_tf32, plan=None):
    """y, and the hidden layer if cuBLAS made it, else None."""
    y, (n_hidden, n_inner), n_cols = _empty(x, w1, b1, w2, b2), w1.shape, w2.shape[0]
    if y.numel() == 0:
        return y, None
    x, out, kind = _matrix(x, n_inner), _matrix(y, n_cols), host.kind_of(x.dtype, allow_tf32)
    asked = plan[:3] if plan else ()
    chosen = _plan(*x.shape, n_hidden, n_cols, kind, x.device, False, *asked)
    if chosen.way == "cublas":
        return y, _forward_by_cublas(out, x, w1, b1, w2, b2, final)
    _launch(chosen, out, x, w1, b1.contiguous(), w2, b2.contiguous(), final)
    return y, None


def _save(ctx, inputs, output, hidden=None):
    *tensors, _, final, allow_tf32 = inputs
    ctx.save_for_backward(*tensors, None if final == "identity" else output, hidden)
    ctx.how = final, allow_tf32


def _backward(dy, x, w1, b1, w2, y, hidden, final, allow_tf32, needs_grad=(True,) * 5, plan=None):
    """dx, dW1, db1, dW2, db2, each None unless needed. y is None for identity, hidden if it was not saved."""
    x_shape, (n_cols, n_hidden), kind = x.shape, w2.shape, host.kind_of(x.dtype, allow_tf32)
    if dy.numel() == 0:
        shapes = x.shape, w1.shape, b1.shape, w2.shape, (n_cols,)
        return [x.new_zeros(shape) if has else None for shape, has in zip(shapes, needs_grad)]
    dy, x = _matrix(dy, n_cols), _matrix(x, w1.shape[1])
    y = None if y is None else _matrix(y, n_cols)
    chosen = _plan(*x.shape, n_hidden, n_cols, kind, x.device, True, plan and plan.way)
    if chosen.way == "cublas":
        slopes = _slopes_by_cublas(dy, x, w1, b1, w2, y, hidden, final, needs_grad)
    else:
        slopes = _launch_backward(chosen, dy, x, w1, b1, w2, y, final, needs_grad)
    (dz1, dz2, hidden, db1, db2), (has_dx, has_dw1, has_db1, has_dw2, has_db2) = slopes, needs_grad
    dx, dw1, dw2 = None, None, None
    if has_dx:  # out= as above, and so in the dtype of what is multiplied
        dx = torch.mm(dz1, host.for_cublas(w1), out=x.new_empty(x.shape)).view(x_shape)
    if has_dw1:
        dw1 = torch.mm(dz1.t(), host.for_cublas(x), out=w1.new_empty(w1.shape))
    if has_dw2:
        dw2 = torch.mm(host.for_cublas(dz2).t(), hidden, out=w2.new_empty(w2.shape))
    return dx, dw1, db1 if has_db1 else None, dw2, db2 if has_db2 else None


class _FusedMLP(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *inputs_and_plan):
        y, hidden = _forward(*inputs_and_plan)
        *inputs, ctx.plan = inputs_and_plan
        _save(ctx, inputs, y, hidden)
        return y

    @staticmethod
    @host.once
    def backward(ctx, dy):
        needs_grad = ctx.needs_input_grad[:5]
        grads = _backward(dy, *ctx.saved_tensors, *ctx.how, needs_grad, ctx.plan)
        return *grads, None, None, None


# --- the calls -----------------------------------------------------------------------------------------------


@host.remembered
def _check(name, x, weight1, bias1, weight2, bias2, final):
    if final not in _FINALS:
        raise ValueError(f"{name}: final must be one of {', '.join(_FINALS)}; got {final!r}")
    host.check_tensors(
        name, "fused_mlp_eager", x=(x, "... K"), weight1=(weight1, "H K"), bias1=(bias1, "H"),
        weight2=(weight2, "N H"), bias2=(bias2, "N"),
    )  # fmt: skip


def _call(name, x, weight1, bias1, weight2, bias2, final, allow_tf32, plan):
    tensors = host.autocast(x, weight1, bias1, weight2, bias2)
    goes_by_op = _check(name, *tensors, final)
    if goes_by_op:
        # By the weights alone: a choice by rows would make a graph for any number of them one for some
        kind, (n_cols, n_hidden) = host.kind_of(tensors[0].dtype, allow_tf32), weight2.shape
        if host.is_compiling() and _is_wide(weight1.shape[1], n_hidden, n_cols, kind):
            # products by cuBLAS: what is between them is the compiler's
            return fused_mlp_eager(*tensors, final)
        return fused_mlp_op(*tensors, final, allow_tf32)
    how = final, allow_tf32, plan
    return host.call(
        name, "fused_mlp_eager", _FusedMLP, lambda *of: _forward(*of)[0], tensors, *how
    )


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


def _flops(x, w1, b1, w2, *_):
    return 2 * math.prod(x[:-1]) * (math.prod(w1) + math.prod(w2))


def _flops_backward(dy, x, w1, b1, w2, y, final, allow_tf32, needs_grad):
    has_dx, has_dw1, _, has_dw2, _ = needs_grad
    of_w1, of_w2 = has_dx + has_dw1, any(needs_grad[:3]) + has_dw2
    return 2 * math.prod(x[:-1]) * (of_w1 * math.prod(w1) + of_w2 * math.prod(w2))


@host.custom_op("fused_kernels::fused_mlp", flops=_flops)
def fused_mlp_op(
    x: torch.Tensor, weight1: torch.Tensor, bias1: torch.Tensor, weight2: torch.Tensor,
    bias2: torch.Tensor, final: str = "sigmoid", allow_tf32: bool = False,
) -> torch.Tensor:  # fmt: skip
    """fused_mlp for torch.compile and torch.export: one node of the graph, which nothing looks into."""
    tensors = (x, weight1, bias1, weight2, bias2)
    _check("fused_mlp_op", *tensors, final)
    return _forward(*tensors, final, allow_tf32)[0]


@host.custom_op("fused_kernels::fused_mlp_backward", flops=_flops_backward)
def _fused_mlp_backward_op(
    dy: torch.Tensor, x: torch.Tensor, weight1: torch.Tensor, bias1: torch.Tensor,
    weight2: torch.Tensor, y: torch.Tensor | None, final: str, allow_tf32: bool, needs_grad: list[bool],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    grads = _backward(dy, x, weight1, bias1, weight2, y, None, final, allow_tf32, needs_grad)
    dx, dw1, db1, dw2, db2 = (dy.new_empty(0) if g is None else g for g in grads)
    return dx, dw1, db1, dw2, db2


fused_mlp_op.register_fake(_empty)


@_fused_mlp_backward_op.register_fake
def _(dy, x, weight1, bias1, weight2, y, final, allow_tf32, needs_grad):
    shapes = x.shape, weight1.shape, bias1.shape, weight2.shape, weight2.shape[:1]
    return tuple(dy.new_empty(shape if has else (0,)) for shape, has in zip(shapes, needs_grad))


def _op_backward(ctx, dy):
    (*saved, _), needs_grad = ctx.saved_tensors, list(ctx.needs_input_grad[:5])
    grads = _fused_mlp_backward_op(dy, *saved, *ctx.how, needs_grad)
    return *(g if has else None for g, has in zip(grads, needs_grad)), None, None


fused_mlp_op.register_autograd(_op_backward, setup_context=_save)


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
