// Checked mode is compiled with -fsanitize=thread,alignment,bounds: the compiler then calls
// functions with the names below before every load and store, and where an address or an index is
// wrong. They are usually a sanitizer's; here they are ours, and no sanitizer is linked or
// preloaded.
#pragma once
#ifdef CUDA_ON_CPU_CHECKED

#define CUDA_ON_CPU_HOOK \
  extern "C" CUDA_ON_CPU_RUNTIME __attribute__((visibility("hidden"), noinline))
#define CUDA_ON_CPU_READ(pointer, bytes) \
  cuda_on_cpu::access(pointer, bytes, cuda_on_cpu::Access::read, __builtin_return_address(0))
#define CUDA_ON_CPU_WRITE(pointer, bytes) \
  cuda_on_cpu::access(pointer, bytes, cuda_on_cpu::Access::write, __builtin_return_address(0))

// ---- Loads and stores -----------------------------------------------------------------------

#define CUDA_ON_CPU_LOADS_AND_STORES(kind, bytes)                                             \
  CUDA_ON_CPU_HOOK void __tsan_##kind##read##bytes(void* p) { CUDA_ON_CPU_READ(p, bytes); }   \
  CUDA_ON_CPU_HOOK void __tsan_##kind##write##bytes(void* p) { CUDA_ON_CPU_WRITE(p, bytes); } \
  CUDA_ON_CPU_HOOK void __tsan_##kind##read_write##bytes(void* p) {                           \
    CUDA_ON_CPU_READ(p, bytes);                                                               \
    CUDA_ON_CPU_WRITE(p, bytes);                                                              \
  }
#define CUDA_ON_CPU_EACH_SIZE(kind)     \
  CUDA_ON_CPU_LOADS_AND_STORES(kind, 1) \
  CUDA_ON_CPU_LOADS_AND_STORES(kind, 2) \
  CUDA_ON_CPU_LOADS_AND_STORES(kind, 4) \
  CUDA_ON_CPU_LOADS_AND_STORES(kind, 8) \
  CUDA_ON_CPU_LOADS_AND_STORES(kind, 16)
CUDA_ON_CPU_EACH_SIZE()
CUDA_ON_CPU_EACH_SIZE(volatile_)
CUDA_ON_CPU_EACH_SIZE(unaligned_)

CUDA_ON_CPU_HOOK void __tsan_read_range(void* p, size_t bytes) { CUDA_ON_CPU_READ(p, bytes); }
CUDA_ON_CPU_HOOK void __tsan_write_range(void* p, size_t bytes) { CUDA_ON_CPU_WRITE(p, bytes); }
CUDA_ON_CPU_HOOK void* __tsan_memcpy(void* to, const void* from, size_t bytes) {
  CUDA_ON_CPU_READ(from, bytes);
  CUDA_ON_CPU_WRITE(to, bytes);
  return __builtin_memcpy(to, from, bytes);
}
CUDA_ON_CPU_HOOK void* __tsan_memmove(void* to, const void* from, size_t bytes) {
  CUDA_ON_CPU_READ(from, bytes);
  CUDA_ON_CPU_WRITE(to, bytes);
  return __builtin_memmove(to, from, bytes);
}
CUDA_ON_CPU_HOOK void* __tsan_memset(void* to, int value, size_t bytes) {
  CUDA_ON_CPU_WRITE(to, bytes);
  return __builtin_memset(to, value, bytes);
}

// ---- Called too, and of no interest ---------------------------------------------------------

CUDA_ON_CPU_HOOK void __tsan_init() {}
CUDA_ON_CPU_HOOK void __tsan_func_entry(void*) {}
CUDA_ON_CPU_HOOK void __tsan_func_exit() {}
CUDA_ON_CPU_HOOK void __tsan_vptr_read(void**) {}
CUDA_ON_CPU_HOOK void __tsan_vptr_update(void**, void*) {}

// std::atomic in host code (every reference count of a tensor) turns into calls as well: do the
// work.
#define CUDA_ON_CPU_READ_MODIFY_WRITE(bits, name, builtin)               \
  CUDA_ON_CPU_HOOK std::uint##bits##_t __tsan_atomic##bits##_##name(     \
      volatile std::uint##bits##_t* p, std::uint##bits##_t value, int) { \
    return builtin(p, value, __ATOMIC_SEQ_CST);                          \
  }
