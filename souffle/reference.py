"""What a model computes, by others than us: ONNX Runtime without its optimizations; and the model as it is given to
others, with weights, constants and shapes in it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from souffle.byte_products import multiplies_bytes, with_exact_sums
from souffle.errors import SouffleError
from souffle.frontend.load import open_model
from souffle.frontend.model_options import ModelOptions

try:
    import onnxruntime
except ImportError:
    onnxruntime = None

__all__ = ["has_onnxruntime", "onnxruntime_outputs", "static_model", "sums_are_exact", "with_outputs"]

_NUMPY = {"float": "float32", "double": "float64", "float16": "float16", "bool": "bool"} | {
    f"{sign}int{bits}": f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)
}
"""NumPy's names of ONNX Runtime's types."""


def onnxruntime_outputs(
    model: onnx.ModelProto | str, inputs: Mapping[str, np.ndarray], constants: Mapping[str, Any] | None = None
) -> dict[str, np.ndarray]:
    """What ONNX Runtime computes.

    Parameters
    ----------
    model : ModelProto or path
    inputs : mapping of str to array
    constants : mapping of str to array, number or list, optional
        Of the inputs that a network was given at compile time.

    Raises
    ------
    SouffleError
        If ONNX Runtime is not installed, or its arrays cannot be of the type of an input or output.
    """
    if onnxruntime is None:
        raise SouffleError("onnxruntime is needed to compare with; pip install 'souffle-dl[check]'")
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    # Its optimizations compute a quantized network in integers, or quantize a bias, and round otherwise than the model.
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    exact = _with_exact_sums(model)
    source = exact if isinstance(exact, str) else exact.SerializeToString()
    session = onnxruntime.InferenceSession(source, options, providers=["CPUExecutionProvider"])
    for value in (*session.get_inputs(), *session.get_outputs()):
        if re.match(r"tensor\((float[468]|u?int[24]\))", value.type):
            raise SouffleError(
                f"{value.name!r} is {value.type}, of which ONNX Runtime takes and gives no NumPy arrays; put a Cast to "
                "a wider type at that end of the model to compare the rest"
            )
    names = [output.name for output in session.get_outputs()]
    types = {info.name: info.type.removeprefix("tensor(").removesuffix(")") for info in session.get_inputs()}
    given = {name: np.asarray(value, dtype=_NUMPY.get(types[name])) for name, value in (constants or {}).items()}
    return dict(zip(names, session.run(names, {**inputs, **given}), strict=True))


@cache
def sums_are_exact() -> bool:
    """Whether ONNX Runtime's sums of products of bytes with and without a sign are exact here; it is tried."""
    ends = [helper.make_tensor_value_info(name, kind, None) for name, kind in (("x", 2), ("w", 3), ("y", 6))]
    graph = helper.make_graph([helper.make_node("MatMulInteger", ["x", "w"], ["y"])], "sum", ends[:2], ends[2:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    x, w = np.full((1, 64), 255, np.uint8), np.full((64, 16), 127, np.int8)
    return bool((session.run(None, {"x": x, "w": w})[0] == 64 * 255 * 127).all())


def _with_exact_sums(model: onnx.ModelProto | str) -> onnx.ModelProto | str:
    """A model whose products of bytes ONNX Runtime does not cut off on this processor."""
    opened = onnx.load(model, load_external_data=False) if isinstance(model, str) else model
    if not multiplies_bytes(opened) or sums_are_exact():
        return model
    return with_exact_sums(onnx.load(model) if isinstance(model, str) else model)


def with_outputs(model: onnx.ModelProto, names: Iterable[str]) -> onnx.ModelProto:
    """A copy of a model that gives these values of its graph, too; ONNX Runtime finds out of which types they are."""
    made = onnx.ModelProto()
    made.CopyFrom(model)
    there = {output.name for output in made.graph.output}
    made.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names if name not in there)
    return made


def has_onnxruntime() -> bool:
    """Whether ONNX Runtime is installed."""
    return onnxruntime is not None


def static_model(model: Any, given: ModelOptions) -> onnx.ModelProto:
    """A copy of a model as others can take it: one proto, whose inputs are those of the network, with their shapes.

    Parameters
    ----------
    model : path, bytes or ModelProto
    given : ModelOptions
        Values of open dimensions, one of each, and of inputs that are constants then.

    Raises
    ------
    SouffleError
        As :func:`souffle.import_onnx`.
    """
    opened = open_model(model, given)
    loaded = opened.fixed(given.batch, given.dims or {})
    made = onnx.ModelProto()
    made.CopyFrom(opened.proto)
    graph = made.graph
    del graph.input[:], graph.initializer[:]
    for name, shape, dtype in loaded.inputs:
        kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
        graph.input.append(helper.make_tensor_value_info(name, kind, shape))
    graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in loaded.initializers.items())
    return made
