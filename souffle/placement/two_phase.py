"""Two-phase reductions: a long reduction of few elements is shared among more blocks (paper §6.3, §6.4).

::

    T[v] = combine over r of s(v, r)        P[p, v] = combine over q of s(v, p * c + q)
                                       →    T[v]    = combine over p of P[p, v]

Legal because ``te.comm_reducer`` demands a combiner that is associative and commutative, with an identity: any grouping
gives the value of the definition (rounding aside, for sums and products in floating point). Chunks are of one size
where that divides the range; otherwise the identity stands in the place of what lies beyond it. Each phase takes its
chunks in ascending order, so a result has the same bits in every run. What stood before the reduction in a fused TE is
computed in the first phase, what stood behind it in the second. A GEMM that is split so along k is what libraries call
split-K. Both phases are stages of their own, with a grid sync between them.

:func:`two_phase` splits what it is told to; :func:`split_by_cost` says what pays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod

from tvm import te, tirx
from tvm.ir import Range

from souffle.cost.kernel import RELATIVE_ERROR
from souffle.cost.predict import Terms
from souffle.decision import Decision, Refused
from souffle.placement.stage_trial import StageTrials, reduction_of, seconds_of
from souffle.program import TE, FusedTE, InTiles, Item, Tensor, TEProgram, fuse, parts_of
from souffle.program.shared import OncePer
from souffle.transform.handles import read
from souffle.transform.roll import signature_of_step
from souffle.tvm_compat import PrimExpr, compute_op, reduce_node, substitute

__all__ = ["Phases", "Split", "free_suffix", "split_by_cost", "two_phase"]

_MOST_WAVES = 2
"""Tiles for each multiprocessor that a split may make: more of them only add partial results."""

_LEAST_TRIED = 8
"""Parts that are tried however many tiles there are: a part may have larger tiles, and fewer."""


@dataclass(frozen=True)
class Split:
    """What is to become of a reduction that is not left whole.

    Attributes
    ----------
    parts : int
        Among how many blocks the range of one element is shared, about; at least 2.
    reason : str
        Why, with the figures that decided.
    seconds : float
        Predicted of both phases, where the cost model decided.
    joined : Split, optional
        What might become of it where what reads the results computes the second phase, too, so that this takes little.
    """

    parts: int
    reason: str
    seconds: float = 0.0
    joined: Split | None = None


@dataclass(frozen=True)
class Phases:
    """A reduction in two phases.

    Attributes
    ----------
    partial : TE or FusedTE
        Defines tensors with axes of chunks before those of the reduction.
    total : TE or FusedTE
        Defines what the whole did.
    chunks : tuple of int
        Number of chunks along each of the leading axes; their product is near what was asked for.
    """

    partial: TE | FusedTE
    total: TE | FusedTE
    chunks: tuple[int, ...]

    @classmethod
    def of(
        cls,
        whole: TE | FusedTE,
        parts: int,
        suffix: str = "_partial",
        *,
        size: int | None = None,
        placement: InTiles | None = None,
    ) -> Phases | Refused:
        """The phases of a reduction with about `parts` chunks.

        Parameters
        ----------
        whole : TE or FusedTE
            That holds a reduction.
        parts : int
            At least 2.
        suffix : str
            Of the names of what the first phase defines.
        size : int, optional
            Values of a chunk, in place of `parts`: the reduced axes are taken as one, the last running fastest, and
            chunks are of so many in a row.
        placement : InTiles, optional
            Where the first phase is to be computed.
        """
        members = parts_of(whole)
        place = next((n for n, part in enumerate(members) if part.is_reduction), None)
        if place is None:
            return Refused("it is no reduction")
        reduction = members[place]
        made = _prototypes((reduction.op, parts, size), lambda: _split(reduction, parts, size))
        if isinstance(made, Refused):
            return made
        shape = (*made.chunks, *reduction.outputs[0].shape)
        between = tuple(Tensor(f"{t.name}{suffix}", shape, t.dtype) for t in reduction.outputs)
        # In a group of its own: phases that meet in one block again would undo the split.
        origin = replace(reduction.origin, group=f"{reduction.origin.group}{suffix}")
        name = f"{reduction.name}{suffix}"
        first = TE(name, made.first, reduction.placeholders, reduction.inputs, between, origin, placement)
        second = TE(reduction.name, made.second, made.placeholders, between, reduction.outputs, reduction.origin)
        before = tuple(part.placed(placement) for part in members[:place])
        after = members[place + 1 :]
        partial = fuse((*before, first), between) if before else first
        return cls(partial, fuse((second, *after), whole.outputs) if after else second, made.chunks)


def two_phase(
    program: TEProgram,
    choose: Callable[[TE | FusedTE], Split | Refused],
    whole: Callable[[TE | FusedTE, Split], Refused | None] = lambda item, split: None,
    *,
    label: str = "two-phase",
) -> tuple[TEProgram, tuple[Decision, ...]]:
    """Share long reductions among blocks.

    Parameters
    ----------
    program : TEProgram
        Not rolled yet: what stands in a loop already stays as it is.
    choose : callable
        Says into how many parts, for a TE or fused TE that holds a reduction, as :func:`split_by_cost` does. Asked once
        for those that differ in constant terms of their indices and in numbers at most, so that repeated layers and
        steps stay equal.
    whole : callable, optional
        Says of one that would be split why it is not where it stands.
    label : str
        Of the decisions.

    Returns
    -------
    program : TEProgram
        The same object where no reduction is split.
    decisions : tuple of Decision
        One for each reduction asked about.
    """
    answers: dict[object, Split | Refused] = {}
    decisions: list[Decision] = []
    items: list[Item] = []
    suffix = free_suffix(program, "_partial")
    # A normalization needs the tiles of its products whole.
    placements = [item.placement for item in program.tes if isinstance(item, (TE, FusedTE)) and item.placement]
    tiled = {placement.contraction for placement in placements if placement.phase != "results"}
    for item in program.tes:
        if not isinstance(item, (TE, FusedTE)) or not item.is_reduction or item.placement is not None:
            items.append(item)
            continue
        if reduction_of(item).name in tiled:
            items.append(item)
            continue
        # Steps that differ in where they read, or in a number, are to be decided alike: they may become one loop.
        key = signature_of_step(item)
        if key not in answers:
            answers[key] = choose(item)
        answer = answers[key]
        answer = answer if isinstance(answer, Refused) else whole(item, answer) or answer
        phases = answer if isinstance(answer, Refused) else Phases.of(item, answer.parts, suffix)
        if isinstance(phases, Refused):
            items.append(item)
            decisions.append(Decision(label, item.name, False, phases.reason))
        else:
            items += [phases.partial, phases.total]
            decisions.append(Decision(label, item.name, True, answer.reason))
    changed = any(decision.accepted for decision in decisions)
    return (program.with_tes(items) if changed else program), tuple(decisions)


def free_suffix(program: TEProgram, suffix: str) -> str:
    """`suffix`, longer where it makes of one name of a program another."""
    names = {tensor.name for tensor in program.tensors()}
    names |= {part.name for item in program.tes for part in parts_of(item)}
    while any(f"{name}{suffix}" in names for name in names):
        suffix += "_"
    return suffix


@dataclass(frozen=True)
class _Prototype:
    """The expressions of both phases; the first reads what the whole does, the second its outputs."""

    first: te.ComputeOp
    second: te.ComputeOp
    placeholders: tuple[te.Tensor, ...]
    chunks: tuple[int, ...]


_prototypes: OncePer[_Prototype | Refused] = OncePer()


def _split(whole: TE, parts: int, size: int | None) -> _Prototype | Refused:
    reduce = reduce_node(whole.body)
    if len(reduce.init):
        return Refused("it starts from values that it is given, which each part would count again")
    ranges = [(axis.dom.min, axis.dom.extent) for axis in reduce.axis]
    if not all(isinstance(e, tirx.IntImm) for pair in ranges for e in pair):
        return Refused("the range that it reduces varies with the element")
    values = prod(int(extent.value) for _, extent in ranges)
    if size is None:
        chunks, sizes = _chunks([int(extent.value) for _, extent in ranges], parts)
        cut = _boxes(reduce, chunks, sizes)
    else:
        chunks = (-(-values // size),)
        cut = _rows(reduce, values, chunks[0], size)
    if prod(chunks) < 2:
        reason = f"its {values} values cannot be shared by {parts}" if size is None else f"it has one chunk of {size}"
        return Refused(reason)
    split_axes, inner, point, inside = cut
    axes = [_axis(axis, int(axis.dom.extent.value), 0) for axis in whole.axes]
    point |= {old.var: new.var for old, new in zip(whole.axes, axes, strict=True)}
    identities = list(reduce.combiner.identity_element)
    sources = [substitute(source, point) for source in reduce.source]
    for condition in inside:
        sources = [tirx.if_then_else(condition, s, i) for s, i in zip(sources, identities, strict=True)]
    condition = substitute(reduce.condition, point)
    first = _reductions(reduce, sources, inner, condition)
    counts = tuple(count for count in chunks if count > 1)
    shape = (*counts, *whole.outputs[0].shape)
    placeholders = tuple(te.placeholder(shape, t.dtype, name=f"p{n}") for n, t in enumerate(whole.outputs))
    again = [te.reduce_axis((0, count), f"chunk{n}") for n, count in enumerate(counts)]
    # Over axes of its own: two expressions that share a variable could not stand in one function.
    ends = [_axis(axis, int(axis.dom.extent.value), 0) for axis in whole.axes]
    at = [axis.var for axis in (*again, *ends)]
    second = _reductions(reduce, [read(p, at) for p in placeholders], again, tirx.const(True, "bool"))
    return _Prototype(
        compute_op(f"{whole.name}_partial", [*split_axes, *axes], first, whole.op.tag),
        compute_op(whole.name, ends, second, whole.op.tag),
        placeholders,
        counts,
    )


_Cut = tuple[list[tirx.IterVar], list[tirx.IterVar], dict[tirx.Var, PrimExpr], list[PrimExpr]]
"""Axes of chunks, axes in a chunk, where that is in the whole, and what holds inside of it."""


def _boxes(reduce: tirx.Reduce, chunks: Sequence[int], sizes: Sequence[int]) -> _Cut:
    """Each reduced axis in chunks of its own."""
    split_axes, inner, point, inside = [], [], {}, []
    for axis, count, size in zip(reduce.axis, chunks, sizes, strict=True):
        start = _axis(axis, size, axis.iter_type)
        inner.append(start)
        place = start.var
        if count > 1:
            outer = _axis(axis, count, 0, "_chunk")
            split_axes.append(outer)
            place = outer.var * size + start.var
            if count * size > int(axis.dom.extent.value):
                inside.append(place < axis.dom.extent)
        point[axis.var] = place + axis.dom.min
    return split_axes, inner, point, inside


def _rows(reduce: tirx.Reduce, values: int, count: int, size: int) -> _Cut:
    """The reduced axes as one, in chunks of `size` values in a row."""
    last = reduce.axis[-1]
    outer, start = _axis(last, count, 0, "_chunk"), _axis(last, size, last.iter_type)
    place = outer.var * size + start.var
    inside = [place < tirx.IntImm(str(last.var.ty.dtype), values)] if count * size > values else []
    point, stride = {}, 1
    for axis in reversed(reduce.axis):
        extent = int(axis.dom.extent.value)
        own = place if stride == 1 else tirx.floordiv(place, stride)
        stride *= extent
        own = own if stride == values else tirx.floormod(own, extent)
        point[axis.var] = own.astype(str(axis.var.ty.dtype)) + axis.dom.min
    return [outer], [start], point, inside


def _axis(like: tirx.IterVar, extent: int, kind: int, suffix: str = "") -> tirx.IterVar:
    dom = Range.from_min_extent(tirx.IntImm(str(like.var.ty.dtype), 0), tirx.IntImm(str(like.var.ty.dtype), extent))
    return tirx.IterVar(dom, tirx.Var(f"{like.var.name}{suffix}", like.var.ty), kind)


def _reductions(
    whole: tirx.Reduce, sources: Sequence[PrimExpr], axes: Sequence[tirx.IterVar], condition: PrimExpr
) -> list[PrimExpr]:
    """One reduction for each value, all of the same sources as TVM demands."""
    first = tirx.Reduce(whole.combiner, list(sources), list(axes), condition, 0, [])
    rest = range(1, len(sources))
    return [first, *(tirx.Reduce(first.combiner, first.source, first.axis, first.condition, k, []) for k in rest)]


def _chunks(extents: Sequence[int], parts: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """How many chunks along each axis, outermost first, about `parts` in all; and their sizes."""
    counts, sizes = [], []
    left = parts
    for extent in extents:
        count = _count(extent, min(left, extent))
        size = -(-extent // count)
        counts.append(-(-extent // size))
        sizes.append(size)
        left = max(1, left // counts[-1])
    return tuple(counts), tuple(sizes)


def _count(extent: int, wanted: int) -> int:
    """Chunks of one axis: a divisor of its extent if one is near, so that no chunk needs a guard."""
    divisors = [count for count in range(wanted, wanted // 2, -1) if extent % count == 0]
    return divisors[0] if divisors else wanted


def split_by_cost(whole: TE | FusedTE, trials: StageTrials) -> Split | Refused:
    """Whether a reduction is worth two phases on a device, and of how many parts.

    A stage that has fewer tiles than the device has multiprocessors leaves some idle, and one block alone on each shows
    its latencies. Sharing the reduced range among more tiles keeps them busy; it costs a grid sync, the partial results
    and their combination. A split is worth it where the predicted time falls by more than the model may err.

    Parameters
    ----------
    whole : TE or FusedTE
        That holds a reduction.
    trials : StageTrials
        Where its device is ``None``, everything is refused.
    """
    device = trials.device
    if device is None:
        return Refused("no product of this architecture is described, so that no time can be predicted")
    if trials.shares_rows(whole):
        return Refused("another reduction of its operator is computed on the same rows")
    answer, draft = trials.answer(whole)
    if answer.schedule is None:
        return Refused(f"it is no stage of its own: {answer.reason}")
    if answer.tiles >= device.sm_count:
        return Refused(f"its {answer.tiles} tiles keep all {device.sm_count} multiprocessors busy")
    terms = trials.predicted([trials.lowered(answer, draft)])
    alone = sum(map(seconds_of, terms))
    now = f"{answer.tiles} tile{'s' * (answer.tiles != 1)} take {alone * 1e6:.1f} µs"
    at_best = 2 * device.shared_sync_seconds + sum(map(_evenly, terms))
    if at_best * RELATIVE_ERROR >= alone:
        return Refused(f"{now}; spread evenly, and with a grid sync more, its work takes {at_best * 1e6:.1f} µs")
    # Of larger tiles there are fewer, and a part may have these.
    most = max(_MOST_WAVES * device.sm_count // answer.tiles, _LEAST_TRIED)
    tried = _tried(whole, max(2, min(most, prod(reduction_of(whole).reduction_shape))), trials)
    if isinstance(tried, Refused):
        return Refused(f"{now}; {tried.reason}")
    parts = min(tried, key=lambda parts: sum(tried[parts]))
    seconds = sum(tried[parts])
    figures = f"{now}, {parts} parts and their combination {seconds * 1e6:.1f} µs with a grid sync more"
    if seconds * RELATIVE_ERROR >= alone:
        return Refused(f"{figures}, which is not less by the factor {RELATIVE_ERROR} that the model may err")
    near = [parts for parts in tried if sum(tried[parts]) <= RELATIVE_ERROR * seconds]
    other = min(near, key=lambda parts: tried[parts][0])
    if other == parts:
        return Split(parts, figures, seconds)
    first, second = tried[other]
    reason = f"{now}, {other} parts {first * 1e6:.1f} µs, and their combination {second * 1e6:.1f} µs as a stage"
    return Split(parts, figures, seconds, Split(other, reason, first + second))


def _tried(whole: TE | FusedTE, most: int, trials: StageTrials) -> dict[int, tuple[float, float]] | Refused:
    """Seconds of both phases by parts: powers of two up to `most` and what lies halfway between them.

    All are tried. How many waves the tiles make goes up and down with the parts, and so does the size of the tiles.
    """
    tried = {parts: _seconds_of_phases(whole, parts, trials) for parts in _numbers(most)}
    possible = {parts: seconds for parts, seconds in tried.items() if not isinstance(seconds, Refused)}
    return possible or next(iter(tried.values()))


def _numbers(most: int) -> Iterator[int]:
    """2, 3, 4, 6, 8, 12 and so on, up to `most`."""
    for power in range(1, most.bit_length()):
        yield 2**power
        if 3 * 2 ** (power - 1) <= most:
            yield 3 * 2 ** (power - 1)


def _seconds_of_phases(whole: TE | FusedTE, parts: int, trials: StageTrials) -> tuple[float, float] | Refused:
    """Of each phase, in one kernel."""
    phases = Phases.of(whole, parts)
    stages = phases if isinstance(phases, Refused) else trials.stages((phases.partial, phases.total))
    if isinstance(stages, Refused):
        return stages
    first, second = trials.seconds(stages)
    return first, second


def _evenly(terms: Terms) -> float:
    """Seconds of the busiest unit, cache or memory, if every multiprocessor had the same part of the work."""
    units = (terms.issue, terms.fp32, terms.int32, terms.special, terms.tensor, terms.shared, terms.l2_port)
    return max(*units, terms.l2, terms.memory)
