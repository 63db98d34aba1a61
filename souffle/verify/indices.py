"""TensorIR's scalar expressions as the checker's own."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import tvm
from tvm import tirx
from tvm.ir import Call, TensorLoad

from souffle.tvm_compat import dtype_of
from souffle.verify.expressions import Expr, const, interval, operation, unknown, wrapped

__all__ = ["BINARY", "bytes_of", "index_of", "lanes_of", "operator_name", "unknown_of"]

BINARY = {
    tirx.Add: "add",
    tirx.Sub: "sub",
    tirx.Mul: "mul",
    tirx.Div: "div",
    tirx.Mod: "mod",
    tirx.FloorDiv: "floordiv",
    tirx.FloorMod: "floormod",
    tirx.Min: "min",
    tirx.Max: "max",
    tirx.EQ: "eq",
    tirx.NE: "ne",
    tirx.LT: "lt",
    tirx.LE: "le",
    tirx.GT: "gt",
    tirx.GE: "ge",
    tirx.And: "and",
    tirx.Or: "or",
    tirx.LShift: "shl",
    tirx.RShift: "shr",
    tirx.BitwiseAnd: "band",
    tirx.BitwiseOr: "bor",
    tirx.BitwiseXor: "bxor",
}

_MAY_OVERFLOW = frozenset({"add", "sub", "mul", "div", "floordiv", "shl"})


def bytes_of(dtype: str) -> int:
    """Bytes of one element as stored, with all its lanes."""
    known = tvm.DataType(dtype)
    return max(1, known.bits // 8) * known.lanes


def lanes_of(node: Any) -> int:
    """How many numbers an expression is."""
    return int(tvm.DataType(dtype_of(node)).lanes)


def operator_name(call: Call) -> str:
    """The name of what is called; of an external function that is in the text, its own."""
    name = str(getattr(call.op, "name", None) or getattr(call.op, "name_hint", call.op))
    return str(call.args[0].value) if name in ("tirx.call_extern", "tirx.call_pure_extern") else name


def index_of(
    node: Any,
    env: dict[Any, Expr],
    loaded: Callable[[TensorLoad], Expr | None] = lambda load: None,
    lane: Expr | None = None,
) -> Expr:
    """An integer expression of TensorIR; what depends on data, or is no integer, is unknown within its type.

    Parameters
    ----------
    node : expression
    env : dict
        What variables stand for.
    loaded : callable
        What an element of a buffer is, where that is known to be one value wherever it stands in the expression.
    lane : Expr, optional
        Which lane is asked for, of an expression with several.
    """
    return _Indices(env, loaded, lane).of(node)


class _Indices:
    def __init__(self, env: dict[Any, Expr], loaded: Callable[[TensorLoad], Expr | None], lane: Expr | None) -> None:
        self.env = env
        self.loaded = loaded
        self.lane = lane

    def of(self, node: Any) -> Expr:
        if isinstance(node, tirx.IntImm):
            return const(int(node.value))
        if isinstance(node, tvm.ir.Var):
            found = self.env.get(node)
            return unknown_of(node) if found is None else found
        op = BINARY.get(type(node))
        if op is not None:
            return unknown_of(node) if _is_float(node.a) else self.binary(op, node)
        if isinstance(node, TensorLoad):
            value = None if _is_float(node) else self.loaded(node)
            return unknown_of(node) if value is None else value
        if isinstance(node, tirx.Broadcast) and not _is_float(node.value):
            return self.of(node.value)
        if isinstance(node, tirx.Ramp) and self.lane is not None:
            return operation("add", self.of(node.base), operation("mul", self.of(node.stride), self.lane))
        if isinstance(node, tirx.Not):
            return operation("not", self.of(node.a))
        if isinstance(node, tirx.Select):
            return operation("select", self.of(node.condition), self.of(node.true_value), self.of(node.false_value))
        if isinstance(node, tirx.Cast) and not _is_float(node.value) and not _is_float(node):
            return self.cast(node)
        if isinstance(node, tirx.Let):
            self.env[node.var] = self.of(node.value)
            return self.of(node.body)
        if isinstance(node, Call):
            name = operator_name(node)
            if name == "prim.if_then_else":
                return operation("select", *(self.of(a) for a in node.args))
            if name == "prim.likely":
                return self.of(node.args[0])
        return unknown_of(node)

    def binary(self, op: str, node: Any) -> Expr:
        """What data may push over the end of its type may be anything afterwards."""
        result = operation(op, self.of(node.a), self.of(node.b))
        if result.opaque and op in _MAY_OVERFLOW:
            (low, high), (least, most) = interval(result), _type_range(dtype_of(node))
            if low < least or high > most:
                return unknown(least, most)
        return result

    def cast(self, node: tirx.Cast) -> Expr:
        value = self.of(node.value)
        low, high = interval(value)
        least, most = _type_range(dtype_of(node))
        if least <= low and high <= most:
            return value
        if dtype_of(node).startswith("bool"):
            return operation("ne", value, const(0))
        return wrapped(value, least, most)


def _is_float(node: Any) -> bool:
    if isinstance(node, tirx.FloatImm):
        return True
    try:
        return "float" in dtype_of(node)
    except AttributeError:
        return False


_ANYTHING = (-(2**64), 2**64)
"""What has no type of which the range is known."""


def _type_range(dtype: str) -> tuple[int, int]:
    if dtype.startswith("bool"):
        return 0, 1
    match = re.match(r"(u?)int(\d+)", dtype)
    if match is None:
        return _ANYTHING
    bits = int(match.group(2))
    return (0, 2**bits - 1) if match.group(1) else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)


def unknown_of(node: Any) -> Expr:
    """What is known of any expression: the range of its type."""
    try:
        return unknown(*_type_range(dtype_of(node)))
    except AttributeError:
        return unknown(*_ANYTHING)
