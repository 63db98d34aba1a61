#include <cuda_fp16.h>
extern "C" __global__ void __launch_bounds__(128) where(unsigned* out) {
  unsigned block = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
  unsigned thread = (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
  unsigned at = (block * blockDim.x * blockDim.y * blockDim.z + thread) * 2;
  out[at] = blockIdx.x | blockIdx.y << 8 | blockIdx.z << 16;
  out[at + 1] = threadIdx.x | threadIdx.y << 8 | threadIdx.z << 16;
}
__device__ __noinline__ float reversed(float v) {
  __shared__ float row[64];
  row[threadIdx.x] = v;
  __syncthreads();
  float r = row[63 - threadIdx.x];
  __syncthreads();
  return r;
}
extern "C" __global__ void scalars(double* out, float* __restrict__ a, int i, float f, double d, unsigned char c,
                                   long long l, bool b, half h, const int j) {
  out[0] = i; out[1] = f; out[2] = d; out[3] = c; out[4] = l; out[5] = b; out[6] = __half2float(h); out[7] = j;
}
extern "C" __global__ void poison(unsigned* out) {
  __shared__ unsigned row[64];
  out[blockIdx.x * 64 + threadIdx.x] = row[threadIdx.x];
  __syncthreads();
  row[threadIdx.x] = 7;
}
extern "C" __global__ void reverse(float* out, const float* in) {
  extern __shared__ __align__(16) unsigned char pool[];
  __shared__ alignas(64) float one[64];
  float* two = (float*)(pool + 256);
  int i = blockIdx.x * 64 + threadIdx.x;
  one[threadIdx.x] = in[i];
  two[threadIdx.x] = reversed(in[i]);
  __syncthreads();
  out[i] = one[63 - threadIdx.x] * 100.0f + two[63 - threadIdx.x];
}
extern "C" __global__ void fault(float* a, long long far) { if (threadIdx.x == 5 && blockIdx.x == 1) a[far] = 1.0f; }
extern "C" __global__ void divide(int* a) { a[0] = a[1] / a[2]; }
__device__ __noinline__ int deep(int n, volatile int* keep) {
  volatile int room[1024];
  room[n & 1023] = n;
  return n == 0 ? keep[0] : deep(n - 1, room) + room[n & 1023];
}
extern "C" __global__ void overflow(int* a) { a[0] = deep(a[0], a); }
extern "C" __global__ void forever(volatile int* a) { while (a[0] == 0) {} }
extern "C" __global__ void oops(int* a) { if (a[0]) __trap(); }
