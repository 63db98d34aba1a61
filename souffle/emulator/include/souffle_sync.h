// Barriers, warp-wide operations, atomics, caching loads and stores.
#ifndef SOUFFLE_SYNC_H
#define SOUFFLE_SYNC_H

#define __syncthreads() souffle_barrier(souffle_self, 0, -1)
#define __syncthreads_count(p) souffle_barrier_reduce(souffle_self, (p) != 0, 0)
#define __syncthreads_and(p) souffle_barrier_reduce(souffle_self, (p) != 0, 1)
#define __syncthreads_or(p) souffle_barrier_reduce(souffle_self, (p) != 0, 2)
// The place in the text names the point where lanes meet: g++ may clone the call, so its address does not.
#define __activemask() souffle_activemask(souffle_self, __LINE__)
#define __threadfence() souffle_fence(souffle_self)
#define __threadfence_block() __atomic_thread_fence(__ATOMIC_SEQ_CST)
#define __threadfence_system() souffle_fence(souffle_self)
#define __nanosleep(n) ((void)(n), souffle_relax(souffle_self))
#define __trap() souffle_fail(souffle_self, "trap")
#define __brkpt() souffle_fail(souffle_self, "breakpoint")
#define __builtin_assume(x) ((void)0)
#define __assume(x) ((void)0)
#define __builtin_nv_unreachable() __builtin_unreachable()
#define __cvta_generic_to_shared(p) souffle_shared_address(p)
#define __cvta_shared_to_generic(a) ((void*)(souffle_self->shared_base + (a)))
#define __cvta_generic_to_global(p) ((size_t)(p))

SOUFFLE_INLINE size_t souffle_shared_address(const volatile void* p) {
  size_t offset = size_t((const volatile char*)p - souffle_self->shared_base);
  if (offset >= souffle_self->shared_size) souffle_fail(souffle_self, "an address outside shared memory is used as a shared address");
  return offset;
}
SOUFFLE_INLINE bool __isShared(const void* p) {
  return size_t((const char*)p - souffle_self->shared_base) < souffle_self->shared_size;
}
SOUFFLE_INLINE bool __isGlobal(const void* p) { return !__isShared(p); }
SOUFFLE_INLINE long long clock64() {
#if defined(__x86_64__)
  return (long long)__builtin_ia32_rdtsc();
#else
  static thread_local long long ticks;
  return ++ticks;
#endif
}
SOUFFLE_INLINE int clock() { return int(clock64()); }

// ---- named barriers that vote ----
struct SouffleVotes {
  int holding, threads;
  bool all() const { return holding == threads; }
  bool any() const { return holding != 0; }
};
// The counters lie where the block's shared memory does: the fibers of a block share them, other blocks do not. What
// they hold when a block begins is not defined, and others may vote again at once: hence a barrier after each step.
static __attribute__((noinline)) SOUFFLE_UNCHECKED int souffle_voted(int id, bool begins, bool holds) {
  static thread_local int votes[16];
  if (id < 0 || id >= 16) return 0;  // the barrier fails
  votes[id] = begins ? 0 : votes[id] + holds;
  return votes[id];
}
SOUFFLE_INLINE SouffleVotes souffle_barrier_vote(int id, int count, bool holds) {
  souffle_voted(id, true, false);
  souffle_barrier(souffle_self, id, count);
  souffle_voted(id, false, holds);
  souffle_barrier(souffle_self, id, count);
  const SouffleVotes result = {souffle_voted(id, false, false),
                               count < 0 ? int(blockDim.x * blockDim.y * blockDim.z) : count};
  souffle_barrier(souffle_self, id, count);
  return result;
}

