"""Expressions that TVM's simplifier would change, in a form that it leaves alone: of floating point and of integers.

It takes numbers to be real: ``x - x`` and ``x * 0`` are 0 to it, ``x == x`` is true, ``(x + y) - y`` is ``x``, not
``x < y`` is ``y <= x``. Of NaN, infinities and negative zeros that is wrong, and of sums it forgets their rounding.
(That ``x + 0`` is ``x`` is left to it, which differs where ``x`` is -0.) It refuses ``x / 0`` where 0 is a constant. Of
unsigned integers it makes ``0 - 1`` of ``x - (x + 1)`` and of ``x < x + 1``, and then refuses that for being below
zero. It bounds integers of 8 and 16 bits as if they did not wrap around: of ``int32(x + 1)`` it believes that it is
above zero where ``x`` is ``uint8``; and integers that lose their upper bits as if they had none, such as
``int32(int64(x) + 2**31)``. (TVM 0.27; docs/tvm-defects.md has what watches each.)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeVar

import tvm
from tvm import tirx
from tvm.ir import TensorLoad

from souffle.index.bounds import Bounder, Bounds, fits, limits
from souffle.index.operations import DIVISIONS
from souffle.program.extrema import is_floating
from souffle.tvm_calls import structural_map, structural_walk
from souffle.tvm_compat import PrimExpr, believed_bounds, cast, collect, dtype_of, loads, reduce_node, same_expression

__all__ = ["exact_bodies", "with_ieee_arithmetic"]

_Node = TypeVar("_Node")
_WRAPPING = (tirx.Add, tirx.Sub, tirx.Mul, tirx.LShift, tirx.Cast)
_ANYTHING = (-(2**63), 2**63 - 1)
"""What TVM says of a number of which it knows nothing."""
_ORDERED = (tirx.LT, tirx.LE, tirx.GT, tirx.GE)
_BOUNDED = (tirx.Min, tirx.Max, *DIVISIONS, tirx.RShift, tirx.BitwiseAnd)
"""Operations whose results TVM bounds more closely than by their type."""


def with_ieee_arithmetic(node: _Node) -> _Node:
    """An expression or a statement with the same value as IEEE 754 defines it, which simplifying does not change."""
    return structural_map(
        node,
        [
            (tirx.Sub, _difference),
            (tirx.Mul, _product),
            (tirx.Div, _quotient),
            ((tirx.EQ, tirx.NE), _equality),
            (tirx.Not, _negation),
            (_ORDERED, _compared),
            (tirx.Cast, _conversion),
            ((tirx.FloorDiv, tirx.FloorMod), _floored),
        ],
    )


def exact_bodies(bodies: Sequence[PrimExpr]) -> list[PrimExpr]:
    """:func:`with_ieee_arithmetic` of the bodies of one TE."""
    first = reduce_node(bodies[0])
    if first is None or len(bodies) == 1:
        return [with_ieee_arithmetic(body) for body in bodies]
    # The outputs of one reduction of tuples must share its sources.
    sources = [with_ieee_arithmetic(source) for source in first.source]
    whole = tirx.Reduce(first.combiner, sources, first.axis, first.condition, first.value_index, first.init)
    return [
        tirx.Reduce(whole.combiner, whole.source, whole.axis, whole.condition, k, whole.init)
        for k in range(len(bodies))
    ]


def _difference(node: tirx.Sub) -> PrimExpr:
    if not is_floating(dtype_of(node)):
        return _unsigned(node)
    a, b = node.a, node.b
    cancels = same_expression(a, b)
    if isinstance(a, tirx.Add):
        cancels = cancels or same_expression(a.a, b) or same_expression(a.b, b)
    if isinstance(b, tirx.Add):
        cancels = cancels or same_expression(b.a, a) or same_expression(b.b, a)
    if isinstance(a, tirx.Select):
        cancels = cancels or same_expression(a.true_value, b) or same_expression(a.false_value, b)
    return tirx.Add(a, _negated(b)) if cancels else node


def _product(node: tirx.Mul) -> PrimExpr:
    for x, factor in ((node.a, node.b), (node.b, node.a)):
        if isinstance(factor, tirx.FloatImm) and factor.value == 0.0 and not isinstance(x, tirx.FloatImm):
            # Zero of the one sign or the other, or NaN where x is not finite. TVM does not know what `fabs` gives.
            zero = tirx.call_intrin(dtype_of(x), "tirx.fabs", tirx.const(0.0, dtype_of(x)))
            return tirx.Mul(_negated(x) if math.copysign(1.0, factor.value) < 0 else x, zero)
    return node


def _negated(value: PrimExpr) -> PrimExpr:
    return tirx.Mul(value, tirx.const(-1.0, dtype_of(value)))


def _compared(node: _Node) -> _Node:
    """Keep TVM from taking a literal to the other side of a comparison where the type does not hold what comes out."""
    dtype = dtype_of(node.a)
    if not dtype.startswith("int"):
        return _unsigned(node)
    literals = {int(literal.value) for literal in collect(node, tirx.IntImm)}
    if sum(map(abs, literals)) <= limits(dtype)[1] or "x" in dtype:
        return node
    plain = (tirx.IntImm, tirx.Var)
    return _with_hidden(node, [not isinstance(side, plain) and not _is_hidden(side) for side in (node.a, node.b)])


def _unsigned(node: _Node) -> _Node:
    """Keep TVM from cancelling between two sides of unsigned integers: it refuses a difference that is negative."""
    if not dtype_of(node.a).startswith("uint"):
        return node
    sides = [node.a, node.b]
    if any(isinstance(side, tirx.IntImm) for side in sides):
        # It compares the bounds of one side with the other by their difference.
        hides = [any(collect(side, kind) for kind in _BOUNDED) and not _is_hidden(side) for side in sides]
        hides = [hide and isinstance(node, _ORDERED) for hide in hides]
    else:
        sums = any(isinstance(side, (tirx.Add, tirx.Sub, tirx.Mul)) for side in sides)
        hides = [False, sums and not _is_hidden(node.b)]
    return _with_hidden(node, hides)


def _with_hidden(node: _Node, hides: Sequence[bool]) -> _Node:
    sides = [_hidden(side) if hide else side for side, hide in zip((node.a, node.b), hides, strict=True)]
    return type(node)(*sides) if any(hides) else node


def _is_hidden(value: PrimExpr) -> bool:
    return isinstance(value, tirx.BitwiseXor)


def _hidden(value: PrimExpr) -> PrimExpr:
    """`value` as an operation on bits, which TVM does not look into."""
    return tirx.bitwise_xor(value, tirx.const(0, dtype_of(value)))


def _conversion(node: tirx.Cast) -> PrimExpr:
    """Keep TVM from bounding an integer that wraps around: it compares and divides what has 32 bits by its bounds."""
    target, value = dtype_of(node), node.value
    if _is_long(node) and _wraps(value):
        value = _hidden(value)
        node = tirx.Cast(target, value)
    if not _may_lose_bits(node):
        return node
    bounds, (least, most) = Bounder({}, {})(value), limits(target)
    if fits(bounds, target):
        return node
    if bounds.low == bounds.high:
        # Of a literal TVM refuses it.
        return tirx.IntImm(target, (bounds.low - least) % (most - least + 1) + least)
    if not _is_long(node) or (_is_hidden(value) and dtype_of(value) == "int64"):
        return node
    known = dtype_of(value).startswith("u") or believed_bounds(value) != _ANYTHING
    return tirx.Cast(target, _hidden(cast(value, "int64"))) if known else node


def _may_lose_bits(node: tirx.Cast) -> bool:
    """Whether an integer that a literal or an element decides is converted to a type without all of its numbers."""
    source, target = dtype_of(node.value), dtype_of(node)
    if not all(dtype.startswith(("int", "uint")) and "x" not in dtype for dtype in (source, target)):
        return False
    if source == "uint64" or _holds(target, source):
        return False
    return isinstance(node.value, tirx.IntImm) or bool(collect(node.value, TensorLoad) or loads(node.value))


def _holds(target: str, source: str) -> bool:
    least, most = limits(source)
    return fits(Bounds(least, most, True), target)


def _floored(node: tirx.FloorDiv | tirx.FloorMod) -> PrimExpr:
    """The same of a division that it makes a truncated one where it takes both sides not to be negative."""
    a, b = (_hidden(side) if _wraps(side) else side for side in (node.a, node.b))
    return node if a.same_as(node.a) and b.same_as(node.b) else type(node)(a, b)


def _is_long(node: PrimExpr) -> bool:
    return dtype_of(node).startswith(("int", "uint")) and not _is_short(node)


def _is_short(node: PrimExpr) -> bool:
    """Whether it is an integer of 8 or 16 bits."""
    return dtype_of(node).startswith(("int", "uint")) and tvm.DataType(dtype_of(node)).bits <= 16


def _wraps(value: PrimExpr) -> bool:
    """Whether a short integer is calculated with what may wrap around, and is not hidden yet."""
    if not _is_short(value) or _is_hidden(value):
        return False
    return any(_is_short(part) for kind in _WRAPPING for part in collect(value, kind))


def _quotient(node: tirx.Div) -> PrimExpr:
    a, b = node.a, node.b
    if not is_floating(dtype_of(node)):
        return node
    if isinstance(b, tirx.FloatImm) and b.value == 0.0:
        return tirx.Mul(a, tirx.const(math.copysign(math.inf, b.value), dtype_of(a)))
    if isinstance(a, tirx.FloatImm) and a.value == 0.0:
        # Not both comparisons in one condition, which would become b != 0.
        below = tirx.Select(tirx.LT(b, a), tirx.const(-a.value, dtype_of(a)), tirx.const(math.nan, dtype_of(a)))
        return tirx.Select(tirx.GT(b, a), a, below)
    return node


def _equality(node: tirx.EQ | tirx.NE) -> PrimExpr:
    if not is_floating(dtype_of(node.a)):
        return _compared(node) if dtype_of(node.a).startswith("int") else node
    if not same_expression(node.a, node.b):
        return node
    number = tirx.LE(node.a, tirx.const(math.inf, dtype_of(node.a)))
    return number if isinstance(node, tirx.EQ) else _opposite(number)


def _negation(node: tirx.Not) -> PrimExpr:
    compared: list[PrimExpr] = []

    def see(comparison: PrimExpr) -> None:
        if is_floating(dtype_of(comparison.a)):
            compared.append(comparison)

    structural_walk(node.a, (_ORDERED, see))
    return _opposite(node.a) if compared else node


def _opposite(condition: PrimExpr) -> PrimExpr:
    no, yes = (tirx.const(value, dtype_of(condition)) for value in (False, True))
    return tirx.Select(condition, no, yes)
