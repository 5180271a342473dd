// Correct programs as in books, courses and one-file language models, cooperative groups among them.
// Plain and checked they give the right answer, and the checker is silent.
#include <cooperative_groups.h>
#include <cooperative_groups/reduce.h>
#include <cooperative_groups/scan.h>
#include <cuda_runtime.h>
#include <torch/types.h>

#include <vector>

namespace cg = cooperative_groups;
#define CEIL_DIV(a, b) (((a) + (b) - 1) / (b))
#define CHECK(call) TORCH_CHECK((call) == cudaSuccess, #call)

// ---- Layers of a language model

__global__ void layernorm_forward(float* __restrict__ out, float* __restrict__ mean,
                                  float* __restrict__ rstd, const float* __restrict__ inp, int N,
                                  int C) {
  cg::thread_block block = cg::this_thread_block();
  cg::thread_block_tile<32> warp = cg::tiled_partition<32>(block);
  int idx = blockIdx.x * warp.meta_group_size() + warp.meta_group_rank();
  if (idx >= N) return;
  const float* x = inp + idx * C;
  float sum = 0.f;
  for (int i = warp.thread_rank(); i < C; i += warp.size()) sum += x[i];
  sum = cg::reduce(warp, sum, cg::plus<float>{});
  float m = sum / C;
  if (warp.thread_rank() == 0 && mean != nullptr) __stcs(mean + idx, m);
  sum = 0.f;
  for (int i = warp.thread_rank(); i < C; i += warp.size()) {
    float diff = x[i] - m;
    sum += diff * diff;
  }
  sum = cg::reduce(warp, sum, cg::plus<float>{});
  float s = rsqrtf(sum / C + 1e-5f);
  if (warp.thread_rank() == 0 && rstd != nullptr) __stcs(rstd + idx, s);
  for (int c = warp.thread_rank(); c < C; c += warp.size()) {
    __stcs(out + idx * C + c, s * (__ldcs(x + c) - m));
  }
}

__global__ void softmax_forward(float* out, const float* inp, int C) {
  __shared__ float shared_max[32], shared_sum[32];
  auto warp = cg::tiled_partition<32>(cg::this_thread_block());
  const float* x = inp + blockIdx.x * C;
  float m = -INFINITY, sum = 0.f;
  for (int i = threadIdx.x; i < C; i += blockDim.x) m = fmaxf(m, x[i]);
  m = cg::reduce(warp, m, cg::greater<float>{});
  shared_max[warp.meta_group_rank()] = m;  // all lanes store the same
  __syncthreads();
  m = warp.thread_rank() < warp.meta_group_size() ? shared_max[warp.thread_rank()] : -INFINITY;
  m = cg::reduce(warp, m, cg::greater<float>{});
  for (int i = threadIdx.x; i < C; i += blockDim.x) sum += expf(x[i] - m);
  sum = cg::reduce(warp, sum, cg::plus<float>{});
  if (warp.thread_rank() == 0) shared_sum[warp.meta_group_rank()] = sum;
  __syncthreads();
  sum = warp.thread_rank() < warp.meta_group_size() ? shared_sum[warp.thread_rank()] : 0.f;
  sum = cg::reduce(warp, sum, cg::plus<float>{});
  for (int i = threadIdx.x; i < C; i += blockDim.x) out[blockIdx.x * C + i] = expf(x[i] - m) / sum;
}

__global__ void gelu_backward(float* dinp, const float* inp, const float* dout, int N) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= N) return;
  float x = inp[i], cube = 0.044715f * x * x * x, scale = sqrtf(2.f / 3.14159265f);
  float t = tanhf(scale * (x + cube)), sech2 = 1.f - t * t;
  dinp[i] = dout[i] * (0.5f * (1.f + t) +
                       x * 0.5f * sech2 * scale * (1.f + 3.f * 0.044715f * x * x));
}

