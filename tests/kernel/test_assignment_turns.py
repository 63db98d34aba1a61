"""What blocks compute between two barriers of the grid, tile by tile."""

from __future__ import annotations

import random

import pytest

from souffle.kernel.assignment import turns


@pytest.mark.parametrize("seed", range(50))
def test_the_longest_block_of_several_stages_is_the_longest_of_each(seed: int) -> None:
    """So that a kernel's time is the sum of its stages' though blocks go on without waiting for each other."""
    dice = random.Random(seed)
    blocks = dice.choice((1, 2, 7, 132, 264))
    stages = [(dice.randint(1, 600), dice.choice((1, 1, 2, 5)), dice.random()) for _ in range(dice.randint(1, 4))]
    busy = [0.0] * blocks
    for slots, per_slot, seconds in stages:
        for slot in range(slots):
            busy[slot % blocks] += per_slot * seconds
    assert max(busy) == pytest.approx(sum(turns(slots, each, blocks) * s for slots, each, s in stages))
    assert max(busy) == busy[0]
