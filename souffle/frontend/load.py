"""Reads and checks an ONNX model, and fixes its open dimensions."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
from google.protobuf.message import DecodeError
from onnx import helper, numpy_helper

from souffle.errors import ModelError, OptionError
from souffle.frontend.naming import identifier
from souffle.frontend.readers import Readers, declared_type
from souffle.program import ELEMENT_TYPES

__all__ = ["LoadedModel", "load_model"]


@dataclass(frozen=True, eq=False)
class LoadedModel:
    """A checked model whose inputs have static shapes.

    Attributes
    ----------
    name : str
    nodes : tuple of NodeProto
    initializers : dict of str to array
    inputs : tuple of (name, shape, dtype)
        Without those that are initializers.
    outputs : tuple of str
    opsets : tuple of OperatorSetIdProto
    functions : dict of (domain, operator) to FunctionProto
        The model's own functions.
    """

    name: str
    nodes: tuple[onnx.NodeProto, ...]
    initializers: dict[str, np.ndarray]
    inputs: tuple[tuple[str, tuple[int, ...], str], ...]
    outputs: tuple[str, ...]
    opsets: tuple[onnx.OperatorSetIdProto, ...]
    functions: dict[tuple[str, str], onnx.FunctionProto]


_CONVERSION = "convert it to float32, float16, bfloat16 or integers of 8 bits and more"
_CONVERSIONS = {onnx.TensorProto.STRING: "encode text as numbers"}
_RUNTIME_DOMAIN, _RUNTIME_OPERATORS = "com.microsoft", frozenset({"SimplifiedLayerNormalization"})
_ELEMENT_TYPES = frozenset(helper.np_dtype_to_tensor_dtype(np.dtype(name)) for name in ELEMENT_TYPES)


def load_model(model: str | os.PathLike | bytes | onnx.ModelProto, batch: int | None) -> LoadedModel:
    """Read `model`, check it, and fix its first dimensions to `batch`.

    Raises
    ------
    OptionError
        If `batch` is no positive number, or the model has no open dimension that it could fix.
    ModelError
        Naming the file and what is wrong with it.
    """
    proto, folder, where = _read(model)
    graph = proto.graph
    if not graph.node and not graph.output:
        raise ModelError(f"{where} is not an ONNX model: it has no graph")
    if not proto.opset_import:
        raise ModelError(f"{where} is not a valid ONNX model: it names no operator sets (opset_import)")
    _check(proto, where)
    readers = Readers.of(proto)
    if graph.sparse_initializer:
        name = graph.sparse_initializer[0].values.name
        raise ModelError(
            f"{where}: initializer {name!r}{readers.of_value(name)} is sparse; export the model with dense weights"
        )
    if batch is not None and batch < 1:
        raise OptionError(f"batch is {batch}; it must be at least 1")
    initializers = {}
    for tensor in graph.initializer:
        try:
            initializers[tensor.name] = numpy_helper.to_array(tensor, folder or "")
        except (OSError, ValueError, TypeError, KeyError, onnx.checker.ValidationError) as error:
            about = f"{tensor.name!r}, {readers.types[tensor.name]}{readers.of_value(tensor.name)},"
            raise ModelError(
                f"{where}: the data of initializer {about} cannot be read: {_why_unread(tensor, folder, error)}"
            ) from error
    given = [info for info in graph.input if info.name not in initializers]
    fixed = _batch_parameters(given) if batch is not None else frozenset()
    inputs = tuple(_input(info, batch, fixed, where, readers) for info in given)
    if batch is not None and not any(_is_open(dim) for info in given for dim in info.type.tensor_type.shape.dim):
        _check_fixed_batch(batch, [(name, shape) for name, shape, _ in inputs], where)
    functions = {(f.domain, f.name): f for f in proto.functions}
    return LoadedModel(
        identifier(graph.name or "main"),
        tuple(graph.node),
        initializers,
        inputs,
        tuple(output.name for output in graph.output),
        tuple(proto.opset_import),
        functions,
    )


def _read(model) -> tuple[onnx.ModelProto, str | None, str]:
    if isinstance(model, onnx.ModelProto):
        return model, None, "the given model"
    if isinstance(model, (bytes, bytearray)):
        try:
            return onnx.ModelProto.FromString(bytes(model)), None, "the given model"
        except DecodeError as error:
            raise ModelError(f"the given bytes are not an ONNX model: {error}") from error
    if not isinstance(model, (str, os.PathLike)):
        raise ModelError(
            f"a {type(model).__name__} is no model; give the path of an ONNX file, its bytes, or an onnx.ModelProto"
        )
    path = Path(model)
    if not path.is_file():
        raise ModelError(f"{path}: no such file")
    try:
        return onnx.load(path, load_external_data=False), str(path.parent), str(path)
    except (DecodeError, OSError, ValueError) as error:
        raise ModelError(f"{path} is not an ONNX model: {error}") from error


def _check(proto: onnx.ModelProto, where: str) -> None:
    # Weights are checked when they are read; here they would only be copied.
    skeleton = onnx.ModelProto(ir_version=proto.ir_version or onnx.IR_VERSION)
    skeleton.opset_import.extend(proto.opset_import)
    skeleton.functions.extend(proto.functions)
    graph = skeleton.graph
    graph.name = proto.graph.name or "main"
    graph.node.extend(proto.graph.node)
    # ONNX Runtime writes an operator of its own in ONNX's domain, of which the checker then finds no definition.
    for node in graph.node:
        if node.domain == "" and node.op_type in _RUNTIME_OPERATORS:
            node.domain = _RUNTIME_DOMAIN
    if all(opset.domain != _RUNTIME_DOMAIN for opset in skeleton.opset_import):
        skeleton.opset_import.append(helper.make_opsetid(_RUNTIME_DOMAIN, 1))
    graph.input.extend(proto.graph.input)
    # What the outputs' types are follows from the nodes, so a model that does not declare them will do.
    graph.output.extend(helper.make_tensor_value_info(o.name, onnx.TensorProto.FLOAT, []) for o in proto.graph.output)
    known = {info.name for info in graph.input}
    for tensor in proto.graph.initializer:
        if tensor.name not in known:
            graph.input.append(helper.make_tensor_value_info(tensor.name, tensor.data_type, list(tensor.dims)))
    try:
        onnx.checker.check_model(skeleton)
    except onnx.checker.ValidationError as error:
        raise ModelError(f"{where} is not a valid ONNX model: {str(error).strip()}") from error


def _why_unread(tensor: onnx.TensorProto, folder: str | None, error: Exception) -> str:
    """The reason in terms of the files of the model."""
    location = next((entry.value for entry in tensor.external_data if entry.key == "location"), None)
    if location is None:
        return f"its data does not fit its type and shape ({error})"
    if folder is None:
        return (
            f"it lies in file {location!r}, whose folder is not known; give the path of the model in place of its bytes"
        )
    path = Path(folder) / location
    if not path.is_file():
        return f"{path}: no such file; put the file of external data beside the model"
    return f"{path} does not hold it ({error}); export the model and its external data again"


def _batch_parameters(inputs: Sequence[onnx.ValueInfoProto]) -> frozenset[str]:
    """The names of symbolic first dimensions: all that bear one of them have the batch's extent."""
    firsts = (info.type.tensor_type.shape.dim[0] for info in inputs if info.type.tensor_type.shape.dim)
    return frozenset(dim.dim_param for dim in firsts if dim.dim_param)


