"""Vertical transformation (paper §6.2): what is composed, what is kept and why."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from tvm import te, tirx

from souffle.analysis import MatrixForm, analyze
from souffle.program import TE, FusedTE, TEProgram
from souffle.program.printer import format_te
from souffle.transform import vertical
from souffle.tvm_compat import loads
from tests.testlib import Builder, assert_same_function


def test_figure_4_relu_slice_permute_becomes_one_te() -> None:
    b = Builder()
    x = b.map(lambda v: tirx.if_then_else(v > 0, v, tirx.const(0, "float32")), b.input(4, 8), name="relu")
    x = b.add(lambda p: te.compute((2, 4), lambda i, j: p(2 * i, j)), x, name="slice")
    program = b.program(b.transpose(x, 1, 0))
    composed, decisions = vertical(program)
    (te_,) = composed.tes
    assert isinstance(te_, TE) and te_.inputs == program.inputs and te_.output is program.outputs[0]
    assert format_te(te_) == (
        "transpose2[i, j] = where(x0[j * 2, i] > 0, x0[j * 2, i], 0), 0 ≤ i < 4, 0 ≤ j < 2   "
        "# Transpose transpose2, Slice slice1, Relu relu0"
    )
    # The product of the three maps' matrices.
    assert analyze(composed).access(te_, 0).matrix_form == MatrixForm(((0, 2), (1, 0)), (0, 0))
    assert [(d.stage, d.subject, d.accepted) for d in decisions] == [
        ("vertical", "slice1 into transpose2", True),
        ("vertical", "relu0 into transpose2", True),
    ]
    assert_same_function(program, composed)


def test_predicates_are_composed() -> None:
    b = Builder()
    x = b.input(4, 9)
    x = b.concat(b.slice(x, 1, 0, 3), b.slice(x, 1, 5, 9), 1)
    program = b.program(b.pad(b.relu(x), 1, 2, 1))
    composed, _ = vertical(program)
    (te_,) = composed.tes
    assert format_te(te_).startswith(
        "pad4[i, j] = where(j >= 2 and j < 9, max(where(j < 5, x0[i, j - 2], x0[i, j]), 0), 0), 0 ≤ i < 4, 0 ≤ j < 10"
    )
    assert_same_function(program, composed)


def test_a_flag_of_one_comparison_is_computed_where_it_is_read() -> None:
    """A reader of it would load a byte and compare that. What calculates first is computed once."""
    b = Builder()
    lengths, x = b.input(4, dtype="int32"), b.input(4, 8)
    flag = b.map(lambda v: v > 2, lengths)
    later = b.map(lambda v: v * 3 + 1 > 7, lengths)

    def masked(f: te.Tensor, v: te.Tensor) -> te.Tensor:
        return te.compute((4, 8), lambda i, j: tirx.Select(f[i], v[i, j], tirx.const(0, "float32")))

    program = b.program(b.add(masked, flag, x), b.add(masked, later, x))
    composed, decisions = vertical(program)
    assert {te_.inputs for te_ in composed.tes} == {(lengths, x), (lengths,), (later, x)}
    assert [d.subject for d in decisions if d.accepted] == ["map0 into t2"]
    assert any(d.subject == "map1" and "repeat arithmetic" in d.reason for d in decisions)
    assert_same_function(program, composed)


def test_impossible_branches_are_dropped() -> None:
    b = Builder()
    x, y = b.input(4, 6), b.input(4, 6)
    program = b.program(b.relu(b.slice(b.concat(x, y, 1), 1, 6, 12)))
    composed, _ = vertical(program)
    (te_,) = composed.tes
    assert te_.inputs == (y,) and "if_then_else" not in str(te_.body)
    assert_same_function(program, composed)


def test_a_concatenation_of_the_slices_of_one_tensor_reads_it_directly() -> None:
    b = Builder()
    x = b.input(4, 12)
    parts = [b.reshape(b.slice(x, 1, 3 * k, 3 * k + 3), 1, 12) for k in range(4)]
    joined = parts[0]
    for part in parts[1:]:
        joined = b.concat(joined, part, 0)
    program = b.program(b.relu(joined))
    composed, _ = vertical(program)
    (te_,) = composed.tes
    assert format_te(te_).startswith("relu11[i, j] = max(x0[j // 3, i * 3 + j % 3], 0), 0 ≤ i < 4, 0 ≤ j < 12"), te_
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


def test_what_only_moves_data_goes_before_arithmetic() -> None:
    """So that the arithmetic stays with the reduction before it, and the padding goes into the one behind it."""
    b = Builder()
    x = b.pad(b.tanh(b.matmul(b.input(4, 6), b.constant(np.ones((6, 5), np.float32)))), 0, 1, 1)
    program = b.program(b.matmul(x, b.constant(np.ones((5, 7), np.float32))))
    composed, _ = vertical(program)
    first, second = composed.tes
    assert isinstance(first, FusedTE) and [p.name for p in first.parts] == ["matmul0", "tanh1"]
    assert second.is_reduction and "if_then_else" in str(second.body)
    assert_same_function(program, composed)


def test_equal_layers_are_composed_once_and_share_their_expressions() -> None:
    b = Builder()
    x, ones = b.input(6, 6), np.ones((6, 6), np.float32)
    for _ in range(5):
        x = b.bias(b.transpose(b.matmul(x, b.constant(ones)), 1, 0), b.constant(ones[0]))
    composed, _ = vertical(_interned(b.program(x)))
    assert len(composed.tes) == 5 and len({part.op for te_ in composed.tes for part in te_.parts}) == 2


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
    composed, (kept, taken) = vertical(program)
    assert [part.name for part in composed.tes[0].parts] == ["scale0", "matmul1"]
    assert not kept.accepted and kept.subject == "scale0"
    assert "24 elements are read 120 times, which would repeat arithmetic" in kept.reason
    assert taken.accepted and taken.subject == "scale0 before matmul1"


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
    composed, (kept, apart) = vertical(program)
    assert composed is program
    assert "pairs1 would hold its expensive expression several times" in kept.reason
    assert apart.subject == "pairs1" and "its 12 elements are not the 24 of tanh0" in apart.reason


def test_what_operators_that_are_no_tes_read_stays() -> None:
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
    (te_,) = composed.tes
    assert 1 < len(te_.parts) < len(program.tes) and all(len(loads(part.body)) <= 64 for part in te_.parts)
    assert any("more elements for each of its own" in d.reason for d in decisions if not d.accepted)
    assert_same_function(program, composed)


def _interned(program: TEProgram) -> TEProgram:
    """With one expression for all TEs of one text, as the importer gives."""
    known: dict[str, TE] = {}
    tes = []
    for te_ in program.tes:
        first = known.setdefault(str((te_.body, te_.output.shape)).replace(te_.name, ""), te_)
        tes.append(replace(te_, op=first.op, placeholders=first.placeholders))
    return program.with_tes(tes)


def test_a_second_run_changes_nothing() -> None:
    b = Builder()
    x = b.slice(b.relu(b.input(4, 8)), 1, 1, 8)
    composed, _ = vertical(b.program(b.reduce(b.tanh(x), 0)))
    assert vertical(composed)[0] is composed


def test_what_an_impossible_branch_read_is_composed_as_if_it_had_not() -> None:
    """`relu` stays read by one TE alone once the other reads nothing of it; what only that one needed is dropped."""
    b = Builder()
    x = b.reduce(b.relu(b.input(4, 6)), 0)
    unused = b.reduce(b.tanh(x), 0)
    joined = b.concat(b.broadcast(unused, 2), b.relu(x), 0)
    program = b.program(b.plus(b.slice(joined, 0, 2, 8), b.scaled(x, 2.0)))
    composed, _ = vertical(program)
    (te_,) = composed.tes
    assert [part.name for part in te_.parts] == ["sum1", "plus9"]
    assert vertical(composed)[0] is composed
    assert_same_function(program, composed)