__global__ void matmul_bias(float* out, const float* inp, const float* weight, const float* bias,
                            int BT, int C, int OC) {
  __shared__ float a[16][17], w[16][17];
  int row = blockIdx.x * 16 + threadIdx.x, col = blockIdx.y * 16 + threadIdx.y;
  float sum = bias != NULL && col < OC ? bias[col] : 0.f;
  for (int k0 = 0; k0 < C; k0 += 16) {
    int ka = k0 + threadIdx.y, kw = k0 + threadIdx.x;
    a[threadIdx.y][threadIdx.x] = row < BT && ka < C ? inp[row * C + ka] : 0.f;
    w[threadIdx.y][threadIdx.x] = col < OC && kw < C ? weight[col * C + kw] : 0.f;
    __syncthreads();
    for (int k = 0; k < 16; ++k) sum += a[k][threadIdx.x] * w[threadIdx.y][k];
    __syncthreads();
  }
  if (row < BT && col < OC) out[row * OC + col] = sum;
}

struct Moments {
  float m, v;
};
__global__ void adamw(float* p, const float* g, Moments* state, int n, float lr) {
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += blockDim.x * gridDim.x) {
    Moments s = state[i];
    s.m = 0.9f * s.m + 0.1f * g[i];
    s.v = 0.999f * s.v + 0.001f * g[i] * g[i];
    state[i] = s;
    p[i] -= lr * (s.m / 0.1f) / (sqrtf(s.v / 0.001f) + 1e-8f);
  }
}

// ---- Memory of one's own

__global__ void add(int n, float* x, float* y) {
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += blockDim.x * gridDim.x)
    y[i] = x[i] + y[i];
}

torch::Tensor even_easier(torch::Tensor t) {
  int N = 1000, device = -1;
  float *x, *y;
  CHECK(cudaMallocManaged(&x, N * sizeof(float)));
  CHECK(cudaMallocManaged((void**)&y, N * sizeof(float)));
  for (int i = 0; i < N; i++) {
    x[i] = 1.0f;
    y[i] = t.data_ptr<float>()[i];
  }
  CHECK(cudaGetDevice(&device));
#if CUDART_VERSION >= 13000
  cudaMemLocation here = {cudaMemLocationTypeDevice, device};
  CHECK(cudaMemPrefetchAsync(x, N * sizeof(float), here, 0, 0));
#else
  CHECK(cudaMemPrefetchAsync(x, N * sizeof(float), device, NULL));
  CHECK(cudaMemAdvise(y, N * sizeof(float), cudaMemAdviseSetPreferredLocation, device));
#endif
  add<<<CEIL_DIV(N, 256), 256>>>(N, x, y);
  CHECK(cudaDeviceSynchronize());
  auto result = torch::zeros({N});
  for (int i = 0; i < N; i++) result.data_ptr<float>()[i] = y[i];
  CHECK(cudaFree(x));
  CHECK(cudaFree(y));
  return result;
}

torch::Tensor pinned_and_by_parts(torch::Tensor t) {
  const int N = 1000, part = 250;
  float *h_x, *h_y, *d_x, *d_y;
  CHECK(cudaMallocHost((void**)&h_x, N * sizeof(float)));
  CHECK(cudaHostAlloc(&h_y, N * sizeof(float), cudaHostAllocDefault));
  CHECK(cudaMalloc((void**)&d_x, N * sizeof(float)));
  CHECK(cudaMalloc((void**)&d_y, N * sizeof(float)));
  CHECK(cudaMemcpy(h_x, t.data_ptr<float>(), N * sizeof(float), cudaMemcpyDefault));
  CHECK(cudaMemset(d_y, 0, N * sizeof(float)));
  cudaStream_t streams[2];
  for (auto& stream : streams) CHECK(cudaStreamCreate(&stream));
  for (int at = 0; at < N; at += part) {
    cudaStream_t stream = streams[at / part % 2];
    size_t size = part * sizeof(float);
    CHECK(cudaMemcpyAsync(d_x + at, h_x + at, size, cudaMemcpyHostToDevice, stream));
    add<<<1, 128, 0, stream>>>(part, d_x + at, d_y + at);
    CHECK(cudaMemcpyAsync(h_y + at, d_y + at, size, cudaMemcpyDeviceToHost, stream));
  }
  CHECK(cudaDeviceSynchronize());
  auto result = torch::tensor(std::vector<float>(h_y, h_y + N));
  for (auto& stream : streams) CHECK(cudaStreamDestroy(stream));
  CHECK(cudaFree(d_x));
  CHECK(cudaFree(d_y));
  CHECK(cudaFreeHost(h_x));
  CHECK(cudaFreeHost(h_y));
  return result;
}

