# SPDX-License-Identifier: MIT
# Copyright (c) 2026 The Fused Kernels authors; Fused Kernels 0.1.0, lib/ops/interaction.py
"""interaction: the dot products of all pairs of vectors beside the first of them, one pass over memory.

Shapes    dense: (B, D); embeddings: (B, T, D), any strides, D up to 128; F = T + 1 vectors, up to 64,
          dense first. y: (B, D + P), contiguous, P = F(F - 1)/2: dense, then the pairs (0, 1), (0, 2), ... as
          ordered by torch.triu_indices(F, F, 1). For DLRM's T = 26 and D = 16: 16 + 351 = 367.
Dtypes    float32, float16 and bfloat16 (summed in float32; float32 never as TF32, but as three products of
          it, which is as exact), also mixed, y then as their sum; and float64.
Traffic   Forward B(FD + D + P) elements, backward B(2FD + D + P). In PyTorch vectors and result are
          put together by copies, and all F² products are written and read again, of which half are wanted.
Method    Naumov et al., Deep Learning Recommendation Model for Personalization and Recommendation
          Systems, 2019.
Backward  With S(i, j) = S(j, i) the gradient of the pair (i, j), 0 for i = j: dV = S V, and dense's own part.
Copy it   this file. MIT licence.
"""

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch._functorch.pyfunctorch import retrieve_all_functorch_interpreters
from torch.autograd import forward_ad

# With TRITON_INTERPRET=1 kernels run on CPU tensors; otherwise they need a GPU.
_ON_CPU = triton.knobs.runtime.interpret
_INTERPRETED = tl.constexpr(_ON_CPU)
_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
_MOST_VECTORS, _LONGEST = 64, 128  # their products lie in the registers of one program


class Plan(NamedTuple):
    """How one pass is launched: at most so many programs, a strip of samples each; warps.

    ahead: forward, whether the next sample is read before one is computed. precision: of products in float32,
    "tf32x3" (three products of TF32 by tensor cores, from Ampere on; as exact) or "ieee".
    """

    programs: int
    num_warps: int
    ahead: bool = False
    precision: str = "ieee"


def interaction_eager(dense: torch.Tensor, embeddings: torch.Tensor) -> torch.Tensor:
    vectors = torch.cat([dense[:, None], embeddings], dim=1)  # (B, F, D)
    n_vectors = vectors.shape[1]
    first, second = torch.triu_indices(n_vectors, n_vectors, 1, device=dense.device)
    products = (vectors @ vectors.mT).flatten(1)  # (B, F²)
    return torch.cat([dense, products.index_select(1, first * n_vectors + second)], dim=1)


