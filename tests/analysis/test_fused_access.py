"""Access maps of fused TEs equal what a run of their parts reads, and what the analysis says of them follows."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from tvm import te, tirx

from souffle.analysis import FusedAccess, Relies, access_of, analyze, is_one_to_one, share_elements
from souffle.index import isl
from souffle.program import FusedTE, Tensor, TEProgram, fuse
from tests.analysis.analysis_cases import reads_of
from tests.testlib import Builder

Pairs = set[tuple[tuple[int, ...], tuple[int, ...]]]


def gemm_through_views(b: Builder) -> tuple[Tensor, ...]:
    x = b.matmul(b.input(3, 4), b.constant(np.ones((4, 6), np.float32)))
    turned = b.add(
        lambda p, q: te.compute((2, 3, 3), lambda h, i, j: p(i, h * 3 + j) + q(h)), x, b.input(2), name="turned"
    )
    return (b.plus(b.relu(turned), b.input(2, 3, 3)),)


def cell(b: Builder) -> tuple[Tensor, ...]:
    gates, state = b.input(1, 12), b.input(1, 4)
    both = b.add(lambda g, c: te.compute((1, 4), lambda i, j: g(i, j) * c(i, j) + g(i, j + 4)), gates, state, name="c")
    out = b.add(lambda g, c: te.compute((1, 4), lambda i, j: g(i, j + 8) * te.tanh(c(i, j))), gates, both, name="h")
    return both, out


def flipped_twice(b: Builder) -> tuple[Tensor, ...]:
    x = b.reduce(b.input(2, 3, 4), 2, "max")
    y = b.add(lambda p: te.compute((2, 3), lambda i, j: p(1 - i, j) * 2.0), x, name="y")
    return (b.add(lambda p, q: te.compute((3, 2), lambda j, i: p(1 - i, j) + q(i)), y, b.input(2), name="z"), y)


def windows(b: Builder) -> tuple[Tensor, ...]:
    """A cyclic shift and a window partition behind a pooling."""
    x = b.reduce(b.input(2, 4, 4), 0)
    shifted = b.add(lambda p: te.compute((4, 4), lambda i, j: p((i + 1) % 4, (j + 3) % 4) * 3.0), x, name="shifted")
    return (
        b.add(
            lambda p: te.compute((4, 2, 2), lambda w, i, j: te.exp(p(w // 2 * 2 + i, w % 2 * 2 + j))), shifted, name="w"
        ),
    )


def diamond(b: Builder) -> tuple[Tensor, ...]:
    x = b.relu(b.input(4, 3))
    y, z = b.scaled(x, 2.0), b.tanh(x)
    return (b.plus(y, z),)


def gate_before_a_gemm(b: Builder) -> tuple[Tensor, ...]:
    x, gate = b.input(3, 4), b.input(4)
    scaled = b.add(lambda p, q: te.compute((3, 4), lambda i, j: p(i, j) * q(j)), x, gate, name="scaled")
    out = b.matmul(scaled, b.constant(np.ones((4, 2), np.float32)))
    return (b.add(lambda p, q: te.compute((3, 2), lambda i, j: p(i, j) + q(i, j)), out, b.input(3, 2), name="plus"),)


CASES = [gemm_through_views, cell, flipped_twice, windows, diamond, gate_before_a_gemm]


def fused_program(make: Callable[[Builder], tuple[Tensor, ...]]) -> TEProgram:
    b = Builder()
    outputs = make(b)
    plain = b.program(*outputs)
    return plain.with_tes([fuse(plain.tes, outputs)])


def enumerated(te_: FusedTE, source: Tensor, output: Tensor) -> Pairs:
    """From an output's elements to those of an input, by running every part."""
    found: dict[Tensor, Pairs] = {}
    for part in te_.parts:
        reads = reads_of(part)
        pairs: Pairs = set()
        for position, tensor in enumerate(part.inputs):
            if tensor is source:
                pairs |= reads[position]
            elif tensor in found:
                pairs |= {(u, w) for u, v in reads[position] for x, w in found[tensor] if x == v}
        found.update(dict.fromkeys(part.outputs, pairs))
    return found[output]


