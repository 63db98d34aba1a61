"""The certificate on programs small enough to see what it must say."""

from __future__ import annotations

import pytest
from tvm import tirx

from souffle.verify import PROVEN, REFUTED, UNKNOWN, Certificate
from tests.verify.hand_made import THREADS, Memory, Run, barrier, certificate, extern, sequence, stage, tensor

SIZE = 4 * THREADS
BUFFERS = (tensor("x", SIZE, "input"), tensor("h", SIZE, "workspace"), tensor("y", SIZE, "output"))


def at(m: Memory) -> object:
    return m.tile * THREADS + m.tid


def copy(m: Memory) -> tirx.Stmt:
    return tirx.BufferStore(m.tensors[1], m.tensors[0][at(m)], [at(m)])


def turned(m: Memory) -> tirx.Stmt:
    """Threads read what other threads of the same tile have written."""
    return tirx.BufferStore(m.tensors[1], m.tensors[0][m.tile * THREADS + (THREADS - 1 - m.tid)], [at(m)])


def mirrored(m: Memory) -> tirx.Stmt:
    """Tiles read what other tiles have written."""
    return tirx.BufferStore(m.tensors[1], m.tensors[0][SIZE - 1 - at(m)], [at(m)])


def chain(second, *, grid: bool, after: bool, tiles: int = 4) -> Certificate:
    functions = [stage("one", (SIZE, SIZE), copy), stage("two", (SIZE, SIZE), second)]
    runs = [Run("one", tiles, (0, 1), after), Run("two", tiles, (1, 2), after, grid)]
    return certificate(runs, functions, BUFFERS)


@pytest.mark.parametrize(
    ("second", "grid", "after", "verdict"),
    [
        (copy, False, False, PROVEN),
        (turned, False, False, REFUTED),
        (turned, False, True, PROVEN),
        (mirrored, False, True, REFUTED),
        (mirrored, True, False, PROVEN),
    ],
)
def test_the_barrier_that_a_dependence_needs(second, grid: bool, after: bool, verdict: str) -> None:
    found = chain(second, grid=grid, after=after)
    assert found.verdict == verdict, found
    if verdict == REFUTED:
        first = found.counterexamples[0]
        assert first.rule == ("race in a block" if second is turned else "race between blocks")
        assert first.stages == ("one", "two")
        assert "t1[" in first.statements[0] and "= t0[" in first.statements[1]


def test_a_tile_that_is_left_out_leaves_an_output_undefined() -> None:
    found = chain(copy, grid=True, after=False, tiles=3)
    assert {c.rule for c in found.counterexamples} == {"stale or undefined read"}
    assert "element 192 of y" in found.counterexamples[0].element


def test_a_stage_of_no_tiles_writes_nothing() -> None:
    found = chain(copy, grid=True, after=False, tiles=0)
    assert {c.rule for c in found.counterexamples} == {"stale or undefined read"}


def test_two_tiles_may_not_write_one_element() -> None:
    def same(m: Memory) -> tirx.Stmt:
        return tirx.BufferStore(m.tensors[1], m.tensors[0][at(m)], [m.tid])

    found = certificate([Run("one", 4, (0, 2))], [stage("one", (SIZE, SIZE), same)], BUFFERS)
    assert "race between blocks" in {c.rule for c in found.counterexamples}


def test_bounds_are_those_of_the_launch_not_of_the_declaration() -> None:
    def shifted(m: Memory) -> tirx.Stmt:
        return tirx.BufferStore(m.tensors[1], m.tensors[0][at(m) + 1], [at(m)])

    def one(declared: int) -> Certificate:
        return certificate([Run("one", 4, (0, 2))], [stage("one", (declared, SIZE), shifted)], BUFFERS)

    for declared in (SIZE, SIZE + 1):
        found = one(declared)
        assert {c.rule for c in found.counterexamples} == {"out of bounds"}
        assert found.counterexamples[0].blocks == (f"tile 3, thread {THREADS - 1}",)