// ---- shuffles ----
template <class T>
struct SouffleShuffle {
  T value, result;
  int source;
  int own;
};
template <class T>
static SOUFFLE_UNCHECKED void souffle_shuffle_all(void** payloads, unsigned mask) {
  for (int lane = 0; lane < 32; ++lane) {
    if (!(mask >> lane & 1)) continue;
    auto* mine = (SouffleShuffle<T>*)payloads[lane];
    // Reading a lane that takes no part gives an undefined value on a GPU; here, all bits set.
    if (mask >> mine->source & 1)
      mine->result = ((SouffleShuffle<T>*)payloads[mine->source])->value;
    else
      memset((void*)&mine->result, 0xFF, sizeof(T));
  }
}
template <class T>
SOUFFLE_INLINE T souffle_shuffle(unsigned mask, T value, int source, const char* what) {
  SouffleShuffle<T> s;
  s.value = value;
  s.source = source;
  souffle_collective(souffle_self, mask, what, &s, souffle_shuffle_all<T>);
  return s.result;
}
template <class T>
SOUFFLE_INLINE T __shfl_sync(unsigned mask, T value, int source, int width = 32) {
  int lane = int(souffle_self->lane), first = lane & ~(width - 1);
  return souffle_shuffle(mask, value, first + (source & (width - 1)), "__shfl_sync");
}
template <class T>
SOUFFLE_INLINE T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32) {
  int lane = int(souffle_self->lane), first = lane & ~(width - 1), source = lane - int(delta);
  return souffle_shuffle(mask, value, source < first ? lane : source, "__shfl_up_sync");
}
template <class T>
SOUFFLE_INLINE T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32) {
  int lane = int(souffle_self->lane), last = lane | (width - 1), source = lane + int(delta);
  return souffle_shuffle(mask, value, source > last ? lane : source, "__shfl_down_sync");
}
template <class T>
SOUFFLE_INLINE T __shfl_xor_sync(unsigned mask, T value, int flip, int width = 32) {
  int lane = int(souffle_self->lane), last = lane | (width - 1), source = lane ^ flip;
  return souffle_shuffle(mask, value, source > last ? lane : source, "__shfl_xor_sync");
}

SOUFFLE_INLINE void __syncwarp(unsigned mask = 0xFFFFFFFFu) {
  souffle_collective(souffle_self, mask, "__syncwarp", nullptr, nullptr);
}

// ---- votes and reductions ----
struct SouffleVote {
  unsigned long long value;
  unsigned result;
};
static inline SOUFFLE_UNCHECKED void souffle_ballot_all(void** payloads, unsigned mask) {
  unsigned votes = 0;
  for (int lane = 0; lane < 32; ++lane)
    if (mask >> lane & 1) votes |= unsigned(((SouffleVote*)payloads[lane])->value != 0) << lane;
  for (int lane = 0; lane < 32; ++lane)
    if (mask >> lane & 1) ((SouffleVote*)payloads[lane])->result = votes;
}
static inline SOUFFLE_UNCHECKED void souffle_match_all(void** payloads, unsigned mask) {
  for (int lane = 0; lane < 32; ++lane) {
    if (!(mask >> lane & 1)) continue;
    auto* mine = (SouffleVote*)payloads[lane];
    mine->result = 0;
    for (int other = 0; other < 32; ++other)
      if ((mask >> other & 1) && ((SouffleVote*)payloads[other])->value == mine->value) mine->result |= 1u << other;
  }
}
SOUFFLE_INLINE unsigned souffle_ballot(unsigned mask, bool p, const char* what) {
  SouffleVote v{p, 0};
  souffle_collective(souffle_self, mask, what, &v, souffle_ballot_all);
  return v.result;
}
SOUFFLE_INLINE unsigned __ballot_sync(unsigned mask, int p) { return souffle_ballot(mask, p != 0, "__ballot_sync"); }
SOUFFLE_INLINE int __any_sync(unsigned mask, int p) { return souffle_ballot(mask, p != 0, "__any_sync") != 0; }
SOUFFLE_INLINE int __all_sync(unsigned mask, int p) { return souffle_ballot(mask, p == 0, "__all_sync") == 0; }
template <class T>
SOUFFLE_INLINE unsigned __match_any_sync(unsigned mask, T value) {
  SouffleVote v{0, 0};
  memcpy(&v.value, &value, sizeof(T));
  souffle_collective(souffle_self, mask, "__match_any_sync", &v, souffle_match_all);
  return v.result;
}
template <class T>
SOUFFLE_INLINE unsigned __match_all_sync(unsigned mask, T value, int* all) {
  unsigned same = __match_any_sync(mask, value), present = souffle_ballot(mask, true, "__match_all_sync");
  *all = same == present;
  return *all ? present : 0;
}

