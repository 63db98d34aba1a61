"""``local:N``: jobs in processes of this machine.

The processes and the pipes are our own. Pebble's pool, the one that ends a single worker and not all of them, has its
workers share one pipe under one lock: whoever is killed while it holds that (by the system, where memory runs out)
holds up all others for ever, half a message makes the rest unreadable, and a worker that dies between two jobs breaks
the pool for good. Those of ``concurrent.futures`` and loky give up all jobs for one worker that dies. Here each worker
has a stream of its own, and what happens to it happens to its job alone.
"""

from __future__ import annotations

import asyncio
import pickle
import socket
from collections import deque
from collections.abc import Mapping

from souffle.errors import OptionError
from souffle.parallel import usable_cores
from souffle.workers.harness import Answer
from souffle.workers.loop import LoopPool, Wire
from souffle.workers.process import (
    GRACE_SECONDS,
    ONE_THREAD,
    ChildProcess,
    Workplace,
    answer_of_death,
    worker_in,
)
from souffle.workers.retrying import Attempt, RetryingEngine
from souffle.workers.worker import READY

__all__ = ["LocalPool", "local_engine"]

_MOST_FAILED_STARTS = 8
"""In a row: then no worker can be had. One or two may be killed where memory is short."""

_START_SECONDS = 60.0
"""For a worker to begin; then it is ended."""

_LOOKED_AT = 16
"""Of the jobs that are tried again, by a worker that looks for one which it has not failed itself."""


def local_engine(workers: int | None = None) -> RetryingEngine:
    """An engine of so many processes of this machine, one for each core by default, and one more for jobs on a GPU.

    Raises
    ------
    OptionError
        If there is not at least one.
    """
    count = usable_cores() if workers is None else workers
    if count < 1:
        raise OptionError(f"local:{count} is not valid: there is at least one worker")
    return RetryingEngine("local" if workers is None else f"local:{workers}", LocalPool(count))


class LocalPool(LoopPool):
    """Has attempts done in processes, each started when there is something for it to do.

    Parameters
    ----------
    workers : int
    grace_seconds : float
        After its time, for a worker to end itself.
    """

    def __init__(self, workers: int, grace_seconds: float = GRACE_SECONDS) -> None:
        super().__init__(f"souffle local:{workers}")
        self._workers, self.grace_seconds = workers, grace_seconds
        self._workplace = Workplace()
        self._lanes = {"cpu": _Lane(self, workers), "gpu": _Lane(self, 1)}
        self._failed_starts = 0
        self.environment: Mapping[str, str] = ONE_THREAD if workers > 1 else {}

    @property
    def workers(self) -> int:
        """See :class:`souffle.workers.retrying.Pool`."""
        return self._workers

    @property
    def pids(self) -> list[int]:
        """Of the processes that there are now."""
        return [worker.process.pid for lane in self._lanes.values() for worker in tuple(lane.workers)]

    def share(self, key: str, data: bytes) -> None:
        """See :class:`souffle.workers.retrying.Pool`."""
        self._workplace.put(key, data)

    def _accept(self, attempt: Attempt) -> None:
        self._lanes[attempt.job.resource].accept(attempt)

    def _pump(self) -> None:
        for lane in self._lanes.values():
            lane.pump()

    def _end(self) -> None:
        workers = [worker for lane in self._lanes.values() for worker in lane.workers]
        for worker in workers:
            worker.wire.abort()
            worker.process.kill()
        for worker in workers:
            worker.process.end()
        self._workplace.close()

    def new_process(self) -> ChildProcess | None:
        """A process; none if the system gives no more, or none that lives."""
        error = None
        if self._failed_starts < _MOST_FAILED_STARTS:
            try:
                return worker_in(self._workplace, self.environment)
            except OSError as found:
                error = found
        if error is not None:
            self._lost(f"no process can be started: {error}")
        return None

    def started(self) -> None:
        """A worker has begun."""
        self._failed_starts = 0

    def not_started(self, how: str) -> None:
        """A worker has ended before it began."""
        self._failed_starts += 1
        if self._failed_starts >= _MOST_FAILED_STARTS:
            self._lost(f"{self._failed_starts} of them have ended before they began, the last with {how}")


