"""Solutions to the exercises of notebook 24."""

# %%
import lib  # noqa: F401  before triton: with no GPU it switches the interpreter on

# %% 24.1 n / 4 threads take four numbers each; the n % 4 that remain go to the first threads of the grid
wide_kernel = """
__global__ void add_kernel(const float* x, const float* residual, float* y, int64_t n) {
  const int64_t t = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  const int64_t n_wide = n / 4, last = 4 * n_wide + t;
  if (t < n_wide) {
    float4 z = reinterpret_cast<const float4*>(x)[t];
    const float4 r = reinterpret_cast<const float4*>(residual)[t];
    z.x = z.x + r.x < 0.f ? 0.f : z.x + r.x;
    z.y = z.y + r.y < 0.f ? 0.f : z.y + r.y;
    z.z = z.z + r.z < 0.f ? 0.f : z.z + r.z;
    z.w = z.w + r.w < 0.f ? 0.f : z.w + r.w;
    reinterpret_cast<float4*>(y)[t] = z;
  }
  if (last < n) {
    const float z = x[last] + residual[last];
    y[last] = z < 0.f ? 0.f : z;
  }
}
"""


# %% 24.2 every eighth row each, then one thread adds eight numbers; all threads reach the barrier
dbias_kernel = """
__global__ void dbias_kernel(const float* dy, const float* y, float* dbias, int64_t n_rows, int64_t n_cols) {
  __shared__ float partial[8][32];
  const int64_t col = int64_t(blockIdx.x) * 32 + threadIdx.x;
  float total = 0.f;
  if (col < n_cols) {
    for (int64_t row = threadIdx.y; row < n_rows; row += 8) {
      const int64_t i = row * n_cols + col;
      total += y[i] > 0.f ? dy[i] : 0.f;
    }
  }
  partial[threadIdx.y][threadIdx.x] = total;
  __syncthreads();
  if (threadIdx.y == 0 && col < n_cols) {
    for (int k = 1; k < 8; ++k) total += partial[k][threadIdx.x];
    dbias[col] = total;
  }
}
"""


# %% 24.3 of equal maxima the smaller column wins, on both sides of a shuffle. A thread without numbers has -inf
# and column 0, which is also the answer for a row of -inf
place_kernel = """
__global__ void place_kernel(const float* x, int* place, int64_t n_rows, int n_cols) {
  const int t = threadIdx.x;
  const int64_t row = int64_t(blockIdx.x) * 4 + threadIdx.y;
  if (row >= n_rows) return;  // a whole warp
  float top = -INFINITY;
  int at = 0;
  for (int col = t; col < n_cols; col += 32) {
    const float value = x[row * n_cols + col];
    if (value > top) {
      top = value;
      at = col;
    }
  }
  for (int bit = 16; bit > 0; bit /= 2) {
    const float other_top = __shfl_xor_sync(0xffffffffu, top, bit);
    const int other_at = __shfl_xor_sync(0xffffffffu, at, bit);
    if (other_top > top || (other_top == top && other_at < at)) {
      top = other_top;
      at = other_at;
    }
  }
  if (t == 0) place[row] = at;
}
"""


# %% 24.4 the barrier at the end of sum_of_block: all have read the sums before anyone writes the next ones
normalize_kernel = """
__device__ float sum_of_warp(float total) {
  for (int bit = 16; bit > 0; bit /= 2) total += __shfl_xor_sync(0xffffffffu, total, bit);
  return total;
}

__device__ float sum_of_block(float total) {
  __shared__ float sums[32];  // a block has 32 warps at most
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, n_warps = blockDim.x / 32;
  total = sum_of_warp(total);
  if (lane == 0) sums[warp] = total;
  __syncthreads();
  total = sum_of_warp(lane < n_warps ? sums[lane] : 0.f);
  __syncthreads();
  return total;
}

__global__ void normalize_kernel(const float* x, float* y, int64_t n_cols, float eps) {
  x += blockIdx.x * n_cols;
  y += blockIdx.x * n_cols;
  float total = 0.f;
  for (int64_t col = threadIdx.x; col < n_cols; col += blockDim.x) total += x[col];
  const float mean = sum_of_block(total) / n_cols;
  float squares = 0.f;
  for (int64_t col = threadIdx.x; col < n_cols; col += blockDim.x) squares += (x[col] - mean) * (x[col] - mean);
  const float scale = rsqrtf(sum_of_block(squares) / n_cols + eps);
  for (int64_t col = threadIdx.x; col < n_cols; col += blockDim.x) y[col] = (x[col] - mean) * scale;
}
"""
