// What host code asks of CUDA and of PyTorch's CUDA library. There is one device, it has no
// streams, and every call has been carried out when it returns.
#pragma once

static inline const char* cudaGetErrorName(cudaError_t error) { return cudaGetErrorString(error); }
static inline cudaError_t cudaPeekAtLastError() { return cuda_on_cpu::runtime.last_error; }
static inline cudaError_t cudaGetLastError() {
  cudaError_t error = cuda_on_cpu::runtime.last_error;
  cuda_on_cpu::runtime.last_error = cudaSuccess;
  return error;
}

static inline cudaError_t cudaDeviceSynchronize() { return cudaSuccess; }
static inline cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }
static inline cudaError_t cudaGetDevice(int* device) { return *device = 0, cudaSuccess; }
static inline cudaError_t cudaSetDevice(int) { return cudaSuccess; }

enum cudaMemcpyKind {
  cudaMemcpyHostToHost,
  cudaMemcpyHostToDevice,
  cudaMemcpyDeviceToHost,
  cudaMemcpyDeviceToDevice,
  cudaMemcpyDefault
};
static inline cudaError_t cudaMemset(void* to, int value, size_t bytes) {
  return std::memset(to, value, bytes), cudaSuccess;
}
static inline cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes,
                                          cudaStream_t = nullptr) {
  return cudaMemset(to, value, bytes);
}
static inline cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind) {
  return std::memcpy(to, from, bytes), cudaSuccess;
}
static inline cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes,
                                          cudaMemcpyKind kind, cudaStream_t = nullptr) {
  return cudaMemcpy(to, from, bytes, kind);
}
template <class Symbol>
static inline cudaError_t cudaMemcpyToSymbol(Symbol& to, const void* from, size_t bytes) {
  return std::memcpy(&to, from, bytes), cudaSuccess;
}

// More than 48 KB of dynamic shared memory: a GPU keeps the limit for each kernel, we keep one.
enum cudaFuncAttribute {
  cudaFuncAttributeMaxDynamicSharedMemorySize = 8,
  cudaFuncAttributePreferredSharedMemoryCarveout = 9
};
template <class Kernel>
static inline cudaError_t cudaFuncSetAttribute(Kernel, cudaFuncAttribute attribute, int value) {
  if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize) return cudaSuccess;
  size_t bytes = static_cast<size_t>(value);
  if (value < 0 || bytes > cuda_on_cpu::kMaxSharedMemoryBytes) return cudaErrorInvalidValue;
  cuda_on_cpu::runtime.shared_limit = std::max(cuda_on_cpu::runtime.shared_limit, bytes);
  return cudaSuccess;
}

// The properties a launcher may read to choose its grid: those of an H100.
struct cudaDeviceProp {
  char name[256] = "cuda_on_cpu";
  int major = 9, minor = 0;
  int multiProcessorCount = 132;
  int warpSize = 32;
  int maxThreadsPerBlock = 1024;
  int maxThreadsPerMultiProcessor = 2048;
  int regsPerBlock = 65536;
  size_t sharedMemPerBlock = cuda_on_cpu::kSharedMemoryBytes;
  size_t sharedMemPerBlockOptin = cuda_on_cpu::kMaxSharedMemoryBytes;
  size_t sharedMemPerMultiprocessor = 228 << 10;
  int l2CacheSize = 50 << 20;
};
static inline cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int) {
  return *properties = cudaDeviceProp(), cudaSuccess;
}

namespace c10::cuda {
struct CUDAStream {
  operator cudaStream_t() const { return nullptr; }
  cudaStream_t stream() const { return nullptr; }
  void synchronize() const {}
};
static inline CUDAStream getCurrentCUDAStream(int = -1) { return {}; }
static inline CUDAStream getDefaultCUDAStream(int = -1) { return {}; }

struct CUDAGuard {
  template <class Device>
  explicit CUDAGuard(Device) {}
};
struct OptionalCUDAGuard {
  OptionalCUDAGuard() {}
  template <class Device>
  explicit OptionalCUDAGuard(Device) {}
};
}  // namespace c10::cuda
namespace at::cuda {
using c10::cuda::CUDAGuard;
using c10::cuda::CUDAStream;
using c10::cuda::getCurrentCUDAStream;
using c10::cuda::getDefaultCUDAStream;
using c10::cuda::OptionalCUDAGuard;
static inline const cudaDeviceProp* getCurrentDeviceProperties() {
  static const cudaDeviceProp properties;
  return &properties;
}
}  // namespace at::cuda

#define C10_CUDA_CHECK(call) ::cuda_on_cpu::check(call)
#define AT_CUDA_CHECK(call) C10_CUDA_CHECK(call)
#define C10_CUDA_KERNEL_LAUNCH_CHECK() C10_CUDA_CHECK(cudaGetLastError())

namespace cuda_on_cpu {

// Bindings take int64_t and double. A host function may have int and float, as under pybind11:
// Bound<function>::call is the same function with the wider types.
template <class T>
using BindingType = std::conditional_t<
    std::is_same_v<T, bool>, bool,
    std::conditional_t<std::is_integral_v<T>, std::int64_t,
                       std::conditional_t<std::is_floating_point_v<T>, double, T>>>;

template <auto function>
struct Bound;
template <class Result, class... Arguments, Result (*function)(Arguments...)>
struct Bound<function> {
  static BindingType<Result> call(BindingType<Arguments>... arguments) {
    return function(static_cast<Arguments>(arguments)...);
  }
};

}  // namespace cuda_on_cpu

// lib.nogpu.cuda.memory_traffic reads this through ctypes.
extern "C" inline __attribute__((used, visibility("default"))) void cuda_on_cpu_statistics(
    std::int64_t* out) {
  cuda_on_cpu::Statistics& statistics = cuda_on_cpu::runtime.statistics;
  out[0] = statistics.launches;
  out[1] = statistics.thread_blocks;
  out[2] = statistics.threads;
  out[3] = statistics.bytes_read;
  out[4] = statistics.bytes_written;
  statistics = {};
}
