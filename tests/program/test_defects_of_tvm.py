"""Defects of TVM's simplifier and code generators that ``souffle.program`` keeps from all targets."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import tvm
from tvm import s_tir, te, tirx
from tvm.ir.expr import TensorLoad
from tvm.sym import Analyzer

import souffle
from benchmarks.fuzz.case import read_case
from souffle.codegen import cuda
from souffle.program import llvm_pipeline
from souffle.program.extrema import with_infinite_identity, with_llvm_extrema
from souffle.program.flattening import flatten_buffers
from souffle.program.ieee import with_ieee_arithmetic
from souffle.program.library_functions import with_library_functions
from souffle.program.llvm_pipeline import compile_llvm
from souffle.program.wide import with_long_shapes
from souffle.schedule.cpu.elementary import rounded_to_bfloat16
from souffle.tvm_compat import PrimExpr, believed_bounds, collect, substitute
from tests.defects import fails_without, mended
from tests.testlib import Builder

LLVM = tvm.target.Target("llvm")
INF, NAN = np.inf, np.nan
ZERO = tirx.const(0.0, "float32")
VARIABLES = [tirx.Var(name, "float32") for name in "xy"]

CORPUS = Path(__file__).parents[1] / "corpus"


def run(function: tirx.PrimFunc, *arrays: np.ndarray, result: np.ndarray) -> np.ndarray:
    """What a function gives that TVM compiles by itself."""
    made = tvm.runtime.tensor(result)
    module = tvm.compile(tvm.IRModule({"main": function.with_attr("global_symbol", "main")}), target=LLVM)
    module["main"](*map(tvm.runtime.tensor, arrays), made)
    return made.numpy()


@pytest.mark.parametrize(
    ("formula", "x", "y", "wanted"),
    [
        (lambda x, y: tirx.Sub(x, x), INF, 0, NAN),
        (lambda x, y: tirx.Sub(tirx.Add(x, y), y), 1, 2.0**25, 0),
        (lambda x, y: tirx.Sub(x, tirx.Add(x, y)), 2.0**25, 1, 0),
        (lambda x, y: tirx.Sub(tirx.Select(y > ZERO, x, y), x), INF, 1, NAN),
        (lambda x, y: tirx.Mul(x, ZERO), INF, 0, NAN),
        (lambda x, y: tirx.Div(ZERO, x), 0, 0, NAN),
        (lambda x, y: tirx.Select(tirx.EQ(x, x), x, y), NAN, 7, 7),
        (lambda x, y: tirx.Select(tirx.NE(x, x), y, x), NAN, 7, 7),
        (lambda x, y: tirx.Select(tirx.Not(x < y), y, x), NAN, 7, 7),
    ],
)
def test_numbers_are_taken_to_be_real(formula: Callable, x: float, y: float, wanted: float) -> None:
    a, b = (te.placeholder((1,), name=name) for name in "ab")
    given = [np.array([value], np.float32) for value in (x, y)]
    expected = np.array([wanted], np.float32)

    def result(form: Callable[[PrimExpr], PrimExpr]) -> np.ndarray:
        made = te.compute((1,), lambda i: form(formula(a[i], b[i])), name="result")
        return run(te.create_prim_func([a, b, made]), *given, result=np.zeros(1, np.float32))

    np.testing.assert_array_equal(result(with_ieee_arithmetic), expected)
    wrong = not np.array_equal(result(lambda plain: plain), expected, equal_nan=True)
    assert wrong, mended(f"the form of {formula(*VARIABLES)} in program/ieee.py")


def test_a_number_over_zero_is_refused() -> None:
    x = tirx.Var("x", "float32")
    assert "inf" in str(Analyzer().simplify(with_ieee_arithmetic(tirx.Div(x, ZERO))))
    with fails_without("the division by zero in program/ieee.py", tvm.error.InternalError, match="Divide by zero"):
        Analyzer().simplify(tirx.Div(x, ZERO))


@pytest.mark.parametrize("kind", [tirx.LT, tirx.Sub])
def test_cancelling_unsigned_integers_leaves_them(kind: type) -> None:
    """``x < x + 1`` and ``x - (x + 1)`` become 0 - 1, which the simplifier refuses of unsigned integers."""
    x = tirx.Var("x", "uint8")
    cancelled = kind(x, x + tirx.const(1, "uint8"))
    Analyzer().simplify(with_ieee_arithmetic(cancelled))
    with fails_without("_unsigned in program/ieee.py", tvm.error.InternalError, match="negative uint"):
        Analyzer().simplify(cancelled)


SHORT = tirx.Var("x", "uint8")
ONE, THREE = tirx.const(1, "uint8"), tirx.const(3, "uint8")


@pytest.mark.parametrize(
    ("calculated", "believed"),
    [
        (tirx.Cast("int32", SHORT + ONE) > 0, 1),
        (tirx.Cast("int32", tirx.const(0, "uint8") - SHORT) > 0, 0),
        (tirx.truncmod(tirx.Cast("int32", SHORT * THREE), 3), 0),
        (tirx.Cast("int32", tirx.Cast("int8", tirx.Cast("int32", SHORT) + 100)) > 0, 1),
    ],
)
def test_short_integers_are_bounded_as_if_they_did_not_wrap_around(calculated: PrimExpr, believed: int) -> None:
    kept = Analyzer().simplify(with_ieee_arithmetic(calculated))
    assert collect(kept, tirx.Cast)
    assert with_ieee_arithmetic(kept).same_as(kept), "hidden twice"
    found = Analyzer().simplify(calculated)
    assert isinstance(found, tirx.IntImm), mended("_conversion in program/ieee.py")
    assert int(found) == believed


LONG, POSITIVE = te.placeholder((4,), "int32", name="x"), te.placeholder((4,), "uint32", name="u")


@pytest.mark.parametrize(
    "converted",
    [
        tirx.Cast("int32", tirx.Cast("int64", LONG[0]) + tirx.IntImm("int64", 2**31)),
        tirx.Cast("int32", POSITIVE[0]),
    ],
)
def test_integers_that_lose_their_upper_bits_are_bounded_as_if_they_had_none(converted: PrimExpr) -> None:
    kept = with_ieee_arithmetic(converted)
    assert believed_bounds(kept)[0] < 0
    assert with_ieee_arithmetic(kept).same_as(kept), "hidden twice"
    assert believed_bounds(converted)[0] == 0, mended("_conversion in program/ieee.py")


def test_a_literal_that_its_new_type_does_not_hold_is_refused() -> None:
    literal = tirx.Cast("uint8", tirx.IntImm("int32", -16))
    assert int(with_ieee_arithmetic(literal).value) == 240
    with fails_without("_conversion in program/ieee.py", tvm.error.InternalError, match="negative value"):
        Analyzer().simplify(literal)


def test_limits_of_unsigned_extremes_are_cancelled() -> None:
    x = te.placeholder((2,), "uint32", name="x")
    one, five = tirx.const(1, "uint32"), tirx.const(5, "uint32")
    function = te.create_prim_func([x, te.compute((2,), lambda i: tirx.Min(x[i], one) < five, name="result")])
    values, blank = np.uint32([0, 2**32 - 1]), np.zeros(2, bool)
    exact = function.with_body(with_ieee_arithmetic(function.body))
    np.testing.assert_array_equal(run(exact, values, result=blank), [True, True])
    with fails_without("_unsigned in program/ieee.py", tvm.error.InternalError, match="negative uint"):
        run(function, values, result=blank)


@pytest.mark.parametrize("kind", [tirx.LT, tirx.EQ])
def test_a_literal_is_taken_to_a_side_where_its_type_does_not_hold_it(kind: type) -> None:
    compared = kind(tirx.Var("x", "int32") + tirx.IntImm("int32", -(2**31)), tirx.IntImm("int32", 127))
    kept = Analyzer().simplify(with_ieee_arithmetic(compared))
    assert with_ieee_arithmetic(kept).same_as(kept), "hidden twice"
    with fails_without("_compared in program/ieee.py", ValueError, match="exceeds range of int32"):
        Analyzer().simplify(compared)


def test_divisions_of_short_integers_are_truncated_where_these_wrap_around() -> None:
    """``floormod`` of a sum of two numbers that are not below zero; LowerIntrin takes the sum not to be, either."""
    most, three = np.int8([127, 100]), tirx.const(3, "int8")
    a, b = (te.placeholder((2,), "int8", name=name) for name in "ab")

    def rest(i: tirx.Var) -> PrimExpr:
        zero = tirx.const(0, "int8")
        return tirx.floormod(tirx.Max(a[i], zero) + tirx.Max(b[i], zero), three)

    function = te.create_prim_func([a, b, te.compute((2,), rest, name="result")])
    exact = function.with_body(with_ieee_arithmetic(function.body))
    wanted, blank = np.mod(most + most, 3), np.zeros(2, np.int8)
    np.testing.assert_array_equal(run(exact, most, most, result=blank), wanted)
    assert not np.array_equal(run(function, most, most, result=blank), wanted), mended("_floored in program/ieee.py")


T = tirx.Var("t", "int32")


@pytest.mark.parametrize(
    ("shape", "index", "extent"),
    [
        ((31, 5), [tirx.floordiv(tirx.floormod(T, 310), 10), tirx.floormod(T + 2, 5)], 1240),
        ((2, 21), [tirx.floormod(tirx.floordiv(T, 21), -2) + 1, tirx.floormod(T, 21)], 84),
    ],
)
def test_one_division_becomes_another_in_flat_indices(shape: tuple, index: list, extent: int) -> None:
    x, y = tirx.decl_buffer(shape, "float32", name="x"), tirx.decl_buffer((extent,), "float32", name="y")
    body = tirx.For(T, 0, extent, tirx.ForKind.SERIAL, tirx.BufferStore(y, tirx.BufferLoad(x, index), [T]))
    module = tvm.IRModule({"main": tirx.PrimFunc([x, y], body)})

    def numbers(place: PrimExpr) -> list[int]:
        values = ({T: tirx.IntImm("int32", t)} for t in range(extent))
        return [int(Analyzer().simplify(substitute(place, value))) for value in values]

    def flat(passes: tvm.transform.Pass) -> list[int]:
        (load,) = collect(passes(module)["main"].body, TensorLoad)
        return numbers(load.indices[0])

    wanted = [row * shape[1] + column for row, column in zip(*map(numbers, index), strict=True)]
    assert flat(flatten_buffers()) == wanted
    assert flat(tirx.transform.FlattenBuffer()) != wanted, mended("program/flattening.py")


def test_places_beyond_32_bits_are_refused() -> None:
    x, y = tirx.decl_buffer((2**16, 2**16), "int8", name="x"), tirx.decl_buffer((4,), "int8", name="y")
    function = tirx.PrimFunc([x, y], tirx.For(T, 0, 4, tirx.ForKind.SERIAL, tirx.BufferStore(y, x[T * 16384, 0], [T])))
    flatten = tirx.transform.FlattenBuffer()
    flatten(tvm.IRModule({"main": with_long_shapes(function)}))
    with fails_without("with_long_shapes in program/wide.py", ValueError, tvm.error.InternalError, match="int32"):
        flatten(tvm.IRModule({"main": function}))


@pytest.mark.parametrize("greater", [True, False])
def test_a_choice_of_llvm_code_loses_nan(greater: bool) -> None:
    a, b = (te.placeholder((1,), name=name) for name in "ab")
    chosen = te.compute((1,), lambda i: (tirx.Max if greater else tirx.Min)(a[i], b[i]), name="chosen")
    function = te.create_prim_func([a, b, chosen])

    def right(function: tirx.PrimFunc) -> bool:
        pairs = [([NAN], [1]), ([1], [NAN])]
        return all(np.isnan(run(function, *np.float32(pair), result=np.zeros(1, np.float32))[0]) for pair in pairs)

    assert right(with_llvm_extrema(function))
    assert not right(function), mended("with_llvm_extrema in program/extrema.py")


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", ["tanh", "atanh"])
def test_small_numbers_are_lost_in_formulas(name: str, dtype: str) -> None:
    x = te.placeholder((1,), dtype, name="x")
    function = te.create_prim_func([x, te.compute((1,), lambda i: getattr(tirx, name)(x[i]), name="result")])
    small = np.array([1e-20], dtype)
    found = [run(each, small, result=0 * small) for each in (with_library_functions(function), function)]
    assert found[0] == small
    assert found[1] != small, mended("program/library_functions.py")


def test_a_maximum_of_cuda_text_loses_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    b = Builder()
    program = b.program(b.map(tirx.Max, b.input(4), b.input(4)))

    def right() -> bool:
        network = souffle.compile(program, target="cuda", device="cpu", cubin=False)
        (found,) = network(np.float32([NAN, 1, 2, 3]), np.float32([0, NAN, 1, 4])).values()
        return np.array_equal(found, np.float32([NAN, NAN, 2, 4]), equal_nan=True)

    assert right()
    monkeypatch.setattr(cuda, "with_cuda_extrema", lambda module: module)
    assert not right(), mended("codegen/extrema.py")


def test_bfloat16_is_not_rounded_unless_it_is_stored() -> None:
    x = te.placeholder((4,), name="x")
    there_and_back = te.compute((4,), lambda i: tirx.Cast("float32", tirx.Cast("bfloat16", x[i])), name="result")
    function, values = te.create_prim_func([x, there_and_back]), np.float32([1.001, 2.002, 3.003, 4.004])
    rounded = values.astype(ml_dtypes.bfloat16).astype(np.float32)
    blank = np.zeros(4, np.float32)
    np.testing.assert_array_equal(run(rounded_to_bfloat16(function), values, result=blank), rounded)
    assert not np.array_equal(run(function, values, result=blank), rounded), mended("rounded_to_bfloat16 of the CPU")


def test_maxima_start_from_the_least_finite_number() -> None:
    x, k = te.placeholder((4,), name="x"), te.reduce_axis((0, 4), name="k")
    reduction = te.max(x[k], axis=k)
    assert float(with_infinite_identity(reduction.combiner).identity_element[0].value) == -INF
    largest = te.create_prim_func([x, te.compute((1,), lambda i: reduction, name="largest")])
    row = np.full(4, -INF, np.float32)
    found = run(largest, row, result=np.zeros(1, np.float32))
    assert found[0] != -INF, mended("with_infinite_identity in program/extrema.py")


def test_threads_share_maxima_that_start_from_minus_infinity(tmp_path: Path) -> None:
    """By themselves they do not: in a process in which nothing of Souffle was imported TVM refuses."""
    text = """
