"""The script for a GPU host, with the real compiler: built, packed and rehearsed where no compiler can be imported."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import gpu_host, gpu_run, gpu_steps, grid_barriers, stage_clocks
from benchmarks.gpu_pack import tree_mib
from benchmarks.gpu_plan import PHASES, Step
from benchmarks.gpu_table import across_barriers
from benchmarks.weights import Pieces, read_weights, redrawn, write_graph, write_weights
from souffle.benchmark.report import report_of
from souffle.codegen.nvcc import find_nvcc
from souffle.errors import DeviceError
from souffle.runtime import load
from tests.thorough import some

_RUNTIME_ONLY = "import sys\nfor name in ('tvm', 'tvm_ffi', 'onnx', 'islpy', 'torch'): sys.modules[name] = None\n"
_OWN = ("V2", "V4")
_COOPERATIVE = "V4.grid_barrier.cooperative"
_BUILD = ("build", "--models", "mmoe", "--levels", *_OWN, "--variants", "grid_barrier", "disable=attention")
_BUILD += ("--no-cubin", "--jobs", "1")
_RUN = subprocess.run


def _results(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "results.json").read_text())


def _rehearsed(part: Path, out: Path, *more: str) -> tuple[int, str, dict[str, Any]]:
    """In a packed folder, in processes that cannot import the compiler or onnx: exit status, table, steps."""
    blocked = out.with_name(f"{out.name}-blocked")
    blocked.mkdir(exist_ok=True)
    (blocked / "sitecustomize.py").write_text(_RUNTIME_ONLY)
    command = [sys.executable, "-m", "benchmarks.gpu_host", "run", "--rehearse", "--out", str(out), *more]
    done = subprocess.run(
        command, cwd=part, env={**os.environ, "PYTHONPATH": str(blocked)}, capture_output=True, text=True, timeout=240,
        check=False,
    )  # fmt: skip
    assert done.stdout and (out / "table.txt").read_text() == done.stdout, done.stderr
    return done.returncode, done.stdout, _results(out)["steps"]


def _in_this_process(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
    """What builds a model, without importing the compiler once more."""
    if command[1] != "-m":
        return _RUN(command, **options)
    main = sys.modules[command[2]].main
    with contextlib.redirect_stdout(io.StringIO()):
        return subprocess.CompletedProcess(command, main(command[3:]), "", "")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two levels of the smallest network, one with both grid barriers, and its paper size without the constants."""
    for name in ("tvm", "onnx", "onnxruntime"):
        pytest.importorskip(name)
    if find_nvcc() is None:
        pytest.skip("no nvcc")
    from benchmarks import gpu_build, gpu_build_network

    assert gpu_build_network.main
    folder = tmp_path_factory.mktemp("artifacts")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpu_build.subprocess, "run", _in_this_process)
        assert gpu_host.main([*_BUILD, "--out", str(folder)]) == 0
    assert stage_clocks.main(["build", "--in", str(folder), "--no-cubin"]) == 0
    return folder


