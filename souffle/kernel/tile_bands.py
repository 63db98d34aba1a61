"""Of which slots of one stage a slot of another needs tiles: a band around a line, which a kernel's text can compute.

::

    base  = slot // step * rise // run
    first = max(base - before, 0)          last = min(base + after, slots - 1)

A band may hold more than what is needed, never less: who waits for more than it needs waits longer, and is right.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np

__all__ = ["TileBand", "band_around"]

_MOST_STEPS = 8
"""Ways to part slots into steps that are tried."""

_LARGEST_RUN = 1 << 12
"""Of a slope's denominator: numbers of slots stay far from where products overflow."""


@dataclass(frozen=True)
class TileBand:
    """The slots that a slot waits for; see the module.

    Attributes
    ----------
    step, rise, run : int
        Of the line.
    before, after : int
        Slots around it; either may be negative.
    slots : int
        That there are, of all that it waits for.
    """

    step: int
    rise: int
    run: int
    before: int
    after: int
    slots: int

    @property
    def width(self) -> int:
        """The most slots that one waits for."""
        return max(1, min(self.before + self.after + 1, self.slots))

    def base(self, slot: Any, divide: Any = lambda a, b: a // b) -> Any:
        """The line at a slot, or at an array of them, or as an expression, for which `divide` writes a division."""
        steps = slot if self.step == 1 else divide(slot, self.step)
        risen = steps * self.rise
        return risen if self.run == 1 else divide(risen, self.run)

    def ends(self, slots: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """First and last slot of each band."""
        base = self.base(slots)
        return np.maximum(base - self.before, 0), np.minimum(base + self.after, self.slots - 1)

    def __str__(self) -> str:
        """In words, of the slot ``n``."""
        if self.width == self.slots:
            return "all tiles" if self.slots > 1 else "its tile"
        base = str(self.base(_Text("n"), lambda a, b: _Text(f"{a} / {b}")))
        return f"the tiles {_moved(base, -self.before)} to {_moved(base, self.after)}"


class _Text(str):
    """An expression."""

    def __mul__(self, factor: int) -> _Text:
        return self if factor == 1 else _Text(f"{self} * {factor}")


def _moved(base: str, by: int) -> str:
    return base if not by else f"{base} {'+' if by > 0 else '-'} {abs(by)}"


def band_around(first: np.ndarray, last: np.ndarray, slots: int) -> TileBand | None:
    """The narrowest band of those tried that holds slots ``first[n] .. last[n]`` for each ``n``.

    Parameters
    ----------
    first, last : ndarray of int
        For each slot; ``last[n] < first[n]`` where it needs none.
    slots : int
        That they are numbers of.

    Returns
    -------
    TileBand or None
        ``None`` where no slot needs any.
    """
    needs = np.flatnonzero(first <= last)
    if not needs.size:
        return None
    every = np.arange(len(first))
    best: tuple[tuple[float, int], TileBand] | None = None
    for step in _steps(first, last):
        for slope in _slopes(first[needs], last[needs], needs // step, slots, -(-len(first) // step)):
            line = TileBand(step, slope.numerator, slope.denominator, 0, 0, slots)
            base = line.base(needs)
            before, after = int((base - first[needs]).max()), int((last[needs] - base).max())
            band = TileBand(step, slope.numerator, slope.denominator, before, after, slots)
            low, high = band.ends(every)
            # Of equal widths the one with the shorter text.
            cost = float(np.maximum(high - low, 0).mean()), (step > 1) + (slope.denominator > 1) + (slope != 0)
            if best is None or cost < best[0]:
                best = cost, band
    return best[1]


def _steps(first: np.ndarray, last: np.ndarray) -> list[int]:
    """How many neighbours may need the same: parts of what all places have in common where that changes."""
    changes = np.flatnonzero((np.diff(first) != 0) | (np.diff(last) != 0)) + 1
    common = math.gcd(*(int(change) for change in changes)) if changes.size else 1
    return sorted({1, *sorted((d for d in range(1, common + 1) if common % d == 0), reverse=True)[:_MOST_STEPS]})


def _slopes(first: np.ndarray, last: np.ndarray, steps: np.ndarray, slots: int, count: int) -> set[Fraction]:
    """Slopes of the line: level, along the whole, and along the ends of what is needed."""
    found = {Fraction(0), Fraction(slots, count)}
    run = int(steps[-1] - steps[0])
    if run:
        found |= {Fraction(int(ends[-1] - ends[0]), run) for ends in (first, last)}
        # The ends of the first and of the last may be cut off.
        inside = (first > 0) & (last < slots - 1)
        if inside.sum() > 1 and steps[inside][-1] > steps[inside][0]:
            rises = (int(ends[inside][-1] - ends[inside][0]) for ends in (first, last))
            found |= {Fraction(rise, int(steps[inside][-1] - steps[inside][0])) for rise in rises}
    return {slope.limit_denominator(_LARGEST_RUN) for slope in found if slope >= 0}
