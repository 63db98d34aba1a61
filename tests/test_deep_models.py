"""The tiny models with more layers or steps: what repeats is a loop in the kernel, and the results are the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import onnx
import pytest

import souffle
from souffle import models
from souffle.cli.compare import compare, onnxruntime_outputs
from souffle.models import bert, lstm, resnext, swin
from tests.thorough import some

DEEP: dict[str, Callable[[], onnx.ModelProto]] = {
    "bert": lambda: bert.build_bert(replace(bert.SIZES["tiny"], layers=4), 0),
    "resnext": lambda: resnext.build_resnext(replace(resnext.SIZES["tiny"], blocks=(1, 5, 1)), 0),
    "swin": lambda: swin.build_swin(replace(swin.SIZES["tiny"], depths=(6, 2)), 0),
    "lstm": lambda: lstm.build_lstm(replace(lstm.SIZES["tiny"], steps=10), 0),
    "lstm-unrolled": lambda: lstm.build_lstm_unrolled(replace(lstm.SIZES["tiny"], steps=10), 0),
}
MIXED = {"level": "V4", "partition": "persistent", "precision": "mixed"}
# An LSTM at V4 in fp32, of twelve steps, is in tests/placement/test_interleaving.py, and layers at V4 are a loop in
# tests/kernel/test_loops.py.
CASES = some(
    [("lstm", {"level": "V3"})],
    [
        ("bert", {"level": "V4"}),
        ("bert", MIXED),
        ("lstm-unrolled", MIXED),
        *((name, {"level": "V3"}) for name in DEEP if name != "lstm"),
    ],
)


@pytest.mark.parametrize(
    ("name", "options"), CASES, ids=lambda part: part if isinstance(part, str) else "-".join(part.values())
)
def test_loops_of_whole_networks(name: str, options: dict[str, str]) -> None:
    model = DEEP[name]()
    inputs = models.random_inputs(model, seed=1)
    reference = onnxruntime_outputs(model, inputs)
    network = souffle.compile(model, target="cuda", arch="sm_90", cubin=False, device="cpu", **options)
    assert any(stage == "roll" and accepted for stage, _, accepted, _ in network.plan.decisions)
    assert len(network.plan.launches) == 1
    for run in (network, network.on("cpu", order="shuffled", seed=3, blocks=5)):
        found = {key: np.asarray(value) for key, value in run(inputs).items()}
        result = compare(found, reference, options.get("precision", "fp32"))
        assert result.ok, f"largest error {result.error:.2e} of the output's magnitude"
