"""Results that are worked out once for all who ask with an equal key."""

from __future__ import annotations

import random
import time
from functools import partial

import pytest

from souffle.program.shared import OncePer
from tests.testlib import in_threads


def test_the_least_recently_used_are_forgotten() -> None:
    asked: list[int] = []
    once: OncePer[int] = OncePer(limit=3)

    def find(key: int) -> int:
        return once(key, lambda: asked.append(key) or key * 2)

    assert [find(key) for key in (1, 2, 3, 1, 4, 1, 2)] == [2, 4, 6, 2, 8, 2, 4]
    assert asked == [1, 2, 3, 4, 2]
    once.forget()
    assert find(1) == 2 and asked[-1] == 1


@pytest.mark.parametrize("look", range(4))
def test_another_thread_makes_room_while_a_result_is_looked_up(look: int) -> None:
    """It takes the processor where the key is hashed for the so many-th time, and needs the only place."""
    once: OncePer[str] = OncePer(limit=1)

    class Key:
        looks = -1

        def __hash__(self) -> int:
            self.looks -= 1
            if self.looks == -2:
                once("other", lambda: "of another")
            return 7

    key = Key()
    assert once(key, lambda: "its own") == "its own"
    key.looks = look
    assert once(key, lambda: "its own") == "its own"


@pytest.mark.usefixtures("threads_that_take_turns")
def test_threads_share_one() -> None:
    """Four of them, wherever keys are compared: without a lock the order of the table is lost, and Python crashes."""
    once: OncePer[int] = OncePer(limit=4)

    class Key:
        def __init__(self, number: int) -> None:
            self.number = number

        def __hash__(self) -> int:
            return self.number % 2

        def __eq__(self, other: object) -> bool:
            time.sleep(0)
            return isinstance(other, Key) and self.number == other.number

    def work(seed: int) -> None:
        draw = random.Random(seed)
        for _ in range(600):
            number = draw.randrange(8)
            assert once(Key(number), lambda number=number: number**2) == number**2

    assert not in_threads([partial(work, seed) for seed in range(4)])
    kept: list[int] = []
    for number in range(8):
        once(Key(number), lambda number=number: kept.append(number) or 0)
    assert len(kept) >= 4
