"""Which processor a network is compiled for, and machine code of another one."""

from __future__ import annotations

import json
import pickle
import platform
import re
import subprocess
import zipfile
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import tvm
from onnx import TensorProto, helper, numpy_helper

import souffle
from souffle.cli.main import main
from souffle.errors import ArtifactError, OptionError
from souffle.schedule.cpu import host, missing_instructions

pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="names of x86-64's processors")


def _model(rows: int | str = 33) -> bytes:
    weights = numpy_helper.from_array(np.random.default_rng(0).standard_normal((40, 70)).astype(np.float32), "w")
    nodes = [helper.make_node("MatMul", ["x", "w"], ["a"]), helper.make_node("Softmax", ["a"], ["y"])]
    ends = [helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in (("x", (rows, 40)), ("y", (rows, 70)))]
    graph = helper.make_graph(nodes, "rows", ends[:1], ends[1:], [weights])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9).SerializeToString()


def _registers(code: bytes, folder: Path) -> set[str]:
    """The kinds of vector registers in a network's machine code."""
    (folder / "network.so").write_bytes(code)
    text = subprocess.run(["objdump", "-d", folder / "network.so"], capture_output=True, text=True, check=True).stdout
    return {name[:1] for name in re.findall(r"%([xyz])mm\d", text)}


def test_a_network_has_the_instructions_of_the_processor_that_was_asked_for(tmp_path: Path) -> None:
    x = np.random.default_rng(1).standard_normal((33, 40)).astype(np.float32)
    (expected,) = onnxruntime.InferenceSession(_model(), providers=["CPUExecutionProvider"]).run(None, {"x": x})
    found = {}
    for name in ("x86-64", "x86-64-v3", None):
        if name is not None and missing_instructions(name):
            continue
        network = souffle.compile(_model(), target="cpu", processor=name)
        assert name is None or network.plan.options.arch == f"llvm {name}"
        network.save(tmp_path / "rows.souffle", constants="stored")
        found[name] = souffle.load(tmp_path / "rows.souffle")(x)["y"]
        np.testing.assert_allclose(found[name], expected, rtol=1e-5)
        if name is not None:
            assert _registers(network.plan.modules[0].cubin, tmp_path) == ({"x"} if name == "x86-64" else {"x", "y"})
    assert len(found) > 1


