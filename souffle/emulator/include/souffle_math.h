// Device math functions and integer intrinsics.
#ifndef SOUFFLE_MATH_H
#define SOUFFLE_MATH_H

// CUDA offers these for every mix of arithmetic types in the global namespace.
#define SOUFFLE_MINMAX(R, A, B)                                           \
  SOUFFLE_INLINE R max(A a, B b) { return (R)a > (R)b ? (R)a : (R)b; }    \
  SOUFFLE_INLINE R min(A a, B b) { return (R)a < (R)b ? (R)a : (R)b; }
#define SOUFFLE_MINMAX_FLOAT(R, A, B)                                                                     \
  SOUFFLE_INLINE R max(A a, B b) { R x = a, y = b; return x != x ? y : y != y ? x : x > y ? x : y; }     \
  SOUFFLE_INLINE R min(A a, B b) { R x = a, y = b; return x != x ? y : y != y ? x : x < y ? x : y; }
SOUFFLE_MINMAX(int, int, int)
SOUFFLE_MINMAX(unsigned int, unsigned int, unsigned int)
SOUFFLE_MINMAX(unsigned int, int, unsigned int)
SOUFFLE_MINMAX(unsigned int, unsigned int, int)
SOUFFLE_MINMAX(long, long, long)
SOUFFLE_MINMAX(unsigned long, unsigned long, unsigned long)
SOUFFLE_MINMAX(long long, long long, long long)
SOUFFLE_MINMAX(unsigned long long, unsigned long long, unsigned long long)
SOUFFLE_MINMAX(long, long, int)
SOUFFLE_MINMAX(long, int, long)
SOUFFLE_MINMAX(long long, long long, int)
SOUFFLE_MINMAX(long long, int, long long)
SOUFFLE_MINMAX_FLOAT(float, float, float)
SOUFFLE_MINMAX_FLOAT(double, double, double)
SOUFFLE_MINMAX_FLOAT(double, float, double)
SOUFFLE_MINMAX_FLOAT(double, double, float)
// What max.NaN and min.NaN do.
SOUFFLE_INLINE float souffle_max_nan(float a, float b) { return a > b || a != a ? a : b; }
SOUFFLE_INLINE float souffle_min_nan(float a, float b) { return a < b || a != a ? a : b; }
#define umin(a, b) min((unsigned int)(a), (unsigned int)(b))
#define umax(a, b) max((unsigned int)(a), (unsigned int)(b))
#define llmin(a, b) min((long long)(a), (long long)(b))
#define llmax(a, b) max((long long)(a), (long long)(b))

SOUFFLE_INLINE float rsqrtf(float x) { return 1.0f / sqrtf(x); }
SOUFFLE_INLINE double rsqrt(double x) { return 1.0 / sqrt(x); }
SOUFFLE_INLINE float rsqrt(float x) { return 1.0f / sqrtf(x); }
SOUFFLE_INLINE float rcbrtf(float x) { return 1.0f / cbrtf(x); }
SOUFFLE_INLINE double rcbrt(double x) { return 1.0 / cbrt(x); }
SOUFFLE_INLINE float fdividef(float a, float b) { return a / b; }
SOUFFLE_INLINE float fdivide(float a, float b) { return a / b; }
SOUFFLE_INLINE double fdivide(double a, double b) { return a / b; }
SOUFFLE_INLINE float normcdff(float x) { return 0.5f * erfcf(-x * 0.70710678118654752f); }
SOUFFLE_INLINE double normcdf(double x) { return 0.5 * erfc(-x * 0.70710678118654752440); }
SOUFFLE_INLINE float rhypotf(float a, float b) { return 1.0f / hypotf(a, b); }
SOUFFLE_INLINE float norm3df(float a, float b, float c) { return sqrtf(a * a + b * b + c * c); }
SOUFFLE_INLINE float sinpif(float x) { return sinf(3.14159265358979323846f * fmodf(x, 2.0f)); }
SOUFFLE_INLINE float cospif(float x) { return cosf(3.14159265358979323846f * fmodf(x, 2.0f)); }
SOUFFLE_INLINE float erfcxf(float x) { return float(exp(double(x) * x) * erfc(double(x))); }
// Newton's method on erf from a rational start.
static inline double souffle_erfinv(double y) {
  if (!(y > -1.0 && y < 1.0)) return y == 1.0 ? HUGE_VAL : y == -1.0 ? -HUGE_VAL : NAN;
  double w = log((1.0 - y) * (1.0 + y)), t = 4.330746750799873 + w / 2.0;
  double x = copysign(sqrt(sqrt(t * t - w / 0.147) - t), y);
  for (int i = 0; i < 4; ++i) x -= (erf(x) - y) * 0.88622692545275801365 * exp(x * x);
  return x;
}
SOUFFLE_INLINE double erfinv(double y) { return souffle_erfinv(y); }
SOUFFLE_INLINE float erfinvf(float y) { return float(souffle_erfinv(y)); }
SOUFFLE_INLINE float __saturatef(float x) { return x > 0.0f ? (x < 1.0f ? x : 1.0f) : 0.0f; }

