"""Mutations of comparisons of data: another operator, another arm of a choice, another literal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import tvm
from tvm import tirx
from tvm.ir import TensorLoad

from souffle.index.operations import COMPARISONS
from souffle.mutation.expression_changes import edited, heads, nodes_of
from souffle.mutation.statement_paths import Change, is_int, sites

__all__ = ["comparison_changes"]

_EXTREMES = (tirx.Min, tirx.Max)

_LITERALS = {0.0: (1.0, -1.0), 1.0: (0.0, 2.0)}
"""What stands for a literal that is changed; for others zero, twice it, and its negative."""


def comparison_changes(func: tirx.PrimFunc) -> Iterator[Change]:
    """Compare data otherwise.

    By another operator; the least for the largest; the one arm of a choice for the other, or both exchanged; another
    literal, among them those that reductions start with.
    """
    for site in sites(func):
        statement = site.statement
        if isinstance(statement, tirx.For):
            continue
        for number, head in enumerate(heads(statement)):
            for kinds, others in _COMPARED:
                for index, node in enumerate(nodes_of(head, kinds)):
                    for action, what, change in others(node):
                        make = edited(func, site.path, number, kinds, index, change)
                        yield Change("comparison", action, what, statement, make)


_Other = tuple[str, str, Callable[[Any], Any]]


def _of_data(node: Any) -> bool:
    return not is_int(node) or bool(nodes_of(node, (TensorLoad,)))


def _other_operators(node: Any) -> Iterator[_Other]:
    if _of_data(node.a) or _of_data(node.b):
        for kind in COMPARISONS:
            if kind is not type(node):
                yield "operator", f"{kind.__name__} for {node}", lambda n, kind=kind: kind(n.a, n.b)


def _other_extremes(node: Any) -> Iterator[_Other]:
    if _of_data(node):
        other = tirx.Max if isinstance(node, tirx.Min) else tirx.Min
        yield "extreme", f"{other.__name__} for {node}", lambda n: other(n.a, n.b)
        for side in "ab":
            yield "extreme", f"{side} alone for {node}", lambda n, side=side: getattr(n, side)


def _other_arms(node: Any) -> Iterator[_Other]:
    call = isinstance(node, tvm.ir.Call)
    if call and str(getattr(node.op, "name", "")) != "prim.if_then_else":
        return
    test, true, false = node.args if call else (node.condition, node.true_value, node.false_value)
    if _of_data(test):
        yield "arm", f"the first arm of {node}", lambda n: true
        yield "arm", f"the second arm of {node}", lambda n: false
        yield "arm", f"{node} with its arms exchanged", lambda n: tirx.Select(test, false, true)


def _other_literals(node: Any) -> Iterator[_Other]:
    value, dtype = float(node.value), node.ty.dtype
    least = abs(value) > 1e30 or value != value
    for other in (0.0, -1e4, 1e4) if least else _LITERALS.get(value, (0.0, 2 * value, -value)):
        yield "literal", f"{other:g} for {value:g}", lambda n, other=other: tirx.FloatImm(dtype, other)


_COMPARED = (
    (COMPARISONS, _other_operators),
    (_EXTREMES, _other_extremes),
    ((tirx.Select, tvm.ir.Call), _other_arms),
    ((tirx.FloatImm,), _other_literals),
)
