"""Outputs that stay on the GPU, and the memory that they lie in."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from souffle.counted_axes import first_positions
from souffle.errors import DeviceError
from souffle.runtime import dlpack
from souffle.runtime.cuda import Cuda
from souffle.runtime.record_page import RecordPage

__all__ = ["DeviceArray", "Handle", "MemoryBlock", "Pool", "first_of", "read_count"]


class MemoryBlock:
    """A piece of device memory that goes back to its pool when nothing refers to it."""

    def __init__(self, pool: Pool, address: int, nbytes: int) -> None:
        self.address = address
        self.users: set[int] = set()
        finalizer = weakref.finalize(self, pool.give_back, address, nbytes, self.users)
        # At the interpreter's end the driver frees everything, and may be gone before us.
        finalizer.atexit = False


class Pool:
    """Device memory for outputs, used again once its tensors are gone.

    A consumer may drop a tensor while its own kernels that read it are still queued. So what happens to memory depends
    on the streams that it was lent to:

    - None but the pool's own, whose work is in order: it is used again at once.
    - The legacy default stream: it is used again after the work that is on that stream by then.
    - Any other stream. None can be asked later for what is on it: it may have been destroyed, the per-thread default
      stream is another one on each thread, and -1 says nothing. An event at the time of lending would come before the
      consumer's work. So the memory goes back to the driver, which waits for all work that may use it; some pieces at
      a time, for the first of them waits for the device and the others find it idle.

    All this is done when memory is wanted, and nothing when a tensor is dropped: that may be on any thread and inside
    of another library's capture of a CUDA graph, where an event would become a part of that graph or break it. Memory
    whose time has not come then stays until the next call.
    """

    _LEGACY = 1
    """DLPack's and CUDA's number of the legacy default stream."""
    _HELD_PIECES, _HELD_BYTES = 16, 64 << 20
    """How much may wait to go back to the driver."""

    def __init__(self, cuda: Cuda, stream: Any) -> None:
        self._cuda, self._stream = cuda, stream
        self._free: dict[int, list[int]] = {}
        self._lent: list[tuple[int, int, set[int]]] = []
        # A tensor may be dropped by the garbage collector inside take().
        self._lock = threading.RLock()
        self._closed = False

    def take(self, nbytes: int) -> MemoryBlock:
        """Memory that the pool's stream may write from now on."""
        with self._lock:
            self._sort()
            waiting = self._free.get(nbytes)
            address = waiting.pop() if waiting else self._alloc(nbytes)
        return MemoryBlock(self, address, nbytes)

    def _alloc(self, nbytes: int) -> int:
        about = f"an output of {nbytes} bytes"
        try:
            return self._cuda.alloc(nbytes, about)
        except DeviceError:
            if not self._lent and not any(self._free.values()):
                raise
        # The memory that is missing may be what waits here.
        self._give_up()
        return self._cuda.alloc(nbytes, about)

    def _sort(self) -> None:
        """Find out what has come back from other streams and can be used again, or given back."""
        legacy = [piece for piece in self._lent if piece[2] <= {self._LEGACY}]
        if legacy and not self._cuda.capturing(self._LEGACY):
            event = self._cuda.event()
            self._cuda.record(event, self._LEGACY)
            self._cuda.wait(self._stream, event)
            self._cuda.destroy_event(event)
            for piece in legacy:
                self._lent.remove(piece)
                self._free.setdefault(piece[1], []).append(piece[0])
        others = [piece for piece in self._lent if not piece[2] <= {self._LEGACY}]
        if len(others) > self._HELD_PIECES or sum(nbytes for _, nbytes, _ in others) > self._HELD_BYTES:
            for piece in others:
                self._lent.remove(piece)
                self._cuda.free(piece[0])

    def _give_up(self) -> None:
        """Give all memory that no tensor lies in back to the driver."""
        while self._lent:
            self._cuda.free(self._lent.pop()[0])
        for waiting in self._free.values():
            while waiting:
                self._cuda.free(waiting.pop())

    def give_back(self, address: int, nbytes: int, users: set[int]) -> None:
        """Let go of a piece of memory; called when nothing refers to it, on whatever thread."""
        with self._lock:
            if self._closed:
                self._cuda.free(address)
            elif users:
                self._lent.append((address, nbytes, users))
            else:
                self._free.setdefault(nbytes, []).append(address)

    def close(self) -> None:
        """Give all memory back, and from now on each piece when its tensors are gone."""
        with self._lock:
            self._closed = True
            self._give_up()


