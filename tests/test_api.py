"""What a user calls."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import numpy as np
import onnx
import pytest

import souffle
from souffle import api, models
from souffle.cache import cache_root
from souffle.cli.compare import compare, onnxruntime_outputs
from souffle.errors import CompilerNotFoundError, OptionError
from souffle.options import ON_CHIP, Options
from souffle.program import TEProgram
from souffle.runtime import Network
from souffle.runtime.host_network import HostNetwork
from tests.testlib import Builder, inputs_for

CUDA = {"target": "cuda", "arch": "sm_90", "cubin": False, "device": "cpu"}


@cache
def model() -> onnx.ModelProto:
    return models.build("mmoe")


@cache
def inputs() -> dict[str, np.ndarray]:
    return models.random_inputs(model())


@cache
def reference() -> dict[str, np.ndarray]:
    return onnxruntime_outputs(model(), inputs())


def agrees(found: dict[str, object]) -> bool:
    return compare({name: np.asarray(value) for name, value in found.items()}, reference(), "fp32").ok


@pytest.mark.parametrize("form", ["path", "text path", "bytes", "proto", "program"])
def test_a_model_in_every_form(form: str, tmp_path: Path) -> None:
    path = tmp_path / "mmoe.onnx"
    onnx.save(model(), path)
    given = {
        "path": path,
        "text path": str(path),
        "bytes": path.read_bytes(),
        "proto": model(),
        "program": souffle.import_onnx(path),
    }[form]
    assert agrees(souffle.compile(given, level="V1", **CUDA)(inputs()))


def test_inputs_by_name_and_by_position() -> None:
    net = souffle.compile(model(), **CUDA)
    by_name, by_position = net(inputs()), net(*inputs().values())
    assert agrees(by_name)
    for name, value in by_name.items():
        np.testing.assert_array_equal(by_position[name], value)


@pytest.mark.parametrize("target", ["cuda", "cpu"])
def test_tensors_of_other_libraries_are_taken_through_dlpack(target: str) -> None:
    class Lent:
        def __init__(self, array: np.ndarray) -> None:
            self.array = array

        def __dlpack__(self, **options):
            return self.array.__dlpack__(**options)

        def __dlpack_device__(self):
            return self.array.__dlpack_device__()

    net = souffle.compile(model(), **(CUDA if target == "cuda" else {"target": "cpu"}))
    assert agrees(net({name: Lent(value) for name, value in inputs().items()}))


@pytest.mark.parametrize(
    ("options", "kind"), [(CUDA, Network), ({"target": "cpu"}, HostNetwork)], ids=["cuda text", "cpu"]
)
def test_save_and_load(options: dict, kind: type, tmp_path: Path) -> None:
    net = souffle.compile(model(), **options)
    assert isinstance(net, kind) and agrees(net(inputs()))
    path = tmp_path / "net.souffle"
    net.save(path)
    again = souffle.load(path, device="cpu")
    assert isinstance(again, kind)
    assert agrees(again(inputs()))
    assert again.plan.decisions == net.plan.decisions and again.explain() == net.explain()
    assert [k.name for k in again.kernels] == [k.name for k in net.kernels]
    assert again.signature == net.signature
    first = path.read_bytes()
    again.save(path)
    assert path.read_bytes() == first


def test_auto_means_this_machine_s_processor_where_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "gpu_arch", lambda: None)
    assert isinstance(souffle.compile(model()), HostNetwork)
    monkeypatch.setattr(api, "gpu_arch", lambda: "sm_80")
    net = souffle.compile(model(), cubin=False)
    assert isinstance(net, Network) and net.plan.options.arch == "sm_80"


def test_kernels_say_what_they_are() -> None:
    net = souffle.compile(model(), level="V1", **CUDA)
    assert len(net.kernels) == len(net.plan.kernels)
    for kernel in net.kernels:
        assert f"void __launch_bounds__({kernel.block[0]}) {kernel.name}(" in kernel.text
        assert kernel.grid[0] >= 1 and kernel.shared_bytes >= 0 and kernel.launches >= 1
        assert kernel.registers is None and kernel.spill_bytes is None
        assert kernel.tes and kernel.stages
    tes = [te for launch in net.plan.launches for te in launch.tes]
    assert len(tes) == len(set(tes))


@pytest.mark.parametrize("options", [CUDA, {"target": "cpu"}], ids=["cuda text", "cpu"])
def test_explain_shows_kernels_and_decisions(options: dict) -> None:
    net = souffle.compile(model(), level="V4", **options)
    text = net.explain()
    for kernel in net.kernels:
        assert kernel.name in text
    for stage in ("horizontal", "vertical", "schedule"):
        assert f"\n{stage}: " in text
    for _, subject, accepted, reason in net.plan.decisions:
        assert reason and subject and isinstance(accepted, bool)
    shown = [line for line in text.splitlines() if re.match(r"  [+-] ", line)]
    counts = [re.match(r"  [+-] (?:(\d+) x )?", line)[1] for line in shown]
    assert sum(int(count or 1) for count in counts) == len(net.plan.decisions)


def test_options_are_kept_in_the_plan() -> None:
    plan = souffle.compile(model(), level="V3", precision="mixed", partition="persistent", **CUDA).plan
    how = plan.options
    assert (how.level, how.precision, how.partition, how.arch) == ("V3", "mixed", "persistent", "sm_90")
    assert souffle.compile(model(), level="V2", target="cpu", precision="mixed").plan.options.precision == "mixed"


def test_what_keeps_tensors_on_chip_can_be_left_out(tmp_path: Path) -> None:
    net = souffle.compile(model(), disable=["reuse", "attention", "reuse"], **CUDA)
    assert net.plan.options.disable == ("attention", "reuse") and agrees(net(inputs()))
    assert "level V4 without attention, reuse, fp32" in net.explain()
    net.save(tmp_path / "net.souffle")
    assert souffle.load(tmp_path / "net.souffle", device="cpu").plan.options.disable == net.plan.options.disable
    # Tiles that own channels leave nothing for rows to join.
    tried = {decision.stage for decision in souffle.compile(model(), disable=["channels"], **CUDA).plan.decisions}
    assert "reuse" in tried and "reuse" not in {decision.stage for decision in net.plan.decisions}


def test_levels_say_what_is_on_chip() -> None:
    assert Options().on_chip == set(ON_CHIP) and Options(disable=ON_CHIP[:1]).on_chip == set(ON_CHIP[1:])
    assert all(not Options(level=level).on_chip for level in ("V0", "V1", "V2", "V3"))


@pytest.mark.parametrize("wrong", ["attention", ["barriers"], ("reuse", "")])
def test_what_cannot_be_left_out(wrong: object) -> None:
    with pytest.raises(OptionError, match=r"is not valid; give a list of names among attention, normalization, inter"):
        souffle.compile(model(), disable=wrong, **CUDA)


TRANSFORMED = ("frontend", "precision", "horizontal", "vertical", "narrow")


@pytest.mark.parametrize(
    ("options", "stages"),
    [
        (
            CUDA,
            [*TRANSFORMED, "two_phase", "roll", "analysis", "schedule", "lower", "partition", "merge", "text"],
        ),
        ({"target": "cpu"}, ["frontend", "gathered", *TRANSFORMED[1:], "analysis", "schedule"]),
    ],
    ids=["cuda", "cpu"],
)
def test_the_hook_sees_every_stage_in_order(options: dict, stages: list[str]) -> None:
    seen: dict[str, object] = {}

    def hook(stage: str, result: object) -> object:
        seen[stage] = result
        return result

    souffle.compile(model(), level="V3", hook=hook, **options)
    assert list(seen) == stages
    assert isinstance(seen["vertical"], TEProgram)
    assert len(seen["vertical"].tes) < len(seen["frontend"].tes)


def test_what_the_hook_gives_replaces_the_result() -> None:
    b = Builder()
    doubled = b.program(b.scaled(b.input(2, 3), 2.0))
    b = Builder()
    tripled = b.program(b.scaled(b.input(2, 3), 3.0))
    net = souffle.compile(doubled, hook=lambda stage, result: tripled if stage == "vertical" else result, **CUDA)
    x = np.ones((2, 3), np.float32)
    np.testing.assert_array_equal(net(x)["out0"], 3 * x)


def test_progress_is_told() -> None:
    told: list[str] = []
    souffle.compile(model(), progress=told.append, **CUDA)
    assert told[0] == "importing" and len(told) >= 4 and all(told)


def test_a_program_is_printed_and_run() -> None:
    program = souffle.import_onnx(model())
    text = str(program)
    for te_ in program.tes:
        assert te_.name in text
    assert all(name in text for name in (*program.input_names, *program.output_names))
    assert agrees(program.run(inputs()))


def test_a_program_is_analysed_and_transformed() -> None:
    program = souffle.import_onnx(model())
    analysis = souffle.analyze(program)
    assert analysis.program is program and f"{len(program.tes)} TEs" in analysis.summary()
    merged, decisions = souffle.transform.horizontal(program)
    composed, _ = souffle.transform.vertical(merged)
    assert decisions and len(composed.tes) < len(merged.tes) < len(program.tes)
    assert agrees(composed.run(inputs()))


def test_a_program_built_by_hand() -> None:
    b = Builder()
    program = b.program(b.relu(b.input(3, 5)))
    given = inputs_for(program)
    for options in (CUDA, {"target": "cpu"}):
        found = souffle.compile(program, **options)(given)["out0"]
        np.testing.assert_array_equal(found, np.maximum(given["in0"], 0))


def test_a_symbolic_batch_is_fixed_by_an_argument() -> None:
    x = onnx.helper.make_tensor_value_info("x", 1, ["N", 4])
    y = onnx.helper.make_tensor_value_info("y", 1, ["N", 4])
    node = onnx.helper.make_node("Relu", ["x"], ["y"], name="relu")
    open_batch = onnx.helper.make_model(
        onnx.helper.make_graph([node], "g", [x], [y]), opset_imports=[onnx.helper.make_opsetid("", 17)]
    )
    net = souffle.compile(open_batch, batch=3, target="cpu")
    assert net.signature.inputs[0].shape == (3, 4)


@pytest.mark.parametrize(
    ("value", "expected"), [("off", None), ("/some/where", Path("/some/where")), ("", Path.home() / ".cache/souffle")]
)
def test_where_compiled_kernels_are_kept(value: str, expected: Path | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOUFFLE_CACHE", value)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_root() == expected


def test_without_a_cuda_compiler_text_is_still_to_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("souffle.codegen.nvcc.find_nvcc", lambda: None)
    with pytest.raises(CompilerNotFoundError, match="cubin=False"):
        souffle.compile(model(), target="cuda", arch="sm_90")
    assert agrees(souffle.compile(model(), **CUDA)(inputs()))


def test_an_output_that_is_a_scalar_constant_on_the_host() -> None:
    x = onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [3])
    y = onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, [3])
    c = onnx.helper.make_tensor_value_info("c", onnx.TensorProto.FLOAT, [])
    value = onnx.numpy_helper.from_array(np.float32(2.5), "value")
    nodes = [onnx.helper.make_node("Neg", ["x"], ["y"]), onnx.helper.make_node("Constant", [], ["c"], value=value)]
    model = onnx.helper.make_model(
        onnx.helper.make_graph(nodes, "g", [x], [y, c]), opset_imports=[onnx.helper.make_opsetid("", 17)]
    )
    outputs = souffle.compile(model, target="cpu")({"x": np.ones(3, np.float32)})
    assert outputs["c"].shape == () and outputs["c"] == np.float32(2.5)
