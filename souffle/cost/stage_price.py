"""What a stage takes inside a kernel, for those who weigh one stage against two, or one schedule against another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from souffle.cost.device import CostDevice
from souffle.cost.kernel import MEDIAN_ERROR
from souffle.cost.predict import predict_stage, resources_in_kernel
from souffle.schedule.gpu.device import ASSUMED_REGISTERS
from souffle.schedule.lower import DeviceFunction

__all__ = ["StagePrices", "price_on"]


@dataclass(frozen=True)
class StagePrices:
    """Predicted seconds of stages on a device, each with the grid sync before it, or with its launch.

    A stage is one of several of its kernel: it finds what it reads in the L2 cache, and shares the multiprocessor as
    stages leave it to each other. Or it is a kernel of its own.

    Attributes
    ----------
    device : CostDevice
    alone : bool
        Whether each stage is a kernel of its own.
    """

    device: CostDevice
    alone: bool = False

    def __call__(self, functions: Sequence[DeviceFunction], registers: int = 0) -> float:
        """The seconds of a lowered stage; with the registers of a thread where they are known."""
        # As if measured, so that they are taken as they are.
        resources = replace(resources_in_kernel(functions), measured=True)
        if self.alone:
            own = replace(resources, registers=registers) if registers else None
            return predict_stage(functions, self.device, own).seconds
        if registers:
            resources = replace(resources, registers=max(registers, ASSUMED_REGISTERS))
        return predict_stage(functions, self.device, resources, start="sync", warm=True).seconds

    def crowds(self, functions: Sequence[DeviceFunction]) -> bool:
        """Whether a stage takes more registers, as estimated, than stages leave each other."""
        return resources_in_kernel(functions).registers > ASSUMED_REGISTERS

    def of_clocks(self, clocks: float) -> float:
        """The seconds of a stage that takes so many clocks."""
        return self.device.shared_sync_seconds + clocks / self.device.clock_hz

    @property
    def error(self) -> float:
        """The factor by which two prices must differ to be told apart."""
        return MEDIAN_ERROR


def price_on(device: CostDevice | None, *, alone: bool = False) -> StagePrices | None:
    """Prices on a device; none where no product of an architecture is described."""
    return None if device is None else StagePrices(device, alone)
