"""Normalizations written in pieces become part of products as those written as one operator do, and stay right."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime as ort
import pytest

import souffle
from benchmarks.prices import microseconds
from benchmarks.switch_networks import decoder
from souffle.models.layers import layer_norm
from souffle.pipeline import LEVELS, compile_cuda, transform_program
from souffle.placement.normalization import Chosen, normalization_of, normalize_in_products
from souffle.placement.one_form import in_one_form
from souffle.verify import PROVEN
from tests.placement.spellings import SPELLINGS, Norm, power, product, weight_first
from tests.placement.test_normalization import network, rms_norm
from tests.testlib import run_on_cpu_device

pytestmark = pytest.mark.sampled(4)


def normalized(model: onnx.ModelProto, precision: str, *, copies: bool, count: int = 1, **options: object):
    """Kernels in which the normalization is part of the products."""

    def hook(stage: str, result: object) -> object:
        if stage == "narrow":
            result, decisions = normalize_in_products(in_one_form(result), lambda *_: Chosen(32, copies, "asked for"))
            assert [d.accepted for d in decisions] == [True] * count, decisions
        return result

    chosen = {"precision": precision, "reductions": "one_phase", "cubin": False, "arch": "sm_80", **options}
    return compile_cuda(souffle.import_onnx(model), hook=hook, **chosen).plan


def assert_right(plan: object, model: onnx.ModelProto, x: np.ndarray, tolerance: float) -> None:
    """As ONNX Runtime, NaN where it has NaN, and the same bits in another order."""
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    (expected,) = session.run(None, {"x": x})
    (found,) = run_on_cpu_device(plan, {"x": x}).values()
    np.testing.assert_allclose(found, expected, atol=tolerance * np.nanmax(abs(expected)))
    (again,) = run_on_cpu_device(plan, {"x": x}, order="shuffled", seed=1).values()
    assert found.tobytes() == again.tobytes()


def values() -> np.ndarray:
    """With a row of zeros, and one that holds NaN."""
    x = np.random.default_rng(0).standard_normal((1, 20, 48)).astype(np.float32)
    x[0, 3], x[0, 7, 7] = 0.0, np.nan
    return x


@pytest.mark.parametrize("norm", SPELLINGS, ids=lambda norm: norm.__name__)
def test_each_spelling_is_found(norm: Norm) -> None:
    """Behind its product a normalization reads rows alone and what is made of them, whatever else is written."""
    model = network(20, 64, norm, residual=False)
    program, _ = transform_program(souffle.import_onnx(model), LEVELS["V4"], "mixed")
    program = in_one_form(program)
    (found,) = (made for item in program.tes if (made := normalization_of(program, item)))
    assert len(found.elements) == len(found.readers) == 1 and not found.readers[0].placement
    assert all(tensor.size == 20 for item in found.of_rows for tensor in item.outputs)


@pytest.mark.parametrize("norm", [power, product, weight_first, rms_norm], ids=lambda norm: norm.__name__)
def test_in_mixed_precision_of_copies(norm: Norm) -> None:
    model = network(20, 64, norm, residual=False)
    plan = normalized(model, "mixed", copies=True, verify="values")
    assert plan.certificate.verdict == PROVEN, plan.certificate
    assert_right(plan, model, values(), 2e-2)


@pytest.mark.parametrize("norm", SPELLINGS[1:5], ids=lambda norm: norm.__name__)
def test_in_single_precision_with_a_residual(norm: Norm) -> None:
    model = network(20, 64, norm)
    plan = normalized(model, "fp32", copies=False, verify="values")
    assert plan.certificate.verdict == PROVEN, plan.certificate
    assert_right(plan, model, values(), 1e-3)


@pytest.mark.thorough("a large mean is in tests/placement/test_normalization.py and test_centred.py")
def test_a_large_mean() -> None:
    model = network(20, 64, power, shift=1e4, residual=False)
    for copies in (False, True):
        assert_right(normalized(model, "mixed", copies=copies), model, np.nan_to_num(values()), 2e-2)


@pytest.mark.thorough("that each spelling becomes one form is above")
def test_as_fast_as_the_operator() -> None:
    """The price decides, and finds the same stages to be worth the same."""

    def figures(norm: Norm) -> dict[str, float]:
        model = decoder(50, 192, 4, norm=norm, causal=False)
        options = {"precision": "mixed", "cubin": False, "verify": "off", "disable": ["channels", "resident"]}
        return microseconds(compile_cuda(souffle.import_onnx(model), **options).plan)

    operator, pieces = figures(layer_norm), figures(power)
    assert pieces["syncs"] == operator["syncs"] and pieces["us"] <= 1.01 * operator["us"]


def test_programs_without_one_stay() -> None:
    program, _ = transform_program(souffle.import_onnx(souffle.models.build("mmoe")), LEVELS["V4"], "fp32")
    assert in_one_form(program) is program
