"""ONNX operators that need no TE: constants, shapes, identities, control flow with known conditions, sequences."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import onnx
from onnx import helper, numpy_helper

from souffle.errors import Refusal
from souffle.frontend.attributes import attribute
from souffle.frontend.interpreter import BUILDER_OPSETS, Interpreter, special
from souffle.frontend.refusal import Obstacle, computed
from souffle.frontend.values import Known, Scope, Stacked, Value

__all__ = ["reshaped"]


@special("Constant")
def _constant(interpreter: Interpreter, node: onnx.NodeProto, inputs: Sequence[Value], scope: Scope) -> list[Value]:
    given = node.attribute[0]
    value = helper.get_attribute_value(given)
    if given.name == "value":
        array = numpy_helper.to_array(value)
    elif given.name in ("value_float", "value_floats"):
        array = np.array(value, dtype="float32")
    elif given.name in ("value_int", "value_ints"):
        array = np.array(value, dtype="int64")
    else:
        kind = {"sparse_value": "a sparse tensor"}.get(given.name, "text")
        refusal = Refusal.FORM if given.name == "sparse_value" else Refusal.TEXT
        words = f"its value is {kind} (attribute {given.name})"
        raise Obstacle(words, "give it as a dense tensor of numbers", refusal=refusal)
    return [Known(array, node.name)]


@special("Shape")
def _shape(interpreter: Interpreter, node: onnx.NodeProto, inputs: Sequence[Value], scope: Scope) -> list[Value]:
    shape = inputs[0].shape
    part = shape[slice(attribute(node, "start", 0), attribute(node, "end", len(shape)))]
    return [Known(np.array(part, dtype="int64"), node.name)]


@special("Size")
def _size(interpreter: Interpreter, node: onnx.NodeProto, inputs: Sequence[Value], scope: Scope) -> list[Value]:
    return [Known(np.array(int(np.prod(inputs[0].shape)), dtype="int64"), node.name)]


@special("Identity")
def _identity(interpreter: Interpreter, node: onnx.NodeProto, inputs: Sequence[Value], scope: Scope) -> list[Value]:
    return [inputs[0]]


def reshaped(interpreter: Interpreter, node: onnx.NodeProto, value: Value, shape: Sequence[int]) -> Value:
    """`value` in another shape; `value` itself, or what it was itself reshaped from, where that will do."""
    shape = tuple(int(extent) for extent in shape)
    if value.shape == shape:
        return value
    if isinstance(value, Known):
        return Known(value.array.reshape(shape), value.name)
    source = interpreter.reshaped_from.get(value, value)
    if source.shape == shape:
        return source
    target = Known(np.array(shape, dtype="int64"), f"{node.name}_shape")
    (result,) = interpreter.primitive(_renamed(node, "Reshape"), [source, target], BUILDER_OPSETS)
    interpreter.reshaped_from[result] = source
    return result


def _renamed(node: onnx.NodeProto, operator: str) -> onnx.NodeProto:
    return helper.make_node(operator, ["data", "shape"], ["reshaped"], name=node.name)


def _axes(node: onnx.NodeProto, inputs: Sequence[Value]) -> list[int] | None:
    axes = attribute(node, "axes")
    if axes is not None or len(inputs) < 2 or inputs[1] is None:
        return axes
    if not isinstance(inputs[1], Known):
        raise computed("axes")
    return [int(axis) for axis in inputs[1].array.reshape(-1)]


@special("Reshape")
def _reshape(
    interpreter: Interpreter, node: onnx.NodeProto, inputs: Sequence[Value], scope: Scope
) -> list[Value] | None:
    value = inputs[0]
    if len(inputs) == 1:
        wanted = attribute(node, "shape")
    elif isinstance(inputs[1], Known):
        wanted = inputs[1].array.reshape(-1).tolist()
    else:
        raise computed("shape")
    keep_zero = attribute(node, "allowzero", 0)
    shape = [value.shape[k] if extent == 0 and not keep_zero else extent for k, extent in enumerate(wanted)]
    if -1 in shape:
        rest = math.prod(extent for extent in shape if extent != -1)
        shape[shape.index(-1)] = math.prod(value.shape) // rest if rest else 0
    if math.prod(shape) != math.prod(value.shape):
        raise Obstacle(
            f"it makes {list(shape)} of {list(value.shape)}, which has another number of elements",
            "give a shape that fits, with -1 for one extent that follows from the others; where it holds a batch size, "
            "export the model with that batch",
        )
    if isinstance(value, Stacked):
        before = math.prod(value.shape[: value.axis])
        for axis, extent in enumerate(shape):
            if extent == len(value.pieces) and math.prod(shape[:axis]) == before:
                return [_stack_reshaped(interpreter, node, value, shape[:axis] + shape[axis + 1 :], axis)]
    return [reshaped(interpreter, node, interpreter.whole(value), shape)]


@special("Flatten")
def _flatten(interpreter: Interpreter, node: onnx.NodeProto, inputs: Sequence[Value], scope: Scope) -> list[Value]:
    value = interpreter.whole(inputs[0])
    axis = attribute(node, "axis", 1)
    axis = axis + len(value.shape) if axis < 0 else axis
    return [reshaped(interpreter, node, value, (math.prod(value.shape[:axis]), math.prod(value.shape[axis:])))]


@special("Squeeze")
def _squeeze(interpreter: Interpreter, node: onnx.NodeProto, inputs: Sequence[Value], scope: Scope) -> list[Value]:
    value = inputs[0]
    axes = _axes(node, inputs)
    if axes is None:
        axes = [k for k, extent in enumerate(value.shape) if extent == 1]
    dropped = {axis % len(value.shape) for axis in axes} if value.shape else set()
    shape = [extent for k, extent in enumerate(value.shape) if k not in dropped]
    if isinstance(value, Stacked) and value.axis not in dropped:
        axis = value.axis - sum(k < value.axis for k in dropped)
        return [_stack_reshaped(interpreter, node, value, shape[:axis] + shape[axis + 1 :], axis)]
    return [reshaped(interpreter, node, interpreter.whole(value), shape)]


@special("Unsqueeze")
def _unsqueeze(interpreter: Interpreter, node: onnx.NodeProto, inputs: Sequence[Value], scope: Scope) -> list[Value]:
    value = interpreter.whole(inputs[0])
    axes = _axes(node, inputs) or []
    rank = len(value.shape) + len(axes)
    added = {axis % rank for axis in axes}
    old = iter(value.shape)
    return [reshaped(interpreter, node, value, [1 if k in added else next(old) for k in range(rank)])]


def _stack_reshaped(
    interpreter: Interpreter, node: onnx.NodeProto, stack: Stacked, shape: Sequence[int], axis: int
) -> Stacked:
    pieces = []
    for k, piece in enumerate(stack.pieces):
        part = onnx.NodeProto(name=f"{node.name}/t{k}")
        pieces.append(reshaped(interpreter, part, piece, shape))
    return Stacked(tuple(pieces), axis, node.name)
