"""What a launch does in order, and which tiles come one after the other on a block with no block barrier between.

A block b of a grid of n blocks computes the slots b, b + n, b + 2 n, ... of each loop over tiles, and in the turn of a
slot the stages that the loop calls. Over all grids, therefore: slots s < t of one loop come one after the other where
n = t - s; of two loops any slots do (n = 1), but where something parts the slots of the first, its last slot alone is
left to meet the second, and what parts those of the second leaves its first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import numpy as np

__all__ = ["Follows", "Prefetch", "StageRun", "Sync", "unparted"]


@dataclass(frozen=True)
class StageRun:
    """A stage, for all its tiles.

    Attributes
    ----------
    name : str
        Of the function.
    tiles, threads : int
        Tiles ``0 .. tiles - 1`` are computed, by the first so many threads of a block.
    pointers : tuple of (int, int)
        The kernel's parameter, and bytes from its start, for each pointer parameter.
    before, after : bool
        Whether a block barrier stands between the call and the one before it in each tile's turn, or the one after it.
    step : tuple of int
        The values of the kernel's loops around it.
    slots : tuple of int or None
        For each tile, where a kernel takes tiles together: those of equal slots are on one block of every grid, those
        of different slots on different blocks of some grid. ``None`` where a tile is a slot.
    ranks : tuple of int or None
        For each tile, how many a grid of one block computes before it; ``None`` as for `slots`.
    between : bool
        Whether a block barrier stands between two tiles of one slot.
    loop : int
        Which loop over tiles calls it; stages that one loop calls come in turn for each slot.
    """

    name: str
    tiles: int
    threads: int
    pointers: tuple[tuple[int, int], ...]
    before: bool
    after: bool
    step: tuple[int, ...]
    slots: tuple[int, ...] | None = None
    ranks: tuple[int, ...] | None = None
    between: bool = False
    loop: int = 0

    @property
    def turns(self) -> int:
        """How many tiles, or slots of tiles, blocks share."""
        return self.tiles if self.slots is None else max(self.slots, default=-1) + 1


@dataclass(frozen=True)
class Sync:
    """All blocks wait (``"grid"``), or all threads of each block."""

    scope: str


@dataclass(frozen=True)
class Prefetch:
    """Bytes that are asked into the cache."""

    pointer: tuple[int, int]
    nbytes: int


@dataclass(frozen=True)
class Follows:
    """Tiles of a stage that come before tiles of another, or of its own, and no block barrier stands between the two.

    Attributes
    ----------
    earlier, later : StageRun
    turn : bool
        Whether those of one slot are meant, in one turn of one loop.
    turns : bool
        Whether those of an earlier slot and a later one of that loop are.
    parted : (bool, bool)
        Of two loops: whether something parts the slots of the first, and those of the second.
    single : (bool, bool)
        Whether something parts the tiles of a slot: of the earlier stage the last is meant, of the later the first.
    """

    earlier: StageRun
    later: StageRun
    turn: bool
    turns: bool
    parted: tuple[bool, bool]
    single: tuple[bool, bool]

    @property
    def form(self) -> tuple:
        """All that :meth:`holds` depends on."""
        runs = (self.earlier, self.later)
        slots = tuple((run.tiles, run.slots, run.ranks) for run in runs)
        return slots, self.earlier is self.later, self.turn, self.turns, self.parted, self.single

    @property
    def neighbours(self) -> Follows:
        """The same of tiles with no other tile of the two stages between."""
        return replace(self, parted=(True, True), single=(True, True))

    def holds(self, earlier: np.ndarray, later: np.ndarray) -> np.ndarray:
        """Whether a block of some grid comes from one tile to the other."""
        one, first = _located(self.earlier, earlier)
        two, second = _located(self.later, later)
        last = first == _places(self.earlier) - 1 if self.single[0] else np.True_
        start = second == 0 if self.single[1] else np.True_
        if self.earlier is self.later:
            step = (second == first + 1) if any(self.single) else (second > first)
            return (self.turn & (one == two) & step) | (self.turns & (one < two) & last & start)
        if self.turn or self.turns:
            return ((self.turn & (one == two)) | (self.turns & (one < two))) & last & start
        apart = np.maximum(self.earlier.turns - one if self.parted[0] else 1, two + 1 if self.parted[1] else 1)
        return ((one == two) | (np.abs(one - two) >= apart)) & last & start


def _places(run: StageRun) -> int:
    return run.tiles // max(1, run.turns)


def _located(run: StageRun, tiles: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The slots of tiles, and the places in them."""
    if run.slots is None or run.ranks is None:
        return tiles, np.zeros_like(tiles)
    return np.asarray(run.slots)[tiles], np.asarray(run.ranks)[tiles] % _places(run)


