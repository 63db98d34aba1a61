"""Shuffles: the lanes that a mask names come to it together, or the certificate says which does not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tvm import tirx

from souffle.certificate import PROVEN, REFUTED, UNKNOWN
from souffle.verify import Certificate
from tests.verify.hand_made import THREADS, Memory, Run, certificate, sequence, stage, tensor

SIZE = 4 * THREADS
FULL = tirx.const(2**32 - 1, "uint32")
ACTIVE = tirx.call_intrin("uint32", "tirx.cuda.__activemask")


def shuffled(m: Memory, mask: object, width: int = 32) -> tirx.Stmt:
    given = tirx.call_intrin("float32", "tirx.cuda.__shfl_down_sync", mask, m.register[0], 1, width)
    return tirx.BufferStore(m.register, given, [1])


def proof(
    inner: Callable[[Memory, tirx.Stmt], tirx.Stmt], mask: object, *, threads: int = THREADS, tiles: int = 4
) -> Certificate:
    """Of a stage that loads, shuffles within what `inner` puts around it, and stores."""

    def body(m: Memory) -> tirx.Stmt:
        at = m.tile * threads + m.tid
        load = tirx.BufferStore(m.register, m.tensors[0][at], [0])
        zero = tirx.BufferStore(m.register, tirx.const(0.0), [1])
        store = tirx.BufferStore(m.tensors[1], m.register[1], [at])
        return sequence(load, zero, inner(m, shuffled(m, mask)), store)

    size = tiles * threads
    buffers = (tensor("x", size, "input"), tensor("y", size, "output"))
    return certificate([Run("one", tiles, (0, 1), threads=threads)], [stage("one", (size, size), body)], buffers)


def through(m: Memory, mask: object, inner: Callable[[tirx.Stmt], tirx.Stmt]) -> tirx.Stmt:
    """The mask in an array of its own first, as TVM's reductions have it."""
    held = tirx.decl_buffer((1,), "uint32", name="mask", scope="local")
    return sequence(tirx.AllocBuffer(held), tirx.BufferStore(held, mask, [0]), inner(shuffled(m, held[0])))


def plain(m: Memory, shuffle: tirx.Stmt) -> tirx.Stmt:
    return shuffle


def below(count: int) -> Callable[[Memory, tirx.Stmt], tirx.Stmt]:
    return lambda m, shuffle: tirx.IfThenElse(m.tid < count, shuffle, None)


def turns(extent: Callable[[Memory], object]) -> Callable[[Memory, tirx.Stmt], tirx.Stmt]:
    return lambda m, shuffle: tirx.For(tirx.Var("turn", "int32"), 0, extent(m), tirx.ForKind.SERIAL, shuffle)


