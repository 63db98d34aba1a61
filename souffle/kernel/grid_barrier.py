"""Grid-wide barriers of merged kernels: a part to exchange (paper §6.4).

A barrier says how the wait is written in TensorIR, which memory it keeps between waits, and the CUDA text of its device
function. Every barrier needs all blocks of the launch on the device at once, and is called by all threads of all blocks
equally often. What any thread wrote before its call, every thread may read after its own.

What a block does while it waits, such as the copies of a prologue (:mod:`souffle.schedule.lower.prologues`), stands
between the two halves of a barrier: its arrival, and the wait for all others, so that nobody waits for it. Where a
barrier has no halves it stands before the barrier, and copies behind one of the block alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tvm import tirx
from tvm.backend.cuda.op import cuda_grid_sync

from souffle.errors import OptionError
from souffle.kernel.kernel_shape import KernelShape, LoopCall
from souffle.kernel.watchdog import OVERDUE_FUNCTION, POLLS
from souffle.tvm_compat import PrimExpr, sequence
from souffle.watchdog import GRID_BARRIER

__all__ = [
    "ARRIVAL_FUNCTION",
    "COMPLETION_FUNCTION",
    "COUNTER_FUNCTION",
    "GRID_BARRIERS",
    "STATE_DTYPE",
    "WATCHED_COUNTER",
    "WATCHED_FUNCTION",
    "HALVES_TEXT",
    "GridBarrier",
    "WaitPlace",
    "barrier_for",
    "waits",
]

COUNTER_FUNCTION = "souffle_wait_for_grid"
"""The device function of the counter barrier."""

ARRIVAL_FUNCTION = "souffle_grid_arrival"
"""Its first half: ``unsigned ARRIVAL_FUNCTION(unsigned* state, int num_blocks)``, what the arrival has found."""

COMPLETION_FUNCTION = "souffle_grid_completion"
"""Its second half: ``int COMPLETION_FUNCTION(unsigned* state, int num_blocks, unsigned found)``."""

WATCHED_FUNCTION = "souffle_watched_wait_for_grid"
"""The same with a limit."""

OVER_WORD = 32
"""Of the state: the one that says that a wait of the run is over."""

STATE_DTYPE = "uint32"
"""Of the memory that a barrier keeps."""


@dataclass(frozen=True)
class WaitPlace:
    """Where a wait stands, which one that has a limit can tell.

    Attributes
    ----------
    kernel : int
        The kernel's number in its network.
    stage : int
        That of the stage before which it stands, of :attr:`souffle.kernel.kernel_shape.KernelShape.functions`.
    step : PrimExpr
        Of the loop that it stands in; -1 outside of loops.
    """

    kernel: int
    stage: int
    step: PrimExpr


@dataclass(frozen=True)
class GridBarrier:
    """One way for all blocks of a kernel to wait for each other.

    Attributes
    ----------
    name : str
        As asked for.
    function : str
        The device function ``int function(unsigned* state, int num_blocks)``; empty for TVM's own operator, whose text
        its code generator writes. With a limit, ``int function(unsigned* state, int num_blocks, unsigned* record, long
        long limit, int kernel, int stage, int step)``.
    text : str
        CUDA text of the function.
    state_words : int
        Elements of type :data:`STATE_DTYPE` that it keeps in global memory. They are zero before the first launch, and
        each launch leaves them as the next one needs them, whatever its grid. Launches that share them must not
        overlap. After a run in which a wait was over they are of no use.
    limit : int
        Nanoseconds after which a wait is over (:mod:`souffle.kernel.watchdog`); 0 for none.
    halves : bool
        Whether an arrival and the wait for the others may be called apart.
    """

    name: str
    function: str = ""
    text: str = ""
    state_words: int = 0
    limit: int = 0
    halves: bool = False

    def words(self, shape: KernelShape) -> int:
        """Words of state that a kernel needs of it."""
        return self.state_words if waits(shape) else 0

    def wait(
        self,
        parameters: Sequence[tirx.Var],
        num_blocks: PrimExpr,
        place: WaitPlace,
        copies: Sequence[tirx.Stmt] = (),
        asked: Sequence[tirx.Stmt] = (),
    ) -> tirx.Stmt:
        """The statement at which all blocks wait.

        Parameters
        ----------
        parameters : sequence of Var
            The kernel's, for its state and the record of a wait that is over, as far as it needs them.
        num_blocks : PrimExpr
            Blocks of the launch.
        place : WaitPlace
        copies : sequence of Stmt
            What writes the block's shared memory when all of its threads have come, before it goes on.
        asked : sequence of Stmt
            What asks for memory ahead.
        """
        if (copies or asked) and self.halves:
            state, found = parameters[0], tirx.Var("found", STATE_DTYPE)
            arrival = tirx.call_extern(STATE_DTYPE, ARRIVAL_FUNCTION, state, num_blocks)
            completion = tirx.call_extern("int32", COMPLETION_FUNCTION, state, num_blocks, found)
            return sequence(tirx.Bind(found, arrival), *copies, *asked, tirx.Evaluate(completion))
        if copies or asked:
            block = [tirx.Evaluate(tirx.call_intrin("int32", "tirx.tvm_storage_sync", "shared"))] if copies else []
            return sequence(*asked, *block, *copies, self.wait(parameters, num_blocks, place))
        if not self.function:
            return tirx.Evaluate(cuda_grid_sync())
        state, *record = parameters
        arguments = [state, num_blocks, *record]
        if self.limit:
            numbers = (tirx.IntImm("int32", number) for number in (place.kernel, place.stage))
            arguments += [tirx.IntImm("int64", self.limit), *numbers, place.step]
        return tirx.Evaluate(tirx.call_extern("int32", self.function, *arguments))


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
_ARRIVE = """\
  __syncthreads();
  if (threadIdx.x == 0) {
    size_t counter = __cvta_generic_to_global(state);
    unsigned add = blockIdx.x == 0 ? 0x80000000u - (unsigned)(num_blocks - 1) : 1u;
    unsigned found;
    asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], %2;" : "=r"(found) : "l"(counter), "r"(add) : "memory");
    unsigned now = found + add;
