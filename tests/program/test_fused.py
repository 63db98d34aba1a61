"""Fused TEs: their rules, their text, and the program with their parts."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from tvm import te

from souffle.program import FusedTE, ProgramError, TEProgram, fuse, parts_of
from tests.testlib import Builder, assert_same_function


def program_of(b: Builder, *outputs) -> TEProgram:
    """The program with its last two TEs as one."""
    plain = b.program(*outputs)
    *before, first, last = plain.tes
    return plain.with_tes([*before, fuse([first, last], outputs)])


def gemm_and_relu() -> tuple[TEProgram, TEProgram]:
    b = Builder()
    out = b.relu(b.matmul(b.tanh(b.input(4, 6)), b.constant(np.ones((6, 5), np.float32))))
    return b.program(out), program_of(b, out)


def test_ends_of_a_fused_te() -> None:
    plain, program = gemm_and_relu()
    tanh, fused = program.tes
    assert isinstance(fused, FusedTE) and repr(fused) == "FusedTE(matmul1, relu2)"
    assert fused.name == "relu2" and fused.inputs == (tanh.output, *plain.constants)
    assert fused.output is plain.outputs[0] and fused.internal == plain.tes[1].outputs
    assert fused.is_reduction and fused.origin.operators == ("Relu", "Matmul")
    assert parts_of(fused) == fused.parts and parts_of(tanh) == (tanh,)
    assert program.producers[fused.output] is fused and program.consumers[tanh.output] == (fused,)
    assert fused.internal[0] not in program.producers


def test_expanded_gives_the_parts() -> None:
    plain, program = gemm_and_relu()
    assert program.expanded().tes == plain.tes and plain.expanded() is plain
    program.expanded().check()
    assert_same_function(plain, program)


def test_text_is_one_entry() -> None:
    _, program = gemm_and_relu()
    assert str(program).splitlines()[4:6] == [
        "relu2[i, j] = max(matmul1[i, j], 0), 0 ≤ i < 4, 0 ≤ j < 5   # Relu relu2, Matmul matmul1",
        "    where matmul1[i, j] = sum(tanh0[i, rk] * w0[rk, j]), 0 ≤ i < 4, 0 ≤ j < 5, rk < 6",
    ]


def test_several_outputs_are_in_order_of_definition() -> None:
    b = Builder()
    state = b.tanh(b.input(4, 6))
    program = program_of(b, b.relu(state), state)
    (fused,) = program.tes
    assert [t.name for t in fused.outputs] == ["tanh0", "relu1"] and fused.internal == ()
    assert str(program).splitlines()[3].startswith("    and tanh0[i, j] = ")
    with pytest.raises(ProgramError, match=r"relu1 .* has 2 outputs"):
        _ = fused.output
    assert_same_function(b.program(program.outputs[0], state), program)


def test_equal_ones_are_wired_alike() -> None:
    _, program = gemm_and_relu()
    _, fused = program.tes
    tensor = replace(fused.output)
    renamed = tuple(replace(p, outputs=(tensor,)) if p is fused.parts[1] else p for p in fused.parts)
    other = fuse(renamed, [tensor])
    assert other.wiring == fused.wiring
    both = fuse(fused.parts, [*fused.internal, fused.output])
    assert both.wiring != fused.wiring


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda b, x: (b.relu(x),), "less than two parts"),
        (lambda b, x: (b.relu(b.broadcast(b.relu(x), 2)),), "part broadcast1 has 48 elements"),
        (lambda b, x: (b.reduce(b.broadcast(b.reduce(x, 0), 1), 0),), "part sum2 is a second reduction"),
        (lambda b, x: (b.relu(x), b.tanh(x)), "part tanh1 reads no part before it"),
        (lambda b, x: (b.reduce(b.relu(x), 1),), "part before the reduction is read by other than the reduction"),
    ],
)
def test_broken_ones_are_refused(make, says: str) -> None:
    b = Builder()
    make(b, b.input(4, 6))
    with pytest.raises(ProgramError, match=says):
        fuse(b.tes, [t for te_ in b.tes for t in te_.outputs])


def test_a_prologue_is_read_by_the_reduction_alone() -> None:
    b = Builder()
    x = b.relu(b.input(4, 6))
    program = b.program(b.scaled(b.reduce(x, 1), 2.0))
    (fused,) = program.with_tes([fuse(program.tes, program.outputs)]).tes
    assert fused.prologue == program.tes[:1] and [t.name for t in fused.internal] == ["relu0", "sum1"]
    y = b.add(lambda p, q: te.compute((4,), lambda i: p(i) + q(i, 0)), program.tes[1].output, x, name="both")
    with pytest.raises(ProgramError, match="part both3 reads no part before it, or one before the reduction"):
        fuse([*program.tes[:2], b.tes[-1]], [y])


def test_ends_that_are_not_those_of_the_parts_are_refused() -> None:
    _, program = gemm_and_relu()
    tanh, fused = program.tes
    for broken in (replace(fused, inputs=fused.inputs[:1]), replace(fused, outputs=(tanh.output,))):
        with pytest.raises(ProgramError, match="inputs or outputs are not those of its parts"):
            broken.check()


def test_names_of_internal_tensors_are_unique_too() -> None:
    plain, program = gemm_and_relu()
    tanh, fused = program.tes
    with pytest.raises(ProgramError, match=r"defines matmul1: float32\[4, 5\] a second time"):
        replace(program, tes=(tanh, plain.tes[1], fused)).check()
