"""Reductions whose readers need several of their elements for one of their own: these side by side, in one stage.

::

    P[n] = sum over k of x[k] * w[k, n]                         Q[u, g] = sum over k of x[k] * w[k, u + g * 256]
    c[u] = f(P[u], P[u + 256], P[u + 512], P[u + 768])    →     c[u] = f(Q[u, 0], Q[u, 1], Q[u, 2], Q[u, 3])

The gates of a recurrent cell lie so: its columns are interleaved by the tiles, not in memory. A thread that has the
elements of Q which one element of ``c`` needs goes on with ``c`` at once; P is in no memory, and nothing waits between.

Theorem. Let element ``e`` of a reader read P at ``A e + b + o`` for some ``o`` of a box of offsets ``O``, and let
``(e, o) -> A e + b + o`` be injective. Then ``Q[e, o] = P[A e + b + o]`` has no element of P twice, and the reader
reads ``Q[e, .]`` alone. Of P that is needed what its other readers read, which is nothing where all are such ones; and
where the images of all of them together have no more elements than P, nothing is computed twice. Where a reader asks
under a condition, as the lowest layer of a stack of cells that has no layer below, an index may lie outside of P: the
nearest element inside stands in its place, which nothing reads.

Each reader and its sums are one stage where a rule holds several sums of one thread side by side
(``schedule/gpu/forms/one_reduction.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import gcd, prod

from tvm import te, tirx

from souffle.decision import Decision, Refused
from souffle.index.linear import Interval, Linear, interval_of, linear_of
from souffle.placement.stage_trial import StageTrials
from souffle.placement.two_phase import free_suffix
from souffle.program import TE, FusedTE, InTiles, Item, Origin, Tensor, TEProgram, fuse, make_te, parts_of
from souffle.transform.handles import Handles, instantiate, read
from souffle.transform.roll import signature
from souffle.tvm_compat import (
    PrimExpr,
    bounded_analyzer,
    choice_parts,
    fresh_axis,
    is_choice,
    load_indices,
    load_tensor,
    loads,
    map_bodies,
    map_loads,
    map_outermost,
    reduce_node,
    simplified_index,
    structural_key,
)

__all__ = ["Interleaved", "interleave", "interleave_by_cost", "interleaved"]

_SUFFIX = "_sums"

_MOST_TOGETHER = 32
"""Sums that one element may need: a thread holds all of them in registers."""

_REPEATED = 1.5
"""So many times the elements of a reduction may be computed where its readers need them."""


@dataclass(frozen=True)
class _Row:
    """Where a reader's elements read one axis of a reduction: at ``sum(coefficients * its axes) + first + n * step``.

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

    def places(self, shape: Sequence[int]) -> list[int]:
        """All of them, for a reader of this shape."""
        own = [range(0, c * extent, c) for c, extent in zip(self.coefficients, shape, strict=True) if c]
        offsets = range(self.first, self.first + self.step * self.count, self.step)
        return [sum(point) for point in product(*own, offsets)]


@dataclass(frozen=True, eq=False)
class Interleaved:
    """A reader with the sums that it needs.

    Attributes
    ----------
    reader : TE or FusedTE
        As it was.
    sums : TE
        Its elements of the reduction, those that one element of the reader needs along the last axes.
    inside : TE or FusedTE
        The reader of `sums`.
    """

    reader: TE | FusedTE
    sums: TE
    inside: TE | FusedTE


@dataclass(frozen=True, eq=False)
class Interleaving:
    """A reduction as its readers are to have it.

    Attributes
    ----------
    readers : tuple of Interleaved
        Those that are functions of elements and wait for nothing else.
    rest : TE or None
        What the others read of it: a box of its elements; ``None`` where there are no others.
    first : tuple of int
        Where that begins, along each of its axes.
    """

    readers: tuple[Interleaved, ...]
    rest: TE | None
    first: tuple[int, ...]


