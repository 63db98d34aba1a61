"""Rolled repetition: what becomes a loop, of what operands, and what does not."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tvm import te, tirx

from souffle.program import TE, InTiles, Loop, Tensor, TEProgram
from souffle.transform import horizontal, roll, vertical
from souffle.transform.roll.step_numbers import with_step_numbers
from tests.testlib import Builder, assert_same_function
from tests.transform.test_random_programs import SETTINGS

pytestmark = pytest.mark.sampled(2)

RNG = np.random.default_rng(0)


def weights(*shape: int) -> np.ndarray:
    return RNG.integers(-3, 4, shape).astype(np.float32)


def the_loop(program: TEProgram) -> Loop:
    (loop,) = (item for item in program.tes if isinstance(item, Loop))
    return loop


def layers(count: int, width: int = 4) -> TEProgram:
    b = Builder()
    x = b.relu(b.input(4, width))
    for _ in range(count):
        x = b.plus(b.tanh(b.bias(b.matmul(x, b.constant(weights(width, width))), b.constant(weights(width)))), x)
    return b.program(b.reduce(x, 0))


def test_equal_layers_are_one_loop_with_stacked_weights() -> None:
    program = layers(5)
    result, decisions = roll(program)
    loop = the_loop(result)
    assert (loop.steps, len(loop.body), len(result.tes)) == (5, 4, 3)
    assert [p.source.shape for p in loop.indexed] == [(5, 4, 4), (5, 4)]
    assert [(c.distance, len(loop.collected)) for c in loop.carried] == [(1, 1)]
    (decision,) = decisions
    assert decision.accepted and decision.subject == loop.name
    assert "5 repetitions of 4 TEs are one loop; operands: 1 carried, 2 indexed by the step" in decision.reason
    assert_same_function(program, result)


def test_two_layers_are_no_loop() -> None:
    program = layers(2)
    assert roll(program)[0] is program


def test_a_loop_that_is_not_wanted_stays_apart() -> None:
    program = layers(4)
    name = the_loop(roll(program)[0]).name
    assert roll(program, {name})[0] is program


def test_rolling_twice_changes_nothing() -> None:
    result, _ = roll(layers(4))
    assert roll(result)[0] is result


def test_constants_of_odd_size_are_stacked_at_aligned_offsets() -> None:
    b = Builder()
    x = b.relu(b.input(4, 3))
    for _ in range(4):
        x = b.bias(b.matmul(x, b.constant(weights(3, 3))), b.constant(weights(3)))
    program = b.program(b.reduce(x, 0))
    result, _ = roll(program)
    assert [p.stride for p in the_loop(result).indexed] == [12, 4]
    assert_same_function(program, result)


def recurrence(steps: int, width: int = 4, *, distance: int = 1, keep: bool = False) -> TEProgram:
    """``h = tanh(x[s] + w h)``, over the rows of one input."""
    b = Builder()
    x, w = b.relu(b.input(steps, 1, width)), b.constant(weights(width, width))
    states = [b.relu(b.input(1, width)) for _ in range(distance)]
    for step in range(steps):
        row = b.add(lambda p, s=step: te.compute((1, width), lambda i, j: p(s, i, j)), x, name="row")
        states.append(b.tanh(b.plus(row, b.matmul(states[-distance], w))))
    if not keep:
        total = states[-1]
        for state in states[-distance:-1]:
            total = b.plus(total, state)
        return b.program(total)
    joined = states[distance]
    for state in states[distance + 1 :]:
        joined = b.concat(joined, state, 0)
    return b.program(joined)


@pytest.mark.parametrize("distance", [1, 2, 3])
def test_states_are_carried_and_rows_are_read_by_the_step(distance: int) -> None:
    program = recurrence(8, distance=distance)
    result, _ = roll(program)
    loop = the_loop(result)
    assert {c.distance for c in loop.carried} == {distance} and loop.steps == 8
    assert [p.stride for p in loop.indexed] == [4] and len(loop.invariants) == 1
    assert_same_function(program, result)


def test_what_is_read_of_each_step_is_kept_for_every_step() -> None:
    program = vertical(recurrence(9, keep=True))[0]
    result, _ = roll(program)
    (collected,) = [c for c in the_loop(result).collected if c.every]
    assert collected.tensor.shape == (the_loop(result).steps, 1, 4)
    assert_same_function(program, result)


def states_in_pieces(steps: int, piece: int) -> TEProgram:
    """All states of a recurrence, concatenated `piece` at a time, and what that gives concatenated again."""
    b = Builder()
    x, w = b.relu(b.input(1, 4)), b.constant(weights(4, 4))
    states = [x]
    for _ in range(steps):
        states.append(b.tanh(b.matmul(states[-1], w)))
    joined = states[1:]
    while len(joined) > 1:
        parts = [joined[first : first + piece] for first in range(0, len(joined), piece)]
        joined = [functools.reduce(lambda one, other: b.concat(one, other, 0), part) for part in parts]
    return vertical(b.program(*joined))[0]


def copies_of(program: TEProgram) -> list[TE]:
    return [item for item in program.tes if item.name.startswith("concat")]


def test_pieces_of_a_concatenation_of_states_are_one_copy_of_them() -> None:
    program = states_in_pieces(96, 16)
    assert len(copies_of(program)) > 1
    result, decisions = roll(program)
    (copy,) = copies_of(result)
    assert set(the_loop(result).outputs) < set(copy.inputs)
    assert [d.accepted for d in decisions if d.stage == "vertical"] == [True]
    assert_same_function(program, result)


def test_a_copy_that_a_placed_te_reads_stays() -> None:
    program = states_in_pieces(96, 16)
    *copies, last = copies_of(program)
    placed = program.with_tes(item.placed(InTiles("tanh")) if item is last else item for item in program.tes)
    result, _ = roll(placed)
    assert len(copies_of(result)) == len(copies) + 1
    assert_same_function(program, result)


def test_an_output_of_the_program_that_an_early_step_defines_is_taken_out() -> None:
    b = Builder()
    x = b.relu(b.input(4, 4))
    states = [x]
    for _ in range(5):
        states.append(b.tanh(b.matmul(states[-1], b.constant(weights(4, 4)))))
    program = b.program(states[2], states[-1])
    result, _ = roll(program)
    assert the_loop(result).steps == 5
    assert_same_function(program, result)


def test_results_whose_parts_would_not_be_aligned_are_refused() -> None:
    b = Builder()
    x = b.relu(b.input(3))
    kept = []
    for _ in range(5):
        x = b.tanh(b.matmul(x, b.constant(weights(3, 3))))
        kept.append(b.scaled(x, 0.5))
    program = b.program(*kept)
    result, decisions = roll(program)
    assert result is program
    assert any("12 bytes are no multiple of 16" in d.reason for d in decisions if not d.accepted)


def test_rows_that_are_not_aligned_are_refused() -> None:
    program = recurrence(8, 3)
    result, decisions = roll(program)
    assert result is program
    assert any("each step reads 12 bytes further, no multiple of 16" in d.reason for d in decisions)


def test_steps_that_are_needed_one_by_one_are_no_loop() -> None:
    """Taking them out of the loop's result would leave the TEs that were to be rolled."""
    b = Builder()
    x = b.relu(b.input(5, 4))
    rows = [b.add(lambda p, s=s: te.compute((4,), lambda i: p(s, i)), x, name="row") for s in range(5)]
    program = b.program(*rows)
    result, decisions = roll(program)
    assert result is program
    assert any("needed one by one" in d.reason for d in decisions)


