"""The rule for sums of which one element of what follows needs several: a thread has all of them in registers.

The gates of a recurrent cell are such sums, computed side by side with the cell (``placement/interleaving.py``).
Numbers are chosen, and the kernel is written, as for one sum of a thread (``tiling/direct_tiling.py``).
"""

from __future__ import annotations

from souffle.decision import Refused
from souffle.schedule.gpu.forms.stage_forms import StageForms
from souffle.schedule.gpu.rule import GpuRequest, Rule, Sketch
from souffle.schedule.gpu.rules.window import direct_sketch
from souffle.schedule.gpu.tiling.direct_tiling import SumPlan, read_plan

__all__ = ["INTERLEAVED_SUMS"]


def _read(stage: StageForms) -> SumPlan | Refused:
    plan = stage.read(read_plan)
    if isinstance(plan, SumPlan) and not plan.problem.slots:
        return plan.problem.refused("what follows it reads one element of it for one of its own")
    return plan


def _apply(plan: SumPlan, request: GpuRequest) -> Sketch | Refused:
    """Sums that what follows them reads several of at a time, at given places."""
    return direct_sketch(plan, request, INTERLEAVED_SUMS.name)


INTERLEAVED_SUMS = Rule("interleaved_sums", _read, _apply)
