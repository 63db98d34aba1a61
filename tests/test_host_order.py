"""The order of stages on a processor, and merges that it leaves out."""

from __future__ import annotations

import random

import numpy as np
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

import souffle
from souffle.codegen.host_order import backwards, by_constants


class Tensor:
    def __init__(self, nbytes: int = 4) -> None:
        self.nbytes = nbytes


class Stage:
    def __init__(self, name: str, inputs: list[Tensor], output: Tensor) -> None:
        self.name, self.inputs, self.outputs = name, inputs, [output]


def names(stages) -> str:
    return " ".join(stage.name for stage in stages)


def test_a_stack_of_recurrent_layers_is_computed_layer_by_layer():
    weights = [Tensor(1 << 20), Tensor(1 << 20)]
    h, stages = [[Tensor() for _ in range(4)] for _ in weights], []
    for wave in range(5):  # by depth: one layer is a step behind the other
        for layer in range(2):
            t = wave - layer
            if 0 <= t < 4:
                below = [h[0][t]] if layer else []
                stages.append(Stage(f"{layer}{t}", [*below, *h[layer][max(0, t - 1) : t], weights[layer]], h[layer][t]))
    assert names(stages) == "00 01 10 02 11 03 12 13"
    assert names(by_constants(stages, set(weights))) == "00 01 02 03 10 11 12 13"
    assert names(by_constants(stages, set())) == names(stages)
    small = [Tensor(64), Tensor(64)]
    for stage in stages:
        stage.inputs = [small[weights.index(each)] if each in weights else each for each in stage.inputs]
    assert names(by_constants(stages, set(small))) == names(stages)


def test_the_same_weights_are_read_from_either_end_in_turn():
    one, other, small = Tensor(1 << 20), Tensor(1 << 20), Tensor(64)
    reads = [[one], [one, small], [], [other], [one], [small], [other], [small], [one, other]]
    stages = [Stage(str(number), inputs, Tensor()) for number, inputs in enumerate(reads)]
    turned = backwards(stages, {one, other, small})
    assert [int(each) for each in turned] == [0, 1, 0, 0, 0, 0, 1, 0, 0]


@pytest.mark.parametrize("seed", range(30))
def test_any_order_is_one_of_execution(seed):
    rng = random.Random(seed)
    constants = [Tensor(1 << rng.choice([10, 16, 20])) for _ in range(rng.randint(1, 4))]
    made: list[Tensor] = []
    stages = []
    for number in range(rng.randint(1, 60)):
        inputs = rng.sample(made, min(len(made), rng.randint(0, 3))) + rng.sample(constants, rng.randint(0, 1))
        made.append(Tensor())
        stages.append(Stage(str(number), inputs, made[-1]))
    ordered = by_constants(stages, set(constants))
    assert sorted(map(id, ordered)) == sorted(map(id, stages))
    there: set[Tensor] = set(constants)
    for stage in ordered:
        assert all(tensor in there for tensor in stage.inputs)
        there.update(stage.outputs)


def test_a_stack_of_layers_is_right_and_merges_no_products_of_different_layers():
    rng = np.random.default_rng(0)
    hidden, steps = 128, 5
    nodes, weights, x = [], [], "x"
    for layer in range(3):
        for name, shape in (("w", (1, 4 * hidden, hidden)), ("r", (1, 4 * hidden, hidden)), ("b", (1, 8 * hidden))):
            array = (rng.standard_normal(shape) / 16).astype(np.float32)
            weights.append(numpy_helper.from_array(array, f"{name}{layer}"))
        ins = [x, *(f"{name}{layer}" for name in "wrb")]
        nodes.append(helper.make_node("LSTM", ins, [f"y{layer}"], hidden_size=hidden, name=f"layer{layer}"))
        nodes.append(helper.make_node("Squeeze", [f"y{layer}", "one"], [f"x{layer}"]))
        x = f"x{layer}"
    weights.append(numpy_helper.from_array(np.array([1], np.int64), "one"))
    ends = [helper.make_tensor_value_info(n, TensorProto.FLOAT, [steps, 1, hidden]) for n in ("x", x)]
    graph = helper.make_graph(nodes, "stack", ends[:1], ends[1:], weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    net = souffle.compile(model, target="cpu", disable=["gathered"])
    value = rng.standard_normal((steps, 1, hidden)).astype(np.float32)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    np.testing.assert_allclose(net(value)[x], session.run(None, {"x": value})[0], rtol=1e-4, atol=1e-5)
    assert any(d.stage == "horizontal" and "weights of its own" in d.reason for d in net.plan.decisions)
    # Once a layer's own steps have begun, those of the layer below are over.
    own = [name for launch in net.plan.launches for name in launch.tes if "MatMul_h" in name]
    layers = [int(name.split("layer")[1][0]) for name in own]
    assert layers == sorted(layers) and set(layers) == {0, 1, 2}
