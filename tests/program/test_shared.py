"""Results that are worked out once for all who ask with an equal key."""

from __future__ import annotations

import pytest

from souffle.program.shared import OncePer


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
