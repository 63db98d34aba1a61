"""Pointers that a kernel hands to its stages: so many bytes behind a parameter, or one of two that a step chooses."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from souffle.verify.expressions import Axis, Expr, Undecided, const, evaluate, operation

__all__ = ["Choice", "Pointer", "moved", "number_at", "resolved"]


@dataclass(frozen=True, eq=False)
class Pointer:
    """So many bytes behind a parameter of the kernel, to elements of `unit` bytes."""

    parameter: int
    unit: int
    offset: Expr


@dataclass(frozen=True, eq=False)
class Choice:
    """One of two pointers."""

    condition: Expr
    one: Pointer | Choice
    other: Pointer | Choice


def moved(pointer: Pointer | Choice, offset: Expr) -> Pointer | Choice:
    """A pointer some elements further."""
    if isinstance(pointer, Choice):
        return Choice(pointer.condition, moved(pointer.one, offset), moved(pointer.other, offset))
    scaled = operation("mul", offset, const(pointer.unit))
    return Pointer(pointer.parameter, pointer.unit, operation("add", pointer.offset, scaled))


def number_at(expr: Expr, values: dict[Axis, np.int64]) -> int:
    """A number of the kernel at one step of its loops.

    Raises
    ------
    Undecided
        If it depends on more than that.
    """
    if expr.opaque or not all(a in values for a in expr.axes):
        raise Undecided(f"the value of {expr} in a kernel")
    return expr.value if expr.op == "const" else int(evaluate(expr, values, {}))


def resolved(pointer: Pointer | Choice, values: dict[Axis, np.int64]) -> tuple[int, int]:
    """The parameter, and the bytes behind it, at one step of the kernel's loops."""
    while isinstance(pointer, Choice):
        pointer = pointer.one if number_at(pointer.condition, values) else pointer.other
    return pointer.parameter, number_at(pointer.offset, values)
