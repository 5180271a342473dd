"""Plausible wrong answers to the exercises of notebook 24, named <answer>__<why>: each must be rejected."""

import re

from lib.tests.exercises.wrong_answers import solution
from lib.tests.exercises.wrong_answers.nb04 import changed

_right = solution("24_cuda_blocks_and_clusters")

_wide = _right.wide_kernel
wide_kernel__no_tail = re.sub(r"  if \(last < n\) \{.*?\n  \}\n", "", _wide, flags=re.S)
wide_kernel__rounds_up = changed(_wide, "n_wide = n / 4,", "n_wide = (n + 3) / 4,")
wide_kernel__every_thread_does_the_tail = changed(
    _wide, "last = 4 * n_wide + t", "last = n - 1", "if (last < n) {", "if (n % 4) {"
)
wide_kernel__three_of_four = changed(_wide, "    z.w = z.w + r.w < 0.f ? 0.f : z.w + r.w;\n", "")
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


_SCALAR_LOADS = ("float4 z = reinterpret_cast<const float4*>(x)[t];",
    "float4 z = {x[4 * t], x[4 * t + 1], x[4 * t + 2], x[4 * t + 3]};")  # fmt: skip
_SCALAR_STORES = ("    reinterpret_cast<float4*>(y)[t] = z;\n",
    "    y[4 * t] = z.x, y[4 * t + 1] = z.y, y[4 * t + 2] = z.z, y[4 * t + 3] = z.w;\n")  # fmt: skip
wide_kernel__x_one_by_one = changed(_wide, *_SCALAR_LOADS)
wide_kernel__y_one_by_one = changed(_wide, *_SCALAR_STORES)
wide_kernel__residual_alone_is_wide = changed(_wide, *_SCALAR_LOADS, *_SCALAR_STORES)


