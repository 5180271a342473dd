// Thirty correct programs in the style of courses, of the CUDA programming guide and of PyTorch's
// tutorial on extensions. Plain and checked they give the right answer, and the checker is silent.
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <torch/types.h>

#include <vector>

#define FULL 0xffffffffu
#define CHECK(call)                                                              \
  do {                                                                           \
    cudaError_t status = (call);                                                 \
    TORCH_CHECK(status == cudaSuccess, #call, ": ", cudaGetErrorString(status)); \
  } while (0)

// ---- First programs: memory of one's own, events, streams, launches by occupancy
// --------------------------

__global__ void saxpy(int n, float a, const float* x, float* y) {
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += blockDim.x * gridDim.x) {
    y[i] = a * x[i] + y[i];
  }
}

torch::Tensor memory_of_its_own(torch::Tensor x) {
  int n = x.numel();
  std::vector<float> host(n);
  float *d_x = NULL, *d_y = NULL, milliseconds = -1.f;
  CHECK(cudaMalloc((void**)&d_x, n * sizeof(float)));
  CHECK(cudaMalloc(&d_y, n * sizeof(float)));
  CHECK(cudaMemcpy(d_x, x.data_ptr<float>(), n * sizeof(float), cudaMemcpyHostToDevice));
  CHECK(cudaMemset(d_y, 0, n * sizeof(float)));
  cudaEvent_t start, stop;
  CHECK(cudaEventCreate(&start));
  CHECK(cudaEventCreate(&stop));
  cudaStream_t stream;
  CHECK(cudaStreamCreate(&stream));
  CHECK(cudaEventRecord(start, stream));
  saxpy<<<4, 64, 0, stream>>>(n, 2.f, d_x, d_y);
  CHECK(cudaEventRecord(stop, stream));
  CHECK(cudaEventSynchronize(stop));
  CHECK(cudaEventElapsedTime(&milliseconds, start, stop));
  CHECK(cudaMemcpy(host.data(), d_y, n * sizeof(float), cudaMemcpyDeviceToHost));
  CHECK(cudaStreamDestroy(stream));
  CHECK(cudaEventDestroy(start));
  CHECK(cudaEventDestroy(stop));
  CHECK(cudaFree(d_x));
  CHECK(cudaFree(d_y));
  TORCH_CHECK(milliseconds >= 0.f);
  return torch::tensor(host);
}

torch::Tensor launched_by_occupancy(torch::Tensor x) {
  auto y = torch::zeros_like(x);
  int grid = 0, block = 0, sms = 0, blocks = 0;
  CHECK(cudaOccupancyMaxPotentialBlockSize(&grid, &block, saxpy, 0, 0));
  CHECK(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, 0));
  CHECK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, saxpy, 64, 0));
  TORCH_CHECK(grid >= sms && block >= 32 && blocks >= 1);
  saxpy<<<2, block, 0, NULL>>>(x.numel(), 3.f, x.data_ptr<float>(), y.data_ptr<float>());
  CHECK(cudaDeviceSynchronize());
  return y;
}

// PyTorch's tutorial: accessors with __restrict__.
template <typename scalar_t>
__global__ void gate_kernel(
    const torch::PackedTensorAccessor32<scalar_t, 2, torch::RestrictPtrTraits> gates,
    torch::PackedTensorAccessor32<scalar_t, 2, torch::RestrictPtrTraits> out) {
  const int n = blockIdx.y;
  const int c = blockIdx.x * blockDim.x + threadIdx.x;
  if (c < out.size(1)) out[n][c] = gates[n][c] / (1 + exp(-gates[n][c + out.size(1)]));
}

torch::Tensor accessors(torch::Tensor x) {
  auto gates = x.view({10, 100});
  auto out = torch::empty({10, 50}, x.options());
  AT_DISPATCH_FLOATING_TYPES(x.scalar_type(), "gate", ([&] {
                               gate_kernel<scalar_t><<<dim3(2, 10), 32>>>(
                                   gates.packed_accessor32<scalar_t, 2, torch::RestrictPtrTraits>(),
                                   out.packed_accessor32<scalar_t, 2, torch::RestrictPtrTraits>());
                             }));
  return out;
}

