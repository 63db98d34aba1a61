"""What makes a node that TVM's importer does not take differ from one that it takes.

The answer is found by trying: the node is lowered again with one property of it changed at a time. This happens once,
for the message, after it is known that the node cannot be imported.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import onnx
import tvm
from onnx import helper

from souffle.errors import Refusal
from souffle.frontend.lowering import NodeInput, lower_node, single_node_model
from souffle.frontend.refusal import Obstacle, computed, data_dependent, formal_inputs

__all__ = ["diagnosed", "run_time_parameters"]

# Inputs by which ONNX's operators take what belongs to the program and not to its data.
_PARAMETER_NAMES = """
axes axis block_shape cond depth dft_length ends frame_length frame_step image_shape iou_threshold k
max_output_boxes_per_class num_mel_bins output_shape pads ratio repeats roi sample_rate scales score_threshold shape
size sizes split start starts step steps limit delta training_mode constant_value K M
"""
_PARAMETERS = frozenset(_PARAMETER_NAMES.split())
# Where the standard calls the shape by a name that other operators have for data.
_SHAPE_INPUTS = {"ConstantOfShape": "input"}
_USUAL_TYPES = ("float32", "int64", "int32", "bool")
_INTERNAL = re.compile(
    r"relax|tirx|\btvm|\bTVM|topi|struct_info|0x|object has no|has no attribute|Traceback|Error\b|\b[RT]\.|<class"
    r"|\.cc\b|\.py\b|::|Check failed|Assert|PrimFunc|Expr\b|\bVar\b|NoneType|unpack|argument|subscript|Got axis shape"
)


def diagnosed(
    node: onnx.NodeProto,
    inputs: Sequence[NodeInput | None],
    opsets: Sequence[onnx.OperatorSetIdProto],
    error: BaseException,
) -> Obstacle:
    """Why `node` is not imported.

    Parameters
    ----------
    node : NodeProto
    inputs : sequence
        As they were lowered.
    opsets : sequence of OperatorSetIdProto
    error : exception
        What lowering ended with.
    """
    if isinstance(error, tvm.error.OpNotImplemented):
        return _unknown(node)
    names = formal_inputs(node, opsets)
    run_time = [k for k, given in enumerate(inputs) if given is not None and given.value is None]
    parameters = [k for k in run_time if k < len(names) and _is_parameter(node, names[k])]
    given = [_with_any_value(form) if k in parameters else form for k, form in enumerate(inputs)]
    if not _has_static_result(node, given, opsets):
        names += [f"input {k}" for k in range(len(names), len(inputs))]
        return data_dependent([names[k] for k in run_time if k not in parameters])
    if parameters:
        return computed(*(names[k] for k in parameters))
    return _by_trial(node, inputs, opsets) or _plain(node, error)


def run_time_parameters(
    node: onnx.NodeProto, inputs: Sequence[NodeInput | None], opsets: Sequence[onnx.OperatorSetIdProto]
) -> list[str]:
    """The names of those inputs of `node` that the program depends on, and that have no value yet."""
    pairs = zip(formal_inputs(node, opsets), inputs, strict=False)
    return [name for name, form in pairs if form is not None and form.value is None and _is_parameter(node, name)]


def _with_any_value(form: NodeInput) -> NodeInput:
    return replace(form, value=np.ones(form.shape, dtype=form.dtype))


def _is_parameter(node: onnx.NodeProto, name: str) -> bool:
    return name in _PARAMETERS or _SHAPE_INPUTS.get(node.op_type) == name


def _unknown(node: onnx.NodeProto) -> Obstacle:
    if node.domain in ("", "ai.onnx"):
        return Obstacle(
            f"there is no tensor expression for {node.op_type} yet",
            "export the model with this part written in simpler operators, or end the network before it",
            refusal=Refusal.OPERATOR,
        )
    return Obstacle(
        f"operators of domain {node.domain!r} are not known, and the model holds no definition of {node.op_type}",
        f"define {node.op_type} by simpler operators in a local function of the model (its `functions`), or export "
        "with operators of domain ai.onnx",
        refusal=Refusal.OPERATOR,
    )


def _has_static_result(
    node: onnx.NodeProto, inputs: Sequence[NodeInput | None], opsets: Sequence[onnx.OperatorSetIdProto]
) -> bool:
    """Whether ONNX's own inference finds the shape of every output; also if it finds none of their ranks."""
    model = single_node_model(node, inputs, len(node.output), opsets)
    try:
        inferred = onnx.shape_inference.infer_shapes(model)
    except onnx.shape_inference.InferenceError:
        return True
    for output in inferred.graph.output:
        shape = output.type.tensor_type.shape
        if output.type.tensor_type.HasField("shape") and not all(dim.HasField("dim_value") for dim in shape.dim):
            return False
    return True


