"""How many blocks each kernel of a plan is launched with, and fewer where the device turns out to hold fewer."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from souffle.codegen.plan import Kernel
from souffle.errors import DeviceError
from souffle.runtime.cuda import Cuda, LaunchTooLargeError

__all__ = ["Grids", "resident_blocks"]

_LOG = logging.getLogger(__name__)


class Grids:
    """Blocks of each kernel's launches, the same for all calls of a network.

    A cooperative launch must fit on the device as a whole. How many blocks do, the driver says beforehand; but a
    debugger, compute-sanitizer or a share of the device (MPS) may leave less room, and then the launch is refused. Any
    grid of at least one block gives the same result: stages loop over their tiles, a kernel is told its number of
    blocks, and a counter of a grid barrier is at rest between launches of whatever grids, which a refused launch leaves
    so, since none of its blocks has started. So half of what was refused is tried, down to one block.

    Parameters
    ----------
    names : sequence of str
        Of the kernels.
    blocks : sequence of int
        With which they are launched first.
    """

    def __init__(self, names: Sequence[str], blocks: Sequence[int]) -> None:
        self._names, self._first, self._blocks = tuple(names), tuple(blocks), list(blocks)
        self._lock = threading.Lock()
        self._unsaid: dict[int, str] = {}

    def __getitem__(self, kernel: int) -> int:
        return self._blocks[kernel]

    def __iter__(self) -> Iterator[int]:
        return iter(tuple(self._blocks))

    def halve(self, refused: Mapping[int, int], error: LaunchTooLargeError) -> None:
        """Take smaller grids from now on.

        Parameters
        ----------
        refused : mapping of int to int
            Kernels, with the grids of which the device refused at least one. Where another call has met the same
            meanwhile, and a grid is smaller already, it is left at that.
        error : LaunchTooLargeError
            What the driver said. It is raised where no grid can be smaller: then it is not the size that is refused,
            and the grids are again what they were first.
        """
        with self._lock:
            if any(self._blocks[kernel] < blocks for kernel, blocks in refused.items()):
                return
            for kernel, blocks in refused.items():
                self._blocks[kernel] = max(1, blocks // 2)
                self._unsaid[kernel] = str(error)
            if all(blocks == 1 for blocks in refused.values()):
                for kernel in refused:
                    self._blocks[kernel] = self._first[kernel]
                    self._unsaid.pop(kernel)
                raise error

    def report(self) -> None:
        """Say which grids have become smaller since the last report; call it once the device has taken them."""
        if not self._unsaid:
            return
        with self._lock:
            unsaid, self._unsaid = self._unsaid, {}
        for kernel, why in unsaid.items():
            if self._blocks[kernel] < self._first[kernel]:
                _LOG.warning(
                    "kernel %s: the device refused a grid of %d though it had said that it fits, so that it is "
                    "launched with %d from now on; results are the same, and it may be slower; a debugger, "
                    "compute-sanitizer or other work on the device may take the room (%s)",
                    self._names[kernel],
                    self._first[kernel],
                    self._blocks[kernel],
                    why,
                )


def resident_blocks(cuda: Cuda, kernel: Kernel, function: Any) -> int:
    """How many blocks of a kernel that waits for its grid are on the device at once; DeviceError where none can be."""
    if not cuda.attribute("COOPERATIVE_LAUNCH"):
        raise DeviceError(
            f"kernel {kernel.name} waits for all of its blocks, and {cuda.label} has no cooperative launches, so that "
            'nothing says that they are there at once; compile with level="V2", whose kernels do not wait'
        )
    limit = cuda.resident_blocks(function, kernel.threads, kernel.dynamic_shared_bytes)
    if limit == 0:
        raise DeviceError(
            f"kernel {kernel.name} ({kernel.threads} threads, {cuda.registers(function)} registers, "
            f"{kernel.dynamic_shared_bytes} bytes of dynamic shared memory) does not fit on a multiprocessor of "
            f"{cuda.label}; compile for this device"
        )
    return limit