def _is_open(dim: onnx.TensorShapeProto.Dimension) -> bool:
    return not (dim.HasField("dim_value") and dim.dim_value >= 0)


def _check_fixed_batch(batch: int, inputs: Sequence[tuple[str, tuple[int, ...]]], where: str) -> None:
    """Refuse a batch that a model without open dimensions cannot have."""
    others = [(name, shape) for name, shape in inputs if shape[:1] != (batch,)]
    if inputs and not others:
        return
    has = "it has no input"
    if others:
        name, shape = others[0]
        has = f"the shape of input {name!r} is {shape}" + ("" if shape else ", a scalar")
    raise OptionError(
        f"batch={batch} has no effect on {where}: none of its dimensions is open, {has}; leave batch away, or export "
        "the model with a symbolic first dimension (torch.onnx.export with dynamic_shapes or dynamic_axes)"
    )


def _input(
    info: onnx.ValueInfoProto, batch: int | None, fixed: frozenset[str], where: str, readers: Readers
) -> tuple[str, tuple[int, ...], str]:
    who = readers.of_value(info.name)
    if not info.type.HasField("tensor_type"):
        raise ModelError(
            f"{where}: input {info.name!r} is {declared_type(info.type)}, and only a tensor can be an input{who}; give "
            "its elements as inputs of their own, and leave an optional that is not there out of the model"
        )
    if not info.type.tensor_type.HasField("shape"):
        raise ModelError(f"{where}: input {info.name!r} has no shape{who}; export the model with static shapes")
    shape = []
    for position, dim in enumerate(info.type.tensor_type.shape.dim):
        open_name = dim.dim_param or "unnamed"
        if not _is_open(dim):
            shape.append(dim.dim_value)
        elif batch is not None and (position == 0 or dim.dim_param in fixed):
            shape.append(batch)
        elif position == 0:
            raise ModelError(
                f"{where}: dimension 0 ({open_name}) of input {info.name!r} is open{who}; pass batch=... to fix it"
            )
        else:
            raise ModelError(
                f"{where}: dimension {position} ({open_name}) of input {info.name!r} is open; only the first dimension "
                f"may be{who}; export the model with this one static"
            )
    element = info.type.tensor_type.elem_type
    if element not in _ELEMENT_TYPES:
        raise ModelError(
            f"{where}: input {info.name!r} is {declared_type(info.type)}, and networks here take no elements of this "
            f"type{who}; {_CONVERSIONS.get(element, _CONVERSION)} outside of the network"
        )
    return info.name, tuple(shape), str(helper.tensor_dtype_to_np_dtype(element))