@pytest.mark.parametrize("make", CASES, ids=lambda f: f.__name__)
def test_maps_equal_enumerated_reads(make) -> None:
    (te_,) = fused_program(make).tes
    assert share_elements(te_.parts[len(te_.prologue) :])
    for position, tensor in enumerate(te_.inputs):
        access = access_of(te_, position)
        assert isinstance(access, FusedAccess) and access.exact
        wanted = [enumerated(te_, tensor, output) for output in te_.outputs]
        assert [isl.pairs(found) for found in access.maps] == wanted
        assert isl.pairs(access.map) == wanted[-1]
        everything = set().union(*(reads_of(p)[p.inputs.index(tensor)] for p in te_.parts if tensor in p.inputs))
        assert access.elements == len({element for _, element in everything}) == len(isl.points(access.footprint))
        one = all(len(pairs) == len({out for out, _ in pairs}) for pairs in wanted)
        assert access.single_valued == one
        assert str(access).count(f"→ {tensor.name}[") >= 1


def test_what_the_analysis_says_follows_from_the_parts() -> None:
    program = fused_program(gemm_through_views)
    (te_,) = program.tes
    fused, apart = analyze(program), analyze(program.expanded())
    assert fused.relies(te_) is Relies.MANY and not is_one_to_one(te_)
    assert [fused.relies(te_, i) for i in range(len(te_.inputs))] == [Relies.MANY] * 2 + [Relies.ONE] * 2
    work = fused.arithmetic(te_)
    assert work.operations == sum(apart.arithmetic(p).operations for p in te_.parts) == 3 * 6 * 4 * 2 + 3 * 18
    assert work.elements_read == 12 + 24 + 2 + 18 and work.elements_written == 18
    assert not work.expensive and "FusedTE" not in str(fused)
    assert fused.live_ranges[program.outputs[0]].last_use == 1
    (cell_,) = fused_program(cell).tes
    assert access_of(cell_, 0).times == 12 and not access_of(cell_, 0).single_valued
    assert access_of(cell_, 1).single_valued


def test_reuse_and_dependences_see_one_te() -> None:
    b = Builder()
    x = b.input(4, 6)
    first = b.matmul(x, b.constant(np.ones((6, 6), np.float32)))
    second = b.plus(first, x)
    other = b.reduce(x, 1)
    plain = b.program(second, other)
    program = plain.with_tes([fuse(plain.tes[:2], [second]), plain.tes[2]])
    analysis = analyze(program)
    fused, total = program.tes
    assert analysis.reuse[x].consumers == (fused, total) and analysis.reuse[x].spatial == ((fused, total),)
    assert analysis.reuse[x].spatial_bytes == 24 * 4
    assert analysis.independent(fused, total)


def test_data_that_decides_is_over_approximated() -> None:
    b = Builder()
    x = b.reduce(b.input(4, 3), 1)
    rows = b.input(4, dtype="int32")
    out = b.map(lambda v, r: tirx.if_then_else(r > 0, v, 0.0), x, rows, name="masked")
    plain = b.program(out)
    (te_,) = plain.with_tes([fuse(plain.tes, [out])]).tes
    access = access_of(te_, 0)
    assert not access.exact and access.inexact_because == ("a condition depends on data or is not quasi-affine",)
    assert enumerated(te_, te_.inputs[0], out) <= isl.pairs(access.map)
    assert share_elements(te_.parts)


@pytest.mark.parametrize(
    "index", [lambda i, j: (i, 0), lambda i, j: (i // 2, j), lambda i, j: (0 * i, j)], ids=["column", "halves", "row"]
)
def test_parts_that_share_no_elements(index) -> None:
    b = Builder()
    x = b.relu(b.input(4, 6))
    b.add(lambda p: te.compute((4, 6), lambda i, j: p(*index(i, j)) * 2.0), x, name="t")
    assert not share_elements(b.tes)
    assert share_elements(b.tes[:1])
