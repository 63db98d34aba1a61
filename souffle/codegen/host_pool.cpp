// The threads that share the parallel loops of networks on a processor.
//
// Linked into the library of each network; a process uses the copy of the first that it loads, and never unloads that
// (souffle/runtime/host_threads.py). Generated code calls souffle_pool_1_launch for each parallel loop, as it would
// TVM's own: that keeps a pool for each thread that calls, which stays when the thread ends, and it confines the calling
// thread to the processors of the pool.
//
// A loop is cut into more parts than threads compute it. Each thread begins with parts of its own, which are the same in
// every call, so that what a part reads of weights is still in that core's caches; then it takes what others have not
// begun. So a thread that has to be woken, or that the system has stopped, is not waited for before it has begun: the
// caller computes what is left, takes the region back from it, and is never blocked by others that call at the same time.
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdint.h>
#include <stdlib.h>
#include <time.h>

#include <atomic>

namespace {

struct Group {  // TVMParallelGroupEnv
  void* sync_handle;
  int32_t num_task;
};

typedef int (*Body)(int task, Group* group, void* data);

constexpr int kPartsOfThread = 2;  // with 4, an LSTM of many small loops took 7 % longer on an idle machine
constexpr int64_t kSpinNs = 100000;  // several times what waking a thread takes; then it sleeps

struct alignas(64) Share {
  std::atomic<int> taken;  // of the parts that one thread begins with
};

struct Region {
  Body body;
  void* data;
  Group group;
  int threads;
  Share* shares;
  std::atomic<int> failed;  // what a part returned that was not 0
  std::atomic<int> inside;  // workers that have it, or may still take it
  int processor;            // on which the caller computes
};

struct Worker {
  std::atomic<Region*> region;
  std::atomic<bool> asleep;
  bool called;  // by the mutex: for a region that may be gone
  int share;   // of the region
  int number;  // in the order in which they were begun
  pthread_mutex_t mutex;
  pthread_cond_t woken;
  Worker* below;  // in the stack of idle workers
  std::atomic<int> processor;  // on which it computed last; -1 where that is not known
#if defined(__linux__)
  pthread_t thread;
  cpu_set_t processors;  // that it may run on
#endif
};

pthread_mutex_t idle_mutex = PTHREAD_MUTEX_INITIALIZER;
Worker* idle = nullptr;  // the one that was busy last on top: it may not sleep yet
int workers = 0;
thread_local int threads_of_calls = 1;

inline void pause() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

int64_t now() {
  timespec at;
  clock_gettime(CLOCK_MONOTONIC, &at);
  return at.tv_sec * INT64_C(1000000000) + at.tv_nsec;
}

void put_back(Worker* worker) {
  pthread_mutex_lock(&idle_mutex);
  worker->below = idle;
  idle = worker;
  pthread_mutex_unlock(&idle_mutex);
}

void compute(Region* region, int own) {
  for (int i = 0; i < region->threads; ++i) {
    int share = (own + i) % region->threads;
    std::atomic<int>& taken = region->shares[share].taken;
    while (taken.load(std::memory_order_relaxed) < kPartsOfThread) {
      int part = taken.fetch_add(1, std::memory_order_relaxed);
      if (part >= kPartsOfThread) break;
      int status = region->body(share * kPartsOfThread + part, &region->group, region->data);
      if (status != 0) region->failed.store(status, std::memory_order_relaxed);
    }
  }
}

Region* next_region(Worker* worker) {
  for (;;) {
    int64_t end = now() + kSpinNs;
    do {
      for (int turn = 0; turn < 64; ++turn) {
        if (worker->region.load(std::memory_order_relaxed) != nullptr) {
          if (Region* region = worker->region.exchange(nullptr)) return region;
        }
        pause();
      }
    } while (now() < end);
    pthread_mutex_lock(&worker->mutex);
    worker->asleep.store(true);
    Region* region;
    while ((region = worker->region.exchange(nullptr)) == nullptr && !worker->called) {
      pthread_cond_wait(&worker->woken, &worker->mutex);
    }
    worker->called = false;
    worker->asleep.store(false);
    pthread_mutex_unlock(&worker->mutex);
    if (region != nullptr) return region;
    // It came too late, and its region was taken back. More loops follow, for which it has to be awake.
  }
}

int this_processor() {
#if defined(__linux__)
  return sched_getcpu();
#else
  return -1;
#endif
}

// The system may run a worker on the caller's processor, where each would wait in turn until the other's time is over. A
// worker that waits there for its turn cannot leave by itself: loops that are done without it would be so for a second.
void move_away(Worker* worker, int processor) {
#if defined(__linux__)
  if (processor < 0 || processor >= CPU_SETSIZE) return;
  cpu_set_t others = worker->processors;
  CPU_CLR(processor, &others);
  if (CPU_COUNT(&others) > 0) pthread_setaffinity_np(worker->thread, sizeof(others), &others);
  worker->processor.store(-1, std::memory_order_relaxed);
#endif
}

void* run(void* argument) {
  Worker* worker = static_cast<Worker*>(argument);
  for (;;) {
    Region* region = next_region(worker);
    int processor = this_processor();
    worker->processor.store(processor, std::memory_order_relaxed);
    if (processor == region->processor) move_away(worker, processor);
    compute(region, worker->share);
    // First idle, then out: the caller's next loop finds it. The region is gone once the caller knows that all are out.
    put_back(worker);
    region->inside.fetch_sub(1, std::memory_order_release);
  }
  return nullptr;
}

// With idle_mutex held; null where the system gives no thread.
Worker* begin_worker() {
  Worker* worker = static_cast<Worker*>(calloc(1, sizeof(Worker)));
  if (worker == nullptr) return nullptr;
  pthread_mutex_init(&worker->mutex, nullptr);
  pthread_cond_init(&worker->woken, nullptr);
  // Signals are for the threads of the program that called.
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  worker->processor.store(-1, std::memory_order_relaxed);
#if defined(__linux__)
  sched_getaffinity(0, sizeof(worker->processors), &worker->processors);
  pthread_t& thread = worker->thread;
#else
  pthread_t thread;
#endif
  int status = pthread_create(&thread, nullptr, run, worker);
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  if (status != 0) {
    free(worker);
    return nullptr;
  }
  pthread_detach(thread);
  worker->number = workers++;
  move_away(worker, this_processor());
  return worker;
}

int take(Worker** taken, int wanted) {
  int count = 0;
  pthread_mutex_lock(&idle_mutex);
  while (count < wanted && idle != nullptr) {
    taken[count++] = idle;
    idle = idle->below;
  }
  while (count < wanted && workers < wanted) {
    Worker* worker = begin_worker();
    if (worker == nullptr) break;
    taken[count++] = worker;
  }
  pthread_mutex_unlock(&idle_mutex);
  // In one order, for each to have the share that it had in the last loop.
  for (int i = 1; i < count; ++i) {
    Worker* worker = taken[i];
    int at = i;
    for (; at > 0 && taken[at - 1]->number > worker->number; --at) taken[at] = taken[at - 1];
    taken[at] = worker;
  }
  return count;
}

void give(Worker* worker, Region* region, int share) {
  int processor = worker->processor.load(std::memory_order_relaxed);
  if (processor >= 0 && processor == region->processor) move_away(worker, processor);
  worker->share = share;
  worker->region.store(region);
  if (worker->asleep.load()) {
    pthread_mutex_lock(&worker->mutex);
    worker->called = true;
    pthread_cond_signal(&worker->woken);
    pthread_mutex_unlock(&worker->mutex);
  }
}

void wait_for(Region* region) {
  int64_t end = now() + kSpinNs;
  for (;;) {
    for (int turn = 0; turn < 64; ++turn) {
      if (region->inside.load(std::memory_order_acquire) == 0) return;
      pause();
    }
    if (now() >= end) sched_yield();  // one of them may have to run here
  }
}

// A child process has the calling thread alone.
void before_fork() { pthread_mutex_lock(&idle_mutex); }
void in_parent() { pthread_mutex_unlock(&idle_mutex); }
void in_child() {
  idle = nullptr;
  workers = 0;
  pthread_mutex_unlock(&idle_mutex);
}

}  // namespace

