"""Integers that lose their upper bits in a conversion, on both targets and in the reference evaluator."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import TensorProto, helper
from tvm import tirx

import souffle
from tests.codegen.test_short_integers import CUDA, agree, elementwise
from tests.converted_integers import SOURCES, drawn_chain, drawn_values
from tests.frontend.support import model_of
from tests.thorough import sized


@pytest.mark.parametrize("seed", range(sized(2, 4)))
def test_random_chains_of_conversions_are_what_numpy_makes_of_them(seed: int) -> None:
    chains = [drawn_chain(12 * seed + k) for k in range(12)]
    values = drawn_values(64, seed)
    program = elementwise(SOURCES, 64, *(lambda *x, chain=chain: chain.of(x[chain.source]) for chain in chains))
    agree(program, values, [chain.numpy(values[chain.source]) for chain in chains], ("V0", "V3", "V4")[seed % 3])


@pytest.mark.parametrize("options", [{"target": "cpu"}, CUDA])
def test_a_sum_beyond_the_new_type_is_its_lowest_bits(options: dict) -> None:
    node = helper.make_node
    nodes = [
        node("Cast", ["x"], ["long"], to=TensorProto.INT64),
        node("Add", ["long", "offset"], ["sum"]),
        node("Cast", ["sum"], ["short"], to=TensorProto.INT32),
        node("GreaterOrEqual", ["short", "zero"], ["not_below"]),
        node("Cast", ["not_below"], ["y"], to=TensorProto.FLOAT),
    ]
    constants = {"offset": np.int64(2**31), "zero": np.int32(0)}
    model = model_of(nodes, {"x": ("int32", (8,))}, ["y"], constants, opset=17)
    x = np.array([0, 1, -1, 5, -5, 2**31 - 1, -(2**31), -7], np.int32)
    wanted = ((x.astype(np.int64) + 2**31).astype(np.int32) >= 0).astype(np.float32)
    np.testing.assert_array_equal(souffle.compile(model, **options)(x)["y"], wanted)


def test_what_is_one_number_in_every_case_is_its_lowest_bits() -> None:
    """TVM refuses to convert a literal that the new type does not hold, and makes one of what has one value."""
    always = elementwise(("uint8",), 4, lambda x: tirx.Cast("uint8", tirx.Min(tirx.Cast("int32", x), -16)))
    agree(always, [np.arange(4, dtype="uint8")], [np.full(4, 240)], "V4")


@pytest.mark.parametrize("kind", [tirx.LT, tirx.LE, tirx.GT, tirx.GE])
def test_extremes_of_unsigned_integers_are_compared(kind: type) -> None:
    compare = {tirx.LT: np.less, tirx.LE: np.less_equal, tirx.GT: np.greater, tirx.GE: np.greater_equal}[kind]
    five, nine = (tirx.const(value, "uint32") for value in (5, 9))
    program = elementwise(
        ("uint32",),
        6,
        lambda x: tirx.Cast("float32", kind(tirx.Min(x, nine), five)),
        lambda x: tirx.Cast("float32", kind(five, tirx.Max(x, nine))),
    )
    x = np.array([0, 4, 5, 6, 9, 2**32 - 1], "uint32")
    agree(program, [x], [compare(np.minimum(x, 9), 5), compare(5, np.maximum(x, 9))], "V3")
