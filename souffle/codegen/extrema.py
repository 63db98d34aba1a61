"""Maxima and minima of floating-point numbers in CUDA text: they pass NaN on, as ``program/extrema.py`` defines them.

TVM prints ``max(a, b)``, which CUDA takes to be ``fmaxf`` and which loses a NaN. From sm_80 on there is one instruction
that does not.
"""

from __future__ import annotations

import math

import tvm
from tvm import tirx

from souffle.program.extrema import is_floating
from souffle.tvm_calls import structural_map
from souffle.tvm_compat import PrimExpr, dtype_of

__all__ = ["EXTREMA_TEXTS", "with_cuda_extrema"]


def with_cuda_extrema(module: tvm.IRModule) -> tvm.IRModule:
    """A module whose maxima and minima of floating-point numbers are calls of the functions of :data:`EXTREMA_TEXTS`.

    What they start from, an infinity, is spelled as CUDA knows it.

    Parameters
    ----------
    module : IRModule
        Lowered as far as it is printed.
    """

    def rewrite(node: tirx.Max | tirx.Min) -> PrimExpr:
        dtype = tvm.DataType(dtype_of(node))
        if not is_floating(str(dtype)):
            return node
        name = _name("max" if isinstance(node, tirx.Max) else "min", str(dtype.with_lanes(1)))
        return tirx.call_pure_extern(str(dtype), name, node.a, node.b)

    def spelled(node: tirx.FloatImm) -> PrimExpr:
        # TVM prints an infinity of this type by a name that CUDA does not know.
        if dtype_of(node) != "bfloat16" or math.isfinite(node.value):
            return node
        return tirx.Cast("bfloat16", tirx.FloatImm("float32", node.value))

    kinds = [(tirx.Max, rewrite), (tirx.Min, rewrite), (tirx.FloatImm, spelled)]
    return tvm.IRModule(
        {name: func.with_body(structural_map(func.body, kinds)) for name, func in module.functions.items()}
    )


_KINDS = {"float16": "half", "bfloat16": "nv_bfloat16", "float32": "float", "float64": "double"}
"""Names of the types in CUDA text."""


def _name(what: str, dtype: str) -> str:
    return f"{what}_or_nan_{dtype.replace('bfloat', 'bf').replace('float', 'f')}"


def _text(what: str, dtype: str) -> str:
    before = ">" if what == "max" else "<"
    if dtype != "float32":
        # The instruction for one half wants its operands apart: comparing them as they lie takes fewer instructions.
        kind = _KINDS[dtype]
        return f"""
static __device__ __forceinline__ {kind} {_name(what, dtype)}({kind} a, {kind} b) {{
  return a {before} b || a != a ? a : b;
}}
"""
    return f"""
static __device__ __forceinline__ float {_name(what, dtype)}(float a, float b) {{
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
    ((_name(what, dtype),), _text(what, dtype)) for dtype in _KINDS for what in ("max", "min")
)
"""Names of device functions, and their texts."""
