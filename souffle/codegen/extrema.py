"""Maxima and minima of floating-point numbers in CUDA text: they pass NaN on, as ``program/extrema.py`` defines them.

TVM prints ``max(a, b)``, which CUDA takes to be ``fmaxf`` and which loses a NaN. From sm_80 on there is one instruction
that does not.
"""

from __future__ import annotations

import tvm
import tvm_ffi
from tvm import tirx

from souffle.program.extrema import is_floating
from souffle.tvm_compat import PrimExpr, dtype_of

__all__ = ["EXTREMA_TEXTS", "with_cuda_extrema"]


def with_cuda_extrema(module: tvm.IRModule) -> tvm.IRModule:
    """A module whose maxima and minima of floating-point numbers are calls of the functions of :data:`EXTREMA_TEXTS`.

    Parameters
    ----------
    module : IRModule
        Lowered as far as it is printed.
    """

    def rewrite(node: tirx.Max | tirx.Min) -> PrimExpr:
        dtype = tvm.DataType(dtype_of(node))
        if not is_floating(str(dtype)):
            return node
        name = _name("max" if isinstance(node, tirx.Max) else "min", dtype.bits)
        return tirx.call_pure_extern(str(dtype), name, node.a, node.b)

    kinds = [(tirx.Max, rewrite), (tirx.Min, rewrite)]
    return tvm.IRModule(
        {name: func.with_body(tvm_ffi.structural_map(func.body, kinds)) for name, func in module.functions.items()}
    )


def _name(what: str, bits: int) -> str:
    return f"{what}_or_nan_f{bits}"


def _text(what: str, bits: int) -> str:
    before = ">" if what == "max" else "<"
    if bits != 32:
        # The instruction for one half wants its operands apart: comparing them as they lie takes fewer instructions.
        kind = "half" if bits == 16 else "double"
        return f"""
static __device__ __forceinline__ {kind} {_name(what, bits)}({kind} a, {kind} b) {{
  return a {before} b || a != a ? a : b;
}}
"""
    return f"""
static __device__ __forceinline__ float {_name(what, bits)}(float a, float b) {{
#if __CUDA_ARCH__ >= 800
  float chosen;
  asm("{what}.NaN.f32 %0, %1, %2;" : "=f"(chosen) : "f"(a), "f"(b));
  return chosen;
#else
  return a {before} b || a != a ? a : b;
#endif
}}
"""


EXTREMA_TEXTS: tuple[tuple[tuple[str, ...], str], ...] = tuple(
    ((_name(what, bits),), _text(what, bits)) for bits in (16, 32, 64) for what in ("max", "min")
)
"""Names of device functions, and their texts."""
