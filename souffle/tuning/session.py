"""The search: as many stages are under way as keep the workers busy, until all are done, time is up or it is stopped.

One process holds the log, draws what is tried and waits; workers do the rest (:mod:`souffle.workers`). What is tried
for a stage depends on the seed and on what was found for that stage alone, so that the log is the same whichever
workers there are, how many, and in which order they answer.
"""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable, Iterator, Sequence

from souffle.cost import CostDevice
from souffle.schedule.gpu import GpuRequest
from souffle.schedule.recipe import Recipe
from souffle.tuning.bench import CandidateBench
from souffle.tuning.kept_in_log import kept_in_log
from souffle.tuning.report import TuningReport
from souffle.tuning.shared_stage import Limits, SharedStage
from souffle.tuning.stage_search import BATCH, LearnedRanker, StageSearch
from souffle.tuning.stage_work import packed_setting, packed_stage
from souffle.tuning.store import LogWriter
from souffle.tuning.tasks import Task
from souffle.wording import counted, minutes_and_seconds
from souffle.workers import Engine, Outcome
from souffle.workers.cases import Asking, Cases

__all__ = ["search"]

_AHEAD = 12
"""Jobs for each worker that are asked for: a stage asks for some, and goes on when it has all of them."""
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

    def begun(task: Task) -> tuple[StageSearch, Asking[None]]:
        shared = SharedStage(task.name, engine.share(packed_stage(task.stage.draft)), setting, limits or Limits())
        one = StageSearch(task, request.arch, request.threads, bench, writer, shared, seed, ranker)
        records = log.of(task.stage.draft.func)
        tried = log.marks_of(task.stage.draft.func, bench.figure, bench.device)
        return one, one.begin(records, () if records else near(task), tried)

    turns = _Turns(map(begun, tasks), trials, seconds)
    line = _Line(engine, trials, len(tasks), turns, progress)
    # Those that are behind go first, so that no stage is left alone with its rounds in the end.
    with kept_in_log(writer) as ended, _rare_collections():
        for one, _ in Cases(engine, turns, ahead=_AHEAD, order=lambda one, step: (one.trials, step)):
            turns.end(one)
            line.show(one)
    return TuningReport(
        tasks=tuple(one.report() for one in turns.searches),
        figure=bench.figure,
        device=bench.device,
        log=str(writer.folder),
        interrupted=ended.interrupted,
        seconds=time.monotonic() - begin,
        engine=engine.name,
        lost=turns.lost,
    )


@contextlib.contextmanager
def _rare_collections() -> Iterator[None]:
    """Python looks for garbage in all that is held a twentieth as often.

    Recipes are lists of lists, and to look through all that were drawn takes most of a second, in which no worker is
    given anything.
    """
    young, middle, old = gc.get_threshold()
    gc.set_threshold(young, middle, 20 * old)
    try:
        yield
    finally:
        gc.set_threshold(young, middle, old)


class _Turns:
    """What is begun next: each task's sketches, then a batch of the task whose turn it is.

    There may be nothing to begin while batches are under way, and something when one has ended.

    Parameters
    ----------
    beginnings : iterator of (StageSearch, Asking)
    trials : int
    seconds : float or None
        After so many nothing further is begun.
    """

    def __init__(
        self, beginnings: Iterator[tuple[StageSearch, Asking[None]]], trials: int, seconds: float | None
    ) -> None:
        self.searches: list[StageSearch] = []
        self.lost = 0
        self.end_time = None if seconds is None else time.monotonic() + seconds
        self._beginnings, self._trials = beginnings, trials
        self._begun: dict[int, float] = {}

    def __iter__(self) -> _Turns:
        return self

    def __next__(self) -> tuple[StageSearch, Asking[None]]:
        found = next(self._beginnings, None)
        if found is not None:
            self.searches.append(found[0])
        else:
            search = self._next_search()
            found = search, search.batch(_size(self._trials - search.trials))
        self._begun[id(found[0])] = time.monotonic()
        return found[0], self._counted(found[1])

    def end(self, search: StageSearch) -> None:
        """What it was doing has ended: it may have another turn."""
        search.seconds_spent += time.monotonic() - self._begun.pop(id(search))

    def is_open(self, search: StageSearch) -> bool:
        """Whether it has candidates left to try."""
        return search.trials < self._trials and not search.exhausted

    def _next_search(self) -> StageSearch:
        """The fewest trials first, then what takes the network most time."""
        if self.end_time is not None and time.monotonic() > self.end_time:
            raise StopIteration

        def order(one: StageSearch) -> tuple[int, float]:
            took = one.best_seconds
            return (one.trials // BATCH, -one.task.weight * (1.0 if took is None else took))

        free = [one for one in self.searches if id(one) not in self._begun and self.is_open(one)]
        if not free:
            raise StopIteration
        return min(free, key=order)

    def _counted(self, asking: Asking[None]) -> Asking[None]:
        """The same, with attempts counted that came to nothing."""
        outcomes: Sequence[Outcome] | None = None
        while True:
            try:
                jobs = next(asking) if outcomes is None else asking.send(outcomes)
            except StopIteration:
                return
            outcomes = yield jobs
            self.lost += sum(outcome.attempts - 1 for outcome in outcomes)


def _size(left: int) -> int:
    """Of the next batch, where so many trials are left: batches are alike, and none is of a few alone."""
    return -(-left // max(1, round(left / BATCH)))


class _Line:
    """Says how far a search is."""

    def __init__(
        self, engine: Engine, trials: int, tasks: int, turns: _Turns, progress: Callable[[str], None]
    ) -> None:
        self._engine, self._trials, self._tasks = engine, trials, tasks
        self._turns, self._progress = turns, progress
        self._start, self._shown = time.monotonic(), 0.0

    def show(self, last: StageSearch) -> None:
        """Say it, if it is time, and at the end."""
        now = time.monotonic()
        if now - self._shown >= _SHOWN or not any(map(self._turns.is_open, self._turns.searches)):
            self._shown = now
            self._progress(self._words(last, now))

    def _words(self, last: StageSearch, now: float) -> str:
        """Workers, candidates a second, the best so far and the time left."""
        searches = self._turns.searches
        done = sum(one.trials - one.old_trials for one in searches)
        open_ = sum(self._trials - one.trials for one in searches if self._turns.is_open(one))
        rate = done / (now - self._start) if done else 0.0
        parts = [counted(self._engine.workers, "worker"), f"{rate:.1f} candidates/s"]
        parts.append(f"task {searches.index(last) + 1}/{self._tasks} {last.task.name}")
        best = "none works yet" if last.best_seconds is None else f"best {last.best_seconds * 1e6:.1f} µs"
        own = "" if last.own_seconds is None else f" (rule's own {last.own_seconds * 1e6:.1f} µs)"
        parts.append(f"trial {last.trials}/{self._trials}, {best}{own}")
        if self._turns.lost:
            parts.append(f"{counted(self._turns.lost, 'attempt')} lost")
        if rate:
            left = open_ / rate
            if self._turns.end_time is not None:
                left = min(left, max(0.0, self._turns.end_time - now))
            parts.append(f"{minutes_and_seconds(left)} left")
        return ", ".join(parts)
