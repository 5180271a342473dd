"""Plausible wrong answers to the exercises of notebook 04, named <answer>__<why>: each must be rejected."""

import re

from lib.tests.exercises.wrong_answers import solution

import torch

_right = solution("04_cuda_by_load_inline")


def changed(source, *changes):
    for old, new in zip(changes[::2], changes[1::2], strict=True):
        assert old in source, old
        source = source.replace(old, new)
    return source


_stride = _right.stride_kernel
stride_kernel__no_loop = changed(
    _stride,
    "for (int64_t i = first; i < n; i += n_threads)",
    "const int64_t i = first;\n  if (i < n)",
)
stride_kernel__moves_on_by_a_block = changed(
    _stride, "int64_t(gridDim.x) * blockDim.x", "blockDim.x"
)
stride_kernel__every_block_does_all = changed(_stride, "int64_t(blockIdx.x) * blockDim.x + ", "")
stride_kernel__one_too_many = changed(_stride, "i < n;", "i <= n;")
stride_kernel__blocks_for_threads = changed(_stride, "int64_t(gridDim.x) * blockDim.x", "gridDim.x")
stride_kernel__fmaxf_drops_nan = changed(_stride, "z < 0.f ? 0.f : z", "fmaxf(z, 0.f)")
_EACH = "each = (n + int64_t(gridDim.x) * blockDim.x - 1) / (int64_t(gridDim.x) * blockDim.x)"
stride_kernel__a_piece_for_each_thread = changed(
    _stride,
    "for (int64_t i = first; i < n; i += n_threads)",
    f"const int64_t {_EACH};\n  for (int64_t i = first * each; i < min(n, (first + 1) * each); ++i)",
)
stride_kernel__a_piece_for_each_block = changed(
    _stride,
    "for (int64_t i = first; i < n; i += n_threads)",
    f"const int64_t {_EACH}, piece = each * blockDim.x, start = int64_t(blockIdx.x) * piece;\n"
    "  for (int64_t i = start + threadIdx.x; i < min(n, start + piece); i += blockDim.x)",
)
stride_kernel__another_name = changed(_stride, "add_relu_kernel", "my_kernel")

_fixed = _right.fixed_source
fixed_source__no_bounds_check = changed(_fixed, "if (i >= n) return;", "")
fixed_source__rounds_down = changed(_fixed, "(n + threads - 1) / threads", "n / threads")
fixed_source__one_block_per_row = changed(
    _fixed,
    "threads = 256, blocks = (n + threads - 1) / threads",
    "threads = x.size(1), blocks = x.size(0)",
)
_column = """
  const int64_t column = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (column >= n_cols) return;
  const int64_t i = int64_t(blockIdx.y) * n_cols + column;
"""
fixed_source__rows_in_the_second_dimension = re.sub(
    r" *const int64_t i = .*\n.*return;\n", _column, _fixed
).replace("<<<blocks,", "<<<dim3((x.size(1) + 255) / 256, x.size(0)),")
fixed_source__no_launch_check = changed(_fixed, "C10_CUDA_KERNEL_LAUNCH_CHECK();", "")
fixed_source__check_before_launch = fixed_source__no_launch_check.replace(
    "add_relu_kernel<<<", "C10_CUDA_KERNEL_LAUNCH_CHECK();\n  add_relu_kernel<<<"
)
_STREAM = ", 0, c10::cuda::getCurrentCUDAStream()"
fixed_source__no_stream = changed(_fixed, _STREAM, "")
fixed_source__default_stream = changed(_fixed, _STREAM, ", 0, 0")
fixed_source__check_in_a_comment = changed(_fixed, "C10_CUDA_KERNEL", "// C10_CUDA_KERNEL")

_safe = _right.safe_source
_SHAPES = " && scale.size(0) == x.size(0)"
safe_source__layout_of_x_unseen = changed(_safe, "  x = x.contiguous();\n", "")
safe_source__layout_of_scale_unseen = changed(_safe, "  scale = scale.contiguous();\n", "")
safe_source__length_unseen = changed(_safe, _SHAPES, "")
safe_source__length_beside_columns = changed(_safe, _SHAPES, " && scale.size(0) == x.size(1)")
safe_source__enough_is_enough = changed(_safe, _SHAPES, " && scale.size(0) >= x.size(0)")
safe_source__dimensions_unseen = changed(_safe, "x.dim() == 2 && ", "")
safe_source__dimensions_of_scale_unseen = changed(_safe, " && scale.dim() == 1", "")
safe_source__two_gpus = changed(_safe, "scale.device() == x.device()", "scale.is_cuda()")
safe_source__empty_grid = changed(_safe, "  if (n == 0) return y;\n", "")
safe_source__device_of_one = changed(
    _safe,
    " && scale.device() == x.device()",
    "",
    "const c10::cuda::CUDAGuard guard(x.device());",
    "",
)
safe_source__no_device = changed(
    _safe,
    "x.is_cuda() && scale.device() == x.device()",
    "true",
    "const c10::cuda::CUDAGuard guard(x.device());",
    "",
)
_NAMED = "const c10::cuda::CUDAGuard guard(x.device());"
safe_source__no_guard = changed(_safe, _NAMED, "")
safe_source__guard_of_one_line = changed(_safe, _NAMED, "c10::cuda::CUDAGuard{x.device()};")
safe_source__guard_behind_the_launch = changed(
    safe_source__no_guard,
    "  C10_CUDA_KERNEL_LAUNCH_CHECK();",
    f"  C10_CUDA_KERNEL_LAUNCH_CHECK();\n  {_NAMED}",
)
safe_source__no_stream = changed(_safe, _STREAM, "")
safe_source__reinterprets_other_dtypes = re.sub(
    r"  TORCH_CHECK\(x\.scalar_type.*\n.*\n", "", _safe
).replace("scale.data_ptr<float>()", "reinterpret_cast<float*>(scale.data_ptr())")


def _build(old, new, declaration="torch::Tensor add_relu_dx(torch::Tensor dy, torch::Tensor y);"):
    source = _right.dx_source.replace(old, new)

    def build(load_inline):
        return load_inline("dx", declaration, source, functions=["add_relu_dx"])

    return build


build__no_bounds_check = _build("if (i < n) ", "")
build__rounds_down = _build("(n + threads - 1) / threads", "n / threads")
build__nan_stops_dy = _build("y[i] <= 0.f ? 0.f : dy[i]", "y[i] > 0.f ? dy[i] : 0.f")
build__inf_times_zero = _build("y[i] <= 0.f ? 0.f : dy[i]", "dy[i] * !(y[i] <= 0.f)")
build__zero_passes = _build("y[i] <= 0.f", "y[i] < 0.f")
build__no_launch_check = _build("C10_CUDA_KERNEL_LAUNCH_CHECK();", "")
build__no_stream = _build(_STREAM, "")
build__not_declared = _build("", "", declaration="")


def build__without_cuda(load_inline):
    return torch.ops.aten
