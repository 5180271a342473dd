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
Copy it   this file. MIT licence.
"""

import functools
import itertools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch._functorch.pyfunctorch import retrieve_all_functorch_interpreters
from torch.autograd import forward_ad

# With TRITON_INTERPRET=1 kernels run on CPU tensors; otherwise they need a GPU.
_ON_CPU = triton.knobs.runtime.interpret
_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
_INTEGERS = (torch.int64, torch.int32)


class Plan(NamedTuple):
    """How one call is launched, both passes: lookups and columns of a program, and its warps."""

    block_l: int
    block_d: int
    num_warps: int


def _tables(num_rows, device):
    """(2, T) on the device, the same tensor in every call: each table's rows, and where it starts in weight.

    Making it copies to the GPU: the host waits for that, and a CUDA graph cannot capture it.
    """
    if torch.compiler.is_compiling() or retrieve_all_functorch_interpreters():
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


@functools.cache
def _plan(dim, itemsize):
    """Whole rows of up to 1024 elements; a thread has four loads under way, of 16 bytes if rows are such."""
    block_d = min(triton.next_power_of_2(dim), 1024)
    elements = 8192 // itemsize if dim * itemsize % 16 == 0 else 512
    return Plan(max(1, elements // block_d), block_d, 4)


def _grid_and_sizes(plan, ids, num_rows, dim):
    """The grid and the arguments that both kernels take alike."""
    options = {
        "TABLES": len(num_rows), "DIM": dim, "BLOCK_L": plan.block_l, "BLOCK_D": plan.block_d,
        "num_warps": plan.num_warps,
    }  # fmt: skip
    return (_cdiv(ids.numel(), plan.block_l), _cdiv(dim, plan.block_d)), options


def _launch(plan, ids, weight, num_rows, y):
    grid, options = _grid_and_sizes(plan, ids, num_rows, weight.shape[1])
    _run(
        _embedding_hash_fwd_kernel, grid, (ids, weight, _tables(num_rows, ids.device), y), ids.numel(),
        *ids.stride(), STRIDE_WR=weight.stride(0), STRIDE_WD=weight.stride(1), **options,
    )  # fmt: skip


def _launch_backward(plan, dy, ids, num_rows, dweight):
    grid, options = _grid_and_sizes(plan, ids, num_rows, dy.shape[2])
    strides = dict(zip(("STRIDE_YB", "STRIDE_YT", "STRIDE_YD"), dy.stride()))
    _run(
        _embedding_hash_bwd_kernel, grid, (dy, ids, _tables(num_rows, ids.device), dweight), ids.numel(),
        *ids.stride(), **strides, **options,
    )  # fmt: skip


# --- forward and backward ------------------------------------------------------------------------------------


def _forward(ids, weight, num_rows, plan=None):
    y = weight.new_empty((*ids.shape, weight.shape[1]))
    if y.numel() > 0:
        plan = plan or _plan(weight.shape[1], weight.element_size())
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
    wide = torch.float64 if dy.dtype == torch.float64 else torch.float32
    dweight = torch.zeros(size, dtype=wide, device=dy.device)
    # y.sum().backward() sends a dy of strides 0, which is read as it is
    _launch_backward(plan or _plan(size[1], dy.element_size()), dy, ids, tuple(num_rows), dweight)
    return dweight.to(dy.dtype)


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


class _EmbeddingHash(torch.autograd.Function):
    @staticmethod
    def forward(ctx, ids, weight, num_rows, sparse, deterministic, plan):
        _save(ctx, ids, num_rows, sparse, deterministic, plan)
        return _forward(ids, weight, num_rows, plan)

    @staticmethod
    @_once
    def backward(ctx, dy):
        return None, _backward(dy, *ctx.saved_tensors, *ctx.how), None, None, None, None


# --- the calls -----------------------------------------------------------------------------------------------


def _are_sizes(num_rows):
    """Whether it is a tuple or a list of a table's rows each, one or more."""
    is_sequence = isinstance(num_rows, (tuple, list)) and len(num_rows) > 0
    return is_sequence and all([isinstance(n, int) and n >= 1 for n in num_rows])


