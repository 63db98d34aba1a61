"""From index expressions to quasi-affine functions, and from predicates to the sets where they hold (paper §5.2)."""

from __future__ import annotations

import operator
from fractions import Fraction
from typing import NamedTuple

import numpy as np

from souffle.index import isl
from souffle.index.arrays import tabulate
from souffle.index.expression import UNKNOWN, Expression, Node, Path, cone

__all__ = ["AffineView", "Predicate"]

_LARGEST_TABLE = 1 << 16
_LARGEST_DENOMINATOR = 256


class Predicate(NamedTuple):
    """Where a condition may hold and where it may fail; together everything, and disjoint where `exact`."""

    holds: isl.Set
    fails: isl.Set
    exact: bool


class AffineView:
    """The nodes of one expression as functions of its iteration space (data-parallel, then reduction axes)."""

    def __init__(self, expression: Expression) -> None:
        self.expression = expression
        self.bounds = expression.axes + expression.reduce_axes
        self.dimensions = len(self.bounds)
        self.space = isl.box(self.bounds)
        self._values: dict[int, isl.PwAff | None] = {}
        self._predicates: dict[int, Predicate] = {}

    def domain(self, path: Path) -> tuple[isl.Set, bool]:
        """The points where all conditions of `path` may hold, and whether that is exact."""
        region, exact = self.space, True
        for number, wanted in sorted(path):
            predicate = self.predicate(number)
            region = region.intersect(predicate.holds if wanted else predicate.fails)
            exact = exact and predicate.exact
        return region, exact

    def value(self, number: int) -> isl.PwAff | None:
        """An integer node as a quasi-affine function; ``None`` if it is none, or depends on data."""
        if number not in self._values:
            node = self.expression.nodes[number]
            value = None if node.data else self._value(node)
            if value is None and not node.data:
                value = self._tabulated(number)
            self._values[number] = value
        return self._values[number]

    def predicate(self, number: int) -> Predicate:
        """A boolean node as sets; everything in both for one that is not quasi-affine, or depends on data."""
        if number not in self._predicates:
            found = None if number == UNKNOWN else self._predicate(self.expression.nodes[number])
            self._predicates[number] = found or Predicate(self.space, self.space, False)
        return self._predicates[number]

    def constant(self, number: int) -> int | None:
        """The value of a node that is the same at all points."""
        node = self.expression.nodes[number]
        if node.kind == "int":
            return node.value
        if node.kind == "cast" and not node.data and _integral(node.dtype):
            return self.constant(node.args[0])
        if node.kind == "axis" and self.bounds[node.value][1] == 1:
            return self.bounds[node.value][0]
        return None

    def _value(self, node: Node) -> isl.PwAff | None:
        if not _integral(node.dtype):
            return None
        if node.kind == "axis":
            return isl.axis(self.dimensions, node.value)
        if node.kind == "int":
            return isl.constant(self.dimensions, node.value)
        if node.kind == "cast" and self._keeps_value(node):
            return self.value(node.args[0])
        if node.kind == "call" and node.value == "likely":
            return self.value(node.args[0])
        if node.kind == "choose":
            condition = self.predicate(node.args[0])
            then, other = self.value(node.args[1]), self.value(node.args[2])
            if not condition.exact or then is None or other is None:
                return None
            return isl.choose(condition.holds, condition.fails, then, other)
        if node.dtype == "bool":
            predicate = self._predicate(node)
            if predicate is None or not predicate.exact:
                return None
            one, zero = isl.constant(self.dimensions, 1), isl.constant(self.dimensions, 0)
            return isl.choose(predicate.holds, predicate.fails, one, zero)
        if len(node.args) != 2:
            return None
        left, right = self.value(node.args[0]), self.value(node.args[1])
        if left is None or right is None:
            return None
        if node.kind in _COMBINE:
            return _COMBINE[node.kind](left, right)
        return self._by_constant(node, left, right)

    def _by_constant(self, node: Node, left: isl.PwAff, right: isl.PwAff) -> isl.PwAff | None:
        divisor = self.constant(node.args[1])
        if node.kind == "mul":
            if divisor is None:
                divisor, left = self.constant(node.args[0]), right
            return None if divisor is None else isl.rational_floor(left, divisor, 0, 1)
        if divisor is None:
            return None
        if node.kind == "floordiv" and divisor:
            return isl.divide_floor(left, divisor)
        if node.kind == "floormod" and divisor:
            return isl.modulo(left, divisor)
        if node.kind in ("div", "mod") and divisor:
            # Rounded towards zero: that of the magnitude, with the sign put back.
            sign = 1 if divisor > 0 else -1
            up, down = isl.divide_floor(left, abs(divisor)), isl.divide_floor(left.neg(), abs(divisor)).neg()
            zero = isl.constant(self.dimensions, 0)
            quotient = isl.choose(left.ge_set(zero), left.lt_set(zero), up, down)
            if node.kind == "div":
                return isl.rational_floor(quotient, sign, 0, 1)
            return left.sub(isl.rational_floor(quotient, abs(divisor), 0, 1))
        if node.kind == "shl" and 0 <= divisor < 32:
            return isl.rational_floor(left, 1 << divisor, 0, 1)
        if node.kind == "shr" and 0 <= divisor < 32:
            return isl.divide_floor(left, 1 << divisor)
        if node.kind == "bitand" and divisor >= 0 and divisor & (divisor + 1) == 0:
            return isl.modulo(left, divisor + 1)
        return None

    def _keeps_value(self, node: Node) -> bool:
        source = self.expression.nodes[node.args[0]].dtype
        if not _integral(source):
            return False
        # A negative number changes when it becomes unsigned, and every other than 0 when it becomes bool.
        return source == "bool" or node.dtype.startswith("int")

    def _predicate(self, node: Node) -> Predicate | None:
        if node.kind == "int":
            everything, none = self.space, isl.nothing(self.dimensions)
            return Predicate(everything, none, True) if node.value else Predicate(none, everything, True)
        if node.kind == "not":
            inner = self.predicate(node.args[0])
            return Predicate(inner.fails, inner.holds, inner.exact)
        if node.kind in ("and", "or"):
            left, right = self.predicate(node.args[0]), self.predicate(node.args[1])
            exact = left.exact and right.exact
            if node.kind == "and":
                return Predicate(left.holds.intersect(right.holds), left.fails.union(right.fails), exact)
            return Predicate(left.holds.union(right.holds), left.fails.intersect(right.fails), exact)
        if node.kind == "call" and node.value == "likely":
            return self.predicate(node.args[0])
        if node.kind == "choose" and node.dtype == "bool":
            test, then, other = (self.predicate(arg) for arg in node.args)
            exact = test.exact and then.exact and other.exact
            holds = test.holds.intersect(then.holds).union(test.fails.intersect(other.holds))
            return Predicate(holds, test.holds.intersect(then.fails).union(test.fails.intersect(other.fails)), exact)
        if node.kind == "cast" and node.dtype == "bool":
            value = self.value(node.args[0])
            if value is None:
                return None
            zero = isl.constant(self.dimensions, 0)
            return self._decided(value.ne_set(zero))
        if node.kind in _COMPARE:
            chosen = self._compared_choice(node)
            if chosen is not None:
                return chosen
        if node.kind in _COMPARE and not node.data:
            left, right = self.value(node.args[0]), self.value(node.args[1])
            if left is not None and right is not None:
                return self._decided(_COMPARE[node.kind](left, right))
        return None

    def _compared_choice(self, node: Node) -> Predicate | None:
        """A choice between two constants compared with a third: where its condition holds, where it fails, or both.

        Lowering stores a condition as 1 or 0 and compares that with 0. As a quasi-affine function of two pieces that
        costs isl seconds where the condition has many divisions; the sets of the condition are known.
        """
        choice, limit = self.expression.nodes[node.args[0]], self.constant(node.args[1])
        if choice.kind == "cast" and self.expression.nodes[choice.args[0]].dtype == "bool":
            then, other = 1, 0
        elif choice.kind == "choose":
            then, other = self.constant(choice.args[1]), self.constant(choice.args[2])
        else:
            return None
        if limit is None or then is None or other is None or not _integral(choice.dtype):
            return None
        condition = self.predicate(choice.args[0])
        compare = _COMPARE_INTEGERS[node.kind]
        match compare(then, limit), compare(other, limit):
            case True, False:
                return condition
            case False, True:
                return Predicate(condition.fails, condition.holds, condition.exact)
            case True, True:
                return Predicate(self.space, isl.nothing(self.dimensions), True)
            case _:
                return Predicate(isl.nothing(self.dimensions), self.space, True)

    def _decided(self, holds: isl.Set) -> Predicate:
        holds = holds.intersect(self.space)
        return Predicate(holds, self.space.subtract(holds), True)

    def _tabulated(self, number: int) -> isl.PwAff | None:
        """An integer function of one axis that is computed in floating point, as resizing does, from its values."""
        nodes = self.expression.nodes
        order = cone(nodes, [number])
        positions = {nodes[n].value for n in order if nodes[n].kind == "axis"}
        if len(positions) != 1 or not _integral(nodes[number].dtype):
            return None
        position = positions.pop()
        first, extent = self.bounds[position]
        if extent > _LARGEST_TABLE:
            return None
        table = tabulate(nodes, order, np.arange(first, first + extent))
        fit = None if table is None else _fit(first, table)
        if fit is None:
            return None
        slope, offset, divisor, low, high = fit
        value = isl.rational_floor(isl.axis(self.dimensions, position), slope, offset, divisor)
        lowest, highest = isl.constant(self.dimensions, low), isl.constant(self.dimensions, high)
        return value.max(lowest).min(highest)