Choose = Callable[[TE, Interleaving], str | Refused]
"""Of a reduction, and of what is to become of it."""


def interleave(program: TEProgram, choose: Choose) -> tuple[TEProgram, tuple[Decision, ...]]:
    """Compute reductions where their readers need several of their elements for one.

    Parameters
    ----------
    program : TEProgram
        Not rolled yet: what stands in a loop already stays as it is.
    choose : callable
        Says why a reduction is to be computed so, or why not, as :func:`interleave_by_cost` does. Asked once for those
        that differ in constant terms of their indices at most, so that repeated steps stay equal.

    Returns
    -------
    program : TEProgram
        The same object where nothing changed.
    decisions : tuple of Decision
        One for each reduction asked about.
    """
    answers: dict[object, str | Refused] = {}
    decisions: list[Decision] = []
    instead: dict[Item, tuple[Item, ...]] = {}
    moved: dict[Tensor, tuple[Tensor, tuple[int, ...]]] = {}
    suffix = free_suffix(program, _SUFFIX)
    position = {item: number for number, item in enumerate(program.tes)}
    for item in program.tes:
        if not isinstance(item, TE) or not item.is_reduction or item.placement is not None or len(item.outputs) > 1:
            continue
        readers = [one for one in program.consumers[item.output] if _waits_for(program, position, one, item)]
        if not any(_needs_several(item, reader) for reader in readers):
            continue
        others = [one for one in program.consumers[item.output] if one not in readers]
        made = interleaved(item, readers, others, suffix, whole=item.output in program.outputs)
        if isinstance(made, Refused):
            decisions.append(Decision("interleaving", item.name, False, made.reason))
            continue
        shapes = tuple(one.sums.output.shape for one in made.readers)
        key = (signature(item), tuple(map(signature, readers)), shapes, made.rest and made.rest.output.shape)
        if key not in answers:
            answers[key] = choose(item, made)
        answer = answers[key]
        if isinstance(answer, Refused):
            decisions.append(Decision("interleaving", item.name, False, answer.reason))
            continue
        subject = f"{item.name} with {', '.join(reader.name for reader in readers)}"
        decisions.append(Decision("interleaving", subject, True, answer))
        instead[item] = () if made.rest is None else (made.rest,)
        instead |= {one.reader: (one.sums, one.inside) for one in made.readers}
        if made.rest is not None and made.rest is not item:
            moved[item.output] = (made.rest.output, made.first)
    if not instead:
        return program, tuple(decisions)
    items = [new for item in program.tes for new in instead.get(item, (item,))]
    return program.with_tes([_moved(item, moved) for item in items]), tuple(decisions)


def _waits_for(program: TEProgram, position: dict[Item, int], reader: Item, producer: TE) -> bool:
    """Whether a reader is a function of elements, and a reduction is the last thing that it waits for."""
    if not isinstance(reader, (TE, FusedTE)) or reader.is_reduction or reader.placement is not None:
        return False
    made = (program.producers[tensor] for tensor in reader.inputs if tensor in program.producers)
    return max(made, key=position.__getitem__) is producer


def _needs_several(producer: TE, reader: TE | FusedTE) -> bool:
    """Whether a reader reads a reduction at several places for one element of its own."""
    reads = _reads(producer, reader)
    return not isinstance(reads, Refused) and len({(read.coefficients, read.constants) for read in reads}) > 1


