"""Selections: conditions simplified, chains merged, and the same value at every point."""

from __future__ import annotations

import numpy as np
import pytest
from tvm import te, tirx

from souffle.program import Origin, Tensor, TEProgram, make_te
from souffle.program.printer import format_te
from souffle.transform.vertical.selections import merge_selections
from souffle.tvm_compat import fresh_axis
from tests.testlib import assert_same_function, calls_made

pytestmark = pytest.mark.sampled(2)

ORIGIN = Origin(("node",), ("Op",), "group")


class Case:
    """An expression over i < 12, j < 5 that reads T, of shape (40, 12), and U, of shape (99)."""

    def __init__(self, extent: int = 12) -> None:
        self.axes = [fresh_axis(extent, "i"), fresh_axis(5, "j")]
        self.i, self.j = (axis.var for axis in self.axes)
        self.tensors = {name: Tensor(name, shape, "float32") for name, shape in (("T", (40, 12)), ("U", (99,)))}
        self.t, self.u = (te.placeholder(t.shape, "float32", name=t.name) for t in self.tensors.values())

    def merged(self, body) -> str:
        """The text of what `body` becomes; both give the same values."""
        reads = list(zip((self.t, self.u), self.tensors.values(), strict=True))
        before = make_te("O", self.axes, [body], reads, ORIGIN)
        after = make_te("O", self.axes, merge_selections([body], self.axes), reads, ORIGIN)
        assert_same_function(self.program(before), self.program(after))
        return format_te(after).partition(", 0 ≤ i <")[0]

    def program(self, te_) -> TEProgram:
        inputs = tuple(self.tensors.values())
        return TEProgram(inputs, te_.outputs, (te_,), {}, ("T", "U"), ("O",))


def chain(conditions, values):
    """The first value whose condition holds; the last value has none."""
    result = values[-1]
    for condition, value in list(zip(conditions, values, strict=False))[::-1]:
        result = tirx.if_then_else(condition, value, result)
    return result


