"""Rule for chains of reductions over shared rows: softmax, layer and instance normalization, variance with epilogue."""

from __future__ import annotations

from tvm import ir, s_tir, tirx

from souffle.schedule.gpu.common import (
    BlockView,
    block_views,
    expression_cost,
    finish,
    inlining_refusal,
    intermediates,
    open_schedule,
    same_buffer,
)
from souffle.schedule.gpu.layout import choose_layout
from souffle.schedule.gpu.rows import Stage, build, open_stage
from souffle.schedule.gpu.rule import GpuRequest, GpuSchedule, Refusal
from souffle.schedule.gpu.sketch import Sketch

__all__ = ["rowwise", "schedule_rows"]

WORTH_KEEPING = 8
"""Cost of an expression, as `expression_cost` counts, from which it is kept on chip for its readers: one function."""

STARVED_WORK = 1 << 16
"""Work of a row from which it matters that most multiprocessors have none."""

STARVED_SHARE = 8
"""A stage starves the device if fewer than one in so many multiprocessors have a tile."""


def rowwise(func: tirx.PrimFunc, request: GpuRequest) -> Sketch | Refusal:
    """Schedule blocks that share rows, each tile holding whole rows and what is kept of them in shared memory.

    Parameters
    ----------
    func : tirx.PrimFunc
    request : GpuRequest

    Returns
    -------
    Sketch or Refusal
        Refused are stages without a chain (no reduction, or single ones), rows that do not fit on chip, and few rows of
        much work, which as separate stages would occupy more of the device.
    """
    reason = inlining_refusal(func)
    if reason is not None:
        return Refusal("rowwise", reason)
    stage = open_stage(func)
    if all(_single(stage, index) for index in range(len(stage.chains))):
        return Refusal("rowwise", "no block reads a whole row that another block reduces")
    for chain in stage.chains:
        if chain.row_count * STARVED_SHARE <= request.sm_count and chain.work >= STARVED_WORK:
            why = chain.broken[0] if chain.broken else f"{chain.row_count} row(s) of {chain.work} evaluations"
            return Refusal("rowwise", f"would leave most of {request.sm_count} multiprocessors idle: {why}")
    return Sketch.settled("rowwise", lambda: _scheduled(func, request))


def _scheduled(func: tirx.PrimFunc, request: GpuRequest) -> GpuSchedule | Refusal:
    kept = _worth_keeping(func)
    result = schedule_rows(func, request, "rowwise", kept) if kept else None
    if isinstance(result, GpuSchedule):
        return result
    return schedule_rows(func, request, "rowwise")


def schedule_rows(
    func: tirx.PrimFunc, request: GpuRequest, rule: str, keep: frozenset[str] = frozenset()
) -> GpuSchedule | Refusal:
    """Schedule a stage by rows, keeping the injective blocks named in `keep` on chip.

    A reduction that TVM cannot divide among threads (its combiner is none that it knows) is left to one thread a row.
    """
    reason = "no layout"
    for cross in (True, False):
        stage = open_stage(func, keep)
        layout = choose_layout(stage, request, cross)
        if isinstance(layout, str):
            reason = layout
            continue
        if keep and layout.inner == 1:
            return Refusal(rule, "a thread that works on whole rows keeps no intermediates")
        build(stage, layout)
        if layout.inner == 1 or _reduces_across_threads(stage):
            return finish(stage.sch, request, rule, layout.tiles, layout.rows * layout.inner)
        reason = "the combiner of its reduction is none that threads can share"
    return Refusal(rule, reason)


def _reduces_across_threads(stage: Stage) -> bool:
    """Whether TVM can lower the cross-thread reductions of the built stage."""
    try:
        s_tir.transform.LowerCrossThreadReduction()(stage.sch.mod)
    except ValueError:
        return False
    return True


def _single(stage: Stage, index: int) -> bool:
    """Whether a chain is one reduction whose readers take its elements in place."""
    chain = stage.chains[index]
    reductions = [view for view in chain.blocks if view.reduction]
    return len(reductions) == 1 and all(chain.columns(i) == 1 for i in range(len(chain.blocks)))


def _worth_keeping(func: tirx.PrimFunc) -> frozenset[str]:
    """Injective blocks that several blocks read and that cost more to compute again than to keep."""
    sch = open_schedule(func)
    views = block_views(sch)
    private = intermediates(sch)

    def readers(buffer: ir.Var) -> list[BlockView]:
        return [view for view in views if view.reads_from(buffer)]

    return frozenset(
        view.name
        for view in views
        if not view.reduction
        and all(any(same_buffer(access.buffer, buffer) for buffer in private) for access in view.writes)
        and len(readers(view.writes[0].buffer)) > 1
        and expression_cost(view.node) >= WORTH_KEEPING
    )
