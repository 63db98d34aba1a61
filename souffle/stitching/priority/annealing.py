"""Simulated annealing over priorities: the paper's other search (002 §4), which learns nothing for the next graph."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

__all__ = ["Annealed", "anneal"]

_HOT, _COLD = 1e-2, 1e-5
"""Temperatures at the beginning and at the end, in parts of the time without fusion: what one fusion of a graph of some
hundred vertices gains, and a thousandth of that."""


class Annealed(NamedTuple):
    """Priorities, an array with one for each vertex, and the seconds that these take."""

    priorities: np.ndarray
    seconds: float


def anneal(
    seconds: Callable[[np.ndarray], float],
    count: int,
    scale: float,
    evaluations: int,
    seed: int = 0,
) -> Annealed:
    """The best priorities that are met.

    Begins with the default order. A step gives a vertex another priority, anywhere among those of the others; one that
    takes longer by d seconds is kept with a probability of exp(-d / temperature), and the temperature falls
    geometrically.

    Parameters
    ----------
    seconds : callable
        Of priorities, an array of `count` numbers.
    count : int
        Vertices.
    scale : float
        Seconds without fusion.
    evaluations : int
        Of `seconds`, at least 1.
    seed : int
    """
    draws = np.random.default_rng(seed)
    present = np.zeros(count)
    now = seconds(present)
    best, least = present, now
    for step in range(1, evaluations):
        temperature = scale * _HOT * (_COLD / _HOT) ** (step / evaluations)
        other = present.copy()
        other[draws.integers(count)] = draws.uniform(-1.0, 1.0)
        later = seconds(other)
        if later <= now or draws.random() < math.exp((now - later) / temperature):
            present, now = other, later
            if now < least:
                best, least = present, now
    return Annealed(best, least)
