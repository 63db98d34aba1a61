"""From functions of TensorIR to code of the CPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import tvm
from tvm import s_tir, tirx

from souffle.program.flattening import flatten_buffers

__all__ = ["compile_llvm"]

_NAME = "souffle.llvm"


def compile_llvm(functions: Mapping[str, tirx.PrimFunc], target: tvm.target.Target) -> tvm.runtime.Executable:
    """``tvm.compile`` with TVM's own passes for the CPU, but for :func:`souffle.program.flattening.flatten_buffers`.

    Parameters
    ----------
    functions : mapping of str to PrimFunc
        By the name that each has as ``global_symbol``, too.
    target : Target
        Of LLVM.
    """
    return tvm.compile(tvm.IRModule(dict(functions)), target=target, tir_pipeline=_NAME)


def _passes() -> list[tvm.transform.Pass]:
    """As ``tvm.s_tir.pipeline.default_s_tir_pipeline`` has them; those of GPUs and of options not used are left out."""
    tensor_ir, low = s_tir.transform, tirx.transform
    return [
        tensor_ir.CanonicalizeLoop(),
        tensor_ir.LowerInitBlock(),
        tensor_ir.PlanAndUpdateBufferAllocationLocation(),
        tensor_ir.ConvertBlocksToOpaque(),
        tensor_ir.CompactBufferAllocation(),
        tensor_ir.LowerMatchBuffer(),
        tensor_ir.StmtSimplify(),
        tensor_ir.AnnotateIrregularLoop(),
        tensor_ir.LowerOpaqueBlock(),
        flatten_buffers(),
        low.BF16ComputeLegalize(),
        low.NarrowDataType(32),
        tensor_ir.LoopPartition(),
        low.VectorizeLoop(True),
        tensor_ir.InjectDoubleBuffer(),
        low.StorageRewrite(),
        tensor_ir.HoistIfThenElse(),
        low.UnrollLoop(),
        tensor_ir.RenormalizeSplitPattern(),
        low.StmtSimplify(),
        low.RemoveNoOp(),
        tensor_ir.RewriteUnsafeSelect(),
        low.CommonSubexprElim(),
        low.FP8ComputeLegalize(),
        low.VerifyMemory(),
        low.AnnotateEntryFunc(),
        low.SplitHostDevice(),
        low.MakePackedAPI(),
        low.FP8StorageLegalize(),
        low.BF16StorageLegalize(),
    ]


def _pipeline() -> tuple[tvm.transform.Pass, Callable, Callable]:
    _, of_host, of_device = tirx.get_tir_pipeline("s_tir")
    return tvm.transform.Sequential(_passes()), of_host, of_device


tirx.register_tir_pipeline(_NAME, _pipeline)
