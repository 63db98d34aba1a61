"""Runs kernels with a clock on a GPU: every launch of a network in order, and what its blocks wrote down."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from souffle.codegen.plan import Plan
from souffle.runtime.cuda import Cuda, PreparedLaunch
from souffle.runtime.cuda_workspace import CudaCode
from souffle.runtime.stamps import Twin

__all__ = ["StampedRun", "stamped_run"]


@contextlib.contextmanager
def stamped_run(plan: Plan, twin: Twin, inputs: Mapping[str, np.ndarray], cuda: Cuda) -> Iterator[StampedRun]:
    """A network made ready with its twin's kernels, on memory of its own.

    Parameters
    ----------
    plan : Plan
    twin : Twin
        Of the plan's modules, in their order.
    inputs : mapping of str to array
        By the model's names.
    cuda : Cuda
    """
    modules = tuple(replace(module, cubin=cubin) for module, cubin in zip(plan.modules, twin.cubins, strict=True))
    with cuda.current():
        code = CudaCode(replace(plan, modules=modules), cuda)
        owned: list[int] = []
        stream = cuda.stream()
        try:
            yield StampedRun(code, stream, *_prepared(code, twin, inputs, owned, stream))
        finally:
            cuda.settle(stream)
            for address in owned:
                cuda.free(address)
            cuda.destroy_stream(stream)


class StampedRun:
    """What can be run again and again.

    Attributes
    ----------
    grids : tuple of int
        Blocks of each kernel of the plan.
    """

    def __init__(
        self,
        code: CudaCode,
        stream: Any,
        launches: Sequence[PreparedLaunch],
        stamps: Sequence[tuple[int, np.ndarray]],
    ) -> None:
        self._cuda, self._stream, self._launches, self._stamps = code.cuda, stream, launches, stamps
        self.grids = tuple(code.grids)

    def run(self) -> tuple[float, list[np.ndarray]]:
        """Run once.

        Returns
        -------
        tuple
            Microseconds between events, and for each launch its stamps, of shape (labels + 1, blocks).
        """
        cuda, stream = self._cuda, self._stream
        begin, end = cuda.event(timing=True), cuda.event(timing=True)
        try:
            cuda.record(begin, stream)
            for launch in self._launches:
                cuda.launch(launch, stream)
            cuda.record(end, stream)
            for address, array in self._stamps:
                cuda.to_host(array, address, stream)
            cuda.synchronize(stream, "kernels with clocks")
            # The host's arrays are written again by the next run.
            return cuda.microseconds(begin, end), [array.astype(np.int64) for _, array in self._stamps]
        finally:
            cuda.destroy_event(begin)
            cuda.destroy_event(end)


def _prepared(
    code: CudaCode, twin: Twin, inputs: Mapping[str, np.ndarray], owned: list[int], stream: Any
) -> tuple[list[PreparedLaunch], list[tuple[int, np.ndarray]]]:
    """The launches, and of each where its stamps go on the device and on the host."""
    cuda, plan = code.cuda, code.plan

    def zeros(nbytes: int) -> int:
        owned.append(cuda.alloc(nbytes))
        cuda.fill(owned[-1], 0, nbytes, stream)
        return owned[-1]

    scratch = zeros(plan.workspace_bytes)
    addresses, arrays = [], []
    for number, buffer in enumerate(plan.buffers):
        if buffer.kind == "constant":
            addresses.append(code.constants[number])
        elif buffer.kind == "workspace":
            addresses.append(scratch + buffer.offset)
        else:
            addresses.append(zeros(buffer.nbytes))
        if buffer.kind == "input":
            arrays.append(np.ascontiguousarray(inputs[buffer.label], buffer.dtype))
            cuda.to_device(addresses[-1], arrays[-1], stream)
    cuda.synchronize(stream, "inputs")
    launches, stamps = [], []
    for launch in plan.launches:
        labels, grid = twin.labels[plan.kernels[launch.kernel].name], code.grids[launch.kernel]
        array = np.zeros((len(labels) + 1, grid), np.uint64)
        stamps.append((zeros(array.nbytes), array))
        pointers = [*(addresses[number] for number in launch.buffers), stamps[-1][0]]
        launches.append(code.prepare(launch.kernel, pointers))
    return launches, stamps
