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

void enter_phase(Worker* w, unsigned phase) {
  if (!w->launch->spec->arena) return;
  SouffleCheck* c = &w->check;
  c->phase_begin = w->launch->spec->arena->epoch + phase * (w->launch->blocks + 1);
  c->many = c->phase_begin + w->launch->blocks;
}

void enter_block(Worker* w, const Block* b) {
  w->check.epoch = w->check.phase_begin + b->index;
  w->check.clocks = b->clocks;
  w->check.shared_order = b->shared_order;
}

// The listed threads have met: their warps know of all that any of them has done.
void meet_warps(Block* b, const unsigned* list, unsigned count) {
  if (!b->clocks) return;
  bool here[kSouffleWarps] = {};
  for (unsigned i = 0; i < count; ++i) here[list[i] / 32] = true;
  unsigned known[kSouffleWarps] = {};
  for (int w = 0; w < b->warp_count; ++w) {
    if (!here[w]) continue;
    unsigned* row = b->clocks + kSouffleWarps * w;
    ++row[w];
    for (int u = 0; u < b->warp_count; ++u)
      if (row[u] > known[u]) known[u] = row[u];
  }
  for (int w = 0; w < b->warp_count; ++w)
    if (here[w]) memcpy(b->clocks + kSouffleWarps * w, known, size_t(b->warp_count) * sizeof(unsigned));
}

bool allocate_checks(const Worker* w, Block* b) {
  if (!b->launch->spec->arena) return true;
  b->clocks = (unsigned*)malloc(kSouffleWarps * kSouffleWarps * sizeof(unsigned));
  b->shared_order = (SouffleOrder*)calloc(w->shared_size / 2 + 8, sizeof(SouffleOrder));
  return b->clocks && b->shared_order;
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
    if (what & kSouffleRace) {
      found.kind = kRace;
      found.other = c->other == c->many ? -1 : int(c->other - c->phase_begin);
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
      found.other = int(c->other % kSouffleWarps);
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
