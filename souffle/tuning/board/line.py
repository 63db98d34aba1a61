"""A connection to a board that ends in time, since TVM's client waits for an answer without end."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from types import TracebackType

from souffle.errors import DeviceError
from souffle.tuning.board import relay

__all__ = ["BoardError", "BoardLine"]

_CONNECT_SECONDS = 10.0
_ENDING_SECONDS = 2.0
"""Around the end of its time, that a relay needs to end."""


class BoardError(DeviceError, OSError):
    """A board, or its tracker, did not do what it was asked: an error of the system, which may not come again."""


class BoardLine:
    """Has another process (:mod:`souffle.tuning.board.relay`) carry what TVM's client and a board's server say.

    The client connects to :attr:`port` of this machine; what waits there for an answer raises when the time is over. A
    thread of this process could not do it: TVM gives its objects of a board back by a call to the board, which holds
    the interpreter's lock.

    Parameters
    ----------
    host : str
        Of the board.
    port : int
    seconds : float

    Raises
    ------
    BoardError
        If the board cannot be reached.
    """

    def __init__(self, host: str, port: int, seconds: float) -> None:
        self._seconds, self._end = seconds, time.monotonic() + seconds
        try:
            board = socket.create_connection((host, port), min(_CONNECT_SECONDS, seconds))
        except OSError as error:
            raise BoardError(
                f"the tracker says that a board is at {host}:{port}, and it cannot be reached there ({error}); a "
                "server that has another address is started with --custom-addr"
            ) from error
        with board, socket.create_server(("127.0.0.1", 0), backlog=1) as listener:
            board.settimeout(None)
            self.port: int = listener.getsockname()[1]
            ends = (listener.fileno(), board.fileno())
            command = [sys.executable, "-I", "-S", relay.__file__, *map(str, ends), f"{self._end - time.monotonic()}"]
            self._relay = subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=ends)

    def __enter__(self) -> BoardLine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._relay.kill()
        self._relay.communicate()

    @contextlib.contextmanager
    def doing(self, what: str) -> Iterator[None]:
        """Say in errors what was being done.

        Raises
        ------
        BoardError
            For what TVM's client raises in the block, and for the end of time.
        """
        try:
            yield
        # What was raised on the board comes as an RPCError, a RuntimeError; the others come of what it answers.
        except (RuntimeError, ValueError, TypeError, OSError, AttributeError) as error:
            if self._expired():
                said = f"it took longer than {self._seconds:g} s, and was at {what}"
            else:
                said = str(error) if isinstance(error, BoardError) else f"{what}: {_first_words(error)}"
            raise BoardError(said) from error

    def _expired(self) -> bool:
        if time.monotonic() < self._end - _ENDING_SECONDS:
            return False
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._relay.wait(_ENDING_SECONDS)
        return self._relay.returncode == relay.EXPIRED


def _first_words(error: Exception) -> str:
    """What a message of TVM says, without where in its sources and with which code."""
    if "kShutdown" in str(error):
        return "the board has ended the session; what its tvm.exec.rpc_server printed says why"
    lines = [line.strip() for line in str(error).splitlines()]
    said = [line for line in lines if line and not line.startswith(("RPCError:", "Traceback", "File ", "//"))]
    return "; ".join(said[:3]) or type(error).__name__
