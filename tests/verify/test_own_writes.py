"""Stages that write to the workspace and read it back themselves."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tvm import tirx

from souffle.verify import PROVEN, REFUTED, UNKNOWN, Certificate
from tests.verify.hand_made import THREADS, Memory, Run, barrier, certificate, sequence, stage, tensor

SIZE = 4 * THREADS
BUFFERS = (tensor("x", SIZE, "input"), tensor("h", SIZE, "workspace"), tensor("y", SIZE, "output"))


def place(m: Memory, thread: object) -> object:
    return m.tile * THREADS + thread


def put(m: Memory) -> tirx.Stmt:
    return tirx.BufferStore(m.tensors[1], m.tensors[0][place(m, m.tid)], [place(m, m.tid)])


def take(m: Memory, thread: object) -> tirx.Stmt:
    return tirx.BufferStore(m.tensors[2], m.tensors[1][place(m, thread)], [place(m, m.tid)])


def own(body: Callable[[Memory], tirx.Stmt], *, buffers=BUFFERS, parameters=(0, 1, 2)) -> Certificate:
    functions = [stage("one", (SIZE,) * len(parameters), body)]
    return certificate([Run("one", 4, parameters)], functions, buffers)


def rules(found: Certificate) -> set[str]:
    return {one.rule for one in found.counterexamples}


STALE = "stale or undefined read"


def test_a_thread_reads_what_it_wrote() -> None:
    found = own(lambda m: sequence(put(m), take(m, m.tid)))
    assert found.verdict == PROVEN, found


def test_a_thread_reads_before_it_writes() -> None:
    found = own(lambda m: sequence(take(m, m.tid), put(m)))
    assert found.verdict == REFUTED and rules(found) == {STALE}
    assert found.counterexamples[0].blocks == ("tile 0, thread 0",)


def test_a_thread_adds_to_what_nobody_wrote() -> None:
    def added(m: Memory) -> tirx.Stmt:
        total = m.tensors[1][place(m, m.tid)] + m.tensors[0][place(m, m.tid)]
        return sequence(tirx.BufferStore(m.tensors[1], total, [place(m, m.tid)]), take(m, m.tid))

    assert rules(own(added)) == {STALE}


@pytest.mark.parametrize("waits", [True, False])
def test_another_thread_of_the_tile_reads(waits: bool) -> None:
    def body(m: Memory) -> tirx.Stmt:
        return sequence(put(m), *([barrier()] if waits else []), take(m, THREADS - 1 - m.tid))

    found = own(body)
    assert found.verdict == (PROVEN if waits else REFUTED), found
    assert rules(found) == (set() if waits else {"race in a block"})


def test_another_tile_reads() -> None:
    def body(m: Memory) -> tirx.Stmt:
        other = (3 - m.tile) * THREADS + m.tid
        return sequence(put(m), tirx.BufferStore(m.tensors[2], m.tensors[1][other], [place(m, m.tid)]))

    assert rules(own(body)) == {STALE, "race between blocks"}


@pytest.mark.parametrize(("back", "verdict"), [(1, PROVEN), (0, PROVEN), (-1, REFUTED)])
def test_turns_of_a_loop_read_what_earlier_ones_wrote(back: int, verdict: str) -> None:
    """A thread has four elements; in a turn it writes one, and reads that of `back` turns before."""

    def body(m: Memory) -> tirx.Stmt:
        turn = tirx.Var("turn", "int32")
        first = (m.tile * 16 + m.tid) * 4
        write = tirx.BufferStore(m.tensors[1], m.tensors[0][first + turn], [first + turn])
        seen = turn - back
        inside = tirx.And(seen >= 0, seen < 4)
        read = tirx.BufferStore(m.tensors[2], m.tensors[1][first + seen], [first + turn])
        other = tirx.BufferStore(m.tensors[2], tirx.FloatImm("float32", 0.0), [first + turn])
        turns = tirx.For(turn, 0, 4, tirx.ForKind.SERIAL, sequence(write, tirx.IfThenElse(inside, read, other)))
        return tirx.IfThenElse(m.tid < 16, turns, None)

    found = own(body)
    assert found.verdict == verdict, found
    assert rules(found) == ({STALE} if verdict == REFUTED else set())


def test_a_read_that_stands_before_the_write_in_a_loop_finds_that_of_the_turn_before() -> None:
    def body(guard: bool):
        def made(m: Memory) -> tirx.Stmt:
            turn = tirx.Var("turn", "int32")
            at = place(m, m.tid)
            read = tirx.BufferStore(m.tensors[2], m.tensors[1][at], [at])
            read = tirx.IfThenElse(turn > 0, read, None) if guard else read
            return tirx.For(turn, 0, 3, tirx.ForKind.SERIAL, sequence(read, put(m)))

        return made

    assert own(body(True)).verdict == PROVEN
    assert rules(own(body(False))) == {STALE}


def test_a_part_that_is_not_written_is_a_counterexample() -> None:
    found = own(lambda m: sequence(tirx.IfThenElse(m.tid < THREADS - 1, put(m), None), take(m, m.tid)))
    assert rules(found) == {STALE}
    assert found.counterexamples[0].blocks == (f"tile 0, thread {THREADS - 1}",)


def test_a_write_that_data_decides_is_undecided() -> None:
    def body(m: Memory) -> tirx.Stmt:
        positive = m.tensors[0][place(m, m.tid)] > tirx.FloatImm("float32", 0.0)
        return sequence(tirx.IfThenElse(positive, put(m), None), take(m, m.tid))

    found = own(body)
    assert found.verdict == UNKNOWN, found
    assert any("where data says so" in reason for reason in found.unknown)


def test_a_write_through_another_pointer_to_the_same_tensor_is_undecided() -> None:
    def body(m: Memory) -> tirx.Stmt:
        written = tirx.BufferStore(m.tensors[3], m.tensors[0][place(m, m.tid)], [place(m, m.tid)])
        return sequence(written, barrier(), take(m, THREADS - 1 - m.tid))

    found = own(body, parameters=(0, 1, 2, 1))
    assert STALE not in rules(found)
    assert any("through another pointer" in reason for reason in found.unknown), found


def test_a_tensor_that_shares_memory_may_be_written_before_the_read() -> None:
    """Other threads read, behind a barrier, what the stage has just overwritten."""
    buffers = (
        tensor("x", SIZE, "input"),
        tensor("a", SIZE, "workspace"),
        tensor("b", SIZE, "workspace"),
        tensor("y", SIZE, "output"),
    )

    def body(m: Memory) -> tirx.Stmt:
        lost = tirx.BufferStore(m.tensors[2], m.tensors[0][place(m, m.tid)], [place(m, m.tid)])
        at = place(m, THREADS - 1 - m.tid)
        read = tirx.BufferStore(m.tensors[3], m.tensors[1][at], [place(m, m.tid)])
        return sequence(lost, barrier(), read)

    functions = [stage("one", (SIZE, SIZE), put), stage("two", (SIZE,) * 4, body)]
    runs = [Run("one", 4, (0, 1)), Run("two", 4, (0, 1, 2, 3))]
    found = certificate(runs, functions, buffers)
    assert found.verdict != PROVEN
    assert any("reads a before it writes b, which shares memory with it" in reason for reason in found.unknown)
