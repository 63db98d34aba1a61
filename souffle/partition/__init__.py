"""Where kernels begin and end."""

from souffle.partition.planner import Demand, Forecast, PartitionRequest, Planner, Subprogram
from souffle.partition.registry import PLANNERS, one_kernel_per_stage, planner_for

__all__ = [
    "PLANNERS",
    "Demand",
    "Forecast",
    "PartitionRequest",
    "Planner",
    "Subprogram",
    "one_kernel_per_stage",
    "planner_for",
]
