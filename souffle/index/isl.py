"""The only module that imports islpy: building blocks, printing and bounded queries, all in one context.

isl objects compare mathematically but hash by representation, so they are never dictionary keys here or elsewhere.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import TypeVar

import islpy

__all__ = [
    "BUDGET",
    "Map",
    "PwAff",
    "Set",
    "affine_row",
    "are_equal",
    "axis",
    "bounds",
    "box",
    "choose",
    "constant",
    "count_points",
    "divide_floor",
    "extremes",
    "first_and_last",
    "first_dimensions",
    "identity",
    "is_bijection",
    "is_single_valued",
    "is_within_identity",
    "map_to",
    "modulo",
    "named_map",
    "named_set",
    "nothing",
    "only_inputs",
    "pairs",
    "points",
    "projected",
    "rational_floor",
    "unknowns",
    "within_budget",
]

Map = islpy.Map
PwAff = islpy.PwAff
Set = islpy.Set

BUDGET = 4_000_000
"""Operations of isl that one query may use; some tenths of a second."""

_CONTEXT = islpy.DEFAULT_CONTEXT
_IN, _OUT, _SET = islpy.dim_type.in_, islpy.dim_type.out, islpy.dim_type.set
_Result = TypeVar("_Result")


class _ExhaustedError(Exception):
    """isl gave no number because its budget ran out while writing it."""


def _exhausted() -> bool:
    """Whether isl refuses to do anything more under the present limit."""
    try:
        islpy.Val(1, _CONTEXT).neg()
    except islpy.Error:
        return True
    return False


def _number(value: islpy.Val) -> int:
    text = value.to_str()
    if text is None:
        raise _ExhaustedError
    return int(text)


def within_budget(query: Callable[[], _Result], budget: int | None = None) -> _Result | None:
    """Run `query` with a bound on isl's operations, :data:`BUDGET` by default.

    Returns
    -------
    The answer, or ``None`` where the budget ran out: the caller must then assume the worst (a dependence, many
    elements). Inside another bounded query the outer budget holds.
    """
    if _CONTEXT.get_max_operations():
        return query()
    _CONTEXT.reset_operations()
    _CONTEXT.set_max_operations(BUDGET if budget is None else budget)
    try:
        return query()
    except _ExhaustedError:
        return None
    except islpy.Error:
        # The message names whatever call happened to meet the limit, so isl itself is asked.
        if not _exhausted():
            raise
        return None
    finally:
        _CONTEXT.set_max_operations(0)
        _CONTEXT.reset_operations()


def box(bounds: Sequence[tuple[int, int]]) -> Set:
    """The integer points of a box; each bound is (first value, extent)."""
    space = islpy.Space.set_alloc(_CONTEXT, 0, len(bounds))
    result = islpy.BasicSet.universe(space)
    local = islpy.LocalSpace.from_space(space)
    for position, (first, extent) in enumerate(bounds):
        lower = islpy.Constraint.inequality_alloc(local).set_coefficient_val(_SET, position, 1).set_constant_val(-first)
        upper = islpy.Constraint.inequality_alloc(local).set_coefficient_val(_SET, position, -1)
        result = result.add_constraint(lower).add_constraint(upper.set_constant_val(first + extent - 1))
    return Set.from_basic_set(result)


def axis(dimensions: int, position: int) -> PwAff:
    """The value of one dimension of a space of so many."""
    space = islpy.LocalSpace.from_space(islpy.Space.set_alloc(_CONTEXT, 0, dimensions))
    return PwAff.from_aff(islpy.Aff.var_on_domain(space, _SET, position))


def constant(dimensions: int, value: int) -> PwAff:
    """A constant over a space of so many dimensions."""
    space = islpy.LocalSpace.from_space(islpy.Space.set_alloc(_CONTEXT, 0, dimensions))
    return PwAff.from_aff(islpy.Aff.val_on_domain(space, islpy.Val(value, _CONTEXT)))


def divide_floor(value: PwAff, divisor: int) -> PwAff:
    """Division rounded towards minus infinity; `divisor` is not 0."""
    if divisor < 0:
        value, divisor = value.neg(), -divisor
    return value.scale_down_val(islpy.Val(divisor, _CONTEXT)).floor()


def modulo(value: PwAff, divisor: int) -> PwAff:
    """The remainder of :func:`divide_floor`; it has the sign of `divisor`."""
    if divisor < 0:
        return value.neg().mod_val(islpy.Val(-divisor, _CONTEXT)).neg()
    return value.mod_val(islpy.Val(divisor, _CONTEXT))


def rational_floor(value: PwAff, slope: int, offset: int, divisor: int) -> PwAff:
    """``floor((slope * value + offset) / divisor)``."""
    dimensions = value.dim(_IN)
    return divide_floor(value.scale_val(islpy.Val(slope, _CONTEXT)).add(constant(dimensions, offset)), divisor)


def choose(condition: Set, otherwise: Set, then: PwAff, other: PwAff) -> PwAff:
    """`then` on `condition` and `other` on its complement `otherwise`."""
    return then.intersect_domain(condition).union_add(other.intersect_domain(otherwise))


def extremes(value: PwAff, domain: Set) -> tuple[int, int] | None:
    """The least and the greatest value at the points of a bounded set; ``None`` if it has none, or isl finds none."""

    def found() -> tuple[int, int] | None:
        own = value.intersect_domain(domain)
        return None if domain.is_empty() else (_number(own.min_val()), _number(own.max_val()))

    return within_budget(found)


def nothing(dimensions: int) -> Set:
    """The empty set of points of so many dimensions."""
    return Set.empty(islpy.Space.set_alloc(_CONTEXT, 0, dimensions))


def map_to(domain: Set, indices: Sequence[PwAff | None], shape: Sequence[int]) -> Map:
    """Points of `domain` to the elements `indices` of a tensor of `shape`; ``None`` stands for all of a dimension."""
    result = Map.from_domain(domain)
    for index, extent in zip(indices, shape, strict=True):
        unknown = index is None
        column = Map.from_domain_and_range(domain, box([(0, extent)])) if unknown else Map.from_pw_aff(index)
        result = result.flat_range_product(column)
    return result.coalesce() if result.n_basic_map() > 1 else result


def only_inputs(relation: Map, keep: int) -> Map:
    """`relation` with its input dimensions from `keep` on made existential."""
    return relation.project_out(_IN, keep, relation.dim(_IN) - keep)


def is_single_valued(relation: Map) -> bool:
    """Whether no point relates to two; ``False`` too where the budget runs out."""
    return bool(within_budget(relation.is_single_valued))


def is_bijection(relation: Map, bounds: Sequence[tuple[int, int]]) -> bool:
    """Whether every point of a box relates to one element, each to another; ``False`` where the budget runs out."""

    def query() -> bool:
        whole = box(bounds).is_subset(relation.domain())
        return bool(whole and relation.is_single_valued() and relation.is_injective())

    return bool(within_budget(query))


def identity(dimensions: int) -> Map:
    """Each point of a space of so many dimensions to itself."""
    return Map.identity(islpy.Space.alloc(_CONTEXT, 0, dimensions, dimensions))


def is_within_identity(relation: Map) -> bool:
    """Whether every point relates to itself at most; ``False`` too where the budget runs out."""
    same = identity(relation.dim(_IN))
    return bool(within_budget(lambda: relation.is_subset(same)))


def are_equal(one: Map, other: Map) -> bool:
    """Whether two maps hold the same pairs; ``False`` where the budget runs out."""
    return bool(within_budget(lambda: one.is_equal(other)))


def first_dimensions(points_: Set, keep: int) -> Set:
    """`points_` with its dimensions from `keep` on made existential."""
    return points_.project_out(_SET, keep, points_.dim(_SET) - keep)


def projected(points_: Set, kept: Sequence[int]) -> Set:
    """Some dimensions of a set."""
    for dimension in reversed(range(points_.dim(_SET))):
        if dimension not in kept:
            points_ = points_.project_out(_SET, dimension, 1)
    return points_


def bounds(points_: Set) -> list[tuple[int, int]]:
    """First and last value of each dimension of a bounded set; none for an empty one."""
    if points_.is_empty():
        return []
    return [(_number(points_.dim_min_val(d)), _number(points_.dim_max_val(d))) for d in range(points_.dim(_SET))]


def unknowns(points_: Set) -> int:
    """The most existential variables of a piece of a set; counting its points takes time exponential in them."""
    return max((piece.dim(islpy.dim_type.div) for piece in points_.get_basic_sets()), default=0)


def count_points(points_: Set) -> int:
    """Number of integer points of a bounded set: exact, or that of its bounding box where the budget runs out."""
    exact = within_budget(lambda: _count(points_))
    if exact is not None:
        return exact
    total = 1
    for position in range(points_.dim(_SET)):
        low, high = points_.dim_min_val(position), points_.dim_max_val(position)
        total *= _number(high) - _number(low) + 1
    return total


def _count(points_: Set) -> int:
    disjoint = points_.coalesce().make_disjoint()
    return sum(map(_count_piece, disjoint.get_basic_sets()))


def _count_piece(basic: islpy.BasicSet) -> int:
    """The product over dimensions that no constraint ties together, each tied group counted alone."""
    piece, dimensions = Set.from_basic_set(basic), range(basic.dim(_SET))
    if len(dimensions) < 2:
        return _number(piece.count_val())
    for groups in ([(d,) for d in dimensions], _tied(basic)):
        # What a group says of itself, with the others free: all of it, if these together say what the piece does.
        free = [functools.reduce(_freed, (d for d in dimensions if d not in group), piece) for group in groups]
        if len(groups) > 1 and functools.reduce(Set.intersect, free).is_equal(piece):
            return math.prod(_number(projected(piece, group).count_val()) for group in groups)
    return _number(piece.count_val())


def _freed(points_: Set, dimension: int) -> Set:
    return points_.eliminate(_SET, dimension, 1)


def _tied(basic: islpy.BasicSet) -> list[tuple[int, ...]]:
    """Dimensions in groups: those that a constraint has in common, be it by way of unknowns."""
    kinds = (_SET, islpy.dim_type.div)
    groups = [{(kind, number)} for kind in kinds for number in range(basic.dim(kind))]
    for constraint in basic.get_constraints():
        tied = [group for group in groups if any(constraint.involves_dims(*one, 1) for one in group)]
        groups = [group for group in groups if group not in tied] + ([set().union(*tied)] if tied else [])
    found = (tuple(sorted(number for kind, number in group if kind == _SET)) for group in groups)
    return sorted(group for group in found if group)


def affine_row(value: PwAff) -> tuple[tuple[int, ...], int] | None:
    """Coefficients and constant of a plain integer affine function; ``None`` for one with pieces or divisions."""
    pieces = value.coalesce().get_pieces()
    if len(pieces) != 1:
        return None
    affine = pieces[0][1]
    if affine.involves_locals() or _number(affine.get_denominator_val()) != 1:
        return None
    row = tuple(_number(affine.get_coefficient_val(_IN, i)) for i in range(affine.dim(_IN)))
    return row, _number(affine.get_constant_val())


def named_map(relation: Map, source: str, target: str) -> Map:
    """`relation` with names for its two tuples."""
    return relation.set_tuple_name(_IN, source).set_tuple_name(_OUT, target)


def named_set(points_: Set, name: str) -> Set:
    """`points_` with a name for its tuple."""
    return points_.set_tuple_name(name)


def points(points_: Set) -> list[tuple[int, ...]]:
    """All integer points of a small bounded set, sorted."""
    found: list[islpy.Point] = []
    # Read when all are there: what a budget refuses in a callback, islpy writes to the user.
    points_.foreach_point(found.append)
    dimensions = range(points_.dim(_SET))
    return sorted(tuple(_number(point.get_coordinate_val(_SET, d)) for d in dimensions) for point in found)


def pairs(relation: Map) -> set[tuple[tuple[int, ...], tuple[int, ...]]]:
    """All pairs of a small bounded map."""
    split = relation.dim(_IN)
    return {(point[:split], point[split:]) for point in points(relation.wrap().flatten())}


def first_and_last(relation: Map) -> dict[int, tuple[int, int]]:
    """Of a small bounded map between numbers, the least and the greatest image of each that has one."""
    least, most = ({i[0]: o[0] for i, o in pairs(one)} for one in (relation.lexmin(), relation.lexmax()))
    return {number: (least[number], most[number]) for number in sorted(least)}