def interleaved(
    producer: TE,
    readers: Sequence[TE | FusedTE],
    others: Sequence[Item] = (),
    suffix: str = _SUFFIX,
    *,
    whole: bool = False,
) -> Interleaving | Refused:
    """A reduction whose readers have the sums that they need beside each other.

    Parameters
    ----------
    producer : TE
        Of one output.
    readers : sequence of TE or FusedTE
        That are to have them; none of them reduces.
    others : sequence of TE, FusedTE, ExternTE or Loop
        What else reads it.
    suffix : str
        Of the names of the sums.
    whole : bool
        Whether all of it is needed besides.
    """
    size = producer.output.size
    made, elements = [], 0
    for reader in readers:
        rows = _rows(producer, reader)
        if isinstance(rows, Refused):
            return rows
        own = prod(row.count for row in rows)
        elements += parts_of(reader)[-1].outputs[0].size * own
        if own > _MOST_TOGETHER:
            return Refused(f"an element of {reader.name} reads {own} of its own, more than {_MOST_TOGETHER}")
        made.append(_interleaved(producer, reader, rows, suffix))
    rest, first = None, (0,) * len(producer.axes)
    if others or whole:
        box = None if whole else _box(producer, others)
        rest, first = (producer, first) if box is None else _part(producer, box)
        elements += rest.output.size
    if elements > _REPEATED * size:
        return Refused(f"its readers need {elements} elements, of the {size} that it has")
    return Interleaving(tuple(made), rest, first)


def _box(producer: TE, readers: Sequence[Item]) -> list[range] | None:
    """What some readers read of a reduction along each of its axes at most; ``None`` if that is not known."""
    tensor = producer.output
    ends: list[tuple[int, int]] = []
    for reader in readers:
        if not isinstance(reader, (TE, FusedTE)):
            return None
        for part in parts_of(reader):
            axes = {structural_key(axis.var): axis for axis in (*part.axes, *part.reduce_axes)}
            for load in _loads_of(part, tensor):
                found = [_ends(linear_of(index), axes) for index in load_indices(load)]
                if None in found:
                    return None
                ends = [(min(a, c), max(b, d)) for (a, b), (c, d) in zip(ends or found, found, strict=True)]
    box = [range(max(0, low), min(high + 1, extent)) for (low, high), extent in zip(ends, tensor.shape, strict=True)]
    return box if all(map(len, box)) else None


def _ends(linear: Linear, axes: dict[object, tirx.IterVar]) -> tuple[int, int] | None:
    """The least and the greatest value of a sum of multiples of axes; ``None`` if it is not that."""
    low = high = linear.constant
    for key, (_, coefficient) in linear.terms.items():
        if key not in axes or not isinstance(axes[key].dom.extent, tirx.IntImm):
            return None
        last = coefficient * (int(axes[key].dom.extent.value) - 1)
        low, high = low + min(last, 0), high + max(last, 0)
    return low, high


def _part(producer: TE, box: Sequence[range]) -> tuple[TE, tuple[int, ...]]:
    """The elements of a reduction in a box, and where that begins."""
    first = tuple(one.start for one in box)
    if all(len(one) == extent for one, extent in zip(box, producer.output.shape, strict=True)):
        return producer, first
    axes = [fresh_axis(len(one), f"e{number}") for number, one in enumerate(box)]
    place = [axis.var + start if start else axis.var for axis, start in zip(axes, first, strict=True)]
    return _computed(producer, axes, place, producer.name, producer.origin), first


def _moved(item: Item, moved: dict[Tensor, tuple[Tensor, tuple[int, ...]]]) -> Item:
    """An item that reads what is left of reductions where it stands now."""
    if not isinstance(item, (TE, FusedTE)) or not any(tensor in moved for tensor in item.inputs):
        return item
    if isinstance(item, FusedTE):
        return fuse([_moved(part, moved) for part in item.parts], item.outputs)
    handles = Handles()
    bodies = handles.opened(item)
    table = [(handles.of(old), handles.of(new), first) for old, (new, first) in moved.items() if old in item.inputs]

    def rewrite(load: PrimExpr) -> PrimExpr:
        for old, new, first in table:
            if load_tensor(load).same_as(old):
                indices = zip(load_indices(load), first, strict=True)
                return read(new, [index - start if start else index for index, start in indices])
        return load

    made = make_te(item.name, item.axes, map_bodies(bodies, rewrite), handles.pairs(), item.origin, item.outputs)
    return made.placed(item.placement)


