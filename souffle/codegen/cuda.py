"""CUDA text for merged kernels, by TVM's code generator (paper §6.7)."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import tvm

from souffle.kernel.calls import KernelShape
from souffle.kernel.lower import DeviceFunction
from souffle.kernel.merge import CHOICE_FUNCTION, OFFSET_FUNCTION, PREFETCH_FUNCTION, MergedKernel, merge

__all__ = ["emit_cuda"]

_PREFETCH_TEXT = f"""
static __device__ __forceinline__ int {PREFETCH_FUNCTION}(const void* data, int64_t bytes, int block, int tid,
                                                           int num_blocks) {{
  int64_t step = (int64_t)num_blocks * blockDim.x * 128;
  for (int64_t at = ((int64_t)block * blockDim.x + tid) * 128; at < bytes; at += step) {{
    asm volatile("prefetch.global.L2 [%0];" : : "l"((const char*)data + at));
  }}
  return 0;
}}
"""
_STEP_TEXT = f"""
template <typename T> static __device__ __forceinline__ T* {OFFSET_FUNCTION}(T* data, int64_t elements) {{
  return data + elements;
}}
template <typename T> static __device__ __forceinline__ T* {CHOICE_FUNCTION}(bool condition, T* one, T* other) {{
  return condition ? one : other;
}}
"""
_HELPERS = (((PREFETCH_FUNCTION,), _PREFETCH_TEXT), ((OFFSET_FUNCTION, CHOICE_FUNCTION), _STEP_TEXT))


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
    for functions_of, helper in _HELPERS:
        if any(name in text for name in functions_of):
            first = re.search(r"^static __device__|^template", text, re.MULTILINE)
            at = first.start() if first else 0
            text = text[:at] + helper.lstrip() + text[at:]
    return text, merged
