"""Cut a sequence of stages into subprograms, each to become one kernel (paper §5.4).

A grid-wide barrier needs every block on the device at once, so a stage with more blocks than one wave holds ends the
subprogram before it and starts the next.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from souffle.decision import Decision
from souffle.program import ExternTE
from souffle.schedule.gpu.device import GpuDevice
from souffle.schedule.stage import Stage

__all__ = ["Subprogram", "one_kernel_per_stage", "partition_persistent", "partition_souffle"]


@dataclass(frozen=True, eq=False)
class Subprogram:
    """Stages that one kernel runs, in order.

    Attributes
    ----------
    stages : tuple of Stage
    """

    stages: tuple[Stage, ...]

    @property
    def name(self) -> str:
        """The name of its last stage."""
        return self.stages[-1].name


def one_kernel_per_stage(stages: Sequence[Stage]) -> tuple[tuple[Subprogram, ...], tuple[Decision, ...]]:
    """The partition of levels V0 to V2: every stage is a kernel."""
    return tuple(Subprogram((stage,)) for stage in stages), ()


def partition_souffle(
    stages: Sequence[Stage], device: GpuDevice, shared_bytes: Sequence[int]
) -> tuple[tuple[Subprogram, ...], tuple[Decision, ...]]:
    """The paper's greedy rule, breadth first: cut before a stage whose blocks exceed one wave (§5.4, Algorithm 1).

    Parameters
    ----------
    stages : sequence of Stage
        In topological order.
    device : GpuDevice
    shared_bytes : sequence of int
        Shared memory of a block of each stage, in bytes.

    Returns
    -------
    subprograms : tuple of Subprogram
    decisions : tuple of Decision
        One for each cut, with the stage, the resource and the figure that forced it.
    """
    parts: list[list[Stage]] = []
    decisions: list[Decision] = []
    largest_grid = largest_shared = 0
    for stage, shared in zip(stages, shared_bytes, strict=True):
        schedule = stage.schedule
        grid, pool = max(largest_grid, schedule.tiles), max(largest_shared, shared)
        wave = device.blocks_per_wave(schedule.threads, pool)
        alone = isinstance(stage.tes[0], ExternTE) or (bool(parts) and isinstance(parts[-1][-1].tes[0], ExternTE))
        fits = grid <= wave and not alone
        if parts and not fits:
            reason = (
                "an operator that is no TE is a kernel of its own"
                if alone
                else f"{grid} blocks exceed the {wave} of one wave "
                f"({device.sm_count} SMs × {wave // device.sm_count} resident blocks at {schedule.threads} threads and "
                f"{pool} bytes of shared memory)"
            )
            decisions.append(Decision("partition", f"cut before {stage.name} ({stage.tes[0].origin})", True, reason))
        if parts and fits:
            parts[-1].append(stage)
            largest_grid, largest_shared = grid, pool
        else:
            parts.append([stage])
            largest_grid, largest_shared = schedule.tiles, shared
    if stages and not decisions:
        wave = device.blocks_per_wave(stages[-1].schedule.threads, largest_shared)
        reason = f"the most blocks that a stage has, {largest_grid}, fit in one wave of {wave}"
        decisions.append(Decision("partition", "no cut", True, reason))
    return tuple(Subprogram(tuple(p)) for p in parts), tuple(decisions)


def partition_persistent(
    stages: Sequence[Stage], device: GpuDevice, shared_bytes: Sequence[int]
) -> tuple[tuple[Subprogram, ...], tuple[Decision, ...]]:
    """One kernel for everything that can be one: stages loop over their tiles, so none exceeds a wave.

    Only operators that are no TEs cut the program. Parameters and results as for :func:`partition_souffle`.
    """
    parts: list[list[Stage]] = []
    decisions: list[Decision] = []
    for stage in stages:
        alone = isinstance(stage.tes[0], ExternTE)
        if alone and parts:
            decisions.append(
                Decision("partition", f"cut before {stage.name}", True, "an operator that is no TE is its own kernel")
            )
        if alone or not parts or isinstance(parts[-1][-1].tes[0], ExternTE):
            parts.append([stage])
        else:
            parts[-1].append(stage)
    if not decisions:
        wave = device.blocks_per_wave(stages[0].schedule.threads, max(shared_bytes, default=0)) if stages else 0
        decisions.append(
            Decision("partition", "no cut", True, f"stages loop over their tiles in waves of {wave} blocks")
        )
    return tuple(Subprogram(tuple(p)) for p in parts), tuple(decisions)
