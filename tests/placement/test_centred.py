"""Products that take normalized rows from copies about the means of chunks: right, as exact as said, and proven."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import onnxruntime as ort
import pytest

import souffle
from souffle.codegen.assemble import CompiledKernels
from souffle.errors import CertificateError
from souffle.models.builder import GraphBuilder
from souffle.models.layers import linear, reshape
from souffle.pipeline import compile_cuda
from souffle.placement.normalization import Chosen, normalize_in_products
from souffle.schedule.gpu.emit.finished_fragments import FinishedFragments
from souffle.schedule.stage import flat_stages
from souffle.verify import PROVEN, certify, printed
from tests.placement.test_normalization import network, rms_norm
from tests.testlib import run_on_cpu_device
from tests.thorough import some

pytestmark = pytest.mark.sampled(3)

APART = ("attention", "channels", "reuse")


def kernels_of(model: onnx.ModelProto, size: int, **options: object) -> tuple[CompiledKernels, dict[str, object]]:
    """Kernels whose products take copies wherever they can, and what the compiler saw."""
    seen: dict[str, object] = {}

    def hook(stage: str, result: object) -> object:
        if stage == "narrow":
            result, seen["decisions"] = normalize_in_products(result, lambda *_: Chosen(size, True, "asked for"))
        seen[stage] = result
        return result

    chosen = {"precision": "mixed", "reductions": "one_phase", "cubin": False, "arch": "sm_80", "disable": APART}
    return compile_cuda(souffle.import_onnx(model), hook=hook, **(chosen | options)), seen


def taken(model: onnx.ModelProto, size: int, **options: object) -> CompiledKernels:
    """As :func:`kernels_of`, where the copies are taken."""
    kernels, seen = kernels_of(model, size, **options)
    assert [d.accepted for d in seen["decisions"]] == [True], seen["decisions"]
    assert "souffle_scale_part(" in kernels.plan.modules[0].text
    assert {stage.schedule.rule for stage in flat_stages(seen["schedule"])} == {"mma_contraction"}
    return kernels


def refusal(model: onnx.ModelProto, size: int, **options: object) -> str:
    """Why none are."""
    _, seen = kernels_of(model, size, **options)
    assert [d.accepted for d in seen["decisions"]] == [False]
    return seen["decisions"][0].reason


def compared(model: onnx.ModelProto, kernels: CompiledKernels, given: dict[str, np.ndarray] | None = None) -> float:
    """The largest difference from ONNX Runtime, relative to the largest result; not-a-numbers have to agree."""
    given = given or souffle.models.random_inputs(model)
    found = run_on_cpu_device(kernels.plan, given)
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    worst = 0.0
    for got, expected in zip(found.values(), session.run(None, given), strict=True):
        np.testing.assert_array_equal(np.isnan(got), np.isnan(expected))
        worst = max(worst, float(np.nanmax(abs(got - expected)) / np.nanmax(abs(expected))))
    return worst


@pytest.mark.parametrize(
    ("model", "size"),
    [
        (network(64, 128), 64),
        (network(40, 96), 32),
        (network(7, 160, batch=3), 32),
        (network(24, 64, batch=3, residual=False), 32),
        (network(norm=rms_norm), 32),
        (network(33, 192, shift=1e4), 64),
    ],
    ids=["wide", "ragged", "few-rows", "rows-of-nobody-else", "without-mean", "large-mean"],
)
def test_right_and_proven(model: onnx.ModelProto, size: int) -> None:
    kernels = taken(model, size, verify="values")
    certificate = certify(kernels)
    assert certificate.verdict == PROVEN, printed(certificate)
    assert compared(model, kernels) < 2e-3


def shifted_windows() -> onnx.ModelProto:
    """Windows of 4 x 4 of an image of 8 x 12, multiplied, put back where they were and 3 further around the end."""
    b = GraphBuilder("g", 0)
    x = b.input("x", (6, 16, 48))
    with b.scope("first"):
        h = linear(b, x, 48, 96)
    h = reshape(b, b.node("Transpose", reshape(b, h, 2, 3, 4, 4, 96), perm=[0, 2, 1, 3, 4]), 1, 8, 12, 96)
    for axis, extent in ((1, 8), (2, 12)):
        ends = ((extent - 3, extent), (0, extent - 3))
        parts = [b.node("Slice", h, *(b.constant([n]) for n in (*part, axis))) for part in ends]
        h = b.node("Concat", *parts, axis=axis)
    h = b.node("Add", h, b.input("residual", (1, 8, 12, 96)))
    y = b.node("LayerNormalization", h, b.parameter("w", b.normal((96,), 0.1, 1.0)), axis=-1, epsilon=1e-5)
    with b.scope("second"):
        z = linear(b, y, 96, 64)
    b.output(z, "z", (1, 8, 12, 64))
    return b.model()


def test_rows_that_are_put_back_around_the_end_of_an_image() -> None:
    model = shifted_windows()
    kernels = taken(model, 32, verify="values")
    certificate = certify(kernels)
    assert certificate.verdict == PROVEN, printed(certificate)
    assert compared(model, kernels) < 2e-3


def scaled(factor: float, offset: float) -> onnx.ModelProto:
    """Rows as large or as small as asked for, normalized with next to nothing added to the variance."""
    b = GraphBuilder("g", 0)
    x = b.input("x", (1, 32, 64))
    with b.scope("first"):
        h = linear(b, x, 64, 128)
    h = b.node("Add", b.node("Mul", h, b.constant(factor)), b.constant(offset))
    with b.scope("norm"):
        weight, bias = b.parameter("weight", b.normal((128,), 0.1, 1.0)), b.parameter("bias", b.normal((128,), 0.1))
        y = b.node("LayerNormalization", h, weight, bias, axis=-1, epsilon=1e-30)
    with b.scope("second"):
        z = linear(b, y, 128, 64)
    b.output(z, "z", (1, 32, 64))
    return b.model()


@pytest.mark.parametrize(("factor", "offset"), some([(1e-9, 0.0), (1e8, 0.0)], [(1e6, -1e8), (1e-4, 1.0)]))
def test_rows_beyond_the_range_of_16_bits(factor: float, offset: float) -> None:
    model = scaled(factor, offset)
    # What the rows themselves have lost of their deviation in fp32, at that mean, comes on top.
    assert compared(model, taken(model, 64)) < 2e-3 + 1e-6 * abs(offset / factor)


def test_what_is_no_number_stays_in_its_row() -> None:
    model = network(40, 96)
    given = souffle.models.random_inputs(model)
    given["x"][0, 3, 5], given["x"][0, 17, 0] = np.nan, np.inf
    assert compared(model, taken(model, 32), given) < 2e-3


def test_a_constant_row_is_its_bias() -> None:
    model = network(40, 96)
    given = souffle.models.random_inputs(model)
    given["x"][0, 2] = 0
    assert compared(model, taken(model, 32), given) < 2e-3


def test_rounding_is_within_four_units() -> None:
    """The normalized row itself, by an identity for weights: at most four times as far off as by one rounding."""
    b = GraphBuilder("g", 0)
    x = b.input("x", (1, 64, 64))
    with b.scope("first"):
        h = linear(b, x, 64, 128)
    y = b.node("LayerNormalization", h, b.parameter("w", np.ones(128, np.float32)), axis=-1, epsilon=1e-5)
    b.output(b.node("MatMul", y, b.parameter("identity", np.eye(128, dtype=np.float32))), "z", (1, 64, 128))
    model = b.model()
    given = souffle.models.random_inputs(model)
    found = run_on_cpu_device(taken(model, 64).plan, given)["z"]
    # The first product rounds its operands to fp16, too: as another program that does.
    before, _ = kernels_of(model, 64, disable=("normalization", *APART), level="V3")
    exact = run_on_cpu_device(before.plan, given)["z"]
    assert abs(found - exact).max() <= 2.0**-11 * 5 * abs(exact).max()


def test_bias_goes_into_the_constant_that_is_added_anyway() -> None:
    _, seen = kernels_of(network(64, 128), 64)
    second = next(item for item in seen["two_phase"].tes if "second" in item.name and item.is_reduction)
    assert len(second.parts) == 2
    names = [t.name for t in seen["two_phase"].constants if t in second.inputs]
    assert all(name.endswith("_rows") for name in names), names


def operands(second: Callable[[GraphBuilder, str], str], weight: float = 1.0) -> onnx.ModelProto:
    b = GraphBuilder("g", 0)
    x = b.input("x", (1, 32, 64))
    with b.scope("first"):
        h = linear(b, x, 64, 128)
    y = b.node("LayerNormalization", h, b.parameter("w", b.normal((128,), 0.1, weight)), axis=-1, epsilon=1e-5)
    b.output(second(b, y), "z", (1, 32, 64))
    return b.model()


def test_a_product_of_two_inputs_has_no_constant_to_fold_into() -> None:
    def second(b: GraphBuilder, y: str) -> str:
        return b.node("MatMul", y, b.input("other", (1, 128, 64)))

    assert "multiplies its rows by no constant" in refusal(operands(second), 64)


@pytest.mark.parametrize("weight", [1e6, -1e7])
def test_weights_that_leave_the_range_of_16_bits_are_not_folded(weight: float) -> None:
    def second(b: GraphBuilder, y: str) -> str:
        return b.node("MatMul", y, b.parameter("weights", b.normal((128, 64), 1.0)))

    assert "leaves the range of fp16" in refusal(operands(second, weight), 64)


@pytest.mark.parametrize("mistake", ["row", "chunk"])
def test_factors_of_another_row_or_chunk_are_refuted(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = FinishedFragments.take_rows

    def wrong(self: FinishedFragments, position: object, first_row: object, lane: object) -> object:
        if mistake == "row":
            return right(self, position, first_row, (lane + 4) % 32)
        return right(self, 0 * position, first_row, lane)

    monkeypatch.setattr(FinishedFragments, "take_rows", wrong)
    with pytest.raises(CertificateError, match="wrong value"):
        kernels_of(network(64, 128), 64, verify="values")
