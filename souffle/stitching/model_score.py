"""The score of 2019 (003 §4.3): what a pattern saves in bytes and launches, or in time.

    f(P) = M(V) + (N - 1) * launch                   V: bytes of global memory saved (``traffic.py``)

and a negative score where the shared memory that it needs does not suffice, or where a TE is fused that never is. That
is for most patterns that memory bounds. The paper runs complex ones, "for instance" those of products with reductions
and of row with column or scalar reductions,

    f(P) = sum of K(op) + (N - 1) * launch - K(P)

Without a GPU, ``K`` is predicted by the latency-evaluator (``latency.py``). Taken as complex are patterns with products
(memory does not bound them), rows with columns or scalars, and those that are left to one block, which bytes and
launches know nothing of: "the work space of the entire computation must be parallelizable" (§3.1).
"""

from __future__ import annotations

from collections.abc import Collection

from souffle.cost.device import CostDevice
from souffle.stitching.graph import OpGraph
from souffle.stitching.kinds import CONTRACTIONS, REDUCTIONS, Kind
from souffle.stitching.latency import LatencyEvaluator
from souffle.stitching.layout import layout_of
from souffle.stitching.pattern_score import PatternScore
from souffle.stitching.traffic import device_memory, volume_saved

__all__ = ["ALONE", "ModelScore", "is_complex", "is_large_gemm"]

ALONE = frozenset([Kind.WINDOW, Kind.EXTERN])
"""Kinds that are kernels of their own for both papers: convolutions, and operators without an expression."""


def is_large_gemm(graph: OpGraph, number: int, device: CostDevice) -> bool:
    """Whether a vertex is a gemm that is better left to a library (003 §4.2.1, §6.4).

    Where its multiply-adds take longer than a launch, at the rate of all fp32 units: what fusion saves with certainty
    is launches.
    """
    op = graph.ops[number]
    rate = device.fp32_per_clock_per_sm * device.sm_count * device.clock_hz
    return op.kind is Kind.GEMM and op.work.arithmetic / rate > device.launch_seconds


class ModelScore(PatternScore):
    """See the module."""

    def __init__(self, graph: OpGraph, device: CostDevice) -> None:
        super().__init__(graph, device)
        self.memory = device_memory(device)
        self.latency = LatencyEvaluator(graph, device)

    def score(self, members: tuple[int, ...]) -> float:
        """See :class:`PatternScore`."""
        ops = [self.graph.ops[number] for number in members]
        if any(op.kind in ALONE for op in ops) or any(is_large_gemm(self.graph, n, self.device) for n in members):
            return -1.0
        layout = layout_of(self.graph, members)
        if layout.peak > self.device.shared_per_block:
            return -1.0
        launches = (len(ops) - 1) * self.device.launch_seconds
        one_block = any(component.units == 1 for component in layout.components)
        if one_block or is_complex({op.kind for op in ops}):
            alone = sum(self.latency.alone(number, frozenset([number])) for number in members)
            return alone + launches - self.latency.kernel(members).seconds
        return self.memory.seconds(volume_saved(self.graph, members)) + launches


def is_complex(kinds: Collection[Kind]) -> bool:
    """Whether a pattern of these kinds is to be run rather than modelled."""
    reductions = REDUCTIONS.intersection(kinds)
    return bool(CONTRACTIONS.intersection(kinds)) or (Kind.ROW in reductions and len(reductions) > 1)
