"""Normalizations that become part of the products around them: right in every shape, the same bits, and proven."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import onnx
import onnxruntime as ort
import pytest

import souffle
from souffle.decision import Refused
from souffle.models.builder import GraphBuilder
from souffle.models.layers import gelu, linear
from souffle.pipeline import compile_cuda
from souffle.placement.normalization import Chosen, normalize_in_products
from souffle.placement.normalizing_by_cost import normalize_by_cost
from souffle.placement.two_phase import Split, two_phase
from souffle.program import parts_of
from souffle.schedule.stage import flat_stages
from souffle.verify import PROVEN, certify, printed
from tests.placement.normalized_layers import epsilon_layer_norm, layers
from tests.placement.trials_on_a100 import trials_of
from tests.testlib import run_on_cpu_device
from tests.thorough import some

Norm = Callable[[GraphBuilder, str, int], str]


def rms_norm(b: GraphBuilder, x: str, width: int) -> str:
    v = b.node("ReduceMean", b.node("Mul", x, x), axes=[-1], keepdims=1)
    y = b.node("Div", x, b.node("Sqrt", b.node("Add", v, b.constant(1e-5))))
    return b.node("Mul", y, b.parameter("scale", b.normal((width,), 0.1, 1.0)))


def network(
    rows: int = 40,
    width: int = 96,
    norm: Norm = epsilon_layer_norm,
    *,
    batch: int = 1,
    residual: bool = True,
    kept: bool = False,
    shift: float = 0.0,
) -> onnx.ModelProto:
    """A product, a normalization of its rows, two products behind it, and a residual that reads it too."""
    b = GraphBuilder("g", 0)
    x = b.input("x", (batch, rows, 48))
    with b.scope("first"):
        h = linear(b, x, 48, width)
        h = b.node("Add", h, b.constant(shift)) if shift else h
    y = norm(b, h, width)
    with b.scope("second"):
        z = gelu(b, linear(b, y, width, 64))
    with b.scope("third"):
        z = linear(b, z, 64, width)
    z = b.node("Add", z, y) if residual else z
    b.output(z, "z", (batch, rows, width))
    if kept:
        b.output(y, "y", (batch, rows, width))
    return b.model()


def forced(
    model: onnx.ModelProto,
    size: int,
    precision: str = "mixed",
    *,
    copies: bool = False,
    stored: bool = False,
    parts: int = 1,
    **options: object,
):
    """Kernels in which normalizations that can become part of products do, and what the compiler saw.

    What may be split is split into `parts`.
    """
    seen: dict[str, object] = {}
    chosen = Chosen(size, copies, "asked for", stored)

    def hook(stage: str, result: object) -> object:
        if stage == "narrow":
            result, seen["decisions"] = normalize_in_products(result, lambda *_: chosen)
            if parts > 1:
                result, seen["splits"] = two_phase(result, lambda item: Split(parts, "asked for"))
        seen[stage] = result
        return result

    given = {"precision": precision, "reductions": "one_phase", "cubin": False, "arch": "sm_80", **options}
    return compile_cuda(souffle.import_onnx(model), hook=hook, **given), seen


def assert_normalizes(model: onnx.ModelProto, size: int, count: int = 1, inputs=None, **options: object) -> None:
    """No stage is left of the normalizations; results are right, the same bits in any order, and proven."""
    kernels, seen = forced(model, size, **options)
    assert [d.accepted for d in seen["decisions"]] == [True] * count, seen["decisions"]
    certificate = certify(kernels)
    assert certificate.verdict == PROVEN, printed(certificate)
    stages = flat_stages(seen["schedule"])
    placed = [part for item in seen["two_phase"].tes for part in parts_of(item) if part.placement is not None]
    assert {part.placement.phase for part in placed} == {"moments", "rows"}
    # Each stage has a product of its own.
    assert all(any(te_.is_reduction and te_.placement is None for te_ in stage.tes) for stage in stages)
    assert_right(model, kernels, inputs, options.get("precision", "mixed"))


def assert_right(model: onnx.ModelProto, kernels, inputs=None, precision: str = "mixed") -> None:
    """Results are ONNX Runtime's, and the same bits in another order."""
    given = inputs or souffle.models.random_inputs(model)
    found = run_on_cpu_device(kernels.plan, given)
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    for (name, got), expected in zip(found.items(), session.run(None, given), strict=True):
        tolerance = 2e-2 if precision == "mixed" else 1e-3
        np.testing.assert_allclose(got, expected, atol=tolerance * np.nanmax(abs(expected)), err_msg=name)
    again = run_on_cpu_device(kernels.plan, given, order="shuffled", seed=1)
    assert all(np.array_equal(found[name], again[name], equal_nan=True) for name in found)


