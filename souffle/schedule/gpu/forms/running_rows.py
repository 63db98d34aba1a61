"""Rows whose reductions may run along with the second product, a panel of columns at a time (softmax).

::

    m = max over n of t[n];  l = sum over n of a[n] exp(t[n] - m);  O = sum over n of (c[n] exp(t[n] - m) / l) other[n]

    for each panel of columns:
        before, m = m, max(m, t of the panel)
        l = l exp(before - m) + sum of a exp(t - m);  O = O exp(before - m) + sum of c exp(t - m) other
    O = O / l

Theorem behind it. Let `t`, `a` and `c` be free of values of rows. After each panel `l` and `O` are the sums over the
columns so far, all with the same `m`, because ``exp(x - before) exp(before - m) = exp(x - m)``; and after the last one
`m` is the greatest of all. As `m` only grows, every exponential is of a number that is 0 at most, as in the text above:
nothing overflows that does not there. A sum of a row is at least the term of its greatest element, so that its
reciprocal does not overflow either.

It is found from these expressions alone. Where the second product's left operand is something else for some rows as a
whole, such as zeros where a row is masked, these rows are neither rescaled nor divided.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import tvm_ffi
from tvm import tirx
from tvm.ir import Call

from souffle.decision import Refused
from souffle.schedule.gpu.forms.contraction_expressions import Axis, NotAContraction, depends, substitute_axes
from souffle.schedule.gpu.forms.row_steps import RowReduction, RowStep
from souffle.schedule.gpu.forms.seen_columns import SeenColumns, seen_columns
from souffle.tvm_compat import PrimExpr, choice_parts, dtype_of, is_choice, variables

__all__ = ["RunningRows", "read_running_rows"]

_LEAST = -3.402823e38
"""No finite fp32 is less than what a maximum starts from that is less than this, or minus infinity."""


@dataclass(frozen=True, eq=False)
class RunningRows:
    """How rows are reduced along with the second product.

    Attributes
    ----------
    greatest, total : RowReduction
        The maximum, and the sum of exponentials.
    numerator : expression
        The second product's left operand without the division by the sum, over what its own is over.
    excepted : expression or None
        For which rows that operand is no quotient by the sum; these are as they come.
    seen : SeenColumns or None
        Which columns of each row are not minus infinity, where that is known and rows without such are not excepted.
    """

    greatest: RowReduction
    total: RowReduction
    numerator: PrimExpr
    excepted: PrimExpr | None
    seen: SeenColumns | None


def read_running_rows(
    element: tirx.Var, steps: Sequence[RowStep], left: PrimExpr, rows: Sequence[Axis], columns: Sequence[Axis]
) -> RunningRows | Refused:
    """How a maximum, a sum of exponentials and a quotient by it run along, or why they do not.

    Parameters
    ----------
    element : Var
        What stands for an element of the rows.
    steps : sequence of RowStep
    left : expression
        The second product's left operand.
    rows, columns : sequence of Axis
        The rows, and what they are reduced over.
    """
    reductions = [reduction for step in steps for reduction in step.reductions]
    if [r.combine for r in reductions] != [tirx.Max, tirx.Add]:
        return Refused("its rows are not reduced by a maximum and then a sum")
    try:
        return _Reader(element, steps, rows, columns, *reductions).read(left)
    except NotAContraction as reason:
        return Refused(str(reason))


class _Reader:
    def __init__(
        self,
        element: tirx.Var,
        steps: Sequence[RowStep],
        rows: Sequence[Axis],
        columns: Sequence[Axis],
        greatest: RowReduction,
        total: RowReduction,
    ) -> None:
        self.element, self.greatest, self.total = element, greatest, total
        self.rows, self.columns = rows, columns
        current: PrimExpr = element
        terms: list[PrimExpr] = []
        for step in steps:
            if step.update is not None:
                current = substitute_axes(step.update, {element: current})
            terms += [substitute_axes(r.term, {element: current}) for r in step.reductions]
        self.current = current
        self.compared, self.added = terms

    def read(self, left: PrimExpr) -> RunningRows:
        initial = self.greatest.initial
        if not isinstance(initial, tirx.FloatImm) or float(initial.value) > _LEAST:
            raise NotAContraction(f"{self.greatest.name} starts from {initial}, which may be more than all elements")
        if not self._is_free(self.compared):
            raise NotAContraction(f"{self.greatest.name} is of values of rows")
        self._demand_exponential(self.added)
        while isinstance(left, tirx.Cast) and "float" in dtype_of(left.value):
            left = left.value
        if is_choice(left):
            condition, instead, quotient = choice_parts(left)
            if self._is_of_rows(condition) and self._is_free(instead):
                return self._found(tirx.Select(condition, instead, self._numerator(quotient)), condition)
        return self._found(self._numerator(left), None)

    def _found(self, numerator: PrimExpr, excepted: PrimExpr | None) -> RunningRows:
        # The operand of an excepted row may be anything in any column.
        seen = seen_columns(self.compared, self.rows, self.columns) if excepted is None else None
        return RunningRows(self.greatest, self.total, numerator, excepted, seen)

    def _numerator(self, quotient: PrimExpr) -> PrimExpr:
        numerator = self._without_total(quotient)
        self._demand_exponential(substitute_axes(numerator, {self.element: self.current}))
        return numerator

    def _reads(self, value: PrimExpr, result: tirx.Var) -> bool:
        return any(result.same_as(v) for v in variables(value))

    def _is_free(self, value: PrimExpr) -> bool:
        """Whether a value depends on no value of a row."""
        return not (self._reads(value, self.greatest.result) or self._reads(value, self.total.result))

    def _is_of_rows(self, condition: PrimExpr) -> bool:
        """Whether a condition is the same for all elements of a row, and known beforehand."""
        of_columns = any(depends(condition, column) for column in self.columns)
        return not of_columns and not self._reads(condition, self.element) and self._is_free(condition)

    def _demand_exponential(self, value: PrimExpr) -> None:
        """Demand that a value is a multiple of ``exp(t - m)``, by what depends on no value of a row."""
        if isinstance(value, tirx.Cast) and "float" in dtype_of(value.value):
            self._demand_exponential(value.value)
        elif isinstance(value, tirx.Mul):
            one, other = (value.a, value.b) if self._is_free(value.b) else (value.b, value.a)
            if not self._is_free(other):
                raise NotAContraction("a product of two values of rows is no multiple of one exponential")
            self._demand_exponential(one)
        elif isinstance(value, tirx.Div) and self._is_free(value.b):
            self._demand_exponential(value.a)
        elif not self._is_exponential(value):
            raise NotAContraction(f"{value} is no multiple of an exponential of a term of {self.greatest.name} less it")

    def _is_exponential(self, value: PrimExpr) -> bool:
        exponential = isinstance(value, Call) and str(getattr(value.op, "name", "")) == "tirx.exp"
        if not exponential or not isinstance(value.args[0], tirx.Sub):
            return False
        less = value.args[0]
        own = isinstance(less.b, tirx.Var) and less.b.same_as(self.greatest.result)
        return own and tvm_ffi.structural_equal(less.a, self.compared)

    def _without_total(self, value: PrimExpr) -> PrimExpr:
        """A quotient by the sum, times anything, without that quotient."""
        if isinstance(value, tirx.Cast) and "float" in dtype_of(value.value):
            return tirx.Cast(dtype_of(value), self._without_total(value.value))
        if isinstance(value, tirx.Mul):
            for one, other in ((value.a, value.b), (value.b, value.a)):
                if not self._reads(other, self.total.result):
                    return self._without_total(one) * other
        if isinstance(value, tirx.Div):
            if isinstance(value.b, tirx.Var) and value.b.same_as(self.total.result):
                if not self._reads(value.a, self.total.result):
                    return value.a
            elif self._is_free(value.b):
                return self._without_total(value.a) / value.b
        raise NotAContraction(f"{value} is no quotient by {self.total.name}")
