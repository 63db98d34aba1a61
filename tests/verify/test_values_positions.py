"""Values of stages whose indices and comparisons are calculated in floating point: what agrees, and what does not."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from tvm import te, tirx

import souffle
from souffle.certificate import PROVEN
from souffle.pipeline import compile_cuda
from souffle.verify.expressions import Undecided
from souffle.verify.values import Agreement, Mismatch, values_agree
from tests.frontend.support import node_model
from tests.verify.hand_made import THREADS, Memory, sequence, stage

SIZE = 2 * THREADS
FLOAT = "float32"

Position = Callable[[object], object]
"""A whole number for the place of an element."""


def number(value: float) -> tirx.FloatImm:
    return tirx.FloatImm(FLOAT, value)


def real(at: object) -> tirx.Cast:
    return tirx.Cast(FLOAT, at)


def call(name: str, *operands: object) -> object:
    return tirx.call_pure_extern(FLOAT, name, *operands)


def whole(node: object) -> tirx.Cast:
    return tirx.Cast("int32", node)


def clamped(position: object) -> object:
    return tirx.Max(tirx.Min(position, SIZE - 1), 0)


def compared(wanted: Position, found: Position) -> object:
    def body(memory: Memory) -> tirx.Stmt:
        at = memory.tile * THREADS + memory.tid
        return tirx.BufferStore(memory.tensors[1], memory.tensors[0][clamped(found(at))], [at])

    x = te.placeholder((SIZE,), FLOAT, name="x")
    definition = te.create_prim_func([x, te.compute((SIZE,), lambda i: x[clamped(wanted(i))])])
    return values_agree(definition, [(stage("hand", [SIZE, SIZE], body), SIZE // THREADS, THREADS)])


def scaled(scale: float = 0.3, shift: float = -0.35, turns: int = 42) -> Position:
    return lambda at: whole(tirx.floor(real(at % turns) * number(scale) + number(shift)))


@pytest.mark.parametrize("options", [{"scale": 0.31}, {"shift": 0.65}, {"turns": 84}, {"turns": 43}, {"scale": 0.0}])
def test_a_number_in_a_position_is_another(options: dict) -> None:
    assert isinstance(compared(scaled(), scaled(**options)), Mismatch)


def chosen(limit: float, most: float = 9.0) -> Position:
    def position(at: object) -> object:
        place = real(at) * number(0.5)
        return whole(tirx.Select(place < number(limit), place, tirx.Min(number(most), place - number(1.0))))

    return position


@pytest.mark.parametrize("other", [chosen(5.5), chosen(5.0, 8.0)])
def test_a_number_that_a_position_is_compared_with_is_another(other: Position) -> None:
    assert isinstance(compared(chosen(5.0), chosen(5.0)), Agreement)
    assert isinstance(compared(chosen(5.0), other), Mismatch)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (scaled(), lambda at: whole(call("floorf", real(at % 42) * number(0.3) - number(0.35)))),
        (
            lambda at: whole(real(at) * number(0.5) + number(0.25)),
            lambda at: whole(real(2 * at + 1) / number(4.0)),
        ),
        # TensorIR's own rounding is to even, and called so in the text.
        (lambda at: whole(tirx.round(real(at) * number(0.5))), lambda at: whole(call("rintf", real(at) * number(0.5)))),
        (lambda at: whole(tirx.Cast("float64", real(at)) * 0.5), lambda at: at // 2),
        (lambda at: whole(tirx.Cast("bool", real(at % 3))), lambda at: whole(at % 3 != 0)),
        (
            lambda at: tirx.if_then_else(at > 5, whole(tirx.floor(number(2.7))), at),
            lambda at: tirx.Select(at > 5, 2, at),
        ),
        # Where it is zero nothing is divided.
        (
            lambda at: tirx.if_then_else(at > 0, whole(number(90.0) / real(at)), 0),
            lambda at: tirx.if_then_else(at > 0, 90 // at, 0),
        ),
    ],
)
def test_a_position_is_written_in_another_way(one: Position, other: Position) -> None:
    for wanted, found in ((one, other), (other, one)):
        result = compared(wanted, found)
        assert isinstance(result, Agreement), result


def test_halves_that_go_another_way() -> None:
    def half(name: str) -> Position:
        return lambda at: whole(call(name, real(at) * number(0.5)))

    assert isinstance(compared(half("rintf"), half("roundf")), Mismatch)


@pytest.mark.parametrize("shift", [0.5, 0.75])
def test_a_position_has_a_name_in_the_text(shift: float) -> None:
    def body(memory: Memory) -> tirx.Stmt:
        at, place = memory.tile * THREADS + memory.tid, tirx.Var("place", FLOAT)
        read = memory.tensors[0][clamped(whole(place + number(shift)))]
        return sequence(tirx.Bind(place, real(at) * number(0.25)), tirx.BufferStore(memory.tensors[1], read, [at]))

    x = te.placeholder((SIZE,), FLOAT, name="x")
    y = te.compute((SIZE,), lambda i: x[clamped(whole(real(i) * number(0.25) + number(0.5)))])
    found = values_agree(te.create_prim_func([x, y]), [(stage("hand", [SIZE, SIZE], body), 2, THREADS)])
    assert isinstance(found, Agreement if shift == 0.5 else Mismatch)


def test_what_nvcc_may_round_or_not() -> None:
    """11.5 * (5 / 23) is 2.5 where it is rounded before 0.5 is taken from it, and else a little less."""

    def position(at: object) -> object:
        return whole((real(at % 12) + number(0.5)) * number(5 / 23) - number(0.5))

    assert isinstance(compared(position, position), Agreement)
    sure = lambda at: tirx.Select(at % 12 == 11, 2, tirx.Select(at % 12 >= 7, 1, 0))  # noqa: E731
    assert isinstance(compared(position, sure), Agreement)
    found = compared(sure, position)
    assert isinstance(found, Undecided)
    assert "how nvcc rounds" in str(found)


@pytest.mark.parametrize(
    "position",
    [
        lambda at: whole(tirx.exp(real(at))),
        lambda at: whole(number(1.0) / real(at)),
        lambda at: whole(tirx.Cast("float16", at)),
        lambda at: tirx.Select(real(at) < number(float("inf")), at, 0),
    ],
)
def test_what_is_not_known_is_undecided(position: Position) -> None:
    assert isinstance(compared(position, position), Undecided)


def test_a_network_whose_positions_nvcc_may_round_or_not() -> None:
    inputs = [(FLOAT, (1, 2, 5, 11)), None, None, np.array([1, 2, 23, 5])]
    model = node_model("Resize", inputs, mode="linear", opset=19)
    found = compile_cuda(souffle.import_onnx(model), level="V4", verify="values", cubin=False).plan.certificate
    assert found.verdict == PROVEN, found
