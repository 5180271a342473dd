"""Room 2: the right numbers from the wrong place."""

import dataclasses
import functools

from lib.exercises.museum.exhibit import Exhibit, length, numbers, shape, virtual_shape
from lib.nogpu import cuda

import torch
import triton
import triton.language as tl

# --- 8 -------------------------------------------------------------------------------------------------------


@triton.jit
def offset_kernel(offset_ptr, row, col, row_stride):
    # where the element (row, col) stands in memory
    tl.store(offset_ptr, row * row_stride + col)


@triton.jit
def offset_kernel_fixed(offset_ptr, row, col, row_stride):
    # where the element (row, col) stands in memory
    tl.store(offset_ptr, tl.cast(row, tl.int64) * row_stride + col)


def _offset_of_the_last(kernel, size):
    offset = torch.zeros(1, dtype=torch.int64)
    rows, cols = size
    kernel[(1,)](offset, rows - 1, cols - 1, cols)
    return offset


# --- 9 -------------------------------------------------------------------------------------------------------


@triton.jit
def copy_kernel(x_ptr, y_ptr, n_rows, n_cols):
    # One program copies a tile of x, (16, 16). Launched with the grid (cdiv(n_rows, 16), cdiv(n_cols, 16)).
    rows = tl.program_id(1) * 16 + tl.arange(0, 16)[:, None]
    cols = tl.program_id(0) * 16 + tl.arange(0, 16)[None, :]
    mask = (rows < n_rows) & (cols < n_cols)
    x = tl.load(x_ptr + rows * n_cols + cols, mask=mask)
    tl.store(y_ptr + rows * n_cols + cols, x, mask=mask)


@triton.jit
def copy_kernel_fixed(x_ptr, y_ptr, n_rows, n_cols):
    # One program copies a tile of x, (16, 16). Launched with the grid (cdiv(n_rows, 16), cdiv(n_cols, 16)).
    rows = tl.program_id(0) * 16 + tl.arange(0, 16)[:, None]
    cols = tl.program_id(1) * 16 + tl.arange(0, 16)[None, :]
    mask = (rows < n_rows) & (cols < n_cols)
    x = tl.load(x_ptr + rows * n_cols + cols, mask=mask)
    tl.store(y_ptr + rows * n_cols + cols, x, mask=mask)


def _copied(kernel, size):
    x = _counted(size)
    y = torch.full_like(x, torch.nan)
    kernel[tuple(triton.cdiv(n, 16) for n in size)](x, y, *size)
    return y


def _counted(size):
    """1, 2, 3, ... in a tensor of this shape."""
    n = size[0] * size[1]
    return torch.arange(1, n + 1, dtype=torch.float32).view(size)


# --- 10 ------------------------------------------------------------------------------------------------------

_INCLUDES = """\
#include <torch/types.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>
"""
_KERNEL = """\
__global__ void double_kernel(const float* x, float* y, int n_cols) {
  const int i = blockIdx.x * n_cols + threadIdx.x;
  y[i] = 2.f * x[i];
}
"""
_LAUNCH = """\

torch::Tensor twice(torch::Tensor x) {
  // one thread block for a row, one thread for an element of it
  const int n_rows = x.size(0), n_cols = x.size(1);
  auto y = torch::full_like(x, NAN);
  auto stream = c10::cuda::getCurrentCUDAStream();
  double_kernel<<<n_rows, n_cols, 0, stream>>>(x.data_ptr<float>(), y.data_ptr<float>(), n_cols);
  return y;
}
"""
DOUBLE = _KERNEL + _LAUNCH
DOUBLE_FIXED = """\
__global__ void double_kernel(const float* x, float* y, int n_cols) {
  for (int col = threadIdx.x; col < n_cols; col += blockDim.x) {
    const int i = blockIdx.x * n_cols + col;
    y[i] = 2.f * x[i];
  }
}
""" + _LAUNCH.replace("one thread for an element of it", "256 threads walk along it").replace(
    "<<<n_rows, n_cols, 0", "<<<n_rows, 256, 0"
).replace("  return y;", "  C10_CUDA_KERNEL_LAUNCH_CHECK();\n  return y;")

# The error of a launch that nobody asks for comes up in the next call that asks: in somebody else's.
_TAKE_ERROR = "\nint64_t take_error() { return cudaGetLastError(); }\n"


@functools.cache
def _built():
    """Both programs in one build, which takes a quarter of a minute the first time."""
    fixed = DOUBLE_FIXED.replace("double_kernel", "double_kernel_fixed").replace(
        " twice(", " fixed("
    )
    text = _INCLUDES + DOUBLE + fixed + _TAKE_ERROR
    return cuda.load_cuda_on_cpu(text, ["twice", "fixed", "take_error"], name="museum")