@pytest.mark.parametrize(
    ("rows", "width", "size"),
    some([(40, 96, 32)], [(64, 112, 64), (64, 128, 64), (40, 96, 64), (64, 64, 32)]),
)
def test_layer_normalization_between_products(rows: int, width: int, size: int) -> None:
    assert_normalizes(network(rows, width), size)


@pytest.mark.parametrize(("width", "size"), some([(112, 64)], [(96, 32)]))
def test_on_cuda_cores(width: int, size: int) -> None:
    for rows, batch in some([(17, 3)], [(40, 1)]):
        assert_normalizes(network(rows, width, batch=batch), size, precision="fp32")


@pytest.mark.thorough("fewer rows are above")
def test_on_cuda_cores_with_more_rows_than_threads() -> None:
    assert_normalizes(network(300, 256), 64, precision="fp32")


def test_a_normalization_without_a_mean() -> None:
    assert_normalizes(network(norm=rms_norm), 32)


def test_rows_that_no_chunk_divides() -> None:
    assert_normalizes(network(20, 191), 32)


@pytest.mark.thorough("one of three is normalized on CUDA cores above")
def test_in_a_batch_and_without_a_residual() -> None:
    assert_normalizes(network(24, 64, batch=3, residual=False), 32)


def test_a_large_mean() -> None:
    assert_normalizes(network(shift=1e4), 32)


@pytest.mark.parametrize("precision", some(["mixed"], ["fp32"]))
def test_values_are_proven(precision: str) -> None:
    kernels, _ = forced(network(24, 64), 32, precision, verify="values")
    certificate = certify(kernels)
    assert certificate.verdict == PROVEN, printed(certificate)


def test_rows_that_hold_no_numbers_leave_others_alone() -> None:
    model = network(20, 64, residual=False)
    x = np.random.default_rng(0).standard_normal((1, 20, 48)).astype(np.float32)
    x[0, 3, 5], x[0, 7, 7], x[0, 11] = np.nan, np.inf, 0.0
    kernels, _ = forced(model, 32)
    (found,) = run_on_cpu_device(kernels.plan, {"x": x}).values()
    others = [n for n in range(20) if n not in (3, 7)]
    assert np.isnan(found[0, [3, 7]]).all() and np.isfinite(found[0, others]).all()


def rows_ahead(seen: dict[str, object]) -> set[str]:
    """The products ahead of whose sums values of rows are worked out."""
    placed = [part.placement for item in seen["two_phase"].tes for part in parts_of(item) if part.placement]
    return {placement.contraction for placement in placed if placement.phase == "rows"}


@pytest.mark.parametrize(
    ("precision", "copies", "parts", "rows", "width"),
    some(
        [("mixed", True, 2, 40, 96), ("fp32", False, 3, 17, 112)],
        [("mixed", False, 1, 20, 191), ("mixed", True, 1, 64, 128), ("fp32", False, 1, 40, 64)],
    ),
)
def test_a_residual_takes_values_of_rows_that_are_stored(
    precision: str, copies: bool, parts: int, rows: int, width: int
) -> None:
    """Nothing is ahead of the sum that the residual is added to, which can be split."""
    model = network(rows, width)
    kernels, seen = forced(model, 32, precision, copies=copies, stored=True, parts=parts, verify="values")
    assert [d.accepted for d in seen["decisions"]] == [True], seen["decisions"]
    (ahead,) = rows_ahead(seen)
    assert "second" in ahead
    if parts > 1:
        assert [d.accepted for d in seen["splits"] if d.subject == "Add"] == [True]
    certificate = certify(kernels)
    assert certificate.verdict == PROVEN, printed(certificate)
    assert_right(model, kernels, precision=precision)


def test_stored_values_of_rows_about_a_large_mean_and_in_layers() -> None:
    kernels, seen = forced(network(shift=1e4), 32, "fp32", stored=True)
    assert certify(kernels).verdict == PROVEN and len(rows_ahead(seen)) == 1
    assert_right(network(shift=1e4), kernels, precision="fp32")
    # What a residual is added to has its own rows normalized in turn.
    b = GraphBuilder("g", 0)
    x = b.input("x", (1, 24, 64))
    for layer in range(3):
        with b.scope(f"up{layer}"):
            h = gelu(b, linear(b, x, 64, 96))
        with b.scope(f"down{layer}"):
            x = epsilon_layer_norm(b, b.node("Add", linear(b, h, 96, 64), x), 64)
    with b.scope("last"):
        b.output(linear(b, x, 64, 32), "z", (1, 24, 32))
    model = b.model()
    kernels, seen = forced(model, 32, copies=True, stored=True)
    # The last is read by a product alone.
    assert [d.accepted for d in seen["decisions"]] == [True, True, False], seen["decisions"]
    assert certify(kernels).verdict == PROVEN
    assert_right(model, kernels)


