// What the two 16-bit floating-point types have in common. Every operation is one operation in float, rounded once
// to the type (to nearest even), which is exact for + - * / and square root.
#ifndef SOUFFLE_FLOAT16_H
#define SOUFFLE_FLOAT16_H

// The members of T: conversions from arithmetic types are implicit, as in CUDA, and so is the one to float.
#define SOUFFLE_FLOAT16_MEMBERS(T, from_float, from_double, to_float)                 \
  T() = default;                                                                      \
  T(const T&) = default;                                                              \
  T(const volatile T& v) : __x(v.__x) {}                                              \
  T& operator=(const T&) = default;                                                   \
  void operator=(const T& v) volatile { __x = v.__x; }                                \
  T(float v) : __x(from_float(v)) {}                                                  \
  T(double v) : __x(from_double(v)) {}                                                \
  T(int v) : __x(from_double(double(v))) {}                                           \
  T(unsigned int v) : __x(from_double(double(v))) {}                                  \
  T(long v) : __x(from_double(double(v))) {}                                          \
  T(unsigned long v) : __x(from_double(double(v))) {}                                 \
  T(long long v) : __x(from_double(double(v))) {}                                     \
  T(unsigned long long v) : __x(from_double(double(v))) {}                            \
  T(short v) : __x(from_float(float(v))) {}                                           \
  T(unsigned short v) : __x(from_float(float(v))) {}                                  \
  operator float() const volatile { return to_float(__x); }                           \
  T& operator+=(T b) { return *this = T(float(*this) + float(b)); }                   \
  T& operator-=(T b) { return *this = T(float(*this) - float(b)); }                   \
  T& operator*=(T b) { return *this = T(float(*this) * float(b)); }                   \
  T& operator/=(T b) { return *this = T(float(*this) / float(b)); }                   \
  T& operator++() { return *this = T(float(*this) + 1.0f); }                          \
  T& operator--() { return *this = T(float(*this) - 1.0f); }

#define SOUFFLE_FLOAT16_UNARY(T, T2, name, expression)                                \
  SOUFFLE_INLINE T h##name(T v) { float x = float(v); return T(expression); }         \
  SOUFFLE_INLINE T2 h2##name(T2 v) { return T2(h##name(v.x), h##name(v.y)); }

#define SOUFFLE_FLOAT16_COMPARE(T, T2, name, op)                                                                  \
  SOUFFLE_INLINE bool operator op(T a, T b) { return float(a) op float(b); }                                      \
  SOUFFLE_INLINE bool __h##name(T a, T b) { return float(a) op float(b); }                                        \
  SOUFFLE_INLINE T2 __h##name##2(T2 a, T2 b) { return T2(T(a.x op b.x ? 1.0f : 0.0f), T(a.y op b.y ? 1.0f : 0.0f)); } \
  SOUFFLE_INLINE bool __hb##name##2(T2 a, T2 b) { return a.x op b.x && a.y op b.y; }

#define SOUFFLE_FLOAT16_ARITHMETIC(T, T2, name, op)                                   \
  SOUFFLE_INLINE T operator op(T a, T b) { return T(float(a) op float(b)); }          \
  SOUFFLE_INLINE T2 operator op(T2 a, T2 b) { return T2(a.x op b.x, a.y op b.y); }    \
  SOUFFLE_INLINE T __h##name(T a, T b) { return a op b; }                             \
  SOUFFLE_INLINE T __h##name##_rn(T a, T b) { return a op b; }                        \
  SOUFFLE_INLINE T __h##name##_sat(T a, T b) { return T(__saturatef(float(a op b))); } \
  SOUFFLE_INLINE T2 __h##name##2_rn(T2 a, T2 b) { return a op b; }

