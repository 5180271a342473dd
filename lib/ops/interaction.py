# SPDX-License-Identifier: MIT
# Copyright (c) 2026 The Fused Kernels authors; Fused Kernels 0.1.0, lib/ops/interaction.py
"""interaction: the dot products of all pairs of vectors beside the first of them, one pass over memory.

Shapes    dense: (B, D); embeddings: (B, T, D), any strides, D up to 128; F = T + 1 vectors, up to 64,
          dense first. y: (B, D + P), contiguous, P = F(F - 1)/2: dense, then the pairs (0, 1), (0, 2), ... as
          ordered by torch.triu_indices(F, F, 1). For DLRM's T = 26 and D = 16: 16 + 351 = 367.
Dtypes    float32, float16 and bfloat16 (summed in float32; float32 goes by 3xTF32, three TF32 products that are
          as exact), also mixed, y then as their sum; and float64.
Traffic   Forward B(FD + D + P) elements, backward B(2FD + D + P). PyTorch copies besides, and writes all F².
Method    Naumov et al., Deep Learning Recommendation Model, arXiv:1906.00091, 2019.
Backward  With S(i, j) = S(j, i) the gradient of the pair (i, j), 0 for i = j: dV = S V, and dense's own part.
Copy it   by `make copy OP=interaction TO=folder`, or take _host.py and _device.py along. MIT licence.
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


class Plan(NamedTuple):
    """How one pass is launched: at most so many programs per SM, each with so many samples at a time.

    ahead: whether the next samples are read before these are worked on. precision: of products in float32,
    "tf32x3" (3xTF32, by tensor cores from Ampere on; as exact) or "ieee".
    """

    programs: int
    samples: int
    num_warps: int
    ahead: bool = True
    precision: str = "tf32x3"


def interaction_eager(dense: torch.Tensor, embeddings: torch.Tensor) -> torch.Tensor:
    vectors = torch.cat([dense[:, None], embeddings], dim=1)  # (B, F, D)
    n_vectors = vectors.shape[1]
    first, second = torch.triu_indices(n_vectors, n_vectors, 1, device=dense.device)
    products = (vectors @ vectors.mT).flatten(1)  # (B, F²)
    return torch.cat([dense, products.index_select(1, first * n_vectors + second)], dim=1)


# Of a pointer that was selected from two, Triton knows the alignment before 3.8 alone; then one load will do.
_SELECTS = tl.constexpr(tuple(map(int, triton.__version__.split(".")[:2])) < (3, 8))

# Each thread loads what tensor cores take from it, so that reshape and permute move no data. Where the two
# layouts differ, Triton moves data through shared memory: slower, and equally correct.


@triton.jit
def _places(SAMPLES: tl.constexpr, BLOCK_F: tl.constexpr):
    # Sample, vector and column of a tile's elements: a warp reads 16 columns of 8 vectors of a sample at once.
    x, d = tl.arange(0, SAMPLES * BLOCK_F)[:, None], tl.max_contiguous(tl.arange(0, 16), 4)[None, :]
    return x // 8 % SAMPLES, x // (8 * SAMPLES) * 8 + x % 8, d


@triton.jit
def _vectors(
    inputs, first, left, sample, f, d, TABLES: tl.constexpr, DIM: tl.constexpr, OPERAND: tl.constexpr
):  # fmt: skip
    # Vectors f of samples first + sample, of which `left` are there; zeros where there are none.
    dense_ptr, embeddings_ptr, stride_db, stride_dd, stride_eb, stride_et, stride_ed = inputs
    # int64: table * stride may pass 2**31, as sample * stride does
    sample64, table, d64 = sample.to(tl.int64), f.to(tl.int64) - 1, d.to(tl.int64)
    dense_ptrs = dense_ptr + first * stride_db + (sample64 * stride_db + d64 * stride_dd + f * 0)
    offsets = sample64 * stride_eb + table * stride_et + d64 * stride_ed
    embedding_ptrs = embeddings_ptr + first * stride_eb + offsets
    mask = (sample < left) & (f <= TABLES) & (d < DIM)
    if _SELECTS and dense_ptr.dtype == embeddings_ptr.dtype:
        ptrs = tl.where(f == 0, dense_ptrs, embedding_ptrs)
        vectors = tl.load(ptrs, mask=mask, other=0.0).to(OPERAND)
    else:
        dense = tl.load(dense_ptrs, mask=mask & (f == 0), other=0.0).to(OPERAND)
        embeddings = tl.load(embedding_ptrs, mask=mask & (f > 0), other=0.0).to(OPERAND)
        vectors = tl.where(f == 0, dense, embeddings)
    return vectors


@triton.jit
def _left(first, n_samples, SAMPLES: tl.constexpr):
    # How many of the SAMPLES samples from `first` on are there.
    return tl.maximum(tl.minimum(n_samples - first, SAMPLES), 0).to(tl.int32)


# The rows of `left` samples, up to SAMPLES, are one piece of memory. The full piece is a branch of its own: the
# compiler moves 8 or 16 bytes at a time only where it knows how many samples there are.


@triton.jit
def _load_samples(ptr, place, left, ROW: tl.constexpr, SAMPLES: tl.constexpr):
    if left == SAMPLES:
        rows = tl.load(ptr + place, mask=place < SAMPLES * ROW, other=0.0)
    else:
        rows = tl.load(ptr + place, mask=place < left * ROW, other=0.0)
    return rows


@triton.jit
def _store_samples(ptr, place, rows, left, ROW: tl.constexpr, SAMPLES: tl.constexpr):
    if left == SAMPLES:
        tl.store(ptr + place, rows, mask=place < SAMPLES * ROW)
    else:
        tl.store(ptr + place, rows, mask=place < left * ROW)


@triton.jit(do_not_specialize=["n_samples", "trips"])
def _interaction_fwd_kernel(
    dense_ptr, embeddings_ptr, sources_ptr, y_ptr, n_samples, trips,
    stride_db, stride_dd, stride_eb, stride_et, stride_ed,
    TABLES: tl.constexpr, DIM: tl.constexpr, AHEAD: tl.constexpr,
    PRECISION: tl.constexpr, OPERAND: tl.constexpr, COMPUTE: tl.constexpr, PACK: tl.constexpr,
    SAMPLES: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_Y: tl.constexpr,
):  # fmt: skip
    # One program handles SAMPLES samples at a time, a warp each, and reads the next (AHEAD) before it works on
    # these. Their rows of y are one piece of memory: gathered from products in shared memory, stored at once.
    ROW: tl.constexpr = DIM + TABLES * (TABLES + 1) // 2
    place = tl.max_contiguous(tl.arange(0, BLOCK_Y), 4)
    source = tl.load(sources_ptr + place)
    sample, f, d = _places(SAMPLES, BLOCK_F)
    own_sample = tl.arange(0, SAMPLES).to(tl.int64)[:, None]
    own_d = tl.arange(0, BLOCK_D).to(tl.int64)[None, :]
    inputs = (dense_ptr, embeddings_ptr, stride_db, stride_dd, stride_eb, stride_et, stride_ed)
    stride = tl.num_programs(0) * SAMPLES
    # int64: sample * stride passes 2**31 from 8 GiB of float32 on
    first = tl.program_id(0).to(tl.int64) * SAMPLES
    if AHEAD:
        left = _left(first, n_samples, SAMPLES)
        ahead = _vectors(inputs, first, left, sample, f, d, TABLES, DIM, OPERAND)
    for _ in range(0, trips):
        left = _left(first, n_samples, SAMPLES)
        if AHEAD:
            vectors = ahead
            following = first + stride
            next_left = _left(following, n_samples, SAMPLES)
            ahead = _vectors(inputs, following, next_left, sample, f, d, TABLES, DIM, OPERAND)
        products = tl.zeros((SAMPLES, BLOCK_F, BLOCK_F), dtype=COMPUTE)
        for start in tl.static_range(0, DIM, 16):
            if start > 0 or not AHEAD:
                vectors = _vectors(inputs, first, left, sample, f, start + d, TABLES, DIM, OPERAND)
            # 16 columns in the order in which tensor cores add them up, PACK in a register
            rows = tl.reshape(vectors, (BLOCK_F // 8, SAMPLES, 8, 4, 4 // PACK, PACK))
            rows = tl.reshape(tl.permute(rows, (1, 0, 2, 4, 3, 5)), (SAMPLES, BLOCK_F, 16))
            products = device.dot(rows, tl.permute(rows, (0, 2, 1)), products, PRECISION, COMPUTE)
        # in squares of 8 by 8, so that threads that store at once use different banks of shared memory
        products = products.to(y_ptr.dtype.element_ty)
        squares = tl.reshape(products, (SAMPLES, BLOCK_F // 8, 8, BLOCK_F // 8, 8))
        squares = tl.permute(squares, (0, 1, 3, 2, 4))
        row = tl.gather(tl.reshape(squares, (SAMPLES * BLOCK_F * BLOCK_F,)), source, 0)
        _store_samples(y_ptr + first * ROW, place, row, left, ROW, SAMPLES)
        # dense, over what was just stored in its place: a store of y with gaps would go element by element
        own_ptrs = dense_ptr + first * stride_db + (own_sample * stride_db + own_d * stride_dd)
        is_own = (own_sample < left) & (own_d < DIM)
        own = tl.load(own_ptrs, mask=is_own)
        tl.debug_barrier()  # else it may be stored before
        tl.store(y_ptr + first * ROW + (own_sample * ROW + own_d), own, mask=is_own)
        first += stride


@triton.jit(do_not_specialize=["n_samples", "trips"])
def _interaction_bwd_kernel(
    dy_ptr, dense_ptr, embeddings_ptr, sources_ptr, ddense_ptr, dembeddings_ptr, n_samples, trips,
    stride_db, stride_dd, stride_eb, stride_et, stride_ed,
    TABLES: tl.constexpr, DIM: tl.constexpr, AHEAD: tl.constexpr,
    PRECISION: tl.constexpr, OPERAND: tl.constexpr, COMPUTE: tl.constexpr, PACK: tl.constexpr,
    SAMPLES: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_Y: tl.constexpr,
):  # fmt: skip
    # One program handles SAMPLES samples at a time, a warp each, and reads the next (AHEAD) before it works on
    # these. Their rows of dy are one piece of memory: read at once, and gathered from shared memory as S.
    ROW: tl.constexpr = DIM + TABLES * (TABLES + 1) // 2
    place = tl.arange(0, BLOCK_Y)
    # the sign is never set: Triton does not know that, but LLVM, after it, does
    source = tl.load(sources_ptr + tl.arange(0, SAMPLES * BLOCK_F * BLOCK_F)) & 0x7FFFFFFF
    # vectors as the right factor: a warp reads 16 columns of 4 vectors of one sample at a time
    x, y = tl.arange(0, 2 * SAMPLES * BLOCK_F)[:, None], tl.arange(0, 8)[None, :]
    sample, vector, d = x // 8 % SAMPLES, x // (8 * SAMPLES) * 4 + y // 2, x % 8 * 2 + y % 2
    out_sample, out_vector, out_d = _places(SAMPLES, BLOCK_F)
    s, f = tl.arange(0, SAMPLES)[:, None, None], tl.arange(0, BLOCK_F)[None, :, None]
    column = tl.arange(0, 16)[None, None, :]
    own_d = column % 8 * 2 + column // 8  # in the order of `columns` below
    inputs = (dense_ptr, embeddings_ptr, stride_db, stride_dd, stride_eb, stride_et, stride_ed)
    stride = tl.num_programs(0) * SAMPLES
    # int64: as forward
    first = tl.program_id(0).to(tl.int64) * SAMPLES
    if AHEAD:
        left = _left(first, n_samples, SAMPLES)
        dy_ahead = _load_samples(dy_ptr + first * ROW, place, left, ROW, SAMPLES)
        ahead = _vectors(inputs, first, left, sample, vector, d, TABLES, DIM, OPERAND)
    for _ in range(0, trips):
        left = _left(first, n_samples, SAMPLES)
        if AHEAD:
            dy, vectors = dy_ahead, ahead
            following = first + stride
            next_left = _left(following, n_samples, SAMPLES)
            dy_ahead = _load_samples(dy_ptr + following * ROW, place, next_left, ROW, SAMPLES)
            ahead = _vectors(inputs, following, next_left, sample, vector, d, TABLES, DIM, OPERAND)
        else:
            dy = _load_samples(dy_ptr + first * ROW, place, left, ROW, SAMPLES)
        # always true; but with it Triton gathers into the layout of `source`, the one that tensor cores take
        slopes = tl.where(source >= 0, tl.gather(dy, source, 0), 0.0).to(OPERAND)
        slopes = tl.reshape(slopes, (BLOCK_F // 8, BLOCK_F // 16, SAMPLES, 8, 4, 4 // PACK, PACK))
        slopes = tl.reshape(tl.permute(slopes, (2, 0, 3, 1, 5, 4, 6)), (SAMPLES, BLOCK_F, BLOCK_F))
        for start in tl.static_range(0, DIM, 16):
            if start > 0 or not AHEAD:
                vectors = _vectors(
                    inputs, first, left, sample, vector, start + d, TABLES, DIM, OPERAND
                )
            columns = tl.reshape(vectors, (BLOCK_F // 4 // PACK, PACK, SAMPLES, 8, 4, 2))
            columns = tl.reshape(tl.permute(columns, (2, 0, 4, 1, 5, 3)), (SAMPLES, BLOCK_F, 16))
            grad = device.dot(slopes, columns, None, PRECISION, COMPUTE)
            own_ptrs = dy_ptr + first * ROW + (s * ROW + start + own_d)
            own = tl.load(own_ptrs, mask=(s < left) & (start + own_d < DIM), other=0.0)
            grad += tl.where(f == 0, own.to(COMPUTE), 0.0)
            grad = tl.reshape(grad, (SAMPLES, BLOCK_F // 8, 8, 2, 4, 2))
            grad = tl.reshape(tl.permute(grad, (1, 0, 2, 4, 5, 3)), (SAMPLES * BLOCK_F, 16))
            out = start + out_d
            is_out = (out_sample < left) & (out_vector <= TABLES) & (out < DIM)
            if ddense_ptr is not None:
                offsets = out_sample * DIM + out + out_vector * 0
                tl.store(ddense_ptr + first * DIM + offsets, grad, mask=is_out & (out_vector == 0))
            if dembeddings_ptr is not None:
                offsets = (out_sample * TABLES + out_vector - 1) * DIM + out
                dembeddings_ptrs = dembeddings_ptr + first * (TABLES * DIM) + offsets
                tl.store(dembeddings_ptrs, grad, mask=is_out & (out_vector > 0))
        first += stride


# --- plan (the dispatch heuristic) and launch ----------------------------------------------------------------

# what is multiplied: 16 bits as they are, by tensor cores; of mixed inputs the wider
_OPERANDS = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


@functools.cache
def _plan(block_f, itemsize):
    """As many programs as an SM of an H200 has registers for, at DLRM's 27 vectors of 16."""
    return Plan(7 if itemsize == 2 else 4, _samples(block_f, itemsize), 4)


