// The runtime's side of checked texts (souffle_check.h): a worker's shadow of shared memory, the epochs of blocks, and the
// record of what was found. Part of fiber_runtime.cpp, kept apart because nothing else there depends on it.
#ifndef SOUFFLE_CHECKS_H
#define SOUFFLE_CHECKS_H

#include <dlfcn.h>

namespace {

constexpr unsigned kLastEpoch = 0x80000000u;  // beyond it the epochs of a memory start again

bool start_checks(Worker* w) {
  const SouffleLaunchSpec* spec = w->launch->spec;
  SouffleCheck* c = &w->check;
  const SouffleArena* arena = spec->arena;
  c->arena = arena->base;
  c->arena_bytes = arena->bytes;
  c->slot_bits = arena->slot_bits;
  c->regions = arena->regions;
  c->shared_base = w->shared_base;
  c->shared_bytes = w->shared_size;
  c->stacks = w->stacks->base;
  c->stacks_bytes = (kStackBytes + kGuardBytes) * kMaxThreads;
  c->traffic = (SouffleTraffic*)calloc(arena->slots + 1, sizeof(SouffleTraffic));
  c->shared_state = (unsigned char*)malloc(2 * w->shared_size + 1);
  if (!c->traffic || !c->shared_state) return false;
  // The second half is what a new block begins with.
  unsigned char* fresh = c->shared_state + w->shared_size;
  memset(c->shared_state, kSharedOutside, 2 * w->shared_size);
  for (unsigned i = 0; i < spec->shared_ranges; ++i)
    memset(fresh + spec->shared_range[2 * i], kSharedEmpty, spec->shared_range[2 * i + 1]);
  if (w->dynamic_base) memset(fresh + (w->dynamic_base - w->shared_base), kSharedEmpty, spec->shared_bytes);
  return true;
}

void stop_checks(Worker* w) {
  SouffleCheck* c = &w->check;
  Launch* launch = w->launch;
  SouffleLaunchResult* r = launch->result;
  pthread_mutex_lock(&launch->lock);
  for (unsigned i = 0; c->traffic && i < launch->spec->arena->slots; ++i) {
    launch->spec->traffic[i].read += c->traffic[i].read;
    launch->spec->traffic[i].written += c->traffic[i].written;
    launch->spec->traffic[i].atomics += c->traffic[i].atomics;
  }
  r->shared.read += c->shared.read;
  r->shared.written += c->shared.written;
  r->shared.atomics += c->shared.atomics;
  pthread_mutex_unlock(&launch->lock);
  free(c->traffic);
  free(c->shared_state);
}

void enter_block(Worker* w, const Block* b) {
  if (const SouffleArena* arena = w->launch->spec->arena) {
    SouffleCheck* c = &w->check;
    c->launch_begin = arena->epoch;
    c->stride = w->launch->blocks + 1;
    c->block = b->index;
    c->clock = b->clock;
    c->known = b->known;
    c->epoch = c->launch_begin + b->clock * c->stride + b->index;
    c->phase_begin = c->launch_begin + b->floor * c->stride;
    c->stamp = c->launch_begin + b->index;
  }
  w->check.clocks = b->clocks;
  w->check.shared_order = b->shared_order;
}

// The listed threads have met: their warps know of all that any of them has done.
void meet_warps(Block* b, const unsigned* list, unsigned count) {
  if (!b->clocks) return;
  bool here[kSouffleWarps] = {};
  for (unsigned i = 0; i < count; ++i) here[list[i] / 32] = true;
  unsigned known[kSouffleWarps] = {};
  ++b->time;
  for (int w = 0; w < b->warp_count; ++w) {
    if (!here[w]) continue;
    const unsigned* row = b->clocks + kSouffleWarps * w;
    for (int u = 0; u < b->warp_count; ++u)
      if (row[u] > known[u]) known[u] = row[u];
  }
  for (int w = 0; w < b->warp_count; ++w)
    if (here[w]) known[w] = b->time;
  for (int w = 0; w < b->warp_count; ++w)
    if (here[w]) memcpy(b->clocks + kSouffleWarps * w, known, size_t(b->warp_count) * sizeof(unsigned));
}

bool allocate_checks(const Worker* w, Block* b) {
  if (!b->launch->spec->arena) return true;
  b->clocks = (unsigned*)malloc(kSouffleWarps * kSouffleWarps * sizeof(unsigned));
  b->shared_order = (SouffleWarpOrder*)calloc(w->shared_size / 2 + 8, sizeof(SouffleWarpOrder));
  return b->clocks && b->shared_order;
}

// ---- order among blocks ----
//
// Each block has a clock, and knows of each other block up to which clock its accesses come before what it does itself:
// vector clocks. A grid barrier takes all to one new clock. A release hands what the block knows to the memory that it
// writes, an acquire takes what was handed to the memory that it reads; both are those of inline PTX with gpu or sys scope,
// whatever is built of them. Which thread of a block it was is not told apart.
//
// Where blocks only add, they count arrivals, and a run may let one of them arrive again before another has seen the round
// complete. What that other may rely on in every run is as many arrivals of each block as it has made itself, so no more is
// taken from a counter.

// All blocks have met.
void meet_blocks(Block* b, unsigned clock) {
  b->clock = b->floor = clock;
  for (unsigned i = 0; b->known && i < b->launch->blocks; ++i) b->known[i] = clock;
}

bool has_vector(Block* b) {
  if (b->known) return true;
  b->known = (unsigned*)malloc(b->launch->blocks * sizeof(unsigned));
  for (unsigned i = 0; b->known && i < b->launch->blocks; ++i) b->known[i] = b->floor;
  return b->known;
}

// What is handed on at an address; the launch's lock is held.
Handed* handed_at(Launch* launch, const void* address) {
  for (unsigned i = 0; i < launch->handed_count; ++i)
    if (launch->handed[i].address == address) return &launch->handed[i];
  auto* all = (Handed*)realloc((void*)launch->handed, (launch->handed_count + 1) * sizeof(Handed));
  if (!all) return nullptr;
  launch->handed = all;
  auto* clocks = (unsigned*)calloc(launch->blocks, sizeof(unsigned));
  auto* arrivals = (Arrivals*)calloc(launch->blocks, sizeof(Arrivals));
  if (!clocks || !arrivals) {
    free(clocks);
    free(arrivals);
    return nullptr;
  }
  all[launch->handed_count] = Handed{address, true, clocks, arrivals};
  return &all[launch->handed_count++];
}

bool note_arrival(Arrivals* a, unsigned clock) {
  if (a->count == a->room) {
    unsigned room = a->room ? 2 * a->room : 16;
    auto* clocks = (unsigned*)realloc(a->clocks, room * sizeof(unsigned));
    if (!clocks) return false;
    a->clocks = clocks;
    a->room = room;
  }
  a->clocks[a->count++] = clock;
  return true;
}

bool give_knowledge(Block* b, const void* address, int how) {
  Launch* launch = b->launch;
  Handed* handed = has_vector(b) ? handed_at(launch, address) : nullptr;
  if (!handed) return false;
  b->known[b->index] = ++b->clock;
  if (b->clock > launch->last_clock) launch->last_clock = b->clock;
  for (unsigned i = 0; i < launch->blocks; ++i)
    if (how == kSouffleStores || b->known[i] > handed->clocks[i]) handed->clocks[i] = b->known[i];
  handed->counter &= how == kSouffleCounts;
  return note_arrival(&handed->arrivals[b->index], b->clock);
}

bool take_knowledge(Block* b, const void* address) {
  Launch* launch = b->launch;
  Handed* handed = has_vector(b) ? handed_at(launch, address) : nullptr;
  if (!handed) return false;
  const unsigned own = handed->counter ? handed->arrivals[b->index].count : 0;
  // What it now knows of all others; a block that is alone knows of itself.
  unsigned floor = ~0u;
  for (unsigned i = 0; i < launch->blocks; ++i) {
    if (i == b->index) continue;
    const Arrivals& a = handed->arrivals[i];
    unsigned taken = own == 0 ? handed->clocks[i] : a.count == 0 ? 0 : a.clocks[(a.count < own ? a.count : own) - 1];
    if (taken > b->known[i]) b->known[i] = taken;
    if (b->known[i] < floor) floor = b->known[i];
  }
  if (floor == ~0u) floor = b->clock;
  // One round of a barrier: block 0 has learnt of all others what it had not known.
  unsigned round = handed->clocks[b->index] < floor ? handed->clocks[b->index] : floor;
  if (b->index == 0 && round > b->rounds) {
    b->rounds = round;
    ++launch->counted_syncs;
  }
  b->floor = floor;
  return true;
}

// ---- what was found ----

void record(Launch* launch, const SouffleFinding& found) {
  const SouffleLaunchSpec* spec = launch->spec;
  if (!spec->arena) return;
  sig_atomic_t in_fiber = tl_worker ? tl_worker->in_fiber : 0;
  if (tl_worker) tl_worker->in_fiber = 0;
  pthread_mutex_lock(&launch->lock);
  SouffleLaunchResult* r = launch->result;
  int i = 0;
  for (; i < r->findings; ++i) {
    SouffleFinding& f = spec->finding[i];
    if (f.kind == found.kind && f.region == found.region && f.pc == found.pc && f.other_pc == found.other_pc) break;
  }
  if (i < r->findings) {
    ++spec->finding[i].count;
  } else if (i < spec->finding_capacity) {
    spec->finding[i] = found;
    spec->finding[i].count = 1;
    ++r->findings;
  } else {
    ++r->findings_left_out;
  }
  pthread_mutex_unlock(&launch->lock);
  if (tl_worker) tl_worker->in_fiber = in_fiber;
}

SouffleFinding finding_at(const Fiber* f, int kind, void* pc) {
  SouffleFinding found{};
  found.kind = kind;
  found.region = kRegionNone;
  found.pc = souffle_word(uintptr_t(pc));
  found.block = f->block_index;
  found.thread = f->thread_index;
  found.other = -1;
  return found;
}

// Threads of one barrier that came from different places of the text. The places may still be one line, which the
// optimizer has copied: that is decided where lines are known.
void compare_places(Block* b, const unsigned* list, unsigned count) {
  if (!b->launch->spec->arena || count == 0) return;
  const Fiber& first = b->fibers[list[0]];
  for (unsigned i = 1; i < count; ++i) {
    const Fiber& f = b->fibers[list[i]];
    if (f.wait_pc == first.wait_pc) continue;
    SouffleFinding found = finding_at(&first, kDivergentBarrier, first.wait_pc);
    found.other_pc = souffle_word(uintptr_t(f.wait_pc));
    found.other = int(list[i]);
    record(b->launch, found);
    return;
  }
}

// The same among the threads of a warp, whose lanes have to come to a named barrier together.
void compare_lanes(Block* b, const unsigned* list, unsigned count) {
  if (!b->launch->spec->arena) return;
  for (unsigned i = 1; i < count; ++i) {
    const Fiber &first = b->fibers[list[i - 1]], &f = b->fibers[list[i]];
    if (first.warp != f.warp || f.wait_pc == first.wait_pc) continue;
    SouffleFinding found = finding_at(&first, kDivergentBarrier, first.wait_pc);
    found.other_pc = souffle_word(uintptr_t(f.wait_pc));
    found.other = int(list[i]);
    record(b->launch, found);
  }
}

// Lanes of a warp that come to a shuffle or to __activemask() without others that should be there. A GPU need not wait for
// those either where they come later.
void note_partial_warp(Block* b, unsigned warp, unsigned here, unsigned missing) {
  if (!b->launch->spec->arena || !missing) return;
  const unsigned absent = warp * 32 + unsigned(__builtin_ctz(missing));
  const Fiber& first = b->fibers[warp * 32 + unsigned(__builtin_ctz(here))];
  SouffleFinding found = finding_at(&first, kPartialWarp, first.wait_pc);
  found.what = here;
  found.other = int(absent);
  if (int(absent) < b->threads) {
    const Fiber& f = b->fibers[absent];
    if (f.state != kReady && f.state != kExited) found.other_pc = souffle_word(uintptr_t(f.wait_pc));
  }
  record(b->launch, found);
}

// Lanes of one shuffle that came from different places of the text; as in compare_places.
void compare_shuffles(Block* b, unsigned warp, unsigned lanes) {
  if (!b->launch->spec->arena || !lanes) return;
  const Fiber& first = b->fibers[warp * 32 + unsigned(__builtin_ctz(lanes))];
  for (unsigned lane = first.lane + 1; lane < 32; ++lane) {
    if (!(lanes >> lane & 1)) continue;
    const Fiber& f = b->fibers[warp * 32 + lane];
    if (f.wait_pc == first.wait_pc) continue;
    SouffleFinding found = finding_at(&first, kDivergentShuffle, first.wait_pc);
    found.other_pc = souffle_word(uintptr_t(f.wait_pc));
    found.other = int(f.linear);
    record(b->launch, found);
    return;
  }
}

// The same for grid barriers, among the threads of a block and among blocks.
void note_grid_sync(Launch* launch, Block* b) {
  const Fiber& first = b->fibers[0];
  b->grid_pc = first.wait_pc;
  if (!launch->spec->arena) return;
  SouffleFinding found = finding_at(&first, kDivergentGridSync, first.wait_pc);
  for (int i = 1; i < b->threads && !found.other_pc; ++i)
    if (b->fibers[i].wait_pc != first.wait_pc) {
      found.other_pc = souffle_word(uintptr_t(b->fibers[i].wait_pc));
      found.other = int(b->index);
    }
  pthread_mutex_lock(&launch->lock);
  if (!launch->grid_pc) {
    launch->grid_pc = first.wait_pc;
    launch->grid_block = b->index;
  } else if (launch->grid_pc != first.wait_pc && !found.other_pc) {
    found.other_pc = souffle_word(uintptr_t(launch->grid_pc));
    found.other = int(launch->grid_block);
  }
  pthread_mutex_unlock(&launch->lock);
  if (found.other_pc) record(launch, found);
}

}  // namespace

