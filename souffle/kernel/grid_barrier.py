"""Grid-wide barriers of merged kernels: a part to exchange (paper §6.4).

A barrier says how the wait is written in TensorIR, which memory it keeps between waits, and the CUDA text of its device
function. Every barrier needs all blocks of the launch on the device at once, and is called by all threads of all blocks
equally often. What any thread wrote before its call, every thread may read after its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tvm import tirx
from tvm.backend.cuda.op import cuda_grid_sync

from souffle.errors import OptionError
from souffle.kernel.calls import KernelShape, LoopCall
from souffle.tvm_compat import PrimExpr

__all__ = ["COUNTER_FUNCTION", "GRID_BARRIERS", "STATE_DTYPE", "GridBarrier", "barrier_for", "waits"]

COUNTER_FUNCTION = "souffle_wait_for_grid"
"""The device function of the counter barrier."""

STATE_DTYPE = "uint32"
"""Of the memory that a barrier keeps."""


@dataclass(frozen=True)
class GridBarrier:
    """One way for all blocks of a kernel to wait for each other.

    Attributes
    ----------
    name : str
        As asked for.
    function : str
        The device function ``int function(unsigned* state, int num_blocks)``; empty for TVM's own operator, whose text
        its code generator writes.
    text : str
        CUDA text of the function.
    state_words : int
        Elements of type :data:`STATE_DTYPE` that it keeps in global memory. They are zero before the first launch, and
        each launch leaves them as the next one needs them, whatever its grid. Launches that share them must not
        overlap.
    """

    name: str
    function: str = ""
    text: str = ""
    state_words: int = 0

    def words(self, shape: KernelShape) -> int:
        """Words of state that a kernel needs of it."""
        return self.state_words if waits(shape) else 0

    def wait(self, state: Sequence[tirx.Var], num_blocks: PrimExpr) -> tirx.Stmt:
        """The statement at which all blocks wait.

        Parameters
        ----------
        state : sequence of Var
            The kernel's parameter for it, where it keeps one.
        num_blocks : PrimExpr
            Blocks of the launch.
        """
        if not self.function:
            return tirx.Evaluate(cuda_grid_sync())
        return tirx.Evaluate(tirx.call_extern("int32", self.function, *state, num_blocks))


def waits(shape: KernelShape) -> bool:
    """Whether a grid barrier stands in the text of a kernel, if only for steps of a loop that it does not come to."""
    before_loop = any(isinstance(call, LoopCall) and call.sync_first for call in shape.calls)
    return before_loop or any(call.sync_before for call in shape.stage_calls)


# Why this is a barrier.
#
# The count. At rest the lower 31 bits are 0. In one round block 0 adds 2^31 - (n - 1) and each of the n - 1 others adds
# 1: in all 2^31, so that the top bit changes with the last arrival and the lower bits are 0 again. A partial sum is
# less than 2^31, because n <= 2^31 - 1: with an arrival missing the top bit is as before. No round depends on n beyond
# its own sum, so that launches of different grids share the counter without a reset, and the addition wraps around by
# design. A block compares with the top bit that its own arrival found; that bit cannot change a second time before this
# block has seen the first change, since the next round needs its arrival.
#
# The order (PTX ISA, memory consistency model). A write W of thread t in block A, a read R of thread u in block B:
#   1. W precedes A's first bar.sync in t's program order, and bar.sync of all threads of the block synchronizes: W is
#      before thread 0's atom in causality order.
#   2. The atom is a release at gpu scope on the counter. B's thread 0 reads the counter with acquire at gpu scope, in
#      its own atom if it is the last to arrive and else in the load that sees the top bit changed. The value read comes
#      from the round's last arrival or a later one; every arrival is an atomic read-modify-write, so A's arrival
#      precedes that read in observation order, and the release pattern synchronizes with the acquire pattern.
#   3. B's second bar.sync takes it from thread 0 to u, before R in program order.
# Causality order is transitive, and needs no fence by the other threads: a release is cumulative over what happened
# before it, and on hardware it waits for the writes of the whole multiprocessor that it orders. All of it is about the
# generic proxy, which ordinary loads and stores and cp.async (not cp.async.bulk) use. ld.global.nc is outside of the
# model: the compiler emits it for parameters that the kernel does not write, and no kernel writes their memory under
# another name (souffle/codegen/workspace_layout.py).
#
# The cost. One fence each way: acq_rel on the atom spares the last to arrive, which all others wait for, the round trip
# of a load. No __nanosleep: one thread of a block polls, with one load on its way at a time, so that with the one to
# three blocks of 256 threads that a multiprocessor holds of a merged kernel a few hundred polls share the round trip to
# the L2, in which its slice serves about as many; and a sleep adds up to twice its length to each barrier. The load is
# an acquire itself rather than a relaxed one with a fence after it: the fence is on the critical path, what earlier
# turns invalidate in the first cache level is not.
_COUNTER_TEXT = f"""
static __device__ __forceinline__ int {COUNTER_FUNCTION}(unsigned* state, int num_blocks) {{
  __syncthreads();
  if (threadIdx.x == 0) {{
    size_t counter = __cvta_generic_to_global(state);
    unsigned add = blockIdx.x == 0 ? 0x80000000u - (unsigned)(num_blocks - 1) : 1u;
    unsigned found;
    asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], %2;" : "=r"(found) : "l"(counter), "r"(add) : "memory");
    unsigned now = found + add;
    while (((found ^ now) & 0x80000000u) == 0) {{
      asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(now) : "l"(counter) : "memory");
    }}
  }}
  __syncthreads();
  return 0;
}}
"""

GRID_BARRIERS = {
    barrier.name: barrier
    for barrier in (
        GridBarrier("cooperative"),
        # 32 words are a cache line, which polling then shares with no tensor.
        GridBarrier("counter", COUNTER_FUNCTION, _COUNTER_TEXT, 32),
    )
}
"""``"cooperative"``: ``this_grid().sync()`` of cooperative groups. ``"counter"``: a counter of arrivals of our own."""


def barrier_for(name: str) -> GridBarrier:
    """A barrier by name.

    Raises
    ------
    OptionError
        Naming those that there are.
    """
    if name not in GRID_BARRIERS:
        raise OptionError(f"grid_barrier={name!r} is not valid; choose one of {', '.join(GRID_BARRIERS)}")
    return GRID_BARRIERS[name]
