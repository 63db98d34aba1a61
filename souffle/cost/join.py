"""What a stage takes inside a kernel, for those who weigh one stage against two: on-chip reuse (paper §6.5)."""

from __future__ import annotations

from dataclasses import replace

from souffle.cost.device import CostDevice
from souffle.cost.predict import predict_stage, resources_in_kernel
from souffle.schedule.drafts import Answer
from souffle.schedule.lower import Lowering

__all__ = ["StagePrices"]


class StagePrices:
    """Predicts the seconds of scheduled stages, each with the grid sync before it.

    A stage is one of several of its kernel: it finds what it reads in the L2 cache, and shares the multiprocessor as
    stages leave it to each other.

    Parameters
    ----------
    device : CostDevice
    lowering : Lowering
        Knows the schedules that the scheduler looked at.
    """

    def __init__(self, device: CostDevice, lowering: Lowering) -> None:
        self.device = device
        self._lowering = lowering

    @classmethod
    def on(cls, device: CostDevice | None, lowering: Lowering) -> StagePrices | None:
        """Prices on a device; none where no product of an architecture is described."""
        return None if device is None else cls(device, lowering)

    def __call__(self, answer: Answer) -> float:
        """The seconds of a stage that the scheduler has scheduled."""
        functions = self._lowering.functions(answer.schedule)
        # As if measured, so that they are taken as they are.
        resources = replace(resources_in_kernel(functions), measured=True)
        return predict_stage(functions, self.device, resources, start="sync", warm=True).seconds
