"""Stages on trial for an A100, as the pipeline has them."""

from __future__ import annotations

from souffle.cost.device import cost_device
from souffle.placement.stage_trial import StageTrials
from souffle.program import TEProgram
from souffle.schedule.gpu.device import device_for
from souffle.schedule.gpu.scheduler import GpuScheduler, gpu_request

__all__ = ["REQUEST", "trials_of"]

_ARCH = "sm_80"

REQUEST = gpu_request(device_for(_ARCH))


def trials_of(program: TEProgram, *, described: bool = True) -> StageTrials:
    """Trials of a program, on a device that is described or on one that is not."""
    device = cost_device("A100-SXM4-40GB") if described else None
    return StageTrials(program, device, GpuScheduler(device_for(_ARCH)))
