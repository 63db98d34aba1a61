"""The networks that may be built for a GPU host, by name: those of the papers, of 8-bit integers, two of which data
decides how long outputs are, and one of several versions."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from onnx import ModelProto, TensorProto, helper, numpy_helper

from benchmarks import quantized_networks
from souffle import models

__all__ = ["NAMES", "VERSIONS", "build_network"]

_ROWS = {"tiny": 64, "paper": 128}
_WIDE = {"tiny": 8, "paper": 1024}
_COLUMNS = 64
"""Of all; what counts its outputs is run when rehearsing, too, so it has few rows."""


def _model(nodes: list, shape: tuple[int | str, ...], outputs: tuple[str, ...], **constants: np.ndarray) -> ModelProto:
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)
    results = [helper.make_empty_tensor_value_info(name) for name in outputs]
    given = [numpy_helper.from_array(value, name) for name, value in constants.items()]
    graph = helper.make_graph(nodes, "selection", [x], results, given)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])


def _above(size: str) -> ModelProto:
    """The elements above one of a matrix, in order: where they are, and their values' exponentials."""
    nodes = [
        helper.make_node("Greater", ["x", "one"], ["above"]),
        helper.make_node("NonZero", ["above"], ["where"]),
        helper.make_node("Transpose", ["where"], ["places"]),
        helper.make_node("GatherND", ["x", "places"], ["values"]),
        helper.make_node("Exp", ["values"], ["y"]),
    ]
    return _model(nodes, (_ROWS[size], _COLUMNS), ("where", "y"), one=np.ones((), np.float32))


def _suppressed(size: str) -> ModelProto:
    """Non-maximum suppression of boxes that a product makes of features, by scores that it makes, too."""
    boxes = _WIDE[size]
    rng = np.random.default_rng(0)
    weight = rng.standard_normal((_COLUMNS, 5), np.float32) / _COLUMNS**0.5
    nodes = [
        helper.make_node("MatMul", ["x", "weight"], ["all"]),
        helper.make_node("Sigmoid", ["all"], ["unit"]),
        helper.make_node("Split", ["unit", "parts"], ["corners", "score"], axis=2),
        helper.make_node("Transpose", ["score"], ["scores"], perm=[0, 2, 1]),
        helper.make_node("NonMaxSuppression", ["corners", "scores", "most", "overlap", "least"], ["selected"]),
    ]
    constants = {"most": np.array([100]), "overlap": np.float32([0.5]), "least": np.float32([0.3])}
    return _model(nodes, (1, boxes, _COLUMNS), ("selected",), weight=weight, parts=np.array([4, 1]), **constants)


def _batches(size: str) -> ModelProto:
    """Two layers, of an open number of rows."""
    rng, hidden = np.random.default_rng(0), _WIDE[size]
    first = rng.standard_normal((_COLUMNS, hidden), np.float32) / _COLUMNS**0.5
    second = rng.standard_normal((hidden, _COLUMNS), np.float32) / hidden**0.5
    nodes = [
        helper.make_node("MatMul", ["x", "first"], ["wide"]),
        helper.make_node("Relu", ["wide"], ["positive"]),
        helper.make_node("MatMul", ["positive", "second"], ["narrow"]),
        helper.make_node("Softmax", ["narrow"], ["y"], axis=-1),
    ]
    return _model(nodes, ("batch", _COLUMNS), ("y",), first=first, second=second)


VERSIONS: dict[str, dict[str, tuple[int, ...]]] = {"batches": {"batch": (1, 24)}}
"""Networks with open dimensions, and the values for which they have versions."""
_BESIDE: dict[str, Callable[[str], ModelProto]] = {
    "nonzero": _above,
    "suppression": _suppressed,
    "batches": _batches,
}
NAMES = (*models.ALL_NAMES, *quantized_networks.NETWORKS, *_BESIDE)


def build_network(name: str, size: str, steps: int | None = None) -> ModelProto:
    """A network, ``"tiny"`` or as it is measured, ``"paper"``.

    Parameters
    ----------
    name : str
        Of :data:`NAMES`.
    size : str
    steps : int, optional
        Of networks with time steps, see :func:`souffle.models.build`.
    """
    if name in _BESIDE:
        return _BESIDE[name](size)
    if name in quantized_networks.NETWORKS:
        network = quantized_networks.NETWORKS[name]
        return network.small() if size == "tiny" else network.whole()
    return models.build(name, size, steps=steps)
