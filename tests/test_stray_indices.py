"""Indices that a caller gives, whatever they are, neither read nor write anything outside of the tensors."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import helper
from onnx.reference import ReferenceEvaluator

import souffle
from souffle.verify import PROVEN
from tests.frontend.support import model_of, reference
from tests.thorough import some

ROWS, COLUMNS = 5, 7
HUGE = np.array([-(2**63), 2**63 - 1, -(2**31), 2**31 - 1, 2**32 + 1, -(2**33), -ROWS - 1, ROWS, -1, 0, 10**12])
FLOATS = np.array([np.nan, np.inf, -np.inf, 1e30, -1e30, 3e9, -3e9, 1.0, -1.0, 1.5, 0.0], "float32")
"""As many as indices; coordinates of ROWS and COLUMNS among them."""
COUNT = len(HUGE)

X = ("float32", (ROWS, COLUMNS))
IMAGE = ("float32", (1, 2, ROWS, COLUMNS))


def node(operator: str, *inputs: str, **attributes: object) -> onnx.NodeProto:
    return helper.make_node(operator, list(inputs), ["y"], **attributes)


def integers(*shape: int) -> tuple[str, tuple[int, ...]]:
    return ("int64", shape)


NETWORKS = {
    "gather": ([node("Gather", "t", "i")], {"i": integers(COUNT)}),
    "gather_columns": ([node("Gather", "t", "i", axis=1)], {"i": integers(COUNT)}),
    "gather_elements": ([node("GatherElements", "t", "i", axis=1)], {"i": integers(ROWS, COUNT)}),
    "gather_nd": ([node("GatherND", "t", "i")], {"i": integers(COUNT, 2)}),
    "scatter_nd": ([node("ScatterND", "t", "i", "u")], {"i": integers(COUNT, 1), "u": ("float32", (COUNT, COLUMNS))}),
    "scatter_add": (
        [node("ScatterElements", "t", "i", "u", axis=1, reduction="add")],
        {"i": integers(ROWS, COUNT), "u": ("float32", (ROWS, COUNT))},
    ),
    "reverse": ([node("ReverseSequence", "t", "i", batch_axis=1, time_axis=0)], {"i": integers(COLUMNS)}),
    "reverse_rows": ([node("ReverseSequence", "t", "i", batch_axis=0, time_axis=1)], {"i": integers(ROWS)}),
    "one_hot": (
        [helper.make_node("OneHot", ["i", "depth", "values"], ["h"]), node("MatMul", "h", "t")],
        {"i": integers(COUNT)},
    ),
    **{
        f"grid_{mode}_{padding}": (
            [node("GridSample", "t", "g", mode=mode, padding_mode=padding)],
            {"g": ("float32", (1, COUNT, COUNT, 2))},
        )
        for mode, padding in (("linear", "zeros"), ("nearest", "border"), ("linear", "reflection"))
    },
    "deformed": (
        [node("DeformConv", "t", "w", "g")],
        {"g": ("float32", (1, 8, ROWS - 1, COLUMNS - 1))},
    ),
    "tensor_scatter": (
        [node("TensorScatter", "t", "u", "i", axis=1)],
        {"u": ("float32", (ROWS, 1)), "i": integers(ROWS)},
    ),
    "tensor_scatter_around": (
        [node("TensorScatter", "t", "u", "i", axis=1, mode="circular")],
        {"u": ("float32", (ROWS, 2)), "i": integers(ROWS)},
    ),
    "roi": (
        [node("RoiAlign", "t", "r", "i", output_height=2, output_width=3, sampling_ratio=2)],
        {"r": ("float32", (COUNT, 4)), "i": integers(COUNT)},
    ),
}
LEVELS = ("V4", "V0")
CONSTANTS = {
    "depth": np.int64(ROWS),
    "values": np.array([0, 1], "float32"),
    "w": np.linspace(-1, 1, 24, dtype="float32").reshape(3, 2, 2, 2),
}
# ONNX Runtime has them not everywhere.
NEWER = {"DeformConv", "TensorScatter"}


def model(name: str) -> onnx.ModelProto:
    nodes, inputs = NETWORKS[name]
    image = any(n.op_type in ("DeformConv", "GridSample", "RoiAlign") for n in nodes)
    first = helper.make_node("Tanh" if image else "Softmax", ["x"], ["t"])
    used = {name: array for name, array in CONSTANTS.items() if any(name in n.input for n in nodes)}
    opset = 24 if NEWER & {n.op_type for n in nodes} else 20
    return model_of([first, *nodes], {"x": IMAGE if image else X, **inputs}, ["y"], used, opset=opset)


def given(network: onnx.ModelProto, *, stray: bool) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    inputs = {}
    for value in network.graph.input:
        shape = tuple(d.dim_value for d in value.type.tensor_type.shape.dim)
        if value.name == "i":
            operators = {n.op_type for n in network.graph.node}
            low = 1 if "ReverseSequence" in operators else 0
            # There is one image to take regions from.
            array = rng.choice(HUGE, shape) if stray else rng.integers(low, 1 if "RoiAlign" in operators else 2, shape)
        elif value.name in "gr":
            array = rng.choice(FLOATS, shape) if stray else rng.uniform(-1.2, 1.2, shape).astype("float32")
        else:
            array = rng.standard_normal(shape).astype("float32")
        inputs[value.name] = array
    return inputs


# Whose TEs take the compiler longest, for which regions of images stand, and operators in another way.
OTHERS = ("deformed", "grid_linear_reflection", "gather_columns", "reverse_rows", "tensor_scatter_around")


@pytest.mark.parametrize("name", some((name for name in NETWORKS if name not in OTHERS), OTHERS))
def test_indices_of_any_value(name: str) -> None:
    network = model(name)
    here = souffle.compile(network, target="cpu")
    inputs = given(network, stray=False)
    if NEWER & {n.op_type for n in network.graph.node}:
        want = {"y": ReferenceEvaluator(network).run(None, inputs)[0]}
    else:
        want = reference(network, inputs)
    np.testing.assert_allclose(here(inputs)["y"], want["y"], rtol=1e-4, atol=1e-5)
    stray = given(network, stray=True)
    level = LEVELS[list(NETWORKS).index(name) % 2]
    kernels = souffle.compile(network, target="cuda", level=level, cubin=False, device="cpu")
    assert kernels.certificate.verdict == PROVEN, kernels.certificate
    # Finds every access outside of a tensor.
    checked = kernels.on("cpu", checked=True)
    np.testing.assert_allclose(checked(inputs)["y"], want["y"], rtol=1e-4, atol=1e-5)
    found = checked(stray)["y"]
    if "i" in stray and "r" not in stray:
        # Integers are cut and clamped alike everywhere.
        np.testing.assert_allclose(here(stray)["y"], found, rtol=1e-4, atol=1e-5)
    here(stray)


@pytest.mark.parametrize("name", ["gather", "gather_nd", "scatter_nd"])
def test_negative_indices_count_from_the_end(name: str) -> None:
    network = model(name)
    inputs = given(network, stray=False)
    negative = np.random.default_rng(1).permuted(np.arange(-ROWS, ROWS).repeat(5))
    shape = inputs["i"].shape
    inputs["i"] = np.resize(negative, shape)
    if name == "scatter_nd":
        inputs["u"] = inputs["u"][:1].repeat(shape[0], axis=0)
    found = souffle.compile(network, target="cpu")(inputs)["y"]
    np.testing.assert_allclose(found, reference(network, inputs)["y"], rtol=1e-4, atol=1e-5)
