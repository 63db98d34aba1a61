"""The two figures that both papers begin with, as the models package builds them, on all GPUs that are described."""

from __future__ import annotations

import pytest

import souffle
from souffle.cost import cost_device, product_names
from souffle.models import build
from souffle.stitching import FusionRequest, Kind, OpGraph, fusion_planner_for, graph_of, traffic_of


@pytest.fixture(scope="module", params=["tiny", "paper"])
def graphs(request: pytest.FixtureRequest) -> dict[str, OpGraph]:
    names = ("layer-norm", "multi-interests")
    return {name: graph_of(souffle.import_onnx(build(name, request.param))) for name in names}


@pytest.mark.parametrize("product", product_names())
def test_layer_normalization_is_one_kernel_and_four_by_xla(graphs: dict[str, OpGraph], product: str) -> None:
    """000 Figure 1."""
    request = FusionRequest(graphs["layer-norm"], cost_device(product))
    kernels = {
        name: len(fusion_planner_for(name).plan(request).patterns)
        for name in ("stitching-ilp", "stitching-dp", "xla-rules")
    }
    assert kernels == {"stitching-ilp": 1, "stitching-dp": 1, "xla-rules": 4}


@pytest.mark.parametrize("product", product_names())
def test_multi_interests_is_one_kernel_and_passes_nothing_through_memory(
    graphs: dict[str, OpGraph], product: str
) -> None:
    """003 Figure 1: at paper size the result of the first product has 552 MB, and no byte of it is in memory."""
    graph = graphs["multi-interests"]
    plan = fusion_planner_for("stitching-ilp").plan(FusionRequest(graph, cost_device(product)))
    # Where a launch costs as little as on Hopper GPUs, what follows the second product may be a kernel of its own.
    pattern, *tail = plan.patterns
    assert not tail or (len(tail) == 1 and cost_device(product).arch == "sm_90")
    assert pattern.kinds.count(Kind.BATCHED_GEMM) == 2
    assert sum(one.kinds.count(Kind.ROW) for one in plan.patterns) == 2
    large = graph.ops[0].written
    moved = traffic_of(graph, plan)
    assert moved.between <= bool(tail) * large / 10 and not graph.escapes(0, frozenset(pattern.members))
    if large > 2**20:
        assert large == 16384 * 94 * 94 * 4 and moved.read + moved.written < large / 4
