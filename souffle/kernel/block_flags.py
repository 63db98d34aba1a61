"""Flags of blocks, where a tile waits for those that it needs instead of all blocks for each other.

::

    stage A                          stage A
    grid barrier              →      arrive(t)                     every block says: I am done with all before
    stage B                          B: wait(first .. last, t)     a tile waits for the blocks of the slots it reads

Every block has one flag, which only it writes: how many times it has arrived, a *tick*. Arrivals stand at the same
places of the text for all blocks, so the k-th of one block and the k-th of another are the same place. A wait names
slots of tiles, not blocks: slot ``n`` is on block ``n % num_blocks``, whatever the grid.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from tvm import tirx

from souffle.kernel.grid_barrier import OVER_WORD, WaitPlace
from souffle.kernel.watchdog import OVERDUE_FUNCTION, POLLS
from souffle.tvm_compat import PrimExpr
from souffle.watchdog import FLAG

__all__ = [
    "ARRIVE_FUNCTION",
    "BEGIN_FUNCTION",
    "FLAGS_TEXT",
    "FLAG_FUNCTIONS",
    "LEAVE_FUNCTION",
    "WAIT_FUNCTION",
    "WATCHED_WAIT_FUNCTION",
    "WATCHED_WAIT_TEXT",
    "BlockFlags",
    "flag_words",
]

BEGIN_FUNCTION = "souffle_ticks_before"
"""``f(state)``: the tick that all flags have reached before this launch."""

ARRIVE_FUNCTION = "souffle_arrive"
"""``f(state, tick)``: all that the block did before is done."""

WAIT_FUNCTION = "souffle_wait_for_slots"
"""``f(state, first, last, num_blocks, tick)``: the blocks of these slots have arrived there."""

WATCHED_WAIT_FUNCTION = "souffle_watched_wait_for_slots"
"""The same with a limit, ``f(..., record, limit, kernel, stage, step, slot)`` (:mod:`souffle.kernel.watchdog`)."""

LEAVE_FUNCTION = "souffle_leave"
"""``f(state, num_blocks, tick, words)``: the block waits no more in this launch, of which `tick` is the last."""

FLAG_FUNCTIONS = (BEGIN_FUNCTION, ARRIVE_FUNCTION, WAIT_FUNCTION, LEAVE_FUNCTION)

_BEFORE, _LEFT, _FLAGS = 64, 65, 96
"""Words of the state: behind those of the grid barrier, with what says that a wait is over, the tick of the last launch
and how many blocks have left this one; then, in cache lines of their own, the flags."""


def flag_words(blocks: int) -> int:
    """Words of state that the flags of so many blocks take, with what stands before them."""
    return _FLAGS + blocks


# Why a wait is one.
#
# Order. A write W of thread t in block A before A's arrival at tick k; a read, or a write, R of thread u in block B
# after B's wait for a slot of A at tick k:
#   1. W precedes A's bar.sync of the arrival in t's program order; bar.sync of all threads of the block synchronizes: W
#      is before thread 0's store in causality order.
#   2. The store is a release at gpu scope on A's flag. A thread of B reads that flag with acquire at gpu scope until it
#      is at least k. Only A writes it, always more than before, so the value read is of A's k-th arrival or of a later
#      one, and each of A's releases comes after the k-th in program order: the release pattern synchronizes with the
#      acquire pattern, and W is before the acquire.
#   3. B's bar.sync of the wait takes it from the polling thread to u, before R in program order.
# As for the grid barrier (souffle/kernel/grid_barrier.py), all of it is about the generic proxy, which cp.async uses
# too.
#
# At least, not exactly: a block may be ticks ahead of one that waits for it.
#
# Progress. Every block of the grid is on the device, and goes through the same text. A wait stands behind the arrival
# of its own tick in that text. Of the blocks that are not at the end let A be one with the least place in the text: if
# A waits, then for blocks that are at least as far and have therefore passed the arrival. So A goes on.
#
# Launches. Flags are never reset: those of a launch begin where the last one ended, for which the last block to leave
# adds the ticks of the launch, whatever they and the grid were; flags of blocks that this grid does not have are
# behind. So that nothing wraps around, the last block sets all back to zero where the half of what a word holds is
# near: nobody else reads or writes them then. A launch that is broken off leaves them anyhow; whoever breaks it off
# clears the state.
#
# The cost. A release is a fence and a store that nobody waits for, in words that no two blocks write; each thread of a
# block that waits polls one flag, and neighbours lie in one cache line.
FLAGS_TEXT = f"""
static __device__ __forceinline__ int {BEGIN_FUNCTION}(unsigned* state) {{
  unsigned before;
  size_t word = __cvta_generic_to_global(state + {_BEFORE});
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(before) : "l"(word) : "memory");
  return (int)before;
}}
static __device__ __forceinline__ int {ARRIVE_FUNCTION}(unsigned* state, int tick) {{
  __syncthreads();
  if (threadIdx.x == 0) {{
    size_t flag = __cvta_generic_to_global(state + {_FLAGS} + blockIdx.x);
    asm volatile("st.release.gpu.global.u32 [%0], %1;" : : "l"(flag), "r"(tick) : "memory");
  }}
  return 0;
}}
static __device__ __forceinline__ int {WAIT_FUNCTION}(unsigned* state, int first, int last, int num_blocks,
                                                                 int tick) {{
  int others = last - first + 1 < num_blocks ? last - first + 1 : num_blocks;
  for (int other = threadIdx.x; other < others; other += blockDim.x) {{
    size_t flag = __cvta_generic_to_global(state + {_FLAGS} + (first + other) % num_blocks);
    int found;
    do {{
      asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(found) : "l"(flag) : "memory");
    }} while (found < tick);
  }}
  __syncthreads();
  return 0;
}}
static __device__ __forceinline__ int {LEAVE_FUNCTION}(unsigned* state, int num_blocks, int tick, int words) {{
  __syncthreads();
  if (threadIdx.x == 0) {{
    size_t left = __cvta_generic_to_global(state + {_LEFT});
    unsigned before;
    asm volatile("atom.inc.acq_rel.gpu.global.u32 %0, [%1], %2;"
                 : "=r"(before) : "l"(left), "r"(num_blocks - 1) : "memory");
    if (before == (unsigned)(num_blocks - 1)) {{
      if (tick >= 0x40000000) {{
        tick = 0;
        for (int word = {_FLAGS}; word < words; ++word) state[word] = 0;
      }}
      state[{_BEFORE}] = (unsigned)tick;
    }}
  }}
  return 0;
}}
"""


WATCHED_WAIT_TEXT = f"""
static __device__ __noinline__ int {WATCHED_WAIT_FUNCTION}(unsigned* state, int first, int last, int num_blocks,
                                                                  int tick, unsigned* record, long long limit,
                                                                  int kernel, int stage, int step, int slot) {{
  int over = 0;
  int others = last - first + 1 < num_blocks ? last - first + 1 : num_blocks;
  for (int other = threadIdx.x; other < others && !over; other += blockDim.x) {{
    int block = (first + other) % num_blocks;
    size_t flag = __cvta_generic_to_global(state + {_FLAGS} + block);
    int found;
    long long past = 0, left = limit;
    for (unsigned polls = 1;; ++polls) {{
      asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(found) : "l"(flag) : "memory");
      if (found >= tick) break;
      if (polls % {POLLS} == 0 && {OVERDUE_FUNCTION}(state + {OVER_WORD}, record, limit, &past, &left, {FLAG},
                                                kernel, stage, step, slot, block, found, tick)) {{
        over = 1;
        break;
      }}
    }}
  }}
  if (__syncthreads_or(over)) asm volatile("exit;");
  return 0;
}}
"""


@dataclass(frozen=True, eq=False)
class BlockFlags:
    """Writes the statements that flags take in one kernel.

    Attributes
    ----------
    parameters : tuple of Var
        The kernel's, for the state, and with a limit for the record of a wait that is over.
    num_blocks : PrimExpr
        Blocks of the launch.
    words : int
        Of the state that the kernel needs.
    limit : int
        Nanoseconds after which a wait is over (:mod:`souffle.kernel.watchdog`); 0 for none.
    """

    parameters: tuple[tirx.Var, ...]
    num_blocks: PrimExpr
    words: int
    limit: int = 0

    @property
    def state(self) -> tirx.Var:
        return self.parameters[0]

    @cached_property
    def before(self) -> tirx.Var:
        """The tick before the launch."""
        return tirx.Var("ticks_before", "int32")

    def around(self, body: Sequence[tirx.Stmt], ticks: int) -> list[tirx.Stmt]:
        """A kernel's statements, of which each launch takes so many ticks."""
        begin = tirx.Bind(self.before, tirx.call_extern("int32", BEGIN_FUNCTION, self.state))
        last = self.before + ticks
        leave = tirx.call_extern("int32", LEAVE_FUNCTION, self.state, self.num_blocks, last, self.words)
        return [begin, *body, tirx.Evaluate(leave)]

    def arrive(self, tick: PrimExpr) -> tirx.Stmt:
        """The block is done with all before, at a tick counted from the launch's first, 1."""
        return tirx.Evaluate(tirx.call_extern("int32", ARRIVE_FUNCTION, self.state, self.before + tick))

    def wait(self, first: PrimExpr, last: PrimExpr, tick: PrimExpr, place: WaitPlace, slot: PrimExpr) -> tirx.Stmt:
        """The blocks of the slots from `first` to `last` have arrived at a tick, which `slot` waits for."""
        given = (self.state, first, last, self.num_blocks, self.before + tick)
        if not self.limit:
            return tirx.Evaluate(tirx.call_extern("int32", WAIT_FUNCTION, *given))
        limit = (self.parameters[1], tirx.IntImm("int64", self.limit))
        where = (place.kernel, place.stage, place.step, slot)
        return tirx.Evaluate(tirx.call_extern("int32", WATCHED_WAIT_FUNCTION, *given, *limit, *where))
