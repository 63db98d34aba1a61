// What checked texts do at each load and store. g++ puts a call before every access to memory that other threads may
// see (-fsanitize=thread); here stand the functions that it calls. Bounds, initialization, owner, order and counts are
// looked up in shadow memory; whatever is not in order goes to the runtime, which decides and records.
#ifndef SOUFFLE_CHECK_H
#define SOUFFLE_CHECK_H

#include "souffle_abi.h"

typedef unsigned long long souffle_word;

// Who accessed an element last, as epochs: one number for each block and each value of its clock, which advances at grid
// barriers and at each release of the block to others. In the lower half the last write; in the upper half the reads since
// that no later read is known to come after: none, the epoch of one, or the number of a set of them (checks.h).
typedef souffle_word SouffleOrder;
enum : unsigned { kSouffleSet = 0x80000000u };  // numbers of sets begin here, and epochs end

// What the running block makes of readers that were noted, for a state of what it knows.
struct SouffleMade {
  unsigned readers, version, made;
};
enum { kSouffleMade = 256 };

// The last accesses within the block that accessed an element last, each in one word, for blocks run at once: `stamp` of
// the block in the upper half, below it the warp and the time of the write, or the time of the latest read. Times count the
// barriers of a block; `readers` are the warps that have read since what they know of each other.
struct SouffleWarpOrder {
  souffle_word written, read;
  unsigned readers, reserved;
};

// One global buffer. Each has a slot of the arena of its own, far larger than the buffer and with the buffer in its
// middle, so that an address tells which buffer it was computed from even where the index is far out of bounds.
struct SouffleRegion {
  souffle_word begin, bytes;  // begin: from the start of the arena
  unsigned char* owners;      // for each byte the tag of the buffer that wrote it, 0 for none
  SouffleOrder* order;        // for each element; null where the buffer is only read
  SouffleWarpOrder* warps;    // the same
  unsigned element_shift;
  unsigned char tag, writable;
};

struct SouffleTraffic {
  souffle_word read, written, atomics;
};

struct SouffleArena {
  char* base;
  souffle_word bytes;
  unsigned slot_bits, slots;
  const SouffleRegion* regions;
  unsigned epoch, sets;  // the first that no launch has used
};

// How a release writes: another read-modify-write, a store, or an addition, which counts arrivals.
enum { kSouffleModifies, kSouffleStores, kSouffleCounts };

enum { kSharedEmpty = 0, kSharedWritten = 1, kSharedOutside = 0xFF };

// Of one worker.
struct SouffleCheck {
  char* arena;
  souffle_word arena_bytes;
  unsigned slot_bits;
  // Of the running block: its epoch, the first that some other block's accesses may still be unknown of, the first of the
  // launch, the first set since the last grid barrier, what it knows of each block (null where it knows of no clock beyond
  // that first), and the number of this state of what it knows.
  unsigned epoch, phase_begin, launch_begin, sets_begin, stride, block;
  const unsigned* known;
  unsigned version;
  unsigned alone;  // whether no other worker runs
  unsigned other;
  // Of the running block: up to which time each warp knows of each other, and who accessed each two bytes of shared memory.
  const unsigned* clocks;
  SouffleWarpOrder* shared_order;
  unsigned stamp;  // no other block of this or an earlier launch has it
  const SouffleRegion* regions;
  SouffleTraffic* traffic;  // for each slot
  SouffleTraffic shared;
  char* shared_base;
  souffle_word shared_bytes;
  unsigned char* shared_state;  // for each byte of the thread-local segment
  char* stacks;
  souffle_word stacks_bytes;
  SouffleMade joined[kSouffleMade], judged[kSouffleMade];
};

enum SouffleFindingKind {
  kOutOfBounds, kUninitialized, kForeign, kRace, kMisaligned, kReadOnly, kDivergentBarrier, kDivergentGridSync,
  kPartialWarp, kDivergentShuffle
};
enum { kRegionShared = -1, kRegionNone = -2 };

