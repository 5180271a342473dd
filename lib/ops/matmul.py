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
Copy it   by `make copy OP=matmul TO=folder`, or with _host.py, _device.py and its .cu beside it. MIT licence.
"""

import functools
import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

if __package__:  # shared by the ops: `device` in kernels, `host` around them
    from . import _device as device
    from . import _host as host
else:  # the same, in a plain folder
    import _device as device
    import _host as host


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
    # or "tma", which is "tiles" where it cannot be; "cublas"; "naive", without tensor cores
    way: str = "tiles"
    n_parts: int = 1  # split-K from 2 on
    group: int = 8  # rows of tiles that programs go down together
    copies: bool = False  # whether a and b are copied if their rows are not aligned
    backward: tuple[int, int, int] | None = None


def matmul_eager(
    a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None = None, activation: str = "identity"
) -> torch.Tensor:
    z = a @ b
    return host.ACTIVATIONS[activation](z if bias is None else z + bias)


@triton.jit
def _store_tile(z, bias_ptr, y_ptr, z_ptr, rows, cols, n_rows, n_cols, ACTIVATION: tl.constexpr):
    # The epilogue: bias, activation and rounding while the sums are in registers.
    if bias_ptr is not None:
        z += tl.load(bias_ptr + cols, mask=cols < n_cols, other=0.0).to(z.dtype)[None, :]
    offsets = rows[:, None] * n_cols + cols[None, :]
    mask = (rows < n_rows)[:, None] & (cols < n_cols)[None, :]
    y = device.activate(z, ACTIVATION).to(y_ptr.dtype.element_ty)
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
    pid_m, pid_n = device.place_of(tl.program_id(0), n_rows, n_cols, GROUP, BLOCK_M, BLOCK_N)
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
            total = device.dot(a, b, total, PRECISION, COMPUTE)
        else:
            # Not a[:, :, None] * b[None, :, :] summed over axis 1: Triton makes a dot of that, float32 in tf32
            total += tl.sum(a.to(COMPUTE).T[:, :, None] * b.to(COMPUTE)[:, None, :], axis=0)
        a_ptrs += tl.cast(stride_ak, tl.int64) * BLOCK_K
        b_ptrs += tl.cast(stride_bk, tl.int64) * BLOCK_K
    y_ptr += tl.program_id(1).to(tl.int64) * n_rows * n_cols
    if HALVES:
        left, right = device.left_and_right(total)
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
    y_desc.store([row, col], device.activate(z, ACTIVATION).to(y_desc.dtype))


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
        pid_m, pid_n = device.place_of(tile, n_rows, n_cols, GROUP, BLOCK_M, BLOCK_N)
        row, col = pid_m * BLOCK_M, pid_n * BLOCK_N
        total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for k in range(0, n_inner, BLOCK_K):
            a = a_desc.load([k, row]).T if A_TRANSPOSED else a_desc.load([row, k])
            b = b_desc.load([col, k]).T if B_TRANSPOSED else b_desc.load([k, col])
            total = device.dot(a, b, total)
        if HALVES:
            left, right = device.left_and_right(total)
            _store_by_tma(left, bias_ptr, y_desc, z_desc, row, col, n_cols, ACTIVATION)
            col += BLOCK_N // 2
            _store_by_tma(right, bias_ptr, y_desc, z_desc, row, col, n_cols, ACTIVATION)
        else:
            _store_by_tma(total, bias_ptr, y_desc, z_desc, row, col, n_cols, ACTIVATION)


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


def _tiles(kind, gpu, aligned=True):
    if kind == "double":
        return _TILES["double"]
    major = host.generation(gpu)
    if not 9 <= major < 12:  # desktops' Blackwell, 12, has no more shared memory than Ampere
        return _TILES["elsewhere" if aligned and major >= 8 else "elsewhere, one stage"]
    return _TILES[kind if aligned else "half, unaligned" if kind == "half" else "tf32, unaligned"]


@functools.lru_cache(4096)
def _choose(m, n, k, kind, gpu, aligned=True):
    """(tile, parts of K): the largest tile that gives most SMs work, a long K cut in parts."""
    tiles, n_sms = _tiles(kind, gpu, aligned), host.n_multiprocessors(gpu)
    chosen, sizes = (tiles[-1], 1), (host.power_of_2(m), host.power_of_2(n))
    # in m and n neither mostly empty nor needlessly many
    fit = [
        tile
        for tile in tiles
        if all(min(64, size) // 2 <= t <= max(16, size) for t, size in zip(tile[:2], sizes))
    ]
    for tile in fit if tiles is _TILES["half"] else []:
        # a smaller tile rather than parts of K, which are written and read again
        if host.cdiv(m, tile.m) * host.cdiv(n, tile.n) >= _ENOUGH * n_sms:
            return tile, 1
    n_programs = n_sms * _RESIDENT.get(kind, 1)
    for tile in fit:
        n_tiles = host.cdiv(m, tile.m) * host.cdiv(n, tile.n)
        parts = min(_MOST_PARTS, k // (_LEAST_STEPS * tile.k), n_programs // n_tiles)
        chosen = tile, max(1, parts)
        if n_tiles * max(1, parts) >= _ENOUGH * n_sms:
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
    bare = kind == "half" and activation == "identity" and not host.ON_CPU
    if bare and aligned and m * n * k < _CUBLAS_UP_TO:  # it is slow at odd rows
        return Plan(_TILES["half"][0], "cublas")
    aligned = large or aligned
    tile, n_parts = _choose(m, n, k, kind, a.device, aligned)
    by_tma = large and n_parts == 1 and tile.m >= 64 and tile.n >= 64
    return Plan(tile, "tma" if by_tma else "tiles", n_parts, copies=large)


def _with_pitch(t):
    """Memory for the numbers of t whose rows begin on 16-byte boundaries, a multiple of 16 elements apart."""
    return t.new_empty(t.shape[0], host.cdiv(t.shape[1], 16) * 16)[:, : t.shape[1]]


def _to_aligned(t):
    """t, or a copy in the same order whose rows, or columns, can be loaded 16 bytes at a time."""
    if _is_aligned(t):
        return t
    return _with_pitch(t).copy_(t) if t.stride(1) == 1 else _to_aligned(t.t()).t()


def _for_tma(t):
    """(a matrix that TMA reads, whether it is t's transpose): t itself, a view, or a copy."""
    if host.tma_reads(t):
        return t, False
    return (t.t(), True) if host.tma_reads(t.t()) else (_with_pitch(t).copy_(t), False)


def _launch(plan, y, z, a, b, bias, activation, kind):
    """Write y, and z = a b + bias unless it is None."""
    if plan.way == "cublas":
        _launch_bare(a, b, bias, y, z, activation)
        return
    tile, n_inner = plan.tile, a.shape[1]
    if plan.way == "tma" and kind == "half" and n_inner > 0 and 9 <= host.generation(a.device) < 12:
        _launch_persistent(plan, y, z, a, b, bias, activation)
        return
    if plan.copies:
        a, b = _to_aligned(a), _to_aligned(b)
    # split-K: whole steps are longer, and parts may be fewer
    inner_per_part = host.cdiv(host.cdiv(n_inner, plan.n_parts), tile.k) * tile.k
    n_parts = host.cdiv(n_inner, inner_per_part or 1)
    if n_parts <= 1:
        _launch_tiles(plan, inner_per_part, y, z, a, b, bias, activation, kind)
        return
    wide = host.sum_dtype(y.dtype)
    parts = torch.empty((n_parts, *y.shape), dtype=wide, device=y.device)
    _launch_tiles(plan, inner_per_part, parts, None, a, b, None, "identity", kind)
    (n_rows, n_cols), block_m, block_n = y.shape, 8, min(128, host.power_of_2(y.shape[1]))
    host.run(
        _sum_parts_kernel, (host.cdiv(n_rows, block_m) * host.cdiv(n_cols, block_n),), (parts, bias, y, z),
        n_rows, n_cols, n_parts, ACTIVATION=activation, BLOCK_M=block_m, BLOCK_N=block_n, num_warps=4,
    )  # fmt: skip


def _launch_bare(a, b, bias, y, z, activation):
    """The product by cuBLAS, then the activation of what it has rounded."""
    total = y if z is None else z
    a, b = host.for_cublas(a), host.for_cublas(b)
    if bias is None:
        torch.mm(a, b, out=total)
    else:
        torch.addmm(bias, a, b, out=total)
    if activation != "identity":
        y.copy_(host.ACTIVATIONS[activation](total))


def _launch_tiles(plan, inner_per_part, y, z, a, b, bias, activation, kind):
    """One program for each tile of y; y may be (parts, M, N)."""
    tile, (*parts, n_rows, n_cols), n_inner = plan.tile, y.shape, a.shape[1]
    tensor_cores = "tf32" in kind and host.generation(a.device) >= 8  # as to float32
    host.run(
        _matmul_kernel, (host.cdiv(n_rows, tile.m) * host.cdiv(n_cols, tile.n), *(parts or (1,))),
        (a, b, bias, y, z), n_rows, n_cols, n_inner, *a.stride(), *b.stride(), inner_per_part,
        ACTIVATION=activation, DOT=plan.way != "naive", PRECISION=kind if tensor_cores else "ieee",
        COMPUTE=host.compute_dtype(a.dtype), GROUP=plan.group, HALVES=tile.n >= _HALVES_FROM,
        BLOCK_M=tile.m, BLOCK_N=tile.n, BLOCK_K=tile.k,
        num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip


def _launch_persistent(plan, y, z, a, b, bias, activation):
    tile, (n_rows, n_cols), n_inner = plan.tile, y.shape, a.shape[1]
    (a, a_transposed), (b, b_transposed) = _for_tma(a), _for_tma(b)
    outs = [t if t is None or n_cols % 8 == 0 else _with_pitch(t) for t in (y, z)]
    halves = tile.n >= _HALVES_FROM
    out_block = [tile.m, tile.n // 2 if halves else tile.n]
    n_tiles = host.cdiv(n_rows, tile.m) * host.cdiv(n_cols, tile.n)
    host.run(
        _matmul_persistent_kernel, (min(n_tiles, host.n_multiprocessors(y.device)),),
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


def _launch_cuda(plan, y, z, a, b, bias, activation, kind):
    # row after row, as the kernel reads them
    host.load_cuda(__file__).forward(a.contiguous(), b.contiguous(), y)


# --- forward and backward ------------------------------------------------------------------------------------


def _empty(a, b, save_z):
    """y, and z = a b + bias if it is to be saved, else None; before they are written."""
    y = a.new_empty(a.shape[0], b.shape[1])
    return y, torch.empty_like(y) if save_z else None


def _forward(a, b, bias, activation, allow_tf32, plan=None, launch=_launch, save_z=False):
    y, z = _empty(a, b, save_z)
    if y.numel() > 0:
        bias, kind = None if bias is None else bias.contiguous(), host.kind_of(a.dtype, allow_tf32)
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
    if not all_inputs:
        a, b, bias = a if has_db else None, b if has_da else None, None
    ctx.save_for_backward(a, b, bias, host.saved_of(activation, y, z))


def _backward(dy, a, b, saved, activation, allow_tf32, needs_grad, plan=None):
    """da, db, dbias, each None unless needed; saved is y or z, None for identity; a, b None if not needed."""
    has_da, has_db, has_dbias = needs_grad
    strips, has_dz = plan and plan.backward, has_da or has_db
    dz, dbias = host.dz_of(dy, saved, activation, has_dz, has_dbias, strips)
    da = _forward(dz, b.t(), None, "identity", allow_tf32)[0] if has_da else None
    db = _forward(a.t(), dz, None, "identity", allow_tf32)[0] if has_db else None
    return da, db, dbias


class _Matmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, b, bias, activation, allow_tf32, plan, launch):
        save_z = activation in host.OF_Z
        y, z = _forward(a, b, bias, activation, allow_tf32, plan, launch, save_z)
        _save(ctx, a, b, bias, y, z, activation, allow_tf32)
        ctx.plan = plan
        ctx.set_materialize_grads(False)  # no zeros for z's gradient
        return y, z  # z too: by it a second derivative finds its way to the inputs

    @staticmethod
    @host.once
    def backward(ctx, dy, _):
        if dy is None:  # y is used, and has no gradient all the same
            return (None,) * 7
        a, b, _, saved = ctx.saved_tensors
        grads = _backward(dy, a, b, saved, *ctx.how, ctx.needs_grad, ctx.plan)
        return *grads, None, None, None, None


# --- the calls -----------------------------------------------------------------------------------------------


@host.remembered
def _check(name, a, b, bias, activation):
    of_a, of_b = (tuple(t.shape) if isinstance(t, torch.Tensor) else None for t in (a, b))
    if of_a is not None and len(of_a) != 2:
        hint = "one row is passed as a[None]" if len(of_a) == 1 else "use a.flatten(0, -2)"
        raise ValueError(f"{name}: a must be (..., M, K), got {of_a}; {hint}")
    if of_a and of_b and len(of_b) == 2 and of_a[1] != of_b[0]:
        weight = "a weight of a linear layer, (N, K), is passed as weight.t()"
        raise ValueError(f"{name}: b must be (K, N) with K = {of_a[1]}, got {of_b}; {weight}")
    host.check_activation(name, activation)
    tensors = {"a": (a, "M K"), "b": (b, "K N")} | ({} if bias is None else {"bias": (bias, "N")})
    host.check_tensors(name, "matmul_eager", **tensors)


def _call(name, a, b, bias, activation, allow_tf32, plan=None, launch=_launch):
    if isinstance(a, torch.Tensor) and a.dim() > 2 and not a.is_nested:
        y = _call(name, a.flatten(0, -2), b, bias, activation, allow_tf32, plan, launch)
        return y.unflatten(0, a.shape[:-1])
    a, b, bias = host.autocast(a, b, bias)
    goes_by_op = _check(name, a, b, bias, activation)
    if goes_by_op:
        save_z = activation in host.OF_Z and host.needs_autograd(a, b, bias)
        return matmul_op(a, b, bias, activation, allow_tf32, save_z)[0]
    how = activation, allow_tf32, plan, launch
    return host.call(name, "matmul_eager", _Matmul, _forward, (a, b, bias), *how)[0]


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
    return _call("matmul_triton", a, b, bias, activation, allow_tf32, plan)


def matmul_cuda(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a b by one CUDA kernel without tensor cores; the gradients come from the Triton kernels.

    Shapes, dtypes and errors as for matmul_triton. Needs nvcc and a C++ compiler at the first call.
    """
    return _call("matmul_cuda", a, b, None, "identity", False, launch=_launch_cuda)


@host.custom_op("fused_kernels::matmul", flops=lambda a, b, *_: 2 * math.prod(a) * b[1])
def matmul_op(
    a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None = None, activation: str = "identity",
    allow_tf32: bool = False, save_z: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """matmul for torch.compile and torch.export: one node of the graph, which nothing looks into.

    Returns y, and z = a b + bias for the backward pass of gelu, gelu_tanh and silu. Without save_z
    that is empty, and the backward pass multiplies once more.
    """
    _check("matmul_op", a, b, bias, activation)
    return host.none_as_empty(a, _forward(a, b, bias, activation, allow_tf32, save_z=save_z))


def _flops_backward(dy, a, b, saved, activation, allow_tf32, needs_grad):
    return 2 * math.prod(dy) * (needs_grad[0] and b[0]) + 2 * math.prod(dy) * (
        needs_grad[1] and a[1]
    )


@host.custom_op("fused_kernels::matmul_backward", flops=_flops_backward)
def _matmul_backward_op(
    dy: torch.Tensor, a: torch.Tensor | None, b: torch.Tensor | None, saved: torch.Tensor | None,
    activation: str, allow_tf32: bool, needs_grad: list[bool],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    grads = _backward(dy, a, b, saved, activation, allow_tf32, needs_grad)
    return host.none_as_empty(dy, grads)


@matmul_op.register_fake
def _(a, b, bias=None, activation="identity", allow_tf32=False, save_z=False):
    return host.none_as_empty(a, _empty(a, b, save_z))


@_matmul_backward_op.register_fake
def _(dy, a, b, saved, activation, allow_tf32, needs_grad):
    has_da, has_db, has_dbias = needs_grad
    return (
        dy.new_empty((dy.shape[0], b.shape[0]) if has_da else 0),
        dy.new_empty((a.shape[1], dy.shape[1]) if has_db else 0),
        dy.new_empty(dy.shape[1] if has_dbias else 0),
    )


def _setup_context(ctx, inputs, output):
    (a, b, bias, activation, allow_tf32, save_z), (y, z) = inputs, output
    ctx.mark_non_differentiable(z)
    _save(ctx, a, b, bias, y, z if save_z else None, activation, allow_tf32, all_inputs=True)


@host.once
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
        host.check_activation("FusedLinear", activation)
        self.activation = activation

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return matmul_triton(x, self.weight.t(), self.bias, self.activation)

    def extra_repr(self):
        return f"{super().extra_repr()}, activation={self.activation!r}"
