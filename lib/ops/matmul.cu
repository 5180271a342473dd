// SPDX-License-Identifier: MIT
// Copyright (c) 2026 The Fused Kernels authors; Fused Kernels 0.1.0, lib/ops/matmul.cu
// matmul: y = a b in CUDA C++, tiled through shared memory and registers, without tensor cores.
//
// Shapes    a: (M, K), b: (K, N), y: (M, N), all contiguous; float, half and bfloat16 (summed in float), double.
// Work      2MNK FLOPs. A thread block makes a tile of y, 128 x 128, and each of its 256 threads 8 x 8 sums of it,
//           kept in registers. So an element of a or b that was read from global memory serves 128 products, and
//           one read from shared memory 8: a thread's 16 reads there are for 64 multiply-adds.
// Each step takes BLOCK_K columns of a and rows of b. While a piece is multiplied, the next one is on its way to
// registers, and then goes to the other half of shared memory: one barrier a step.
// Rows of a, b and y that all begin on 16-byte boundaries are moved 16 bytes at a time, others element by element.
// A running sum in float32 loses more with every product: its error grows with K, not with its root. So a sum ends
// after PART_K products, and y adds up those parts, each thread its own elements. Sums of half and bfloat16 need no
// parts: what they lose is less than y's rounding.
#include <climits>
#include <cstdint>
#include <type_traits>

#include <ATen/Dispatch.h>
#include <ATen/OpMathType.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/types.h>

constexpr int BLOCK = 128;       // rows and columns of y for a thread block
constexpr int THREADS = 256;     // 16 x 16 of them, each with 8 x 8 sums:
constexpr int PART = 4;          // two groups of 4 rows and of 4 columns, half a tile apart,
constexpr int SUMS = 2 * PART;   // so that neighbours read neighbouring 16 bytes of shared memory
constexpr int APART = BLOCK / 2;
constexpr int PITCH = BLOCK + PART;  // of a's piece: fewer of the threads that store it meet at one bank
constexpr int PART_K = 1024;         // products in one running sum, where y is as wide as the sum

// sizeof(T) * n bytes that move in one instruction: LDG.128 when that is 16.
template <typename T, int n>
struct alignas(sizeof(T) * n) Vector {
  T item[n];
};

// A piece of a matrix, HEIGHT x WIDTH, on its way through the registers of a thread block. A thread has vectors of
// VEC elements in the columns from col() on, in row() and every STEP rows below it.
template <typename T, int VEC, int HEIGHT, int WIDTH>
struct Piece {
  static constexpr int STEP = THREADS * VEC / WIDTH, LOADS = HEIGHT / STEP;
  Vector<T, VEC> loaded[LOADS];

  static __device__ __forceinline__ int row() { return threadIdx.x * VEC / WIDTH; }
  static __device__ __forceinline__ int col() { return threadIdx.x * VEC % WIDTH; }

  // From this thread's first element on, with zeros for what the matrix does not have.
  __device__ __forceinline__ void load(const T* from, int64_t pitch, int64_t rows_left, int64_t cols_left) {
#pragma unroll
    for (int i = 0; i < LOADS; ++i) {
#pragma unroll
      for (int j = 0; j < VEC; ++j) loaded[i].item[j] = T(0.0f);
      // A row of the matrix is whole vectors: one that begins inside ends inside.
      if (i * STEP < rows_left && 0 < cols_left)
        loaded[i] = *reinterpret_cast<const Vector<T, VEC>*>(from + i * STEP * pitch);
    }
  }
};