#define SOUFFLE_FLOAT16_FUNCTIONS(T, T2)                                              \
  SOUFFLE_FLOAT16_ARITHMETIC(T, T2, add, +)                                           \
  SOUFFLE_FLOAT16_ARITHMETIC(T, T2, sub, -)                                           \
  SOUFFLE_FLOAT16_ARITHMETIC(T, T2, mul, *)                                           \
  SOUFFLE_FLOAT16_ARITHMETIC(T, T2, div, /)                                           \
  SOUFFLE_FLOAT16_COMPARE(T, T2, eq, ==)                                              \
  SOUFFLE_FLOAT16_COMPARE(T, T2, ne, !=)                                              \
  SOUFFLE_FLOAT16_COMPARE(T, T2, lt, <)                                               \
  SOUFFLE_FLOAT16_COMPARE(T, T2, le, <=)                                              \
  SOUFFLE_FLOAT16_COMPARE(T, T2, gt, >)                                               \
  SOUFFLE_FLOAT16_COMPARE(T, T2, ge, >=)                                              \
  SOUFFLE_INLINE T operator+(T a) { return a; }                                       \
  SOUFFLE_INLINE T operator-(T a) { a.__x ^= 0x8000; return a; }                      \
  SOUFFLE_INLINE T2 operator-(T2 a) { return T2(-a.x, -a.y); }                        \
  SOUFFLE_INLINE T2 __hadd2(T2 a, T2 b) { return a + b; }                             \
  SOUFFLE_INLINE T2 __hsub2(T2 a, T2 b) { return a - b; }                             \
  SOUFFLE_INLINE T2 __hmul2(T2 a, T2 b) { return a * b; }                             \
  SOUFFLE_INLINE T2 __h2div(T2 a, T2 b) { return a / b; }                             \
  SOUFFLE_INLINE T __hneg(T a) { return -a; }                                         \
  SOUFFLE_INLINE T2 __hneg2(T2 a) { return -a; }                                      \
  SOUFFLE_INLINE T __habs(T a) { a.__x &= 0x7FFF; return a; }                         \
  SOUFFLE_INLINE T2 __habs2(T2 a) { return T2(__habs(a.x), __habs(a.y)); }            \
  SOUFFLE_INLINE T __hfma(T a, T b, T c) { return T(fma(double(float(a)), double(float(b)), double(float(c)))); } \
  SOUFFLE_INLINE T __hfma_relu(T a, T b, T c) { T r = __hfma(a, b, c); return float(r) > 0.0f ? r : T(0.0f); } \
  SOUFFLE_INLINE T2 __hfma2(T2 a, T2 b, T2 c) { return T2(__hfma(a.x, b.x, c.x), __hfma(a.y, b.y, c.y)); } \
  SOUFFLE_INLINE T __hmax(T a, T b) { return T(fmaxf(float(a), float(b))); }          \
  SOUFFLE_INLINE T __hmin(T a, T b) { return T(fminf(float(a), float(b))); }          \
  SOUFFLE_INLINE T __hmax_nan(T a, T b) { return a != a ? a : b != b ? b : __hmax(a, b); } \
  SOUFFLE_INLINE T __hmin_nan(T a, T b) { return a != a ? a : b != b ? b : __hmin(a, b); } \
  SOUFFLE_INLINE T2 __hmax2(T2 a, T2 b) { return T2(__hmax(a.x, b.x), __hmax(a.y, b.y)); } \
  SOUFFLE_INLINE T2 __hmin2(T2 a, T2 b) { return T2(__hmin(a.x, b.x), __hmin(a.y, b.y)); } \
  SOUFFLE_INLINE bool __hisnan(T a) { return float(a) != float(a); }                  \
  SOUFFLE_INLINE int __hisinf(T a) { float x = float(a); return x == HUGE_VALF ? 1 : x == -HUGE_VALF ? -1 : 0; } \
  SOUFFLE_FLOAT16_UNARY(T, T2, exp, expf(x))                                          \
  SOUFFLE_FLOAT16_UNARY(T, T2, exp2, exp2f(x))                                        \
  SOUFFLE_FLOAT16_UNARY(T, T2, exp10, exp10f(x))                                      \
  SOUFFLE_FLOAT16_UNARY(T, T2, log, logf(x))                                          \
  SOUFFLE_FLOAT16_UNARY(T, T2, log2, log2f(x))                                        \
  SOUFFLE_FLOAT16_UNARY(T, T2, log10, log10f(x))                                      \
  SOUFFLE_FLOAT16_UNARY(T, T2, sin, sinf(x))                                          \
  SOUFFLE_FLOAT16_UNARY(T, T2, cos, cosf(x))                                          \
  SOUFFLE_FLOAT16_UNARY(T, T2, tanh, tanhf(x))                                        \
  SOUFFLE_FLOAT16_UNARY(T, T2, sqrt, sqrtf(x))                                        \
  SOUFFLE_FLOAT16_UNARY(T, T2, rsqrt, 1.0 / sqrt(double(x)))                          \
  SOUFFLE_FLOAT16_UNARY(T, T2, rcp, 1.0f / x)                                         \
  SOUFFLE_FLOAT16_UNARY(T, T2, floor, floorf(x))                                      \
  SOUFFLE_FLOAT16_UNARY(T, T2, ceil, ceilf(x))                                        \
  SOUFFLE_FLOAT16_UNARY(T, T2, trunc, truncf(x))                                      \
  SOUFFLE_FLOAT16_UNARY(T, T2, rint, rintf(x))                                        \
  SOUFFLE_INLINE T2& operator+=(T2& a, T2 b) { return a = a + b; }                    \
  SOUFFLE_INLINE T2& operator-=(T2& a, T2 b) { return a = a - b; }                    \
  SOUFFLE_INLINE T2& operator*=(T2& a, T2 b) { return a = a * b; }                    \
  SOUFFLE_ATOMIC(atomicAdd, T, old + v)                                               \
  SOUFFLE_ATOMIC(atomicAdd, T2, old + v)                                              \
  SOUFFLE_ATOMIC(atomicMax, T, __hmax(old, v))                                        \
  SOUFFLE_ATOMIC(atomicMin, T, __hmin(old, v))                                        \
  SOUFFLE_ATOMIC(souffle_exchange, T, v)

