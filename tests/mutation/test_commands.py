"""The commands that make mutants of whole models."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import onnx
import pytest

from benchmarks import mutation
from souffle import models
from souffle.cli.main import main
from souffle.mutation.mutants import Mutation
from souffle.mutation.trial import Trial


def test_mutants_of_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mmoe.onnx"
    onnx.save(models.build("mmoe"), path)
    assert main(["mutate", str(path), "--level", "V3", "-n", "3", "--quiet", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["mutants"]
    assert len(found) == 3 and len({m["mutation"]["kind"] for m in found}) == 3
    assert all(m["verdict"] == "REFUTED" for m in found if m["outcome"] not in ("same", "stillborn"))


def test_a_campaign_goes_on_where_it_stopped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mutants.jsonl"
    options = ["--models", "mmoe", "--levels", "V3", "--precisions", "fp32", "--json", str(path)]
    assert mutation.main([*options, "--mutants", "2"]) == 0
    first = path.read_text()
    assert len(first.splitlines()) == 2
    assert mutation.main([*options, "--mutants", "3"]) == 0
    assert path.read_text().startswith(first) and len(path.read_text().splitlines()) == 3
    done = capsys.readouterr()
    assert ", 2 tried" in done.err and ", 1 tried" in done.err
    assert "changed, not refuted" in done.out
    assert any(line.split()[:2] == ["all", "3"] for line in done.out.splitlines())


def test_a_thorough_campaign_over_files_runs_what_is_not_refuted(tmp_path: Path) -> None:
    path, out = tmp_path / "small.onnx", tmp_path / "mutants.jsonl"
    onnx.save(models.build("mmoe"), path)
    options = ["--models", "--files", str(path), "--levels", "persistent", "--precisions", "mixed", "--mutants", "6"]
    assert mutation.main([*options, "--thorough", "--open", "--json", str(out)]) == 0
    found = [json.loads(line) for line in out.read_text().splitlines()]
    assert {one["network"] for one in found} == {"small persistent mixed counter"}
    assert {"number", "statement", "condition", "tensor"} & {one["mutation"]["kind"] for one in found}
    assert all((one["verdict"] == "REFUTED") == (one["outcome"] == "") for one in found)


def test_a_report_of_several_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def line(network: str, number: int, verdict: str, outcome: str) -> str:
        made = Mutation("index", "load", "k", "s", number, "off by one", "a[i]")
        trial = Trial(made, verdict, (), "because", outcome, "", "", "", 1.5)
        return json.dumps({"network": network, **dataclasses.asdict(trial)}) + "\n"

    first, second = tmp_path / "first.jsonl", tmp_path / "second.jsonl"
    first.write_text(line("a", 0, "REFUTED", "") + line("a", 1, "PROVEN", "same"))
    assert mutation.main(["--report", str(first)]) == 0
    assert "misses: 0; trials took 3 s" in capsys.readouterr().out
    second.write_text(line("b", 0, "UNKNOWN", "other bits") + line("b", 1, "UNKNOWN", "same"))
    assert mutation.main(["--report", str(first), str(second)]) == 1
    out = capsys.readouterr().out
    assert any(row.split()[:7] == ["all", "4", "1", "1", "0", "2", "1"] for row in out.splitlines())
    assert "b: index/load/k/s/0: off by one" in out and "misses: 1" in out and "index/load/k/s/1" not in out
