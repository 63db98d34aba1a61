"""The planner of 2019 against brute force, on the papers' graphs, and where its parts say no."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from tvm import te

from souffle.cost import cost_device
from souffle.errors import OptionError
from souffle.stitching import FusionRequest, Kind, OpGraph, cycle_between, fusion_planner_for, graph_of, ilp
from souffle.stitching.exploration import explored_patterns, seeds_of
from souffle.stitching.ilp import best_patterns
from souffle.stitching.latency import LatencyEvaluator
from souffle.stitching.layout import layout_of
from souffle.stitching.model_score import ModelScore, is_complex, is_large_gemm
from souffle.stitching.substitution import partition_steps, substitution_patterns
from souffle.stitching.traffic import device_memory, volume_saved
from tests.stitching.graphs import (
    all_patterns,
    brute_force,
    cyclic,
    layer_norm,
    multi_interests,
    op,
    random_graph,
    rows_map,
)
from tests.testlib import Builder

A100 = cost_device("A100-SXM4-40GB")
PLANNER = fusion_planner_for("stitching-ilp")


def test_the_optimum_is_that_of_brute_force() -> None:
    rng = random.Random(16)
    cuts = 0
    for _ in range(200):
        graph = random_graph(rng, rng.randint(2, 10))
        patterns = all_patterns(graph, {*Kind} - {Kind.WINDOW, Kind.EXTERN})
        # Scores that share no rule, so that overlaps and cycles decide, and few enough to try every set.
        scores = {p: float(rng.randint(-3, 12)) for p in rng.sample(patterns, min(len(patterns), 14))}
        chosen, decisions = best_patterns(graph, scores)
        assert sum(scores[p] for p in chosen) == brute_force(graph, scores)
        cuts += len(decisions)
    assert cuts > 50


def test_a_cycle_is_cut_and_the_cut_is_told() -> None:
    """A -> B -> C, with A and C fused (003 Figure 3, 000 Figure 6)."""
    graph = cyclic()
    chosen, decisions = best_patterns(graph, {0b101: 1.0})
    assert chosen == ()
    (cut,) = decisions
    assert str(cut) == "[stitching] - fuse A + C: a cycle leads through C + A -> B -> C + A"
    assert cycle_between(graph, [[0, 2]]) == ((0,), cut.reason)


def test_a_cycle_through_two_patterns_costs_the_lesser_one() -> None:
    graph = OpGraph(
        (
            op("a", reads=[("x", None, 64)], written=64),
            op("b", reads=[("y", None, 64)], written=64),
            op("c", reads=[("a", 0, 64)], written=64, needed=True),
            op("d", reads=[("b", 1, 64)], written=64, needed=True),
        )
    )
    assert len(best_patterns(graph, {0b1001: 2.0, 0b0110: 3.0})[0]) == 1
    chosen, (cut,) = best_patterns(graph, {0b1001: 2.0, 0b0110: 3.0})
    assert chosen == (0b0110,) and "a + d" in cut.subject and "b + c" in cut.subject


def test_layer_normalization_is_one_pattern() -> None:
    plan = PLANNER.plan(FusionRequest(graph_of(layer_norm()), A100))
    assert len(plan.patterns) == 1 and len(plan.patterns[0]) == 10


def test_multi_interests_is_one_pattern_with_its_large_tensor_inside() -> None:
    """003 Figure 1, also at the 552 MB that the paper names for the result of its first product."""
    for batch in (256, 552 * 2**20 // (94 * 94 * 4)):
        graph = graph_of(multi_interests(batch))
        (pattern,) = PLANNER.plan(FusionRequest(graph, A100)).patterns
        assert len(pattern) == 13 and pattern.kinds.count(Kind.BATCHED_GEMM) == 2
        assert not graph.escapes(0, frozenset(pattern.members)) and graph.ops[0].written == batch * 94 * 94 * 4


def test_a_pattern_without_room_in_shared_memory_is_not_chosen() -> None:
    b = Builder()
    x = b.input(60_000)
    centred = b.add(lambda p, q: te.compute(p.shape, lambda i: p(i) - q()), x, b.reduce(x, 0))
    graph = graph_of(b.program(b.reduce(centred, 0, "max")))
    assert ModelScore(graph, A100)(0b111) > -1  # there is room, as the totals alone are kept: one block is slow
    b = Builder()
    x = b.input(1, 60_000)
    w = b.constant(np.ones((60_000, 2), np.float32))
    graph = graph_of(b.program(b.matmul(b.relu(x), w)))
    assert ModelScore(graph, A100)(0b11) < 0  # 240 KB of an operand that a block needs whole


def test_the_score_is_of_bytes_and_launches() -> None:
    graph = graph_of(layer_norm())
    # x is read once instead of twice; nine results stay inside, each written once; sub is read twice.
    rows, whole = 512 * 4, 512 * 768 * 4
    inside = sum((rows, rows, whole, whole, rows, rows, rows, whole, whole))
    read = sum((rows, rows, whole, whole, rows, rows, rows, whole, whole)) + whole
    assert volume_saved(graph, range(10)) == inside + read + whole
    memory = device_memory(A100)
    expected = memory.seconds(inside + read + whole) + 9 * A100.launch_seconds
    assert ModelScore(graph, A100)(0b1111111111) == pytest.approx(expected)
    volumes = [10**n for n in range(2, 10)]
    reached = [memory.utilization(v) for v in volumes]
    assert reached == sorted(reached) and reached[0] < 0.01 and reached[-1] > 0.99
    assert all(u == pytest.approx(v / memory.seconds(v) / memory.bandwidth) for u, v in zip(reached, volumes))


def test_complex_patterns_are_scored_by_time() -> None:
    """003 §4.3: products with reductions, and row with column or scalar reductions; here by the latency-evaluator."""
    kinds = [{Kind.ROW, Kind.LIGHT}, {Kind.COLUMN}, {Kind.COLUMN, Kind.EXPENSIVE}, {Kind.COLUMN, Kind.SCALAR}]
    assert not any(map(is_complex, kinds))
    assert all(is_complex({Kind.ROW, other}) for other in (Kind.COLUMN, Kind.SCALAR))
    assert all(is_complex({product, Kind.LIGHT}) for product in (Kind.GEMM, Kind.BATCHED_GEMM))
    b = Builder()
    x = b.input(2048, 2048)
    centred = rows_map(b, lambda v, m: v - m, x, b.reduce(x, 1), name="sub")
    graph = graph_of(b.program(b.reduce(centred, 0), b.reduce(centred, 1, "max")))
    whole = frozenset(range(4))
    evaluator = LatencyEvaluator(graph, A100)
    alone = [evaluator.kernel((number,)).seconds for number in sorted(whole)]
    expected = sum(alone) + 3 * A100.launch_seconds - evaluator.kernel(tuple(sorted(whole))).seconds
    assert ModelScore(graph, A100)(0b1111) == pytest.approx(expected)
    # Rows in one block and columns in another: bytes would be saved, and one block would do all the work.
    assert expected < 0 < device_memory(A100).seconds(volume_saved(graph, whole))
    assert len(PLANNER.plan(FusionRequest(graph, A100)).patterns) > 1


def test_what_is_left_to_one_block_is_scored_by_time() -> None:
    """Sums of rows whose readers are rows shifted by one, as in Swin's windows: no rows can be divided."""
    b = Builder()
    x = b.input(4096, 256)
    centred = rows_map(b, lambda v, m: v - m, x, b.reduce(x, 1), name="sub")
    graph = graph_of(b.program(b.relu(b.slice(centred, 0, 1, 4096))))
    assert [component.units for component in layout_of(graph, range(4)).components] == [1]
    saved = device_memory(A100).seconds(volume_saved(graph, range(4))) + 3 * A100.launch_seconds
    assert ModelScore(graph, A100)(0b1111) < 0 < saved
    assert len(PLANNER.plan(FusionRequest(graph, A100)).patterns) == 2


