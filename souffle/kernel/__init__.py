"""From scheduled stages to one TensorIR kernel."""

from souffle.kernel.calls import CallPlan, KernelShape, LoopCall, Place, StageCall, plan_calls
from souffle.kernel.lower import DeviceFunction, Lowering, LoweringError, cuda_target, lower_stage, lowering_problem
from souffle.kernel.merge import MergedKernel, merge
from souffle.kernel.partial import fit_functions, partial_function

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
    "fit_functions",
    "lower_stage",
    "lowering_problem",
    "merge",
    "partial_function",
    "plan_calls",
]
