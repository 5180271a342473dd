# SPDX-License-Identifier: MIT
# Copyright (c) 2026 The Fused Kernels authors; Fused Kernels 0.1.0, lib/ops/add_rms_norm.py
"""add_rms_norm: h = x + residual and y = rms_norm(h) · weight, one pass over memory instead of two.

Shapes    x, residual, h, y: (..., N), N up to 32,768, x and residual with any strides, h and y contiguous;
          weight: (N,).
Dtypes    float32, float16 and bfloat16 (computed in float32), also mixed, h and y then as x + residual is;
          and float64. As in PyTorch, h is rounded to its dtype before its norm is taken.
Traffic   M rows of N elements of s bytes. Forward 4MNs (x, residual, h, y), in PyTorch 5MNs; backward 4MNs
          (dy, dh, h, dx), in PyTorch 6MNs; rows of more than 8,192 are read again, from a cache.
Norm      y = h · r · weight, r = 1 / √(mean(h²) + eps) (Zhang and Sennrich, Root Mean Square Layer
          Normalization, 2019).
Backward  With n = h·r and g = weight·dy: dx = dh + r·(g - n · mean(g·n)), for x and residual alike;
          dweight = dy·n summed over rows. Saves h and weight only: r is computed again from its row.
Copy it   this file. MIT licence.
"""

import functools
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
_WIDEST = 32768  # a row lies in the registers of one program
_READ_AGAIN_ABOVE = 8192  # backward there are three rows and a sum to hold


class Plan(NamedTuple):
    """How one call is launched: rows a program holds at a time, and its warps.

    backward: (block_m, num_warps, strips), strips of rows, one a program; or None to have it chosen.
    """

    block_m: int
    num_warps: int
    backward: tuple[int, int, int] | None = None


def add_rms_norm_eager(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6
) -> tuple[torch.Tensor, torch.Tensor]:
    h = x + residual
    return F.rms_norm(h, weight.shape, weight, eps), h


@triton.jit
def _add_both(a, b, c, d):
    return a + c, b + d


@triton.jit(do_not_specialize=["n_rows", "eps"])
def _add_rms_norm_fwd_kernel(
    x_ptr, residual_ptr, weight_ptr, h_ptr, y_ptr, n_rows, n_cols, eps,
    stride_xm, stride_xn, stride_rm, stride_rn,
    COMPUTE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    # One program handles BLOCK_M whole rows, padded to BLOCK_N.
    # int64: row * stride passes 2**31 from 8 GiB of float32 on
    rows = (tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M))[:, None]
    cols = tl.arange(0, BLOCK_N)[None, :]
    mask = (rows < n_rows) & (cols < n_cols)
    x = tl.load(x_ptr + rows * stride_xm + cols * stride_xn, mask=mask, other=0.0)
    residual = tl.load(residual_ptr + rows * stride_rm + cols * stride_rn, mask=mask, other=0.0)
    weight = tl.load(weight_ptr + cols, mask=cols < n_cols, other=0.0).to(COMPUTE)
    # rounded as it is stored: the norm is that of the h which everybody else sees
    rounded = (x.to(COMPUTE) + residual.to(COMPUTE)).to(h_ptr.dtype.element_ty)
    tl.store(h_ptr + rows * n_cols + cols, rounded, mask=mask)
    h = rounded.to(COMPUTE)
    # masked-off columns contribute 0
    root = tl.rsqrt(tl.sum(h * h, axis=1)[:, None] / n_cols + eps)
    y = h * root * weight
    tl.store(y_ptr + rows * n_cols + cols, y, mask=mask)


