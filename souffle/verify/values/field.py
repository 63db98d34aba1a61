"""Arithmetic of the prime field with 2**31 - 1 elements, on NumPy arrays of int64 and on Python integers alike.

The product of two elements is below 2**62, and ``2**31 = 1`` in the field, so that reducing takes shifts and additions.
Elements are always in ``[0, P)``: equal elements are equal integers.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import numpy as np

__all__ = [
    "HIGHEST",
    "LOWEST",
    "P",
    "Number",
    "Order",
    "add",
    "constant",
    "divide",
    "function_of",
    "inverse",
    "matrix_product",
    "multiply",
    "multiply_add",
    "negative",
    "noise",
    "power",
    "product",
    "residue",
    "subtract",
    "sum_of",
    "whole",
]

P = 2**31 - 1
"""A Mersenne prime."""

_P = np.uint64(P)

Number = int | np.ndarray
"""An element of the field, or an integer, the same everywhere; or an array of them."""

LOWEST = 1_203_415_877
"""What stands for minus infinity and for the least number of a type: first in any :class:`Order`."""

HIGHEST = P - LOWEST
"""Its negative, last in any order."""

_BITS = 2**32 - 1


def residue(value: Number) -> Number:
    """An integer, of any sign, as an element."""
    return value % P


def _below(value: Number) -> Number:
    """An element from an integer in ``[0, 2 P)``; an array is overwritten."""
    if isinstance(value, int):
        return value - P if value >= P else value
    # As unsigned numbers, those that must not be made less become very large.
    own = value.view(np.uint64)
    return np.minimum(own, own - _P, out=own).view(np.int64)


def _folded(wide: Number) -> Number:
    """An element from an integer in ``[0, 2**62)``; an array is overwritten."""
    if isinstance(wide, int):
        return wide % P
    high = wide >> 31
    wide &= P
    wide += high
    own = wide.view(np.uint64)
    np.subtract(own, _P, out=high.view(np.uint64))
    return np.minimum(own, high.view(np.uint64), out=own).view(np.int64)


def add(a: Number, b: Number) -> Number:
    """The sum."""
    return _below(a + b)


def subtract(a: Number, b: Number) -> Number:
    """The difference."""
    less = a - b
    if isinstance(less, int):
        return less % P
    own = less.view(np.uint64)
    return np.minimum(own, own + _P, out=own).view(np.int64)


def negative(a: Number) -> Number:
    """What gives 0 when added."""
    return subtract(0, a)


def multiply(a: Number, b: Number) -> Number:
    """The product."""
    return _folded(a * b)


def multiply_add(a: Number, b: Number, c: Number) -> Number:
    """A product and a number, together."""
    if isinstance(c, int) or np.shape(c) == ():
        return _folded(a * b + c)
    wide = a * b
    if np.shape(wide) == np.broadcast_shapes(np.shape(wide), np.shape(c)) and not isinstance(wide, int):
        wide += c
    else:
        wide = wide + c
    return _folded(wide)


def power(a: Number, exponent: int) -> Number:
    """An element times itself, so many times."""
    result: Number = 1
    while exponent:
        if exponent & 1:
            result = multiply(result, a)
        exponent >>= 1
        if exponent:
            a = multiply(a, a)
    return result


def inverse(a: Number) -> Number:
    """What gives 1 when multiplied; 0 of 0."""
    if isinstance(a, int):
        return pow(a, -1, P) if a else 0
    return power(a, P - 2)


def divide(a: Number, b: Number) -> Number:
    """The quotient."""
    return multiply(a, inverse(b))


def sum_of(a: np.ndarray) -> np.ndarray:
    """The sum along the first axis, of fewer than 2**31 elements."""
    return a.sum(axis=0) % P


def product(a: np.ndarray) -> np.ndarray:
    """The product along the first axis."""
    while len(a) > 1:
        half = len(a) // 2
        rest = a[2 * half :]
        a = np.concatenate([multiply(a[:half], a[half : 2 * half]), rest])
    return a[0]


class Order:
    """A total order of the field: the one in which numbers are compared, the same for all who compare.

    It has nothing to do with that of real numbers, but that the least number of a type comes first and the largest
    last. Then any way to find the largest of some numbers gives the same one.

    Parameters
    ----------
    seed : int
        If it is even, zero comes second, so that what ``max(x, 0)`` is given shows; if odd, zero has any place.
    """

    def __init__(self, seed: int) -> None:
        # An odd factor permutes 32-bit integers.
        random = int(_mixed(np.array([_key("order", seed)], np.uint64))[0])
        self.factor, self.start = (random | 1) & _BITS, random >> 32
        self.zero = 1 if seed % 2 == 0 else None

    def ranks(self, a: Number) -> Number:
        """Integers that compare as the elements do."""
        if isinstance(a, int):
            return int(self.ranks(np.array([a], np.int64))[0])
        # The lower 32 bits of a product do not depend on those that overflow.
        ranks = ((a * np.int64(self.factor) + self.start) & _BITS) + 2
        ranks[a == LOWEST] = 0
        ranks[a == HIGHEST] = _BITS + 3
        if self.zero is not None:
            ranks[a == 0] = self.zero
        return ranks

    def largest(self, a: Number, b: Number) -> Number:
        """The one that comes later."""
        return self._chosen(a, b, self.ranks(a) >= self.ranks(b))

    def least(self, a: Number, b: Number) -> Number:
        """The one that comes earlier."""
        return self._chosen(a, b, self.ranks(a) <= self.ranks(b))

    @staticmethod
    def _chosen(a: Number, b: Number, first: bool | np.ndarray) -> Number:
        return (a if first else b) if isinstance(first, bool) else np.where(first, a, b)


def constant(value: float, dtype: str) -> int:
    """A literal: exactly the rational number that its type stores, but for the extremes of the type.

    Parameters
    ----------
    value : float
    dtype : str
        Its type; the extremes of floating-point types stand for infinities.
    """
    if value != value:
        return noise(1, "not a number", 0).item()
    limit = float(np.finfo(dtype).max) if dtype in ("float16", "float32", "float64") else float(np.finfo("f4").max)
    if value <= -limit:
        return LOWEST
    if value >= limit:
        return HIGHEST
    exact = Fraction(value)
    return exact.numerator % P * pow(exact.denominator, -1, P) % P


def _mixed(a: np.ndarray) -> np.ndarray:
    """An integer whose bits all depend on all bits of another one (the finalizer of SplitMix64)."""
    a = a.astype(np.uint64)
    a ^= a >> np.uint64(30)
    a *= np.uint64(0xBF58476D1CE4E5B9)
    a ^= a >> np.uint64(27)
    a *= np.uint64(0x94D049BB133111EB)
    a ^= a >> np.uint64(31)
    return a


def _key(name: str, seed: int) -> int:
    """64 bits for a name: FNV-1a."""
    key = 0xCBF29CE484222325 ^ (seed & (2**64 - 1))
    for byte in name.encode():
        key = (key ^ byte) * 0x100000001B3 & (2**64 - 1)
    return key


def function_of(name: str, arguments: Sequence[Number], seed: int) -> Number:
    """A function about which nothing is known: a random one for each name, of elements or integers.

    Parameters
    ----------
    name : str
    arguments : sequence of Number
    seed : int
        Other functions for another seed.
    """
    state = np.array([_key(name, seed)], np.uint64)
    for argument in arguments:
        known = np.atleast_1d(np.asarray(argument, np.int64))
        state = _mixed(state * np.uint64(0x9E3779B97F4A7C15) + known.astype(np.uint64) + np.uint64(1))
    result = (state % np.uint64(P)).astype(np.int64)
    return int(result[0]) if all(isinstance(a, int) for a in arguments) else result


def noise(count: int, name: str, seed: int, start: int = 0) -> np.ndarray:
    """So many random elements, of a sequence that a name has."""
    return function_of(name, [np.arange(start, start + count)], seed)


def whole(a: Number, seed: int) -> Number:
    """The integer that a number becomes when its fraction is dropped.

    Small integers stay what they are; what other numbers become cannot be told from an element of the field, so that it
    is random, but the same for the same element.
    """
    small = 1 << 20
    if isinstance(a, int):
        a = np.array([a], np.int64)
        return int(whole(a, seed)[0])
    other = function_of("whole", [a], seed) & (small - 1)
    return np.where(a < small, a, np.where(a > P - small, a - P, other))


def matrix_product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The products of some matrices, shapes ``(..., m, k)`` and ``(..., k, n)`` with k up to 2**20.

    Elements are cut into halves of 16 bits, so that sums of products of halves are exact in double precision.
    """
    a_high, a_low, b_high, b_low = ((x >> shift & 0xFFFF).astype(np.float64) for x in (a, b) for shift in (16, 0))
    high = (a_high @ b_high).astype(np.int64) % P
    middle = (a_high @ b_low + a_low @ b_high).astype(np.int64) % P
    low = (a_low @ b_low).astype(np.int64)
    # 2**32 is 2 in the field.
    return (2 * high + (middle << 16) + low) % P
