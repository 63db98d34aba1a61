"""Rule for single reductions with what feeds and follows them: sums, global pooling, GEMV with few rows."""

from __future__ import annotations

from dataclasses import dataclass

from souffle.decision import Refused
from souffle.schedule.gpu.forms.rows import Rows, read_rows
from souffle.schedule.gpu.forms.stage_forms import StageForms
from souffle.schedule.gpu.rule import GpuRequest, Rule, Sketch
from souffle.schedule.gpu.rules.rowwise import rows_sketch
from souffle.schedule.gpu.rules.window import direct_sketch
from souffle.schedule.gpu.tiling.direct_tiling import SumPlan, read_plan

__all__ = ["REDUCTION"]


@dataclass(frozen=True, eq=False)
class _Reductions:
    """Reductions that do not depend on each other, and the plan of the only one."""

    rows: Rows
    plan: SumPlan | Refused


def _read(stage: StageForms) -> _Reductions | Refused:
    rows = stage.read(read_rows)
    if isinstance(rows, Refused):
        return rows
    if not rows.reductions:
        return Refused("no block reduces")
    for chain in rows.chains:
        if chain.broken:
            return Refused(chain.broken[0])
        reductions = [view.name for view in chain.blocks if view.reduction]
        if len(reductions) > 1:
            return Refused(f"blocks {reductions[0]} and {reductions[1]} both reduce")
    return _Reductions(rows, stage.read(read_plan))


def _apply(form: _Reductions, request: GpuRequest) -> Sketch:
    """Reductions of which no other block needs more than the element that it computes from.

    Every output element is a row. Threads lie along whichever is contiguous in the largest input: the reduced axis,
    which they then share by a cross-thread reduction, or the outputs, where they share the reduction only if there
    are too few outputs for the device. One reduction alone is computed as ``direct_tiling.py`` says, in wide reads;
    several that are independent, or one of several totals, by rows.
    """
    if isinstance(form.plan, Refused):
        return rows_sketch(form.rows, request, REDUCTION.name)
    return direct_sketch(form.plan, request, REDUCTION.name)


REDUCTION = Rule("reduction", _read, _apply)
