"""What patterns of a graph take, each distinct one predicted once: what training asks for ten thousand times.

Patterns are equal where their vertices are, what they read of each other and of the same tensors, and whose results
others need. So the layers of a network share their patterns.
"""

from __future__ import annotations

from collections.abc import Hashable

from souffle.cost.device import CostDevice
from souffle.stitching.graph import Op, OpGraph, members_of
from souffle.stitching.latency import LatencyEvaluator
from souffle.stitching.plan import Scheme

__all__ = ["PatternPrices"]


class PatternPrices:
    """Seconds of kernels of a graph on a GPU by the latency-evaluator (000 §4.3), with their launches.

    Parameters
    ----------
    graph : OpGraph
    device : CostDevice

    Attributes
    ----------
    predicted : int
        Patterns that were worked out; the others were known.
    """

    def __init__(self, graph: OpGraph, device: CostDevice) -> None:
        self.graph, self.device = graph, device
        self.predicted = 0
        self._evaluator = LatencyEvaluator(graph, device)
        self._of_mask: dict[int, float] = {}
        self._of_form: dict[Hashable, float] = {}
        self._below = tuple(sum(1 << consumer for consumer in consumers) for consumers in graph.consumers)
        numbers: dict[Hashable, int] = {}
        self._forms = [numbers.setdefault(_form(op), len(numbers)) for op in graph.ops]

    def __call__(self, pattern: int) -> float:
        """Of the vertices that are the bits of a number; infinite where no block has room for them."""
        known = self._of_mask.get(pattern)
        if known is None:
            members = tuple(members_of(pattern))
            form = self._form_of(pattern, members)
            known = self._of_form.get(form)
            if known is None:
                self.predicted += 1
                known = self._evaluator.kernel(members).seconds + self.device.launch_seconds
                self._of_form[form] = known
            self._of_mask[pattern] = known
        return known

    def schemes(self, members: tuple[int, ...]) -> dict[int, Scheme]:
        """How each vertex of a pattern is attached to those that read it."""
        return self._evaluator.kernel(members).schemes

    def _form_of(self, pattern: int, members: tuple[int, ...]) -> Hashable:
        """All that the evaluator sees of a pattern: equal for equal patterns."""
        place = {number: local for local, number in enumerate(members)}
        tensors: dict[object, int] = {}
        form: list[object] = []
        for number in members:
            op = self.graph.ops[number]
            escapes = op.needed or bool(self._below[number] & ~pattern)
            reads = tuple(
                ~place[read.producer] if read.producer in place else tensors.setdefault(read.tensor, len(tensors))
                for read in op.reads
            )
            form.append((self._forms[number], escapes, reads))
        return tuple(form)


def _form(op: Op) -> Hashable:
    """What the evaluator sees of a vertex by itself."""
    reads = tuple((one.bytes, one.times, one.constant, one.shape, one.alignments, one.indices) for one in op.reads)
    return op.kind, op.shape, op.reduced, op.written, op.work, reads
