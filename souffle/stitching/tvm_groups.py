"""The plan that level V0 follows: one kernel for each operator that TVM's FuseOps makes of Relax operators."""

from __future__ import annotations

from souffle.stitching.graph import OpGraph
from souffle.stitching.plan import FusionPlan, Scheme, plan_of

__all__ = ["tvm_plan"]


def tvm_plan(graph: OpGraph) -> FusionPlan:
    """TEs by the fused operator that they come from.

    Parameters
    ----------
    graph : OpGraph
        Of a program; a vertex without a TE is a kernel of its own.
    """
    groups: dict[str, list[int]] = {}
    for number, op in enumerate(graph.ops):
        if op.item is not None:
            groups.setdefault(op.item.origin.group, []).append(number)
    schemes = {}
    for members in groups.values():
        inside = set(members)
        # What TVM fuses passes through registers, or is computed where it is read.
        for number in members:
            schemes[number] = Scheme.PACKING if inside.isdisjoint(graph.consumers[number]) else Scheme.THREAD
    return plan_of(graph, groups.values(), "tvm", schemes=schemes)
