"""Where kernels end after all: a planner's cuts are undone, and its kernels taken apart, where less is predicted so.

A planner's rule knows no times. The paper's cuts where one wave does not hold the blocks, so that each has a tile; a
cut costs a launch, and stages that loop over their tiles need none. A merged kernel saves launches and pays with
barriers, and with the occupancy of its most demanding stage. What a launch costs depends on how the network is run:
launched kernel by kernel, or as the nodes of one CUDA graph, each of which follows the last sooner than the blocks of a
large grid have waited for each other. So the same stages may be best as one kernel in the first case and as many in the
second.
"""

from __future__ import annotations

import math
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from souffle.choice.prices import KernelPrice, KernelPrices, runs_of
from souffle.cost import KernelForecast
from souffle.decision import Decision
from souffle.partition import Partition, PartitionRequest, Planner, Subprogram
from souffle.partition.planner import depths, is_extern
from souffle.schedule.stage import LoopStage, Stage, Unit, flat_stages
from souffle.wording import counted

__all__ = ["ChosenKernels", "choose_kernels"]

_EQUAL = 1e-12
"""Seconds that are no difference."""


@dataclass(frozen=True, eq=False)
class ChosenKernels:
    """What becomes of a partition.

    Attributes
    ----------
    partition : Partition
    seconds : float
        What its kernels are predicted to take.
    worth_unrolling : mapping of str to str
        Loops that may be worth taking apart, so that their stages can be kernels of their own, with the reasons.
    """

    partition: Partition
    seconds: float
    worth_unrolling: Mapping[str, str]


def choose_kernels(
    planner: Planner,
    request: PartitionRequest,
    forecast: KernelForecast,
    prices: KernelPrices,
    given: Container[str] = (),
    *,
    undo: bool = True,
) -> ChosenKernels:
    """The kernels of a planner or those without its cuts, each taken apart where its stages alone take less.

    Loops that the planner would take apart stay whole.

    Parameters
    ----------
    planner : Planner
    request : PartitionRequest
        What it decides on.
    forecast : KernelForecast
        Its launch is that of the network: of a kernel, or of a node of a CUDA graph.
    prices : KernelPrices
    given : container of str
        The names of loops that stay, since the program was given with them.
    undo : bool
        Whether cuts may be undone.
    """
    partition = planner.plan(request)
    kept = _taken_apart(replace(partition, unroll={}), request, forecast, prices, given)
    uncut = _without_cuts(partition.subprograms, request, forecast)
    found, decisions = kept, ()
    if undo and len(uncut) < len(partition.subprograms):
        undone = _taken_apart(replace(partition, subprograms=uncut, unroll={}), request, forecast, prices, given)
        found = undone if undone.seconds + _EQUAL < kept.seconds else kept
        cuts = counted(len(partition.subprograms) - len(uncut), "cut")
        reason = f"the network is predicted to take {_us(undone.seconds)} without and {_us(kept.seconds)} with"
        decisions = (Decision("choice", f"{cuts} of the partition undone", found is undone, reason),)
    chosen = replace(found.partition, decisions=(*found.partition.decisions, *decisions))
    cut = {name: partition.unroll[name] for name in partition.unroll if name not in given}
    loops = [unit for unit in request.stages if isinstance(unit, LoopStage) and unit.name in cut]
    wished = {loop.name: cut[loop.name] for loop in loops if _may_pay(loop, planner, request, forecast, prices)}
    return replace(found, partition=chosen, worth_unrolling={**wished, **found.worth_unrolling})


def _may_pay(
    unit: LoopStage, planner: Planner, request: PartitionRequest, forecast: KernelForecast, prices: KernelPrices
) -> bool:
    """Whether a loop may take less where its planner cuts its steps; between steps it waits or launches."""
    analysis, fetches = request.analysis.inside(unit.loop), prices.fetches(request, forecast)
    seconds, between = 0.0, forecast.launch_seconds
    for kernel in planner.plan(replace(request, stages=unit.stages, analysis=analysis)).subprograms:
        stages = flat_stages(kernel.stages)
        block, tiles = forecast.together(stages), max(stage.schedule.tiles for stage in stages)
        times = forecast.times(stages, block, tiles, max(depths(kernel.stages)), fewer=True, fetches=fetches)
        seconds += times.seconds
        between = min(between, forecast.grid_sync_seconds(max(1, min(times.blocks, tiles))))
    whole = prices.kernel(Subprogram((unit,)), request, forecast).seconds
    steps = unit.loop.steps
    return steps * seconds - (steps - 1) * (forecast.launch_seconds - between) < whole


