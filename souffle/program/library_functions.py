"""Functions of which TVM makes formulas for LLVM that lose the digits of small numbers.

``tanh(x)`` becomes a quotient of ``1 - exp(-2x)``, ``atanh(x)`` the logarithm of one. The C library has both.
"""

from __future__ import annotations

from tvm import tirx
from tvm.ir import Call

from souffle.tvm_calls import structural_map
from souffle.tvm_compat import PrimExpr, cast, dtype_of

__all__ = ["with_library_functions"]

_NAMES = {"tirx.tanh": "tanh", "tirx.atanh": "atanh"}


def with_library_functions(function: tirx.PrimFunc) -> tirx.PrimFunc:
    """A function, not vectorised yet, that calls the C library where TVM's own code for LLVM is inexact."""

    def rewrite(call: Call) -> PrimExpr:
        name = _NAMES.get(getattr(call.op, "name", ""))
        if name is None:
            return call
        dtype = dtype_of(call)
        if dtype == "float64":
            return tirx.call_pure_extern(dtype, name, call.args[0])
        return cast(tirx.call_pure_extern("float32", f"{name}f", cast(call.args[0], "float32")), dtype)

    return function.with_body(structural_map(function.body, (Call, rewrite)))
