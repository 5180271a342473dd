// Kernels and host code as in books, courses and one-file language models, with one mistake each; nvcc
// compiles them. The line where checked mode has to stop carries the mark BUG and the mistake's name.
#include <cuda_runtime.h>
#include <torch/types.h>

#include <vector>

#define CEIL_DIV(a, b) (((a) + (b) - 1) / (b))
#define CHECK(call) TORCH_CHECK((call) == cudaSuccess, #call)

// ---- Layers of a language model

__global__ void gelu_forward(float* out, const float* inp, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  float xi = inp[i];  // BUG no_tail_guard
  out[i] = 0.5f * xi * (1.f + tanhf(0.7978845608f * (xi + 0.044715f * xi * xi * xi)));
}

__global__ void layernorm_forward(float* out, const float* inp, int C) {
  __shared__ float partial[4];
  const float* x = inp + blockIdx.x * C;
  float sum = 0.f;
  for (int i = threadIdx.x; i < C; i += blockDim.x) sum += x[i];
  for (int by = 16; by > 0; by /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, by);
  float* own = partial + threadIdx.x / 32;
  if (threadIdx.x % 32 == 0) *own = sum;  // BUG more_warps_than_partials
  __syncthreads();
  float mean = 0.f;
  for (int w = 0; w < blockDim.x / 32; ++w) mean += partial[w] / C;
  for (int i = threadIdx.x; i < C; i += blockDim.x) out[blockIdx.x * C + i] = x[i] - mean;
}

__global__ void softmax_forward(float* out, const float* inp, int C) {
  __shared__ float warp_max[2];
  float x = inp[threadIdx.x], m = x;
  for (int by = 16; by > 0; by /= 2) m = fmaxf(m, __shfl_xor_sync(0xffffffffu, m, by));
  if (threadIdx.x % 32 == 0) warp_max[threadIdx.x / 32] = m;
  m = fmaxf(warp_max[0], warp_max[1]);  // BUG maximum_before_the_barrier
  out[threadIdx.x] = expf(x - m);
}

__global__ void encoder_backward(float* dwte, const float* dout, const int* inp, int BT, int C) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= BT * C) return;
  int bt = i / C, c = i % C;
  dwte[inp[bt] * C + c] += dout[i];  // BUG gradient_without_atomics
}

__global__ void crossentropy_forward(float* losses, const float* probs, const int* targets, int BT,
                                     int V) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < BT) {
    int ix = targets[i];
    losses[i] = -logf(probs[i * V + ix]);  // BUG ignored_target
  }
}

__global__ void adamw(float* p, const float* g, float* m, float* v, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  m[i] = 0.9f * m[i] + 0.1f * g[i];
  v[i] = 0.95f * v[i] + 0.05f * g[i] * g[i];  // BUG half_a_moment
  p[i] -= 1e-3f * m[i] / (sqrtf(v[i]) + 1e-8f);
}

__global__ void residual_sum(const float* x, float* total, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) atomicAdd(total, x[i]);  // BUG accumulator_never_zeroed
}

// ---- Sums, tiles, stencils

__global__ void saxpy(int n, float a, const float* x, float* y) {
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i <= n; i += gridDim.x * blockDim.x) {
    y[i] = a * x[i] + y[i];  // BUG one_too_many
  }
}

__global__ void matmul_tiled(const float* a, const float* b, float* c, int n) {
  __shared__ float s_a[8][8], s_b[8][8];
  int row = blockIdx.y * 8 + threadIdx.y, col = blockIdx.x * 8 + threadIdx.x;
  float sum = 0.f;
  for (int k0 = 0; k0 < n; k0 += 8) {
    s_a[threadIdx.y][threadIdx.x] = a[row * n + k0 + threadIdx.x];
    s_b[threadIdx.y][threadIdx.x] = b[(k0 + threadIdx.y) * n + col];
    __syncthreads();
    for (int k = 0; k < 8; ++k) {
      sum += s_a[threadIdx.y][k] * s_b[k][threadIdx.x];  // BUG no_second_barrier after this loop
    }
  }
  c[row * n + col] = sum;
}

__global__ void transpose(const float* in, float* out, int n) {
  __shared__ float tile[16][17];
  int x = blockIdx.x * 16 + threadIdx.x, y = blockIdx.y * 16 + threadIdx.y;
  tile[threadIdx.y][threadIdx.x] = in[y * n + x];
  x = blockIdx.y * 16 + threadIdx.x;
  y = blockIdx.x * 16 + threadIdx.y;
  out[y * n + x] = tile[threadIdx.x][threadIdx.y];  // BUG tile_without_barrier
}

