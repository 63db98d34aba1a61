"""Where kernels begin and end."""

from souffle.partition.planner import Demand, Forecast, Partition, PartitionRequest, Planner, Subprogram
from souffle.partition.registry import ONE_KERNEL_PER_STAGE, PLANNERS, planner_for

__all__ = [
    "ONE_KERNEL_PER_STAGE",
    "PLANNERS",
    "Demand",
    "Forecast",
    "Partition",
    "PartitionRequest",
    "Planner",
    "Subprogram",
    "planner_for",
]
