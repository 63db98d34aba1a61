"""Nodes that an operator is written with, where it is an expansion."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import helper

from souffle.frontend.interpreter import Interpreter
from souffle.frontend.values import Known, Value

__all__ = ["NodeWriter", "constant"]


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

    def cast(self, value: Value, dtype: str) -> Value:
        """`value` with elements of type `dtype`; itself where it has them."""
        if value.dtype == dtype:
            return value
        return self("Cast", value, to=int(helper.np_dtype_to_tensor_dtype(np.dtype(dtype))))
