"""Which members of a group read one tensor at one formula, and which members follow each other in what order.

A :class:`MergePlan` is how a group becomes one TE: along a new first axis (*stacked*), or along an axis that they have
(*joined*, the paper's Figure 3), and for each operand its *runs*: consecutive members that read one tensor at indices
given by one formula. One run needs no selection. Constants that differ are packed, and so make one run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import gcd
from typing import NamedTuple

from souffle.program import Tensor
from souffle.transform.horizontal.operands import Fit, LoadOperand, Member, PackedPlace, fit
from souffle.transform.horizontal.packs import Pack

__all__ = ["MergePlan", "Run", "joined_plan", "stacked_plan"]


class Run(NamedTuple):
    """Consecutive members that read one tensor.

    Attributes
    ----------
    tensor : Tensor or Pack
    stop : int
        The first member that is not of the run.
    lead, fits : tuple of Fit
        The index of a new first axis, if there is one, and the integers in the place of the load's slots.
    chosen : bool
        Whether the tensor is a pack along a new first axis that the member's number indexes, in a joined group: the
        number is then found by comparing.
    """

    tensor: Tensor | Pack
    stop: int
    lead: tuple[Fit, ...]
    fits: tuple[Fit, ...]
    chosen: bool = False


@dataclass(frozen=True, eq=False)
class MergePlan:
    """How a group becomes one TE.

    Attributes
    ----------
    members : tuple of Member
        In the order in which they stand in the merged TE.
    axis : int or None
        The axis along which they are joined; ``None`` for a new first axis.
    runs : tuple of tuples of Run
        For each operand.
    """

    members: tuple[Member, ...]
    axis: int | None
    runs: tuple[tuple[Run, ...], ...]

    @property
    def offsets(self) -> tuple[int, ...]:
        """Where each member begins along the axis of the plan, and where the last ends."""
        if self.axis is None:
            return tuple(range(len(self.members) + 1))
        return (0, *accumulate(m.shape[self.axis] for m in self.members))

    @property
    def selections(self) -> int:
        """Tensors among which an operand is selected, at most; 1 without selection."""
        return max((len(runs) for runs in self.runs), default=1)

    @property
    def chooses(self) -> bool:
        """Whether something depends on which member an element is of, other than by a formula."""
        return any(len(runs) > 1 or runs[0].chosen for runs in self.runs)

    @property
    def shared(self) -> bool:
        """Whether all members read one tensor at one place."""
        return any(
            len(runs) == 1 and not runs[0].chosen and len({m.operands[k].tensor for m in self.members}) == 1
            for k, runs in enumerate(self.runs)
        )

    def place(self, number: int, merged: Tensor) -> PackedPlace:
        """Where the output of a member stands."""
        if self.axis is None:
            return PackedPlace(merged, index=number)
        return PackedPlace(merged, axis=self.axis, offset=self.offsets[number])

    @property
    def granule(self) -> int:
        """Extent of the largest tiles, counted from 0 along the axis, that are of one member each."""
        return gcd(*self.offsets) if self.axis is not None else 1


_Constant = Callable[[Tensor], bool]


def stacked_plan(members: Sequence[Member], constant: _Constant) -> MergePlan:
    """The members along a new first axis, in the order that needs the fewest selections."""

    def planned(order: tuple[Member, ...]) -> MergePlan:
        columns = (tuple(m.operands[k] for m in order) for k in range(len(order[0].operands)))
        loads = order[0].template.loads
        rows = (_stacked(c, load.factors, constant) for c, load in zip(columns, loads, strict=True))
        return MergePlan(order, None, tuple(rows))

    return _best(members, planned)


def joined_plan(members: Sequence[Member], axis: int, constant: _Constant) -> MergePlan:
    """The members one after another along `axis`, in the order that needs the fewest selections."""

    def planned(order: tuple[Member, ...]) -> MergePlan:
        offsets = MergePlan(order, axis, ()).offsets
        rows = tuple(_joined(order, axis, k, offsets, constant) for k in range(len(order[0].operands)))
        return MergePlan(order, axis, rows)

    return _best(members, planned)


def _best(members: Sequence[Member], planned: Callable[[tuple[Member, ...]], MergePlan]) -> MergePlan:
    best: MergePlan | None = None
    for order in _orders(members):
        plan = planned(order)
        if best is None or _cost(plan) < _cost(best):
            best = plan
        if not plan.chooses:
            break
    return best


def _cost(plan: MergePlan) -> tuple[int, int]:
    return plan.selections, sum(len(runs) for runs in plan.runs)


def _orders(members: Sequence[Member]) -> Iterator[tuple[Member, ...]]:
    """Program order, then sorted by what each operand reads."""
    yield tuple(members)
    for k in range(len(members[0].operands)):
        first: dict[Tensor, int] = {}
        for member in members:
            first.setdefault(member.operands[k].tensor, len(first))
        if len(first) == len(members):
            continue  # each reads a tensor of its own: no order brings any together

        def key(member: Member, k: int = k, first: dict[Tensor, int] = first) -> tuple:
            return first[member.operands[k].tensor], member.operands[k].integers

        yield tuple(sorted(members, key=key))


def _stacked(column: Sequence[LoadOperand], factors: frozenset[int], constant: _Constant) -> tuple[Run, ...]:
    tensors = tuple(o.tensor for o in column)
    if len(set(tensors)) > 1 and all(map(constant, tensors)) and len({t.shape for t in tensors}) == 1:
        fits = _fits([o.values for o in column], factors)
        if fits is not None:
            return (Run(Pack(tensors), len(column), (Fit(0, outer=1),), fits),)
    runs: list[Run] = []
    start = 0
    for number in range(1, len(column) + 1):
        if number < len(column) and column[number].tensor is column[start].tensor:
            continue
        runs.extend(_formulas(column, range(start, number), factors))
        start = number
    return tuple(runs)


def _formulas(column: Sequence[LoadOperand], members: range, factors: frozenset[int]) -> Iterator[Run]:
    """Runs of members that read one tensor: one if a formula fits them all."""
    lead = len(column[members.start].lead)
    fixed = frozenset(lead + f for f in factors)
    rows = [o.integers for o in column[members.start : members.stop]]
    found = _fits(rows, fixed)
    stops = [len(rows)] if found is not None else _even_stops(rows, fixed)
    start = 0
    for stop in stops:
        moved = tuple(_from(members.start + start, f) for f in _fits(rows[start:stop], fixed))
        yield Run(column[members.start].tensor, members.start + stop, moved[:lead], moved[lead:])
        start = stop


def _even_stops(rows: Sequence[tuple[int, ...]], fixed: frozenset[int]) -> Iterator[int]:
    """Ends of the longest stretches in which every integer changes by the same step, those of `fixed` by none."""
    step: tuple[int, ...] | None = None
    for number in range(1, len(rows)):
        here = tuple(after - before for before, after in zip(rows[number - 1], rows[number], strict=True))
        if (step is None and not any(here[f] for f in fixed)) or here == step:
            step = here
        else:
            yield number
            step = None
    yield len(rows)


def _fits(rows: Sequence[tuple[int, ...]], fixed: frozenset[int]) -> tuple[Fit, ...] | None:
    """A formula for each integer over the members; those of `fixed` must not change."""
    found = []
    for number, values in enumerate(zip(*rows, strict=True)):
        formula = Fit(values[0]) if values.count(values[0]) == len(values) else fit(values)
        if formula is None or (number in fixed and (formula.outer or formula.inner)):
            return None
        found.append(formula)
    return tuple(found)


def _from(start: int, formula: Fit) -> Fit:
    """A formula over the members counted from `start`, as one over all members."""
    if not start or not (formula.outer or formula.inner):
        return formula
    # (g - start + phase) = (g + new) - period * turns, with new in [0, period).
    phase = (formula.phase - start) % formula.period
    turns = (formula.phase - start - phase) // formula.period
    return Fit(formula.base + formula.outer * turns, formula.outer, formula.inner, formula.period, phase)


def _joined(
    members: Sequence[Member], axis: int, k: int, offsets: Sequence[int], constant: _Constant
) -> tuple[Run, ...]:
    column = [m.operands[k] for m in members]
    factors, load = members[0].template.along[axis][1][k], members[0].template.loads[k]
    # Of the merged axis: what a member adds to reach its own index.
    rows = [_shifted(o.values, load.terms, factors, -at) for o, at in zip(column, offsets, strict=False)]
    tensors = tuple(o.tensor for o in column)
    if len(set(tensors)) > 1 and all(map(constant, tensors)):
        packed = _packed(tensors, members, rows, load.terms, factors)
        if packed is not None:
            return (packed,)
    runs: list[Run] = []
    for number, (operand, row) in enumerate(zip(column, rows, strict=True)):
        here = Run(operand.tensor, number + 1, tuple(Fit(v) for v in operand.lead), tuple(Fit(v) for v in row))
        if runs and (runs[-1].tensor, runs[-1].lead, runs[-1].fits) == (here.tensor, here.lead, here.fits):
            runs.pop()
        runs.append(here)
    return tuple(runs)


def _shifted(values: tuple[int, ...], terms: Sequence[int], factors: Sequence[int], by: int) -> tuple[int, ...]:
    moved = list(values)
    for term, factor in zip(terms, factors, strict=True):
        moved[term] += factor * by
    return tuple(moved)


def _packed(
    tensors: tuple[Tensor, ...],
    members: Sequence[Member],
    rows: Sequence[tuple[int, ...]],
    terms: Sequence[int],
    factors: Sequence[int],
) -> Run | None:
    """One run over constants: joined where the axis indexes them, else stacked; ``None`` if neither fits."""
    indexed = [d for d, factor in enumerate(factors) if factor]
    if not indexed:
        if len({t.shape for t in tensors}) > 1 or len(set(rows)) > 1:
            return None
        return Run(Pack(tensors), len(members), (), tuple(Fit(v) for v in rows[0]), chosen=True)
    if len(indexed) > 1:
        return None
    (d,) = indexed
    if len({(*t.shape[:d], *t.shape[d + 1 :]) for t in tensors}) > 1:
        return None
    ends = list(accumulate(t.shape[d] for t in tensors))
    whole = [
        (*row[: terms[d]], row[terms[d]] + end - t.shape[d], *row[terms[d] + 1 :])
        for row, end, t in zip(rows, ends, tensors, strict=True)
    ]
    if len(set(whole)) > 1:
        return None
    return Run(Pack(tensors, d), len(members), (), tuple(Fit(v) for v in whole[0]))
