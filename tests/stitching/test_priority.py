"""Priority fusion (002): held against a slow one that shares no code with it, and the example of the paper's figure."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest
from tvm import te

import souffle
from souffle import models
from souffle.certificate import PROVEN
from souffle.cli.compare import compare, onnxruntime_outputs
from souffle.cost import cost_device
from souffle.errors import OptionError
from souffle.learning.problem import GraphFeatures
from souffle.stitching import FusionRequest, Kind, OpGraph, graph_of, predicted_seconds
from souffle.stitching.graph import members_of
from souffle.stitching.latency import LatencyEvaluator
from souffle.stitching.priority import (
    FEATURES,
    AnnealedFusion,
    DefaultFusion,
    FusionEnvironment,
    FusionRules,
    GreedyFusion,
    PatternPrices,
    PriorityFusion,
    anneal,
    by_priority,
    by_saved_bytes,
    topological,
)
from tests.stitching.graphs import contracted_has_cycle, op, random_graph
from tests.testlib import Builder, random_program
from tests.thorough import some

pytestmark = pytest.mark.sampled(4)

A100 = cost_device("A100-SXM4-40GB")
H200 = cost_device("H200-SXM5-141GB")


def some_graphs(count: int) -> list[OpGraph]:
    """Of random programs, of random vertices, and of networks."""
    rng = random.Random(20)
    graphs = [graph_of(random_program(rng.choice, rng.randint(1, 14), seed)) for seed in range(count)]
    graphs += [random_graph(rng, rng.randint(1, 30)) for _ in range(count)]
    return graphs + [graph_of(souffle.import_onnx(models.build(name))) for name in ("mmoe", "nmt", "efficientnet")]


def slowly_fused(graph: OpGraph, order: Sequence[int], rules: FusionRules) -> set[frozenset[int]]:
    """The kernels by the definition: sets of vertices, every cycle looked for in the whole graph, no price kept."""
    evaluator = LatencyEvaluator(graph, A100)
    kernels = [{number} for number in range(len(graph.ops))]
    edges = [(producer, consumer) for producer, consumer, _ in graph.edges]
    size = {(producer, consumer): count for producer, consumer, count in graph.edges}

    def seconds(kernel: set[int]) -> float:
        return evaluator.kernel(tuple(sorted(kernel))).seconds + A100.launch_seconds

    def products(kernel: set[int]) -> int:
        return sum(graph.ops[n].kind in (Kind.GEMM, Kind.BATCHED_GEMM, Kind.WINDOW) for n in kernel)

    for number in order:
        producers = sorted((-size[a, b], a) for a, b in edges if b == number)
        consumers = sorted((-size[a, b], b) for a, b in edges if a == number)
        for _, partner in producers + consumers:
            own = next(kernel for kernel in kernels if number in kernel)
            other = next(kernel for kernel in kernels if partner in kernel)
            both = own | other
            if Kind.EXTERN in {graph.ops[number].kind, graph.ops[partner].kind} or own is other:
                continue
            if len(both) > rules.limit or products(both) > rules.products:
                continue
            if not seconds(both) <= seconds(own) + seconds(other) + rules.loss or seconds(both) == float("inf"):
                continue
            rest = [kernel for kernel in kernels if kernel is not own and kernel is not other]
            if not contracted_has_cycle(edges, [*rest, both]):
                kernels = [*rest, both]
                break
    return set(map(frozenset, kernels))


@pytest.mark.parametrize(
    "rules",
    [
        FusionRules(),
        FusionRules(limit=3),
        FusionRules(limit=64, products=3, loss=float("inf")),
        FusionRules(products=0),
    ],
    ids=str,
)
def test_kernels_are_those_of_the_definition(rules: FusionRules) -> None:
    draws = np.random.default_rng(1)
    fused = 0
    for graph in some_graphs(25):
        fusion = PriorityFusion(graph, PatternPrices(graph, A100), rules)
        order = draws.permutation(len(graph.ops)).tolist()
        kernels = fusion(order)
        assert {frozenset(members_of(kernel)) for kernel in kernels} == slowly_fused(graph, order, rules)
        made = 0  # in an order in which they can run
        for kernel in kernels:
            assert not any(1 << p & ~(made | kernel) for n in members_of(kernel) for p in graph.producers[n])
            made |= kernel
        assert made == (1 << len(graph.ops)) - 1
        fused += len(graph.ops) - len(kernels)
    assert fused > 100 * rules.products


def test_equal_patterns_have_one_price_and_it_is_the_evaluators() -> None:
    """The prices of patterns drawn at random, of equal layers too, are those of an evaluator that keeps none."""
    draws = random.Random(4)
    asked = predicted = 0
    for name in ("bert", "swin", "mmoe", "bi-rnn"):
        graph = graph_of(souffle.import_onnx(models.build(name)))
        prices, evaluator = PatternPrices(graph, H200), LatencyEvaluator(graph, H200)
        for _ in range(400):
            pattern = 1 << draws.randrange(len(graph.ops))
            for _ in range(draws.randrange(6)):
                near = {o for n in members_of(pattern) for o in (*graph.producers[n], *graph.consumers[n])}
                pattern |= 1 << draws.choice([*near, *members_of(pattern)])
            assert prices(pattern) == evaluator.kernel(tuple(members_of(pattern))).seconds + H200.launch_seconds
        asked, predicted = asked + 400, predicted + prices.predicted
    assert predicted < 0.8 * asked


def figure_2() -> OpGraph:
    """The paper's: of two vertices in a kernel, the product and the reduction save traffic, those behind it none."""
    b = Builder()
    x, y = b.input(10_000, 10_000), b.input(10_000, 10_000)
    product = b.add(lambda p, q: te.compute(p.shape, lambda i, j: p(i, j) * q(i, j)), x, y, name="Mul")
    return graph_of(b.program(b.map(te.sigmoid, b.reduce(product, 1), name="Sigmoid")))


