"""Which processor a network is compiled for, and machine code of another one."""

from __future__ import annotations

import platform
import re
import subprocess
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

import souffle
from souffle.cli.main import main
from souffle.errors import ArtifactError, OptionError
from souffle.schedule.cpu import host, missing_instructions

pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="names of x86-64's processors")


def _model() -> bytes:
    weights = numpy_helper.from_array(np.random.default_rng(0).standard_normal((40, 70)).astype(np.float32), "w")
    nodes = [helper.make_node("MatMul", ["x", "w"], ["a"]), helper.make_node("Softmax", ["a"], ["y"])]
    ends = [helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in (("x", (33, 40)), ("y", (33, 70)))]
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


def test_a_processor_that_llvm_does_not_know_is_refused_with_names_like_it() -> None:
    with pytest.raises(OptionError, match="'x86-64-v33' is none that LLVM knows on x86_64; such are x86-64-v3"):
        souffle.compile(_model(), target="cpu", processor="x86-64-v33")


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
