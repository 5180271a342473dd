// Device functions of CUDA's math library. The approximate ones (__expf) are exact here.
#pragma once

using std::isfinite;
using std::isinf;
using std::isnan;
using std::max;
using std::min;

// CUDA's min and max take two different types too: max(blockDim.x, 1).
template <class A, class B,
          class = std::enable_if_t<std::is_arithmetic_v<A> && std::is_arithmetic_v<B> &&
                                   !std::is_same_v<A, B>>>
constexpr std::common_type_t<A, B> max(A a, B b) {
  using T = std::common_type_t<A, B>;
  return T(a) < T(b) ? T(b) : T(a);
}
template <class A, class B,
          class = std::enable_if_t<std::is_arithmetic_v<A> && std::is_arithmetic_v<B> &&
                                   !std::is_same_v<A, B>>>
constexpr std::common_type_t<A, B> min(A a, B b) {
  using T = std::common_type_t<A, B>;
  return T(b) < T(a) ? T(b) : T(a);
}

// Macros, because glibc declares functions of these names.
#define __expf(x) expf(x)
#define __exp10f(x) exp10f(x)
#define __logf(x) logf(x)
#define __log2f(x) log2f(x)
#define __log10f(x) log10f(x)
#define __sinf(x) sinf(x)
#define __cosf(x) cosf(x)
#define __tanf(x) tanf(x)
#define __powf(x, y) powf(x, y)

static inline float rsqrtf(float x) { return 1.f / sqrtf(x); }
static inline double rsqrt(double x) { return 1. / sqrt(x); }
static inline float normcdff(float x) { return 0.5f * erfcf(-x * 0.70710678118654752f); }
static inline double normcdf(double x) { return 0.5 * erfc(-x * 0.70710678118654752); }
static inline float __fdividef(float a, float b) { return a / b; }
static inline float __frcp_rn(float x) { return 1.f / x; }
static inline float __frsqrt_rn(float x) { return 1.f / sqrtf(x); }
static inline float __fsqrt_rn(float x) { return sqrtf(x); }
static inline float __fadd_rn(float a, float b) { return a + b; }
static inline float __fmul_rn(float a, float b) { return a * b; }
static inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
static inline float __saturatef(float x) { return fminf(fmaxf(x, 0.f), 1.f); }

template <class To, class From>
static inline To __cuda_on_cpu_bits(From from) {
  static_assert(sizeof(To) == sizeof(From), "the same number of bits");
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}
static inline float __int_as_float(int x) { return __cuda_on_cpu_bits<float>(x); }
static inline float __uint_as_float(unsigned x) { return __cuda_on_cpu_bits<float>(x); }
static inline int __float_as_int(float x) { return __cuda_on_cpu_bits<int>(x); }
static inline unsigned __float_as_uint(float x) { return __cuda_on_cpu_bits<unsigned>(x); }
static inline double __longlong_as_double(long long x) { return __cuda_on_cpu_bits<double>(x); }
static inline long long __double_as_longlong(double x) { return __cuda_on_cpu_bits<long long>(x); }
static inline int __float2int_rn(float x) { return static_cast<int>(nearbyintf(x)); }
static inline int __float2int_rz(float x) { return static_cast<int>(x); }
static inline int __float2int_rd(float x) { return static_cast<int>(floorf(x)); }
static inline int __float2int_ru(float x) { return static_cast<int>(ceilf(x)); }
static inline float __int2float_rn(int x) { return static_cast<float>(x); }
static inline float __uint2float_rn(unsigned x) { return static_cast<float>(x); }

static inline int __popc(unsigned x) { return __builtin_popcount(x); }
static inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
static inline int __ffs(int x) { return __builtin_ffs(x); }
static inline int __clz(int x) { return x ? __builtin_clz(static_cast<unsigned>(x)) : 32; }
static inline unsigned __umulhi(unsigned a, unsigned b) {
  return static_cast<unsigned>(static_cast<unsigned long long>(a) * b >> 32);
}
static inline unsigned __brev(unsigned x) {
  unsigned reversed = 0;
  for (int bit = 0; bit < 32; ++bit) reversed |= (x >> bit & 1) << (31 - bit);
  return reversed;
}

// Loads and stores with a hint for the cache: the hint is lost.
#define CUDA_ON_CPU_LOAD(name)                                            \
  template <class T>                                                      \
  __attribute__((always_inline)) static inline T name(const T* address) { \
    return *address;                                                      \
  }
#define CUDA_ON_CPU_STORE(name)                                                           \
  template <class T>                                                                      \
  __attribute__((always_inline)) static inline void name(T* address,                      \
                                                         std::type_identity_t<T> value) { \
    *address = value;                                                                     \
  }
CUDA_ON_CPU_LOAD(__ldg)
CUDA_ON_CPU_LOAD(__ldca)
CUDA_ON_CPU_LOAD(__ldcg)
CUDA_ON_CPU_LOAD(__ldcs)
CUDA_ON_CPU_LOAD(__ldlu)
CUDA_ON_CPU_LOAD(__ldcv)
CUDA_ON_CPU_STORE(__stwb)
CUDA_ON_CPU_STORE(__stcg)
CUDA_ON_CPU_STORE(__stcs)
CUDA_ON_CPU_STORE(__stwt)

static inline void __nanosleep(unsigned) {}
CUDA_ON_CPU_RUNTIME static inline long long clock64() {  // nanoseconds, not cycles
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * 1000000000LL + now.tv_nsec;
}
