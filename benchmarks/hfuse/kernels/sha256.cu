// SHA-256 (RFC 6234) of SHA-256 of an 80-byte header, the search for a nonce of proof of work. Bytes 76 to 79 of the
// header are the nonce, in little-endian order. A thread tries `tries` nonces, a whole grid apart; the state after the
// first 64 bytes, which no nonce changes, is calculated once. `best` gets the smallest of (leading word of the digest
// read as a little-endian number) * 2^32 + nonce, and begins with all bits set. The digests of the first `kept` nonces
// are written for tests.
#include <stdint.h>

#define ROTR(x, n) (((x) >> (n)) | ((x) << (32 - (n))))
#define SIGMA_A(x) (ROTR(x, 2) ^ ROTR(x, 13) ^ ROTR(x, 22))
#define SIGMA_E(x) (ROTR(x, 6) ^ ROTR(x, 11) ^ ROTR(x, 25))
#define SIGMA_0(x) (ROTR(x, 7) ^ ROTR(x, 18) ^ ((x) >> 3))
#define SIGMA_1(x) (ROTR(x, 17) ^ ROTR(x, 19) ^ ((x) >> 10))

__constant__ uint32_t K[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

__device__ __forceinline__ uint32_t byte_swap(uint32_t x) { return __byte_perm(x, 0, 0x0123); }

__device__ __forceinline__ void start(uint32_t* state) {
  state[0] = 0x6a09e667, state[1] = 0xbb67ae85, state[2] = 0x3c6ef372, state[3] = 0xa54ff53a;
  state[4] = 0x510e527f, state[5] = 0x9b05688c, state[6] = 0x1f83d9ab, state[7] = 0x5be0cd19;
}

// One block of 16 big-endian words, which are lost: they become the message schedule.
__device__ __forceinline__ void compress(uint32_t* state, uint32_t* words) {
  uint32_t a = state[0], b = state[1], c = state[2], d = state[3];
  uint32_t e = state[4], f = state[5], g = state[6], h = state[7];
#pragma unroll
  for (int round = 0; round < 64; ++round) {
    if (round >= 16) {
      words[round % 16] += SIGMA_1(words[(round + 14) % 16]) + words[(round + 9) % 16] + SIGMA_0(words[(round + 1) % 16]);
    }
    const uint32_t t1 = h + SIGMA_E(e) + ((e & f) ^ (~e & g)) + K[round] + words[round % 16];
    const uint32_t t2 = SIGMA_A(a) + ((a & b) ^ (a & c) ^ (b & c));
    h = g, g = f, f = e, e = d + t1, d = c, c = b, b = a, a = t1 + t2;
  }
  state[0] += a, state[1] += b, state[2] += c, state[3] += d;
  state[4] += e, state[5] += f, state[6] += g, state[7] += h;
}

extern "C" __global__ void __launch_bounds__(256)
    sha256d_search(const uint32_t* __restrict__ header, unsigned long long* __restrict__ best,
                   uint32_t* __restrict__ digests, uint32_t first_nonce, int tries, int kept) {
  uint32_t middle[8], words[16];
  start(middle);
#pragma unroll
  for (int i = 0; i < 16; ++i) words[i] = byte_swap(header[i]);
  compress(middle, words);
  const uint32_t tail[3] = {byte_swap(header[16]), byte_swap(header[17]), byte_swap(header[18])};

  const uint32_t thread = blockIdx.x * blockDim.x + threadIdx.x;
  unsigned long long smallest = ~0ull;
  for (int attempt = 0; attempt < tries; ++attempt) {
    const uint32_t place = thread + attempt * gridDim.x * blockDim.x;
    const uint32_t nonce = first_nonce + place;
    uint32_t inner[8], outer[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) inner[i] = middle[i];
    words[0] = tail[0], words[1] = tail[1], words[2] = tail[2], words[3] = byte_swap(nonce);
    words[4] = 0x80000000u;
#pragma unroll
    for (int i = 5; i < 15; ++i) words[i] = 0;
    words[15] = 640;
    compress(inner, words);

#pragma unroll
    for (int i = 0; i < 8; ++i) words[i] = inner[i];
    words[8] = 0x80000000u;
#pragma unroll
    for (int i = 9; i < 15; ++i) words[i] = 0;
    words[15] = 256;
    start(outer);
    compress(outer, words);

    const unsigned long long result = (unsigned long long)byte_swap(outer[7]) << 32 | nonce;
    if (result < smallest) smallest = result;
    if (place < (uint32_t)kept) {
#pragma unroll
      for (int i = 0; i < 8; ++i) digests[8 * place + i] = byte_swap(outer[i]);
    }
  }
  atomicMin(best, smallest);
}
