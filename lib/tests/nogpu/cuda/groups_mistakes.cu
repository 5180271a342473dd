// Mistakes with cooperative groups, one in each kernel; nvcc compiles them. The line where checked mode
// has to stop carries the mark BUG and the kernel's name.
#include <cooperative_groups.h>
#include <cooperative_groups/reduce.h>
#include <torch/types.h>
namespace cg = cooperative_groups;

__global__ void some_of_a_tile(const float* x, float* y) {
  auto tile = cg::tiled_partition<8>(cg::this_thread_block());
  float v = x[threadIdx.x];
  if (tile.thread_rank() < 3) {
    tile.sync();
    v += 1.f;
  }
  y[threadIdx.x] = v + tile.shfl(v, 0);  // BUG some_of_a_tile: the other lanes wait here
}

__global__ void block_in_a_branch(const float* x, float* y) {
  __shared__ float row[64];
  cg::thread_block block = cg::this_thread_block();
  row[block.thread_rank()] = x[block.thread_rank()];
  if (block.thread_rank() < 40) {
    block.sync();  // BUG block_in_a_branch
    y[threadIdx.x] = row[39 - threadIdx.x];
  }
}

__global__ void rows_past_the_last(const float* x, float* y, int n) {
  cg::thread_block_tile<32> warp = cg::tiled_partition<32>(cg::this_thread_block());
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  float v = x[i];
  for (int by = warp.size() / 2; by > 0; by /= 2) {
    v += warp.shfl_down(v, by);  // BUG rows_past_the_last
  }
  if (warp.thread_rank() == 0) atomicAdd(y, v);
}

__global__ void reduced_by_half(const float* x, float* y) {
  auto warp = cg::tiled_partition<32>(cg::this_thread_block());
  float v = x[threadIdx.x];
  if (threadIdx.x % 2 == 0) {
    v = cg::reduce(warp, v, cg::plus<float>());  // BUG reduced_by_half
  }
  y[threadIdx.x] = v;
}

__global__ void sums_of_warps(const float* x, float* y) {
  __shared__ float part[4];
  cg::thread_block block = cg::this_thread_block();
  auto warp = cg::tiled_partition<32>(block);
  float v = cg::reduce(warp, x[block.thread_rank()], cg::plus<float>{});
  if (warp.thread_rank() == 0) part[warp.meta_group_rank()] = v;
  warp.sync();
  if (block.thread_rank() == 0) {
    for (int w = 0; w < warp.meta_group_size(); ++w) {
      *y += part[w];  // BUG sums_of_warps
    }
  }
}

__global__ void neighbour_tile(const float* x, float* y) {
  __shared__ float row[32];
  auto tile = cg::tiled_partition<16>(cg::this_thread_block());
  row[threadIdx.x] = x[threadIdx.x];
  tile.sync();
  y[threadIdx.x] = row[31 - threadIdx.x];  // BUG neighbour_tile
}

__global__ void waits_for_the_grid(const float* x, float* y) {
  cg::grid_group grid = cg::this_grid();
  y[grid.thread_rank()] = x[grid.thread_rank()];
  grid.sync();  // BUG waits_for_the_grid
  if (grid.thread_rank() == 0) y[0] += y[grid.size() - 1];
}

__device__ float sum_of(cg::thread_group g, float* scratch, float v) {
  int lane = g.thread_rank();
  for (int i = g.size() / 2; i > 0; i /= 2) {
    scratch[lane] = v;  // BUG one_sync_in_the_loop
    g.sync();
    if (lane < i) v += scratch[lane + i];
  }
  return v;
}
__global__ void one_sync_in_the_loop(const float* x, float* y) {
  extern __shared__ float scratch[];
  float sum = sum_of(cg::this_thread_block(), scratch, x[threadIdx.x]);
  if (threadIdx.x == 0) *y = sum;
}

torch::Tensor run(torch::Tensor x, int64_t which) {
  auto y = torch::zeros({1024}, x.options());
  const float* in = x.data_ptr<float>();
  float* out = y.data_ptr<float>();
  switch (which) {
    case 0: some_of_a_tile<<<1, 32>>>(in, out); break;
    case 1: block_in_a_branch<<<1, 64>>>(in, out); break;
    case 2: rows_past_the_last<<<2, 64>>>(in, out, 100); break;
    case 3: reduced_by_half<<<1, 32>>>(in, out); break;
    case 4: sums_of_warps<<<1, 128>>>(in, out); break;
    case 5: neighbour_tile<<<1, 32>>>(in, out); break;
    case 6: waits_for_the_grid<<<4, 64>>>(in, out); break;
    case 7: one_sync_in_the_loop<<<1, 64, 64 * sizeof(float)>>>(in, out); break;
  }
  return y;
}
