"""The search: as many stages are under way as keep the workers busy, until all are done, time is up or it is stopped.

One process holds the log, draws what is tried and waits; workers do the rest (:mod:`souffle.workers`). What is tried
for a stage depends on the seed and on what was found for that stage alone, so that the log is the same whichever
workers there are, how many, and in which order they answer.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from souffle.cost import CostDevice
from souffle.schedule.gpu import GpuRequest
from souffle.schedule.log import TuningLog
from souffle.schedule.recipe import Recipe
from souffle.tuning.asking import Asking, Limits, SharedStage
from souffle.tuning.bench import CandidateBench
from souffle.tuning.report import TuningReport
from souffle.tuning.stage_search import BATCH, LearnedRanker, StageSearch
from souffle.tuning.stage_work import packed_setting, packed_stage
from souffle.tuning.store import LogWriter
from souffle.tuning.tasks import Task
from souffle.workers import Engine, Outcome, WorkersLostError

__all__ = ["search"]

_AHEAD = 3
"""Jobs that are submitted for each worker: one that it does, and those that it takes next without waiting."""
_SHOWN = 0.5
"""Seconds between two messages."""


def search(
    tasks: Sequence[Task],
    *,
    trials: int,
    request: GpuRequest,
    cost_device: CostDevice,
    bench: CandidateBench,
    writer: LogWriter,
    engine: Engine,
    near: Callable[[Task], Sequence[Recipe]] = lambda task: (),
    ranker: LearnedRanker | None = None,
    limits: Limits | None = None,
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
    cost_device : CostDevice
        Ranks what is not built yet.
    bench : CandidateBench
        Gives figures.
    writer : LogWriter
    engine : Engine
        Closed by the caller.
    near : callable
        Recipes of stages like one that has no records yet, the nearest first.
    ranker : LearnedRanker, optional
        Ranks candidates that are not built yet; the cost model without.
    limits : Limits, optional
        Of one job.
    seed : int
    seconds : float, optional
        After so many no further batch is begun.
    progress : callable

    Returns
    -------
    TuningReport
        Also where the user stopped the search: what was found is in the log.

    Raises
    ------
    WorkersLostError
        If no worker is left; what was found is in the log.
    """
    begin = time.monotonic()
    log = writer.read()
    setting = engine.share(packed_setting(request, cost_device))
    running = _Running(engine, trials, seconds, progress)
    interrupted = False
    try:
        for task in tasks:
            shared = SharedStage(task.name, engine.share(packed_stage(task.stage.draft)), setting, limits or Limits())
            one = StageSearch(task, request.arch, request.threads, bench, writer, shared, seed, ranker)
            running.add(one, one.begin(*_held(log, task, near)))
        running.finish()
    except KeyboardInterrupt:
        interrupted = True
    except WorkersLostError as error:
        kept = f"what was found is in {writer.folder}, and the same command goes on"
        raise WorkersLostError(f"{error}; {kept}") from error
    finally:
        writer.sort()
    return TuningReport(
        tuple(one.report() for one in running.searches),
        bench.figure,
        bench.device,
        str(writer.folder),
        interrupted,
        time.monotonic() - begin,
        engine.name,
        running.lost,
    )


def _held(log: TuningLog, task: Task, near: Callable[[Task], Sequence[Recipe]]) -> tuple[Sequence, Sequence[Recipe]]:
    records = log.of(task.stage.draft.func)
    return records, () if records else near(task)


@dataclass(eq=False)
class _Step:
    """A part of a search that waits for workers."""

    search: StageSearch
    asking: Asking[None]
    outcomes: list[Outcome | None] = field(default_factory=list)
    missing: int = 0
    begun: float = field(default_factory=time.monotonic)


