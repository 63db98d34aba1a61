"""From scheduled stages to one TensorIR kernel."""

from souffle.kernel.calls import CallPlan, KernelShape, LoopCall, Place, StageCall, plan_calls
from souffle.kernel.lower import DeviceFunction, Lowering, LoweringError, cuda_target, lower_stage, lowering_problem
from souffle.kernel.merge import MergedKernel, merge

__all__ = [
    "CallPlan",
    "DeviceFunction",
    "KernelShape",
    "LoopCall",
    "Lowering",
    "LoweringError",
    "MergedKernel",
    "Place",
    "StageCall",
    "cuda_target",
    "lower_stage",
    "lowering_problem",
    "merge",
    "plan_calls",
]