// ---- Atomics
// --------------------------------------------------------------------------------------------

// The programming guide's way to any atomic operation: read, and compare-and-swap until nobody came
// between.
__device__ float atomic_max(float* address, float value) {
  int* as_int = (int*)address;
  int old = *as_int, assumed;
  do {
    assumed = old;
    old = atomicCAS(as_int, assumed, __float_as_int(fmaxf(value, __int_as_float(assumed))));
  } while (assumed != old);
  return __int_as_float(old);
}
__device__ double atomic_add(double* address, double value) {
  unsigned long long int* as_ull = (unsigned long long int*)address;
  unsigned long long int old = *as_ull, assumed;
  do {
    assumed = old;
    old = atomicCAS(as_ull, assumed, __double_as_longlong(value + __longlong_as_double(assumed)));
  } while (assumed != old);
  return __longlong_as_double(old);
}
__global__ void max_and_sum(const float* x, float* largest, double* sum, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  atomic_max(largest, x[i]);
  atomic_add(sum, x[i]);
}
torch::Tensor compare_and_swap(torch::Tensor x) {
  auto largest = torch::full({1}, -INFINITY, x.options());
  auto sum = torch::zeros({1}, x.options().dtype(torch::kDouble));
  max_and_sum<<<8, 128>>>(x.data_ptr<float>(), largest.data_ptr<float>(), sum.data_ptr<double>(),
                          x.numel());
  return torch::cat({largest, sum.to(torch::kFloat)});
}

__global__ void max_in_shared_memory(const float* x, float* y) {
  __shared__ float largest;
  if (threadIdx.x == 0) largest = -INFINITY;
  __syncthreads();
  atomic_max(&largest, x[blockIdx.x * blockDim.x + threadIdx.x]);
  __syncthreads();
  y[blockIdx.x * blockDim.x + threadIdx.x] = largest;
}

__global__ void is_inf(const float* x, float* found, float* y) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (!isfinite(x[i] * 3e38f)) *found = 1.f;  // many threads store the same value
  y[i] = x[i];
}

// One atomic operation a warp: the lanes that take part count themselves.
__global__ void compact(const float* x, float* y, int* count, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x, lane = threadIdx.x % 32;
  bool keep = i < n && x[i] > 0.f;
  unsigned votes = __ballot_sync(FULL, keep);
  int place = 0;
  if (lane == 0) place = atomicAdd(count, __popc(votes));
  place = __shfl_sync(FULL, place, 0) + __popc(votes & ((1u << lane) - 1));
  if (keep) y[place] = x[i];
}

__global__ void spin_lock(int* lock, volatile float* total, const float* x) {
  if (threadIdx.x == 0) {
    while (atomicCAS(lock, 0, 1) != 0) {
    }
    *total = *total + x[blockIdx.x];
    __threadfence();
    atomicExch(lock, 0);
  }
}

__global__ void privatised_histogram(const float* x, int* counts, int n) {
  __shared__ int local[16];
  if (threadIdx.x < 16) local[threadIdx.x] = 0;
  __syncthreads();
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) atomicAdd(&local[min(15, max(0, int(8 + 4 * x[i])))], 1);
  __syncthreads();
  if (threadIdx.x < 16) atomicAdd(&counts[threadIdx.x], local[threadIdx.x]);
}

__device__ unsigned int arrived = 0;
__global__ void sum_of_blocks(const float* x, volatile float* partial, float* y, int n) {
  __shared__ float tree[128];
  __shared__ bool last;
  int t = threadIdx.x, i = blockIdx.x * blockDim.x + t;
  tree[t] = i < n ? x[i] : 0.f;
  __syncthreads();
  for (int half = 64; half > 0; half >>= 1) {
    if (t < half) tree[t] += tree[t + half];
    __syncthreads();
  }
  if (t == 0) {
    partial[blockIdx.x] = tree[0];
    __threadfence();
    last = atomicInc(&arrived, gridDim.x) == gridDim.x - 1;
  }
  __syncthreads();
  if (last && t == 0) {
    float sum = 0.f;
    for (int b = 0; b < gridDim.x; ++b) sum += partial[b];
    *y = sum;
    arrived = 0;
  }
}

