"""Memory for checked launches: each buffer far from all others, with a shadow that knows what was written by whom."""

from __future__ import annotations

import ctypes
import os
import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from souffle.emulator.abi import Arena, CheckedRegion, Order, WarpOrder
from souffle.errors import DeviceError

__all__ = ["CheckedBuffer", "CheckedMemory"]

_PAGE = 4096
_LARGEST_SLOT, _SMALLEST_SLOT = 35, 26
"""Bits. 32 GiB: an index of 32 bits into elements of up to 4 bytes cannot leave the slot that it started in."""
_LARGEST_ARENA = 2**45
_TAGS = 255
_FIRST_SET = 2**31  # kSouffleSet


@dataclass(frozen=True)
class CheckedBuffer:
    """One buffer.

    Attributes
    ----------
    name : str
    shape : tuple of int
    dtype : str
    writable : bool
        Whether kernels may write it.
    initialized : bool
        Whether it holds values before the first launch of a run.
    offset : int or None
        Bytes from the start of the workspace, for a buffer in it; such buffers may overlap.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    writable: bool = True
    initialized: bool = True
    offset: int | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the buffer."""
        return int(np.prod(self.shape, dtype=np.int64)) * np.dtype(self.dtype).itemsize


def _address(array: np.ndarray) -> int:
    return array.ctypes.data


def _orders(elements: int) -> tuple[np.ndarray, np.ndarray]:
    """Shadows that know who accessed each element last: which blocks, and which warps of a block."""
    words = ctypes.sizeof(WarpOrder) // 8
    return np.zeros(elements, np.uint64), np.zeros(elements * words, np.uint64)


class CheckedMemory:
    """The buffers of a run.

    Every buffer has a slot of address space of its own. Buffers of the workspace are views of the same pages, so that
    two that share memory do so here too. The shadow holds for each byte the tag of the buffer that wrote it last.

    Parameters
    ----------
    runtime
        The fiber runtime.
    buffers
    workspace_bytes

    Raises
    ------
    DeviceError
        There is not enough address space.
    """

    def __init__(self, runtime: ctypes.CDLL, buffers: Sequence[CheckedBuffer], workspace_bytes: int = 0) -> None:
        self.buffers = tuple(buffers)
        count = max(1, len(self.buffers))
        largest = max([1, workspace_bytes, *(buffer.nbytes for buffer in self.buffers)])
        base, bits = None, _LARGEST_SLOT
        # Half of a slot lies before the buffer.
        smallest = max(_SMALLEST_SLOT, (4 * largest).bit_length())
        while bits >= smallest:
            if count << bits <= _LARGEST_ARENA:
                base = runtime.souffle_reserve(count << bits)
                if base:
                    break
            bits -= 1
        if not base:
            raise DeviceError(f"no address space for checked runs of {count} buffers, the largest of {largest} bytes")
        self._release = weakref.finalize(self, runtime.souffle_release, base, count << bits)
        self._regions = (CheckedRegion * count)()
        self.arena = Arena(base, count << bits, bits, count, self._regions, 1, _FIRST_SET)
        inside = [np.dtype(b.dtype).itemsize for b in self.buffers if b.offset is not None]
        grain = min(inside, default=4)
        self._workspace_owners = np.zeros(workspace_bytes + 16, np.uint8)
        workspace_order = _orders((workspace_bytes // grain + 2) if inside else 0)
        self._owners: list[np.ndarray] = []
        self._orders: list[tuple[np.ndarray, np.ndarray]] = [workspace_order]
        self.arrays: tuple[np.ndarray, ...] = ()
        file = os.memfd_create("souffle-workspace") if inside else -1
        try:
            if inside:
                os.ftruncate(file, self._workspace_pages())
            for index, buffer in enumerate(self.buffers):
                self._place(runtime, index, buffer, file, grain, workspace_order)
        finally:
            if inside:
                os.close(file)

    def _place(
        self,
        runtime: ctypes.CDLL,
        index: int,
        buffer: CheckedBuffer,
        file: int,
        grain: int,
        order: tuple[np.ndarray, np.ndarray],
    ) -> None:
        base, bits = self.arena.base, self.arena.slot_bits
        dtype, nbytes = np.dtype(buffer.dtype), buffer.nbytes
        start = (index << bits) + (1 << (bits - 1))
        region = self._regions[index]
        itemsize, tag = dtype.itemsize, 1 + index % _TAGS
        if buffer.offset is None:
            owners = np.zeros(nbytes + 16, np.uint8)
            region.owners = _address(owners)
            if buffer.writable:
                own_order = _orders(nbytes // itemsize + 2)
                self._orders.append(own_order)
                region.order, region.warps = map(_address, own_order)
        else:
            itemsize = grain
            if runtime.souffle_map_file(base + start, self._workspace_pages(), file) != 0:
                raise DeviceError(f"buffer {buffer.name}: the workspace cannot be mapped once more")
            start += buffer.offset
            owners = self._workspace_owners[buffer.offset : buffer.offset + nbytes]
            region.owners = _address(self._workspace_owners) + buffer.offset
            first = buffer.offset // grain
            region.order = _address(order[0]) + first * ctypes.sizeof(Order)
            region.warps = _address(order[1]) + first * ctypes.sizeof(WarpOrder)
        self._owners.append(owners)
        region.begin, region.bytes = start, nbytes
        region.element_shift = itemsize.bit_length() - 1
        region.tag, region.writable = tag, buffer.writable
        raw = np.frombuffer((ctypes.c_ubyte * nbytes).from_address(base + start), np.uint8) if nbytes else np.zeros(0)
        view = raw.view(dtype).reshape(buffer.shape) if nbytes else np.zeros(buffer.shape, dtype)
        self.arrays = (*self.arrays, view)

    def _workspace_pages(self) -> int:
        return -(-self._workspace_owners.size // _PAGE) * _PAGE

    def begin(self) -> None:
        """Begin a run: everything that is not initialized is forgotten, and holds ones in every bit (NaN)."""
        for index, buffer in enumerate(self.buffers):
            if buffer.initialized:
                self._owners[index][:] = self._regions[index].tag
            else:
                self._owners[index][:] = 0
                if buffer.nbytes:
                    self.arrays[index].reshape(-1).view(np.uint8)[:] = 0xFF

    def writer(self, index: int, tag: int, offset: int) -> str:
        """Name the buffer of a tag among those that overlap one buffer at an offset in it."""
        own = self.buffers[index]
        at = (own.offset or 0) + offset
        for other_index, other in enumerate(self.buffers):
            if self._regions[other_index].tag != tag or other.offset is None or other_index == index:
                continue
            if other.offset <= at < other.offset + other.nbytes:
                return other.name
        return "another buffer"
