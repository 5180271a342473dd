"""Plausible wrong answers to the exercises of notebook 22, named <answer>__<why>: each must be rejected."""

from lib.nogpu.compile_only import compile_for
from lib.tests.exercises.wrong_answers import solution

import triton
import triton.language as tl

_right = solution("22_ptx_and_sass")


def loads_per_thread__one_per_element(block_size, num_warps, itemsize):
    return max(1, block_size // (32 * num_warps))


def loads_per_thread__always_four_elements(block_size, num_warps, itemsize):
    return -(-max(1, block_size // (32 * num_warps)) // 4)


def loads_per_thread__rounds_down(block_size, num_warps, itemsize):
    return block_size // (32 * num_warps) * itemsize // 16


def loads_per_thread__of_the_whole_program(block_size, num_warps, itemsize):
    return block_size * itemsize // 16


@triton.jit
def short_relu6_kernel__two_wheres(x_ptr, y_ptr, n_elements, BLOCK_SIZE: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    mask = offsets < n_elements
    x = tl.load(x_ptr + offsets, mask=mask)
    y = tl.where(x < 0, 0.0, tl.where(x > 6, 6.0, x))
    tl.store(y_ptr + offsets, y, mask=mask)


@triton.jit
def short_relu6_kernel__clamp_drops_nan(x_ptr, y_ptr, n_elements, BLOCK_SIZE: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    mask = offsets < n_elements
    x = tl.load(x_ptr + offsets, mask=mask)
    tl.store(y_ptr + offsets, tl.clamp(x, 0.0, 6.0), mask=mask)


@triton.jit
def short_relu6_kernel__minimum_drops_nan(x_ptr, y_ptr, n_elements, BLOCK_SIZE: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    mask = offsets < n_elements
    x = tl.load(x_ptr + offsets, mask=mask)
    y = tl.minimum(tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL), 6.0)
    tl.store(y_ptr + offsets, y, mask=mask)


@triton.jit
def short_relu6_kernel__no_cap(x_ptr, y_ptr, n_elements, BLOCK_SIZE: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    mask = offsets < n_elements
    x = tl.load(x_ptr + offsets, mask=mask)
    y = tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)
    tl.store(y_ptr + offsets, y, mask=mask)


@triton.jit
def wide_pairs_kernel__strides_by_two(x_ptr, y_ptr, n_pairs, BLOCK_SIZE: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    mask = offsets < n_pairs
    first = tl.load(x_ptr + 2 * offsets, mask=mask)
    second = tl.load(x_ptr + 2 * offsets + 1, mask=mask)
    tl.store(y_ptr + offsets, first * second, mask=mask)


@triton.jit
def wide_pairs_kernel__one_pair_a_load(x_ptr, y_ptr, n_pairs, BLOCK_SIZE: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    mask = offsets < n_pairs
    pairs = 2 * offsets[:, None] + tl.arange(0, 2)[None, :]
    first, second = tl.split(tl.load(x_ptr + pairs, mask=mask[:, None]))
    tl.store(y_ptr + offsets, first * second, mask=mask)


@triton.jit
def wide_pairs_kernel__halves_for_pairs(x_ptr, y_ptr, n_pairs, BLOCK_SIZE: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    mask = offsets < n_pairs
    first = tl.load(x_ptr + offsets, mask=mask)
    tl.store(y_ptr + offsets, first * tl.load(x_ptr + n_pairs + offsets, mask=mask), mask=mask)


@triton.jit
def wide_pairs_kernel__no_mask(x_ptr, y_ptr, n_pairs, BLOCK_SIZE: tl.constexpr):
    start = tl.program_id(0) * BLOCK_SIZE
    x = tl.load(x_ptr + 2 * start + tl.arange(0, 2 * BLOCK_SIZE))
    first, second = tl.split(tl.reshape(x, (BLOCK_SIZE, 2)))
    offsets = start + tl.arange(0, BLOCK_SIZE)
    tl.store(y_ptr + offsets, first * second, mask=offsets < n_pairs)


@triton.jit
def wide_pairs_kernel__reordered(x_ptr, y_ptr, n_pairs, BLOCK_SIZE: tl.constexpr):
    start = tl.program_id(0) * BLOCK_SIZE
    in_offsets = 2 * start + tl.arange(0, 2 * BLOCK_SIZE)
    x = tl.load(x_ptr + in_offsets, mask=in_offsets < 2 * n_pairs)
    first, second = tl.split(tl.reshape(x, (BLOCK_SIZE, 2), can_reorder=True))
    offsets = start + tl.arange(0, BLOCK_SIZE)
    tl.store(y_ptr + offsets, first * second, mask=offsets < n_pairs)


_float = _right.float_kernel
float_kernel__beta_a_double = _float.replace("float beta", "double beta")
float_kernel__beta_cast_inside = _float.replace("float beta", "double wide").replace(
    "return;", "return;\n  const float beta = wide;"
)
float_kernel__double_functions = """
__global__ void softplus_kernel(const float* x, float* y, int64_t n, float beta) {
  const int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= n) return;
  y[i] = (float)(max(x[i], 0.0) + log(1.0 + exp(-beta * fabs(x[i]))) / beta);
}
"""
float_kernel__overflows = _float.replace(
    "fmaxf(x[i], 0.f) + log1pf(expf(-beta * fabsf(x[i]))) / beta",
    "logf(1.f + expf(beta * x[i])) / beta",
)
float_kernel__another_function = _float.replace("log1pf(", "expf(")

_matmul = {"kernel": _right.matmul_kernel, "signature": _right.matmul, "arch": 90}


def _tile(rows, cols):
    return {"BLOCK_M": rows, "BLOCK_N": cols, "BLOCK_K": 32}


fitting__default_warps = compile_for(**_matmul)
fitting__eight_warps = compile_for(**_matmul, num_warps=8)
fitting__a_smaller_tile = compile_for(**_matmul, constexprs=_tile(128, 128), num_warps=16)
fitting__another_gpu = compile_for(**_matmul | {"arch": 80}, num_warps=16)
fitting__only_the_numbers = (128, 256, 16)
float_kernel__one_thread_block = _right.float_kernel.replace(
    "int64_t(blockIdx.x) * blockDim.x + ", ""
)
float_kernel__no_bounds_check = _right.float_kernel.replace("if (i >= n) return;", "")