// ---- Warps
// ----------------------------------------------------------------------------------------------

__global__ void two_half_warps(const float* x, float* y) {
  __shared__ float row[64];
  int t = threadIdx.x, lane = t % 16;
  unsigned mask = t % 32 < 16 ? 0x0000ffffu : 0xffff0000u;
  row[t] = x[t];
  __syncwarp(mask);
  float left = row[t - lane + (lane + 1) % 16];
  __syncwarp(mask);
  row[t] = left + x[t];
  __syncwarp(mask);
  y[t] = row[t - lane + 15 - lane];
}

__global__ void groups_of_eight(const float* x, float* y) {
  float v = x[threadIdx.x];
  for (int by = 4; by > 0; by /= 2) v += __shfl_down_sync(FULL, v, by, 8);
  y[threadIdx.x] = __shfl_sync(FULL, v, 0, 8);
}

__global__ void lanes_that_vote_themselves_in(const float* x, float* y, int n) {
  int t = threadIdx.x;
  unsigned mask = __ballot_sync(FULL, t < n);
  if (t < n) {
    float v = x[t];
    for (int by = 1; by < 32; by *= 2) {
      float other = __shfl_up_sync(mask, v, by);
      if (t % 32 >= by) v += other;
    }
    y[t] = v;
  }
}

__global__ void arg_max(const float* x, float* y, int* at, int cols) {
  float best = -INFINITY;
  int where = 0;
  for (int c = threadIdx.x; c < cols; c += 32) {
    if (x[blockIdx.x * cols + c] > best) best = x[blockIdx.x * cols + (where = c)];
  }
  for (int with = 16; with > 0; with /= 2) {
    float other = __shfl_xor_sync(FULL, best, with);
    int its_place = __shfl_xor_sync(FULL, where, with);
    if (other > best || (other == best && its_place < where)) {
      best = other;
      where = its_place;
    }
  }
  if (threadIdx.x == 0) {
    y[blockIdx.x] = best;
    at[blockIdx.x] = where;
  }
}

__global__ void matrix_times_vector(const float* a, const float* v, float* y, int rows, int cols) {
  int row = (blockIdx.x * blockDim.x + threadIdx.x) / 32, lane = threadIdx.x % 32;
  if (row >= rows) return;  // whole warps
  float sum = 0.f;
  for (int c = lane; c < cols; c += 32) sum = __fmaf_rn(a[row * cols + c], v[c], sum);
  for (int by = 16; by > 0; by /= 2) sum += __shfl_down_sync(FULL, sum, by);
  if (lane == 0) y[row] = sum;
}

// ---- Shared memory
// ----------------------------------------------------------------------------------------

__global__ void scan_two_buffers(const float* x, float* y, int n) {
  extern __shared__ float temp[];
  int t = threadIdx.x, out = 0, in = 1;
  temp[t] = t > 0 ? x[t - 1] : 0.f;
  __syncthreads();
  for (int offset = 1; offset < n; offset *= 2) {
    out = 1 - out;
    in = 1 - out;
    temp[out * n + t] = temp[in * n + t] + (t >= offset ? temp[in * n + t - offset] : 0.f);
    __syncthreads();
  }
  y[t] = temp[out * n + t];
}

__global__ void scan_up_and_down(const float* x, float* y) {
  __shared__ float tree[128];
  int t = threadIdx.x;
  tree[2 * t] = x[2 * t];
  tree[2 * t + 1] = x[2 * t + 1];
  int offset = 1;
  for (int d = 64; d > 0; d >>= 1, offset *= 2) {
    __syncthreads();
    if (t < d) tree[offset * (2 * t + 2) - 1] += tree[offset * (2 * t + 1) - 1];
  }
  if (t == 0) tree[127] = 0.f;
  for (int d = 1; d < 128; d *= 2) {
    offset >>= 1;
    __syncthreads();
    if (t < d) {
      int a = offset * (2 * t + 1) - 1, b = offset * (2 * t + 2) - 1;
      float left = tree[a];
      tree[a] = tree[b];
      tree[b] += left;
    }
  }
  __syncthreads();
  y[2 * t] = tree[2 * t];
  y[2 * t + 1] = tree[2 * t + 1];
}

