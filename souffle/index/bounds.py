"""The least and the greatest value of index expressions, as the whole numbers that they are to the compiler.

Numbers that data decides may be anything that their type holds, and wrap around as they do in ONNX.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import tvm
from tvm import tirx

from souffle.index.operations import call_name, operation_of
from souffle.tvm_compat import PrimExpr, choice_parts, dtype_of

__all__ = ["Bounder", "Bounds", "fits", "is_number", "limits", "scalar_type"]

_TRUTHS = frozenset(["lt", "le", "gt", "ge", "eq", "ne", "and", "or", "not"])


class Bounds(NamedTuple):
    """The least and the greatest value, and whether data decides among them."""

    low: int
    high: int
    data: bool


class Bounder:
    """Bounds expressions by the ranges of their variables.

    Parameters
    ----------
    ranges : mapping of Var to pairs of expressions
        The least value and the extent of each loop over a variable.
    values : mapping of Var to expressions
        What each name stands for.
    """

    def __init__(
        self,
        ranges: Mapping[tirx.Var, Sequence[tuple[PrimExpr, PrimExpr]]],
        values: Mapping[tirx.Var, Sequence[PrimExpr]],
    ) -> None:
        self.ranges = ranges
        self.values = values
        # By address, which no other node has while these are held: nodes are slow to compare.
        self._known: dict[int, tuple[PrimExpr, Bounds]] = {}

    def __call__(self, node: PrimExpr) -> Bounds:
        """What a number, or each of a vector, may be as a whole number."""
        if isinstance(node, tirx.IntImm):
            return Bounds(int(node.value), int(node.value), False)
        address = node.__chandle__()
        known = self._known.get(address)
        if known is None:
            known = self._known[address] = node, self._of(node)
        return known[1]

    def _of(self, node: PrimExpr) -> Bounds:
        operation = operation_of(node)
        if operation == "variable":
            parts = [self._loop(*pair) for pair in self.ranges.get(node, ())]
            parts += [self(value) for value in self.values.get(node, ())]
            return _union(parts) if parts and _is_integer(node) else _any(node)
        if operation in _TRUTHS:
            return Bounds(0, 1, True)
        if not _is_integer(node):
            return _any(node)
        if operation in _ON_BOUNDS or operation in _SHIFTS:
            return _of_operation(operation, self(node.a), self(node.b), scalar_type(node))
        if operation == "choose":
            return _union([self(value) for value in choice_parts(node)[1:]])
        if operation == "cast" and _is_integer(node.value):
            inner = self(node.value)
            return inner if fits(inner, scalar_type(node)) else _any(node)._replace(data=inner.data)
        if operation == "broadcast":
            return self(node.value)
        if operation == "ramp":
            base, stride, last = self(node.base), self(node.stride), int(node.lanes) - 1
            steps = [0, stride.low * last, stride.high * last]
            return Bounds(base.low + min(steps), base.high + max(steps), base.data or stride.data)
        if operation == "let":
            return self(node.body)
        if operation == "call" and call_name(node) == "likely":
            return self(node.args[0])
        return _any(node)

    def _loop(self, low: PrimExpr, extent: PrimExpr) -> Bounds:
        first, count = self(low), self(extent)
        return Bounds(first.low, max(first.low, first.high + count.high - 1), first.data or count.data)


def _of_operation(operation: str, a: Bounds, b: Bounds, dtype: str) -> Bounds:
    if operation in _SHIFTS and 0 <= b.low <= b.high < 63:
        operation, b = _SHIFTS[operation], Bounds(1 << b.low, 1 << b.high, b.data)
    ends = _ON_BOUNDS[operation](a, b) if operation in _ON_BOUNDS else None
    if ends is None:
        return Bounds(*limits(dtype), True)
    result = Bounds(*ends, a.data or b.data)
    if operation in ("add", "sub", "mul"):
        # Of integers that nothing bounds, or that wrap around.
        least, most = limits(dtype)
        free = any(side.data and not least < side.low <= side.high < most for side in (a, b))
        if (free or dtype.startswith("u")) and not fits(result, dtype):
            return result._replace(low=least, high=most)
    return result


Ends = tuple[int, int]


def _of_corners(corner: Callable[[int, int], int], a: Bounds, b: Bounds) -> Ends:
    """Of what rises or falls with each of its operands."""
    values = [corner(x, y) for x in (a.low, a.high) for y in (b.low, b.high)]
    return min(values), max(values)


def _quotient(divide: Callable[[int, int], int], a: Bounds, b: Bounds) -> Ends:
    if b.low > 0:
        return _of_corners(divide, a, b)
    most = max(abs(a.low), abs(a.high))
    return -most, most


def _truncated(x: int, y: int) -> int:
    return x // y if x >= 0 else -(-x // y)


def _remainder(a: Bounds, b: Bounds, *, floored: bool) -> Ends:
    if a.low >= 0 and a.high < b.low:
        return a.low, a.high
    most = max(abs(b.low), abs(b.high)) - 1
    return (0 if b.low > 0 and (floored or a.low >= 0) else -most), most


def _of_bits(a: Bounds, b: Bounds) -> Ends | None:
    """Of two numbers that are not negative; of one in a conjunction, which it bounds alone."""
    return (0, (1 << max(a.high, b.high).bit_length()) - 1) if a.low >= 0 and b.low >= 0 else None


def _conjunction(a: Bounds, b: Bounds) -> Ends | None:
    positive = [side.high for side in (a, b) if side.low >= 0]
    return (0, min(positive)) if positive else None


_ON_BOUNDS: dict[str, Callable[[Bounds, Bounds], Ends | None]] = {
    "add": lambda a, b: (a.low + b.low, a.high + b.high),
    "sub": lambda a, b: (a.low - b.high, a.high - b.low),
    "mul": partial(_of_corners, operator.mul),
    "div": partial(_quotient, _truncated),
    "floordiv": partial(_quotient, operator.floordiv),
    "mod": partial(_remainder, floored=False),
    "floormod": partial(_remainder, floored=True),
    "min": partial(_of_corners, min),
    "max": partial(_of_corners, max),
    "bitand": _conjunction,
    "bitor": _of_bits,
    "bitxor": _of_bits,
}
_SHIFTS = {"shl": "mul", "shr": "floordiv"}


def _union(parts: Sequence[Bounds]) -> Bounds:
    return Bounds(min(p.low for p in parts), max(p.high for p in parts), any(p.data for p in parts))


def scalar_type(node: PrimExpr) -> str:
    """The type of a number, or of each of a vector."""
    return _scalar_type(dtype_of(node))


@cache
def _scalar_type(dtype: str) -> str:
    return str(tvm.DataType(dtype).with_lanes(1))


@cache
def limits(dtype: str) -> tuple[int, int]:
    """The least and the greatest number of an integer type."""
    if dtype.startswith("bool"):
        return 0, 1
    bits = tvm.DataType(dtype).bits
    return (0, 2**bits - 1) if dtype.startswith("u") else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)


def fits(bounds: Bounds, dtype: str) -> bool:
    """Whether an integer type holds whatever is within some bounds."""
    least, most = limits(dtype)
    return least <= bounds.low and bounds.high <= most


def is_number(node: Any) -> bool:
    """Whether a node is a number, or a vector of them, and no pointer."""
    return isinstance(getattr(node, "ty", None), tvm.ir.PrimType)


def _is_integer(node: Any) -> bool:
    return is_number(node) and dtype_of(node).startswith(("int", "uint", "bool"))


def _any(node: Any) -> Bounds:
    return Bounds(*(limits(scalar_type(node)) if _is_integer(node) else (0, 0)), True)
