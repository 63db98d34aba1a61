"""From scheduled stages to one TensorIR kernel."""

from souffle.kernel.lower import DeviceFunction, LoweringError, cuda_target, lower_stage, lowering_problem
from souffle.kernel.merge import CallPlan, KernelShape, MergedKernel, StageCall, merge, plan_calls

__all__ = [
    "CallPlan",
    "DeviceFunction",
    "KernelShape",
    "LoweringError",
    "MergedKernel",
    "StageCall",
    "cuda_target",
    "lower_stage",
    "lowering_problem",
    "merge",
    "plan_calls",
]
