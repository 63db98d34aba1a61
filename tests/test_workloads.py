"""Some of the workloads of FusionStitching's papers, compiled: their operators meet nowhere else so.

All of them, at three levels: ``python -m benchmarks.workloads``.
"""

from __future__ import annotations

import numpy as np
import pytest

import souffle
from souffle import models
from souffle.certificate import PROVEN
from souffle.cli.compare import compare, onnxruntime_outputs
from tests.thorough import some

OPTIONS = {"target": "cuda", "arch": "sm_90", "cubin": False, "device": "cpu"}


@pytest.mark.parametrize("name", some(["layer-norm", "multi-interests", "logistic-train"], ["bi-rnn"]))
def test_workload(name: str) -> None:
    model = models.build(name)
    network = souffle.compile(model, **OPTIONS)
    assert network.certificate.verdict == PROVEN and not network.certificate.unknown
    inputs = models.random_inputs(model, seed=1)
    reference = onnxruntime_outputs(model, inputs)
    for runnable in (network, network.on("cpu", order="shuffled", seed=7, blocks=3)):
        result = compare({key: np.asarray(value) for key, value in runnable(inputs).items()}, reference, "fp32")
        assert result.ok, f"{name}: largest error {result.error:.2e} of the output's magnitude"
    # The papers' two figures are one kernel each; the others are small enough to be one as well.
    assert len(network.plan.launches) == 1