_dbias = _right.dbias_kernel
dbias_kernel__no_barrier = changed(_dbias, "  __syncthreads();\n", "")
dbias_kernel__returns_before_the_barrier = changed(
    _dbias, "  float total = 0.f;\n", "  if (col >= n_cols) return;\n  float total = 0.f;\n"
)
dbias_kernel__first_eight_rows = changed(_dbias, "row < n_rows;", "row < n_rows && row < 8;")
dbias_kernel__counts_zeros = changed(_dbias, "y[i] > 0.f", "y[i] >= 0.f")
dbias_kernel__one_partial_lost = changed(_dbias, "k < 8", "k < 7")
dbias_kernel__no_mask_of_columns = changed(_dbias, "if (col < n_cols) {\n    for", "{\n    for")
dbias_kernel__inf_times_zero = changed(_dbias, "y[i] > 0.f ? dy[i] : 0.f", "dy[i] * (y[i] > 0.f)")
dbias_kernel__one_place_for_all = changed(
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
_ROWS = "row = threadIdx.y; row < n_rows; row += 8"
dbias_kernel__one_thread_has_all_rows = changed(
    _dbias, _ROWS, "row = 0; row < (threadIdx.y ? 0 : n_rows); ++row"
)
dbias_kernel__seven_threads_of_eight = changed(
    _dbias, _ROWS, "row = threadIdx.y; row < (threadIdx.y < 7 ? n_rows : 0); row += 7"
)

_place = _right.place_kernel
place_kernel__last_of_equal_ones = changed(_place, "other_at < at", "other_at > at")
place_kernel__each_keeps_its_own = changed(_place, " || (other_top == top && other_at < at)", "")
place_kernel__four_steps = changed(_place, "bit = 16", "bit = 8")
place_kernel__place_stays = changed(
    _place,
    "const int other_at = __shfl_xor_sync(0xffffffffu, at, bit);",
    "const int other_at = at;",
)
place_kernel__last_in_a_thread = changed(_place, "value > top", "value >= top")
place_kernel__first_32_columns = changed(
    _place, "col < n_cols; col += 32", "col < n_cols && col < 32; col += 32"
)
place_kernel__begins_at_zero = changed(_place, "float top = -INFINITY;", "float top = 0.f;")
place_kernel__minus_one_for_nothing = changed(_place, "int at = 0;", "int at = -1;")
place_kernel__behind_the_row_for_nothing = changed(_place, "int at = 0;", "int at = n_cols;")
place_kernel__rows_stick_out = changed(
    _place, "  if (row >= n_rows) return;  // a whole warp\n", ""
)
place_kernel__some_threads_stay_away = changed(
    _place, "  float top", "  if (t >= n_cols) return;\n  float top"
)
place_kernel__reads_twice = changed(
    _place,
    "if (t == 0) place[row] = at;",
    "if (x[row * n_cols + at] == top && t == 0) place[row] = at;",
)
place_kernel__one_thread_does_it = """
__global__ void place_kernel(const float* x, int* place, int64_t n_rows, int n_cols) {
  const int64_t row = int64_t(blockIdx.x) * 4 + threadIdx.y;
  if (threadIdx.x > 0 || row >= n_rows) return;
  int at = 0;
  float top = x[row * n_cols];
  for (int col = 1; col < n_cols; ++col) {
    const float value = x[row * n_cols + col];
    if (value > top) top = value, at = col;
  }
  place[row] = at;
}
"""

_normalize = _right.normalize_kernel
_LAST_BARRIER = "  __syncthreads();\n  return total;"
normalize_kernel__array_used_again_too_early = changed(_normalize, _LAST_BARRIER, "  return total;")
normalize_kernel__no_barrier_before_reading = changed(
    _normalize, "total;\n  __syncthreads();\n", "total;\n"
)
normalize_kernel__eight_warps = changed(_normalize, "sums[32]", "sums[8]")
normalize_kernel__reads_warps_that_are_not_there = changed(
    _normalize, "lane < n_warps ? sums[lane] : 0.f", "sums[lane]"
)
normalize_kernel__first_warp_alone_has_the_sum = changed(
    _normalize,
    "total = sum_of_warp(lane < n_warps ? sums[lane] : 0.f);",
    "if (warp == 0) total = sum_of_warp(lane < n_warps ? sums[lane] : 0.f);",
)
normalize_kernel__sum_of_one_warp = changed(_normalize, "sums[lane] : 0.f", "sums[0] : 0.f")
normalize_kernel__four_steps = changed(_normalize, "bit = 16", "bit = 8")
normalize_kernel__large_squares = changed(
    _normalize,
    "squares += (x[col] - mean) * (x[col] - mean)",
    "squares += x[col] * x[col]",
    "sum_of_block(squares) / n_cols",
    "sum_of_block(squares) / n_cols - mean * mean",
)
normalize_kernel__deviations_from_the_first = changed(
    _normalize,
    "squares += (x[col] - mean) * (x[col] - mean)",
    "squares += (x[col] - x[0]) * (x[col] - x[0])",
    "sum_of_block(squares) / n_cols",
    "sum_of_block(squares) / n_cols - (mean - x[0]) * (mean - x[0])",
)
normalize_kernel__variance_of_a_sample = changed(
    _normalize, "sum_of_block(squares) / n_cols", "sum_of_block(squares) / (n_cols - 1)"
)
normalize_kernel__no_eps = changed(_normalize, " + eps", "")
normalize_kernel__rows_no_longer_than_the_block = changed(
    _normalize,
    "col < n_cols; col += blockDim.x) squares",
    "col < blockDim.x && col < n_cols; ++col) squares",
)
normalize_kernel__barrier_for_some = changed(
    _normalize,
    "  if (lane == 0) sums[warp] = total;\n  __syncthreads();",
    "  if (lane == 0) {\n    sums[warp] = total;\n    __syncthreads();\n  }",
)
normalize_kernel__no_shuffles_in_the_first_stage = changed(
    _normalize,
    "  total = sum_of_warp(total);\n  if (lane == 0) sums[warp] = total;",
    """  __shared__ float all[1024];
  all[threadIdx.x] = total;
  __syncthreads();
  if (lane == 0) {
    total = 0.f;
    for (int k = 0; k < 32; ++k) total += all[threadIdx.x + k];
    sums[warp] = total;
  }""",
)
