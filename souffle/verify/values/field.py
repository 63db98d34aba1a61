"""Arithmetic of prime fields, on NumPy arrays of int64 and on Python integers alike.

In the large one, of 2**31 - 1 elements, different numbers are never equal by chance; in a small one they often are. The
product of two elements of the large one is below 2**62, and ``2**31 = 1`` there, so that reducing takes shifts and
additions. Elements are always in ``[0, prime)``: equal elements are equal integers.
"""

from __future__ import annotations

from fractions import Fraction
from math import inf

import numpy as np

__all__ = ["Field", "Number", "P"]

P = 2**31 - 1
"""A Mersenne prime."""

Number = int | np.ndarray
"""An element of the field, or an integer, the same everywhere; or an array of them."""

_LOWEST = 1_203_415_877


class Field:
    """The numbers modulo a prime.

    Parameters
    ----------
    prime : int
        :data:`P`, or one from 5 to 2**15.

    Attributes
    ----------
    lowest, smallest : int
        What stands for minus infinity, the first in any order, and for the least number of a type, the second.
    highest, greatest : int
        Their negatives, the last in any order. The smallest fields have no room for four, and make no difference.
    """

    def __init__(self, prime: int = P) -> None:
        self.prime = prime
        self.lowest = _LOWEST if prime == P else prime // 2
        self.highest = prime - self.lowest
        self.smallest = self.lowest - (prime > 7)
        self.greatest = prime - self.smallest
        self._unsigned = np.uint64(prime)

    def __repr__(self) -> str:
        return f"Field({self.prime})"

    def residue(self, value: Number) -> Number:
        """An integer, of any sign, as an element."""
        return value % self.prime

    def _below(self, value: Number) -> Number:
        """An element from an integer in ``[0, 2 prime)``; an array is overwritten."""
        if isinstance(value, int):
            return value - self.prime if value >= self.prime else value
        # As unsigned numbers, those that must not be made less become very large.
        own = value.view(np.uint64)
        return np.minimum(own, own - self._unsigned, out=own).view(np.int64)

    def _folded(self, wide: Number) -> Number:
        """An element from an integer in ``[0, 2**62)``; an array is overwritten."""
        if isinstance(wide, int):
            return wide % self.prime
        if self.prime != P:
            return np.remainder(wide, self.prime, out=wide)
        high = wide >> 31
        wide &= P
        wide += high
        own = wide.view(np.uint64)
        np.subtract(own, self._unsigned, out=high.view(np.uint64))
        return np.minimum(own, high.view(np.uint64), out=own).view(np.int64)

    def add(self, a: Number, b: Number) -> Number:
        """The sum."""
        return self._below(a + b)

    def subtract(self, a: Number, b: Number) -> Number:
        """The difference."""
        less = a - b
        if isinstance(less, int):
            return less % self.prime
        own = less.view(np.uint64)
        return np.minimum(own, own + self._unsigned, out=own).view(np.int64)

    def negative(self, a: Number) -> Number:
        """What gives 0 when added."""
        return self.subtract(0, a)

    def multiply(self, a: Number, b: Number) -> Number:
        """The product."""
        return self._folded(a * b)

    def multiply_add(self, a: Number, b: Number, c: Number) -> Number:
        """A product and a number, together."""
        if isinstance(c, int) or np.shape(c) == ():
            return self._folded(a * b + c)
        wide = a * b
        if np.shape(wide) == np.broadcast_shapes(np.shape(wide), np.shape(c)) and not isinstance(wide, int):
            wide += c
        else:
            wide = wide + c
        return self._folded(wide)

    def power(self, a: Number, exponent: int) -> Number:
        """An element times itself, so many times."""
        result: Number = self.residue(1)
        while exponent:
            if exponent & 1:
                result = self.multiply(result, a)
            exponent >>= 1
            if exponent:
                a = self.multiply(a, a)
        return result

    def inverse(self, a: Number) -> Number:
        """What gives 1 when multiplied; 0 of 0."""
        if isinstance(a, int):
            return pow(a, -1, self.prime) if a else 0
        return self.power(a, self.prime - 2)

    def divide(self, a: Number, b: Number) -> Number:
        """The quotient."""
        return self.multiply(a, self.inverse(b))

    def sum_of(self, a: np.ndarray) -> np.ndarray:
        """The sum along the first axis, of fewer than 2**31 elements."""
        return a.sum(axis=0) % self.prime

    def product(self, a: np.ndarray) -> np.ndarray:
        """The product along the first axis."""
        while len(a) > 1:
            half = len(a) // 2
            rest = a[2 * half :]
            a = np.concatenate([self.multiply(a[:half], a[half : 2 * half]), rest])
        return a[0]

    def constant(self, value: float, dtype: str) -> int:
        """A literal: exactly the rational number that its type stores, but for the extremes of the type.

        Parameters
        ----------
        value : float
            Any but one that is no number.
        dtype : str
            Its type, whose extremes are no rational numbers either.
        """
        if abs(value) == inf:
            return self.highest if value > 0 else self.lowest
        limit = float(np.finfo(dtype).max) if dtype in ("float16", "float32", "float64") else float(np.finfo("f4").max)
        if value <= -limit:
            return self.smallest
        if value >= limit:
            return self.greatest
        exact = Fraction(value)
        return exact.numerator % self.prime * pow(exact.denominator, -1, self.prime) % self.prime

    def matrix_product(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        """The products of some matrices, shapes ``(..., m, k)`` and ``(..., k, n)`` with k up to 2**20.

        Elements are cut into halves of 16 bits, so that sums of products of halves are exact in double precision.
        """
        if self.prime != P:
            return (a.astype(np.float64) @ b.astype(np.float64)).astype(np.int64) % self.prime
        a_high, a_low, b_high, b_low = ((x >> shift & 0xFFFF).astype(np.float64) for x in (a, b) for shift in (16, 0))
        high = (a_high @ b_high).astype(np.int64) % P
        middle = (a_high @ b_low + a_low @ b_high).astype(np.int64) % P
        low = (a_low @ b_low).astype(np.int64)
        # 2**32 is 2 in the field.
        return (2 * high + (middle << 16) + low) % P
