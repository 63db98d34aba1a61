"""The points at which values are compared: what numbers are there, how they are ordered, and how inputs are drawn.

A comparison tells two texts apart only where it is seen: ``x > 0`` and ``x >= 0`` differ at zero alone, a maximum that
starts at zero differs from one that starts at minus infinity only where all its terms come before zero. Numbers drawn
from a large field are never equal, and never zero; so there are points of five kinds, see :data:`KINDS`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal

import numpy as np
from tvm import tirx
from tvm.ir import TensorLoad

from souffle.tvm_calls import structural_walk
from souffle.tvm_compat import dtype_of
from souffle.verify.values.field import Field, Number, P

__all__ = [
    "CUT",
    "FURTHER",
    "KINDS",
    "SEARCH",
    "WITHOUT_REDUCTIONS",
    "Kind",
    "Literals",
    "Numbers",
    "literals_of",
    "numbers_at",
]

_BITS = 2**32 - 1

_SMALLEST = (5, 7, 11)

_PRIMES = (11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47, 53, 59, 61, 67, 71, 73, 79, 83, 89, 97, 101, 103, 107, 109, 113)
"""Small enough for numbers that are worked out to be equal once in so many times."""


@dataclass(frozen=True)
class Kind:
    """How a point is made.

    Attributes
    ----------
    small : bool
        Numbers are those of a small field: any two, whatever they were worked out of, are equal once in about twenty.
    order : "random" or "natural"
        In which numbers are compared; natural is that of their representatives.
    literals : "first", "last" or "among"
        Where in it zero and the literals of the text stand. Between each other they stand as they do as real numbers.
    inputs : str
        ``"random"``: each element drawn alone. ``"rising"``, ``"falling"``: by their place, so that the last or the
        first of those that are compared wins. ``"few"``: half of them one of the literals. ``"level"``: equal along
        some axes of their tensor, such as all of a row, and then often a literal; some rows of small fields always are.
        ``"cut"``: of one tensor, each row begins with some that are minus infinity; others are random.
    sums : bool
        The largest of two numbers that are no literals is their sum, where neither is infinite, and so is the least, in
        another way. Then each term of a maximum shows, whether it wins or not. But a term may well be taken twice.
    """

    small: bool
    order: Literal["random", "natural"]
    literals: Literal["first", "last", "among"]
    inputs: Literal["random", "rising", "falling", "few", "level", "cut"]
    sums: bool = False


KINDS = (
    Kind(False, "random", "first", "random"),
    Kind(False, "natural", "last", "rising"),
    Kind(True, "random", "among", "random"),
    Kind(True, "random", "among", "level"),
    Kind(False, "natural", "first", "falling"),
    Kind(False, "random", "first", "random", sums=True),
)
"""Of the first points, in turn; where no reduction compares, the first four will do."""

WITHOUT_REDUCTIONS = 4

CUT = Kind(False, "random", "first", "cut")
"""Of as many points as there are tensors, where infinities are those of IEEE 754: each is cut once."""

FURTHER = (KINDS[2], KINDS[3], Kind(False, "random", "among", "few"))
"""Of those that follow: in which comparisons come to equality."""

SEARCH = (Kind(False, "random", "among", "random"), *FURTHER)
"""Of those in which each term of a maximum may win."""


@dataclass(frozen=True)
class Literals:
    """The numbers that a stage's texts name.

    Attributes
    ----------
    real : tuple of Fraction
        Finite ones of floating-point types, with 0, 1 and -1, in their order.
    whole : tuple of int
        What integers of tensors are compared with, and what is next to that.
    """

    real: tuple[Fraction, ...] = (Fraction(-1), Fraction(0), Fraction(1))
    whole: tuple[int, ...] = (-1, 0, 1)


def literals_of(functions: Iterable[tirx.PrimFunc]) -> Literals:
    """The literals of a definition and of what was lowered from it."""
    real, whole = set(Literals().real), set(Literals().whole)
    probe = Field()
    extremes = (probe.lowest, probe.smallest, probe.greatest, probe.highest)

    def see_number(node: tirx.FloatImm) -> None:
        value = float(node.value)
        if value == value and probe.constant(value, dtype_of(node)) not in extremes:
            real.add(Fraction(value))

    def see_comparison(node: Any) -> None:
        for side, other in ((node.a, node.b), (node.b, node.a)):
            if isinstance(side, tirx.IntImm):
                loads: list[Any] = []
                structural_walk(other, (TensorLoad, loads.append))
                if loads:
                    whole.update(int(side.value) + step for step in (-1, 0, 1))

    kinds = (tirx.EQ, tirx.NE, tirx.LT, tirx.LE, tirx.GT, tirx.GE, tirx.Min, tirx.Max)
    for func in functions:
        structural_walk(func.body, [(tirx.FloatImm, see_number), *((kind, see_comparison) for kind in kinds)])
    return Literals(tuple(sorted(real)), tuple(sorted(whole)))


class Numbers(Field):
    """What numbers are at one point: a field, a total order of it, and functions of which nothing is known.

    Any way to find the largest of some numbers finds the same one. The order has nothing to do with that of real
    numbers, but that the least number of a type comes first, the largest last, and that literals keep theirs, by which
    comparisons of two literals are decided before anybody sees them.

    Parameters
    ----------
    seed : int
    prime : int
    order, place : str
        See :class:`Kind`.
    literals : sequence of Fraction
        In their order.

    Attributes
    ----------
    mixes : bool
        Whether inputs are literals, or equal along an axis, now and then: those of small fields.
    plain : bool
        Whether each integer below the prime is a number.
    """

    plain = True

    def __init__(
        self,
        seed: int,
        prime: int = P,
        *,
        order: str = "random",
        place: str = "first",
        literals: Sequence[Fraction] = Literals().real,
        sums: bool = False,
    ) -> None:
        super().__init__(prime)
        self.seed = seed
        self.sums = sums
        self.mixes = prime != P
        # An odd factor permutes 32-bit integers.
        random = int(_mixed(np.array([_key("order", seed)], np.uint64))[0])
        self._factor, self._start = ((random | 1) & _BITS, random >> 32) if order == "random" else (1, 0)
        self._table: np.ndarray | None = None
        self.arrange(literals, place)
        if prime != P:
            self._table = self._ranked(np.arange(prime))

    def arrange(self, literals: Sequence[Fraction], place: str) -> None:
        """Give literals and infinities their place in the order."""
        elements = [self.rational(one) for one in literals]
        self.choices = np.array([*dict.fromkeys((*elements, self.smallest, self.lowest))], np.int64)
        self.special: list[tuple[int, int]] = []
        apart = len(set(elements)) == len(elements)
        own = [int(r) for r in self._spread(np.array(elements, np.int64))]
        first = {"first": -len(own), "last": _BITS + 1}
        ranks = sorted(own) if place == "among" else [first[place] + i for i in range(len(own))]
        if apart:
            self.special += zip(elements, ranks)
        self.special += [(self.smallest, -len(own) - 1), (self.greatest, _BITS + len(own) + 1)]
        self.special += [(self.lowest, -len(own) - 2), (self.highest, _BITS + len(own) + 2)]

    def rational(self, value: Fraction) -> int:
        """The element that a fraction is."""
        return value.numerator * pow(value.denominator, -1, self.prime) % self.prime

    def _spread(self, a: np.ndarray) -> np.ndarray:
        # The lower 32 bits of a product do not depend on those that overflow.
        return (a * np.int64(self._factor) + self._start) & _BITS

    def _ranked(self, a: np.ndarray) -> np.ndarray:
        ranks = self._spread(a)
        for element, rank in self.special:
            ranks[a == element] = rank
        return ranks

    def ranks(self, a: Number) -> Number:
        """Integers that compare as the elements do."""
        if isinstance(a, int):
            return int(self._ranked(np.array([a], np.int64))[0])
        return self._ranked(a) if self._table is None else self._table[a]

    def largest(self, a: Number, b: Number) -> Number:
        """The one that comes later."""
        return _chosen(a, b, self.ranks(a) >= self.ranks(b))

    def least(self, a: Number, b: Number) -> Number:
        """The one that comes earlier."""
        return _chosen(a, b, self.ranks(a) <= self.ranks(b))

    def joined(self, terms: np.ndarray, most: bool) -> np.ndarray:
        """What stands for the largest (or the least) of some numbers, along the first axis, where it is their sum.

        What a maximum starts with counts for nothing, and what is more than all counts for all.
        """
        ends = (self.lowest, self.smallest, self.highest) if most else (self.highest, self.greatest, self.lowest)
        nothing, hardly, everything = ends
        some = (terms != nothing) & (terms != hardly)
        # That of minima has one more for each number, so that they are not maxima.
        found = np.where(some, terms, 0).sum(axis=0) + (0 if most else (some.sum(axis=0) - 1) * self._factor)
        found = np.where(some.any(axis=0), found % self.prime, np.where((terms == hardly).any(axis=0), hardly, nothing))
        return np.where((terms == everything).any(axis=0), everything, found)

    def function_of(self, name: str, arguments: Sequence[Number]) -> Number:
        """A function about which nothing is known: a random one for each name, of elements or integers."""
        state = np.array([_key(name, self.seed)], np.uint64)
        for argument in arguments:
            known = np.atleast_1d(np.asarray(argument, np.int64))
            state = _mixed(state * np.uint64(0x9E3779B97F4A7C15) + known.astype(np.uint64) + np.uint64(1))
        result = (state % np.uint64(self.prime)).astype(np.int64)
        return int(result[0]) if all(isinstance(a, int) for a in arguments) else result

    def differ(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        """Where results are not the same."""
        return a != b

    def bits(self, name: str, argument: np.ndarray) -> np.ndarray:
        """Random integers of 31 bits, functions of an integer."""
        return (_mixed(argument.astype(np.uint64) + np.uint64(_key(name, self.seed))) >> np.uint64(33)).astype(np.int64)

    def noise(self, count: int, name: str, start: int = 0) -> np.ndarray:
        """So many random elements, of a sequence that a name has."""
        return self.element(name, np.arange(start, start + count))

    def element(self, name: str, keys: np.ndarray) -> np.ndarray:
        """Random elements, functions of integers."""
        return self.function_of(name, [keys])

    def in_order(self, name: str, places: np.ndarray) -> np.ndarray:
        """Elements that are ordered as their integers are, where the order is natural."""
        return places % self.prime

    def whole(self, a: Number) -> Number:
        """The integer that a number becomes when its fraction is dropped.

        Small integers stay what they are; what other numbers become cannot be told from an element of the field, so
        that it is random, but the same for the same element.
        """
        if isinstance(a, int):
            a = np.array([a], np.int64)
            return int(self.whole(a)[0])
        if self.prime != P:
            return np.where(a > self.prime // 2, a - self.prime, a)
        small = 1 << 20
        other = self.function_of("whole", [a]) & ((1 << 20) - 1)
        return np.where(a < small, a, np.where(a > self.prime - small, a - self.prime, other))


def numbers_at(kind: Kind, seed: int, literals: Literals, smallest: bool = False) -> Numbers:
    """The numbers of a point.

    A small field has literals that differ apart from each other, from zero and from infinities, if there is one; the
    smallest ones have not, and equal numbers more often.
    """
    prime = P
    first = seed % 3
    if kind.small and smallest:
        prime = _SMALLEST[first]
    elif kind.small:
        prime = next((p for p in _PRIMES[first:] if _apart(Field(p), literals.real)), _PRIMES[-1 - first])
    return Numbers(seed, prime, order=kind.order, place=kind.literals, literals=literals.real, sums=kind.sums)


def _apart(field: Field, literals: Sequence[Fraction]) -> bool:
    found = {one.numerator * pow(one.denominator, -1, field.prime) % field.prime for one in literals}
    return len(found) == len(literals) and not found & {field.lowest, field.smallest, field.greatest, field.highest}


def _chosen(a: Number, b: Number, first: bool | np.ndarray) -> Number:
    return (a if first else b) if isinstance(first, bool) else np.where(first, a, b)


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
