"""Arithmetic of the field against Python's integers."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

from souffle.verify.values import field
from souffle.verify.values.field import HIGHEST, LOWEST, Order, P

EDGES = np.array([0, 1, 2, 3, 2**16, 2**30, P - 2, P - 1, LOWEST, HIGHEST], np.int64)
SOME = np.concatenate([EDGES, np.random.default_rng(0).integers(0, P, 50)])
LEFT, RIGHT = (a.ravel() for a in np.meshgrid(SOME, SOME))


@pytest.mark.parametrize(
    ("ours", "exact"),
    [
        (field.add, lambda a, b: (a + b) % P),
        (field.subtract, lambda a, b: (a - b) % P),
        (field.multiply, lambda a, b: a * b % P),
        (field.divide, lambda a, b: a * pow(b, -1, P) % P if b else 0),
        (lambda a, b: field.multiply_add(a, b, a), lambda a, b: (a * b + a) % P),
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
    assert field.sum_of(many).tolist() == [5000 * (P - 1) % P] * 2
    assert field.product(many[:7]).tolist() == [pow(P - 1, 7, P)] * 2


@pytest.mark.parametrize("inner", [1, 16, 3000])
def test_products_of_matrices_are_exact(inner: int) -> None:
    random = np.random.default_rng(inner)
    a, b = random.integers(P - 1000, P, (2, 3, inner)), random.integers(P - 1000, P, (2, inner, 4))
    want = (a.astype(object) @ b.astype(object)) % P
    assert field.matrix_product(a, b).tolist() == want.tolist()


def test_literals_are_exact_rationals() -> None:
    third = float(np.float32(1 / 3))
    assert field.multiply(field.constant(third, "float32"), 2**25) == int(Fraction(third) * 2**25) % P
    assert field.constant(-0.5, "float32") == field.negative(field.constant(0.5, "float32"))
    assert field.constant(float("-inf"), "float32") == field.constant(float(np.finfo("f4").min), "float32") == LOWEST
    assert field.constant(float("inf"), "float16") == field.constant(65504.0, "float16") == HIGHEST
    assert field.constant(65504.0, "float32") == 65504


@pytest.mark.parametrize("seed", range(4))
def test_the_order_is_total_and_has_its_ends(seed: int) -> None:
    order = Order(seed)
    ranks = order.ranks(np.unique(SOME))
    assert len(np.unique(ranks)) == len(np.unique(SOME))
    assert order.ranks(LOWEST) == ranks.min()
    assert order.ranks(HIGHEST) == ranks.max()
    assert (order.ranks(0) == np.sort(ranks)[1]) == (seed % 2 == 0)
    chosen = order.largest(LEFT, RIGHT)
    assert np.array_equal(chosen, order.largest(RIGHT, LEFT))
    assert np.array_equal(field.negative(order.least(LEFT, RIGHT)), field.negative(order.least(RIGHT, LEFT)))
    assert not np.array_equal(chosen, Order(seed + 2).largest(LEFT, RIGHT))


def test_functions_differ_by_name_and_argument() -> None:
    values = field.function_of("exp", [SOME], 0)
    assert np.array_equal(values, field.function_of("exp", [SOME.copy()], 0))
    for other in (field.function_of("erf", [SOME], 0), field.function_of("exp", [SOME], 1)):
        assert not (values == other).any()
    two = field.function_of("pow", [LEFT, RIGHT], 0)
    assert len(np.unique(two)) == len(np.unique(LEFT * P + RIGHT))
    assert field.function_of("exp", [7], 0) == field.function_of("exp", [np.array([7])], 0)[0]


def test_whole_numbers_stay_what_they_are() -> None:
    assert field.whole(7, 0) == 7
    assert field.whole(P - 7, 0) == -7
    half = field.constant(0.5, "float32")
    assert field.whole(half, 0) == field.whole(half, 0)
