// half and half2.
#pragma once
#include "souffle_float16.h"

#ifdef __FLT16_MANT_DIG__
SOUFFLE_INLINE float souffle_half_to_float(unsigned short bits) { return float(souffle_bits<_Float16>(bits)); }
SOUFFLE_INLINE unsigned short souffle_float_to_half(float v) { return souffle_bits<unsigned short>(_Float16(v)); }
SOUFFLE_INLINE unsigned short souffle_double_to_half(double v) { return souffle_bits<unsigned short>(_Float16(v)); }
#else
static inline float souffle_half_to_float(unsigned short bits) {
  unsigned exponent = bits >> 10 & 31, mantissa = bits & 1023;
  float v = exponent == 31 ? (mantissa ? NAN : HUGE_VALF)
            : exponent     ? ldexpf(float(mantissa + 1024), int(exponent) - 25)
                           : ldexpf(float(mantissa), -24);
  return bits & 0x8000 ? -v : v;
}
static inline unsigned short souffle_double_to_half(double v) {
  unsigned short sign = signbit(v) ? 0x8000 : 0;
  double a = fabs(v);
  if (a != a) return sign | 0x7FFF;
  if (a >= 65520.0) return sign | 0x7C00;
  if (a < 6.103515625e-05) return (unsigned short)(sign | (unsigned short)nearbyint(a * 16777216.0));
  int exponent;
  double fraction = frexp(a, &exponent);  // in [0.5, 1)
  unsigned rounded = unsigned(nearbyint(fraction * 2048.0));
  return (unsigned short)(sign | ((unsigned(exponent + 14) << 10) + (rounded - 1024)));
}
static inline unsigned short souffle_float_to_half(float v) { return souffle_double_to_half(double(v)); }
#endif

struct __half_raw {
  unsigned short x;
};
struct __attribute__((aligned(2))) __half {
  unsigned short __x;
  SOUFFLE_FLOAT16_MEMBERS(__half, souffle_float_to_half, souffle_double_to_half, souffle_half_to_float)
  __half(const __half_raw& raw) : __x(raw.x) {}
  operator __half_raw() const { return __half_raw{__x}; }
};
typedef __half half;
struct __attribute__((aligned(4))) __half2 {
  __half x, y;
  __half2() = default;
  __half2(__half a, __half b) : x(a), y(b) {}
};
typedef __half2 half2;
typedef __half __nv_half;
typedef __half2 __nv_half2;
typedef __half nv_half;
typedef __half2 nv_half2;

SOUFFLE_FLOAT16_FUNCTIONS(__half, __half2)
SOUFFLE_FLOAT16_INTEGERS(__half, half, half)

SOUFFLE_INLINE float __half2float(__half v) { return float(v); }
SOUFFLE_INLINE __half __float2half(float v) { return __half(v); }
SOUFFLE_INLINE __half __float2half_rn(float v) { return __half(v); }
SOUFFLE_INLINE __half __double2half(double v) { return __half(v); }
SOUFFLE_INLINE unsigned short __half_as_ushort(__half v) { return v.__x; }
SOUFFLE_INLINE short __half_as_short(__half v) { return short(v.__x); }
SOUFFLE_INLINE __half __ushort_as_half(unsigned short v) { return souffle_bits<__half>(v); }
SOUFFLE_INLINE __half __short_as_half(short v) { return souffle_bits<__half>(v); }
SOUFFLE_INLINE __half __float2half_rz(float v) {
  __half h(v);
  if (fabsf(float(h)) > fabsf(v)) --h.__x;
  return h;
}

SOUFFLE_INLINE __half2 make_half2(__half a, __half b) { return __half2(a, b); }
SOUFFLE_INLINE __half2 __halves2half2(__half a, __half b) { return __half2(a, b); }
SOUFFLE_INLINE __half2 __half2half2(__half a) { return __half2(a, a); }
SOUFFLE_INLINE __half __low2half(__half2 v) { return v.x; }
SOUFFLE_INLINE __half __high2half(__half2 v) { return v.y; }
SOUFFLE_INLINE __half2 __low2half2(__half2 v) { return __half2(v.x, v.x); }
SOUFFLE_INLINE __half2 __high2half2(__half2 v) { return __half2(v.y, v.y); }
SOUFFLE_INLINE __half2 __lowhigh2highlow(__half2 v) { return __half2(v.y, v.x); }
SOUFFLE_INLINE __half2 __lows2half2(__half2 a, __half2 b) { return __half2(a.x, b.x); }
SOUFFLE_INLINE __half2 __highs2half2(__half2 a, __half2 b) { return __half2(a.y, b.y); }
SOUFFLE_INLINE float __low2float(__half2 v) { return float(v.x); }
SOUFFLE_INLINE float __high2float(__half2 v) { return float(v.y); }
SOUFFLE_INLINE __half2 __float2half2_rn(float v) { return __half2(__half(v), __half(v)); }
SOUFFLE_INLINE __half2 __floats2half2_rn(float a, float b) { return __half2(__half(a), __half(b)); }
SOUFFLE_INLINE __half2 __float22half2_rn(float2 v) { return __half2(__half(v.x), __half(v.y)); }
SOUFFLE_INLINE float2 __half22float2(__half2 v) { return float2{float(v.x), float(v.y)}; }
