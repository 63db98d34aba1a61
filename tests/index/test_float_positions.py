"""Positions that are calculated in floating point, as resizing does: the map of an access against what is read."""

from __future__ import annotations

import random

import numpy as np
import pytest
from tvm import te, tirx

import souffle
from souffle.analysis import access_of
from souffle.index import isl

SOURCE, EXTENT = 64, 23


def number(drawn: random.Random, i: tirx.Var, dtype: str, depth: int) -> object:
    """A random number of a floating-point type that depends on `i`."""
    if depth == 0:
        return tirx.Cast(dtype, i)
    inner = number(drawn, i, dtype, depth - 1)
    constant = tirx.const(drawn.choice([0.5, 0.25, 1.5, 0.3, 2 / 3, 1.0, 2.5]), dtype)
    kind = drawn.choice(["+", "-", "*", "/", "min", "max", "floor", "ceil", "trunc", "round", "nearbyint"])
    if kind in "+-*/":
        return {"+": tirx.Add, "-": tirx.Sub, "*": tirx.Mul, "/": tirx.Div}[kind](inner, constant)
    if kind in ("min", "max"):
        return {"min": tirx.Min, "max": tirx.Max}[kind](inner, tirx.const(7.0, dtype))
    return getattr(tirx, kind)(inner)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("seed", range(6))
def test_a_map_holds_what_is_read(seed: int, dtype: str) -> None:
    drawn = random.Random(seed)
    a = te.placeholder((SOURCE,), name="A", dtype="int32")

    def position(i: tirx.Var) -> object:
        found = tirx.Cast("int32", getattr(tirx, drawn.choice(["floor", "round", "ceil"]))(number(drawn, i, dtype, 3)))
        return tirx.Max(tirx.Min(found, tirx.IntImm("int32", SOURCE - 1)), tirx.IntImm("int32", 0))

    outputs = [te.compute((EXTENT,), lambda i: a[position(i)], name=f"B{k}") for k in range(12)]
    program = souffle.from_te([a], outputs)
    read = program.run({"A": np.arange(SOURCE, dtype="int32")})
    exact = 0
    for item, values in zip(program.tes, read.values(), strict=True):
        access = access_of(item, 0)
        pairs = isl.pairs(access.map)
        assert {((i,), (int(value),)) for i, value in enumerate(values)} <= pairs, str(item.op.body)
        if access.exact:
            exact += 1
            assert len(pairs) == EXTENT, str(item.op.body)
    assert exact > 0


def test_halves_are_rounded_to_even() -> None:
    a = te.placeholder((8,), name="A")
    b = te.compute(
        (14,), lambda i: a[tirx.Cast("int32", tirx.round(tirx.Cast("float32", i) * tirx.const(0.5, "float32")))]
    )
    access = access_of(souffle.from_te([a], [b]).tes[0], 0)
    assert isl.pairs(access.map) >= {((i,), (round(i / 2),)) for i in range(14)}
