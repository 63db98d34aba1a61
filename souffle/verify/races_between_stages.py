"""Conflicts between stages that no grid barrier separates: by different blocks only where the later tile waits for the
earlier one, within a block in order.

A tile waits for slots of tiles to have come to an arrival. What their blocks did before it is done then: all tiles of
such a slot in stages that stand before the arrival.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from souffle.certificate import Counterexample
from souffle.verify.accesses import Memory
from souffle.verify.expressions import Undecided, asked_once
from souffle.verify.footprint import Footprint, WriteMap
from souffle.verify.races_in_a_span import RACE
from souffle.verify.ranges import in_units
from souffle.verify.stage_functions import Library, shown, text_of
from souffle.verify.tiles_in_a_row import Arrive, Follows, SlotWait, StageRun, Sync, unparted

__all__ = ["Located", "StagePairs"]

_ONCE = "two tiles of a stage with slots write one element"


@dataclass(frozen=True)
class Located:
    """Where a pointer of a launched kernel points to.

    Attributes
    ----------
    space : str
        What is one piece of memory: the workspace, or a buffer of its own.
    base : int
        Byte of it.
    name : str
        The buffer's name.
    within : tuple of (int, int)
        First and last byte of the buffer in it.
    """

    space: str
    base: int
    name: str
    within: tuple[int, int]


@dataclass(frozen=True, eq=False)
class _Spot:
    """The bytes that a stage reads, or writes, through one pointer."""

    order: int
    run: StageRun
    footprint: Footprint
    parameter: int
    writes: bool
    at: Located
    low: int
    high: int

    @property
    def pointer(self) -> Memory:
        """What the function calls it."""
        return self.footprint.function.pointers[self.parameter]

    def element(self, byte: int, writer: _Spot) -> int:
        """Which element a byte is, counted from where the pointer of `writer` points to."""
        return (byte - self.at.base + writer.at.base) // self.pointer.unit


@dataclass(frozen=True)
class _Meeting:
    """One byte that two points touch: byte in the space, tiles and threads of the writer and of the other."""

    byte: int
    tiles: tuple[int, int]
    threads: tuple[int, int]


@dataclass(frozen=True)
class _Conflicts:
    """Elements that two points touch: of blocks that may differ, of two tiles of one block, of two threads of one tile.

    `call` is one that one tile touches through two pointers, by whichever threads; `call_perhaps` says that there may
    be one, if data says so.
    """

    across: _Meeting | None
    turns: _Meeting | None = None
    within: _Meeting | None = None
    call: _Meeting | None = None
    call_perhaps: bool = False


class StagePairs:
    """Compares stages; equal pairs once."""

    def __init__(self, library: Library) -> None:
        self.library = library
        self.pairs = 0
        self._known: dict[tuple, _Conflicts | Undecided] = {}
        # Of the span looked at: behind each event, the number of the next arrival.
        self._next: list[int | None] = []

    def span(
        self, kernel: str, events: Sequence[tuple[StageRun, tuple[Located, ...]] | Sync | Arrive]
    ) -> Iterator[Counterexample | Undecided]:
        """What is wrong among the stages between two grid barriers.

        Parameters
        ----------
        kernel : str
        events : sequence
            Stages with where their pointers point to, block barriers, and arrivals.
        """
        arrivals = [event for event in events if isinstance(event, Arrive)]
        passed = list(accumulate(isinstance(event, Arrive) for event in events))
        self._next = [arrivals[n].tick if n < len(arrivals) else None for n in passed]
        events = [Sync("block") if isinstance(event, Arrive) else event for event in events]
        spots: dict[str, list[_Spot]] = {}
        fences = list(self._fences(event if isinstance(event, Sync) else event[0] for event in events))
        for order, event in enumerate(events):
            if not isinstance(event, Sync):
                for spot in self._spots(order, *event):
                    spots.setdefault(spot.at.space, []).append(spot)
        for group in spots.values():
            group.sort(key=lambda spot: spot.low)
            active: list[_Spot] = []
            for spot in group:
                active = [other for other in active if other.high >= spot.low]
                for other in (*active, spot):
                    if other.writes or spot.writes:
                        yield from self._pair(kernel, other, spot, fences)
                active.append(spot)
        yield from self._pool(kernel, events)

    def _fences(self, events: Iterable[StageRun | Sync]) -> Iterator[tuple[float, float]]:
        """Block barriers: after how many events, a half for before one, and in how many slots' turns."""
        for order, event in enumerate(events):
            if isinstance(event, Sync):
                yield order, np.inf
                continue
            waits = {-0.5: event.before, 0: self.library.waits(event), 0.5: event.after}
            yield from ((order + at, event.turns) for at, there in waits.items() if there)

    def _spots(self, order: int, run: StageRun, places: tuple[Located, ...]) -> Iterator[_Spot]:
        footprint = self.library.taken(run)
        for parameter, at in enumerate(places):
            for writes in (False, True):
                reach = footprint.range_of(parameter, writes)
                if reach is not None:
                    # Beyond its buffer an access is out of bounds, which is another rule.
                    low, high = max(at.base + reach.low, at.within[0]), min(at.base + reach.high, at.within[1])
                    yield _Spot(order, run, footprint, parameter, writes, at, low, high)

    # Global memory

    def _pair(
        self, kernel: str, one: _Spot, two: _Spot, fences: Sequence[tuple[float, float]]
    ) -> Iterator[Counterexample | Undecided]:
        self.pairs += 1
        writer, other = (one, two) if one.writes else (two, one)
        try:
            found = self._conflicts(writer, other)
            if found.across is not None:
                yield self._race(kernel, writer, other, found.across)
            for meeting in (found.turns, found.within):
                if meeting is not None:
                    yield from self._ordered(kernel, writer, other, meeting, fences)
            calls = {(spot.run.call, spot.run.step, spot.parameter) for spot in (writer, other)}
            if found.turns is not None and other.writes and len(calls) == 1:
                raise Undecided(_ONCE)
            one_call = writer.run is other.run and writer.parameter != other.parameter
            if one_call and found.call is not None and self.library.promises_no_alias(writer.run):
                yield self._aliased(kernel, writer, other, found.call)
            elif one_call and found.call_perhaps and self.library.promises_no_alias(writer.run):
                raise Undecided("pointers that are declared __restrict__, and an access that depends on data")
        except Undecided as reason:
            names = " and ".join(dict.fromkeys((writer.run.name, other.run.name)))
            yield Undecided(f"whether tiles of {names} meet in {writer.at.name}: {reason}")

    def _waits(self, writer: _Spot, other: _Spot) -> tuple[SlotWait, ...]:
        """For which slots of the earlier of two runs the later one waits to be past it."""
        first, second = (writer, other) if writer.order <= other.order else (other, writer)
        done = self._next[first.order]
        # Flags are of the slots in the numbering of the kernel.
        if done is None or first.order == second.order or first.run.numbering or second.run.numbering:
            return ()
        return tuple(slots for tick, slots in second.run.awaits if tick >= done)

    def _conflicts(self, writer: _Spot, other: _Spot) -> _Conflicts:
        delta = other.at.base - writer.at.base
        waits, writes_first = self._waits(writer, other), writer.order <= other.order
        same = writer.run is other.run
        own = (writer.footprint, writer.parameter, other.footprint, other.parameter, other.writes, delta, same)
        known = writer.run.numbering == other.run.numbering
        own += (writer.run.slots, other.run.slots, known, waits, writes_first if waits else None)
        key = tuple(id(x) if isinstance(x, Footprint) else x for x in own)
        return asked_once(self._known, key, lambda: _compare(writer, other, delta, waits))

    def _race(self, kernel: str, writer: _Spot, other: _Spot, at: _Meeting) -> Counterexample:
        statements = tuple(
            text_of(spot.footprint.statement_of(spot.parameter, spot.writes, spot.element(at.byte, writer), tile))
            for spot, tile in ((writer, at.tiles[0]), (other, at.tiles[1]))
        )
        doing = "writes" if other.writes else "reads"
        blocks = tuple(
            f"block of tile {tile}, thread {thread}" for tile, thread in zip(at.tiles, at.threads, strict=True)
        )
        reason = (
            f"tile {at.tiles[0]} of {writer.run.name} writes what tile {at.tiles[1]} of {other.run.name} {doing}, "
            "and no grid barrier stands between, nor does the one wait for the other"
        )
        names = (writer.run.name, other.run.name)
        return Counterexample(
            "race between blocks", kernel, names, statements, blocks, _element(writer, other, at.byte), reason
        )

    def _aliased(self, kernel: str, writer: _Spot, other: _Spot, at: _Meeting) -> Counterexample:
        pointers = (writer.pointer.name, other.pointer.name)
        return Counterexample(
            "aliased pointers",
            kernel,
            (writer.run.name,),
            (),
            tuple(dict.fromkeys(f"tile {at.tiles[0]}, thread {thread}" for thread in at.threads)),
            _element(writer, other, at.byte),
            f"{pointers[0]} and {pointers[1]} are declared __restrict__, so that the compiler may swap their accesses, "
            "past barriers too",
        )

    def _ordered(
        self, kernel: str, writer: _Spot, other: _Spot, at: _Meeting, fences: Sequence[tuple[float, float]]
    ) -> Iterator[Counterexample | Undecided]:
        """Two threads of one tile touch an element: a block barrier must stand between."""
        first, second = (writer, other) if writer.order <= other.order else (other, writer)
        # A block that has both in its turns has the turns between them.
        turns = min(first.run.turns, second.run.turns)
        if any(first.order < fence < second.order and slots >= turns for fence, slots in fences):
            return
        base = min(first.low, second.low, first.at.base, second.at.base)
        names = {spot: (spot.parameter, first.at.space, spot.at.base - base) for spot in (first, second)}
        both = tuple(dict.fromkeys(names.values()))
        tiles = at.tiles if first is writer else at.tiles[::-1]
        assigned = first.run.slots is not None or second.run.slots is not None
        if first.order != second.order:
            runs, globals_ = (first.run, second.run), ((names[first],), (names[second],))
        elif tiles[0] != tiles[1]:
            if first.run.between:
                return
            tiles = tuple(sorted(tiles, key=lambda tile: first.run.ranks[tile]))
            runs, globals_ = (first.run, first.run), (both, both)
        else:
            runs, globals_, assigned = (first.run,), (both,), False
        chosen: list[tuple[int, ...] | Follows | None] = [None]
        if assigned:
            # The two that were found first, which are few, and then all tiles of one slot.
            follows = Follows(*runs, True, 0, runs[0].turns, 0, 0, 0, tuple(map(self.library.waits, runs)))
            chosen = [tiles, follows] if follows.holds(*map(np.asarray, tiles)) else [follows]
        for which in chosen:
            report = self.library.block(runs, globals_, which)
            if report.found is not None and report.found.rule == RACE:
                stages = tuple(dict.fromkeys((first.run.name, second.run.name)))
                reason = "threads of one block touch it, one of them writes, and no block barrier stands between"
                yield shown(kernel, stages, report.found, _element(writer, other, at.byte), reason)
                return

    # Shared memory, from one stage to the next

    def _pool(
        self, kernel: str, events: Sequence[tuple[StageRun, tuple[Located, ...]] | Sync]
    ) -> Iterator[Counterexample | Undecided]:
        order = [event if isinstance(event, Sync) else event[0] for event in events]
        done: set[tuple] = set()
        for follows in unparted(order, self.library.uses_shared, self.library.waits):
            key = (follows.earlier.name, follows.later.name, follows.form)
            if key not in done:
                done.add(key)
                yield from self._sequence(kernel, follows)

    def _sequence(self, kernel: str, follows: Follows) -> Iterator[Counterexample | Undecided]:
        self.pairs += 1
        runs = (follows.earlier, follows.later)
        names = tuple(run.name for run in runs)
        try:
            # Where a barrier stands in some tiles, only neighbours meet for certain.
            mixed = any(self.library.may_wait(run) for run in runs)
            report = self.library.block(runs, (), follows.neighbours if mixed else follows)
            if mixed and report.found is None and self.library.block(runs, (), follows).found is not None:
                raise Undecided("a block barrier in some tiles, and not in others")
        except Undecided as reason:
            yield Undecided(f"shared memory from {' to '.join(names)}: {reason}")
            return
        if report.found is not None and report.found.rule == RACE:
            reason = "a block goes from one to the other without a block barrier between"
            yield shown(kernel, names, report.found, reason=reason)