def test_the_order_decides_what_is_fused() -> None:
    """002 Figure 2, where a kernel has at most two vertices."""
    graph = figure_2()
    fusion = PriorityFusion(graph, PatternPrices(graph, A100), FusionRules(limit=2))
    good, bad = fusion([1, 0, 2]), fusion([2, 1, 0])
    assert good == [0b011, 0b100] and bad == [0b001, 0b110]
    assert fusion.seconds(good) < 0.7 * fusion.seconds(bad)
    assert fusion(topological(graph)) == good and fusion(by_saved_bytes(graph)) == good
    assert fusion([]) == [0b001, 0b010, 0b100]


def test_default_order_is_a_queue_of_what_is_ready() -> None:
    """By hand: A, D stand without producers; B reads A, C reads A and D, E reads B."""
    graph = OpGraph(
        (
            op("A", reads=[], written=4),
            op("B", reads=[("a", 0, 4)], written=4),
            op("E", reads=[("b", 1, 4)], written=4, needed=True),
            op("D", reads=[], written=4),
            op("C", reads=[("a", 0, 4), ("d", 3, 4)], written=4, needed=True),
        )
    )
    assert topological(graph) == [0, 3, 1, 4, 2]
    ranks = np.argsort(topological(graph))
    assert by_priority(ranks, np.zeros(5)) == [0, 3, 1, 4, 2]
    assert by_priority(ranks, np.array([0, 0, 7, 0, 3])) == [2, 4, 0, 3, 1]


