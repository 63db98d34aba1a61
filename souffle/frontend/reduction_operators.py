"""Reductions written with other operators, where TVM gives another result for infinities or for no axis."""

from __future__ import annotations

import math
from collections.abc import Sequence

import ml_dtypes
import numpy as np
import onnx
from onnx import TensorProto

from souffle.frontend.attributes import attribute
from souffle.frontend.interpreter import Interpreter, special
from souffle.frontend.node_writer import NodeWriter, constant
from souffle.frontend.refusal import version_of
from souffle.frontend.values import Known, Scope, Value
from souffle.program import Tensor

__all__: list[str] = []

_MOST_TERMS = float(ml_dtypes.finfo("float16").max)
"""So many numbers up to 1 have a sum in half precision."""


@special("ReduceMax", "ReduceMin")
def _reduce_extreme(
    interpreter: Interpreter, node: onnx.NodeProto, inputs: Sequence[Value], scope: Scope
) -> Sequence[Value] | None:
    x = interpreter.whole(inputs[0])
    if isinstance(x, Known):
        return None
    write = NodeWriter(interpreter, node)
    if x.dtype == "bool":
        numbers = write("Cast", x, to=TensorProto.INT32)
        reduced = interpreter.primitive(node, [numbers, *inputs[1:]], scope.opsets)
        return [write("Cast", reduced[0], to=TensorProto.BOOL)]
    if x.dtype != "bfloat16":
        return None
    # TVM starts from the largest finite number, so that a row of infinities (a mask) would not give infinity.
    (reduced,) = interpreter.primitive(node, [x, *inputs[1:]], scope.opsets)
    low = node.op_type == "ReduceMax"
    kind = ml_dtypes.finfo(x.dtype)
    limit, compare = (kind.min, "LessOrEqual") if low else (kind.max, "GreaterOrEqual")
    beyond = constant(-np.inf if low else np.inf, x.dtype)
    return [write("Where", write(compare, reduced, constant(limit, x.dtype)), beyond, reduced)]


def _reduced_axes(interpreter: Interpreter, node: onnx.NodeProto, inputs: Sequence[Value]) -> list[int] | None:
    """Which axes a reduction takes; ``None`` if they are computed at run time."""
    given = inputs[1] if len(inputs) > 1 else None
    if isinstance(given, Tensor):
        return None
    axes = attribute(node, "axes", ()) if given is None else interpreter.whole(given).array.tolist()
    rank = len(inputs[0].shape)
    if not axes and attribute(node, "noop_with_empty_axes", 0):
        return []
    return sorted(axis % rank for axis in axes) or list(range(rank))


_OF_ONE_ELEMENT = {
    "ReduceL1": ("Abs", 1),
    "ReduceL2": ("Abs", 1),
    "ReduceLogSum": ("Log", 1),
    "ReduceSumSquare": ("Mul", 2),
}
"""What a reduction over no axis does to an element: an operator, and how many times it takes the element."""


@special(*_OF_ONE_ELEMENT)
def _reduce_nothing(
    interpreter: Interpreter, node: onnx.NodeProto, inputs: Sequence[Value], scope: Scope
) -> list[Value] | None:
    """What stands around the sum is computed also where no axis is summed over, which TVM leaves out."""
    x = interpreter.whole(inputs[0])
    if node.op_type == "ReduceLogSum" and "int" in x.dtype and not isinstance(x, Known):
        return _logarithm_of_sum(interpreter, node, x, _reduced_axes(interpreter, node, inputs))
    if not attribute(node, "noop_with_empty_axes", 0) or _reduced_axes(interpreter, node, inputs) != []:
        return None
    operator, times = _OF_ONE_ELEMENT[node.op_type]
    return [NodeWriter(interpreter, node)(operator, *[inputs[0]] * times)]


def _logarithm_of_sum(
    interpreter: Interpreter, node: onnx.NodeProto, x: Value, axes: Sequence[int] | None
) -> list[Value] | None:
    """Of integers: there is a logarithm of floating-point numbers alone, and what is behind the point is cut off."""
    if axes is None:
        return None
    write = NodeWriter(interpreter, node)
    total = write("Cast", x, to=TensorProto.DOUBLE)
    if axes:
        total = write("ReduceSum", total, constant(axes, "int64"), keepdims=attribute(node, "keepdims", 1))
    return [write("Cast", write("Log", total), to=onnx.helper.np_dtype_to_tensor_dtype(np.dtype(x.dtype)))]


@special("ReduceLogSumExp")
def _reduce_log_sum_exp(
    interpreter: Interpreter, node: onnx.NodeProto, inputs: Sequence[Value], scope: Scope
) -> list[Value] | None:
    x, axes = interpreter.whole(inputs[0]), _reduced_axes(interpreter, node, inputs)
    if isinstance(x, Known) or not x.dtype.startswith(("float", "bfloat")) or axes is None:
        return None
    write = NodeWriter(interpreter, node)
    largest = write("ReduceMax", x, axes=axes, keepdims=1) if axes else x
    # The distance of an infinity from itself is NaN; infinities need no shift.
    infinite = write("Equal", write("Abs", largest), constant(np.inf, x.dtype))
    shift = write("Where", infinite, constant(0, x.dtype), largest)
    terms = write("Exp", write("Sub", x, shift))
    total = write("ReduceSum", terms, constant(axes, "int64"), keepdims=1) if axes else terms
    result = write("Add", write("Log", total), shift)
    if attribute(node, "keepdims", 1):
        return [result]
    kept = [extent for axis, extent in enumerate(x.shape) if axis not in axes]
    return [write("Reshape", result, constant(kept, "int64"))]


@special("Softmax", "LogSoftmax")
def _softmax(
    interpreter: Interpreter, node: onnx.NodeProto, inputs: Sequence[Value], scope: Scope
) -> Sequence[Value] | None:
    x = inputs[0]
    if x.dtype != "float16" or not x.shape:
        return None
    # Once over all elements from the axis on, and not over those along it.
    once = version_of("", scope.opsets) < 13
    axis = attribute(node, "axis", 1 if once else -1) % len(x.shape)
    terms = math.prod(x.shape[axis:]) if once else x.shape[axis]
    return interpreter.in_single_precision(node, inputs, scope) if terms > _MOST_TERMS else None


@special("ReduceMean")
def _reduce_mean(
    interpreter: Interpreter, node: onnx.NodeProto, inputs: Sequence[Value], scope: Scope
) -> list[Value] | None:
    x = interpreter.whole(inputs[0])
    if isinstance(x, Known):
        if x.array.size:
            return None
        # The mean of no elements is undefined in ONNX; it is 0, as in ONNX Runtime.
        (mean,) = interpreter.primitive(node, inputs, scope.opsets)
        return [Known(np.zeros(mean.shape, dtype=mean.dtype), node.name)]
    axes = _reduced_axes(interpreter, node, inputs)
    if axes is None or "int" not in x.dtype:
        return None
    if not axes:
        return [x]
    # TVM gives the mean of integers another type, and rounds it down; ONNX Runtime divides as integers are divided.
    write = NodeWriter(interpreter, node)
    wide = write("Cast", x, to=TensorProto.INT64)
    total = write("ReduceSum", wide, constant(axes, "int64"), keepdims=attribute(node, "keepdims", 1))
    mean = write("Div", total, constant(math.prod(x.shape[axis] for axis in axes), "int64"))
    return [write("Cast", mean, to=onnx.helper.np_dtype_to_tensor_dtype(np.dtype(x.dtype)))]
