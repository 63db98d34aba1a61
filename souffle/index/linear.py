"""Integer expressions as sums of multiples, and conditions as intervals of one such sum."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from tvm import tirx

from souffle.tvm_compat import PrimExpr, dtype_of, loads, structural_key

__all__ = ["Interval", "Linear", "interval_of", "linear_of"]


@dataclass(frozen=True)
class Linear:
    """``sum(coefficient * atom) + constant``; atoms are variables, or what is no sum of multiples.

    Attributes
    ----------
    terms : mapping
        By the atom's structural key: the atom and its coefficient, which is not 0.
    constant : int
    """

    terms: Mapping[object, tuple[PrimExpr, int]]
    constant: int

    def plus(self, other: Linear, factor: int = 1) -> Linear:
        """This and `factor` times `other`."""
        terms = dict(self.terms)
        for key, (atom, coefficient) in other.terms.items():
            total = terms.get(key, (atom, 0))[1] + factor * coefficient
            if total:
                terms[key] = (atom, total)
            else:
                terms.pop(key, None)
        return Linear(terms, self.constant + factor * other.constant)

    @property
    def key(self) -> frozenset:
        """Equal for equal sums, whatever their constants."""
        return frozenset((key, coefficient) for key, (_, coefficient) in self.terms.items())

    def expression(self) -> PrimExpr:
        """The sum of multiples, without the constant."""
        parts = [atom if coefficient == 1 else atom * coefficient for atom, coefficient in self.terms.values()]
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        return total


def linear_of(expression: PrimExpr) -> Linear:
    """An integer expression without loads as a sum of multiples."""
    if isinstance(expression, tirx.IntImm):
        return Linear({}, int(expression.value))
    if isinstance(expression, (tirx.Add, tirx.Sub)):
        return linear_of(expression.a).plus(linear_of(expression.b), 1 if isinstance(expression, tirx.Add) else -1)
    if isinstance(expression, tirx.Mul):
        left, right = linear_of(expression.a), linear_of(expression.b)
        if not left.terms or not right.terms:
            value, factor = (right, left.constant) if not left.terms else (left, right.constant)
            return Linear({}, 0).plus(value, factor)
    return Linear({structural_key(expression): (expression, 1)}, 0)


@dataclass(frozen=True)
class Interval:
    """Where a condition on one sum holds: ``low <= sum < high``, or (`inside` false) everywhere else.

    Attributes
    ----------
    form : Linear
        The sum: coefficients without a common factor, the first one positive, no constant.
    low, high : int or float
        Infinite where there is no bound.
    inside : bool
    """

    form: Linear
    low: float
    high: float
    inside: bool = True

    def negated(self) -> Interval:
        """Where the condition does not hold."""
        if self.inside and math.isinf(self.low) and not math.isinf(self.high):
            return Interval(self.form, self.high, math.inf)
        if self.inside and math.isinf(self.high) and not math.isinf(self.low):
            return Interval(self.form, -math.inf, self.low)
        return Interval(self.form, self.low, self.high, not self.inside)


def interval_of(condition: PrimExpr) -> Interval | None:
    """A condition as an interval of one sum; ``None`` where it is none."""
    if isinstance(condition, tirx.Not):
        inner = interval_of(condition.a)
        return None if inner is None else inner.negated()
    if isinstance(condition, (tirx.And, tirx.Or)):
        left, right = interval_of(condition.a), interval_of(condition.b)
        if left is None or right is None or left.form.key != right.form.key:
            return None
        if isinstance(condition, tirx.And):
            return _both(left, right)
        both = _both(left.negated(), right.negated())
        return None if both is None else both.negated()
    if not isinstance(condition, (tirx.LT, tirx.LE, tirx.GT, tirx.GE, tirx.EQ, tirx.NE)):
        return None
    if not dtype_of(condition.a).startswith("int") or loads(condition):
        return None
    difference = linear_of(condition.a).plus(linear_of(condition.b), -1)
    if not difference.terms:
        return None
    if isinstance(condition, (tirx.EQ, tirx.NE)):
        return _equality(difference, isinstance(condition, tirx.EQ))
    if isinstance(condition, (tirx.GT, tirx.GE)):
        difference = Linear({}, 0).plus(difference, -1)
    strict = isinstance(condition, (tirx.LT, tirx.GT))
    return _below_zero(difference if strict else Linear(difference.terms, difference.constant - 1))


def _both(one: Interval, other: Interval) -> Interval | None:
    if not (one.inside and other.inside):
        return None
    return Interval(one.form, max(one.low, other.low), min(one.high, other.high))


def _normal(difference: Linear) -> tuple[Linear, int]:
    """The sum without its common factor and the factor, negative where the first coefficient was."""
    coefficients = [coefficient for _, coefficient in difference.terms.values()]
    factor = math.gcd(*coefficients) * (1 if coefficients[0] > 0 else -1)
    terms = {key: (atom, coefficient // factor) for key, (atom, coefficient) in difference.terms.items()}
    return Linear(terms, 0), factor


def _below_zero(difference: Linear) -> Interval:
    form, factor = _normal(difference)
    if factor > 0:
        return Interval(form, -math.inf, -(difference.constant // factor))
    return Interval(form, difference.constant // -factor + 1, math.inf)


def _equality(difference: Linear, equal: bool) -> Interval:
    form, factor = _normal(difference)
    value, rest = divmod(-difference.constant, factor)
    return Interval(form, value, value if rest else value + 1, equal)
