// Kernels with one mistake each, as one makes them. nvcc compiles all of them. The line where
// checked mode has to stop carries the mark BUG and the kernel's name; test_cuda_on_cpu.py looks
// for it.
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime.h>
#include <torch/types.h>

__global__ void no_guard(const float* x, float* y, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  y[i] = fmaxf(x[i], 0.f);  // BUG no_guard: the last block is not full
}

__global__ void guard_one_too_far(float* y, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i <= n) {
    y[i] = 1.f;  // BUG guard_one_too_far
  }
}

__global__ void before_the_start(const float* x, float* y) {
  int i = threadIdx.x;
  y[i] = x[i] - x[i - 1];  // BUG before_the_start: thread 0 has no left neighbour
}

__global__ void misaligned_float4(const float* x, float* y) {
  const float4* vectors = reinterpret_cast<const float4*>(x + 1);
  float4 v = vectors[threadIdx.x];  // BUG misaligned_float4
  reinterpret_cast<float4*>(y)[threadIdx.x] = v;
}

enum { CORRECT, NO_FIRST_BARRIER, NO_BARRIER_IN_LOOP, PAST_THE_ARRAY };
template <int MISTAKE>
__global__ void tree_sum(const float* x, float* y) {
  __shared__ float part[256];
  int t = threadIdx.x;
  part[t] = x[blockIdx.x * 256 + t];
  if (MISTAKE != NO_FIRST_BARRIER) __syncthreads();
  for (int half = 128; half > 0; half /= 2) {
    if (t < half) {
      part[t] += part[t + half];  // BUG tree_sum: too early, without a barrier above or below
    }
    if (MISTAKE != NO_BARRIER_IN_LOOP) __syncthreads();
  }
  if (t == 0) {
    y[blockIdx.x] = part[MISTAKE == PAST_THE_ARRAY ? 256 : 0];  // BUG past_the_array
  }
}

__global__ void warp_sum_without_syncwarp(const float* x, float* y) {
  __shared__ float part[64];
  int t = threadIdx.x;
  part[t] = x[t];
  part[t + 32] = 0.f;
  for (int half = 16; half > 0; half /= 2) {
    part[t] += part[t + half];  // BUG warp_sum_without_syncwarp: lanes are not in lockstep
  }
  if (t == 0) y[0] = part[0];
}

__global__ void tiles_overwritten(const float* a, const float* b, float* c, int n) {
  __shared__ float a_tile[16][16], b_tile[16][16];
  int tx = threadIdx.x, ty = threadIdx.y;
  int row = blockIdx.y * 16 + ty, col = blockIdx.x * 16 + tx;
  float sum = 0.f;
  for (int k0 = 0; k0 < n; k0 += 16) {
    a_tile[ty][tx] = a[row * n + k0 + tx];
    b_tile[ty][tx] = b[(k0 + ty) * n + col];
    __syncthreads();
    for (int k = 0; k < 16; ++k) {
      sum += a_tile[ty][k] * b_tile[k][tx];  // BUG tiles_overwritten: by who is a tile ahead
    }
  }
  c[row * n + col] = sum;
}

__global__ void neighbour_without_barrier(const float* x, float* y) {
  __shared__ float row[256];
  int t = threadIdx.x;
  row[t] = x[t];
  y[t] = t > 0 ? row[t - 1] : 0.f;  // BUG neighbour_without_barrier
}

__global__ void inner_index(const float* x, float* y) {
  __shared__ float tile[16][16];
  int t = threadIdx.x;
  tile[t / 16][t % 16] = x[t];
  __syncthreads();
  y[t] = tile[t / 17][t % 17];  // BUG inner_index: the next row, still inside the array
}

__global__ void barrier_in_both_branches(const float* x, float* y) {
  __shared__ float row[64];
  int t = threadIdx.x;
  if (t < 32) {
    row[t] = x[t];
    __syncthreads();  // BUG barrier_in_both_branches
  } else {
    row[t] = -x[t];
    __syncthreads();
  }
  y[t] = row[63 - t];
}

__global__ void shuffle_in_branch(const float* x, float* y) {
  float v = x[threadIdx.x];
  if (threadIdx.x < 16) {
    v += __shfl_xor_sync(0xffffffffu, v, 1);
  }
  __syncwarp();  // BUG shuffle_in_branch: the other half of the warp is here
  y[threadIdx.x] = v;
}

