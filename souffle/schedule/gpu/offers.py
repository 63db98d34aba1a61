"""What the rules offer for a stage, each asked once, in the order in which they are preferred."""

from __future__ import annotations

from collections.abc import Iterator
from math import inf

from tvm import s_tir, tirx

from souffle.decision import Refused
from souffle.schedule.gpu.forms.blocks import is_reduction, product
from souffle.schedule.gpu.forms.stage_forms import StageForms
from souffle.schedule.gpu.registry import RULES
from souffle.schedule.gpu.rule import GpuRequest, GpuSchedule, Rule, Sketch, does_not_apply
from souffle.schedule.gpu.schedule_check import check_schedule
from souffle.tvm_compat import collect, const_int

__all__ = ["Offers"]

_MOST_POINTS = 2**31 - 1
"""Of a loop, and of the loops of a tensor, which rules join."""


class Offers:
    """The rules' sketches of one stage. Refusals name their rule.

    Parameters
    ----------
    func : PrimFunc
        A small group of TEs, as ``te.create_prim_func`` gives it.
    request : GpuRequest
    """

    def __init__(self, func: tirx.PrimFunc, request: GpuRequest) -> None:
        self._stage, self._request = StageForms(func), request
        self._sketches: dict[str, Sketch | Refused] = {}
        longest = max((_points(block) for block in collect(func.body, s_tir.SBlock)), default=1)
        self._too_long = None
        if longest > _MOST_POINTS:
            why = f"a tensor of {longest} elements is made, and threads count up to {_MOST_POINTS}; make it in parts"
            self._too_long = Refused(f"any rule: {why}")

    def sketch(self, rule: Rule) -> Sketch | Refused:
        """What a rule offers."""
        if self._too_long is not None:
            return self._too_long
        if rule.name not in self._sketches:
            self._sketches[rule.name] = _named(rule, rule.sketch(self._stage, self._request))
        return self._sketches[rule.name]

    def schedule(self, rule: Rule) -> GpuSchedule | Refused:
        """The schedule with a rule's own values.

        Raises
        ------
        ScheduleError
            If it breaks a rule of stages, which is a bug of the rule that made it.
        """
        sketch = self.sketch(rule)
        if isinstance(sketch, Refused):
            return sketch
        try:
            schedule = sketch.chosen()
        except s_tir.ScheduleError as error:
            schedule = does_not_apply(error)
        if isinstance(schedule, GpuSchedule):
            check_schedule(schedule, self._request)
        return _named(rule, schedule)

    def preferred(self) -> Iterator[Rule]:
        """The rules in their order, but one that yields behind those that estimate fewer clocks."""
        rules = list(RULES.values())
        while rules:
            rule = rules[0]
            if rule.yields and self.estimates(rule):
                own = self.clocks(rule)
                rule = next((later for later in rules[1:] if self.clocks(later, below=own) < own), rule)
            rules.remove(rule)
            yield rule

    def least_clocks(self) -> float:
        """Below which the estimate of the first rule that offers something cannot be."""
        offered = map(self.sketch, RULES.values())
        return next((sketch.least for sketch in offered if isinstance(sketch, Sketch)), 0.0)

    def estimates(self, rule: Rule) -> bool:
        """Whether a rule applies and estimates its time."""
        sketch = self.sketch(rule)
        return isinstance(sketch, Sketch) and sketch.clocks is not None

    def clocks(self, rule: Rule, below: float = inf) -> float:
        """A rule's own estimate; infinite where it has none, or none below a bound."""
        sketch = self.sketch(rule)
        return sketch.clocks() if self.estimates(rule) and sketch.least < below else inf


def _named(rule: Rule, answer: Sketch | GpuSchedule | Refused) -> Sketch | GpuSchedule | Refused:
    return Refused(f"{rule.name}: {answer.reason}") if isinstance(answer, Refused) else answer


def _points(block: s_tir.SBlock) -> int:
    """How many elements a block computes."""
    return product(const_int(axis.dom.extent) for axis in block.iter_vars if not is_reduction(axis))
