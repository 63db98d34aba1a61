"""A worker's process: it takes one job after another from its owner, and ends when that closes the stream."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import socket
from pathlib import Path

from souffle.garbage import collect_rarely
from souffle.workers.framing import framed, receive
from souffle.workers.harness import Harness, Request, SharedFiles
from souffle.workers.watch import end_with_owner

__all__ = ["LATE", "READY", "main"]

LATE = "late.txt"
"""The file in a worker's folder that says that a job took too long."""

READY = b"ready"
"""What a worker says first."""

_MOST_SAID_BYTES = 1 << 20


def main(stream: int, lifeline: int, folder: str, workplace: str, shared: str) -> None:
    """Take jobs until there are no more.

    Parameters
    ----------
    stream : int
        The number of the socket by which requests come, pickled, and answers go.
    lifeline : int
        See :func:`souffle.workers.watch.end_with_owner`.
    folder : str
        Of this process.
    workplace : str
        The folder that goes with the owner.
    shared : str
        The folder of shared data.
    """
    collect_rarely()
    end_with_owner(lifeline, workplace, stream)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    owner = socket.socket(fileno=stream)
    # Who waits for this process's end sees it by the stream: nothing that it starts may hold that.
    owner.set_inheritable(False)
    os.register_at_fork(after_in_child=owner.close)
    with (Path(folder) / LATE).open("w") as late:
        harness = Harness(SharedFiles(Path(shared)).read, late)
        with contextlib.suppress(ConnectionError):
            owner.sendall(framed(READY))
            while (message := receive(owner)) is not None:
                answer = harness.run(Request(*pickle.loads(message)))
                owner.sendall(framed(pickle.dumps(tuple(answer), pickle.HIGHEST_PROTOCOL)))
                if answer.spent:
                    break
                _shorten(1)
    # Not through what libraries do as an interpreter ends, which may wait for their threads.
    os._exit(0)


def _shorten(descriptor: int) -> None:
    """Keep what jobs print from filling the disk."""
    if os.fstat(descriptor).st_size > _MOST_SAID_BYTES:
        os.ftruncate(descriptor, 0)
