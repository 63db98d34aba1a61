"""Kinds are found from expressions and never from names; edges carry bytes; isl says which axes are one."""

from __future__ import annotations

import numpy as np
import pytest
from tvm import te, tirx

from souffle.program import Tensor
from souffle.stitching import Kind, graph_of
from souffle.stitching.axes import Alignment
from tests.stitching.graphs import layer_norm, multi_interests
from tests.testlib import Builder


def kind(made: Tensor, b: Builder) -> Kind:
    return graph_of(b.program(made)).ops[-1].kind


def summed(b: Builder, shape, extents, value, *inputs: Tensor) -> Tensor:
    """A sum over axes of `extents` of ``value(placeholders, output index, reduction axes)``."""

    def made(*ps):
        axes = [te.reduce_axis((0, extent), f"k{n}") for n, extent in enumerate(extents)]
        return te.compute(shape, lambda *i: te.sum(value(ps, i, axes), axis=axes))

    return b.add(made, *inputs)


def test_elementwise_is_expensive_where_it_calls_a_function() -> None:
    for made, expected in [
        (lambda b, x: b.relu(x), Kind.LIGHT),
        (lambda b, x: b.transpose(x, 1, 0), Kind.LIGHT),
        (lambda b, x: b.map(lambda v: v / (v + 1.0), x), Kind.LIGHT),
        (lambda b, x: b.map(te.exp, x), Kind.EXPENSIVE),
        (lambda b, x: b.map(lambda v: te.abs(v) + te.floor(v), x), Kind.LIGHT),
        (lambda b, x: b.map(lambda v: tirx.max(te.tanh(v), tirx.const(0.0)), x), Kind.EXPENSIVE),
    ]:
        b = Builder()
        assert kind(made(b, b.input(4, 6)), b) is expected


def test_reductions_by_the_axis_that_is_left() -> None:
    for made, expected in [
        (lambda b: b.reduce(b.input(4, 6), 1), Kind.ROW),
        (lambda b: b.reduce(b.input(4, 6), 0, "max"), Kind.COLUMN),
        (lambda b: b.reduce(b.input(7), 0), Kind.SCALAR),
        (lambda b: b.reduce(b.input(4, 6, 1), 1), Kind.ROW),
        (lambda b: b.reduce(b.input(1, 6), 1), Kind.SCALAR),
        (lambda b: summed(b, (4,), (6,), lambda p, i, k: p[0](i[0], k[0]) * p[0](i[0], k[0]), b.input(4, 6)), Kind.ROW),
    ]:
        b = Builder()
        assert kind(made(b), b) is expected


def test_contractions_by_the_axes_of_their_factors() -> None:
    def product(b: Builder, shape, left, right, *inputs: Tensor) -> Tensor:
        return summed(b, shape, (6,), lambda p, i, k: left(p[0], i, k[0]) * right(p[1], i, k[0]), *inputs)

    b = Builder()
    x, w = b.input(4, 6), b.input(6, 5)
    assert kind(b.matmul(x, w), b) is Kind.GEMM
    one = b.input(1, 6)
    assert kind(b.matmul(one, w), b) is Kind.GEMM
    many, others = b.input(3, 4, 6), b.input(3, 6, 5)
    batched = product(b, (3, 4, 5), lambda p, i, k: p(i[0], i[1], k), lambda p, i, k: p(i[0], k, i[2]), many, others)
    assert kind(batched, b) is Kind.BATCHED_GEMM
    wide = b.map(lambda v: v, b.input(4, 6, dtype="float16"))
    cast = product(
        b, (4, 5), lambda p, i, k: p(i[0], k).astype("float32"), lambda p, i, k: p(k, i[1]), wide, b.input(6, 5)
    )
    assert kind(cast, b) is Kind.GEMM
    signal, taps = b.input(4, 9), b.input(4, 6)
    window = product(b, (4, 4), lambda p, i, k: p(i[0], i[1] + k), lambda p, i, k: p(i[0], k), signal, taps)
    assert kind(window, b) is Kind.WINDOW


def test_an_operator_without_an_expression_is_extern() -> None:
    b = Builder()
    assert kind(b.extern_sort(b.input(4, 6)), b) is Kind.EXTERN


def test_edges_carry_what_is_read_and_constants_are_known() -> None:
    b = Builder()
    x = b.input(4, 8)
    first = b.relu(x)
    half = b.slice(first, 1, 0, 8, 2)
    biased = b.bias(half, b.constant(np.ones(4, np.float32)))
    graph = graph_of(b.program(b.plus(biased, half)))
    assert graph.edges == ((0, 1, 64), (1, 2, 64), (2, 3, 64), (1, 3, 64))
    assert [read.constant for read in graph.ops[2].reads] == [False, True]
    assert graph.producers == ((), (0,), (1,), (1, 2)) and graph.consumers == ((1,), (2, 3), (3,), ())
    assert [op.needed for op in graph.ops] == [False, False, False, True]
    assert graph.is_convex([1, 2, 3]) and not graph.is_convex([1, 3])


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda b, x: b.relu(x), {Alignment(0, 0, 12), Alignment(1, 1, 6)}),
        (lambda b, x: b.transpose(x, 1, 0), {Alignment(0, 1, 12), Alignment(1, 0, 6)}),
        (lambda b, x: b.reshape(x, 3, 4, 6), {Alignment(0, 0, 3), Alignment(1, 2, 6)}),
        (lambda b, x: b.reshape(x, 72), {Alignment(0, 0, 12)}),
        (lambda b, x: b.reduce(x, 0), {Alignment(0, 1, 12), Alignment(1, 0, 6)}),
        (lambda b, x: b.slice(x, 0, 1, 12), {Alignment(1, 1, 6)}),
        (lambda b, x: b.gather(x, b.constant(np.array([1, 0], np.int32))), {Alignment(1, 1, 6)}),
    ],
)
def test_axes_lie_along_each_other(make, expected: set[Alignment]) -> None:
    b = Builder()
    graph = graph_of(b.program(make(b, b.relu(b.input(12, 6)))))
    (read,) = (read for read in graph.ops[-1].reads if read.producer == 0)
    assert set(read.alignments) == expected


def test_the_graphs_of_the_papers_have_their_kinds() -> None:
    norm = [op.kind for op in graph_of(layer_norm()).ops]
    assert (norm.count(Kind.ROW), norm.count(Kind.EXPENSIVE), norm.count(Kind.LIGHT)) == (2, 1, 7)
    graph = graph_of(multi_interests())
    kinds = [op.kind for op in graph.ops]
    assert (kinds.count(Kind.BATCHED_GEMM), kinds.count(Kind.ROW)) == (2, 2)
    assert kinds.count(Kind.LIGHT) + kinds.count(Kind.EXPENSIVE) == 9
