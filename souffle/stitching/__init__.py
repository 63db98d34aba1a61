"""Which TEs become one kernel without a grid barrier: the planners of FusionStitching, beside XLA's rules."""

from souffle.stitching.graph import Op, OpGraph, Read, graph_of
from souffle.stitching.kinds import Kind, kind_of
from souffle.stitching.plan import FusionError, FusionPattern, FusionPlan, Scheme, cycle_between, plan_of
from souffle.stitching.planner import FusionPlanner, FusionRequest
from souffle.stitching.registry import FUSION_PLANNERS, fusion_planner_for

__all__ = [
    "FUSION_PLANNERS",
    "FusionError",
    "FusionPattern",
    "FusionPlan",
    "FusionPlanner",
    "FusionRequest",
    "Kind",
    "Op",
    "OpGraph",
    "Read",
    "Scheme",
    "cycle_between",
    "fusion_planner_for",
    "graph_of",
    "kind_of",
    "plan_of",
]
