// Memory that host code asks CUDA for, and copies of it. Each call is held to what is known of its
// pointers, as by a GPU's driver: where that returns an error that many programs do not look at,
// checked mode raises it.
#pragma once
namespace cuda_on_cpu {

// What cudaMalloc and cudaMallocHost gave.
static std::unordered_map<void*, c10::intrusive_ptr<c10::StorageImpl>> allocated;

template <class T>
static cudaError_t allocate(T** pointer, size_t bytes, Memory memory) {
  constexpr size_t element_bytes = sizeof(std::conditional_t<std::is_void_v<T>, char, T>);
  auto storage = c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), bytes, c10::GetAllocator(c10::DeviceType::CPU), false);
  *pointer = static_cast<T*>(storage->mutable_data());
  // Bytes are filled as pairs: the kernel may take them for floats.
  fill_never_written(reinterpret_cast<char*>(*pointer), bytes, std::max<size_t>(element_bytes, 2));
  note_memory(storage, Address(*pointer), bytes, element_bytes, true, memory);
  allocated[*pointer] = std::move(storage);
  return cudaSuccess;
}

struct HostCall {
  const char* name;
  Place place;

  cudaError_t refuse(const std::string& why) const {
    std::string detail = std::string(name) + " " + why;
    if (place.file) detail += "\n  at " + std::string(place.file) + ":" + std::to_string(place.line);
#ifdef CUDA_ON_CPU_CHECKED
    raise("CUDA error: invalid argument: " + detail, cudaErrorInvalidValue);
#endif
    runtime.last_error_detail = detail;
    return runtime.last_error = cudaErrorInvalidValue;
  }
};

// Its callers have no place to name: cudaFree is often passed on as a function.
static cudaError_t give_back(const char* name, void* pointer) {
  if (!pointer || allocated.erase(pointer)) return cudaSuccess;
  return HostCall{name, {}}.refuse("of a pointer that was not allocated, or is freed already");
}

// Why a copy cannot go `side` ("to", "from") so many bytes there; empty where it can.
static std::string why_not(const void* pointer, size_t bytes, const char* side, bool host_is_fine,
                           bool gpu_is_fine) {
  if (!bytes) return "";
  std::string text = std::string(side) + " ";
  if (!pointer) return text + "a null pointer";
  std::lock_guard<std::mutex> lock(runtime.mutex);
  forget_freed_tensors();
  // What was freed may be the host's by now.
  std::string freed = host_is_fine ? "" : freed_at(Address(pointer));
  if (!freed.empty()) return text + freed;
  auto [memory, bytes_left] = memory_at(Address(pointer));
  if (memory == Memory::host && !host_is_fine)
    return text + "memory of the host: the direction of the copy says that it is the GPU's";
  if (memory == Memory::gpu && !gpu_is_fine)
    return text + "memory of cudaMalloc: the direction of the copy says that it is the host's";
  if (bytes > bytes_left) {
    return text + "memory that has " + std::to_string(bytes_left) + " bytes from there on: " +
           std::to_string(bytes) + " are asked for";
  }
  return "";
}

}  // namespace cuda_on_cpu

template <class T>
static cudaError_t cudaMalloc(T** pointer, size_t bytes) {
  return cuda_on_cpu::allocate(pointer, bytes, cuda_on_cpu::Memory::gpu);
}
template <class T>
static inline cudaError_t cudaMallocAsync(T** pointer, size_t bytes, cudaStream_t) {
  return cudaMalloc(pointer, bytes);
}
enum { cudaMemAttachGlobal = 1, cudaMemAttachHost = 2 };
template <class T>
static inline cudaError_t cudaMallocManaged(T** pointer, size_t bytes, unsigned = 1) {
  return cuda_on_cpu::allocate(pointer, bytes, cuda_on_cpu::Memory::both);
}
template <class T>
static inline cudaError_t cudaMallocPitch(T** pointer, size_t* pitch, size_t width, size_t height) {
  *pitch = (width + 511) / 512 * 512;
  return cudaMalloc(pointer, *pitch * height);
}
static inline cudaError_t cudaFree(void* pointer) {
  return cuda_on_cpu::give_back("cudaFree", pointer);
}
static inline cudaError_t cudaFreeAsync(void* pointer, cudaStream_t) { return cudaFree(pointer); }
// A kernel may use a page-locked pointer as it is, on a GPU too.
template <class T>
static inline cudaError_t cudaMallocHost(T** pointer, size_t bytes, unsigned = 0) {
  return cuda_on_cpu::allocate(pointer, bytes, cuda_on_cpu::Memory::both);
}
enum { cudaHostAllocDefault = 0, cudaHostAllocPortable = 1, cudaHostAllocMapped = 2 };
template <class T>
static inline cudaError_t cudaHostAlloc(T** pointer, size_t bytes, unsigned) {
  return cudaMallocHost(pointer, bytes);
}
template <class T>
static inline cudaError_t cudaHostGetDevicePointer(T** pointer, void* host, unsigned) {
  return *pointer = static_cast<T*>(host), cudaSuccess;
}
static inline cudaError_t cudaFreeHost(void* pointer) {
  return cuda_on_cpu::give_back("cudaFreeHost", pointer);
}