def _loads_of(part: TE, tensor: Tensor) -> list[PrimExpr]:
    """Where a TE reads a tensor."""
    if tensor not in part.inputs:
        return []
    placeholder = part.placeholders[part.inputs.index(tensor)]
    return [load for body in part.op.body for load in loads(body) if load_tensor(load).same_as(placeholder)]


@dataclass(frozen=True)
class _Read:
    """Where a part of a reader reads a reduction: of each axis of that, the multiples of the reader's axes.

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
            make = tirx.Select if isinstance(node, tirx.Select) else tirx.if_then_else
            return make(walk(condition, ranges), *chosen)

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


def _reads(producer: TE, reader: TE | FusedTE) -> list[_Read] | Refused:
    """Where a reader reads a reduction; the axes of all its parts that do are alike."""
    tensor = producer.output
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
    """Of each axis of what is read, the multiples of a reader's axes, on which all agree where these vary."""
    directions = []
    for row in zip(*(one.coefficients for one in reads), strict=True):
        direction = []
        for number in range(axes):
            free = {own[number] for one, own in zip(reads, row, strict=True) if number not in one.fixed}
            if len(free) > 1:
                return None
            direction.append(free.pop() if free else max((own[number] for own in row), key=abs))
        directions.append(tuple(direction))
    return directions


