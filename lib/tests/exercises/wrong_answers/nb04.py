"""Plausible wrong answers to the exercises of notebook 04, named <answer>__<why>: each must be rejected."""

import re

from lib.tests.exercises.wrong_answers import solution

import torch

_right = solution("04_cuda_by_load_inline")


def _changed(source, *changes):
    for old, new in zip(changes[::2], changes[1::2], strict=True):
        assert old in source, old
        source = source.replace(old, new)
    return source


_stride = _right.stride_kernel
stride_kernel__no_loop = _changed(
    _stride,
    "for (int64_t i = first; i < n; i += n_threads)",
    "const int64_t i = first;\n  if (i < n)",
)
stride_kernel__moves_on_by_a_block = _changed(
    _stride, "int64_t(gridDim.x) * blockDim.x", "blockDim.x"
)
stride_kernel__every_block_does_all = _changed(_stride, "int64_t(blockIdx.x) * blockDim.x + ", "")
stride_kernel__one_too_many = _changed(_stride, "i < n;", "i <= n;")
stride_kernel__blocks_for_threads = _changed(
    _stride, "int64_t(gridDim.x) * blockDim.x", "gridDim.x"
)
stride_kernel__fmaxf_drops_nan = _changed(_stride, "z < 0.f ? 0.f : z", "fmaxf(z, 0.f)")
stride_kernel__another_name = _changed(_stride, "add_relu_kernel", "my_kernel")

