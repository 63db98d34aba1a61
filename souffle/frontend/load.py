"""Reads and checks an ONNX model, and fixes its open dimensions."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
from google.protobuf.message import DecodeError
from onnx import helper, numpy_helper

from souffle.dimensions import OpenDimensions
from souffle.element_types import SMALL_TYPES
from souffle.errors import ModelError, Refusal
from souffle.frontend.given_constants import given_constants
from souffle.frontend.model_options import ModelOptions
from souffle.frontend.naming import identifier
from souffle.frontend.open_dimensions import DeclaredDimensions, open_dimensions_of
from souffle.frontend.readers import Readers, declared_type
from souffle.program import ELEMENT_TYPES

__all__ = ["LoadedModel", "OpenModel", "load_model", "open_model"]


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
    integers : bool
        Whether products of what was quantized are computed on the integers.
    """

    name: str
    nodes: tuple[onnx.NodeProto, ...]
    initializers: dict[str, np.ndarray]
    inputs: tuple[tuple[str, tuple[int, ...], str], ...]
    outputs: tuple[str, ...]
    opsets: tuple[onnx.OperatorSetIdProto, ...]
    functions: dict[tuple[str, str], onnx.FunctionProto]
    integers: bool = True


_CONVERSION = "convert it to floating-point numbers or integers"
_CONVERSIONS = {onnx.TensorProto.STRING: "encode text as numbers"}
_ELEMENT_TYPES = frozenset(helper.np_dtype_to_tensor_dtype(np.dtype(name)) for name in ELEMENT_TYPES | SMALL_TYPES)
_RUNTIME_DOMAIN, _RUNTIME_OPERATORS = "com.microsoft", frozenset({"SimplifiedLayerNormalization"})


@dataclass(frozen=True, eq=False)
class OpenModel:
    """A checked model whose inputs may have open dimensions: read once, and fixed as often as wanted.

    Attributes
    ----------
    proto : ModelProto
    initializers : dict of str to array
        Those that all that is fixed of it shares, and the values that inputs were given.
    declared : DeclaredDimensions
    integers : bool
        Whether products of what was quantized are computed on the integers.
    """

    proto: onnx.ModelProto
    initializers: dict[str, np.ndarray]
    declared: DeclaredDimensions
    integers: bool = True

    @property
    def dimensions(self) -> OpenDimensions:
        """What is open, of the inputs that were given no values."""
        return self.declared.still_open

    def extents(self, batch: int | None, dims: Mapping[str, int]) -> dict[str, int]:
        """The value of each open dimension by name.

        Raises
        ------
        OptionError, ModelError
            As :func:`load_model`.
        """
        return self.declared.extents(batch, dims)

    def fixed(self, batch: int | None, dims: Mapping[str, int]) -> LoadedModel:
        """The model with a value for every open dimension.

        Raises
        ------
        OptionError, ModelError
            As :func:`load_model`.
        """
        extents = self.extents(batch, dims)
        graph = self.proto.graph
        kinds = {info.name: info.type.tensor_type.elem_type for info in graph.input}
        return LoadedModel(
            identifier(graph.name or "main"),
            tuple(graph.node),
            self.initializers,
            tuple(
                (name, self.dimensions.shape(shape, extents), str(helper.tensor_dtype_to_np_dtype(kinds[name])))
                for name, shape in self.dimensions.inputs
            ),
            tuple(output.name for output in graph.output),
            tuple(self.proto.opset_import),
            {(f.domain, f.name): f for f in self.proto.functions},
            self.integers,
        )


def load_model(model: str | os.PathLike | bytes | onnx.ModelProto, options: ModelOptions) -> LoadedModel:
    """Read `model`, check it, give inputs and open dimensions the values that `options` name.

    Raises
    ------
    OptionError
        If the model has no open dimension that `batch` could fix; if `dims` names none of the model's open dimensions,
        or one that `batch` fixes; if `constants` are no values of its inputs, or contradict the dimensions.
    ModelError
        Naming the file and what is wrong with it, as a dimension that stays open.
    """
    return open_model(model, options).fixed(options.batch, options.dims or {})


def open_model(model: str | os.PathLike | bytes | onnx.ModelProto, options: ModelOptions) -> OpenModel:
    """Read `model`, check it, and give inputs the values that `options` name; its dimensions stay open.

    Raises
    ------
    OptionError
        If `constants` are no values of its inputs.
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
            f"{where}: initializer {name!r}{readers.of_value(name)} is sparse; export the model with dense weights",
            refusal=Refusal.FORM,
        )
    initializers = {}
    for tensor in graph.initializer:
        try:
            initializers[tensor.name] = numpy_helper.to_array(tensor, folder or "")
        except (OSError, ValueError, TypeError, KeyError, onnx.checker.ValidationError) as error:
            about = f"{tensor.name!r}, {readers.types[tensor.name]}{readers.of_value(tensor.name)},"
            raise ModelError(
                f"{where}: the data of initializer {about} cannot be read: {_why_unread(tensor, folder, error)}"
            ) from error
    values = given_constants(graph, options.constants or {}, where)
    inputs = [info for info in graph.input if info.name not in initializers and info.name not in values]
    for info in inputs:
        _check_input(info, where, readers)
    given = {info.name: (info, values[info.name].shape) for info in graph.input if info.name in values}
    # What an input of unknown shape was given says nothing about dimensions.
    shaped = [info for info, _ in given.values() if info.type.tensor_type.HasField("shape")]
    dimensions = open_dimensions_of([*inputs, *shaped], tuple(graph.output))
    declared = DeclaredDimensions(dimensions, given, where, readers)
    return OpenModel(proto, initializers | values, declared, options.integers)


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


def _check_input(info: onnx.ValueInfoProto, where: str, readers: Readers) -> None:
    """Refuse what is no tensor of a known number of dimensions, with elements that networks take."""
    who = readers.of_value(info.name)
    if not info.type.HasField("tensor_type"):
        raise ModelError(
            f"{where}: input {info.name!r} is {declared_type(info.type)}, and only a tensor can be an input{who}; give "
            "its elements as inputs of their own, and leave an optional that is not there out of the model",
            refusal=Refusal.SEQUENCE,
        )
    if not info.type.tensor_type.HasField("shape"):
        raise ModelError(
            f"{where}: input {info.name!r} has no shape{who}; export the model with static shapes, or with names for "
            "the dimensions that dims=... is to fix",
            refusal=Refusal.OPEN,
        )
    element = info.type.tensor_type.elem_type
    if element not in _ELEMENT_TYPES:
        raise ModelError(
            f"{where}: input {info.name!r} is {declared_type(info.type)}, and networks here take no elements of this "
            f"type{who}; {_CONVERSIONS.get(element, _CONVERSION)} outside of the network",
            refusal=Refusal.TEXT if element == onnx.TensorProto.STRING else Refusal.TYPE,
        )
