"""Mixed precision (paper §7.1)."""

from __future__ import annotations

import numpy as np

from souffle.program.evaluate import evaluate
from souffle.transform import mixed_precision
from tests.testlib import Builder


def test_operands_of_a_matmul_become_half_and_its_sum_stays_float() -> None:
    b, rng = Builder(), np.random.default_rng(0)
    w = rng.standard_normal((64, 48)).astype(np.float32)
    x = rng.standard_normal((32, 64)).astype(np.float32)
    program = b.program(b.matmul(b.input(32, 64), b.constant(w)))
    mixed, (decision,) = mixed_precision(program)
    assert decision.accepted and decision.subject == "matmul0"
    cast, matmul = mixed.tes
    assert [t.dtype for t in matmul.inputs] == ["float16", "float16"] and matmul.output.dtype == "float32"
    assert cast.origin.operators == ("Cast",)
    (half,) = mixed.constants.values()
    np.testing.assert_array_equal(half, w.astype(np.float16))
    expected, found = (evaluate(p, [x])["out0"] for p in (program, mixed))
    assert np.abs(found - expected).max() <= 2e-2 * np.abs(expected).max()
    assert not np.array_equal(found, expected)


def test_a_tensor_is_converted_once_for_all_its_readers() -> None:
    b = Builder()
    x = b.input(32, 64)
    ws = [b.constant(np.ones((64, 48), np.float32)) for _ in range(2)]
    mixed, decisions = mixed_precision(b.program(b.plus(*(b.matmul(x, w) for w in ws))))
    assert len(decisions) == 2
    assert [t.origin.operators[0] for t in mixed.tes] == ["Cast", "Matmul", "Matmul", "Plus"]


def test_what_is_no_sum_of_products_stays() -> None:
    b = Builder()
    program = b.program(b.relu(b.reduce(b.input(4, 6), 1, "max")))
    same, decisions = mixed_precision(program)
    assert same is program and not decisions


def test_other_types_are_refused_with_a_reason() -> None:
    b = Builder()
    program = b.program(b.matmul(b.input(32, 64, dtype="float64"), b.constant(np.ones((64, 48)))))
    same, (decision,) = mixed_precision(program)
    assert same is program and not decision.accepted and "float64, not float32" in decision.reason
