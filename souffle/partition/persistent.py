"""The persistent planner: one kernel for everything that can be one.

Stages loop over their tiles, so that a kernel launched with as many blocks as the device holds computes any of them;
what the paper's rule cuts for is then no reason to cut. Only operators that are no TEs do.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce

from souffle.decision import Decision
from souffle.partition.planner import Demand, PartitionRequest, Subprogram, is_extern
from souffle.schedule.stage import Unit

__all__ = ["Persistent"]


class Persistent:
    """See the module."""

    name = "persistent"
    measures = False

    def plan(self, request: PartitionRequest) -> tuple[tuple[Subprogram, ...], tuple[Decision, ...]]:
        """See :meth:`souffle.partition.planner.Planner.plan`."""
        parts: list[list[Unit]] = []
        decisions: list[Decision] = []
        for unit in request.stages:
            if parts and not is_extern(unit) and not is_extern(parts[-1][-1]):
                parts[-1].append(unit)
                continue
            if parts:
                reason = "an operator that is no TE is a kernel of its own"
                decisions.append(Decision("partition", f"cut before {unit.name} ({unit.tes[0].origin})", True, reason))
            parts.append([unit])
        if parts and not decisions:
            total = reduce(Demand.joined, (request.demand(unit) for unit in request.stages))
            wave, figures = total.wave(request.device), total.figures(request.device)
            reason = f"stages loop over their tiles in waves of {wave} blocks ({figures})"
            decisions.append(Decision("partition", "no cut", True, reason))
        return tuple(Subprogram(tuple(part)) for part in parts), tuple(decisions)

    def loops_to_take_apart(self, request: PartitionRequest) -> Mapping[str, str]:
        """None: a loop's stages loop over their tiles as all do."""
        return {}
