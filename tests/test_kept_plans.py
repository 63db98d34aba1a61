"""A network that was compiled before: the same plan, unless what it is made of is another."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, external_data_helper, helper, numpy_helper

import souffle
from benchmarks import compiled_before
from souffle import cache, kept, pipeline
from souffle.cache import trim, write_entry
from souffle.certificate import PROVEN
from souffle.codegen.nvcc import find_nvcc
from souffle.codegen.plan import Plan
from souffle.decision import Refused
from souffle.loading import network_of
from souffle.options import Options
from souffle.partition import planner_for
from souffle.runtime import kept_plans
from souffle.schedule.cpu import host_target
from souffle.schedule.gpu import RULES, register_rule
from souffle.schedule.log_folders import RECORDS, WORKLOADS
from tests.thorough import some

needs_nvcc = pytest.mark.skipif(find_nvcc() is None, reason="no nvcc here")

_WIDTH = 160
"""So that a weight is a file of its own."""


def _model(*, rows: int | str = 7, change: int | None = None) -> onnx.ModelProto:
    rng = np.random.default_rng(0)
    weight = rng.standard_normal((_WIDTH, _WIDTH)).astype(np.float32)
    bias = rng.standard_normal(_WIDTH).astype(np.float32)
    if change is not None:
        weight.reshape(-1).view(np.uint32)[change] ^= 1
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["m"]),
        helper.make_node("Add", ["m", "b"], ["a"]),
        helper.make_node("Softmax", ["a"], ["y"]),
    ]
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, (rows, _WIDTH)) for name in "xy"]
    constants = [numpy_helper.from_array(weight, "w"), numpy_helper.from_array(bias, "b")]
    graph = helper.make_graph(nodes, "kept", ends[:1], ends[1:], constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(cache, "_warned", set())
    monkeypatch.setenv("SOUFFLE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("SOUFFLE_CACHE_GB", "1")
    return tmp_path / "cache" / "plans"


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was compiled, and not read."""
    seen: list[str] = []
    on_host, cuda = pipeline.assemble_host, pipeline.assemble

    def counted(program: Any, *arguments: Any) -> Plan:
        seen.append(program.name)
        return on_host(program, *arguments)

    def counted_cuda(merged: Any, request: Any, *arguments: Any) -> Any:
        seen.append(request.analysis.program.name)
        return cuda(merged, request, *arguments)

    monkeypatch.setattr(pipeline, "assemble_host", counted)
    monkeypatch.setattr(pipeline, "assemble", counted_cuda)
    return seen


def _plan(model: Any = None, **options: Any) -> Plan:
    return souffle.compile(_model() if model is None else model, target="cpu", **options).plan


_CUDA = {"target": "cuda", "arch": "sm_90", "device": "cpu", "cubin": False, "tuning_log": None}


def _cuda(model: Any = None, **options: Any) -> Plan:
    return souffle.compile(_model() if model is None else model, **{**_CUDA, **options}).plan


def _assert_equal(plan: Plan, other: Plan) -> None:
    for field in fields(Plan):
        if field.name != "constants":
            assert getattr(plan, field.name) == getattr(other, field.name), field.name
    assert list(plan.constants) == list(other.constants)
    for name, array in plan.constants.items():
        assert array.dtype == other.constants[name].dtype and array.tobytes() == other.constants[name].tobytes()