@triton.jit
def _vectors(
    dense_ptr, embeddings_ptr, sample, is_there, n_tables, dim,
    stride_db, stride_dd, stride_eb, stride_et, stride_ed,
    COMPUTE: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    # The vectors of one sample, (BLOCK_F, BLOCK_D), the dense one first; zeros where there are none.
    f, d = tl.arange(0, BLOCK_F)[:, None], tl.arange(0, BLOCK_D)[None, :]
    dense_ptrs = dense_ptr + sample * stride_db + d * stride_dd + f * 0
    dense = tl.load(dense_ptrs, mask=is_there & (f == 0) & (d < dim), other=0.0)
    # the table's number in int64: T·D elements of one sample may lie 2**31 apart
    table_offsets = (f - 1).to(tl.int64) * stride_et
    embedding_ptrs = embeddings_ptr + sample * stride_eb + table_offsets + d * stride_ed
    mask = is_there & (f > 0) & (f <= n_tables) & (d < dim)
    embeddings = tl.load(embedding_ptrs, mask=mask, other=0.0)
    return tl.where(f == 0, dense.to(COMPUTE), embeddings.to(COMPUTE))


@triton.jit
def _dot(a, b, total, PRECISION: tl.constexpr = None, COMPUTE: tl.constexpr = tl.float32):
    # total + a b. Triton's interpreter multiplies bfloat16 as the integers that hold its bits: there wider.
    if _INTERPRETED:
        a, b = a.to(COMPUTE), b.to(COMPUTE)
    return tl.dot(a, b, total, input_precision=PRECISION, out_dtype=COMPUTE)


@triton.jit(do_not_specialize=["n_samples", "samples_per_program"])
def _interaction_fwd_kernel(
    dense_ptr, embeddings_ptr, y_ptr, n_samples, n_tables, dim, n_pairs, samples_per_program,
    stride_db, stride_dd, stride_eb, stride_et, stride_ed,
    AHEAD: tl.constexpr, PRECISION: tl.constexpr, OPERAND: tl.constexpr, COMPUTE: tl.constexpr,
    BLOCK_F: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    # One program handles samples_per_program samples, one after the other, and reads AHEAD (0 or 1) samples
    # before it computes one.
    f, d = tl.arange(0, BLOCK_F)[:, None], tl.arange(0, BLOCK_D)[None, :]
    g = tl.arange(0, BLOCK_F)[None, :]
    # pairs of the vectors before f, then those of f up to g
    place = dim + f * (2 * n_tables + 1 - f) // 2 + g - f - 1
    is_pair = (f < g) & (g <= n_tables)
    # int64: sample * stride passes 2**31 from 8 GiB of float32 on
    first_sample = tl.program_id(0).to(tl.int64) * samples_per_program
    vectors = _vectors(
        dense_ptr, embeddings_ptr, first_sample, AHEAD == 1, n_tables, dim, stride_db, stride_dd,
        stride_eb, stride_et, stride_ed, COMPUTE, BLOCK_F, BLOCK_D,
    )  # fmt: skip
    for k in range(0, samples_per_program):
        sample = first_sample + k
        is_there = (k + AHEAD < samples_per_program) & (sample + AHEAD < n_samples)
        last_read = _vectors(
            dense_ptr, embeddings_ptr, sample + AHEAD, is_there, n_tables, dim, stride_db, stride_dd,
            stride_eb, stride_et, stride_ed, COMPUTE, BLOCK_F, BLOCK_D,
        )  # fmt: skip
        if AHEAD == 0:
            vectors = last_read
        if sample < n_samples:
            operand = vectors.to(OPERAND)
            products = _dot(operand, tl.trans(operand), None, PRECISION, COMPUTE)
            y_row = y_ptr + sample * (dim + n_pairs)
            tl.store(y_row + place, products, mask=is_pair)
            tl.store(y_row + d + f * 0, vectors, mask=(f == 0) & (d < dim))
        vectors = last_read


@triton.jit(do_not_specialize=["n_samples", "samples_per_program"])
def _interaction_bwd_kernel(
    dy_ptr, dense_ptr, embeddings_ptr, ddense_ptr, dembeddings_ptr,
    n_samples, n_tables, dim, samples_per_program,
    stride_yb, stride_yn, stride_db, stride_dd, stride_eb, stride_et, stride_ed,
    PRECISION: tl.constexpr, OPERAND: tl.constexpr, COMPUTE: tl.constexpr,
    BLOCK_F: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    # One program handles samples_per_program samples, one after the other.
    f, d = tl.arange(0, BLOCK_F)[:, None], tl.arange(0, BLOCK_D)[None, :]
    g = tl.arange(0, BLOCK_F)[None, :]
    low, high = tl.minimum(f, g), tl.maximum(f, g)
    # pairs of the vectors before `low`, then those of `low` up to `high`
    place = dim + low * (2 * n_tables + 1 - low) // 2 + high - low - 1
    is_pair = (f != g) & (high <= n_tables)
    for k in range(0, samples_per_program):
        sample = tl.program_id(0).to(tl.int64) * samples_per_program + k
        if sample < n_samples:
            dy_row = dy_ptr + sample * stride_yb
            slopes = tl.load(dy_row + place * stride_yn, mask=is_pair, other=0.0).to(COMPUTE)
            vectors = _vectors(
                dense_ptr, embeddings_ptr, sample, True, n_tables, dim, stride_db, stride_dd, stride_eb,
                stride_et, stride_ed, COMPUTE, BLOCK_F, BLOCK_D,
            )  # fmt: skip
            own = tl.load(dy_row + d * stride_yn + f * 0, mask=(f == 0) & (d < dim), other=0.0)
            grad = _dot(slopes.to(OPERAND), vectors.to(OPERAND), None, PRECISION, COMPUTE)
            grad += own.to(COMPUTE)
            if ddense_ptr is not None:
                ddense_ptrs = ddense_ptr + sample * dim + d + f * 0
                tl.store(ddense_ptrs, grad, mask=(f == 0) & (d < dim))
            if dembeddings_ptr is not None:
                offsets = (sample * n_tables + f - 1) * dim + d
                mask = (f > 0) & (f <= n_tables) & (d < dim)
                tl.store(dembeddings_ptr + offsets, grad, mask=mask)


# --- plan and launch -----------------------------------------------------------------------------------------


def _cdiv(a, b):
    return -(-a // b)  # triton.cdiv is the same, and costs 2 µs a call on the host


def _compute_dtype(dtype):
    return tl.float64 if dtype == torch.float64 else tl.float32


_OPERANDS = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


@functools.cache
def _generation(device):
    """The major number of the compute capability: 7 is Turing, 8 Ampere and Ada, 9 Hopper, 10 Blackwell."""
    return 9 if _ON_CPU else torch.cuda.get_device_capability(device)[0]


@functools.cache
def _blocks(n_tables, dim):
    """The sizes of the tile that holds the vectors of a sample; products by tensor cores take 16 at least."""
    return max(16, triton.next_power_of_2(n_tables + 1)), max(16, triton.next_power_of_2(dim))


@functools.cache
def _plan(block_f, block_d, itemsize):
    """Sixteen programs for each of an H200's 132 multiprocessors; one warp where it holds two samples."""
    small = block_f * block_d * itemsize <= 8192
    return Plan(132 * 16, 1 if small else 2, small, "tf32x3")


@functools.cache
def _plan_backward(block_f, block_d, itemsize):
    """Of few numbers, products one by one in float32 are faster than three by tensor cores each."""
    small = block_f * block_d <= 1024
    num_warps = 1 if itemsize == 2 else block_f // 16 if small else 4
    return Plan(132 * 16, num_warps, False, "ieee" if small else "tf32x3")


def _n_pairs(embeddings):
    return embeddings.shape[1] * (embeddings.shape[1] + 1) // 2


def _sizes(choose, plan, dense, embeddings, dtype):
    """The plan, the grid and the arguments that both kernels take alike."""
    n_samples, n_tables, dim = embeddings.shape
    block_f, block_d = _blocks(n_tables, dim)
    plan = plan or choose(block_f, block_d, dtype.itemsize)
    samples_per_program = _cdiv(n_samples, plan.programs)
    is_float32 = dtype == torch.float32
    options = {
        "PRECISION": plan.precision if is_float32 and _generation(dense.device) >= 8 else "ieee",
        # what is multiplied: 16 bits as they are, by tensor cores; of mixed inputs the wider
        "OPERAND": _OPERANDS.get(dtype, _compute_dtype(dtype)), "COMPUTE": _compute_dtype(dtype),
        "BLOCK_F": block_f, "BLOCK_D": block_d, "num_warps": plan.num_warps,
    }  # fmt: skip
    strides = *dense.stride(), *embeddings.stride()
    return plan, (_cdiv(n_samples, samples_per_program),), samples_per_program, strides, options


def _launch(plan, dense, embeddings, y):
    plan, grid, samples_per_program, strides, options = _sizes(
        _plan, plan, dense, embeddings, y.dtype
    )
    with torch.cuda.device_of(dense):  # else the launch goes to the current GPU, not to dense's
        _interaction_fwd_kernel[grid](
            dense, embeddings, y, *embeddings.shape, _n_pairs(embeddings), samples_per_program, *strides,
            AHEAD=int(plan.ahead), **options,
        )  # fmt: skip


def _launch_backward(plan, dy, dense, embeddings, ddense, dembeddings):
    sizes = _sizes(_plan_backward, plan, dense, embeddings, dy.dtype)
    _, grid, samples_per_program, strides, options = sizes
    with torch.cuda.device_of(dense):
        _interaction_bwd_kernel[grid](
            dy, dense, embeddings, ddense, dembeddings, *embeddings.shape, samples_per_program,
            *dy.stride(), *strides, **options,
        )  # fmt: skip


# --- forward and backward ------------------------------------------------------------------------------------


@functools.cache
def _dtype_of_sum(*dtypes):
    return functools.reduce(torch.promote_types, dtypes)


def _forward(dense, embeddings, plan=None):
    dtype = _dtype_of_sum(dense.dtype, embeddings.dtype)
    y = dense.new_empty((dense.shape[0], dense.shape[1] + _n_pairs(embeddings)), dtype=dtype)
    if y.numel() > 0:
        _launch(plan, dense, embeddings, y)
    return y


def _save(ctx, dense, embeddings, plan=None):
    ctx.plan = plan
    ctx.save_for_backward(dense, embeddings)


def _backward(dy, dense, embeddings, needs_grad=(True, True), plan=None):
    """The gradients of both, each None unless needed."""
    grads = [
        torch.empty_like(t, memory_format=torch.contiguous_format) if needed else None
        for t, needed in zip((dense, embeddings), needs_grad)
    ]
    if dense.numel() > 0:  # y.sum().backward() sends a dy of strides 0, which is read as it is
        _launch_backward(plan, dy, dense, embeddings, *grads)
    return tuple(grads)


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
    """A Function's backward that runs once: differentiating what it returns raises instead of being wrong.

    The error stands between the gradients and all that they depend on. That of PyTorch's once_differentiable
    stands beside: autograd.grad(..., inputs) never comes by it.
    """

    def guarded(ctx, *dys):
        if not torch.is_grad_enabled():  # the usual case: without create_graph=True
            return backward(ctx, *dys)
        with torch.no_grad():
            grads = backward(ctx, *dys)
        return _Undifferentiable.apply(backward, grads, *dys, *ctx.saved_tensors)

    return guarded


class _Interaction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, dense, embeddings, plan):
        _save(ctx, dense, embeddings, plan)
        return _forward(dense, embeddings, plan)

    @staticmethod
    @_once
    def backward(ctx, dy):
        return *_backward(dy, *ctx.saved_tensors, ctx.needs_input_grad[:2], ctx.plan), None


# --- the calls -----------------------------------------------------------------------------------------------


def _mix(*tensors):
    """Whether their dtypes may differ: under autocast x has 16 bits, and a bias that is a parameter 32."""
    return all([t.dtype in _DTYPES[:3] for t in tensors])


def _fits(dense, embeddings):
    """Whether the kernels take these arguments; if not, _refuse_arguments says why."""
    return (
        isinstance(dense, torch.Tensor)
        and isinstance(embeddings, torch.Tensor)
        and (dense.dtype == embeddings.dtype in _DTYPES or _mix(dense, embeddings))
        and dense.device == embeddings.device
        and dense.device.type == ("cpu" if _ON_CPU else "cuda")
        and dense.dim() == 2
        and embeddings.dim() == 3
        and embeddings.shape[::2] == dense.shape
        and embeddings.shape[1] < _MOST_VECTORS
        and dense.shape[1] <= _LONGEST
    )


def _refuse(name, eager, mixed=(), **wanted):
    """Raise the error that says what is wrong with a call of `name`, and what to do.

    wanted: label=(tensor, its sizes in letters), as x=(x, "... N"); the first one sets device and
    dtype, but for dtypes that may be mixed.
    """
    (first, (x, _)), sizes = next(iter(wanted.items())), {}
    for label, (t, letters) in wanted.items():
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


def _refuse_arguments(name, dense, embeddings):
    """What only this op can say, else what _refuse does."""
    shape = getattr(embeddings, "shape", ())
    if len(shape) == 3 and (shape[1] >= _MOST_VECTORS or shape[2] > _LONGEST):
        most = f"at most {_MOST_VECTORS - 1} tables of at most {_LONGEST} columns"
        raise ValueError(f"{name}: {most}, got {shape[1]} of {shape[2]}; use interaction_eager")
    sizes = {"dense": (dense, "B D"), "embeddings": (embeddings, "B T D")}
    _refuse(name, "interaction_eager", _DTYPES[:3], **sizes)


def _needs_grad(*tensors):
    """Whether autograd has to know; of forward-mode AD, too, whose tangents would be lost without a word."""
    backward = torch.is_grad_enabled() and any([t.requires_grad for t in tensors])
    return backward or forward_ad._current_level >= 0


def _explain(error, name, eager):
    """In place of an error that comes of torch.func or of forward-mode AD, one that says so and what to do."""
    if forward_ad._current_level >= 0 or retrieve_all_functorch_interpreters():
        reach = "torch.func (grad, jvp, vmap) and forward-mode AD do not reach into a kernel"
        raise RuntimeError(f"{name}: {reach}; under them use {eager}") from error


def _call(name, dense, embeddings, plan):
    if not _fits(dense, embeddings):
        _refuse_arguments(name, dense, embeddings)
    if torch.compiler.is_compiling():
        return interaction_op(dense, embeddings)
    try:
        if _needs_grad(dense, embeddings):
            return _Interaction.apply(dense, embeddings, plan)
        return _forward(dense, embeddings, plan)  # past autograd: less time on the host
    except RuntimeError as error:
        _explain(error, name, "interaction_eager")
        raise


def interaction_triton(
    dense: torch.Tensor, embeddings: torch.Tensor, *, plan: Plan | None = None
) -> torch.Tensor:
    """dense and the dot products of all pairs of vectors in one Triton kernel, with gradients for both inputs.

    dense: (B, D); embeddings: (B, T, D), any strides, on one device, T up to 63, D up to 128. Returns
    (B, D + (T + 1)T/2), contiguous, in the dtype of dense + embeddings.
    plan: a Plan in place of the one chosen, for tuning; torch.compile leaves it out.
    Works under torch.compile (as the op fused_kernels::interaction), autocast, checkpointing and CUDA graphs;
    not under torch.func, torch.vmap or forward-mode AD, nor twice differentiable: these raise.
    Raises TypeError for a wrong dtype, ValueError for a wrong shape or device.
    """
    return _call("interaction_triton", dense, embeddings, plan)


@torch.library.custom_op("fused_kernels::interaction", mutates_args=())
def interaction_op(dense: torch.Tensor, embeddings: torch.Tensor) -> torch.Tensor:
    """For torch.compile and torch.export: one node of the graph, which nothing looks into."""
    if not _fits(dense, embeddings):
        _refuse_arguments("interaction_op", dense, embeddings)
    return _forward(dense, embeddings)


@torch.library.custom_op("fused_kernels::interaction_backward", mutates_args=())
def _interaction_backward_op(
    dy: torch.Tensor, dense: torch.Tensor, embeddings: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return _backward(dy, dense, embeddings)


@interaction_op.register_fake
def _(dense, embeddings):
    width = dense.shape[1] + _n_pairs(embeddings)
    dtype = _dtype_of_sum(dense.dtype, embeddings.dtype)
    return dense.new_empty((dense.shape[0], width), dtype=dtype)


@_interaction_backward_op.register_fake
def _(dy, dense, embeddings):
    return tuple(t.new_empty(t.shape) for t in (dense, embeddings))


interaction_op.register_autograd(
    lambda ctx, dy: _interaction_backward_op(dy, *ctx.saved_tensors),
    setup_context=lambda ctx, inputs, output: _save(ctx, *inputs),
)
