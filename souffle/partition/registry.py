"""The planners by name, and those that stand elsewhere.

Another planner is a class with the attributes of :class:`souffle.partition.planner.Planner`. In here it is one more
name in ``PLANNERS``. Outside of the package it is named by where it stands, ``"mypackage.module:planner"``, or an
installed package declares it under a short name, as an entry point of the group ``souffle.planners``
(``docs/extending.md``).
"""

from __future__ import annotations

from souffle.named import found_by_name
from souffle.partition.persistent import Persistent
from souffle.partition.planner import Partition, PartitionRequest, Planner, Subprogram
from souffle.partition.souffle_rule import SouffleRule

__all__ = ["ENTRY_POINTS", "ONE_KERNEL_PER_STAGE", "PLANNERS", "planner_for"]

ENTRY_POINTS = "souffle.planners"
"""The group of entry points in which installed packages name planners."""

PLANNERS: dict[str, Planner] = {planner.name: planner for planner in (SouffleRule(), Persistent())}
"""By the name that the option ``partition`` takes."""


class _OneKernelPerStage:
    """The partition of levels V0 to V2: every stage is a kernel."""

    name = "none"
    measures = False

    def plan(self, request: PartitionRequest) -> Partition:
        """See :meth:`souffle.partition.planner.Planner.plan`."""
        return Partition(tuple(Subprogram((stage,)) for stage in request.stages))


ONE_KERNEL_PER_STAGE: Planner = _OneKernelPerStage()


def planner_for(name: str) -> Planner:
    """The planner of a name.

    Parameters
    ----------
    name : str
        One of ``PLANNERS``, ``"module:attribute"``, or an entry point of the group ``souffle.planners``.

    Raises
    ------
    OptionError
        If there is none: listing the names, or saying what is wrong with the module.
    """
    return found_by_name(
        "partition",
        name,
        PLANNERS,
        group=ENTRY_POINTS,
        attributes=("name", "measures", "plan"),
        what="planner",
    )