ZERO = tirx.const(0, "float32")


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        # Conditions that a composition leaves.
        (
            lambda c: chain([c.i - 1 - 1 >= 0, c.i - 1 >= 0], [c.t[c.i, 3], c.u[c.i * c.i], c.t[c.j, 0]]),
            "where(i < 1, T[j, 0], where(i < 2, U[1], T[i, 3]))",
        ),
        # Impossible under the axes' bounds, and under the conditions around.
        (lambda c: tirx.if_then_else(c.i < 12, c.u[c.i], c.t[0, 0]), "U[i]"),
        (lambda c: tirx.if_then_else(c.i + c.j >= 16, c.u[c.i], c.t[0, 0]), "T[0, 0]"),
        (
            lambda c: tirx.if_then_else(c.i < 4, tirx.if_then_else(c.i < 6, c.u[c.i % 4], ZERO), c.t[c.j, c.i % 4]),
            "where(i < 4, U[i], T[j, i % 4])",
        ),
        # Equal values.
        (lambda c: tirx.if_then_else(c.t[c.i, 0] > 0, te.exp(c.u[c.i]), te.exp(c.u[c.i])), "exp(U[i])"),
        (lambda c: tirx.if_then_else(c.i * c.j < 7, te.exp(c.u[c.i]), te.exp(c.u[c.i + 1 - 1])), "exp(U[i])"),
        (lambda c: chain([c.i < 3, c.i < 7], [c.u[c.j], c.u[c.j], c.t[0, c.j]]), "where(i < 7, U[j], T[0, j])"),
        # Equal intervals.
        (lambda c: chain([c.i < 4, c.i < 8], [c.t[k, c.i - 4 * k] for k in range(3)]), "T[i // 4, i % 4]"),
        (lambda c: chain([c.i < 5, c.i < 10], [c.t[2 * k, c.i - 5 * k] for k in range(3)]), "T[i // 5 * 2, i % 5]"),
        (lambda c: chain([c.i < k for k in range(1, 12)], [c.u[7 * k + c.j] for k in range(12)]), "U[i * 7 + j]"),
        (lambda c: chain([c.i.equal(k) for k in range(11)], [c.u[90 - k] for k in range(12)]), "U[90 - i]"),
        (lambda c: chain([c.i < 1], [c.u[0], c.u[c.i - 1 + 1]]), "U[i]"),
        (lambda c: chain([c.i < 11], [c.u[c.i], c.u[11]]), "U[i]"),
        (
            lambda c: chain([c.i < 6], [c.u[c.i] * c.t[3, c.j], c.u[c.i + 6] * c.t[9, c.j]]),
            "U[i // 6 * 6 + i] * T[i // 6 * 6 + 3, j]",
        ),
        # Rotations, of one expression and of several, alone and through arithmetic on the place.
        (lambda c: chain([c.i < 4], [c.u[c.i + 8], c.u[c.i - 4]]), "U[(i + 8) % 12]"),
        (lambda c: chain([c.i < 9], [c.u[c.i + 3], c.u[c.i - 9]]), "U[(i + 3) % 12]"),
        (
            lambda c: chain([c.i < 3], [c.t[c.j, c.i + k] * c.u[c.j + c.i + k + 11] for k in (9, -3)]),
            "T[j, (i + 9) % 12] * U[j + (i + 9) % 12 + 11]",
        ),
        (
            lambda c: chain([c.i < 4], [c.t[(c.i + 8) // 6, (c.i + 8) % 6], c.t[(c.i - 4) // 6, (c.i - 4) % 6]]),
            "T[(i + 8) % 12 // 6, (i + 2) % 6]",
        ),
        (lambda c: chain([c.i < 4], [c.u[c.i + 9], c.u[c.i - 4]]), "where(i < 4, U[i + 9], U[i - 4])"),
        # Along a sum of axes.
        (
            lambda c: chain([c.i * 5 + c.j < 24, c.i * 5 + c.j < 48], [c.t[k, c.j] for k in range(3)]),
            "T[(i * 5 + j) // 24, j]",
        ),
        # Not one function: what is equal in a row is merged, the rest stays.
        (
            lambda c: chain([c.i < 2, c.i < 4, c.i < 6, c.i < 8], [c.t[k, c.j] for k in (0, 1, 2, 9, 5)]),
            "where(i < 6, T[i // 2, j], where(i < 8, T[9, j], T[5, j]))",
        ),
        (lambda c: chain([c.i < 3], [c.t[0, c.i], c.t[1, c.i - 3]]), "where(i < 3, T[0, i], T[1, i - 3])"),
        (lambda c: chain([c.i < 6], [c.t[0, c.i], c.u[c.i]]), "where(i < 6, T[0, i], U[i])"),
        # A padding stays one condition.
        (
            lambda c: tirx.if_then_else(tirx.all(c.i >= 2, c.i < 8), c.u[c.i - 2], ZERO),
            "where(i >= 2 and i < 8, U[i - 2], 0)",
        ),
        (
            lambda c: tirx.if_then_else(tirx.any(c.i < 2, c.i >= 8), ZERO, c.u[c.i - 2]),
            "where(i >= 2 and i < 8, U[i - 2], 0)",
        ),
        (lambda c: tirx.if_then_else(c.i.equal(4), c.u[c.i], c.t[c.i, 0]), "where(i == 4, U[4], T[i, 0])"),
        # Conditions that are no interval of one sum.
        (
            lambda c: tirx.if_then_else(tirx.all(c.i < 6, c.j < 2), c.u[c.i % 6 + c.j % 2], ZERO),
            "where(i < 6 and j < 2, U[i + j], 0)",
        ),
        # Around data, index arithmetic is simplified for any value of it.
        (lambda c: c.t[(te.abs(c.t[c.j, 0]).astype("int32") * 12 + c.i) % 12, c.i - c.j + c.j], "T[i, i]"),
        (
            lambda c: c.u[(te.abs(c.t[c.i, c.i // 12]).astype("int32") * 12 + c.i) // 12],
            "U[int32(fabs(T[i, 0]))]",
        ),
        # Data in the index of one value is no multiple of anything.
        (
            lambda c: chain([c.i < 6], [c.u[te.abs(c.t[k, c.j]).astype("int32")] for k in range(2)]),
            "where(i < 6, U[int32(fabs(T[0, j]))], U[int32(fabs(T[1, j]))])",
        ),
    ],
)  # fmt: skip
def test_what_a_selection_becomes(make, expected: str) -> None:
    case = Case()
    text = case.merged(make(case))
    assert text == f"O[i, j] = {expected}"


def test_a_choice_that_guards_its_values_keeps_guarding() -> None:
    case = Case()
    guarded = tirx.if_then_else(case.i < 8, case.u[case.i - 4], case.t[case.i, 0])
    (merged,) = merge_selections([tirx.Select(case.i < 4, case.t[0, case.i], guarded)], case.axes)
    assert not isinstance(merged, tirx.Select) and "if_then_else" in str(merged)
    (selected,) = merge_selections([tirx.Select(case.i < 4, case.t[0, case.i], case.u[case.i])], case.axes)
    assert isinstance(selected, tirx.Select)


def test_reductions_keep_their_form() -> None:
    case = Case()
    k = te.reduce_axis((0, 8), "k")
    body = te.sum(tirx.if_then_else(k.var < 4, case.t[0, k.var], case.t[1, k.var - 4]), axis=[k])
    (merged,) = merge_selections([body], [*case.axes, k])
    assert isinstance(merged, tirx.Reduce) and "if_then_else" not in str(merged)


@pytest.mark.parametrize(("rows", "merges"), [(range(400), True), (range(0, 1200, 3), True), (None, False)])
def test_work_grows_with_the_branches_and_not_faster(rows: range | None, merges: bool) -> None:
    order = np.random.default_rng(0).permutation(400) if rows is None else rows

    def work(branches: int) -> int:
        case = Case(branches)
        source = te.placeholder((1200, 5), "float32", name="S")
        body = chain([case.i < k for k in range(1, branches)], [source[int(order[k]), case.j] for k in range(branches)])
        merged: list[tirx.PrimExpr] = []
        calls = calls_made(lambda: merged.extend(merge_selections([body], case.axes)))
        assert ("if_then_else" not in str(merged[0])) == merges
        return calls

    work(10)
    assert work(100) < 6 * work(20)
