"""Indices that are calculated in floating point, against every way in which the machine may round them."""

from __future__ import annotations

from fractions import Fraction
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tvm import tirx

import souffle
from souffle.pipeline import compile_cuda
from souffle.verify import PROVEN, REFUTED, UNKNOWN, Certificate
from souffle.verify.accesses import accesses_of
from souffle.verify.certify import functions_of
from souffle.verify.expressions import Axis, Expr, evaluate, interval, unknown, variable
from souffle.verify.function_reader import read_function
from souffle.verify.indices import index_of
from tests.frontend.support import node_model
from tests.verify.hand_made import THREADS, Memory, Run, certificate, stage, tensor

SIZE = 4 * THREADS
BUFFERS = (tensor("x", SIZE, "input"), tensor("y", SIZE, "output"))
EXTENT = 60
PLACE = tirx.Var("i", "int32")
FLOAT = "float32"


def number(value: float, dtype: str = FLOAT) -> tirx.FloatImm:
    return tirx.FloatImm(dtype, float(np.dtype(dtype).type(value)))


def call(name: str, *operands: object, dtype: str = FLOAT) -> object:
    return tirx.call_pure_extern(dtype, name + ("" if dtype == "float64" else "f"), *operands)


def whole(node: object) -> tirx.Cast:
    return tirx.Cast("int32", node)


def read(node: object) -> Expr:
    return index_of(node, {PLACE: variable(Axis("i", EXTENT))})


# Against all roundings


def nearest(exact: Fraction, dtype: str) -> Fraction:
    """The number of a type that is nearest, ties to the even one."""
    kind = np.dtype(dtype).type
    about = kind(float(exact))
    candidates = (about, *(np.nextafter(about, kind(end)) for end in (-np.inf, np.inf)))

    def worse(candidate: np.floating) -> tuple[Fraction, int]:
        odd = int(candidate.view("u4" if dtype == FLOAT else "u8")) & 1
        return abs(Fraction(float(candidate)) - exact), odd

    return Fraction(float(min(candidates, key=worse)))


Ways = tuple[object, object]
"""TensorIR, and a function that gives all (number, number that a sum may take in its place) for a place."""


def ways(depth: int, dtype: str) -> st.SearchStrategy[Ways]:
    def literal(value: float) -> Ways:
        exact = Fraction(float(np.dtype(dtype).type(value)))
        return number(value, dtype), lambda i: {(exact, exact)}

    def count(factor: int, shift: int) -> Ways:
        node = tirx.Cast(dtype, PLACE * factor + shift)
        return node, lambda i: {(nearest(Fraction(i * factor + shift), dtype),) * 2}

    fractions = st.tuples(st.integers(1, 40), st.integers(1, 40)).map(lambda pair: pair[0] / pair[1])
    leaf = st.one_of(fractions.map(literal), st.tuples(st.integers(1, 3), st.integers(-2, 5)).map(lambda p: count(*p)))
    if not depth:
        return leaf
    inner = ways(depth - 1, dtype)
    sums = st.tuples(st.sampled_from(["+", "-", "*", "*", "/", "min", "max"]), inner, inner)
    rounded = st.tuples(st.sampled_from(["floor", "ceil", "trunc", "rint"]), inner)
    return st.one_of(leaf, sums.map(lambda p: combined(*p, dtype)), rounded.map(lambda p: rounding(*p, dtype)))


def combined(op: str, one: Ways, other: Ways, dtype: str) -> Ways:
    kinds = {"+": tirx.Add, "-": tirx.Sub, "*": tirx.Mul, "/": tirx.Div, "min": tirx.Min, "max": tirx.Max}

    def calculate(i: int) -> set[tuple[Fraction, Fraction]]:
        found = set()
        for (a, exact_a), (b, exact_b) in product(one[1](i), other[1](i)):
            if op in "+-":
                sign = 1 if op == "+" else -1
                sums = {x + sign * y for x, y in ((a, b), (exact_a, b), (a, exact_b))}
                found |= {(nearest(s, dtype),) * 2 for s in sums}
            elif op == "*":
                found |= {(nearest(a * b, dtype), x) for x in (a * b, nearest(a * b, dtype))}
            elif op == "/":
                found.add((nearest(a / b, dtype),) * 2)
            else:
                found.add(((min if op == "min" else max)(a, b),) * 2)
        return found

    return kinds[op](one[0], other[0]), calculate


def rounding(name: str, one: Ways, dtype: str) -> Ways:
    python = {"floor": np.floor, "ceil": np.ceil, "trunc": np.trunc, "rint": np.rint}[name]
    return call(name, one[0], dtype=dtype), lambda i: {(Fraction(float(python(float(a)))),) * 2 for a, _ in one[1](i)}


@settings(max_examples=120, deadline=None)
@given(st.sampled_from([FLOAT, "float64"]).flatmap(lambda dtype: ways(2, dtype)))
def test_a_table_holds_what_any_rounding_gives(pair: Ways) -> None:
    found = read(whole(pair[0]))
    try:
        wanted = [{int(a) for a, _ in pair[1](i)} for i in range(EXTENT)]
    except (ZeroDivisionError, OverflowError):
        assert found.opaque
        return
    low, high = interval(found)
    assert all(low <= value <= high for values in wanted for value in values)
    if not found.opaque:
        values = np.broadcast_to(evaluate(found, {a: np.arange(EXTENT) for a in found.axes}, {}), EXTENT)
        assert [{int(v)} for v in values] == wanted


def half_pixel(before: int, after: int) -> Expr:
    scale = np.float32(before) / np.float32(after)
    position = (tirx.Cast(FLOAT, PLACE % after) + number(0.5)) * number(scale) - number(0.5)
    return read(whole(call("floor", position)))


