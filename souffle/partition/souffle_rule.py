"""The paper's planner: greedy, breadth first, cut where one wave does not hold the blocks (paper §5.4, Algorithm 1).

A grid-wide barrier needs every block on the device at once. With one block for each tile, a subprogram of stages
``s`` is one kernel where

    max over compute-intensive s of tiles(s)  <=  SMs × min over resources of (what an SM has / max over s of what a
                                                  block of s needs)

The paper writes ``max_grid * max_occ < C``. A stage that would break it starts the next subprogram. Only
compute-intensive stages are candidates: the others take their producer's tiles in the paper, and here loop over their
own, so that any grid suits them. They still count on the right-hand side: the kernel is on the device as a whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

from souffle.decision import Decision, Refused
from souffle.partition.planner import Demand, Partition, PartitionRequest, Subprogram, breadth_first, is_extern
from souffle.schedule.gpu.device import GpuDevice
from souffle.schedule.stage import LoopStage, Unit, flat_stages

__all__ = ["SouffleRule"]


class SouffleRule:
    """See the module."""

    name = "souffle"
    measures = True

    def plan(self, request: PartitionRequest) -> Partition:
        """See :meth:`souffle.partition.planner.Planner.plan`.

        With the cuts there is a decision for each memory-intensive stage that would have made one, had it counted.
        """
        device = request.device
        parts: list[list[Unit]] = []
        decisions: list[Decision] = []
        cut = False
        total: Demand | None = None
        for unit in breadth_first(request.stages):
            own = request.demand(unit)
            if total is None:
                parts, total = [[unit]], own
                continue
            both = total.joined(own)
            reason = None
            if is_extern(unit) or is_extern(parts[-1][-1]):
                reason = "an operator that is no TE is a kernel of its own"
            elif own.grid and both.grid > both.wave(device):
                reason = _beyond(both, device)
            if reason is not None:
                decisions.append(Decision("partition", f"cut before {unit.name} ({unit.tes[0].origin})", True, reason))
                parts.append([unit])
                total, cut = own, True
                continue
            refused = _refused_cut(unit, own, total, both, device)
            if refused is not None:
                decisions.append(Decision("partition", f"cut before {unit.name}", False, refused.reason))
            parts[-1].append(unit)
            total = both
        if total is not None and not cut:
            decisions.append(Decision("partition", "no cut", True, _within(total, device)))
        return Partition(tuple(_subprogram(part, request) for part in parts), tuple(decisions), _unroll(request))


def _unroll(request: PartitionRequest) -> dict[str, str]:
    """Loops that hold a compute-intensive stage of more blocks than one wave: a kernel has to end inside."""
    demands = {unit.name: request.demand(unit) for unit in request.stages if isinstance(unit, LoopStage)}
    return {
        name: f"{_beyond(demand, request.device)}; a kernel ends inside"
        for name, demand in demands.items()
        if demand.grid > demand.wave(request.device)
    }


def _subprogram(units: Sequence[Unit], request: PartitionRequest) -> Subprogram:
    """A kernel that holds as many blocks on each multiprocessor as its largest compute-intensive stage needs.

    Merged, stages may take more registers than any does alone, unless the compiler is told. Where one wave does not
    hold a stage that stands alone, nothing is asked.
    """
    demand = reduce(Demand.joined, (request.demand(unit) for unit in units))
    fits = demand.grid <= demand.wave(request.device)
    return Subprogram(tuple(units), max(1, -(-demand.grid // request.device.sm_count)) if fits else 1)


def _beyond(demand: Demand, device: GpuDevice) -> str:
    return (
        f"{demand.grid} blocks of {demand.of_grid} exceed the {demand.wave(device)} of one wave "
        f"({demand.figures(device)})"
    )


def _within(demand: Demand, device: GpuDevice) -> str:
    if not demand.grid:
        return f"no stage is compute-intensive; one wave is {demand.wave(device)} blocks ({demand.figures(device)})"
    if demand.grid > demand.wave(device):
        return f"tiles take turns, and no compute-intensive stage follows: {_beyond(demand, device)}"
    return (
        f"the most blocks that a compute-intensive stage has, {demand.grid} of {demand.of_grid}, fit in one wave of "
        f"{demand.wave(device)} ({demand.figures(device)})"
    )


def _refused_cut(unit: Unit, own: Demand, before: Demand, both: Demand, device: GpuDevice) -> Refused | None:
    """Why a memory-intensive stage that one wave does not hold is not cut off, if it is one."""
    if own.grid:
        return None
    wave = both.wave(device)
    tiles = max(stage.schedule.tiles for stage in flat_stages([unit]))
    if tiles > wave:
        return Refused(f"it is memory-intensive: a wave of {wave} blocks loops over its {tiles} tiles")
    if both.grid > wave and before.grid <= before.wave(device):
        return Refused(
            f"it is memory-intensive, though it makes the wave smaller: {both.grid} tiles of {both.of_grid} take turns "
            f"on {wave} blocks ({both.figures(device)})"
        )
    return None
