"""TVM's own operator fusion as a plan: the groups that its ``FuseOps`` makes of Relax operators, the kernels of V0."""

from __future__ import annotations

from souffle.decision import Decision
from souffle.stitching.graph import OpGraph
from souffle.stitching.plan import FusionPlan, Scheme, cycle_between, plan_of
from souffle.stitching.planner import FusionRequest

__all__ = ["TvmGroups"]


class TvmGroups:
    """See the module.

    A vertex without a TE is a kernel of its own. So is each TE of a group that a transformation has made part of a
    cycle.
    """

    name = "tvm"
    block_composition = False

    def plan(self, request: FusionRequest) -> FusionPlan:
        """See :meth:`souffle.stitching.planner.FusionPlanner.plan`."""
        graph = request.graph
        members: dict[str, list[int]] = {}
        for number, op in enumerate(graph.ops):
            if op.item is not None:
                members.setdefault(op.item.origin.group, []).append(number)
        groups, decisions = list(members.values()), []
        while (found := cycle_between(graph, groups)) is not None:
            cycle, told = found
            widest = groups.pop(max(cycle, key=lambda place: len(groups[place])))
            decisions.append(Decision("fusion", ", ".join(graph.ops[n].name for n in widest), False, told))
        schemes = {number: scheme for group in groups for number, scheme in _schemes(graph, group).items()}
        return plan_of(graph, groups, self.name, decisions, schemes=schemes)


def _schemes(graph: OpGraph, group: list[int]) -> dict[int, Scheme]:
    """What TVM fuses passes through registers, or is computed where it is read."""
    inside = set(group)
    return {n: Scheme.PACKING if inside.isdisjoint(graph.consumers[n]) else Scheme.THREAD for n in group}
