"""Where a function of elements reads a tensor at offsets from the place of its own element.

Element ``e`` reads ``t[A e + b + o]`` for some offsets ``o`` of a box, the same multiples ``A`` wherever it reads.
Under a condition that leaves an axis one value, what stands in the place of its multiple is a number; it is taken for
what it would be, so that ``t[1]`` where ``i == 1`` is ``t[2 i - 1]`` if that is what others read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import gcd, prod

from tvm import te, tirx

from souffle.decision import Refused
from souffle.index.bounds import Bounder, Bounds
from souffle.index.linear import Interval, interval_of, linear_of
from souffle.program import TE, FusedTE, Item, Tensor, make_te, parts_of
from souffle.transform.handles import Handles, read
from souffle.tvm_compat import (
    PrimExpr,
    choice_like,
    choice_parts,
    is_choice,
    load_indices,
    load_tensor,
    loads,
    map_outermost,
    structural_key,
)

__all__ = ["OffsetReads", "Row", "box_read", "needs_several", "offset_reads"]


_MOST_PLACES = 1 << 20
"""Along an axis of what is read, which are looked at one by one."""


@dataclass(frozen=True)
class Row:
    """Where a reader's elements read one axis of a tensor: at ``sum(coefficients * its axes) + first + n * step``.

    Attributes
    ----------
    coefficients : tuple of int
        Of each axis of the reader.
    first, step, count : int
        The offsets.
    """

    coefficients: tuple[int, ...]
    first: int
    step: int
    count: int

    def number(self, shape: Sequence[int]) -> int:
        """How many places they are, for a reader of this shape, some perhaps alike."""
        return self.count * prod(extent for c, extent in zip(self.coefficients, shape, strict=True) if c)

    def places(self, shape: Sequence[int]) -> list[int]:
        """All of them, for a reader of this shape."""
        own = [range(0, c * extent, c) for c, extent in zip(self.coefficients, shape, strict=True) if c]
        offsets = range(self.first, self.first + self.step * self.count, self.step)
        return [sum(point) for point in product(*own, offsets)]


@dataclass(frozen=True)
class OffsetReads:
    """Where a reader reads a tensor.

    Attributes
    ----------
    shape : tuple of int
        Of the reader's elements that read it: 1 along axes that have one value wherever they do.
    rows : tuple of Row
        Of each axis of the tensor.
    """

    shape: tuple[int, ...]
    rows: tuple[Row, ...]

    @property
    def used(self) -> tuple[int, ...]:
        """The reader's axes longer than 1."""
        return tuple(number for number, extent in enumerate(self.shape) if extent > 1)

    @property
    def together(self) -> int:
        """How many elements of the tensor are beside each other for one of the reader's."""
        return prod(row.count for row in self.rows)

    def beside(self, part: TE, tensor: Tensor, sums: Tensor) -> TE:
        """A part of the reader that finds them in `sums`, along its last axes, in place of `tensor`."""
        if tensor not in part.inputs:
            return part
        handles = Handles()
        before, after = handles.of(tensor), handles.of(sums)
        own = [part.axes[number].var for number in self.used]

        def instead(at: _Read) -> PrimExpr:
            offsets = zip(self.rows, at.offsets([row.coefficients for row in self.rows]), strict=True)
            slots = [(offset - row.first) // row.step for row, offset in offsets if row.count > 1]
            return read(after, [*own, *(tirx.IntImm("int32", slot) for slot in slots)])

        bodies = [_map_reads(part, body, before, instead) for body in handles.opened(part)]
        made = make_te(part.name, part.axes, bodies, handles.pairs(), part.origin, part.outputs)
        return made.placed(part.placement)


@dataclass(frozen=True)
class _Read:
    """One place where a reader reads a tensor: of each axis of that, the multiples of the reader's axes.

    Attributes
    ----------
    coefficients : tuple of (tuple of int)
    constants : tuple of int
        With what axes of one value add, see `fixed`.
    fixed : mapping of int to int
        Axes that have one value where it is read, and that value.
    """

    coefficients: tuple[tuple[int, ...], ...]
    constants: tuple[int, ...]
    fixed: Mapping[int, int]

    def offsets(self, directions: Sequence[Sequence[int]]) -> tuple[int, ...]:
        """What it adds to the directions, which its coefficients are but for fixed axes."""
        return tuple(
            constant - sum(direction[axis] * value for axis, value in self.fixed.items())
            for constant, direction in zip(self.constants, directions, strict=True)
        )


def _map_reads(part: TE, body: PrimExpr, source: te.Tensor, see: Callable[[_Read | None], PrimExpr | None]) -> PrimExpr:
    """A body with what `see` gives for each load of `source` in its place; ``None`` leaves it.

    `see` is given where it reads, or ``None`` where that is no sum of multiples of the axes.
    """
    places = {structural_key(axis.var): number for number, axis in enumerate(part.axes)}
    extents = part.outputs[0].shape

    def walk(expression: PrimExpr, ranges: tuple[tuple[float, float], ...]) -> PrimExpr:
        def outermost(node: PrimExpr) -> PrimExpr:
            if not is_choice(node):
                if load_tensor(node).same_as(source):
                    made = see(_read_at(load_indices(node), places, ranges))
                    return node if made is None else made
                return read(load_tensor(node), [walk(index, ranges) for index in load_indices(node)])
            condition, then, other = choice_parts(node)
            where = interval_of(condition)
            sides = [_narrowed(ranges, side, places) for side in (where, where and where.negated())]
            chosen = [walk(value, side) for value, side in zip((then, other), sides, strict=True)]
            return choice_like(node, walk(condition, ranges), *chosen)

        return map_outermost(expression, outermost)

    return walk(body, tuple((0, extent - 1) for extent in extents))


def _narrowed(
    ranges: tuple[tuple[float, float], ...], where: Interval | None, places: Mapping[object, int]
) -> tuple[tuple[float, float], ...]:
    """The least and greatest values of axes where a condition holds as well."""
    if where is None or not where.inside or len(where.form.terms) != 1:
        return ranges
    ((key, (_, coefficient)),) = where.form.terms.items()
    if key not in places or coefficient != 1:
        return ranges
    number = places[key]
    low, high = ranges[number]
    return (*ranges[:number], (max(low, where.low), min(high, where.high - 1)), *ranges[number + 1 :])


def _read_at(
    indices: Sequence[PrimExpr], places: Mapping[object, int], ranges: Sequence[tuple[float, float]]
) -> _Read | None:
    if any(loads(index) for index in indices):
        return None
    found = [linear_of(index) for index in indices]
    if any(key not in places for linear in found for key in linear.terms):
        return None
    fixed = {number: int(low) for number, (low, high) in enumerate(ranges) if low == high}
    coefficients, constants = [], []
    for linear in found:
        own = [0] * len(ranges)
        for key, (_, coefficient) in linear.terms.items():
            own[places[key]] = coefficient
        coefficients.append(tuple(own))
        constants.append(linear.constant + sum(own[number] * value for number, value in fixed.items()))
    return _Read(tuple(coefficients), tuple(constants), fixed)


def _reads(tensor: Tensor, reader: TE | FusedTE) -> list[_Read] | Refused:
    """The places where a reader reads a tensor; the axes of all its parts that do are alike."""
    shape = parts_of(reader)[-1].outputs[0].shape
    found: list[_Read | None] = []
    for part in parts_of(reader):
        if tensor not in part.inputs:
            continue
        if part.outputs[0].shape != shape:
            return Refused(f"{reader.name} reads it in parts of several shapes")
        for body in part.op.body:
            _map_reads(part, body, part.placeholders[part.inputs.index(tensor)], found.append)
    if None in found:
        return Refused(f"{reader.name} reads it at what is no sum of multiples of its axes")
    return found


def _directions(reads: Sequence[_Read], axes: int) -> list[tuple[int, ...]] | None:
    """Of each axis of what is read, the multiples of a reader's axes, on which all agree where these vary.

    An axis that has one value wherever it is read has no part in it.
    """
    directions = []
    for row in zip(*(one.coefficients for one in reads), strict=True):
        direction = []
        for number in range(axes):
            free = {own[number] for one, own in zip(reads, row, strict=True) if number not in one.fixed}
            if len(free) > 1:
                return None
            direction.append(free.pop() if free else 0)
        directions.append(tuple(direction))
    return directions


def offset_reads(tensor: Tensor, reader: TE | FusedTE) -> OffsetReads | Refused:
    """Where a reader reads a tensor; or why these places are no offsets of a box from an element's own.

    No element of the tensor is read for two elements of the reader.
    """
    shape = parts_of(reader)[-1].outputs[0].shape
    reads = _reads(tensor, reader)
    if isinstance(reads, Refused):
        return reads
    directions = _directions(reads, len(shape))
    if directions is None:
        return Refused(f"{reader.name} reads it in several directions")
    alone = [number for number in range(len(shape)) if all(number in one.fixed for one in reads)]
    shape = tuple(1 if number in alone else extent for number, extent in enumerate(shape))
    rows = []
    places = zip(*(one.offsets(directions) for one in reads), strict=True)
    for direction, values in zip(directions, places, strict=True):
        offsets = sorted(set(values))
        step = gcd(*(offset - offsets[0] for offset in offsets)) or 1
        rows.append(Row(direction, offsets[0], step, (offsets[-1] - offsets[0]) // step + 1))
    if any(row.number(shape) > _MOST_PLACES for row in rows):
        return Refused(f"{reader.name} reads more than {_MOST_PLACES} places along an axis")
    for number, extent in enumerate(shape):
        if extent > 1 and not any(row.coefficients[number] for row in rows):
            return Refused(f"{reader.name} reads an element of it for several of its own along axis {number}")
    for row in rows:
        places = row.places(shape)
        if len(set(places)) < len(places):
            return Refused(f"{reader.name} reads an element of it for several of its own")
    return OffsetReads(shape, tuple(rows))


def needs_several(tensor: Tensor, reader: TE | FusedTE) -> bool:
    """Whether a reader reads a tensor at several places for one element of its own."""
    reads = _reads(tensor, reader)
    return not isinstance(reads, Refused) and len({(read.coefficients, read.constants) for read in reads}) > 1


def box_read(tensor: Tensor, readers: Sequence[Item]) -> list[range] | None:
    """What some readers read of a tensor along each of its axes at most; ``None`` if that is not known."""
    found: list[list[Bounds]] = []
    for reader in readers:
        if not isinstance(reader, (TE, FusedTE)):
            return None
        for part in parts_of(reader):
            bounds = Bounder({a.var: [(a.dom.min, a.dom.extent)] for a in (*part.axes, *part.reduce_axes)}, {})
            for load in (load for body in part.op.body for load in loads(body)):
                if part.input_of(load_tensor(load)) is tensor:
                    found.append([bounds(index) for index in load_indices(load)])
    ends = [(min(b.low for b in own), max(b.high for b in own)) for own in zip(*found, strict=True)]
    box = [range(max(0, low), min(high + 1, extent)) for (low, high), extent in zip(ends, tensor.shape, strict=True)]
    return box if all(map(len, box)) else None
