"""The cost model against a GPU: built, packed and rehearsed without one; ranks and outliers as by hand."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import cost_against_gpu, cost_against_gpu_build, product_tilings
from benchmarks.cost_against_gpu_cases import cases
from benchmarks.cost_against_gpu_report import joined, outliers, plot, summary, table
from benchmarks.cost_against_gpu_run import reference
from benchmarks.ranks import rank_correlation, scatter
from souffle.codegen.nvcc import find_nvcc
from souffle.cost import cost_device, predict_stage
from souffle.schedule.lower import cuda_target
from souffle.schedule.resources import StageResources
from tests.thorough import THOROUGH, some

_RUNTIME_ONLY = "import sys\nfor name in ('tvm', 'tvm_ffi', 'onnx', 'islpy', 'torch'): sys.modules[name] = None\n"
_CASES = some(["gemm", "softmax"], ["convolution_strided", "convolution_grouped"])


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three schedules of a few TEs in small sizes."""
    if find_nvcc() is None:
        pytest.skip("no nvcc")
    folder = tmp_path_factory.mktemp("build")
    command = ["build", "--out", str(folder), "--small", "--schedules", "3", "--cases", *_CASES]
    with pytest.MonkeyPatch.context() as patch:
        if not THOROUGH:
            # nvcc optimizes them for 20 s; that it takes them is in tests/calibrate.
            patch.setattr(cost_against_gpu_build, "machine_code", lambda arch: b"the kernels that measure")
        assert cost_against_gpu.main(command) == 0
    return folder


def _schedules(folder: Path) -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    manifest = json.loads((folder / "manifest.json").read_text())
    return {name: (case, entry) for case in manifest["cases"].values() for name, entry in case["schedules"].items()}


def test_each_case_has_different_schedules_and_the_default_first(built: Path) -> None:
    for name, (case, entry) in _schedules(built).items():
        assert entry["default"] == name.endswith("_0")
        assert entry["resources"]["measured"] and entry["resources"]["registers"] > 0
        assert 0 < entry["predicted"]["warm_us"] <= entry["predicted"]["cold_us"]
        assert case["reference"]["op"]
    values = [tuple(entry["values"].items()) for name, (_, entry) in _schedules(built).items() if "gemm" in name]
    assert len(set(values)) == len(values) == 3


def test_a_product_in_many_tilings() -> None:
    device, case = cost_device("A100-SXM4-40GB"), product_tilings.case_of("48x32x80")
    found, _ = product_tilings.sampled(case, device, cuda_target(device.arch), 2, 1, 0)
    assert len({tuple(one.values.items()) for one in found}) == len(found) >= 2
    assert [one.default for one in found] == [True] + [False] * (len(found) - 1)
    with pytest.raises(SystemExit, match="'48x32' is no product"):
        product_tilings.case_of("48x32")


def test_predictions_are_those_of_the_stage() -> None:
    device = cost_device("A100-SXM4-40GB")
    case = next(case for case in cases(True) if case.name == "gemm")
    found, _ = cost_against_gpu_build.sampled(case, device, cuda_target(device.arch), 2, 0)
    again, _ = cost_against_gpu_build.sampled(case, device, cuda_target(device.arch), 2, 0)
    assert [one.values for one in found] == [one.values for one in again]
    for one in found:
        used = StageResources(40, 0, one.function.shared_bytes, one.function.threads, 0, True)
        entry = {
            "work": vars(cost_against_gpu_build.work_of(one.function)), "tiles": one.function.tiles,
            "resources": vars(used),
        }  # fmt: skip
        predicted = cost_against_gpu_build.predictions(entry, one.nbytes, device)
        for mode in ("warm", "cold"):
            whole = predict_stage((one.function,), device, used, warm=mode == "warm")
            assert predicted[f"{mode}_us"] == pytest.approx(whole.seconds * 1e6, abs=1e-4)


