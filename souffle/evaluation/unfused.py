"""The fusion planner that fuses nothing: one kernel for each TE, what the papers measure fusion against."""

from __future__ import annotations

from souffle.stitching.plan import FusionPlan, plan_of
from souffle.stitching.planner import FusionRequest

__all__ = ["UNFUSED", "UNFUSED_NAME"]


class _Unfused:
    """See the module."""

    name = "unfused"
    block_composition = False

    def plan(self, request: FusionRequest) -> FusionPlan:
        """See :meth:`souffle.stitching.planner.FusionPlanner.plan`."""
        return plan_of(request.graph, [], self.name)


UNFUSED = _Unfused()
UNFUSED_NAME = f"{__name__}:UNFUSED"
"""As the option ``fusion`` names it."""
