"""Arithmetic of the field against Python's integers."""

from __future__ import annotations

from fractions import Fraction
from math import inf

import numpy as np
import pytest

from souffle.verify.values.field import Field, P
from souffle.verify.values.points import KINDS, Kind, Literals, Numbers, numbers_at

FIELD = Field()
EDGES = np.array([0, 1, 2, 3, 2**16, 2**30, P - 2, P - 1, FIELD.lowest, FIELD.smallest, FIELD.highest, FIELD.greatest])
SOME = np.concatenate([EDGES, np.random.default_rng(0).integers(0, P, 50)])
LEFT, RIGHT = (a.ravel() for a in np.meshgrid(SOME, SOME))


@pytest.mark.parametrize(
    ("ours", "exact"),
    [
        (FIELD.add, lambda a, b: (a + b) % P),
        (FIELD.subtract, lambda a, b: (a - b) % P),
        (FIELD.multiply, lambda a, b: a * b % P),
        (FIELD.divide, lambda a, b: a * pow(b, -1, P) % P if b else 0),
        (lambda a, b: FIELD.multiply_add(a, b, a), lambda a, b: (a * b + a) % P),
    ],
    ids=["add", "subtract", "multiply", "divide", "multiply_add"],
)
def test_operations(ours, exact) -> None:
    want = [exact(int(a), int(b)) for a, b in zip(LEFT, RIGHT)]
    before = LEFT.copy(), RIGHT.copy()
    assert ours(LEFT, RIGHT).tolist() == want
    assert np.array_equal(LEFT, before[0])
    assert np.array_equal(RIGHT, before[1])
    assert [ours(int(a), int(b)) for a, b in zip(LEFT[:200], RIGHT[:200])] == want[:200]
    assert ours(SOME, 12345).tolist() == [exact(int(a), 12345) for a in SOME]


def test_sums_and_products_of_many() -> None:
    many = np.full((5000, 2), P - 1, np.int64)
    assert FIELD.sum_of(many).tolist() == [5000 * (P - 1) % P] * 2
    assert FIELD.product(many[:7]).tolist() == [pow(P - 1, 7, P)] * 2


@pytest.mark.parametrize("inner", [1, 16, 3000])
def test_products_of_matrices_are_exact(inner: int) -> None:
    random = np.random.default_rng(inner)
    a, b = random.integers(P - 1000, P, (2, 3, inner)), random.integers(P - 1000, P, (2, inner, 4))
    want = (a.astype(object) @ b.astype(object)) % P
    assert FIELD.matrix_product(a, b).tolist() == want.tolist()


def test_literals_are_exact_rationals() -> None:
    third = float(np.float32(1 / 3))
    assert FIELD.multiply(FIELD.constant(third, "float32"), 2**25) == int(Fraction(third) * 2**25) % P
    assert FIELD.constant(-0.5, "float32") == FIELD.negative(FIELD.constant(0.5, "float32"))
    least = float(np.finfo("f4").min)
    assert (FIELD.constant(-inf, "float32"), FIELD.constant(least, "float32")) == (FIELD.lowest, FIELD.smallest)
    assert (FIELD.constant(inf, "float16"), FIELD.constant(65504.0, "float16")) == (FIELD.highest, FIELD.greatest)
    assert FIELD.constant(65504.0, "float32") == 65504


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: "-".join(map(str, vars(kind).values())))
def test_the_order_is_total_and_has_its_ends(kind: Kind) -> None:
    sixth = Fraction(1, 64)
    literals = Literals((Fraction(-(10**9)), Fraction(-1), Fraction(0), sixth, Fraction(1), Fraction(6)))
    numbers = numbers_at(kind, 3, literals)
    some = np.arange(numbers.prime) if kind.small else np.unique(SOME)
    ranks = numbers.ranks(some)
    assert len(np.unique(ranks)) == len(some)
    assert numbers.ranks(numbers.lowest) == ranks.min()
    assert numbers.ranks(numbers.highest) == ranks.max()
    assert list(np.sort(ranks)[[1, -2]]) == [numbers.ranks(numbers.smallest), numbers.ranks(numbers.greatest)]
    own = np.array([numbers.ranks(numbers.rational(one)) for one in literals.real])
    assert (np.diff(own) > 0).all()
    if kind.literals != "among":
        others = ranks[~np.isin(ranks, own)][2:-2] if kind.small else np.setdiff1d(ranks, own)[2:-2]
        assert own.max() < others.min() if kind.literals == "first" else own.min() > others.max()
    left, right = (a.ravel() for a in np.meshgrid(some, some))
    chosen = numbers.largest(left, right)
    assert np.array_equal(chosen, numbers.largest(right, left))
    assert np.array_equal(chosen + numbers.least(left, right), left + right)


def test_other_points_have_other_numbers() -> None:
    one, other = (numbers_at(KINDS[0], seed, Literals()) for seed in (0, 1))
    assert not np.array_equal(one.largest(LEFT, RIGHT), other.largest(LEFT, RIGHT))
    small = [numbers_at(KINDS[2], seed, Literals()) for seed in range(3)]
    assert len({numbers.prime for numbers in small}) == 3 and all(numbers.prime < 30 for numbers in small)


def test_functions_differ_by_name_and_argument() -> None:
    values = Numbers(0).function_of("exp", [SOME])
    assert np.array_equal(values, Numbers(0).function_of("exp", [SOME.copy()]))
    for other in (Numbers(0).function_of("erf", [SOME]), Numbers(1).function_of("exp", [SOME])):
        assert not (values == other).any()
    two = Numbers(0).function_of("pow", [LEFT, RIGHT])
    assert len(np.unique(two)) == len(np.unique(LEFT * P + RIGHT))
    assert Numbers(0).function_of("exp", [7]) == Numbers(0).function_of("exp", [np.array([7])])[0]


def test_whole_numbers_stay_what_they_are() -> None:
    assert Numbers(0).whole(7) == 7
    assert Numbers(0).whole(P - 7) == -7
    half = FIELD.constant(0.5, "float32")
    assert Numbers(0).whole(half) == Numbers(0).whole(half)
