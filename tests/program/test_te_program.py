"""TE programs: their rules, their order, and what changing them keeps."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from tvm import te

import souffle
from souffle.program import Origin, ProgramError, Tensor, make_te
from souffle.program.printer import format_te
from souffle.tvm_compat import fresh_axis
from tests.testlib import Builder

ORIGIN = Origin(("node",), ("Add",), "group")


def chain() -> Builder:
    b = Builder()
    x = b.input(4, 6)
    b.plus(b.relu(x), b.scaled(x, 2.0))
    return b


def test_tensors_know_their_size() -> None:
    tensor = Tensor("t", (3, 4), "bool")
    assert (tensor.size, tensor.itemsize, tensor.nbytes) == (12, 1, 12)
    assert Tensor("s", (), "float16").nbytes == 2
    assert repr(tensor) == "t: bool[3, 4]"
    assert tensor != Tensor("t", (3, 4), "bool")


def test_producers_and_consumers() -> None:
    b = chain()
    program = b.program(b.tes[-1].output)
    relu, scale, plus = program.tes
    assert program.producers[plus.output] is plus
    assert program.consumers[program.inputs[0]] == (relu, scale)
    assert program.consumers[plus.output] == ()


def test_with_tes_sorts_and_drops_what_no_output_needs() -> None:
    b = chain()
    unused = b.constant(np.ones((4, 6), np.float32))
    b.plus(b.inputs[0], unused)
    plus = b.tes[2]
    program = b.program(plus.output)
    assert [t.name for t in program.tes] == ["relu0", "scale1", "plus2"]
    assert not program.constants
    again = program.with_tes(reversed(program.tes))
    assert set(again.tes) == set(program.tes) and again.tes[-1] is plus


def test_a_te_that_depends_on_itself_is_named() -> None:
    b = chain()
    program = b.program(b.tes[-1].output)
    relu, scale, plus = program.tes
    with pytest.raises(ProgramError, match=r"TE \w+ \(.*\) depends on itself"):
        program.with_tes([relu, replace(scale, inputs=(plus.output,)), plus])


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda p: replace(p, tes=p.tes[1:]), r"TE plus2 \(Plus plus2\) reads relu0.*nothing before it defines"),
        (lambda p: replace(p, tes=(*p.tes, p.tes[0])), r"defines relu0: float32\[4, 6\] a second time"),
        (lambda p: replace(p, outputs=(p.inputs[0],)), "which no TE defines"),
        (
            lambda p: replace(p, tes=(replace(p.tes[0], inputs=(Tensor("y", (6, 4), "float32"),)), *p.tes[1:])),
            "nothing before it defines",
        ),
    ],
)
def test_broken_programs_are_refused_by_name(change, says: str) -> None:
    b = chain()
    with pytest.raises(ProgramError, match=says):
        change(b.program(b.tes[-1].output)).check()


def test_a_placeholder_of_another_shape_is_refused() -> None:
    b = chain()
    other = b.input(6, 4)
    program = b.program(b.tes[-1].output)
    broken = replace(program.tes[0], inputs=(other,))
    with pytest.raises(ProgramError, match="reads x1"):
        replace(program, tes=(broken, *program.tes[1:])).check()


def test_make_te_closes_the_expression() -> None:
    x, y = Tensor("x", (3,), "float32"), Tensor("y", (3,), "float32")
    one, same, unread = (te.placeholder((3,), name=n) for n in ("one", "same", "unread"))
    axis = fresh_axis(3, "i")
    made = make_te("t", [axis], [one(axis.var) + same(axis.var)], [(one, x), (same, x), (unread, y)], ORIGIN)
    assert made.inputs == (x,) and len(made.placeholders) == 1
    assert made.output.shape == (3,) and made.output.dtype == "float32"
    assert not made.is_reduction
    with pytest.raises(ProgramError, match=r"TE t \(Add node\) reads .*not among the tensors"):
        make_te("t", [axis], [one(axis.var)], [], ORIGIN)


def test_several_outputs_are_not_one() -> None:
    made = chain().tes[0]
    two = replace(made, outputs=(made.output, Tensor("second", (4, 6), "float32")))
    with pytest.raises(ProgramError, match=r"relu0 .* has 2 outputs"):
        _ = two.output


def test_origins_merge_without_repeating() -> None:
    one, other = Origin(("a", "b"), ("Add", "Mul"), "g"), Origin(("b", "c"), ("Mul", "Relu"), "h")
    assert one.merged(other) == Origin(("a", "b", "c"), ("Add", "Mul", "Relu"), "g")
    assert str(one) == "Add a, Mul b"


def test_operators_on_bits_are_written_as_such() -> None:
    a, b = te.placeholder((4,), "int32", name="A"), te.placeholder((4,), "int32", name="B")
    c = te.compute((4,), lambda i: ((a[i] & b[i]) | (a[i] << 2)) ^ ~(b[i] >> 1) + 1, name="C")
    (line,) = format_te(souffle.from_te([a, b], [c]).tes[0]).splitlines()
    assert line.startswith("C[i] = ((A[i] & B[i]) | (A[i] << 2)) ^ ~(B[i] >> 1) + 1, 0 ≤ i < 4")
