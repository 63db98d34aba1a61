"""How the work of a pattern can be divided between blocks that do not wait for each other (000 §4.1, 003 §5.3).

What threads of a block give each other through shared memory or shuffles is *kept*: what reductions and products give
to others of the pattern, expensive results that are read several times, and what products read. All else is computed
by the thread that needs it. Axes of two members are one where the one reads the other along them (``axes.py``). A set
of such axes is cut into chunks, one for each block, where

    no member is reduced along it                     (a block would need the totals of others)
    each member that reads another along it is aligned with it
    what lies across it is element-wise and not kept  (each block computes that again)

The chunks of all sets that can be cut are the pattern's *units*. A unit is computed by some threads of one block, and
what is kept of it stays there. Where a member reads one that is not aligned with it and has nothing kept above it, such
as through a reshape or a gather, it computes what it needs of that again, and the two may be divided differently.
Members that share no chunks then are *components* with units of their own (kernel packing is the same without a
reader). A reduction that none of the pattern reads can be shared out between blocks that add up their totals, so its
axes can be cut too (`splits`).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from souffle.stitching.graph import Op, OpGraph
from souffle.stitching.kinds import CONTRACTIONS, ELEMENTWISE, REDUCTIONS, Kind

__all__ = ["AxisSet", "Component", "Layout", "axis_sets", "kept_of", "layout_of"]


@dataclass(frozen=True)
class AxisSet:
    """Axes of members that are one, and how they can be cut.

    Attributes
    ----------
    parts : int
        Equal chunks of each axis that correspond to each other; any number of neighbours can be taken together.
    axes : tuple of (int, int)
        Member and axis, the reduced ones after the others; each member once.
    """

    parts: int
    axes: tuple[tuple[int, int], ...]

    def axis_of(self, member: int) -> int | None:
        """The axis of a member, ``None`` if it has none."""
        return next((axis for one, axis in self.axes if one == member), None)


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
    extra : tuple of int
        What it computes again of other components, rising.
    again : dict of int to float
        How often each element of members and extras is computed over all units, on average.
    shared : dict of int to int
        Bytes of each member that is kept that a unit holds.
    single : frozenset of int
        Those of `shared` of which a unit has one element, which a warp can keep in a register.
    until : dict of int to int
        Of each of `shared` the last member that reads it, directly or through what is computed with it.
    cuts : tuple of AxisSet
        The sets that are cut into units, by their first axes: the product of their parts is `units`.
    """

    members: tuple[int, ...]
    units: int
    splits: int
    extra: tuple[int, ...]
    again: dict[int, float]
    shared: dict[int, int]
    single: frozenset[int]
    until: dict[int, int]
    cuts: tuple[AxisSet, ...] = ()

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


def kept_of(graph: OpGraph, members: Sequence[int]) -> frozenset[int]:
    """What threads of a block give each other of a pattern."""
    inside = frozenset(members)
    return frozenset(number for number in members if _kept(graph, number, inside))


def axis_sets(graph: OpGraph, members: Sequence[int], kept: Collection[int]) -> tuple[AxisSet, ...]:
    """The axes of members that are one where `kept` is kept, those sets that can be cut at all; by their first axes.

    Parameters
    ----------
    graph : OpGraph
    members : sequence of int
        Vertices, rising.
    kept : collection of int
        What threads of a block give each other.
    """
    classes, _ = _joined(graph, members, frozenset(members), _bound(graph, members, kept))
    found: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for number in members:
        for axis in range(len(_axes(graph.ops[number]))):
            found.setdefault(classes.find((number, axis)), []).append((number, axis))
    return tuple(
        AxisSet(classes.parts[root], tuple(axes))
        for root, axes in found.items()
        if classes.parts[root] > 1 and len({member for member, _ in axes}) == len(axes)
    )


def layout_of(graph: OpGraph, members: Sequence[int], kept: Collection[int] | None = None) -> Layout:
    """How a pattern can be divided.

    Parameters
    ----------
    graph : OpGraph
    members : sequence of int
        Vertices, rising.
    kept : collection of int, optional
        What threads of a block give each other; :func:`kept_of` where not given.
    """
    inside = frozenset(members)
    kept = set(kept_of(graph, members) if kept is None else kept)
    classes, attached = _joined(graph, members, inside, _bound(graph, members, kept))
    read = {producer for number in members for producer in graph.producers[number] if producer in inside}
    parts = _connected(members, attached)
    parts = [part for part in parts if len(part) > 1 or part[0] not in read or graph.escapes(part[0], inside)]
    return Layout(tuple(_component(graph, part, inside, classes, (read, kept, attached)) for part in parts))


def _bound(graph: OpGraph, members: Sequence[int], kept: Collection[int]) -> set[int]:
    """What is kept, or computed from what is kept."""
    bound: set[int] = set()
    for number in members:
        if number in kept or not bound.isdisjoint(graph.producers[number]):
            bound.add(number)
    return bound


def _axes(op: Op) -> tuple[int, ...]:
    return (*op.shape, *op.reduced)