// glibc declares some of these names as its own functions, so they are macros here.
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
#define __fdividef(a, b) ((float)(a) / (float)(b))
#define __frcp_rn(x) (1.0f / (float)(x))
#define __frsqrt_rn(x) rsqrtf(x)
#define __fsqrt_rn(x) sqrtf(x)
#define __dsqrt_rn(x) sqrt((double)(x))
#define __drcp_rn(x) (1.0 / (double)(x))
SOUFFLE_INLINE float __fadd_rn(float a, float b) { return a + b; }
SOUFFLE_INLINE float __fsub_rn(float a, float b) { return a - b; }
SOUFFLE_INLINE float __fmul_rn(float a, float b) { return a * b; }
SOUFFLE_INLINE float __fdiv_rn(float a, float b) { return a / b; }
SOUFFLE_INLINE float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
SOUFFLE_INLINE double __dadd_rn(double a, double b) { return a + b; }
SOUFFLE_INLINE double __dsub_rn(double a, double b) { return a - b; }
SOUFFLE_INLINE double __dmul_rn(double a, double b) { return a * b; }
SOUFFLE_INLINE double __ddiv_rn(double a, double b) { return a / b; }
SOUFFLE_INLINE double __fma_rn(double a, double b, double c) { return fma(a, b, c); }

// ---- conversions: a GPU saturates and turns NaN into 0, C++ leaves both undefined ----
template <class To>
SOUFFLE_INLINE To souffle_saturate(double x, To low, To high) {
  if (x != x) return To(0);
  if (x <= double(low)) return low;
  if (x >= double(high)) return high;
  return To(x);
}
#define SOUFFLE_CONVERT(suffix, round)                                                                                 \
  SOUFFLE_INLINE int __float2int_##suffix(float x) { return souffle_saturate<int>(round(double(x)), INT32_MIN, INT32_MAX); } \
  SOUFFLE_INLINE unsigned __float2uint_##suffix(float x) { return souffle_saturate<unsigned>(round(double(x)), 0, UINT32_MAX); } \
  SOUFFLE_INLINE long long __float2ll_##suffix(float x) { return souffle_saturate<long long>(round(double(x)), INT64_MIN, INT64_MAX); } \
  SOUFFLE_INLINE unsigned long long __float2ull_##suffix(float x) { return souffle_saturate<unsigned long long>(round(double(x)), 0, UINT64_MAX); } \
  SOUFFLE_INLINE int __double2int_##suffix(double x) { return souffle_saturate<int>(round(x), INT32_MIN, INT32_MAX); } \
  SOUFFLE_INLINE unsigned __double2uint_##suffix(double x) { return souffle_saturate<unsigned>(round(x), 0, UINT32_MAX); } \
  SOUFFLE_INLINE long long __double2ll_##suffix(double x) { return souffle_saturate<long long>(round(x), INT64_MIN, INT64_MAX); } \
  SOUFFLE_INLINE unsigned long long __double2ull_##suffix(double x) { return souffle_saturate<unsigned long long>(round(x), 0, UINT64_MAX); }
SOUFFLE_CONVERT(rn, nearbyint)
SOUFFLE_CONVERT(rz, trunc)
SOUFFLE_CONVERT(ru, ceil)
SOUFFLE_CONVERT(rd, floor)
SOUFFLE_INLINE float __int2float_rn(int x) { return float(x); }
SOUFFLE_INLINE float __uint2float_rn(unsigned x) { return float(x); }
SOUFFLE_INLINE float __ll2float_rn(long long x) { return float(x); }
SOUFFLE_INLINE float __ull2float_rn(unsigned long long x) { return float(x); }
SOUFFLE_INLINE double __int2double_rn(int x) { return double(x); }
SOUFFLE_INLINE double __uint2double_rn(unsigned x) { return double(x); }
SOUFFLE_INLINE double __ll2double_rn(long long x) { return double(x); }
SOUFFLE_INLINE double __ull2double_rn(unsigned long long x) { return double(x); }
SOUFFLE_INLINE float __double2float_rn(double x) { return float(x); }

