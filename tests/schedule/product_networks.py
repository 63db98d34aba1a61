"""Networks of two products, as kernels for tensor cores."""

from __future__ import annotations

import onnx

import souffle
from souffle.codegen.assemble import CompiledKernels
from souffle.models.builder import GraphBuilder
from souffle.pipeline import compile_cuda


def product(rows: int, columns: int, inner: int) -> onnx.ModelProto:
    b = GraphBuilder("product", seed=3)
    x = b.input("x", (rows, 24))
    x = b.node("Relu", b.node("MatMul", x, b.parameter("first", b.normal((24, inner), 0.2))))
    y = b.node("MatMul", x, b.parameter("second", b.normal((inner, columns), inner**-0.5)))
    b.output(b.node("Relu", y), "result", (rows, columns))
    return b.model()


def compiled(model: onnx.ModelProto, precision: str = "mixed", **options: object) -> CompiledKernels:
    chosen = {"precision": precision, "cubin": False, "arch": "sm_80", "reductions": "one_phase", "level": "V3"}
    return compile_cuda(souffle.import_onnx(model), **(chosen | options))
