"""Constants that several networks have in common: one array for equal ones, and one copy of it on each device."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Hashable, Mapping
from typing import Any, TypeVar

import numpy as np

__all__ = ["SharedConstants", "UniqueArrays"]

_Placed = TypeVar("_Placed")


class UniqueArrays:
    """Arrays of one type, shape and content, as one object.

    Content is compared bit by bit, by its sha256: -0 is not 0, and NaN of the same bits are equal.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[str, tuple[int, ...], bytes], np.ndarray] = {}
        self._kept: set[int] = set()

    def of(self, constants: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The same constants, those that were seen before as the arrays that they were then."""
        return {name: self._unique(array) for name, array in constants.items()}

    def _unique(self, array: np.ndarray) -> np.ndarray:
        if id(array) in self._kept:
            return array
        content = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        key = (str(array.dtype), array.shape, hashlib.sha256(content).digest())
        unique = self._known.setdefault(key, array)
        self._kept.add(id(unique))
        return unique


class SharedConstants:
    """Constants as they lie on devices, for networks that have arrays in common; each is placed once.

    They stay as long as one of these networks does. Any thread may call it.
    """

    def __init__(self) -> None:
        self._placed: dict[tuple[Hashable, tuple[int, ...], int], tuple[np.ndarray, Any]] = {}
        self._lock = threading.Lock()

    def placed(
        self, where: Hashable, array: np.ndarray, shape: tuple[int, ...], place: Callable[[], _Placed]
    ) -> _Placed:
        """What `place` has given for an array on a device.

        Parameters
        ----------
        where
            What kind of place it is, and on which device.
        array
            Asked for by identity.
        shape
            That it has there.
        place
            Called the first time; what it gives is ready to be used by any network.
        """
        key = (where, shape, id(array))
        with self._lock:
            if key not in self._placed:
                self._placed[key] = (array, place())
            return self._placed[key][1]
