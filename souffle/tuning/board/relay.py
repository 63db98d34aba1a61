"""A program of its own: carries what two sockets say to each other, for so long and no longer.

``relay.py LISTENER PEER SECONDS`` is given two descriptors. Whoever connects to the listener first talks to the peer.
It ends with one of both, with its standard input, which is its parent's life, and, by :data:`EXPIRED`, with its time.
It imports nothing of Souffle, since it is started for each candidate.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import sys
import threading

__all__ = ["EXPIRED"]

EXPIRED = 3
"""The status of one whose time was over."""
_CHUNK_BYTES = 1 << 18


def _copy(source: socket.socket, target: socket.socket, ended: int) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(_CHUNK_BYTES):
            target.sendall(data)
    os.write(ended, b"\0")


def _carry(listener: socket.socket, peer: socket.socket, ended: int) -> None:
    client, _ = listener.accept()
    listener.close()
    for end in (client, peer):
        # Each call is a short message that waits for another.
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for source, target in ((client, peer), (peer, client)):
        threading.Thread(target=_copy, args=(source, target, ended), daemon=True).start()


def _main(listener: int, peer: int, seconds: float) -> None:
    done, ended = os.pipe()
    sockets = (socket.socket(fileno=descriptor) for descriptor in (listener, peer))
    threading.Thread(target=_carry, args=(*sockets, ended), daemon=True).start()
    over = not select.select([sys.stdin, done], [], [], seconds)[0]
    # Without waiting for threads: one may be in the middle of a message that nobody takes.
    os._exit(EXPIRED if over else 0)


if __name__ == "__main__":
    _main(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))
