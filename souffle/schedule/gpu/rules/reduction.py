"""Rule for single reductions with what feeds and follows them: sums, global pooling, GEMV with few rows."""

from __future__ import annotations

from tvm import tirx

from souffle.decision import Refused
from souffle.schedule.gpu.forms.blocks import inlining_refusal
from souffle.schedule.gpu.forms.rows import open_stage
from souffle.schedule.gpu.rule import GpuRequest
from souffle.schedule.gpu.rules.rowwise import rows_sketch
from souffle.schedule.gpu.rules.window import direct_sketch
from souffle.schedule.gpu.sketch import Sketch

__all__ = ["reduction"]


def reduction(func: tirx.PrimFunc, request: GpuRequest) -> Sketch | Refused:
    """Schedule reductions of which no other block needs more than the element that it computes from.

    Every output element is a row. Threads lie along whichever is contiguous in the largest input: the reduced axis,
    which they then share by a cross-thread reduction, or the outputs, where they share the reduction only if there
    are too few outputs for the device. One reduction alone is computed as ``direct_tiling.py`` says, in wide reads;
    several that are independent, or one of several totals, by rows.

    Parameters
    ----------
    func : tirx.PrimFunc
    request : GpuRequest

    Returns
    -------
    Sketch or Refused
        Refused are stages without a reduction, and chains, naming the two blocks.
    """
    reason = inlining_refusal(func)
    if reason is not None:
        return Refused(reason)
    stage = open_stage(func)
    if not stage.reductions:
        return Refused("no block reduces")
    for chain in stage.chains:
        if chain.broken:
            return Refused(chain.broken[0])
        reductions = [view.name for view in chain.blocks if view.reduction]
        if len(reductions) > 1:
            return Refused(f"blocks {reductions[0]} and {reductions[1]} both reduce")
    direct = direct_sketch(func, request, "reduction")
    if isinstance(direct, Sketch):
        return direct
    return rows_sketch(func, request, "reduction")
