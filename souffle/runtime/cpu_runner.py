"""Runs a plan's emitted CUDA text on the CPU device: the same text that nvcc gets, every thread a fiber."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from souffle.aligned import ALIGNMENT, aligned_bytes
from souffle.codegen.plan import Buffer, Plan
from souffle.emulator import CheckedBuffer, CheckedMemory, CheckError, LaunchReport, compile_text
from souffle.errors import KernelTimeoutError
from souffle.runtime.shared_constants import SharedConstants
from souffle.runtime.signature import Destination
from souffle.runtime.timed_out import timeout_error

__all__ = ["CpuRunner"]

def _aligned(nbytes: int, margin: int = 0) -> np.ndarray:
    """Fresh bytes at an aligned address, all ones: floats are NaN, so that an element that nobody wrote is seen.

    So are the bytes of a margin before and after them.
    """
    before = -(-margin // ALIGNMENT) * ALIGNMENT
    return aligned_bytes(before + nbytes + margin, 0xFF)[before : before + nbytes]


def _view(raw: np.ndarray, buffer: Buffer) -> np.ndarray:
    dtype = np.dtype(buffer.dtype)
    return raw[: buffer.nbytes].view(dtype).reshape(buffer.shape)


def _moved(array: np.ndarray, buffer: Buffer, margin: int = 0) -> np.ndarray:
    """A copy of an array at an aligned address."""
    moved = _view(_aligned(buffer.nbytes, margin), buffer)
    moved[...] = array
    return moved


def _delivered(output: np.ndarray, destination: Destination | None) -> Any:
    """What the caller gets for an output."""
    if destination is None:
        return output
    np.copyto(destination.array, output)
    return destination.given


class _Workspace:
    """What one call in flight writes besides its outputs, and in checked runs all that it touches.

    Attributes
    ----------
    kept : dict of int to array
        Constants, the counters of grid barriers, and the record of a wait that is over: calls in flight must not count
        in each other's.
    scratch : array of bytes
        What the buffers of the workspace lie in.
    memory : CheckedMemory or None
    """

    def __init__(
        self, plan: Plan, constants: dict[int, np.ndarray], memory: CheckedMemory | None, margin: int
    ) -> None:
        self.memory = memory
        self.scratch = _aligned(0 if memory else plan.workspace_bytes, margin)
        self.kept = dict(constants)
        for index, buffer in enumerate(plan.buffers):
            if buffer.kind in ("state", "record"):
                fresh = None if memory else _view(_aligned(buffer.nbytes, margin), buffer)
                self.kept[index] = memory.arrays[index] if memory else fresh
                self.kept[index][...] = 0
            elif memory and buffer.kind == "constant":
                memory.arrays[index][...] = plan.constants[buffer.name]


class CpuRunner:
    """A plan made ready for the CPU device.

    Any number of threads may run it at the same time: each call has a workspace of its own, which is kept for later
    ones.

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
    base
        A plan whose texts are compiled once, where this is one of many that differ from it in few functions.
    shared
        Where the constants of other networks are, too; with `checked`, each workspace has its own.
    margin
        Bytes before and after each tensor, and the workspace, that are all ones: what a kernel finds that leaves a
        tensor by no more is the same in every process.
    workers
        OS threads that run blocks, see :meth:`souffle.emulator.CpuModule.launch`; with one, any run can be repeated.
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
        base: Plan | None = None,
        shared: SharedConstants | None = None,
        margin: int = 0,
        workers: int | None = None,
    ) -> None:
        self._plan, self._margin, self._workers = plan, margin, workers
        self._order, self._seed = order, seed
        self.grids = tuple(max(1, min(kernel.tiles, blocks)) for kernel in plan.kernels)
        bases = [None] * len(plan.modules) if base is None else [module.text for module in base.modules]
        self._modules = tuple(
            compile_text(module.text, cache_dir=cache_dir, checked=checked, base=text)
            for module, text in zip(plan.modules, bases, strict=True)
        )
        self._checked = checked and bool(self._modules)
        self.reports: tuple[LaunchReport, ...] = ()
        self._idle: list[_Workspace] = []
        self._constants: dict[int, np.ndarray] = {}
        shared = shared or SharedConstants()
        for index, buffer in enumerate(plan.buffers):
            if buffer.kind == "constant" and not self._checked:
                array = plan.constants[buffer.name]
                place = partial(_moved, array, buffer, margin)
                self._constants[index] = shared.placed("cpu", array, buffer.shape, place)

    def reordered(self, *, seed: int, blocks: int) -> CpuRunner:
        """The same in a random order of threads, with another largest grid; nothing is compiled again."""
        other = copy.copy(self)
        other._order, other._seed = "shuffled", seed
        other.grids = tuple(max(1, min(kernel.tiles, blocks)) for kernel in self._plan.kernels)
        return other

    def _workspace(self) -> _Workspace:
        memory = self._checked_memory() if self._checked else None
        return _Workspace(self._plan, self._constants, memory, self._margin)

    def _checked_memory(self) -> CheckedMemory:
        plan = self._plan
        buffers = [
            CheckedBuffer(
                buffer.label,
                buffer.shape,
                buffer.dtype,
                writable=buffer.kind in ("output", "workspace", "state", "record"),
                initialized=buffer.kind in ("input", "constant", "state", "record"),
                offset=buffer.offset if buffer.kind == "workspace" else None,
            )
            for buffer in plan.buffers
        ]
        return self._modules[0].memory(buffers, plan.workspace_bytes)

    def _arrays(self, workspace: _Workspace, inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
        plan = self._plan
        given = iter(inputs)
        if workspace.memory:
            workspace.memory.begin()
            arrays = list(workspace.memory.arrays)
            for array, buffer in zip(arrays, plan.buffers, strict=True):
                if buffer.kind == "input":
                    array[...] = next(given)
            return arrays
        workspace.scratch[:] = 0xFF
        arrays = []
        for index, buffer in enumerate(plan.buffers):
            if buffer.kind == "input":
                array = next(given)
                if self._margin or array.ctypes.data % ALIGNMENT:
                    array = _moved(array, buffer, self._margin)
            elif index in workspace.kept:
                array = workspace.kept[index]
            elif buffer.kind == "workspace":
                array = _view(workspace.scratch[buffer.offset :], buffer)
            else:
                array = _view(_aligned(buffer.nbytes, self._margin), buffer)
            arrays.append(array)
        return arrays

    def run(self, inputs: Sequence[np.ndarray], wanted: Sequence[Destination | None] = ()) -> tuple[Any, ...]:
        """Run all launches in order: checked inputs in, fresh outputs out, or their content in the destinations."""
        try:
            workspace = self._idle.pop()
        except IndexError:
            workspace = self._workspace()
        outputs = self._run(workspace, inputs)
        # Not reached where a launch was stopped: it may have left some of its blocks' arrivals at a barrier.
        self._idle.append(workspace)
        if not wanted:
            return outputs
        return tuple(map(_delivered, outputs, wanted))

    def _timeout(self, arrays: Sequence[np.ndarray]) -> KernelTimeoutError | None:
        """The error of a wait that was over in this run."""
        buffers = self._plan.buffers
        records = [array for array, buffer in zip(arrays, buffers, strict=True) if buffer.kind == "record"]
        return next(filter(None, (timeout_error(self._plan, record) for record in records)), None)

    def _run(self, workspace: _Workspace, inputs: Sequence[np.ndarray]) -> tuple[np.ndarray, ...]:
        plan = self._plan
        arrays = self._arrays(workspace, inputs)
        reports: list[LaunchReport] = []
        for launch in plan.launches:
            kernel, grid = plan.kernels[launch.kernel], self.grids[launch.kernel]
            try:
                report = self._modules[kernel.module].launch(
                    kernel.name,
                    grid=(grid, 1, 1),
                    block=(kernel.threads, 1, 1),
                    args=[*(arrays[index] for index in launch.buffers), np.int32(grid)],
                    shared_bytes=kernel.dynamic_shared_bytes,
                    cooperative=kernel.cooperative,
                    order=self._order,
                    seed=self._seed,
                    workers=self._workers,
                    memory=workspace.memory,
                )
            except CheckError as found:
                over = self._timeout(arrays)
                raise found if over is None or found.stopped else CheckError(found.report, str(over)) from over
            over = self._timeout(arrays)
            if over is not None:
                raise over
            reports.append(report)
        self.reports = tuple(reports)
        outputs = [array for array, buffer in zip(arrays, plan.buffers, strict=True) if buffer.kind == "output"]
        return tuple(array.copy() if workspace.memory else array for array in outputs)