__global__ void invert(float* image, size_t pitch, int width, int height) {
  int col = blockIdx.x * blockDim.x + threadIdx.x, row = blockIdx.y * blockDim.y + threadIdx.y;
  if (col >= width || row >= height) return;
  float* line = (float*)((char*)image + row * pitch);
  line[col] = 1.f - line[col];
}
torch::Tensor pitched(torch::Tensor t) {
  const int width = 40, height = 25;
  size_t pitch, row = width * sizeof(float);
  float* image;
  CHECK(cudaMallocPitch((void**)&image, &pitch, row, height));
  std::vector<float> host(width * height);
  CHECK(cudaMemcpy2D(image, pitch, t.data_ptr<float>(), row, row, height, cudaMemcpyDefault));
  invert<<<dim3(CEIL_DIV(width, 16), CEIL_DIV(height, 16)), dim3(16, 16)>>>(image, pitch, width,
                                                                           height);
  CHECK(cudaMemcpy2D(host.data(), row, image, pitch, row, height, cudaMemcpyDeviceToHost));
  CHECK(cudaFree(image));
  return torch::tensor(host);
}

#define RADIUS 2
__constant__ float taps[2 * RADIUS + 1];
__global__ void filter(const float* in, float* out, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  float sum = 0.f;
  for (int k = -RADIUS; k <= RADIUS; ++k) {
    if (i + k >= 0 && i + k < n) sum += in[i + k] * taps[k + RADIUS];
  }
  if (i < n) out[i] = sum;
}

// A workspace of bytes that holds two arrays.
__global__ void square(const float* x, float* y, int n) {
  int i = threadIdx.x;
  if (i < n) y[i] = x[i] * x[i];
}
torch::Tensor workspace(torch::Tensor t) {
  void* memory;
  auto y = torch::zeros({100});
  CHECK(cudaMalloc(&memory, 200 * sizeof(float)));
  float* first = (float*)memory;
  float* second = first + 100;
  CHECK(cudaMemcpy(first, t.data_ptr<float>(), 100 * sizeof(float), cudaMemcpyDeviceToDevice));
  square<<<1, 128>>>(first, second, 100);
  CHECK(cudaMemcpy(y.data_ptr<float>(), second, 100 * sizeof(float), cudaMemcpyDeviceToHost));
  CHECK(cudaFree(memory));
  return y;
}

// ---- Sums and locks

__global__ void dot(const float* a, const float* b, float* c, int n) {
  __shared__ float cache[128];
  float temp = 0.f;
  for (int i = threadIdx.x + blockIdx.x * blockDim.x; i < n; i += blockDim.x * gridDim.x)
    temp += a[i] * b[i];
  cache[threadIdx.x] = temp;
  __syncthreads();
  for (int i = blockDim.x / 2; i != 0; i /= 2) {
    if (threadIdx.x < i) cache[threadIdx.x] += cache[threadIdx.x + i];
    __syncthreads();
  }
  if (threadIdx.x == 0) atomicAdd(c, cache[0]);
}

