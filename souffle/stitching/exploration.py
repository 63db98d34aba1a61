"""Exploratory fusion: patterns grown from a seed by its producers and consumers (003 §4.2.2, Algorithm 2).

A vertex joins if it is element-wise, a reduction or a batched gemm, and if the pattern is in no cycle with it. Seeds
have at most 10 operands and large inputs or outputs: a transfer that takes longer than a launch, so that saving it is
worth more than saving a kernel. The search is depth first and gives up after so many patterns of a seed.
"""

from __future__ import annotations

from souffle.cost.device import CostDevice
from souffle.decision import Decision
from souffle.stitching.graph import OpGraph
from souffle.stitching.kinds import ELEMENTWISE, REDUCTIONS, Kind
from souffle.stitching.traffic import device_memory

__all__ = ["MOST_OPERANDS", "MOST_PATTERNS", "explored_patterns", "seeds_of"]

MOST_OPERANDS = 10
"""Of a seed: the paper's number."""

MOST_PATTERNS = 400
"""That one seed is grown to before the search gives up; the paper names no number. A bound on effort alone."""

_FUSIBLE = ELEMENTWISE | REDUCTIONS | {Kind.BATCHED_GEMM}


def seeds_of(graph: OpGraph, device: CostDevice) -> tuple[int, ...]:
    """The vertices from which patterns are grown."""
    memory = device_memory(device)
    return tuple(
        number
        for number, op in enumerate(graph.ops)
        if op.kind in _FUSIBLE
        and len(op.reads) <= MOST_OPERANDS
        and memory.seconds(max((op.written, *(read.bytes for read in op.reads)))) > device.launch_seconds
    )


def explored_patterns(
    graph: OpGraph, device: CostDevice, most: int = MOST_PATTERNS
) -> tuple[tuple[int, ...], tuple[Decision, ...]]:
    """Patterns grown from all seeds, each once, as the bits of a number; and where the search gave up.

    Parameters
    ----------
    graph : OpGraph
    device : CostDevice
    most : int
        Patterns of a seed.
    """
    found: dict[int, None] = {}
    decisions = []
    for seed in seeds_of(graph, device):
        grown, whole = _grown(graph, seed, most)
        found.update(dict.fromkeys(grown))
        if not whole:
            reason = f"the exploration was given up after {most} patterns"
            decisions.append(Decision("stitching", f"more patterns with {graph.ops[seed].name}", False, reason))
    return tuple(found), tuple(decisions)


def _grown(graph: OpGraph, seed: int, most: int) -> tuple[list[int], bool]:
    """Patterns that hold a seed, depth first, and whether these are all."""
    found: dict[int, None] = {}
    stack = [(1 << seed, graph.above[seed], graph.below[seed], iter(_neighbours(graph, 1 << seed)))]
    while stack:
        pattern, above, below, candidates = stack[-1]
        number = next(candidates, None)
        if number is None:
            stack.pop()
            continue
        grown = pattern | 1 << number
        higher, lower = above | graph.above[number], below | graph.below[number]
        if grown in found or higher & lower & ~grown:
            continue
        if len(found) == most:
            return list(found), False
        found[grown] = None
        stack.append((grown, higher, lower, iter(_neighbours(graph, grown))))
    return list(found), True


def _neighbours(graph: OpGraph, pattern: int) -> list[int]:
    """Fusible producers, then consumers of a pattern's vertices, outside of it."""
    producers: dict[int, None] = {}
    consumers: dict[int, None] = {}
    mask = pattern
    while mask:
        low = mask & -mask
        number = low.bit_length() - 1
        producers.update(dict.fromkeys(graph.producers[number]))
        consumers.update(dict.fromkeys(graph.consumers[number]))
        mask ^= low
    return [n for n in {**producers, **consumers} if not pattern >> n & 1 and graph.ops[n].kind in _FUSIBLE]
