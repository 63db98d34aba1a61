"""Attention as users bring it: written out as exporters do, ONNX's operator, and te by hand."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from tvm import te, tirx, topi

from souffle import from_te
from souffle.program import TEProgram

__all__ = ["MAKERS", "AttentionCase", "as_te", "by_hand", "exported", "random_tensors", "with_operator", "written_out"]


@dataclass(frozen=True)
class AttentionCase:
    """Extents of one attention.

    Attributes
    ----------
    queries, keys : int
        Length of the sequences.
    head : int
        Elements of a head of queries and keys; values have as many.
    heads, groups : int
        Heads of queries, and of keys and values.
    batch : int
    causal : bool
        Whether a query sees only the keys up to its own place.
    """

    queries: int
    keys: int
    head: int = 32
    heads: int = 2
    groups: int = 2
    batch: int = 1
    causal: bool = False

    @property
    def name(self) -> str:
        """Such as ``"q17-k17-d32-h2"``."""
        parts = [f"q{self.queries}", f"k{self.keys}", f"d{self.head}", f"h{self.heads}"]
        parts += [f"g{self.groups}"] if self.groups != self.heads else []
        parts += [f"b{self.batch}"] if self.batch > 1 else []
        return "-".join([*parts, *(["causal"] if self.causal else [])])

    @property
    def shapes(self) -> dict[str, tuple[int, int, int, int]]:
        """Of queries, keys and values: batch, heads, length, head."""
        keys = (self.batch, self.groups, self.keys, self.head)
        return {"q": (self.batch, self.heads, self.queries, self.head), "k": keys, "v": keys}


def random_tensors(case: AttentionCase, seed: int = 0) -> dict[str, np.ndarray]:
    """Inputs of an attention."""
    generator = np.random.default_rng(seed)
    return {name: generator.standard_normal(shape).astype(np.float32) for name, shape in case.shapes.items()}


def _model(case: AttentionCase, nodes: list, constants: list, opset: int) -> onnx.ModelProto:
    def info(name: str, shape: tuple[int, ...]) -> onnx.ValueInfoProto:
        return helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)

    inputs = [info(name, shape) for name, shape in case.shapes.items()]
    graph = helper.make_graph(nodes, "attention", inputs, [info("y", case.shapes["q"])], constants)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)
    onnx.checker.check_model(model)
    return model


class _Graph:
    """Nodes that are written one after the other, and their constants."""

    def __init__(self, case: AttentionCase) -> None:
        self.case = case
        self.nodes: list[onnx.NodeProto] = []
        self.constants: dict[str, onnx.TensorProto] = {}

    def constant(self, name: str, value: np.ndarray) -> str:
        self.constants[name] = numpy_helper.from_array(np.asarray(value), name)
        return name

    def node(self, operator: str, inputs: list[str], name: str, **attributes: object) -> str:
        self.nodes.append(helper.make_node(operator, inputs, [name], **attributes))
        return name

    def repeated(self, name: str) -> str:
        """Keys or values of a group, once for each of its heads."""
        case = self.case
        if case.groups == case.heads:
            return name
        wide = [case.batch, case.groups, case.heads // case.groups, case.keys, case.head]
        apart = self.node("Unsqueeze", [name, self.constant("apart", np.array([2]))], f"{name}_apart")
        expanded = self.node("Expand", [apart, self.constant("wide", np.array(wide))], f"{name}_wide")
        joined = self.constant("joined", np.array([case.batch, case.heads, case.keys, case.head]))
        return self.node("Reshape", [expanded, joined], f"{name}_joined")

    def model(self, scores: str, values: str) -> onnx.ModelProto:
        """With the softmax of the scores and its product with the values."""
        weights = self.node("Softmax", [scores], "weights", axis=-1)
        self.node("MatMul", [weights, values], "y")
        return _model(self.case, self.nodes, list(self.constants.values()), 17)


def written_out(case: AttentionCase) -> onnx.ModelProto:
    """With the fewest nodes: keys of a group repeated for its heads, products, a mask that is a constant, softmax."""
    graph = _Graph(case)
    keys, values = graph.repeated("k"), graph.repeated("v")
    turned = graph.node("Transpose", [keys], "turned", perm=[0, 1, 3, 2])
    products = graph.node("MatMul", ["q", turned], "products")
    scale = graph.constant("scale", np.array(1 / math.sqrt(case.head), np.float32))
    scores = graph.node("Mul", [products, scale], "scores")
    if case.causal:
        seen = np.tril(np.ones((case.queries, case.keys), bool), case.keys - case.queries)
        mask = graph.constant("mask", np.where(seen, 0.0, -np.inf).astype(np.float32))
        scores = graph.node("Add", [scores, mask], "masked")
    return graph.model(scores, values)


def exported(case: AttentionCase) -> onnx.ModelProto:
    """As PyTorch's exporter writes ``scaled_dot_product_attention``: both operands by the root of the scale, and a mask
    that is calculated from ones (a query sees as many keys as there are before it, whatever their number).
    """
    graph = _Graph(case)
    keys, values = graph.repeated("k"), graph.repeated("v")
    root = graph.node("Sqrt", [graph.constant("scale", np.array(1 / math.sqrt(case.head), np.float32))], "root")
    turned = graph.node("Transpose", [keys], "turned", perm=[0, 1, 3, 2])
    left = graph.node("Mul", ["q", root], "q_scaled")
    right = graph.node("Mul", [turned, root], "k_scaled")
    scores = graph.node("MatMul", [left, right], "scores")
    if case.causal:
        nothing, all_ = (graph.constant(f"number_{x}", np.array(x, np.float32)) for x in (0.0, 1.0))
        lowest = graph.constant("lowest", np.array(-np.inf, np.float32))
        ones = graph.node("Expand", [all_, graph.constant("size", np.array([case.queries, case.keys]))], "ones")
        lower = graph.node("Trilu", [ones], "lower", upper=0)
        hidden = graph.node("Equal", [lower, nothing], "hidden")
        mask = graph.node("Where", [hidden, lowest, nothing], "mask")
        scores = graph.node("Add", [scores, mask], "masked")
    return graph.model(scores, values)


def as_te(case: AttentionCase) -> TEProgram:
    """In te by hand, of operands in fp16; the mask is a choice by index."""
    q, k, v = (te.placeholder(shape, "float16", name=name) for name, shape in case.shapes.items())
    share = case.heads // case.groups

    def product(extents: tuple[int, ...], inner: int, pair: Callable[..., tuple], name: str) -> te.Tensor:
        r = te.reduce_axis((0, inner), name="r")

        def term(*at: object) -> object:
            left, right = pair(*at, r)
            return te.sum(left.astype("float32") * right.astype("float32"), axis=r)

        return te.compute(extents, term, name)

    rows = (case.batch, case.heads, case.queries)
    scores = product(
        (*rows, case.keys), case.head, lambda b, h, i, j, d: (q[b, h, i, d], k[b, h // share, j, d]), "scores"
    )

    def masked(b: object, h: object, i: object, j: object) -> object:
        value = scores[b, h, i, j] * tirx.const(1 / math.sqrt(case.head), "float32")
        if not case.causal:
            return value
        return tirx.if_then_else(j <= i + (case.keys - case.queries), value, tirx.const(-math.inf, "float32"))

    weights = topi.cast(topi.nn.softmax(te.compute((*rows, case.keys), masked, "masked"), axis=-1), "float16")
    attended = product(
        (*rows, case.head), case.keys, lambda b, h, i, d, j: (weights[b, h, i, j], v[b, h // share, j, d]), "y"
    )
    return from_te([q, k, v], [attended], name="attention")


def with_operator(case: AttentionCase) -> onnx.ModelProto:
    """ONNX's own operator."""
    node = helper.make_node("Attention", ["q", "k", "v"], ["y"], is_causal=int(case.causal))
    return _model(case, [node], [], 23)


MAKERS: dict[str, Callable[[AttentionCase], Any]] = {
    "written out": written_out,
    "operator": with_operator,
    "exported": exported,
    "te": as_te,
}
"""Each way to bring an attention, by what results call it."""


def by_hand(q: te.Tensor, k: te.Tensor, v: te.Tensor, scores: Callable[[te.Tensor], te.Tensor]) -> te.Tensor:
    """Of matrices in fp16, in te, with something done to the products of queries and keys before the softmax."""
    queries, head = (int(extent) for extent in q.shape)
    keys = int(k.shape[0])
    d, n = te.reduce_axis((0, head), name="d"), te.reduce_axis((0, keys), name="n")
    products = te.compute(
        (queries, keys), lambda i, j: te.sum(q[i, d].astype("float32") * k[j, d].astype("float32"), axis=d), "products"
    )
    weights = topi.cast(topi.nn.softmax(scores(products), axis=-1), "float16")
    return te.compute(
        (queries, int(v.shape[1])),
        lambda i, j: te.sum(weights[i, n].astype("float32") * v[n, j].astype("float32"), axis=n),
        "attended",
    )
