"""Exact ranges and sets of an index under conditions, by exhaustion over only the axes that act together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from souffle.verify.digits import in_digits
from souffle.verify.expressions import (
    Axis,
    Expr,
    Undecided,
    add,
    conjuncts,
    const,
    evaluate,
    holding,
    linear_terms,
    operation,
    span,
)

__all__ = ["Range", "in_units", "index_range", "kinds", "points"]

_CHUNK = 1 << 21
"""Points that are evaluated at once: some tens of megabytes of integers."""

_MOST = 1 << 28
"""Points of one question; beyond it bounds of each axis on its own have to do."""

_LONG = 1 << 24
"""Points from which it is worth a look whether an axis can be taken apart: some tenths of a second."""


@dataclass(frozen=True)
class Range:
    """The lowest and highest value of an index, inclusive, and whether both are taken (else they are bounds)."""

    low: int
    high: int
    exact: bool


def index_range(index: Expr, conditions: Sequence[Expr]) -> Range | None:
    """The range of an index over all points where the conditions hold; ``None`` where there is no such point.

    Terms that share no axis, not even through a condition, are ranged apart: the range of the sum is then the sum of
    the ranges, exactly. Conditions on data are taken to hold, and data to choose any of the values that it has; so the
    range may be too wide, and says so.
    """
    parts = conjuncts(conditions)
    if any(c.op == "const" for c in parts):
        return None
    known = [c for c in parts if not c.opaque]
    terms, total = linear_terms(index)
    doubtful = {term: factor for term, factor in terms.items() if term.opaque}
    exact = len(known) == len(parts) and not index.by_data and not doubtful
    low, high = (total + end for end in span(doubtful))
    clear = {term: factor for term, factor in terms.items() if not term.opaque}
    for axes, group_terms, group_conditions in _groups(clear, known):
        found = _group_range(axes, {t: clear[t] for t in group_terms}, group_conditions)
        if found is None:
            return None
        low, high, exact = low + found.low, high + found.high, exact and found.exact
    return Range(low, high, exact)


def _groups(terms: dict[Expr, int], conditions: Sequence[Expr]) -> list[tuple[set[Axis], list[Expr], list[Expr]]]:
    groups: list[tuple[set[Axis], list[Expr], list[Expr]]] = []
    for node, is_term in [*((t, True) for t in terms), *((c, False) for c in conditions)]:
        axes, own_terms, own_conditions = set(node.axes), [node] if is_term else [], [] if is_term else [node]
        apart = []
        for group in groups:
            if group[0] & axes:
                axes |= group[0]
                own_terms, own_conditions = group[1] + own_terms, group[2] + own_conditions
            else:
                apart.append(group)
        groups = [*apart, (axes, own_terms, own_conditions)]
    return groups


def _group_range(axes: set[Axis], terms: dict[Expr, int], conditions: Sequence[Expr]) -> Range | None:
    only = next(iter(terms)) if len(terms) == 1 else None
    if only is not None and only.op == "axis" and not conditions:
        ends = (0, terms[only] * (only.value.extent - 1))
        return Range(min(ends), max(ends), True)
    order = sorted(axes, key=lambda a: -a.extent)
    values = {a: _representatives(a, [*terms, *conditions]) for a in order}
    count = prod(len(v) for v in values.values())
    digits = in_digits([*terms, *conditions]) if count > _LONG else None
    if digits is not None:
        # An axis that is divided somewhere is two, which may act apart.
        parts = (operation("mul", part, const(factor)) for part, factor in zip(digits, terms.values(), strict=False))
        return index_range(add(*parts), digits[len(terms) :])
    if count > _MOST:
        return Range(*span(terms), False)
    low = high = None
    for env in _boxes(order, values):
        memo: dict[Expr, np.ndarray] = {}
        mask = holding(conditions, env, memo)
        if not mask.any():
            continue
        value = sum((evaluate(t, env, memo) * f for t, f in terms.items()), np.int64(0))
        if mask.all():
            least, most = int(value.min()), int(value.max())
        else:
            value, mask = np.broadcast_arrays(value, mask)
            least, most = int(value[mask].min()), int(value[mask].max())
        low, high = least if low is None else min(low, least), most if high is None else max(high, most)
    return None if low is None else Range(low, high, True)


def _representatives(axis: Axis, nodes: Sequence[Expr]) -> np.ndarray:
    """Values of an axis, one for each way in which `nodes` depend on it."""
    numbers = kinds(axis, nodes)
    if not numbers.any():
        return numbers[:1]
    if numbers[-1] == axis.extent - 1 and np.array_equal(numbers, np.arange(axis.extent)):
        return numbers
    return np.sort(np.unique(numbers, return_index=True)[1])


def kinds(axis: Axis, nodes: Sequence[Expr]) -> np.ndarray:
    """For each value of an axis a number: equal ones for values between which none of `nodes` differs.

    The largest parts that depend on this axis alone are evaluated; two values at which all of them are equal are one.
    """
    values = np.arange(axis.extent, dtype=np.int64)
    atoms: dict[Expr, None] = {}
    stack = [n for n in nodes if axis in n.axes]
    seen = set(stack)
    while stack:
        node = stack.pop()
        if len(node.axes) == 1:
            atoms[node] = None
            continue
        for argument in node.args:
            if axis in argument.axes and argument not in seen:
                seen.add(argument)
                stack.append(argument)
    if not atoms or any(a.op == "axis" for a in atoms):
        return values if atoms else np.zeros_like(values)
    memo: dict[Expr, np.ndarray] = {}
    columns = np.stack([np.broadcast_to(evaluate(a, {axis: values}, memo), values.shape) for a in atoms])
    return np.unique(columns, axis=1, return_inverse=True)[1].reshape(-1)


def _boxes(order: Sequence[Axis], values: dict[Axis, np.ndarray]) -> Iterator[dict[Axis, np.ndarray]]:
    """The box of `values`, cut along its first axis into parts of at most :data:`_CHUNK` points."""
    rank = len(order)
    env = {a: values[a].reshape([-1 if i == k else 1 for k in range(rank)]) for i, a in enumerate(order)}
    if not order:
        yield env
        return
    rest = prod(len(values[a]) for a in order[1:])
    step = max(1, _CHUNK // max(1, rest))
    first = env[order[0]]
    for start in range(0, len(values[order[0]]), step):
        yield {**env, order[0]: first[start : start + step]}


def points(
    index: Expr,
    conditions: Sequence[Expr],
    tile: Axis,
    thread: Axis,
    *,
    tiles: np.ndarray | None = None,
    along: Sequence[Axis] = (),
) -> Iterator[tuple[np.ndarray, ...]]:
    """All (index, tile, thread) of an access, in parts. Conditions on data are taken to hold.

    With `along`, the values of those axes come behind.

    Raises
    ------
    Undecided
        If the index depends on data, or there are more points than are enumerated.
    """
    parts = conjuncts(conditions)
    if any(c.op == "const" for c in parts):
        return
    known = [c for c in parts if not c.opaque]
    if index.opaque:
        raise Undecided("an index that depends on data")
    axes = set(index.axes).union(*(c.axes for c in known)) - {tile, thread, *along}
    others = sorted(axes, key=lambda a: -a.extent)
    order = [tile, thread, *along, *others]
    values = {a: _representatives(a, [index, *known]) for a in others}
    values.update((a, np.arange(a.extent, dtype=np.int64)) for a in along)
    values[tile] = np.arange(tile.extent, dtype=np.int64) if tiles is None else tiles
    values[thread] = np.arange(thread.extent, dtype=np.int64)
    count = prod(len(v) for v in values.values())
    # Who asks for turns keeps all points at once, to sort them.
    if count > (_MOST // 2 if along else _MOST):
        raise Undecided(f"{count} points of one access, more than are enumerated")
    for env in _boxes(order, values):
        memo: dict[Expr, np.ndarray] = {}
        shape = np.broadcast_shapes(*(v.shape for v in env.values()))
        mask = holding(known, env, memo)
        value = np.broadcast_to(evaluate(index, env, memo), shape)
        where = (np.broadcast_to(env[a], shape) for a in (tile, thread, *along))
        if mask.all():
            yield (value.reshape(-1), *(w.reshape(-1) for w in where))
        elif mask.any():
            mask = np.broadcast_to(mask, shape)
            yield (value[mask], *(w[mask] for w in where))


def in_units(starts: np.ndarray, width: int, unit: int, *others: np.ndarray) -> tuple[np.ndarray, ...]:
    """Which elements of `unit` bytes accesses of `width` bytes touch, each with what belongs to its access."""
    first, rest = starts // unit, starts % unit
    count = -(-(int(rest.max(initial=0)) + width) // unit)
    if count == 1:
        return (first, *others)
    elements = first[:, None] + np.arange(count)
    whose = [np.broadcast_to(one[:, None], elements.shape) for one in others]
    if rest.any():
        touched = elements * unit < (starts + width)[:, None]
        return (elements[touched], *(one[touched] for one in whose))
    return (elements.reshape(-1), *(one.reshape(-1) for one in whose))
