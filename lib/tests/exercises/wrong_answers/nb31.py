"""Plausible wrong answers to the exercises of notebook 31, named <answer>__<why>: each must be rejected."""

from lib.tests.exercises.wrong_answers import (
    beside_an_empty_kernel,
    solution,
    transposed_taken_as_contiguous,
)

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

_right = solution("31_gelu")


def _rows(old, new):
    return solution("31_gelu", old, new).rows_per_program


@triton.jit
def _tanh_kernel(x_ptr, y_ptr, n_elements, HOW: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    mask = offsets < n_elements
    x = tl.load(x_ptr + offsets, mask=mask).to(tl.float32)
    if HOW == "clamped":
        x = tl.minimum(tl.maximum(x, -20.0), 20.0)
    e = tl.exp(-2 * x if HOW == "turned" else 2 * x)
    y = (1 - e) / (1 + e) if HOW == "turned" else (e - 1) / (e + 1)
    if HOW == "patched":
        y = tl.where(x > 20, 1.0, y)
        y = tl.where(x != x, 0.0, y)
    tl.store(y_ptr + offsets, y, mask=mask)


def _tanh(x, how):
    y = torch.empty_like(x)
    _tanh_kernel[(triton.cdiv(x.numel(), 1024),)](x, y, x.numel(), HOW=how, BLOCK_SIZE=1024)
    return y


def safe_tanh__as_published(x):
    return _tanh(x, "published")


def safe_tanh__other_side_overflows(x):
    return _tanh(x, "turned")


def safe_tanh__clamp_drops_nan(x):
    return _tanh(x, "clamped")


def safe_tanh__nan_made_zero(x):
    return _tanh(x, "patched")


def safe_tanh__without_the_sign(x):
    return _right.safe_tanh(x.abs())


def safe_tanh__eager(x):
    return torch.tanh(x)


smallest_number_that_shows_it__where_e_overflows = 10.0625
smallest_number_that_shows_it__where_the_cube_overflows = 40.34375
smallest_number_that_shows_it__autograd_by_hand = 147.875
smallest_number_that_shows_it__one_before = 255.875
smallest_number_that_shows_it__not_the_smallest = 256.25
smallest_number_that_shows_it__no_float16 = 256.01
smallest_number_that_shows_it__largest = 65504.0
smallest_number_that_shows_it__infinity = float("inf")


@triton.jit
def _slope_kernel(dy_ptr, x_ptr, dx_ptr, n_elements, HOW: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    mask = offsets < n_elements
    dy = tl.load(dy_ptr + offsets, mask=mask).to(tl.float32)
    x = tl.load(x_ptr + offsets, mask=mask).to(tl.float32)
    s = 1 / (1 + tl.exp(-x))
    if HOW == "overflow":
        s = tl.exp(x) / (1 + tl.exp(x))
    slope = s + x * s * (1 - s)
    if HOW == "forgotten":
        slope = s + s * (1 - s)
    tl.store(dx_ptr + offsets, dy * slope, mask=mask)


def _silu(how, contiguous=True, save_more=False):
    class SiLU(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            y = _right.silu(x.detach())
            ctx.save_for_backward(x, *([y] if save_more else []))
            return y

        @staticmethod
        def backward(ctx, dy):
            x, dx = ctx.saved_tensors[0], torch.empty_like(ctx.saved_tensors[0])
            dy = dy.contiguous() if contiguous else dy
            grid = (triton.cdiv(x.numel(), 1024),)
            if how == "right":
                _right.silu_backward_kernel[grid](dy, x, dx, x.numel(), BLOCK_SIZE=1024)
            else:
                _slope_kernel[grid](dy, x, dx, x.numel(), HOW=how, BLOCK_SIZE=1024)
            return dx

    return SiLU.apply


silu__digits_lost = _silu("plain")
silu__overflow = _silu("overflow")
silu__x_forgotten = _silu("forgotten")
silu__saves_y_too = _silu("right", save_more=True)
silu__dy_of_strides_zero = _silu("right", contiguous=False)


def silu__eager(x):
    return F.silu(x)


def silu__forward_alone(x):
    return _right.silu(x.detach())


def silu__gelu(x):
    return F.gelu(x)


rows_per_program__reads_alone = _rows("2 * rows * n_cols", "rows * n_cols")
rows_per_program__elements = _rows(" * itemsize <", " <")
rows_per_program__no_power_of_2 = _rows("rows *= 2", "rows += 1")
rows_per_program__more_than_enough = _rows("< least_bytes", "<= least_bytes")

vector_source__no_tail = _right.vector_source.replace(
    "for (int64_t k = i; k < i + 4 && k < n; ++k)", "if (!vectors) for (int64_t k = i; k < n; ++k)"
)
vector_source__past_the_end = _right.vector_source.replace("i + 4 <= n", "i < n")
vector_source__boundary_not_asked_for = _right.vector_source.replace(
    "const bool vectors =", "const bool vectors = true ||"
)
vector_source__one_element_a_thread = _right.vector_source.replace("float4", "vector4").replace(
    "__device__ __forceinline__ float", "struct vector4 { float x, y, z, w; };\n__device__ float"
)
vector_source__never_wide = _right.vector_source.replace(
    "bool vectors = (", "bool vectors = false && ("
)
vector_source__a_double = _right.vector_source.replace("(1.f + expf", "(1.0 + expf")
vector_source__as_many_threads_as_elements = _right.vector_source.replace(
    "(n + 4 * threads - 1) / (4 * threads)", "(n + threads - 1) / threads"
)


safe_tanh__eager_beside_an_empty_kernel = beside_an_empty_kernel(torch.tanh)


class _EagerBeside(torch.autograd.Function):
    @staticmethod
    @beside_an_empty_kernel
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return torch.nn.functional.silu(x)

    @staticmethod
    @beside_an_empty_kernel
    def backward(ctx, dy):
        x = ctx.saved_tensors[0].double()
        s = torch.sigmoid(x)
        return (dy * s * (1 + x * (1 - s))).to(dy.dtype)


silu__eager_beside_empty_kernels = _EagerBeside.apply
silu__transposed_dy_as_contiguous = transposed_taken_as_contiguous(_right.silu)
