"""Reads and checks an ONNX model, and fixes its open dimensions."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
from google.protobuf.message import DecodeError
from onnx import helper, numpy_helper

from souffle.errors import ModelError
from souffle.frontend.naming import identifier

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


def load_model(model: str | os.PathLike | bytes | onnx.ModelProto, batch: int | None) -> LoadedModel:
    """Read `model`, check it, and fix its first dimensions to `batch`.

    Raises
    ------
    ModelError
        Naming the file and what is wrong with it.
    """
    proto, folder, where = _read(model)
    graph = proto.graph
    if not graph.node and not graph.output:
        raise ModelError(f"{where} is not an ONNX model: it has no graph")
    if not any(o.domain in ("", "ai.onnx") for o in proto.opset_import):
        raise ModelError(f"{where} is not a valid ONNX model: it does not say which ONNX operator set it uses")
    _check(proto, where)
    initializers = {}
    for tensor in graph.initializer:
        try:
            initializers[tensor.name] = numpy_helper.to_array(tensor, folder or "")
        except (OSError, ValueError, TypeError, KeyError, onnx.checker.ValidationError) as error:
            raise ModelError(f"{where}: the data of initializer {tensor.name!r} cannot be read: {error}") from error
    inputs = tuple(_input(info, batch, where) for info in graph.input if info.name not in initializers)
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
    path = Path(model)
    if not path.is_file():
        raise ModelError(f"{path}: no such file")
    try:
        return onnx.load(path, load_external_data=False), str(path.parent), str(path)
    except (DecodeError, OSError, ValueError) as error:
        raise ModelError(f"{path} is not an ONNX model: {error}") from error


def _check(proto: onnx.ModelProto, where: str) -> None:
    skeleton = onnx.ModelProto()
    skeleton.CopyFrom(proto)
    known = {info.name for info in skeleton.graph.input}
    # Weights are checked when they are read; here they would only be copied.
    for tensor in skeleton.graph.initializer:
        if tensor.name not in known:
            skeleton.graph.input.append(helper.make_tensor_value_info(tensor.name, tensor.data_type, list(tensor.dims)))
    del skeleton.graph.initializer[:]
    try:
        onnx.checker.check_model(skeleton)
    except onnx.checker.ValidationError as error:
        raise ModelError(f"{where} is not a valid ONNX model: {str(error).strip()}") from error


def _input(info: onnx.ValueInfoProto, batch: int | None, where: str) -> tuple[str, tuple[int, ...], str]:
    if not info.type.HasField("tensor_type"):
        raise ModelError(f"{where}: input {info.name!r} is no tensor")
    if not info.type.tensor_type.HasField("shape"):
        raise ModelError(f"{where}: input {info.name!r} has no shape; export the model with static shapes")
    shape = []
    for position, dim in enumerate(info.type.tensor_type.shape.dim):
        if dim.HasField("dim_value") and dim.dim_value >= 0:
            shape.append(dim.dim_value)
        elif position == 0 and batch is not None:
            shape.append(batch)
        elif position == 0:
            raise ModelError(
                f"{where}: dimension 0 ({dim.dim_param or 'unnamed'}) of input {info.name!r} is open; "
                "pass batch=... to fix it"
            )
        else:
            raise ModelError(
                f"{where}: dimension {position} ({dim.dim_param or 'unnamed'}) of input {info.name!r} is open; only "
                "the first dimension may be, export the model with this one static"
            )
    dtype = helper.tensor_dtype_to_np_dtype(info.type.tensor_type.elem_type)
    if dtype == np.dtype(object):
        raise ModelError(f"{where}: input {info.name!r} holds strings")
    return info.name, tuple(shape), str(dtype)
