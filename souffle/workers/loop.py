"""A pool's own thread, in which all that happens to it happens, and the streams by which it talks with processes."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from typing import Any

from souffle.workers.framing import Frames, FramingError, framed
from souffle.workers.harness import reason
from souffle.workers.retrying import Attempt

__all__ = ["LoopPool", "Wire"]


class LoopPool(ABC):
    """What pools have in common that have a thread of their own.

    Methods with a leading underscore run in that thread, and need no lock.

    Parameters
    ----------
    name : str
        Of the thread.
    """

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._inbox: deque[Attempt] = deque()
        self._notified = False
        self._closing = False
        self._lost: Callable[[str], None] = lambda why: None

    def open(self, lost: Callable[[str], None]) -> None:
        """See :class:`souffle.workers.retrying.Pool`."""
        self._lost = lost
        self._thread.start()

    def start(self, attempt: Attempt) -> None:
        """See :class:`souffle.workers.retrying.Pool`."""
        self._inbox.append(attempt)
        # Many that are submitted together wake the thread once.
        if not self._notified:
            self._notified = True
            self.soon(self._take_inbox)

    def soon(self, call: Callable[..., object], *arguments: object) -> None:
        """Have something done in the pool's thread, unless it has ended."""
        with contextlib.suppress(RuntimeError):
            self.loop.call_soon_threadsafe(call, *arguments)

    def close(self) -> None:
        """See :class:`souffle.workers.retrying.Pool`."""
        self._closing = True
        self.soon(self.loop.stop)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        # What goes wrong here must not look like a job that takes long.
        self.loop.set_exception_handler(lambda loop, context: self._fail(context))
        try:
            self._begin()
            self.loop.run_forever()
        finally:
            self._end()
            # What was aborted is closed in the next turn.
            self.loop.run_until_complete(asyncio.sleep(0))
            self.loop.close()
            if not self._closing:
                self._lost("the thread that looks after them has ended")

    def _fail(self, context: dict[str, Any]) -> None:
        error = context.get("exception")
        self._lost(f"{context['message']}{'' if error is None else f': {reason(error)}'}")

    def _take_inbox(self) -> None:
        self._notified = False
        while self._inbox:
            self._accept(self._inbox.popleft())
        self._pump()

    def _begin(self) -> None:  # noqa: B027 -- most pools have nothing to do then
        """Before anything else."""

    @abstractmethod
    def _accept(self, attempt: Attempt) -> None:
        """Have an attempt wait."""

    @abstractmethod
    def _pump(self) -> None:
        """Begin what can be begun."""

    @abstractmethod
    def _end(self) -> None:
        """End all workers."""


class Wire(asyncio.Protocol):
    """Messages to and from a process, in a pool's thread. Nothing waits for a process that does not read.

    Parameters
    ----------
    received : callable
        Is given each message.
    closed : callable
        Is called once, when the process has closed its side, with nothing; or with what it did, in words, if it wrote
        what is no message.
    """

    def __init__(self, received: Callable[[bytes], None], closed: Callable[[str], None]) -> None:
        self._received, self._closed = received, closed
        self._frames = Frames()
        self._transport: asyncio.Transport | None = None
        self._waiting: list[bytes] = []
        self._done = False

    def connect(self, loop: asyncio.AbstractEventLoop, stream: socket.socket) -> None:
        """Begin."""
        self._task = loop.create_task(loop.create_unix_connection(lambda: self, sock=stream))

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See :class:`asyncio.Protocol`."""
        self._transport = transport
        for message in self._waiting:
            transport.write(framed(message))
        self._waiting.clear()
        if self._done:
            transport.abort()

    def data_received(self, data: bytes) -> None:
        """See :class:`asyncio.Protocol`."""
        try:
            for message in self._frames.feed(data):
                if not self._done:
                    self._received(message)
        except FramingError as error:
            self._transport.abort()
            self._close(f"wrote what is no message: {error}")

    def connection_lost(self, error: Exception | None) -> None:
        """See :class:`asyncio.Protocol`."""
        self._close("")

    def _close(self, fault: str) -> None:
        if not self._done:
            self._done = True
            self._closed(fault)

    def send(self, message: bytes) -> None:
        """Send a message, when there is room."""
        if self._transport is None:
            self._waiting.append(message)
        else:
            self._transport.write(framed(message))

    def abort(self) -> None:
        """Neither send nor receive anything further; nothing is called any more."""
        self._done = True
        if self._transport is not None:
            self._transport.abort()
