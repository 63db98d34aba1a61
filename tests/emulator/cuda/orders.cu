// Blocks that do what they are told: plain accesses by their first thread, and what orders them.
#include <cooperative_groups.h>

enum { kNothing, kRead, kWrite, kStore, kAdd, kExchange, kAcquire, kWait, kTell, kHear, kGrid };

// Each element has a place of the text of its own, so that the first race of each is told.
template <int element>
static __device__ __noinline__ int read_element(int* data) { return data[element]; }
template <int element>
static __device__ __noinline__ void write_element(int* data) { data[element] = element; }

#define EACH(do_it) \
  switch (at) {     \
    case 0: do_it(0); break;  \
    case 1: do_it(1); break;  \
    case 2: do_it(2); break;  \
    case 3: do_it(3); break;  \
  }
#define READ(e) sum += read_element<e>(data)
#define WRITE(e) write_element<e>(data)

// An operation is what to do, where, and up to which value it waits or what it stores. `words` are flags and counters,
// `told` are words that order nothing, and `when` gets the order in which all of it was done.
extern "C" __global__ void follow(int* programs, int length, int* data, unsigned* words, unsigned* told, unsigned* ticket,
                                  int* when) {
  int sum = 0;  // never negative
  for (int i = 0; i < length; ++i) {
    int here = (int)blockIdx.x * length + i, what = programs[3 * here], at = programs[3 * here + 1];
    int value = programs[3 * here + 2];
    unsigned found;
    for (int turn = 0; turn < 3; ++turn) __syncthreads();  // where another block may go on
    if (what == kGrid) cooperative_groups::this_grid().sync();
    if (threadIdx.x == 0) {
      size_t word = __cvta_generic_to_global(words + at), plain = __cvta_generic_to_global(told + at);
      if (what == kRead) EACH(READ)
      if (what == kWrite) EACH(WRITE)
      if (what == kStore) asm volatile("st.release.gpu.global.u32 [%0], %1;" : : "l"(word), "r"(value) : "memory");
      if (what == kAdd) asm volatile("red.add.release.gpu.global.u32 [%0], %1;" : : "l"(word), "r"(1) : "memory");
      if (what == kExchange)
        asm volatile("atom.exch.acq_rel.gpu.global.u32 %0, [%1], %2;" : "=r"(found) : "l"(word), "r"(value) : "memory");
      if (what == kAcquire) asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(found) : "l"(word) : "memory");
      if (what == kWait) do {
          asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(found) : "l"(word) : "memory");
        } while ((int)found < value);
      if (what == kTell) asm volatile("red.add.relaxed.gpu.global.u32 [%0], %1;" : : "l"(plain), "r"(1) : "memory");
      if (what == kHear) do {
          asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(found) : "l"(plain) : "memory");
        } while ((int)found < value);
      size_t count = __cvta_generic_to_global(ticket);
      asm volatile("atom.add.relaxed.gpu.global.u32 %0, [%1], %2;" : "=r"(found) : "l"(count), "r"(1) : "memory");
      when[here] = sum < 0 ? -1 : (int)found;
    }
  }
}

// Every block but the first reads elements of its own choice and raises its flag. The first waits for all but one of them
// (or for all), hears of that one without any order, and writes all elements.
extern "C" __global__ void choose(unsigned char* chosen, int* data, int* sums, int elements, unsigned* flags,
                                  unsigned* told, int without, int rounds) {
  int block = (int)blockIdx.x, blocks = (int)gridDim.x;
  for (int round = 1; round <= rounds; ++round) {
    int sum = 0;
    if (block > 0)
      for (int i = threadIdx.x; i < elements; i += blockDim.x)
        if (chosen[block * elements + i]) sum += data[i];
    sums[block * blockDim.x + threadIdx.x] = sum;
    __syncthreads();
    if (block > 0 && threadIdx.x == 0) {
      size_t flag = __cvta_generic_to_global(flags + block), plain = __cvta_generic_to_global(told + block);
      asm volatile("st.release.gpu.global.u32 [%0], %1;" : : "l"(flag), "r"(round) : "memory");
      asm volatile("red.add.relaxed.gpu.global.u32 [%0], %1;" : : "l"(plain), "r"(1) : "memory");
    }
    for (int other = block > 0 ? 0 : 1 + threadIdx.x; other < (block > 0 ? 1 : blocks); other += blockDim.x) {
      size_t flag = __cvta_generic_to_global(flags + other), plain = __cvta_generic_to_global(told + other);
      int found;
      if (block == 0 && other == without && round == rounds) do {
          asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(found) : "l"(plain) : "memory");
        } while (found < round);
      else if (block == 0) do {
          asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(found) : "l"(flag) : "memory");
        } while (found < round);
    }
    __syncthreads();
    if (block == 0) {
      for (int i = threadIdx.x; i < elements; i += blockDim.x) data[i] = round;
      __syncthreads();
      size_t flag = __cvta_generic_to_global(flags);
      if (threadIdx.x == 0) asm volatile("st.release.gpu.global.u32 [%0], %1;" : : "l"(flag), "r"(round) : "memory");
    } else {
      size_t flag = __cvta_generic_to_global(flags);
      int found;
      do {
        asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(found) : "l"(flag) : "memory");
      } while (found < round);
      __syncthreads();
    }
  }
}

// Without flags: every block reads all elements; the last writes them, after a grid sync or not. On several workers too.
extern "C" __global__ void all_read(int* data, int* sums, int elements, int sync, int writer) {
  int sum = 0;
  for (int i = threadIdx.x; i < elements; i += blockDim.x) sum += data[i];
  sums[blockIdx.x * blockDim.x + threadIdx.x] = sum;
  if (sync) cooperative_groups::this_grid().sync();
  if ((int)blockIdx.x == writer)
    for (int i = threadIdx.x; i < elements; i += blockDim.x) data[i] = 1;
}

// Two blocks, each on a worker of its own, which access the same elements at once and meet among them.
extern "C" __global__ void at_once(int* data, int* sums, int elements, int rounds) {
  int sum = 0;
  for (int round = 0; round < rounds; ++round) {
    cooperative_groups::this_grid().sync();
    for (int i = threadIdx.x; i < elements; i += blockDim.x) {
      if (blockIdx.x)
        data[elements - 1 - i] = round;
      else
        sum += data[i];
    }
  }
  sums[blockIdx.x * blockDim.x + threadIdx.x] = sum;
}
