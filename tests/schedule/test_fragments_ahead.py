"""Fragments that are loaded before the products of the piece before: right, proven, and refuted where one is early."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import onnxruntime as ort
import pytest

import souffle
from souffle.errors import CertificateError
from souffle.schedule.gpu.emit.async_copy import barrier, wait
from souffle.schedule.gpu.emit.mma_pipeline import Pipeline
from souffle.schedule.gpu.forms.matrix_product import Contraction
from souffle.schedule.gpu.rule import GpuRequest
from souffle.schedule.gpu.tiling import mma_tiling
from souffle.schedule.gpu.tiling.mma_tiling import MmaTiling, Operands
from souffle.verify import PROVEN
from tests.schedule.product_networks import compiled, product
from tests.testlib import run_on_cpu_device
from tests.thorough import some

pytestmark = pytest.mark.sampled(6)

CASES = {
    # Pieces of a step and warps along the inner axis: an even number of pieces, or steps in pairs.
    "several-pieces": (4, 1),
    "one-piece": (1, 4),
    "several-of-several-warps": (2, 4),
}


@pytest.fixture(params=CASES.values(), ids=CASES)
def tiling(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[int, int]:
    """All tilings that can be chosen read ahead and have such steps, and one of them is chosen."""
    pieces, along = request.param
    right = mma_tiling._tilings

    def such(problem: Contraction, operands: Operands, asked: GpuRequest) -> Iterator[MmaTiling]:
        for one in right(problem, operands, asked):
            steps = -(-problem.extents[3] // one.step)
            if (one.pieces, one.warps[2]) == (pieces, along) and one.reads_ahead(operands, asked.threads, steps):
                yield one

    monkeypatch.setattr(mma_tiling, "_tilings", such)
    # No other rule is quicker.
    monkeypatch.setattr(mma_tiling, "_cost", lambda *given: 1.0)
    return pieces, along


@pytest.mark.parametrize(
    ("precision", "extents"),
    some(
        [("mixed", (37, 56, 1024))],
        [
            *(("mixed", extents) for extents in [(64, 64, 512), (130, 100, 768)]),
            ("tf32", (37, 56, 1024)),
            ("tf32x3", (130, 100, 768)),
        ],
    ),
    ids=str,
)
def test_right_and_proven(extents: tuple[int, int, int], precision: str, tiling: tuple[int, int]) -> None:
    model = product(*extents)
    kernels = compiled(model, precision, verify="values")
    text = kernels.plan.modules[0].text
    assert "left_ahead" in text, tiling
    assert kernels.plan.certificate.verdict == PROVEN
    given = souffle.models.random_inputs(model)
    found = run_on_cpu_device(kernels.plan, given)["result"]
    (expected,) = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"]).run(None, given)
    worst = {"mixed": 3e-3, "tf32": 3e-3, "tf32x3": 3e-6}[precision]
    assert np.max(abs(found - expected)) <= worst * np.max(abs(expected))


def _too_few_waits(self: Pipeline) -> list[object]:
    return [wait(self.stages - 1), barrier()]


def _no_barrier(self: Pipeline) -> list[object]:
    return [wait(self.stages - 2)]


def _copies_too_far(right: Callable[..., object]) -> Callable[..., object]:
    def ahead(self: Pipeline, make: object, turn: object, distance: int) -> object:
        # Into the tile that the next products are loaded from.
        return right(self, make, turn, distance + 1)

    return ahead


@pytest.mark.parametrize("mistake", ["waits", "barrier", "copies"])
def test_early_loads_are_refuted(mistake: str, tiling: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    if mistake == "copies":
        monkeypatch.setattr(Pipeline, "_ahead", _copies_too_far(Pipeline._ahead))
    else:
        monkeypatch.setattr(Pipeline, "arrived", _too_few_waits if mistake == "waits" else _no_barrier)
    with pytest.raises(CertificateError):
        compiled(product(64, 64, 1024), verify="values")
