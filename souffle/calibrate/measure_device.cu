// The kernels of souffle.calibrate.measure_device. Each does a number of steps that its caller chooses, reads the clock of
// its multiprocessor before and after, and leaves a result that shows how many steps it did. What is measured is written
// as volatile PTX, which no compiler drops, merges or moves out of a loop.
#include <cooperative_groups.h>

typedef unsigned long long u64;

#define CLOCK_BEGIN \
  __syncthreads();  \
  u64 begin = clock64();

#define CLOCK_END                     \
  __syncthreads();                    \
  u64 end = clock64();                \
  if (threadIdx.x == 0) {             \
    clocks[2 * blockIdx.x] = begin;   \
    clocks[2 * blockIdx.x + 1] = end; \
  }

#define THREAD (blockIdx.x * blockDim.x + threadIdx.x)

// 8 chains of 32 fused multiply-adds in a step; each adds given[1].
extern "C" __global__ void __launch_bounds__(1024) measure_fp32(u64* clocks, float* out, float* given, int steps) {
  float a = given[0], b = given[1], x[8];
  for (int j = 0; j < 8; ++j) x[j] = 0.0f;
  CLOCK_BEGIN
  for (int s = 0; s < steps; ++s) {
#pragma unroll
    for (int u = 0; u < 32; ++u) {
#pragma unroll
      for (int j = 0; j < 8; ++j) asm volatile("fma.rn.f32 %0, %0, %1, %2;" : "+f"(x[j]) : "f"(a), "f"(b));
    }
  }
  CLOCK_END
  float sum = 0.0f;
  for (int j = 0; j < 8; ++j) sum += x[j];
  out[THREAD] = sum;
}

// 8 chains of 32 integer multiply-adds in a step; each adds given[1].
extern "C" __global__ void __launch_bounds__(1024)
    measure_int32_multiply(u64* clocks, unsigned* out, unsigned* given, int steps) {
  unsigned a = given[0], b = given[1], x[8];
  for (int j = 0; j < 8; ++j) x[j] = 0;
  CLOCK_BEGIN
  for (int s = 0; s < steps; ++s) {
#pragma unroll
    for (int u = 0; u < 32; ++u) {
#pragma unroll
      for (int j = 0; j < 8; ++j) asm volatile("mad.lo.u32 %0, %0, %1, %2;" : "+r"(x[j]) : "r"(a), "r"(b));
    }
  }
  CLOCK_END
  unsigned sum = 0;
  for (int j = 0; j < 8; ++j) sum += x[j];
  out[THREAD] = sum;
}

// 8 chains of 16 exclusive ors (with 0) and 16 additions in a step; each addition adds given[1]. ptxas spreads such
// additions over both pipes that can do them.
extern "C" __global__ void __launch_bounds__(1024)
    measure_int32_mixed(u64* clocks, unsigned* out, unsigned* given, int steps) {
  unsigned a = given[0] - 1, b = given[1], x[8];
  for (int j = 0; j < 8; ++j) x[j] = 0;
  CLOCK_BEGIN
  for (int s = 0; s < steps; ++s) {
#pragma unroll
    for (int u = 0; u < 16; ++u) {
#pragma unroll
      for (int j = 0; j < 8; ++j) asm volatile("xor.b32 %0, %0, %1;" : "+r"(x[j]) : "r"(a));
#pragma unroll
      for (int j = 0; j < 8; ++j) asm volatile("add.u32 %0, %0, %1;" : "+r"(x[j]) : "r"(b));
    }
  }
  CLOCK_END
  unsigned sum = 0;
  for (int j = 0; j < 8; ++j) sum += x[j];
  out[THREAD] = sum;
}

