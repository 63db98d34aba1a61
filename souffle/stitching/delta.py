"""The delta-evaluator: what fusing a pattern gains or loses, roughly and fast (000 §5.4).

    f = T_reduced_mem + T_reduced_calls - T_penalty

``T_reduced_mem``: what passes between members moves from global memory to registers or to shared memory, each a line of
latency and bandwidth (the paper's regression model, here from the device file). ``T_reduced_calls``: a launch less for
each kernel but one. ``T_penalty``: by the simplified latency-evaluator, how much longer the one kernel takes than its
members one by one, both with the global traffic that is left, so that nothing is counted twice: fewer units than a
member alone has, threads without work, fewer blocks on a multiprocessor, work that is repeated, synchronization.
"""

from __future__ import annotations

import math

from souffle.cost.device import CostDevice
from souffle.stitching.graph import OpGraph
from souffle.stitching.kinds import ELEMENTWISE, REDUCTIONS
from souffle.stitching.latency import LatencyEvaluator
from souffle.stitching.pattern_score import PatternScore
from souffle.stitching.plan import Scheme
from souffle.stitching.traffic import device_memory, read_inside, shared_memory

__all__ = ["MEMORY_INTENSIVE", "DeltaScore"]

MEMORY_INTENSIVE = ELEMENTWISE | REDUCTIONS
"""Kinds that are fused: all but gemm, convolution, and operators without an expression (000 §1)."""


class DeltaScore(PatternScore):
    """See the module; -inf where there is no kernel of a pattern."""

    def __init__(self, graph: OpGraph, device: CostDevice) -> None:
        super().__init__(graph, device)
        self.memory, self.shared = device_memory(device), shared_memory(device)
        self.latency = LatencyEvaluator(graph, device, simplified=True)

    def score(self, members: tuple[int, ...]) -> float:
        """See :class:`PatternScore`."""
        if any(self.graph.ops[number].kind not in MEMORY_INTENSIVE for number in members):
            return -math.inf
        inside = frozenset(members)
        fused = self.latency.kernel(members)
        gained = (len(members) - 1) * self.device.launch_seconds
        for number in members:
            volume = read_inside(self.graph, inside, number)
            gained += self.memory.seconds(volume)
            if fused.schemes[number] is Scheme.BLOCK:
                gained -= self.shared.seconds(volume)
        penalty = fused.seconds - sum(self.latency.alone(number, inside) for number in members)
        return gained - max(0.0, penalty)
