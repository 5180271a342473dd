// Thirty more kernels with one mistake each, as beginners and tired people make them. nvcc compiles
// all of them. The line where checked mode has to stop carries the mark BUG and the kernel's name.
#include <c10/cuda/CUDAException.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <torch/types.h>

#define FULL 0xffffffffu

// ---- Threads that are gone
// --------------------------------------------------------------------------

__global__ void shuffle_after_return(const int* x, int* y, int n) {
  int t = threadIdx.x;
  if (t >= n) return;
  int v = x[t];
  for (int by = 16; by > 0; by /= 2) {
    v += __shfl_down_sync(FULL, v, by);  // BUG shuffle_after_return
  }
  if (t % 32 == 0) atomicAdd(y, v);
}

__global__ void barrier_after_return(const float* x, float* y, int n) {
  __shared__ float row[64];
  int t = threadIdx.x;
  if (t >= n) return;
  row[t] = x[t];
  __syncthreads();  // BUG barrier_after_return
  y[t] = row[n - 1 - t];
}

__global__ void barrier_of_one_warp(const float* x, float* y) {
  __shared__ float row[64];
  int t = threadIdx.x;
  row[t] = x[t];
  if (t < 32) {
    __syncthreads();  // BUG barrier_of_one_warp
    y[t] = row[t];
  }
}

__global__ void barrier_in_uneven_loop(const float* x, float* y, int n) {
  __shared__ float row[64];
  for (int i = threadIdx.x; i < n; i += 64) {
    row[threadIdx.x] = x[i];
    __syncthreads();  // BUG barrier_in_uneven_loop
    y[i] = row[threadIdx.x];
  }
}

__global__ void mask_without_the_lane(const float* x, float* y) {
  float v = x[threadIdx.x];
  if (threadIdx.x < 8) {
    v += __shfl_xor_sync(0x0fu, v, 1);  // BUG mask_without_the_lane
  }
  y[threadIdx.x] = v;
}

__global__ void two_masks(const float* x, float* y) {
  float v = x[threadIdx.x];
  unsigned mask = threadIdx.x % 2 ? 0xffffu : FULL;
  if (threadIdx.x < 16) {
    v += __shfl_xor_sync(mask, v, 2);  // BUG two_masks
  }
  y[threadIdx.x] = v;
}

// ---- Memory that is not written, not there any more, or not one's own
// ----------------------------------

__global__ void add_all(const float* x, float* y, int n) {
  if (threadIdx.x < n) atomicAdd(y, x[threadIdx.x]);  // BUG add_all: into torch::empty
}

__global__ void square(const float* x, float* y) {
  y[threadIdx.x] = x[threadIdx.x] * x[threadIdx.x];
}
__global__ void add_one(const float* x, float* y, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] = x[i] + 1.f;  // BUG add_one: of what `square` has not reached
}

__global__ void copy(const float* x, float* y) {
  y[threadIdx.x] = x[threadIdx.x];  // BUG null: the pointer that copy was given
}

__global__ void pointer_to_a_local(const float* x, float* y) {
  __shared__ float* shared_pointer;
  float local[8];
  for (int i = 0; i < 8; ++i) local[i] = x[8 * threadIdx.x + i];
  if (threadIdx.x == 0) shared_pointer = local;
  __syncthreads();
  y[threadIdx.x] = shared_pointer[threadIdx.x % 8];  // BUG pointer_to_a_local
}

__global__ void into_the_next_array(const float* x, float* y) {
  __shared__ float a[64], b[64];
  float* p = a;
  int t = threadIdx.x;
  a[t] = b[t] = x[t];
  __syncthreads();
  for (int i = 0; i < 4; ++i) {
    y[t] += p[t + 32 * i];  // BUG into_the_next_array
  }
}

__global__ void partials_of_warps_that_are_not(const float* x, float* y) {
  __shared__ float part[32];
  float v = x[threadIdx.x];
  for (int by = 16; by > 0; by /= 2) v += __shfl_xor_sync(FULL, v, by);
  if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = v;
  __syncthreads();
  if (threadIdx.x < 32) {
    v = part[threadIdx.x];  // BUG partials_of_warps_that_are_not: only blockDim / 32 were written
    for (int by = 16; by > 0; by /= 2) v += __shfl_xor_sync(FULL, v, by);
    if (threadIdx.x == 0) y[0] = v;
  }
}

__global__ void workspace_unread(float* memory, float* y) {
  y[threadIdx.x] = memory[threadIdx.x];  // BUG workspace_unread: cudaMalloc writes nothing
}

// ---- Out of bounds
// ---------------------------------------------------------------------------------

__global__ void vectors_past_the_end(const float4* x, float4* y, int n) {
  int i = threadIdx.x;
  if (4 * i < n) y[i] = x[i];  // BUG vectors_past_the_end
}

