"""Mixed precision (paper §7.1), and products in TF32."""

from __future__ import annotations

import numpy as np
import pytest

import souffle
from souffle import models
from souffle.pipeline import compile_cuda, stages_of
from souffle.program import Loop
from souffle.program.evaluate import evaluate
from souffle.program.products import IEEE, PRODUCTS, TF32, TF32X3
from souffle.schedule.gpu.rule import MULTIPLIES
from souffle.schedule.stage import flat_stages
from souffle.transform import mixed_precision, roll, tensor_float
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


@pytest.mark.parametrize("products", [TF32, TF32X3])
def test_tf32_changes_no_expression(products: str) -> None:
    b = Builder()
    product = b.matmul(b.input(32, 64), b.constant(np.ones((64, 48), np.float32)))
    program = b.program(product, b.matmul(b.input(32, 64, dtype="float64"), b.constant(np.ones((64, 48)))))
    other, (single, double) = tensor_float(program, products)
    assert other.tes == program.tes and (program.products, other.products) == (IEEE, products)
    assert single.accepted and "TF32" in single.reason
    assert not double.accepted and "float64, not float32" in double.reason
    assert f"products in {products}" in str(other) and "products in" not in str(program)
    assert other.with_tes(other.tes).products == products


def test_tf32_reaches_into_loops() -> None:
    program, _ = roll(souffle.import_onnx(models.build("bert")))
    loops = [item for item in program.tes if isinstance(item, Loop)]
    other, decisions = tensor_float(program, TF32X3)
    assert {decision.subject for decision in decisions if decision.accepted} & {te_.name for te_ in loops[0].body}
    assert all(other.body(loop).products == TF32X3 for loop in loops)


def test_only_stages_with_products_are_others_in_tf32() -> None:
    """What has none has the records of a tuning log that it has in fp32; what has some has its own."""
    program = souffle.import_onnx(models.build("bert"))
    found = {}
    for precision in ("fp32", "tf32", "tf32x3"):
        stages = flat_stages(stages_of(program, level="V2", arch="sm_90", precision=precision, cubin=False)[0])
        found[precision] = {stage.name: stage for stage in stages}
    for name, plain in found["fp32"].items():
        digests = {found[precision][name].draft.digest for precision in found}
        assert MULTIPLIES not in plain.draft.func.attrs
        if "mma_contraction" in {found[precision][name].schedule.rule for precision in found}:
            assert len(digests) == 3
        elif "Softmax" in name:
            assert len(digests) == 1
    rules = {stage.schedule.rule for stage in found["tf32x3"].values()}
    assert "mma_contraction" in rules and "mma_contraction" not in {s.schedule.rule for s in found["fp32"].values()}


def test_precisions_are_those_of_products() -> None:
    assert set(PRODUCTS) - {IEEE} <= set(souffle.options.PRECISIONS)


def test_products_that_tensor_cores_do_not_take_stay() -> None:
    b = Builder()
    program = b.program(b.matmul(b.input(32, 64), b.constant(np.ones((64, 48), np.float32))))
    for arch, takes in (("sm_75", False), ("sm_80", True)):
        plan = compile_cuda(program, arch=arch, precision="tf32", cubin=False).plan
        assert any("mma.sync" in module.text for module in plan.modules) == takes
