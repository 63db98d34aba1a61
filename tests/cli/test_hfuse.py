"""``souffle hfuse``: what it writes and prints, and its exit status."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from souffle.cli import hfuse, main
from souffle.codegen.nvcc import find_nvcc
from souffle.hfuse import Check, Difference
from tests.hfuse.pairs import HEAD, OTHER, OUT, launch_of

TEXT = f"""{HEAD}
  __shared__ int s[1024];
  s[threadIdx.x] = x[threadIdx.x % n];
  __syncthreads();
  {OUT}s[blockDim.x - 1 - threadIdx.x];
}}
"""


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with two kernels and their launches, which is the current one."""
    (tmp_path / "a.cu").write_text(TEXT)
    (tmp_path / "b.cu").write_text(OTHER)
    launch_of().write(tmp_path / "a.json")
    launch = launch_of(grid=(2, 1, 1)).to_json()
    launch["arguments"] = launch["arguments"][1:2]
    (tmp_path / "b.json").write_text(json.dumps(launch))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(capsys: pytest.CaptureFixture, words: str) -> tuple[int, str, str]:
    status = main.main(["hfuse", *words.split(), "--quiet"])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_a_file_a_table_and_a_check(files: Path, capsys: pytest.CaptureFixture) -> None:
    words = "a.cu b.cu:k --launch a.json b.json --split 128,64 --check 2 --checked -o fused.cu"
    status, out, err = run(capsys, words)
    assert (status, err) == (0, "")
    lines = out.splitlines()
    assert lines[0].split() == ["kernel", "threads", "barriers", "shared", "B", "registers", "spilled", "B", "resident"]
    assert [line.split()[:3] for line in lines[2:5]] == [
        ["k", "128", "1"],
        ["k", "64", "1"],
        ["hfused_k_k", "192", "2"],
    ]
    assert "check: the same bits as the kernels alone in 2 orders, 3 buffers each" in lines
    assert lines[-1] == "fused.cu: hfused_k_k, blocks of 192 threads"
    text = Path("fused.cu").read_text()
    assert "bar.sync 1, 128;" in text and "bar.sync 2, 64;" in text
    status, _, err = run(capsys, words)
    assert status == 2 and "fused.cu exists; give --force to overwrite it" in err
    assert run(capsys, f"{words} --force --space sequence")[0] == 0
    assert Path("fused.cu").read_text() != text


def test_the_text_goes_to_stdout(files: Path, capsys: pytest.CaptureFixture) -> None:
    status, out, _ = run(capsys, "a.cu b.cu --block 256")
    assert status == 0 and "__launch_bounds__(256) hfused_k_k(" in out
    assert all(line.startswith("// ") for line in out.partition("#endif")[2].splitlines() if line)


def test_json(files: Path, capsys: pytest.CaptureFixture) -> None:
    status, out, _ = run(capsys, "a.cu b.cu --launch a.json b.json --json --check 1 --space block")
    record = json.loads(out)
    assert status == 0 and record["check"]["ok"] and record["space"] == "block"
    assert record["launch"]["grid"] == [5, 1, 1] and record["launch"]["block"] == [512, 1, 1]
    assert [part["file"] for part in record["parts"]] == ["a.cu", "b.cu"] and "hfuse_1::k" in record["text"]


def test_a_mismatch_is_status_1(files: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    difference = Difference(1, "k", "y", 3, 7, "y: 3 of 4096 elements differ, the first at 7")
    monkeypatch.setattr(hfuse, "check", lambda *_, **__: Check(2, 3, (difference,)))
    status, out, _ = run(capsys, "a.cu b.cu --launch a.json b.json --check 2 -o fused.cu")
    assert status == 1 and "check: MISMATCH in 2 orders" in out
    assert "order 1: k: y: 3 of 4096 elements differ, the first at 7" in out


def test_registers(files: Path, capsys: pytest.CaptureFixture) -> None:
    if find_nvcc() is None:
        pytest.skip("no nvcc")
    out = run(capsys, "a.cu b.cu -o free.cu")[1]
    assert "... of at most 32 registers" in out
    assert run(capsys, "a.cu b.cu --registers bound -o bound.cu")[0] == 0
    assert "__launch_bounds__(1024, 2) " in Path("bound.cu").read_text()
    assert run(capsys, "a.cu b.cu --registers 24 -o number.cu")[0] == 0
    assert "__maxnreg__(24) " in Path("number.cu").read_text()


def test_without_nvcc(files: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hfuse, "find_nvcc", lambda: None)
    status, out, _ = run(capsys, "a.cu b.cu -o free.cu")
    assert status == 0 and "no nvcc is at hand: registers are not known" in out
    status, _, err = run(capsys, "a.cu b.cu --registers bound")
    assert status == 2 and "there is no nvcc here" in err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("a.cu", "a.cu: one kernel is nothing to fuse"),
        ("a.cu none.cu", "none.cu: the CUDA source cannot be read"),
        ("a.cu b", "'b' is not of the form FILE.cu or FILE.cu:KERNEL"),
        ("a.cu b.cu:other", "b.cu: no kernel 'other' with a body in the file; its kernels are: k"),
        ("a.cu b.cu --launch a.json", "1 launches were given for 2 kernels"),
        ("a.cu b.cu --launch a.json c.json", "c.json: the launch cannot be read"),
        ("a.cu b.cu --split 768", "--split '768': 2 numbers of threads are needed"),
        ("a.cu b.cu --split 768,half", "--split '768,half': 2 numbers of threads are needed"),
        ("a.cu b.cu --split 768,512", "768 + 512 threads are 1280"),
        ("a.cu b.cu --registers few", "--registers 'few' is neither none, bound nor a number"),
        ("a.cu b.cu --check 2", "a check runs the kernels and needs their launches"),
        ("a.cu b.cu --profile --space block", "--profile searches partitions of threads"),
        ("a.cu b.cu --arch sm_1", "the architecture 'sm_1' is not known"),
    ],
)
def test_errors_of_the_user(files: Path, capsys: pytest.CaptureFixture, words: str, message: str) -> None:
    status, _, err = run(capsys, words)
    assert status == 2 and err.startswith("souffle: FusionError: ") and message in err


def test_a_profile_needs_a_gpu(files: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("souffle.runtime.cuda._bindings", None)
    monkeypatch.setattr(hfuse, "find_nvcc", lambda: Path("nvcc"))
    status, _, err = run(capsys, "a.cu b.cu --launch a.json b.json --profile")
    assert status == 2 and err.startswith("souffle: NoGpuError: ")