def test_the_second_compilation_reads_the_plan(folder: Path, compiled: list[str], tmp_path: Path) -> None:
    """Whether the model is given as a file, as its bytes or with its weights beside it."""
    options = {"level": "V3", "threads": 2, "disable": ["winograd"], "verify": "off", "reductions": "one_phase"}
    first = souffle.compile(_model(), target="cpu", **options)
    x = np.random.default_rng(1).standard_normal((7, _WIDTH)).astype(np.float32)
    onnx.save(_model(), tmp_path / "one.onnx")
    outside = _model()
    external_data_helper.convert_model_to_external_data(outside, location="weights", size_threshold=0)
    onnx.save(outside, tmp_path / "two.onnx")
    for model in (_model(), _model().SerializeToString(), tmp_path / "one.onnx", tmp_path / "two.onnx"):
        second = souffle.compile(model, target="cpu", **options)
        _assert_equal(second.plan, first.plan)
        np.testing.assert_array_equal(second(x)["y"], first(x)["y"])
    assert compiled == ["kept"]
    assert {path.suffix for path in folder.iterdir()} == {".plan", ".bytes"}


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache in which the network is, for the processor and for CUDA."""
    made = tmp_path_factory.mktemp("before")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SOUFFLE_CACHE", str(made))
        patch.setenv("SOUFFLE_CACHE_GB", "1")
        _plan()
        _cuda()
    return made


def _other_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "package_digest", lambda: "another")
    kept._compiler.cache_clear()


def _other_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    other = type(host_target())({"kind": "llvm", "mcpu": "x86-64-v2"})
    monkeypatch.setattr(kept, "host_target", lambda threads, processor: other)


def _other_tvm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept.importlib.metadata, "version", lambda name: f"{name} of tomorrow")
    kept._compiler.cache_clear()


@pytest.mark.parametrize(
    "change",
    [
        lambda patch: _plan(_model(change=_WIDTH * _WIDTH - 1)),
        lambda patch: _plan(_model(rows=8)),
        lambda patch: _plan(_model(rows="n"), batch=9),
        lambda patch: _plan(threads=1),
        lambda patch: _plan(processor="x86-64-v2" if platform.machine() == "x86_64" else "generic"),
        lambda patch: _plan(level="V0"),
        lambda patch: _plan(precision="mixed"),
        lambda patch: _plan(disable=["integers"]),
        lambda patch: (_other_compiler(patch), _plan()),
        lambda patch: (_other_processor(patch), _plan()),
        lambda patch: (_other_tvm(patch), _plan()),
    ],
)
def test_whatever_is_another_is_compiled(
    change: Callable, before: Path, folder: Path, compiled: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(before, folder.parent)
    try:
        _plan()
        assert not compiled
        change(monkeypatch)
        assert len(compiled) == 1
        change(monkeypatch)
        assert len(compiled) == 1
    finally:
        kept._compiler.cache_clear()


@pytest.mark.parametrize("cubin", some([False], [pytest.param(True, marks=needs_nvcc)]))
def test_the_second_compilation_reads_kernels_and_what_proves_them(
    cubin: bool, folder: Path, compiled: list[str], tmp_path: Path
) -> None:
    options = {"cubin": cubin, "verify": "values", "disable": ["hfuse"], "watchdog_ms": 1e6}
    first = _cuda(**options)
    onnx.save(_model(), tmp_path / "one.onnx")
    second = _cuda(tmp_path / "one.onnx", **options)
    assert compiled == ["kept"] and bool(second.modules[0].cubin) == cubin
    _assert_equal(second, first)
    assert second.options == first.options and second.certificate.verdict == PROVEN
    networks = [network_of(plan, device="cpu") for plan in (first, second)]
    x = np.random.default_rng(1).standard_normal((7, _WIDTH)).astype(np.float32)
    np.testing.assert_array_equal(networks[1](x)["y"], networks[0](x)["y"])
    assert networks[1].explain() == networks[0].explain()
    for number, network in enumerate(networks):
        network.save(tmp_path / f"{number}.souffle")
    assert (tmp_path / "0.souffle").read_bytes() == (tmp_path / "1.souffle").read_bytes()


def _written(folder: Path, line: str) -> Path:
    """A folder of tuning logs that says something else."""
    (folder / "sm_90").mkdir(parents=True, exist_ok=True)
    for name in (WORKLOADS, RECORDS):
        with (folder / "sm_90" / name).open("a") as file:
            file.write(line if name == RECORDS else "")
    return folder


@pytest.mark.parametrize(
    "change",
    [
        lambda patch: _cuda(_model(change=7)),
        lambda patch: _cuda(level="V3"),
        lambda patch: _cuda(arch="sm_80"),
        lambda patch: _cuda(waits="barriers"),
        lambda patch: _cuda(partition="persistent"),
        lambda patch: _cuda(fusion="xla-rules"),
        lambda patch: _cuda(tuning_log="auto"),
        lambda patch: (patch.setattr(kept, "compiler_version", lambda nvcc: "release 99"), _cuda()),
        lambda patch: (patch.setattr(kept, "find_nvcc", lambda: None), _cuda()),
        lambda patch: (patch.setattr(kept.os, "cpu_count", lambda: 61), _cuda()),
    ],
)
def test_other_kernels_are_compiled(
    change: Callable, before: Path, folder: Path, compiled: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(before, folder.parent)
    _cuda()
    assert not compiled
    change(monkeypatch)
    assert len(compiled) == 1
    change(monkeypatch)
    assert len(compiled) == 1


def test_a_log_of_another_content_is_another_log(folder: Path, compiled: list[str], tmp_path: Path) -> None:
    """Whether it is longer, of another architecture, or elsewhere."""
    logs = _written(tmp_path / "logs", "")
    _cuda(tuning_log=logs)
    _cuda(tuning_log=logs)
    assert len(compiled) == 1
    _written(logs, "\n")
    _cuda(tuning_log=logs)
    assert len(compiled) == 2
    (logs / "sm_80").mkdir()
    (logs / "sm_80" / RECORDS).write_text("")
    (logs / "README.md").write_text("What is here")
    _cuda(tuning_log=logs)
    assert len(compiled) == 2
    _cuda(tuning_log=_written(tmp_path / "others", "\n"))
    assert len(compiled) == 3


class _Whole(type(planner_for("souffle"))):
    """A planner of this module."""


own_planner = _Whole()


def test_what_others_have_written_is_asked_each_time(folder: Path, compiled: list[str]) -> None:
    """Their files are not known, nor whether they say the same again."""
    for count in (1, 2):
        _cuda(partition=f"{__name__}:own_planner")
        assert len(compiled) == count
    first = next(iter(RULES))
    register_rule(replace(RULES["elementwise"], name="own", apply=lambda form, request: Refused("never")), before=first)
    try:
        for count in (3, 4):
            _cuda()
            assert len(compiled) == count
        _plan()
        _plan()
        assert len(compiled) == 5, "no rule is asked for the processor"
    finally:
        del RULES["own"]
    assert not folder.exists() or len(list(folder.glob("*.plan"))) == 1


@pytest.mark.parametrize("options", some([_CUDA], [{"target": "cpu"}]), ids=some(["cuda"], ["cpu"]))
def test_what_was_compiled_in_the_background_is_there_at_once(
    options: dict[str, Any], folder: Path, compiled: list[str]
) -> None:
    first = souffle.compile(_model(), background=True, **options)
    assert first.wait(120) and len(compiled) == 1, "V0, meanwhile"
    second = souffle.compile(_model(), background=True, **options)
    assert second.ready and second.network.plan.options.level == "V4"
    third = souffle.compile(_model(), **options)
    assert len(compiled) == 1
    for plan in (second.plan, third.plan):
        _assert_equal(plan, replace(first.plan, options=plan.options))
    x = np.random.default_rng(1).standard_normal((7, _WIDTH)).astype(np.float32)
    np.testing.assert_array_equal(second(x)["y"], first(x)["y"])


def test_a_background_that_is_looked_into_compiles(folder: Path, compiled: list[str], tmp_path: Path) -> None:
    _plan()
    network = souffle.compile(_model(), target="cpu", background=True, dump=tmp_path / "dump")
    assert network.wait(120) and len(compiled) == 2 and any((tmp_path / "dump").iterdir())


def test_the_benchmark_tells_networks_apart(folder: Path, compiled: list[str], tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    onnx.save(_model(), path)
    first, second = (compiled_before.compiled(path, "cpu", "V4", "fp32") for _ in range(2))
    assert len(compiled) == 1 and first["digest"] == second["digest"]
    onnx.save(_model(change=3), path)
    assert compiled_before.compiled(path, "cpu", "V4", "fp32")["digest"] != first["digest"]


def test_a_policy_of_another_content_is_another(folder: Path, compiled: list[str], tmp_path: Path) -> None:
    shipped = next((Path(souffle.__file__).parent / "learning" / "policies").glob("*.safetensors"))
    options = Options(fusion="learned", policy=tmp_path / "policy", cache_dir=folder.parent)
    found = []
    for content in (shipped.read_bytes(), shipped.read_bytes()[:-1], shipped.read_bytes()):
        (tmp_path / "policy").write_bytes(content)
        found.append(kept._cuda(options))
    assert found[0] == found[2] != found[1]


def test_weights_in_another_file_are_another_model(folder: Path, compiled: list[str], tmp_path: Path) -> None:
    for change in (None, 5):
        outside = _model(change=change)
        external_data_helper.convert_model_to_external_data(outside, location="weights", size_threshold=0)
        (tmp_path / "weights").unlink(missing_ok=True)
        onnx.save(outside, tmp_path / "model.onnx")
        _plan(tmp_path / "model.onnx")
    assert len(compiled) == 2


@pytest.mark.parametrize("of", [".plan", ".bytes"])
def test_a_file_that_is_not_whole_is_made_again(of: str, folder: Path, compiled: list[str]) -> None:
    first = _plan()
    paths = [path for path in folder.iterdir() if path.suffix == of]
    assert paths
    count = 1
    for path in paths:
        whole = path.read_bytes()
        middle = len(whole) // 2
        flipped = whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :]
        for broken in some((whole[:middle], whole + b"x", flipped, None), (b"", whole[:-1])):
            path.unlink() if broken is None else path.write_bytes(broken)
            _assert_equal(_plan(), first)
            count += 1
            assert len(compiled) == count and path.read_bytes() == whole
            _assert_equal(_plan(), first)
            assert len(compiled) == count


def test_what_is_no_plan_is_made_again(folder: Path, compiled: list[str], caplog: pytest.LogCaptureFixture) -> None:
    """Files that are whole and say what nobody wrote, such as those of a compiler that changed by hand."""
    first = _plan()
    (path,) = folder.glob("*.plan")
    elsewhere = folder.parent.parent / "x.bytes"
    elsewhere.write_text("of somebody else")
    content = json.loads(cache.read_entry(path))
    for count, broken in enumerate(
        (
            [],
            {},
            content | {"constants": {}},
            content | {"codes": [5]},
            content | {"texts": []},
            content | {"tensor_ir": "AAA"},
            content | {"plan": content["plan"] | {"workspace_bytes": -1}},
            content | {"constants": dict.fromkeys(content["constants"], "../../x")},
            content | {"constants": {name: ["AAAA"] for name in content["constants"]}},
        )
    ):
        assert write_entry(path, json.dumps(broken).encode())
        _assert_equal(_plan(), first)
        assert len(compiled) == count + 2
    assert str(path) in caplog.text and elsewhere.exists()


def test_a_folder_that_cannot_be_written_costs_a_warning(
    compiled: list[str], folder: Path, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    for _ in range(2):
        _plan(cache_dir=tmp_path / "file")
    assert len(compiled) == 2 and str(tmp_path / "file") in caplog.text
    assert len(caplog.records) == 2, "one for networks, and one for their functions"
    assert not folder.exists()


def test_a_full_disk_keeps_nothing(
    compiled: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither what would take most of its room, nor half of what it had none for."""
    with monkeypatch.context() as patch:
        patch.setattr(kept_plans.shutil, "disk_usage", lambda path: SimpleNamespace(free=150_000))
        _plan()
    assert not folder.exists() and compiled == ["kept"]
    whole = cache.tempfile.mkstemp

    def full(*, dir: Path, **names: str) -> tuple[int, str]:
        if dir != folder:
            return whole(dir=dir, **names)
        return os.open("/dev/full", os.O_WRONLY), str(dir / "never")

    monkeypatch.setattr(cache.tempfile, "mkstemp", full)
    _plan()
    assert not list(folder.iterdir())
    assert caplog.records[-1].levelname == "WARNING" and str(folder) in caplog.text


