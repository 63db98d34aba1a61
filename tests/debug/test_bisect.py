"""``souffle debug bisect`` on compilers that are wrong on purpose, one step at a time, and on one that is right."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from souffle import pipeline, reference, request, staging, transform
from souffle.cli.main import main
from souffle.debug import bisect as bisection
from souffle.debug.bisect import BisectReport, bisect
from souffle.debug.departure import Reference, first_departure, values_of
from souffle.decision import Decision
from souffle.errors import CudaCompileError
from souffle.program import TE, Loop, Tensor, TEProgram, make_te
from tests.testlib import Builder

pytest.importorskip("onnxruntime")

_NODES = (
    ("MatMul", ["x", "w0"], "a"),
    ("MatMul", ["x", "w1"], "b"),
    ("Add", ["a", "b"], "c"),
    ("Sigmoid", ["c"], "d"),
    ("Mul", ["d", "c"], "e"),
    ("Softmax", ["e"], "y"),
)


@pytest.fixture(scope="module")
def model() -> onnx.ModelProto:
    rng = np.random.default_rng(0)
    weights = [numpy_helper.from_array(rng.standard_normal((8, 6)).astype(np.float32), f"w{i}") for i in range(2)]
    graph = helper.make_graph(
        [helper.make_node(kind, names, [out], name=f"{kind} of {out}") for kind, names, out in _NODES],
        "small",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [3, 8])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [3, 6])],
        weights,
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)


def _spoilt(program: TEProgram, picked: Callable[[TE], bool]) -> tuple[TEProgram, str]:
    """A program in which the first TE of elements that is picked gives its first element as four more."""

    def spoil(te_: TE) -> TE:
        first = te_.axes[0].var * 0
        for axis in te_.axes:
            first = first + axis.var
        bodies = [body + (first == 0).astype("float32") * 4.0 for body in te_.op.body]
        return make_te(te_.name, te_.axes, bodies, list(zip(te_.placeholders, te_.inputs)), te_.origin, te_.outputs)

    for number, te_ in enumerate(program.tes):
        if isinstance(te_, TE) and not te_.is_reduction and te_.axes and picked(te_):
            tes = [*program.tes[:number], spoil(te_), *program.tes[number + 1 :]]
            return program.with_tes(tes), te_.name
    raise AssertionError("there is no such TE")


def _of(operator: str) -> Callable[[TE], bool]:
    return lambda te_: te_.origin.operators[-1] == operator


def _any(te_: TE) -> bool:
    return True


class _Planted:
    """A transformation that is wrong on purpose."""

    def __init__(self, real: Callable[..., Any], picked: Callable[[TE], bool] = _any) -> None:
        self.real, self.picked, self.te = real, picked, ""

    def __call__(self, *arguments: Any, **options: Any) -> tuple[TEProgram, Any]:
        program, decisions = self.real(*arguments, **options)
        program, self.te = _spoilt(program, self.picked)
        return program, decisions


def _first_wrong(report: BisectReport) -> tuple[str, str]:
    wrong = report.wrong
    assert wrong is not None and report.steps[-1] is wrong and all(step.ok for step in report.steps[:-1])
    assert wrong.departure is not None
    return wrong.name, wrong.departure.te


def test_a_network_that_is_right_is_called_right(model: onnx.ModelProto) -> None:
    report = bisect(model, target="cpu")
    assert report.wrong is None and not report.failure and report.reference == "ONNX Runtime"
    steps = ["frontend", "gathered", "precision", "horizontal", "vertical", "narrow", "kernels"]
    assert [step.name for step in report.steps] == steps
    assert all(step.ok and step.departure is None for step in report.steps)
    # Each operator's value, as ONNX Runtime has them all.
    assert report.steps[0].compared == len(_NODES)


@pytest.mark.parametrize("operator", ["Add", "Sigmoid", "Mul"])
def test_a_wrong_import_is_found_at_its_node(
    operator: str, model: onnx.ModelProto, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = bisection.import_named

    def wrong(loaded: object) -> tuple[TEProgram, dict[str, Tensor]]:
        program, named = real(loaded)
        return _spoilt(program, _of(operator))[0], named

    monkeypatch.setattr(bisection, "import_named", wrong)
    report = bisect(model, target="cpu")
    out = next(out for kind, _, out in _NODES if kind == operator)
    assert _first_wrong(report)[0] == "frontend"
    found = report.wrong.departure
    assert (found.value, found.source) == (out, "ONNX Runtime") and f"{operator} of {out}" in found.nodes


@pytest.mark.parametrize(("step", "target"), [("horizontal", "cpu"), ("vertical", "cpu"), ("vertical", "cuda")])
def test_a_wrong_transformation_is_found(
    step: str, target: str, model: onnx.ModelProto, monkeypatch: pytest.MonkeyPatch
) -> None:
    planted = _Planted(getattr(pipeline, step))
    monkeypatch.setattr(pipeline, step, planted)
    report = bisect(model, target=target, level="V2")
    assert _first_wrong(report)[0] == step
    # What the transformation has made anew cannot be compared: then it stands ahead of the first value that can.
    departure = report.wrong.departure
    assert planted.te in (departure.te, *departure.unknown)


def test_wrong_types_are_found_in_mixed_precision(model: onnx.ModelProto, monkeypatch: pytest.MonkeyPatch) -> None:
    planted = _Planted(pipeline.mixed_precision, _of("Mul"))
    monkeypatch.setattr(pipeline, "mixed_precision", planted)
    report = bisect(model, target="cpu", precision="mixed")
    assert _first_wrong(report) == ("precision", planted.te)


def test_a_wrong_placement_is_found_with_the_switch_that_leaves_it_out(
    model: onnx.ModelProto, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = staging.place_reductions

    def wrong(program: TEProgram, on_chip: frozenset[str] = frozenset(), **options: Any) -> list:
        ((program, decisions), *_) = real(program, on_chip=on_chip, **options)
        if "normalization" not in on_chip:
            return [(program, decisions)]
        made, name = _spoilt(program, _any)
        return [(made, (*decisions, Decision("two_phase", name, True, "a bug")))]

    monkeypatch.setattr(staging, "place_reductions", wrong)
    monkeypatch.setattr(staging, "ways_taken", lambda seconds: ())
    # The wrong way is taken, though nothing makes it faster.
    monkeypatch.setattr(staging, "min", lambda ways, key: list(ways)[-1], raising=False)
    monkeypatch.setattr(bisection, "ON_CHIP", ("attention", "normalization"))
    report = bisect(model)
    assert _first_wrong(report)[0] == "two_phase" and report.switches == ("normalization",)
    assert any(decision.reason == "a bug" for decision in report.decisions)


def test_wrong_kernels_are_told_from_wrong_programs(model: onnx.ModelProto, monkeypatch: pytest.MonkeyPatch) -> None:
    real = request.compile_host

    def wrong(*arguments: Any, **options: Any) -> Any:
        plan = real(*arguments, **options)
        return replace(plan, constants={name: array * np.float32(1.1) for name, array in plan.constants.items()})

    monkeypatch.setattr(request, "compile_host", wrong)
    report = bisect(model, target="cpu", level="V2")
    assert report.wrong.name == "kernels" and report.wrong.departure is None
    assert all(step.ok for step in report.steps[:-1])


def test_what_the_compiler_raises_is_told_with_the_steps_before(
    model: onnx.ModelProto, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    def failing(*arguments: Any, **options: Any) -> None:
        raise CudaCompileError("no such register")

    monkeypatch.setattr(pipeline, "assemble_host", failing)
    path = tmp_path / "m.onnx"
    onnx.save(model, path)
    assert main(["debug", "bisect", str(path), "--target", "cpu", "--quiet"]) == 1
    shown = capsys.readouterr().out
    assert "Compiling failed: CudaCompileError: no such register" in shown and "vertical" in shown
    assert "The network is right" not in shown


def test_a_value_inside_that_departs_is_told_though_outputs_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is added to the first element before a softmax with one column changes nothing."""
    graph = helper.make_graph(
        [helper.make_node("Sigmoid", ["x"], ["d"]), helper.make_node("Softmax", ["d"], ["y"], axis=-1)],
        "hidden",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [3, 1])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [3, 1])],
    )
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    real = bisection.import_named

    def wrong(loaded: object) -> tuple[TEProgram, dict[str, Tensor]]:
        program, named = real(loaded)
        return _spoilt(program, _of("Sigmoid"))[0], named

    monkeypatch.setattr(bisection, "import_named", wrong)
    report = bisect(made, target="cpu")
    assert report.wrong is None and report.steps[0].departure.value == "d"