// 4 chains of fp32 and 4 of integers: 64 multiply-adds in fp32, 64 exclusive ors (with 0) or additions in a step.
extern "C" __global__ void __launch_bounds__(1024) measure_issue(u64* clocks, float* out, float* given, int steps) {
  float a = given[0], b = given[1], x[4];
  unsigned zero = (unsigned)given[0] - 1, one = (unsigned)given[1], y[4];
  for (int j = 0; j < 4; ++j) x[j] = 0.0f, y[j] = 0;
  CLOCK_BEGIN
  for (int s = 0; s < steps; ++s) {
#pragma unroll
    for (int u = 0; u < 16; ++u) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        asm volatile("fma.rn.f32 %0, %0, %1, %2;" : "+f"(x[j]) : "f"(a), "f"(b));
        if (u % 2 == 0) {
          asm volatile("xor.b32 %0, %0, %1;" : "+r"(y[j]) : "r"(zero));
        } else {
          asm volatile("add.u32 %0, %0, %1;" : "+r"(y[j]) : "r"(one));
        }
      }
    }
  }
  CLOCK_END
  float sum = 0.0f;
  for (int j = 0; j < 4; ++j) sum += x[j] + (float)y[j];
  out[THREAD] = sum;
}

// 8 chains of 16 powers in a step: x = 2^-x comes to rest at 0.6411857.
extern "C" __global__ void __launch_bounds__(1024) measure_special(u64* clocks, float* out, float* given, int steps) {
  float x[8];
  for (int j = 0; j < 8; ++j) x[j] = given[1];
  CLOCK_BEGIN
  for (int s = 0; s < steps; ++s) {
#pragma unroll
    for (int u = 0; u < 16; ++u) {
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        float negative = -x[j];
        asm volatile("ex2.approx.ftz.f32 %0, %1;" : "=f"(x[j]) : "f"(negative));
      }
    }
  }
  CLOCK_END
  float sum = 0.0f;
  for (int j = 0; j < 8; ++j) sum += x[j];
  out[THREAD] = sum;
}

// 4 chains of 8 products of 16x16 and 16x8 fp16 matrices in a step, with fp32 totals: each adds 16.
extern "C" __global__ void __launch_bounds__(1024) measure_tensor(u64* clocks, float* out, unsigned* ones, int steps) {
  unsigned a0 = ones[0], a1 = ones[1], b0 = ones[2], b1 = ones[3];
  float c[4][4];
  for (int j = 0; j < 4; ++j)
    for (int k = 0; k < 4; ++k) c[j][k] = 0.0f;
  CLOCK_BEGIN
  for (int s = 0; s < steps; ++s) {
#pragma unroll
    for (int u = 0; u < 8; ++u) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        asm volatile(
            "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%4,%5}, {%6,%7}, {%0,%1,%2,%3};"
            : "+f"(c[j][0]), "+f"(c[j][1]), "+f"(c[j][2]), "+f"(c[j][3])
            : "r"(a0), "r"(a1), "r"(b0), "r"(b1));
      }
    }
  }
  CLOCK_END
  float sum = 0.0f;
  for (int j = 0; j < 4; ++j)
    for (int k = 0; k < 4; ++k) sum += c[j][k];
  out[THREAD] = sum;
}

// The same of 16x8 and 8x8 matrices of TF32: each adds 8.
extern "C" __global__ void __launch_bounds__(1024) measure_tf32(u64* clocks, float* out, float* ones, int steps) {
  unsigned a0 = __float_as_uint(ones[0]), a1 = __float_as_uint(ones[1]), b0 = __float_as_uint(ones[2]);
  float c[4][4];
  for (int j = 0; j < 4; ++j)
    for (int k = 0; k < 4; ++k) c[j][k] = 0.0f;
  CLOCK_BEGIN
  for (int s = 0; s < steps; ++s) {
#pragma unroll
    for (int u = 0; u < 8; ++u) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        asm volatile(
            "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%4,%5}, {%6,%6}, {%0,%1,%2,%3};"
            : "+f"(c[j][0]), "+f"(c[j][1]), "+f"(c[j][2]), "+f"(c[j][3])
            : "r"(a0), "r"(a1), "r"(b0));
      }
    }
  }
  CLOCK_END
  float sum = 0.0f;
  for (int j = 0; j < 4; ++j)
    for (int k = 0; k < 4; ++k) sum += c[j][k];
  out[THREAD] = sum;
}