def _without_cuts(
    subprograms: Sequence[Subprogram], request: PartitionRequest, forecast: KernelForecast
) -> tuple[Subprogram, ...]:
    """One kernel for all between operators that are no TEs, with as many blocks resident as its stages leave room for.

    Registers that merging adds are spilled, where a stage is called; what its stages take alone is not.
    """
    found: list[Subprogram] = []
    for alone, group in groupby(subprograms, lambda subprogram: is_extern(subprogram.stages[0])):
        together = tuple(group)
        if alone or len(together) == 1:
            found += together
            continue
        units = tuple(unit for subprogram in together for unit in subprogram.stages)
        stages = flat_stages(units)
        needed = -(-max(stage.schedule.tiles for stage in stages) // request.device.sm_count)
        found.append(Subprogram(units, max(1, min(needed, forecast.resident(forecast.together(stages))))))
    return tuple(found)


def _taken_apart(
    partition: Partition,
    request: PartitionRequest,
    forecast: KernelForecast,
    prices: KernelPrices,
    given: Container[str],
) -> ChosenKernels:
    """The kernels of a partition, those in the place of their stages that are predicted to take longer."""
    subprograms: list[Subprogram] = []
    decisions: list[Decision] = []
    unroll: dict[str, str] = {}
    total = 0.0
    for subprogram in partition.subprograms:
        units, merged = subprogram.stages, prices.kernel(subprogram, request, forecast)
        if len(flat_stages(units)) == 1 and isinstance(units[0], Stage):
            subprograms.append(subprogram)
            total += merged.seconds
            continue
        # A loop's stages go on sharing multiprocessors as they did.
        kernels = [Subprogram((unit,), 1 if isinstance(unit, Stage) else subprogram.blocks_per_sm) for unit in units]
        parts = [_Alone.of(kernel, request, forecast, prices) for kernel in kernels]
        alone = sum(part.seconds for part in parts)
        # What a cut gains must be more than launches may cost beyond what they are said to.
        doubt = (forecast.error - 1) * forecast.launch_seconds
        split = len(parts) > 1 and alone + (len(parts) - 1) * doubt < merged.seconds
        steps = [p for p in parts if p.in_steps + p.launches * doubt < p.seconds and p.name not in given]
        if alone - sum(part.seconds - part.in_steps for part in steps) < min(alone, merged.seconds):
            unroll |= {
                part.name: f"{_us(part.in_steps)} predicted with a kernel for each stage of its steps, "
                f"{_us(part.seconds)} as one kernel"
                for part in steps
            }
        subprograms += kernels if split else [subprogram]
        total += alone if split else merged.seconds
        figures = _figures(units, merged, request, forecast, prices)
        decisions.append(Decision("choice", f"one kernel for {subprogram.name}", not split, figures))
    decided = (*partition.decisions, *decisions)
    return ChosenKernels(replace(partition, subprograms=tuple(subprograms), decisions=decided), total, unroll)


@dataclass(frozen=True)
class _Alone:
    """Seconds of a unit as a kernel of its own, and with a kernel for each stage in each step of a loop."""

    name: str
    seconds: float
    in_steps: float
    launches: int

    @classmethod
    def of(
        cls, kernel: Subprogram, request: PartitionRequest, forecast: KernelForecast, prices: KernelPrices
    ) -> _Alone:
        (unit,) = kernel.stages
        in_steps = prices.apart(unit, request, forecast)
        whole = in_steps if isinstance(unit, Stage) else prices.kernel(kernel, request, forecast).seconds
        return cls(unit.name, whole, in_steps, runs_of(unit) * len(flat_stages([unit])))


def _figures(
    units: Sequence[Unit],
    merged: KernelPrice,
    request: PartitionRequest,
    forecast: KernelForecast,
    prices: KernelPrices,
) -> str:
    """The kernel beside its stages, launched one by one and as nodes of a CUDA graph."""
    device = forecast.device
    runs = [(stage, runs_of(unit)) for unit in units for stage in flat_stages([unit])]
    stages = sum(count * prices.alone(stage, request, forecast).stages for stage, count in runs)
    count = sum(count for _, count in runs)
    launched, graph = (stages + count * start for start in (device.launch_seconds, device.graph_node_seconds))
    return (
        f"predicted to take {_us(merged.seconds)} with {counted(merged.grid_syncs, 'grid sync')}; the {count} runs of "
        f"its stages as kernels of their own {_us(launched)} launched one by one, {_us(graph)} as nodes of a CUDA graph"
    )


def _us(seconds: float) -> str:
    return f"{seconds * 1e6:.1f} µs" if math.isfinite(seconds) else "longer than fits"
