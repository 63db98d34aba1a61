"""Grid barriers where the merger never puts them, and what is said of what could not be read."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tvm import tirx
from tvm.backend.cuda.op import cuda_grid_sync

from souffle.mutation.barriers import barrier_changes
from souffle.verify import PROVEN, REFUTED, UNKNOWN, Certificate, certify_plan
from tests.verify.hand_made import THREADS, Memory, Run, extern, kernel, plan_of, sequence, stage, tensor

SIZE = 4 * THREADS
BUFFERS = (tensor("x", SIZE, "input"), tensor("h", SIZE, "workspace"), tensor("y", SIZE, "output"))
RUNS = [Run("one", 4, (0, 1)), Run("two", 4, (1, 2), grid_before=True)]


def at(m: Memory) -> object:
    return m.tile * THREADS + m.tid


def copy(m: Memory) -> tirx.Stmt:
    return tirx.BufferStore(m.tensors[1], m.tensors[0][at(m)], [at(m)])


def mirrored(m: Memory) -> tirx.Stmt:
    return tirx.BufferStore(m.tensors[1], m.tensors[0][SIZE - 1 - at(m)], [at(m)])


def of(func: tirx.PrimFunc) -> Certificate:
    functions = {"one": stage("one", (SIZE, SIZE), copy), "two": stage("two", (SIZE, SIZE), mirrored)}
    return certify_plan(plan_of(BUFFERS, RUNS, 1024), {"kernel": func}, functions)


def moved(func: tirx.PrimFunc, action: str) -> tirx.PrimFunc:
    return next(c.make() for c in barrier_changes(func) if (c.kind, c.action) == ("grid barrier", action))


@pytest.mark.parametrize("action", ["move into the loop after", "move into the loop before"])
def test_all_blocks_turn_equally_often(action: str) -> None:
    """In a loop over tiles, but outside of its branch: before all stages of a turn, or after them."""
    whole = kernel(RUNS, len(BUFFERS))
    assert of(whole).verdict == PROVEN
    assert of(moved(whole, action)).verdict == PROVEN


def test_blocks_without_a_tile_do_not_come_to_a_barrier_under_its_guard() -> None:
    inside = moved(moved(kernel(RUNS, len(BUFFERS)), "move into the loop after"), "move into the branch after")
    found = of(inside)
    assert found.verdict == REFUTED and "divergent barrier" in {c.rule for c in found.counterexamples}


def test_a_barrier_after_a_stage_is_none_before_it() -> None:
    """At the end of the second stage's loop it comes too late for what that stage reads."""
    late = moved(moved(kernel(RUNS, len(BUFFERS)), "move later"), "move into the loop before")
    found = of(late)
    assert "race between blocks" in {c.rule for c in found.counterexamples}


def waiting(m: Memory) -> tirx.Stmt:
    return sequence(tirx.Evaluate(cuda_grid_sync()), copy(m))


@pytest.mark.parametrize(
    ("tiles", "most", "syncs", "rule"),
    [
        (4, 4, 1, "divergent barrier"),  # a grid of 3
        (1, 4, 1, "divergent barrier"),
        (2, 2, 1, None),  # grids of 1 and 2 share 2 tiles evenly
        (2, 2, 0, "launch"),
    ],
)
def test_a_grid_barrier_inside_of_a_stage(tiles: int, most: int, syncs: int, rule: str | None) -> None:
    size = tiles * THREADS
    buffers = (tensor("x", size, "input"), tensor("y", size, "output"))
    runs = [Run("one", tiles, (0, 1))]
    plan = plan_of(buffers, runs, 1024)
    plan = replace(plan, kernels=(replace(plan.kernels[0], tiles=most, grid_syncs=syncs),))
    function = stage("one", (size, size), waiting)
    found = certify_plan(plan, {"kernel": kernel(runs, 2)}, {"one": function})
    assert {c.rule for c in found.counterexamples} == ({rule} if rule else set())
    assert found.verdict == (REFUTED if rule else UNKNOWN)


def test_what_could_not_be_read_may_write_what_seems_to_be_missing() -> None:
    def body(m: Memory) -> tirx.Stmt:
        return extern("some_helper", tirx.address_of(m.tensors[1][at(m)]))

    buffers = (tensor("x", SIZE, "input"), tensor("y", SIZE, "output"))
    runs = [Run("one", 4, (0, 1))]
    function = stage("one", (SIZE, SIZE), body)
    found = certify_plan(plan_of(buffers, runs, 1024), {"kernel": kernel(runs, 2)}, {"one": function})
    assert found.verdict == UNKNOWN and not found.counterexamples
    assert any("as far as could be read" in reason for reason in found.unknown)