def test_where_each_reader_multiplies_the_rows_nothing_is_stored() -> None:
    _, seen = forced(network(24, 64, residual=False), 32, stored=True)
    assert [d.reason for d in seen["decisions"]] == ["each of its readers multiplies it"]


def test_an_output_of_the_network_stays_a_stage_of_its_own() -> None:
    kernels, seen = forced(network(kept=True), 32)
    assert [d.reason for d in seen["decisions"]] == ["what it makes is an output of the network"]
    assert certify(kernels).verdict == PROVEN


@pytest.mark.thorough("another refusal is above")
def test_another_reader_than_a_product_refuses() -> None:
    b = GraphBuilder("g", 0)
    h = linear(b, b.input("x", (1, 40, 48)), 48, 64, bias=False)
    y = epsilon_layer_norm(b, h, 64)
    s = b.node("Softmax", y, axis=1)
    z = b.node("Add", linear(b, y, 64, 32, bias=False), linear(b, s, 64, 32, bias=False))
    b.output(z, "z", (1, 40, 32))
    _, seen = forced(b.model(), 32)
    assert ["no product, reads it" in d.reason or "no function" in d.reason for d in seen["decisions"]] == [True]


def test_normalization_of_channels_is_left_alone() -> None:
    """An instance normalization reduces what the next convolution takes as its inner axis, not its rows."""
    b = GraphBuilder("g", 0)
    x = b.input("x", (1, 16, 12, 12))
    w = b.parameter("w", b.normal((32, 16, 1, 1), 0.2))
    y = b.node("Conv", x, w, kernel_shape=[1, 1])
    scale, shift = b.parameter("s", b.normal((32,), 0.1, 1.0)), b.parameter("b", b.normal((32,), 0.1))
    y = b.node("InstanceNormalization", y, scale, shift)
    w = b.parameter("v", b.normal((16, 32, 1, 1), 0.2))
    b.output(b.node("Conv", y, w, kernel_shape=[1, 1]), "z", (1, 16, 12, 12))
    model = b.model()
    net = souffle.compile(model, target="cuda", device="cpu", precision="mixed", arch="sm_80", cubin=False)
    given = souffle.models.random_inputs(model)
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    (expected,) = session.run(None, given)
    np.testing.assert_allclose(np.asarray(net(given)["z"]), expected, atol=2e-2 * abs(expected).max())


def test_what_pays_is_taken_and_can_be_left_out() -> None:
    options = {"precision": "mixed", "arch": "sm_80", "cubin": False, "verify": "memory", "waits": "barriers"}
    plans = {
        disable: compile_cuda(souffle.import_onnx(layers(5)), disable=disable, **options).plan
        for disable in ((), ("normalization",))
    }
    taken = [d for d in plans[()].decisions if d.stage == "normalization"]
    assert taken and all(d.accepted for d in taken), taken
    assert not [d for d in plans["normalization",].decisions if d.stage == "normalization"]
    syncs = {disable: sum(kernel.grid_syncs for kernel in plan.kernels) for disable, plan in plans.items()}
    assert syncs[()] <= syncs["normalization",] - 4


@pytest.mark.parametrize(("precision", "count"), some([("mixed", 6)], [("fp32", 3), ("fp32", 6)]))
def test_layers_become_a_loop_with_their_moments(precision: str, count: int) -> None:
    """No step of a loop ends between a product and its moments, or between what is for its rows and itself."""
    kernels, seen = forced(layers(count, 40, 64), 32, precision)
    assert (len(seen["roll"].tes) < 20 or count == 3) and certify(kernels).verdict == PROVEN
    for stage in flat_stages(seen["schedule"]):
        assert any(te_.is_reduction and te_.placement is None for te_ in stage.tes)


def test_without_a_described_device_nothing_is_decided() -> None:
    program = souffle.import_onnx(network())
    choose = partial(normalize_by_cost, trials=trials_of(program, described=False))
    asked: list[object] = []
    souffle.pipeline.transform_program(program, souffle.pipeline.LEVELS["V4"], "mixed")
    program, _ = souffle.pipeline.transform_program(program, souffle.pipeline.LEVELS["V4"], "mixed")
    _, decisions = normalize_in_products(program, lambda *a: asked.append(choose(*a)) or asked[-1])
    assert decisions and all(isinstance(answer, Refused) for answer in asked)