def test_a_product_that_may_or_may_not_be_rounded() -> None:
    assert not half_pixel(7, 13).opaque
    # 11.5 * (5 / 23) is 2.5 where it is rounded, and else a little less.
    found = half_pixel(5, 23)
    assert found.opaque and interval(found) == (-1, 4)


@pytest.mark.parametrize(
    ("name", "wanted"),
    [("round", [-2, -1, -1, 0, 1, 1, 2]), ("rint", [-2, -1, 0, 0, 0, 1, 2]), ("trunc", [-1, -1, 0, 0, 0, 1, 1])],
)
def test_halves_are_rounded_as_c_does(name: str, wanted: list[int]) -> None:
    found = read(whole(call(name, tirx.Cast(FLOAT, PLACE) * number(0.5) - number(1.5))))
    assert list(evaluate(found, {a: np.arange(7) for a in found.axes}, {})) == wanted


def test_comparisons_and_choices() -> None:
    place = tirx.Cast(FLOAT, PLACE)
    below = tirx.Select(place * number(0.25) < number(3.0), place, number(7.5))
    found = read(whole(below))
    assert list(evaluate(found, {a: np.array([0, 11, 12, 59]) for a in found.axes}, {})) == [0, 11, 7, 7]


def test_lanes_of_a_vector() -> None:
    half = tirx.Broadcast(number(0.5), 4)
    node = tirx.Cast(
        "int32x4", call("floor", tirx.Cast("float32x4", tirx.Ramp(PLACE * 4, 1, 4)) * half, dtype="float32x4")
    )
    assert index_of(node, {PLACE: variable(Axis("i", EXTENT))}).opaque
    place, lane = Axis("i", EXTENT), Axis("lane", 4)
    found = index_of(node, {PLACE: variable(place)}, lane=variable(lane))
    assert list(evaluate(found, {place: np.int64(3), lane: np.arange(4)}, {})) == [6, 6, 7, 7]


def test_what_is_not_finite_or_is_data_is_not_known() -> None:
    place = tirx.Cast(FLOAT, PLACE)
    for node in (number(1.0) / place, place * number(3e38), number(np.inf), tirx.Cast("float16", PLACE)):
        assert read(whole(node)).opaque
    assert index_of(whole(tirx.Cast(FLOAT, PLACE)), {PLACE: unknown(0, 3)}).opaque


# Stages


def reading(index: object) -> Certificate:
    def body(m: Memory) -> tirx.Stmt:
        at = m.tile * THREADS + m.tid
        return tirx.BufferStore(m.tensors[1], m.tensors[0][index(at)], [at])

    return certificate([Run("one", 4, (0, 1))], [stage("one", (SIZE, SIZE), body)], BUFFERS)


def far_away(dtype: str) -> object:
    """One that is right where numbers of 25 bits are."""
    far = 1 << 24
    return lambda at: whole(tirx.Cast(dtype, at + far) - number(far, dtype))


@pytest.mark.parametrize(
    ("index", "verdict", "rule"),
    [
        (lambda at: whole(call("floor", tirx.Cast(FLOAT, at) * number(1 / 3))), PROVEN, None),
        (lambda at: whole(call("ceil", tirx.Cast(FLOAT, at) + number(0.5))), REFUTED, "out of bounds"),
        (far_away("float64"), PROVEN, None),
        # 2 ** 24 + 255 lies between two numbers of 24 bits, and goes to the greater.
        (far_away(FLOAT), REFUTED, "out of bounds"),
        (lambda at: tirx.Min(whole(tirx.Cast(FLOAT, at * 12405735)), 0), REFUTED, "arithmetic"),
        (lambda at: tirx.Min(whole(tirx.Cast(FLOAT, at) * number(1e9)), 0), REFUTED, "arithmetic"),
        # Products of whole numbers, in and around what is calculated in floating point.
        (lambda at: whole(tirx.Cast(FLOAT, at)) * 16777217 // 16777217, REFUTED, "arithmetic"),
        (lambda at: whole(tirx.Cast(FLOAT, at * 4096) * number(1 / 4096)), UNKNOWN, None),
        (lambda at: tirx.Min(tirx.Max(whole(tirx.Cast(FLOAT, at * 4096)), 0), SIZE - 1), PROVEN, None),
    ],
)
def test_reads_at_positions(index: object, verdict: str, rule: str | None) -> None:
    found = reading(index)
    assert found.verdict == verdict, found
    assert {c.rule for c in found.counterexamples} == ({rule} if rule else set())


# Networks


@pytest.mark.parametrize("partition", [None, "persistent"])
@pytest.mark.parametrize("coordinates", ["half_pixel", "pytorch_half_pixel", "align_corners", "asymmetric"])
def test_a_resize_reads_at_places_that_are_known(coordinates: str, partition: str | None) -> None:
    options = {} if partition is None else {"partition": partition}
    inputs = [("float32", (1, 2, 7, 11)), None, None, np.array([1, 2, 13, 5])]
    model = node_model("Resize", inputs, coordinate_transformation_mode=coordinates, mode="linear", opset=19)
    compiled = compile_cuda(souffle.import_onnx(model), level="V4", verify="values", cubin=False, **options)
    assert compiled.plan.certificate.verdict == PROVEN, compiled.plan.certificate
    for name, func in functions_of(compiled).items():
        function = read_function(name, func, 64, 256)
        offsets = [access.place.offset for access, _ in accesses_of(function.body)]
        assert not any(offset.opaque or offset.by_data for offset in offsets)
