"""GPU schedules of stages, by rules in the order of preference (``registry.py``).

The scheduler (``scheduler.py``) lowers what the preferred rule makes, and takes another rule's where the cost model
predicts that it takes less time. Without a cost model the order decides.
"""

from __future__ import annotations

from tvm import tirx

from souffle.decision import Refused
from souffle.schedule.gpu.forms.stage_forms import StageForms
from souffle.schedule.gpu.offers import Offers
from souffle.schedule.gpu.registry import RULES, register_rule, sketch_of
from souffle.schedule.gpu.rule import GpuRequest, GpuSchedule, Knob, Rule, Sketch
from souffle.schedule.gpu.schedule_check import ScheduleError, check_schedule

__all__ = [
    "RULES",
    "GpuRequest",
    "GpuSchedule",
    "Knob",
    "Offers",
    "Rule",
    "ScheduleError",
    "Sketch",
    "StageForms",
    "check_schedule",
    "register_rule",
    "schedule_gpu",
    "sketch_of",
]


def schedule_gpu(func: tirx.PrimFunc, request: GpuRequest) -> tuple[GpuSchedule | None, tuple[Refused, ...]]:
    """Schedule one stage by the rules' order alone, whether it can be lowered or not.

    Parameters
    ----------
    func : tirx.PrimFunc
        A small group of TEs, as ``te.create_prim_func`` gives it.
    request : GpuRequest

    Returns
    -------
    schedule : GpuSchedule or None
        The first rule's that applies; ``None`` if the stage needs a barrier across the grid between two of its
        blocks, which the last refusal names. Such a stage has to be split there.
    refusals : tuple of Refused
        Of the rules tried before, in order, each with the name of its rule.
    """
    offers = Offers(func, request)
    refusals: list[Refused] = []
    for rule in offers.preferred():
        answer = offers.schedule(rule)
        if isinstance(answer, GpuSchedule):
            return answer, tuple(refusals)
        refusals.append(answer)
    return None, tuple(refusals)
