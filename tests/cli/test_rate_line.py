"""The line that says how far many jobs are."""

from __future__ import annotations

import pytest

from souffle.cli import rate_line
from souffle.cli.rate_line import RateLine


class Told(list):
    """In the place of the progress."""

    live = False

    def __call__(self, message: str) -> None:
        self.append(message)


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    time = [1000.0]
    monkeypatch.setattr(rate_line.time, "monotonic", lambda: time[0])
    return time


def test_how_many_by_whom_how_fast_and_how_long_still(now: list[float]) -> None:
    told = Told()
    line = RateLine(told, "rows", "local:2", total=5)
    line.show(2)
    for _ in range(4):
        now[0] += 10
        line.count(2, failed=now[0] == 1020)
    # Every twenty seconds, and in a terminal twice a second.
    assert told == [
        "0 of 5 rows, 2 workers (local:2), 0.00 a second, none failed",
        "3 of 5 rows, 2 workers (local:2), 0.10 a second, 1 failed, 0:20 left",
    ]
    line.expect(1)
    told.live = True
    now[0] += 100
    line.count(1, failed=False)
    assert told[2:] == ["5 of 6 rows, 1 worker (local:2), 0.04 a second, 1 failed, 0:28 left"]
    # The last one at once.
    line.count(1, failed=False)
    assert told[3:] == ["6 of 6 rows, 1 worker (local:2), 0.04 a second, 1 failed, 0:00 left"]


def test_time_that_is_up(now: list[float]) -> None:
    told = Told()
    line = RateLine(told, "cases", "here", seconds=90)
    assert not line.time_is_up
    now[0] += 30
    line.count(1, failed=False)
    assert told == ["1 cases, 1 worker (here), 0.03 a second, none failed, 1:00 left"]
    now[0] += 61
    assert line.time_is_up
    line.show(1)
    assert told[1].endswith(", 0:00 left")
