"""What a PyTorch user writes as one call and its exporter as several ONNX nodes, found again; needs NumPy and onnx.

A peer that ran the exporter's nodes one by one would launch five kernels for a GELU and start cuDNN anew for each layer
of a recurrent network. So these are put together, and what depends on constants alone is worked out beforehand::

    MatMul(x, weight), Add(bias)                        -> Linear
    Div(x, sqrt 2), Erf, Add(1), Mul(x), Mul(0.5)       -> Gelu
    Sigmoid(x), Mul(x)                                  -> Silu
    LSTM, Squeeze of the directions, LSTM, ...          -> LSTM of several layers

And one is taken apart that the exporter has joined, for Inductor knows attention by the transposition of its keys::

    MatMul(q, Transpose(k, 0 2 3 1))                    -> MatMul(q, SwapLastAxes(Transpose(k, 0 2 1 3)))
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper
from onnx.reference import ReferenceEvaluator

__all__ = ["Node", "OnnxGraph", "read_nodes"]


@dataclass(frozen=True)
class Node:
    """A node of a graph.

    Attributes
    ----------
    operator : str
        Of ONNX, or one of those above.
    inputs, outputs : tuple of str
        Names; an input that is left out is empty.
    attributes : dict
    layers : tuple of tuple of str
        An LSTM's inputs, those of each layer.
    """

    operator: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: dict[str, Any] = field(default_factory=dict)
    layers: tuple[tuple[str, ...], ...] = ()

    def __str__(self) -> str:
        return f"{self.operator} of {self.outputs[0]}"


@dataclass(frozen=True)
class OnnxGraph:
    """Nodes in the order in which they can be run.

    Attributes
    ----------
    nodes : tuple of Node
    constants : dict
        Arrays by name.
    inputs, outputs : tuple of str
    """

    nodes: tuple[Node, ...]
    constants: dict[str, np.ndarray]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


def read_nodes(model: onnx.ModelProto) -> OnnxGraph:
    """A model's nodes, rewritten as above."""
    constants = {item.name: numpy_helper.to_array(item) for item in model.graph.initializer}
    nodes = []
    for proto in model.graph.node:
        attributes = {item.name: helper.get_attribute_value(item) for item in proto.attribute}
        if proto.op_type == "Constant" and "value" in attributes:
            constants[proto.output[0]] = numpy_helper.to_array(attributes["value"])
        elif proto.input and all(not name or name in constants for name in proto.input):
            constants |= _evaluated(model, proto, constants)
        else:
            nodes.append(Node(proto.op_type, tuple(proto.input), tuple(proto.output), attributes))
    inputs = tuple(item.name for item in model.graph.input if item.name not in constants)
    outputs = tuple(item.name for item in model.graph.output)
    for rewritten in (_linears, _gelus, _silus, _stacks, _swaps):
        nodes = rewritten(_Uses(nodes, outputs), constants)
    return OnnxGraph(tuple(nodes), constants, inputs, outputs)


def _evaluated(
    model: onnx.ModelProto, proto: onnx.NodeProto, constants: dict[str, np.ndarray]
) -> dict[str, np.ndarray]:
    given = {name: constants[name] for name in proto.input if name}
    inputs = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype), array.shape)
        for name, array in given.items()
    ]
    outputs = [helper.make_empty_tensor_value_info(name) for name in proto.output if name]
    graph = helper.make_graph([proto], "constants", inputs, outputs)
    alone = helper.make_model(graph, opset_imports=model.opset_import)
    names = [item.name for item in outputs]
    return dict(zip(names, map(np.asarray, ReferenceEvaluator(alone).run(names, given)), strict=True))


class _Uses:
    """Who makes a value, and who reads it."""

    def __init__(self, nodes: Iterable[Node], outputs: tuple[str, ...]) -> None:
        self.nodes = list(nodes)
        self.producer = {name: node for node in self.nodes for name in node.outputs if name}
        self._readers: dict[str, list[Node]] = defaultdict(list)
        for node in self.nodes:
            for name in node.inputs:
                self._readers[name].append(node)
        self._outputs = outputs

    def read(self, name: str) -> bool:
        """Whether anyone reads a value."""
        return bool(name) and (name in self._outputs or name in self._readers)

    def only_reader(self, name: str, operator: str) -> Node | None:
        """The one node that reads a value, where it is of this operator."""
        readers = self._readers.get(name, [])
        alone = len(readers) == 1 and readers[0].operator == operator and name not in self._outputs
        return readers[0] if alone else None

    def replaced(self, changes: dict[int, Node], gone: Iterable[Node]) -> list[Node]:
        """The nodes, some replaced (by ``id`` of the old one) and some left out."""
        left_out = {id(node) for node in gone}
        return [changes.get(id(node), node) for node in self.nodes if id(node) not in left_out]


