"""Networks and tensors on a GPU that is played."""

from __future__ import annotations

from typing import Any

import numpy as np

from benchmarks.rehearsal_driver import RehearsalDriver
from souffle.codegen.plan import Plan
from souffle.runtime import DeviceArray, Network
from tests.runtime.plans import cooperative_plan

__all__ = ["driver_of", "on_device"]


def driver_of(plan: Plan, **options: Any) -> RehearsalDriver:
    """A driver that knows a plan's modules."""
    return RehearsalDriver({module.cubin: module.text for module in plan.modules}, **options)


def on_device(value: np.ndarray, driver: RehearsalDriver) -> DeviceArray:
    """An array that lies on the played device."""
    source = Network(cooperative_plan(), driver=driver)
    source.open()
    (workspace,) = source._runner._idle
    device, stream = source._runner._code.cuda, workspace.stream
    with device.current():
        block = workspace.pool.take(value.nbytes)
        device.to_device(block.address, value, stream.handle)
        device.synchronize(stream.handle)
        ready = type(stream)(device.event(), device.destroy_event)
    return DeviceArray(device, stream, ready, block, value.shape, str(value.dtype))
