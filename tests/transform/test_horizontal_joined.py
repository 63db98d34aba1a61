"""TEs that differ in the extent of one axis: joined along it, with no selection or one on whole tiles (Figure 3)."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tvm import te

from souffle.program import Tensor, TEProgram
from souffle.transform import horizontal
from tests.testlib import Builder, assert_same_function
from tests.thorough import sized

RNG = np.random.default_rng(0)


def weights(*shape: int) -> np.ndarray:
    return RNG.integers(-3, 4, shape).astype(np.float32)


def lines(program: TEProgram) -> list[str]:
    """The program's TEs as printed, without their origins."""
    text = [line.partition("   #")[0] for line in str(program).splitlines()]
    return [line for line in text if "] = " in line]


def test_figure_3_of_the_paper() -> None:
    b = Builder()
    first = b.matmul(b.input(4, 8), b.input(8, 16))
    second = b.matmul(b.input(2, 8), b.input(8, 16))
    program = b.program(b.concat(first, second, 0))
    result, (decision,) = horizontal(program)
    assert lines(result)[0] == (
        "matmul0_x2[i, j] = sum(where(i < 4, x0[i, rk], x2[i - 4, rk]) * where(i < 4, x1[rk, j], x3[rk, j])), "
        "0 ≤ i < 6, 0 ≤ j < 16, rk < 8"
    )
    assert decision.accepted and "joined along axis 0" in decision.reason
    assert_same_function(program, result)


def test_grouped_query_attention_is_one_product_without_selection() -> None:
    b = Builder()
    x = b.input(4, 6)
    parts = []
    for columns in (12, 4, 4):
        parts.append(b.relu(b.bias(b.matmul(x, b.constant(weights(6, columns))), b.constant(weights(columns)))))
    program = b.program(*(b.reduce(part, 1) for part in parts))
    result, decisions = horizontal(program)
    assert lines(result)[:3] == [
        "matmul0_x3[i, j] = sum(x0[i, rk] * w0_x3[rk, j]), 0 ≤ i < 4, 0 ≤ j < 20, rk < 6",
        "bias1_x3[i, j] = matmul0_x3[i, j] + w1_x3[j], 0 ≤ i < 4, 0 ≤ j < 20",
        "relu2_x3[i, j] = max(bias1_x3[i, j], 0), 0 ≤ i < 4, 0 ≤ j < 20",
    ]
    packed = {t.name: array for t, array in result.constants.items()}
    original = [array for t, array in program.constants.items() if t.shape[0] == 6]
    np.testing.assert_array_equal(packed["w0_x3"], np.concatenate(original, axis=1))
    assert all(d.accepted for d in decisions)
    assert_same_function(program, result)


def test_heads_of_queries_and_keys_are_joined_though_each_is_several_columns() -> None:
    b = Builder()
    x = b.input(4, 6)
    parts = [b.matmul(x, b.constant(weights(6, 4 * heads))) for heads in (4, 2)]
    heads = [b.tanh(b.reshape(b.relu(part), 4, count, 4)) for part, count in zip(parts, (4, 2), strict=True)]
    program = b.program(*(b.reduce(head, 2) for head in heads))
    result, _ = horizontal(program)
    names = [te_.name for te_ in result.tes]
    assert {"matmul0_x2", "relu2_x2"} <= set(names) and "where" not in str(result)
    assert_same_function(program, result)


def convolved(b: Builder, x: Tensor, filters: int) -> Tensor:
    """A 1 x 1 convolution."""
    return b.add(
        lambda p, q: _pointwise(p, q), x, b.constant(weights(filters, x.shape[1], 1, 1)), name="conv"
    )


def _pointwise(p, q):
    from_channels = te.reduce_axis((0, p.shape[1]), "rc")
    shape = (p.shape[0], q.shape[0], p.shape[2], p.shape[3])
    return te.compute(
        shape, lambda n, f, i, j: te.sum(p(n, from_channels, i, j) * q(f, from_channels, 0, 0), axis=[from_channels])
    )


def test_branches_of_an_inception_block_read_their_input_once() -> None:
    b = Builder()
    x = b.input(1, 3, 4, 4)
    branches = [b.relu(convolved(b, x, filters)) for filters in (4, 6, 2)]
    last = branches[0]
    for branch in branches[1:]:
        last = b.concat(last, branch, 1)
    program = b.program(last)
    result, _ = horizontal(program)
    (te_,) = [t for t in result.tes if t.is_reduction]
    assert te_.output.shape == (1, 12, 4, 4) and "if_then_else" not in str(te_.body)
    assert [t.name for t in result.tes][:2] == ["conv0_x3", "relu1_x3"]
    assert_same_function(program, result)


def test_constants_that_the_axis_does_not_index_are_stacked_and_chosen_by_row() -> None:
    b = Builder()
    x = b.relu(b.input(48, 8))
    parts = [b.matmul(b.slice(x, 0, 0, 32), b.constant(weights(8, 3)))]
    parts.append(b.matmul(b.slice(x, 0, 32, 48), b.constant(weights(8, 3))))
    program = b.program(*(b.reduce(part, 1) for part in parts))
    result, _ = horizontal(program)
    assert "sum(slice1_x2[i, rk] * w0_x2[where(i < 32, 0, 1), rk, j])" in str(result)
    assert_same_function(program, result)


def test_parts_that_share_an_input_are_joined_where_the_whole_would_select() -> None:
    b = Builder()
    x, y = b.input(4, 6), b.input(4, 6)
    products = [b.matmul(t, b.constant(weights(6, n))) for t in (x, y) for n in (3, 5)]
    program = b.program(*(b.reduce(product, 1) for product in products))
    result, _ = horizontal(program)
    joined = [t for t in result.tes if t.name.startswith("matmul")]
    assert [t.output.shape for t in joined] == [(4, 8), (4, 8)] and "where" not in str(result)
    assert_same_function(program, result)


