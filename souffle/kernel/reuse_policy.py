"""Which tensors stay in shared memory while there is room (paper §6.5), by what is known of their uses.

A kernel's stages run in one order, the same in all of its blocks. A tensor that could stay is written at one time and
read at others; until its last read, or until it has to leave, it takes its bytes beside what the stage of each time
needs for itself. What has left does not come back: later reads find the tensor in global memory. So a policy says of
each tensor how many of its reads find it in shared memory, those before it leaves, and a tensor that leaves between two
reads might as well have left after the first.

- ``"lru"`` is the paper's: what has not been used for longest leaves.
- ``"belady"`` knows what comes: what is needed last leaves, or does not come in at all [1]_. Where all are of one size
  and each is read once, no choice has more reads in shared memory: it is the greedy colouring of intervals.

References
----------
.. [1] L. A. Belady, "A study of replacement algorithms for a virtual-storage computer", IBM Systems Journal 5(2), 1966.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

__all__ = ["POLICIES", "Policy", "Reuse", "belady", "lru"]


@dataclass(frozen=True)
class Reuse:
    """A tensor that could stay.

    Attributes
    ----------
    nbytes : int
        That a block needs for it.
    uses : tuple of int
        When it is written, then when it is read; in ascending order.
    """

    nbytes: int
    uses: tuple[int, ...]

    def next_use(self, time: int) -> int:
        """The first use that is not before a time, or the last of all."""
        return next((use for use in self.uses if use >= time), self.uses[-1])

    def last_use(self, time: int) -> int:
        """The last use that is not after a time; it has one."""
        return next(use for use in reversed(self.uses) if use <= time)


Policy = Callable[[Sequence[Reuse], Sequence[int]], tuple[int, ...]]
"""From tensors, and the bytes that are left at each time, to how many reads of each find it in shared memory."""


def lru(reuses: Sequence[Reuse], room: Sequence[int]) -> tuple[int, ...]:
    """What was not used for longest leaves first; see :data:`Policy`."""
    return _run(reuses, room, lambda own, time: -own.last_use(time))


def belady(reuses: Sequence[Reuse], room: Sequence[int]) -> tuple[int, ...]:
    """What is needed last leaves first; see :data:`Policy`."""
    return _run(reuses, room, lambda own, time: own.next_use(time + 1))


POLICIES: Mapping[str, Policy] = {"belady": belady, "lru": lru}
"""By the names that options know them by."""


def _run(reuses: Sequence[Reuse], room: Sequence[int], leaves_first: Callable[[Reuse, int], int]) -> tuple[int, ...]:
    """The reads that find each tensor, where that of the greatest number leaves, the larger among equal ones."""
    served = [0] * len(reuses)
    held: set[int] = set()
    for time, free in enumerate(room):
        held |= {n for n, own in enumerate(reuses) if own.uses[0] == time and len(own.uses) > 1}
        # A tensor that is read for the last time now is needed no less than those that stay.
        while sum(reuses[n].nbytes for n in held) > free:
            staying = [n for n in held if reuses[n].uses[-1] > time] or list(held)
            held.remove(max(staying, key=lambda n: (leaves_first(reuses[n], time), reuses[n].nbytes, -n)))
        for n in held:
            served[n] += time in reuses[n].uses[1:]
        held = {n for n in held if reuses[n].uses[-1] > time}
    return tuple(served)