__global__ void narrow_index(const float* x, float* y) {
  signed char i = threadIdx.x;
  y[threadIdx.x] = x[i];  // BUG narrow_index: 128 is -128
}

__global__ void last_bin(const float* x, int* y) {
  extern __shared__ int bins[];
  if (threadIdx.x < 8) bins[threadIdx.x] = 0;
  __syncthreads();
  int bin = x[threadIdx.x] * 8;
  atomicAdd(&bins[bin], 1);  // BUG last_bin: 1.0 falls into bin 8 of 8
  __syncthreads();
  if (threadIdx.x < 8) y[threadIdx.x] = bins[threadIdx.x];
}

__global__ void tile_past_the_edge(const float* a, float* c, int n) {
  __shared__ float tile[16][16];
  int row = blockIdx.y * 16 + threadIdx.y, col = blockIdx.x * 16 + threadIdx.x;
  tile[threadIdx.y][threadIdx.x] = a[row * n + col];  // BUG tile_past_the_edge
  __syncthreads();
  if (row < n && col < n) c[col * n + row] = tile[threadIdx.y][threadIdx.x];
}

__global__ void halo(const float* x, float* y, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  float sum = 0.f;
  for (int k = -1; k <= 1; ++k) {
    if (i < n) sum += x[i + k];  // BUG halo: both ends lack a neighbour
  }
  if (i < n) y[i] = sum;
}

__global__ void local_array(const float* x, float* y, int n) {
  float v[4];
  for (int i = 0; i < n; ++i) {
    v[i] = x[i];  // BUG local_array
  }
  y[threadIdx.x] = v[threadIdx.x % 4];
}

__global__ void odd_pair(const __half* x, __half* y) {
  const __half2* pairs = reinterpret_cast<const __half2*>(x + 1);
  __half2 v = pairs[threadIdx.x];  // BUG odd_pair
  y[threadIdx.x] = __low2half(v);
}

// ---- Races
// -----------------------------------------------------------------------------------------

__global__ void shift_in_place(float* y, int n) {
  int i = threadIdx.x;
  if (i + 1 < n) {
    y[i] = y[i + 1];  // BUG shift_in_place
  }
}

__global__ void bins_without_atomics(const float* x, int* y) {
  __shared__ int bins[4];
  if (threadIdx.x < 4) bins[threadIdx.x] = 0;
  __syncthreads();
  bins[threadIdx.x % 4] += 1;  // BUG bins_without_atomics
  __syncthreads();
  if (threadIdx.x < 4) y[threadIdx.x] = bins[threadIdx.x];
}

__global__ void scan_in_place(const float* x, float* y) {
  __shared__ float row[64];
  int t = threadIdx.x;
  row[t] = x[t];
  __syncthreads();
  for (int by = 1; by < 64; by *= 2) {
    if (t >= by) {
      row[t] += row[t - by];  // BUG scan_in_place
    }
    __syncthreads();
  }
  y[t] = row[t];
}

__device__ float block_sum(float v) {
  __shared__ float part[2];
  for (int by = 16; by > 0; by /= 2) v += __shfl_xor_sync(FULL, v, by);
  if (threadIdx.x % 32 == 0) {
    // Others still read the sums of the call before.
    part[threadIdx.x / 32] = v;  // BUG one_after_the_other
  }
  __syncthreads();
  return part[0] + part[1];
}
__global__ void one_after_the_other(const float* x, float* y) {
  float mean = block_sum(x[threadIdx.x]) / 64.f;
  float d = x[threadIdx.x] - mean;
  y[threadIdx.x] = block_sum(d * d);
}

__global__ void total_without_barrier(const float* x, float* y) {
  __shared__ float total;
  if (threadIdx.x == 0) total = 0.f;
  __syncthreads();
  atomicAdd(&total, x[threadIdx.x]);  // BUG total_without_barrier
  y[threadIdx.x] = total;
}

__global__ void blocks_share_rows(const float* x, float* y) {
  y[threadIdx.x] = x[blockIdx.x * blockDim.x + threadIdx.x];  // BUG blocks_share_rows
}

__global__ void half_warp_meets_the_wrong_half(const float* x, float* y) {
  __shared__ float row[32];
  int t = threadIdx.x;
  row[t] = x[t];
  __syncwarp(t < 16 ? 0xffffu : 0xffff0000u);
  y[t] = row[31 - t];  // BUG half_warp_meets_the_wrong_half
}

// ---- Kernels that do not end, and arithmetic
// ------------------------------------------------------------

__global__ void registers_forever(const float* x, float* y) {
  float v = x[threadIdx.x];
  while (v < 1e30f) v = v * 0.5f + 1.f;  // BUG registers_forever: it tends to 2
  y[threadIdx.x] = v;
}

