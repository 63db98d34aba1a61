// Calls the functions of a network one after another, as souffle/runtime/host_calls.py has put them down.
//
// Linked into the library of each network. From Python each call would take a microsecond or two, which is a tenth of
// what the step of a recurrent layer takes.
#include <stdint.h>
#include <time.h>

namespace {

struct Argument {  // TVMFFIAny
  int32_t type;
  uint32_t padding;
  void* value;
};

typedef int (*Function)(void* self, const Argument* arguments, int32_t count, Argument* result);

struct Call {
  Function function;
  const Argument* arguments;
  int64_t count;
};

int64_t now() {
  timespec at;
  clock_gettime(CLOCK_MONOTONIC, &at);
  return at.tv_sec * INT64_C(1000000000) + at.tv_nsec;
}

}  // namespace

// Calls those from `begin` to `end`, but begins no more of them after so many nanoseconds if that is not 0. Returns how
// far it came, or -1 - i if call i failed (what it says of that is with TVM). Into `times`, if that is not null, comes
// when each call began, and behind them when the last one ended.
extern "C" __attribute__((visibility("default"))) int64_t souffle_calls_1_run(
    const Call* calls, int64_t begin, int64_t end, int64_t nanoseconds, int64_t* times) {
  int64_t last = nanoseconds > 0 ? now() + nanoseconds : 0;
  for (int64_t i = begin; i < end; ++i) {
    if (times != nullptr) times[i] = now();
    Argument result = {0, 0, nullptr};
    if (calls[i].function(nullptr, calls[i].arguments, static_cast<int32_t>(calls[i].count), &result) != 0) {
      return -1 - i;
    }
    if (last != 0 && now() >= last && i + 1 < end) return i + 1;
  }
  if (times != nullptr) times[end] = now();
  return end;
}
