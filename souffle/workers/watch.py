"""A process that ends another one, and all that this has started, when their owner is gone, however it went."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import time

__all__ = ["end_with_owner", "remove"]


def end_with_owner(lifeline: int, folder: str, *held: int) -> None:
    """Have this process's group killed, and a folder removed, when nobody can write to a pipe any more.

    To be called first, while there is one thread. The process that watches has nothing else to do: it is not held up
    by what this one computes, be it C code under Python's lock, and it ends what this one has started, such as nvcc,
    which an end of this one alone would not. It is in the same group, and ends with it.

    Parameters
    ----------
    lifeline : int
        The end of a pipe to read from, of which only the owner has the other.
    folder : str
    *held : int
        Descriptors by which others see this process's end: the process that watches does not keep them open.
    """
    watched = os.getpgrp()
    if os.fork():
        os.close(lifeline)
        return
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    for descriptor in held:
        os.close(descriptor)
    os.read(lifeline, 1)
    # Out of the group, to see its end.
    os.setpgid(0, 0)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(watched, signal.SIGKILL)
    remove(folder, 30.0)
    os._exit(0)


def remove(folder: str | os.PathLike[str], seconds: float) -> None:
    """Take a folder away, into which processes that are about to end may still write."""
    until = time.monotonic() + seconds
    while True:
        shutil.rmtree(folder, ignore_errors=True)
        if not os.path.exists(folder) or time.monotonic() > until:
            return
        time.sleep(0.1)
