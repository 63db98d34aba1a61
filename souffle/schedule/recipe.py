"""What makes a schedule of a stage, as plain data: a rule of ours with values of its knobs, or MetaSchedule's trace.

A recipe is what searches draw, logs hold and compilation follows; :func:`souffle.schedule.tuned.followed` gives its
schedule.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

__all__ = ["NATIVE_RULE", "Recipe"]

NATIVE_RULE = "metaschedule"
"""The rule of schedules that MetaSchedule's own sketches give."""

_POSTPROCESSING = "EnterPostproc"
"""The step of a trace from which on all follows from the steps before."""


@dataclass(frozen=True, eq=False)
class Recipe:
    """One way to schedule a stage.

    Attributes
    ----------
    rule : str
        Of ours, or :data:`NATIVE_RULE`.
    knobs : mapping of str to int
        Of our rule; empty for MetaSchedule's.
    trace : list, optional
        MetaSchedule's JSON of a trace: its steps and its decisions. ``None`` for rules of ours.
    """

    rule: str
    knobs: Mapping[str, int]
    trace: list[Any] | None = None

    @cached_property
    def key(self) -> str:
        """What tells recipes of one stage apart: steps of a trace that follow from others are left out."""
        return json.dumps([self.rule, sorted(self.knobs.items()) if self.trace is None else self.choices])

    @cached_property
    def choices(self) -> list[Any]:
        """The trace without the steps that follow from others, and their decisions; empty for rules of ours."""
        steps, decisions = self.trace or ([], [])
        end = next((number for number, step in enumerate(steps) if step[0] == _POSTPROCESSING), len(steps))
        return [steps[:end], [decision for decision in decisions if decision[0] < end]]

    @property
    def summary(self) -> str:
        """The rule and its knobs or tiles, for people."""
        if self.trace is None:
            return " ".join((self.rule, *(f"{name}={value}" for name, value in self.knobs.items())))
        return f"{self.rule} {[decision for _, decision in self.trace[1]]}"

    def data(self) -> dict[str, Any]:
        """As plain data."""
        return {"rule": self.rule, "knobs": dict(self.knobs), "trace": self.trace}

    @classmethod
    def of_data(cls, data: Mapping[str, Any]) -> Recipe:
        """Of plain data."""
        return cls(data["rule"], dict(data["knobs"]), data["trace"])
