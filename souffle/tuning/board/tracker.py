"""Asks TVM's RPC tracker for boards, with a limit to how long that takes."""

from __future__ import annotations

import contextlib
import json
import select
import socket
import struct
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

from tvm.rpc import base

from souffle.tuning.board.address import BoardAddress
from souffle.tuning.board.line import BoardError

__all__ = ["NoBoardError", "no_board", "registered_boards", "taken_board"]

_ANSWER_SECONDS = 10.0
"""That the tracker may take for what it need not wait for."""
_LOOK_SECONDS = 5.0
"""Between looks at who is registered, while a request waits."""
_GONE_SECONDS = 30.0
"""That no board may be registered for, while a request waits, and that the tracker may be away for: both are started
again sometimes."""
_AGAIN_SECONDS = 1.0


class NoBoardError(BoardError):
    """There is no board to ask, for as long as one was waited for; it is about none of the candidates."""


def registered_boards(address: BoardAddress) -> Counter[str]:
    """How many boards are registered with a tracker under each key, those in use too.

    Raises
    ------
    BoardError
        If the tracker cannot be reached, or is none.
    """
    with _tracker(address) as connection:
        base.sendjson(connection, [base.TrackerCode.SUMMARY])
        servers = _answer(connection, address)["server_info"]
        return Counter(str(server["key"]).partition(":")[2] for server in servers)


def taken_board(address: BoardAddress) -> tuple[str, int, str]:
    """Wait until the tracker gives a board.

    Returns
    -------
    host : str
    port : int
    key : str
        That its server expects; the board is free again when a connection with it has ended, or a few seconds after
        nobody has connected.

    Raises
    ------
    NoBoardError
        If there is no board, or none is free in time, or no tracker.
    """
    end = time.monotonic() + address.wait
    away = time.monotonic()
    while True:
        began = time.monotonic()
        try:
            return _requested(address, end)
        except NoBoardError:
            raise
        except BoardError as error:
            now = time.monotonic()
            if now - began > _ANSWER_SECONDS:
                away = now  # it had answered meanwhile
            if now + _AGAIN_SECONDS >= end or now - away >= _GONE_SECONDS:
                raise NoBoardError(str(error)) from error
        time.sleep(_AGAIN_SECONDS)


def _requested(address: BoardAddress, end: float) -> tuple[str, int, str]:
    seen = time.monotonic()
    with _tracker(address) as connection:
        base.sendjson(connection, [base.TrackerCode.REQUEST, address.key, "", address.priority])
        while not select.select([connection], [], [], max(0.0, min(_LOOK_SECONDS, end - time.monotonic())))[0]:
            known = registered_boards(address)
            now = time.monotonic()
            if known[address.key]:
                seen = now
            if now >= end or now - seen >= _GONE_SECONDS:
                raise NoBoardError(no_board(address, known))
        host, port, key = _answer(connection, address)
    return str(host), int(port), str(key)


def no_board(address: BoardAddress, known: Counter[str]) -> str:
    """Why there is none, and what would help."""
    if known[address.key]:
        return (
            f"none of the {known[address.key]} boards of key {address.key} was free within {address.wait:g} s; where "
            "none is at work, its tvm.exec.rpc_server no longer serves since a session has crashed: start it again"
        )
    others = f"its keys are {', '.join(sorted(known))}" if known else "nothing is registered with it"
    return (
        f"no board is registered as {address.key} with the tracker {address.tracker}:{address.port}; {others}; "
        "python -m tvm.exec.rpc_server --tracker HOST:PORT --key KEY serves one, and is to be started again where a "
        "session has crashed"
    )


@contextlib.contextmanager
def _tracker(address: BoardAddress) -> Iterator[socket.socket]:
    where = f"TVM's RPC tracker at {address.tracker}:{address.port}"
    try:
        connection = socket.create_connection((address.tracker, address.port), _ANSWER_SECONDS)
    except OSError as error:
        raise BoardError(
            f"{where} cannot be reached ({error}); python -m tvm.exec.rpc_tracker starts one"
        ) from error
    with connection:
        try:
            connection.sendall(struct.pack("<i", base.RPC_TRACKER_MAGIC))
            magic = struct.unpack("<i", base.recvall(connection, 4))[0]
            if magic != base.RPC_TRACKER_MAGIC:
                raise BoardError(f"what answers at {address.tracker}:{address.port} is not {where}")
            yield connection
        except BoardError:
            raise
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise BoardError(f"{where} does not answer as one: {error}") from error


def _answer(connection: socket.socket, address: BoardAddress) -> Any:
    code, *values = base.recvjson(connection)
    if code != base.TrackerCode.SUCCESS or len(values) != 1:
        raise BoardError(f"the tracker {address.tracker}:{address.port} refuses: {json.dumps(values)[:200]}")
    return values[0]