template <typename T, int VEC>
__global__ void __launch_bounds__(THREADS, VEC == 1 || sizeof(T) == 8 ? 1 : 2) matmul_kernel(
    const T* __restrict__ a, const T* __restrict__ b, T* __restrict__ y, int64_t n_rows, int64_t n_cols,
    int64_t n_inner, int tiles_across) {
  using Math = at::opmath_type<T>;  // float for half and bfloat16
  constexpr int BLOCK_K = sizeof(T) == 2 ? 16 : 8;
  using PieceOfA = Piece<T, VEC, BLOCK, BLOCK_K>;
  using PieceOfB = Piece<T, VEC, BLOCK_K, BLOCK>;
  __shared__ alignas(16) Math a_piece[2][BLOCK_K][PITCH], b_piece[2][BLOCK_K][BLOCK];
  const int tile_row = blockIdx.x / tiles_across, tile_col = blockIdx.x % tiles_across;
  // int64: row * width passes 2^31
  const int64_t first_row = int64_t(tile_row) * BLOCK, first_col = int64_t(tile_col) * BLOCK;
  const int a_row = PieceOfA::row(), a_col = PieceOfA::col(), b_row = PieceOfB::row(), b_col = PieceOfB::col();
  a += (first_row + a_row) * n_inner + a_col;
  b += b_row * n_cols + first_col + b_col;
  const int64_t a_rows_left = n_rows - first_row - a_row, b_cols_left = n_cols - first_col - b_col;
  const int thread_row = threadIdx.x / 16 * PART, thread_col = threadIdx.x % 16 * PART;

  PieceOfA a_next;
  PieceOfB b_next;
  a_next.load(a, n_inner, a_rows_left, n_inner - a_col);
  b_next.load(b, n_cols, n_inner - b_row, b_cols_left);
  int buffer = 0;
  int64_t left = n_inner;
  do {  // once for K = 0 too: y is then zeros
    const bool is_first = left == n_inner;
    const int64_t left_after = std::is_same_v<T, Math> && left > PART_K ? left - PART_K : 0;
    Math sum[SUMS][SUMS] = {};
    for (; left > left_after; left -= BLOCK_K) {
#pragma unroll
      for (int i = 0; i < PieceOfA::LOADS; ++i) {
#pragma unroll
        for (int j = 0; j < VEC; ++j)  // transposed: so a thread's rows of a lie side by side
          a_piece[buffer][a_col + j][a_row + i * PieceOfA::STEP] = Math(a_next.loaded[i].item[j]);
      }
#pragma unroll
      for (int i = 0; i < PieceOfB::LOADS; ++i) {
#pragma unroll
        for (int j = 0; j < VEC; ++j)
          b_piece[buffer][b_row + i * PieceOfB::STEP][b_col + j] = Math(b_next.loaded[i].item[j]);
      }
      // One barrier a step: the next one writes the other buffer, which all have left before they come here.
      __syncthreads();
      a += BLOCK_K;
      b += BLOCK_K * n_cols;
      a_next.load(a, n_inner, a_rows_left, left - BLOCK_K - a_col);
      b_next.load(b, n_cols, left - BLOCK_K - b_row, b_cols_left);

#pragma unroll
      for (int k = 0; k < BLOCK_K; ++k) {
        Math a_part[SUMS], b_part[SUMS];
#pragma unroll
        for (int i = 0; i < SUMS; ++i) {
          a_part[i] = a_piece[buffer][k][thread_row + i / PART * APART + i % PART];
          b_part[i] = b_piece[buffer][k][thread_col + i / PART * APART + i % PART];
        }
#pragma unroll
        for (int i = 0; i < SUMS; ++i) {
#pragma unroll
          for (int j = 0; j < SUMS; ++j) sum[i][j] += a_part[i] * b_part[j];
        }
      }
      buffer ^= 1;
    }

    constexpr int WIDE = VEC < PART ? VEC : PART;
#pragma unroll
    for (int i = 0; i < SUMS; ++i) {
      const int64_t r = first_row + thread_row + i / PART * APART + i % PART;
      if (r >= n_rows) continue;
      auto* row = reinterpret_cast<Vector<T, WIDE>*>(y + r * n_cols);
#pragma unroll
      for (int j = 0; j < SUMS; j += WIDE) {
        const int64_t c = first_col + thread_col + j / PART * APART + j % PART;
        if (c >= n_cols) continue;
        Vector<T, WIDE> out = {};
        if (!is_first) out = row[c / WIDE];
#pragma unroll
        for (int l = 0; l < WIDE; ++l) out.item[l] = T(out.item[l] + sum[i][j + l]);
        row[c / WIDE] = out;
      }
    }
  } while (left > 0);
}

template <typename T, int VEC>
void launch(const torch::Tensor& a, const torch::Tensor& b, torch::Tensor& y) {
  const int64_t n_rows = y.size(0), n_cols = y.size(1), n_inner = a.size(1);
  const int64_t across = (n_cols + BLOCK - 1) / BLOCK, blocks = (n_rows + BLOCK - 1) / BLOCK * across;
  TORCH_CHECK_VALUE(blocks <= INT_MAX, "matmul_forward: y has too many tiles for one launch");
  const auto stream = c10::cuda::getCurrentCUDAStream();
  const T *from_a = a.const_data_ptr<T>(), *from_b = b.const_data_ptr<T>();
  matmul_kernel<T, VEC><<<blocks, THREADS, 0, stream>>>(
      from_a, from_b, y.mutable_data_ptr<T>(), n_rows, n_cols, n_inner, static_cast<int>(across));
  C10_CUDA_KERNEL_LAUNCH_CHECK();  // a launch that failed is reported here and nowhere else
}

// Writes y = a b. a: (M, K), b: (K, N), y: (M, N), all contiguous and of one dtype.
void matmul_forward(const torch::Tensor& a, const torch::Tensor& b, torch::Tensor y) {
  TORCH_CHECK_VALUE(a.is_cuda() && b.is_cuda() && y.is_cuda(), "matmul_forward: a, b and y must be on a GPU");
  TORCH_CHECK_VALUE(a.device() == b.device() && a.device() == y.device(),
                    "matmul_forward: a, b and y must be on one GPU; move them with .to()");
  TORCH_CHECK_VALUE(a.dim() == 2 && b.dim() == 2 && y.dim() == 2 && a.size(1) == b.size(0) &&
                        y.size(0) == a.size(0) && y.size(1) == b.size(1),
                    "matmul_forward: a, b and y must be (M, K), (K, N) and (M, N)");
  TORCH_CHECK_VALUE(a.scalar_type() == b.scalar_type() && a.scalar_type() == y.scalar_type(),
                    "matmul_forward: a, b and y must have one dtype");
  TORCH_CHECK_VALUE(a.is_contiguous() && b.is_contiguous() && y.is_contiguous(),
                    "matmul_forward: a, b and y must be contiguous; call .contiguous()");
  if (y.numel() == 0) return;  // a grid of no thread blocks is a launch error
  const c10::cuda::CUDAGuard guard(a.device());  // the GPU of a, which need not be the current one
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, a.scalar_type(), "matmul_forward", [&] {
    constexpr int VEC = 16 / sizeof(scalar_t);
    const uintptr_t starts = reinterpret_cast<uintptr_t>(a.const_data_ptr<scalar_t>()) |
                             reinterpret_cast<uintptr_t>(b.const_data_ptr<scalar_t>()) |
                             reinterpret_cast<uintptr_t>(y.const_data_ptr<scalar_t>());
    if (starts % 16 == 0 && a.size(1) % VEC == 0 && b.size(1) % VEC == 0) {
      launch<scalar_t, VEC>(a, b, y);
    } else {
      launch<scalar_t, 1>(a, b, y);
    }
  });
}
