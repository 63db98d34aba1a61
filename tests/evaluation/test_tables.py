"""The papers' tables: every cell of ours says how it was had, and what the papers report stands in one file."""

from __future__ import annotations

import json
from typing import Any

import pytest

from benchmarks import gpu_records as gathering
from souffle import models
from souffle.evaluation.cells import ABSENT, Cell, Line, PaperTable
from souffle.evaluation.gpu_records import RECORDS, gpu_records, latest_record
from souffle.evaluation.network_rows import Benched, Compiled, Ordered, Planned, Task, task_data, task_key, task_of
from souffle.evaluation.published import published, table_names
from souffle.evaluation.setting import Setting
from souffle.evaluation.tables import TABLES
from souffle.stitching import fusion_planner_for

NO_GPU = Setting("paper", "sm_80", True, None, "2026-01-02")
ON_GPU = Setting("paper", "sm_90", True, "a GPU", "2026-01-02")


def made(task: Task) -> dict[str, Any]:
    """A row as tasks give them, with numbers that are told apart."""
    if isinstance(task, Compiled):
        level = int(task.level[1])
        row = {"level": task.level, "precision": task.precision, "predicted_on": "a product", "launches": 10 - level}
        row |= {"predicted_us": 1000.0 / (1 + level), "compute_us": 3.0, "memory_us": 2.0, "bytes_read": 7 * 10**6}
        row |= {"kernels": 1, "latency_us": 500.0 / (1 + level) if task.gpu else None}
        row |= {"stage_us": [{"stage": "s", "us": 5.0, "runs": 1, "bound": "memory"}]}
        counts = {"read": 10**6 * (1 + level), "written": 0}
        return row | ({"once_per_stage": counts, "once_per_launch": counts} if task.traffic else {})
    if isinstance(task, Planned):
        names = [fusion_planner_for(name).name for name in task.planners]
        of = {"kernels": 8, "memory_kernels": 6, "kernels_us": 4.0, "memory_us": 3.0, "launch_us": 2.0, "patterns": 4}
        of |= {"patterns_with_shared": 2, "shared_patterns_us": 1.0, "shared_requested": 4000, "shared_given": 3000}
        return {"tes": 16, "planners": {name: of | {"shared_most": 2000} for name in names}}
    if isinstance(task, Ordered):
        return {"us": {"none": 12.0, "default": 10.0, "annealing": 8.0, "learned": "PyTorch is needed"}}
    peers = {name: {"version": "1", "reason": "", "graph": 9.0} for name in task.against}
    return {"peers": peers | {"xla": {"version": "", "reason": "it is not installed"}}}


def cells(table: PaperTable) -> list[Cell]:
    return [cell for line in table.lines if not line.whose.startswith("paper") for cell in line.cells if cell.how]


def test_there_is_a_table_for_all_that_is_published() -> None:
    assert set(TABLES) == set(table_names())
    for name in table_names():
        about = published(name)
        for row in about["rows"]:
            assert row.get("network") in (None, *models.ALL_NAMES), (name, row)
            assert len(row["cells"]) == len(about["columns"]), (name, row)


@pytest.mark.parametrize("setting", [NO_GPU, ON_GPU], ids=["no GPU", "GPU"])
@pytest.mark.parametrize("name", list(TABLES))
def test_every_cell_of_ours_says_how_it_was_had(name: str, setting: Setting) -> None:
    known = {task_key(task): made(task) for task in TABLES[name].tasks(setting)}
    table = TABLES[name].table(setting, lambda task: known.get(task_key(task)))
    assert table.lines and all(len(line.cells) == len(table.columns) for line in table.lines)
    own = cells(table)
    assert own and all(cell.note for cell in own), "a cell without a note"
    assert all((cell.value is None) == (cell.how == ABSENT) for cell in own)
    header, rows, notes = table.text_rows()
    assert all(len(row) == len(header) for row in rows) and notes
    json.dumps(table.data(), allow_nan=False)
    # Nothing that was asked for is left unused: what is not made would show.
    assert not any(cell.note == "not made in this run" for cell in own)


@pytest.mark.parametrize("name", list(TABLES))
def test_what_was_not_made_or_failed_is_said(name: str) -> None:
    table = TABLES[name].table(NO_GPU, lambda task: None)
    failed = TABLES[name].table(NO_GPU, lambda task: {"failed": "no nvcc"})
    if TABLES[name].tasks(NO_GPU):
        assert any(cell.note == "not made in this run" for cell in cells(table))
        assert any(cell.note == "no nvcc" for cell in cells(failed))


def test_latencies_are_records_without_a_gpu_and_measured_with_one() -> None:
    name = published("table4")["rows"][0]["network"]
    row = {"latency_us": 1500.0}
    here = ON_GPU.latency(row, name, "V4", "mixed")
    assert (here.value, here.how, here.note) == (1.5, "measured", "on a GPU, 2026-01-02")
    record = latest_record(kind="network", model=name, level="V4", precision="mixed")
    recorded = NO_GPU.latency(row, name, "V4", "mixed")
    assert recorded.value == record["graph_us"] / 1e3 and record["file"] in recorded.note
    assert NO_GPU.latency(row, name, "V9", "mixed").how == ABSENT
    assert Setting("tiny", "sm_80", True, None, "").latency(row, name, "V4", "mixed").how == ABSENT


def test_records_are_those_of_the_files() -> None:
    assert RECORDS.read_text() == gathering.text(gathering.collected()), "python -m benchmarks.gpu_records"
    dates = [record["date"] for record in gpu_records()]
    assert dates == sorted(dates)


@pytest.mark.parametrize(
    "task",
    [
        Compiled("mmoe", "tiny", "V4", "mixed", "sm_80", traffic=True),
        Planned("mmoe", "tiny", ("tvm", "xla-rules"), "V100-PCIE-16GB"),
        Ordered("rnnlm", "tiny", "A100-SXM4-40GB", 20),
        Benched("mmoe", "tiny", "fp32", ("eager",)),
    ],
)
def test_tasks_pass_through_json(task: Task) -> None:
    assert task_of(json.loads(json.dumps(task_data(task)))) == task


def test_cells_with_equal_notes_have_one_letter() -> None:
    about = published("table6")
    notes = [Cell(number, "counted", f"note {number % 30}") for number in range(60)]
    table = PaperTable("table6", about, ("a",), tuple(Line("r", "here", (cell,)) for cell in notes))
    _, rows, said = table.text_rows()
    assert len(said) == 30 and rows[0][2] == "0 a" and rows[30][2] == "30 a" and rows[27][2] == "27 ab"
