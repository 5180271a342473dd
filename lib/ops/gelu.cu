// SPDX-License-Identifier: MIT
// Copyright (c) 2026 The Fused Kernels authors; Fused Kernels 0.1.0, lib/ops/gelu.cu
// gelu: y = x · Φ(x), the forward pass in CUDA C++, with single loads and with 16-byte loads.
//
// Shapes    x, y: n elements, contiguous; float, double, half, bfloat16 (computed in float).
// Traffic   n elements of s bytes: 2 n s.
// gelu_scalar_kernel: one thread, one element. gelu_vector_kernel: one thread, 16 bytes of adjacent elements; the
// last thread takes what is left of them one by one. Both kernels move the same bytes; for two-byte types the
// first needs eight times as many loads in flight to move them as fast.
//
// In PyTorch   gelu.py beside this file builds it with load_inline.
// Alone        nvcc -O3 -arch=native -DSTANDALONE gelu.cu -o gelu && ./gelu
#include <climits>
#include <cstdint>

#ifdef STANDALONE
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <type_traits>
#include <vector>

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#else
#include <ATen/Dispatch.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/types.h>
#endif

constexpr int THREADS = 128;

// float for all but double: what a value of type T is computed in.
template <typename T>
struct MathOf {
  using type = float;
};
template <>
struct MathOf<double> {
  using type = double;
};

// gelu(x) = x · sigmoid(2u), u = sqrt(2/pi) (x + 0.044715 x³): e is 0 or inf for a large |x|, and no NaN comes of it.
__device__ __forceinline__ float gelu_tanh(float x) {
  const float e = __expf(-1.5957691f * x * (1.0f + 0.044715f * x * x));
  return __fdividef(x, 1.0f + e);  // two instructions; an exact division takes a dozen
}

__device__ __forceinline__ double gelu_tanh(double x) {
  return x / (1 + exp(-1.5957691216057308 * x * (1 + 0.044715 * x * x)));
}

// gelu(x) = x · Φ(x). (1 + erf(x / sqrt(2))) / 2 has lost its digits where Φ is near 0, and normcdff takes as long
// as all the rest of the kernel. So Φ(-|x|) = exp(-x² / 2) p(t), t = 1 / (1 + 0.3 |x|), with the p of gelu.py.
__device__ __forceinline__ float gelu_erf(float x) {
  const float t = __fdividef(1.0f, 1.0f + 0.3f * fabsf(x));
  float p = 0.20634661f + t * (-0.15719897f + t * 0.03567376f);
  p = 0.09991446f + t * (0.12855840f + t * (-0.05367744f + t * p));
  p = t * (0.11962931f + t * (0.12075380f + t * p));
  const float tail = exp2f(-0.72134752f * x * x) * p;
  return x * (x < 0.0f ? tail : 1.0f - tail);
}

__device__ __forceinline__ double gelu_erf(double x) { return x * normcdf(x); }

template <bool TANH, typename T>
__device__ __forceinline__ T gelu(T value) {
  using Math = typename MathOf<T>::type;
  const Math x = static_cast<Math>(value);
  return static_cast<T>(TANH ? gelu_tanh(x) : gelu_erf(x));
}

template <typename T, bool TANH>
__global__ void __launch_bounds__(THREADS)
    gelu_scalar_kernel(const T* __restrict__ x, T* __restrict__ y, int64_t n) {
  const int64_t i = int64_t(blockIdx.x) * THREADS + threadIdx.x;  // int64: int is full at 2^31
  if (i < n) y[i] = gelu<TANH>(x[i]);
}

// 16 bytes that move in one instruction, LDG.128.
template <typename T>
struct alignas(16) Vector {
  T item[16 / sizeof(T)];
};

