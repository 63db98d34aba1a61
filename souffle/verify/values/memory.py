"""Memories of a stage function that runs: tensors, the pool that a block shares, and each thread's own arrays.

A memory holds numbers, not bytes. Its *unit* is the smallest element that anything names in it; a number that takes
several units stands in the first of them. Where elements of several sizes share a memory, each unit remembers what
begins in it, so that an element of one size is not read as one of another. What was never written is noise.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from souffle.verify.expressions import Undecided
from souffle.verify.values.field import Number
from souffle.verify.values.scalars import Fault, Mask

__all__ = ["ElementMemory", "Lanes", "PerBlock", "PerThread", "PerWarp", "TensorMemory", "Write"]

Noise = Callable[[int], np.ndarray]
"""What a memory of so many numbers holds before it is written."""

_CONTINUED = -1
_WARP = 32


@dataclass(frozen=True)
class Lanes:
    """All threads of some tiles: lane ``t * threads + tid``.

    Attributes
    ----------
    tiles : tuple of int
        Which tiles.
    threads : int
        Of each.
    """

    tiles: tuple[int, ...]
    threads: int

    @property
    def count(self) -> int:
        """How many lanes there are."""
        return len(self.tiles) * self.threads

    @property
    def tile(self) -> np.ndarray:
        """The tile of each lane."""
        return np.repeat(np.array(self.tiles, np.int64), self.threads)

    @property
    def tid(self) -> np.ndarray:
        """The thread of each lane."""
        return np.tile(np.arange(self.threads), len(self.tiles))

    def parted(self, mask: Mask, size: int) -> bool:
        """Whether a mask leaves out some lanes of a group of so many neighbours, and others not."""
        if mask is None:
            return False
        here = np.broadcast_to(mask, (*mask.shape[:-1], self.count)).reshape(-1, size)
        return bool((here.any(axis=1) != here.all(axis=1)).any())

    def named(self, lane: int) -> tuple[int, int]:
        """The tile and the thread of a lane."""
        return self.tiles[lane // self.threads], lane % self.threads


class ElementMemory(Protocol):
    """What elements are read from and written to. Indices count units."""

    unit: int

    def read(self, at: Number, size: int, mask: Mask) -> Number:
        """The elements of so many bytes at some places."""

    def write(self, at: Number, size: int, value: Number, mask: Mask, statement: int) -> None:
        """Put elements at some places."""


@dataclass(frozen=True)
class Write:
    """Elements that a statement wrote to a tensor, with the lanes that did."""

    elements: np.ndarray
    lanes: np.ndarray
    statement: int


def _bounded(at: Number, size: int, mask: Mask, what: str) -> Number:
    """Indices that are in bounds, 0 where none is wanted."""
    if isinstance(at, int):
        if not 0 <= at < size:
            raise Fault(f"it touches element {at} of {what}, which has {size}", 0)
        return at
    if mask is not None:
        at = np.where(mask, at, 0)
    if at.size and (at.min() < 0 or at.max() >= size):
        wrong = np.argwhere((at < 0) | (at >= size))[0]
        place = int(at[tuple(wrong)])
        raise Fault(f"it touches element {place} of {what}, which has {size}", int(wrong[-1]))
    return at


def _wanted(mask: Mask, *arrays: Number) -> list[np.ndarray]:
    """Arrays, broadcast to each other, where a mask holds."""
    shape = np.broadcast_shapes(*map(np.shape, arrays), np.shape(mask))
    whole = [np.broadcast_to(array, shape) for array in arrays]
    return whole if mask is None else [array[np.broadcast_to(mask, shape)] for array in whole]


def _sized(size: int, unit: int, what: str) -> None:
    if size != unit:
        raise Undecided(f"elements of {size} bytes in the {what}, whose elements have {unit}")


class TensorMemory:
    """A tensor in global memory: elements of one size.

    Parameters
    ----------
    name : str
    values : array, shape (elements,)
    unit : int
        Bytes of an element.
    """

    def __init__(self, name: str, values: np.ndarray, unit: int, lanes: int) -> None:
        self.name = name
        self.values = values
        self.unit = unit
        self.lanes = lanes
        self.writes: list[Write] = []

    def read(self, at: Number, size: int, mask: Mask) -> Number:
        """See :class:`ElementMemory`."""
        _sized(size, self.unit, f"tensor {self.name}")
        places = _bounded(np.atleast_1d(np.asarray(at)), len(self.values), mask, f"the tensor {self.name}")
        return self.values[places]

    def write(self, at: Number, size: int, value: Number, mask: Mask, statement: int) -> None:
        """See :class:`ElementMemory`; remembers who wrote."""
        _sized(size, self.unit, f"tensor {self.name}")
        places = _bounded(np.atleast_1d(np.asarray(at)), len(self.values), mask, self.name)
        places, lanes, values = _wanted(mask, places, np.arange(self.lanes), value)
        self.values[places] = values
        self.writes.append(Write(places.ravel(), lanes.ravel(), statement))


class _Sizes:
    """Which element begins in each unit of a memory that holds several sizes."""

    def __init__(self, units: int, unit: int) -> None:
        self.unit = unit
        self.begins = np.zeros(units, np.int8)

    def sound(self, at: np.ndarray, size: int) -> np.ndarray:
        """Whether elements of this size are at some places."""
        known = self.begins[at] == size
        for further in range(1, size // self.unit):
            known &= self.begins[np.minimum(at + further, len(self.begins) - 1)] == _CONTINUED
        return known

    def put(self, at: np.ndarray, size: int) -> None:
        """Note elements of this size."""
        self.begins[at] = size
        for further in range(1, size // self.unit):
            self.begins[at + further] = _CONTINUED


class _Flat:
    """A memory of its own for each of some groups of lanes."""

    def __init__(self, name: str, units: int, unit: int, mixed: bool, groups: np.ndarray, noise: Noise) -> None:
        self.name = name
        self.units = units
        self.unit = unit
        self.lanes = len(groups)
        self.start = groups * units
        total = units * (int(groups.max()) + 1)
        self.values = noise(total)
        self.garbage = self.values.copy() if mixed else self.values
        self.sizes = _Sizes(total, unit) if mixed else None

    def read(self, at: Number, size: int, mask: Mask) -> Number:
        """See :class:`ElementMemory`."""
        places = self._places(at, size, mask)
        found = self.values[places]
        if self.sizes is None:
            return found
        sound = self.sizes.sound(places, size)
        return found if sound.all() else np.where(sound, found, self.garbage[places])

    def write(self, at: Number, size: int, value: Number, mask: Mask, statement: int) -> None:
        """See :class:`ElementMemory`."""
        places = self._places(at, size, mask)
        places, values = _wanted(mask, places, value)
        self.values[places] = values
        if self.sizes is not None:
            self.sizes.put(places, size)

    def _places(self, at: Number, size: int, mask: Mask) -> np.ndarray:
        last = self.units - size // self.unit + 1
        return _bounded(at, last, mask, f"the units of {self.unit} bytes of {self.name}") + self.start


class PerBlock(_Flat):
    """Shared memory: one for each tile."""

    def __init__(self, name: str, nbytes: int, unit: int, mixed: bool, lanes: Lanes, noise: Noise) -> None:
        super().__init__(name, -(-nbytes // unit), unit, mixed, np.arange(lanes.count) // lanes.threads, noise)


class PerWarp(_Flat):
    """Fragments of matrices: one for each warp."""

    def __init__(self, name: str, elements: int, unit: int, lanes: Lanes, noise: Noise) -> None:
        super().__init__(name, elements, unit, False, np.arange(lanes.count) // _WARP, noise)


class PerThread:
    """Arrays of each thread, in registers or local memory."""

    def __init__(self, name: str, nbytes: int, unit: int, lanes: Lanes, noise: Noise) -> None:
        self.name = name
        self.unit = unit
        self.units = nbytes // unit
        self.lane = np.arange(lanes.count)
        values = noise(self.units * lanes.count)
        self.values = values.reshape(self.units, lanes.count)

    def read(self, at: Number, size: int, mask: Mask) -> Number:
        """See :class:`ElementMemory`. The result may be the memory itself: use it before the next write."""
        _sized(size, self.unit, f"array {self.name}")
        if isinstance(at, int):
            return self.values[_bounded(at, self.units, None, self.name)]
        places = _bounded(at, self.units, mask, self.name)
        return self.values[places[..., 0]] if places.shape[-1] == 1 else self.values[places, self.lane]

    def write(self, at: Number, size: int, value: Number, mask: Mask, statement: int) -> None:
        """See :class:`ElementMemory`."""
        _sized(size, self.unit, f"array {self.name}")
        if isinstance(at, int) and np.ndim(value) < 2 and np.ndim(mask) < 2:
            _bounded(at, self.units, None, self.name)
            if mask is None:
                self.values[at] = value
            else:
                np.copyto(self.values[at], value, where=mask)
            return
        places = _bounded(np.atleast_1d(np.asarray(at)), self.units, mask, self.name)
        here = (*places.shape[:-1], len(self.lane))
        # Turns of a loop that are run together may write one place in turn: the last is seen.
        if mask is None and places.shape[-1] == 1 and np.broadcast_shapes(np.shape(value), here) == here:
            self.values[places[..., 0]] = value
            return
        places, lane, values = _wanted(mask, places, self.lane, value)
        self.values[places, lane] = values
