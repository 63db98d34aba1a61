"""Two checkouts side by side: what is found, what is kept, and what is not."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from benchmarks import compare_texts_work
from benchmarks.compare_texts import first_difference, main

ROOT = Path(__file__).resolve().parents[2]
SMALL = ["--models", "small", "--sizes", "tiny", "--levels", "V0", "V4", "--precisions", "fp32", "--archs", "sm_90"]

# What stands for the compiler and its models: it compiles in no time, and writes down that it did.
COMPILER = """
import os
from types import SimpleNamespace as Made

TEXT = "void stage(int tile) {{ {variable} = tile * {constant}; }}\\nvoid kernel(int tile) {{ stage(tile); }}"
TIMES = {{"V0": {seconds}, "V4": 1e-6}}


class SouffleError(Exception):
    pass


def import_onnx(path):
    return open(path, "rb").read()


def compile(program, level, arch, precision, partition, **how):
    assert how == {{"target": "cuda", "device": "cpu", "cubin": False, "verify": "off"}}
    print("what the compiler prints is no result")
    if level == "V1":
        raise SouffleError("there is no such level")
    if level == "V2":
        os._exit(3)
    with open(os.environ["COMPILED"], "a") as file:
        file.write(level + "\\n")
    kernel = Made(name="kernel", module=0, tiles=4, threads=32, dynamic_shared_bytes={shared}, grid_syncs=0)
    kernel.predicted = Made(seconds=TIMES[level])
    launch = Made(kernel=0, buffers=(0,))
    buffer = Made(name="x", kind="input", dtype="float32", shape=(4,), offset=0, label="x")
    plan = Made(workspace_bytes=0, grid_barrier="cooperative", kernels=(kernel,), launches=(launch,), buffers=(buffer,))
    plan.modules, plan.constants = (Made(text=TEXT),), {{}}
    return Made(plan=plan)
"""
MODELS = """
from onnx import TensorProto, helper


def build(name, size):
    value = helper.make_tensor_value_info("x", TensorProto.FLOAT, [4])
    return helper.make_model(helper.make_graph([], name + size, [value], []))
