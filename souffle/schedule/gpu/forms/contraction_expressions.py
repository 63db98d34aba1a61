"""Expressions of TensorIR, as the contraction rules look at them: reads of buffers, index types, bounds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tvm
from tvm import tirx
from tvm.ir import Call, Range, TensorLoad

from souffle.index.operations import ARITHMETIC, COMPARISONS
from souffle.program.ieee import with_ieee_arithmetic
from souffle.tvm_calls import structural_map, structural_walk
from souffle.tvm_compat import PrimExpr, cast, dtype_of, substitute, variables

__all__ = [
    "Axis",
    "NotAContraction",
    "bounded",
    "count_nodes",
    "depends",
    "is_constant",
    "narrow_indices",
    "substitute_axes",
]


class NotAContraction(Exception):
    """Why a function has not the canonical form; becomes the reason of a ``Refused``."""


@dataclass(frozen=True, eq=False)
class Axis:
    """One axis of the reduction block, or one factor of it: ``var`` over ``[0, extent)``."""

    var: tirx.Var
    extent: int


def substitute_axes(expression: PrimExpr, mapping: Mapping[tirx.Var, PrimExpr]) -> PrimExpr:
    """Substitute variables, each value cast to the type of its variable."""
    return substitute(expression, {var: cast(value, dtype_of(var)) for var, value in mapping.items()})


def bounded(axes: Sequence[Axis]) -> tvm.sym.Analyzer:
    """An analyzer that knows the ranges of `axes`."""
    analyzer = tvm.sym.Analyzer()
    for axis in axes:
        analyzer.bind(axis.var, Range(0, axis.extent))
    return analyzer


def depends(expression: PrimExpr, axis: Axis) -> bool:
    return any(axis.var.same_as(v) for v in variables(expression))


def count_nodes(expression: PrimExpr) -> int:
    count = 0

    def see(_: Any) -> None:
        nonlocal count
        count += 1

    structural_walk(expression, ((*ARITHMETIC, Call, TensorLoad, tirx.Cast, tirx.Select), see))
    return count


def is_constant(expression: PrimExpr) -> bool:
    return isinstance(expression, tirx.IntImm | tirx.FloatImm)


def narrow_indices(expression: PrimExpr, analyzer: tvm.sym.Analyzer) -> PrimExpr:
    """Do 64-bit index arithmetic in 32 bits where the bounds of the axes show that it fits, and simplify.

    Exporters write 64-bit shapes; casts between the widths hide from TVM's simplifier what indices have in common.
    """
    limit = 2**31 - 1

    def fits(value: PrimExpr) -> bool:
        bound = analyzer.const_int_bound(value)
        return -limit <= bound.min_value and bound.max_value <= limit

    def small(value: PrimExpr) -> PrimExpr | None:
        if isinstance(value, tirx.IntImm) and abs(int(value.value)) <= limit:
            return tirx.IntImm("int32", int(value.value))
        if isinstance(value, tirx.Cast) and dtype_of(value.value) == "int32":
            return value.value
        return None

    def rewrite(node: PrimExpr) -> PrimExpr:
        if dtype_of(node.a) != "int64":
            return node
        a, b = small(node.a), small(node.b)
        if a is None or b is None:
            return node
        if isinstance(node, COMPARISONS):
            return type(node)(a, b)
        return tirx.Cast("int64", type(node)(a, b)) if fits(node) else node

    def recast(node: tirx.Cast) -> PrimExpr:
        narrow = small(node.value)
        return cast(narrow, "int32") if narrow is not None and dtype_of(node) == "int32" else node

    def reload(load: TensorLoad) -> PrimExpr:
        indices = [small(i) if dtype_of(i) == "int64" else None for i in load.indices]
        if all(i is None for i in indices):
            return load
        chosen = [old if new is None else new for old, new in zip(load.indices, indices, strict=True)]
        return load.source[tuple(chosen)]

    rules = [((*ARITHMETIC, *COMPARISONS), rewrite), (tirx.Cast, recast), (TensorLoad, reload)]
    return analyzer.simplify(with_ieee_arithmetic(structural_map(expression, rules)))