def _doubled(source, size):
    built = _built()
    y = (built.twice if source == DOUBLE else built.fixed)(_counted(size))
    built.take_error()
    return y


# --- 11 ------------------------------------------------------------------------------------------------------


@triton.jit
def scale_kernel(x_ptr, y_ptr, n_elements, BLOCK_SIZE: tl.constexpr):
    offsets = tl.arange(0, BLOCK_SIZE)
    mask = offsets < n_elements
    tl.store(y_ptr + offsets, 2 * tl.load(x_ptr + offsets, mask=mask), mask=mask)


def scale(x):
    y = torch.empty(x.shape)
    scale_kernel[(1,)](x, y, x.numel(), BLOCK_SIZE=triton.next_power_of_2(x.numel()))
    return y


def scale_fixed(x):
    y = torch.empty(x.shape)
    x = x.contiguous()  # or pass x.stride() to the kernel, and save the copy
    scale_kernel[(1,)](x, y, x.numel(), BLOCK_SIZE=triton.next_power_of_2(x.numel()))
    return y


# --- 12 ------------------------------------------------------------------------------------------------------


@triton.jit
def relu_backward_kernel(dy_ptr, y_ptr, dx_ptr, n_elements, BLOCK_SIZE: tl.constexpr):
    offsets = tl.arange(0, BLOCK_SIZE)
    mask = offsets < n_elements
    dy, y = tl.load(dy_ptr + offsets, mask=mask), tl.load(y_ptr + offsets, mask=mask)
    tl.store(dx_ptr + offsets, tl.where(y > 0, dy, 0.0), mask=mask)


def relu_backward(dy, y):
    dx, size = torch.empty_like(y), triton.next_power_of_2(y.numel())
    relu_backward_kernel[(1,)](dy, y, dx, y.numel(), BLOCK_SIZE=size)
    return dx


def relu_backward_fixed(dy, y):
    dx, size = torch.empty_like(y), triton.next_power_of_2(y.numel())
    dy = dy.contiguous()  # y.sum().backward() sends one number with stride 0
    relu_backward_kernel[(1,)](dy, y, dx, y.numel(), BLOCK_SIZE=size)
    return dx


def _gradient_of_a_sum(function, n):
    return function(torch.ones(1).expand(n), torch.ones(n))


# --- 13 ------------------------------------------------------------------------------------------------------


@triton.jit
def add_bias_kernel(in_ptr0, in_ptr1, out_ptr0, xnumel, XBLOCK: tl.constexpr):
    # copied out of output code that was made for eight columns
    xindex = tl.program_id(0) * XBLOCK + tl.arange(0, XBLOCK)
    xmask = xindex < xnumel
    tmp0 = tl.load(in_ptr0 + xindex, xmask)
    tmp1 = tl.load(in_ptr1 + xindex % 8, xmask)
    tl.store(out_ptr0 + xindex, tmp0 + tmp1, xmask)


@triton.jit
def add_bias_kernel_fixed(in_ptr0, in_ptr1, out_ptr0, xnumel, n_cols, XBLOCK: tl.constexpr):
    # copied out of output code that was made for eight columns
    xindex = tl.program_id(0) * XBLOCK + tl.arange(0, XBLOCK)
    xmask = xindex < xnumel
    tmp0 = tl.load(in_ptr0 + xindex, xmask)
    tmp1 = tl.load(in_ptr1 + xindex % n_cols, xmask)
    tl.store(out_ptr0 + xindex, tmp0 + tmp1, xmask)


def _biased(kernel, size):
    x, n = _counted(size), size[0] * size[1]
    y, bias = torch.full_like(x, torch.nan), torch.arange(float(size[1]))
    n_cols = size[1:] if kernel is add_bias_kernel_fixed else ()
    kernel[(triton.cdiv(n, 64),)](x, bias, y, n, *n_cols, XBLOCK=64)
    return y


# --- 14 ------------------------------------------------------------------------------------------------------


@triton.jit
def softmax_kernel(x_ptr, y_ptr, n_cols, BLOCK_SIZE: tl.constexpr):
    # One row, padded to a power of two.
    cols = tl.arange(0, BLOCK_SIZE)
    x = tl.load(x_ptr + cols, mask=cols < n_cols, other=0.0)
    e = tl.exp(x - tl.max(x, axis=0))
    tl.store(y_ptr + cols, e / tl.sum(e, axis=0), mask=cols < n_cols)


@triton.jit
def softmax_kernel_fixed(x_ptr, y_ptr, n_cols, BLOCK_SIZE: tl.constexpr):
    # One row, padded to a power of two.
    cols = tl.arange(0, BLOCK_SIZE)
    x = tl.load(x_ptr + cols, mask=cols < n_cols, other=-float("inf"))
    e = tl.exp(x - tl.max(x, axis=0))
    tl.store(y_ptr + cols, e / tl.sum(e, axis=0), mask=cols < n_cols)


