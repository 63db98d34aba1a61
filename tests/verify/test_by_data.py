"""Addresses that data decides: proven where the text bounds them, and only there."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tvm import tirx

from souffle.verify import PROVEN, REFUTED, UNKNOWN, Certificate
from souffle.verify.accesses import Address, Branch, Memory, MemoryAccess, accesses_of
from souffle.verify.data_addresses import settled
from souffle.verify.expressions import Axis, Expr, Undecided, const, evaluate, operation, unknown, variable
from souffle.verify.ranges import index_range, points
from tests.verify.hand_made import THREADS, Run, barrier, certificate, sequence, stage, tensor
from tests.verify.hand_made import Memory as Body

SIZE = 4 * THREADS
LOWEST, HIGHEST = -(2**31), 2**31 - 1


def at(m: Body) -> object:
    return m.tile * THREADS + m.tid


def clamped(index, low: int, high: int):
    return tirx.max(tirx.min(index, high), low)


def from_the_end(n):
    """An index of which the negative ones count from the end."""
    return clamped(tirx.if_then_else(n < 0, n + SIZE, n), 0, SIZE - 1)


def in_one_of_five(n, least: int):
    """An index that is in bounds where what is left of one is 2: not 4 and not 3, and `least` or more."""
    left = tirx.floormod(from_the_end(n), 5)
    third = tirx.if_then_else(least <= left, tirx.floormod(from_the_end(n), 5) * SIZE - 2 * SIZE, 0)
    return tirx.if_then_else(left == 4, 0, tirx.if_then_else(left != 3, third, 0))


def buffers(*kinds: str) -> tuple:
    return tuple(tensor(f"t{i}", SIZE, kind, dtype="int32") for i, kind in enumerate(kinds))


def gather(index) -> Certificate:
    """``y[i] = x[index(m, n[i])]``."""

    def body(m: Body) -> tirx.Stmt:
        return tirx.BufferStore(m.tensors[2], m.tensors[1][index(m, m.tensors[0][at(m)])], [at(m)])

    functions = [stage("gather", (SIZE, SIZE, SIZE), body, dtype="int32")]
    return certificate([Run("gather", 4, (0, 1, 2))], functions, buffers("input", "input", "output"))


@pytest.mark.parametrize(
    ("index", "proven"),
    [
        (lambda m, n: clamped(n, 0, SIZE - 1), True),
        (lambda m, n: clamped(tirx.Select(n < 0, n + SIZE, n), 0, SIZE - 1), True),
        (lambda m, n: tirx.floormod(n, SIZE), True),
        (lambda m, n: tirx.bitwise_and(n, SIZE - 1), True),
        (lambda m, n: clamped(n, 0, 3) * THREADS + m.tid, True),
        (lambda m, n: tirx.Cast("int32", clamped(tirx.Cast("int64", n) + 2**33, 0, SIZE - 1)), True),
        (lambda m, n: tirx.Select(n == 5, m.tid, at(m)), True),
        (lambda m, n: tirx.Select(m.tid < clamped(n, 0, THREADS), clamped(n, 0, THREADS) - 1 - m.tid, m.tid), True),
        (lambda m, n: in_one_of_five(n, 2), True),
        # One clamp too few, or one too late.
        (lambda m, n: in_one_of_five(n, 1), False),
        (lambda m, n: tirx.min(n, SIZE - 1), False),
        (lambda m, n: tirx.max(n, 0), False),
        (lambda m, n: clamped(n, 0, SIZE), False),
        (lambda m, n: clamped(n, -1, SIZE - 1), False),
        (lambda m, n: clamped(n, 0, 4) * THREADS + m.tid, False),
        (lambda m, n: tirx.truncmod(n, SIZE), False),
        (lambda m, n: tirx.min(tirx.max(n, 0) + 1, SIZE - 1), False),
        (lambda m, n: tirx.Select(n >= 0, tirx.min(n * 2, SIZE - 1), 0), False),
        (lambda m, n: tirx.Cast("int32", tirx.max(tirx.Cast("int64", n) + 2**33, 0)), False),
        (lambda m, n: tirx.Select(m.tid <= clamped(n, 0, THREADS), clamped(n, 0, THREADS) - 1 - m.tid, m.tid), False),
    ],
)
def test_an_index_is_in_bounds_where_the_text_keeps_it_there(index, proven: bool) -> None:
    found = gather(index)
    assert (found.verdict == PROVEN) == proven, found
    assert found.verdict != REFUTED, "what data may do, it need not"


def test_a_condition_on_the_very_value_bounds_it() -> None:
    def guarded(guard, *, rewritten: bool = False, otherwise: bool = False) -> bool:
        def body(m: Body) -> tirx.Stmt:
            keep = tirx.BufferStore(m.register, m.tensors[0][at(m)], [0])
            read = tirx.BufferStore(m.register, m.tensors[1][m.register[0]], [2])
            again = tirx.BufferStore(m.register, m.tensors[0][at(m)] + 1, [0])
            other = tirx.BufferStore(m.register, 0, [2])
            inner = sequence(again, read) if rewritten else read
            first, second = (other, inner) if otherwise else (inner, other)
            put = tirx.BufferStore(m.tensors[2], m.register[2], [at(m)])
            return sequence(keep, tirx.IfThenElse(guard(m, m.register[0]), first, second), put)

        functions = [stage("guarded", (SIZE, SIZE, SIZE), body, dtype="int32")]
        runs = [Run("guarded", 4, (0, 1, 2))]
        return certificate(runs, functions, buffers("input", "input", "output")).verdict == PROVEN

    def inside(m: Body, n):
        return tirx.And(n >= 0, n < SIZE)

    assert guarded(inside)
    assert guarded(lambda m, n: tirx.Or(n < 0, n >= SIZE), otherwise=True)
    assert guarded(lambda m, n: tirx.And(m.tid <= n, n < SIZE - THREADS + m.tid))
    assert guarded(lambda m, n: tirx.And(tirx.And(n >= -1, n != -1), n < SIZE))
    assert guarded(lambda m, n: tirx.And(tirx.And(n != SIZE, n >= 0), n <= SIZE))
    assert guarded(lambda m, n: tirx.And(tirx.And(n != -2, tirx.And(n >= -2, n < SIZE)), n + 1 != 0))
    assert not guarded(lambda m, n: tirx.And(tirx.And(n >= -2, n != -1), n < SIZE))
    assert not guarded(lambda m, n: tirx.And(tirx.And(n >= -1, n != 0), n < SIZE))
    assert not guarded(inside, rewritten=True)
    assert not guarded(inside, otherwise=True)
    assert not guarded(lambda m, n: tirx.And(n >= 0, n <= SIZE))
    assert not guarded(lambda m, n: tirx.And(n >= -1, n < SIZE))
    assert not guarded(lambda m, n: tirx.Or(n >= 0, n < SIZE))
    assert not guarded(lambda m, n: tirx.And(m.register[1] >= 0, m.register[1] < SIZE))
    assert not guarded(lambda m, n: tirx.And(n != -1, n < SIZE))


@pytest.mark.parametrize(
    ("tiles", "grid", "after", "proven"),
    [(4, True, True, True), (4, False, True, False), (1, False, True, True), (1, False, False, False)],
)
def test_a_gather_of_what_the_kernel_made_needs_the_barrier_of_a_read_of_everything(
    tiles: int, grid: bool, after: bool, proven: bool
) -> None:
    last = tiles * THREADS - 1

    def copy(m: Body) -> tirx.Stmt:
        return tirx.BufferStore(m.tensors[1], m.tensors[0][at(m)], [at(m)])

    def read(m: Body) -> tirx.Stmt:
        index = clamped(m.tensors[0][at(m)], 0, last)
        return tirx.BufferStore(m.tensors[2], m.tensors[1][index], [at(m)])

    functions = [stage("one", (SIZE,) * 2, copy, dtype="int32"), stage("two", (SIZE,) * 3, read, dtype="int32")]
    runs = [Run("one", tiles, (1, 2), after), Run("two", tiles, (0, 2, 3), after, grid)]
    sizes = tuple(tensor(f"t{i}", last + 1, k, dtype="int32") for i, k in enumerate(("input", "input", "workspace")))
    found = certificate(runs, functions, (*sizes, tensor("y", last + 1, "output", dtype="int32")))
    assert found.verdict == (PROVEN if proven else REFUTED), found


@pytest.mark.parametrize(("width", "proven"), [(THREADS, True), (THREADS + 1, False)])
def test_a_gather_in_the_row_of_a_tile_stays_on_its_block(width: int, proven: bool) -> None:
    def copy(m: Body) -> tirx.Stmt:
        return tirx.BufferStore(m.tensors[1], m.tensors[0][at(m)], [at(m)])

    def read(m: Body) -> tirx.Stmt:
        index = tirx.min(m.tile * THREADS + clamped(m.tensors[0][at(m)], 0, width - 1), SIZE - 1)
        return tirx.BufferStore(m.tensors[2], m.tensors[1][index], [at(m)])

    functions = [stage("one", (SIZE,) * 2, copy, dtype="int32"), stage("two", (SIZE,) * 3, read, dtype="int32")]
    runs = [Run("one", 4, (1, 2)), Run("two", 4, (0, 2, 3))]
    found = certificate(runs, functions, buffers("input", "input", "workspace", "output"))
    assert found.verdict == (PROVEN if proven else REFUTED), found


@pytest.mark.parametrize(
    ("wait", "count", "verdict"),
    [(True, THREADS, PROVEN), (False, THREADS, REFUTED), (True, THREADS + 1, UNKNOWN)],
)
def test_shared_memory_is_read_where_data_says_so_after_all_of_it_is_written(
    wait: bool, count: int, verdict: str
) -> None:
    def body(m: Body) -> tirx.Stmt:
        put = tirx.BufferStore(m.shared, m.tensors[1][at(m)], [m.tid])
        index = clamped(m.tensors[0][at(m)], 0, count - 1)
        get = tirx.BufferStore(m.tensors[2], m.shared[index], [at(m)])
        return sequence(put, *([barrier()] if wait else []), get)

    functions = [stage("one", (SIZE,) * 3, body, dtype="int32")]
    found = certificate([Run("one", 4, (0, 1, 2))], functions, buffers("input", "input", "output"))
    assert found.verdict == verdict, found


@pytest.mark.parametrize(("written", "verdict"), [(0, REFUTED), (1, UNKNOWN), (4, PROVEN)])
def test_a_gather_of_what_nobody_wrote_is_refuted_whatever_data_chooses(written: int, verdict: str) -> None:
    def copy(m: Body) -> tirx.Stmt:
        return tirx.BufferStore(m.tensors[1], m.tensors[0][at(m)], [at(m)])

    def read(m: Body) -> tirx.Stmt:
        index = clamped(m.tensors[0][at(m)], 0, SIZE - 1)
        return tirx.BufferStore(m.tensors[2], m.tensors[1][index], [at(m)])

    functions = [stage("one", (SIZE,) * 2, copy, dtype="int32"), stage("two", (SIZE,) * 3, read, dtype="int32")]
    runs = [Run("one", written, (1, 2))] if written else []
    runs += [Run("two", 4, (0, 2, 3), grid_before=True)]
    found = certificate(runs, functions, buffers("input", "input", "workspace", "output"))
    assert found.verdict == verdict, found


def test_a_write_where_data_says_so_is_not_proven() -> None:
    def scatter(m: Body) -> tirx.Stmt:
        return tirx.BufferStore(m.tensors[1], 1, [clamped(m.tensors[0][at(m)], 0, SIZE - 1)])

    def fill(m: Body) -> tirx.Stmt:
        return tirx.BufferStore(m.tensors[0], 0, [at(m)])

    functions = [stage("fill", (SIZE,), fill, dtype="int32"), stage("put", (SIZE,) * 2, scatter, dtype="int32")]
    runs = [Run("fill", 4, (1,)), Run("put", 4, (0, 1), grid_before=True)]
    found = certificate(runs, functions, buffers("input", "output"))
    assert found.verdict not in (PROVEN, REFUTED), found
    assert certificate(runs[1:], functions, buffers("input", "output")).verdict != PROVEN


def test_lanes_of_a_vector_are_elements_apart() -> None:
    def vectors(low: int) -> str:
        def body(m: Body) -> tirx.Stmt:
            pair = tirx.Ramp(at(m) * 2, 1, 2)
            turned = tirx.Broadcast(SIZE - 1 + low, 2) - pair
            return tirx.BufferStore(m.tensors[1], m.tensors[0][turned], [pair])

        functions = [stage("turn", (SIZE, SIZE), body, dtype="int32")]
        return certificate([Run("turn", 2, (0, 1))], functions, buffers("input", "output")).verdict

    assert vectors(0) == PROVEN
    assert vectors(-1) == REFUTED
    assert vectors(1) == REFUTED


def test_a_short_cut_leaves_out_no_choice_that_is_written_ahead_of_it() -> None:
    """``i < n and (x[i] if … else …)``: the generator writes the choice as a statement, before the comparison."""

    def verdict(test) -> str:
        def body(m: Body) -> tirx.Stmt:
            index = at(m) + 1
            return tirx.BufferStore(m.tensors[1], tirx.Cast("int32", test(index < SIZE, m.tensors[0][index])), [at(m)])

        functions = [stage("one", (SIZE, SIZE), body, dtype="int32")]
        return certificate([Run("one", 4, (0, 1))], functions, buffers("input", "output")).verdict

    assert verdict(lambda inside, x: tirx.And(inside, x == 3)) == PROVEN
    assert verdict(lambda inside, x: tirx.Or(tirx.Not(inside), x == 3)) == PROVEN
    assert verdict(lambda inside, x: tirx.if_then_else(inside, x == 3, tirx.const(False, "bool"))) == PROVEN
    assert verdict(lambda inside, x: tirx.if_then_else(tirx.Not(inside), tirx.const(True, "bool"), x == 3)) == PROVEN
    assert verdict(lambda inside, x: tirx.And(inside, tirx.if_then_else(x < 0, x + 9, x) == 3)) == REFUTED
    assert verdict(lambda inside, x: tirx.Or(tirx.Not(inside), tirx.if_then_else(x < 0, 1, 2) == x)) == REFUTED


# Against all values written out

TILE, TID = Axis("tile", 2), Axis("tid", 3)
VALUES = range(-5, 5)


def expressions(leaves: list[Expr]) -> st.SearchStrategy[Expr]:
    def grow(inner: st.SearchStrategy[Expr]) -> st.SearchStrategy[Expr]:
        plain = st.tuples(st.sampled_from(["add", "sub", "mul", "min", "max"]), inner, inner)
        divided = st.tuples(
            st.sampled_from(["div", "mod", "floordiv", "floormod"]), inner, st.integers(1, 4).map(const)
        )
        test = st.tuples(st.sampled_from(["lt", "le", "eq", "ge"]), inner, inner).map(_made)
        chosen = st.tuples(st.just("select"), test, inner, inner)
        return st.one_of(plain, divided, chosen).map(_made)

    first = st.one_of(st.sampled_from([*leaves, variable(TILE), variable(TID)]), st.integers(-3, 4).map(const))
    return st.recursive(first, grow, max_leaves=7)


def _made(parts: tuple) -> Expr:
    return operation(parts[0], *parts[1:])


def conditions(leaves: list[Expr]) -> st.SearchStrategy[list[Expr]]:
    part = expressions(leaves)
    one = st.tuples(st.sampled_from(["lt", "le", "gt", "ge", "eq", "ne"]), part, part).map(_made)
    more = st.one_of(
        one, st.tuples(st.sampled_from(["and", "or"]), one, one).map(_made), one.map(lambda c: operation("not", c))
    )
    return st.lists(more, max_size=3)


LEAVES = [unknown(VALUES[0], VALUES[-1]) for _ in range(2)]


@settings(max_examples=60, deadline=None)
@given(expressions(LEAVES), conditions(LEAVES))
def test_no_value_of_an_address_is_left_out(index: Expr, holds: list[Expr]) -> None:
    memory = Memory("global", "t", 0, 1, 0)
    access = MemoryAccess(Address(memory, index), 1, False, tuple(holds[:1]), "thread", None)
    body = (access,)
    for condition in holds[1:]:
        body = (Branch(condition, body, (), None),)
    (touched, under), *_ = accesses_of(settled(body))
    every = set()
    for tile, tid, *data in product(range(TILE.extent), range(TID.extent), VALUES, VALUES):
        env = {TILE: np.int64(tile), TID: np.int64(tid)}
        fixed = {leaf: np.int64(value) for leaf, value in zip(LEAVES, data, strict=True)}
        memo = dict(fixed)
        if all(evaluate(c, env, memo) for c in holds):
            every.add((int(evaluate(index, env, memo)), tile, tid))
    reach = index_range(touched.place.offset, under)
    if reach is None:
        assert not every
        return
    assert all(reach.low <= value <= reach.high for value, _, _ in every)
    try:
        parts = list(points(touched.place.offset, under, TILE, TID))
    except Undecided:
        return
    assert every <= {(int(v), int(t), int(i)) for part in parts for v, t, i in zip(*part, strict=True)}
