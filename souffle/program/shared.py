"""Work done once for TEs that share one expression, as the repeated layers and steps of a network do."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from contextlib import suppress
from threading import RLock
from typing import Generic, TypeVar

__all__ = ["OncePer"]

Result = TypeVar("Result")


class OncePer(Generic[Result]):
    """Results by key; the least recently used are forgotten beyond a number. Threads may share one.

    Keys may hold ``te.ComputeOp`` s: TVM compares them by identity, and a key keeps its object alive, so an address is
    never mistaken for another.

    Parameters
    ----------
    limit : int
        Results kept.
    """

    def __init__(self, limit: int = 8192) -> None:
        self._limit = limit
        self._known: OrderedDict[Hashable, Result] = OrderedDict()
        # To compare keys runs Python, where threads take turns, and an `OrderedDict` that another one changes meanwhile
        # can lose track of its order for good. Not held while a result is found, so that threads do not wait for it.
        self._used = RLock()

    def __call__(self, key: Hashable, find: Callable[[], Result]) -> Result:
        """The result for `key`; ``find()`` where it is not known. Two threads that ask at once may both find it."""
        with self._used, suppress(KeyError):
            self._known.move_to_end(key)
            return self._known[key]
        result = find()
        with self._used:
            self._known[key] = result
            if len(self._known) > self._limit:
                self._known.popitem(last=False)
        return result

    def forget(self) -> None:
        """Forget all: for tests, which change what results come of."""
        with self._used:
            self._known.clear()
