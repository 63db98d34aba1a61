"""A thread's own arrays: what is read of them, the thread has written before, in the same call."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tvm import tirx

from souffle.tvm_compat import PrimExpr
from souffle.verify import PROVEN, REFUTED, UNKNOWN
from tests.verify.hand_made import THREADS, Memory, Run, certificate, sequence, stage, tensor

TILES = 4
SIZE = TILES * THREADS
Index = int | PrimExpr


def loop(extent: int, body: Callable[[tirx.Var], tirx.Stmt]) -> tirx.For:
    turn = tirx.Var("turn", "int32")
    return tirx.For(turn, 0, extent, tirx.ForKind.SERIAL, body(turn))


def when(condition: PrimExpr, then: tirx.Stmt, otherwise: tirx.Stmt | None = None) -> tirx.Stmt:
    return tirx.IfThenElse(condition, then, otherwise)


def place(m: Memory) -> PrimExpr:
    return m.tile * THREADS + m.tid


def put(m: Memory, index: Index, value: object = 1.0) -> tirx.Stmt:
    return tirx.BufferStore(m.register, tirx.const(value) if isinstance(value, float) else value, [index])


def out(m: Memory, *indices: Index) -> tirx.Stmt:
    """The output is a sum of some elements of the array."""
    total = m.register[indices[0]]
    for index in indices[1:]:
        total = total + m.register[index]
    return tirx.BufferStore(m.tensors[1], total, [place(m)])


def by_data(m: Memory) -> PrimExpr:
    return m.tensors[0][place(m)] > tirx.const(0.0)


def guarded(m: Memory, least: int) -> tirx.Stmt:
    """Elements are written below `least` and read below 30, in two loops."""

    def element(i: tirx.Var) -> PrimExpr:
        return m.tile * 8 + i

    read = loop(8, lambda i: when(element(i) < 30, out(m, i)))
    return sequence(loop(8, lambda i: when(element(i) < least, put(m, i))), read)


def in_a_loop(m: Memory, *, declared_inside: bool) -> tirx.Stmt:
    """An array carries a number from turn to turn; declared inside, it is another one in each."""
    own = tirx.decl_buffer((1,), "float32", name="own", scope="local")

    def body(turn: tirx.Var) -> tirx.Stmt:
        first = tirx.BufferStore(own, tirx.const(0.0), [0])
        more = tirx.BufferStore(own, own[0] + tirx.const(1.0), [0])
        declared = [tirx.AllocBuffer(own)] if declared_inside else []
        return sequence(*declared, when(turn < 1, first), more, tirx.BufferStore(m.tensors[1], own[0], [place(m)]))

    return sequence(*([] if declared_inside else [tirx.AllocBuffer(own)]), loop(3, body))


CASES: dict[str, tuple[str, Callable[[Memory], tirx.Stmt]]] = {
    "written": (PROVEN, lambda m: sequence(put(m, 0), out(m, 0))),
    "never written": (REFUTED, lambda m: out(m, 0)),
    "written afterwards": (REFUTED, lambda m: sequence(out(m, 0), put(m, 0))),
    "another element": (REFUTED, lambda m: sequence(put(m, 1), out(m, 0))),
    "all but the last element": (
        REFUTED,
        lambda m: sequence(loop(7, lambda i: put(m, i)), loop(8, lambda i: out(m, i))),
    ),
    "all elements, in another order": (
        PROVEN,
        lambda m: sequence(loop(8, lambda i: put(m, 7 - i)), loop(2, lambda i: loop(4, lambda j: out(m, i * 4 + j)))),
    ),
    "by some threads": (REFUTED, lambda m: sequence(when(m.tid < 8, put(m, 0)), out(m, 0))),
    "by the threads that read": (PROVEN, lambda m: sequence(when(m.tid < 8, put(m, 0)), when(m.tid < 8, out(m, 0)))),
    "by more threads than read": (PROVEN, lambda m: sequence(when(m.tid < 9, put(m, 0)), when(m.tid < 8, out(m, 0)))),
    "by fewer threads than read": (REFUTED, lambda m: sequence(when(m.tid < 7, put(m, 0)), when(m.tid < 8, out(m, 0)))),
    "in some tiles": (REFUTED, lambda m: sequence(when(m.tile < 3, put(m, 0)), out(m, 0))),
    "on both ways": (PROVEN, lambda m: sequence(when(m.tid < 8, put(m, 0), put(m, 0)), out(m, 0))),
    "on both ways of data": (PROVEN, lambda m: sequence(when(by_data(m), put(m, 0), put(m, 0)), out(m, 0))),
    "on one way of data": (UNKNOWN, lambda m: sequence(when(by_data(m), put(m, 0)), out(m, 0))),
    "read on one way of data": (UNKNOWN, lambda m: when(by_data(m), out(m, 0))),
    "a guard of each element": (PROVEN, lambda m: guarded(m, 30)),
    "a guard of one element less": (REFUTED, lambda m: guarded(m, 29)),
    "where the thread says": (PROVEN, lambda m: sequence(put(m, m.tid % 8), out(m, m.tid % 8))),
    "where another thread says": (REFUTED, lambda m: sequence(put(m, m.tid % 8), out(m, (m.tid + 1) % 8))),
    "in the first turn": (PROVEN, lambda m: loop(3, lambda i: sequence(when(i < 1, put(m, 0)), out(m, 0)))),
    "in the second turn": (
        REFUTED,
        lambda m: loop(3, lambda i: sequence(when(i == 1, put(m, 0)), out(m, 0))),
    ),
    "in the turn before, and ahead of the loop": (
        PROVEN,
        lambda m: sequence(put(m, 0), loop(3, lambda i: sequence(out(m, i % 2), put(m, (i + 1) % 2)))),
    ),
    "in the turn before alone": (REFUTED, lambda m: loop(3, lambda i: sequence(out(m, i % 2), put(m, (i + 1) % 2)))),
    "only where the turn has it": (
        REFUTED,
        lambda m: loop(4, lambda i: when(i >= 2, sequence(put(m, i), out(m, i, i - 1)))),
    ),
    "carried by an array": (PROVEN, lambda m: in_a_loop(m, declared_inside=False)),
    "carried by an array of each turn": (REFUTED, lambda m: in_a_loop(m, declared_inside=True)),
    "half of a wide access": (
        REFUTED,
        lambda m: sequence(
            put(m, tirx.Ramp(0, 1, 2), tirx.Broadcast(tirx.const(1.0), 2)),
            tirx.BufferStore(m.tensors[1], m.register[2] + m.register[1], [place(m)]),
        ),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_verdict(name: str) -> None:
    verdict, body = CASES[name]
    buffers = (tensor("x", SIZE, "input"), tensor("y", SIZE, "output"))
    found = certificate([Run("one", TILES, (0, 1))], [stage("one", (SIZE, SIZE), body)], buffers)
    # Where some threads or tiles write nothing, the output is not whole, which is another rule.
    own = [c for c in found.counterexamples if "own array" in c.reason]
    said = REFUTED if own else UNKNOWN if any("was written before" in why for why in found.unknown) else PROVEN
    assert said == verdict, str(found)
