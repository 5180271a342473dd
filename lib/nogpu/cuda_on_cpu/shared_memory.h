// Shared memory of the thread block that runs now. The translation turns
//     __shared__ float part[32];        into a reference to 128 bytes taken from the arena,
//     extern __shared__ float part[];   into a pointer to the bytes that the launch asked for.
// At the start of each thread block every byte is 0xff, a NaN in each floating-point type: a value
// that was never written shows in the result, as it might not on a GPU.
#pragma once
namespace cuda_on_cpu {

// Between two variables, so that passing the end of one is seen.
#ifdef CUDA_ON_CPU_CHECKED
constexpr size_t kGapBytes = 4 << 10;
#else
constexpr size_t kGapBytes = 64;
#endif

CUDA_ON_CPU_RUNTIME static void* take_shared_memory(size_t bytes, size_t alignment,
                                                    SharedVariable variable, Place place) {
  InsideRuntime inside;
  runtime.shared_bytes += bytes;
  if (runtime.shared_bytes > runtime.shared_limit) {
    fail_in_kernel("the thread block uses " + std::to_string(runtime.shared_bytes) +
                       " bytes of shared memory, the limit is " +
                       std::to_string(runtime.shared_limit),
                   place);
  }
  const auto taken = static_cast<std::int64_t>(runtime.shared_bytes);
  runtime.statistics.shared_bytes = std::max(runtime.statistics.shared_bytes, taken);
  size_t offset = (runtime.arena_used + kGapBytes + alignment - 1) / alignment * alignment;
  if (offset + bytes + kGapBytes > kArenaBytes) {
    fail_in_kernel("the thread block declares too many shared variables", place);
  }
  runtime.arena_used = offset + bytes;
  variable.begin = Address(runtime.arena) + offset;
  variable.end = variable.begin + bytes;
  runtime.shared_variables.push_back(variable);
  return runtime.arena + offset;
}

// One for each __shared__ declaration. The first thread of a block that comes by takes the memory.
class SharedSlot {
 public:
  template <class T, size_t wished_alignment = 16>
  CUDA_ON_CPU_RUNTIME T& get(const char* name, CUDA_ON_CPU_HERE) {
    if (epoch_ != runtime.block_epoch) {
      constexpr size_t alignment = std::max(alignof(T), wished_alignment);
      SharedVariable variable = {0, 0, name, sizeof(std::remove_all_extents_t<T>), false};
      memory_ = take_shared_memory(sizeof(T), alignment, variable, place);
      epoch_ = runtime.block_epoch;
    }
    return *static_cast<T*>(memory_);
  }

  template <class Element>
  CUDA_ON_CPU_RUNTIME Element* get_dynamic(const char* name, CUDA_ON_CPU_HERE) {
    if (epoch_ != runtime.block_epoch) {
      SharedVariable variable = {0, 0, name, sizeof(Element), true};
      memory_ = take_shared_memory(runtime.dynamic_shared_bytes, 128, variable, place);
      epoch_ = runtime.block_epoch;
    }
    return static_cast<Element*>(memory_);
  }

 private:
  unsigned epoch_ = 0;
  void* memory_ = nullptr;
};

static SharedSlot dynamic_slot;  // every `extern __shared__` of a kernel is the same memory

}  // namespace cuda_on_cpu
