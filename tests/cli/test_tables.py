"""``souffle ablate`` and ``souffle reproduce`` as commands: files that they keep, go on with, and do not write over."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from xml.etree import ElementTree

import pytest

import souffle
from souffle.cli import ablate, reproduce
from souffle.cli.interruption import INTERRUPTED
from souffle.cli.main import main
from souffle.evaluation.network_rows import Planned, task_data
from souffle.evaluation.result_file import source_digest
from souffle.options import LEVELS
from souffle.workers import Job, engine_for
from tests.test_bad_input import one_node


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (ablate, reproduce):
        monkeypatch.setattr(module, "gpu_arch", lambda: None)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model.onnx"
    path.write_bytes(one_node("Softmax", [4, 8]).SerializeToString())
    return path


def compiled_levels(monkeypatch: pytest.MonkeyPatch, interrupt_at: str = "") -> list[str]:
    """Levels as they are compiled, and a Ctrl-C in one of them."""
    real, seen = souffle.compile, []

    def compile(*args: object, level: str, **options: object):
        seen.append(level)
        if level == interrupt_at:
            os.kill(os.getpid(), signal.SIGINT)
        return real(*args, level=level, **options)

    monkeypatch.setattr(souffle, "compile", compile)
    return seen


def test_ablate_goes_on_where_it_was_interrupted(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    out, picture = tmp_path / "rows.json", tmp_path / "bars.svg"
    command = ["ablate", str(model), "--no-cubin", "--quiet", "--out", str(out), "--plot", str(picture)]
    with monkeypatch.context() as patch:
        seen = compiled_levels(patch, interrupt_at="V2")
        assert main(command) == INTERRUPTED
    assert seen == ["V0", "V1", "V2"] and capsys.readouterr().err == "souffle: interrupted\n"
    assert [row["level"] for row in json.loads(out.read_text())["results"]] == ["V0", "V1"]
    with monkeypatch.context() as patch:
        seen = compiled_levels(patch)
        assert main([*command, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert seen == ["V2", "V3", "V4"] and [row["level"] for row in rows] == list(LEVELS)
    ElementTree.fromstring(picture.read_text())
    # Another model under the same name has none of these rows.
    model.write_bytes(one_node("Softmax", [4, 9]).SerializeToString())
    with monkeypatch.context() as patch:
        seen = compiled_levels(patch)
        assert main([word for word in command if word != "--quiet"]) == 0
    assert seen == list(LEVELS) and "model.onnx has changed" in capsys.readouterr().err


def test_ablate_has_rows_of_planners(model: Path, capsys: pytest.CaptureFixture) -> None:
    planners = "xla-rules,no.such:planner"
    status = main(["ablate", str(model), "--no-cubin", "--no-run", "--quiet", "--json", "--planners", planners])
    rows = json.loads(capsys.readouterr().out)
    assert status == 1 and [row["label"] for row in rows][5:7] == ["V0, xla-rules", "V4, xla-rules"]
    assert rows[5]["fusion"] == "xla-rules" and "no.such" in rows[7]["failed"]


@pytest.mark.parametrize(("option", "name"), [("--out", "model.onnx"), ("--plot", "model.onnx")])
def test_ablate_does_not_write_over_the_model(
    option: str, name: str, model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    before = model.read_bytes()
    seen = compiled_levels(monkeypatch)
    assert main(["ablate", str(model), "--no-cubin", "--quiet", option, str(model)]) == 2
    assert "--force" in capsys.readouterr().err and model.read_bytes() == before and not seen


def test_compile_replaces_its_own_and_nothing_else(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    command = ["compile", str(model), "--no-cubin", "--quiet", "-o"]
    out = tmp_path / "model.souffle"
    assert main([*command, str(out)]) == 0 and main([*command, str(out)]) == 0
    before = model.read_bytes()
    seen = compiled_levels(monkeypatch)
    assert main([*command, str(model)]) == 2 and not seen
    assert f"{len(before):,} bytes that are not a .souffle or .npz archive" in capsys.readouterr().err
    assert model.read_bytes() == before
    assert main([*command, str(model), "--force"]) == 0 and model.read_bytes() != before


_WORK = "tests.evaluation.played_rows:order"


@pytest.mark.parametrize("where", [["--jobs", "1"], ["--on", "here"]])
def test_reproduce_makes_tables_and_goes_on(
    where: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(reproduce, "WORK", _WORK)
    folder = tmp_path / "tables"
    command = ["reproduce", "learning-table1", "hfuse-figure8", "--size", "tiny", "--out", str(folder), *where]
    assert main([*command, "--evaluations", "2"]) == 0
    captured = capsys.readouterr()
    assert "AmoebaNet, 2 GPUs" in captured.out and "measured: on " in captured.out and "4 of 4 rows" in captured.err
    names = {path.name for path in folder.iterdir()}
    assert names == {"rows.json", "tables.md", "learning-table1.json", "hfuse-figure8.json"}
    table = json.loads((folder / "hfuse-figure8.json").read_text())
    assert table["format"] and table["results"] and table["unit"]
    assert main([*command, "--evaluations", "2", "--json"]) == 0
    captured = capsys.readouterr()
    assert "4 rows of" in captured.err and "of 4 rows" not in captured.err
    assert [one["table"] for one in json.loads(captured.out)] == ["learning-table1", "hfuse-figure8"]
    assert main([*command, "--on", "there"]) == 2
    complaint = "no engine 'there'" if where[0] == "--on" else "leave --jobs out"
    assert complaint in capsys.readouterr().err


def test_reproduce_keeps_what_is_made_before_an_interrupt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(reproduce, "WORK", _WORK)
    interrupt = tmp_path / "interrupt"
    monkeypatch.setenv("PLAYED_INTERRUPT", str(interrupt))
    command = ["reproduce", "learning-table1", "--quiet", "--out", str(tmp_path / "tables"), "--jobs", "1"]
    # Of all but the first one.
    interrupt.write_text("amoebanet")
    assert main(command) == INTERRUPTED
    captured = capsys.readouterr()
    assert captured.err == "souffle: interrupted\n" and captured.out == ""
    kept = json.loads((tmp_path / "tables" / "rows.json").read_text())["results"]
    assert len(kept) == 1 and kept[0]["us"]["none"] == 12.0
    interrupt.unlink()
    assert main(command[:2] + command[3:]) == 0
    assert "souffle: 1 rows of" in capsys.readouterr().err


def test_the_worker_makes_rows() -> None:
    task = Planned("mmoe", "tiny", ("tvm",), "V100-PCIE-16GB")
    with engine_for("local:1") as engine:
        job = Job(reproduce.WORK, {"task": task_data(task), "measures": False}, "a row")
        made = engine.submit(job).result()
    assert not made.failure and made.value["row"]["planners"]["tvm"]["kernels"] > 1
    assert made.value["source"] == source_digest() and made.value["device"] is None


def test_reproduce_leaves_a_folder_of_something_else_alone(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    page = tmp_path / "tables.md"
    page.write_text("my own")
    command = ["reproduce", "hfuse-figure8", "--quiet", "--out", str(tmp_path)]
    assert main(command) == 2 and page.read_text() == "my own"
    assert "has tables.md" in capsys.readouterr().err
    assert main([*command, "--force"]) == 0 and "Kernels alone" in page.read_text()
    assert main(command) == 0


def test_reproduce_knows_its_tables(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert main(["reproduce", "table9", "--out", str(tmp_path)]) == 2
    assert "there is no table 'table9'; there are table3" in capsys.readouterr().err
