"""Times of fused kernels and of their parts alone, on a GPU (paper §IV-A).

The kernels alone run "native": side by side on two streams or more, from the launch of the first to the end of the
last, as the paper measures them; and one after the other. All contestants take turns, so that a clock that changes is
everyone's, and the median of their runs counts.
"""

from __future__ import annotations

import ctypes
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from souffle.codegen.nvcc import compile_cubin
from souffle.codegen.plan import Resources
from souffle.hfuse.errors import FusionError
from souffle.hfuse.fuse import FusedKernel
from souffle.hfuse.launch import Launch
from souffle.hfuse.original import original
from souffle.hfuse.part import Part
from souffle.hfuse.scalars import scalar_types
from souffle.runtime.cuda import Cuda, PreparedLaunch

__all__ = ["Profiler", "Times"]

Compiler = Callable[[str, str], tuple[bytes, dict[str, Resources]]]
"""Machine code of a text for an architecture, and what its kernels use."""


@dataclass(frozen=True)
class Times:
    """Medians in seconds.

    Attributes
    ----------
    parallel : float
        The kernels alone, side by side on streams.
    serial : float
        The kernels alone, one after the other.
    fused : tuple of float
        Of each fused kernel.
    alone : tuple of float
        Of each kernel.
    """

    parallel: float
    serial: float
    fused: tuple[float, ...]
    alone: tuple[float, ...]

    def speedup(self, index: int = 0) -> float:
        """By how much side by side takes longer than a fused kernel: 0.1 where it takes a tenth more (Figure 7)."""
        return self.parallel / self.fused[index] - 1


