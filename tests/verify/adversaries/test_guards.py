"""What data decides: gathers under a guard of their own, writes in both of two branches, barriers under one datum."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tvm import tirx

from souffle.verify import PROVEN, REFUTED, UNKNOWN
from tests.verify.hand_made import THREADS, Memory, Run, barrier, certificate, sequence, stage, tensor

SIZE = 2 * THREADS
Body = Callable[[Memory], tirx.Stmt]


def at(m: Memory) -> tirx.PrimExpr:
    return m.tile * THREADS + m.tid


def number(value: int) -> tirx.PrimExpr:
    return tirx.IntImm("int32", value)


def store(m: Memory, value: object, further: int = 0) -> tirx.Stmt:
    return tirx.BufferStore(m.tensors[2], value, [tirx.truncmod(at(m) + further, SIZE) if further else at(m)])


def inside(index: tirx.PrimExpr, size: int = SIZE) -> tirx.PrimExpr:
    return tirx.And(index >= 0, index < size)


def guarded(size: int = SIZE, first: bool = True, otherwise: bool = False) -> Body:
    """A gather where its index is inside, after a zero in each element or beside one."""

    def body(m: Memory) -> tirx.Stmt:
        index = m.tensors[0][at(m)]
        zero = store(m, number(0)) if otherwise else None
        chosen = tirx.IfThenElse(inside(index, size), store(m, m.tensors[1][index]), zero)
        return sequence(*([store(m, number(0))] if first else []), chosen)

    return body


def nested(complete: bool) -> Body:
    """Two conditions, one in the other; of all four ways one may be left out."""

    def body(m: Memory) -> tirx.Stmt:
        index = m.tensors[0][at(m)]
        inner = tirx.IfThenElse(index < SIZE, store(m, m.tensors[1][index]), store(m, number(1)))
        odd = tirx.truncmod(m.tensors[1][at(m)], 2) > 0
        outer = tirx.IfThenElse(odd, store(m, number(2)), store(m, number(3)) if complete else None)
        return tirx.IfThenElse(index >= 0, inner, outer)

    return body


def elsewhere(m: Memory) -> tirx.Stmt:
    """The other branch writes another element."""
    index = m.tensors[0][at(m)]
    return tirx.IfThenElse(inside(index), store(m, m.tensors[1][index]), store(m, number(0), 1))


def twice_asked(m: Memory) -> tirx.Stmt:
    """What the second branch asks has been read again, past a write of anybody's."""
    index = m.tensors[0][at(m)]
    first = tirx.IfThenElse(index >= 0, store(m, number(1)), None)
    return sequence(first, barrier(), tirx.IfThenElse(index < 0, store(m, number(2)), None))


@pytest.mark.parametrize(
    ("body", "verdict"),
    [
        (guarded(), PROVEN),
        (guarded(first=False, otherwise=True), PROVEN),
        (guarded(size=SIZE + 1), UNKNOWN),
        (guarded(first=False), UNKNOWN),
        (nested(True), PROVEN),
        (nested(False), UNKNOWN),
        (elsewhere, UNKNOWN),
        (twice_asked, UNKNOWN),
    ],
)
def test_what_is_written_whatever_the_data(body: Body, verdict: str) -> None:
    tensors = [
        tensor(n, SIZE, kind, dtype="int32") for n, kind in zip("ixy", ("input", "input", "output"), strict=True)
    ]
    function = stage("one", (SIZE,) * 3, body, dtype="int32")
    found = certificate([Run("one", 2, (0, 1, 2))], [function], tensors)
    assert found.verdict == verdict and not found.counterexamples, str(found)


# barriers where data says so


