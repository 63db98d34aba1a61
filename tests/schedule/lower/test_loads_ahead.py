"""Loads of a loop's turns stand ahead of its stores, and every turn has the values that it had."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tvm_ffi
from tvm import tirx
from tvm.ir.expr import TensorLoad

from souffle.schedule.lower.loads_ahead import with_loads_ahead
from souffle.tvm_compat import StatementVisitor, choice_parts, collect, is_choice, sequence

pytestmark = pytest.mark.sampled(4)

TILE = tirx.Var("tile", "int32")
SIZE = 64
BUFFERS = {
    name: tirx.decl_buffer((SIZE,), dtype, name=name, scope=scope)
    for name, dtype, scope in (
        ("x", "float32", ""), ("w", "float32", ""), ("y", "float32", ""), ("z", "float32", ""),
        ("at", "int32", ""), ("own", "float32", "local"), ("pool", "float32", "shared"),
    )
}  # fmt: skip
X, W, Y, Z, AT, OWN, POOL = BUFFERS.values()
KINDS = (tirx.ForKind.SERIAL, tirx.ForKind.UNROLLED)


class Run(StatementVisitor):
    """What a function leaves in its buffers: an interpreter of few statements."""

    def __init__(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.memory = {name: rng.integers(-8, 9, SIZE).astype(b.dtype) for name, b in BUFFERS.items()}
        self.memory["at"] %= SIZE
        self.names: dict[Any, Any] = {TILE: 3}
        self.trace: list[tuple[str, str]] = []

    def of(self, node: Any) -> Any:
        if isinstance(node, (tirx.IntImm, tirx.FloatImm)):
            return node.value
        if isinstance(node, tirx.Var):
            return self.names[node]
        if isinstance(node, TensorLoad):
            self.trace.append(("load", str(node.source.name)))
            return self.memory[str(node.source.name)][int(self.of(node.indices[0]))]
        if is_choice(node):
            condition, then, other = choice_parts(node)
            return self.of(then if self.of(condition) else other)
        kinds = {tirx.Add: np.add, tirx.Mul: np.multiply, tirx.FloorMod: np.mod, tirx.LT: np.less}
        return kinds[type(node)](self.of(node.a), self.of(node.b))

    def visit_bind(self, node: tirx.Bind) -> None:
        self.names[node.var] = self.of(node.value)

    def visit_buffer_store(self, node: tirx.BufferStore) -> None:
        value, place = self.of(node.value), int(self.of(node.indices[0]))
        self.memory[str(node.buffer.name)][place] = value
        self.trace.append(("store", str(node.buffer.name)))

    def visit_alloc_buffer(self, node: tirx.AllocBuffer) -> None:
        self.memory[str(node.buffer.name)] = np.full(int(node.buffer.shape[0]), 99, str(node.buffer.dtype))

    def visit_for(self, node: tirx.For) -> None:
        for turn in range(int(node.extent)):
            self.names[node.loop_var] = turn
            self.visit(node.body)

    def visit_if_then_else(self, node: tirx.IfThenElse) -> None:
        if self.of(node.condition):
            self.visit(node.then_case)

    def visit_other(self, node: tirx.Stmt) -> None:
        raise AssertionError(type(node))


def ran(body: tirx.Stmt, seed: int = 0) -> Run:
    run = Run(seed)
    run.visit(body)
    return run


def of_loop(turns: int, made: Callable[[tirx.Var], list[tirx.Stmt]], kind: tirx.ForKind = tirx.ForKind.SERIAL) -> Any:
    """A loop, and what becomes of it; both leave the same."""
    i = tirx.Var("i", "int32")
    statements = made(i)
    loop = tirx.For(i, 0, turns, kind, statements[0] if len(statements) == 1 else tirx.SeqStmt(statements))
    after = with_loads_ahead(tirx.PrimFunc([TILE], loop)).body
    for seed in range(3):
        one, other = ran(loop, seed), ran(after, seed)
        for name in BUFFERS:
            np.testing.assert_array_equal(other.memory[name], one.memory[name], err_msg=str(after))
    return loop, after


def test_all_loads_of_what_is_not_stored_come_before_the_first_store() -> None:
    _, after = of_loop(6, lambda i: [tirx.BufferStore(Y, X[i * 8 + TILE] * W[i] + X[i * 8 + TILE], [i * 8])])
    kinds = [kind for kind, name in ran(after).trace if name in ("x", "w", "y")]
    assert kinds == ["load"] * 12 + ["store"] * 6


def test_as_many_turns_as_registers_hold() -> None:
    # Two words a turn: twelve at a time of 24.
    _, after = of_loop(24, lambda i: [tirx.BufferStore(Y, X[i] + W[i], [i])])
    assert [int(loop.extent) for loop in collect(after, tirx.For)] == [12, 12, 12, 2]
    assert sum(int(one.buffer.shape[0]) for one in collect(after, tirx.AllocBuffer)) == 24


def test_a_masked_load_is_held_with_its_mask() -> None:
    zero = tirx.FloatImm("float32", 0)
    _, after = of_loop(4, lambda i: [tirx.BufferStore(Y, tirx.if_then_else(i * 20 < SIZE, X[i * 20], zero), [i])])
    assert [name for kind, name in ran(after).trace if kind == "load" and name == "x"] == ["x"] * 4


def test_a_read_under_a_condition_is_read_under_it() -> None:
    """Beyond it is no memory."""
    _, after = of_loop(
        6, lambda i: [tirx.IfThenElse(i * 20 < SIZE, tirx.BufferStore(Y, X[i * 20] + W[TILE], [i]), None)]
    )
    assert [name for _, name in ran(after).trace if name in ("x", "y")] == [*"xxxx", *"yyyy"]


@pytest.mark.parametrize("first", [True, False])
def test_a_read_under_a_condition_is_not_taken_for_another(first: bool) -> None:
    def made(i: tirx.Var) -> list[tirx.Stmt]:
        asked = tirx.IfThenElse(i < TILE, tirx.BufferStore(OWN, X[i], [i]), None)
        always = tirx.BufferStore(Y, X[i] + W[i], [i])
        return [asked, always] if first else [always, asked]

    of_loop(6, made)


def test_loops_in_loops_are_held_together() -> None:
    def made(i: tirx.Var) -> list[tirx.Stmt]:
        j, lane = tirx.Var("j", "int32"), tirx.Var("lane", "int32")
        own = tirx.BufferStore(OWN, X[i * 8 + j * 4 + lane] + W[j * 4 + lane], [lane])
        lanes = tirx.For(lane, 0, 4, tirx.ForKind.UNROLLED, own)
        body = sequence(lanes, tirx.BufferStore(Y, OWN[0] + OWN[3], [i * 2 + j]))
        return [tirx.For(j, 0, 2, tirx.ForKind.UNROLLED, body)]

    # Eight words for W, once; eight a turn for X, of which two fit beside them.
    _, after = of_loop(4, made)
    reads = [name for _, name in ran(after).trace if name in ("x", "w", "y")]
    assert reads == ([*"x"] * 16 + [*"w"] * 8 + [*"y"] * 4) * 2


@pytest.mark.parametrize(
    "made",
    [
        lambda i: [tirx.BufferStore(Y, Y[i] + 1, [i + 1])],
        lambda i: [tirx.BufferStore(OWN, X[i], [i])],
        lambda i: [tirx.IfThenElse(i < TILE, tirx.BufferStore(OWN, OWN[0] + X[i], [0]), None)],
        lambda i: [tirx.BufferStore(POOL, X[i], [i])],
        lambda i: [tirx.BufferStore(Y, OWN[i] + POOL[i], [i])],
        lambda i: [tirx.BufferStore(Y, tirx.if_then_else(i < TILE, X[i], W[i]), [i])],
        lambda i: [tirx.BufferStore(Y, tirx.call_extern("float32", "f", tirx.address_of(X[i])), [i])],
    ],
)
def test_what_stays(made: Callable[[tirx.Var], list[tirx.Stmt]]) -> None:
    i = tirx.Var("i", "int32")
    loop = tirx.For(i, 0, 4, tirx.ForKind.SERIAL, *made(i))
    assert tvm_ffi.structural_equal(with_loads_ahead(tirx.PrimFunc([TILE], loop)).body, loop)


def test_a_name_of_what_this_turn_stored_is_not_looked_at_before() -> None:
    place = tirx.Var("place", "int32")
    _, after = of_loop(
        4,
        lambda i: [
            tirx.BufferStore(OWN, X[TILE + i], [0]),
            tirx.Bind(place, tirx.FloorMod(AT[TILE + i] + i32(OWN[0]), SIZE)),
            tirx.BufferStore(Y, W[place], [i]),
        ],
    )
    reads = [name for _, name in ran(after).trace if name in ("x", "at", "w")]
    assert reads == [*"xxxx", *["at"] * 4, *"wwww"]


def test_what_is_the_same_in_all_turns_is_read_once() -> None:
    _, after = of_loop(50, lambda i: [tirx.BufferStore(Y, X[TILE] * W[TILE + 1], [i])])
    assert [name for _, name in ran(after).trace if name in ("x", "w")] == ["x", "w"]
    assert [(int(loop.extent), loop.kind) for loop in collect(after, tirx.For)] == [(50, tirx.ForKind.SERIAL)]
    _, after = of_loop(4, lambda i: [tirx.BufferStore(Y, X[TILE] * W[i], [i])])
    assert [name for _, name in ran(after).trace if name in ("x", "w", "y")] == ["x", *"wwww", *"yyyy"]


def test_a_call_between_reads_and_stores_stays_between_them() -> None:
    """As of a product's totals, which come from memory of the block."""
    i = tirx.Var("i", "int32")
    take = tirx.Evaluate(tirx.call_extern("int32", "take", tirx.address_of(OWN[0]), tirx.address_of(POOL[i])))
    loop = tirx.For(i, 0, 4, tirx.ForKind.SERIAL, tirx.SeqStmt([take, tirx.BufferStore(Y, OWN[0] + X[i], [i])]))
    after = with_loads_ahead(tirx.PrimFunc([TILE], loop)).body
    first, second = collect(after, tirx.For)
    assert [str(one.source.name) for one in collect(first, TensorLoad)] == ["x"]
    assert isinstance(second.body[0], tirx.Evaluate)
    given = tirx.Evaluate(tirx.call_extern("int32", "put", tirx.address_of(X[0])))
    whole = tirx.SeqStmt([given, loop])
    assert tvm_ffi.structural_equal(with_loads_ahead(tirx.PrimFunc([TILE], whole)).body, whole)


