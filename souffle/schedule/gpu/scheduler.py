"""The GPU's scheduler, as the formation of stages asks for it."""

from __future__ import annotations

from collections.abc import Callable

from tvm import tirx

from souffle.schedule.drafts import Answer, Scheduler
from souffle.schedule.gpu import RULES, check_schedule, schedule_gpu
from souffle.schedule.gpu.device import GpuDevice
from souffle.schedule.gpu.rule import GpuRequest, GpuSchedule

__all__ = ["THREADS", "gpu_request", "gpu_scheduler"]

THREADS = 256
"""Of a block, the same for all stages, so that any of them can be merged."""


def gpu_request(device: GpuDevice, threads: int = THREADS) -> GpuRequest:
    """What schedules for a device are made for: what one block may have of it."""
    return GpuRequest(device.arch, threads, device.sm_count, device.shared_per_block)


def gpu_scheduler(
    device: GpuDevice, problem: Callable[[GpuSchedule], str | None] = lambda schedule: None, threads: int = THREADS
) -> Scheduler:
    """A scheduler for one device.

    Parameters
    ----------
    device : GpuDevice
    problem : callable, optional
        Says why a schedule cannot be used after all; see :func:`souffle.schedule.gpu.schedule_gpu`.
    threads : int
        Of a block.
    """
    request = gpu_request(device, threads)

    def answer(func: tirx.PrimFunc) -> Answer:
        schedule, refusals = schedule_gpu(func, request, problem)
        reason = "; ".join(f"{r.rule}: {r.reason}" for r in refusals)
        if schedule is None:
            return Answer(None, "none", len(RULES), False, 0, reason)
        check_schedule(schedule, request)
        rank = [name for name, _ in RULES].index(schedule.rule)
        return Answer(schedule, schedule.rule, rank, schedule.rule == "rowwise", schedule.tiles, reason)

    return answer
