"""The operations of index expressions: their names, and which of TVM's nodes they are.

What an operation does to whole numbers is said once for each reading of it: on numbers, many at once (``arrays.py``),
on the least and the greatest (``bounds.py``), on quasi-affine functions (``quasi_affine.py``), on sums of multiples
(``linear.py``).
"""

from __future__ import annotations

from typing import Any

from tvm import tirx
from tvm.ir import Call, TensorLoad

from souffle.tvm_compat import is_branch, is_load, load_indices

__all__ = [
    "ARITHMETIC",
    "BITWISE",
    "COMPARISONS",
    "DIVISIONS",
    "call_name",
    "operands_of",
    "operation_of",
]

DIVISIONS = (tirx.FloorDiv, tirx.FloorMod, tirx.Div, tirx.Mod)
ARITHMETIC = (tirx.Add, tirx.Sub, tirx.Mul, *DIVISIONS, tirx.Min, tirx.Max)
COMPARISONS = (tirx.LT, tirx.LE, tirx.GT, tirx.GE, tirx.EQ, tirx.NE)
BITWISE = (tirx.BitwiseAnd, tirx.BitwiseOr, tirx.BitwiseXor, tirx.LShift, tirx.RShift)

_BINARY = {
    tirx.Add: "add",
    tirx.Sub: "sub",
    tirx.Mul: "mul",
    tirx.Div: "div",
    tirx.Mod: "mod",
    tirx.FloorDiv: "floordiv",
    tirx.FloorMod: "floormod",
    tirx.Min: "min",
    tirx.Max: "max",
    tirx.LT: "lt",
    tirx.LE: "le",
    tirx.GT: "gt",
    tirx.GE: "ge",
    tirx.EQ: "eq",
    tirx.NE: "ne",
    tirx.And: "and",
    tirx.Or: "or",
    tirx.BitwiseAnd: "bitand",
    tirx.BitwiseOr: "bitor",
    tirx.BitwiseXor: "bitxor",
    tirx.LShift: "shl",
    tirx.RShift: "shr",
}
_UNARY = {tirx.Not: "not", tirx.BitwiseNot: "bitnot"}
_OTHERS = {
    tirx.IntImm: "int",
    tirx.FloatImm: "float",
    tirx.Cast: "cast",
    tirx.Select: "choose",
    tirx.Let: "let",
    TensorLoad: "load",
    tirx.Ramp: "ramp",
    tirx.Broadcast: "broadcast",
    tirx.Shuffle: "shuffle",
}
_NAMES = {**_BINARY, **_UNARY, **_OTHERS}


def operation_of(node: Any) -> str:
    """What a node of TVM is.

    Returns
    -------
    str
        The name of an arithmetic, comparison or logical operation (``"add"``, ``"floordiv"``, ``"lt"`` ...), ``"int"``,
        ``"float"``, ``"variable"``, ``"load"`` (of a tensor or a buffer), ``"cast"``, ``"choose"`` (both of TVM's),
        ``"let"``, ``"call"``; of vectors ``"ramp"``, ``"broadcast"``, ``"shuffle"``; else ``"opaque"``.
    """
    name = _NAMES.get(type(node))
    if name is not None:
        return name
    if isinstance(node, Call):
        return "load" if is_load(node) else "choose" if is_branch(node) else "call"
    return "variable" if isinstance(node, tirx.Var) else "opaque"


def operands_of(node: Any) -> tuple[Any, ...]:
    """The expressions that a node takes, in order; of a load its indices, of a name for a value (``let``) its body."""
    kind = type(node)
    if kind in _BINARY:
        return (node.a, node.b)
    if kind in _UNARY:
        return (node.a,)
    if kind is tirx.Cast:
        return (node.value,)
    if kind is tirx.Select:
        return (node.condition, node.true_value, node.false_value)
    if kind is tirx.Let:
        return (node.body,)
    if kind is TensorLoad:
        return tuple(node.indices)
    if isinstance(node, Call):
        return load_indices(node) if is_load(node) else tuple(node.args)
    return ()


def call_name(call: Call) -> str:
    """The name of a function that is called, without the dialect that it stands in."""
    return str(getattr(call.op, "name", call.op)).rpartition(".")[2]
