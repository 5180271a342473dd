// __half and __nv_bfloat16: 16 bits, converted to float, computed, rounded back.
//
// PyTorch builds its CUDA sources with __CUDA_NO_HALF_OPERATORS__ and its siblings, so there are no
// operators and no implicit conversions: a + b of two __half does not compile here either. Kernels
// that take c10::Half or c10::BFloat16, as AT_DISPATCH gives them, use those types' own operators.
#pragma once
namespace cuda_on_cpu {

template <class C10>  // c10::Half or c10::BFloat16, which know how to round
struct Float16 {
  std::uint16_t bits;

  Float16() = default;
  explicit Float16(float value) : bits(C10(value).x) {}
  explicit operator float() const { return C10(bits, C10::from_bits()); }
};

template <class C10>
struct alignas(4) Float16Pair {
  Float16<C10> x, y;

  Float16Pair() = default;
  Float16Pair(Float16<C10> x, Float16<C10> y) : x(x), y(y) {}
};

template <class C10>
Float16<C10> sum(Float16<C10> a, Float16<C10> b) {  // atomicAdd
  return Float16<C10>(float(a) + float(b));
}
template <class C10>
Float16Pair<C10> sum(Float16Pair<C10> a, Float16Pair<C10> b) {
  return {sum(a.x, b.x), sum(a.y, b.y)};
}

}  // namespace cuda_on_cpu

typedef cuda_on_cpu::Float16<c10::Half> __half;
typedef cuda_on_cpu::Float16Pair<c10::Half> __half2;
typedef cuda_on_cpu::Float16<c10::BFloat16> __nv_bfloat16;
typedef cuda_on_cpu::Float16Pair<c10::BFloat16> __nv_bfloat162;
typedef __half half;
typedef __half2 half2;
typedef __nv_bfloat16 nv_bfloat16;
typedef __nv_bfloat162 nv_bfloat162;

// Arithmetic on one value and on a pair, the same for both types.
#define CUDA_ON_CPU_FLOAT16_2(name, expression)                                              \
  template <class C10>                                                                       \
  static inline cuda_on_cpu::Float16<C10> name(cuda_on_cpu::Float16<C10> left,               \
                                               cuda_on_cpu::Float16<C10> right) {            \
    float a = float(left), b = float(right);                                                 \
    return cuda_on_cpu::Float16<C10>(expression);                                            \
  }                                                                                          \
  template <class C10>                                                                       \
  static inline cuda_on_cpu::Float16Pair<C10> name##2(cuda_on_cpu::Float16Pair<C10> left,    \
                                                      cuda_on_cpu::Float16Pair<C10> right) { \
    return {name(left.x, right.x), name(left.y, right.y)};                                   \
  }
#define CUDA_ON_CPU_FLOAT16_COMPARE(name, sign)                                       \
  template <class C10>                                                                \
  static inline bool name(cuda_on_cpu::Float16<C10> a, cuda_on_cpu::Float16<C10> b) { \
    return float(a) sign float(b);                                                    \
  }
CUDA_ON_CPU_FLOAT16_2(__hadd, a + b)
CUDA_ON_CPU_FLOAT16_2(__hsub, a - b)
CUDA_ON_CPU_FLOAT16_2(__hmul, a* b)
CUDA_ON_CPU_FLOAT16_2(__hmax, fmaxf(a, b))
CUDA_ON_CPU_FLOAT16_2(__hmin, fminf(a, b))
CUDA_ON_CPU_FLOAT16_COMPARE(__heq, ==)
CUDA_ON_CPU_FLOAT16_COMPARE(__hne, !=)
CUDA_ON_CPU_FLOAT16_COMPARE(__hgt, >)
CUDA_ON_CPU_FLOAT16_COMPARE(__hge, >=)
CUDA_ON_CPU_FLOAT16_COMPARE(__hlt, <)
CUDA_ON_CPU_FLOAT16_COMPARE(__hle, <=)