// 32 reads of 16 bytes by each of 256 threads in a step, neighbours by neighbours; every word read is 1.
extern "C" __global__ void __launch_bounds__(256) measure_shared(u64* clocks, unsigned* out, unsigned* given, int steps) {
  __shared__ uint4 kept[8 * 256];
  unsigned one = given[1];
  for (int j = 0; j < 8; ++j) kept[j * 256 + threadIdx.x] = make_uint4(one, one, one, one);
  unsigned at = (unsigned)__cvta_generic_to_shared(&kept[threadIdx.x]);
  unsigned sum[4] = {0, 0, 0, 0};
  CLOCK_BEGIN
  for (int s = 0; s < steps; ++s) {
#pragma unroll
    for (int u = 0; u < 4; ++u) {
      uint4 v[8];
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        asm volatile("ld.volatile.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
                     : "=r"(v[j].x), "=r"(v[j].y), "=r"(v[j].z), "=r"(v[j].w)
                     : "r"(at + j * 4096));
      }
#pragma unroll
      for (int j = 0; j < 8; ++j) sum[j % 4] += v[j].x + v[j].y + v[j].z + v[j].w;
    }
  }
  CLOCK_END
  out[THREAD] = sum[0] + sum[1] + sum[2] + sum[3];
}

// 4 reads of 16 bytes by each thread in a round, past the L1 cache: all of data once for each of times. Every word is 1.
extern "C" __global__ void __launch_bounds__(1024)
    measure_read(u64* clocks, unsigned* out, unsigned* data, int rounds, int times) {
  size_t step = (size_t)gridDim.x * blockDim.x;
  unsigned sum = 0;
  CLOCK_BEGIN
  for (int t = 0; t < times; ++t) {
    const uint4* from = (const uint4*)data + THREAD;
#pragma unroll 1
    for (int r = 0; r < rounds; ++r) {
      uint4 v[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        asm volatile("ld.global.cg.v4.u32 {%0,%1,%2,%3}, [%4];"
                     : "=r"(v[j].x), "=r"(v[j].y), "=r"(v[j].z), "=r"(v[j].w)
                     : "l"(from + j * step));
      }
#pragma unroll
      for (int j = 0; j < 4; ++j) sum += v[j].x + v[j].y + v[j].z + v[j].w;
      from += 4 * step;
    }
  }
  CLOCK_END
  out[THREAD] = sum;
}

// 4 reads and writes of 16 bytes by each thread in a round.
extern "C" __global__ void __launch_bounds__(1024) measure_copy(unsigned* target, unsigned* source, int rounds) {
  size_t step = (size_t)gridDim.x * blockDim.x, at = THREAD;
#pragma unroll 1
  for (int r = 0; r < rounds; ++r) {
    uint4 v[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) v[j] = ((const uint4*)source)[at + j * step];
#pragma unroll
    for (int j = 0; j < 4; ++j) ((uint4*)target)[at + j * step] = v[j];
    at += 4 * step;
  }
}

extern "C" __global__ void measure_fill(unsigned* data, unsigned* given, int rounds) {
  size_t step = (size_t)gridDim.x * blockDim.x, at = THREAD;
  unsigned one = given[1];
  for (int r = 0; r < rounds; ++r, at += step) ((uint4*)data)[at] = make_uint4(one, one, one, one);
}

// A ring of addresses: the slot order[i], stride bytes wide, holds the address of the slot order[i + 1].
extern "C" __global__ void measure_link(u64* data, int* order, int slots, int stride) {
  for (int i = THREAD; i < slots; i += gridDim.x * blockDim.x) {
    size_t from = (size_t)order[i] * stride, to = (size_t)order[i + 1 == slots ? 0 : i + 1] * stride;
    data[from / 8] = (u64)((char*)data + to);
  }
}

// From address to address around the ring, through the L1 cache: warm times untimed, then 16 times in a step.
extern "C" __global__ void measure_chase_l1(u64* clocks, u64* out, u64* data, int warm, int steps) {
  u64 at = (u64)data;
  for (int s = 0; s < warm; ++s) asm volatile("ld.global.u64 %0, [%0];" : "+l"(at));
  CLOCK_BEGIN
  for (int s = 0; s < steps; ++s) {
#pragma unroll
    for (int u = 0; u < 16; ++u) asm volatile("ld.global.u64 %0, [%0];" : "+l"(at));
  }
  CLOCK_END
  out[0] = at;
}

