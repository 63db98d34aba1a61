"""The planners by name. Another one has the methods of :class:`souffle.partition.planner.Planner` and is named here."""

from __future__ import annotations

from collections.abc import Sequence

from souffle.decision import Decision
from souffle.errors import OptionError
from souffle.partition.persistent import Persistent
from souffle.partition.planner import Planner, Subprogram
from souffle.partition.souffle_rule import SouffleRule
from souffle.schedule.stage import Unit

__all__ = ["PLANNERS", "one_kernel_per_stage", "planner_for"]

PLANNERS: dict[str, Planner] = {planner.name: planner for planner in (SouffleRule(), Persistent())}
"""By the name that the option ``partition`` takes."""


def planner_for(name: str) -> Planner:
    """The planner of a name.

    Raises
    ------
    OptionError
        Listing the names, if `name` is not one.
    """
    if name not in PLANNERS:
        raise OptionError(f"partition={name!r} is not valid; choose one of {', '.join(PLANNERS)}")
    return PLANNERS[name]


def one_kernel_per_stage(stages: Sequence[Unit]) -> tuple[tuple[Subprogram, ...], tuple[Decision, ...]]:
    """The partition of levels V0 to V2, which ask no planner: every stage is a kernel."""
    return tuple(Subprogram((stage,)) for stage in stages), ()