def _element(writer: _Spot, other: _Spot, byte: int) -> str:
    parts = []
    for spot in dict.fromkeys((writer, other)):
        element = f"element {spot.element(byte, writer)} behind {spot.pointer.name}"
        parts.append(f"{element} of {spot.run.name} ({spot.at.name})")
    return " = ".join(dict.fromkeys(parts))


def _compare(writer: _Spot, other: _Spot, delta: int, waits: Sequence[SlotWait]) -> _Conflicts:
    """Points of `other`, whose pointer points `delta` bytes further, against who writes.

    The later of the two waits for the earlier one's slots as `waits` says.
    """
    owners = writer.footprint.writes(writer.parameter)
    unit, own_unit = writer.pointer.unit, other.pointer.unit
    if writer.run is other.run and writer.parameter == other.parameter and other.writes:
        if writer.run.slots is not None and writer.run.place is None and owners.across is not None:
            raise Undecided(_ONCE)
        return _twice(owners, unit)
    low, high = owners.low * unit, (owners.low + owners.owner.size) * unit - 1
    # Each kind of meeting by itself: one that is in order says nothing of the others.
    kinds: dict[str, _Meeting] = {}
    perhaps, call_perhaps = "", False
    for touch in other.footprint.of(other.parameter, other.writes):
        if touch.range.high + delta < low or touch.range.low + delta > high:
            continue
        possible = owners.certain and touch.possible
        under_way = touch.access.by == "copy" and writer.run is other.run
        for elements, tiles, threads in other.footprint.elements(touch):
            at, tiles, threads = in_units(elements * own_unit + delta, own_unit, unit, tiles, threads)
            at = at - owners.low
            inside = (at >= 0) & (at < owners.owner.size)
            at, tiles, threads = at[inside], tiles[inside], threads[inside]
            for several in (owners.owner,) if owners.last is owners.owner else (owners.owner, owners.last):
                owner = several[at]
                theirs, thread = owner // owners.threads, owner % owners.threads
                written, one = owner >= 0, theirs == tiles
                slots = _slots(writer.run, theirs), _slots(other.run, tiles)
                apart = slots[0] != slots[1]
                if writer.run.numbering != other.run.numbering:
                    # Two blocks of some grid may have them.
                    apart = np.ones_like(apart)
                masks = {"across": written & apart, "call": written & one}
                for wait in waits:
                    masks["across"] &= ~wait.holds(*(slots if writer.order <= other.order else slots[::-1]))
                masks["turns"] = written & ~apart & ~one
                # Of what is under way a thread is another one.
                masks["within"] = masks["call"] & ~apart & ((thread != threads) | under_way)
                if not possible:
                    perhaps = perhaps or ("an access that depends on data" if masks["across"].any() else "")
                    call_perhaps |= bool(masks["call"].any())
                    del masks["across"], masks["call"]
                for kind, mask in masks.items():
                    if kind not in kinds and mask.any():
                        kinds[kind] = _meeting(mask, at + owners.low, unit, theirs, tiles, thread, threads)
        if "across" in kinds:
            break
    if "across" not in kinds and perhaps:
        raise Undecided(perhaps)
    return _Conflicts(kinds.pop("across", None), **kinds, call_perhaps=call_perhaps)


def _slots(run: StageRun, tiles: np.ndarray) -> np.ndarray:
    """On which blocks tiles are: two are on one block of every grid where this is equal, else apart on some grid."""
    if run.slots is None:
        return tiles
    slots = np.asarray(run.slots, np.int64)
    # What nobody writes has no tile.
    return slots[np.clip(tiles, 0, len(slots) - 1)]


def _meeting(mask: np.ndarray, at: np.ndarray, unit: int, *who: np.ndarray) -> _Meeting:
    i = int(np.flatnonzero(mask)[0])
    a, b, c, d = (int(w[i]) for w in who)
    return _Meeting(int(at[i]) * unit, (a, b), (c, d))


def _twice(owners: WriteMap, unit: int) -> _Conflicts:
    if not owners.certain and owners.last is not owners.owner:
        raise Undecided("writes under a condition on data")

    def meeting(at: int | None) -> _Meeting | None:
        if at is None:
            return None
        pairs = (divmod(int(keys[at]), owners.threads) for keys in (owners.owner, owners.last))
        return _Meeting((owners.low + at) * unit, *zip(*pairs, strict=True))

    return _Conflicts(meeting(owners.across), within=meeting(owners.within))
