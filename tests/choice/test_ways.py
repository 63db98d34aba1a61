"""Of the ways to place reductions the one is taken that is predicted to take least, and each says why."""

from __future__ import annotations

import pytest

import souffle
from benchmarks.recurrent import recurrent
from souffle import models
from souffle.choice import accepted, ways_taken
from souffle.decision import Decision

SPLIT = Decision("two-phase", "sum", True, "it leaves multiprocessors idle")
INTO = Decision("normalization", "rows of x", True, "predicted to take less")
REFUSED = Decision("normalization", "rows of y", False, "others read it")


def test_what_was_done_says_what_became_of_a_program() -> None:
    assert accepted((SPLIT, REFUSED, INTO)) == (SPLIT, INTO)


def test_each_way_but_the_first_says_whether_it_is_taken() -> None:
    (taken,) = ways_taken({(SPLIT,): 3e-6, (SPLIT, INTO): 2e-6})
    reason = "the network is predicted to take 2.0 µs with them and 3.0 µs without"
    assert taken == Decision("choice", "reductions placed by normalization", True, reason)
    (refused,) = ways_taken({(): 2e-6, (INTO,): 2e-6})
    assert not refused.accepted, "of equal ways the first is taken"
    assert ways_taken({(SPLIT,): 1.0}) == []


@pytest.mark.thorough("its results are in tests/test_models_all_levels.py")
@pytest.mark.xdist_group("bert")
def test_a_network_of_normalizations_is_staged_both_ways() -> None:
    how = {"target": "cuda", "arch": "sm_90", "device": "cpu", "cubin": False, "verify": "off", "precision": "mixed"}
    decisions = souffle.compile(models.build("bert"), **how).plan.decisions
    placed = [d for d in decisions if d.stage == "normalization" and d.accepted]
    choices = [d for d in decisions if d.stage == "choice" and d.subject.startswith("reductions placed by")]
    assert len(choices) <= 1 and bool(placed) == any(choice.accepted for choice in choices)


@pytest.mark.thorough("each way is in tests/placement")
def test_partial_steps_are_absorbed_whether_or_not_sums_are_interleaved() -> None:
    """So that neither takes the other from a network that is faster with one of them alone."""
    how = {"target": "cuda", "arch": "sm_90", "device": "cpu", "cubin": False, "verify": "off"}
    decisions = souffle.compile(recurrent("LSTM", 20, 44, steps=8, batch=2), **how).plan.decisions
    ways = [d.subject for d in decisions if d.stage == "choice" and d.subject.startswith("reductions placed by")]
    absorbed = [way for way in ways if "ramps" in way]
    assert {"interleaving" in way for way in absorbed} == {True, False}, ways