class DeviceArray:
    """An output that stays on the GPU; ``torch.from_dlpack`` and its like take it without a copy.

    Attributes
    ----------
    shape : tuple of int
    dtype : str
    room : tuple of int
        The shape of what it is the first positions of; its own where the data does not decide its extents.
    """

    def __init__(
        self,
        runner_cuda: Cuda,
        stream: Any,
        ready: Any,
        block: MemoryBlock,
        shape: tuple[int, ...],
        dtype: str,
        pages: list[RecordPage] | None = None,
        room: tuple[int, ...] | None = None,
    ) -> None:
        self.shape, self.dtype, self.room = shape, dtype, room or shape
        self._cuda, self._stream, self._ready, self._block = runner_cuda, stream, ready, block
        # Shared by all outputs of a call, and empty once it is known to have ended well.
        self._pages = pages or []

    def __repr__(self) -> str:
        return f"DeviceArray({self.dtype}, {self.shape}, on {self._cuda.label})"

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        return int(np.prod(self.shape, dtype=np.int64)) * np.dtype(self.dtype).itemsize

    def numpy(self) -> np.ndarray:
        """A copy on the host.

        Raises
        ------
        KernelTimeoutError
            If a wait was over in its call, or in a later one before this one was known to have ended.
        DeviceError
            If a kernel has failed.
        """
        target = np.empty(self.room, self.dtype)
        with self._cuda.current():
            self._cuda.to_host(target, self._block.address, self._stream.handle)
            try:
                self._cuda.synchronize(self._stream.handle, "an output")
            finally:
                for page in self._pages:
                    page.check()
        self._pages.clear()
        return target if self.room == self.shape else first_positions(target, dict(enumerate(self.shape)))

    def first(self, extents: Mapping[int, int]) -> DeviceArray:
        """The first positions along some axes, in the same memory."""
        shape = tuple(extents.get(axis, extent) for axis, extent in enumerate(self.shape))
        parts = (self._cuda, self._stream, self._ready, self._block)
        return DeviceArray(*parts, shape, self.dtype, self._pages, self.room)

    def __dlpack_device__(self) -> tuple[int, int]:
        return (dlpack.CUDA, self._cuda.ordinal)

    def __dlpack__(
        self,
        *,
        stream: int | None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any:
        """A DLPack capsule; ``stream``'s later work waits until the content is there (-1: no waiting, at your risk).

        A CUDA graph that is captured with it reads its memory at each replay: keep the tensor as long as the graph.
        """
        if copy or (dl_device is not None and tuple(map(int, dl_device)) != self.__dlpack_device__()):
            raise BufferError(
                "Souffle lends its outputs where they are; copy them on the consumer's side, or use numpy()"
            )
        # None means the legacy default stream. 0 is ambiguous in DLPack; libraries that give it mean that one as well.
        user = 1 if stream in (None, 0) else int(stream)
        if user != int(self._stream.handle):
            self._block.users.add(user)
            if user != -1:
                with self._cuda.current():
                    if self._cuda.capturing(user):
                        # What is captured cannot wait for work outside of its graph. The host can, before it goes on.
                        self._cuda.wait_on_host(self._ready.handle)
                    else:
                        self._cuda.wait(user, self._ready.handle)
        device = self.__dlpack_device__()
        return dlpack.capsule(self._block.address, self.shape, self.dtype, device, self._block, self.room)


def read_count(value: np.ndarray | DeviceArray) -> np.ndarray:
    """The value of a count, for which the host waits where it is on the device."""
    return value.numpy() if isinstance(value, DeviceArray) else value


def first_of(value: np.ndarray | DeviceArray, extents: Mapping[int, int]) -> np.ndarray | DeviceArray:
    """The first positions along some axes: a new array, or one that stays where it is on the device."""
    return value.first(extents) if isinstance(value, DeviceArray) else first_positions(value, extents)


class Handle:
    """An event or a stream that is given back when nothing refers to it."""

    def __init__(self, handle: Any, destroy: Callable[[Any], None]) -> None:
        self.handle = handle
        weakref.finalize(self, destroy, handle).atexit = False
