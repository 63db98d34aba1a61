"""Which subprograms stay one kernel: those that take longer than their stages as kernels of their own become these.

A merged kernel saves launches and pays with barriers, and with the occupancy of its most demanding stage. What a launch
costs depends on how the network is run: launched kernel by kernel, or as the nodes of one CUDA graph, each of which
follows the last sooner than the blocks of a large grid have waited for each other. So the same stages may be best as
one kernel in the first case and as many in the second.
"""

from __future__ import annotations

import math
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace

from souffle.choice.prices import KernelPrice, KernelPrices, runs_of
from souffle.cost import KernelForecast
from souffle.decision import Decision
from souffle.partition import Partition, PartitionRequest, Subprogram
from souffle.schedule.stage import Stage, Unit, flat_stages
from souffle.wording import counted

__all__ = ["ChosenKernels", "choose_kernels"]


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
    partition: Partition,
    request: PartitionRequest,
    forecast: KernelForecast,
    prices: KernelPrices,
    given: Container[str] = (),
) -> ChosenKernels:
    """Take apart the kernels that are predicted to take longer than their stages alone.

    Parameters
    ----------
    partition : Partition
    request : PartitionRequest
        What it was decided on.
    forecast : KernelForecast
        Its launch is that of the network: of a kernel, or of a node of a CUDA graph.
    prices : KernelPrices
    given : container of str
        The names of loops that stay, since the program was given with them.
    """
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
