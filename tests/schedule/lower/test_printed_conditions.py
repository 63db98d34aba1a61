"""Choices by any condition, in vectors of any type: the text compiles, and chooses what TensorIR chooses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from tvm import s_tir, te, tirx

import souffle
from souffle.codegen.nvcc import find_nvcc
from souffle.program import TEProgram
from souffle.schedule.stage import Stage
from souffle.tvm_compat import PrimExpr
from tests.testlib import Builder

pytestmark = pytest.mark.sampled(4)

ROWS, COLUMNS = 24, 8

CONDITIONS: tuple[Callable[..., PrimExpr], ...] = (
    lambda i, j, truth, place, less: i < 7,
    lambda i, j, truth, place, less: place(i) > 3,
    lambda i, j, truth, place, less: j <= i,
    lambda i, j, truth, place, less: truth(i, j),
    lambda i, j, truth, place, less: tirx.all(i < 9, j > 2),
    lambda i, j, truth, place, less: tirx.any(place(i) < 2, truth(i, j)),
    lambda i, j, truth, place, less: tirx.Not(truth(i, j)),
    lambda i, j, truth, place, less: less(i, j),
    lambda i, j, truth, place, less: tirx.all(i < 20, tirx.if_then_else(place(i) < 0, place(i) + 6, place(i)) == j),
)


def chosen(truth: np.ndarray, place: np.ndarray, less: np.ndarray) -> list[np.ndarray]:
    """What :data:`CONDITIONS` are for each element."""
    i, j = np.indices((ROWS, COLUMNS))
    at = np.broadcast_to(place[:, None], i.shape)
    wrapped = (i < 20) & (np.where(at < 0, at + 6, at) == j)
    return [i < 7, at > 3, j <= i, truth, (i < 9) & (j > 2), (at < 2) | truth, ~truth, less, wrapped]


def program(dtype: str) -> TEProgram:
    """Both forms of a choice under each condition, each as a stage."""
    b = Builder()
    tensors = [b.input(ROWS, COLUMNS, dtype=dtype) for _ in range(2)]
    tensors += [b.input(ROWS, COLUMNS, dtype="bool"), b.input(ROWS, dtype="int32")]

    def choice(form: Callable[..., PrimExpr], condition: Callable[..., PrimExpr]) -> Callable[..., te.Tensor]:
        def compute(x: te.Tensor, y: te.Tensor, truth: te.Tensor, place: te.Tensor) -> te.Tensor:
            def less(*at: PrimExpr) -> PrimExpr:
                return tirx.all(truth(*at), x(*at)) if dtype == "bool" else x(*at) < y(*at)

            return te.compute((ROWS, COLUMNS), lambda i, j: form(condition(i, j, truth, place, less), x[i, j], y[i, j]))

        return compute

    forms = (tirx.Select, tirx.if_then_else)
    return b.program(*(b.add(choice(form, c), *tensors, name="choice") for form in forms for c in CONDITIONS))


def in_vectors(lanes: int) -> Callable[[str, object], object]:
    """A hook that schedules each stage with so many neighbours at once."""

    def scheduled(stage: Stage) -> Stage:
        sch = s_tir.Schedule(stage.draft.func)
        (block,) = sch.get_child_blocks(sch.get_sblock("root"))
        row, column = sch.get_loops(block)
        tile, row = sch.split(row, [None, 8])
        column, lane = sch.split(column, [None, lanes])
        sch.bind(tile, "blockIdx.x")
        sch.bind(sch.fuse(row, column), "threadIdx.x")
        sch.vectorize(lane)
        return replace(stage, schedule=replace(stage.schedule, func=sch.mod["main"]))

    return lambda name, result: tuple(map(scheduled, result)) if name == "schedule" else result


@pytest.mark.parametrize(
    ("dtype", "lanes"),
    [("float32", 4), ("float16", 8), ("bfloat16", 2), ("int8", 4), ("int64", 8), ("float64", 2), ("bool", 8)],
)
def test_choices_in_vectors(dtype: str, lanes: int) -> None:
    values = np.random.default_rng(0)
    kind = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    x, y = (5 * values.standard_normal((2, ROWS, COLUMNS))).astype(np.int8).astype(kind)
    truth, place = values.random((ROWS, COLUMNS)) < 0.5, values.integers(-6, 8, ROWS).astype(np.int32)
    # One of them by NVIDIA's compiler as well.
    compiled = dtype == "float16" and find_nvcc() is not None
    options = {"target": "cuda", "level": "V0", "device": "cpu", "cubin": compiled}
    network = souffle.compile(program(dtype), hook=in_vectors(lanes), **options)
    found = network(dict(zip(("in0", "in1", "in2", "in3"), (x, y, truth, place), strict=True)))
    wanted = [np.where(c, x, y) for c in 2 * chosen(truth, place, x & truth if dtype == "bool" else x < y)]
    for output, want in zip(found.values(), wanted, strict=True):
        assert np.array_equal(output, want)
