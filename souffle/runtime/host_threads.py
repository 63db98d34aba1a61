"""How many threads compute a call on the processor: a pool for the process, and what each call takes of it.

Libraries have the pool's code in them (``souffle/codegen/host_pool.cpp``). That of the first one that is loaded serves
the process, and stays.
"""

from __future__ import annotations

import _ctypes
import contextlib
import ctypes
import threading
from pathlib import Path
from typing import ClassVar

from souffle.parallel import usable_cores
from souffle.schedule.cpu import limit_cores

__all__ = ["ThreadsOfCalls", "share_pool"]

_LAUNCH = "__TVMBackendParallelLaunch"
"""Where generated code has the address of what runs its parallel loops."""

_loading = threading.Lock()
_pool: ctypes.CDLL | None = None
_thread = threading.local()
"""``limit``: what the pool was told of this thread."""


def share_pool(path: Path) -> bool:
    """Let a library that TVM has loaded run its parallel loops in the pool of this process.

    Returns
    -------
    bool
        Whether it can: files of before have no pool in them.
    """
    global _pool
    library = ctypes.CDLL(str(path))
    with _loading:
        own = hasattr(library, "souffle_pool_1_launch")
        if own and _pool is None:
            library.souffle_pool_1_begin()
            _pool = library
    if own:
        address = ctypes.cast(_pool.souffle_pool_1_launch, ctypes.c_void_p)
        with contextlib.suppress(ValueError):  # where no loop of it is parallel
            ctypes.c_void_p.in_dll(library, _LAUNCH).value = address.value
    if library is not _pool:
        # TVM has it open; what ctypes opens it never closes.
        _ctypes.dlclose(library._handle)
    return own


class ThreadsOfCalls:
    """Divides the cores among the threads that call networks at the same time; to be used as a context.

    A call computes with at most so many threads as its network may have, itself among them, and with no more than its
    share of the cores while others are inside, or what these have left. With as many callers as cores, each computes
    alone. What an element is does not depend on how many threads there are.

    Parameters
    ----------
    most : int or None
        The network's threads; None for all cores that the process may use.
    pooled : bool
        Whether the network's library shares the pool of the process (:func:`share_pool`), and not TVM's.
    """

    _inside: ClassVar[dict[int, int]] = {}
    """The threads that each caller has. By the caller's number: what an interrupt left, its next call puts right."""

    def __init__(self, most: int | None, *, pooled: bool) -> None:
        self._cores = usable_cores()
        self.most = min(most or self._cores, self._cores)
        self._limit = _limit if pooled else limit_cores

    def __enter__(self) -> None:
        caller, inside = threading.get_ident(), self._inside
        count = self.most
        if count > 1 and inside:
            taken = [threads for other, threads in inside.copy().items() if other != caller]
            if taken:
                count = max(1, min(count, max(self._cores // (len(taken) + 1), self._cores - sum(taken))))
        inside[caller] = count
        self._limit(count)

    def __exit__(self, *_: object) -> None:
        self._inside.pop(threading.get_ident(), None)


def _limit(threads: int) -> None:
    if getattr(_thread, "limit", 1) != threads:
        _pool.souffle_pool_1_limit(threads)
        _thread.limit = threads
