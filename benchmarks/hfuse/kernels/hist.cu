// A histogram of values in [low, high] in equal bins; the last bin has its upper bound, values outside are in none. Each
// block counts in shared memory (4 * bins bytes, dynamic) and adds its counts to the global ones, which begin at zero.
// Any block of threads along x, any grid.

__device__ __forceinline__ int bin_of(float value, float low, float high, int bins) {
  const int bin = (int)((value - low) * bins / (high - low));
  return bin == bins ? bins - 1 : bin;
}

extern "C" __global__ void histogram(const float* __restrict__ values, unsigned int* __restrict__ counts, int total,
                                     int bins, float low, float high) {
  extern __shared__ unsigned char dynamic_memory[];
  unsigned int* counters = reinterpret_cast<unsigned int*>(dynamic_memory);

  for (int i = threadIdx.x; i < bins; i += blockDim.x) counters[i] = 0;
  __syncthreads();

  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < total; i += blockDim.x * gridDim.x) {
    const float value = values[i];
    if (value >= low && value <= high) atomicAdd(&counters[bin_of(value, low, high, bins)], 1u);
  }
  __syncthreads();

  for (int i = threadIdx.x; i < bins; i += blockDim.x) {
    if (counters[i] != 0) atomicAdd(&counts[i], counters[i]);
  }
}
