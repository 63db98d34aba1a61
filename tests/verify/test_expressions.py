"""Ranges and sets of indices, against all points written out."""

from __future__ import annotations

import ast
from itertools import product
from pathlib import Path

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

import souffle.verify
from souffle.verify.expressions import (
    Axis,
    Expr,
    add,
    const,
    evaluate,
    interval,
    operation,
    unknown,
    variable,
)
from souffle.verify.ranges import index_range, points

AXES = (Axis("tile", 3), Axis("tid", 8), Axis("turn", 4))


def leaf() -> st.SearchStrategy[Expr]:
    return st.one_of(st.sampled_from([variable(a) for a in AXES]), st.integers(-4, 9).map(const))


def expressions() -> st.SearchStrategy[Expr]:
    def grow(inner: st.SearchStrategy[Expr]) -> st.SearchStrategy[Expr]:
        plain = st.tuples(st.sampled_from(["add", "sub", "mul", "min", "max"]), inner, inner)
        divided = st.tuples(
            st.sampled_from(["div", "mod", "floordiv", "floormod"]), inner, st.integers(1, 5).map(const)
        )
        places = st.one_of(st.integers(0, 3).map(const), st.sampled_from([variable(a) for a in AXES]))
        bits = st.tuples(st.sampled_from(["shr", "shl"]), inner, places)
        masked = st.tuples(st.just("band"), inner, st.sampled_from([1, 3, 7]).map(const))
        chosen = st.tuples(st.just("select"), st.tuples(st.just("lt"), inner, inner).map(_made), inner, inner)
        return st.one_of(plain, divided, bits, masked, chosen).map(_made)

    return st.recursive(leaf(), grow, max_leaves=6)


def _made(parts: tuple) -> Expr:
    return operation(parts[0], *parts[1:])


def conditions() -> st.SearchStrategy[list[Expr]]:
    one = st.tuples(st.sampled_from(["lt", "le", "gt", "ge", "eq", "ne"]), expressions(), expressions()).map(_made)
    return st.lists(one, max_size=2)


def everything(expr: Expr) -> list[int]:
    """The value at each point of the box."""
    found = []
    for point in product(*(range(a.extent) for a in AXES)):
        env = {a: np.int64(v) for a, v in zip(AXES, point)}
        found.append(int(evaluate(expr, env, {})))
    return found


@settings(max_examples=150, deadline=None)
@given(expressions(), conditions())
def test_ranges_are_exact(index: Expr, guards: list[Expr]) -> None:
    values = everything(index)
    low, high = interval(index)
    assert low <= min(values) and max(values) <= high
    holds = [all(v) for v in zip(*(everything(g) for g in guards))] if guards else [True] * len(values)
    kept = [v for v, h in zip(values, holds) if h]
    found = index_range(index, guards)
    assert (found is None) == (not kept)
    if found is not None:
        assert (found.low, found.high, found.exact) == (min(kept), max(kept), True)


@settings(max_examples=60, deadline=None)
@given(expressions(), conditions())
def test_points_are_all_points(index: Expr, guards: list[Expr]) -> None:
    tile, thread, _ = AXES
    values, everywhere = everything(index), list(product(*(range(a.extent) for a in AXES)))
    holds = [all(v) for v in zip(*(everything(g) for g in guards))] if guards else [True] * len(values)
    wanted = {(v, p[0], p[1]) for v, p, h in zip(values, everywhere, holds) if h}
    parts = list(points(index, guards, tile, thread))
    found = {(int(v), int(t), int(d)) for part in parts for v, t, d in zip(*part)}
    assert found == wanted


def test_what_data_decides_widens_a_range_and_says_so() -> None:
    row, doubt = variable(AXES[1]), unknown(0, 5)
    found = index_range(add(row, doubt), [operation("lt", unknown(0, 1), const(1)), operation("lt", row, const(3))])
    assert found is not None and (found.low, found.high, found.exact) == (0, 7, False)


def test_the_checker_shares_no_code_with_what_it_checks() -> None:
    """Neither the merger, the planner of barriers and memory, nor the lowering of stages is imported."""
    folder = Path(souffle.verify.__file__).parent
    for path in folder.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            module = node.module or "" if isinstance(node, ast.ImportFrom) else ""
            assert not module.startswith(("souffle.kernel", "souffle.partition", "souffle.transform")), path.name
            assert module != "souffle.codegen.workspace_layout", path.name
