"""What a fusion planner is asked and how it is found by name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from souffle.cost.device import CostDevice
from souffle.stitching.graph import OpGraph
from souffle.stitching.plan import FusionPlan

__all__ = ["FusionPlanner", "FusionRequest"]


@dataclass(frozen=True)
class FusionRequest:
    """What a planner decides on.

    Attributes
    ----------
    graph : OpGraph
    device : CostDevice
        The GPU that it plans for.
    """

    graph: OpGraph
    device: CostDevice


class FusionPlanner(Protocol):
    """Decides which TEs become one kernel.

    Attributes
    ----------
    name : str
        As options name it.
    """

    name: str

    def plan(self, request: FusionRequest) -> FusionPlan:
        """The kernels of a graph."""
        ...
