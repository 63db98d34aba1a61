"""Arithmetic on integers of 8 and 16 bits in CUDA text: each result wraps around, as TensorIR and LLVM have it.

C calculates with integers that are shorter than ``int`` in ``int``, and TVM's CUDA generator writes no conversion back,
so that within one expression nothing wraps around: ``x + 1 >= x`` holds of the greatest ``int8``, too. Here each result
that may leave its type is converted::

    x + y       →    (signed char)((uint)x + (uint)y)
    x / y       →    (signed char)((int)x / (int)y)

Sums, differences, products and shifts to the left are those of ``uint``, which wraps around itself and whose lowest
bits are the result's: the product of two ``uint16`` does not fit into ``int``. The conversion back takes the lowest
bits (of signed types since C++20, and by nvcc, gcc and clang always). Of vectors TVM stores each result lane by lane,
which is a conversion already. (TVM 0.27; docs/tvm-defects.md has what watches it.)
"""

from __future__ import annotations

import tvm
from tvm import tirx

from souffle.tvm_calls import structural_map
from souffle.tvm_compat import PrimExpr, dtype_of

__all__ = ["with_short_integers"]


def with_short_integers(module: tvm.IRModule) -> tvm.IRModule:
    """A module whose short integers wrap around where C calculates with them in ``int``.

    Parameters
    ----------
    module : IRModule
        Lowered as far as it is printed: TVM's simplifier must not see it again.
    """

    def arithmetic(node: tirx.Add | tirx.Sub | tirx.Mul | tirx.LShift) -> PrimExpr:
        return _calculated_in("uint32", node) if _is_promoted(node) else node

    def quotient(node: tirx.Div) -> PrimExpr:
        # The least integer by -1 is the one quotient that does not fit, and there is none of unsigned integers.
        signed = _is_promoted(node) and dtype_of(node).startswith("int")
        return _calculated_in("int32", node) if signed else node

    def complement(node: tirx.BitwiseNot) -> PrimExpr:
        wide = tirx.BitwiseNot(tirx.Cast("uint32", node.a))
        return tirx.Cast(dtype_of(node), wide) if _is_promoted(node) else node

    rules = [
        ((tirx.Add, tirx.Sub, tirx.Mul, tirx.LShift), arithmetic),
        (tirx.Div, quotient),
        (tirx.BitwiseNot, complement),
    ]
    return tvm.IRModule(
        {name: func.with_body(structural_map(func.body, rules)) for name, func in module.functions.items()}
    )


def _is_promoted(node: PrimExpr) -> bool:
    """Whether C calculates a number in ``int`` that is of a shorter type."""
    dtype = tvm.DataType(dtype_of(node))
    return dtype.lanes == 1 and dtype.bits in (8, 16) and str(dtype).startswith(("int", "uint"))


def _calculated_in(wide: str, node: PrimExpr) -> PrimExpr:
    return tirx.Cast(dtype_of(node), type(node)(tirx.Cast(wide, node.a), tirx.Cast(wide, node.b)))
