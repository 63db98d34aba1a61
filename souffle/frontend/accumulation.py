"""16-bit numbers computed in 32 bits: sums, as ONNX Runtime and every tensor core take them, and what CUDA lacks.

::

    S[v] = sum(half(A[f] * B[h]))   →   T[v] = sum(float(A[f]) * float(B[h]));  S[v] = half(T[v])

Right since a product of two 16-bit numbers is exact in 32 bits, and a sum is rounded once and not with every term.
"""

from __future__ import annotations

import tvm_ffi
from tvm import tirx
from tvm.ir import Call

from souffle.frontend.narrow_indices import TEBody
from souffle.tvm_compat import PrimExpr, choice_parts, dtype_of, is_choice, reduce_node

__all__ = ["NARROW", "with_wide_rounding", "with_wide_sum"]

NARROW = ("float16", "bfloat16")
"""Types that have too few digits, or too small a range, to compute in."""

_WIDE = "float32"
_EXACT = (tirx.Add, tirx.Sub, tirx.Mul)


def with_wide_sum(expression: TEBody) -> TEBody:
    """`expression` with a float32 sum where it is a sum of 16-bit floating-point numbers; others as they are."""
    reduction = reduce_node(expression.bodies[0])
    if reduction is None or len(expression.bodies) != 1 or not all(map(_is_zero, reduction.init)):
        return expression
    (source,), combiner = reduction.source, reduction.combiner
    if dtype_of(source) not in NARROW or not isinstance(combiner.result[0], tirx.Add):
        return expression
    left, right = (tirx.Var(name, _WIDE) for name in ("x", "y"))
    wide = tirx.CommReducer([left], [right], [left + right], [tirx.const(0, _WIDE)])
    body = tirx.Reduce(wide, [_widened(source)], list(reduction.axis), reduction.condition, 0, None)
    return TEBody(expression.axes, expression.reduce_axes, (body,))


def with_wide_rounding(value: PrimExpr) -> PrimExpr:
    """`value` with 16-bit numbers rounded to integers by the function of 32-bit ones: CUDA has none of their own."""

    def wide(call: Call) -> PrimExpr:
        if getattr(call.op, "name", "") != "tirx.nearbyint" or dtype_of(call) not in NARROW:
            return call
        return tirx.Cast(dtype_of(call), tirx.nearbyint(tirx.Cast(_WIDE, call.args[0])))

    return tvm_ffi.structural_map(value, (Call, wide))


def _is_zero(value: PrimExpr) -> bool:
    """What a sum begins with anyway."""
    return isinstance(value, tirx.FloatImm) and float(value.value) == 0


def _widened(value: PrimExpr) -> PrimExpr:
    """A 16-bit value in 32 bits, with the sums, differences and products at its root computed there."""
    if isinstance(value, _EXACT):
        return type(value)(_widened(value.a), _widened(value.b))
    if is_choice(value):
        condition, then, other = choice_parts(value)
        choose = tirx.if_then_else if isinstance(value, Call) else tirx.Select
        return choose(condition, _widened(then), _widened(other))
    if isinstance(value, tirx.FloatImm):
        return tirx.const(value.value, _WIDE)
    return tirx.Cast(_WIDE, value)