def i32(value: Any) -> Any:
    """0 or 1, whether a value is below 3."""
    return tirx.if_then_else(value < 3, tirx.IntImm("int32", 1), tirx.IntImm("int32", 0))


@pytest.mark.parametrize("seed", range(120))
def test_random_loops_leave_what_they_left(seed: int) -> None:
    rng = random.Random(seed)

    def index(i: tirx.Var, names: list[tirx.Var]) -> Any:
        base = rng.choice([i, i * 2, TILE + i, *names])
        return tirx.FloorMod(base * rng.choice([1, 3, 5]) + rng.randrange(9), SIZE)

    def value(i: tirx.Var, names: list[tirx.Var], depth: int = 0) -> Any:
        kind = rng.randrange(6 if depth < 3 else 2)
        if kind < 2:
            return rng.choice([X, W, X, W, Y, Z, OWN, POOL])[index(i, names)]
        if kind < 4:
            both = value(i, names, depth + 1), value(i, names, depth + 1)
            return both[0] + both[1] if kind == 2 else both[0] * both[1]
        other = tirx.FloatImm("float32", 1.0) if kind == 4 else value(i, names, depth + 1)
        return tirx.if_then_else(index(i, names) < 20, value(i, names, depth + 1), other)

    def made(i: tirx.Var, names: list[tirx.Var], depth: int = 0) -> list[tirx.Stmt]:
        statements, names = [], [i, *names]
        for number in range(rng.randint(1, 4)):
            kind = rng.random()
            if kind < 0.3:
                name = tirx.Var(f"n{number}", "int32")
                bound = rng.choice([index(i, names), AT[index(i, names)], i32(value(i, names))])
                statements.append(tirx.Bind(name, bound))
                names.append(name)
            elif kind < 0.45 and depth < 2:
                j = tirx.Var(f"j{number}", "int32")
                body = sequence(*made(j, names, depth + 1))
                statements.append(tirx.For(j, 0, rng.choice([1, 2, 3]), rng.choice(KINDS), body))
            elif kind < 0.6 and depth < 2:
                asked = index(i, names) if rng.random() < 0.7 else i32(value(i, names))
                statements.append(tirx.IfThenElse(asked < 30, sequence(*made(i, names, depth + 1)), None))
            else:
                to = rng.choice([Y, Y, Z, OWN, POOL])
                statements.append(tirx.BufferStore(to, value(i, names), [index(i, names)]))
        return [*statements, tirx.BufferStore(Y, value(i, names), [index(i, names)])]

    of_loop(rng.choice([1, 2, 3, 4, 6, 7, 12]), lambda i: made(i, []), rng.choice(KINDS))
