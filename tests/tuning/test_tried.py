"""A log that was pruned remembers what was tried: a search counts it, and tries none of it again."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from souffle.cli.main import main
from souffle.cost import device_of_arch
from souffle.pipeline import stages_of
from souffle.schedule.gpu import GpuRequest
from souffle.schedule.log import TRIED, TuningLog
from souffle.schedule.lower import cuda_target
from souffle.schedule.tried import KnownRecipes, Tried, mark_of, tried_line, tried_of, united
from souffle.tuning import LogWriter, PredictingBench, TuningReport, search, tasks_of
from souffle.tuning.log_work import merge, prune
from souffle.workers import engine_for
from tests.tuning.networks import APART, gemm

ARCH = "sm_90"
TARGET = cuda_target(ARCH)
DEVICE = device_of_arch(ARCH)
TRIALS = 12


@pytest.fixture(scope="module")
def tasks():
    return tasks_of([stages_of(gemm(), cubin=False, **APART)])


def run(tasks, folder: Path, trials: int) -> TuningReport:
    with engine_for("here") as engine:
        return search(
            tasks,
            trials=trials,
            request=GpuRequest(ARCH),
            cost_device=DEVICE,
            bench=PredictingBench(DEVICE.product, nvcc=False),
            writer=LogWriter(folder, ARCH, TARGET),
            engine=engine,
        )


@pytest.fixture(scope="module")
def whole(tasks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A log of a search."""
    folder = tmp_path_factory.mktemp("whole")
    assert all(task.new_trials == TRIALS for task in run(tasks, folder, TRIALS).tasks)
    return folder


@pytest.fixture
def pruned(whole: Path, tmp_path: Path) -> Path:
    """The same with one record of each stage at most."""
    folder = tmp_path / "pruned"
    shutil.copytree(whole, folder)
    assert len(prune(log_in(folder), 1).records) <= 2
    return folder


def log_in(folder: Path) -> TuningLog:
    return TuningLog(folder / ARCH, ARCH)


def keys(folder: Path) -> set[tuple[str, str]]:
    return {(record.workload, record.recipe.key) for record in log_in(folder).records}


@pytest.mark.thorough("what was tried survives below")
def test_a_search_goes_on_from_a_pruned_log(tasks, whole: Path, pruned: Path) -> None:
    again = run(tasks, pruned, TRIALS)
    assert [task.new_trials for task in again.tasks] == [0, 0] and [task.trials for task in again.tasks] == [TRIALS] * 2
    kept, tried = keys(pruned), keys(whole)
    more = run(tasks, pruned, TRIALS + 5)
    assert [task.new_trials for task in more.tasks] == [5, 5]
    assert [task.new_trials for task in run(tasks, pruned, TRIALS + 5).tasks] == [0, 0]
    # But for the rules' own schedules, which others are compared with, nothing is tried a second time.
    own = {(record.workload, record.recipe.key) for record in log_in(whole).records if record.origin.trial == 0}
    assert not ((keys(pruned) - kept) & tried) - own
    assert all(task.own_seconds and task.best_seconds <= task.own_seconds for task in more.tasks)


def test_what_was_tried_survives_what_is_done_with_logs(tasks, whole: Path, pruned: Path, tmp_path: Path) -> None:
    marks = {one.place: one.marks for one in log_in(pruned).tried}
    assert sum(map(len, marks.values())) == 2 * TRIALS - len(log_in(pruned).records)
    before = (pruned / ARCH / TRIED).read_bytes()
    prune(log_in(pruned), 1)
    assert (pruned / ARCH / TRIED).read_bytes() == before
    elsewhere = prune(log_in(whole), 1, tmp_path / "elsewhere")
    assert (elsewhere.folder / TRIED).read_bytes() == before
    # Together with all records, or with itself, it is what it was.
    (both,) = merge([log_in(pruned), log_in(whole), log_in(pruned)], tmp_path / "both")
    assert {one.place: one.marks for one in both.tried} == marks and len(both.records) == 2 * TRIALS
    assert [task.new_trials for task in run(tasks, tmp_path / "both", TRIALS).tasks] == [0, 0]
    assert [task.new_trials for task in run(tasks, tmp_path / "both", TRIALS + 1).tasks] == [1, 1]


def test_damaged_lines_are_named_and_skipped(tasks, pruned: Path, capsys: pytest.CaptureFixture) -> None:
    path = pruned / ARCH / TRIED
    lines = path.read_bytes()
    path.write_bytes(b'{"marks": 3}\n' + lines + lines.splitlines()[0][:40])
    log = log_in(pruned)
    assert list(log.tried) == united(tried_of(json.loads(line), ARCH) for line in lines.splitlines())
    assert [problem.where for problem in log.problems] == [f"{path}:1", f"{path}:{len(lines.splitlines()) + 2}"]
    assert main(["log", "verify", str(pruned), "--quiet"]) == 1
    said = capsys.readouterr().out
    assert f"{path}:1: KeyError" in said and f"{2 * TRIALS - len(log.records)} more were tried" in said
    LogWriter(pruned, ARCH, TARGET).sort()
    assert path.read_bytes() == lines
    assert [task.new_trials for task in run(tasks, pruned, TRIALS).tasks] == [0, 0]


def test_marks_are_of_one_figure_and_one_device(tasks, pruned: Path) -> None:
    (stage, *_) = (task.stage.draft.func for task in tasks)
    log = log_in(pruned)
    assert log.marks_of(stage, "predicted", DEVICE.product)
    assert not log.marks_of(stage, "measured", DEVICE.product) and not log.marks_of(stage, "predicted", "other")


def test_lines_and_known_recipes() -> None:
    marks = frozenset(mark_of(str(number)) for number in range(100))
    assert len(marks) == 100 and {len(mark) for mark in marks} == {4}
    line = tried_line(Tried("abc", "predicted", "H100", marks), ARCH)
    assert line.endswith(b"\n") and len(line) < 100 * 5 + 100
    known = KnownRecipes()
    known.add("0")
    assert known.add_marks(marks) == 99 and "7" in known and "100" not in known
    assert known.has_key("0") and not known.has_key("7")
    assert "100" in known.with_keys({"100"}) and "100" not in known
