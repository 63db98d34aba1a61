"""Integers of 8 and 16 bits wrap around within an expression, too, on both targets and in the reference evaluator."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import tvm
from onnx import helper
from tvm import te, tirx

import souffle
from souffle.certificate import PROVEN
from souffle.codegen import cuda
from souffle.program import TEProgram
from souffle.program.evaluate import evaluate
from souffle.schedule.lower import cuda_target
from souffle.tvm_compat import PrimExpr
from tests.defects import mended
from tests.frontend.support import model_of
from tests.short_integers import SHORT, Grower, extreme_values

pytestmark = pytest.mark.sampled(8)

CUDA = {"target": "cuda", "device": "cpu", "cubin": False, "verify": "values"}
LEVELS = ("V0", "V3", "V4")


def elementwise(dtypes: Sequence[str], count: int, *formulas: Callable[..., PrimExpr]) -> TEProgram:
    """Each formula of one element of each input."""
    inputs = [te.placeholder((count,), dtype, name=f"x{n}") for n, dtype in enumerate(dtypes)]

    def compute(number: int, formula: Callable[..., PrimExpr]) -> te.Tensor:
        return te.compute((count,), lambda i: formula(*(x[i] for x in inputs)), name=f"y{number}")

    return souffle.from_te(inputs, [compute(*pair) for pair in enumerate(formulas)])


def agree(program: TEProgram, values: Sequence[np.ndarray], wanted: Sequence[np.ndarray], level: str) -> None:
    """Assert that all ways to run a program give what is wanted, and that the kernels are proven."""
    network = souffle.compile(program, level=level, **CUDA)
    assert network.certificate.verdict == PROVEN
    ways = {
        "cuda": network(*values),
        "cpu": souffle.compile(program, target="cpu", level=level)(*values),
        "reference": evaluate(program, values),
    }
    for way, results in ways.items():
        for name, expected in zip(results, wanted, strict=True):
            np.testing.assert_array_equal(results[name], expected, err_msg=f"{name} of {way}")


Formula = tuple[Callable[..., PrimExpr], Callable[..., np.ndarray]]
"""Of two elements, and of two arrays of ``int64``; ``w`` keeps a result in the short type."""


def formulas(dtype: str) -> list[Formula]:
    def number(value: int) -> PrimExpr:
        return tirx.const(value, dtype)

    def w(value: np.ndarray) -> np.ndarray:
        return value.astype(dtype).astype(np.int64)

    def long(x: PrimExpr) -> PrimExpr:
        return tirx.Cast("int32", x)

    half = np.iinfo(dtype).bits // 2
    return [
        (lambda a, b: a + number(1) >= a, lambda a, b: w(a + 1) >= a),
        (lambda a, b: a - b > number(0), lambda a, b: w(a - b) > 0),
        (lambda a, b: tirx.truncdiv(a + b, number(2)), lambda a, b: np.trunc(w(a + b) / 2)),
        (lambda a, b: tirx.floordiv(a + b, number(2)), lambda a, b: w(a + b) // 2),
        (lambda a, b: tirx.floormod(tirx.Max(a, number(0)) + tirx.Max(b, number(0)), number(3)),
         lambda a, b: w(np.maximum(a, 0) + np.maximum(b, 0)) % 3),
        (lambda a, b: tirx.shift_right(a * b, number(half)), lambda a, b: w(a * b) >> half),
        (lambda a, b: tirx.shift_right(tirx.shift_left(a, number(half)), number(half)),
         lambda a, b: w(a << half) >> half),
        (lambda a, b: tirx.bitwise_not(a) > b, lambda a, b: w(~a) > b),
        (lambda a, b: tirx.Max(a + b, a - b), lambda a, b: np.maximum(w(a + b), w(a - b))),
        (lambda a, b: tirx.Select(a * b < a, number(0) - a, b), lambda a, b: np.where(w(a * b) < a, w(-a), b)),
        # Through a conversion TVM's simplifier believes to know the bounds.
        (lambda a, b: long(a + number(1)) > 0, lambda a, b: w(a + 1) > 0),
        (lambda a, b: long(number(0) - a) > 0, lambda a, b: w(-a) > 0),
        (lambda a, b: tirx.floormod(long(a * number(3)), 3), lambda a, b: w(a * 3) % 3),
        (lambda a, b: tirx.Max(long(a + b), np.iinfo(dtype).min), lambda a, b: w(a + b)),
        (lambda a, b: long(tirx.Cast(dtype, long(a) + 300)) > 0, lambda a, b: w(a + 300) > 0),
    ]  # fmt: skip


@pytest.mark.parametrize("dtype", SHORT)
def test_arithmetic_wraps_around_within_an_expression(dtype: str) -> None:
    values = [extreme_values(96, seed)[SHORT.index(dtype)] for seed in (1, 2)]
    table = formulas(dtype)
    exact = [value.astype(np.int64) for value in values]
    program = elementwise((dtype,) * 2, 96, *(lambda a, b, of=of: tirx.Cast("float32", of(a, b)) for of, _ in table))
    wanted = [np.asarray(array(*exact)).astype(np.float32) for _, array in table]
    agree(program, values, wanted, LEVELS[SHORT.index(dtype) % 3])


@pytest.mark.parametrize("seed", range(2))
def test_random_expressions_are_what_numpy_makes_of_them(seed: int) -> None:
    grower = Grower(seed)
    expressions = [grower.expression() for _ in range(6)]
    values = extreme_values(64, seed)
    program = elementwise(SHORT, 64, *(lambda *x, of=e.of: of(x) for e in expressions))
    agree(program, values, [np.broadcast_to(e.numpy(values), (64,)) for e in expressions], LEVELS[1 + seed])


def test_lanes_of_vectors_are_stored_after_each_operation() -> None:
    """So that the generator's own text wraps them around; no rule makes such vectors yet, but for copies."""
    memory = [tirx.decl_buffer((4,), "uint16", name=name) for name in "xy"]
    pointers = [tirx.Var(name, tvm.ir.PointerType(tvm.ir.PrimType("uint16"), "global")) for name in "pq"]
    lanes = tirx.Ramp(tirx.IntImm("int32", 0), tirx.IntImm("int32", 1), 4)
    x = tirx.BufferLoad(memory[0], [lanes])
    halves = tirx.Div(tirx.Add(tirx.Mul(x, x), x), tirx.Broadcast(tirx.const(2, "uint16"), 4))
    declared = [tirx.DeclBuffer(buffer, data=p) for buffer, p in zip(memory, pointers, strict=True)]
    kernel = tirx.PrimFunc(pointers, tirx.SeqStmt([*declared, tirx.BufferStore(memory[1], halves, [lanes])]))
    target = cuda_target("sm_90")
    kernel = kernel.with_attr("global_symbol", "k").with_attr("calling_conv", 2).with_attr("target", target)
    text = cuda.text_of_functions({"k": kernel}, {}, target)
    assert len(re.findall(r"\.[xyzw] = \(\w+\.[xyzw][*+/]\w+\.[xyzw]\);", text)) == 3 * 4


