"""What more workers bring a search: ``python -m benchmarks.search_scaling [--local 1 2] [--ray 2] [--played 1 8 64]``.

``--local`` searches with so many processes of this machine, ``--ray`` with so many on a Ray cluster of its own; the
logs are compared byte by byte, and the ratio of candidates a second is to the first of these. ``--played`` plays a
cluster: its workers sleep as long as a job took a process here and then answer as one would, so that what is left of
the time is the driver's. Of it are told how busy workers are, the driver's processor time for a candidate, and the
number of workers that would keep it busy all the time.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from benchmarks.played_workers import played_engine
from benchmarks.record import kept_results, save_results
from souffle import models
from souffle.cli.output import format_table
from souffle.cost import CostDevice
from souffle.frontend.model_options import ModelOptions
from souffle.pipeline import stages_of
from souffle.schedule.gpu import GpuRequest
from souffle.schedule.gpu.device import device_for
from souffle.schedule.gpu.scheduler import gpu_request
from souffle.schedule.lower import cuda_target
from souffle.tuning import LogWriter, PredictingBench, Task, TuningReport, cost_device_for, search, tasks_of
from souffle.versions import programs_of
from souffle.workers import Check, Engine, Job, Outcome, engine_for

_NAMES = ("records.jsonl", "workloads.jsonl")


class Watched:
    """An engine that writes down how long the jobs of each function ran.

    Parameters
    ----------
    engine : Engine
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.name = engine.name
        self.seconds: dict[str, list[float]] = defaultdict(list)
        self.values: dict[str, list[Any]] = defaultdict(list)

    @property
    def workers(self) -> int:
        """Of the engine."""
        return self.engine.workers

    def share(self, data: bytes) -> str:
        """As the engine does."""
        return self.engine.share(data)

    def submit(self, job: Job, check: Check | None = None) -> Future[Outcome]:
        """As the engine does."""
        future = self.engine.submit(job, check)
        future.add_done_callback(lambda done: self._keep(job, done))
        return future

    def _keep(self, job: Job, done: Future[Outcome]) -> None:
        if not done.cancelled():
            self.seconds[job.function].append(done.result().seconds)
            self.values[job.function].append(done.result().value)


class _Drawn:
    """Numbers from 0 to 1 that depend on a job alone. A job is looked at once, which takes longer than all else."""

    def __init__(self) -> None:
        self._digests: dict[int, bytes] = {}

    def __call__(self, word: object, job: Job) -> float:
        """A number for a word."""
        digest = self._digests.get(id(job))
        if digest is None:
            text = json.dumps(job.payload, sort_keys=True, default=bytes.hex).encode()
            digest = self._digests[id(job)] = hashlib.sha256(text).digest()
        return int.from_bytes(hashlib.sha256(digest + repr(word).encode()).digest()[:6], "big") / 2**48

    def done(self, job: Job) -> None:
        """Nothing more is asked of it."""
        self._digests.pop(id(job), None)


def model_tasks(names: Sequence[str], **options: Any) -> tuple[Task, ...]:
    """The distinct stages of models at paper size; options as for :func:`souffle.compile`."""
    units = []
    for name in names:
        loaded = programs_of(models.build(name, "paper"), ModelOptions(None, None, None, True))
        units += [stages_of(program, cubin=False, **options) for _, program in loaded]
    return tasks_of(units)


def ready(payload: Any, shared: Any) -> bool:
    """What a worker does to be ready: it has imported all that jobs need."""
    return True


class _Setting:
    """What all searches here have in common."""

    def __init__(self, arch: str) -> None:
        self.arch = arch
        self.request: GpuRequest = gpu_request(device_for(arch))
        self.device: CostDevice = cost_device_for(arch, None)

    def search(self, tasks: Sequence[Task], trials: int, engine: Engine, folder: Path) -> TuningReport:
        writer = LogWriter(folder, self.arch, cuda_target(self.arch))
        bench = PredictingBench(self.device.product)
        return search(
            tasks,
            trials=trials,
            request=self.request,
            cost_device=self.device,
            bench=bench,
            writer=writer,
            engine=engine,
        )


def _real(setting: _Setting, tasks: Sequence[Task], trials: int, words: Sequence[str], repeats: int) -> list[dict]:
    """Searches on engines of this machine, in turn; the best of some repeats counts."""
    rows: dict[str, dict[str, Any]] = {}
    first: list[bytes] | None = None
    for _ in range(repeats):
        for word in words:
            with tempfile.TemporaryDirectory() as folder, engine_for(word) as engine:
                # Workers import the compiler once, which a search of an hour does not notice.
                warming = Job("benchmarks.search_scaling:ready", None, "warming up")
                for future in [engine.submit(warming) for _ in range(4 * engine.workers)]:
                    future.result()
                watched, workers = Watched(engine), engine.workers
                report = setting.search(tasks, trials, watched, Path(folder))
                log = [(Path(folder) / setting.arch / name).read_bytes() for name in _NAMES]
            first = log if first is None else first
            row = rows.setdefault(word, {"engine": word, "workers": workers, "seconds": math.inf, "same": True})
            row["same"] = row["same"] and log == first
            row["candidates"], row["lost"] = report.new_trials, report.lost
            if report.seconds < row["seconds"]:
                row["seconds"] = report.seconds
                row["busy"] = sum(map(sum, watched.seconds.values())) / (report.seconds * row["workers"])
    for row in rows.values():
        row["per_second"] = row["candidates"] / row["seconds"]
        row["ratio"] = row["per_second"] / next(iter(rows.values()))["per_second"]
    return list(rows.values())


