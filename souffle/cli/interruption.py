"""Ctrl-C: one line and exit status 130, wherever it comes."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from types import FrameType, TracebackType

from souffle.cli.output import Progress

__all__ = ["INTERRUPTED", "Interruption", "end_at_once"]

INTERRUPTED = 130
"""The exit status of a command that Ctrl-C ended."""

_GRACE_SECONDS = 1.0
"""For threads whose compiler processes were interrupted too, to take their files away."""


class Interruption:
    """A context that an interrupt leaves without a traceback.

    Code below that calls back into Python, such as isl's and TVM's, turns the interrupt into an error of its own, or
    goes on: so that there was one is kept, whatever is raised counts as it, and the next progress raises it again.

    Parameters
    ----------
    progress : Progress
    """

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._before = None

    def __enter__(self) -> Interruption:
        here = threading.current_thread() is threading.main_thread()
        if here and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            self._before = signal.signal(signal.SIGINT, self._interrupted)
        return self

    def _interrupted(self, number: int, frame: FrameType | None) -> None:
        self._progress.interrupted = True
        raise KeyboardInterrupt

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> bool:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)
        return kind is KeyboardInterrupt or (kind is not None and self._progress.interrupted)

    def say(self) -> None:
        """Print the line."""
        self._progress.done()
        print("souffle: interrupted", file=sys.stderr)


def end_at_once(status: int) -> None:
    """End the process without waiting for threads in which LLVM or a compiler still runs."""
    sys.stdout.flush()
    sys.stderr.flush()
    end = time.monotonic() + _GRACE_SECONDS
    for thread in threading.enumerate():
        if thread is not threading.current_thread():
            thread.join(max(0.0, end - time.monotonic()))
    os._exit(status)
