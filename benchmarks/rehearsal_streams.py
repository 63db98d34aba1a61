"""Streams, events and captures of the played driver: when work runs, what comes before what, what a capture forbids."""

from __future__ import annotations

import collections
import itertools
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

__all__ = ["UNSAFE", "RehearsalStreams"]

UNSAFE = (
    *("cuMemAlloc", "cuMemFree", "cuMemHostAlloc", "cuMemFreeHost", "cuModuleLoadData", "cuModuleUnload"),
    *("cuStreamSynchronize", "cuEventSynchronize", "cuEventQuery"),
)
"""What a capture forbids that is not of the relaxed mode: calls that touch the device outside of all streams."""

_GLOBAL, _RELAXED = 0, 2
"""Modes of captures and of threads."""
_LEGACY, _PER_THREAD = (0, 1), 2
"""Handles of the default streams."""
_QUERIES = 2
"""How often work that waits is said not to be ready before it runs."""

_Work = Callable[[], None]


@dataclass(eq=False)
class _Stream:
    """Work in order; ``waiting`` has run only where something has waited for it."""

    blocking: bool
    waiting: collections.deque[_Work] = field(default_factory=collections.deque)
    capture: _Capture | None = None


@dataclass(eq=False)
class _Capture:
    """What is being recorded: ``queued`` says how much on each stream, ``joined`` how much of that others wait for."""

    origin: _Stream
    thread: int
    mode: int
    work: list[_Work] = field(default_factory=list)
    queued: dict[_Stream, int] = field(default_factory=dict)
    joined: dict[_Stream, int] = field(default_factory=dict)
    invalid: bool = False

    def take(self, stream: _Stream, *work: _Work) -> None:
        self.work.extend(work)
        self.queued[stream] = self.queued.get(stream, 0) + 1

    def whole(self) -> bool:
        """Whether the stream at which it began waits for all others."""
        return all(self.joined.get(stream, 0) >= count for stream, count in self.queued.items()
                   if stream is not self.origin)  # fmt: skip


@dataclass(eq=False)
class _Recording:
    """The place in a stream that an event marks."""

    stream: _Stream
    capture: _Capture | None = None
    place: int = 0
    done: bool = False
    seconds: float = 0.0
    queries: int = 0


@dataclass(eq=False)
class _Event:
    timed: bool
    recording: _Recording | None = None


