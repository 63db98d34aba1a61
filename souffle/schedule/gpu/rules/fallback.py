"""The last rule: one thread computes one output element at a time, reductions serial."""

from __future__ import annotations

from souffle.decision import Refused
from souffle.schedule.gpu.forms.rows import Layout, Rows, build, private_bytes, read_rows
from souffle.schedule.gpu.rule import GpuRequest, GpuSchedule, Rule, Sketch
from souffle.schedule.gpu.tiling.row_tiling import MAX_PRIVATE_BYTES

__all__ = ["FALLBACK"]


def _apply(rows: Rows, request: GpuRequest) -> Sketch | Refused:
    """Any stage that can run without a grid barrier inside.

    A refusal names two blocks with a barrier between them. Stages without reductions, and single reductions whose
    readers take its elements in place, are never refused.
    """
    for chain in rows.chains:
        if chain.broken:
            return Refused(f"needs a grid-wide barrier: {chain.broken[0]}")
    if private_bytes(rows, 1, False) > MAX_PRIVATE_BYTES:
        producer = next(view for chain in rows.chains for i, view in enumerate(chain.blocks) if chain.columns(i) > 1)
        return Refused(f"needs a grid-wide barrier after {producer.name}: a thread cannot keep its rows")
    return Sketch.settled(FALLBACK.name, lambda: _scheduled(rows.opened(), request))


def _scheduled(rows: Rows, request: GpuRequest) -> GpuSchedule:
    count = max([chain.row_count for chain in rows.chains] + [view.size for view in rows.free])
    tiles = -(-count // request.threads)
    build(rows, Layout(tiles, request.threads, 1, True))
    return GpuSchedule(rows.sch.mod["main"], FALLBACK.name, tiles, request.threads)


FALLBACK = Rule("fallback", read_rows, _apply)
