"""Values that a caller gives for inputs of a model at compile time: from then on they are weights."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import helper

from souffle.errors import OptionError
from souffle.frontend.readers import declared_type
from souffle.wording import did_you_mean

__all__ = ["given_constants"]


def given_constants(graph: onnx.GraphProto, constants: Mapping[str, Any], where: str) -> dict[str, np.ndarray]:
    """The values of inputs of `graph`, in their types.

    Parameters
    ----------
    graph : GraphProto
    constants : mapping of str to array, number or sequence of numbers
        An array has the input's type; numbers and sequences of them are taken in it where it holds them exactly.
    where : str
        The model, for messages.

    Raises
    ------
    OptionError
        If the model has no such input, or the value is not of its type and shape, as far as that is in numbers.
    """
    inputs = {info.name: info for info in graph.input}
    values: dict[str, np.ndarray] = {}
    for name, value in constants.items():
        if name not in inputs:
            raise OptionError(f"constants: {_unknown(name, graph, where)}")
        values[name] = _value(inputs[name], value, where)
        _check_shape(inputs[name], values[name], where)
    return values


def _unknown(name: str, graph: onnx.GraphProto, where: str) -> str:
    names = [info.name for info in graph.input]
    if any(name == tensor.name for tensor in graph.initializer):
        return f"{name!r} is a weight of {where} and no input, so that its value is fixed already"
    takes = ", ".join(f"{info.name!r} ({declared_type(info.type)})" for info in graph.input) or "no inputs"
    return f"{where} has no input named {name!r}; it takes {takes}{did_you_mean(name, names)}"


def _value(info: onnx.ValueInfoProto, value: Any, where: str) -> np.ndarray:
    takes = f"constants: input {info.name!r} of {where} takes {declared_type(info.type)}"
    if not info.type.HasField("tensor_type"):
        raise OptionError(f"{takes}, and only the value of a tensor can be given")
    dtype = np.dtype(helper.tensor_dtype_to_np_dtype(info.type.tensor_type.elem_type))
    typed = isinstance(value, (np.ndarray, np.generic))
    if not typed:
        value = _untyped(value, dtype, takes)
    array = np.asarray(value)
    if array.dtype != dtype and not (dtype.kind == "O" and array.dtype.kind == "U"):
        raise OptionError(f"{takes} and was given {array.dtype}{list(array.shape)}; convert it yourself")
    return np.array(array, dtype=dtype, order="C")


def _untyped(value: Any, dtype: np.dtype, takes: str) -> np.ndarray:
    """Numbers of Python, or text, which have no type of their own, as `dtype`."""
    refusal = OptionError(f"{takes} and was given {value!r}, which it does not hold")
    try:
        with np.errstate(over="ignore"):
            converted = np.asarray(value, dtype=dtype)
        items = np.asarray(value, dtype=object)
    except (OverflowError, TypeError, ValueError) as error:
        raise refusal from error
    if items.shape != converted.shape or not all(map(_holds, converted.reshape(-1), items.reshape(-1))):
        raise refusal
    if dtype.kind == "O" and not all(isinstance(item, str) for item in items.reshape(-1)):
        raise refusal
    return converted


def _holds(element: Any, item: Any) -> bool:
    """Whether `element`, an item in another type, is of its kind: a decimal fraction may be rounded, an integer not."""
    for kinds in (str, (bool, np.bool_)):
        if isinstance(item, kinds) or isinstance(element, kinds):
            return isinstance(item, kinds) and isinstance(element, kinds)
    number = np.dtype(type(element))
    if isinstance(item, (float, np.floating)):
        floating = number.name.startswith(("float", "bfloat"))
        return floating and bool(math.isfinite(item) <= math.isfinite(element))
    return isinstance(item, (int, np.integer)) and math.isfinite(element) and int(element) == int(item)


def _check_shape(info: onnx.ValueInfoProto, array: np.ndarray, where: str) -> None:
    """Refuse a shape that has other numbers than the declared one."""
    tensor = info.type.tensor_type
    if not tensor.HasField("shape"):
        return
    dims: Sequence[onnx.TensorShapeProto.Dimension] = tensor.shape.dim
    fits = len(dims) == array.ndim and all(
        not dim.HasField("dim_value") or dim.dim_value < 0 or dim.dim_value == extent
        for dim, extent in zip(dims, array.shape, strict=True)
    )
    if not fits:
        raise OptionError(
            f"constants: input {info.name!r} of {where} takes {declared_type(info.type)} and was given {array.shape}; "
            "give a value of this shape"
        )
