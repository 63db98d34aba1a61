"""Integers of TensorIR, over many lanes at once: exact, and those of 8 and 16 bits wrap around."""

from __future__ import annotations

import operator
from collections.abc import Callable

import numpy as np
import tvm
from tvm import tirx

from souffle.verify.values.field import Number

__all__ = ["INTEGER_OPERATORS", "as_integers", "in_type", "loses_nothing", "wrapped"]


def _uniform(*values: Number) -> bool:
    return all(isinstance(v, int) for v in values)


def _truncated_quotient(a: Number, b: Number) -> Number:
    if _uniform(a, b):
        return (abs(a) // abs(b)) * (1 if (a < 0) == (b < 0) else -1) if b else 0
    if isinstance(b, int) and b > 0:
        return (a + ((a >> 63) & (b - 1))) // b
    divisor = np.where(b == 0, 1, b)
    quotient = a // divisor
    return quotient + ((quotient < 0) & (quotient * divisor != a))


def _floor_quotient(a: Number, b: Number) -> Number:
    if _uniform(a, b) or isinstance(b, int):
        return a // b if b else 0
    return a // np.where(b == 0, 1, b)


def _truncated_rest(a: Number, b: Number) -> Number:
    return a - _truncated_quotient(a, b) * b


def _floor_rest(a: Number, b: Number) -> Number:
    return a - _floor_quotient(a, b) * b


INTEGER_OPERATORS: dict[type, Callable[[Number, Number], Number]] = {
    tirx.Add: lambda a, b: a + b,
    tirx.Sub: lambda a, b: a - b,
    tirx.Mul: lambda a, b: a * b,
    tirx.Div: _truncated_quotient,
    tirx.Mod: _truncated_rest,
    tirx.FloorDiv: _floor_quotient,
    tirx.FloorMod: _floor_rest,
    tirx.Min: lambda a, b: min(a, b) if _uniform(a, b) else np.minimum(a, b),
    tirx.Max: lambda a, b: max(a, b) if _uniform(a, b) else np.maximum(a, b),
    tirx.LShift: operator.lshift,
    tirx.RShift: operator.rshift,
    tirx.BitwiseAnd: lambda a, b: a & b,
    tirx.BitwiseOr: lambda a, b: a | b,
    tirx.BitwiseXor: lambda a, b: a ^ b,
}
"""What operators do to whole numbers, which have no type yet (:func:`in_type`)."""

_WRAPPING_BITS = 16
"""The longest integers that are defined where they leave their type: beyond, no definition says what they are."""


def as_integers(value: Number) -> Number:
    """Truth values as numbers."""
    return value.astype(np.int64) if isinstance(value, np.ndarray) and value.dtype == bool else value


def wrapped(dtype: str, value: Number) -> Number:
    """The number of an integer type that has the same lowest bits."""
    bits = tvm.DataType(dtype).bits
    low = 0 if dtype.startswith("u") else -(1 << (bits - 1))
    return ((value - low) & ((1 << bits) - 1)) + low


def loses_nothing(source: str, target: str) -> bool:
    """Whether an integer type holds every number of another; numbers of 64 bits are taken to fit."""
    old, new = tvm.DataType(source).bits, tvm.DataType(target).bits
    if source.startswith("u") == target.startswith("u"):
        return new >= old
    return new >= 64 or (source.startswith("u") and new > old)


def in_type(dtype: str, operate: Callable[..., Number]) -> Callable[..., Number]:
    """An operation whose result is a number of an integer type, wrapped around where the type is a short one."""
    short = dtype.startswith(("int", "uint")) and tvm.DataType(dtype).bits <= _WRAPPING_BITS
    return (lambda *operands: wrapped(dtype, operate(*operands))) if short else operate
