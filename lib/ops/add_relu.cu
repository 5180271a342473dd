// SPDX-License-Identifier: MIT
// Copyright (c) 2026 The Fused Kernels authors; Fused Kernels 0.1.0, lib/ops/add_relu.cu
// add_relu: y = relu(x + bias), the forward pass in CUDA C++, with 16-byte loads.
//
// Shapes    x, y: (M, N); bias: (N,); float, double, half, bfloat16. The columns of x are contiguous.
// Traffic   M N elements of s bytes: 2 M N s, the bias stays in cache.
// One thread block handles ROWS * blockDim.y rows and blockDim.x * VEC columns; one thread VEC adjacent
// columns of ROWS rows. Where 16-byte loads are possible one of them a thread is best (VEC = 4 or 8, ROWS = 1);
// where they are not (an odd N), a thread needs several small loads in flight (VEC = 1, ROWS = 8).
#include <climits>

#include <ATen/Dispatch.h>
#include <ATen/OpMathType.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/types.h>

constexpr int THREADS = 128;

// sizeof(T) * VEC bytes that move in one instruction: LDG.128 when that is 16.
template <typename T, int VEC>
struct alignas(sizeof(T) * VEC) Vector {
  T item[VEC];
};

template <typename T, int VEC, int ROWS>
__global__ void __launch_bounds__(THREADS) add_relu_kernel(
    const T* __restrict__ x, const T* __restrict__ bias, T* __restrict__ y,
    int64_t n_rows, int64_t n_cols, int64_t x_row_stride, unsigned n_col_tiles) {
  using Math = at::opmath_type<T>;  // float for half and bfloat16
  using Vec = Vector<T, VEC>;
  // Neighbours in the grid take neighbouring columns: together they read whole rows of x in order.
  const int64_t first_row = int64_t(blockIdx.x / n_col_tiles) * (ROWS * blockDim.y) + threadIdx.y;
  const int64_t col = (int64_t(blockIdx.x % n_col_tiles) * blockDim.x + threadIdx.x) * VEC;
  if (col >= n_cols) return;

  const Vec b = *reinterpret_cast<const Vec*>(bias + col);
  Vec tile[ROWS];
#pragma unroll
  for (int i = 0; i < ROWS; ++i) {
    const int64_t row = first_row + i * blockDim.y;
    if (row < n_rows) tile[i] = *reinterpret_cast<const Vec*>(x + row * x_row_stride + col);
  }
#pragma unroll
  for (int i = 0; i < ROWS; ++i) {
    const int64_t row = first_row + i * blockDim.y;
    if (row >= n_rows) break;
#pragma unroll
    for (int j = 0; j < VEC; ++j) {
      const Math z = Math(tile[i].item[j]) + Math(b.item[j]);
      tile[i].item[j] = T(z < Math(0) ? Math(0) : z);  // not fmax: a NaN has to stay one
    }
    // an index of Vec, not of T: only then does nvcc store 16 bytes at once and not four times four
    reinterpret_cast<Vec*>(y)[(row * n_cols + col) / VEC] = tile[i];
  }
}

template <typename T, int VEC, int ROWS>
void launch(const torch::Tensor& x, const torch::Tensor& bias, torch::Tensor& y) {
  const int64_t n_rows = x.size(0), n_cols = x.size(1), vectors = (n_cols + VEC - 1) / VEC;
  int threads_x = 1;  // narrow rows: several of them side by side in one thread block
  while (threads_x < vectors && threads_x < THREADS) threads_x *= 2;
  const dim3 block(threads_x, THREADS / threads_x);
  const int64_t rows_per_block = int64_t(ROWS) * block.y;
  const int64_t n_col_tiles = (vectors + threads_x - 1) / threads_x;
  const int64_t blocks = (n_rows + rows_per_block - 1) / rows_per_block * n_col_tiles;
  TORCH_CHECK_VALUE(blocks <= INT_MAX, "add_relu_forward: x is too large for one launch");
  add_relu_kernel<T, VEC, ROWS><<<blocks, block, 0, c10::cuda::getCurrentCUDAStream()>>>(
      x.const_data_ptr<T>(), bias.const_data_ptr<T>(), y.mutable_data_ptr<T>(), n_rows, n_cols, x.stride(0),
      static_cast<unsigned>(n_col_tiles));
  C10_CUDA_KERNEL_LAUNCH_CHECK();  // too many threads, say, is reported here and nowhere else
}

// Writes y = relu(x + bias). x: (M, N) with contiguous columns; bias: (N,); y: (M, N), contiguous.
void add_relu_forward(const torch::Tensor& x, const torch::Tensor& bias, torch::Tensor y) {
  TORCH_CHECK_VALUE(x.is_cuda() && bias.is_cuda() && y.is_cuda(), "add_relu_forward: all tensors must be on a GPU");
  TORCH_CHECK_VALUE(x.dim() == 2 && bias.dim() == 1 && bias.size(0) == x.size(1) && y.sizes() == x.sizes(),
                    "add_relu_forward: x and y must be (M, N), bias (N,)");
  TORCH_CHECK_VALUE(x.scalar_type() == bias.scalar_type() && x.scalar_type() == y.scalar_type(),
                    "add_relu_forward: x, bias and y must have one dtype");
  TORCH_CHECK_VALUE((x.size(1) == 1 || x.stride(1) == 1) && bias.is_contiguous() && y.is_contiguous(),
                    "add_relu_forward: columns must be contiguous; call .contiguous()");
  if (y.numel() == 0) return;  // a grid of no thread blocks is a launch error
  const c10::cuda::CUDAGuard guard(x.device());  // the GPU of x, which need not be the current one
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, x.scalar_type(), "add_relu_forward", [&] {
    constexpr int VEC = 16 / sizeof(scalar_t);
    const auto on_boundary = [](const torch::Tensor& t) {
      return reinterpret_cast<uintptr_t>(t.const_data_ptr<scalar_t>()) % 16 == 0;
    };
    const bool aligned = x.size(1) % VEC == 0 && x.stride(0) % VEC == 0 && on_boundary(x) && on_boundary(bias) &&
                         on_boundary(y);
    if (aligned) {
      launch<scalar_t, VEC, 1>(x, bias, y);
    } else {
      launch<scalar_t, 1, 8>(x, bias, y);
    }
  });
}
