"""How the operands of tensor-core kernels come to shared memory, and what that takes of a block."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil

from souffle.decision import Refused
from souffle.schedule.gpu.emit.async_copy import AsyncCopy, async_copy
from souffle.schedule.gpu.emit.mma_fragments import HALVES, Fragments
from souffle.schedule.gpu.emit.staging import TileFetch, choose_fetch
from souffle.schedule.gpu.forms.finished_operand import FinishedOperand, finished_operand
from souffle.schedule.gpu.forms.matrix_product import Contraction
from souffle.schedule.gpu.forms.memory_access import bits_of
from souffle.schedule.gpu.rule import GpuRequest
from souffle.schedule.gpu.tiling.mma_figures import COPY_BYTES, SHARED_BYTES

__all__ = ["OperandSource", "operand_source"]


@dataclass(frozen=True, eq=False)
class OperandSource:
    """How one operand comes in tiles.

    Attributes
    ----------
    fetch : TileFetch
    copy : AsyncCopy or Refused
        The asynchronous copies, or why the operand passes through registers.
    finished : FinishedOperand, optional
        What is made of what was copied, where fragments are taken.
    """

    fetch: TileFetch
    copy: AsyncCopy | Refused
    finished: FinishedOperand | None = None

    @property
    def asynchronous(self) -> bool:
        """Whether it comes by asynchronous copies."""
        return isinstance(self.copy, AsyncCopy)

    def rolled(self) -> OperandSource:
        """With many copies of a thread in a loop."""
        return replace(self, copy=replace(self.copy, rolled=True)) if isinstance(self.copy, AsyncCopy) else self

    def buffers(self, stages: int) -> int:
        """Tiles in shared memory. What passes through registers is at most one step ahead."""
        return stages if self.asynchronous else min(stages, 2)

    def elements(self, extent: int, step: int) -> int:
        """Elements of shared memory of a tile of so many own and inner ones."""
        padding = self.fetch.padding
        return (step + padding) * extent if self.fetch.inner_last else step * (extent + padding)

    def registers(self, extent: int, step: int, threads: int) -> int:
        """Registers of a thread for a tile on its way.

        It takes as many as it is long, an element that is read alone a whole one, and each read two more for its
        address and condition: its loop is unrolled.
        """
        if self.asynchronous:
            return 0
        turns = ceil(extent * step / self.fetch.lanes / threads)
        return turns * (2 + ceil(self.fetch.lanes * bits_of(self.fetch.operand.dtype) / 32))

    def instructions(self, elements: int) -> float:
        """Of all threads to bring so many elements: 4 for each copy, 8 for each vector through registers."""
        return elements / self.fetch.lanes * (4.0 if self.asynchronous else 8.0 + 2.0 * self.fetch.lanes)

    def put_clocks(self, nbytes: float) -> float:
        """Clocks of the path to shared memory until so many bytes are there."""
        return nbytes / (COPY_BYTES if self.asynchronous else SHARED_BYTES)

    def finishing(self, fragments: int) -> float:
        """Instructions of a thread to finish its parts of so many fragments: a multiply-add for each register."""
        return 0.0 if self.finished is None else 4.0 * fragments

    def factor_bytes(self, fragments: int) -> int:
        """Of shared memory that a thread takes in a step: scale and shift in fp16 of two rows of each fragment."""
        return 0 if self.finished is None else 8 * fragments

    def row_registers(self, fragments: int) -> int:
        """Registers of a thread for scale and shift of its rows in so many fragments, alone and on their way."""
        return 0 if self.finished is None else 2 * fragments + 4


def operand_source(
    problem: Contraction, side: str, tile: tuple[int, int, int], request: GpuRequest, fragments: Fragments = HALVES
) -> OperandSource:
    """How an operand comes, ``"left"`` or ``"right"``, in tiles of so many batch, own and inner elements."""

    def fetched(contraction: Contraction, *, wide: bool = False) -> TileFetch:
        fetch = choose_fetch(contraction, side, tile, request.threads, None, lambda _: 0, wide=wide)
        return replace(fetch, padding=fragments.padding(inner_last=fetch.inner_last))

    def copied(contraction: Contraction) -> AsyncCopy | Refused:
        copy = async_copy(fetched(contraction), request.arch)
        unit = fragments.unit(inner_last=copy.fetch.inner_last) if isinstance(copy, AsyncCopy) else 0
        return replace(copy, fetch=replace(copy.fetch, padding=0, unit=unit)) if unit else copy

    copy = copied(problem)
    if isinstance(copy, AsyncCopy):
        return OperandSource(copy.fetch, copy)
    finished = finished_operand(problem) if side == "left" else None
    if isinstance(finished, FinishedOperand):
        own = copied(replace(problem, left=finished.plain))
        if isinstance(own, AsyncCopy) and not own.conditions:
            return OperandSource(own.fetch, own, finished)
    return OperandSource(fetched(problem, wide=True), copy)
