"""Evaluation of one ONNX node whose inputs are all known, by ONNX's reference implementation."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence

import numpy as np
import onnx
from onnx import helper, numpy_helper, shape_inference
from onnx.reference import ReferenceEvaluator

__all__ = ["empty_outputs", "evaluate_node"]

_FAILURES = (ArithmeticError, AttributeError, LookupError, NotImplementedError, RuntimeError, TypeError, ValueError)


def evaluate_node(
    node: onnx.NodeProto,
    inputs: Sequence[np.ndarray | None],
    opset_imports: Sequence[onnx.OperatorSetIdProto],
) -> list[np.ndarray] | None:
    """The outputs of `node`, or ``None`` where the reference implementation does not know it.

    Parameters
    ----------
    node : NodeProto
        Of a deterministic operator without sub-graphs.
    inputs : sequence of arrays
        One for each input; ``None`` for an absent one.
    """
    single = onnx.NodeProto()
    single.CopyFrom(node)
    del single.input[:]
    del single.output[:]
    feeds = {f"i{k}": array for k, array in enumerate(inputs) if array is not None}
    single.input.extend("" if array is None else f"i{k}" for k, array in enumerate(inputs))
    single.output.extend(f"o{k}" if name else "" for k, name in enumerate(node.output))
    wanted = [name for name in single.output if name]
    values = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype), array.shape)
        for name, array in feeds.items()
    ]
    graph = helper.make_graph([single], "node", values, [helper.make_empty_tensor_value_info(name) for name in wanted])
    try:
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")
            model = helper.make_model(graph, opset_imports=opset_imports)
            results = dict(zip(wanted, ReferenceEvaluator(model).run(wanted, feeds), strict=True))
    except _FAILURES:
        return None
    outputs = {name: np.asarray(results[name]) for name in wanted}
    if not _has_the_inferred_types(model, outputs):
        return None
    return [outputs[name] if name else None for name in single.output]


def _has_the_inferred_types(model: onnx.ModelProto, outputs: Mapping[str, np.ndarray]) -> bool:
    """Whether the reference implementation gave what ONNX's shape inference says, as its global pooling does not."""
    try:
        inferred = shape_inference.infer_shapes(model)
    except (shape_inference.InferenceError, *_FAILURES):
        return True
    for info in inferred.graph.output:
        tensor, array = info.type.tensor_type, outputs[info.name]
        if tensor.elem_type and helper.tensor_dtype_to_np_dtype(tensor.elem_type) != array.dtype:
            return False
        if tensor.HasField("shape"):
            extents = [dim.dim_value if dim.HasField("dim_value") else None for dim in tensor.shape.dim]
            if len(extents) != array.ndim or any(e not in (None, n) for e, n in zip(extents, array.shape, strict=True)):
                return False
    return True


def empty_outputs(
    node: onnx.NodeProto,
    inputs: Sequence[tuple[tuple[int, ...], str, np.ndarray | None] | None],
    opset_imports: Sequence[onnx.OperatorSetIdProto],
) -> list[np.ndarray | None] | None:
    """The outputs of `node` where ONNX's shape inference finds that none of them has an element, else ``None``.

    Parameters
    ----------
    node : NodeProto
        Without sub-graphs.
    inputs : sequence of (shape, type, value)
        One for each input, without the value where that is not known; ``None`` for an absent one.
    """
    single = onnx.NodeProto()
    single.CopyFrom(node)
    del single.input[:]
    del single.output[:]
    single.input.extend("" if given is None else f"i{k}" for k, given in enumerate(inputs))
    single.output.extend(f"o{k}" if name else "" for k, name in enumerate(node.output))
    infos, initializers = [], []
    for name, given in zip(single.input, inputs, strict=True):
        if given is None:
            continue
        shape, dtype, value = given
        infos.append(helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(np.dtype(dtype)), shape))
        if value is not None:
            initializers.append(numpy_helper.from_array(value, name))
    wanted = [name for name in single.output if name]
    results = [helper.make_empty_tensor_value_info(name) for name in wanted]
    graph = helper.make_graph([single], "node", infos, results, initializers)
    try:
        inferred = shape_inference.infer_shapes(
            helper.make_model(graph, opset_imports=opset_imports), strict_mode=True, data_prop=True
        )
    except (shape_inference.InferenceError, *_FAILURES):
        return None
    arrays: dict[str, np.ndarray] = {}
    for info in inferred.graph.output:
        tensor = info.type.tensor_type
        shape = [dim.dim_value if dim.HasField("dim_value") else -1 for dim in tensor.shape.dim]
        if not tensor.HasField("shape") or 0 not in shape or -1 in shape:
            return None
        arrays[info.name] = np.zeros(shape, dtype=helper.tensor_dtype_to_np_dtype(tensor.elem_type))
    return [arrays[name] if name else None for name in single.output]
