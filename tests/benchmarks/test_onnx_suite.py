"""The runner of ONNX's conformance suite tells right from wrong, and outlives what it runs."""

from __future__ import annotations

import os

import numpy as np
import pytest
from onnx.backend.test.case.test_case import TestCase as Case

from benchmarks import onnx_suite
from benchmarks.onnx_suite import SuiteWorker, run_case
from tests.frontend.support import node_model

OPTIONS = {"target": "cpu"}


def case_of(expected: np.ndarray, operator: str) -> Case:
    x = np.array([[-1.0, 2.0, np.nan]], dtype="float32")
    model = node_model(operator, [("float32", x.shape)])
    return Case(f"test_{operator}", operator, None, None, model, [([x], [expected])], "node", 1e-3, 1e-7)


@pytest.mark.parametrize(
    ("case", "outcome", "message"),
    [
        (case_of(np.array([[1, 2, np.nan]], "float32"), "Abs"), "passed", ""),
        (case_of(np.array([[1, 3, np.nan]], "float32"), "Abs"), "wrong", "1 of 3 differ, 0 NaN; largest error 1 of 3"),
        (case_of(np.array([[1, 2, 0]], "float32"), "Abs"), "wrong", "1 of 3 differ, 1 NaN"),
        (case_of(np.array([1, 2, np.nan], "float32"), "Abs"), "wrong", "float32[1, 3], expected float32[3]"),
        (case_of(np.array([[1, 2, np.nan]], "float64"), "Abs"), "wrong", "expected float64"),
        (case_of(np.array([[1, 2, 3]], "float32"), "RandomNormalLike"), "refused", "random numbers"),
    ],
)
def test_outcomes(case, outcome, message):
    result = run_case(case, OPTIONS)
    assert (result.outcome, message in result.message) == (outcome, True), result


def serve_or_die(connection, kinds, options, log) -> None:
    """A worker whose second case kills it, and whose third never ends."""
    connection.send(["fine", "deadly", "endless"])
    while True:
        name = connection.recv()
        if name == "deadly":
            os.abort()
        if name == "fine":
            connection.send({"name": name, "outcome": "passed"})


def test_a_case_that_kills_the_process_or_hangs_is_noted_and_the_next_one_runs(monkeypatch):
    monkeypatch.setattr(onnx_suite, "_serve", serve_or_die)
    worker = SuiteWorker((), OPTIONS, limit=5.0)
    try:
        names = ["fine", "deadly", "fine", "endless", "fine"]
        outcomes = [worker.run(name).outcome for name in names]
    finally:
        worker.close()
    assert outcomes == ["passed", "crash", "passed", "timeout", "passed"]
