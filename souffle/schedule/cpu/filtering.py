"""The algorithms of minimal filtering: matrices by which a few products take the place of a window's sums.

(Winograd, *Arithmetic Complexity of Computations*, 1980; Lavin and Gray, *Fast Algorithms for Convolutional Neural
Networks*, 2015.) What larger tiles lose in accuracy depends on the points at which polynomials are interpolated
(Barabasz, Anderson, Soodhalter, Gregg, *Error Analysis and Improving the Accuracy of Winograd Convolution for Deep
Neural Networks*, 2020) and on the length of sums. With the points here, and sums over channels in parts, results of
4 x 4 are about as near to exact ones as those of one sum over all places and channels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

__all__ = ["FOUR", "TAPS", "TWO", "Filtering", "Matrix", "filtering_at"]

TAPS = 3
"""Weights of a window along an axis."""
_SHORTEST_SUM, _LONGEST_SUM = 16, 32
"""Channels of a part of a sum, where sums are in parts."""
Matrix = tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class Filtering:
    """F(m x m, 3 x 3): the transposed matrices of Lavin and Gray, B' of data, G of weights and A' of results.

    Attributes
    ----------
    data, weights, results : matrix
    in_parts : bool
        Whether the sums over channels are long enough, as errors go, to be summed in parts.
    """

    data: Matrix
    weights: Matrix
    results: Matrix
    in_parts: bool

    @property
    def size(self) -> int:
        """Results of a tile along an axis."""
        return len(self.results)

    @property
    def points(self) -> int:
        """Elements that a tile reads along an axis."""
        return len(self.data)

    def parts(self, channels: int) -> int | None:
        """Of a sum over so many channels; ``None`` where there are no equal ones of a length that serves."""
        if not self.in_parts or channels <= _LONGEST_SUM:
            return 1
        counts = range(-(-channels // _LONGEST_SUM), channels // _SHORTEST_SUM + 1)
        return next((count for count in counts if channels % count == 0), None)


def filtering_at(points: Sequence[Fraction], *, in_parts: bool) -> Filtering:
    """The algorithm of Toom and Cook that interpolates at some points and at infinity.

    Parameters
    ----------
    points : sequence of Fraction
        One more than results.
    in_parts : bool
        Whether sums over channels are in parts.

    Notes
    -----
    A polynomial's value at a point p is a row of powers of p, and the coefficient of its highest power its value at
    infinity. Rows of B' are the polynomials that are zero at all other points; G divides by what they are at theirs.
    """
    count = len(points) + 1
    size = count - TAPS + 1
    others = [[q for q in points if q != p] for p in points]
    data = [[*_with_roots(roots), Fraction(0)] for roots in others] + [_with_roots(points)]
    divisors = [math.prod(p - q for q in roots) for p, roots in zip(points, others, strict=True)]
    weights = [[p**k / divisor for k in range(TAPS)] for p, divisor in zip(points, divisors, strict=True)]
    results = [[*(p**k for p in points), Fraction(k == size - 1)] for k in range(size)]
    weights.append([Fraction(k == TAPS - 1) for k in range(TAPS)])
    return Filtering(*(tuple(tuple(map(float, row)) for row in each) for each in (data, weights, results)), in_parts)


def _with_roots(roots: Sequence[Fraction]) -> list[Fraction]:
    """Coefficients of the product of all x - root, the lowest first."""
    found = [Fraction(1)]
    for root in roots:
        found = [low - root * high for low, high in zip([Fraction(0), *found], [*found, Fraction(0)], strict=True)]
    return found


TWO = filtering_at([Fraction(0), Fraction(1), Fraction(-1)], in_parts=False)
"""Of tiles of 2 x 2 results, which are nearer to exact ones than those of the sum: sums are shorter, of two levels."""
FOUR = filtering_at([Fraction(p) for p in ("0", "11/16", "-11/16", "3/2", "-3/2")], in_parts=True)
"""Of tiles of 4 x 4 results. Errors in units of those of one sum, of random images behind a ReLU, the largest and the
root of the mean of squares: over 256 channels 0.5 to 1.0 and 0.9, over 64 channels 1.4 to 1.7 and 1.7. With sums in
parts of 64 channels 0.6 to 1.3 and 1.1, with whole sums 2.8 and 2.1; with 0, 1, -1, 2, -2 as points, as in Lavin and
Gray's paper, whole sums have 10 and 4.3. B' and A' are exact."""
