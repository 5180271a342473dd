// Atomic operations. Only one thread runs at a time, so reading, changing and writing is atomic.
#pragma once
namespace cuda_on_cpu {

template <class T>
CUDA_ON_CPU_RUNTIME T sum(T a, T b) {
  return static_cast<T>(a + b);
}

}  // namespace cuda_on_cpu

// noinline: the return address is the line of the kernel.
#define CUDA_ON_CPU_ATOMIC_OF(kind, name, new_value)                                           \
  template <class T>                                                                           \
  CUDA_ON_CPU_RUNTIME __attribute__((noinline)) static T name(T* address,                      \
                                                              std::type_identity_t<T> value) { \
    cuda_on_cpu::access(address, sizeof(T), cuda_on_cpu::Access::kind,                         \
                        __builtin_return_address(0));                                          \
    T old = *address;                                                                          \
    *address = new_value;                                                                      \
    return old;                                                                                \
  }
#define CUDA_ON_CPU_ATOMIC(name, new_value) \
  CUDA_ON_CPU_ATOMIC_OF(atomic_update, name, new_value)
CUDA_ON_CPU_ATOMIC(atomicAdd, cuda_on_cpu::sum(old, value))
CUDA_ON_CPU_ATOMIC(atomicSub, old - value)
CUDA_ON_CPU_ATOMIC_OF(atomic_exchange, atomicExch, value)
CUDA_ON_CPU_ATOMIC(atomicMax, old < value ? value : old)
CUDA_ON_CPU_ATOMIC(atomicMin, value < old ? value : old)
CUDA_ON_CPU_ATOMIC(atomicAnd, old& value)
CUDA_ON_CPU_ATOMIC(atomicOr, old | value)
CUDA_ON_CPU_ATOMIC(atomicXor, old ^ value)
CUDA_ON_CPU_ATOMIC(atomicInc, old >= value ? T(0) : old + T(1))
CUDA_ON_CPU_ATOMIC(atomicDec, old == T(0) || old > value ? value : old - T(1))

template <class T>
CUDA_ON_CPU_RUNTIME __attribute__((noinline)) static T atomicCAS(T* address,
                                                                 std::type_identity_t<T> expected,
                                                                 std::type_identity_t<T> value) {
  cuda_on_cpu::access(address, sizeof(T), cuda_on_cpu::Access::atomic_update,
                      __builtin_return_address(0));
  T old = *address;
  if (old == expected) *address = value;
  return old;
}

// Each access is seen by all at once here. The checker takes a fence followed by an atomic
// operation for what it usually is: a message to another thread block that results are ready.
CUDA_ON_CPU_RUNTIME static inline void __threadfence() { cuda_on_cpu::note_fence(); }
CUDA_ON_CPU_RUNTIME static inline void __threadfence_system() { cuda_on_cpu::note_fence(); }
CUDA_ON_CPU_RUNTIME static inline void __threadfence_block() {}
