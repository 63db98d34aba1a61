"""Tile sizes of MetaSchedule's nests, drawn so that the threads of a block come to a given number."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from math import prod

__all__ = ["TileAxis", "draw_tiles", "move_factor"]

_THREADS = 2
"""The level of a spatial axis that threads share: after the grid and virtual threads."""
_MOST_PER_THREAD = 128
"""Results that a thread keeps at most: half of the 255 registers that it may have, the rest for operands."""
_STAGED_ELEMENTS = 48 * 1024 // 4
"""Of fp32 that a block may stage in shared memory."""
_COPIES = (1, 2, 4)
"""Of what is staged, for how many steps ahead."""
_TRIES = 16


@dataclass(frozen=True)
class TileAxis:
    """One axis that MetaSchedule tiles.

    Attributes
    ----------
    step : int
        Of the trace, that samples the tiles.
    extent : int
    parts : int
        Levels that it is split into.
    innermost : int
        The largest innermost part.
    spatial : bool
        Whether it is data-parallel; else it is reduced.
    """

    step: int
    extent: int
    parts: int
    innermost: int
    spatial: bool


def draw_tiles(nest: Sequence[TileAxis], threads: int, rng: random.Random) -> dict[int, list[int]]:
    """The parts of each axis, by its step; empty if no divisors of the extents make so many threads.

    Parameters
    ----------
    nest : sequence of TileAxis
    threads : int
        The product that the parts for threads have together.
    rng : Random
    """
    spatial = [axis for axis in nest if axis.spatial]
    shares = tuple(_shares(tuple(axis.extent for axis in spatial), threads))
    if not shares:
        return {}
    drawn: dict[int, list[int]] = {}
    for _ in range(_TRIES):
        of_threads = rng.choice(shares)
        drawn = {axis.step: _parts(axis, share, rng) for axis, share in zip(spatial, of_threads, strict=True)}
        kept = prod(parts[level] for parts in drawn.values() for level in range(1, len(parts)) if level != _THREADS)
        if kept <= _MOST_PER_THREAD:
            break
    else:
        for parts in drawn.values():
            # All beyond the threads goes to the grid.
            parts[0], rest = prod(parts) // parts[_THREADS], parts[_THREADS]
            parts[1:] = [rest if level == _THREADS else 1 for level in range(1, len(parts))]
    # A product stages rows and columns of its tile for each term of a chunk; pipelined sketches do so several times.
    staged = sum(prod(drawn[axis.step][1:]) for axis in spatial if axis.extent > 1)
    chunk = max(1, _STAGED_ELEMENTS // max(1, staged) // rng.choice(_COPIES))
    for axis in nest:
        if not axis.spatial:
            drawn[axis.step] = _parts(axis, None, rng, chunk)
            chunk //= prod(drawn[axis.step][1:])
    return drawn


def _shares(extents: tuple[int, ...], threads: int) -> Iterator[tuple[int, ...]]:
    if not extents:
        if threads == 1:
            yield ()
        return
    for divisor in _divisors(threads):
        if extents[0] % divisor == 0:
            yield from ((divisor, *rest) for rest in _shares(extents[1:], threads // divisor))


def _parts(axis: TileAxis, of_threads: int | None, rng: random.Random, chunk: int | None = None) -> list[int]:
    """The axis split at random, its share of the threads given, and what is left beside the outermost part."""
    parts = [1] * axis.parts
    left = axis.extent
    if of_threads is not None:
        parts[_THREADS] = of_threads
        left //= of_threads
    free = [level for level in range(axis.parts) if of_threads is None or level != _THREADS]
    for factor in _prime_factors(left):
        level = rng.choice(free)
        if level == axis.parts - 1 and parts[level] * factor > axis.innermost:
            level = 0
        if chunk is not None and prod(parts[1:]) * factor > chunk:
            level = 0
        parts[level] *= factor
    return parts


def move_factor(axis: TileAxis, parts: Sequence[int], rng: random.Random) -> list[int]:
    """The parts with one prime factor moved to another level; those of threads stay."""
    free = [level for level in range(axis.parts) if not (axis.spatial and level == _THREADS)]
    source = [level for level in free if parts[level] > 1]
    moved = list(parts)
    if not source:
        return moved
    out = rng.choice(source)
    into = rng.choice([level for level in free if level != out])
    factor = rng.choice(_prime_factors(parts[out]))
    if into == axis.parts - 1 and parts[into] * factor > axis.innermost:
        return moved
    moved[out] //= factor
    moved[into] *= factor
    return moved


@cache
def _divisors(number: int) -> tuple[int, ...]:
    return tuple(divisor for divisor in range(1, number + 1) if number % divisor == 0)


@cache
def _prime_factors(number: int) -> tuple[int, ...]:
    factors: list[int] = []
    divisor = 2
    while divisor * divisor <= number:
        while number % divisor == 0:
            factors.append(divisor)
            number //= divisor
        divisor += 1
    return (*factors, number) if number > 1 else tuple(factors)
