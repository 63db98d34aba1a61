"""From a scheduled stage to the device function that kernels call (paper §6.4); of all stages: ``lower/stages.py``."""

from souffle.schedule.lower.device_function import WINDOWS, DeviceFunction, LoweringError, cuda_target, lower_stage
from souffle.schedule.lower.fewer_threads import fit_functions, partial_function
from souffle.schedule.lower.kept_loads import KeptLoads, keep_loads
from souffle.schedule.lower.text_digest import text_of

__all__ = [
    "WINDOWS",
    "DeviceFunction",
    "KeptLoads",
    "LoweringError",
    "cuda_target",
    "fit_functions",
    "keep_loads",
    "lower_stage",
    "partial_function",
    "text_of",
]
