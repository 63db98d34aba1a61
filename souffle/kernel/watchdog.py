"""Waits that have a limit: the device function that every such wait asks, now and then, whether it is to go on.

A wait of a network with a watchdog polls as any other. Each time that it has polled so often in vain, it
calls :data:`OVERDUE_FUNCTION`; where that says 1, all threads of its block are to end with ``exit``. So a kernel whose
wait cannot end does end, without a fault: the context and what else is on the device live on.

Why every block ends. The first block whose time is over sets a word of the device's memory, once for a run of the
network, and writes the record. Each wait looks at that word as often as at the clock, so that the others leave at their
next wait, and those of later kernels of the run too: their blocks find the word set, whatever the counters and flags
hold, which are of no use any more. A block that waits for nothing comes to its end.

Why no result of such a run is taken for one. The record is written before any block ends early, and whoever runs the
network looks at it when the run has ended. Before the record is written no block has ended early, so that a wait which
returns means what it means without a limit.

What is counted is the time in which the device runs the kernel: a look at the clock adds what has passed since the last
one, but at most an eighth of the limit. While the whole device stands still, as in a debugger or while another process
has its turn, no thread looks.
"""

from __future__ import annotations

from souffle.watchdog import FIELDS

__all__ = ["OVERDUE_FUNCTION", "OVERDUE_TEXT", "POLLS"]

OVERDUE_FUNCTION = "souffle_overdue"
"""``OVERDUE_FUNCTION(over, record, limit, last, left, kind, kernel, stage, step, tile, index, found, wanted)``.

Whether a wait is to end: 1 if its time is over, or that of another one was before. `over` points to a word in the
device's memory, zero as a run begins, `record` to the record (:mod:`souffle.watchdog`), whose fields follow; `limit` is
in nanoseconds, and `last` and `left` point to what a wait keeps between its calls: 0 and `limit` at first.
"""

POLLS = 64
"""After so many a wait looks at the clock: some 50 µs, and a load more in 64."""

_WORDS = "\n".join(
    f"      words[{number}] = {'blockIdx.x' if name == 'block' else f'(unsigned){name}'};"
    for number, name in enumerate(FIELDS)
    if name != "kind"
)

OVERDUE_TEXT = f"""
static __device__ __forceinline__ int {OVERDUE_FUNCTION}(unsigned* over, unsigned* record, long long limit,
                                                      long long* last, long long* left, int kind, int kernel, int stage,
                                                      int step, int tile, unsigned index, unsigned found,
                                                      unsigned wanted) {{
  long long now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now) : : "memory");
  long long passed = *last == 0 ? 0 : now - *last;
  *last = now;
  *left -= passed < limit / 8 ? passed : limit / 8;
  size_t word = __cvta_generic_to_global(over);
  unsigned before;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(before) : "l"(word) : "memory");
  if (before == 0 && *left > 0) return 0;
  if (before == 0) {{
    asm volatile("atom.cas.acq_rel.gpu.global.b32 %0, [%1], 0, 1;" : "=r"(before) : "l"(word) : "memory");
    if (before == 0) {{
      volatile unsigned* words = record;
{_WORDS}
      __threadfence_system();
      words[{FIELDS.index("kind")}] = (unsigned)kind;
    }}
  }}
  return 1;
}}
"""
