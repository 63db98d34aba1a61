"""Which columns of rows a mask leaves, where it is a choice by index, as in causal attention.

An element that is minus infinity is no term of a maximum, and 0 in a sum of exponentials and in what these are
multiplied with. Where the mask depends on row and column alone, the least and the greatest difference of the column and
the row of an element that is left are known exactly; so the elements of rows from `r` to `s` that are left have columns
from ``r + least`` to ``s + greatest``. What is infinite or NaN in a column that a row does not see is then not seen.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tvm import tirx

from souffle.index import isl
from souffle.index.expression import Expression, Node, NodeTable
from souffle.index.quasi_affine import AffineView
from souffle.schedule.gpu.forms.contraction_expressions import Axis
from souffle.tvm_compat import PrimExpr, buffer_loads, choice_parts, dtype_of, is_choice

__all__ = ["SeenColumns", "seen_columns"]


@dataclass(frozen=True)
class SeenColumns:
    """Where elements are that are not minus infinity.

    Attributes
    ----------
    least, greatest : int
        Of the differences of their column and their row.
    """

    least: int
    greatest: int

    def of_tile(self, first: PrimExpr | int, rows: int) -> tuple[PrimExpr | int, PrimExpr | int]:
        """The first and the last column that some of so many rows may see; there need be no such column."""
        return first + self.least, first + (rows - 1) + self.greatest


def seen_columns(value: PrimExpr, rows: Sequence[Axis], columns: Sequence[Axis]) -> SeenColumns | None:
    """The columns that are seen of a value; ``None`` where no mask is found, or not exactly where it is.

    Parameters
    ----------
    value : expression
        An element of a row, over the axes.
    rows, columns : sequence of Axis
    """
    condition = _condition(value)
    if condition is None or buffer_loads(condition):
        return None
    table = NodeTable(lambda load: -1)
    axes = (*rows, *columns)
    for position, axis in enumerate(axes):
        table.bind(axis.var, table.number(Node("axis", (), position, dtype_of(axis.var), False)))
    holds, apart = table.visit(condition), table.visit(_linear(columns) - _linear(rows))
    extents = tuple((0, axis.extent) for axis in axes)
    view = AffineView(Expression(extents, (), (), tuple(table.nodes), (), ()))
    predicate, distance = view.predicate(holds), view.value(apart)
    if not predicate.exact or distance is None:
        return None
    found = isl.extremes(distance, predicate.holds)
    return None if found is None else SeenColumns(*found)


def _linear(axes: Sequence[Axis]) -> PrimExpr:
    result: PrimExpr = tirx.IntImm("int32", 0)
    for axis in axes:
        result = result * axis.extent + axis.var
    return result


def _condition(value: PrimExpr) -> PrimExpr | None:
    """Where a value is not minus infinity whatever it is made of."""
    if isinstance(value, tirx.Cast) and "float" in dtype_of(value.value):
        return _condition(value.value)
    if is_choice(value):
        condition, then, other = choice_parts(value)
        if _is_lowest(other):
            return condition
        return tirx.Not(condition) if _is_lowest(then) else None
    if isinstance(value, tirx.Add):
        found = _condition(value.a)
        return _condition(value.b) if found is None else found
    if isinstance(value, tirx.Mul | tirx.Div) and _is_positive(value.b):
        return _condition(value.a)
    return None


def _is_lowest(value: PrimExpr) -> bool:
    while isinstance(value, tirx.Cast):
        value = value.value
    return isinstance(value, tirx.FloatImm) and float(value.value) == -math.inf


def _is_positive(value: PrimExpr) -> bool:
    return isinstance(value, tirx.FloatImm) and 0 < float(value.value) < math.inf
