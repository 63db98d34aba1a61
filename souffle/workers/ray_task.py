"""What runs on the nodes of a Ray cluster: each of Ray's workers has a worker's process of ours below it, for its jobs.

So a job that ends its process, by its limits too, does not end Ray's worker, whose threads would not live with a limit
of memory, and what it did is known.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from functools import cache, partial
from typing import Any

import ray

import souffle
from souffle.errors import IncompatibleEnvironmentError
from souffle.workers.harness import Request
from souffle.workers.process import BlockingWorker

__all__ = ["GpuTasks", "run_task"]

_LOOK_SECONDS = 0.5

Result = tuple[tuple[Any, ...], str, str]
"""An answer as a tuple, the worker in words, and the node."""


def run_task(version: str, request: tuple[Any, ...], shared: dict[str, list[ray.ObjectRef]]) -> Result:
    """Have a job done on this node.

    Parameters
    ----------
    version : str
        Of Souffle, where the job comes from.
    request : tuple
        A :class:`souffle.workers.harness.Request`.
    shared : dict of str to list of ObjectRef
        Where the data are that it names; in lists, so that Ray does not send them where they are already.

    Raises
    ------
    IncompatibleEnvironmentError
        If the node has another version of Souffle: it would not give the same.
    """
    if version != souffle.__version__:
        raise IncompatibleEnvironmentError(
            f"{socket.gethostname()} has souffle-dl {souffle.__version__}, and the job comes from {version}"
        )
    worker = _worker()
    for key, (reference,) in shared.items():
        worker.share(key, partial(ray.get, reference))
    answer = worker.ask(Request(*request))
    node = ray.get_runtime_context().get_node_id()
    return tuple(answer), f"{socket.gethostname()}/{node[:12]}:{worker.pid}", node


class GpuTasks:
    """An actor that owns a GPU."""

    def run(self, version: str, request: tuple[Any, ...], shared: dict[str, list[ray.ObjectRef]]) -> Result:
        """As :func:`run_task`."""
        return run_task(version, request, shared)


@cache
def _worker() -> BlockingWorker:
    if threading.current_thread() is threading.main_thread():
        # A raylet may have it ignored, and then nobody could say how a process has ended.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    return BlockingWorker()


def _end_with(raylet: int) -> None:
    """End this process when its node has ended. Ray leaves it alone for a minute while it does a task."""
    while os.getppid() == raylet:
        time.sleep(_LOOK_SECONDS)
    os._exit(1)
