// The fiber runtime of the CPU device: every CUDA thread is a fiber, a barrier is a switch to another fiber.
//
// A worker is one OS thread with one set of fiber stacks. It holds one block at a time; a block that waits at a grid
// barrier is swapped out by copying the used part of its stacks and its shared memory (the thread-local segment of the
// kernel's library), so that memory does not grow with grid x block x stack size and every stack keeps its guard region.
// A block never changes its worker: fibers may hold addresses of thread-local storage.
#include <errno.h>
#include <link.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#if !defined(__x86_64__) || defined(SOUFFLE_UCONTEXT)
#include <ucontext.h>
#define SOUFFLE_USE_UCONTEXT 1
#endif

#include "souffle_abi.h"
#include "souffle_check.h"

namespace {

constexpr size_t kStackBytes = 256 << 10;
constexpr size_t kGuardBytes = 64 << 10;
constexpr int kMaxThreads = 1024;
constexpr int kNamedBarriers = 16;
constexpr unsigned char kPoison = 0xFF;  // NaN in every floating-point type

enum State : unsigned char { kReady, kBarrier, kGrid, kWarp, kActiveMask, kExited };

struct Block;
struct Worker;
struct Launch;

struct Copy {
  char* destination;
  const char* source;
  unsigned bytes, source_bytes, group;
};

struct Fiber : SouffleThread {
  Block* block;
  void* sp;
  State state;
  bool spinning;
  int wait_id;
  const char* wait_what;
  int wait_site;  // the line of an __activemask
  void* wait_pc;  // where in the kernel's library it waits
  unsigned wait_mask;
  unsigned result;
  // Asynchronous copies in issue order; [copy_head, copy_count) are pending.
  Copy* copies;
  unsigned copy_head, copy_count, copy_capacity, open_group, done_groups;
  char* saved;  // where the used part of the stack lies while the block is swapped out
  size_t saved_bytes;
#ifdef SOUFFLE_USE_UCONTEXT
  ucontext_t context;
#endif
};

struct Barrier {
  int expected, arrived, sum;
};

struct Group {
  unsigned mask, arrived;
  const char* what;
  SouffleWarpFunction function;
};

struct Warp {
  unsigned alive;
  int groups;
  Group group[32];
  void* payload[32];
};

struct Block {
  Launch* launch;
  Worker* worker;
  unsigned index;
  int threads, live, at_grid, spinners, masks_wanted;
  bool started, finished, preempted, grid_waiting;
  // Of checked texts: order among blocks (checks.h), then among the warps of this one.
  unsigned clock, floor, rounds, version;
  unsigned* known;
  unsigned* clocks;
  unsigned time;
  SouffleWarpOrder* shared_order;
  void* grid_pc;
  Fiber* fibers;
  unsigned* queue;  // ring of ready fibers
  unsigned head, count;
  Barrier barriers[kNamedBarriers];
  Warp* warps;
  int warp_count;
  uint64_t random, barrier_count, events;
  char* save;
  size_t save_capacity;
};

struct Stacks {
  char* base;
  int ready;  // how many of them are accessible
  Stacks* next;
};

struct Worker {
  Launch* launch;
  int id;
  pthread_t thread;
  Stacks* stacks;
  void* sp;
  Fiber* current;
  Block* resident;
  unsigned scratch[kMaxThreads];  // not on a fiber's stack, whose used part is copied
  volatile sig_atomic_t in_fiber;
  sigjmp_buf escape;
  char* shared_base;
  size_t shared_size;
  char* dynamic_base;
  int signal_number;
  void* fault_address;
  SouffleCheck check;
#ifdef SOUFFLE_USE_UCONTEXT
  ucontext_t context;
#endif
};

}  // namespace

extern "C" {
struct SouffleLaunchSpec {
  const char* kernel;
  void (*entry)(const SouffleArg*);
  const SouffleArg* args;
  unsigned grid[3];
  unsigned block[3];
  uint64_t shared_bytes;
  uint64_t dynamic_capacity;
  uint64_t seed;
  int cooperative;
  int shuffled;
  int workers;
  double timeout_seconds;
  double spin_seconds;
  char* (*dynamic_shared)();
  char* (*shared_anchor)();
  // Of checked texts; null and 0 otherwise.
  SouffleArena* arena;
  SouffleTraffic* traffic;         // for each slot of the arena
  const uint64_t* shared_range;    // pairs: offset in the thread-local segment, bytes
  SouffleFinding* finding;
  unsigned shared_ranges;
  int finding_capacity;
  int releases;  // whether the text has releases of memory, so that blocks are not ordered by grid barriers alone
  // Of every text: the groups of threads of the block, or blocks, where nothing could go on.
  SouffleWait* wait;
  int wait_capacity;
};

struct SouffleLaunchResult {
  int failed;
  int waits;
  uint64_t grid_syncs;
  uint64_t block_barriers;
  uint64_t fault_address;
  double seconds;
  SouffleTraffic shared;
  int findings;
  int synchronizes;  // the text orders its blocks by memory too: races of blocks were not looked for
  uint64_t findings_left_out;
  uint64_t half_barriers;  // bar.arrive is there: what it orders within a block is not followed
  char message[2048];
};
}

namespace {

// What blocks have released at an address: all of it together, and where only additions did, that of each block's arrivals
// up to the first, the second, ... of them.
struct Handed {
  const void* address;
  bool counter;
  unsigned* clocks;
  unsigned* arrivals;  // of each block
  unsigned rounds;
  unsigned** round;
};

// Sets of blocks that read the same element (checks.h).
struct Reader {
  unsigned block, clock;
};
struct ReaderSet {
  uint64_t hash;
  unsigned count;
  bool held;
  Reader member[];
};
constexpr size_t kFirstCollection = size_t(16) << 20;  // bytes
struct ReaderSets {
  unsigned begin;  // the number of the first
  unsigned count, room, live, free, next_free, slots, scratch_room;
  ReaderSet** set;
  unsigned* table;
  Reader* scratch;
  size_t bytes, collect_at = kFirstCollection;
};

struct Launch {
  const SouffleLaunchSpec* spec;
  SouffleLaunchResult* result;
  unsigned blocks;
  int threads, workers;
  unsigned* order;
  Block* resident_blocks;  // cooperative: one record per block
  pthread_mutex_t lock;
  pthread_cond_t changed;
  int failed;
  unsigned next_block;
  int arrived_workers, finished_workers;
  unsigned round, round_done, round_grid, last_done, last_grid;
  uint64_t grid_syncs, barrier_count, events;
  int synchronizes, half_barriers, claimed, fences, relaxed;
  void* grid_pc;  // where the first block of this phase reached its grid barrier
  unsigned grid_block;
  // Of checked texts: the largest clock of any block, that of the last grid barrier, and what was released where.
  unsigned last_clock, grid_clock, most_clocks, versions, handed_count, handed_slots;
  Handed* handed;
  ReaderSets readers;
  uint64_t counted_syncs;  // rounds of barriers that count in memory
  uint64_t timer;          // nanoseconds, as the text sees them
  int timed;               // whether it has looked at them
  uint64_t* idle;          // of each worker: `events` + 1 where its blocks have only polled since, kGone, or 0
};

const uint64_t kGone = ~uint64_t(0);  // a worker that waits for the others, or has ended

__thread Worker* tl_worker;
#ifdef SOUFFLE_USE_UCONTEXT
__thread Fiber* tl_current;
#endif

double now() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return double(t.tv_sec) + double(t.tv_nsec) * 1e-9;
}

uint64_t next_random(uint64_t& state) {  // splitmix64
  uint64_t z = (state += 0x9E3779B97F4A7C15ull);
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
  return z ^ (z >> 31);
}

void shuffle(unsigned* values, unsigned count, uint64_t& state) {
  for (unsigned i = count; i > 1; --i) {
    unsigned j = unsigned(next_random(state) % i);
    unsigned t = values[i - 1];
    values[i - 1] = values[j];
    values[j] = t;
  }
}

bool has_failed(Launch* launch) { return __atomic_load_n(&launch->failed, __ATOMIC_RELAXED) != 0; }

