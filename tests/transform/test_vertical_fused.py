"""Fusion with neighbours: epilogues, several outputs, and what is refused with which reason."""

from __future__ import annotations

import numpy as np
import pytest
from tvm import te, tirx

from souffle.decision import Decision
from souffle.program import TE, FusedTE, Tensor, TEProgram
from souffle.program.printer import format_te
from souffle.transform import vertical
from tests.testlib import Builder, assert_same_function


def weights(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).integers(-3, 4, shape).astype(np.float32)


def gelu(b: Builder, x: Tensor) -> Tensor:
    """Of several TEs, as exporters write it; rounded, so that it gives whole numbers on every machine."""
    error = b.map(lambda v: te.round(te.erf(v * 0.5) * 4.0), x, name="erf")
    return b.map(lambda u, v: u * (v + 1.0), x, error, name="times")


def names(program: TEProgram) -> list[list[str]]:
    return [[p.name for p in item.parts] if isinstance(item, FusedTE) else [item.name] for item in program.tes]


def refusals(decisions: tuple[Decision, ...]) -> dict[str, str]:
    return {d.subject: d.reason for d in decisions if not d.accepted}


def test_bias_and_gelu_join_the_gemm_through_reshape_and_transpose() -> None:
    b = Builder()
    x = b.bias(b.matmul(b.input(4, 6), b.constant(weights(6, 8))), b.constant(weights(8)))
    x = b.transpose(b.reshape(x, 4, 2, 4), 1, 0, 2)
    program = b.program(gelu(b, x))
    fused, decisions = vertical(program)
    (te_,) = fused.tes
    assert te_.inputs == (program.inputs[0], *program.constants) and te_.outputs == program.outputs
    assert [p.is_reduction for p in te_.parts] == [True, False]
    assert Decision(
        "vertical",
        "times5 with matmul0",
        True,
        "one TE of 2 statements: each element of one belongs to one element of the other",
    ) in [d for d in decisions if d.accepted][-1:]
    assert format_te(te_).splitlines()[1] == (
        "    where matmul0[i, j] = sum(x0[i, rk] * w0[rk, j]), 0 ≤ i < 4, 0 ≤ j < 8, rk < 6"
    )
    assert_same_function(program, fused)


def test_a_residual_goes_to_the_reduction_that_comes_last() -> None:
    b = Builder()
    x = b.input(4, 6)
    shortcut = b.bias(b.matmul(x, b.constant(weights(6, 6))), b.constant(weights(6)))
    main = b.matmul(b.relu(b.matmul(x, b.constant(weights(6, 5)))), b.constant(weights(5, 6)))
    program = b.program(b.relu(b.plus(main, shortcut)))
    fused, _ = vertical(program)
    assert names(fused) == [["matmul0"], ["matmul2", "relu3"], ["matmul4", "relu6"]]
    assert_same_function(program, fused)


def test_swish_joins_the_reduction() -> None:
    b = Builder()
    x = b.matmul(b.input(4, 6), b.constant(weights(6, 5)))
    gate = b.map(lambda v: te.round(te.sigmoid(v) * 4.0), x, name="gate")
    program = b.program(b.map(lambda u, v: u * v, x, gate, name="times"))
    fused, _ = vertical(program)
    assert names(fused) == [["matmul0", "times2"]]
    assert_same_function(program, fused)


def squeeze_and_excitation(b: Builder) -> Tensor:
    x = b.relu(b.matmul(b.input(4, 6), b.constant(weights(6, 5))))
    gate = b.tanh(b.reduce(x, 0))
    scaled = b.add(lambda p, q: te.compute((4, 5), lambda i, j: p(i, j) * q(j)), x, gate, name="scaled")
    return b.bias(b.matmul(scaled, b.constant(weights(5, 7))), b.constant(weights(7)))


