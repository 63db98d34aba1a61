"""Pooling where TVM has another shape or another sum than ONNX."""

from __future__ import annotations

import math
from collections.abc import Sequence

import onnx

from souffle.frontend.attributes import attribute, sides
from souffle.frontend.interpreter import Interpreter, special
from souffle.frontend.node_writer import NodeWriter, constant
from souffle.frontend.refusal import Obstacle
from souffle.frontend.values import Scope, Value

__all__ = ["same_pads", "windows"]


def windows(node: onnx.NodeProto, shape: Sequence[int]) -> tuple[list[int], list[int], list[int]]:
    """Kernel, strides and dilations along each dimension of space."""
    kernel = list(attribute(node, "kernel_shape"))
    ones = [1] * (len(shape) - 2)
    return kernel, list(attribute(node, "strides", ones)), list(attribute(node, "dilations", ones))


def same_pads(auto_pad: str, extents: Sequence[int], spans: Sequence[int], strides: Sequence[int]) -> list[int]:
    """Pads before all dimensions, then after, so that there are ``ceil(extent / stride)`` windows of each span."""
    windows = zip(extents, spans, strides, strict=True)
    return sides(auto_pad, [max(0, (-(-x // stride) - 1) * stride + span - x) for x, span, stride in windows])


@special("AveragePool")
def _average_pool(
    interpreter: Interpreter, node: onnx.NodeProto, inputs: Sequence[Value], scope: Scope
) -> Sequence[Value] | None:
    _refuse_what_does_not_fit(node, inputs[0].shape)
    return None


def _refuse_what_does_not_fit(node: onnx.NodeProto, shape: Sequence[int]) -> None:
    """ONNX's formula gives no window then, or one that ends outside, as one divides."""
    kernel, _, dilations = windows(node, shape)
    rank = len(kernel)
    if attribute(node, "auto_pad", b"NOTSET") in (b"SAME_UPPER", b"SAME_LOWER"):
        return
    pads = attribute(node, "pads", [0] * 2 * rank)
    for axis, (size, dilation, extent) in enumerate(zip(kernel, dilations, shape[2:], strict=True)):
        span, room = (size - 1) * dilation + 1, extent + pads[axis] + pads[rank + axis]
        if extent and span > room:
            raise Obstacle(
                f"its window of {span} is larger than the {room} elements that it slides over in dimension {axis + 2}",
                "give it a smaller kernel_shape, or larger pads",
            )


@special("MaxPool")
def _max_pool(
    interpreter: Interpreter, node: onnx.NodeProto, inputs: Sequence[Value], scope: Scope
) -> Sequence[Value] | None:
    _refuse_what_does_not_fit(node, inputs[0].shape)
    auto = attribute(node, "auto_pad", b"NOTSET").decode()
    if auto not in ("SAME_UPPER", "SAME_LOWER") or any(list(node.output)[1:]):
        return None
    # TVM has one window less for SAME_LOWER where the stride does not divide the extent.
    kernel, strides, dilations = windows(node, inputs[0].shape)
    spans = [(k - 1) * d + 1 for k, d in zip(kernel, dilations, strict=True)]
    pads = same_pads(auto, inputs[0].shape[2:], spans, strides)
    return interpreter.emit(
        "MaxPool",
        list(inputs),
        f"{node.name}/MaxPool",
        kernel_shape=kernel,
        strides=strides,
        dilations=dilations,
        pads=pads,
    )


@special("LpPool")
def _lp_pool(interpreter: Interpreter, node: onnx.NodeProto, inputs: Sequence[Value], scope: Scope) -> list[Value]:
    _refuse_what_does_not_fit(node, inputs[0].shape)
    write, x = NodeWriter(interpreter, node), inputs[0]
    kernel, strides, dilations = windows(node, x.shape)
    rank, extents, order = len(kernel), x.shape[2:], attribute(node, "p", 2)
    auto = attribute(node, "auto_pad", b"NOTSET").decode()
    pads = list(attribute(node, "pads", [0] * 2 * rank)) if auto == "NOTSET" else [0] * 2 * rank
    if auto in ("SAME_UPPER", "SAME_LOWER"):
        # As ONNX Runtime does, which pads for a window that is not dilated.
        pads = same_pads(auto, extents, kernel, strides)
    for axis in range(rank):
        span = (kernel[axis] - 1) * dilations[axis] + 1
        extent = extents[axis] + pads[axis] + pads[rank + axis]
        if attribute(node, "ceil_mode", 0):
            count = -(-(extent - span) // strides[axis]) + 1
            # A window that would begin after the data and what is before it is none.
            count -= (count - 1) * strides[axis] >= extents[axis] + pads[axis]
            pads[rank + axis] += max(0, (count - 1) * strides[axis] + span - extent)
    powers = write("Abs", x)
    powers = write("Pow", powers, constant(order, x.dtype)) if order != 1 else powers
    if any(pads):
        amounts = [0, 0, *pads[:rank], 0, 0, *pads[rank:]]
        powers = write("Pad", powers, constant(amounts, "int64"), constant(0, x.dtype))
    # TVM's sum is its mean times the window's size, which is not the sum of a window that ends outside.
    mean = write("AveragePool", powers, kernel_shape=kernel, strides=strides, dilations=dilations)
    total = write("Mul", mean, constant(math.prod(kernel), x.dtype))
    if order != 1:
        total = write("Sqrt", total) if order == 2 else write("Pow", total, constant(1 / order, x.dtype))
    return [total]
