"""What a stage function reads and writes of global memory: ranges, and who writes each element."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from souffle.verify.accesses import Function, Memory, MemoryAccess, accesses_of, always_waits, waits_of
from souffle.verify.expressions import Expr, Undecided, asked_once, operation
from souffle.verify.races_in_a_span import WARP
from souffle.verify.ranges import Range, in_units, index_range, points

__all__ = ["Footprint", "Touch", "WriteMap", "whatever_holds"]


@dataclass(frozen=True, eq=False)
class Touch:
    """One access with its conditions, and the bytes that it may touch, first and last."""

    access: MemoryAccess
    conditions: tuple[Expr, ...]
    range: Range

    @property
    def certain(self) -> bool:
        """Whether all that it may touch it touches: data decides neither whether nor where."""
        return not self.access.place.offset.by_data and not any(c.opaque for c in self.conditions)

    @property
    def possible(self) -> bool:
        """Whether all that it may touch it touches for some data: that may choose where it reads, and not whether."""
        return not (any(c.opaque for c in self.conditions) or (self.access.place.offset.by_data and self.access.writes))


@dataclass(frozen=True, eq=False)
class WriteMap:
    """Who writes each element of a tensor: of all ``tile * threads + thread`` that do, the lowest and the highest.

    Where one tile writes an element, a thread is the only one that does, or differs from the lowest or the highest.

    Attributes
    ----------
    low : int
        The first element of the map.
    owner : array of int
        The lowest; -1 where nobody writes.
    last : array of int
        The highest; `owner` itself where no element has two.
    threads : int
    across : int or None
        Where in the map an element is that two tiles write.
    within : int or None
        Where one is that two threads of one tile write.
    sure : array of bool, or None
        Which elements are written whatever the data, ``None`` for all that are written.
    """

    low: int
    owner: np.ndarray
    last: np.ndarray
    threads: int
    across: int | None
    within: int | None
    sure: np.ndarray | None

    @property
    def certain(self) -> bool:
        """Whether all these writes happen; not so where they depend on data."""
        return self.sure is None

    @cached_property
    def written(self) -> np.ndarray | None:
        """Which elements of the map are written, ``None`` for all."""
        mask = self.owner >= 0
        return None if mask.all() else mask


class Footprint:
    """The accesses of a function to each of its pointers.

    Attributes
    ----------
    tiles : array of int or None
        Those in which they are looked at, ``None`` for all. Ranges are of all.
    """

    tiles: np.ndarray | None = None

    def __init__(self, function: Function) -> None:
        self.function = function
        self.touches: tuple[Touch, ...] = ()
        self.count = 0
        found = []
        ranges: dict[tuple, Range | None] = {}
        for access, conditions in accesses_of(function.body):
            self.count += 1
            key = (access.place.offset, conditions)
            if key not in ranges:
                ranges[key] = index_range(access.place.offset, conditions)
            reach = ranges[key]
            if reach is not None:
                found.append(Touch(access, conditions, Range(reach.low, reach.high + access.width - 1, reach.exact)))
        self.touches = tuple(found)
        self._maps: dict[int, WriteMap | Undecided] = {}
        self._bounds = {
            (m.parameter, w): self._range_of(m.parameter, w) for m in function.pointers for w in (False, True)
        }

    def in_tiles(self, tiles: np.ndarray) -> Footprint:
        """The same of some tiles."""
        part = copy(self)
        part.tiles, part._maps = tiles, {}
        return part

    @cached_property
    def uses_shared(self) -> bool:
        """Whether it touches shared memory."""
        return any(touch.access.place.memory.kind == "shared" for touch in self.touches)

    @cached_property
    def waits(self) -> bool:
        """Whether all threads of a block wait for each other somewhere in each tile."""
        return always_waits(self.function.body)

    @cached_property
    def may_wait(self) -> bool:
        """Whether they do so in some tiles only."""
        return not self.waits and waits_of(self.function.body, ("block",))

    def of(self, parameter: int, writes: bool) -> Iterator[Touch]:
        """Accesses of one pointer."""
        for touch in self.touches:
            memory = touch.access.place.memory
            if memory.kind == "global" and memory.parameter == parameter and touch.access.writes == writes:
                yield touch

    def range_of(self, parameter: int, writes: bool) -> Range | None:
        """The bytes that are read, or written, behind one pointer; ``None`` for none."""
        return self._bounds[parameter, writes]

    def _range_of(self, parameter: int, writes: bool) -> Range | None:
        ranges = [t.range for t in self.of(parameter, writes)]
        if not ranges:
            return None
        low, high = min(r.low for r in ranges), max(r.high for r in ranges)
        exact = all(r.exact for r in ranges if r.low == low or r.high == high)
        return Range(low, high, exact)

    def elements(self, touch: Touch) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """(element, tile, thread) of one access, in parts; of what a warp does together, the warp's first thread.

        Raises
        ------
        Undecided
        """
        unit = touch.access.place.memory.unit
        function = self.function
        parts = points(touch.access.place.offset, touch.conditions, function.tile, function.thread, tiles=self.tiles)
        for offsets, tiles, threads in parts:
            if touch.access.by == "warp":
                threads = threads // WARP * WARP
            yield in_units(offsets, touch.access.width, unit, tiles, threads)

    def writes(self, parameter: int) -> WriteMap:
        """Who writes the elements behind a pointer that the function writes.

        Raises
        ------
        Undecided
        """
        return asked_once(self._maps, parameter, lambda: self._map(self.function.pointers[parameter]))

    def _map(self, memory: Memory) -> WriteMap:
        reach = self.range_of(memory.parameter, True)
        count = self.function.thread.extent
        low = reach.low // memory.unit
        size = reach.high // memory.unit + 1 - low
        if size > 1 << 28:
            raise Undecided(f"writes spread over {size} elements")
        narrow = self.function.tile.extent * count < 2**31
        owner = np.full(size, -1, np.int32 if narrow else np.int64)
        shared: list[tuple[np.ndarray, np.ndarray]] = []
        for touch in self.of(memory.parameter, True):
            for elements, tiles, threads in self.elements(touch):
                at = elements - low
                own = (tiles * count + threads).astype(owner.dtype)
                before = owner[at]
                owner[at] = own
                other = np.where((before >= 0) & (before != own), before, owner[at])
                twice = np.flatnonzero(other != own)
                if twice.size:
                    shared += [(at[twice], own[twice]), (at[twice], other[twice])]
        sure = self._sure(memory.parameter, low, size)
        if not shared:
            return WriteMap(low, owner, owner, count, None, None, sure)
        at, keys = (np.concatenate(parts) for parts in zip(*shared, strict=True))
        last = owner.copy()
        np.minimum.at(owner, at, keys)
        np.maximum.at(last, at, keys)
        far = owner[at] // count != last[at] // count
        across, within = (int(at[np.argmax(mask)]) if mask.any() else None for mask in (far, ~far))
        return WriteMap(low, owner, last, count, across, within, sure)

    def _sure(self, parameter: int, low: int, size: int) -> np.ndarray | None:
        """Which elements from `low` on are written whatever the data; ``None`` if it decides nothing."""
        touches = list(self.of(parameter, True))
        if all(touch.certain for touch in touches):
            return None
        sure = np.zeros(size, bool)
        for touch in whatever_holds(touches):
            for elements, _, _ in self.elements(touch):
                sure[elements - low] = True
        return sure

    def statement_of(self, parameter: int, writes: bool, element: int, tile: int) -> object:
        """The first statement that reads or writes an element in a tile, for messages."""
        function = self.function
        for touch in self.of(parameter, writes):
            memory = touch.access.place.memory
            try:
                for offsets, _, _ in points(
                    touch.access.place.offset,
                    touch.conditions,
                    function.tile,
                    function.thread,
                    tiles=np.array([tile], np.int64),
                ):
                    first = offsets // memory.unit
                    if ((first <= element) & (element < first + touch.access.width // memory.unit)).any():
                        return touch.access.statement
            except Undecided:
                return touch.access.statement
        return None


def whatever_holds(touches: Sequence[Touch]) -> list[Touch]:
    """The certain ones; two at one place are one, if one is made where a condition holds and the other where not."""
    found = {(touch.access.place, touch.access.width, touch.conditions): touch for touch in touches}
    open_ = list(found)
    while open_:
        place, width, conditions = open_.pop()
        for i, condition in enumerate(conditions):
            rest = conditions[:i], conditions[i + 1 :]
            against = condition.args[0] if condition.op == "not" else operation("not", condition)
            key = (place, width, (*rest[0], *rest[1]))
            if key not in found and (place, width, (*rest[0], against, *rest[1])) in found:
                found[key] = replace(found[place, width, conditions], conditions=key[2])
                open_.append(key)
    return [touch for touch in found.values() if touch.certain]
