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
    policy : str, optional
        A file for planners that are trained, where the user names one.
    """

    graph: OpGraph
    device: CostDevice
    policy: str | None = None


class FusionPlanner(Protocol):
    """Decides which TEs become one kernel.

    Attributes
    ----------
    name : str
        As options name it.
    block_composition : bool
        Whether threads of a block give each other results within a pattern, through shared memory or shuffles; without,
        its kernels hold what each thread computes of its own (thread composition and packing). A planner of one's own
        that does not say has it.
    """

    name: str
    block_composition: bool

    def plan(self, request: FusionRequest) -> FusionPlan:
        """The kernels of a graph."""
        ...