def test_a_guard_that_keeps_an_access_in_bounds_is_seen() -> None:
    def guarded(limit: int):
        def body(m: Memory) -> tirx.Stmt:
            inside = tirx.And(at(m) + 1 < limit, m.tid >= 0)
            value = tirx.if_then_else(inside, m.tensors[0][at(m) + 1], tirx.FloatImm("float32", 0.0))
            return tirx.BufferStore(m.tensors[1], value, [at(m)])

        return certificate([Run("one", 4, (0, 2))], [stage("one", (SIZE, SIZE), body)], BUFFERS)

    assert guarded(SIZE).verdict == PROVEN
    assert guarded(SIZE + 1).verdict == REFUTED


def test_tensors_that_share_memory() -> None:
    buffers = (
        tensor("x", SIZE, "input"),
        tensor("a", SIZE, "workspace"),
        tensor("b", SIZE, "workspace", 4 * SIZE),
        tensor("y", SIZE, "output"),
    )

    def three(m: Memory) -> tirx.Stmt:
        return tirx.BufferStore(m.tensors[2], m.tensors[0][at(m)] + m.tensors[1][at(m)], [at(m)])

    functions = [
        stage("one", (SIZE, SIZE), copy),
        stage("two", (SIZE, SIZE), copy),
        stage("three", (SIZE, SIZE, SIZE), three),
    ]
    runs = [
        Run("one", 4, (0, 1)),
        Run("two", 4, (1, 2), grid_before=True),
        Run("three", 4, (1, 2, 3), grid_before=True),
    ]
    assert certificate(runs, functions, buffers).verdict == PROVEN
    shared = (*buffers[:2], tensor("b", SIZE, "workspace", 2 * SIZE), buffers[3])
    found = certificate(runs, functions, shared)
    assert "stale or undefined read" in {c.rule for c in found.counterexamples}
    assert any("two, writing b," in c.reason for c in found.counterexamples)


def through_shared(*, between: bool = True, divergent: bool = False):
    def body(m: Memory) -> tirx.Stmt:
        put = tirx.BufferStore(m.shared, m.tensors[0][at(m)], [m.tid])
        take = tirx.BufferStore(m.tensors[1], m.shared[THREADS - 1 - m.tid], [at(m)])
        wait = tirx.IfThenElse(m.tid < 32, barrier(), None) if divergent else barrier()
        return sequence(put, wait, take) if between else sequence(put, take)

    return body


@pytest.mark.parametrize(
    ("body", "after", "rule"),
    [
        (through_shared(), True, None),
        (through_shared(), False, "race in a block"),
        (through_shared(between=False), True, "race in a block"),
        (through_shared(divergent=True), True, "divergent barrier"),
    ],
)
def test_shared_memory_within_a_turn_and_from_turn_to_turn(body, after: bool, rule: str | None) -> None:
    found = certificate([Run("one", 4, (0, 2), after)], [stage("one", (SIZE, SIZE), body)], BUFFERS)
    assert {c.rule for c in found.counterexamples} == ({rule} if rule else set()), found
    assert found.verdict == (REFUTED if rule else PROVEN)


def test_a_barrier_that_only_some_threads_of_the_kernel_call() -> None:
    run = Run("one", 4, (0, 2), threads=32)

    def body(m: Memory) -> tirx.Stmt:
        return sequence(barrier(), copy(m))

    found = certificate([run], [stage("one", (SIZE, SIZE), body)], BUFFERS)
    assert "divergent barrier" in {c.rule for c in found.counterexamples}


def test_a_warp_needs_a_barrier_of_its_own_only() -> None:
    def body(fence: bool, distance: int):
        def inner(m: Memory) -> tirx.Stmt:
            put = tirx.BufferStore(m.shared, m.tensors[0][at(m)], [m.tid])
            neighbour = tirx.bitwise_xor(m.tid, tirx.IntImm("int32", distance))
            take = tirx.BufferStore(m.tensors[1], m.shared[neighbour], [at(m)])
            return sequence(put, *([barrier("warp")] if fence else []), take)

        return certificate([Run("one", 4, (0, 2))], [stage("one", (SIZE, SIZE), inner)], BUFFERS)

    assert body(True, 16).verdict == PROVEN
    assert body(False, 16).verdict == REFUTED
    assert body(True, 32).verdict == REFUTED


