"""Runs a plan's emitted CUDA text on the CPU device: the same text that nvcc gets, every thread a fiber."""

from __future__ import annotations

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
        self._constants: dict[int, np.ndarray] = {}
        for index, buffer in enumerate(plan.buffers):
            if buffer.kind == "constant":
                held = self._memory.arrays[index] if self._memory else _view(_aligned(buffer.nbytes), buffer)
                held[...] = plan.constants[buffer.name]
                self._constants[index] = held

    def _checked_memory(self) -> CheckedMemory:
        plan = self._plan
        buffers = [
            CheckedBuffer(
                buffer.label,
                buffer.shape,
                buffer.dtype,
                writable=buffer.kind in ("output", "workspace"),
                initialized=buffer.kind in ("input", "constant"),
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
            elif buffer.kind == "constant":
                array = self._constants[index]
            elif buffer.kind == "workspace":
                array = _view(workspace[buffer.offset :], buffer)
            else:
                array = _view(_aligned(buffer.nbytes), buffer)
            arrays.append(array)
        return arrays

    def run(self, inputs: Sequence[np.ndarray]) -> tuple[np.ndarray, ...]:
        """Run all launches in order: checked inputs in, fresh outputs out."""
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
