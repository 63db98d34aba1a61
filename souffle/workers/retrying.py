"""Jobs and their futures, for every engine alike: attempts, checks, cancelling and closing.

An engine is a pool, which has attempts done wherever it has its workers, within this.

A job is tried again, once and elsewhere where there is an elsewhere, if another machine or process may do better: the
worker ended, it took too long or too much memory, it could not begin, it met an error of the system, or what it gave
cannot be true. Any other exception of its function is the job's own answer and would come again.
"""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable
from concurrent.futures import Future
from types import TracebackType
from typing import Any, Protocol

from souffle.errors import OptionError
from souffle.workers.errors import WorkersLostError
from souffle.workers.harness import Answer, Caught, Request, key_of, reason
from souffle.workers.job import Check, Job, Outcome

__all__ = ["ATTEMPTS", "Attempt", "Pool", "RetryingEngine"]

ATTEMPTS = 2


class Attempt:
    """One try at a job, which a pool is given and ends.

    Attributes
    ----------
    job : Job
    request : Request
        The job as it travels.
    avoid : str
        The place of the try before, where this one should not be made if there is another; empty for the first.
    """

    __slots__ = ("_engine", "_future", "avoid", "check", "job", "number", "request")

    def __init__(
        self, engine: RetryingEngine, future: Future[Outcome], job: Job, request: Request, check: Check | None
    ) -> None:
        self._engine, self._future, self.check = engine, future, check
        self.job, self.request = job, request
        self.avoid, self.number = "", 1

    @property
    def future(self) -> Future[Outcome]:
        """What the caller has of the job."""
        return self._future

    @property
    def wanted(self) -> bool:
        """False if the job was cancelled: then it need be neither done nor ended."""
        return not self._future.done()

    def end(self, answer: Answer, worker: str, place: str) -> None:
        """To be called once, from any thread.

        Parameters
        ----------
        answer : Answer
        worker : str
            In words for the outcome.
        place : str
            What a second try avoids.
        """
        self._engine.attempt_ended(self, answer, worker, place)


class Pool(Protocol):
    """Has attempts done. Its methods may be called from any thread."""

    @property
    def workers(self) -> int:
        """How many attempts can be under way now."""
        ...

    def open(self, lost: Callable[[str], None]) -> None:
        """Begin; `lost` is told if all workers are gone for good, and why."""
        ...

    def share(self, key: str, data: bytes) -> None:
        """Make data known to all workers."""
        ...

    def start(self, attempt: Attempt) -> None:
        """Have an attempt done, now or when there is a worker for it."""
        ...

    def close(self) -> None:
        """End all workers; no attempt is ended afterwards."""
        ...


