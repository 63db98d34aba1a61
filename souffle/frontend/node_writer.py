"""Nodes that an operator is written with, where it is an expansion."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx
from onnx import TensorProto

from souffle.frontend.interpreter import Interpreter
from souffle.frontend.values import Known, Value

__all__ = ["NodeWriter", "constant", "in_single_precision"]


def constant(value, dtype: str) -> Known:
    """A value of an expansion."""
    return Known(np.array(value, dtype=dtype), "constant")


class NodeWriter:
    """Writes nodes whose names begin with that of the node they stand for."""

    def __init__(self, interpreter: Interpreter, node: onnx.NodeProto):
        self.interpreter = interpreter
        self.name = node.name

    def __call__(self, operator: str, *inputs: Value, **attributes) -> Value:
        return self.interpreter.emit(operator, list(inputs), f"{self.name}/{operator}", **attributes)[0]


def in_single_precision(
    interpreter: Interpreter, node: onnx.NodeProto, inputs: Sequence[Value], **attributes
) -> list[Value] | None:
    """What a node of 16-bit floating-point numbers gives if it computes in float32; ``None`` for one of others.

    Its attributes are the node's where none are given.
    """
    x = interpreter.whole(inputs[0])
    if x.dtype not in ("float16", "bfloat16"):
        return None
    write = NodeWriter(interpreter, node)
    attributes = attributes or {known.name: onnx.helper.get_attribute_value(known) for known in node.attribute}
    operands = [
        write("Cast", value, to=TensorProto.FLOAT) if value is not None and value.dtype == x.dtype else value
        for value in inputs
    ]
    wide = write(node.op_type, *operands, **attributes)
    return [write("Cast", wide, to=onnx.helper.np_dtype_to_tensor_dtype(np.dtype(x.dtype)))]
