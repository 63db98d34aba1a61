"""What a worker is given, and what comes of it: plain data, so that it makes no difference where a worker is."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, Protocol

__all__ = ["Check", "Engine", "Job", "Outcome", "Places"]

Check = Callable[[Any], str]
"""Says of what a worker gave why it cannot be true, or nothing; called where the job was submitted."""


@dataclass(frozen=True)
class Places:
    """What there are so many of, whoever's workers use them, such as the boards of a tracker.

    Attributes
    ----------
    name : str
    count : int
        1 or more.
    """

    name: str
    count: int


@dataclass(frozen=True)
class Job:
    """One piece of work that needs nothing but what it names.

    Attributes
    ----------
    function : str
        ``"module:name"`` of a function that takes `payload` and a dictionary of what `shared` names, as bytes, and
        gives plain data. It keeps nothing from one job to the next but what it could make anew.
    payload : object
        Plain data: numbers, text, bytes, and tuples, lists and dictionaries of them.
    label : str
        What messages call it, such as ``"trial 3 of stage dense_add"``.
    shared : tuple of str
        Keys of :meth:`Engine.share`: what many jobs are given and is sent to a worker once.
    seconds : float, optional
        It may run so long; then its worker is ended.
    memory_mb : int, optional
        Its worker may hold so much, in MB; more ends the job.
    resource : {"cpu", "gpu"}
        ``"gpu"``: only workers that own a GPU take it, and one of them takes one at a time.
    places : Places, optional
        It takes one of them. :class:`souffle.workers.cases.Cases` gives workers no more such jobs at a time than there
        are places, so that no worker waits for one that has other jobs to do.
    """

    function: str
    payload: Any
    label: str
    shared: tuple[str, ...] = ()
    seconds: float | None = None
    memory_mb: int | None = None
    resource: Literal["cpu", "gpu"] = "cpu"
    places: Places | None = None


@dataclass(frozen=True)
class Outcome:
    """What came of a job.

    Attributes
    ----------
    value : object
        What its function gave; ``None`` if `failure` says why there is nothing.
    failure : str
        Of the last attempt: that its worker ended, that it took too long or too much, what it raised, or what the check
        says. Empty where all is well.
    attempts : int
    worker : str
        Machine and process of the last attempt.
    seconds : float
        That its function ran in the last attempt.
    """

    value: Any = None
    failure: str = ""
    attempts: int = 1
    worker: str = ""
    seconds: float = 0.0

    @property
    def reason(self) -> str:
        """The first line of `failure`; others say where in a worker's code it was."""
        return self.failure.partition("\n")[0]


class Engine(Protocol):
    """Runs jobs, in whatever order, on its workers; closed at the end of a ``with``.

    A job whose worker dies, takes too long, is evicted or gives what cannot be true is tried once more, elsewhere where
    there is an elsewhere. What fails twice is an outcome with its reason, and costs nothing else.
    """

    name: str
    """As it was asked for, such as ``"local:2"``."""

    @property
    def workers(self) -> int:
        """How many jobs can run at a time now."""
        ...

    def share(self, data: bytes) -> str:
        """Make data known to all workers; the key is of its content."""
        ...

    def submit(self, job: Job, check: Check | None = None) -> Future[Outcome]:
        """Have a job done. The future raises nothing but :class:`concurrent.futures.CancelledError`."""
        ...

    def close(self) -> None:
        """End the workers, with whatever they are doing; a future that is not done is cancelled."""
        ...

    def __enter__(self) -> Engine: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...
