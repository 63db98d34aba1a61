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
(``schedule/gpu/forms/one_reduction.py``), and constants that the sums read are laid out as they do
(:mod:`souffle.placement.interleaved_columns`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from tvm import tirx

from souffle.decision import Decision, Refused
from souffle.placement.interleaved_columns import InterleavedColumns
from souffle.placement.offset_reads import OffsetReads, box_read, needs_several, offset_reads
from souffle.placement.stage_trial import StageTrials
from souffle.placement.two_phase import free_suffix
from souffle.program import TE, FusedTE, InTiles, Item, Origin, Tensor, TEProgram, fuse, make_te, parts_of
from souffle.transform.handles import Handles, instantiate, read
from souffle.transform.roll import signature_of_step
from souffle.tvm_compat import (
    PrimExpr,
    bounded_analyzer,
    fresh_axis,
    load_indices,
    load_tensor,
    map_bodies,
    map_loads,
    reduce_node,
    simplified_index,
)

__all__ = ["Interleaving", "interleave", "interleave_by_cost", "interleaved"]

_SUFFIX, _COLUMNS = "_sums", "_beside"

_MOST_TOGETHER = 32
"""Sums that one element may need: a thread holds all of them in registers."""

_REPEATED = 1.5
"""So many times the elements of a reduction may be computed where its readers need them."""


@dataclass(frozen=True, eq=False)
class Sums:
    """Elements of a reduction beside each other, those that one element of a reader needs along the last axes.

    Attributes
    ----------
    te : TE
    reader : TE or FusedTE
        As it was.
    of : Tensor
        What the reduction defined.
    reads : OffsetReads
        Where the reader read that.
    """

    te: TE
    reader: TE | FusedTE
    of: Tensor
    reads: OffsetReads

    def given_to(self, reader: Item) -> Item:
        """The reader, which may have changed since, with them."""
        tensor = self.te.output
        parts = [self.reads.beside(part, self.of, tensor) for part in parts_of(reader)]
        return fuse(parts, reader.outputs) if isinstance(reader, FusedTE) else parts[0]


@dataclass(frozen=True, eq=False)
class Box:
    """A part of a reduction.

    Attributes
    ----------
    te : TE
    of : Tensor
        What the reduction defined.
    first : tuple of int
        Where the part begins, along each of its axes.
    """

    te: TE
    of: Tensor
    first: tuple[int, ...]

    def given_to(self, reader: Item) -> Item:
        """An item that reads it where it stands now."""
        if self.te.output is self.of or self.of not in reader.inputs:
            return reader
        if isinstance(reader, FusedTE):
            return fuse([self.given_to(part) for part in reader.parts], reader.outputs)
        handles = Handles()
        bodies = handles.opened(reader)
        before, after = handles.of(self.of), handles.of(self.te.output)

        def rewrite(load: PrimExpr) -> PrimExpr:
            if not load_tensor(load).same_as(before):
                return load
            indices = zip(load_indices(load), self.first, strict=True)
            return read(after, [index - start if start else index for index, start in indices])

        bodies = map_bodies(bodies, rewrite)
        made = make_te(reader.name, reader.axes, bodies, handles.pairs(), reader.origin, reader.outputs)
        return made.placed(reader.placement)


@dataclass(frozen=True, eq=False)
class Interleaving:
    """A reduction as its readers are to have it.

    Attributes
    ----------
    inside : tuple of (Sums, TE or FusedTE)
        For the readers that are functions of elements and wait for nothing else: the sums that each needs, and the
        reader of these, to be computed with them.
    rest : tuple of Sums or Box
        What the others read of it: for each the sums that it needs, or a box of elements for all.
    """

    inside: tuple[tuple[Sums, TE | FusedTE], ...]
    rest: tuple[Sums, ...] | tuple[Box]


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
    before: dict[Item, list[TE]] = {}
    inside: dict[Item, Item] = {}
    gone: set[Item] = set()
    moved: list[Sums | Box] = []
    columns = InterleavedColumns(program.constants, free_suffix(program, _COLUMNS))
    suffix = free_suffix(program, _SUFFIX)
    position = {item: number for number, item in enumerate(program.tes)}
    for item in program.tes:
        if not isinstance(item, TE) or item.placement is not None or not _is_plain(item):
            continue
        readers = [one for one in program.consumers[item.output] if _waits_for(program, position, one, item)]
        if not any(needs_several(item.output, reader) for reader in readers):
            continue
        others = [one for one in program.consumers[item.output] if one not in readers]
        made = interleaved(item, readers, others, columns, suffix, whole=item.output in program.outputs)
        if isinstance(made, Refused):
            decisions.append(Decision("interleaving", item.name, False, made.reason))
            continue
        of_readers = tuple(map(signature_of_step, readers))
        key = (signature_of_step(item), of_readers, tuple(one.te.output.shape for one in _parts(made)))
        if key not in answers:
            answers[key] = choose(item, made)
        answer = answers[key]
        if isinstance(answer, Refused):
            decisions.append(Decision("interleaving", item.name, False, answer.reason))
            continue
        subject = f"{item.name} with {', '.join(reader.name for reader in readers)}"
        decisions.append(Decision("interleaving", subject, True, answer))
        gone.add(item)
        before[item] = [one.te for one in made.rest]
        moved += made.rest
        for sums, reading in made.inside:
            before[sums.reader], inside[sums.reader] = [sums.te], reading
    if not gone:
        return program, tuple(decisions)
    items: list[Item] = []
    for item in program.tes:
        items += before.get(item, ())
        items += [] if item in gone else [inside.get(item, item)]
    return program.with_tes([_given(item, moved) for item in items], constants=columns.made), tuple(decisions)


def _parts(made: Interleaving) -> list[Sums | Box]:
    """All that is made of a reduction."""
    return [*(sums for sums, _ in made.inside), *made.rest]


def _given(item: Item, moved: Sequence[Sums | Box]) -> Item:
    """An item that reads what is left of reductions."""
    for one in moved:
        if isinstance(item, (TE, FusedTE)) and one.of in item.inputs:
            item = one.given_to(item) if isinstance(one, Box) or one.reader.name == item.name else item
    return item


def _is_plain(item: TE) -> bool:
    """Whether it reduces one value over ranges that are the same for all elements, from the identity."""
    reduce = reduce_node(item.body)
    if reduce is None or len(item.outputs) > 1 or len(reduce.init):
        return False
    ends = [end for axis in reduce.axis for end in (axis.dom.min, axis.dom.extent)]
    return all(isinstance(end, tirx.IntImm) for end in ends) and not any(int(axis.dom.min) for axis in reduce.axis)


def _waits_for(program: TEProgram, position: dict[Item, int], reader: Item, producer: TE) -> bool:
    """Whether a reader is a function of elements, and a reduction is the last thing that it waits for."""
    if not isinstance(reader, (TE, FusedTE)) or reader.is_reduction or reader.placement is not None:
        return False
    made = (program.producers[tensor] for tensor in reader.inputs if tensor in program.producers)
    return max(made, key=position.__getitem__) is producer


def interleaved(
    producer: TE,
    readers: Sequence[TE | FusedTE],
    others: Sequence[Item],
    columns: InterleavedColumns,
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
    columns : InterleavedColumns
        Makes the constants that the sums read.
    suffix : str
        Of the names of the sums.
    whole : bool
        Whether all of it is needed besides.
    """
    inside = []
    for reader in readers:
        reads = offset_reads(producer.output, reader)
        if isinstance(reads, Refused):
            return reads
        if reads.shape != parts_of(reader)[-1].outputs[0].shape:
            return Refused(f"some elements of {reader.name} alone read it")
        if reads.together > _MOST_TOGETHER:
            return Refused(f"an element of {reader.name} reads {reads.together}, more than {_MOST_TOGETHER}")
        sums = _sums(producer, reader, reads, columns, f"{reader.name}{suffix}")
        inside.append((sums, _placed(sums.given_to(reader), InTiles(sums.te.name, "elements"))))
    rest = _rest(producer, others, columns, suffix, whole=whole)
    elements = sum(one.te.output.size for one in (*(sums for sums, _ in inside), *rest))
    if elements > _REPEATED * producer.output.size:
        return Refused(f"its readers need {elements} elements, of the {producer.output.size} that it has")
    return Interleaving(tuple(inside), rest)


def _placed(item: TE | FusedTE, placement: InTiles) -> TE | FusedTE:
    parts = [part.placed(placement) for part in parts_of(item)]
    return fuse(parts, item.outputs) if isinstance(item, FusedTE) else parts[0]


def _rest(
    producer: TE, others: Sequence[Item], columns: InterleavedColumns, suffix: str, *, whole: bool
) -> tuple[Sums, ...] | tuple[Box]:
    """What others read of a reduction."""
    tensor = producer.output
    if not others and not whole:
        return ()
    box = None if whole else box_read(tensor, others)
    if box is None:
        return (Box(producer, tensor, (0,) * len(tensor.shape)),)
    plain = [isinstance(one, (TE, FusedTE)) and not one.is_reduction for one in others]
    reads = [offset_reads(tensor, one) if fits else Refused("") for one, fits in zip(others, plain, strict=True)]
    if not any(isinstance(one, Refused) for one in reads):
        found = enumerate(zip(others, reads, strict=True))
        names = f"{tensor.name}{suffix}"
        return tuple(_sums(producer, reader, one, columns, f"{names}{n or ''}") for n, (reader, one) in found)
    first = tuple(one.start for one in box)
    if all(len(one) == extent for one, extent in zip(box, tensor.shape, strict=True)):
        return (Box(producer, tensor, first),)
    axes = [fresh_axis(len(one), f"e{number}") for number, one in enumerate(box)]
    place = [axis.var + start if start else axis.var for axis, start in zip(axes, first, strict=True)]
    handles = Handles()
    (body,) = handles.opened(producer)
    return (Box(_computed(producer, body, handles, axes, place, producer.name, producer.origin), tensor, first),)


def _sums(producer: TE, reader: TE | FusedTE, reads: OffsetReads, columns: InterleavedColumns, name: str) -> Sums:
    """The elements of a reduction that a reader needs."""
    tensor, shape = producer.output, reads.shape
    own = {number: fresh_axis(shape[number], f"e{number}") for number in reads.used}
    slots = [fresh_axis(row.count, f"g{number}") for number, row in enumerate(reads.rows) if row.count > 1]
    left = iter(slots)
    place, apart = [], {}
    for axis, row, extent in zip(producer.axes, reads.rows, tensor.shape, strict=True):
        index: PrimExpr = tirx.IntImm("int32", row.first)
        moving = [number for number in own if row.coefficients[number]]
        for number in moving:
            index = index + own[number].var * row.coefficients[number]
        if row.count > 1:
            slot = next(left).var
            index = index + slot * row.step
            if [row.coefficients[number] for number in moving] == [1] and row.first == 0:
                unit = own[moving[0]].var
                if shape[moving[0]] == row.step and row.step * row.count == extent:
                    apart[axis.var] = (unit, slot, row.step)
        places = row.places(shape)
        if min(places) < 0:
            index = tirx.Max(index, tirx.IntImm("int32", 0))
        if max(places) >= extent:
            index = tirx.Min(index, tirx.IntImm("int32", extent - 1))
        place.append(index)
    handles = Handles()
    (body,) = handles.opened(producer)
    body = columns.read(body, handles, apart)
    origin = replace(producer.origin, group=f"{producer.origin.group}{_SUFFIX}")
    axes = [*own.values(), *slots]
    made = _computed(producer, body, handles, axes, place, name, origin)
    return Sums(made, reader, tensor, reads)


def _computed(
    producer: TE,
    body: PrimExpr,
    handles: Handles,
    axes: Sequence[tirx.IterVar],
    place: Sequence[PrimExpr],
    name: str,
    origin: Origin,
) -> TE:
    """A reduction's element at `place`, over other axes."""
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


def interleave_by_cost(producer: TE, made: Interleaving, trials: StageTrials) -> str | Refused:
    """Why it pays that a reduction is computed where its readers need it, or why not.

    Parameters
    ----------
    producer, made
        See :data:`Choose`.
    trials : StageTrials
        Of the program that they stand in. Where its device is ``None``, everything is refused.
    """
    if trials.device is None:
        return Refused("no product of this architecture is described, so that no time can be predicted")
    given = [tensor for one in _parts(made) for tensor in one.te.inputs]
    trials.add_constants([tensor for tensor in given if tensor not in trials.program.producers])
    apart = trials.stages([producer, *(sums.reader for sums, _ in made.inside)])
    together = trials.stages([one.te for one in made.rest])
    for stages in (apart, together):
        if isinstance(stages, Refused):
            return stages
    for sums, reading in made.inside:
        answer, draft = trials.answer(sums.te, reading, needed=reading.outputs)
        if answer.schedule is None:
            return Refused(f"no tile holds {reading.name} with its sums: {answer.reason}")
        together.append(trials.lowered(answer, draft))
    # What does not wait for each other has one grid sync: all that is there after it, the readers before it.
    sync = trials.device.shared_sync_seconds
    before = sum(trials.seconds(apart)) - (len(apart) - 2) * sync
    after = sum(trials.seconds(together)) - (len(together) - 1) * sync
    figures = f"{before * 1e6:.1f} µs apart, {after * 1e6:.1f} µs where its readers need it"
    return Refused(figures) if after > before else figures
