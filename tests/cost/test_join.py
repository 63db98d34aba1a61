"""What a stage takes inside a kernel, as on-chip reuse asks for it."""

from __future__ import annotations

import pytest
from tvm import te, topi

from souffle.cost.device import cost_device
from souffle.cost.join import StagePrices
from souffle.schedule.gpu.device import device_for
from souffle.schedule.gpu.scheduler import gpu_scheduler
from souffle.schedule.lower import Lowering, cuda_target
from souffle.tvm_compat import primfunc_from_tensors


@pytest.fixture(scope="module")
def prices() -> StagePrices:
    return StagePrices(cost_device("A100-SXM4-40GB"), Lowering(cuda_target("sm_80")))


def price(prices: StagePrices, *shape: int) -> float:
    x = te.placeholder(shape, "float32", "x")
    scheduler = gpu_scheduler(device_for("sm_80"))
    return prices(scheduler(primfunc_from_tensors([x, topi.sum(x, axis=1)], "rows")))


def test_two_rows_take_longer_than_as_much_work_on_all_multiprocessors(prices: StagePrices) -> None:
    assert price(prices, 2, 65536) > 1.5 * price(prices, 512, 256)


def test_the_barrier_before_a_stage_is_counted(prices: StagePrices) -> None:
    assert price(prices, 1, 1) >= prices.device.grid_sync_seconds


def test_no_prices_without_a_described_device() -> None:
    assert StagePrices.on(None, Lowering(cuda_target("sm_75"))) is None
