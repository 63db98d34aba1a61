"""From functions of TensorIR to code of the CPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import tvm
from tvm import s_tir, tirx
from tvm.ir.expr import TensorLoad

from souffle.program.divisors import positive_divisors
from souffle.program.extrema import with_llvm_extrema
from souffle.program.flattening import flatten_buffers
from souffle.program.ieee import with_ieee_arithmetic
from souffle.program.library_functions import with_library_functions
from souffle.program.tvm_passes import function_pass, simplifying_passes
from souffle.program.wide import with_long_shapes, with_wide_indices
from souffle.tvm_calls import structural_map
from souffle.tvm_compat import PrimExpr, collect, dtype_of

__all__ = ["compile_llvm", "with_exact_arithmetic"]

_NAME = "souffle.llvm"


def with_exact_arithmetic(function: tirx.PrimFunc) -> tirx.PrimFunc:
    """A function, not vectorised yet, whose code means what IEEE 754 and the operators of its expressions say."""
    ieee = function.with_body(with_ieee_arithmetic(function.body))
    return with_library_functions(with_llvm_extrema(ieee))


def compile_llvm(functions: Mapping[str, tirx.PrimFunc], target: tvm.target.Target) -> tvm.runtime.Executable:
    """``tvm.compile`` with TVM's own passes for the CPU, but for :func:`souffle.program.flattening.flatten_buffers` and
    index arithmetic in 64 bits where 32 do not hold it (:mod:`souffle.program.wide`).

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
        function_pass(with_long_shapes, "souffle.LongShapes"),
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
        function_pass(_with_bytes, "souffle.BytesOfTruthValues"),
        low.BF16ComputeLegalize(),
        low.NarrowDataType(32),
        tensor_ir.LoopPartition(),
        low.VectorizeLoop(True),
        tensor_ir.InjectDoubleBuffer(),
        low.StorageRewrite(),
        *simplifying_passes(),
        low.AnnotateEntryFunc(),
        low.SplitHostDevice(),
        low.MakePackedAPI(),
        # Arguments are of this package's making, and LLVM takes longer for their checks than for a small function.
        low.SkipAssert(),
        low.FP8StorageLegalize(),
        low.BF16StorageLegalize(),
        function_pass(lambda function: function.with_body(with_wide_indices(function.body, {})), "souffle.WideIndices"),
    ]


def _with_bytes(function: tirx.PrimFunc) -> tirx.PrimFunc:
    """A function whose own arrays of truth values are of bytes: StorageRewrite makes no vectors of bits right."""
    arrays = [a.buffer for a in collect(function.body, tirx.AllocBuffer) if str(a.buffer.dtype) == "bool"]
    bytes_of = {array: tirx.decl_buffer(array.shape, "uint8", array.name, scope=array.scope()) for array in arrays}
    if not bytes_of:
        return function

    def store(node: tirx.BufferStore) -> tirx.BufferStore:
        array = bytes_of.get(node.buffer)
        if array is None:
            return node
        return tirx.BufferStore(
            array, tirx.Cast(dtype_of(node.value).replace("bool", "uint8"), node.value), node.indices
        )

    def load(node: TensorLoad) -> PrimExpr:
        array = bytes_of.get(node.source)
        if array is None:
            return node
        number = tirx.BufferLoad(array, node.indices)
        return tirx.Cast(dtype_of(node), number)

    def allocate(node: tirx.AllocBuffer) -> tirx.AllocBuffer:
        array = bytes_of.get(node.buffer)
        return node if array is None else tirx.AllocBuffer(array, node.annotations)

    rules = [(tirx.BufferStore, store), (TensorLoad, load), (tirx.AllocBuffer, allocate)]
    return function.with_body(structural_map(function.body, rules))


def _pipeline() -> tuple[tvm.transform.Pass, Callable, Callable]:
    low = tirx.transform
    last = [low.LowerTVMBuiltin(), positive_divisors(), low.LowerIntrin()]
    _, _, of_device = tirx.get_tir_pipeline("s_tir")
    return tvm.transform.Sequential(_passes()), lambda: tvm.transform.Sequential(last), of_device


tirx.register_tir_pipeline(_NAME, _pipeline)
