// Kernels with one thing wrong each, and what they would be without it.
#include <cooperative_groups.h>

#define TID ((int)threadIdx.x)
#define AT ((int)(blockIdx.x * blockDim.x + threadIdx.x))

static __device__ __noinline__ void stage_reverse(int tile, int tid, float* __restrict__ in, float* __restrict__ out) {
  extern __shared__ __align__(64) unsigned char pool_ptr[];
  float* left_tile = ((float*)(&(pool_ptr[0])));
  float* right_tile = ((float*)(&(pool_ptr[256])));
  left_tile[tid] = 0.0f;
  right_tile[tid] = in[tile * 64 + tid];
  __syncthreads();
  out[tile * 64 + tid] = right_tile[63 - tid] + left_tile[tid];
}

// Twice the same dynamic shared memory: a launch with 512 bytes is right, one with fewer is not.
extern "C" __global__ void __launch_bounds__(64) pool(float* in, float* out) {
  stage_reverse((int)blockIdx.x, TID, in, out);
}

extern "C" __global__ void shifted(float* in, float* out, int read, int write) { out[AT + write] = in[AT + read]; }

extern "C" __global__ void unwritten(float* out, float* middle, int hole) {
  if (TID != hole) middle[TID] = 1.0f;
  __syncthreads();
  out[TID] = middle[TID];
}

extern "C" __global__ void unwritten_shared(float* out, int hole, int shift) {
  __shared__ float s[64];
  if (TID != hole) s[TID + shift] = 1.0f;
  __syncthreads();
  out[TID] = s[63 - TID];
}

// Shared memory of one block is nothing to the next.
extern "C" __global__ void stale_shared(float* out) {
  __shared__ float s[64];
  if (blockIdx.x == 0) s[TID] = 1.0f;
  __syncthreads();
  out[AT] = s[TID];
}

extern "C" __global__ void exchange(float* in, float* middle, float* out, int sync) {
  middle[AT] = in[AT];
  if (sync) cooperative_groups::this_grid().sync();
  out[AT] = middle[(AT + 64) % (64 * gridDim.x)];
}

// The same place is read, then written by another block: the write must wait as well.
extern "C" __global__ void overwrite(float* data, float* out, int sync) {
  out[AT] = data[AT];
  if (sync) cooperative_groups::this_grid().sync();
  data[(AT + 64) % (64 * gridDim.x)] = 1.0f;
}

// Warps exchange through shared memory: bit 0 of `keep` keeps the barrier before the read, bit 1 that before the next write.
extern "C" __global__ void handed(float* in, float* out, int keep) {
  __shared__ float s[64];
  for (int i = 0; i < 2; ++i) {
    s[TID] = in[TID];
    if (keep & 1) __syncthreads();
    out[TID] = s[63 - TID];
    if (keep & 2) __syncthreads();
  }
}

// Each half of the block has a barrier of its own: that orders nothing between the halves.
extern "C" __global__ void halves(float* in, float* out, int across) {
  __shared__ float s[128];
  s[TID] = in[TID];
  if (TID < 64)
    asm volatile("bar.sync 3, 64;" : : : "memory");
  else
    asm volatile("bar.sync 4, 64;" : : : "memory");
  out[TID] = s[across ? 127 - TID : TID ^ 32];
}

extern "C" __global__ void counted(float* out, unsigned* ticket) {
  out[AT] = 1.0f;
  __syncthreads();
  __shared__ bool last;
  __threadfence();
  if (TID == 0) last = atomicAdd(ticket, 1u) == gridDim.x - 1;
  __syncthreads();
  if (last && TID == 0)
    for (int i = 1; i < (int)gridDim.x; ++i) out[0] += out[64 * i];
}

// The order in which threads run, before and after a barrier.
extern "C" __global__ void trace(int* out, unsigned* ticket) {
  out[AT] = (int)atomicAdd(ticket, 1u);
  __syncthreads();
  out[(int)(gridDim.x * blockDim.x) + AT] = (int)atomicAdd(ticket, 1u);
}

extern "C" __global__ void vectors(float* in, float* out, int shift) {
  *(int4*)(out + 4 * TID) = *(int4*)(in + 4 * TID + shift);
}

extern "C" __global__ void two_places(float* out, int half) {
  if (TID < half) {
    out[TID] = 1.0f;
    __syncthreads();
  } else {
    out[TID] = 2.0f;
    __syncthreads();
    out[TID] += 1.0f;
  }
}

extern "C" __global__ void two_grid_places(float* out, int half) {
  if ((int)blockIdx.x < half) {
    cooperative_groups::this_grid().sync();
    out[AT] = 1.0f;
  } else {
    cooperative_groups::this_grid().sync();
    out[AT] = 2.0f;
  }
}

// An asynchronous copy that is read before the wait, unless `wait`.
extern "C" __global__ void early(float* in, float* out, int wait) {
  __shared__ __align__(16) float s[128];
  unsigned to = (unsigned)__cvta_generic_to_shared(s + 4 * TID);
  asm volatile("cp.async.ca.shared.global [%0], [%1], 16;" : : "r"(to), "l"(in + 4 * TID) : "memory");
  asm volatile("cp.async.commit_group;" : : : "memory");
  if (wait) asm volatile("cp.async.wait_group 0;" : : : "memory");
  out[TID] = s[4 * TID];
}

extern "C" __global__ void astray(float* in, float* out, long long far) { out[TID] = *(in + far + TID); }

// Barriers that some threads never reach.
extern "C" __global__ void left_behind(int* out) {
  if (TID >= 32) return;
  asm volatile("bar.sync 5, 64;" : : : "memory");
  out[TID] = 1;
}

extern "C" __global__ void crossed(int* out) {
  if (TID < 32)
    asm volatile("bar.sync 1, 64;" : : : "memory");
  else
    asm volatile("bar.sync 2, 64;" : : : "memory");
  out[TID] = 1;
}

// Parts of warps: the mask of those that are active, then all lanes where only some come, some have left, or all come
// from two places.
extern "C" __global__ void some_active(int* out, int lanes) {
  if (TID % 32 < lanes) {
    unsigned mask = __activemask();
    out[TID] = __shfl_xor_sync(mask, TID, 1);
  }
  __syncthreads();
}

extern "C" __global__ void all_named(int* out, int lanes) {
  if (TID % 32 < lanes) out[TID] = __shfl_xor_sync(0xffffffffu, TID, 1);
  __syncthreads();
}

extern "C" __global__ void some_gone(int* out, int lanes) {
  if (TID % 32 >= lanes) return;
  out[TID] = __shfl_xor_sync(0xffffffffu, TID, 1);
}

extern "C" __global__ void two_shuffles(int* out, int lanes) {
  if (TID % 32 < lanes) {
    out[TID] = __shfl_xor_sync(0xffffffffu, TID, 1);
  } else {
    out[TID] = __shfl_xor_sync(0xffffffffu, TID + 1, 1);
  }
}

extern "C" __global__ void moved(float* in, float* out, unsigned* total) {
  __shared__ float s[64];
  s[TID] = in[AT] + in[AT];
  __syncthreads();
  out[AT] = s[63 - TID];
  if (TID == 0) atomicAdd(total, 1u);
}