def _fits(ids, weight, num_rows):
    """Whether the kernels take these arguments; if not, _refuse_arguments says why."""
    return (
        isinstance(ids, torch.Tensor)
        and isinstance(weight, torch.Tensor)
        and ids.dtype in _INTEGERS
        and weight.dtype in _DTYPES
        and ids.device == weight.device
        and ids.device.type == ("cpu" if _ON_CPU else "cuda")
        and _are_sizes(num_rows)
        and ids.dim() == 2
        and ids.shape[1] == len(num_rows)
        and weight.dim() == 2
        and weight.shape[0] == sum(num_rows)
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


def _refuse_sizes(name, num_rows):
    want = "num_rows must be a tuple of ints, the rows of each table, 1 or more"
    raise ValueError(f"{name}: {want}, got {num_rows!r}")


def _refuse_arguments(name, ids, weight, num_rows):
    """What only this op can say, else what _refuse does of weight."""
    if not isinstance(ids, torch.Tensor):
        raise TypeError(f"{name}: ids must be a torch.Tensor, got {type(ids).__name__}")
    if ids.dtype not in _INTEGERS:
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
    _refuse(name, "embedding_hash_eager", weight=(weight, "R D"))


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


@torch.compiler.disable(reason="torch.compile has no sparse gradients; use sparse=False")
def _between_graphs(*arguments):
    return _EmbeddingHash.apply(*arguments)


def _call(name, ids, weight, num_rows, sparse, deterministic, plan):
    if not _fits(ids, weight, num_rows):
        _refuse_arguments(name, ids, weight, num_rows)
    if torch.compiler.is_compiling():
        if sparse and torch.is_grad_enabled() and weight.requires_grad:
            return _between_graphs(ids, weight, num_rows, sparse, deterministic, plan)
        return embedding_hash_op(ids, weight, num_rows, deterministic)
    try:
        if _needs_grad(weight):
            return _EmbeddingHash.apply(ids, weight, num_rows, sparse, deterministic, plan)
        return _forward(ids, weight, num_rows, plan)  # past autograd: less time on the host
    except RuntimeError as error:
        _explain(error, name, "embedding_hash_eager")
        raise


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
    return _call("embedding_hash_triton", ids, weight, num_rows, sparse, deterministic, plan)


@torch.library.custom_op("fused_kernels::embedding_hash", mutates_args=())
def embedding_hash_op(
    ids: torch.Tensor, weight: torch.Tensor, num_rows: Sequence[int], deterministic: bool = True
) -> torch.Tensor:
    """For torch.compile and torch.export: one node of the graph, which nothing looks into."""
    if not _fits(ids, weight, num_rows):
        _refuse_arguments("embedding_hash_op", ids, weight, num_rows)
    return _forward(ids, weight, num_rows)


@torch.library.custom_op("fused_kernels::embedding_hash_backward", mutates_args=())
def _embedding_hash_backward_op(
    dy: torch.Tensor, ids: torch.Tensor, num_rows: Sequence[int], deterministic: bool
) -> torch.Tensor:
    return _backward(dy, ids, num_rows, deterministic=deterministic)


@embedding_hash_op.register_fake
def _(ids, weight, num_rows, deterministic=True):
    return weight.new_empty((*ids.shape, weight.shape[1]))


@_embedding_hash_backward_op.register_fake
def _(dy, ids, num_rows, deterministic):
    return dy.new_empty((sum(num_rows), dy.shape[2]))


def _setup_context(ctx, inputs, output):
    ids, _, num_rows, deterministic = inputs
    _save(ctx, ids, num_rows, False, deterministic)


def _op_backward(ctx, dy):
    num_rows, _, deterministic, _ = ctx.how
    dweight = _embedding_hash_backward_op(dy, *ctx.saved_tensors, num_rows, deterministic)
    return None, dweight, None, None


embedding_hash_op.register_autograd(_op_backward, setup_context=_setup_context)


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
        for table in weight.split(self.num_rows):
            torch.nn.init.uniform_(table, -(len(table) ** -0.5), len(table) ** -0.5)

    @classmethod
    def from_tables(
        cls, tables: Iterable[torch.nn.Embedding], sparse: bool = False, deterministic: bool = True
    ) -> "EmbeddingHash":
        """With copies of the weights of these tables."""
        tables = [*tables]
        if any(t.padding_idx is not None or t.max_norm or t.scale_grad_by_freq for t in tables):
            rules = "padding_idx, max_norm and scale_grad_by_freq"
            raise ValueError(f"EmbeddingHash: it knows no {rules}; use such tables as they are")
        weight = torch.cat([table.weight.detach() for table in tables])
        num_rows = [len(table.weight) for table in tables]
        module = cls(num_rows, weight.shape[1], sparse, deterministic, device="meta")
        module.weight = torch.nn.Parameter(weight)
        return module

    def extra_repr(self) -> str:
        n_rows, dim = self.weight.shape
        return f"{len(self.num_rows)} tables, {n_rows} rows, embedding_dim={dim}"

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        how = {"sparse": self.sparse, "deterministic": self.deterministic}
        return embedding_hash_triton(ids, self.weight, self.num_rows, **how)