enum SouffleOperation { kSouffleAdd, kSouffleMin, kSouffleMax, kSouffleAnd, kSouffleOr, kSouffleXor };
template <class T, int op>
SOUFFLE_INLINE T souffle_combine(T a, T b) {
  return T(op == kSouffleAdd   ? a + b
           : op == kSouffleMin ? (a < b ? a : b)
           : op == kSouffleMax ? (a > b ? a : b)
           : op == kSouffleAnd ? (a & b)
           : op == kSouffleOr  ? (a | b)
                               : (a ^ b));
}
template <class T, int op>
static SOUFFLE_UNCHECKED void souffle_reduce_all(void** payloads, unsigned mask) {
  bool first = true;
  T total = T();
  for (int lane = 0; lane < 32; ++lane)
    if (mask >> lane & 1) {
      T v = ((SouffleShuffle<T>*)payloads[lane])->value;
      total = first ? v : souffle_combine<T, op>(total, v);
      first = false;
    }
  for (int lane = 0; lane < 32; ++lane)
    if (mask >> lane & 1) ((SouffleShuffle<T>*)payloads[lane])->result = total;
}
#define SOUFFLE_REDUCE(name, T, op)                                                     \
  SOUFFLE_INLINE T name(unsigned mask, T value) {                                       \
    SouffleShuffle<T> s;                                                                \
    s.value = value;                                                                    \
    souffle_collective(souffle_self, mask, #name, &s, souffle_reduce_all<T, op>);       \
    return s.result;                                                                    \
  }
SOUFFLE_REDUCE(__reduce_add_sync, unsigned, kSouffleAdd)
SOUFFLE_REDUCE(__reduce_min_sync, unsigned, kSouffleMin)
SOUFFLE_REDUCE(__reduce_max_sync, unsigned, kSouffleMax)
SOUFFLE_REDUCE(__reduce_add_sync, int, kSouffleAdd)
SOUFFLE_REDUCE(__reduce_min_sync, int, kSouffleMin)
SOUFFLE_REDUCE(__reduce_max_sync, int, kSouffleMax)
SOUFFLE_REDUCE(__reduce_and_sync, unsigned, kSouffleAnd)
SOUFFLE_REDUCE(__reduce_or_sync, unsigned, kSouffleOr)
SOUFFLE_REDUCE(__reduce_xor_sync, unsigned, kSouffleXor)

// ---- atomics: a compare-and-swap loop over the bits, so one text serves every type ----
template <int bytes> struct SouffleWord;
template <> struct SouffleWord<2> { typedef unsigned short type; };
template <> struct SouffleWord<4> { typedef unsigned int type; };
template <> struct SouffleWord<8> { typedef unsigned long long type; };
template <class T, class F>
SOUFFLE_INLINE T souffle_atomic(T* address, F next, bool ordered = false) {
  typedef typename SouffleWord<sizeof(T)>::type Word;
  // The text's own pointer type is no reason to assume anything about aliasing.
  typedef Word __attribute__((may_alias)) Alias;
  Alias* word = (Alias*)address;
  Word old = __atomic_load_n(word, __ATOMIC_RELAXED);
  for (;;) {
    T value;
    memcpy((void*)&value, &old, sizeof(T));
    T wanted = next(value);
    Word bits;
    memcpy(&bits, (const void*)&wanted, sizeof(T));
    if (__atomic_compare_exchange_n(word, &old, bits, false, __ATOMIC_SEQ_CST, __ATOMIC_RELAXED)) {
      // An atomic that changes nothing may be one turn of a polling loop: others must run meanwhile.
      if (bits == old)
        souffle_relax(souffle_self);
      else if (ordered)
        souffle_progress(souffle_self);
      else
        souffle_event(souffle_self);
      return value;
    }
  }
}
#define SOUFFLE_ATOMIC(name, T, expression)                                          \
  SOUFFLE_INLINE T name(T* p, T v) {                                                 \
    return souffle_atomic(p, [=](T old) -> T { return (expression); });              \
  }                                                                                  \
  SOUFFLE_INLINE T name##_block(T* p, T v) { return name(p, v); }                    \
  SOUFFLE_INLINE T name##_system(T* p, T v) { return name(p, v); }
#define SOUFFLE_ATOMIC_INTEGER(T)                           \
  SOUFFLE_ATOMIC(atomicAdd, T, (T)(old + v))                  \
  SOUFFLE_ATOMIC(atomicMin, T, old < v ? old : v)           \
  SOUFFLE_ATOMIC(atomicMax, T, old > v ? old : v)           \
  SOUFFLE_ATOMIC(atomicAnd, T, (T)(old & v))                  \
  SOUFFLE_ATOMIC(atomicOr, T, (T)(old | v))                   \
  SOUFFLE_ATOMIC(atomicXor, T, (T)(old ^ v))                  \
  SOUFFLE_ATOMIC(souffle_exchange, T, v)
SOUFFLE_ATOMIC_INTEGER(int)
SOUFFLE_ATOMIC_INTEGER(unsigned int)
SOUFFLE_ATOMIC_INTEGER(long)
SOUFFLE_ATOMIC_INTEGER(unsigned long)
SOUFFLE_ATOMIC_INTEGER(long long)
SOUFFLE_ATOMIC_INTEGER(unsigned long long)
SOUFFLE_ATOMIC(atomicAdd, float, old + v)
SOUFFLE_ATOMIC(atomicAdd, double, old + v)
SOUFFLE_ATOMIC(souffle_exchange, float, v)
SOUFFLE_ATOMIC(souffle_exchange, double, v)
SOUFFLE_ATOMIC(atomicSub, int, old - v)
SOUFFLE_ATOMIC(atomicSub, unsigned int, old - v)
SOUFFLE_ATOMIC(atomicInc, unsigned int, old >= v ? 0u : old + 1)
SOUFFLE_ATOMIC(atomicDec, unsigned int, old == 0 || old > v ? v : old - 1)
template <class T, class E, class V>
SOUFFLE_INLINE T atomicCAS(T* p, E was, V becomes) {
  T expected = T(was), wanted = T(becomes);
  return souffle_atomic(p, [=](T now) -> T { return memcmp(&now, &expected, sizeof(T)) ? now : wanted; });
}
template <class T, class V>
SOUFFLE_INLINE T atomicExch(T* p, V v) {
  return souffle_exchange(p, T(v));
}

// ---- cached loads and stores ----
#define SOUFFLE_LOAD(name) \
  template <class T>       \
  SOUFFLE_INLINE T name(const T* p) { return *p; }
SOUFFLE_LOAD(__ldg)
SOUFFLE_LOAD(__ldca)
SOUFFLE_LOAD(__ldcs)
SOUFFLE_LOAD(__ldlu)
template <class T>
SOUFFLE_INLINE T souffle_polled(const T* p) {
  souffle_relax(souffle_self);
  T value;
  memcpy((void*)&value, (const void*)p, sizeof(T));
  return value;
}
// These two bypass the first cache level: that is what polling loops use.
#define __ldcg(p) souffle_polled(p)
#define __ldcv(p) souffle_polled(p)
#define SOUFFLE_STORE(name)  \
  template <class T, class V> \
  SOUFFLE_INLINE void name(T* p, V v) { *p = T(v); souffle_event(souffle_self); }
SOUFFLE_STORE(__stwb)
SOUFFLE_STORE(__stcg)
SOUFFLE_STORE(__stcs)
SOUFFLE_STORE(__stwt)

#endif