"""

_LOOK = '''asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(now) : "l"(counter) : "memory");'''

_COUNTER_TEXT = f"""
static __device__ __forceinline__ int {COUNTER_FUNCTION}(unsigned* state, int num_blocks) {{
{_ARRIVE}    while (((found ^ now) & 0x80000000u) == 0) {{
      {_LOOK}
    }}
  }}
  __syncthreads();
  return 0;
}}
"""

# The same in two halves. Each thread of a block comes to both, so that what is said above of the whole holds of them;
# what stands between is after A's first bar.sync and before B's second one. It is in no order with other blocks.
HALVES_TEXT = f"""
static __device__ __forceinline__ unsigned {ARRIVAL_FUNCTION}(unsigned* state, int num_blocks) {{
  unsigned found = 0;
  __syncthreads();
  if (threadIdx.x == 0) {{
    size_t counter = __cvta_generic_to_global(state);
    unsigned add = blockIdx.x == 0 ? 0x80000000u - (unsigned)(num_blocks - 1) : 1u;
    asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], %2;" : "=r"(found) : "l"(counter), "r"(add) : "memory");
  }}
  return found;
}}
static __device__ __forceinline__ int {COMPLETION_FUNCTION}(unsigned* state, int num_blocks, unsigned found) {{
  if (threadIdx.x == 0) {{
    size_t counter = __cvta_generic_to_global(state);
    unsigned now = found + (blockIdx.x == 0 ? 0x80000000u - (unsigned)(num_blocks - 1) : 1u);
    while (((found ^ now) & 0x80000000u) == 0) {{
      {_LOOK}
    }}
  }}
  __syncthreads();
  return 0;
}}
"""
"""CUDA text of both halves."""

# With a limit. It is the barrier above, but for what thread 0 does while it polls, and that a block may end: a call
# that returns has read the top bit changed, by the same arrival and the same load, and bar.red orders what bar.sync
# does. All threads of a block end together, so that none is missing at a barrier of the block. What the word in the
# second cache line of the state is for, and why the results of blocks that go on do not count then, is said in
# souffle/kernel/watchdog.py.
#
# The cost. A call, for it is a function of its own: written out at each wait, an LSTM's kernel with a hundred of them
# took 125 registers in place of 80 and 30 % more machine code. Nothing else on the way of a wait that ends within 64
# polls; of a longer one each 64th poll comes a load later.
_LINE = 32
_WATCHED_TEXT = f"""
static __device__ __noinline__ int {WATCHED_FUNCTION}(unsigned* state, int num_blocks, unsigned* record,
                                                                 long long limit, int kernel, int stage, int step) {{
  int over = 0;
{_ARRIVE}    long long last = 0, left = limit;
    for (unsigned polls = 1; ((found ^ now) & 0x80000000u) == 0; ++polls) {{
      if (polls % {POLLS} == 0 && {OVERDUE_FUNCTION}(state + {OVER_WORD}, record, limit, &last, &left, {GRID_BARRIER},
                                                kernel, stage, step, -1, 0, now, num_blocks)) {{
        over = 1;
        break;
      }}
      {_LOOK}
    }}
  }}
  if (__syncthreads_or(over)) asm volatile("exit;");
  return 0;
}}
"""

GRID_BARRIERS = {
    barrier.name: barrier
    for barrier in (
        GridBarrier("cooperative"),
        # A whole cache line, which polling then shares with no tensor.
        GridBarrier("counter", COUNTER_FUNCTION, _COUNTER_TEXT, _LINE, halves=True),
    )
}
"""``"cooperative"``: ``this_grid().sync()`` of cooperative groups. ``"counter"``: a counter of arrivals of our own."""


WATCHED_COUNTER = GridBarrier("counter", WATCHED_FUNCTION, _WATCHED_TEXT, 2 * _LINE, limit=1)
"""The counter for waits with a limit, which is still to be given."""


def barrier_for(name: str, watchdog_ms: float | None = None) -> GridBarrier:
    """A barrier by name.

    Parameters
    ----------
    name : str
    watchdog_ms : float, optional
        After how many milliseconds a wait is over.

    Raises
    ------
    OptionError
        Naming those that there are; or if one that has no limit is to have one.
    """
    if name not in GRID_BARRIERS:
        raise OptionError(f"grid_barrier={name!r} is not valid; choose one of {', '.join(GRID_BARRIERS)}")
    if watchdog_ms is None:
        return GRID_BARRIERS[name]
    if name != WATCHED_COUNTER.name:
        raise OptionError(
            f"the barrier {name} has no limit; give watchdog_ms with grid_barrier={WATCHED_COUNTER.name!r}"
        )
    return replace(WATCHED_COUNTER, limit=round(watchdog_ms * 1e6))
