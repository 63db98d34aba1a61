"""Work in several threads that an interrupt ends: compilers run outside of Python's lock, as processes or in C++."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

__all__ = ["map_in_threads"]

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
