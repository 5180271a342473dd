# SPDX-License-Identifier: MIT
# Copyright (c) 2026 The Fused Kernels authors; Fused Kernels 0.1.0, lib/ops/gelu.py
"""gelu: y = x · Φ(x), one pass over memory, with the normal distribution's Φ exact (erf) or by tanh.

Shapes    x, y: any shape; x with any strides, y contiguous.
Dtypes    float32, float16, bfloat16 (computed in float32) and float64.
Traffic   N elements of s bytes. Forward 2Ns, and backward 3Ns: F.gelu moves the same. Written by hand
          in eager operations, the tanh form takes a pass for each of them.
Backward  dx = dy · (Φ(x) + x · Φ'(x)). Saves x only.
Copy it   this file for Triton; gelu.cu beside it for CUDA. MIT licence.
"""

import contextlib
import fcntl
import functools
from pathlib import Path
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
_FORMS = ("none", "tanh")


class Plan(NamedTuple):
    """How one call is launched: the tile of x, forward, and of x and dy, backward."""

    block_m: int
    block_n: int


def gelu_eager(x: torch.Tensor, approximate: str = "none") -> torch.Tensor:
    return F.gelu(x, approximate=approximate)


@triton.jit
def _gelu_tanh(z):
    # gelu(z) = z·sigmoid(2u), u = √(2/π)·(z + 0.044715 z³): no overflow, where tanh as (e²ᵘ-1)/(e²ᵘ+1) has one
    return z / (1.0 + tl.exp(-1.5957691216057308 * z * (1.0 + 0.044715 * z * z)))


