"""Operators that TVM's importer gets wrong: each has another result, or none, where it is left to TVM."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
import pytest
import tvm
from onnx import helper, numpy_helper
from tvm import tirx
from tvm.sym import Analyzer

import souffle
from souffle.errors import SouffleError
from souffle.frontend.custom import OWN_DEFINITIONS
from souffle.frontend.interpreter import SPECIAL_OPERATORS
from tests.defects import fails_without, mended
from tests.frontend import test_element_types as element_types

pytestmark = pytest.mark.sampled(4)

INF, NAN = np.inf, np.nan


@dataclass
class Case:
    """A node and what it gives of its inputs; `constants` are parts of the model."""

    operator: str
    inputs: Sequence[np.ndarray]
    wanted: Sequence[np.ndarray]
    attributes: Mapping[str, Any] = field(default_factory=dict)
    constants: Sequence[np.ndarray] = ()
    opset: int = 18

    def model(self) -> onnx.ModelProto:
        names, constants = [f"x{k}" for k in range(len(self.inputs))], [f"c{k}" for k in range(len(self.constants))]
        outputs = [f"y{k}" for k in range(len(self.wanted))]
        given = [
            helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(x.dtype), x.shape)
            for name, x in zip(names, self.inputs, strict=True)
        ]
        results = [
            helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(y.dtype), None)
            for name, y in zip(outputs, self.wanted, strict=True)
        ]
        known = [numpy_helper.from_array(c, name) for c, name in zip(self.constants, constants, strict=True)]
        node = helper.make_node(self.operator, names + constants, outputs, **self.attributes)
        graph = helper.make_graph([node], "g", given, results, known)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", self.opset)], ir_version=9)

    def is_right(self) -> bool:
        results = list(souffle.compile(self.model(), target="cpu")(*self.inputs).values())
        return all(
            result.dtype == want.dtype and result.shape == want.shape and _are_close(result, want)
            for result, want in zip(results, self.wanted, strict=True)
        )


def _are_close(result: np.ndarray, want: np.ndarray) -> bool:
    """Within a part of the largest number wanted."""
    result, want, part = np.float64(result), np.float64(want), 1e-5 if want.itemsize < 8 else 1e-12
    largest = np.abs(want[np.isfinite(want)]).max(initial=0)
    return np.allclose(result, want, part, part * largest, equal_nan=True)


def f32(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


def layer_norm_of_doubles() -> Case:
    x = np.random.default_rng(0).standard_normal((2, 8))
    wanted = (x - x.mean(1, keepdims=True)) / np.sqrt(x.var(1, keepdims=True) + np.float64(np.float32(1e-5)))
    return Case("LayerNormalization", [x], [wanted], constants=[np.ones(8)])


def affine_grid_of_doubles() -> Case:
    theta = np.array([[[1 / 3, 0, 0], [0, 1 / 7, 0]]])
    places = np.linspace(-1, 1, 4)
    wanted = np.stack(np.meshgrid(places / 3, places / 7), -1)[None]
    return Case("AffineGrid", [theta], [wanted], {"align_corners": 1}, [np.array([1, 1, 4, 4])], opset=20)


def groups_far_from_zero() -> Case:
    x = (4096 + np.arange(16, dtype=np.float32) % 4).reshape(1, 4, 4)
    rows = x.astype(np.float64).reshape(2, 8)
    wanted = (rows - rows.mean(1, keepdims=True)) / np.sqrt(rows.var(1, keepdims=True) + 1e-5)
    ones, zeros = np.ones(4, np.float32), np.zeros(4, np.float32)
    wanted = wanted.reshape(x.shape).astype(np.float32)
    return Case("GroupNormalization", [x], [wanted], {"num_groups": 2}, [ones, zeros], opset=21)


def region_of_half_the_scale() -> Case:
    x = np.arange(64, dtype=np.float32).reshape(1, 1, 8, 8)
    # From (2, 2) to (10, 10), halved and moved by half a pixel: from 0.5 to 4.5, whose middle is at 2.5.
    region = np.array([[2, 2, 10, 10]], np.float32)
    attributes = {"output_height": 1, "output_width": 1, "sampling_ratio": 1, "spatial_scale": 0.5}
    return Case("RoiAlign", [x, region], [np.full((1, 1, 1, 1), 2.5 * 8 + 2.5, np.float32)], attributes,
                [np.zeros(1, np.int64)])  # fmt: skip


def infinity_between_taps() -> Case:
    x = np.array([[[1, INF, 2]]], np.float32)
    wanted = np.array([[[1, INF, 2 + 1, INF, 2]]], np.float32)
    return Case("ConvTranspose", [x], [wanted], {"dilations": [2]}, [np.ones((1, 1, 2), np.float32)])


TRUTHS = np.array([True, False, True])
HUNDREDS = np.array([100, 100], np.int8)
BIT, FAR = (np.array([number], np.uint32) for number in (1, 40))
MOST = float(np.finfo(np.float32).max)
SMALL = np.array([-1e-3, -2e-3], np.float16)
NEAR = f32(NAN, INF, -INF, 1, -1, 0)
BY_ZERO = Case("Div", [np.array([7, 3]), np.array([0, 2])], [np.array([0, 1])])
CASES = {
    "LayerNormalization: doubles in single precision": layer_norm_of_doubles(),
    "AffineGrid: doubles in single precision": affine_grid_of_doubles(),
    "GroupNormalization: a difference of mean squares": groups_far_from_zero(),
    "RoiAlign: half a pixel before the scale": region_of_half_the_scale(),
    "ConvTranspose: zeros between the taps": infinity_between_taps(),
    "Equal: truth values": Case("Equal", [TRUTHS, TRUTHS[::-1].copy()], [np.array([True, True, True])]),
    "ReduceSumSquare: no axis": Case(
        "ReduceSumSquare", [f32(1, 2, 3)], [f32(1, 4, 9)], {"noop_with_empty_axes": 1}, [np.zeros(0, np.int64)]
    ),
    "ReduceLogSumExp: infinities": Case("ReduceLogSumExp", [f32(INF, 1)], [f32(INF)], {"keepdims": 1}),
    "ReduceMean: sums in the type of the numbers": Case("ReduceMean", [HUNDREDS], [HUNDREDS[:1]]),
    "ReduceMax: truth values": Case("ReduceMax", [TRUTHS], [np.array([True])], opset=20),
    "MaxPool: SAME_LOWER": Case(
        "MaxPool",
        [f32(1, 2, 3, 4, 5).reshape(1, 1, 5)],
        [f32(1, 3, 5).reshape(1, 1, 3)],
        {"kernel_shape": [2], "strides": [2], "auto_pad": "SAME_LOWER"},
    ),
    "Split: parts without elements": Case(
        "Split", [f32(1, 2)], [f32(), f32(1, 2), f32()], constants=[np.array([0, 2, 0])]
    ),
    "Sign: NaN": Case("Sign", [NEAR], [f32(NAN, 1, -1, 1, -1, 0)]),
    "Clip: no bounds are the least and the largest number": Case("Clip", [NEAR], [f32(NAN, MOST, -MOST, 1, -1, 0)]),
    "ThresholdedRelu: NaN": Case("ThresholdedRelu", [NEAR], [f32(0, INF, 0, 0, 0, 0)], {"alpha": 1.0}),
    "Elu: halves lose their digits": Case("Elu", [SMALL], [np.expm1(np.float32(SMALL)).astype(np.float16)]),
    "LeakyRelu: zero times infinity": Case("LeakyRelu", [NEAR], [f32(NAN, INF, NAN, 1, 0, 0)], {"alpha": 0.0}),
    "Mul: zero times infinity": Case("Mul", [NEAR], [f32(NAN, NAN, NAN, 0, 0, 0)], {}, [np.float32(0)]),
    "PRelu: zero times infinity": Case("PRelu", [f32(-1, 0, 2)], [f32(-INF, 0, 2)], {}, [f32(INF)]),
    "Softplus: small numbers": Case("Softplus", [f32(-20)], [np.exp(f32(-20))]),
    "Mish: small numbers": Case("Mish", [f32(-20)], [-20 * np.exp(f32(-20))], opset=18),
    "Div: by zero": Case("Div", [NEAR], [f32(NAN, INF, -INF, INF, -INF, NAN)], {}, [np.float32(0)]),
    "IsInf: of one sign": Case("IsInf", [NEAR], [np.arange(6) == 1], {"detect_negative": 0}),
    "Pow: integers": Case("Pow", [np.array([3, -2], np.int32)], [np.array([9, 4], np.int32)], {}, [np.int32(2)]),
    "Concat: parts without elements": Case("Concat", [f32(1)], [f32(1)], {"axis": 0}, [f32()]),
    "ArgMax: NaN": Case("ArgMax", [f32(1, NAN, 2)], [np.array([1])]),
    "Softmax: sums of halves": Case("Softmax", [np.zeros(70000, np.float16)], [np.full(70000, 1 / 70000, np.float16)]),
    "BitShift: beyond the width": Case("BitShift", [BIT, FAR], [0 * BIT], {"direction": "LEFT"}),
}


def left_to_tvm(operator: str) -> None:
    for table in (OWN_DEFINITIONS, SPECIAL_OPERATORS):
        table.pop(operator, None)


@pytest.fixture
def tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Puts back what a test takes out of them."""
    for table in (OWN_DEFINITIONS, SPECIAL_OPERATORS):
        for operator, definition in list(table.items()):
            monkeypatch.setitem(table, operator, definition)