template <typename T, bool TANH>
__global__ void __launch_bounds__(THREADS)
    gelu_vector_kernel(const T* __restrict__ x, T* __restrict__ y, int64_t n) {
  constexpr int VEC = 16 / sizeof(T);
  const int64_t i = (int64_t(blockIdx.x) * THREADS + threadIdx.x) * VEC;
  if (i + VEC <= n) {
    Vector<T> v = *reinterpret_cast<const Vector<T>*>(x + i);
#pragma unroll
    for (int j = 0; j < VEC; ++j) v.item[j] = gelu<TANH>(v.item[j]);
    *reinterpret_cast<Vector<T>*>(y + i) = v;
  } else {
    for (int64_t k = i; k < n; ++k) y[k] = gelu<TANH>(x[k]);
  }
}

#ifndef STANDALONE

template <typename T, bool TANH>
void launch(const torch::Tensor& x, torch::Tensor& y, bool vectorized) {
  const int64_t n = x.numel(), per_block = vectorized ? THREADS * 16 / sizeof(T) : THREADS;
  const int64_t blocks = (n + per_block - 1) / per_block;
  TORCH_CHECK_VALUE(blocks <= INT_MAX, "gelu_forward: x is too large for one launch");
  const T* from = x.const_data_ptr<T>();
  T* to = y.mutable_data_ptr<T>();
  const auto stream = c10::cuda::getCurrentCUDAStream();
  if (vectorized) {
    gelu_vector_kernel<T, TANH><<<blocks, THREADS, 0, stream>>>(from, to, n);
  } else {
    gelu_scalar_kernel<T, TANH><<<blocks, THREADS, 0, stream>>>(from, to, n);
  }
  C10_CUDA_KERNEL_LAUNCH_CHECK();  // a launch that failed is reported here and nowhere else
}

// Writes y = gelu(x), both contiguous; with `vectorized`, by 16-byte loads where x and y begin at a multiple of 16.
void gelu_forward(const torch::Tensor& x, torch::Tensor y, bool tanh, bool vectorized) {
  TORCH_CHECK_VALUE(x.is_cuda() && y.is_cuda(), "gelu_forward: x and y must be on a GPU");
  TORCH_CHECK_VALUE(x.sizes() == y.sizes(), "gelu_forward: x and y must have one shape");
  TORCH_CHECK_VALUE(x.scalar_type() == y.scalar_type(), "gelu_forward: x and y must have one dtype");
  TORCH_CHECK_VALUE(x.is_contiguous() && y.is_contiguous(),
                    "gelu_forward: x and y must be contiguous; call .contiguous()");
  if (x.numel() == 0) return;  // a grid of no thread blocks is a launch error
  const c10::cuda::CUDAGuard guard(x.device());  // the GPU of x, which need not be the current one
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, x.scalar_type(), "gelu_forward", [&] {
    const auto on_boundary = [](const torch::Tensor& t) {
      return reinterpret_cast<uintptr_t>(t.const_data_ptr<scalar_t>()) % 16 == 0;
    };
    const bool wide = vectorized && on_boundary(x) && on_boundary(y);
    if (tanh) {
      launch<scalar_t, true>(x, y, wide);
    } else {
      launch<scalar_t, false>(x, y, wide);
    }
  });
}

#else  // a program of its own

