"""PyTorch beside Souffle's levels: the model that travels, the traced module, the step, the plan and the table."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("onnx")
from onnx import ModelProto, TensorProto, helper, numpy_helper

from benchmarks import gpu_steps, peers
from benchmarks.gpu_plan import PEERS, first_contact, peer_name
from benchmarks.gpu_table import phase_table, table
from benchmarks.weights import read_graph, redrawn, write_graph
from souffle import models
from souffle.benchmark import torch_graph, torch_peer
from souffle.benchmark.onnx_fusions import read_nodes

_MODELS = ("mmoe", "lstm", "efficientnet", "bert", "swin", "resnext")
_FIGURES = {"median_us": 2.0, "min_us": 1.0, "p90_us": 3.0}


def _model(nodes: list[Any], constants: dict[str, np.ndarray], outputs: tuple[str, ...] = ("y",)) -> ModelProto:
    """Of input x; types of outputs are left open."""
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [2, 3])
    results = [helper.make_empty_tensor_value_info(name) for name in outputs]
    arrays = [numpy_helper.from_array(np.asarray(array), name) for name, array in constants.items()]
    graph = helper.make_graph(nodes, "g", [x], results, arrays)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])


def _operators(model: ModelProto) -> list[str]:
    return [node.operator for node in read_nodes(model).nodes]


# the model that travels


@pytest.mark.parametrize("name", ["bert", "lstm", "resnext"])
def test_a_model_travels_without_its_weights(name: str, tmp_path: Path) -> None:
    model, draws = redrawn(models.build(name))
    path = tmp_path / "model.graph.npz"
    write_graph(path, model, draws)
    assert draws and path.stat().st_size < len(model.SerializeToString()) / 2
    assert read_graph(path).SerializeToString() == model.SerializeToString()
    with np.load(path) as file:
        content = dict(file)
    content[f"mean/{next(iter(draws))}"] += np.float32(1e-6)
    np.savez(path, **content)
    with pytest.raises(ValueError, match=r"initializer .* of model\.graph\.npz is not what it was: NumPy"):
        read_graph(path)


# what is put together


def test_an_operator_that_is_not_known_is_named() -> None:
    nodes = [helper.make_node("Celu", ["x"], ["a"]), helper.make_node("Relu", ["a"], ["b"])]
    model = _model([*nodes, helper.make_node("Asinh", ["b"], ["y"])], {})
    with pytest.raises(ValueError, match="no PyTorch function is known here for the operators Asinh, Celu"):
        torch_graph.to_torch(model, "cpu")


@pytest.mark.parametrize("name", _MODELS)
def test_all_operators_of_a_small_model_are_known(name: str) -> None:
    assert not torch_graph.unknown_operators(read_nodes(models.build(name)))


def test_what_users_write_as_one_call_is_one_node() -> None:
    bert = _operators(models.build("bert"))
    assert {"Linear", "Gelu"} < set(bert) and not {"Erf", "Constant"} & set(bert)
    assert bert.count("MatMul") == 4, "those of attention, in two layers"
    silus = _operators(models.build("efficientnet"))
    assert "Silu" in silus and "Sigmoid" in silus, "gates of squeeze and excitation are none"
    lstm = read_nodes(models.build("lstm"))
    assert [node.operator for node in lstm.nodes] == ["LSTM", "Squeeze"] and len(lstm.nodes[0].layers) == 3


def test_keys_are_transposed_as_users_write_it() -> None:
    def nodes(*inputs: str) -> list[tuple[str, Any]]:
        transpose = helper.make_node("Transpose", ["x"], ["a"], perm=[2, 0, 1])
        model = _model([transpose, helper.make_node("MatMul", inputs, ["y"])], {})
        return [(node.operator, node.attributes.get("perm")) for node in read_nodes(model).nodes]

    swapped = [("Transpose", [2, 1, 0]), ("SwapLastAxes", None), ("MatMul", None)]
    assert nodes("x", "a") == swapped
    assert nodes("a", "x") == [("Transpose", [2, 0, 1]), ("MatMul", None)]


def test_near_misses_are_left_alone() -> None:
    def gelu(half: float, outputs: tuple[str, ...] = ("y",)) -> list[str]:
        numbers = {"root": np.float32(math.sqrt(2)), "one": np.float32(1), "half": np.float32(half)}
        steps = [("Div", "x", "root", "a"), ("Erf", "a", "b"), ("Add", "b", "one", "c"), ("Mul", "x", "c", "d"),
                 ("Mul", "d", "half", "y")]  # fmt: skip
        nodes = [helper.make_node(operator, names[:-1], names[-1:]) for operator, *names in steps]
        return _operators(_model(nodes, numbers, outputs))

    assert gelu(0.5) == ["Gelu"]
    assert len(gelu(0.25)) == len(gelu(0.5, ("y", "b"))) == 5

    def layers(axis: int, outputs: tuple[str, ...] = ("y",)) -> list[str]:
        nodes = [helper.make_node("LSTM", ["x", "w", "r"], ["a", "h"], hidden_size=3),
                 helper.make_node("Squeeze", ["a", "axis"], ["b"]),
                 helper.make_node("LSTM", ["b", "w", "r"], ["y"], hidden_size=3)]  # fmt: skip
        weights = {name: np.zeros((1, 12, 3), np.float32) for name in "wr"}
        return _operators(_model(nodes, {**weights, "axis": np.array([axis])}, outputs))

    assert layers(1) == ["LSTM"]
    assert len(layers(2)) == len(layers(1, ("y", "h"))) == len(layers(1, ("y", "b"))) == 3


def test_what_depends_on_constants_alone_is_worked_out_beforehand() -> None:
    nodes = [helper.make_node("Constant", [], ["c"], value=numpy_helper.from_array(np.array([3], np.int64))),
             helper.make_node("Concat", ["c", "two"], ["shape"], axis=0),
             helper.make_node("Reshape", ["x", "shape"], ["y"])]  # fmt: skip
    graph = read_nodes(_model(nodes, {"two": np.array([2])}))
    assert [node.operator for node in graph.nodes] == ["Reshape"] and graph.constants["shape"].tolist() == [3, 2]


# the step


def _step(folder: Path, *more: str) -> dict[str, Any]:
    answer = folder / "answer.json"
    command = ["peers", "--json", str(answer), "--in", str(folder), "--values", "m-tiny.npz", "--rehearse"]
    command += ["--rounds", "2", "--warmup", "1", *more]
    gpu_steps.main(command)
    (name, result), = json.loads(answer.read_text())["done"].items()  # fmt: skip
    assert name == peer_name("m-tiny.npz", more[more.index("--precision") + 1], more[1])
    return result


def test_what_is_missing_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    (tmp_path / "m.graph.npz").write_bytes(b"")
    about = ("--peer", "inductor", "--precision")
    for more, says in [
        (("fp32", "--graph", "m.graph.npz"), "torch is not installed here"),
        (("fp32", "--graph", "other.npz"), "built without the model's own file"),
        (("fp32",), "built without the model's own file"),
        (("tf32x3", "--graph", "m.graph.npz"), "in fp32, tf32, mixed alone, and not in tf32x3 precision"),
    ]:
        result = _step(tmp_path, *about, *more)
        assert not result["ok"] and result["status"] == "missing" and says in result["error"]


@pytest.mark.parametrize("name", _MODELS)
def test_small_models_are_right_in_pytorch(name: str, tmp_path: Path) -> None:
    """Also as torch.compile sees them: one graph without a break."""
    pytest.importorskip("torch")
    onnxruntime = pytest.importorskip("onnxruntime")
    model, draws = redrawn(models.build(name))
    write_graph(tmp_path / "m.graph.npz", model, draws)
    inputs = models.random_inputs(model)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    expected = dict(zip(names, session.run(names, inputs), strict=True))
    values = {f"input/{key}": value for key, value in inputs.items()}
    np.savez(tmp_path / "m-tiny.npz", **values, **{f"output/{key}": value for key, value in expected.items()})
    for peer in ("eager", "inductor"):
        result = _step(tmp_path, "--peer", peer, "--precision", "fp32", "--graph", "m.graph.npz")
        assert result["ok"], result
        assert set(result["outputs"]) == set(names) and result["launch"]["median_us"] > 0
    # A wrong output is not timed.
    wrong = {f"output/{key}": value + 1 for key, value in expected.items()}
    np.savez(tmp_path / "m-tiny.npz", **values, **wrong)
    result = _step(tmp_path, "--peer", "eager", "--precision", "fp32", "--graph", "m.graph.npz")
    assert not result["ok"] and result["error"].startswith("outputs are wrong") and "launch" not in result


class _PlayedTorch:
    """Of torch.cuda what a capture and a timing call; each run takes as many milliseconds as calls it makes."""

    def __init__(self) -> None:
        self.cuda, self.clock, self.log = self, 0.0, []

    def call(self) -> str:
        self.clock += 1.0
        self.log.append("call")
        return "outputs"

    def current_stream(self) -> Any:
        return argparse.Namespace(wait_stream=lambda other: None)

    Stream = current_stream

    def stream(self, stream: Any) -> Any:
        return contextlib.nullcontext()

    graph = stream

    def CUDAGraph(self) -> Any:
        def replay() -> None:
            self.clock += 0.5
            self.log.append("replay")

        return argparse.Namespace(replay=replay)

    def synchronize(self) -> None:
        self.log.append("synchronize")

    def Event(self, *, enable_timing: bool) -> Any:
        event = argparse.Namespace(at=None)
        event.record = lambda: setattr(event, "at", self.clock)
        event.elapsed_time = lambda end: end.at - event.at
        return event


def test_calls_and_graphs_are_timed_in_rounds_there_and_back(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = _PlayedTorch()
    monkeypatch.setattr(peers, "SPIN_SECONDS", 0.0)
    monkeypatch.setattr(peers, "read_clocks", lambda: "clocks")
    monkeypatch.setattr(torch_peer, "torch", torch)
    graph, outputs = torch_peer.captured(torch.call)
    assert outputs == "outputs" and torch.log == ["call"] * 4
    runs = {"launch": (torch.call, 1), "graph": (graph.replay, 1), "graphs": (graph.replay, 2)}
    options = argparse.Namespace(rehearse=False, seconds=60.0, repeats=4, warmup=2, rounds=2)
    torch.log.clear()
    found = peers._timed(torch, runs, options)
    assert [found[way]["median_us"] for way in runs] == [1000.0, 500.0, 500.0]
    assert found["repeats"] == 4 and found["clocks_idle_spun_after"] == ["clocks"] * 3
    text = " ".join(torch.log).replace("synchronize", "\n").splitlines()
    counts = [(line.count("call"), line.count("replay")) for line in text if line.strip()]
    there = [(6, 0), (0, 6), (0, 6)]
    assert counts == [(3, 0), *there, *there[::-1]], "warm-ups and repeats; in pairs, one warm-up"


# plan and table


def _cases(*precisions: str) -> dict[str, dict[str, Any]]:
    return {
        f"{model}-paper-{precision}-{level}": {
            "model": model, "size": "paper", "precision": precision, "level": level, "constants": "synthetic",
            "io": f"{model}-paper.npz", "graph": f"{model}-paper.graph.npz" if model == "bert" else None,
            "grid_syncs": (model == "old") + 2 * (precision == "mixed"),
        }
        for precision in precisions or ("fp32",) for model in ("bert", "old") for level in ("V0", "V4")
    }  # fmt: skip


def _phases(*precisions: str) -> dict[str, Any]:
    options = argparse.Namespace(rehearse=False, timeout=100.0, latency_repeats=5, rounds=2, peers=list(PEERS))
    return {phase.name: phase for phase in first_contact(_cases(*precisions), options)}


def _latency_phase() -> Any:
    return _phases()["latency"]


def test_peers_come_after_all_levels() -> None:
    steps = _latency_phase().steps
    assert [step.kind for step in steps] == ["latency"] * 2 + ["peers"] * 6
    keys = [step.key(name) for step in steps[2:] for name in step.names]
    assert keys == [f"peers {model}-paper-fp32-{peer}" for peer in PEERS for model in ("bert", "old")]
    assert [step.timeout for step in steps] == [100, 100, 100, 100, 200, 200, 300, 300]
    bert, old = steps[2:4]
    assert bert.arguments[bert.arguments.index("--graph") + 1] == "bert-paper.graph.npz"
    assert "--graph" not in old.arguments


def test_mixed_precision_has_a_phase_of_its_own() -> None:
    phases, alone = _phases("mixed", "fp32"), _phases("fp32")
    for name in ("paper", "latency"):
        assert phases[name].steps == alone[name].steps, "what fp32 is asked stays as it is"
    assert [(step.kind, step.names) for step in phases["mixed"].steps] == [
        ("check", ("old-paper-mixed-V4",)), ("check", ("bert-paper-mixed-V4",)),
        ("latency", ("bert-paper-mixed-V0", "bert-paper-mixed-V4")),
        ("latency", ("old-paper-mixed-V0", "old-paper-mixed-V4")),
        *(("peers", (f"{model}-paper-mixed-{peer}",)) for peer in PEERS for model in ("bert", "old")),
    ]  # fmt: skip
    assert all(phase.bound <= 480 for phase in phases.values())
    order = list(phases)
    assert order.index("latency") < order.index("mixed") < order.index("rest")
    assert {name for step in phases["rest"].steps for name in step.names} == {
        f"{model}-paper-{precision}-V0" for model in ("bert", "old") for precision in ("fp32", "mixed")
    }


def test_peers_in_fp32_are_not_beside_mixed_precision() -> None:
    cases, steps = _cases("fp32", "mixed"), [*_phases()["latency"].steps, *_phases("mixed")["mixed"].steps]
    results = _results(eager=_entry(31.0))
    results["steps"] |= {
        key.replace("fp32", "mixed"): entry for key, entry in results["steps"].items() if key.startswith("latency")
    }
    lines = table(results, steps, cases).splitlines()
    assert any(line.startswith("bert paper fp32") and "eager" in line for line in lines)
    mixed = [line.split()[3] for line in lines if line.startswith("bert paper mixed")]
    assert mixed == ["V0", "V4"]


def _entry(median: float, **more: Any) -> dict[str, Any]:
    ways = {way: {**_FIGURES, "median_us": median} for way in ("launch", "graph", "graphs")}
    return {"status": "ok", "seconds": 1.0, "result": {"ok": True, **ways, **more}}


def _results(**states: dict[str, Any]) -> dict[str, Any]:
    steps = {
        f"latency {name}": _entry(10.0 if name.endswith("V4") else 40.0, launches=1, grid_syncs=0) for name in _cases()
    }
    steps |= {f"peers bert-paper-fp32-{peer}": entry for peer, entry in states.items()}
    missing = {"status": "missing", "seconds": 0.1, "error": "torch is not installed here"}
    steps |= {f"peers old-paper-fp32-{peer}": missing for peer in PEERS}
    return {"steps": steps, "rehearsal": False, "date": "today"}


def test_the_table_has_peers_beside_the_levels() -> None:
    results = _results(eager=_entry(31.0), inductor=_entry(15.0), autotuned={"status": "timeout", "error": "ended"})
    text = table(results, _latency_phase().steps, _cases())
    rows = [line.split() for line in text.splitlines() if line.startswith("bert paper fp32")]
    assert rows[2][3:] == ["eager", "31.0", "(1.0)", "31.0", "(1.0)", "31.0", "(1.0)"]
    assert rows[4][3:] == ["autotuned", "timeout"]
    assert " ".join(rows[5][3:]) == "times as long as V4, as graphs: eager 3.10, inductor 1.50"
    assert "eager, inductor, autotuned missing: torch is not installed here" in text
    assert "FAILED peers bert-paper-fp32-autotuned: timeout" in text and "FAILED peers old" not in text


def test_a_peer_that_is_missing_or_slow_to_compile_fails_no_phase() -> None:
    phase = _latency_phase()
    good = dict.fromkeys(("eager", "inductor", "autotuned"), _entry(20.0))
    for states, verdict, says in [
        (good, "pass", "missing: peers old-paper-fp32-autotuned: torch is not installed here"),
        (good | {"autotuned": {"status": "timeout", "error": "ended"}}, "not whole", "timeout: peers bert-paper"),
        (
            good | {"eager": {"status": "failed", "error": "wrong"}},
            "FAIL",
            "failed: peers bert-paper-fp32-eager: wrong",
        ),
    ]:
        text = phase_table(_results(**states), [phase])
        assert text.splitlines()[1].startswith(f"latency    {verdict} ") and says in text


def test_without_a_gpu_pytorch_is_not_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    (tmp_path / "m.graph.npz").write_bytes(b"")
    about = {"values": "m-tiny.npz", "graph": "m.graph.npz", "precision": "fp32", "peer": "eager"}
    options = argparse.Namespace(input=tmp_path, rehearse=False, **about)
    (_, result), = peers.peers([], options, lambda name: None)  # fmt: skip
    assert result["status"] == "missing" and "finds no GPU" in result["error"]