extern "C" {

#define EXPORTED __attribute__((visibility("default")))

// Once in a process, before the first launch.
EXPORTED void souffle_pool_1_begin() { pthread_atfork(before_fork, in_parent, in_child); }

// How many threads may compute the loops of the calling thread, itself among them; 1 until it is said.
EXPORTED void souffle_pool_1_limit(int threads) { threads_of_calls = threads; }

EXPORTED int souffle_pool_1_launch(Body body, void* data, int) {
  int wanted = threads_of_calls - 1;
  Worker** taken = wanted > 0 ? static_cast<Worker**>(__builtin_alloca(wanted * sizeof(Worker*))) : nullptr;
  int count = wanted > 0 ? take(taken, wanted) : 0;
  if (count == 0) {
    Group alone = {nullptr, 1};
    return body(0, &alone, data);
  }
  int threads = count + 1;
  Share* shares = static_cast<Share*>(__builtin_alloca_with_align(threads * sizeof(Share), 8 * alignof(Share)));
  for (int i = 0; i < threads; ++i) shares[i].taken.store(0, std::memory_order_relaxed);
  Region region = {body, data, {nullptr, threads * kPartsOfThread}, threads, shares, {0}, {count}, this_processor()};
  for (int i = 0; i < count; ++i) give(taken[i], &region, i + 1);
  compute(&region, 0);
  for (int i = 0; i < count; ++i) {
    Region* untouched = &region;
    if (taken[i]->region.compare_exchange_strong(untouched, nullptr)) {
      put_back(taken[i]);
      region.inside.fetch_sub(1, std::memory_order_relaxed);
    }
  }
  wait_for(&region);
  return region.failed.load(std::memory_order_relaxed);
}

}  // extern "C"