_fixed = _right.fixed_source
fixed_source__no_bounds_check = _changed(_fixed, "if (i >= n) return;", "")
fixed_source__rounds_down = _changed(_fixed, "(n + threads - 1) / threads", "n / threads")
fixed_source__one_block_per_row = _changed(
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
fixed_source__no_launch_check = _changed(_fixed, "C10_CUDA_KERNEL_LAUNCH_CHECK();", "")
fixed_source__check_before_launch = fixed_source__no_launch_check.replace(
    "add_relu_kernel<<<", "C10_CUDA_KERNEL_LAUNCH_CHECK();\n  add_relu_kernel<<<"
)
_STREAM = ", 0, c10::cuda::getCurrentCUDAStream()"
fixed_source__no_stream = _changed(_fixed, _STREAM, "")
fixed_source__default_stream = _changed(_fixed, _STREAM, ", 0, 0")
fixed_source__check_in_a_comment = _changed(_fixed, "C10_CUDA_KERNEL", "// C10_CUDA_KERNEL")

_safe = _right.safe_source
_SHAPES = " && scale.size(0) == x.size(0)"
safe_source__layout_of_x_unseen = _changed(_safe, "  x = x.contiguous();\n", "")
safe_source__layout_of_scale_unseen = _changed(_safe, "  scale = scale.contiguous();\n", "")
safe_source__length_unseen = _changed(_safe, _SHAPES, "")
safe_source__length_beside_columns = _changed(_safe, _SHAPES, " && scale.size(0) == x.size(1)")
safe_source__enough_is_enough = _changed(_safe, _SHAPES, " && scale.size(0) >= x.size(0)")
safe_source__dimensions_unseen = _changed(_safe, "x.dim() == 2 && ", "")
safe_source__empty_grid = _changed(_safe, "  if (n == 0) return y;\n", "")
safe_source__device_of_one = _changed(
    _safe,
    " && scale.device() == x.device()",
    "",
    "const c10::cuda::CUDAGuard guard(x.device());",
    "",
)
safe_source__no_device = _changed(
    _safe,
    "x.is_cuda() && scale.device() == x.device()",
    "true",
    "const c10::cuda::CUDAGuard guard(x.device());",
    "",
)
safe_source__no_stream = _changed(_safe, _STREAM, "")
safe_source__reinterprets_other_dtypes = re.sub(
    r"  TORCH_CHECK\(x\.scalar_type.*\n.*\n", "", _safe
).replace("scale.data_ptr<float>()", "reinterpret_cast<float*>(scale.data_ptr())")

_wide = _right.wide_kernel
wide_kernel__no_tail = re.sub(r"  if \(last < n\) \{.*?\n  \}\n", "", _wide, flags=re.S)
wide_kernel__rounds_up = _changed(_wide, "n_wide = n / 4,", "n_wide = (n + 3) / 4,")
wide_kernel__every_thread_does_the_tail = _changed(
    _wide, "last = 4 * n_wide + t", "last = n - 1", "if (last < n) {", "if (n % 4) {"
)
wide_kernel__three_of_four = _changed(_wide, "    z.w = z.w + r.w < 0.f ? 0.f : z.w + r.w;\n", "")
wide_kernel__one_at_a_time = """
__global__ void add_kernel(const float* x, const float* residual, float* y, int64_t n) {
  const int64_t t = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  const int64_t n_threads = int64_t(gridDim.x) * blockDim.x;
  for (int64_t i = t; i < n; i += n_threads) {  // no float4
    const float z = x[i] + residual[i];
    y[i] = z < 0.f ? 0.f : z;
  }
}
"""
wide_kernel__four_neighbours_one_by_one = """
__global__ void add_kernel(const float* x, const float* residual, float* y, int64_t n) {
  const int64_t t = 4 * (int64_t(blockIdx.x) * blockDim.x + threadIdx.x);
  for (int64_t i = t; i < n && (i < t + 4 || t >= n - n % 4 - 4); ++i) {
    const float z = x[i] + residual[i];
    y[i] = z < 0.f ? 0.f : z;
  }
}
"""
wide_kernel__eight_bytes = re.sub(
    r"  if \(t < n_wide\) \{.*?\n  \}\n",
    """  for (int64_t k = 2 * t; t < n_wide && k < 2 * t + 2; ++k) {
    float2 z = reinterpret_cast<const float2*>(x)[k];
    const float2 r = reinterpret_cast<const float2*>(residual)[k];
    z.x = z.x + r.x < 0.f ? 0.f : z.x + r.x;
    z.y = z.y + r.y < 0.f ? 0.f : z.y + r.y;
    reinterpret_cast<float2*>(y)[k] = z;
  }
""",
    _wide,
    flags=re.S,
)


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


_dbias = _right.dbias_kernel
dbias_kernel__no_barrier = _changed(_dbias, "  __syncthreads();\n", "")
dbias_kernel__returns_before_the_barrier = _changed(
    _dbias, "  float total = 0.f;\n", "  if (col >= n_cols) return;\n  float total = 0.f;\n"
)
dbias_kernel__first_eight_rows = _changed(_dbias, "row < n_rows;", "row < n_rows && row < 8;")
dbias_kernel__counts_zeros = _changed(_dbias, "y[i] > 0.f", "y[i] >= 0.f")
dbias_kernel__one_partial_lost = _changed(_dbias, "k < 8", "k < 7")
dbias_kernel__no_mask_of_columns = _changed(_dbias, "if (col < n_cols) {\n    for", "{\n    for")
dbias_kernel__inf_times_zero = _changed(_dbias, "y[i] > 0.f ? dy[i] : 0.f", "dy[i] * (y[i] > 0.f)")
dbias_kernel__one_place_for_all = _changed(
    _dbias, "partial[8][32]", "partial[32]", "partial[threadIdx.y][threadIdx.x] = total",
    "partial[threadIdx.x] += total", "partial[k][threadIdx.x]", "partial[threadIdx.x]",
)  # fmt: skip
dbias_kernel__atomics_in_any_order = """
__global__ void dbias_kernel(const float* dy, const float* y, float* dbias, int64_t n_rows, int64_t n_cols) {
  const int64_t col = int64_t(blockIdx.x) * 32 + threadIdx.x;
  if (col >= n_cols) return;
  if (threadIdx.y == 0) dbias[col] = 0.f;
  __syncthreads();
  for (int64_t row = threadIdx.y; row < n_rows; row += 8) {
    if (y[row * n_cols + col] > 0.f) atomicAdd(dbias + col, dy[row * n_cols + col]);
  }
}
"""
dbias_kernel__one_thread_does_it = """
__global__ void dbias_kernel(const float* dy, const float* y, float* dbias, int64_t n_rows, int64_t n_cols) {
  const int64_t col = int64_t(blockIdx.x) * 32 + threadIdx.x;
  if (threadIdx.y || col >= n_cols) return;
  float total = 0.f;
  for (int64_t row = 0; row < n_rows; ++row) {
    if (y[row * n_cols + col] > 0.f) total += dy[row * n_cols + col];
  }
  dbias[col] = total;
}
"""