class RetryingEngine:
    """An engine (:class:`souffle.workers.job.Engine`) of a pool.

    A future is cancelled at any time before it is done: a job that waits is not begun, one that runs is let run and
    what it gives is dropped. Checks and what is registered with futures are called in a thread of the pool, one at a
    time.

    Parameters
    ----------
    name : str
    pool : Pool
    """

    def __init__(self, name: str, pool: Pool) -> None:
        self.name = name
        self._pool = pool
        self._lock = threading.Lock()
        self._open: dict[int, Future[Outcome]] = {}
        self._shared: set[str] = set()
        self._closed = False
        self._lost = ""
        pool.open(self._lose)

    def __enter__(self) -> RetryingEngine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<engine {self.name}: {self.workers} workers, {len(self._open)} jobs>"

    @property
    def workers(self) -> int:
        """How many jobs can run at a time now."""
        return 0 if self._closed or self._lost else self._pool.workers

    def share(self, data: bytes) -> str:
        """Make data known to all workers; the key is of its content.

        Raises
        ------
        OptionError
            If the engine is closed.
        WorkersLostError
        """
        self._check_open()
        key = key_of(data)
        if key not in self._shared:
            self._pool.share(key, data)
            self._shared.add(key)
        return key

    def submit(self, job: Job, check: Check | None = None) -> Future[Outcome]:
        """Have a job done.

        Parameters
        ----------
        job : Job
        check : callable, optional
            See :data:`souffle.workers.job.Check`.

        Returns
        -------
        Future of Outcome
            It raises nothing but ``CancelledError``, of which :class:`~souffle.workers.errors.WorkersLostError` is one.

        Raises
        ------
        OptionError
            If the engine is closed, or the job asks for what cannot be.
        WorkersLostError
            If there is nobody left to do it.
        """
        self._check_job(job)
        payload = pickle.dumps(job.payload, pickle.HIGHEST_PROTOCOL)
        future: Future[Outcome] = Future()
        request = Request(job.function, payload, job.shared, job.seconds, job.memory_mb)
        with self._lock:
            self._check_open()
            self._open[id(future)] = future
        self._pool.start(Attempt(self, future, job, request, check))
        return future

    def close(self) -> None:
        """End the workers, with whatever they are doing; a future that is not done is cancelled."""
        with self._lock:
            closed, self._closed = self._closed, True
        if not closed:
            self._pool.close()
            for future in self._taken():
                future.cancel()

    def attempt_ended(self, attempt: Attempt, answer: Answer, worker: str, place: str) -> None:
        """Look at what a pool's attempt gave: try again, or the job is done."""
        value, failure = _checked(answer, attempt.check)
        elsewhere = answer.elsewhere or (failure and not answer.failure)
        if elsewhere and attempt.number < ATTEMPTS and attempt.wanted and not (self._closed or self._lost):
            attempt.number, attempt.avoid = attempt.number + 1, place
            self._pool.start(attempt)
            return
        future = self._open.pop(id(attempt.future), None)
        if future is not None and future.set_running_or_notify_cancel():
            future.set_result(Outcome(value, failure, attempt.number, worker, answer.seconds))

    def _lose(self, why: str) -> None:
        with self._lock:
            if self._lost or self._closed:
                return
            self._lost = why
        for future in self._taken():
            if future.set_running_or_notify_cancel():
                future.set_exception(self._loss())

    def _taken(self) -> list[Future[Outcome]]:
        with self._lock:
            futures = list(self._open.values())
            self._open.clear()
        return futures

    def _loss(self) -> WorkersLostError:
        return WorkersLostError(f"the workers of {self.name} are lost: {self._lost}")

    def _check_open(self) -> None:
        if self._closed:
            raise OptionError(f"the engine {self.name} is closed and takes no further job")
        if self._lost:
            raise self._loss()

    def _check_job(self, job: Job) -> None:
        if not all(job.function.partition(":")):
            raise OptionError(f'{job.label}: the function {job.function!r} is not of the form "module:name"')
        if job.resource not in ("cpu", "gpu"):
            raise OptionError(f'{job.label}: the resource {job.resource!r} is neither "cpu" nor "gpu"')
        for name in ("seconds", "memory_mb"):
            limit = getattr(job, name)
            if limit is not None and not limit > 0:
                raise OptionError(f"{job.label}: {name}={limit} is not valid: a limit is positive, or None")
        unknown = [key for key in job.shared if key not in self._shared]
        if unknown:
            raise OptionError(
                f"{job.label}: there are no shared data {unknown[0]!r} on this engine; share() gives their key"
            )


def _checked(answer: Answer, check: Check | None) -> tuple[Any, str]:
    """The value, or why there is none."""
    if answer.failure:
        return None, answer.failure
    value, failure = None, ""
    with Caught() as reading:
        value = pickle.loads(answer.value)
    if reading.error is not None:
        return None, f"gave what cannot be read: {reason(reading.error)}"
    if check is None:
        return value, ""
    with Caught() as checking:
        failure = check(value)
    if checking.error is not None:
        failure = f"the check of what it gave failed: {reason(checking.error)}"
    return (None, failure) if failure else (value, "")
