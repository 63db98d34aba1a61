"""Timing what runs on the processor, or what the host waits for: by the wall clock, with cold caches or warm ones."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path

import numpy as np

from souffle.benchmark.peer import HOST

__all__ = ["HostWay", "evict_caches", "settle"]

_TIMES_THE_CACHE = 2
"""Bytes that are written to overwrite the last cache, over its size: it may replace some of its own first."""
_UNKNOWN_CACHE_BYTES = 64 << 20
"""What is taken for the size of the last cache where the system does not say it."""
_STEP_SECONDS = 0.015
"""Longer than a tick of the system's clock, which is when it counts the time of threads that run elsewhere."""
_MOST_STEPS = 20
_IDLE = 0.1
"""A step in which the process's threads took less than this share of it is one in which they sleep."""


class HostWay:
    """A call that is timed by the wall clock.

    Parameters
    ----------
    call : callable
        Runs once, and returns when the outputs are there.
    named : callable
        What `call` returned, as arrays by the model's names.
    form : str
    clock : str
    timer : callable
        Seconds; for tests another.
    evict : callable
        Overwrites the caches.
    untimed : str
        Why its time would say nothing.
    """

    def __init__(
        self,
        call: Callable[[], object],
        named: Callable[[object], Mapping[str, np.ndarray]],
        *,
        form: str = HOST,
        clock: str = "wall clock",
        timer: Callable[[], float] = time.perf_counter,
        evict: Callable[[], None] | None = None,
        untimed: str = "",
    ) -> None:
        self.form, self.clock, self.untimed = form, clock, untimed
        self._call, self._named, self._timer = call, named, timer
        self._evict = evict or evict_caches

    def outputs(self) -> Mapping[str, np.ndarray]:
        """Run once: outputs by the model's names."""
        return self._named(self._call())

    def sample(self, cold: bool) -> float:
        """Run once, and say how many microseconds that took; see :class:`souffle.benchmark.peer.Way`."""
        if cold:
            self._evict()
        else:
            self._call()
        begin = self._timer()
        self._call()
        return (self._timer() - begin) * 1e6


@cache
def _area() -> np.ndarray:
    sizes = [_bytes(path.read_text().strip()) for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("*/size")]
    return np.zeros(_TIMES_THE_CACHE * max(sizes, default=_UNKNOWN_CACHE_BYTES), np.uint8)


def _bytes(size: str) -> int:
    """Of Linux's words, such as ``32768K``."""
    unit = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}.get(size[-1:], 0)
    return int(size[:-1]) * unit if unit else int(size)


def evict_caches() -> None:
    """Overwrite an area of twice the processor's last cache."""
    area = _area()
    area += 1


def settle() -> None:
    """Wait until the threads of this process sleep: workers go on polling for a while after a run, on cores that the
    next one needs."""
    for _ in range(_MOST_STEPS):
        before = time.process_time()
        time.sleep(_STEP_SECONDS)
        if time.process_time() - before < _IDLE * _STEP_SECONDS:
            return