#define SOUFFLE_FLOAT16_INTEGERS(T, prefix, suffix)                                                        \
  SOUFFLE_INLINE int __##prefix##2int_rn(T v) { return __float2int_rn(float(v)); }                         \
  SOUFFLE_INLINE int __##prefix##2int_rz(T v) { return __float2int_rz(float(v)); }                         \
  SOUFFLE_INLINE int __##prefix##2int_ru(T v) { return __float2int_ru(float(v)); }                         \
  SOUFFLE_INLINE int __##prefix##2int_rd(T v) { return __float2int_rd(float(v)); }                         \
  SOUFFLE_INLINE unsigned __##prefix##2uint_rn(T v) { return __float2uint_rn(float(v)); }                  \
  SOUFFLE_INLINE unsigned __##prefix##2uint_rz(T v) { return __float2uint_rz(float(v)); }                  \
  SOUFFLE_INLINE long long __##prefix##2ll_rn(T v) { return __float2ll_rn(float(v)); }                     \
  SOUFFLE_INLINE long long __##prefix##2ll_rz(T v) { return __float2ll_rz(float(v)); }                     \
  SOUFFLE_INLINE short __##prefix##2short_rn(T v) { return (short)souffle_saturate<int>(nearbyintf(float(v)), -32768, 32767); } \
  SOUFFLE_INLINE short __##prefix##2short_rz(T v) { return (short)souffle_saturate<int>(truncf(float(v)), -32768, 32767); } \
  SOUFFLE_INLINE unsigned short __##prefix##2ushort_rn(T v) { return (unsigned short)souffle_saturate<int>(nearbyintf(float(v)), 0, 65535); } \
  SOUFFLE_INLINE unsigned short __##prefix##2ushort_rz(T v) { return (unsigned short)souffle_saturate<int>(truncf(float(v)), 0, 65535); } \
  SOUFFLE_INLINE signed char __##prefix##2char_rz(T v) { return (signed char)souffle_saturate<int>(truncf(float(v)), -128, 127); } \
  SOUFFLE_INLINE unsigned char __##prefix##2uchar_rz(T v) { return (unsigned char)souffle_saturate<int>(truncf(float(v)), 0, 255); } \
  SOUFFLE_INLINE T __int2##suffix##_rn(int v) { return T(v); }                                             \
  SOUFFLE_INLINE T __uint2##suffix##_rn(unsigned v) { return T(v); }                                       \
  SOUFFLE_INLINE T __ll2##suffix##_rn(long long v) { return T(v); }                                        \
  SOUFFLE_INLINE T __ull2##suffix##_rn(unsigned long long v) { return T(v); }                              \
  SOUFFLE_INLINE T __short2##suffix##_rn(short v) { return T(v); }                                         \
  SOUFFLE_INLINE T __ushort2##suffix##_rn(unsigned short v) { return T(v); }

#endif
