"""The script for a GPU host, with the real compiler: built, packed and rehearsed where no compiler can be imported."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import gpu_host, gpu_run, grid_barriers, stage_clocks
from benchmarks.gpu_plan import Step
from benchmarks.gpu_table import across_barriers
from benchmarks.weights import Pieces, read_weights, redrawn, write_graph, write_weights
from souffle.codegen.nvcc import find_nvcc
from souffle.errors import DeviceError
from souffle.runtime import load

_RUNTIME_ONLY = "import sys\nfor name in ('tvm', 'tvm_ffi', 'onnx', 'islpy', 'torch'): sys.modules[name] = None\n"


def _results(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "results.json").read_text())


def _rehearse(packed: Path, out: Path, blocked: Path, *more: str) -> subprocess.CompletedProcess[str]:
    """In the packed folder, in processes that cannot import the compiler or onnx."""
    blocked.mkdir(exist_ok=True)
    (blocked / "sitecustomize.py").write_text(_RUNTIME_ONLY)
    command = [sys.executable, "-m", "benchmarks.gpu_host", *(more or ("rehearse",)), "--out", str(out)]
    environment = {**os.environ, "PYTHONPATH": str(blocked)}
    return subprocess.run(
        command, cwd=packed / "part1", env=environment, capture_output=True, text=True, timeout=120, check=False
    )


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two levels of the smallest network, one with both grid barriers, and its paper size without the constants."""
    for name in ("tvm", "onnx", "onnxruntime"):
        pytest.importorskip(name)
    if find_nvcc() is None:
        pytest.skip("no nvcc")
    folder = tmp_path_factory.mktemp("artifacts")
    levels = ["--levels", "V2", "V4", "--grid-barriers", "counter", "cooperative"]
    assert gpu_host.main(["build", "--out", str(folder), "--models", "mmoe", *levels]) == 0
    assert stage_clocks.main(["build", "--in", str(folder)]) == 0
    return folder


