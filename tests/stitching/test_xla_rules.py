"""XLA's rules, each where it decides."""

from __future__ import annotations

import pytest
from tvm import te

from souffle.cost import cost_device
from souffle.program import Tensor, TEProgram
from souffle.stitching import FusionPlan, FusionRequest, fusion_planner_for, graph_of
from tests.stitching.graphs import layer_norm, rows_map
from tests.testlib import Builder


def planned(program: TEProgram) -> FusionPlan:
    return fusion_planner_for("xla-rules").plan(FusionRequest(graph_of(program), cost_device("A100-SXM4-40GB")))


def kernels(program: TEProgram) -> list[list[str]]:
    return [list(pattern.tes) for pattern in planned(program).patterns]


def test_layer_normalization_is_four_kernels() -> None:
    """000 Figure 1: two end with a reduction, one with an expensive operator of few elements."""
    plan = planned(layer_norm())
    assert [list(pattern.tes) for pattern in plan.patterns] == [
        ["sum0"],
        ["scale1", "sub2", "square3", "sum4"],
        ["scale5", "rsqrt6"],
        ["normal7", "gamma8", "bias9"],
    ]
    assert [pattern.recomputed for pattern in plan.patterns] == [(), (), (), (1, 2)]


def softmax(b: Builder, x: Tensor) -> Tensor:
    shifted = rows_map(b, lambda v, m: v - m, x, b.reduce(x, 1, "max"), name="sub")
    exponential = b.map(te.exp, shifted, name="exp")
    return rows_map(b, lambda e, t: e / t, exponential, b.reduce(exponential, 1), name="div")


def test_an_expensive_producer_of_a_reduction_and_others_becomes_an_output_of_it() -> None:
    b = Builder()
    assert kernels(b.program(softmax(b, b.input(4, 6)))) == [["max0"], ["sub1", "exp2", "sum3"], ["div4"]]


@pytest.mark.parametrize(("function", "count"), [(te.exp, 2), (lambda v: v * 2.0, 1)])
def test_expensive_results_are_not_computed_for_each_reader_of_a_row(function, count: int) -> None:
    b = Builder()
    few = b.map(function, b.input(4))
    assert len(kernels(b.program(rows_map(b, lambda v, r: v + r, b.input(4, 6), few, name="add")))) == count


def test_products_and_operators_without_expression_stay_alone() -> None:
    b = Builder()
    x = b.input(4, 6)
    product = b.matmul(b.relu(x), b.input(6, 6))
    assert kernels(b.program(b.relu(b.extern_sort(b.relu(product))))) == [
        ["relu0"],
        ["matmul1"],
        ["relu2"],
        ["sort3"],
        ["relu4"],
    ]


def test_siblings_of_one_shape_share_a_kernel() -> None:
    b = Builder()
    x = b.input(4, 6)
    sums = b.reduce(b.scaled(x, 2.0), 1), b.reduce(b.scaled(x, 3.0), 1, "max"), b.reduce(b.scaled(x, 4.0), 0)
    assert kernels(b.program(*sums)) == [["scale0", "sum1", "scale2", "max3"], ["scale4", "sum5"]]
    b = Builder()
    x = b.input(4, 6)
    left, right = b.relu(b.scaled(x, 2.0)), b.transpose(b.scaled(x, 3.0), 1, 0)
    both = b.map(te.exp, b.scaled(left, 2.0))
    # The third needs the first, and the second is of another shape.
    assert kernels(b.program(left, right, both)) == [["scale0", "relu1"], ["scale2", "transpose3"], ["scale4", "map5"]]


@pytest.mark.parametrize(("steps", "count"), [(3, 1), (4, 1), (5, 2), (12, 3)])
def test_code_that_is_needed_at_several_indices_is_bounded(steps: int, count: int) -> None:
    """Each step is read at two places, so that the code of the first stands in the last 2 ** (steps - 1) times."""
    b = Builder()
    x = b.relu(b.input(64))
    for _ in range(steps - 1):
        x = b.add(lambda p: te.compute((64,), lambda i: p[i] + p[63 - i]), x, name="mirror")
    assert len(kernels(b.program(x))) == count


def test_code_at_one_index_stands_in_a_kernel_once() -> None:
    b = Builder()
    x = b.relu(b.input(64))
    for _ in range(20):
        x = b.plus(x, b.scaled(x, 0.5))
    assert len(kernels(b.program(x))) == 1


def test_an_output_that_others_read_is_a_kernel_and_computed_again() -> None:
    for reader in (lambda b, x: b.reduce(x, 0), lambda b, x: b.transpose(x, 1, 0)):
        b = Builder()
        first = b.relu(b.input(4, 6))
        plan = planned(b.program(first, reader(b, first)))
        assert [pattern.recomputed for pattern in plan.patterns] == [(), (0,)]


@pytest.mark.parametrize(("inputs", "again"), [(3, 2), (4, 0)])
def test_a_kernel_goes_into_all_its_readers_where_no_more_bytes_are_moved(inputs: int, again: int) -> None:
    """Of S bytes each: apart n + 1 + 2 tensors are moved for it, and 2 n where both readers compute it."""
    b = Builder()
    total = b.input(4, 6)
    for _ in range(inputs - 1):
        total = b.plus(total, b.input(4, 6))
    readers = [b.transpose(total, 1, 0), b.reduce(total, 1)]
    plan = planned(b.program(*readers))
    assert sum(len(pattern.recomputed) for pattern in plan.patterns) == again
    # Where it is not, it becomes an output of the reduction's kernel.
    assert len(plan.patterns) == 2