// What was found at one place of the text: the first occurrence, and how many there were.
struct SouffleFinding {
  int kind, region;
  souffle_word pc, other_pc;
  long long offset;  // bytes from the start of the buffer, or of the thread-local segment
  unsigned bytes, what;  // what: bits as below, kSouffleOfRead where the other of a race reads; the lanes that come for kPartialWarp
  uint3 block, thread;
  int other;  // a block for kRace and kDivergentGridSync, a warp for kRace with kSouffleWithin, a tag for kForeign, a thread for kDivergentBarrier, kPartialWarp and kDivergentShuffle; or -1
  int reserved;
  souffle_word count;
};

// Threads of a block that are in the same state when nothing can go on.
struct SouffleWait {
  int state;  // 0 polls memory, 1 block barrier, 2 grid sync, 3 warp operation, 5 has exited, 6 could go on
  int barrier, arrived, expected;
  unsigned threads, mask;
  uint3 block, thread;  // thread: the first of them
  char what[32];
  souffle_word pc;
};

enum { kSouffleWrite = 1, kSouffleAtomic = 2, kSouffleAligned = 4, kSouffleNoValue = 8, kSouffleRace = 16, kSouffleWithin = 32, kSouffleOfRead = 64 };

extern "C" void souffle_check_slow(SouffleThread*, void* address, unsigned bytes, int what, void* pc);
extern "C" unsigned souffle_join_readers(SouffleThread*, unsigned readers);
extern "C" unsigned souffle_judge_readers(SouffleThread*, unsigned readers);

#define SOUFFLE_UNCHECKED __attribute__((no_sanitize("thread")))
#define SOUFFLE_HOOK static inline __attribute__((always_inline, no_sanitize("thread")))

SOUFFLE_HOOK bool souffle_all(const unsigned char* p, unsigned bytes, unsigned char value) {
  const souffle_word ones = 0x0101010101010101ull;
  souffle_word pattern = value * ones, v;
  switch (bytes) {
    case 1: return *p == value;
    case 2: { unsigned short w; __builtin_memcpy(&w, p, 2); return w == (unsigned short)pattern; }
    case 4: { unsigned w; __builtin_memcpy(&w, p, 4); return w == (unsigned)pattern; }
    case 8: __builtin_memcpy(&v, p, 8); return v == pattern;
    case 16: {
      souffle_word w;
      __builtin_memcpy(&v, p, 8);
      __builtin_memcpy(&w, p + 8, 8);
      return v == pattern && w == pattern;
    }
  }
  for (unsigned i = 0; i < bytes; ++i)
    if (p[i] != value) return false;
  return true;
}
SOUFFLE_HOOK void souffle_set(unsigned char* p, unsigned bytes, unsigned char value) {
  const souffle_word pattern = value * 0x0101010101010101ull;
  switch (bytes) {
    case 1: *p = value; return;
    case 2: __builtin_memcpy(p, &pattern, 2); return;
    case 4: __builtin_memcpy(p, &pattern, 4); return;
    case 16: __builtin_memcpy(p + 8, &pattern, 8);  // and the first half
    case 8: __builtin_memcpy(p, &pattern, 8); return;
  }
  for (unsigned i = 0; i < bytes; ++i) p[i] = value;
}

