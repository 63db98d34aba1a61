"""Cut a sequence of stages into subprograms, each to become one kernel (paper §5.4).

A grid-wide barrier needs every block on the device at once, so a stage with more blocks than one wave holds ends the
subprogram before it and starts the next.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from souffle.decision import Decision
from souffle.program import ExternTE
from souffle.schedule.gpu.device import GpuDevice
from souffle.schedule.stage import LoopStage, Stage, Unit, flat_stages

__all__ = ["Subprogram", "loops_beyond_a_wave", "one_kernel_per_stage", "partition_persistent", "partition_souffle"]


@dataclass(frozen=True, eq=False)
class Subprogram:
    """Stages that one kernel runs, in order.

    Attributes
    ----------
    stages : tuple of Stage or LoopStage
    """

    stages: tuple[Unit, ...]

    @property
    def name(self) -> str:
        """The name of its last stage."""
        return self.stages[-1].name


def one_kernel_per_stage(stages: Sequence[Unit]) -> tuple[tuple[Subprogram, ...], tuple[Decision, ...]]:
    """The partition of levels V0 to V2: every stage is a kernel."""
    return tuple(Subprogram((stage,)) for stage in stages), ()


def partition_souffle(
    stages: Sequence[Unit], device: GpuDevice, shared_bytes: Mapping[Stage, int]
) -> tuple[tuple[Subprogram, ...], tuple[Decision, ...]]:
    """The paper's greedy rule, breadth first: cut before a stage whose blocks exceed one wave (§5.4, Algorithm 1).

    Parameters
    ----------
    stages : sequence of Stage or LoopStage
        In topological order. A loop is cut nowhere: see :func:`loops_beyond_a_wave`.
    device : GpuDevice
    shared_bytes : mapping of Stage to int
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
    threads = 0
    for stage in stages:
        tiles, threads, shared = _demand(stage, shared_bytes)
        grid, pool = max(largest_grid, tiles), max(largest_shared, shared)
        wave = device.blocks_per_wave(threads, pool)
        alone = isinstance(stage.tes[0], ExternTE) or (bool(parts) and isinstance(parts[-1][-1].tes[0], ExternTE))
        fits = grid <= wave and not alone
        if parts and not fits:
            reason = (
                "an operator that is no TE is a kernel of its own"
                if alone
                else f"{grid} blocks exceed the {wave} of one wave "
                f"({device.sm_count} SMs × {wave // device.sm_count} resident blocks at {threads} threads and "
                f"{pool} bytes of shared memory)"
            )
            decisions.append(Decision("partition", f"cut before {stage.name} ({stage.tes[0].origin})", True, reason))
        if parts and fits:
            parts[-1].append(stage)
            largest_grid, largest_shared = grid, pool
        else:
            parts.append([stage])
            largest_grid, largest_shared = tiles, shared
    if stages and not decisions:
        wave = device.blocks_per_wave(threads, largest_shared)
        reason = f"the most blocks that a stage has, {largest_grid}, fit in one wave of {wave}"
        decisions.append(Decision("partition", "no cut", True, reason))
    return tuple(Subprogram(tuple(p)) for p in parts), tuple(decisions)


def _demand(unit: Unit, shared_bytes: Mapping[Stage, int]) -> tuple[int, int, int]:
    """The most blocks, threads and bytes of shared memory that a stage, or a loop's stages, ask for."""
    stages = flat_stages([unit])
    tiles, threads = max(s.schedule.tiles for s in stages), max(s.schedule.threads for s in stages)
    return tiles, threads, max(shared_bytes[s] for s in stages)


def loops_beyond_a_wave(
    stages: Sequence[Unit], device: GpuDevice, shared_bytes: Mapping[Stage, int]
) -> dict[str, str]:
    """The loops that the paper's rule cannot keep whole in one kernel, by name, each with the reason.

    Parameters as for :func:`partition_souffle`.
    """
    beyond: dict[str, str] = {}
    for unit in stages:
        if isinstance(unit, LoopStage):
            tiles, threads, shared = _demand(unit, shared_bytes)
            wave = device.blocks_per_wave(threads, shared)
            if tiles > wave:
                beyond[unit.name] = f"{tiles} blocks of a stage exceed the {wave} of one wave, so a kernel ends inside"
    return beyond


def partition_persistent(
    stages: Sequence[Unit], device: GpuDevice, shared_bytes: Mapping[Stage, int]
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
        threads = _demand(stages[0], shared_bytes)[1] if stages else 1
        wave = device.blocks_per_wave(threads, max(shared_bytes.values(), default=0)) if stages else 0
        decisions.append(
            Decision("partition", "no cut", True, f"stages loop over their tiles in waves of {wave} blocks")
        )
    return tuple(Subprogram(tuple(p)) for p in parts), tuple(decisions)