class RehearsalStreams:
    """The driver's functions of streams, events and graphs.

    Work runs when it is queued. Deferred, it waits in its stream until something waits for it on the host, or in a
    stream whose work runs for that reason: as late as the order of streams and events allows.
    """

    CUresult: Any
    CUstreamCaptureMode: Any
    CUstreamCaptureStatus: Any

    def __init__(self, deferred: bool) -> None:
        self._deferred = deferred
        self._fault: Any = None
        self._fault_text = ""
        self._thread = threading.local()
        self._owners: dict[int, int] = {}
        # No size and no address is such a number, so that arguments which are handles can be told from others.
        self._handles = itertools.count(1 << 40)
        self._defaults: dict[int, _Stream] = {}
        self._streams: dict[int, _Stream] = {}
        self._events: dict[int, _Event] = {}
        self._captures: list[_Capture] = []
        self._graphs: dict[int, list[_Work]] = {}
        # Of deferred work. The thread that waits runs it, and its garbage collector may free memory meanwhile, which
        # must wait until the piece of work at hand is over.
        self._lock = threading.RLock()
        self._busy: dict[_Stream, None] = {}
        self._running = False
        self._later: list[_Work] = []

    @property
    def contexts(self) -> list[int]:
        """This thread's stack of contexts, which a test may fill as another library would."""
        if not hasattr(self._thread, "contexts"):
            self._thread.contexts = []
        return self._thread.contexts

    def _new(self) -> int:
        handle = next(self._handles)
        self._owners[handle] = self.contexts[-1]
        return handle

    # when work runs

    def _queue(self, handle: Any, work: _Work) -> Any:
        stream = self._stream(handle)
        if not isinstance(stream, _Stream):
            return stream
        if stream.capture is not None:
            return self._record(stream, work)
        return self._submit(stream, work)

    def _record(self, stream: _Stream, *work: _Work) -> Any:
        if stream.capture.invalid:
            return self.CUresult.CUDA_ERROR_STREAM_CAPTURE_INVALIDATED
        stream.capture.take(stream, *work)
        return None

    def _submit(self, stream: _Stream, work: _Work) -> None:
        if not self._deferred:
            work()
            return
        with self._lock:
            stream.waiting.append(work)
            self._busy[stream] = None

    def _run(self, stream: _Stream, until: _Recording | None = None) -> None:
        """Run a stream's work, all of it or up to a recording; after a fault nothing runs."""
        while stream.waiting and not (until is not None and until.done):
            work = stream.waiting.popleft()
            if self._fault is None:
                work()

    def _run_to(self, recording: _Recording) -> None:
        if not recording.done:
            self._run(recording.stream, recording)

    def _run_all(self) -> None:
        while self._busy:
            stream = next(iter(self._busy))
            self._run(stream)
            self._busy.pop(stream)

    def _wait(self, run: _Work, later: bool = False) -> Any:
        """Run what the host waits for; the fault that it ends with."""
        with self._lock:
            if self._running:
                if later:
                    self._later.append(run)
                return None
            self._running = True
            try:
                run()
                while self._later:
                    self._later.pop(0)()
            finally:
                self._running = False
        return self._fault

    # captures

    def _invalidate(self, captures: list[_Capture], status: Any) -> Any:
        for capture in captures:
            capture.invalid = True
        return status if captures else None

    def _forbidden(self) -> Any:
        """The status of a call that is not safe beside a capture, which then is lost; None where there is none."""
        mode, here = getattr(self._thread, "mode", _GLOBAL), threading.get_ident()
        if mode == _RELAXED:
            return None
        conflicts = [
            capture
            for capture in self._captures
            if (capture.thread == here and capture.mode != _RELAXED) or (capture.mode == mode == _GLOBAL)
        ]
        return self._invalidate(conflicts, self.CUresult.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED)

    def _beside_default(self) -> list[_Capture]:
        """Captures on streams that wait for the default stream, which therefore cannot be used."""
        return [capture for capture in self._captures if any(s.blocking for s in (capture.origin, *capture.queued))]

    def _stream(self, handle: Any) -> Any:
        """A stream, or the status of a handle that cannot be used."""
        number = int(handle)
        if number in _LEGACY:
            lost = self._invalidate(self._beside_default(), self.CUresult.CUDA_ERROR_STREAM_CAPTURE_IMPLICIT)
            return lost or self._defaults.setdefault(self.contexts[-1], _Stream(blocking=True))
        if number == _PER_THREAD:
            if not hasattr(self._thread, "stream"):
                self._thread.stream = _Stream(blocking=True)
            return self._thread.stream
        if self._owners.get(number, self.contexts[-1]) != self.contexts[-1]:
            return self.CUresult.CUDA_ERROR_INVALID_HANDLE
        return self._streams.get(number, self.CUresult.CUDA_ERROR_INVALID_HANDLE)

    def _cuThreadExchangeStreamCaptureMode(self, mode: Any) -> Any:
        before, self._thread.mode = getattr(self._thread, "mode", _GLOBAL), int(mode)
        return self.CUstreamCaptureMode(before)

    def _cuStreamIsCapturing(self, handle: Any) -> Any:
        if int(handle) in _LEGACY and self._beside_default():
            return self.CUresult.CUDA_ERROR_STREAM_CAPTURE_IMPLICIT
        stream = self._stream(handle)
        if not isinstance(stream, _Stream):
            return stream
        return self.CUstreamCaptureStatus(0 if stream.capture is None else 2 if stream.capture.invalid else 1)

    def _cuStreamBeginCapture(self, handle: Any, mode: Any) -> Any:
        stream = self._stream(handle)
        if not isinstance(stream, _Stream):
            return stream
        if int(handle) in _LEGACY or stream.capture is not None:
            return self.CUresult.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED
        stream.capture = _Capture(stream, threading.get_ident(), int(mode))
        self._captures.append(stream.capture)
        return None

    def _cuStreamEndCapture(self, handle: Any) -> Any:
        stream = self._stream(handle)
        if not isinstance(stream, _Stream):
            return stream
        capture = stream.capture
        if capture is None or capture.origin is not stream:
            return self.CUresult.CUDA_ERROR_STREAM_CAPTURE_UNMATCHED
        if capture.mode != _RELAXED and capture.thread != threading.get_ident():
            return self.CUresult.CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD
        self._captures.remove(capture)
        for held in (stream, *capture.queued):
            held.capture = None
        if capture.invalid:
            return self.CUresult.CUDA_ERROR_STREAM_CAPTURE_INVALIDATED
        if not capture.whole():
            return self.CUresult.CUDA_ERROR_STREAM_CAPTURE_UNJOINED
        graph = self._new()
        self._graphs[graph] = capture.work
        return graph

    def _cuGraphInstantiate(self, graph: int, flags: int) -> int:
        handle = self._new()
        self._graphs[handle] = self._graphs[graph]
        return handle

    def _cuGraphDestroy(self, graph: int) -> None:
        self._graphs.pop(graph, None)

    def _cuGraphExecDestroy(self, graph: int) -> None:
        self._graphs.pop(graph, None)

    def _cuGraphLaunch(self, graph: int, handle: Any) -> Any:
        for work in self._graphs[graph]:
            status = self._queue(handle, work)
            if status is not None:
                return status
        return None

    # streams and events

    def _cuStreamCreate(self, flags: int) -> int:
        handle = self._new()
        self._streams[handle] = _Stream(blocking=not int(flags) & 1)
        return handle

    def _cuStreamDestroy(self, handle: int) -> Any:
        # Its work runs to the end.
        stream = self._streams.pop(int(handle), None)
        if stream is None:
            return self.CUresult.CUDA_ERROR_INVALID_HANDLE
        if stream.capture is not None:
            stream.capture.invalid = True
        return None

    def _cuStreamSynchronize(self, handle: Any) -> Any:
        stream = self._stream(handle)
        if not isinstance(stream, _Stream):
            return stream
        if stream.capture is not None:
            return self._invalidate([stream.capture], self.CUresult.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED)
        return self._wait(lambda: self._run(stream))

    def _cuStreamWaitEvent(self, handle: Any, event: int, flags: int) -> Any:
        stream = self._stream(handle)
        if not isinstance(stream, _Stream):
            return stream
        if event not in self._events:
            return self.CUresult.CUDA_ERROR_INVALID_HANDLE
        recording = self._events[event].recording
        if recording is None:
            return None
        if stream.capture is not None and stream.capture is not recording.capture:
            return self._invalidate([stream.capture], self.CUresult.CUDA_ERROR_STREAM_CAPTURE_ISOLATION)
        if recording.capture is None:
            self._submit(stream, lambda: self._run_to(recording))
            return None
        if recording.capture not in self._captures:
            return self.CUresult.CUDA_ERROR_CAPTURED_EVENT
        # The stream becomes a part of the capture, if it was none, and what it does from here on is recorded.
        capture = stream.capture = recording.capture
        capture.joined[recording.stream] = max(capture.joined.get(recording.stream, 0), recording.place)
        return self._record(stream)

    def _cuEventCreate(self, flags: int) -> int:
        handle = self._new()
        self._events[handle] = _Event(timed=not int(flags) & 2)
        return handle

    def _cuEventDestroy(self, event: int) -> None:
        self._events.pop(event, None)

    def _cuEventRecord(self, event: int, handle: Any) -> Any:
        stream = self._stream(handle)
        if not isinstance(stream, _Stream):
            return stream
        if event not in self._events:
            return self.CUresult.CUDA_ERROR_INVALID_HANDLE
        recording = self._events[event].recording = _Recording(stream, stream.capture)
        if stream.capture is not None:
            recording.place = stream.capture.queued.get(stream, 0)
            return self._record(stream) if stream.capture.invalid else None

        def mark() -> None:
            recording.seconds, recording.done = time.perf_counter(), True

        self._submit(stream, mark)
        return None

    def _recording(self, event: int) -> Any:
        """Where an event is, None where it was never recorded; or the status of one that cannot be asked."""
        if event not in self._events:
            return self.CUresult.CUDA_ERROR_INVALID_HANDLE
        recording = self._events[event].recording
        if recording is not None and recording.capture is not None:
            captures = [recording.capture] if recording.capture in self._captures else []
            self._invalidate(captures, None)
            return self.CUresult.CUDA_ERROR_CAPTURED_EVENT
        return recording

    def _cuEventQuery(self, event: int) -> Any:
        recording = self._recording(event)
        if not isinstance(recording, _Recording):
            return recording
        recording.queries += not recording.done
        if not recording.done and recording.queries > _QUERIES:
            self._wait(lambda: self._run_to(recording))
        return self._fault if recording.done else self._fault or self.CUresult.CUDA_ERROR_NOT_READY

    def _cuEventSynchronize(self, event: int) -> Any:
        recording = self._recording(event)
        return self._wait(lambda: self._run_to(recording)) if isinstance(recording, _Recording) else recording

    def _cuEventElapsedTime(self, start: int, end: int) -> Any:
        recordings = [self._recording(event) for event in (start, end)]
        if not all(isinstance(one, _Recording) and self._events[event].timed
                   for one, event in zip(recordings, (start, end), strict=True)):  # fmt: skip
            return self.CUresult.CUDA_ERROR_INVALID_HANDLE
        first, last = recordings
        if not (first.done and last.done):
            return self.CUresult.CUDA_ERROR_NOT_READY
        return (last.seconds - first.seconds) * 1e3
