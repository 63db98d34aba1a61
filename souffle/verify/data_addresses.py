"""Addresses that data decides: what the text itself says about them, and nothing else.

A loaded value may be anything that its type allows. The text bounds it: by a clamp, a remainder, a mask or a choice in
the address (:func:`souffle.verify.expressions.interval`), or by a condition around the access that compares the very
value. What is left is a set of values of which each may occur: an axis of its own, over which all accesses are looked
at, and about which no rule says more than "may". An address that nothing bounds stays unknown, and so does the verdict.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import tvm
from tvm import tirx
from tvm.ir import Call, TensorLoad

from souffle.verify.accesses import Address, Branch, Item, MemoryAccess, SerialLoop
from souffle.verify.conditions import under
from souffle.verify.expressions import (
    Axis,
    Expr,
    add,
    const,
    interval,
    linear_terms,
    operation,
    remade,
    variable,
)
from souffle.verify.indices import BINARY, operator_name

__all__ = ["settled", "uniform"]

_MOST = 1 << 24
"""Values of a part of an address; beyond, it counts as not bounded."""


def settled(items: Sequence[Item], conditions: tuple[Expr, ...] = ()) -> tuple[Item, ...]:
    """`items` with axes in the addresses for what data decides, as far as the text bounds it."""
    return tuple(_settled(item, conditions) for item in items)


def _settled(item: Item, conditions: tuple[Expr, ...]) -> Item:
    if isinstance(item, SerialLoop):
        return SerialLoop(item.axis, settled(item.body, conditions))
    if isinstance(item, Branch):
        then = settled(item.then, (*conditions, item.condition))
        otherwise = settled(item.otherwise, (*conditions, operation("not", item.condition)))
        return replace(item, then=then, otherwise=otherwise)
    if not isinstance(item, MemoryAccess) or not item.place.offset.opaque:
        return item
    terms, total = linear_terms(under(item.place.offset, (*conditions, *item.conditions)))
    memo: dict[Expr, Expr] = {}
    parts = [operation("mul", _any_value(term, memo), const(factor)) for term, factor in terms.items()]
    return replace(item, place=replace(item.place, offset=add(*parts, const(total))))


def _any_value(expr: Expr, memo: dict[Expr, Expr]) -> Expr:
    """`expr` with an axis for each part that data decides; as it is where nothing bounds it."""
    if not expr.opaque:
        return expr
    if expr not in memo:
        memo[expr] = _choices(expr, memo)
    return memo[expr]


def _choices(expr: Expr, memo: dict[Expr, Expr]) -> Expr:
    low, high = interval(expr)
    few = high - low < _MOST
    whole = add(const(low), variable(Axis("data", high - low + 1, True))) if few else expr
    if not expr.axes or not expr.args:
        return whole
    # What depends on tile, thread or turns too keeps that, if data has no more choices in its parts.
    parts = remade(expr, [_any_value(arg, memo) for arg in expr.args])
    return whole if parts.opaque or prod(axis.extent for axis in parts.axes if axis.data) > _MOST else parts


# What is the same for all threads of a tile


def uniform(
    node: Any, env: Mapping[Any, Expr], places: Mapping[Any, Address], thread: Axis, alike: Container[Any]
) -> bool:
    """Whether an expression has one value for all threads of a block that come to it, in one tile and turn of loops.

    So it is with what is calculated of numbers that are, and of elements of memory that all share, at addresses that
    are. For if two threads read different values there, somebody has written the element between the one read and the
    other; all threads having come past equally many barriers, no barrier parts the write from both, and it races with
    one. Races are refuted by themselves.

    Parameters
    ----------
    node : expression
    env : mapping
        What variables stand for.
    places : mapping
        Where buffers lie.
    thread : Axis
    alike : container
        Variables of which it is known.
    """

    def known(expr: Expr) -> bool:
        return not expr.opaque and not expr.by_data and thread not in expr.axes

    def see(node: Any) -> bool:
        if isinstance(node, (tirx.IntImm, tirx.FloatImm)):
            return True
        if isinstance(node, tvm.ir.Var):
            return node in alike or (node in env and known(env[node]))
        if type(node) in BINARY:
            return see(node.a) and see(node.b)
        if isinstance(node, (tirx.Cast, tirx.Not)):
            return see(node.value if isinstance(node, tirx.Cast) else node.a)
        if isinstance(node, tirx.Select):
            return see(node.condition) and see(node.true_value) and see(node.false_value)
        if isinstance(node, TensorLoad):
            place = places.get(node.source)
            shared = place is not None and place.memory.kind != "local" and known(place.offset)
            return shared and all(see(index) for index in node.indices)
        if isinstance(node, Call) and operator_name(node) in ("prim.if_then_else", "prim.likely"):
            return all(see(argument) for argument in node.args)
        return False

    return see(node)
