"""Divisions by negative numbers, which TVM's simplifier makes and which TVM's lowering refuses where they repeat.

LowerIntrin holds a remainder in a variable ``rmod``; the analyzer of the code generator meets it again, with another
range, and ends there ("Binding of variable rmod ... conflicts with previous binding")::

21 - (2 - g % 2) % 2 * 21    →    21 + g % -2 * 21    →    21 + ((g + 1) % 2 - 1) * 21
"""

from __future__ import annotations

import tvm
from tvm import tirx

from souffle.program.tvm_passes import function_pass
from souffle.tvm_calls import structural_map
from souffle.tvm_compat import PrimExpr, dtype_of

__all__ = ["positive_divisors"]


def positive_divisors() -> tvm.transform.Pass:
    """The pass; nothing may simplify between it and ``LowerIntrin``."""
    return function_pass(lambda function: function.with_body(_positive(function.body)), "souffle.PositiveDivisors")


def _positive(body: tirx.Stmt) -> tirx.Stmt:
    def quotient(node: tirx.FloorDiv) -> PrimExpr:
        most = _most(node.b)
        return (
            node if most is None else _like(node, 0) - tirx.FloorDiv(node.a + _like(node, most), _like(node, most + 1))
        )

    def remainder(node: tirx.FloorMod) -> PrimExpr:
        most = _most(node.b)
        return (
            node
            if most is None
            else tirx.FloorMod(node.a + _like(node, most), _like(node, most + 1)) - _like(node, most)
        )

    return structural_map(body, [(tirx.FloorDiv, quotient), (tirx.FloorMod, remainder)])


def _most(divisor: PrimExpr) -> int | None:
    """The largest remainder by the number that a divisor is the opposite of; None for one above zero."""
    divisor = divisor.value if isinstance(divisor, tirx.Broadcast) else divisor
    return -int(divisor.value) - 1 if isinstance(divisor, tirx.IntImm) and int(divisor.value) < 0 else None


def _like(node: PrimExpr, number: int) -> PrimExpr:
    """A number with as many lanes as a division has."""
    dtype = tvm.DataType(dtype_of(node))
    value = tirx.IntImm(dtype_of(node).partition("x")[0], number)
    return value if dtype.lanes == 1 else tirx.Broadcast(value, dtype.lanes)
