"""What is found out about a lowered function once, whoever asks and under whatever name it stands."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar
from weakref import WeakKeyDictionary

from tvm import tirx

from souffle.schedule.gpu.rule import GpuSchedule
from souffle.schedule.lower import DeviceFunction

__all__ = ["OncePerFunction"]

Result = TypeVar("Result")


class OncePerFunction(Generic[Result]):
    """Results by function; gone with the schedule that it was lowered from.

    Parameters
    ----------
    find : callable
        Depends on what the function is alone.
    """

    def __init__(self, find: Callable[[DeviceFunction], Result]) -> None:
        self._find = find
        self._known: WeakKeyDictionary[GpuSchedule, dict[tirx.PrimFunc, Result]] = WeakKeyDictionary()

    def __call__(self, function: DeviceFunction) -> Result:
        """The result for a function."""
        known = self._known.setdefault(function.schedule, {})
        if function.func not in known:
            known[function.func] = self._find(function)
        return known[function.func]