// Whether an access noted as an epoch is by another block and unknown to this one.
SOUFFLE_HOOK bool souffle_open(const SouffleCheck* c, unsigned noted) {
  if (noted < c->phase_begin || noted == c->epoch) return false;
  unsigned block = (noted - c->launch_begin) % c->stride;
  return block != c->block && (!c->known || (noted - c->launch_begin) / c->stride >= c->known[block]);
}
// Whether some of the readers that were noted may be unknown to this block: of sets, whether it has to be looked up.
SOUFFLE_HOOK bool souffle_open_readers(const SouffleCheck* c, unsigned readers) {
  return readers < kSouffleSet ? souffle_open(c, readers) : readers >= c->sets_begin;
}
// The readers together with this block, without those that it knows of: whoever knows of this read knows of them too.
SOUFFLE_HOOK unsigned souffle_joined(SouffleThread* self, const SouffleCheck* c, unsigned readers) {
  const SouffleMade& e = c->joined[readers % kSouffleMade];
  return e.readers == readers && e.version == c->version ? e.made : souffle_join_readers(self, readers);
}
// The epoch of one of the readers that this block does not know of, or 0.
SOUFFLE_HOOK unsigned souffle_judged(SouffleThread* self, const SouffleCheck* c, unsigned readers) {
  if (readers < kSouffleSet) return readers;
  const SouffleMade& e = c->judged[readers % kSouffleMade];
  return e.readers == readers && e.version == c->version ? e.made : souffle_judge_readers(self, readers);
}
// The epoch of an access whose order with this one is left open, with kSouffleSet where it is a read, or 0. Notes this access
// in any case. A write that knows of all readers takes their place: whoever knows of it knows of them.
SOUFFLE_HOOK unsigned souffle_unordered(SouffleThread* self, SouffleCheck* c, SouffleOrder* o, unsigned count, bool write) {
  unsigned open = 0;
  for (unsigned i = 0; i < count; ++i) {
    SouffleOrder was = __atomic_load_n(o + i, __ATOMIC_RELAXED);
    for (;;) {
      const unsigned written = unsigned(was), readers = unsigned(was >> 32);
      SouffleOrder now;
      unsigned unknown = souffle_open(c, written) ? written : 0;
      if (write) {
        now = c->epoch;
        unsigned reader = souffle_open_readers(c, readers) ? souffle_judged(self, c, readers) : 0;
        if (reader) {
          unknown = reader | kSouffleSet;
          now |= SouffleOrder(readers) << 32;
        }
      } else {
        unsigned own = readers != c->epoch && souffle_open_readers(c, readers) ? souffle_joined(self, c, readers) : c->epoch;
        now = SouffleOrder(own) << 32 | written;
      }
      if (now != was) {
        // Another worker may have noted an access meanwhile.
        if (c->alone)
          o[i] = now;
        else if (!__atomic_compare_exchange_n(o + i, &was, now, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED))
          continue;
      }
      if (unknown) open = unknown;
      break;
    }
  }
  return open;
}

// The same among the warps of a block: the warp whose access is unordered with this one, plus one, or 0. A barrier takes the
// warps that meet there to one new time, and each then knows of all that the others did before. A read that another warp's
// later read knows of is forgotten, for whoever knows the later one knows it too. Reads that do not know of each other are
// noted with the latest of their times, which is exact where barriers are of the first so many warps of the block. Accesses
// of one warp count as ordered.
enum { kSouffleWarps = 32 };
SOUFFLE_HOOK unsigned souffle_unordered_warps(const SouffleCheck* c, unsigned warp, SouffleWarpOrder* o, unsigned count, bool write) {
  const unsigned* seen = c->clocks + kSouffleWarps * warp;
  const unsigned now = seen[warp], mine = 1u << warp;
  const souffle_word stamp = souffle_word(c->stamp) << 32;
  unsigned open = 0;
  for (unsigned i = 0; i < count; ++i) {
    SouffleWarpOrder& e = o[i];
    const souffle_word written = e.written ^ stamp, read = e.read ^ stamp;
    if (!(written >> 32)) {
      const unsigned other = unsigned(written) % kSouffleWarps;
      if (other != warp && unsigned(written) / kSouffleWarps >= seen[other]) open = other + 1;
    }
    unsigned others = read >> 32 ? 0 : e.readers & ~mine, kept = 0;
    const unsigned time = unsigned(read);
    if (!write && !(read >> 32) && time == now && (e.readers & mine)) continue;
    for (; others; others &= others - 1) {
      const unsigned other = unsigned(__builtin_ctz(others));
      if (time < seen[other]) continue;
      kept |= 1u << other;
      if (write) open = other + 1;
    }
    if (write) {
      e.written = stamp | now * kSouffleWarps | warp;
    } else {
      e.readers = kept | mine;
      e.read = stamp | (kept && time > now ? time : now);
    }
  }
  return open;
}

