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

__all__ = ["Arrive", "Follows", "Prefetch", "SharedParts", "SlotWait", "StageRun", "Sync", "unparted"]


@dataclass(frozen=True)
class SharedParts:
    """Where a run finds the parts of a tensor that its tiles touch, instead of behind a pointer.

    Of the tiles that a block computes in a loop, the one of number ``n`` has bytes ``start + n * nbytes`` on of the
    block's pool for part ``tile`` of the tensor, which is bytes ``tile * nbytes`` on, if ``n < turns``; else it is
    where the pointer says.

    Attributes
    ----------
    start, turns, nbytes : int
    """

    start: int
    turns: int
    nbytes: int

    @property
    def end(self) -> int:
        """The byte of the pool behind the last."""
        return self.start + self.turns * self.nbytes

    def meets(self, first: int, end: int) -> bool:
        """Whether some of its bytes are among others."""
        return self.start < end and first < self.end


@dataclass(frozen=True, eq=False)
class SlotWait:
    """Which slots the blocks of a slot wait for.

    Attributes
    ----------
    first, last : ndarray of int
        For each slot that waits.
    """

    first: np.ndarray
    last: np.ndarray

    def holds(self, earlier: np.ndarray, later: np.ndarray) -> np.ndarray:
        """Whether slots that wait do so for others."""
        inside = (later >= 0) & (later < len(self.first))
        at = np.where(inside, later, 0)
        return inside & (self.first[at] <= earlier) & (earlier <= self.last[at])


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
        The kernel's parameter, and bytes from its start, for each pointer parameter; of a call that has its step.
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
    place : int or None
        Of each slot's tiles, the one that the run computes, where stages take turns in them; ``None`` for all.
    call : int
        Which call of the kernel's text it is, the same at all places.
    shared : tuple of SharedParts or None
        For each pointer parameter; empty where all tensors lie behind their pointers.
    awaits : tuple of (int, SlotWait)
        Before each slot's turn, for which slots' blocks to have come to which arrival of the launch, from 1.
    numbering : int
        By which numbers of the blocks these have their slots: of two runs with different ones nobody knows which slots
        are on one block.
    part : int
        Threads of the workers that compute it, where they are parts of blocks; else 0.
    """

    name: str
    tiles: int
    threads: int
    pointers: tuple[tuple[int, int], ...] = ()
    before: bool = False
    after: bool = False
    step: tuple[int, ...] = ()
    slots: tuple[int, ...] | None = None
    ranks: tuple[int, ...] | None = None
    between: bool = False
    loop: int = 0
    place: int | None = None
    call: int = 0
    shared: tuple[SharedParts | None, ...] = ()
    awaits: tuple[tuple[int, SlotWait], ...] = ()
    numbering: int = 0
    part: int = 0

    def parts(self, parameter: int) -> SharedParts | None:
        """Where the parts of one tensor lie."""
        return self.shared[parameter] if self.shared else None

    @property
    def turns(self) -> int:
        """How many tiles, or slots of tiles, blocks share."""
        return self.tiles if self.slots is None else max(self.slots, default=-1) + 1

    @property
    def places(self) -> range:
        """Of each slot's tiles, in order, those that the run computes."""
        return range(self.tiles // max(1, self.turns)) if self.place is None else range(self.place, self.place + 1)

    def takes(self, places: np.ndarray) -> np.ndarray:
        """Whether the run computes the tiles at some places."""
        return np.True_ if self.place is None else places == self.place

    def located(self, tiles: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The slots of tiles, and the places in them."""
        if self.slots is None or self.ranks is None:
            return tiles, np.zeros_like(tiles)
        return np.asarray(self.slots)[tiles], np.asarray(self.ranks)[tiles] % (self.tiles // max(1, self.turns))


@dataclass(frozen=True)
class Sync:
    """All blocks wait (``"grid"``), or all threads of each block."""

    scope: str


@dataclass(frozen=True)
class Arrive:
    """Each block says that it is done with all before, for the time of this number in the launch."""

    tick: int


@dataclass(frozen=True)
class Prefetch:
    """Bytes that are asked into the cache."""

    pointer: tuple[int, int]
    nbytes: int


@dataclass(frozen=True)
class Follows:
    """Tiles of a stage that come before tiles of another, or of its own, and no block barrier stands between the two.

    Slots are parted from a number of them down: those that a barrier's own condition lets come to it.

    Attributes
    ----------
    earlier, later : StageRun
    one_loop : bool
        Whether one loop calls both.
    turn : int
        Of one loop: the slots that are parted within a turn.
    after, before : int
        Slots that are parted from the end of the first stage's turn, and those that are from the start of the other's:
        with two loops, those of a block's first turn.
    early, late : int
        Of two loops: slots of the first stage that are parted from its turn before, and those of the other one that are
        parted from its next.
    waits : (bool, bool)
        Whether all threads wait in each tile.
    """

    earlier: StageRun
    later: StageRun
    one_loop: bool
    turn: int
    after: int
    before: int
    early: int
    late: int
    waits: tuple[bool, bool]

    @property
    def form(self) -> tuple:
        """All that :meth:`holds` depends on."""
        runs = tuple((run.tiles, run.slots, run.ranks, run.between, run.place) for run in (self.earlier, self.later))
        numbers = (self.turn, self.after, self.before, self.early, self.late, self._known)
        return runs, self.earlier is self.later, self.one_loop, numbers, self.waits

    @property
    def _known(self) -> bool:
        """Whether it is known which slots of the two are on one block."""
        return self.earlier.numbering == self.later.numbering

    @property
    def neighbours(self) -> Follows:
        """The same of tiles with no other tile of the two stages between."""
        # Of the earlier one in a turn the other is, in the same turn, the next.
        within = self.earlier is not self.later and self.one_loop and self.turn < self.earlier.turns
        return replace(self, waits=(True, True), after=self.earlier.turns if within else self.after)

    @property
    def ever(self) -> bool:
        """Whether there may be such tiles."""
        fewer = min(self.earlier.turns, self.later.turns)
        most = fewer if self._known and not self.one_loop else self.later.turns
        past = self.after < self.earlier.turns and self.before < most
        several = self.earlier is not self.later or len(self.earlier.places) > 1
        return past or (self.one_loop and self.turn < fewer and several)

    def holds(self, earlier: np.ndarray, later: np.ndarray) -> np.ndarray:
        """Whether a block of some grid comes from one tile to the other."""
        one, first = self.earlier.located(earlier)
        two, second = self.later.located(later)
        ends = taken = self.earlier.takes(first) & self.later.takes(second)
        if self.waits[0] or self.earlier.between:
            ends = ends & (first == self.earlier.places[-1])
        if self.waits[1] or self.later.between:
            ends = ends & (second == self.later.places[0])
        if not self.one_loop and not self._known:
            # The block of the one may have any of the other's slots in its first turn.
            return ends & (one >= self.after)
        if not self.one_loop:
            return ends & (one >= self.after) & self._of_two_loops(one, two)
        rest = (one < two) & (one >= self.after) & (two >= self.before) & ends
        if self.earlier is self.later:
            ends = taken & ((second == first + 1) if any(self.waits) else (second > first))
        return ((one == two) & (one >= self.turn) & ends) | rest

    def _of_two_loops(self, one: np.ndarray, two: np.ndarray) -> np.ndarray:
        """Some grid has both slots on one block, and nothing on the way from one to the other."""
        last = (self.earlier.turns if self.waits[0] else self.early) - one
        alone = self.waits[1] or self.late >= self.later.turns
        apart = np.abs(one - two)
        if not self.before and (alone or not self.late):
            # The grid of as many blocks as the slots are apart has the fewest turns between.
            return (one == two) | (apart >= np.maximum(np.maximum(last, two + 1 if alone else 1), 1))
        found = np.zeros(np.broadcast_shapes(one.shape, two.shape), bool)
        for blocks in range(1, max(self.earlier.turns, self.later.turns) + 1):
            block = one % blocks
            comes = (block == two % blocks) & (blocks >= last) & (block >= self.before)
            found |= comes & ((two < blocks) | (~np.bool_(alone) & (block >= self.late)))
        return found


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
    # Calls that are not parted from what comes, in their loops, and how many slots are parted from it since.
    open_: list[tuple[_Loop, int, int]] = []
    for _, group in groupby(events, lambda event: None if isinstance(event, Sync) else (event.loop, event.step)):
        calls = [event for event in group if isinstance(event, StageRun)]
        if not calls:
            open_.clear()
            continue
        loop = _Loop(calls, [waits(call) for call in calls])
        concerned = [number for number, call in enumerate(calls) if concerns(call)]
        for number in concerned:
            found = [loop.follow(number, other) for other in concerned]
            found += [before.lead(place, loop, number, since) for before, place, since in open_]
            yield from (follows for follows in found if follows.ever)
        most = max(loop.fences)
        open_ = [(before, place, max(since, most)) for before, place, since in open_]
        open_ += [(loop, number, 0) for number in concerned]
        open_ = [(loop, i, since) for loop, i, since in open_ if max(since, loop.after(i)) < loop.calls[i].turns]


class _Loop:
    """The stages that one loop over tiles calls."""

    def __init__(self, calls: Sequence[StageRun], waits: Sequence[bool]) -> None:
        self.calls = calls
        self.waits = waits
        # In how many slots' turns there is a barrier at the call.
        self.fences = [c.turns if c.before or c.after or w else 0 for c, w in zip(calls, waits, strict=True)]

    def after(self, number: int) -> int:
        """Slots of a call that are parted from the end of their turn."""
        call = self.calls[number]
        return call.turns if call.after else max([0, *self.fences[number + 1 :]])

    def before(self, number: int) -> int:
        """Slots of a call that are parted from the start of their turn."""
        call = self.calls[number]
        return call.turns if call.before else max([0, *self.fences[:number]])

    def follow(self, number: int, other: int) -> Follows:
        """What of a call follows a call of the same loop."""
        one, two = self.calls[number], self.calls[other]
        turn = max([0, *self.fences[number + 1 : other]])
        if other < number or (one.between if number == other else one.after or two.before):
            turn = one.turns
        waits = (self.waits[number], self.waits[other])
        return Follows(one, two, True, turn, self.after(number), self.before(other), 0, 0, waits)

    def lead(self, number: int, loop: _Loop, other: int, since: int) -> Follows:
        """What of a call of another loop follows a call of this one."""
        one, two = self.calls[number], loop.calls[other]
        waits = (self.waits[number], loop.waits[other])
        since = max(since, loop.before(other))
        return Follows(one, two, False, 0, self.after(number), since, self.before(number), loop.after(other), waits)
