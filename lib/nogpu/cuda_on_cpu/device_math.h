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
#define __tanhf(x) tanhf(x)
#define __powf(x, y) powf(x, y)
#define __sincosf(x, s, c) sincosf(x, s, c)
#define sinpif(x) static_cast<float>(::cuda_on_cpu::sin_of_pi(x))
#define cospif(x) static_cast<float>(::cuda_on_cpu::cos_of_pi(x))
#define sinpi(x) ::cuda_on_cpu::sin_of_pi(x)
#define cospi(x) ::cuda_on_cpu::cos_of_pi(x)
#define sincospif(x, s, c) (void(*(s) = sinpif(x)), void(*(c) = cospif(x)))

namespace cuda_on_cpu {
static inline double sin_of_pi(double x) { return sin(3.14159265358979323846 * fmod(x, 2.)); }
static inline double cos_of_pi(double x) { return cos(3.14159265358979323846 * fmod(x, 2.)); }
}  // namespace cuda_on_cpu

static inline float rsqrtf(float x) { return 1.f / sqrtf(x); }
static inline double rsqrt(double x) { return 1. / sqrt(x); }
static inline float normcdff(float x) { return 0.5f * erfcf(-x * 0.70710678118654752f); }
static inline double normcdf(double x) { return 0.5 * erfc(-x * 0.70710678118654752); }
static inline float rcbrtf(float x) { return 1.f / cbrtf(x); }
static inline double rcbrt(double x) { return 1. / cbrt(x); }
static inline float rhypotf(float x, float y) { return 1.f / hypotf(x, y); }
static inline float norm3df(float x, float y, float z) { return std::hypot(x, y, z); }
static inline float norm4df(float x, float y, float z, float w) {
  return hypotf(norm3df(x, y, z), w);
}
static inline float rnorm3df(float x, float y, float z) { return 1.f / norm3df(x, y, z); }
static inline float fdividef(float a, float b) { return a / b; }
static inline float __fdividef(float a, float b) { return a / b; }
static inline float __frsqrt_rn(float x) { return 1.f / sqrtf(x); }
static inline float __saturatef(float x) { return fminf(fmaxf(x, 0.f), 1.f); }

// Rounded to nearest, as the CPU does: of the other directions there is none.
#define CUDA_ON_CPU_ROUNDED(T, f, sqrt)                     \
  static inline T __##f##add_rn(T a, T b) { return a + b; } \
  static inline T __##f##sub_rn(T a, T b) { return a - b; } \
  static inline T __##f##mul_rn(T a, T b) { return a * b; } \
  static inline T __##f##div_rn(T a, T b) { return a / b; } \
  static inline T __##f##rcp_rn(T a) { return 1 / a; }      \
  static inline T __##f##sqrt_rn(T a) { return sqrt(a); }
CUDA_ON_CPU_ROUNDED(float, f, sqrtf)
CUDA_ON_CPU_ROUNDED(double, d, sqrt)
static inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
static inline double __fma_rn(double a, double b, double c) { return fma(a, b, c); }

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
#define CUDA_ON_CPU_TO_INTEGER(from, From, to, To)                                             \
  static inline To __##from##2##to##_rn(From x) { return static_cast<To>(std::nearbyint(x)); } \
  static inline To __##from##2##to##_rz(From x) { return static_cast<To>(x); }                 \
  static inline To __##from##2##to##_rd(From x) { return static_cast<To>(std::floor(x)); }     \
  static inline To __##from##2##to##_ru(From x) { return static_cast<To>(std::ceil(x)); }      \
  static inline From __##to##2##from##_rn(To x) { return static_cast<From>(x); }
CUDA_ON_CPU_TO_INTEGER(float, float, int, int)
CUDA_ON_CPU_TO_INTEGER(float, float, uint, unsigned)
CUDA_ON_CPU_TO_INTEGER(float, float, ll, long long)
CUDA_ON_CPU_TO_INTEGER(float, float, ull, unsigned long long)
CUDA_ON_CPU_TO_INTEGER(double, double, int, int)
CUDA_ON_CPU_TO_INTEGER(double, double, uint, unsigned)
CUDA_ON_CPU_TO_INTEGER(double, double, ll, long long)
static inline float __double2float_rn(double x) { return static_cast<float>(x); }

static inline int __popc(unsigned x) { return __builtin_popcount(x); }
static inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
static inline int __ffs(int x) { return __builtin_ffs(x); }
static inline int __clz(int x) { return x ? __builtin_clz(static_cast<unsigned>(x)) : 32; }
static inline unsigned __umulhi(unsigned a, unsigned b) {
  return static_cast<unsigned>(static_cast<unsigned long long>(a) * b >> 32);
}
static inline int __mulhi(int a, int b) {
  return static_cast<int>(static_cast<long long>(a) * b >> 32);
}
static inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
  return static_cast<unsigned long long>(static_cast<unsigned __int128>(a) * b >> 64);
}
static inline int __mul24(int a, int b) { return (a << 8 >> 8) * (b << 8 >> 8); }
static inline unsigned __umul24(unsigned a, unsigned b) { return (a & 0xffffff) * (b & 0xffffff); }
static inline int __clzll(long long x) {
  return x ? __builtin_clzll(static_cast<unsigned long long>(x)) : 64;
}
static inline int __ffsll(long long x) { return __builtin_ffsll(x); }
static inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned by) {
  return by % 32 ? high << by % 32 | low >> (32 - by % 32) : high;
}
static inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned by) {
  return by % 32 ? low >> by % 32 | high << (32 - by % 32) : low;
}
template <class Byte>
static inline int __cuda_on_cpu_dot4(unsigned a, unsigned b) {
  int sum = 0;
  for (int k = 0; k < 32; k += 8) sum += static_cast<Byte>(a >> k) * static_cast<Byte>(b >> k);
  return sum;
}
static inline int __dp4a(int a, int b, int c) { return c + __cuda_on_cpu_dot4<std::int8_t>(a, b); }
static inline unsigned __dp4a(unsigned a, unsigned b, unsigned c) {
  return c + static_cast<unsigned>(__cuda_on_cpu_dot4<std::uint8_t>(a, b));
}
static inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
  unsigned long long bytes = static_cast<unsigned long long>(b) << 32 | a;
  unsigned result = 0;
  for (int k = 0; k < 4; ++k) {
    unsigned nibble = selector >> 4 * k & 0xf, byte = bytes >> 8 * (nibble & 7) & 0xff;
    if (nibble & 8) byte = byte & 0x80 ? 0xff : 0;  // its sign, repeated
    result |= byte << 8 * k;
  }
  return result;
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