@pytest.mark.parametrize(("name", "value"), [("SOUFFLE_CACHE", "off"), ("SOUFFLE_CACHE_GB", "0")])
def test_it_can_be_switched_off(
    name: str, value: str, folder: Path, compiled: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    _plan()
    monkeypatch.setenv(name, value)
    _plan()
    _plan()
    assert len(compiled) == 3


def test_who_looks_into_a_compilation_has_one(folder: Path, compiled: list[str], tmp_path: Path) -> None:
    _plan()
    seen: list[str] = []

    def hook(stage: str, result: object) -> object:
        seen.append(stage)
        return result

    _plan(hook=hook)
    _plan(dump=tmp_path / "dump")
    assert "schedule" in seen and any((tmp_path / "dump").iterdir()) and len(compiled) == 3


def test_versions_are_kept_with_their_weights_once(folder: Path, compiled: list[str]) -> None:
    model, dims = _model(rows="n"), {"n": [7, 11]}
    networks = [souffle.compile(model, target="cpu", dims=dims) for _ in range(2)]
    assert len(compiled) == 2 and len(list(folder.glob("*.plan"))) == 2
    weights = {array.tobytes() for v in networks[0].versions.values() for array in v.plan.constants.values()}
    assert len(list(folder.glob("*.bytes"))) == sum(len(weight) >= 64 << 10 for weight in weights)
    for rows in dims["n"]:
        x = np.random.default_rng(rows).standard_normal((rows, _WIDTH)).astype(np.float32)
        np.testing.assert_array_equal(networks[1](x)["y"], networks[0](x)["y"])


def test_what_was_used_longest_ago_makes_room(
    folder: Path, compiled: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two of these models have room; reading is using."""
    _plan(_model(change=0))
    size = sum(path.stat().st_size for path in folder.iterdir())
    monkeypatch.setenv("SOUFFLE_CACHE_GB", str(2.5 * size / 1e9))
    for number in range(3):
        for path in folder.iterdir():  # as if it were a day later
            os.utime(path, (path.stat().st_atime - 86400, path.stat().st_mtime - 86400))
        _plan(_model(change=number))
        if number:
            _plan(_model(change=0))
    assert len(compiled) == 3
    _plan(_model(change=1))
    assert len(compiled) == 4, "it made room for the third"
    monkeypatch.setenv("SOUFFLE_CACHE_GB", str(size / 4 / 1e9))
    _plan(_model(change=9))
    _plan(_model(change=9))
    assert len(compiled) == 6, "it is larger than all that is kept"


def test_trimming_a_folder_that_is_not_there(tmp_path: Path) -> None:
    trim(tmp_path / "nowhere", 0)
    (tmp_path / "folder").mkdir()
    (tmp_path / "a").write_bytes(bytes(10))
    trim(tmp_path, 10)
    assert (tmp_path / "a").exists()
    trim(tmp_path, 9)
    assert not (tmp_path / "a").exists() and (tmp_path / "folder").is_dir()


_PROCESS = """
import sys, numpy as np, souffle
network = souffle.compile(sys.argv[1], target="cpu")
x = np.linspace(-1, 1, 7 * 160, dtype=np.float32).reshape(7, 160)
print(network(x)["y"].tobytes().hex())
"""


def test_processes_compile_one_network_into_one_folder(folder: Path, compiled: list[str], tmp_path: Path) -> None:
    onnx.save(_model(), tmp_path / "model.onnx")
    network = souffle.compile(_model(), target="cpu", cache_dir=tmp_path / "apart")
    x = np.linspace(-1, 1, 7 * _WIDTH, dtype=np.float32).reshape(7, _WIDTH)
    command = [sys.executable, "-c", _PROCESS, str(tmp_path / "model.onnx")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) for _ in range(2)]
    said = {process.communicate(timeout=300)[0].strip() for process in running}
    assert said == {network(x)["y"].tobytes().hex()}
    assert len(compiled) == 1
    plan = _plan()
    _assert_equal(replace(plan, options=network.plan.options), network.plan)
    assert len(compiled) == 1, "any of the processes has kept it"
    assert not list(folder.glob("*.part")) and len(list(folder.glob("*.plan"))) == 1
