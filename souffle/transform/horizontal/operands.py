"""What the members of a horizontal transformation read: TEs taken apart, and the indices of several members as one.

A TE's loads are taken out of it, and the integers out of their indices. TEs whose rest is equal differ in the tensors
that they read, and in those integers, only. Over the members of a group the integers are then a formula of the
member's number, wherever one fits: ``W[0], W[0], W[1], W[1]`` is ``W[g // 2]``.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from tvm import tirx

from souffle.index.operations import DIVISIONS
from souffle.program import TE, Tensor
from souffle.program.shared import OncePer
from souffle.transform.handles import read
from souffle.tvm_calls import structural_walk
from souffle.tvm_compat import (
    PrimExpr,
    constant_term,
    dtype_of,
    load_indices,
    load_tensor,
    map_bodies,
    map_constants,
    map_loads,
    structural_digest,
    variables,
)

__all__ = ["Fit", "Load", "LoadOperand", "Member", "PackedPlace", "TETemplate", "fit", "member_of", "template_of"]


class Fit(NamedTuple):
    """The formula ``base + outer * ((g + phase) // period) + inner * ((g + phase) % period)``."""

    base: int
    outer: int = 0
    inner: int = 0
    period: int = 1
    phase: int = 0

    def at(self, g: int) -> int:
        """The value of member `g`."""
        turn, left = divmod(g + self.phase, self.period)
        return self.base + self.outer * turn + self.inner * left

    def of(self, g: PrimExpr) -> PrimExpr:
        """The formula as an expression; a constant where it does not depend on `g`."""
        result = tirx.IntImm("int32", self.base)
        shifted = g + self.phase if self.phase else g
        if self.inner:
            result = tirx.floormod(shifted, self.period) * self.inner + result
        if self.outer:
            digit = tirx.floordiv(shifted, self.period) if self.period > 1 else shifted
            result = digit * self.outer + result
        return result


@lru_cache(maxsize=4096)
def fit(values: tuple[int, ...]) -> Fit | None:
    """A formula that gives ``values[g]`` at every ``g``, or ``None``.

    Affine sequences, sequences that step or start again after every `period` members, and any three integers.
    """
    first = values[0]
    steps = [after - before for before, after in itertools.pairwise(values)]
    if not steps or steps.count(steps[0]) == len(steps):
        return Fit(first, outer=steps[0] if steps else 0)
    # Between jumps the sequence goes on evenly; the step that gives the simplest formula is tried first.
    for even in dict.fromkeys(sorted({steps[0], steps[1], steps[-1]}, key=abs)):
        jumps = [k for k, step in enumerate(steps) if step != even]
        head, tail = jumps[0] + 1, len(values) - 1 - jumps[-1]
        period = jumps[1] - jumps[0] if len(jumps) > 1 else max(head, tail)
        if period < 2 or max(head, tail) > period:
            continue
        phase = period - head
        found = Fit(first - even * phase, steps[jumps[0]] + even * (period - 1), even, period, phase)
        if all(found.at(g) == value for g, value in enumerate(values)):
            return found
    return None


@dataclass(frozen=True)
class PackedPlace:
    """Where a tensor stands in a larger one.

    Attributes
    ----------
    tensor : Tensor
        The larger one.
    index : int or None
        Its index of a new first axis, if the tensor is one of a stack.
    axis, offset : int
        Otherwise the axis along which the tensor is a slice, and where the slice begins.
    """

    tensor: Tensor
    index: int | None = None
    axis: int = 0
    offset: int = 0


@dataclass(frozen=True)
class Load:
    """One load of a :class:`TETemplate`.

    Attributes
    ----------
    input : int
        Which input of the TE it reads.
    slots : tuple of Var
        Variables in the place of the integers in its indices.
    values : tuple of int
        Those integers.
    terms : tuple of int
        For each index, which slot is its constant term.
    factors : frozenset of int
        Slots that multiply or divide: a formula in their place would leave an index that is not quasi-affine.
    """

    input: int
    slots: tuple[tirx.Var, ...]
    values: tuple[int, ...]
    terms: tuple[int, ...]
    factors: frozenset[int]


@dataclass(frozen=True, eq=False)
class TETemplate:
    """A TE whose loads are taken apart, in the order of the text.

    Attributes
    ----------
    axes : tuple of IterVar
    bodies : tuple of expressions
        Over the loads' slots.
    loads : tuple of Load
    key : str
        Equal for TEs that differ in the tensors and the integers only.
    along : mapping of int to (str, tuple of tuples of int)
        For each axis that occurs as a term of indices only: a key that is equal for TEs that differ in its extent too;
        and for each load and index, what the axis is multiplied by, 0 where it does not occur.
    """

    axes: tuple[tirx.IterVar, ...]
    bodies: tuple[PrimExpr, ...]
    loads: tuple[Load, ...]
    key: str
    along: Mapping[int, tuple[str, tuple[tuple[int, ...], ...]]]


class LoadOperand(NamedTuple):
    """What one load of a member reads: a tensor, at an index of its first axis (if it is one of a stack), and at the
    integers in the place of the load's slots."""

    tensor: Tensor
    lead: tuple[int, ...]
    values: tuple[int, ...]

    @property
    def integers(self) -> tuple[int, ...]:
        """All that a formula must give."""
        return self.lead + self.values


@dataclass(frozen=True, eq=False)
class Member:
    """A TE, and what its loads read after earlier TEs have been merged."""

    te: TE
    template: TETemplate
    operands: tuple[LoadOperand, ...]
    moved: bool

    @property
    def shape(self) -> tuple[int, ...]:
        """Of its first output."""
        return self.te.outputs[0].shape


_templates: OncePer[TETemplate] = OncePer()


def template_of(te_: TE) -> TETemplate:
    """The template of a TE; worked out once for TEs of one expression."""
    return _templates(te_.op, lambda: _taken_apart(te_))


def member_of(te_: TE, places: Mapping[Tensor, PackedPlace]) -> Member:
    """`te_`, reading the tensors of `places` where they now stand."""
    template = template_of(te_)
    operands = []
    for load in template.loads:
        tensor = te_.inputs[load.input]
        place = places.get(tensor)
        if place is None:
            operands.append(LoadOperand(tensor, (), load.values))
        elif place.index is not None:
            operands.append(LoadOperand(place.tensor, (place.index,), load.values))
        else:
            term = load.terms[place.axis]
            values = (*load.values[:term], load.values[term] + place.offset, *load.values[term + 1 :])
            operands.append(LoadOperand(place.tensor, (), values))
    return Member(te_, template, tuple(operands), any(t in places for t in te_.inputs))


def _taken_apart(te_: TE) -> TETemplate:
    found: list[Load] = []

    def rewrite(load: PrimExpr) -> PrimExpr:
        slots: list[tirx.Var] = []
        values: list[int] = []
        terms: list[int] = []

        def take(value: int, dtype: str) -> tirx.Var:
            slots.append(tirx.Var(f"c{len(found)}_{len(slots)}", dtype))
            values.append(value)
            return slots[-1]

        # Every index has a constant term, so that a slice from 0 is like those that follow it.
        indices = []
        for index in load_indices(load):
            rest, offset = constant_term(index)
            rest = map_constants(rest, take)
            terms.append(len(slots))
            indices.append(rest + take(offset, dtype_of(rest)))
        number = next(i for i, p in enumerate(te_.placeholders) if p.same_as(load_tensor(load)))
        found.append(Load(number, tuple(slots), tuple(values), tuple(terms), _factors(indices, slots)))
        return read(load_tensor(load), indices)

    bodies = tuple(map_bodies(te_.op.body, rewrite))
    symbols = [axis.var for axis in te_.axes] + [slot for load in found for slot in load.slots]
    digest = structural_digest([*symbols, *(map_loads(body, _anonymous) for body in bodies)])
    shapes = [(te_.outputs[0].shape, te_.outputs[0].dtype)]
    shapes += [(te_.inputs[load.input].shape, te_.inputs[load.input].dtype) for load in found]
    along = {}
    for position, axis in enumerate(te_.axes):
        factors = _linear_in(axis.var, bodies, found) if len(bodies) == 1 else None
        if factors is not None:
            used = (tuple(int(i == position) for i in range(len(te_.axes))), *factors)
            masked = tuple(
                (tuple(None if factor else extent for extent, factor in zip(shape, row, strict=True)), dtype)
                for (shape, dtype), row in zip(shapes, used, strict=True)
            )
            along[position] = (f"{position}:{digest}:{te_.reduction_shape}:{masked}:{factors}", factors)
    return TETemplate(te_.axes, bodies, tuple(found), f"{digest}:{te_.reduction_shape}:{shapes}", along)


def _anonymous(load: PrimExpr) -> PrimExpr:
    """A load without its tensor, which TVM cannot hash."""
    return tirx.call_pure_extern(str(load_tensor(load).dtype), "operand", *load_indices(load))


def _factors(indices: Sequence[PrimExpr], slots: Sequence[tirx.Var]) -> frozenset[int]:
    """The slots that multiply or divide."""
    sides: list[PrimExpr] = []

    def see(node: PrimExpr) -> None:
        sides.append(node.b)
        if isinstance(node, tirx.Mul):
            sides.append(node.a)

    for index in indices:
        structural_walk(index, ((tirx.Mul, *DIVISIONS), see))
    return frozenset(i for i, slot in enumerate(slots) if any(slot.same_as(side) for side in sides))


def _linear_in(var: tirx.Var, bodies: Sequence[PrimExpr], found: Sequence[Load]) -> tuple[tuple[int, ...], ...] | None:
    """For each load and index the factor of `var`; ``None`` where it occurs otherwise."""
    rows: list[tuple[int | None, ...]] = []

    def blank(load: PrimExpr) -> PrimExpr:
        known = found[len(rows)]
        values = dict(zip(known.slots, known.values, strict=True))
        rows.append(tuple(_factor_of(var, index, values) for index in load_indices(load)))
        # An index that is itself read keeps its value, wherever the inner load's own indices lead.
        return tirx.call_pure_extern(str(load_tensor(load).dtype), "operand")

    rest = [map_loads(body, blank) for body in bodies]
    if any(None in row for row in rows) or any(var.same_as(v) for body in rest for v in variables(body)):
        return None
    return tuple(rows)


def _factor_of(var: tirx.Var, index: PrimExpr, values: Mapping[tirx.Var, int]) -> int | None:
    """What `var` is multiplied by in an index, 0 where it does not occur; ``None`` where it is not linear."""
    if index.same_as(var):
        return 1
    if isinstance(index, tirx.Add | tirx.Sub):
        left, right = _factor_of(var, index.a, values), _factor_of(var, index.b, values)
        if left is None or right is None:
            return None
        return left + right if isinstance(index, tirx.Add) else left - right
    if isinstance(index, tirx.Mul):
        for side, other in ((index.a, index.b), (index.b, index.a)):
            scale = next((value for slot, value in values.items() if other.same_as(slot)), None)
            inner = _factor_of(var, side, values)
            if scale is not None and inner is not None:
                return inner * scale
    return None if any(var.same_as(v) for v in variables(index)) else 0
