"""Random inputs for an ONNX model, ours or any other with static shapes."""

from __future__ import annotations

import numpy as np
from onnx import GraphProto, ModelProto, ValueInfoProto, helper

from souffle.errors import ModelError
from souffle.models.draws import read_draws

__all__ = ["random_inputs"]


def random_inputs(model_proto: ModelProto, seed: int = 0) -> dict[str, np.ndarray]:
    """Draw a value for each input of a model.

    Floating-point inputs are normal with standard deviation 1; those of rank 4 (images) also have a random mean for
    each channel, since plain noise nearly vanishes in a global average and would hide mistakes there. Integers are 0 or
    1, or, where they index a constant table by ``Gather``, any row of it. Booleans are fair coins. An input for which
    the metadata of the model name a distribution (:mod:`souffle.models.draws`) is drawn from that.

    Raises
    ------
    ModelError
        If an input is not a tensor, has a dynamic dimension, or a type that is none of the above.
    """
    graph = model_proto.graph
    rng = np.random.default_rng(seed)
    constants = {initializer.name for initializer in graph.initializer}
    draws = read_draws(model_proto)
    values = {}
    for info in graph.input:
        if info.name in constants:
            continue
        shape, dtype = _shape(info), _dtype(info)
        if info.name in draws:
            value = draws[info.name].values(rng, shape)
        elif dtype.kind == "f":
            value = rng.standard_normal(shape)
            if len(shape) == 4:
                value += rng.standard_normal((1, shape[1], 1, 1))
        elif dtype.kind == "b":
            value = rng.integers(0, 2, shape)
        elif dtype.kind in "iu":
            value = rng.integers(0, _index_bound(graph, info.name), shape)
        else:
            raise ModelError(f"input {info.name!r} of type {dtype} cannot be drawn at random; give it yourself")
        values[info.name] = np.asarray(value).astype(dtype)
    return values


def _shape(info: ValueInfoProto) -> tuple[int, ...]:
    tensor = info.type.tensor_type
    if not info.type.HasField("tensor_type") or not tensor.HasField("shape"):
        raise ModelError(f"input {info.name!r} is not a tensor of known rank; random inputs need a static shape")
    dims = []
    for axis, dim in enumerate(tensor.shape.dim):
        if not dim.HasField("dim_value"):
            name = dim.dim_param or "?"
            raise ModelError(f"input {info.name!r} leaves dimension {axis} open ({name}); export it with static shapes")
        dims.append(dim.dim_value)
    return tuple(dims)


def _dtype(info: ValueInfoProto) -> np.dtype:
    element = info.type.tensor_type.elem_type
    try:
        return np.dtype(helper.tensor_dtype_to_np_dtype(element))
    except KeyError as error:
        raise ModelError(f"input {info.name!r} has the unknown element type {element}") from error


def _index_bound(graph: GraphProto, name: str) -> int:
    """Number of valid indices if ``name`` indexes constant tables, else 2."""
    tables = {initializer.name: initializer.dims for initializer in graph.initializer}
    bounds = []
    for node in graph.node:
        if node.op_type == "Gather" and node.input[1] == name and node.input[0] in tables:
            axis = next((attribute.i for attribute in node.attribute if attribute.name == "axis"), 0)
            bounds.append(tables[node.input[0]][axis])
    return min(bounds, default=2)
