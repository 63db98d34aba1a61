"""Workers that are played: each sleeps for as long as a job would take, so that what is left is what the driver costs.

So a cluster of any size fits on one machine. What a search costs its driver is measured by giving it such an engine;
``python -m benchmarks.played_workers`` measures what engines cost by themselves.
"""

from __future__ import annotations

import argparse
import os
import pickle
import statistics
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from souffle.workers import Engine, Job, engine_for
from souffle.workers.harness import Answer
from souffle.workers.loop import LoopPool
from souffle.workers.retrying import Attempt, RetryingEngine

__all__ = ["PlayedPool", "played_engine"]


def played_engine(workers: int, seconds: Callable[[Job], float], give: Callable[[Job], Any]) -> RetryingEngine:
    """An engine whose workers sleep.

    Parameters
    ----------
    workers : int
    seconds : callable
        How long a job takes.
    give : callable
        What it gives then, which travels as any value does.
    """
    return RetryingEngine(f"played:{workers}", PlayedPool(workers, seconds, give))


class PlayedPool(LoopPool):
    """Has attempts played. A worker is a number and a timer.

    Parameters
    ----------
    workers : int
    seconds, give : callable
        See :func:`played_engine`.
    """

    def __init__(self, workers: int, seconds: Callable[[Job], float], give: Callable[[Job], Any]) -> None:
        super().__init__(f"played:{workers}")
        self._workers, self._seconds, self._give = workers, seconds, give
        self._free = deque(f"played:{number}" for number in range(workers))
        self._waiting: deque[Attempt] = deque()

    @property
    def workers(self) -> int:
        """See :class:`souffle.workers.retrying.Pool`."""
        return self._workers

    def share(self, key: str, data: bytes) -> None:
        """See :class:`souffle.workers.retrying.Pool`."""

    def _accept(self, attempt: Attempt) -> None:
        self._waiting.append(attempt)

    def _pump(self) -> None:
        while self._free and self._waiting:
            attempt = self._waiting.popleft()
            if attempt.wanted:
                seconds = self._seconds(attempt.job)
                self.loop.call_later(seconds, self._done, attempt, self._free.popleft(), seconds)

    def _done(self, attempt: Attempt, worker: str, seconds: float) -> None:
        self._free.append(worker)
        value = pickle.dumps(self._give(attempt.job), pickle.HIGHEST_PROTOCOL)
        self._pump()
        attempt.end(Answer(value, seconds=seconds), worker, worker)

    def _end(self) -> None:
        self._waiting.clear()


def idle(payload: Any, shared: dict[str, bytes]) -> Any:
    """A job that does nothing."""
    return payload


def sleep(payload: float, shared: dict[str, bytes]) -> float:
    """A job that sleeps."""
    time.sleep(payload)
    return payload


def _cost(engine: Engine, job: Job, count: int) -> tuple[float, float, float]:
    """Of so many jobs, submitted together, in seconds for each: to submit it, until it is done, and processor time."""
    engine.submit(job).result()
    before = os.times()
    begin = time.perf_counter()
    futures = [engine.submit(job) for _ in range(count)]
    submitted = time.perf_counter()
    failed = [future.result().failure for future in futures if future.result().failure]
    if failed:
        raise SystemExit(f"{engine.name}: {failed[0]}")
    done = time.perf_counter()
    after = os.times()
    ours = after.user + after.system - before.user - before.system
    return (submitted - begin) / count, (done - begin) / count, ours / count


def main() -> None:
    """Print what a job costs on each engine, and how much of their workers' time is used where jobs sleep."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--on", nargs="*", default=["here", "local:1", "local:2"], help="engines, to do nothing")
    parser.add_argument("--jobs", type=int, nargs="+", default=[1000, 4000, 16000], help="of them")
    parser.add_argument("--workers", type=int, nargs="*", default=[1, 8, 64, 512], help="that are played, and sleep")
    parser.add_argument("--processes", type=int, nargs="*", default=[8, 64], help="that sleep")
    parser.add_argument("--seconds", type=float, default=0.2, help="of sleep for each job")
    parser.add_argument("--turns", type=int, default=60, help="jobs of each worker that sleeps")
    arguments = parser.parse_args()
    for word in arguments.on:
        for count in arguments.jobs:
            with engine_for(word) as engine:
                limit = None if word == "here" else 60.0
                job = Job("benchmarks.played_workers:idle", {"values": list(range(20))}, "nothing", seconds=limit)
                turns = [_cost(engine, job, count) for _ in range(3)]
            submit, done, ours = (1e6 * statistics.median(each) for each in zip(*turns, strict=True))
            print(f"{word}, {count} jobs: {submit:.0f} us to submit, {done:.0f} us until done, {ours:.0f} us of ours")
    kinds = [("played", count) for count in arguments.workers] + [("local", count) for count in arguments.processes]
    for kind, workers in kinds:
        job = Job("benchmarks.played_workers:sleep", arguments.seconds, "sleep")
        played = played_engine(workers, lambda job: job.payload, lambda job: job.payload) if kind == "played" else None
        with played or engine_for(f"local:{workers}") as engine:
            # All of them have begun.
            [future.result() for future in [engine.submit(job) for _ in range(4 * workers)]]
            _, done, ours = _cost(engine, job, arguments.turns * workers)
        used = f"{arguments.seconds / workers / done:.1%} of the workers' time"
        print(f"{kind}:{workers}, {arguments.seconds:g} s a job: {used}, {1e6 * ours:.0f} us of ours")


if __name__ == "__main__":
    main()