def test_a_scale_by_a_gate_is_the_prologue_of_the_reduction_that_reads_it() -> None:
    b = Builder()
    program = b.program(squeeze_and_excitation(b))
    fused, decisions = vertical(program)
    assert names(fused) == [["matmul0", "relu1"], ["sum2", "tanh3"], ["scaled4", "matmul5", "bias6"]]
    last = fused.tes[-1]
    assert [p.name for p in last.prologue] == ["scaled4"] and last.outputs == program.outputs
    assert Decision("vertical", "scaled4 before matmul5", True, "cheap, and the reduction alone reads it") in decisions
    assert vertical(fused)[0] is fused
    assert_same_function(program, fused)


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda b, x: (b.matmul(b.tanh(x), b.constant(weights(6, 5))),), [["tanh0"], ["matmul1"]]),
        (lambda b, x: (b.matmul(y := b.relu(x), b.constant(weights(6, 5))), y), [["relu0"], ["matmul1"]]),
        (
            lambda b, x: tuple(b.matmul(y, b.constant(weights(6, k))) for y in [b.relu(x)] for k in (5, 7)),
            [["relu0"], ["matmul1"], ["matmul2"]],
        ),
    ],
    ids=["expensive", "output", "two readers"],
)
def test_what_others_need_or_is_expensive_is_no_prologue(make, expected) -> None:
    b = Builder()
    program = b.program(*make(b, b.input(4, 6)))
    assert names(vertical(program)[0]) == expected


def test_what_others_read_too_is_an_output() -> None:
    b = Builder()
    x = b.matmul(b.input(4, 6), b.constant(weights(6, 5)))
    kept = b.relu(x)
    program = b.program(b.reduce(x, 0), b.bias(kept, b.constant(weights(5))), kept)
    fused, _ = vertical(program)
    te_ = next(item for item in fused.tes if isinstance(item, FusedTE))
    assert [p.name for p in te_.parts] == ["matmul0", "relu1", "bias3"]
    assert te_.outputs == tuple(p.output for p in te_.parts) and te_.internal == ()
    lines = format_te(te_).splitlines()
    assert lines[0].startswith("bias3[") and lines[1].startswith("    and relu1[")
    assert lines[2].startswith("    and matmul0[")
    assert_same_function(program, fused)


def cell(b: Builder, gates: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    width = state.shape[1]

    def gate(number: int, name: str) -> Tensor:
        return b.tanh(b.slice(gates, 1, number * width, (number + 1) * width))

    kept = b.map(lambda f, c: f * c, gate(0, "f"), state, name="kept")
    new = b.map(lambda i, g: i * g, gate(1, "i"), gate(2, "g"), name="new")
    state = b.plus(kept, new)
    return state, b.map(lambda o, c: o * te.round(te.tanh(c) * 4.0), gate(3, "o"), state, name="hidden")


def test_the_state_and_the_output_of_a_cell_are_one_te() -> None:
    b = Builder()
    state, hidden = b.input(1, 4), b.input(1, 4)
    recurrent = b.constant(weights(4, 16))
    for _ in range(3):
        state, hidden = cell(b, b.matmul(hidden, recurrent), state)
    program = b.program(hidden)
    fused, _ = vertical(program)
    # Only the last state is read by nothing else, so that it is computed where it is used.
    gemm_and_cell = [[TE, FusedTE], [TE, FusedTE], [TE, TE]]
    assert [type(item) for item in fused.tes] == [kind for step in gemm_and_cell for kind in step]
    first = fused.tes[1]
    assert [p.name[:4] for p in first.parts] == ["plus", "hidd"] and len(first.outputs) == 2
    assert_same_function(program, fused)


def test_a_te_between_them_keeps_two_apart() -> None:
    b = Builder()
    x = b.tanh(b.input(4, 6))
    total = b.reduce(x, 1)
    program = b.program(b.add(lambda p, q: te.compute((4, 6), lambda i, j: p(i, j) - q(i)), x, total, name="minus"))
    fused, decisions = vertical(program)
    assert fused is program
    assert refusals(decisions)["minus2"] == "sum1 lies between: it needs tanh0 and is needed here"


def test_no_cycle_arises_through_other_groups() -> None:
    """Each pair alone would be right; both together would need each other."""
    b = Builder()
    x, y = b.input(4, 4), b.input(4, 4)
    first, second = b.matmul(x, b.constant(weights(4, 4))), b.matmul(y, b.constant(weights(4, 4)))
    one = b.plus(first, b.broadcast(b.reduce(second, 0), 4))
    other = b.plus(second, b.broadcast(b.reduce(first, 0), 4))
    program = b.program(one, other)
    fused, decisions = vertical(program)
    assert all(len(item.parts) == 2 for item in fused.tes if isinstance(item, FusedTE))
    assert any("would wait for" in d.reason or "lies between" in d.reason for d in decisions if not d.accepted)
    assert_same_function(program, fused)


def test_other_readers_do_not_wait() -> None:
    b = Builder()
    x = b.input(4, 4)
    early = b.matmul(x, b.constant(weights(4, 4)))
    late = b.reduce(b.tanh(b.matmul(b.reduce(b.broadcast(x, 2), 0), b.constant(weights(4, 4)))), 0)
    sideways = b.reduce(early, 0)
    program = b.program(b.bias(early, late), sideways)
    _, decisions = vertical(program)
    reason = next(reason for subject, reason in refusals(decisions).items() if subject.startswith("bias"))
    assert "sum" in reason and "reads matmul0 too and would wait for" in reason


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda b, x: b.broadcast(x, 3), "its 60 elements are not the 20 of matmul0, which would be repeated"),
        (
            lambda b, x: b.add(lambda p: te.compute((4, 5), lambda i, j: p(i, j) + p(3 - i, j)), x, name="t"),
            "it does not read matmul0 at one element for each of its own, each at another",
        ),
        (
            lambda b, x: b.add(lambda p: te.compute((4, 5), lambda i, j: p(i, 0) * j), x, name="t"),
            "it does not read matmul0 at one element for each of its own, each at another",
        ),
        (lambda b, x: b.gather(x, b.constant(np.array([3, 0, 1, 2], np.int32))), "it does not read matmul0 at one"),
    ],
)
def test_what_shares_no_elements_stays_apart(make, says: str) -> None:
    b = Builder()
    program = b.program(make(b, b.matmul(b.input(4, 6), b.constant(weights(6, 5)))))
    fused, decisions = vertical(program)
    assert fused is program
    assert says in refusals(decisions)[program.tes[-1].name]


