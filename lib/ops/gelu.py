"""gelu: y = x · Φ(x), one pass over memory, with the normal distribution's Φ exact (erf) or by tanh.

Shapes    x, y: any shape; x with any strides, y contiguous.
Dtypes    float32, float16, bfloat16 (computed in float32) and float64.
Traffic   N elements of s bytes. Forward 2Ns, and backward 3Ns: F.gelu moves the same. Written by hand
          in eager operations, the tanh form takes a pass for each of them.
Backward  dx = dy · (Φ(x) + x · Φ'(x)). Saves x only.
Copy it   this file for Triton; gelu.cu beside it for CUDA. MIT licence.
"""

import functools
from pathlib import Path

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

# With TRITON_INTERPRET=1 kernels run on CPU tensors; otherwise they need a GPU.
_ON_CPU = triton.knobs.runtime.interpret
_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def gelu_eager(x, approximate="none"):
    return F.gelu(x, approximate=approximate)


@triton.jit
def _gelu(z):
    # gelu(z) = z·sigmoid(2u), u = √(2/π)·(z + 0.044715 z³): no overflow, where tanh as (e²ᵘ-1)/(e²ᵘ+1) has one
    return z / (1.0 + tl.exp(-1.5957691216057308 * z * (1.0 + 0.044715 * z * z)))


@triton.jit
def _gelu_grad(z):
    # s = sigmoid(2u); gelu'(z) = s + z·s·(1 - s)·2u'. By e = exp(-|2u|), which cannot overflow, and with
    # s·(1 - s) = e/(1 + e)²: where s is nearly 1, 1 - s has lost its digits, and z·2u' multiplies what is left.
    e = tl.exp(-1.5957691216057308 * tl.abs(z) * (1.0 + 0.044715 * z * z))
    t = 1.0 / (1.0 + e)
    s = tl.where(z < 0, e * t, t)
    return s + z * (e * t * t) * (1.5957691216057308 * (1.0 + 0.134145 * z * z))


@triton.jit
def _gelu_erf(z):
    # gelu(z) = z·Φ(z), Φ(z) = (1 + erf(z/√2))/2
    return 0.5 * z * (1.0 + tl.erf(0.7071067811865476 * z))


@triton.jit
def _gelu_erf_grad(z):
    # gelu'(z) = Φ(z) + z·Φ'(z), Φ'(z) = exp(-z²/2)/√(2π)
    cdf = 0.5 * (1.0 + tl.erf(0.7071067811865476 * z))
    return cdf + z * (0.3989422804014327 * tl.exp(-0.5 * z * z))


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
    y = _gelu(x) if TANH else _gelu_erf(x)
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
    dx = dy * (_gelu_grad(x) if TANH else _gelu_erf_grad(x))
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