constexpr int TILE = 32, ROWS = 8;
__global__ void transpose(const float* x, float* y, int n) {
  __shared__ float tile[TILE][TILE + 1];
  int c = blockIdx.x * TILE + threadIdx.x, r = blockIdx.y * TILE + threadIdx.y;
  for (int j = 0; j < TILE; j += ROWS) {
    if (c < n && r + j < n) tile[threadIdx.y + j][threadIdx.x] = x[(r + j) * n + c];
  }
  __syncthreads();
  c = blockIdx.y * TILE + threadIdx.x;
  r = blockIdx.x * TILE + threadIdx.y;
  for (int j = 0; j < TILE; j += ROWS) {
    if (c < n && r + j < n) y[(r + j) * n + c] = tile[threadIdx.x][threadIdx.y + j];
  }
}

__constant__ float c_filter[5];
__global__ void convolution(const float* x, float* y, int n) {
  __shared__ float row[64 + 4];
  int i = blockIdx.x * 64 + threadIdx.x;
  row[threadIdx.x + 2] = i < n ? x[i] : 0.f;
  if (threadIdx.x < 2) {
    row[threadIdx.x] = i >= 2 ? x[i - 2] : 0.f;
    row[threadIdx.x + 66] = i + 64 < n ? x[i + 64] : 0.f;
  }
  __syncthreads();
  float sum = 0.f;
#pragma unroll
  for (int k = 0; k < 5; ++k) sum += c_filter[k] * row[threadIdx.x + k];
  if (i < n) y[i] = sum;
}

__global__ void bitonic_sort(const float* x, float* y) {
  __shared__ float row[128];
  int t = threadIdx.x;
  row[t] = x[t];
  __syncthreads();
  for (int size = 2; size <= 128; size *= 2) {
    for (int stride = size / 2; stride > 0; stride /= 2) {
      int other = t ^ stride;
      if (other > t && (row[t] > row[other]) == ((t & size) == 0)) {
        float v = row[t];
        row[t] = row[other];
        row[other] = v;
      }
      __syncthreads();
    }
  }
  y[t] = row[t];
}

__global__ void tiles_in_turns(const float* x, float* y, int tiles) {
  __shared__ float buffer[2][64];
  int t = threadIdx.x;
  float sum = 0.f;
  buffer[0][t] = x[t];
  for (int k = 0; k < tiles; ++k) {
    __syncthreads();
    if (k + 1 < tiles) buffer[(k + 1) % 2][t] = x[64 * (k + 1) + t];
    sum += buffer[k % 2][63 - t];
  }
  y[t] = sum;
}

__global__ void memory_used_twice(const float* x, float* y) {
  __shared__ union {
    float values[64];
    int order[64];
  } scratch;
  int t = threadIdx.x;
  scratch.values[t] = x[t];
  __syncthreads();
  int rank = 0;
  for (int i = 0; i < 64; ++i)
    rank += scratch.values[i] < x[t] || (scratch.values[i] == x[t] && i < t);
  __syncthreads();
  scratch.order[rank] = t;
  __syncthreads();
  y[t] = x[scratch.order[t]];
}

__global__ void welford(const float* x, float* y, int cols) {
  __shared__ float means[2], squares[2];
  const float* row = x + blockIdx.x * cols;
  float mean = 0.f, square = 0.f, count = 0.f;
  for (int c = threadIdx.x; c < cols; c += 64) {
    float d = row[c] - mean;
    count += 1.f;
    mean += d / count;
    square += d * (row[c] - mean);
  }
  float total = mean * count, of_squares = square + mean * mean * count;
  for (int by = 16; by > 0; by /= 2) {
    total += __shfl_xor_sync(FULL, total, by);
    of_squares += __shfl_xor_sync(FULL, of_squares, by);
  }
  if (threadIdx.x % 32 == 0) {
    means[threadIdx.x / 32] = total;
    squares[threadIdx.x / 32] = of_squares;
  }
  __syncthreads();
  mean = (means[0] + means[1]) / cols;
  float scale = rsqrtf((squares[0] + squares[1]) / cols - mean * mean + 1e-5f);
  for (int c = threadIdx.x; c < cols; c += 64) y[blockIdx.x * cols + c] = (row[c] - mean) * scale;
}

