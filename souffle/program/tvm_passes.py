"""Passes that code for the CPU and for GPUs have in common."""

from __future__ import annotations

from collections.abc import Callable

import tvm
from tvm import s_tir, tirx

__all__ = ["function_pass", "simplifying_passes"]


def function_pass(change: Callable[[tirx.PrimFunc], tirx.PrimFunc], name: str) -> tvm.transform.Pass:
    """A pass of one's own, which changes each function by itself."""
    return tirx.transform.prim_func_pass(lambda function, module, context: change(function), opt_level=0, name=name)


def simplifying_passes() -> list[tvm.transform.Pass]:
    """What ``default_s_tir_pipeline`` has between giving out memory and what is of one kind of device."""
    tensor_ir, low = s_tir.transform, tirx.transform
    return [
        tensor_ir.HoistIfThenElse(),
        low.UnrollLoop(),
        tensor_ir.RenormalizeSplitPattern(),
        low.StmtSimplify(),
        low.RemoveNoOp(),
        tensor_ir.RewriteUnsafeSelect(),
        low.CommonSubexprElim(),
        low.FP8ComputeLegalize(),
        low.VerifyMemory(),
    ]
