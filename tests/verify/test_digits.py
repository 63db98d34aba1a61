"""An axis as two digits, against all its values written out."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from souffle.verify.digits import in_digits
from souffle.verify.expressions import Axis, Expr, add, const, evaluate, operation, tabulated, unknown, variable
from souffle.verify.ranges import Range, index_range

TILE, TID = Axis("tile", 24), Axis("tid", 6)
DIVISORS = (2, 3, 4, 6, 8, 12, 16, 24, 48)


def terms() -> st.SearchStrategy[Expr]:
    axis = st.sampled_from([variable(TILE), variable(TID)])
    return st.tuples(axis, st.sampled_from([-6, -2, -1, 1, 2, 6])).map(lambda t: operation("mul", t[0], const(t[1])))


def expressions() -> st.SearchStrategy[Expr]:
    sums = st.tuples(terms(), terms(), st.integers(-30, 30).map(const)).map(lambda t: add(*t))
    ops = st.sampled_from(["floordiv", "floormod", "div", "mod"])
    divided = st.tuples(ops, sums, st.sampled_from(DIVISORS).map(const)).map(lambda t: operation(*t))
    joined = st.tuples(st.sampled_from(["add", "sub", "max", "lt"]), divided, st.one_of(divided, sums))
    return st.one_of(divided, joined.map(lambda t: operation(*t)))


def outcomes(nodes: tuple[Expr, ...]) -> set[tuple[int, ...]]:
    """What some expressions are together, over all that their axes may be."""
    axes = sorted(set().union(*(node.axes for node in nodes)), key=lambda axis: axis.name)
    env = dict(zip(axes, np.indices([axis.extent for axis in axes]).reshape(len(axes), -1), strict=True))
    return set(zip(*(np.broadcast_to(evaluate(node, env, {}), 24 * 6).tolist() for node in nodes), strict=True))


@settings(max_examples=150, deadline=None)
@given(expressions(), expressions())
def test_digits_give_the_same_values_at_once(one: Expr, other: Expr) -> None:
    # With the axes themselves, so that it is known where they are what they are.
    nodes = (one, other, variable(TILE), variable(TID))
    found, turns = nodes, 0
    while (further := in_digits(found)) is not None:
        found, turns = further, turns + 1
        assert outcomes(found) == outcomes(nodes)
    assert turns <= 8


def test_a_quotient_and_a_rest_are_apart() -> None:
    tile = operation("add", operation("mul", variable(TILE), const(6)), variable(TID))
    found = in_digits([operation("floordiv", variable(TILE), const(8)), operation("floormod", tile, const(16))])
    assert found is not None and not found[0].axes & found[1].axes


def test_what_does_not_come_apart_stays() -> None:
    tile, data = variable(TILE), variable(Axis("row", 24, data=True))
    table = tabulated((tile,), np.arange(24) ** 2)
    for node in (
        add(tile, variable(TID)),
        operation("floordiv", tile, const(5)),
        operation("floordiv", data, const(4)),
        operation("floordiv", operation("mul", tile, tile), const(4)),
        add(table, operation("floordiv", tile, const(4))),
        operation("floordiv", unknown(0, 9), const(4)),
    ):
        assert in_digits([node]) is None


def test_a_condition_on_the_quotient_of_a_long_axis_does_not_widen_the_rest() -> None:
    # An exponential of 16384 times 94 by 94: a tile's quotient says which eight of 94 columns, of which the last has 6.
    tile, thread, column, row = (variable(Axis(*axis)) for axis in (("t", 18432), ("d", 256), ("c", 8), ("r", 4)))
    group = add(operation("mul", tile, const(256)), thread)
    columns = add(operation("mul", operation("floordiv", tile, const(1536)), const(8)), column)
    rows = add(operation("mul", operation("floormod", group, const(24)), const(4)), row)
    guards = [operation("lt", columns, const(94)), operation("lt", rows, const(94))]
    index = add(operation("mul", rows, const(94)), columns)
    assert index_range(index, guards) == Range(0, 94 * 94 - 1, True)
