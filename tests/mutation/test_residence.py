"""Mutants of what stays in registers: those that one step, one thread or every call alone shows are refuted, too."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from benchmarks.residence import compiled, counted, trapping
from souffle.codegen.assemble import CompiledKernels
from souffle.errors import DeviceError
from souffle.mutation.residence import ResidenceMutations
from souffle.mutation.sandbox import Sandbox
from souffle.mutation.trial import Trials, described, misses
from souffle.runtime.cpu_runner import CpuRunner
from souffle.verify import PROVEN, REFUTED, UNKNOWN
from souffle.verify.values import Mismatch
from tests.thorough import sized

pytestmark = pytest.mark.sampled(2)


@cache
def network() -> CompiledKernels:
    """A stage of 30 tiles that keeps two constants."""
    return compiled("Loop of two products")


@cache
def mutations() -> ResidenceMutations:
    return ResidenceMutations(network())


def inputs() -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(3)
    return tuple(rng.standard_normal(b.shape).astype(b.dtype) for b in network().plan.buffers if b.kind == "input")


@pytest.mark.parametrize(
    ("action", "what"),
    [
        ("overwritten before", "before it, in step 3"),
        ("overwritten before", "before it, in the last step"),
        ("overwritten after", "after it, in step 3"),
        ("overwritten in a step", "after a step, for all threads but 33"),
        ("in part", "is called for all threads but 33"),
        ("in part", "is called for even threads"),
        ("another thread", "is called for its neighbour thread"),
        ("another place", "4 elements further, in each call"),
        ("declared inside", "is of each step anew"),
    ],
)
def test_what_shows_in_few_places_is_refuted(action: str, what: str) -> None:
    found = [m for m in mutations() if m.action == action and what in m.what]
    assert found
    for mutation in found:
        mutant = mutations().mutant(mutation)
        certificate = mutant.certificate()
        assert certificate.verdict == REFUTED, mutation.what
        assert any(one.rule == "stale or undefined read" for one in certificate.counterexamples), mutation.what


def test_constants_filled_for_each_other_in_each_call_are_a_wrong_value() -> None:
    """Every grid then computes the same: nothing is stale, and only what the stage is defined to compute tells."""
    (mutation,) = [m for m in mutations() if m.action == "another tensor" and "for each other, in each call" in m.what]
    mutant = mutations().mutant(mutation)
    assert mutant.certificate().verdict == PROVEN and isinstance(mutant.values(), Mismatch)


def test_an_element_that_is_not_filled_is_refuted() -> None:
    found = [m for m in mutations() if m.action == "left out" and m.stage]
    assert found and all(mutations().mutant(m).certificate().verdict == REFUTED for m in found)


def test_what_fills_again_for_nothing_is_not_refuted() -> None:
    """In each step, whether or not a block has another tile: nothing is wrong with it, though it is not known."""
    fill = "move out of its branch, later"
    verdicts = [mutations().mutant(m).certificate().verdict for m in mutations() if m.action == fill]
    assert UNKNOWN in verdicts and network().plan.certificate.verdict == PROVEN


@pytest.mark.thorough("some are in tests/kernel/test_kept_weights.py")
def test_each_that_changes_a_result_is_refuted() -> None:
    with Sandbox() as sandbox:
        trials = Trials(mutations(), inputs(), sandbox)
        found = [trials.run(mutation) for mutation in mutations().sample(sized(5, 16), seed=11)]
    assert not misses(found), "\n".join(map(described, misses(found)))
    assert counted(found)["changing"] >= sized(2, 9)


def test_a_run_after_a_trap_is_right() -> None:
    """A thread stops the launch in a step; the same object then gives the bits that it gave before."""
    plan, steps = trapping(network().plan)
    runner, given = CpuRunner(plan), inputs()
    expected = [one.copy() for one in runner.run(given)]
    for step, blocks in ((0, 3), (steps - 1, 64)):
        bad = tuple(one.copy() for one in given)
        bad[0].reshape(-1)[:3] = 4096.0, step, 1
        with pytest.raises(DeviceError, match="trap"):
            runner.reordered(seed=step, blocks=blocks).run(bad)
        for found in (runner.run(given), runner.reordered(seed=step, blocks=5).run(given)):
            assert all(a.tobytes() == b.tobytes() for a, b in zip(found, expected, strict=True))