@pytest.fixture(scope="module")
def packed(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The one part that it becomes."""
    folder = tmp_path_factory.mktemp("packed") / "parts"
    assert gpu_host.main(["pack", "--in", str(built), "--to", str(folder)]) == 0
    assert gpu_host.main(["pack", "--in", str(built), "--to", str(folder)]) == 2, "it is not empty"
    return folder / "part1"


def test_what_is_built_and_packed(built: Path, packed: Path) -> None:
    index = json.loads((built / "index.json").read_text())
    cases = index["cases"]
    names = (*_OWN, _COOPERATIVE)
    assert list(cases) == [
        *(f"mmoe-tiny-fp32-{name}" for name in names), *(f"mmoe-paper-fp32-{name}-synthetic" for name in names),
    ]  # fmt: skip
    # It has no attention, and multiplies vectors by matrices alone.
    equal = {name: other["to"] for name, other in index["equal"].items()}
    assert equal["mmoe-tiny-fp32-V4.disable.attention"] == "mmoe-tiny-fp32-V4"
    assert {name for name, other in equal.items() if other == "fp32"} == {
        f"mmoe-{size}-mixed-{name}{end}"
        for size, end in (("tiny", ""), ("paper", "-synthetic")) for name in (*names, "V4.disable.attention")
    }  # fmt: skip
    assert {case["io"] for case in cases.values()} == {"mmoe-tiny.npz", "mmoe-paper.npz"}
    weights = {name: case["weights"] for name, case in cases.items() if case["size"] == "paper"}
    assert {path.name for path in built.glob("*.weights.npz")} == set(weights.values())
    assert weights["mmoe-paper-fp32-V4-synthetic"] == weights[f"mmoe-paper-fp32-{_COOPERATIVE}-synthetic"]
    assert all(read_weights(built / name, built / "mmoe-paper.graph.npz") for name in set(weights.values()))
    assert sorted(path.name for path in packed.iterdir()) == ["artifacts", "benchmarks", "pyproject.toml", "souffle"]
    assert (packed / "souffle" / "models" / "bert.py").is_file() and not (packed / "souffle" / "models").is_symlink()
    # What is measured is of paper size; what is worth most comes first.
    order = json.loads((packed.parent / "index.json").read_text())["part1"]["cases"]
    assert order == [*list(cases)[3:], *list(cases)[:3]]


def test_archives_hold_artifacts_alone_and_fit(built: Path, tmp_path: Path) -> None:
    command = ["pack", "--in", str(built), "--archive", "--to"]
    assert gpu_host.main([*command, str(tmp_path / "one")]) == 0
    (whole,) = (tmp_path / "one").glob("*.tar.xz")
    size = whole.stat().st_size
    with tarfile.open(whole) as archive:
        archive.extractall(tmp_path, filter="data")
    for path in (tmp_path / "artifacts").iterdir():
        if path.name != "index.json":
            assert path.read_bytes() == (built / path.name).read_bytes(), path.name
    assert size + tree_mib() * 2**20 < 64 * 2**20
    # Cut in two, no network is lost or there twice, and each part has what its networks need.
    limit = 0.75 * size / 2**20
    assert gpu_host.main([*command, str(tmp_path / "two"), "--max-mib", str(limit)]) == 0
    parts = json.loads((tmp_path / "two" / "index.json").read_text())
    assert len(parts) > 1 and all((tmp_path / "two" / name).stat().st_size <= limit * 2**20 for name in parts)
    found = [name for part in parts.values() for name in part["cases"]]
    assert sorted(found) == sorted(json.loads((built / "index.json").read_text())["cases"])
    for name, part in parts.items():
        with tarfile.open(tmp_path / "two" / name) as archive:
            index = json.load(archive.extractfile("artifacts/index.json"))
            inside = set(archive.getnames())
        assert list(index["cases"]) == part["cases"]
        assert all(f"artifacts/{case[key]}" in inside for case in index["cases"].values() for key in ("artifact", "io"))
    assert gpu_host.main([*command, str(tmp_path / "v"), "--only", "variants"]) == 0
    (part,) = json.loads((tmp_path / "v" / "index.json").read_text()).values()
    assert {name.split("-")[3] for name in part["cases"]} == {"V4", _COOPERATIVE}, "with what they are beside"


def test_all_phases_are_rehearsed_without_the_compiler(packed: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    status, table, steps = _rehearsed(packed, out, "--deferred", "--repeats", "3", "--jobs", "2")
    assert status == 0, table
    assert len(list(out.iterdir())) <= 8
    missing = {key for key, entry in steps.items() if entry["status"] == "missing"}
    assert missing == {"bench eager+ort+tensorrt mmoe-paper-fp32-V4-synthetic"}
    assert {entry["status"] for entry in steps.values()} == {"ok", "missing"} and "onnx is not installed here" in table
    verdicts = [line.split()[:2] for line in table.rpartition("phase ")[2].splitlines()[1:] if line[0] != " "]
    assert verdicts == [[name, "pass"] for name in PHASES]
    for level in (*_OWN, _COOPERATIVE):
        check = steps[f"check mmoe-tiny-fp32-{level}"]["result"]
        assert check["constants"] == "stored" and check["identical_runs"] == check["runs"] == 3
        assert check["out_identical"] and check["bound_identical"] and check["dlpack_identical"] is None
        assert check["outputs"] and all(entry["ok"] for entry in check["outputs"].values())
        assert check["difference"] <= 1e-3
    assert f"latency mmoe-paper-fp32-{_COOPERATIVE}-synthetic" not in steps
    for level in ("V4", _COOPERATIVE):
        assert steps[f"ablation mmoe-paper-fp32-{level}-synthetic"]["result"]["launches"] >= 1
    tools = ("memcheck", "racecheck", "synccheck", "initcheck")
    assert {f"{tool} mmoe-tiny-fp32-{level}" for tool in tools for level in ("V4", _COOPERATIVE)} < set(steps)
    assert steps["profile mmoe-paper-fp32-V4-synthetic"]["result"]["slices"] > 1
    assert "grid barriers: 2 of 2 networks give the same bits with each" in table and "times mean nothing" in table
    assert "mmoe-tiny-fp32-V4.disable.attention: the same as mmoe-tiny-fp32-V4" in table
    assert "mmoe paper fp32, variants" in table and "V4, grid_barrier=cooperative" in table
    # Called again, it has nothing left to do; a real run does not go on with it.
    _, _, again = _rehearsed(packed, out, "--phases", "smoke", "barriers")
    assert again["check mmoe-tiny-fp32-V4"] == steps["check mmoe-tiny-fp32-V4"]
    assert gpu_host.main(["run", "--in", str(packed / "artifacts"), "--out", str(out)]) == 2


def test_a_bad_case_does_not_stop_the_others(packed: Path, tmp_path: Path) -> None:
    artifacts, out = tmp_path / "artifacts", tmp_path / "out"
    shutil.copytree(packed / "artifacts", artifacts)
    bad = artifacts / "mmoe-tiny-fp32-V2.souffle"
    whole = bad.read_bytes()
    bad.write_bytes(whole[: len(whole) // 2])
    arguments = ("--in", str(artifacts), "--phases", "rest")
    status, table, steps = _rehearsed(packed, out, *arguments)
    failed = {key for key, entry in steps.items() if entry["status"] == "failed"}
    assert status == 1 and failed == {"check mmoe-tiny-fp32-V2"}
    assert "cut short" in steps["check mmoe-tiny-fp32-V2"]["error"] and "FAILED check mmoe-tiny" in table
    assert steps["check mmoe-tiny-fp32-V4"]["status"] == "ok"
    bad.write_bytes(whole)
    assert _rehearsed(packed, out, *arguments)[0] == 1, "what failed is settled"
    assert _rehearsed(packed, out, *arguments, "--retry")[0] == 0


@pytest.mark.parametrize(
    ("fault", "status", "says"),
    some(
        [
            ("sticky:1", "failed", "DeviceError"),
            ("wrong:1", "failed", "times the tolerance"),
            ("wrong:2", "failed", "launched again, run 1: 1 of"),
        ],
        [("hang:1", "timeout", "it was ended after")],
    ),
)
def test_a_played_fault_is_named_and_the_rest_goes_on(
    packed: Path, tmp_path: Path, fault: str, status: str, says: str
) -> None:
    kernel = load(packed / "artifacts" / "mmoe-tiny-fp32-V2.souffle").kernels[-1].name
    limit = "10" if status == "timeout" else "60"
    arguments = ("--phases", "smoke", "--timeout", limit, "--fault", f"{fault}:{kernel}")
    _, table, steps = _rehearsed(packed, tmp_path / "out", *arguments)
    states = {key: entry["status"] for key, entry in steps.items()}
    assert states.pop("check mmoe-tiny-fp32-V2") == status
    assert set(states.values()) == {"ok"} and len(states) == 3
    assert f"{status}: check mmoe-tiny-fp32-V2:" in table and says in table


def test_what_hangs_twice_is_not_waited_for_again(packed: Path, tmp_path: Path) -> None:
    arguments = ("--phases", "smoke", "--timeout", "4", "--fault", "hang:1")
    _, table, steps = _rehearsed(packed, tmp_path / "out", *arguments)
    assert sorted(entry["status"] for entry in steps.values()) == ["ok", "skipped", "timeout", "timeout"]
    assert "1 skipped, for two in a row had run out of time" in table


def test_a_refused_grid_is_made_smaller_and_said(packed: Path, tmp_path: Path) -> None:
    _, table, steps = _rehearsed(packed, tmp_path / "out", "--phases", "right", "--fault", "too-large:1")
    assert {entry["status"] for entry in steps.values()} == {"ok"}
    assert "said: check mmoe-paper-fp32-V4" in table


def _bench(built: Path, folder: Path, name: str, *more: str) -> dict[str, Any]:
    case = json.loads((built / "index.json").read_text())["cases"][name]
    files = ("artifact", "io", "weights", "graph")
    task = {"name": name} | {key: str(built / case[key]) if case.get(key) else None for key in files}
    (folder / "tasks.json").write_text(json.dumps([task]))
    answer = folder / "answer.json"
    command = ["bench", "--json", str(answer), "--tasks", str(folder / "tasks.json"), "--rehearse", "--repeats", "2"]
    assert gpu_steps.main([*command, "--warmup", "1", "--against", "ort", "eager", *more]) == 0
    return json.loads(answer.read_text())["done"][name]


@pytest.mark.parametrize("size", ["tiny", "paper"])
def test_a_network_is_benched_beside_peers(built: Path, tmp_path: Path, size: str) -> None:
    """Its own rows by the played driver; what a peer lacks is its reason, as in souffle bench."""
    name, more = f"mmoe-{size}-fp32-V4", () if size == "tiny" else ("--no-execute",)
    result = _bench(built, tmp_path, name + ("-synthetic" if more else ""), *more)
    report = report_of(result["report"])
    forms = {row.form: row for row in report.rows if row.name == "souffle"}
    assert set(forms) == {"graph", "launches"} and not report.wrong
    assert all(row.passed and row.times["warm"].runs == row.times["cold"].runs == 2 for row in forms.values())
    reasons = {row.name: row.reason for row in report.rows if row.name != "souffle"}
    assert set(reasons) == {"ort", "eager"} and all(reasons.values())


def test_outputs_that_depend_on_the_barrier_are_a_failure() -> None:
    about = {"model": "m", "size": "tiny", "precision": "fp32", "level": "V4", "label": "V4", "constants": "stored"}
    about["grid_barrier"] = "counter"
    other = {**about, "grid_barrier": "cooperative", "label": "V4, grid_barrier=cooperative"}
    # Without teams, sums may be added in another order.
    without = {**about, "grid_barrier": "cooperative", "label": "V4 without teams"}
    cases = {"one": about, "two": other, "alone": {**about, "level": "V3", "label": "V3"}, "teams": without}
    found = {f"check {name}": {"status": "ok", "result": {"digest": "a"}} for name in cases}
    found["check teams"]["result"]["digest"] = "c"
    assert across_barriers(cases, found) == (1, [])
    found["check two"]["result"]["digest"] = "b"
    assert across_barriers(cases, found) == (1, ["m tiny fp32 V4"])


def test_barriers_side_by_side_are_rehearsed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("tvm")
    if find_nvcc() is None:
        pytest.skip("no nvcc")
    built, kept = tmp_path / "built", tmp_path / "barriers.json"
    assert grid_barriers.main(["build", "--out", str(built)]) == 0
    assert grid_barriers.main(["rehearse", "--in", str(built), "--json", str(kept)]) == 0
    assert "times mean nothing" in capsys.readouterr().out
    rows = json.loads(kept.read_text())["rows"]
    assert len(rows) > 1 and rows[0]["blocks"] < rows[-1]["blocks"]
    assert all({"empty_cooperative", "passing_counter"} < set(row) for row in rows)
    # A barrier that does not wait lets a block read what its neighbour has not written.
    source = built / "barriers.cu"
    text = source.read_text()
    broken = text.replace("0x80000000u) == 0", "0x80000000u) == 1")
    assert broken != text
    source.write_text(broken)
    with pytest.raises(DeviceError, match="passing_counter left"):
        grid_barriers.main(["rehearse", "--in", str(built)])


def test_without_a_gpu_a_run_says_so_and_stops(
    built: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert gpu_host.main(["run", "--in", str(built), "--out", str(tmp_path / "out")]) == 1
    assert "NoGpuError" in caplog.text
    assert set(_results(tmp_path / "out")["steps"]) == {"device"}


def test_weights_are_drawn_again(tmp_path: Path) -> None:
    pytest.importorskip("onnx")
    from onnx import helper, numpy_helper

    shapes = {
        "first": (64, 50),
        "second": (64, 50),
        "gates": (2, 64, 50),
        "bias": (50,),
        "cell": (1, 192, 40),
        "mask": (64, 64),
    }
    draw = np.random.default_rng(0).standard_normal
    arrays = {name: (3 + 2 * draw(shape)).astype(np.float32) for name, shape in shapes.items()}
    arrays["mask"] = np.tril(np.ones((64, 64), np.float32))
    graph = helper.make_graph([], "g", [], [], [numpy_helper.from_array(array, name) for name, array in arrays.items()])
    model, draws = redrawn(helper.make_model(graph))
    assert set(draws) == {"first", "second", "gates", "cell"}, "small ones and masks stay"
    of = {item.name: numpy_helper.to_array(item) for item in model.graph.initializer}
    for name in shapes:
        assert of[name].shape == shapes[name] and (of[name].tobytes() == arrays[name].tobytes()) == (name not in draws)
    assert abs(of["first"].mean() - 3) < 0.2 and abs(of["first"].std() - 2) < 0.2
    scale = draw(64).astype(np.float32)
    constants = {
        "same": of["first"],
        "transposed": np.ascontiguousarray(of["second"].T),
        "stacked": np.stack([of["first"], of["second"]]),
        "reshaped": of["first"].reshape(8, 8, 50),
        "part": np.ascontiguousarray(of["gates"][1].T),
        "halves": np.stack([of["first"], of["second"]]).astype(np.float16),
        "beside": np.ascontiguousarray(of["cell"].reshape(4, 48, 40).transpose(2, 1, 0)),
        "three": np.stack([of["cell"].reshape(3, 64, 40).transpose(2, 1, 0)] * 2),
        "scaled": (of["first"].astype(np.float16).astype(np.float32) * scale[:, None]).astype(np.float16),
        "other": draw((64, 50)).astype(np.float32),
        "small": np.ones(3, np.float32),
    }
    path, graph_path = tmp_path / "weights.npz", tmp_path / "model.graph.npz"
    write_graph(graph_path, model, draws)
    found, carried = write_weights(path, constants, Pieces(draws, [scale[::-1].copy(), scale]))
    assert carried == constants["other"].nbytes
    assert found == sum(array.nbytes for name, array in constants.items() if name not in ("other", "small"))
    made = read_weights(path, graph_path)
    assert set(made) == set(constants) - {"small"}
    assert all(made[name].tobytes() == constants[name].tobytes() for name in made)
    assert all(made[name].dtype == constants[name].dtype for name in made)
    write_weights(path, {"same": of["first"]}, Pieces(draws))
    with np.load(graph_path) as file:
        content = dict(file)
    content["mean/first"] = content["mean/first"] + np.float32(1e-6)
    np.savez(graph_path, **content)
    with pytest.raises(ValueError, match=r"constant same of weights\.npz is not what it was: NumPy"):
        read_weights(path, graph_path)


_CHILD = """
import json, os, sys, time
from pathlib import Path
answer, names = Path(sys.argv[1]), sys.argv[2:]
content = {"done": {}, "now": None}
for name in names:
    content["now"] = name
    answer.write_text(json.dumps(content))
    if name == "crashes":
        os.abort()
    if name == "hangs":
        time.sleep(60)
    if name == "keeps":
        try:
            time.sleep(60)
        except KeyboardInterrupt:
            pass
    content["now"] = None
    content["done"][name] = {"ok": name != "wrong", "seconds": 0.1}
    answer.write_text(json.dumps(content))
"""


def test_the_rest_goes_on_after_a_crash_and_a_hang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def command(runner: object, step: Step, folder: Path, names: tuple[str, ...]) -> list[str]:
        return [sys.executable, "-c", _CHILD, str(folder / "answer.json"), *names]

    monkeypatch.setattr(gpu_run._Runner, "_command", command)
    options = argparse.Namespace(rehearse=True, input=tmp_path, jobs=2, budget=30.0, retry=False)
    device = Step("device", "device", ("device",), (), 10.0)
    names = ("one", "crashes", "two", "hangs", "wrong", "keeps", "three")
    steps = [device, Step("check", "check", names, (), 1.5, together=True)]
    results: dict[str, Any] = {"steps": {}}
    gpu_run.run_steps(steps, {}, options, results, lambda: None)
    states = {key.removeprefix("check "): entry["status"] for key, entry in results["steps"].items()}
    # What is interrupted writes down what it has, as a benchmark does.
    right = dict.fromkeys(("device", "one", "two", "keeps", "three"), "ok")
    assert states == {**right, "crashes": "failed", "hangs": "timeout", "wrong": "failed"}
    results["steps"]["check one"]["kept"] = True
    gpu_run.run_steps(steps, {}, options, results, lambda: None)
    assert results["steps"]["check one"]["kept"]
    options.budget = 1.0
    untouched: dict[str, Any] = {"steps": {}}
    gpu_run.run_steps(steps, {}, options, untouched, lambda: None)
    assert untouched == {"steps": {}}


def test_the_model_is_added_to_artifacts_that_lack_it(
    built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is compiled for it."""
    from benchmarks import gpu_build

    monkeypatch.setattr(gpu_build.subprocess, "run", _in_this_process)
    monkeypatch.setattr(gpu_build.grid_barriers, "compile_kernels", lambda folder, arch: [])
    folder = tmp_path / "artifacts"
    shutil.copytree(built, folder)
    (folder / "mmoe-paper.graph.npz").unlink()
    index = json.loads((folder / "index.json").read_text())
    for case in index["cases"].values():
        del case["graph"]
    (folder / "index.json").write_text(json.dumps(index))
    before = {path.name: path.stat().st_mtime_ns for path in folder.glob("*.souffle")}
    assert gpu_host.main([*_BUILD, "--out", str(folder)]) == 0
    assert {path.name: path.stat().st_mtime_ns for path in folder.glob("*.souffle")} == before
    for name, case in json.loads((folder / "index.json").read_text())["cases"].items():
        assert case["graph"] == f"mmoe-{case['size']}.graph.npz", name
        assert (folder / case["graph"]).exists()


@pytest.mark.parametrize("command", [["run", "--out", "out"], ["pack", "--to", "out"]])
def test_a_folder_without_networks_says_so(command: list[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"holds no networks: index\.json is missing; make them with build"):
        gpu_host.main([*command, "--in", str(tmp_path)])
    (tmp_path / "index.json").write_text('{"cases": {"bert-tiny-fp32-V4": {"level": "V4"}}}')
    with pytest.raises(SystemExit, match="is of an earlier form of build, which said less of bert-tiny-fp32-V4"):
        gpu_host.main([*command, "--in", str(tmp_path)])