// cvt.rna.tf32.f32, also by the name that mma.h gives it: to the nearest of 11 bits, of two as near the one further from
// zero.
SOUFFLE_INLINE float souffle_to_tf32(float v) {
  return v != v ? v : souffle_bits<float>((souffle_bits<unsigned>(v) + 0x1000u) & ~0x1FFFu);
}
SOUFFLE_INLINE int __float_as_int(float x) { return souffle_bits<int>(x); }
SOUFFLE_INLINE unsigned __float_as_uint(float x) { return souffle_bits<unsigned>(x); }
SOUFFLE_INLINE float __int_as_float(int x) { return souffle_bits<float>(x); }
SOUFFLE_INLINE float __uint_as_float(unsigned x) { return souffle_bits<float>(x); }
SOUFFLE_INLINE long long __double_as_longlong(double x) { return souffle_bits<long long>(x); }
SOUFFLE_INLINE double __longlong_as_double(long long x) { return souffle_bits<double>(x); }
SOUFFLE_INLINE int __double2hiint(double x) { return int(souffle_bits<long long>(x) >> 32); }
SOUFFLE_INLINE int __double2loint(double x) { return int(souffle_bits<long long>(x)); }
SOUFFLE_INLINE double __hiloint2double(int high, int low) {
  return souffle_bits<double>((unsigned long long)(unsigned)high << 32 | (unsigned)low);
}

// ---- integers ----
SOUFFLE_INLINE int __popc(unsigned x) { return __builtin_popcount(x); }
SOUFFLE_INLINE int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
SOUFFLE_INLINE int __clz(int x) { return x ? __builtin_clz(unsigned(x)) : 32; }
SOUFFLE_INLINE int __clzll(long long x) { return x ? __builtin_clzll((unsigned long long)x) : 64; }
SOUFFLE_INLINE int __ffs(int x) { return __builtin_ffs(x); }
SOUFFLE_INLINE int __ffsll(long long x) { return __builtin_ffsll(x); }
SOUFFLE_INLINE unsigned long long __brevll(unsigned long long x) {
  unsigned long long r = 0;
  for (int i = 0; i < 64; ++i) r |= (x >> i & 1) << (63 - i);
  return r;
}
SOUFFLE_INLINE unsigned __brev(unsigned x) { return unsigned(__brevll(x) >> 32); }
SOUFFLE_INLINE int __mul24(int a, int b) { return int(unsigned(a << 8 >> 8) * unsigned(b << 8 >> 8)); }
SOUFFLE_INLINE unsigned __umul24(unsigned a, unsigned b) { return (a & 0xFFFFFF) * (b & 0xFFFFFF); }
SOUFFLE_INLINE int __mulhi(int a, int b) { return int((long long)a * b >> 32); }
SOUFFLE_INLINE unsigned __umulhi(unsigned a, unsigned b) { return unsigned((unsigned long long)a * b >> 32); }
SOUFFLE_INLINE long long __mul64hi(long long a, long long b) { return (long long)((__int128)a * b >> 64); }
SOUFFLE_INLINE unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
  return (unsigned long long)((unsigned __int128)a * b >> 64);
}
SOUFFLE_INLINE unsigned __sad(int a, int b, unsigned c) { return c + unsigned(a > b ? a - b : b - a); }
SOUFFLE_INLINE unsigned __usad(unsigned a, unsigned b, unsigned c) { return c + (a > b ? a - b : b - a); }
SOUFFLE_INLINE unsigned __byte_perm(unsigned a, unsigned b, unsigned s) {
  unsigned long long v = (unsigned long long)b << 32 | a;
  unsigned r = 0;
  for (int i = 0; i < 4; ++i) {
    unsigned byte = unsigned(v >> (8 * (s >> (4 * i) & 7))) & 0xFF;
    if (s >> (4 * i) & 8) byte = byte & 0x80 ? 0xFF : 0;
    r |= byte << (8 * i);
  }
  return r;
}
SOUFFLE_INLINE unsigned __funnelshift_l(unsigned low, unsigned high, unsigned n) {
  return unsigned(((unsigned long long)high << 32 | low) << (n & 31) >> 32);
}
SOUFFLE_INLINE unsigned __funnelshift_r(unsigned low, unsigned high, unsigned n) {
  return unsigned(((unsigned long long)high << 32 | low) >> (n & 31));
}
template <class A, class B>
SOUFFLE_INLINE int souffle_dp4a(unsigned a, unsigned b, int c) {
  for (int i = 0; i < 4; ++i) c = int(unsigned(c) + unsigned(int(A(a >> (8 * i))) * int(B(b >> (8 * i)))));
  return c;
}
SOUFFLE_INLINE int __dp4a(int a, int b, int c) { return souffle_dp4a<signed char, signed char>(unsigned(a), unsigned(b), c); }
SOUFFLE_INLINE unsigned __dp4a(unsigned a, unsigned b, unsigned c) {
  return unsigned(souffle_dp4a<unsigned char, unsigned char>(a, b, int(c)));
}
SOUFFLE_INLINE int __dp4a(char4 a, char4 b, int c) { return __dp4a(souffle_bits<int>(a), souffle_bits<int>(b), c); }
SOUFFLE_INLINE unsigned __dp4a(uchar4 a, uchar4 b, unsigned c) {
  return __dp4a(souffle_bits<unsigned>(a), souffle_bits<unsigned>(b), c);
}

#endif
