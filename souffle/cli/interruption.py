"""Ctrl-C: one line and exit status 130, wherever it comes."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import NoReturn

from souffle.cli.output import Progress
from souffle.errors import CertificateError, SouffleError

__all__ = ["INTERRUPTED", "interruptible", "run_process", "status_of"]

INTERRUPTED = 130
"""The exit status of a command that Ctrl-C ended."""

_GRACE_SECONDS = 1.0
"""For threads whose compiler processes were interrupted too, to take their files away."""


def interruptible(work: Callable[[], int], progress: Progress) -> int:
    """Run a command, which an interrupt ends without a traceback.

    Code below that calls back into Python, such as isl's and TVM's, turns the interrupt into an error of its own, or
    goes on: so that there was one is kept, whatever is raised or returned counts as it, and the next progress raises it
    again.

    Parameters
    ----------
    work : callable
        Gives the exit status.
    progress : Progress

    Returns
    -------
    int
        The exit status; 130 after an interrupt, and a line says so.
    """

    def interrupt(number: int, frame: FrameType | None) -> None:
        progress.interrupted = True
        raise KeyboardInterrupt

    def complain(unraisable: sys.UnraisableHookArgs) -> None:
        if not progress.interrupted:
            hook(unraisable)

    # Finalizers that the interrupt falls into, or that find half of an object, would print a traceback each.
    hook, sys.unraisablehook = sys.unraisablehook, complain
    before = signal.getsignal(signal.SIGINT)
    ours = threading.current_thread() is threading.main_thread() and before is signal.default_int_handler
    try:
        if ours:
            signal.signal(signal.SIGINT, interrupt)
        with _Interruptions(progress):
            status = work()
    finally:
        if ours:
            signal.signal(signal.SIGINT, before)
        sys.unraisablehook = hook
    if not progress.interrupted:
        return status
    with contextlib.suppress(OSError):
        progress.done()
    _say()
    return INTERRUPTED


def status_of(command: Callable[[], int], progress: Progress) -> int:
    """The exit status of a command; an error of Souffle's own becomes one line, and 1 for a refuted kernel, else 2."""
    try:
        return command()
    except SouffleError as error:
        if progress.interrupted:
            raise
        progress.done()
        print(f"souffle: {type(error).__name__}: {error}", file=sys.stderr)
        return 1 if isinstance(error, CertificateError) else 2


class _Interruptions(contextlib.AbstractContextManager[None]):
    """Takes what is raised for the interrupt: a KeyboardInterrupt, and once there was one, anything."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> bool:
        self._progress.interrupted |= isinstance(error, KeyboardInterrupt)
        return kind is not None and self._progress.interrupted


def run_process(main: Callable[[], int]) -> NoReturn:
    """Run the command of this process, and end the process with its exit status.

    After an interrupt, threads in which LLVM or a compiler still runs are not waited for.
    """
    # What comes after a command, such as TVM's end, is no work: a traceback or a signal's status would misreport it.
    try:
        status = main()
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    except KeyboardInterrupt:  # before the command began, or once more as it ended
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        _say()
        status = INTERRUPTED
    if status == INTERRUPTED:
        _end_at_once(status)
    sys.exit(status)


def _say() -> None:
    with contextlib.suppress(OSError):  # who reads it may have been interrupted too
        print("souffle: interrupted", file=sys.stderr, flush=True)


def _end_at_once(status: int) -> NoReturn:
    with contextlib.suppress(OSError):
        sys.stdout.flush()
    end = time.monotonic() + _GRACE_SECONDS
    for thread in threading.enumerate():
        # A thread whose start the interrupt fell into is listed, is not alive, and cannot be joined; nor can a daemon
        # that stands for a thread of C++.
        if thread is not threading.current_thread() and thread.is_alive() and not thread.daemon:
            thread.join(max(0.0, end - time.monotonic()))
    os._exit(status)