def _other(node: Node, name: str) -> str:
    """Of a node's two inputs, the one that is not this."""
    return node.inputs[1] if node.inputs[0] == name else node.inputs[0]


def _is_number(array: np.ndarray | None, value: float) -> bool:
    return array is not None and array.size == 1 and math.isclose(float(array.reshape(())), value, rel_tol=1e-6)


def _linears(uses: _Uses, constants: dict[str, np.ndarray]) -> list[Node]:
    changes, gone = {}, []
    for node in uses.nodes:
        weight = constants.get(node.inputs[1]) if node.operator == "MatMul" else None
        add = uses.only_reader(node.outputs[0], "Add") if weight is not None and weight.ndim == 2 else None
        bias = _other(add, node.outputs[0]) if add else ""
        if weight is None or bias not in constants or constants[bias].shape != weight.shape[1:]:
            continue
        name = f"{node.inputs[1]}/transposed"
        constants[name] = np.ascontiguousarray(weight.T)
        changes[id(add)] = Node("Linear", (node.inputs[0], name, bias), add.outputs)
        gone.append(node)
    return uses.replaced(changes, gone)


def _gelus(uses: _Uses, constants: dict[str, np.ndarray]) -> list[Node]:
    changes, gone = {}, []
    for div in uses.nodes:
        if div.operator != "Div" or not _is_number(constants.get(div.inputs[1]), math.sqrt(2)):
            continue
        x, chain = div.inputs[0], [div]
        for operator in ("Erf", "Add", "Mul", "Mul"):
            reader = uses.only_reader(chain[-1].outputs[0], operator)
            chain += [reader] if reader else []
        if [node.operator for node in chain] != ["Div", "Erf", "Add", "Mul", "Mul"]:
            continue
        one, again, half = (_other(node, before.outputs[0]) for before, node in pairwise(chain[1:]))
        if again == x and _is_number(constants.get(one), 1.0) and _is_number(constants.get(half), 0.5):
            changes[id(chain[-1])] = Node("Gelu", (x,), chain[-1].outputs)
            gone += chain[:-1]
    return uses.replaced(changes, gone)


def _silus(uses: _Uses, constants: dict[str, np.ndarray]) -> list[Node]:
    changes, gone = {}, []
    for node in uses.nodes:
        product = uses.only_reader(node.outputs[0], "Mul") if node.operator == "Sigmoid" else None
        if product and _other(product, node.outputs[0]) == node.inputs[0]:
            changes[id(product)] = Node("Silu", node.inputs, product.outputs)
            gone.append(node)
    return uses.replaced(changes, gone)


def _stacks(uses: _Uses, constants: dict[str, np.ndarray]) -> list[Node]:
    changes, gone, taken = {}, [], set()
    for first in uses.nodes:
        if first.operator != "LSTM" or id(first) in taken:
            continue
        chain = [first]
        while True:
            squeeze = uses.only_reader(chain[-1].outputs[0], "Squeeze")
            axes = constants.get(squeeze.inputs[1]) if squeeze and len(squeeze.inputs) > 1 else None
            upper = uses.only_reader(squeeze.outputs[0], "LSTM") if axes is not None and axes.tolist() == [1] else None
            if upper is None or upper.attributes != first.attributes or any(map(uses.read, chain[-1].outputs[1:])):
                break
            chain += [squeeze, upper]
        layers = tuple(node.inputs[1:] for node in chain if node.operator == "LSTM")
        changes[id(chain[-1])] = replace(chain[-1], inputs=first.inputs[:1], layers=layers)
        gone += chain[:-1]
        taken |= {id(node) for node in chain}
    return uses.replaced(changes, gone)


def _swaps(uses: _Uses, constants: dict[str, np.ndarray]) -> list[Node]:
    nodes = []
    for node in uses.nodes:
        reader = uses.only_reader(node.outputs[0], "MatMul") if node.operator == "Transpose" else None
        if reader is None or reader.inputs[1] != node.outputs[0] or "perm" not in node.attributes:
            nodes.append(node)
            continue
        *front, last_but_one, last = node.attributes["perm"]
        between = f"{node.outputs[0]}/before the swap"
        nodes.append(replace(node, outputs=(between,), attributes={"perm": [*front, last, last_but_one]}))
        nodes.append(Node("SwapLastAxes", (between,), node.outputs))
    return nodes
