"""Messages on a stream of bytes. What ends in the midst of one, as where a process is killed, is no message."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator

from souffle.errors import SouffleError

__all__ = ["Frames", "FramingError", "framed", "receive"]

_MARK = b"sfl\n"
_HEADER = struct.Struct("<4sQ")


class FramingError(SouffleError):
    """The other side wrote something that is no message, as a library does that takes the file for another."""


def framed(message: bytes) -> bytes:
    """A message as it stands on the stream."""
    return _HEADER.pack(_MARK, len(message)) + message


def _length(header: bytes | bytearray) -> int:
    mark, length = _HEADER.unpack_from(header)
    if mark != _MARK:
        raise FramingError(f"{bytes(header[:16])!r} begins no message")
    return length


class Frames:
    """Takes messages out of pieces of a stream, however it is cut."""

    def __init__(self) -> None:
        self._held = bytearray()
        self._wanted = _HEADER.size

    def feed(self, piece: bytes) -> Iterator[bytes]:
        """The messages that `piece` completes.

        Raises
        ------
        FramingError
        """
        held = self._held
        held += piece
        begin = 0
        while len(held) - begin >= self._wanted:
            body = begin + _HEADER.size
            end = body + _length(held[begin:body])
            if len(held) < end:
                self._wanted = end - begin
                break
            yield bytes(held[body:end])
            begin, self._wanted = end, _HEADER.size
        del held[:begin]


def receive(stream: socket.socket) -> bytes | None:
    """Wait for a message; ``None`` if the other side has closed the stream.

    Raises
    ------
    FramingError
    TimeoutError
        If the socket has a timeout.
    """
    header = _exactly(stream, _HEADER.size)
    return None if header is None else _exactly(stream, _length(header))


def _exactly(stream: socket.socket, count: int) -> bytes | None:
    held = bytearray(count)
    view = memoryview(held)
    done = 0
    while done < count:
        try:
            got = stream.recv_into(view[done:])
        except ConnectionError:
            return None
        if not got:
            return None
        done += got
    return bytes(held)
