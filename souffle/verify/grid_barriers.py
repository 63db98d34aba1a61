"""What a kernel's blocks wait for each other with, and which memory the waiting and the compiler's caches rely on.

Taken for granted are TVM's operator, which is cooperative groups', a device function that counts arrivals in global
memory, and four that are the flags of blocks. Of these only the texts below are; their arguments stand where the
functions are written.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from souffle.certificate import Counterexample
from souffle.codegen.plan import Buffer, Kernel, Plan
from souffle.verify.expressions import Undecided
from souffle.verify.kernel_reader import COUNTER_FUNCTION, KernelText
from souffle.verify.stage_functions import Library
from souffle.verify.tiles_in_a_row import Prefetch, StageRun

__all__ = ["counter_text", "memory_of_its_own", "not_renamed"]

_KNOWN = """
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
_KNOWN_FLAGS = """
static __device__ __forceinline__ int souffle_ticks_before(unsigned* state) {
  unsigned before;
  size_t word = __cvta_generic_to_global(state + 32);
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(before) : "l"(word) : "memory");
  return (int)before;
}
static __device__ __forceinline__ int souffle_arrive(unsigned* state, int tick) {
  __syncthreads();
  if (threadIdx.x == 0) {
    size_t flag = __cvta_generic_to_global(state + 64 + blockIdx.x);
    asm volatile("st.release.gpu.global.u32 [%0], %1;" : : "l"(flag), "r"(tick) : "memory");
  }
  return 0;
}
static __device__ __forceinline__ int souffle_wait_for_slots(unsigned* state, int first, int last, int num_blocks,
                                                                 int tick) {
  int others = last - first + 1 < num_blocks ? last - first + 1 : num_blocks;
  for (int other = threadIdx.x; other < others; other += blockDim.x) {
    size_t flag = __cvta_generic_to_global(state + 64 + (first + other) % num_blocks);
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
    size_t left = __cvta_generic_to_global(state + 33);
    unsigned before;
    asm volatile("atom.inc.acq_rel.gpu.global.u32 %0, [%1], %2;"
                 : "=r"(before) : "l"(left), "r"(num_blocks - 1) : "memory");
    if (before == (unsigned)(num_blocks - 1)) {
      if (tick >= 0x40000000) {
        tick = 0;
        for (int word = 64; word < words; ++word) state[word] = 0;
      }
      state[32] = (unsigned)tick;
    }
  }
  return 0;
}
"""
_COUNTER_BYTES = 4
_WORD_BYTES, _FIRST_FLAG = 4, 64


def counter_text(plan: Plan, kernel: Kernel, text: KernelText) -> Iterator[Undecided]:
    """What a kernel calls to wait is what is known, and the only function of its name."""
    for name in sorted(text.calls):
        module = plan.modules[kernel.module].text
        known = _KNOWN if name == COUNTER_FUNCTION else _KNOWN_FLAGS
        if known.strip() not in module or module.count(f"{name}(unsigned") != 1:
            yield Undecided(f"{name}, whose text in the module is not the one that is known to wait")


def memory_of_its_own(plan: Plan, kernel: Kernel, text: KernelText, buffers: Sequence[int]) -> Iterator[Counterexample]:
    """Barriers of a launch count in memory that is kept for them, and nothing else touches such memory."""

    def bad(buffer: Buffer, stages: tuple[str, ...], why: str) -> Counterexample:
        return Counterexample("launch", kernel.name, stages, (), (), buffer.name, why)

    for parameter in text.counters:
        buffer = plan.buffers[buffers[parameter]]
        if buffer.kind != "state" or buffer.nbytes < _COUNTER_BYTES:
            kind = f"{buffer.nbytes} bytes of kind {buffer.kind!r}"
            yield bad(buffer, (), f"a grid barrier counts in it, and it is {kind}, not memory that begins as zero")
    for words in text.words:
        buffer = plan.buffers[buffers[text.counters[0]]]
        held = buffer.nbytes // _WORD_BYTES
        if words != held or held < _FIRST_FLAG + kernel.tiles:
            why = f"flags of {kernel.tiles} blocks take {words} words of it to be theirs, and it has {held}"
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
            if buffer.kind == "state":
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
