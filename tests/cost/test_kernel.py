"""The cost model of a stage inside a kernel: its neighbours' resources, and what lies in the cache."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from souffle.cost import MEDIAN_ERROR, KernelForecast, cost_device, device_of_arch, predict_stage
from souffle.cost.kernel import forecast_on
from souffle.errors import OptionError
from souffle.program import Tensor, TEProgram
from souffle.schedule.gpu.device import DEVICES
from souffle.schedule.lower import cuda_target
from souffle.schedule.lower.stages import lower_stages
from souffle.schedule.resources import StageResources
from tests.kernel.test_loops import asked, layers
from tests.kernel.test_merge import ARCH, lower
from tests.testlib import Builder

H200 = cost_device("H200-SXM5-141GB")
RESULTS = Path(__file__).resolve().parents[2] / "docs" / "results"


def chain(size: int = 1024) -> TEProgram:
    """A wide product, and element-wise work on what it leaves."""
    b = Builder()
    x = b.input(size, size)
    return b.program(b.tanh(b.matmul(x, b.constant(np.zeros((size, size), np.float32)))))


def forecast(program: TEProgram, distant: Collection[Tensor] | None = None) -> tuple[KernelForecast, tuple]:
    stages = tuple(
        replace(stage, resources=StageResources(64, 0, stage.functions[0].shared_bytes, 256, 0, True))
        for stage in lower(program).stages
    )
    far = {*program.inputs, *program.constants} if distant is None else distant
    return KernelForecast(H200, stages, far), stages


def test_a_stage_is_throttled_by_its_neighbours() -> None:
    """Element-wise work waits for memory, so that blocks that are lost are felt."""
    model, (product, wide) = forecast(chain())
    lean = model.alone(wide)
    assert model.resident(lean) == 4
    taken = {4: lean, 2: replace(lean, dynamic_shared_bytes=100 * 1024), 1: replace(lean, registers=255)}
    for resident, kernel in taken.items():
        assert model.resident(kernel) == model.terms(wide, kernel)[0].resident == resident
    for stage in (product, wide):
        times = [model.seconds(stage, kernel) for kernel in taken.values()]
        assert times == sorted(times)
    assert model.seconds(wide, taken[1]) > model.seconds(wide, lean)


def test_what_a_kernel_asks_for_is_the_most_of_each_resource() -> None:
    model, (product, wide) = forecast(chain())
    both = model.together((product, wide))
    assert both.shared_bytes == max(model.alone(s).shared_bytes for s in (product, wide)) > 0
    assert (both.registers, both.threads) == (64, 256) and both.measured


def test_a_block_that_does_not_fit_never_ends() -> None:
    model, (product, _) = forecast(chain())
    assert model.seconds(product, replace(model.alone(product), dynamic_shared_bytes=300 * 1024)) == math.inf


def test_weights_and_inputs_come_from_memory_and_the_rest_from_the_cache() -> None:
    program = chain()
    model, (product, wide) = forecast(program)
    (terms,) = model.terms(product, model.alone(product))
    assert terms.memory_bytes == 2 * 4 * 1024 * 1024
    (terms,) = model.terms(wide, model.alone(wide))
    assert terms.memory_bytes == 0
    near, (same, _) = forecast(program, distant=())
    assert near.terms(same, near.alone(same))[0].memory_bytes == 0
    assert near.seconds(same, near.alone(same)) <= model.seconds(product, model.alone(product))


def test_what_the_cache_does_not_hold_comes_from_memory() -> None:
    b = Builder()
    program = b.program(b.tanh(b.relu(b.input(8192, 2048))))
    big = 4 * 8192 * 2048
    assert big > H200.l2_bytes
    model, stages = forecast(program, distant=())
    assert all(model.terms(s, model.alone(s))[0].memory_bytes == 2 * big for s in stages)


def test_alone_it_is_the_stage_s_own_prediction() -> None:
    model, (product, _) = forecast(chain(), distant=())
    own = model.alone(product)
    expected = predict_stage(product.functions, H200, own, start="none", warm=True).seconds
    assert model.seconds(product, own) == pytest.approx(expected)


def test_parts_of_a_step_come_from_memory_and_what_every_step_reads_does_not() -> None:
    given = asked(layers(5, width=16))
    program = given.analysis.program
    stages = lower_stages(given.stages, cuda_target(ARCH))
    model = forecast_on(ARCH, program, stages)
    (loop,) = (unit for unit in stages if hasattr(unit, "loop"))
    moved = {p.tensor: p.tensor.nbytes for p in loop.loop.indexed if p.source in program.constants}
    assert moved
    for stage in loop.stages:
        (terms,) = model.terms(stage, model.alone(stage))
        assert terms.memory_bytes <= sum(moved.get(tensor, 0) for tensor in stage.inputs)
        assert (terms.memory_bytes > 0) == any(tensor in moved for tensor in stage.inputs)


def test_a_barrier_is_of_the_blocks_that_are_launched() -> None:
    model = KernelForecast(H200, (), ())
    wide, large = StageResources(32, 0, 0, 256, 0, True), StageResources(32, 0, 100 * 1024, 256, 0, True)
    waiting = [model.times((), wide, tiles, 1, fewer=False).waiting for tiles in (1, 500, 5000)]
    assert waiting == [H200.grid_sync_seconds(blocks) for blocks in (1, 500, 8 * 132)]
    assert model.times((), large, 5000, 1, fewer=False).waiting == H200.grid_sync_seconds(2 * 132)
    assert model.grid_sync_seconds(2 * 132) == H200.grid_sync_seconds(2 * 132) < model.grid_sync_seconds(8 * 132)


def test_registers_that_no_compiler_named_are_estimated() -> None:
    product, wide = (
        replace(stage, resources=StageResources.assumed(stage.functions[0].shared_bytes, 256))
        for stage in lower(chain()).stages
    )
    model = KernelForecast(H200, (product, wide), ())
    assert model.alone(product).registers > model.alone(wide).registers >= 32


def test_the_margin_is_the_median_error_that_was_measured() -> None:
    results = json.loads((RESULTS / "cost_against_measured.json").read_text())["results"]
    errors = [abs(math.log(one["predicted_us"] / one["measured_us"])) for one in results]
    assert len(errors) >= 100 and round(math.exp(statistics.median(errors)), 2) == MEDIAN_ERROR


def test_an_architecture_stands_for_the_product_that_schedules_are_made_for() -> None:
    assert device_of_arch("sm_80").product == "A100-SXM4-40GB"
    assert device_of_arch("sm_90") is H200
    described = {arch for arch in DEVICES if device_of_arch(arch) is not None}
    assert {"sm_80", "sm_90"} <= described
    for arch in described:
        assert device_of_arch(arch).limits.sm_count == DEVICES[arch].sm_count
    with pytest.raises(OptionError, match="sm_12"):
        device_of_arch("sm_12")
    assert forecast_on("sm_75", chain(), ()) is None


def test_barriers_that_cost_much_are_shared_by_fewer_blocks() -> None:
    """Where stages lose less than the barriers gain, beyond the model's error; never otherwise."""
    model, stages = forecast(chain(256))
    block = model.together(stages)
    fit = model.resident(block) * H200.sm_count
    tiles = 2 * fit
    for grid_syncs in (0, 1, 100, 10_000):
        most = model.times(stages, block, tiles, grid_syncs, fewer=False)
        found = model.times(stages, block, tiles, grid_syncs, fewer=True)
        assert most.blocks == fit and most.stages == pytest.approx(
            sum(model.seconds(s, block, grid=fit if grid_syncs else 0) for s in stages)
        )
        assert most.waiting == pytest.approx(grid_syncs * H200.grid_sync_seconds(fit))
        assert found.seconds <= most.seconds and found.launch == most.launch == H200.launch_seconds
        if found.blocks < most.blocks:
            assert most.waiting - found.waiting > model.error * (found.stages - most.stages)
    assert found.blocks == H200.sm_count and model.times(stages, block, tiles, 0, fewer=True).blocks == fit
    narrow = model.times(stages, block, H200.sm_count // 2, 10_000, fewer=True)
    assert narrow.blocks == fit, "a grid has no more blocks than tiles in any case"


def test_a_smaller_grid_leaves_a_stage_more_waves() -> None:
    model, (product, _) = forecast(chain())
    block = model.alone(product)
    (most,), (fewer,) = model.terms(product, block), model.terms(product, block, 100)
    assert (fewer.resident, fewer.waves) == (1, -(-most.tiles // 100)) and most.waves < fewer.waves
    assert model.seconds(product, block, 100) > model.seconds(product, block)
