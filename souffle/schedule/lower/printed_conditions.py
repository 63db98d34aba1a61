"""What the CUDA generator of TVM 0.27 gets wrong of conditions, kept from it (docs/tvm-defects.md).

It writes ``if_then_else``, ``let`` and reinterpreted bits as statements ahead of the statement that holds them. What a
condition guards by ``and``, ``or`` or ``select`` is then evaluated before the condition is known::

    i < n and (idx[i] if … else …) == j        →    (idx[i] if … else …) == j if i < n else False

It declares the condition of a vector ``select`` with the type of what is selected, ``float2 v = make_ushort2(c, c)``,
which no compiler takes. Where all lanes have one condition, it is a scalar one that is meant::

    select(broadcast(c, 2), x, y)              →    x if c else y
"""

from __future__ import annotations

import tvm
from tvm import tirx
from tvm.ir import TensorLoad

from souffle.index.operations import COMPARISONS
from souffle.tvm_calls import structural_map, structural_walk
from souffle.tvm_compat import PrimExpr, collect, dtype_of, is_choice

__all__ = ["has_vector_select", "with_plain_conditions"]


def with_plain_conditions(function: tirx.PrimFunc) -> tirx.PrimFunc:
    """`function` with conditions that mean in CUDA text what they mean in TensorIR."""

    def conjunction(node: tirx.And) -> PrimExpr:
        return tirx.if_then_else(node.a, node.b, _truth(False)) if _is_hoisted(node.b) else node

    def disjunction(node: tirx.Or) -> PrimExpr:
        return tirx.if_then_else(node.a, _truth(True), node.b) if _is_hoisted(node.b) else node

    def select(node: tirx.Select) -> PrimExpr:
        condition = _of_all_lanes(node.condition)
        values = (node.true_value, node.false_value)
        hoisted = any(_is_hoisted(value) and collect(value, TensorLoad) for value in values)
        if condition is None or (_lanes(node) == 1 and not hoisted):
            return node
        return tirx.if_then_else(condition, node.true_value, node.false_value)

    rules = [(tirx.And, conjunction), (tirx.Or, disjunction), (tirx.Select, select)]
    return function.with_body(structural_map(function.body, rules))


def has_vector_select(function: tirx.PrimFunc) -> bool:
    """Whether lanes of a vector are selected each by a condition of its own."""
    found = False

    def see(node: tirx.Select) -> None:
        nonlocal found
        found = found or (_lanes(node) > 1 and _of_all_lanes(node.condition) is None)

    structural_walk(function.body, (tirx.Select, see))
    return found


def _truth(value: bool) -> PrimExpr:
    return tirx.const(value, "bool")


def _lanes(node: PrimExpr) -> int:
    return tvm.DataType(dtype_of(node)).lanes


def _is_hoisted(guarded: PrimExpr) -> bool:
    """Whether a part of what a condition guards is written ahead of the condition."""
    found = isinstance(guarded, tirx.Let)

    def see(inner: tvm.ir.Call | tirx.Let) -> None:
        nonlocal found
        bits = getattr(getattr(inner, "op", None), "name", "") == "tirx.reinterpret"
        found = found or bits or isinstance(inner, tirx.Let) or is_choice(inner)

    if _lanes(guarded) > 1:
        return False
    structural_walk(guarded, [(tvm.ir.Call, see), (tirx.Let, see)])
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
    if isinstance(condition, (*COMPARISONS, tirx.And, tirx.Or)):
        sides = [_of_all_lanes(side) for side in (condition.a, condition.b)]
        return None if any(side is None for side in sides) else type(condition)(*sides)
    return None
