#include <cooperative_groups.h>
namespace cg = cooperative_groups;
extern "C" __global__ void stages(float* out, float* middle, const float* in, int n, int keep) {
  __shared__ float total;
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (threadIdx.x == 0) total = 0.0f;
  middle[i] = in[i] * 2.0f;
  float mine = in[i];
  if (keep) cg::this_grid().sync();
  float other = middle[(i + n / 2) % n];
  cg::thread_block block = cg::this_thread_block();
  block.sync();
  if (threadIdx.x == 0) total += 1.0f;
  if (keep) cg::this_grid().sync();
  out[i] = other + mine + total;
}
extern "C" __global__ void half_exits(int* a) {
  if (threadIdx.x >= 32) return;
  __syncthreads();
  a[threadIdx.x] = 1;
}
extern "C" __global__ void two_kinds(int* a) {
  if (threadIdx.x < 32) __syncthreads();
  else cg::this_grid().sync();
}
extern "C" __global__ void one_block_leaves(int* a) { if (blockIdx.x != 3) cg::this_grid().sync(); }
extern "C" __global__ void absent(int* a) { if (threadIdx.x < 32) asm volatile("bar.sync 3, 64;"); }
extern "C" __global__ void counts(int* out) {
  out[threadIdx.x * 3] = __syncthreads_count(threadIdx.x < 5);
  out[threadIdx.x * 3 + 1] = __syncthreads_and(threadIdx.x < 5);
  out[threadIdx.x * 3 + 2] = __syncthreads_or(threadIdx.x < 5);
}
extern "C" __global__ void named(float* out, const float* in) {
  __shared__ float a[64], b[64];
  int half = threadIdx.x / 64, t = threadIdx.x % 64;
  float* mine = half ? b : a;
  for (int turn = 0; turn < 3 + half; ++turn) {
    mine[t] = in[threadIdx.x] + turn;
    asm volatile("bar.sync %0, %1;" :: "r"(1 + half), "r"(64) : "memory");
    out[threadIdx.x] = mine[63 - t];
    asm volatile("barrier.sync %0, 64;" :: "r"(1 + half));
  }
}
extern "C" __global__ void producer(float* out, const float* in) {
  __shared__ float box[32];
  if (threadIdx.x < 32) {
    box[threadIdx.x] = in[threadIdx.x];
    asm volatile("bar.arrive 1, 64;" ::: "memory");
  } else {
    asm volatile("bar.sync 1, 64;" ::: "memory");
    out[threadIdx.x - 32] = box[63 - threadIdx.x];
  }
}
__device__ void counter_barrier(unsigned* counter, unsigned goal) {
  __syncthreads();
  if (threadIdx.x == 0) {
    asm volatile("red.release.gpu.global.add.u32 [%0], %1;" :: "l"(counter), "r"(1) : "memory");
    unsigned seen;
    do {
      asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(counter) : "memory");
    } while (seen < goal);
  }
  __syncthreads();
}
extern "C" __global__ void software_barrier(float* out, float* middle, unsigned* counter, unsigned goal) {
  int i = blockIdx.x * blockDim.x + threadIdx.x, n = gridDim.x * blockDim.x;
  middle[i] = float(i);
  counter_barrier(counter, goal);
  out[i] = middle[n - 1 - i];
}
extern "C" __global__ void with_lock(int* lock, int* data) {
  if (threadIdx.x == 0) {
    while (atomicCAS(lock, 0, 1) != 0) {}
    int v = data[0];
    __threadfence();
    data[0] = v + 1;
    __threadfence();
    atomicExch(lock, 0);
  }
}