@triton.jit(do_not_specialize=["n_rows", "eps", "rows_per_program"])
def _add_rms_norm_bwd_kernel(
    dy_ptr, dh_ptr, h_ptr, weight_ptr, dx_ptr, partial_ptr, n_rows, n_cols, eps,
    stride_dym, stride_dyn, stride_dhm, stride_dhn, stride_hm, stride_hn, rows_per_program,
    NUM_STAGES: tl.constexpr, COMPUTE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    # One program handles rows_per_program whole rows, BLOCK_M at a time, and adds up on the way: its row of
    # partial, (programs, n_cols), is its share of dweight.
    cols = tl.arange(0, BLOCK_N)[None, :]
    weight = tl.load(weight_ptr + cols, mask=cols < n_cols, other=0.0).to(COMPUTE)
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=COMPUTE)
    for start in tl.range(0, rows_per_program, BLOCK_M, num_stages=NUM_STAGES):
        first_row = tl.program_id(0).to(tl.int64) * rows_per_program + start
        rows = (first_row + tl.arange(0, BLOCK_M))[:, None]
        mask = (rows < n_rows) & (cols < n_cols)
        dy = tl.load(dy_ptr + rows * stride_dym + cols * stride_dyn, mask=mask, other=0.0).to(
            COMPUTE
        )
        h = tl.load(h_ptr + rows * stride_hm + cols * stride_hn, mask=mask, other=0.0).to(COMPUTE)
        # both sums of a row in one go, h² and g·h; mean(g·n) is r·mean(g·h)
        squares, cross = tl.reduce((h * h, dy * weight * h), 1, _add_both)
        root = tl.rsqrt(squares / n_cols + eps)[:, None]
        normal = h * root
        dx = root * (dy * weight - normal * (root * cross[:, None] / n_cols))
        if dh_ptr is not None:
            dh_ptrs = dh_ptr + rows * stride_dhm + cols * stride_dhn
            dx += tl.load(dh_ptrs, mask=mask, other=0.0).to(COMPUTE)
        if dx_ptr is not None:
            tl.store(dx_ptr + rows * n_cols + cols, dx, mask=mask)
        total += dy * normal  # 0 outside: dy is
    if partial_ptr is not None:
        sums = tl.sum(total, axis=0)[None, :]
        partial_ptrs = partial_ptr + tl.program_id(0).to(tl.int64) * n_cols + cols
        tl.store(partial_ptrs, sums, mask=cols < n_cols)


