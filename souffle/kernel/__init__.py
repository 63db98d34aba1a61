"""From the stages of a subprogram to one TensorIR kernel (paper §6.4, §6.5)."""

from souffle.kernel.calls import CallPlan, plan_calls
from souffle.kernel.kernel_shape import ArgumentPlace, KernelShape, LoopCall, StageCall
from souffle.kernel.merge import MergedKernel, merge

__all__ = [
    "ArgumentPlace",
    "CallPlan",
    "KernelShape",
    "LoopCall",
    "MergedKernel",
    "StageCall",
    "merge",
    "plan_calls",
]
