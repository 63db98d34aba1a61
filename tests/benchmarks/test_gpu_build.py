"""What the script for a GPU host builds of a model, with a compiler that is played."""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import gpu_host
from souffle.codegen.plan import Buffer
from souffle.errors import OptionError
from souffle.runtime import Network
from tests.runtime.plans import cooperative_plan


def test_the_host_script_builds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("onnx", "onnxruntime", "tvm"):
        pytest.importorskip(name)
    front, process = (importlib.import_module(f"benchmarks.{name}") for name in ("gpu_build", "gpu_build_network"))
    compiled = []

    def compile_model(model: Any, **options: Any) -> Network:
        compiled.append(options)
        big = np.full(100_000, len(compiled), np.float32)
        plan = cooperative_plan()
        plan = replace(plan, buffers=(*plan.buffers, Buffer("big", big.shape, "float32", "constant", "big")))
        # Each has a text of its own.
        modules = tuple(replace(module, text=f"{module.text}\n// {len(compiled)}\n") for module in plan.modules)
        return Network(replace(plan, modules=modules, constants={**plan.constants, "big": big}))

    started = subprocess.run

    def run(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        if command[1] != "-m":
            return started(command, **options)
        with contextlib.redirect_stdout(io.StringIO()) as output:
            status = process.main(command[3:])
        return subprocess.CompletedProcess(command, status, output.getvalue(), "")

    build = process.gpu_networks.build_network
    monkeypatch.setattr(process.gpu_networks, "build_network", lambda name, size, steps: build(name, "tiny", steps))
    monkeypatch.setattr(process.souffle, "compile", compile_model, raising=False)
    monkeypatch.setattr(front.subprocess, "run", run)
    for kernels in (front.grid_barriers, front.shared_memory):
        monkeypatch.setattr(kernels, "compile_kernels", lambda folder, arch: [])
    # Played processes are threads of this one, in which no two models can be imported at a time.
    command = ["build", "--out", str(tmp_path), "--models", "lstm", "--levels", "V3", "V4", "--variants", "waits=flags"]
    command += ["--steps", "lstm=2", "--jobs", "1", "--precision", "fp32"]
    for _ in range(2):
        assert gpu_host.main([*command, "--check-paper", "V4", "--max-mib", "0.2"]) == 0
    assert len(compiled) == 6
    usual = {"target": "cuda", "arch": "sm_90", "cubin": True, "precision": "fp32", "fusion": "souffle", "disable": []}
    assert compiled[0] == {**usual, "level": "V3"} and compiled[2] == {**usual, "level": "V4", "waits": "flags"}
    index = json.loads((tmp_path / "index.json").read_text())
    assert sorted(index["cases"]) == [
        f"lstm-paper-fp32-2steps-{name}-synthetic" for name in ("V3", "V4", "V4.waits.flags")
    ]
    case = index["cases"]["lstm-paper-fp32-2steps-V4.waits.flags-synthetic"]
    assert (case["level"], case["label"], case["options"]["waits"]) == ("V4", "V4, waits=flags", "flags")
    assert "lstm-paper-fp32-2steps-V4" in index["too_large"] and "lstm-tiny-fp32-V3" in index["too_large"]
    with np.load(tmp_path / "lstm-tiny.npz") as values:
        assert {key.partition("/")[0] for key in values.files} == {"input", "output"}
    # In mixed precision, where there are products of matrices; a variant that cannot be compiled takes none with it.
    compiled.clear()

    def fails_for_learned(model: Any, **options: Any) -> Network:
        if options["fusion"] == "learned":
            raise OptionError("PyTorch is not here")
        return compile_model(model, **options)

    monkeypatch.setattr(process.souffle, "compile", fails_for_learned)
    mixed = ["build", "--out", str(tmp_path), "--models", "bert", "--sizes", "tiny", "--jobs", "1", "--levels", "V4"]
    assert gpu_host.main([*mixed, "--precision", "mixed", "--variants", "fusion=learned", "disable=teams"]) == 0
    assert [one["precision"] for one in compiled] == ["mixed", "mixed"] and compiled[1]["disable"] == ["teams"]
    index = json.loads((tmp_path / "index.json").read_text())
    assert {name for name in index["cases"] if name.startswith("bert")} == {
        f"bert-tiny-mixed-{name}" for name in ("V4", "V4.disable.teams")
    }
    assert index["failed"] == {"bert-tiny-mixed-V4.fusion.learned": "OptionError: PyTorch is not here"}
    assert gpu_host.main([*mixed, "--variants", "fusion=none"]) == 2
    # What mixed precision changes nothing of is built where there is none of it in fp32, and left to that where it is.
    monkeypatch.setattr(process.souffle, "compile", compile_model)
    command = ["build", "--models", "lstm", "--sizes", "tiny", "--levels", "V4", "--jobs", "1", "--precision", "mixed"]
    for folder, found in (("alone", ["lstm-tiny-mixed-V4"]), ("beside", ["lstm-tiny-fp32-V4"])):
        out = ["--out", str(tmp_path / folder), "--max-mib", "16"]
        assert gpu_host.main([*command, *(["fp32"] if folder == "beside" else []), *out]) == 0
        index = json.loads((tmp_path / folder / "index.json").read_text())
        assert list(index["cases"]) == found
        assert {name: other["to"] for name, other in index["equal"].items()} == (
            {"lstm-tiny-mixed-V4": "fp32"} if folder == "beside" else {}
        )
