"""Loops: what they compute, their rules, and how they are printed."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from souffle.program import Carried, Collected, Indexed, Loop, ProgramError, Tensor, TEProgram
from tests.testlib import Builder


def accumulator(steps: int = 4, stride: int = 3) -> tuple[TEProgram, Loop]:
    """``h = h + row s of x``, from zeros."""
    b = Builder()
    x, zero = b.input(steps, 3), b.input(3)
    before, row = Tensor("before", (3,), "float32"), Tensor("row", (3,), "float32")
    h = b.plus(before, row)
    (body,) = b.tes
    last = Tensor("last", (3,), "float32")
    loop = Loop(
        "sum_up", steps, (body,), (Indexed(row, x, stride),), (Carried(before, h, (zero,)),),
        (Collected(last, h, False),), body.origin,
    )  # fmt: skip
    empty = TEProgram((x, zero), (last,), (), {}, ("x", "zero"), ("last",))
    return empty.with_tes([loop]), loop


def test_a_loop_runs_its_body_once_for_each_step() -> None:
    program, _ = accumulator()
    x = np.arange(12, dtype=np.float32).reshape(4, 3)
    found = program.run({"x": x, "zero": np.ones(3, np.float32)})["last"]
    np.testing.assert_array_equal(found, 1 + x.sum(0))


def test_every_step_can_be_kept() -> None:
    program, loop = accumulator()
    every = Tensor("every", (4, 3), "float32")
    kept = dataclasses.replace(loop, collected=(Collected(every, loop.body[0].output, True),))
    program = dataclasses.replace(program, outputs=(every,)).with_tes([kept])
    x = np.arange(12, dtype=np.float32).reshape(4, 3)
    found = program.run({"x": x, "zero": np.zeros(3, np.float32)})["last"]
    np.testing.assert_array_equal(found, np.cumsum(x, 0))


@pytest.mark.parametrize("stride", [-3, -2, 0, 2, 3])
def test_a_moving_tensor_is_the_source_some_elements_further(stride: int) -> None:
    source = Tensor("source", (4, 3), "float32")
    array = np.arange(12, dtype=np.float32).reshape(4, 3)
    moving = Indexed(Tensor("part", (4, 3), "float32"), source, stride)
    for step in range(4):
        found = moving.at(array, step).reshape(-1)
        for k in range(12):
            position = k + step * stride
            assert found[k] == (array.reshape(-1)[position] if 0 <= position < 12 else 0)


def test_values_may_be_carried_over_several_steps() -> None:
    b = Builder()
    first, second = b.input(3), b.input(3)
    two, one = Tensor("two_before", (3,), "float32"), Tensor("one_before", (3,), "float32")
    h = b.plus(two, one)
    (body,) = b.tes
    last = Tensor("last", (3,), "float32")
    carried = (Carried(two, h, (first, second)), Carried(one, h, (second,)))
    loop = Loop("fibonacci", 5, (body,), (), carried, (Collected(last, h, False),), body.origin)
    program = TEProgram((first, second), (last,), (), {}, ("a", "b"), ("last",)).with_tes([loop])
    ones = np.ones(3, np.float32)
    np.testing.assert_array_equal(program.run({"a": ones, "b": ones})["last"], 13 * ones)


def test_the_listing_shows_what_each_step_reads() -> None:
    program, _ = accumulator()
    assert str(program).splitlines()[3:] == [
        "for s in 0 .. 3:   # sum_up",
        "    row: float32[3] ← x0 from element s * 3",
        "    before: float32[3] ← plus0 of the step before; at first x1",
        "    plus0[i] = before[i] + row[i], 0 ≤ i < 3   # Plus plus0",
        "    last: float32[3] = plus0 of the last step",
        "output last",
    ]


def test_a_loop_that_breaks_a_rule_is_named() -> None:
    _, loop = accumulator()
    (carried,), (collected,), (indexed,) = loop.carried, loop.collected, loop.indexed
    other = Tensor("other", (3,), "float32")
    for changes, message in (
        ({"steps": 0}, "loop sum_up has no step"),
        ({"carried": (dataclasses.replace(carried, value=other),)}, "carries before.*no step before defines"),
        ({"carried": (dataclasses.replace(carried, initial=()),)}, "carries before.*no step before defines"),
        ({"carried": (dataclasses.replace(carried, initial=(Tensor("z", (4,), "float32"),)),)}, "another type"),
        ({"collected": (dataclasses.replace(collected, every=True),)}, "gives last.*as plus"),
        ({"indexed": (dataclasses.replace(indexed, source=Tensor("x", (4, 3), "float16")),)}, "of another type"),
        ({"body": (loop,)}, "holds a loop"),
    ):
        with pytest.raises(ProgramError, match=message):
            dataclasses.replace(loop, **changes).check()


def test_what_a_loop_reads_must_be_defined_before_it() -> None:
    program, loop = accumulator()
    (carried,) = loop.carried
    other = Tensor("other", (3,), "float32")
    with pytest.raises(ProgramError, match=r"reads other: .*which nothing before it defines"):
        program.with_tes([dataclasses.replace(loop, carried=(dataclasses.replace(carried, initial=(other,)),))])