// The same past the L1 cache.
extern "C" __global__ void measure_chase_l2(u64* clocks, u64* out, u64* data, int warm, int steps) {
  u64 at = (u64)data;
  for (int s = 0; s < warm; ++s) asm volatile("ld.global.cg.u64 %0, [%0];" : "+l"(at));
  CLOCK_BEGIN
  for (int s = 0; s < steps; ++s) {
#pragma unroll
    for (int u = 0; u < 16; ++u) asm volatile("ld.global.cg.u64 %0, [%0];" : "+l"(at));
  }
  CLOCK_END
  out[0] = at;
}

// The same in shared memory, 33 words further each time, 64 times in a step.
extern "C" __global__ void measure_chase_shared(u64* clocks, unsigned* out, int steps) {
  __shared__ unsigned ring[1024];
  unsigned base = (unsigned)__cvta_generic_to_shared(ring);
  for (int i = threadIdx.x; i < 1024; i += blockDim.x) ring[i] = base + (i + 33) % 1024 * 4;
  unsigned at = base;
  CLOCK_BEGIN
  for (int s = 0; s < steps; ++s) {
#pragma unroll
    for (int u = 0; u < 64; ++u) asm volatile("ld.shared.u32 %0, [%0];" : "+r"(at));
  }
  CLOCK_END
  out[0] = (at - base) / 4;
}

// One chain of 256 fused multiply-adds in a step; each adds given[1].
extern "C" __global__ void measure_dependent(u64* clocks, float* out, float* given, int steps) {
  float a = given[0], b = given[1], x = 0.0f;
  CLOCK_BEGIN
  for (int s = 0; s < steps; ++s) {
#pragma unroll
    for (int u = 0; u < 256; ++u) asm volatile("fma.rn.f32 %0, %0, %1, %2;" : "+f"(x) : "f"(a), "f"(b));
  }
  CLOCK_END
  out[THREAD] = x;
}

// 20 parts of straight-line code of 16 KiB, of which as many are executed as are wanted: 8 chains of 128 fused
// multiply-adds, each adding given[1]. All parts of a step are executed before the first is again.
extern "C" __global__ void __launch_bounds__(1024)
    measure_code(u64* clocks, float* out, float* given, int parts, int steps) {
  float a = given[0], b = given[1], x[8];
  for (int j = 0; j < 8; ++j) x[j] = 0.0f;
  CLOCK_BEGIN
#pragma unroll 1
  for (int s = 0; s < steps; ++s) {
#pragma unroll
    for (int p = 0; p < 20; ++p) {
      if (p < parts) {
#pragma unroll
        for (int u = 0; u < 128; ++u) {
#pragma unroll
          for (int j = 0; j < 8; ++j) asm volatile("fma.rn.f32 %0, %0, %1, %2;" : "+f"(x[j]) : "f"(a), "f"(b));
        }
      }
    }
  }
  CLOCK_END
  float sum = 0.0f;
  for (int j = 0; j < 8; ++j) sum += x[j];
  out[THREAD] = sum;
}

// 32 barriers in a step.
extern "C" __global__ void measure_barrier(u64* clocks, unsigned* out, int steps) {
  unsigned done = 0;
  CLOCK_BEGIN
  for (int s = 0; s < steps; ++s) {
#pragma unroll
    for (int u = 0; u < 32; ++u) asm volatile("bar.sync 0;");
    done += 32;
  }
  CLOCK_END
  out[THREAD] = done;
}

extern "C" __global__ void measure_grid_sync(u64* clocks, unsigned* out, int syncs) {
  CLOCK_BEGIN
  for (int s = 0; s < syncs; ++s) {
    cooperative_groups::this_grid().sync();
  }
  CLOCK_END
  out[THREAD] = (unsigned)syncs;
}

extern "C" __global__ void measure_empty(unsigned* out) {}

// Keeps the GPU busy while launches are queued behind it.
extern "C" __global__ void measure_busy(unsigned* out, int kiloclocks) {
  u64 begin = clock64();
  while (clock64() - begin < ((u64)kiloclocks << 10)) {
  }
  if (threadIdx.x == 0) out[0] = (unsigned)kiloclocks;
}
