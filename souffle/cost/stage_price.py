"""What a stage takes inside a kernel, for those who weigh one stage against two: on-chip reuse (paper §6.5)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from souffle.cost.device import CostDevice
from souffle.cost.predict import predict_stage, resources_in_kernel
from souffle.schedule.lower import DeviceFunction

__all__ = ["price_on", "stage_price"]


def price_on(device: CostDevice | None) -> Callable[[Sequence[DeviceFunction]], float] | None:
    """:func:`stage_price` on a device; none where no product of an architecture is described."""
    return None if device is None else partial(stage_price, device)


def stage_price(device: CostDevice, functions: Sequence[DeviceFunction]) -> float:
    """The predicted seconds of a lowered stage, with the grid sync before it.

    A stage is one of several of its kernel: it finds what it reads in the L2 cache, and shares the multiprocessor as
    stages leave it to each other.
    """
    # As if measured, so that they are taken as they are.
    resources = replace(resources_in_kernel(functions), measured=True)
    return predict_stage(functions, device, resources, start="sync", warm=True).seconds
