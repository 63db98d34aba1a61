"""Models that are rewritten so that ONNX Runtime sums products of bytes exactly on any processor: the same results."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from souffle import reference
from souffle.byte_products import multiplies_bytes, with_exact_sums
from souffle.reference import onnxruntime_outputs
from tests.frontend.support import node_model

RNG = np.random.default_rng(7)
KINDS = [("uint8", "int8"), ("int8", "uint8"), ("int8", "int8"), ("uint8", "uint8")]


def numbers(dtype, *shape):
    kind = np.iinfo(dtype)
    return RNG.integers(kind.min, kind.max + 1, shape).astype(dtype)


def by_runtime(model, feeds):
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return session.run(None, feeds)


def types_of_products(model) -> list[set[int]]:
    """The types of each product's two operands, as a rewritten model has them in constants and casts."""
    known = {tensor.name: tensor.data_type for tensor in model.graph.initializer}
    known |= {info.name: info.type.tensor_type.elem_type for info in model.graph.input}
    known |= {node.output[0]: node.attribute[0].i for node in model.graph.node if node.op_type == "Cast"}
    places = {"MatMulInteger": (0, 1), "ConvInteger": (0, 1), "QLinearMatMul": (0, 3), "QLinearConv": (0, 3)}
    return [
        {known[node.input[place]] for place in places[node.op_type]}
        for node in model.graph.node
        if node.op_type in places
    ]


@pytest.mark.parametrize("points", ["none", "one", "each"])
@pytest.mark.parametrize("constant", [True, False])
@pytest.mark.parametrize("kinds", KINDS, ids="-".join)
def test_products(kinds, constant, points):
    left, right = kinds
    x, w = numbers(left, 5, 37), numbers(right, 37, 6)
    zeros = {"none": [], "one": [np.array(7, left)], "each": [np.array(7, left), numbers(right, 6)]}[points]
    given = [(left, x.shape), w if constant else (right, w.shape), *zeros]
    model = node_model("MatMulInteger", given)
    feeds = {"x0": x} if constant else {"x0": x, "x1": w}
    made = with_exact_sums(model)
    onnx.checker.check_model(made)
    assert len(types_of_products(made)[0]) == 1
    (wanted,) = ReferenceEvaluator(model).run(None, feeds)
    np.testing.assert_array_equal(by_runtime(made, feeds)[0], wanted)


@pytest.mark.parametrize("kinds", KINDS[:2], ids="-".join)
@pytest.mark.parametrize("zeros", [0, 1, 2])
def test_convolutions(kinds, zeros):
    left, right = kinds
    x, w = numbers(left, 1, 3, 6, 7), numbers(right, 4, 3, 3, 3)
    points = [np.array(9, left), np.array(3, right)][:zeros]
    model = node_model("ConvInteger", [(left, x.shape), w, *points], pads=[1, 1, 1, 1])
    point = 9 if zeros else 0
    padded = np.pad(x.astype(np.int64) - point, ((0, 0), (0, 0), (1, 1), (1, 1)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), (2, 3))
    wanted = np.einsum("nchwij,ocij->nohw", windows, w.astype(np.int64) - (3 if zeros == 2 else 0))
    np.testing.assert_array_equal(by_runtime(with_exact_sums(model), {"x0": x})[0], wanted)


def chain() -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    """A product, quantized without a sign, by weights with one, twice by the same: they are moved once."""
    w = numpy_helper.from_array(numbers("int8", 8, 8), "w")
    more = [numpy_helper.from_array(np.array(v, t), n) for n, v, t in (("s", 0.0173, "float32"), ("z", 0, "int8"))]
    zero = numpy_helper.from_array(np.array(128, np.uint8), "u")
    nodes = [
        helper.make_node("QLinearMatMul", ["x", "s", "u", "w", "s", "z", "s", "u"], ["a"]),
        helper.make_node("QLinearMatMul", ["a", "s", "u", "w", "s", "z", "s", "u"], ["b"]),
        helper.make_node("MatMulInteger", ["b", "w"], ["y"]),
    ]
    ends = [
        helper.make_tensor_value_info(name, kind, [4, 8]) for name, kind in (("x", TensorProto.UINT8), ("y", 6))
    ]
    graph = helper.make_graph(nodes, "chain", ends[:1], ends[1:], [w, *more, zero])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10)
    return model, {"x": numbers("uint8", 4, 8)}


def test_a_chain_of_products():
    model, feeds = chain()
    before = model.SerializeToString()
    made = with_exact_sums(model)
    onnx.checker.check_model(made)
    assert model.SerializeToString() == before
    assert sum(tensor.name.startswith("w_") for tensor in made.graph.initializer) == 1
    np.testing.assert_array_equal(by_runtime(made, feeds)[0], ReferenceEvaluator(model).run(None, feeds)[0])


def test_the_reference_is_exact_where_onnx_runtime_is_not(monkeypatch, tmp_path):
    """On a processor without such an instruction, played where it has one; of a proto and of a file."""
    model, feeds = chain()
    (wanted,) = ReferenceEvaluator(model).run(None, feeds)
    onnx.save(model, tmp_path / "chain.onnx")
    found, asked = reference.sums_are_exact(), []
    monkeypatch.setattr(reference, "sums_are_exact", lambda: asked.append(1))
    for given in (model, str(tmp_path / "chain.onnx")):
        np.testing.assert_array_equal(onnxruntime_outputs(given, feeds)["y"], wanted)
    assert len(asked) == 2
    plain = node_model("Relu", [("float32", (2, 3))])
    assert not multiplies_bytes(plain)
    onnxruntime_outputs(plain, {"x0": np.zeros((2, 3), np.float32)})
    assert len(asked) == 2 and isinstance(found, bool)
