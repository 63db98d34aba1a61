"""Runs kernels that measure a GPU: each in two lengths, again and again, with its result checked every time.

A figure is the difference of two lengths over the difference of their work, so that starts, ends and launches cancel.
The median over pairs of runs counts, since others may use the GPU at the same time.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from souffle.errors import DeviceError
from souffle.runtime.cuda import Cuda, PreparedLaunch

__all__ = ["Bench", "Cost", "Pairs", "cost"]

_WARM_UP = 2
"""Pairs of runs that do not count: the clock rises, code and addresses come into the caches."""


@dataclass(frozen=True)
class Cost:
    """What one unit of work takes.

    Attributes
    ----------
    value : float
        The median, in clocks or seconds.
    spread : float
        Of the middle half of the runs, as a part of the median.
    runs : int
    """

    value: float
    spread: float
    runs: int


def cost(differences: Sequence[float], work: float) -> Cost:
    """The cost of a unit.

    Parameters
    ----------
    differences : sequence of float
        By which the longer run of each pair took longer.
    work : float
        Units of work by which it did more.
    """
    values = [difference / work for difference in differences]
    median = statistics.median(values)
    low, high = np.quantile(values, (0.25, 0.75))
    return Cost(median, float((high - low) / median) if median > 0 else float("inf"), len(values))


@dataclass(frozen=True)
class Pairs:
    """By how much the longer of two runs took longer, once for each pair.

    Attributes
    ----------
    typical, slowest : tuple of float
        Clocks of the median block and of the slowest one.
    seconds : tuple of float
        Between events before and after the launch.
    """

    typical: tuple[float, ...]
    slowest: tuple[float, ...]
    seconds: tuple[float, ...]


class Bench:
    """Launches and checks the kernels of one module.

    Parameters
    ----------
    cuda : Cuda
    image : bytes
        Machine code of ``measure_device.cu``.
    repeats : int
        Pairs of runs that count.
    """

    def __init__(self, cuda: Cuda, image: bytes, repeats: int) -> None:
        self.cuda, self.repeats = cuda, repeats
        self.stream = cuda.stream()
        self.module = cuda.load_module(image)
        self._held: list[int] = []
        self._first, self._last = cuda.event(timing=True), cuda.event(timing=True)

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *error: object) -> None:
        self.cuda.settle(self.stream)
        for address in self._held:
            self.cuda.free(address)
        for event in (self._first, self._last):
            self.cuda.destroy_event(event)
        self.cuda.destroy_stream(self.stream)
        self.cuda.unload_module(self.module)

    def buffer(self, nbytes: int) -> int:
        """New device memory, given back at the end."""
        self._held.append(self.cuda.alloc(nbytes))
        return self._held[-1]

    def release(self, address: int) -> None:
        """Give memory of :meth:`buffer` back now."""
        self.cuda.synchronize(self.stream)
        self._held.remove(address)
        self.cuda.free(address)

    def constant(self, values: np.ndarray) -> int:
        """Device memory with the content of an array."""
        address = self.buffer(values.nbytes)
        self.cuda.to_device(address, np.ascontiguousarray(values), self.stream)
        self.cuda.synchronize(self.stream)
        return address

    def function(self, name: str) -> Any:
        """A kernel of the module."""
        return self.cuda.function(self.module, name)

    def launch(self, name: str, grid: int, threads: int, pointers: Sequence[int], integers: Sequence[int]) -> None:
        """Run a kernel that is not measured."""
        prepared = self.cuda.prepare(
            name, self.function(name), grid=grid, threads=threads, pointers=pointers, integers=integers
        )
        self.cuda.launch(prepared, self.stream)
        self.cuda.synchronize(self.stream)

    def seconds(self, queue: Callable[[], None], before: Callable[[], None] = lambda: None) -> float:
        """Device time of something that is queued, after something that is not timed."""
        cuda = self.cuda
        before()
        cuda.record(self._first, self.stream)
        queue()
        cuda.record(self._last, self.stream)
        cuda.synchronize(self.stream)
        return cuda.microseconds(self._first, self._last) * 1e-6

    def differences(
        self, queues: tuple[Callable[[], None], Callable[[], None]], before: Callable[[], None] = lambda: None
    ) -> tuple[float, ...]:
        """By how many seconds the second of two things takes longer than the first, once for each pair."""
        found = []
        for _ in range(self.repeats + _WARM_UP):
            short, long = (self.seconds(queue, before) for queue in queues)
            found.append(long - short)
        return tuple(found[_WARM_UP:])

    def pairs(
        self,
        name: str,
        *,
        grid: int,
        threads: int,
        steps: tuple[int, int],
        data: Sequence[int] = (),
        integers: Callable[[int], tuple[int, ...]] = lambda steps: (steps,),
        results: int,
        dtype: type,
        expected: Callable[[int], float],
        tolerance: float = 0.0,
        before: Callable[[], None] = lambda: None,
        l1: bool = False,
        cooperative: bool = False,
    ) -> Pairs:
        """Run a kernel with fewer and more steps in turn.

        Parameters
        ----------
        name : str
            Of the kernel, which takes ``clocks, out``, then `data`, then `integers`.
        grid, threads : int
        steps : tuple of int
            Of the shorter and the longer run.
        data : sequence of int
            Addresses.
        integers : callable
            The kernel's last parameters, from the number of steps.
        results, dtype
            How many of what the kernel leaves in ``out``.
        expected : callable
            What each of them is after so many steps.
        tolerance : float
            By which it may differ.
        before : callable
            Runs before each launch.
        l1 : bool
            Whether the L1 cache is made as large as it can be.
        cooperative : bool

        Raises
        ------
        DeviceError
            If a result is wrong: the work that was timed is then not the work that was meant.
        """
        cuda, function = self.cuda, self.function(name)
        if l1:
            cuda.prefer_l1(function)
        clocks, out = np.zeros((grid, 2), np.uint64), np.zeros(results, dtype)
        pointers = [self.buffer(clocks.nbytes), self.buffer(out.nbytes)]
        launches = [
            cuda.prepare(name, function, grid=grid, threads=threads, pointers=[*pointers, *data],
                         integers=integers(count), cooperative=cooperative)
            for count in steps
        ]  # fmt: skip
        found: list[list[tuple[float, float, float]]] = []
        for _ in range(self.repeats + _WARM_UP):
            pair = []
            for count, prepared in zip(steps, launches, strict=True):
                seconds = self._one(prepared, before)
                cuda.to_host(clocks, pointers[0], self.stream)
                cuda.to_host(out, pointers[1], self.stream)
                cuda.synchronize(self.stream)
                _check(name, out, expected(count), tolerance)
                taken = (clocks[:, 1] - clocks[:, 0]).astype(np.float64)
                pair.append((float(np.median(taken)), float(taken.max()), seconds))
            found.append(pair)
        for address in pointers:
            self.release(address)
        rows = [tuple(b - a for a, b in zip(short, long, strict=True)) for short, long in found[_WARM_UP:]]
        return Pairs(*(tuple(column) for column in zip(*rows, strict=True)))

    def _one(self, prepared: PreparedLaunch, before: Callable[[], None]) -> float:
        return self.seconds(lambda: self.cuda.launch(prepared, self.stream), before)


def _check(name: str, out: np.ndarray, expected: float, tolerance: float) -> None:
    wrong = ~(np.abs(out.astype(np.float64) - expected) <= tolerance)
    if wrong.any():
        raise DeviceError(
            f"kernel {name} left {out[wrong][0]} where {expected} was expected, in {int(wrong.sum())} of {out.size} "
            "places, so what was timed is not what was meant; the GPU or its driver is at fault, or nvcc"
        )