@triton.jit
def _gelu_tanh_grad(z):
    # s = sigmoid(2u); gelu'(z) = s + z·s·(1 - s)·2u'. By e = exp(-|2u|), which cannot overflow, and with
    # s·(1 - s) = e/(1 + e)²: where s is nearly 1, 1 - s has lost its digits, and z·2u' multiplies what is left.
    # Far out e is 0, and 2u' must not be infinite: 0·inf is NaN.
    a = tl.minimum(tl.abs(z), 1e3)
    e = tl.exp2(a * (-2.302208198144325 - 0.1029432395800235 * a * a))  # log₂ e is in the constants
    t = 1.0 / (1.0 + e)
    s = tl.where(z < 0, e * t, t)
    return s + z * (e * t * t) * (1.5957691216057308 + 0.2140644488178008 * a * a)


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
def _locate(n_rows, n_cols, ONE_ROW: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    # Rows and columns of this program's tile, and whether all of them exist.
    pid, n_tiles = tl.program_id(0), tl.cdiv(n_cols, BLOCK_N)
    pid_m, pid_n = pid // n_tiles, pid % n_tiles
    if ONE_ROW:
        pid_m, pid_n = pid * 0, pid
    # int64: row * stride passes 2**31 from 8 GiB of float32 on
    row, col = pid_m.to(tl.int64) * BLOCK_M, pid_n.to(tl.int64) * BLOCK_N
    full = (row + BLOCK_M <= n_rows) & (col + BLOCK_N <= n_cols)
    return (row + tl.arange(0, BLOCK_M))[:, None], (col + tl.arange(0, BLOCK_N))[None, :], full


@triton.jit
def _fwd_tile(x_ptrs, y_ptrs, mask, TANH: tl.constexpr, COMPUTE: tl.constexpr):
    x = tl.load(x_ptrs, mask=mask).to(COMPUTE)
    y = _gelu_tanh(x) if TANH else _gelu(x)
    tl.store(y_ptrs, y, mask=mask)


@triton.jit(do_not_specialize=["n_rows", "n_cols"])
def _gelu_fwd_kernel(
    x_ptr, y_ptr, n_rows, n_cols, stride_xm, stride_xn, stride_ym,
    ONE_ROW: tl.constexpr, TANH: tl.constexpr, COMPUTE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    # One program handles a tile of x, (BLOCK_M, BLOCK_N).
    rows, cols, full = _locate(n_rows, n_cols, ONE_ROW, BLOCK_M, BLOCK_N)
    x_ptrs = x_ptr + rows * stride_xm + cols * stride_xn
    y_ptrs = y_ptr + rows * stride_ym + cols
    # A mask splits 16-byte loads into single elements, unless the compiler can prove that it never cuts one
    # in two. All tiles but the last are full, and need none: so an odd size costs nothing.
    if full:
        _fwd_tile(x_ptrs, y_ptrs, None, TANH, COMPUTE)
    else:
        _fwd_tile(x_ptrs, y_ptrs, (rows < n_rows) & (cols < n_cols), TANH, COMPUTE)


@triton.jit
def _bwd_tile(dy_ptrs, x_ptrs, dx_ptrs, mask, TANH: tl.constexpr, COMPUTE: tl.constexpr):
    dy = tl.load(dy_ptrs, mask=mask).to(COMPUTE)
    x = tl.load(x_ptrs, mask=mask).to(COMPUTE)
    dx = dy * (_gelu_tanh_grad(x) if TANH else _gelu_grad(x))
    tl.store(dx_ptrs, dx, mask=mask)


@triton.jit(do_not_specialize=["n_rows", "n_cols"])
def _gelu_bwd_kernel(
    dy_ptr, x_ptr, dx_ptr, n_rows, n_cols, stride_dym, stride_dyn, stride_xm, stride_xn, stride_dxm,
    ONE_ROW: tl.constexpr, TANH: tl.constexpr, COMPUTE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    # One program handles a tile of x, (BLOCK_M, BLOCK_N).
    rows, cols, full = _locate(n_rows, n_cols, ONE_ROW, BLOCK_M, BLOCK_N)
    dy_ptrs = dy_ptr + rows * stride_dym + cols * stride_dyn
    x_ptrs = x_ptr + rows * stride_xm + cols * stride_xn
    dx_ptrs = dx_ptr + rows * stride_dxm + cols
    if full:
        _bwd_tile(dy_ptrs, x_ptrs, dx_ptrs, None, TANH, COMPUTE)
    else:
        mask = (rows < n_rows) & (cols < n_cols)
        _bwd_tile(dy_ptrs, x_ptrs, dx_ptrs, mask, TANH, COMPUTE)


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
def _plan(n_rows, n_cols, dtype):
    """2048 bytes, 128 threads of one 16-byte load each, the tile as wide as x allows; for both passes."""
    block = 2048 // dtype.itemsize
    block_n = block if n_rows == 1 else min(triton.next_power_of_2(n_cols), block)
    return Plan(block // block_n, block_n)


def _strides(t):
    """The strides of a matrix; 0 from row to row if there is one only, whatever its length."""
    return (t.stride(0) if t.shape[0] > 1 else 0), t.stride(1)


def _launch(plan, x, y, tanh):
    n_rows, n_cols = x.shape
    _run(
        _gelu_fwd_kernel, (_cdiv(n_rows, plan.block_m) * _cdiv(n_cols, plan.block_n),), (x, y),
        n_rows, n_cols, *_strides(x), _strides(y)[0],
        ONE_ROW=n_rows == 1, TANH=tanh, COMPUTE=_compute_dtype(x.dtype),
        BLOCK_M=plan.block_m, BLOCK_N=plan.block_n, num_warps=4,
    )  # fmt: skip


def _launch_backward(plan, dy, x, dx, tanh):
    n_rows, n_cols = x.shape
    _run(
        _gelu_bwd_kernel, (_cdiv(n_rows, plan.block_m) * _cdiv(n_cols, plan.block_n),), (dy, x, dx),
        n_rows, n_cols, *_strides(dy), *_strides(x), _strides(dx)[0],
        ONE_ROW=n_rows == 1, TANH=tanh, COMPUTE=_compute_dtype(x.dtype),
        BLOCK_M=plan.block_m, BLOCK_N=plan.block_n, num_warps=4,
    )  # fmt: skip


# --- forward and backward ------------------------------------------------------------------------------------


def _matrices(*tensors):
    """Views (M, N) of tensors of one shape: a single row if all are contiguous, the order of memory."""
    if all(t.is_contiguous() for t in tensors):
        return [t.view(1, -1) for t in tensors]
    return [t.reshape(-1, t.shape[-1]) for t in tensors]  # a copy where strides allow no view


def _forward(x, approximate, plan=None, launch=_launch):
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    if y.numel() > 0:
        x, out = _matrices(x, y)
        launch(plan or _plan(*x.shape, x.dtype), x, out, approximate == "tanh")
    return y


def _save(ctx, x, approximate):
    ctx.save_for_backward(x)
    ctx.approximate = approximate


def _backward(dy, x, approximate, plan=None):
    dx = torch.empty_like(x, memory_format=torch.contiguous_format)
    if dx.numel() > 0:
        # y.sum().backward() sends a dy of strides 0, which is read as it is
        dy, x, out = _matrices(dy, x, dx)
        _launch_backward(plan or _plan(*x.shape, x.dtype), dy, x, out, approximate == "tanh")
    return dx


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


class _GELU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, approximate, forward, plan):
        _save(ctx, x, approximate)
        ctx.plan = plan
        return forward(x, approximate, plan)

    @staticmethod
    @_once
    def backward(ctx, dy):
        return _backward(dy, *ctx.saved_tensors, ctx.approximate, ctx.plan), None, None, None


# --- the calls -----------------------------------------------------------------------------------------------


def _fits(x, approximate):
    """Whether the kernels take these arguments; if not, _refuse_arguments says why."""
    return (
        isinstance(x, torch.Tensor)
        and x.dtype in _DTYPES
        and x.device.type == ("cpu" if _ON_CPU else "cuda")
        and approximate in _FORMS
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


def _refuse_arguments(name, x, approximate):
    if approximate not in _FORMS:
        raise ValueError(f"{name}: approximate must be 'none' (erf) or 'tanh', got {approximate!r}")
    _refuse(name, "gelu_eager", x=(x, "... "))  # of any shape


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


def _call(name, forward, x, approximate, plan):
    if not _fits(x, approximate):
        _refuse_arguments(name, x, approximate)
    if torch.compiler.is_compiling():
        return gelu_op(x, approximate)
    try:
        if _needs_grad(x):
            return _GELU.apply(x, approximate, forward, plan)
        return forward(x, approximate, plan)  # past autograd: a third of the host's time less
    except RuntimeError as error:
        _explain(error, name, "gelu_eager")
        raise


def gelu_triton(
    x: torch.Tensor, approximate: str = "none", *, plan: Plan | None = None
) -> torch.Tensor:
    """gelu(x) in one Triton kernel, with its gradient; `approximate` as in torch: "none" (erf) or "tanh".

    x: any shape and strides. Returns y of x's shape, contiguous.
    plan: a Plan in place of the one chosen, for tuning; torch.compile leaves it out.
    Works under torch.compile (as the op fused_kernels::gelu), autocast and CUDA graphs; not under
    torch.func, torch.vmap or forward-mode AD, nor twice differentiable: these raise.
    Raises TypeError for a wrong dtype, ValueError for a wrong device or an unknown `approximate`.
    """
    return _call("gelu_triton", _forward, x, approximate, plan)


@torch.library.custom_op("fused_kernels::gelu", mutates_args=())
def gelu_op(x: torch.Tensor, approximate: str = "none") -> torch.Tensor:
    """gelu for torch.compile and torch.export: one node of the graph, which nothing looks into."""
    if not _fits(x, approximate):
        _refuse_arguments("gelu_op", x, approximate)
    return _forward(x, approximate)


@torch.library.custom_op("fused_kernels::gelu_backward", mutates_args=())
def _gelu_backward_op(dy: torch.Tensor, x: torch.Tensor, approximate: str) -> torch.Tensor:
    return _backward(dy, x, approximate)


@gelu_op.register_fake
def _(x, approximate="none"):
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


@_gelu_backward_op.register_fake
def _(dy, x, approximate):
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


gelu_op.register_autograd(
    lambda ctx, dy: (_gelu_backward_op(dy, *ctx.saved_tensors, ctx.approximate), None),
    setup_context=lambda ctx, inputs, output: _save(ctx, *inputs),
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
    """The functions of gelu.cu, compiled at the first call (half a minute, then cached on disk)."""
    from torch.utils.cpp_extension import load_inline

    binding = 'TORCH_LIBRARY(gelu_cuda, m) { m.def("forward", &gelu_forward); }'
    source = Path(__file__).with_suffix(".cu").read_text() + binding
    with _one_build("gelu_cuda", load_inline):
        load_inline(
            "gelu_cuda", cpp_sources="", cuda_sources=source, extra_cuda_cflags=["-O3"],
            is_python_module=False, no_implicit_headers=True,
        )  # fmt: skip
    return torch.ops.gelu_cuda


def _launch_cuda(plan, x, y, tanh):
    _cuda().forward(x.contiguous(), y, tanh, True)  # the kernels count elements in memory's order


def _forward_cuda(x, approximate, plan=None):
    return _forward(x, approximate, plan, _launch_cuda)


def gelu_cuda(x: torch.Tensor, approximate: str = "none") -> torch.Tensor:
    """gelu(x) in one CUDA kernel; the gradient comes from the Triton kernel.

    Shapes, dtypes and errors as for gelu_triton. Needs nvcc and a C++ compiler at the first call.
    """
    return _call("gelu_cuda", _forward_cuda, x, approximate, None)
