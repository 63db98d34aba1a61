// Barriers of some of a block's threads, and what they order.
#define TID ((int)threadIdx.x)
#define WAIT(id, n) asm volatile("bar.sync %0, %1;" : : "n"(id), "n"(n) : "memory")

// The first 64 threads turn their elements around in shared memory; the others have no part in it.
extern "C" __global__ void first_half(const float* in, float* out, int others) {
  __shared__ float s[64];
  if (TID < 64) {
    s[TID] = in[TID];
    WAIT(1, 64);
    out[TID] = s[63 - TID];
  }
  if (others == 1) __syncthreads();
  if (TID >= 64 && others) out[TID] = s[127 - TID];
  if (TID >= 64 && others == 3) out[TID] = out[TID - 64];
}

// Through global memory of one block, and back: what a barrier between two stages is for.
extern "C" __global__ void through_global(const float* in, float* middle, float* out, int keep) {
  middle[blockIdx.x * blockDim.x + TID] = in[blockIdx.x * blockDim.x + TID];
  if (keep & 1) __syncthreads();
  out[blockIdx.x * blockDim.x + TID] = middle[blockIdx.x * blockDim.x + blockDim.x - 1 - TID];
  if (keep & 2) __syncthreads();
  middle[blockIdx.x * blockDim.x + TID] = 0.0f;
}

// All warps read an element, some of them meet, and one of those writes it.
extern "C" __global__ void read_by_all(float* shared_by_all, float* out, int whole) {
  out[TID] = shared_by_all[0];
  if (whole) __syncthreads();
  if (TID < 64) WAIT(1, 64);
  if (TID == 32) shared_by_all[0] = 2.0f;
}

// The same, and only those that meet have read it.
extern "C" __global__ void read_by_some(float* shared_by_some, float* out) {
  if (TID < 64) {
    out[TID] = shared_by_some[0];
    WAIT(1, 64);
    if (TID == 32) shared_by_some[0] = 2.0f;
    WAIT(1, 64);
    out[TID] += shared_by_some[0];
  }
}

extern "C" __global__ void too_many_come(float* out) {
  if (TID < 96) WAIT(1, 64);
  out[TID] = 1.0f;
}

extern "C" __global__ void too_few_come(float* out) {
  if (TID < 64) WAIT(3, 96);
  __syncthreads();
  out[TID] = 1.0f;
}

extern "C" __global__ void two_counts(float* out) {
  if (TID < 32) WAIT(1, 64);
  if (TID >= 32) WAIT(1, 96);
  out[TID] = 1.0f;
}

extern "C" __global__ void half_warps(float* out) {
  if (TID % 32 < 16 && TID < 64) WAIT(2, 32);
  out[TID] = 1.0f;
}

extern "C" __global__ void lanes_apart(float* out) {
  if (TID < 32) {
    if (TID % 2) {
      out[TID] = 1.0f;
      WAIT(1, 32);
    } else {
      out[TID] = 2.0f;
      WAIT(1, 32);
    }
  }
}