__global__ void guarded(const float* x, float* y) {
  __shared__ int lock;
  __shared__ float largest;
  if (threadIdx.x == 0) atomicExch(&lock, 0);
  if (threadIdx.x == 1) largest = -INFINITY;
  __syncthreads();
  for (bool done = false; !done;) {
    if (atomicCAS(&lock, 0, 1) == 0) {
      atomicExch(&largest, fmaxf(atomicAdd(&largest, 0.f), x[threadIdx.x]));
      __threadfence_block();
      atomicExch(&lock, 0);
      done = true;
    }
  }
  __syncthreads();
  if (threadIdx.x == 0) *y = largest;
}

// ---- Cooperative groups

__device__ float reduce_sum(cg::thread_group g, float* temp, float value) {
  int lane = g.thread_rank();
  for (int i = g.size() / 2; i > 0; i /= 2) {
    temp[lane] = value;
    g.sync();
    if (lane < i) value += temp[lane + i];
    g.sync();
  }
  return value;
}
__global__ void sum_by_block(float* sum, const float* input, int n) {
  extern __shared__ float temp[];
  float own = 0.f;
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x)
    own += input[i];
  auto g = cg::this_thread_block();
  float total = reduce_sum(g, temp, own);
  if (g.thread_rank() == 0) atomicAdd(sum, total);
}
__global__ void sum_by_tiles(float* sums, const float* input) {
  extern __shared__ float temp[];
  cg::thread_group tile = cg::tiled_partition(cg::this_thread_block(), 16);
  int first = threadIdx.x / 16 * 16;
  float total = reduce_sum(tile, temp + first, input[threadIdx.x]);
  if (tile.thread_rank() == 0) sums[threadIdx.x / 16] = total;
}

template <int size>
__device__ float tile_sum(cg::thread_block_tile<size> g, float value) {
  for (int i = g.size() / 2; i > 0; i /= 2) value += g.shfl_down(value, i);
  return value;
}
template <int size>
__global__ void sum_of_tiles(float* sum, const float4* input, int n) {
  float own = 0.f;
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n / 4; i += blockDim.x * gridDim.x) {
    float4 v = input[i];
    own += v.x + v.y + v.z + v.w;
  }
  auto tile = cg::tiled_partition<size>(cg::this_thread_block());
  float total = tile_sum<size>(tile, own);
  if (tile.thread_rank() == 0) atomicAdd(sum, total);
}

__device__ int atomic_aggregated(int* counter) {
  cg::coalesced_group active = cg::coalesced_threads();
  int first = 0;
  if (active.thread_rank() == 0) first = atomicAdd(counter, (int)active.size());
  return active.shfl(first, 0) + active.thread_rank();
}
__global__ void keep_positive(float* out, int* n_out, const float* in, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n && in[i] > 0.f) out[atomic_aggregated(n_out)] = in[i];
}

__global__ void votes_and_scans(float* out, const float* in) {
  auto block = cg::this_thread_block();
  auto warp = cg::tiled_partition<32>(block);
  auto tile = cg::tiled_partition<8>(warp);
  float v = in[block.thread_rank()];
  bool positive = v > 0.f;
  unsigned votes = tile.ballot(positive);
  float before = cg::exclusive_scan(tile, positive ? 1.f : 0.f);
  float upto = cg::inclusive_scan(tile, v, cg::plus<float>());
  int side = cg::binary_partition(warp, positive).size();
  float low = cg::reduce(tile, v, cg::less<float>());
  unsigned all = cg::reduce(tile, 1u << tile.thread_rank(), cg::bit_or<unsigned>());
  float right = tile.shfl_xor(tile.shfl_up(v, 1), 7) * (tile.any(positive) && !tile.all(0));
  out[8 * threadIdx.x] = votes;
  out[8 * threadIdx.x + 1] = before;
  out[8 * threadIdx.x + 2] = upto;
  out[8 * threadIdx.x + 3] = side;
  out[8 * threadIdx.x + 4] = low;
  out[8 * threadIdx.x + 5] = all + tile.meta_group_rank() + 10 * tile.meta_group_size();
  out[8 * threadIdx.x + 6] = right;
  out[8 * threadIdx.x + 7] = cg::this_grid().thread_rank() + block.group_index().x;
}

