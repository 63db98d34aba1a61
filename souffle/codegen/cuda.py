"""CUDA text for merged kernels, by TVM's code generator (paper §6.7)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import tvm
from tvm import tirx

from souffle.codegen.device_functions import with_device_functions
from souffle.codegen.extrema import with_cuda_extrema
from souffle.codegen.short_integers import with_short_integers
from souffle.codegen.stage_calls import StageCalls
from souffle.kernel.kernel_shape import KernelShape
from souffle.kernel.merge import MergedKernel, merge

__all__ = ["emit_cuda", "merged_kernels", "module_text", "text_of_functions"]


@tvm.register_global_func("tvm_callback_cuda_compile", override=True)
def _text_only(code: str, target: object) -> bytes:
    """Stand in for TVM's call of nvcc: Souffle compiles the text itself, many kernels in one call."""
    return b"text only"


def emit_cuda(
    kernels: Sequence[tuple[str, KernelShape]], target: tvm.target.Target
) -> tuple[str, tuple[MergedKernel, ...]]:
    """The CUDA text of some kernels and of the stage functions that they call.

    Parameters
    ----------
    kernels : sequence of (name, shape)
        The names of the functions that they call are unique.
    target : Target

    Returns
    -------
    text : str
    merged : tuple of MergedKernel
        The kernels' TensorIR.
    """
    merged, functions = merged_kernels(kernels)
    return module_text(merged, functions, target), merged


def merged_kernels(
    kernels: Sequence[tuple[str, KernelShape]],
) -> tuple[tuple[MergedKernel, ...], dict[str, tirx.PrimFunc]]:
    """The TensorIR of some kernels, and by name that of the functions that they call; as for :func:`emit_cuda`."""
    used = list(dict.fromkeys(f for _, shape in kernels for f in shape.called))
    global_vars = {function: tvm.ir.GlobalVar(function.name) for function in used}
    merged = tuple(merge(name, shape, global_vars) for name, shape in kernels)
    return merged, {f.name: f.func for f in used}


def module_text(
    kernels: Sequence[MergedKernel], functions: Mapping[str, tirx.PrimFunc], target: tvm.target.Target
) -> str:
    """As :func:`text_of_functions`, of merged kernels."""
    return text_of_functions({kernel.name: kernel.func for kernel in kernels}, functions, target)


def text_of_functions(
    kernels: Mapping[str, tirx.PrimFunc], functions: Mapping[str, tirx.PrimFunc], target: tvm.target.Target
) -> str:
    """The CUDA text of kernels with the stage functions that they call, from their TensorIR alone.

    Parameters
    ----------
    kernels : mapping of str to PrimFunc
        In the order in which they stand in the text.
    functions : mapping of str to PrimFunc
        May hold more than the kernels call.
    target : Target
    """
    calls = StageCalls(kernels, functions)
    module: dict[tvm.ir.GlobalVar, tirx.PrimFunc] = {
        callee: functions[str(callee.name_hint)].with_attr("global_symbol", str(callee.name_hint))
        for callee in calls.callees
    }
    for name, kernel in kernels.items():
        module[tvm.ir.GlobalVar(name)] = kernel
    lowered = with_short_integers(with_cuda_extrema(tirx.transform.LowerIntrin()(tvm.IRModule(module))))
    text = tvm.get_global_func("target.build.cuda")(lowered, target).inspect_source()
    text = calls.written(text)
    if "cuda::barrier" not in text:
        # TVM asks for this header with every grid sync; it is not needed and takes nvcc a second.
        text = text.replace("#include <cuda/barrier>\n", "")
    return with_device_functions(text)
