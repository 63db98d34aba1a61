"""The workloads at odd sizes: all of them, each a valid network of the sizes that its note says."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

from benchmarks.campaign import read_records
from benchmarks.workload_sizes import BUILDERS, draw, main
from souffle import models
from souffle.cli.compare import onnxruntime_outputs


def test_each_workload_has_its_turn_and_runs() -> None:
    assert tuple(BUILDERS) == models.STITCHING_NAMES
    for seed, name in enumerate(BUILDERS):
        case = draw(seed)
        assert case.note.startswith(f"{name}: ") and case.note != f"{name}: {BUILDERS[name][1]}"
        onnx.checker.check_model(case.model, full_check=True)
        values = onnxruntime_outputs(case.model, case.inputs)
        assert all(np.isfinite(value).all() for value in values.values()), case.note
        assert draw(seed).model.SerializeToString() == case.model.SerializeToString()


def test_some_workloads_alone() -> None:
    notes = [draw(seed, ("nmt", "asr")).note for seed in range(8)]
    assert {note.partition(":")[0] for note in notes} == {"nmt", "asr"}
    assert len(set(notes)) == len(notes)


@pytest.mark.thorough("of all campaigns, tests/benchmarks/test_campaign.py has it")
def test_a_campaign_of_them_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.jsonl"
    options = ["--models", "layer-norm", "logistic", "--targets", "V0", "--on", "here", "--out", str(out)]
    assert main([*options, "--seeds", "3:4"]) == 0
    assert main([*options, "--seeds", "2:4"]) == 0
    records = read_records(out)
    assert [(record["seed"], record["note"].partition(":")[0]) for record in records] == [
        (2, "layer-norm"),
        (3, "logistic"),
    ]
    assert all(list(record["outcomes"]) == ["V0"] for record in records)
    assert "2 cases: {'right': 2}" in capsys.readouterr().out
