"""Networks that PyTorch exported: every level, both ways to run on the CPU, against ONNX Runtime."""

from __future__ import annotations

from functools import cache

import numpy as np
import onnx
import pytest

import souffle
from souffle import models
from souffle.cli.compare import compare, onnxruntime_outputs
from souffle.pipeline import LEVELS
from souffle.program import TEProgram

pytest.importorskip("torch")
pytest.importorskip("onnxscript")

from tests.networks import NETWORKS, export


@cache
def case(name: str, exporter: str) -> tuple[TEProgram, dict[str, np.ndarray], dict[str, np.ndarray]]:
    model: onnx.ModelProto = export(name, exporter)
    inputs = models.random_inputs(model, seed=2)
    return souffle.import_onnx(model), inputs, onnxruntime_outputs(model, inputs)


def check(network, inputs: dict[str, np.ndarray], reference: dict[str, np.ndarray], precision: str = "fp32") -> None:
    found = {name: np.asarray(value) for name, value in network(inputs).items()}
    result = compare(found, reference, precision)
    assert result.ok, f"{network!r}: largest error {result.error:.2e} of the output's magnitude"


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", NETWORKS)
def test_emitted_cuda(name: str, level: str) -> None:
    program, inputs, reference = case(name, "dynamo")
    partition = "persistent" if level == "V3" else "souffle"
    network = souffle.compile(
        program, level=level, partition=partition, target="cuda", arch="sm_90", cubin=False, device="cpu"
    )
    check(network, inputs, reference)
    check(network.on("cpu", order="shuffled", seed=5, blocks=3), inputs, reference)


@pytest.mark.parametrize("level", ["V0", "V4"])
@pytest.mark.parametrize("name", NETWORKS)
def test_llvm_code(name: str, level: str) -> None:
    program, inputs, reference = case(name, "dynamo")
    check(souffle.compile(program, level=level, target="cpu"), inputs, reference)


@pytest.mark.parametrize("name", NETWORKS)
def test_what_the_old_exporter_writes(name: str) -> None:
    program, inputs, reference = case(name, "legacy")
    network = souffle.compile(program, level="V4", target="cuda", arch="sm_90", cubin=False, device="cpu")
    check(network, inputs, reference)
