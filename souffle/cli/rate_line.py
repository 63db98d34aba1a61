"""What many jobs have in common in their progress: how many are done, by whom, how fast, how many failed, time left."""

from __future__ import annotations

import time

from souffle.cli.output import Progress

__all__ = ["RateLine"]

_SHOWN = {True: 0.5, False: 20.0}
"""Seconds between two messages, in a terminal and elsewhere."""


class RateLine:
    """The line that says how far a campaign is.

    Parameters
    ----------
    progress : Progress
    noun : str
        What is counted, such as ``"rows"``.
    on : str
        The engine, as it was asked for.
    total : int, optional
        How many there will be, as far as that is known.
    seconds : float, optional
        After so many none is begun any more.
    """

    def __init__(
        self, progress: Progress, noun: str, on: str, total: int | None = None, seconds: float | None = None
    ) -> None:
        self._progress, self._noun, self._on, self._total = progress, noun, on, total
        self._begin = time.monotonic()
        self._end = None if seconds is None else self._begin + seconds
        self._done = self._failed = 0
        self._shown = 0.0

    @property
    def time_is_up(self) -> bool:
        """Whether none is to be begun any more."""
        return self._end is not None and time.monotonic() > self._end

    def expect(self, more: int) -> None:
        """There will be more."""
        if self._total is not None:
            self._total += more

    def count(self, workers: int, *, failed: bool) -> None:
        """One is done, and so many workers are there; it is shown if it is time, and if it is the last."""
        self._done += 1
        self._failed += failed
        if self._done == self._total or time.monotonic() > self._shown + _SHOWN[self._progress.live]:
            self.show(workers)

    def show(self, workers: int) -> None:
        """Say how far it is."""
        self._shown = time.monotonic()
        took = self._shown - self._begin
        words = [
            f"{self._done}{f' of {self._total}' if self._total else ''} {self._noun}",
            f"{workers} {'worker' if workers == 1 else 'workers'} ({self._on})",
            f"{self._done / max(took, 1e-9):.2f} a second",
            f"{self._failed} failed" if self._failed else "none failed",
        ]
        left = self._seconds_left(took)
        if left is not None:
            words.append(f"{int(left) // 60}:{int(left) % 60:02} left")
        self._progress(", ".join(words))

    def _seconds_left(self, took: float) -> float | None:
        lefts = [] if self._end is None else [max(0.0, self._end - self._shown)]
        if self._total and self._done:
            lefts.append((self._total - self._done) * took / self._done)
        return min(lefts, default=None)
