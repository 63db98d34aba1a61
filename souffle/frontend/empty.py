"""Operators on tensors without elements, where neither TVM nor ONNX's reference implementation gives the result."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx

from souffle.frontend.attributes import attribute
from souffle.frontend.interpreter import Interpreter, special
from souffle.frontend.values import Known, Scope, Value

__all__: list[str] = []


@special("Split")
def _split(interpreter: Interpreter, node: onnx.NodeProto, inputs: Sequence[Value], scope: Scope) -> list[Value] | None:
    """A split with parts that have no elements; TVM wants parts to begin at different places."""
    given = inputs[1] if len(inputs) > 1 else None
    if given is not None and not isinstance(given, Known):
        return None
    sizes = attribute(node, "split", []) if given is None else given.array.reshape(-1).tolist()
    if 0 not in sizes:
        return None
    data, parts = interpreter.whole(inputs[0]), []
    axis = attribute(node, "axis", 0) % len(data.shape)
    start = 0
    for position, size in enumerate(sizes):
        bounds = [Known(np.array([value], dtype="int64"), "bound") for value in (start, start + size, axis)]
        parts.extend(interpreter.emit("Slice", [data, *bounds], f"{node.name}/part{position}"))
        start += size
    return parts
