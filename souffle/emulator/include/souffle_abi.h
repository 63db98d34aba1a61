// What the fiber runtime and the compiled CUDA text share. Kept free of includes: it is parsed for every kernel text.
#ifndef SOUFFLE_ABI_H
#define SOUFFLE_ABI_H

struct uint3 {
  unsigned int x, y, z;
};

struct dim3 {
  unsigned int x, y, z;
  constexpr dim3(unsigned int a = 1, unsigned int b = 1, unsigned int c = 1) : x(a), y(b), z(c) {}
  constexpr dim3(uint3 v) : x(v.x), y(v.y), z(v.z) {}
  constexpr operator uint3() const { return uint3{x, y, z}; }
};

struct SouffleThread;
struct SouffleCheck;

// One argument of a launch: all three forms are filled in, the entry takes the one its parameter wants.
struct SouffleArg {
  long long i;
  double d;
  void* p;
};

struct SouffleKernel {
  const char* name;
  void (*entry)(const SouffleArg*);
  int parameters;
  const char* kinds;  // one letter per parameter: p pointer, i integer, f floating point, ? anything else
};

// The part of a thread that the kernel text reads. The runtime derives its own record from it.
struct SouffleThread {
  uint3 thread_index;
  uint3 block_index;
  dim3 block_extent;
  dim3 grid_extent;
  unsigned int linear;
  unsigned int lane;
  unsigned int warp;
  char* shared_base;
  unsigned int shared_size;
  SouffleCheck* check;  // null unless the text is checked
};

extern "C" {
typedef void (*SouffleWarpFunction)(void** payloads, unsigned int mask);

void souffle_barrier(SouffleThread*, int id, int count);
int souffle_barrier_reduce(SouffleThread*, int predicate, int what);
void souffle_barrier_arrive(SouffleThread*, int id, int count);
void souffle_grid_sync(SouffleThread*);
void souffle_collective(SouffleThread*, unsigned int mask, const char* what, void* payload, SouffleWarpFunction);
unsigned int souffle_activemask(SouffleThread*, int line);
void souffle_relax(SouffleThread*);
void souffle_event(SouffleThread*);
void souffle_progress(SouffleThread*);
void souffle_fence(SouffleThread*);
void souffle_order_relaxed(SouffleThread*);
void souffle_order_release(SouffleThread*, const void* address, int how);
void souffle_order_acquire(SouffleThread*, const void* address);
void souffle_copy_async(SouffleThread*, void* destination, const void* source, unsigned int bytes, unsigned int source_bytes);
void souffle_copy_commit(SouffleThread*);
void souffle_copy_wait(SouffleThread*, int groups_left, int uncommitted_too);
unsigned long long souffle_globaltimer(SouffleThread*);
void souffle_exit(SouffleThread*) __attribute__((noreturn));
void souffle_fail(SouffleThread*, const char* message) __attribute__((noreturn));
SouffleThread* souffle_current() __attribute__((const));
}

#endif
