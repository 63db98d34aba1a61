"""Selections made simple: what composition through concatenations, paddings and packs leaves behind.

::

    where(i < 4, T[0, i], where(i < 8, T[1, i - 4], T[2, i - 8]))   →   T[i // 4, i % 4]          0 ≤ i < 12
    where(i - 1 - 1 >= 0, A, where(i - 1 >= 0, B, C))                →   where(i < 1, C, where(i < 2, B, A))
    where(i < 4, T[i + 8], T[i - 4])                                 →   T[(i + 8) % 12]              0 ≤ i < 12

A chain of choices by one sum of axes is a list of intervals, each with a value. A value is simplified under the bounds
of its interval, empty intervals are dropped, and neighbours of equal value become one. Intervals of equal length whose
values differ in the indices of their loads alone become one value if each index is that of the first interval plus the
interval's number times a constant: the number is ``(sum - low) // length``. Two intervals of which the first goes on
where the second ends are a rotation: the second value, its axis counted from its own start around all of the range.
Each step is an identity of integer expressions over the interval, so nothing has to be tried out.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

from tvm import tirx

from souffle.index.linear import Interval, Linear, interval_of
from souffle.transform.handles import read
from souffle.tvm_compat import (
    PrimExpr,
    bounded_analyzer,
    choice_like,
    choice_parts,
    const_int,
    dtype_of,
    is_choice,
    is_load,
    load_indices,
    load_tensor,
    loads,
    map_loads,
    map_outermost,
    reduce_node,
    same_expression,
    substitute,
)

__all__ = ["merge_selections"]

_UNBOUNDED = 2**31
"""What TVM's analyzer answers for an expression without bounds is at least this far from 0."""


def merge_selections(bodies: Sequence[PrimExpr], axes: Sequence[tirx.IterVar]) -> list[PrimExpr]:
    """The bodies of one TE with simpler index arithmetic and conditions, and chains of choices merged.

    Parameters
    ----------
    bodies : sequence of expressions
        One per output; for a reduction of tuples ``Reduce`` nodes that share their sources.
    axes : sequence of IterVar
        Data-parallel and reduction axes, whose bounds are known to hold.

    Returns
    -------
    list of expressions
        Of the same values at every point of `axes`. They read no element that `bodies` did not read there.
    """
    selections = _Selections(axes)
    first = reduce_node(bodies[0])
    if first is None:
        return [selections.simplified(body) for body in bodies]
    sources = [selections.simplified(source) for source in first.source]
    init = [selections.simplified(value) for value in first.init]
    condition = selections.simplified(first.condition)
    whole = tirx.Reduce(first.combiner, sources, first.axis, condition, 0, init)
    # The outputs of one reduction of tuples must share its sources.
    rest = [tirx.Reduce(whole.combiner, whole.source, whole.axis, whole.condition, k, whole.init)
            for k in range(1, len(bodies))]  # fmt: skip
    return [whole, *rest]


@dataclass(frozen=True)
class _Piece:
    """The value of a chain where ``low <= sum < high``."""

    low: int
    high: int
    value: PrimExpr

    @property
    def length(self) -> int:
        return self.high - self.low