void set_failure(Launch* launch, const char* format, ...) __attribute__((format(printf, 2, 3)));
void set_failure(Launch* launch, const char* format, ...) {
  // The watchdog must not tear a fiber out of here while it holds the lock.
  sig_atomic_t in_fiber = tl_worker ? tl_worker->in_fiber : 0;
  if (tl_worker) tl_worker->in_fiber = 0;
  pthread_mutex_lock(&launch->lock);
  if (!launch->failed) {
    va_list list;
    va_start(list, format);
    vsnprintf(launch->result->message, sizeof(launch->result->message), format, list);
    va_end(list);
    launch->result->failed = 1;
    __atomic_store_n(&launch->failed, 1, __ATOMIC_RELAXED);
  }
  pthread_cond_broadcast(&launch->changed);
  pthread_mutex_unlock(&launch->lock);
  if (tl_worker) tl_worker->in_fiber = in_fiber;
}

// ---- stacks -------------------------------------------------------------------------------------------------------

// Two mappings for each stack that is accessible, of the 65,530 that Linux gives a process by default.
constexpr int kMostStacks = 20000;

pthread_mutex_t g_stacks_lock = PTHREAD_MUTEX_INITIALIZER;
pthread_cond_t g_stacks_given = PTHREAD_COND_INITIALIZER;
Stacks* g_free_stacks;
int g_ready_stacks, g_lent_sets;

void unmap(Stacks* s) {
  munmap(s->base, (kStackBytes + kGuardBytes) * kMaxThreads);
  g_ready_stacks -= s->ready;
  free(s);
}

