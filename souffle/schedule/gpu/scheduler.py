"""The GPU's scheduler, as the formation of stages asks it: rules in their order, and a schedule is only as good as the
code that it gives."""

from __future__ import annotations

from collections.abc import Callable

import tvm
from tvm import tirx

from souffle.decision import Refused
from souffle.schedule.drafts import Answer
from souffle.schedule.gpu import RULES, answers
from souffle.schedule.gpu.device import GpuDevice
from souffle.schedule.gpu.rule import GpuRequest
from souffle.schedule.lower import DeviceFunction, LoweringError, cuda_target, lower_stage
from souffle.tvm_compat import structural_digest

__all__ = ["THREADS", "GpuScheduler", "gpu_request"]

THREADS = 256
"""Of a block, the same for all stages, so that any of them can be merged."""


def gpu_request(device: GpuDevice, threads: int = THREADS) -> GpuRequest:
    """What schedules for a device are made for: what one block may have of it."""
    return GpuRequest(device.arch, threads, device.sm_count, device.shared_per_block)


class GpuScheduler:
    """Schedules and lowers stages for one device, each distinct one once.

    Parameters
    ----------
    device : GpuDevice
    price : callable, optional
        The predicted seconds of a lowered stage in a kernel, with the grid sync before it; without, none is known.
    threads : int
        Of a block.

    Attributes
    ----------
    request : GpuRequest
    target : Target
        TVM's for the device.
    """

    def __init__(
        self,
        device: GpuDevice,
        price: Callable[[tuple[DeviceFunction, ...]], float] | None = None,
        threads: int = THREADS,
    ) -> None:
        self.request = gpu_request(device, threads)
        self.target: tvm.target.Target = cuda_target(device.arch)
        self._price = price
        self._answers: dict[str, Answer] = {}

    def __call__(self, func: tirx.PrimFunc) -> Answer:
        """See :class:`souffle.schedule.drafts.Scheduler`."""
        digest = structural_digest(func)
        if digest not in self._answers:
            self._answers[digest] = self._answer(func)
        return self._answers[digest]

    def seconds(self, answer: Answer) -> float | None:
        """See :class:`souffle.schedule.drafts.Scheduler`."""
        return None if self._price is None else self._price(answer.functions)

    def _answer(self, func: tirx.PrimFunc) -> Answer:
        refusals: list[Refused] = []
        for schedule in answers(func, self.request):
            if isinstance(schedule, Refused):
                refusals.append(schedule)
                continue
            try:
                functions = lower_stage("stage", schedule, self.target)
            except LoweringError as error:
                refusals.append(Refused(f"{schedule.rule}: {error}"))
                continue
            rank, rowwise = list(RULES).index(schedule.rule), RULES[schedule.rule].whole_rows
            return Answer(schedule, schedule.rule, rank, rowwise, schedule.tiles, _reasons(refusals), functions)
        return Answer(None, "none", len(RULES), False, 0, _reasons(refusals))


def _reasons(refusals: list[Refused]) -> str:
    return "; ".join(refusal.reason for refusal in refusals)
