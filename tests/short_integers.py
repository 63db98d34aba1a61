"""Random expressions of integers of 8 and 16 bits, with what NumPy makes of them: both are built side by side."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from tvm import tirx

from souffle.tvm_compat import PrimExpr

__all__ = ["SHORT", "Expression", "Grower", "extreme_values"]

SHORT = ("int8", "uint8", "int16", "uint16")

Arrays = tuple[np.ndarray, ...]


@dataclass(frozen=True, eq=False)
class Expression:
    """An expression of one element of each input, and of whole arrays.

    Attributes
    ----------
    dtype : str
    of : callable
        Makes the TensorIR of the inputs' elements.
    numpy : callable
        Makes the array of the inputs.
    """

    dtype: str
    of: Callable[[tuple[PrimExpr, ...]], PrimExpr]
    numpy: Callable[[Arrays], np.ndarray]


def _literal(value: int, dtype: str) -> Expression:
    return Expression(dtype, lambda x: tirx.const(value, dtype), lambda x: np.asarray(value, dtype))


def _applied(
    dtype: str, node: Callable[..., PrimExpr], array: Callable[..., np.ndarray], *parts: Expression
) -> Expression:
    def numpy(x: Arrays) -> np.ndarray:
        with np.errstate(all="ignore"):
            return np.asarray(array(*(part.numpy(x) for part in parts))).astype(dtype)

    return Expression(dtype, lambda x: node(*(part.of(x) for part in parts)), numpy)


def _wide(operate: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
    """An operation on arrays that is exact; the result's lowest bits are taken afterwards."""
    return lambda *arrays: operate(*(np.asarray(a).astype(np.int64) for a in arrays))


