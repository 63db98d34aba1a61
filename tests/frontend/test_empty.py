"""Tensors without elements: results of the right shape, and reductions of nothing."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import helper

import souffle
from souffle.errors import UnsupportedOperatorError
from tests.frontend.support import assert_same, compare, model_of, node_model, random_inputs, reference

F = "float32"


def ints(*values):
    return np.array(values, dtype="int64")


ONES = np.ones(2, F)
CASES = {
    "resize": ("Resize", [(F, (1, 2, 3, 4)), None, np.array([1, 1, 0.1, 1], F)], {}),
    "slice": ("Slice", [(F, (3, 4)), ints(0), ints(0), ints(0)], {}),
    "relu": ("Relu", [(F, (0, 4))], {}),
    "broadcast": ("Add", [(F, (0, 4)), (F, (4,))], {}),
    **{f"{op}-of-none": (op, [(F, (2, 0, 4)), ints(1)], {"opset": 18}) for op in ("ReduceMean", "ReduceProd")},
    "sum-of-none": ("ReduceSum", [(F, (2, 0, 4)), ints(1)], {}),
    "max-of-none": ("ReduceMax", [(F, (2, 0, 4)), ints(1)], {"opset": 20}),
    "sum-beside": ("ReduceSum", [(F, (2, 0, 4)), ints(2)], {}),
    "matmul-of-none": ("MatMul", [(F, (3, 0)), (F, (0, 4))], {}),
    "matmul": ("MatMul", [(F, (0, 3)), (F, (3, 4))], {}),
    "concat": ("Concat", [(F, (3, 0)), (F, (3, 4))], {"axis": 1}),
    "gather": ("Gather", [(F, (3, 4)), ints()], {}),
    "gather-input": ("Gather", [(F, (3, 4)), ("int64", (0,))], {}),
    "split": ("Split", [(F, (4, 2)), ints(0, 3, 0, 1)], {"outputs": 4}),
    "conv": ("Conv", [(F, (0, 2, 5, 5)), np.ones((3, 2, 3, 3), F)], {}),
    "batch-norm": ("BatchNormalization", [(F, (0, 2, 3)), ONES, ONES, ONES, ONES], {}),
    "tile": ("Tile", [(F, (3, 4)), ints(0, 1)], {}),
    "negative-pad": ("Pad", [(F, (2, 4)), ints(-2, 0, 0, 0)], {}),
    "top-k": ("TopK", [(F, (3, 4)), ints(0)], {"outputs": 2}),
    "scatter": ("ScatterElements", [(F, (3, 4)), ("int64", (0, 4)), (F, (0, 4))], {}),
    "einsum": ("Einsum", [(F, (3, 0)), (F, (0, 4))], {"equation": "ij,jk->ik"}),
}


@pytest.mark.parametrize("case", CASES)
def test_empty(case):
    operator, inputs, options = CASES[case]
    compare(node_model(operator, inputs, **options))


@pytest.mark.parametrize("options", [{"target": "cpu"}, {"target": "cuda", "device": "cpu", "cubin": False}])
def test_a_network_with_empty_ends(options, tmp_path):
    nodes = [helper.make_node("Relu", ["x"], ["a"]), helper.make_node("Slice", ["a", "zero", "zero"], ["b"])]
    nodes += [helper.make_node("Neg", ["z"], ["c"])]
    inputs = {"z": (F, (2, 0)), "x": (F, (3, 4))}
    for outputs in (["c", "a", "b"], ["b", "c"]):
        model = model_of(nodes, inputs, outputs, {"zero": ints(0)})
        network = souffle.compile(model, **options)
        given = random_inputs(souffle.import_onnx(model))
        assert_same(network(given), reference(model, given))
        network.save(tmp_path / "n.souffle")
        device = {} if options["target"] == "cpu" else {"device": "cpu"}
        assert_same(souffle.load(tmp_path / "n.souffle", **device)(given), reference(model, given))


def test_what_has_no_time_step_is_refused():
    inputs = [(F, (0, 2, 3)), np.ones((1, 16, 3), F), np.ones((1, 16, 4), F)]
    with pytest.raises(UnsupportedOperatorError, match=r"LSTM of node 'the_LSTM' .*float32\[0, 2, 3\].*no time steps"):
        souffle.import_onnx(node_model("LSTM", inputs, outputs=3, hidden_size=4))
