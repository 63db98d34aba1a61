// Prelude of every CUDA text on the CPU device: qualifiers, built-in variables, vector types, barriers, warp operations.
#ifndef SOUFFLE_DEVICE_H
#define SOUFFLE_DEVICE_H

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include "souffle_abi.h"

#define __CUDACC__ 1
#define __NVCC__ 1
#define __CUDACC_VER_MAJOR__ 13
#define __CUDACC_VER_MINOR__ 0
#define __CUDACC_VER_BUILD__ 0
#define CUDART_VERSION 13000
#define CUDA_VERSION 13000
#ifndef __CUDA_ARCH__
#define __CUDA_ARCH__ 900
#endif

#define __host__
#define __device__
// A function of its own, so that places in it carry its name.
#define __global__ __attribute__((noinline, noclone))
#define __constant__
#define __managed__
#define __grid_constant__
#define __shared__ thread_local
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __align__(n) __attribute__((aligned(n)))
// nvcc takes alignas between the specifiers of a declaration, where g++ takes only its own spelling.
#define alignas(...) __attribute__((aligned(__VA_ARGS__)))
#define __builtin_align__(n) __attribute__((aligned(n)))
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __maxnreg__(...)

// The current thread lives in a register of its own where the fiber switch is ours (see fiber_runtime.cpp).
#if defined(SOUFFLE_SELF_IN_REGISTER)
register SouffleThread* souffle_self asm("r15");
#else
#define souffle_self (souffle_current())
#endif

#define threadIdx (souffle_self->thread_index)
#define blockIdx (souffle_self->block_index)
#define blockDim (souffle_self->block_extent)
#define gridDim (souffle_self->grid_extent)
#define warpSize 32

#define SOUFFLE_INLINE static inline __attribute__((always_inline))

// ---- vector types ----
#define SOUFFLE_VECTOR(name, T, a1, a2, a3, a4)                                               \
  struct __attribute__((aligned(a1))) name##1 { T x; };                                       \
  struct __attribute__((aligned(a2))) name##2 { T x, y; };                                    \
  struct __attribute__((aligned(a3))) name##3 { T x, y, z; };                                 \
  struct __attribute__((aligned(a4))) name##4 { T x, y, z, w; };                              \
  SOUFFLE_INLINE name##1 make_##name##1(T x) { return name##1{x}; }                           \
  SOUFFLE_INLINE name##2 make_##name##2(T x, T y) { return name##2{x, y}; }                   \
  SOUFFLE_INLINE name##3 make_##name##3(T x, T y, T z) { return name##3{x, y, z}; }           \
  SOUFFLE_INLINE name##4 make_##name##4(T x, T y, T z, T w) { return name##4{x, y, z, w}; }
SOUFFLE_VECTOR(char, signed char, 1, 2, 1, 4)
SOUFFLE_VECTOR(uchar, unsigned char, 1, 2, 1, 4)
SOUFFLE_VECTOR(short, short, 2, 4, 2, 8)
SOUFFLE_VECTOR(ushort, unsigned short, 2, 4, 2, 8)
SOUFFLE_VECTOR(int, int, 4, 8, 4, 16)
SOUFFLE_VECTOR(long, long, 8, 16, 8, 16)
SOUFFLE_VECTOR(ulong, unsigned long, 8, 16, 8, 16)
SOUFFLE_VECTOR(longlong, long long, 8, 16, 8, 16)
SOUFFLE_VECTOR(ulonglong, unsigned long long, 8, 16, 8, 16)
SOUFFLE_VECTOR(float, float, 4, 8, 4, 16)
SOUFFLE_VECTOR(double, double, 8, 16, 8, 16)
struct uint1 { unsigned int x; };
struct __attribute__((aligned(8))) uint2 { unsigned int x, y; };
struct __attribute__((aligned(16))) uint4 { unsigned int x, y, z, w; };
SOUFFLE_INLINE uint1 make_uint1(unsigned x) { return uint1{x}; }
SOUFFLE_INLINE uint2 make_uint2(unsigned x, unsigned y) { return uint2{x, y}; }
SOUFFLE_INLINE uint3 make_uint3(unsigned x, unsigned y, unsigned z) { return uint3{x, y, z}; }
SOUFFLE_INLINE uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return uint4{x, y, z, w}; }

template <class To, class From>
SOUFFLE_INLINE To souffle_bits(const From& from) {
  static_assert(sizeof(To) == sizeof(From), "reinterpretation between sizes");
  To to;
  memcpy(&to, &from, sizeof(To));
  return to;
}

#include "souffle_check.h"
#include "souffle_math.h"
#include "souffle_sync.h"
#include "souffle_ptx.h"
#include "souffle_entry.h"

#endif
