"""Reductions written with other operators, where TVM gives another result for infinities or for no axis."""

from __future__ import annotations

from collections.abc import Sequence

import ml_dtypes
import numpy as np
import onnx
from onnx import TensorProto

from souffle.frontend.attributes import attribute
from souffle.frontend.interpreter import Interpreter, special
from souffle.frontend.node_writer import NodeWriter, constant
from souffle.frontend.values import Known, Scope, Value
from souffle.program import Tensor

__all__: list[str] = []


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
    axes = inputs[1] if len(inputs) > 1 else None
    if not attribute(node, "noop_with_empty_axes", 0) or (axes is not None and not _is_empty(interpreter, axes)):
        return None
    operator, times = _OF_ONE_ELEMENT[node.op_type]
    return [NodeWriter(interpreter, node)(operator, *[inputs[0]] * times)]


def _is_empty(interpreter: Interpreter, axes: Value) -> bool:
    whole = interpreter.whole(axes)
    return isinstance(whole, Known) and not whole.array.size


@special("ReduceLogSumExp")
def _reduce_log_sum_exp(
    interpreter: Interpreter, node: onnx.NodeProto, inputs: Sequence[Value], scope: Scope
) -> list[Value] | None:
    x = interpreter.whole(inputs[0])
    given = inputs[1] if len(inputs) > 1 else None
    if isinstance(x, Known) or not x.dtype.startswith(("float", "bfloat")) or isinstance(given, Tensor):
        return None
    axes = attribute(node, "axes", ()) if given is None else interpreter.whole(given).array.tolist()
    if not axes and attribute(node, "noop_with_empty_axes", 0):
        return [x]
    axes = sorted(axis % len(x.shape) for axis in axes) or list(range(len(x.shape)))
    write = NodeWriter(interpreter, node)
    largest = write("ReduceMax", x, axes=axes, keepdims=1) if axes else x
    # The distance of an infinity from itself is NaN; infinities need no shift.
    shift = write("Where", write("IsInf", largest), constant(0, x.dtype), largest)
    terms = write("Exp", write("Sub", x, shift))
    total = write("ReduceSum", terms, constant(axes, "int64"), keepdims=1) if axes else terms
    result = write("Add", write("Log", total), shift)
    if attribute(node, "keepdims", 1):
        return [result]
    kept = [extent for axis, extent in enumerate(x.shape) if axis not in axes]
    return [write("Reshape", result, constant(kept, "int64"))]
