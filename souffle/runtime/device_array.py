"""Outputs that stay on the GPU, and the memory that they lie in."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np

from souffle.runtime import dlpack
from souffle.runtime.cuda import Cuda

__all__ = ["Block", "DeviceArray", "Handle", "Pool"]


class Block:
    """A piece of device memory that goes back to its pool when nothing refers to it."""

    def __init__(self, pool: Pool, address: int, nbytes: int) -> None:
        self.address = address
        self.users: set[int] = set()
        finalizer = weakref.finalize(self, pool.give_back, address, nbytes, self.users)
        # At the interpreter's end the driver frees everything, and may be gone before us.
        finalizer.atexit = False


class Pool:
    """Device memory for outputs, used again once its tensors are gone.

    A consumer may drop a tensor while its own kernels that read it are still queued, so memory that was lent to another
    stream is used again only after the work that was on that stream.
    """

    _SHARED_STREAMS = (1, 2)
    # DLPack's numbers of the default streams, which cannot be destroyed and so can still be asked at that time.

    def __init__(self, cuda: Cuda, stream: Any) -> None:
        self._cuda, self._stream = cuda, stream
        self._free: dict[int, list[tuple[int, tuple[Any, ...]]]] = {}
        # A tensor may be dropped by the garbage collector inside take().
        self._lock = threading.RLock()
        self._closed = False

    def take(self, nbytes: int) -> Block:
        with self._lock:
            waiting = self._free.get(nbytes)
            address, events = waiting.pop() if waiting else (None, ())
        if address is None:
            address = self._cuda.alloc(nbytes, f"an output of {nbytes} bytes")
        for event in events:
            self._cuda.wait(self._stream, event)
            self._cuda.destroy_event(event)
        return Block(self, address, nbytes)

    def give_back(self, address: int, nbytes: int, users: set[int]) -> None:
        with self._lock, self._cuda.current():
            if self._closed or any(user not in self._SHARED_STREAMS for user in users):
                self._cuda.free(address)
                return
            events = []
            for user in sorted(users):
                event = self._cuda.event()
                self._cuda.record(event, user)
                events.append(event)
            self._free.setdefault(nbytes, []).append((address, tuple(events)))

    def close(self) -> None:
        with self._lock:
            self._closed = True
            for waiting in self._free.values():
                for address, events in waiting:
                    self._cuda.free(address)
                    for event in events:
                        self._cuda.destroy_event(event)
            self._free.clear()


class DeviceArray:
    """An output that stays on the GPU; ``torch.from_dlpack`` and its like take it without a copy.

    Attributes
    ----------
    shape : tuple of int
    dtype : str
    """

    def __init__(
        self, runner_cuda: Cuda, stream: Any, ready: Any, block: Block, shape: tuple[int, ...], dtype: str
    ) -> None:
        self.shape, self.dtype = shape, dtype
        self._cuda, self._stream, self._ready, self._block = runner_cuda, stream, ready, block

    def __repr__(self) -> str:
        return f"DeviceArray({self.dtype}, {self.shape}, on {self._cuda.label})"

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        return int(np.prod(self.shape, dtype=np.int64)) * np.dtype(self.dtype).itemsize

    def numpy(self) -> np.ndarray:
        """A copy on the host."""
        target = np.empty(self.shape, self.dtype)
        with self._cuda.current():
            self._cuda.to_host(target, self._block.address, self._stream.handle)
            self._cuda.synchronize(self._stream.handle, "an output")
        return target

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
        """A DLPack capsule; ``stream``'s later work waits until the content is there (-1: no waiting, at your risk)."""
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
                    self._cuda.wait(user, self._ready.handle)
        return dlpack.capsule(self._block.address, self.shape, self.dtype, self.__dlpack_device__(), self._block)


class Handle:
    """An event or a stream that is given back when nothing refers to it."""

    def __init__(self, handle: Any, destroy: Callable[[Any], None]) -> None:
        self.handle = handle
        weakref.finalize(self, destroy, handle).atexit = False
