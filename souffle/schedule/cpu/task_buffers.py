"""Buffers of nests that share loops, in which a task of these loops finds nothing but what it wrote: of its size alone.

A row of a softmax, or a padded channel of a depthwise convolution, is written and read by one task. In a buffer of all
rows, each task would have another place, cold in the caches, and the allocation of all of it would be inside the loop.

TVM allocates a buffer in the innermost loop that has all that use it. So these must be used in one loop alone: whatever
is allocated around a parallel loop is one for all of its tasks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from tvm import DataType, tirx

from souffle.schedule.cpu.nest import Nest, distinct, product, shape_of
from souffle.tvm_compat import PrimExpr, dtype_of

__all__ = ["TaskBuffers"]


@dataclass(frozen=True, eq=False)
class TaskBuffers:
    """What stands for the buffers that only one task uses.

    Attributes
    ----------
    depth : int
        How many leading loops the nests share. Each element is written and read at the position of these.
    table : tuple of (Buffer, Buffer)
        A buffer, and the one of a task.
    """

    depth: int
    table: tuple[tuple[Any, Any], ...]

    @classmethod
    def of(cls, group: Sequence[Nest], depth: int, outside: Iterable[Any], *, last: int = 1) -> TaskBuffers:
        """The buffers that nests write, but for those that are used outside of their loops.

        Parameters
        ----------
        group : sequence of Nest
            Which may share `depth` leading loops: each reads what another of them wrote at their own position.
        depth : int
        outside : iterable of Buffer
        last : int
            How many positions of the last shared loop a task has.
        """
        kept = list(outside)
        extents = (1,) * (depth - 1) + (last,)
        return cls(
            depth,
            tuple(
                (buffer, tirx.decl_buffer((*extents, *shape_of(buffer)[depth:]), str(buffer.dtype), buffer.name))
                for buffer in distinct(buffer for nest in group for buffer in nest.writes)
                if not any(buffer.same_as(other) for other in kept)
            ),
        )

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers of a task."""
        return sum(product(shape_of(new)) * DataType(str(new.dtype)).itemsize for _, new in self.table)

    def inside(self, nest: Nest, position: PrimExpr | None = None) -> Nest:
        """A nest of a task on the task's buffers.

        Parameters
        ----------
        nest : Nest
            With the shared loops bound, but for the last one where a task has several positions of it.
        position : expression, optional
            Of the last shared loop, in the task; None where a task has one.
        """
        if not self.table:
            return nest

        def moved(buffer: Any, indices: list[PrimExpr]) -> tuple[Any, list[PrimExpr]] | None:
            new = next((new for old, new in self.table if old.same_as(buffer)), None)
            if new is None:
                return None
            zeros = [tirx.const(0, dtype_of(index)) for index in indices[: self.depth]]
            return new, [*zeros[:-1], zeros[-1] if position is None else position, *indices[self.depth :]]

        return nest.on_buffers(moved)
