"""What a stage reads of what it has itself written in the same tile: whether the write comes before the read.

Program order is the order of the text, and within loops that hold both, that of their turns. It is the order in which
one thread makes its accesses. Where another thread wrote, a barrier must stand between, or the two race; that is the
business of :mod:`souffle.verify.races_between_stages`, as are elements that another tile writes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from souffle.verify.accesses import MemoryAccess, leaves
from souffle.verify.expressions import Axis, Undecided
from souffle.verify.footprint import Footprint, Touch
from souffle.verify.ranges import in_units, points

__all__ = ["Missing", "earliest", "missing_read"]


@dataclass(frozen=True)
class Missing:
    """A read of an element that the tensor does not hold, and that the stage has not written before it.

    Attributes
    ----------
    element, tile, thread : int
        The element is counted from where the pointer points to.
    statement : object
    whatever : bool
        Whether so are all that this thread may read there, whichever data chooses.
    """

    element: int
    tile: int
    thread: int
    statement: object
    whatever: bool


@dataclass(frozen=True)
class _Spot:
    """Where an access stands: its number in the text, and the axes of the loops around it, outermost first."""

    number: int
    loops: tuple[Axis, ...]


def missing_read(
    footprint: Footprint, parameter: int, held: Callable[[np.ndarray], np.ndarray], *, own: bool
) -> Missing | None:
    """The first read through a pointer of what is neither held nor written before by the stage itself.

    Parameters
    ----------
    footprint : Footprint
    parameter : int
    held : callable
        Which of some elements are held when the stage begins, as booleans.
    own : bool
        Whether all that the stage writes to this tensor it writes through this pointer.

    Raises
    ------
    Undecided
        If it depends on data, or there is more to look at than is feasible.
    """
    spots: dict[MemoryAccess, _Spot] = {}
    for touch in footprint.of(parameter, False):
        if all(held(elements).all() for elements, _, _ in footprint.elements(touch)):
            continue
        if not spots:
            text = enumerate(leaves(footprint.function.body))
            spots = {leaf: _Spot(number, loops) for number, (leaf, _, loops) in text if isinstance(leaf, MemoryAccess)}
        writes = [w for w in footprint.of(parameter, True) if w.range.high >= touch.range.low]
        found = _missing(footprint, touch, writes, spots, held)
        if found is not None and not own:
            raise Undecided("it writes to the same tensor through another pointer")
        if found is not None and not touch.certain and not found.whatever:
            raise Undecided("a read that depends on data")
        if found is not None:
            return found
    return None


def _missing(
    footprint: Footprint,
    touch: Touch,
    writes: Sequence[Touch],
    spots: dict[MemoryAccess, _Spot],
    held: Callable[[np.ndarray], np.ndarray],
) -> Missing | None:
    spot = spots[touch.access]
    known = [_First(footprint, write, _common(spots[write.access], spot), spots[write.access]) for write in writes]
    for elements, tiles, threads, turns in _located(footprint, touch, spot.loops):
        bad = ~held(elements)
        doubtful = np.zeros(elements.size, bool)
        for first in known:
            comes = first.before(spot, elements, tiles, turns)
            if first.certain:
                bad &= ~comes
            else:
                doubtful |= comes
        if not bad.any():
            continue
        if not (bad & ~doubtful).any():
            raise Undecided("it reads what it writes where data says so")
        i = int(np.flatnonzero(bad & ~doubtful)[0])
        there = (tiles == tiles[i]) & (threads == threads[i]) & (turns == turns[i])
        whatever = not any(c.opaque for c in touch.conditions) and bool((bad & ~doubtful)[there].all())
        return Missing(int(elements[i]), int(tiles[i]), int(threads[i]), touch.access.statement, whatever)
    return None


def _common(one: _Spot, other: _Spot) -> tuple[Axis, ...]:
    """The loops around both."""
    count = next((i for i, (a, b) in enumerate(zip(one.loops, other.loops, strict=False)) if a is not b), None)
    return one.loops[: min(len(one.loops), len(other.loops)) if count is None else count]


class _First:
    """When a write first comes to each element, in each tile: the turn of the loops that it has in common with a read.

    ``certain`` says whether it writes the elements as a whole, whatever the data.
    """

    def __init__(self, footprint: Footprint, write: Touch, common: tuple[Axis, ...], spot: _Spot) -> None:
        self.number, self.common = spot.number, common
        self.size = footprint.range_of(write.access.place.memory.parameter, True).high + 1
        unit = write.access.place.memory.unit
        whole = write.access.width % unit == 0 and write.access.alignment % unit == 0
        self.certain = whole and write.access.by != "copy" and write.certain
        found = [(np.empty(0, np.int64), np.empty(0, np.int64))]
        for elements, tiles, _, turns in _located(footprint, write, common):
            found.append(earliest(tiles * self.size + elements, turns))
        self.keys, self.turns = earliest(*(np.concatenate(parts) for parts in zip(*found, strict=True)))

    def before(self, spot: _Spot, elements: np.ndarray, tiles: np.ndarray, turns: np.ndarray) -> np.ndarray:
        """Which of some reads, in their turns of all loops around them, come after the write."""
        if not self.keys.size:
            return np.zeros(elements.size, bool)
        for axis in reversed(spot.loops[len(self.common) :]):
            turns = turns // axis.extent
        inside = (elements >= 0) & (elements < self.size)
        key = tiles * self.size + elements
        at = np.clip(np.searchsorted(self.keys, key), 0, self.keys.size - 1)
        found = inside & (self.keys[at] == key)
        return found & ((self.turns[at] <= turns) if self.number < spot.number else (self.turns[at] < turns))


def earliest(keys: np.ndarray, turns: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Each key once, sorted, with the least of its turns."""
    order = np.lexsort((turns, keys))
    keys, turns = keys[order], turns[order]
    new = np.ones(keys.size, bool)
    new[1:] = keys[1:] != keys[:-1]
    return keys[new], turns[new]


def _located(
    footprint: Footprint, touch: Touch, loops: tuple[Axis, ...]
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]]:
    """(element, tile, thread, turn) of an access; turns are numbered over all of `loops`, the innermost fastest."""
    access, function = touch.access, footprint.function
    unit = access.place.memory.unit
    axes = (function.tile, function.thread)
    for found in points(access.place.offset, touch.conditions, *axes, tiles=footprint.tiles, along=loops):
        offsets, tiles, threads, *places = found
        turns = np.zeros(offsets.size, np.int64)
        for axis, place in zip(loops, places, strict=True):
            turns = turns * axis.extent + place
        yield in_units(offsets, access.width, unit, tiles, threads, turns)
