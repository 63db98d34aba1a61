"""What kernels are predicted to take, and where their stages become kernels of their own."""

from __future__ import annotations

import numpy as np
import pytest

import souffle
from souffle import models
from souffle.choice import KernelPrices
from souffle.cli.compare import compare, onnxruntime_outputs
from souffle.cost import cost_device
from souffle.cost.kernel import forecast_on
from souffle.kernel.dependences import TileDependences
from souffle.partition import PartitionRequest
from souffle.program import TEProgram
from souffle.runtime.explain import predicted_seconds
from souffle.schedule.gpu.device import device_for
from tests.testlib import Builder, inputs_for

HOW = {"target": "cuda", "arch": "sm_90", "cubin": False, "device": "cpu", "verify": "off"}


@pytest.mark.parametrize(("name", "graph"), [("bert", False), ("bert", True), ("mmoe", False), ("lstm", False)])
def test_the_choice_s_price_is_what_is_predicted_of_the_compiled_network(name: str, graph: bool) -> None:
    seen: dict[str, object] = {}

    def hook(step: str, result: object) -> object:
        seen[step] = result
        return result

    network = souffle.compile(models.build(name), level="V4", graph=graph, hook=hook, **HOW)
    stages, analysis, partition = seen["lower"], seen["analysis"], seen["partition"]
    forecast = forecast_on("sm_90", analysis.program, stages, graph=graph)
    request = PartitionRequest(stages, device_for("sm_90"), analysis, forecast)
    prices = KernelPrices(analysis.program.constants, TileDependences())
    kernels = [prices.kernel(subprogram, request, forecast) for subprogram in partition.subprograms]
    assert predicted_seconds(network.plan) == pytest.approx(sum(kernel.seconds for kernel in kernels))
    counted = [network.plan.kernels[launch.kernel].grid_syncs for launch in network.plan.launches]
    assert [kernel.grid_syncs for kernel in kernels] == counted
    assert prices.partition(partition, request, forecast) == pytest.approx(predicted_seconds(network.plan))


def test_stages_that_do_not_depend_on_each_other_share_a_barrier() -> None:
    b = Builder()
    x = b.input(64, 256)
    rng = np.random.default_rng(0)
    weights = [b.constant(rng.standard_normal((256, n)).astype(np.float32)) for n in (96, 128, 160)]
    first = [b.tanh(b.matmul(x, w)) for w in weights]
    program = b.program(*[b.matmul(y, b.constant(np.ones((y.shape[1], 64), np.float32))) for y in first])
    network = souffle.compile(program, level="V4", **HOW)
    (decision,) = (d for d in network.plan.decisions if d.stage == "choice")
    assert decision.accepted and "with 1 grid sync;" in decision.reason and len(network.plan.kernels[0].stages) == 4


def products(count: int) -> TEProgram:
    b = Builder()
    x = b.input(64, 256)
    rng = np.random.default_rng(0)
    for _ in range(count):
        x = b.matmul(x, b.constant(rng.standard_normal((256, 256)).astype(np.float32) / 16))
    return b.program(x)


def test_what_a_launch_costs_decides_where_kernels_end() -> None:
    """On an H200 a node of a graph costs less than a barrier of two blocks on each multiprocessor, a launch more."""
    device = cost_device("H200-SXM5-141GB")
    assert device.graph_node_seconds < device.shared_sync_seconds < device.launch_seconds
    model = models.build("bert")
    launched, graph = (souffle.compile(model, graph=graph, **HOW) for graph in (False, True))
    assert predicted_seconds(graph.plan) < predicted_seconds(launched.plan)
    assert "for a CUDA graph" in graph.explain() and "for a CUDA graph" not in launched.explain()
    inputs = models.random_inputs(model)
    result = compare(graph(inputs), onnxruntime_outputs(model, inputs), "fp32")
    assert result.ok, result


@pytest.mark.parametrize("level", ["V3", "V4"])
def test_levels_below_v4_keep_their_kernels(level: str) -> None:
    launched, graph = (souffle.compile(products(6), level=level, graph=graph, **HOW) for graph in (False, True))
    assert len(launched.plan.launches) == 1
    if level == "V3":
        assert graph.plan.kernels[0].grid_syncs == launched.plan.kernels[0].grid_syncs
        saved = predicted_seconds(launched.plan) - predicted_seconds(graph.plan)
        device = cost_device("H200-SXM5-141GB")
        assert saved == pytest.approx(device.launch_seconds - device.graph_node_seconds)


def test_the_option_is_kept(tmp_path) -> None:
    network = souffle.compile(products(2), graph=True, **HOW)
    network.save(tmp_path / "net.souffle")
    assert souffle.load(tmp_path / "net.souffle", device="cpu").plan.options.graph
    # The CPU device has no graphs, and runs it all the same.
    (found,) = network(inputs_for(products(2))).values()
    assert np.isfinite(found).all()
