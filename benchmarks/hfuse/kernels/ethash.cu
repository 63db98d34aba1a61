// The inner loop of Ethash over a given data set ("DAG") of rows of 128 bytes: Keccak-512 of a 32-byte header hash and a
// nonce of 8 bytes (little-endian) begins a mix of 128 bytes; 64 times a row chosen by the mix is joined to it with FNV;
// Keccak-256 of the seed and the compressed mix is the digest. Eight lanes share a hash, each holds 16 bytes of the mix,
// so that a row is one access of a warp's quarter; each lane's hash has its turn, TOGETHER of them at a time. `best` gets
// the smallest of (first four bytes of the digest as a big-endian number) * 2^32 + lower half of the nonce, and begins
// with all bits set. The digests of the first `kept` nonces are written for tests.
#include <stdint.h>

#define FNV(x, y) ((x) * 0x01000193u ^ (y))

constexpr int ACCESSES = 64;
constexpr int LANES = 8;
constexpr int TOGETHER = 4;
constexpr unsigned ALL_LANES = 0xffffffffu;

__constant__ uint64_t ROUND_CONSTANTS[24] = {
    0x0000000000000001ull, 0x0000000000008082ull, 0x800000000000808aull, 0x8000000080008000ull, 0x000000000000808bull,
    0x0000000080000001ull, 0x8000000080008081ull, 0x8000000000008009ull, 0x000000000000008aull, 0x0000000000000088ull,
    0x0000000080008009ull, 0x000000008000000aull, 0x000000008000808bull, 0x800000000000008bull, 0x8000000000008089ull,
    0x8000000000008003ull, 0x8000000000008002ull, 0x8000000000000080ull, 0x000000000000800aull, 0x800000008000000aull,
    0x8000000080008081ull, 0x8000000000008080ull, 0x0000000080000001ull, 0x8000000080008008ull};

// The walk of rho and pi over the state, and the rotation of each step.
__device__ constexpr uint8_t WALK[24] = {10, 7,  11, 17, 18, 3, 5,  16, 8,  21, 24, 4,
                                         15, 23, 19, 13, 12, 2, 20, 14, 22, 9,  6,  1};
__device__ constexpr uint8_t TURN[24] = {1,  3,  6,  10, 15, 21, 28, 36, 45, 55, 2,  14,
                                         27, 41, 56, 8,  25, 43, 62, 18, 39, 61, 20, 44};

__device__ __forceinline__ uint64_t rotl(uint64_t x, int n) { return x << n | x >> (64 - n); }

__device__ __forceinline__ void keccak_f1600(uint64_t* state) {
#pragma unroll 1
  for (int round = 0; round < 24; ++round) {
    uint64_t parity[5];
#pragma unroll
    for (int x = 0; x < 5; ++x) {
      parity[x] = state[x] ^ state[x + 5] ^ state[x + 10] ^ state[x + 15] ^ state[x + 20];
    }
#pragma unroll
    for (int x = 0; x < 5; ++x) {
      const uint64_t flip = parity[(x + 4) % 5] ^ rotl(parity[(x + 1) % 5], 1);
#pragma unroll
      for (int y = 0; y < 25; y += 5) state[x + y] ^= flip;
    }
    uint64_t carried = state[1];
#pragma unroll
    for (int i = 0; i < 24; ++i) {
      const uint64_t next = state[WALK[i]];
      state[WALK[i]] = rotl(carried, TURN[i]);
      carried = next;
    }
#pragma unroll
    for (int y = 0; y < 25; y += 5) {
      uint64_t row[5];
#pragma unroll
      for (int x = 0; x < 5; ++x) row[x] = state[x + y];
#pragma unroll
      for (int x = 0; x < 5; ++x) state[x + y] = row[x] ^ (~row[(x + 1) % 5] & row[(x + 2) % 5]);
    }
    state[0] ^= ROUND_CONSTANTS[round];
  }
}

__device__ __forceinline__ uint4 mix(uint4 a, uint4 b) {
  return make_uint4(FNV(a.x, b.x), FNV(a.y, b.y), FNV(a.z, b.z), FNV(a.w, b.w));
}

