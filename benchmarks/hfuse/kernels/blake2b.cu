// BLAKE2b (RFC 7693) with a digest of 32 bytes and no key, of an 80-byte header, the search for a nonce of proof of work.
// Bytes 32 to 39 of the header are the nonce, in little-endian order. A thread tries `tries` nonces, a whole grid apart.
// `best` gets the smallest of (first four bytes of the digest as a big-endian number) * 2^32 + lower half of the nonce,
// and begins with all bits set. The digests of the first `kept` nonces are written for tests.
#include <stdint.h>

__constant__ uint64_t INITIAL[8] = {0x6a09e667f3bcc908ull, 0xbb67ae8584caa73bull, 0x3c6ef372fe94f82bull,
                                    0xa54ff53a5f1d36f1ull, 0x510e527fade682d1ull, 0x9b05688c2b3e6c1full,
                                    0x1f83d9abfb41bd6bull, 0x5be0cd19137e2179ull};

__device__ constexpr uint8_t SIGMA[10][16] = {
    {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}, {14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3},
    {11, 8, 12, 0, 5, 2, 15, 13, 10, 14, 3, 6, 7, 1, 9, 4}, {7, 9, 3, 1, 13, 12, 11, 14, 2, 6, 5, 10, 4, 0, 15, 8},
    {9, 0, 5, 7, 2, 4, 10, 15, 14, 1, 11, 12, 6, 8, 3, 13}, {2, 12, 6, 10, 0, 11, 8, 3, 4, 13, 7, 5, 15, 14, 1, 9},
    {12, 5, 1, 15, 14, 13, 4, 10, 0, 7, 6, 3, 9, 2, 8, 11}, {13, 11, 7, 14, 12, 1, 3, 9, 5, 0, 15, 4, 8, 6, 2, 10},
    {6, 15, 14, 9, 11, 3, 0, 8, 12, 2, 13, 7, 1, 4, 10, 5}, {10, 2, 8, 4, 7, 6, 1, 5, 15, 11, 9, 14, 3, 12, 13, 0}};

// Of 64 bits, by halves: the machine has no such rotation.
__device__ __forceinline__ uint64_t rotr(uint64_t x, int n) {
  const uint32_t low = (uint32_t)x, high = (uint32_t)(x >> 32);
  const uint32_t first = n < 32 ? low : high, second = n < 32 ? high : low;
  return (uint64_t)__funnelshift_r(second, first, n) << 32 | __funnelshift_r(first, second, n);
}

__device__ __forceinline__ void mix(uint64_t* v, int a, int b, int c, int d, uint64_t first, uint64_t second) {
  v[a] = v[a] + v[b] + first;
  v[d] = rotr(v[d] ^ v[a], 32);
  v[c] = v[c] + v[d];
  v[b] = rotr(v[b] ^ v[c], 24);
  v[a] = v[a] + v[b] + second;
  v[d] = rotr(v[d] ^ v[a], 16);
  v[c] = v[c] + v[d];
  v[b] = rotr(v[b] ^ v[c], 63);
}

extern "C" __global__ void __launch_bounds__(256)
    blake2b_search(const uint64_t* __restrict__ header, unsigned long long* __restrict__ best,
                   uint64_t* __restrict__ digests, uint64_t first_nonce, int tries, int kept) {
  constexpr int HEADER_BYTES = 80, DIGEST_BYTES = 32, ROUNDS = 12, NONCE_WORD = 4;
  uint64_t words[16];
#pragma unroll
  for (int i = 0; i < 16; ++i) words[i] = i < HEADER_BYTES / 8 ? header[i] : 0;

  const uint32_t thread = blockIdx.x * blockDim.x + threadIdx.x;
  unsigned long long smallest = ~0ull;
  for (int attempt = 0; attempt < tries; ++attempt) {
    const uint32_t place = thread + attempt * gridDim.x * blockDim.x;
    const uint64_t nonce = first_nonce + place;
    words[NONCE_WORD] = nonce;
    uint64_t v[16];
#pragma unroll
    for (int i = 0; i < 8; ++i) v[i] = v[i + 8] = INITIAL[i];
    // The parameter block: the digest's length, no key, one leaf; then the length of the only block, which is the last.
    v[0] ^= 0x01010000 ^ DIGEST_BYTES;
    v[12] ^= HEADER_BYTES;
    v[14] = ~v[14];
#pragma unroll
    for (int round = 0; round < ROUNDS; ++round) {
      const uint8_t* order = SIGMA[round % 10];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        mix(v, i, 4 + i, 8 + i, 12 + i, words[order[2 * i]], words[order[2 * i + 1]]);
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        mix(v, i, 4 + (i + 1) % 4, 8 + (i + 2) % 4, 12 + (i + 3) % 4, words[order[8 + 2 * i]],
            words[order[9 + 2 * i]]);
      }
    }
    uint64_t digest[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) digest[i] = INITIAL[i] ^ (i == 0 ? 0x01010000 ^ DIGEST_BYTES : 0) ^ v[i] ^ v[i + 8];

    const unsigned long long leading = __byte_perm((uint32_t)digest[0], 0, 0x0123);
    const unsigned long long result = leading << 32 | (uint32_t)nonce;
    if (result < smallest) smallest = result;
    if (place < (uint32_t)kept) {
#pragma unroll
      for (int i = 0; i < 4; ++i) digests[4 * place + i] = digest[i];
    }
  }
  atomicMin(best, smallest);
}
