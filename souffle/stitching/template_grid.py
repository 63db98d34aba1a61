"""Which part of each operation a block of the grid computes, where several operations have loops of their own.

An operation whose result is in shared memory, and each that writes a result of the pattern, has a nest of its own. Its
``GRID`` loops are *digits* of the number of a unit of work. Nests have a digit in common where both cut one set of axes
(``layout.py``) alike, and those that have one in common, or of which one reads the other, are a *group*. Groups are
packed into a kernel (2019 §5.1), each with as many blocks as it has units.

The layout constraint, that shared memory is "only accessed within a single thread block context" (2019 §5.3), is that
of a nest that reads another one

    it has each digit of that one                                  (else it would need what other blocks compute)
    that one has each of its digits that cut an axis which it has  (else it would be computed again for nothing)

A nest without a digit of its group is computed for each of its values: again, in shared memory, and once where it
writes a result of the pattern, at the first.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from souffle.stitching.layout import AxisSet
from souffle.stitching.template import Attribute, TemplateError
from souffle.stitching.template_launch import Tiling

__all__ = ["Digit", "HostGrid", "grids_of"]


@dataclass(frozen=True)
class Digit:
    """A digit of the number of a unit: ``number // stride % count``."""

    stride: int
    count: int


@dataclass(frozen=True)
class HostGrid:
    """The units of work of a nest.

    Attributes
    ----------
    group : int
        Whose numbers they have.
    units : int
        Of the group.
    levels : tuple of ((int, int), Digit)
        Dimension and level of each ``GRID`` loop, and what its value is.
    others : tuple of Digit
        Those of the group that the nest has no loop for.
    stored : bool
        Whether it writes a result of the pattern, which only one block may.
    """

    group: int
    units: int
    levels: tuple[tuple[tuple[int, int], Digit], ...]
    others: tuple[Digit, ...]
    stored: bool


@dataclass(frozen=True)
class _Cut:
    """A ``GRID`` loop.

    Attributes
    ----------
    place : (int, int)
        Dimension and level.
    count : int
    axes : int or None
        The set of axes that it cuts, by its place; ``None`` where it is of this nest alone.
    size : int
        Parts of the set in a unit.
    """

    place: tuple[int, int]
    count: int
    axes: int | None
    size: int


def grids_of(
    hosts: Mapping[int, Tiling],
    member: Mapping[int, int],
    reads: Mapping[int, Collection[int]],
    sets: Sequence[AxisSet],
) -> dict[int, HostGrid]:
    """The units of nests.

    Parameters
    ----------
    hosts : mapping of int to Tiling
        Those that have nests of their own, the most important last: its digits come first.
    member : mapping of int to int
        Which member of the pattern each of `hosts` computes or stores, as `sets` call it.
    reads : mapping of int to collection of int
        The hosts whose shared memory each reads.
    sets : sequence of AxisSet

    Raises
    ------
    TemplateError
        If a nest would read what other blocks compute.
    """
    cuts = {number: _cuts(tiling, member[number], sets) for number, tiling in hosts.items()}
    for number, producers in reads.items():
        for producer in producers:
            _check(hosts, member, cuts, sets, producer, number)
    found: dict[int, HostGrid] = {}
    for group, numbers in enumerate(_groups(cuts, reads)):
        order: dict[object, int] = {}
        for number in reversed(numbers):
            for cut in cuts[number]:
                order.setdefault(_key(number, cut), cut.count)
        digits, stride = {}, prod(order.values())
        units = stride
        for key, count in order.items():
            stride //= count
            digits[key] = Digit(stride, count)
        for number in numbers:
            own = {_key(number, cut): cut.place for cut in cuts[number]}
            levels = tuple((own[key], digit) for key, digit in digits.items() if key in own)
            others = tuple(digit for key, digit in digits.items() if key not in own)
            found[number] = HostGrid(group, units, levels, others, not hosts[number].schedule.shared)
    return found


def _cuts(tiling: Tiling, member: int, sets: Sequence[AxisSet]) -> list[_Cut]:
    found = []
    for d, parts in enumerate(tiling.schedule.dimensions):
        for n, part in enumerate(parts):
            count = tiling.extents[d][n]
            if part.attribute is not Attribute.GRID or count == 1:
                continue
            inner = prod(tiling.extents[d][n + 1 :])
            place = next((i for i, one in enumerate(sets) if (member, tiling.op.axes[d]) in one.axes), None)
            chunk = 1 if place is None else tiling.op.extents[d] // sets[place].parts
            whole = place is not None and n == 0 and inner % chunk == 0
            found.append(_Cut((d, n), count, place if whole else None, inner // chunk))
    return found


def _key(number: int, cut: _Cut) -> object:
    return ("own", number, cut.place) if cut.axes is None else ("axes", cut.axes, cut.count, cut.size)


def _check(
    hosts: Mapping[int, Tiling],
    member: Mapping[int, int],
    cuts: Mapping[int, list[_Cut]],
    sets: Sequence[AxisSet],
    producer: int,
    reader: int,
) -> None:
    """The layout constraint between two nests."""
    tiling = hosts[producer]
    had = {_key(reader, cut): cut for cut in cuts[reader]}
    given = {_key(producer, cut): cut for cut in cuts[producer]}
    for key, cut in given.items():
        if key not in had:
            d = cut.place[0]
            same = next((other for other in cuts[reader] if cut.axes is not None and other.axes == cut.axes), None)
            needed = tiling.op.extents[d] if same is None else same.size * tiling.op.extents[d] // sets[cut.axes].parts
            raise _elsewhere(tiling, d, tiling.without({Attribute.GRID}, d), needed)
    for key, cut in had.items():
        axis = None if cut.axes is None else sets[cut.axes].axis_of(member[producer])
        if axis is not None and key not in given:
            d = tiling.op.axes.index(axis)
            needed = cut.size * tiling.op.extents[d] // sets[cut.axes].parts
            raise _elsewhere(tiling, d, tiling.without({Attribute.GRID}, d), needed)


def _elsewhere(tiling: Tiling, dimension: int, extent: int, needed: int) -> TemplateError:
    return TemplateError(
        f"{tiling.schedule} computes {extent} of dimension {dimension} of {tiling.op.name} there, and what reads "
        f"it needs {needed}: it would come from elsewhere"
    )


def _groups(cuts: Mapping[int, list[_Cut]], reads: Mapping[int, Iterable[int]]) -> list[list[int]]:
    """Nests that read each other or have a digit in common, each group in the order of `cuts`."""
    leader = {number: number for number in cuts}

    def find(number: int) -> int:
        while leader[number] != number:
            number = leader[number]
        return number

    first: dict[object, int] = {}
    for number, own in cuts.items():
        for key in (_key(number, cut) for cut in own):
            leader[find(number)] = find(first.setdefault(key, number))
        for producer in reads.get(number, ()):
            leader[find(number)] = find(producer)
    found: dict[int, list[int]] = {}
    for number in cuts:
        found.setdefault(find(number), []).append(number)
    return list(found.values())