__device__ __forceinline__ uint32_t part(const uint4& v, int i) {
  return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w;
}

template <typename T>
__device__ __forceinline__ T from_lane(T value, int lane) {
  return __shfl_sync(ALL_LANES, value, lane, LANES);
}

// The compressed mixes of a thread's eight neighbors and itself; the thread keeps that of its hash in state[8] to [11].
__device__ __forceinline__ void walk_rows(uint64_t* state, const uint4* __restrict__ rows, uint32_t row_count) {
  const int lane = threadIdx.x % LANES;
  for (int first = 0; first < LANES; first += TOGETHER) {
    uint4 mixes[TOGETHER];
    uint32_t seeds[TOGETHER];
#pragma unroll
    for (int h = 0; h < TOGETHER; ++h) {
      uint64_t seed[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) seed[i] = from_lane(state[i], first + h);
      // 64 bytes of seed are the mix twice: lanes 0 and 4 begin with the same 16 bytes.
      const int quarter = lane % 4;
      const uint64_t low = quarter == 0 ? seed[0] : quarter == 1 ? seed[2] : quarter == 2 ? seed[4] : seed[6];
      const uint64_t high = quarter == 0 ? seed[1] : quarter == 1 ? seed[3] : quarter == 2 ? seed[5] : seed[7];
      mixes[h] = make_uint4((uint32_t)low, (uint32_t)(low >> 32), (uint32_t)high, (uint32_t)(high >> 32));
      seeds[h] = (uint32_t)seed[0];
    }
    for (int access = 0; access < ACCESSES; access += 4) {
      const int holder = access / 4 % LANES;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        uint32_t chosen[TOGETHER];
#pragma unroll
        for (int h = 0; h < TOGETHER; ++h) {
          chosen[h] = from_lane(FNV(seeds[h] ^ (uint32_t)(access + i), part(mixes[h], i)) % row_count, holder);
        }
#pragma unroll
        for (int h = 0; h < TOGETHER; ++h) mixes[h] = mix(mixes[h], rows[(size_t)chosen[h] * LANES + lane]);
      }
    }
#pragma unroll
    for (int h = 0; h < TOGETHER; ++h) {
      const uint32_t word = FNV(FNV(FNV(mixes[h].x, mixes[h].y), mixes[h].z), mixes[h].w);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint64_t low = from_lane(word, 2 * i), high = from_lane(word, 2 * i + 1);
        if (lane == first + h) state[8 + i] = high << 32 | low;
      }
    }
  }
}

extern "C" __global__ void __launch_bounds__(256)
    ethash_search(const uint64_t* __restrict__ header, const uint4* __restrict__ rows,
                  unsigned long long* __restrict__ best, uint64_t* __restrict__ digests, uint64_t first_nonce,
                  uint32_t row_count, int tries, int kept) {
  const uint32_t thread = blockIdx.x * blockDim.x + threadIdx.x;
  unsigned long long smallest = ~0ull;
  for (int attempt = 0; attempt < tries; ++attempt) {
    const uint32_t place = thread + attempt * gridDim.x * blockDim.x;
    const uint64_t nonce = first_nonce + place;
    uint64_t state[25];
#pragma unroll
    for (int i = 0; i < 25; ++i) state[i] = i < 4 ? header[i] : 0;
    // Keccak's padding for 40 bytes of 72.
    state[4] = nonce, state[5] = 1, state[8] = 0x8000000000000000ull;
    keccak_f1600(state);
    walk_rows(state, rows, row_count);
    // And for 96 bytes of 136.
#pragma unroll
    for (int i = 12; i < 25; ++i) state[i] = 0;
    state[12] = 1, state[16] = 0x8000000000000000ull;
    keccak_f1600(state);

    const unsigned long long leading = __byte_perm((uint32_t)state[0], 0, 0x0123);
    const unsigned long long result = leading << 32 | (uint32_t)nonce;
    if (result < smallest) smallest = result;
    if (place < (uint32_t)kept) {
#pragma unroll
      for (int i = 0; i < 4; ++i) digests[4 * place + i] = state[i];
    }
  }
  atomicMin(best, smallest);
}