def _truncated(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    quotient = np.abs(a) // np.abs(b)
    return np.where((a < 0) == (b < 0), quotient, -quotient)


_RING = (
    (tirx.Add, _wide(np.add)),
    (tirx.Sub, _wide(np.subtract)),
    (tirx.Mul, _wide(np.multiply)),
    (tirx.Max, _wide(np.maximum)),
    (tirx.Min, _wide(np.minimum)),
    (tirx.bitwise_and, _wide(np.bitwise_and)),
    (tirx.bitwise_or, _wide(np.bitwise_or)),
    (tirx.bitwise_xor, _wide(np.bitwise_xor)),
)
_DIVISIONS = (
    (tirx.truncdiv, _wide(_truncated)),
    (tirx.truncmod, _wide(np.fmod)),
    (tirx.floordiv, _wide(np.floor_divide)),
    (tirx.floormod, _wide(np.mod)),
)
_COMPARISONS = (
    (tirx.LT, np.less),
    (tirx.LE, np.less_equal),
    (tirx.GT, np.greater),
    (tirx.GE, np.greater_equal),
    (tirx.EQ, np.equal),
    (tirx.NE, np.not_equal),
)


class Grower:
    """Grows random expressions of an element of each of the four types.

    No part is made of literals alone: TVM refuses to convert one that the new type does not hold.
    """

    def __init__(self, seed: int) -> None:
        self._random = np.random.default_rng(seed)

    def expression(self, depth: int = 4) -> Expression:
        """One that is stored as ``float32``, ``int32`` or one of the four types."""
        kind = self._one_of(("float32", "int32", "condition", "short"))
        if kind == "condition":
            return self._converted(self._condition(depth), "float32")
        if kind == "int32":
            return self._long(depth)
        value = self._short(str(self._one_of(SHORT)), depth)
        return value if kind == "short" else self._converted(value, "float32")

    def _one_of(self, choices: tuple) -> object:
        return choices[int(self._random.integers(len(choices)))]

    def _short(self, dtype: str, depth: int) -> Expression:
        kinds = ("ring", "ring", "ring", "division", "shift", "not", "choice", "converted", "narrowed")
        kind = self._one_of(kinds) if depth else "input"
        if kind == "ring":
            node, array = self._one_of(_RING)
            other = self._literal(dtype) if self._random.random() < 0.3 else self._short(dtype, depth - 1)
            return _applied(dtype, node, array, self._short(dtype, depth - 1), other)
        if kind == "division":
            node, array = self._one_of(_DIVISIONS)
            divisors = (2, 3, 4, 5, 7, 8, 100) if dtype.startswith("u") else (2, 3, 4, 5, 7, 100, -2, -3, -7)
            divisor = _literal(int(self._one_of(divisors)), dtype)
            return _applied(dtype, node, array, self._short(dtype, depth - 1), divisor)
        if kind == "shift":
            node, array = self._one_of(((tirx.shift_left, np.left_shift), (tirx.shift_right, np.right_shift)))
            amount = _literal(int(self._random.integers(np.iinfo(dtype).bits)), dtype)
            return _applied(dtype, node, _wide(array), self._short(dtype, depth - 1), amount)
        if kind == "not":
            return _applied(dtype, tirx.bitwise_not, _wide(np.invert), self._short(dtype, depth - 1))
        if kind == "choice":
            sides = (self._short(dtype, depth - 1), self._short(dtype, depth - 1))
            node = self._one_of((tirx.Select, tirx.if_then_else))
            return _applied(dtype, node, np.where, self._condition(depth - 1), *sides)
        if kind == "converted":
            others = tuple(other for other in SHORT if other != dtype)
            return self._converted(self._short(str(self._one_of(others)), depth - 1), dtype)
        if kind == "narrowed":
            return self._converted(self._long(depth - 1), dtype)
        number = SHORT.index(dtype)
        return Expression(dtype, lambda x: x[number], lambda x: x[number])

    def _literal(self, dtype: str) -> Expression:
        least, most = np.iinfo(dtype).min, np.iinfo(dtype).max
        return _literal(int(self._one_of((0, 1, 2, 3, most, most - 1, most // 2, least, least + 1))), dtype)

    def _long(self, depth: int) -> Expression:
        """Of 32 bits, and not near their end, where nothing is defined."""
        value = self._converted(self._short(str(self._one_of(SHORT)), max(depth - 1, 0)), "int32")
        kind = self._one_of(("as it is", "operation", "division"))
        if kind == "operation":
            literal = _literal(int(self._random.integers(-300, 300)), "int32")
            operations = tuple(o for o in _RING if o[0] is not tirx.Mul)
            return _applied("int32", *self._one_of(operations), value, literal)
        if kind == "division":
            literal = _literal(int(self._one_of((2, 3, 4, 5, 16, 100))), "int32")
            return _applied("int32", *self._one_of(_DIVISIONS), value, literal)
        return value

    def _condition(self, depth: int) -> Expression:
        node, array = self._one_of(_COMPARISONS)
        depth = max(depth - 1, 0)
        if self._random.random() < 0.3:
            literal = _literal(int(self._one_of((-1, 0, 1, 127, 128, 255, -128))), "int32")
            return _applied("bool", node, array, self._long(depth), literal)
        dtype = str(self._one_of(SHORT))
        return _applied("bool", node, array, self._short(dtype, depth), self._short(dtype, depth))

    @staticmethod
    def _converted(value: Expression, dtype: str) -> Expression:
        return _applied(dtype, lambda x: tirx.Cast(dtype, x), lambda x: x, value)


def extreme_values(count: int, seed: int) -> Arrays:
    """An array of each type, half of them near the ends of it and near zero."""
    random = np.random.default_rng(seed)
    found = []
    for dtype in SHORT:
        least, most = np.iinfo(dtype).min, np.iinfo(dtype).max
        near = np.array([least, least + 1, most, most - 1, 0, 1, 2, most // 2, most // 2 + 1], np.int64)
        anywhere = random.integers(least, most + 1, count)
        found.append(np.where(random.random(count) < 0.5, random.choice(near, count), anywhere).astype(dtype))
    return tuple(found)
