"""Times of two kernels in turn on one device, and what they say of the first.

A pair of events around one launch on an idle device also times the host, which queues it. So the launches stand behind
a spacer, a copy of memory that takes longer than the host takes to queue what follows, and that leaves nothing of
theirs in the second-level cache. With ``t(n)`` for the spacer and ``n`` launches behind it, ``t(1) - t(0)`` is the time
with a cold cache, and ``(t(1 + n) - t(1)) / n`` that with a warm one.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from souffle.tuning.board.line import BoardError

__all__ = ["InTurn", "Rounds", "in_turn"]

_ROUNDS = 7
_LEAST_KEPT = 4
_REPEATS = 6
_PILOT_REPEATS = 3
_WARM_LAUNCHES, _WARM_SECONDS = 4, 1e-4
"""Of warm launches behind a spacer as many as take so long, but not more."""
_MOST_SECONDS = 4.0
"""On the device, for all rounds; a slow kernel is repeated less."""
_DEVIATIONS = 5.0
"""From the median, in units of the median deviation; what is farther away is left out."""
_STEADY, _CLOCK_SECONDS = 0.02, 5e-7
"""A part of the time, and what two events may differ by at any rate: what is not farther away is never left out."""
_SCATTER = 0.5
"""Half of the figures may be so far from the median, as a part of it, and no farther."""

Measure = Callable[[int, int], Sequence[float]]
"""Seconds of the spacer with so many launches behind it, so many times."""


@dataclass(frozen=True)
class Rounds:
    """One figure of two kernels, in seconds, round by round.

    Attributes
    ----------
    candidate, baseline : tuple of float
    """

    candidate: tuple[float, ...]
    baseline: tuple[float, ...]

    def settled(self, what: str) -> tuple[float, float, int]:
        """The figure of the candidate and of the baseline, and how many rounds were left out.

        The candidate's is the median of what it is to the baseline in the same round, which a device whose clock
        changes meanwhile does not change, times the median of the baseline.

        Raises
        ------
        BoardError
            If the rounds do not agree.
        """
        pairs = [(own, other) for own, other in zip(self.candidate, self.baseline, strict=True) if own > 0 < other]
        if len(pairs) < _LEAST_KEPT:
            raise BoardError(f"the times {what} are nothing: of {len(self.candidate)} rounds, {len(pairs)} have one")
        ratios = [own / other for own, other in pairs]
        middle = statistics.median(ratios)
        baseline = statistics.median(other for _, other in pairs)
        spread = statistics.median(abs(ratio - middle) for ratio in ratios)
        unsteady = max(_STEADY * middle, _CLOCK_SECONDS / baseline)
        if spread > max(_SCATTER * middle, unsteady):
            raise BoardError(
                f"the times {what} are too unsteady to compare: {min(self.candidate) * 1e6:.2f} to "
                f"{max(self.candidate) * 1e6:.2f} µs; other work on the board would do that"
            )
        kept = [ratio for ratio in ratios if abs(ratio - middle) <= max(_DEVIATIONS * spread, unsteady)]
        return statistics.median(kept) * baseline, baseline, len(self.candidate) - len(kept)


@dataclass(frozen=True)
class InTurn:
    """What is measured of two kernels.

    Attributes
    ----------
    seconds, baseline : tuple of float
        With a cold and with a warm second-level cache.
    left_out : int
        Of the rounds, those whose figures were far from the others.
    rounds : int
    """

    seconds: tuple[float, float]
    baseline: tuple[float, float]
    left_out: int
    rounds: int


def in_turn(candidate: Measure, baseline: Measure) -> InTurn:
    """Measure two kernels in turn.

    Raises
    ------
    BoardError
        If the times are none, or do not agree.
    """
    pilots = [_pilot(measure) for measure in (candidate, baseline)]
    more = [max(1, min(_WARM_LAUNCHES, int(_WARM_SECONDS / max(cold, 1e-9)))) for _, cold in pilots]
    once = sum(3 * spacer + (2 + count) * cold for (spacer, cold), count in zip(pilots, more, strict=True))
    repeats = max(1, min(_REPEATS, int(_MOST_SECONDS / (_ROUNDS * max(once, 1e-9)))))
    cold: tuple[list[float], list[float]] = ([], [])
    warm: tuple[list[float], list[float]] = ([], [])
    for _ in range(_ROUNDS):
        for which, measure in enumerate((candidate, baseline)):
            spacer, one, several = (_median(measure, count, repeats) for count in (0, 1, 1 + more[which]))
            cold[which].append(one - spacer)
            warm[which].append((several - one) / more[which])
    of_cold, of_warm = Rounds(*map(tuple, cold)), Rounds(*map(tuple, warm))
    seconds, baseline_seconds, left_out = zip(
        of_cold.settled("with a cold cache"), of_warm.settled("with a warm cache"), strict=True
    )
    return InTurn(seconds, baseline_seconds, max(left_out), _ROUNDS)


def _pilot(measure: Measure) -> tuple[float, float]:
    spacer, one = (_median(measure, count, _PILOT_REPEATS) for count in (0, 1))
    return spacer, max(0.0, one - spacer)


def _median(measure: Measure, launches: int, repeats: int) -> float:
    times = measure(launches, repeats)
    if len(times) != repeats or not all(0.0 < one < float("inf") for one in times):
        raise BoardError(f"the board says that {launches} launches behind a copy took {list(times)} s")
    return statistics.median(times)
