"""The cores that a benchmark runs on: as many for each compiler, whatever its own pool of threads would take."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from souffle.errors import OptionError
from souffle.parallel import physical_cores, usable_cores

__all__ = ["on_cores"]


@contextlib.contextmanager
def on_cores(count: int) -> Iterator[None]:
    """Keep the calling thread, and those that it starts meanwhile, on so many cores, one processor of each.

    Raises
    ------
    OptionError
        If this process may not use so many.
    """
    cores = physical_cores()
    usable = usable_cores()
    if not 1 <= count <= usable:
        raise OptionError(f"threads={count} is not valid: this process may use {usable} cores, each for one thread")
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores[:count])
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
