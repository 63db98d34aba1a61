"""Axes that are read around their end, as the windows of a shifted image are: rotations taken out of index expressions.

::

    place = ((i + 53) % 56 // 7, (i + 4) % 7)        0 ≤ i < 56
          = (j // 7, j % 7)                          j = (i + 53) % 56,  i = (j + 3) % 56

A rotation is a bijection of its axis. In ``(i + a) % m`` with ``m`` a divisor of the axis, and in ``(i + a) // d % m``
with ``d * m`` all of it, ``i`` may be put in terms of ``j``: both sides are the same modulo the axis. What is left is
a place that TVM's inverse of index maps knows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import tvm
import tvm_ffi
from tvm import tirx

from souffle.schedule.gpu.forms.contraction_expressions import Axis, depends
from souffle.tvm_compat import PrimExpr, collect

__all__ = ["RotatedAxes", "rotated_axes"]


@dataclass(frozen=True, eq=False)
class RotatedAxes:
    """Expressions over axes of which some were rotated.

    Attributes
    ----------
    axes : tuple of Axis
        In the place of those that were given.
    shifts : tuple of int
        ``j = (i + shift) % extent`` for each; 0 where an axis is as it was.
    expressions : tuple of expression
    """

    axes: tuple[Axis, ...]
    shifts: tuple[int, ...]
    expressions: tuple[PrimExpr, ...]

    def back(self, values: Sequence[PrimExpr]) -> list[PrimExpr]:
        """The values of the axes that were given, from those of `axes`."""
        return [
            tirx.floormod(value + (axis.extent - shift), axis.extent) if shift else value
            for axis, shift, value in zip(self.axes, self.shifts, values, strict=True)
        ]


def rotated_axes(axes: Sequence[Axis], expressions: Sequence[PrimExpr]) -> RotatedAxes | None:
    """The rotations of axes in some expressions; ``None`` if there are none."""
    given = tuple(expressions)
    found, shifts = [], []
    for axis in axes:
        rotated = _rotated(axis, given)
        if rotated is None:
            found.append(axis)
            shifts.append(0)
        else:
            new, shift, given = rotated
            found.append(new)
            shifts.append(shift)
    return RotatedAxes(tuple(found), tuple(shifts), given) if any(shifts) else None


def _rotated(axis: Axis, expressions: Sequence[PrimExpr]) -> tuple[Axis, int, tuple[PrimExpr, ...]] | None:
    known = [_of_axis(node, axis) for e in expressions for node in collect(e, tirx.FloorMod)]
    whole = (part for part in known if part is not None and part.modulus == axis.extent)
    shift = next((part.shift for part in whole if part.shift), None)
    if shift is None:
        return None
    new = Axis(tirx.Var(f"{axis.var.name}_around", "int32"), axis.extent)
    analyzer = tvm.sym.Analyzer()

    def rewrite(node: tirx.FloorMod) -> PrimExpr:
        part = _of_axis(node, axis)
        if part is None or axis.extent % part.modulus:
            return node
        left = (part.shift - shift) % part.modulus
        around = analyzer.simplify(tirx.floormod(new.var + left, part.modulus)) if left else new.var
        if part.divisor > 1:
            return tirx.floordiv(around, part.divisor)
        return around if part.modulus == axis.extent else tirx.floormod(around, part.modulus)

    made = tuple(tvm_ffi.structural_map(e, (tirx.FloorMod, rewrite)) for e in expressions)
    if any(depends(e, axis) for e in made):
        return None
    analyzer.bind(new.var, tvm.ir.Range(0, new.extent))
    return new, shift, tuple(analyzer.simplify(e) for e in made)


@dataclass(frozen=True)
class _Part:
    """``(i + shift) % modulus // divisor``."""

    shift: int
    modulus: int
    divisor: int = 1


def _of_axis(node: tirx.FloorMod, axis: Axis) -> _Part | None:
    """A remainder as one of an axis, if it is such."""
    if not isinstance(node.b, tirx.IntImm):
        return None
    modulus, inner, divisor = int(node.b.value), node.a, 1
    if isinstance(inner, tirx.FloorDiv) and isinstance(inner.b, tirx.IntImm):
        divisor, inner = int(inner.b.value), inner.a
    shift = _shift(inner, axis)
    if shift is None:
        return None
    # (i + a) // d % m is (i + a) % (d * m) // d.
    return _Part(shift % (modulus * divisor), modulus * divisor, divisor)


def _shift(expression: PrimExpr, axis: Axis) -> int | None:
    if expression.same_as(axis.var):
        return 0
    if not isinstance(expression, (tirx.Add, tirx.Sub)) or not isinstance(expression.b, tirx.IntImm):
        return None
    sign = 1 if isinstance(expression, tirx.Add) else -1
    return sign * int(expression.b.value) if expression.a.same_as(axis.var) else None
