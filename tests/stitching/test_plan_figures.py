"""Schemes, bytes, shared memory and seconds of plans, against numbers by hand and sums that share no code with them."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from tvm import te

from souffle.cost import cost_device
from souffle.stitching import (
    FUSION_PLANNERS,
    FusionRequest,
    OpGraph,
    Scheme,
    Traffic,
    fusion_planner_for,
    graph_of,
    plan_of,
    predicted_seconds,
    schemes_of,
    shared_plans,
    traffic_of,
)
from souffle.stitching.latency import LatencyEvaluator
from souffle.stitching.plan_figures import is_memory_intensive
from souffle.stitching.traffic import volume_saved
from souffle.stitching.tvm_groups import TvmGroups
from tests.stitching.graphs import cyclic, layer_norm, multi_interests, random_graph
from tests.testlib import Builder, random_program
from tests.thorough import sized

A100 = cost_device("A100-SXM4-40GB")
ROWS, WHOLE = 512 * 4, 512 * 768 * 4


def test_schemes_follow_from_what_is_kept() -> None:
    """000 Figure 1: means and their reciprocal root are one element of a row; 003 Figure 1: two products of 94."""
    graph = graph_of(layer_norm())
    schemes = schemes_of(graph, range(10))
    warp = [graph.ops[n].name for n in schemes if schemes[n] is Scheme.WARP]
    assert warp == ["sum0", "sum4", "rsqrt6"]
    assert schemes[9] is Scheme.PACKING and list(schemes.values()).count(Scheme.THREAD) == 6
    graph = graph_of(multi_interests())
    schemes = schemes_of(graph, range(13))
    block = [graph.ops[n].name for n in schemes if schemes[n] is Scheme.BLOCK]
    assert block == ["dot0", "add9", "dot10"]  # dot_1 and add of the paper (§5.4); ours has a reader behind the second


def test_members_that_nothing_connects_are_packed() -> None:
    b = Builder()
    graph = graph_of(b.program(b.relu(b.scaled(b.input(64), 2.0)), b.relu(b.scaled(b.input(32), 2.0))))
    assert list(schemes_of(graph, range(4)).values()) == [Scheme.THREAD, Scheme.PACKING] * 2


@pytest.mark.parametrize("planner", [name for name in FUSION_PLANNERS if name != "learned"])
def test_planners_leave_no_scheme_open(planner: str) -> None:
    rng = random.Random(1)
    for seed in range(sized(12, 40)):
        graph = graph_of(random_program(rng.choice, rng.randint(2, 12), seed))
        plan = fusion_planner_for(planner).plan(FusionRequest(graph, A100))
        for pattern in plan.fused:
            assert None not in pattern.schemes and Scheme.PACKING in pattern.schemes
            for shared in shared_plans(graph, pattern):
                assert shared.allocated <= shared.requested <= A100.shared_per_block * len(pattern)


def test_bytes_of_layer_normalization() -> None:
    graph = graph_of(layer_norm())
    one = fusion_planner_for("stitching-ilp").plan(FusionRequest(graph, A100))
    assert traffic_of(graph, one) == Traffic(WHOLE + 2 * 768 * 4, WHOLE, 0)
    four = fusion_planner_for("xla-rules").plan(FusionRequest(graph, A100))
    # x; x and its sum; the variance; x, its sum, the reciprocal root, gamma and beta, with the centred x made again.
    between = [ROWS, 2 * ROWS, 2 * ROWS, 2 * ROWS]
    assert [traffic_of(graph, four, [pattern]).between for pattern in four.patterns] == between
    assert traffic_of(graph, four) == Traffic(3 * WHOLE + 4 * ROWS + 2 * 768 * 4, WHOLE + 3 * ROWS, sum(between))


def test_the_large_tensor_of_003_figure_1_is_in_no_byte_of_memory() -> None:
    batch = 552 * 2**20 // (94 * 94 * 4)
    graph = graph_of(multi_interests(batch))
    plan = fusion_planner_for("stitching-ilp").plan(FusionRequest(graph, A100))
    large, operand = graph.ops[0].written, batch * 94 * 32 * 4
    total = traffic_of(graph, plan)
    # ``divide`` is an output of this graph, and as large.
    assert len(plan.patterns) == 1 and total == Traffic(3 * operand, large + batch * 94 * 4 + 2 * operand, 0)
    by_rules = fusion_planner_for("xla-rules").plan(FusionRequest(graph, A100))
    assert traffic_of(graph, by_rules).between > 4 * large


def test_bytes_that_a_pattern_saves_are_those_of_the_score() -> None:
    rng = random.Random(2)
    for _ in range(200):
        graph = random_graph(rng, rng.randint(2, 12))
        used = {n for producers in graph.producers for n in producers}
        graph = OpGraph(tuple(replace(op, needed=op.needed or n not in used) for n, op in enumerate(graph.ops)))
        members = rng.sample(range(len(graph.ops)), rng.randint(1, len(graph.ops)))
        if graph.is_convex(members):
            alone, fused = (traffic_of(graph, plan_of(graph, groups, "hand")) for groups in ([], [members]))
            saved = alone.read + alone.written - fused.read - fused.written
            assert saved == volume_saved(graph, members)


def test_what_is_computed_again_is_not_stored_again() -> None:
    graph = cyclic()
    plan = plan_of(graph, [[0, 1]], "hand", recomputed={frozenset([2]): [0]})
    size = graph.ops[0].written
    # A and B read x and write b; C reads x, computes A again, and reads b.
    assert traffic_of(graph, plan) == Traffic(3 * size, 2 * size, 2 * size)
    evaluator = LatencyEvaluator(graph, A100)
    again, both = evaluator.kernel((2,), recomputed=(0,)), evaluator.kernel((0, 2))
    assert again.seconds < both.seconds  # A stores its result for B there
    expected = evaluator.kernel((0, 1)).seconds + again.seconds + 2 * A100.launch_seconds
    assert predicted_seconds(graph, plan, A100) == pytest.approx(expected)


def test_shared_memory_is_requested_by_what_is_attached_by_block() -> None:
    """003 §5.4: the space of the first product is taken by ``add``, which all that is made of it passes through."""
    b = Builder()
    x = b.map(te.exp, b.input(4, 8, 8))
    for _ in range(3):

        def made(p):
            k = te.reduce_axis((0, 8), "k")
            return te.compute((4, 8, 8), lambda n, i, j: te.sum(p(n, i, k) * p(n, k, j), axis=[k]))

        x = b.add(made, x, name="dot")
    graph = graph_of(b.program(b.reduce(x, 2)))
    plan = plan_of(graph, [range(5)], "hand", schemes=schemes_of(graph, range(5)))
    (shared,) = shared_plans(graph, plan.patterns[0])
    assert plan.patterns[0].schemes[:4] == (Scheme.BLOCK,) * 4
    # A unit is a matrix of 64 elements; each product reads its operand while it is written, so two are alive.
    assert (shared.requested, shared.allocated) == (4 * 256, 2 * 256)


def test_kernels_of_v0_are_the_groups_of_tvm() -> None:
    b = Builder()
    first = b.grouped("first").relu(b.matmul(b.input(4, 8), b.input(8, 8)))
    graph = graph_of(b.program(b.grouped("second").tanh(first)))
    plan = TvmGroups().plan(FusionRequest(graph, A100))
    assert plan.planner == "tvm" and sum(map(is_memory_intensive, plan.patterns)) == 1
    assert len(TvmGroups().plan(FusionRequest(cyclic(), A100)).patterns) == 3
    groups = [{graph.ops[n].item.origin.group for n in pattern.members} for pattern in plan.patterns]
    assert all(len(group) == 1 for group in groups) and len(groups) == len(set.union(*groups))
