"""The commands that make mutants of whole models."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import onnx
import pytest

from benchmarks.campaign import read_records, without_times
from benchmarks.mutation import __main__ as mutation
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


MMOE = ["--models", "mmoe", "--levels", "V3", "--precisions", "fp32"]


def test_a_campaign_goes_on_where_it_stopped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mutants.jsonl"
    options = [*MMOE, "--json", str(path), "--on", "here"]
    assert mutation.main([*options, "--mutants", "2"]) == 0
    first = read_records(path)
    assert len(first) == 2
    assert mutation.main([*options, "--mutants", "3"]) == 0
    assert len(read_records(path)) == 3 and all(record in read_records(path) for record in first)
    done = capsys.readouterr()
    assert ", 2 to try" in done.err and ", 1 to try" in done.err
    assert "changed, not refuted" in done.out
    assert any(line.split()[:2] == ["all", "3"] for line in done.out.splitlines())


@pytest.mark.thorough("of all campaigns, tests/benchmarks/test_campaign.py has it")
def test_all_workers_give_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found, printed = [], []
    for word in ("here", "local:2"):
        out = tmp_path / f"{word}.jsonl"
        options = ["--models", "mmoe", "--levels", "V0", "V3", "--precisions", "fp32", "--mutants", "4"]
        assert mutation.main([*options, "--open", "--on", word, "--json", str(out)]) == 0
        found.append(without_times(read_records(out)))
        printed.append(capsys.readouterr().out.rpartition("misses")[0])
    assert found[0] == found[1] and printed[0] == printed[1]
    assert [one["network"].split()[1] for one in found[0]] == ["V0", "V0", "V3", "V3"]


@pytest.mark.thorough("of all campaigns, tests/benchmarks/test_campaign.py has it")
def test_what_cannot_be_tried_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(mutation, "WORK", "tests.benchmarks.deadly_work")
    out = tmp_path / "out.jsonl"
    options = ["--models", "mmoe", "--levels", "V0", "V3", "--precisions", "fp32", "--timeout", "1.5"]
    options += ["--json", str(out), "--mutants", "8"]
    assert mutation.main([*options, "--workers", "2"]) == 1
    records = read_records(out)
    assert [(r["network"], r.get("mutation", {}).get("number"), r.get("failed"), r.get("detail")) for r in records] == [
        ("mmoe V0 fp32 counter", None, "crash", "its worker ended with signal SIGABRT (it had 8192 MB)"),
        ("mmoe V3 fp32 counter", 0, None, "tried"),
        ("mmoe V3 fp32 counter", 1, "crash", "its worker ended with signal SIGABRT (it had 8192 MB)"),
        ("mmoe V3 fp32 counter", 2, "timeout", "took longer than 1.5 s"),
        ("mmoe V3 fp32 counter", 3, None, "at the second try"),
    ]
    printed = capsys.readouterr().out
    assert "mmoe V0 fp32 counter, as a whole: crash: its worker ended" in printed
    assert "mmoe V3 fp32 counter, index/off by one/k/s/2: timeout: took longer" in printed
    # The network as a whole is tried again; mutants are known.
    monkeypatch.undo()
    assert mutation.main([*options, "--timeout", "300", "--levels", "V0", "--mutants", "1", "--on", "here"]) == 0
    after = read_records(out)
    assert after[1:] == records[1:] and after[0]["network"] == "mmoe V0 fp32 counter" and after[0]["verdict"]


def test_a_thorough_campaign_over_files_runs_what_is_not_refuted(tmp_path: Path) -> None:
    path, out = tmp_path / "small.onnx", tmp_path / "mutants.jsonl"
    onnx.save(models.build("mmoe"), path)
    options = ["--models", "--files", str(path), "--levels", "persistent", "--precisions", "mixed", "--mutants", "6"]
    assert mutation.main([*options, "--thorough", "--open", "--json", str(out), "--on", "here"]) == 0
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
