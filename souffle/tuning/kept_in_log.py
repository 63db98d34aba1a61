"""A search that may be stopped at any time: what was found stays in the log, put in order."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

from souffle.tuning.store import LogWriter
from souffle.workers import WorkersLostError

__all__ = ["KeptInLog", "kept_in_log"]


@dataclass
class KeptInLog:
    """How it ended.

    Attributes
    ----------
    interrupted : bool
        Whether the user stopped it.
    """

    interrupted: bool = False


@contextlib.contextmanager
def kept_in_log(writer: LogWriter) -> Iterator[KeptInLog]:
    """Around a search that appends to a log; an interrupt ends it.

    Raises
    ------
    WorkersLostError
        If no worker is left; it says where what was found is.
    """
    ended = KeptInLog()
    try:
        yield ended
    except KeyboardInterrupt:
        ended.interrupted = True
    except WorkersLostError as error:
        kept = f"what was found is in {writer.folder}, and the same command goes on"
        raise WorkersLostError(f"{error}; {kept}") from error
    finally:
        writer.sort()
