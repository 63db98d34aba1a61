// BLAKE-256 (14 rounds, the final version of the SHA-3 submission, no salt) of an 80-byte header, the search for a nonce
// of proof of work. Bytes 76 to 79 are the nonce, in big-endian order. A thread tries `tries` nonces, a whole grid
// apart; the chain value of the first 64 bytes is calculated once. `best` gets the smallest of (first word of the
// digest) * 2^32 + nonce, and begins with all bits set. The digests of the first `kept` nonces are written for tests.
#include <stdint.h>

__device__ constexpr uint8_t SIGMA[10][16] = {
    {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}, {14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3},
    {11, 8, 12, 0, 5, 2, 15, 13, 10, 14, 3, 6, 7, 1, 9, 4}, {7, 9, 3, 1, 13, 12, 11, 14, 2, 6, 5, 10, 4, 0, 15, 8},
    {9, 0, 5, 7, 2, 4, 10, 15, 14, 1, 11, 12, 6, 8, 3, 13}, {2, 12, 6, 10, 0, 11, 8, 3, 4, 13, 7, 5, 15, 14, 1, 9},
    {12, 5, 1, 15, 14, 13, 4, 10, 0, 7, 6, 3, 9, 2, 8, 11}, {13, 11, 7, 14, 12, 1, 3, 9, 5, 0, 15, 4, 8, 6, 2, 10},
    {6, 15, 14, 9, 11, 3, 0, 8, 12, 2, 13, 7, 1, 4, 10, 5}, {10, 2, 8, 4, 7, 6, 1, 5, 15, 11, 9, 14, 3, 12, 13, 0}};

// The first digits of pi.
__device__ constexpr uint32_t PI[16] = {0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344, 0xa4093822, 0x299f31d0,
                                        0x082efa98, 0xec4e6c89, 0x452821e6, 0x38d01377, 0xbe5466cf, 0x34e90c6c,
                                        0xc0ac29b7, 0xc97c50dd, 0x3f84d5b5, 0xb5470917};

__device__ __forceinline__ uint32_t rotr(uint32_t x, int n) { return __funnelshift_r(x, x, n); }
__device__ __forceinline__ uint32_t byte_swap(uint32_t x) { return __byte_perm(x, 0, 0x0123); }

__device__ __forceinline__ void mix(uint32_t& a, uint32_t& b, uint32_t& c, uint32_t& d, uint32_t first,
                                    uint32_t second) {
  a += b + first;
  d = rotr(d ^ a, 16);
  c += d;
  b = rotr(b ^ c, 12);
  a += b + second;
  d = rotr(d ^ a, 8);
  c += d;
  b = rotr(b ^ c, 7);
}

// One block of 16 big-endian words; `bits` of the message are hashed with it.
__device__ __forceinline__ void compress(uint32_t* chain, const uint32_t* words, uint32_t bits) {
  uint32_t v[16];
#pragma unroll
  for (int i = 0; i < 8; ++i) v[i] = chain[i], v[i + 8] = PI[i];
  v[12] ^= bits, v[13] ^= bits;
#pragma unroll
  for (int round = 0; round < 14; ++round) {
    const uint8_t* order = SIGMA[round % 10];
#define STEP(i, a, b, c, d)                                             \
  mix(v[a], v[b], v[c], v[d], words[order[2 * i]] ^ PI[order[2 * i + 1]], \
      words[order[2 * i + 1]] ^ PI[order[2 * i]])
    STEP(0, 0, 4, 8, 12);
    STEP(1, 1, 5, 9, 13);
    STEP(2, 2, 6, 10, 14);
    STEP(3, 3, 7, 11, 15);
    STEP(4, 0, 5, 10, 15);
    STEP(5, 1, 6, 11, 12);
    STEP(6, 2, 7, 8, 13);
    STEP(7, 3, 4, 9, 14);
#undef STEP
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) chain[i] ^= v[i] ^ v[i + 8];
}

extern "C" __global__ void __launch_bounds__(256)
    blake256_search(const uint32_t* __restrict__ header, unsigned long long* __restrict__ best,
                    uint32_t* __restrict__ digests, uint32_t first_nonce, int tries, int kept) {
  uint32_t middle[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  uint32_t words[16];
#pragma unroll
  for (int i = 0; i < 16; ++i) words[i] = byte_swap(header[i]);
  compress(middle, words, 512);

#pragma unroll
  for (int i = 0; i < 3; ++i) words[i] = byte_swap(header[16 + i]);
#pragma unroll
  for (int i = 5; i < 15; ++i) words[i] = 0;
  words[4] = 0x80000000u, words[13] = 1, words[15] = 640;

  const uint32_t thread = blockIdx.x * blockDim.x + threadIdx.x;
  unsigned long long smallest = ~0ull;
  for (int attempt = 0; attempt < tries; ++attempt) {
    const uint32_t place = thread + attempt * gridDim.x * blockDim.x;
    const uint32_t nonce = first_nonce + place;
    uint32_t chain[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) chain[i] = middle[i];
    words[3] = nonce;
    compress(chain, words, 640);
    const unsigned long long result = (unsigned long long)chain[0] << 32 | nonce;
    if (result < smallest) smallest = result;
    if (place < (uint32_t)kept) {
#pragma unroll
      for (int i = 0; i < 8; ++i) digests[8 * place + i] = byte_swap(chain[i]);
    }
  }
  atomicMin(best, smallest);
}
