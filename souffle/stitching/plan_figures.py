"""What a fusion plan is said to cost, the same way for all planners: bytes of global memory, shared memory, seconds.

Bytes are distinct ones: a kernel reads what it needs of a tensor once, and writes what others or the caller need.
Shared memory is that of Algorithm 4 of 003 (``shared.py``), of one unit of each component of a pattern (``layout.py``).
Seconds are the latency-evaluator's of 000, with a launch for each kernel.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from souffle.cost.device import CostDevice
from souffle.stitching.graph import Op, OpGraph
from souffle.stitching.kinds import ELEMENTWISE, REDUCTIONS
from souffle.stitching.latency import LatencyEvaluator
from souffle.stitching.layout import Component, layout_of
from souffle.stitching.plan import FusionPattern, FusionPlan, Scheme
from souffle.stitching.shared import SharedPlan, SharedRequest, plan_shared

__all__ = ["Traffic", "is_memory_intensive", "predicted_seconds", "shared_plans", "traffic_of"]


@dataclass(frozen=True)
class Traffic:
    """Bytes of global memory that kernels move.

    Attributes
    ----------
    read, written : int
        All.
    between : int
        Of these, what one kernel writes for another, and what is read of it.
    """

    read: int = 0
    written: int = 0
    between: int = 0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.read + other.read, self.written + other.written, self.between + other.between)


def traffic_of(graph: OpGraph, plan: FusionPlan, patterns: Iterable[FusionPattern] | None = None) -> Traffic:
    """What the kernels of a plan move, or some of them.

    Parameters
    ----------
    graph : OpGraph
    plan : FusionPlan
    patterns : iterable of FusionPattern, optional
        Some of the plan.
    """
    loaded: set[int] = set()  # vertices whose results another kernel loads
    reads: list[dict[object, tuple[int, bool]]] = []
    for pattern in plan.patterns:
        inside = {*pattern.members, *pattern.recomputed}
        own: dict[object, tuple[int, bool]] = {}
        for number in inside:
            for read in graph.ops[number].reads:
                if read.producer not in inside:
                    size = max(own.get(read.tensor, (0, False))[0], read.bytes)
                    own[read.tensor] = size, read.producer is not None
                    loaded |= {read.producer} - {None}
        reads.append(own)
    of = {id(pattern): own for pattern, own in zip(plan.patterns, reads, strict=True)}
    total = Traffic()
    for pattern in plan.patterns if patterns is None else patterns:
        own = of[id(pattern)].values()
        handed = sum(graph.ops[n].written for n in pattern.members if n in loaded)
        written = sum(graph.ops[n].written for n in pattern.members if n in loaded or graph.ops[n].needed)
        between = handed + sum(size for size, made in own if made)
        total += Traffic(sum(size for size, _ in own), written, between)
    return total


def is_memory_intensive(pattern: FusionPattern) -> bool:
    """Whether a kernel has no product, no convolution and no operator without an expression (000 §1)."""
    return all(kind in ELEMENTWISE or kind in REDUCTIONS for kind in pattern.kinds)


def shared_plans(graph: OpGraph, pattern: FusionPattern) -> list[SharedPlan]:
    """Where results lie that a unit of each component keeps in shared memory: those that are attached by block."""
    schemes = dict(zip(pattern.members, pattern.schemes, strict=True))
    components = layout_of(graph, pattern.members).components
    return [plan_shared(_requests(graph, component, schemes)) for component in components]


def _requests(graph: OpGraph, component: Component, schemes: dict[int, Scheme | None]) -> list[SharedRequest]:
    found = []
    inside = set(component.members)
    for number in component.members:
        op = graph.ops[number]
        producers = [producer for producer in graph.producers[number] if producer in inside]
        size = component.shared.get(number, 0) if schemes[number] is Scheme.BLOCK else 0
        own = frozenset(str(producer) for producer in producers if _reads_own_element(graph, op, producer))
        found.append(SharedRequest(str(number), tuple(map(str, producers)), size, own))
    return found


def _reads_own_element(graph: OpGraph, op: Op, producer: int) -> bool:
    """Whether a vertex reads of another the element that it computes, and no other."""
    shape = graph.ops[producer].shape
    if op.reduced or shape != op.shape:
        return False
    reads = [read for read in op.reads if read.producer == producer]
    same = {(axis, axis, extent) for axis, extent in enumerate(shape) if extent > 1}
    return all(read.times <= 1 and same <= set(map(tuple, read.alignments)) for read in reads)


def predicted_seconds(graph: OpGraph, plan: FusionPlan, device: CostDevice) -> float:
    """All kernels one after another by the latency-evaluator, with their launches; what is computed again counts."""
    evaluator = LatencyEvaluator(graph, device)
    kernels = (evaluator.kernel(one.members, recomputed=one.recomputed).seconds for one in plan.patterns)
    return sum(kernels) + len(plan.patterns) * device.launch_seconds
