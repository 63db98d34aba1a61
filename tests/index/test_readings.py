"""Every reading of an index expression against its values, worked out one by one by an interpreter of its own."""

from __future__ import annotations

import random
from collections.abc import Mapping
from itertools import product

import numpy as np
import pytest
from tvm import tirx
from tvm.ir import Call

from souffle.index import isl
from souffle.index.arrays import Value, apply, constant, tabulate
from souffle.index.bounds import Bounder
from souffle.index.expression import Expression, Node, NodeTable, Region, cone
from souffle.index.linear import interval_of, linear_of
from souffle.index.operations import operands_of, operation_of
from souffle.index.quasi_affine import AffineView
from tests.thorough import sized

RANGES = ((0, 5), (-3, 7), (2, 4))
SYMBOLS = {
    tirx.Add: lambda a, b: a + b,
    tirx.Sub: lambda a, b: a - b,
    tirx.Mul: lambda a, b: a * b,
    tirx.FloorDiv: lambda a, b: a // b,
    tirx.FloorMod: lambda a, b: a % b,
    tirx.Div: lambda a, b: (abs(a) // abs(b)) * (1 if (a < 0) == (b < 0) else -1),
    tirx.Mod: lambda a, b: abs(a) % abs(b) * (-1 if a < 0 else 1),
    tirx.Min: min,
    tirx.Max: max,
    tirx.LT: lambda a, b: a < b,
    tirx.LE: lambda a, b: a <= b,
    tirx.GT: lambda a, b: a > b,
    tirx.GE: lambda a, b: a >= b,
    tirx.EQ: lambda a, b: a == b,
    tirx.NE: lambda a, b: a != b,
    tirx.And: lambda a, b: a and b,
    tirx.Or: lambda a, b: a or b,
    tirx.BitwiseAnd: lambda a, b: a & b,
    tirx.BitwiseOr: lambda a, b: a | b,
    tirx.BitwiseXor: lambda a, b: a ^ b,
    tirx.LShift: lambda a, b: a << b,
    tirx.RShift: lambda a, b: a >> b,
}
COMPARISONS = (tirx.LT, tirx.LE, tirx.GT, tirx.GE, tirx.EQ, tirx.NE)


def value_of(node: object, point: Mapping[str, int]) -> int | bool:
    """What an expression is at a point, as Python's whole numbers."""
    if isinstance(node, tirx.Var):
        return point[str(node.name)]
    if isinstance(node, tirx.IntImm):
        return int(node.value)
    if isinstance(node, tirx.Not):
        return not value_of(node.a, point)
    if isinstance(node, tirx.BitwiseNot):
        return ~value_of(node.a, point)
    if isinstance(node, tirx.Cast):
        return value_of(node.value, point)
    if isinstance(node, tirx.Select):
        return value_of(node.true_value if value_of(node.condition, point) else node.false_value, point)
    if isinstance(node, Call):
        condition, then, otherwise = node.args
        return value_of(then if value_of(condition, point) else otherwise, point)
    return SYMBOLS[type(node)](value_of(node.a, point), value_of(node.b, point))


class Drawn:
    """Random index expressions over three axes, small enough not to leave 32 bits."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.variables = [tirx.Var(name, "int32") for name in "ijk"]

    def number(self, depth: int) -> object:
        if depth == 0 or self.random.random() < 0.15:
            return self.random.choice([*self.variables, tirx.IntImm("int32", self.random.randint(-9, 9))])
        kind = self.random.choice(
            [
                *(tirx.Add, tirx.Sub, tirx.Add, tirx.Min, tirx.Max, tirx.Mul, tirx.FloorDiv, tirx.FloorMod, tirx.Div),
                *(tirx.Mod, tirx.BitwiseAnd, tirx.BitwiseOr, tirx.BitwiseXor, tirx.LShift, tirx.RShift),
                *(tirx.Select, tirx.BitwiseNot, tirx.if_then_else),
            ]
        )
        if kind in (tirx.Select, tirx.if_then_else):
            return kind(self.condition(depth - 1), self.number(depth - 1), self.number(depth - 1))
        if kind is tirx.BitwiseNot:
            return kind(self.number(depth - 1))
        right = self.number(depth - 1)
        if kind in (tirx.FloorDiv, tirx.FloorMod, tirx.Div, tirx.Mod):
            right = tirx.IntImm("int32", self.random.choice([1, 2, 3, 4, 7, -1, -2, -5]))
        elif kind is tirx.Mul:
            right = tirx.IntImm("int32", self.random.randint(-4, 4))
        elif kind in (tirx.LShift, tirx.RShift):
            right = tirx.IntImm("int32", self.random.randint(0, 3))
        return kind(self.number(depth - 1), right)

    def condition(self, depth: int) -> object:
        kind = self.random.choice([*COMPARISONS, tirx.And, tirx.Or, tirx.Not])
        if depth == 0 or kind in COMPARISONS:
            kind = kind if kind in COMPARISONS else tirx.LT
            return kind(self.number(max(depth - 1, 0)), self.number(max(depth - 1, 0)))
        if kind is tirx.Not:
            return kind(self.condition(depth - 1))
        return kind(self.condition(depth - 1), self.condition(depth - 1))


def points() -> list[dict[str, int]]:
    return [dict(zip("ijk", p, strict=True)) for p in product(*(range(low, low + n) for low, n in RANGES))]


def view_of(drawn: Drawn, root: object) -> tuple[AffineView, int]:
    table = NodeTable(lambda load: 0)
    for position, variable in enumerate(drawn.variables):
        table.bind(variable, table.number(Node("axis", (), position, "int32", False)))
    number = table.visit(root)
    expression = Expression(RANGES, (), (), tuple(table.nodes), (Region((number,), False),), ())
    return AffineView(expression), number


@pytest.mark.parametrize("seed", range(sized(3, 12)))
def test_numbers_are_the_same_in_every_reading(seed: int) -> None:
    drawn = Drawn(seed)
    for _ in range(40):
        root = drawn.number(3)
        values = [int(value_of(root, point)) for point in points()]
        bounds = Bounder({v: [r] for v, r in zip(drawn.variables, literal_ranges(), strict=True)}, {})(root)
        assert bounds.low <= min(values) and max(values) <= bounds.high, (
            f"{root}: {bounds}, {min(values)}, {max(values)}"
        )
        assert not np.any(np.asarray(on_arrays(root, drawn)) != np.asarray(values)), str(root)
        view, number = view_of(drawn, root)
        affine = view.value(number)
        if affine is not None:
            graph = isl.Map.from_pw_aff(affine).intersect_domain(view.space)
            of_isl = {point: value for point, (value,) in isl.pairs(graph)}
            assert [of_isl[tuple(point.values())] for point in points()] == values, str(root)
        linear = linear_of(root)
        atoms = list(linear.terms.values())
        sums = [sum(c * int(value_of(a, p)) for a, c in atoms) + linear.constant for p in points()]
        assert sums == values, str(root)


@pytest.mark.parametrize("seed", range(sized(3, 12)))
def test_conditions_hold_at_the_same_points_in_every_reading(seed: int) -> None:
    drawn = Drawn(1000 + seed)
    for _ in range(40):
        root = drawn.condition(3)
        holds = {tuple(point.values()) for point in points() if value_of(root, point)}
        everywhere = {tuple(point.values()) for point in points()}
        view, number = view_of(drawn, root)
        predicate = view.predicate(number)
        assert holds <= set(isl.points(predicate.holds)), str(root)
        assert everywhere - holds <= set(isl.points(predicate.fails)), str(root)
        if predicate.exact:
            assert holds == set(isl.points(predicate.holds)), str(root)
        assert np.array_equal(on_arrays(root, drawn), [tuple(p.values()) in holds for p in points()]), str(root)
        interval = interval_of(root)
        if interval is not None:
            terms = list(interval.form.terms.values())
            for point in points():
                total = sum(c * int(value_of(a, point)) for a, c in terms)
                inside = interval.low <= total < interval.high
                assert (inside == interval.inside) == bool(value_of(root, point)), str(root)


@pytest.mark.parametrize("seed", range(6))
def test_tables_of_one_axis_are_its_values(seed: int) -> None:
    drawn = Drawn(2000 + seed)
    drawn.variables = [drawn.variables[0]] * 3
    compared = 0
    for _ in range(60):
        root = drawn.number(3)
        view, number = view_of(drawn, root)
        nodes = view.expression.nodes
        table = tabulate(nodes, cone(nodes, [number]), np.arange(-6, 7))
        assert table is not None, str(root)
        compared += 1
        assert np.array_equal(table, [int(value_of(root, {"i": i})) for i in range(-6, 7)]), str(root)
    assert compared == 60


def test_positions_of_resizing_are_tables() -> None:
    """``int(floor(float(i) * 0.75 + 0.25))``, each step rounded to its own type."""
    i = tirx.Var("i", "int32")
    scaled = tirx.Cast("float32", i) * tirx.const(0.75, "float32") + tirx.const(0.25, "float32")
    drawn = Drawn(0)
    drawn.variables = [i, *drawn.variables[1:]]
    view, number = view_of(drawn, tirx.Cast("int32", tirx.floor(scaled)))
    nodes = view.expression.nodes
    table = tabulate(nodes, cone(nodes, [number]), np.arange(9))
    assert list(table) == [int(np.floor(np.float32(k) * np.float32(0.75) + np.float32(0.25))) for k in range(9)]


def literal_ranges() -> list[tuple[object, object]]:
    return [(tirx.IntImm("int32", low), tirx.IntImm("int32", extent)) for low, extent in RANGES]


def on_arrays(root: object, drawn: Drawn) -> np.ndarray:
    """An expression at all points, read from TVM's nodes by name."""
    grid = {name: np.array([point[name] for point in points()]) for name in "ijk"}

    def of(node: object) -> Value:
        operation = operation_of(node)
        if operation == "variable":
            return Value.of(grid[str(node.name)], str(node.name))
        if operation == "int":
            return constant(int(node.value))
        return apply(operation, *(of(operand) for operand in operands_of(node)))

    return np.broadcast_to(of(root).array, (len(points()),))


def test_minus_one_and_minus_two_are_two_numbers() -> None:
    """Python's hash of the two is one, and a literal of TVM has its value's."""
    drawn = Drawn(0)
    i = drawn.variables[0]
    view, number = view_of(drawn, tirx.Max(i, tirx.IntImm("int32", -1)) - tirx.IntImm("int32", -2))
    nodes = view.expression.nodes
    maximum = nodes[nodes[number].args[0]]
    assert nodes[maximum.args[1]].value == -1
    assert nodes[nodes[number].args[1]].value == -2