def test_two_ways_to_other_elements_keep_a_te_apart() -> None:
    """Each read is a bijection, but one thread would need two elements of the first."""
    b = Builder()
    x = b.matmul(b.input(4, 6), b.constant(weights(6, 5)))
    turned = b.add(lambda p: te.compute((4, 5), lambda i, j: te.round(te.tanh(p(3 - i, j)) * 4)), x, name="turned")
    both = b.plus(x, turned)
    program = b.program(both, turned)
    fused, decisions = vertical(program)
    assert names(fused) == [["matmul0", "turned1"], ["plus2"]]
    assert "each at another" in refusals(decisions)["plus2"]
    assert_same_function(program, fused)


def test_data_may_decide_whether_an_element_is_used() -> None:
    b = Builder()
    x = b.matmul(b.input(4, 6), b.constant(weights(6, 5)))
    mask = b.input(4, 5)
    program = b.program(b.map(lambda m, v: tirx.if_then_else(m > 0, v, 0.0), mask, x, name="masked"))
    fused, _ = vertical(program)
    assert names(fused) == [["matmul0", "masked1"]]
    assert_same_function(program, fused)


def test_statements_are_of_a_bounded_number() -> None:
    b = Builder()
    x = b.input(4, 6)
    kept = []
    for _ in range(40):
        x = b.tanh(x)
        kept.append(x)
    program = b.program(*kept)
    fused, decisions = vertical(program)
    assert [len(item.parts) for item in fused.tes] == [16, 16, 8]
    assert "has 16 statements already" in refusals(decisions)["tanh16"]
    assert_same_function(program, fused)


def test_a_second_run_changes_nothing() -> None:
    b = Builder()
    x = b.matmul(b.input(4, 6), b.constant(weights(6, 5)))
    kept = b.tanh(x)
    fused, _ = vertical(b.program(b.reduce(kept, 0), b.scaled(kept, 2.0)))
    assert any(isinstance(item, FusedTE) for item in fused.tes)
    assert vertical(fused)[0] is fused
