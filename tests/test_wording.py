"""Words of the texts that people read."""

from __future__ import annotations

import pytest

from souffle.wording import minutes_and_seconds


@pytest.mark.parametrize(
    ("seconds", "said"), [(0.2, "0 min 0 s"), (45.0, "0 min 45 s"), (59.7, "1 min 0 s"), (178.4, "2 min 58 s")]
)
def test_minutes_are_whole_ones(seconds: float, said: str) -> None:
    assert minutes_and_seconds(seconds) == said
