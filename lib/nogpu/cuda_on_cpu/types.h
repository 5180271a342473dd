// The words and plain types of CUDA C++ that a C++ compiler does not know.
#pragma once

// A kernel is an ordinary function here, and __device__ memory is ordinary memory.
#define __global__
#define __device__
#define __host__
#define __constant__
#define __managed__
#define __grid_constant__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __align__(n) alignas(n)

// float2, float3, float4, make_float2 ... with the alignment they have on a GPU: float4 must lie on
// a multiple of 16 bytes, which is what checked mode holds a reinterpret_cast<float4*> to.
#define CUDA_ON_CPU_VECTOR_TYPES(Element, name)                                               \
  struct alignas(2 * sizeof(Element)) name##2 { Element x, y; };                              \
  struct name##3 { Element x, y, z; };                                                        \
  struct alignas(4 * sizeof(Element) > 16 ? 16 : 4 * sizeof(Element)) name##4 {               \
    Element x, y, z, w;                                                                       \
  };                                                                                          \
  static inline name##2 make_##name##2(Element x, Element y) { return {x, y}; }               \
  static inline name##3 make_##name##3(Element x, Element y, Element z) { return {x, y, z}; } \
  static inline name##4 make_##name##4(Element x, Element y, Element z, Element w) {          \
    return {x, y, z, w};                                                                      \
  }
CUDA_ON_CPU_VECTOR_TYPES(signed char, char)
CUDA_ON_CPU_VECTOR_TYPES(unsigned char, uchar)
CUDA_ON_CPU_VECTOR_TYPES(short, short)
CUDA_ON_CPU_VECTOR_TYPES(unsigned short, ushort)
CUDA_ON_CPU_VECTOR_TYPES(int, int)
CUDA_ON_CPU_VECTOR_TYPES(unsigned int, uint)
CUDA_ON_CPU_VECTOR_TYPES(long long, longlong)
CUDA_ON_CPU_VECTOR_TYPES(unsigned long long, ulonglong)
CUDA_ON_CPU_VECTOR_TYPES(float, float)
CUDA_ON_CPU_VECTOR_TYPES(double, double)

struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
  constexpr dim3(uint3 v) : x(v.x), y(v.y), z(v.z) {}
};

namespace cuda_on_cpu {
// Written by the runtime each time a thread gets its turn; a kernel can only read them.
struct BuiltinVariables {
  uint3 thread_index, block_index;
  dim3 block_size, grid_size;
};
static BuiltinVariables builtin;
}  // namespace cuda_on_cpu
static const uint3& threadIdx = cuda_on_cpu::builtin.thread_index;
static const uint3& blockIdx = cuda_on_cpu::builtin.block_index;
static const dim3& blockDim = cuda_on_cpu::builtin.block_size;
static const dim3& gridDim = cuda_on_cpu::builtin.grid_size;
static constexpr int warpSize = 32;

typedef struct CUstream_st* cudaStream_t;
typedef int cudaError_t;
enum {
  cudaSuccess = 0,
  cudaErrorInvalidValue = 1,
  cudaErrorMemoryAllocation = 2,
  cudaErrorInvalidConfiguration = 9,
  cudaErrorIllegalAddress = 700,
  cudaErrorLaunchFailure = 719
};
