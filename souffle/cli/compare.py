"""Compare a network with ONNX Runtime."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx

from souffle.errors import SouffleError
from souffle.runtime.comparison import OutputComparison, compare, random_inputs

try:
    import onnxruntime
except ImportError:
    onnxruntime = None

__all__ = ["OutputComparison", "compare", "onnxruntime_outputs", "random_inputs"]


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
    source = model if isinstance(model, str) else model.SerializeToString()
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
