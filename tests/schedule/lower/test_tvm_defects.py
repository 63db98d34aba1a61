"""Defects of TVM that its users are kept from: each network is right with the cure, and shows the defect without."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper
from tvm import te, tirx

import souffle
from souffle.cli.compare import onnxruntime_outputs
from souffle.errors import CertificateError, CudaCompileError
from souffle.program import TEProgram
from souffle.schedule.lower import device_function as lower
from souffle.tvm_compat import PrimExpr
from tests.defects import fails_without
from tests.testlib import Builder

pytestmark = pytest.mark.sampled(6)


def network(nodes: Sequence[onnx.NodeProto], outputs: Sequence[str], **values: object) -> onnx.ModelProto:
    """A model whose inputs have the shapes given as tuples; arrays are constants."""
    shapes = {name: value for name, value in values.items() if isinstance(value, tuple)}
    inputs = [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, shape) for name, shape in shapes.items()]
    results = [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None) for name in outputs]
    constants = [numpy_helper.from_array(v, name) for name, v in values.items() if isinstance(v, np.ndarray)]
    graph = helper.make_graph(nodes, "g", inputs, results, constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)


node = helper.make_node


def attention() -> onnx.ModelProto:
    nodes = [node("MatMul", ["q", "k"], ["s"]), node("Softmax", ["s"], ["p"]), node("MatMul", ["p", "v"], ["o"])]
    return network(nodes, ["o"], q=(1, 12, 1, 64), k=(1, 12, 64, 1), v=(1, 12, 1, 64))


def short_product() -> onnx.ModelProto:
    nodes = [node("MatMul", ["a", "b"], ["s"]), node("Softmax", ["s"], ["o"], axis=1)]
    return network(nodes, ["o"], a=(7, 5, 2), b=(2, 1))


def norm_of_all() -> onnx.ModelProto:
    nodes = [node("ReduceL2", ["x"], ["r"], keepdims=0), node("Reshape", ["r", "shape"], ["m"])]
    nodes += [node("MatMul", ["m", "v"], ["n"]), node("MatMul", ["n", "w"], ["p"]), node("Add", ["p", "b"], ["o"])]
    return network(nodes, ["o"], x=(5, 37), shape=np.array([1, 1]), v=(1, 13), w=(13, 7), b=(7,))


def largest_of_two() -> onnx.ModelProto:
    nodes = [node("Max", ["a", "b"], ["m"]), node("Tanh", ["m"], ["t"]), node("Flatten", ["t"], ["o"])]
    shapes = dict.fromkeys("abc", (1, 61, 31))
    return network([*nodes, node("Min", ["t", "c"], ["p"])], ["o", "p"], **shapes)


def layer_norm(shape: tuple[int, ...], axis: int) -> onnx.ModelProto:
    nodes = [node("LayerNormalization", ["x", "g", "b"], ["y", "mean", "inverse"], axis=axis)]
    return network(nodes, ["y", "mean", "inverse"], x=shape, g=shape[axis:], b=shape[axis:])


def two_totals() -> onnx.ModelProto:
    """Two reductions of each row, each read by a function of its own, and the place of the greatest."""
    nodes = [node("ReduceSum", ["x", "one"], ["s"]), node("Exp", ["s"], ["e"])]
    nodes += [node("ReduceMax", ["x", "one"], ["m"]), node("Tanh", ["m"], ["t"]), node("Sub", ["x", "e"], ["d"])]
    nodes += [node("Mul", ["d", "t"], ["o"]), node("ArgMax", ["o"], ["p"], axis=1), node("Cast", ["p"], ["q"], to=1)]
    return network(nodes, ["o", "q"], x=(5, 127), one=np.array([1]))


REDUCTIONS = {
    "attention": attention,
    "short_product": short_product,
    "norm_of_all": norm_of_all,
    "largest_of_two": largest_of_two,
    "layer_norm_30": lambda: layer_norm((1, 30), -1),
    "layer_norm_3d": lambda: layer_norm((1, 4, 64), -1),
    "layer_norm_256": lambda: layer_norm((1, 1, 256), -1),
    "layer_norm_all": lambda: layer_norm((2, 3, 4, 5), 0),
    "two_totals": two_totals,
}


def running_sum(shape: tuple[int, ...], axis: int) -> onnx.ModelProto:
    return network([node("CumSum", ["x", "axis"], ["y"])], ["y"], x=shape, axis=np.array(axis))


def scatter(operator: str, combine: str) -> onnx.ModelProto:
    """33 updates of 6 rows, some rows counted from behind."""
    index = np.arange(33) % 6 - 6 * (np.arange(33) % 2)
    index = index[:, None] if operator == "ScatterND" else np.repeat(index[:, None], 4, 1)
    nodes = [node(operator, ["x", "index", "u"], ["y"], reduction=combine)]
    return network(nodes, ["y"], x=(6, 4), index=index, u=(33, 4))


CONDITIONS = {
    "cumsum": lambda: running_sum((2, 7, 4), 1),
    "cumsum_pairs": lambda: running_sum((7, 2), 0),
    "scatter_nd": lambda: scatter("ScatterND", "add"),
    "scatter_elements": lambda: scatter("ScatterElements", "max"),
}


def inputs(model: onnx.ModelProto) -> dict[str, np.ndarray]:
    values = np.random.default_rng(0)
    shapes = {i.name: [d.dim_value for d in i.type.tensor_type.shape.dim] for i in model.graph.input}
    return {name: values.standard_normal(shape, dtype=np.float32) for name, shape in shapes.items()}


def compiled(model: onnx.ModelProto | TEProgram, **options: object) -> souffle.Network:
    return souffle.compile(model, target="cuda", level="V4", device="cpu", cubin=False, **options)


@pytest.mark.parametrize("name", [*REDUCTIONS, *CONDITIONS])
def test_right_in_every_order_of_threads(name: str) -> None:
    model = {**REDUCTIONS, **CONDITIONS}[name]()
    values = inputs(model)
    wanted = onnxruntime_outputs(model, values)
    network = compiled(model)
    for way in ({"order": "shuffled", "seed": 3}, {"checked": True}):
        found = network.on("cpu", **way)(values)
        for output, want in wanted.items():
            assert np.allclose(found[output], want, rtol=1e-4, atol=1e-5), f"{output} with {way}"


def test_tvm_updates_results_of_reductions_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lower, "named_results", lambda function: function)
    with fails_without("named_results in lower/tvm_defects.py", CertificateError, match="race in a block"):
        # Tiles that own channels have no such reductions.
        compiled(attention(), disable=["channels"])


def test_tvm_gives_vector_conditions_the_type_of_what_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lower, "with_plain_conditions", lambda function: function)
    with fails_without("the rewriting of Select in lower/printed_conditions.py", CudaCompileError):
        compiled(CONDITIONS["cumsum_pairs"]())(inputs(CONDITIONS["cumsum_pairs"]()))


def guarded_choice() -> TEProgram:
    """A choice by data in a condition that keeps it from reading beyond its 33 places."""
    b = Builder()
    place, values = b.input(33, dtype="int32"), b.input(40)

    def choice(p: te.Tensor, v: te.Tensor) -> te.Tensor:
        def wrapped(i: tirx.Var) -> PrimExpr:
            return tirx.if_then_else(p[i] < 0, p[i] + 6, p[i])

        return te.compute((40,), lambda i: tirx.if_then_else(tirx.all(i < 33, wrapped(i) == 2), v[i], 0.0))

    return b.program(b.add(choice, place, values))


def test_tvm_evaluates_choices_ahead_of_what_guards_them(monkeypatch: pytest.MonkeyPatch) -> None:
    place = np.arange(33, dtype=np.int32) % 6 - 6 * (np.arange(33, dtype=np.int32) % 2)
    values = np.arange(40, dtype=np.float32)
    given = {"in0": place, "in1": values}
    (found,) = compiled(guarded_choice()).on("cpu", checked=True)(given).values()
    assert np.array_equal(found, np.where((np.arange(40) < 33) & (np.pad(place % 6, (0, 7)) == 2), values, 0))
    monkeypatch.setattr(lower, "with_plain_conditions", lambda function: function)
    with fails_without("that of And in lower/printed_conditions.py", CertificateError, match="out of bounds"):
        compiled(guarded_choice())
