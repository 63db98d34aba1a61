"""GPU schedules of stages, by rules tried in order: the first one that gives a schedule wins (``registry.py``)."""

from __future__ import annotations

from collections.abc import Iterator

from tvm import s_tir, tirx

from souffle.decision import Refused
from souffle.schedule.gpu.check import ScheduleError, check_schedule
from souffle.schedule.gpu.forms.blocks import is_reduction, product
from souffle.schedule.gpu.forms.stage_forms import StageForms
from souffle.schedule.gpu.registry import RULES, register_rule, sketch_of
from souffle.schedule.gpu.rule import GpuRequest, GpuSchedule, Knob, Rule, Sketch, does_not_apply
from souffle.tvm_compat import collect, const_int

__all__ = [
    "RULES",
    "GpuRequest",
    "GpuSchedule",
    "Knob",
    "Rule",
    "ScheduleError",
    "Sketch",
    "StageForms",
    "answers",
    "check_schedule",
    "register_rule",
    "schedule_gpu",
    "sketch_of",
]

_MOST_POINTS = 2**31 - 1
"""Of a loop, and of the loops of a tensor, which rules join."""


def schedule_gpu(func: tirx.PrimFunc, request: GpuRequest) -> tuple[GpuSchedule | None, tuple[Refused, ...]]:
    """Schedule one stage by the rules alone, whether it can be lowered or not.

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
    refusals: list[Refused] = []
    for answer in answers(func, request):
        if isinstance(answer, GpuSchedule):
            return answer, tuple(refusals)
        refusals.append(answer)
    return None, tuple(refusals)


def answers(func: tirx.PrimFunc, request: GpuRequest) -> Iterator[GpuSchedule | Refused]:
    """What each rule says of a stage, in their order, each worked out when it is asked for; refusals name the rule.

    Raises
    ------
    ScheduleError
        If a schedule breaks a rule of stages, which is a bug of the rule that made it.
    """
    longest = max((_points(block) for block in collect(func.body, s_tir.SBlock)), default=1)
    if longest > _MOST_POINTS:
        why = f"a tensor of {longest} elements is made, and threads count up to {_MOST_POINTS}; make it in parts"
        yield Refused(f"any rule: {why}")
        return
    stage = StageForms(func)
    for rule in RULES.values():
        answer = _chosen(rule, stage, request)
        if isinstance(answer, GpuSchedule):
            check_schedule(answer, request)
        yield Refused(f"{rule.name}: {answer.reason}") if isinstance(answer, Refused) else answer


def _chosen(rule: Rule, stage: StageForms, request: GpuRequest) -> GpuSchedule | Refused:
    """The schedule with the rule's own values."""
    sketch = rule.sketch(stage, request)
    try:
        return sketch if isinstance(sketch, Refused) else sketch.chosen()
    except s_tir.ScheduleError as error:
        return does_not_apply(error)


def _points(block: s_tir.SBlock) -> int:
    """How many elements a block computes."""
    return product(const_int(axis.dom.extent) for axis in block.iter_vars if not is_reduction(axis))