#define CHECK(call)                                                          \
  do {                                                                       \
    const cudaError_t error = (call);                                        \
    if (error != cudaSuccess) {                                              \
      std::fprintf(stderr, "%s: %s\n", #call, cudaGetErrorString(error));    \
      std::exit(1);                                                          \
    }                                                                        \
  } while (0)

static double gelu_on_the_host(double x, bool tanh_form) {
  if (!tanh_form) return 0.5 * x * (1 + std::erf(x / std::sqrt(2.0)));
  return 0.5 * x * (1 + std::tanh(std::sqrt(2 / std::acos(-1.0)) * (x + 0.044715 * x * x * x)));
}

// Median time in µs of one launch, over `runs` launches, each between two events. The L2 cache is not flushed: take
// more elements than fit in it.
template <typename Launch>
static double time_us(Launch launch, int runs = 50) {
  cudaEvent_t start, stop;
  CHECK(cudaEventCreate(&start));
  CHECK(cudaEventCreate(&stop));
  std::vector<float> times_ms(runs);
  for (int i = -5; i < runs; ++i) {  // five to warm up
    CHECK(cudaEventRecord(start));
    launch();
    CHECK(cudaEventRecord(stop));
    CHECK(cudaEventSynchronize(stop));
    if (i >= 0) CHECK(cudaEventElapsedTime(&times_ms[i], start, stop));
  }
  CHECK(cudaEventDestroy(start));
  CHECK(cudaEventDestroy(stop));
  std::nth_element(times_ms.begin(), times_ms.begin() + runs / 2, times_ms.end());
  return 1e3 * times_ms[runs / 2];
}

// One line: the largest error of the first million results against double on the host, and the bandwidth.
// Returns false if the error is more than rounding explains.
template <typename T, bool TANH, bool VECTORIZED>
static bool run(const char* type, int64_t n) {
  const int64_t n_checked = std::min<int64_t>(n, 1 << 20);
  std::vector<T> values(n);
  for (int64_t i = 0; i < n; ++i) values[i] = T(float((i * 37) % 20011 - 10005) / 1000.0f);  // -10 to 10
  T *x, *y;
  CHECK(cudaMalloc(&x, n * sizeof(T)));
  CHECK(cudaMalloc(&y, n * sizeof(T)));
  CHECK(cudaMemcpy(x, values.data(), n * sizeof(T), cudaMemcpyHostToDevice));
  const int64_t per_block = VECTORIZED ? THREADS * 16 / sizeof(T) : THREADS;
  const unsigned blocks = unsigned((n + per_block - 1) / per_block);
  const double us = time_us([&] {
    if (VECTORIZED) {
      gelu_vector_kernel<T, TANH><<<blocks, THREADS>>>(x, y, n);
    } else {
      gelu_scalar_kernel<T, TANH><<<blocks, THREADS>>>(x, y, n);
    }
    CHECK(cudaGetLastError());
  });
  std::vector<T> results(n);
  CHECK(cudaMemcpy(results.data(), y, n * sizeof(T), cudaMemcpyDeviceToHost));
  double worst = 0;
  for (int64_t i = 0; i < n; ++i) {
    if (i >= n_checked && i < n - 64) continue;  // the beginning, and the tail
    const double want = gelu_on_the_host(double(float(values[i])), TANH);
    worst = std::max(worst, std::abs(double(float(results[i])) - want));
  }
  CHECK(cudaFree(x));
  CHECK(cudaFree(y));
  // Results are below 16. Rounding them to T is off by up to 8 units, 2^-24, 2^-11 or 2^-8 of 1; computing them in
  // float, with the fast exponential and quotient, by four in the last place of a float.
  const double unit = std::is_same_v<T, float> ? 0x1p-24 : std::is_same_v<T, __half> ? 0x1p-11 : 0x1p-8;
  const bool right = worst <= 8 * unit + 64 * 0x1p-24;
  std::printf("%-9s %-5s %-7s max error %.1e %s %9.1f us %8.1f GB/s\n", type, TANH ? "tanh" : "erf",
              VECTORIZED ? "vector" : "scalar", worst, right ? "ok   " : "WRONG", us,
              2.0 * n * sizeof(T) / us / 1e3);
  return right;
}

template <typename T>
static bool run_all(const char* type, int64_t n) {
  const bool scalar = run<T, true, false>(type, n) & run<T, false, false>(type, n);
  const bool vector = run<T, true, true>(type, n) & run<T, false, true>(type, n);
  return scalar && vector;
}

// ./gelu [n]: n elements, 64 Mi + 3 unless given (the 3 are a tail that no vector covers).
int main(int argc, char** argv) {
  const int64_t n = argc > 1 ? std::atoll(argv[1]) : (int64_t(1) << 26) + 3;
  if (n < 1) {
    std::fprintf(stderr, "gelu: the number of elements must be at least 1\n");
    return 1;
  }
  const bool right = run_all<float>("float", n) & run_all<__half>("half", n) & run_all<__nv_bfloat16>("bfloat16", n);
  return right ? 0 : 1;
}

#endif
