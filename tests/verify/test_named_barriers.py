"""The certificate on barriers of some of a block's threads."""

from __future__ import annotations

import pytest
from tvm import tirx

from souffle.verify import PROVEN, REFUTED, UNKNOWN, Certificate
from tests.verify.hand_made import THREADS, Memory, Run, barrier, certificate, extern, sequence, stage, tensor

PART = 32
TILES = 4
SIZE = PART * TILES
BUFFERS = (tensor("x", SIZE, "input"), tensor("h", SIZE, "workspace"), tensor("y", SIZE, "output"))


def wait(count: int = PART, number: int = 1) -> tirx.Stmt:
    return extern(f"souffle_named_barrier<{number}, {count}>")


def at(m: Memory, width: int = PART) -> object:
    return m.tile * width + m.tid


def turned(m: Memory, *between: tirx.Stmt, width: int = PART) -> tirx.Stmt:
    """Threads hand values to each other through shared memory."""
    put = tirx.BufferStore(m.shared, m.tensors[0][at(m, width)], [m.tid])
    return sequence(put, *between, tirx.BufferStore(m.tensors[1], m.shared[width - 1 - m.tid], [at(m, width)]))


def one_stage(body, *, threads: int = PART, after: bool = True) -> Certificate:
    run = Run("one", TILES, (0, 2), after, threads=threads)
    return certificate([run], [stage("one", (SIZE, SIZE), body)], BUFFERS)


def rules(found: Certificate) -> set[str]:
    return {c.rule for c in found.counterexamples}


def test_threads_that_take_part_are_ordered() -> None:
    found = one_stage(lambda m: turned(m, wait()))
    assert found.verdict == PROVEN, found
    assert rules(one_stage(lambda m: turned(m))) == {"race in a block"}


@pytest.mark.parametrize("count", [64, 96, 16, 31])
def test_the_count_is_that_of_the_threads_that_come(count: int) -> None:
    found = one_stage(lambda m: turned(m, wait(count)))
    assert found.verdict == REFUTED and rules(found) == {"divergent barrier"}
    assert f"it waits for {count} threads, and 32 come to it" in found.counterexamples[0].reason


def test_threads_that_call_are_whole_warps() -> None:
    found = one_stage(lambda m: turned(m, wait(48)), threads=48)
    assert "divergent barrier" in rules(found)


@pytest.mark.parametrize(("number", "verdict"), [(1, PROVEN), (15, PROVEN), (0, REFUTED), (16, REFUTED)])
def test_numbers(number: int, verdict: str) -> None:
    """Number 0 is that of the whole block, and there are 16."""
    found = one_stage(lambda m: turned(m, wait(number=number)))
    assert found.verdict == verdict, found
    if verdict == REFUTED:
        assert found.counterexamples[0].element == f"barrier {number}"


def test_a_thread_that_does_not_come() -> None:
    found = one_stage(lambda m: turned(m, tirx.IfThenElse(m.tid < 31, wait(), None)))
    assert rules(found) == {"divergent barrier"}
    assert found.counterexamples[0].blocks[0].startswith("thread 0 of ")
    assert found.counterexamples[0].blocks[1].startswith("thread 31 of ")


def test_some_warps_of_a_stage_are_not_proven() -> None:
    """Right as it stands, but none of the forms that are emitted: neither proven nor refuted."""
    buffers = tuple(tensor(b.name, 2 * SIZE, b.kind) for b in BUFFERS)
    run = Run("one", TILES, (0, 2))

    def body(m: Memory) -> tirx.Stmt:
        return turned(m, tirx.IfThenElse(m.tid < 32, wait(32), None), barrier(), width=THREADS)

    found = certificate([run], [stage("one", (2 * SIZE, 2 * SIZE), body)], buffers)
    assert found.verdict == UNKNOWN and "a barrier of some warps of a stage" in str(found)