struct Running {
  float largest, sum;
};
__device__ Running merge(Running a, Running b) {
  float largest = fmaxf(a.largest, b.largest);
  return {largest, a.sum * __expf(a.largest - largest) + b.sum * __expf(b.largest - largest)};
}
__global__ void online_softmax(const float* x, float* y, int cols) {
  __shared__ Running part[128];
  int t = threadIdx.x;
  Running mine = {-FLT_MAX, 0.f};
  for (int c = t; c < cols; c += 128) mine = merge(mine, {x[blockIdx.x * cols + c], 1.f});
  part[t] = mine;
  for (int half = 64; half > 0; half /= 2) {
    __syncthreads();
    if (t < half) part[t] = merge(part[t], part[t + half]);
  }
  __syncthreads();
  for (int c = t; c < cols; c += 128) {
    y[blockIdx.x * cols + c] = __expf(x[blockIdx.x * cols + c] - part[0].largest) / part[0].sum;
  }
}

// ---- Types
// ------------------------------------------------------------------------------------------------

__global__ void half_functions(const __half* x, __half* y, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] = __hmul(hrcp(__hadd(__float2half(1.f), hexp(__hneg(x[i])))), x[i]);  // SiLU
}

__global__ void dot_of_bytes(const int* a, const int* b, int* y, int n) {
  int sum = 0;
  for (int i = threadIdx.x; i < n; i += 32) sum = __dp4a(a[i], b[i], sum);
  for (int by = 16; by > 0; by /= 2) sum += __shfl_down_sync(FULL, sum, by);
  if (threadIdx.x == 0) y[0] = sum;
}

__global__ void special_functions(const float* x, float* y, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  float sine, cosine;
  if (i >= n) return;
  __sincosf(x[i], &sine, &cosine);
  y[i] = sinpif(x[i]) + cospif(x[i]) + rcbrtf(1.f + x[i] * x[i]) + __fdiv_rn(sine, 3.f) +
         rhypotf(3.f, cosine) + norm3df(x[i], sine, cosine);
}

// A table of pointers in a tensor of integers, as multi-tensor optimizers have it.
__global__ void add_to_each(const int64_t* addresses, const int64_t* sizes) {
  float* p = reinterpret_cast<float*>(addresses[blockIdx.x]);
  for (int64_t i = threadIdx.x; i < sizes[blockIdx.x]; i += blockDim.x) p[i] += 1.f;
}
torch::Tensor many_tensors(torch::Tensor x) {
  auto a = x.narrow(0, 0, 300).clone(), b = x.narrow(0, 300, 700).clone();
  auto options = x.options().dtype(torch::kLong);
  auto addresses = torch::tensor({reinterpret_cast<int64_t>(a.data_ptr<float>()),
                                  reinterpret_cast<int64_t>(b.data_ptr<float>())},
                                 options);
  auto sizes = torch::tensor({a.numel(), b.numel()}, options);
  add_to_each<<<2, 64>>>(addresses.data_ptr<int64_t>(), sizes.data_ptr<int64_t>());
  return torch::cat({a, b});
}

__global__ void gather(const float* table, const int64_t* rows, float* y, int cols) {
  for (int c = threadIdx.x; c < cols; c += blockDim.x)
    y[blockIdx.x * cols + c] = table[rows[blockIdx.x] * cols + c];
}

