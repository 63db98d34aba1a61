"""The search: tasks take turns, each with trials left, until all are done, time is up or the user stops it."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import tvm
from tvm import s_tir
from tvm.s_tir.schedule import Trace

from souffle.cost import CostDevice
from souffle.decision import Refused
from souffle.schedule.gpu import RULES, GpuRequest, Sketch, sketch_of
from souffle.schedule.gpu.device import device_for
from souffle.schedule.log import Record, workload_module
from souffle.schedule.tuned import crowding
from souffle.tuning.bench import CandidateBench, Figures
from souffle.tuning.candidate import Candidate, Evaluator
from souffle.tuning.evolution import next_candidates
from souffle.tuning.report import TaskReport, TuningReport
from souffle.tuning.space import Space, plain, spaces_of, trace_key, trace_with_values
from souffle.tuning.store import LogWriter, origin_now
from souffle.tuning.tasks import Task

__all__ = ["search"]

BATCH = 8
"""Candidates that are built together: two files of four for two cores."""


@dataclass(eq=False)
class _Tuning:
    """One task under way."""

    task: Task
    spaces: tuple[Space, ...]
    evaluator: Evaluator
    known: set[str] = field(default_factory=set)
    best: list[tuple[tuple, Space, Trace, float, str]] = field(default_factory=list)
    own: Candidate | None = None
    own_seconds: float | None = None
    trials: int = 0
    old_trials: int = 0
    exhausted: bool = False
    seconds_spent: float = 0.0


def search(
    tasks: Sequence[Task],
    *,
    trials: int,
    request: GpuRequest,
    target: tvm.target.Target,
    cost_device: CostDevice,
    bench: CandidateBench,
    writer: LogWriter,
    seed: int = 0,
    seconds: float | None = None,
    progress: Callable[[str], None] = lambda message: None,
) -> TuningReport:
    """Tune tasks.

    Parameters
    ----------
    tasks : sequence of Task
    trials : int
        Candidates built for each task in all, with those that the log holds already. The rule's own schedule is one.
    request : GpuRequest
    target : Target
    cost_device : CostDevice
        Ranks what is not built yet.
    bench : CandidateBench
        Gives figures.
    writer : LogWriter
    seed : int
    seconds : float, optional
        After so many no further batch is begun.
    progress : callable

    Returns
    -------
    TuningReport
        Also where the user stopped the search: what was found is in the log.
    """
    begin = time.monotonic()
    log = writer.read()
    running: list[_Tuning] = []
    interrupted = False
    try:
        for number, task in enumerate(tasks, 1):
            progress(f"task {number}/{len(tasks)}: sketches of {task.name}")
            running.append(_begin(task, log.of(task.stage.draft.func), request, target, cost_device, bench, seed))
        ready = time.monotonic()
        while (one := _next(running, trials)) is not None:
            if seconds is not None and time.monotonic() - begin > seconds:
                break
            started = time.monotonic()
            _batch(one, min(BATCH, trials - one.trials), bench, writer, seed)
            one.seconds_spent += time.monotonic() - started
            done = sum(t.trials - t.old_trials for t in running)
            open_ = sum(max(0, trials - t.trials) for t in running if not t.exhausted)
            left = (time.monotonic() - ready) / max(1, done) * open_
            if seconds is not None:
                left = min(left, max(0.0, seconds - (time.monotonic() - begin)))
            progress(_line(running, one, trials, left))
    except KeyboardInterrupt:
        interrupted = True
    return TuningReport(
        tuple(_report(one) for one in running),
        bench.figure,
        bench.device,
        str(writer.folder),
        interrupted,
        time.monotonic() - begin,
    )


def _begin(
    task: Task,
    records: Sequence[Record],
    request: GpuRequest,
    target: tvm.target.Target,
    cost_device: CostDevice,
    bench: CandidateBench,
    seed: int,
) -> _Tuning:
    func = task.stage.draft.func
    spaces = spaces_of(func, request, target, seed=seed % (2**31 - 2) + 1)
    one = _Tuning(task, spaces, Evaluator(func, request, target, cost_device))
    one.own = _own_choice(one)
    for record in records:
        if record.origin.figure == bench.figure and record.origin.device == bench.device:
            _recall(one, record)
    one.old_trials = one.trials
    return one


def _own_choice(one: _Tuning) -> Candidate | None:
    """The schedule that the rules choose without a log, as a candidate."""
    func, request = one.evaluator.func, one.evaluator.request
    for space in one.spaces:
        if space.rule != one.task.stage.schedule.rule or space.rule not in RULES:
            continue
        sketch = sketch_of(space.rule, func, request)
        values = sketch.choose() if isinstance(sketch, Sketch) else sketch
        if not isinstance(values, Refused):
            candidate = one.evaluator.candidate(space, trace_with_values(space, values))
            return None if isinstance(candidate, Refused) else candidate
    return None


def _recall(one: _Tuning, record: Record) -> None:
    """Take in what the log holds of a task."""
    key = trace_key(record.trace)
    if key in one.known:
        return
    one.known.add(key)
    one.trials += 1
    if record.failed:
        return
    try:
        sch = s_tir.Schedule(workload_module(one.evaluator.func), debug_mask="none", error_render_level="none")
        Trace.apply_json_to_schedule(record.trace, sch)
    except (ValueError, TypeError, RuntimeError, AttributeError, LookupError):
        return
    trace = sch.trace.simplified(remove_postproc=True)
    space = next((space for space in one.spaces if _same_sketch(space.trace, trace)), None)
    if space is None:
        return
    candidate = one.evaluator.candidate(space, trace)
    if isinstance(candidate, Refused):
        return
    _note(one, candidate, Figures((record.seconds,), record.origin.spill_bytes, record.origin.registers))


def _same_sketch(left: Trace, right: Trace) -> bool:
    return plain(left.as_json(remove_postproc=True))[0] == plain(right.as_json(remove_postproc=True))[0]


def _note(one: _Tuning, candidate: Candidate, figures: Figures) -> None:
    mean = sum(figures.seconds) / len(figures.seconds)
    if one.own is not None and candidate.key == one.own.key:
        one.own_seconds = mean
    own_tiles = one.task.stage.schedule.tiles
    used = (candidate.schedule.tiles, figures.registers, candidate.shared_bytes)
    alone = crowding(*used, own_tiles, device_for(one.evaluator.request.arch)) is not None
    rank = (figures.spill_bytes > 0 or alone, mean)
    trace = candidate.trace.simplified(remove_postproc=True)
    one.best.append((rank, candidate.space, trace, mean, candidate.summary))
    one.best.sort(key=lambda entry: entry[0])


def _next(running: Sequence[_Tuning], trials: int) -> _Tuning | None:
    """The task whose turn it is: the fewest trials first, then what takes the network most time."""
    open_ = [one for one in running if one.trials < trials and not one.exhausted]

    def order(one: _Tuning) -> tuple[int, float]:
        took = one.best[0][3] if one.best else 1.0
        return (one.trials // BATCH, -one.task.weight * took)

    return min(open_, key=order, default=None)


def _batch(one: _Tuning, count: int, bench: CandidateBench, writer: LogWriter, seed: int) -> None:
    rng = random.Random(f"{seed}:{one.task.stage.draft.digest}:{one.trials}")
    chosen: list[Candidate] = []
    if one.own is not None and one.own.key not in one.known:
        chosen.append(one.own)
    if count > len(chosen):
        best = [(space, trace) for _, space, trace, _, _ in one.best]
        known = one.known | {candidate.key for candidate in chosen}
        chosen += next_candidates(one.spaces, one.evaluator, best, known, count - len(chosen), rng)
    if not chosen:
        one.exhausted = True
        return
    draft = one.task.stage.draft
    found = bench.figures(draft, chosen, one.own)
    for candidate, figures in zip(chosen, found, strict=True):
        if not figures.problem and one.own is not None and candidate.key == one.own.key:
            one.own_seconds = sum(figures.seconds) / len(figures.seconds)
    for candidate, figures in zip(chosen, found, strict=True):
        origin = origin_now(
            bench.figure,
            bench.device,
            one.own_seconds or 0.0,
            spill_bytes=figures.spill_bytes,
            registers=figures.registers,
            shared_bytes=candidate.shared_bytes,
        )
        writer.add(draft.func, candidate.trace, figures.seconds, origin)
        one.known.add(candidate.key)
        one.trials += 1
        if not figures.problem:
            _note(one, candidate, figures)


def _line(running: Sequence[_Tuning], one: _Tuning, trials: int, left: float) -> str:
    place = running.index(one) + 1
    found = f"best {one.best[0][3] * 1e6:.1f} µs" if one.best else "none works yet"
    own = f" (rule's own {one.own_seconds * 1e6:.1f} µs)" if one.own_seconds is not None else ""
    return (
        f"task {place}/{len(running)} {one.task.name}: trial {one.trials}/{trials}, {found}{own}, "
        f"{left / 60:.0f} min {left % 60:.0f} s left"
    )


def _report(one: _Tuning) -> TaskReport:
    tried = list(one.evaluator.tried.values())
    return TaskReport(
        name=one.task.name,
        weight=one.task.weight,
        own_seconds=one.own_seconds,
        best_seconds=one.best[0][3] if one.best else None,
        best=one.best[0][4] if one.best else "",
        trials=one.trials,
        new_trials=one.trials - one.old_trials,
        drawn=len(tried),
        fitting=sum(isinstance(candidate, Candidate) for candidate in tried),
        seconds=one.seconds_spent,
    )