def _cdiv(a, b):
    return -(-a // b)  # triton.cdiv is the same, and costs 2 µs a call on the host


def _compute_dtype(dtype):
    return tl.float64 if dtype == torch.float64 else tl.float32


@functools.cache
def _block(n_rows, n_cols, dtype):
    """BLOCK_M, BLOCK_N: 2048 bytes, 128 threads of one 16-byte load each, the tile as wide as x allows."""
    block = 2048 // dtype.itemsize
    block_n = block if n_rows == 1 else min(triton.next_power_of_2(n_cols), block)
    return block // block_n, block_n


def _matrices(*tensors):
    """Views (M, N) of tensors of one shape: a single row if all are contiguous, the order of memory."""
    if all(t.is_contiguous() for t in tensors):
        return [t.view(1, -1) for t in tensors]
    return [t.reshape(-1, t.shape[-1]) for t in tensors]  # a copy where strides allow no view


def _forward(x, approximate, launch=None):
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    if y.numel() > 0:
        (launch or _launch_forward)(x, y, approximate == "tanh")
    return y


def _launch_forward(x, y, tanh):
    x, y = _matrices(x, y)
    (n_rows, n_cols), (block_m, block_n) = x.shape, _block(*x.shape, x.dtype)
    with torch.cuda.device_of(x):  # else the launch goes to the current GPU, not to x's
        _gelu_fwd_kernel[(_cdiv(n_rows, block_m) * _cdiv(n_cols, block_n),)](
            x, y, n_rows, n_cols, *_strides(x), _strides(y)[0],
            ONE_ROW=n_rows == 1, TANH=tanh, COMPUTE=_compute_dtype(x.dtype),
            BLOCK_M=block_m, BLOCK_N=block_n, num_warps=4,
        )  # fmt: skip


def _strides(t):
    """The strides of a matrix; 0 from row to row if there is one only, whatever its length."""
    return (t.stride(0) if t.shape[0] > 1 else 0), t.stride(1)


def _backward(dy, x, approximate):
    dx = torch.empty_like(x, memory_format=torch.contiguous_format)
    if dx.numel() == 0:
        return dx
    # y.sum().backward() sends a dy of strides 0, which is read as it is
    dy, x, out = _matrices(dy, x, dx)
    (n_rows, n_cols), (block_m, block_n) = x.shape, _block(*x.shape, x.dtype)
    with torch.cuda.device_of(x):
        _gelu_bwd_kernel[(_cdiv(n_rows, block_m) * _cdiv(n_cols, block_n),)](
            dy, x, out, n_rows, n_cols, *_strides(dy), *_strides(x), _strides(out)[0],
            ONE_ROW=n_rows == 1, TANH=approximate == "tanh", COMPUTE=_compute_dtype(x.dtype),
            BLOCK_M=block_m, BLOCK_N=block_n, num_warps=4,
        )  # fmt: skip
    return dx


def _check(name, x, approximate):
    """Raise TypeError or ValueError, saying what to do, unless x is a floating-point tensor on a GPU."""
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{name}: x must be a torch.Tensor, got {type(x).__name__}")
    if x.dtype not in _DTYPES:
        raise TypeError(f"{name}: x must be a floating-point tensor, got {x.dtype}; use .float()")
    if approximate not in ("none", "tanh"):
        raise ValueError(f"{name}: approximate must be 'none' (erf) or 'tanh', got {approximate!r}")
    if x.device.type != ("cpu" if _ON_CPU else "cuda"):
        where = "the CPU (TRITON_INTERPRET=1 is set)" if _ON_CPU else "a GPU"
        raise ValueError(f"{name}: x must be on {where}, got {x.device}; use gelu_eager there")


def _needs_gradient(*tensors):
    """Whether autograd has to hear of this call; where not, leaving it out saves a third of the host's time."""
    # torch.func, vmap among it: autograd.Function says what of it does not work
    transformed = torch._C._functorch.peek_interpreter_stack() is not None
    return transformed or torch.is_grad_enabled() and any(t.requires_grad for t in tensors)


class _GELU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, approximate, forward):
        ctx.save_for_backward(x)
        ctx.approximate = approximate
        return forward(x, approximate)

    @staticmethod
    @torch.autograd.function.once_differentiable  # a second derivative raises instead of being wrong
    def backward(ctx, dy):
        return _backward(dy, *ctx.saved_tensors, ctx.approximate), None, None


def gelu_triton(x, approximate="none"):
    """gelu(x) in one Triton kernel, with its gradient; `approximate` as in torch: "none" (erf) or "tanh".

    x: any shape and strides. Returns y of x's shape, contiguous.
    Works under torch.compile (as the op fused_kernels::gelu), autocast and CUDA graphs; not under
    torch.vmap, and not twice differentiable: both raise.
    Raises TypeError for a wrong dtype, ValueError for a wrong device or an unknown `approximate`.
    """
    _check("gelu_triton", x, approximate)
    if torch.compiler.is_compiling():
        return gelu_op(x, approximate)
    if not _needs_gradient(x):
        return _forward(x, approximate)
    return _GELU.apply(x, approximate, _forward)


@torch.library.custom_op("fused_kernels::gelu", mutates_args=())
def gelu_op(x: torch.Tensor, approximate: str = "none") -> torch.Tensor:
    """gelu for torch.compile and torch.export: one node of the graph, which nothing looks into."""
    _check("gelu_op", x, approximate)
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


def _setup_context(ctx, inputs, output):
    x, ctx.approximate = inputs
    ctx.save_for_backward(x)


gelu_op.register_autograd(
    lambda ctx, dy: (_gelu_backward_op(dy, *ctx.saved_tensors, ctx.approximate), None),
    setup_context=_setup_context,
)


@functools.cache
def _cuda():
    """The functions of gelu.cu, compiled at the first call (half a minute, then cached on disk)."""
    from torch.utils.cpp_extension import load_inline

    binding = 'TORCH_LIBRARY(gelu_cuda, m) { m.def("forward", &gelu_forward); }'
    source = Path(__file__).with_suffix(".cu").read_text() + binding
    load_inline(
        "gelu_cuda", cpp_sources="", cuda_sources=source, extra_cuda_cflags=["-O3"],
        is_python_module=False, no_implicit_headers=True,
    )  # fmt: skip
    return torch.ops.gelu_cuda


def _launch_cuda(x, y, tanh):
    _cuda().forward(x.contiguous(), y, tanh, True)  # the kernels count elements in memory's order


def gelu_cuda(x, approximate="none"):
    """gelu(x) in one CUDA kernel; the gradient comes from the Triton kernel.

    Shapes, dtypes and errors as for gelu_triton. Needs nvcc and a C++ compiler at the first call.
    """
    _check("gelu_cuda", x, approximate)
    return _GELU.apply(x, approximate, functools.partial(_forward, launch=_launch_cuda))
