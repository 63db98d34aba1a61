"""What kernels are predicted to take, and where their stages become kernels of their own."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import souffle
from souffle import models
from souffle.choice import ChosenKernels, KernelPrices, choose_kernels
from souffle.cli.compare import compare, onnxruntime_outputs
from souffle.cost import KernelForecast, cost_device
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

    # What stays in shared memory is chosen after it, where stages then take no longer.
    network = souffle.compile(models.build(name), level="V4", graph=graph, hook=hook, disable=["resident"], **HOW)
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
    (decision,) = (d for d in network.plan.decisions if d.stage == "choice" and d.subject.startswith("one kernel"))
    assert decision.accepted and "with 1 grid sync;" in decision.reason and len(network.plan.kernels[0].stages) == 4


def products(count: int) -> TEProgram:
    b = Builder()
    x = b.input(64, 256)
    rng = np.random.default_rng(0)
    for _ in range(count):
        x = b.matmul(x, b.constant(rng.standard_normal((256, 256)).astype(np.float32) / 16))
    return b.program(x)


def unequal() -> TEProgram:
    """Products that no loop runs."""
    b = Builder()
    x, widths = b.input(64, 256), (192, 320, 128, 256)
    for inner, outer in zip((256, *widths), widths, strict=False):
        x = b.matmul(x, b.constant(np.full((inner, outer), 1 / inner, np.float32)))
    return b.program(x)


def chosen(program: TEProgram, sync: float) -> ChosenKernels:
    """The kernels of a program on a GPU whose barriers take so many seconds."""
    seen: dict[str, object] = {}

    def hook(step: str, result: object) -> object:
        seen[step] = result
        return result

    souffle.compile(program, level="V3", hook=hook, **HOW)
    stages, analysis, partition = seen["lower"], seen["analysis"], seen["partition"]
    device = replace(cost_device("H200-SXM5-141GB"), grid_sync_points=((16, sync),))
    forecast = KernelForecast(device, stages, {*analysis.program.inputs, *analysis.program.constants})
    request = PartitionRequest(stages, device_for("sm_90"), analysis, forecast)
    prices = KernelPrices(analysis.program.constants, TileDependences())
    return choose_kernels(partition, request, forecast, prices)


def test_where_barriers_cost_more_than_launches_stages_are_kernels() -> None:
    whole, apart = chosen(unequal(), 1e-6), chosen(unequal(), 50e-6)
    (count,) = (len(subprogram.stages) for subprogram in whole.partition.subprograms)
    assert count >= 4 and whole.partition.decisions[-1].accepted
    assert [len(subprogram.stages) for subprogram in apart.partition.subprograms] == [1] * count
    decision = apart.partition.decisions[-1]
    assert not decision.accepted and f"grid syncs; the {count} runs of its stages" in decision.reason
    # With launches, which cost what they did, as much as is said of the stages on their own.
    assert f"kernels of their own {apart.seconds * 1e6:.1f} µs launched one by one" in decision.reason
    assert not whole.worth_unrolling and not apart.worth_unrolling


def test_a_loop_whose_steps_would_be_kernels_is_worth_taking_apart() -> None:
    whole, apart = chosen(products(6), 1e-6), chosen(products(6), 50e-6)
    assert not whole.worth_unrolling
    ((name, reason),) = apart.worth_unrolling.items()
    assert "predicted with a kernel for each stage of its steps" in reason
    assert name in {unit.name for subprogram in apart.partition.subprograms for unit in subprogram.stages}


def test_a_network_for_a_graph_is_right() -> None:
    model = models.build("bert")
    launched, graph = (souffle.compile(model, graph=graph, **HOW) for graph in (False, True))
    assert predicted_seconds(graph.plan) < predicted_seconds(launched.plan)
    assert "for a CUDA graph" in graph.explain() and "for a CUDA graph" not in launched.explain()
    inputs = models.random_inputs(model)
    result = compare(graph(inputs), onnxruntime_outputs(model, inputs), "fp32")
    assert result.ok, result


def test_levels_below_v4_keep_their_kernels() -> None:
    launched, graph = (souffle.compile(products(6), level="V3", graph=graph, **HOW) for graph in (False, True))
    assert len(launched.plan.launches) == 1
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