class Profiler:
    """Runs the parts of a fusion on a GPU; closed as a context manager.

    Parameters
    ----------
    cuda : Cuda
    parts : sequence of Part
        With their launches.
    splits : sequence of int
        Threads of each part where it runs alone.
    seed : int
        Of the buffers.
    repeats : int
        Runs of each contestant.
    warm_seconds : float
        That the GPU runs the kernels before anything is measured.
    compiler : callable
        Makes machine code.

    Raises
    ------
    FusionError
        A part has no launch, or a parameter whose size is not known.
    """

    def __init__(
        self,
        cuda: Cuda,
        parts: Sequence[Part],
        splits: Sequence[int],
        *,
        seed: int = 0,
        repeats: int = 15,
        warm_seconds: float = 0.5,
        compiler: Compiler = compile_cubin,
    ) -> None:
        if any(part.launch is None for part in parts):
            raise FusionError("a profile needs the launches of all kernels (--launch A.json B.json)")
        self._cuda, self._parts, self._compiler = cuda, tuple(parts), compiler
        self._repeats, self._warm_seconds = repeats, warm_seconds
        self._types = [scalar_types(part) for part in parts]
        cuda.make_current()
        self._modules: list[Any] = []
        self._buffers: list[int] = []
        self._streams = [cuda.stream() for _ in parts]
        self._start, self._end = cuda.event(timing=True), cuda.event(timing=True)
        self._joins = [cuda.event() for _ in parts]
        self._values = [self._uploaded(part.launch, seed + index) for index, part in enumerate(parts)]
        self._alone = [
            self._prepared_alone(part, threads, index) for index, (part, threads) in enumerate(zip(parts, splits))
        ]
        self._warm = False

    def __enter__(self) -> Profiler:
        return self

    def __exit__(self, *_: object) -> None:
        for stream in self._streams:
            self._cuda.settle(stream)
        for address in self._buffers:
            self._cuda.free(address)
        for module in self._modules:
            self._cuda.unload_module(module)
        for event in (self._start, self._end, *self._joins):
            self._cuda.destroy_event(event)
        for stream in self._streams:
            self._cuda.destroy_stream(stream)

    def times(self, fused: Sequence[FusedKernel]) -> Times:
        """Measure fused kernels against their parts; all take turns."""
        prepared = [self._prepared_fused(kernel) for kernel in fused]
        runs: list[Callable[[], float]] = [self._parallel, self._serial]
        runs += [lambda launch=launch: self._one(launch) for launch in (*prepared, *self._alone)]
        if not self._warm:
            self._warm_up(runs)
        measured: list[list[float]] = [[] for _ in runs]
        for _ in range(self._repeats):
            for run, seconds in zip(runs, measured, strict=True):
                seconds.append(run())
        medians = [statistics.median(seconds) for seconds in measured]
        return Times(medians[0], medians[1], tuple(medians[2 : 2 + len(fused)]), tuple(medians[2 + len(fused) :]))

    def seconds(self, fused: FusedKernel) -> float:
        """The time of one fused kernel, as :func:`souffle.hfuse.search.search` asks for it."""
        return self.times([fused]).fused[0]

    def results(self, fused: FusedKernel | None = None) -> list[list[np.ndarray]]:
        """Run a fused kernel once, or each part alone, and give the buffers of each part.

        What they hold depends on all runs before; make a new profiler to compare results.
        """
        if fused is None:
            self._serial()
        else:
            self._one(self._prepared_fused(fused))
        buffers = []
        for part, values in zip(self._parts, self._values, strict=True):
            arrays = []
            for argument, value in zip(part.launch.arguments, values, strict=True):
                if argument.dtype is not None:
                    array = np.empty(argument.count, argument.dtype)
                    self._cuda.to_host(array, value, self._streams[0])
                    arrays.append(array)
            buffers.append(arrays)
        self._cuda.synchronize(self._streams[0], "results")
        return buffers

    def _warm_up(self, runs: Sequence[Callable[[], float]]) -> None:
        until = time.monotonic() + self._warm_seconds
        for run in runs:
            run()
        while time.monotonic() < until:
            self._serial()
        self._warm = True

    def _uploaded(self, launch: Launch, seed: int) -> list[int | float]:
        """A launch's arguments: addresses of its buffers, filled, and its scalars."""
        values: list[int | float] = []
        for argument, value in zip(launch.arguments, launch.arrays(seed), strict=True):
            if not isinstance(value, np.ndarray):
                values.append(value)
                continue
            address = self._cuda.alloc(value.nbytes, f"buffer {argument.name} of {launch.kernel}")
            self._buffers.append(address)
            self._cuda.to_device(address, value, self._streams[0])
            self._cuda.synchronize(self._streams[0], argument.name)
            values.append(address)
        return values

    def _function(self, text: str, name: str, shared_bytes: int) -> Any:
        image, _ = self._compiler(text, self._cuda.arch)
        module = self._cuda.load_module(image)
        self._modules.append(module)
        return self._cuda.function(module, name, shared_bytes)

    def _prepared_alone(self, part: Part, threads: int, index: int) -> PreparedLaunch:
        text, launch = original(part, wrapped=True), part.launch
        function = self._function(text.text, text.name, launch.shared_bytes)
        block = launch.block_of(threads)
        return self._prepared(
            text.name, function, launch.grid, block, launch.shared_bytes, self._values[index], self._types[index]
        )

    def _prepared_fused(self, fused: FusedKernel) -> PreparedLaunch:
        launch = fused.launch()
        function = self._function(fused.text, fused.name, fused.shared_bytes)
        values = [value for part in self._values for value in part] + [value for _, value in fused.grids()]
        types = [kind for part in self._types for kind in part] + [ctypes.c_uint32] * len(fused.grids())
        return self._prepared(fused.name, function, launch.grid, (fused.block, 1, 1), fused.shared_bytes, values, types)

    def _prepared(
        self,
        name: str,
        function: Any,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        shared_bytes: int,
        values: Sequence[int | float],
        types: Sequence[Any],
    ) -> PreparedLaunch:
        """A launch whose scalars have types of their own, on a grid of three dimensions."""
        if len(values) != len(types):
            raise FusionError(f"kernel {name} has {len(types)} parameters, and its launch gives {len(values)}")
        held = [(ctypes.c_uint64 if kind is None else kind)(value) for kind, value in zip(types, values, strict=True)]
        table = (ctypes.c_void_p * max(1, len(held)))(*[ctypes.addressof(value) for value in held])
        config = self._cuda.api.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = grid
        config.blockDimX, config.blockDimY, config.blockDimZ = block
        config.sharedMemBytes = shared_bytes
        config.numAttrs = 0
        nothing = (ctypes.c_uint64 * 1)(), (ctypes.c_int32 * 1)()
        return PreparedLaunch(name, function, config, *nothing, ctypes.addressof(table), (table, *held))

    def _timed(self, queue: Callable[[], None], about: str) -> float:
        cuda, first = self._cuda, self._streams[0]
        cuda.record(self._start, first)
        queue()
        cuda.record(self._end, first)
        cuda.synchronize(first, about)
        return cuda.microseconds(self._start, self._end) * 1e-6

    def _one(self, launch: PreparedLaunch) -> float:
        return self._timed(lambda: self._cuda.launch(launch, self._streams[0]), launch.name)

    def _serial(self) -> float:
        def queue() -> None:
            for launch in self._alone:
                self._cuda.launch(launch, self._streams[0])

        return self._timed(queue, "the kernels one after the other")

    def _parallel(self) -> float:
        def queue() -> None:
            cuda, first = self._cuda, self._streams[0]
            for stream in self._streams[1:]:
                cuda.wait(stream, self._start)
            for launch, stream in zip(self._alone, self._streams, strict=True):
                cuda.launch(launch, stream)
            for event, stream in zip(self._joins[1:], self._streams[1:], strict=True):
                cuda.record(event, stream)
                cuda.wait(first, event)

        return self._timed(queue, "the kernels side by side")