def mirrored(flag: Callable[[Memory], tirx.PrimExpr], bound: bool = False) -> Body:
    """The tile's elements, in the other order where a flag says so."""

    def body(m: Memory) -> tirx.Stmt:
        kept = tirx.Var("flag", "int32")
        own = m.tensors[1][at(m)]
        turned = sequence(
            tirx.BufferStore(m.shared, own, [m.tid]), barrier(), store(m, m.shared[THREADS - 1 - m.tid]), barrier()
        )
        branch = tirx.IfThenElse((kept if bound else flag(m)) > 0, turned, store(m, own))
        return sequence(tirx.Bind(kept, flag(m)), branch) if bound else branch

    return body


def only_the_barrier(needed: bool) -> Body:
    """A barrier where a flag says so, between what threads hand to each other or behind it."""

    def body(m: Memory) -> tirx.Stmt:
        perhaps = tirx.IfThenElse(m.tensors[0][m.tile] > 0, barrier(), None)
        always = () if needed else (barrier(),)
        write = tirx.BufferStore(m.shared, m.tensors[1][at(m)], [m.tid])
        return sequence(write, *always, perhaps, store(m, m.shared[THREADS - 1 - m.tid]), barrier())

    return body


def asked_twice(m: Memory) -> tirx.Stmt:
    """What the barrier is for is done where the same flag says so: right, but that it is the same nothing says."""
    write = tirx.BufferStore(m.shared, m.tensors[1][at(m)], [m.tid])
    flag, taken = m.tensors[0][m.tile] > 0, store(m, m.shared[THREADS - 1 - m.tid])
    first, second = tirx.IfThenElse(flag, barrier(), None), tirx.IfThenElse(flag, taken, store(m, m.tensors[1][at(m)]))
    return sequence(write, first, second, barrier())


def in_turns(turns: int) -> Body:
    """A barrier in each turn of a loop whose own flag says so; what it is for has one that stands in all."""

    def body(m: Memory) -> tirx.Stmt:
        k = tirx.Var("k", "int32")
        write = tirx.BufferStore(m.shared, m.tensors[1][at(m)], [m.tid])
        perhaps = tirx.IfThenElse(m.tensors[0][k] > 0, barrier(), None)
        parts = (barrier(), write, perhaps, barrier(), store(m, m.shared[THREADS - 1 - m.tid]))
        return tirx.For(k, 0, turns, tirx.ForKind.SERIAL, sequence(*parts))

    return body


def raced_for(m: Memory) -> tirx.Stmt:
    """The flag is the stage's own output, and its first thread changes it."""
    flag = tirx.IfThenElse(m.tensors[2][m.tile * THREADS] > 0, barrier(), None)
    return sequence(store(m, number(1)), flag)


@pytest.mark.parametrize(
    ("body", "verdict"),
    [
        (mirrored(lambda m: m.tensors[0][0]), PROVEN),
        (mirrored(lambda m: m.tensors[0][m.tile], bound=True), PROVEN),
        (mirrored(lambda m: m.tensors[0][m.tensors[0][m.tile] & 1]), PROVEN),
        (mirrored(lambda m: m.tensors[0][m.tid]), UNKNOWN),
        (mirrored(lambda m: m.tensors[0][m.tid], bound=True), UNKNOWN),
        (mirrored(lambda m: m.tensors[0][m.tensors[0][m.tid] & 1]), UNKNOWN),
        (only_the_barrier(needed=False), PROVEN),
        (only_the_barrier(needed=True), REFUTED),
        (asked_twice, UNKNOWN),
        (in_turns(3), PROVEN),
        (raced_for, REFUTED),
    ],
)
def test_barriers_under_a_datum(body: Body, verdict: str) -> None:
    """All threads wait, or none, where they read the same; where they do not, nothing says so."""
    tensors = [
        tensor(n, SIZE, kind, dtype="int32") for n, kind in zip("ixy", ("input", "input", "output"), strict=True)
    ]
    function = stage("one", (SIZE,) * 3, body, dtype="int32")
    found = certificate([Run("one", 2, (0, 1, 2))], [function], tensors)
    assert found.verdict == verdict, str(found)