// A free set of stacks for so many threads, made where there is none and room for it; null otherwise.
Stacks* find_stacks(int threads) {
  Stacks** best = nullptr;
  for (Stacks** s = &g_free_stacks; *s; s = &(*s)->next)
    if (!best || (*s)->ready > (*best)->ready) best = s;
  Stacks* s = best ? *best : nullptr;
  if (s) *best = s->next;
  while (g_free_stacks && g_ready_stacks + threads - (s ? s->ready : 0) > kMostStacks) {
    Stacks* other = g_free_stacks;
    g_free_stacks = other->next;
    unmap(other);
  }
  size_t each = kStackBytes + kGuardBytes;
  if (!s) {
    void* base = mmap(nullptr, each * kMaxThreads, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (base == MAP_FAILED) return nullptr;
    s = (Stacks*)malloc(sizeof(Stacks));
    s->base = (char*)base;
    s->ready = 0;
  }
  while (s->ready < threads && g_ready_stacks < kMostStacks &&
         mprotect(s->base + each * size_t(s->ready) + kGuardBytes, kStackBytes, PROT_READ | PROT_WRITE) == 0) {
    ++s->ready;
    ++g_ready_stacks;
  }
  if (s->ready >= threads) return s;
  unmap(s);
  return nullptr;
}

// Takes up to so many sets and gives their number. A launch that has one ends, so one that gets none waits for that;
// 0 only where there will never be one.
int take_stacks(Stacks** taken, int wanted, int threads) {
  pthread_mutex_lock(&g_stacks_lock);
  int count = 0;
  for (;;) {
    while (count < wanted && (taken[count] = find_stacks(threads))) ++count;
    if (count > 0 || g_lent_sets == 0) break;
    pthread_cond_wait(&g_stacks_given, &g_stacks_lock);
  }
  g_lent_sets += count;
  pthread_mutex_unlock(&g_stacks_lock);
  return count;
}

void give_stacks(Stacks* const* given, int count) {
  pthread_mutex_lock(&g_stacks_lock);
  for (int i = 0; i < count; ++i) {
    given[i]->next = g_free_stacks;
    g_free_stacks = given[i];
  }
  g_lent_sets -= count;
  pthread_cond_broadcast(&g_stacks_given);
  pthread_mutex_unlock(&g_stacks_lock);
}

// The tops are staggered, for equal low address bits would make all fibers compete for the same cache sets.
char* stack_top(Stacks* s, int i) {
  char* end = s->base + (kStackBytes + kGuardBytes) * (size_t(i) + 1);
  return end - (size_t(i) * 832 % 8192 & ~size_t(63));
}

// ---- switching ----------------------------------------------------------------------------------------------------

#ifndef SOUFFLE_USE_UCONTEXT
extern "C" void souffle_switch(void** save, void* load);
extern "C" void souffle_fiber_start();
extern "C" __attribute__((used, visibility("hidden"))) void souffle_fiber_exit(Fiber* self);
asm(R"(
.text
.p2align 4
.globl souffle_switch
.hidden souffle_switch
.type souffle_switch,@function
souffle_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size souffle_switch, .-souffle_switch
.globl souffle_fiber_start
.hidden souffle_fiber_start
.type souffle_fiber_start,@function
souffle_fiber_start:
  subq $8, %rsp
  movq %r13, %rdi
  call *%r12
  movq %r15, %rdi
  call souffle_fiber_exit
  ud2
.size souffle_fiber_start, .-souffle_fiber_start
)");
#else
extern "C" void souffle_fiber_exit(Fiber* self);
#endif

void to_fiber(Fiber* from, Fiber* to) {
  Worker* w = to->block->worker;
  w->current = to;
#ifndef SOUFFLE_USE_UCONTEXT
  souffle_switch(from ? &from->sp : &w->sp, to->sp);
#else
  if (from) from->sp = (char*)__builtin_frame_address(0) - 1024;
  tl_current = to;
  swapcontext(from ? &from->context : &w->context, &to->context);
#endif
}

void to_scheduler(Fiber* from) {
  Worker* w = from->block->worker;
  w->current = nullptr;
#ifndef SOUFFLE_USE_UCONTEXT
  souffle_switch(&from->sp, w->sp);
#else
  from->sp = (char*)__builtin_frame_address(0) - 1024;
  swapcontext(&from->context, &w->context);
#endif
}

#ifdef SOUFFLE_USE_UCONTEXT
void ucontext_main(unsigned low, unsigned high) {
  Fiber* self = (Fiber*)((uintptr_t(high) << 32) | uintptr_t(low));
  const SouffleLaunchSpec* spec = self->block->launch->spec;
  spec->entry(spec->args);
  souffle_fiber_exit(self);
}
#endif

void prepare_fiber(Fiber* f, char* top) {
#ifndef SOUFFLE_USE_UCONTEXT
  const SouffleLaunchSpec* spec = f->block->launch->spec;
  void** sp = (void**)(uintptr_t(top) & ~uintptr_t(15)) - 8;
  sp[0] = f;                         // r15, which compiled kernels hold as the current thread
  sp[1] = nullptr;                   // r14
  sp[2] = (void*)spec->args;         // r13
  sp[3] = (void*)spec->entry;        // r12
  sp[4] = nullptr;                   // rbx
  sp[5] = nullptr;                   // rbp
  sp[6] = (void*)&souffle_fiber_start;
  sp[7] = nullptr;
  f->sp = sp;
#else
  getcontext(&f->context);
  char* bottom = f->block->worker->stacks->base + (kStackBytes + kGuardBytes) * f->linear + kGuardBytes;
  f->context.uc_stack.ss_sp = bottom;
  f->context.uc_stack.ss_size = size_t(top - bottom);
  f->context.uc_link = nullptr;
  makecontext(&f->context, (void (*)())ucontext_main, 2, unsigned(uintptr_t(f)), unsigned(uintptr_t(f) >> 32));
  f->sp = top - 2048;
#endif
}

// ---- the ready queue ----------------------------------------------------------------------------------------------

void push_back(Block* b, unsigned i) {
  b->fibers[i].state = kReady;
  b->queue[(b->head + b->count++) % unsigned(b->threads)] = i;
}

void push_front(Block* b, unsigned i) {
  b->fibers[i].state = kReady;
  b->head = (b->head + unsigned(b->threads) - 1) % unsigned(b->threads);
  b->queue[b->head] = i;
  ++b->count;
}

Fiber* pop(Block* b) {
  if (b->count == 0 || int(b->count) == b->spinners || b->preempted) return nullptr;
  unsigned i = b->queue[b->head];
  b->head = (b->head + 1) % unsigned(b->threads);
  --b->count;
  Fiber* f = &b->fibers[i];
  if (f->spinning) {
    f->spinning = false;
    --b->spinners;
  }
  return f;
}

// Another fiber runs; returns when `self` is chosen again.
void dispatch(Fiber* self) {
  Fiber* to = pop(self->block);
  if (to == self) return;
  if (to)
    to_fiber(self, to);
  else
    to_scheduler(self);
}

// The threads of a block in the order of their warps, which is drawn; those of a warp stay in the order that they have.
void warp_by_warp(Block* b) {
  unsigned order[kMaxThreads / 32], starts[kMaxThreads / 32], sorted[kMaxThreads];
  const unsigned warps = unsigned(b->warp_count);
  for (unsigned i = 0; i < warps; ++i) order[i] = i;
  shuffle(order, warps, b->random);
  for (unsigned i = 0, next = 0; i < warps; ++i) {
    starts[order[i]] = next;
    next += b->threads - int(order[i]) * 32 < 32 ? unsigned(b->threads) - order[i] * 32 : 32;
  }
  for (unsigned i = 0; i < b->count; ++i) sorted[starts[b->queue[i] / 32]++] = b->queue[i];
  memcpy(b->queue, sorted, b->count * sizeof *sorted);
}

void push_all(Block* b, unsigned* list, unsigned count, bool front) {
  if (b->launch->spec->shuffled) {
    shuffle(list, count, b->random);
    // With half of the seeds those that have waited for each other nearly always go on at once, so that a warp, or some
    // threads with a barrier of their own, are far ahead of others.
    const unsigned behind = b->launch->spec->seed & 1 ? 1 : 63;
    front = next_random(b->random) & behind;
  }
  if (front)
    for (unsigned i = count; i > 0; --i) push_front(b, list[i - 1]);
  else
    for (unsigned i = 0; i < count; ++i) push_back(b, list[i]);
}

// ---- barriers -----------------------------------------------------------------------------------------------------

void place(const Fiber* f, char* out, size_t size) {
  snprintf(out, size, "thread (%u, %u, %u)", f->thread_index.x, f->thread_index.y, f->thread_index.z);
}

#define SOUFFLE_FAIL_FORMAT __attribute__((format(printf, 2, 3), noreturn))
void fail_fiber(Fiber* self, const char* format, ...) SOUFFLE_FAIL_FORMAT;
void fail_fiber(Fiber* self, const char* format, ...) {
  char text[1024], where[96];
  va_list list;
  va_start(list, format);
  vsnprintf(text, sizeof(text), format, list);
  va_end(list);
  place(self, where, sizeof(where));
  set_failure(self->block->launch, "kernel %s, block (%u, %u, %u), %s: %s", self->block->launch->spec->kernel,
              self->block_index.x, self->block_index.y, self->block_index.z, where, text);
  for (;;) to_scheduler(self);
}

}  // namespace
#include "checks.h"
namespace {

void report_broken_warp(Block* b, int id, unsigned warp, int here, int alive);
bool claim_failure(Launch* launch);
void collect_waits(Block* b);

// A barrier counts warps: that of which some lanes are elsewhere would count as a whole.
bool whole_warps(Block* b, const unsigned* list, unsigned count, int id) {
  for (unsigned i = 0, last = 0; i < count; i = last) {
    const unsigned warp = list[i] / 32;
    while (last < count && list[last] / 32 == warp) ++last;
    const int alive = __builtin_popcount(b->warps[warp].alive);
    if (int(last - i) == alive) continue;
    report_broken_warp(b, id, warp, int(last - i), alive);
    return false;
  }
  return true;
}

void release_barrier(Block* b, int id) {
  Barrier& barrier = b->barriers[id];
  unsigned *list = b->worker->scratch, count = 0;
  for (int i = 0; i < b->threads; ++i) {
    Fiber& f = b->fibers[i];
    if (f.state == kBarrier && f.wait_id == id) {
      f.result = unsigned(barrier.sum);
      list[count++] = unsigned(i);
    }
  }
  if (!whole_warps(b, list, count, id)) return;
  meet_warps(b, list, count);
  // Producers and consumers may meet at a named barrier from different places; at __syncthreads nobody may.
  if (id == 0 && int(count) == b->threads)
    compare_places(b, list, count);
  else
    compare_lanes(b, list, count);
  barrier = Barrier{0, 0, 0};
  ++b->barrier_count;
  ++b->events;
  push_all(b, list, count, false);
  // Shuffled cooperative launches also change the block here at times, so that blocks interleave within a phase.
  const SouffleLaunchSpec* spec = b->launch->spec;
  if (spec->shuffled && spec->cooperative && next_random(b->random) % 8 == 0) b->preempted = true;
}

void arrive(Fiber* self, int id, int count, int value, bool wait, const char* what, void* pc) {
  Block* b = self->block;
  self->wait_pc = pc;
  if (id < 0 || id >= kNamedBarriers) fail_fiber(self, "%s names barrier %d, and there are only 16", what, id);
  if (count < 0) count = b->threads;
  if (count == 0 || (count % 32 != 0 && count != b->threads))
    fail_fiber(self, "%s on barrier %d expects %d threads, which is not a multiple of 32", what, id, count);
  if (count > b->threads)
    fail_fiber(self, "%s on barrier %d expects %d threads, the block has %d", what, id, count, b->threads);
  Barrier& barrier = b->barriers[id];
  if (barrier.arrived > 0 && barrier.expected != count) {
    self->wait_what = what;
    if (claim_failure(b->launch)) collect_waits(b);
    fail_fiber(self, "%s on barrier %d expects %d threads where earlier threads expect %d", what, id, count,
               barrier.expected);
  }
  barrier.expected = count;
  ++barrier.arrived;
  barrier.sum += value;
  if (!wait && self->check) b->launch->half_barriers = 1;
  if (wait) {
    self->state = kBarrier;
    self->wait_id = id;
    self->wait_what = what;
  }
  if (barrier.arrived == count) release_barrier(b, id);
  while (has_failed(b->launch)) to_scheduler(self);
  if (wait) dispatch(self);
}

// ---- warp-wide operations -----------------------------------------------------------------------------------------

bool is_shuffle(const Group& group) { return strncmp(group.what, "__shfl", 6) == 0; }

void complete_group(Block* b, unsigned warp, int g) {
  Warp& w = b->warps[warp];
  Group group = w.group[g];
  w.group[g] = w.group[--w.groups];
  unsigned arrived = group.arrived;
  if (b->launch->spec->arena && is_shuffle(group)) {
    note_partial_warp(b, warp, arrived, group.mask & ~arrived);
    compare_shuffles(b, warp, arrived);
  }
  if (group.function) group.function(w.payload, arrived);
  unsigned list[32], count = 0;
  for (unsigned lane = 0; lane < 32; ++lane)
    if (arrived >> lane & 1) list[count++] = warp * 32 + lane;
  ++b->events;
  push_all(b, list, count, true);
}

void resolve_masks(Block* b, unsigned warp, bool only_if_whole) {
  Warp& w = b->warps[warp];
  unsigned waiting = 0;
  int first = 0;
  for (unsigned lane = 0; lane < 32; ++lane) {
    if (!(w.alive >> lane & 1)) continue;
    Fiber& f = b->fibers[warp * 32 + lane];
    if (f.state != kActiveMask) {
      if (only_if_whole) return;
      continue;
    }
    if (only_if_whole && waiting && f.wait_site != first) return;
    first = f.wait_site;
    waiting |= 1u << lane;
  }
  while (waiting) {
    int site = b->fibers[warp * 32 + unsigned(__builtin_ctz(waiting))].wait_site;
    unsigned mask = 0, list[32], count = 0;
    for (unsigned lane = 0; lane < 32; ++lane)
      if ((waiting >> lane & 1) && b->fibers[warp * 32 + lane].wait_site == site) {
        mask |= 1u << lane;
        list[count++] = warp * 32 + lane;
      }
    for (unsigned i = 0; i < count; ++i) b->fibers[list[i]].result = mask;
    note_partial_warp(b, warp, mask, w.alive & ~mask);
    b->masks_wanted -= int(count);
    push_all(b, list, count, true);
    waiting &= ~mask;
  }
}

void exchange_knowledge(Fiber* self, const void* address, bool release, int how) {
  Block* b = self->block;
  b->worker->in_fiber = 0;  // as in set_failure
  pthread_mutex_lock(&b->launch->lock);
  bool done = release ? give_knowledge(b, address, how) : take_knowledge(b, address);
  pthread_mutex_unlock(&b->launch->lock);
  b->worker->in_fiber = 1;
  if (!done) fail_fiber(self, "no memory for the order of blocks");
  enter_block(b->worker, b);
}

}  // namespace

