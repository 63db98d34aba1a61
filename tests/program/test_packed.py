"""Programs as bytes for another process: the same program, with what was one object still one."""

from __future__ import annotations

import random

import ml_dtypes
import numpy as np
import pytest

from souffle.errors import SouffleError
from souffle.program import TE, Loop, TEProgram
from souffle.program.packed import pack, unpack
from souffle.transform import horizontal, roll, vertical
from tests.testlib import Builder, assert_same_function, random_program


def sent(value: object) -> object:
    """As over a connection: nothing but bytes arrives."""
    return unpack([bytearray(piece) for piece in pack(value)])


def expressions(program: TEProgram) -> list[int]:
    """Which TEs have one ``te.ComputeOp``, by the number of the first that has it."""
    first: dict[int, int] = {}
    items = [inner for item in program.expanded().tes for inner in (item.body if isinstance(item, Loop) else [item])]
    return [first.setdefault(item.op.__chandle__(), len(first)) for item in items if isinstance(item, TE)]


@pytest.mark.parametrize("seed", range(4))
def test_random_programs_arrive_as_they_are(seed: int) -> None:
    program = random_program(random.Random(seed).choice, 8, seed)
    for one in (program, vertical(horizontal(program)[0])[0]):
        other = sent(one)
        assert str(other) == str(one) and expressions(other) == expressions(one)
        assert_same_function(one, other)


def test_loops_fused_and_extern_tes_arrive() -> None:
    b = Builder()
    x = b.input(5, 7)
    for _ in range(4):
        x = b.plus(b.tanh(b.matmul(x, b.constant(np.full((7, 7), 0.25, np.float32)))), x)
    program = b.program(b.relu(b.extern_sort(x)))
    rolled, _ = roll(vertical(program)[0])
    assert any(isinstance(item, Loop) for item in rolled.tes)
    other = sent(rolled)
    assert str(other) == str(rolled) and expressions(other) == expressions(rolled)
    assert_same_function(rolled, other)


def test_layers_that_share_an_expression_still_do() -> None:
    b = Builder()
    x = b.input(3, 4)
    y = b.relu(x)
    first = b.tes[-1]
    b.relu(y)
    second = b.tes[-1]
    shared = [first, type(first)(second.name, first.op, first.placeholders, (y,), second.outputs, second.origin)]
    one, two = sent(tuple(shared))
    assert one.op.same_as(two.op) and one.placeholders[0].same_as(two.placeholders[0])
    assert one.outputs[0] is two.inputs[0] and two.input_of(one.placeholders[0]) is two.inputs[0]


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6, dtype=np.float32).reshape(2, 3).T,
        np.zeros((0, 3), np.float32),
        np.float32(2.5).reshape(()),
        np.arange(4).astype(ml_dtypes.bfloat16),
        np.frombuffer(b"\1\0\1", np.bool_),
        np.broadcast_to(np.float16(3), (2, 5)),
    ],
    ids=["transposed", "empty", "scalar", "bfloat16", "read only", "one element"],
)
def test_constants_arrive(array: np.ndarray) -> None:
    found = sent({"w": array, "again": array})
    assert found["w"].dtype == array.dtype and found["w"].shape == array.shape and found["again"] is found["w"]
    np.testing.assert_array_equal(found["w"], array)


def test_weights_are_not_copied() -> None:
    array = np.arange(1 << 16, dtype=np.float32)
    pieces = pack({"w": array})
    assert any(np.shares_memory(np.frombuffer(piece, np.uint8), array) for piece in pieces[2:])


def test_errors_arrive() -> None:
    error = sent(SouffleError("no"))
    assert isinstance(error, SouffleError) and str(error) == "no"
