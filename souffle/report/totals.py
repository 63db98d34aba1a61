"""A compiled network as a whole, in numbers: what levels are compared by."""

from __future__ import annotations

from souffle.codegen.plan import Plan
from souffle.options import LEVELS
from souffle.report.schema import LevelFacts
from souffle.runtime.explain import predicted_seconds, shared_bytes

__all__ = ["totals"]


def totals(plan: Plan) -> LevelFacts:
    """The numbers of one run of a network.

    Parameters
    ----------
    plan : Plan
        Of CUDA kernels.
    """
    launched = [plan.kernels[launch.kernel] for launch in plan.launches]
    total = predicted_seconds(plan)
    bound: dict[str, float] = {}
    for kernel in launched if total is not None else ():
        for stage in kernel.predicted.stages:
            bound[stage.bound] = bound.get(stage.bound, 0.0) + stage.seconds
    parts = ("launch_seconds", "sync_seconds", "code_seconds")
    launching, waiting, fetching = (
        None if total is None else sum(getattr(kernel.predicted, part) for kernel in launched) for part in parts
    )
    return LevelFacts(
        level=plan.options.level,
        summary=LEVELS[plan.options.level].summary,
        launches=len(plan.launches),
        kernels=len(plan.kernels),
        stages=sum(len(kernel.stages) for kernel in launched),
        grid_syncs=sum(kernel.grid_syncs for kernel in launched),
        arrivals=sum(kernel.arrivals for kernel in launched),
        block_syncs=sum(b.runs for kernel in launched for b in kernel.barriers if b.scope == "block"),
        bytes_read=sum(launch.bytes_read for launch in plan.launches),
        bytes_written=sum(launch.bytes_written for launch in plan.launches),
        workspace_bytes=plan.workspace_bytes,
        constant_bytes=sum(buffer.nbytes for buffer in plan.buffers if buffer.kind == "constant"),
        registers=max((kernel.resources.registers for kernel in plan.kernels if kernel.resources), default=None),
        shared_bytes=max(map(shared_bytes, plan.kernels), default=0),
        predicted_seconds=total,
        launch_seconds=launching,
        wait_seconds=waiting,
        code_seconds=fetching,
        bound_seconds=bound,
        certificate=None if plan.certificate is None else plan.certificate.summary,
    )