// The last of the tiles of four takes the struct of its neighbour to the left.
struct Pair {
  double value;
  int index;
};
__global__ void largest_in_a_tile(float* out, const float* in) {
  auto tile = cg::tiled_partition<4>(cg::this_thread_block());
  Pair best = {in[threadIdx.x], (int)threadIdx.x};
  auto larger = [](Pair a, Pair b) { return b.value > a.value ? b : a; };
  for (int by = 2; by > 0; by /= 2) best = larger(best, tile.shfl_xor(best, by));
  if (tile.thread_rank() == 0) out[threadIdx.x / 4] = best.index;
}

__global__ void grid_of_one(float* y, const float* x) {
  cg::grid_group grid = cg::this_grid();
  y[grid.thread_rank()] = x[grid.thread_rank()];
  grid.sync();
  float other = y[grid.size() - 1 - grid.thread_rank()];
  cg::sync(grid);
  y[grid.thread_rank()] += other;
}

torch::Tensor run(torch::Tensor x, int64_t which) {
  auto y = torch::zeros({1000}, x.options());
  auto n_out = torch::zeros({1}, x.options().dtype(torch::kInt));
  const float* in = x.data_ptr<float>();
  float* out = y.data_ptr<float>();
  switch (which) {
    case 0: {
      auto mean = torch::empty({10}, x.options()), rstd = torch::empty({10}, x.options());
      layernorm_forward<<<3, 128>>>(out, mean.data_ptr<float>(), rstd.data_ptr<float>(), in, 10,
                                    100);
      break;
    }
    case 1: softmax_forward<<<4, 96>>>(out, in, 250); break;
    case 2: gelu_backward<<<4, 256>>>(out, in, in, 1000); break;
    case 3:
      matmul_bias<<<dim3(2, 2), dim3(16, 16)>>>(out, in, in + 500, in, 30, 15, 20);
      break;
    case 4: {
      auto state = torch::zeros({1000, 2}, x.options());
      y.copy_(x.narrow(0, 0, 1000));
      adamw<<<2, 128>>>(out, in, (Moments*)state.data_ptr<float>(), 1000, 0.01f);
      break;
    }
    case 5: return even_easier(x);
    case 6: return pinned_and_by_parts(x);
    case 7: return pitched(x);
    case 8: {
      float host[2 * RADIUS + 1] = {1.f, -2.f, 3.f, -2.f, 1.f};
      CHECK(cudaMemcpyToSymbol(taps, host, sizeof(host)));
      filter<<<8, 128>>>(in, out, 1000);
      break;
    }
    case 9: return workspace(x);
    case 10: dot<<<4, 128>>>(in, in, out, 1000); break;
    case 11: guarded<<<1, 64>>>(in, out); break;
    case 12: sum_by_block<<<2, 128, 128 * sizeof(float)>>>(out, in, 1000); break;
    case 13: sum_by_tiles<<<1, 128, 128 * sizeof(float)>>>(out, in); break;
    case 14: sum_of_tiles<32><<<2, 96>>>(out, (const float4*)in, 1000); break;
    case 15: sum_of_tiles<4><<<1, 128>>>(out, (const float4*)in, 1000); break;
    case 16: keep_positive<<<8, 128>>>(out, n_out.data_ptr<int>(), in, 1000); break;
    case 17: votes_and_scans<<<1, 64>>>(out, in); break;
    case 18: largest_in_a_tile<<<1, 64>>>(out, in); break;
    case 19: grid_of_one<<<1, 100>>>(out, in); break;
  }
  return y;
}
