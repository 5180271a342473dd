# SPDX-License-Identifier: MIT
# Copyright (c) 2026 The Fused Kernels authors; Fused Kernels 0.1.0, lib/ops/add_relu.py
"""add_relu: y = relu(x + bias), one pass over memory instead of two.

Shapes    x, y: (..., N), x with any strides, y contiguous; bias: (N,).
Dtypes    float32, float16 and bfloat16 (computed in float32), also mixed, y then as x + bias; and float64.
Traffic   M rows of N elements of s bytes. Forward: eager moves 4MNs, fused 2MNs.
          Forward and backward: eager 4MNs + 4MNs, fused 2MNs + 3MNs.
Backward  dx = dy where y > 0 or y is NaN, else 0; dbias = dx summed over rows. Saves y only.
Copy it   this file for Triton; add_relu.cu beside it for CUDA. MIT licence.
"""

import contextlib
import fcntl
import functools
import math
from pathlib import Path
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch._functorch.pyfunctorch import retrieve_all_functorch_interpreters
from torch.autograd import forward_ad

# With TRITON_INTERPRET=1 kernels run on CPU tensors; otherwise they need a GPU.
_ON_CPU = triton.knobs.runtime.interpret
_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


class Plan(NamedTuple):
    """How one call is launched. backward: (BLOCK_M, BLOCK_N, strips), or None to have it chosen."""

    block_m: int
    block_n: int
    backward: tuple[int, int, int] | None = None