def test_steps_that_read_something_else_part_a_loop() -> None:
    b = Builder()
    x = b.relu(b.input(4, 4))
    other = b.tanh(x)
    h = x
    for step in range(10):
        h = b.tanh(b.plus(other if step == 5 else h, b.matmul(h, b.constant(weights(4, 4)))))
    program = b.program(h)
    result, _ = roll(program)
    assert sorted(i.steps for i in result.tes if isinstance(i, Loop)) == [5, 5]
    assert_same_function(program, result)


def padded(steps: int, number: Callable[[int], float], *, twice: bool = False) -> TEProgram:
    """A recurrence whose step `t` keeps a row as it was where the row's length is no more than ``number(t)``."""
    b = Builder()
    h, lengths, w = b.relu(b.input(4, 4)), b.input(4), b.constant(weights(4, 4))

    def step(p: te.Tensor, before: te.Tensor, row: te.Tensor, t: int) -> te.Tensor:
        least = tirx.const(number(t), "float32")
        return te.compute((4, 4), lambda i, j: tirx.Select(row[i] > least, p[i, j] + before[i, j], before[i, j]))

    for t in range(steps):
        h = b.add(lambda *ps, t=t: step(*ps, t), b.tanh(b.matmul(h, w)), h, lengths)
    return b.program(b.scaled(h, 3.5), *([b.scaled(h, 4.5)] if twice else []))


