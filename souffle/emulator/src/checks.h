// The runtime's side of checked texts (souffle_check.h): a worker's shadow of shared memory, the epochs of blocks, and the
// record of what was found. Part of fiber_runtime.cpp, kept apart because nothing else there depends on it.
#ifndef SOUFFLE_CHECKS_H
#define SOUFFLE_CHECKS_H

#include <dlfcn.h>

namespace {

// Beyond these the epochs and sets of a memory start again; a launch has at least as many more of each.
constexpr unsigned kLastEpoch = kSouffleSet / 2, kLastSet = kSouffleSet + kLastEpoch;

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
    c->sets_begin = w->launch->readers.begin;
    c->stride = w->launch->blocks;
    c->block = b->index;
    c->known = b->known;
    c->version = b->version;
    c->alone = w->launch->workers == 1;
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

// What a block knows has changed.
void note_change(Block* b) { b->version = __atomic_add_fetch(&b->launch->versions, 1, __ATOMIC_RELAXED); }

// All blocks have met.
void meet_blocks(Block* b, unsigned clock) {
  b->clock = b->floor = clock;
  for (unsigned i = 0; b->known && i < b->launch->blocks; ++i) b->known[i] = clock;
  note_change(b);
}

// The clock after `clock`. Where there are no epochs left, the order of blocks is not judged any more.
unsigned next_clock(Launch* launch, unsigned clock) {
  if (launch->spec->arena && clock + 1 >= launch->most_clocks) {
    launch->synchronizes = 1;
    return clock;
  }
  return clock + 1;
}

bool has_vector(Block* b) {
  if (b->known) return true;
  b->known = (unsigned*)malloc(b->launch->blocks * sizeof(unsigned));
  for (unsigned i = 0; b->known && i < b->launch->blocks; ++i) b->known[i] = b->floor;
  return b->known;
}

unsigned slot_of(const void* address, unsigned slots) {
  return unsigned(uint64_t(uintptr_t(address)) * 0x9E3779B97F4A7C15ull >> 32) & (slots - 1);
}

// What is handed on at an address; the launch's lock is held.
Handed* handed_at(Launch* launch, const void* address) {
  unsigned slots = launch->handed_slots;
  for (unsigned i = slots ? slot_of(address, slots) : 0; slots && launch->handed[i].address; i = (i + 1) & (slots - 1))
    if (launch->handed[i].address == address) return &launch->handed[i];
  if (2 * (launch->handed_count + 1) > slots) {
    unsigned more = slots ? 2 * slots : 64;
    auto* all = (Handed*)calloc(more, sizeof(Handed));
    if (!all) return nullptr;
    for (unsigned k = 0; k < slots; ++k) {
      if (!launch->handed[k].address) continue;
      unsigned i = slot_of(launch->handed[k].address, more);
      while (all[i].address) i = (i + 1) & (more - 1);
      all[i] = launch->handed[k];
    }
    free(launch->handed);
    launch->handed = all;
    launch->handed_slots = slots = more;
  }
  auto* clocks = (unsigned*)calloc(launch->blocks, sizeof(unsigned));
  if (!clocks) return nullptr;
  unsigned i = slot_of(address, slots);
  while (launch->handed[i].address) i = (i + 1) & (slots - 1);
  launch->handed[i] = Handed{address, true, clocks, nullptr, 0, nullptr};
  ++launch->handed_count;
  return &launch->handed[i];
}

void free_rounds(Handed* handed) {
  for (unsigned i = 0; i < handed->rounds; ++i) free(handed->round[i]);
  free(handed->round);
  free(handed->arrivals);
  handed->arrivals = nullptr;
  handed->round = nullptr;
  handed->rounds = 0;
}

void free_handed(Launch* launch) {
  for (unsigned i = 0; i < launch->handed_slots; ++i) {
    free_rounds(&launch->handed[i]);
    free(launch->handed[i].clocks);
  }
  free(launch->handed);
}

void take_larger(unsigned* to, const unsigned* from, unsigned count) {
  for (unsigned i = 0; i < count; ++i)
    if (from[i] > to[i]) to[i] = from[i];
}

// One more arrival of a block at a counter.
bool note_arrival(Block* b, Handed* handed) {
  const unsigned blocks = b->launch->blocks;
  if (!handed->arrivals) handed->arrivals = (unsigned*)calloc(blocks, sizeof(unsigned));
  if (!handed->arrivals) return false;
  const unsigned turn = handed->arrivals[b->index]++;
  if (turn == handed->rounds) {
    if (!(turn & (turn - 1)) || !turn) {  // the room doubles
      auto* round = (unsigned**)realloc((void*)handed->round, (turn ? 2 * turn : 1) * sizeof(unsigned*));
      if (!round) return false;
      handed->round = round;
    }
    handed->round[turn] = (unsigned*)calloc(blocks, sizeof(unsigned));
    if (!handed->round[turn]) return false;
    if (turn) memcpy(handed->round[turn], handed->round[turn - 1], blocks * sizeof(unsigned));
    ++handed->rounds;
  }
  for (unsigned i = turn; i < handed->rounds; ++i) take_larger(handed->round[i], b->known, blocks);
  return true;
}

bool give_knowledge(Block* b, const void* address, int how) {
  Launch* launch = b->launch;
  Handed* handed = has_vector(b) ? handed_at(launch, address) : nullptr;
  if (!handed) return false;
  b->known[b->index] = b->clock = next_clock(launch, b->clock);
  note_change(b);
  if (b->clock > launch->last_clock) launch->last_clock = b->clock;
  if (how == kSouffleStores)
    memcpy(handed->clocks, b->known, launch->blocks * sizeof(unsigned));
  else
    take_larger(handed->clocks, b->known, launch->blocks);
  if (how != kSouffleCounts && handed->counter) {
    handed->counter = false;
    free_rounds(handed);
  }
  return !handed->counter || note_arrival(b, handed);
}

bool take_knowledge(Block* b, const void* address) {
  Launch* launch = b->launch;
  Handed* handed = has_vector(b) ? handed_at(launch, address) : nullptr;
  if (!handed) return false;
  const unsigned own = handed->counter && handed->arrivals ? handed->arrivals[b->index] : 0;
  const unsigned* taken = own ? handed->round[own - 1] : handed->clocks;
  // What it now knows of all others; a block that is alone knows of itself.
  unsigned floor = ~0u;
  bool more = false;
  for (unsigned i = 0; i < launch->blocks; ++i) {
    if (i == b->index) continue;
    more |= taken[i] > b->known[i];
    if (taken[i] > b->known[i]) b->known[i] = taken[i];
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
  if (more) note_change(b);
  return true;
}

// ---- sets of readers ----
//
// Blocks that read an element and do not know of each other, by block, each with the clock of its read. Equal sets are one,
// which no read changes: an element whose readers become more is given the number of another set. Sets go at grid barriers
// of all blocks, since numbers below the first of a phase are known to everybody, and where they take much memory, those
// whose numbers no element holds.
//
// Where a text releases nothing, only grid barriers order blocks. Then two readers say as much as all of them: one of the two
// is not the writer.

size_t bytes_of(const ReaderSet* set) { return sizeof(ReaderSet) + set->count * sizeof(Reader); }

uint64_t hash_of(const Reader* members, unsigned count) {
  uint64_t hash = count;
  for (unsigned i = 0; i < count; ++i)
    hash = (hash ^ (uint64_t(members[i].clock) << 32 | members[i].block)) * 0x9E3779B97F4A7C15ull, hash ^= hash >> 29;
  return hash;
}

const ReaderSet* set_of(const ReaderSets& all, unsigned readers) {
  return readers - all.begin < all.count ? all.set[readers - all.begin] : nullptr;
}

size_t elements_of(const SouffleRegion& r) { return r.order && r.bytes ? (r.bytes - 1 >> r.element_shift) + 1 : 0; }

// After a grid barrier of all, or at the end.
void forget_sets(ReaderSets& all) {
  for (unsigned i = 0; i < all.count; ++i) free(all.set[i]);
  free(all.set);
  free(all.table);
  free(all.scratch);
  const unsigned next = all.begin + all.count;
  all = ReaderSets{};
  all.begin = next;
}

// Make the table of sets by content anew, with so many slots.
bool fill_table(ReaderSets& all, unsigned slots) {
  auto* table = (unsigned*)calloc(slots, sizeof(unsigned));
  if (!table) return false;
  free(all.table);
  all.table = table;
  all.slots = slots;
  for (unsigned k = 0; k < all.count; ++k) {
    if (!all.set[k]) continue;
    unsigned i = unsigned(all.set[k]->hash) & (slots - 1);
    while (table[i]) i = (i + 1) & (slots - 1);
    table[i] = k + 1;
  }
  return true;
}

// Free the sets that no element has, of a launch with one worker.
bool collect_sets(Launch* launch, SouffleCheck* c) {
  ReaderSets& all = launch->readers;
  const SouffleArena* arena = launch->spec->arena;
  for (unsigned slot = 0; slot < arena->slots; ++slot) {
    const SouffleRegion& r = arena->regions[slot];
    for (size_t k = 0, n = elements_of(r); k < n; ++k) {
      const unsigned at = unsigned(r.order[k] >> 32) - all.begin;
      if (at < all.count && all.set[at]) all.set[at]->held = true;
    }
  }
  all.free = 0;
  for (unsigned i = 0; i < all.count; ++i) {
    ReaderSet* set = all.set[i];
    if (set && !set->held) {
      all.bytes -= bytes_of(set);
      --all.live;
      free(set);
      all.set[i] = set = nullptr;
    }
    if (set)
      set->held = false;
    else
      ++all.free;
  }
  all.next_free = 0;
  all.collect_at = 2 * all.bytes > kFirstCollection ? 2 * all.bytes : kFirstCollection;
  memset(c->joined, 0, sizeof(c->joined));
  memset(c->judged, 0, sizeof(c->judged));
  return fill_table(all, all.slots);
}

// The number of a set, or 0 where there is no memory or no number for it.
unsigned number_of(Launch* launch, SouffleCheck* c, const Reader* members, unsigned count) {
  ReaderSets& all = launch->readers;
  const uint64_t hash = hash_of(members, count);
  for (unsigned i = unsigned(hash) & (all.slots - 1); all.slots && all.table[i]; i = (i + 1) & (all.slots - 1)) {
    const ReaderSet* set = all.set[all.table[i] - 1];
    if (set->hash == hash && set->count == count && !memcmp(set->member, members, count * sizeof(Reader)))
      return all.begin + all.table[i] - 1;
  }
  if (launch->spec->releases && all.bytes > all.collect_at && !collect_sets(launch, c)) return 0;
  if (2 * (all.live + 1) > all.slots && !fill_table(all, all.slots ? 2 * all.slots : 256)) return 0;
  unsigned at = all.count;
  if (all.free) {
    for (at = all.next_free; all.set[at];) ++at;
    all.next_free = at + 1;
  } else if (all.count == all.room) {
    unsigned room = all.room ? 2 * all.room : 256;
    auto* set = (ReaderSet**)realloc((void*)all.set, room * sizeof(ReaderSet*));
    if (!set) return 0;
    all.set = set;
    all.room = room;
  }
  if (all.begin + at == ~0u) return 0;
  auto* set = (ReaderSet*)malloc(sizeof(ReaderSet) + count * sizeof(Reader));
  if (!set) return 0;
  set->hash = hash;
  set->count = count;
  set->held = false;
  memcpy(set->member, members, count * sizeof(Reader));
  all.set[at] = set;
  all.bytes += bytes_of(set);
  ++all.live;
  if (at == all.count)
    ++all.count;
  else
    --all.free;
  unsigned i = unsigned(hash) & (all.slots - 1);
  while (all.table[i]) i = (i + 1) & (all.slots - 1);
  all.table[i] = at + 1;
  return all.begin + at;
}

// Whether a read since the last grid barrier of all may not be before what the block does now.
bool is_unknown(const Block* b, const Reader& r) {
  return r.block != b->index && (!b->known || r.clock >= b->known[r.block]);
}

// Readers with the block's own read; the launch's lock is held. 0: there is no memory.
unsigned join_readers(Block* b, SouffleCheck* c, unsigned readers) {
  Launch* launch = b->launch;
  ReaderSets& all = launch->readers;
  Reader noted{}, own{b->index, b->clock};
  const Reader* old = &noted;
  unsigned count = 1;
  if (readers < kSouffleSet) {
    noted = Reader{(readers - c->launch_begin) % c->stride, (readers - c->launch_begin) / c->stride};
  } else {
    const ReaderSet* set = set_of(all, readers);
    if (!set || !launch->spec->releases) return set ? readers : c->epoch;
    old = set->member;
    count = set->count;
  }
  if (all.scratch_room <= count) {
    free(all.scratch);
    all.scratch_room = 2 * count;
    all.scratch = (Reader*)malloc(all.scratch_room * sizeof(Reader));
    if (!all.scratch) return all.scratch_room = 0;
  }
  unsigned n = 0, k = 0;
  for (; k < count && old[k].block < own.block; ++k)
    if (is_unknown(b, old[k])) all.scratch[n++] = old[k];
  all.scratch[n++] = own;
  for (; k < count; ++k)
    if (is_unknown(b, old[k])) all.scratch[n++] = old[k];
  return n == 1 ? c->epoch : number_of(launch, c, all.scratch, n);
}

unsigned judge_readers(Block* b, SouffleCheck* c, unsigned readers) {
  const ReaderSet* set = set_of(b->launch->readers, readers);
  for (unsigned i = 0; set && i < set->count; ++i)
    if (is_unknown(b, set->member[i])) return c->launch_begin + set->member[i].clock * c->stride + set->member[i].block;
  return 0;
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

extern "C" unsigned souffle_join_readers(SouffleThread* t, unsigned readers) {
  Fiber* self = (Fiber*)t;
  Worker* w = self->block->worker;
  SouffleCheck* c = &w->check;
  w->in_fiber = 0;  // as in set_failure
  pthread_mutex_lock(&w->launch->lock);
  unsigned made = join_readers(self->block, c, readers);
  pthread_mutex_unlock(&w->launch->lock);
  w->in_fiber = 1;
  if (!made) fail_fiber(self, "no memory for the order of blocks");
  c->joined[readers % kSouffleMade] = SouffleMade{readers, c->version, made};
  return made;
}

extern "C" unsigned souffle_judge_readers(SouffleThread* t, unsigned readers) {
  Fiber* self = (Fiber*)t;
  Worker* w = self->block->worker;
  w->in_fiber = 0;
  pthread_mutex_lock(&w->launch->lock);
  unsigned made = judge_readers(self->block, &w->check, readers);
  pthread_mutex_unlock(&w->launch->lock);
  w->in_fiber = 1;
  w->check.judged[readers % kSouffleMade] = SouffleMade{readers, w->check.version, made};
  return made;
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
