"""Tiles drawn for a number of threads."""

from __future__ import annotations

import random
from math import prod

import pytest

from souffle.tuning.tiles import TileAxis, draw_tiles, move_factor

THREADS = 256


def nest(*extents: int, reduced: int = 96) -> list[TileAxis]:
    spatial = [TileAxis(step, extent, 5, 64, True) for step, extent in enumerate(extents)]
    return [*spatial, TileAxis(len(extents), reduced, 3, 64, False)]


@pytest.mark.parametrize("extents", [(384, 768), (1, 512, 64), (6, 49, 128, 2), (256,), (131072, 3)])
def test_parts_multiply_to_the_extents_and_threads_to_their_number(extents) -> None:
    axes = nest(*extents)
    for seed in range(30):
        drawn = draw_tiles(axes, THREADS, random.Random(seed))
        assert [prod(drawn[axis.step]) for axis in axes] == [axis.extent for axis in axes]
        assert prod(drawn[axis.step][2] for axis in axes if axis.spatial) == THREADS
        assert all(drawn[axis.step][-1] <= axis.innermost for axis in axes)
        kept = prod(prod(drawn[a.step]) // drawn[a.step][0] // drawn[a.step][2] for a in axes if a.spatial)
        assert kept <= 128


def test_extents_without_such_divisors_give_nothing() -> None:
    assert draw_tiles(nest(49, 81), THREADS, random.Random(0)) == {}
    assert draw_tiles(nest(49, 64), THREADS, random.Random(0)) == {}


def test_one_seed_draws_the_same() -> None:
    axes = nest(384, 768)
    assert draw_tiles(axes, THREADS, random.Random(3)) == draw_tiles(axes, THREADS, random.Random(3))
    assert len({str(draw_tiles(axes, THREADS, random.Random(seed))) for seed in range(20)}) > 10


def test_a_moved_factor_keeps_the_extent_and_the_threads() -> None:
    axis = TileAxis(0, 384, 5, 64, True)
    changed = 0
    for seed in range(40):
        moved = move_factor(axis, [6, 1, 16, 2, 2], random.Random(seed))
        assert prod(moved) == 384 and moved[2] == 16 and moved[-1] <= 64
        changed += moved != [6, 1, 16, 2, 2]
    assert changed > 30
    assert move_factor(TileAxis(0, 16, 5, 64, True), [1, 1, 16, 1, 1], random.Random(0)) == [1, 1, 16, 1, 1]