def test_numbers_that_differ_from_step_to_step_are_constants_by_step() -> None:
    program = padded(6, lambda t: t)
    result, decisions = roll(program)
    loop = the_loop(result)
    assert (loop.steps, len(loop.body), len(decisions)) == (6, 3, 1)
    (numbers,) = loop.indexed
    stacked = result.constants[numbers.source]
    assert [float(numbers.at(stacked, step)[0]) for step in range(6)] == [0, 1, 2, 3, 4, 5]
    assert_same_function(program, result)


def test_zeros_of_both_signs_are_two_numbers() -> None:
    values = (0.0, -0.0, 1.0, -0.0, 0.0, 2.0)
    b = Builder()
    h, w = b.relu(b.input(4, 4)), b.constant(weights(4, 4))
    for value in values:
        # Written out: what operators make of zeros TVM folds.
        h = b.map(lambda v, value=value: tirx.Add(v, tirx.FloatImm("float32", value)), b.tanh(b.matmul(h, w)))
    result, _ = roll(b.program(b.relu(h)))
    (numbers,) = the_loop(result).indexed
    found = [numbers.at(result.constants[numbers.source], step)[0] for step in range(len(values))]
    assert [str(float(value)) for value in found] == [str(value) for value in values]


def test_numbers_that_are_the_same_in_every_step_stay_text() -> None:
    """Also where others than the steps differ from them; and what is no step has its numbers back."""
    program = padded(5, lambda t: 2.0, twice=True)
    result, _ = roll(program)
    assert not the_loop(result).indexed and result.constants.keys() == program.constants.keys()
    assert {te_.name for te_ in program.tes} >= {i.name for i in result.tes if isinstance(i, TE)}
    assert [i for i in result.tes if isinstance(i, TE)] == [i for i in program.tes if i in result.tes]


def test_numbers_are_put_back_where_nothing_repeats() -> None:
    b = Builder()
    x = b.input(4, 4)
    program = b.program(*(b.scaled(x, 1.5 + step) for step in range(5)))
    rolled, decisions = roll(program, {"scale4_for5"})
    assert all(isinstance(item, TE) for item in rolled.tes) and rolled.constants == program.constants
    assert rolled.tes == program.tes and not any(decision.accepted for decision in decisions)


@pytest.mark.parametrize("place", ["index", "condition", "gathered"])
def test_numbers_that_say_where_something_is_stay_text(place: str) -> None:
    b = Builder()
    x, rows = b.input(8, 4), b.input(4, dtype="int32")

    def part(p: te.Tensor, r: te.Tensor, t: int) -> te.Tensor:
        if place == "index":
            return te.compute((4, 4), lambda i, j: p[i * (t % 2 + 1), j])
        if place == "gathered":
            return te.compute((4, 4), lambda i, j: p[r[i] * (t % 2 + 1), j])
        return te.compute((4, 4), lambda i, j: tirx.if_then_else(i < t + 1, p[i, j], p[i, 0]))

    h = b.relu(b.input(4, 4))
    for t in range(6):
        h = b.plus(b.matmul(h, b.constant(weights(4, 4))), b.add(lambda *ps, t=t: part(*ps, t), x, rows))
    program = b.program(h)
    numbers = with_step_numbers(program, 3)
    assert numbers.program is program and not numbers.literals