template <class C10>
static inline cuda_on_cpu::Float16<C10> __hdiv(cuda_on_cpu::Float16<C10> a,
                                               cuda_on_cpu::Float16<C10> b) {
  return cuda_on_cpu::Float16<C10>(float(a) / float(b));
}
template <class C10>
static inline cuda_on_cpu::Float16Pair<C10> __h2div(cuda_on_cpu::Float16Pair<C10> a,
                                                    cuda_on_cpu::Float16Pair<C10> b) {
  return {__hdiv(a.x, b.x), __hdiv(a.y, b.y)};
}
template <class C10>
static inline cuda_on_cpu::Float16<C10> __hneg(cuda_on_cpu::Float16<C10> a) {
  return cuda_on_cpu::Float16<C10>(-float(a));
}
template <class C10>
static inline cuda_on_cpu::Float16<C10> __hfma(cuda_on_cpu::Float16<C10> a,
                                               cuda_on_cpu::Float16<C10> b,
                                               cuda_on_cpu::Float16<C10> c) {
  return cuda_on_cpu::Float16<C10>(fmaf(float(a), float(b), float(c)));
}
template <class C10>
static inline cuda_on_cpu::Float16Pair<C10> __hfma2(cuda_on_cpu::Float16Pair<C10> a,
                                                    cuda_on_cpu::Float16Pair<C10> b,
                                                    cuda_on_cpu::Float16Pair<C10> c) {
  return {__hfma(a.x, b.x, c.x), __hfma(a.y, b.y, c.y)};
}
template <class C10>
static inline bool __hisnan(cuda_on_cpu::Float16<C10> a) {
  return std::isnan(float(a));
}

// Functions of one value, hexp, and of both of a pair, h2exp.
#define CUDA_ON_CPU_FLOAT16_1(name, expression)                                           \
  template <class C10>                                                                    \
  static inline cuda_on_cpu::Float16<C10> h##name(cuda_on_cpu::Float16<C10> value) {      \
    float a = float(value);                                                               \
    return cuda_on_cpu::Float16<C10>(expression);                                         \
  }                                                                                       \
  template <class C10>                                                                    \
  static inline cuda_on_cpu::Float16Pair<C10> h2##name(cuda_on_cpu::Float16Pair<C10> a) { \
    return {h##name(a.x), h##name(a.y)};                                                  \
  }
CUDA_ON_CPU_FLOAT16_1(exp, expf(a))
CUDA_ON_CPU_FLOAT16_1(exp2, exp2f(a))
CUDA_ON_CPU_FLOAT16_1(log, logf(a))
CUDA_ON_CPU_FLOAT16_1(log2, log2f(a))
CUDA_ON_CPU_FLOAT16_1(sqrt, sqrtf(a))
CUDA_ON_CPU_FLOAT16_1(rsqrt, 1.f / sqrtf(a))
CUDA_ON_CPU_FLOAT16_1(rcp, 1.f / a)
CUDA_ON_CPU_FLOAT16_1(sin, sinf(a))
CUDA_ON_CPU_FLOAT16_1(cos, cosf(a))
CUDA_ON_CPU_FLOAT16_1(tanh, tanhf(a))
CUDA_ON_CPU_FLOAT16_1(floor, floorf(a))
CUDA_ON_CPU_FLOAT16_1(ceil, ceilf(a))
CUDA_ON_CPU_FLOAT16_1(rint, nearbyintf(a))
template <class C10>
static inline cuda_on_cpu::Float16<C10> __habs(cuda_on_cpu::Float16<C10> a) {
  return cuda_on_cpu::Float16<C10>(fabsf(float(a)));
}
template <class C10>
static inline cuda_on_cpu::Float16Pair<C10> __habs2(cuda_on_cpu::Float16Pair<C10> a) {
  return {__habs(a.x), __habs(a.y)};
}
template <class C10>
static inline cuda_on_cpu::Float16Pair<C10> __hneg2(cuda_on_cpu::Float16Pair<C10> a) {
  return {__hneg(a.x), __hneg(a.y)};
}
template <class C10>
static inline int __hisinf(cuda_on_cpu::Float16<C10> a) {
  return std::isinf(float(a)) ? (float(a) < 0 ? -1 : 1) : 0;
}
template <class To>
static inline To __cuda_on_cpu_half_of_bits(std::uint16_t bits) {
  To value;
  value.bits = bits;
  return value;
}
static inline __half __ushort_as_half(unsigned short a) {
  return __cuda_on_cpu_half_of_bits<__half>(a);
}
static inline unsigned short __half_as_ushort(__half a) { return a.bits; }
static inline __nv_bfloat16 __ushort_as_bfloat16(unsigned short a) {
  return __cuda_on_cpu_half_of_bits<__nv_bfloat16>(a);
}
static inline unsigned short __bfloat16_as_ushort(__nv_bfloat16 a) { return a.bits; }