extern "C" {

void souffle_barrier(SouffleThread* t, int id, int count) {
  arrive((Fiber*)t, id, count, 0, true, count < 0 && id == 0 ? "__syncthreads" : "bar.sync",
         __builtin_return_address(0));
}

int souffle_barrier_reduce(SouffleThread* t, int predicate, int what) {
  Fiber* self = (Fiber*)t;
  static const char* const names[] = {"__syncthreads_count", "__syncthreads_and", "__syncthreads_or"};
  arrive(self, 0, -1, predicate != 0, true, names[what], __builtin_return_address(0));
  int sum = int(self->result);
  return what == 0 ? sum : what == 1 ? sum == self->block->threads : sum != 0;
}

void souffle_barrier_arrive(SouffleThread* t, int id, int count) {
  arrive((Fiber*)t, id, count, 0, false, "bar.arrive", __builtin_return_address(0));
}

void souffle_grid_sync(SouffleThread* t) {
  Fiber* self = (Fiber*)t;
  if (!self->block->launch->spec->cooperative) fail_fiber(self, "grid sync in a launch that is not cooperative");
  self->state = kGrid;
  self->wait_what = "grid sync";
  self->wait_pc = __builtin_return_address(0);
  ++self->block->at_grid;
  dispatch(self);
}

void souffle_collective(SouffleThread* t, unsigned mask, const char* what, void* payload, SouffleWarpFunction fn) {
  Fiber* self = (Fiber*)t;
  Block* b = self->block;
  Warp& w = b->warps[self->warp];
  unsigned bit = 1u << self->lane;
  if (!(mask & bit)) fail_fiber(self, "%s with mask 0x%08x by lane %u, which the mask leaves out", what, mask, self->lane);
  int g = 0;
  while (g < w.groups && !(w.group[g].mask == mask && w.group[g].function == fn)) ++g;
  if (g == w.groups) w.group[w.groups++] = Group{mask, 0, what, fn};
  w.group[g].arrived |= bit;
  w.payload[self->lane] = payload;
  self->state = kWarp;
  self->wait_what = what;
  self->wait_mask = mask;
  self->wait_pc = __builtin_return_address(0);
  if (w.group[g].arrived == (mask & w.alive)) complete_group(b, self->warp, g);
  dispatch(self);
}

unsigned souffle_activemask(SouffleThread* t, int line) {
  Fiber* self = (Fiber*)t;
  Block* b = self->block;
  self->state = kActiveMask;
  self->wait_site = line;
  self->wait_what = "__activemask";
  self->wait_pc = __builtin_return_address(0);
  ++b->masks_wanted;
  resolve_masks(b, self->warp, true);
  dispatch(self);
  return self->result;
}

// A thread that polls memory lets the others run: first those of its block, then other blocks.
void souffle_relax(SouffleThread* t) {
  Fiber* self = (Fiber*)t;
  Block* b = self->block;
  self->spinning = true;
  self->wait_pc = __builtin_return_address(0);
  ++b->spinners;
  push_back(b, self->linear);
  dispatch(self);
}

// Nanoseconds that do not go back; see pass_time.
unsigned long long souffle_globaltimer(SouffleThread* t) {
  Launch* launch = ((Fiber*)t)->block->launch;
  launch->timed = 1;
  return __atomic_add_fetch(&launch->timer, 1, __ATOMIC_RELAXED);
}

void souffle_event(SouffleThread* t) {
  Block* b = ((Fiber*)t)->block;
  ++b->events;
  if (t->check) b->launch->synchronizes = 1;
}

// An event whose order with others, if any, is told by souffle_order_release and souffle_order_acquire.
void souffle_progress(SouffleThread* t) { ++((Fiber*)t)->block->events; }

// A relaxed atomic orders nothing by itself. With fences about, it may be part of what does, which is not looked into.
void souffle_fence(SouffleThread* t) {
  __atomic_thread_fence(__ATOMIC_SEQ_CST);
  Launch* launch = ((Fiber*)t)->block->launch;
  launch->fences = 1;
  if (t->check && launch->relaxed) launch->synchronizes = 1;
}
void souffle_order_relaxed(SouffleThread* t) {
  Launch* launch = ((Fiber*)t)->block->launch;
  launch->relaxed = 1;
  if (t->check && launch->fences) launch->synchronizes = 1;
}

// Before the write of a release.
void souffle_order_release(SouffleThread* t, const void* address, int how) {
  if (t->check) exchange_knowledge((Fiber*)t, address, true, how);
}

// After the read of an acquire.
void souffle_order_acquire(SouffleThread* t, const void* address) {
  if (t->check) exchange_knowledge((Fiber*)t, address, false, 0);
}

void souffle_copy_async(SouffleThread* t, void* destination, const void* source, unsigned bytes, unsigned source_bytes) {
  Fiber* self = (Fiber*)t;
  if (source_bytes > bytes) fail_fiber(self, "cp.async of %u bytes with a source size of %u", bytes, source_bytes);
  if (uintptr_t(destination) % bytes || (source_bytes && uintptr_t(source) % bytes))
    fail_fiber(self, "cp.async of %u bytes between addresses that are not aligned to them", bytes);
  if (self->copy_count == self->copy_capacity) {
    if (self->copy_head > self->copy_capacity / 2) {
      self->copy_count -= self->copy_head;
      memmove(self->copies, self->copies + self->copy_head, self->copy_count * sizeof(Copy));
      self->copy_head = 0;
    } else {
      self->copy_capacity = self->copy_capacity ? 2 * self->copy_capacity : 16;
      self->block->worker->in_fiber = 0;  // as in set_failure: malloc holds a lock
      self->copies = (Copy*)realloc(self->copies, self->copy_capacity * sizeof(Copy));
      self->block->worker->in_fiber = 1;
      if (!self->copies) fail_fiber(self, "no memory for %u asynchronous copies", self->copy_capacity);
    }
  }
  if (self->check) {
    void* pc = __builtin_return_address(0);
    if (source_bytes) souffle_check_access(self, (void*)source, source_bytes, 0, pc);
    souffle_check_access(self, destination, bytes, kSouffleWrite | kSouffleNoValue, pc);
    souffle_word at = souffle_word((char*)destination - self->check->shared_base);
    for (unsigned i = 0; i < bytes && at + i < self->check->shared_bytes; ++i)
      if (self->check->shared_state[at + i] == kSharedWritten) self->check->shared_state[at + i] = kSharedEmpty;
  }
  // Until the wait, the destination holds neither the old nor the new value for sure.
  memset(destination, kPoison, bytes);
  self->copies[self->copy_count++] =
      Copy{(char*)destination, (const char*)source, bytes, source_bytes, self->open_group};
}

void souffle_copy_commit(SouffleThread* t) { ++((Fiber*)t)->open_group; }

void souffle_copy_wait(SouffleThread* t, int groups_left, int uncommitted_too) {
  Fiber* self = (Fiber*)t;
  unsigned limit = self->open_group > unsigned(groups_left) ? self->open_group - unsigned(groups_left) : 0;
  while (self->copy_head < self->copy_count) {
    Copy& c = self->copies[self->copy_head];
    if (!uncommitted_too && c.group >= limit) break;
    if (c.source_bytes) memcpy(c.destination, c.source, c.source_bytes);
    memset(c.destination + c.source_bytes, 0, c.bytes - c.source_bytes);
    if (self->check) {
      souffle_word at = souffle_word(c.destination - self->check->shared_base);
      for (unsigned i = 0; i < c.bytes && at + i < self->check->shared_bytes; ++i)
        if (self->check->shared_state[at + i] == kSharedEmpty) self->check->shared_state[at + i] = kSharedWritten;
      // The bytes change only now, whatever another warp has read of them since the copy began.
      unsigned other = 0;
      if (at + c.bytes <= self->check->shared_bytes)
        other = souffle_unordered_warps(self->check, self->warp, self->check->shared_order + at / 2, c.bytes / 2, true);
      if (other) {
        self->check->other = other - 1;
        souffle_check_slow(self, c.destination, c.bytes, kSouffleWrite | kSouffleRace | kSouffleWithin,
                           __builtin_return_address(0));
      }
    }
    ++self->copy_head;
  }
  if (self->copy_head == self->copy_count) self->copy_head = self->copy_count = 0;
}

void souffle_fail(SouffleThread* t, const char* message) { fail_fiber((Fiber*)t, "%s", message); }

void souffle_exit(SouffleThread* t) {
  souffle_fiber_exit((Fiber*)t);
  __builtin_unreachable();
}

SouffleThread* souffle_current() {
#ifdef SOUFFLE_USE_UCONTEXT
  return tl_current;
#else
  return tl_worker ? tl_worker->current : nullptr;
#endif
}

}  // extern "C"

