"""Numbers in which exponentials of sums are products of exponentials, for texts that calculate with that.

A field has no function ``e(x)`` of its own elements with ``e(a + b) = e(a) e(b)`` but the constant 1: as many of its
elements as there are make the group of sums, one less that of products. So a number is a pair here: what it is modulo
the prime :data:`Q`, and what it is modulo ``2 Q + 1``, another prime (a safe one), whose products have a group of `Q`
elements. Each part is calculated by itself, by the same operations, but for the exponential: its second part is
``g ** x`` with the *first* part `x` of its argument and a random `g` of that group. Its first part is a random function
of the first part of its argument. Texts are compared by the second parts.

What is equal so is equal, with the same probability as in :mod:`souffle.verify.values`, by the rules of fields and
``exp(a + b) = exp(a) exp(b)``, where arguments of exponentials are equal by the rules of fields alone: first parts know
no rule of exponentials. Inputs have two parts that have nothing to do with each other. Let the difference of two texts
be ``sum of c[i] exp(l[i])``, all `l` different and no `c` zero. First parts of inputs are in the `l` alone, second ones
in the `c` alone: so the sum vanishes where the `c` do, with probability ``d / R``, or where the powers ``g ** l[i]``
meet one equation that is not trivial. Along the first part `z` of an input that tells two of the `l` apart, that is a
polynomial in powers of `g`, of which at most as many of the `Q` numbers are zeros as its degree says.

Two things are *less* than in a field, so that a softmax is not the same for any number that is taken from its row:

- The inverse of what is no literal is a random function of it, ``a / b`` is `a` times that. So ``exp(x - m) / sum of
  exp(x - m)`` depends on `m`: the greatest number of a row has to be the definition's, in the sum that divides.
- Infinities and NaN are those of IEEE 754: ``exp(-inf)`` is 0, the sum of an infinity and a number is that infinity,
  ``inf - inf`` and all that is done to NaN is NaN. But 0 times an infinity is 0, so that nothing is said of what is
  infinite where it is multiplied with 0, such as behind a mask. An infinity times anything else that is no literal,
  whose sign a field does not know, is taken for NaN, and so is the inverse of 0.

Numbers are compared and ordered by their second parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache
from math import inf

import numpy as np

from souffle.verify.values.field import Number
from souffle.verify.values.points import Kind, Literals, Numbers

__all__ = ["PairedNumbers", "Q", "R", "paired_numbers_at"]

Q = 1_073_741_789
"""The largest prime below 2**30 for which 2 Q + 1 is one."""

R = 2 * Q + 1

_BITS = 31
_SECOND = 2**_BITS - 1
_HALF = 15

_NAN, _LOWEST, _HIGHEST = -1, -2, -3
"""What is no pair. Nothing else is negative."""


def _packed(first: Number, second: Number) -> Number:
    return first << _BITS | second


def _special(a: Number) -> bool:
    """Whether some are infinite or NaN."""
    return a < 0 if isinstance(a, int) else bool(a.size) and bool(a.min() < 0)


def _is_infinite(a: Number) -> Number:
    return (a == _LOWEST) | (a == _HIGHEST)


class PairedNumbers(Numbers):
    """Pairs at one point; see above. Parameters are those of :class:`Numbers`, without a prime.

    Parameters
    ----------
    mixes : bool
        Whether inputs are literals now and then, as those of small fields are.
    """

    plain = False

    def __init__(
        self,
        seed: int,
        *,
        order: str = "random",
        place: str = "first",
        literals: Sequence[Fraction] = Literals().real,
        sums: bool = False,
        mixes: bool = False,
    ) -> None:
        super().__init__(seed, order=order, place=place, literals=literals, sums=sums)
        self.mixes = mixes
        self.lowest, self.highest = _LOWEST, _HIGHEST
        self.smallest = _packed(self.smallest % Q, self.smallest % R)
        self.greatest = self.negative(self.smallest)
        self.arrange(literals, place)
        generator = int(super().function_of("base of exponentials", [0])) % (R - 3) + 2
        self._powers = _powers(generator * generator % R)

    # Arithmetic

    def residue(self, value: Number) -> Number:
        """An integer as a number."""
        return _packed(value % Q, value % R)

    def add(self, a: Number, b: Number) -> Number:
        """The sum."""
        first, second = (a >> _BITS) + (b >> _BITS), (a & _SECOND) + (b & _SECOND)
        found = _packed(first - Q * (first >= Q), second - R * (second >= R))
        if not (_special(a) or _special(b)):
            return found
        a, b = np.broadcast_arrays(a, b)
        found = np.where(_is_infinite(a), a, np.where(_is_infinite(b), b, found))
        apart = _is_infinite(a) & _is_infinite(b) & (a != b)
        return np.where((a == _NAN) | (b == _NAN) | apart, _NAN, found)

    def subtract(self, a: Number, b: Number) -> Number:
        """The difference."""
        return self.add(a, self.negative(b))

    def negative(self, a: Number) -> Number:
        """What gives 0 when added."""
        first, second = a >> _BITS, a & _SECOND
        found = _packed((Q - first) * (first > 0), (R - second) * (second > 0))
        if not _special(a):
            return found
        return np.where(a == _LOWEST, _HIGHEST, np.where(a == _HIGHEST, _LOWEST, np.where(a == _NAN, _NAN, found)))

    def multiply(self, a: Number, b: Number) -> Number:
        """The product."""
        found = _packed((a >> _BITS) * (b >> _BITS) % Q, (a & _SECOND) * (b & _SECOND) % R)
        if not (_special(a) or _special(b)):
            return found
        literal = isinstance(a, int) or isinstance(b, int)
        signs = self._literal_sign(a) * self._literal_sign(b) if literal else 0
        a, b = np.broadcast_arrays(a, b)
        some = np.where(signs > 0, _HIGHEST, np.where(signs < 0, _LOWEST, _NAN))
        # Of 0 and an infinity.
        some = np.where((a == 0) | (b == 0), 0, some)
        found = np.where(_is_infinite(a) | _is_infinite(b), some, found)
        return np.where((a == _NAN) | (b == _NAN), _NAN, found)

    def _literal_sign(self, a: Number) -> Number:
        """The sign of an infinity or a literal, 0 of what has none that is known."""
        sign = np.where(a == _HIGHEST, 1, np.where(a == _LOWEST, -1, 0))
        return np.where(sign == 0, np.sign(self.ranks(a) - self.ranks(0)), sign) if isinstance(a, int) else sign

    def multiply_add(self, a: Number, b: Number, c: Number) -> Number:
        """A product and a number, together."""
        return self.add(self.multiply(a, b), c)

    def inverse(self, a: Number) -> Number:
        """Of a literal, what gives 1 when multiplied; of anything else, a random function of it."""
        if isinstance(a, int):
            if a < 0:
                return a if a == _NAN else 0
            return _packed(pow(a >> _BITS, -1, Q), pow(a & _SECOND, -1, R)) if a else _NAN
        found = self.function_of("reciprocal", [a])
        return np.where((a == _NAN) | (a & _SECOND == 0), _NAN, np.where(_is_infinite(a), 0, found))

    def sum_of(self, a: np.ndarray) -> np.ndarray:
        """The sum along the first axis."""
        found = _packed((a >> _BITS).sum(axis=0) % Q, (a & _SECOND).sum(axis=0) % R)
        if not _special(a):
            return found
        low, high = (a == _LOWEST).any(axis=0), (a == _HIGHEST).any(axis=0)
        found = np.where(low, _LOWEST, np.where(high, _HIGHEST, found))
        return np.where((a == _NAN).any(axis=0) | (low & high), _NAN, found)

    def matrix_product(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        """The products of some matrices."""
        if not (_special(a) or _special(b)):
            parts = ((a >> _BITS, b >> _BITS, Q), (a & _SECOND, b & _SECOND, R))
            return _packed(*(_matrix_product(x, y, prime) for x, y, prime in parts))
        # No literals are here: what is infinite makes a sum NaN, but where it is multiplied with 0.
        parts = ((_is_infinite(a), b != 0), (a != 0, _is_infinite(b)))
        spoiled = sum(x.astype(np.float32) @ y.astype(np.float32) for x, y in parts) > 0
        spoiled |= (a == _NAN).any(axis=-1)[..., :, None] | (b == _NAN).any(axis=-2)[..., None, :]
        plain = (np.where(one < 0, 0, one) for one in (a, b))
        return np.where(spoiled, _NAN, self.matrix_product(*plain))

    def constant(self, value: float, dtype: str) -> int:
        """A literal."""
        if abs(value) == inf:
            return _HIGHEST if value > 0 else _LOWEST
        limit = float(np.finfo(dtype).max) if dtype in ("float16", "float32", "float64") else float(np.finfo("f4").max)
        if abs(value) >= limit:
            return self.greatest if value > 0 else self.smallest
        return self.rational(Fraction(value))

    def rational(self, value: Fraction) -> int:
        """The number that a fraction is."""
        return _packed(*(value.numerator * pow(value.denominator, -1, prime) % prime for prime in (Q, R)))

    def whole(self, a: Number) -> Number:
        """The integer that a number becomes when its fraction is dropped."""
        return super().whole(a & _SECOND)

    # Order

    def _spread(self, a: np.ndarray) -> np.ndarray:
        return super()._spread(a & _SECOND)

    def _ranked(self, a: np.ndarray) -> np.ndarray:
        ranks = self._spread(a)
        for element, rank in self.special:
            ranks[(a == element) if element < 0 else (a >= 0) & (a & _SECOND == element & _SECOND)] = rank
        return ranks

    def largest(self, a: Number, b: Number) -> Number:
        """The one that comes later; NaN, if one is."""
        return self._or_nan(super().largest(a, b), a, b)

    def least(self, a: Number, b: Number) -> Number:
        """The one that comes earlier; NaN, if one is."""
        return self._or_nan(super().least(a, b), a, b)

    @staticmethod
    def _or_nan(found: Number, a: Number, b: Number) -> Number:
        return np.where((a == _NAN) | (b == _NAN), _NAN, found) if _special(a) or _special(b) else found

    def joined(self, terms: np.ndarray, most: bool) -> np.ndarray:
        """What stands for the largest (or the least) of some numbers where it is their sum."""
        ends = (self.lowest, self.smallest, self.highest) if most else (self.highest, self.greatest, self.lowest)
        nothing, hardly, everything = ends
        some = (terms >= 0) & (terms != hardly)
        found = self.sum_of(np.where(some, terms, 0))
        if not most:
            found = self.add(found, self.residue((some.sum(axis=0) - 1) * self._factor))
        found = np.where(some.any(axis=0), found, np.where((terms == hardly).any(axis=0), hardly, nothing))
        found = np.where((terms == everything).any(axis=0), everything, found)
        return np.where((terms == _NAN).any(axis=0), _NAN, found)

    # Functions and inputs

    def function_of(self, name: str, arguments: Sequence[Number]) -> Number:
        """A function of which nothing is known, but for the exponential: part by part."""
        literal = all(isinstance(a, int) for a in arguments)
        known = [np.atleast_1d(np.asarray(a, np.int64)) for a in arguments]
        first = super().function_of(f"first {name}", [np.where(a < 0, a, a >> _BITS) for a in known]) % Q
        if name == "exp":
            (a,) = known
            found = np.where(a == _LOWEST, 0, np.where(a < 0, a, _packed(first, self._exponential(a >> _BITS))))
        else:
            second = super().function_of(name, [np.where(a < 0, a, a & _SECOND) for a in known]) % R
            found = _packed(first, second)
        return int(found[0]) if literal else found

    def _exponential(self, first: np.ndarray) -> np.ndarray:
        low, high = self._powers
        # Lanes for which nothing is wanted may have any integer.
        first = first % Q
        return low[first & (2**_HALF - 1)] * high[first >> _HALF] % R

    def differ(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        """Where second parts are not the same, or what is no pair."""
        return np.where((a < 0) | (b < 0), a != b, (a ^ b) & _SECOND != 0)

    def element(self, name: str, keys: np.ndarray) -> np.ndarray:
        """Random numbers, functions of integers."""
        return _packed(*(Numbers.function_of(self, f"{n} {name}", [keys]) % n for n in (Q, R)))

    def in_order(self, name: str, places: np.ndarray) -> np.ndarray:
        """Numbers that are ordered as their integers are, where the order is natural."""
        return _packed(Numbers.function_of(self, f"in order {name}", [places]) % Q, places % R)


def _matrix_product(a: np.ndarray, b: np.ndarray, prime: int) -> np.ndarray:
    a_high, a_low, b_high, b_low = ((x >> shift & 0xFFFF).astype(np.float64) for x in (a, b) for shift in (16, 0))
    high = (a_high @ b_high).astype(np.int64) % prime
    middle = (a_high @ b_low + a_low @ b_high).astype(np.int64) % prime
    low = (a_low @ b_low).astype(np.int64)
    return ((high * (2**32 % prime)) % prime + (middle << 16) + low) % prime


@lru_cache(maxsize=8)
def _powers(base: int) -> tuple[np.ndarray, np.ndarray]:
    """The powers of a number modulo :data:`R`: those up to 2**15, and of these the 2**15-th so many."""

    def powers(of: int) -> np.ndarray:
        found = np.ones(1, np.int64)
        while len(found) < 2**_HALF:
            found = np.concatenate([found, found * pow(of, len(found), R) % R])
        return found

    return powers(base), powers(pow(base, 2**_HALF, R))


def paired_numbers_at(kind: Kind, seed: int, literals: Literals, smallest: bool = False) -> PairedNumbers:
    """The pairs of a point. None are small, but inputs are literals, or equal along an axis, where they would be."""
    place, mixes = kind.literals, kind.small
    return PairedNumbers(seed, order=kind.order, place=place, literals=literals.real, sums=kind.sums, mixes=mixes)
