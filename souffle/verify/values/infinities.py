"""Arithmetic that leaves the numbers: a quotient by zero, or an infinity in a sum or a product.

A field has an inverse of everything but zero, and no infinity that swallows what is added to it. So what is no number
in a text may cancel in the field: of ``sum((x - m0) * (x - m))`` with the mean ``m`` any ``m0`` gives the same sum,
also one that was divided by zero. It is looked for in what is written: a text may have it only where its definition
does.

Of whole numbers, quotients by what is calculated of places, not of data, are looked at where a text is run.
"""

from __future__ import annotations

import math
from typing import Any

from tvm import tirx

from souffle.tvm_calls import structural_walk
from souffle.tvm_compat import dtype_of

__all__ = ["DIVISIONS", "divides_by_places", "leaves_numbers"]

DIVISIONS = (tirx.Div, tirx.Mod, tirx.FloorDiv, tirx.FloorMod)
_ARITHMETIC = (tirx.Add, tirx.Sub, tirx.Mul, tirx.Div)


def leaves_numbers(root: Any) -> str | None:
    """The first operation on floating-point numbers whose result is none, whatever its other operand is, in words.

    Parameters
    ----------
    root : expression or statement

    Returns
    -------
    str, or None
        Not the operation itself: TVM prints none that divides by zero.
    """
    found: list[str] = []

    def see(node: Any) -> None:
        left, right = _literal(node.a), _literal(node.b)
        if isinstance(node, tirx.Div) and right == 0:
            found.append("a number is divided by the literal 0")
        elif any(literal is not None and not math.isfinite(literal) for literal in (left, right)):
            found.append(f"an infinite literal is an operand of {type(node).__name__}")

    structural_walk(root, (_ARITHMETIC, see))
    return found[0] if found else None


def divides_by_places(node: Any) -> bool:
    """Whether an operation is a quotient or a rest of whole numbers whose divisor is not a literal other than zero."""
    return isinstance(node, DIVISIONS) and "float" not in dtype_of(node) and not _known(node.b)


def _known(node: Any) -> bool:
    while isinstance(node, (tirx.Cast, tirx.Broadcast)):
        node = node.value
    return isinstance(node, tirx.IntImm) and int(node.value) != 0


def _literal(node: Any) -> float | None:
    """The value of a floating-point literal, converted or of many lanes too."""
    while isinstance(node, (tirx.Cast, tirx.Broadcast)):
        node = node.value
    return float(node.value) if isinstance(node, tirx.FloatImm) else None