# --- 15 ------------------------------------------------------------------------------------------------------


@triton.jit
def embedding_kernel(id_ptr, table_ptr, y_ptr, n_ids, n_rows, BLOCK_SIZE: tl.constexpr):
    # y = table[(id + 1) % n_rows], the modulus hash of notebook 10
    offsets = tl.arange(0, BLOCK_SIZE)
    mask = offsets < n_ids
    row = (tl.load(id_ptr + offsets, mask=mask) + 1) % n_rows
    tl.store(y_ptr + offsets, tl.load(table_ptr + row, mask=mask), mask=mask)


@triton.jit
def embedding_kernel_fixed(id_ptr, table_ptr, y_ptr, n_ids, n_rows, BLOCK_SIZE: tl.constexpr):
    # y = table[(id + 1) % n_rows], the modulus hash of notebook 10
    offsets = tl.arange(0, BLOCK_SIZE)
    mask = offsets < n_ids
    row = (tl.load(id_ptr + offsets, mask=mask) + 1) % n_rows
    row = tl.where(row < 0, row + n_rows, row)  # % has the sign of its left side, as in C
    tl.store(y_ptr + offsets, tl.load(table_ptr + row, mask=mask), mask=mask)


def _embedded(kernel, ids):
    table = torch.arange(10.0)
    y = torch.full(ids.shape, torch.nan)
    size = triton.next_power_of_2(ids.numel())
    kernel[(1,)](ids, table, y, ids.numel(), table.numel(), BLOCK_SIZE=size)
    return y


# --- 16 ------------------------------------------------------------------------------------------------------


@triton.jit
def negate_kernel(x_ptr, y_ptr, n_elements, BLOCK_SIZE: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    mask = offsets < n_elements
    tl.store(y_ptr + offsets, -tl.load(x_ptr + offsets, mask=mask), mask=mask)


def negate(x, y):
    grid = (x.numel() // 64,)
    negate_kernel[grid](x, y, x.numel(), BLOCK_SIZE=64)
    return y


def negate_fixed(x, y):
    grid = (triton.cdiv(x.numel(), 64),)
    negate_kernel[grid](x, y, x.numel(), BLOCK_SIZE=64)
    return y


def _read_ids(raw):
    numbers.read(raw)
    if not all(isinstance(n, int) and abs(n) < 2**62 for n in raw):
        raise ValueError(f"hand in a list of whole numbers below 2**62; got {raw}")
    return torch.tensor(raw)


_ids = dataclasses.replace(numbers, description="a list of whole numbers", read=_read_ids)

EXHIBITS = (
    Exhibit(
        "The offset that turns negative", offset_kernel, offset_kernel_fixed, virtual_shape,
        (4096, 4096), (3, 715_827_883),
        run=_offset_of_the_last,
    ),
    Exhibit(
        "Rows and columns exchanged", copy_kernel, copy_kernel_fixed, shape, (128, 128), (1, 17),
        run=_copied,
    ),
    Exhibit(
        "More threads than a block may have", DOUBLE, DOUBLE_FIXED, shape, (8, 512), (1, 1025),
        run=_doubled, language="cpp", missing=cuda.cuda_build.why_no_compiler,
    ),
    Exhibit(
        "A view read as if it were a copy", (scale_kernel, scale), (scale_kernel, scale_fixed), shape,
        (1, 64), (2, 2),
        run=lambda function, size: function(_counted(size).t()),
    ),
    Exhibit(
        "A gradient of one number", (relu_backward_kernel, relu_backward),
        (relu_backward_kernel, relu_backward_fixed), length, 1, 2,
        run=_gradient_of_a_sum,
    ),
    Exhibit(
        "Somebody else's eight columns", add_bias_kernel, add_bias_kernel_fixed, shape, (512, 8), (2, 1),
        run=_biased,
    ),
    Exhibit(
        "The padding that was counted", softmax_kernel, softmax_kernel_fixed, numbers,
        [0.1, -2.0, 3.0, 0.7], [0, 0, 0],
    ),
    Exhibit(
        "The sign of a remainder", embedding_kernel, embedding_kernel_fixed, _ids,
        [0, 7, 23, 41], [-2],
        run=_embedded,
    ),
    Exhibit(
        "Floor where ceil was meant", (negate_kernel, negate), (negate_kernel, negate_fixed), length,
        4096, 1,
        run=lambda function, n: function(torch.ones(n), torch.full((n,), torch.nan)),
    ),
)  # fmt: skip
