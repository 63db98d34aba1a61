"""Others beside Souffle's levels: the model that travels, the traced module, the plan of a GPU host and its tables."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("onnx")
from onnx import ModelProto, TensorProto, helper, numpy_helper

from benchmarks import gpu_records
from benchmarks.gpu_plan import ELSEWHERE, PHASES, SLOW_PEERS, ablation_labels, phases_of
from benchmarks.gpu_table import phase_table, table
from benchmarks.weights import read_graph, redrawn, write_graph
from souffle import models
from souffle.benchmark import torch_graph, torch_peer
from souffle.benchmark.onnx_fusions import read_nodes
from souffle.benchmark.peer import GRAPH, HOST, LAUNCHES, Setting
from souffle.benchmark.registry import PEERS
from souffle.benchmark.report import OURS, BenchmarkReport, BenchmarkRow
from souffle.benchmark.rounds import figures_of, ratio_of
from souffle.evaluation import gpu_records as shown
from souffle.evaluation.setting import Setting as setting_of
from souffle.evaluation.tables import TABLES
from souffle.reference import onnxruntime_outputs
from souffle.runtime.comparison import compare

_MODELS = ("mmoe", "lstm", "efficientnet", "bert", "swin", "resnext")


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


# PyTorch


@pytest.mark.parametrize("name", _MODELS)
def test_small_models_are_right_in_pytorch(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As ONNX Runtime computes them; also as torch.compile sees them: one graph without a break."""
    pytest.importorskip("torch")
    onnxruntime = pytest.importorskip("onnxruntime")
    model = models.build(name)
    inputs = models.random_inputs(model)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    expected = dict(zip(names, session.run(names, inputs), strict=True))
    # Inductor's own code takes minutes to compile.
    monkeypatch.setitem(torch_peer._MODES, "inductor", {"backend": "eager"})
    for peer in ("eager", "inductor"):
        (way,) = torch_peer.TorchPeer(peer).prepare(model, inputs, Setting("cpu", 1, "fp32"))
        assert way.form == HOST and compare(way.outputs(), expected, "fp32").ok


def _model_of_other_operators() -> ModelProto:
    """What networks of today have and the paper's six have not."""
    steps: list[tuple[str, list[str], list[str], dict[str, Any]]] = [
        ("Pow", ["x", "three"], ["a"], {}),
        ("Tanh", ["a"], ["b"], {}),
        ("HardSwish", ["b"], ["c"], {}),
        ("HardSigmoid", ["c"], ["d"], {"alpha": 1 / 6}),
        ("HardSigmoid", ["d"], ["e"], {"alpha": 0.3, "beta": 0.25}),
        ("Clip", ["e", "low"], ["f"], {}),
        ("Neg", ["f"], ["g"], {}),
        ("Exp", ["g"], ["h"], {}),
        ("Sqrt", ["h"], ["i"], {}),
        ("Gelu", ["i"], ["j"], {"approximate": "tanh"}),
        ("Split", ["j"], ["k", "l", "m"], {"axis": 1, "num_outputs": 3}),
        ("Split", ["j", "sizes"], ["n", "o"], {"axis": 0}),
        ("ReduceMean", ["k", "last"], ["p"], {"keepdims": 0}),
        ("ReduceMean", ["n", "last"], ["q"], {}),
        ("GatherND", ["j", "pairs"], ["r"], {}),
        ("Gather", ["table", "rows"], ["s"], {}),
    ]
    constants = {
        "three": np.float32(3), "low": np.float32(0.3), "sizes": np.array([1, 3]), "last": np.array([-1]),
        "pairs": np.array([[0, 5], [3, 0], [1, 1]]), "table": np.arange(12, dtype=np.float32).reshape(6, 2),
    }  # fmt: skip
    inputs = [
        helper.make_tensor_value_info("x", TensorProto.FLOAT, [4, 6]),
        helper.make_tensor_value_info("rows", TensorProto.INT64, [2, 3]),
    ]
    outputs = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)
        for name, shape in (("l", [4, 2]), ("m", [4, 2]), ("o", [3, 6]), ("p", [4]), ("q", [1, 1]), ("r", [3]),
                            ("s", [2, 3, 2]))
    ]  # fmt: skip
    nodes = [helper.make_node(operator, *ends, **attributes) for operator, *ends, attributes in steps]
    arrays = [numpy_helper.from_array(np.asarray(array), name) for name, array in constants.items()]
    graph = helper.make_graph(nodes, "others", inputs, outputs, arrays)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)


