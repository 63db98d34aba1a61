"""Which block computes which tiles of a stage.

Tiles are put into slots, and block ``b`` of a grid of ``n`` computes slots ``b, b + n, b + 2n, ...``: two tiles of one
slot, of one stage or of several, are on one block of every grid. Without an assignment a slot is a tile. With one, the
tiles of a slot are ``start + (digits of the slot) . strides + (digits of the place in the slot) . strides``, so that a
slot can hold neighbouring tiles, tiles of one column, or be numbered across.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import numpy as np

__all__ = ["Assignment", "fit", "turns"]

Digits = tuple[tuple[int, int], ...]
"""Extent and stride of each digit of a number, the most significant first."""


@dataclass(frozen=True)
class Assignment:
    """The tiles of each slot.

    Attributes
    ----------
    start : int
    slots, group : tuple of (int, int)
        Extent and stride of each digit of the slot's number, and of the place in a slot; most significant first.
    """

    start: int
    slots: Digits
    group: Digits

    @property
    def count(self) -> int:
        """How many slots there are."""
        return prod(extent for extent, _ in self.slots)

    @property
    def per_slot(self) -> int:
        """How many tiles each holds."""
        return prod(extent for extent, _ in self.group)

    def tiles(self) -> np.ndarray:
        """The tiles of each slot: an array of (slots, tiles of a slot)."""
        return self.start + _numbers(self.slots)[:, None] + _numbers(self.group)


def turns(slots: int, per_slot: int, blocks: int) -> int:
    """How many tiles the busiest of so many blocks computes, one after the other."""
    return -(-slots // blocks) * per_slot


def fit(table: np.ndarray) -> Assignment | None:
    """The assignment with these tiles in each slot, in any order; ``None`` where no digits say it.

    Parameters
    ----------
    table : array of int
        Of (slots, tiles of a slot).
    """
    table = np.sort(table, axis=1)
    base, offsets = table[:, 0] - table[0, 0], table[0] - table[0, 0]
    slots, group = _digits(base), _digits(offsets)
    if slots is None or group is None or not np.array_equal(table, table[0, 0] + base[:, None] + offsets):
        return None
    return Assignment(int(table[0, 0]), slots, group)


def _numbers(digits: Digits) -> np.ndarray:
    found = np.zeros(1, np.int64)
    for extent, stride in digits:
        found = (found[:, None] + np.arange(extent) * stride).ravel()
    return found


def _digits(sequence: np.ndarray) -> Digits | None:
    """Digits whose strides give a sequence that starts at 0."""
    found: list[tuple[int, int]] = []
    while len(sequence) > 1:
        stride = int(sequence[1])
        regular = sequence == np.arange(len(sequence)) * stride
        run = len(sequence) if regular.all() else int(np.argmin(regular))
        if len(sequence) % run:
            return None
        parts = sequence.reshape(-1, run)
        if not np.array_equal(parts, parts[:, :1] + np.arange(run) * stride):
            return None
        found.append((run, stride))
        sequence = parts[:, 0]
    return tuple(reversed(found))

