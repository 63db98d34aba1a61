"""Vertical transformation (paper §6.2): what is composed, what is kept and why."""

from __future__ import annotations

import numpy as np
from tvm import te

from souffle.transform import vertical
from tests.testlib import Builder, assert_same_function


def test_figure_4_relu_slice_permute_becomes_one_te() -> None:
    b = Builder()
    x = b.relu(b.input(4, 8))
    x = b.slice(x, 1, 0, 8, 2)
    program = b.program(b.transpose(x, 1, 0))
    composed, decisions = vertical(program)
    assert len(composed.tes) == 1
    (te_,) = composed.tes
    assert te_.inputs == program.inputs and te_.output is program.outputs[0]
    assert te_.origin.operators == ("Transpose", "Slice", "Relu")
    assert all(d.stage == "vertical" and d.accepted for d in decisions)
    assert_same_function(program, composed)


def test_index_arithmetic_is_simplified() -> None:
    b = Builder()
    x = b.reshape(b.input(4, 6), 24)
    program = b.program(b.relu(b.reshape(x, 4, 6)))
    composed, _ = vertical(program)
    (te_,) = composed.tes
    text = str(te_.body)
    assert "//" not in text and "%" not in text, text
    assert_same_function(program, composed)


def test_a_chain_ends_in_the_reduction_that_reads_it() -> None:
    b = Builder()
    x = b.transpose(b.scaled(b.input(4, 6), 2.0), 1, 0)
    program = b.program(b.reduce(x, 1))
    composed, _ = vertical(program)
    assert len(composed.tes) == 1 and composed.tes[0].is_reduction
    assert_same_function(program, composed)


def test_a_reduction_is_not_put_into_its_reader() -> None:
    b = Builder()
    program = b.program(b.relu(b.reduce(b.input(4, 6), 1)))
    composed, decisions = vertical(program)
    assert composed is program and not decisions


def test_data_movement_is_composed_however_often_it_is_read() -> None:
    b = Builder()
    x = b.transpose(b.input(4, 6), 1, 0)
    program = b.program(b.matmul(x, b.constant(np.ones((4, 3), np.float32))))
    composed, _ = vertical(program)
    assert len(composed.tes) == 1
    assert_same_function(program, composed)


def test_arithmetic_that_is_read_several_times_is_kept_with_the_figures() -> None:
    b = Builder()
    x = b.scaled(b.input(4, 6), 3.0)
    program = b.program(b.matmul(x, b.constant(np.ones((6, 5), np.float32))))
    composed, decisions = vertical(program)
    assert composed is program
    (decision,) = decisions
    assert not decision.accepted and decision.subject == "scale0"
    assert "24 elements are read 120 times, which would repeat arithmetic" in decision.reason


def test_expensive_arithmetic_is_kept_and_called_expensive() -> None:
    b = Builder()
    x = b.tanh(b.input(4, 6))
    program = b.program(b.matmul(x, b.constant(np.ones((6, 5), np.float32))))
    composed, (decision,) = vertical(program)
    assert composed is program and "expensive" in decision.reason


def test_an_expensive_expression_is_not_written_twice() -> None:
    b = Builder()
    x = b.tanh(b.input(4, 6))
    squared = b.add(lambda p: te.compute((4, 3), lambda i, j: p(i, 2 * j) * p(i, 2 * j + 1)), x, name="pairs")
    program = b.program(squared)
    composed, (decision,) = vertical(program)
    assert composed is program
    assert "pairs1 would hold its expensive expression several times" in decision.reason


def test_outputs_and_what_operators_that_are_no_tes_read_stay() -> None:
    b = Builder()
    x = b.relu(b.input(4, 6))
    program = b.program(x, b.scaled(x, 2.0))
    assert vertical(program)[0] is program
    b = Builder()
    program = b.program(b.extern_sort(b.relu(b.input(4, 6))))
    composed, (decision,) = vertical(program)
    assert composed is program and "no TE reads it" in decision.reason


def test_expressions_stay_of_a_bounded_size() -> None:
    b = Builder()
    x = b.input(4, 6)
    for _ in range(9):
        x = b.plus(x, x)
    program = b.program(x)
    composed, decisions = vertical(program)
    assert 1 < len(composed.tes) < len(program.tes)
    assert any("more elements for each of its own" in d.reason for d in decisions if not d.accepted)
    assert_same_function(program, composed)


def test_a_second_run_changes_nothing() -> None:
    b = Builder()
    x = b.slice(b.relu(b.input(4, 8)), 1, 1, 8)
    composed, _ = vertical(b.program(b.reduce(b.tanh(x), 0)))
    assert vertical(composed)[0] is composed
