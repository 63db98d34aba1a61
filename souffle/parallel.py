"""The cores there are, and work in several threads that an interrupt ends: compilers run outside of Python's lock."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

__all__ = ["map_in_threads", "physical_cores"]

_Result = TypeVar("_Result")


def map_in_threads(workers: int, work: Callable[..., _Result], *items: Iterable[Any]) -> list[_Result]:
    """What `work` gives for each item, in their order; the first error is raised.

    After an interrupt nothing further is begun, and what runs is not waited for.
    """
    pool = ThreadPoolExecutor(workers)
    wait = True
    try:
        return list(pool.map(work, *items))
    except KeyboardInterrupt:
        wait = False
        raise
    finally:
        pool.shutdown(wait=wait, cancel_futures=True)


def physical_cores() -> list[int]:
    """One processor number for each core that this process may use: two threads of a core share its vector units."""
    usable = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    cores: dict[str, int] = {}
    for cpu in usable:
        path = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        cores.setdefault(path.read_text().strip() if path.is_file() else str(cpu), cpu)
    return list(cores.values())
