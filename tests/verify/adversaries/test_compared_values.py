"""Comparisons of data that are wrong at equality alone, or where literals come last, in stage functions by hand."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tvm import te, tirx

from souffle.verify.expressions import Undecided
from souffle.verify.values import Agreement, Mismatch, values_agree
from tests.verify.hand_made import THREADS, Memory, sequence, stage

pytestmark = pytest.mark.sampled(2)

ROWS, WIDTH = 2 * THREADS, 40
INFINITY = float("inf")
LEAST = -3.4028234663852886e38


def number(value: float) -> tirx.FloatImm:
    return tirx.FloatImm("float32", value)


Numbers = Callable[..., object]


def one_by_one(count: int, right: Numbers, wrong: Numbers, dtype: str = "float32") -> tuple:
    """A definition of an element of some others at the same place, and what a stage makes of it."""
    inputs = [te.placeholder((ROWS,), dtype, name=f"in{i}") for i in range(count)]
    made = te.compute((ROWS,), lambda i: right(*(x[i] for x in inputs)))

    def body(memory: Memory) -> tirx.Stmt:
        at = memory.tile * THREADS + memory.tid
        return tirx.BufferStore(memory.tensors[count], wrong(*(x[at] for x in memory.tensors[:count])), [at])

    definition = te.create_prim_func([*inputs, made])
    return definition, [(stage("hand", [ROWS] * (count + 1), body, dtype=dtype), ROWS // THREADS, THREADS)]


def row_by_row(combine: Numbers, identity: float, right: Numbers, start: object, step: Numbers) -> tuple:
    """A definition of a reduction of rows, and a stage with a row for each thread: it starts and goes on as given."""
    reducer = te.comm_reducer(lambda a, b: combine(a, b), lambda dtype: tirx.FloatImm(dtype, identity))
    x = te.placeholder((ROWS, WIDTH), "float32", name="x")
    k = te.reduce_axis((0, WIDTH), "k")
    definition = te.create_prim_func([x, te.compute((ROWS,), lambda i: reducer(right(x[i, k]), axis=k))])

    def body(memory: Memory) -> tirx.Stmt:
        at = memory.tile * THREADS + memory.tid
        turn = tirx.Var("turn", "int32")
        more = step(memory.register[0], right(memory.tensors[0][at * WIDTH + turn]))
        return sequence(
            tirx.BufferStore(memory.register, number(start), [0]),
            tirx.For(turn, 0, WIDTH, tirx.ForKind.SERIAL, tirx.BufferStore(memory.register, more, [0])),
            tirx.BufferStore(memory.tensors[1], memory.register[0], [at]),
        )

    return definition, [(stage("hand", [ROWS * WIDTH, ROWS], body), ROWS // THREADS, THREADS)]


def where(test: object, yes: object, no: object) -> object:
    return tirx.Select(test, yes, no)


def masked(mask: object, s: object) -> object:
    return where(mask == 0.0, number(-1e9), s)


def weighed(x: object) -> object:
    """A number that is worked out: it is compared with a literal that no input stands for."""
    return tirx.exp(x) * 0.5 + 0.25


ELEMENTS = {
    "a mask that is dropped": (2, masked, lambda mask, s: s),
    "another literal for what is masked": (2, masked, lambda mask, s: where(mask == 0.0, number(-1e8), s)),
    "the least number for minus infinity": (
        2,
        lambda mask, s: where(mask == 0.0, number(-INFINITY), s),
        lambda mask, s: where(mask == 0.0, number(LEAST), s),
    ),
    "at least for more": (2, lambda x, y: where(x > 0.0, x, y), lambda x, y: where(x >= 0.0, x, y)),
    "at most for less, of two inputs": (2, lambda x, y: where(x < y, x + y, x), lambda x, y: where(x <= y, x + y, x)),
    "equal for at most": (2, lambda x, y: where(x <= y, x, y + 1.0), lambda x, y: where(x == y, x, y + 1.0)),
    "unequal for more": (2, lambda x, y: where(x > y, x, y + 1.0), lambda x, y: where(x != y, x, y + 1.0)),
    "a threshold next to the right one": (
        2,
        lambda x, y: where(x > 6.0, y, x),
        lambda x, y: where(x > 7.0, y, x),
    ),
    "what is worked out, at equality": (
        2,
        lambda x, y: where(weighed(x) > 3.0, y, x),
        lambda x, y: where(weighed(x) >= 3.0, y, x),
    ),
    "a comparison that the definition does not have": (1, lambda x: x + 1.0, lambda x: where(x == 0.0, x, x + 1.0)),
    "a comparison of three, all equal": (
        3,
        lambda x, y, z: where(tirx.all(x == y, y == z), x, z + 1.0),
        lambda x, y, z: z + 1.0,
    ),
    "a clip with another bound": (
        1,
        lambda x: tirx.max(tirx.min(x, number(6.0)), number(0.0)),
        lambda x: tirx.max(tirx.min(x, number(6.5)), number(0.0)),
    ),
}


@pytest.mark.parametrize("name", ELEMENTS)
def test_comparisons_at_equality(name: str) -> None:
    count, right, wrong = ELEMENTS[name]
    for seed in range(4):
        assert isinstance(values_agree(*one_by_one(count, right, right), seed=seed), Agreement)
        found = values_agree(*one_by_one(count, right, wrong), seed=seed)
        assert isinstance(found, Mismatch), (seed, str(found))


INTEGERS = {
    "a mask of integers": (lambda m, s: where(m == 0, m, s), lambda m, s: s),
    "a bound that is one off": (lambda m, s: where(m > 700, m, s), lambda m, s: where(m > 701, m, s)),
    "two that are equal": (lambda m, s: where(m >= s, m + s, s), lambda m, s: where(m > s, m + s, s)),
}


@pytest.mark.parametrize("name", INTEGERS)
def test_comparisons_of_integers_at_equality(name: str) -> None:
    right, wrong = INTEGERS[name]
    assert isinstance(values_agree(*one_by_one(2, right, right, "int32")), Agreement)
    assert isinstance(values_agree(*one_by_one(2, right, wrong, "int32")), Mismatch)


ROWWISE = {
    "a maximum that starts at 0": (tirx.max, -INFINITY, 0.0),
    "a maximum that starts at a very small number": (tirx.max, -INFINITY, -1e30),
    "a maximum that starts at the least number": (tirx.max, -INFINITY, LEAST),
    "a minimum that starts at 0": (tirx.min, INFINITY, 0.0),
    "a minimum that starts at a very large number": (tirx.min, INFINITY, 1e30),
}


TERMS = {"x": lambda x: x, "scaled": lambda x: x * 0.125, "masked": lambda x: masked(x, x + 1.0)}


@pytest.mark.parametrize("name", ROWWISE)
@pytest.mark.parametrize("term", TERMS)
def test_where_reductions_start(name: str, term: str) -> None:
    """That of infinities shows where all terms are infinite themselves; where they are scaled, nothing is."""
    combine, identity, wrong = ROWWISE[name]
    term = TERMS["x" if wrong == LEAST else term]
    for seed in range(2):
        assert isinstance(values_agree(*row_by_row(combine, identity, term, identity, combine), seed=seed), Agreement)
        found = values_agree(*row_by_row(combine, identity, term, wrong, combine), seed=seed)
        assert isinstance(found, Mismatch), (seed, str(found))


@pytest.mark.parametrize("left_out", [0, WIDTH // 2, WIDTH - 1])
@pytest.mark.parametrize("rows", [2, ROWS])
def test_a_term_of_a_maximum_that_is_left_out(left_out: int, rows: int) -> None:
    """It seldom wins, so that it shows where each term counts; then an input is searched for in which it does."""
    definition, ((func, tiles, threads),) = row_by_row(tirx.max, -INFINITY, lambda x: x, -INFINITY, tirx.max)
    assert isinstance(values_agree(definition, [(func, tiles, threads)]), Agreement)
    x = te.placeholder((ROWS, WIDTH), "float32", name="x")
    k = te.reduce_axis((0, WIDTH), "k")
    less = te.compute(
        (ROWS,), lambda i: te.max(where(tirx.all(k == left_out, i < rows), LEAST, x[i, k]), axis=k), name="less"
    )
    found = values_agree(te.create_prim_func([x, less]), [(func, tiles, threads)])
    assert isinstance(found, Mismatch), str(found)


def test_a_term_of_a_maximum_may_be_taken_twice() -> None:
    """Nothing is wrong with it, but whether all others are taken is then not known as surely."""

    def body(memory: Memory) -> tirx.Stmt:
        row = memory.tensors[0]
        at = (memory.tile * THREADS + memory.tid) * 2
        both = tirx.max(tirx.max(number(LEAST), row[at]), row[at + 1])
        return tirx.BufferStore(memory.tensors[1], tirx.max(both, row[at]), [memory.tile * THREADS + memory.tid])

    x = te.placeholder((ROWS, 2), "float32", name="x")
    k = te.reduce_axis((0, 2), "k")
    definition = te.create_prim_func([x, te.compute((ROWS,), lambda i: te.max(x[i, k], axis=k))])
    found = values_agree(definition, [(stage("hand", [2 * ROWS, ROWS], body), ROWS // THREADS, THREADS)])
    assert isinstance(found, Undecided) and "each term" in str(found)


def test_what_no_point_shows_is_said() -> None:
    def right(x: object) -> object:
        return where(x > x + 1.0, x, x * 2.0)

    found = values_agree(*one_by_one(1, right, right))
    assert isinstance(found, Agreement)
    assert found.comparisons == 2
    assert ["equal" in str(one) for one in found.unseen] == [True, True]
