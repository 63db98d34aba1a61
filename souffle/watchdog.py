"""What a wait that has a limit writes down when its time is over: the words that a kernel writes and the host reads.

Nothing of the compiler is needed to read them: a saved network runs without it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["FIELDS", "FLAG", "GRID_BARRIER", "KINDS", "RECORD_WORDS", "TimedOutWait", "timed_out_wait"]

FIELDS = ("kind", "block", "kernel", "stage", "step", "tile", "index", "found", "wanted")
"""Of the record, one 32-bit word each, in their order; see :class:`TimedOutWait`. The rest of it is not used."""

RECORD_WORDS = 16

GRID_BARRIER, FLAG = 1, 2

KINDS = {GRID_BARRIER: "grid barrier", FLAG: "flag"}
"""By the record's first word, which is 0 while no wait is over, and is written last."""


@dataclass(frozen=True)
class TimedOutWait:
    """The wait that was over first, of all blocks of a run.

    Attributes
    ----------
    kind : str
        A value of :data:`KINDS`.
    block : int
        Which block of the grid waited.
    kernel : int
        Its number in the plan.
    stage : int
        Before which of the kernel's stages it waited, by the numbers of ``Kernel.stages``.
    step : int or None
        Of the loop that the stage stands in, from 0; None outside of loops.
    tile : int or None
        Of the stage; None where all of a block's tiles wait together.
    index : int
        Which of the things of its kind it waited for, such as the number of a flag.
    found, wanted : int
        The value that it saw last, and what it waited for. Of a grid barrier, the word in which arrivals are counted
        (:mod:`souffle.kernel.grid_barrier`), and the blocks of the grid.
    """

    kind: str
    block: int
    kernel: int
    stage: int
    step: int | None
    tile: int | None
    index: int
    found: int
    wanted: int

    @property
    def arrived(self) -> tuple[int, bool] | None:
        """Of a grid barrier: how many blocks had come, and whether block 0 had; None where the word tells nothing.

        Block 0 adds 2^31 - (n - 1) and each other block 1, so that the sum is below n without it.
        """
        count, first = self.found % 2**31, 2**31 - (self.wanted - 1)
        if self.kind != KINDS[GRID_BARRIER] or self.wanted <= count < first:
            return None
        return (count, False) if count < self.wanted else (count - first + 1, True)


def timed_out_wait(words: Sequence[int]) -> TimedOutWait | None:
    """What a record says; None where no wait was over, or its kind is not known."""
    given = {name: int(word) for name, word in zip(FIELDS, words)}
    kind = KINDS.get(given["kind"])
    if kind is None:
        return None
    signed = {name: None if given[name] >= 2**31 else given[name] for name in ("step", "tile")}
    return TimedOutWait(**{**given, **signed, "kind": kind})
