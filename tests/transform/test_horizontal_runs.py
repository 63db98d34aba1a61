"""Formulas over the members of a horizontal transformation, and the orders and packs that make them fit."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from souffle.program import Tensor
from souffle.transform import horizontal
from souffle.transform.horizontal.operands import Fit, fit
from souffle.transform.horizontal.packs import Pack, Packs
from tests.testlib import Builder, assert_same_function

RNG = np.random.default_rng(0)


def weights(*shape: int) -> np.ndarray:
    return RNG.integers(-3, 4, shape).astype(np.float32)


@pytest.mark.parametrize(
    ("values", "formula"),
    [
        ((5, 5, 5), Fit(5)),
        ((7,), Fit(7)),
        ((2, 5, 8, 11), Fit(2, outer=3)),
        ((9, 7), Fit(9, outer=-2)),
        ((0, 0, 1, 1, 2, 2), Fit(0, outer=1, period=2)),
        ((0, 1, 1, 2, 2), Fit(0, outer=1, period=2, phase=1)),
        ((3, 3, 3, 1, 1), Fit(3, outer=-2, period=3)),
        ((0, 1, 2, 0, 1, 2, 0), Fit(0, outer=0, inner=1, period=3)),
        ((0, 1, 2, 4, 5, 6, 8), Fit(0, outer=4, inner=1, period=3)),
    ],
)
def test_the_formula_of_a_sequence(values: tuple[int, ...], formula: Fit) -> None:
    assert fit(values) == formula
    assert tuple(formula.at(g) for g in range(len(values))) == values


@pytest.mark.parametrize("values", [(0, 3, 10, 11, 17), (0, 1, 0, 0, 1), (0, 0, 1, 1, 1, 2, 2, 3), (1, 2, 4, 8, 16)])
def test_sequences_without_a_formula(values: tuple[int, ...]) -> None:
    assert fit(values) is None


@settings(max_examples=300, deadline=None, derandomize=True, database=None)
@given(
    st.integers(-9, 9), st.integers(-9, 9), st.integers(-9, 9), st.integers(1, 6), st.integers(0, 5), st.integers(1, 24)
)
def test_every_sequence_of_two_digits_has_its_formula(
    base: int, outer: int, inner: int, period: int, phase: int, count: int
) -> None:
    values = tuple(Fit(base, outer, inner, period, phase % period).at(g) for g in range(count))
    found = fit(values)
    assert found is not None and tuple(found.at(g) for g in range(count)) == values


@settings(max_examples=300, deadline=None, derandomize=True, database=None)
@given(st.lists(st.integers(-4, 4), min_size=1, max_size=9).map(tuple))
def test_a_formula_is_exact_at_every_member(values: tuple[int, ...]) -> None:
    found = fit(values)
    assert found is None or tuple(found.at(g) for g in range(len(values))) == values


def test_members_that_share_their_operand_in_pairs_need_no_selection() -> None:
    b = Builder()
    x = b.input(3, 4, 6)
    states = [b.relu(b.reshape(b.slice(x, 0, n, n + 1), 4, 6)) for n in range(3)]
    order = (0, 0, 1, 1, 2)  # as on a wavefront: each state is read by its own cell and by the next layer's
    products = [b.matmul(states[n], b.constant(weights(6, 5))) for n in order]
    total = products[0]
    for product in products[1:]:
        total = b.plus(total, product)
    program = b.program(total)
    result, _ = horizontal(program)
    (te_,) = [t for t in result.tes if t.is_reduction]
    assert "relu2_x3[i // 2, j, rk]" in str(result) and "where" not in str(te_.body)
    assert te_.output.shape == (5, 4, 5)
    assert_same_function(program, result)


def test_members_are_sorted_where_that_needs_fewer_selections() -> None:
    b = Builder()
    x, y = b.input(4, 6), b.input(4, 6)
    products = [b.matmul(t, b.constant(weights(6, 5))) for t in (x, y, x, y, x)]
    total = products[0]
    for product in products[1:]:
        total = b.plus(total, product)
    program = b.program(total)
    result, decisions = horizontal(program)
    assert decisions[0].subject == "matmul0, matmul2, matmul4, matmul1, matmul3"
    assert "where(i < 3, x0[j, rk], x1[j, rk])" in str(result)
    assert_same_function(program, result)


def test_a_formula_never_multiplies_an_axis() -> None:
    b = Builder()
    x = b.input(4, 24)
    program = b.program(b.plus(b.tanh(b.slice(x, 1, 0, 12, 2)), b.tanh(b.slice(x, 1, 0, 18, 3))))
    result, decisions = horizontal(program)
    assert result is program and not any(d.accepted for d in decisions)
    assert decisions[0].subject == "slice0, slice2"


def test_overlapping_packs_are_windows_of_one() -> None:
    tensors = [Tensor(f"w{n}", (2,), "float32") for n in range(5)]
    arrays = {t: np.full(2, n, np.float32) for n, t in enumerate(tensors)}
    packs = Packs(arrays, lambda name: name)
    parts = [tuple(tensors[a:b]) for a, b in ((0, 3), (0, 4), (1, 5), (2, 5))]
    small = [packs.tensor(Pack(part)) for part in parts]
    windows = packs.windows()
    (whole,) = {place.tensor for place in windows.values()}
    assert whole.shape == (5, 2) and [windows[t].offset for t in small] == [0, 0, 1, 2]
    np.testing.assert_array_equal(packs.arrays([whole])[whole][:, 0], np.arange(5))


def test_packs_without_a_common_tensor_stay_apart() -> None:
    tensors = [Tensor(f"w{n}", (2,), "float32") for n in range(4)]
    packs = Packs({}, lambda name: name)
    packs.tensor(Pack(tuple(tensors[:2])))
    packs.tensor(Pack(tuple(tensors[2:])))
    assert not packs.windows()
