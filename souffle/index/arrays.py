"""Index expressions of a lowered stage, worked out for all threads of a few tiles at once.

An integer is a NumPy array whose last axes are sampled tiles and threads, and which has one more axis in front for each
loop around it. An axis along which it does not vary has extent 1, so an array's shape says what it depends on: how
often a compiler that moves invariant code out of loops evaluates it. Values that depend on what a tensor holds are not
known; they keep their shape alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

__all__ = ["Value", "apply", "constant", "joined_shape"]

Shape = tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Value:
    """What is known of an expression.

    Attributes
    ----------
    shape : tuple of int
        The axes it varies along.
    array : ndarray or None
        Its values, ``None`` where they depend on a tensor's elements.
    key : object
        Equal for equal expressions of equal variables; ``None`` where they depend on a tensor's elements.
    """

    shape: Shape
    array: np.ndarray | None
    key: object = None

    @classmethod
    def of(cls, array: np.ndarray, key: object) -> Value:
        """A known value."""
        return cls(array.shape, array, key)

    @classmethod
    def unknown(cls, shape: Shape) -> Value:
        """A value that depends on data."""
        return cls(shape, None)

    @property
    def per_thread(self) -> bool:
        """Whether threads have different values."""
        return len(self.shape) > 0 and self.shape[-1] > 1


@lru_cache(maxsize=1024, typed=True)
def constant(number: int | float | bool) -> Value:
    """A number."""
    return Value.of(np.asarray(number), number)


def joined_shape(*shapes: Shape) -> Shape:
    """The axes along which any of some values varies."""
    distinct = {shape for shape in shapes if shape}
    return np.broadcast_shapes(*distinct) if len(distinct) > 1 else next(iter(distinct), ())


def _truncdiv(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    quotient = np.abs(a) // np.maximum(np.abs(b), 1)
    return np.where((a < 0) != (b < 0), -quotient, quotient)


def _floordiv(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return a // np.where(b == 0, 1, b)


_FUNCTIONS = {
    "Add": np.add,
    "Sub": np.subtract,
    "Mul": np.multiply,
    "Div": _truncdiv,
    "Mod": lambda a, b: a - b * _truncdiv(a, b),
    "FloorDiv": _floordiv,
    "FloorMod": lambda a, b: a - b * _floordiv(a, b),
    "Min": np.minimum,
    "Max": np.maximum,
    "LT": np.less,
    "LE": np.less_equal,
    "GT": np.greater,
    "GE": np.greater_equal,
    "EQ": np.equal,
    "NE": np.not_equal,
    "And": np.logical_and,
    "Or": np.logical_or,
    "Not": np.logical_not,
    "shift_left": np.left_shift,
    "shift_right": np.right_shift,
    "bitwise_and": np.bitwise_and,
    "bitwise_or": np.bitwise_or,
    "bitwise_xor": np.bitwise_xor,
    "Select": np.where,
    "if_then_else": np.where,
    "BitwiseAnd": np.bitwise_and,
    "BitwiseOr": np.bitwise_or,
    "BitwiseXor": np.bitwise_xor,
    "LShift": np.left_shift,
    "RShift": np.right_shift,
}


def apply(operation: str, *operands: Value) -> Value:
    """The result of an integer or logical operation; unknown for one that is not modelled."""
    shape = joined_shape(*(operand.shape for operand in operands))
    function = _FUNCTIONS.get(operation)
    if function is None or any(operand.array is None for operand in operands):
        return Value.unknown(shape)
    key = (operation, *(operand.key for operand in operands))
    return Value.of(function(*(operand.array for operand in operands)), key)
