"""Rules whose threads hold a few outputs in registers: windows that overlap, and what `reduction` uses of them.

A window is what a convolution with few channels a group or a pooling reads for one output. Neighbouring outputs share
most of it, so a thread computes several and reads each input once (``direct_tiling.py``); between threads inputs are
shared by the L1 cache. Numbers are chosen by an estimate of what the units of a multiprocessor have to do.
"""

from __future__ import annotations

from functools import lru_cache

from tvm import tirx

from souffle.decision import Refused
from souffle.schedule.gpu.emit.direct_emission import emit_direct
from souffle.schedule.gpu.forms.blocks import inlining_refusal
from souffle.schedule.gpu.forms.one_reduction import read_sum
from souffle.schedule.gpu.forms.rows import open_stage
from souffle.schedule.gpu.rule import GpuRequest, GpuSchedule
from souffle.schedule.gpu.rules.contraction import estimated_clocks
from souffle.schedule.gpu.sketch import Sketch, Values
from souffle.schedule.gpu.tiling.direct_cost import choose_tiling, estimate, knobs_of, problem_of, tiling_of
from souffle.schedule.gpu.tiling.direct_tiling import Plan, plan_of

__all__ = ["direct_sketch", "window"]


def window(func: tirx.PrimFunc, request: GpuRequest) -> Sketch | Refused:
    """Schedule convolutions with few channels a group, and poolings: sums over windows that neighbours share.

    Parameters
    ----------
    func : tirx.PrimFunc
    request : GpuRequest

    Returns
    -------
    Sketch or Refused
        Refused are stages that are not one reduction in this sense, those whose outputs share no input, and
        convolutions that the contraction rule computes faster by both rules' estimates.
    """
    plan = _planned(func)
    if isinstance(plan, Refused):
        return plan
    if not any(plan.meetings):
        return Refused(f"block {plan.problem.name}: neighbouring outputs share no input")
    sketch = _sketch(func, plan, request, "window")
    values = sketch.choose()
    if isinstance(values, Refused):
        return values
    own, other = estimate(plan, tiling_of(plan, values), request), estimated_clocks(func, request)
    if other is not None and other < own:
        return Refused(
            "window",
            f"block {plan.problem.name}: by estimates, {own:.0f} clocks in registers alone, {other:.0f} with tiles in "
            "shared memory",
        )
    return Sketch(sketch.rule, sketch.knobs, lambda: values, sketch.make)


def direct_sketch(func: tirx.PrimFunc, request: GpuRequest, rule: str) -> Sketch | Refused:
    """The same schedule for any single reduction, whether or not its outputs share inputs."""
    plan = _planned(func)
    return plan if isinstance(plan, Refused) else _sketch(func, plan, request, rule)


@lru_cache(maxsize=2)
def _planned(func: tirx.PrimFunc) -> Plan | Refused:
    """What is settled of a stage; the reduction rule asks for it again where the window rule refused."""
    reason = inlining_refusal(func)
    if reason is not None:
        return Refused(reason)
    problem = read_sum(open_stage(func))
    return problem if isinstance(problem, Refused) else plan_of(problem)


def _sketch(func: tirx.PrimFunc, plan: Plan, request: GpuRequest, rule: str) -> Sketch:
    def choose() -> Values | Refused:
        found = choose_tiling(plan, request)
        if found is None:
            return Refused(f"block {plan.problem.name}: no numbers fit {request.threads} threads")
        return found[1]

    def make(values: Values) -> GpuSchedule | Refused:
        tiling = tiling_of(plan, values)
        reason = problem_of(plan, tiling, request)
        if reason is not None:
            return Refused(f"block {plan.problem.name}: {reason}")
        kernel, tiles = emit_direct(func, plan, tiling, request.threads)
        return GpuSchedule(kernel, rule, tiles, request.threads)

    return Sketch(rule, knobs_of(plan, request), choose, make)
