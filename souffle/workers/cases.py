"""Cases on an engine: each asks for jobs, one step after another; many are under way, and each is given as it ends.

So what happens to one case reads from top to bottom as if it ran alone, and no worker waits for another case.
"""

from __future__ import annotations

import heapq
import queue
import threading
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import chain
from typing import Generic, TypeVar

from souffle.workers.job import Check, Engine, Job, Outcome, Places

__all__ = ["Asking", "Cases"]

_Name = TypeVar("_Name")
_Result = TypeVar("_Result")

Asking = Generator[Sequence[tuple[Job, Check | None]], Sequence[Outcome], _Result]
"""Yields jobs, is sent their outcomes in the same order, and returns what comes of the case."""

_AHEAD = 3
"""Jobs that are submitted for each worker: one that it does, and those that it takes next without waiting."""

Order = Callable[[_Name, int], tuple]
"""Of jobs that wait, those of the case and step go first for which it is least."""


@dataclass(eq=False)
class _Step(Generic[_Name, _Result]):
    """The jobs that a case waits for."""

    name: _Name
    asking: Asking[_Result]
    number: int
    outcomes: list[Outcome | None]
    missing: int


_Entry = tuple[tuple, int, _Step[_Name, _Result], int, Job, "Check | None"]
"""A job that waits: its order, its number, whose it is, at which place of its step, and its check."""

_Answer = tuple[_Step[_Name, _Result], int, "Places | None", Future[Outcome]]


class Cases(Generic[_Name, _Result]):
    """Iterates over cases as they end, by their names and what came of them.

    Cases are begun in their order, and taken from an iterable only when there is room for them: it may be endless, and
    it may end when time is up. It is asked again whenever an outcome has come: an iterator of one's own may have
    nothing to begin at one time, and something after a case has ended. All happens in the thread that iterates.

    Parameters
    ----------
    engine : Engine
        Closed by the caller.
    cases : iterable of (name, Asking)
    interrupted : callable
        Whether there was an interrupt. What a job in this very thread gives after one is dropped, and the interrupt is
        raised again: code below may have made an error of its own of it, or gone on.
    ahead : int
        Jobs for each worker that are asked for before another case is begun; with many, many cases are under way.
    order : callable, optional
        Which jobs go to workers first where more are asked for than these can take: by the name of a case, and by how
        many steps it has had. Those that were asked for first, without.
    """

    def __init__(
        self,
        engine: Engine,
        cases: Iterable[tuple[_Name, Asking[_Result]]],
        interrupted: Callable[[], bool] = lambda: False,
        *,
        ahead: int = _AHEAD,
        order: Order[_Name] = lambda name, step: (),
    ) -> None:
        self._engine, self._interrupted = engine, interrupted
        self._cases = iter(cases)
        self._answers: queue.SimpleQueue[_Answer[_Name, _Result]] = queue.SimpleQueue()
        self._ended: deque[tuple[_Name, _Result]] = deque()
        self._ahead, self._order = ahead, order
        self._waiting: list[_Entry[_Name, _Result]] = []
        # Jobs that wait until a place is free, and how many are taken, by the names of places.
        self._held: defaultdict[str, list[_Entry[_Name, _Result]]] = defaultdict(list)
        self._taken_places: Counter[str] = Counter()
        self._asked = self._given = self._numbered = 0

    def add(self, cases: Iterable[tuple[_Name, Asking[_Result]]]) -> None:
        """Begin these before all others that are not begun yet."""
        self._cases = chain(cases, self._cases)

    def __iter__(self) -> Iterator[tuple[_Name, _Result]]:
        """Until all have ended.

        Raises
        ------
        WorkersLostError
            If no worker is left.
        """
        while True:
            while self._asked < self._ahead * max(1, self._engine.workers) and self._begin_next():
                # An engine of this thread has answered already.
                self._hear_what_there_is()
                yield from self._taken()
            if not self._asked:
                return
            self._hear(self._answers.get())
            yield from self._taken()

    def rest(self) -> Iterator[tuple[_Name, _Result]]:
        """After an interrupt: cases that have ended and were not given yet. Nothing further is asked of workers."""
        while not self._answers.empty():
            step, place, _, future = self._answers.get()
            if not future.cancelled() and future.exception() is None and self._is_complete(step, place, future):
                self._advance(step.name, step.asking, step.number + 1, step.outcomes, ask=False)
        yield from self._taken()

    def _taken(self) -> Iterator[tuple[_Name, _Result]]:
        while self._ended:
            # It is here until it was looked at: an interrupt loses nothing.
            yield self._ended[0]
            self._ended.popleft()

    def _begin_next(self) -> bool:
        found = next(self._cases, None)
        if found is not None:
            name, asking = found
            self._advance(name, asking, 0, None)
            self._give()
        return found is not None

    def _hear_what_there_is(self) -> None:
        while not self._answers.empty():
            self._hear(self._answers.get())

    def _hear(self, answer: _Answer[_Name, _Result]) -> None:
        step, place, places, future = answer
        self._asked -= 1
        self._given -= 1
        if places is not None:
            self._taken_places[places.name] -= 1
            if self._held[places.name]:
                heapq.heappush(self._waiting, heapq.heappop(self._held[places.name]))
        if self._is_complete(step, place, future):
            self._advance(step.name, step.asking, step.number + 1, step.outcomes)
        self._give()

    def _is_complete(self, step: _Step[_Name, _Result], place: int, future: Future[Outcome]) -> bool:
        step.outcomes[place] = future.result()
        step.missing -= 1
        return step.missing == 0

    def _advance(
        self,
        name: _Name,
        asking: Asking[_Result],
        number: int,
        outcomes: Sequence[Outcome] | None,
        *,
        ask: bool = True,
    ) -> None:
        """Until the case waits for workers, or has ended; what asks for no job is asked on."""
        while True:
            try:
                jobs = next(asking) if outcomes is None else asking.send(outcomes)
            except StopIteration as end:
                self._ended.append((name, end.value))
                return
            if jobs or not ask:
                break
            outcomes = ()
        if ask:
            step = _Step(name, asking, number, [None] * len(jobs), len(jobs))
            for place, (job, check) in enumerate(jobs):
                self._numbered += 1
                heapq.heappush(self._waiting, (self._order(name, number), self._numbered, step, place, job, check))
            self._asked += len(jobs)

    def _give(self) -> None:
        """Give workers jobs that wait."""
        while self._waiting and self._given < _AHEAD * max(1, self._engine.workers):
            entry = heapq.heappop(self._waiting)
            places = entry[4].places
            if places is None or self._taken_places[places.name] < places.count:
                self._submit(*entry[2:])
            else:
                heapq.heappush(self._held[places.name], entry)

    def _submit(self, step: _Step[_Name, _Result], place: int, job: Job, check: Check | None) -> None:
        caller = threading.get_ident()

        def hear(future: Future[Outcome]) -> None:
            if threading.get_ident() != caller or not self._interrupted():
                self._answers.put((step, place, job.places, future))

        self._given += 1
        if job.places is not None:
            self._taken_places[job.places.name] += 1
        self._engine.submit(job, check).add_done_callback(hear)
        if self._interrupted():
            raise KeyboardInterrupt  # once more, for the first may have been swallowed on its way
