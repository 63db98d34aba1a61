"""What ends badly in a search costs its candidate and nothing else; what is killed goes on."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

import pytest

from souffle.cost import device_of_arch
from souffle.pipeline import stages_of
from souffle.schedule.gpu import GpuRequest
from souffle.schedule.log import RECORDS, TuningLog
from souffle.schedule.lower import cuda_target
from souffle.tuning import Limits, LogWriter, PredictingBench, search, tasks_of
from souffle.tuning.bench import Figures, built_figures
from souffle.tuning.candidate import kernel_name
from souffle.workers import Engine, Job, Outcome, WorkersLostError, engine_for
from tests.thorough import sized, some
from tests.tuning.networks import APART, gemm, tuned
from tests.workers.processes import marked, new_mark

ARCH = "sm_90"
DEVICE = device_of_arch(ARCH)
TRIALS = sized(8, 16)
pytestmark = pytest.mark.xdist_group("search")


@pytest.fixture(scope="module")
def tasks():
    return tasks_of([stages_of(gemm(), cubin=False, **APART)])[:1]


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with engine_for("local:2") as both:
        yield both


def run(tasks, folder: Path, engine: Engine, *, bench=None, limits: Limits | None = None, writer=LogWriter):
    return search(
        tasks,
        trials=TRIALS,
        request=GpuRequest(ARCH),
        cost_device=DEVICE,
        bench=bench or PredictingBench(DEVICE.product, nvcc=False),
        writer=writer(folder, ARCH, cuda_target(ARCH)),
        engine=engine,
        limits=limits,
    )


def records(folder: Path) -> bytes:
    return (folder / ARCH / RECORDS).read_bytes()


@pytest.fixture(scope="module")
def undisturbed(tasks, tmp_path_factory) -> bytes:
    folder = tmp_path_factory.mktemp("undisturbed")
    with engine_for("here") as here:
        run(tasks, folder, here)
    return records(folder)


class Failing(PredictingBench):
    """Has candidates built, one of which ends badly in whatever company."""

    def __init__(self, failing: str, how: str) -> None:
        super().__init__(DEVICE.product)
        self.fails = (failing, how)

    def figures(self, stage, candidates, own):
        found = yield from built_figures(
            stage, "tests.tuning.failing_jobs:figures", candidates, {"fails": list(self.fails)}
        )
        return [
            Figures(problem=one["problem"]) if one["problem"] else Figures(tuple(one["seconds"])) for one in found
        ]


@pytest.mark.parametrize(
    ("how", "reason"),
    some(
        [("dies", "SIGKILL")],
        [
            ("takes all memory", "MemoryError|memory"),
            ("gives no number", "the time nan"),
            ("hangs", "longer than"),
            ("gives too few", "for 1 candidates"),
        ],
    ),
)
def test_one_candidate_fails_and_no_other(tasks, tmp_path, undisturbed, engine, how, reason) -> None:
    lines = [json.loads(line) for line in undisturbed.splitlines()]
    worse = next(line for line in lines if line["rule"] != "metaschedule" and line.get("trial", 0) in range(2, 6))
    failing = json.dumps([worse["rule"], sorted(worse["knobs"].items())])
    limits = Limits(8.0 if how == "hangs" else 120.0, 3000)
    report = run(tasks, tmp_path, engine, bench=Failing(kernel_name(failing), how), limits=limits)
    assert report.lost >= 1
    found = TuningLog(tmp_path / ARCH, ARCH).records
    assert len(found) == TRIALS == report.new_trials
    failed = [record for record in found if record.failed]
    assert [record.recipe.key for record in failed] == [failing]
    assert any(word in failed[0].origin.problem for word in reason.split("|")), failed[0].origin.problem


def test_workers_are_killed_and_nothing_is_lost(tasks, tmp_path, undisturbed, monkeypatch) -> None:
    mark, killed = new_mark(monkeypatch), []

    class Killing(LogWriter):
        """Ends all workers whenever there is something to write."""

        def append(self, func, records, name="") -> None:
            for worker in marked(mark):
                os.kill(worker, signal.SIGKILL)
                killed.append(worker)
            super().append(func, records, name)

    with engine_for("local:2") as others:
        report = run(tasks, tmp_path, others, writer=Killing)
    assert len(killed) >= 2 and not report.interrupted
    assert records(tmp_path) == undisturbed


@pytest.mark.thorough("one that is stopped is in tests/tuning/test_search.py")
def test_a_killed_driver_goes_on_and_ends_as_without(tmp_path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    tuned(whole, TRIALS)
    process = subprocess.Popen([sys.executable, "-m", "tests.tuning.networks", str(parts), str(TRIALS)])
    path = parts / ARCH / RECORDS
    while process.poll() is None:
        if path.is_file() and path.read_bytes().count(b"\n") >= TRIALS // 2:
            process.kill()
            break
        time.sleep(0.01)
    assert process.wait(timeout=120) == -signal.SIGKILL
    assert TRIALS // 2 <= records(parts).count(b"\n") < records(whole).count(b"\n")
    tuned(parts, TRIALS)
    assert records(parts) == records(whole)


def test_two_drivers_on_one_log(tmp_path) -> None:
    trials = TRIALS // 2
    command = [sys.executable, "-m", "tests.tuning.networks", str(tmp_path / "both"), str(trials)]
    both = [subprocess.Popen([*command, str(seed)]) for seed in (1, 2)]
    assert [process.wait(timeout=120) for process in both] == [0, 0]
    log = TuningLog(tmp_path / "both" / ARCH, ARCH)
    assert not log.problems and len(log.table.workloads) == 2
    keys = [(record.workload, record.recipe.key, record.origin.trial) for record in log.records]
    assert len(keys) == len(set(keys)) >= 2 * trials


def test_workers_that_are_lost_leave_no_trace(tasks, tmp_path, undisturbed, monkeypatch) -> None:
    """Futures in flight end with the workers: what they were asked for is not written down as what cannot be used."""
    monkeypatch.setattr("souffle.tuning.session.BATCH", 2)  # so that some are written before others

    class Lost:
        """An engine that loses its workers after some jobs, those that are waited for first."""

        name, workers = "lost", 1

        def __init__(self, engine: Engine, jobs: int) -> None:
            self.engine, self.left, self.share = engine, jobs, engine.share

        def submit(self, job: Job, check=None) -> Future[Outcome]:
            self.left -= 1
            if self.left >= 0:
                return self.engine.submit(job, check)
            future: Future[Outcome] = Future()
            future.set_exception(WorkersLostError("the head has ended"))
            return future

    written = []
    with engine_for("here") as here:
        for jobs in range(1, 400, 9):
            try:
                run(tasks, tmp_path, Lost(here, jobs), bench=PredictingBench(DEVICE.product, nvcc=False))
            except WorkersLostError as error:
                assert re.search(r"head has ended; what was found is in .*same command goes on", str(error))
                written.append(TuningLog(tmp_path / ARCH, ARCH).records)
            else:
                break
        assert not any(record.failed for records in written for record in records)
        assert len(written) > 3 and written[-1]
        run(tasks, tmp_path, here)
    assert records(tmp_path).count(b"\n") == undisturbed.count(b"\n")


def test_a_stage_that_no_worker_can_sketch_says_so(tasks, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("souffle.tuning.stage_search._WORK", "tests.tuning.no_such_module")
    with engine_for("here") as here:
        report = run(tasks, tmp_path, here)
    assert report.tasks[0].trials == 0 and "no_such_module" in report.tasks[0].best