def _by_trial(
    node: onnx.NodeProto, inputs: Sequence[NodeInput | None], opsets: Sequence[onnx.OperatorSetIdProto]
) -> Obstacle | None:
    if len(node.output) > 1 and _lowers(node, inputs, 1, opsets):
        wanted = [name for name in node.output[1:] if name]
        return Obstacle(
            f"only the first of its outputs is supported, and the model has {', '.join(map(repr, wanted))} too",
            "export the model without the other outputs",
        )
    for position, name, kind in _unusual(node, inputs, opsets):
        usual = "float32" if np.dtype(kind).kind not in "iub" else "int64"
        changed = [
            replace(given, dtype=usual, value=None if given.value is None else given.value.astype(usual))
            if given is not None and given.dtype == kind
            else given
            for given in inputs
        ]
        if _lowers(node, changed, len(node.output), opsets):
            return Obstacle(
                f"{name or f'input {position}'} is {kind}, which this operator is not supported with",
                f"put a Cast to {usual} before the node and one back to {kind} behind it",
                refusal=Refusal.TYPE,
            )
    for attribute in node.attribute:
        plain = onnx.NodeProto()
        plain.CopyFrom(node)
        plain.attribute.remove(attribute)
        if _lowers(plain, inputs, len(node.output), opsets):
            value = helper.get_attribute_value(attribute)
            value = value.decode() if isinstance(value, bytes) else value
            return Obstacle(
                f"its attribute {attribute.name} = {value} is not supported",
                f"export the model with the default of {attribute.name}",
            )
    given = [k for k, form in enumerate(inputs) if form is not None]
    if len(given) > 1:
        without = [None if k == given[-1] else form for k, form in enumerate(inputs)]
        names = formal_inputs(node, opsets)
        if _lowers(node, without, len(node.output), opsets):
            name = names[given[-1]] if given[-1] < len(names) else f"input {given[-1]}"
            return Obstacle(f"its optional input {name!r} is not supported in this form", f"leave {name!r} out")
    return None


def _unusual(node, inputs, opsets) -> list[tuple[int, str, str]]:
    names = formal_inputs(node, opsets)
    kinds: dict[str, tuple[int, str, str]] = {}
    for k, given in enumerate(inputs):
        if given is not None and given.dtype not in _USUAL_TYPES:
            kinds.setdefault(given.dtype, (k, names[k] if k < len(names) else "", given.dtype))
    return list(kinds.values())


def _lowers(node, inputs, outputs: int, opsets) -> bool:
    try:
        lower_node(node, inputs, outputs, opsets)
    except Obstacle:
        return False
    return True


def _plain(node: onnx.NodeProto, error: BaseException) -> Obstacle:
    """No property of the node explains it: the importer's own words, where a user can read them."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    words = lines[-1].rstrip(".") if lines else ""
    if not words or len(words) > 160 or " " not in words or _INTERNAL.search(words):
        words = f"this form of {node.op_type} is not supported with these shapes, types and attributes"
    return Obstacle(
        words,
        f"export the model with another form of {node.op_type} or with simpler operators",
    )
