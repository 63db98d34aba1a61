"""CUDA text for merged kernels, by TVM's code generator (paper §6.7)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import tvm

from souffle.codegen.device_functions import with_device_functions
from souffle.kernel.calls import KernelShape
from souffle.kernel.lower import DeviceFunction
from souffle.kernel.merge import MergedKernel, merge

__all__ = ["emit_cuda"]


@tvm.register_global_func("tvm_callback_cuda_compile", override=True)
def _text_only(code: str, target: object) -> bytes:
    """Stand in for TVM's call of nvcc: Souffle compiles the text itself, many kernels in one call."""
    return b"text only"


def emit_cuda(
    kernels: Sequence[tuple[str, KernelShape]], names: Mapping[DeviceFunction, str], target: tvm.target.Target
) -> tuple[str, tuple[MergedKernel, ...]]:
    """The CUDA text of some kernels and of the stage functions that they call.

    Parameters
    ----------
    kernels : sequence of (name, shape)
    names : mapping of DeviceFunction to str
        The functions' names in the text; unique.
    target : Target

    Returns
    -------
    text : str
    merged : tuple of MergedKernel
        The kernels' TensorIR.
    """
    used = list(dict.fromkeys(f for _, shape in kernels for f in shape.functions))
    global_vars = {function: tvm.ir.GlobalVar(names[function]) for function in used}
    functions = {gv: f.func.with_attr("global_symbol", gv.name_hint) for f, gv in global_vars.items()}
    merged = tuple(merge(name, shape, global_vars) for name, shape in kernels)
    for kernel in merged:
        functions[tvm.ir.GlobalVar(kernel.name)] = kernel.func
    module = tvm.tirx.transform.LowerIntrin()(tvm.IRModule(functions))
    text = tvm.get_global_func("target.build.cuda")(module, target).inspect_source()
    calls = [names[f] for _, shape in kernels for f in shape.functions]
    for name in dict.fromkeys(calls):
        # Code that several places call stays one copy; code called once is the kernel's own.
        keyword = "__noinline__" if calls.count(name) > 1 else "__forceinline__"
        text = text.replace(f'extern "C" __device__ void {name}(', f"static __device__ {keyword} void {name}(")
    for name, shape in kernels:
        if shape.blocks_per_sm > 1:
            bounds = f"__launch_bounds__({shape.threads}, {shape.blocks_per_sm})"
            text = text.replace(f"__launch_bounds__({shape.threads}) {name}(", f"{bounds} {name}(")
    if "cuda::barrier" not in text:
        # TVM asks for this header with every grid sync; it is not needed and takes nvcc a second.
        text = text.replace("#include <cuda/barrier>\n", "")
    return with_device_functions(text), merged
