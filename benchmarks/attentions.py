"""Attention as users bring it: written out as exporters do, ONNX's operator, and te by hand."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from tvm import te, topi

__all__ = ["AttentionCase", "by_hand", "random_tensors", "with_operator", "written_out"]


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


def written_out(case: AttentionCase) -> onnx.ModelProto:
    """As exporters write it: keys of a group repeated for its heads, products, a mask, softmax."""
    nodes, constants = [], []

    def constant(name: str, value: np.ndarray) -> str:
        constants.append(numpy_helper.from_array(value, name))
        return name

    def repeated(name: str) -> str:
        if case.groups == case.heads:
            return name
        share = case.heads // case.groups
        wide = constant("wide", np.array([case.batch, case.groups, share, case.keys, case.head]))
        joined = constant("joined", np.array([case.batch, case.heads, case.keys, case.head]))
        apart = constant("apart", np.array([2]))
        nodes.append(helper.make_node("Unsqueeze", [name, apart], [f"{name}_apart"]))
        nodes.append(helper.make_node("Expand", [f"{name}_apart", wide], [f"{name}_wide"]))
        nodes.append(helper.make_node("Reshape", [f"{name}_wide", joined], [f"{name}_joined"]))
        return f"{name}_joined"

    keys, values = repeated("k"), repeated("v")
    constants = list({tensor.name: tensor for tensor in constants}.values())
    nodes.append(helper.make_node("Transpose", [keys], ["turned"], perm=[0, 1, 3, 2]))
    nodes.append(helper.make_node("MatMul", ["q", "turned"], ["products"]))
    scale = constant("scale", np.array(1 / math.sqrt(case.head), np.float32))
    nodes.append(helper.make_node("Mul", ["products", scale], ["scores"]))
    scores = "scores"
    if case.causal:
        seen = np.tril(np.ones((case.queries, case.keys), bool), case.keys - case.queries)
        mask = constant("mask", np.where(seen, 0.0, -np.inf).astype(np.float32))
        nodes.append(helper.make_node("Add", ["scores", mask], ["masked"]))
        scores = "masked"
    nodes.append(helper.make_node("Softmax", [scores], ["weights"], axis=-1))
    nodes.append(helper.make_node("MatMul", ["weights", values], ["y"]))
    return _model(case, nodes, constants, 17)


def with_operator(case: AttentionCase) -> onnx.ModelProto:
    """ONNX's own operator."""
    node = helper.make_node("Attention", ["q", "k", "v"], ["y"], is_causal=int(case.causal))
    return _model(case, [node], [], 23)


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