def test_what_another_repeat_computes_is_a_loop_first() -> None:
    """A longer repeat reads the states of a shorter one, step by step.

    It is refused once for its steps and not for every second one, every third, and so on, until nothing else is tried.
    """
    b = Builder()
    x, w = b.relu(b.input(4, 4)), b.constant(weights(4, 4))
    h, states = x, []
    for _ in range(80):
        h = b.tanh(b.matmul(h, w))
        states.append(h)
    for state in states:
        h = b.plus(b.tanh(b.matmul(b.tanh(b.bias(h, b.constant(weights(4)))), w)), state)
    program = b.program(h)
    result, decisions = roll(program)
    assert [item.steps >= 79 for item in result.tes if isinstance(item, Loop)] == [True, True]
    assert len([decision for decision in decisions if not decision.accepted]) <= 4
    assert_same_function(program, result)


def test_operators_that_are_no_tes_stay_outside() -> None:
    b = Builder()
    x = b.relu(b.input(4, 4))
    for _ in range(4):
        x = b.extern_sort(b.tanh(x))
    program = b.program(b.relu(x))
    assert roll(program)[0] is program


def test_what_only_the_end_needs_does_not_part_the_steps() -> None:
    """A result is joined in pieces, as long recurrences have it; their TEs stand between the steps.

    As late as they can be, they part the last two steps only.
    """
    b = Builder()
    h, w = b.relu(b.input(1, 4)), b.constant(weights(4, 4))
    pieces, states = [], []
    for length in (3, 5, 4):
        for _ in range(length):
            h = b.tanh(b.matmul(h, w))
            states.append(h)
        joined = states[0]
        for state in states[1:]:
            joined = b.concat(joined, state, 0)
        pieces, states = [*pieces, joined], []
    program = b.program(b.concat(b.concat(pieces[0], pieces[1], 0), pieces[2], 0))
    result, _ = roll(program)
    assert the_loop(result).steps == 10
    assert_same_function(program, result)


def test_a_recurrence_is_one_loop_however_long_it_is() -> None:
    """After the other transformations; what stands beside the loop does not grow with the steps."""

    def rolled(steps: int) -> tuple[int, int]:
        program = vertical(horizontal(recurrence(steps, keep=True))[0])[0]
        result, _ = roll(program)
        assert_same_function(program, result)
        return len(result.tes), the_loop(result).steps

    (short, few), (long, many) = rolled(10), rolled(30)
    assert long == short and many == few + 20


def repeated(choose, count: int, seed: int) -> TEProgram:
    """A random piece, `count` times one after another, each over what the one before gives."""
    b = Builder()
    rng = np.random.default_rng(seed)
    x = b.relu(b.input(4, 4))
    extra = b.tanh(x)
    kinds = ("matmul", "bias", "tanh", "plus", "transpose", "extra", "slice", "scaled", "larger")
    # A product in each piece keeps vertical from making one TE of all pieces.
    plan = ["matmul", *(choose(kinds) for _ in range(choose((0, 1, 3))))]
    kept: list[Tensor] = []
    for number in range(count):
        start = x
        for kind in plan:
            if kind == "matmul":
                x = b.tanh(b.matmul(x, b.constant(rng.integers(-2, 3, (4, 4)).astype(np.float32))))
            elif kind == "bias":
                x = b.bias(x, b.constant(rng.integers(-2, 3, 4).astype(np.float32)))
            elif kind == "tanh":
                x = b.tanh(x)
            elif kind == "plus":
                x = b.tanh(b.plus(x, start))
            elif kind == "transpose":
                x = b.transpose(x, 1, 0)
            elif kind == "extra":
                x = b.plus(x, extra)
            elif kind == "slice":
                x = b.concat(b.slice(x, 0, 2, 4), b.slice(x, 0, 0, 2), 0)
            elif kind == "scaled":
                x = b.scaled(x, number % 3 + 1)
            elif kind == "larger":
                x = b.map(lambda v, n=number: tirx.Select(v > tirx.const(n, "float32"), v, v + 1), x)
        if choose((True, False, False)) and number:
            kept.append(x)
    return b.program(*dict.fromkeys([b.relu(x), *(b.scaled(k, 0.5) for k in kept[:2])]))


@SETTINGS
@given(st.integers(0, 10**6), st.integers(3, 7), st.booleans())
def test_rolled_random_programs_keep_every_bit(seed: int, count: int, transformed: bool) -> None:
    program = repeated(random.Random(seed).choice, count, seed)
    if transformed:
        program = vertical(horizontal(program)[0])[0]
    result, _ = roll(program)
    assert_same_function(program, result)
