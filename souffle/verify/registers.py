"""What a thread reads of its own arrays, it has written before, in the same call of the stage function.

One thread makes its accesses in the order of the text, and within loops in that of their turns. A write comes before a
read in two ways: it stands before it, and is made in the same turn of the loops around both whenever the read is; or it
was made in an earlier turn. For the first, those conditions of the write must hold that are not the read's anyway, for
the second all of them. An array that is declared in a loop begins anew with each turn.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from souffle.certificate import Counterexample
from souffle.verify.accesses import Memory, MemoryAccess, leaves
from souffle.verify.expressions import Axis, Expr, Undecided, conjuncts, remade, variable
from souffle.verify.footprint import Footprint, Touch, whatever_holds
from souffle.verify.own_writes import earliest
from souffle.verify.ranges import in_units, points
from souffle.verify.stage_functions import text_of

__all__ = ["unwritten"]

_UNDEFINED = "stale or undefined read"


@dataclass(frozen=True, eq=False)
class _Access:
    """An access where it stands: its number in the text, and the loops around it, outermost first."""

    number: int
    touch: Touch
    loops: tuple[Axis, ...]

    @property
    def offset(self) -> Expr:
        return self.touch.access.place.offset

    @property
    def width(self) -> int:
        return self.touch.access.width

    @cached_property
    def conditions(self) -> frozenset[Expr]:
        return frozenset(conjuncts(self.touch.conditions))

    def common(self, other: _Access) -> tuple[Axis, ...]:
        """The loops around both."""
        return tuple(a for a, b in zip(self.loops, other.loops, strict=False) if a is b)


def unwritten(kernel: str, footprint: Footprint) -> Iterator[Counterexample | Undecided]:
    """Reads of a thread's own arrays that nothing has written before, the first of each array."""
    name = footprint.function.name
    touches = {touch.access: touch for touch in footprint.touches}
    arrays: dict[Memory, tuple[list[_Access], list[_Access]]] = {}
    for number, (leaf, _, loops) in enumerate(leaves(footprint.function.body)):
        if isinstance(leaf, MemoryAccess) and leaf.place.memory.kind == "local" and leaf in touches:
            reads, writes = arrays.setdefault(leaf.place.memory, ([], []))
            (writes if leaf.writes else reads).append(_Access(number, touches[leaf], loops))
    for memory, (reads, writes) in arrays.items():
        array = _Array(footprint, memory, writes)
        try:
            found = next((read for read in reads if not array.covers(read)), None)
        except Undecided as reason:
            yield Undecided(f"{name}: whether all that is read of {memory.name} was written before: {reason}")
            continue
        if found is not None:
            why = f"it reads an element of its own array {memory.name} that it has not written before"
            text = text_of(found.touch.access.statement)
            yield Counterexample(_UNDEFINED, kernel, (name,), (text,), (), memory.name, why)


