"""What data decides, and the text bounds: gathers under a guard of their own, and writes in both of two branches."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tvm import tirx

from souffle.verify import PROVEN, UNKNOWN
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
