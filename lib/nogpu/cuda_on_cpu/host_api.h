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
static inline cudaError_t cudaGetDevice(int* device) { return *device = 0, cudaSuccess; }
static inline cudaError_t cudaGetDeviceCount(int* count) { return *count = 1, cudaSuccess; }
static inline cudaError_t cudaSetDevice(int) { return cudaSuccess; }

static inline cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }
static inline cudaError_t cudaStreamCreate(cudaStream_t* stream) {
  return *stream = nullptr, cudaSuccess;
}
enum { cudaStreamDefault = 0, cudaStreamNonBlocking = 1 };
static inline cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) {
  return cudaStreamCreate(stream);
}
static inline cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }

// An event is the time at which it was recorded; all before it has been done by then.
struct CUevent_st {
  double milliseconds = -1;
};
typedef CUevent_st* cudaEvent_t;
enum { cudaEventDefault = 0, cudaEventDisableTiming = 2 };
static inline cudaError_t cudaEventCreate(cudaEvent_t* event) {
  return *event = new CUevent_st, cudaSuccess;
}
static inline cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  return cudaEventCreate(event);
}
static inline cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete event;
  return cudaSuccess;
}
static inline cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t = nullptr) {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  event->milliseconds =
      static_cast<double>(now.tv_sec) * 1e3 + static_cast<double>(now.tv_nsec) * 1e-6;
  return cudaSuccess;
}
static inline cudaError_t cudaEventSynchronize(cudaEvent_t) { return cudaSuccess; }
static inline cudaError_t cudaEventQuery(cudaEvent_t) { return cudaSuccess; }
static inline cudaError_t cudaStreamWaitEvent(cudaStream_t, cudaEvent_t, unsigned = 0) {
  return cudaSuccess;
}
static inline cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t start,
                                               cudaEvent_t end) {
  if (start->milliseconds < 0 || end->milliseconds < 0) return cudaErrorInvalidValue;
  return *milliseconds = static_cast<float>(end->milliseconds - start->milliseconds), cudaSuccess;
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
  size_t totalGlobalMem = size_t(80) << 30;
  int maxThreadsDim[3] = {1024, 1024, 64};
  int maxGridSize[3] = {2147483647, 65535, 65535};
  int maxBlocksPerMultiProcessor = 32;
  int regsPerMultiprocessor = 65536;
};
static inline cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int) {
  return *properties = cudaDeviceProp(), cudaSuccess;
}
enum cudaDeviceAttr {
  cudaDevAttrMaxThreadsPerBlock = 1,
  cudaDevAttrMaxSharedMemoryPerBlock = 8,
  cudaDevAttrWarpSize = 10,
  cudaDevAttrMultiProcessorCount = 16,
  cudaDevAttrL2CacheSize = 38,
  cudaDevAttrMaxThreadsPerMultiProcessor = 39,
  cudaDevAttrComputeCapabilityMajor = 75,
  cudaDevAttrComputeCapabilityMinor = 76,
  cudaDevAttrMaxSharedMemoryPerMultiprocessor = 81,
  cudaDevAttrMaxSharedMemoryPerBlockOptin = 97
};
static inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  cudaDeviceProp gpu;
  switch (attribute) {
    case cudaDevAttrMaxThreadsPerBlock: *value = gpu.maxThreadsPerBlock; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *value = int(gpu.sharedMemPerBlock); break;
    case cudaDevAttrWarpSize: *value = gpu.warpSize; break;
    case cudaDevAttrMultiProcessorCount: *value = gpu.multiProcessorCount; break;
    case cudaDevAttrL2CacheSize: *value = gpu.l2CacheSize; break;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *value = gpu.maxThreadsPerMultiProcessor; break;
    case cudaDevAttrComputeCapabilityMajor: *value = gpu.major; break;
    case cudaDevAttrComputeCapabilityMinor: *value = gpu.minor; break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor:
      *value = int(gpu.sharedMemPerMultiprocessor);
      break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = int(gpu.sharedMemPerBlockOptin); break;
    default: return cudaErrorInvalidValue;
  }
  return cudaSuccess;
}

// As many blocks as threads and shared memory allow: what registers a kernel takes is not known
// here.
template <class Kernel>
static inline cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, Kernel,
                                                                        int threads,
                                                                        size_t shared_bytes) {
  cudaDeviceProp gpu;
  if (threads < 1 || threads > gpu.maxThreadsPerBlock) return cudaErrorInvalidValue;
  *blocks = std::min(gpu.maxThreadsPerMultiProcessor / threads, gpu.maxBlocksPerMultiProcessor);
  if (shared_bytes) *blocks = std::min(*blocks, int(gpu.sharedMemPerMultiprocessor / shared_bytes));
  return cudaSuccess;
}
template <class Kernel>
static inline cudaError_t cudaOccupancyMaxPotentialBlockSize(int* grid, int* block, Kernel kernel,
                                                             size_t shared_bytes = 0,
                                                             int limit = 0) {
  *block = limit > 0 ? std::min(limit, 1024) : 1024;
  cudaError_t error =
      cudaOccupancyMaxActiveBlocksPerMultiprocessor(grid, kernel, *block, shared_bytes);
  *grid *= cudaDeviceProp().multiProcessorCount;
  return error;
}

namespace c10::cuda {
struct CUDAStream {
  operator cudaStream_t() const { return nullptr; }
  cudaStream_t stream() const { return nullptr; }
  void synchronize() const {}
};
static inline CUDAStream getCurrentCUDAStream(int = -1) { return {}; }
static inline CUDAStream getDefaultCUDAStream(int = -1) { return {}; }
static inline CUDAStream getStreamFromPool(bool = false, int = -1) { return {}; }
static inline int device_count() { return 1; }
static inline int current_device() { return 0; }

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
using c10::cuda::getStreamFromPool;
using c10::cuda::OptionalCUDAGuard;
static inline const cudaDeviceProp* getCurrentDeviceProperties() {
  static const cudaDeviceProp properties;
  return &properties;
}
}  // namespace at::cuda

// PyTorch's headers have it for nvcc alone.
namespace at {
template <class T>
struct RestrictPtrTraits {
  typedef T* __restrict__ PtrType;
};
}  // namespace at
namespace torch {
using at::RestrictPtrTraits;
}

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
    if constexpr (std::is_same_v<Result, at::Tensor>) {
      return whole(function(static_cast<Arguments>(arguments)...));
    } else {
      return function(static_cast<Arguments>(arguments)...);
    }
  }
};

// The same with the types as they are.
template <auto function>
struct Strict;
template <class Result, class... Arguments, Result (*function)(Arguments...)>
struct Strict<function> {
  static Result call(Arguments... arguments) {
    if constexpr (std::is_same_v<Result, at::Tensor>) {
      return whole(function(std::forward<Arguments>(arguments)...));
    } else {
      return function(std::forward<Arguments>(arguments)...);
    }
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
  out[5] = statistics.most_read_by_a_thread;
  out[6] = statistics.shared_bytes;
  statistics = {};
}
