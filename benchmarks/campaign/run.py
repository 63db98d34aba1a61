"""Runs the cases of a campaign on an engine, keeps what comes of each as it ends, and says how far it is."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice, takewhile
from typing import Any

from benchmarks.campaign.records import Record, RecordFile
from souffle.cli.output import Progress
from souffle.cli.rate_line import RateLine
from souffle.workers import Job, Outcome, WorkersLostError, engine_for
from souffle.workers.cases import Asking, Cases

__all__ = ["Death", "More", "NamedCase", "Workers", "death_of", "run_cases"]


@dataclass(frozen=True)
class More:
    """What comes of a case that only says which cases there are."""

    cases: Sequence[NamedCase]


Result = Record | Sequence[Record] | More
NamedCase = tuple[str, Asking[Result]]
"""What a message calls it, and how it asks; several cases that are run together are one here."""


@dataclass(frozen=True)
class Workers:
    """Who runs a campaign.

    Attributes
    ----------
    on : str
        As :func:`souffle.workers.engine_for` takes it.
    cases_each : int, optional
        After so many cases for each worker, new ones take their place: what a compiler leaves behind in memory adds up.
    shared : sequence of bytes
        What jobs name by :func:`souffle.workers.harness.key_of`.
    """

    on: str
    cases_each: int | None = None
    shared: Sequence[bytes] = ()


@dataclass(frozen=True)
class Death:
    """How a job has ended twice without an answer.

    Attributes
    ----------
    kind : str
        ``"timeout"`` or ``"crash"``.
    reason : str
        The same wherever it runs.
    said : str
        Where it was, or what its process said last.
    """

    kind: str
    reason: str
    said: str


def death_of(job: Job, outcome: Outcome) -> Death | None:
    """How a job has ended, if it gave no answer."""
    if not outcome.failure:
        return None
    late = job.seconds is not None and outcome.seconds >= job.seconds
    said = outcome.failure.partition("\n")[2]
    # Whether it said anything depends on what else its process has done.
    return Death("timeout" if late else "crash", outcome.reason.removesuffix("; it said"), said)


def run_cases(
    cases: Iterable[NamedCase],
    records: RecordFile,
    workers: Workers,
    progress: Progress,
    *,
    noun: str,
    total: int | None = None,
    minutes: float | None = None,
    failed: Callable[[Mapping[str, Any]], bool] = lambda record: False,
) -> None:
    """Run cases.

    Parameters
    ----------
    cases : iterable
        In the order in which they are begun; taken from as there is room for them.
    records : RecordFile
        What came of each is added as it ends.
    workers : Workers
    progress : Progress
    noun : str
        What cases are called, such as ``"networks"``.
    total : int, optional
        How many there will be, without those that cases say there are more of.
    minutes : float, optional
        After so many none is begun any more.
    failed : callable
        Whether a record is of a failure, of which the progress says how many there are.

    Raises
    ------
    OptionError
        If there is no such engine.
    WorkersLostError, KeyboardInterrupt
        What was finished is kept.
    """
    line = RateLine(progress, noun, workers.on, total, None if minutes is None else 60 * minutes)
    waiting = takewhile(lambda case: not line.time_is_up, cases)

    def keep(results: Iterable[tuple[str, Result]]) -> None:
        for _, result in results:
            if isinstance(result, More):
                line.expect(len(result.cases))
                running.add(result.cases)
                continue
            for record in [result] if isinstance(result, dict) else result:
                records.add(record)
                line.count(engine.workers, failed=failed(record))

    first = next(waiting, None)
    while first is not None:
        with engine_for(workers.on) as engine:
            for data in workers.shared:
                engine.share(data)
            most = None if workers.cases_each is None else workers.cases_each * max(1, engine.workers) - 1
            running = Cases(engine, chain([first], islice(waiting, most)), lambda: progress.interrupted)
            line.show(engine.workers)
            try:
                keep(running)
            except (KeyboardInterrupt, WorkersLostError):
                keep(running.rest())
                raise
        first = next(waiting, None)
