"""Tensors of 2**31 elements and more, and just fewer: proven, or refused with the number. Nothing is allocated."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tvm import te, tirx

import souffle
from souffle.schedule.form_stages import StageError
from souffle.verify import PROVEN

ROWS, COLUMNS = 65536, 32769
LONG = 2**31 + 5


def column() -> souffle.TEProgram:
    x = te.placeholder((ROWS, COLUMNS), "int8", name="x")
    return souffle.from_te([x], [te.compute((ROWS,), lambda i: x[i, COLUMNS - 1], name="y")])


def sums() -> souffle.TEProgram:
    x, k = te.placeholder((ROWS, COLUMNS), "float32", name="x"), te.reduce_axis((0, COLUMNS), "k")
    return souffle.from_te([x], [te.compute((ROWS,), lambda i: te.sum(x[i, k], axis=k), name="y")])


def every(elements: int) -> Callable[[], souffle.TEProgram]:
    def program() -> souffle.TEProgram:
        x = te.placeholder((elements,), "int8", name="x")
        return souffle.from_te([x], [te.compute((1000,), lambda i: x[i * 2147483 + 7], name="y")])

    return program


def gathered() -> souffle.TEProgram:
    """UNKNOWN before, for -6694109184 bytes of the table."""
    x, rows = te.placeholder((ROWS, 40000), "float32", name="x"), te.placeholder((64,), "int32", name="rows")

    def element(i: tirx.Var, j: tirx.Var) -> tirx.PrimExpr:
        return x[tirx.max(tirx.min(rows[i], ROWS - 1), 0), j]

    return souffle.from_te([x, rows], [te.compute((64, 40000), element, name="y")])


def convolved() -> souffle.TEProgram:
    """REFUTED before, for 0 bytes of the image."""
    x, w = te.placeholder((64, 8192, 8192), "float32", name="x"), te.placeholder((4, 64, 3, 3), "float32", name="w")
    c, a, b = (te.reduce_axis((0, n), name) for n, name in ((64, "c"), (3, "a"), (3, "b")))

    def element(o: tirx.Var, i: tirx.Var, j: tirx.Var) -> tirx.PrimExpr:
        return te.sum(x[c, i * 128 + a, j * 128 + b] * w[o, c, a, b], axis=[c, a, b])

    return souffle.from_te([x, w], [te.compute((4, 64, 64), element, name="y")])


@pytest.mark.parametrize("program", [column, sums, every(LONG), every(2**31 - 1), gathered, convolved])
def test_long_inputs_are_proven(program: Callable[[], souffle.TEProgram]) -> None:
    net = souffle.compile(program(), target="cuda", device="cpu", cubin=False, tuning_log=None)
    assert net.certificate.verdict == PROVEN, net.certificate
    souffle.compile(program(), target="cpu")


@pytest.mark.parametrize("shape", [(ROWS, COLUMNS), (LONG,)])
def test_long_outputs_are_refused_on_gpus(shape: tuple[int, ...]) -> None:
    x = te.placeholder((8,), "float32", name="x")
    program = souffle.from_te([x], [te.compute(shape, lambda *at: x[at[-1] % 8] + 1.0, name="y")])
    elements = ROWS * COLUMNS if len(shape) > 1 else LONG
    with pytest.raises(StageError, match=f"a tensor of {elements} elements is made"):
        souffle.compile(program, target="cuda", device="cpu", cubin=False, tuning_log=None)
    souffle.compile(program, target="cpu")