extern "C" void souffle_check_slow(SouffleThread* t, void* address, unsigned bytes, int what, void* pc) {
  Fiber* self = (Fiber*)t;
  Worker* w = self->block->worker;
  const SouffleCheck* c = &w->check;
  Launch* launch = w->launch;
  bool write = what & kSouffleWrite;
  SouffleFinding found = finding_at(self, kOutOfBounds, pc);
  found.bytes = bytes;
  found.what = unsigned(what);
  souffle_word at = souffle_word((char*)address - c->arena);
  long long in_shared = (char*)address - c->shared_base;
  bool wild = false;
  if (at < c->arena_bytes) {
    int slot = int(at >> c->slot_bits);
    const SouffleRegion& r = c->regions[slot];
    souffle_word offset = at - r.begin;
    found.region = slot;
    found.offset = (long long)offset;
    if (what & kSouffleWithin) {
      found.kind = kRace;
      found.other = int(c->other);
    } else if (what & kSouffleRace) {
      found.kind = kRace;
      found.other = int((c->other - c->launch_begin) % c->stride);
      if (found.other == int(c->stride) - 1) found.other = -1;
    } else if (r.bytes == 0 || offset >= r.bytes || offset + bytes > r.bytes) {
      found.kind = kOutOfBounds;
    } else if (write && !r.writable) {
      found.kind = kReadOnly;
    } else if (!write && !(what & kSouffleNoValue)) {
      for (unsigned i = 0; i < bytes; ++i) {
        if (r.owners[offset + i] == r.tag) continue;
        found.kind = r.owners[offset + i] ? kForeign : kUninitialized;
        found.other = r.owners[offset + i];
        found.offset += i;
        break;
      }
      if (found.kind == kOutOfBounds) found.kind = kMisaligned;
    } else {
      found.kind = kMisaligned;
    }
  } else if (in_shared >= 0 && souffle_word(in_shared) < c->shared_bytes) {
    found.region = kRegionShared;
    found.offset = in_shared;
    if (what & kSouffleRace) {
      found.kind = kRace;
      found.other = int(c->other);
      record(launch, found);
      return;
    }
    bool outside = souffle_word(in_shared) + bytes > c->shared_bytes, empty = false;
    for (unsigned i = 0; !outside && i < bytes; ++i) {
      outside |= c->shared_state[in_shared + i] == kSharedOutside;
      if (c->shared_state[in_shared + i] == kSharedEmpty && !empty) {
        empty = true;
        found.offset = in_shared + i;
      }
    }
    if (outside) found.offset = in_shared;
    found.kind = outside ? kOutOfBounds : empty && !write ? kUninitialized : kMisaligned;
  } else {
    // Tables of constants that the text itself holds lie in its library.
    sig_atomic_t in_fiber = w->in_fiber;
    w->in_fiber = 0;
    Dl_info own, other;
    bool known = dladdr((void*)launch->spec->entry, &own) && dladdr(address, &other) && own.dli_fbase == other.dli_fbase;
    w->in_fiber = in_fiber;
    if (known) return;
    wild = true;
    long long near = 1 << 20;
    if (in_shared >= -near && in_shared < (long long)c->shared_bytes + near) {
      found.region = kRegionShared;
      found.offset = in_shared;
    } else {
      found.offset = (long long)uintptr_t(address);
    }
  }
  record(launch, found);
  // Everything else goes on in guard memory; here the access itself would hit the process.
  if (wild)
    fail_fiber(self, "%s of %u bytes at %p, which is no memory of the launch", write ? "write" : "read", bytes, address);
}

// Memory for the buffers of checked launches: slots of address space of which only touched pages take memory.
extern "C" char* souffle_reserve(uint64_t bytes) {
  void* p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return p == MAP_FAILED ? nullptr : (char*)p;
}
extern "C" int souffle_map_file(char* at, uint64_t bytes, int file) {
  return mmap(at, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, file, 0) == MAP_FAILED;
}
extern "C" int souffle_release(char* base, uint64_t bytes) { return munmap(base, bytes); }

#endif
