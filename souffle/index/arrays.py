"""Index expressions worked out on NumPy arrays, for many points at once.

Of a lowered stage, for all threads of a few tiles: a :class:`Value` is an array whose last axes are sampled tiles and
threads, and which has one more axis in front for each loop around it. An axis along which it does not vary has extent
1, so an array's shape says what it depends on: how often a compiler that moves invariant code out of loops evaluates
it. Values that depend on what a tensor holds are not known; they keep their shape alone.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from souffle.index.expression import Node

__all__ = ["Value", "apply", "constant", "joined_shape", "tabulate"]

Shape = tuple[int, ...]

_NUMPY_TYPE = re.compile("bool|u?int(8|16|32|64)|float(16|32|64)")


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


def _truncated(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    quotient = np.abs(a) // np.maximum(np.abs(b), 1)
    return np.where((a < 0) != (b < 0), -quotient, quotient)


def _floored(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return a // np.where(b == 0, 1, b)


_ON_INTEGERS = {
    "div": _truncated,
    "mod": lambda a, b: a - b * _truncated(a, b),
    "floordiv": _floored,
    "floormod": lambda a, b: a - b * _floored(a, b),
    "and": np.logical_and,
    "or": np.logical_or,
    "not": np.logical_not,
    "bitand": np.bitwise_and,
    "bitor": np.bitwise_or,
    "bitxor": np.bitwise_xor,
    "bitnot": np.bitwise_not,
    "shl": np.left_shift,
    "shr": np.right_shift,
}
_ON_REALS = {
    "div": np.divide,
    "floor": np.floor,
    "ceil": np.ceil,
    "trunc": np.trunc,
    "nearbyint": np.rint,
    # TVM's round is to even, whatever C calls it.
    "round": np.rint,
    "roundeven": np.rint,
}
_ON_NUMBERS = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "min": np.minimum,
    "max": np.maximum,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "eq": np.equal,
    "ne": np.not_equal,
    "choose": np.where,
}
_INTEGERS = _ON_NUMBERS | _ON_INTEGERS
_REALS = _ON_NUMBERS | _ON_REALS


def apply(operation: str, *operands: Value) -> Value:
    """The result of an integer or logical operation; unknown for one that is not modelled."""
    shape = joined_shape(*(operand.shape for operand in operands))
    function = _INTEGERS.get(operation)
    if function is None or any(operand.array is None for operand in operands):
        return Value.unknown(shape)
    key = (operation, *(operand.key for operand in operands))
    return Value.of(function(*(operand.array for operand in operands)), key)


def tabulate(nodes: Sequence[Node], order: Sequence[int], axis: np.ndarray) -> np.ndarray | None:
    """The last node of `order`, an integer, at all values of the one axis that it depends on.

    Each step is rounded to its own type.

    Parameters
    ----------
    nodes : sequence of Node
    order : sequence of int
        The nodes that it is computed from and itself, in order.
    axis : array of int

    Returns
    -------
    array of int64, or None
        ``None`` where it holds an operation that is not modelled.
    """
    known: dict[int, np.ndarray] = {}
    for number in order:
        node = nodes[number]
        args = [known[arg] for arg in node.args]
        functions = _REALS if node.dtype.startswith("float") else _INTEGERS
        if not _NUMPY_TYPE.fullmatch(node.dtype):
            return None
        if node.kind == "axis":
            value = axis
        elif node.kind in ("int", "float"):
            value = np.full(axis.shape, node.value)
        elif node.kind == "cast":
            value = args[0]
        else:
            function = functions.get(node.value if node.kind == "call" else node.kind)
            if function is None:
                return None
            value = function(*args)
        known[number] = value.astype(node.dtype)
    return known[order[-1]].astype(np.int64)
