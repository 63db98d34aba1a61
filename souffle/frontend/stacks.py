"""Shape operators on stacks: applied to each piece, so that the stack need not be written as one tensor."""

from __future__ import annotations

from collections.abc import Sequence

import onnx

from souffle.frontend.attributes import attribute
from souffle.frontend.interpreter import Interpreter, special
from souffle.frontend.values import Known, Scope, Stacked, Value

__all__: list[str] = []


@special("Transpose")
def _transpose(interpreter: Interpreter, node: onnx.NodeProto, inputs: Sequence[Value], scope: Scope) -> list | None:
    stack = inputs[0]
    if not isinstance(stack, Stacked):
        return None
    order = list(attribute(node, "perm", range(len(stack.shape))[::-1]))
    inner = [axis - (axis > stack.axis) for axis in order if axis != stack.axis]
    pieces = stack.pieces
    if inner != sorted(inner):
        pieces = tuple(
            interpreter.emit("Transpose", [piece], f"{node.name}/t{k}", perm=inner)[0] for k, piece in enumerate(pieces)
        )
    return [Stacked(pieces, order.index(stack.axis), node.name)]


@special("Gather")
def _gather(interpreter: Interpreter, node: onnx.NodeProto, inputs: Sequence[Value], scope: Scope) -> list | None:
    stack, indices = inputs
    if not isinstance(stack, Stacked) or not isinstance(indices, Known) or not indices.array.size:
        return None
    if attribute(node, "axis", 0) % len(stack.shape) != stack.axis or indices.array.ndim > 1:
        return None
    if indices.array.ndim == 0:
        return [stack.pieces[int(indices.array)]]
    return [Stacked(tuple(stack.pieces[k] for k in indices.array.tolist()), stack.axis, node.name)]
