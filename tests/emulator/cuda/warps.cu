#include <cuda_fp16.h>
#include <cooperative_groups.h>
template <class T> __device__ T total(T v) {
  unsigned mask = __activemask();
  for (int d = 16; d > 0; d /= 2) v = v + __shfl_down_sync(mask, v, d, 32);
  return __shfl_sync(mask, v, 0);
}
extern "C" __global__ void totals(float* f, double* d, int* i, unsigned* u, half* h, long long* l) {
  int t = threadIdx.x;
  f[t] = total(f[t]); d[t] = total(d[t]); i[t] = total(i[t]); u[t] = total(u[t]); h[t] = total(h[t]); l[t] = total(l[t]);
}
extern "C" __global__ void moves(int* out) {
  int t = threadIdx.x, n = blockDim.x;
  out[t] = __shfl_up_sync(0xffffffff, t, 3);
  out[n + t] = __shfl_down_sync(0xffffffff, t, 3, 8);
  out[2 * n + t] = __shfl_xor_sync(0xffffffff, t, 5);
  out[3 * n + t] = __shfl_sync(0xffffffff, t, 9, 8);
  auto tile = cooperative_groups::tiled_partition<16>(cooperative_groups::this_thread_block());
  out[4 * n + t] = tile.shfl(t, 2) * 100 + tile.thread_rank();
}
extern "C" __global__ void votes(unsigned* out) {
  int t = threadIdx.x;
  out[t] = __ballot_sync(0xffffffff, t % 3 == 0);
  out[32 + t] = __any_sync(0xffffffff, t == 40) | __all_sync(0xffffffff, t < 40) << 1;
  out[64 + t] = __reduce_add_sync(0xffffffff, (unsigned)t);
  out[96 + t] = __match_any_sync(0xffffffff, t % 5);
  unsigned mask = 0;
  if (t % 2) mask = __activemask();
  out[128 + t] = mask;
  if (t < 8) out[160 + t] = __shfl_xor_sync(0xff, t, 1);
  else out[160 + t] = __shfl_xor_sync(0xffffff00, t, 2);
}
extern "C" __global__ void exchange(int* out) {
  __shared__ int box[32];
  box[threadIdx.x] = threadIdx.x;
  __syncwarp();
  out[threadIdx.x] = box[31 - threadIdx.x];
}
extern "C" __global__ void lost_lane(int* out) { if (threadIdx.x != 7) out[threadIdx.x] = __shfl_sync(~(1u << 9), 1, 0); else __syncthreads(); }
extern "C" __global__ void atomics(float* f, int* i, half* h, double* d, unsigned* u) {
  __shared__ int local;
  if (threadIdx.x == 0) local = 0;
  __syncthreads();
  atomicAdd(&local, 1);
  atomicAdd(f, 1.0f); atomicAdd(i, 2); atomicMax(i + 1, (int)threadIdx.x); atomicMin(i + 2, -(int)threadIdx.x);
  atomicAdd(h, __float2half(1.0f)); atomicAdd(d, 0.5); atomicOr(u, 1u << threadIdx.x % 32); atomicInc(u + 1, 9u);
  __syncthreads();
  if (threadIdx.x == 0) { atomicExch(i + 3, local); atomicSub(i + 4, 3); }
}
