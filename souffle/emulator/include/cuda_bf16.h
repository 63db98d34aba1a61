// __nv_bfloat16 and __nv_bfloat162.
#pragma once
#include "souffle_float16.h"

SOUFFLE_INLINE float souffle_bfloat_to_float(unsigned short bits) { return souffle_bits<float>(unsigned(bits) << 16); }
SOUFFLE_INLINE unsigned short souffle_float_to_bfloat(float v) {
  if (v != v) return 0x7FFF;
  unsigned bits = souffle_bits<unsigned>(v);
  return (unsigned short)((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}
// Through float rounded to odd, so that the value is rounded once.
SOUFFLE_INLINE unsigned short souffle_double_to_bfloat(double v) {
  float f = float(v);
  if (double(f) != v && v == v && fabs(v) < 3.5e38) {
    unsigned bits = souffle_bits<unsigned>(f);
    if (fabs(double(f)) > fabs(v)) --bits;
    f = souffle_bits<float>(bits | 1);
  }
  return souffle_float_to_bfloat(f);
}

struct __nv_bfloat16_raw {
  unsigned short x;
};
struct __attribute__((aligned(2))) __nv_bfloat16 {
  unsigned short __x;
  SOUFFLE_FLOAT16_MEMBERS(__nv_bfloat16, souffle_float_to_bfloat, souffle_double_to_bfloat, souffle_bfloat_to_float)
  __nv_bfloat16(const __nv_bfloat16_raw& raw) : __x(raw.x) {}
  operator __nv_bfloat16_raw() const { return __nv_bfloat16_raw{__x}; }
};
typedef __nv_bfloat16 nv_bfloat16;
struct __attribute__((aligned(4))) __nv_bfloat162 {
  __nv_bfloat16 x, y;
  __nv_bfloat162() = default;
  __nv_bfloat162(__nv_bfloat16 a, __nv_bfloat16 b) : x(a), y(b) {}
};
typedef __nv_bfloat162 nv_bfloat162;

SOUFFLE_FLOAT16_FUNCTIONS(__nv_bfloat16, __nv_bfloat162)
SOUFFLE_FLOAT16_INTEGERS(__nv_bfloat16, bfloat16, bfloat16)

SOUFFLE_INLINE float __bfloat162float(__nv_bfloat16 v) { return float(v); }
SOUFFLE_INLINE __nv_bfloat16 __float2bfloat16(float v) { return __nv_bfloat16(v); }
SOUFFLE_INLINE __nv_bfloat16 __float2bfloat16_rn(float v) { return __nv_bfloat16(v); }
SOUFFLE_INLINE __nv_bfloat16 __double2bfloat16(double v) { return __nv_bfloat16(v); }
SOUFFLE_INLINE __nv_bfloat16 __float2bfloat16_rz(float v) {
  return v != v ? __nv_bfloat16(v) : souffle_bits<__nv_bfloat16>((unsigned short)(souffle_bits<unsigned>(v) >> 16));
}
SOUFFLE_INLINE unsigned short __bfloat16_as_ushort(__nv_bfloat16 v) { return v.__x; }
SOUFFLE_INLINE short __bfloat16_as_short(__nv_bfloat16 v) { return short(v.__x); }
SOUFFLE_INLINE __nv_bfloat16 __ushort_as_bfloat16(unsigned short v) { return souffle_bits<__nv_bfloat16>(v); }
SOUFFLE_INLINE __nv_bfloat16 __short_as_bfloat16(short v) { return souffle_bits<__nv_bfloat16>(v); }

SOUFFLE_INLINE __nv_bfloat162 make_bfloat162(__nv_bfloat16 a, __nv_bfloat16 b) { return __nv_bfloat162(a, b); }
SOUFFLE_INLINE __nv_bfloat162 __halves2bfloat162(__nv_bfloat16 a, __nv_bfloat16 b) { return __nv_bfloat162(a, b); }
SOUFFLE_INLINE __nv_bfloat162 __bfloat162bfloat162(__nv_bfloat16 a) { return __nv_bfloat162(a, a); }
SOUFFLE_INLINE __nv_bfloat16 __low2bfloat16(__nv_bfloat162 v) { return v.x; }
SOUFFLE_INLINE __nv_bfloat16 __high2bfloat16(__nv_bfloat162 v) { return v.y; }
SOUFFLE_INLINE __nv_bfloat162 __low2bfloat162(__nv_bfloat162 v) { return __nv_bfloat162(v.x, v.x); }
SOUFFLE_INLINE __nv_bfloat162 __high2bfloat162(__nv_bfloat162 v) { return __nv_bfloat162(v.y, v.y); }
SOUFFLE_INLINE float __low2float(__nv_bfloat162 v) { return float(v.x); }
SOUFFLE_INLINE float __high2float(__nv_bfloat162 v) { return float(v.y); }
SOUFFLE_INLINE __nv_bfloat162 __float2bfloat162_rn(float v) { return __nv_bfloat162(__nv_bfloat16(v), __nv_bfloat16(v)); }
SOUFFLE_INLINE __nv_bfloat162 __floats2bfloat162_rn(float a, float b) {
  return __nv_bfloat162(__nv_bfloat16(a), __nv_bfloat16(b));
}
SOUFFLE_INLINE __nv_bfloat162 __float22bfloat162_rn(float2 v) {
  return __nv_bfloat162(__nv_bfloat16(v.x), __nv_bfloat16(v.y));
}
SOUFFLE_INLINE float2 __bfloat1622float2(__nv_bfloat162 v) { return float2{float(v.x), float(v.y)}; }
