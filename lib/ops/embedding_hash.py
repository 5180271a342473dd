# SPDX-License-Identifier: MIT
# Copyright (c) 2026 The Fused Kernels authors; Fused Kernels 0.1.0, lib/ops/embedding_hash.py
"""embedding_hash: tokens hashed to rows, and the rows of all embedding tables gathered, in one launch.

Shapes    ids: (B, T), any integers, |id| < 2**62; weight: (R, D), the T tables one below the other, R the sum
          of num_rows, T ints; both with any strides. y: (B, T, D), contiguous, as interaction reads it.
          y[b, t] = weight[start_t + (ids[b, t] + 1) mod num_rows[t]]; mod is never negative, as Python's.
Dtypes    ids: int64 and int32; weight: float32, float16, bfloat16 and float64.
Traffic   Forward BT ids of 8 bytes and 2BTD elements, rows read and y. PyTorch also writes and reads the rows'
          numbers, three times, and with a table of its own for each column launches one gather for each.
Method    The hashing trick (Weinberger et al., Feature Hashing for Large Scale Multitask Learning, 2009).
Backward  Of weight alone: dweight[r] is the sum of dy over the lookups of row r. Saves ids: the rows' numbers
          are two operations, and as long as ids are. dweight in one of three ways:
          deterministic=True   PyTorch's embedding_backward: lookups sorted by row, those of a row in
                               ascending order, added up some at a time, on a GPU in float32 for 16 bits. The
                               same bits in every run.
          deterministic=False  one launch of atomic additions to zeros, in float32 for 16 bits: no sort, but
                               the order, and with it the last bits, differs from run to run.
          sparse=True          no sum: a COO tensor of dy, an entry for each lookup, as nn.Embedding's.
Copy it   by `make copy OP=embedding_hash TO=folder`, or take _host.py and _device.py along. MIT licence.
"""

import functools
import itertools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

if __package__:  # shared by the ops: `device` in kernels, `host` around them
    from . import _host as host
else:  # the same, in a plain folder
    import _host as host


class Plan(NamedTuple):
    """How one call is launched, both passes: lookups and columns of a program, and its warps."""

    block_l: int
    block_d: int
    num_warps: int


def _tables(num_rows, device):
    """(2, T) on the device, the same tensor in every call: each table's rows, and where it starts in weight.

    Making it copies to the GPU: the host waits for that, and a CUDA graph cannot capture it.
    """
    if host.is_compiling() or host.active_transforms():
        return _tables_anew(num_rows, device)  # theirs, not for a call after them
    return _tables_once(num_rows, device)


def _tables_anew(num_rows, device):
    starts = itertools.accumulate(num_rows[:-1], initial=0)
    return torch.tensor([num_rows, [*starts]], device=device)


_tables_once = functools.cache(_tables_anew)


def _rows(ids, num_rows):
    """The row in weight of each lookup, (B, T)."""
    n_rows, starts = _tables(tuple(num_rows), ids.device)
    return starts + (ids.long() + 1) % n_rows  # torch's % floors


def embedding_hash_eager(
    ids: torch.Tensor, weight: torch.Tensor, num_rows: Sequence[int]
) -> torch.Tensor:
    return F.embedding(_rows(ids, num_rows), weight)


@triton.jit
def _lookups(
    ids_ptr, tables_ptr, n_lookups, stride_ib, stride_it,
    TABLES: tl.constexpr, BLOCK_L: tl.constexpr,
):  # fmt: skip
    # The program's lookups, numbered sample by sample: number, sample, table, row, and whether there is one.
    # int64: lookup * dim passes 2**31 from 8 GiB of float32 on
    first = tl.program_id(0).to(tl.int64) * BLOCK_L
    lookup = first + tl.arange(0, BLOCK_L)
    # 64-bit division is slow: one for the program's first lookup, and 32 bits from there
    place = (first % TABLES).to(tl.int32) + tl.arange(0, BLOCK_L)
    sample, table = first // TABLES + place // TABLES, (place % TABLES).to(tl.int64)
    is_there = lookup < n_lookups
    ids_ptrs = ids_ptr + sample * stride_ib + table * stride_it
    ids = tl.load(ids_ptrs, mask=is_there, other=0).to(tl.int64)
    n_rows, start = tl.load(tables_ptr + table), tl.load(tables_ptr + TABLES + table)
    row = (ids + 1) % n_rows  # Triton's % is C's: the sign is that of ids + 1
    row += tl.where(row < 0, n_rows, 0)
    return lookup, sample, table, start + row, is_there


