// Mean and biased variance of each channel of an input of batch x channels x positions, as batch normalization collects
// them. One block per channel; a block of x by y threads, whole warps, where y walks over the batch and x over the
// positions. Each thread keeps Welford's running moments, warps merge theirs with shuffles (Chan's formula), the first
// warp merges those of the warps.

#define WARP_SIZE 32

struct Moments {
  float mean;
  float squares;  // sum of squared distances to the mean
  int count;
};

__device__ __forceinline__ void push(Moments& moments, float value) {
  const float before = value - moments.mean;
  moments.count += 1;
  moments.mean += before / moments.count;
  moments.squares += before * (value - moments.mean);
}

// After it all lanes of the warp hold the moments of the whole warp.
__device__ __forceinline__ void merge_lanes(Moments& moments) {
#pragma unroll
  for (int flip = 1; flip < WARP_SIZE; flip <<= 1) {
    const float mean = __shfl_xor_sync(0xffffffffu, moments.mean, flip, WARP_SIZE);
    const float squares = __shfl_xor_sync(0xffffffffu, moments.squares, flip, WARP_SIZE);
    const int count = __shfl_xor_sync(0xffffffffu, moments.count, flip, WARP_SIZE);
    const float factor = 1.0f / fmaxf(1.0f, (float)(moments.count + count));
    const float distance = moments.mean - mean;
    moments.squares += squares + distance * distance * moments.count * count * factor;
    moments.mean = (moments.count * moments.mean + count * mean) * factor;
    moments.count += count;
  }
}

extern "C" __global__ void batch_norm_statistics(const float* __restrict__ input, float* __restrict__ means,
                                                 float* __restrict__ variances, int batch, int channels,
                                                 int positions) {
  __shared__ int warp_counts[WARP_SIZE];
  __shared__ float warp_moments[2 * WARP_SIZE];

  const int channel = blockIdx.x;
  const int thread = threadIdx.x + threadIdx.y * blockDim.x;
  const int warps = blockDim.x * blockDim.y / WARP_SIZE;
  const int lane = thread % WARP_SIZE, warp = thread / WARP_SIZE;

  Moments moments = {0.0f, 0.0f, 0};
  for (int n = threadIdx.y; n < batch; n += blockDim.y) {
    const float* row = input + ((size_t)n * channels + channel) * positions;
    for (int x = threadIdx.x; x < positions; x += blockDim.x) push(moments, row[x]);
  }
  merge_lanes(moments);
  // Figure 2 has this barrier, though no thread has touched shared memory before it.
  __syncthreads();

  if (lane == 0) {
    warp_counts[warp] = moments.count;
    warp_moments[2 * warp] = moments.mean;
    warp_moments[2 * warp + 1] = moments.squares;
  }
  __syncthreads();

  if (thread < WARP_SIZE) {
    const bool present = thread < warps;
    moments.count = present ? warp_counts[thread] : 0;
    moments.mean = present ? warp_moments[2 * thread] : 0.0f;
    moments.squares = present ? warp_moments[2 * thread + 1] : 0.0f;
    merge_lanes(moments);
    if (thread == 0) {
      means[channel] = moments.mean;
      variances[channel] = moments.squares / moments.count;
    }
  }
}