_COMBINE = {
    "add": isl.PwAff.add,
    "sub": isl.PwAff.sub,
    "min": isl.PwAff.min,
    "max": isl.PwAff.max,
}
_COMPARE = {
    "lt": isl.PwAff.lt_set,
    "le": isl.PwAff.le_set,
    "gt": isl.PwAff.gt_set,
    "ge": isl.PwAff.ge_set,
    "eq": isl.PwAff.eq_set,
    "ne": isl.PwAff.ne_set,
}
_COMPARE_INTEGERS = {
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
    "eq": operator.eq,
    "ne": operator.ne,
}


def _integral(dtype: str) -> bool:
    return dtype.startswith(("int", "uint", "bool"))


def _fit(first: int, table: np.ndarray) -> tuple[int, int, int, int, int] | None:
    """``(a, b, d, low, high)`` such that ``table[i] == clip(floor((a * (first + i) + b) / d), low, high)``.

    The ends may be clipped, so each value at an end bounds ``b`` from one side only.
    """
    low, high = int(table.min()), int(table.max())
    inside = np.flatnonzero((table > low) & (table < high))
    span = inside if len(inside) > 1 else np.arange(len(table))
    rise, run = int(table[span[-1]] - table[span[0]]), int(span[-1] - span[0])
    slopes = {Fraction(rise, run) if run else Fraction(0)}
    for denominator in range(1, _LARGEST_DENOMINATOR + 1):
        if run:
            middle = round(Fraction(rise * denominator, run))
            slopes.update(Fraction(middle + step, denominator) for step in (-1, 0, 1))
    points = first + np.arange(len(table), dtype=np.int64)
    for slope in sorted(slopes, key=lambda s: (s.denominator, abs(s))):
        a, d = slope.numerator, slope.denominator
        # d * t <= a * i + b < d * (t + 1) bounds b at every point.
        lower, upper = d * table - a * points, d * table - a * points + d - 1
        free_below, free_above = table == low, table == high
        least = lower[~free_below].max(initial=-(2**62))
        most = upper[~free_above].min(initial=2**62)
        if low == high:
            return 0, low, 1, low, high
        if least <= most:
            offset = int(least if least > -(2**62) else most)
            return a, offset, d, low, high
    return None
