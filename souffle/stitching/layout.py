"""How the work of a pattern can be divided between blocks that do not wait for each other (000 §4.1, 003 §5.3).

Axes of two members are one where the one reads the other along them (``axes.py``). A set of such axes is cut into
chunks, one for each block, where

    no member is reduced along it            (a block would need the totals of others)
    each member that reads another along it is aligned with it
    what lies across it is element-wise      (each block computes that again, which would cost too much of a sum)

The chunks of all sets that can be cut are the pattern's *units*. A unit is computed by some threads of one block, and
what passes between its members stays there. Members that do not depend on each other, directly or through others of
the pattern, are components with units of their own (kernel packing). A reduction that none of the pattern reads can be
shared out between blocks that add up their totals, so its axes can be cut too (`splits`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from souffle.stitching.graph import Op, OpGraph
from souffle.stitching.kinds import CONTRACTIONS, ELEMENTWISE, REDUCTIONS, Kind

__all__ = ["Component", "Layout", "layout_of"]


@dataclass(frozen=True)
class Component:
    """Members of a pattern that depend on each other.

    Attributes
    ----------
    members : tuple of int
        Rising.
    units : int
        Parts that need nothing of each other.
    splits : int
        Parts into which each unit can be cut besides, for the roots that add up totals of several blocks.
    again : dict of int to int
        How often each member is computed over all units.
    shared : dict of int to int
        Bytes of each member that a unit keeps in shared memory: what reductions and products give to others of the
        pattern, expensive results that are read several times, and what products read.
    single : frozenset of int
        Those of `shared` of which a unit has one element, which a warp can keep in a register.
    until : dict of int to int
        Of each of `shared` the last member that reads it, directly or through what is computed with it.
    """

    members: tuple[int, ...]
    units: int
    splits: int
    again: dict[int, int]
    shared: dict[int, int]
    single: frozenset[int]
    until: dict[int, int]

    @property
    def peak(self) -> int:
        """The most bytes of shared memory that a unit needs at once, each result kept until it was last read."""
        live = [
            sum(size for one, size in self.shared.items() if one <= number <= self.until[one])
            for number in self.members
        ]
        return max(live, default=0)

    def peak_around(self, graph: OpGraph) -> int:
        """The most bytes in and between a member and those that it reads: without life times (000 §5.4)."""
        return max(
            self.shared.get(number, 0) + sum(self.shared.get(p, 0) for p in graph.producers[number])
            for number in self.members
        )


@dataclass(frozen=True)
class Layout:
    """The components of a pattern, by their first members."""

    components: tuple[Component, ...]

    @property
    def peak(self) -> int:
        """The most bytes of shared memory that a unit of any component needs at once."""
        return max(component.peak for component in self.components)


class _Classes:
    """Sets of axes that are one, each with the parts that it can be cut into."""

    def __init__(self) -> None:
        self.parent: dict[tuple[int, int], tuple[int, int]] = {}
        self.parts: dict[tuple[int, int], int] = {}

    def add(self, axis: tuple[int, int], extent: int) -> None:
        self.parent[axis] = axis
        self.parts[axis] = extent

    def find(self, axis: tuple[int, int]) -> tuple[int, int]:
        while self.parent[axis] != axis:
            self.parent[axis] = self.parent[self.parent[axis]]
            axis = self.parent[axis]
        return axis

    def join(self, one: tuple[int, int], other: tuple[int, int], parts: int) -> None:
        root, below = self.find(one), self.find(other)
        common = math.gcd(math.gcd(self.parts[root], self.parts[below]), parts)
        self.parent[below] = root
        self.parts[root] = common

    def spoil(self, axis: tuple[int, int]) -> None:
        self.parts[self.find(axis)] = 1


def layout_of(graph: OpGraph, members: Sequence[int]) -> Layout:
    """How a pattern can be divided.

    Parameters
    ----------
    graph : OpGraph
    members : sequence of int
        Vertices, rising.
    """
    inside = frozenset(members)
    classes = _joined(graph, members, inside)
    read = {producer for number in members for producer in graph.producers[number] if producer in inside}
    return Layout(tuple(_component(graph, part, inside, classes, read) for part in _connected(graph, members, inside)))


def _axes(op: Op) -> tuple[int, ...]:
    return (*op.shape, *op.reduced)


def _joined(graph: OpGraph, members: Sequence[int], inside: frozenset[int]) -> _Classes:
    classes = _Classes()
    for number in members:
        for axis, extent in enumerate(_axes(graph.ops[number])):
            classes.add((number, axis), extent)
    for number in members:
        for read in graph.ops[number].reads:
            if read.producer not in inside:
                continue
            aligned = set()
            for dimension, axis, parts in read.alignments:
                classes.join((read.producer, dimension), (number, axis), parts)
                aligned.add(dimension)
            for dimension, extent in enumerate(graph.ops[read.producer].shape):
                if extent > 1 and dimension not in aligned:
                    classes.spoil((read.producer, dimension))
    return classes


def _connected(graph: OpGraph, members: Sequence[int], inside: frozenset[int]) -> list[tuple[int, ...]]:
    found: list[tuple[int, ...]] = []
    seen: set[int] = set()
    for root in members:
        stack, part = [root], []
        while stack:
            number = stack.pop()
            if number in seen:
                continue
            seen.add(number)
            part.append(number)
            stack += [one for one in (*graph.producers[number], *graph.consumers[number]) if one in inside]
        if part:
            found.append(tuple(sorted(part)))
    return found


def _component(
    graph: OpGraph, members: tuple[int, ...], inside: frozenset[int], classes: _Classes, read: set[int]
) -> Component:
    holders: dict[tuple[int, int], list[int]] = {}
    reduced: dict[tuple[int, int], bool] = {}  # whether it is so along the class, and each such member is unread
    for number in members:
        op = graph.ops[number]
        for axis in range(len(_axes(op))):
            root = classes.find((number, axis))
            if classes.parts[root] > 1:
                holders.setdefault(root, []).append(number)
                if axis >= len(op.shape):
                    reduced[root] = reduced.get(root, True) and number not in read
    heavy = {number for number in members if graph.ops[number].kind not in ELEMENTWISE}
    cut, split = [], []
    for root, holding in holders.items():
        own = set(holding)
        if len(own) < len(holding) or not heavy <= own:
            continue
        if root not in reduced:
            cut.append(root)
        elif reduced[root]:
            split.append(root)
    units = math.prod(classes.parts[root] for root in cut)
    had = {number: math.prod(classes.parts[root] for root in cut if number in holders[root]) for number in members}
    shared = {
        number: -(-graph.ops[number].written // had[number]) for number in members if _kept(graph, number, inside)
    }
    return Component(
        members,
        units,
        math.prod(classes.parts[root] for root in split),
        {number: units // had[number] for number in members},
        shared,
        frozenset(number for number in shared if graph.ops[number].size == had[number]),
        _last_reads(graph, members, inside, shared),
    )


def _kept(graph: OpGraph, number: int, inside: frozenset[int]) -> bool:
    """Whether threads of a block give each other what a member computes."""
    op = graph.ops[number]
    readers = [graph.ops[consumer] for consumer in graph.consumers[number] if consumer in inside]
    if not readers:
        return False
    if op.kind in REDUCTIONS or op.kind in CONTRACTIONS or op.kind is Kind.WINDOW:
        return True
    if any(reader.kind in CONTRACTIONS for reader in readers):
        return True
    return op.kind is Kind.EXPENSIVE and any(
        read.producer == number and read.times > 1 for reader in readers for read in reader.reads
    )


def _last_reads(
    graph: OpGraph, members: tuple[int, ...], inside: frozenset[int], shared: dict[int, int]
) -> dict[int, int]:
    last: dict[int, int] = {}
    for number in reversed(members):
        reads = [number]
        for consumer in graph.consumers[number]:
            if consumer in inside:
                reads.append(consumer if consumer in shared else last[consumer])
        last[number] = max(reads)
    return {number: last[number] for number in shared}