def chain(first_after: bool, *, second_threads: int = THREADS, count: int | None = None, grid: bool = False):
    """A stage of 32 threads, and one that writes the same shared memory with as many threads as it says."""
    width = second_threads

    def second(m: Memory) -> tirx.Stmt:
        between = barrier() if count is None else wait(count)
        return turned(m, between, width=width)

    buffers = (*BUFFERS[:2], tensor("v", width * TILES, "input"), tensor("y", width * TILES, "output"))
    functions = [stage("one", (SIZE, SIZE), lambda m: turned(m, wait())), stage("two", (width * TILES,) * 2, second)]
    runs = [
        Run("one", TILES, (0, 1), first_after, threads=PART),
        Run("two", TILES, (2, 3), True, grid, threads=second_threads),
    ]
    return certificate(runs, functions, buffers)


def test_threads_that_take_no_part_are_not_ordered_by_it() -> None:
    """They run ahead into the next stage, and write the pool while the others read it."""
    assert chain(True).verdict == PROVEN
    found = chain(False)
    assert found.verdict == REFUTED and "race in a block" in rules(found)
    assert any(set(c.stages) == {"one", "two"} for c in found.counterexamples)
    # Without a barrier after each tile, not even the first stage's own next tile is safe.
    assert chain(False, grid=True).verdict == REFUTED


def test_one_number_with_two_counts_needs_a_barrier_of_the_block_between() -> None:
    assert chain(True, second_threads=THREADS, count=THREADS).verdict == PROVEN
    found = chain(False, second_threads=THREADS, count=THREADS)
    why = [c.reason for c in found.counterexamples if c.rule == "divergent barrier"]
    assert why == ["32 threads may still wait at it when others come and wait for 64"]


def test_what_a_stage_wrote_to_global_memory_is_ordered_for_its_own_threads_only() -> None:
    """A stage of the whole block reads what a stage of some of its threads has written, in the same tile."""

    def first(m: Memory) -> tirx.Stmt:
        return sequence(turned(m, wait()), wait())

    def second(m: Memory) -> tirx.Stmt:
        read = m.tensors[0][m.tile * PART + tirx.truncmod(m.tid, PART)]
        return tirx.BufferStore(m.tensors[1], read, [at(m, THREADS)])

    def found(after: bool) -> Certificate:
        buffers = (*BUFFERS[:2], tensor("y", THREADS * TILES, "output"))
        functions = [stage("one", (SIZE, SIZE), first), stage("two", (SIZE, THREADS * TILES), second)]
        runs = [Run("one", TILES, (0, 1), after, threads=PART), Run("two", TILES, (1, 2))]
        return certificate(runs, functions, buffers)

    assert found(True).verdict == PROVEN, found(True)
    races = [c for c in found(False).counterexamples if c.stages == ("one", "two")]
    assert races and races[0].rule == "race in a block"


def test_whoever_is_outside_keeps_what_it_did_before() -> None:
    """Threads 32 to 63 have read the pool; a barrier of the first 32 says nothing of them."""

    def first(m: Memory) -> tirx.Stmt:
        return sequence(turned(m, barrier(), width=THREADS))

    def second(m: Memory) -> tirx.Stmt:
        return sequence(wait(), turned(m, wait()))

    def found(after: bool) -> Certificate:
        buffers = (tensor("v", THREADS * TILES, "input"), tensor("w", THREADS * TILES, "output"), *BUFFERS[::2])
        functions = [stage("one", (THREADS * TILES,) * 2, first), stage("two", (SIZE, SIZE), second)]
        runs = [Run("one", TILES, (0, 1), after), Run("two", TILES, (2, 3), threads=PART)]
        return certificate(runs, functions, buffers)

    assert found(True).verdict == PROVEN, found(True)
    races = [c for c in found(False).counterexamples if c.stages == ("one", "two")]
    assert races and races[0].rule == "race in a block"
    # Of the two, one is a thread beyond those that the barrier orders.
    people = [int(who.split()[1]) for who in races[0].blocks]
    assert max(people) >= PART > min(people)


def test_a_barrier_of_a_warp_that_has_no_text_orders_nothing() -> None:
    """TVM's generator leaves out ``tvm_storage_sync("warp")``."""
    silent = tirx.Evaluate(tirx.call_intrin("int32", "tirx.tvm_storage_sync", "warp"))
    assert one_stage(lambda m: turned(m, barrier("warp"))).verdict == PROVEN
    assert rules(one_stage(lambda m: turned(m, silent))) == {"race in a block"}
