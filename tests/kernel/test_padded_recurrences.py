"""Recurrences over sequences whose lengths an input says, drawn at random: loops at V4, right, proven, in any order."""

from __future__ import annotations

import random

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from benchmarks.recurrent import recurrent
from souffle.cli.compare import compare, onnxruntime_outputs
from souffle.frontend import import_onnx
from souffle.pipeline import compile_cuda
from souffle.verify import PROVEN
from tests.testlib import ORDERS, run_on_cpu_device
from tests.thorough import sized

GATES = {"RNN": 1, "GRU": 3, "LSTM": 4}


def drawn(seed: int) -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    """A recurrent operator in one of its forms, and inputs; some sequences have no elements, some are whole."""
    draw, rng = random.Random(seed), np.random.default_rng(seed)
    operator = draw.choice(list(GATES))
    direction = draw.choice(["forward", "forward", "reverse", "bidirectional"])
    directions = 1 + (direction == "bidirectional")
    steps, batch, width, hidden = draw.randint(5, 11), draw.randint(1, 5), draw.randint(3, 20), draw.randint(4, 33)
    gates = GATES[operator] * hidden
    shapes = {"W": (directions, gates, width), "R": (directions, gates, hidden)}
    names = ["x", "W", "R", "", "lengths", "", "", ""]
    if draw.random() < 0.7:
        names[3], shapes["B"] = "B", (directions, 2 * gates)
    inputs = {"x": rng.standard_normal((steps, batch, width)).astype(np.float32)}
    inputs["lengths"] = np.array([draw.choice([0, 1, steps, draw.randint(0, steps)]) for _ in range(batch)], np.int32)
    for place, state in ((5, "h"), (6, "c")):
        if draw.random() < 0.4 and (state == "h" or operator == "LSTM"):
            names[place] = state
            inputs[state] = rng.standard_normal((directions, batch, hidden)).astype(np.float32)
    if operator == "LSTM" and draw.random() < 0.3:
        names[7], shapes["P"] = "P", (directions, 3 * hidden)
    attributes = {"linear_before_reset": draw.randint(0, 1)} if operator == "GRU" else {}
    results = ["Y", "Y_h"] + (["Y_c"] if operator == "LSTM" else [])
    wanted = [name for name in results if draw.random() < 0.6] or ["Y"]
    outputs = [name if name in wanted else "" for name in results]
    while not names[-1]:
        names.pop()
    node = helper.make_node(operator, names, outputs, hidden_size=hidden, direction=direction, **attributes)
    constants = [
        numpy_helper.from_array((rng.standard_normal(shape) / np.sqrt(hidden)).astype(np.float32), name)
        for name, shape in shapes.items()
    ]
    given = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype), array.shape)
        for name, array in inputs.items()
    ]
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in wanted]
    graph = helper.make_graph([node], "padded", given, ends, constants)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 14)], ir_version=8)
    return onnx.shape_inference.infer_shapes(model), inputs


@pytest.mark.parametrize("seed", range(sized(3, 60)))
def test_lengths_that_an_input_says(seed: int) -> None:
    model, inputs = drawn(seed)
    level = "V3" if seed % 4 == 3 else "V4"
    plan = compile_cuda(import_onnx(model), level=level, arch="sm_90", cubin=False, verify="values").plan
    assert plan.certificate.verdict == PROVEN, plan.certificate
    found = run_on_cpu_device(plan, inputs)
    result = compare(found, onnxruntime_outputs(model, inputs), "fp32")
    assert result.ok, f"largest error {result.error:.2e} of the output's magnitude"
    for options in ORDERS:
        again = run_on_cpu_device(plan, inputs, **options)
        for output, value in found.items():
            np.testing.assert_array_equal(again[output], value, err_msg=str(options))


@pytest.mark.parametrize("kind", ["GRU", "LSTM"])
def test_stages_do_not_grow_with_the_steps(kind: str) -> None:
    """What differs between steps are numbers, of which a loop has one for each."""

    def stages(steps: int) -> int:
        program = import_onnx(recurrent(kind, 12, 16, steps=steps, batch=2, padded=True))
        plan = compile_cuda(program, level="V3", arch="sm_90", cubin=False, verify="off").plan
        assert any(d.stage == "roll" and d.accepted for d in plan.decisions)
        return sum(len(kernel.stages) for kernel in plan.kernels)

    assert stages(8) == stages(12)