__global__ void reduce_tree(const float* in, float* out) {
  extern __shared__ float sdata[];
  int tid = threadIdx.x;
  sdata[tid] = in[tid];
  __syncthreads();
  for (int s = blockDim.x / 2; s > 0; s >>= 1) {
    if (tid < s) sdata[tid] += sdata[tid + s];  // BUG tree_without_barrier
  }
  if (tid == 0) *out = sdata[0];
}

__global__ void dot(const float* a, const float* b, float* c, int n) {
  __shared__ float cache[64];
  int i = threadIdx.x;
  if (i < n) cache[i] = a[i] * b[i];
  __syncthreads();
  for (int half = 32; half > 0; half /= 2) {
    if (i < half) cache[i] += cache[i + half];  // BUG tail_of_the_cache
    __syncthreads();
  }
  if (i == 0) *c = cache[0];
}

__global__ void histogram(const unsigned char* data, int n, int* bins) {
  __shared__ int local[16];
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) atomicAdd(&local[data[i] % 16], 1);  // BUG bins_never_zeroed
  __syncthreads();
  if (threadIdx.x < 16) atomicAdd(&bins[threadIdx.x], local[threadIdx.x]);
}

__global__ void stencil_1d(const float* in, float* out, int n) {
  const int radius = 3;
  __shared__ float temp[64 + 2 * radius];
  int g = blockIdx.x * blockDim.x + threadIdx.x, l = threadIdx.x + radius;
  temp[l] = in[g];
  if (threadIdx.x < radius) {
    temp[l - radius] = g >= radius ? in[g - radius] : 0.f;
    temp[l + 64] = g + 64 < n ? in[g + 64] : 0.f;
  }
  float result = 0.f;
  for (int k = -radius; k <= radius; ++k) {
    result += temp[l + k];  // BUG halo_without_barrier
  }
  out[g] = result;
}

__global__ void scan_naive(float* data) {
  for (int by = 1; by < 64; by *= 2) {
    float before = threadIdx.x >= by ? data[threadIdx.x - by] : 0.f;  // BUG one_buffer
    data[threadIdx.x] += before;
    __syncthreads();
  }
}

__global__ void blur(const float* in, float* out, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  float sum = 0.f;
  for (int k = -2; k <= 2; ++k) {
    sum += in[min(i + k, n - 1)];  // BUG left_border
  }
  out[i] = sum / 5.f;
}

__global__ void flip_image(const float* in, float* out, int width, int height) {
  int col = blockIdx.x * blockDim.x + threadIdx.x, row = blockIdx.y * blockDim.y + threadIdx.y;
  if (col < width && row < height) {
    out[row * width + width - 1 - col] = in[col * width + row];  // BUG rows_for_columns
  }
}

// ---- What the host gets wrong

__global__ void twice(const float* x, float* y, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] = 2.f * x[i];  // BUG bytes_for_elements; BUG vector_of_the_host
}
__global__ void count_positive(const float* x, int* count, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n && x[i] > 0.f) atomicAdd(count, 1);  // BUG address_of_a_local
}
__global__ void twice_of_one_more(const float* x, float* y, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] = 2.f * x[i + 1];  // BUG where_more_was_freed
}
__constant__ float mask[5];
__global__ void read_mask(float* y) { y[threadIdx.x] = mask[threadIdx.x % 5]; }

