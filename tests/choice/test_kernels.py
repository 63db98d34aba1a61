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
from souffle.partition import ONE_KERNEL_PER_STAGE, Partition, PartitionRequest, Planner, planner_for
from souffle.partition.planner import is_extern
from souffle.program import TEProgram
from souffle.runtime.explain import predicted_seconds
from souffle.schedule.gpu.device import device_for
from souffle.schedule.stage import LoopStage
from tests.testlib import Builder, inputs_for
from tests.thorough import some

HOW = {"target": "cuda", "arch": "sm_90", "cubin": False, "device": "cpu", "verify": "off"}
SOUFFLE = planner_for("souffle")


def priced(name: str, graph: bool) -> souffle.Network:
    """A network whose price in the choice is what is predicted of it once it is compiled."""
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
    return network


def test_the_choice_s_price_is_what_is_predicted_of_the_compiled_network() -> None:
    """BERT's is below, of launches and of a graph."""
    priced("mmoe", graph=False)


def test_stages_that_do_not_depend_on_each_other_share_a_barrier() -> None:
    b = Builder()
    x = b.input(64, 256)
    rng = np.random.default_rng(0)
    weights = [b.constant(rng.standard_normal((256, n)).astype(np.float32)) for n in (96, 128, 160)]
    first = [b.tanh(b.matmul(x, w)) for w in weights]
    program = b.program(*[b.matmul(y, b.constant(np.ones((y.shape[1], 64), np.float32))) for y in first])
    network = souffle.compile(program, level="V4", **HOW)
    (decision,) = (d for d in network.plan.decisions if d.stage == "choice" and d.subject.startswith("one kernel"))
    assert decision.accepted and "with 1 grid sync;" in decision.reason and len(network.plan.kernels[0].stages) > 2


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


def chosen(program: TEProgram, sync: float, planner: Planner = SOUFFLE) -> ChosenKernels:
    """The kernels of a program on a GPU whose barriers take so many seconds; with a planner's cuts or without."""
    seen: dict[str, object] = {}

    def hook(step: str, result: object) -> object:
        seen[step] = result
        return result

    souffle.compile(program, level="V3", hook=hook, **HOW)
    stages, analysis = seen["lower"], seen["analysis"]
    device = replace(cost_device("H200-SXM5-141GB"), grid_sync_points=((16, sync),))
    forecast = KernelForecast(device, stages, {*analysis.program.inputs, *analysis.program.constants})
    request = PartitionRequest(stages, device_for("sm_90"), analysis, forecast)
    prices = KernelPrices(analysis.program.constants, TileDependences())
    return choose_kernels(planner, request, forecast, prices)


def test_where_barriers_cost_more_than_launches_stages_are_kernels() -> None:
    whole, apart = chosen(unequal(), 0.4e-6), chosen(unequal(), 50e-6)
    (count,) = (len(subprogram.stages) for subprogram in whole.partition.subprograms)
    assert count >= 4 and whole.partition.decisions[-1].accepted
    assert [len(subprogram.stages) for subprogram in apart.partition.subprograms] == [1] * count
    decision = apart.partition.decisions[-1]
    assert not decision.accepted and f"grid syncs; the {count} runs of its stages" in decision.reason
    # With launches, which cost what they did, as much as is said of the stages on their own.
    assert f"kernels of their own {apart.seconds * 1e6:.1f} µs launched one by one" in decision.reason
    assert not whole.worth_unrolling and not apart.worth_unrolling


def test_a_loop_whose_steps_would_be_kernels_is_worth_taking_apart() -> None:
    whole, apart = chosen(products(6), 0.4e-6), chosen(products(6), 50e-6)
    assert not whole.worth_unrolling
    ((name, reason),) = apart.worth_unrolling.items()
    assert "predicted with a kernel for each stage of its steps" in reason
    assert name in {unit.name for subprogram in apart.partition.subprograms for unit in subprogram.stages}


class InLoopsToo:
    """A kernel for each stage, and every loop to be taken apart."""

    def plan(self, request: PartitionRequest) -> Partition:
        loops = {unit.name: "no kernel may hold it" for unit in request.stages if isinstance(unit, LoopStage)}
        return replace(ONE_KERNEL_PER_STAGE.plan(request), unroll=loops)


def test_cuts_are_undone_where_launches_cost_more_than_barriers() -> None:
    uncut, kept = (chosen(unequal(), sync, ONE_KERNEL_PER_STAGE) for sync in (0.4e-6, 50e-6))
    (count,) = (len(subprogram.stages) for subprogram in uncut.partition.subprograms)
    assert [len(subprogram.stages) for subprogram in kept.partition.subprograms] == [1] * count
    for found in (uncut, kept):
        decision = found.partition.decisions[-1]
        assert decision.accepted == (found is uncut) and decision.subject == f"{count - 1} cuts of the partition undone"
        assert f"{found.seconds * 1e6:.1f} µs with{'out' if found is uncut else ''}" in decision.reason
    # As when they were never made.
    assert uncut.seconds == chosen(unequal(), 0.4e-6).seconds


def test_a_loop_that_its_planner_would_take_apart_stays_where_that_takes_less() -> None:
    whole, apart = (chosen(products(6), sync, InLoopsToo()) for sync in (0.4e-6, 50e-6))
    assert not whole.partition.unroll and not whole.worth_unrolling
    assert not apart.partition.unroll and len(apart.worth_unrolling) == 1


def test_what_is_no_te_stays_alone_where_cuts_are_undone() -> None:
    b = Builder()
    y = b.extern_sort(b.tanh(b.input(64, 192)))
    for inner, outer in ((192, 320), (320, 128), (128, 96)):
        y = b.matmul(y, b.constant(np.full((inner, outer), 1 / inner, np.float32)))
    found = chosen(b.program(y), 0.4e-6, ONE_KERNEL_PER_STAGE).partition
    externs = [{is_extern(unit) for unit in subprogram.stages} for subprogram in found.subprograms]
    assert externs == [{False}, {True}, {False}] and [len(sub.stages) > 1 for sub in found.subprograms][2]


def test_a_network_whose_cuts_are_undone_is_right() -> None:
    b = Builder()
    x, rng = b.input(60000, 12), np.random.default_rng(0)
    weights = [rng.standard_normal(shape).astype(np.float32) for shape in ((12, 20), (20, 12), (12, 20))]
    for weight in weights:
        x = b.matmul(x, b.constant(weight))
    program = b.program(x)
    given = inputs_for(program)
    cut, uncut = (souffle.compile(program, level=level, **HOW | {"arch": "sm_80"}) for level in ("V3", "V4"))
    assert len(cut.plan.launches) > 1 and len(uncut.plan.launches) == 1 and uncut.plan.kernels[0].grid_syncs
    assert any(d.accepted and d.subject.endswith("of the partition undone") for d in uncut.plan.decisions)
    (expected,) = given.values()
    for weight in weights:
        expected = expected.astype(np.float64) @ weight
    (found,) = uncut(given).values()
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", some(["mmoe"], ["bert"]))
def test_a_network_for_a_graph_is_right(name: str) -> None:
    model = models.build(name)
    launched, graph = (priced(name, graph) for graph in (False, True))
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
