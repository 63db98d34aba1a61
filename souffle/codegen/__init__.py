"""From TensorIR kernels to CUDA text, cubins and the plan that the runtime executes.

Only :mod:`souffle.codegen.plan` is imported here: the runtime reads plans where TVM is not installed.
"""

from souffle.codegen.plan import Buffer, CudaModule, Kernel, Launch, Plan, Resources

__all__ = ["Buffer", "CudaModule", "Kernel", "Launch", "Plan", "Resources"]
