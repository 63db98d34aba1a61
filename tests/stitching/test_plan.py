"""A plan says what is wrong with it, prints one line a pattern, and planners are found by name."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path

import pytest

from benchmarks.stitching_scaling import random_graph as near_graph
from souffle.cost import cost_device
from souffle.errors import OptionError
from souffle.stitching import (
    FUSION_PLANNERS,
    FusionError,
    FusionPlan,
    FusionRequest,
    Kind,
    OpGraph,
    Scheme,
    cycle_between,
    fusion_planner_for,
    graph_of,
    plan_of,
)
from souffle.stitching.priority import AnnealedFusion
from tests.stitching.graphs import contracted_has_cycle, cyclic, layer_norm, random_graph
from tests.testlib import random_program

pytestmark = pytest.mark.sampled(2)

A100 = cost_device("A100-SXM4-40GB")


def test_a_valid_plan_prints_one_line_a_pattern() -> None:
    plan = plan_of(cyclic(), [[0, 1]], "by hand", scores={frozenset([0, 1]): 2e-6}, schemes={0: Scheme.THREAD})
    assert str(plan).splitlines() == [
        "by hand: 2 kernels, 2.00 us saved by its score",
        "  0: 2 TEs (1 light, 1 window; 2.00 us): A/thread B",
        "  1: 1 TE (1 light; 0.00 us): C",
    ]
    assert [pattern.name for pattern in plan.patterns] == ["B", "C"] and plan.fused == plan.patterns[:1]


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ([[0, 1], [1, 2]], "hand: TE B is in two patterns"),
        ([[0, 2]], r"hand: a cycle leads through C \+ A -> B -> C \+ A"),
    ],
)
def test_what_is_wrong_is_named(groups: list[list[int]], message: str) -> None:
    with pytest.raises(FusionError, match=message):
        plan_of(cyclic(), groups, "hand")


def test_a_plan_holds_every_te_in_an_order_in_which_kernels_can_run() -> None:
    graph = cyclic()
    whole = plan_of(graph, [], "hand").patterns
    with pytest.raises(FusionError, match="hand: TE B is in no pattern"):
        FusionPlan(whole[::2], "hand").check(graph)
    with pytest.raises(FusionError, match="hand: C stands before B, which it reads"):
        FusionPlan((whole[0], whole[2], whole[1]), "hand").check(graph)


def test_what_is_computed_again_is_no_dependence() -> None:
    """C with A computed again needs A's kernel no more, but what A reads."""
    graph = cyclic()
    plan = plan_of(graph, [[0, 1]], "hand", recomputed={frozenset([2]): [0]})
    assert "1 TE computed again" in str(plan) and plan.patterns[1].recomputed == (0,)
    with pytest.raises(FusionError, match="cycle"):
        plan_of(graph, [[0, 2]], "hand", recomputed={frozenset([1]): []})
    plan_of(graph, [[0, 2]], "hand", recomputed={frozenset([0, 2]): [1]})


def test_cycles_are_those_of_an_independent_check() -> None:
    rng = random.Random(3)
    seen = set()
    for _ in range(300):
        graph = random_graph(rng, rng.randint(3, 12))
        numbers = rng.sample(range(len(graph.ops)), rng.randint(2, len(graph.ops)))
        cuts = sorted(rng.sample(range(1, len(numbers)), min(2, len(numbers) - 1)))
        groups = [numbers[a:b] for a, b in zip([0, *cuts], [*cuts, len(numbers)])]
        expected = contracted_has_cycle([(a, b) for a, b, _ in graph.edges], [set(group) for group in groups])
        found = cycle_between(graph, groups)
        assert (found is not None) == expected
        seen.add(expected)
        if found is not None:
            assert contracted_has_cycle([(a, b) for a, b, _ in graph.edges], [set(groups[p]) for p in found[0]])
    assert seen == {True, False}


@cache
def random_graphs() -> list[OpGraph]:
    """300 programs, the same for all planners, and graphs of larger tensors."""
    rng = random.Random(16)
    graphs = [graph_of(random_program(rng.choice, rng.randint(2, 14), seed)) for seed in range(300)]
    return graphs + [random_graph(rng, rng.randint(1, 40)) for _ in range(20)]


# TVM's groups are read, not found: tests/stitching/test_fusion.py. What is learned is an extra: tests/learning.
FOUND = {name: planner for name, planner in FUSION_PLANNERS.items() if name not in ("tvm", "learned")}
FOUND["priority-annealing"] = AnnealedFusion(evaluations=20)


@pytest.mark.parametrize("planner", FOUND.values(), ids=FOUND)
def test_no_planner_gives_an_invalid_plan(planner) -> None:
    """On random programs and random graphs: checked by the plan, and by a check that shares no code with it."""
    fused = 0
    for graph in random_graphs():
        plan = planner.plan(FusionRequest(graph, A100))
        plan.check(graph)
        assert plan.planner == planner.name
        members = [set(pattern.members) for pattern in plan.patterns]
        assert sorted(n for group in members for n in group) == list(range(len(graph.ops)))
        again = {(p, n) for place, p in enumerate(plan.patterns) for n in p.recomputed}
        if not again:
            assert not contracted_has_cycle([(a, b) for a, b, _ in graph.edges], members)
        alone = {Kind.EXTERN} if planner.name.startswith("priority") else {Kind.WINDOW, Kind.EXTERN}
        assert not any(alone & set(pattern.kinds) for pattern in plan.fused)
        fused += len(plan.fused)
    assert fused > 300


@pytest.mark.parametrize(("planner", "count"), [("stitching-ilp", 30), ("stitching-dp", 10), ("xla-rules", 100)])
def test_no_planner_makes_a_cycle_of_many_small_tes(planner: str, count: int) -> None:
    """Vertices that read near ones: kernels of several outputs and TEs computed again are in one another's way."""
    for seed in range(count):
        graph = near_graph(40, seed)
        patterns = fusion_planner_for(planner).plan(FusionRequest(graph, A100)).patterns
        insides = [sum(1 << n for n in {*pattern.members, *pattern.recomputed}) for pattern in patterns]
        made = 0
        for inside, pattern in zip(insides, patterns):
            needed = {p for n in (*pattern.members, *pattern.recomputed) for p in graph.producers[n]}
            assert not sum(1 << n for n in needed) & ~(inside | made)
            made |= sum(1 << n for n in pattern.members)
        assert made == (1 << 40) - 1


def test_planners_are_found_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert all(
        fusion_planner_for(name) is planner and planner.name == name for name, planner in FUSION_PLANNERS.items()
    )
    with pytest.raises(
        OptionError, match=f"fusion='greedy' is not valid; choose one of souffle, {', '.join(FUSION_PLANNERS)}, or"
    ):
        fusion_planner_for("greedy")
    (tmp_path / "alone.py").write_text(ALONE)
    monkeypatch.syspath_prepend(str(tmp_path))
    graph = graph_of(layer_norm())
    assert len(fusion_planner_for("alone:Alone").plan(FusionRequest(graph, A100)).patterns) == len(graph.ops)
    with pytest.raises(OptionError, match="fusion='alone:Other' is no fusion planner: it lacks plan"):
        fusion_planner_for("alone:Other")


ALONE = """
from souffle.stitching import plan_of


class Alone:
    name = "alone"

    def plan(self, request):
        return plan_of(request.graph, [], self.name)


class Other:
    name = "other"
"""