def test_without_onnx_runtime_the_import_is_what_is_compared_with(
    model: onnx.ModelProto, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reference, "onnxruntime", None)
    monkeypatch.setattr(pipeline, "vertical", _Planted(pipeline.vertical))
    report = bisect(model, target="cpu")
    assert report.reference == "the program as imported" and report.steps[0].compared == 0
    assert _first_wrong(report)[0] == "vertical"


def test_the_command_says_it(
    model: onnx.ModelProto, tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "m.onnx"
    onnx.save(model, path)
    words = ["debug", "bisect", str(path), "--target", "cpu", "--quiet"]
    assert main(words) == 0
    assert "The network is right" in capsys.readouterr().out
    planted = _Planted(pipeline.vertical)
    monkeypatch.setattr(pipeline, "vertical", planted)
    assert main(words) == 1
    shown = capsys.readouterr().out
    assert "The outputs are wrong after vertical, and right before." in shown and planted.te in shown
    assert main([*words, "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["wrong"] == "vertical" and found["steps"][-1]["departure"]["text"]


def test_values_behind_a_loop_are_compared() -> None:
    b, rng = Builder(), np.random.default_rng(0)
    x = b.relu(b.input(4, 4))
    for _ in range(5):
        x = b.tanh(b.matmul(x, b.constant(rng.standard_normal((4, 4)).astype(np.float32))))
    program = b.program(b.reduce(x, 0))
    inputs = {name: rng.standard_normal((4, 4)).astype(np.float32) for name in program.input_names}
    named = zip(program.output_names, program.outputs, strict=True)
    values = values_of(program, inputs)
    references = {tensor: Reference(values[tensor], "the import", name) for name, tensor in named}
    rolled, _ = transform.roll(program)
    assert any(isinstance(item, Loop) for item in rolled.tes)
    found = values_of(rolled, inputs)
    assert first_departure(rolled, found, references, "fp32") == (None, len(program.outputs))
    last = rolled.outputs[0]
    departure, _ = first_departure(rolled, {**found, last: found[last] + 1}, references, "fp32")
    assert departure.tensor == last.name and departure.value == program.output_names[0] and departure.unknown