@pytest.mark.parametrize(
    "inner",
    [
        plain,
        below(32),
        turns(lambda m: tirx.IntImm("int32", 3)),
        turns(lambda m: m.tid // 32 + 1),
        lambda m, shuffle: tirx.IfThenElse(m.tile < 3, shuffle, None),
        lambda m, shuffle: tirx.IfThenElse(m.tile * 2 + m.tid // 32 < 7, shuffle, None),
    ],
)
def test_whole_warps_may_shuffle_among_all_lanes(inner) -> None:
    found = proof(inner, FULL)
    assert found.verdict == PROVEN, found
    assert not found.assumed


@pytest.mark.parametrize(
    ("inner", "who"),
    [
        (below(7), "thread 0 comes to it, thread 7, which its mask names, does not"),
        (below(40), "thread 32 comes to it, thread 40, which its mask names, does not"),
        (turns(lambda m: m.tid // 16 + 1), "thread 16 comes to it, thread 0, which its mask names, does not"),
        (
            lambda m, shuffle: tirx.IfThenElse(m.tile * THREADS + m.tid < 100, shuffle, None),
            "thread 32 comes to it, thread 36, which its mask names, does not",
        ),
    ],
)
def test_a_lane_that_does_not_come_refutes_a_full_mask(inner, who: str) -> None:
    found = proof(inner, FULL)
    assert found.verdict == REFUTED, found
    first = found.counterexamples[0]
    assert (first.rule, first.reason) == ("divergent shuffle", who)
    assert "__shfl_down_sync" in first.statements[0]


def test_a_full_mask_in_a_block_of_broken_warps_is_refuted() -> None:
    found = proof(plain, FULL, threads=48)
    assert found.verdict == REFUTED
    assert found.counterexamples[0].reason == "thread 32 comes to it, thread 48, which its mask names, does not"


@pytest.mark.parametrize(("rest", "verdict"), [(0xFFFF, PROVEN), (0x7FFF, REFUTED), (0x1FFFF, REFUTED)])
def test_each_warp_may_have_a_mask_of_its_own(rest: int, verdict: str) -> None:
    def inner(m: Memory, _: tirx.Stmt) -> tirx.Stmt:
        return through(m, tirx.Select(m.tid < 32, FULL, tirx.const(rest, "uint32")), lambda s: s)

    assert proof(inner, FULL, threads=48).verdict == verdict


@pytest.mark.parametrize(("mask", "verdict"), [(0x7F, PROVEN), (0xFF, REFUTED), (0x3F, REFUTED)])
def test_a_mask_names_just_those_that_come(mask: int, verdict: str) -> None:
    found = proof(below(7), tirx.const(mask, "uint32"))
    assert found.verdict == verdict, found
    if mask == 0x3F:
        assert found.counterexamples[0].reason == "thread 6 comes to it, which its mask leaves out"


@pytest.mark.parametrize(
    ("mask", "count", "verdict"), [(2**32 - 1, 32, PROVEN), (2**32 - 1, 7, REFUTED), (127, 7, PROVEN)]
)
def test_a_mask_is_followed_through_its_array(mask: int, count: int, verdict: str) -> None:
    def inner(m: Memory, _: tirx.Stmt) -> tirx.Stmt:
        return through(m, tirx.const(mask, "uint32"), lambda s: tirx.IfThenElse(m.tid < count, s, None))

    found = proof(inner, FULL)
    assert found.verdict == verdict, found


def test_that_active_lanes_stay_together_is_assumed_and_said() -> None:
    found = proof(below(7), ACTIVE)
    assert found.verdict == PROVEN
    assert found.assumed == "lanes that are active together stay together, at 1 shuffle"
    assert "1 shuffles among active lanes" in str(found) and found.assumed in str(found)
    inside = proof(lambda m, _: tirx.IfThenElse(m.tid < 7, through(m, ACTIVE, lambda s: s), None), FULL)
    assert inside.verdict == PROVEN and inside.assumed


@pytest.mark.parametrize(
    "around",
    [
        lambda m, s: tirx.IfThenElse(m.tid < 7, s, None),
        lambda m, s: turns(lambda m: m.tid + 1)(m, s),
    ],
)
def test_lanes_active_before_a_branch_are_not_those_in_it(around) -> None:
    found = proof(lambda m, _: through(m, ACTIVE, lambda s: around(m, s)), FULL)
    assert found.verdict == UNKNOWN
    assert "mask" in found.unknown[0] and "of a shuffle" in found.unknown[0]


def test_a_mask_that_one_branch_sets_is_not_known() -> None:
    def inner(m: Memory, _: tirx.Stmt) -> tirx.Stmt:
        held = tirx.decl_buffer((1,), "uint32", name="mask", scope="local")
        sets = tirx.IfThenElse(m.tile < 2, tirx.BufferStore(held, FULL, [0]), None)
        return sequence(tirx.AllocBuffer(held), sets, shuffled(m, held[0]))

    found = proof(inner, FULL)
    assert any("of a shuffle" in reason for reason in found.unknown)
    assert {c.rule for c in found.counterexamples} == {"stale or undefined read"}


def test_a_condition_on_data_leaves_it_open() -> None:
    """Unless it is the same for all."""

    def under(element: Callable[[Memory], object]) -> Certificate:
        zero = tirx.FloatImm("float32", 0.0)
        return proof(lambda m, s: tirx.IfThenElse(m.tensors[0][element(m)] > zero, s, None), FULL)

    assert under(lambda m: m.tile).verdict == PROVEN
    found = under(lambda m: m.tid)
    assert found.verdict == UNKNOWN
    assert "what lanes do together under a condition on data" in found.unknown[0]


@pytest.mark.parametrize("width", [1, 16, 32, 0, 24, 33, 64, -32])
def test_a_width_is_a_power_of_two_up_to_a_warp(width: int) -> None:
    found = proof(lambda m, shuffle: shuffled(m, FULL, width), FULL)
    assert found.verdict == (PROVEN if width in (1, 16, 32) else REFUTED)
    if found.verdict == REFUTED:
        assert "shuffles among a number of lanes that is none of 1, 2, 4, 8, 16 and 32" in str(found)
