"""What a kernel's blocks wait for each other with, and which memory the waiting and the compiler's caches rely on.

Taken for granted are TVM's operator, which is cooperative groups', a device function that counts arrivals in global
memory, and four that are the flags of blocks; those that wait without a limit or with one. Of these only the texts
below are; their arguments stand where the functions are written. With a limit a call returns as it does without or ends
all threads of its block, and writes first that it did: the proof is of the runs whose record is empty, and no other
gives a result.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from souffle.certificate import Counterexample
from souffle.codegen.plan import Buffer, Kernel, Plan
from souffle.verify.expressions import Undecided
from souffle.verify.kernel_reader import KernelText
from souffle.verify.stage_functions import Library
from souffle.verify.tiles_in_a_row import Prefetch, StageRun
from souffle.verify.wait_names import (
    ARRIVE_FUNCTION,
    AWAIT_FUNCTION,
    BEGIN_FUNCTION,
    COMPLETION_FUNCTION,
    COUNTER_FUNCTION,
    LEAVE_FUNCTION,
    WATCHED_AWAIT_FUNCTION,
    WATCHED_FUNCTION,
)

__all__ = ["counter_text", "memory_of_its_own", "not_renamed"]

_COUNTER = """
static __device__ __forceinline__ int souffle_wait_for_grid(unsigned* state, int num_blocks) {
  __syncthreads();
  if (threadIdx.x == 0) {
    size_t counter = __cvta_generic_to_global(state);
    unsigned add = blockIdx.x == 0 ? 0x80000000u - (unsigned)(num_blocks - 1) : 1u;
    unsigned found;
    asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], %2;" : "=r"(found) : "l"(counter), "r"(add) : "memory");
    unsigned now = found + add;
    while (((found ^ now) & 0x80000000u) == 0) {
      asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(now) : "l"(counter) : "memory");
    }
  }
  __syncthreads();
  return 0;
}
"""
_HALVES = """
static __device__ __forceinline__ unsigned souffle_grid_arrival(unsigned* state, int num_blocks) {
  unsigned found = 0;
  __syncthreads();
  if (threadIdx.x == 0) {
    size_t counter = __cvta_generic_to_global(state);
    unsigned add = blockIdx.x == 0 ? 0x80000000u - (unsigned)(num_blocks - 1) : 1u;
    asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], %2;" : "=r"(found) : "l"(counter), "r"(add) : "memory");
  }
  return found;
}
static __device__ __forceinline__ int souffle_grid_completion(unsigned* state, int num_blocks, unsigned found) {
  if (threadIdx.x == 0) {
    size_t counter = __cvta_generic_to_global(state);
    unsigned now = found + (blockIdx.x == 0 ? 0x80000000u - (unsigned)(num_blocks - 1) : 1u);
    while (((found ^ now) & 0x80000000u) == 0) {
      asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(now) : "l"(counter) : "memory");
    }
  }
  __syncthreads();
  return 0;
}
"""
_OVERDUE = """
static __device__ __forceinline__ int souffle_overdue(unsigned* over, unsigned* record, long long limit,
                                                      long long* last, long long* left, int kind, int kernel, int stage,
                                                      int step, int tile, unsigned index, unsigned found,
                                                      unsigned wanted) {
  long long now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now) : : "memory");
  long long passed = *last == 0 ? 0 : now - *last;
  *last = now;
  *left -= passed < limit / 8 ? passed : limit / 8;
  size_t word = __cvta_generic_to_global(over);
  unsigned before;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(before) : "l"(word) : "memory");
  if (before == 0 && *left > 0) return 0;
  if (before == 0) {
    asm volatile("atom.cas.acq_rel.gpu.global.b32 %0, [%1], 0, 1;" : "=r"(before) : "l"(word) : "memory");
    if (before == 0) {
      volatile unsigned* words = record;
      words[1] = blockIdx.x;
      words[2] = (unsigned)kernel;
      words[3] = (unsigned)stage;
      words[4] = (unsigned)step;
      words[5] = (unsigned)tile;
      words[6] = (unsigned)index;
      words[7] = (unsigned)found;
      words[8] = (unsigned)wanted;
      __threadfence_system();
      words[0] = (unsigned)kind;
    }
  }
  return 1;
}
"""
_WATCHED = """
static __device__ __noinline__ int souffle_watched_wait_for_grid(unsigned* state, int num_blocks, unsigned* record,
                                                                 long long limit, int kernel, int stage, int step) {
  int over = 0;
  __syncthreads();
  if (threadIdx.x == 0) {
    size_t counter = __cvta_generic_to_global(state);
    unsigned add = blockIdx.x == 0 ? 0x80000000u - (unsigned)(num_blocks - 1) : 1u;
    unsigned found;
    asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], %2;" : "=r"(found) : "l"(counter), "r"(add) : "memory");
    unsigned now = found + add;
    long long last = 0, left = limit;
    for (unsigned polls = 1; ((found ^ now) & 0x80000000u) == 0; ++polls) {
      if (polls % 64 == 0 && souffle_overdue(state + 32, record, limit, &last, &left, 1,
                                                kernel, stage, step, -1, 0, now, num_blocks)) {
        over = 1;
        break;
      }
      asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(now) : "l"(counter) : "memory");
    }
  }
  if (__syncthreads_or(over)) asm volatile("exit;");
  return 0;
}
"""
_FLAGS = """
static __device__ __forceinline__ int souffle_ticks_before(unsigned* state) {
  unsigned before;
  size_t word = __cvta_generic_to_global(state + 64);
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(before) : "l"(word) : "memory");
  return (int)before;
}
static __device__ __forceinline__ int souffle_arrive(unsigned* state, int tick) {
  __syncthreads();
  if (threadIdx.x == 0) {
    size_t flag = __cvta_generic_to_global(state + 96 + blockIdx.x);
    asm volatile("st.release.gpu.global.u32 [%0], %1;" : : "l"(flag), "r"(tick) : "memory");
  }
  return 0;
}
static __device__ __forceinline__ int souffle_wait_for_slots(unsigned* state, int first, int last, int num_blocks,
                                                                 int tick) {
  int others = last - first + 1 < num_blocks ? last - first + 1 : num_blocks;
  for (int other = threadIdx.x; other < others; other += blockDim.x) {
    size_t flag = __cvta_generic_to_global(state + 96 + (first + other) % num_blocks);
    int found;
    do {
      asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(found) : "l"(flag) : "memory");
    } while (found < tick);
  }
  __syncthreads();
  return 0;
}
static __device__ __forceinline__ int souffle_leave(unsigned* state, int num_blocks, int tick, int words) {
  __syncthreads();
  if (threadIdx.x == 0) {
    size_t left = __cvta_generic_to_global(state + 65);
    unsigned before;
    asm volatile("atom.inc.acq_rel.gpu.global.u32 %0, [%1], %2;"
                 : "=r"(before) : "l"(left), "r"(num_blocks - 1) : "memory");
    if (before == (unsigned)(num_blocks - 1)) {
      if (tick >= 0x40000000) {
        tick = 0;
        for (int word = 96; word < words; ++word) state[word] = 0;
      }
      state[64] = (unsigned)tick;
    }
  }
  return 0;
}
"""
_WATCHED_AWAIT = """
static __device__ __noinline__ int souffle_watched_wait_for_slots(unsigned* state, int first, int last, int num_blocks,
                                                                  int tick, unsigned* record, long long limit,
                                                                  int kernel, int stage, int step, int slot) {
  int over = 0;
  int others = last - first + 1 < num_blocks ? last - first + 1 : num_blocks;
  for (int other = threadIdx.x; other < others && !over; other += blockDim.x) {
    int block = (first + other) % num_blocks;
    size_t flag = __cvta_generic_to_global(state + 96 + block);
    int found;
    long long past = 0, left = limit;
    for (unsigned polls = 1;; ++polls) {
      asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(found) : "l"(flag) : "memory");
      if (found >= tick) break;
      if (polls % 64 == 0 && souffle_overdue(state + 32, record, limit, &past, &left, 2,
                                                kernel, stage, step, slot, block, found, tick)) {
        over = 1;
        break;
      }
    }
  }
  if (__syncthreads_or(over)) asm volatile("exit;");
  return 0;
}
"""
_KNOWN = {
    COUNTER_FUNCTION: (_COUNTER,),
    COMPLETION_FUNCTION: (_HALVES,),
    WATCHED_FUNCTION: (_OVERDUE, _WATCHED),
    **dict.fromkeys((BEGIN_FUNCTION, ARRIVE_FUNCTION, AWAIT_FUNCTION, LEAVE_FUNCTION), (_FLAGS,)),
    WATCHED_AWAIT_FUNCTION: (_OVERDUE, _WATCHED_AWAIT),
}
_COUNTER_BYTES, _WATCHED_BYTES = 4, 4 * 33
"""What a barrier touches of its memory: the counter; with a limit, also the word that says that a wait is over."""
_RECORD_BYTES = 4 * 9
_WORD_BYTES, _FIRST_FLAG = 4, 96


def counter_text(plan: Plan, kernel: Kernel, text: KernelText) -> Iterator[Undecided]:
    """What a kernel calls to wait is what is known, and the only function of its name."""
    for name in text.calls:
        module = plan.modules[kernel.module].text
        if not all(known.strip() in module and _alone(known, module) for known in _KNOWN[name]):
            yield Undecided(f"{name}, whose text in the module is not the one that is known to wait")


def _alone(known: str, module: str) -> bool:
    """Whether a module defines each function of this text once."""
    names = re.findall(r"(\w+)\(unsigned\*", known)
    return all(module.count(f"{name}(unsigned*") == 1 for name in names)


def memory_of_its_own(plan: Plan, kernel: Kernel, text: KernelText, buffers: Sequence[int]) -> Iterator[Counterexample]:
    """Barriers of a launch count in memory that is kept for them, and nothing else touches such memory."""

    def bad(buffer: Buffer, stages: tuple[str, ...], why: str) -> Counterexample:
        return Counterexample("launch", kernel.name, stages, (), (), buffer.name, why)

    least = _WATCHED_BYTES if text.records else _COUNTER_BYTES
    for parameter in text.counters:
        buffer = plan.buffers[buffers[parameter]]
        if buffer.kind != "state" or buffer.nbytes < least:
            kind = f"{buffer.nbytes} bytes of kind {buffer.kind!r}"
            yield bad(buffer, (), f"a grid barrier counts in it, and it is {kind}, not memory that begins as zero")
    for words in text.words:
        buffer = plan.buffers[buffers[text.counters[0]]]
        held = buffer.nbytes // _WORD_BYTES
        if words != held or held < _FIRST_FLAG + kernel.tiles:
            why = f"flags of {kernel.tiles} blocks take {words} words of it to be theirs, and it has {held}"
            yield bad(buffer, (), why)
    for parameter in text.records:
        buffer = plan.buffers[buffers[parameter]]
        if buffer.kind != "record" or buffer.nbytes < _RECORD_BYTES:
            kind = f"{buffer.nbytes} bytes of kind {buffer.kind!r}"
            why = f"a wait that is over is written to it, and it is {kind}, which the host does not read"
            yield bad(buffer, (), why)
    if len({buffers[parameter] for parameter in text.counters}) > 1:
        buffer = plan.buffers[buffers[text.counters[0]]]
        yield bad(buffer, (), "the grid barriers of one launch count in different memory")
    for event in text.events:
        name = event.name if isinstance(event, StageRun) else "a prefetch"
        pointers = event.pointers if isinstance(event, StageRun) else ()
        pointers = (event.pointer,) if isinstance(event, Prefetch) else pointers
        for parameter, _ in pointers:
            buffer = plan.buffers[buffers[parameter]]
            if buffer.kind in ("state", "record"):
                yield bad(buffer, (name,), f"{name} is given the memory of a grid barrier")


def not_renamed(
    plan: Plan, kernel: Kernel, text: KernelText, library: Library, buffers: Sequence[int]
) -> Iterator[Counterexample | Undecided]:
    """What a kernel reads through parameters that it never writes, it does not write through others.

    nvcc may load through such a parameter with ``ld.global.nc``, which no barrier orders: PTX wants the memory
    unwritten for as long as the kernel runs, not only until the next barrier.
    """
    read: dict[int, str] = {}
    written: dict[int, str] = {}
    for run in dict.fromkeys(e for e in text.events if isinstance(e, StageRun)):
        try:
            footprint = library.footprint(run)
        except Undecided as reason:
            yield reason
            return
        for number, (parameter, _) in enumerate(run.pointers):
            if footprint.range_of(number, False) is not None:
                read.setdefault(parameter, run.name)
            if footprint.range_of(number, True) is not None:
                written.setdefault(parameter, run.name)
    for one, reader in read.items():
        for other, writer in written.items():
            if one in written or not _overlap(buffers[one], buffers[other], plan):
                continue
            names = (plan.buffers[buffers[one]].name, plan.buffers[buffers[other]].name)
            why = (
                f"{reader} reads {names[0]} through a parameter that the kernel never writes, so that the compiler may "
                f"load it past the coherent cache, and {writer} writes {names[1]} in the same memory"
            )
            element = " and ".join(dict.fromkeys(names))
            yield Counterexample("aliased pointers", kernel.name, (reader, writer), (), (), element, why)


def _overlap(one: int, other: int, plan: Plan) -> bool:
    a, b = plan.buffers[one], plan.buffers[other]
    if a.kind != "workspace" or b.kind != "workspace":
        return one == other
    return a.offset < b.offset + b.nbytes and b.offset < a.offset + a.nbytes
