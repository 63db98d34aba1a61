"""Maps of indices, inverted: from where something is read to the point that reads it.

TVM inverts maps of sums, quotients and remainders, but for a map that goes around the end of an axis, as the windows
of a shifted image do, its answer is that of the map without the rotation. So rotations are taken out before, and every
answer is tried at all points::

    place = ((i + 53) % 56 // 7, (i + 4) % 7)        0 ≤ i < 56
          = (j // 7, j % 7)                          j = (i + 53) % 56,  i = (j + 3) % 56

A rotation is a bijection of its axis. In ``(i + a) % m`` with ``m`` a divisor of the axis, and in ``(i + a) // d % m``
with ``d * m`` all of it, ``i`` may be put in terms of ``j``: both sides are the same modulo the axis.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import tvm
from tvm import tirx
from tvm.ir import Range

from souffle.index.arrays import Value, apply, constant
from souffle.index.operations import operands_of, operation_of
from souffle.tvm_calls import structural_map
from souffle.tvm_compat import PrimExpr, cast, collect, dtype_of, variables

__all__ = ["IndexAxis", "inverse_map"]

IndexAxis = tuple[tirx.Var, int]
"""An axis: its variable, over ``[0, extent)``."""

Inverse = Callable[[Sequence[PrimExpr]], list[PrimExpr]]
"""From a place, one expression for each of the map's, to the values of its axes there."""

_MOST_POINTS = 1 << 24
"""Points at which an inverse is tried; a larger map is not inverted where its expressions join all of its axes."""


def inverse_map(axes: Sequence[IndexAxis], expressions: Sequence[PrimExpr]) -> Inverse | None:
    """The inverse of a map, which is one; ``None`` if none is found.

    Parameters
    ----------
    axes : sequence of IndexAxis
    expressions : sequence of expression
        Over the axes, all integers, each from 0 on.
    """
    rotations = [_rotation(axis, expressions) for axis in axes]
    straight, given = list(axes), tuple(expressions)
    for number, (axis, shift) in enumerate(zip(axes, rotations, strict=True)):
        rotated = _without(axis, shift, given) if shift else None
        if rotated is None:
            rotations[number] = 0
        else:
            straight[number], given = rotated
    try:
        index_map = tirx.IndexMap([var for var, _ in straight], list(given), None)
        inverse = index_map.inverse([Range(0, extent) for _, extent in straight])
    except (ValueError, RuntimeError):
        return None

    def back(place: Sequence[PrimExpr]) -> list[PrimExpr]:
        values = list(inverse.map_indices(list(place)))
        return [
            tirx.floormod(value + (extent - shift), extent) if shift else value
            for value, shift, (_, extent) in zip(values, rotations, axes, strict=True)
        ]

    return back if _is_inverse(axes, expressions, back) else None


def _is_inverse(axes: Sequence[IndexAxis], expressions: Sequence[PrimExpr], back: Inverse) -> bool:
    """Whether each point comes back from where it is read."""
    known: list[tuple[tirx.Var, Value]] = []
    for number, (var, extent) in enumerate(axes):
        shape = [1] * len(axes)
        shape[number] = extent
        known.append((var, Value.of(np.arange(extent, dtype=np.int64).reshape(shape), ("axis", number))))
    places = [tirx.Var(f"place_{n}", dtype_of(e)) for n, e in enumerate(expressions)]
    at = []
    for place, expression in zip(places, expressions, strict=True):
        value = _evaluated(expression, known)
        if value is None:
            return False
        at.append((place, value))
    for (_, own), found in zip(known, back(places), strict=True):
        value = _evaluated(found, at)
        if value is None or not np.array_equal(*np.broadcast_arrays(own.array, value.array)):
            return False
    return True


def _evaluated(expression: PrimExpr, known: Sequence[tuple[tirx.Var, Value]]) -> Value | None:
    """An expression at all points; ``None`` if that is not known, or they are too many."""
    if isinstance(expression, tirx.Var):
        return next((value for var, value in known if var.same_as(expression)), None)
    if isinstance(expression, tirx.IntImm):
        return constant(int(expression.value))
    if isinstance(expression, tirx.Cast):
        return _evaluated(expression.value, known)
    operands = [_evaluated(operand, known) for operand in operands_of(expression)]
    if not operands or any(operand is None for operand in operands):
        return None
    if np.prod(np.broadcast_shapes(*(operand.shape for operand in operands)), dtype=np.int64) > _MOST_POINTS:
        return None
    value = apply(operation_of(expression), *operands)
    return None if value.array is None else value


def _rotation(axis: IndexAxis, expressions: Sequence[PrimExpr]) -> int:
    """By how much an axis goes around its end; 0 if it does not."""
    known = [_of_axis(node, axis) for e in expressions for node in collect(e, tirx.FloorMod)]
    whole = (part for part in known if part is not None and part.modulus == axis[1])
    return next((part.shift for part in whole if part.shift), 0)


def _without(
    axis: IndexAxis, shift: int, expressions: Sequence[PrimExpr]
) -> tuple[IndexAxis, tuple[PrimExpr, ...]] | None:
    """The axis and the expressions after a rotation; ``None`` if some part of them is before it."""
    var, extent = axis
    new = tirx.Var(f"{var.name}_around", dtype_of(var))
    analyzer = tvm.sym.Analyzer()
    analyzer.bind(new, Range(0, extent))

    def rewrite(node: tirx.FloorMod) -> PrimExpr:
        part = _of_axis(node, axis)
        if part is None or extent % part.modulus:
            return node
        left = (part.shift - shift) % part.modulus
        around = tirx.floormod(new + tirx.const(left, dtype_of(new)), tirx.const(part.modulus, dtype_of(new)))
        return cast(tirx.floordiv(around, tirx.const(part.divisor, dtype_of(new))), dtype_of(node))

    made = tuple(structural_map(e, (tirx.FloorMod, rewrite)) for e in expressions)
    if any(v.same_as(var) for e in made for v in variables(e)):
        return None
    return (new, extent), tuple(analyzer.simplify(e) for e in made)


@dataclass(frozen=True)
class _Part:
    """``(i + shift) % modulus // divisor``."""

    shift: int
    modulus: int
    divisor: int = 1


def _of_axis(node: tirx.FloorMod, axis: IndexAxis) -> _Part | None:
    """A remainder as one of an axis, if it is such."""
    if not isinstance(node.b, tirx.IntImm):
        return None
    modulus, inner, divisor = int(node.b.value), node.a, 1
    if isinstance(inner, tirx.FloorDiv) and isinstance(inner.b, tirx.IntImm):
        divisor, inner = int(inner.b.value), inner.a
    shift = _shift(inner, axis[0])
    # (i + a) // d % m is (i + a) % (d * m) // d.
    return None if shift is None else _Part(shift % (modulus * divisor), modulus * divisor, divisor)


def _shift(expression: PrimExpr, var: tirx.Var) -> int | None:
    if expression.same_as(var):
        return 0
    if not isinstance(expression, (tirx.Add, tirx.Sub)) or not isinstance(expression.b, tirx.IntImm):
        return None
    sign = 1 if isinstance(expression, tirx.Add) else -1
    return sign * int(expression.b.value) if expression.a.same_as(var) else None