def _played(setting: _Setting, tasks: Sequence[Task], candidates: int, sizes: Sequence[int]) -> list[dict[str, Any]]:
    """Searches on played clusters; how long jobs take is what they took one process here."""
    with tempfile.TemporaryDirectory() as folder, engine_for("local:1") as engine:
        watched = Watched(engine)
        setting.search(tasks, 4, watched, Path(folder))
    taken = {function: sorted(seconds) for function, seconds in watched.seconds.items()}
    looks = [value for name, values in watched.values.items() if name.endswith(":look") for value in values]
    fitting = sum(not look["problem"] for look in looks) / len(looks)
    one_look = next(look for look in looks if not look["problem"])
    sketches: dict[str, Any] = {}
    for name, values in watched.values.items():
        if name.endswith(":sketches"):
            sketches = dict(zip([task.name for task in tasks], values, strict=True))

    busy, playing, drawn = [0.0], [0.0], _Drawn()

    def seconds(job: Job) -> float:
        begin = time.thread_time()
        times = taken[job.function]
        took = times[int(drawn("time", job) * len(times))]
        busy[0] += took
        playing[0] += time.thread_time() - begin
        return took

    def given(job: Job) -> Any:
        begin = time.thread_time()
        value = answer(job)
        drawn.done(job)
        playing[0] += time.thread_time() - begin
        return value

    def answer(job: Job) -> Any:
        kind = job.function.rpartition(":")[2]
        if kind == "sketches":
            return sketches[job.label.rpartition("of stage ")[2]]
        predicted = [1e-6 * (1 + drawn(warm, job)) for warm in (False, True)]
        if kind == "look":
            if drawn("fits", job) > fitting:
                return {"problem": "it does not fit"}
            return {**one_look, "recipe": job.payload["recipe"], "seconds": predicted}
        figures = {"problem": "", "seconds": predicted, "registers": 64, "spill_bytes": 0}
        return [figures for _ in job.payload["candidates"]]

    rows = []
    for size in sizes:
        wanted = candidates if size > 1 else max(len(tasks), candidates // 16)
        trials = -(-wanted // len(tasks))
        busy[0] = playing[0] = 0.0
        with tempfile.TemporaryDirectory() as folder, played_engine(size, seconds, given) as cluster:
            before = time.process_time()
            report = setting.search(tasks, trials, cluster, Path(folder))
            # What the workers are played by is not the driver's.
            driver = time.process_time() - before - playing[0]
        rows.append(
            {
                "workers": size,
                "candidates": report.new_trials,
                "seconds": report.seconds,
                "efficiency": busy[0] / (size * report.seconds),
                "busy_ms": 1e3 * busy[0] / report.new_trials,
                "driver_ms": 1e3 * driver / report.new_trials,
                "saturated_at": busy[0] / driver,
            }
        )
        print(rows[-1], flush=True)
    return rows


def main() -> int:
    """Measure what is asked for and print tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["mmoe", "resnext", "efficientnet"], choices=models.NAMES)
    parser.add_argument("--level", default="V3")
    parser.add_argument("--arch", default="sm_90")
    parser.add_argument("--local", nargs="*", type=int, default=[], metavar="N", help="so many processes, in turn")
    parser.add_argument("--ray", type=int, metavar="N", help="so many workers on a Ray cluster of this machine")
    parser.add_argument("--trials", type=int, default=16, help="of a stage, with real workers")
    parser.add_argument("--repeats", type=int, default=3, help="of each number of real workers")
    parser.add_argument("--played", nargs="*", type=int, default=[], metavar="N", help="so many played workers")
    parser.add_argument("--candidates", type=int, default=4000, help="of a played search")
    parser.add_argument("--out", help="where to write the results as JSON")
    arguments = parser.parse_args()
    setting = _Setting(arguments.arch)
    tasks = model_tasks(arguments.models, level=arguments.level, arch=arguments.arch)
    results: list[dict[str, Any]] = []
    words = [f"local:{count}" for count in arguments.local] + ([f"ray:{arguments.ray}"] if arguments.ray else [])
    if words:
        rows = _real(setting, tasks, arguments.trials, words, arguments.repeats)
        results += [{"kind": "real", "stages": len(tasks), **row} for row in rows]
        columns = ["engine", "candidates", "seconds", "per_second", "ratio", "busy", "same"]
        print(format_table(columns, [[_shown(row[name]) for name in columns] for row in rows]))
    if arguments.played:
        rows = _played(setting, tasks, arguments.candidates, arguments.played)
        results += [{"kind": "played", "stages": len(tasks), **row} for row in rows]
        print(format_table(list(rows[0]), [[_shown(value) for value in row.values()] for row in rows]))
    if arguments.out:
        new = {one["kind"] for one in results}
        kept = kept_results(arguments.out, lambda row: row["kind"] not in new)
        save_results(arguments.out, "benchmarks.search_scaling", [*kept, *results])
    return 0 if all(row.get("same", True) for row in results) else 1


def _shown(value: Any) -> Any:
    return f"{value:.3g}" if isinstance(value, float) else value


if __name__ == "__main__":
    raise SystemExit(main())