@triton.jit(do_not_specialize=["n_rows", "eps", "rows_per_program"])
def _add_rms_norm_bwd_wide_kernel(
    dy_ptr, dh_ptr, h_ptr, weight_ptr, dx_ptr, partial_ptr, n_rows, n_cols, eps,
    stride_dym, stride_dyn, stride_dhm, stride_dhn, stride_hm, stride_hn, rows_per_program,
    COMPUTE: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    # The same for a row too wide to stay in registers until its sums are there: it is read again, from a cache.
    cols = tl.arange(0, BLOCK_N)
    mask = cols < n_cols
    total = tl.zeros((BLOCK_N,), dtype=COMPUTE)
    for k in range(0, rows_per_program):
        row = tl.program_id(0).to(tl.int64) * rows_per_program + k
        if row < n_rows:
            dy_ptrs = dy_ptr + row * stride_dym + cols * stride_dyn
            h_ptrs = h_ptr + row * stride_hm + cols * stride_hn
            dy = tl.load(dy_ptrs, mask=mask, other=0.0).to(COMPUTE)
            h = tl.load(h_ptrs, mask=mask, other=0.0).to(COMPUTE)
            weight = tl.load(weight_ptr + cols, mask=mask, other=0.0).to(COMPUTE)
            squares, cross = tl.reduce((h * h, dy * weight * h), 0, _add_both)
            root = tl.rsqrt(squares / n_cols + eps)
            tl.debug_barrier()  # else these loads are the ones above, for the compiler
            dy = tl.load(dy_ptrs, mask=mask, other=0.0).to(COMPUTE)
            h = tl.load(h_ptrs, mask=mask, other=0.0).to(COMPUTE)
            weight = tl.load(weight_ptr + cols, mask=mask, other=0.0).to(COMPUTE)
            normal = h * root
            total += dy * normal
            dx = root * (dy * weight - normal * (root * cross / n_cols))
            if dh_ptr is not None:
                dh_ptrs = dh_ptr + row * stride_dhm + cols * stride_dhn
                dx += tl.load(dh_ptrs, mask=mask, other=0.0).to(COMPUTE)
            if dx_ptr is not None:
                tl.store(dx_ptr + row * n_cols + cols, dx, mask=mask)
    if partial_ptr is not None:
        partial_ptrs = partial_ptr + tl.program_id(0).to(tl.int64) * n_cols + cols
        tl.store(partial_ptrs, total, mask=mask)


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


def _power_of_2(n):
    return 1 << max(0, n - 1).bit_length()  # so is triton.next_power_of_2


def _compute_dtype(dtype):
    return tl.float64 if dtype == torch.float64 else tl.float32


@functools.cache
def _plan(n_cols, itemsize):
    """A warp for 1024 elements of a row; of 16 bits in rows that begin anywhere, four warps for 2048."""
    block_n = _power_of_2(n_cols)
    if itemsize == 2 and n_cols % 8:
        return Plan(max(1, 2048 // block_n), max(4, min(block_n // 512, 16)))
    return Plan(max(1, 1024 // block_n), max(1, min(block_n // 1024, 16)))


@functools.cache
def _plan_backward(n_cols):
    """(block_m, num_warps, strips): sixteen warps for each of an H200's 132 SMs, or one program."""
    block_n = _power_of_2(n_cols)
    num_warps = max(1, block_n // 1024) if block_n <= _READ_AGAIN_ABOVE else 32
    # each further program adds a row to the last sum
    return max(1, 1024 // block_n), num_warps, 132 * max(1, 16 // num_warps)


@functools.cache
def _num_stages(n_cols, itemsize, block_m):
    """1 + the steps whose rows are under way while these are computed, where any GPU has memory for them."""
    if n_cols * itemsize % 16:
        return 1  # rows that begin anywhere are not copied ahead
    return min(3, 1 + 32768 // (block_m * n_cols * itemsize))


def _launch(plan, x, residual, weight, h, y, eps):
    n_rows, n_cols = x.shape
    _run(
        _add_rms_norm_fwd_kernel, (_cdiv(n_rows, plan.block_m),), (x, residual, weight, h, y),
        n_rows, n_cols, eps, *x.stride(), *residual.stride(),
        COMPUTE=_compute_dtype(x.dtype), BLOCK_M=plan.block_m,
        BLOCK_N=_power_of_2(n_cols), num_warps=plan.num_warps,
    )  # fmt: skip


def _launch_backward(plan, dy, dh, h, weight, dx, eps, dtype):
    """Write dx unless it is None. Returns what each strip of rows adds to dweight, (strips, N), or None.

    dtype: that of dweight, None where it is not needed. Of one strip that is dweight itself, in this dtype.
    """
    n_rows, n_cols = h.shape
    block_m, num_warps, strips = plan and plan.backward or _plan_backward(n_cols)
    rows_per_program = _cdiv(_cdiv(n_rows, strips), block_m) * block_m
    strips = _cdiv(n_rows, rows_per_program)
    wide = torch.float64 if h.dtype == torch.float64 else torch.float32
    partial = h.new_empty((strips, n_cols), dtype=dtype if strips == 1 else wide) if dtype else None
    kernel, how = _add_rms_norm_bwd_wide_kernel, {}
    if n_cols <= _READ_AGAIN_ABOVE:
        how = {"NUM_STAGES": _num_stages(n_cols, h.element_size(), block_m), "BLOCK_M": block_m}
        kernel = _add_rms_norm_bwd_kernel
    _run(
        kernel, (strips,), (dy, dh, h, weight, dx, partial), n_rows, n_cols, eps,
        *dy.stride(), *((0, 0) if dh is None else dh.stride()), *h.stride(), rows_per_program,
        COMPUTE=_compute_dtype(h.dtype), BLOCK_N=_power_of_2(n_cols), num_warps=num_warps, **how,
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


def _forward(x, residual, weight, eps, plan=None):
    """y and h."""
    dtype = _dtype_of_sum(x.dtype, residual.dtype)
    h = torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)
    y = torch.empty_like(h)
    if y.numel() > 0:
        n_cols = x.shape[-1]
        matrices, out = [_rows_of(x), _rows_of(residual)], (_rows_of(h), _rows_of(y))
        _launch(plan or _plan(n_cols, dtype.itemsize), *matrices, weight.contiguous(), *out, eps)
    return y, h


def _save(ctx, weight, eps, h, plan=None):
    ctx.eps, ctx.plan = eps, plan
    ctx.save_for_backward(h, weight)


def _backward(dy, dh, h, weight, eps, needs_grad=(True, True), plan=None):
    """The gradient of h, which is that of x and of residual, and dweight; each None unless needed."""
    has_dx, has_dweight = needs_grad
    dy = torch.zeros_like(h) if dy is None else dy  # of y, or of h, nobody may have asked
    dx = torch.empty_like(h, memory_format=torch.contiguous_format) if has_dx else None
    if h.numel() == 0:
        return dx, torch.zeros_like(weight) if has_dweight else None
    # y.sum().backward() sends a dy of strides 0, which is read as it is
    dy, dh, h, out = _rows_of(dy), _rows_of(dh), _rows_of(h), _rows_of(dx)
    dtype = weight.dtype if has_dweight else None
    partial = _launch_backward(plan, dy, dh, h, weight.contiguous(), out, eps, dtype)
    return dx, _sum_rows(partial, dtype) if has_dweight else None


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


class _AddRMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, residual, weight, eps, plan):
        y, h = _forward(x, residual, weight, eps, plan)
        _save(ctx, weight, eps, h, plan)
        ctx.set_materialize_grads(False)  # after the last norm of a model nobody asks for h
        return y, h

    @staticmethod
    @_once
    def backward(ctx, dy, dh):
        h, weight = ctx.saved_tensors
        needs_dx, needs_dresidual, needs_dweight = ctx.needs_input_grad[:3]
        needs = (needs_dx or needs_dresidual, needs_dweight)
        dx, dweight = _backward(dy, dh, h, weight, ctx.eps, needs, ctx.plan)
        return dx if needs_dx else None, dx if needs_dresidual else None, dweight, None, None


# --- the calls -----------------------------------------------------------------------------------------------


def _mix(*tensors):
    """Whether their dtypes may differ: under autocast x has 16 bits, and a bias that is a parameter 32."""
    return all([t.dtype in _DTYPES[:3] for t in tensors])


def _fits(x, residual, weight, eps):
    """Whether the kernels take these arguments; if not, _refuse_arguments says why."""
    return (
        isinstance(x, torch.Tensor)
        and isinstance(residual, torch.Tensor)
        and isinstance(weight, torch.Tensor)
        and (x.dtype == residual.dtype == weight.dtype in _DTYPES or _mix(x, residual, weight))
        and x.device == residual.device == weight.device
        and x.device.type == ("cpu" if _ON_CPU else "cuda")
        and residual.shape == x.shape != ()
        and weight.shape == x.shape[-1:]
        and x.shape[-1] <= _WIDEST
        and isinstance(eps, (int, float))
        and not isinstance(eps, bool)
        and eps >= 0
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


def _refuse_arguments(name, x, residual, weight, eps):
    """What only this op can say, else what _refuse does."""
    if isinstance(eps, bool) or not isinstance(eps, (int, float)) or not eps >= 0:
        raise ValueError(f"{name}: eps must be a number, 0 or more, got {eps!r}")
    a, b = (tuple(getattr(t, "shape", ())) for t in (x, residual))
    if a != b and () not in (a, b):  # lists and numbers are for _refuse
        raise ValueError(f"{name}: residual must have the shape of x, got x {a} and residual {b}")
    if a and a[-1] > _WIDEST:
        at_most = f"rows of at most {_WIDEST} elements fit into registers"
        raise ValueError(f"{name}: {at_most}, got {a[-1]}; use add_rms_norm_eager")
    sizes = {"x": (x, "... N"), "residual": (residual, "... N"), "weight": (weight, "N")}
    _refuse(name, "add_rms_norm_eager", _DTYPES[:3], **sizes)


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


def _call(name, x, residual, weight, eps, plan):
    if not _fits(x, residual, weight, eps):
        _refuse_arguments(name, x, residual, weight, eps)
    if torch.compiler.is_compiling():
        return add_rms_norm_op(x, residual, weight, eps)
    try:
        if _needs_grad(x, residual, weight):
            return _AddRMSNorm.apply(x, residual, weight, eps, plan)
        return _forward(x, residual, weight, eps, plan)  # past autograd: less time on the host
    except RuntimeError as error:
        _explain(error, name, "add_rms_norm_eager")
        raise


def add_rms_norm_triton(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6, *,
    plan: Plan | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """(rms_norm(h) · weight, h) with h = x + residual in one Triton kernel, with gradients for all three.

    x, residual: (..., N), any strides, N up to 32,768; weight: (N,), all on one device. eps: added to the mean
    of h². Returns y and h of x's shape, contiguous, in the dtype of x + residual (weight may have another).
    plan: a Plan in place of the one chosen, for tuning; torch.compile leaves it out.
    Works under torch.compile (as the op fused_kernels::add_rms_norm), autocast, checkpointing and CUDA graphs;
    not under torch.func, torch.vmap or forward-mode AD, nor twice differentiable: these raise.
    Raises TypeError for a wrong dtype, ValueError for a wrong shape, device or eps.
    """
    return _call("add_rms_norm_triton", x, residual, weight, eps, plan)


@torch.library.custom_op("fused_kernels::add_rms_norm", mutates_args=())
def add_rms_norm_op(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6
) -> tuple[torch.Tensor, torch.Tensor]:
    """For torch.compile and torch.export: one node of the graph, which nothing looks into."""
    if not _fits(x, residual, weight, eps):
        _refuse_arguments("add_rms_norm_op", x, residual, weight, eps)
    return _forward(x, residual, weight, eps)


@torch.library.custom_op("fused_kernels::add_rms_norm_backward", mutates_args=())
def _add_rms_norm_backward_op(
    dy: torch.Tensor | None,
    dh: torch.Tensor | None,
    h: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    return _backward(dy, dh, h, weight, eps)


@add_rms_norm_op.register_fake
def _(x, residual, weight, eps=1e-6):
    h = x.new_empty(x.shape, dtype=_dtype_of_sum(x.dtype, residual.dtype))
    return torch.empty_like(h), h


@_add_rms_norm_backward_op.register_fake
def _(dy, dh, h, weight, eps):
    return torch.empty(h.shape, dtype=h.dtype, device=h.device), torch.empty_like(weight)


def _op_backward(ctx, dy, dh):
    h, weight = ctx.saved_tensors
    dx, dweight = _add_rms_norm_backward_op(dy, dh, h, weight, ctx.eps)
    return dx, dx, dweight, None


add_rms_norm_op.register_autograd(
    _op_backward, setup_context=lambda ctx, inputs, output: _save(ctx, *inputs[2:], output[1])
)


class AddRMSNorm(torch.nn.RMSNorm):
    """torch.nn.RMSNorm over one dimension, of x + residual: forward(x, residual) gives y and the sum h."""

    def __init__(
        self, features: int, eps: float = 1e-6,
        device: torch.device | str | None = None, dtype: torch.dtype | None = None,
    ):  # fmt: skip
        super().__init__(features, eps=eps, device=device, dtype=dtype)

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return add_rms_norm_triton(x, residual, self.weight, self.eps)