def test_substitution_takes_intervals_between_partition_operators() -> None:
    b = Builder()
    x = b.relu(b.input(2048, 2048))
    product = b.matmul(b.scaled(x, 2.0), b.constant(np.ones((2048, 2048), np.float32)))
    graph = graph_of(b.program(b.reduce(b.relu(b.tanh(product)), 0)))
    assert is_large_gemm(graph, 2, A100) and len(list(partition_steps(graph, A100))) == 6
    assert substitution_patterns(graph, A100) == (0b000011, 0b111000, 0b011000)


def test_exploration_starts_at_large_vertices_of_few_operands_and_gives_up_aloud() -> None:
    graph = graph_of(multi_interests())
    assert {0, 1, 4, 10} <= set(seeds_of(graph, A100)) and seeds_of(graph_of(multi_interests(1, 7, 3)), A100) == ()
    many = op("many", reads=[(f"x{n}", None, 1 << 24) for n in range(11)], written=1 << 24, needed=True)
    assert seeds_of(OpGraph((many,)), A100) == () and seeds_of(OpGraph((replace(many, reads=many.reads[1:]),)), A100)
    patterns, decisions = explored_patterns(graph, A100, most=5)
    assert decisions and "given up after 5 patterns" in decisions[0].reason and len(patterns) < 5 * len(graph.ops)


def test_the_solver_prints_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    PLANNER.plan(FusionRequest(graph_of(layer_norm()), A100))
    assert capfd.readouterr() == ("", "")


def test_the_planner_says_what_to_install_where_the_solver_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ilp, "highspy", None)
    with pytest.raises(OptionError, match=r"souffle-dl\[stitching\]"):
        PLANNER.plan(FusionRequest(graph_of(layer_norm()), A100))
