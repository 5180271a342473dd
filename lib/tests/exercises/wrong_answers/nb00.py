"""Plausible wrong answers to the exercises of notebook 00, named <answer>__<why>: each must be rejected."""

from lib.tests.exercises.wrong_answers import beside_an_empty_kernel

import torch
import triton
import triton.language as tl


def bytes_of_multiply_add__reads_x_twice(m, n, itemsize):
    return 4 * m * n * itemsize


def bytes_of_multiply_add__forgets_the_write(m, n, itemsize):
    return 2 * m * n * itemsize


def bytes_of_multiply_add__counts_elements(m, n, itemsize):
    return 3 * m * n


def traffic_ratio__counts_intermediates_only(k):
    return k - 1


def traffic_ratio__both_ways(k):
    return 2 * k


def least_time_us__adds(bytes_moved, flops, bandwidth_gbps, tflops):
    memory_us, compute_us = bytes_moved / bandwidth_gbps / 1e3, flops / tflops / 1e6
    return memory_us + compute_us, "memory" if memory_us >= compute_us else "compute"


def least_time_us__takes_the_shorter(bytes_moved, flops, bandwidth_gbps, tflops):
    memory_us, compute_us = bytes_moved / bandwidth_gbps / 1e3, flops / tflops / 1e6
    return min(memory_us, compute_us), "memory" if memory_us >= compute_us else "compute"


def least_time_us__milliseconds(bytes_moved, flops, bandwidth_gbps, tflops):
    memory_ms, compute_ms = bytes_moved / bandwidth_gbps / 1e6, flops / tflops / 1e9
    return max(memory_ms, compute_ms), "memory" if memory_ms >= compute_ms else "compute"


def traffic_ratio__one_write_less(k):
    return 2 * k / (k + 1)


def least_time_us__memory_is_always_the_limit(bytes_moved, flops, bandwidth_gbps, tflops):
    return max(bytes_moved / bandwidth_gbps / 1e3, flops / tflops / 1e6), "memory"


def least_time_us__the_limit_is_the_shorter_one(bytes_moved, flops, bandwidth_gbps, tflops):
    memory_us, compute_us = bytes_moved / bandwidth_gbps / 1e3, flops / tflops / 1e6
    return max(memory_us, compute_us), "compute" if memory_us >= compute_us else "memory"


def least_time_us__compares_counts(bytes_moved, flops, bandwidth_gbps, tflops):
    us = max(bytes_moved / bandwidth_gbps / 1e3, flops / tflops / 1e6)
    return us, "memory" if bytes_moved >= flops else "compute"


@triton.jit
def _silu_kernel(
    x_ptr, y_ptr, n_elements, MASK: tl.constexpr, WIDE: tl.constexpr, BLOCK_SIZE: tl.constexpr
):
    offsets = tl.program_id(0) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    mask = offsets < (n_elements if MASK else 1 << 30)
    x = tl.load(x_ptr + offsets, mask=mask)
    if WIDE:
        x = x.to(tl.float32)
        y = x * tl.sigmoid(x)
    else:
        y = x * tl.sigmoid(x.to(tl.float32)).to(x.dtype).to(tl.float16).to(x.dtype)
    tl.store(y_ptr + offsets, y, mask=mask)


def _silu(x, n_programs, mask=True, wide=True):
    y = torch.zeros_like(x)
    _silu_kernel[(n_programs,)](x, y, x.numel(), MASK=mask, WIDE=wide, BLOCK_SIZE=1024)
    return y


def silu__one_program_too_few(x):
    return _silu(x, max(1, x.numel() // 1024))


def silu__last_tile_never_written(x):
    y = torch.empty_like(x)
    _silu_kernel[(x.numel() // 1024,)](x, y, x.numel(), MASK=True, WIDE=True, BLOCK_SIZE=1024)
    return y


@triton.jit
def _sigmoid_of_16_bits_kernel(x_ptr, y_ptr, n_elements, BLOCK_SIZE: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    x = tl.load(x_ptr + offsets, mask=offsets < n_elements)
    tl.store(y_ptr + offsets, x * tl.sigmoid(x), mask=offsets < n_elements)


def silu__sigmoid_of_16_bits(x):
    y = torch.empty_like(x)
    grid = (triton.cdiv(x.numel(), 1024),)
    _sigmoid_of_16_bits_kernel[grid](x, y, x.numel(), BLOCK_SIZE=1024)
    return y


def silu__the_first_tile_alone(x):
    return _silu(x, 1)


def silu__rounds_in_between(x):
    return _silu(x, triton.cdiv(x.numel(), 1024), wide=False)


def silu__sigmoid_only(x):
    return torch.sigmoid(x)


def silu__eager(x):
    return torch.nn.functional.silu(x)


@triton.jit
def _rounds_sigmoid_kernel(x_ptr, y_ptr, n_elements, BLOCK_SIZE: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    x = tl.load(x_ptr + offsets, mask=offsets < n_elements)
    gate = tl.sigmoid(x.to(tl.float32)).to(x.dtype)
    tl.store(y_ptr + offsets, x * gate, mask=offsets < n_elements)


def silu__rounds_the_sigmoid_too(x):
    y = torch.empty_like(x)
    _rounds_sigmoid_kernel[(triton.cdiv(x.numel(), 1024),)](x, y, x.numel(), BLOCK_SIZE=1024)
    return y


silu__eager_beside_an_empty_kernel = beside_an_empty_kernel(torch.nn.functional.silu)


def silu__two_dimensions_at_most(x):
    m, n = x.shape if x.dim() > 1 else (1, len(x))
    return silu__rounds_the_sigmoid_too(x) if m * n == x.numel() else x
