"""From the stages of a subprogram to one TensorIR kernel (paper §6.4, §6.5)."""

from souffle.kernel.calls import CallPlan, KernelShape, LoopCall, Place, StageCall, plan_calls
from souffle.kernel.merge import MergedKernel, merge

__all__ = [
    "CallPlan",
    "KernelShape",
    "LoopCall",
    "MergedKernel",
    "Place",
    "StageCall",
    "merge",
    "plan_calls",
]