__global__ void lock_of_a_warp(int* lock, float* y) {
  while (atomicCAS(lock, 0, 1) != 0) {  // BUG lock_of_a_warp: it is never opened
  }
  y[0] += 1.f;
}

__global__ void divides_by_zero(const int* x, int* y) {
  y[threadIdx.x] = 100 / x[threadIdx.x];  // BUG divides_by_zero
}

__global__ void traps(const float* x, float* y) {
  if (x[threadIdx.x] > 100.f) __trap();  // BUG traps
  y[threadIdx.x] = x[threadIdx.x];
}

torch::Tensor run(torch::Tensor x, int64_t which) {
  auto integers = x.to(torch::kInt), halves = x.to(torch::kHalf);
  auto y = torch::zeros({1024}, x.options()), z = torch::zeros({1024}, integers.options());
  auto fresh = torch::empty({128}, x.options());
  const float* in = x.data_ptr<float>();
  const int* whole = integers.data_ptr<int>();
  float* out = y.data_ptr<float>();
  int* counts = z.data_ptr<int>();
  switch (which) {
    case 0: shuffle_after_return<<<1, 64>>>(whole, counts, 40); break;
    case 1: barrier_after_return<<<1, 64>>>(in, out, 50); break;
    case 2: barrier_of_one_warp<<<1, 64>>>(in, out); break;
    case 3: barrier_in_uneven_loop<<<1, 64>>>(in, out, 100); break;
    case 4: mask_without_the_lane<<<1, 32>>>(in, out); break;
    case 5: two_masks<<<1, 32>>>(in, out); break;
    case 6: add_all<<<1, 32>>>(in, fresh.data_ptr<float>(), 20); break;
    case 7:
      square<<<1, 100>>>(in, fresh.data_ptr<float>());
      add_one<<<2, 64>>>(fresh.data_ptr<float>(), out, 128);
      break;
    case 8: {
      const float* rows = x.view({32, 32}).t().contiguous().data_ptr<float>();
      auto other = torch::ones({1024}, x.options());   // may get the memory that was given back
      copy<<<1, 64>>>(rows, other.data_ptr<float>());  // BUG copy: of a temporary
      break;
    }
    case 9: pointer_to_a_local<<<1, 32>>>(in, out); break;
    case 10: into_the_next_array<<<1, 64>>>(in, out); break;
    case 11: partials_of_warps_that_are_not<<<1, 64>>>(in, out); break;
    case 12: {
      float* memory;
      C10_CUDA_CHECK(cudaMalloc(&memory, 64 * sizeof(float)));
      workspace_unread<<<1, 64>>>(memory, out);
      C10_CUDA_CHECK(cudaFree(memory));
      break;
    }
    case 13: {
      auto part = x.narrow(0, 0, 102).clone();
      vectors_past_the_end<<<1, 32>>>((const float4*)part.data_ptr<float>(), (float4*)out, 102);
      break;
    }
    case 14: narrow_index<<<1, 256>>>(in, out); break;
    case 15: last_bin<<<1, 64, 8 * sizeof(int)>>>(in, counts); break;
    case 16:
      tile_past_the_edge<<<dim3(2, 2), dim3(16, 16)>>>(x.narrow(0, 0, 400).data_ptr<float>(), out,
                                                       20);
      break;
    case 17: halo<<<16, 64>>>(in, out, 1024); break;
    case 18: local_array<<<1, 32>>>(in, out, 5); break;
    case 19:
      odd_pair<<<1, 32>>>((const __half*)halves.data_ptr<at::Half>(),
                          (__half*)halves.data_ptr<at::Half>());
      break;
    case 20: shift_in_place<<<1, 64>>>(out, 64); break;
    case 21: bins_without_atomics<<<1, 64>>>(in, counts); break;
    case 22: scan_in_place<<<1, 64>>>(in, out); break;
    case 23: one_after_the_other<<<1, 64>>>(in, out); break;
    case 24: total_without_barrier<<<1, 64>>>(in, out); break;
    case 25: blocks_share_rows<<<2, 64>>>(in, out); break;
    case 26: half_warp_meets_the_wrong_half<<<1, 32>>>(in, out); break;
    case 27: registers_forever<<<1, 32>>>(in, out); break;
    case 28: lock_of_a_warp<<<1, 32>>>(counts, out); break;
    case 29: divides_by_zero<<<1, 32>>>(counts, counts + 32); break;
    case 30: traps<<<1, 64>>>(in, out); break;
    case 31: copy<<<1, 64, 60000>>>(in, out); break;        // BUG too_much_shared
    case 32: copy<<<dim3(1, 70000), 64>>>(in, out); break;  // BUG too_many_rows
    case 33: copy<<<1, 64>>>(nullptr, out); break;
  }
  C10_CUDA_KERNEL_LAUNCH_CHECK();
  return y;
}