__global__ void sum_without_atomic(const float* x, float* y) {
  y[0] += x[blockIdx.x * blockDim.x + threadIdx.x];  // BUG sum_without_atomic
}

__global__ void histogram_zeroed_late(const float* x, float* y) {
  extern __shared__ float bins[];
  if (threadIdx.x < 8) {
    bins[threadIdx.x] = 0.f;  // BUG no_shared_bytes
  }
  atomicAdd(&bins[threadIdx.x % 8], x[threadIdx.x]);  // BUG histogram_zeroed_late
  __syncthreads();
  if (threadIdx.x < 8) y[threadIdx.x] = bins[threadIdx.x];
}

__global__ void reads_another_block(const float* x, float* y) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  float left = blockIdx.x > 0 ? y[i - blockDim.x] : 0.f;  // BUG reads_another_block
  y[i] = x[i] + left;
}

__global__ void waits_for_a_later_block(const float* x, float* y) {
  volatile float* flag = y;
  if (blockIdx.x == 0) {
    while (*flag == 0.f) {  // BUG waits_for_a_later_block
    }
  }
  if (blockIdx.x == 1) *flag = x[0];
}

__global__ void asserts(const float* x, float* y) {
  assert(x[threadIdx.x] < 100.f);  // BUG asserts
  y[threadIdx.x] = sqrtf(x[threadIdx.x]);
}

torch::Tensor run(torch::Tensor x, torch::Tensor y, int64_t which) {
  TORCH_CHECK(x.is_cuda() && y.is_cuda(), "run: x and y must be CUDA tensors");
  auto stream = c10::cuda::getCurrentCUDAStream();
  const float* in = x.data_ptr<float>();
  float* out = y.data_ptr<float>();
  int n = x.numel(), blocks = (n + 255) / 256;
  switch (which) {
    case 0: tree_sum<CORRECT><<<blocks, 256, 0, stream>>>(in, out); break;
    case 1: no_guard<<<blocks, 256, 0, stream>>>(in, out, n); break;
    case 2: guard_one_too_far<<<n / 256 + 1, 256, 0, stream>>>(out, n); break;
    case 3: before_the_start<<<1, 32, 0, stream>>>(in, out); break;
    case 4: misaligned_float4<<<1, 32, 0, stream>>>(in, out); break;
    case 5: tree_sum<NO_FIRST_BARRIER><<<blocks, 256, 0, stream>>>(in, out); break;
    case 6: tree_sum<NO_BARRIER_IN_LOOP><<<blocks, 256, 0, stream>>>(in, out); break;
    case 7: tree_sum<PAST_THE_ARRAY><<<blocks, 256, 0, stream>>>(in, out); break;
    case 8: warp_sum_without_syncwarp<<<1, 32, 0, stream>>>(in, out); break;
    case 9: tiles_overwritten<<<dim3(2, 2), dim3(16, 16), 0, stream>>>(in, in, out, 32); break;
    case 10: neighbour_without_barrier<<<1, 256, 0, stream>>>(in, out); break;
    case 11: inner_index<<<1, 256, 0, stream>>>(in, out); break;
    case 12: barrier_in_both_branches<<<1, 64, 0, stream>>>(in, out); break;
    case 13: shuffle_in_branch<<<1, 32, 0, stream>>>(in, out); break;
    case 14: sum_without_atomic<<<2, 64, 0, stream>>>(in, out); break;
    case 15: histogram_zeroed_late<<<1, 64, 8 * sizeof(float), stream>>>(in, out); break;
    case 16: histogram_zeroed_late<<<1, 64, 0, stream>>>(in, out); break;  // no shared bytes
    case 17: reads_another_block<<<4, 64, 0, stream>>>(in, out); break;
    case 18: no_guard<<<1, 2048, 0, stream>>>(in, out, n); break;  // BUG too_many_threads
    case 19: no_guard<<<0, 256, 0, stream>>>(in, out, n); break;   // BUG empty_grid
    case 20: waits_for_a_later_block<<<2, 1, 0, stream>>>(in, out); break;
    case 21: asserts<<<1, 64, 0, stream>>>(in, out); break;
  }
  C10_CUDA_KERNEL_LAUNCH_CHECK();
  return y;
}
