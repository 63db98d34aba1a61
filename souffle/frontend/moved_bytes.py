"""Operators that put elements elsewhere and do not look at them: of the small element types they move the bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import onnx

from souffle.frontend.attributes import attribute
from souffle.frontend.refusal import Obstacle, version_of
from souffle.frontend.small_types import codes_of, is_small, standing_for, zero_code
from souffle.frontend.values import Coded, Known, Stacked, Value

__all__ = ["has_small_elements", "moved_as_bytes"]

_MOVING_NAMES = """
CenterCropPad Compress Concat DepthToSpace Dropout Expand Flatten Gather GatherElements GatherND OneHot Pad Reshape
ReverseSequence Scatter ScatterElements ScatterND Slice SpaceToDepth Split Squeeze TensorScatter Tile Transpose Trilu
Unsqueeze Where
"""
_MOVING_OPERATORS = frozenset(_MOVING_NAMES.split())


def has_small_elements(value: Value) -> bool:
    """Whether `value` is a tensor of a small element type."""
    return isinstance(value, Known | Coded | Stacked) and is_small(value.dtype)


def moved_as_bytes(
    node: onnx.NodeProto,
    inputs: Sequence[Value],
    opsets: Sequence[onnx.OperatorSetIdProto],
    run: Callable[[Sequence[Value]], Sequence[Value]],
) -> list[Value]:
    """The outputs of a node some inputs of which are of a small type.

    Parameters
    ----------
    node : NodeProto
    inputs : sequence
    opsets : sequence of OperatorSetIdProto
    run : callable
        Gives the outputs of `node` for other inputs.

    Raises
    ------
    Obstacle
        If the node computes with elements, or moves those of several types.
    """
    small = [position for position, value in enumerate(inputs) if has_small_elements(value)]
    kinds = sorted({inputs[position].dtype for position in small})
    if node.op_type not in _MOVING_OPERATORS or attribute(node, "reduction", b"none") != b"none" or len(kinds) > 1:
        raise Obstacle(
            f"it reads elements of type {' and '.join(kinds)}, which are only converted, quantized and moved here",
            "put a Cast to float32 or int32 before the node, and one back behind it",
        )
    (kind,) = kinds
    given = [codes_of(value) for value in inputs]
    padded = node.op_type == "Pad" and attribute(node, "mode", b"constant") == b"constant"
    if padded and len(given) > 1 and (len(given) == 2 or given[2] is None):
        given = [*given[:2], Known(np.array(zero_code(kind), np.uint8), "zero"), *given[3:]]
    outputs = run(given)
    schema = onnx.defs.get_schema(node.op_type, version_of("", opsets), "")
    types = {schema.inputs[min(position, len(schema.inputs) - 1)].type_str for position in small}
    results = [schema.outputs[min(k, len(schema.outputs) - 1)].type_str for k in range(len(outputs))]
    return [
        standing_for(value, kind) if result in types else value for value, result in zip(outputs, results, strict=True)
    ]