@functools.cache
def _plan_backward(block_f, itemsize):
    return Plan(5 if itemsize == 2 else 2, _samples(block_f, itemsize), 4)


def _samples(block_f, itemsize):
    """Four: their part of y begins at a multiple of 8 bytes. Fewer if their products take over 32 KiB."""
    return min(4, 32768 // (block_f * block_f * itemsize))


@functools.cache
def _sources(n_tables, dim, samples, block_f, block_y, gpu):
    """Where each number of y is in the products, as the forward kernel lays them out; (block_y,).

    The same tensor in every call: making it copies to the GPU, which a CUDA graph cannot capture.
    """
    low, high = torch.triu_indices(n_tables + 1, n_tables + 1, 1)
    square = low // 8 * (block_f // 8) + high // 8
    row = F.pad(square * 64 + low % 8 * 8 + high % 8, (dim, 0))
    rows = (row + torch.arange(samples)[:, None] * block_f**2).flatten()
    return F.pad(rows, (0, block_y - len(rows))).int().to(gpu)


@functools.cache
def _sources_backward(n_tables, dim, samples, block_f, block_y, pack, gpu):
    """Where each slope, as the backward kernel lays them out, is in dy; zeros lie in its last place."""
    low, high = torch.triu_indices(n_tables + 1, n_tables + 1, 1)
    place = torch.full((block_f, block_f), -1)
    place[low, high] = place[high, low] = dim + torch.arange(len(low))
    k = torch.arange(block_f)
    place = place[:, (k // (4 * pack) * pack + k % pack) * 4 + k // pack % 4]
    rows = place + torch.arange(samples)[:, None, None] * (dim + len(low))
    rows = torch.where(place >= 0, rows, block_y - 1)
    rows = rows.view(samples, block_f // 8, 8, block_f // 16, 4 // pack, 4, pack)
    return rows.permute(1, 3, 0, 2, 5, 4, 6).flatten().int().to(gpu)


def _n_pairs(embeddings):
    return embeddings.shape[1] * (embeddings.shape[1] + 1) // 2


def _sizes(choose, plan, dense, embeddings, dtype):
    """The grid; the arguments and options that both kernels take alike; and what their sources depend on."""
    n_samples, n_tables, dim = embeddings.shape
    block_f = max(16, host.power_of_2(n_tables + 1))  # tensor cores take 16 at least
    plan = plan or choose(block_f, dtype.itemsize)
    n_programs = plan.programs * host.n_multiprocessors(dense.device)
    trips = host.cdiv(n_samples, plan.samples * n_programs)
    compute = host.compute_dtype(dtype)
    by_tf32 = dtype == torch.float32 and host.generation(dense.device) >= 8
    options = {
        "TABLES": n_tables, "DIM": dim, "AHEAD": plan.ahead,
        "PRECISION": plan.precision if by_tf32 else "ieee",
        "OPERAND": _OPERANDS.get(dtype, compute), "COMPUTE": compute,
        "PACK": 2 if dtype.itemsize == 2 else 1, "SAMPLES": plan.samples, "BLOCK_F": block_f,
        "BLOCK_Y": host.power_of_2(plan.samples * (dim + _n_pairs(embeddings)) + 1),
        "num_warps": plan.num_warps, "num_stages": 1,
    }  # fmt: skip
    sizes = n_samples, trips, *dense.stride(), *embeddings.stride()
    where = n_tables, dim, plan.samples, block_f, options["BLOCK_Y"]
    return (host.cdiv(n_samples, plan.samples * trips),), sizes, where, options


def _launch(plan, dense, embeddings, y):
    grid, sizes, where, options = _sizes(_plan, plan, dense, embeddings, y.dtype)
    options["BLOCK_D"] = host.power_of_2(dense.shape[1])
    sources = _sources(*where, dense.device)
    host.run(_interaction_fwd_kernel, grid, (dense, embeddings, sources, y), *sizes, **options)


def _launch_backward(plan, dy, dense, embeddings, ddense, dembeddings):
    grid, sizes, where, options = _sizes(_plan_backward, plan, dense, embeddings, dy.dtype)
    sources = _sources_backward(*where, options["PACK"], dense.device)
    tensors = dy, dense, embeddings, sources, ddense, dembeddings
    host.run(_interaction_bwd_kernel, grid, tensors, *sizes, **options)


# --- forward and backward ------------------------------------------------------------------------------------


def _empty(dense, embeddings):
    """y, before it is written."""
    dtype = host.dtype_of_sum(dense.dtype, embeddings.dtype)
    width = dense.shape[1] + _n_pairs(embeddings)
    return dense.new_empty((dense.shape[0], width), dtype=dtype)


def _forward(dense, embeddings, plan=None):
    y = _empty(dense, embeddings)
    if y.numel() > 0:
        _launch(plan, dense, embeddings, y)
    return y


def _empty_like(t):
    return torch.empty_like(t, memory_format=torch.contiguous_format)


def _save(ctx, dense, embeddings, plan=None):
    ctx.plan = plan
    ctx.save_for_backward(dense, embeddings)


def _backward(dy, dense, embeddings, needs_grad=(True, True), plan=None):
    """The gradients of both, each None unless needed."""
    grads = [
        _empty_like(t) if needed else None for t, needed in zip((dense, embeddings), needs_grad)
    ]
    if dense.numel() > 0:  # y.sum().backward() sends a dy of strides 0
        _launch_backward(plan, dy.contiguous(), dense, embeddings, *grads)
    return tuple(grads)


class _Interaction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, dense, embeddings, plan):
        _save(ctx, dense, embeddings, plan)
        return _forward(dense, embeddings, plan)

    @staticmethod
    @host.once
    def backward(ctx, dy):
        return *_backward(dy, *ctx.saved_tensors, ctx.needs_input_grad[:2], ctx.plan), None


# --- the calls -----------------------------------------------------------------------------------------------

_MOST_VECTORS, _LONGEST = 64, 128  # their products lie in the registers of one program


@host.remembered
def _check(name, dense, embeddings):
    shape = getattr(embeddings, "shape", ())
    if len(shape) == 3 and (shape[1] >= _MOST_VECTORS or shape[2] > _LONGEST):
        most = f"at most {_MOST_VECTORS - 1} tables of at most {_LONGEST} columns"
        raise ValueError(f"{name}: {most}, got {shape[1]} of {shape[2]}; use interaction_eager")
    sizes = {"dense": (dense, "B D"), "embeddings": (embeddings, "B T D")}
    host.check_tensors(name, "interaction_eager", host.MIXED, **sizes)


def interaction_triton(
    dense: torch.Tensor, embeddings: torch.Tensor, *, plan: Plan | None = None
) -> torch.Tensor:
    """dense and the dot products of all pairs of vectors in one Triton kernel, with gradients for both inputs.

    dense: (B, D); embeddings: (B, T, D), any strides, on one device, T up to 63, D up to 128. Returns
    (B, D + (T + 1)T/2), contiguous, in the dtype of dense + embeddings: dense, then the pairs as in TorchRec,
    (0, 1), (0, 2), ..., (1, 2), ...; dlrm_columns tells the order of DLRM's own code.
    plan: a Plan in place of the one chosen, for tuning; torch.compile leaves it out.
    Works under torch.compile (as the op fused_kernels::interaction), autocast, checkpointing and CUDA graphs;
    not under torch.func, torch.vmap or forward-mode AD, nor twice differentiable: these raise.
    Raises TypeError for a wrong dtype, ValueError for a wrong shape or device.
    """
    tensors, name = (dense, embeddings), "interaction_triton"
    goes_by_op = _check(name, *tensors)
    if goes_by_op:
        return interaction_op(*tensors)
    return host.call(name, "interaction_eager", _Interaction, _forward, tensors, plan)


def _flops(dense, embeddings, n_products=1):
    return 2 * n_products * math.prod(dense) * (embeddings[1] + 1) ** 2


def dlrm_columns(
    n_tables: int, embedding_dim: int, device: torch.device | str | None = None
) -> torch.Tensor:
    """The columns of a result in the order of DLRM's own code: result[:, columns] is what its layers take.

    Pairs stand here as in TorchRec, (0, 1), (0, 2), ..., (1, 2), ...; there as (1, 0), (2, 0), (2, 1), ....
    A layer trained there takes results as they are after layer.weight[:, columns] = layer.weight.clone().
    """
    second, first = torch.tril_indices(n_tables + 1, n_tables + 1, -1, device=device)
    pairs = first * (2 * n_tables + 1 - first) // 2 + second - first - 1
    return torch.cat([torch.arange(embedding_dim, device=device), embedding_dim + pairs])


@host.custom_op("fused_kernels::interaction", flops=_flops)
def interaction_op(dense: torch.Tensor, embeddings: torch.Tensor) -> torch.Tensor:
    """For torch.compile and torch.export: one node of the graph, which nothing looks into."""
    _check("interaction_op", dense, embeddings)
    return _forward(dense, embeddings)


@host.custom_op("fused_kernels::interaction_backward", flops=lambda dy, *inputs: _flops(*inputs, 2))
def _interaction_backward_op(
    dy: torch.Tensor, dense: torch.Tensor, embeddings: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return _backward(dy, dense, embeddings)


interaction_op.register_fake(_empty)
_interaction_backward_op.register_fake(lambda dy, *inputs: tuple(map(_empty_like, inputs)))
interaction_op.register_autograd(
    lambda ctx, dy: _interaction_backward_op(dy, *ctx.saved_tensors),
    setup_context=lambda ctx, inputs, output: _save(ctx, *inputs),
)