@pytest.mark.usefixtures("tables")
@pytest.mark.parametrize("name", CASES)
def test_what_is_left_to_tvm_is_wrong(name: str) -> None:
    case = CASES[name]
    assert case.is_right()
    workaround = OWN_DEFINITIONS.get(case.operator) or SPECIAL_OPERATORS[case.operator]
    left_to_tvm(case.operator)
    try:
        right = case.is_right()
    except (SouffleError, tvm.error.InternalError):
        right = False
    assert not right, mended(f"{workaround.__name__} in {workaround.__module__}, at least for this,")


@pytest.mark.usefixtures("tables")
def test_unsigned_differences_are_taken_not_to_wrap_around() -> None:
    """What is concluded of them goes wrong in what reads them."""
    left_to_tvm("Sub")
    with fails_without("_difference in custom_elementwise", AssertionError, SouffleError, tvm.error.InternalError):
        element_types.test_differences_of_unsigned_integers_wrap_around({"target": "cpu"})


@pytest.mark.parametrize(("source", "target"), [("uint32", "int32"), ("uint64", "int64"), ("uint64", "int32")])
def test_what_was_unsigned_is_taken_not_to_be_negative(source: str, target: str) -> None:
    """``test_what_was_unsigned_may_be_negative`` has the results."""
    negative = Analyzer().simplify(tirx.Cast(target, tirx.Var("x", source)) < tirx.const(0, target))
    assert isinstance(negative, tirx.IntImm), mended("_cast in custom_elementwise")


def test_division_by_zero_traps() -> None:
    """The process ends with a signal, so it is one of its own."""
    assert BY_ZERO.is_right()
    text = f"from {__name__} import BY_ZERO, left_to_tvm; left_to_tvm('Div'); print(BY_ZERO.is_right())"
    ended = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=False, timeout=100)
    assert "True" not in ended.stdout, mended("_divided in souffle.frontend.custom_elementwise")
    assert ended.returncode < 0, ended.stderr