def _rows(producer: TE, reader: TE | FusedTE) -> tuple[_Row, ...] | Refused:
    """Where a reader reads the axes of a reduction; or why these are no offsets of a box from an element's place."""
    shape = parts_of(reader)[-1].outputs[0].shape
    reads = _reads(producer, reader)
    if isinstance(reads, Refused):
        return reads
    directions = _directions(reads, len(shape))
    if directions is None:
        return Refused(f"{reader.name} reads it in several directions")
    rows = []
    for direction, values in zip(
        directions, zip(*(one.offsets(directions) for one in reads), strict=True), strict=True
    ):
        offsets = sorted(set(values))
        step = gcd(*(offset - offsets[0] for offset in offsets)) or 1
        rows.append(_Row(direction, offsets[0], step, (offsets[-1] - offsets[0]) // step + 1))
    for number, extent in enumerate(shape):
        if extent > 1 and not any(row.coefficients[number] for row in rows):
            return Refused(f"{reader.name} reads an element of it for several of its own along axis {number}")
    for row in rows:
        places = row.places(shape)
        if len(set(places)) < len(places):
            return Refused(f"{reader.name} reads an element of it for several of its own")
    return tuple(rows)


def _interleaved(producer: TE, reader: TE | FusedTE, rows: Sequence[_Row], suffix: str) -> Interleaved:
    parts = parts_of(reader)
    shape = parts[-1].outputs[0].shape
    used = [number for number, extent in enumerate(shape) if extent > 1]
    own = [fresh_axis(shape[number], f"e{number}") for number in used]
    slots = [fresh_axis(row.count, f"g{number}") for number, row in enumerate(rows) if row.count > 1]
    sums = _sums(producer, shape, rows, own, slots, f"{reader.name}{suffix}")
    placement = InTiles(sums.name, "elements")
    inside = [_reading(part, producer.outputs[0], sums.outputs[0], rows, used).placed(placement) for part in parts]
    return Interleaved(reader, sums, fuse(inside, reader.outputs) if isinstance(reader, FusedTE) else inside[0])


def _sums(
    producer: TE,
    shape: Sequence[int],
    rows: Sequence[_Row],
    own: Sequence[tirx.IterVar],
    slots: Sequence[tirx.IterVar],
    name: str,
) -> TE:
    """The elements of a reduction that a reader needs."""
    axes = [*own, *slots]
    at = dict(zip((number for number, extent in enumerate(shape) if extent > 1), own, strict=True))
    left = iter(slots)
    place = []
    for row, extent in zip(rows, producer.output.shape, strict=True):
        index: PrimExpr = tirx.IntImm("int32", row.first)
        for number, coefficient in enumerate(row.coefficients):
            if coefficient and number in at:
                index = index + at[number].var * coefficient
        if row.count > 1:
            index = index + next(left).var * row.step
        places = row.places(shape)
        if min(places) < 0:
            index = tirx.Max(index, tirx.IntImm("int32", 0))
        if max(places) >= extent:
            index = tirx.Min(index, tirx.IntImm("int32", extent - 1))
        place.append(index)
    origin = replace(producer.origin, group=f"{producer.origin.group}{_SUFFIX}")
    return _computed(producer, axes, place, name, origin)


def _computed(producer: TE, axes: Sequence[tirx.IterVar], place: Sequence[PrimExpr], name: str, origin: Origin) -> TE:
    """A reduction's element at `place`, over other axes."""
    handles = Handles()
    (body,) = handles.opened(producer)
    reduce = reduce_node(body)
    inner = [fresh_axis(int(axis.dom.extent.value), str(axis.var.name), reduction=True) for axis in reduce.axis]
    analyzer = bounded_analyzer([*axes, *inner])

    def simple(load: PrimExpr) -> PrimExpr:
        return read(load_tensor(load), [simplified_index(index, analyzer) for index in load_indices(load)])

    def moved(expression: PrimExpr) -> PrimExpr:
        there = instantiate(expression, [*producer.axes, *reduce.axis], [*place, *(axis.var for axis in inner)])
        return map_loads(there, simple)

    sources = [moved(source) for source in reduce.source]
    whole = tirx.Reduce(reduce.combiner, sources, inner, moved(reduce.condition), 0, list(reduce.init))
    return make_te(name, axes, [whole], handles.pairs(), origin)


def _reading(part: TE, tensor: Tensor, sums: Tensor, rows: Sequence[_Row], used: Sequence[int]) -> TE:
    """A part of a reader with its sums in place of the reduction."""
    if tensor not in part.inputs:
        return part
    handles = Handles()
    before, after = handles.of(tensor), handles.of(sums)
    own = [part.axes[number].var for number in used]

    def instead(at: _Read) -> PrimExpr:
        offsets = zip(rows, at.offsets([row.coefficients for row in rows]), strict=True)
        slots = [(offset - row.first) // row.step for row, offset in offsets if row.count > 1]
        return read(after, [*own, *(tirx.IntImm("int32", slot) for slot in slots)])

    bodies = [_map_reads(part, body, before, instead) for body in handles.opened(part)]
    return make_te(part.name, part.axes, bodies, handles.pairs(), part.origin, part.outputs)


def interleave_by_cost(producer: TE, made: Interleaving, trials: StageTrials) -> str | Refused:
    """Why it pays that a reduction is computed where its readers need it, or why not.

    Parameters
    ----------
    producer, made
        See :func:`interleave`.
    trials : StageTrials
        Of the program that they stand in. Where its device is ``None``, everything is refused.
    """
    if trials.device is None:
        return Refused("no product of this architecture is described, so that no time can be predicted")
    apart = trials.stages([producer, *(one.reader for one in made.readers)])
    together = trials.stages([] if made.rest is None else [made.rest])
    for stages in (apart, together):
        if isinstance(stages, Refused):
            return stages
    for one in made.readers:
        answer, draft = trials.answer(one.sums, one.inside, needed=one.inside.outputs)
        if answer.schedule is None:
            return Refused(f"no tile holds {one.inside.name} with its sums: {answer.reason}")
        together.append(trials.lowered(answer, draft))
    # What does not wait for each other has one grid sync: all that is there after it, the readers before it.
    sync = trials.device.shared_sync_seconds
    before = sum(trials.seconds(apart)) - (len(apart) - 2) * sync
    after = sum(trials.seconds(together)) - (len(together) - 1) * sync
    figures = f"{before * 1e6:.1f} µs apart, {after * 1e6:.1f} µs where its readers need it"
    return Refused(figures) if after > before else figures
