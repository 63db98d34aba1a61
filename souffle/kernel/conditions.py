"""What TVM's CUDA generator gets wrong of conditions, kept from it.

It writes ``if_then_else`` and ``let`` as statements ahead of the statement that holds them. What a condition guards by
``and`` or ``or`` is then evaluated before the condition is known::

    i < n and (idx[i] if … else …) == j        →    (idx[i] if … else …) == j if i < n else False

It declares the condition of a vector ``select`` with the type of what is selected, ``float2 v = make_ushort2(c, c)``,
which no compiler takes. Where all lanes have one condition, it is a scalar one that is meant::

    select(broadcast(c, 2), x, y)              →    x if c else y
"""

from __future__ import annotations

import tvm
import tvm_ffi
from tvm import tirx

from souffle.tvm_compat import PrimExpr, dtype_of, is_choice

__all__ = ["has_vector_select", "with_plain_conditions"]

_COMPARISONS = (tirx.EQ, tirx.NE, tirx.LT, tirx.LE, tirx.GT, tirx.GE, tirx.And, tirx.Or)


def with_plain_conditions(function: tirx.PrimFunc) -> tirx.PrimFunc:
    """`function` with conditions that mean in CUDA text what they mean in TensorIR."""

    def conjunction(node: tirx.And) -> PrimExpr:
        return tirx.if_then_else(node.a, node.b, _truth(False)) if _is_hoisted(node) else node

    def disjunction(node: tirx.Or) -> PrimExpr:
        return tirx.if_then_else(node.a, _truth(True), node.b) if _is_hoisted(node) else node

    def select(node: tirx.Select) -> PrimExpr:
        condition = _of_all_lanes(node.condition)
        if condition is None or _lanes(node) == 1:
            return node
        return tirx.if_then_else(condition, node.true_value, node.false_value)

    rules = [(tirx.And, conjunction), (tirx.Or, disjunction), (tirx.Select, select)]
    return function.with_body(tvm_ffi.structural_map(function.body, rules))


def has_vector_select(function: tirx.PrimFunc) -> bool:
    """Whether lanes of a vector are selected each by a condition of its own."""
    found = False

    def see(node: tirx.Select) -> None:
        nonlocal found
        found = found or (_lanes(node) > 1 and _of_all_lanes(node.condition) is None)

    tvm_ffi.structural_walk(function.body, (tirx.Select, see))
    return found


def _truth(value: bool) -> PrimExpr:
    return tirx.const(value, "bool")


def _lanes(node: PrimExpr) -> int:
    return tvm.DataType(dtype_of(node)).lanes


def _is_hoisted(node: tirx.And | tirx.Or) -> bool:
    """Whether a part of the right side, which the left side guards, is written ahead of both."""
    found = _lanes(node) == 1 and isinstance(node.b, tirx.Let)

    def see(inner: tvm.ir.Call | tirx.Let) -> None:
        nonlocal found
        found = found or isinstance(inner, tirx.Let) or is_choice(inner)

    if _lanes(node) == 1:
        tvm_ffi.structural_walk(node.b, [(tvm.ir.Call, see), (tirx.Let, see)])
    return found


def _of_all_lanes(condition: PrimExpr) -> PrimExpr | None:
    """The scalar that all lanes of a condition have; ``None`` if they may differ."""
    if _lanes(condition) == 1:
        return condition
    if isinstance(condition, tirx.Broadcast):
        return condition.value
    if isinstance(condition, tirx.Not):
        inner = _of_all_lanes(condition.a)
        return None if inner is None else tirx.Not(inner)
    if isinstance(condition, _COMPARISONS):
        sides = [_of_all_lanes(side) for side in (condition.a, condition.b)]
        return None if any(side is None for side in sides) else type(condition)(*sides)
    return None
