// SPDX-License-Identifier: MIT
// Copyright (c) 2026 The Fused Kernels authors; Fused Kernels 0.1.0, lib/ops/lora_epilogue.cu
// lora_epilogue: y = act(x + scale · delta + bias), the forward pass in CUDA C++, with 16-byte loads.
//
// Shapes    x, delta, y: (M, N); bias: (N,); float, double, half, bfloat16. The columns of x and delta are
//           contiguous. act is identity, relu, gelu (erf), gelu_tanh, silu or sigmoid, one template argument each.
// Traffic   M N elements of s bytes: 3 M N s, the bias stays in cache.
// One thread block handles ROWS * blockDim.y rows and blockDim.x * VEC columns; one thread VEC adjacent
// columns of ROWS rows. Where 16-byte loads are possible one of x and one of delta a thread are best (VEC = 4
// or 8, ROWS = 1); where they are not (an odd N), a thread needs several small loads in flight (VEC = 1, ROWS = 4).
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

// Quotients and exponentials: fast ones for float (two units off in the last place), exact ones for double.
__device__ __forceinline__ float divide(float a, float b) { return __fdividef(a, b); }
__device__ __forceinline__ double divide(double a, double b) { return a / b; }
__device__ __forceinline__ float exponential(float a) { return __expf(a); }
__device__ __forceinline__ double exponential(double a) { return exp(a); }

// The activations: Math is float or double, and every constant is of that type.
struct Identity {
  template <typename Math>
  static __device__ Math of(Math z) { return z; }
};
struct Relu {
  template <typename Math>
  static __device__ Math of(Math z) { return z < Math(0) ? Math(0) : z; }  // not fmax: a NaN has to stay one
};
struct Gelu {  // z · Φ(z)
  // (1 + erf(z / sqrt(2))) / 2 has lost its digits where Φ is near 0, and normcdff takes as long as all the rest. So
  // Φ(-|z|) = exp(-z² / 2) p(t), t = 1 / (1 + 0.3 |z|), with the p of lora_epilogue.py.
  static __device__ float of(float z) {
    const float t = __fdividef(1.0f, 1.0f + 0.3f * fabsf(z));
    float p = 0.20634661f + t * (-0.15719897f + t * 0.03567376f);
    p = 0.09991446f + t * (0.12855840f + t * (-0.05367744f + t * p));
    p = t * (0.11962931f + t * (0.12075380f + t * p));
    const float tail = exp2f(-0.72134752f * z * z) * p;
    return z * (z < 0.0f ? tail : 1.0f - tail);
  }
  static __device__ double of(double z) { return z * normcdf(z); }
};
struct GeluTanh {  // z · sigmoid(2u), u = sqrt(2/pi) (z + 0.044715 z³)
  template <typename Math>
  static __device__ Math of(Math z) {
    return divide(z, Math(1) + exponential(Math(-1.5957691216057308) * z * (Math(1) + Math(0.044715) * z * z)));
  }
};
struct Silu {
  template <typename Math>
  static __device__ Math of(Math z) { return divide(z, Math(1) + exponential(-z)); }
};
struct Sigmoid {
  template <typename Math>
  static __device__ Math of(Math z) { return divide(Math(1), Math(1) + exponential(-z)); }
};

template <typename T, typename Act, int VEC, int ROWS>
__global__ void __launch_bounds__(THREADS) lora_epilogue_kernel(
    const T* __restrict__ x, const T* __restrict__ delta, const T* __restrict__ bias, T* __restrict__ y,
    at::opmath_type<T> scale, int64_t n_rows, int64_t n_cols, int64_t x_row_stride, int64_t delta_row_stride,
    unsigned n_col_tiles) {
  using Math = at::opmath_type<T>;  // float for half and bfloat16
  using Vec = Vector<T, VEC>;
  // Neighbours in the grid take neighbouring columns: together they read whole rows of x in order.
  const int64_t first_row = int64_t(blockIdx.x / n_col_tiles) * (ROWS * blockDim.y) + threadIdx.y;
  const int64_t col = (int64_t(blockIdx.x % n_col_tiles) * blockDim.x + threadIdx.x) * VEC;
  if (col >= n_cols) return;

  const Vec b = *reinterpret_cast<const Vec*>(bias + col);
  Vec tile[ROWS], low_rank[ROWS];
#pragma unroll
  for (int i = 0; i < ROWS; ++i) {
    const int64_t row = first_row + i * blockDim.y;
    if (row < n_rows) {
      tile[i] = *reinterpret_cast<const Vec*>(x + row * x_row_stride + col);
      low_rank[i] = *reinterpret_cast<const Vec*>(delta + row * delta_row_stride + col);
    }
  }
#pragma unroll
  for (int i = 0; i < ROWS; ++i) {
    const int64_t row = first_row + i * blockDim.y;
    if (row >= n_rows) break;
#pragma unroll
    for (int j = 0; j < VEC; ++j) {
      const Math z = Math(tile[i].item[j]) + scale * Math(low_rank[i].item[j]) + Math(b.item[j]);
      tile[i].item[j] = T(Act::of(z));
    }
    // an index of Vec, not of T: only then does nvcc store 16 bytes at once and not four times four
    reinterpret_cast<Vec*>(y)[(row * n_cols + col) / VEC] = tile[i];
  }
}