def test_packed_and_rehearsed_without_the_compiler(built: Path, tmp_path: Path) -> None:
    packed, blocked, out = tmp_path / "packed", tmp_path / "blocked", tmp_path / "out"
    assert cost_against_gpu.main(["pack", "--in", str(built), "--to", str(packed)]) == 0
    assert cost_against_gpu.main(["pack", "--in", str(built), "--to", str(packed)]) == 2
    assert cost_against_gpu.main(["pack", "--in", str(built), "--to", str(out), "--max-mib", "0.1"]) == 1
    blocked.mkdir()
    (blocked / "sitecustomize.py").write_text(_RUNTIME_ONLY)
    command = [sys.executable, "-m", "benchmarks.cost_against_gpu", "rehearse", "--in", "build"]
    results = tmp_path / "results"
    done = subprocess.run(
        [*command, "--out", str(results)], cwd=packed, env={**os.environ, "PYTHONPATH": str(blocked)},
        capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr + done.stdout
    found = json.loads((results / "results.json").read_text())
    names = set(_schedules(built))
    assert set(found["checks"]) == names == {row["name"] for row in found["schedules"]}
    assert all(check["ok"] and check["of_tolerance"] <= 1 for check in found["checks"].values())
    assert found["rounds"] == 2 and not found["failed"] and found["rehearsal"]
    assert "times mean nothing" in done.stdout and "mean of the TEs" in done.stdout
    for mode in ("warm", "cold"):
        circles = ElementTree.parse(results / f"{mode}.svg").iter("{http://www.w3.org/2000/svg}circle")
        assert len(list(circles)) == len(names) + len(_CASES)
    # What was measured describes the device, for which the same build is then predicted.
    before = {name: entry["predicted"] for name, (_, entry) in _schedules(packed / "build").items()}
    device = str(results / "device.json")
    assert cost_against_gpu.main(["predict", "--in", str(packed / "build"), "--device", device]) == 0
    assert all(entry["predicted"] != before[name] for name, (_, entry) in _schedules(packed / "build").items())
    assert cost_against_gpu.main(["report", "--in", str(packed / "build"), "--out", str(results)]) == 0
    assert json.loads((results / "results.json").read_text())["predicted_for"].endswith("-measured")


def test_a_wrong_schedule_is_found_and_not_timed(
    built: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = tmp_path / "wrong"
    assert cost_against_gpu.main(["pack", "--in", str(built), "--to", str(wrong)]) == 0
    (text,) = (wrong / "build").glob("gemm-0.cu")
    # It leaves out its last tile.
    changed, count = re.subn(
        r"< (\d+)\) \{(\s+)gemm_1_tile0\(", lambda m: f"< {int(m[1]) - 1}) {{{m[2]}gemm_1_tile0(", text.read_text()
    )
    assert count == 1
    text.write_text(changed)
    command = ["rehearse", "--in", str(wrong / "build"), "--out", str(tmp_path / "out"), "--rounds", "1"]
    status = cost_against_gpu.main(command)
    found = json.loads((tmp_path / "out" / "results.json").read_text())
    assert status == 1 and not found["checks"]["gemm_1"]["ok"]
    assert "gemm_1" not in found["times"] and "gemm_2" in found["times"]
    assert "WRONG gemm_1" in capsys.readouterr().out


def test_no_gpu_ends_the_run_at_once(built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert cost_against_gpu.main(["run", "--in", str(built), "--out", str(tmp_path)]) == 1
    found = json.loads((tmp_path / "results.json").read_text())
    assert list(found["failed"]) == ["start"] and not found["schedules"]


# references


@pytest.mark.parametrize("case", cases(True), ids=lambda case: case.name)
def test_numpy_computes_what_the_case_does(case: Any) -> None:
    tvm = pytest.importorskip("tvm")
    tensors = case.build()
    generator = np.random.default_rng(0)
    arrays = [generator.standard_normal([int(e) for e in t.shape]).astype(str(t.dtype)) for t in tensors]
    run = tvm.compile(tvm.te.create_prim_func(tensors), target="llvm")
    given = [tvm.runtime.tensor(array) for array in arrays]
    run(*given)
    expected = reference(case.reference, arrays[:-1], str(tensors[-1].dtype))
    limit = 1e-4 if expected.dtype == np.float32 else 2e-2
    np.testing.assert_allclose(given[-1].numpy(), expected, rtol=limit, atol=limit * np.abs(expected).max())


# ranks


def _rows(case: str, measured: list[float], predicted: list[float]) -> list[dict[str, Any]]:
    return [
        {"case": case, "name": f"{case}_{number}", "rule": "r", "default": number == 0, "warm_us": m,
         "warm_predicted_us": p, "warm_bound": "chain"}
        for number, (m, p) in enumerate(zip(measured, predicted, strict=True))
    ]  # fmt: skip


def test_rank_correlations_by_te_and_over_all() -> None:
    rows = _rows("up", [1, 2, 3, 4, 5], [10, 20, 30, 40, 50]) + _rows("down", [10, 20, 40, 80, 160], [5, 4, 3, 2, 1])
    rows += _rows("few", [1.0, 2.0], [2.0, 1.0])
    up, down, few, every, mean = summary(rows, "warm")
    assert (up["spearman"], up["choice"], up["default"], up["ratio"]) == (1, 1, 1, 10)
    assert (down["spearman"], down["choice"], down["default"]) == (-1, 16, 1)
    assert math.isnan(few["spearman"]) and few["choice"] == 2
    assert every["schedules"] == 12 and every["choice"] == pytest.approx(32 ** (1 / 3), abs=1e-3)
    assert mean["spearman"] == 0
    assert summary([], "warm") == []


def test_outliers_are_farthest_from_the_median_of_their_te() -> None:
    rows = _rows("a", [1.0] * 5, [10.0, 10, 10, 10, 40]) + _rows("b", [1.0] * 5, [1.0, 1, 1, 1, 0.5])
    assert [row["name"] for row in outliers(rows, "warm", 2)] == ["a_4", "b_4"]


def test_medians_over_rounds_are_joined_with_predictions() -> None:
    entry = {"rule": "r", "default": True, "predicted": {"warm_us": 2.0, "cold_us": 3.0, "warm_bound": "l2",
                                                         "cold_bound": "memory"}}  # fmt: skip
    manifest = {"cases": {"te": {"schedules": {"te_0": entry, "te_1": entry}}}}
    (row,) = joined(manifest, {"te_0": {"warm_us": [5.0, 1.0, 2.0], "cold_us": [4.0, 4.0, 9.0]}})
    assert (row["warm_us"], row["cold_us"], row["cold_spread"]) == (2.0, 4.0, 0.625)
    svg = ElementTree.fromstring(plot([row], "warm", "a < b & c"))
    assert any(text.text == "a < b & c" for text in svg.iter("{http://www.w3.org/2000/svg}text"))
    results = {"rehearsal": False, "name": "GPU", "checks": {"te_0": {"ok": False, "error": "off"}}, "failed": {},
               "schedules": [row], "rounds": 3, "predicted_for": "P", "correlation": {"warm": summary([row], "warm")},
               "outliers": {"warm": [row]}}  # fmt: skip
    assert "WRONG te_0" in table(results) and "1 wrong" in table(results)


def test_ranks_of_equal_values_are_shared_and_of_nothing_are_none() -> None:
    assert rank_correlation([1, 2, 2, 3], [1, 2, 2, 3]) == pytest.approx(1)
    assert math.isnan(rank_correlation([1, 2], [1, 2])) and math.isnan(rank_correlation([1, 1, 1], [1, 2, 3]))
    low, high = (3.0, 3.0), (4.0, 5.0)
    marks = [(*low, "k", "one"), (*high, "k", "two")]
    circles = list(ElementTree.fromstring(scatter(marks, {"k": "red"}, "t", "x", "y")).iter())
    places = [(c.get("cx"), c.get("cy")) for c in circles if c.get("fill-opacity")]
    assert float(places[0][0]) == pytest.approx(480 * math.log10(3), abs=0.1)
    assert float(places[1][1]) == pytest.approx(480 * (1 - math.log10(5)), abs=0.1)
