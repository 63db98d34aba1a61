"""Divisions of a row's elements by a value of the row: its reciprocal once, and products with that.

An IEEE division takes about nine instructions. ``x / d`` becomes ``(x * s) * r`` with ``r = 1 / (d * s)``, both worked
out once for a row; the result differs by one rounding. The scale ``s`` is 1, or ``2**100`` where ``d`` is so small that
its reciprocal would overflow; then ``x * s`` overflows only where ``x / d`` does. Zero, infinities and NaN give what
the division gives.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import tvm_ffi
from tvm import tirx

from souffle.tvm_calls import structural_map
from souffle.tvm_compat import PrimExpr, buffer_loads, dtype_of, variables

__all__ = ["RowQuotients", "row_quotients"]

_SMALL, _SCALE = 2.0**-100, 2.0**100


@dataclass(frozen=True, eq=False)
class _Divisor:
    """A value of the row, with the variables that stand for its scale and for the reciprocal of both."""

    value: PrimExpr
    scale: tirx.Var
    reciprocal: tirx.Var


@dataclass(frozen=True, eq=False)
class RowQuotients:
    """Expressions without divisions by values of the row.

    Attributes
    ----------
    values : tuple of expression
    divisors : tuple
    """

    values: tuple[PrimExpr, ...]
    divisors: tuple[_Divisor, ...]

    def bound(self, at: Callable[[PrimExpr], PrimExpr]) -> list[tirx.Stmt]:
        """Statements that work out the reciprocals of a row, from a function that finds what the row has."""
        statements: list[tirx.Stmt] = []
        for divisor in self.divisors:
            value = at(divisor.value)
            small = tirx.And(tirx.LT(value, _number(_SMALL)), tirx.GT(value, _number(-_SMALL)))
            statements.append(tirx.Bind(divisor.scale, tirx.Select(small, _number(_SCALE), _number(1.0))))
            statements.append(tirx.Bind(divisor.reciprocal, tirx.Div(_number(1.0), value * divisor.scale)))
        return statements


def row_quotients(values: Sequence[PrimExpr], rows: Sequence[tirx.Var]) -> RowQuotients:
    """Some fp32 expressions with the divisions by functions of `rows`, values of the row, taken out."""
    found: list[_Divisor] = []

    def quotient(node: tirx.Div) -> PrimExpr:
        used = variables(node.b)
        of_row = used and not buffer_loads(node.b) and all(any(v.same_as(row) for row in rows) for v in used)
        if not of_row or dtype_of(node) != "float32":
            return node
        known = next((d for d in found if tvm_ffi.structural_equal(d.value, node.b)), None)
        if known is None:
            number = len(found)
            known = _Divisor(node.b, *(tirx.Var(f"{name}_{number}", "float32") for name in ("scale", "reciprocal")))
            found.append(known)
        return (node.a * known.scale) * known.reciprocal

    return RowQuotients(tuple(structural_map(value, (tirx.Div, quotient)) for value in values), tuple(found))


def _number(value: float) -> PrimExpr:
    return tirx.const(value, "float32")