namespace {

extern "C" void souffle_fiber_exit(Fiber* self) {
  Block* b = self->block;
  souffle_copy_wait(self, 0, 1);
  self->state = kExited;
  --b->live;
  ++b->events;
  Warp& w = b->warps[self->warp];
  w.alive &= ~(1u << self->lane);
  // Lanes that have left no longer count for the warp-wide operations of those that stay.
  for (int g = 0; g < w.groups;)
    if (w.group[g].arrived == (w.group[g].mask & w.alive))
      complete_group(b, self->warp, g), g = 0;
    else
      ++g;
  if (b->masks_wanted && w.alive) resolve_masks(b, self->warp, true);
  for (;;) dispatch(self);
}

// ---- blocks -------------------------------------------------------------------------------------------------------

void init_block(Launch* launch, Block* b) {
  memset(b, 0, sizeof(*b));
  b->launch = launch;
  b->threads = launch->threads;
  b->warp_count = (launch->threads + 31) / 32;
}

void allocate_block(Block* b) {
  b->fibers = (Fiber*)calloc(size_t(b->threads), sizeof(Fiber));
  b->queue = (unsigned*)malloc(size_t(b->threads) * sizeof(unsigned));
  b->warps = (Warp*)calloc(size_t(b->warp_count), sizeof(Warp));
}

void free_block(Block* b) {
  if (b->fibers)
    for (int i = 0; i < b->threads; ++i) free(b->fibers[i].copies);
  free(b->fibers);
  free(b->queue);
  free(b->warps);
  free(b->save);
  free(b->known);
  free(b->clocks);
  free(b->shared_order);
  b->known = nullptr;
  b->clocks = nullptr;
  b->shared_order = nullptr;
  b->fibers = nullptr;
  b->queue = nullptr;
  b->warps = nullptr;
  b->save = nullptr;
}

struct Piece {
  char* base;
  size_t bytes;
};

// Shared memory in use: the static arrays and the launch's part of the dynamic array.
int shared_pieces(Worker* w, Piece out[2]) {
  size_t capacity = w->launch->spec->dynamic_capacity, used = w->launch->spec->shared_bytes;
  if (!w->shared_base) return 0;
  if (!w->dynamic_base) {
    out[0] = Piece{w->shared_base, w->shared_size};
    return 1;
  }
  char* after = w->dynamic_base + capacity;
  out[0] = Piece{w->shared_base, size_t(w->dynamic_base - w->shared_base) + used};
  out[1] = Piece{after, size_t(w->shared_base + w->shared_size - after)};
  return 2;
}

void start_block(Worker* w, Block* b, unsigned index) {
  Launch* launch = w->launch;
  const SouffleLaunchSpec* spec = launch->spec;
  if (!b->fibers) {
    allocate_block(b);
    if (!allocate_checks(w, b)) set_failure(launch, "kernel %s: no memory for the checks", spec->kernel);
  }
  // Each warp knows of nothing; nothing that a block does is at time 0.
  b->time = 1;
  if (b->clocks)
    for (int i = 0; i < kSouffleWarps * kSouffleWarps; ++i) b->clocks[i] = 1;
  b->worker = w;
  b->index = index;
  b->live = b->threads;
  b->at_grid = b->spinners = b->masks_wanted = 0;
  b->clock = b->floor = b->rounds = 0;
  note_change(b);
  free(b->known);
  b->known = nullptr;
  b->finished = b->preempted = b->grid_waiting = false;
  b->started = true;
  b->head = 0;
  b->count = 0;
  // Of a number of the seed's: seeds a multiple of the generator's own step apart would give one stream, shifted.
  uint64_t of_seed = spec->seed;
  b->random = next_random(of_seed) + index * 0xD1B54A32D192ED03ull;
  memset(b->barriers, 0, sizeof(b->barriers));
  uint3 position{index % spec->grid[0], index / spec->grid[0] % spec->grid[1], index / spec->grid[0] / spec->grid[1]};
  dim3 block(spec->block[0], spec->block[1], spec->block[2]), grid(spec->grid[0], spec->grid[1], spec->grid[2]);
  for (int i = 0; i < b->threads; ++i) {
    Fiber& f = b->fibers[i];
    Copy* copies = f.copies;
    unsigned capacity = f.copy_capacity;
    memset((void*)&f, 0, offsetof(Fiber, saved_bytes) + sizeof(f.saved_bytes));
    f.copies = copies;
    f.copy_capacity = capacity;
    f.thread_index = uint3{unsigned(i) % block.x, unsigned(i) / block.x % block.y, unsigned(i) / block.x / block.y};
    f.block_index = position;
    f.block_extent = block;
    f.grid_extent = grid;
    f.linear = unsigned(i);
    f.lane = unsigned(i) % 32;
    f.warp = unsigned(i) / 32;
    f.shared_base = w->shared_base;
    f.shared_size = unsigned(w->shared_size);
    f.check = spec->arena ? &w->check : nullptr;
    f.block = b;
    f.state = kReady;
    prepare_fiber(&f, stack_top(w->stacks, i));
    b->queue[b->count++] = unsigned(i);
  }
  for (int i = 0; i < b->warp_count; ++i) {
    int lanes = b->threads - i * 32;
    b->warps[i].alive = lanes >= 32 ? 0xFFFFFFFFu : (1u << lanes) - 1;
    b->warps[i].groups = 0;
  }
  if (spec->shuffled) {
    shuffle(b->queue, b->count, b->random);
    if (next_random(b->random) & 1) warp_by_warp(b);
  }
  Piece pieces[2];
  for (int n = shared_pieces(w, pieces), i = 0; i < n; ++i) {
    memset(pieces[i].base, kPoison, pieces[i].bytes);
    if (spec->arena) {
      unsigned char* state = w->check.shared_state + (pieces[i].base - w->shared_base);
      memcpy(state, state + w->shared_size, pieces[i].bytes);
    }
  }
}

void swap_out(Worker* w, Block* b) {
  Piece pieces[2];
  int n = shared_pieces(w, pieces);
  size_t need = 0;
  const bool checked = w->launch->spec->arena;
  for (int i = 0; i < n; ++i) need += (checked ? 2 : 1) * pieces[i].bytes;
  for (int i = 0; i < b->threads; ++i) {
    Fiber& f = b->fibers[i];
    f.saved_bytes = f.state == kExited ? 0 : size_t(stack_top(w->stacks, i) - (char*)f.sp);
    need += f.saved_bytes;
  }
  if (need > b->save_capacity) {
    free(b->save);
    b->save_capacity = need + need / 8;
    b->save = (char*)malloc(b->save_capacity);
    if (!b->save) {
      b->save_capacity = 0;
      set_failure(w->launch, "kernel %s: no memory to hold block %u at a grid sync", w->launch->spec->kernel, b->index);
      return;
    }
  }
  char* to = b->save;
  for (int i = 0; i < n; ++i) {
    memcpy(to, pieces[i].base, pieces[i].bytes);
    to += pieces[i].bytes;
    if (!checked) continue;
    memcpy(to, w->check.shared_state + (pieces[i].base - w->shared_base), pieces[i].bytes);
    to += pieces[i].bytes;
  }
  for (int i = 0; i < b->threads; ++i) {
    Fiber& f = b->fibers[i];
    f.saved = to;
    memcpy(to, f.sp, f.saved_bytes);
    to += f.saved_bytes;
  }
}

void swap_in(Worker* w, Block* b) {
  Piece pieces[2];
  int n = shared_pieces(w, pieces);
  const char* from = b->save;
  for (int i = 0; i < n; ++i) {
    memcpy(pieces[i].base, from, pieces[i].bytes);
    from += pieces[i].bytes;
    if (!w->launch->spec->arena) continue;
    memcpy(w->check.shared_state + (pieces[i].base - w->shared_base), from, pieces[i].bytes);
    from += pieces[i].bytes;
  }
  for (int i = 0; i < b->threads; ++i) {
    Fiber& f = b->fibers[i];
    memcpy(f.sp, f.saved, f.saved_bytes);
  }
}

// Groups of threads that are in the same state, the room left in the launch's list permitting. Called by the first to
// fail, which `Failing` sees to.
void collect_waits(Block* b) {
  const SouffleLaunchSpec* spec = b->launch->spec;
  SouffleLaunchResult* result = b->launch->result;
  bool seen[kMaxThreads] = {};
  for (int i = 0; i < b->threads && result->waits < spec->wait_capacity; ++i) {
    if (seen[i]) continue;
    const Fiber& f = b->fibers[i];
    unsigned count = 0;
    for (int j = i; j < b->threads; ++j) {
      const Fiber& g = b->fibers[j];
      bool same = g.state == f.state && g.wait_what == f.wait_what && g.wait_pc == f.wait_pc &&
                  (f.state != kBarrier || g.wait_id == f.wait_id) && (f.state != kWarp || g.wait_mask == f.wait_mask);
      if (f.state == kExited) same = g.state == kExited;
      if (!same || seen[j]) continue;
      seen[j] = true;
      ++count;
    }
    SouffleWait& w = spec->wait[result->waits++];
    w = SouffleWait{};
    w.state = f.state == kReady && !f.spinning ? 6 : f.state;
    w.threads = count;
    w.block = f.block_index;
    w.thread = f.thread_index;
    if (f.state == kExited) continue;
    w.pc = souffle_word(uintptr_t(f.wait_pc));
    if (f.state == kReady) continue;
    snprintf(w.what, sizeof(w.what), "%s", f.wait_what);
    w.mask = f.wait_mask;
    w.barrier = f.wait_id;
    w.arrived = b->barriers[f.wait_id].arrived;
    w.expected = b->barriers[f.wait_id].expected;
  }
}

// The first failure of a launch fills the list of waiting threads.
bool claim_failure(Launch* launch) { return !__atomic_exchange_n(&launch->claimed, 1, __ATOMIC_ACQ_REL); }

void report_broken_warp(Block* b, int id, unsigned warp, int here, int alive) {
  if (!claim_failure(b->launch)) return;
  collect_waits(b);
  uint3 p = b->fibers[0].block_index;
  set_failure(b->launch, "kernel %s, block (%u, %u, %u): barrier %d under divergent control: %d of the %d threads of warp %u",
              b->launch->spec->kernel, p.x, p.y, p.z, id, here, alive, warp);
}

enum Outcome { kDone, kAtGrid, kSpins, kPreempted, kBroken };

void report_stuck(Block* b) {
  const SouffleLaunchSpec* spec = b->launch->spec;
  bool divergent = b->live < b->threads;
  const Fiber* first = nullptr;
  for (int i = 0; i < b->threads; ++i) {
    const Fiber& f = b->fibers[i];
    if (f.state == kExited) continue;
    if (!first) first = &f;
    if (f.state != first->state || (f.state == kBarrier && f.wait_id != first->wait_id)) divergent = true;
  }
  for (int i = 0; i < b->warp_count; ++i)
    for (int g = 0; g < b->warps[i].groups; ++g) {
      const Group& group = b->warps[i].group[g];
      if (is_shuffle(group)) note_partial_warp(b, unsigned(i), group.arrived, group.mask & b->warps[i].alive & ~group.arrived);
    }
  if (!claim_failure(b->launch)) return;
  collect_waits(b);
  uint3 p = b->fibers[0].block_index;
  set_failure(b->launch, "kernel %s, block (%u, %u, %u): %s", spec->kernel, p.x, p.y, p.z,
              divergent ? "barrier under divergent control" : "deadlock");
}

Outcome run_block(Worker* w, Block* b) {
  enter_block(w, b);
  for (;;) {
    b->preempted = false;
    if (b->count) {
      // Where only polling threads are left, each of them polls once.
      unsigned turns = int(b->count) == b->spinners ? b->count : 1;
      for (unsigned k = 0; k < turns && b->count && !b->preempted; ++k) {
        unsigned i = b->queue[b->head];
        b->head = (b->head + 1) % unsigned(b->threads);
        --b->count;
        Fiber* f = &b->fibers[i];
        if (f->spinning) {
          f->spinning = false;
          --b->spinners;
        }
        w->in_fiber = 1;
        to_fiber(nullptr, f);
        w->in_fiber = 0;
        if (has_failed(b->launch)) return kBroken;
      }
    }
    if (b->live == 0) return kDone;
    if (b->count && int(b->count) != b->spinners) {
      if (b->preempted) return kPreempted;
      continue;
    }
    if (b->masks_wanted) {
      for (int i = 0; i < b->warp_count; ++i) resolve_masks(b, unsigned(i), false);
      continue;
    }
    if (b->count) return kSpins;
    if (b->at_grid == b->threads) return kAtGrid;
    report_stuck(b);
    return kBroken;
  }
}

// On a machine that is busy with something else a few turns may take long. In so many turns a wait that has a limit of
// its own has looked at the clock (souffle/kernel/watchdog.py); it is given an hour of the text's nanoseconds then.
const uint64_t kTurns = 1024, kLongestLimit = 3600ull * 1000000000;

// Polling with nothing else happening anywhere is a deadlock once it has lasted long enough.
struct Patience {
  uint64_t events;
  double since;
  uint64_t passed, turns;
};

void set_idle(Worker* w, uint64_t value) { __atomic_store_n(&w->launch->idle[w->id], value, __ATOMIC_RELEASE); }

// The text's time stands still while anything goes on: how long that takes here says nothing of a device. It passes where
// all threads of all blocks only poll, and the faster the longer that lasts, so that a wait that has a limit comes to it.
void pass_time(Worker* w, Patience& p) {
  Launch* launch = w->launch;
  set_idle(w, p.events + 1);
  for (int i = 0; i < launch->workers; ++i) {
    uint64_t other = __atomic_load_n(&launch->idle[i], __ATOMIC_ACQUIRE);
    if (other != p.events + 1 && other != kGone) return;
  }
  uint64_t step = 1000 + p.passed / 256;
  p.passed += step;
  __atomic_add_fetch(&launch->timer, step, __ATOMIC_RELAXED);
}

bool lost_patience(Worker* w, Patience& p, uint64_t own_events) {
  Launch* launch = w->launch;
  uint64_t all = __atomic_add_fetch(&launch->events, own_events, __ATOMIC_RELAXED);
  double t = now();
  if (all != p.events || p.since == 0) {
    p.events = all;
    p.since = t;
    p.passed = p.turns = 0;
    set_idle(w, 0);
    return false;
  }
  pass_time(w, p);
  if (++p.turns < kTurns || (launch->timed && p.passed < kLongestLimit)) return false;
  return t - p.since > launch->spec->spin_seconds;
}

void report_spin(Block* b) {
  if (!claim_failure(b->launch)) return;
  collect_waits(b);
  // Blocks that have exited are those that cannot come to where this one waits. Other workers' blocks may still run.
  const SouffleLaunchSpec* spec = b->launch->spec;
  SouffleLaunchResult* result = b->launch->result;
  for (unsigned i = 0; spec->cooperative && b->launch->workers == 1 && i < b->launch->blocks; ++i) {
    if (!b->launch->resident_blocks[i].finished || result->waits == spec->wait_capacity) continue;
    SouffleWait& w = spec->wait[result->waits++];
    w = SouffleWait{};
    w.state = kExited;
    w.threads = unsigned(b->launch->threads);
    w.block = uint3{i % spec->grid[0], i / spec->grid[0] % spec->grid[1], i / spec->grid[0] / spec->grid[1]};
  }
  uint3 p = b->fibers[0].block_index;
  set_failure(b->launch, "kernel %s, block (%u, %u, %u): deadlock, memory is polled that nothing writes any more",
              b->launch->spec->kernel, p.x, p.y, p.z);
}

void run_plain(Worker* w) {
  Launch* launch = w->launch;
  Block b;
  init_block(launch, &b);
  Patience patience{};
  while (!has_failed(launch)) {
    unsigned n = __atomic_fetch_add(&launch->next_block, 1u, __ATOMIC_RELAXED);
    if (n >= launch->blocks) break;
    set_idle(w, 0);
    start_block(w, &b, launch->order ? launch->order[n] : n);
    for (;;) {
      uint64_t before = b.events;
      Outcome outcome = run_block(w, &b);
      if (outcome == kDone || outcome == kBroken) break;
      if (outcome == kSpins && lost_patience(w, patience, b.events - before)) {
        report_spin(&b);
        break;
      }
    }
  }
  __atomic_fetch_add(&launch->barrier_count, b.barrier_count, __ATOMIC_RELAXED);
  free_block(&b);
}

// All workers meet here between two grid phases. False: the launch has failed or is complete.
bool meet(Launch* launch, unsigned done, unsigned at_grid) {
  pthread_mutex_lock(&launch->lock);
  unsigned round = launch->round;
  launch->round_done += done;
  launch->round_grid += at_grid;
  if (++launch->arrived_workers == launch->workers) {
    launch->arrived_workers = 0;
    launch->last_done = launch->round_done;
    launch->last_grid = launch->round_grid;
    launch->round_done = launch->round_grid = 0;
    if (launch->last_grid) ++launch->grid_syncs;
    launch->grid_clock = launch->last_clock = next_clock(launch, launch->last_clock);
    forget_sets(launch->readers);
    launch->grid_pc = nullptr;
    ++launch->round;
    pthread_cond_broadcast(&launch->changed);
  } else {
    while (launch->round == round && !launch->failed) pthread_cond_wait(&launch->changed, &launch->lock);
  }
  bool go_on = !launch->failed && launch->last_grid > 0;
  bool mixed = go_on && launch->last_done > 0;
  pthread_mutex_unlock(&launch->lock);
  if (!mixed) return go_on;
  if (!claim_failure(launch)) return false;
  const SouffleLaunchSpec* spec = launch->spec;
  for (unsigned i = 0; i < launch->blocks; ++i) {
    const Block* b = &launch->resident_blocks[i];
    if (launch->result->waits == spec->wait_capacity) break;
    SouffleWait& w = spec->wait[launch->result->waits++];
    w = SouffleWait{};
    w.threads = unsigned(launch->threads);
    w.block = uint3{i % spec->grid[0], i / spec->grid[0] % spec->grid[1], i / spec->grid[0] / spec->grid[1]};
    w.state = b->finished ? kExited : kGrid;
    if (b->finished) continue;
    snprintf(w.what, sizeof(w.what), "grid sync");
    w.pc = souffle_word(uintptr_t(b->grid_pc));
  }
  set_failure(launch, "kernel %s: grid sync under divergent control: %u blocks wait at grid sync, %u blocks have exited",
              spec->kernel, launch->last_grid, launch->last_done);
  return false;
}

void run_cooperative(Worker* w) {
  Launch* launch = w->launch;
  // Contiguous ranges of blocks, one for each worker.
  unsigned begin = unsigned(uint64_t(launch->blocks) * unsigned(w->id) / unsigned(launch->workers));
  unsigned end = unsigned(uint64_t(launch->blocks) * unsigned(w->id + 1) / unsigned(launch->workers));
  unsigned mine = end - begin;
  unsigned* order = (unsigned*)malloc((mine + 1) * sizeof(unsigned));
  for (unsigned i = 0; i < mine; ++i) order[i] = begin + i;
  uint64_t random = launch->spec->seed ^ 0xA0761D6478BD642Full;
  Patience patience{};
  unsigned done = 0, at_grid = 0;
  for (;;) {
    if (launch->spec->shuffled) shuffle(order, mine, random);
    // Blocks that poll or were preempted get further turns until all have finished or wait at the grid barrier.
    while (done + at_grid < mine && !has_failed(launch)) {
      bool only_spins = true;
      uint64_t progress = 0;
      Block* spins = nullptr;
      for (unsigned i = 0; i < mine && !has_failed(launch); ++i) {
        Block* b = &launch->resident_blocks[order[i]];
        if (b->finished || b->grid_waiting) continue;
        if (w->resident != b) {
          if (w->resident && !w->resident->finished) swap_out(w, w->resident);
          if (has_failed(launch)) break;
          w->resident = b;
          if (b->started)
            swap_in(w, b);
          else
            start_block(w, b, order[i]);
        }
        uint64_t before = b->events;
        Outcome outcome = run_block(w, b);
        progress += b->events - before;
        if (outcome == kDone) {
          b->finished = true;
          ++done;
          __atomic_fetch_add(&launch->barrier_count, b->barrier_count, __ATOMIC_RELAXED);
          free_block(b);
        } else if (outcome == kAtGrid) {
          b->grid_waiting = true;
          note_grid_sync(launch, b);
          ++at_grid;
        } else if (outcome == kSpins) {
          spins = b;
        }
        if (outcome != kSpins) only_spins = false;
      }
      if (only_spins && spins && lost_patience(w, patience, progress)) report_spin(spins);
      // Blocks that poll wait for each other as at a grid barrier: whoever comes next is drawn anew there too.
      if (spins && launch->spec->shuffled) shuffle(order, mine, random);
      if (!only_spins) {
        set_idle(w, 0);
        __atomic_add_fetch(&launch->events, 1, __ATOMIC_RELAXED);
      }
    }
    set_idle(w, kGone);
    if (!meet(launch, done, at_grid)) break;
    set_idle(w, 0);
    at_grid = 0;
    for (unsigned i = 0; i < mine; ++i) {
      Block* b = &launch->resident_blocks[begin + i];
      if (b->finished) continue;
      b->grid_waiting = false;
      b->at_grid = 0;
      meet_blocks(b, launch->grid_clock);
      for (int k = 0; k < b->threads; ++k) w->scratch[k] = unsigned(k);
      meet_warps(b, w->scratch, unsigned(b->threads));
      push_all(b, w->scratch, unsigned(b->threads), false);
    }
  }
  free(order);
}

int find_segment(dl_phdr_info* info, size_t, void* data) {
  Worker* w = (Worker*)data;
  char* anchor = w->launch->spec->shared_anchor();
  for (int i = 0; i < info->dlpi_phnum; ++i)
    if (info->dlpi_phdr[i].p_type == PT_TLS) {
      char* base = (char*)info->dlpi_tls_data;
      size_t size = info->dlpi_phdr[i].p_memsz;
      if (base && anchor >= base && anchor < base + size) {
        w->shared_base = base;
        w->shared_size = size;
        return 1;
      }
    }
  return 0;
}

void* worker_main(void* data) {
  Worker* w = (Worker*)data;
  Launch* launch = w->launch;
  tl_worker = w;
  stack_t alternate{}, previous{};
  alternate.ss_size = 64 << 10;
  alternate.ss_sp = malloc(alternate.ss_size);
  sigaltstack(&alternate, &previous);
  if (sigsetjmp(w->escape, 1) == 0) {
    dl_iterate_phdr(find_segment, w);
    if (launch->spec->dynamic_capacity) w->dynamic_base = launch->spec->dynamic_shared();
    if (launch->spec->arena && !start_checks(w))
      set_failure(launch, "kernel %s: no memory for the checks", launch->spec->kernel);
    else if (launch->spec->cooperative)
      run_cooperative(w);
    else
      run_plain(w);
  } else {
    w->in_fiber = 0;
    Fiber* f = w->current;
    char where[96] = "an unknown thread";
    uint3 p{0, 0, 0};
    if (f) {
      place(f, where, sizeof(where));
      p = f->block_index;
    }
    const char* name = w->signal_number == SIGSEGV   ? "segmentation fault"
                       : w->signal_number == SIGBUS  ? "bus error"
                       : w->signal_number == SIGFPE  ? "integer division by zero"
                                                     : "illegal instruction";
    size_t each = kStackBytes + kGuardBytes;
    uintptr_t offset = uintptr_t(w->fault_address) - uintptr_t(w->stacks->base);
    if (w->signal_number == 0) {
      set_failure(launch, "kernel %s, block (%u, %u, %u), %s: stopped, the time limit of %g s has passed",
                  launch->spec->kernel, p.x, p.y, p.z, where, launch->spec->timeout_seconds);
    } else if (w->signal_number == SIGSEGV && offset < each * kMaxThreads && offset % each < kGuardBytes) {
      set_failure(launch, "kernel %s, block (%u, %u, %u), %s: stack overflow, local arrays need more than %zu KiB",
                  launch->spec->kernel, p.x, p.y, p.z, where, kStackBytes >> 10);
    } else {
      launch->result->fault_address = uint64_t(uintptr_t(w->fault_address));
      set_failure(launch, "kernel %s, block (%u, %u, %u), %s: %s at address %p", launch->spec->kernel, p.x, p.y, p.z,
                  where, name, w->fault_address);
    }
  }
  if (launch->spec->arena) stop_checks(w);
  set_idle(w, kGone);
  sigaltstack(&previous, nullptr);
  free(alternate.ss_sp);
  tl_worker = nullptr;
  pthread_mutex_lock(&launch->lock);
  ++launch->finished_workers;
  pthread_cond_broadcast(&launch->changed);
  pthread_mutex_unlock(&launch->lock);
  return nullptr;
}

// ---- faults -------------------------------------------------------------------------------------------------------

const int kSignals[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL};
struct sigaction g_previous[4];
int g_users;
pthread_mutex_t g_signal_lock = PTHREAD_MUTEX_INITIALIZER;

void on_signal(int number, siginfo_t* info, void* context) {
  Worker* w = tl_worker;
  if (w && info->si_code == SI_TKILL) {  // from the watchdog
    if (!w->in_fiber) return;
    w->signal_number = 0;
    siglongjmp(w->escape, 1);
  }
  if (w && w->in_fiber) {
    w->signal_number = number;
    w->fault_address = info->si_addr;
    siglongjmp(w->escape, 1);
  }
  for (int i = 0; i < 4; ++i)
    if (kSignals[i] == number) {
      struct sigaction& old = g_previous[i];
      if (old.sa_flags & SA_SIGINFO)
        old.sa_sigaction(number, info, context);
      else if (old.sa_handler == SIG_DFL || old.sa_handler == SIG_IGN)
        signal(number, SIG_DFL);
      else
        old.sa_handler(number);
    }
}

void watch_signals(bool on) {
  pthread_mutex_lock(&g_signal_lock);
  if (on && g_users++ == 0) {
    for (int i = 0; i < 4; ++i) {
      struct sigaction action{};
      action.sa_sigaction = on_signal;
      action.sa_flags = SA_SIGINFO | SA_ONSTACK;
      sigemptyset(&action.sa_mask);
      sigaction(kSignals[i], &action, &g_previous[i]);
    }
  } else if (!on && --g_users == 0) {
    for (int i = 0; i < 4; ++i) sigaction(kSignals[i], &g_previous[i], nullptr);
  }
  pthread_mutex_unlock(&g_signal_lock);
}

}  // namespace