def test_other_operators_are_right_in_pytorch() -> None:
    model = _model_of_other_operators()
    assert not torch_graph.unknown_operators(read_nodes(model))
    pytest.importorskip("torch")
    rng = np.random.default_rng(5)
    inputs = {"x": rng.standard_normal((4, 6)).astype(np.float32), "rows": rng.integers(0, 6, (2, 3))}
    (way,) = torch_peer.TorchPeer("eager").prepare(model, inputs, Setting("cpu", 1, "fp32"))
    assert compare(way.outputs(), onnxruntime_outputs(model, inputs), "fp32").ok


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


def test_a_call_is_captured_after_it_is_warm(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = _PlayedTorch()
    monkeypatch.setattr(torch_peer, "torch", torch)
    graph, outputs = torch_peer.captured(torch.call)
    assert outputs == "outputs" and torch.log == ["call"] * 4
    graph.replay()
    assert torch.log == ["call"] * 4 + ["replay"]


def test_without_a_gpu_pytorch_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "finds no GPU" in torch_peer.TorchPeer("eager").lacking(Setting("cuda", 1, "fp32"))


# plan and table


def _cases(*precisions: str) -> dict[str, dict[str, Any]]:
    figures = ("launches", "kernels", "grid_syncs", "flag_arrivals", "block_syncs", "bytes_read", "bytes_written")
    figures += ("registers", "spill_bytes", "shared_bytes", "code_bytes", "compile_s", "predicted_us")
    labels = {"V0": "V0", "V4": "V4", "V4.disable.teams": "V4 without teams"}
    return {
        f"{model}-paper-{precision}-{name}": {
            **dict.fromkeys(figures, 1), "model": model, "size": "paper", "precision": precision, "level": name[:2],
            "label": label, "constants": "synthetic", "io": f"{model}-paper.npz", "grid_barrier": "counter",
            "graph": f"{model}-paper.graph.npz",
        }
        for precision in precisions or ("fp32",) for model in ("bert", "old") for name, label in labels.items()
        if name != "V4.disable.teams" or model == "bert"
    }  # fmt: skip


def _phases(*precisions: str, **more: Any) -> dict[str, Any]:
    options = {"rehearse": False, "timeout": 100.0, "latency_repeats": 5, "rounds": 2, "repeats": 3, "phases": []}
    options |= {"peers": [name for name in PEERS if name not in ELSEWHERE], **more}
    return {phase.name: phase for phase in phases_of(_cases(*precisions), argparse.Namespace(**options))}


def test_every_peer_of_the_benchmark_is_asked_or_said_to_be_elsewhere() -> None:
    asked = [name for step in _phases()["peers"].steps for name in step.label.split()[1].split("+")]
    assert set(asked) | set(ELSEWHERE) == set(PEERS) and set(SLOW_PEERS) <= set(asked)
    assert not set(asked) & set(ELSEWHERE)


def test_what_is_quick_comes_first_and_what_compiles_is_alone() -> None:
    steps = _phases()["peers"].steps
    assert [(step.label, step.names, step.timeout) for step in steps] == [
        (f"bench {peers}", (f"{model}-paper-fp32-V4",), limit)
        for peers, limit in (("eager+ort+tensorrt", 100.0), ("inductor", 200.0), ("autotuned", 300.0))
        for model in ("bert", "old")
    ]  # fmt: skip
    assert not any(step.together for step in steps), "they are timed"
    few = _phases(peers=["inductor"])["peers"].steps
    assert [step.label for step in few] == ["bench inductor"] * 2


def test_what_is_worth_most_comes_first() -> None:
    phases = _phases("mixed", "fp32")
    assert list(phases) == list(PHASES)[: len(phases)] == list(PHASES)
    assert list(_phases(phases=["peers", "right"])) == ["device", "peers", "right"]
    groups = [("bert", "mixed"), ("old", "mixed"), ("bert", "fp32"), ("old", "fp32")]
    own = [tuple(f"{model}-paper-{precision}-{level}" for level in ("V0", "V4")) for model, precision in groups]
    assert [step.names for step in phases["right"].steps] == own and all(s.together for s in phases["right"].steps)
    assert [(step.kind, step.names) for step in phases["latency"].steps] == [("latency", names) for names in own]
    # A variant is timed beside what it is a variant of, once more; who has none is not.
    assert [(step.kind, step.label, step.names) for step in phases["ablation"].steps] == [
        step for precision in ("mixed", "fp32") for step in (
            ("check", "check", (f"bert-paper-{precision}-V4.disable.teams",)),
            ("latency", "ablation", (f"bert-paper-{precision}-V4", f"bert-paper-{precision}-V4.disable.teams")),
        )
    ]  # fmt: skip


def test_many_variants_are_checked_and_timed_a_few_at_a_time() -> None:
    case = _cases()["bert-paper-fp32-V4"]
    others = {f"v{n}": {**case, "label": f"V4 without {n}"} for n in range(19)}
    options = argparse.Namespace(
        rehearse=False, timeout=60.0, latency_repeats=5, rounds=2, repeats=3, phases=["ablation"], peers=[]
    )  # fmt: skip
    _, phase = phases_of({"own": case, **others}, options)
    checks, timed = ([step for step in phase.steps if step.kind == kind] for kind in ("check", "latency"))
    for steps, most in ((checks, 4), (timed, 9)):
        assert all(1 < len(step.names) <= most for step in steps)
        found = [name for step in steps for name in step.names if name != "own"]
        assert found == list(others), "each once"
    # In each process beside what they are variants of, under a key of its own.
    keys = [step.key(name) for step in timed for name in step.names]
    assert all(step.names[0] == "own" for step in timed) and len(set(keys)) == len(keys)
    assert ablation_labels(keys) == ["ablation", "ablation1", "ablation2"]
    found = {key: _entry(float(len(key)), launches=1, grid_syncs=0) for key in keys}
    text = table({**_results(), "cases": {"own": case, **others}, "steps": found})
    assert text.count("bert paper fp32, variants") == 3 and all(f"V4 without {n} " in text for n in range(19))


_FIGURES = {"median_us": 2.0, "min_us": 1.0, "p90_us": 3.0}


def _entry(median: float, **more: Any) -> dict[str, Any]:
    ways = {way: {**_FIGURES, "median_us": median} for way in ("launch", "graph", "graphs")}
    return {"status": "ok", "seconds": 1.0, "result": {"ok": True, **ways, **more}}


def _report(*peers: str, precision: str = "fp32") -> dict[str, Any]:
    """Our rows take 10 and 12, each peer 30 as a graph; a last one is not there."""
    report = BenchmarkReport("bert", "a GPU", Setting("cuda", 1, precision), "V4", "a reference", 3, 1)
    for name, form, time in [(OURS, GRAPH, 10.0), (OURS, LAUNCHES, 12.0), *((peer, GRAPH, 30.0) for peer in peers)]:
        row = BenchmarkRow(name, "1.0", form, "CUDA events", 1.0, 1e-4, True)
        row.times["warm"] = figures_of([time] * 3)
        if name != OURS:
            row.ratios["warm"] = ratio_of([time] * 3, [10.0] * 3)
        report.rows.append(row)
    report.rows.append(BenchmarkRow("tensorrt", reason="this ONNX Runtime has no TensorRT"))
    return {"status": "ok", "seconds": 1.0, "result": {"ok": True, "report": dataclasses.asdict(report)}}


def _results(**steps: dict[str, Any]) -> dict[str, Any]:
    found = {
        f"latency {name}": _entry(10.0 if case["level"] == "V4" else 40.0, launches=1, grid_syncs=0)
        for name, case in _cases().items() if case["label"] == case["level"]
    }  # fmt: skip
    found |= {f"ablation bert-paper-fp32-{name}": _entry(11.0, launches=1, grid_syncs=0)
              for name in ("V4", "V4.disable.teams")}  # fmt: skip
    device = {"status": "ok", "result": {"name": "a GPU", "arch": "sm_90", "driver_and_clocks": "1"}}
    found |= {"device": device, **steps}
    return {"steps": found, "rehearsal": False, "date": "2026-01-02T03:04:05+00:00", "cases": _cases(), "command": "c"}


def test_the_tables_are_those_of_ablate_and_bench() -> None:
    key = "bench eager+ort+tensorrt bert-paper-fp32-V4"
    text = table(_results(**{key: _report("eager")}))
    rows = [line.split() for line in text.splitlines()]
    assert next(row for row in rows if row[:1] == ["V0"]).count("40.0") == 3
    levels = text[text.index("bert paper fp32\n") : text.index("bert paper fp32, variants")]
    assert "without teams" not in levels and "without teams" in text[len(levels) :]
    assert "bert on a GPU, fp32, level V4" in text and "30.0 .. 30.0" in text
    assert "tensorrt: this ONNX Runtime has no TensorRT" in text and "FAILED" not in text
    failed = table(_results(**{"check bert-paper-fp32-V4": {"status": "failed", "error": "output y is wrong"}}))
    assert "FAILED check bert-paper-fp32-V4: failed, output y is wrong" in failed


def test_a_peer_that_is_missing_or_takes_too_long_is_no_failure() -> None:
    phase = _phases(peers=["eager", "inductor"])["peers"]
    keys = [step.key(name) for step in phase.steps for name in step.names]
    good = {key: _report("eager") for key in keys}
    for changes, verdict, says in [
        ({}, "pass", ""),
        ({keys[0]: {"status": "missing", "error": "onnx is not installed here"}}, "pass", "onnx is not installed"),
        ({keys[3]: {"status": "timeout", "error": "it was ended"}}, "not whole", "timeout: bench inductor old-paper"),
        ({keys[1]: {"status": "failed", "error": "our own"}}, "FAIL", f"failed: {keys[1]}: our own"),
    ]:
        text = phase_table(_results(**good, **changes) if not changes else _results(**{**good, **changes}), [phase])
        assert text.splitlines()[1].startswith(f"peers      {verdict} ") and says in text


# what comes of it in souffle reproduce


def test_a_run_becomes_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results = _results(**{"bench eager bert-paper-fp32-V4": _report("eager")})
    results["built"] = {"commit": "abc"}
    good = {"status": "ok", "result": {"ok": True, "outputs": {}}}
    results["steps"] |= {f"check {name}": good for name in _cases()}
    # Who is wrong gets no number.
    results["steps"]["check old-paper-fp32-V0"] = {"status": "failed", "error": "output y is wrong"}
    (tmp_path / "gpu-a-2026-01-02.json").write_text(json.dumps(results))
    monkeypatch.setattr(gpu_records, "_FOLDER", tmp_path)
    records = gpu_records.collected()
    about = {"device": "a GPU", "date": "2026-01-02", "file": "gpu-a-2026-01-02.json"}
    network = {"kind": "network", "model": "bert", "precision": "fp32", "launches": 1, "grid_syncs": 0, "commit": "abc"}
    assert {**network, **about, "level": "V4", "graph_us": 10.0} in records
    assert {**network, **about, "level": "V4", "graph_us": 11.0, "variant": "V4 without teams"} in records
    assert not [one for one in records if (one["model"], one.get("level")) == ("old", "V0")]
    assert len(records) == 5 and records[-1] == {
        "kind": "peer", "peer": "eager", "model": "bert", "precision": "fp32", "graph_us": 30.0, "form": "graph",
        "version": "1.0", **about,
    }  # fmt: skip
    # As the papers' tables show them where no GPU is.
    monkeypatch.setattr(shown, "gpu_records", lambda: tuple(records))
    setting = setting_of("paper", "sm_80", True, None, "today")
    cell = setting.latency(None, "bert", "V4", "fp32")
    assert (cell.value, cell.how) == (0.01, "measured") and "on a GPU, 2026-01-02" in cell.note
    cells = [cell for line in TABLES["table3"].table(setting, lambda task: None).lines for cell in line.cells]
    assert any(cell.how == "measured" and cell.value == 0.03 for cell in cells), "PyTorch's"
    results["rehearsal"] = True
    (tmp_path / "gpu-a-2026-01-02.json").write_text(json.dumps(results))
    with pytest.raises(ValueError, match="a rehearsal are no records"):
        gpu_records.collected()