@pytest.mark.parametrize("level", ["V0", "V4"])
def test_sums_of_short_integers_wrap_around(level: str) -> None:
    rows, terms = 3, 200
    inputs = [te.placeholder((rows, terms), dtype, name=f"x_{dtype}") for dtype in SHORT]

    def result(x: te.Tensor) -> te.Tensor:
        k = te.reduce_axis((0, terms), name="k")
        total = te.compute((rows,), lambda i: te.sum(x[i, k] * x[i, k], axis=[k]), name=f"total_{x.op.name}")
        return te.compute((rows,), lambda i: tirx.Cast("float32", total[i] - x[i, 0]), name=f"y_{x.op.name}")

    wanted = []
    for drawn in extreme_values(rows * terms, 5):
        array = drawn.reshape(rows, terms).astype(np.int64)
        wanted.append(((array * array).sum(axis=1) - array[:, 0]).astype(drawn.dtype).astype(np.float32))
    values = [v.reshape(rows, terms) for v in extreme_values(rows * terms, 5)]
    agree(souffle.from_te(inputs, list(map(result, inputs))), values, wanted, level)


@pytest.mark.parametrize("dtype", ["uint8", "uint16"])
@pytest.mark.parametrize("options", [{"target": "cpu"}, CUDA])
def test_a_chain_of_operators_wraps_around(options: dict, dtype: str) -> None:
    node = helper.make_node
    nodes = [
        node("Mul", ["a", "b"], ["product"]),
        node("BitShift", ["product", "b"], ["shifted"], direction="LEFT"),
        node("Sub", ["shifted", "a"], ["less"]),
        node("Greater", ["less", "b"], ["above"]),
        node("BitwiseNot", ["less"], ["rest"]),
        node("Add", ["rest", "a"], ["sum"]),
        node("Where", ["above", "sum", "b"], ["chosen"]),
        node("Cast", ["chosen"], ["y"], to=1),
    ]
    a, b = (extreme_values(50, seed)[SHORT.index(dtype)] for seed in (1, 2))
    b = b % 12
    model = model_of(nodes, {"a": (dtype, a.shape), "b": (dtype, b.shape)}, ["y"], opset=18)
    long = np.int64
    bits = np.iinfo(dtype).bits
    shifted = np.where(b < bits, (a.astype(long) * b).astype(dtype).astype(long) << b.astype(long), 0).astype(dtype)
    less = (shifted.astype(long) - a).astype(dtype)
    wanted = np.where(less > b, ((~less).astype(long) + a).astype(dtype), b).astype(np.float32)
    np.testing.assert_array_equal(souffle.compile(model, **options)(a, b)["y"], wanted)


def test_what_wraps_around_whatever_the_data_is_no_error() -> None:
    beyond = tirx.shift_left(tirx.const(2, "int8"), tirx.const(6, "int8"))
    agree(elementwise(("int8",), 4, lambda x: x + beyond), [np.arange(4, dtype="int8")], [np.arange(-128, -124)], "V4")


@pytest.mark.parametrize("dtype", ["int8", "uint8"])
def test_an_index_that_wraps_around_stays_inside(dtype: str) -> None:
    """Where C calculates in ``int`` it does not."""
    least, most = np.iinfo(dtype).min, np.iinfo(dtype).max
    x, chosen = te.placeholder((256,), "float32", name="x"), te.placeholder((4,), dtype, name="chosen")

    def element(i: tirx.Var) -> PrimExpr:
        return x[tirx.Cast("int32", chosen[i] + tirx.const(1, dtype)) - int(least)]

    values = [np.arange(256, dtype="float32"), np.array([least, 0, most - 1, most], dtype)]
    program = souffle.from_te([x, chosen], [te.compute((4,), element, name="y")])
    agree(program, values, [np.float32([1, 1 - int(least), 255, 0])], "V4")


@pytest.mark.parametrize("dtype", SHORT)
def test_c_calculates_in_int(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    program = elementwise((dtype,), 4, lambda x: tirx.Cast("float32", x + tirx.const(1, dtype) >= x))
    most = np.iinfo(dtype).max

    def right() -> bool:
        (found,) = souffle.compile(program, **CUDA)(np.array([0, 1, most - 1, most], dtype)).values()
        return np.array_equal(found, [1, 1, 1, 0])

    assert right()
    monkeypatch.setattr(cuda, "with_short_integers", lambda module: module)
    assert not right(), mended("codegen/short_integers.py")
