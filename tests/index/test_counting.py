"""Points of sets are counted exactly, where isl would give up as well."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass

import islpy
import pytest

from souffle.index import isl


def windows(rows: int, window: int, channels: int) -> str:
    """The reads of a convolution with a border that reads nothing: rows and window are tied, channels are not."""
    return (
        f"{{ [c, h, w, k, r, s] : 0 <= c, k < {channels} and 0 <= h, w < {rows} and 0 <= r, s < {window}"
        f" and 0 <= h + r - 1 < {rows} and 0 <= w + s - 1 < {rows} }}"
    )


@pytest.mark.parametrize("rows, channels", [(14, 512), (56, 64), (7, 2048)])
def test_dimensions_that_nothing_ties_are_counted_apart(rows: int, channels: int) -> None:
    assert isl.count_points(islpy.Set(windows(rows, 3, channels))) == (3 * rows - 2) ** 2 * channels**2


@dataclass(frozen=True)
class Condition:
    """On a sum of multiples of some dimensions: at least zero, a multiple of a number, or few times it."""

    kind: int
    factors: dict[int, int]
    shift: int
    divisor: int
    most: int

    @classmethod
    def drawn(cls, choose: random.Random, dimensions: int) -> Condition:
        tied = choose.sample(range(dimensions), min(choose.randint(1, 3), dimensions))
        factors = {number: choose.choice((-2, -1, 1, 2, 3)) for number in tied}
        return cls(choose.randrange(3), factors, choose.randint(-4, 4), choose.randint(2, 4), choose.randint(0, 3))

    def __str__(self) -> str:
        value = " ".join(["0", *(f"{by:+d} i{number}" for number, by in self.factors.items()), f"{self.shift:+d}"])
        quotient = f"floor(({value})/{self.divisor})"
        return (f"{value} >= 0", f"{value} = {self.divisor} * {quotient}", f"{quotient} <= {self.most}")[self.kind]

    def holds(self, point: tuple[int, ...]) -> bool:
        value = sum(by * point[number] for number, by in self.factors.items()) + self.shift
        return (value >= 0, value % self.divisor == 0, value // self.divisor <= self.most)[self.kind]


@pytest.mark.parametrize("seed", range(60))
def test_random_sets(seed: int) -> None:
    choose = random.Random(seed)
    extents = [choose.randint(1, 6) for _ in range(choose.randint(1, 5))]
    conditions = [Condition.drawn(choose, len(extents)) for _ in range(choose.randint(0, 3))]
    within = (f"0 <= i{number} < {extent}" for number, extent in enumerate(extents))
    names = ", ".join(f"i{number}" for number, _ in enumerate(extents))
    counted = isl.count_points(islpy.Set(f"{{ [{names}] : {' and '.join([*within, *map(str, conditions)])} }}"))
    points = itertools.product(*map(range, extents))
    assert counted == sum(all(one.holds(point) for one in conditions) for point in points)
