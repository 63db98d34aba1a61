"""The last rule: one thread computes one output element at a time, reductions serial."""

from __future__ import annotations

from tvm import tirx

from souffle.decision import Refused
from souffle.schedule.gpu.forms.blocks import finish, inlining_refusal
from souffle.schedule.gpu.forms.rows import Layout, build, open_stage, private_bytes
from souffle.schedule.gpu.rule import GpuRequest, GpuSchedule
from souffle.schedule.gpu.sketch import Sketch
from souffle.schedule.gpu.tiling.row_tiling import MAX_PRIVATE_BYTES

__all__ = ["fallback"]


def fallback(func: tirx.PrimFunc, request: GpuRequest) -> Sketch | Refused:
    """Schedule any stage that can run without a grid barrier inside.

    Parameters
    ----------
    func : tirx.PrimFunc
    request : GpuRequest

    Returns
    -------
    Sketch or Refused
        A refusal names two blocks with a barrier between them. Stages without reductions, and single reductions
        whose readers take its elements in place, are never refused.
    """
    reason = inlining_refusal(func)
    if reason is not None:
        return Refused(reason)
    stage = open_stage(func)
    for chain in stage.chains:
        if chain.broken:
            return Refused(f"needs a grid-wide barrier: {chain.broken[0]}")
    if private_bytes(stage, 1, False) > MAX_PRIVATE_BYTES:
        producer = next(view for chain in stage.chains for i, view in enumerate(chain.blocks) if chain.columns(i) > 1)
        return Refused(f"needs a grid-wide barrier after {producer.name}: a thread cannot keep its rows")
    return Sketch.settled("fallback", lambda: _scheduled(func, request))


def _scheduled(func: tirx.PrimFunc, request: GpuRequest) -> GpuSchedule:
    stage = open_stage(func)
    rows = max([chain.row_count for chain in stage.chains] + [view.size for view in stage.free])
    tiles = -(-rows // request.threads)
    build(stage, Layout(tiles, request.threads, 1, True))
    return finish(stage.sch, request, "fallback", tiles, request.threads)