from tvm import s_tir
from tvm.script import tirx as T
{registered}
@T.prim_func(s_tir=True)
def largest(x: T.Buffer((4, 64), "float32"), y: T.Buffer((4,), "float32")):
    for i, k in T.grid(4, 64):
        with T.sblock("y"):
            v, r = T.axis.remap("SR", [i, k])
            with T.init():
                y[v] = T.float32("-inf")
            y[v] = T.max(y[v], x[v, r])
schedule = s_tir.Schedule(largest)
schedule.bind(schedule.get_loops(schedule.get_sblock("y"))[1], "threadIdx.x")
s_tir.transform.LowerCrossThreadReduction()(schedule.mod)
"""

    def lowered(registered: str) -> subprocess.CompletedProcess:
        (tmp_path / "largest.py").write_text(text.format(registered=registered))
        command = [sys.executable, tmp_path / "largest.py"]
        here = {**os.environ, "PYTHONPATH": str(Path(souffle.__file__).parents[1])}
        return subprocess.run(command, env=here, capture_output=True, text=True, timeout=120)

    alone = lowered("")
    assert "No matched reducer" in alone.stderr, mended("register_reducer in program/extrema.py")
    # The process ends in peace too: TVM's list outlives the interpreter.
    told = lowered("import souffle.program.extrema")
    assert (told.returncode, told.stderr) == (0, "")


def test_vectors_of_truth_values_get_another_type(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = (te.placeholder((64,), "uint8", name) for name in "ab")
    less = te.compute((64,), lambda i: a[i] <= b[i], name="less")
    schedule = s_tir.Schedule(te.create_prim_func([a, b, te.compute((3, 64), lambda k, i: less[i], name="rows")]))
    schedule.set_scope(schedule.get_sblock("less"), 0, "local")
    for name in ("less", "rows"):
        schedule.vectorize(schedule.split(schedule.get_loops(schedule.get_sblock(name))[-1], [None, 16])[1])
    function = schedule.mod["main"].with_attr("global_symbol", "main")
    x, y = (np.random.default_rng(seed).integers(0, 3, 64, np.uint8) for seed in range(2))
    result = tvm.runtime.tensor(np.zeros((3, 64), bool))
    compile_llvm({"main": function}, LLVM)["main"](tvm.runtime.tensor(x), tvm.runtime.tensor(y), result)
    np.testing.assert_array_equal(result.numpy(), np.broadcast_to(x <= y, (3, 64)))
    monkeypatch.setattr(llvm_pipeline, "_with_bytes", lambda function: function)
    with fails_without(
        "_with_bytes in program/llvm_pipeline.py", TypeError, tvm.error.InternalError, match="dtype mis"
    ):
        compile_llvm({"main": function}, LLVM)


def test_remainders_of_negative_numbers_are_bound_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    case = read_case(CORPUS / "gru_both_ways.json")
    souffle.compile(case.model, target="cpu")
    monkeypatch.setattr(llvm_pipeline, "positive_divisors", lambda: tvm.transform.Sequential([]))
    with fails_without("program/divisors.py", tvm.error.InternalError, match="Binding of variable rmod"):
        souffle.compile(case.model, target="cpu")
