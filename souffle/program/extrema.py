"""The greater and the less of two numbers: what ``tirx.Max`` and ``tirx.Min`` mean, and how LLVM code computes it.

Of floating-point numbers they are IEEE 754-2019's *maximum* and *minimum*: NaN where one of the two is NaN. That is
what ONNX's operators do, and it is the meaning that every TE has. TVM's code generators print a comparison and a
choice, or C's ``fmaxf``, which lose a NaN; so each target says it in its own way: here for LLVM, in
``codegen/extrema.py`` for CUDA. A maximum starts from minus infinity, where TVM starts from the least finite number.

(The sign of a zero is not defined where +0 and -0 are compared.)
"""

from __future__ import annotations

import math

import numpy as np
from tvm import tirx

from souffle.tvm_calls import structural_map, structural_walk
from souffle.tvm_compat import PrimExpr, dtype_of, register_reducer

__all__ = ["infinite", "is_floating", "with_infinite_identity", "with_llvm_extrema"]


def is_floating(dtype: str) -> bool:
    """Whether numbers of a type may be NaN."""
    return dtype.startswith(("float", "bfloat"))


def infinite(value: PrimExpr) -> PrimExpr:
    """Infinity where `value` is the constant that TVM writes for it: the largest or the least number of its type."""
    if not isinstance(value, tirx.FloatImm) or dtype_of(value) not in ("float16", "float32", "float64"):
        return value
    limit, number = float(np.finfo(dtype_of(value)).max), float(value.value)
    return tirx.const(math.copysign(math.inf, number), dtype_of(value)) if abs(number) == limit else value


def with_infinite_identity(combiner: tirx.CommReducer) -> tirx.CommReducer:
    """A combiner whose maxima start from minus infinity and whose minima start from infinity."""
    starts = list(combiner.identity_element)
    identity = [
        infinite(start) if isinstance(result, tirx.Max | tirx.Min) else start
        for start, result in zip(starts, combiner.result, strict=True)
    ]
    if all(new is old for new, old in zip(identity, starts, strict=True)):
        return combiner
    return tirx.CommReducer(list(combiner.lhs), list(combiner.rhs), list(combiner.result), identity)


# TVM divides a reduction among threads where it knows the combiner with what it starts from.
register_reducer(tirx.Max, lambda value: infinite(tirx.min_value(dtype_of(value))))
register_reducer(tirx.Min, lambda value: infinite(tirx.max_value(dtype_of(value))))


def with_llvm_extrema(function: tirx.PrimFunc) -> tirx.PrimFunc:
    """A function whose maxima and minima of floating-point numbers pass NaN on when LLVM compiles it.

    With a constant operand that is one instruction on x86, whose ``max`` gives its second operand where one is NaN (of
    vectors that are several of the machine's, a maximum with zero is two); otherwise there is a comparison more, and
    without masks a choice. Other processors have it as one instruction, but for zero.
    """

    def rewrite(node: tirx.Max | tirx.Min) -> PrimExpr:
        dtype, largest = dtype_of(node), isinstance(node, tirx.Max)
        if not is_floating(dtype):
            return node
        one, other = (node.b, node.a) if isinstance(node.a, tirx.FloatImm) else (node.a, node.b)
        known = isinstance(other, tirx.FloatImm)
        # With the zero of one sign it is one instruction, with that of the other there is a test of signs. With that
        # of the one sign in place of the other, a number beyond zero would become the wrong zero.
        signed = known and other.value == 0.0 and (math.copysign(1.0, other.value) > 0) == largest
        repeats = _repeats(one) or _repeats(other)
        if not dtype.startswith("bfloat") and (repeats or (known and not signed)):
            name = "llvm.maximum" if largest else "llvm.minimum"
            return tirx.call_llvm_pure_intrin(dtype, name, one, other)
        # Operands are repeated.
        chosen = tirx.Select((tirx.GT if largest else tirx.LT)(other, one), other, one)
        # The test is no comparison of a number with itself, which TVM takes to be true.
        return chosen if known else tirx.Select(tirx.LE(other, tirx.const(math.inf, dtype)), chosen, other)

    return function.with_body(structural_map(function.body, [(tirx.Max, rewrite), (tirx.Min, rewrite)]))


def _repeats(operand: PrimExpr) -> bool:
    """Whether it holds such a choice itself, so that repeating it would double its size with each level."""
    choices: list[tirx.Select] = []
    structural_walk(operand, (tirx.Select, choices.append))
    return any(
        isinstance(choice.condition, tirx.GT | tirx.LT) and choice.condition.a.same_as(choice.true_value)
        for choice in choices
    )
