"""GPU schedules of stages, by rules tried in order.

A rule answers with a schedule or says why it does not apply; the first schedule wins. The rules go from the most to
the least particular, and the last one takes everything that can run without a grid barrier inside.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from tvm import s_tir, tirx

from souffle.decision import Refused
from souffle.schedule.gpu.forms.blocks import ScheduleError, check_schedule, is_reduction, product
from souffle.schedule.gpu.rule import GpuRequest, GpuSchedule
from souffle.schedule.gpu.rules.contraction import contraction
from souffle.schedule.gpu.rules.elementwise import elementwise
from souffle.schedule.gpu.rules.fallback import fallback
from souffle.schedule.gpu.rules.mma_contraction import mma_contraction
from souffle.schedule.gpu.rules.reduction import reduction
from souffle.schedule.gpu.rules.rowwise import rowwise
from souffle.schedule.gpu.rules.tensor_core_contraction import tensor_core_contraction
from souffle.schedule.gpu.rules.window import window
from souffle.schedule.gpu.sketch import Knob, Sketch
from souffle.tvm_compat import collect, const_int

__all__ = [
    "RULES",
    "GpuRequest",
    "GpuSchedule",
    "Knob",
    "Rule",
    "ScheduleError",
    "Sketch",
    "answers",
    "check_schedule",
    "schedule_gpu",
]

_MOST_POINTS = 2**31 - 1
"""Of a loop, and of the loops of a tensor, which rules join."""

Rule = Callable[[tirx.PrimFunc, GpuRequest], Sketch | Refused]

RULES: tuple[tuple[str, Rule], ...] = (
    ("mma_contraction", mma_contraction),
    ("tensor_core_contraction", tensor_core_contraction),
    ("window", window),
    ("contraction", contraction),
    ("rowwise", rowwise),
    ("reduction", reduction),
    ("elementwise", elementwise),
    ("fallback", fallback),
)
"""The rules by name, in the order they are tried."""


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
    """What each rule says of a stage, in their order, each worked out when it is asked for; refusals name the rule."""
    longest = max((_points(block) for block in collect(func.body, s_tir.SBlock)), default=1)
    if longest > _MOST_POINTS:
        why = f"a tensor of {longest} elements is made, and threads count up to {_MOST_POINTS}; make it in parts"
        yield Refused(f"any rule: {why}")
        return
    for name, rule in RULES:
        try:
            answer = rule(func, request)
            answer = answer.chosen() if isinstance(answer, Sketch) else answer
        except s_tir.ScheduleError as error:
            answer = Refused(f"a scheduling step does not apply: {str(error).strip().splitlines()[0]}")
        yield Refused(f"{name}: {answer.reason}") if isinstance(answer, Refused) else answer


def _points(block: s_tir.SBlock) -> int:
    """How many elements a block computes."""
    return product(const_int(axis.dom.extent) for axis in block.iter_vars if not is_reduction(axis))
