"""From a scheduled stage to the device function that kernels call (paper §6.4)."""

from souffle.schedule.lower.device_function import (
    DeviceFunction,
    Lowering,
    LoweringError,
    cuda_target,
    lower_stage,
    lowering_problem,
)
from souffle.schedule.lower.fewer_threads import fit_functions, partial_function

__all__ = [
    "DeviceFunction",
    "Lowering",
    "LoweringError",
    "cuda_target",
    "fit_functions",
    "lower_stage",
    "lowering_problem",
    "partial_function",
]
