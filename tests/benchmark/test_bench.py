"""``souffle bench``: real peers on the processor, a GPU that is played, and what the command says."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import numpy as np
import onnx
import pytest

import souffle
from souffle import models
from souffle.benchmark import onnxruntime_peer, registry, torch_peer
from souffle.benchmark.ours import ways_of
from souffle.benchmark.threads import on_cores
from souffle.cli.interruption import INTERRUPTED
from souffle.cli.main import main
from souffle.errors import OptionError
from souffle.runtime import Network
from tests.benchmark.played import PlayedPeer, PlayedWay
from tests.runtime.plans import cooperative_expected, cooperative_plan
from tests.runtime.played import driver_of


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bench") / "mmoe.onnx"
    onnx.save(models.build("mmoe", "tiny"), path)
    return path


def test_onnx_runtime_and_tvm_on_the_processor(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("onnxruntime")
    out = tmp_path / "bench.json"
    words = ["--against", "ort,tvm,tensorrt", "--target", "cpu", "--runs", "2", "--warmup", "0", "--threads", "1"]
    before = os.sched_getaffinity(0)
    assert main(["bench", str(model), *words, "--out", str(out), "--quiet"]) == 0
    assert os.sched_getaffinity(0) == before
    report = json.loads(out.read_text())
    assert report["setting"] == {"device": "cpu", "threads": 1, "precision": "fp32"}
    rows = {row["name"]: row for row in report["rows"]}
    assert list(rows) == ["souffle", "ort", "tvm", "tensorrt"]
    for name in ("souffle", "ort", "tvm"):
        assert rows[name]["passed"] and rows[name]["error"] < 1e-5
        assert all(rows[name]["times"][cache]["runs"] == 2 for cache in ("warm", "cold"))
    assert all(rows["ort"]["ratios"][cache]["median"] > 0 for cache in ("warm", "cold"))
    assert rows["tensorrt"]["reason"] == "TensorRT needs a GPU" and not rows["tensorrt"]["times"]
    shown = capsys.readouterr().out
    assert "1 thread each" in shown and "tensorrt: TensorRT needs a GPU" in shown


def test_pytorch_on_the_processor(model: Path) -> None:
    pytest.importorskip("torch")
    report = souffle.bench(model, against=["eager"], target="cpu", runs=1, warmup=0)
    assert report.rows[1].passed and report.rows[1].times.keys() == {"warm", "cold"}


def test_a_library_that_is_missing_is_named(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_peer, "torch", None)
    monkeypatch.setattr(onnxruntime_peer, "onnxruntime", None)
    report = souffle.bench(model, against=["eager", "ort"], target="cpu", runs=1, warmup=0)
    assert [row.reason for row in report.rows[1:]] == [
        "PyTorch is not installed: pip install torch",
        "ONNX Runtime is not installed: pip install onnxruntime",
    ]


def test_an_operator_that_a_peer_does_not_know_is_its_reason() -> None:
    pytest.importorskip("torch")
    x, y = (onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [4]) for name in "xy")
    graph = onnx.helper.make_graph([onnx.helper.make_node("Asinh", ["x"], ["y"])], "g", [x], [y])
    made = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=9)
    report = souffle.bench(made, against=["eager"], target="cpu", runs=1, warmup=0)
    assert "no PyTorch function is known here for the operators Asinh" in report.rows[1].reason


def test_what_is_not_valid_is_refused(model: Path) -> None:
    with pytest.raises(OptionError, match="there is no peer 'onnx'; choose from eager"):
        souffle.bench(model, against=["onnx"])
    with pytest.raises(OptionError, match="runs is 0"):
        souffle.bench(model, runs=0)
    with pytest.raises(OptionError, match="this process may use"), on_cores(10**6):
        pass
    with pytest.raises(OptionError, match="one value"):
        souffle.bench(models.build("bert", "tiny", open_dimensions=True), dims={"batch": [1, 2], "sequence": 4})


def test_open_dimensions_are_given_to_all() -> None:
    pytest.importorskip("onnxruntime")
    opened = models.build("bert", "tiny", open_dimensions=True)
    report = souffle.bench(opened, against=["ort"], dims={"batch": 1, "sequence": 4}, target="cpu", runs=1, warmup=0)
    assert [row.passed for row in report.rows] == [True, True]


def test_ctrl_c_shows_what_was_measured(
    model: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = souffle.import_onnx(model)

    def microseconds(sample: int) -> float:
        if sample > 3:
            os.kill(os.getpid(), signal.SIGINT)
        return 5.0

    class Peer(PlayedPeer):
        def prepare(self, model: object, inputs: dict, setting: object) -> list[PlayedWay]:
            return [PlayedWay("p", [], expected.run(inputs), microseconds)]

    real = registry.peer_named
    monkeypatch.setattr("souffle.benchmark.bench.peer_named", lambda name: Peer("ort") if name == "ort" else real(name))
    words = ["--target", "cpu", "--runs", "50", "--warmup", "0", "--quiet"]
    assert main(["bench", str(model), *words]) == INTERRUPTED
    captured = capsys.readouterr()
    assert captured.err == "souffle: interrupted\n"
    assert "Interrupted: what is above is of the rounds that were whole." in captured.out
    assert next(line.split()[5:7] for line in captured.out.splitlines() if line.startswith("ort ")) == ["3", "5.0"]


def test_on_a_gpu_both_forms_are_run() -> None:
    plan = cooperative_plan()
    network = Network(plan, driver=driver_of(plan))
    x = np.random.default_rng(0).standard_normal((10, 10)).astype(np.float32)
    ways = ways_of(network, {network.signature.inputs[0].name: x})
    assert [way.form for way in ways] == ["graph", "launches"]
    expected = cooperative_expected(x)
    for way in ways:
        found = way.outputs()
        assert all(np.allclose(found[name], value, rtol=1e-4) for name, value in expected.items())
        assert all(way.sample(cold) > 0 for cold in (False, True))
