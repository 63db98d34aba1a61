"""``souffle doctor``: where all is there, where TVM is not, and where the compiler does not work."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.rehearsal_driver import RehearsalDriver
from souffle import doctor
from souffle.cli.main import main
from souffle.runtime.cuda import Cuda
from souffle.tvm_pair import TVM_PIN

_ROOT = Path(__file__).resolve().parents[1]
_BLOCKED = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"tvm", "tvm_ffi", "onnxruntime"}:
            raise ImportError(f"{name} is blocked")

sys.meta_path.insert(0, Blocker())
from souffle.cli.main import main
sys.exit(main(["doctor", *sys.argv[1:]]))
"""


def _works(target: str) -> tuple[bool, str]:
    return True, f"not tried for {target}"


def test_here_it_works(capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "entry").write_bytes(b"x" * 1_500_000)
    monkeypatch.setenv("SOUFFLE_CACHE", str(tmp_path))
    assert main(["doctor", "--json", "--quiet"]) == 0
    found = json.loads(capsys.readouterr().out)
    by_name = {one["name"]: one for one in found["findings"]}
    assert found["works"] and "its outputs are right" in found["trial"]
    assert TVM_PIN in by_name["TVM"]["found"] and by_name["onnx"]["there"]
    assert all(one["there"] for one in found["findings"] if one["needed"])
    assert all(bool(one["install"]) is not one["there"] for one in found["findings"])
    assert by_name["cache"]["found"].startswith(f"{tmp_path}: ")
    assert "sm_90 (" in by_name["tuning logs"]["found"]


def test_without_tvm_it_says_so_and_all_the_rest() -> None:
    done = [
        subprocess.run(
            [sys.executable, "-c", _BLOCKED, *more], cwd=_ROOT, capture_output=True, text=True, timeout=120, check=False
        )
        for more in (["--quiet"], ["--quiet", "--json"])
    ]
    assert [one.returncode for one in done] == [1, 1] and not done[0].stderr
    lines = done[0].stdout.splitlines()
    tvm = next(line for line in lines if line.startswith("TVM "))
    assert "MISSING" in tvm and "cannot be imported: tvm is blocked" in " ".join(lines)
    assert lines[-1] == "It does not work: nothing can be compiled without TVM"
    found = json.loads(done[1].stdout)
    by_name = {one["name"]: one for one in found["findings"]}
    assert not by_name["TVM"]["there"] and not by_name["ONNX Runtime"]["there"] and by_name["numpy"]["there"]
    assert by_name["ONNX Runtime"]["install"] == "pip install 'souffle-dl[check]'"


def test_another_pair_is_not_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "installed_pair", lambda: ("0.26.0", None))
    monkeypatch.setattr(doctor, "_trial", _works)
    found = doctor.examine()
    tvm = next(one for one in found.findings if one.name == "TVM")
    assert not tvm.there and "apache-tvm 0.26.0, apache-tvm-ffi not installed" in tvm.found and not found.works


def test_compilers_that_are_missing_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "find_nvcc", lambda: None)
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("SOUFFLE_CXX", raising=False)
    monkeypatch.setenv("SOUFFLE_CACHE", "off")
    monkeypatch.setattr(doctor, "_trial", _works)
    found = {one.name: one for one in doctor.examine().findings}
    assert not found["nvcc"].there and found["nvcc"].install == "pip install 'souffle-dl[cuda]'"
    assert not found["g++"].there and "SOUFFLE_CXX" in found["g++"].install
    assert (found["cache"].there, found["cache"].found) == (False, "off")


def test_a_gpu_is_the_default_target_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "Cuda", lambda: Cuda(0, RehearsalDriver({})))
    monkeypatch.setattr(doctor, "_trial", _works)
    found = doctor.examine()
    gpu = next(one for one in found.findings if one.name == "GPU")
    assert gpu.there and "driver for CUDA" in gpu.found
    assert (found.target, found.trial) == ("cuda", "not tried for cuda")


@pytest.mark.parametrize(
    ("script", "says"),
    [
        ("kill -SEGV $$", "ended the process with signal 11"),
        ("echo broken >&2; exit 1", "compiling a small network failed: broken"),
        ("exit 1", "compiling a small network failed: it said nothing"),
        ('echo \'{"ok": false, "said": "it is wrong"}\'; exit 1', "it is wrong"),
        ("echo '[1]'", "compiling a small network failed"),
    ],
)
def test_however_the_trial_ends_it_is_said(
    script: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\n{script}\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    assert main(["doctor", "--quiet"]) == 1
    assert says in capsys.readouterr().out.splitlines()[-1]
