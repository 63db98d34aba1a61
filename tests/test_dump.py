"""What each step of the compiler prints, and the folder in which ``dump=`` keeps it."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from pathlib import Path

import onnx
import pytest
from tvm import tirx

import souffle
from souffle import models
from souffle.cli import main
from souffle.dump import Dump
from souffle.errors import CertificateError, ModelError, OptionError
from souffle.kernel.merged_program import MergedProgram
from souffle.partition import Partition
from souffle.pipeline import compile_cuda, stages_of
from souffle.program import TEProgram
from souffle.schedule.stage import Stages
from tests.kernel.test_merge import layers as products
from tests.kernel.test_waits import rowwise_chain
from tests.testlib import Builder
from tests.transform.test_roll import layers, weights

ARCH = "sm_90"
CUDA = {"target": "cuda", "arch": ARCH, "device": "cpu", "cubin": False, "tuning_log": None}
TRANSFORMED = ("frontend", "precision", "horizontal", "vertical", "narrow")
STEPS = (*TRANSFORMED, "two_phase", "roll", "analysis", "schedule", "lower", "partition", "merge")
PLAN = ("certificate.txt", "decisions.txt", "plan.json")

Seen = list[tuple[str, object]]

# Of its network, which other tests schedule, too.
pytestmark = pytest.mark.xdist_group("bert")


def steps_of(program: TEProgram, level: str = "V4", **options: object) -> dict[str, object]:
    """What the last of each step gave."""
    seen: dict[str, object] = {}
    compile_cuda(program, level=level, arch=ARCH, cubin=False, hook=recorder(seen.__setitem__), **options)
    return seen


def recorder(see: Callable[[str, object], None]) -> Callable[[str, object], object]:
    def hook(stage: str, result: object) -> object:
        see(stage, result)
        return result

    return hook


def numbered(steps: tuple[str, ...]) -> list[str]:
    return [f"{number:02}_{step}.txt" for number, step in enumerate(steps)]


@pytest.fixture(scope="module")
def rolled() -> dict[str, object]:
    """Layers that one loop runs."""
    return steps_of(layers(5))


@pytest.mark.parametrize(("step", "kind"), [("lower", Stages), ("partition", Partition), ("merge", MergedProgram)])
def test_what_a_loop_over_layers_prints(golden, rolled: dict[str, object], step: str, kind: type) -> None:
    assert type(rolled[step]) is kind
    golden(f"print_{step}.txt", f"{rolled[step]}\n")


def chain() -> TEProgram:
    """Products of several tiles, none like another, each of which reads all tiles of the one before."""
    b = Builder()
    x = b.input(4, 100)
    for inner, outer in ((100, 120), (120, 90), (90, 70)):
        x = b.matmul(x, b.constant(weights(inner, outer)))
    return b.program(x)


def test_what_a_kernel_with_barriers_and_prefetches_prints(golden) -> None:
    # With tiles that own their columns through all products it would be one stage.
    merged = steps_of(chain(), disable=("channels",))["merge"]
    text = str(merged)
    golden("print_merge_of_a_chain.txt", f"{text}\n")
    (kernel,), (reasons,), (launch,) = merged.kernels, merged.barriers, merged.launches
    assert text.count("| grid barrier before") == kernel.shape.grid_syncs == len(reasons) > 0
    assert all(f"bytes  {tensor.name}\n" in text for tensor in launch.tensors)
    assert all(barrier.reason in text for barrier in reasons)
    # What does not know the tensors has the same lines without the reasons.
    assert str(kernel).count("| grid barrier\n") == kernel.shape.grid_syncs


def test_a_kernel_that_is_launched_again_prints_its_tensors_only() -> None:
    merged = steps_of(products(3), "V2")["merge"]
    (kernel,) = merged.kernels
    text = str(merged)
    assert text.startswith(f"3 launches of 1 kernel\n\nlaunch 0, {kernel.name}: 1 stage, ")
    assert text.count(": as launch 0, given") == 2 and text.count("TensorIR of ") == 1
    assert all(tensor.name in text for launch in merged.launches for tensor in launch.tensors)


def test_texts_are_the_same_in_every_run(rolled: dict[str, object]) -> None:
    again = steps_of(layers(5))
    assert {step: str(result) for step, result in again.items()} == {step: str(rolled[step]) for step in rolled}
    assert not any(" at 0x" in str(result) for result in again.values())


def test_an_operator_that_is_no_te_prints_as_a_stage() -> None:
    b = Builder()
    program = b.program(b.relu(b.extern_sort(b.input(3, 5))))
    stages, _ = stages_of(program, level="V4", arch=ARCH, cubin=False)
    assert isinstance(stages, Stages) and "= extern(" in str(stages)
    assert [line for line in str(stages).splitlines() if line.startswith("stage ")] == [
        f"stage {s.name}" for s in stages
    ]


@pytest.fixture(scope="module")
def dumped(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, souffle.runtime.Network, Seen]:
    """Tiny BERT with what a hook saw of its steps."""
    folder, seen = tmp_path_factory.mktemp("dump") / "new" / "steps", []
    hook = recorder(lambda stage, result: seen.append((stage, result)))
    return folder, souffle.compile(models.build("bert"), dump=folder, hook=hook, **CUDA), seen


def test_a_dump_has_a_file_for_each_step(dumped: tuple) -> None:
    folder, _, seen = dumped
    expected = [*numbered(STEPS), "12_text_0.cu", *PLAN]
    assert sorted(path.name for path in folder.iterdir()) == expected
    assert [stage for stage, _ in seen] == [*STEPS, "text"]
    for path, (_, result) in zip(sorted(folder.iterdir()), seen, strict=False):
        assert path.read_text().rstrip("\n") == str(result).rstrip("\n"), path.name


def test_a_dump_ends_with_the_plan(dumped: tuple) -> None:
    folder, net, _ = dumped
    assert json.loads((folder / "plan.json").read_text())["kernels"][0]["name"] == net.kernels[0].name
    assert (folder / "certificate.txt").read_text() == f"{net.certificate}\n"
    assert (folder / "decisions.txt").read_text().splitlines() == [str(one) for one in net.plan.decisions]
    assert (folder / "12_text_0.cu").read_text() == net.plan.modules[0].text


def test_dumping_changes_nothing(tmp_path: Path) -> None:
    plan = souffle.compile(chain(), dump=tmp_path, **CUDA).plan
    again = souffle.compile(chain(), **CUDA).plan
    assert [module.text for module in plan.modules] == [module.text for module in again.modules]
    assert plan.decisions == again.decisions and not any(module.edited for module in plan.modules)


def test_each_module_has_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("souffle.codegen.assemble.os.cpu_count", lambda: 2)
    net = souffle.compile(layers(2), level="V0", dump=tmp_path, **CUDA)
    assert len(net.plan.modules) == 2
    assert sorted(path.name for path in tmp_path.glob("12_*")) == ["12_text_0.cu", "12_text_1.cu"]
    for number, module in enumerate(net.plan.modules):
        assert (tmp_path / f"12_text_{number}.cu").read_text() == module.text


def test_a_compilation_for_the_cpu_has_the_steps_that_it_takes(tmp_path: Path) -> None:
    net = souffle.compile(layers(2), target="cpu", dump=tmp_path)
    steps = ("frontend", "gathered", *TRANSFORMED[1:], "analysis", "schedule")
    expected = [*numbered(steps), "decisions.txt", "plan.json"]
    assert sorted(path.name for path in tmp_path.iterdir()) == expected
    assert all(stage.name in str(net.stages) for stage in net.stages) and len(net.stages) == len(net.kernels)


def test_a_dump_holds_what_the_compiler_goes_on_with(tmp_path: Path) -> None:
    b = Builder()
    other = b.program(b.scaled(b.input(2, 3), 3.0))
    net = souffle.compile(layers(2), dump=tmp_path, hook=lambda s, r: other if s == "vertical" else r, **CUDA)
    assert (tmp_path / "03_vertical.txt").read_text() == f"{other}\n"
    assert (tmp_path / "02_horizontal.txt").read_text() != f"{other}\n"
    assert net.plan.kernels[0].tes == tuple(te.name for te in other.tes)


def test_a_compilation_that_fails_leaves_the_steps_before(tmp_path: Path) -> None:
    def failing(stage: str, result: object) -> object:
        if stage == "partition":
            raise ModelError("not here")
        return result

    with pytest.raises(ModelError, match="not here"):
        souffle.compile(layers(2), dump=tmp_path, hook=failing, **CUDA)
    assert sorted(path.name for path in tmp_path.iterdir()) == numbered(STEPS[:10])


def test_a_refuted_network_leaves_its_text_and_its_certificate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nothing = tirx.Evaluate(tirx.IntImm("int32", 0))
    monkeypatch.setattr(importlib.import_module("souffle.kernel.merge"), "_block_barrier", lambda: nothing)
    with pytest.raises(CertificateError):
        souffle.compile(rowwise_chain(), dump=tmp_path, **CUDA)
    assert "REFUTED" in (tmp_path / "certificate.txt").read_text().splitlines()[0]
    assert (tmp_path / "12_text_0.cu").is_file() and not (tmp_path / "plan.json").exists()


def test_an_earlier_dump_is_replaced_and_other_files_are_kept(tmp_path: Path) -> None:
    own = ("00_notes.txt", "text_0.cu", "03_vertical.md", "net.souffle")
    for name in ("00_frontend.txt", "17_text_3.cu", "104_roll.txt", *PLAN, *own):
        (tmp_path / name).write_text("old")
    dump = Dump(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(own)
    hook = dump.around(lambda stage, result: result)
    for stage in ("roll", "partition", "roll", "partition", "merge", "text", "text"):
        assert hook(stage, stage) == stage
    files = ["00_roll.txt", "01_partition.txt", "02_roll.txt", "03_partition.txt", "04_merge.txt"]
    assert dump.files == [*files, "05_text_0.cu", "05_text_1.cu"]
    assert (tmp_path / "02_roll.txt").read_text() == "roll\n"


def test_a_folder_that_cannot_be_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OptionError, match=r"dump='.*file' is no folder"):
        souffle.compile(layers(2), dump=tmp_path / "file", **CUDA)


def test_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    model, steps = tmp_path / "relu.onnx", tmp_path / "steps"
    ends = [onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [3, 8]) for name in "xy"]
    graph = onnx.helper.make_graph([onnx.helper.make_node("Relu", ["x"], ["y"])], "relu", ends[:1], ends[1:])
    opset = [onnx.helper.make_opsetid("", 17)]
    onnx.save(onnx.helper.make_model(graph, opset_imports=opset, ir_version=9), model)
    arguments = ["compile", str(model), "--no-cubin", "--arch", ARCH, "--dump", str(steps), "--quiet"]
    assert main.main(arguments) == 0
    assert f"{steps}: what each stage of the compiler gave" in capsys.readouterr().out
    assert {*numbered(STEPS), *PLAN} <= {path.name for path in steps.iterdir()}
    assert main.main([*arguments, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["dump"] == str(steps)

    def fails(*_: object) -> None:
        raise ModelError("not this one")

    monkeypatch.setattr("souffle.pipeline.assemble", fails)
    assert main.main(arguments) == 2
    assert f"what was compiled before the error is in {steps}" in capsys.readouterr().err
    assert sorted(path.name for path in steps.iterdir()) == numbered(STEPS)


def test_a_network_prints_its_stages_from_its_plan(dumped: tuple, tmp_path: Path) -> None:
    net = dumped[1]
    net.save(tmp_path / "net.souffle")
    stages = souffle.load(tmp_path / "net.souffle", device="cpu").stages
    assert stages == net.stages and str(stages) == str(net.stages)
    assert {stage.name for stage in stages} == {name for kernel in net.kernels for name in kernel.stages}
    assert sum(stage.calls for stage in stages) == sum(len(kernel.stages) for kernel in net.kernels)
    lines = str(stages).splitlines()
    assert all(len(line) <= 120 for line in lines) and lines[0] == f"kernel {net.kernels[0].name}"
    first = stages[0]
    assert "input" in first.reads and first.writes and first.tiles and first.predicted
