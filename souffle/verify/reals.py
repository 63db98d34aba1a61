"""Floating-point numbers that are calculated from whole ones alone, such as where a resized image's elements lie.

Each is a table over all values of the whole numbers in it, in the precision of its type, with rounding to nearest. nvcc
may contract a product and a sum to one instruction, which does not round the product, and it may do so in one place and
not in another. So a table holds the least and the greatest number that there may be: `near`, and `far` for what adds
it, where a product may be the exact one, too. All operations rise or fall with each operand; so what they make of the
ends are ends. A number that is not finite is none of those that are known.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np

from souffle.verify.expressions import Expr, compare, interval, tabulated, unknown

__all__ = ["KNOWN", "Ends", "calculated", "chosen", "compared", "counted", "literal", "operated", "truncated"]

Ends = tuple[np.ndarray, np.ndarray]
"""`near` and `far`, each with an axis before all others for the least and the greatest number."""

_MOST = 1 << 18
"""Numbers in a table."""

_EVALUATED = 2.0**62
"""Beyond, no whole number is evaluated."""


def _half_away(x: np.ndarray) -> np.ndarray:
    whole = np.trunc(x)
    return whole + np.copysign(np.abs(x - whole) >= 0.5, x)


_WHOLE = {
    "floor": np.floor,
    "ceil": np.ceil,
    "trunc": np.trunc,
    "round": _half_away,
    "rint": np.rint,
    "nearbyint": np.rint,
}
"""What C calls the functions that round to whole numbers."""

KNOWN = frozenset({*_WHOLE, "cast", "select", "add", "sub", "mul", "div", "min", "max"})
"""Operations."""


def literal(value: float, dtype: str) -> Expr | None:
    """A number of the text."""
    return _real((), _rounded(np.array([value, value]), dtype))


def counted(whole: Expr, dtype: str) -> Expr | None:
    """A whole number in a floating-point type; ``None`` where data decides it, or there are too many."""
    low, high = interval(whole)
    if whole.opaque or high - low >= _MOST or max(-low, high) > _EVALUATED:
        return None
    values = _rounded(np.arange(low, high + 1, dtype=np.int64), dtype)
    return _real((), np.repeat(values, 2)) if whole.op == "const" else _real((whole,), np.stack([values, values]))


def calculated(op: str, dtype: str, *operands: Expr) -> Expr | None:
    """An operation in a type, or a cast to it; ``None`` if nothing is known of what it gives."""
    aligned = _aligned(operands)
    if aligned is None or op not in KNOWN:
        return None
    leaves, ends = aligned
    return _real(leaves, *operated(op, dtype, *ends))


def operated(op: str, dtype: str, *operands: Ends) -> Ends:
    """What one of :data:`KNOWN` makes of numbers, arrays with as many axes; no number where nothing is known of it."""
    (near, far), *others = operands
    with np.errstate(all="ignore"):
        if op in _WHOLE:
            return (_WHOLE[op](near),) * 2
        if op == "cast":
            return _rounded(near, dtype), _rounded(far, dtype)
        if op == "select":
            one, other = (np.where(near != 0, a, b) for a, b in zip(*others, strict=True))
            return one, other
        (near_other, far_other) = others[0]
        if op in ("add", "sub"):
            return (_sum(far, far_other if op == "add" else -far_other[::-1], dtype),) * 2
        if op in ("min", "max"):
            choose = np.minimum if op == "min" else np.maximum
            return choose(near, near_other), choose(far, far_other)
        if op == "mul":
            return _product(near, near_other, dtype)
        divisor = np.where((near_other[0] <= 0) & (near_other[1] >= 0), np.nan, near_other)
        return (_ends(np.divide, near.astype(dtype), divisor.astype(dtype)).astype(np.float64),) * 2


def chosen(condition: Expr, one: Expr, other: Expr) -> Expr | None:
    """`one` where a condition holds, else `other`."""
    return calculated("select", "float64", counted(condition, "float64"), one, other)


def compared(op: str, one: Expr, other: Expr) -> Expr | None:
    """Whether one number is less than another, say; ``None`` if the machine may find this or that."""
    aligned = _aligned((one, other))
    if aligned is None or any((real.value[0][0] != real.value[0][1]).any() for real in (one, other)):
        return None
    leaves, ((first, _), (second, _)) = aligned
    return tabulated(leaves, compare(op, first[0], second[0]))


def truncated(real: Expr) -> Expr | None:
    """The whole number that a cast to integers gives, in any type that holds it; ``None`` if none does."""
    if real.op != "real" or np.abs(real.value[0]).max() > _EVALUATED:
        return None
    low, high = np.trunc(real.value[0]).astype(np.int64)
    return tabulated(real.args, low) if (low == high).all() else unknown(int(low.min()), int(high.max()))


def _real(leaves: tuple[Expr, ...], near: np.ndarray, far: np.ndarray | None = None) -> Expr | None:
    far = near if far is None else far
    return Expr("real", leaves, (near, far)) if np.isfinite(far).all() else None


def _aligned(
    reals: Sequence[Expr | None],
) -> tuple[tuple[Expr, ...], list[tuple[np.ndarray, np.ndarray]]] | None:
    """The tables of some numbers over the whole numbers in any of them; ``None`` if one is none, or it is too many."""
    if any(real is None or real.op != "real" for real in reals):
        return None
    leaves = tuple(sorted({leaf for real in reals for leaf in real.args}, key=id))
    extents = [interval(leaf)[1] - interval(leaf)[0] + 1 for leaf in leaves]
    if prod(extents) > _MOST:
        return None
    shapes = ([2, *(n if leaf in real.args else 1 for leaf, n in zip(leaves, extents, strict=True))] for real in reals)
    return leaves, [
        tuple(ends.reshape(shape) for ends in real.value) for real, shape in zip(reals, shapes, strict=True)
    ]


def _rounded(values: np.ndarray, dtype: str) -> np.ndarray:
    with np.errstate(over="ignore"):
        return values.astype(dtype).astype(np.float64)


def _ends(operate: np.ufunc, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The least and the greatest of what an operation gives that rises or falls with each operand."""
    corners = [operate(one, other) for one in a for other in b]
    return np.stack([np.minimum.reduce(corners), np.maximum.reduce(corners)])


def _beyond(ends: np.ndarray, where: tuple[np.ndarray, np.ndarray]) -> np.ndarray:
    """The number below the lower end and the one above the upper, where asked for."""
    further = (np.nextafter(end, side) for end, side in zip(ends, (-np.inf, np.inf), strict=True))
    return np.stack([np.where(w, f, end) for w, f, end in zip(where, further, ends, strict=True)])


def _sum(a: np.ndarray, b: np.ndarray, dtype: str) -> np.ndarray:
    total = a + b
    if dtype == "float64":
        return total
    # What float64 leaves of the exact sum decides where float32 rounds what lies half-way.
    part = total - a
    rest = (a - (total - part)) + (b - part)
    return _rounded(_beyond(total, (rest[0] < 0, rest[1] > 0)), dtype)


def _product(a: np.ndarray, b: np.ndarray, dtype: str) -> tuple[np.ndarray, np.ndarray]:
    product = _ends(np.multiply, a, b)
    near = _rounded(product, dtype)
    # float64 holds the product of two numbers that float32 holds.
    inexact = (_rounded(a, "float32") != a).any(axis=0) | (_rounded(b, "float32") != b).any(axis=0)
    exact = _beyond(product, (inexact, inexact))
    return near, np.stack([np.minimum(exact[0], near[0]), np.maximum(exact[1], near[1])])
