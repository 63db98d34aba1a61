// The pipeline primitives: asynchronous copies from global to shared memory.
#pragma once
#define __pipeline_memcpy_async(...) souffle_pipeline_copy(__VA_ARGS__)
#define __pipeline_commit() souffle_copy_commit(souffle_self)
#define __pipeline_wait_prior(n) souffle_copy_wait(souffle_self, int(n), 0)
SOUFFLE_INLINE void souffle_pipeline_copy(void* to, const void* from, size_t bytes, size_t zero_fill = 0) {
  souffle_copy_async(souffle_self, to, from, unsigned(bytes), unsigned(bytes - zero_fill));
}