extern "C" void souffle_launch(const SouffleLaunchSpec* spec, SouffleLaunchResult* result) {
  memset(result, 0, sizeof(*result));
  Launch launch{};
  launch.spec = spec;
  launch.result = result;
  launch.blocks = spec->grid[0] * spec->grid[1] * spec->grid[2];
  launch.threads = int(spec->block[0] * spec->block[1] * spec->block[2]);
  // Sets of readers, where there are more than two of them, are made by one worker alone.
  const bool one = spec->shuffled || spec->workers < 1 || (spec->arena && spec->releases);
  launch.workers = one ? 1 : spec->workers;
  if (unsigned(launch.workers) > launch.blocks) launch.workers = int(launch.blocks);
  // Before any worker starts: those that wait for each other at a grid barrier must not wait for stacks as well.
  Stacks** stacks = (Stacks**)calloc(size_t(launch.workers), sizeof(Stacks*));
  launch.workers = take_stacks(stacks, launch.workers, launch.threads);
  if (launch.workers == 0) {
    result->failed = 1;
    snprintf(result->message, sizeof(result->message), "kernel %s: no address space for fiber stacks", spec->kernel);
    free(stacks);
    return;
  }
  double begin = now();
  pthread_mutex_init(&launch.lock, nullptr);
  pthread_condattr_t monotonic;
  pthread_condattr_init(&monotonic);
  pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
  pthread_cond_init(&launch.changed, &monotonic);
  if (spec->shuffled && !spec->cooperative) {
    launch.order = (unsigned*)malloc(launch.blocks * sizeof(unsigned));
    for (unsigned i = 0; i < launch.blocks; ++i) launch.order[i] = i;
    uint64_t random = spec->seed ^ 0xE7037ED1A0B428DBull;
    shuffle(launch.order, launch.blocks, random);
  }
  if (spec->cooperative) {
    launch.resident_blocks = (Block*)malloc(launch.blocks * sizeof(Block));
    for (unsigned i = 0; i < launch.blocks; ++i) init_block(&launch, &launch.resident_blocks[i]);
  }
  Worker* workers = (Worker*)calloc(size_t(launch.workers), sizeof(Worker));
  launch.idle = (uint64_t*)calloc(size_t(launch.workers), sizeof(uint64_t));
  launch.timer = 1000000000;
  SouffleArena* arena = spec->arena;
  if (arena && (arena->epoch >= kLastEpoch || arena->sets >= kLastSet)) {
    for (unsigned i = 0; i < arena->slots; ++i)
      if (size_t elements = elements_of(arena->regions[i])) {
        memset(arena->regions[i].order, 0, elements * sizeof(SouffleOrder));
        memset(arena->regions[i].warps, 0, elements * sizeof(SouffleWarpOrder));
      }
    arena->epoch = 1;
    arena->sets = kSouffleSet;
  }
  if (arena) {
    launch.readers.begin = arena->sets;
    launch.most_clocks = (kSouffleSet - arena->epoch) / launch.blocks;
    if (launch.most_clocks == 0) launch.synchronizes = 1;
  }
  watch_signals(true);
  int running = 0;
  pthread_attr_t attributes;
  pthread_attr_init(&attributes);
  pthread_attr_setstacksize(&attributes, 1 << 20);
  // The lock is held while threads start: `workers` may shrink where the system gives fewer.
  pthread_mutex_lock(&launch.lock);
  int wanted = launch.workers;
  for (; running < wanted; ++running) {
    workers[running].launch = &launch;
    workers[running].id = running;
    workers[running].stacks = stacks[running];
    if (pthread_create(&workers[running].thread, &attributes, worker_main, &workers[running]) != 0) break;
  }
  pthread_attr_destroy(&attributes);
  if (running < wanted) {
    result->failed = 1;
    snprintf(result->message, sizeof(result->message), "kernel %s: only %d of %d worker threads could be started",
             spec->kernel, running, wanted);
    __atomic_store_n(&launch.failed, 1, __ATOMIC_RELAXED);
  }
  double limit = begin + spec->timeout_seconds;
  timespec until;
  until.tv_sec = time_t(limit);
  until.tv_nsec = long((limit - double(until.tv_sec)) * 1e9);
  bool late = false;
  while (launch.finished_workers < running) {
    if (!late) {
      if (pthread_cond_timedwait(&launch.changed, &launch.lock, &until) == ETIMEDOUT) late = true;
    } else {
      for (int i = 0; i < running; ++i)
        if (workers[i].in_fiber) pthread_kill(workers[i].thread, SIGSEGV);
      timespec pause;
      clock_gettime(CLOCK_MONOTONIC, &pause);
      pause.tv_nsec += 20000000;
      if (pause.tv_nsec >= 1000000000) pause.tv_nsec -= 1000000000, ++pause.tv_sec;
      pthread_cond_timedwait(&launch.changed, &launch.lock, &pause);
    }
  }
  pthread_mutex_unlock(&launch.lock);
  for (int i = 0; i < running; ++i) pthread_join(workers[i].thread, nullptr);
  give_stacks(stacks, launch.workers);
  free(stacks);
  watch_signals(false);
  result->grid_syncs = launch.grid_syncs + launch.counted_syncs;
  result->block_barriers = launch.barrier_count;
  result->synchronizes = launch.synchronizes;
  result->half_barriers = launch.half_barriers;
  if (arena) {
    const uint64_t used = arena->epoch + uint64_t(launch.last_clock + 1) * launch.blocks;
    arena->epoch = used < kSouffleSet ? unsigned(used) : kSouffleSet;
    forget_sets(launch.readers);
    arena->sets = launch.readers.begin;
  }
  free_handed(&launch);
  result->seconds = now() - begin;
  if (launch.resident_blocks) {
    for (unsigned i = 0; i < launch.blocks; ++i) free_block(&launch.resident_blocks[i]);
    free(launch.resident_blocks);
  }
  free(launch.order);
  free(launch.idle);
  free(workers);
  pthread_cond_destroy(&launch.changed);
  pthread_condattr_destroy(&monotonic);
  pthread_mutex_destroy(&launch.lock);
}

extern "C" uint64_t souffle_spec_size() { return sizeof(SouffleLaunchSpec); }
extern "C" uint64_t souffle_result_size() { return sizeof(SouffleLaunchResult); }
extern "C" uint64_t souffle_finding_size() { return sizeof(SouffleFinding); }
extern "C" uint64_t souffle_wait_size() { return sizeof(SouffleWait); }
