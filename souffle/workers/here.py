"""``here``: jobs in this process, one at a time, as they are submitted: for tests, and to look into one.

Nothing stands between a job and its caller: limits of time and memory are not looked at, and a job that ends its
process ends this one.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections.abc import Callable

from souffle.workers.harness import Harness
from souffle.workers.retrying import Attempt, RetryingEngine

__all__ = ["HerePool", "here_engine"]

_LOG = logging.getLogger(__name__)


def here_engine() -> RetryingEngine:
    """An engine that has done a job when ``submit`` returns."""
    return RetryingEngine("here", HerePool())


class HerePool:
    """Has an attempt done by who asks for it."""

    workers = 1

    def __init__(self) -> None:
        self._shared: dict[str, bytes] = {}
        self._harness = Harness(self._shared.__getitem__)
        # A second try begins as the first one ends, in the same thread.
        self._lock = threading.RLock()
        self._told = False

    def open(self, lost: Callable[[str], None]) -> None:
        """See :class:`souffle.workers.retrying.Pool`."""

    def share(self, key: str, data: bytes) -> None:
        """See :class:`souffle.workers.retrying.Pool`."""
        self._shared[key] = data

    def start(self, attempt: Attempt) -> None:
        """See :class:`souffle.workers.retrying.Pool`."""
        request, label = attempt.request, attempt.job.label
        if not self._told and (request.seconds is not None or request.memory_mb is not None):
            self._told = True
            _LOG.warning("%s has a limit of time or memory, which is not looked at in this process", label)
        with self._lock:
            name = f"{socket.gethostname()}:{os.getpid()}"
            attempt.end(self._harness.run(request), name, name)

    def close(self) -> None:
        """See :class:`souffle.workers.retrying.Pool`."""
        self._shared.clear()