// One access; `what` and, but for ranges, `bytes` are constants.
SOUFFLE_HOOK void souffle_check_access(SouffleThread* self, void* address, unsigned bytes, int what, void* pc) {
  SouffleCheck* c = self->check;
  const bool write = what & kSouffleWrite, value = !(what & kSouffleNoValue);
  bool bad = (what & kSouffleAligned) && (souffle_word)address % bytes;
  souffle_word at = (souffle_word)((char*)address - c->arena);
  souffle_word in_shared = (souffle_word)((char*)address - c->shared_base);
  if (in_shared < c->shared_bytes) {
    if (in_shared + bytes > c->shared_bytes) {
      bad = true;
    } else {
      unsigned char* state = c->shared_state + in_shared;
      if (!souffle_all(state, bytes, kSharedWritten)) {
        if (!write || souffle_all(state, bytes, kSharedOutside)) {
          bad = true;
        } else if (value) {
          for (unsigned i = 0; i < bytes; ++i)
            if (state[i] == kSharedOutside) bad = true;
          if (!bad) souffle_set(state, bytes, kSharedWritten);
        }
      }
    }
    if (!bad && !(what & kSouffleAtomic)) {
      // Two bytes are the smallest that is told apart.
      unsigned other = souffle_unordered_warps(c, self->warp, c->shared_order + in_shared / 2, bytes / 2, write);
      if (other) {
        c->other = other - 1;
        souffle_check_slow(self, address, bytes, what | kSouffleRace | kSouffleWithin, pc);
      }
    }
    if (what & kSouffleAtomic)
      c->shared.atomics += write;
    else if (write)
      c->shared.written += bytes;
    else
      c->shared.read += bytes;
  } else if (at < c->arena_bytes) {
    souffle_word slot = at >> c->slot_bits;
    const SouffleRegion* r = &c->regions[slot];
    SouffleTraffic* t = &c->traffic[slot];
    souffle_word offset = at - r->begin;
    if (offset >= r->bytes || offset + bytes > r->bytes) {
      bad = true;
    } else {
      if (write) {
        bad |= !r->writable;
        if (r->writable && value) souffle_set(r->owners + offset, bytes, r->tag);
      } else if (value) {
        bad |= !souffle_all(r->owners + offset, bytes, r->tag);
      }
      if (r->order && !(what & kSouffleAtomic)) {
        souffle_word first = offset >> r->element_shift;
        unsigned count = unsigned(((offset + bytes - 1) >> r->element_shift) - first + 1);
        unsigned other = souffle_unordered(self, c, r->order + first, count, write);
        if (other) {
          c->other = other % kSouffleSet;
          souffle_check_slow(self, address, bytes, what | kSouffleRace | (other < kSouffleSet ? 0 : kSouffleOfRead), pc);
        }
        other = souffle_unordered_warps(c, self->warp, r->warps + first, count, write);
        if (other) {
          c->other = other - 1;
          souffle_check_slow(self, address, bytes, what | kSouffleRace | kSouffleWithin, pc);
        }
      }
    }
    if (what & kSouffleAtomic)
      t->atomics += write;
    else if (write)
      t->written += bytes;
    else
      t->read += bytes;
  } else {
    souffle_word in_stack = (souffle_word)((char*)address - c->stacks);
    souffle_word in_self = (souffle_word)((char*)address - (char*)self);
    if (in_stack < c->stacks_bytes || (in_self < sizeof(SouffleThread) && !write)) return;
    bad = true;
  }
  if (bad) souffle_check_slow(self, address, bytes, what, pc);
}