def test_shared_memory_that_nobody_wrote_is_not_read() -> None:
    def body(m: Memory) -> tirx.Stmt:
        put = tirx.IfThenElse(m.tid < THREADS - 1, tirx.BufferStore(m.shared, m.tensors[0][at(m)], [m.tid]), None)
        return sequence(put, barrier(), tirx.BufferStore(m.tensors[1], m.shared[m.tid], [at(m)]))

    found = certificate([Run("one", 4, (0, 2))], [stage("one", (SIZE, SIZE), body)], BUFFERS)
    assert [c.rule for c in found.counterexamples] == ["stale or undefined read"]
    assert "byte 252 of the shared memory pool" in found.counterexamples[0].element


def pipeline(*, pending: int, fence: bool = True, stages: int = 3, steps: int = 4):
    """A ring of tiles in shared memory that are copied ahead: ``stages - 1`` copies are under way at a time."""

    def body(m: Memory) -> tirx.Stmt:
        def ahead(step, into) -> tirx.Stmt:
            target = tirx.address_of(m.shared[into * THREADS + m.tid])
            source = tirx.address_of(m.tensors[0][step * THREADS + m.tid])
            return extern("souffle_copy_async<4>", target, source)

        commit, turn = extern("souffle_copy_commit"), tirx.Var("turn", "int32")
        first = [s for i in range(stages - 1) for s in (ahead(i, i), commit)]
        here = tirx.truncmod(turn, stages) * THREADS
        use = tirx.BufferStore(m.register, m.register[0] + m.shared[here + (THREADS - 1 - m.tid)], [0])
        later = tirx.IfThenElse(
            turn + (stages - 1) < steps, ahead(turn + (stages - 1), tirx.truncmod(turn + (stages - 1), stages)), None
        )
        wait = extern(f"souffle_copy_wait<{pending}>")
        inside = sequence(wait, *([barrier()] if fence else []), later, commit, use)
        loop = tirx.For(turn, 0, steps, tirx.ForKind.SERIAL, inside)
        start = tirx.BufferStore(m.register, tirx.FloatImm("float32", 0.0), [0])
        return sequence(start, *first, loop, tirx.BufferStore(m.tensors[1], m.register[0], [at(m)]))

    return certificate([Run("one", 4, (0, 2))], [stage("one", (SIZE, SIZE), body)], BUFFERS)


def test_copies_that_are_under_way() -> None:
    assert pipeline(pending=1).verdict == PROVEN
    assert pipeline(pending=0).verdict == PROVEN
    for wrong in (pipeline(pending=2), pipeline(pending=1, fence=False), pipeline(pending=1, stages=2)):
        assert wrong.verdict == REFUTED
        assert wrong.counterexamples[0].rule == "race in a block"


def test_what_is_not_known_is_not_proven() -> None:
    def body(m: Memory) -> tirx.Stmt:
        return sequence(copy(m), extern("some_helper", tirx.address_of(m.tensors[1][0])))

    found = certificate([Run("one", 4, (0, 2))], [stage("one", (SIZE, SIZE), body)], BUFFERS)
    assert found.verdict == UNKNOWN
    assert any("some_helper" in reason for reason in found.unknown)


def test_an_index_from_data_is_proven_only_where_it_is_clamped() -> None:
    buffers = (tensor("i", SIZE, "input", dtype="int32"), tensor("x", SIZE, "input"), tensor("y", SIZE, "output"))

    def body(clamp: bool):
        def inner(m: Memory) -> tirx.Stmt:
            index = tirx.Cast("int32", m.tensors[0][at(m)])
            index = (
                tirx.Max(tirx.Min(index, tirx.IntImm("int32", SIZE - 1)), tirx.IntImm("int32", 0)) if clamp else index
            )
            return tirx.BufferStore(m.tensors[2], m.tensors[1][index], [at(m)])

        function = stage("one", (SIZE, SIZE, SIZE), inner, dtype="int32")
        return certificate([Run("one", 4, (0, 1, 2))], [function], buffers)

    assert body(True).verdict == PROVEN
    loose = body(False)
    assert loose.verdict == UNKNOWN and all("may touch" in reason for reason in loose.unknown)


