"""Convolutions where TVM multiplies by zeros that ONNX does not have, of which infinities make NaN."""

from __future__ import annotations

import math
from collections.abc import Sequence

import onnx
from tvm import te, tirx

from souffle.frontend.attributes import attribute
from souffle.frontend.custom import NodeOperands, defines
from souffle.tvm_compat import PrimExpr

__all__: list[str] = []


@defines("ConvTranspose")
def _dilated_transposed_convolution(node: onnx.NodeProto, operands: NodeOperands) -> list[te.Tensor] | None:
    """Each element of the result takes those of the input that reach it, and nothing in between."""
    shape, filters = operands.shape(0), operands.shape(1)
    extents, kernel, rank = shape[2:], filters[2:], len(shape) - 2
    dilations = attribute(node, "dilations", [1] * rank)
    if all(dilation == 1 for dilation in dilations):
        return None
    strides, pads = attribute(node, "strides", [1] * rank), attribute(node, "pads", [0] * 2 * rank)
    extra, groups = attribute(node, "output_padding", [0] * rank), attribute(node, "group", 1)
    results = [
        strides[k] * (extents[k] - 1) + extra[k] + (kernel[k] - 1) * dilations[k] + 1 - pads[k] - pads[rank + k]
        for k in range(rank)
    ]
    if math.prod(results) < 1 or min(results) < 1:
        return None
    x, w, bias = operands.tensor(0), operands.tensor(1), operands.tensor(2)
    inputs, outputs = shape[1] // groups, filters[1]
    channel = te.reduce_axis((0, inputs), name="c")
    taps = [te.reduce_axis((0, extent), name=f"k{k}") for k, extent in enumerate(kernel)]
    zero = tirx.const(0, operands.dtype(0))

    def total(n: PrimExpr, m: PrimExpr, *at: PrimExpr) -> PrimExpr:
        reached = [
            (position + pad - tap * dilation, stride, extent)
            for position, pad, tap, dilation, stride, extent in zip(
                at, pads[:rank], taps, dilations, strides, extents, strict=True
            )
        ]
        inside = tirx.all(*(condition for index in reached for condition in _reaches(*index)))
        source = tirx.floordiv(m, outputs) * inputs + channel
        value = x(n, source, *(tirx.floordiv(index, stride) for index, stride, _ in reached))
        weight = w(source, tirx.floormod(m, outputs), *taps)
        return te.sum(tirx.if_then_else(inside, value * weight, zero), axis=[channel, *taps])

    result = te.compute((shape[0], outputs * groups, *results), total, name="conv_transpose")
    if bias is None:
        return [result]
    return [te.compute(result.shape, lambda n, m, *at: result(n, m, *at) + bias(m), name="bias")]


def _reaches(index: PrimExpr, stride: int, extent: int) -> Sequence[PrimExpr]:
    conditions = [index >= 0, index < stride * extent]
    return conditions if stride == 1 else [*conditions, tirx.EQ(tirx.floormod(index, stride), 0)]
