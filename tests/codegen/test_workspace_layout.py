"""The workspace: tensors whose epochs meet never share bytes."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import souffle
from souffle.codegen.workspace_layout import ALIGNMENT, Lifetime, place
from tests.testlib import random_program

LIFETIMES = st.lists(
    st.tuples(st.integers(0, 3000), st.integers(0, 12), st.integers(0, 6)).map(
        lambda t: Lifetime(t[0], t[1], t[1] + t[2])
    ),
    max_size=24,
)


def _apart(one: range, other: range) -> bool:
    return one.stop <= other.start or other.stop <= one.start


@settings(max_examples=200, deadline=None, database=None, derandomize=True)
@given(LIFETIMES)
def test_tensors_whose_epochs_meet_do_not_overlap(lifetimes: list[Lifetime]) -> None:
    offsets, total = place(lifetimes)
    ranges = [range(at, at + max(life.nbytes, 1)) for at, life in zip(offsets, lifetimes, strict=True)]
    assert all(r.start % ALIGNMENT == 0 and r.stop <= total for r in ranges)
    for i, one in enumerate(lifetimes):
        for j, other in enumerate(lifetimes[:i]):
            if one.first <= other.last and other.first <= one.last:
                assert _apart(ranges[i], ranges[j]), (one, other)


def test_memory_is_used_again_after_a_barrier() -> None:
    chain = [Lifetime(1024, epoch, epoch + 1) for epoch in range(10)]
    offsets, total = place(chain)
    assert total == 2048 and set(offsets) == {0, 1024}
    assert place([]) == ((), 0)


def test_no_more_than_all_apart() -> None:
    lives = [Lifetime(300, 0, 0), Lifetime(5000, 0, 3), Lifetime(10, 3, 3)]
    _, total = place(lives)
    assert total == 5120 + 512


@pytest.mark.parametrize("level", ["V0", "V4"])
@pytest.mark.parametrize("seed", range(3))
def test_buffers_of_a_network(seed: int, level: str) -> None:
    program = random_program(random.Random(seed).choice, 15, seed)
    plan = souffle.compile(program, level=level, target="cuda", arch="sm_90", cubin=False, device="cpu").plan
    kinds = [buffer.kind for buffer in plan.buffers]
    assert kinds == sorted(kinds, key=("input", "output", "constant", "workspace").index)
    assert len({buffer.name for buffer in plan.buffers}) == len(plan.buffers)
    for buffer in plan.buffers:
        if buffer.kind == "workspace":
            assert buffer.offset % ALIGNMENT == 0 and buffer.offset + buffer.nbytes <= plan.workspace_bytes
        else:
            assert buffer.offset == 0