template <typename T, typename Act, int VEC, int ROWS>
void launch(const torch::Tensor& x, const torch::Tensor& delta, const torch::Tensor& bias, torch::Tensor& y,
            double scale) {
  const int64_t n_rows = x.size(0), n_cols = x.size(1), vectors = (n_cols + VEC - 1) / VEC;
  int threads_x = 1;  // narrow rows: several of them side by side in one thread block
  while (threads_x < vectors && threads_x < THREADS) threads_x *= 2;
  const dim3 block(threads_x, THREADS / threads_x);
  const int64_t rows_per_block = int64_t(ROWS) * block.y;
  const int64_t n_col_tiles = (vectors + threads_x - 1) / threads_x;
  const int64_t blocks = (n_rows + rows_per_block - 1) / rows_per_block * n_col_tiles;
  TORCH_CHECK_VALUE(blocks <= INT_MAX, "lora_epilogue_forward: x is too large for one launch");
  lora_epilogue_kernel<T, Act, VEC, ROWS><<<blocks, block, 0, c10::cuda::getCurrentCUDAStream()>>>(
      x.const_data_ptr<T>(), delta.const_data_ptr<T>(), bias.const_data_ptr<T>(), y.mutable_data_ptr<T>(),
      static_cast<at::opmath_type<T>>(scale),  // once here, not once for each element
      n_rows, n_cols, x.stride(0), delta.stride(0), static_cast<unsigned>(n_col_tiles));
  C10_CUDA_KERNEL_LAUNCH_CHECK();  // too many threads, say, is reported here and nowhere else
}

template <typename T, typename Act>
void launch_aligned(const torch::Tensor& x, const torch::Tensor& delta, const torch::Tensor& bias, torch::Tensor& y,
                    double scale) {
  constexpr int VEC = 16 / sizeof(T);
  const auto on_boundary = [](const torch::Tensor& t) {
    return reinterpret_cast<uintptr_t>(t.const_data_ptr<T>()) % 16 == 0;
  };
  const bool aligned = x.size(1) % VEC == 0 && x.stride(0) % VEC == 0 && delta.stride(0) % VEC == 0 &&
                       on_boundary(x) && on_boundary(delta) && on_boundary(bias) && on_boundary(y);
  if (aligned) {
    launch<T, Act, VEC, 1>(x, delta, bias, y, scale);
  } else {
    launch<T, Act, 1, 4>(x, delta, bias, y, scale);
  }
}

// Writes y = act(x + scale · delta + bias). x, delta: (M, N) with contiguous columns; bias: (N,); y: (M, N),
// contiguous; activation: 0 identity, 1 relu, 2 gelu, 3 gelu_tanh, 4 silu, 5 sigmoid.
void lora_epilogue_forward(const torch::Tensor& x, const torch::Tensor& delta, const torch::Tensor& bias,
                           torch::Tensor y, double scale, int64_t activation) {
  TORCH_CHECK_VALUE(x.is_cuda() && delta.is_cuda() && bias.is_cuda() && y.is_cuda(),
                    "lora_epilogue_forward: all tensors must be on a GPU");
  TORCH_CHECK_VALUE(x.dim() == 2 && bias.dim() == 1 && bias.size(0) == x.size(1) && delta.sizes() == x.sizes() &&
                        y.sizes() == x.sizes(),
                    "lora_epilogue_forward: x, delta and y must be (M, N), bias (N,)");
  TORCH_CHECK_VALUE(x.scalar_type() == bias.scalar_type() && x.scalar_type() == delta.scalar_type() &&
                        x.scalar_type() == y.scalar_type(),
                    "lora_epilogue_forward: x, delta, bias and y must have one dtype");
  TORCH_CHECK_VALUE((x.size(1) == 1 || (x.stride(1) == 1 && delta.stride(1) == 1)) && bias.is_contiguous() &&
                        y.is_contiguous(),
                    "lora_epilogue_forward: columns must be contiguous; call .contiguous()");
  TORCH_CHECK_VALUE(activation >= 0 && activation < 6, "lora_epilogue_forward: activation must be 0 to 5");
  if (y.numel() == 0) return;  // a grid of no thread blocks is a launch error
  const c10::cuda::CUDAGuard guard(x.device());  // the GPU of x, which need not be the current one
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, x.scalar_type(), "lora_epilogue_forward", [&] {
    switch (activation) {
      case 0: return launch_aligned<scalar_t, Identity>(x, delta, bias, y, scale);
      case 1: return launch_aligned<scalar_t, Relu>(x, delta, bias, y, scale);
      case 2: return launch_aligned<scalar_t, Gelu>(x, delta, bias, y, scale);
      case 3: return launch_aligned<scalar_t, GeluTanh>(x, delta, bias, y, scale);
      case 4: return launch_aligned<scalar_t, Silu>(x, delta, bias, y, scale);
      default: return launch_aligned<scalar_t, Sigmoid>(x, delta, bias, y, scale);
    }
  });
}
