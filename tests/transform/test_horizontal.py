"""Horizontal transformation (paper §6.1): what becomes one TE, from what operands, and what does not."""

from __future__ import annotations

import numpy as np
from tvm import te

from souffle.program import TEProgram
from souffle.transform import horizontal
from tests.testlib import Builder, assert_same_function

RNG = np.random.default_rng(0)


def weights(*shape: int) -> np.ndarray:
    return RNG.integers(-3, 4, shape).astype(np.float32)


def merged_names(program: TEProgram) -> list[str]:
    return [te_.name for te_ in program.tes if "_x" in te_.name]


def test_query_key_and_value_become_one_matmul_with_packed_weights() -> None:
    b = Builder()
    x = b.input(4, 6)
    q, k, v = (b.matmul(x, b.constant(weights(6, 5))) for _ in range(3))
    program = b.program(b.plus(b.plus(q, k), v))
    result, decisions = horizontal(program)
    (te_,) = [t for t in result.tes if t.is_reduction]
    assert te_.output.shape == (3, 4, 5)
    (packed,) = result.constants
    np.testing.assert_array_equal(result.constants[packed], np.stack(list(program.constants.values())))
    decision = next(d for d in decisions if d.accepted)
    assert decision.stage == "horizontal" and decision.subject == "matmul0, matmul1, matmul2"
    assert "3 independent TEs of one shape share an operand" in decision.reason
    assert len(te_.origin.nodes) == 3
    assert_same_function(program, result)


def test_members_follow_into_what_reads_them() -> None:
    b = Builder()
    x = b.input(4, 6)
    parts = [b.bias(b.matmul(x, b.constant(weights(6, 5))), b.constant(weights(5))) for _ in range(3)]
    program = b.program(b.plus(b.plus(parts[0], parts[1]), parts[2]))
    result, _ = horizontal(program)
    assert merged_names(result) == ["matmul0_x3", "bias1_x3"]
    assert_same_function(program, result)


def test_slices_of_one_tensor_are_read_at_an_affine_index() -> None:
    b = Builder()
    x = b.relu(b.input(4, 12))
    parts = [b.reduce(b.slice(x, 1, 3 * i, 3 * i + 3), 0) for i in range(1, 4)]
    program = b.program(b.plus(b.plus(parts[0], parts[1]), parts[2]))
    result, _ = horizontal(program)
    slices = next(t for t in result.tes if t.name.startswith("slice"))
    assert slices.output.shape == (3, 4, 3) and "if_then_else" not in str(slices.body)
    assert_same_function(program, result)


def test_slices_at_no_regular_distance_are_not_read_at_one_index() -> None:
    b = Builder()
    x = b.input(4, 20)
    parts = [b.slice(x, 1, start, start + 2) for start in (0, 3, 10, 11, 17)]
    total = parts[0]
    for part in parts[1:]:
        total = b.plus(total, part)
    program = b.program(total)
    result, decisions = horizontal(program)
    assert result is program
    assert "selecting" in decisions[0].reason and not decisions[0].accepted


def test_separate_tensors_are_selected_in_a_reduction_that_shares_weights() -> None:
    b = Builder()
    shared = b.constant(weights(6, 5))
    parts = [b.matmul(b.input(4, 6), shared) for _ in range(2)]
    program = b.program(b.plus(*parts))
    result, _ = horizontal(program)
    (te_,) = [t for t in result.tes if t.is_reduction]
    assert "if_then_else" in str(te_.body) and te_.output.shape == (2, 4, 5)
    assert_same_function(program, result)


def test_elementwise_tes_over_separate_tensors_stay_apart() -> None:
    b = Builder()
    program = b.program(b.plus(b.relu(b.input(4, 6)), b.relu(b.input(4, 6))))
    result, (decision,) = horizontal(program)
    assert result is program
    assert not decision.accepted and decision.subject == "relu0, relu1" and "selecting" in decision.reason


def test_too_many_selections_are_refused_with_the_number() -> None:
    b = Builder()
    shared = b.constant(weights(6, 5))
    parts = [b.matmul(b.input(4, 6), shared) for _ in range(9)]
    total = parts[0]
    for part in parts[1:]:
        total = b.plus(total, part)
    program = b.program(total)
    result, (decision,) = horizontal(program)
    assert result is program and "selected among 9 tensors" in decision.reason


def test_dependent_tes_are_not_merged() -> None:
    b = Builder()
    x = b.input(4, 6)
    for _ in range(3):
        x = b.matmul(x, b.constant(weights(6, 6)))
    program = b.program(x)
    result, decisions = horizontal(program)
    assert result is program and not decisions


def test_other_shapes_types_and_expressions_are_not_merged() -> None:
    b = Builder()
    x, y = b.input(4, 6), b.input(3, 7)
    one = b.matmul(x, b.constant(weights(6, 5)))
    other = b.matmul(y, b.constant(weights(7, 5)))  # another length of the sum
    program = b.program(b.plus(b.reduce(one, 0), b.reduce(other, 0)), b.plus(b.relu(x), b.scaled(x, 2.0)))
    result, _ = horizontal(program)
    assert len(result.tes) == len(program.tes)
    assert_same_function(program, result)


def test_outputs_keep_their_own_tensors() -> None:
    b = Builder()
    x = b.input(4, 6)
    program = b.program(*(b.matmul(x, b.constant(weights(6, 5))) for _ in range(2)))
    assert horizontal(program)[0] is program


def test_packs_are_shared_by_equal_columns() -> None:
    b = Builder()
    x, y = b.input(4, 6), b.input(3, 6)
    ws = [b.constant(weights(6, 5)) for _ in range(2)]
    one = b.plus(*(b.matmul(x, w) for w in ws))
    other = b.plus(*(b.matmul(y, w) for w in ws))
    result, _ = horizontal(b.program(b.reduce(one, 0), b.reduce(other, 0)))
    assert len(result.constants) == 1


def test_multiple_outputs_of_one_reduction_are_left_alone() -> None:
    def argmax(p: te.Tensor) -> te.Tensor:
        k = te.reduce_axis((0, 6), "k")
        pick = te.comm_reducer(
            lambda a, b: (te.if_then_else(a[1] >= b[1], a[0], b[0]), te.if_then_else(a[1] >= b[1], a[1], b[1])),
            lambda i, v: (te.const(-1, i), te.min_value(v)),
        )
        return te.compute((4,), lambda i: pick((k, p(i, k)), axis=k))[0]

    b = Builder()
    x = b.input(4, 6)
    program = b.program(b.map(lambda a, b: a + b, b.add(argmax, x), b.add(argmax, x), name="sum"))
    result, _ = horizontal(program)
    assert len(result.tes) == len(program.tes)
    assert_same_function(program, result)


def test_names_stay_unique() -> None:
    b = Builder()
    x = b.input(4, 6)
    for _ in range(2):
        x = b.plus(*(b.matmul(x, b.constant(weights(6, 6))) for _ in range(2)))
    result, _ = horizontal(b.program(x))
    result.check()
    assert len(merged_names(result)) == 2