torch::Tensor run(torch::Tensor x, int64_t which) {
  int n = 1000;  // of 1024
  auto small = x.narrow(0, 0, n).clone(), y = torch::zeros({n}, x.options());
  auto integers = torch::zeros({1024}, x.options().dtype(torch::kInt));
  auto bytes = torch::ones({1024}, x.options().dtype(torch::kByte));
  const float* in = x.data_ptr<float>();
  float* out = y.data_ptr<float>();
  int* ints = integers.data_ptr<int>();
  std::vector<float> host(n, 1.f);
  float *d_x, *d_y;
  CHECK(cudaMalloc((void**)&d_x, n * sizeof(float)));
  CHECK(cudaMalloc((void**)&d_y, n * sizeof(float)));
  size_t size = n * sizeof(float);
  switch (which) {
    case 0: gelu_forward<<<CEIL_DIV(n, 128), 128>>>(out, small.data_ptr<float>(), n); break;
    case 1: layernorm_forward<<<2, 256>>>(out, in, 256); break;
    case 2: softmax_forward<<<1, 64>>>(out, in, 64); break;
    case 3: encoder_backward<<<2, 64>>>(out, in, ints, 16, 8); break;
    case 4:
      integers.fill_(-100);
      crossentropy_forward<<<1, 32>>>(out, in, ints, 32, 30);
      break;
    case 5: {
      CHECK(cudaMalloc((void**)&d_y, size / 2));
      CHECK(cudaMemset(d_x, 0, size));
      CHECK(cudaMemset(d_y, 0, size / 2));
      adamw<<<CEIL_DIV(n, 256), 256>>>(out, in, d_x, d_y, n);
      break;
    }
    case 6: residual_sum<<<4, 256>>>(in, d_x, n); break;
    case 7: saxpy<<<2, 128>>>(n, 2.f, in, out); break;
    case 8: matmul_tiled<<<dim3(2, 2), dim3(8, 8)>>>(in, in, out, 16); break;
    case 9: transpose<<<dim3(1, 1), dim3(16, 16)>>>(in, out, 16); break;
    case 10: reduce_tree<<<1, 256, 256 * sizeof(float)>>>(in, out); break;
    case 11: dot<<<1, 64>>>(in, in, out, 50); break;
    case 12: histogram<<<4, 256>>>(bytes.data_ptr<unsigned char>(), 1024, ints); break;
    case 13: stencil_1d<<<4, 64>>>(in, out, 1024); break;
    case 14: scan_naive<<<1, 64>>>(out); break;
    case 15: blur<<<8, 128>>>(in, out, n); break;
    case 16: flip_image<<<dim3(5, 2), dim3(8, 8)>>>(small.data_ptr<float>(), out, 40, 10); break;
    case 17:
      CHECK(cudaMemcpy(d_x, host.data(), n, cudaMemcpyHostToDevice));  // without sizeof
      twice<<<8, 128>>>(d_x, d_y, n);
      break;
    case 18:
      CHECK(cudaMemset(d_x, 0, size));
      CHECK(cudaMemcpy(d_x, in, size + 96, cudaMemcpyDeviceToDevice));  // BUG copy_too_long
      break;
    case 19:
      CHECK(cudaMemcpy(d_x, host.data(), size, cudaMemcpyDeviceToHost));  // BUG wrong_direction
      break;
    case 20:
      CHECK(cudaMemset(d_x, 0, size));
      CHECK(cudaFree(d_x));
      twice<<<8, 128>>>(d_x, d_y, n);  // BUG freed_before
      break;
    case 21: twice<<<8, 128>>>(host.data(), d_y, n); break;
    case 22: {
      int count = 0;
      count_positive<<<8, 128>>>(in, &count, n);
      y.fill_(count);
      break;
    }
    case 23: CHECK(cudaMemset(host.data(), 0, size)); break;  // BUG fills_the_host
    case 24:
      CHECK(cudaMemcpyToSymbol(mask, host.data(), 7 * sizeof(float)));  // BUG past_the_symbol
      read_mask<<<1, 5>>>(out);
      break;
    case 25:
      CHECK(cudaMemset(d_y, 0, (n + 1) * sizeof(double)));  // BUG fill_too_long
      break;
    case 26: {
      float* gone;
      CHECK(cudaMalloc(&gone, size));
      CHECK(cudaFree(gone));
      CHECK(cudaMemcpy(host.data(), gone, size, cudaMemcpyDeviceToHost));  // BUG copy_of_freed
      break;
    }
    case 27: {
      y = torch::zeros({32 * n}, x.options());
      float *once_longer, *now;
      CHECK(cudaMalloc(&once_longer, 64 * size));
      CHECK(cudaMemset(once_longer, 0, 64 * size));
      twice<<<8, 128>>>(once_longer, y.data_ptr<float>(), n);
      CHECK(cudaFree(once_longer));
      CHECK(cudaMalloc(&now, 32 * size));
      CHECK(cudaMemset(now, 0, 32 * size));
      twice_of_one_more<<<250, 128>>>(now, y.data_ptr<float>(), 32 * n);
      CHECK(cudaFree(now));
      break;
    }
  }
  if (which != 20) cudaFree(d_x);
  cudaFree(d_y);
  return y;
}