class _Running:
    """All searches, those that wait for workers and those whose turn it may be."""

    def __init__(
        self, engine: Engine, trials: int, seconds: float | None, progress: Callable[[str], None]
    ) -> None:
        self.engine = engine
        self.trials = trials
        self.end = None if seconds is None else time.monotonic() + seconds
        self.progress = progress
        self.searches: list[StageSearch] = []
        self.lost = 0
        self._answered: queue.SimpleQueue[tuple[_Step, int, Future[Outcome]]] = queue.SimpleQueue()
        self._asked = 0
        self._busy: set[int] = set()
        self._start = time.monotonic()
        self._shown = 0.0

    def add(self, search: StageSearch, asking: Asking[None]) -> None:
        """Another search, with what it begins with."""
        self.searches.append(search)
        while self._asked >= self._wanted:
            self._answer()
        self._begin(search, asking)

    def finish(self) -> None:
        """Until no batch is left to begin, and all that were begun are done."""
        while True:
            while self._asked < self._wanted and (search := self._next()) is not None:
                count = min(BATCH, self.trials - search.trials)
                self._begin(search, search.batch(count))
            if not self._busy:
                return
            self._answer()

    @property
    def _wanted(self) -> int:
        return _AHEAD * max(1, self.engine.workers)

    def _next(self) -> StageSearch | None:
        """The task whose turn it is: the fewest trials first, then what takes the network most time."""
        if self.end is not None and time.monotonic() > self.end:
            return None
        free = (one for one in self.searches if id(one) not in self._busy and self._open(one))

        def order(one: StageSearch) -> tuple[int, float]:
            took = one.best_seconds
            return (one.trials // BATCH, -one.task.weight * (1.0 if took is None else took))

        return min(free, key=order, default=None)

    def _open(self, search: StageSearch) -> bool:
        return search.trials < self.trials and not search.exhausted

    def _begin(self, search: StageSearch, asking: Asking[None]) -> None:
        self._busy.add(id(search))
        self._go_on(_Step(search, asking), None)

    def _go_on(self, step: _Step, outcomes: Sequence[Outcome] | None) -> None:
        try:
            jobs = next(step.asking) if outcomes is None else step.asking.send(outcomes)
        except StopIteration:
            self._busy.discard(id(step.search))
            step.search.seconds_spent += time.monotonic() - step.begun
            self._say(step.search)
            return
        step.outcomes, step.missing = [None] * len(jobs), len(jobs)
        for place, (job, check) in enumerate(jobs):
            self._asked += 1
            future = self.engine.submit(job, check)
            future.add_done_callback(lambda done, place=place: self._answered.put((step, place, done)))

    def _answer(self) -> None:
        """Wait for one outcome, and go on with the search that it is for if it has all of its own."""
        step, place, future = self._answered.get()
        self._asked -= 1
        outcome = future.result()
        self.lost += outcome.attempts - 1
        step.outcomes[place] = outcome
        step.missing -= 1
        if not step.missing:
            self._go_on(step, [one for one in step.outcomes if one is not None])

    def _say(self, last: StageSearch) -> None:
        now = time.monotonic()
        if now - self._shown < _SHOWN and self._busy:
            return
        self._shown = now
        self.progress(self._line(last, now))

    def _line(self, last: StageSearch, now: float) -> str:
        """Workers, candidates a second, the best so far and the time left."""
        done = sum(one.trials - one.old_trials for one in self.searches)
        open_ = sum(self.trials - one.trials for one in self.searches if self._open(one))
        rate = done / (now - self._start) if done else 0.0
        workers = self.engine.workers
        parts = [f"{workers} worker{'' if workers == 1 else 's'}", f"{rate:.1f} candidates/s"]
        parts.append(f"task {self.searches.index(last) + 1}/{len(self.searches)} {last.task.name}")
        best = "none works yet" if last.best_seconds is None else f"best {last.best_seconds * 1e6:.1f} µs"
        own = "" if last.own_seconds is None else f" (rule's own {last.own_seconds * 1e6:.1f} µs)"
        parts.append(f"trial {last.trials}/{self.trials}, {best}{own}")
        if self.lost:
            parts.append(f"{self.lost} attempts lost")
        if rate:
            left = open_ / rate
            if self.end is not None:
                left = min(left, max(0.0, self.end - now))
            parts.append(f"{left / 60:.0f} min {left % 60:.0f} s left")
        return ", ".join(parts)