def _playing(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """This machine plays another one."""
    monkeypatch.setattr(host.codegen, "llvm_get_system_cpu", lambda: name)
    missing_instructions.cache_clear()


_OF_MACHINES = {"haswell": "haswell", "znver3": "x86-64-v3", "nehalem": "x86-64-v2", "k8": "x86-64"}


@pytest.mark.parametrize(("dims", "machines"), [(None, _OF_MACHINES), ({"n": [3, 33]}, ("znver3", "k8"))])
def test_a_file_for_several_processors_has_code_for_each(
    dims: dict | None, machines: Iterable[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = np.random.default_rng(1).standard_normal((33, 40)).astype(np.float32)
    (expected,) = onnxruntime.InferenceSession(_model(), providers=["CPUExecutionProvider"]).run(None, {"x": x})
    model = _model() if dims is None else _model("n")
    of_machines = {machine: _OF_MACHINES[machine] for machine in machines}
    names = sorted(of_machines.values(), reverse=True)
    network = souffle.compile(model, target="cpu", processor=names, dims=dims)
    np.testing.assert_allclose(network(x)["y"], expected, rtol=1e-5)
    file = tmp_path / "rows.souffle"
    network.save(file)
    assert souffle.runtime.describe(file).arch.startswith("llvm ")
    assert set(souffle.runtime.describe(file).arch.removeprefix("llvm ").split(", ")) == set(names)
    try:
        for here, wanted in of_machines.items():
            _playing(monkeypatch, here)
            loaded = souffle.load(file)
            versions = [loaded] if dims is None else list(loaded.versions.values())
            for version in versions:
                assert (version.plan.options.arch, version.plan.others) == (f"llvm {wanted}", ())
            np.testing.assert_allclose(loaded(x)["y"], expected, rtol=1e-5)
            kinds = {"x", "y"} if wanted in ("haswell", "x86-64-v3") else {"x"}
            assert _registers(versions[0].plan.modules[0].cubin, tmp_path) == kinds
    finally:
        monkeypatch.undo()
        missing_instructions.cache_clear()


def test_a_network_for_several_processors_is_saved_whole_wherever_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ["x86-64-v3", "x86-64"]
    network = souffle.compile(_model(), target="cpu", processor=names)
    network.save(tmp_path / "first.souffle")
    (other,) = (each.options.arch.removeprefix("llvm ") for each in network.plan.others)
    assert f"saved with code for {other}, which takes its place" in network.explain()
    plan = souffle.runtime.artifact.load(tmp_path / "first.souffle")
    assert [each.options.arch for each in (plan, *plan.others)] == [f"llvm {name}" for name in names]
    try:
        _playing(monkeypatch, "nehalem")
        again = pickle.loads(pickle.dumps(network))
        assert again.plan.options.arch == "llvm x86-64"
        again.save(tmp_path / "second.souffle")
        assert souffle.load(tmp_path / "second.souffle").plan.options.arch == "llvm x86-64"
    finally:
        monkeypatch.undo()
        missing_instructions.cache_clear()
    assert souffle.load(tmp_path / "second.souffle").plan.options.arch == "llvm x86-64-v3"


@pytest.mark.parametrize("harm", ["processors", "processor", "stored"])
def test_a_file_whose_processors_are_not_described_is_refused(harm: str, tmp_path: Path) -> None:
    file = tmp_path / "rows.souffle"
    souffle.compile(_model(), target="cpu", processor=["x86-64", "x86-64-v2"]).save(file)
    with zipfile.ZipFile(file) as archive:
        members = {info.filename: archive.read(info) for info in archive.infolist()}
    manifest = json.loads(members["manifest.json"])
    if harm == "processors":
        manifest["processors"] = {}
    else:
        manifest["processors"][0][harm] = None
    members["manifest.json"] = json.dumps(manifest).encode()
    with zipfile.ZipFile(file, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    with pytest.raises(ArtifactError, match=r"no proper description of its processors|member .* is not"):
        souffle.load(file)


@pytest.mark.parametrize("given", [[], ["x86-64", 3]])
def test_processors_that_are_no_names_are_refused(given: list) -> None:
    with pytest.raises(OptionError, match=r"give a name, or a list of names such as \[\"x86-64-v3\""):
        souffle.compile(_model(), target="cpu", processor=given)


def test_several_processors_are_for_the_cpu() -> None:
    for options in ({"target": "cuda", "arch": "sm_90"}, {"target": "cpu", "background": True}):
        with pytest.raises(OptionError, match='give target="cpu" and background=False'):
            souffle.compile(_model(), processor=["x86-64", "x86-64-v3"], **options)


def test_a_processor_that_llvm_does_not_know_is_refused_with_names_like_it() -> None:
    with pytest.raises(OptionError, match="'x86-64-v33' is none that LLVM knows on x86_64; such are x86-64-v3"):
        souffle.compile(_model(), target="cpu", processor="x86-64-v33")
    with pytest.raises(OptionError, match="'x86-64-v33' is none that LLVM knows"):
        souffle.compile(b"no model", target="cpu", processor=["x86-64", "x86-64-v33"])


def test_machine_code_of_a_newer_processor_is_refused_where_it_would_end_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tmp_path / "rows.onnx"
    model.write_bytes(_model())
    file = tmp_path / "rows.souffle"
    assert main(["compile", str(model), "--target", "cpu", "--processor", "x86-64-v3", "-o", str(file)]) == 0
    # This machine plays one of 2010.
    monkeypatch.setattr(host.codegen, "llvm_get_system_cpu", lambda: "nehalem")
    missing_instructions.cache_clear()
    try:
        missing = missing_instructions("x86-64-v3")
        assert {"avx", "avx2", "fma", "f16c", "bmi2"} <= set(missing) and missing_instructions("x86-64-v2") == ()
        assert missing_instructions("no such processor") == ()
        with pytest.raises(ArtifactError, match=r"compiled for x86-64-v3 .* lacks .*avx2.*; compile the model on this"):
            souffle.load(file)(np.zeros((33, 40), np.float32))
    finally:
        monkeypatch.undo()
        missing_instructions.cache_clear()
    assert souffle.load(file)(np.zeros((33, 40), np.float32))["y"].shape == (33, 70)
    capsys.readouterr()


@pytest.mark.parametrize(
    ("processor", "bits", "registers"),
    [("x86-64-v2", 128, 16), ("haswell", 256, 16), ("x86-64-v3", 256, 16), ("znver3", 256, 16), ("x86-64-v4", 512, 32)],
)
def test_vectors_are_those_of_the_processor(processor, bits, registers):
    """TVM says 512 bits of each of them; totals of a tile that is too large for 16 registers spill in each step."""
    machine = host.machine_of(tvm.target.Target({"kind": "llvm", "mcpu": processor, "num-cores": 1}))
    assert (machine.vector_bits, machine.vector_registers) == (bits, registers)
