"""The planner of 2021: its evaluators where they decide, its search against the optimum, and how its work grows."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from tvm import te

import souffle
from benchmarks.stitching_scaling import random_graph as near_graph
from souffle.cost import cost_device
from souffle.models import build
from souffle.program import TEProgram
from souffle.stitching import FusionRequest, Kind, OpGraph, Scheme, fusion_planner_for, graph_of
from souffle.stitching import latency as latency_module
from souffle.stitching.delta import DeltaScore
from souffle.stitching.ilp import best_patterns
from souffle.stitching.latency import SIMPLE_REGISTERS, LatencyEvaluator
from souffle.stitching.layout import layout_of
from souffle.stitching.reduction import TOP, candidates_of
from souffle.stitching.stitching_dp import BEAM, beam_search
from tests.stitching.graphs import all_patterns, brute_force, cyclic, layer_norm, multi_interests, op, rows_map
from tests.testlib import Builder, calls_made, random_program

A100 = cost_device("A100-SXM4-40GB")
PLANNER = fusion_planner_for("stitching-dp")


def mask(*numbers: int) -> int:
    return sum(1 << number for number in numbers)


def test_layer_normalization_is_one_pattern_with_its_totals_on_chip() -> None:
    graph = graph_of(layer_norm())
    plan = PLANNER.plan(FusionRequest(graph, A100))
    (pattern,) = plan.patterns
    attached = dict(zip(pattern.kinds, pattern.schemes))
    assert len(pattern) == 10 and attached[Kind.ROW] in (Scheme.WARP, Scheme.BLOCK)
    assert pattern.schemes[-1] is Scheme.PACKING and pattern.schemes[1] is Scheme.THREAD
    assert len(plan.decisions) == BEAM and sum(decision.accepted for decision in plan.decisions) == 1


def test_products_are_left_to_libraries() -> None:
    plan = PLANNER.plan(FusionRequest(graph_of(multi_interests()), A100))
    assert [len(p) for p in plan.patterns if Kind.BATCHED_GEMM in p.kinds] == [1, 1]
    assert len(plan.fused) == 2 and sum(map(len, plan.fused)) == 11


def test_a_pattern_in_a_cycle_is_no_candidate() -> None:
    graph = cyclic()
    candidates = candidates_of(graph, DeltaScore(graph, A100))
    assert candidates.of == [(mask(0),), (), (mask(2),)] and not candidates.is_convex(mask(0, 2))
    plan = PLANNER.plan(FusionRequest(graph, A100))
    assert len(plan.patterns) == 3
    assert str(plan.decisions[-1]) == "[stitching] - fuse A + C: a cycle leads through C + A -> B -> C + A"


def test_units_are_what_blocks_can_divide() -> None:
    b = Builder()
    x = b.input(6, 8)
    graph = graph_of(b.program(rows_map(b, lambda v, m: v - m, x, b.reduce(x, 1), name="sub")))
    (rows,) = layout_of(graph, (0, 1)).components
    assert (rows.units, rows.splits, rows.shared, rows.single) == (6, 1, {0: 4}, frozenset([0]))
    (alone,) = layout_of(graph, (0,)).components
    assert (alone.units, alone.splits, alone.shared) == (6, 8, {})
    b = Builder()
    x = b.input(6, 8)
    by_column = b.add(lambda p, q: te.compute(x.shape, lambda i, j: p(i, j) - q(j)), x, b.reduce(x, 0), name="sub")
    graph = graph_of(b.program(b.reduce(by_column, 1)))
    (column,) = layout_of(graph, (0, 1)).components
    (both,) = layout_of(graph, (0, 1, 2)).components
    assert column.units == 8 and (both.units, both.shared) == (1, {0: 32})  # rows and columns need one block


def test_members_without_dependence_are_components() -> None:
    b = Builder()
    graph = graph_of(b.program(b.relu(b.input(6, 8)), b.reduce(b.input(5, 7), 1)))
    assert [c.units for c in layout_of(graph, (0, 1)).components] == [48, 5]


def test_what_is_not_aligned_is_computed_again_where_nothing_is_kept() -> None:
    b = Builder()
    x = b.relu(b.input(6, 8))
    turned = b.slice(x, 0, 1, 6)  # rows 1 to 5: no chunk of rows of the one is one of the other
    graph = graph_of(b.program(turned))
    (component,) = layout_of(graph, (0, 1)).components
    assert component.members == (1,) and component.extra == (0,) and component.again[0] == pytest.approx(40 / 48)
    b = Builder()
    total = b.reduce(b.input(6, 8, 4), 2)
    graph = graph_of(b.program(b.slice(total, 0, 1, 6)))
    (component,) = layout_of(graph, (0, 1)).components
    assert component.members == (0, 1) and component.units == 8  # sums are kept, so rows cannot be divided


def test_what_is_kept_is_in_one_block_only() -> None:
    """An expensive row that each of six rows reads: kept, so that no block computes it again; light, in all of them."""
    for function, units, again in ((te.exp, 1, 1), (lambda v: v * 2.0, 6, 6)):
        b = Builder()
        x, row = b.input(6, 8), b.map(function, b.input(8))
        scaled = b.add(lambda p, q: te.compute((6, 8), lambda i, j: p(i, j) * q(j)), x, row, name="mul")
        graph = graph_of(b.program(b.reduce(scaled, 1)))
        (component,) = layout_of(graph, (0, 1, 2)).components
        assert (component.units, component.again[0]) == (units, again)
        assert component.shared.keys() == {1: {0}, 6: set()}[units]


def test_a_reduction_of_everything_is_not_fused_with_what_needs_it_in_every_block() -> None:
    """000 §2.3: reuse needs one block; apart, many blocks reduce and many read."""
    b = Builder()
    x = b.input(4096, 1024)
    total = b.reduce(b.reshape(x, 4096 * 1024), 0)
    graph = graph_of(
        b.program(b.add(lambda p, q: te.compute(x.shape, lambda i, j: p(i, j) - q()), x, total, name="sub"))
    )
    score = DeltaScore(graph, A100)
    assert graph.ops[1].kind is Kind.SCALAR and score(mask(1, 2)) < 0 < score(mask(0, 1))
    small = Builder()
    y = small.input(16)
    few = graph_of(
        small.program(small.add(lambda p, q: te.compute((16,), lambda i: p(i) - q()), y, small.reduce(y, 0)))
    )
    assert DeltaScore(few, A100)(mask(0, 1)) > 0


def test_latency_is_waves_times_instructions_times_cpi() -> None:
    """One light operation, one load that is waited for, and as many bytes stored, of each of so many elements."""
    for elements in (1 << 10, 1 << 26):
        b = Builder()
        graph = graph_of(b.program(b.scaled(b.input(elements), 2.0)))
        found = LatencyEvaluator(graph, A100, simplified=True).kernel((0,))
        warps, most = elements / 32, 64 * A100.sm_count
        resident = min(max(1.0, warps / A100.sm_count), 64.0)
        per_clock = A100.memory_bytes_per_second / A100.clock_hz / A100.sm_count
        memory = max(A100.memory_latency_clocks, resident * 32 * (4 + 4) / per_clock)
        arithmetic = max(A100.arithmetic_latency_clocks, resident * 32 / A100.fp32_per_clock_per_sm)
        cycles = max(1.0, warps / most) * (memory + arithmetic)
        assert found.registers == SIMPLE_REGISTERS and found.seconds == pytest.approx(cycles / A100.clock_hz)
    streamed = 2 * 4 * elements / A100.memory_bytes_per_second
    assert streamed < found.seconds < 2 * streamed


def test_what_is_read_again_comes_from_the_l2_cache() -> None:
    """A bias of a row costs no more bytes of memory than its own; a tensor that the cache has no room for does."""
    small, large = (
        LatencyEvaluator(graph_of(rows_times(columns)), A100).kernel((0,)).seconds * A100.memory_bytes_per_second
        for columns in (256, 1 << 24)
    )
    tensor = 64 * (1 << 24) * 4
    assert 2 * tensor < small < 2.5 * tensor and 3 * tensor < large < 3.5 * tensor


def rows_times(columns: int) -> TEProgram:
    """2^30 elements, each with one of a row of so many."""
    b = Builder()
    x, row = b.input((1 << 30) // columns, columns), b.input(columns)
    return b.program(b.add(lambda p, q: te.compute(x.shape, lambda i, j: p(i, j) + q(j)), x, row))


def test_loads_between_two_kept_results_wait_together() -> None:
    """Few elements, so that latencies count: of six sums one load is waited for, and one more behind each sum."""

    def latency(behind: bool) -> float:
        b = Builder()
        total = b.input(4, 64)
        for _ in range(6):
            other = b.input(4, 64)
            total = (
                rows_map(b, lambda v, m: v + m, other, b.reduce(total, 1), name="add")
                if behind
                else b.plus(total, other)
            )
        graph = graph_of(b.program(total))
        return LatencyEvaluator(graph, A100).kernel(tuple(range(len(graph.ops)))).seconds * A100.clock_hz

    assert latency(False) < 2 * A100.memory_latency_clocks and latency(True) > 6 * A100.memory_latency_clocks


def test_a_block_takes_rows_together_where_lanes_would_do_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """003 Figure 1: of a row of 94 elements one is left, and with a warp for each row 31 lanes would do nothing."""
    b = Builder()
    total = b.reduce(b.map(te.exp, b.input(1 << 20, 94)), 1)
    for _ in range(4):
        total = b.map(te.log, total)
    graph = graph_of(b.program(total))
    members = tuple(range(len(graph.ops)))
    (component,) = layout_of(graph, members).components
    found = LatencyEvaluator(graph, A100).kernel(members)
    assert (found.threads, found.shared_bytes) == ((256,), 32 * component.peak)
    monkeypatch.setattr(latency_module, "_TOGETHER", ())
    assert found.seconds < 0.8 * LatencyEvaluator(graph, A100).kernel(members).seconds


def test_shared_memory_beyond_a_block_has_no_kernel() -> None:
    small = replace(A100, shared_per_block=64)
    b = Builder()
    x = b.input(1, 64)
    totals = b.reduce(b.reshape(b.tanh(x), 64, 1), 1)
    graph = graph_of(
        b.program(b.reduce(b.add(lambda p, q: te.compute((64,), lambda i: p(i) + q(0)), totals, totals), 0))
    )
    members = tuple(range(len(graph.ops)))
    assert LatencyEvaluator(graph, A100).kernel(members).seconds < float("inf")
    assert LatencyEvaluator(graph, small).kernel(members).seconds == float("inf")


def test_registers_follow_life_times() -> None:
    b = Builder()
    x = b.input(64)
    values = [b.scaled(x, float(n + 2)) for n in range(6)]
    total = values[0]
    for value in values[1:]:
        total = b.plus(total, value)
    graph = graph_of(b.program(total))
    chain = Builder()
    one = chain.input(64)
    for _ in range(10):
        one = chain.relu(one)
    other = graph_of(chain.program(one))
    wide, deep = (LatencyEvaluator(g, A100).kernel(tuple(range(len(g.ops)))).registers for g in (graph, other))
    assert wide - deep >= 4


def test_candidates_start_with_their_vertex_and_are_the_best_few() -> None:
    graph = graph_of(layer_norm())
    score = DeltaScore(graph, A100)
    candidates = candidates_of(graph, score)
    for number, patterns in enumerate(candidates.of):
        assert 1 <= len(patterns) <= TOP and all(p & -p == 1 << number for p in patterns)
        assert [score(p) for p in patterns] == sorted((score(p) for p in patterns), reverse=True)
    assert candidates.of[0][0] == mask(*range(10))


def test_three_consumers_can_all_join() -> None:
    b = Builder()
    x = b.relu(b.input(4096, 512))
    outputs = [b.scaled(x, float(n + 2)) for n in range(5)]
    graph = graph_of(b.program(*outputs))
    assert candidates_of(graph, DeltaScore(graph, A100)).of[0][0] == mask(*range(6))


def times(left, right):
    return left * right


def test_ways_that_join_again_are_one_pattern() -> None:
    """The cell of an LSTM: no two of the four gates make a pattern with their sum that is in no cycle."""
    b = Builder()
    gates, cell = b.plus(b.input(4, 256), b.input(4, 256)), b.input(4, 64)
    kept, taken, shown, new = (b.map(te.tanh, b.slice(gates, 1, 64 * n, 64 * n + 64)) for n in range(4))
    cell = b.plus(b.map(times, kept, cell), b.map(times, taken, new))
    graph = graph_of(b.program(cell, b.map(times, shown, b.map(te.tanh, cell))))
    assert candidates_of(graph, DeltaScore(graph, A100)).of[0][0] == mask(*range(len(graph.ops)))
    b = Builder()
    x = b.relu(b.input(8, 8))
    graph = graph_of(b.program(b.plus(b.matmul(x, b.input(8, 8)), x)))
    found = candidates_of(graph, DeltaScore(graph, A100))
    assert found.completed(mask(0, 2)) == 0 and found.of[0] == (mask(0),)  # the product between them is no TE to fuse


def test_a_consumer_is_joined_alone_where_its_candidates_reach_too_far() -> None:
    """003 Figure 1: all that is worth something behind the sum is divided by it, and needs the second product first."""
    graph = graph_of(souffle.import_onnx(build("multi-interests", "paper")))
    exponential = next(n for n, op in enumerate(graph.ops) if op.name == "Exp")
    total, product = graph.consumers[exponential]
    assert (graph.ops[total].kind, graph.ops[product].kind) == (Kind.ROW, Kind.BATCHED_GEMM)
    (pattern,) = (p for p in PLANNER.plan(FusionRequest(graph, A100)).patterns if exponential in p.members)
    assert total in pattern.members and product not in pattern.members


def test_what_is_left_of_an_overlapping_candidate_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    b = Builder()
    left, right = (b.relu(b.scaled(b.input(64), 2.0)) for _ in range(2))
    graph = graph_of(b.program(b.plus(left, right)))
    candidates = candidates_of(graph, DeltaScore(graph, A100))
    candidates.of[:] = [(mask(0, 1, 4),), (), (mask(2, 3, 4),), (), ()]
    monkeypatch.setattr(candidates, "remote", lambda patterns: [])
    assert beam_search(candidates)[0] == (mask(0, 1, 4), mask(2, 3))


def test_remote_patterns_are_packed() -> None:
    """000 Figure 5: patterns without a common producer or consumer become one kernel."""
    b = Builder()
    sides = [b.relu(b.scaled(b.input(64), 2.0)) for _ in range(2)]
    plan = PLANNER.plan(FusionRequest(graph_of(b.program(*sides)), A100))
    (pattern,) = plan.patterns
    assert pattern.schemes == (Scheme.THREAD, Scheme.PACKING, Scheme.THREAD, Scheme.PACKING)


def test_what_lies_between_patterns_that_are_joined_is_joined_whole() -> None:
    b = Builder()
    x = b.relu(b.input(64))
    side = b.scaled(b.scaled(b.input(64), 2.0), 3.0)
    graph = graph_of(b.program(b.tanh(b.relu(b.plus(x, side)))))
    candidates = candidates_of(graph, DeltaScore(graph, A100))
    parts = (mask(0), mask(1, 2), mask(3, 4), mask(5))
    whole = {number: part for part in parts for number in range(6) if part >> number & 1}
    assert candidates.completed(mask(0, 5)) == mask(0, 3, 4, 5)
    assert candidates.completed(mask(1, 4), whole) == mask(1, 2, 3, 4)


def test_remote_fusion_gains_and_takes_no_pattern_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    better = 0
    for seed in range(8):
        graph = near_graph(30, seed)
        candidates = candidates_of(graph, DeltaScore(graph, A100))
        joined = beam_search(candidates)[0]
        monkeypatch.setattr(candidates, "remote", lambda patterns: [])
        gain, before = (sum(map(candidates.score, plan)) for plan in (joined, beam_search(candidates)[0]))
        better += gain > before
        for plan in beam_search(candidates):
            assert gain >= sum(map(candidates.score, plan))
    assert better >= 4


def test_plans_whose_patterns_need_each_other_are_not_made() -> None:
    """Each of a + d and b + c is fine alone."""
    large = 1 << 22
    graph = OpGraph(
        (
            op("a", reads=[("x", None, large)], written=large),
            op("b", reads=[("y", None, large)], written=large),
            op("c", reads=[("a", 0, large)], written=large, needed=True),
            op("d", reads=[("b", 1, large)], written=large, needed=True),
        )
    )
    candidates = candidates_of(graph, DeltaScore(graph, A100))
    candidates.of[:] = [(mask(0, 3),), (mask(1, 2),), (), ()]
    assert all(len(plan) <= 1 for plan in beam_search(candidates))


def test_the_gap_to_the_optimum_under_the_same_score() -> None:
    """The optimum by the integer linear program over all patterns, which brute force confirms on the small ones."""
    rng = random.Random(5)
    gaps = []
    for seed in range(400):
        graph = graph_of(random_program(rng.choice, rng.randint(2, 6), seed))
        if not 3 <= len(graph.ops) <= 8:
            continue
        score = DeltaScore(graph, A100)
        scores = {
            pattern: score(pattern)
            for pattern in all_patterns(graph, {Kind.LIGHT, Kind.EXPENSIVE, Kind.ROW, Kind.COLUMN, Kind.SCALAR})
        }
        best = sum(scores[p] for p in best_patterns(graph, scores)[0])
        if len(graph.ops) <= 4:
            assert best == pytest.approx(brute_force(graph, scores), rel=1e-9)
        found = max(sum(map(score, plan)) for plan in beam_search(candidates_of(graph, score)))
        assert found <= best * (1 + 1e-9)
        if best:
            gaps.append(1 - found / best)
        if len(gaps) == 60:
            break
    assert len(gaps) == 60 and np.mean(gaps) < 0.05


def test_work_grows_with_vertices_and_edges() -> None:
    def calls(layers: int) -> float:
        b = Builder()
        x = b.input(64, 32)
        for _ in range(layers):
            x = b.matmul(b.relu(rows_map(b, lambda v, m: v - m, x, b.reduce(x, 1), name="sub")), b.input(32, 32))
        graph = graph_of(b.program(x))
        return calls_made(lambda: PLANNER.plan(FusionRequest(graph, A100))) / (len(graph.ops) + len(graph.edges))

    assert calls(32) < 1.5 * calls(8)
