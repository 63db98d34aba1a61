"""Rules whose threads hold a few outputs in registers: windows that overlap, and what `reduction` uses of them.

A window is what a convolution with few channels a group or a pooling reads for one output. Neighbouring outputs share
most of it, so a thread computes several and reads each input once (``direct_tiling.py``); between threads inputs are
shared by the L1 cache. Numbers are chosen by an estimate of what the units of a multiprocessor have to do.
"""

from __future__ import annotations

from dataclasses import replace
from math import inf

from souffle.decision import Refused
from souffle.schedule.gpu.emit.direct_emission import emit_direct
from souffle.schedule.gpu.rule import GpuRequest, GpuSchedule, Rule, Sketch, Values
from souffle.schedule.gpu.tiling.direct_cost import choose_tiling, knobs_of, least_clocks, tiling_of, tiling_refusal
from souffle.schedule.gpu.tiling.direct_tiling import SumPlan, read_plan

__all__ = ["WINDOW", "direct_sketch"]


def _apply(plan: SumPlan, request: GpuRequest) -> Sketch | Refused:
    """Convolutions with few channels a group, and poolings: sums over windows that neighbours share.

    Refused are stages that are not one reduction in this sense, and those whose outputs share no input.
    """
    if not any(plan.meetings):
        return plan.problem.refused("neighbouring outputs share no input")

    def clocks() -> float:
        timed = choose_tiling(plan, request)
        return inf if timed is None else timed[0]

    sketch = direct_sketch(plan, request, WINDOW.name)
    return replace(sketch, clocks=clocks, least=least_clocks(plan, request))


WINDOW = Rule("window", read_plan, _apply, yields=True)


def direct_sketch(plan: SumPlan, request: GpuRequest, rule: str) -> Sketch:
    """A single reduction with a few outputs of a thread in its registers, whether or not its outputs share inputs.

    Parameters
    ----------
    plan : SumPlan
    request : GpuRequest
    rule : str
        Whose sketch it is.
    """

    def choose() -> Values | Refused:
        timed = choose_tiling(plan, request)
        if timed is None:
            return plan.problem.refused(f"no numbers fit {request.threads} threads")
        return timed[1]

    def make(values: Values) -> GpuSchedule | Refused:
        tiling = tiling_of(plan, values)
        refusal = tiling_refusal(plan, tiling, request)
        if refusal is not None:
            return refusal
        kernel, tiles = emit_direct(plan, tiling, request.threads)
        return GpuSchedule(kernel, rule, tiles, request.threads)

    return Sketch(rule, knobs_of(plan, request), choose, make)