def test_built_packed_and_rehearsed_without_the_compiler(
    built: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    packed, out = tmp_path / "packed", tmp_path / "results"
    assert gpu_host.main(["pack", "--in", str(built), "--to", str(packed)]) == 0
    assert sorted(path.name for path in (packed / "part1").iterdir()) == [
        "artifacts", "benchmarks", "pyproject.toml", "souffle",
    ]  # fmt: skip
    assert (packed / "part1" / "souffle" / "models" / "bert.py").is_file()
    assert not (packed / "part1" / "souffle" / "models").is_symlink()
    assert gpu_host.main(["pack", "--in", str(built), "--to", str(packed)]) == 2
    done = _rehearse(packed, out, tmp_path / "blocked", "rehearse", "--sanitize", "V4", "--repeats", "5")
    assert done.returncode == 0, done.stderr + done.stdout
    steps = _results(out)["steps"]
    assert {entry["status"] for entry in steps.values()} == {"ok"}
    for level in ("V2", "V4", "V4-cooperative"):
        check = steps[f"check mmoe-tiny-fp32-{level}"]["result"]
        assert check["constants"] == "stored" and check["identical_runs"] == check["runs"] == 5
        assert check["outputs"] and all(entry["ok"] for entry in check["outputs"].values())
        assert steps[f"latency mmoe-paper-fp32-{level}-synthetic"]["result"]["launches"] >= 1
    tools = ("memcheck", "racecheck", "synccheck", "initcheck")
    assert {f"{tool} mmoe-tiny-fp32-V4{barrier}" for tool in tools for barrier in ("", "-cooperative")} < set(steps)
    assert "latency mmoe-tiny-fp32-V2-cooperative" not in steps, "at V2 no kernel waits"
    assert "grid barriers: 2 of 2 networks give the same bits with each" in done.stdout
    assert "times mean nothing" in done.stdout and "mmoe tiny fp32" in done.stdout


def test_precisions_levels_and_barriers_share_files(built: Path, tmp_path: Path) -> None:
    index = json.loads((built / "index.json").read_text())
    cases = index["cases"]
    assert list(cases) == [
        *(f"mmoe-tiny-fp32-{network}" for network in ("V2", "V4", "V4-cooperative")),
        *(f"mmoe-paper-fp32-{network}-synthetic" for network in ("V2", "V4", "V4-cooperative")),
    ]
    assert set(index["as_fp32"]) == {f"mmoe-paper-mixed-{level}-synthetic" for level in ("V2", "V4")}
    assert {case["io"] for case in cases.values()} == {"mmoe-tiny.npz", "mmoe-paper.npz"}
    weights = {name: case["weights"] for name, case in cases.items() if case["size"] == "paper"}
    assert {path.name for path in built.glob("*.weights.npz")} == set(weights.values())
    assert weights["mmoe-paper-fp32-V4-synthetic"] == weights["mmoe-paper-fp32-V4-cooperative-synthetic"]
    assert all(read_weights(built / name, built / "mmoe-paper.graph.npz") for name in set(weights.values()))
    assert gpu_host.main(["pack", "--in", str(built), "--to", str(tmp_path / "packed")]) == 0
    packed = json.loads((tmp_path / "packed" / "index.json").read_text())
    assert [name for part in packed.values() for name in part["cases"]] == list(cases)


def test_mixed_precision_is_built_beside_fp32(tmp_path: Path) -> None:
    """At paper size with the first grid barrier alone."""
    options = ["build", "--out", str(tmp_path), "--models", "bert", "--grid-barriers", "counter", "cooperative"]
    parsed = gpu_host._parser().parse_args(options)
    groups = {group.size: group for group in gpu_host._groups(parsed)}
    five = [f"V{level}" for level in range(5)]
    assert list(groups["paper"].networks(parsed)) == [
        f"bert-paper-{network}-synthetic" for network in
        (*(f"fp32-{level}" for level in (*five[:3], "V3", "V3-cooperative", "V4", "V4-cooperative")),
         *(f"mixed-{level}" for level in five))
    ]  # fmt: skip
    assert sum(network.precision == "mixed" for network in groups["tiny"].networks(parsed).values()) == 7
    alone = gpu_host._parser().parse_args([*options, "--models", "lstm", "--precision", "mixed"])
    assert {group.precisions for group in gpu_host._groups(alone)} == {("mixed",)}
    if find_nvcc() is None:
        pytest.skip("no nvcc")
    assert gpu_host.main([*options, "--sizes", "tiny", "--precision", "mixed", "--levels", "V3"]) == 0
    cases = json.loads((tmp_path / "index.json").read_text())["cases"]
    assert set(cases) == {"bert-tiny-mixed-V3", "bert-tiny-mixed-V3-cooperative"}
    assert all(load(tmp_path / case["artifact"]).options.precision == "mixed" for case in cases.values())


def test_a_bad_case_does_not_stop_the_others(built: Path, tmp_path: Path) -> None:
    packed, out = tmp_path / "packed", tmp_path / "results"
    assert gpu_host.main(["pack", "--in", str(built), "--to", str(packed)]) == 0
    bad = packed / "part1" / "artifacts" / "mmoe-tiny-fp32-V2.souffle"
    whole = bad.read_bytes()
    bad.write_bytes(whole[: len(whole) // 2])
    arguments = ("rehearse", "--only", "check", "latency", "--models", "mmoe")
    done = _rehearse(packed, out, tmp_path / "blocked", *arguments)
    assert done.returncode == 1
    steps = _results(out)["steps"]
    failed = {key for key, entry in steps.items() if entry["status"] == "failed"}
    assert failed == {"check mmoe-tiny-fp32-V2", "latency mmoe-tiny-fp32-V2"}
    assert "cut short" in steps["check mmoe-tiny-fp32-V2"]["error"] and "FAILED check mmoe-tiny" in done.stdout
    assert steps["check mmoe-tiny-fp32-V4"]["status"] == steps["latency mmoe-tiny-fp32-V4"]["status"] == "ok"
    bad.write_bytes(whole)
    assert _rehearse(packed, out, tmp_path / "blocked", *arguments).returncode == 1
    assert _rehearse(packed, out, tmp_path / "blocked", *arguments, "--retry").returncode == 0


def _first_contact(packed: Path, out: Path, blocked: Path, *more: str) -> tuple[str, dict[str, Any]]:
    """The table, and each case's status."""
    done = _rehearse(packed, out, blocked, "first-contact", "--rehearse", *more)
    assert (out / "table.txt").read_text() == done.stdout
    assert len(list(out.iterdir())) <= 8
    return done.stdout, {key: entry["status"] for key, entry in _results(out)["steps"].items()}


def test_first_contact_is_rehearsed(built: Path, tmp_path: Path) -> None:
    packed, out, blocked = tmp_path / "packed", tmp_path / "out", tmp_path / "blocked"
    assert gpu_host.main(["pack", "--in", str(built), "--to", str(packed)]) == 0
    table, states = _first_contact(packed, out, blocked, "--deferred")
    peers = {key: states.pop(key) for key in list(states) if key.startswith("peers ")}
    assert peers == {f"peers mmoe-paper-fp32-{peer}": "missing" for peer in ("eager", "inductor", "autotuned")}
    assert "eager, inductor, autotuned missing: torch is not installed here" in table
    assert set(states.values()) == {"ok"}
    lines = table.rpartition("phase ")[2].splitlines()[1:]
    verdicts = [line.split() for line in lines if not line.startswith(" ")]
    assert [(name, verdict) for name, verdict, *_ in verdicts] == [
        (phase, "nothing" if phase == "mixed" else "pass") for phase in
        (*("device", "barriers", "smoke", "paper", "shared", "latency", "stages", "constants", "mixed", "rest"),
         *("memory", "races"))
    ]  # fmt: skip
    assert {"barriers", "shared", "check mmoe-paper-fp32-V4-cooperative-synthetic"} < set(states)
    assert "mixed precision changes nothing in mmoe-paper-mixed: see fp32" in table
    # Called again, it has nothing left to do.
    before = _results(out)["steps"]
    _first_contact(packed, out, blocked, "--phases", "smoke", "barriers")
    assert _results(out)["steps"]["check mmoe-tiny-fp32-V4"] == before["check mmoe-tiny-fp32-V4"]


@pytest.mark.parametrize(
    ("fault", "status", "says"),
    [
        ("sticky:1", "failed", "DeviceError"),
        ("wrong:1", "failed", "times the tolerance"),
        ("wrong:2", "failed", "launched again, run 1: 1 of"),
        ("hang:1", "timeout", "it was ended after"),
    ],
)
def test_a_played_fault_is_named_and_the_rest_goes_on(
    built: Path, tmp_path: Path, fault: str, status: str, says: str
) -> None:
    packed, out = tmp_path / "packed", tmp_path / "out"
    assert gpu_host.main(["pack", "--in", str(built), "--to", str(packed)]) == 0
    kernel = load(packed / "part1" / "artifacts" / "mmoe-tiny-fp32-V2.souffle").kernels[-1].name
    arguments = ("--phases", "smoke", "--timeout", "8", "--fault", f"{fault}:{kernel}")
    table, states = _first_contact(packed, out, tmp_path / "blocked", *arguments)
    assert states.pop("check mmoe-tiny-fp32-V2") == status
    assert set(states.values()) == {"ok"} and len(states) == 3
    assert f"{status}: check mmoe-tiny-fp32-V2:" in table and says in table


def test_what_hangs_twice_is_not_waited_for_again(built: Path, tmp_path: Path) -> None:
    packed, out = tmp_path / "packed", tmp_path / "out"
    assert gpu_host.main(["pack", "--in", str(built), "--to", str(packed)]) == 0
    arguments = ("--phases", "smoke", "--timeout", "4", "--fault", "hang:1")
    table, states = _first_contact(packed, out, tmp_path / "blocked", *arguments)
    assert sorted(states.values()) == ["ok", "skipped", "timeout", "timeout"]
    assert "1 skipped, for two in a row had run out of time" in table


def test_a_refused_grid_is_made_smaller_and_said(built: Path, tmp_path: Path) -> None:
    packed, out = tmp_path / "packed", tmp_path / "out"
    assert gpu_host.main(["pack", "--in", str(built), "--to", str(packed)]) == 0
    arguments = ("--phases", "paper", "--fault", "too-large:1")
    table, states = _first_contact(packed, out, tmp_path / "blocked", *arguments)
    assert set(states.values()) == {"ok"} and "said: check mmoe-paper-fp32-V4" in table


def test_outputs_that_depend_on_the_barrier_are_a_failure() -> None:
    about = {"model": "m", "size": "tiny", "precision": "fp32", "level": "V4", "constants": "stored"}
    cases = {"one": about, "two": {**about, "grid_barrier": "cooperative"}, "alone": {**about, "level": "V3"}}
    found = {f"check {name}": {"status": "ok", "result": {"digest": "a"}} for name in cases}
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
    names = ("one", "crashes", "two", "hangs", "wrong", "three")
    steps = [device, Step("check", "check", names, (), 1.5, together=True)]
    results: dict[str, Any] = {"steps": {}}
    gpu_run.run_steps(steps, {}, options, results, lambda: None)
    states = {key.removeprefix("check "): entry["status"] for key, entry in results["steps"].items()}
    right = dict.fromkeys(("device", "one", "two", "three"), "ok")
    assert states == {**right, "crashes": "failed", "hangs": "timeout", "wrong": "failed"}
    results["steps"]["check one"]["kept"] = True
    gpu_run.run_steps(steps, {}, options, results, lambda: None)
    assert results["steps"]["check one"]["kept"]
    options.budget = 1.0
    untouched: dict[str, Any] = {"steps": {}}
    gpu_run.run_steps(steps, {}, options, untouched, lambda: None)
    assert untouched == {"steps": {}}


def test_the_model_is_added_to_artifacts_that_lack_it(built: Path, tmp_path: Path) -> None:
    """Nothing is compiled for it."""
    folder = tmp_path / "artifacts"
    shutil.copytree(built, folder)
    (folder / "mmoe-paper.graph.npz").unlink()
    index = json.loads((folder / "index.json").read_text())
    for case in index["cases"].values():
        del case["graph"]
    (folder / "index.json").write_text(json.dumps(index))
    before = {path.name: path.stat().st_mtime_ns for path in folder.glob("*.souffle")}
    levels = ["--levels", "V2", "V4", "--grid-barriers", "counter", "cooperative"]
    assert gpu_host.main(["build", "--out", str(folder), "--models", "mmoe", *levels]) == 0
    assert {path.name: path.stat().st_mtime_ns for path in folder.glob("*.souffle")} == before
    for name, case in json.loads((folder / "index.json").read_text())["cases"].items():
        assert case["graph"] == f"mmoe-{case['size']}.graph.npz", name
        assert (folder / case["graph"]).exists()


@pytest.mark.parametrize("command", [["latency", "--out", "out"], ["pack", "--to", "out"]])
def test_a_folder_without_networks_says_so(command: list[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"holds no networks: index\.json is missing; make them with build"):
        gpu_host.main([*command, "--in", str(tmp_path)])