def _joined(
    graph: OpGraph, members: Sequence[int], inside: frozenset[int], bound: set[int]
) -> tuple[_Classes, set[tuple[int, int]]]:
    """The sets of axes, and the pairs of producer and reader that are divided alike."""
    classes = _Classes()
    attached: set[tuple[int, int]] = set()
    for number in members:
        for axis, extent in enumerate(_axes(graph.ops[number])):
            classes.add((number, axis), extent)
    for number in members:
        for read in graph.ops[number].reads:
            producer = read.producer
            if producer not in inside:
                continue
            aligned = {alignment.dimension for alignment in read.alignments}
            across = [d for d, e in enumerate(graph.ops[producer].shape) if e > 1 and d not in aligned]
            if across and producer not in bound:
                continue  # computed again where it is read
            attached.add((producer, number))
            for dimension, axis, parts in read.alignments:
                classes.join((producer, dimension), (number, axis), parts)
            for dimension in across:
                classes.spoil((producer, dimension))
    return classes, attached


def _connected(members: Sequence[int], attached: set[tuple[int, int]]) -> list[tuple[int, ...]]:
    beside: dict[int, list[int]] = {number: [] for number in members}
    for one, other in attached:
        beside[one].append(other)
        beside[other].append(one)
    found: list[tuple[int, ...]] = []
    seen: set[int] = set()
    for root in members:
        stack, part = [root], []
        while stack:
            number = stack.pop()
            if number not in seen:
                seen.add(number)
                part.append(number)
                stack += beside[number]
        if part:
            found.append(tuple(sorted(part)))
    return found


def _component(
    graph: OpGraph,
    members: tuple[int, ...],
    inside: frozenset[int],
    classes: _Classes,
    known: tuple[set[int], set[int], set[tuple[int, int]]],
) -> Component:
    read, kept, attached = known
    holders: dict[tuple[int, int], list[int]] = {}
    reduced: dict[tuple[int, int], bool] = {}  # sets along which a member is reduced; whether none reads that member
    for number in members:
        op = graph.ops[number]
        for axis in range(len(_axes(op))):
            root = classes.find((number, axis))
            if classes.parts[root] > 1:
                holders.setdefault(root, []).append(number)
                if axis >= len(op.shape):
                    reduced[root] = reduced.get(root, True) and number not in read
    whole = {n for n in members if graph.ops[n].kind not in ELEMENTWISE or n in kept or n not in read}
    cut, split = [], []
    for root, holding in holders.items():
        own = set(holding)
        if len(own) < len(holding) or not whole <= own:
            continue
        if root not in reduced:
            cut.append(root)
        elif reduced[root]:
            split.append(root)
    units = math.prod(classes.parts[root] for root in cut)
    had = {number: math.prod(classes.parts[root] for root in cut if number in holders[root]) for number in members}
    most = {number: units / had[number] for number in members}
    again = _evaluations(graph, members, kept, most)
    extra = _computed_again(graph, members, inside, attached, again)
    shared = {number: -(-graph.ops[number].written // had[number]) for number in members if number in kept}
    return Component(
        members,
        units,
        math.prod(classes.parts[root] for root in split),
        extra,
        again,
        shared,
        frozenset(number for number in shared if graph.ops[number].size == had[number]),
        _last_reads(graph, members, shared),
        tuple(_axis_set(root, members, graph, classes) for root in cut),
    )


def _axis_set(root: tuple[int, int], members: tuple[int, ...], graph: OpGraph, classes: _Classes) -> AxisSet:
    axes = [
        (number, axis)
        for number in members
        for axis in range(len(_axes(graph.ops[number])))
        if classes.find((number, axis)) == root
    ]
    return AxisSet(classes.parts[root], tuple(axes))


def _evaluations(graph: OpGraph, members: tuple[int, ...], kept: set[int], most: dict[int, float]) -> dict[int, float]:
    """How often an element of each member is computed: once for each unit that holds it, or where it is read."""
    again: dict[int, float] = {}
    for number in reversed(members):
        wanted = [
            again[consumer] * one.bytes * one.times / max(1, graph.ops[number].written)
            for consumer in graph.consumers[number]
            if consumer in again
            for one in graph.ops[consumer].reads
            if one.producer == number
        ]
        again[number] = most[number] if number in kept or not wanted else min(most[number], max(wanted))
    return again


def _computed_again(
    graph: OpGraph,
    members: tuple[int, ...],
    inside: frozenset[int],
    attached: set[tuple[int, int]],
    again: dict[int, float],
) -> tuple[int, ...]:
    """What a component computes of others, with how often in `again`."""
    own = set(members)
    extra: dict[int, float] = {}
    for number in sorted(inside, reverse=True):
        times = again[number] if number in own else extra.get(number, 0.0)
        if not times:
            continue
        for one in graph.ops[number].reads:
            producer = one.producer
            if producer in inside and producer not in own and (number not in own or (producer, number) not in attached):
                evaluations = one.bytes * one.times / max(1, graph.ops[producer].written)
                extra[producer] = extra.get(producer, 0.0) + times * evaluations
    again.update(extra)
    return tuple(sorted(extra))


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


def _last_reads(graph: OpGraph, members: tuple[int, ...], shared: dict[int, int]) -> dict[int, int]:
    last: dict[int, int] = {}
    for number in reversed(members):
        reads = [number]
        for consumer in graph.consumers[number]:
            if consumer in last:
                reads.append(consumer if consumer in shared else last[consumer])
        last[number] = max(reads)
    return {number: last[number] for number in shared}