// Conversions. CUDA names them after the type, and the pairs not quite regularly.
static inline float __half2float(__half a) { return float(a); }
static inline __half __float2half(float a) { return __half(a); }
static inline __half __float2half_rn(float a) { return __half(a); }
static inline __half2 __float2half2_rn(float a) { return {__half(a), __half(a)}; }
static inline __half2 __floats2half2_rn(float a, float b) { return {__half(a), __half(b)}; }
static inline __half2 __float22half2_rn(float2 a) { return {__half(a.x), __half(a.y)}; }
static inline float2 __half22float2(__half2 a) { return {float(a.x), float(a.y)}; }
static inline __half2 __half2half2(__half a) { return {a, a}; }
static inline __half2 __halves2half2(__half a, __half b) { return {a, b}; }
static inline __half2 make_half2(__half a, __half b) { return {a, b}; }
static inline int __half2int_rn(__half a) { return static_cast<int>(nearbyintf(float(a))); }
static inline int __half2int_rz(__half a) { return static_cast<int>(float(a)); }
static inline __half __int2half_rn(int a) { return __half(static_cast<float>(a)); }
static inline __half __low2half(__half2 a) { return a.x; }
static inline __half __high2half(__half2 a) { return a.y; }
static inline __half2 __lows2half2(__half2 a, __half2 b) { return {a.x, b.x}; }
static inline __half2 __highs2half2(__half2 a, __half2 b) { return {a.y, b.y}; }

static inline float __bfloat162float(__nv_bfloat16 a) { return float(a); }
static inline __nv_bfloat16 __float2bfloat16(float a) { return __nv_bfloat16(a); }
static inline __nv_bfloat16 __float2bfloat16_rn(float a) { return __nv_bfloat16(a); }
static inline __nv_bfloat162 __float2bfloat162_rn(float a) {
  return {__nv_bfloat16(a), __nv_bfloat16(a)};
}
static inline __nv_bfloat162 __floats2bfloat162_rn(float a, float b) {
  return {__nv_bfloat16(a), __nv_bfloat16(b)};
}
static inline __nv_bfloat162 __float22bfloat162_rn(float2 a) {
  return {__nv_bfloat16(a.x), __nv_bfloat16(a.y)};
}
static inline float2 __bfloat1622float2(__nv_bfloat162 a) { return {float(a.x), float(a.y)}; }
static inline __nv_bfloat162 __bfloat162bfloat162(__nv_bfloat16 a) { return {a, a}; }
static inline __nv_bfloat162 __halves2bfloat162(__nv_bfloat16 a, __nv_bfloat16 b) { return {a, b}; }
static inline __nv_bfloat162 make_bfloat162(__nv_bfloat16 a, __nv_bfloat16 b) { return {a, b}; }
static inline __nv_bfloat16 __low2bfloat16(__nv_bfloat162 a) { return a.x; }
static inline __nv_bfloat16 __high2bfloat16(__nv_bfloat162 a) { return a.y; }

template <class C10>
static inline float __low2float(cuda_on_cpu::Float16Pair<C10> a) {
  return float(a.x);
}
template <class C10>
static inline float __high2float(cuda_on_cpu::Float16Pair<C10> a) {
  return float(a.y);
}