class _Lane:
    """The jobs that wait for a resource, and the workers that take them."""

    def __init__(self, pool: LocalPool, most: int) -> None:
        self.pool, self.most = pool, most
        self.workers: set[_Worker] = set()
        self.idle: deque[_Worker] = deque()
        self._first: deque[Attempt] = deque()
        self._again: deque[Attempt] = deque()
        self._starting = 0

    def accept(self, attempt: Attempt) -> None:
        (self._again if attempt.avoid else self._first).append(attempt)

    def pump(self) -> None:
        """Give idle workers something to do, and start workers for what is left."""
        for _ in range(len(self.idle)):
            if not self._again and not self._first:
                return
            worker = self.idle.popleft()
            attempt = self._next_for(worker)
            if attempt is None:
                self.idle.append(worker)
            else:
                worker.take(attempt)
        while len(self.workers) < self.most and self._starting < len(self._again) + len(self._first):
            process = self.pool.new_process()
            if process is None:
                return
            self._starting += 1
            self.workers.add(_Worker(self, process))

    def begun(self, worker: _Worker) -> None:
        """A worker takes its first job."""
        self._starting -= 1
        self.pool.started()
        self.free(worker)

    def free(self, worker: _Worker) -> None:
        """A worker can take a job."""
        attempt = self._next_for(worker)
        if attempt is None:
            self.idle.append(worker)
            self.pump()
        else:
            worker.take(attempt)

    def gone(self, worker: _Worker, *, began: bool) -> None:
        """A worker has ended."""
        self.workers.discard(worker)
        if worker in self.idle:
            self.idle.remove(worker)
        if not began:
            self._starting -= 1

    def _next_for(self, worker: _Worker) -> Attempt | None:
        """What has been tried goes first, with another worker if there are several."""
        for _ in range(min(_LOOKED_AT, len(self._again))):
            attempt = self._again.popleft()
            if attempt.avoid != worker.name or self.most == 1:
                if attempt.wanted:
                    return attempt
            else:
                self._again.append(attempt)
        while self._first:
            attempt = self._first.popleft()
            if attempt.wanted:
                return attempt
        return None


class _Worker:
    """One process, and the job that it has."""

    def __init__(self, lane: _Lane, process: ChildProcess) -> None:
        self.process = process
        self.name = f"{socket.gethostname()}:{process.pid}"
        self._lane = lane
        self._attempt: Attempt | None = None
        self._began = False
        self._deadline: asyncio.TimerHandle | None = lane.pool.loop.call_later(_START_SECONDS, self._end_overdue)
        self.wire = Wire(self._received, self._closed)
        self.wire.connect(lane.pool.loop, process.stream)

    def take(self, attempt: Attempt) -> None:
        self._attempt = attempt
        request = attempt.request
        self.wire.send(pickle.dumps(tuple(request), pickle.HIGHEST_PROTOCOL))
        if request.seconds is not None:
            pool = self._lane.pool
            self._deadline = pool.loop.call_later(request.seconds + pool.grace_seconds, self._end_overdue)

    def _received(self, message: bytes) -> None:
        if not self._began:
            self._began = message == READY
            if self._began:
                self._done()
                self._lane.begun(self)
            return
        answer = Answer(*pickle.loads(message))
        attempt = self._done()
        if answer.spent:
            self._leave()
            self.process.end()
        else:
            self._lane.free(self)
        if attempt is not None:
            attempt.end(answer, self.name, self.name)
        if answer.spent:
            self._lane.pump()

    def _done(self) -> Attempt | None:
        """The job that it had, whose time is not looked at any more."""
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        attempt, self._attempt = self._attempt, None
        return attempt

    def _end_overdue(self) -> None:
        self._closed("", overdue=True)

    def _closed(self, fault: str, *, overdue: bool = False) -> None:
        """It has closed its stream, is past its time, or is at fault."""
        attempt = self._done()
        self._leave()
        if attempt is not None:
            answer = answer_of_death(self.process, attempt.request, overdue=overdue, fault=fault)
            attempt.end(answer, self.name, self.name)
        else:
            how = self.process.end(at_once=overdue)
            if not self._began:
                self._lane.pool.not_started(f"no word in {_START_SECONDS:g} s" if overdue else how)
        self._lane.pump()

    def _leave(self) -> None:
        self.wire.abort()
        self._lane.gone(self, began=self._began)