def unparted(
    events: Sequence[StageRun | Sync],
    concerns: Callable[[StageRun], bool],
    waits: Callable[[StageRun], bool],
) -> Iterator[Follows]:
    """All that may follow each other on a block with no block barrier between, of what is concerned.

    Parameters
    ----------
    events : sequence
        In order; all barriers of the block, or of the grid, that stand outside of loops over tiles.
    concerns : callable
        Whether a stage matters.
    waits : callable
        Whether all threads of a block wait for each other somewhere in each tile of a stage.
    """
    # Calls that are not parted from what comes, whether only their last slot is not, and for how many slots there has
    # been a barrier since.
    open_: list[tuple[StageRun, bool, int]] = []
    for _, group in groupby(events, lambda event: None if isinstance(event, Sync) else (event.loop, event.step)):
        calls = [event for event in group if isinstance(event, StageRun)]
        if not calls:
            open_.clear()
            continue
        loop = _Loop(calls, [waits(call) for call in calls])
        concerned = [number for number, call in enumerate(calls) if concerns(call)]
        for number in concerned:
            call = calls[number]
            yield from (follows for follows in loop.follow(number) if concerns(follows.later))
            for earlier, alone, fence in open_:
                since = max([fence, *loop.fences[:number]])
                if not call.before and since < min(earlier.turns, call.turns):
                    parts = (waits(earlier) or earlier.between, loop.waits[number] or call.between)
                    yield Follows(earlier, call, False, False, (alone, loop.alone(number)), parts)
        most = max(loop.fences)
        open_ = [(call, alone, max(fence, most)) for call, alone, fence in open_ if max(fence, most) < call.turns]
        open_ += [(calls[i], loop.alone(i), 0) for i in concerned if not loop.parted_after(i)]


class _Loop:
    """The stages that one loop over tiles calls."""

    def __init__(self, calls: Sequence[StageRun], waits: Sequence[bool]) -> None:
        self.calls = calls
        self.waits = waits
        # In how many slots' turns there is a barrier at the call.
        self.fences = [c.turns if c.before or c.after or w else 0 for c, w in zip(calls, waits, strict=True)]

    def parted_after(self, number: int) -> bool:
        """Whether a barrier stands between a call and the end of its turn."""
        call = self.calls[number]
        return call.after or any(fence >= call.turns for fence in self.fences[number + 1 :])

    def parted_before(self, number: int) -> bool:
        """Whether one stands between the start of a turn and the call."""
        call = self.calls[number]
        return call.before or any(fence >= call.turns for fence in self.fences[:number])

    def alone(self, number: int) -> bool:
        """Whether the turns of a call are parted, so that the last of them alone meets what comes after the loop."""
        return self.waits[number] or self.parted_after(number) or self.parted_before(number)

    def follow(self, number: int) -> Iterator[Follows]:
        """What in this loop follows a call."""
        call, waits = self.calls[number], self.waits[number]
        for place, other in enumerate(self.calls):
            turns = not (self.parted_after(number) or self.parted_before(place))
            if place == number:
                turn, parts = not call.between, (waits, waits)
            else:
                since = max([0, *self.fences[number + 1 : place]])
                turn = number < place and not (call.after or other.before) and since < min(call.turns, other.turns)
                parts = (waits or call.between, self.waits[place] or other.between)
            if turn or turns:
                yield Follows(call, other, turn, turns, (False, False), parts)