// Where memory lies and who will read it: there is one memory here, and nothing to move.
enum { cudaCpuDeviceId = -1, cudaInvalidDeviceId = -2 };
enum cudaMemLocationType { cudaMemLocationTypeDevice = 1, cudaMemLocationTypeHost = 2 };
struct cudaMemLocation {
  cudaMemLocationType type;
  int id;
};
enum cudaMemoryAdvise {
  cudaMemAdviseSetReadMostly = 1,
  cudaMemAdviseUnsetReadMostly,
  cudaMemAdviseSetPreferredLocation,
  cudaMemAdviseUnsetPreferredLocation,
  cudaMemAdviseSetAccessedBy,
  cudaMemAdviseUnsetAccessedBy
};
template <class Location>  // an int, or since CUDA 13 a cudaMemLocation
static inline cudaError_t cudaMemPrefetchAsync(const void*, size_t, Location,
                                               cudaStream_t = nullptr) {
  return cudaSuccess;
}
static inline cudaError_t cudaMemPrefetchAsync(const void*, size_t, cudaMemLocation, unsigned,
                                               cudaStream_t = nullptr) {
  return cudaSuccess;
}
template <class Location>
static inline cudaError_t cudaMemAdvise(const void*, size_t, cudaMemoryAdvise, Location) {
  return cudaSuccess;
}

enum cudaMemcpyKind {
  cudaMemcpyHostToHost,
  cudaMemcpyHostToDevice,
  cudaMemcpyDeviceToHost,
  cudaMemcpyDeviceToDevice,
  cudaMemcpyDefault
};

namespace cuda_on_cpu {

// Rows of `width` bytes; a plain copy is one row.
static cudaError_t copy_rows(HostCall call, void* to, size_t to_pitch, const void* from,
                             size_t from_pitch, size_t width, size_t height, cudaMemcpyKind kind) {
  if (!width || !height) return cudaSuccess;
  bool any = kind == cudaMemcpyDefault;
  bool to_host = kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyHostToHost;
  bool from_host = kind == cudaMemcpyHostToDevice || kind == cudaMemcpyHostToHost;
  size_t to_bytes = (height - 1) * to_pitch + width, from_bytes = (height - 1) * from_pitch + width;
  std::string why = why_not(to, to_bytes, "to", any || to_host, any || !to_host);
  if (why.empty()) why = why_not(from, from_bytes, "from", any || from_host, any || !from_host);
  if (!why.empty()) return call.refuse(why);
  for (size_t row = 0; row < height; ++row) {
    std::memmove(static_cast<char*>(to) + row * to_pitch,
                 static_cast<const char*>(from) + row * from_pitch, width);
  }
  return cudaSuccess;
}

static std::string why_not_in_symbol(size_t bytes, size_t offset, size_t symbol_bytes) {
  if (offset <= symbol_bytes && bytes <= symbol_bytes - offset) return "";
  return "of " + std::to_string(bytes) + " bytes at offset " + std::to_string(offset) +
         " passes the end of the symbol, which has " + std::to_string(symbol_bytes) + " bytes";
}

}  // namespace cuda_on_cpu

static inline cudaError_t cudaMemset(void* to, int value, size_t bytes, CUDA_ON_CPU_HERE) {
  std::string why = cuda_on_cpu::why_not(to, bytes, "of", false, true);
  if (!why.empty()) return cuda_on_cpu::HostCall{"cudaMemset", place}.refuse(why);
  return std::memset(to, value, bytes), cudaSuccess;
}
static inline cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes,
                                          cudaStream_t = nullptr, CUDA_ON_CPU_HERE) {
  return cudaMemset(to, value, bytes, place);
}
static inline cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind,
                                     CUDA_ON_CPU_HERE) {
  return cuda_on_cpu::copy_rows({"cudaMemcpy", place}, to, bytes, from, bytes, bytes, 1, kind);
}
static inline cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes,
                                          cudaMemcpyKind kind, cudaStream_t = nullptr,
                                          CUDA_ON_CPU_HERE) {
  return cudaMemcpy(to, from, bytes, kind, place);
}
static inline cudaError_t cudaMemcpy2D(void* to, size_t to_pitch, const void* from,
                                       size_t from_pitch, size_t width, size_t height,
                                       cudaMemcpyKind kind, CUDA_ON_CPU_HERE) {
  cuda_on_cpu::HostCall call = {"cudaMemcpy2D", place};
  if (width > to_pitch || width > from_pitch)
    return call.refuse("of rows that are wider than their pitch");
  return cuda_on_cpu::copy_rows(call, to, to_pitch, from, from_pitch, width, height, kind);
}
template <class Symbol>
static inline cudaError_t cudaMemcpyToSymbol(Symbol& to, const void* from, size_t bytes,
                                             size_t offset = 0,
                                             cudaMemcpyKind kind = cudaMemcpyHostToDevice,
                                             CUDA_ON_CPU_HERE) {
  cuda_on_cpu::HostCall call = {"cudaMemcpyToSymbol", place};
  std::string why = cuda_on_cpu::why_not_in_symbol(bytes, offset, sizeof(Symbol));
  if (!why.empty()) return call.refuse(why);
  char* begin = const_cast<char*>(reinterpret_cast<const volatile char*>(&to)) + offset;
  return cuda_on_cpu::copy_rows(call, begin, bytes, from, bytes, bytes, 1, kind);
}
template <class Symbol>
static inline cudaError_t cudaMemcpyFromSymbol(void* to, const Symbol& from, size_t bytes,
                                               size_t offset = 0,
                                               cudaMemcpyKind kind = cudaMemcpyDeviceToHost,
                                               CUDA_ON_CPU_HERE) {
  cuda_on_cpu::HostCall call = {"cudaMemcpyFromSymbol", place};
  std::string why = cuda_on_cpu::why_not_in_symbol(bytes, offset, sizeof(Symbol));
  if (!why.empty()) return call.refuse(why);
  const char* begin = reinterpret_cast<const char*>(&from) + offset;
  return cuda_on_cpu::copy_rows(call, to, bytes, begin, bytes, bytes, 1, kind);
}
template <class T, class Symbol>
static inline cudaError_t cudaGetSymbolAddress(T** pointer, Symbol& symbol) {
  return *pointer = reinterpret_cast<T*>(&symbol), cudaSuccess;
}