# What stays the same in a model is a constexpr: Triton then knows how many elements side by side begin at a
# multiple of 16 bytes, and loads and stores them at once.
@triton.jit(do_not_specialize=["n_lookups"])
def _embedding_hash_fwd_kernel(
    ids_ptr, weight_ptr, tables_ptr, y_ptr, n_lookups, stride_ib, stride_it,
    STRIDE_WR: tl.constexpr, STRIDE_WD: tl.constexpr, TABLES: tl.constexpr, DIM: tl.constexpr,
    BLOCK_L: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    # One program copies BLOCK_D columns of BLOCK_L lookups.
    lookup, _, _, row, is_there = _lookups(
        ids_ptr, tables_ptr, n_lookups, stride_ib, stride_it, TABLES, BLOCK_L
    )
    cols = tl.program_id(1).to(tl.int64) * BLOCK_D + tl.arange(0, BLOCK_D)[None, :]
    mask = is_there[:, None] & (cols < DIM)
    weight = tl.load(weight_ptr + row[:, None] * STRIDE_WR + cols * STRIDE_WD, mask=mask)
    tl.store(y_ptr + lookup[:, None] * DIM + cols, weight, mask=mask)


@triton.jit(do_not_specialize=["n_lookups"])
def _embedding_hash_bwd_kernel(
    dy_ptr, ids_ptr, tables_ptr, dweight_ptr, n_lookups, stride_ib, stride_it,
    STRIDE_YB: tl.constexpr, STRIDE_YT: tl.constexpr, STRIDE_YD: tl.constexpr,
    TABLES: tl.constexpr, DIM: tl.constexpr,
    BLOCK_L: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    # One program adds BLOCK_D columns of BLOCK_L lookups to dweight, which begins as zeros.
    _, sample, table, row, is_there = _lookups(
        ids_ptr, tables_ptr, n_lookups, stride_ib, stride_it, TABLES, BLOCK_L
    )
    cols = tl.program_id(1).to(tl.int64) * BLOCK_D + tl.arange(0, BLOCK_D)[None, :]
    mask = is_there[:, None] & (cols < DIM)
    dy_ptrs = dy_ptr + (sample * STRIDE_YB + table * STRIDE_YT)[:, None] + cols * STRIDE_YD
    dy = tl.load(dy_ptrs, mask=mask, other=0.0).to(dweight_ptr.dtype.element_ty)
    tl.atomic_add(dweight_ptr + row[:, None] * DIM + cols, dy, mask=mask, sem="relaxed")


# --- plan (the dispatch heuristic) and launch ----------------------------------------------------------------


@functools.cache
def _plan(dim, itemsize):
    """Whole rows of up to 1024 elements; a thread has four loads under way, of 16 bytes if rows are such."""
    block_d = min(host.power_of_2(dim), 1024)
    elements = 8192 // itemsize if dim * itemsize % 16 == 0 else 512
    return Plan(max(1, elements // block_d), block_d, 4)


def _grid_and_sizes(plan, ids, num_rows, dim):
    """The grid and the arguments that both kernels take alike."""
    n_lookups = ids.numel()
    options = {
        "TABLES": len(num_rows), "DIM": dim, "BLOCK_L": plan.block_l, "BLOCK_D": plan.block_d,
        "num_warps": plan.num_warps,
    }  # fmt: skip
    grid = host.cdiv(n_lookups, plan.block_l), host.cdiv(dim, plan.block_d)
    return grid, (n_lookups, *ids.stride()), options


def _launch(plan, ids, weight, num_rows, y):
    dim, (stride_wr, stride_wd) = y.shape[2], weight.stride()
    plan = plan or _plan(dim, y.itemsize)
    grid, sizes, options = _grid_and_sizes(plan, ids, num_rows, dim)
    host.run(
        _embedding_hash_fwd_kernel, grid, (ids, weight, _tables(num_rows, ids.device), y), *sizes,
        STRIDE_WR=stride_wr, STRIDE_WD=stride_wd, **options,
    )  # fmt: skip


def _launch_backward(plan, dy, ids, num_rows, dweight):
    dim, strides = dy.shape[2], dict(zip(("STRIDE_YB", "STRIDE_YT", "STRIDE_YD"), dy.stride()))
    plan = plan or _plan(dim, dy.itemsize)
    grid, sizes, options = _grid_and_sizes(plan, ids, num_rows, dim)
    host.run(
        _embedding_hash_bwd_kernel, grid, (dy, ids, _tables(num_rows, ids.device), dweight), *sizes,
        **strides, **options,
    )  # fmt: skip


# --- forward and backward ------------------------------------------------------------------------------------


def _empty(ids, weight, *_):
    """y, before it is written."""
    return weight.new_empty((*ids.shape, weight.shape[1]))


def _forward(ids, weight, num_rows, sparse=False, deterministic=True, plan=None):
    """sparse, deterministic: for the backward pass."""
    y = _empty(ids, weight)
    if y.numel() > 0:
        _launch(plan, ids, weight, tuple(num_rows), y)
    return y


def _save(ctx, ids, num_rows, sparse=False, deterministic=True, plan=None):
    ctx.how = num_rows, sparse, deterministic, plan
    ctx.save_for_backward(ids)


def _backward(dy, ids, num_rows, sparse=False, deterministic=True, plan=None):
    """dweight, (R, D): it depends on which rows were read, and not on what they hold."""
    size = sum(num_rows), dy.shape[2]
    if dy.numel() == 0 and not sparse:
        return dy.new_zeros(size)
    if sparse or deterministic:  # as for one table, without padding or weights by frequency
        rows = _rows(ids, num_rows)
        return torch.ops.aten.embedding_backward(dy, rows, size[0], -1, False, sparse)
    dweight = dy.new_zeros(size, dtype=host.sum_dtype(dy.dtype))
    # y.sum().backward() sends a dy of strides 0, which is read as it is
    _launch_backward(plan, dy, ids, tuple(num_rows), dweight)
    return dweight.to(dy.dtype)


class _EmbeddingHash(torch.autograd.Function):
    @staticmethod
    def forward(ctx, ids, weight, num_rows, *how):
        _save(ctx, ids, num_rows, *how)
        return _forward(ids, weight, num_rows, *how)

    @staticmethod
    @host.once
    def backward(ctx, dy):
        return None, _backward(dy, *ctx.saved_tensors, *ctx.how), None, None, None, None


# --- the calls -----------------------------------------------------------------------------------------------


def _are_sizes(num_rows):
    """Whether it is a tuple or a list of a table's rows each, one or more."""
    is_sequence = isinstance(num_rows, (tuple, list)) and len(num_rows) > 0
    return is_sequence and all([isinstance(n, int) and n >= 1 for n in num_rows])


def _refuse_sizes(name, num_rows):
    want = "num_rows must be a tuple of ints, the rows of each table, 1 or more"
    raise ValueError(f"{name}: {want}, got {num_rows!r}")


@host.remembered
def _check(name, ids, weight, num_rows):
    if not isinstance(ids, torch.Tensor):
        raise TypeError(f"{name}: ids must be a torch.Tensor, got {type(ids).__name__}")
    if ids.dtype not in (torch.int64, torch.int32):
        wrong = f"ids must be an int64 or an int32 tensor, got {ids.dtype}"
        raise TypeError(f"{name}: {wrong}; use .long()")
    if not _are_sizes(num_rows):
        _refuse_sizes(name, num_rows)
    if ids.dim() != 2 or ids.shape[1] != len(num_rows):
        want = f"ids must be (B, T) with the T = {len(num_rows)} tables of num_rows"
        raise ValueError(f"{name}: {want}, got shape {tuple(ids.shape)}")
    if isinstance(weight, torch.Tensor) and ids.device != weight.device:
        where = f"ids is on {ids.device} and weight on {weight.device}"
        raise ValueError(f"{name}: {where}; move both to one device")
    n_rows, shape = sum(num_rows), tuple(getattr(weight, "shape", ()))
    if len(shape) == 2 and shape[0] != n_rows:
        want = f"weight must be (R, D) with R = {n_rows}, the sum of num_rows"
        raise ValueError(f"{name}: {want}, got shape {shape}")
    host.check_tensors(name, "embedding_hash_eager", weight=(weight, "R D"))


@torch.compiler.disable(reason="torch.compile has no sparse gradients; use sparse=False")
def _between_graphs(ids, weight, *how):
    return _EmbeddingHash.apply(host.in_memory(ids), host.in_memory(weight), *how)


def embedding_hash_triton(
    ids: torch.Tensor, weight: torch.Tensor, num_rows: Sequence[int], *, sparse: bool = False,
    deterministic: bool = True, plan: Plan | None = None,
) -> torch.Tensor:  # fmt: skip
    """The rows of all tables for the tokens of a batch in one Triton kernel, with a gradient for weight.

    ids: (B, T) int64 or int32; weight: (R, D), the tables one below the other, both with any strides, on one
    device; num_rows: a tuple of T ints, R their sum. Returns (B, T, D), contiguous, in the dtype of weight.
    sparse: a sparse gradient, for optimizers that take one (SGD, Adagrad, SparseAdam); with one, torch.compile
    breaks the graph here.
    deterministic: a dense gradient of the same bits in every run; False: by atomic additions.
    plan: a Plan in place of the one chosen, for tuning; torch.compile leaves it out.
    Works under torch.compile (as the op fused_kernels::embedding_hash), autocast, checkpointing and CUDA graphs
    (a call before the capture has to have had the same num_rows); not under torch.func, torch.vmap or
    forward-mode AD, nor twice differentiable: these raise.
    Raises TypeError for a wrong dtype, ValueError for a wrong shape, device or num_rows.
    """
    name = "embedding_hash_triton"
    if isinstance(num_rows, list) and _are_sizes(num_rows):
        num_rows = tuple(num_rows)  # a list is not remembered
    goes_by_op = _check(name, ids, weight, num_rows)
    how = num_rows, sparse, deterministic, plan
    if goes_by_op:
        if sparse and torch.is_grad_enabled() and weight.requires_grad:
            return _between_graphs(ids, weight, *how)
        return embedding_hash_op(ids, weight, num_rows, deterministic)
    return host.call(name, "embedding_hash_eager", _EmbeddingHash, _forward, (ids, weight), *how)


@host.custom_op("fused_kernels::embedding_hash")
def embedding_hash_op(
    ids: torch.Tensor, weight: torch.Tensor, num_rows: Sequence[int], deterministic: bool = True
) -> torch.Tensor:
    """For torch.compile and torch.export: one node of the graph, which nothing looks into."""
    _check("embedding_hash_op", ids, weight, tuple(num_rows))
    return _forward(ids, weight, num_rows)


@host.custom_op("fused_kernels::embedding_hash_backward")
def _embedding_hash_backward_op(
    dy: torch.Tensor, ids: torch.Tensor, num_rows: Sequence[int], deterministic: bool
) -> torch.Tensor:
    return _backward(dy, ids, num_rows, deterministic=deterministic)


def _op_backward(ctx, dy):
    num_rows, _, deterministic, _ = ctx.how
    dweight = _embedding_hash_backward_op(dy, *ctx.saved_tensors, num_rows, deterministic)
    return None, dweight, None, None


embedding_hash_op.register_fake(_empty)
_embedding_hash_backward_op.register_fake(
    lambda dy, ids, num_rows, deterministic: dy.new_empty((sum(num_rows), dy.shape[2]))
)
embedding_hash_op.register_autograd(
    _op_backward,
    setup_context=lambda ctx, inputs, output: _save(ctx, inputs[0], inputs[2], False, inputs[3]),
)


class EmbeddingHash(torch.nn.Module):
    """Tokens (B, T) to embeddings (B, T, D): a table for each column, all of them in one parameter.

    num_rows: the rows of each table. A token is hashed to the row (id + 1) mod the rows of its table.
    """

    def __init__(
        self, num_rows: Sequence[int], embedding_dim: int, sparse: bool = False, deterministic: bool = True,
        device: torch.device | str | None = None, dtype: torch.dtype | None = None,
    ):  # fmt: skip
        super().__init__()
        if not _are_sizes(num_rows):
            _refuse_sizes("EmbeddingHash", num_rows)
        self.num_rows, self.sparse, self.deterministic = tuple(num_rows), sparse, deterministic
        weight = torch.empty(sum(num_rows), embedding_dim, device=device, dtype=dtype)
        self.weight = torch.nn.Parameter(weight)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for table in self.weight.detach().split(self.num_rows):
            torch.nn.init.uniform_(table, -(len(table) ** -0.5), len(table) ** -0.5)

    @classmethod
    def from_tables(
        cls, tables: Iterable[torch.nn.Embedding], sparse: bool = False, deterministic: bool = True
    ) -> "EmbeddingHash":
        """With copies of the weights of these tables, frozen if they are."""
        tables = [*tables]
        if any(t.padding_idx is not None or t.max_norm or t.scale_grad_by_freq for t in tables):
            rules = "padding_idx, max_norm and scale_grad_by_freq"
            raise ValueError(f"EmbeddingHash: it knows no {rules}; use such tables as they are")
        if len({table.embedding_dim for table in tables}) != 1:
            dims = [table.embedding_dim for table in tables]
            raise ValueError(f"EmbeddingHash: all tables must have one embedding_dim, got {dims}")
        trained = {table.weight.requires_grad for table in tables}
        if len(trained) == 2:
            use = "freeze all of them or none, or make an EmbeddingHash of each kind"
            raise ValueError(f"EmbeddingHash: some tables are frozen and others trained; {use}")
        weight = torch.cat([table.weight.detach() for table in tables])
        num_rows = [len(table.weight) for table in tables]
        module = cls(num_rows, weight.shape[1], sparse, deterministic, device="meta")
        module.weight = torch.nn.Parameter(weight, requires_grad=trained.pop())
        return module

    def extra_repr(self) -> str:
        n_rows, dim = self.weight.shape
        return f"{len(self.num_rows)} tables, {n_rows} rows, embedding_dim={dim}"

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        how = {"sparse": self.sparse, "deterministic": self.deterministic}
        return embedding_hash_triton(ids, self.weight, self.num_rows, **how)