@pytest.mark.parametrize(("rows", "merged"), [((64, 68), False), ((64, 32), True), ((48, 16), True), ((2, 64), False)])
def test_a_selection_stands_between_whole_tiles(rows: tuple[int, int], merged: bool) -> None:
    b = Builder()
    products = [b.matmul(b.input(n, 8), b.input(8, 3)) for n in rows]
    program = b.program(*(b.reduce(product, 1) for product in products))
    result, decisions = horizontal(program)
    assert decisions[0].accepted == merged and (result is not program) == merged
    assert merged or "tiles of 16 along the joined axis" in decisions[0].reason
    assert_same_function(program, result)


def test_no_selection_where_it_would_leave_more_kernels() -> None:
    b = Builder()
    parts = []
    for number, rows in enumerate((32, 16)):
        b.grouped(f"branch {number}")
        parts.append(b.relu(b.matmul(b.input(rows, 8), b.input(8, 4))))
    program = b.program(*parts)
    result, decisions = horizontal(program)
    assert result is program and "would be 3 kernels in the place of 2" in decisions[0].reason


def test_element_wise_tes_are_not_joined_where_they_would_select() -> None:
    b = Builder()
    parts = [b.relu(b.input(3, columns)) for columns in (5, 7)]
    program = b.program(*(b.reduce(part, 1) for part in parts))
    result, decisions = horizontal(program)
    assert result is program
    assert decisions[0].reason == "an element-wise TE would spend more on selecting along an axis that is joined"


def test_an_axis_in_a_condition_is_not_joined() -> None:
    b = Builder()
    x = b.relu(b.input(4, 12))
    parts = [b.pad(b.slice(x, 1, start, stop), 1, 1, 1) for start, stop in ((0, 5), (5, 12))]
    program = b.program(*(b.reduce(part, 1) for part in parts))
    result, _ = horizontal(program)
    assert [te_.name for te_ in result.tes if te_.name.startswith("pad")] == ["pad2", "pad4"]
    assert_same_function(program, result)


def test_results_that_the_program_gives_away_stay_apart() -> None:
    b = Builder()
    x = b.input(4, 6)
    program = b.program(*(b.matmul(x, b.constant(weights(6, columns))) for columns in (3, 5)))
    assert horizontal(program)[0] is program


def test_gathered_rows_are_joined() -> None:
    b = Builder()
    x = b.relu(b.input(9, 4))
    rows = [b.constant(np.asarray(chosen, np.int32)) for chosen in ((1, 5), (0, 3, 8))]
    program = b.program(*(b.reduce(b.tanh(b.gather(x, r)), 1) for r in rows))
    result, _ = horizontal(program)
    assert "relu0[w0_x2[i], j]" in str(result)
    assert_same_function(program, result)


class _Branches:
    """Random sets of parallel branches of products and element-wise TEs, with unequal extents."""

    def __init__(self, draw: st.DrawFn) -> None:
        self.draw, self.b = draw, Builder()

    def of(self, options) -> object:
        return self.draw(st.sampled_from(list(options)))

    def program(self) -> TEProgram:
        b = self.b
        wide = b.input(self.of((3, 8, 32)), 12)
        sources = [wide, b.relu(wide), b.input(self.of((2, 16, 32)), 12)]
        shared = b.constant(weights(12, 3))
        branches = []
        for _ in range(self.of(range(2, 6))):
            x = self.of(sources[: self.of((1, 2, 3))])
            kind = self.of(("product", "product", "rows", "columns", "shared"))
            if kind == "product":
                x = b.matmul(x, b.constant(weights(12, self.of((3, 4, 7)))))
            elif kind == "shared":
                x = b.matmul(x, shared)
            elif kind == "rows":
                first = self.of(range(x.shape[0]))
                x = b.slice(x, 0, first, self.of(range(first + 1, x.shape[0] + 1)))
            else:
                first = self.of(range(6))
                x = b.slice(x, 1, first, first + self.of(range(1, 7)))
            for _ in range(self.of(range(3))):
                x = self.follow(x)
            branches.append(x)
        return b.program(*(b.reduce(x, 1) for x in branches))

    def follow(self, x: Tensor) -> Tensor:
        b = self.b
        kind = self.of(("relu", "tanh", "bias", "transpose"))
        if kind == "bias":
            return b.bias(x, b.constant(weights(x.shape[1])))
        return {"relu": b.relu, "tanh": b.tanh, "transpose": lambda t: b.transpose(t, 1, 0)}[kind](x)


@settings(
    max_examples=sized(15, 30),
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
@given(st.data())
def test_random_branches_keep_every_bit(data: st.DataObject) -> None:
    program = _Branches(data.draw).program()
    result, decisions = horizontal(program)
    result.check()
    assert result is program or any(d.accepted for d in decisions)
    assert_same_function(program, result)


def test_outputs_of_the_program_stay_apart_and_the_reason_is_given() -> None:
    """The paper's Figure 3 as it stands: both results leave the program."""
    b = Builder()
    first = b.matmul(b.input(4, 8), b.input(8, 16))
    second = b.matmul(b.input(2, 8), b.input(8, 16))
    program = b.program(first, second)
    result, decisions = horizontal(program)
    assert result is program
    assert [d.subject for d in decisions] == ["matmul0", "matmul1"]
    assert "output of the program; merged with matmul1 it would be copied out again" in decisions[0].reason
