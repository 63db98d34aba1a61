// What one grid-wide barrier, one launch, one node of a CUDA graph and one byte of memory traffic cost.
#include <cooperative_groups.h>

extern "C" __global__ void micro_sync(unsigned int* done, int syncs) {
  for (int i = 0; i < syncs; ++i) {
    cooperative_groups::this_grid().sync();
  }
  if (blockIdx.x == 0 && threadIdx.x == 0) {
    done[0] = (unsigned int)syncs;
  }
}

extern "C" __global__ void micro_empty(unsigned int* done) {}

extern "C" __global__ void micro_copy(float4* target, float4* source, int vectors, int times) {
  for (int t = 0; t < times; ++t) {
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < vectors; i += gridDim.x * blockDim.x) {
      target[i] = source[i];
    }
  }
}

// Every load goes past the first-level cache; the sum is stored only if it has a value that it never has.
extern "C" __global__ void micro_read(unsigned int* done, float4* source, int vectors, int times) {
  float sum = 0.0f;
  for (int t = 0; t < times; ++t) {
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < vectors; i += gridDim.x * blockDim.x) {
      float4 value = __ldcg(source + i);
      sum += value.x + value.y + value.z + value.w;
    }
  }
  if (sum == -1.0f) {
    done[0] = 1u;
  }
}
