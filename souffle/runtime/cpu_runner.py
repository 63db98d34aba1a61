"""Runs a plan's emitted CUDA text on the CPU device: the same text that nvcc gets, every thread a fiber."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from souffle.codegen.plan import Buffer, Plan
from souffle.runtime.cpu_device import CheckedBuffer, CheckedMemory, LaunchReport, compile_text

__all__ = ["CpuRunner"]

_ALIGNMENT = 256
"""Bytes; what device memory is aligned to, which vector loads in the text rely on."""


def _aligned(nbytes: int) -> np.ndarray:
    """Fresh bytes at an aligned address, all ones: floats are NaN, so that an element that nobody wrote is seen."""
    raw = np.full(nbytes + _ALIGNMENT, 0xFF, np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT
    return raw[start : start + nbytes]


def _view(raw: np.ndarray, buffer: Buffer) -> np.ndarray:
    dtype = np.dtype(buffer.dtype)
    return raw[: buffer.nbytes].view(dtype).reshape(buffer.shape)


class CpuRunner:
    """A plan made ready for the CPU device.

    Parameters
    ----------
    plan
        The compiled network.
    blocks
        The largest grid. Any grid of at least one block gives the same result; fewer blocks run faster here.
    order
        ``"fixed"`` runs the threads between two barriers in order, ``"shuffled"`` in a random one: a race shows.
    seed
        Of the random order.
    cache_dir
        Folder of compiled texts; the CPU device's own where not given.
    checked
        Look at every access to global and shared memory, and count them.
    """

    def __init__(
        self,
        plan: Plan,
        *,
        blocks: int = 4,
        order: str = "fixed",
        seed: int = 0,
        cache_dir: Path | None = None,
        checked: bool = False,
    ) -> None:
        self._plan = plan
        self._order, self._seed = order, seed
        self.grids = tuple(max(1, min(kernel.tiles, blocks)) for kernel in plan.kernels)
        self._modules = tuple(
            compile_text(module.text, cache_dir=cache_dir, checked=checked) for module in plan.modules
        )
        self._memory = self._checked_memory() if checked and self._modules else None
        self.reports: tuple[LaunchReport, ...] = ()
        self._kept: dict[int, np.ndarray] = {}
        for index, buffer in enumerate(plan.buffers):
            if buffer.kind in ("constant", "state"):
                held = self._memory.arrays[index] if self._memory else _view(_aligned(buffer.nbytes), buffer)
                held[...] = plan.constants[buffer.name] if buffer.kind == "constant" else 0
                self._kept[index] = held

    def reordered(self, *, seed: int, blocks: int) -> CpuRunner:
        """The same in a random order of threads, with another largest grid; nothing is compiled again."""
        other = copy.copy(self)
        other._order, other._seed = "shuffled", seed
        other.grids = tuple(max(1, min(kernel.tiles, blocks)) for kernel in self._plan.kernels)
        return other

    def _checked_memory(self) -> CheckedMemory:
        plan = self._plan
        buffers = [
            CheckedBuffer(
                buffer.label,
                buffer.shape,
                buffer.dtype,
                writable=buffer.kind in ("output", "workspace", "state"),
                initialized=buffer.kind in ("input", "constant", "state"),
                offset=buffer.offset if buffer.kind == "workspace" else None,
            )
            for buffer in plan.buffers
        ]
        return self._modules[0].memory(buffers, plan.workspace_bytes)

    def _arrays(self, inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
        plan = self._plan
        if self._memory:
            self._memory.begin()
            arrays = list(self._memory.arrays)
            given = iter(inputs)
            for array, buffer in zip(arrays, plan.buffers, strict=True):
                if buffer.kind == "input":
                    array[...] = next(given)
            return arrays
        workspace = _aligned(plan.workspace_bytes)
        given = iter(inputs)
        arrays: list[np.ndarray] = []
        for index, buffer in enumerate(plan.buffers):
            if buffer.kind == "input":
                array = next(given)
                if array.ctypes.data % _ALIGNMENT:
                    moved = _view(_aligned(buffer.nbytes), buffer)
                    moved[...] = array
                    array = moved
            elif index in self._kept:
                array = self._kept[index]
            elif buffer.kind == "workspace":
                array = _view(workspace[buffer.offset :], buffer)
            else:
                array = _view(_aligned(buffer.nbytes), buffer)
            arrays.append(array)
        return arrays

    def run(self, inputs: Sequence[np.ndarray]) -> tuple[np.ndarray, ...]:
        """Run all launches in order: checked inputs in, fresh outputs out."""
        complete = False
        try:
            outputs = self._run(inputs)
            complete = True
            return outputs
        finally:
            if not complete:
                # A launch that was stopped may have left some of its blocks' arrivals at a barrier.
                for index, buffer in enumerate(self._plan.buffers):
                    if buffer.kind == "state":
                        self._kept[index][...] = 0

    def _run(self, inputs: Sequence[np.ndarray]) -> tuple[np.ndarray, ...]:
        plan = self._plan
        arrays = self._arrays(inputs)
        reports: list[LaunchReport] = []
        for launch in plan.launches:
            kernel, grid = plan.kernels[launch.kernel], self.grids[launch.kernel]
            report = self._modules[kernel.module].launch(
                kernel.name,
                grid=(grid, 1, 1),
                block=(kernel.threads, 1, 1),
                args=[*(arrays[index] for index in launch.buffers), np.int32(grid)],
                shared_bytes=kernel.dynamic_shared_bytes,
                cooperative=kernel.cooperative,
                order=self._order,
                seed=self._seed,
                memory=self._memory,
            )
            reports.append(report)
        self.reports = tuple(reports)
        outputs = [array for array, buffer in zip(arrays, plan.buffers, strict=True) if buffer.kind == "output"]
        return tuple(array.copy() if self._memory else array for array in outputs)
