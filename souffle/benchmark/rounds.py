"""Runs of several in turn, and what they say: quartiles of each, and ratios of what ran in the same round.

A round runs each once, in the order that was given: A B C, A B C, ... So what slows the machine down for a while slows
all down, and a ratio is one of neighbours in time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from souffle.benchmark.peer import Way

__all__ = ["Figures", "Ratio", "figures_of", "ratio_of", "run_in_turn"]

_RESAMPLED = 2000
_SEED = 0
_LOW, _HIGH = 2.5, 97.5


@dataclass(frozen=True)
class Figures:
    """What was measured of one way.

    Attributes
    ----------
    runs : int
    median_us, lower_us, upper_us : float
        The median, and the quartiles around it.
    best_us : float
        The least.
    """

    runs: int
    median_us: float
    lower_us: float
    upper_us: float
    best_us: float


@dataclass(frozen=True)
class Ratio:
    """How many times as long a peer takes as we do: the median over rounds, and where 95 % of its resamples lie.

    Attributes
    ----------
    median, low, high : float
        Above 1 the peer takes longer.
    """

    median: float
    low: float
    high: float


def run_in_turn(
    ways: Sequence[Way], *, runs: int, warmup: int, cold: bool, samples: Sequence[list[float]], rest: Callable[[], None]
) -> None:
    """Run all in turn.

    Parameters
    ----------
    ways : sequence of Way
    runs : int
        Rounds that count.
    warmup : int
        Rounds before them that do not.
    cold : bool
        Whether caches are overwritten before each run.
    samples : sequence of list
        Microseconds are appended, to the list of each way; after an interrupt they hold what was measured before it.
    rest : callable
        What is done before each run, timed by nobody.
    """
    for number in range(-warmup, runs):
        for way, found in zip(ways, samples, strict=True):
            rest()
            microseconds = way.sample(cold)
            if number >= 0:
                found.append(microseconds)


def figures_of(samples: Sequence[float]) -> Figures:
    """Median and quartiles of at least one sample."""
    lower, median, upper = np.percentile(samples, [25, 50, 75])
    return Figures(len(samples), float(median), float(lower), float(upper), float(min(samples)))


def ratio_of(peer: Sequence[float], ours: Sequence[float]) -> Ratio:
    """Of the rounds that both have run: the median of their ratios, with its bootstrap interval (percentiles).

    Rounds count as independent of each other. Where the machine's speed drifts they are not quite, and the interval is
    too narrow.
    """
    rounds = min(len(peer), len(ours))
    ratios = np.asarray(peer[:rounds]) / np.asarray(ours[:rounds])
    drawn = np.random.default_rng(_SEED).integers(0, rounds, (_RESAMPLED, rounds))
    low, high = np.percentile(np.median(ratios[drawn], axis=1), [_LOW, _HIGH])
    return Ratio(float(np.median(ratios)), float(low), float(high))