torch::Tensor run(torch::Tensor x, int64_t which) {
  auto y = torch::zeros({1000}, x.options());
  auto counts = torch::zeros({1000}, x.options().dtype(torch::kInt));
  const float* in = x.data_ptr<float>();
  float* out = y.data_ptr<float>();
  int* whole = counts.data_ptr<int>();
  cudaStream_t stream = c10::cuda::getCurrentCUDAStream();
  switch (which) {
    case 0: return memory_of_its_own(x);
    case 1: return launched_by_occupancy(x);
    case 2: return accessors(x);
    case 3: return compare_and_swap(x);
    case 4: max_in_shared_memory<<<4, 250, 0, stream>>>(in, out); break;
    case 5:
      is_inf<<<10, 100, 0, stream>>>(in, (float*)whole, out);
      return counts.view(torch::kFloat).narrow(0, 0, 1);
    case 6: compact<<<8, 128, 0, stream>>>(in, out, whole, 1000); return std::get<0>(y.sort());
    case 7: spin_lock<<<100, 32, 0, stream>>>(whole, out, in); return y.narrow(0, 0, 1);
    case 8:
      privatised_histogram<<<8, 128, 0, stream>>>(in, whole, 1000);
      return counts.narrow(0, 0, 16);
    case 9: {
      auto partial = torch::empty({8}, x.options());
      sum_of_blocks<<<8, 128, 0, stream>>>(in, partial.data_ptr<float>(), out, 1000);
      return y.narrow(0, 0, 1);
    }
    case 10: two_half_warps<<<1, 64, 0, stream>>>(in, out); return y.narrow(0, 0, 64);
    case 11: groups_of_eight<<<1, 64, 0, stream>>>(in, out); return y.narrow(0, 0, 64);
    case 12:
      lanes_that_vote_themselves_in<<<1, 32, 0, stream>>>(in, out, 20);
      return y.narrow(0, 0, 20);
    case 13: arg_max<<<10, 32, 0, stream>>>(in, out, whole, 100); return counts.narrow(0, 0, 10);
    case 14:
      matrix_times_vector<<<3, 96, 0, stream>>>(in, in, out, 8, 125);
      return y.narrow(0, 0, 8);
    case 15:
      scan_two_buffers<<<1, 128, 2 * 128 * sizeof(float), stream>>>(in, out, 128);
      return y.narrow(0, 0, 128);
    case 16: scan_up_and_down<<<1, 64, 0, stream>>>(in, out); return y.narrow(0, 0, 128);
    case 17:
      transpose<<<dim3(1, 1), dim3(TILE, ROWS), 0, stream>>>(in, out, 30);
      return y.narrow(0, 0, 900);
    case 18: {
      const float filter[5] = {1.f, -2.f, 3.f, -2.f, 1.f};
      CHECK(cudaMemcpyToSymbol(c_filter, filter, sizeof filter));
      convolution<<<16, 64, 0, stream>>>(in, out, 1000);
      break;
    }
    case 19: bitonic_sort<<<1, 128, 0, stream>>>(in, out); return y.narrow(0, 0, 128);
    case 20: tiles_in_turns<<<1, 64, 0, stream>>>(in, out, 10); return y.narrow(0, 0, 64);
    case 21: memory_used_twice<<<1, 64, 0, stream>>>(in, out); return y.narrow(0, 0, 64);
    case 22: welford<<<4, 64, 0, stream>>>(in, out, 250); break;
    case 23: online_softmax<<<4, 128, 0, stream>>>(in, out, 250); break;
    case 24: {
      auto half = x.to(torch::kHalf), result = torch::empty_like(half);
      half_functions<<<8, 128, 0, stream>>>((const __half*)half.data_ptr<at::Half>(),
                                            (__half*)result.data_ptr<at::Half>(), 1000);
      return result;
    }
    case 25: {
      auto bytes = (x * 40).to(torch::kChar).contiguous();
      const int* words = reinterpret_cast<const int*>(bytes.data_ptr<int8_t>());
      dot_of_bytes<<<1, 32, 0, stream>>>(words, words, whole, 250);
      return counts.narrow(0, 0, 1);
    }
    case 26: special_functions<<<8, 128, 0, stream>>>(in, out, 1000); break;
    case 27: return many_tensors(x);
    case 28: {
      auto rows = torch::tensor({3, 0, 9, 3}, x.options().dtype(torch::kLong));
      gather<<<4, 64, 0, stream>>>(in, rows.data_ptr<int64_t>(), out, 100);
      return y.narrow(0, 0, 400);
    }
    case 29: {
      CHECK(cudaMemcpy2D(out, 20 * 4, in, 100 * 4, 20 * 4, 10, cudaMemcpyDeviceToDevice));
      return y.narrow(0, 0, 200);
    }
  }
  C10_CUDA_KERNEL_LAUNCH_CHECK();
  return y;
}