def test_an_environment_says_what_its_plan_takes() -> None:
    draws = np.random.default_rng(3)
    for graph in some_graphs(5):
        environment = FusionEnvironment(graph, A100, name="some")
        priorities = draws.integers(0, 8, len(graph.ops))
        kernels = environment.kernels(priorities)
        evaluator = LatencyEvaluator(graph, A100)
        expected = sum(evaluator.kernel(tuple(members_of(k))).seconds + A100.launch_seconds for k in kernels)
        assert environment.seconds(priorities) == pytest.approx(expected)
        assert environment.seconds(priorities) <= environment.baseline_seconds and environment.evaluations == 2
        plan = DefaultFusion().plan(FusionRequest(graph, A100))
        assert environment.seconds(np.zeros(len(graph.ops))) == pytest.approx(predicted_seconds(graph, plan, A100))
        saved = environment.baseline_seconds - predicted_seconds(graph, plan, A100)
        assert plan.score == pytest.approx(saved, abs=1e-12)


def test_features_are_finite_small_and_of_no_name() -> None:
    for graph in some_graphs(5):
        features = FusionEnvironment(graph, A100, name="some").features
        assert isinstance(features, GraphFeatures) and features.name == "some"
        assert features.nodes.shape == (len(graph.ops), len(FEATURES)) and features.nodes.dtype == np.float32
        assert np.isfinite(features.nodes).all() and np.abs(features.nodes).max() <= 3
        assert features.edges.shape == (2, len(graph.edges)) and features.edge_weights.shape == (len(graph.edges),)
        assert (features.edges[0] < features.edges[1]).all()
    assert not any(name.lower() in {"bert", "softmax"} for name in FEATURES)


def test_annealing_is_a_search_with_a_number_of_evaluations() -> None:
    graph = graph_of(souffle.import_onnx(models.build("var-encoder", "paper")))
    environment = FusionEnvironment(graph, A100)
    count, scale = len(graph.ops), environment.baseline_seconds
    one = anneal(environment.seconds, count, scale, 300, seed=1)
    assert environment.evaluations == 300 and one.seconds == environment.seconds(one.priorities)
    assert one.seconds < environment.seconds(np.zeros(count))
    again = anneal(environment.seconds, count, scale, 300, seed=1)
    assert again.seconds == one.seconds and np.array_equal(again.priorities, one.priorities)
    assert anneal(environment.seconds, count, scale, 1).seconds == environment.seconds(np.zeros(count))


@pytest.mark.parametrize(
    ("planner", "level", "name"),
    some([("priority-greedy", "V2", "var-encoder")], [("priority-default", "V4", "nmt")]),
)
def test_networks_are_right_and_proven(planner: str, level: str, name: str) -> None:
    model = models.build(name)
    options = {"target": "cuda", "arch": "sm_80", "cubin": False, "device": "cpu", "verify": "values"}
    network = souffle.compile(model, fusion=planner, level=level, **options)
    assert network.certificate.verdict == PROVEN
    inputs = models.random_inputs(model, seed=3)
    result = network.on("cpu", order="shuffled", seed=2)(inputs)
    assert compare({k: np.asarray(v) for k, v in result.items()}, onnxruntime_outputs(model, inputs), "fp32").ok
    assert any(
        one.stage == "priority" and "us by the latency-evaluator" in one.reason for one in network.plan.decisions
    )


def test_annealed_plans_are_no_slower_than_those_of_the_default_order() -> None:
    for graph in some_graphs(4):
        request = FusionRequest(graph, A100)
        plans = [
            AnnealedFusion(evaluations=40).plan(request),
            DefaultFusion().plan(request),
            GreedyFusion().plan(request),
        ]
        seconds = [predicted_seconds(graph, plan, A100) for plan in plans]
        assert seconds[0] <= seconds[1] * (1 + 1e-12)


def test_what_is_wrong_is_said() -> None:
    with pytest.raises(OptionError, match=r"limit=0, products=1, loss=0\.0 are not valid; limit is at least 1"):
        FusionRules(limit=0)
    with pytest.raises(OptionError, match=r"policy='mine' is for a fusion planner that is trained; give fusion="):
        souffle.compile(models.build("mmoe"), target="cuda", policy="mine")
