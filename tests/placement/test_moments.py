"""Moments of rows in chunks: equal in a finite field, where the definition is; and how far off they are in fp32."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from tvm import tirx

import souffle
from souffle.decision import Refused
from souffle.models.builder import GraphBuilder
from souffle.models.layers import layer_norm, linear
from souffle.placement.moments import chunked_square, chunked_sum, second_moment
from souffle.program import TE, TEProgram, parts_of
from souffle.program.evaluate import evaluate
from souffle.schedule.stage import draft_stage
from souffle.transform import vertical
from souffle.tvm_compat import collect
from souffle.verify.values.inputs import random_tensors
from souffle.verify.values.points import KINDS, literals_of, numbers_at
from souffle.verify.values.reference import DefinitionRun


def moments_of(rows: int, columns: int) -> tuple[list, TEProgram]:
    """The two reductions of a layer normalization of an input, and the program that they stand in."""
    b = GraphBuilder("g", 0)
    x = b.input("x", (rows, columns))
    b.output(layer_norm(b, b.node("Relu", x), columns, 1e-5), "y", (rows, columns))
    program, _ = vertical(souffle.import_onnx(b.model()))
    return [item for item in program.tes if not isinstance(item, souffle.program.Loop) and item.is_reduction], program


def whole_and_chunks(rows: int, columns: int, size: int) -> tuple[TEProgram, TEProgram]:
    """A program of the second moment of rows, and the same in chunks."""
    (first, second), program = moments_of(rows, columns)
    assert second_moment(first) is None and second_moment(second) is not None
    sums = chunked_sum(first, "product", size, "_chunk")
    squares = chunked_square(second, sums.inside, "product", size, "_chunk")
    element = next(t for t in second.inputs if t.size == rows * columns)
    result = (second.outputs[0],)

    def made(*items) -> TEProgram:
        parts = tuple(part.placed(None) for item in items for part in parts_of(item))
        return TEProgram((element,), result, parts, {}, ("x",), ("v",))

    assert program.producers[element].is_reduction is False
    return made(first, second), made(sums.inside, squares.inside, sums.total, squares.total)


def in_field(program: TEProgram, kind: int, change=lambda func: func) -> np.ndarray:
    """What a program defines at a random point of a finite field."""
    func = change(draft_stage(program.tes, program).func)
    literals = literals_of([func])
    numbers = numbers_at(KINDS[kind], 1, literals)
    buffers = list(func.params)
    values = random_tensors(buffers, (0, 1), numbers, KINDS[kind].inputs, literals)
    run = DefinitionRun(func, {buffers[0]: values[0]}, numbers, {})
    return run.elements(buffers[1], np.arange(program.outputs[0].size))


@pytest.mark.parametrize(("columns", "size"), [(64, 16), (96, 32), (100, 32), (7, 4), (383, 64), (33, 32)])
def test_chunks_make_the_same_moment_in_any_field(columns: int, size: int) -> None:
    whole, chunks = whole_and_chunks(3, columns, size)
    for kind in (0, 1):
        np.testing.assert_array_equal(in_field(whole, kind), in_field(chunks, kind))


@pytest.mark.parametrize("kind", ["mean", "count", "second term", "square"])
def test_a_wrong_identity_is_refuted(kind: str) -> None:
    """Mutants of what chunks compute and of what is made of it: each defines another number."""
    whole, chunks = whole_and_chunks(3, 96, 32)
    inside, total = chunks.tes[1], chunks.tes[-1]

    def mutated(te_: TE, old: type, new) -> TE:
        body = te_.op.body[0]
        source = body.source[0]
        nodes = collect(source, old)
        assert nodes, f"{te_.name} has no {old.__name__}"
        wrong = new(source)
        reduce = tirx.Reduce(body.combiner, [wrong], list(body.axis), body.condition, 0, [])
        return replace(te_, op=souffle.tvm_compat.compute_op(te_.name, list(te_.axes), [reduce]))

    changes = {
        "mean": (1, inside, tirx.Sub, lambda e: (e.a.a - e.a.b * 2.0) * (e.a.a - e.a.b * 2.0)),
        "count": (-1, total, tirx.Mul, lambda e: e.a + e.b * 2.0),
        "second term": (-1, total, tirx.Add, lambda e: e.a),
        "square": (1, inside, tirx.Mul, lambda e: e.a),
    }
    place, te_, old, new = changes[kind]
    tes = list(chunks.tes)
    tes[place] = mutated(te_, old, new)
    if kind == "second term":
        used = {t for part in tes[:-1] for t in part.inputs} | set(tes[-1].inputs)
        tes = [part for part in tes if part is tes[-1] or used.intersection(part.outputs)]
    wrong = replace(chunks, tes=tuple(tes))
    assert (in_field(whole, 0) != in_field(wrong, 0)).any()


@pytest.mark.parametrize(("mean", "columns", "size"), [(0.0, 96, 32), (1e4, 768, 64), (1e4, 383, 64), (-3e4, 96, 32)])
def test_a_large_mean_cancels_nothing(mean: float, columns: int, size: int) -> None:
    whole, chunks = whole_and_chunks(16, columns, size)
    x = (mean + np.random.default_rng(0).standard_normal((16, columns))).astype(np.float32)
    exact = ((x.astype(np.float64) - x.astype(np.float64).mean(1, keepdims=True)) ** 2).sum(1)
    # The bound of the docstring with a depth of 8, and of what summing up adds.
    u = 2.0**-24
    bound = 2 * 8 * u * max(abs(mean), 1) + (8 * u * mean) ** 2 + 64 * u
    found = evaluate(chunks, {"x": x})["v"].reshape(-1)
    np.testing.assert_array_less(abs(found / exact - 1), bound)
    if mean:
        naive = (x * x).sum(1, dtype=np.float32) - x.sum(1, dtype=np.float32) ** 2 / np.float32(columns)
        assert abs(naive / exact - 1).max() > 10 * bound
    assert whole.outputs == chunks.outputs


def test_a_constant_row_has_no_moment() -> None:
    _, chunks = whole_and_chunks(4, 96, 32)
    x = np.repeat(np.array([[0.0], [1.0], [0.1], [12345.678]], np.float32), 96, axis=1)
    found = evaluate(chunks, {"x": x})["v"].reshape(-1)
    assert (found >= 0).all()
    # Its mean is rounded once: no element is further from it than half of a unit in the last place.
    assert (found <= 96 * (8 * 2.0**-24 * x[:, 0]) ** 2).all()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_no_number_makes_its_row_none(value: float) -> None:
    _, chunks = whole_and_chunks(3, 96, 32)
    x = np.ones((3, 96), np.float32)
    x[1, 40] = value
    found = evaluate(chunks, {"x": x})["v"].reshape(-1)
    assert np.isnan(found[1]) and found[0] == found[2] == 0


def test_other_reductions_are_no_second_moments() -> None:
    b = GraphBuilder("g", 0)
    x = linear(b, b.input("x", (1, 20, 32)), 32, 64)
    b.output(b.node("Softmax", x, axis=-1), "y", (1, 20, 64))
    program, _ = vertical(souffle.import_onnx(b.model()))
    for item in program.tes:
        if item.is_reduction:
            assert second_moment(item) is None
            assert isinstance(chunked_square(item, item, "t", 16, "_chunk"), Refused)
