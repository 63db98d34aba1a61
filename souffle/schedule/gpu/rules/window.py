"""Rules whose threads hold a few outputs in registers: windows that overlap, and what `reduction` uses of them.

A window is what a convolution with few channels a group or a pooling reads for one output. Neighbouring outputs share
most of it, so a thread computes several and reads each input once (``direct_tiling.py``); between threads inputs are
shared by the L1 cache. Numbers are chosen by an estimate of what the units of a multiprocessor have to do.
"""

from __future__ import annotations

from dataclasses import dataclass

from souffle.decision import Refused
from souffle.schedule.gpu.emit.direct_emission import emit_direct
from souffle.schedule.gpu.forms.matrix_product import Contraction, read_contraction
from souffle.schedule.gpu.forms.stage_forms import StageForms
from souffle.schedule.gpu.rule import GpuRequest, GpuSchedule, Rule, Sketch, Values
from souffle.schedule.gpu.rules.contraction import estimated_clocks
from souffle.schedule.gpu.tiling.direct_cost import choose_tiling, estimate, knobs_of, problem_of, tiling_of
from souffle.schedule.gpu.tiling.direct_tiling import Plan, read_plan

__all__ = ["WINDOW", "direct_sketch"]


@dataclass(frozen=True, eq=False)
class _Windows:
    """A sum over windows, and the same as a sum of products, if it is one."""

    plan: Plan
    contraction: Contraction | Refused


def _read(stage: StageForms) -> _Windows | Refused:
    plan = stage.read(read_plan)
    if isinstance(plan, Refused):
        return plan
    if not any(plan.meetings):
        return Refused(f"block {plan.problem.name}: neighbouring outputs share no input")
    return _Windows(plan, stage.read(read_contraction))


def _apply(form: _Windows, request: GpuRequest) -> Sketch | Refused:
    """Convolutions with few channels a group, and poolings: sums over windows that neighbours share.

    Refused are stages that are not one reduction in this sense, those whose outputs share no input, and convolutions
    that the contraction rule computes faster by both rules' estimates.
    """
    plan = form.plan
    sketch = direct_sketch(plan, request, WINDOW.name)
    values = sketch.choose()
    if isinstance(values, Refused):
        return values
    other = None if isinstance(form.contraction, Refused) else estimated_clocks(form.contraction, request)
    own = estimate(plan, tiling_of(plan, values), request)
    if other is not None and other < own:
        return Refused(
            f"block {plan.problem.name}: by estimates, {own:.0f} clocks in registers alone, {other:.0f} with tiles in "
            "shared memory"
        )
    return Sketch(sketch.rule, sketch.knobs, lambda: values, sketch.make)


WINDOW = Rule("window", _read, _apply)


def direct_sketch(plan: Plan, request: GpuRequest, rule: str) -> Sketch:
    """A single reduction with a few outputs of a thread in its registers, whether or not its outputs share inputs.

    Parameters
    ----------
    plan : Plan
    request : GpuRequest
    rule : str
        Whose sketch it is.
    """

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
        kernel, tiles = emit_direct(plan, tiling, request.threads)
        return GpuSchedule(kernel, rule, tiles, request.threads)

    return Sketch(rule, knobs_of(plan, request), choose, make)