def in_place(noalias: bool, second=copy) -> Certificate:
    """A stage that is given one tensor twice, to read and to write."""
    function = stage("two", (SIZE, SIZE), second)
    function = function.with_attr("tirx.noalias", True) if noalias else function
    runs = [Run("one", 4, (0, 1)), Run("two", 4, (1, 1), grid_before=True), Run("one", 4, (1, 2), grid_before=True)]
    return certificate(runs, [stage("one", (SIZE, SIZE), copy), function], BUFFERS)


def test_writing_in_place() -> None:
    assert in_place(False).verdict == PROVEN
    assert [c.rule for c in in_place(True).counterexamples] == ["aliased pointers"]
    assert [c.rule for c in in_place(False, turned).counterexamples] == ["race in a block"]
    assert [c.rule for c in in_place(False, mirrored).counterexamples] == ["race between blocks"]


def test_one_function_with_other_pointers_each_time() -> None:
    """Twice the same stage without any barrier: the second reads what other threads wrote in the first."""
    buffers = (BUFFERS[0], BUFFERS[1], tensor("g", SIZE, "workspace", 4 * SIZE), BUFFERS[2])

    def twice(after: bool) -> Certificate:
        runs = [Run("one", 4, (0, 1), after), Run("one", 4, (1, 2), after), Run("one", 4, (2, 3), after)]
        return certificate(runs, [stage("one", (SIZE, SIZE), turned)], buffers)

    assert twice(True).verdict == PROVEN
    found = twice(False)
    assert {c.rule for c in found.counterexamples} == {"race in a block"}


def test_more_shared_memory_than_a_block_can_have() -> None:
    found = certificate([Run("one", 4, (0, 2))], [stage("one", (SIZE, SIZE), copy)], BUFFERS, shared=256 * 1024)
    assert [c.rule for c in found.counterexamples] == ["does not fit"]
    found = certificate([Run("one", 4, (0, 2))], [stage("one", (SIZE, SIZE), copy)], BUFFERS, shared=1)
    assert [c.rule for c in found.counterexamples] == ["does not fit"]


def test_wide_accesses_are_aligned() -> None:
    def wide(first: int) -> Certificate:
        def body(m: Memory) -> tirx.Stmt:
            here = tirx.Ramp(m.tid * 4 + first, 1, 4)
            value = tirx.BufferLoad(m.tensors[0], [here])
            return tirx.IfThenElse(m.tid < THREADS - 1, tirx.BufferStore(m.tensors[1], value, [here]), None)

        return certificate([Run("one", 1, (0, 2))], [stage("one", (SIZE, SIZE), body)], BUFFERS)

    # Both leave elements of the output out; only one touches float4 at odd places.
    assert "misaligned" not in {c.rule for c in wide(0).counterexamples}
    assert "misaligned" in {c.rule for c in wide(1).counterexamples}


@pytest.mark.parametrize(("first", "found"), [(0, False), (4, False), (1, True), (2, True)])
def test_wide_accesses_of_an_array_of_a_threads_own_are_aligned(first: int, found: bool) -> None:
    def body(m: Memory) -> tirx.Stmt:
        here = tirx.Ramp(m.tid * 4, 1, 4)
        value = tirx.BufferLoad(m.tensors[0], [here])
        return tirx.BufferStore(m.register, value, [tirx.Ramp(first, 1, 4)])

    rules = {
        c.rule
        for c in certificate([Run("one", 1, (0, 2))], [stage("one", (SIZE, SIZE), body)], BUFFERS).counterexamples
    }
    assert ("misaligned" in rules) == found