class _Array:
    """One array, and all that writes it."""

    def __init__(self, footprint: Footprint, memory: Memory, writes: Sequence[_Access]) -> None:
        self.tile, self.thread = footprint.function.tile, footprint.function.thread
        self.memory = memory
        self.size = -(-memory.nbytes // memory.unit)
        # Those that write elements in part, or where data says, are no proof.
        self.writes = [w for w in writes if w.width % memory.unit == 0 and not (w.offset.opaque or w.offset.by_data)]
        self.doubtful = len(self.writes) < len(writes) or not all(write.touch.certain for write in writes)
        self.masks: dict[tuple[Expr, int], np.ndarray] = {}

    def covers(self, read: _Access) -> bool:
        """Whether what is read was written before, whenever it is read.

        Raises
        ------
        Undecided
            Where data decides it, or there is more to look at than is feasible.
        """
        if self._plainly(read) or self._exactly(read):
            return True
        if self.doubtful or not read.touch.certain:
            raise Undecided("data decides")
        return False

    # In all turns, by all threads alike

    def _plainly(self, read: _Access) -> bool:
        """Whether writes before it under no other conditions cover all that it may touch at any time."""
        missing = None if self._varies(read) else self._mask(read).copy()
        for write in self.writes:
            if write.number >= read.number:
                continue
            if _alike(write, read):
                return True
            apart = write.offset.axes.isdisjoint(write.common(read)) and not self._varies(write)
            if missing is not None and apart and write.conditions <= read.conditions:
                missing &= ~self._mask(write)
                if not missing.any():
                    return True
        return False

    def _varies(self, access: _Access) -> bool:
        """Whether what an access touches depends on who makes it, or on what no axis stands for."""
        return access.offset.opaque or not access.offset.axes.isdisjoint((self.tile, self.thread))

    def _mask(self, access: _Access) -> np.ndarray:
        """The elements that an access touches for any values of the axes that its offset depends on."""
        key = (access.offset, access.width)
        if key not in self.masks:
            self.masks[key] = mask = np.zeros(self.size, bool)
            for elements, _ in self.located(access, (), {}, ()):
                mask[elements] = True
        return self.masks[key]

    # Turn by turn

    def _exactly(self, read: _Access) -> bool:
        """The same for each point of all that matters."""
        now, before = self._now(read), [write for write in self.writes if write.touch.certain and write.common(read)]
        shared = {self.tile, self.thread, *read.loops}
        nodes = {read.offset}.union(*({write.offset, *write.conditions} for write in (*now, *before)))
        matters = shared & frozenset().union(*(node.axes for node in nodes))
        known, reached = [], read.offset.axes | matters
        rest = [condition for condition in read.conditions if not condition.opaque]
        while more := [condition for condition in rest if condition.axes & reached]:
            known += more
            rest = [condition for condition in rest if not condition.axes & reached]
            reached = reached.union(*(condition.axes for condition in more))
        # A loop on which nothing depends has a first turn and others.
        seen = {axis: axis for axis in matters}
        seen |= {loop: Axis(loop.name, min(loop.extent, 2)) for loop in read.loops if loop not in matters}
        written = [_Written(self, write, write.common(read), (), seen) for write in now]
        for write in before:
            common = write.common(read)
            outer = tuple(loop for loop in common if loop in self.memory.loops)
            written.append(_Written(self, write, outer, common[len(outer) :], seen))
        for elements, where in self.located(read, known, seen, read.loops):
            missing = np.ones(elements.size, bool)
            for one in written:
                missing &= ~one.before(read, elements, where)
            if missing.any():
                return False
        return True

    def _now(self, read: _Access) -> list[_Access]:
        """Writes before a read, under what conditions are not the read's; two under opposite ones are one."""
        writes = {write.touch.access: write for write in self.writes if write.number < read.number}
        rest = []
        for write in writes.values():
            conditions = tuple(c for c in write.touch.conditions if not read.conditions.issuperset(conjuncts((c,))))
            rest.append(replace(write.touch, conditions=conditions))
        return [replace(writes[touch.access], touch=touch) for touch in whatever_holds(rest)]

    def located(
        self, access: _Access, conditions: Sequence[Expr], seen: Mapping[Axis, Axis], loops: Sequence[Axis]
    ) -> Iterator[tuple[np.ndarray, dict[Axis, np.ndarray]]]:
        """(element, values of tile, thread and some loops) of an access, for those axes that are `seen`.

        Of a write that begins within an element, none: it may leave parts of the first and the last.
        """
        tile, thread = (axis if axis in seen else Axis("any", 1) for axis in (self.tile, self.thread))
        along = [seen[loop] for loop in loops]
        for offsets, *where in points(access.offset, tuple(conditions), tile, thread, along=along):
            if access.touch.access.writes:
                begins = offsets % self.memory.unit == 0
                offsets, *where = (array[begins] for array in (offsets, *where))
            elements, *where = in_units(offsets, access.width, self.memory.unit, *where)
            inside = (elements >= 0) & (elements < self.size)
            yield elements[inside], dict(zip((self.tile, self.thread, *loops), (w[inside] for w in where), strict=True))


class _Written:
    """In which turn of `inner` loops each element is first written: by whom, and in which turns of `outer` loops."""

    def __init__(
        self, array: _Array, write: _Access, outer: Sequence[Axis], inner: Sequence[Axis], seen: Mapping[Axis, Axis]
    ) -> None:
        self.write = write
        self.size = array.size
        self.who = tuple(axis for axis in (array.tile, array.thread) if axis in seen)
        self.outer, self.inner, self.seen = outer, inner, seen
        found = [(np.empty(0, np.int64), np.empty(0, np.int64))]
        for elements, where in array.located(write, tuple(write.conditions), seen, (*outer, *inner)):
            found.append(earliest(*self._numbered(elements, where)))
        self.keys, self.turns = earliest(*(np.concatenate(parts) for parts in zip(*found, strict=True)))

    def _numbered(self, elements: np.ndarray, where: Mapping[Axis, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        key, turn = np.zeros_like(elements), np.zeros_like(elements)
        for axis in (*self.who, *self.outer):
            key = key * self.seen[axis].extent + where[axis]
        for axis in self.inner:
            turn = turn * self.seen[axis].extent + where[axis]
        return key * self.size + elements, turn

    def before(self, read: _Access, elements: np.ndarray, where: Mapping[Axis, np.ndarray]) -> np.ndarray:
        """Which points of a read come after the write."""
        if not self.keys.size:
            return np.zeros(elements.size, bool)
        key, turn = self._numbered(elements, where)
        at = np.minimum(np.searchsorted(self.keys, key), self.keys.size - 1)
        first = self.turns[at]
        return (self.keys[at] == key) & ((first <= turn) if self.write.number < read.number else (first < turn))


def _alike(write: _Access, read: _Access) -> bool:
    """Whether they differ in the names of loops around one alone, which then come to the same in the same turns."""
    common = len(write.common(read))
    own, other = write.loops[common:], read.loops[common:]
    if len(own) != len(other) or any(a.extent != b.extent for a, b in zip(own, other, strict=True)):
        return False
    names, memo = dict(zip(own, other, strict=True)), {}
    return (
        write.width >= read.width
        and _renamed(write.offset, names, memo) is read.offset
        and all(_renamed(condition, names, memo) in read.conditions for condition in write.conditions)
    )


def _renamed(expr: Expr, names: Mapping[Axis, Axis], memo: dict[Expr, Expr]) -> Expr:
    if expr.axes.isdisjoint(names):
        return expr
    if expr not in memo and expr.op == "axis":
        memo[expr] = variable(names[expr.value])
    elif expr not in memo:
        memo[expr] = remade(expr, [_renamed(argument, names, memo) for argument in expr.args])
    return memo[expr]
