"""What a kernel's blocks wait for each other with, and which memory the waiting and the compiler's caches rely on.

Two barriers are taken for granted: TVM's operator, which is cooperative groups', and one device function that counts
arrivals in global memory. Of the second only the text below is; its argument stands where the function is written.
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
_COUNTER_BYTES = 4


def counter_text(plan: Plan, kernel: Kernel, text: KernelText) -> Iterator[Undecided]:
    """The counter barrier that a kernel calls is the one that is known, and the only one of its name."""
    if not text.counters:
        return
    module = plan.modules[kernel.module].text
    if _KNOWN.strip() not in module or module.count(f"{COUNTER_FUNCTION}(unsigned") != 1:
        yield Undecided(f"{COUNTER_FUNCTION}, whose text in the module is not the one that is known to be a barrier")


def memory_of_its_own(plan: Plan, kernel: Kernel, text: KernelText, buffers: Sequence[int]) -> Iterator[Counterexample]:
    """Barriers of a launch count in memory that is kept for them, and nothing else touches such memory."""

    def bad(buffer: Buffer, stages: tuple[str, ...], why: str) -> Counterexample:
        return Counterexample("launch", kernel.name, stages, (), (), buffer.name, why)

    for parameter in text.counters:
        buffer = plan.buffers[buffers[parameter]]
        if buffer.kind != "state" or buffer.nbytes < _COUNTER_BYTES:
            kind = f"{buffer.nbytes} bytes of kind {buffer.kind!r}"
            yield bad(buffer, (), f"a grid barrier counts in it, and it is {kind}, not memory that begins as zero")
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