"""
PLAIN = {"variable": "int place", "constant": "32", "shared": "0", "seconds": "2e-6"}


def git(folder: Path, *command: str) -> str:
    who = ("-c", "user.name=test", "-c", "user.email=test@localhost", "-c", "init.defaultBranch=main")
    done = subprocess.run(["git", *who, *command], cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def write(folder: Path, models: str = "models", **changes: str) -> None:
    for old in ("models", "souffle/models"):
        shutil.rmtree(folder / old, ignore_errors=True)
    for package, text in (("souffle", COMPILER.format(**{**PLAIN, **changes})), (models, MODELS)):
        (folder / package).mkdir(parents=True, exist_ok=True)
        (folder / package / "__init__.py").write_text(text)


def commit(folder: Path, models: str = "models", **changes: str) -> str:
    write(folder, models, **changes)
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "--allow-empty", "--message", "state")
    return git(folder, "rev-parse", "HEAD")


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "repository"
    folder.mkdir()
    git(folder, "init", "--quiet")
    (folder / ".gitignore").write_text("__pycache__\n")
    monkeypatch.setattr(compare_texts_work, "REPOSITORY", folder)
    monkeypatch.setenv("COMPILED", str(tmp_path / "compiled"))
    return folder


def compiled(repository: Path) -> int:
    """How many configurations were compiled since it was last asked."""
    file = repository.parent / "compiled"
    count = len(file.read_text().splitlines()) if file.exists() else 0
    file.unlink(missing_ok=True)
    return count


def test_revisions_are_compiled_once_and_compared(
    repository: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    first = commit(repository)
    moved = commit(repository, "souffle/models", variable="int other")
    other = commit(repository, constant="33")
    out = tmp_path / "kept.jsonl"
    assert main([first, moved, *SMALL, "--out", str(out)]) == 0
    assert "2 configurations: 2 renamed" in capsys.readouterr().out
    assert compiled(repository) == 4
    # The first is there already, and so is half a line of a call that was cut short.
    with out.open("a") as file:
        file.write('{"commit": "')
    assert main([first, other, *SMALL, "--out", str(out), "--jobs", "2"]) == 1
    assert compiled(repository) == 2
    said = capsys.readouterr().out
    assert "2 configurations: 2 differs" in said
    assert "-void stage(int tile) { int place = tile * 32; }" in said
    assert "+void stage(int tile) { int place = tile * 33; }" in said
    assert "V0: differs: function stage differs; predicted 2.00 us before, 2.00 us after" in said
    assert said.count("* 33") == 1, "equal differences are shown once"
    assert [json.loads(line)["commit"] for line in out.read_text().splitlines()] == [
        commit for commit in (first, moved, other) for _ in range(2)
    ]
    assert git(repository, "worktree", "list").count("\n") == 0


def test_one_commit_twice_is_two_runs(repository: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    commit(repository)
    out = tmp_path / "kept.jsonl"
    assert main(["HEAD", *SMALL, "--out", str(out)]) == 0
    assert "2 of 2 configurations compiled" in capsys.readouterr().out
    assert compiled(repository) == 2
    assert main(["HEAD", "main", *SMALL, "--out", str(out)]) == 0
    assert "2 configurations: 2 equal" in capsys.readouterr().out
    assert compiled(repository) == 2
    assert len(out.read_text().splitlines()) == 2


def test_changes_that_are_not_committed_are_seen_and_never_kept(
    repository: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    commit(repository)
    write(repository, shared="64", seconds="3e-6")
    out = tmp_path / "kept.jsonl"
    for kept in (2, 0):
        assert main(["HEAD", str(repository), *SMALL, "--out", str(out)]) == 1
        assert compiled(repository) == kept + 2
        assert "V0: differs: plan.kernels[0][3] is 0 before, 64 after; predicted 2.00" in capsys.readouterr().out
    assert len(out.read_text().splitlines()) == 2
    # A copy within another repository is none of its commits.
    git(repository, "checkout", "--quiet", ".")
    (repository / ".gitignore").write_text("__pycache__\ncopy\n")
    commit(repository)
    write(repository / "copy")
    assert main(["HEAD", str(repository / "copy"), *SMALL, "--out", str(out)]) == 0
    assert len(out.read_text().splitlines()) == 4


def test_a_forecast_alone_is_told(repository: Path, capsys: pytest.CaptureFixture) -> None:
    first = commit(repository)
    second = commit(repository, seconds="3e-6")
    assert main([first, second, *SMALL]) == 0
    said = capsys.readouterr().out
    assert "V0: equal, but predicted 2.00 us before, 3.00 us after" in said
    assert "V4: equal, but" not in said


def test_what_cannot_be_compiled_fails(repository: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    commit(repository)
    out = tmp_path / "kept.jsonl"
    levels = ["--levels", "V1", "V0", "V2", "V4"]
    assert main(["HEAD", "HEAD", *SMALL, *levels, "--out", str(out)]) == 1
    said = capsys.readouterr().out
    assert "V1: failed: before: SouffleError: there is no such level" in said
    assert "V2: failed: before: exit status 3: what the compiler prints is no result" in said
    assert "4 configurations: 3 failed, 1 equal" in said
    assert len(out.read_text().splitlines()) == 1
    # An installed compiler must not stand in for a part that a folder lacks.
    elsewhere = tmp_path / "elsewhere" / "errors.py"
    elsewhere.parent.mkdir()
    elsewhere.touch()
    write(tmp_path / "lacking")
    with (tmp_path / "lacking" / "souffle" / "__init__.py").open("a") as file:
        file.write(f"__path__.append({str(elsewhere.parent)!r})\nimport souffle.errors\n")
    assert main(["HEAD", str(tmp_path / "lacking"), *SMALL]) == 1
    said = capsys.readouterr().out
    assert f"souffle.errors comes from {elsewhere}, not from the checkout {tmp_path / 'lacking'}" in said


def test_the_first_difference_of_plans_is_named() -> None:
    plan = {"launches": [[0, 1], [0, 2]], "workspace_bytes": 256}
    assert first_difference(plan, json.loads(json.dumps(plan)), "plan") == ""
    other = {**plan, "launches": [[0, 1], [0, 3]]}
    assert first_difference(plan, other, "plan") == "plan.launches[1][1] is 2 before, 3 after"
    assert first_difference(plan, {**plan, "launches": [[0, 1]]}, "plan") == (
        "plan.launches has 2 entries before, 1 after"
    )
    assert first_difference(plan, {**plan, "more": 1}, "plan")


@pytest.mark.thorough("the others here play the compiler")
def test_one_constant_of_the_compiler(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    copy = tmp_path / "copy"
    for package in ("souffle", "models"):
        if (ROOT / package).is_dir():
            shutil.copytree(ROOT / package, copy / package)
    constant = "#if __CUDA_ARCH__ >= 800"
    (holder,) = (file for file in copy.rglob("*.py") if constant in file.read_text())
    holder.write_text(holder.read_text().replace(constant, "#if __CUDA_ARCH__ >= 900"))
    small = ["--models", "mmoe", "--sizes", "tiny", "--levels", "V4", "--precisions", "fp32", "--archs", "sm_90"]
    assert main([str(ROOT), str(copy), *small, "--jobs", "2"]) == 1
    said = capsys.readouterr().out
    assert "mmoe tiny fp32 sm_90 souffle V4: differs" in said
    assert "+#if __CUDA_ARCH__ >= 900" in said
