"""From a scheduled stage to the device function that kernels call (paper §6.4); of all stages: ``lower/stages.py``."""

from souffle.schedule.lower.device_function import WINDOWS, DeviceFunction, LoweringError, cuda_target, lower_stage
from souffle.schedule.lower.fewer_threads import fit_functions, partial_function

__all__ = [
    "WINDOWS",
    "DeviceFunction",
    "LoweringError",
    "cuda_target",
    "fit_functions",
    "lower_stage",
    "partial_function",
]
