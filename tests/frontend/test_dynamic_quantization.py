"""DynamicQuantizeLinear gives what ONNX Runtime gives, and its zero point is a short expression."""

from __future__ import annotations

import numpy as np
import onnxruntime
import pytest
from onnx import TensorProto, helper

import souffle
from tests.thorough import some


def _model(shape: tuple[int, ...]) -> bytes:
    node = helper.make_node("DynamicQuantizeLinear", ["x"], ["y", "scale", "point"])
    ends = [("y", TensorProto.UINT8, shape), ("scale", TensorProto.FLOAT, ()), ("point", TensorProto.UINT8, ())]
    graph = helper.make_graph(
        [node],
        "dynamic",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info(*end) for end in ends],
    )
    opset = helper.make_opsetid("", 17)
    return helper.make_model(graph, opset_imports=[opset], ir_version=8).SerializeToString()


def _numbers(shape: tuple[int, ...]) -> list[np.ndarray]:
    """Of all sizes and signs, none but zeros, and such as lie in the middle of two integers."""
    rng = np.random.default_rng(0)
    drawn = [rng.standard_normal(shape) * 10.0**power for power in (-30, -3, 0, 5, 30)]
    halves = [rng.integers(-255, 256, shape) / 2, rng.integers(0, 511, shape) / 2]
    some = [*drawn, *map(np.abs, drawn), *(-np.abs(one) for one in drawn), *halves, np.zeros(shape)]
    return [one.astype(np.float32) for one in some]


SHAPES = {"one": (1,), "small": (3, 5), "prime": (257,)}
# A vector for the one, rows for the other.
CASES = some(
    [("cpu", "prime"), ("cuda", "small")],
    [("cpu", "one"), ("cpu", "small"), ("cuda", "one"), ("cuda", "prime")],
)


@pytest.mark.parametrize(("target", "name"), CASES)
def test_it_gives_what_onnxruntime_gives(target: str, name: str) -> None:
    shape = SHAPES[name]
    model = _model(shape)
    network = souffle.compile(model, target=target, arch="sm_90", device="cpu", cubin=False)
    reference = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    for x in _numbers(shape):
        expected = dict(zip(("y", "scale", "point"), reference.run(None, {"x": x}), strict=True))
        found = network(x)
        for name, value in expected.items():
            np.testing.assert_array_equal(found[name], value, err_msg=f"{name} of {x.ravel()[:4]}")


def test_a_zero_point_stays_short() -> None:
    """A cast's looks for NaN and infinity would hold all that leads to the number four times, in each reader of it."""
    options = {"target": "cuda", "arch": "sm_90", "device": "cpu", "cubin": False, "level": "V4"}
    text = souffle.compile(_model((3, 5)), **options).plan.modules[0].text
    # Each of the two roundings is compared with the least number, and taken.
    assert "fabs" not in text and text.count("nearbyint") <= 4
