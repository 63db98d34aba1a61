"""Grids of any size, and what a file says of its kernels' resources."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import tvm_ffi
from tvm import tirx

from souffle.codegen.plan import Plan, Resources
from souffle.verify import PROVEN, REFUTED, UNKNOWN, Certificate, certify_plan
from souffle.verify.saved import verify_plan
from tests.verify.hand_made import THREADS, Memory, Run, kernel, plan_of, sequence, stage, tensor
from tests.verify.wired import compiled

TILES = 4


def copied(m: Memory) -> tirx.Stmt:
    at = m.tile * THREADS + m.tid
    return tirx.BufferStore(m.tensors[1], m.tensors[0][at], [at])


def through_arrays(nbytes: int) -> Callable[[Memory], tirx.Stmt]:
    """By way of an array that the stage declares for itself."""

    def body(m: Memory) -> tirx.Stmt:
        own = tirx.decl_buffer((nbytes // 4,), "float32", name="own", scope="shared")
        at = m.tile * THREADS + m.tid
        store = tirx.BufferStore(own, m.tensors[0][at], [m.tid])
        return sequence(tirx.AllocBuffer(own), store, tirx.BufferStore(m.tensors[1], own[m.tid], [at]))

    return body


def certified(
    body: Callable[[Memory], tirx.Stmt] = copied,
    turns: Callable[[tirx.PrimExpr], tirx.PrimExpr] | None = None,
    change: Callable[[Plan], Plan] = lambda plan: plan,
) -> Certificate:
    """A kernel of one stage, with so many turns of the loop over its tiles on a grid of so many blocks."""
    runs = [Run("stage", TILES, (0, 1))]
    made = kernel(runs, 2)
    blocks = made.params[-1]

    def turned(loop: tirx.For) -> tirx.For:
        return loop if turns is None else tirx.For(loop.loop_var, 0, turns(blocks), loop.kind, loop.body)

    made = made.with_body(tvm_ffi.structural_map(made.body, (tirx.For, turned)))
    size = TILES * THREADS
    plan = plan_of([tensor("x", size, "input"), tensor("y", size, "output")], runs, 1024)
    return certify_plan(change(plan), {"kernel": made}, {"stage": stage("stage", (size, size), body)})


@pytest.mark.parametrize(
    ("turns", "verdict"),
    [
        (lambda n: tirx.truncdiv(n + (TILES - 1), n), PROVEN),
        (lambda n: tirx.truncdiv(n + TILES, n), PROVEN),
        (lambda n: tirx.truncdiv(n + (TILES - 2), n), REFUTED),
        (lambda n: tirx.truncdiv(n * 2, n), REFUTED),
        # Of no grid that is tried, and of a larger one: PROVEN before.
        (lambda n: tirx.truncdiv(n + (TILES - 1), n) - tirx.truncdiv(n, 100_000), UNKNOWN),
    ],
)
def test_all_grids_compute_all_tiles(turns, verdict: str) -> None:
    assert certified(turns=turns).verdict == verdict


@pytest.mark.parametrize(("blocks", "verdict"), [(2**31 - TILES, PROVEN), (2**31 - TILES + 1, REFUTED)])
def test_the_number_of_a_tile_is_counted_in_32_bits(blocks: int, verdict: str) -> None:
    found = certified(change=lambda plan: replace(plan, kernels=(replace(plan.kernels[0], tiles=blocks),)))
    assert found.verdict == verdict, found


@pytest.mark.parametrize(("nbytes", "verdict"), [(4096, PROVEN), (227 * 1024, REFUTED)])
def test_declared_arrays_are_added_to_what_the_launch_asks_for(nbytes: int, verdict: str) -> None:
    """The second was PROVEN before, whatever the launch asked for beside it, if nothing had compiled it."""
    found = certified(through_arrays(nbytes))
    assert found.verdict == verdict, found
    assert all(c.rule == "does not fit" for c in found.counterexamples)


def test_what_a_file_says_of_registers_is_not_believed() -> None:
    plan = compiled().plan
    recorded = tuple(replace(k, resources=Resources(10**6, 10**6, 0, 0)) for k in plan.kernels)
    assert verify_plan(replace(plan, kernels=recorded)).verdict == PROVEN
