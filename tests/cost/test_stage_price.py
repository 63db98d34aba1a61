"""What a stage takes inside a kernel, as on-chip reuse asks for it."""

from __future__ import annotations

from tvm import te, topi

from souffle.cost.device import cost_device
from souffle.cost.stage_price import price_on
from souffle.schedule.gpu.device import device_for
from souffle.schedule.gpu.scheduler import GpuScheduler
from souffle.tvm_compat import primfunc_from_tensors

DEVICE = cost_device("A100-SXM4-40GB")


def price(*shape: int) -> float:
    x = te.placeholder(shape, "float32", "x")
    scheduler = GpuScheduler(device_for("sm_80"), price_on(DEVICE))
    return scheduler.seconds(scheduler(primfunc_from_tensors([x, topi.sum(x, axis=1)], "rows")))


def test_two_rows_take_longer_than_as_much_work_on_all_multiprocessors() -> None:
    assert price(2, 65536) > 1.5 * price(512, 256)


def test_the_barrier_before_a_stage_is_counted() -> None:
    assert price(1, 1) >= DEVICE.grid_sync_seconds(2 * 108)


def test_no_prices_without_a_described_device() -> None:
    scheduler = GpuScheduler(device_for("sm_75"), price_on(None))
    x = te.placeholder((8, 8), "float32", "x")
    assert scheduler.seconds(scheduler(primfunc_from_tensors([x, topi.sum(x, axis=1)], "rows"))) is None