class _Selections:
    def __init__(self, axes: Sequence[tirx.IterVar]) -> None:
        self.analyzer = bounded_analyzer(axes)

    def simplified(self, expression: PrimExpr) -> PrimExpr:
        """An expression under what is known of the axes here."""
        return map_outermost(expression, self._replaced)

    def _replaced(self, node: PrimExpr) -> PrimExpr:
        if is_load(node):
            return read(load_tensor(node), [self._index(index) for index in load_indices(node)])
        condition, then, other = choice_parts(node)
        # TVM simplifies no expression that depends on data.
        if loads(condition):
            then, other = self.simplified(then), self.simplified(other)
            return then if same_expression(then, other) else choice_like(node, self.simplified(condition), then, other)
        condition = self.analyzer.simplify(condition)
        if isinstance(condition, tirx.IntImm):
            return self.simplified(then if const_int(condition) else other)
        interval = interval_of(condition)
        bounds = None if interval is None else self._bounds(interval.form)
        if bounds is None:
            return self._by_condition(node, condition, then, other)
        pieces, guarded = self._pieces(node, interval.form, *bounds)
        return self._chain(self._merged(pieces, interval.form), interval.form, guarded)

    def _index(self, index: PrimExpr) -> PrimExpr:
        if isinstance(index, (tirx.Var, tirx.IntImm)):
            return index
        if not loads(index):
            return self.analyzer.simplify(index)
        # TVM simplifies no index that depends on data; what is around the data is simplified for any value of it.
        hidden: dict[tirx.Var, PrimExpr] = {}

        def hide(node: PrimExpr) -> PrimExpr:
            value = tirx.Var(f"data{len(hidden)}", dtype_of(node))
            hidden[value] = self._replaced(node)
            return value

        return substitute(self.analyzer.simplify(map_outermost(index, hide)), hidden)

    def _by_condition(self, node: PrimExpr, condition: PrimExpr, then: PrimExpr, other: PrimExpr) -> PrimExpr:
        with self.analyzer.constraint_scope(condition):
            then = self.simplified(then)
        with self.analyzer.constraint_scope(tirx.Not(condition)):
            other = self.simplified(other)
        return then if same_expression(then, other) else choice_like(node, condition, then, other)

    def _bounds(self, form: Linear) -> tuple[int, int] | None:
        bound = self.analyzer.const_int_bound(form.expression())
        low, high = int(bound.min_value), int(bound.max_value) + 1
        return None if low <= -_UNBOUNDED or high >= _UNBOUNDED else (low, high)

    def _pieces(self, root: PrimExpr, form: Linear, low: int, high: int) -> tuple[list[_Piece], PrimExpr]:
        """The intervals of a chain, their values simplified, and a choice of the kind to write; neighbours of equal
        value are one. One choice that guards its values by evaluating one alone makes all of the chain do so."""
        stack, guarded = [(root, low, high)], root
        pieces: list[_Piece] = []
        while stack:
            node, low, high = stack.pop()
            if low >= high:
                continue
            interval = self._interval(node, form)
            if interval is None:
                value = self._within(form.expression(), low, high, node)
                if pieces and same_expression(pieces[-1].value, value):
                    low = pieces.pop().low
                pieces.append(_Piece(low, high, value))
                continue
            guarded = guarded if isinstance(node, tirx.Select) else node
            _, then, other = choice_parts(node)
            inner, outer = (then, other) if interval.inside else (other, then)
            start = min(max(low, interval.low), high)
            end = max(start, min(high, interval.high))
            if start == end:
                stack.append((outer, low, high))
                continue
            # The first interval is taken from the stack first.
            stack += [(outer, int(end), high), (inner, int(start), int(end)), (outer, low, int(start))]
        return pieces, guarded

    def _interval(self, node: PrimExpr, form: Linear) -> Interval | None:
        if not is_choice(node):
            return None
        condition = choice_parts(node)[0]
        if loads(condition):
            return None
        condition = self.analyzer.simplify(condition)
        if isinstance(condition, tirx.IntImm):
            return Interval(form, -math.inf, math.inf, bool(const_int(condition)))
        interval = interval_of(condition)
        return interval if interval is not None and interval.form.key == form.key else None

    def _within(self, total: PrimExpr, low: int, high: int, value: PrimExpr) -> PrimExpr:
        """A value simplified under the bounds of its interval."""
        if high - low == 1 and isinstance(total, tirx.Var):
            return self.simplified(substitute(value, {total: tirx.const(low, dtype_of(total))}))
        with self._between(total, low, high):
            return self.simplified(value)

    def _between(self, total: PrimExpr, low: int, high: int) -> contextlib.AbstractContextManager:
        return self.analyzer.constraint_scope(tirx.And(total >= low, total < high))

    def _merged(self, pieces: list[_Piece], form: Linear) -> list[_Piece]:
        """A rotation, or runs of equal length, in the place of their intervals; then single points taken in by their
        neighbours."""
        total = form.expression()
        rotated = self._rotated(pieces, total)
        if rotated is not None:
            return [rotated]
        templates = [_Template(piece.value) for piece in pieces]
        merged: list[_Piece] = []
        start = 0
        while start < len(pieces):
            steps, count = self._run(pieces[start:], templates[start:])
            piece = pieces[start]
            if count > 1:
                end = pieces[start + count - 1].high
                number = tirx.floordiv(total - piece.low, piece.length)
                with self._between(total, piece.low, end):
                    value = self._stepped(piece.value, steps, number)
                piece = _Piece(piece.low, end, value)
            merged.append(piece)
            start += count
        return self._points_taken_in(merged, total)

    def _rotated(self, pieces: list[_Piece], total: PrimExpr) -> _Piece | None:
        """One interval in the place of two of which the first goes on where the second ends."""
        if len(pieces) != 2 or not isinstance(total, tirx.Var) or not loads(pieces[1].value):
            return None
        first, second = pieces
        length = second.high - first.low
        after = substitute(second.value, {total: total + tirx.const(length, dtype_of(total))})
        if not same_expression(self._within(total, first.low, first.high, after), first.value):
            return None
        around = tirx.floormod(total - second.low, tirx.const(length, dtype_of(total))) + second.low
        return _Piece(first.low, second.high, self.simplified(substitute(second.value, {total: around})))

    def _run(self, pieces: Sequence[_Piece], templates: Sequence[_Template]) -> tuple[tuple[int, ...], int]:
        """How far the first interval's value goes on: the steps of its indices, and the number of intervals."""
        length = pieces[0].length
        steps: tuple[int, ...] = ()
        count = 1
        while count < len(pieces):
            piece = pieces[count]
            if piece.length > length or pieces[count - 1].length < length:
                break
            found = self._steps(templates[0], templates[count])
            if found is None or (count > 1 and found != tuple(count * step for step in steps)):
                break
            steps = found if count == 1 else steps
            count += 1
        return steps, count

    def _steps(self, one: _Template, other: _Template) -> tuple[int, ...] | None:
        """By how much each index of `other` is larger, where that is a number; ``None`` where they differ otherwise."""
        if not one.like(other):
            return None
        steps = []
        for left, right in zip(one.indices, other.indices, strict=True):
            difference = self.analyzer.simplify(right - left)
            if not isinstance(difference, tirx.IntImm):
                return None
            steps.append(const_int(difference))
        return tuple(steps)

    def _stepped(self, value: PrimExpr, steps: Sequence[int], number: PrimExpr) -> PrimExpr:
        """A value with multiples of `number` added to the indices of its loads."""
        waiting = iter(steps)

        def moved(load: PrimExpr) -> PrimExpr:
            indices = [index + next(waiting) * number for index in load_indices(load)]
            return read(load_tensor(load), [self.analyzer.simplify(index) for index in indices])

        return map_loads(value, moved)

    def _points_taken_in(self, pieces: list[_Piece], total: PrimExpr) -> list[_Piece]:
        """Intervals of one point become part of a neighbour whose value there is theirs."""
        if not isinstance(total, tirx.Var):
            return pieces
        result: list[_Piece] = []
        for piece in pieces:
            before = result[-1] if result else None
            if before is not None and piece.length == 1 and self._is_at(before, piece, total):
                result[-1] = _Piece(before.low, piece.high, before.value)
            elif before is not None and before.length == 1 and self._is_at(piece, before, total):
                result[-1] = _Piece(before.low, piece.high, piece.value)
            else:
                result.append(piece)
        return result

    def _is_at(self, wide: _Piece, point: _Piece, total: tirx.Var) -> bool:
        at = substitute(wide.value, {total: tirx.const(point.low, dtype_of(total))})
        return same_expression(self.simplified(at), point.value)

    def _chain(self, pieces: list[_Piece], form: Linear, like: PrimExpr) -> PrimExpr:
        """Choices between intervals; a value on both sides of others is written once."""
        total = form.expression()
        first, last = 0, len(pieces) - 1
        frames: list[tuple[PrimExpr, PrimExpr, bool]] = []
        while first < last:
            piece = pieces[first]
            if last - first > 1 and same_expression(piece.value, pieces[last].value):
                low, high = piece.high, pieces[last].low
                inside = total.equal(low) if high - low == 1 else tirx.And(total >= low, total < high)
                frames.append((inside, piece.value, False))
                last -= 1
            else:
                frames.append((total < piece.high, piece.value, True))
            first += 1
        value = pieces[first].value
        for condition, other, holds in reversed(frames):
            value = choice_like(like, condition, other, value) if holds else choice_like(like, condition, value, other)
        return value


class _Template:
    """A value without the indices of its loads."""

    def __init__(self, value: PrimExpr) -> None:
        self.indices = [index for load in loads(value) for index in load_indices(load)]
        # An index that depends on data can be no multiple of anything.
        self.plain = not any(loads(index) for index in self.indices)
        self._skeleton = map_loads(value, _without_indices)

    def like(self, other: _Template) -> bool:
        """Whether two values differ in the indices of their loads alone."""
        return (
            self.plain
            and other.plain
            and len(self.indices) == len(other.indices)
            and same_expression(self._skeleton, other._skeleton)
        )


def _without_indices(load: PrimExpr) -> PrimExpr:
    tensor = load_tensor(load)
    return tirx.call_pure_extern(str(tensor.dtype), f"tensor{hash(tensor)}")