def add_relu_eager(x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return torch.relu(x + bias)


@triton.jit
def _fold_ends(n_rows, n_cols, cols, FOLD: tl.constexpr):
    # FOLD consecutive rows count as one of n_cols. A mask that ends at a multiple of 16 leaves 16-byte loads
    # whole. Returns where it ends, and offsets and mask of the fewer than 16 elements after it.
    end = n_rows.to(tl.int64) * (n_cols // FOLD)
    whole = end // 16 * 16
    last = (n_rows // FOLD).to(tl.int64) * n_cols + cols
    return whole, last, (last >= whole) & (last < end) & (cols < n_cols)


@triton.jit
def _add_relu_tile(x_ptrs, bias, y_ptrs, mask, COMPUTE: tl.constexpr):
    z = tl.load(x_ptrs, mask=mask).to(COMPUTE) + bias.to(COMPUTE)
    y = tl.where(z < 0, 0.0, z)  # tl.maximum(z, 0) would turn NaN into 0
    tl.store(y_ptrs, y, mask=mask)


@triton.jit(do_not_specialize=["n_rows"])
def _add_relu_fwd_kernel(
    x_ptr, bias_ptr, y_ptr, n_rows, n_cols, stride_xm, stride_xn,
    COMPUTE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, FOLD: tl.constexpr = 1,
):  # fmt: skip
    # One program handles a tile of x, (BLOCK_M, BLOCK_N). Neighbours take neighbouring columns, so that
    # together they read whole rows in order: the other way round costs 5 % on an H200.
    n_tiles = tl.cdiv(n_cols, BLOCK_N)
    pid_m, pid_n = tl.program_id(0) // n_tiles, tl.program_id(0) % n_tiles
    # int64: row * stride passes 2**31 from 8 GiB of float32 on
    rows = pid_m.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = pid_n.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    offsets = rows[:, None] * n_cols + cols[None, :]
    mask, bias_cols = (rows < n_rows)[:, None] & (cols < n_cols)[None, :], cols
    if FOLD > 1:
        whole, last, behind = _fold_ends(n_rows, n_cols, cols, FOLD)
        mask = (offsets < whole) & (cols < n_cols)[None, :]
        bias_cols = cols.to(tl.int32) % (n_cols // FOLD)

    x_ptrs = x_ptr + rows[:, None] * stride_xm + cols[None, :] * stride_xn
    bias = tl.load(bias_ptr + bias_cols, mask=cols < n_cols)
    _add_relu_tile(x_ptrs, bias[None, :], y_ptr + offsets, mask, COMPUTE)
    if FOLD > 1 and pid_m == 0:
        _add_relu_tile(x_ptr + last, bias, y_ptr + last, behind, COMPUTE)


@triton.jit(do_not_specialize=["n_rows", "rows_per_program"])
def _add_relu_bwd_kernel(
    dy_ptr, y_ptr, dx_ptr, partial_ptr, n_rows, n_cols, stride_dym, stride_dyn, rows_per_program,
    HAS_DX: tl.constexpr, HAS_DBIAS: tl.constexpr, NUM_STAGES: tl.constexpr,
    COMPUTE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, FOLD: tl.constexpr = 1,
):  # fmt: skip
    # One program handles rows_per_program rows of BLOCK_N columns, BLOCK_M rows at a time, and adds
    # them up on the way: its row of partial, (programs down, n_cols), is its share of dbias.
    n_tiles = tl.cdiv(n_cols, BLOCK_N)
    pid_m, pid_n = tl.program_id(0) // n_tiles, tl.program_id(0) % n_tiles
    cols = pid_n.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=COMPUTE)
    if FOLD > 1:
        whole, last, behind = _fold_ends(n_rows, n_cols, cols, FOLD)

    for start in tl.range(0, rows_per_program, BLOCK_M, num_stages=NUM_STAGES):
        rows = pid_m.to(tl.int64) * rows_per_program + start + tl.arange(0, BLOCK_M)
        offsets = rows[:, None] * n_cols + cols[None, :]
        in_rows = offsets < whole if FOLD > 1 else (rows < n_rows)[:, None]
        mask = in_rows & (cols < n_cols)[None, :]
        dy_offsets = rows[:, None] * stride_dym + cols[None, :] * stride_dyn
        dy = tl.load(dy_ptr + dy_offsets, mask=mask, other=0.0)
        y = tl.load(y_ptr + offsets, mask=mask, other=0.0)
        # dx = dy where y > 0; a NaN in y lets dy through, as in torch.relu
        dx = tl.where(y <= 0, 0.0, dy)
        if HAS_DX:
            tl.store(dx_ptr + offsets, dx, mask=mask)
        total += dx.to(COMPUTE)

    sums = tl.sum(total, axis=0)
    if FOLD > 1 and pid_m == 0:
        last_dy = tl.load(dy_ptr + last, mask=behind, other=0.0)
        last_dx = tl.where(tl.load(y_ptr + last, mask=behind, other=0.0) <= 0, 0.0, last_dy)
        if HAS_DX:
            tl.store(dx_ptr + last, last_dx, mask=behind)
        sums += last_dx.to(COMPUTE)
    if HAS_DBIAS:
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


def _compute_dtype(dtype):
    return tl.float64 if dtype == torch.float64 else tl.float32


@functools.cache
def _tile(n_cols, tile_bytes, row_bytes, dtype):
    """BLOCK_M, BLOCK_N: a tile of tile_bytes, its rows row_bytes long unless x has fewer columns."""
    block_n = min(triton.next_power_of_2(n_cols), row_bytes // dtype.itemsize)
    return tile_bytes // dtype.itemsize // block_n, block_n


@functools.cache
def _rows_to_fold(n_cols):
    """How many rows of n_cols elements, taken together, are a multiple of 16 elements long.

    16 elements rather than 16 bytes: only of multiples of 16 does Triton know, for any size given at run time,
    that masks and offsets leave 16-byte loads whole.
    """
    return 16 // math.gcd(n_cols, 16)


def _fold(*matrices):
    """How many rows of these (M, N) matrices are taken as one; None among them is left out.

    A width of 781, say, lets rows begin off any 16-byte boundary, and loads shrink to one element; 16 such rows
    on end are 12496 elements, a good width. So contiguous rows are folded, and the last wide row may be a part;
    unless they are few: of 32 rows as they are one program sums dbias.
    """
    n_rows, n_cols = matrices[0].shape
    fold = _rows_to_fold(n_cols)
    folds = fold > 1 and n_rows >= 64 and all([m is None or m.is_contiguous() for m in matrices])
    return fold if folds else 1


@functools.cache
def _plan(n_cols, dtype, fold=1):
    """n_cols: of fold rows, taken as one."""
    # One 16-byte load in each of 128 threads; folded, four: a bias is looked up alone, and four rows share it
    return Plan(*_tile(n_cols, 2048 if fold == 1 else 8192, 2048, dtype))


@functools.cache
def _plan_backward(n_cols, dtype, aligned):
    """(BLOCK_M, BLOCK_N, strips): tall tiles, rows of 128 elements.

    aligned: four 16-byte loads of dy and of y in flight in each of 256 threads; else smaller tiles: unaligned
    rows load one element per instruction, and cp.async cannot pipeline that.
    """
    block_m, block_n = _tile(n_cols, 16384 if aligned else 8192, 128 * dtype.itemsize, dtype)
    # About 8192 programs fill any GPU; each sums as many rows as that leaves it, and at most 1024 strips
    # keep the second sum short.
    return block_m, block_n, max(1, min(_cdiv(8192, _cdiv(n_cols, block_n)), 1024))


def _launch(plan, fold, bias, x, y):
    n_rows, n_cols = _cdiv(x.shape[0], fold), x.shape[1] * fold
    _run(
        _add_relu_fwd_kernel, (_cdiv(n_rows, plan.block_m) * _cdiv(n_cols, plan.block_n),),
        (x, bias, y), x.shape[0], n_cols, *(x.stride() if fold == 1 else (n_cols, 1)),
        COMPUTE=_compute_dtype(x.dtype), BLOCK_M=plan.block_m, BLOCK_N=plan.block_n, FOLD=fold, num_warps=4,
    )  # fmt: skip


def _launch_backward(plan, dy, y, dx, dtype):
    """Write dx unless it is None. Returns what each strip of rows adds to dbias, (strips, N), or None.

    dtype: that of dbias, None where it is not needed. Of one strip that is dbias itself, in this dtype.
    """
    fold = _fold(y, dy, dx)
    n_rows, n_cols = _cdiv(y.shape[0], fold), y.shape[1] * fold
    stride_dym, stride_dyn = dy.stride() if fold == 1 else (n_cols, 1)
    aligned = n_cols % 16 == 0 and stride_dyn == 1
    block_m, block_n, strips = plan or _plan_backward(n_cols, y.dtype, aligned)
    rows_per_program = _cdiv(_cdiv(n_rows, strips), block_m) * block_m
    strips, n_tiles = _cdiv(n_rows, rows_per_program), _cdiv(n_cols, block_n)
    wide = torch.float64 if y.dtype == torch.float64 else torch.float32
    shape, alone = (strips * fold, y.shape[1]), strips * fold == 1
    partial = y.new_empty(shape, dtype=dtype if alone else wide) if dtype else None
    _run(
        _add_relu_bwd_kernel, (strips * n_tiles,), (dy, y, dx, partial),
        y.shape[0], n_cols, stride_dym, stride_dyn, rows_per_program,
        HAS_DX=dx is not None, HAS_DBIAS=partial is not None, NUM_STAGES=3 if aligned else 1,
        COMPUTE=_compute_dtype(y.dtype), BLOCK_M=block_m, BLOCK_N=block_n, FOLD=fold, num_warps=8,
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


def _rows_of(t):
    """t as (M, N): itself, a view, or a copy where strides allow none. None stays None."""
    return t if t is None or t.dim() == 2 else t.reshape(-1, t.shape[-1])


@functools.cache
def _dtype_of_sum(*dtypes):
    return functools.reduce(torch.promote_types, dtypes)


def _forward(x, bias, plan=None, launch=_launch):
    dtype = _dtype_of_sum(x.dtype, bias.dtype)
    y = torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)
    if y.numel() == 0:
        return y
    matrices = _rows_of(x), _rows_of(y)
    fold = _fold(*matrices)
    chosen = plan or _plan(x.shape[-1] * fold, x.dtype, fold)
    launch(chosen, fold, bias.contiguous(), *matrices)
    return y


def _save(ctx, x, bias, y):
    ctx.save_for_backward(y)
    ctx.dtypes = x.dtype, bias.dtype


def _backward(dy, y, dtypes, needs_grad=(True, True), plan=None):
    """dx and dbias, in these dtypes, each None unless needed."""
    has_dx, has_dbias = needs_grad
    dx = torch.empty_like(y, dtype=dtypes[0]) if has_dx else None
    if y.numel() == 0:
        return dx, y.new_zeros(y.shape[-1], dtype=dtypes[1]) if has_dbias else None
    dtype = dtypes[1] if has_dbias else None
    # y.sum().backward() sends a dy of strides 0, which is read as it is
    matrices = _rows_of(dy), _rows_of(y), _rows_of(dx)
    partial = _launch_backward(plan and plan.backward, *matrices, dtype)
    return dx, _sum_rows(partial, dtype) if has_dbias else None


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


class _AddReLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, bias, forward, plan):
        y = forward(x, bias, plan)
        _save(ctx, x, bias, y)
        ctx.plan = plan
        return y

    @staticmethod
    @_once
    def backward(ctx, dy):
        needs_grad = ctx.needs_input_grad[:2]
        return *_backward(dy, *ctx.saved_tensors, ctx.dtypes, needs_grad, ctx.plan), None, None


# --- the calls -----------------------------------------------------------------------------------------------


def _mix(*tensors):
    """Whether their dtypes may differ: under autocast x has 16 bits, and a bias that is a parameter 32."""
    return all([t.dtype in _DTYPES[:3] for t in tensors])


def _fits(x, bias):
    """Whether the kernels take these arguments; if not, _refuse says why."""
    return (
        isinstance(x, torch.Tensor)
        and isinstance(bias, torch.Tensor)
        and (x.dtype == bias.dtype in _DTYPES or _mix(x, bias))
        and x.device == bias.device
        and x.device.type == ("cpu" if _ON_CPU else "cuda")
        and x.dim() > 0
        and bias.shape == x.shape[-1:]
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


def _call(name, forward, x, bias, plan):
    if not _fits(x, bias):
        _refuse(name, "add_relu_eager", _DTYPES[:3], x=(x, "... N"), bias=(bias, "N"))
    if torch.compiler.is_compiling():
        return add_relu_op(x, bias)
    try:
        if _needs_grad(x, bias):
            return _AddReLU.apply(x, bias, forward, plan)
        return forward(x, bias, plan)  # past autograd: a third of the host's time less
    except RuntimeError as error:
        _explain(error, name, "add_relu_eager")
        raise


def add_relu_triton(
    x: torch.Tensor, bias: torch.Tensor, *, plan: Plan | None = None
) -> torch.Tensor:
    """relu(x + bias) in one Triton kernel, with gradients for both.

    x: (..., N), any strides; bias: (N,), on x's device. Returns y of x's shape, contiguous, in the dtype of
    x + bias: under autocast x may have 16 bits and bias 32.
    plan: a Plan in place of the one chosen, for tuning; torch.compile leaves it out.
    Works under torch.compile (as the op fused_kernels::add_relu), autocast and CUDA graphs; not under
    torch.func, torch.vmap or forward-mode AD, nor twice differentiable: these raise.
    Raises TypeError for a wrong dtype, ValueError for a wrong shape or device.
    """
    return _call("add_relu_triton", _forward, x, bias, plan)


@torch.library.custom_op("fused_kernels::add_relu", mutates_args=())
def add_relu_op(x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """add_relu for torch.compile and torch.export: one node of the graph, which nothing looks into."""
    if not _fits(x, bias):
        _refuse("add_relu_op", "add_relu_eager", _DTYPES[:3], x=(x, "... N"), bias=(bias, "N"))
    return _forward(x, bias)


@torch.library.custom_op("fused_kernels::add_relu_backward", mutates_args=())
def _add_relu_backward_op(dy: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return _backward(
        dy, y, (y.dtype, y.dtype)
    )  # autograd casts them where x and bias are of others


@add_relu_op.register_fake
def _(x, bias):
    return x.new_empty(x.shape, dtype=_dtype_of_sum(x.dtype, bias.dtype))


@_add_relu_backward_op.register_fake
def _(dy, y):
    return torch.empty_like(y), y.new_empty(y.shape[-1])


add_relu_op.register_autograd(
    lambda ctx, dy: _add_relu_backward_op(dy, *ctx.saved_tensors),
    setup_context=lambda ctx, inputs, output: _save(ctx, *inputs, output),
)


@contextlib.contextmanager
def _one_build(name, load_inline):
    """Around load_inline: one process at a time, and none waits for a build that was killed."""
    if hasattr(load_inline, "builds_for_the_cpu"):  # replaced by what sees to that itself
        yield
        return
    if _ON_CPU:
        why = "TRITON_INTERPRET=1 runs Triton's kernels on the CPU, and no others"
        raise ValueError(f"{name}: tensors must be on a GPU; {why}")
    from torch.utils.cpp_extension import _get_build_directory

    folder = Path(_get_build_directory(name, verbose=False))
    with open(folder / "one_at_a_time", "w") as file:
        # ends with its process; PyTorch's own, the file named lock, does not
        fcntl.flock(file, fcntl.LOCK_EX)
        (folder / "lock").unlink(missing_ok=True)
        yield


@functools.cache
def _cuda():
    """The functions of add_relu.cu, compiled at the first call (half a minute, then cached on disk)."""
    from torch.utils.cpp_extension import load_inline

    binding = 'TORCH_LIBRARY(add_relu_cuda, m) { m.def("forward", &add_relu_forward); }'
    source = Path(__file__).with_suffix(".cu").read_text() + binding
    with _one_build("add_relu_cuda", load_inline):
        load_inline(
            "add_relu_cuda", cpp_sources="", cuda_sources=source, extra_cuda_cflags=["-O3"],
            is_python_module=False, no_implicit_headers=True,
        )  # fmt: skip
    return torch.ops.add_relu_cuda


def _folded_and_rest(fold, bias, *matrices):
    """(bias, matrices) of each launch: of folded rows, with the bias repeated, and of rows left over."""
    n_rows, n_cols = matrices[0].shape
    if fold == 1:
        return [(bias, matrices)]
    top, wide = n_rows // fold * fold, (n_rows // fold, n_cols * fold)
    folded = [(bias.repeat(fold), [m if m is None else m[:top].view(wide) for m in matrices])]
    rest = [(bias, [m if m is None else m[top:] for m in matrices])] if top < n_rows else []
    return folded + rest


def _launch_cuda(plan, fold, bias, x, y):
    x = x if x.stride(1) == 1 else x.contiguous()  # the kernel reads 16 adjacent bytes at a time
    x, bias = x.to(y.dtype), bias.to(y.dtype)  # which differ under autocast
    for b, (x_rows, y_rows) in _folded_and_rest(fold, bias, x, y):
        _cuda().forward(x_rows, b, y_rows)


def _forward_cuda(x, bias, plan=None):
    return _forward(x, bias, plan, _launch_cuda)


def add_relu_cuda(x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """relu(x + bias) in one CUDA kernel; the gradient comes from the Triton kernel.

    Shapes, dtypes and errors as for add_relu_triton. Needs nvcc and a C++ compiler at the first call.
    """
    return _call("add_relu_cuda", _forward_cuda, x, bias, None)
