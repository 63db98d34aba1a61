"""Fusion planners by name, and those that stand elsewhere.

Another planner is a class with the attributes of :class:`souffle.stitching.planner.FusionPlanner`. Outside of the
package it is named by where it stands, ``"mypackage.module:planner"``, or as an entry point of an installed package.
"""

from __future__ import annotations

from souffle.named import found_by_name
from souffle.options import SOUFFLE
from souffle.stitching.planner import FusionPlanner
from souffle.stitching.priority.planners import AnnealedFusion, DefaultFusion, GreedyFusion, LearnedFusion
from souffle.stitching.stitching_dp import StitchingDp
from souffle.stitching.stitching_ilp import StitchingIlp
from souffle.stitching.tvm_groups import TvmGroups
from souffle.stitching.xla_rules import XlaRules

__all__ = ["ENTRY_POINTS", "FUSION_PLANNERS", "fusion_planner_for"]

ENTRY_POINTS = "souffle.fusion_planners"
"""The group of entry points in which installed packages name planners."""

FUSION_PLANNERS: dict[str, FusionPlanner] = {
    planner.name: planner
    for planner in (
        *(StitchingIlp(), StitchingDp(), XlaRules(), TvmGroups()),
        *(DefaultFusion(), GreedyFusion(), AnnealedFusion(), LearnedFusion()),
    )
}
"""By name."""


def fusion_planner_for(name: str) -> FusionPlanner:
    """The planner of a name.

    Parameters
    ----------
    name : str
        One of ``FUSION_PLANNERS``, ``"module:attribute"``, or an entry point of the group ``souffle.fusion_planners``.

    Raises
    ------
    OptionError
        If there is none: listing the names, or saying what is wrong with the module.
    """
    return found_by_name(
        "fusion",
        name,
        FUSION_PLANNERS,
        group=ENTRY_POINTS,
        attributes=("name", "plan"),
        what="fusion planner",
        besides=(SOUFFLE,),
    )
