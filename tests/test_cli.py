"""The command line: what it prints, as text and as JSON, and its exit status."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import souffle
from souffle import models, reference
from souffle.cli import ablate, check, compare, main
from souffle.cli.compare import OutputComparison
from souffle.codegen import nvcc
from souffle.evaluation import ablation
from souffle.options import ON_CHIP

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two experts over one input, and a softmax over their sum."""
    rng = np.random.default_rng(0)
    weights = [rng.standard_normal((8, 6)).astype(np.float32) for _ in range(2)]
    graph = helper.make_graph(
        [
            helper.make_node("MatMul", ["x", "w0"], ["a"], name="expert0"),
            helper.make_node("MatMul", ["x", "w1"], ["b"], name="expert1"),
            helper.make_node("Add", ["a", "b"], ["c"], name="sum"),
            helper.make_node("Relu", ["c"], ["d"], name="relu"),
            helper.make_node("Softmax", ["d"], ["y"], name="softmax", axis=-1),
        ],
        "experts",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [3, 8])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [3, 6])],
        [numpy_helper.from_array(w, f"w{i}") for i, w in enumerate(weights)],
    )
    path = tmp_path_factory.mktemp("cli") / "experts.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), path)
    return path


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables are those of a machine without a GPU."""
    for module in (ablate, check):
        monkeypatch.setattr(module, "gpu_arch", lambda: None)


def run(capsys: pytest.CaptureFixture, *arguments: object) -> tuple[int, str, str]:
    status = main.main([str(a) for a in arguments])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_python_m_souffle() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "souffle", "--version"], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0 and done.stdout == f"souffle {souffle.__version__}\n"
    done = subprocess.run(
        [sys.executable, "-m", "souffle", "compile", "missing.onnx"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == "souffle: ModelError: missing.onnx: no such file"
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("command", ["compile", "run", "verify", "explain", "check", "ablate", "bench"])
def test_each_command_has_help_and_json(command: str, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as end:
        main.main([command, "--help"])
    assert end.value.code == 0 and "--json" in capsys.readouterr().out


def test_compile_and_run(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    file, result = tmp_path / "net.souffle", tmp_path / "y.npz"
    status, out, err = run(capsys, "compile", model, "--level", "V2", "--no-cubin", "--arch", "sm_90", "-o", file)
    assert status == 0 and file.is_file()
    assert f"{file}: " in out and "for sm_90" in out and "kernel0_" in out
    assert "importing" in err and "merging" in err
    inputs = models.random_inputs(onnx.load(model))
    arguments = []
    for number, (name, value) in enumerate(inputs.items()):
        np.save(tmp_path / f"{number}.npy", value)
        arguments += ["--input", f"{name}={tmp_path / f'{number}.npy'}"]
    status, out, err = run(capsys, "run", file, *arguments, "--output", result, "--device", "cpu", "--quiet")
    assert status == 0 and not err
    expected = souffle.load(file, device="cpu")(inputs)
    with np.load(result) as found:
        assert set(found) == set(expected)
        for name, value in expected.items():
            assert name in out
            np.testing.assert_array_equal(found[name], value)
    status, out, _ = run(capsys, "run", file, *arguments, "--device", "cpu", "--json")
    assert status == 0
    assert json.loads(out) == {n: {"shape": list(v.shape), "dtype": str(v.dtype)} for n, v in expected.items()}


def test_compile_to_json_beside_the_model(model: Path, capsys: pytest.CaptureFixture) -> None:
    status, out, _ = run(capsys, "compile", model, "--target", "cpu", "--json", "--quiet")
    record = json.loads(out)
    assert status == 0 and record["file"] == str(model.with_suffix(".souffle"))
    assert record["arch"].startswith("llvm") and record["launches"] == sum(k["launches"] for k in record["kernels"])
    assert model.with_suffix(".souffle").is_file()


@pytest.mark.skipif(nvcc.find_nvcc() is None, reason="no nvcc here")
def test_compile_reports_registers(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    file = tmp_path / "net.souffle"
    status, out, _ = run(capsys, "compile", model, "--arch", "sm_80", "-o", file, "--json")
    (kernel,) = json.loads(out)["kernels"]
    assert status == 0 and kernel["registers"] > 0 and None not in (kernel["spill_bytes"], kernel["stack_bytes"])


def test_explain(model: Path, capsys: pytest.CaptureFixture) -> None:
    status, out, _ = run(capsys, "explain", model, "--no-cubin", "--arch", "sm_90")
    assert status == 0 and "horizontal: " in out and "\nsubprograms (" in out
    status, out, _ = run(capsys, "explain", model, "--no-cubin", "--arch", "sm_90", "--json")
    data = json.loads(out)
    assert status == 0 and {"stage", "subject", "accepted", "reason"} == set(data["decisions"][0])
    assert data["predicted_on"] == "H200-SXM5-141GB" and data["predicted_seconds"] > 0
    assert sum(kernel["share"] for kernel in data["kernels"]) == pytest.approx(1)


def test_check(model: Path, capsys: pytest.CaptureFixture) -> None:
    status, out, _ = run(capsys, "check", model, "--levels", "V0", "V3", "--shuffled", 2, "--arch", "sm_90")
    assert status == 0
    lines = out.splitlines()
    assert lines[0] == f"{model}, fp32, against ONNX Runtime"
    assert sum(line.split()[0] in ("V0", "V3") for line in lines) == 6
    assert sum(line.endswith("  ok") for line in lines) == 6 and "No GPU is usable" in lines[-1]
    status, out, _ = run(capsys, "check", model, "--levels", "V4", "--json", "--quiet", "--precision", "mixed")
    record = json.loads(out)
    assert status == 0 and record["ok"] and record["precision"] == "mixed"
    (one,) = record["runs"]
    assert (one["level"], one["device"], one["ok"]) == ("V4", "CPU", True) and one["error"] < 2e-2


def test_ablate(model: Path, capsys: pytest.CaptureFixture) -> None:
    status, out, _ = run(capsys, "ablate", model, "--no-cubin", "--arch", "sm_90", "--quiet")
    assert status == 0 and "latency µs" in out and "V3: V2 + one kernel per subprogram" in out
    status, out, _ = run(capsys, "ablate", model, "--no-cubin", "--no-run", "--arch", "sm_90", "--quiet", "--json")
    records = json.loads(out)
    assert status == 0 and [r["level"] for r in records] == ["V0", "V1", "V2", "V3", "V4"]
    assert all(r["error"] is None and r["latency_us"] is None and r["bytes_read"] > 0 for r in records)
    launches = [r["launches"] for r in records]
    assert launches == sorted(launches, reverse=True) and launches[-1] == 1
    assert all(r["predicted_us"] > 0 and r["disable"] == [] for r in records)


def test_ablate_leaves_out_each_name(model: Path, capsys: pytest.CaptureFixture) -> None:
    status, out, _ = run(capsys, "ablate", model, "--no-cubin", "--no-run", "--arch", "sm_90", "--quiet", "--each")
    assert status == 0 and "predicted µs" in out
    assert all(f"\nV4 without {name} " in out for name in ON_CHIP) and out.count("without") == len(ON_CHIP)
    status, out, _ = run(
        capsys, "ablate", model, *["--no-cubin", "--no-run", "--quiet", "--json", "--each", "--disable", "reuse"]
    )
    left_out = [(r["level"], r["disable"]) for r in json.loads(out)]
    assert status == 0 and left_out[:5] == [(f"V{n}", []) for n in range(4)] + [("V4", ["reuse"])]
    both = [[n for n in ON_CHIP if n in (name, "reuse")] for name in ON_CHIP if name != "reuse"]
    assert left_out[5:] == [("V4", names) for names in both]


def test_a_watchdog(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    given = (model, "--no-cubin", "--quiet", "--watchdog-ms")
    target = tmp_path / "experts.souffle"
    assert run(capsys, "compile", *given, "7.5", "-o", target)[0] == 0
    options = souffle.load(target, device="cpu").plan.options
    assert (options.watchdog_ms, options.grid_barrier) == (7.5, "counter")
    status, _, err = run(capsys, "compile", *given, "7.5", "--grid-barrier", "cooperative", "-o", target)
    assert status == 2 and 'needs grid_barrier="counter"' in err
    status, _, err = run(capsys, "compile", *given, "0", "-o", target)
    assert status == 2 and "watchdog_ms=0.0 is not valid" in err


@pytest.mark.parametrize("form", [[], ["--json"]], ids=["text", "json"])
def test_a_mismatch_is_exit_status_1(
    form: list[str], model: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (ablation, check):
        monkeypatch.setattr(module, "compare", lambda *_: OutputComparison(0.5, False))
    status, out, _ = run(capsys, "check", model, "--levels", "V0", "--arch", "sm_90", *form)
    assert status == 1 and ('"ok": false' if form else "MISMATCH") in out
    status, out, _ = run(capsys, "ablate", model, "--no-cubin", "--arch", "sm_90", *form)
    assert status == 1 and ('"ok": false' if form else "MISMATCH") in out


def test_a_network_that_computes_something_else_is_found(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = check.onnxruntime_outputs
    monkeypatch.setattr(
        check, "onnxruntime_outputs", lambda *a: {name: value * 1.01 for name, value in real(*a).items()}
    )
    assert main.main(["check", str(model), "--levels", "V0", "--arch", "sm_90", "--quiet"]) == 1


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["compile", "missing.onnx"], "ModelError: missing.onnx: no such file"),
        (["explain", "{model}", "--arch", "sm_12"], "OptionError: arch 'sm_12' is not known"),
        (["check", "{model}", "--levels", "V9"], "OptionError: level='V9' is not valid"),
        (["run", "{model}"], "ArtifactError: "),
        (["run", "missing.souffle"], "ArtifactError: "),
        (["compile", "{model}", "--no-cubin", "-o", "{model}/x.souffle"], "ArtifactError: "),
    ],
)
def test_errors_are_one_line_and_exit_status_2(
    arguments: list[str], says: str, model: Path, capsys: pytest.CaptureFixture
) -> None:
    status, out, err = run(capsys, *(a.replace("{model}", str(model)) for a in arguments))
    assert status == 2 and not out
    last = err.splitlines()[-1]
    assert last.startswith(f"souffle: {says}")


def test_wrong_inputs_of_run_are_named(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    file = tmp_path / "net.souffle"
    assert run(capsys, "compile", model, "--target", "cpu", "-o", file)[0] == 0
    (tmp_path / "bad.npy").write_bytes(b"no array")
    np.savez(tmp_path / "many.npz", a=np.ones(3))
    np.save(tmp_path / "object.npy", np.array([None]), allow_pickle=True)
    for argument, says in (
        ("x.npy", "is not of the form NAME=x.npy"),
        (f"input={tmp_path}/none.npy", "none.npy cannot be read"),
        (f"input={tmp_path}/bad.npy", "bad.npy cannot be read"),
        (f"input={tmp_path}/many.npz", "is an .npz archive"),
        (f"input={tmp_path}/object.npy", "object.npy cannot be read"),
    ):
        status, _, err = run(capsys, "run", file, "--input", argument)
        assert status == 2 and "InputError" in err and says in err


def test_without_onnxruntime_check_says_what_to_install(
    model: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reference, "onnxruntime", None)
    status, _, err = run(capsys, "check", model, "--levels", "V0", "--arch", "sm_90")
    assert status == 2 and "pip install 'souffle-dl[check]'" in err


ONE = np.array([1.0, 100.0], np.float32)


@pytest.mark.parametrize(
    ("given", "precision", "ok"),
    [
        (ONE * (1 + 9e-4), "fp32", True),
        (ONE * (1 + 3e-3), "fp32", False),
        (ONE + np.float32(1.5), "mixed", True),
        (ONE + np.float32(2.5), "mixed", False),
        (np.array([np.nan, 100.0], np.float32), "fp32", False),
        (np.array([np.nan, 100.0], np.float32), "mixed", False),
        (ONE[:1], "fp32", False),
        (ONE.astype(np.float64), "fp32", False),
    ],
)
def test_the_tolerances(given: np.ndarray, precision: str, ok: bool) -> None:
    assert compare.compare({"y": given}, {"y": ONE}, precision).ok is ok


def test_integers_must_be_equal_and_infinities_match() -> None:
    whole = np.array([1, 2])
    assert compare.compare({"y": whole}, {"y": whole}, "fp32").ok
    assert not compare.compare({"y": whole + 1}, {"y": whole}, "mixed").ok
    odd = np.array([np.inf, -np.inf, np.nan, 1], np.float32)
    assert compare.compare({"y": odd}, {"y": odd}, "fp32") == OutputComparison(0.0, True)
    assert not compare.compare({"y": np.array([1, -1, np.nan, 1], np.float32)}, {"y": odd}, "fp32").ok
    assert not compare.compare({"y": -odd}, {"y": odd}, "fp32").ok
    assert not compare.compare({}, {"y": whole}, "fp32").ok
