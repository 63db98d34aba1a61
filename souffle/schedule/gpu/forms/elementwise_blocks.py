"""A stage without reductions: what is computed again in place, and what stays in registers."""

from __future__ import annotations

from dataclasses import dataclass

from tvm import s_tir, tirx

from souffle.decision import Refused
from souffle.schedule.gpu.forms.blocks import (
    BlockAccess,
    BlockView,
    block_views,
    detach_outputs,
    inline_injective,
    intermediates,
    open_schedule,
    same_buffer,
)
from souffle.schedule.gpu.forms.stage_forms import StageForms

__all__ = ["ElementwiseBlocks", "read_elementwise"]


@dataclass(frozen=True, eq=False)
class ElementwiseBlocks:
    """Blocks of which none reduces, those that are read in place inlined.

    Attributes
    ----------
    func : PrimFunc
        The stage.
    blocks : tuple of BlockView
        Producers before consumers.
    """

    func: tirx.PrimFunc
    blocks: tuple[BlockView, ...]

    def opened(self) -> s_tir.Schedule:
        """A schedule to build on, of these blocks."""
        return _with_registers(self.func)


def read_elementwise(stage: StageForms) -> ElementwiseBlocks | Refused:
    """The blocks of a stage without reductions; a refusal names the first reduction."""
    for view in block_views(open_schedule(stage.func)):
        if view.reduction:
            return Refused(f"block {view.name} reduces over {view.reduction_size} elements")
    return ElementwiseBlocks(stage.func, tuple(block_views(_with_registers(stage.func))))


def _with_registers(func: tirx.PrimFunc) -> s_tir.Schedule:
    """`func` with its intermediates inlined or, if read repeatedly in place, left in local memory."""
    keep = _read_repeatedly(func)
    while True:
        sch = open_schedule(func)
        detach_outputs(sch)
        inline_injective(sch, keep)
        private = intermediates(sch)
        views = block_views(sch)
        moved = {
            producer.name
            for view in views
            for access in view.reads
            for producer in views
            if producer.writes_to(access.buffer) and not _in_place(view, producer, access)
        }
        if not moved:
            break
        keep -= moved
    for view in views:
        if any(view.writes_to(buffer) for buffer in private):
            sch.set_scope(view.rv, 0, "local")
    return sch


def _read_repeatedly(func: tirx.PrimFunc) -> frozenset[str]:
    """Blocks whose output stays in the stage and is read in several places."""
    sch = open_schedule(func)
    detach_outputs(sch)
    views = block_views(sch)
    private = intermediates(sch)
    return frozenset(
        producer.name
        for producer in views
        for written in producer.writes
        if any(same_buffer(written.buffer, buffer) for buffer in private)
        and sum(same_buffer(read.buffer, written.buffer) for view in views for read in view.reads) > 1
    )


def _in_place(consumer: BlockView, producer: BlockView, read: BlockAccess) -> bool:
    """Whether `consumer` reads, for each of its elements, the same element of `producer`."""
    return consumer.spatial_shape == producer.spatial_shape and all(
        axis.var.same_as(index) or extent == 1
        for axis, index, extent in zip(consumer.spatial, read.indices, read.shape, strict=len(read.shape) > 0)
    )
