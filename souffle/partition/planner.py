"""What a planner is asked and what it answers: where kernels begin and end (paper §5.4).

A planner takes the stages of a program in topological order and gives subprograms, each to become one kernel. Any cut
that keeps the order is legal: a merged kernel runs its stages tile by tile with a grid sync between dependent ones, for
every grid of at least one block. So planners differ in what is fast, not in what is right.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import numpy as np

from souffle.analysis import Analysis
from souffle.decision import Decision
from souffle.partition.text import stage_table
from souffle.program import ExternTE, Tensor
from souffle.schedule.arrangement import Arrangements
from souffle.schedule.gpu.device import GpuDevice
from souffle.schedule.resources import StageResources
from souffle.schedule.stage import LoopStage, Stage, Unit, flat_stages
from souffle.wording import counted

__all__ = [
    "Demand",
    "Forecast",
    "Partition",
    "PartitionRequest",
    "Planner",
    "Subprogram",
    "breadth_first",
    "depths",
    "is_extern",
]


@dataclass(frozen=True, eq=False)
class Subprogram:
    """Stages that one kernel runs, in order.

    Attributes
    ----------
    stages : tuple of Stage or LoopStage
    blocks_per_sm : int
        Blocks that each multiprocessor must hold at once for the plan to be true, at least 1. The kernel is compiled
        with this bound on its registers.
    """

    stages: tuple[Unit, ...]
    blocks_per_sm: int = 1

    @property
    def name(self) -> str:
        """The name of its last stage."""
        return self.stages[-1].name

    def __str__(self) -> str:
        """Its name and bound, and a table of its stages."""
        head = f"{self.name}: {counted(len(flat_stages(self.stages)), 'stage')}"
        bound = f", {self.blocks_per_sm} resident blocks on each multiprocessor" if self.blocks_per_sm > 1 else ""
        return "\n".join([head + bound, *stage_table(self.stages)])


@dataclass(frozen=True, eq=False)
class Partition:
    """What a planner answers.

    Attributes
    ----------
    subprograms : tuple of Subprogram
        In order of execution. Every stage of the request is in one, after those that it reads from; an operator that
        is no TE is alone in its own.
    decisions : tuple of Decision
        Why it is so. Each cut names the stage, its TE, the resource and the figure.
    unroll : mapping of str to str
        Loops that a kernel cannot keep whole, by name, each with the reason. With any, the planner is asked again about
        stages in which they are given step by step, as far as they were rolled by the compiler.
    """

    subprograms: tuple[Subprogram, ...]
    decisions: tuple[Decision, ...] = ()
    unroll: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        """The kernels in the order in which they run, then the decisions, then the loops that are to be taken apart."""
        stages = sum(len(flat_stages(subprogram.stages)) for subprogram in self.subprograms)
        lines = [f"{counted(len(self.subprograms), 'kernel')} of {counted(stages, 'stage')}"]
        for number, subprogram in enumerate(self.subprograms):
            lines += ["", f"kernel {number} {subprogram}"]
        if self.decisions:
            lines += ["", "decisions", *(f"  {decision}" for decision in self.decisions)]
        if self.unroll:
            lines += ["", "loops to take apart", *(f"  {name}: {reason}" for name, reason in self.unroll.items())]
        return "\n".join(lines)


class Forecast(Protocol):
    """What a cost model says of the stages of a request.

    Attributes
    ----------
    product : str
        The GPU that it speaks of.
    error : float
        By which factor half of the model's predictions are off at most, at least 1.
    launch_seconds : float
        Of a launch.
    """

    product: str
    error: float
    launch_seconds: float

    def grid_sync_seconds(self, blocks: int | np.ndarray) -> float | np.ndarray:
        """The time of a barrier of so many blocks, all resident; of each where several numbers are given."""
        ...

    def flag_wait_seconds(self, others: int, blocks: int) -> float:
        """The time in which a block of so many sees the flags of some others, all set at once."""
        ...

    @property
    def look_seconds(self) -> float:
        """The time in which a block sees a flag that is set."""
        ...

    def seconds(self, stage: Stage, kernel: StageResources) -> float:
        """The time of one run of a stage in a kernel whose blocks ask for these resources, barriers not counted.

        Infinite where no such block fits on a multiprocessor.
        """
        ...


@dataclass(frozen=True)
class PartitionRequest:
    """What a planner decides on.

    Attributes
    ----------
    stages : tuple of Stage or LoopStage
        In topological order; all have their resources, those in loops too.
    device : GpuDevice
    analysis : Analysis
        Of the program that the stages' TEs are of.
    forecast : Forecast or None
        Predicted times, where a cost model knows the device.
    arrangements : Arrangements
        What stages were measured to take beside each other.
    """

    stages: tuple[Unit, ...]
    device: GpuDevice
    analysis: Analysis
    forecast: Forecast | None = None
    arrangements: Arrangements = field(default_factory=partial(Arrangements, ()))

    def intensive(self, unit: Unit) -> tuple[Stage, ...]:
        """The compute-intensive stages of a unit: those that hold a compute-intensive TE (§5.3)."""
        analysis = self.analysis.inside(unit.loop) if isinstance(unit, LoopStage) else self.analysis
        return tuple(s for s in flat_stages([unit]) if any(analysis.is_compute_intensive(te) for te in s.tes))

    def together(self, units: Iterable[Unit]) -> StageResources:
        """What a block of a kernel of these units asks for: of each resource the most that any stage does."""
        return StageResources.together(stage.resources for stage in flat_stages(units))

    def blocks(self, units: Iterable[Unit]) -> int:
        """Blocks of a kernel of these units that the device holds at once."""
        used = self.together(units)
        return self.device.blocks_per_wave(used.threads, used.shared_bytes, used.registers)

    def demand(self, unit: Unit) -> Demand:
        """What a unit asks of the kernel that runs it."""
        tiles = [(stage.schedule.tiles, stage.name) for stage in self.intensive(unit)]
        grid = max(tiles, default=(0, ""), key=lambda one: one[0])
        used = [(stage.resources, stage.name) for stage in flat_stages([unit])]
        registers, of_registers = max(used, key=lambda one: one[0].registers)
        shared, of_shared = max(used, key=lambda one: one[0].shared_bytes)
        threads = max(one.threads for one, _ in used)
        return Demand(
            *grid, threads, registers.registers, of_registers, registers.measured, shared.shared_bytes, of_shared
        )


@dataclass(frozen=True)
class Demand:
    """What the stages of a kernel ask for together: the largest grid, and the most of each resource of a block.

    Only compute-intensive stages count for the grid. All stages count for the resources, since a kernel is on the
    device as a whole.

    Attributes
    ----------
    grid : int
        Tiles of the compute-intensive stage that has the most; 0 where there is none.
    of_grid : str
        That stage's name.
    threads, registers, shared_bytes : int
        Of a block, of a thread, of a block.
    of_registers, of_shared : str
        The stages that ask for the most.
    measured : bool
        Whether `registers` is the compiler's figure.
    """

    grid: int
    of_grid: str
    threads: int
    registers: int
    of_registers: str
    measured: bool
    shared_bytes: int
    of_shared: str

    def joined(self, other: Demand) -> Demand:
        """What a kernel asks for that runs both."""
        grid = max(self, other, key=lambda d: d.grid)
        registers = max(self, other, key=lambda d: d.registers)
        shared = max(self, other, key=lambda d: d.shared_bytes)
        return Demand(
            grid.grid,
            grid.of_grid,
            max(self.threads, other.threads),
            registers.registers,
            registers.of_registers,
            registers.measured,
            shared.shared_bytes,
            shared.of_shared,
        )

    def wave(self, device: GpuDevice) -> int:
        """Blocks of such a kernel that are on the device at once."""
        return device.blocks_per_wave(self.threads, self.shared_bytes, self.registers)

    def figures(self, device: GpuDevice) -> str:
        """How the wave comes about, and the resource that bounds it."""
        resident = device.resident_blocks(self.threads, self.shared_bytes, self.registers)
        bound = min(resident, key=lambda resource: resident[resource])
        source = "measured" if self.measured else "assumed"
        shared = f"{self.shared_bytes} bytes of shared memory" + (f" of {self.of_shared}" if self.shared_bytes else "")
        return (
            f"{device.sm_count} SMs × {max(1, resident[bound])} resident blocks of {self.threads} threads, bound by "
            f"{bound}: {self.registers} registers of {self.of_registers} ({source}), {shared}"
        )


class Planner(Protocol):
    """Decides where kernels begin and end.

    Attributes
    ----------
    name : str
        As the option ``partition`` names it.
    measures : bool
        Whether its answer depends on the registers of stages, so that they are worth a run of the compiler.
    """

    name: str
    measures: bool

    def plan(self, request: PartitionRequest) -> Partition:
        """Where the kernels of these stages begin and end."""
        ...


def depths(units: Sequence[Unit]) -> tuple[int, ...]:
    """The distance of each unit from the inputs of `units`, on the longest path; they are in topological order."""
    ready: dict[Tensor, int] = {}
    found = []
    for unit in units:
        found.append(max((ready[tensor] for tensor in unit.inputs if tensor in ready), default=0))
        ready.update(dict.fromkeys(unit.outputs, found[-1] + 1))
    return tuple(found)


def breadth_first(units: Sequence[Unit]) -> tuple[Unit, ...]:
    """`units` by their distance from the program's inputs, on the longest path; the order is topological again."""
    depth = dict(zip(units, depths(units), strict=True))
    return tuple(sorted(units, key=lambda unit: depth[unit]))


def is_extern(unit: Unit) -> bool:
    """Whether a unit is an operator that is no TE, which is a kernel of its own."""
    return isinstance(unit.tes[0], ExternTE)