#define CUDA_ON_CPU_COMPARE_EXCHANGE(bits, name)                                                 \
  CUDA_ON_CPU_HOOK int __tsan_atomic##bits##_compare_exchange_##name(                            \
      volatile std::uint##bits##_t* p, std::uint##bits##_t* expected, std::uint##bits##_t value, \
      int, int) {                                                                                \
    return __atomic_compare_exchange_n(p, expected, value, false, __ATOMIC_SEQ_CST,              \
                                       __ATOMIC_SEQ_CST);                                        \
  }
#define CUDA_ON_CPU_HOST_ATOMICS(bits)                                                           \
  CUDA_ON_CPU_HOOK std::uint##bits##_t __tsan_atomic##bits##_load(                               \
      const volatile std::uint##bits##_t* p, int) {                                              \
    return __atomic_load_n(p, __ATOMIC_SEQ_CST);                                                 \
  }                                                                                              \
  CUDA_ON_CPU_HOOK void __tsan_atomic##bits##_store(volatile std::uint##bits##_t* p,             \
                                                    std::uint##bits##_t value, int) {            \
    __atomic_store_n(p, value, __ATOMIC_SEQ_CST);                                                \
  }                                                                                              \
  CUDA_ON_CPU_READ_MODIFY_WRITE(bits, exchange, __atomic_exchange_n)                             \
  CUDA_ON_CPU_READ_MODIFY_WRITE(bits, fetch_add, __atomic_fetch_add)                             \
  CUDA_ON_CPU_READ_MODIFY_WRITE(bits, fetch_sub, __atomic_fetch_sub)                             \
  CUDA_ON_CPU_READ_MODIFY_WRITE(bits, fetch_and, __atomic_fetch_and)                             \
  CUDA_ON_CPU_READ_MODIFY_WRITE(bits, fetch_or, __atomic_fetch_or)                               \
  CUDA_ON_CPU_READ_MODIFY_WRITE(bits, fetch_xor, __atomic_fetch_xor)                             \
  CUDA_ON_CPU_COMPARE_EXCHANGE(bits, strong)                                                     \
  CUDA_ON_CPU_COMPARE_EXCHANGE(bits, weak)                                                       \
  CUDA_ON_CPU_HOOK std::uint##bits##_t __tsan_atomic##bits##_compare_exchange_val(               \
      volatile std::uint##bits##_t* p, std::uint##bits##_t expected, std::uint##bits##_t value,  \
      int, int) {                                                                                \
    __atomic_compare_exchange_n(p, &expected, value, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST); \
    return expected;                                                                             \
  }
CUDA_ON_CPU_HOST_ATOMICS(8)
CUDA_ON_CPU_HOST_ATOMICS(16)
CUDA_ON_CPU_HOST_ATOMICS(32)
CUDA_ON_CPU_HOST_ATOMICS(64)
CUDA_ON_CPU_HOOK void __tsan_atomic_thread_fence(int) { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
CUDA_ON_CPU_HOOK void __tsan_atomic_signal_fence(int) {}

// ---- A misaligned address, an index past one dimension of an array --------------------------

namespace cuda_on_cpu {
// What the compiler hands over, laid out as in its sanitizer runtime.
struct SanitizerPlace {
  const char* file;
  std::uint32_t line, column;
};
struct SanitizerType {
  std::uint16_t kind, information;
  char name[1];
};
struct TypeMismatch {
  SanitizerPlace place;
  SanitizerType* type;
  unsigned char log_alignment, kind;
};
struct OutOfBounds {
  SanitizerPlace place;
  SanitizerType* array;
  SanitizerType* index;
};
}  // namespace cuda_on_cpu

CUDA_ON_CPU_HOOK void __ubsan_handle_type_mismatch_v1(cuda_on_cpu::TypeMismatch* data,
                                                      std::uintptr_t pointer) {
  using namespace cuda_on_cpu;
  if (!in_kernel) return;
  unsigned alignment = 1u << data->log_alignment;
  if (pointer % alignment == 0) return;  // the compiler asks about null pointers too
  in_kernel = false;
  fail_in_kernel("misaligned address: " + std::string(data->type->name) +
                     " needs an address that is a multiple of " + std::to_string(alignment) +
                     ", this one is " + std::to_string(pointer % alignment) + " past one",
                 {}, __builtin_return_address(0));
}

CUDA_ON_CPU_HOOK void __ubsan_handle_out_of_bounds(cuda_on_cpu::OutOfBounds* data,
                                                   std::uintptr_t index) {
  using namespace cuda_on_cpu;
  if (!in_kernel) return;
  in_kernel = false;
  fail_in_kernel("index " + std::to_string(static_cast<long>(index)) + " is out of bounds for " +
                     data->array->name,
                 {}, __builtin_return_address(0));
}

#endif