// Compiled once, and linked to each checked text.
#ifdef SOUFFLE_CHECK_FUNCTIONS
#define SOUFFLE_HOOK_NAME extern "C" __attribute__((used, noinline, visibility("hidden"), no_sanitize("thread")))
#define SOUFFLE_ACCESS(name, bytes, what) \
  SOUFFLE_HOOK_NAME void name(void* p) { souffle_check_access(souffle_self, p, bytes, what, __builtin_return_address(0)); }
#define SOUFFLE_ACCESSES(bytes)                                               \
  SOUFFLE_ACCESS(__tsan_read##bytes, bytes, kSouffleAligned)                  \
  SOUFFLE_ACCESS(__tsan_write##bytes, bytes, kSouffleAligned | kSouffleWrite) \
  SOUFFLE_ACCESS(__tsan_unaligned_read##bytes, bytes, 0)                      \
  SOUFFLE_ACCESS(__tsan_unaligned_write##bytes, bytes, kSouffleWrite)
SOUFFLE_ACCESSES(1)
SOUFFLE_ACCESSES(2)
SOUFFLE_ACCESSES(4)
SOUFFLE_ACCESSES(8)
SOUFFLE_ACCESSES(16)
#define SOUFFLE_RANGE(name, what)                                                                        \
  SOUFFLE_HOOK_NAME void name(void* p, size_t bytes) {                                                   \
    if (bytes) souffle_check_access(souffle_self, p, unsigned(bytes), what, __builtin_return_address(0)); \
  }
SOUFFLE_RANGE(__tsan_read_range, 0)
SOUFFLE_RANGE(__tsan_write_range, kSouffleWrite)
SOUFFLE_HOOK_NAME void __tsan_init() {}
SOUFFLE_HOOK_NAME void __tsan_func_entry(void*) {}
SOUFFLE_HOOK_NAME void __tsan_func_exit() {}
SOUFFLE_HOOK_NAME void __tsan_vptr_update(void**, void*) {}
SOUFFLE_HOOK_NAME void __tsan_atomic_thread_fence(int) { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
SOUFFLE_HOOK_NAME void __tsan_atomic_signal_fence(int) { __atomic_signal_fence(__ATOMIC_SEQ_CST); }
// The loops of souffle_sync.h are made of these two; only the second is counted as an atomic.
#define SOUFFLE_ATOMICS(bits, T)                                                                                      \
  SOUFFLE_HOOK_NAME T __tsan_atomic##bits##_load(const volatile T* p, int) {                                          \
    souffle_check_access(souffle_self, (void*)p, bits / 8, kSouffleAtomic | kSouffleAligned,                          \
                         __builtin_return_address(0));                                                                \
    return __atomic_load_n(p, __ATOMIC_SEQ_CST);                                                                      \
  }                                                                                                                   \
  SOUFFLE_HOOK_NAME void __tsan_atomic##bits##_store(volatile T* p, T v, int) {                                       \
    souffle_check_access(souffle_self, (void*)p, bits / 8, kSouffleAtomic | kSouffleWrite | kSouffleAligned,          \
                         __builtin_return_address(0));                                                                \
    __atomic_store_n(p, v, __ATOMIC_SEQ_CST);                                                                         \
  }                                                                                                                   \
  SOUFFLE_HOOK_NAME int __tsan_atomic##bits##_compare_exchange_strong(volatile T* p, T* was, T v, int, int) {         \
    bool done = __atomic_compare_exchange_n(p, was, v, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);                    \
    if (done)                                                                                                         \
      souffle_check_access(souffle_self, (void*)p, bits / 8, kSouffleAtomic | kSouffleWrite | kSouffleAligned,        \
                           __builtin_return_address(0));                                                              \
    return done;                                                                                                      \
  }
SOUFFLE_ATOMICS(8, unsigned char)
SOUFFLE_ATOMICS(16, unsigned short)
SOUFFLE_ATOMICS(32, unsigned int)
SOUFFLE_ATOMICS(64, unsigned long long)
#endif

#endif
